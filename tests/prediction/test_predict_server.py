"""Test alignment servers: only a named server is asked, once, for missing alignments, and never for a refused run."""

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import warpfold
from tests.data.search.alignment_server import Server, packed, serving
from tests.helpers import tiny_multimer
from tests.prediction.runs import run_cli, write_entry
from tests.test_cli import run
from warpfold import predict
from warpfold.data.search.server import AlignmentServer, ServerLimits
from warpfold.errors import DiskError, UserError
from warpfold.files import writing
from warpfold.prediction.predictor import Predictor, load

ONE, TWO, ROW = "MKTAYIAKQRQISFVKSH", "GSHMLEERLGLIEVQ", "-KTAYLAKQRQISFVRSH"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with serving() as server:
        yield server


def quick(host: Server, cache: Path) -> AlignmentServer:
    return AlignmentServer(host.url, cache, ServerLimits(between=0.0, tries=1), wait=lambda seconds: None)


def test_one_sequence_is_sent_if_a_server_is_named(host: Server, tiny_params: Path, tmp_path: Path) -> None:
    predictor = load(tiny_params, "cpu")
    assert predictor.fold(ONE).details["msa_depth"] == 1
    assert not host.asked
    found = predictor.fold(ONE, msa_server=quick(host, tmp_path / "kept"))
    assert found.details["msa_depth"] > 1
    assert "warnings" not in found.details
    assert host.sequences == [(ONE,)]
    with_rows = predictor.fold(ONE, [ROW], msa_server=quick(host, tmp_path / "kept"))
    assert with_rows.details["msa_depth"] == 2
    assert host.sequences == [(ONE,)]


def test_an_address_is_enough_and_answers_are_kept_here(host: Server, tiny_params: Path, tmp_path: Path) -> None:
    predictor = load(tiny_params, "cpu", msa_server=host.url, msa_cache=tmp_path / "kept")
    assert predictor.fold(ONE).details["msa_depth"] > 1
    assert len(list((tmp_path / "kept").glob("*/uniref.a3m"))) == 1
    again = load(tiny_params, "cpu")
    assert again.fold(ONE, msa_server=host.url, msa_cache=tmp_path / "kept").details["msa_depth"] > 1
    assert host.sequences == [(ONE,)]


def test_chains_without_alignment_are_sent_and_pairs_if_none_has(host: Server, tmp_path: Path) -> None:
    folder, server = Predictor(tiny_multimer(recycles=0)), quick(host, tmp_path / "kept")
    both = folder.fold([ONE, TWO], msa_server=server)
    assert host.sequences == [(ONE,), (TWO,), (ONE, TWO)]
    assert min(both.details["chain_depths"].values()) > 1
    host.sequences.clear()
    folder.fold([ONE, TWO[::-1]], [[ROW], None], msa_server=server)
    assert host.sequences == [(TWO[::-1],)]


def test_of_designs_the_fixed_chains_alone_are_sent(host: Server, tmp_path: Path) -> None:
    folder, server = Predictor(tiny_multimer(recycles=0)), quick(host, tmp_path / "kept")
    path = write_entry(tmp_path / "design.cif", {"A": TWO, "B": ONE}, "2020-01-01")
    given = {"msa_server": server, "initial_guess": path, "fixed": "B"}
    for found in (
        folder.fold({"A": TWO, "B": ONE}, **given),
        folder.fold_many({"x": {"A": TWO, "B": ONE}}, **given)[0].prediction,
        folder.fold_many(path, **given)[0].prediction,
    ):
        assert found is not None
        assert [depth > 1 for depth in found.details["chain_depths"].values()] == [False, True]
    assert host.sequences == [(ONE,)]


def test_what_cannot_be_folded_is_not_sent(host: Server, tiny_params: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="for single chains"):
        load(tiny_params, "cpu").fold([ONE, TWO], msa_server=quick(host, tmp_path / "kept"))
    assert not host.asked


def full_disk(path: Path, *_: object, **__: object) -> None:
    with writing(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_of_many_each_fails_alone_but_a_server_that_is_gone_or_a_full_disk_ends_it(
    host: Server, tiny_params: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor, server = load(tiny_params, "cpu", recycle_tolerance=None), quick(host, tmp_path / "kept")
    host.faults["ticket/msa"] = ["ERROR"]
    first, second = predictor.fold_many({"a": ONE, "b": TWO}, msa_server=server, recycles=0)
    assert "answers ERROR" in first.error
    assert second.prediction is not None
    assert second.prediction.details["msa_depth"] > 1
    host.faults["ticket/msa"] = [(503, {})]
    with pytest.raises(UserError, match="503"):
        predictor.fold_many([ONE, TWO[::-1]], msa_server=server)
    with monkeypatch.context() as patch:
        patch.setattr("warpfold.data.search.server.write_atomically", full_disk)
        # A full disk ends the run because the next answer could not be stored either.
        with pytest.raises(DiskError, match="Make room"):
            predictor.fold_many([ONE, ONE[::-1]], msa_server=server)
    (tmp_path / "two.fasta").write_text(f">x\n{ONE}\n>y\n{TWO}\n")
    found = predictor.fold_many(tmp_path / "two.fasta", msa_server=server, recycles=0)
    assert [one.prediction.details["msa_depth"] > 1 for one in found if one.prediction] == [True, True]


def test_many_are_names_sequences_and_files_in_any_mixture(tiny_params: Path, tmp_path: Path) -> None:
    predictor = load(tiny_params, "cpu")
    (tmp_path / "two.fasta").write_text(f">x\n{TWO}\n")
    found = predictor.fold_many([ONE, str(tmp_path / "two.fasta")], recycles=0)
    assert [(one.name, bool(one.prediction)) for one in found] == [("query", True), ("x", True)]


def test_a_server_is_asked_for_what_has_no_alignment(host: Server, tmp_path: Path, tiny_params: Path) -> None:
    query, out = tmp_path / "q.fasta", tmp_path / "out"
    query.write_text(f">one\n{ONE}\n>two\n{TWO}\n")
    (tmp_path / "one.a3m").write_text(f">one\n{ONE}\n>x\n-{ONE[1:]}\n")

    def fold(**more: Any) -> dict[str, Any]:
        return predict(query, tiny_params, out, msa=[tmp_path / "one.a3m"], device="cpu", recycles=0, **more)

    summary = fold(msa_server=quick(host, out / "alignments"))
    assert host.sequences == [(TWO,)]
    assert [entry["msa_depth"] for entry in summary["predictions"]] == [2, 2]
    assert (summary["msa_server"], summary["input_warnings"]) == (host.url, {})
    asked = len(host.asked)
    assert fold(msa_server=quick(host, out / "alignments"))["run"] == summary["run"]
    assert len(host.asked) == asked
    with pytest.raises(UserError, match="another run"):
        fold()  # without the server's alignment


def test_of_bad_records_nothing_is_sent(host: Server, tmp_path: Path, tiny_params: Path) -> None:
    records = {"one": ONE, "bad": "MK1V", "two": TWO, "dna": "ACGT" * 9, "pair": f"{ONE}:{TWO[3:]}", "records": ONE[4:]}
    (tmp_path / "q.fasta").write_text("".join(f">{name}\n{sequence}\n" for name, sequence in records.items()))
    summary = warpfold.predict(
        tmp_path / "q.fasta", tiny_params, tmp_path / "out", device="cpu", recycles=0,
        msa_server=quick(host, tmp_path / "cache"),
    )  # fmt: skip
    assert host.sequences == [(ONE,), (TWO,)]
    assert [one["name"] for one in summary["failures"]] == ["bad", "dna", "pair", "records"]


def test_a_sequence_without_an_answer_ends_the_run_and_keeps_the_others(
    host: Server, tmp_path: Path, tiny_params: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host.faults["ticket/msa"] = ["ERROR"]
    arguments = ["--params", tiny_params, "--recycles", 0, "--out", tmp_path / "out"]
    code, out, err = run_cli(capsys, ONE, TWO, *arguments, "--msa-server", host.url)
    assert (code, out) == (2, "")
    first, last = err.splitlines()
    assert first.startswith(f"sending 2 sequences to {host.url} (query_1, query_2)")
    assert last.startswith(f"error: query_1: {host.url}: answers ERROR")
    code, out, err = run_cli(capsys, ONE, TWO, *arguments, "--msa-server", host.url)
    assert (code, out.count("mean pLDDT")) == (0, 2)
    assert host.sequences == [(ONE,), (TWO,), (ONE,)]


def test_a_search_on_a_server(host: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["search", ONE, "--out", tmp_path / "found"]
    code, out, err = run(capsys, *arguments, "--msa-server", host.url)
    assert code == 0, err
    assert out.startswith("query: 1 in uniref, 1 in bfd.mgnify30.metaeuk30.smag30, 1 in pdb70\n")
    assert (tmp_path / "found/query/uniref.a3m").is_file()
    host.answer = lambda endpoint, sequences: packed({"uniref.a3m": f">101\n{sequences[0]}\n", "pdb70.m8": "x\ty\n"})
    code, _, err = run(capsys, "search", TWO, "--out", tmp_path / "thin", "--msa-server", host.url)
    assert (code, err.splitlines()[-1]) == (0, "warning: no hit in any database, an alignment of one row: query")
    for wrong, said in (
        ([], "--database is missing. Pass a local database, or a server with --msa-server"),
        (["--msa-server", host.url, "--e-value", 1], "--e-value: has no effect with --msa-server"),
        (["--msa-server", "host"], "is no http or https address"),
    ):
        code, _, err = run(capsys, *arguments, *wrong)
        assert (code, err.count("\n")) == (2, 1)
        assert said in err


# ---- command and Python function


def test_a_run_is_that_of_the_command(tiny_params: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "q.fasta").write_text(f">a\n{ONE}\n>b\n{TWO}\n")
    (tmp_path / "a.a3m").write_text(f">a\n{ONE}\n>r\n{ROW}\n")
    told: list[tuple[float, int, str]] = []
    summary = warpfold.predict(
        tmp_path / "q.fasta", tiny_params, tmp_path / "python", msa=tmp_path / "a.a3m", recycles=0, device="cpu",
        progress=lambda *now: told.append(now),
    )  # fmt: skip
    assert (summary["status"], [one["name"] for one in summary["predictions"]]) == ("complete", ["a", "b"])
    assert told[-1][:2] == (2, 2)
    assert summary == json.loads((tmp_path / "python/summary.json").read_text())
    code, *_ = run(
        capsys, "predict", tmp_path / "q.fasta", "--msa", tmp_path / "a.a3m", "--params", tiny_params, "--recycles", 0,
        "--device", "cpu", "--out", tmp_path / "shell",
    )  # fmt: skip
    assert code == 0
    other = json.loads((tmp_path / "shell/summary.json").read_text())
    assert (other["run"], other["settings"]) == (summary["run"], summary["settings"])
    for name in ("a/a.cif", "b/b.pdb"):
        assert (tmp_path / "python" / name).read_bytes() == (tmp_path / "shell" / name).read_bytes()
    again = warpfold.predict(str(tmp_path / "q.fasta"), [str(tiny_params)], str(tmp_path / "python"),
        msa=[str(tmp_path / "a.a3m")], recycles=0, device="cpu")  # fmt: skip
    assert [one["seconds"] for one in again["predictions"]] == [one["seconds"] for one in summary["predictions"]]
    with pytest.raises(UserError, match=r"another run\. Name a new folder, or replace it with force\.$"):
        warpfold.predict(tmp_path / "q.fasta", tiny_params, tmp_path / "python", recycles=0, seed=1, device="cpu")


def test_nothing_is_sent_for_a_run_that_is_refused(host: Server, tiny_params: Path, tmp_path: Path) -> None:
    out, asked = tmp_path / "out", {"device": "cpu", "recycles": 0}
    server = quick(host, out / "alignments")
    warpfold.predict(ONE, tiny_params, out, msa_server=server, **asked)
    assert host.sequences == [(ONE,)]
    # The same run again sends nothing.
    warpfold.predict(ONE, tiny_params, out, msa_server=server, **asked)
    for query, more in ((TWO, {}), (ONE[::-1], {}), ([ONE, TWO], {}), (TWO, {"seed": 1})):
        with pytest.raises(UserError, match="another run"):
            warpfold.predict(query, tiny_params, out, msa_server=server, **asked, **more)
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match="something else"):
        warpfold.predict(TWO, tiny_params, other, msa_server=server, **asked)
    with pytest.raises(UserError, match="contains other files"):
        warpfold.search(TWO, out=other, msa_server=server)
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(UserError, match="is a file"):
        warpfold.predict(TWO, tiny_params, file, msa_server=server, **asked)
    alone = tmp_path / "alone"
    warpfold.predict(TWO, tiny_params, alone, **asked)
    # The folder holds a run without alignments.
    with pytest.raises(UserError, match="another run"):
        warpfold.predict(TWO, tiny_params, alone, msa_server=server, **asked)
    assert host.sequences == [(ONE,)]
    warpfold.predict(TWO, tiny_params, alone, msa_server=server, force=True, **asked)
    assert host.sequences == [(ONE,), (TWO,)]
