"""Test `--pairs all`: one complex per pair of chains, features shared between complexes, a table column per chain."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.prediction.test_predict_complexes import ONE, PAIRED, PARTNER, TWO, multimer
from tests.prediction.test_score_table import Killed, options
from warpfold import predict
from warpfold.data.example import query_files
from warpfold.data.example.query_files import read_query_files
from warpfold.errors import UserError
from warpfold.model.weights.files import save_params
from warpfold.prediction.folder import Recorder
from warpfold.prediction.pages import prediction_report
from warpfold.prediction.queries import pair_names
from warpfold.report.report import render

NAMES = ("one", "two", "three")
RECORDS = f">one\n{ONE}\n>two\n{TWO}\n>three\n{ONE[:9]}\n"
PAIRS = ["one_and_one", "one_and_two", "one_and_three", "two_and_two", "two_and_three", "three_and_three"]


pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture(scope="module")
def params(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("params") / "m.safetensors"
    save_params(path, multimer())
    return path


@pytest.fixture
def inputs(tmp_path: Path) -> tuple[Path, list[Path]]:
    """Write three chains. Two of them have alignments whose rows can be paired."""
    (tmp_path / "q.fasta").write_text(RECORDS)
    (tmp_path / "one.a3m").write_text(PAIRED)
    (tmp_path / "two.a3m").write_text(PARTNER)
    return tmp_path / "q.fasta", [tmp_path / "one.a3m", tmp_path / "two.a3m"]


def test_each_two_chains_are_folded_as_their_complex_is(
    tmp_path: Path, inputs: tuple[Path, list[Path]], params: Path
) -> None:
    summary = predict(inputs[0], params, tmp_path / "out", msa=inputs[1], **options(pairs="all", batch=1))
    assert [entry["name"] for entry in summary["predictions"]] == PAIRS
    assert summary["pairs"] == [*NAMES]
    by_name = {entry["name"]: entry for entry in summary["predictions"]}
    assert by_name["one_and_two"]["paired_rows"] == 1
    assert {name: [one["kind"] for one in found] for name, found in summary["input_warnings"].items()} == {
        "three": ["no_alignment"]
    }
    for name, fasta in {"one_and_two": f"{ONE}:{TWO}", "one_and_one": f"{ONE}:{ONE}"}.items():
        (tmp_path / f"{name}.fasta").write_text(f">{name}\n{fasta}\n")
        msas = inputs[1][: fasta.count(TWO) + 1]
        predict(tmp_path / f"{name}.fasta", params, tmp_path / name, msa=msas, **options())
        for ending in (".cif", "_pae.json", ".pdb"):
            alone, pair = (tmp_path / out / name / f"{name}{ending}" for out in (name, "out"))
            assert alone.read_bytes() == pair.read_bytes()
    with open(tmp_path / "out/scores.csv", newline="") as file:
        assert [row["name"] for row in csv.DictReader(file)] == PAIRS
    page = render(prediction_report(tmp_path / "out", summary))
    assert "All against all" in page
    assert "6 of 6 pairs of 3 chains" in page


def test_what_is_read_of_a_chain_is_read_once(
    tmp_path: Path, inputs: tuple[Path, list[Path]], params: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, kept = list[str](), list[Any]()
    encode = query_files.from_sequence

    def counted(sequence: str, *args: Any, **more: Any) -> Any:
        made.append(sequence)
        return encode(sequence, *args, **more)

    def add(recorder: Recorder, outcome: Any) -> None:
        kept.append(outcome.item.query)

    monkeypatch.setattr(query_files, "from_sequence", counted)
    monkeypatch.setattr(Recorder, "add", add)
    predict(inputs[0], params, tmp_path / "out", msa=inputs[1], **options(pairs="all"))
    assert sorted(made) == sorted([ONE, TWO, ONE[:9]])
    assert len({id(chain) for query in kept for chain in query.chains}) == 3


def test_a_killed_run_goes_on_and_parts_share_it(
    tmp_path: Path, inputs: tuple[Path, list[Path]], params: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, add, count = tmp_path / "out", Recorder.add, [0]

    def dying(recorder: Recorder, outcome: Any) -> None:
        add(recorder, outcome)
        count[0] += 1
        if count[0] == 2:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Recorder, "add", dying)
        with pytest.raises(Killed):
            predict(inputs[0], params, out, msa=inputs[1], **options(pairs="all"))
    first = predict(inputs[0], params, out, msa=inputs[1], **options(pairs="all"), shard="2/2")
    assert first["status"] == "running"
    last = predict(inputs[0], params, out, msa=inputs[1], **options(pairs="all"), shard="1/2")
    assert [entry["name"] for entry in last["predictions"]] == PAIRS
    with pytest.raises(UserError, match="another run"):
        predict(inputs[0], params, out, msa=inputs[1], **options())


def test_what_cannot_be_paired_is_said(tmp_path: Path, params: Path) -> None:
    (tmp_path / "q.fasta").write_text(f">one\n{ONE}\n>both\n{ONE}:{TWO}\n")
    summary = predict(tmp_path / "q.fasta", params, tmp_path / "out", **options(pairs="all"))
    assert [entry["name"] for entry in summary["predictions"]] == ["one_and_one"]
    (failure,) = summary["failures"]
    assert failure["error"] == "both: is a complex, and --pairs pairs single chains. Pass each chain as a record."


def test_names_of_pairs_are_names_of_files() -> None:
    found = pair_names(["a", "a_and_b", "b", "b_and_b", "x" * 99])
    assert len({name.lower() for name in found.values()}) == len(found) == 15
    assert found[0, 2] == "a_and_b"
    assert found[0, 3] == "a_and_b_and_b"
    assert found[1, 2] == "pair_2_and_3"
    assert found[0, 4] == "pair_1_and_5"
    assert max(map(len, found.values())) <= 100


TABLES = {
    "target,binder": (f"id,target,binder,score\nd1,{ONE},{TWO},0.5\nd2,{ONE},{TWO}AA,0.6\n", ["A", "B"], [ONE, TWO]),
    "letters": (f"ID, H ,l\nd1,{ONE},{TWO}\nd2,{ONE},\n", ["H", "L"], [ONE, TWO]),
    "chain_x": (f"id\tchain_B\tchain C\nd1\t{ONE}\t{TWO}\n", ["B", "C"], [ONE, TWO]),
    "target of two": (f"binder,id,target\n{TWO},d1,{ONE}:{ONE}\n", ["A", "B", "C"], [TWO, ONE, ONE]),
    "sequence decides": (f"id,sequence,target\nd1,{ONE}:{TWO},{TWO}\n", ["A", "B"], [ONE, TWO]),
}


@pytest.mark.parametrize("kind", TABLES)
def test_tables_with_a_column_for_each_chain(tmp_path: Path, kind: str) -> None:
    text, ids, sequences = TABLES[kind]
    (tmp_path / "q.csv").write_text(text)
    first, *more = read_query_files(tmp_path / "q.csv").found
    assert (first.name, [*first.ids], [*first.sequences]) == ("d1", ids, sequences)
    if kind == "letters":
        assert [(one.ids, one.sequences) for one in more] == [(("H",), (ONE,))]


def test_a_matrix_has_what_is_known() -> None:
    from warpfold.report.figures import draw_pairs

    values = np.array([[0.2, np.nan], [np.nan, 0.9]])
    drawn = draw_pairs(["one", "two"], {"ipTM": values, "ipSAE": values})
    assert drawn.startswith("<svg")
    assert all(word in drawn for word in ("one", "two", "ipTM", "ipSAE"))
