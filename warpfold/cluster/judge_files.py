"""Say what is wrong with the file systems of a run."""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from warpfold.cluster.findings import ClusterFinding, of_ranks
from warpfold.cluster.measure_files import FolderTrial, StoreReads, by_node, reads_per_second
from warpfold.cluster.slow import NOTE, WRONG, stragglers

LATE = 1.0  # seconds until a new file is seen by others: a note
OFF, SOMEWHAT_OFF = 5.0, 1.0  # seconds between the file server's clock and a rank's: wrong; a note
SLOW_WRITES = 20e6  # bytes per second of a node: checkpoints of a gigabyte would take a minute
FROM_MEMORY = 0.5  # of what was read, from which on the cache has helped


def judge_store(path: Path, reads: Sequence[StoreReads], nodes: Sequence[Sequence[int]]) -> list[ClusterFinding]:
    """Return what is wrong with a store, as all ranks read it."""
    check, ranks = f"store {path.name}", len(reads)
    broken = [rank for rank, one in enumerate(reads) if one.error]
    if broken:
        says = f"{of_ranks(broken, ranks)} cannot read it: {reads[broken[0]].error}"
        cure = "put it where all nodes see it, under one path; `warpfold pack --verify` finds damage"
        return [ClusterFinding("files", check, "wrong", says, cure)]
    counts = [one.in_all for one in reads]
    common = statistics.mode(counts)
    others = [rank for rank, count in enumerate(counts) if count != common]
    if others:
        says = f"{of_ranks(others, ranks)} see {counts[others[0]]} entries, the others {common}"
        return [ClusterFinding("files", check, "wrong", says, "give all nodes the same store")]
    return list(_judge_speed(check, reads, nodes))


def _judge_speed(check: str, reads: Sequence[StoreReads], nodes: Sequence[Sequence[int]]) -> Iterator[ClusterFinding]:
    entries, sizes = (by_node(reads_per_second(reads, what), nodes) for what in ("entries", "bytes"))
    fresh = [one.fresh for one in reads if one.fresh is not None]
    cached = ""
    if not fresh:
        cached = "; how much came from memory is not known"
    elif statistics.mean(fresh) < 1 - FROM_MEMORY:
        cached = f"; {1 - statistics.mean(fresh):.0%} came from memory, so that the disk may be slower"
    slow = stragglers(sizes, NOTE)
    for node, share in slow.items():
        outcome: Literal["wrong", "note"] = "wrong" if share < WRONG else "note"
        says = (
            f"node {node} reads {sizes[node] / 1e6:,.3g} MB/s ({entries[node]:,.3g} entries), {share:.2f} of the median"
            f"{cached}"
        )
        yield ClusterFinding(
            "files", check, outcome, says, "see its mount (nfsstat -m, lfs check servers) and its network"
        )
    if not slow:
        says = f"each node reads {min(sizes) / 1e6:,.3g} MB/s or more, {min(entries):,.3g} entries a second{cached}"
        yield ClusterFinding("files", check, "ok", says)


def judge_folder(folder: Path, trials: Sequence[FolderTrial]) -> list[ClusterFinding]:
    """Return what is wrong with the folder of a run, as all ranks saw it."""
    failed = [rank for rank, one in enumerate(trials) if one.error]
    if failed:
        says = f"{of_ranks(failed, len(trials))} cannot write there: {trials[failed[0]].error}"
        return [ClusterFinding("files", "folder", "wrong", says, "name a folder that all ranks may write to")]
    blind = [rank for rank, one in enumerate(trials) if one.seen is None]
    if blind:
        says = f"{of_ranks(blind, len(trials))} do not see there what rank 0 writes"
        cure = f"give a folder on a file system that all nodes share, under one path, instead of {folder}"
        return [ClusterFinding("files", "folder", "wrong", says, cure)]
    return [
        *_judge_sight(trials),
        *_judge_renames(trials),
        *_judge_locks(trials),
        *_judge_clock(trials),
        *_judge_writes(trials),
    ]


def _judge_sight(trials: Sequence[FolderTrial]) -> Iterator[ClusterFinding]:
    latest = max(one.seen or 0.0 for one in trials)
    says = f"all ranks see a new file within {latest:.2f} s"
    if latest > LATE:
        cure = "mount it with a shorter cache of names (NFS: actimeo=1 or lookupcache=positive)"
        yield ClusterFinding("files", "folder", "note", says, cure)
    else:
        yield ClusterFinding("files", "folder", "ok", says)


def _judge_renames(trials: Sequence[FolderTrial]) -> Iterator[ClusterFinding]:
    reads, torn = sum(one.reads for one in trials[1:]), [rank for rank, one in enumerate(trials) if one.torn]
    if torn:
        count = sum(one.torn for one in trials)
        who = of_ranks(torn, len(trials))
        says = f"{who} found a file missing or half written while it was replaced, {count} of {reads} times"
        cure = "take a file system whose rename is atomic (no object store behind FUSE) for runs"
        yield ClusterFinding("files", "rename", "wrong", says, cure)
    elif reads:
        yield ClusterFinding("files", "rename", "ok", f"a file that is replaced is old or new in all of {reads} reads")
    else:
        yield ClusterFinding("files", "rename", "not checked", "one process alone sees its own renames")


def _judge_locks(trials: Sequence[FolderTrial]) -> Iterator[ClusterFinding]:
    cure = "mount it with locks (Lustre: -o flock; NFS: version 4, or local_lock=none); else start no run twice"
    if why := next((one.locks for one in trials if one.locks), ""):
        yield ClusterFinding("files", "flock", "note", f"there are no locks: {why}", cure)
        return
    tried = {rank: one for rank, one in enumerate(trials) if one.kept_out is not None}
    through = [rank for rank, one in tried.items() if not one.kept_out]
    stuck = [rank for rank, one in tried.items() if one.kept_out and not one.let_in]
    if through:
        says = f"{of_ranks(through, len(trials))} got a lock that rank 0 held: two runs could write to one folder"
        yield ClusterFinding("files", "flock", "wrong", says, cure)
    if stuck:
        says = f"{of_ranks(stuck, len(trials))} did not get a lock that nobody held any more"
        yield ClusterFinding("files", "flock", "wrong", says, cure)
    if not tried:
        yield ClusterFinding("files", "flock", "not checked", "one process alone has nobody to lock out")
    elif not through and not stuck:
        yield ClusterFinding("files", "flock", "ok", f"a lock of rank 0 keeps out {of_ranks(tried, len(trials))}")


def _judge_clock(trials: Sequence[FolderTrial]) -> Iterator[ClusterFinding]:
    off = {
        rank: one.clock for rank, one in enumerate(trials) if one.clock is not None and abs(one.clock) > SOMEWHAT_OFF
    }
    cure = "start chronyd or ntpd on the nodes and the file server"
    if off:
        rank = max(off, key=lambda one: abs(off[one]))
        word = "ahead of" if off[rank] > 0 else "behind"
        others = f"more than {SOMEWHAT_OFF:g} s from {of_ranks(off, len(trials))}"
        says = f"{abs(off[rank]):.3g} s {word} rank {rank}'s; {others}"
        outcome: Literal["wrong", "note"] = "wrong" if abs(off[rank]) > OFF else "note"
        yield ClusterFinding("files", "clock of the file server", outcome, says, cure)
    else:
        most = max((abs(one.clock) for one in trials if one.clock is not None), default=0.0)
        yield ClusterFinding("files", "clock of the file server", "ok", f"at most {most * 1e3:.3g} ms from any rank's")


def _judge_writes(trials: Sequence[FolderTrial]) -> Iterator[ClusterFinding]:
    rates = [one.written for one in trials if one.written is not None]
    if not rates:
        return
    says = f"a node writes {min(rates) / 1e6:,.3g} MB/s or more, through to the disk"
    if min(rates) < SLOW_WRITES:
        yield ClusterFinding("files", "writing", "note", says, "put runs on a faster file system, or save less often")
    else:
        yield ClusterFinding("files", "writing", "ok", says)
