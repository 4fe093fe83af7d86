"""Files that are bombs, pipes or killers cost one entry each; the user's files stay; other inputs continue a run."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.data.formats.test_input_files import _stockholm
from tests.data.pack import killers
from tests.data.pack.killers import Here
from tests.data.pack.pack_inputs import ONE, TWO, alignment, chain, contents, make_files, packed, structure
from warpfold.bulk import JobPart, pool
from warpfold.data.pack import build as pack_build
from warpfold.data.pack import jobs as pack_jobs
from warpfold.data.pack import match as pack_match
from warpfold.data.pack import pack as packing
from warpfold.data.pack.jobs import ATTEMPTS, DIED, JobRunner, PackJob
from warpfold.data.pack.options import PackOptions
from warpfold.data.pack.pack import merge, pack
from warpfold.data.pack.part import PartFolder, PartWriter, part_path
from warpfold.data.pack.report import PackReport
from warpfold.data.store.store import Store, StoreWriter
from warpfold.data.structure import library as template_library
from warpfold.errors import UserError

ROOT = Path(__file__).parents[3]


# ---- bombs and pipes


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
    too_large = "has more than 9e-05 GB when unpacked; leave it out, or allow more (pack --max-file-gb)"
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
    os.mkfifo(tmp_path / "pipe.cif")
    os.mkfifo(tmp_path / "pipe.a3m")
    files = [tmp_path / "1one.cif", tmp_path / "pipe.cif", Path("/dev/zero")]
    report = pack(files, [tmp_path / "pipe.a3m"], tmp_path / "store")
    assert [entry.name for entry in report.kept] == ["1one_A"]
    whys = [*(entry.reason for entry in report.dropped), *report.unused.values()]
    assert len(whys) == 3
    assert all("is a pipe, a socket or a device; give a regular file" in why for why in whys)
    os.mkfifo(tmp_path / "pipe.index")
    with pytest.raises(UserError, match=r"pipe\.index: is a pipe"):
        pack([tmp_path / "1one.cif"], [tmp_path / "pipe.index"], tmp_path / "other")


def test_a_file_for_which_the_memory_does_not_suffice_is_an_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    structure(tmp_path / "s/1one.cif", chain("A", ONE))
    structure(tmp_path / "s/1two.cif", chain("A", TWO))
    alignment(tmp_path / "m/1one_A.a3m", ONE)
    parse = pack_build.parse_structure

    def starved(data: bytes, name: str) -> Any:
        return killers.starve(name) if "1two" in name else parse(data, name)

    monkeypatch.setattr(pack_build, "parse_structure", starved)
    monkeypatch.setattr(pack_build, "read_query", lambda source, limit: killers.starve(source))
    report = pack([tmp_path / "s"], [tmp_path / "m"], tmp_path / "store")
    assert [entry.name for entry in report.kept] == ["1one_A"]
    assert [entry.reason for entry in report.dropped] == ["s/1two.cif: takes more memory than there is"]
    assert report.unused == {"m/1one_A.a3m": "m/1one_A.a3m: takes more memory than there is"}


# ---- killers


def _killing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "read_chains", killers.read_chains)
    monkeypatch.setattr(packing, "build", killers.build)
    monkeypatch.setattr(pack_match, "read_queries", killers.read_queries)


def _writer(folder: Path) -> PartWriter:
    """A part of no inputs."""
    return PartWriter(folder / "part", {"part": "1/1", "warpfold": "x", "options": {}, "inputs": {}, "clusters": None})


def _jobs(batches: Sequence[list[str]]) -> list[PackJob]:
    def job(names: list[str]) -> PackJob:
        singles = tuple(job([name]) for name in names) if len(names) > 1 else ()
        return PackJob(tuple(names), (killers.upper, names), singles)

    return [job(names) for names in batches]


def test_jobs_that_kill_their_process_are_found_out_and_the_others_done(tmp_path: Path) -> None:
    names = [f"job{number}" for number in range(20)]
    batches = [
        ["kill1"],
        *([name] for name in names[:9]),
        [*names[9:12], "kill2", *names[12:14]],
        *([n] for n in names[14:]),
    ]
    writer = _writer(tmp_path)
    with pool(2) as executor:
        done = JobRunner(writer, executor, 4).run(_jobs(batches))
        found = {name: result for job, result in done for name in job.names}
    assert {name for name, result in found.items() if result is None} == {"kill1", "kill2"}
    assert set(found) == {*names, "kill1", "kill2"}
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
    found = {job.names: result for job, result in JobRunner(writer, Cluster(), 2).run(jobs)}
    assert found == {("kill",): None, ("job1",): ["JOB1"], ("job2",): ["JOB2"]}
    writer.close()


def test_jobs_that_were_under_way_when_a_run_was_killed_are_tried_apart(tmp_path: Path) -> None:
    writer = _writer(tmp_path)
    writer.begin(["kill", "job1"])
    writer._begun.clear()  # as a kill does
    writer.close()
    writer = _writer(tmp_path)
    assert writer.tried == {"kill": 1, "job1": 1}
    done = JobRunner(writer, None, 4).run(_jobs([["kill"], ["job1"], ["job2"]]))
    found = {job.names: result for job, result in done}
    assert found == {("kill",): None, ("job1",): ["JOB1"], ("job2",): ["JOB2"]}
    writer.close()


@pytest.mark.slow
def test_a_file_that_kills_its_worker_costs_its_entry_whoever_does_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    structure(tmp_path / "s/1one.cif", chain("A", ONE))
    structure(tmp_path / "s/1two.cif", chain("A", TWO))
    structure(tmp_path / "s/readkill.cif", chain("A", ONE))
    structure(tmp_path / "s/buildkill.cif", chain("A", ONE))
    alignment(tmp_path / "m/1one_A.a3m", ONE, TWO)
    alignment(tmp_path / "m/querykill.a3m", ONE)
    alignment(tmp_path / "m/1two_A.a3m", TWO, ONE)
    with monkeypatch.context() as patch:
        _killing(patch)
        report = pack([tmp_path / "s"], [tmp_path / "m"], tmp_path / "two", workers=2)
    assert [(entry.name, entry.depth) for entry in report.kept] == [("1one_A", 2), ("1two_A", 2)]
    assert {entry.file: entry.reason for entry in report.dropped} == {
        f"s/{name}kill.cif": f"s/{name}kill.cif: {DIED}" for name in ("read", "build")
    }
    assert report.unused == {"m/querykill.a3m": f"m/querykill.a3m: {DIED}"}

    code = f"""
from pathlib import Path
from tests.data.pack import killers
from warpfold.data.pack import match as pack_match
from warpfold.data.pack import pack as packing
from warpfold.data.pack.pack import pack
packing.read_chains, packing.build = killers.read_chains, killers.build
pack_match.read_queries = killers.read_queries
folder = Path({str(tmp_path)!r})
if __name__ == "__main__":
    pack([folder / "s"], [folder / "m"], folder / "one")
"""
    command, environment = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": str(ROOT)}
    ends = [subprocess.run(command, env=environment, check=False).returncode for _ in range(4)]
    assert ends == [-signal.SIGKILL] * 3 + [0]  # once for each; the next run knows
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_a_job_that_no_run_outlives_is_given_up_untried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On some machines a lack of memory ends the whole job, not just the worker."""
    structure(tmp_path / "s/1one.cif", chain("A", ONE))
    structure(tmp_path / "s/1two.cif", chain("A", TWO))

    class Killed(BaseException):
        pass

    class Never(Here):
        def __call__(self, function: Callable[[Any], Any], job: Any) -> Any:
            raise Killed

    def killed(job: Any) -> Any:
        if "1two" in job[0].name:
            raise Killed
        return pack_build.read_chains(job)

    monkeypatch.setattr(packing, "read_chains", killed)
    monkeypatch.setattr(pack_jobs, "IsolatedProcess", Never)
    for _ in range(ATTEMPTS):
        with monkeypatch.context() as patch:
            patch.setattr(PartWriter, "close", _let_go)
            with pytest.raises(Killed):
                pack([tmp_path / "s"], [], tmp_path / "store")
    report = pack([tmp_path / "s"], [], tmp_path / "store")
    assert [entry.name for entry in report.kept] == ["1one_A"]
    assert [entry.reason for entry in report.dropped] == [f"s/1two.cif: {DIED}"]


def _let_go(writer: PartWriter) -> None:
    """Do what a kill does: release the lock, and nothing else."""
    writer._lock.close()


def test_what_a_stop_interrupted_is_no_suspect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    structure(tmp_path / "s/1one.cif", chain("A", ONE))
    structure(tmp_path / "s/1two.cif", chain("A", TWO))

    def stop(job: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(packing, "build", stop)
        patch.setattr(packing, "remove_part", lambda path: None)
        with pytest.raises(KeyboardInterrupt):
            pack([tmp_path / "s"], [], tmp_path / "store")
    part = PartFolder(part_path(tmp_path / "store", JobPart(1, 1)))
    assert not part.tried
    monkeypatch.setattr(pack_jobs.IsolatedProcess, "__call__", lambda *_: pytest.fail("was tried apart"))
    assert len(pack([tmp_path / "s"], [], tmp_path / "store").kept) == 2


def test_an_alignment_that_was_changed_after_it_was_read_is_a_suspect_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would kill a run without workers each time it is started."""
    files = tmp_path
    structure(files / "structures/1one.cif", chain("A", ONE))
    alignment(files / "msas/1one_A.a3m", ONE)
    _stopped(files, monkeypatch)
    alignment(files / "msas/1one_A.a3m", ONE, TWO)

    class Killed(BaseException):
        pass

    def killed(job: Any) -> Any:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(pack_match, "read_queries", killed)
        patch.setattr(PartWriter, "close", _let_go)
        with pytest.raises(Killed):
            packed(files)
    apart: list[Any] = []

    class Counted(Here):
        def __call__(self, function: Callable[[Any], Any], job: Any) -> Any:
            apart.append(job)
            return function(job)

    monkeypatch.setattr(pack_jobs, "IsolatedProcess", Counted)
    assert [entry.depth for entry in packed(files).kept] == [2]
    assert [[source.name for source in job[0]] for job in apart] == [["msas/1one_A.a3m"]]


def test_templates_are_as_limited_as_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that is too large, or needs too much memory, is lost alone, without the chains that ask for it."""
    structure(tmp_path / "s/1one.cif", chain("A", ONE))
    alignment(tmp_path / "h/1one_A.hmmsearch.a3m").write_text("".join(
        f">{name}_A/1-30 mol:protein\n{letter}{ONE[1:]}\n" for name, letter in (("9big", "C"), ("9eat", "D"))
    ))  # fmt: skip
    for name, letter in (("9big", "C"), ("9eat", "D")):
        structure(tmp_path / f"t/{name}.cif", chain("A", letter + ONE[1:]))
    with (tmp_path / "t/9big.cif").open("a") as file:
        file.write("#" * 100_000)
    read = template_library.read_structure

    def starved(path: Path, limit: int) -> Any:
        return killers.starve(path) if path.name == "9eat.cif" else read(path, limit=limit)

    monkeypatch.setattr(template_library, "read_structure", starved)
    options = PackOptions(max_file_gb=90_000 / 1e9)
    report = pack(
        [tmp_path / "s"], [], tmp_path / "o", options, hits=[tmp_path / "h"], template_structures=[tmp_path / "t"]
    )
    (entry,) = report.kept
    assert sorted(entry.templates_refused) == [
        "has more than N GB when unpacked; leave it out, or allow more (pack --max-file-gb)",
        "takes more memory than there is",
    ]


def test_a_chain_for_which_the_memory_does_not_suffice_is_an_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    structure(tmp_path / "s/1one.cif", chain("A", ONE), chain("B", TWO))
    write = pack_build.pack_record

    def starved(arrays: Any, notes: Any, shared: Any) -> Any:
        return killers.starve(notes) if notes["name"] == "1one_A" else write(arrays, notes, shared)

    monkeypatch.setattr(pack_build, "pack_record", starved)
    report = pack([tmp_path / "s"], [], tmp_path / "store")
    assert [entry.name for entry in report.kept] == ["1one_B"]
    assert [(entry.name, entry.reason) for entry in report.dropped] == [
        ("1one_A", "s/1one.cif: takes more memory than there is")
    ]


def test_names_that_are_no_text(tmp_path: Path) -> None:
    """A file's name is bytes; a report is text."""
    folder = os.fsencode(tmp_path)
    structure(tmp_path / "s/1one.cif", chain("A", ONE))
    for name in (b"s/\xff.cif", b"s/bad\xff.cif"):
        (tmp_path / "s/1one.cif").rename(os.fsdecode(folder + b"/" + name))
        structure(tmp_path / "s/1one.cif", chain("A", TWO))
    Path(os.fsdecode(folder + b"/s/bad\xff.cif")).write_text("data_x\n")
    alignment(Path(os.fsdecode(folder + b"/m/\xfe.a3m")), TWO)
    index = {"1one_\ud800": [["x\udfff.a3m", 0, 4]]}
    (tmp_path / "m/x.index").write_text(json.dumps(index))
    report = pack([tmp_path / "s"], [tmp_path / "m"], tmp_path / "store")
    assert [entry.file for entry in report.entries] == ["s/1one.cif", "s/\\udcff.cif", "s/bad\\udcff.cif"]
    assert [entry.alignments for entry in report.entries] == [["m/\\udcfe.a3m"], [], []]
    assert report.entries[2].reason.startswith("s/bad\\udcff.cif: has no atoms")
    assert list(report.unused) == ["m/x.index:1one_\\ud800/x\\udfff.a3m"]
    assert pack([tmp_path / "s"], [tmp_path / "m"], tmp_path / "store").finished_before


# ---- other inputs


def _stopped(files: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
    """A run that was stopped just before its end."""

    def stop(_: PartWriter) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PartWriter, "finish", stop)
        with pytest.raises(KeyboardInterrupt):
            pack([files / "structures"], [files / "msas"], files / "store", **more)


def _reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The structure files that are read from here on."""
    read: list[str] = []

    def counted(job: Any) -> Any:
        read.append(job[0].name.partition("/")[2])
        return pack_build.read_chains(job)

    monkeypatch.setattr(packing, "read_chains", counted)
    return read


CHANGES: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "one structure more": (lambda f: structure(f / "structures/9new.cif", chain("A", TWO[::-1])), ["9new.cif"]),
    "one structure less": (lambda f: (f / "structures/1low.cif").unlink(), []),
    "a copy less": (lambda f: (f / "structures/1one.cif").unlink(), []),
    "a structure changed": (
        lambda f: structure(f / "structures/1mut.cif", chain("A", "C" + ONE[1:], shift=9.0)),
        ["1mut.cif"],
    ),
    "one alignment more, of a chain's name": (lambda f: alignment(f / "msas/1mut_A.a3m", "C" + ONE[1:]), ["1mut.cif"]),
    "one alignment more, of nobody": (lambda f: alignment(f / "msas/x.a3m", "W" * 30), []),
    "one alignment less": (
        lambda f: (f / "msas/1two/hits.a3m").unlink(),
        ["1one.cif", "1one.cif.gz", "deep/1two.cif"],
    ),
    "an alignment changed": (
        lambda f: alignment(f / "msas/1two/hits.a3m", TWO, TWO[::-1], TWO),
        ["1one.cif", "1one.cif.gz", "deep/1two.cif"],
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_run_continues_with_other_inputs_as_if_they_had_been_there_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    files = make_files(tmp_path)
    _stopped(files, monkeypatch)
    change, again = CHANGES[name]
    change(files)
    read = _reads(monkeypatch)
    packed(files)
    assert sorted(read) == sorted(again)
    packed(files, "fresh")
    assert contents(files / "store") == contents(files / "fresh")


def test_templates_that_come_or_go_make_what_looked_for_them_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, sequence in (("1one", ONE), ("1two", TWO)):
        structure(tmp_path / f"structures/{name}.cif", chain("A", sequence))
    alignment(tmp_path / "msas/1one_A/bfd.a3m", ONE, ONE[::-1])
    alignment(tmp_path / "msas/1one_A/hmmsearch.a3m", ONE).write_text(f">9tem_A/1-30 mol:protein\nC{ONE[1:]}\n")
    _stopped(tmp_path, monkeypatch, hits=[tmp_path / "msas"])
    structure(tmp_path / "structures/9tem.cif", chain("A", "C" + ONE[1:]), released="2000-01-01")
    read = _reads(monkeypatch)
    pack([tmp_path / "structures"], [tmp_path / "msas"], tmp_path / "store", hits=[tmp_path / "msas"])
    assert sorted(read) == ["1one.cif", "9tem.cif"]
    pack([tmp_path / "structures"], [tmp_path / "msas"], tmp_path / "fresh", hits=[tmp_path / "msas"])
    assert contents(tmp_path / "store") == contents(tmp_path / "fresh")
    assert Store(tmp_path / "store").column("templates")[0] == 1


def test_a_finished_part_continues_with_other_inputs(tmp_path: Path) -> None:
    files = make_files(tmp_path)
    two = JobPart(1, 2), JobPart(2, 2)
    packed(files, part=two[0])
    structure(files / "structures/9new.cif", chain("A", TWO[::-1]))
    packed(files, part=two[1])
    parts = [part_path(files / "store", part) for part in two]
    with pytest.raises(UserError, match="structures files"):
        merge(parts, files / "store")
    packed(files, part=two[0])
    merge(parts, files / "store")
    packed(files, "fresh")
    assert contents(files / "store") == contents(files / "fresh")


# ---- shares


def _read_by(action: Callable[[], PackReport]) -> tuple[int, PackReport]:
    """Return the bytes that this process reads in the meantime, and the report."""
    io = Path("/proc/self/io")

    def count() -> int:
        return int(io.read_text().split("rchar:")[1].split()[0])

    before = count()
    report = action()
    return count() - before, report


OVERHEAD = 300_000  # bytes of plans, answers and modules


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts bytes in Linux's /proc")
@pytest.mark.parametrize("named", [True, False])
def test_a_task_of_a_job_array_reads_its_share_of_the_alignments(tmp_path: Path, named: bool) -> None:
    """Stockholm files, which must be read whole for their queries.  Where names do not tell whose they are, the first
    of these tasks, which run one after another, reads them all, and the others find them read."""
    count, sizes = 4, {}
    for number in range(16):
        sequence = ONE[number:] + TWO + ONE[:number]
        structure(tmp_path / f"s/{number:02d}ab.cif", chain("A", sequence))
        name = f"{number:02d}ab_A" if named else f"x{number}"
        path = tmp_path / f"m/{name}/bfd.sto"
        path.parent.mkdir(parents=True)
        path.write_text(_stockholm([("q", sequence), *((f"r{i}", sequence[::-1]) for i in range(3000))], 60))
        sizes[f"{number:02d}ab_A"] = path.stat().st_size
    inputs = ([tmp_path / "s"], [tmp_path / "m"])
    pack(*inputs, tmp_path / "whole")
    read, share = [], []
    for number in range(1, count + 1):
        by, report = _read_by(partial(pack, *inputs, tmp_path / "store", part=JobPart(number, count)))
        read.append(by)
        share.append(sum(sizes[entry.name] for entry in report.kept))
    total = sum(sizes.values())
    assert sum(share) == total
    if named:  # for its query, and to be packed
        assert all(2 * own <= by <= 2 * own + OVERHEAD for own, by in zip(share, read)), (share, read)
    else:
        assert sum(read) <= 2 * total + count * OVERHEAD
        assert read[0] <= total + share[0] + OVERHEAD
        assert all(by <= own + OVERHEAD for own, by in zip(share[1:], read[1:])), (share, read)
    merge([part_path(tmp_path / "store", JobPart(n, count)) for n in range(1, count + 1)], tmp_path / "store")
    assert contents(tmp_path / "store") == contents(tmp_path / "whole")


def test_queries_of_parts_with_other_options_are_not_taken(tmp_path: Path) -> None:
    files = make_files(tmp_path)
    packed(files, part=JobPart(1, 2), options=PackOptions(max_file_gb=1e-9))  # in which no alignment has a query
    part = part_path(files / "store", JobPart(1, 2))
    packed(files, part=JobPart(2, 2))
    plan = json.loads((part / "plan.json").read_text())
    assert plan["options"]["max_file_gb"] == 1e-9
    shutil.rmtree(part)
    packed(files, part=JobPart(1, 2))
    parts = [part_path(files / "store", JobPart(n, 2)) for n in (1, 2)]
    merge(parts, files / "store")
    packed(files, "whole")
    assert contents(files / "store") == contents(files / "whole")


def test_one_of_more_parts_than_a_list_could_hold(tmp_path: Path) -> None:
    structure(tmp_path / "s/1one.cif", chain("A", ONE))
    alignment(tmp_path / "m/1one_A.a3m", ONE)
    report = pack([tmp_path / "s"], [tmp_path / "m"], tmp_path / "store", part=JobPart(1, 10**15))
    assert report.entries == []


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files in Linux's /proc")
def test_parts_that_are_merged_hold_no_file_open(tmp_path: Path) -> None:
    """A thousand tasks have more parts than a process may have files."""
    files = make_files(tmp_path)
    packed(files, part=JobPart(1, 1))
    before = len(os.listdir("/proc/self/fd"))
    opened = [PartFolder(part_path(files / "store", JobPart(1, 1))) for _ in range(8)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert opened[0].structures()


# ---- what is the user's, and records of any size


@pytest.mark.parametrize("name", ["store.part-1-of-1", "store.partial"])
def test_folders_with_something_of_the_users_are_left_alone(tmp_path: Path, name: str) -> None:
    structure(tmp_path / "s/1one.cif", chain("A", ONE))
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match=rf"{name}: holds thesis\.tex, which WarpFold did not write; move it away"):
        pack([tmp_path / "s"], [], tmp_path / "store")
    assert (tmp_path / name / "thesis.tex").read_text() == "precious"
    assert not (tmp_path / "store").exists()
    (tmp_path / name / "thesis.tex").rename(tmp_path / "thesis.tex")
    pack([tmp_path / "s"], [], tmp_path / "store")
    (tmp_path / "store.part-1-of-1").mkdir()
    (tmp_path / "store.part-1-of-1/thesis.tex").write_text("precious")  # while the store is there already
    assert pack([tmp_path / "s"], [], tmp_path / "store").finished_before
    assert (tmp_path / "store.part-1-of-1/thesis.tex").read_text() == "precious"


def test_a_file_that_appears_while_a_store_is_written_is_not_removed(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "store") as writer:  # left before it is finished
        (writer.partial / "thesis.tex").write_text("precious")
    assert [path.name for path in (tmp_path / "store.partial").iterdir()] == ["thesis.tex"]


def test_records_beyond_what_one_read_gives_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux reads at most 0x7ffff000 bytes at a time; here 100."""
    files = make_files(tmp_path)
    packed(files, "whole")
    _stopped(files, monkeypatch)
    records = part_path(files / "store", JobPart(1, 1)) / "records"
    size = records.stat().st_size
    capped = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, offset: capped(file, min(size, 100), offset))
    read = _reads(monkeypatch)
    _stopped(files, monkeypatch)
    assert (read, records.stat().st_size) == ([], size)
    packed(files)
    assert contents(files / "store") == contents(files / "whole")
    assert list(Store(files / "store").verify()) == []
