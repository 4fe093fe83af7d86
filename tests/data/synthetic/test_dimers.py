"""Sample dimers: how the chains touch, C2 symmetry, what paired rows of their alignments tell, files."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from warpfold.data.formats.alignment import read_alignment
from warpfold.data.structure.mmcif import read_structure
from warpfold.data.synthetic.backbone import MIN_DISTANCE, MIN_POLAR, distances
from warpfold.data.synthetic.dimers import Dimer, make_dimer
from warpfold.data.synthetic.folder import generate
from warpfold.data.synthetic.proteins import Protein
from warpfold.errors import UserError
from warpfold.geometry.residue import ATOM14_MASK, ATOM14_NAMES, RESTYPE_ORDER

COUNT = 8
DEPTH = (96, 128)


@cache
def dimers() -> list[Dimer]:
    return [make_dimer(7, index, 30, 38, DEPTH) for index in range(COUNT)]


def heavy_atoms(protein: Protein) -> tuple[np.ndarray, np.ndarray]:
    """Positions of all atoms, and which are nitrogen or oxygen."""
    types = [RESTYPE_ORDER[letter] for letter in protein.sequence]
    residue, slot = np.nonzero(ATOM14_MASK[types])
    names = [ATOM14_NAMES[types[i]][k] for i, k in zip(residue, slot)]
    return protein.atoms[residue, slot], np.array([name[0] in "NO" for name in names])


def beta(protein: Protein) -> np.ndarray:
    """CB of each residue, CA of glycine: [N, 3]."""
    slot = np.array([1 if letter == "G" else 4 for letter in protein.sequence])
    return protein.atoms[np.arange(len(slot)), slot]


def organisms(protein: Protein) -> dict[str, np.ndarray]:
    """Rows of the relatives by the organism that their names tell."""
    names = protein.alignment.names[1:]
    found = {name.split("|")[2].split("_")[1]: row for name, row in zip(names, protein.alignment.rows[1:])}
    assert len(found) == len(names), "one row of each"
    return found


def information(x: np.ndarray, y: np.ndarray) -> float:
    """Mutual information of two columns of codes, nats."""
    joint = np.zeros((22, 22))
    np.add.at(joint, (x, y), 1 / len(x))
    alone = joint.sum(1)[:, None] * joint.sum(0)
    there = joint > 0
    return float((joint[there] * np.log(joint[there] / alone[there])).sum())


def test_every_second_dimer_is_a_homodimer() -> None:
    for index, dimer in enumerate(dimers()):
        a, b = dimer.chains
        assert dimer.is_homodimer == (index % 2 == 0)
        assert (a.sequence == b.sequence) == dimer.is_homodimer
        assert all(30 <= len(protein.sequence) <= 38 for protein in dimer.chains)


def test_chains_touch_and_do_not_clash() -> None:
    """Atoms of two chains keep the distances that atoms within one keep (0.01 A, as CB of residue types differ)."""
    for dimer in dimers():
        (a, a_polar), (b, b_polar) = map(heavy_atoms, dimer.chains)
        limit = np.where(a_polar[:, None] & b_polar, MIN_POLAR, MIN_DISTANCE)
        assert (distances(a, b) > limit - 0.01).all(), dimer.name
        near = distances(*map(beta, dimer.chains)) < 10.0
        assert near.any(1).sum() >= 6, "an interface of some size"
        assert near.any(0).sum() >= 6


def test_homodimers_have_c2_symmetry() -> None:
    """What moves A onto B moves B onto A, and turns by 180 degrees; of all atoms, to rounding."""
    for dimer in dimers()[::2]:
        a, b = (
            protein.atoms[ATOM14_MASK[[RESTYPE_ORDER[x] for x in protein.sequence]] > 0] for protein in dimer.chains
        )
        u, _, v = np.linalg.svd((a - a.mean(0)).T @ (b - b.mean(0)))
        turn = v.T @ np.diag([1, 1, np.linalg.det(v.T @ u.T)]) @ u.T
        np.testing.assert_allclose((a - a.mean(0)) @ turn.T + b.mean(0), b, atol=1e-6)
        np.testing.assert_allclose((b - a.mean(0)) @ turn.T + b.mean(0), a, atol=1e-6)
        assert np.trace(turn) == pytest.approx(-1.0, abs=1e-9)


def test_interfaces_covary_in_rows_of_one_organism_alone() -> None:
    """Mutual information across the interface: rows that are paired by organism against rows in the files' order."""
    by_organism, by_place = [], []
    for dimer in dimers()[1::2]:
        a, b = dimer.chains
        first, second = organisms(a), organisms(b)
        assert len(first.keys() & second.keys()) < min(len(first), len(second)), "some are known of one chain only"
        both = sorted(first.keys() & second.keys())
        paired = np.stack([first[name] for name in both]), np.stack([second[name] for name in both])
        unpaired = a.alignment.rows[1 : len(both) + 1], b.alignment.rows[1 : len(both) + 1]
        touching = np.argwhere(distances(beta(a), beta(b)) < 7.0)
        by_organism += [information(paired[0][:, i], paired[1][:, j]) for i, j in touching]
        by_place += [information(unpaired[0][:, i], unpaired[1][:, j]) for i, j in touching]
    assert len(by_organism) > 10
    assert np.mean(by_organism) > np.mean(by_place) + 0.1


def test_a_dimer_depends_on_seed_and_index_alone(tmp_path: Path) -> None:
    """And making dimers changes nothing in the proteins."""
    alone, few, many = (tmp_path / name for name in ("alone", "few", "many"))
    generate(alone, 1, seed=3)
    few_made, many_made = generate(few, 0, seed=3, dimers=2), generate(many, 1, seed=3, dimers=3)
    assert many_made[1:3] == few_made
    for made in (alone, few):
        for file in [*(made / "mmcif").iterdir(), *(made / "msas").iterdir()]:
            assert file.read_bytes() == (many / file.relative_to(made)).read_bytes()


def test_files_read_back(tmp_path: Path) -> None:
    entries = generate(tmp_path / "set", 0, seed=7, dimers=2, min_length=30, max_length=38, depth=DEPTH)
    assert [entry["kind"] for entry in entries] == ["homodimer", "heterodimer"]
    for entry, dimer in zip(entries, dimers()):
        chains = read_structure(tmp_path / "set" / entry["structure"]).chains
        assert list(chains) == ["A", "B"]
        xyz = [chains[name].positions[:, 1] for name in "AB"]
        np.testing.assert_allclose(np.concatenate(xyz).mean(0), 0.0, atol=1e-3)
        true = distances(*(protein.atoms[:, 1] for protein in dimer.chains))
        np.testing.assert_allclose(distances(*xyz), true, atol=2e-3)  # three decimals of both
        for made, protein in zip(entry["chains"], dimer.chains):
            assert chains[made["chain"]].sequence == protein.sequence == made["sequence"]
            alignment = read_alignment(tmp_path / "set" / made["alignment"])
            assert alignment.names == protein.alignment.names
            np.testing.assert_array_equal(alignment.rows, protein.alignment.rows)
            np.testing.assert_array_equal(alignment.deletions, protein.alignment.deletions)
    assert len(list((tmp_path / "set" / "msas").iterdir())) == 3, "one for a homodimer"


def test_bad_requests(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least one"):
        generate(tmp_path / "new", 0, dimers=0)
    with pytest.raises(UserError, match="at least one"):
        generate(tmp_path / "new", 5, dimers=-1)
