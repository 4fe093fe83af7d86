"""Test that bulk commands write the same bytes with any kind of worker, even if workers are killed."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.data.pack.pack_inputs import ONE, TWO, alignment, make_files
from tests.data.search.families import database, queries
from tests.evaluation.folders import sets
from tests.helpers import save_uneven_params
from tests.killers import DiesTwice
from tests.test_cli import run


def fold_inputs(folder: Path) -> None:
    """Write sequences, one of them with an alignment, and parameters whose pLDDT differs between residues."""
    (folder / "q.fasta").write_text(f">one\n{ONE}\n>two\n{TWO}\n>three\n{TWO[::-1]}\n")
    alignment(folder / "msas/one.a3m", ONE, ONE[:15] + "-" * 15)
    save_uneven_params(folder / "p.safetensors")


def search_inputs(folder: Path) -> None:
    queries(folder / "q.fasta", 0, 1, 2)
    database(folder / "db.fasta", 0, 1, 2)


@dataclass(frozen=True)
class BulkCommand:
    """A command, its inputs, and the function that does its jobs.

    module: where the function is defined.  caller: the module that calls it by name.
    timed: output files that contain durations or modification times.
    """

    inputs: Callable[[Path], Any]
    words: str
    module: str
    function: str
    caller: str
    timed: tuple[str, ...] = ()

    def __call__(self, capsys: pytest.CaptureFixture[str], out: Path, *more: object) -> str:
        out.mkdir(exist_ok=True)
        code, said, warned = run(capsys, *self.words.split(), "--out", out / "out", *more)
        assert code == 0, warned
        return said

    def made(self, out: Path) -> dict[str, bytes]:
        """Read the output files.  Keys: paths relative to `out`."""
        files = [path for path in out.rglob("*") if path.is_file() and path.name not in self.timed]
        # Skip the files of single tasks of a job array.
        kept = [path for path in files if "-of-" not in path.name]
        assert len(kept) > 2
        return {str(path.relative_to(out)): path.read_bytes() for path in kept}


FOLD = "q.fasta --msa msas --params p.safetensors --device cpu --batch 1"
COMMANDS = {
    "pack": BulkCommand(
        make_files, "pack --structures structures --msas msas", "warpfold.data.pack.build", "build",
        "warpfold.data.pack.pack",
    ),
    "search": BulkCommand(
        search_inputs, "search q.fasta --database db=db.fasta", "warpfold.data.search.search", "search_batch",
        "warpfold.data.search.search", ("search.json",),
    ),
    "predict": BulkCommand(
        fold_inputs, f"predict {FOLD}", "warpfold.prediction.predict", "fold_job", "warpfold.prediction.predict",
        ("summary.json", "report.html", "predict.log"),
    ),
    "distill": BulkCommand(
        fold_inputs, f"distill {FOLD} --min-plddt 1", "warpfold.prediction.predict", "fold_job",
        "warpfold.prediction.predict", ("summary.json", "report.html", "predict.log", "sources.json", "store.json"),
    ),
    "evaluate": BulkCommand(
        sets, "evaluate good truth --against worse", "warpfold.evaluation.measure", "measure",
        "warpfold.evaluation.evaluate",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def dask() -> Iterator[str]:
    """Start a Dask cluster of two workers.  Yields its address."""
    distributed = pytest.importorskip("distributed", reason="Dask is not installed: pip install '.[cluster]'")
    with distributed.LocalCluster(2, processes=True, threads_per_worker=1, dashboard_address=None) as cluster:
        yield cluster.scheduler_address


@pytest.fixture
def two_workers(request: pytest.FixtureRequest) -> list[str]:
    """Return the options that distribute the jobs over two workers."""
    kind: str = request.param
    return ["--workers", "2"] if kind == "processes" else ["--cluster", request.getfixturevalue(kind)]


@pytest.fixture
def command(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BulkCommand:
    """Write the inputs of a command, and change to their folder."""
    command = COMMANDS[request.param]
    command.inputs(tmp_path)
    # The workers of a cluster have another working directory.
    monkeypatch.chdir(tmp_path)
    return command


FOLDING = ("predict", "distill")
CASES = [
    pytest.param(name, kind, marks=[pytest.mark.slow] if kind != "processes" or name in FOLDING else [])
    for kind in ("processes", "dask")
    for name in COMMANDS
]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("command", "two_workers"), CASES, indirect=True)
def test_two_workers_each_killed_once_make_the_same_bytes(
    command: BulkCommand,
    two_workers: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command(capsys, Path("whole"))
    dies = DiesTwice(command.module, command.function, tmp_path / "deaths", together=True)
    monkeypatch.setattr(f"{command.caller}.{command.function}", dies)
    said = command(capsys, Path("killed"), *two_workers, "--json")
    assert dies.deaths == 2
    # Messages of the cluster must not be on stdout.
    json.loads(said)
    assert command.made(tmp_path / "killed") == command.made(tmp_path / "whole")


@pytest.mark.usefixtures("one_thread")
# test_pack_run has the same test for `pack`.
@pytest.mark.parametrize("command", ["search", "predict", "distill", "evaluate"], indirect=True)
def test_the_tasks_of_a_job_array_make_the_same_bytes(
    command: BulkCommand, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command(capsys, Path("whole"))
    for task in ("2/2", "1/2"):
        command(capsys, Path("parts"), "--shard", task)
    assert command.made(tmp_path / "parts") == command.made(tmp_path / "whole")
