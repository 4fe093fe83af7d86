"""Test the page of an evaluation: its tables, figures, warnings and facts, and the structures that it shows."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.evaluation.folders import noisy
from tests.evaluation.results import measured_of, record_figures, row, set_of
from tests.scoring.complexes import heterodimer, renamed, without
from tests.scoring.test_score import protein
from warpfold import __version__
from warpfold.data.structure.chain import Chain
from warpfold.data.structure.mmcif import parse_structure
from warpfold.data.structure.write import write_mmcif
from warpfold.evaluation import page as evaluation_pages
from warpfold.evaluation.confidence import PAE_BINS, Sums
from warpfold.evaluation.evaluate import DEFINITIONS, PredictionSet
from warpfold.evaluation.layouts import PredictedFile
from warpfold.evaluation.measure import Job, Measured, measure
from warpfold.evaluation.page import evaluation_page, warnings_of
from warpfold.evaluation.truths import Truth
from warpfold.geometry.residue import ATOM_ORDER
from warpfold.report.report import ReportTable, Section, Target, Warned
from warpfold.scoring import metrics

CA = ATOM_ORDER["CA"]

Figures = list[tuple[Any, str]]


def mean(
    value: float, targets: int, interval: tuple[float, float] | None = None, median: float = 0.5
) -> dict[str, Any]:
    return {"mean": value, "interval": interval, "median": median, "targets": targets}


def summary(name: str, **changes: Any) -> dict[str, Any]:
    """Build the summary of a set in which nothing is missing."""
    empty: dict[str, Any] = {"layout": "AlphaFold", "targets": 2, "means": {}, "groups": {}, "calibration": {}}
    return {"name": name, **empty, "failures": [], "without_truth": [], "without_prediction": [], **changes}


COMPLEX = {
    "lddt": 0.5, "lddt_ca": 0.6, "gdt_ts": 0.55, "gdt_ha": 0.4, "tm": 0.7, "rmsd": 1.236, "dockq": 0.8,
    "ilddt": 0.3, "qs_global": 0.2, "ics": 0.1, "ips": 0.05, "coverage": 0.96, "plddt": 81.26, "clashes": 3,
    "chain_breaks": 4, "depth": 100, "train_identity": 0.4, "notes": ["a note", "another"],
}  # fmt: skip


def two_sets() -> list[PredictionSet]:
    """Build a set of two targets, one of them with two models, and a set that shares the first target with it."""
    ours = [
        row("t2", lddt_ca=0.9, tm=0.8, clashes=0),
        row("t2", lddt_ca=0.1, tm=0.1, rank=2, clashes=1),
        row("T1", **COMPLEX),
    ]
    theirs = [row("t3", lddt_ca=0.3, tm=0.35), row("T1", lddt_ca=0.2, tm=0.25, plddt=50.0, residues=70, depth=7)]
    return [set_of("ours", list(map(measured_of, ours))), set_of("theirs", list(map(measured_of, theirs)))]


def results(*summaries: dict[str, Any], **changes: Any) -> dict[str, Any]:
    shared: dict[str, Any] = {"truth": "t", "suite": None, "comparisons": [], "definitions": DEFINITIONS, "seed": 5}
    return {"sets": list(summaries), **shared, **changes}


@pytest.fixture(autouse=True)
def figures(monkeypatch: pytest.MonkeyPatch) -> None:
    record_figures(monkeypatch)


def section(sections: Any, heading: str) -> Section:
    (found,) = [one for one in sections if one.heading == heading]
    return found


def test_scores_facts_and_lines_of_two_sets() -> None:
    first = summary(
        "ours",
        means={
            "lddt": mean(0.5, 1),
            "lddt_ca": mean(0.75, 2, (0.6, 0.9), 0.755),
            "gdt_ha": mean(0.4, 1),
            "rmsd": mean(1.236, 1, (1, 2), 1.2),
            "clashes": mean(1.5, 2, (0, 3)),
        },
    )
    second = summary("theirs", layout="CASP", means={"lddt_ca": mean(0.25, 2), "tm": mean(0.3, 2)})
    page = evaluation_page(two_sets(), results(first, second))
    assert (page.title, page.made_by) == ("Accuracy of the predictions", "warpfold evaluate")
    assert page.lead == "ours (AlphaFold) and theirs (CASP) against t."
    assert page.facts == [
        ("targets scored", "2"),
        ("mean lDDT of ours, 1 targets", "0.500"),
        ("mean lDDT-Cα of ours", "0.750"),
        ("mean RMSD, Å of ours, 1 targets", "1.24"),
    ]
    none = ["–", "–", "–", "–"]
    columns = ["95% interval", "median", "targets"]
    drawn: Figures = [
        (
            ("draw_shares", {"ours": [0.9, 0.6], "theirs": [0.3, 0.2]}, "lDDT-Cα", {}),
            "Fraction of targets that reach each lDDT-Cα.",
        ),
        (
            ("draw_shares", {"ours": [0.8, 0.7], "theirs": [0.35, 0.25]}, "TM-score", {}),
            "Fraction of targets that reach each TM-score.",
        ),
    ]
    assert page.sections[0] == Section(
        "Scores",
        "Each mean is over the targets of its row. The interval shows how much it would vary with other targets.",
        drawn,
        ReportTable(
            ["score", "ours: mean", *columns, "theirs: mean", *columns],
            [
                ["lDDT", "0.500", "–", "0.500", "1", *none],
                ["lDDT-Cα", "0.750", "0.600 to 0.900", "0.755", "2", "0.250", "–", "0.500", "2"],
                ["GDT-HA", "0.400", "–", "0.500", "1", *none],
                ["TM-score", *none, "0.300", "–", "0.500", "2"],
                ["RMSD, Å", "1.24", "1 to 2", "1.20", "1", *none],
                ["clashes", "1.5", "0 to 3", "0.5", "2", *none],
            ],
        ),
    )
    assert [one.heading for one in page.sections] == ["Scores", "All targets"]
    assert page.footer == [
        *(
            f"{name}: {DEFINITIONS[key]}."
            for key, name in (
                ("lddt", "lDDT"),
                ("lddt_ca", "lDDT-Cα"),
                ("gdt_ha", "GDT-HA"),
                ("rmsd", "RMSD, Å"),
                ("clashes", "clashes"),
            )
        ),
        f"Intervals of means: 95% bootstrap over targets, seed 5. WarpFold {__version__}.",
    ]
    assert (page.warnings, page.targets) == ([], [])


def test_one_set_has_no_name_in_its_columns() -> None:
    suite = {"file": "s.toml", "sha256": "0f", "title": "Some week"}
    one = summary("ours", means={"lddt_ca": mean(0.75, 2)})
    page = evaluation_page(two_sets()[:1], results(one, suite=suite))
    assert page.lead == "ours (AlphaFold) against the suite Some week."
    assert page.facts == [("targets scored", "2"), ("mean lDDT-Cα", "0.750")]
    assert page.sections[0].table is not None
    assert page.sections[0].table.header == ["score", "mean", "95% interval", "median", "targets"]
    assert page.footer[-1] == (
        f"Intervals of means: 95% bootstrap over targets, seed 5. WarpFold {__version__}. Suite: s.toml, SHA-256 0f."
    )
    untitled = evaluation_page(two_sets()[:1], results(one, suite={**suite, "title": ""}))
    assert untitled.lead == "ours (AlphaFold) against the suite s.toml."


def test_what_is_missing_is_stated() -> None:
    failures = [{"target": "t4", "error": "has no atoms"}, {"target": "t5", "error": "too long"}]
    first = summary("ours", failures=failures, without_prediction=["t6"])
    second = summary("theirs", without_truth=["x", "y"])
    assert warnings_of([first]) == [
        "2 targets failed and are in no mean: t4, t5",
        "1 structures have no prediction and are in no mean: t6",
    ]
    page = evaluation_page(two_sets(), results(first, second))
    assert page.warnings == [
        Warned("ours: 2 targets failed and are in no mean: t4, t5"),
        Warned("ours: 1 structures have no prediction and are in no mean: t6"),
        Warned("theirs: 2 predictions have no reference structure: x, y"),
    ]
    rows = [["t4", "ours", "has no atoms"], ["t5", "ours", "too long"]]
    assert page.sections[-1] == Section("Failed", table=ReportTable(["target", "set", "error"], rows))


def test_all_targets() -> None:
    page = evaluation_page(two_sets(), results(summary("ours"), summary("theirs")))
    none = "–"
    header = [
        "lDDT",
        "lDDT-Cα",
        "GDT-TS",
        "GDT-HA",
        "TM-score",
        "RMSD, Å",
        "DockQ",
        "interface lDDT",
        "pLDDT",
        "clashes",
    ]
    scores = ["0.500", "0.600", "0.550", "0.400", "0.700", "1.24", "0.800", "0.300", "81.3", "3"]
    assert page.sections[-1] == Section(
        "All targets",
        "",
        table=ReportTable(
            ["target", "residues", *header, "notes"],
            [
                ["T1", "48 of 50", *scores, "a note; another"],
                ["t2", "48 of 50", none, "0.900", none, none, "0.800", none, none, none, none, "0", ""],
                ["t2, rank 2", "48 of 50", none, "0.100", none, none, "0.100", none, none, none, none, "1", ""],
                ["T1, theirs", "48 of 70", none, "0.200", none, none, "0.250", none, none, none, "50.0", none, ""],
                ["t3, theirs", "48 of 50", none, "0.300", none, none, "0.350", none, none, none, none, none, ""],
            ],
        ),
    )


def test_sets_are_compared() -> None:
    sets = [*two_sets(), set_of("other", [])]
    clear = {"difference": 0.4, "interval": (0.1234, 0.6766), "verdict": "better", "clusters": 9, "targets": 10}
    unclear = {
        "difference": -0.25,
        "interval": None,
        "verdict": None,
        "clusters": 3,
        "targets": 4,
        "wins": 2,
        "losses": 1,
    }
    compared = {"lddt_ca": {**clear, "wins": 8, "losses": 1}, "rmsd": unclear}
    comparisons = [
        {"a": "ours", "b": "theirs", "common": 10, "metrics": compared},
        {"a": "ours", "b": "other", "common": 0, "metrics": {}},
    ]
    made = results(*map(summary, ("ours", "theirs", "other")), comparisons=comparisons)
    page = evaluation_page(sets, made)
    points: Figures = [
        (
            (
                "draw_against",
                {name: ([theirs], [ours])},
                (f"{name}, theirs", f"{name}, ours"),
                {"diagonal": True},
            ),
            "Above the line ours is better.",
        )
        for name, theirs, ours in (("lDDT-Cα", 0.2, 0.6), ("TM-score", 0.25, 0.7))
    ]
    assert page.sections[1:-1] == [
        Section(
            "ours against theirs",
            "On the 10 targets of both sets. All clusters of similar sequences count equally. The interval is a t "
            "interval of the mean difference over clusters, and a difference is clear if its interval excludes 0. "
            "Below 8 clusters there is no interval and no verdict. Positive is better, also for RMSD, clashes and "
            "chain breaks.",
            points,
            ReportTable(
                ["score", "improvement", "98.5% interval", "verdict", "clusters", "targets", "better on", "worse on"],
                [
                    ["lDDT-Cα", "+0.4000", "+0.1234 to +0.6766", "better", "9", "10", "8", "1"],
                    ["RMSD, Å", "-0.250", "–", "–", "3", "4", "2", "1"],
                ],
            ),
        ),
        Section("ours and other", "They have no target in common."),
    ]


def test_groups_of_targets() -> None:
    depth = [
        {"above": 30, "to": 100, "targets": 2, "mean": {"lddt_ca": 0.75, "dockq": 0.8, "gdt_ha": 0.4}},
        {"above": 1000, "to": None, "targets": 1, "mean": {"lddt_ca": 0.5}},
    ]
    identity = [{"above": 0.3, "to": 0.5, "targets": 1, "mean": {"lddt_ca": 0.6}}]
    means = {"lddt_ca": mean(0.75, 2), "dockq": mean(0.8, 1), "gdt_ha": mean(0.4, 1)}
    first = summary("ours", means=means, groups={"depth": depth, "train_identity": identity})
    second = summary("theirs", means={"lddt_ca": mean(0.25, 2)}, groups={"depth": depth[1:]})
    page = evaluation_page(two_sets(), results(first, second))
    by_depth: Figures = [
        (
            (
                "draw_against",
                {"ours": ([100], [0.6]), "theirs": ([7], [0.2])},
                ("alignment rows", "lDDT-Cα"),
                {"log": True},
            ),
            "",
        )
    ]
    heading = "identity with the nearest training sequence"
    by_identity: Figures = [
        (
            ("draw_against", {"ours": ([0.4], [0.6]), "theirs": ([], [])}, (heading, "lDDT-Cα"), {"log": False}),
            "",
        )
    ]
    assert page.sections[1:-1] == [
        Section(
            "By alignment rows",
            "",
            by_depth,
            ReportTable(
                ["alignment rows", "targets", "lDDT-Cα", "DockQ"],
                [
                    ["ours, 31 to 100", "2", "0.750", "0.800"],
                    ["ours, over 1000", "1", "0.500", "–"],
                    ["theirs, over 1000", "1", "0.500", "–"],
                ],
            ),
        ),
        Section(
            f"By {heading}",
            "",
            by_identity,
            ReportTable([heading, "targets", "lDDT-Cα", "DockQ"], [["ours, 30% to 50%", "1", "0.600", "–"]]),
        ),
    ]
    alone = evaluation_page(two_sets()[:1], results(first)).sections[1].table
    assert alone is not None
    assert [line[0] for line in alone.rows] == ["31 to 100", "over 1000"]


def calibration(count: int, bins: tuple[int, ...], correlation: float | None = 0.456) -> dict[str, Any]:
    """Build the calibration of a set whose bins have these counts."""
    rows = [{"count": each, "expected": 50.0, "true": 40.0} for each in bins]
    return {"count": count, "error": 3.21, "bias": 1.25, "correlation": correlation, "bins": rows}


def test_calibration() -> None:
    first = summary("ours", calibration={"plddt": calibration(1234, (4, 5, 6)), "pae": calibration(99, (4,), None)})
    second = summary("theirs", calibration={"plddt": calibration(12, (7,))})
    page = evaluation_page(two_sets(), results(first, second))
    kept = [{"count": count, "expected": 50.0, "true": 40.0} for count in (5, 6, 7)]
    caption = "Measured over expected values of {}. The dotted line is perfect calibration."
    drawn: Figures = [
        (
            ("draw_reliability", {"ours": kept[:2], "theirs": kept[2:]}, "pLDDT", "measured lDDT-Cα", 100.0, {}),
            caption.format("residues"),
        ),
        (
            ("draw_reliability", {"ours": []}, "PAE, Å", "true aligned error, Å", 32.0, {}),
            caption.format("pairs of residues"),
        ),
        (("draw_calibration", [81.26], [60.0], "target", {}), "Each target of ours."),
    ]
    expected = Section(
        "Calibration of the confidence",
        "Calibration error: the mean distance between measured and expected values over bins of the expected value. "
        "Bias: expected minus measured. A positive bias means an overconfident pLDDT and an underconfident PAE.",
        drawn,
        ReportTable(
            ["confidence", "calibration error", "bias", "correlation", "values"],
            [
                ["pLDDT, ours", "3.2", "+1.2", "0.46", "1,234"],
                ["pLDDT, theirs", "3.2", "+1.2", "0.46", "12"],
                ["PAE, ours", "3.2 Å", "+1.2 Å", "–", "99"],
            ],
        ),
    )
    assert section(page.sections, expected.heading) == expected
    # Without pLDDT of the first set there are no points of its targets.
    alone = evaluation_page(two_sets()[1:], results(first)).sections[1]
    assert alone.table is not None
    assert [line[0] for line in alone.table.rows] == ["pLDDT", "PAE"]
    one_kind = summary("ours", calibration={"plddt": calibration(12, (7,))})
    assert [figure[0][0] for figure in evaluation_page(two_sets()[:1], results(one_kind)).sections[1].figures] == [
        "draw_reliability",
        "draw_calibration",
    ]
    without = set_of("ours", [measured_of(row("t2"))])
    assert len(evaluation_page([without], results(first)).sections[1].figures) == 2


def scored(folder: Path, predicted: dict[str, Chain], truth: dict[str, Chain], **file: Any) -> Measured:
    """Write and score a prediction whose pLDDT rises from 50 to 90 in each chain."""
    b_factors = [np.linspace(50, 90, len(chain.sequence)) for chain in predicted.values()]
    (folder / "p.cif").write_text(write_mmcif("p", list(predicted.values()), b_factors=b_factors))
    (folder / "t.cif").write_text(write_mmcif("t", list(truth.values())))
    layout = file.pop("layout", "AlphaFold")
    return measure(Job(PredictedFile("p", folder / "p.cif", layout, ("p",), **file), Truth("t", folder / "t.cif")))


def drawn(*measured: Measured) -> list[Target]:
    return list(evaluation_page([set_of("ours", measured)], results(summary("ours"))).targets)


def test_a_complex_is_drawn_with_its_superposed_truth(tmp_path: Path) -> None:
    """The prediction lacks a Ca and has residues that are unresolved in the truth, whose chains have other names."""
    reference = heterodimer()
    truth = renamed({"A": without(reference["A"], slice(10, 15)), "B": reference["B"]}, "XY")
    predicted = {name: noisy(chain, 0.5, seed) for seed, (name, chain) in enumerate(reference.items())}
    predicted["A"] = without(predicted["A"], slice(5, 6))
    pae = np.random.default_rng(0).uniform(0, 30, (70, 70)).round(2)
    (tmp_path / "pae.json").write_text(json.dumps({"pae": pae.tolist()}))
    measured = scored(tmp_path, predicted, truth, pae=tmp_path / "pae.json")
    (target,) = drawn(measured)
    seen = np.arange(70) != 5
    resolved = ~np.isin(np.arange(70), range(10, 15))
    whole = np.concatenate([chain.positions for chain in predicted.values()])
    known = np.concatenate([chain.positions for chain in reference.values()])
    assert (target.name, target.has_pdb) == ("p", True)
    sequence = reference["A"].sequence
    assert target.sequence == f"{sequence[:5]}{sequence[6:]}:{reference['B'].sequence}"
    assert target.chains == {"A": slice(0, 39), "B": slice(39, 69)}
    plddt = np.concatenate([np.linspace(50, 90, 40), np.linspace(50, 90, 30)])[seen]
    np.testing.assert_allclose(target.plddt, plddt, atol=0.01)
    np.testing.assert_allclose(target.ca, whole[seen, CA], atol=1e-3)
    assert target.pae is not None
    np.testing.assert_allclose(target.pae, pae[np.ix_(seen, seen)], atol=1e-4)
    assert target.truth_ca is not None
    rotation, shift = metrics.superpose(known[seen & resolved, CA], whole[seen & resolved, CA])
    np.testing.assert_allclose(target.truth_ca, known[resolved, CA] @ rotation.T + shift, atol=2e-3)
    assert target.lddt is not None
    mask = resolved[:, None]
    lddt = metrics.lddt_per_residue(whole[:, [CA]], known[:, [CA]], mask, seen[:, None] & mask)
    np.testing.assert_allclose(target.lddt, 100 * lddt[seen], atol=0.5)
    assert np.isnan(target.lddt[9:14]).all()
    numbers = dict(target.numbers)
    assert list(numbers)[:3] == ["residues", "lDDT", "lDDT-Cα"]
    assert (numbers["residues"], numbers["pLDDT"]) == ("69", f"{plddt.mean():.1f}")
    assert list(numbers)[-4:] == ["coverage", "pLDDT", "clashes", "chain breaks"]
    assert "DockQ" in numbers
    assert target.warnings == measured.row["notes"]
    assert len(target.warnings) > 0
    written = parse_structure(target.mmcif.encode(), "p")
    assert [(chain.id, len(chain.sequence)) for chain in written.chains.values()] == [("A", 39), ("B", 30)]
    b_factors = [chain.b_factors for chain in written.chains.values() if chain.b_factors is not None]
    np.testing.assert_allclose(np.concatenate(b_factors), plddt, atol=0.01)
    np.testing.assert_allclose(written.chains["A"].positions, whole[:40][seen[:40]], atol=1e-3)
    assert written.chains["A"].author_numbers == tuple(map(str, range(1, 40)))
    assert target.truth_mmcif is not None
    superposed = parse_structure(target.truth_mmcif.encode(), "t")
    assert list(superposed.chains) == ["A", "B"]
    for (start, stop), chain in zip(((0, 40), (40, 70)), superposed.chains.values()):
        selected = np.arange(start, stop)[resolved[start:stop]]
        atoms = np.concatenate([one.mask for one in reference.values()])[selected]
        expected = (known[selected] @ rotation.T + shift) * atoms[..., None]
        np.testing.assert_array_equal(chain.mask, atoms)
        np.testing.assert_allclose(chain.positions, expected, atol=3e-3)
        np.testing.assert_array_equal(chain.residue_index, np.arange(len(selected)))


def test_a_single_chain_without_plddt_is_coloured_by_lddt(tmp_path: Path) -> None:
    truth, prediction = protein("A", 30, 1), noisy(protein("A", 34, 1), 0.5)
    (tmp_path / "pae.json").write_text(json.dumps({"pae": np.ones((34, 34)).tolist()}))
    measured = scored(tmp_path, {"AA": replace(prediction, id="AA")}, {"A": truth}, layout="CASP")
    text = write_mmcif("p", [replace(prediction, id="AA")], b_factors=[np.full(34, 7.0)])
    (tmp_path / "p.cif").write_text(text)
    (target,) = drawn(measured)
    assert (target.chains, target.has_pdb, target.pae) == ({}, False, None)
    assert target.lddt is not None
    np.testing.assert_array_equal(target.plddt, np.nan_to_num(target.lddt))
    assert target.plddt.max() > 50
    # The PAE of a prediction is not embedded if it could not be compared with errors.
    with_pae = replace(
        measured, job=replace(measured.job, prediction=replace(measured.job.prediction, pae=tmp_path / "pae.json"))
    )
    assert drawn(with_pae)[0].pae is None
    # A prediction whose file is gone is left out.
    (tmp_path / "p.cif").unlink()
    assert drawn(measured) == []


def test_a_chain_id_of_two_letters_does_not_fit_into_a_pdb_file(tmp_path: Path) -> None:
    chains = {name: protein(name, 20, seed) for seed, name in enumerate(("A", "BB"))}
    (target,) = drawn(scored(tmp_path, chains, chains))
    assert (target.has_pdb, list(target.chains)) == (False, ["A", "BB"])


class DrawnError(Exception):
    """Raised when a structure would be drawn."""


def test_structures_of_3000_residues_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(*_: Any) -> None:
        raise DrawnError

    monkeypatch.setattr(evaluation_pages, "read_plddt", draw)
    for residues in (3001, 3000):
        chains = {"A": SimpleNamespace(sequence="A" * 2000), "B": SimpleNamespace(sequence="A" * (residues - 2000))}
        paired = SimpleNamespace(predicted=SimpleNamespace(chains=chains))
        monkeypatch.setattr(evaluation_pages, "read_pair", lambda _, paired=paired: (paired, "", ""))
        with pytest.raises(DrawnError) if residues == 3000 else nullcontext():
            assert drawn(measured_of(row("t"))) == []


@pytest.mark.parametrize("residues", [1000, 1001])
def test_errors_of_1000_residues_are_embedded(residues: int, tmp_path: Path) -> None:
    chain = protein("A", residues, 1)
    mask = np.zeros_like(chain.mask)
    mask[:, CA] = 1
    (tmp_path / "p.cif").write_text(write_mmcif("p", [replace(chain, mask=mask)]))
    np.savez(tmp_path / "p.npz", pae=np.ones((residues, residues), np.float32))
    file = PredictedFile("p", tmp_path / "p.cif", "AlphaFold", ("p",), pae=tmp_path / "p.npz")
    sums = Sums.from_values(np.ones(1), np.ones(1), PAE_BINS)
    (target,) = drawn(Measured(Job(file, Truth("p", tmp_path / "p.cif")), row("p"), pae=sums))
    assert (target.pae is not None) == (residues == 1000)


@pytest.mark.parametrize("residues", [34, 33])
def test_large_structures_and_errors_are_left_out(
    residues: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pae.json").write_text(json.dumps({"pae": np.ones((34, 34)).tolist()}))
    chains = {"A": protein("A", 20, 1), "B": protein("B", 14, 2)}
    measured = scored(tmp_path, chains, chains, pae=tmp_path / "pae.json")
    assert measured.pae is not None
    monkeypatch.setattr(evaluation_pages, "MAX_EMBEDDED_PAE", residues)
    # A PDB file has room for as many chains as there are letters and digits.
    monkeypatch.setattr(evaluation_pages, "PDB_CHAINS", "AB")
    (target,) = drawn(measured)
    assert (target.pae is not None, target.has_pdb) == (residues == 34, True)
    monkeypatch.setattr(evaluation_pages, "MAX_DRAWN", residues)
    assert len(drawn(measured)) == (residues == 34)


@pytest.mark.parametrize(
    ("targets", "names", "selection"),
    [
        (5, "01234", "all"),
        (9, "012345678", "all"),
        (10, "012345789", "the worst 6 and the best 3"),
        (12, "01234591011", "the worst 6 and the best 3"),
    ],
)
def test_the_worst_and_the_best_are_drawn(targets: int, names: str, selection: str, tmp_path: Path) -> None:
    one = scored(tmp_path, {"A": protein("A", 12, 1)}, {"A": protein("A", 12, 1)})
    measured = [
        replace(
            one,
            job=replace(one.job, truth=replace(one.job.truth, name=f"t{number}")),
            row=row(str(number), lddt_ca=number / 20),
        )
        for number in range(targets)
    ]
    page = evaluation_page([set_of("ours", measured[::-1])], results(summary("ours")))
    assert "".join(target.name for target in page.targets) == names
    assert page.sections[-1].text == f"Drawn below, with the truth in grey: {selection} of ours by lDDT-Cα."
