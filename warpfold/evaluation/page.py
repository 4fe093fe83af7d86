"""The page of an evaluation: the numbers, how sure they are, where predictions are good, and the structures."""

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
from warpfold.evaluation.confidence import CA, plddt_of
from warpfold.evaluation.evaluate import PredictionSet
from warpfold.evaluation.measure import Measured, read_pair
from warpfold.evaluation.tables import GROUPS, METRICS, Metric, group_name
from warpfold.report import figures
from warpfold.report.report import ReportPage, ReportTable, Section, Target, Warned
from warpfold.scoring import metrics
from warpfold.scoring.intervals import MIN_CLUSTERS

WORST, BEST = 6, 3  # structures drawn of the first set
LONGEST = 3000  # residues of a structure that is drawn
DOWNLOADED_PAE = 1000  # residues up to which its PAE is in the page
SHOWN = ("lddt", "lddt_ca", "gdt_ts", "tm", "dockq")  # in tables of groups
UNLISTED = ("coverage", "qs_global", "ics", "ips", "chain_breaks")  # not in the table of all targets


def evaluation_page(sets: Sequence[PredictionSet], found: Mapping[str, Any]) -> ReportPage:
    """Return the page of what `report` has found."""
    of_sets = found["sets"]
    first, means = of_sets[0], of_sets[0]["means"]
    facts = [("targets scored", f"{first['targets']}")]
    for metric in METRICS:
        if metric.key in (*SHOWN, "rmsd") and metric.key in means:
            own = means[metric.key]
            of = f" of {first['name']}" if len(of_sets) > 1 else ""
            over = "" if own["targets"] == first["targets"] else f", {own['targets']} targets"
            facts.append((f"mean {metric.name}{of}{over}", metric.show(own["mean"])))
    sections = [
        _scores(sets, of_sets),
        *_comparisons(sets, found),
        *_where(sets, of_sets),
        *_calibration(sets, of_sets),
    ]
    drawn = _chosen(sets[0])
    targets = [target for one in drawn if (target := _target(one)) is not None]
    sections += [_all_targets(sets, len(targets)), *_failures(of_sets)]
    names = " and ".join(f"{one['name']} ({one['layout']})" for one in of_sets)
    suite = found["suite"]
    against = f"the suite {suite['title'] or suite['file']}" if suite else found["truth"]
    return ReportPage(
        title="How good the predictions are",
        lead=f"{names} against {against}.",
        facts=facts,
        sections=sections,
        targets=targets,
        warnings=[Warned(warning) for warning in warnings_of(of_sets)],
        footer=[
            *(f"{metric.name}: {found['definitions'][metric.key]}." for metric in METRICS if metric.key in means),
            f"Intervals of means: 95% bootstrap over targets, seed {found['seed']}. WarpFold {__version__}."
            + (f" Suite: {suite['file']}, SHA-256 {suite['sha256']}." if suite else ""),
        ],
        made_by="warpfold evaluate",
    )


def warnings_of(of_sets: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what is left out of the means, a line for each kind and set."""
    said = []
    for one in of_sets:
        of = f"{one['name']}: " if len(of_sets) > 1 else ""
        if names := [failure["target"] for failure in one["failures"]]:
            said.append(f"{of}{len(names)} targets failed and are in no mean: {listed(names)}")
        if names := one["without_truth"]:
            said.append(f"{of}{len(names)} predictions have no structure to compare with: {listed(names)}")
        if names := one["without_prediction"]:
            said.append(f"{of}{len(names)} structures have no prediction, and are in no mean: {listed(names)}")
    return said


def _scores(sets: Sequence[PredictionSet], of_sets: Sequence[Mapping[str, Any]]) -> Section:
    """Return a row for each metric, with columns for each set."""
    header, rows = ["score"], []
    for one in of_sets:
        header += [f"{one['name']}: mean" if len(of_sets) > 1 else "mean", "95% interval", "median", "targets"]
    for metric in METRICS:
        if not any(metric.key in one["means"] for one in of_sets):
            continue
        row = [metric.name]
        for one in of_sets:
            own = one["means"].get(metric.key)
            if own is None:
                row += ["–"] * 4
                continue
            span = " to ".join(map(metric.show, own["interval"] or (None,)))
            row += [metric.show(own["mean"]), span, metric.show(own["median"]), str(own["targets"])]
        rows.append(row)
    drawn = []
    for key, name in (("lddt_ca", "lDDT-Cα"), ("tm", "TM-score")):
        values = {one.name: [row[key] for row in one.by_target().values()] for one in sets}
        drawn.append((figures.draw_shares(values, name), f"How many targets reach each {name}."))
    text = "Each mean is over the targets of its row; its interval says how much others of the kind would change it."
    return Section("Scores", text, drawn, ReportTable(header, rows))


def _comparisons(sets: Sequence[PredictionSet], found: Mapping[str, Any]) -> list[Section]:
    """Return a section for each set that the first is compared with."""
    sections = []
    for other, one in zip(sets[1:], found["comparisons"]):
        if not one["metrics"]:
            sections.append(Section(f"{one['a']} and {one['b']}", "They have no target in common."))
            continue
        rows = [
            [metric.name, *_difference(metric, paired)]
            for metric in METRICS
            if (paired := one["metrics"].get(metric.key)) is not None
        ]
        ours, theirs = sets[0].by_target(), other.by_target()
        common, drawn = [target for target in ours if target in theirs], []
        for key, name in (("lddt_ca", "lDDT-Cα"), ("tm", "TM-score")):
            points = {name: ([theirs[target][key] for target in common], [ours[target][key] for target in common])}
            figure = figures.draw_against(points, (f"{name}, {one['b']}", f"{name}, {one['a']}"), diagonal=True)
            drawn.append((figure, f"Above the line {one['a']} is better."))
        text = (
            f"On the {one['common']} targets that both have. All clusters of similar sequences count equally. The "
            "interval is a t interval of the mean difference over clusters, and a difference is clear if its interval "
            f"excludes 0. Below {MIN_CLUSTERS} clusters there is no interval and no verdict. Positive is better, also "
            "of RMSD, clashes and chain breaks."
        )
        header = ["score", "better by", "98.5% interval", "verdict", "clusters", "targets", "better on", "worse on"]
        sections.append(Section(f"{one['a']} against {one['b']}", text, drawn, ReportTable(header, rows)))
    return sections


def _difference(metric: Metric, paired: Mapping[str, Any]) -> list[str]:
    digits = metric.digits + 1
    span = "–"
    if paired["interval"] is not None:
        span = " to ".join(f"{x:+.{digits}f}" for x in paired["interval"])
    counts = (paired["clusters"], paired["targets"], paired["wins"], paired["losses"])
    return [f"{paired['difference']:+.{digits}f}", span, paired["verdict"] or "–", *map(str, counts)]


def _where(sets: Sequence[PredictionSet], of_sets: Sequence[Mapping[str, Any]]) -> list[Section]:
    """Return the means of groups of targets, and lDDT-Ca over what they are grouped by."""
    sections = []
    for by, (what, _) in GROUPS.items():
        if not any(by in one["groups"] for one in of_sets):
            continue
        keys = [metric for metric in METRICS if metric.key in SHOWN]
        keys = [m for m in keys if any(m.key in one["means"] for one in of_sets)]
        rows = []
        for one in of_sets:
            for group in one["groups"].get(by, ()):
                name = group_name(group, by)
                values = [metric.show(group["mean"].get(metric.key)) for metric in keys]
                rows.append([f"{one['name']}, {name}" if len(of_sets) > 1 else name, str(group["targets"]), *values])
        points = {}
        for each in sets:
            known = [row for row in each.by_target().values() if row[by] is not None]
            points[each.name] = ([row[by] for row in known], [row["lddt_ca"] for row in known])
        figure = figures.draw_against(points, (what, "lDDT-Cα"), log=by != "train_identity")
        sections.append(
            Section(f"By {what}", "", [(figure, "")], ReportTable([what, "targets", *(m.name for m in keys)], rows))
        )
    return sections


def _calibration(sets: Sequence[PredictionSet], of_sets: Sequence[Mapping[str, Any]]) -> list[Section]:
    """Return how far pLDDT and PAE came true."""
    drawn, rows = [], []
    for kind, expected, true, top, unit in (
        ("plddt", "pLDDT", "measured lDDT-Cα", 100.0, ""),
        ("pae", "PAE, Å", "true aligned error, Å", 32.0, " Å"),
    ):
        known = {one["name"]: one["calibration"][kind] for one in of_sets if kind in one["calibration"]}
        if not known:
            continue
        bins = {name: [b for b in own["bins"] if b["count"] >= 5] for name, own in known.items()}
        each = "residues" if kind == "plddt" else "pairs of residues"
        figure = figures.draw_reliability(bins, expected, true, top)
        drawn.append((figure, f"{expected.split(',')[0]} of {each} against what came true; dotted: as expected."))
        for name, own in known.items():
            label = f"{expected.split(',')[0]}{f', {name}' if len(of_sets) > 1 else ''}"
            correlation = "–" if own["correlation"] is None else f"{own['correlation']:.2f}"
            values = (f"{own['error']:.1f}{unit}", f"{own['bias']:+.1f}{unit}", correlation, f"{own['count']:,}")
            rows.append([label, *values])
    if not rows:
        return []
    both = [(row["plddt"], 100 * row["lddt_ca"]) for row in sets[0].by_target().values() if row["plddt"] is not None]
    if both:
        x, y = map(list, zip(*both))
        drawn.append((figures.draw_calibration(x, y, "target"), f"Each target of {sets[0].name}."))
    text = (
        "Error: how far what came true is from what was expected, the mean over bins of the expected value. Bias: "
        "expected minus true; above 0 pLDDT is too sure, and PAE too careful."
    )
    header = ["confidence", "calibration error", "bias", "correlation", "values"]
    return [Section("Does the model know how good it is?", text, drawn, ReportTable(header, rows))]


def _all_targets(sets: Sequence[PredictionSet], drawn: int) -> Section:
    """Return a row for each target, with its notes; drawn: how many structures of the first set the page has."""
    rows = [row for one in sets for row in one.by_target().values()]
    shown = [metric for metric in METRICS if metric.key not in UNLISTED and tables.values_of(rows, metric.key)]
    lines = []
    for one in sets:
        for row in sorted((m.row for m in one.measured), key=lambda row: (row["target"].lower(), row["rank"])):
            name = row["target"] if row["rank"] == 1 else f"{row['target']}, rank {row['rank']}"
            name = name if one is sets[0] else f"{name}, {one.name}"
            values = [metric.show(row[metric.key]) for metric in shown]
            lines.append([name, f"{row['paired']} of {row['residues']}", *values, "; ".join(row["notes"])])
    header = ["target", "residues", *(metric.name for metric in shown), "notes"]
    some = f"the worst {WORST} and the best {BEST}" if drawn < len(sets[0].best) else "all"
    text = f"Drawn below, with the truth in grey: {some} of {sets[0].name} by lDDT-Cα." if drawn else ""
    return Section("All targets", text, table=ReportTable(header, lines))


def _failures(of_sets: Sequence[Mapping[str, Any]]) -> list[Section]:
    rows = [[f["target"], one["name"], f["error"]] for one in of_sets for f in one["failures"]]
    return [Section("Failed", table=ReportTable(["target", "set", "what went wrong"], rows))] if rows else []


def _chosen(one: PredictionSet) -> list[Measured]:
    """Return which structures are drawn: the worst first, then the best."""
    ordered = sorted(one.best, key=lambda measured: measured.row["lddt_ca"])
    if len(ordered) <= WORST + BEST:
        return ordered
    return [*ordered[:WORST], *ordered[-BEST:]]


def _target(measured: Measured) -> Target | None:
    """Return a prediction as the page draws it, its truth superposed; None if it is too large, or gone meanwhile.

    Residues without a Cα are left out, and the others counted from 1 in each chain, as the page's script counts them.
    """
    try:
        paired, *_ = read_pair(measured.job)
    except UserError:
        return None
    chains = paired.predicted.chains
    if sum(len(chain.sequence) for chain in chains.values()) > LONGEST:
        return None
    plddt, _ = plddt_of(chains, measured.job.prediction.writes_plddt)
    lddt = {name: np.full(len(chain.sequence), np.nan) for name, chain in chains.items()}
    start, per_residue = 0, 100 * paired.lddt_ca_per_residue()
    for name, side in paired.atoms.items():
        own = per_residue[start : start + len(side.predicted_residue)]
        lddt[name][side.predicted_residue[side.predicted_residue >= 0]] = own[side.predicted_residue >= 0]
        start += len(side.predicted_residue)
    kept = {name: chain.mask[:, CA] > 0 for name, chain in chains.items()}
    shown = [_numbered(chain, kept[name]) for name, chain in chains.items()]
    confidence = np.concatenate(
        [lddt[name][seen] if plddt is None else plddt[name][seen] for name, seen in kept.items()]
    )
    confidence = np.nan_to_num(confidence)
    ends = np.cumsum([len(chain.sequence) for chain in shown]).tolist()
    pae, whole = None, np.concatenate(list(kept.values()))
    if measured.pae is not None and measured.job.prediction.pae is not None and len(whole) <= DOWNLOADED_PAE:
        pae = read_pae(measured.job.prediction.pae, whole)[np.ix_(whole, whole)]
    positions, known, truth, *_ = paired.arrays
    rotation, translation = metrics.superpose(truth[known[:, CA], CA], positions[known[:, CA], CA])
    moved = [
        replace(_numbered(chain, chain.mask[:, CA] > 0), id=PDB_CHAINS[i % len(PDB_CHAINS)])
        for i, chain in enumerate(paired.reference.chains[name] for name in paired.chains.values())
    ]
    moved = [
        replace(chain, positions=(chain.positions @ rotation.T + translation) * chain.mask[..., None])
        for chain in moved
    ]
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
        truth_mmcif=write_mmcif(f"{row['target']} truth", moved),
        truth_ca=np.concatenate([chain.positions[:, CA] for chain in moved]).astype(np.float64),
        lddt=np.concatenate([lddt[name][seen] for name, seen in kept.items()]),
        chains={c.id: slice(end - len(c.sequence), end) for c, end in zip(shown, ends)} if len(shown) > 1 else {},
    )


def _numbered(chain: Chain, kept: np.ndarray) -> Chain:
    """Return some residues of a chain [N], numbered from 1."""
    count = int(kept.sum())
    return replace(
        chain,
        sequence="".join(letter for letter, seen in zip(chain.sequence, kept) if seen),
        positions=chain.positions[kept],
        mask=chain.mask[kept],
        residue_index=np.arange(count),
        author_numbers=tuple(str(number) for number in range(1, count + 1)),
        b_factors=None,
    )
