"""Write, read, check and merge the parts of a store, and run their jobs."""

import json
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from tests.data.pack.killers import Here
from warpfold.bulk import JobPart, ProcessDied
from warpfold.data.pack import jobs as pack_jobs
from warpfold.data.pack import merge as merging
from warpfold.data.pack.jobs import JobRunner, PackJob
from warpfold.data.pack.merge import finished_report, merge_parts, report_part
from warpfold.data.pack.part import (
    JobResult,
    PartFolder,
    PartWriter,
    check_parts,
    differences,
    part_path,
    read_result,
    remove_part,
    result_name,
)
from warpfold.data.pack.report import PackEntry
from warpfold.data.store.store import Store, pack_record
from warpfold.errors import UserError
from warpfold.files import digest_of, sealed
from warpfold.progress import no_progress

MANIFEST: dict[str, Any] = {
    "part": "1/2",
    "warpfold": "1.0",
    "options": {"min_length": 10, "cluster_identity": 0.4},
    "inputs": {"structures": {"files": 2}, "clusters": {"files": 0}},
    "clusters": None,
}


def start(folder: Path, **changes: Any) -> PartWriter:
    return PartWriter(folder / "part", MANIFEST | changes)


def die(writer: PartWriter) -> None:
    """Leave a part as a process leaves it that is killed."""
    writer._tried_file.close()
    writer._draft.release()


def test_the_paths_of_parts() -> None:
    assert part_path(Path("a/store"), JobPart(2, 13)) == Path("a/store.part-2-of-13")
    for path in (Path(), Path(".."), Path("/"), Path("a/..")):
        with pytest.raises(
            UserError, match=f"^--out {path}: not a name for a store. Pass a folder that does not exist"
        ):
            part_path(path, JobPart(1, 1))


def test_differences_are_named() -> None:
    first = {"options": {"min_length": 1, "same": 2, "only_one": 3}, "inputs": {"structures": 1, "clusters": 2}}
    other = {"options": {"min_length": 2, "same": 2, "other": 3}, "inputs": {"structures": 2, "clusters": 1, "hits": 0}}
    names = ["--min-length", "--only-one", "--other", "structures files", "clusters files", "hits files"]
    assert differences(first, other) == names
    assert differences(first, other, ("clusters", "other")) == [names[i] for i in (0, 1, 3, 5)]
    assert differences(first, first) == []


def test_a_result_is_a_line_and_records(tmp_path: Path) -> None:
    with start(tmp_path) as writer:
        for job, data, records in (("structure ü\udcff", {"a": [1]}, [b"one", b"", b"\0two"]), ("hits", [], [])):
            writer.add(job, data, records)
            fields = [job, data, [len(r) for r in records], [zlib.crc32(r) for r in records]]
            text = json.dumps(fields, separators=(",", ":")).encode() + b"\n"
            path = writer.folder / digest_of(job.encode("utf-8", "surrogateescape"))
            good = b"%08x " % zlib.crc32(text) + text + b"".join(records)
            assert (path.name, path.read_bytes()) == (result_name(job), good)
            assert read_result(path) == JobResult(job, data, records)
            assert read_result(path, with_records=False) == JobResult(job, data, [])
            head = len(good) - sum(map(len, records))
            for at in range(len(good)):
                path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
                with pytest.raises(ValueError, match=None):
                    read_result(path)
                if at >= head:
                    assert read_result(path, False) == JobResult(job, data, [])
            for wrong in (good + b"x", good[:-1], b""):
                path.write_bytes(wrong)
                with pytest.raises(ValueError, match=None):
                    read_result(path)
            other = path.with_name("0" * 32)
            other.write_bytes(good)
            with pytest.raises(ValueError, match="the result of another job"):
                read_result(other)
            other.unlink()
            path.write_bytes(good)


def test_a_finished_part_is_sealed_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr("warpfold.data.pack.part.sync_path", lambda path: synced.append(path.name))
    with start(tmp_path) as writer:
        assert (writer.folder, writer.part) == (tmp_path / "part.partial", JobPart(1, 2))
        with pytest.raises(UserError, match=r"part: is unfinished\. Repeat its command to finish it\.$"):
            PartFolder(tmp_path / "part")
        rows = {"b": [["m/b", "AC", ""], ["m/c", "", "bad"]], "a": [["m/a", "DE", ""]]}
        for name, row in rows.items():
            writer.begin(f"queries {name}")
            writer.add(f"queries {name}", row)
        for name in ("z", "y"):
            writer.add(f"structure {name}", {"name": name}, [name.encode()])
        assert writer.queries() == {"m/a": ("DE", ""), "m/b": ("AC", ""), "m/c": ("", "bad")}
        writer.finish()
    jobs = ["queries a", "queries b", "structure y", "structure z"]
    plan = sealed({"format": "warpfold-part", "version": 6, **MANIFEST, "jobs": jobs})
    assert (tmp_path / "part/plan.json").read_text() == json.dumps(plan, indent=1) + "\n"
    assert sorted(synced) == sorted(map(result_name, jobs))
    assert writer._tried_file.closed
    assert {path.name for path in (tmp_path / "part").iterdir()} == {"plan.json", *map(result_name, jobs)}
    part = PartFolder(tmp_path / "part")
    assert (part.path, part.part) == (tmp_path / "part", JobPart(1, 2))
    assert part.manifest == {"format": "warpfold-part", "version": 6, **MANIFEST}
    assert part.structures() == jobs[2:]
    assert [tuple(query) for query in part.queries()] == [("m/a", "DE", ""), ("m/b", "AC", ""), ("m/c", "", "bad")]
    assert part.read("structure y") == JobResult("structure y", {"name": "y"}, [b"y"])
    assert part.read("structure y", with_records=False).records == []
    path = tmp_path / "part" / result_name("structure z")
    damaged = rf"/part: {path.name} is damaged or missing\. Copy the part again, or remove and repeat it\.$"
    good = path.read_bytes()
    for wrong in (good[:-1], b"%08x 1\n" % zlib.crc32(b"1\n"), None):
        path.write_bytes(wrong or b"")
        if wrong is None:
            path.unlink()
        with pytest.raises(UserError, match=damaged):
            part.read("structure z")
    path.mkdir()
    with pytest.raises(UserError, match=r"/part: cannot be read: Is a directory\. Copy the part again\.$"):
        part.read("structure z")
    path.rmdir()
    (tmp_path / "part/mine").touch()
    remove_part(tmp_path / "part")
    assert [path.name for path in (tmp_path / "part").iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"jobs": []}, r"plan\.json is damaged or missing\."),
        ({"checksum": "x"}, r"plan\.json is damaged or missing\."),
        ({"checksum": None}, r"plan\.json is damaged or missing\."),
        ({"warpfold": "2.0"}, r"plan\.json is damaged or missing\."),
        ({"version": 5}, r"a part of another version of WarpFold\. Remove it and pack it again\."),
        ({"format": "x"}, r"a part of another version of WarpFold\. Remove it and pack it again\."),
        ({"part": "3/2"}, r"not a part of a store\. Make parts with `warpfold pack --shard I/N`\."),
        *(
            ({name: None}, r"not a part of a store\.")
            for name in ("part", "warpfold", "options", "inputs", "clusters", "version")
        ),
    ],
)
def test_another_plan_is_no_part(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with start(tmp_path) as writer:
        writer.add("structure y", {})
        writer.finish()
    path = tmp_path / "part/plan.json"
    plan = json.loads(path.read_text()) | changes
    # None stands for a missing name.
    path.write_text(json.dumps({name: plan[name] for name in plan if changes.get(name, "") is not None}))
    with pytest.raises(UserError, match=rf"/part: {message}"):
        PartFolder(tmp_path / "part")


def test_attempts_are_counted_in_runs_that_died(tmp_path: Path) -> None:
    writer = start(tmp_path)
    writer.begin("x")
    writer.close()
    # This process has not died of the job.
    assert list(tmp_path.iterdir()) == []
    for number in (1, 2):
        writer = start(tmp_path)
        writer.begin("x")
        assert writer.tried["x"] == number
        # A kill at any time leaves the line.
        assert (writer.folder / "tried").read_text() == '"x"\n' * number
        die(writer)
    writer = start(tmp_path)
    assert (dict(writer.tried), writer.jobs) == ({"x": 2}, set())
    writer.begin("x")
    writer.begin("y")
    assert dict(writer.tried) == {"x": 3, "y": 1}
    writer.close()
    assert (writer.folder / "tried").read_text() == '"x"\n"x"\n'
    with start(tmp_path) as writer:
        assert dict(writer.tried) == {"x": 2}
        writer.begin("x")
        writer.add("x", 1)
    # A job with a result has no attempts.
    assert (writer.folder / "tried").read_text() == ""
    writer = start(tmp_path)
    assert (dict(writer.tried), writer.jobs) == ({}, {"x"})
    writer.begin("z")
    die(writer)
    with (writer.folder / "tried").open("a") as file:
        file.write('[1]\n7\n"y"\n"cut sho')
    writer = start(tmp_path)
    assert {job: n for job, n in writer.tried.items() if isinstance(job, str)} == {"z": 1, "y": 1}
    writer.begin("w")
    die(writer)
    writer = start(tmp_path)
    assert writer.tried["w"] == 1
    writer.begin("w")
    writer.add("w", 1)
    die(writer)
    writer = start(tmp_path)
    assert (writer.tried["w"], writer.tried["z"]) == (0, 1)
    writer.close()


def test_incomplete_files_are_removed_and_results_stay(tmp_path: Path) -> None:
    with start(tmp_path) as writer:
        writer.add("queries a", [["m/a", "AC", ""]])
        writer.add("structure b", {}, [b"record"])
    names = {job: writer.folder / result_name(job) for job in ("queries a", "structure b")}
    names["structure b"].write_bytes(names["structure b"].read_bytes()[:-1])
    for name in (f".{'a' * 32}.01234567", ".plan.json.01234567", ".tried.01234567"):
        (writer.folder / name).touch()
    with start(tmp_path, options=MANIFEST["options"] | {"cluster_identity": 1.0}, clusters="x") as writer:
        assert (writer.jobs, writer.queries()) == ({"queries a"}, {"m/a": ("AC", "")})
        assert {path.name for path in writer.folder.iterdir()} == {
            "plan.json", "tried", "lock", names["queries a"].name,
        }  # fmt: skip
        assert (writer.folder / "plan.json").read_text() == json.dumps(writer.manifest, indent=1) + "\n"
    for changes, what in (
        ({"warpfold": "2.0"}, r"\(WarpFold 1\.0, not 2\.0\)"),
        ({"options": {"min_length": 11}, "warpfold": "2"}, r"\(--min-length, WarpFold 1\.0, not 2\)"),
        ({"inputs": {}}, r"\(structures files\)"),
    ):
        remedy = r"Repeat its command to finish it, or remove part\.partial to start over\.$"
        with pytest.raises(UserError, match=rf"part: an unfinished run with other inputs or options {what}\. {remedy}"):
            start(tmp_path, **changes)
    # The refused writers have released the lock.
    start(tmp_path).close()
    # Without a result, the options may change.
    names["queries a"].unlink()
    with start(tmp_path, warpfold="2.0") as writer:
        assert writer.jobs == set()
    assert not writer.folder.exists()


def parts(*numbers: str, **more: Any) -> list[PartFolder]:
    made = [SimpleNamespace(path=f"p{i}", manifest=MANIFEST, part=JobPart.parse(n)) for i, n in enumerate(numbers)]
    for part in made[1:]:
        part.manifest = MANIFEST | more
    return made  # type: ignore[return-value]


def test_parts_of_a_store_are_complete() -> None:
    check_parts(parts("2/3", "1/3", "3/3"))
    check_parts(parts("1/1"))
    for wrong, message in (
        (parts("1/2"), "p0: of 2 parts, 2 is missing. Pass all parts, made with --shard."),
        (parts("2/4", "4/4"), "p0: of 4 parts, 1, 3 are missing. Pass all parts, made with --shard."),
        (parts("1/3", "3/3", "1/3"), "p2: is part 1/3, and so is p0. Pass every part once."),
        (parts("1/3", "1/2"), "p1: is part 1/2, p0 is 1/3. Pass the parts of one run."),
        (
            parts("1/2", "2/2", options={"min_length": 3}),
            "p1: belongs to another store than p0 (it differs in --min-length, --cluster-identity). Pack both with the "
            "same inputs and options.",
        ),
    ):
        with pytest.raises(UserError) as caught:
            check_parts(wrong)
        assert str(caught.value) == message


# ---- jobs


def double(number: int) -> int:
    return 2 * number


class Recorder(Executor):
    """Run calls at once, record them in `events`, and fail those of `failures`."""

    def __init__(self, failures: dict[int, Exception] | None = None) -> None:
        self.events: list[str] = []
        self.failures = failures or {}

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **_: Any) -> Future[Any]:
        self.events.append(f"call {arguments[0]}")
        future: Future[Any] = Future()
        if error := self.failures.get(arguments[0]):
            future.set_exception(error)
        else:
            future.set_result(function(*arguments))
        return future


def run(runner: JobRunner, count: int, events: list[str], calls: int = 1) -> dict[str, Any]:
    """Run jobs 1 to `count`, each of several calls; record their ends in `events`. Returns the results."""

    def then(job: PackJob, result: int) -> Any:
        return (double, result) if result < int(job.name) * 2**calls else None

    results = {}
    for job, result in runner.run((PackJob(str(i), (double, i)) for i in range(1, count + 1)), then):
        events.append(f"end {job.name}")
        results[job.name] = result
    return results


def test_jobs_are_submitted_ahead(tmp_path: Path) -> None:
    with start(tmp_path) as writer:
        executor = Recorder()
        assert run(JobRunner(writer, executor, 2), 3, executor.events) == {"1": 2, "2": 4, "3": 6}
        assert executor.events == ["call 1", "call 2", "end 1", "end 2", "call 3", "end 3"]
        executor = Recorder()
        # A job with a second call keeps its place.
        assert run(JobRunner(writer, executor, 1), 2, executor.events, 2) == {"1": 4, "2": 8}
        assert executor.events == ["call 1", "call 2", "end 1", "call 2", "call 4", "end 2"]
        assert dict(writer.tried) == {"1": 2, "2": 2, "3": 1}
    events: list[Any] = []
    (tmp_path / "other").mkdir()
    with start(tmp_path / "other") as writer:
        # In this process, a job starts after the end of the one before.
        for job, _ in JobRunner(writer, None, 5).run(PackJob(str(i), (events.append, i)) for i in (1, 2, 3)):
            events.append(f"end {job.name}")
        assert dict(writer.tried) == {"1": 1, "2": 1, "3": 1}
    assert events == [1, "end 1", 2, "end 2", 3, "end 3"]


class Observed(Future[Any]):
    """Count how often it is asked whether it is done."""

    asked = 0

    def done(self) -> bool:
        self.asked += 1
        return super().done()


def test_the_runner_sleeps_until_a_job_ends(tmp_path: Path) -> None:
    future = Observed()

    class Slow(Executor):
        def submit(self, function: Callable[..., Any], /, *arguments: Any, **_: Any) -> Future[Any]:
            threading.Timer(0.05, future.set_result, arguments).start()
            return future

    with start(tmp_path) as writer:
        assert run(JobRunner(writer, Slow(), 1), 1, [], 0) == {"1": 1}
    assert future.asked <= 2


class Isolated(Here):
    """Stand for a separate process in which job 3 dies."""

    called: ClassVar[list[Any]] = []

    def start(self, function: Callable[..., Any]) -> None:
        assert callable(function)

    def __call__(self, function: Callable[[Any], Any], job: Any) -> Any:
        self.called.append(job)
        if job == 3:
            raise ProcessDied
        return function(job)


def test_jobs_of_a_broken_pool_are_tried_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_jobs, "IsolatedProcess", Isolated)
    monkeypatch.setattr(Isolated, "called", [])
    with start(tmp_path) as writer:
        # The first call of job 3, and the second call of job 4.
        executor = Recorder({number: BrokenProcessPool() for number in (3, 8)})
        assert run(JobRunner(writer, executor, 9), 4, executor.events, 2) == {"1": 4, "2": 8, "3": None, "4": 16}
        assert Isolated.called == [3, 4, 8]
        assert dict(writer.tried) == {"1": 1, "2": 1, "3": 2, "4": 2}


def test_jobs_that_were_running_when_a_run_died_are_tried_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_jobs, "IsolatedProcess", Isolated)
    with start(tmp_path) as writer:
        for executor, called, results in (
            (None, [2, 3], {"1": 2, "2": 4, "3": None, "4": None}),
            # A cluster tries jobs again itself.
            (Recorder(), [], {"1": 2, "2": 4, "3": 6, "4": 8}),
        ):
            monkeypatch.setattr(Isolated, "called", [])
            writer.tried.clear()
            writer.tried.update({"2": 1, "3": 2, "4": 3})
            assert run(JobRunner(writer, executor, 1), 4, []) == results
            assert Isolated.called == called
            attempts = {"1": 1, "2": 2, "3": 3, "4": 3 + (executor is not None)}
            assert dict(writer.tried) == attempts


def test_several_items_of_a_suspect_are_tried_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_jobs, "IsolatedProcess", Isolated)
    monkeypatch.setattr(Isolated, "called", [])
    singles = tuple(PackJob(str(i), (double, i)) for i in (2, 3, 4))
    job = PackJob("2", (sum, [2, 3, 4]), singles)
    with start(tmp_path) as writer:
        assert list(JobRunner(writer, None, 1).run([job])) == [(job, 9)]
        results = list(JobRunner(writer, None, 1).run([job]))
        assert results == [(singles[0], 4), (singles[1], None), (singles[2], 8)]
        assert Isolated.called == [2, 3, 4]


# ---- merging

PLAIN: dict[str, Any] = {"warpfold": "1.0", "options": {"cluster_identity": 1.0}, "inputs": {"x": 1}, "clusters": None}


def kept(name: str, file: str, number: int = 0, **fields: Any) -> tuple[PackEntry, bytes]:
    """Return a kept entry and its record, whose notes name the file."""
    record = pack_record({"x": np.arange(3)}, {"file": file})
    entry = PackEntry(name, file, True, record=(number, record.header, record.crc), **fields)
    return entry, record.data


def dropped(name: str, file: str, reason: str = "too short") -> tuple[PackEntry, None]:
    return PackEntry(name, file, False, reason), None


Entry = tuple[PackEntry, bytes | None]


def part(
    folder: Path,
    number: str,
    files: dict[str, list[Entry]],
    queries: list[tuple[str, str, str]],
    bad: dict[str, str],
    hits: list[list[str]],
    manifest: dict[str, Any],
) -> PartFolder:
    """Write a part with entries by structure file."""
    parsed = JobPart.parse(number)
    path = folder / f"part{parsed.number}"
    with PartWriter(path, {"part": number, **manifest}) as writer:
        for name, entries in files.items():
            data = {"entries": [asdict(entry) for entry, _ in entries], "bad": bad}
            writer.add(f"structure {name}", data, [record for _, record in entries if record is not None])
        writer.add("queries x", queries)
        writer.add("hits", hits)
        writer.finish()
    return PartFolder(path)


def merged(
    folder: Path,
    files: dict[str, list[Entry]],
    queries: list[tuple[str, str, str]] = [],  # noqa: B006
    bad: dict[str, str] = {},  # noqa: B006
    hits: list[list[str]] = [],  # noqa: B006
    progress: Any = no_progress,
    **changes: Any,
) -> Any:
    """Merge two parts with every other file and query each, into the store `out`."""
    manifest = PLAIN | changes
    names = list(files)
    parts = [
        part(folder, f"{i + 1}/2", {n: files[n] for n in names[i::2]}, queries[i::2], bad, hits, manifest)
        for i in (0, 1)
    ]
    return merge_parts(parts, folder / "out", manifest, None, progress, 1)


def test_of_entries_with_one_name_the_first_is_kept(tmp_path: Path) -> None:
    files: dict[str, list[Entry]] = {
        "b": [kept("1_A", "b"), kept("1_B", "b", 1, shares="1_A"), kept("1_C", "b", 2)],
        "a": [kept("1_A", "a"), dropped("1_D", "a"), kept("1_E", "a", 1)],
        "c": [
            dropped("1_E", "c", "bad"), kept("1_D", "c"), kept("1_F", "c", 1, shares="1_D"),
            kept("1_C", "c", 2), kept("1-x", "c", 3, chains=("1_D", "1_C")), kept("1-y", "c", 4, chains=("1_F", "1_D")),
            kept("1-z", "c", 5, chains=("1_F", "1_E")),
        ],
    }  # fmt: skip
    calls: list[tuple[float, int, str]] = []
    report = merged(tmp_path, files, progress=lambda *call: calls.append(call))
    assert {(entry.name, entry.file): entry.reason for entry in report.dropped} == {
        ("1_A", "b"): "the same name as in a",
        ("1_B", "b"): "a copy of 1_A, which is also in a",
        ("1_D", "a"): "too short",
        ("1_E", "c"): "bad",
        ("1_C", "c"): "the same name as in b",
        ("1-x", "c"): "its chain 1_C is also in another file",
        ("1-z", "c"): "its chain 1_E is also in another file",
    }
    assert all(entry.chains == () for entry in report.dropped)
    store = Store(tmp_path / "out")
    expected = {"1_A": "a", "1_E": "a", "1_C": "b", "1_D": "c", "1_F": "c", "1-y": "c"}
    assert list(store.keys) == list(expected)
    assert {key: store.record(key).notes["file"] for key in store.keys} == expected
    assert store.index.where["holder"].tolist() == [-1, -1, -1, -1, 3, -1]
    assert [(entry.name, entry.kept) for entry in report.kept] == sorted(
        ((name, True) for name in expected), key=lambda item: (expected[item[0]], item[0])
    )
    assert calls == [(0, 1, "clustering"), *((done, 6, "writing") for done in range(1, 7))]
    assert list(store.verify()) == []
    assert [entry.name for entry in report_part(PartFolder(tmp_path / "part2")).entries] == ["1_A", "1_D", "1_E"]
    assert report_part(PartFolder(tmp_path / "part1")).unused == {}


def test_unused_files_have_a_reason(tmp_path: Path) -> None:
    files: dict[str, list[Entry]] = {
        "a": [kept("1_A", "a", sequence="AC", alignments=["m/used"], hits=["h/used", "h/bad"]), dropped("1_D", "a")],
        "b": [kept("1_B", "b", sequence="DE", alignments=["m/twice"])],
    }
    queries = [
        ("m/used", "AC", ""), ("m/twice", "DE", ""), ("m/z", "AC", ""), ("m/complex", "XX:DE", ""),
        ("m/other", "YY", ""), ("m/error", "", "m/error: bad"), ("m/late", "AC", ""),
    ]  # fmt: skip
    bad = {"m/late": "m/late: bad late", "h/bad": "h/bad: is bad", "m/used": "never shown"}
    hits = [["h/used", ""], ["h/bad", ""], ["h/other", ""], ["m/x.hhr", "pass it"]]
    report = merged(tmp_path, files, queries, bad, hits)
    assert list(report.unused.items()) == [
        ("m/complex", "its chains have alignments of their names"),
        ("m/error", "m/error: bad"),
        ("m/late", "m/late: bad late"),
        ("m/other", "no kept chain has this sequence"),
        ("m/z", "its chains have alignments of their names"),
    ]
    assert report.unused_hits == {
        "h/bad": "h/bad: is bad", "h/other": "no kept chain has this name", "m/x.hhr": "pass it",
    }  # fmt: skip
    assert finished_report(tmp_path / "out", PLAIN) == finished_report(tmp_path / "out", PLAIN | {"part": "1/1"})
    again = finished_report(tmp_path / "out", PLAIN)
    assert again is not None
    assert (again.entries, again.unused, again.unused_hits) == (report.entries, report.unused, report.unused_hits)
    (tmp_path / "none").mkdir()
    none = merged(tmp_path / "none", {"a": [dropped("1_D", "a")]}, queries)
    assert (none.kept, len(none.unused)) == ([], 7)
    assert not (tmp_path / "none/out").exists()


@pytest.mark.parametrize("what", ["plain", "predicted", "assemblies"])
def test_the_columns_and_the_origin_of_a_store(tmp_path: Path, what: str) -> None:
    fields: dict[str, Any] = {
        "length": 3, "depth": 2, "templates": 1, "resolution": 2.5, "release_date": "2001-02-03", "method": "NMR",
    }  # fmt: skip
    chain = kept("1_A", "a", plddt=70.0, sequence="AC", **fields)
    files: dict[str, list[Entry]] = {"a": [chain, kept("1_B", "a", 1, sequence="DE")]}
    columns = {name: [value, None] for name, value in fields.items()}
    columns |= {name: [fields[name], 0] for name in ("length", "depth", "templates")} | {"cluster": ["1_A", "1_B"]}
    changes: dict[str, Any] = {}
    if what == "predicted":
        changes["inputs"] = {"predicted": {"files": 1}}
        columns["plddt"] = [70.0, None]
    if what == "assemblies":
        changes["options"] = {"cluster_identity": 1.0, "assemblies": "first"}
        files["a"].append(kept("1-x", "a", 2, chains=("1_B", "1_A")))
        for name, values in columns.items():
            values.append(0 if name in ("length", "depth", "templates") else None)
        columns["chains"] = [None, None, ["1_B", "1_A"]]
    report = merged(tmp_path, files, **changes)
    store = Store(tmp_path / "out")
    assert {name: list(store.column(name)) for name in store.columns} == columns
    manifest = PLAIN | changes
    origin = {name: manifest[name] for name in ("warpfold", "options", "inputs")}
    assert store.file("sources.json") == json.dumps(origin, indent=1) + "\n"
    assert store.file("pack.json") == "".join(report.text())
    assert store.file("pack.tsv") == "".join(report.table())
    # The sequences are needed for the clusters alone.
    assert {entry.sequence for entry in report.chains} == {""}
    assert {entry.record for entry in report.entries} == {()}


def test_clusters_come_from_the_sequences_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = {"1_A": "AC", "1_B": "DE", "1_C": "AC", "1_D": "FG", "1_E": "AC"}

    def clusters_of(name: str, **changes: Any) -> tuple[list[Any], str | None]:
        (tmp_path / name).mkdir()
        files: dict[str, list[Entry]] = {
            "a": [kept(k, "a", i, sequence=s, entity=f"1_{i}") for i, (k, s) in enumerate(sequences.items())]
        }
        merged(tmp_path / name, files, **changes)
        store = Store(tmp_path / name / "out")
        return list(store.column("cluster")), json.loads(store.file("sources.json") or "").get("clustered")

    asked: list[Any] = []

    def cluster(*arguments: Any) -> list[int]:
        asked.append(arguments)
        return [4, 1, 4, 1, 4]

    monkeypatch.setattr(merging, "cluster_sequences", cluster)
    monkeypatch.setattr(merging, "clustering_program", lambda sequences: f"program for {len(sequences)}")
    assert clusters_of("equal") == (["1_A", "1_B", "1_A", "1_D", "1_A"], None)
    assert asked == []
    similar = {"options": {"cluster_identity": 0.9}}
    assert clusters_of("similar", **similar) == (["1_E", "1_B", "1_E", "1_B", "1_E"], "program for 5")
    assert asked == [(list(sequences.values()), 0.9, None, 1, "program for 5")]
    # A chain that the file does not list is in the cluster of the first chain of its sequence.
    (tmp_path / "names").write_text("x 1_A\nx 1_D\ny 1_C\n")
    (tmp_path / "numbers").write_text("x 1_0 1_3\ny 1_2 1_4\n")
    path = {"clusters": str(tmp_path / "names"), **similar}
    assert clusters_of("named", **path) == (["x", "1_B", "y", "x", "1_A"], None)
    path["clusters"] = str(tmp_path / "numbers")
    assert clusters_of("entities", **path) == (["x", "1_B", "y", "x", "y"], None)


def test_what_lies_at_the_place_of_a_store_is_left_alone(tmp_path: Path) -> None:
    assert finished_report(tmp_path / "out", PLAIN) is None
    merged(tmp_path, {"a": [kept("1_A", "a")]})
    report = finished_report(tmp_path / "out", PLAIN)
    assert report is not None
    assert (report.finished_before, [entry.name for entry in report.kept]) == (True, ["1_A"])
    for changes, what in (
        ({"options": {"cluster_identity": 0.5}}, "--cluster-identity"),
        ({"inputs": {"x": 2}, "options": {}}, "--cluster-identity, x files"),
    ):
        with pytest.raises(UserError) as caught:
            finished_report(tmp_path / "out", PLAIN | changes)
        assert str(caught.value) == (
            f"{tmp_path}/out: exists already, packed from other inputs or options ({what}). "
            "Remove it, or choose another name."
        )
    for name, text in (("sources.json", "{"), ("sources.json", "[]"), ("pack.json", "{}"), ("pack.json", None)):
        good = (tmp_path / "out" / name).read_text()
        (tmp_path / "out" / name).unlink()
        if text is not None:
            (tmp_path / "out" / name).write_text(text)
        with pytest.raises(UserError) as caught:
            finished_report(tmp_path / "out", PLAIN)
        assert str(caught.value) == f"{tmp_path}/out: exists already. Remove it, or choose another name."
        (tmp_path / "out" / name).write_text(good)
