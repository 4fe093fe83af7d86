"""The objects of a store in a folder, and the operations that a remote store offers too (remote.py).

A store reads ranges of a named object, reads small objects completely, asks for sizes, and maps the index into memory
that all processes of a machine share.  It never lists names.
"""

import mmap
import os
import stat
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from warpfold.errors import UserError
from warpfold.files import digest_of, open_regular, pread, write_atomically, writing

# Of Linux: file systems on this machine alone.  A mapped file of any other is a risk: where a server is slow or gone,
# or another machine has changed the file, touching its memory waits without end or kills the process (SIGBUS), while
# a failed read is an error with a name.
LOCAL = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"}
MOST_OPEN = 256  # files of a store that stay open: a thousand shards are more than many systems allow
UNUSED = 30 * 24 * 3600  # seconds after which a copy that nobody has opened is removed


class Storage(Protocol):
    """The objects of one store.  Errors are OSError, or UserError with a remedy."""

    def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes [begin, end) of an object for each range, fewer if it is shorter."""
        ...

    def whole(self, name: str) -> bytes:
        """Return all bytes of a small object, as it is now."""
        ...

    def size(self, name: str) -> int:
        """Return how many bytes an object has."""
        ...

    def forget(self, name: str, begin: int, end: int) -> bool:
        """Drop copies of these bytes that lie elsewhere, as they are damaged; return whether there were any."""
        ...

    def view(self, name: str, size: int, digest: str, checked: bool) -> memoryview:
        """Return an object's bytes in memory that all processes of this machine share.

        digest: of these bytes (`digest_of`).  checked: another process has compared them with it.
        Errors: UserError for other bytes.
        """
        ...

    def cool(self) -> None:
        """Ask the system to forget what it keeps of the objects in memory, for measurements."""
        ...

    def close(self) -> None:
        """Let go of what is open; it is opened again when needed."""
        ...


class _OpenFile:
    """A file that is closed when nobody uses it any more, though a thread may still be reading."""

    def __init__(self, path: Path) -> None:
        self.number = open_regular(path)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


class Folder:
    """The objects of a store as files of a folder; safe to share between threads and forks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: dict[str, _OpenFile] = {}
        self._lock = threading.Lock()

    def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        number = self._file(name).number
        return [pread(number, end - begin, begin) for begin, end in ranges]

    def whole(self, name: str) -> bytes:
        file = _OpenFile(self.path / name)
        return pread(file.number, os.fstat(file.number).st_size, 0)

    def size(self, name: str) -> int:
        return os.stat(self.path / name).st_size

    def forget(self, name: str, begin: int, end: int) -> bool:
        return False

    def cool(self) -> None:
        for path in filter(Path.is_file, self.path.iterdir() if hasattr(os, "posix_fadvise") else ()):
            file = _OpenFile(path)
            os.posix_fadvise(file.number, 0, 0, os.POSIX_FADV_DONTNEED)

    def view(self, name: str, size: int, digest: str, checked: bool) -> memoryview:
        """Map the file itself where it lies on a disk of this machine, elsewhere a copy of it (`local_copy`)."""
        if not is_local(self.path):
            return local_copy(self, name, size, digest, checked)
        view = map_file(self.path / name, size)
        if not checked and digest_of(view) != digest:
            raise UserError(f"{self.path / name}: damaged (checksum). Copy it again")
        return view

    def close(self) -> None:
        with self._lock:
            self._open.clear()

    def _file(self, name: str) -> _OpenFile:
        file = self._open.get(name)
        if file is None:
            file = _OpenFile(self.path / name)
            with self._lock:
                self._open[name] = file
                while len(self._open) > MOST_OPEN:
                    del self._open[next(iter(self._open))]
        return file


def map_file(path: Path, size: int) -> memoryview:
    """Map a file that has so many bytes.  Errors: UserError for another size; OSError."""
    file = open_regular(path)
    try:
        found = os.fstat(file).st_size
        if found != size:
            raise UserError(f"{path}: {found} bytes, {size} expected: cut short or not this store's. Copy it again")
        return memoryview(mmap.mmap(file, size, prot=mmap.PROT_READ))
    finally:
        os.close(file)


def is_local(path: Path) -> bool:
    """Return whether a folder lies on a disk or in the memory of this machine; of what is not known, it does not."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # another system than Linux
        return False
    kinds = [line.partition(" - ")[2].split()[0] for line in mounts if line.split()[2] == wanted]
    return bool(kinds) and kinds[0] in LOCAL


def local_copy(storage: Storage, name: str, size: int, digest: str, checked: bool) -> memoryview:
    """Read an object once per machine, into the folder of temporary files, and map that copy.

    The first process that needs it reads it; the others find it by its digest.  A copy that nobody has opened for a
    month is removed; nothing is lost by that, for what was copied is still where it was.
    Errors: UserError for damaged bytes, or where there is no room.
    """
    folder = copies_folder()
    path = folder / f"{digest}.wfi"
    if path.exists() and not checked and digest_of(path.read_bytes()) != digest:
        path.unlink()  # damaged, or cut short by a power cut
    if not path.exists():
        data = storage.whole(name)
        if len(data) != size or digest_of(data) != digest:
            raise UserError(f"{name}: {len(data)} bytes, damaged or cut short. Copy the store again")
        try:
            write_atomically(path, data, sync=False)
        except UserError as error:
            raise UserError(f"{error}. Set TMPDIR to a folder of this machine with {size / 1e6:.0f} MB free") from None
        for old in folder.glob("*.wfi"):  # what is mapped stays readable after it is removed
            if time.time() - old.stat().st_mtime > UNUSED:
                old.unlink(missing_ok=True)
    os.utime(path)
    return map_file(path, size)


def copies_folder() -> Path:
    """Return this user's own folder among the temporary files.  Errors: UserError if others may write there."""
    folder = Path(tempfile.gettempdir()) / f"warpfold-{os.getuid()}"
    with writing(folder):
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UserError(f"{folder}: is not a folder of yours alone. Remove it, or set TMPDIR to another folder")
    return folder
