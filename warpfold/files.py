"""Files and folders: portable names, safe reading, and writing that leaves a whole file or none."""

import contextlib
import csv
import errno
import fcntl
import gzip
import hashlib
import io
import json
import logging
import os
import platform
import re
import secrets
import stat
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from tokenize import TokenError
from typing import Any, BinaryIO, TextIO, cast

from warpfold.errors import DiskError, UserError

logger = logging.getLogger("warpfold")

# flock's errors on a file system without locks: NFS without its lock daemon, Lustre without -o flock, some of FUSE.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
# Errors of a disk, not of one file.  ESTALE: of a file server that has lost the folder.
OF_DISKS = (*NO_ROOM, errno.EROFS, errno.EIO, errno.ENXIO, errno.ENODEV, errno.ESTALE)
LARGEST = 4 * 10**9  # bytes that a user's file may have when it is unpacked, unless told otherwise
# What NumPy raises for damaged arrays and archives of them.  RuntimeError: of zipfile, for what is encrypted or
# compressed in a way that it does not know.  MemoryError: for an array that is as large as no file.  TokenError: for
# some damaged heads.
DAMAGED_ARRAYS = (ValueError, OSError, EOFError, RuntimeError, MemoryError, TokenError, zipfile.BadZipFile, zlib.error)
LOCK_LASTS = 120  # seconds to wait for a lock of another machine: NFSv4's servers keep those of dead clients 90 s
_PIECE = 1 << 20  # bytes unpacked at a time
_KEPT = 1 << 28  # bytes; a file that unpacks to more is unpacked twice: to find its size, then to keep it


def is_address(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is meant as an address, such as s3://bucket/name.

    A pathlib.Path has lost the second slash. One letter before the colon would be a drive.
    """
    return bool(re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+:/", os.fspath(path)))


def file_name(name: str) -> str:
    """Return a protein's name as a file name: without characters that file systems or shells treat specially."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in name)
    return kept.lstrip(".-")[:100] or "target"


def open_regular(path: Path) -> int:
    """Open a file for reading and return its descriptor; refuse pipes, sockets and devices without opening them.

    Opening a pipe that nobody writes to would wait forever.
    Errors: UserError if it is no regular file; OSError if it cannot be opened.
    """
    _refuse_irregular(path, os.stat(path).st_mode)
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # another process may have put a pipe there meanwhile
    with contextlib.ExitStack() as unless_regular:
        unless_regular.callback(os.close, file)
        _refuse_irregular(path, os.fstat(file).st_mode)
        unless_regular.pop_all()
    return file


def is_given_pipe(path: Path) -> bool:
    """Return whether a path is a pipe that this process was started with: /dev/stdin, or a shell's <(command).

    Some process writes to such a pipe, or has ended; nobody may ever write to a pipe in a folder.
    """
    with contextlib.suppress(OSError):
        return stat.S_ISFIFO(os.stat(path).st_mode) and os.path.realpath(path).startswith(("/proc/", "/dev/fd/"))
    return False


def _refuse_irregular(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise UserError(f"{path}: is a pipe, a socket or a device; give a regular file")


@contextlib.contextmanager
def opened(path: Path, unpack: bool = True, pipe: bool = False) -> Iterator[BinaryIO]:
    """Open a file for reading, unpacked if it is gzipped; errors while it is read become a UserError.

    pipe: it may be a pipe that this process was given, which can be read once.
    """
    try:
        given = pipe and is_given_pipe(path)
        with os.fdopen(os.open(path, os.O_RDONLY) if given else open_regular(path), "rb") as file:
            if unpack and file.peek(2)[:2] == b"\x1f\x8b":
                with gzip.open(file) as unpacked:
                    yield cast(BinaryIO, unpacked)
            else:
                yield file
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise UserError(f"{path}: the gzip stream is cut short or damaged; fetch the file again") from None
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; check the path") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder; give a file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None


def read_file(path: str | Path, limit: int = LARGEST, pipe: bool = False) -> bytes:
    """Read a whole file, unpacked if it is gzipped.

    limit: bytes that it may have when unpacked.  Reading stops as soon as the limit is passed, and the size of a long
    stream is found before any of it is kept, so that a small file that unpacks to a huge one takes no memory.
    pipe: as in `opened`; a pipe can be read once only, so its contents are kept while they are read, up to the limit.
    Errors: UserError as in `opened`, and for a file that is larger or has nothing but blanks.
    """
    too_large = UserError(
        f"{path}: has more than {limit / 1e9:g} GB when unpacked; leave it out, or allow more (pack --max-file-gb)"
    )
    path = Path(path)
    given = pipe and is_given_pipe(path)
    with opened(path, pipe=pipe) as file:
        if given or isinstance(file, gzip.GzipFile):
            most_kept = limit if given else _KEPT
            pieces, size = [], 0
            while piece := file.read(_PIECE):
                size += len(piece)
                if size > limit:
                    raise too_large
                if size <= most_kept:
                    pieces.append(piece)
                else:
                    pieces.clear()
            if size > most_kept:
                file.seek(0)
                pieces = [file.read(size)]
            data = b"".join(pieces)
        else:
            if os.fstat(file.fileno()).st_size > limit:
                raise too_large
            data = file.read()
    if not data.strip():
        raise UserError(f"{path}: is empty; fetch or write the file again")
    return data


@contextlib.contextmanager
def writing(path: PurePath, cure: str = "") -> Iterator[None]:
    """Turn OSError into what `cannot_write` returns."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error, cure) from error


def cannot_write(path: PurePath, error: Exception, cure: str = "", kept: str = "") -> UserError:
    """Return the error that `path` cannot be written: a DiskError where the disk is to blame.

    cure: what to do about another error.  kept: what is safe, for the text.
    """
    number, why = error_number(error), (error.strerror if isinstance(error, OSError) else None) or str(error)
    if number in OF_DISKS:
        cure = "make room" if number in NO_ROOM else "see to the disk"
    text = "; ".join(part for part in (f"{path}: cannot be written: {why}", kept, cure) if part)
    return DiskError(text) if number in OF_DISKS else UserError(text)


def error_number(error: Exception) -> int | None:
    """Return the system's number of an error, which safetensors puts into its text."""
    said = re.search(r"os error (\d+)", str(error))
    return error.errno if isinstance(error, OSError) else int(said[1]) if said else None


@contextlib.contextmanager
def within_memory(name: str) -> Iterator[None]:
    """Turn MemoryError into a UserError about one file, so that the others can still be read."""
    try:
        yield
    except MemoryError:
        raise UserError(f"{name}: takes more memory than there is") from None


def pread(file: int, size: int, offset: int) -> bytes:
    """Read `size` bytes at `offset`, or as many as the file has; one `os.pread` returns 0x7ffff000 at most on Linux."""
    data = os.pread(file, size, offset)
    if len(data) == size:
        return data
    pieces, missing = [data], size - len(data)
    while missing and (data := os.pread(file, missing, offset + size - missing)):
        pieces.append(data)
        missing -= len(data)
    return b"".join(pieces)


def write_atomically(
    path: Path, content: str | bytes | bytearray | Iterable[str | bytes | memoryview], sync: bool = True
) -> None:
    """Write a file so that the whole file appears or nothing does, even if this process is killed.

    content: all of it, or its pieces one after another.
    sync: even after a power cut; False for a file that can be made again.
    Errors: UserError when it cannot be written (no folder, no permission, a full disk).
    """
    with writing(path), contextlib.ExitStack() as in_the_end:
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)  # less the umask
        in_the_end.callback(draft.unlink, missing_ok=True)
        with os.fdopen(descriptor, "wb") as file:
            pieces = (content,) if isinstance(content, str | bytes | bytearray) else content
            file.writelines(piece.encode() if isinstance(piece, str) else piece for piece in pieces)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(draft, path)


def write_new(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file that is not there yet, by `write` to the path that it is given: the whole file appears, or nothing.

    Errors: UserError if there is one by then, which is left alone, or when it cannot be written.
    """
    check_new(path)
    with writing(path), contextlib.ExitStack() as in_the_end:
        draft = path.with_name(f".{secrets.token_hex(4)}.{path.name}")  # with its ending, which NumPy would add
        in_the_end.callback(draft.unlink, missing_ok=True)
        write(draft)
        try:
            os.link(draft, path)  # unlike a renaming, this replaces nothing
        except FileExistsError:
            raise UserError(f"{path}: exists already; remove it, or name another file") from None
        except OSError:  # a file system without links
            check_new(path)
            os.replace(draft, path)


def update_file(path: Path, content: bytes) -> None:
    """Write a file that can be made again, and its folders; leave it alone if it has this content already.

    So its time stays, by which `warpfold pack` tells whether its inputs have changed.
    Errors: UserError when it cannot be written.
    """
    with writing(path):
        if path.is_file() and path.read_bytes() == content:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content, sync=False)


def lock_file(path: Path, taken: UserError) -> TextIO:
    """Open a file, without changing it, and lock it until it is closed or this process ends.

    On a file system without locks this logs a warning, and nothing keeps a second process out.
    Errors: `taken` when another process holds the lock; OSError when the file cannot be opened or locked.
    """
    file = open(path, "a")  # noqa: SIM115 (the caller closes it)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise taken from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            file.close()
            raise
        logger.warning("%s: this file system has no locks (%s); start no second process there", path, error.strerror)
    return file


def wait_for_lock(path: Path, taken: UserError) -> TextIO:
    """Lock a file as `lock_file` does, and write into it who holds it; wait for a lock that may be a dead machine's.

    A process of this machine that has ended holds nothing.  A file server may keep the lock of a machine that is gone,
    so one of another machine, or of nobody knows whom, is waited for, `LOCK_LASTS` seconds at most.
    Errors: as of `lock_file`; `taken` with who holds the lock.
    """
    for waited in range(LOCK_LASTS + 1):
        try:
            file = lock_file(path, taken)
        except UserError:
            holder = " ".join(path.read_text(encoding="utf-8", errors="replace").split())[:200]
            if waited == LOCK_LASTS or holder.endswith(f" on {platform.node()}"):
                raise UserError(f"{taken} (it is locked by {holder or 'an unknown process'})") from None
            if waited % 15 == 0:
                logger.warning(
                    "%s: locked by %s; waiting, for a file server may keep the lock of a machine that is gone "
                    "(%d s of at most %d)", path, holder or "an unknown process", waited, LOCK_LASTS,
                )  # fmt: skip
            time.sleep(1)
        else:
            if not path.stat().st_size or path.read_bytes().startswith(b"process "):  # else it is somebody's file
                file.truncate(0)
                file.write(f"process {os.getpid()} on {platform.node()}\n")
                file.flush()
            return file
    raise AssertionError


def check_new(path: Path) -> None:
    """Raise UserError unless a new file can be made at `path`; called before minutes of work go into its content."""
    if os.path.lexists(path):
        raise UserError(f"{path}: exists already; remove it, or name another file")
    if not os.access(path.parent, os.W_OK | os.X_OK) or not path.parent.is_dir():
        raise UserError(f"{path}: cannot be written: {path.parent} is not a folder that can be written")


def sealed_tensors(data: bytes) -> list[bytes | memoryview]:
    """Return the pieces of a safetensors file with its own checksum in its metadata, which `check_tensors` reads."""
    size = int.from_bytes(data[:8], "little")
    header, tensors = json.loads(data[8 : 8 + size]), memoryview(data)[8 + size :]
    digest = _digest_of_tensors(header)
    digest.update(tensors)
    header["__metadata__"] = header.get("__metadata__", {}) | {"checksum": digest.hexdigest()}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    return [len(text).to_bytes(8, "little"), text, tensors]


def check_tensors(path: Path, always: bool = False) -> None:
    """Raise ValueError unless a safetensors file is, bit for bit, what `sealed_tensors` gave.

    always: one without a checksum, of another program or an earlier version, is refused, too.
    Errors: OSError where it cannot be read.
    """
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(min(size, os.fstat(file.fileno()).st_size)))
            found = header.get("__metadata__", {}).pop("checksum", None)
        except (ValueError, AttributeError, TypeError, RecursionError):
            raise ValueError("its header is damaged") from None
        if found is not None or always:
            digest = _digest_of_tensors(header)
            while piece := file.read(_PIECE):
                digest.update(piece)
            if found != digest.hexdigest():
                raise ValueError("it does not fit its checksum")


def _digest_of_tensors(header: Mapping[str, Any]) -> "hashlib.blake2b":
    """Return a digest that has seen a header, however it is written."""
    if not header.get("__metadata__", True):
        header = {name: value for name, value in header.items() if name != "__metadata__"}
    return hashlib.blake2b(json.dumps(header, sort_keys=True).encode(), digest_size=16)


def digest_of(data: bytes | memoryview) -> str:
    """Return the BLAKE2b digest of bytes, 128 bits in hexadecimal."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def checksum(path: Path) -> str:
    """Return `digest_of` a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal, as `sha256sum` prints it.  Errors: as of `opened`."""
    with opened(path, unpack=False) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # it has readinto


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object with its own checksum: one that was read and is equal to this is as it was written."""
    plain = {key: one for key, one in value.items() if key != "checksum"}
    return plain | {"checksum": digest_of(json.dumps(plain).encode())}


def as_csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]], header: bool = True) -> str:
    """Write rows as CSV: what a row lacks is empty, and what else it has is left out."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


@contextlib.contextmanager
def row_file(path: Path | None) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Give a function that adds a row to a new file, a JSON object a line, and has it on the disk when it returns; so
    that what ends early keeps what it measured.  None: the function does nothing.
    """
    if path is None:
        yield lambda row: None
        return
    with open(path, "x", encoding="utf-8") as file:

        def add(row: Mapping[str, Any]) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

        yield add


def lock_folder(folder: Path, what: PurePath) -> TextIO:
    """Make `folder` and lock it for this process, until the returned file is closed or the process ends.

    Errors: UserError, about `what`, if another process holds the lock or the folder cannot be written.
    """
    path, taken = folder / "lock", UserError(f"{what}: another process is writing this store; wait for it")
    with writing(what):
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                file = lock_file(path, taken)
            except FileNotFoundError:
                # Another process has renamed or removed the folder since.  A link to nowhere never works.
                if path.is_symlink():
                    raise
                continue
            # The folder may have been renamed or removed after its file was opened: then the lock is of no use here.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    return file
            file.close()


def refuse_foreign(folder: Path, is_own: Callable[[str], object]) -> None:
    """Raise UserError if `folder` exists and holds a file that is not the writer's own: it may be somebody's work."""
    with writing(folder):
        names = os.listdir(folder) if folder.exists() else []
    # NFS removes its own .nfs files later.
    if foreign := sorted(name for name in names if not name.startswith(".nfs") and not is_own(name)):
        raise UserError(
            f"{folder}: holds {foreign[0]}, which WarpFold did not write; move it away, or choose another name"
        )


def remove_own(folder: Path, is_own: Callable[[str], object]) -> None:
    """Remove the writer's own files from `folder`, and the folder if that empties it; keep what cannot be removed.

    Its lock is removed last, because the next writer may begin as soon as it is gone.
    """
    with contextlib.suppress(OSError):
        for name in sorted(filter(is_own, os.listdir(folder)), key=lambda name: name == "lock"):
            with contextlib.suppress(OSError):
                (folder / name).unlink()
        folder.rmdir()


class DraftFolder:
    """The folder `path.partial` of this process alone, which gets the name `path` when it is complete.

    is_own: says which names are of files that the writer makes.
    Errors: UserError if `path` exists, another process holds the draft, it has other files, or it cannot be written.
    """

    def __init__(self, path: Path, is_own: Callable[[str], object]) -> None:
        taken = UserError(f"{path}: exists already; remove it, or choose another name")
        if path.exists():
            raise taken
        self.path, self.folder, self._is_own = path, path.with_name(f"{path.name}.partial"), is_own
        refuse_foreign(self.folder, is_own)
        self._lock = lock_folder(self.folder, path)
        if path.exists():  # another process has completed it in the meantime
            self.remove()
            raise taken

    @property
    def is_open(self) -> bool:
        return not self._lock.closed

    def complete(self) -> None:
        """Give the folder its name, and release it.  Errors: UserError if it cannot be written."""
        with writing(self.path):
            sync_path(self.folder)
            # The lock is held until the folder has its name.  Otherwise another writer could lock it in between, take
            # it for one that a kill has left, and empty it.
            self.folder.rename(self.path)
            # Another process may use a finished part, and remove it, from here on.
            (self.path / "lock").unlink(missing_ok=True)
            sync_path(self.path.parent)
        self.folder = self.path
        self.release()

    def remove(self) -> None:
        """Remove the writer's own files and the folder, and release it."""
        remove_own(self.folder, self._is_own)
        self.release()

    def release(self) -> None:
        """Leave the draft to the next writer."""
        self._lock.close()


def sync_path(path: Path) -> None:
    """Wait until a file's contents, or a folder's list of names, are on the disk and survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
