"""Kill writers and start second ones at any moment: a store is complete or absent, and finished stores stay."""

import fcntl
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.pack.killers import Here
from tests.data.pack.pack_inputs import contents, packed
from tests.data.pack.test_pack_run import parts_of
from warpfold import files as files_module
from warpfold.data.pack import jobs as pack_jobs
from warpfold.data.pack.pack import merge
from warpfold.data.pack.part import PartWriter
from warpfold.data.store.store import Store, StoreWriter, pack_record
from warpfold.errors import UserError

# The calls with which a writer changes folders.
EVENTS: list[tuple[Any, str]] = [
    (os, "fsync"), (os, "replace"), (Path, "rename"), (Path, "unlink"), (Path, "rmdir"), (Path, "mkdir"),
    (PartWriter, "add"), (PartWriter, "begin"), (StoreWriter, "add"),
]  # fmt: skip


def before_events(patch: pytest.MonkeyPatch, do: Callable[[], None]) -> None:
    """Call a function before each call in EVENTS."""

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def event(*arguments: Any, **named: Any) -> Any:
            do()
            return call(*arguments, **named)

        return event

    for owner, name in EVENTS:
        patch.setattr(owner, name, watched(getattr(owner, name)))


def written(path: Path) -> StoreWriter:
    writer = StoreWriter(path)
    writer.add("a", pack_record({"x": np.arange(9)}, {}), {"length": 9})
    return writer


def test_a_second_writer_at_any_event_of_the_first_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[bool] = []

    def intrude() -> None:
        if busy:
            return
        busy.append(True)
        with pytest.raises(UserError, match=r"^[^\n]*/s: (another process is writing|exists already)"):
            written(tmp_path / "s")
        refused.append(True)
        busy.clear()

    busy: list[bool] = []
    writer = written(tmp_path / "s")
    with monkeypatch.context() as patch:
        before_events(patch, intrude)
        writer.finish({"pack.json": "{}"})
    assert len(refused) > 8
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == [
        "index.wfi", "pack.json", "shard-00000.wfs", "store.json",
    ]  # fmt: skip
    assert list(Store(tmp_path / "s").verify()) == []


def late(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], None]) -> None:
    """Call a function after the next lock file is opened, and before it is locked."""
    flock = fcntl.flock

    def locked(*arguments: Any) -> None:
        monkeypatch.setattr(files_module.fcntl, "flock", flock)
        meanwhile()
        flock(*arguments)

    monkeypatch.setattr(files_module.fcntl, "flock", locked)


def test_who_locks_a_folder_that_has_got_its_name_touches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = written(tmp_path / "s")
    late(monkeypatch, first.finish)
    with pytest.raises(UserError, match="exists already"):
        StoreWriter(tmp_path / "s")
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    assert list(Store(tmp_path / "s").verify()) == []


def test_who_locks_a_folder_that_was_removed_makes_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = written(tmp_path / "s")
    late(monkeypatch, first.abort)
    written(tmp_path / "s").finish()
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    assert list(Store(tmp_path / "s").verify()) == []


def test_a_writer_that_fails_removes_nothing_of_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next writer may begin as soon as the lock is released."""
    first, unlink = written(tmp_path / "s"), Path.unlink
    written_next: list[StoreWriter] = []

    def removed(path: Path, **more: Any) -> None:
        unlink(path, **more)
        if path.name == "lock" and not written_next:
            written_next.append(written(tmp_path / "s"))

    monkeypatch.setattr(Path, "unlink", removed)
    first.abort()
    written_next[0].finish()
    assert list(Store(tmp_path / "s").verify()) == []


def test_two_processes_that_merge_at_once_end_with_one_store(files: Path, whole: dict[str, bytes]) -> None:
    """Each ends with a report or one line. A process that finds the other at work tries again."""
    parts, deadline, trials = parts_of(files, 2), time.monotonic() + 4, 0
    while time.monotonic() < deadline and trials < 60:
        start = time.monotonic() + 0.02
        children = []
        for _ in range(2):
            child = os.fork()
            if child == 0:
                os._exit(_merge_and_insist(parts, files / "store", start))
            children.append(child)
        ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert ends == [0, 0], (trials, ends)
        assert contents(files / "store") == whole
        assert not (files / "store.partial").exists()
        shutil.rmtree(files / "store")
        trials += 1
    assert trials > 3


def _merge_and_insist(parts: list[Path], out: Path, start: float) -> int:
    try:
        while time.monotonic() < start:
            pass
        while True:
            try:
                report = merge(parts, out)
            except UserError as error:
                if "another process is writing this store. Wait for it." not in str(error):
                    print(error, flush=True)
                    return 1
                time.sleep(0.0002)
            else:
                return 0 if len(report.kept) == 6 and len(Store(out)) == 6 else 2
    except BaseException as error:
        print(repr(error), flush=True)
        return 3


def test_processes_that_pack_at_once_and_are_killed_at_random_end_with_one_store(
    files: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_jobs, "IsolatedProcess", Here)  # one process for each is slow
    draw, deadline, killed, refused = random.Random(0), time.monotonic() + 8, 0, 0
    for trial in range(40):
        children = []
        for _ in range(2):
            child = os.fork()
            if child == 0:
                os._exit(_pack_once(files))
            children.append(child)
        for child in children if trial % 4 else ():
            time.sleep(draw.random() * 0.03)
            os.kill(child, signal.SIGKILL)
        ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert set(ends) <= {0, 5, -signal.SIGKILL}, ends
        killed, refused = killed + ends.count(-signal.SIGKILL), refused + ends.count(5)
        assert len(packed(files).kept) == 6
        assert {name: data for name, data in contents(files / "store").items() if name != "lock"} == whole
        assert sorted(path.name for path in files.glob("store*")) == ["store"]
        shutil.rmtree(files / "store")
        if time.monotonic() > deadline and trial > 6:
            break
    assert killed > 3
    assert refused > 0


def _pack_once(files: Path) -> int:
    """Pack. Returns 0 for a report, 5 if refused as the second writer."""
    try:
        return 0 if len(packed(files).kept) == 6 else 1
    except UserError as error:
        return 5 if str(error).endswith(": another process is writing this store. Wait for it.") else _failed(error)
    except BaseException as error:
        return _failed(error)


def _failed(error: BaseException) -> int:
    print(repr(error), flush=True)
    return 3


def test_a_second_run_at_any_event_of_the_first_is_refused_or_finds_the_store(
    files: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: set[str] = set()
    busy: list[bool] = []

    def intrude() -> None:
        if busy:
            return
        busy.append(True)
        try:
            said.add("finished" if packed(files).finished_before else "packed")
        except UserError as error:
            said.add(str(error).partition(": ")[2])
        busy.clear()

    with monkeypatch.context() as patch:
        before_events(patch, intrude)
        report = packed(files)
    assert len(report.kept) == 6
    assert contents(files / "store") == whole
    assert said <= {"another process is writing this store. Wait for it.", "finished", "packed"}
    assert sorted(path.name for path in files.glob("store*")) == ["store"]
