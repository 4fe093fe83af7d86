"""Test the comparison of two models on entries of a store: truth, scores, tables, figures and superposed structures."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.evaluation.results import record_figures
from tests.scoring.complexes import turn
from tests.training.runs import helix
from warpfold.data.example.raw_example import Assembly, RawExample
from warpfold.data.structure.mmcif import parse_structure
from warpfold.evaluation import before_after
from warpfold.evaluation.before_after import (
    DOCKQ,
    INTERFACE_LDDT,
    IPTM,
    LDDT,
    Measure,
    compared,
    fold_before_after,
    lddt_per_residue,
    means,
    measure,
    target_with_truth,
    true_chains,
)
from warpfold.geometry.residue import ATOM_ORDER
from warpfold.prediction.outputs import Prediction, write_prediction
from warpfold.report.report import ReportTable, Section
from warpfold.scoring.metrics import superpose

CA = ATOM_ORDER["CA"]
LENGTHS = (24, 16)


def example(number: int, missing: slice = slice(0)) -> RawExample:
    """Build one of two helices, with unresolved residues."""
    raw = helix(f"chain{number}", LENGTHS[number], number)
    assert raw.mask is not None
    mask = raw.mask.copy()
    mask[missing] = 0
    return replace(raw, mask=mask)


def dimer(missing: slice = slice(3, 6)) -> Assembly:
    """Build an assembly in which an operator places the second chain near the first one."""
    operators = np.stack([np.eye(3, 4), np.eye(3, 4)])
    operators[1] = np.column_stack([turn(0.7, (0, 0, 1)), [9.0, 2.0, 1.0]])
    chains = (example(0, missing), example(1))
    # The second chain has a deeper alignment than the first one.
    second = replace(chains[1], msa=np.repeat(chains[1].msa, 2, 0), deletions=np.repeat(chains[1].deletions, 2, 0))
    return Assembly("dimer", ("A", "B"), (chains[0], second), operators)


def placed(assembly: Assembly) -> np.ndarray:
    """Return the positions of all atoms in the assembly, also of unresolved residues: [N, 37, 3]."""
    positions = []
    for number, chain in enumerate(assembly.chains):
        assert isinstance(chain, RawExample)
        assert chain.positions is not None
        operator = np.eye(3, 4) if assembly.operators is None else assembly.operators[number]
        positions.append(chain.positions @ operator[:, :3].T + operator[:, 3])
    return np.concatenate(positions)


def prediction_of(assembly: Assembly, noise: float, seed: int = 0, **changes: Any) -> Prediction:
    """Build a prediction with errors of its atoms, in another orientation than the truth."""
    wholes = [example(LENGTHS.index(chain.length)) for chain in assembly.chains]
    mask = np.concatenate([chain.mask for chain in wholes if chain.mask is not None]).astype(np.float32)
    positions = placed(assembly) + np.random.default_rng(seed).normal(0, noise, (len(mask), 37, 3))
    positions = positions @ turn(1.0, (1, 2, 3)).T + [5, 6, 7]
    lengths = [chain.length for chain in assembly.chains]
    several = len(lengths) > 1
    made = Prediction(
        name=assembly.name,
        sequence="".join(chain.sequence for chain in assembly.chains),
        positions=(positions * mask[..., None]).astype(np.float32),
        mask=mask,
        plddt=np.linspace(60, 90, len(mask)).astype(np.float32),
        pae=None,
        max_pae=None,
        ptm=None,
        chain_ids=assembly.ids,
        asym_id=np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths) if several else None,
        iptm=0.75 if several else None,
        details={"seed": 0, "msa_depth": 9, "templates": [], "seconds": {"features": 0.1, "model": 1.0}},
    )
    return replace(made, **changes)


def test_the_truth_has_the_chains_in_their_positions() -> None:
    assembly = dimer()
    before, after = prediction_of(assembly, 0.7), prediction_of(assembly, 0.0)
    found = measure(assembly, before, after)
    assert (found.assembly, found.predictions, found.trained) == (assembly, (before, after), after)
    mask = np.concatenate([np.asarray(chain.mask) for chain in assembly.chains if isinstance(chain, RawExample)])
    truth = found.truth
    assert (truth.id, list(truth.chains)) == ("dimer", ["A", "B"])
    for span, (name, chain), length in zip((slice(0, 24), slice(24, 40)), truth.chains.items(), LENGTHS):
        assert (chain.id, chain.sequence) == (name, after.sequence[span])
        assert chain.author_numbers == tuple(map(str, range(1, length + 1)))
        assert chain.residue_index.tolist() == list(range(length))
        assert chain.positions.dtype == chain.mask.dtype == np.float32
        np.testing.assert_array_equal(chain.mask, mask[span])
        np.testing.assert_allclose(chain.positions, placed(assembly)[span] * mask[span][..., None], atol=1e-5)
    first, second = found.scores
    assert second.lddt == second.lddt_ca == 1
    assert first.lddt_ca < 1
    assert second.complex is not None
    assert second.complex.dockq == pytest.approx(1)
    assert LDDT.of(found) == [first.lddt_ca, 1]
    assert first.complex is not None
    assert DOCKQ.of(found) == [first.complex.dockq, second.complex.dockq]
    assert INTERFACE_LDDT.of(found) == [first.complex.ilddt, second.complex.ilddt]
    assert IPTM.of(found) == [0.75, 0.75]


def test_a_chain_without_atoms_is_an_error() -> None:
    assembly = Assembly("dimer", ("A", "B"), (example(0), replace(example(1), positions=None, mask=None)))
    folded = prediction_of(Assembly("dimer", ("A",), (example(0),)), 0.0)
    with pytest.raises(ValueError, match=r"^dimer: chain B has no atoms$"):
        measure(assembly, folded, folded)


def test_means_are_over_examples_with_both_scores() -> None:
    score = Measure("key", "label", lambda prediction, value: value)
    pairs = [(0.12345, 0.41234), (0.3, 0.5), (math.nan, 0.9), (0.9, math.nan), (0.5, 0.9)]
    examples: list[Any] = [SimpleNamespace(predictions=(None, None), scores=pair) for pair in pairs]
    assert score.means(examples) == {"untrained": 0.3078, "trained": 0.6041}
    missing = Measure("missing", "label", lambda prediction, value: math.nan)
    assert means([score, missing], examples) == {
        "key": {"untrained": 0.3078, "trained": 0.6041},
        "missing": {"untrained": None, "trained": None},
    }
    assert means([], examples) == {}


def test_the_section_has_a_row_for_each_protein(monkeypatch: pytest.MonkeyPatch) -> None:
    record_figures(monkeypatch)
    single = Assembly("single", ("A",), (example(0),))
    measured = [measure(one, prediction_of(one, 0.9, 1), prediction_of(one, 0.4, 2)) for one in (dimer(), single)]
    found = compared("Heading", "protein", measured, [LDDT, DOCKQ])
    rows = []
    for one, sizes in zip(measured, (["40", "12"], ["24", "6"])):
        scores = [f"{score.lddt_ca:.2f}" for score in one.scores]
        scores += [f"{score.complex.dockq:.2f}" if score.complex else "–" for score in one.scores]
        last = one.scores[1]
        rows.append([one.assembly.name, *sizes, *scores, "75", f"{last.tm:.2f}", f"{last.rmsd:.1f}"])
    lddt = np.concatenate([100 * lddt_per_residue(one) for one in measured])
    plddt = np.concatenate([one.trained.plddt for one in measured])
    # Three residues of the dimer are not resolved.
    resolved = np.flatnonzero(~np.isnan(lddt))
    assert np.isnan(lddt).nonzero()[0].tolist() == [3, 4, 5]
    before, after = ([one.scores[when].lddt_ca for one in measured] for when in (0, 1))
    improvement = ("draw_improvement", ["dimer", "single"], before, after, "lDDT-Cα", ("before", "after"), {})
    calibration = ("draw_calibration", plddt[resolved].tolist(), lddt[resolved].tolist(), "residue", {})
    header = ["lDDT-Cα before", "lDDT-Cα after", "DockQ before", "DockQ after", "pLDDT", "TM-score", "RMSD, Å"]
    figures: list[Any] = [
        (improvement, "The held-out examples before and after training."),
        (calibration, "Calibration: measured over expected lDDT of each residue."),
    ]
    assert found == Section(
        "Heading", figures=figures, table=ReportTable(["protein", "residues", "alignment rows", *header], rows)
    )
    named: Any = compared("Heading", "protein", measured, [LDDT], ("old", "new")).figures[0][0]
    assert named[-2] == ("old", "new")


def homodimer() -> tuple[Assembly, Prediction]:
    """Build two copies of a chain, and a prediction that has them in the opposite order."""
    assembly = dimer(slice(0))
    chains = (example(0, slice(3, 6)), example(0))
    assembly = replace(assembly, chains=chains)
    made = prediction_of(assembly, 0.3)
    order = np.r_[24:48, 0:24]
    return assembly, replace(made, positions=made.positions[order])


def test_copies_are_mapped_to_the_chains_that_they_superpose_on(tmp_path: Path) -> None:
    assembly, folded = homodimer()
    measured = measure(assembly, prediction_of(assembly, 0.9, 4), folded)
    first, second = true_chains(measured)
    assert (first.id, second.id) == ("A", "B")
    np.testing.assert_array_equal(first.positions, measured.truth.chains["B"].positions)
    np.testing.assert_array_equal(second.positions, measured.truth.chains["A"].positions)
    lddt = lddt_per_residue(measured)
    assert np.flatnonzero(np.isnan(lddt)).tolist() == [27, 28, 29]
    resolved = ~np.isnan(lddt)
    assert lddt[resolved].mean() == pytest.approx(measured.scores[1].lddt_ca, abs=0.02)

    entry = write_prediction(folded, tmp_path)
    target = target_with_truth(tmp_path, entry, measured, [LDDT, IPTM], "without")
    before, after = LDDT.of(measured)
    assert list(target.numbers)[-4:] == [
        ("lDDT-Cα", f"{after:.2f}"),
        ("without", f"{before:.2f}"),
        ("ipTM", "0.75"),
        ("without", "0.75"),
    ]
    np.testing.assert_allclose(target.lddt, 100 * lddt)
    truth = placed(assembly)[np.r_[24:48, 0:24]]
    rotation, shift = superpose(truth[resolved, CA], folded.ca[resolved])
    assert target.truth_ca is not None
    assert target.truth_ca.dtype == np.float32
    np.testing.assert_allclose(target.truth_ca, truth[resolved, CA] @ rotation.T + shift, atol=1e-4)
    assert target.truth_mmcif is not None
    written = parse_structure(target.truth_mmcif.encode(), "truth")
    assert (written.id, list(written.chains)) == ("dimer_truth", ["A", "B"])
    for number, chain in enumerate(written.chains.values()):
        span = slice(24 * number, 24 * number + 24)
        mask = (first, second)[number].mask
        np.testing.assert_array_equal(chain.mask, mask)
        expected = (truth[span] @ rotation.T + shift) * mask[..., None]
        np.testing.assert_allclose(chain.positions, expected, atol=2e-3)


class Folding:
    """A model whose predictions are its arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[Assembly, dict[str, Any]]] = []

    def fold_example(self, assembly: Assembly, **options: Any) -> tuple[Any, ...]:
        self.calls.append((assembly, options))
        return self, assembly


def test_entries_are_folded_with_both_models(monkeypatch: pytest.MonkeyPatch) -> None:
    single = Assembly("single", ("single",), (example(0),))
    entries = {"1abc_Q": single, "1abc_XY": single, "1abc_1": dimer()}
    monkeypatch.setattr(before_after, "read_assembly", lambda store, key: entries[key])
    monkeypatch.setattr(before_after, "measure", lambda *given: given)
    before, after, store = Folding(), Folding(), object()
    folded: Any = list(fold_before_after(store, [*entries], before, after, 7))  # type: ignore[arg-type]
    # A PDB file has room for one letter, so longer names of chains and those of assemblies stay.
    assert [assembly.ids for assembly, *_ in folded] == [("Q",), ("single",), ("A", "B")]
    for assembly, first, second in folded:
        assert (first[0], second[0]) == (before, after)
        assert first[1].ids == second[1].ids == assembly.ids
        assert [chain.sequence for chain in first[1].chains] == [chain.sequence for chain in assembly.chains]
        assert [chain.length for chain in first[1].chains] == [chain.length for chain in assembly.chains]
    assert [options for _, options in before.calls + after.calls] == [{"seed": 7, "representations": False}] * 6
    same: Any = list(fold_before_after(store, ["1abc_Q"], after, after, 7))  # type: ignore[arg-type]
    assert (same[0][1] is same[0][2], len(after.calls)) == (True, 4)
