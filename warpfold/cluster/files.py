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
from dataclasses import replace
from pathlib import Path

from warpfold.cluster.facts import text_of
from warpfold.cluster.findings import NOTE, WRONG, ClusterFinding, Facts, Fault, Fine, graded, judge, of_ranks, of_usual
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


def read_store(path: Path, seconds: float, seed: int) -> Facts:
    """Read entries of a store, drawn at random, for so many seconds; the system is asked to forget them before.

    Returns, JSON-able, the entries and bytes on disk that were read, the seconds, the entries of the store (in_all);
    fresh: the share of bytes that came from the disk or the network and not from memory, None where Linux does not say;
    error: why it could not be read.
    """
    from warpfold.data.store.store import Store

    try:
        store = Store(path)
        store.storage.cool()
        draw, before = random.Random(seed), _from_disk()
        entries, size, begin = 0, 0, time.perf_counter()
        while (took := time.perf_counter() - begin) < seconds:
            record = store.record(draw.choice(store.keys))
            for name, array in record.arrays.items():
                record.read(name)
                size += array.starts[-1] - array.starts[0]
            entries += 1
        after, in_all = _from_disk(), len(store)
        store.close()
    except (UserError, OSError, ImportError) as error:  # ImportError: this node lacks zstandard
        return {"entries": 0, "bytes": 0, "seconds": 1.0, "fresh": None, "in_all": 0, "error": str(error)}
    fresh = None if before is None or after is None or not size else min(1.0, (after - before) / size)
    return {
        "entries": entries,
        "bytes": size,
        "seconds": max(took, 1e-9),
        "fresh": fresh,
        "in_all": in_all,
        "error": "",
    }


def _from_disk() -> int | None:
    """Read the bytes that this process has had fetched from disks and file servers."""
    lines = text_of(Path("/proc/self/io")).splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)


def try_folder(
    folder: Path, nodes: Sequence[Sequence[int]], team: Team, clock: Clock = time.time, patience: float = SEEN
) -> list[Facts]:
    """Try a folder that all ranks should share; nothing stays there.  patience: seconds to wait for another's file.

    Returns what each rank saw, JSON-able.  seen: seconds until it saw a file that rank 0 had made; None: it did not.
    torn: reads of a file that was being replaced which gave neither the old nor the new, of so many reads.
    kept_out: whether a lock that rank 0 held was held here too; None: not tried.  let_in: whether it could be had when
    it was free.  clock: how far the file server's clock is ahead of this rank's, in seconds.  written: bytes per
    second.  error: why it could not be used; locks: why there are none.
    """
    rank, made, error = team.process.rank, "", ""
    own: Facts = {"seen": None, "torn": 0, "reads": 0, "kept_out": None, "let_in": None, "clock": None, "written": None}
    own |= {"error": "", "locks": ""}
    there = folder.exists()
    if rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            made = tempfile.mkdtemp(prefix=".warpfold-doctor-", dir=folder)
        except OSError as problem:
            error = f"{folder}: {problem.strerror}"
    name, error = team.broadcast([Path(made).name, error], "a folder to try")
    if error:
        return [{**own, "error": error}] * team.process.ranks
    place = folder / name
    try:
        _try(own, place, [node[0] for node in nodes], team, clock, patience)
        return team.all_gather_object(own, "what all saw of the folder")
    finally:
        if rank == 0:
            shutil.rmtree(place, ignore_errors=True)
            if not there and not any(folder.iterdir()):
                folder.rmdir()


def _try(own: Facts, place: Path, leaders: Sequence[int], team: Team, clock: Clock, patience: float) -> None:
    """Go through the trials with all ranks, and note in `own` what this one sees."""
    rank, file, lock = team.process.rank, place / "file", place / "lock"

    def meet(what: str) -> None:
        team.all_gather_object(None, what)

    if rank == 0:
        file.write_bytes(b"0" * LENGTH)
        lock.touch()
    meet("a file to be made")
    begin = time.monotonic()
    while own["seen"] is None and time.monotonic() - begin <= patience:
        try:
            os.stat(file)
            own["seen"] = time.monotonic() - begin
        except OSError:
            time.sleep(0.02)
    if own["seen"] is not None:
        try:
            own |= _clock_and_speed(place / f"rank-{rank}", clock, WRITTEN if rank in leaders else 1)
        except OSError as error:
            own["error"] = f"{place.parent}: {error.strerror}"
    meet("files of each rank")
    if own["seen"] is not None:
        (_replace if rank == 0 else _read_while_replaced)(file, own)
    meet("a file to be replaced")
    held = _lock(lock) if rank == 0 else None
    own["locks"] = team.broadcast(held if isinstance(held, str) else "", "a lock")
    tried = [*leaders[1:], *range(1, team.process.ranks)][:TRIED]  # on one node a rank of the same
    if not own["locks"] and rank in tried and own["seen"] is not None:
        taken = _lock(lock)
        own |= {"kept_out": taken is None, "locks": taken if isinstance(taken, str) else ""}
        _unlock(taken)
    meet("a lock to be tried")
    _unlock(held)
    for one in tried:
        meet(f"a lock to be free for rank {one}")
        if rank == one and own["kept_out"] is not None:
            taken = _lock(lock)
            own["let_in"] = isinstance(taken, int)
            _unlock(taken)


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


def _replace(file: Path, own: Facts) -> None:
    """Replace a file again and again, as results are written; count how often."""
    end = time.monotonic() + TURNS
    while time.monotonic() < end:
        own["reads"] += 1
        new = file.with_name("new")
        new.write_bytes(str(own["reads"] % 10).encode() * LENGTH)
        os.replace(new, file)
        time.sleep(0.005)


def _read_while_replaced(file: Path, own: Facts) -> None:
    """Read a file that is being replaced; count what is neither old nor new."""
    end = time.monotonic() + TURNS
    while time.monotonic() < end:
        own["reads"] += 1
        try:
            found = file.read_bytes()
            own["torn"] += len(found) != LENGTH or len(set(found)) != 1
        except OSError as error:
            own["torn"] += error.errno != errno.ESTALE  # of NFS: the old file is said to be gone; a reader tries again
        time.sleep(0.002)


def _lock(file: Path) -> int | str | None:
    """Try to lock a file: a descriptor that holds the lock; None: another has it; text: why there are no locks."""
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


STORE = (
    Fault("store", "ranks", lambda x: x["error"], "{who} cannot read it: {x[error]}",
          "put it where all nodes see it, under one path; `warpfold pack --verify` finds damage"),
    Fault("store", "ranks", lambda x: x["in_all"] != x["usual"], "{who} see {x[in_all]} entries, the others {x[usual]}",
          "give all nodes the same store"),
    *graded("store", "nodes", lambda x: 1 / x["share"], 1 / WRONG, 1 / NOTE,
            "node {x[node]} reads {x[mb]:,.3g} MB/s ({x[entries]:,.3g} entries), {x[share]:.2f} of the "
            "median{x[cached]}",
            "see its mount (nfsstat -m, lfs check servers) and its network", each=lambda x: x["node"]),
)  # fmt: skip
FINE_STORE = (
    Fine("store", "nodes", "each node reads {x[mb]:,.3g} MB/s or more, {x[least]:,.3g} entries a second{x[cached]}"),
)


def judge_store(path: Path, reads: Sequence[Facts], nodes: Sequence[Sequence[int]]) -> list[ClusterFinding]:
    """Say what is wrong with a store, as all ranks read it."""
    fresh, cached = [one["fresh"] for one in reads if one["fresh"] is not None], ""
    if not fresh:
        cached = "; how much came from memory is not known"
    elif statistics.mean(fresh) < 1 - FROM_MEMORY:
        cached = f"; {1 - statistics.mean(fresh):.0%} came from memory, so that the disk may be slower"
    usual = statistics.mode(one["in_all"] for one in reads)
    ranks = [{**one, "rank": rank, "usual": usual} for rank, one in enumerate(reads)]
    known: dict[str, list[Facts]] = {"ranks": ranks, "nodes": []}
    if not any(one["error"] or one["in_all"] != usual for one in reads):
        sizes, entries = ([sum(reads[rank][what] / reads[rank]["seconds"] for rank in node) for node in nodes]
                          for what in ("bytes", "entries"))  # fmt: skip
        known["nodes"] = [
            {"node": node, "mb": size / 1e6, "entries": count, "share": share, "cached": cached, "least": min(entries)}
            for node, (size, count, share) in enumerate(zip(sizes, entries, of_usual(sizes)))
        ]
        known["nodes"].sort(key=lambda x: x["mb"])
    return [replace(one, check=f"store {path.name}") for one in judge("files", known, STORE, FINE_STORE)]


NO_LOCK = "mount it with locks (Lustre: -o flock; NFS: version 4, or local_lock=none); else start no run twice"
FOLDER = (
    Fault("folder", "ranks", lambda x: x["error"], "{who} cannot write there: {x[error]}",
          "name a folder that all ranks may write to"),
    Fault("folder", "ranks", lambda x: x["seen"] is None, "{who} do not see there what rank 0 writes",
          "give a folder on a file system that all nodes share, under one path, instead of {x[folder]}"),
    Fault("folder", "sharing", lambda x: x["seen"] > LATE, "{who} see a new file after {x[seen]:.2f} s",
          "mount it with a shorter cache of names (NFS: actimeo=1 or lookupcache=positive)", "note",
          worst=lambda x: -x["seen"]),
    Fault("rename", "sharing", lambda x: x["torn"],
          "{who} found a file missing or half written while it was replaced, one of them {x[torn]} of {x[reads]} times",
          "take a file system whose rename is atomic (no object store behind FUSE) for runs"),
    Fault("flock", "sharing", lambda x: x["locks"], "there are no locks: {x[locks]}", NO_LOCK, "note"),
    Fault("flock", "tried", lambda x: not x["kept_out"],
          "{who} got a lock that rank 0 held: two runs could write to one folder", NO_LOCK),
    Fault("flock", "tried", lambda x: x["kept_out"] and not x["let_in"],
          "{who} did not get a lock that nobody held any more", NO_LOCK),
    *graded("clock of the file server", "timed", lambda x: x["off"], OFF, SOMEWHAT_OFF,
            "{x[off]:.3g} s {x[word]} rank {x[rank]}'s; this far from {who}",
            "start chronyd or ntpd on the nodes and the file server", worst=lambda x: -x["off"]),
    Fault("writing", "writers", lambda x: x["written"] < SLOW_WRITES,
          "a node writes {x[mb]:,.3g} MB/s or more, through to the disk",
          "put runs on a faster file system, or save less often", "note", worst=lambda x: x["written"]),
)  # fmt: skip
FINE_FOLDER = (
    Fine("folder", "sharing", "all ranks see a new file within a second"),
    Fine("rename", "sharing", "a file that is replaced is old or new in all of {x[all reads]} reads",
         lambda x: not x["all reads"], "one process alone sees its own renames"),
    Fine("flock", "sharing", "a lock of rank 0 keeps out {x[all tried]}", lambda x: not x["all tried"],
         "one process alone has nobody to lock out"),
    Fine("clock of the file server", "timed", "at most {x[off]:.3g} s from any rank's"),
    Fine("writing", "writers", "a node writes {x[mb]:,.3g} MB/s or more, through to the disk"),
)  # fmt: skip


def judge_folder(folder: Path, trials: Sequence[Facts]) -> list[ClusterFinding]:
    """Say what is wrong with the folder of a run, as all ranks saw it."""
    tried = [rank for rank, one in enumerate(trials) if one["kept_out"] is not None]
    more = {
        "folder": folder,
        "all reads": sum(one["reads"] for one in trials[1:]),
        "all tried": of_ranks(tried, len(trials)) if tried else "",
    }
    ranks = [
        {**one, **more, "rank": rank, "mb": (one["written"] or 0) / 1e6, "off": abs(one["clock"] or 0.0)}
        | {"word": "ahead of" if (one["clock"] or 0) > 0 else "behind"}
        for rank, one in enumerate(trials)
    ]
    shared = not any(x["error"] or x["seen"] is None for x in ranks)
    known = {
        "ranks": ranks,
        "sharing": ranks if shared else [],
        "tried": [ranks[rank] for rank in tried] if shared else [],
        "timed": sorted((x for x in ranks if shared and x["clock"] is not None), key=lambda x: -x["off"]),
        "writers": sorted((x for x in ranks if shared and x["written"] is not None), key=lambda x: x["written"]),
    }
    return judge("files", known, FOLDER, FINE_FOLDER)
