"""Check a cluster as training would use it: what its ranks have, their links, what each can do, its files.

`examine_cluster` measures with all ranks and judges what was measured: facts are plain dictionaries, which travel as
JSON, and what is said of them stands in tables (findings.py) that can be given any.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from warpfold.cluster.direct import measure_direct
from warpfold.cluster.facts import system_facts
from warpfold.cluster.files import judge_folder, judge_store, read_store, try_folder
from warpfold.cluster.findings import ClusterFinding, Facts
from warpfold.cluster.judge_links import judge_links
from warpfold.cluster.links import TRIES, MeasuredLinks, measure_links, nodes_of
from warpfold.cluster.ranks import better, judge_ranks, measure_rates, seem_slow
from warpfold.cluster.rules import judge_system
from warpfold.cost.links import Cluster, network
from warpfold.cost.machine import name as name_device
from warpfold.parallel.team import Team

LIMIT = 60.0  # seconds that a rank may be waited for
RATE_SECONDS, READ_SECONDS = 4.0, 3.0


@dataclass(frozen=True)
class Examined:
    """What a doctor found: findings, and the figures that they were made of, by rank.

    cluster: as measured; None of one process, or where nodes are not equal.  seconds: that all of it took.
    """

    nodes: list[list[int]]
    device: str
    findings: list[ClusterFinding] = field(default_factory=list)
    facts: list[Facts] = field(default_factory=list)
    links: MeasuredLinks | None = None
    rates: list[Facts] = field(default_factory=list)
    cluster: Cluster | None = None
    seconds: float = 0.0

    @property
    def wrong(self) -> list[ClusterFinding]:
        return [one for one in self.findings if one.outcome == "wrong"]

    def as_json(self) -> dict[str, Any]:
        """Convert all of it to what JSON can hold."""
        ranks, each = sum(map(len, self.nodes)), max(map(len, self.nodes))
        own = {name: value for name, value in asdict(self).items() if name != "nodes"}
        return {"ranks": ranks, "per_node": each, **own, "seconds": round(self.seconds, 1), "wrong": len(self.wrong)}


@dataclass(frozen=True)
class Asked:
    """What to check beside the ranks: stores and a folder of runs; link: what the network should be, as "ib400"."""

    stores: Sequence[Path] = ()
    folder: Path | None = None
    link: str | None = None


def examine_cluster(
    team: Team,
    device: torch.device,
    environ: Mapping[str, str],
    asked: Asked,
    report: Callable[[Examined, str], None] = lambda so_far, what: None,
    clock: Callable[[], float] = time.time,
) -> Examined:
    """Check all ranks, which call this together, and return on all of them what was found.

    environ: this process's variables.  report: called with what is known so far and the name of what comes next.
    clock: of this rank, as files and other ranks see it.
    Errors: UserError for a network that is none; TeamError where a rank fails or does not come.
    """
    began = time.monotonic()
    local = team.all_gather_object([team.process.local_rank, name_device(device)], "who is there")
    nodes = nodes_of([number for number, _ in local])
    promised = None if asked.link is None else network(asked.link, max(map(len, nodes)))
    found = Examined(nodes, local[0][1])

    def add(findings: Sequence[ClusterFinding], **figures: Any) -> None:
        nonlocal found
        found = replace(found, findings=[*found.findings, *findings], seconds=time.monotonic() - began, **figures)

    report(found, "what all ranks have")
    every = team.all_gather_object(system_facts(team.process, device, environ, nodes), "what all ranks have")
    add(judge_system(every), facts=every)
    add(measure_direct(team, device, environ, len(nodes)))
    report(found, "links")
    if team.process.ranks > 1:
        links, cluster = measure_links(nodes, team, device, found.device, clock)
        add(judge_links(links, promised), links=links, cluster=cluster)
    else:
        says = "there is one process; start as many as train, with torchrun or srun (docs/howto/cluster.md)"
        add([ClusterFinding("links", "links", "not checked", says)])
    report(found, "what each rank can do")
    rates = measure_ranks(team, device)
    add(judge_ranks(rates, nodes, device.type), rates=rates)
    for store in asked.stores:
        report(found, f"store {store}")
        own = read_store(store, READ_SECONDS, seed=team.process.rank)
        add(judge_store(store, team.all_gather_object(own, f"reads of {store}"), nodes))
    if not asked.stores:
        add([ClusterFinding("files", "store", "not checked", "no store was named; --data STORE")])
    if asked.folder is not None:
        report(found, f"folder {asked.folder}")
        add(judge_folder(asked.folder, try_folder(asked.folder, nodes, team, clock)))
    else:
        add([ClusterFinding("files", "folder", "not checked", "no folder was named; --folder DIR, where runs will be")])
    return found


def measure_ranks(team: Team, device: torch.device) -> list[Facts]:
    """Measure what all ranks can do at the same time; again where one seems slow, and the best counts."""
    best: list[Facts] = []
    for _ in range(TRIES):
        team.all_gather_object(None, "the rates of all ranks")
        rates = team.all_gather_object(measure_rates(device, RATE_SECONDS), "what each rank can do")
        best = [better(one, new) for one, new in zip(best, rates)] if best else rates
        if not seem_slow(best, device.type):
            break
    return best
