"""Test the files for people who read or publish results: archives of `--zip`, the log of a run, headlines."""

import json
import re
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.prediction.runs import contents, run_cli
from warpfold import cli, predict
from warpfold.errors import UserError
from warpfold.files import append_line
from warpfold.prediction.pages import write_archives
from warpfold.prediction.predictor import Predictor, Prepared
from warpfold.relaxation import amber
from warpfold.relaxation import files as relax_files

ONE, TWO = "MKTAYIAKQRQISFVKSH", "GSHMLEERLGL"
FIGURES = {f"_{name}.{form}" for name in ("plddt", "pae", "coverage") for form in ("png", "svg")}
FILES = {".cif", ".pdb", "_scores.json", *FIGURES}
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "


@pytest.fixture
def fasta(tmp_path: Path) -> Path:
    path = tmp_path / "q.fasta"
    path.write_text(f">one\n{ONE}\n>two\n{TWO}\n")
    return path


def archived(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert {info.date_time[0] for info in archive.infolist()} == {1980}
        return {name: archive.read(name) for name in archive.namelist()}


def logged(out: Path) -> list[str]:
    """Read the messages of a log without their times."""
    lines = (out / "predict.log").read_text().splitlines()
    assert all(re.match(TIME, line) for line in lines)
    return [re.sub(TIME, "", line) for line in lines]


def test_an_archive_has_the_results_of_a_query(
    tmp_path: Path, fasta: Path, tiny_params: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = [fasta, "--params", tiny_params, "--out", out, "--recycles", 0, "--seeds", 2]
    _, said, _ = run_cli(capsys, *arguments)
    assert not list(out.rglob("*.zip"))
    (out / "one/notes.txt").write_text("mine")
    # The finished run only writes the archives.
    _, said, _ = run_cli(capsys, *arguments, "--zip")
    for name, other in (("one", "two"), ("two", "one")):
        path = out / name / f"{name}_results.zip"
        assert f"archive: {path}\n" in said
        files = archived(path)
        ranked = {f"{name}/{name}_rank_{rank}{ending}" for rank in (1, 2) for ending in FILES}
        assert files.keys() == {f"{name}/report.html", f"{name}/cite.bibtex", *ranked}
        for file in (f"{name}_rank_2.cif", f"{name}_rank_2.pdb", f"{name}_rank_1_scores.json"):
            assert files[f"{name}/{file}"] == (out / name / file).read_bytes()
        best = json.loads((out / "summary.json").read_text())["ranking"][name]["order"][0]["folder"]
        assert files[f"{name}/{name}_rank_1_plddt.svg"] == (out / best / f"{name}_plddt.svg").read_bytes()
        page = files[f"{name}/report.html"].decode()
        assert f"{name}, rank 2" in page
        assert f"{other}, rank 1" not in page
        assert re.search(r"<dt>residues</dt><dd>\d+</dd>.*<dt>chain</dt><dd>1</dd>.*<dt>alignment row</dt>", page)
    summary = json.loads((out / "summary.json").read_text())
    before = contents(out)
    write_archives(out, summary)
    assert contents(out) == before
    # Another run takes away the archives, too.
    predict(fasta, tiny_params, out, recycles=0, force=True)
    assert not list(out.rglob("*.zip"))
    assert (out / "one/notes.txt").read_text() == "mine"


def test_archives_of_single_and_of_dropped_predictions(tmp_path: Path, fasta: Path, tiny_params: Path) -> None:
    out = tmp_path / "out"
    predict(fasta, tiny_params, out, recycles=0, zip=True, figures=False)
    assert {Path(name).name for name in archived(out / "two/two_results.zip")} == {
        *("report.html", "cite.bibtex", "two.cif", "two.pdb", "two_scores.json"),
    }
    kept = predict(fasta, tiny_params, tmp_path / "kept", recycles=0, zip=True, keep="best:1")
    (best,) = (entry["name"] for entry in kept["predictions"] if entry["files"])
    assert [path.name for path in (tmp_path / "kept").rglob("*.zip")] == [f"{best}_results.zip"]
    # A prediction that is made again replaces its archive.
    (out / "one/one.cif").write_text("edited")
    predict(fasta, tiny_params, out, recycles=0, figures=False)
    assert [path.name for path in out.rglob("*.zip")] == ["two_results.zip"]


def test_relaxation_comes_before_the_archives_and_its_failures_are_logged(
    tmp_path: Path, fasta: Path, tiny_params: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def relax(target: relax_files.RelaxTarget, device: str) -> dict[str, Any]:
        if target.name == "two":
            raise UserError("two: cannot be relaxed")
        target.result(".pdb").write_text("relaxed")
        violations = {"residues": 1}
        report = {"energy_before": 1.0, "energy_after": 0.0, "ca_rmsd": 0.1}
        return report | {"violations_before": violations, "violations_after": violations}

    for module in (amber, relax_files):
        monkeypatch.setattr(module, "require_openmm", lambda: None)
    monkeypatch.setattr(relax_files, "relax_file", relax)
    out = tmp_path / "out"
    predict(fasta, tiny_params, out, recycles=0, figures=False, relax="all", zip=True)
    assert archived(out / "one/one_results.zip")["one/one_relaxed.pdb"] == b"relaxed"
    assert "Cα moved" in archived(out / "one/one_results.zip")["one/report.html"].decode()
    assert "two/two_relaxed.pdb" not in archived(out / "two/two_results.zip")
    assert logged(out)[-1] == "failed two: relaxation: two: cannot be relaxed"


def test_a_run_is_logged(
    tmp_path: Path,
    fasta: Path,
    tiny_params: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, compute = tmp_path / "out", Predictor.compute

    def failing(self: Predictor, prepared: Prepared, *args: Any) -> Any:
        if prepared.assembly.name == "two":
            raise RuntimeError("out of\nmemory")
        return compute(self, prepared, *args)

    monkeypatch.setattr(Predictor, "compute", failing)
    monkeypatch.setattr("sys.argv", ["warpfold", "predict", "a file.fasta"])
    arguments = [fasta, "--params", tiny_params, "--out", out, "--recycles", 0, "--batch", 1]
    assert run_cli(capsys, *arguments)[0] == 1
    lines = logged(out)
    assert re.fullmatch(r"WarpFold \S+, torch \S+, Python \S+: warpfold predict 'a file\.fasta'", lines[0])
    assert lines[1:3] == [
        "device cpu, precision fp32, 2 of 2 predictions to make",
        "precision: fp32 (auto, on cpu)",
    ]
    for line in (
        r"one \(\S+, seed 0\): 18 residues, 1 chain, 1 alignment row, mean pLDDT \S+, \S+ s",
        r"failed two \(\S+, seed 0\): RuntimeError: out of memory",
        "one, two: no alignment: folded by the sequence alone",
    ):
        assert len([one for one in lines if re.fullmatch(line, one)]) == 1, line
    assert re.fullmatch(r"failed: 1 predictions, 1 failures, \S+ s", lines[-1])
    monkeypatch.setattr(Predictor, "compute", compute)
    (out / "one/one.cif").write_text("edited")
    assert run_cli(capsys, *arguments)[0] == 0
    again = logged(out)[len(lines) :]
    assert again[1].endswith("one.cif: missing, or not what was written; it is predicted again")
    assert "device cpu, precision fp32, 2 of 2 predictions to make" in again
    assert sorted(line.split()[0] for line in again if " seed 0): " in line) == ["one", "two"]
    assert logged(out)[: len(lines)] == lines


def test_the_log_of_a_quiet_run_has_warnings_and_errors(
    tmp_path: Path, fasta: Path, tiny_params: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    run_cli(capsys, fasta, "--params", tiny_params, "--out", out, "--recycles", 0, "--quiet")
    lines = logged(out)
    assert "one, two: no alignment: folded by the sequence alone" in lines
    assert not [line for line in lines if line.startswith("WarpFold") or "device" in line or "mean pLDDT 0" in line]
    assert not [line for line in lines if "seed 0" in line]


def test_the_error_that_ends_a_run_is_logged_and_bad_input_writes_nothing(
    tmp_path: Path, fasta: Path, tiny_params: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with pytest.raises(UserError):
        predict(fasta, tiny_params, out, num_models=2)
    assert not out.exists()
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="something else"):
        predict(fasta, tiny_params, out, recycles=0)
    assert [path.name for path in out.iterdir()] == ["mine.txt"]
    (out / "mine.txt").unlink()

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Predictor, "compute", stopped)
    with pytest.raises(KeyboardInterrupt):
        predict(fasta, tiny_params, out, recycles=0, batch=1)
    assert logged(out)[-1].startswith("stopped: KeyboardInterrupt")


def test_lines_of_several_writers_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "predict.log"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: append_line(path, f"{i} " + "x" * (i % 97)), range(800)))
    lines = logged(tmp_path)
    assert sorted(lines) == sorted(f"{i} {'x' * (i % 97)}".strip() for i in range(800))
    append_line(path, "two\nlines \x1b[31m\udc80")
    assert logged(tmp_path)[-1] == "two lines ?[31m?"
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "link.log").symlink_to(precious)
    for place in (tmp_path / "link.log", tmp_path / "none/predict.log", tmp_path):
        append_line(place, "lost")
    assert precious.read_text() == "mine"


def test_help_all_has_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    for option, there in (("--help", False), ("--help-all", True)):
        with pytest.raises(SystemExit):
            cli.main(["predict", option])
        assert ("--zip" in capsys.readouterr().out) == there
