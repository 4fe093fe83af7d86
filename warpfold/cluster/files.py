"""Try the file systems of a run from every rank: how fast a store is read, locks, renames, clocks.

All ranks call the functions that try; what goes wrong is noted and judged later, so that no rank is waited for in vain.
"""

import errno
import fcntl
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from warpfold.cluster.findings import ClusterFinding, Fault, Fine, Outcome, all_fine, judge, of_ranks
from warpfold.cluster.slow import NOTE, WRONG, stragglers
from warpfold.errors import UserError
from warpfold.files import NO_LOCKS
from warpfold.parallel.team import Team

Clock = Callable[[], float]

SEEN = 5.0  # seconds for which a file of another rank is waited for
TURNS = 0.6  # seconds for which a file is replaced while others read it
LENGTH = 4096  # bytes of that file
TRIED = 16  # ranks that try a lock, of as many nodes
WRITTEN = 2**23  # bytes of a file that each node writes
LATE = 1.0  # seconds until a new file is seen by others: a note
OFF, SOMEWHAT_OFF = 5.0, 1.0  # seconds between the file server's clock and a rank's: wrong; a note
SLOW_WRITES = 20e6  # bytes per second of a node: checkpoints of a gigabyte would take a minute
FROM_MEMORY = 0.5  # of what was read, from which on the cache has helped


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


# ---- what is said of it


def judge_store(path: Path, reads: Sequence[StoreReads], nodes: Sequence[Sequence[int]]) -> list[ClusterFinding]:
    """Return what is wrong with a store, as all ranks read it."""
    check, ranks = f"store {path.name}", len(reads)
    broken = [rank for rank, one in enumerate(reads) if one.error]
    if broken:
        says = f"{of_ranks(broken, ranks)} cannot read it: {reads[broken[0]].error}"
        cure = "put it where all nodes see it, under one path; `warpfold pack --verify` finds damage"
        return [ClusterFinding("files", check, "wrong", says, cure)]
    common = statistics.mode(one.in_all for one in reads)
    if others := [rank for rank, one in enumerate(reads) if one.in_all != common]:
        says = f"{of_ranks(others, ranks)} see {reads[others[0]].in_all} entries, the others {common}"
        return [ClusterFinding("files", check, "wrong", says, "give all nodes the same store")]
    entries = [sum(reads[rank].entries / reads[rank].seconds for rank in node) for node in nodes]
    sizes = [sum(reads[rank].bytes / reads[rank].seconds for rank in node) for node in nodes]
    fresh, cached = [one.fresh for one in reads if one.fresh is not None], ""
    if not fresh:
        cached = "; how much came from memory is not known"
    elif statistics.mean(fresh) < 1 - FROM_MEMORY:
        cached = f"; {1 - statistics.mean(fresh):.0%} came from memory, so that the disk may be slower"
    found = []
    for node, share in stragglers(sizes, NOTE).items():
        rate = f"{sizes[node] / 1e6:,.3g} MB/s ({entries[node]:,.3g} entries)"
        says = f"node {node} reads {rate}, {share:.2f} of the median{cached}"
        outcome: Outcome = "wrong" if share < WRONG else "note"
        cure = "see its mount (nfsstat -m, lfs check servers) and its network"
        found.append(ClusterFinding("files", check, outcome, says, cure))
    says = f"each node reads {min(sizes) / 1e6:,.3g} MB/s or more, {min(entries):,.3g} entries a second{cached}"
    return found or [ClusterFinding("files", check, "ok", says)]


NO_LOCK = "mount it with locks (Lustre: -o flock; NFS: version 4, or local_lock=none); else start no run twice"
UNSHARED = (
    Fault("folder", "ranks", lambda x: x["error"], "{who} cannot write there: {x[error]}",
          "name a folder that all ranks may write to"),
    Fault("folder", "ranks", lambda x: x["seen"] is None, "{who} do not see there what rank 0 writes",
          "give a folder on a file system that all nodes share, under one path, instead of {x[folder]}"),
)  # fmt: skip
SHARED = (
    Fault("folder", "ranks", lambda x: x["seen"] > LATE, "{who} see a new file after {x[seen]:.2f} s",
          "mount it with a shorter cache of names (NFS: actimeo=1 or lookupcache=positive)", "note",
          worst=lambda x: -x["seen"]),
    Fault("rename", "ranks", lambda x: x["torn"],
          "{who} found a file missing or half written while it was replaced, one of them {x[torn]} of {x[reads]} times",
          "take a file system whose rename is atomic (no object store behind FUSE) for runs"),
    Fault("flock", "ranks", lambda x: x["locks"], "there are no locks: {x[locks]}", NO_LOCK, "note"),
    Fault("flock", "tried", lambda x: not x["kept_out"],
          "{who} got a lock that rank 0 held: two runs could write to one folder", NO_LOCK),
    Fault("flock", "tried", lambda x: x["kept_out"] and not x["let_in"],
          "{who} did not get a lock that nobody held any more", NO_LOCK),
    Fault("clock of the file server", "timed", lambda x: abs(x["clock"]) > OFF,
          "{x[off]:.3g} s {x[word]} rank {x[rank]}'s; more than 5 s from {who}",
          "start chronyd or ntpd on the nodes and the file server", worst=lambda x: -x["off"]),
    Fault("clock of the file server", "timed", lambda x: abs(x["clock"]) > SOMEWHAT_OFF,
          "{x[off]:.3g} s {x[word]} rank {x[rank]}'s; more than 1 s from {who}",
          "start chronyd or ntpd on the nodes and the file server", "note", worst=lambda x: -x["off"]),
    Fault("writing", "writers", lambda x: x["written"] < SLOW_WRITES,
          "a node writes {x[mb]:,.3g} MB/s or more, through to the disk",
          "put runs on a faster file system, or save less often", "note", worst=lambda x: x["written"]),
)  # fmt: skip
FINE = (
    Fine("folder", "ranks", "all ranks see a new file within a second", topic="files"),
    Fine("rename", "ranks", "a file that is replaced is old or new in all of {x[all reads]} reads",
         lambda x: not x["all reads"], "one process alone sees its own renames", "files"),
    Fine("flock", "ranks", "a lock of rank 0 keeps out {x[all tried]}", lambda x: not x["all tried"],
         "one process alone has nobody to lock out", "files"),
    Fine("clock of the file server", "timed", "at most {x[off]:.3g} s from any rank's", topic="files"),
    Fine("writing", "writers", "a node writes {x[mb]:,.3g} MB/s or more, through to the disk", topic="files"),
)  # fmt: skip


def judge_folder(folder: Path, trials: Sequence[FolderTrial]) -> list[ClusterFinding]:
    """Return what is wrong with the folder of a run, as all ranks saw it."""
    tried = [rank for rank, one in enumerate(trials) if one.kept_out is not None]
    ranks = [
        asdict(one)
        | {"rank": rank, "host": "", "folder": folder, "mb": (one.written or 0) / 1e6}
        | {"off": abs(one.clock or 0.0), "word": "ahead of" if (one.clock or 0) > 0 else "behind"}
        | {"all reads": sum(other.reads for other in trials[1:])}
        | {"all tried": of_ranks(tried, len(trials)) if tried else ""}
        for rank, one in enumerate(trials)
    ]
    if unshared := judge(UNSHARED, {"ranks": ranks}, "files"):
        return unshared
    known = {
        "ranks": ranks,
        "tried": [ranks[rank] for rank in tried],
        "timed": sorted((x for x in ranks if x["clock"] is not None), key=lambda x: -x["off"]),
        "writers": sorted((x for x in ranks if x["written"] is not None), key=lambda x: x["written"]),
    }
    found = judge(SHARED, known, "files")
    return [*found, *all_fine(FINE, known, found)]
