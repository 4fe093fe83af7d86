"""Test relaxation with OpenMM, if it is installed: it repairs broken structures, and atoms move only a little."""

import dataclasses
import json
from pathlib import Path

import gemmi
import numpy as np
import pytest

from tests.relaxation.test_relax import protein, why_not_fit, with_id  # noqa: F401
from warpfold.data.structure.chain import Chain
from warpfold.data.structure.mmcif import read_structure
from warpfold.data.structure.write import Modelling, write_mmcif
from warpfold.geometry.residue import ATOM_ORDER
from warpfold.relaxation.files import relax_paths
from warpfold.relaxation.relax import find_flaws, join_chains, relax_chains, split_chains, with_missing_atoms

pytest.importorskip("openmm", reason="needs the extra `relax`")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

CA, SG = ATOM_ORDER["CA"], ATOM_ORDER["SG"]


def clean(chains: list[Chain]) -> bool:
    return not find_flaws(join_chains(chains)).any.any()


def torn(chain: Chain, by: float) -> Chain:
    """Shift the second half of a chain to break a peptide bond."""
    half = (np.arange(len(chain.sequence)) >= len(chain.sequence) // 2)[:, None, None]
    return dataclasses.replace(chain, positions=(chain.positions + half * np.float32(by)) * chain.mask[..., None])


def test_a_broken_bond_is_closed_and_the_ca_stay(protein: Chain) -> None:  # noqa: F811
    broken = torn(protein, 0.6)  # 1 Å
    assert not clean([broken])
    (relaxed,), report = relax_chains([broken])
    assert clean([relaxed])
    assert report.violations_before["bonds"] > 0
    assert report.violations_after == {"residues": 0, "bonds": 0, "clashes": 0, "within": 0}
    moved = np.linalg.norm(relaxed.positions - broken.positions, axis=-1)[:, CA]
    assert report.ca_rmsd == pytest.approx(np.sqrt(np.mean(moved**2)), abs=1e-3)
    assert report.ca_rmsd < 0.5
    assert (relaxed.id, relaxed.sequence, relaxed.author_numbers) == ("A", protein.sequence, protein.author_numbers)
    np.testing.assert_array_equal(relaxed.mask, protein.mask)


def test_a_dimer_with_clashes_at_its_interface_comes_out_clean(protein: Chain) -> None:  # noqa: F811
    width = np.ptp(protein.positions[:, CA], axis=0)[0]
    dimer = [protein, with_id(protein, "BB", (float(width) + 1.0, 0, 0))]
    assert find_flaws(join_chains(dimer)).clashes.any()
    relaxed, report = relax_chains(dimer)
    assert clean(relaxed)
    assert report.ca_rmsd < 0.5


def part(chain: Chain, length: int) -> Chain:
    """Return the first residues of a chain."""
    fields = ("sequence", "positions", "mask", "residue_index", "author_numbers")
    return dataclasses.replace(chain, **{field: getattr(chain, field)[:length] for field in fields})


def test_atoms_at_one_place_are_parted_the_same_way_each_time(protein: Chain) -> None:  # noqa: F811
    twins = [part(protein, 8), with_id(part(protein, 8), "B")]
    relaxed, report = relax_chains(twins)
    assert report.energy_before is None or report.energy_before > 1e6
    assert np.isfinite(report.energy_after)
    assert report.violations_after["residues"] < report.violations_before["residues"]
    for one, other in zip(relaxed, relax_chains(twins)[0]):
        np.testing.assert_array_equal(one.positions, other.positions)


def test_a_gpu_that_cannot_be_used_is_replaced_by_the_cpu_and_that_is_said(protein: Chain) -> None:  # noqa: F811
    _, report = relax_chains([part(protein, 5)], device="cuda")
    assert report.platform.startswith(("CUDA", "HIP (CUDA: ", "OpenCL (CUDA: ", "CPU (CUDA: "))


def test_mirrored_residues_are_counted(protein: Chain) -> None:  # noqa: F811
    piece = part(protein, 6)
    mirrored = dataclasses.replace(piece, positions=piece.positions * np.array([1, 1, -1], np.float32))
    assert relax_chains([piece])[1].mirrored == 0
    assert relax_chains([mirrored])[1].mirrored == 6 - piece.sequence.count("G")


def test_gaps_unknown_residues_and_missing_atoms(protein: Chain) -> None:  # noqa: F811
    sequence = protein.sequence[:9] + "X" + protein.sequence[10:]
    chain = dataclasses.replace(why_not_fit(protein, 4, list(range(3, 37))), sequence=sequence)
    (relaxed,), report = relax_chains([chain])
    np.testing.assert_array_equal(relaxed.positions[9], chain.positions[9])
    assert report.left_out == 1
    assert report.built_atoms > 0
    assert report.violations_after["residues"] == 0
    assert relaxed.mask[4].sum() == protein.mask[4].sum()


def test_near_cysteines_are_bonded(protein: Chain) -> None:  # noqa: F811
    piece = part(protein, 8)
    cysteine = dataclasses.replace(why_not_fit(piece, 4, list(range(5, 37))), sequence=piece.sequence[:4] + "CAAA")
    whole = np.isin(np.arange(37), [ATOM_ORDER[name] for name in ("N", "CA", "C", "O", "CB")])
    alanines = np.where((np.arange(8) < 4)[:, None], cysteine.mask, whole & (cysteine.mask > 0)).astype(np.float32)
    residues = with_missing_atoms(join_chains([dataclasses.replace(cysteine, mask=alanines)]))
    (one,) = split_chains([cysteine], residues)
    sulfur = one.positions[4, SG]
    outwards = sulfur - one.positions[:, CA].mean(0)
    axis = np.cross(outwards, (1.0, 2.0, 3.0))
    axis /= np.linalg.norm(axis)
    pole = sulfur + 1.02 * outwards / np.linalg.norm(outwards)
    away = one.positions - pole
    # Rotate by 180 degrees, so that the SG atoms are 2.04 Å apart.
    turned = pole + 2 * (away @ axis)[..., None] * axis - away
    other = dataclasses.replace(one, id="B", positions=turned.astype(np.float32) * one.mask[..., None])
    relaxed, report = relax_chains([one, other])
    assert report.disulfides == 1
    assert np.linalg.norm(relaxed[0].positions[4, SG] - relaxed[1].positions[4, SG]) == pytest.approx(2.04, abs=0.1)
    apart = dataclasses.replace(other, positions=other.positions + 20 * one.mask[..., None])
    assert relax_chains([one, apart])[1].disulfides == 0


def test_a_file_is_relaxed_once_and_keeps_its_confidence(tmp_path: Path, protein: Chain) -> None:  # noqa: F811
    n = len(protein.sequence)
    chains = [torn(protein, 0.6), with_id(protein, "BB", (40, 0, 0))]
    plddt = [np.linspace(30, 90, n).round(2), np.linspace(50, 70, n).round(2)]
    path = tmp_path / "folded.cif"
    path.write_text(write_mmcif("folded", chains, b_factors=plddt, predicted=Modelling()))
    first = relax_paths([path])
    (entry,) = first["relaxed"]
    assert not first["failures"]
    assert not entry["kept"]
    relaxed = read_structure(tmp_path / "folded_relaxed.cif")
    assert list(relaxed.chains) == ["A", "BB"]
    assert clean(list(relaxed.chains.values()))
    block = gemmi.cif.read(str(tmp_path / "folded_relaxed.cif"))[0]
    scores = [float(value) for value in block.find_values("_ma_qa_metric_local.metric_value")]
    np.testing.assert_allclose(scores, np.concatenate(plddt), atol=0.006)
    # A PDB file cannot hold chain names of two letters.
    assert not (tmp_path / "folded_relaxed.pdb").exists()
    assert any("Write mmCIF" in note for note in entry["notes"])
    assert json.loads((tmp_path / "folded_relaxed.json").read_text())["rounds"] == entry["rounds"]
    (kept,) = relax_paths([path, tmp_path / "folded_relaxed.cif"])["relaxed"]
    assert kept["kept"]
