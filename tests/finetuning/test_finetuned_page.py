"""Test the page and the Markdown of a fine-tuning run: verdict, warnings, tables, selected proteins and facts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from warpfold.evaluation.before_after import Measure
from warpfold.finetuning import page
from warpfold.report.report import ReportPage, ReportTable, Section, Warned

MEASURES = [
    Measure(key, label, lambda _, score, key=key: score[key]) for key, label in (("lddt_ca", "lDDT"), ("tm", "TM"))
]


def scores(**changes: Any) -> dict[str, Any]:
    """Build the compared scores of a measure: a clear improvement, unless changed."""
    clear = {"before": 0.5123, "after": 0.6171, "difference": 0.1048, "interval": (0.0514, 0.1582), "verdict": "better"}
    return {**clear, "targets": 12, "clusters": 9, "wins": 10, "losses": 1, **changes}


def result(**changes: Any) -> dict[str, Any]:
    """Build the summary of a run with an improvement, unless changed."""
    tested = {
        "lddt_ca": scores(),
        "tm": scores(before=0.4, after=0.42, difference=0.02, interval=(-0.01, 0.05), wins=7),
    }
    general = {"lddt_ca": scores(difference=-0.0312, interval=None, verdict=None, targets=3, clusters=3, wins=0)}
    made = {
        "compared": {"test": tested, "general": general},
        "params": {"step": 1200},
        "steps": 3000,
        "ended": None,
        "settings": {"optim": {"learning_rate": 1e-3}},
        "folded": {"recycles": 3, "max_msa": 512, "max_extra": 1024, "seed": 7},
        "split_by": "cluster",
        "split_identity": 0.3,
        "without_alignment": [],
        "chains": 40,
        "entries": {"training": 30, "validation": 6, "test": 12},
        "tested": ["a", "b"],
        "left_out": {"training": 1000, "rehearsal": 234},
        "seconds": {"searching": 0.4, "packing": 0.5, "training": 61.6},
        "versions": {"warpfold": "1.2", "torch": "2.9"},
        "seed": 7,
        "predictions": [f"entry {number}" for number in range(9)],
    }
    return {**made, **changes}


def with_test(**changes: Any) -> dict[str, Any]:
    return result(compared={"test": {"lddt_ca": scores(**changes)}})


CHANGED = (
    "lDDT-Cα of proteins that training never saw changed by +0.105 (98.5 % interval +0.051 to +0.158) on 12 proteins "
    "of 9 clusters."
)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (result(), f"Better: {CHANGED}"),
        (with_test(verdict="worse"), f"Worse: {CHANGED} Keep the old parameters."),
        (with_test(verdict="unclear"), f"No clear difference: {CHANGED}"),
        (
            with_test(verdict=None, interval=None, targets=1, clusters=1),
            "No verdict: the test has 1 protein of 1 cluster, and a verdict needs 8 clusters. lDDT-Cα changed by "
            "+0.105.",
        ),
        (
            result(params={"step": 0}),
            "Not better: the starting parameters were kept, as no validation was better than the one before training. "
            "Training ended after step 3,000. Try a lower learning rate (--set optim.learning_rate=0.00025), adapters "
            "(--adapters 8), or more structures.",
        ),
        (
            result(params={"step": 0}, steps=40, ended="train.patience"),
            "Not better: the starting parameters were kept, as no validation was better than the one before training. "
            "Training ended after step 40 (train.patience). Try a lower learning rate (--set "
            "optim.learning_rate=0.00025), adapters (--adapters 8), or more structures.",
        ),
    ],
)
def test_the_verdict(given: dict[str, Any], said: str) -> None:
    assert page.verdict(given) == said


def test_the_first_step_may_be_the_best() -> None:
    assert page.verdict(result(params={"step": 1})) == f"Better: {CHANGED}"


def test_sentences() -> None:
    assert [page.counted(count, "chain") for count in (0, 1, 2)] == ["0 chains", "1 chain", "2 chains"]
    assert page.folded_with(result()) == (
        "before and after with 3 recycles, 512 clustered and 1024 extra alignment rows, seed 7"
    )
    assert page.unaligned_warning(["a", "b"], 1) == (
        "2 of 1 chain without an alignment, used by the sequence alone: a, b"
    )
    stated = {0.3: "", 0.25: "", 0.305: " Relatives up to 30.5 % identity are in training."}
    assert {limit: page.stated_relatives(result(split_identity=limit)) for limit in stated} == stated


HEADER = ["mean of", "before", "after", "difference", "98.5 % interval", "better / worse"]
TEST_ROWS = [
    ["lDDT", "0.512", "0.617", "+0.105", "+0.051 to +0.158", "10 / 1 of 12"],
    ["TM", "0.400", "0.420", "+0.020", "-0.010 to +0.050", "7 / 1 of 12"],
]
# The general store has no TM-score.
GENERAL_ROWS = [["lDDT", "0.512", "0.617", "-0.031", "-", "0 / 1 of 3"]]


def test_the_markdown_has_a_table_for_each_set() -> None:
    header = [
        "| mean of | before | after | difference | 98.5 % interval | better / worse / of |",
        "|---|---|---|---|---|---|",
    ]
    assert page.comparison_sections(result()) == [
        "## The test, which training never saw",
        "",
        *header,
        "| lddt_ca | 0.5123 | 0.6171 | +0.1048 | +0.0514 to +0.1582 | 10 / 1 / 12 |",
        "| tm | 0.4000 | 0.4200 | +0.0200 | -0.0100 to +0.0500 | 7 / 1 / 12 |",
        "",
        "## Held-out entries of the general store",
        "",
        *header,
        "| lddt_ca | 0.5123 | 0.6171 | -0.0312 | - | 0 / 1 / 3 |",
        "",
    ]


def folded(before: float, after: float) -> Any:
    """Build the part of a measured protein that the page reads itself: its scores before and after training."""
    # The order of the proteins by the other score is the opposite one.
    pair = [{"lddt_ca": value, "tm": 1 - value} for value in (before, after)]
    return SimpleNamespace(predictions=(None, None), scores=pair)


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that builds the page; the parts from other modules are replaced by their arguments."""
    monkeypatch.setattr(page.figures, "draw_training", lambda *given: (("lDDT", *given), ("loss", *given)))
    monkeypatch.setattr(page, "compared", lambda *given: ("compared", *given))
    monkeypatch.setattr(page, "target_with_truth", lambda *given: given)
    return lambda made, measured: page.report_page(Path("out"), made, measured, MEASURES)


# Gains of 0.0, 0.1 ... 0.8, in another order. The proteins with the largest gain come first.
GAINS = [0.3, 0.8, 0.0, 0.5, 0.1, 0.7, 0.2, 0.6, 0.4]
BEFORE = [0.2, 0.0, 0.15, 0.05, 0.1, 0.1, 0.2, 0.0, 0.15]


def test_the_whole_page(build: Any) -> None:
    measured = {"test": [folded(low, low + gain) for low, gain in zip(BEFORE, GAINS)], "general": [folded(0.5, 0.4)]}
    made = result()
    text = (
        "The same proteins, one of each distinct sequence, folded before and after with 3 recycles, 512 clustered and "
        "1024 extra alignment rows, seed 7. All clusters count equally. The interval is a t interval of the mean "
        "difference over clusters: if it contains zero, the difference may be chance. Below 8 clusters there is no "
        "interval and no verdict."
    )
    log = (Path("out/run/metrics.jsonl"), "validation")
    training: list[Any] = [
        (("lDDT", *log), "Validation: with the averaged weights. Training: of each step's crops, before its update."),
        (("loss", *log), "Where validation rises while training falls, the run remembers its proteins."),
    ]
    sections: list[Any] = [
        Section("Is it better? The test, which training never saw", text, table=ReportTable(HEADER, TEST_ROWS)),
        Section("Is it better? Held-out entries of the general store", text, table=ReportTable(HEADER, GENERAL_ROWS)),
        ("compared", "Each protein of the test", "protein", measured["test"], MEASURES),
        Section(
            "Training",
            "30 proteins were trained on. 6 others, of which none is in the test, chose the parameters: those of step "
            "1,200 of 3,000.",
            training,
        ),
    ]
    # Every second protein by gain, and not more than four.
    drawn: list[Any] = [
        (Path("out/after"), f"entry {number}", measured["test"][number], MEASURES[:1], "before")
        for number in (GAINS.index(gain) for gain in (0.8, 0.6, 0.4, 0.2))
    ]
    assert build(made, measured) == ReportPage(
        title="Fine-tuned",
        lead=f"Better: {CHANGED}",
        facts=[
            ("lDDT-Cα of the test, before", "0.512"),
            ("after", "0.617"),
            ("proteins trained on", "30"),
            ("tested on", "2"),
            ("related entries left out", "1,234"),
            ("steps", "3,000"),
        ],
        warnings=[],
        sections=sections,
        targets=drawn,
        footer=[
            "WarpFold 1.2 · torch 2.9 · seed 7 · searching 0 s · packing 0 s · training 62 s",
            "Everything on this page is in this folder: summary.json, card.md, split.toml, run/, before/, after/.",
        ],
    )


@pytest.mark.parametrize(("proteins", "drawn"), [(1, 1), (3, 3), (4, 4), (5, 4), (7, 4), (8, 4), (13, 4)])
def test_at_most_four_proteins_are_drawn(build: Any, proteins: int, drawn: int) -> None:
    measured = {"test": [folded(0.0, 0.9 - number / 20) for number in range(proteins)]}
    made = build(result(predictions=list(range(proteins))), measured)
    step = max(1, proteins // 4)
    assert [target[1] for target in made.targets] == [step * number for number in range(drawn)]


def test_warnings_and_raised_limits_are_stated(build: Any) -> None:
    few = {"test": {"lddt_ca": scores(verdict=None, interval=None, clusters=1)}}
    made = result(
        compared=few, split_by="chain", without_alignment=["q"], split_identity=0.5, left_out={}, seconds={"folding": 2}
    )
    built = build(made, {"test": [folded(0.1, 0.2)]})
    assert built.warnings == [
        Warned(
            "split by chain: proteins of the test have relatives in training: this says how well the family is known, "
            "no more"
        ),
        Warned("1 of 40 chains without an alignment, used by the sequence alone: q"),
        Warned("the test has 1 cluster: too few for a verdict, which needs 8"),
    ]
    assert built.lead == (
        "No verdict: the test has 12 proteins of 1 cluster, and a verdict needs 8 clusters. lDDT-Cα changed by +0.105. "
        "Relatives up to 50 % identity are in training."
    )
    assert ("related entries left out", "0") in built.facts
    assert built.footer[0] == "WarpFold 1.2 · torch 2.9 · seed 7 · folding 2 s"
