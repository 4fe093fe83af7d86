"""Test the output folder of a run with made-up predictions: claims, records, summaries, copies, and the store."""

import errno
import fcntl
import json
import logging
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.prediction.runs import contents
from tests.prediction.test_ranking import helices
from warpfold.bulk import JobPart
from warpfold.data.store.store import Store
from warpfold.errors import UserError
from warpfold.files import append_line, sealed
from warpfold.prediction import folder as folder_module
from warpfold.prediction.folder import (
    Completed,
    PredictionFolder,
    Recorder,
    RepresentationStore,
    RunLog,
    alone,
    as_stored,
    at_work,
    is_stored,
    key_of,
    parts_at_work,
    rank_predictions,
    read_records,
    remove_copies,
    remove_records,
)
from warpfold.prediction.folding import FoldOutcome
from warpfold.prediction.outputs import write_prediction
from warpfold.scoring.score_table import ScoreTables
from warpfold.scoring.selection import Selection

pytestmark = pytest.mark.usefixtures("undrawn")

CLOCK = {"seconds": 12.5, "computing": 3.0}


def item(name: str, model: str = "m1", seed: int = 0) -> Any:
    """Make what the folder reads of a `FoldItem`."""
    model_fields = SimpleNamespace(name=model, multimer=False)
    query = SimpleNamespace(name=name)
    below = f"{model}_seed_{seed}"
    return SimpleNamespace(key=(name, model, seed), below=below, cost=1.0, model=model_fields, query=query, seed=seed)


def groups_of(*items: Any) -> list[Any]:
    return [(one,) for one in items]


def summary(run: str = "r1", **more: Any) -> dict[str, Any]:
    models = [{"file": "m1.npz", "sha256": "digest", "licence": None}]
    new = {"format": "kind", "run": run, "status": "running", "predictions": [], "failures": [], "input_warnings": {}}
    new |= {"models": models, "settings": {"seed": 0, "seeds": 1}, "device": "cpu", "warnings": []}
    return new | {"versions": {"warpfold": "7", "torch": "8"}} | more


def write(folder: PredictionFolder, one: Any, plddt: float = 80.0, **fields: Any) -> FoldOutcome:
    """Write the files of a made-up prediction."""
    made = helices(1, 10.0, ("A",))
    made = replace(made, asym_id=None, iptm=None, chain_pair_iptm=None, name=one.query.name, **fields)
    details = {"model": one.model.name, "seed": one.seed, "recycles": 0, "msa_depth": 1, "seconds": {"model": 1.5}}
    made = replace(made, plddt=np.full(10, plddt, np.float32), details=details | {"templates": []})
    store: Any = "pooled" if fields else None
    entry = write_prediction(made, folder.out, one.below if folder.is_several else "", stored_pair=store)
    return FoldOutcome(one, entry=entry)


def fold(folder: PredictionFolder, keys: Sequence[Sequence[Any]], **plddt: float) -> None:
    """Make the predictions of groups of keys, as a run does."""
    recorder = folder.recorder()
    for group in folder.groups_of(keys):
        for one in group:
            recorder.add(write(folder, one, plddt.get(one.query.name, 80.0)))


def run(out: Path, items: Sequence[Any], force: bool = False, new: Any = None, **options: Any) -> dict[str, Any]:
    with closing(PredictionFolder(out, new or summary(), items, **options)) as folder:
        fold(folder, folder.begin(groups_of(*items), force))
        return folder.finish(CLOCK, {})


def logged(out: Path) -> list[str]:
    return [line.split(" ", 2)[2] for line in (out / "predict.log").read_text().splitlines()]


# ---- a run


def test_a_run_from_beginning_to_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One prediction fails, is tried again, and then the run is complete."""
    out, items = tmp_path / "out", [item("b"), item("a"), item("c")]
    new = summary(failures=[{"name": "x", "error": "unreadable"}])
    with closing(PredictionFolder(out, new, items)) as folder:
        assert not folder.is_several
        keys = folder.begin([(items[0],), (items[1], items[2])], False)
        assert keys == [[("b", "m1", 0)], [("a", "m1", 0), ("c", "m1", 0)]]
        assert folder.groups_of([[["b", "m1", 0]], [["a", "m1", 0], ["c", "m1", 0]]]) == [
            (items[0],),
            (items[1], items[2]),
        ]
        assert json.loads((out / "summary.json").read_text()) == sealed(new)
        recorder = folder.recorder()
        recorder.add(write(folder, items[1]))
        recorder.add(FoldOutcome(items[0], error="too long"))
        recorder.add(FoldOutcome(items[2]))  # written by another rank
        assert logged(out) == [
            "a (m1, seed 0): 10 residues, 1 chain, 1 alignment row, mean pLDDT 80.0, 1.5 s",
            "failed b (m1, seed 0): too long",
        ]
        # The third is neither done nor failed.
        partial = folder.finish(CLOCK, {"no triton": 2})
        assert partial["status"] == "running"
        assert [entry["name"] for entry in partial["predictions"]] == ["a"]
        assert partial["failures"] == [{"name": "x", "error": "unreadable"}, {"name": "b", "error": "too long"}]
        assert (partial["refused"], partial["seconds"]) == ({"no triton": 2}, 12.5)
        assert partial["processes"] == [{"part": "1/1", **CLOCK}]
        assert not (out / "report.html").exists()
    with closing(PredictionFolder(out, new, items)) as folder:
        assert folder.begin(groups_of(*items), False) == [[("b", "m1", 0)], [("c", "m1", 0)]]
        recorder = folder.recorder()
        recorder.add(FoldOutcome(items[0], error="too long again"))
        recorder.add(write(folder, items[2]))
        whole = folder.finish(CLOCK, {"no triton": 1, "odd": 5})
    assert (whole["status"], whole["refused"]) == ("failed", {"no triton": 3, "odd": 5})
    assert [(entry["name"], entry["model"], entry["rank"]) for entry in whole["predictions"]] == [
        ("a", "m1", 1),
        ("c", "m1", 1),
    ]
    assert whole["failures"] == [{"name": "x", "error": "unreadable"}, {"name": "b", "error": "too long again"}]
    assert whole["processes"] == [{"part": "1/1", **CLOCK}] * 2
    assert [*whole["ranking"]] == ["a", "c"]
    assert json.loads((out / "summary.json").read_text()) == whole
    assert sorted(path.name for path in out.iterdir()) == [
        "a", "c", "cite.bibtex", "predict.log", "report.html", "summary.json",
    ]  # fmt: skip
    # An entry outranks an earlier failure.
    done = run(out, items, new=summary())
    assert (done["status"], [entry["name"] for entry in done["predictions"]]) == ("complete", ["b", "a", "c"])
    assert run(out, items, new=summary())["predictions"] == done["predictions"]
    assert caplog.text == ""


def test_damaged_predictions_are_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    items = [item("a"), item("b")]
    run(tmp_path, items)
    (tmp_path / "a/a.cif").write_text("edited")
    draft = tmp_path / f"a/.a.{'0a' * 16}.partial"
    draft.mkdir()
    with closing(PredictionFolder(tmp_path, summary(), items)) as folder:
        assert folder.begin(groups_of(*items), False) == [[("a", "m1", 0)]]
        assert json.loads((tmp_path / "summary.json").read_text())["status"] == "running"
        assert not draft.exists()
        assert contents(tmp_path / "a").keys() == {"damaged-a.cif"}
        fold(folder, [[("a", "m1", 0)]])
        # A file that vanishes meanwhile is noticed at the end, without reading the files.
        (tmp_path / "b/b.cif").unlink()
        (tmp_path / "a/a.cif").write_text("edited again")
        partial = folder.finish(CLOCK, {})
        assert (partial["status"], [one["name"] for one in partial["predictions"]]) == ("running", ["a"])
    assert f"{tmp_path / 'a/a.cif'}: missing, or not what was written; it is predicted again" in caplog.text


def test_another_run_is_refused_or_replaces_everything(tmp_path: Path) -> None:
    """Files that no run wrote stay."""
    several = [item("a"), item("a", seed=1)]
    run(tmp_path, several, tables=ScoreTables(tmp_path))
    assert {path.name for path in (tmp_path / "a").iterdir()} >= {"a_rank_1.cif", "a_rank_2.pdb", "m1_seed_1"}
    (tmp_path / "a/a_results.zip").write_text("an archive")
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "a/mine.txt").write_text("mine")
    other = summary("r2")
    with closing(PredictionFolder(tmp_path, other, [item("b")])) as folder:
        with pytest.raises(UserError, match="another run"):
            folder.begin(groups_of(item("b")), False)
        assert (tmp_path / "scores.csv").exists()
        assert not (tmp_path / "records").exists()
        folder.begin(groups_of(item("b")), True)
        kept = contents(tmp_path)
        assert {name for name in kept if not name.startswith("records/")} == {
            "mine.txt", "a/mine.txt", "summary.json", "report.html", "cite.bibtex", "predict.log",
        }  # fmt: skip
        assert json.loads(kept["summary.json"]) == sealed(other)
        recorder = folder.recorder()
        recorder.add(write(folder, item("b")))
    # Records of a run that was killed are removed with their predictions.
    with closing(PredictionFolder(tmp_path, summary("r3"), [item("c")])) as folder:
        folder.begin(groups_of(item("c")), True)
        assert not (tmp_path / "b").exists()
        assert [path.name for path in (tmp_path / "records").glob("*.json")] == []


def test_nothing_is_written_into_links_foreign_tables_and_foreign_stores(tmp_path: Path) -> None:
    out, items = tmp_path / "out", [item("a"), item("b")]
    (tmp_path / "file.store").write_text("mine")
    store = RepresentationStore(tmp_path / "file.store", "r1")
    with pytest.raises(UserError, match="exists already, and is not of this run"):
        PredictionFolder(out, summary(), items, store=store).begin(groups_of(*items), False)
    with pytest.raises(UserError, match="exists already, and is not of this run"):
        store.keys()
    assert not out.exists()
    run(out, items[:1])
    (out / "scores.csv").write_text("mine")
    tables = ScoreTables(out)
    with pytest.raises(UserError, match="not written by WarpFold"):
        PredictionFolder(out, summary(), items, tables=tables).begin(groups_of(*items), False)
    (out / "b").symlink_to(tmp_path)
    with pytest.raises(UserError, match="is a symbolic link"):
        PredictionFolder(out, summary(), items).begin(groups_of(*items), False)
    several = [item("a"), item("a", seed=1)]
    (out / "a/m1_seed_1").symlink_to(tmp_path)
    with pytest.raises(UserError, match="m1_seed_1: is a symbolic link"):
        PredictionFolder(out, summary(), several).begin(groups_of(*several), False)


def test_a_summary_that_names_folders_elsewhere_deletes_nothing(tmp_path: Path) -> None:
    run(tmp_path / "out", [item("a")])
    shutil.copytree(tmp_path / "out/a", tmp_path / "a")
    changed = json.loads((tmp_path / "out/summary.json").read_text())
    del changed["checksum"]
    changed["predictions"][0]["folder"] = "../a"
    (tmp_path / "out/summary.json").write_text(json.dumps(sealed(changed)))
    before = contents(tmp_path / "a")
    with closing(PredictionFolder(tmp_path / "out", summary("r2"), [item("b")])) as folder:
        folder.begin(groups_of(item("b")), True)
    assert contents(tmp_path / "a") == before


def test_parts_share_a_folder(tmp_path: Path) -> None:
    """Each part lists its own results. The last one writes the summary of all."""
    items = [item(name) for name in "abcd"]
    new = summary(failures=[{"name": "x", "error": "unreadable"}])
    first, second = (PredictionFolder(tmp_path, new, items, JobPart(number, 2)) for number in (1, 2))
    with closing(first), closing(second):
        keys = [folder.begin(groups_of(*items), False) for folder in (first, second)]
        assert sorted(key for part in keys for (key,) in part) == [(name, "m1", 0) for name in "abcd"]
        assert parts_at_work(tmp_path) == [JobPart(1, 2), JobPart(2, 2)]
        for other, text in (
            (PredictionFolder(tmp_path, new, items, JobPart(1, 2)), "work there on part 1/2"),
            (PredictionFolder(tmp_path, new, items, JobPart(3, 3)), "work there on part 1/2"),
            (PredictionFolder(tmp_path, new, items), "work there on part 1/2"),
            (PredictionFolder(tmp_path, summary("r2"), items, JobPart(3, 3)), "work there on part 1/2"),
            (PredictionFolder(tmp_path, summary("r2"), items, JobPart(2, 2)), "work there on part 1/2"),
        ):
            with closing(other), pytest.raises(UserError, match=text):
                other.begin(groups_of(*items), other.run == "r2")
        fold(first, keys[0])
        fold(second, keys[1])
        # All predictions are done, but the other part is at work.
        part = second.finish(CLOCK, {"why": 1})
        assert (part["status"], part["failures"]) == ("running", [])
        assert [entry["name"] for entry in part["predictions"]] == sorted(key[0] for (key,) in keys[1])
        assert (tmp_path / "records").is_dir()
        whole = first.finish(CLOCK, {"why": 2})
    assert [entry["name"] for entry in whole["predictions"]] == [*"abcd"]
    assert (whole["status"], whole["failures"], whole["refused"]) == ("failed", new["failures"], {"why": 3})
    assert [process["part"] for process in whole["processes"]] in (["1/2", "2/2"], ["2/2", "1/2"])
    assert not (tmp_path / "records").exists()


def test_the_first_part_lists_unreadable_records(tmp_path: Path) -> None:
    items = [item(name) for name in "ab"]
    failures = [{"name": "x", "error": "unreadable"}]
    with closing(PredictionFolder(tmp_path, summary(failures=failures), items, JobPart(1, 2))) as folder:
        folder.begin(groups_of(*items), False)
        assert folder.finish(CLOCK, {})["failures"] == failures


def test_a_whole_run_at_work_has_no_part(tmp_path: Path) -> None:
    items = [item("a")]
    with closing(PredictionFolder(tmp_path, summary(), items)) as folder:
        folder.begin(groups_of(*items), False)
        with (
            closing(PredictionFolder(tmp_path, summary(), items)) as other,
            pytest.raises(UserError, match=r"another process is at work there\. Wait for it, or name another folder\."),
        ):
            other.begin(groups_of(*items), False)
    assert parts_at_work(tmp_path) == []
    (tmp_path / "records/part-1-of-x.lock").touch()
    assert parts_at_work(tmp_path) == []
    assert str(at_work(tmp_path, JobPart(2, 3))).startswith(
        f"{tmp_path}: another process is at work there on part 2/3."
    )


def test_several_predictions_are_ranked_thinned_and_copied(tmp_path: Path) -> None:
    items = [item("a", model, seed) for model in ("m1", "m2") for seed in (0, 1)]
    items[2].model.multimer = items[3].model.multimer = True
    with closing(PredictionFolder(tmp_path, summary(), items, keep=1)) as folder:
        assert folder.is_several
        folder.begin(groups_of(*items), False)
        recorder = folder.recorder()
        for one, plddt in zip(items, (50.0, 90.0, 70.0, 0.0)):
            if plddt:
                recorder.add(write(folder, one, plddt))
        recorder.add(FoldOutcome(items[3], error="failed"))
        whole = folder.finish(CLOCK, {})
    assert [(one["model"], one["seed"], one["rank"], one.get("thinned")) for one in whole["predictions"]] == [
        ("m1", 1, 1, None),
        ("m2", 0, 2, True),
        ("m1", 0, 3, True),
    ]
    assert whole["failures"] == [{"name": "a", "model": "m2", "seed": 1, "error": "failed"}]
    # One of the models is a multimer.
    assert "2021.10.04.463034" in (tmp_path / "cite.bibtex").read_text()
    for rank, entry in enumerate(whole["predictions"], 1):
        below = tmp_path / entry["folder"]
        assert {path.name for path in below.iterdir()} == set(entry["files"].values())
        assert entry["checksums"].keys() == entry["files"].keys()
        assert ("pae" in entry["files"]) == ("scores" in entry["files"]) == (rank == 1)
        assert entry["ranked"]["mmcif"] == f"a/a_rank_{rank}.cif"
        assert (tmp_path / entry["ranked"]["pdb"]).is_file()
    # The failed one alone is tried again; a wider `keep` makes the thinned ones again, and a narrower one does not.
    with closing(PredictionFolder(tmp_path, summary(), items, keep=1)) as folder:
        assert folder.begin(groups_of(*items), False) == [[items[3].key]]
    with closing(PredictionFolder(tmp_path, summary(), items, keep=2)) as folder:
        assert folder.begin(groups_of(*items), False) == [[items[2].key], [items[3].key]]
    with closing(PredictionFolder(tmp_path, summary(), items)) as folder:
        assert folder.begin(groups_of(*items), False) == [[items[0].key], [items[2].key], [items[3].key]]


def test_a_selection_drops_the_others_and_its_table_lists_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpfold.scoring.score_table._write_parquet", lambda *_: True)
    items = [item(name) for name in "abc"]
    tables, keep = ScoreTables(tmp_path), Selection("best:1:mean_plddt", 1, "mean_plddt")
    new = summary(tables=tables.names)
    with closing(PredictionFolder(tmp_path, new, items, keep=keep, tables=tables)) as folder:
        keys = folder.begin(groups_of(*items), False)
        fold(folder, keys[:1], a=70.0)
        # A better one displaces the first.
        recorder = folder.recorder()
        assert recorder.shortlist is not None
        recorder.add(write(folder, items[1], 60.0))
        recorder.add(write(folder, items[2], 90.0))
        assert (tmp_path / "a").exists()
        assert not (tmp_path / "b").exists()
        found = {record["key"][0]: record["entry"] for record in read_records(tmp_path, "r1")}
        assert (found["b"]["dropped"], found["b"]["files"], found["b"]["checksums"]) == (True, {}, {})
        assert not {"dropped"} & found["a"].keys() & found["c"].keys()
        assert [line.split(",")[0] for line in (tmp_path / "scores.csv").read_text().splitlines()] == ["name", *"abc"]
        whole = folder.finish(CLOCK, {})
    assert [(one["name"], bool(one.get("dropped")), bool(one["files"])) for one in whole["predictions"]] == [
        ("a", True, False),
        ("b", True, False),
        ("c", False, True),
    ]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["c"]
    lines = (tmp_path / "scores.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["name", "a", "b", "c"]
    assert whole["tables"] == ["scores.csv", "scores.parquet"]
    # The same selection is done; without one, the dropped predictions are made again.
    with closing(PredictionFolder(tmp_path, new, items, keep=keep, tables=tables)) as folder:
        assert folder.begin(groups_of(*items), False) == []
    wider = Selection("best:2:mean_plddt", 2, "mean_plddt")
    with closing(PredictionFolder(tmp_path, new, items, keep=wider, tables=tables)) as folder:
        assert folder.begin(groups_of(*items), False) == [[items[0].key]]
        assert len((tmp_path / "scores.csv").read_text().splitlines()) == 3
    with closing(PredictionFolder(tmp_path, new, items, tables=tables)) as folder:
        assert folder.begin(groups_of(*items), False) == [[items[0].key], [items[1].key]]


def test_rows_of_damaged_predictions_leave_the_table(tmp_path: Path) -> None:
    items, tables = [item("a"), item("b")], ScoreTables(tmp_path)
    run(tmp_path, items, tables=tables)
    (tmp_path / "a/a.cif").unlink()
    with closing(PredictionFolder(tmp_path, summary(), items, tables=tables)) as folder:
        assert folder.begin(groups_of(*items), False) == [[items[0].key]]
        assert "scores.csv" in json.loads((tmp_path / "summary.json").read_text())["tables"]
        assert [line.split(",")[0] for line in (tmp_path / "scores.csv").read_text().splitlines()] == ["name", "b"]


def test_entries_without_a_model_are_of_the_first_one(tmp_path: Path) -> None:
    """Summaries of runs with one prediction for each query name neither the model nor the seed of a failure."""
    run(tmp_path, [item("a", "m7", 4)])
    summary_path = tmp_path / "summary.json"
    earlier = json.loads(summary_path.read_text())
    del earlier["checksum"], earlier["predictions"][0]["model"]
    earlier["failures"] = [{"name": "b", "error": "no"}]
    summary_path.write_text(json.dumps(sealed(earlier)))
    items = [item("a", "m7", 4), item("b", "m7", 4)]
    folder = PredictionFolder(tmp_path, summary(), items)
    found = folder._completed()
    assert [*found.entries] == [("a", "m7", 4)]
    assert found == Completed(found.entries, {("b", "m7", 4): "no"}, [])


# ---- records and locks


def test_records_of_this_run_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "records").mkdir()
    for number, run_name in enumerate(("r1", "r2", "r1")):
        Recorder(tmp_path, run_name, None, None).write((f"p{number}", "m", 0), {"error": f"{number}"})
    records = tmp_path / "records"
    for name, text in (("a.json", "{"), ("b.json", "[1]"), ("c.json", '{"run": "r1"}'), (".d.json", "{")):
        (records / name).write_text(text)
    found = list(read_records(tmp_path, "r1"))
    assert sorted((record["run"], record["key"], record["error"]) for record in found) == [
        ("r1", ["p0", "m", 0], "0"),
        ("r1", ["p2", "m", 0], "2"),
    ]
    assert [record.getMessage() for record in caplog.records] == [
        f"{records / name}: is damaged; its prediction is made again" for name in ("a.json", "b.json", "c.json")
    ]
    # A later record of the same prediction replaces the earlier one.
    Recorder(tmp_path, "r1", None, None).write(("p0", "m", 0), {"error": "again"})
    assert sorted(record["error"] for record in read_records(tmp_path, "r1")) == ["2", "again"]
    (records / "lock").touch()
    (records / "part-1-of-2.lock").touch()
    (records / "x.json.0a1b2c3d").touch()
    (records / "mine.txt").touch()
    with alone(tmp_path):
        remove_records(tmp_path)
    assert [path.name for path in records.iterdir()] == ["mine.txt"]


def test_without_locks_the_records_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "records").mkdir()
    Recorder(tmp_path, "r1", None, None).write(("p", "m", 0), {"error": "no"})

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(folder_module.fcntl, "flock", no_locks)
    with alone(tmp_path):
        remove_records(tmp_path)
    assert len(list(read_records(tmp_path, "r1"))) == 1
    (tmp_path / "records/part-1-of-2.lock").touch()
    assert parts_at_work(tmp_path) == []

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(folder_module.fcntl, "flock", fails)
    with pytest.raises(UserError, match=r"records/lock: cannot be written: .*[Ii]nput/output error"), alone(tmp_path):
        pytest.fail("it is not locked")


def test_a_quiet_recorder_logs_failures_only(tmp_path: Path) -> None:
    items = [item("a"), item("b")]
    folder = PredictionFolder(tmp_path, summary(), items)
    recorder = Recorder(tmp_path, "r1", None, None, quiet=True)
    folder.begin(groups_of(*items), False)
    recorder.add(write(folder, items[0]))
    recorder.add(FoldOutcome(items[1], error="no"))
    assert logged(tmp_path) == ["failed b (m1, seed 0): no"]
    Recorder(tmp_path, "r1", None, None).add(write(folder, items[0]))
    assert logged(tmp_path)[1].startswith("a (m1, seed 0): ")
    folder.close()


@pytest.fixture
def package_log() -> Iterator[logging.Logger]:
    logger = logging.getLogger("warpfold")
    before = [*logger.filters]
    yield logger
    assert logger.filters == before


@pytest.mark.parametrize("hidden", [False, True])
def test_the_log_of_a_run_waits_until_the_folder_is_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package_log: logging.Logger, hidden: bool
) -> None:
    monkeypatch.setattr(folder_module, "are_hidden", lambda: hidden)

    def failing() -> None:
        with RunLog(tmp_path) as log:
            log.write("first")
            log.write("second", logging.WARNING)
            assert [*tmp_path.iterdir()] == []
            log.open()
            package_log.warning("of the package: %d", 3)
            logging.getLogger("warpfold.plan").error("of a plan")
            log.write("last")
            raise RuntimeError("the end")

    with pytest.raises(RuntimeError, match="the end"):
        failing()
    assert logged(tmp_path) == [
        *(["first"] if not hidden else []),
        "second",
        "of the package: 3",
        "of a plan",
        *(["last"] if not hidden else []),
        "stopped: RuntimeError: the end",
    ]
    package_log.warning("after the end")
    assert len(logged(tmp_path)) == 6 - 2 * hidden
    with RunLog(tmp_path) as log:
        assert log.filter(logging.makeLogRecord({"msg": "for other handlers too", "levelno": logging.DEBUG}))
    assert len(logged(tmp_path)) == 6 - 2 * hidden


# ---- ranks


def ranked_entry(name: str, model: str, seed: int, plddt: float, score: float, **more: Any) -> dict[str, Any]:
    return {
        "name": name, "model": model, "seed": seed, "folder": f"{name}/{model}_{seed}", "mean_plddt": plddt,
        "ranking_confidence": score,
    } | more  # fmt: skip


def test_equal_predictions_are_ranked_by_model_and_seed() -> None:
    entries = [
        ranked_entry("q", "b", 0, 50, 0.5, iptm=0.1),
        ranked_entry("q", "a", 1, 60, 0.5, iptm=0.1),
        ranked_entry("one", "a", 0, 70, 70.0),
        ranked_entry("q", "a", 0, 70, 0.5, iptm=0.0),
        ranked_entry("q", "c", 9, 40, 0.6, iptm=0.2),
    ]
    ranked, ranking = rank_predictions(entries)
    assert [(one["name"], one["model"], one["seed"], one["rank"]) for one in ranked] == [
        ("q", "c", 9, 1), ("q", "a", 0, 2), ("q", "a", 1, 3), ("q", "b", 0, 4), ("one", "a", 0, 1),
    ]  # fmt: skip
    assert ranking["one"] == {
        "by": "mean pLDDT",
        "order": [{"rank": 1, "ranking_confidence": 70, "model": "a", "seed": 0, "folder": "one/a_0"}],
    }
    assert [one["folder"] for one in ranking["q"]["order"]] == ["q/c_9", "q/a_0", "q/a_1", "q/b_0"]
    assert ranking["q"]["by"] == "0.8 ipTM + 0.2 pTM"


def test_only_copies_of_the_query_are_removed(tmp_path: Path) -> None:
    for name in ("q/a.cif", "q/b.cif", "other/a.cif", "q/in/a.cif", "a.cif", "real/a.cif"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    remove_copies(tmp_path, "q", ["q/a.cif", "other/a.cif", "q/in/a.cif", "a.cif", "q/../a.cif", "q/none.cif"])
    remove_copies(tmp_path, "link", ["link/a.cif"])
    assert contents(tmp_path).keys() == {"q/b.cif", "other/a.cif", "q/in/a.cif", "a.cif", "real/a.cif"}
    remove_copies(tmp_path, "other", ["other/a.cif"])
    assert not (tmp_path / "other").exists()
    (tmp_path / "empty").mkdir()
    remove_copies(tmp_path, "empty", ["empty/a.cif"])
    assert not (tmp_path / "empty").exists()


# ---- the store of representations


@pytest.mark.parametrize(
    ("entry", "stored"),
    [
        ({"files": {}}, False),
        ({"files": {"representations": "x"}}, True),
        ({"files": {}, "stored": True}, True),
        ({"files": {"representations": "x"}, "thinned": True}, False),
        ({"files": {}, "stored": True, "dropped": True}, False),
    ],
)
def test_what_is_stored(entry: dict[str, Any], stored: bool) -> None:
    assert is_stored(entry) is stored


def test_entries_of_a_store_have_no_file_of_it() -> None:
    files = {"arrays": "a.npz", "representations": "a.record"}
    entry = {"name": "a", "files": files, "checksums": {kind: [1, kind] for kind in files}}
    assert as_stored(entry) == {
        "name": "a", "files": {"arrays": "a.npz"}, "checksums": {"arrays": [1, "arrays"]}, "stored": True,
    }  # fmt: skip
    assert key_of(["a", "m", 3]) == ("a", "m", 3)
    assert key_of([1, 2, "3"]) == ("1", "2", 3)


REPRESENTATIONS = {
    "single": np.ones((10, 2), np.float32),
    "pair": np.ones((10, 10, 2), np.float32),
    "structure_module": np.ones((10, 3), np.float32),
}


def test_representations_wait_for_the_end_of_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Until all predictions are done, each has a file, which must be whole."""
    items, store = [item("a"), item("b")], RepresentationStore(tmp_path / "r.store", "r1")

    def folder() -> PredictionFolder:
        return PredictionFolder(tmp_path / "out", summary(), items, store=store)

    with closing(folder()) as made:
        made.begin(groups_of(*items), False)
        made.recorder().add(write(made, items[0], **REPRESENTATIONS))
        partial = made.finish(CLOCK, {})
    assert "representations" in partial["predictions"][0]["files"]
    assert not store.path.exists()
    with closing(folder()) as made:
        assert made.begin(groups_of(*items), False) == [[items[1].key]]
    assert caplog.text == ""
    (tmp_path / "out/a/a_representations.record").unlink()
    with closing(folder()) as made:
        assert made.begin(groups_of(*items), False) == [[items[0].key], [items[1].key]]


def test_a_store_is_written_again_with_more_predictions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stores of the killed run that wrote them last are replaced. Other folders of these names stay."""
    out, path = tmp_path / "out", tmp_path / "r.store"
    store = RepresentationStore(path, "r1")
    items = [item("a"), item("b")]

    def folder(*chosen: Any) -> PredictionFolder:
        return PredictionFolder(out, summary(), chosen, store=store)

    def finish(*chosen: Any, written: Sequence[Any]) -> dict[str, Any]:
        with closing(folder(*chosen)) as made:
            made.begin(groups_of(*chosen), False)
            for one in written:
                made.recorder().add(write(made, one, **REPRESENTATIONS))
            return made.finish(CLOCK, {})

    assert store.keys() == set()
    whole = finish(items[0], written=items[:1])
    assert (store.keys(), whole["predictions"][0]["stored"]) == ({"a"}, True)
    assert not list(out.rglob("*.record"))
    with closing(Store(path)) as found:
        assert [found.column(name) for name in ("name", "model", "seed", "length", "mean_plddt")] == [
            ["a"], ["m1"], [0], [10], [80.0],
        ]  # fmt: skip
    assert json.loads((path / "sources.json").read_text()).keys() == {"warpfold", "run"}
    assert (path / "sources.json").read_text().startswith('{\n "warpfold": ')
    number = (path / "sources.json").stat().st_ino
    # The same predictions leave the store alone.
    store.write(out, whole["predictions"])
    store.write(out, [])
    assert (path / "sources.json").stat().st_ino == number
    shutil.copytree(path, tmp_path / "r.new.store")
    shutil.copytree(path, tmp_path / "r.old.store")
    whole = finish(*items, written=items[1:])
    with closing(Store(path)) as found:
        assert found.keys == ["a", "b"]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out", "r.store"]
    # A kill between two renames leaves the new store under its other name.
    path.rename(tmp_path / "r.new.store")
    assert store.keys() == {"a", "b"}
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out", "r.store"]
    assert caplog.text == ""
    # Entries that the store lacks are predicted again.
    shutil.rmtree(path)
    with closing(folder(*items)) as made:
        assert made.begin(groups_of(*items), False) == [[("a", "m1", 0)], [("b", "m1", 0)]]
    assert f"{path}: lacks 2 of its entries, which are predicted again" in caplog.text
    (tmp_path / "other.store").mkdir()
    (tmp_path / "other.store/sources.json").write_text('{"run": "r2"}')
    with pytest.raises(UserError, match="exists already, and is not of this run"):
        RepresentationStore(tmp_path / "other.store", "r1").check()
    RepresentationStore(tmp_path / "other.store", "r2").check()
    RepresentationStore(tmp_path / "new/folder/x.store", "r2").check()
    with pytest.raises(UserError, match=r"sources\.json is not a writable folder"):
        RepresentationStore(tmp_path / "other.store/sources.json/x.store", "r2").check()
    monkeypatch.setattr(folder_module.os, "access", lambda *_: False)
    with pytest.raises(UserError, match=r"new/x\.store: cannot be written: .* is not a writable folder"):
        RepresentationStore(tmp_path / "new/x.store", "r2").check()


def test_a_lock_is_waited_for_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "records/lock"
    with folder_module._locked(path), pytest.raises(UserError, match="another process is at work there"):
        folder_module._locked(path, at_work(tmp_path, JobPart(1, 1)))
    held = folder_module._locked(path, at_work(tmp_path, JobPart(1, 1)))
    timer = threading.Timer(0.05, held.close)
    timer.start()
    with alone(tmp_path):
        assert held.closed
    timer.join()


def test_the_lock_creates_its_folder_and_is_released(tmp_path: Path) -> None:
    with (
        alone(tmp_path / "new"),
        open(tmp_path / "new/records/lock", encoding="utf-8") as file,
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with alone(tmp_path / "new"):
        append_line(tmp_path / "new/predict.log", "both")
    assert logged(tmp_path / "new") == ["both"]
