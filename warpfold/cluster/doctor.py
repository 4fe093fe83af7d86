"""Check a cluster as training would use it: what its ranks have, their links, what each can do, its files.

`examine_cluster` measures and judges with all ranks.  What is measured is in files of their own (`measure_*`)
and so is what is said of it (`judge_*`), which takes figures and can be given any.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from warpfold.cluster.direct import measure_direct
from warpfold.cluster.facts import system_facts
from warpfold.cluster.files import StoreReads, judge_folder, judge_store, read_store, try_folder
from warpfold.cluster.findings import ClusterFinding
from warpfold.cluster.judge_links import MeasuredLinks, cluster_of, judge_links
from warpfold.cluster.measure_links import counted, measure_call, measure_clocks, measure_collectives, read_counters
from warpfold.cluster.probe import TRIES, measure_rounds
from warpfold.cluster.ranks import RankRates, judge_ranks, measure_rates, seem_slow
from warpfold.cluster.rounds import nodes_of, rounds
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
    facts: list[dict[str, Any]] = field(default_factory=list)
    links: MeasuredLinks | None = None
    rates: list[RankRates] = field(default_factory=list)
    cluster: Cluster | None = None
    seconds: float = 0.0

    @property
    def wrong(self) -> list[ClusterFinding]:
        """What is wrong."""
        return [one for one in self.findings if one.outcome == "wrong"]

    def with_findings(self, more: Sequence[ClusterFinding]) -> "Examined":
        """Return it with more findings."""
        return replace(self, findings=[*self.findings, *more])

    def as_json(self) -> dict[str, Any]:
        """Return all of it, JSON-able."""
        return {
            "ranks": sum(map(len, self.nodes)),
            "per_node": max(map(len, self.nodes)),
            "device": self.device,
            "seconds": round(self.seconds, 1),
            "wrong": len(self.wrong),
            "findings": [asdict(one) for one in self.findings],
            "cluster": None if self.cluster is None else asdict(self.cluster),
            "facts": self.facts,
            "links": None if self.links is None else asdict(self.links),
            "rates": [asdict(one) for one in self.rates],
        }


@dataclass(frozen=True)
class Asked:
    """What to check beside the ranks: stores and a folder of runs; link: what the network should be, as "ib400"."""

    stores: Sequence[Path] = ()
    folder: Path | None = None
    link: str | None = None


Report = Callable[[Examined, str], None]


def examine_cluster(
    team: Team,
    device: torch.device,
    environ: Mapping[str, str],
    asked: Asked,
    report: Report = lambda so_far, what: None,
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
        found = replace(found.with_findings(findings), seconds=time.monotonic() - began, **figures)

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
        reads = [StoreReads(**one) for one in team.all_gather_object(asdict(own), f"reads of {store}")]
        add(judge_store(store, reads, nodes))
    if not asked.stores:
        add([ClusterFinding("files", "store", "not checked", "no store was named; --data STORE")])
    if asked.folder is not None:
        report(found, f"folder {asked.folder}")
        add(judge_folder(asked.folder, try_folder(asked.folder, nodes, team, clock)))
    else:
        add([ClusterFinding("files", "folder", "not checked", "no folder was named; --folder DIR, where runs will be")])
    return found


def measure_links(
    nodes: Sequence[Sequence[int]], team: Team, device: torch.device, name: str, clock: Callable[[], float]
) -> tuple[MeasuredLinks, Cluster | None]:
    """Measure all links, collectives and clocks; return them and the cluster they make.  name: of the device."""
    before = read_counters()
    measured = measure_rounds(nodes, rounds(nodes), team, device)
    after = team.all_gather_object(counted(before, read_counters()), "what the network counted")
    measured = replace(
        measured,
        lost=[(sent, lost) for (sent, lost), _ in (after[node[0]] for node in nodes)],
        errors=[after[node[0]][1] for node in nodes],
        clocks=measure_clocks(nodes, team, device, clock),
    )
    cluster = cluster_of(measured, name, measure_call(team, device))
    if cluster is not None:
        measured = replace(measured, collectives=measure_collectives(cluster, team, device))
    return measured, cluster


def measure_ranks(team: Team, device: torch.device) -> list[RankRates]:
    """Measure what all ranks can do at the same time; again where one seems slow, and the best counts."""
    best: list[RankRates] = []
    for _ in range(TRIES):
        team.all_gather_object(None, "the rates of all ranks")
        own = measure_rates(device, RATE_SECONDS)
        every = team.all_gather_object(asdict(own), "what each rank can do")
        rates = [RankRates.from_json(one) for one in every]
        best = [one.better(new) for one, new in zip(best, rates)] if best else rates
        if not seem_slow(best, device.type):
            break
    return best
