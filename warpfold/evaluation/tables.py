"""Sum up what was measured: means over targets with their intervals, groups of targets, and sets compared."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from warpfold.data.similar.clusters import MOST_HERE, cluster_sequences
from warpfold.evaluation.measure import Row
from warpfold.files import as_csv
from warpfold.scoring.intervals import interval, paired_difference


@dataclass(frozen=True)
class Metric:
    """A column that is averaged: its key, its name for people, digits behind the point; lower: smaller is better."""

    key: str
    name: str
    digits: int = 3
    lower: bool = False

    def show(self, value: float | None) -> str:
        """Return a value, or a mean of such, for people."""
        return "–" if value is None else str(value) if isinstance(value, int) else f"{value:.{self.digits}f}"


METRICS = (
    Metric("lddt", "lDDT"),
    Metric("lddt_ca", "lDDT-Cα"),
    Metric("gdt_ts", "GDT-TS"),
    Metric("gdt_ha", "GDT-HA"),
    Metric("tm", "TM-score"),
    Metric("rmsd", "RMSD, Å", 2, lower=True),
    Metric("dockq", "DockQ"),
    Metric("ilddt", "interface lDDT"),
    Metric("qs_global", "QS-score"),
    Metric("ics", "ICS"),
    Metric("ips", "IPS"),
    Metric("coverage", "coverage"),
    Metric("plddt", "pLDDT", 1),
    Metric("clashes", "clashes", 1, lower=True),
    Metric("chain_breaks", "chain breaks", 1, lower=True),
)
NOT_QUALITY = {"coverage", "plddt"}  # not what one set can be better in
# What groups are made by: the column, its name, and the largest value of each group but the last.
GROUPS = {
    "residues": ("length", (100, 200, 400, 800)),
    "depth": ("alignment rows", (1, 30, 100, 1000)),
    "train_identity": ("identity with the nearest training sequence", (0.0, 0.3, 0.5, 0.7, 0.95)),
}
# From JSON to one table: what CSV cannot hold in a cell is joined.
CSV = (
    *("set", "target", "model", "rank", "residues", "paired", "identity", *(metric.key for metric in METRICS)),
    *("interfaces", "depth", "train_identity", "released", "chains", "notes"),
    *("prediction", "prediction_sha256", "truth", "truth_sha256", "error"),
)


def means(rows: Sequence[Row], seed: int = 0) -> dict[str, dict[str, Any]]:
    """Return for each metric the mean over the targets that have it, its 95% bootstrap interval, median and count."""
    found = {}
    for metric in METRICS:
        if values := values_of(rows, metric.key):
            found[metric.key] = {
                "mean": float(np.mean(values)),
                "interval": interval(values, seed),
                "median": float(np.median(values)),
                "targets": len(values),
            }
    return found


def values_of(rows: Sequence[Row], key: str) -> list[float]:
    """Return the values of a column, without those that are not known."""
    return [row[key] for row in rows if row[key] is not None]


def groups(rows: Sequence[Row], by: str) -> list[dict[str, Any]]:
    """Return the means of targets grouped by a column, those for which it is not known left out."""
    _, limits = GROUPS[by]
    found = []
    for low, high in zip((None, *limits), (*limits, None)):
        within = [
            row
            for row in rows
            if row[by] is not None and (low is None or row[by] > low) and (high is None or row[by] <= high)
        ]
        if within:
            average = {metric.key: float(np.mean(v)) for metric in METRICS if (v := values_of(within, metric.key))}
            found.append({"above": low, "to": high, "targets": len(within), "mean": average})
    return found


def group_name(group: Mapping[str, Any], by: str) -> str:
    """Return how a group is called: "101 to 200", "over 800"; of identities in percent."""
    low, high = group["above"], group["to"]
    if by == "train_identity":
        if high == 0:
            return "no relative"
        return f"over {low:.0%}" if high is None else f"to {high:.0%}" if low == 0 else f"{low:.0%} to {high:.0%}"
    if high is None:
        return f"over {low}"
    return f"to {high}" if low is None else f"{low + 1} to {high}"


def target_clusters(rows: Sequence[Row]) -> list[tuple[int, ...]]:
    """Return the cluster of each target: the clusters of its chains' sequences, in ascending order.

    More than `MOST_HERE` different sequences are not clustered; each then counts as a cluster of its own.
    """
    sequences = [sequence for row in rows for sequence in row["sequences"]]
    distinct = {sequence: number for number, sequence in enumerate(dict.fromkeys(sequences))}
    numbers = [distinct[sequence] for sequence in sequences]
    chains = iter(cluster_sequences(sequences) if len(distinct) <= MOST_HERE else numbers)
    return [tuple(sorted(next(chains) for _ in row["sequences"])) for row in rows]


def compare(a: Mapping[str, Row], b: Mapping[str, Row]) -> dict[str, Any]:
    """Return how much better a is than b, by metric, over the targets that both have (`paired_difference`)."""
    both = [(a[key], b[key]) for key in a if key in b]
    clusters = target_clusters([x for x, _ in both])
    found = {}
    for metric in METRICS:
        if metric.key in NOT_QUALITY:
            continue
        values = [(x[metric.key], y[metric.key], cluster) for (x, y), cluster in zip(both, clusters)]
        if values := [three for three in values if None not in three]:
            sign = -1 if metric.lower else 1
            of_a, of_b, names = zip(*values)
            difference = paired_difference([sign * x for x in of_a], [sign * x for x in of_b], names).to_dict()
            found[metric.key] = {key: value for key, value in difference.items() if key != "means"}
    return {"common": len(both), "metrics": found}


def table_of(rows: Iterable[Row]) -> str:
    """Write rows as CSV, one for each prediction of each set, and for each that could not be scored."""
    flat = []
    for row in rows:
        chains = " ".join(f"{p}:{r}" for p, r in row.get("chains", {}).items())
        notes, interfaces = "; ".join(row.get("notes", ())), len(row.get("interfaces", ()))
        flat.append(row | {"chains": chains, "notes": notes, "interfaces": interfaces})
    return as_csv(CSV, flat)
