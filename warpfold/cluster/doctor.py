"""Check a cluster as training would use it: the systems of its ranks, their links, and the folder of the run."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from warpfold.cluster.facts import Facts, rank_facts
from warpfold.cluster.folder import try_folder
from warpfold.cluster.links import MeasuredLinks, measure_links, nodes_of
from warpfold.cluster.rules import ClusterFinding, judge
from warpfold.cluster.subjects import folder_subjects, link_subjects, subjects_of
from warpfold.cost.links import Cluster, network
from warpfold.cost.machine import device_name
from warpfold.parallel.team import Team

# Seconds for which ranks wait for each other.
LIMIT = 60.0


@dataclass(frozen=True)
class Examined:
    """The findings of the doctor with their facts and measurements.

    cluster: None for a single process, or if the nodes differ in size.
    """

    nodes: list[list[int]]
    device: str
    findings: list[ClusterFinding] = field(default_factory=list)
    facts: list[Facts] = field(default_factory=list)
    links: MeasuredLinks | None = None
    cluster: Cluster | None = None
    seconds: float = 0.0

    @property
    def wrong(self) -> list[ClusterFinding]:
        """Findings that must be fixed before training."""
        return [finding for finding in self.findings if finding.outcome == "wrong"]

    def as_json(self) -> dict[str, Any]:
        """Convert the results to a JSON value."""
        ranks, per_node = sum(map(len, self.nodes)), max(map(len, self.nodes))
        fields = {name: value for name, value in asdict(self).items() if name != "nodes"}
        fields |= {"seconds": round(self.seconds, 1), "wrong": len(self.wrong)}
        return {"ranks": ranks, "per_node": per_node, **fields}


def examine_cluster(
    team: Team,
    device: torch.device,
    environ: Mapping[str, str],
    folder: Path | None = None,
    link: str | None = None,
    report: Callable[[Examined, str], None] = lambda so_far, what: None,
) -> Examined:
    """Check all ranks. Every rank must call it, and all return the same results.

    environ: environment variables of this process. folder: where runs will be written. link: expected network, such as
    "ib400". report: called with the results so far and the name of the next check.
    Raises UserError if `link` is not a network, and TeamError if a rank fails or does not arrive.
    """
    began = time.monotonic()
    local_ranks = team.all_gather_object(team.process.local_rank, "the ranks of each node")
    nodes = nodes_of(local_ranks)
    promised = None if link is None else network(link, max(map(len, nodes)))
    examined = Examined(nodes, device_name(device))
    report(examined, "the systems of all ranks")
    facts = team.all_gather_object(rank_facts(team.process, device, environ, nodes), "the systems of all ranks")
    subjects = subjects_of(facts)
    examined = replace(examined, facts=facts, findings=judge(subjects))
    if team.process.ranks > 1:
        report(examined, "links")
        links = measure_links(nodes, team, device)
        subjects |= link_subjects(links, promised, [facts[node[0]]["host"] for node in nodes])
        examined = replace(examined, links=links, cluster=links.cluster(examined.device), findings=judge(subjects))
    if folder is not None:
        report(examined, f"folder {folder}")
        subjects |= folder_subjects(try_folder(folder, team))
    return replace(examined, findings=judge(subjects), seconds=time.monotonic() - began)
