"""Test the store of representations: equal bytes for any number of processes, and lazy reading."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.prediction.runs import contents, run_cli
from warpfold import predict
from warpfold.data.store.store import Store
from warpfold.errors import UserError
from warpfold.prediction.predictor import Predictor, load

pytestmark = pytest.mark.usefixtures("undrawn")

SEQUENCES = ("MKTAYIAKQRQI", "GSHMLEERLGL", "GSHML")


def options(store: Path, **more: Any) -> dict[str, Any]:
    return {"device": "cpu", "recycles": 0, "batch": 1, "representations": store} | more


def records(out: Path) -> list[str]:
    return sorted(path.name for path in out.rglob("*.record"))


@pytest.fixture(scope="module")
def fasta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("representations") / "q.fasta"
    path.write_text("".join(f">p{i}\n{sequence}\n" for i, sequence in enumerate(SEQUENCES)))
    return path


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, fasta: Path, tiny_params: Path) -> dict[str, bytes]:
    """Read the files of the store that a single process writes."""
    at = tmp_path_factory.mktemp("alone")
    predict(fasta, tiny_params, at / "out", **options(at / "r.store"))
    return contents(at / "r.store")


@pytest.mark.parametrize("pair", ["pooled", "whole"])
def test_a_store_has_what_a_prediction_in_memory_has(
    tmp_path: Path, fasta: Path, tiny_params: Path, capsys: pytest.CaptureFixture[str], pair: str
) -> None:
    """Arrays are in half precision and read lazily. Columns allow selecting entries.

    The files of predictions do not contain representations.
    """
    store, out = tmp_path / "r.store", tmp_path / "out"
    given = ["--params", tiny_params, "--out", out, "--recycles", 0, "--representations", store]
    code, said, _ = run_cli(capsys, fasta, *given, "--pair-representation", pair)
    assert (code, f"representations: {store}" in said, records(out)) == (0, True, [])
    found = Store(store)
    assert found.keys == ["p0", "p1", "p2"]
    assert found.column("length") == [12, 11, 5]
    assert (found.column("name"), found.column("seed")) == (found.keys, [0] * 3)
    record = found.record("p1")
    assert record.notes == {"name": "p1", "sequence": SEQUENCES[1], "chains": ["A"]}
    same = load(tiny_params, device="cpu").fold(SEQUENCES[1], recycles=0)
    wanted = {"single": same.single, "structure_module": same.structure_module}
    wanted |= (
        {"pair": same.pair} if pair == "whole" else {"pair_rows": same.pair.mean(1), "pair_columns": same.pair.mean(0)}
    )
    assert set(record.arrays) == set(wanted)
    for name, array in wanted.items():
        assert record.read(name).dtype == np.float16
        np.testing.assert_array_equal(record.read(name), array.astype(np.float16))
        np.testing.assert_array_equal(record.read(name, np.array([2, 7])), array[[2, 7]].astype(np.float16))
    assert not {"single", "pair", "msa"} & set(np.load(out / "p1" / "p1.npz", allow_pickle=False).files)
    summary = json.loads((out / "summary.json").read_text())
    assert all(one["stored"] and "representations" not in one["files"] for one in summary["predictions"])


def test_alone_the_option_means_the_npz(tmp_path: Path, tiny_params: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--params", tiny_params, "--recycles", 0, SEQUENCES[0]]
    assert run_cli(capsys, "--representations", *given, "--out", tmp_path / "out")[0] == 0
    arrays = np.load(tmp_path / "out" / "query" / "query.npz", allow_pickle=False)
    assert {"single", "pair", "msa", "structure_module"} <= set(arrays.files)
    assert run_cli(capsys, f"--representations={tmp_path}/a.store", *given, "--out", tmp_path / "b")[0] == 0
    assert Store(tmp_path / "a.store").keys == ["query"]


def test_parts_make_the_store_of_one_process(
    tmp_path: Path, fasta: Path, tiny_params: Path, alone: dict[str, bytes]
) -> None:
    store = tmp_path / "parts.store"
    for number in (2, 1):
        assert not store.exists()
        predict(fasta, tiny_params, tmp_path / "parts", **options(store), shard=f"{number}/2")
    assert contents(store) == alone
    assert records(tmp_path / "parts") == []


def test_what_failed_and_is_folded_later_comes_into_the_store(
    tmp_path: Path, fasta: Path, tiny_params: Path, alone: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is then written again. A kill between its two renames loses nothing."""
    out, store, prepare = tmp_path / "out", tmp_path / "out.store", Predictor.prepare

    def fails(self: Predictor, assembly: Any, **more: Any) -> Any:
        if assembly.name == "p1":
            raise UserError("no")
        return prepare(self, assembly, **more)

    monkeypatch.setattr(Predictor, "prepare", fails)
    assert predict(fasta, tiny_params, out, **options(store))["status"] == "failed"
    assert Store(store).keys == ["p0", "p2"]
    monkeypatch.setattr(Predictor, "prepare", prepare)
    summary = predict(fasta, tiny_params, out, **options(store))
    assert (summary["status"], contents(store)) == ("complete", alone)
    assert {path.name for path in tmp_path.glob("*.store")} == {"out.store"}
    # This is the state after a kill between the two renames.
    store.rename(tmp_path / "out.new.store")
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*.npz")}
    assert predict(fasta, tiny_params, out, **options(store))["status"] == "complete"
    assert contents(store) == alone
    assert {path: path.stat().st_mtime_ns for path in times} == times


def test_what_the_store_lost_is_predicted_again(
    tmp_path: Path, fasta: Path, tiny_params: Path, alone: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    out, store = tmp_path / "out", tmp_path / "out.store"
    predict(fasta, tiny_params, out, **options(store))
    shutil.rmtree(store)
    assert predict(fasta, tiny_params, out, **options(store))["status"] == "complete"
    assert contents(store) == alone
    assert "lacks 3 of its entries, which are predicted again" in caplog.text


def test_what_is_not_kept_is_not_in_the_store(tmp_path: Path, fasta: Path, tiny_params: Path) -> None:
    """This holds for the best seeds of each protein and for the best of a run. A later, wider --keep adds entries."""
    out, store = tmp_path / "out", tmp_path / "out.store"
    summary = predict(fasta, tiny_params, out, **options(store, seeds=2, keep=1))
    assert Store(store).keys == [one["folder"] for one in summary["predictions"] if one["rank"] == 1]
    assert len(Store(store)) == 3
    predict(fasta, tiny_params, out, **options(store, seeds=2))
    assert len(Store(store)) == 6
    summary = predict(fasta, tiny_params, tmp_path / "two", **options(tmp_path / "two.store", keep="best:1"))
    best = max(summary["predictions"], key=lambda one: one["mean_plddt"])["folder"]
    assert Store(tmp_path / "two.store").keys == [best]


def test_values_beyond_half_precision_fail_that_prediction(tiny_params: Path) -> None:
    prediction = load(tiny_params, device="cpu").fold(SEQUENCES[2], recycles=0)
    large = replace(prediction, single=prediction.single + 1e6)
    with pytest.raises(UserError, match=r"query: single has values that half precision does not hold \(up to 1e\+06"):
        large.record("pooled")


def test_what_is_there_stays(tmp_path: Path, fasta: Path, tiny_params: Path) -> None:
    """A store of another run, a file, and a path that cannot be written are refused before anything is folded."""
    (tmp_path / "file.store").write_text("years of work")
    (tmp_path / "other.store").mkdir()
    (tmp_path / "other.store" / "sources.json").write_text('{"run": "another"}')
    for name, says in (
        ("file", "exists already, and is not of this run"),
        ("other", "exists already, and is not of this run"),
        ("file.store/below", "file.store is not a writable folder"),
    ):
        with pytest.raises(UserError, match=says):
            predict(fasta, tiny_params, tmp_path / "out", **options(tmp_path / f"{name}.store", force=True))
        assert not (tmp_path / "out").exists()
    assert (tmp_path / "file.store").read_text() == "years of work"
