"""Test the folder of a run from all ranks: visibility, atomic rename, locks, free space."""

import errno
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from warpfold.cluster.facts import Facts
from warpfold.files import NO_LOCKS
from warpfold.parallel.team import Team

# Seconds for which a rank waits to see a file of rank 0.
VISIBLE_SECONDS = 5.0
# Seconds for which rank 0 replaces a file while the others read it.
REPLACE_SECONDS = 0.6
FILE_BYTES = 4096


def try_folder(folder: Path, team: Team) -> list[Facts]:
    """Test a folder with all ranks, and remove all test files; returns the facts of each rank as JSON values.

    error: why the folder cannot be used. sees: whether the rank sees a file of rank 0. torn: number of reads of a file
    during its replacement that returned neither the old nor the new content. excluded: whether a lock of rank 0
    excluded this rank; None without locks, for the reason `no locks`. free: bytes.
    """
    rank, error, trial, existed = team.process.rank, "", "", folder.exists()
    if rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            trial = tempfile.mkdtemp(prefix=".warpfold-doctor-", dir=folder)
        except OSError as problem:
            error = f"{problem.strerror}"
    trial, error = team.broadcast([Path(trial).name, error], "a folder to try")
    facts: Facts = {"rank": rank, "folder": str(folder), "error": error, "sees": False, "torn": 0, "reads": 0}
    facts |= {"excluded": None, "no locks": "", "free": None}
    try:
        if not error:
            _try(folder / trial, facts, team)
        return team.all_gather_object(facts, "what all ranks saw of the folder")
    finally:
        if rank == 0 and not error:
            shutil.rmtree(folder / trial, ignore_errors=True)
            if not existed and not any(folder.iterdir()):
                folder.rmdir()


def _try(trial: Path, facts: Facts, team: Team) -> None:
    """Run the tests with all ranks. A rank records its errors instead of raising them, so that no other rank hangs."""
    is_first, file, lock, lock_handle = team.is_rank_zero, trial / "file", trial / "lock", None
    if is_first:
        try:
            file.write_bytes(b"0" * FILE_BYTES)
            lock_handle = os.open(lock, os.O_RDWR | os.O_CREAT)
            facts["no locks"] = _lock(lock_handle)[1]
        except OSError as problem:
            facts["error"] = str(problem.strerror)
    facts["no locks"] = team.broadcast(facts["no locks"], "a file and a lock")
    end = time.monotonic() + VISIBLE_SECONDS
    # A network file system may cache the absence of a file for some seconds.
    while not (is_visible := file.exists() and lock.exists()) and time.monotonic() < end:
        time.sleep(0.02)
    facts["sees"] = is_visible
    # Barrier: rank 0 replaces the file only after all ranks have looked for it.
    team.all_gather_object(None, "a file to be seen")
    try:
        end = time.monotonic() + REPLACE_SECONDS
        while is_visible and time.monotonic() < end:
            if is_first:
                new = file.with_name("new")
                new.write_bytes(str(facts["reads"] % 10).encode() * FILE_BYTES)
                os.replace(new, file)
            else:
                facts["torn"] += _is_torn(file)
            facts["reads"] += 1
            time.sleep(0.003)
        if is_visible:
            facts["free"] = shutil.disk_usage(trial).free
        if is_visible and not is_first and not facts["no locks"]:
            other = os.open(lock, os.O_RDWR)
            is_locked, facts["no locks"] = _lock(other)
            facts["excluded"] = None if facts["no locks"] else not is_locked
            os.close(other)
    except OSError as problem:
        facts["error"] = str(problem.strerror)
    # Barrier: rank 0 holds the lock until all ranks have tried to get it.
    team.all_gather_object(None, "a lock to be tried")
    if lock_handle is not None:
        os.close(lock_handle)


def _is_torn(file: Path) -> bool:
    """Read a file that is being replaced; returns whether its content is neither the old nor the new one."""
    try:
        content = file.read_bytes()
    except OSError as problem:
        # NFS reports a replaced file as stale, and a reader opens it again.
        return problem.errno != errno.ESTALE
    return len(content) != FILE_BYTES or len(set(content)) != 1


def _lock(descriptor: int) -> tuple[bool, str]:
    """Try to lock a file; returns whether it is locked now, and why the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False, ""
    except OSError as problem:
        if problem.errno not in NO_LOCKS:
            raise
        return False, problem.strerror or str(problem)
    return True, ""
