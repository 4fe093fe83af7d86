"""Files: names that every system bears, and contents that are there whole or not at all."""

import contextlib
import errno
import fcntl
import gzip
import logging
import os
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TextIO, cast

from warpfold.errors import UserError

logger = logging.getLogger("warpfold")

# What flock says on a file system without locks: NFS without its lock daemon, Lustre without -o flock, some of FUSE.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


def file_name(name: str) -> str:
    """A protein's name with nothing in it that a file system or a shell would mind."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in name)
    return kept.lstrip(".-")[:100] or "target"


@contextlib.contextmanager
def opened(path: Path, unpack: bool = True) -> Iterator[BinaryIO]:
    """A file to read, unpacked if it is gzipped; what goes wrong meanwhile becomes a UserError."""
    try:
        with path.open("rb") as file:
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


def write_atomically(path: Path, content: str | bytes, sync: bool = True) -> None:
    """Write a file that is there whole or not at all, whatever happens meanwhile.

    sync: also after a power cut; False for what can be made again.
    Errors: UserError when it cannot be written (no folder, no permission, a full disk).
    """
    draft = None
    try:
        descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            os.fchmod(file.fileno(), 0o644)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        if draft is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft)


def update_file(path: Path, content: bytes) -> None:
    """Write a file that can be made again, and its folders; one that has this content already keeps its time.

    So what goes by the times of its inputs, as `warpfold pack` does, finds them unchanged.
    Errors: UserError when it cannot be written.
    """
    try:
        if path.is_file() and path.read_bytes() == content:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error
    write_atomically(path, content, sync=False)


def lock_file(path: Path, taken: UserError) -> TextIO:
    """Open a file, without changing it, and lock it until it is closed or this process ends.

    On a file system that has no locks a warning says so, and nothing keeps a second process out.
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


def check_absent(path: Path) -> None:
    """Errors: UserError when there is something at `path` already; output that is named by hand replaces nothing."""
    if os.path.lexists(path):
        raise UserError(f"{path}: exists already; remove it, or name another file")
