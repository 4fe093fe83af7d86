"""Pack gzip bombs, pipes and files that kill workers: each costs one entry, and the user's files stay."""

import gzip
import json
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest

from tests.data.formats.test_input_files import _stockholm
from tests.data.pack import killers
from tests.data.pack.killers import Here
from tests.data.pack.pack_inputs import ONE, TWO, alignment, chain, contents, draft_of, packed, structure
from warpfold.bulk import pool
from warpfold.data.pack import build as pack_build
from warpfold.data.pack import jobs as pack_jobs
from warpfold.data.pack import match as pack_match
from warpfold.data.pack import pack as packing
from warpfold.data.pack.jobs import DIED, MAX_ATTEMPTS, JobRunner, PackJob
from warpfold.data.pack.options import PackOptions
from warpfold.data.pack.pack import pack
from warpfold.data.pack.part import PartWriter
from warpfold.data.store.store import StoreWriter
from warpfold.data.structure import library as template_library
from warpfold.errors import UserError

ROOT = Path(__file__).parents[3]


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """Write structures of two proteins into `structures`, and an empty `msas`."""
    structure(tmp_path / "structures/1one.cif", chain("A", ONE))
    structure(tmp_path / "structures/1two.cif", chain("A", TWO))
    (tmp_path / "msas").mkdir()
    return tmp_path


# ---- bombs, pipes, names


def test_files_that_unpack_to_more_than_is_allowed_cost_one_entry_each(tmp_path: Path) -> None:
    structure(tmp_path / "s/1one.cif", chain("A", ONE))
    good = (tmp_path / "s/1one.cif").read_bytes()
    bomb = gzip.compress(bytes(100_000))
    (tmp_path / "s/2bom.cif.gz").write_bytes(bomb)
    (tmp_path / "s/3nes.cif.gz").write_bytes(gzip.compress(bomb))
    (tmp_path / "s/4big.cif").write_bytes(good + b"#" * 100_000)
    alignment(tmp_path / "m/1one_A/good.a3m", ONE, ONE[::-1])
    (tmp_path / "m/1one_A/bomb.a3m.gz").write_bytes(bomb)
    (tmp_path / "m/1one_A/deep.a3m").write_text(f">q\n{ONE}\n" + f">r\n{ONE[::-1]}\n" * 3000)
    (tmp_path / "m/1one_A/deep.sto").write_text(_stockholm([("q", ONE), *[("r", TWO)] * 3000], 30))
    (tmp_path / "h/1one_A").mkdir(parents=True)
    (tmp_path / "h/1one_A/x.hhr.gz").write_bytes(bomb)
    options = PackOptions(max_file_gb=90_000 / 1e9)
    report = pack([tmp_path / "s"], [tmp_path / "m"], tmp_path / "store", options, hits=[tmp_path / "h"])
    assert [(entry.name, entry.depth) for entry in report.kept] == [("1one_A", 2)]
    too_large = "has more than 9e-05 GB when unpacked. Leave it out, or allow more: pack --max-file-gb."
    reasons = {entry.file: entry.reason for entry in report.dropped}
    assert reasons["s/2bom.cif.gz"] == f"s/2bom.cif.gz: {too_large}"
    assert reasons["s/4big.cif"] == f"s/4big.cif: {too_large}"
    assert set(reasons) == {"s/2bom.cif.gz", "s/3nes.cif.gz", "s/4big.cif"}
    assert {name: too_large in why for name, why in report.unused.items()} == {
        "m/1one_A/bomb.a3m.gz": True, "m/1one_A/deep.a3m": True, "m/1one_A/deep.sto": True,
    }  # fmt: skip
    assert report.unused_hits == {"h/1one_A/x.hhr.gz": f"h/1one_A/x.hhr.gz: {too_large}"}


def test_pipes_and_devices_that_are_named_are_entries_too(tmp_path: Path) -> None:
    structure(tmp_path / "1one.cif", chain("A", ONE))
    for name in ("pipe.cif", "pipe.a3m", "pipe.index"):
        os.mkfifo(tmp_path / name)
    files = [tmp_path / "1one.cif", tmp_path / "pipe.cif", Path("/dev/zero")]
    report = pack(files, [tmp_path / "pipe.a3m"], tmp_path / "store")
    assert [entry.name for entry in report.kept] == ["1one_A"]
    whys = [*(entry.reason for entry in report.dropped), *report.unused.values()]
    assert len(whys) == 3
    assert all("is a pipe, a socket or a device. Pass a regular file." in why for why in whys)
    with pytest.raises(UserError, match=r"pipe\.index: is a pipe"):
        pack([tmp_path / "1one.cif"], [tmp_path / "pipe.index"], tmp_path / "other")


def test_names_that_are_no_text(tmp_path: Path) -> None:
    """File names are bytes, but reports are text."""
    folder = os.fsencode(tmp_path)
    structure(tmp_path / "s/1one.cif", chain("A", ONE))
    for name in (b"s/\xff.cif", b"s/bad\xff.cif"):
        (tmp_path / "s/1one.cif").rename(os.fsdecode(folder + b"/" + name))
        structure(tmp_path / "s/1one.cif", chain("A", TWO))
    Path(os.fsdecode(folder + b"/s/bad\xff.cif")).write_text("data_x\n")
    alignment(Path(os.fsdecode(folder + b"/m/\xfe.a3m")), TWO)
    (tmp_path / "m/x.index").write_text(json.dumps({"1one_\ud800": [["x\udfff.a3m", 0, 4]]}))
    report = pack([tmp_path / "s"], [tmp_path / "m"], tmp_path / "store")
    assert [entry.file for entry in report.entries] == ["s/1one.cif", "s/\\udcff.cif", "s/bad\\udcff.cif"]
    assert [entry.alignments for entry in report.entries] == [("m/\\udcfe.a3m",), (), ()]
    assert report.entries[2].reason.startswith("s/bad\\udcff.cif: has no atoms")
    assert list(report.unused) == ["m/x.index:1one_\\ud800/x\\udfff.a3m"]
    assert pack([tmp_path / "s"], [tmp_path / "m"], tmp_path / "store").finished_before


# ---- too little memory


def starved_at(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, word: str) -> None:
    """Make calls of a function that name `word` ask for too much memory."""
    whole = getattr(module, name)

    def starved(*arguments: Any, **more: Any) -> Any:
        if word in repr(arguments):
            raise MemoryError
        return whole(*arguments, **more)

    monkeypatch.setattr(module, name, starved)


def test_a_file_or_a_chain_for_which_the_memory_does_not_suffice_is_an_entry(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alignment(pair / "msas/1one_A.a3m", ONE)
    structure(pair / "structures/2one.cif", chain("A", ONE[::-1]), chain("B", TWO[::-1]))
    starved_at(monkeypatch, pack_build, "parse_structure", "1two.cif")
    starved_at(monkeypatch, pack_build, "read_query", "1one_A")
    starved_at(monkeypatch, pack_build, "pack_record", "'2one_A'")
    report = packed(pair)
    assert [entry.name for entry in report.kept] == ["1one_A", "2one_B"]
    assert [(entry.name, entry.reason) for entry in report.dropped] == [
        ("1two.cif", "structures/1two.cif: takes more memory than there is"),
        ("2one_A", "structures/2one.cif: takes more memory than there is"),
    ]
    assert report.unused == {"msas/1one_A.a3m": "msas/1one_A.a3m: takes more memory than there is"}


def test_templates_are_as_limited_as_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a template that is too large, or needs too much memory, is dropped; its chains are kept."""
    structure(tmp_path / "s/1one.cif", chain("A", ONE))
    hits = alignment(tmp_path / "h/1one_A.hmmsearch.a3m")
    letters = {"9big": "C", "9eat": "D"}
    hits.write_text("".join(f">{name}_A/1-30 mol:protein\n{x}{ONE[1:]}\n" for name, x in letters.items()))
    for name, letter in letters.items():
        structure(tmp_path / f"t/{name}.cif", chain("A", letter + ONE[1:]))
    with (tmp_path / "t/9big.cif").open("a") as file:
        file.write("#" * 100_000)
    starved_at(monkeypatch, template_library, "read_structure", "9eat.cif")
    options, folders = PackOptions(max_file_gb=90_000 / 1e9), {"hits": [tmp_path / "h"]}
    report = pack([tmp_path / "s"], [], tmp_path / "o", options, **folders, template_structures=[tmp_path / "t"])
    (entry,) = report.kept
    assert sorted(entry.templates_refused) == [
        "has more than N GB when unpacked. Leave it out, or allow more: pack --max-file-gb.",
        "takes more memory than there is",
    ]


# ---- killers


def _writer(folder: Path) -> PartWriter:
    """Return the writer of a part without inputs."""
    return PartWriter(folder / "part", {"part": "1/1", "warpfold": "x", "options": {}, "inputs": {}, "clusters": None})


def _jobs(batches: Sequence[list[str]]) -> list[PackJob]:
    def job(names: list[str]) -> PackJob:
        singles = tuple(job([name]) for name in names) if len(names) > 1 else ()
        return PackJob(names[0], (killers.upper, names), singles)

    return [job(names) for names in batches]


def test_jobs_that_kill_their_process_are_found_out_and_the_others_done(tmp_path: Path) -> None:
    names = [f"job{number}" for number in range(20)]
    alone = [[name] for name in (*names[:9], *names[14:])]
    batches = [["kill1"], *alone, [*names[9:12], "kill2", *names[12:14]]]
    writer = _writer(tmp_path)
    with pool(2) as executor:
        done = JobRunner(writer, executor, 4).run(_jobs(batches))
        results = {name: result for job, result in done for name in job.call[1]}
    assert {name for name, result in results.items() if result is None} == {"kill1", "kill2"}
    assert set(results) == {*names, "kill1", "kill2"}
    writer.close()


def test_a_job_that_a_cluster_gives_up_is_dropped_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = types.ModuleType("distributed.scheduler")
    scheduler.KilledWorker = type("KilledWorker", (Exception,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "distributed.scheduler", scheduler)

    class Cluster(Executor):
        def submit(self, function: Callable[..., Any], /, *jobs: Any, **more: Any) -> Future[Any]:
            future: Future[Any] = Future()
            if "kill" in jobs[0]:
                future.set_exception(scheduler.KilledWorker())
            else:
                future.set_result(function(*jobs))
            return future

    writer = _writer(tmp_path)
    jobs = _jobs([["job1"], ["kill"], ["job2"]])
    results = {job.name: result for job, result in JobRunner(writer, Cluster(), 2).run(jobs)}
    assert results == {"kill": None, "job1": ["JOB1"], "job2": ["JOB2"]}
    writer.close()


@pytest.mark.slow
def test_a_file_that_kills_its_worker_costs_its_entry_whoever_does_the_work(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("readkill", "buildkill"):
        structure(pair / f"structures/{name}.cif", chain("A", ONE))
    for name, rows in (("1one_A", (ONE, TWO)), ("querykill", (ONE,)), ("1two_A", (TWO, ONE))):
        alignment(pair / f"msas/{name}.a3m", *rows)
    with monkeypatch.context() as patch:
        patch.setattr(packing, "read_chains", killers.read_chains)
        patch.setattr(packing, "build", killers.build)
        patch.setattr(pack_match, "read_queries", killers.read_queries)
        report = packed(pair, "two", workers=2)
    assert [(entry.name, entry.depth) for entry in report.kept] == [("1one_A", 2), ("1two_A", 2)]
    assert {entry.file: entry.reason for entry in report.dropped} == {
        f"structures/{name}kill.cif": f"structures/{name}kill.cif: {DIED}" for name in ("read", "build")
    }
    assert report.unused == {"msas/querykill.a3m": f"msas/querykill.a3m: {DIED}"}

    code = f"""
from pathlib import Path
from tests.data.pack import killers
from tests.data.pack.pack_inputs import packed
from warpfold.data.pack import match as pack_match
from warpfold.data.pack import pack as packing
packing.read_chains, packing.build = killers.read_chains, killers.build
pack_match.read_queries = killers.read_queries
if __name__ == "__main__":
    packed(Path({str(pair)!r}), "one")
"""
    command, environment = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": str(ROOT)}
    ends = [subprocess.run(command, env=environment, check=False).returncode for _ in range(4)]
    assert ends == [-signal.SIGKILL] * 3 + [0]  # once for each; recorded for the next run
    assert contents(pair / "one") == contents(pair / "two")


class Killed(BaseException):
    """Stands for the death of the process, which a test cannot have."""


def dies(files: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, word: str) -> None:
    """Return a function that ends the run at a job with `word`: the lock is released, and nothing else happens."""
    whole = getattr(module, name)

    def killed(job: Any) -> Any:
        if word in repr(job):
            raise Killed
        return whole(job)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, killed)
        patch.setattr(PartWriter, "close", lambda writer: writer._tried_file.close() or writer._draft.release())
        with pytest.raises(Killed):
            packed(files)


def test_a_job_that_no_run_outlives_is_given_up_untried(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On some machines, a lack of memory ends the whole run and not only the worker."""

    class Never(Here):
        def __call__(self, function: Callable[[Any], Any], job: Any) -> Any:
            raise Killed

    alignment(pair / "msas/x.a3m", "W" * 30)
    monkeypatch.setattr(pack_jobs, "IsolatedProcess", Never)
    for _ in range(MAX_ATTEMPTS):
        dies(pair, monkeypatch, packing, "read_chains", "1two.cif")
    report = packed(pair)
    assert [entry.name for entry in report.kept] == ["1one_A"]
    assert [entry.reason for entry in report.dropped] == [f"structures/1two.cif: {DIED}"]


def test_a_run_that_is_killed_before_a_job_is_tried_apart_blames_no_job(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A separate process starts within seconds, and kills are most likely then, however many there are."""

    class Starting(Here):
        def start(self, function: Callable[..., Any]) -> None:
            raise Killed

    alignment(pair / "msas/x.a3m", "W" * 30)
    dies(pair, monkeypatch, packing, "read_chains", "1two.cif")
    monkeypatch.setattr(pack_jobs, "IsolatedProcess", Starting)
    for _ in range(MAX_ATTEMPTS):
        dies(pair, monkeypatch, packing, "read_chains", "nothing")
    monkeypatch.setattr(pack_jobs, "IsolatedProcess", Here)
    assert [entry.name for entry in packed(pair).kept] == ["1one_A", "1two_A"]


def test_what_a_stop_interrupted_is_no_suspect(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(job: Any) -> Any:
        raise KeyboardInterrupt

    alignment(pair / "msas/x.a3m", "W" * 30)
    with monkeypatch.context() as patch:
        patch.setattr(packing, "build", stop)
        with pytest.raises(KeyboardInterrupt):
            packed(pair)
    assert not (draft_of(pair) / "tried").read_text()
    monkeypatch.setattr(pack_jobs.IsolatedProcess, "__call__", lambda *_: pytest.fail("was tried apart"))
    assert len(packed(pair).kept) == 2


# ---- files of the user


@pytest.mark.parametrize("name", ["store.part-1-of-1.partial", "store.partial"])
def test_folders_with_something_of_the_users_are_left_alone(tmp_path: Path, name: str) -> None:
    structure(tmp_path / "s/1one.cif", chain("A", ONE))
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match=rf"{name}: holds thesis\.tex, which WarpFold did not write\. Move it away"):
        pack([tmp_path / "s"], [], tmp_path / "store")
    assert (tmp_path / name / "thesis.tex").read_text() == "precious"
    assert not (tmp_path / "store").exists()
    (tmp_path / name / "thesis.tex").rename(tmp_path / "thesis.tex")
    pack([tmp_path / "s"], [], tmp_path / "store")
    (tmp_path / "store.part-1-of-1").mkdir()
    (tmp_path / "store.part-1-of-1/thesis.tex").write_text("precious")  # while the store exists already
    assert pack([tmp_path / "s"], [], tmp_path / "store").finished_before
    assert (tmp_path / "store.part-1-of-1/thesis.tex").read_text() == "precious"


def test_a_file_that_appears_while_a_store_is_written_is_not_removed(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "store") as writer:  # left unfinished
        (writer.folder / "thesis.tex").write_text("precious")
    assert [path.name for path in (tmp_path / "store.partial").iterdir()] == ["thesis.tex"]
