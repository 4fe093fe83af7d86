"""Test commands that read structures: residues in no chain, chain names that differ in case, ids of 12 characters."""

from pathlib import Path

import pytest

import warpfold
from tests.data.structure.test_awkward_files import pdb_chain, plain
from warpfold.data.structure.library import Library
from warpfold.errors import UserError
from warpfold.evaluation.truths import Truth

SEQUENCE = "GASTVLKEVGASTVLKEV"
# SEQRES lists four residues, but the chain has atoms of a fifth.
SHORT = "SEQRES   1 A    4  GLY ALA SER THR\n"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "END\n")
    return path


def test_score_refuses_unplaced_residues_unless_they_are_allowed(tmp_path: Path) -> None:
    truth = write(tmp_path / "truth.pdb", SHORT + pdb_chain(plain("GASTW"), "A") + "TER\n")
    prediction = write(tmp_path / "prediction.pdb", pdb_chain(plain("GAST"), "A"))
    with pytest.raises(UserError, match=r"truth.pdb: has residues .* in no chain: 1 \(TRP 5 of chain A\)"):
        warpfold.score(prediction, truth)
    found = warpfold.score(prediction, truth, allow_unplaced=True)
    assert found.paired == 4
    assert any("in no chain: 1" in note for note in found.notes)


def test_evaluate_counts_a_target_with_unplaced_residues_as_a_failure(tmp_path: Path) -> None:
    write(tmp_path / "truth/t1.pdb", SHORT + pdb_chain(plain("GASTW"), "A") + "TER\n")
    write(tmp_path / "truth/t2.pdb", pdb_chain(plain(SEQUENCE), "A"))
    write(tmp_path / "predictions/t1.pdb", pdb_chain(plain("GAST"), "A"))
    write(tmp_path / "predictions/t2.pdb", pdb_chain(plain(SEQUENCE), "A"))
    (found,) = warpfold.evaluate(tmp_path / "predictions", tmp_path / "truth")["sets"]
    assert [failure["target"] for failure in found["failures"]] == ["t1"]
    (found,) = warpfold.evaluate(tmp_path / "predictions", tmp_path / "truth", allow_unplaced=True)["sets"]
    assert found["failures"] == []


def test_evaluate_refuses_unplaced_residues_of_a_prediction(tmp_path: Path) -> None:
    write(tmp_path / "truth/t1.pdb", pdb_chain(plain("GAST"), "A"))
    write(tmp_path / "predictions/t1.pdb", SHORT + pdb_chain(plain("GASTW"), "A") + "TER\n")
    with pytest.raises(UserError) as raised:
        warpfold.evaluate(tmp_path / "predictions", tmp_path / "truth")
    assert str(raised.value) == (
        f"{tmp_path / 'predictions/t1.pdb'}: has residues with N, CA and C that are in no chain: 1 (TRP 5 of chain A); "
        "correct the file, or pass allow_unplaced to score without them"
    )


def test_a_reference_with_unplaced_residues_is_refused_by_default(tmp_path: Path) -> None:
    path = write(tmp_path / "t1.pdb", SHORT + pdb_chain(plain("GASTW"), "A") + "TER\n")
    with pytest.raises(UserError, match="in no chain: 1"):
        Truth("t1", path).parse(path.read_bytes())
    assert list(Truth("t1", path).parse(path.read_bytes(), allow_unplaced=True).chains) == ["A"]


def test_chains_that_differ_in_case_are_different_targets(tmp_path: Path) -> None:
    sequences = {"a": "GASTVLKEVGASTVLKEV", "A": "WWYFHRDNQWWYFHRDNQ"}
    for chain, sequence in sequences.items():
        write(tmp_path / f"truth/9zza_{chain}.pdb", pdb_chain(plain(sequence), chain))
        write(tmp_path / f"predictions/9zza_{chain}.pdb", pdb_chain(plain(sequence), chain))
    (found,) = warpfold.evaluate(tmp_path / "predictions", tmp_path / "truth")["sets"]
    assert found["targets"] == 2
    assert {row["target"]: (row["identity"], row["coverage"]) for row in found["rows"]} == {
        "9zza_a": (1.0, 1.0),
        "9zza_A": (1.0, 1.0),
    }


def test_another_case_is_found_where_there_is_only_one(tmp_path: Path) -> None:
    write(tmp_path / "truth/9zza_B.pdb", pdb_chain(plain(SEQUENCE), "B"))
    write(tmp_path / "predictions/9ZZA_b.pdb", pdb_chain(plain(SEQUENCE), "A"))
    (found,) = warpfold.evaluate(tmp_path / "predictions", tmp_path / "truth")["sets"]
    assert found["targets"] == 1


def test_a_library_finds_short_and_long_ids(tmp_path: Path) -> None:
    for name in ("9zza.cif", "pdb_00009zzb.cif"):
        (tmp_path / name).write_text("")
    library = Library(tmp_path)
    assert library.find("pdb_00009zza") == tmp_path / "9zza.cif"
    assert library.find("9ZZB") == tmp_path / "pdb_00009zzb.cif"


def test_two_predictions_of_one_target_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "truth/design.pdb", pdb_chain(plain(SEQUENCE), "A"))
    for name in ("Design", "DESIGN"):
        write(tmp_path / f"predictions/{name}.pdb", pdb_chain(plain(SEQUENCE), "A"))
    with pytest.raises(UserError, match=r"DESIGN.pdb and Design.pdb are both predictions of design. Keep one"):
        warpfold.evaluate(tmp_path / "predictions", tmp_path / "truth")
