"""Test the function `predict`: output files, assignment of alignments, continued runs, templates."""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import warpfold
from tests.helpers import tiny_model
from tests.prediction.runs import contents, run_cli, write_entry
from warpfold import predict
from warpfold.data.example.templates import template_from_file
from warpfold.data.formats.alignment import decode
from warpfold.errors import UserError
from warpfold.model.weights.files import save_params
from warpfold.parallel.team import ProcessInfo, Team
from warpfold.prediction.predictor import Predictor, Prepared, load
from warpfold.prediction.queries import read_queries
from warpfold.prediction.templates import TemplateQuery, TemplateSources, find_templates

ONE, TWO = "MKTAYIAKQRQISFVKSH", "GSHMLEERLGL"
FASTA = f">one first\n{ONE}\n>two\n{TWO}\n"
A3M = f">one\n{ONE}\n>a\nMKTAYIAKQRQaaISFVK--\n>b\n-KTAYLAKQRQISFVRSH\n"


@pytest.fixture
def fasta(tmp_path: Path) -> Path:
    path = tmp_path / "q.fasta"
    path.write_text(FASTA)
    return path


@pytest.fixture
def a3m(tmp_path: Path) -> Path:
    path = tmp_path / "one.a3m"
    path.write_text(A3M)
    return path


def test_selenocysteine_is_unknown_in_the_sequence_and_cysteine_in_the_alignment(
    tmp_path: Path, tiny_params: Path
) -> None:
    """This follows the official code, for files and from Python. An alignment matches with either letter."""
    (tmp_path / "q.fasta").write_text(">one\nMKTAYIUKQRQISFVKSH\n")
    for letter in "UC":
        (tmp_path / f"{letter}.a3m").write_text(f">one\nMKTAYI{letter}KQRQISFVKSH\n>b\n-KTAYLUKQRQISFVRSH\n")
        (query,) = read_queries(tmp_path / "q.fasta", [tmp_path / f"{letter}.a3m"])
        assert query.sequences == ("MKTAYIUKQRQISFVKSH",)
        assert decode(query.chains[0].msa[0]) == "MKTAYICKQRQISFVKSH"
        assert query.rows == 2
    entry = predict(tmp_path / "q.fasta", tiny_params, tmp_path / "o", msa=[tmp_path / "U.a3m"])["predictions"][0]
    assert (entry["sequence"], entry["msa_depth"]) == ("MKTAYIXKQRQISFVKSH", 2)
    assert "not one of the twenty amino acids, so without atoms: 1 (X at 7)" in entry["warnings"][0]["text"]
    prediction = load(tiny_params, device="cpu").fold(query.sequences[0], ["-KTAYLUKQRQISFVRSH"], name="one")
    with np.load(tmp_path / "o/one/one.npz", allow_pickle=False) as arrays:
        np.testing.assert_array_equal(prediction.positions, arrays["positions"])
        assert not arrays["mask"][6].any()


def test_alignments_are_stacked_in_the_official_order_whatever_the_shell_gives(tmp_path: Path, fasta: Path) -> None:
    files = [tmp_path / f"{name}.a3m" for name in ("z", "a", "mgnify_hits", "bfd_uniclust_hits", "uniref90_hits")]
    for file, letter in zip(files, "ACDEF"):
        file.write_text(f">one\n{ONE}\n>{file.stem}\n{ONE[:-1]}{letter}\n")
    rows = read_queries(fasta, files)[0].chains[0].msa
    # The last two are in the order of the user.
    assert decode(rows[1:, -1]) == "FEDAC"


def test_every_record_is_folded(tmp_path: Path, fasta: Path, a3m: Path, tiny_params: Path) -> None:
    out = tmp_path / "out"
    seen: list[tuple[int, int, str]] = []
    summary = predict(fasta, tiny_params, out, msa=[a3m], progress=lambda *at: seen.append(at))
    assert summary == json.loads((out / "summary.json").read_text())
    assert (summary["status"], summary["failures"]) == ("complete", [])
    assert [(e["name"], e["length"], e["msa_depth"]) for e in summary["predictions"]] == [
        ("one", 18, 3),
        ("two", 11, 1),
    ]
    figures = {f"{name}_{form}" for name in ("plddt", "pae", "coverage") for form in ("png", "svg")}
    for entry in summary["predictions"]:
        assert set(entry["files"]) == {"mmcif", "pdb", "plddt", "pae", "scores", "arrays", *figures}
        assert all((out / entry["folder"] / name).stat().st_size for name in entry["files"].values())
    of_run = {"summary.json", "report.html", "cite.bibtex", "predict.log"}
    assert {p.name for p in out.iterdir()} == {"one", "two", *of_run}
    assert "All proteins" in (out / "report.html").read_text()
    assert seen[-1][:2] == (2, 2)


def test_same_seed_same_files_other_seed_others(tmp_path: Path, a3m: Path, tiny_params: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        predict(a3m, tiny_params, tmp_path / name, seed=seed)
    a, b, c = (contents(tmp_path / name / "one") for name in "abc")
    assert a == b
    assert a["one.cif"] != c["one.cif"]


def test_a_failure_is_named_and_leaves_the_others_be(
    tmp_path: Path, fasta: Path, tiny_params: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fold = Predictor.compute

    def failing(self: Predictor, prepared: Prepared, *args: object) -> warpfold.Prediction:
        if prepared.assembly.name == "one":
            raise RuntimeError("out of\nmemory")
        return fold(self, prepared, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Predictor, "compute", failing)
    monkeypatch.setattr(Predictor, "compute_together", lambda *args: failing(args[0], args[1][0]))
    out = tmp_path / "out"
    summary = predict(fasta, tiny_params, out)
    assert summary["failures"] == [{"name": "one", "error": "RuntimeError: out of memory"}]
    assert summary["status"] == "failed"
    assert [e["name"] for e in summary["predictions"]] == ["two"]
    assert not (out / "one").exists()
    assert "out of memory" in (out / "report.html").read_text()

    monkeypatch.setattr(Predictor, "compute", fold)
    # The second run folds only the protein that failed.
    again = predict(fasta, tiny_params, out)
    assert again["status"] == "complete"
    assert [e["name"] for e in again["predictions"]] == ["one", "two"]  # order of the query
    assert again["predictions"][1] == summary["predictions"][0]


def stopped_at_two(
    self: Predictor, prepared: Prepared, *args: object, compute: Callable[..., warpfold.Prediction] = Predictor.compute
) -> warpfold.Prediction:
    """Replace `Predictor.compute`: raise KeyboardInterrupt for the protein "two"."""
    if prepared.assembly.name == "two":
        raise KeyboardInterrupt
    return compute(self, prepared, *args)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def test_damaged_results_are_folded_again(
    tmp_path: Path, fasta: Path, tiny_params: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Flip a bit of each kind of file, truncate it or delete it.

    A damaged file is renamed, not deleted, because the user may have edited it.
    """
    out = tmp_path / "out"
    files = predict(fasta, tiny_params, out)["predictions"][0]["files"]
    before, other = contents(out / "one"), (out / "two/two.cif").stat().st_mtime_ns
    for file, damage in zip(files.values(), cycle([flip, cut, Path.unlink])):
        caplog.clear()
        damage(out / "one" / file)
        left = contents(out / "one").get(file)
        assert predict(fasta, tiny_params, out)["status"] == "complete"
        after = contents(out / "one")
        assert after.pop(f"damaged-{file}", None) == left
        (out / "one" / f"damaged-{file}").unlink(missing_ok=True)
        assert after == before
        assert f"{file}: missing, or not what was written; it is predicted again" in caplog.text
    assert (out / "two/two.cif").stat().st_mtime_ns == other


def test_any_bytes_in_summary_or_record_are_one_line_or_a_result(
    tmp_path: Path, fasta: Path, tiny_params: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, rng, refused, options = Predictor.compute, np.random.default_rng(0), dict[int, str](), {"batch": 1}
    predict(fasta, tiny_params, tmp_path / "whole", **options)
    whole = contents(tmp_path / "whole")
    monkeypatch.setattr(Predictor, "compute", stopped_at_two)
    with pytest.raises(KeyboardInterrupt):
        predict(fasta, tiny_params, tmp_path / "stopped", **options)
    monkeypatch.setattr(Predictor, "compute", one)
    stopped = contents(tmp_path / "stopped")
    (record,) = (name for name in stopped if name.startswith("records/one"))
    odd = [b"", b"{}", b"[]", b"null", b"[" * 100_000, b"\xff", b'{"format": "warpfold-predictions-1"}']
    places = (whole, "summary.json"), (stopped, record)
    cases = [(*place, content) for place in places for content in [*odd, *[None] * 6]]
    for number, (files, name, content) in enumerate(cases):
        if content is None:
            data = bytearray(files[name])
            begin, size = int(rng.integers(len(data))), int(rng.integers(1, 20))
            data[begin : begin + size] = rng.integers(32, 127, int(rng.integers(0, 20)), dtype=np.uint8).tobytes()
            content = bytes(data)
        folder = tmp_path / str(number)
        for path, data in {**files, name: content}.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        try:
            assert predict(fasta, tiny_params, folder, **options)["status"] == "complete"
        except UserError as error:
            refused[number] = str(error)
    # A summary that is no summary is left alone. Damaged records are skipped, and their predictions are made again.
    assert set(range(len(odd))) <= set(refused) <= set(range(len(cases) // 2))
    assert not any("\n" in line for line in refused.values())
    assert predict(fasta, tiny_params, tmp_path / "6", **(options | {"force": True}))["status"] == "complete"


def test_nothing_is_written_through_a_link(tmp_path: Path, fasta: Path, tiny_params: Path) -> None:
    (tmp_path / "mine").mkdir()
    predict(fasta, tiny_params, tmp_path / "out")
    shutil.rmtree(tmp_path / "out/one")
    (tmp_path / "out/one").symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match="one: is a symbolic link"):
        predict(fasta, tiny_params, tmp_path / "out")
    assert not contents(tmp_path / "mine")


def test_alignments_find_their_records(tmp_path: Path, fasta: Path, a3m: Path) -> None:
    more = tmp_path / "more.sto"
    more.write_text(f"# STOCKHOLM 1.0\none {ONE}\nz   MKTAYIAKQRQISFVKSA\n//\n")
    queries = read_queries(fasta, [more, a3m])
    assert [(q.name, q.rows) for q in queries] == [("one", 4), ("two", 1)]
    (own,) = read_queries(a3m, [more])
    assert (own.name, own.sequences, own.rows) == ("one", (ONE,), 4)


def test_several_processes_do_not_share_a_pipe(tmp_path: Path, a3m: Path, tiny_params: Path) -> None:
    """Each process would read only the bytes that the other processes left in the pipe."""
    read, write = os.pipe()
    pipe, team = Path(f"/dev/fd/{read}"), Team(ProcessInfo(rank=0, ranks=2))
    for query, msas in ((pipe, []), (a3m, [pipe])):
        with pytest.raises(UserError, match=rf"{pipe}: is a pipe, which several processes cannot share"):
            predict(query, tiny_params, tmp_path / "out", msa=msas, team=team)
    os.close(read), os.close(write)


# ---- from Python


def test_folding_in_memory(tiny_params: Path) -> None:
    predictor = load(tiny_params, device="cpu")
    rows = ["MKTAYIAKQRQaaISFVK--", "-KTAYLAKQRQISFVRSH"]
    p = predictor.fold(ONE, rows)
    n = len(ONE)
    assert (p.positions.shape, p.mask.shape, p.plddt.shape) == ((n, 37, 3), (n, 37), (n,))
    assert p.pae is not None
    assert p.single is not None
    assert p.details["msa_depth"] == 3
    assert 0 <= p.plddt.min() <= p.plddt.max() <= 100
    assert p.max_pae is not None
    assert 0 <= p.pae.min() <= p.pae.max() <= p.max_pae
    with_query = predictor.fold(ONE.lower(), [ONE, *rows])
    np.testing.assert_array_equal(p.positions, with_query.positions)
    assert predictor.fold(ONE, rows, representations=False).pair is None


def test_the_settings_of_the_model_stay(tiny_params: Path) -> None:
    predictor = load(tiny_params, device="cpu")
    before = replace(predictor.model.config)
    predictor.fold(TWO, recycles=0, ensemble=3)
    assert predictor.model.config == before


def test_folding_samples_the_alignment_as_training_did(tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    save_params(path, tiny_model(), {"max_msa": 7, "max_extra": 3, "empty_extra": "query"})
    sample = load(path).sample
    assert (sample.max_msa, sample.max_extra, sample.empty_extra) == (7, 3, "query")
    save_params(path, tiny_model())
    assert (load(path).sample.max_msa, load(path).sample.max_extra) == (512, 5120)


# ---- templates


@pytest.fixture(scope="module")
def template_params(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save random parameters of a model that takes templates."""
    path = tmp_path_factory.mktemp("params") / "templates.safetensors"
    save_params(path, tiny_model())
    return path


@pytest.fixture
def structures(tmp_path: Path) -> Path:
    """Write two entries. Chain A of each has the length of ONE; chain B is another protein."""
    folder = tmp_path / "mmcif"
    folder.mkdir()
    chains = {"A": ONE[:9] + "WWW" + ONE[12:], "B": TWO * 2}
    for seed, (name, date) in enumerate((("1abc", "2010-01-01"), ("2xyz", "2020-01-01"))):
        write_entry(folder / f"{name}.cif", chains, date, seed)
    return folder


def a3m_hits(tmp_path: Path, name: str = "one.hits.a3m", entries: Sequence[str] = ("9not", "1abc", "2xyz")) -> Path:
    """Write hits in the A3M format of hmmsearch: chain A of both entries, and of an entry without a file."""
    sequence = ONE[:9] + "WWW" + ONE[12:]
    path = tmp_path / name
    path.write_text("".join(f">{entry}_A/1-18 mol:protein\n{sequence}\n" for entry in entries))
    return path


def test_a_template_is_used_reported_and_counts(
    tmp_path: Path, a3m: Path, structures: Path, template_params: Path
) -> None:
    sources: dict[str, Any] = {"template": f"{structures / '1abc.cif'}:A"}
    entry = predict(a3m, template_params, tmp_path / "with", **sources)["predictions"][0]
    assert (entry["templates"], entry["templates_unused"]) == (["1abc_A"], 0)
    (outcome,) = json.loads((tmp_path / "with" / "one" / entry["files"]["templates"]).read_text())
    assert (outcome["name"], outcome["used"], outcome["residues"]) == ("1abc_A", True, 18)
    assert outcome["identity"] == pytest.approx(15 / 18, abs=1e-4)
    assert "1abc_A" in (tmp_path / "with" / "report.html").read_text()
    without = predict(a3m, template_params, tmp_path / "without")["predictions"][0]
    assert (without["templates"], without["templates_unused"]) == ([], 0)
    assert "templates" not in without["files"]
    assert (tmp_path / "with/one/one.cif").read_bytes() != (tmp_path / "without/one/one.cif").read_bytes()
    # Templates are part of the identity of a run.
    with pytest.raises(UserError, match="another run"):
        predict(a3m, template_params, tmp_path / "with")


def test_hits_come_after_the_users_files_and_refusals_are_written(
    tmp_path: Path, a3m: Path, structures: Path, template_params: Path
) -> None:
    sources: dict[str, Any] = dict(
        template=[f"{structures / '2xyz.cif'}:A"],
        hits=[a3m_hits(tmp_path)],
        template_structures=structures,
        max_template_date="2015-01-01",
    )
    entry = predict(a3m, template_params, tmp_path / "out", **sources)["predictions"][0]
    assert (entry["templates"], entry["templates_unused"]) == (["2xyz_A", "1abc_A"], 2)
    outcomes = json.loads((tmp_path / "out/one/one_templates.json").read_text())
    notes = {outcome["name"]: outcome["note"] for outcome in outcomes if not outcome["used"]}
    assert "has no 9not.cif" in notes["9not_A"]
    assert "released 2020-01-01, after 2015-01-01" in notes["2xyz_A"]


def test_the_users_files_leave_fewer_places_for_hits(tmp_path: Path, structures: Path) -> None:
    """Hits are used up to the model's limit of templates, after the user's files."""
    sources = TemplateSources(hits=[a3m_hits(tmp_path, entries=("1abc",))], structures=structures)
    for files, most, used in (((), 1, True), ((f"{structures / '2xyz.cif'}:A",), 2, True)):
        assert hits_used(sources, files, most) == (len(files) + used, ["1abc_A"])
    files = (f"{structures / '2xyz.cif'}:A",)
    assert hits_used(sources, files, 1) == (1, [])


def hits_used(sources: TemplateSources, files: tuple[str, ...], most: int) -> tuple[int, list[str]]:
    """Find the templates of ONE. Return their number and the names of the used hits."""
    ((found, outcomes),) = find_templates([TemplateQuery(ONE, ("one",), files)], sources, most)
    assert found is not None
    return len(found.aatype), [one.name for one in outcomes[len(files) :] if one.used]


def test_a_wrong_folder_of_structures_ends_the_run_before_it_writes(
    tmp_path: Path, a3m: Path, template_params: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong").mkdir()
    hits = ["--hits", a3m_hits(tmp_path), "--template-structures", tmp_path / "wrong"]
    code, out, err = run_cli(capsys, a3m, "--params", template_params, *hits, "--out", tmp_path / "out")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "wrong: has the structures of none of the 3 hits (9not.cif, 1abc.cif, 2xyz.cif ...). Pass the folder" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("entries", "date", "code", "said"),
    [
        (["8not", "9not", "2xyz"], "2015-01-01", 1, ["0 of 3", "0 of 3"]),
        (["9not", "1abc"], "2030-01-01", 0, ["1 of 2"]),
        (["2xyz"], "2015-01-01", 0, ["0 of 1"]),  # too recent
    ],
)
def test_a_protein_without_templates_for_want_of_structures_is_said_and_exits_with_1(
    tmp_path: Path,
    fasta: Path,
    structures: Path,
    template_params: Path,
    capsys: pytest.CaptureFixture[str],
    entries: list[str],
    date: str,
    code: int,
    said: list[str],
) -> None:
    """The folder has structures, but none for this protein. Hits that the rules exclude are not a failure."""
    a3m_hits(tmp_path, "one.a3m", entries)
    hits = ["--hits", tmp_path / "one.a3m", "--template-structures", structures, "--max-template-date", date]
    found, _, err = run_cli(capsys, fasta, "--params", template_params, *hits, "--out", tmp_path / "out")
    assert found == code
    *own, other = [line for line in err.splitlines() if "templates" in line]
    assert other == "two: 0 templates used: no hit for it in the files given"
    assert [line.split(" templates")[0] for line in own] == [f"one: {one}" for one in said]
    entry = json.loads((tmp_path / "out/summary.json").read_text())["predictions"][0]
    assert [f"one: {one['text']}" for one in entry["warnings"] if "templates" in one["kind"]] == own
    assert entry["templates_missing"] == sum(name.endswith("not") for name in entries)


def test_hits_without_a_date_are_used_and_it_is_said(
    tmp_path: Path, fasta: Path, structures: Path, template_params: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hits = ["--hits", a3m_hits(tmp_path, "one.a3m"), "--template-structures", structures]
    _, _, err = run_cli(capsys, fasta, "--params", template_params, *hits, "--out", tmp_path / "out")
    said = "no template date is given (--max-template-date): hits of any date are used, even a protein's own structure"
    assert f"warning: {said}\n" in err
    assert json.loads((tmp_path / "out/summary.json").read_text())["warnings"][0]["text"] == said
    predictor = load(template_params, device="cpu")
    folded = predictor.fold(ONE, hits=hits[1], template_structures=structures)
    assert said in [one["text"] for one in folded.details["warnings"]]


def test_of_several_queries_hits_go_by_name_and_files_to_all(tmp_path: Path, fasta: Path, structures: Path) -> None:
    file = (str(structures / "1abc.cif"),)
    queries = [TemplateQuery(ONE, ("one",), file), TemplateQuery(TWO, ("two",), file)]
    sources = TemplateSources(files=file, hits=[a3m_hits(tmp_path, "one.a3m")], structures=structures)
    found = [templates for templates, _ in find_templates(queries, sources, most=4)]
    # Chain B matches TWO. 2xyz_A is not used for ONE because it duplicates 1abc_A.
    assert [one and one.names for one in found] == [("1abc_A", "1abc_A"), ("1abc_B",)]
    with pytest.raises(UserError, match=r"three\.a3m: there is no query three"):
        find_templates(queries, replace(sources, hits=[a3m_hits(tmp_path, "three.a3m")]), most=4)
    only_one, outcomes = find_templates(queries, sources, most=1)[0]
    assert only_one is not None
    assert len(only_one) == 1
    assert {outcome.note for outcome in outcomes[1:]} == {"enough better templates are used"}


def test_templates_from_python(structures: Path, template_params: Path, tmp_path: Path) -> None:
    predictor = load(template_params, device="cpu")
    file = f"{structures / '1abc.cif'}:A"
    by_name = predictor.fold(ONE, templates=[file])
    ready, _ = template_from_file(ONE, structures / "1abc.cif", "A")
    np.testing.assert_array_equal(by_name.positions, predictor.fold(ONE, templates=ready).positions)
    assert by_name.details["templates"] == ["1abc_A"]
    assert not np.array_equal(by_name.positions, predictor.fold(ONE).positions)
    with pytest.raises(UserError, match="templates given: 5, the model takes 4"):
        predictor.fold(ONE, templates=[file] * 5)
    date = {"max_template_date": "2015-01-01"}
    by_hits = predictor.fold(ONE, hits=a3m_hits(tmp_path), template_structures=structures, **date)
    assert by_hits.details["templates"] == ["1abc_A"]
    assert [outcome["used"] for outcome in by_hits.templates].count(True) == 1
    assert by_hits.details["warnings"][0]["text"].startswith("1 of 3 templates used: ")
    (many,) = predictor.fold_many({"one": ONE}, templates={"one": [file]}, representations=True)
    assert many.prediction is not None
    np.testing.assert_array_equal(many.prediction.positions, by_name.positions)
