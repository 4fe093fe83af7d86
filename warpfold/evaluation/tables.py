"""Summarise scores: means over targets with intervals, groups of targets, and comparisons of two sets."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from warpfold.data.similar.clusters import MAX_SEQUENCES, cluster_sequences
from warpfold.evaluation.measure import Row
from warpfold.files import as_csv
from warpfold.scoring.intervals import interval, paired_difference


@dataclass(frozen=True)
class Metric:
    """A column with a mean. name: its heading. digits: decimals that are shown. lower: smaller values are better."""

    key: str
    name: str
    digits: int = 3
    lower: bool = False

    def show(self, value: float | None) -> str:
        """Format a value or a mean."""
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
# Columns that are no measure of quality, so that no set is better in them.
NOT_QUALITY = {"coverage", "plddt"}
# Columns by which targets are grouped: heading, and the largest value of each group but the last.
GROUPS = {
    "residues": ("length", (100, 200, 400, 800)),
    "depth": ("alignment rows", (1, 30, 100, 1000)),
    "train_identity": ("identity with the nearest training sequence", (0.0, 0.3, 0.5, 0.7, 0.95)),
}
# The columns of the CSV table. Lists and mappings are joined to one cell.
CSV = (
    *("set", "target", "model", "rank", "residues", "paired", "identity", *(metric.key for metric in METRICS)),
    *("interfaces", "depth", "train_identity", "released", "chains", "notes"),
    *("prediction", "prediction_sha256", "truth", "truth_sha256", "error"),
)


def means(rows: Sequence[Row], seed: int = 0) -> dict[str, dict[str, Any]]:
    """Compute mean, 95% bootstrap interval, median and number of targets of each metric."""
    summaries = {}
    for metric in METRICS:
        if values := values_of(rows, metric.key):
            summaries[metric.key] = {
                "mean": float(np.mean(values)),
                "interval": interval(values, seed),
                "median": float(np.median(values)),
                "targets": len(values),
            }
    return summaries


def values_of(rows: Sequence[Row], key: str) -> list[float]:
    """Return the values of a column without missing ones."""
    return [row[key] for row in rows if row[key] is not None]


def groups(rows: Sequence[Row], by: str) -> list[dict[str, Any]]:
    """Compute the means of targets grouped by a column; targets without a value are left out."""
    _, limits = GROUPS[by]
    result = []
    for low, high in zip((None, *limits), (*limits, None)):
        within_limits = [
            row
            for row in rows
            if row[by] is not None and (low is None or row[by] > low) and (high is None or row[by] <= high)
        ]
        if within_limits:
            average = {
                metric.key: float(np.mean(v)) for metric in METRICS if (v := values_of(within_limits, metric.key))
            }
            result.append({"above": low, "to": high, "targets": len(within_limits), "mean": average})
    return result


def group_name(group: Mapping[str, Any], by: str) -> str:
    """Format the limits of a group: "101 to 200", "over 800"; identities in percent."""
    low, high = group["above"], group["to"]
    if by == "train_identity":
        if high == 0:
            return "no relative"
        return f"over {low:.0%}" if high is None else f"to {high:.0%}" if low == 0 else f"{low:.0%} to {high:.0%}"
    if high is None:
        return f"over {low}"
    return f"to {high}" if low is None else f"{low + 1} to {high}"


def target_clusters(rows: Sequence[Row]) -> list[tuple[int, ...]]:
    """Compute the cluster of each target: the clusters of its chains' sequences, in ascending order.

    If there are more than `MAX_SEQUENCES` different sequences, each of them counts as a cluster of its own.
    """
    sequences = [sequence for row in rows for sequence in row["sequences"]]
    distinct = {sequence: number for number, sequence in enumerate(dict.fromkeys(sequences))}
    numbers = [distinct[sequence] for sequence in sequences]
    chains = iter(cluster_sequences(sequences) if len(distinct) <= MAX_SEQUENCES else numbers)
    return [tuple(sorted(next(chains) for _ in row["sequences"])) for row in rows]


def compare(a: Mapping[str, Row], b: Mapping[str, Row]) -> dict[str, Any]:
    """Compare a with b over their common targets: the `paired_difference` of each metric, positive if a is better."""
    common_rows = [(a[key], b[key]) for key in a if key in b]
    clusters = target_clusters([x for x, _ in common_rows])
    differences = {}
    for metric in METRICS:
        if metric.key in NOT_QUALITY:
            continue
        values = [(x[metric.key], y[metric.key], cluster) for (x, y), cluster in zip(common_rows, clusters)]
        if values := [three for three in values if None not in three]:
            sign = -1 if metric.lower else 1
            a_values, b_values, names = zip(*values)
            difference = paired_difference([sign * x for x in a_values], [sign * x for x in b_values], names).to_dict()
            differences[metric.key] = {key: value for key, value in difference.items() if key != "means"}
    return {"common": len(common_rows), "metrics": differences}


def table_of(rows: Iterable[Row]) -> str:
    """Format rows as CSV: one per prediction of each set, and one per failure."""
    flat = []
    for row in rows:
        chains = " ".join(f"{p}:{r}" for p, r in row.get("chains", {}).items())
        notes, interfaces = "; ".join(row.get("notes", ())), len(row.get("interfaces", ()))
        flat.append(row | {"chains": chains, "notes": notes, "interfaces": interfaces})
    return as_csv(CSV, flat)
