"""The report of a fine-tuning run: whether the model improved, on which proteins, and its training data."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from warpfold.data.similar.relatives import MIN_IDENTITY
from warpfold.errors import listed
from warpfold.evaluation.before_after import Measure, Measured, compared, target_with_truth
from warpfold.report import figures
from warpfold.report.report import ReportPage, ReportTable, Section, Warned
from warpfold.scoring.intervals import MIN_CLUSTERS

# The number of test proteins that are shown in 3D.
DRAWN = 4
PARTS = {"test": "the test, which training never saw", "general": "held-out entries of the general store"}


def verdict(result: Mapping[str, Any]) -> str:
    """Describe whether the lDDT-Ca of the test set improved, or that training improved nothing."""
    if result["params"]["step"] == 0:
        ending = f" ({result['ended']})" if result["ended"] else ""
        return (
            "Not better: the starting parameters were kept, as no validation was better than the one before training. "
            f"Training ended after step {result['steps']:,}{ending}. Try a lower learning rate (--set "
            f"optim.learning_rate={result['settings']['optim']['learning_rate'] / 4:.2g}), adapters (--adapters 8), "
            "or more structures."
        )
    comparison = result["compared"]["test"]["lddt_ca"]
    size = f"{counted(comparison['targets'], 'protein')} of {counted(comparison['clusters'], 'cluster')}"
    if comparison["verdict"] is None:
        return (
            f"No verdict: the test has {size}, and a verdict needs {MIN_CLUSTERS} clusters. lDDT-Cα changed by "
            f"{comparison['difference']:+.3f}."
        )
    low, high = comparison["interval"]
    change = (
        f"lDDT-Cα of proteins that training never saw changed by {comparison['difference']:+.3f} "
        f"(98.5 % interval {low:+.3f} to {high:+.3f}) on {size}."
    )
    if comparison["verdict"] == "worse":
        return f"Worse: {change} Keep the old parameters."
    return f"{'Better' if comparison['verdict'] == 'better' else 'No clear difference'}: {change}"


def folded_with(result: Mapping[str, Any]) -> str:
    """Describe the sampling, recycles and seed of the predictions before and after training."""
    folded = result["folded"]
    return (
        f"before and after with {counted(folded['recycles'], 'recycle')}, {folded['max_msa']} clustered and "
        f"{folded['max_extra']} extra alignment rows, seed {folded['seed']}"
    )


def unaligned_warning(names: Sequence[str], chains: int) -> str:
    """Describe how many chains have no alignment."""
    return (
        f"{len(names)} of {counted(chains, 'chain')} without an alignment, used by the sequence alone: {listed(names)}"
    )


def counted(count: int, noun: str) -> str:
    """Format a number with its noun: "1 cluster", "3 clusters"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def stated_relatives(result: Mapping[str, Any]) -> str:
    """Write the sentence that follows the verdict if --split-identity was raised, otherwise an empty text."""
    limit = result["split_identity"]
    return f" Relatives up to {100 * limit:g} % identity are in training." if limit > MIN_IDENTITY else ""


def table_of(scores: Mapping[str, Any], measures: Sequence[Measure]) -> ReportTable:
    """Build the table of a set's measures: before, after, and the difference with its interval."""
    rows = []
    for measure in (candidate for candidate in measures if candidate.key in scores):
        comparison = scores[measure.key]
        low, high = comparison["interval"] or (None, None)
        interval = "-" if low is None else f"{low:+.3f} to {high:+.3f}"
        counts = f"{comparison['wins']} / {comparison['losses']} of {comparison['targets']}"
        means = [f"{comparison['before']:.3f}", f"{comparison['after']:.3f}", f"{comparison['difference']:+.3f}"]
        rows.append([measure.label, *means, interval, counts])
    return ReportTable(["mean of", "before", "after", "difference", "98.5 % interval", "better / worse"], rows)


def comparison_sections(result: Mapping[str, Any]) -> list[str]:
    """Write the scores before and after training as Markdown, with one section per set of proteins."""
    lines = list[str]()
    for kind, scores in result["compared"].items():
        lines += [
            f"## {PARTS[kind].capitalize()}",
            "",
            "| mean of | before | after | difference | 98.5 % interval | better / worse / of |",
            "|---|---|---|---|---|---|",
        ]
        for name, score in scores.items():
            interval = "-" if score["interval"] is None else "{:+.4f} to {:+.4f}".format(*score["interval"])
            lines.append(
                f"| {name} | {score['before']:.4f} | {score['after']:.4f} | {score['difference']:+.4f} "
                f"| {interval} | {score['wins']} / {score['losses']} / {score['targets']} |"
            )
        lines.append("")
    return lines


def report_page(
    out: Path, result: Mapping[str, Any], measured: Mapping[str, Sequence[Measured]], measures: Sequence[Measure]
) -> ReportPage:
    """Build the page from the summary `result`. Predictions of the test set are in `out/after`, in the same order."""
    test, scores = measured["test"], result["compared"]["test"]["lddt_ca"]
    warned = []
    if result["split_by"] == "chain":
        limitation = "proteins of the test have relatives in training: this says how well the family is known, no more"
        warned.append(Warned(f"split by chain: {limitation}"))
    if result["without_alignment"]:
        warned.append(Warned(unaligned_warning(result["without_alignment"], result["chains"])))
    if scores["verdict"] is None:
        many = counted(scores["clusters"], "cluster")
        warned.append(Warned(f"the test has {many}: too few for a verdict, which needs {MIN_CLUSTERS}"))
    order = sorted(range(len(test)), key=lambda i: measures[0].of(test[i])[0] - measures[0].of(test[i])[1])
    drawn = order[:: max(1, len(test) // DRAWN)][:DRAWN]
    sections = [
        Section(
            f"Is it better? {PARTS[kind].capitalize()}",
            f"The same proteins, one of each distinct sequence, folded {folded_with(result)}. All "
            "clusters count equally. The interval is a t interval of the mean difference over clusters: if it contains "
            f"zero, the difference may be chance. Below {MIN_CLUSTERS} clusters there is no interval and no verdict.",
            table=table_of(result["compared"][kind], measures),
        )
        for kind in measured
    ]
    shown = [measures[0], next(measure for measure in measures if measure.key == "tm")]
    sections.append(compared("Each protein of the test", "protein", test, shown))
    lddt, loss = figures.draw_training(out / "run" / "metrics.jsonl", "validation")
    training = Section(
        "Training",
        f"{result['entries']['training']} proteins were trained on. {result['entries']['validation']} others, of which "
        "none is in the test, chose the parameters: those of step "
        f"{result['params']['step']:,} of {result['steps']:,}.",
        [
            (lddt, "Validation: with the averaged weights. Training: of each step's crops, before its update."),
            (loss, "Where validation rises while training falls, the run remembers its proteins."),
        ],
    )
    sections.append(training)
    seconds = " · ".join(f"{stage} {value:.0f} s" for stage, value in result["seconds"].items())
    versions = result["versions"]
    return ReportPage(
        title="Fine-tuned",
        lead=verdict(result) + stated_relatives(result),
        facts=[
            ("lDDT-Cα of the test, before", f"{scores['before']:.3f}"),
            ("after", f"{scores['after']:.3f}"),
            ("proteins trained on", str(result["entries"]["training"])),
            ("tested on", str(len(result["tested"]))),
            ("related entries left out", f"{sum(result['left_out'].values()):,}"),
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
