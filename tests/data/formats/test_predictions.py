"""Read the file names of predictions of several programs, and their PAE matrices."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from warpfold.data.formats.predictions import (
    PredictionName,
    first_existing,
    is_pdb,
    parse_prediction_name,
    read_pae,
)
from warpfold.errors import UserError

FOLDER = Path("/runs/target")


def named(
    target: str, layout: str, names: tuple[str, ...], rank: int | None = None, model: str = "", **more: Any
) -> PredictionName:
    rest = {"version": 0, "relaxed": False, "is_pass": False, "pae": None}
    return PredictionName(target, layout, names, rank, model, **rest | more)


COLABFOLD = "unrelaxed_rank_002_alphafold2_ptm_model_3_seed_000"


@pytest.mark.parametrize(
    ("file", "neighbours", "expected"),
    [
        (
            "AF-P69905-F1-model_v4.cif",
            "AF-P69905-F1-predicted_aligned_error_v4.json",
            named("P69905", "AlphaFold DB", ("P69905", "AF-P69905-F1", "AF-P69905-F1-model_v4"), version=4),
        ),
        (
            "AF-P69905-F12-model_v1.pdb.gz",
            "",
            named("P69905-F12", "AlphaFold DB", ("P69905-F12", "AF-P69905-F12", "AF-P69905-F12-model_v1"), version=1),
        ),
        ("T1024TS427_1.pdb", "", named("T1024", "CASP", ("T1024",), 1, "TS427")),
        ("T1024TS427_5-D2.pdb", "", named("T1024-D2", "CASP", ("T1024-D2", "T1024"), 5, "TS427")),
        ("H1106v1TS003", "", named("H1106v1", "CASP", ("H1106v1",), None, "TS003")),
        (
            "x_model.cif",
            "x_summary_confidences.json x_confidences.json.gz",
            named("x", "AlphaFold 3", ("x",)),
        ),
        ("x_model.cif", "", named("x_model", "plain files", ("x_model",))),
        (
            "fold_x_y_model_2.cif",
            "fold_x_y_full_data_2.json",
            named("x_y", "AlphaFold Server", ("x_y",), 3, "fold_x_y_model_2"),
        ),
        ("x_model_3_ptm_unrelaxed.pdb", "", named("x", "OpenFold", ("x",), 3, "model_3_ptm")),
        ("x_model_3_ptm_relaxed.pdb", "", named("x", "OpenFold", ("x",), 3, "model_3_ptm", relaxed=True)),
        (
            f"x_y_{COLABFOLD}.pdb",
            f"x_y_scores_{COLABFOLD.removeprefix('unrelaxed_')}.json x_y_predicted_aligned_error_v1.json",
            named("x_y", "ColabFold", ("x_y",), 2, COLABFOLD.removeprefix("unrelaxed_")),
        ),
        (
            f"{COLABFOLD.removeprefix('un')}.pdb",
            "predicted_aligned_error_v1.json",
            named("target", "ColabFold", ("target",), 2, COLABFOLD.removeprefix("unrelaxed_"), relaxed=True),
        ),
        ("x_unrelaxed_model_4.pdb", "", named("x", "ColabFold", ("x",), 4, "model_4")),
        ("x.cif", "x_pae.json x_scores.json", named("x", "plain files", ("x",))),
        ("x_rank_12.cif", "x_rank_12_scores.json x_pae.json", named("x", "plain files", ("x", "x_rank_12"), 12)),
        ("x_recycle_0.cif", "x_pae.json", named("x", "plain files", ("x", "x_recycle_0"), is_pass=True)),
        ("x_relaxed.PDB", "", named("x", "plain files", ("x", "x_relaxed"), relaxed=True)),
    ],
)
def test_names_of_every_program(file: str, neighbours: str, expected: PredictionName) -> None:
    """The first of the neighbours is the file with the PAE, except AlphaFold 3's summary, which has none."""
    names = neighbours.split()
    found = parse_prediction_name(FOLDER / file, {name: FOLDER / name for name in names})
    pae = next((FOLDER / name for name in names if "summary" not in name), None)
    assert found == PredictionName(**vars(expected) | {"pae": pae})


def test_files_may_be_packed_and_plain_ones_come_first() -> None:
    files = {name: FOLDER / name for name in ("a.json.gz", "b.json", "b.json.gz")}
    assert first_existing(files, "a.json", "b.json") == FOLDER / "a.json.gz"
    assert first_existing(files, "b.json", "a.json") == FOLDER / "b.json"
    assert first_existing(files, "c.json") is None
    names = ("x.pdb", "x.PDB.gz", "x.ent", "x.ent.gz", "x.cif", "x.pdb.txt", "pdb")
    assert [is_pdb(Path(name)) for name in names] == [True] * 4 + [False] * 3


PAE = np.random.default_rng(0).uniform(0, 31, (3, 3)).astype(np.float32)
ROWS = PAE.tolist()
SEEN = np.array([True, False, True, True])


def written(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    "content",
    [
        [{"predicted_aligned_error": ROWS, "max_predicted_aligned_error": 31.75}],
        {"pae": ROWS, "ptm": 0.5},
        [{"residue1": [1, 1, 1], "distance": PAE.ravel().tolist()}],
        {"pae": ROWS, "predicted_aligned_error": ROWS},
    ],
)
def test_pae_of_every_layout(tmp_path: Path, content: Any) -> None:
    path = written(tmp_path / "x.json", content)
    pae = read_pae(path, np.ones(3, bool))
    assert pae.dtype == np.float32
    np.testing.assert_array_equal(pae, PAE)
    whole = read_pae(path, SEEN)
    assert whole.dtype == np.float32
    np.testing.assert_array_equal(whole[np.ix_(SEEN, SEEN)], PAE)
    assert np.isnan(whole[1]).all()
    assert np.isnan(whole[:, 1]).all()
    # A file with all residues is returned unchanged.
    np.testing.assert_array_equal(read_pae(path, np.array([True, False, True])), PAE)


def test_pae_of_our_own_files(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", pae=PAE.astype(np.float16))
    np.testing.assert_array_equal(read_pae(tmp_path / "x.npz", np.ones(3, bool)), PAE.astype(np.float16))
    packed = tmp_path / "x.json.gz"
    packed.write_bytes(gzip.compress(json.dumps({"pae": ROWS}).encode()))
    np.testing.assert_array_equal(read_pae(packed, np.ones(3, bool)), PAE)


def test_a_flat_list_is_square(tmp_path: Path) -> None:
    """AlphaFold DB's files had one list until 2022."""
    pae = np.arange(900, dtype=np.float32)
    path = written(tmp_path / "x.json", [{"distance": pae.tolist()}])
    np.testing.assert_array_equal(read_pae(path, np.ones(30, bool)), pae.reshape(30, 30))


def refused(path: Path, seen: Sequence[bool], *limit: int) -> str:
    with pytest.raises(UserError) as error:
        read_pae(path, np.array(seen), *limit)
    return str(error.value)


def test_pae_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    none = "x.json: no PAE in a supported layout ({}). Fetch it again, or remove it."
    assert refused(written(path, {"plddt": [1]}), [True]) == none.format("no matrix in it")
    assert refused(written(path, []), [True]) == none.format("list index out of range")
    for content in (3, {"pae": [[1], [1, 2]]}, {"distance": [1, 2, 3]}, {"pae": {"a": 1}}):
        assert refused(written(path, content), [True]).startswith(none.partition("{")[0])
    path.write_text("{")
    assert refused(path, [True]).startswith(none.partition("{")[0])
    wrong = "x.json: has PAE of shape {}, but the structure has {} residues. Remove one."
    assert refused(written(path, {"pae": ROWS}), [True] * 4) == wrong.format([3, 3], 4)
    assert refused(path, [True, False]) == wrong.format([3, 3], 2)
    assert refused(written(path, {"pae": [1, 2, 3]}), [True] * 3) == wrong.format([3], 3)
    for number in ("NaN", "1e99", "Infinity"):
        path.write_text(f'{{"pae": [[1, {number}], [1, 1]]}}')
        assert refused(path, [True] * 2) == wrong.format([2, 2], 2)
    assert "more than" in refused(path, [True] * 2, 10)
    # An array of objects is a pickle, which is never read.
    np.savez(tmp_path / "x.npz", pae=np.array([[1.0]], object))
    assert refused(tmp_path / "x.npz", [True]).startswith("x.npz: no PAE in a supported layout (Object arrays ")
