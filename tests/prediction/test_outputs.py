"""Test the files of predictions: contents, readability by other programs, and complete writing."""

import errno
import html
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gemmi
import numpy as np
import pytest

from tests.prediction.runs import contents
from tests.prediction.test_ranking import helices
from warpfold.data.store.store import pack_record
from warpfold.errors import UserError
from warpfold.files import checksum, claim_folder, write_summary
from warpfold.geometry.residue import ATOM37_MASK, ATOM_ORDER, ATOM_TYPES, RESTYPES, VDW_RADIUS
from warpfold.prediction import outputs
from warpfold.prediction.notices import Notice
from warpfold.prediction.outputs import (
    PassStructure,
    Prediction,
    clear_damaged,
    damaged_files,
    drop_prediction,
    plddt_json,
    read_record,
    refuse_links,
    remove_drafts,
    remove_prediction,
    superposition,
    thin_prediction,
    write_pae,
    write_prediction,
    write_scores,
)
from warpfold.prediction.pages import target_of
from warpfold.prediction.sanity import Geometry, check_geometry, confidence_notices, find_clashes
from warpfold.report.coverage import Coverage
from warpfold.report.prediction_figures import draw_figures
from warpfold.scoring.metrics import superpose
from warpfold.scoring.score_table import pair_records

SEQUENCE = "ACDEFGHIKLMNPQRSTVWYX"
RADII = np.array([VDW_RADIUS[atom[0]] for atom in ATOM_TYPES])


def prediction(name: str = "test", pae: bool = True) -> Prediction:
    rng = np.random.default_rng(0)
    n = len(SEQUENCE)
    mask = ATOM37_MASK[[(RESTYPES + "X").index(letter) for letter in SEQUENCE]]
    return Prediction(
        name=name,
        sequence=SEQUENCE,
        positions=rng.normal(0, 20, (n, 37, 3)).astype(np.float32) * mask[..., None],
        mask=mask,
        plddt=rng.uniform(0, 100, n).astype(np.float32),
        pae=rng.uniform(0, 31.75, (n, n)).astype(np.float32) if pae else None,
        max_pae=31.75 if pae else None,
        ptm=0.5 if pae else None,
        single=np.ones((n, 4), np.float32),
        pair=np.ones((n, n, 2), np.float32),
        msa=np.ones((3, n, 5), np.float32),
    )


@pytest.mark.parametrize("kind", ["mmcif", "pdb"])
def test_structures_read_back_with_gemmi(tmp_path: Path, kind: str) -> None:
    p = prediction()
    files = p.save(tmp_path / "out")
    chain = gemmi.read_structure(str(tmp_path / "out" / files[kind]))[0]["A"]
    assert gemmi.one_letter_code([residue.name for residue in chain]) == SEQUENCE[:-1]  # X has no atoms
    ca = np.array([residue["CA"][0].pos.tolist() for residue in chain])
    np.testing.assert_allclose(ca, p.ca[:-1], atol=6e-4)
    b = [residue["CA"][0].b_iso for residue in chain]
    np.testing.assert_allclose(b, p.plddt[:-1], atol=6e-3)
    assert sum(len(residue) for residue in chain) == int(p.mask.sum())


def test_confidence_files_have_alphafold_db_layout(tmp_path: Path) -> None:
    p = prediction()
    files = p.save(tmp_path / "out")
    plddt = json.loads((tmp_path / "out" / files["plddt"]).read_text())
    assert plddt["residueNumber"] == list(range(1, len(SEQUENCE) + 1))
    np.testing.assert_allclose(plddt["confidenceScore"], p.plddt, atol=6e-3)
    expected = ["H" if v >= 90 else "M" if v >= 70 else "L" if v >= 50 else "D" for v in p.plddt]
    assert plddt["confidenceCategory"] == expected
    rows = np.rint(p.pae).astype(int).tolist()
    text = json.dumps([{"predicted_aligned_error": rows, "max_predicted_aligned_error": 31.75}])
    # Writing row by row gives the same text.
    assert (tmp_path / "out" / files["pae"]).read_text() == text


def test_scores_have_colabfold_layout(tmp_path: Path) -> None:
    """The text equals that of `json.dumps` for numbers that NumPy rounds to two decimals."""
    p = prediction()
    assert p.pae is not None
    files = p.save(tmp_path / "out")
    text = (tmp_path / "out" / files["scores"]).read_text()
    expected = {
        "plddt": np.around(p.plddt.astype(float), 2).tolist(),
        "max_pae": float(p.pae.max()),
        "pae": np.around(p.pae.astype(float), 2).tolist(),
        "ptm": 0.5,
    }
    assert text == json.dumps(expected)
    complexes = json.loads((tmp_path / "out" / files["scores"]).read_text()) | {"iptm": 0.25}
    replace(p, iptm=0.251).save(tmp_path / "complex")
    assert json.loads((tmp_path / "complex" / "test_scores.json").read_text()) == complexes
    prediction(pae=False).save(tmp_path / "without")
    assert set(json.loads((tmp_path / "without" / "test_scores.json").read_text())) == {"plddt"}


def test_arrays_hold_what_there_is(tmp_path: Path) -> None:
    p = replace(prediction(pae=False), single=None, pair=None, msa=None)
    files = p.save(tmp_path / "a")
    with np.load(tmp_path / "a" / files["arrays"], allow_pickle=False) as arrays:
        assert set(arrays.files) == {"positions", "mask", "plddt"}
        np.testing.assert_array_equal(arrays["positions"], p.positions)
    assert "pae" not in files
    p = prediction()
    files = p.save(tmp_path / "b")
    with np.load(tmp_path / "b" / files["arrays"], allow_pickle=False) as arrays:
        assert arrays["pair"].shape == p.pair.shape
        assert arrays["msa"].shape == p.msa.shape


def test_a_failed_save_leaves_nothing_and_keeps_what_was_there(tmp_path: Path) -> None:
    good, bad = prediction(), prediction()
    bad.positions[0, 0] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        bad.save(tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
    good.save(tmp_path / "old")
    before = {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()}
    with pytest.raises(ValueError, match="not finite"):
        bad.save(tmp_path / "old", overwrite=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_a_folder_with_a_thesis_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "chapters").mkdir()
    (tmp_path / "thesis.txt").write_text("years")
    (tmp_path / "chapters" / "1.txt").write_text("of work")
    before = contents(tmp_path)
    files = [prediction(name).save(tmp_path) for name in ("one", "two")]
    after = contents(tmp_path)
    assert {name: after[name] for name in before} == before
    assert after.keys() - before.keys() == {name for one in files for name in one.values()}


def test_nothing_is_replaced_unasked(tmp_path: Path) -> None:
    prediction().save(tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(UserError, match=r"test\.npz: exists already. .*overwrite=True"):
        replace(prediction(), plddt=prediction().plddt / 2).save(tmp_path / "out")
    assert contents(tmp_path / "out") == before


def test_asked_to_it_replaces_its_own_files_and_those_it_has_not_any_more(tmp_path: Path) -> None:
    prediction().save(tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    prediction(pae=False).save(tmp_path / "out", overwrite=True)
    assert contents(tmp_path / "out").keys() == {
        "test.cif", "test.npz", "test.pdb", "test_plddt.json", "test_scores.json", "notes.txt", "test_plddt.png",
        "test_plddt.svg",
    }  # fmt: skip


@pytest.mark.parametrize(("name", "overwrite"), [("test.cif", False), ("test.npz", True), ("test_pae.json", True)])
def test_a_file_of_that_name_that_is_no_predictions_stays(tmp_path: Path, name: str, overwrite: bool) -> None:
    (tmp_path / name).write_text("a structure of my own")
    with pytest.raises(UserError, match=rf"{name}: "):
        prediction().save(tmp_path, overwrite=overwrite)
    assert contents(tmp_path) == {name: b"a structure of my own"}


def test_a_file_in_the_place_of_the_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match=r"file: cannot be written: .*[;.] [Nn]ame another folder\.?$"):
        prediction().save(tmp_path / "file")
    assert contents(tmp_path) == {"file": b"mine"}


def test_what_a_link_leads_to_stays(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    prediction().save(tmp_path / "out")
    (tmp_path / "out" / "test.cif").unlink()
    (tmp_path / "out" / "test.cif").symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match=r"test\.cif: does not belong to a prediction"):
        prediction().save(tmp_path / "out", overwrite=True)
    assert (tmp_path / "precious").read_text() == "mine"


def test_removing_a_prediction_removes_that_alone(tmp_path: Path) -> None:
    for name in ("a", "b"):
        prediction("test").save(tmp_path / name)
    (tmp_path / "b" / "notes.txt").write_text("mine")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "test.cif").write_text("mine")
    for name in ("a", "b", "c", "none"):
        remove_prediction(tmp_path / name, "test")
    assert contents(tmp_path) == {"b/notes.txt": b"mine", "c/test.cif": b"mine"}
    assert not (tmp_path / "a").exists()


def test_claim_tells_ours_from_others(tmp_path: Path) -> None:
    assert claim_folder(tmp_path / "new", "kind", "run") is None
    ours = tmp_path / "ours"
    ours.mkdir()
    assert claim_folder(ours, "kind", "run") is None
    # Add the draft of a run that was killed while it wrote its first file.
    (ours / ".summary.json.0a1b2c3d").touch()
    assert claim_folder(ours, "kind", "run") is None
    written = write_summary(ours, {"format": "kind", "run": "run"})
    assert claim_folder(ours, "kind", "run") == written
    with pytest.raises(UserError, match="another run"):
        claim_folder(ours, "kind", "other")
    assert claim_folder(ours, "kind", "other", force=True) is not None
    with pytest.raises(UserError, match="something else"):
        claim_folder(ours, "other kind", "run", force=True)
    with pytest.raises(UserError, match="is a file"):
        claim_folder(ours / "summary.json", "kind", "run")


# ---- geometry


def ideal_chain(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Build a straight chain of alanines. Each residue is the first one, translated by 3.8 angstrom per residue."""
    alanine = np.zeros((37, 3), np.float32)
    alanine[0], alanine[2], alanine[3] = (-0.525, 1.363, 0), (1.526, 0, 0), (-0.529, -0.774, -1.205)
    mask = np.zeros((n, 37), np.float32)
    mask[:, [0, 1, 2, 3]] = 1
    return alanine[None] + np.arange(n)[:, None, None] * np.array([3.8, 0, 0], np.float32), mask


@pytest.mark.parametrize(("other", "bonded", "clashes"), [(6, True, 0), (6, False, 1), (9, True, 1)])
def test_only_the_peptide_bond_to_the_next_residue_is_no_clash(other: int, bonded: bool, clashes: int) -> None:
    """C of residue 5 and N of another residue are 1.3 angstrom apart."""
    positions, mask = np.zeros((12, 37, 3), np.float32), np.zeros((12, 37), bool)
    mask[5, ATOM_ORDER["C"]] = mask[other, ATOM_ORDER["N"]] = True
    positions[other, ATOM_ORDER["N"], 0] = 1.3
    assert find_clashes(positions, mask, np.full(11, bonded)).tolist() == [[5, other]] * clashes


def test_breaks_clashes_and_mirrors_are_counted() -> None:
    positions, mask = ideal_chain(300)
    assert check_geometry(positions, mask).notices() == []
    # A residue without atoms breaks nothing.
    gapped, present = positions.copy(), mask.copy()
    gapped[100] = present[100] = 0
    assert check_geometry(gapped, present).notices() == []
    positions[10:] += 5  # one break
    mirrored = positions.copy()
    mirrored[20:23, :, 2] = 10 - mirrored[20:23, :, 2]
    found = check_geometry(mirrored, mask)
    assert (found.chain_breaks, found.clashes, found.mirrored) == (1, 0, 3)
    positions[290] = positions[10] + 0.1
    found = check_geometry(positions, mask)
    assert found.clashes >= 4
    assert found.chain_breaks == 3
    assert len(found.notices()) == 2


def crowd(seed: int, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Place residues with missing atoms at random in a small box: positions [N, 37, 3], mask [N, 37], chains [N]."""
    rng = np.random.default_rng(seed)
    mask = (ATOM37_MASK[rng.integers(0, 21, n)] > 0) & (rng.random((n, 37)) < 0.8)
    # Half of the residues have an SG atom, so that disulfides occur.
    mask[::2, ATOM_ORDER["SG"]] = True
    positions = rng.uniform(0, 4 * n ** (1 / 3), (n, 37, 3)).astype(np.float32)
    # Many C atoms are at a bonding distance from the next N, and many Cα at one of about 2.6 or 4.2 angstrom.
    positions[1:, ATOM_ORDER["N"]] = positions[:-1, ATOM_ORDER["C"]] + np.float32(0.5)
    steps = rng.choice([2.55, 2.61, 2.65, 3.8, 4.19, 4.22, 4.3], n).astype(np.float32)
    positions[:, ATOM_ORDER["CA"]] = np.cumsum(steps)[:, None] * np.array([1, 0, 0], np.float32)
    return positions, mask.astype(np.float32), np.sort(rng.integers(1, 5, n))


@pytest.mark.parametrize("n", [2, 40, 130])
def test_flaws_are_those_of_all_pairs_of_atoms(n: int) -> None:
    """Count the flaws one by one. 130 residues have atoms for two blocks."""
    positions, mask, chains = crowd(n, n)
    order = {name: ATOM_ORDER[name] for name in ("N", "CA", "C", "CB", "SG")}
    breaks, mirrored, clashes = 0, 0, []
    for a in range(n):
        here, there = positions[a].astype(float), mask[a] > 0
        if a + 1 < n and chains[a] == chains[a + 1] and there[order["CA"]] and mask[a + 1, order["CA"]]:
            step = np.linalg.norm(here[order["CA"]] - positions[a + 1, order["CA"]])
            breaks += not 2.6 <= step <= 4.2
        if all(there[order[name]] for name in ("N", "CA", "C", "CB")):
            sides = [here[order[name]] - here[order["CA"]] for name in ("N", "C", "CB")]
            mirrored += int(np.linalg.det(np.stack(sides)) < 0)
        for b in range(a + 1, n):
            distances = np.linalg.norm(here[:, None] - positions[b], axis=-1)
            for i, j in np.argwhere((distances < RADII[:, None] + RADII - 1.5) & there[:, None] & (mask[b] > 0)):
                is_disulfide = i == j == order["SG"]
                is_peptide = (i, j) == (order["C"], order["N"]) and b == a + 1 and chains[a] == chains[b]
                if not is_disulfide and not is_peptide:
                    clashes.append((a, b))
    assert check_geometry(positions, mask, chains) == Geometry(breaks, len(clashes), mirrored)
    found = find_clashes(positions, mask, chains[1:] == chains[:-1])
    assert sorted(map(tuple, found.tolist())) == clashes
    assert n == 2 or (min(breaks, mirrored, len(clashes)) > 0 and mirrored < mask[:, order["CB"]].sum() / 1.5)
    alone = check_geometry(positions, mask)
    assert alone == check_geometry(positions, mask, np.ones(n, int))


@pytest.mark.parametrize(("step", "breaks"), [(2.59, 1), (2.6, 0), (2.61, 0), (4.19, 0), (4.2, 0), (4.21, 1)])
@pytest.mark.parametrize("absent", [None, 0, 1])
def test_steps_from_2_6_to_4_2_angstrom_between_known_atoms_are_no_breaks(
    step: float, breaks: int, absent: int | None
) -> None:
    positions, mask = np.zeros((2, 37, 3)), np.zeros((2, 37))
    positions[1, ATOM_ORDER["CA"], 0] = step
    mask[:, ATOM_ORDER["CA"]] = 1
    if absent is not None:
        mask[absent] = 0
    assert check_geometry(positions, mask).chain_breaks == (breaks if absent is None else 0)


def test_atoms_that_touch_at_the_limit_do_not_clash() -> None:
    """Carbon and sulfur have radii of 1.7 and 1.8 angstrom, so they may be 2 angstrom apart.

    A flat residue is not mirrored.
    """
    positions, mask = np.zeros((2, 37, 3)), np.zeros((2, 37), bool)
    mask[0, ATOM_ORDER["CB"]] = mask[1, ATOM_ORDER["SG"]] = True
    for distance, clashes in ((2.0, 0), (1.99, 1)):
        positions[1, ATOM_ORDER["SG"], 0] = distance
        assert len(find_clashes(positions, mask, np.array([False]))) == clashes
    flat = np.zeros((1, 37, 3))
    flat[0, [ATOM_ORDER["N"], ATOM_ORDER["C"], ATOM_ORDER["CB"]]] = np.eye(3)[[0, 1, 0]]
    for height, mirrored in ((0.0, 0), (0.5, 0), (-0.5, 1)):
        flat[0, ATOM_ORDER["CB"], 2] = height
        assert check_geometry(flat, np.full((1, 37), 1)).mirrored == mirrored


def test_each_kind_of_flaw_is_a_notice() -> None:
    assert Geometry(0, 0, 0).notices() == []
    assert [notice.record() for notice in Geometry(3, 0, 1).notices()] == [
        {
            "kind": "chain_breaks",
            "text": "chain breaks (neighbouring Cα too near or too far): 3",
            "values": {"count": 3},
        },
        {"kind": "mirrored", "text": "residues with mirrored Cα: 1", "values": {"count": 1}},
    ]
    (clashes,) = Geometry(0, 2, 0).notices()
    assert clashes.text == "clashes between atoms of different residues: 2"


def test_positions_that_are_not_finite_are_an_error() -> None:
    positions, mask = ideal_chain(3)
    positions[1, 36] = np.nan  # no atom there
    check_geometry(positions, mask)
    positions[1, 0] = np.inf
    with pytest.raises(FloatingPointError, match="not finite"):
        check_geometry(positions, mask)


def test_the_distogram_lies_beside_the_arrays_and_goes_with_the_prediction(tmp_path: Path) -> None:
    n, rng = len(SEQUENCE), np.random.default_rng(1)
    distogram = rng.uniform(0, 1, (n, n, 64)).astype(np.float16)
    contacts, edges = distogram[..., :19].sum(-1), np.linspace(2.3125, 21.6875, 63, dtype=np.float32)
    p = replace(prediction(), distogram=distogram, contacts=contacts, distogram_edges=edges)
    files = p.save(tmp_path / "test")
    np.testing.assert_array_equal(
        np.load(tmp_path / "test" / files["distogram"], mmap_mode="r", allow_pickle=False), distogram
    )
    arrays = np.load(tmp_path / "test" / files["arrays"], allow_pickle=False)
    np.testing.assert_array_equal(arrays["contacts"], contacts)
    assert len(arrays["distogram_edges"]) == 63
    assert "distogram" not in arrays
    assert "distogram" not in prediction().save(tmp_path / "test", overwrite=True)
    assert not (tmp_path / "test" / files["distogram"]).exists()
    p.save(tmp_path / "test", overwrite=True)
    remove_prediction(tmp_path / "test", "test")
    assert not (tmp_path / "test").exists()


def test_a_folder_that_another_worker_removes_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers fold a protein with two models. One drops its prediction and removes the protein's empty folder."""
    mkdir, removed = Path.mkdir, list[Path]()

    def racing(path: Path, *args: Any, **more: Any) -> None:
        if path.suffix == ".partial" and not removed:
            removed.append(path.parent)
            path.parent.rmdir()
        mkdir(path, *args, **more)

    monkeypatch.setattr(Path, "mkdir", racing)
    files = prediction().save(tmp_path / "q" / "model_seed_0")
    assert removed == [tmp_path / "q"]
    assert {path.name for path in (tmp_path / "q" / "model_seed_0").iterdir()} == set(files.values())


# ---- predictions of complexes


def dimer(name: str = "dimer") -> Prediction:
    """Build two parallel helices, chains A and b, with known confidences and the structure of an earlier pass."""
    made = helices(2, 10.0, ("A", "b"))
    made = replace(made, plddt=made.plddt + np.float32(0.123))
    pae = np.arange(400.0, dtype=np.float32).reshape(20, 20) / 16
    pairs = np.array([[0.12345, 0.56789], [0.2, 0.98766]], np.float32)
    earlier = PassStructure(made.positions + 1, made.plddt / 2, 0.12344, None)
    details = {"model": "m1", "seed": 0, "recycles": 1, "templates": ["1abc_A", "2xyz_B"], "chain_depths": {"A": 7}}
    details |= {"warnings": [{"kind": "rows_lost", "text": "given"}]}
    return replace(
        made, name=name, pae=pae, max_pae=31.7512, ptm=0.51239, iptm=0.25, chain_pair_iptm=pairs, details=details,
        recycled=[earlier],
    )  # fmt: skip


def alone(p: Prediction) -> Prediction:
    """Return the first chain of a complex."""
    return replace(
        p, sequence=p.sequence[:10], positions=p.positions[:10], mask=p.mask[:10], plddt=p.plddt[:10],
        pae=None if p.pae is None else p.pae[:10, :10], chain_ids=("A",), asym_id=None, iptm=None, chain_pair_iptm=None,
        recycled=[],
    )  # fmt: skip


def test_a_prediction_describes_itself() -> None:
    p, one = dimer(), alone(dimer())
    assert repr(p) == "<Prediction dimer: 20 residues in 2 chains, pLDDT 9.6, ipTM 0.25, pTM 0.51>"
    assert repr(replace(one, ptm=None)) == "<Prediction dimer: 10 residues, pLDDT 4.6>"
    assert p.spans == {"A": slice(0, 10), "b": slice(10, 20)}
    assert one.spans == {"A": slice(0, 10)}
    assert [(chain.id, chain.sequence, chain.author_numbers) for chain in p.chains()] == [
        ("A", p.sequence[:10], tuple(map(str, range(1, 11)))),
        ("b", p.sequence[10:], tuple(map(str, range(1, 11)))),
    ]
    assert [*p.structure().chains] == ["A", "b"]
    np.testing.assert_array_equal(p.structure().chains["b"].positions, p.positions[10:])
    np.testing.assert_array_equal(p.ca, p.positions[:, 1])
    assert p.confidences() == {
        "mean_plddt": 9.62, "ptm": 0.5124, "iptm": 0.25, "ranking_confidence": pytest.approx(0.302478, abs=2e-6),
    }  # fmt: skip
    assert replace(p, ptm=None, iptm=None).confidences() == {
        "mean_plddt": 9.62, "ptm": None, "iptm": None, "ranking_confidence": pytest.approx(9.623, abs=2e-6),
    }  # fmt: skip
    odd = replace(one, plddt=np.full(10, 71.2345678, np.float32)).confidences()
    assert odd["mean_plddt"] == 71.23
    assert odd["ranking_confidence"] == round(float(np.float32(71.2345678)), 6)
    assert p.chain_ptm is not None
    assert p.chain_ptm.tolist() == pytest.approx([0.12345, 0.98766])
    assert one.chain_ptm is None
    assert (len(p.pair_scores), one.pair_scores) == (1, [])
    assert p.recycled[0].scores() == {"mean_plddt": 4.81, "ptm": 0.1234, "iptm": None}


def test_the_page_and_the_frame_of_a_prediction() -> None:
    p = replace(dimer('a "b" <c>'), coverage=Coverage(np.ones(20, np.int32), np.ones((1, 20), np.uint8), 3))
    target = p._target()
    assert target.numbers == [("residues", "20"), ("mean pLDDT", "9.6"), ("ipTM", "0.25"), ("pTM", "0.51")]
    assert (target.sequence, target.max_pae) == (f"{p.sequence[:10]}:{p.sequence[10:]}", 31.7512)
    assert (target.chains, target.coverage) == (p.spans, p.coverage)
    single = replace(alone(p), pae=None, max_pae=None, ptm=None)._target()
    assert (single.chains, single.max_pae) == ({}, 0.0)
    assert single.numbers == [("residues", "10"), ("mean pLDDT", "4.6")]
    page = html.unescape(p.page())
    for text in ("given", "very low confidence: mean pLDDT 9.6", "ipTM 0.25, below 0.6", "Folded by WarpFold."):
        assert text in page
    frame = re.fullmatch(
        r'<iframe srcdoc="([^"]*)" title="([^"]*)" width="100%" height="900" style="border:0"></iframe>',
        p._repr_html_(),
    )
    assert frame is not None
    assert (html.unescape(frame[1]), html.unescape(frame[2])) == (p.page(), p.name)


def test_structure_files_name_the_facts_of_the_run() -> None:
    """The seed may be 0. No recycles and no templates are not worth a word."""
    p = dimer()
    assert "recycles: 1; templates: 1abc_A, 2xyz_B; model: m1; seed: 0" in p.mmcif()
    text = " ".join(line[11:] for line in p.pdb().splitlines() if line.startswith("REMARK 250 "))
    assert text.endswith("recycles: 1 templates: 1abc_A, 2xyz_B model: m1 seed: 0")
    plain = replace(p, details={"recycles": 0, "templates": [], "model": None, "seed": None})
    assert not any(word in plain.mmcif() + plain.pdb() for word in ("recycles", "templates", "model: ", "seed"))
    assert "pTM" in p.mmcif()
    assert "pTM" not in replace(p, ptm=None, iptm=None).mmcif()


def test_representations_become_a_record() -> None:
    rng, p = np.random.default_rng(0), dimer()
    with pytest.raises(AssertionError):
        p.record("whole")
    p = replace(
        p, single=rng.normal(size=(20, 3)).astype(np.float32), pair=rng.normal(size=(20, 20, 2)).astype(np.float32),
        structure_module=rng.normal(size=(20, 5)).astype(np.float32),
    )  # fmt: skip
    assert p.pair is not None
    assert p.single is not None
    same = {"single": p.single, "structure_module": p.structure_module}
    notes = {"name": "dimer", "sequence": f"{p.sequence[:10]}:{p.sequence[10:]}", "chains": ["A", "b"]}
    for stored, arrays in (
        ("whole", same | {"pair": p.pair}),
        ("pooled", same | {"pair_rows": p.pair.mean(1), "pair_columns": p.pair.mean(0)}),
    ):
        halves = {name: array.astype(np.float16) for name, array in arrays.items() if array is not None}
        assert p.record(stored) == pack_record(halves, notes)  # type: ignore[arg-type]
    single = p.single.copy()
    single[3, 1] = -1e6
    with pytest.raises(UserError, match=r"dimer: single has values that half precision does not hold \(up to 1e\+06\)"):
        replace(p, single=single).record("whole")


def test_a_complex_is_saved_with_all_its_files(tmp_path: Path) -> None:
    """Passes of an earlier prediction with more recycles are deleted."""
    n, p = 20, dimer()
    p = replace(
        p, single=np.ones((n, 2), np.float32), pair=np.ones((n, n, 2), np.float32), msa=np.ones((3, n, 2), np.float32),
        structure_module=np.ones((n, 2), np.float32), contacts=np.zeros((n, n), np.float16), recycled=p.recycled * 3,
        distogram=np.zeros((n, n, 4), np.float16), distogram_edges=np.arange(3, dtype=np.float32),
        coverage=Coverage(np.ones(n, np.int32), np.ones((1, n), np.uint8), 3), templates=[{"name": "1abc_A"}],
    )  # fmt: skip
    files = p.save(tmp_path / "out", figures=False)
    passes = {f"recycle_{number}": f"dimer_recycle_{number}.cif" for number in range(3)}
    expected = {
        "arrays": "dimer.npz", "mmcif": "dimer.cif", "plddt": "dimer_plddt.json", "pdb": "dimer.pdb",
        "pae": "dimer_pae.json", "scores": "dimer_scores.json", "distogram": "dimer_distogram.npy",
        "templates": "dimer_templates.json",
    }  # fmt: skip
    assert files == expected | passes
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(files.values())
    with np.load(tmp_path / "out/dimer.npz", allow_pickle=False) as arrays:
        assert set(arrays.files) == {
            "positions", "mask", "plddt", "pae", "asym_id", "chain_pair_iptm", "contacts", "distogram_edges", "single",
            "pair", "msa", "structure_module", "coverage_depth", "coverage_rows", "coverage_total",
        }  # fmt: skip
    assert (tmp_path / "out/dimer_templates.json").read_text() == '[\n {\n  "name": "1abc_A"\n }\n]'
    earlier = (tmp_path / "out/dimer_recycle_2.cif").read_text()
    assert earlier == replace(p, **vars(p.recycled[2]), details={"recycles": 2}).mmcif()
    assert "recycles: 2" in earlier
    assert "model: " not in earlier
    with open(tmp_path / "out/dimer_pae.json") as file:
        assert json.load(file)[0]["max_predicted_aligned_error"] == 31.75
    scores = json.loads((tmp_path / "out/dimer_scores.json").read_text())
    assert scores["max_pae"] == float(399 / 16)
    assert (scores["ptm"], scores["iptm"]) == (0.51, 0.25)
    assert (scores["chain_ptm"], scores["chain_pair_iptm"]) == ([0.12, 0.99], [[0.12, 0.57], [0.2, 0.99]])
    assert scores["pair_scores"] == pair_records(p.pair_scores)
    # One more pass than this prediction has, and an unrelated file.
    (tmp_path / "out/dimer_recycle_7.cif").write_text("of an earlier run")
    (tmp_path / "out/dimer_recycle_x.cif").write_text("mine")
    again = replace(p, recycled=p.recycled[:1]).save(
        tmp_path / "out", overwrite=True, stored_pair="pooled", figures=False
    )
    assert again == expected | {"representations": "dimer_representations.record", "recycle_0": "dimer_recycle_0.cif"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*again.values(), "dimer_recycle_x.cif"}
    with np.load(tmp_path / "out/dimer.npz", allow_pickle=False) as arrays:
        assert not {"single", "pair", "msa", "structure_module"} & set(arrays.files)
    assert read_record(tmp_path / "out/dimer_representations.record") == p.record("pooled")
    # Without its upper bound, the PAE has no file.
    assert "pae" not in replace(p, max_pae=None).save(tmp_path / "unbounded", figures=False)
    # Figures are the default.
    assert {"plddt_png", "pae_svg", "coverage_png"} <= p.save(tmp_path / "drawn").keys()


def test_figures_of_complexes_separate_the_chains() -> None:
    p = dimer()
    assert p.figures().keys() == {"plddt.png", "plddt.svg", "pae.png", "pae.svg"}
    assert p.figures() == draw_figures(p.plddt, p.pae, None, p.spans)
    one = alone(p)
    assert one.figures() == draw_figures(one.plddt, one.pae, None, {})


@pytest.mark.parametrize("given", [False, True])
def test_the_entry_of_a_complex(tmp_path: Path, given: bool) -> None:
    p = replace(dimer(), templates=[
        {"name": "1abc_A", "used": True, "note": ""},
        {"name": "2xyz_B", "used": False, "note": "released 2020-01-01"},
        {"name": "3xyz_B", "used": False, "note": "x: has no 3xyz.cif", "missing": True},
    ])  # fmt: skip
    p.positions[0, 0] = p.positions[15, 2] + 0.1  # a clash
    design = {chain.id: chain for chain in helices(2, 13.0, ("A", "b")).chains()} if given else None
    said = [Notice("one_row")]
    entry = write_prediction(p, tmp_path, "m1_seed_0", said, ("b",), design)
    geometry = check_geometry(p.positions, p.mask, p.asym_id)
    assert geometry.clashes > 0
    (pair,) = p.pair_scores
    assert pair.contacts > 0
    assert pair.interface_plddt is not None
    assert entry.pop("ranking_confidence") == pytest.approx(0.302478, abs=2e-6)
    files = entry["files"]
    assert files == {
        "arrays": "dimer.npz", "mmcif": "dimer.cif", "plddt": "dimer_plddt.json", "pdb": "dimer.pdb",
        "pae": "dimer_pae.json", "scores": "dimer_scores.json", "templates": "dimer_templates.json",
        "recycle_0": "dimer_recycle_0.cif",
    }  # fmt: skip
    paths = {kind: tmp_path / "dimer/m1_seed_0" / name for kind, name in files.items()}
    assert entry == {
        "name": "dimer",
        "folder": "dimer/m1_seed_0",
        "files": files,
        "checksums": {kind: [path.stat().st_size, checksum(path)] for kind, path in paths.items()},
        "length": 20,
        "sequence": f"{p.sequence[:10]}:{p.sequence[10:]}",
        "mean_plddt": 9.62,
        "ptm": 0.5124,
        "iptm": 0.25,
        "chains": [
            {"id": "A", "length": 10, "mean_plddt": 4.62, "ptm": 0.1235, "msa_depth": 7},
            {"id": "b", "length": 10, "mean_plddt": 14.62, "ptm": 0.9877, "msa_depth": None},
        ],
        "chain_pair_iptm": [[0.1235, 0.5679], [0.2, 0.9877]],
        "interfaces": [
            {
                "chains": ["A", "b"],
                "iptm": 0.5679,
                "plddt": round(pair.interface_plddt, 2),
                "contacts": pair.contacts,
            }
        ],
        "pair_scores": pair_records([pair]),
        "scores": p.design_scores(("b",), design),
        "model": "m1",
        "seed": 0,
        "recycles": 1,
        "templates": ["1abc_A", "2xyz_B"],
        "recycled": [{"mean_plddt": 4.81, "ptm": 0.1234, "iptm": None}],
        "templates_unused": 2,
        "templates_refused": {"released N": 1, "has no N.cif": 1},
        "templates_missing": 1,
        "geometry": {"chain_breaks": 0, "clashes": geometry.clashes, "mirrored": geometry.mirrored},
        "warnings": [
            said[0].record(),
            {"kind": "rows_lost", "text": "given"},
            *(notice.record() for notice in geometry.notices()),
            *(notice.record() for notice in confidence_notices(p.plddt, p.ptm, p.iptm)),
        ],
    }
    assert ("rmsd" in entry["scores"]) == given


def test_the_entry_of_a_chain_and_of_a_complex_without_pae(tmp_path: Path) -> None:
    p = replace(alone(dimer()), details={}, pae=None, max_pae=None, ptm=None)
    entry = write_prediction(p, tmp_path)
    assert (entry["folder"], entry["sequence"], entry["ptm"]) == ("dimer", p.sequence, None)
    assert not {"iptm", "chains", "scores", "recycled", "pair_scores"} & entry.keys()
    assert not [kind for kind in entry["files"] if kind.endswith(("png", "svg"))]
    # A single chain that was designed has scores.
    assert "scores" in write_prediction(p, tmp_path, given={"A": p.chains()[0]})
    bare = replace(
        dimer(), name="bare", pae=None, max_pae=None, ptm=None, iptm=None, chain_pair_iptm=None, recycled=[], details={}
    )
    entry = write_prediction(bare, tmp_path, figures=True)
    assert "plddt_png" in entry["files"]
    assert (entry["iptm"], entry["chain_pair_iptm"], entry["interfaces"][0]["iptm"]) == (None, None, None)
    assert [chain["ptm"] for chain in entry["chains"]] == [None, None]
    assert json.loads((tmp_path / "bare/bare_scores.json").read_text()).keys() == {"plddt", "pair_scores"}
    distant = replace(helices(2, 90.0, ("A", "b")), name="distant")
    assert write_prediction(distant, tmp_path)["interfaces"] == []
    # A prediction that is dropped has no warning about a missing PDB file.
    long_names = replace(distant, chain_ids=("C0", "C1"))
    for wanted in (True, False):
        entry = write_prediction(long_names, tmp_path, wanted=lambda _, answer=wanted: answer)
        assert ("no_pdb" in [warning["kind"] for warning in entry["warnings"]]) == wanted
    (tmp_path / "linked").symlink_to(tmp_path / "bare")
    with pytest.raises(UserError, match="linked: is a symbolic link"):
        write_prediction(replace(bare, name="linked"), tmp_path)


def test_residues_x_are_numbered_by_chain(tmp_path: Path) -> None:
    text = "not one of the twenty amino acids, so without atoms: {}; write C for U to get cysteine"
    p = dimer()
    p = replace(p, sequence="X" + p.sequence[1:12] + "XX" + p.sequence[14:], details={})
    p.mask[[0, 12, 13]] = 0
    assert text.format("3 (X at A 1, b 3, b 4)") in [one["text"] for one in write_prediction(p, tmp_path)["warnings"]]
    single = replace(alone(p), name="single")
    assert text.format("1 (X at 1)") in [one["text"] for one in write_prediction(single, tmp_path)["warnings"]]
    plain = write_prediction(replace(dimer(), name="plain"), tmp_path)
    assert "unknown_residues" not in [one["kind"] for one in plain["warnings"]]


def test_a_prediction_that_is_not_wanted_is_dropped(tmp_path: Path) -> None:
    """The decision is made from the scores. Folders stay if they have other files, and the run's folder always."""
    seen: list[dict[str, Any]] = []

    def refuse(entry: Any) -> bool:
        seen.append(entry)
        return bool(entry["length"] > 99)

    p, out = dimer(), tmp_path / "out"
    out.mkdir()
    kept = write_prediction(p, out, "a", wanted=lambda entry: bool(entry["length"] == 20))
    assert "dropped" not in kept
    dropped = write_prediction(p, out, "a", wanted=refuse)
    assert seen[0].keys() >= {"name", "folder", "length", "mean_plddt", "scores", "geometry"}
    assert (dropped["files"], dropped["checksums"], dropped["dropped"]) == ({}, {}, True)
    assert dropped["warnings"] == kept["warnings"]
    assert contents(out) == {}
    assert [*out.iterdir()] == []
    entry = write_prediction(p, out)
    assert drop_prediction(out, entry) == entry | {"files": {}, "checksums": {}, "dropped": True}
    assert out.is_dir()
    for below in ("a", "b"):
        write_prediction(p, out, below)
    drop_prediction(out, kept)
    assert [path.name for path in (out / "dimer").iterdir()] == ["b"]


# ---- the formats of confidences


@pytest.mark.parametrize("chains", [1, 2])
def test_plddt_at_the_limits_of_its_classes(chains: int) -> None:
    plddt = np.array([100, 90.5, 90, 89.994, 70.4, 70, 69.9, 50.4, 50, 49.9, 0.125, 0])
    spans = {"A": slice(0, 12)} if chains == 1 else {"A": slice(0, 5), "b": slice(5, 12)}
    assert plddt_json(plddt, spans) == {
        **({} if chains == 1 else {"chainId": ["A"] * 5 + ["b"] * 7}),
        "residueNumber": [*range(1, 13)] if chains == 1 else [*range(1, 6), *range(1, 8)],
        "confidenceScore": [100, 90.5, 90, 89.99, 70.4, 70, 69.9, 50.4, 50, 49.9, 0.12, 0],
        "confidenceCategory": list("HHHMMMLLLDDD"),
    }


@pytest.mark.parametrize("largest", [0.0, 0.004, 0.006, 1.0, 30.996])
def test_matrices_are_written_like_numbers(tmp_path: Path, largest: float) -> None:
    pae = np.linspace(0, largest, 9, dtype=np.float32).reshape(3, 3)
    write_pae(tmp_path / "pae.json", pae, 31.7512)
    rows = np.rint(pae.astype(float)).astype(int).tolist()
    text = json.dumps([{"predicted_aligned_error": rows, "max_predicted_aligned_error": 31.75}])
    assert (tmp_path / "pae.json").read_text() == text
    write_scores(tmp_path / "scores.json", np.array([1.234, 5.678]), pae, None)
    expected = {"plddt": [1.23, 5.68], "max_pae": float(pae.max()), "pae": pae.astype(float).round(2).tolist()}
    assert (tmp_path / "scores.json").read_text() == json.dumps(expected)
    write_scores(tmp_path / "scores.json", np.array([1.234]), None, 0.126, 0.456)
    assert (tmp_path / "scores.json").read_text() == json.dumps({"plddt": [1.23], "ptm": 0.13, "iptm": 0.46})
    write_scores(tmp_path / "scores.json", np.array([1.234]), None, None)
    assert (tmp_path / "scores.json").read_text() == json.dumps({"plddt": [1.23]})


# ---- files that are damaged, thinned or superposed


def test_damaged_files_are_found_and_put_away(tmp_path: Path) -> None:
    entry = write_prediction(alone(dimer()), tmp_path)
    folder = tmp_path / "dimer"
    assert damaged_files(tmp_path, entry) == []
    text = (folder / "dimer.cif").read_text()
    (folder / "dimer.cif").write_text(text.replace("ATOM", "atom", 1))  # equal size
    (folder / "dimer.pdb").unlink()
    (folder / "dimer_pae.json").write_text("longer or shorter")
    damaged = [folder / name for name in ("dimer.cif", "dimer.pdb", "dimer_pae.json")]
    assert damaged_files(tmp_path, entry) == damaged
    assert damaged_files(tmp_path, entry, thorough=False) == [folder / "dimer.pdb"]
    (folder / "dimer.pdb").mkdir()
    assert damaged_files(tmp_path, entry, thorough=False) == [folder / "dimer.pdb"]
    (folder / "dimer.pdb").rmdir()
    without = {key: value for key, value in entry.items() if key != "checksums"}
    assert len(damaged_files(tmp_path, without)) == len(entry["files"])
    (folder / "notes.txt").write_text("mine")
    (folder / "dimer_recycle_3.cif").write_text("earlier")
    clear_damaged(tmp_path, entry, damaged)
    assert contents(folder).keys() == {"damaged-dimer.cif", "damaged-dimer_pae.json", "notes.txt"}
    for _ in range(2):
        (folder / "dimer.cif").write_text("more")
        clear_damaged(tmp_path, entry, [folder / "dimer.cif"])
    assert contents(folder).keys() == {
        "damaged-dimer.cif", "damaged-dimer.cif-2", "damaged-dimer.cif-3", "damaged-dimer_pae.json", "notes.txt",
    }  # fmt: skip


def test_thinning_removes_what_is_large(tmp_path: Path) -> None:
    p = replace(dimer(), contacts=np.zeros((20, 20), np.float16), distogram=np.zeros((20, 20, 4), np.float16))
    p = replace(p, coverage=Coverage(np.ones(20, np.int32), np.ones((1, 20), np.uint8), 3))
    files = p.save(tmp_path / "a", figures=False)
    (tmp_path / "a/notes_pae.json").write_text("mine")
    before = contents(tmp_path / "a")
    (tmp_path / "a/dimer_pae.json").unlink()
    # Files of other names stay.
    kept = thin_prediction(tmp_path / "a", "dimer", files | {"distogram": "notes_pae.json"})
    after = contents(tmp_path / "a")
    assert before.keys() - after.keys() == {"dimer_pae.json", "dimer_scores.json"}
    gone = {"pae", "scores"}
    assert kept == {kind: name for kind, name in (files | {"distogram": "notes_pae.json"}).items() if kind not in gone}
    assert {name for name in after if after[name] != before[name]} == {"dimer.npz"}
    with np.load(tmp_path / "a/dimer.npz", allow_pickle=False) as arrays:
        assert set(arrays.files) == {
            "positions", "mask", "plddt", "asym_id", "chain_pair_iptm", "coverage_depth", "coverage_rows",
            "coverage_total",
        }  # fmt: skip
        np.testing.assert_array_equal(arrays["positions"], p.positions)
    # What is no prediction, and what a link leads to, stays.
    p.save(tmp_path / "b", figures=False)
    (tmp_path / "link").symlink_to(tmp_path / "b")
    (tmp_path / "c").mkdir()
    (tmp_path / "c/dimer_pae.json").write_text("mine")
    before = contents(tmp_path)
    for name in ("link", "c"):
        assert thin_prediction(tmp_path / name, "dimer", files) == files
        remove_prediction(tmp_path / name, "dimer")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("confident", [2, 3])
def test_three_confident_residues_decide_the_superposition(tmp_path: Path, confident: int) -> None:
    """A residue counts if its pLDDT is at least 70 in both predictions and it has a Cα."""
    rng = np.random.default_rng(0)
    first, second = (helices(1, 10.0, ("A",)) for _ in range(2))
    first = replace(first, name="first", plddt=np.full(10, 95.0, np.float32))
    plddt = np.where(np.arange(10) < confident, 70.0, 69.9).astype(np.float32)
    mask = first.mask.copy()
    mask[9] = 0
    positions = (first.positions + rng.normal(size=(10, 1, 3)).astype(np.float32)) * mask[..., None]
    second = replace(second, name="second", plddt=plddt, positions=positions, mask=mask)
    entries = [write_prediction(one, tmp_path) for one in (first, second)]
    rotation, translation = superposition(tmp_path, entries[0], entries[1])
    used = np.arange(10) < (3 if confident == 3 else 9)
    expected = superpose(first.ca, second.ca, used)
    np.testing.assert_allclose(rotation, expected[0], atol=1e-6)
    np.testing.assert_allclose(translation, expected[1], atol=1e-5)
    other = superpose(first.ca, second.ca, np.arange(10) < (9 if confident == 3 else confident))
    assert np.abs(translation - other[1]).max() > 1e-3


def test_a_file_that_cannot_be_removed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone(dimer()).save(tmp_path / "a", figures=False)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(UserError) as error:
        remove_prediction(tmp_path / "a", "dimer")
    assert str(error.value) == f"{tmp_path / 'a'}: cannot be removed: Operation not permitted"


def test_arrays_with_pickles_are_refused(tmp_path: Path) -> None:
    """Loading a pickle would run its code."""
    entry = write_prediction(alone(dimer()), tmp_path)
    with np.load(tmp_path / "dimer/dimer.npz", allow_pickle=False) as arrays:
        held = {name: arrays[name] for name in arrays.files}
    np.savez(tmp_path / "dimer/dimer.npz", **{**held, "positions": held["positions"].astype(object)})
    with pytest.raises(ValueError, match="allow_pickle"):
        superposition(tmp_path, entry, entry)
    with pytest.raises(ValueError, match="allow_pickle"):
        target_of(tmp_path, entry)
    with pytest.raises(ValueError, match="allow_pickle"):
        thin_prediction(tmp_path / "dimer", "dimer", entry["files"])


# ---- folders


def test_links_are_refused_at_every_level(tmp_path: Path) -> None:
    (tmp_path / "out/real").mkdir(parents=True)
    (tmp_path / "out/link").symlink_to(tmp_path / "out/real")
    (tmp_path / "out/real/inner").symlink_to(tmp_path / "out/real")
    refuse_links(tmp_path / "out", "real/new")
    for folder in ("link", "link/new", "real/inner"):
        with pytest.raises(UserError, match="is a symbolic link, and nothing is written through it"):
            refuse_links(tmp_path / "out", folder)
    # The user may have chosen a link as the output folder.
    (tmp_path / "chosen").symlink_to(tmp_path / "out")
    refuse_links(tmp_path / "chosen", "real")


def test_drafts_of_killed_processes_are_removed(tmp_path: Path) -> None:
    draft = f"{'0a' * 16}.partial"
    for name in (
        f".one.{draft}",
        f"one/.m_seed_0.{draft}",
        f"one/.one.{draft}",
        f"one/.two.{draft}",
        f".two.{draft}",
        ".one.0a.partial",
    ):
        (tmp_path / name / "files").mkdir(parents=True)
    (tmp_path / f"one/.m_seed_0.{'0b' * 16}.partial").symlink_to(tmp_path)
    (tmp_path / "one/notes").write_text("mine")
    (tmp_path / f".one.{'0c' * 16}.partial").write_text("no folder")
    remove_drafts([tmp_path / "one", tmp_path / "one/m_seed_0", tmp_path / "none/m_seed_0"])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".one.0a.partial", f".one.{'0c' * 16}.partial", f".two.{draft}", "one",
    ]  # fmt: skip
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == [
        f".m_seed_0.{'0b' * 16}.partial", f".two.{draft}", "notes",
    ]  # fmt: skip


def test_a_draft_is_tried_a_limited_number_of_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Path] = []

    def racing(path: Path, *args: Any, **more: Any) -> None:
        tried.append(path)
        raise FileNotFoundError(path)

    monkeypatch.setattr(outputs, "MAX_ATTEMPTS", 3)
    monkeypatch.setattr(Path, "mkdir", racing)
    with pytest.raises(FileNotFoundError), outputs._draft(tmp_path / "one/two"):
        pytest.fail("there is no draft")
    assert tried == [tmp_path / "one"] * 3


def test_a_new_folder_is_made_with_its_parents_and_leaves_no_draft(tmp_path: Path) -> None:
    with outputs._draft(tmp_path / "a/b/c") as draft:
        assert draft.parent == tmp_path / "a/b"
        assert draft.is_dir()
    (tmp_path / "here").mkdir()
    with outputs._draft(tmp_path / "here") as draft:
        assert draft.parent == tmp_path / "here"
        (draft / "file").touch()
    assert [*(tmp_path / "here").iterdir()] == [*(tmp_path / "a/b").iterdir()] == []
