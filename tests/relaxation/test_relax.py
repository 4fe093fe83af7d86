"""Test relaxation without OpenMM: bonds, missing atoms, violations, and the names of result files."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.prediction.test_outputs import prediction
from warpfold.data.structure.chain import Chain
from warpfold.data.structure.write import write_mmcif, write_pdb
from warpfold.data.synthetic.proteins import make_protein, to_chain
from warpfold.errors import UserError
from warpfold.geometry.atoms import atom37_to_atom14
from warpfold.geometry.residue import ATOM37_MASK, ATOM_ORDER, RESTYPE_ORDER
from warpfold.model.violations import clash_violations
from warpfold.prediction.sanity import find_clashes
from warpfold.relaxation import files as relax_files
from warpfold.relaxation import relax
from warpfold.relaxation.amber import end_oxygen
from warpfold.relaxation.files import RelaxTarget, check_result, find_targets, read_b_factors

N, CA, C, O, OXT = (ATOM_ORDER[name] for name in ("N", "CA", "C", "O", "OXT"))


@pytest.fixture(scope="module")
def protein() -> Chain:
    """Build a synthetic protein of good geometry, with all heavy atoms."""
    return to_chain(make_protein(seed=3, index=0))


def with_id(chain: Chain, name: str, shift: tuple[float, float, float] = (0, 0, 0)) -> Chain:
    positions = (chain.positions + np.array(shift, np.float32)) * chain.mask[..., None]
    return dataclasses.replace(chain, id=name, positions=positions)


def why_not_fit(chain: Chain, row: int, atoms: list[int]) -> Chain:
    mask = chain.mask.copy()
    mask[row, atoms] = 0
    return dataclasses.replace(chain, mask=mask, positions=chain.positions * mask[..., None])


def test_residues_are_bonded_along_the_sequence_and_not_across_gaps_or_chains(protein: Chain) -> None:
    n = len(protein.sequence)
    # Residue 6 is isolated between residues with missing atoms.
    gap = why_not_fit(why_not_fit(protein, 5, [CA]), 7, [N])
    sequence = protein.sequence[:12] + "X" + protein.sequence[13:]
    joined = relax.join_chains([dataclasses.replace(gap, sequence=sequence), with_id(protein, "B", (99, 0, 0))])
    segments = [np.flatnonzero(joined.segment == s).tolist() for s in np.unique(joined.segment) if s >= 0]
    assert segments == [list(range(5)), list(range(8, 12)), list(range(13, n)), list(range(n, 2 * n))]
    torn = dataclasses.replace(protein, positions=protein.positions + (np.arange(n) > 9)[:, None, None] * 50)
    assert len(np.unique(relax.join_chains([torn]).segment)) == 1  # far apart, but neighbours
    skipped = np.arange(n) + 3 * (np.arange(n) > 9)
    assert len(np.unique(relax.join_chains([dataclasses.replace(protein, residue_index=skipped)]).segment)) == 2


def test_nothing_to_bond_is_refused(protein: Chain) -> None:
    ca_only = np.zeros_like(protein.mask)
    ca_only[:, CA] = 1
    with pytest.raises(UserError, match="whole residues"):
        relax.join_chains([dataclasses.replace(protein, mask=ca_only)])


def test_missing_atoms_are_built_where_ideal_geometry_has_them(protein: Chain) -> None:
    backbone = np.zeros_like(protein.mask)
    backbone[:, [N, CA, C]] = 1
    joined = relax.join_chains([dataclasses.replace(protein, mask=backbone)])
    whole = relax.with_missing_atoms(joined)
    types = [RESTYPE_ORDER[letter] for letter in protein.sequence]
    np.testing.assert_array_equal(whole.mask, ATOM37_MASK[types] > 0)
    np.testing.assert_array_equal(whole.positions[joined.mask], joined.positions[joined.mask])
    assert not relax.find_flaws(whole).within.any()
    away = np.linalg.norm(whole.positions[:-1, O] - protein.positions[:-1, O], axis=-1)
    # The oxygen is on the correct side of every peptide.
    assert away.max() < 0.1
    complete = relax.join_chains([protein])
    assert relax.with_missing_atoms(complete) is complete


def test_torsions_that_are_seen_are_kept(protein: Chain) -> None:
    row = next(i for i, letter in enumerate(protein.sequence) if letter in "LIMKEQR")
    last = int(np.flatnonzero(protein.mask[row])[-1])
    whole = relax.with_missing_atoms(relax.join_chains([why_not_fit(protein, row, [ATOM_ORDER["CB"]])]))
    moved = np.linalg.norm(whole.positions[row] - protein.positions[row], axis=-1)
    assert moved[ATOM_ORDER["CB"]] < 0.1
    assert moved[last] == 0


def test_a_good_structure_has_no_flaws_and_each_kind_is_found(protein: Chain) -> None:
    n = len(protein.sequence)
    assert relax.find_flaws(relax.join_chains([protein])).counts()["residues"] == 0
    torn = dataclasses.replace(protein, positions=protein.positions + (np.arange(n) > 9)[:, None, None] * np.float32(2))
    flaws = relax.find_flaws(relax.join_chains([torn]))
    assert np.flatnonzero(flaws.bonds).tolist() == [9, 10]
    bent = protein.positions.copy()
    bent[4, C] += 1.5
    flaws = relax.find_flaws(relax.join_chains([dataclasses.replace(protein, positions=bent)]))
    assert flaws.within[4]


def test_clashes_between_chains_count_also_at_equal_numbers(protein: Chain) -> None:
    n = len(protein.sequence)
    joined = relax.join_chains([protein, with_id(protein, "B", (0.5, 0, 0))])
    index = np.arange(2 * n) + (np.arange(2 * n) >= n)
    pairs = find_clashes(joined.positions, joined.mask, np.diff(index) == 1)
    assert {(i, i + n) for i in range(n)} <= {tuple(pair) for pair in pairs.tolist()}
    assert relax.find_flaws(joined).clashes.all()
    # If all residue numbers differ, DeepMind's definition compares all residues.
    aatype = torch.tensor([RESTYPE_ORDER[letter] for letter in joined.sequence])
    atoms = atom37_to_atom14(aatype, torch.from_numpy(joined.positions))
    mask = atom37_to_atom14(aatype, torch.from_numpy(joined.mask.astype(np.float64)))
    theirs = clash_violations(atoms, mask, aatype, torch.from_numpy(index)).per_atom_mask.amax(-1)
    np.testing.assert_array_equal(np.isin(np.arange(2 * n), pairs), theirs.numpy() > 0)


def test_the_end_has_its_second_oxygen_opposite_to_the_first(protein: Chain) -> None:
    atoms = protein.positions[-1]
    end = end_oxygen(atoms)
    assert np.linalg.norm(end - atoms[C]) == pytest.approx(1.25, abs=1e-5)
    assert np.linalg.norm(end - atoms[O]) == pytest.approx(2.15, abs=0.1)  # 120 degrees apart
    assert np.isfinite(end_oxygen(np.zeros((37, 3)))).all()


def run_folder(out: Path) -> list[Path]:
    """Write a folder like those of `predict`, with two ranked predictions of one query."""
    entries = []
    for rank in (1, 2):
        p = prediction(f"model_{rank}")
        files = p.save(out / f"model_{rank}")
        entries.append({"name": "q", "folder": f"model_{rank}", "files": files, "rank": rank})
    summary = {"format": "warpfold-predictions-1", "predictions": entries}
    (out / "summary.json").write_text(json.dumps(summary))
    return [out / entry["folder"] / entry["files"]["mmcif"] for entry in entries]


def test_targets_of_a_folder_and_of_files(tmp_path: Path) -> None:
    structures = run_folder(tmp_path)
    assert [target.path for target in find_targets(tmp_path)] == structures
    assert [target.path for target in find_targets(tmp_path, "best")] == structures[:1]
    (target,) = find_targets(tmp_path / "a.b.cif.gz")
    assert target.result(".cif") == tmp_path / "a.b_relaxed.cif"
    (tmp_path / "x_relaxed.json").touch()
    # Results are skipped, because a shell's *.cif also matches them.
    assert list(find_targets(tmp_path / "x_relaxed.cif")) == []
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match="no output of `warpfold predict`"):
        list(find_targets(tmp_path / "other"))


def test_results_are_kept_unless_the_structure_changed(tmp_path: Path) -> None:
    path = tmp_path / "a.cif"
    path.write_text("one")
    target = RelaxTarget("a", path, "a")
    assert check_result(target, force=False) is None
    target.result(".pdb").write_text("somebody's")
    with pytest.raises(UserError, match="no result of `warpfold relax`"):
        check_result(target, force=True)
    digest = "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"  # sha256 of "one"
    report = {"format": relax_files.FORMAT, "input": digest, "files": {"pdb": "a_relaxed.pdb"}}
    target.result(".json").write_text(json.dumps(report))
    assert check_result(target, force=False) == report
    assert check_result(target, force=True) is None
    path.write_text("two")
    with pytest.raises(UserError, match="made of another"):
        check_result(target, force=False)
    # In the folder of a prediction, the file belongs to WarpFold.
    assert check_result(dataclasses.replace(target, folder=tmp_path), force=False) is None


@pytest.mark.parametrize("kind", ["mmcif", "pdb"])
def test_b_factors_are_read_back_for_each_chain(protein: Chain, kind: str) -> None:
    chains = [protein, with_id(protein, "B", (40, 0, 0))]
    plddt = [np.linspace(1, 99, len(protein.sequence)), np.full(len(protein.sequence), 50.0)]
    write = write_mmcif if kind == "mmcif" else write_pdb
    found = read_b_factors(write("x", chains, b_factors=plddt).encode(), chains)
    for expected, b in zip(plddt, found):
        np.testing.assert_allclose(b, np.broadcast_to(expected[:, None], b.shape), atol=0.006)


def test_without_openmm_one_line_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openmm", None)
    structures = run_folder(tmp_path)
    with pytest.raises(UserError, match=r'pip install "\.\[relax\]"'):
        relax_files.relax_paths(structures)
    monkeypatch.setattr(relax_files, "require_openmm", lambda: None)
    with pytest.raises(UserError, match="for two of the files"):
        relax_files.relax_paths([tmp_path / "a.cif", tmp_path / "a.pdb"])


def test_a_replaced_prediction_takes_its_relaxation_along(tmp_path: Path) -> None:
    p = prediction()
    p.save(tmp_path / "out")
    (tmp_path / "out" / "test_relaxed.cif").write_text("of the earlier one")
    p.save(tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / "test_relaxed.cif").exists()


def test_there_are_three_rounds_as_in_alphafold_and_the_last_is_kept(
    protein: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use a force field that moves all atoms by 1 Å per round, and increases the energy and the violations."""

    class Drifting:
        platform, disulfides = "none", 0

        def __init__(self, residues: relax.ModelledResidues, *_: object) -> None:
            self.residues, self.freed = residues, list[int]()

        def minimise(self, free: np.ndarray) -> None:
            self.freed.append(int(free.sum()))
            # Residues with violations are not restrained.
            assert self.freed == [0, 1, 2][: len(self.freed)]

        def energy(self) -> float:
            return float(len(self.freed))

        def positions(self) -> np.ndarray:
            return self.residues.positions + len(self.freed)

    def flaws(residues: relax.ModelledResidues) -> relax.Flaws:
        moved = round(float(residues.positions[0, CA, 0] - protein.positions[0, CA, 0]))
        worse = np.arange(len(residues.sequence)) < moved
        return relax.Flaws(worse, worse, worse)

    monkeypatch.setattr(relax, "Amber", Drifting)
    monkeypatch.setattr(relax, "find_flaws", flaws)
    (relaxed,), report = relax.relax_chains([protein])
    assert (report.rounds, report.energy_after, report.violations_after["residues"]) == (3, 3, 3)
    moved = (relaxed.positions - protein.positions)[protein.mask > 0]
    np.testing.assert_allclose(moved, 3, atol=1e-3)
