"""Test the inputs of `predict`: text, folders, models, servers; kept files; and warnings about inputs."""

import html
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.helpers import tiny_config, tiny_model
from tests.prediction.runs import run_cli, write_entry
from tests.prediction.test_predict_complexes import multimer
from warpfold import predict
from warpfold.data.example.templates import TemplateOutcome
from warpfold.data.features.choose import SampleConfig
from warpfold.errors import UserError
from warpfold.files import sha256
from warpfold.model.template import TemplateConfig
from warpfold.model.weights.files import save_params
from warpfold.prediction import templates
from warpfold.prediction.params import check_templates, families_in, params_files, read_params
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


# ---- templates by name, chain and file


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"hits": ["h"]}, "hits: need the mmCIF files that they name"),
        ({"structures": Path("s")}, "a template folder or date: has no effect without hits"),
        ({"max_date": "2020-01-01"}, "a template folder or date: has no effect without hits"),
        ({"files": ["f"], "max_date": "2020-01-01"}, "a template folder or date: has no effect without hits"),
        ({"hits": ["h"], "structures": Path("s"), "max_date": "2020-13-01"}, "--max-template-date"),
    ],
)
def test_sources_of_templates_that_do_not_fit_together(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        TemplateSources(**fields)


def test_sources_of_templates_are_true_if_there_are_any() -> None:
    """Only hits without a date cause a warning."""
    none, files = TemplateSources(), TemplateSources(files=["f"])
    hits = TemplateSources(hits=[Path("h")], structures=Path("s"))
    dated = TemplateSources(hits=[Path("h")], structures=Path("s"), max_date="2020-01-01")
    assert [bool(one) for one in (none, files, hits, dated)] == [False, True, True, True]
    assert [[notice.text for notice in one.notices] for one in (none, files, dated)] == [[]] * 3
    assert [notice.text for notice in hits.notices] == [
        "no template date is given (--max-template-date): hits of any date are used, even a protein's own structure"
    ]
    assert template_notices([], none) == []


@pytest.fixture
def alignments_of(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], tuple[float, int] | None]:
    """Replace reading and aligning templates by a table: sequence, file -> identity, residues; None is an error."""
    table: dict[tuple[str, str], tuple[float, int] | None] = {}

    def read(sequence: str, files: Any) -> Any:
        (file,) = files
        if (values := table[sequence, file]) is None:
            raise UserError(f"{file}: does not fit {sequence}")
        return None, [TemplateOutcome(file, True, "", residues=values[1], identity=values[0])]

    monkeypatch.setattr(templates, "user_templates", read)
    return table


def test_templates_go_to_the_sequences_that_they_resemble(alignments_of: dict[tuple[str, str], Any]) -> None:
    """A chain of a file goes to one sequence: that with the largest number of equal residues."""
    chains = {"A": ONE, "B": TWO, "C": ONE}
    alignments_of |= {(ONE, "t.cif"): (0.3, 10), (TWO, "t.cif"): (0.299, 99)}
    alignments_of |= {(ONE, "t.cif:X"): (0.5, 10), (TWO, "t.cif:X"): (0.4, 20)}
    alignments_of |= {(ONE, "u.cif"): None, (TWO, "u.cif"): (0.9, 5)}
    for file, one, two in (
        ("t.cif", ["t.cif"], []),
        ("t.cif:X", [], ["t.cif:X"]),
        ("u.cif", [], ["u.cif"]),
        ("B=t.cif", [], ["t.cif"]),
        ("B=t.cif:X", [], ["t.cif:X"]),
        ("Z=t.cif", [], []),
    ):
        assert templates.files_of_chains([file], chains) == {ONE: one, TWO: two}, file
    assert templates.files_of_chains(["t.cif", "B=t.cif", "u.cif"], chains) == {ONE: ["t.cif"], TWO: ["t.cif", "u.cif"]}
    alignments_of[TWO, "u.cif"] = None
    with pytest.raises(UserError, match=f"u.cif: does not fit {ONE}"):
        templates.files_of_chains(["u.cif"], chains)
    assert templates.files_of_chains(["u.cif"], {}) == {}


def test_a_template_that_fits_no_chain_is_an_error() -> None:
    used = [["t.cif"], ["u.cif:X"]]
    templates.check_fit(["t.cif", "A=t.cif", "u.cif:X"], used, "A")
    for file, template, reason in (
        ("u.cif", "u.cif", "fewer than 30% of the aligned residues are equal"),
        ("Q=w.cif", "w.cif", "none is Q"),
    ):
        with pytest.raises(UserError) as error:
            templates.check_fit(["t.cif", file], used, "A")
        assert str(error.value) == (
            f"{file}: fits no chain, as {reason}. Leave it out, or say which chain it is for: A={template}"
        )


def test_names_of_templates_may_contain_separators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a=b.cif", "c:d.cif", "x.cif"):
        Path(name).touch()
    for file in ("a=b.cif", "a=b.cif:A", "c:d.cif", "c:d.cif:A", "H=c:d.cif", "H=a=b.cif", "H=x.cif:A", "x.cif:A"):
        templates.check_template_file(file)
    for file in ("y.cif", "y.cif:A", "H=y.cif", "y=x.cif:A:B", "a=y.cif"):
        with pytest.raises(UserError, match="no such file"):
            templates.check_template_file(file)


def test_the_users_templates_are_read_in_their_order(tmp_path: Path) -> None:
    first = write_entry(tmp_path / "1abc.cif", {"A": ONE, "B": TWO}, "2010-01-01")
    second = write_entry(tmp_path / "2xyz.cif", {"C": ONE}, "2010-01-01", seed=1)
    found, outcomes = templates.user_templates(ONE, [f"{second}:C", first])
    assert found is not None
    assert [*found.names] == [outcome.name for outcome in outcomes] == ["2xyz_C", "1abc_A"]
    assert templates.user_templates(ONE, []) == (None, [])


@pytest.fixture
def hits_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the hits of a file by the name of the file and the sequence of the query."""
    monkeypatch.setattr(templates, "read_hits", lambda path, sequence: [f"{path.name} {sequence}"])


def test_hits_belong_to_queries_by_name(tmp_path: Path, hits_read: None) -> None:
    """The case of names does not matter in folders. The file's name comes before the folder's."""
    queries = [TemplateQuery(ONE, ("one", "H"), ()), TemplateQuery(TWO, ("two",), ())]
    for name in (
        "set/one.hhr", "set/H.hhr", "set/TWO.hhr", "set/two/pdb_hits.sto", "set/one/two.hhr", "set/x.hhr",
        "set/two/hhr/y.hhr", "set/one.a3m", "one.hhr", "two.extra.hhr", "x.hhr",
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    def by_query(*given: str, refused: Sequence[str] = (), chosen: Sequence[TemplateQuery] = queries) -> Any:
        return templates._hits_by_query(chosen, [tmp_path / name for name in given], refused)

    found = {name: sorted(hits) for name, hits in by_query("set").items()}
    assert found == {
        "one": [f"H.hhr {ONE}", f"one.hhr {ONE}"],
        "two": [f"TWO.hhr {TWO}", f"pdb_hits.sto {TWO}", f"two.hhr {TWO}", f"y.hhr {TWO}"],
    }
    # A file that the user names may have any ending.
    (tmp_path / "one.txt").touch()
    assert by_query("one.txt") == {"one": [f"one.txt {ONE}"]}
    assert by_query("one.hhr", "two.extra.hhr") == {"one": [f"one.hhr {ONE}"], "two": [f"two.extra.hhr {TWO}"]}
    with pytest.raises(UserError) as error:
        by_query("x.hhr")
    assert str(error.value) == (
        f"{tmp_path / 'x.hhr'}: there is no query x. With several queries, name each file of hits by its query "
        "(one.hhr)."
    )
    # The records with these names failed.
    assert by_query("x.hhr", "one.hhr", refused=["x"]) == {"one": [f"one.hhr {ONE}"]}
    assert by_query("x.hhr", refused=["x"], chosen=queries[:1]) == {}
    # A file belongs to the only query, and a folder has files for others.
    assert by_query("x.hhr", chosen=queries[:1]) == {"one": [f"x.hhr {ONE}"]}
    assert sorted(by_query("set", chosen=queries[:1])["one"]) == [f"H.hhr {ONE}", f"one.hhr {ONE}", f"two.hhr {ONE}"]
    with pytest.raises(UserError, match=r"set: has no hits that are named after a query\. Call them z\.hhr, or put"):
        by_query("set", chosen=[TemplateQuery(ONE, ("z",), ())])


def test_templates_of_a_query_are_the_users_and_then_hits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's files are read once for queries with one sequence."""
    read, asked = list[Any](), list[Any]()
    own, other = TemplateOutcome("own", True, ""), TemplateOutcome("hit", False, "late")
    hits = {"one": [SimpleNamespace(pdb_id=f"{i}abc") for i in (1, 2, 1, 3, 4)]}

    def user_templates(*key: Any) -> Any:
        read.append(key)
        return ["file"] if key[1] else None, [own] if key[1] else []

    def from_hits(sequence: str, offered: Any, library: Any, newest: Any, limit: int) -> Any:
        asked.append((sequence, len(offered), str(newest), limit))
        return ["hit"], [other]

    monkeypatch.setattr(templates, "user_templates", user_templates)
    monkeypatch.setattr(templates, "templates_from_hits", from_hits)
    monkeypatch.setattr(templates, "_hits_by_query", lambda *_: hits)
    monkeypatch.setattr(templates, "concatenate_templates", lambda parts: [*parts])
    queries = [TemplateQuery(ONE, (name,), files) for name, files in (("one", ("f",)), ("two", ()), ("three", ("f",)))]
    (tmp_path / "3abc.cif").touch()
    sources = TemplateSources(files=["f"], hits=[tmp_path], structures=tmp_path, max_date="2020-01-02")
    assert find_templates(queries, sources, 4) == [([["file"], ["hit"]], [own, other]), ([], []), ([["file"]], [own])]
    assert read == [(ONE, ("f",)), (ONE, ())]
    assert asked == [(ONE, 5, "2020-01-02", 3)]
    (tmp_path / "3abc.cif").unlink()
    with pytest.raises(UserError) as error:
        find_templates(queries, sources, 4)
    assert str(error.value) == (
        f"{tmp_path}: has the structures of none of the 5 hits (1abc.cif, 2abc.cif, 3abc.cif ...). Pass the folder of "
        "their mmCIF files, or leave the hits out."
    )
    hits.clear()
    assert [found for found, _ in find_templates(queries, sources, 4)] == [[["file"]], [], [["file"]]]


def test_a_hit_without_a_chain_has_the_name_of_its_entry() -> None:
    sources = TemplateSources(hits=[Path("h")], structures=Path("mmcif"))
    missing = [TemplateOutcome(name, False, "x: has no file", missing=True) for name in ("1ABC", "2xyz_A_B")]
    (notice,) = template_notices(missing, sources)
    assert notice.values == {"used": 0, "offered": 2, "missing": 2, "folder": "mmcif", "detail": "1abc, 2xyz_a"}


# ---- files of parameters


def test_families_of_parameters_are_chosen_by_the_kind_of_query(tmp_path: Path) -> None:
    def names(*files: str, number: int | None = None, complexes: bool = False) -> list[str]:
        folder = tmp_path / f"{len([*tmp_path.iterdir()])}"
        folder.mkdir()
        for file in files:
            (folder / file).touch()
        return [path.name for path in params_files([folder], number, complexes)]

    single = ("params_model_2.npz", "params_model_1.npz", ".params_model_9_ptm.npz", "notes.txt")
    ptm, newest = "params_model_1_ptm.npz", "params_model_1_multimer_v3.npz"
    older = ("params_model_1_multimer.npz", "params_model_1_multimer_v2.npz")
    assert names(*single) == ["params_model_1.npz", "params_model_2.npz"]
    assert names(*single, ptm, newest) == [ptm]
    assert names(*single, newest) == ["params_model_1.npz", "params_model_2.npz"]
    assert names(*single, ptm, newest, *older, complexes=True) == [newest]
    assert names(*older, complexes=True) == [older[1]]
    # A folder of one family leaves no choice.
    assert names(*single, complexes=True) == ["params_model_1.npz", "params_model_2.npz"]
    assert names("b.safetensors", "a.npz") == ["a.npz", "b.safetensors"]
    assert names("b.safetensors", "a.npz", number=1) == ["a.npz"]
    for files, complexes in ((older, False), ((*single, ptm), True), ((*single, "own.npz"), False)):
        with pytest.raises(UserError, match="has parameters of several kinds"):
            names(*files, complexes=complexes)
    folder = tmp_path / "0"
    assert {family: [path.name for path in paths] for family, paths in families_in(folder).items()} == {
        "": ["params_model_1.npz", "params_model_2.npz"]
    }
    # The number limits those of each folder and of all files.
    given = [tmp_path / "x.npz", folder, tmp_path / "y.npz"]
    assert params_files(given) == [given[0], folder / "params_model_1.npz", folder / "params_model_2.npz", given[2]]
    assert params_files(given, 2) == [given[0], folder / "params_model_1.npz"]
    assert params_files([folder], 2) == [folder / "params_model_1.npz", folder / "params_model_2.npz"]
    assert params_files(given, 3) == [given[0], folder / "params_model_1.npz", folder / "params_model_2.npz"]
    with pytest.raises(UserError) as error:
        params_files([folder], 3)
    assert str(error.value) == f"--num-models 3: only 2 matching parameter files in {folder}. Use --num-models 2."


def test_parameters_of_equal_names_are_told_apart(tmp_path: Path) -> None:
    for number, name in enumerate(("a/x", "b/x", "b/y", "c/A_x", "d/b_x")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        save_params(tmp_path / f"{name}.safetensors", tiny_model(number), {"max_msa": 7} if number else None)
    paths = [tmp_path / f"{name}.safetensors" for name in ("b/y", "a/x", "b/x")]
    found = read_params(paths)
    assert [(one.name, one.path, one.digest, one.sample.max_msa) for one in found] == [
        ("y", paths[0], sha256(paths[0]), 7),
        ("a_x", paths[1], sha256(paths[1]), 512),
        ("b_x", paths[2], sha256(paths[2]), 7),
    ]
    assert not any(one.multimer for one in found)
    with pytest.raises(UserError, match=r"x\.safetensors: the same parameters as .*x\.safetensors\. Pass each"):
        read_params([paths[1], paths[0], paths[1]])
    # The name of a file may be that of another file with its folder; some file systems ignore the case.
    with pytest.raises(UserError, match=r"A_x\.safetensors: its file and folder are named as .*a/x\.safetensors"):
        read_params([paths[1], paths[2], tmp_path / "c/A_x.safetensors"])
    summary = found[0].summary()
    assert summary.keys() == {"file", "sha256", "licence", "assumed"}
    assert (summary["file"], summary["sha256"], summary["licence"]) == ("y.safetensors", found[0].digest, None)


def test_a_model_takes_as_many_templates_as_it_says() -> None:
    config, sample = tiny_config(), SampleConfig(max_templates=2)
    bare = replace(config, templates=replace(config.templates, enabled=False))
    check_templates(config, sample, 2)
    check_templates(bare, sample, 0)
    with pytest.raises(UserError, match="templates given: 3, the model takes 2"):
        check_templates(config, sample, 3)
    with pytest.raises(UserError, match="these parameters have no template parts"):
        check_templates(bare, sample, 1)
