"""Test the inputs of `predict`: text, folders, models, servers; kept files; and warnings about inputs."""

import html
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import tiny_model
from tests.prediction.runs import run_cli
from tests.prediction.test_predict_complexes import multimer
from warpfold import predict
from warpfold.data.example.templates import TemplateOutcome
from warpfold.errors import UserError
from warpfold.model.template import TemplateConfig
from warpfold.model.weights.files import save_params
from warpfold.prediction.params import params_files
from warpfold.prediction.predictor import load
from warpfold.prediction.queries import read_given
from warpfold.prediction.templates import (
    TemplateQuery,
    TemplateSources,
    find_templates,
    template_notices,
)

ONE, TWO = "MKTAYIAKQRQISFVKSH", "GSHMLEERLGLIEVQ"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save two single-chain models and a multimer in a folder."""
    folder = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        save_params(folder / f"single_{seed}.safetensors", tiny_model(seed, templates=TemplateConfig(enabled=False)))
    (folder / "multimer").mkdir()
    save_params(folder / "multimer/multimer.safetensors", multimer())
    return folder


def options(**changes: Any) -> dict[str, Any]:
    return {"device": "cpu", "recycles": 0} | changes


# ---- bad records

GOOD = {"q.fasta": f">one\n{ONE}\n>two\n{TWO}\n", "q.csv": f"id,sequence\none,{ONE}\ntwo,{TWO}\n"}
BAD = f">one\n{ONE}\n>bad\nMK1V\n>two\n{TWO}\n"
WRONG = "record 2, 'bad', position 3 has '1', which is not an amino acid. Correct or remove it"


@pytest.mark.parametrize(
    ("name", "text", "bad", "said"),
    [
        ("q.fasta", BAD, "bad", WRONG),
        ("q.fasta", f">one\n{ONE}\n>bad\n\n>two\n{TWO}\n", "bad", "record 'bad' has no sequence. Remove it or"),
        ("q.fasta", f">one\n{ONE}\n>bad\n{'ACGT' * 9}\n>two\n{TWO}\n", "bad", "bad: looks like nucleic acid"),
        ("q.fasta", f">one\n{ONE}\n>Records\n{ONE}\n>two\n{TWO}\n", "Records", "Give the record another name"),
        ("q.csv", f"id,sequence\none,{ONE}\nbad,{ONE}:\ntwo,{TWO}\n", "bad", ">bad has a chain without residues. Wr"),
        ("q.csv", f"id,sequence\none,{ONE}\nbad,{ONE}:{TWO}\ntwo,{TWO}\n", "bad", "but bad is a complex. Pass Alph"),
    ],
)
def test_a_bad_record_fails_and_the_others_are_folded(
    tmp_path: Path, tiny_params: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, bad: str, said: str
) -> None:
    (tmp_path / name).write_text(text)
    arguments = [tmp_path / name, "--params", tiny_params, "--out", tmp_path / "out"]
    code, out, err = run_cli(capsys, *arguments)
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    (failure,) = summary["failures"]
    assert (code, summary["status"], failure["name"]) == (1, "failed", bad)
    assert said in failure["error"]
    assert f"failed {bad}: {failure['error']}\n" in err
    assert [entry["name"] for entry in summary["predictions"]] == ["one", "two"]
    assert failure["error"] in html.unescape((tmp_path / "out/report.html").read_text())
    # The same command folds nothing and reports the same failure. Without the bad record, the run is the same.
    modified = (tmp_path / "out/one/one.cif").stat().st_mtime_ns
    code, out, _ = run_cli(capsys, *arguments, "--json")
    assert (code, json.loads(out)["failures"]) == (1, [failure])
    (tmp_path / name).write_text(GOOD[name])
    assert run_cli(capsys, *arguments)[0] == 0
    assert json.loads((tmp_path / "out/summary.json").read_text())["status"] == "complete"
    assert (tmp_path / "out/one/one.cif").stat().st_mtime_ns == modified


def test_records_that_are_all_bad_are_refused_in_one_line(
    tmp_path: Path, tiny_params: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "q.fasta").write_text(f">bad\nMK1V\n>summary.json\n{ONE}\n>pair\n{ONE}:{TWO}\n")
    code, out, err = run_cli(capsys, tmp_path / "q.fasta", "--params", tiny_params, "--out", tmp_path / "out")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "record 1, 'bad', position 3" in err
    assert not (tmp_path / "out").exists()


def test_a_bad_record_among_the_parts_of_a_run(tmp_path: Path, tiny_params: Path) -> None:
    (tmp_path / "q.fasta").write_text(BAD)
    found = [predict(tmp_path / "q.fasta", tiny_params, tmp_path / "out", **options(), shard=f"{i}/2") for i in (2, 1)]
    assert [[one["name"] for one in summary["failures"]] for summary in found] == [[], ["bad"]]
    assert [summary["status"] for summary in found] == ["running", "failed"]


def test_files_of_a_bad_record_are_not_anothers(tmp_path: Path) -> None:
    """If one good record is left, files named after the bad record are not assigned to the good one."""
    (tmp_path / "q.fasta").write_text(f">one\n{ONE}\n>bad\nMK1V\n")
    (tmp_path / "bad.a3m").write_text(">bad\nMKTV\n>r\nMKTA\n")
    read = read_given(tmp_path / "q.fasta", [tmp_path / "bad.a3m"])
    assert [*read.found] == ["one", "bad"]
    assert [one.text for one in read.notices] == [
        f"alignments of none of the sequences, not used: 1 ({tmp_path / 'bad.a3m'})"
    ]
    beside = read_given(tmp_path, [])
    assert ([*beside.found], [query.name for query in beside.queries]) == (["one", "bad"], ["one"])
    (tmp_path / "bad.hhr").write_text("no hits at all")
    (tmp_path / "mmcif").mkdir()
    sources = TemplateSources(hits=[tmp_path / "bad.hhr"], structures=tmp_path / "mmcif")
    query = TemplateQuery(ONE, ("one",), ())
    assert find_templates([query], sources, 4, refused=["bad"]) == [(None, [])]
    with pytest.raises(UserError, match=r"bad\.hhr"):
        find_templates([query], sources, 4)


def test_a_complex_with_a_bad_chain_fails_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "x.fasta").write_text(BAD)
    (tmp_path / "y.fasta").write_text(GOOD["q.fasta"])
    read = read_given([tmp_path / "x.fasta", tmp_path / "y.fasta"], [], together=True)
    assert ([*read.found], [*read.errors]) == (["x", "y"], ["x"])
    assert WRONG in str(read.errors["x"])


def test_from_python_a_bad_record_is_a_result_in_its_place(tmp_path: Path, tiny_params: Path) -> None:
    (tmp_path / "q.fasta").write_text(f"{BAD}>pair\n{ONE}:{TWO}\n")
    found = load(tiny_params, device="cpu").fold_many(tmp_path / "q.fasta", recycles=0)
    assert [(one.name, bool(one.prediction)) for one in found] == [
        ("one", True), ("bad", False), ("two", True), ("pair", False),
    ]  # fmt: skip
    assert WRONG in found[1].error
    assert "pair: a complex, but these parameters are for single chains" in found[3].error


# ---- folders, models, servers


def test_a_folder_of_parameters_and_the_best_kept_whole(tmp_path: Path, models: Path) -> None:
    def fold(**changes: Any) -> list[dict[str, Any]]:
        return predict([ONE], models, tmp_path / "out", **options(**changes))["predictions"]

    def modified() -> list[int]:
        return [path.stat().st_mtime_ns for path in sorted((tmp_path / "out/query").rglob("query.cif"))]

    best, other = fold(keep=1)
    folder = tmp_path / "out"
    assert "thinned" not in best
    assert (folder / best["folder"] / best["files"]["pae"]).is_file()
    assert other["thinned"]
    assert set(other["files"]) == set(best["files"]) - {"pae", "scores"}
    assert {path.name for path in (folder / other["folder"]).iterdir()} == set(other["files"].values())
    with np.load(folder / other["folder"] / other["files"]["arrays"], allow_pickle=False) as arrays:
        assert {name for name in arrays.files if not name.startswith("coverage_")} == {"positions", "mask", "plddt"}
    assert json.loads((folder / "summary.json").read_text())["predictions"] == [best, other]
    mine, before = folder / other["folder"] / "query_pae.txt", modified()
    mine.write_text("mine")
    assert fold(keep=1) == [best, other]
    assert modified() == before  # nothing is folded again
    # Without keep, the second best is folded again to restore its removed files.
    again = fold()
    assert [set(entry["files"]) for entry in again] == [set(best["files"])] * 2
    assert sum(a != b for a, b in zip(before, modified())) == 1
    assert mine.read_text() == "mine"


def test_a_folder_of_deepminds_parameters_is_one_family(tmp_path: Path) -> None:
    names = [
        f"params_model_{i}{kind}.npz" for kind in ("", "_ptm", "_multimer_v2", "_multimer_v3") for i in range(1, 6)
    ]
    for name in [*names, "LICENSE"]:
        (tmp_path / name).touch()

    def chosen(*given: Any, **more: Any) -> list[str]:
        return [path.name for path in params_files([tmp_path], *given, **more)]

    assert chosen() == [f"params_model_{i}_ptm.npz" for i in range(1, 6)]
    assert chosen(2, complexes=True) == ["params_model_1_multimer_v3.npz", "params_model_2_multimer_v3.npz"]
    with pytest.raises(UserError, match=r"--num-models 6: only 5 matching parameter files"):
        chosen(6)
    (tmp_path / "mine.safetensors").touch()
    with pytest.raises(UserError, match=r"has parameters of several kinds .*\. Name the files"):
        chosen()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty: has no parameters"):
        params_files([tmp_path / "empty"])


def test_input_that_is_thin_is_said_of_each_prediction(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/q.fasta").write_text(f">one\n{ONE}\n>two\n{TWO}\n>both\n{ONE}:{TWO}\n")
    (tmp_path / "in/ranked_0.pdb").touch()
    (tmp_path / "in/pdb70_hits.hhr").touch()
    (tmp_path / "one.a3m").write_text(f">one\n{ONE}\n>again\n{ONE}\n>nothing\n{'-' * len(ONE)}\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/x.a3m").write_text(">x\nMKVVVV\n")
    read = read_given(tmp_path / "in", [tmp_path / "one.a3m", tmp_path / "other"])
    assert [[one.text for one in query.notices] for query in read.queries] == [
        ["its alignment has one row, its own: folded by the sequence alone"],
        ["no alignment: folded by the sequence alone"],
        [
            "no alignment for chain B: folded by the sequence alone",
            "the alignment of chain A has one row, its own: folded by the sequence alone",
        ],
    ]
    assert [one.text for one in read.notices] == [
        "alignments of none of the sequences, not used: 1 (other/x.a3m)",
        "predicted structures are not folded again: in/ranked_0.pdb",
    ]
    assert read.hits == ["in/pdb70_hits.hhr"]


def test_templates_that_were_not_used_are_said(tmp_path: Path) -> None:
    sources = TemplateSources(hits=[tmp_path / "x.hhr"], structures=tmp_path / "mmcif")

    def said(*outcomes: TemplateOutcome) -> list[str]:
        return [one.text.replace(str(tmp_path), "") for one in template_notices(outcomes, sources)]

    missing = [TemplateOutcome(f"{name}_A", False, f"x: has no {name}.cif", missing=True) for name in ("1abc", "2XYZ")]
    used, late = TemplateOutcome("3aaa_A", True, ""), TemplateOutcome("4bbb_A", False, "came out 2020-01-01, after x")
    assert said(*missing) == ["0 of 2 templates used: 2 without a structure in /mmcif (1abc, 2xyz)"]
    assert said(*missing * 200, TemplateOutcome("5ccc_B", False, "", missing=True)) == [
        "0 of 401 templates used: 401 without a structure in /mmcif (1abc, 2xyz, 5ccc)"
    ]
    assert said(late) == ["0 of 1 templates used: 1 x came out N, after x"]
    assert said(missing[0], late) == [
        "0 of 2 templates used: 1 without a structure in /mmcif (1abc)",
        "0 of 2 templates used: 1 x came out N, after x",
    ]
    assert said(used, *missing) == ["1 of 3 templates used: 2 without a structure in /mmcif (1abc, 2xyz)"]
    assert said(used, late) == []
    assert said() == ["0 templates used: no hit for it in the files given"]


def test_a_folder_of_hits(tmp_path: Path) -> None:
    """In OpenProteinSet, the folder above `hhr` names the query.

    Hits without a query are ignored, but it is an error if no hits have a query.
    """
    for name, sequence in (("1abc_A", ONE), ("9zzz_Z", TWO)):
        (tmp_path / f"set/{name}/hhr").mkdir(parents=True)
        (tmp_path / f"set/{name}/hhr/pdb70_hits.hhr").write_text(f">2xyz_A/1-{len(sequence)} mol:protein\n{sequence}\n")
    (tmp_path / "mmcif").mkdir()
    (tmp_path / "mmcif/2xyz.cif").write_text("data_x\n")
    sources = TemplateSources(hits=[tmp_path / "set"], structures=tmp_path / "mmcif")
    queries = [TemplateQuery(ONE, ("1abc_A",), ()), TemplateQuery(TWO, ("other",), ())]
    assert [len(outcomes) for _, outcomes in find_templates(queries, sources, most=4)] == [1, 0]
    with pytest.raises(UserError, match=r"has no hits that are named after a query\. Call them other\.hhr"):
        find_templates(queries[1:], sources, most=4)
