"""Folders that one process at a time writes, and that are there when they are said to be."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from warpfold.errors import UserError
from warpfold.files import lock_file


def lock_folder(folder: Path, what: Path) -> TextIO:
    """Makes `folder` and locks it for this process, until the file that is returned is closed, or the process ends.

    Errors: UserError, about `what`, if another process has it or the disk refuses.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return lock_file(folder / "lock", UserError(f"{what}: another process is writing this store; wait for it"))
    except OSError as error:
        raise UserError(f"{what}: cannot be written: {error.strerror}") from error


def refuse_foreign(folder: Path, is_own: Callable[[str], object]) -> None:
    """Raise UserError if `folder` is there and holds a name that is not the writer's own: it is somebody's work."""
    try:
        named = (name for name in os.listdir(folder) if not name.startswith(".nfs"))  # files that NFS removes later
        foreign = sorted(name for name in named if not is_own(name))
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}") from None
    if foreign:
        raise UserError(
            f"{folder}: holds {foreign[0]}, which WarpFold did not write; move it away, or choose another name"
        )


def remove_own(folder: Path, is_own: Callable[[str], object]) -> None:
    """Remove the writer's own files from `folder`, and the folder if nothing else is in it; what cannot go stays."""
    with contextlib.suppress(OSError):
        for name in filter(is_own, os.listdir(folder)):
            with contextlib.suppress(OSError):
                (folder / name).unlink()
        folder.rmdir()


def sync_folder(path: Path) -> None:
    """What was renamed or removed in a folder outlives a power cut from here on."""
    folder = os.open(path, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
