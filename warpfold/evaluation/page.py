"""Build the report of an evaluation: scores with intervals, groups of targets, calibration, and structures."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from warpfold import __version__
from warpfold.data.formats.predictions import read_pae
from warpfold.data.structure.chain import Chain
from warpfold.data.structure.write import PDB_CHAINS, write_mmcif
from warpfold.errors import UserError, listed
from warpfold.evaluation import tables
from warpfold.evaluation.confidence import CA, read_plddt
from warpfold.evaluation.evaluate import PredictionSet
from warpfold.evaluation.measure import Measured, read_pair
from warpfold.evaluation.tables import GROUPS, METRICS, Metric, group_name
from warpfold.report import figures
from warpfold.report.report import ReportPage, ReportTable, Section, Target, Warned
from warpfold.scoring import metrics
from warpfold.scoring.intervals import MIN_CLUSTERS

# Structures of the first set that are drawn: the worst and the best ones.
WORST, BEST = 6, 3
# Residues of the largest structure that is drawn, and of the largest whose PAE is embedded.
MAX_DRAWN = 3000
MAX_EMBEDDED_PAE = 1000
# Metrics in the tables of groups.
GROUP_METRICS = ("lddt", "lddt_ca", "gdt_ts", "tm", "dockq")
# Metrics that the table of all targets omits.
OMITTED_METRICS = ("coverage", "qs_global", "ics", "ips", "chain_breaks")


def evaluation_page(sets: Sequence[PredictionSet], results: Mapping[str, Any]) -> ReportPage:
    """Build the page from the results of `evaluate.report`."""
    summaries = results["sets"]
    first, means = summaries[0], summaries[0]["means"]
    facts = [("targets scored", f"{first['targets']}")]
    for metric in METRICS:
        if metric.key in (*GROUP_METRICS, "rmsd") and metric.key in means:
            summary = means[metric.key]
            name = f" of {first['name']}" if len(summaries) > 1 else ""
            count = "" if summary["targets"] == first["targets"] else f", {summary['targets']} targets"
            facts.append((f"mean {metric.name}{name}{count}", metric.show(summary["mean"])))
    sections = [
        _scores(sets, summaries),
        *_comparisons(sets, results),
        *_groups(sets, summaries),
        *_calibration(sets, summaries),
    ]
    # The worst structures come first, then the best ones.
    drawn = sorted(sets[0].best, key=lambda measured: measured.row["lddt_ca"])
    if len(drawn) > WORST + BEST:
        drawn = [*drawn[:WORST], *drawn[-BEST:]]
    targets = [target for measured in drawn if (target := _target(measured)) is not None]
    sections.append(_all_targets(sets, len(targets)))
    if failures := [[failure["target"], s["name"], failure["error"]] for s in summaries for failure in s["failures"]]:
        sections.append(Section("Failed", table=ReportTable(["target", "set", "error"], failures)))
    names = " and ".join(f"{summary['name']} ({summary['layout']})" for summary in summaries)
    suite = results["suite"]
    reference = f"the suite {suite['title'] or suite['file']}" if suite else results["truth"]
    return ReportPage(
        title="Accuracy of the predictions",
        lead=f"{names} against {reference}.",
        facts=facts,
        sections=sections,
        targets=targets,
        warnings=[Warned(warning) for warning in warnings_of(summaries)],
        footer=[
            *(f"{metric.name}: {results['definitions'][metric.key]}." for metric in METRICS if metric.key in means),
            f"Intervals of means: 95% bootstrap over targets, seed {results['seed']}. WarpFold {__version__}."
            + (f" Suite: {suite['file']}, SHA-256 {suite['sha256']}." if suite else ""),
        ],
        made_by="warpfold evaluate",
    )


def warnings_of(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describe the targets that are missing from the means, one line per set and reason."""
    lines = []
    for summary in summaries:
        prefix = f"{summary['name']}: " if len(summaries) > 1 else ""
        if names := [failure["target"] for failure in summary["failures"]]:
            lines.append(f"{prefix}{len(names)} targets failed and are in no mean: {listed(names)}")
        if names := summary["without_truth"]:
            lines.append(f"{prefix}{len(names)} predictions have no reference structure: {listed(names)}")
        if names := summary["without_prediction"]:
            lines.append(f"{prefix}{len(names)} structures have no prediction and are in no mean: {listed(names)}")
    return lines


def _scores(sets: Sequence[PredictionSet], summaries: Sequence[Mapping[str, Any]]) -> Section:
    """Build a table with a row per metric and columns for each set, and the distributions of two metrics."""
    header, rows = ["score"], []
    for summary in summaries:
        header += [f"{summary['name']}: mean" if len(summaries) > 1 else "mean", "95% interval", "median", "targets"]
    for metric in METRICS:
        if not any(metric.key in summary["means"] for summary in summaries):
            continue
        row = [metric.name]
        for summary in summaries:
            mean = summary["means"].get(metric.key)
            if mean is None:
                row += ["–"] * 4
                continue
            interval = " to ".join(map(metric.show, mean["interval"] or (None,)))
            row += [metric.show(mean["mean"]), interval, metric.show(mean["median"]), str(mean["targets"])]
        rows.append(row)
    drawn = []
    for key, name in (("lddt_ca", "lDDT-Cα"), ("tm", "TM-score")):
        values = {
            prediction_set.name: [row[key] for row in prediction_set.by_target().values()] for prediction_set in sets
        }
        drawn.append((figures.draw_shares(values, name), f"Fraction of targets that reach each {name}."))
    text = "Each mean is over the targets of its row. The interval shows how much it would vary with other targets."
    return Section("Scores", text, drawn, ReportTable(header, rows))


def _comparisons(sets: Sequence[PredictionSet], results: Mapping[str, Any]) -> list[Section]:
    """Build a section for each set that the first set is compared with."""
    sections = []
    for other, comparison in zip(sets[1:], results["comparisons"]):
        a, b = comparison["a"], comparison["b"]
        if not comparison["metrics"]:
            sections.append(Section(f"{a} and {b}", "They have no target in common."))
            continue
        rows = [
            [metric.name, *_difference(metric, paired)]
            for metric in METRICS
            if (paired := comparison["metrics"].get(metric.key)) is not None
        ]
        a_rows, b_rows = sets[0].by_target(), other.by_target()
        common, drawn = [target for target in a_rows if target in b_rows], []
        for key, name in (("lddt_ca", "lDDT-Cα"), ("tm", "TM-score")):
            points = {name: ([b_rows[target][key] for target in common], [a_rows[target][key] for target in common])}
            figure = figures.draw_against(points, (f"{name}, {b}", f"{name}, {a}"), diagonal=True)
            drawn.append((figure, f"Above the line {a} is better."))
        text = (
            f"On the {comparison['common']} targets of both sets. All clusters of similar sequences count equally. The "
            "interval is a t interval of the mean difference over clusters, and a difference is clear if its interval "
            f"excludes 0. Below {MIN_CLUSTERS} clusters there is no interval and no verdict. Positive is better, also "
            "for RMSD, clashes and chain breaks."
        )
        header = ["score", "improvement", "98.5% interval", "verdict", "clusters", "targets", "better on", "worse on"]
        sections.append(Section(f"{a} against {b}", text, drawn, ReportTable(header, rows)))
    return sections


def _difference(metric: Metric, paired: Mapping[str, Any]) -> list[str]:
    digits = metric.digits + 1
    interval = "–"
    if paired["interval"] is not None:
        interval = " to ".join(f"{x:+.{digits}f}" for x in paired["interval"])
    counts = (paired["clusters"], paired["targets"], paired["wins"], paired["losses"])
    return [f"{paired['difference']:+.{digits}f}", interval, paired["verdict"] or "–", *map(str, counts)]


def _groups(sets: Sequence[PredictionSet], summaries: Sequence[Mapping[str, Any]]) -> list[Section]:
    """Build a section for each grouping of targets: means of the groups, and lDDT-Ca over the grouping's column."""
    sections = []
    for by, (heading, _) in GROUPS.items():
        if not any(by in summary["groups"] for summary in summaries):
            continue
        columns = [metric for metric in METRICS if metric.key in GROUP_METRICS]
        columns = [metric for metric in columns if any(metric.key in summary["means"] for summary in summaries)]
        rows = []
        for summary in summaries:
            for group in summary["groups"].get(by, ()):
                name = group_name(group, by)
                name = f"{summary['name']}, {name}" if len(summaries) > 1 else name
                values = [metric.show(group["mean"].get(metric.key)) for metric in columns]
                rows.append([name, str(group["targets"]), *values])
        points = {}
        for prediction_set in sets:
            with_value = [row for row in prediction_set.by_target().values() if row[by] is not None]
            points[prediction_set.name] = ([row[by] for row in with_value], [row["lddt_ca"] for row in with_value])
        figure = figures.draw_against(points, (heading, "lDDT-Cα"), log=by != "train_identity")
        table = ReportTable([heading, "targets", *(metric.name for metric in columns)], rows)
        sections.append(Section(f"By {heading}", "", [(figure, "")], table))
    return sections


def _calibration(sets: Sequence[PredictionSet], summaries: Sequence[Mapping[str, Any]]) -> list[Section]:
    """Build the section that compares pLDDT and PAE with the measured errors."""
    drawn, rows = [], []
    for kind, expected, true, top, unit in (
        ("plddt", "pLDDT", "measured lDDT-Cα", 100.0, ""),
        ("pae", "PAE, Å", "true aligned error, Å", 32.0, " Å"),
    ):
        calibrations = {s["name"]: s["calibration"][kind] for s in summaries if kind in s["calibration"]}
        if not calibrations:
            continue
        short = expected.split(",")[0]
        bins = {name: [b for b in c["bins"] if b["count"] >= 5] for name, c in calibrations.items()}
        items = "residues" if kind == "plddt" else "pairs of residues"
        figure = figures.draw_reliability(bins, expected, true, top)
        drawn.append((figure, f"Measured over expected values of {items}. The dotted line is perfect calibration."))
        for name, c in calibrations.items():
            correlation = "–" if c["correlation"] is None else f"{c['correlation']:.2f}"
            values = (f"{c['error']:.1f}{unit}", f"{c['bias']:+.1f}{unit}", correlation, f"{c['count']:,}")
            rows.append([f"{short}, {name}" if len(summaries) > 1 else short, *values])
    if not rows:
        return []
    points = [(row["plddt"], 100 * row["lddt_ca"]) for row in sets[0].by_target().values() if row["plddt"] is not None]
    if points:
        x, y = map(list, zip(*points))
        drawn.append((figures.draw_calibration(x, y, "target"), f"Each target of {sets[0].name}."))
    text = (
        "Calibration error: the mean distance between measured and expected values over bins of the expected value. "
        "Bias: expected minus measured. A positive bias means an overconfident pLDDT and an underconfident PAE."
    )
    header = ["confidence", "calibration error", "bias", "correlation", "values"]
    return [Section("Calibration of the confidence", text, drawn, ReportTable(header, rows))]


def _all_targets(sets: Sequence[PredictionSet], drawn: int) -> Section:
    """Build the table of all targets with their notes; drawn: number of structures of the first set on the page."""
    rows = [row for prediction_set in sets for row in prediction_set.by_target().values()]
    columns = [m for m in METRICS if m.key not in OMITTED_METRICS and tables.values_of(rows, m.key)]
    lines = []
    for prediction_set in sets:
        for row in sorted(
            (m.row for m in prediction_set.measured), key=lambda row: (row["target"].lower(), row["rank"])
        ):
            name = row["target"] if row["rank"] == 1 else f"{row['target']}, rank {row['rank']}"
            name = name if prediction_set is sets[0] else f"{name}, {prediction_set.name}"
            values = [metric.show(row[metric.key]) for metric in columns]
            lines.append([name, f"{row['paired']} of {row['residues']}", *values, "; ".join(row["notes"])])
    header = ["target", "residues", *(metric.name for metric in columns), "notes"]
    selection = f"the worst {WORST} and the best {BEST}" if drawn < len(sets[0].best) else "all"
    text = f"Drawn below, with the truth in grey: {selection} of {sets[0].name} by lDDT-Cα." if drawn else ""
    return Section("All targets", text, table=ReportTable(header, lines))


def _target(measured: Measured) -> Target | None:
    """Prepare a prediction and its superposed truth for the page; None if it is too large or its file is gone.

    Residues without a Cα are removed, and the others are numbered from 1 in each chain, as the page's script expects.
    """
    try:
        paired, *_ = read_pair(measured.job)
    except UserError:
        return None
    chains = paired.predicted.chains
    if sum(len(chain.sequence) for chain in chains.values()) > MAX_DRAWN:
        return None
    plddt, _ = read_plddt(chains, measured.job.prediction.writes_plddt)
    lddt = {name: np.full(len(chain.sequence), np.nan) for name, chain in chains.items()}
    start, per_residue = 0, 100 * paired.lddt_ca_per_residue()
    for name, atoms in paired.atoms.items():
        of_chain = per_residue[start : start + len(atoms.predicted_residue)]
        is_paired = atoms.predicted_residue >= 0
        lddt[name][atoms.predicted_residue[is_paired]] = of_chain[is_paired]
        start += len(atoms.predicted_residue)
    has_ca = {name: chain.mask[:, CA] > 0 for name, chain in chains.items()}
    shown = [_select_residues(chain, has_ca[name]) for name, chain in chains.items()]
    # Predictions without pLDDT are coloured by lDDT.
    values = lddt if plddt is None else plddt
    confidence = np.nan_to_num(np.concatenate([values[name][mask] for name, mask in has_ca.items()]))
    ends = np.cumsum([len(chain.sequence) for chain in shown]).tolist()
    pae, all_has_ca = None, np.concatenate(list(has_ca.values()))
    if measured.pae is not None and measured.job.prediction.pae is not None and len(all_has_ca) <= MAX_EMBEDDED_PAE:
        pae = read_pae(measured.job.prediction.pae, all_has_ca)[np.ix_(all_has_ca, all_has_ca)]
    positions, predicted_mask, truth, *_ = paired.arrays
    is_compared = predicted_mask[:, CA]
    rotation, translation = metrics.superpose(truth[is_compared, CA], positions[is_compared, CA])
    moved_chains = [
        replace(_select_residues(chain, chain.mask[:, CA] > 0), id=PDB_CHAINS[i % len(PDB_CHAINS)])
        for i, chain in enumerate(paired.reference.chains[name] for name in paired.chains.values())
    ]
    moved_chains = [replace(chain, positions=chain.positions @ rotation.T + translation) for chain in moved_chains]
    row = measured.row
    numbers = [(metric.name, metric.show(row[metric.key])) for metric in METRICS if row[metric.key] is not None]
    by_chain = np.split(confidence, ends[:-1])
    return Target(
        name=row["target"],
        sequence=":".join(chain.sequence for chain in shown),
        plddt=confidence,
        ca=np.concatenate([chain.positions[:, CA] for chain in shown]).astype(np.float64),
        mmcif=write_mmcif(row["target"], shown, b_factors=by_chain),
        pae=pae,
        has_pdb=len(shown) <= len(PDB_CHAINS) and all(len(chain.id) == 1 for chain in shown),
        numbers=[("residues", str(len(confidence))), *numbers],
        warnings=row["notes"],
        truth_mmcif=write_mmcif(f"{row['target']} truth", moved_chains),
        truth_ca=np.concatenate([chain.positions[:, CA] for chain in moved_chains]).astype(np.float64),
        lddt=np.concatenate([lddt[name][mask] for name, mask in has_ca.items()]),
        chains={c.id: slice(end - len(c.sequence), end) for c, end in zip(shown, ends)} if len(shown) > 1 else {},
    )


def _select_residues(chain: Chain, selected: np.ndarray) -> Chain:
    """Select residues of a chain by a mask [N], and number them from 1."""
    count = int(selected.sum())
    return replace(
        chain,
        sequence="".join(itertools.compress(chain.sequence, selected)),
        positions=chain.positions[selected],
        mask=chain.mask[selected],
        residue_index=np.arange(count),
        author_numbers=tuple(str(index + 1) for index in range(count)),
        b_factors=None,
    )
