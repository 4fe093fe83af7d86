"""Test `warpfold evaluate --shard`: the last job to finish writes the same files as a single run."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.evaluation.folders import sets
from tests.test_cli import run
from warpfold.bulk import JobPart
from warpfold.evaluation import evaluate as evaluating
from warpfold.evaluation.confidence import PLDDT_BINS, Sums
from warpfold.evaluation.layouts import PredictedFile
from warpfold.evaluation.measure import Comparison, Job, Measured, measure
from warpfold.evaluation.parts import IS_PART, jobs_fingerprint, parts_with, read_parts, write_part
from warpfold.evaluation.truths import Truth

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the targets in the order in which they are scored."""
    asked: list[str] = []

    def noted(job: Job) -> Measured:
        asked.append(job.prediction.target)
        return measure(job)

    monkeypatch.setattr(evaluating, "measure", noted)
    return asked


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Write two sets of three targets, one of them unreadable, and change to their folder.

    Returns the words of the command.
    """
    sets(tmp_path)
    (tmp_path / "worse/Beta.cif").write_text("data_x\n")
    monkeypatch.chdir(tmp_path)
    return "evaluate", "good", "truth", "--against", "worse"


def made(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir() if not IS_PART(path.name)}


def test_the_last_part_writes_what_one_run_does(words: tuple[str, ...], tmp_path: Path, capsys: Capture) -> None:
    code, _, warned = run(capsys, *words, "--out", "whole")
    assert (code, "/worse/Beta.cif: has no atoms" in warned) == (1, True)
    for number, left in ((2, ["1/3", "3/3"]), (3, ["1/3"])):
        code, said, _ = run(capsys, *words, "--out", "parts", "--shard", f"{number}/3", "--json")
        found = json.loads(said)
        assert (code, found["status"], found["part"], found["predictions"]) == (0, "running", f"{number}/3", 2)
        assert (found["failures"], found["left"], made(tmp_path / "parts")) == ([], left, {})
    code, _, warned = run(capsys, *words, "--out", "parts", "--shard", "1/3", "--csv", "parts.csv")
    assert (code, "/worse/Beta.cif: has no atoms" in warned) == (1, True)
    assert made(tmp_path / "parts") == made(tmp_path / "whole")
    assert (tmp_path / "parts.csv").read_bytes() == (tmp_path / "whole/targets.csv").read_bytes()


def test_a_part_says_what_failed_in_it(words: tuple[str, ...], capsys: Capture) -> None:
    code, said, warned = run(capsys, *words, "--out", "parts", "--shard", "1/3")
    assert code == 1
    assert "part 1/3: scored 1 of 2; 2/3, 3/3 are not done" in said
    assert "/worse/Beta.cif: has no atoms" in warned


def test_nothing_is_scored_twice(words: tuple[str, ...], capsys: Capture, measured: list[str], tmp_path: Path) -> None:
    for _ in range(2):
        run(capsys, *words, "--out", "parts", "--shard", "2/3")
    assert len(measured) == 2
    run(capsys, *words, "--out", "parts")  # scores the remaining targets
    assert sorted(measured) == ["Beta", "Beta", "alpha", "alpha", "gamma", "gamma"]
    run(capsys, *words, "--out", "whole")
    assert made(tmp_path / "parts") == made(tmp_path / "whole")


@pytest.mark.parametrize("change", ["a prediction", "an option", "damage", "cut", "another file"])
def test_parts_of_something_else_are_not_used(
    change: str, words: tuple[str, ...], capsys: Capture, measured: list[str], tmp_path: Path
) -> None:
    run(capsys, *words, "--out", "parts", "--shard", "1/2")
    before, part = len(measured), tmp_path / "parts/part-1-of-2.json"
    more = ["--assembly"] if change == "an option" else []
    if change == "a prediction":
        os.utime(tmp_path / "good/gamma.cif", ns=(1, 1))
    elif change == "damage":
        part.write_text(part.read_text().replace('"rank": 1', '"rank": 2', 1))
    elif change == "cut":
        part.write_text(part.read_text()[:-20])
    elif change == "another file":
        part.write_text("[]")
    run(capsys, *words, *more, "--out", "parts", "--shard", "1/2")
    assert len(measured) == 2 * before == 6


@pytest.mark.parametrize("changed", ["p.cif", "t.cif", "pae.json", "a.a3m"])
def test_a_changed_file_changes_the_fingerprint(changed: str, tmp_path: Path) -> None:
    for name in ("p.cif", "t.cif", "pae.json", "a.a3m"):
        (tmp_path / name).write_text(name)
    file = PredictedFile("p", tmp_path / "p.cif", "CASP", ("p",), pae=tmp_path / "pae.json")
    job = Job(replace(file, alignments=(tmp_path / "a.a3m",)), Truth("t", tmp_path / "t.cif"))
    before = jobs_fingerprint([job])
    assert jobs_fingerprint([job]) == before != jobs_fingerprint([job, job])
    path = tmp_path / changed
    kept = path.stat()
    path.write_text(path.read_text() + "x")
    os.utime(path, ns=(kept.st_atime_ns, kept.st_mtime_ns))
    longer = jobs_fingerprint([job])
    path.write_text(changed)
    os.utime(path, ns=(kept.st_atime_ns, kept.st_mtime_ns + 1000))
    later = jobs_fingerprint([job])
    path.unlink()
    missing = jobs_fingerprint([job])
    assert len({before, longer, later, missing}) == 4
    bare = Job(PredictedFile("p", tmp_path / "p.cif", "CASP", ("p",)), job.truth)
    assert jobs_fingerprint([bare]) != missing


def test_a_part_that_ends_meanwhile_is_read(tmp_path: Path) -> None:
    """The second part is scored while the first one is, and the first one then has all results."""
    good, _, truth = sets(tmp_path)
    options: dict[str, Any] = {"suite": None, "train_sequences": None, "all_models": False, "options": Comparison()}
    options |= {"workers": 1, "out": tmp_path / "out"}
    reports = []

    def score(number: int, progress: Any, count: int = 2) -> list[str]:
        part = JobPart(number, count)
        (one,), report = evaluating.evaluate([good], truth, **options, part=part, progress=progress)
        reports.append(report)
        return [result.row["target"] for result in one.measured]

    def meanwhile(done: int, *_: Any) -> None:
        if not done:
            assert score(2, lambda *_: None) == []

    assert score(1, meanwhile) == ["Beta", "alpha", "gamma"]
    running = {"format": "warpfold-evaluation-1", "status": "running", "part": "2/2", "predictions": 1}
    assert reports == [{**running, "failures": [], "left": ["1/2"]}, {}]
    # The last job alone is left.
    options["out"] = tmp_path / "three"
    for number in (1, 2):
        score(number, lambda *_: None, 3)
    assert [report["left"] for report in reports[2:]] == [["2/3", "3/3"], ["3/3"]]


def test_results_of_parts_are_read_as_written(tmp_path: Path) -> None:
    """Results without pLDDT or PAE, errors, and files of other runs are kept apart."""
    jobs = [
        Job(PredictedFile(str(n), Path(f"{n}.cif"), "CASP", (str(n),)), Truth("t", Path("t.cif"))) for n in range(3)
    ]
    assert read_parts(tmp_path / "none", "f", jobs) == {}
    sums = Sums.from_values(np.array([1.5, 30]), np.array([2.0, 3.0]), PLDDT_BINS)
    results = {0: Measured(jobs[0], {"a": 1}, sums), 2: Measured(jobs[2], error="too long")}
    out = tmp_path / "a/out"
    write_part(out, "f", JobPart(1, 2), results)
    write_part(out, "f", JobPart(2, 2), {1: Measured(jobs[1], {"a": 2}, None, sums)})
    write_part(out, "other", JobPart(1, 3), {1: Measured(jobs[1], {"a": 3})})
    (out / "part-3-of-4.json.old").write_text("{}")
    assert sorted(path.name for path in out.iterdir() if IS_PART(path.name)) == [
        "part-1-of-2.json",
        "part-1-of-3.json",
        "part-2-of-2.json",
    ]
    found = read_parts(out, "f", jobs)
    assert list(found) == [0, 2, 1]
    assert found[2] == results[2]
    assert (found[0].job, found[0].row, found[0].pae, found[0].error) == (jobs[0], {"a": 1}, None, None)
    assert (found[1].row, found[1].plddt) == ({"a": 2}, None)
    for read in (found[0].plddt, found[1].pae):
        assert read is not None
        assert read.to_dict() == sums.to_dict()
    with pytest.raises(ValueError, match="JSON"):
        write_part(out, "f", JobPart(1, 2), {0: Measured(jobs[0], {"a": float("nan")})})
    assert parts_with([0, 3, 5, 6], 3) == ["1/3", "3/3"]
