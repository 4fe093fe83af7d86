"""Test the files of predictions: contents, readability by other programs, and complete writing."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gemmi
import numpy as np
import pytest

from tests.prediction.runs import contents
from warpfold.errors import UserError
from warpfold.files import claim_folder, write_summary
from warpfold.geometry.residue import ATOM37_MASK, ATOM_ORDER, RESTYPES
from warpfold.prediction.outputs import Prediction, remove_prediction
from warpfold.prediction.sanity import check_geometry, find_clashes

SEQUENCE = "ACDEFGHIKLMNPQRSTVWYX"


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
