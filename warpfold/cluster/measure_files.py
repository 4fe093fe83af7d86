"""Try the file systems of a run from every rank: how fast a store is read, locks, renames, clocks.

All ranks call each function; what goes wrong is noted and judged later, so that no rank is waited for in vain.
"""

import errno
import fcntl
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warpfold.errors import UserError
from warpfold.files import NO_LOCKS
from warpfold.parallel.team import Team

Clock = Callable[[], float]

SEEN = 5.0  # seconds for which a file of another rank is waited for
TURNS = 0.6  # seconds for which a file is replaced while others read it
LENGTH = 4096  # bytes of that file
TRIED = 16  # ranks that try a lock, of as many nodes
WRITTEN = 2**23  # bytes of a file that each node writes


@dataclass(frozen=True)
class StoreReads:
    """What a rank read of a store: entries, and bytes on disk, in so many seconds.

    fresh: the share of bytes that came from the disk or the network and not from memory; None where Linux does not
    say.  error: why it could not be read.
    """

    entries: int = 0
    bytes: int = 0
    seconds: float = 1.0
    fresh: float | None = None
    in_all: int = 0  # entries of the store
    error: str = ""


@dataclass(frozen=True)
class FolderTrial:
    """What a rank saw of a folder that all should share.

    seen: seconds until it saw a file that rank 0 had made; None: it did not.  torn: reads of a file that was being
    replaced which gave neither the old nor the new.  reads: how many there were.  kept_out: whether a lock that rank 0
    held was held here too; None: not tried.  let_in: whether the lock could be had when it was free.
    clock: how far the file server's clock is ahead of this rank's, in seconds.  written: bytes per second.
    error: why it could not be used; locks: why there are none.
    """

    seen: float | None = None
    torn: int = 0
    reads: int = 0
    kept_out: bool | None = None
    let_in: bool | None = None
    clock: float | None = None
    written: float | None = None
    error: str = ""
    locks: str = ""


def read_store(path: Path, seconds: float, seed: int, clock: Clock = time.perf_counter) -> StoreReads:
    """Read entries of a store, drawn at random, for so many seconds; the system is asked to forget them before."""
    from warpfold.data.store.store import Store

    try:
        store = Store(path)
        _forget(path)
        draw, before = random.Random(seed), _from_disk()
        entries, size, begin = 0, 0, clock()
        while (took := clock() - begin) < seconds:
            record = store.record(draw.choice(store.keys))
            for name, array in record.arrays.items():
                record.read(name)
                size += array.starts[-1] - array.starts[0]
            entries += 1
        after, in_all = _from_disk(), len(store)
        store.close()
    except (UserError, OSError, ImportError) as error:  # ImportError: this node lacks zstandard
        return StoreReads(error=str(error))
    fresh = None if before is None or after is None or not size else min(1.0, (after - before) / size)
    return StoreReads(entries, size, max(took, 1e-9), fresh, in_all)


def _forget(store: Path) -> None:
    """Ask the system to drop a store's files from its memory, where it can be asked."""
    if not hasattr(os, "posix_fadvise"):
        return
    for file in store.iterdir():
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _from_disk() -> int | None:
    """Return the bytes that this process has had fetched from disks and file servers."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)


def try_folder(
    folder: Path, nodes: Sequence[Sequence[int]], team: Team, clock: Clock = time.time, seen: float = SEEN
) -> list[FolderTrial]:
    """Try a folder that all ranks should share, and return what each saw; nothing stays there.

    seen: seconds for which a file of another rank is waited for.
    """
    rank, made, error = team.process.rank, "", ""
    there = folder.exists()
    if rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            made = tempfile.mkdtemp(prefix=".warpfold-doctor-", dir=folder)
        except OSError as problem:
            error = f"{folder}: {problem.strerror}"
    name, error = team.broadcast([Path(made).name, error], "a folder to try")
    if error:
        return [FolderTrial(error=error)] * team.process.ranks
    place = folder / name
    try:
        own = _try(place, [node[0] for node in nodes], team, clock, seen)
        return [FolderTrial(**one) for one in team.all_gather_object(own, "what all saw of the folder")]
    finally:
        if rank == 0:
            shutil.rmtree(place, ignore_errors=True)
            if not there and not any(folder.iterdir()):
                folder.rmdir()


def _try(place: Path, leaders: Sequence[int], team: Team, clock: Clock, seen: float) -> dict[str, Any]:
    """Go through the trials with all ranks; those that fail are noted."""
    rank, own = team.process.rank, dict[str, Any]()
    file, lock = place / "file", place / "lock"
    if rank == 0:
        file.write_bytes(b"0" * LENGTH)
        lock.touch()
    _meet(team, "a file to be made")
    own["seen"] = _wait_for(file, seen)
    if own["seen"] is not None:
        try:
            own |= _clock_and_speed(place / f"rank-{rank}", clock, WRITTEN if rank in leaders else 1)
        except OSError as error:
            own["error"] = f"{place.parent}: {error.strerror}"
    _meet(team, "files of each rank")
    if rank == 0:
        own |= {"reads": _replace(file), "torn": 0}
    elif own["seen"] is not None:
        own |= _read_while_replaced(file)
    _meet(team, "a file to be replaced")
    held = _lock(lock) if rank == 0 else None
    own["locks"] = team.broadcast(held if isinstance(held, str) else "", "a lock")
    tried = [*leaders[1:], *range(1, team.process.ranks)][:TRIED]  # on one node a rank of the same
    if not own["locks"] and rank in tried and own["seen"] is not None:
        taken = _lock(lock)
        own |= {"kept_out": taken is None, "locks": taken if isinstance(taken, str) else ""}
        _unlock(taken)
    _meet(team, "a lock to be tried")
    _unlock(held)
    for one in tried:
        _meet(team, f"a lock to be free for rank {one}")
        if rank == one and own.get("kept_out") is not None:
            taken = _lock(lock)
            own["let_in"] = isinstance(taken, int)
            _unlock(taken)
    return own


def _meet(team: Team, what: str) -> None:
    team.all_gather_object(None, what)


def _wait_for(file: Path, seconds: float) -> float | None:
    """Return the seconds until a file is there; None: it does not come."""
    begin = time.monotonic()
    while time.monotonic() - begin <= seconds:
        try:
            os.stat(file)
        except OSError:
            time.sleep(0.02)
            continue
        return time.monotonic() - begin
    return None


def _clock_and_speed(file: Path, clock: Clock, size: int) -> dict[str, float]:
    """Write a file through to the disk, and compare its time with this rank's clock."""
    begin, before = time.monotonic(), clock()
    with open(file, "wb") as opened:
        opened.write(bytes(size))
        opened.flush()
        os.fsync(opened.fileno())
    took, after = max(1e-9, time.monotonic() - begin), clock()
    made = os.stat(file).st_mtime
    found = {"clock": made - after if made > after else min(0.0, made - before)}
    return found | ({"written": size / took} if size > 1 else {})


def _replace(file: Path) -> int:
    """Replace a file again and again, as results are written; return how often."""
    end, turn = time.monotonic() + TURNS, 0
    while time.monotonic() < end:
        turn += 1
        new = file.with_name("new")
        new.write_bytes(str(turn % 10).encode() * LENGTH)
        os.replace(new, file)
        time.sleep(0.005)
    return turn


def _read_while_replaced(file: Path) -> dict[str, int]:
    """Read a file that is being replaced; count what is neither old nor new."""
    end, reads, torn = time.monotonic() + TURNS, 0, 0
    while time.monotonic() < end:
        reads += 1
        try:
            found = file.read_bytes()
            torn += len(found) != LENGTH or len(set(found)) != 1
        except OSError as error:
            torn += error.errno != errno.ESTALE  # of NFS: the old file is gone, and said to be; a reader tries again
        time.sleep(0.002)
    return {"reads": reads, "torn": torn}


def _lock(file: Path) -> int | str | None:
    """Return a descriptor that holds the lock of a file; None: another has it; text: why there are no locks."""
    descriptor = os.open(file, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:
        os.close(descriptor)
        if error.errno not in NO_LOCKS:
            raise
        return error.strerror or str(error)
    return descriptor


def _unlock(held: int | str | None) -> None:
    if isinstance(held, int):
        os.close(held)


def by_node(values: Sequence[float], nodes: Sequence[Sequence[int]]) -> list[float]:
    """Return the sums of ranks' values on each node."""
    return [sum(values[rank] for rank in node) for node in nodes]


def reads_per_second(reads: Sequence[StoreReads], what: str) -> list[float]:
    """Return by rank the entries or bytes per second; what: "entries" or "bytes"."""
    return [getattr(one, what) / one.seconds for one in reads]


def from_json(said: Sequence[Mapping[str, Any]]) -> list[StoreReads]:
    """Return what `asdict` made JSON of."""
    return [StoreReads(**one) for one in said]
