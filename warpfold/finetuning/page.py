"""The page of a fine-tuning: is it better, where, and what was it trained on."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from warpfold.evaluation.before_after import Measure, Measured, compared, target_with_truth
from warpfold.report import figures
from warpfold.report.report import ReportPage, ReportTable, Section, Warned

DRAWN = 4  # proteins of the test that are shown in 3D
FEW = 8  # proteins of a test, below which only large differences can be told from chance
PARTS = {"test": "the test, which training never saw", "general": "held-out entries of the general store"}


def verdict(result: Mapping[str, Any]) -> str:
    """Say in a sentence whether the test became better, by lDDT-Ca."""
    found = result["compared"]["test"]["lddt_ca"]
    change, interval = found["difference"], found["interval"]
    if interval is None:
        return f"lDDT-Cα changed by {change:+.3f} on the only protein of the test, which says nothing of others."
    low, high = interval
    between = f"{change:+.3f} (95 % interval {low:+.3f} to {high:+.3f}) on {found['targets']} proteins"
    if low > 0:
        return f"Better: lDDT-Cα of proteins that training never saw changed by {between}."
    if high < 0:
        return f"Worse: lDDT-Cα of proteins that training never saw changed by {between}. Keep the old parameters."
    return f"No clear difference: lDDT-Cα of proteins that training never saw changed by {between}."


def table_of(scores: Mapping[str, Any], measures: Sequence[Measure]) -> ReportTable:
    """Return the measures of a set: before, after, and the difference with its interval."""
    rows = []
    for measure in (one for one in measures if one.key in scores):
        found = scores[measure.key]
        low, high = found["interval"] or (None, None)
        between = "-" if low is None else f"{low:+.3f} to {high:+.3f}"
        counts = f"{found['wins']} / {found['losses']} of {found['targets']}"
        means = [f"{found['before']:.3f}", f"{found['after']:.3f}", f"{found['difference']:+.3f}"]
        rows.append([measure.label, *means, between, counts])
    return ReportTable(["mean of", "before", "after", "difference", "95 % interval", "better / worse"], rows)


def comparison_sections(result: Mapping[str, Any]) -> list[str]:
    """Write the scores before and after as Markdown, a section for each set of proteins."""
    lines = list[str]()
    for kind, scores in result["compared"].items():
        lines += [
            f"## {PARTS[kind].capitalize()}",
            "",
            "| mean of | before | after | difference | 95 % interval | better / worse / of |",
            "|---|---|---|---|---|---|",
        ]
        for name, score in scores.items():
            low, high = score["interval"] or (float("nan"),) * 2
            lines.append(
                f"| {name} | {score['before']:.4f} | {score['after']:.4f} | {score['difference']:+.4f} "
                f"| {low:+.4f} to {high:+.4f} | {score['wins']} / {score['losses']} / {score['targets']} |"
            )
        lines.append("")
    return lines


def report_page(
    out: Path, result: Mapping[str, Any], measured: Mapping[str, Sequence[Measured]], measures: Sequence[Measure]
) -> ReportPage:
    """Return the page; result: the summary, whose predictions, in the order of the test, lie in `out/after`."""
    test, scores = measured["test"], result["compared"]["test"]["lddt_ca"]
    warned = []
    if result["split_by"] == "chain":
        said = "proteins of the test have relatives in training: this says how well the family is known, no more"
        warned.append(Warned(f"split by chain: {said}"))
    if len(test) < FEW:
        warned.append(Warned(f"the test has {len(test)} proteins: only large differences can be told from chance"))
    order = sorted(range(len(test)), key=lambda i: measures[0].of(test[i])[0] - measures[0].of(test[i])[1])
    drawn = order[:: max(1, len(test) // DRAWN)][:DRAWN]
    sections = [
        Section(
            f"Is it better? {PARTS[kind].capitalize()}",
            "The same proteins, folded with the parameters before and after. The interval is of the mean difference, "
            "by resampling proteins: where it holds zero, the difference may be chance.",
            table=table_of(result["compared"][kind], measures),
        )
        for kind in measured
    ]
    shown = [measures[0], next(one for one in measures if one.key == "tm")]
    sections.append(compared("Each protein of the test", "protein", test, shown))
    sections.append(_training(out / "run" / "metrics.jsonl", result))
    seconds = " · ".join(f"{stage} {value:.0f} s" for stage, value in result["seconds"].items() if value >= 0.5)
    versions = result["versions"]
    return ReportPage(
        title="Fine-tuned",
        lead=verdict(result),
        facts=[
            ("lDDT-Cα of the test, before", f"{scores['before']:.3f}"),
            ("after", f"{scores['after']:.3f}"),
            ("proteins trained on", str(result["entries"]["training"])),
            ("tested on", str(result["entries"]["test"])),
            ("steps", f"{result['steps']:,}"),
        ],
        warnings=warned,
        sections=sections,
        targets=[
            target_with_truth(out / "after", result["predictions"][i], test[i], measures[:1], "before") for i in drawn
        ],
        footer=[
            f"WarpFold {versions['warpfold']} · torch {versions['torch']} · seed {result['seed']} · {seconds}",
            "Everything on this page is in this folder: summary.json, card.md, split.toml, run/, before/, after/.",
        ],
    )


def _training(log: Path, result: Mapping[str, Any]) -> Section:
    lddt, loss = figures.draw_training(log, "validation")
    best = result["params"]["step"]
    return Section(
        "Training",
        f"{result['entries']['training']} proteins were trained on. {result['entries']['validation']} others, of which "
        f"none is in the test, chose the parameters: those of step {best:,} of {result['steps']:,}.",
        [
            (lddt, "Validation: with the averaged weights. Training: of each step's crops, before its update."),
            (loss, "Where validation rises while training falls, the run remembers its proteins."),
        ],
    )
