"""Read the objects of a store from a folder, through the interface that remote stores implement too (remote.py).

A store reads ranges of a named object, reads small objects completely, queries sizes, and maps the index into memory
that all processes of a machine share. It never lists names.
"""

import mmap
import os
import stat
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from warpfold.errors import UserError
from warpfold.files import digest_of, open_regular, pread, write_atomically, writing

# Local file systems of Linux. Mapping a file of a network file system is risky: if the server is slow or unreachable,
# or another machine has changed the file, an access blocks forever or kills the process (SIGBUS). A failed read raises
# an error with the name of the file.
LOCAL_FILE_SYSTEMS = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"}
# Files of a store that stay open. Many systems do not allow a thousand open shards.
MAX_OPEN_FILES = 256
# Seconds after which an unused copy is removed.
COPY_LIFETIME = 30 * 24 * 3600


class Storage(Protocol):
    """Interface to the objects of a store. Errors are OSError, or UserError with a remedy."""

    def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read the ranges [begin, end) of an object; a range beyond its end returns fewer bytes."""
        ...

    def whole(self, name: str) -> bytes:
        """Read the current content of a small object."""
        ...

    def size(self, name: str) -> int:
        """Return the size of an object in bytes."""
        ...

    def forget(self, name: str, begin: int, end: int) -> bool:
        """Drop cached copies of damaged bytes. Returns whether there were any."""
        ...

    def view(self, name: str, size: int, digest: str, checked: bool) -> memoryview:
        """Map an object into memory that all processes of this machine share.

        digest: expected digest of the bytes (`digest_of`). checked: another process has checked the digest. Raises
        UserError for other bytes.
        """
        ...

    def cool(self) -> None:
        """Drop the objects from the system's page cache (for measurements)."""
        ...

    def close(self) -> None:
        """Close all files. They are reopened when needed."""
        ...


class _OpenFile:
    """A file that is closed with its last reference, so that a thread can finish a read."""

    def __init__(self, path: Path) -> None:
        self.number = open_regular(path)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


class Folder:
    """The objects of a store as files of a folder. Safe to share between threads and forks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: dict[str, _OpenFile] = {}
        self._lock = threading.Lock()

    def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        # This reference keeps the file open if another thread replaces or removes it meanwhile.
        file = self._file(name)
        return [pread(file.number, end - begin, begin) for begin, end in ranges]

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
        """Map the file itself if it is on a local disk, otherwise a copy of it (`local_copy`)."""
        if not is_local(self.path):
            return local_copy(self, name, size, digest, checked)
        view = map_file(self.path / name, size)
        if not checked and digest_of(view) != digest:
            raise UserError(f"{self.path / name}: damaged (checksum). Copy it again.")
        return view

    def close(self) -> None:
        with self._lock:
            self._open.clear()

    def _file(self, name: str) -> _OpenFile:
        """Open a file, or return the open one."""
        file = self._open.get(name)
        if file is None:
            file = _OpenFile(self.path / name)
            with self._lock:
                self._open[name] = file
                while len(self._open) > MAX_OPEN_FILES:
                    del self._open[next(iter(self._open))]
        return file


def map_file(path: Path, size: int) -> memoryview:
    """Map a file of `size` bytes. Raises UserError for another size, and OSError."""
    file = open_regular(path)
    try:
        actual = os.fstat(file).st_size
        if actual != size:
            raise UserError(f"{path}: {actual} bytes, {size} expected: cut short or not this store's. Copy it again.")
        return memoryview(mmap.mmap(file, size, prot=mmap.PROT_READ))
    finally:
        os.close(file)


def is_local(path: Path) -> bool:
    """Return whether a folder is on a disk or in the memory of this machine. False if this is unknown."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        # Only Linux has this file.
        return False
    kinds = [line.partition(" - ")[2].split()[0] for line in mounts if line.split()[2] == number]
    return bool(kinds) and kinds[0] in LOCAL_FILE_SYSTEMS


def local_copy(storage: Storage, name: str, size: int, digest: str, checked: bool) -> memoryview:
    """Copy an object to the folder of temporary files, once per machine, and map the copy.

    The first process that needs the object reads it, and the others find the copy by its digest. Copies that have not
    been opened for a month are removed. The original remains.
    Raises UserError for damaged bytes, and if there is no space.
    """
    folder = copies_folder()
    path = folder / f"{digest}.wfi"
    if path.exists() and not checked and digest_of(path.read_bytes()) != digest:
        # The copy is damaged, for example by a power failure.
        path.unlink()
    if not path.exists():
        data = storage.whole(name)
        if len(data) != size or digest_of(data) != digest:
            raise UserError(f"{name}: {len(data)} bytes, damaged or cut short. Copy the store again.")
        try:
            write_atomically(path, data, sync=False)
        except UserError as error:
            raise UserError(f"{error} Set TMPDIR to a folder of this machine with {size / 1e6:.0f} MB free.") from None
        # A copy that is mapped stays readable after its removal.
        for old in folder.glob("*.wfi"):
            # Another process may remove it at the same time.
            with suppress(FileNotFoundError):
                if time.time() - old.stat().st_mtime > COPY_LIFETIME:
                    old.unlink()
    os.utime(path)
    return map_file(path, size)


def copies_folder() -> Path:
    """Create this user's private folder for temporary files. Raises UserError if other users can access it."""
    folder = Path(tempfile.gettempdir()) / f"warpfold-{os.getuid()}"
    with writing(folder):
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise UserError(f"{folder}: is not a private folder of yours. Remove it, or set TMPDIR to another folder.")
    return folder
