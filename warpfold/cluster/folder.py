"""Try the folder of a run from all ranks: shared, atomic rename, locks, free space."""

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

VISIBLE_SECONDS = 5.0  # for which a rank waits for a file of rank 0
REPLACE_SECONDS = 0.6  # for which a file is replaced while the others read it
FILE_BYTES = 4096


def try_folder(folder: Path, team: Team) -> list[Facts]:
    """Try a folder with all ranks, and remove everything afterwards; return the JSON-able facts of each rank.

    error: why the folder cannot be used.  sees: whether the rank sees a file of rank 0.  torn: reads of a file being
    replaced that returned neither the old nor the new content.  excluded: whether a lock of rank 0 kept this rank out;
    None where there are no locks, `no locks` being the reason.  free: bytes.
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
    """Go through the trials with all ranks.  A rank notes its errors, so that no other rank waits in vain."""
    is_first, file, lock, held = team.is_rank_zero, trial / "file", trial / "lock", None
    if is_first:
        try:
            file.write_bytes(b"0" * FILE_BYTES)
            held = os.open(lock, os.O_RDWR | os.O_CREAT)
            facts["no locks"] = _lock(held)[1]
        except OSError as problem:
            facts["error"] = str(problem.strerror)
    facts["no locks"] = team.broadcast(facts["no locks"], "a file and a lock")
    end = time.monotonic() + VISIBLE_SECONDS
    # A network file system may cache for some seconds that a file does not exist.
    while not (seen := file.exists() and lock.exists()) and time.monotonic() < end:
        time.sleep(0.02)
    facts["sees"] = seen
    team.all_gather_object(None, "a file to be seen")
    try:
        end = time.monotonic() + REPLACE_SECONDS
        while seen and time.monotonic() < end:
            if is_first:
                new = file.with_name("new")
                new.write_bytes(str(facts["reads"] % 10).encode() * FILE_BYTES)
                os.replace(new, file)
            else:
                facts["torn"] += _is_torn(file)
            facts["reads"] += 1
            time.sleep(0.003)
        if seen:
            facts["free"] = shutil.disk_usage(trial).free
        if seen and not is_first and not facts["no locks"]:
            other = os.open(lock, os.O_RDWR)
            is_locked, facts["no locks"] = _lock(other)
            facts["excluded"] = None if facts["no locks"] else not is_locked
            os.close(other)
    except OSError as problem:
        facts["error"] = str(problem.strerror)
    team.all_gather_object(None, "a lock to be tried")
    if held is not None:
        os.close(held)


def _is_torn(file: Path) -> bool:
    """Read a file that is being replaced; tell whether it has neither the old content nor the new."""
    try:
        content = file.read_bytes()
    except OSError as problem:
        # NFS reports the replaced file as stale; a reader opens it again.
        return problem.errno != errno.ESTALE
    return len(content) != FILE_BYTES or len(set(content)) != 1


def _lock(descriptor: int) -> tuple[bool, str]:
    """Try to lock a file; return whether it is locked now, and why the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False, ""
    except OSError as problem:
        if problem.errno not in NO_LOCKS:
            raise
        return False, problem.strerror or str(problem)
    return True, ""
