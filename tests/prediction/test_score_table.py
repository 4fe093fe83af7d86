"""Test score tables: their contents, and that kills, restarts and several processes neither lose nor repeat rows."""

import csv
import gc
import json
import weakref
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.entries import random_chain
from tests.prediction.test_predict_complexes import ONE, RECORDS, TWO, multimer
from tests.prediction.test_ranking import helices
from warpfold import predict
from warpfold.errors import UserError
from warpfold.files import write_summary
from warpfold.model.weights.files import save_params
from warpfold.prediction.folder import Recorder
from warpfold.prediction.outputs import write_prediction
from warpfold.prediction.predictor import load
from warpfold.scoring.interface import PairScore, chain_pair_scores
from warpfold.scoring.score_table import COLUMNS, PAIR_COLUMNS, ScoreTables, design_scores, row_of

BINDERS = ("GSHMLEERLGL", "GSHMAEELLGL", "GGHMLEELLG", "ASHMLEERLG", "GSHELEERLGLAA")
DESIGNS = "".join(f">d{i}\n{ONE}:{binder}\n" for i, binder in enumerate(BINDERS))


pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture(scope="module")
def params(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save random parameters of two multimers."""
    folder = tmp_path_factory.mktemp("params")
    for seed, name in enumerate(("first", "second")):
        save_params(folder / f"{name}.safetensors", multimer(seed))
    return {name: folder / f"{name}.safetensors" for name in ("first", "second")}


@pytest.fixture
def designs(tmp_path: Path) -> Path:
    (tmp_path / "designs.fasta").write_text(DESIGNS)
    return tmp_path / "designs.fasta"


def options(**more: Any) -> dict[str, Any]:
    return {"device": "cpu", "recycles": 0} | more


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def keys(path: Path) -> list[str]:
    return [f"{row['name']} {row['model']} {row['seed']}" for row in rows(path)]


def test_every_prediction_has_a_row_of_its_best_interface(tmp_path: Path, params: dict[str, Path]) -> None:
    (tmp_path / "trio.fasta").write_text(RECORDS)
    out = tmp_path / "out"
    summary = predict(tmp_path / "trio.fasta", [*params.values()], out, **options(seeds=2))
    assert summary["tables"][:2] == ["scores.csv", "scores_pairs.csv"]
    found = rows(out / "scores.csv")
    assert [*found[0]] == [*COLUMNS]
    for row, entry in zip(found, summary["predictions"], strict=True):
        assert row == {name: "" if one is None else str(one) for name, one in row_of(entry).items()}
        assert (row["model"], row["seed"]) == (entry["model"], str(entry["seed"]))
        assert (row["target"], row["binder"]) == ("H:L", "x")
        assert (out / row["structure"]).is_file()
        with np.load(out / entry["folder"] / entry["files"]["arrays"], allow_pickle=False) as arrays:
            given = (arrays[name] for name in ("pae", "plddt", "positions", "mask", "asym_id"))
            pairs = chain_pair_scores(*given, ("H", "L", "x"), arrays["chain_pair_iptm"])
        # The pairs of target and binder are H-x and L-x.
        best = max(pairs[1:], key=lambda one: (one.ipsae, one.contacts))
        assert row["interface"] == ":".join(best.chains)
        for name in ("ipsae", "ipsae_ab", "ipsae15", "pdockq", "pdockq2", "lis", "interface_plddt"):
            assert float(row[name] or "nan") == pytest.approx(float(getattr(best, name) or 0), abs=1e-4, nan_ok=True)
        assert int(row["contacts"]) == sum(one.contacts for one in pairs[1:])
        assert int(row["clashes"]) == sum(one.clashes for one in pairs[1:])
        assert float(row["pair_iptm"]) == pytest.approx(best.iptm, abs=1e-4)
        in_json = json.loads((out / entry["folder"] / entry["files"]["scores"]).read_text())
        assert in_json["pair_scores"] == entry["pair_scores"]
    of_pairs = rows(out / "scores_pairs.csv")
    assert [*of_pairs[0]] == [*PAIR_COLUMNS]
    assert [(row["chain_a"], row["chain_b"]) for row in of_pairs] == [("H", "L"), ("H", "x"), ("L", "x")] * 4
    assert [row["ipsae"] for row in of_pairs[:3]] == [
        str(one["ipsae"]) for one in summary["predictions"][0]["pair_scores"]
    ]


def test_the_design_that_was_given_is_compared_with(tmp_path: Path) -> None:
    prediction = helices(2, 10.0, ("A", "B"))
    given = {chain.id: chain for chain in helices(2, 13.0, ("A", "B")).chains()}
    entry = write_prediction(prediction, tmp_path, fixed=("A",), given=given) | {"model": "m"}
    scores = entry["scores"]
    assert (scores["target"], scores["binder"], scores["interface"]) == ("A", "B", "A:B")
    assert (scores["rmsd"], scores["binder_rmsd"], scores["target_rmsd"]) == (pytest.approx(3, abs=1e-3), 0, 0)
    other = prediction.design_scores(fixed=("B",), given=given)
    assert (other["target"], other["binder"]) == ("B", "A")
    assert row_of(entry)["rmsd"] == scores["rmsd"]
    assert prediction.design_scores()["target"] == "A"


def test_single_chains_have_no_table(tmp_path: Path, params: dict[str, Path]) -> None:
    (tmp_path / "q.fasta").write_text(f">q\n{TWO}\n")
    summary = predict(tmp_path / "q.fasta", params["first"], tmp_path / "out", **options())
    assert "tables" not in summary
    assert not list((tmp_path / "out").glob("*.csv"))


class Killed(BaseException):
    """Simulate SIGKILL: no code catches this exception."""


@pytest.mark.parametrize("when", ["before the row", "within it", "after it"])
def test_a_run_that_is_killed_has_each_row_once(
    tmp_path: Path, designs: Path, params: dict[str, Path], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    out, append, written = tmp_path / "out", ScoreTables.append, []

    def dying(tables: ScoreTables, entry: dict[str, Any]) -> None:
        if len(written) < 2 or when == "after it":
            append(tables, entry)
        elif when == "within it":
            with open(out / "scores.csv", "a") as file:
                file.write(f"{entry['name']},fir")
        written.append(entry["name"])
        if len(written) == 3:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(ScoreTables, "append", dying)
        with pytest.raises(Killed):
            predict(designs, params["first"], out, **options())
    assert len(keys(out / "scores.csv")) == (2 if when == "before the row" else 3)
    seen, add = list[list[str]](), Recorder.add

    def adding(recorder: Recorder, outcome: Any) -> None:
        seen.append([row["name"] for row in rows(out / "scores.csv")])
        add(recorder, outcome)

    monkeypatch.setattr(Recorder, "add", adding)
    summary = predict(designs, params["first"], out, **options())
    # The table is repaired before the next row is added.
    assert sorted(seen[0]) == sorted(written)
    assert [len(set(one)) for one in seen] == [len(one) for one in seen] == [3, 4]
    assert keys(out / "scores.csv") == [f"d{i} first 0" for i in range(5)]
    assert summary["tables"][0] == "scores.csv"
    alone = tmp_path / "alone"
    predict(designs, params["first"], alone, **options())
    assert (out / "scores.csv").read_bytes() == (alone / "scores.csv").read_bytes()
    assert not (out / "scores_pairs.csv").exists()  # the only pair is in scores.csv


def test_parts_fill_one_table(tmp_path: Path, designs: Path, params: dict[str, Path]) -> None:
    models, out = [*params.values()], tmp_path / "out"
    for number in (2, 1):
        predict(designs, models, out, **options(batch=2), shard=f"{number}/3")
        assert (out / "records").is_dir()
        assert len(set(keys(out / "scores.csv"))) == len(keys(out / "scores.csv")) > 0
    predict(designs, models, out, **options(batch=2), shard="3/3")
    predict(designs, models, tmp_path / "alone", **options(batch=2))
    assert (out / "scores.csv").read_bytes() == (tmp_path / "alone" / "scores.csv").read_bytes()
    assert len(keys(out / "scores.csv")) == 10


@pytest.mark.slow
def test_workers_fill_one_table(tmp_path: Path, designs: Path, params: dict[str, Path]) -> None:
    predict(designs, params["first"], tmp_path / "two", **options(), workers=2)
    predict(designs, params["first"], tmp_path / "alone", **options())
    assert keys(tmp_path / "two/scores.csv") == keys(tmp_path / "alone/scores.csv")


def test_the_rows_of_what_is_damaged_are_made_again(tmp_path: Path, designs: Path, params: dict[str, Path]) -> None:
    out = tmp_path / "out"
    predict(designs, params["first"], out, **options())
    before = (out / "scores.csv").read_bytes()
    (out / "d1/d1.cif").unlink()
    (out / "scores.csv").write_text("mine")
    predict(designs, params["first"], out, **options())
    assert (out / "scores.csv").read_bytes() == before


def test_tables_of_somebody_else_stay(tmp_path: Path, designs: Path, params: dict[str, Path]) -> None:
    """A foreign file is kept in a folder whose summary lists no tables, as earlier versions wrote it.

    The tables of another run are removed with that run.
    """
    out = tmp_path / "out"
    summary = predict(designs, params["first"], out, **options())
    del summary["tables"]
    write_summary(out, summary)
    (out / "scores.csv").write_text("mine")
    with pytest.raises(UserError, match=r"scores\.csv: not written by WarpFold, .*\. Move the file"):
        predict(designs, params["first"], out, **options())
    assert (out / "scores.csv").read_text() == "mine"
    (out / "scores.csv").unlink()
    assert predict(designs, params["first"], out, **options())["tables"][0] == "scores.csv"
    designs.write_text(f">q\n{TWO}\n")
    predict(designs, params["first"], out, **options(force=True))
    assert not list(out.glob("scores*"))


def test_python_gives_the_rows_of_the_table(tmp_path: Path, designs: Path, params: dict[str, Path]) -> None:
    """No prediction stays in memory. A bad design gives a row with an error, in the order of the input."""
    predict(designs, params["first"], tmp_path / "out", **options(recycles=1, batch=1))
    predictor, made = load(params["first"], device="cpu"), list[Any]()
    compute = predictor.compute

    def noting(*args: Any) -> Any:
        prediction = compute(*args)
        made.append(weakref.ref(prediction))
        return prediction

    predictor.compute = noting  # type: ignore[method-assign]
    told = list[float]()
    found = predictor.score_designs(designs, recycles=1, batch=1, progress=lambda done, total, at: told.append(done))
    assert told == [0, 1, 2, 3, 4, 5]
    for row, written in zip(found, rows(tmp_path / "out/scores.csv"), strict=True):
        here = {"model": "model", "structure": None, "error": ""}
        assert {name: "" if one is None else str(one) for name, one in row.items()} == written | {
            name: one or "" for name, one in here.items()
        }
    gc.collect()
    assert [one() for one in made] == [None] * 5
    mixed = predictor.score_designs({"good": f"{ONE}:{TWO}", "bad": f"{ONE}:MK1V", "single": ONE}, recycles=0)
    assert [(row["name"], bool(row["error"]), row["contacts"] is None) for row in mixed] == [
        ("good", False, False),
        ("bad", True, True),
        ("single", False, True),
    ]
    assert all([*row] == [*COLUMNS, "error"] for row in mixed)


def test_a_parquet_file_has_the_same_rows(tmp_path: Path, designs: Path, params: dict[str, Path]) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    summary = predict(designs, params["first"], tmp_path / "out", **options())
    assert summary["tables"] == ["scores.csv", "scores.parquet"]
    table = parquet.read_table(tmp_path / "out/scores.parquet").to_pylist()
    assert table == [row_of(entry) for entry in summary["predictions"]]


def test_contacts_clashes_and_errors_are_of_the_whole_target() -> None:
    """Binder C touches chain A of its target A:B and clashes with chain B."""

    def pair(a: str, b: str, **values: float) -> PairScore:
        return PairScore(
            chains=(a, b), **{one.name: None for one in fields(PairScore) if one.name != "chains"} | values
        )  # type: ignore[arg-type]

    chains = {name: random_chain(name, "A" * n) for name, n in (("A", 10), ("B", 30), ("C", 5))}
    pairs = [
        pair("A", "B", contacts=50, clashes=7, pae_interaction=1.0, ipsae=0.9),
        pair("A", "C", contacts=9, clashes=1, pae_interaction=4.0, ipsae=0.8),
        pair("B", "C", contacts=2, clashes=90, pae_interaction=20.0, ipsae=0.0),
    ]
    found = design_scores(chains, {name: np.full(len(chain.sequence), 80.0) for name, chain in chains.items()}, pairs)
    assert (found["binder"], found["target"], found["interface"]) == ("C", "A:B", "A:C")
    assert (found["contacts"], found["clashes"]) == (11, 91)
    assert found["pae_interaction"] == pytest.approx((10 * 4.0 + 30 * 20.0) / 40)
