"""Files and folders: portable names, safe reading, atomic writing and locks."""

import contextlib
import csv
import errno
import fcntl
import gzip
import hashlib
import io
import itertools
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

from warpfold.errors import DiskError, UserError, printable

logger = logging.getLogger("warpfold")

# The errors of flock on file systems without locks: NFS without lock daemon, Lustre without -o flock, some of FUSE.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
# Errors that concern the disk rather than one file. ESTALE: the file server no longer knows the folder.
DISK_ERRORS = (*NO_ROOM, errno.EROFS, errno.EIO, errno.ENXIO, errno.ENODEV, errno.ESTALE)
# The default limit for the unpacked size of a user's file, bytes.
LARGEST = 4 * 10**9
# The errors that NumPy raises for damaged arrays and archives. zipfile raises RuntimeError for encryption and unknown
# compression, a damaged shape causes MemoryError, and some damaged headers cause TokenError.
DAMAGED_ARRAYS = (ValueError, OSError, EOFError, RuntimeError, MemoryError, TokenError, zipfile.BadZipFile, zlib.error)
# Seconds to wait for a lock of another machine. NFSv4 servers release the locks of dead clients after 90 s.
LOCK_LASTS = 120
# Bytes unpacked at a time.
_BLOCK_BYTES = 1 << 20
# Files that unpack to more bytes are unpacked twice: once for their size, and once for their content.
_BUFFERED_BYTES = 1 << 28


def is_address(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is an address, such as s3://bucket/name.

    pathlib.Path drops the second slash. A single letter before the colon is a drive.
    """
    return bool(re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+:/", os.fspath(path)))


def file_name(name: str) -> str:
    """Convert a protein's name to a file name, without characters that file systems or shells treat specially."""
    portable = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in name)
    return portable.lstrip(".-")[:100] or "target"


def open_regular(path: Path) -> int:
    """Open a regular file for reading and return its descriptor, without opening pipes, sockets and devices.

    Opening a pipe without a writer would wait forever.
    Errors: UserError for other kinds of files; OSError if the file cannot be opened.
    """
    _refuse_irregular(path, os.stat(path).st_mode)
    # Another process may have replaced the file by a pipe since.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with contextlib.ExitStack() as unless_regular:
        unless_regular.callback(os.close, file)
        _refuse_irregular(path, os.fstat(file).st_mode)
        unless_regular.pop_all()
    return file


def is_given_pipe(path: Path) -> bool:
    """Return whether a path is a pipe that this process was started with: /dev/stdin, or a shell's <(command).

    Such a pipe has a writer, or its writer has ended. A pipe in a folder may never get a writer.
    """
    with contextlib.suppress(OSError):
        return stat.S_ISFIFO(os.stat(path).st_mode) and os.path.realpath(path).startswith(("/proc/", "/dev/fd/"))
    return False


def _refuse_irregular(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise UserError(f"{path}: is a pipe, a socket or a device. Pass a regular file.")


@contextlib.contextmanager
def opened(path: Path, unpack: bool = True, pipe: bool = False) -> Iterator[BinaryIO]:
    """Open a file for reading and decompress gzip. Errors during reading become UserErrors.

    pipe: accept a pipe that this process was started with. A pipe can be read only once.
    """
    try:
        from_pipe = pipe and is_given_pipe(path)
        with os.fdopen(os.open(path, os.O_RDONLY) if from_pipe else open_regular(path), "rb") as file:
            if unpack and file.peek(2)[:2] == b"\x1f\x8b":
                with gzip.open(file) as unpacked:
                    yield cast(BinaryIO, unpacked)
            else:
                yield file
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise UserError(f"{path}: the gzip stream is cut short or damaged. Fetch the file again.") from None
    except FileNotFoundError:
        raise UserError(f"{path}: no such file. Check the path.") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder. Pass a file.") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}). Check its permissions.") from None


def read_file(path: str | Path, limit: int = LARGEST, pipe: bool = False) -> bytes:
    """Read a whole file and decompress gzip.

    limit: the largest unpacked size, bytes. Reading stops at the limit. Long streams are measured before they are
        stored, so that a small file that unpacks to a huge one takes no memory.
    pipe: as in `opened`. A pipe is stored while it is read, because it can be read only once.
    Errors: UserError as in `opened`, and for files that are larger or blank.
    """
    too_large = UserError(
        f"{path}: has more than {limit / 1e9:g} GB when unpacked. Leave it out, or allow more: pack --max-file-gb."
    )
    path = Path(path)
    from_pipe = pipe and is_given_pipe(path)
    with opened(path, pipe=pipe) as file:
        if from_pipe or isinstance(file, gzip.GzipFile):
            buffer_limit = limit if from_pipe else _BUFFERED_BYTES
            blocks, size = [], 0
            while block := file.read(_BLOCK_BYTES):
                size += len(block)
                if size > limit:
                    raise too_large
                if size <= buffer_limit:
                    blocks.append(block)
                else:
                    blocks.clear()
            if size > buffer_limit:
                file.seek(0)
                blocks = [file.read(size)]
            data = b"".join(blocks)
        else:
            if os.fstat(file.fileno()).st_size > limit:
                raise too_large
            data = file.read()
    if not data.strip():
        raise UserError(f"{path}: is empty. Fetch or write the file again.")
    return data


@contextlib.contextmanager
def writing(path: PurePath, cure: str = "") -> Iterator[None]:
    """Convert OSError to the error of `cannot_write`."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error, cure) from error


def cannot_write(path: PurePath, error: Exception, cure: str = "", kept: str = "") -> UserError:
    """Build the error for a path that cannot be written: a DiskError if the disk is the cause.

    cure: the remedy for other errors, a sentence without a period.
    kept: a sentence about the data that are safe.
    """
    number, reason = error_number(error), (error.strerror if isinstance(error, OSError) else None) or str(error)
    if number in DISK_ERRORS:
        cure = "Make room" if number in NO_ROOM else "Check the disk"
    text = "".join(f"{part}. " for part in (f"{path}: cannot be written: {reason}", kept, cure) if part).rstrip()
    return DiskError(text) if number in DISK_ERRORS else UserError(text)


def error_number(error: Exception) -> int | None:
    """Return the errno of an error. safetensors reports it only in the text."""
    number = re.search(r"os error (\d+)", str(error))
    return error.errno if isinstance(error, OSError) else int(number[1]) if number else None


@contextlib.contextmanager
def within_memory(name: str) -> Iterator[None]:
    """Convert MemoryError to a UserError about one file, so that the other files can still be read."""
    try:
        yield
    except MemoryError:
        raise UserError(f"{name}: takes more memory than there is") from None


def pread(file: int, size: int, offset: int) -> bytes:
    """Read `size` bytes at `offset`, or fewer at the end of the file.

    A single `os.pread` returns at most 0x7ffff000 bytes on Linux.
    """
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
    """Write a file atomically: the complete file appears or nothing does, even if this process is killed.

    content: the content, or consecutive parts of it.
    sync: also survive a power cut. False suits files that can be written again.
    Errors: UserError if the file cannot be written (missing folder, no permission, full disk).
    """
    with writing(path), contextlib.ExitStack() as in_the_end:
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        in_the_end.callback(draft.unlink, missing_ok=True)
        with os.fdopen(descriptor, "wb") as file:
            pieces = (content,) if isinstance(content, str | bytes | bytearray) else content
            file.writelines(piece.encode() if isinstance(piece, str) else piece for piece in pieces)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(draft, path)


def write_new(path: Path, write: Callable[[Path], None]) -> None:
    """Write a new file atomically by calling `write` with a temporary path.

    Errors: UserError if the file exists by then, which is left as it is, and if it cannot be written.
    """
    check_new(path)
    with writing(path), contextlib.ExitStack() as in_the_end:
        # The draft has the extension of the file, because NumPy would add a missing one.
        draft = path.with_name(f".{secrets.token_hex(4)}.{path.name}")
        in_the_end.callback(draft.unlink, missing_ok=True)
        write(draft)
        try:
            # Unlike renaming, linking does not replace an existing file.
            os.link(draft, path)
        except FileExistsError:
            raise UserError(f"{path}: exists already. Remove it, or name another file.") from None
        except OSError:
            # This file system has no links.
            check_new(path)
            os.replace(draft, path)


def append_line(path: Path, text: str) -> None:
    """Append the time and a text to a log as one line and in one write, so that lines of several processes do not mix.

    Nothing is written into links and pipes. Errors are ignored, because a log must not end a run.
    """
    line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {printable(' '.join(text.split()))}\n"
    with contextlib.suppress(OSError):
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        with os.fdopen(os.open(path, flags, 0o666), "ab", buffering=0) as file:
            file.write(line.encode())


def update_file(path: Path, content: bytes) -> None:
    """Write a file and its folders, unless the file already has this content.

    An unchanged file keeps its modification time, from which `warpfold pack` detects changed inputs.
    Errors: UserError if the file cannot be written.
    """
    with writing(path):
        if path.is_file() and path.read_bytes() == content:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content, sync=False)


def lock_file(path: Path, taken: UserError) -> TextIO:
    """Open a file without changing it, and lock it until it is closed or this process ends.

    On a file system without locks this function logs a warning and does not exclude other processes.
    Errors: `taken` if another process holds the lock; OSError if the file cannot be opened or locked.
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
    """Lock a file as `lock_file` does, and write the holder into it. Wait for locks that may belong to dead machines.

    The operating system releases the locks of ended processes of this machine. A file server may keep the lock of a
    dead machine for a while, so this function waits up to `LOCK_LASTS` seconds for locks of other machines and unknown
    holders.
    Errors: those of `lock_file`; `taken` names the holder.
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
            # A file with other content belongs to the user.
            if not path.stat().st_size or path.read_bytes().startswith(b"process "):
                file.truncate(0)
                file.write(f"process {os.getpid()} on {platform.node()}\n")
                file.flush()
            return file
    raise AssertionError


def check_exists(file: Path) -> None:
    """Raise UserError if there is no such file or folder."""
    # Unlike Path.exists, this returns False for names that are too long.
    if not os.path.exists(file):
        raise UserError(f"{file}: no such file. Check the path.")


def check_new(path: Path) -> None:
    """Raise UserError unless a new file can be created at `path`. Call it before long computations."""
    if os.path.lexists(path):
        raise UserError(f"{path}: exists already. Remove it, or name another file.")
    if not os.access(path.parent, os.W_OK | os.X_OK) or not path.parent.is_dir():
        raise UserError(f"{path}: cannot be written: {path.parent} is not a writable folder. Name another path.")


def sealed_tensors(data: bytes) -> list[bytes | memoryview]:
    """Add a checksum to the metadata of a safetensors file. `check_tensors` verifies it.

    data: the file. Returns consecutive parts of the new file.
    """
    size = int.from_bytes(data[:8], "little")
    header, tensors = json.loads(data[8 : 8 + size]), memoryview(data)[8 + size :]
    digest = _digest_of_tensors(header)
    digest.update(tensors)
    header["__metadata__"] = header.get("__metadata__", {}) | {"checksum": digest.hexdigest()}
    text = json.dumps(header, separators=(",", ":")).encode()
    # Tensors start at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, tensors]


def check_tensors(path: Path, always: bool = False) -> None:
    """Raise ValueError if a safetensors file does not match its checksum.

    always: also reject files without a checksum, which other programs wrote.
    Errors: OSError if the file cannot be read.
    """
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(min(size, os.fstat(file.fileno()).st_size)))
            stored = header.get("__metadata__", {}).pop("checksum", None)
        except (ValueError, AttributeError, TypeError, RecursionError):
            raise ValueError("its header is damaged") from None
        if stored is not None or always:
            digest = _digest_of_tensors(header)
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
            if stored != digest.hexdigest():
                raise ValueError("it does not fit its checksum")


def _digest_of_tensors(header: Mapping[str, Any]) -> "hashlib.blake2b":
    """Start a digest with the header, independent of the order of its keys and of white space."""
    if not header.get("__metadata__", True):
        header = {name: value for name, value in header.items() if name != "__metadata__"}
    return hashlib.blake2b(json.dumps(header, sort_keys=True).encode(), digest_size=16)


def digest_of(data: bytes | memoryview) -> str:
    """Compute the BLAKE2b digest of bytes: 128 bits in hexadecimal."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def checksum(path: Path) -> str:
    """Compute `digest_of` the bytes of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def sha256(path: Path) -> str:
    """Compute the SHA-256 of a file in hexadecimal, as `sha256sum` prints it. Errors: those of `opened`."""
    with opened(path, unpack=False) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """Add a checksum to a JSON object. An object that was read is intact if it equals its sealed version."""
    plain = {key: item for key, item in value.items() if key != "checksum"}
    return plain | {"checksum": digest_of(json.dumps(plain).encode())}


def as_csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]], header: bool = True) -> str:
    """Format rows as CSV. Missing values are empty, and keys that are not in `columns` are ignored."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


@contextlib.contextmanager
def row_file(path: Path | None) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yield a function that appends a row to a new JSON Lines file and syncs it, so that a kill loses no rows.

    path: None for a function that does nothing.
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
    """Create `folder` and lock it for this process, until the returned file is closed or the process ends.

    what: the path that error messages name.
    Errors: UserError if another process holds the lock or the folder cannot be written.
    """
    path, busy_error = folder / "lock", UserError(f"{what}: another process is writing this store. Wait for it.")
    with writing(what):
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                file = lock_file(path, busy_error)
            except FileNotFoundError:
                # Another process has renamed or removed the folder. A dangling link, however, never works.
                if path.is_symlink():
                    raise
                continue
            # The folder may have been renamed or removed after its file was opened. Such a lock is useless.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    return file
            file.close()


def refuse_foreign(folder: Path, is_own: Callable[[str], object]) -> None:
    """Raise UserError if `folder` exists and holds a file that WarpFold did not write, which may be a user's work."""
    with writing(folder):
        names = os.listdir(folder) if folder.exists() else []
    # NFS removes its own .nfs files later.
    if foreign := sorted(name for name in names if not name.startswith(".nfs") and not is_own(name)):
        raise UserError(
            f"{folder}: holds {foreign[0]}, which WarpFold did not write. Move it away, or choose another name."
        )


def remove_own(folder: Path, is_own: Callable[[str], object]) -> None:
    """Remove the writer's own files from `folder`, and the folder if it is empty then. Ignore errors.

    The lock is removed last, because the next writer may begin as soon as it is gone.
    """
    with contextlib.suppress(OSError):
        for name in sorted(filter(is_own, os.listdir(folder)), key=lambda name: name == "lock"):
            with contextlib.suppress(OSError):
                (folder / name).unlink()
        folder.rmdir()


class DraftFolder:
    """The folder `path.partial`, locked by this process and renamed to `path` when it is complete.

    is_own: returns whether the writer creates files with a name.
    Errors: UserError if `path` exists, another process holds the folder, it has other files, or it cannot be written.
    """

    def __init__(self, path: Path, is_own: Callable[[str], object]) -> None:
        exists_error = UserError(f"{path}: exists already. Remove it, or choose another name.")
        if path.exists():
            raise exists_error
        self.path, self.folder, self._is_own = path, path.with_name(f"{path.name}.partial"), is_own
        refuse_foreign(self.folder, is_own)
        self._lock = lock_folder(self.folder, path)
        # Another process may have completed the folder in the meantime.
        if path.exists():
            self.remove()
            raise exists_error

    @property
    def is_open(self) -> bool:
        return not self._lock.closed

    def complete(self) -> None:
        """Rename the folder to `path` and release it. Errors: UserError if it cannot be written."""
        with writing(self.path):
            sync_path(self.folder)
            # The lock is held until the folder is renamed. Otherwise another writer could lock the folder in between,
            # treat it as the remains of a killed process, and empty it.
            self.folder.rename(self.path)
            # From here on another process may use the folder, and remove it.
            (self.path / "lock").unlink(missing_ok=True)
            sync_path(self.path.parent)
        self.folder = self.path
        self.release()

    def remove(self) -> None:
        """Remove the writer's own files and the folder, and release it."""
        remove_own(self.folder, self._is_own)
        self.release()

    def release(self) -> None:
        """Release the lock, so that the next writer may use the folder."""
        self._lock.close()


def sync_path(path: Path) -> None:
    """Sync a file's content, or a folder's list of names, to the disk, so that it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- Output folders, which `summary.json` identifies

RECORDS = "records"  # folder with the records of a run of `predict`


def check_folder(folder: Path) -> None:
    """Raise UserError if the output folder, or one above it, is a file."""
    for place in (folder, *folder.parents):
        if place.exists():
            if not place.is_dir():
                raise UserError(f"{place}: is a file. Name a folder for the output.")
            return


def claim_folder(folder: Path, kind: str, run: str, force: bool = False) -> dict[str, Any] | None:
    """Check that a run may write to an output folder; return the summary in it, or None for a new or empty folder.

    kind: the summary's "format".  run: the digest of the run's inputs.  force: accept a folder of another run of that
    kind.  Nothing is written.
    Errors: UserError for a file of that name, and for a folder that holds something else.
    """
    check_folder(folder)
    # A run that is killed at once leaves drafts of `write_atomically`, the records, or answers of a server.
    first = (".summary.json.", RECORDS, "alignments")
    if not folder.is_dir() or all(f.name in first or f.name.startswith(first[0]) for f in folder.iterdir()):
        return None
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        summary = None
    if not isinstance(summary, dict) or summary.get("format") != kind:
        raise UserError(
            f"{folder}: holds something else, or a summary.json that is damaged, and is left alone. Name a new or an "
            "empty folder."
        )
    if summary != sealed(summary):
        if not force:
            raise UserError(
                f"{folder / 'summary.json'}: does not fit its checksum: it was changed or damaged, or another version "
                "of WarpFold wrote it. Put a copy back, name a new folder, or repeat everything with --force."
            )
        return {"format": kind}
    if summary.get("run") != run and not force:
        raise UserError(f"{folder}: holds the output of another run. Name a new folder, or replace it with --force.")
    return summary


def put_aside(folder: Path, parts: Sequence[str]) -> None:
    """Move the results of an earlier run into FOLDER/earlier-N, as users may have added files of their own."""
    present = [folder / name for name in parts if os.path.lexists(folder / name)]
    if present:
        backup = next(path for n in itertools.count(1) if not os.path.lexists(path := folder / f"earlier-{n}"))
        backup.mkdir()
        for path in present:
            path.rename(backup / path.name)


def write_summary(folder: Path, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Write `summary.json`, by which `claim_folder` recognizes a folder, and create the folder if it is missing.

    Returns the summary with its checksum.
    Errors: UserError if it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made: {error.strerror}. Name another folder.") from error
    summary = sealed(summary)
    # In pieces, since the text of many predictions takes more memory than the summary.
    pieces = json.JSONEncoder(indent=2).iterencode(summary)
    write_atomically(folder / "summary.json", itertools.chain(pieces, "\n"))
    return summary
