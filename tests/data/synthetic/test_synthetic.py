"""Make sample proteins and dimers: geometry, packing, covariation in alignments, files."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from warpfold import __version__
from warpfold.data.formats.alignment import read_alignment
from warpfold.data.structure.mmcif import read_structure
from warpfold.data.synthetic import folder
from warpfold.data.synthetic.backbone import (
    MIN_DISTANCE,
    MIN_POLAR,
    distances,
    with_o_and_cb,
)
from warpfold.data.synthetic.dimers import make_dimer
from warpfold.data.synthetic.folder import generate
from warpfold.data.synthetic.folds import FOLDS
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
    """Return the largest difference of angles in degrees."""
    return float(np.abs((a - b + 180.0) % 360.0 - 180.0).max())


def heavy_atoms(protein: Protein) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return positions, residues and names of all atoms."""
    types = [RESTYPE_ORDER[letter] for letter in protein.sequence]
    residue, slot = np.nonzero(ATOM14_MASK[types])
    return protein.atoms[residue, slot], residue, [ATOM14_NAMES[types[i]][k] for i, k in zip(residue, slot)]


def test_backbones_are_ideal() -> None:
    """Lengths are within 0.01 A and angles within 1 degree of Engh & Huber."""
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
            if chis:  # N, CA, CB, and the first atom after it
                assert off(dihedral(atoms[0], atoms[1], atoms[4], atoms[5]), float(chis[0])) < 0.1


def test_no_clashes() -> None:
    """Atoms of residues that are not neighbours are 3.0 A apart, or 2.6 A if both are N or O, as in hydrogen bonds.

    The tolerance is 0.01 A, as CB differs a little between residue types. Neighbours, and residues two positions apart,
    are close because of their torsions: they are 2.6 A apart if more than three bonds separate the atoms.
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
    """The radius of gyration is 25 % below to 15 % above 2.2 N^0.38; every helix and sheet touches others."""
    for protein in proteins():
        ca = protein.atoms[:, 1]
        radius = np.sqrt(((ca - ca.mean(0)) ** 2).sum(-1).mean())
        assert 0.75 < radius / (2.2 * len(ca) ** 0.38) < 1.15
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


def test_relatives_are_spread() -> None:
    identity = np.concatenate([(p.alignment.rows[1:] == p.alignment.rows[0]).mean(1) for p in proteins()])
    assert identity.min() < 0.5
    assert identity.max() > 0.85
    assert 0.5 < np.median(identity) < 0.8
    assert all(16 <= len(p.alignment) <= 128 for p in proteins())
    assert any(p.alignment.deletions.any() for p in proteins())
    assert any((p.alignment.rows == 21).any() for p in proteins())
    assert {protein.blueprint.fold for protein in proteins()} == set(FOLDS)


def test_contacts_covary() -> None:
    """Corrected mutual information of columns is higher for contacts (CB within 8 A, six or more residues apart)."""
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
    """Return it for all pairs of columns, less the average product correction (Dunn et al. 2008)."""
    one_hot = np.eye(22)[rows]
    alone = one_hot.mean(0)
    joint = np.einsum("ria,rjb->ijab", one_hot, one_hot, optimize=True) / len(rows)
    expected = alone[:, None, :, None] * alone[None, :, None, :]
    information = (joint * np.log((joint + 1e-9) / (expected + 1e-9))).sum((2, 3))
    np.fill_diagonal(information, 0.0)
    mean = information.mean(0)
    return information - mean[:, None] * mean[None, :] / information.mean()


# ---- dimers

DEPTH = (96, 128)


@cache
def dimers() -> list[tuple[Protein, Protein]]:
    return [make_dimer(7, index, 30, 38, DEPTH) for index in range(8)]


def beta(protein: Protein) -> np.ndarray:
    """Return CB of each residue, CA of glycine: [N, 3]."""
    slot = np.array([1 if letter == "G" else 4 for letter in protein.sequence])
    return protein.atoms[np.arange(len(slot)), slot]


def organisms(protein: Protein) -> dict[str, np.ndarray]:
    """Map the organism in the name of each relative to the relative's alignment row."""
    names = protein.alignment.names[1:]
    rows = {name.split("|")[2].split("_")[1]: row for name, row in zip(names, protein.alignment.rows[1:])}
    assert len(rows) == len(names), "one row of each"
    return rows


def information(x: np.ndarray, y: np.ndarray) -> float:
    """Return the mutual information of two columns of codes, in nats."""
    joint = np.zeros((22, 22))
    np.add.at(joint, (x, y), 1 / len(x))
    alone = joint.sum(1)[:, None] * joint.sum(0)
    there = joint > 0
    return float((joint[there] * np.log(joint[there] / alone[there])).sum())


def test_chains_touch_and_do_not_clash() -> None:
    """Atoms of two chains are as far apart as those within one (0.01 A, as CB differs between residue types)."""
    for index, (a, b) in enumerate(dimers()):
        assert (a.sequence == b.sequence) == (index % 2 == 0)
        (xyz, _, names), (others, _, other_names) = heavy_atoms(a), heavy_atoms(b)
        polar, other_polar = (np.array([name[0] in "NO" for name in each]) for each in (names, other_names))
        limit = np.where(polar[:, None] & other_polar, MIN_POLAR, MIN_DISTANCE)
        assert (distances(xyz, others) > limit - 0.01).all(), a.name
        near = distances(beta(a), beta(b)) < 10.0
        assert min(near.any(1).sum(), near.any(0).sum()) >= 6, "an interface of some size"


def test_homodimers_have_c2_symmetry() -> None:
    """The motion of A onto B also moves B onto A, and turns by 180 degrees, for all atoms up to rounding."""
    for dimer in dimers()[::2]:
        a, b = (heavy_atoms(protein)[0] for protein in dimer)
        u, _, v = np.linalg.svd((a - a.mean(0)).T @ (b - b.mean(0)))
        turn = v.T @ np.diag([1, 1, np.linalg.det(v.T @ u.T)]) @ u.T
        np.testing.assert_allclose((a - a.mean(0)) @ turn.T + b.mean(0), b, atol=1e-6)
        np.testing.assert_allclose((b - a.mean(0)) @ turn.T + b.mean(0), a, atol=1e-6)
        assert np.trace(turn) == pytest.approx(-1.0, abs=1e-9)


def test_interfaces_covary_in_rows_of_one_organism_alone() -> None:
    """Compare mutual information across the interface of rows paired by organism and of rows in file order."""
    by_organism, by_place = [], []
    for dimer in dimers()[1::2]:
        a, b = dimer
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


# ---- files


def test_a_sample_depends_on_seed_and_index_alone(tmp_path: Path) -> None:
    few, many = tmp_path / "few", tmp_path / "many"
    made, more = generate(few, 2, seed=3, dimers=1), generate(many, 4, seed=3, dimers=2)
    assert made == [*more[:2], more[4]]
    for file in [*(few / "mmcif").iterdir(), *(few / "msas").iterdir()]:
        assert file.read_bytes() == (many / file.relative_to(few)).read_bytes()
    assert make_protein(4, 0).sequence != make_protein(3, 0).sequence
    for index in range(4):
        protein = make_protein(0, index, min_length=40, max_length=46, depth=(5, 5))
        assert (40 <= len(protein.sequence) <= 46, len(protein.alignment)) == (True, 5)


def about(protein: Protein) -> dict[str, object]:
    """Return the manifest's entry of a chain."""
    blueprint = protein.blueprint
    facts = {"fold": blueprint.fold.name, "loops": list(blueprint.loops), "sequence": protein.sequence}
    return facts | {"elements": blueprint.elements, "rows": len(protein.alignment)}


def test_files_read_back(tmp_path: Path) -> None:
    reports: list[tuple[int, int, str]] = []
    limits = {"min_length": 30, "max_length": 38, "depth": DEPTH}
    made = generate(tmp_path / "set", 1, 7, dimers=2, **limits, progress=lambda *report: reports.append(report))
    assert [report[:2] for report in reports] == [(1, 3), (2, 3), (3, 3)]
    assert [path.name for path in tmp_path.iterdir()] == ["set"], "no draft is left"
    assert [entry.get("kind") for entry in made] == [None, "homodimer", "heterodimer"]
    assert len(list((tmp_path / "set/msas").iterdir())) == 4, "one for a homodimer"
    samples = [(make_protein(7, 0, 30, 38, DEPTH),), *dimers()[:2]]
    manifest = json.loads((tmp_path / "set/manifest.json").read_text())
    generator = f"WarpFold {__version__}"
    assert manifest == {"generator": generator, "seed": 7, "proteins": made[:1], "dimers": made[1:]}
    assert made[0] == {
        **about(samples[0][0]),
        "name": "sample00000",
        "structure": "mmcif/sample00000.cif",
        "alignment": "msas/sample00000_A.a3m",
    }
    assert made[2] == {
        "name": "dimer00001",
        "kind": "heterodimer",
        "structure": "mmcif/dimer00001.cif",
        "chains": [
            {"chain": name, **about(protein), "alignment": f"msas/dimer00001_{name}.a3m"}
            for name, protein in zip("AB", samples[2])
        ],
    }
    readme = (tmp_path / "set/README.txt").read_text()
    assert readme.startswith(f"1 sample proteins, made by {generator} with seed 7.\n")
    assert "ideal geometry in 6 folds, packed" in readme
    assert "The resolution in the\nfiles, 1.0 A, is not measured" in readme
    assert "\n\n2 dimers, every second one" in readme
    for entry, sample in zip(made, samples):
        structure = read_structure(tmp_path / "set" / entry["structure"])
        assert (structure.id, structure.method, structure.resolution) == (entry["name"], "THEORETICAL MODEL", 1.0)
        chains = structure.chains
        centre = np.concatenate([protein.atoms[:, 1] for protein in sample]).mean(0)
        for name, facts, protein in zip("AB", entry.get("chains", [entry]), sample):
            assert chains[name].sequence == protein.sequence == facts["sequence"]
            wanted = to_chain(protein, name, centre)
            np.testing.assert_array_equal(chains[name].mask, wanted.mask)
            np.testing.assert_allclose(chains[name].positions, wanted.positions, atol=6e-4)  # three decimals
            alignment = read_alignment(tmp_path / "set" / facts["alignment"])
            assert alignment.query == protein.sequence
            np.testing.assert_array_equal(alignment.rows, protein.alignment.rows)
            np.testing.assert_array_equal(alignment.deletions, protein.alignment.deletions)


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Replace the generator by one sample. Returns a list that collects the arguments."""
    calls: list[tuple] = []

    def make(*arguments: object) -> Protein:
        calls.append(arguments)
        return proteins()[0]

    monkeypatch.setattr(folder, "make_protein", make)
    return calls


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0,), {}, "proteins = 0, dimers = 0: nothing to generate. Request at least one."),
        ((-1,), {"dimers": 2}, "proteins = -1, dimers = 2: nothing to generate. Request at least one."),
        ((2,), {"dimers": -1}, "proteins = 2, dimers = -1: nothing to generate. Request at least one."),
        ((1, -1), {}, "seed = -1: negative. Use 0 or more."),
        (
            (1,),
            {"min_length": 41, "max_length": 40},
            "lengths 41 to 40: impossible. Pass a range within 30 to 60.",
        ),
        ((1,), {"min_length": 20, "max_length": 29}, "lengths 20 to 29: impossible. Pass a range within 30 to 60."),
        ((1,), {"min_length": 61, "max_length": 70}, "lengths 61 to 70: impossible. Pass a range within 30 to 60."),
        ((1,), {"depth": (0, 4)}, "depth 0 to 4: impossible. Pass a range of numbers from 1 on."),
        ((1,), {"depth": (5, 4)}, "depth 5 to 4: impossible. Pass a range of numbers from 1 on."),
    ],
)
def test_impossible_arguments_are_refused(
    arguments: tuple[int, ...], options: dict, message: str, tmp_path: Path, requested: list[tuple]
) -> None:
    with pytest.raises(UserError) as caught:
        generate(tmp_path / "set", *arguments, **options)
    assert str(caught.value) == message
    assert requested == []
    assert list(tmp_path.iterdir()) == []


def test_arguments_at_their_limits_are_passed_on(tmp_path: Path, requested: list[tuple]) -> None:
    generate(tmp_path / "a", 2)
    generate(tmp_path / "b", 1, min_length=20, max_length=30, depth=(1, 1), folds=FOLDS[:2])
    generate(tmp_path / "c", 1, 9, min_length=60, max_length=60, depth=(4, 5))
    assert requested == [
        (0, 0, 30, 60, (16, 128), FOLDS),
        (0, 1, 30, 60, (16, 128), FOLDS),
        (0, 0, 20, 30, (1, 1), FOLDS[:2]),
        (9, 0, 60, 60, (4, 5), FOLDS),
    ]
    assert "dimers" not in (tmp_path / "a/README.txt").read_text()
    assert json.loads((tmp_path / "a/manifest.json").read_text()).keys() == {"generator", "seed", "proteins"}
    assert len(make_protein(5, 2, depth=(1, 1)).alignment) == 1
    with pytest.raises(UserError, match=r"^no fold of 58 to 57 residues was found\. Allow lengths from 30 to 60\.$"):
        make_protein(0, 0, 58, 57)


def test_the_folder_is_new_or_empty(tmp_path: Path, requested: list[tuple]) -> None:
    full, empty = tmp_path / "full", tmp_path / "empty"
    full.mkdir()
    empty.mkdir()
    (full / "mine.txt").write_text("mine")
    (tmp_path / "link").symlink_to(empty)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("full", "full/mine.txt", "link", "dangling"):
        with pytest.raises(UserError) as caught:
            generate(tmp_path / name, 1)
        assert str(caught.value) == f"{tmp_path / name}: exists already. Pass a new folder or remove it."
    with pytest.raises(UserError, match=r"mine\.txt/set: cannot be created: Not a directory\. Pass another folder\."):
        generate(full / "mine.txt/set", 1)
    generate(empty, 1)
    generate(tmp_path / "new/folder", 1)
    for folder_path in (empty, tmp_path / "new/folder"):
        assert {path.name for path in folder_path.iterdir()} == {"mmcif", "msas", "manifest.json", "README.txt"}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["folder"]
    assert [path.name for path in full.iterdir()] == ["mine.txt"]


def test_a_stop_leaves_nothing(tmp_path: Path) -> None:
    def stop(done: int, total: int, what: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(tmp_path / "set", 2, progress=stop)
    assert list(tmp_path.iterdir()) == []
