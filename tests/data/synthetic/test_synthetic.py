"""Sample proteins: chemistry, packing, alignments, files."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from warpfold.data.formats.alignment import read_alignment
from warpfold.data.structure.mmcif import read_structure
from warpfold.data.synthetic.backbone import (
    MIN_DISTANCE,
    MIN_POLAR,
    build,
    distances,
    expected_radius,
    radius_of_gyration,
    with_o_and_cb,
)
from warpfold.data.synthetic.folder import generate
from warpfold.data.synthetic.folds import FOLDS, LOOPS
from warpfold.data.synthetic.proteins import Protein, make_protein, to_chain
from warpfold.data.synthetic.sidechain import ROTAMERS, rotamers
from warpfold.errors import UserError
from warpfold.geometry.residue import ATOM14_MASK, ATOM14_NAMES, RESTYPE_ORDER

COUNT = 24


@cache
def proteins() -> list[Protein]:
    return [make_protein(5, index) for index in range(COUNT)]


def dihedral(a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray) -> np.ndarray:
    axis = (c - b) / np.linalg.norm(c - b, axis=-1, keepdims=True)
    left = (a - b) - ((a - b) * axis).sum(-1, keepdims=True) * axis
    right = (d - c) - ((d - c) * axis).sum(-1, keepdims=True) * axis
    return np.degrees(np.arctan2((np.cross(axis, left) * right).sum(-1), (left * right).sum(-1)))


def angle(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    u, v = a - b, c - b
    return np.degrees(np.arccos((u * v).sum(-1) / np.linalg.norm(u, axis=-1) / np.linalg.norm(v, axis=-1)))


def off(a: np.ndarray, b: np.ndarray | float) -> float:
    """Largest difference of angles in degrees."""
    return float(np.abs((a - b + 180.0) % 360.0 - 180.0).max())


def heavy_atoms(protein: Protein) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Positions, residues and names of all atoms."""
    types = [RESTYPE_ORDER[letter] for letter in protein.sequence]
    residue, slot = np.nonzero(ATOM14_MASK[types])
    return protein.atoms[residue, slot], residue, [ATOM14_NAMES[types[i]][k] for i, k in zip(residue, slot)]


@pytest.mark.parametrize("seed", range(3))
def test_chain_has_the_torsions_and_bonds_asked_for(seed: int) -> None:
    asked = np.random.default_rng(seed).uniform(-180, 180, (2, 9, 2))
    n, ca, c = np.moveaxis(build(asked), 2, 0)
    assert off(dihedral(c[:, :-1], n[:, 1:], ca[:, 1:], c[:, 1:]), asked[:, 1:, 0]) < 1e-6
    assert off(dihedral(n[:, :-1], ca[:, :-1], c[:, :-1], n[:, 1:]), asked[:, :-1, 1]) < 1e-6
    assert off(dihedral(ca[:, :-1], c[:, :-1], n[:, 1:], ca[:, 1:]), 180.0) < 1e-6
    np.testing.assert_allclose(np.linalg.norm(n[:, 1:] - c[:, :-1], axis=-1), 1.329, atol=1e-9)
    np.testing.assert_allclose(angle(ca[:, :-1], c[:, :-1], n[:, 1:]), 117.2, atol=1e-6)


def test_backbones_are_ideal() -> None:
    """Lengths within 0.01 A and angles within 1 degree of Engh & Huber."""
    for protein in proteins():
        n, ca, c, o = np.moveaxis(protein.atoms[:, :4], 1, 0)
        for a, b, length in ((n, ca, 1.459), (ca, c, 1.525), (c, o, 1.231), (c[:-1], n[1:], 1.329)):
            np.testing.assert_allclose(np.linalg.norm(a - b, axis=-1), length, atol=0.01)
        for points, degrees in (((n, ca, c), 111.0), ((ca, c, o), 120.1), ((c[:-1], n[1:], ca[1:]), 121.7)):
            np.testing.assert_allclose(angle(*points), degrees, atol=1.0)
        assert off(dihedral(o[:-1], c[:-1], ca[:-1], n[1:]), 180.0) < 1.0, "C, O and the next N in one plane"


def test_residues_are_left_handed_amino_acids() -> None:
    for protein in proteins():
        has = np.array([letter != "G" for letter in protein.sequence])
        n, ca, c, cb = (protein.atoms[has, k] for k in (0, 1, 2, 4))
        volume = (np.cross(n - ca, c - ca) * (cb - ca)).sum(-1)
        assert (volume > 2.0).all(), "L residues have about +2.5 cubic angstrom"


def test_rotamers_have_their_chi_angles() -> None:
    for letter, table in ROTAMERS.items():
        placed = rotamers(letter)
        assert len(placed) == len(table)
        for atoms, chis in zip(placed, table):
            if chis:  # N, CA, CB, and the first atom past it
                assert off(dihedral(atoms[0], atoms[1], atoms[4], atoms[5]), float(chis[0])) < 0.1


def test_no_clashes() -> None:
    """Atoms of residues that are not neighbours keep 3.0 A, or 2.6 A if both are N or O, as hydrogen bonds do.

    Tolerance 0.01 A for CB, which stands a little differently in each residue type.  Neighbours, and the next but one,
    are near by their torsions: those keep 2.6 A wherever more than three bonds lie between.
    """
    for protein in proteins():
        positions, residue, names = heavy_atoms(protein)
        far = distances(positions, positions)
        bonded = ((far < 1.95) & (far > 0.1)).astype(int)
        near = np.eye(len(far), dtype=int) + bonded + bonded @ bonded + bonded @ bonded @ bonded
        far = np.where(near > 0, np.inf, far)
        polar = np.array([name[0] in "NO" for name in names])
        limit = np.where(polar[:, None] & polar[None, :], MIN_POLAR, MIN_DISTANCE)
        apart = np.abs(residue[:, None] - residue[None, :])
        assert (far > np.where(apart > 2, limit, 2.6) - 0.01).all(), protein.name
        assert (bonded.sum(1) <= 4).all(), "no bonds but the residues' own"


def test_proteins_are_compact() -> None:
    """Radius of gyration from 25 % below to 15 % above 2.2 N^0.38; every helix and sheet touches others."""
    for protein in proteins():
        ratio = radius_of_gyration(protein.atoms[:, 1]) / expected_radius(len(protein.sequence))
        assert 0.75 < ratio < 1.15
        backbone = with_o_and_cb(protein.atoms[:, :3], protein.blueprint.torsions[:, 1])
        near = distances(backbone[:, 4], backbone[:, 4]) < 8.0
        bodies = protein.blueprint.bodies
        for body in set(bodies[bodies >= 0].tolist()):
            assert near[np.ix_(bodies == body, (bodies >= 0) & (bodies != body))].sum() >= 3


def test_sequences_follow_the_structure() -> None:
    count = {kind: {letter: 0 for letter in RESTYPE_ORDER} for kind in "HELT"}
    for protein in proteins():
        for letter, kind in zip(protein.sequence, protein.blueprint.elements):
            count[kind][letter] += 1

    def share(kind: str, letters: str) -> float:
        return sum(count[kind][letter] for letter in letters) / sum(count[kind].values())

    assert share("H", "AELKRQM") > 0.7
    assert share("E", "VITYFKR") > 0.6
    assert share("L", "GPNDST") > 0.6
    assert share("H", "G") < 0.1


def test_a_protein_depends_on_seed_and_index_alone(tmp_path: Path) -> None:
    few, many = tmp_path / "few", tmp_path / "many"
    assert generate(few, 2, seed=3) == generate(many, 4, seed=3)[:2]
    for path in (few / "mmcif", few / "msas"):
        for file in path.iterdir():
            assert file.read_bytes() == (many / path.name / file.name).read_bytes()
    other = make_protein(4, 0)
    assert other.sequence != make_protein(3, 0).sequence


def test_files_read_back(tmp_path: Path) -> None:
    reports: list[tuple[int, int, str]] = []
    entries = generate(tmp_path / "set", 3, seed=5, progress=lambda *report: reports.append(report))
    assert [report[:2] for report in reports] == [(1, 3), (2, 3), (3, 3)]
    assert [path.name for path in tmp_path.iterdir()] == ["set"], "no draft is left"
    for entry, protein in zip(entries, proteins()):
        chain = read_structure(tmp_path / "set" / entry["structure"]).chains["A"]
        assert chain.sequence == protein.sequence == entry["sequence"]
        wanted = to_chain(protein)
        np.testing.assert_array_equal(chain.mask, wanted.mask)
        np.testing.assert_allclose(chain.positions, wanted.positions, atol=6e-4)  # three decimals
        alignment = read_alignment(tmp_path / "set" / entry["alignment"])
        assert alignment.query == protein.sequence
        np.testing.assert_array_equal(alignment.rows, protein.alignment.rows)
        np.testing.assert_array_equal(alignment.deletions, protein.alignment.deletions)


def test_relatives_are_spread() -> None:
    identity = np.concatenate([(p.alignment.rows[1:] == p.alignment.rows[0]).mean(1) for p in proteins()])
    assert identity.min() < 0.5
    assert identity.max() > 0.85
    assert 0.5 < np.median(identity) < 0.8
    assert all(16 <= len(p.alignment) <= 128 for p in proteins())
    assert any(p.alignment.deletions.any() for p in proteins())
    assert any((p.alignment.rows == 21).any() for p in proteins())


def test_contacts_covary() -> None:
    """Corrected mutual information between columns is higher for contacts (CB within 8 A, six or more apart)."""
    ahead, precision, chance = [], [], []
    for protein in proteins():
        rows = protein.alignment.rows
        if len(rows) < 48:
            continue
        first, second = np.triu_indices(rows.shape[1], 6)
        score = mutual_information(rows)[first, second]
        cb = with_o_and_cb(protein.atoms[:, :3], protein.blueprint.torsions[:, 1])[:, 4]
        contact = (distances(cb, cb) < 8.0)[first, second]
        ahead.append(score[contact].mean() - score[~contact].mean())
        precision.append(contact[np.argsort(-score)[: rows.shape[1] // 4]].mean())
        chance.append(contact.mean())
    assert len(ahead) >= 10
    assert np.mean(np.array(ahead) > 0) > 0.9
    assert np.mean(precision) > 3 * np.mean(chance)


def mutual_information(rows: np.ndarray) -> np.ndarray:
    """Between all columns, less the average product that depth and entropy alone give (Dunn et al. 2008)."""
    one_hot = np.eye(22)[rows]
    alone = one_hot.mean(0)
    joint = np.einsum("ria,rjb->ijab", one_hot, one_hot, optimize=True) / len(rows)
    expected = alone[:, None, :, None] * alone[None, :, None, :]
    information = (joint * np.log((joint + 1e-9) / (expected + 1e-9))).sum((2, 3))
    np.fill_diagonal(information, 0.0)
    mean = information.mean(0)
    return information - mean[:, None] * mean[None, :] / information.mean()


def test_loop_types_have_their_own_letters() -> None:
    """A loop's first choice of letters tells it from the others of its kind: the sequence determines the structure."""
    for kind in LOOPS.values():
        assert len({tuple(letters for *_, letters in loop.residues) for loop in kind}) == len(kind)
        assert all(element == "L" for loop in kind for element, *_ in loop.residues)


def test_every_fold_is_made() -> None:
    made = {make_protein(5, index).blueprint.fold.name for index in range(4 * COUNT)}
    assert made == {fold.name for fold in FOLDS}


def test_lengths_and_depth_are_kept() -> None:
    for index in range(4):
        protein = make_protein(0, index, min_length=40, max_length=46, depth=(5, 5))
        assert 40 <= len(protein.sequence) <= 46
        assert len(protein.alignment) == 5


def test_bad_requests(tmp_path: Path) -> None:
    used = tmp_path / "used"
    used.mkdir()
    (used / "something").touch()
    with pytest.raises(UserError, match="used: exists"):
        generate(used, 1)
    with pytest.raises(UserError, match="at least one"):
        generate(tmp_path / "new", 0)
    with pytest.raises(UserError, match="lengths"):
        generate(tmp_path / "new", 1, min_length=50, max_length=40)
    with pytest.raises(UserError, match="lengths"):
        generate(tmp_path / "new", 1, min_length=200, max_length=300)
    with pytest.raises(UserError, match="depth"):
        generate(tmp_path / "new", 1, depth=(9, 3))
    with pytest.raises(UserError, match="seed"):
        generate(tmp_path / "new", 1, seed=-1)
    assert [path.name for path in tmp_path.iterdir()] == ["used"]


def test_a_stop_leaves_nothing(tmp_path: Path) -> None:
    def stop(done: int, total: int, what: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(tmp_path / "set", 2, progress=stop)
    assert list(tmp_path.iterdir()) == []
