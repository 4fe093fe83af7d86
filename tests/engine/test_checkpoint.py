"""Test that a run's folder is consistent after any failure, and is never shared by two runs."""

import errno
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import tiny_model
from warpfold import files
from warpfold.device import Snapshot
from warpfold.engine import checkpoint as module
from warpfold.engine.checkpoint import Checkpoint, RunFolder
from warpfold.engine.optim import OptimConfig, Optimizer
from warpfold.errors import UserError


def checkpoint(step: int, skipped: Sequence[int] = (), size: int = 10) -> Checkpoint:
    return Checkpoint(step, {"weights.a": torch.full((size,), float(step))}, {"skipped": list(skipped)})


def test_the_last_ones_and_the_best_are_kept(tmp_path: Path) -> None:
    with RunFolder(tmp_path, score="lddt_ca") as run:
        run.open_log(0)
        for step, lddt in [(1, 0.2), (2, 0.5), (3, 0.4)]:
            run.save(checkpoint(step), keep=2)
            run.log({"kind": "validation", "step": step, "lddt_ca": lddt})  # after saving
        run.save(checkpoint(4), keep=2)
    with RunFolder(tmp_path, score="lddt_ca") as run:
        assert run.open_log(4) == {"kind": "validation", "step": 3, "lddt_ca": 0.4}
        run.save(checkpoint(5), keep=2)
        assert run.steps() == [2, 4, 5]
        assert run.latest() == 5


def test_a_log_with_damaged_lines_is_continued(tmp_path: Path) -> None:
    """Draw lines that are not rows, rows with values of wrong types, and random changes of bytes."""
    validation = {"kind": "validation", "step": 3, "lddt_ca": 0.4, "examples": {"a": 0.4}, "of": 1, "seconds": 1.0}
    step = {"kind": "step", "step": 4, "loss": 1.5, "terms": {"fape": 0.5}, "examples": ["a"], "time": 1.7e9}
    whole = b"".join(json.dumps(row).encode() + b"\n" for row in (validation, step))
    cases = [b"", b"\xff\n", b"[" * 100_000 + b"\n", whole + b"\0\n", whole[:-5]]
    for row in (validation, step):
        for key in row:
            wrong_values = [None, -1, 10**400, 1e308, "x", [], {"a": {}}]
            cases += [whole + json.dumps({**row, key: value}).encode() + b"\n" for value in wrong_values]
            cases.append(whole + json.dumps({name: row[name] for name in row if name != key}).encode() + b"\n")
    rng = np.random.default_rng(0)
    for _ in range(40):
        data = bytearray(whole)
        for position in rng.integers(len(data), size=5):
            noise = rng.integers(256, size=int(rng.integers(5)), dtype=np.uint8).tobytes()
            data[position : position + int(rng.integers(5))] = noise
        cases.append(bytes(data))
    with RunFolder(tmp_path):
        pass
    for case in cases:
        (tmp_path / "metrics.jsonl").write_bytes(case)
        with RunFolder(tmp_path, score="lddt_ca") as run:
            last = run.open_log(4)
        assert last is None or last["step"] <= 4
        for line in (tmp_path / "metrics.jsonl").read_bytes().splitlines():
            assert json.loads(line)["step"] <= 4


def test_examples_skipped_do_not_rotate_the_good_ones_out(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        for step in range(1, 8):
            run.save(checkpoint(step, skipped=[2] * (step > 3)), keep=2)
        assert run.steps() == [2, 3, 6, 7]


def test_what_somebody_keeps_in_a_checkpoint_stays_and_damaged_notes_do_not_end_a_run(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        run.save(checkpoint(1), keep=1)
        (run.step_path(1) / "thesis.txt").write_text("mine")
        run.save(checkpoint(2), keep=1)
        (run.step_path(2) / "state.json").write_text("[{")
        run.save(checkpoint(3), keep=1)
        assert run.steps() == [1, 3]
        assert (run.step_path(1) / "thesis.txt").read_text() == "mine"


@contextmanager
def full_after(size: int) -> Iterator[None]:
    """Emulate a disk that is full after `size` bytes of a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_on_a_full_disk_what_was_there_survives(tmp_path: Path) -> None:
    """The previous checkpoint, files that were being replaced, and the lines of the log are intact."""

    def log(run: RunFolder) -> None:
        for step in range(100):
            run.log({"step": step, "loss": 0.5})

    with RunFolder(tmp_path) as run:
        run.open_log(0)
        run.save(checkpoint(1), keep=1)
        run.replace_file("params", lambda path: path.write_bytes(b"old"))
        for size, write, says in (
            (20_000, lambda: run.save(checkpoint(2, size=100_000), keep=1), "Step 1 is safe"),
            (1_000, lambda: run.replace_file("params", lambda path: path.write_bytes(b"x" * 10_000)), "be written"),
            (1_000, lambda: log(run), r"metrics.jsonl: .*Make room"),
        ):
            with full_after(size), pytest.raises(UserError, match=says) as error:
                write()
            assert "\n" not in str(error.value)
        assert [p.name for p in run.checkpoints.iterdir()] == ["step-00000001"]
        assert torch.equal(run.load(1).tensors["weights.a"], torch.ones(10))
    assert (tmp_path / "params").read_bytes() == b"old"
    assert not list(tmp_path.glob(".partial*"))
    with RunFolder(tmp_path) as run:
        run.open_log(10)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 11


def test_what_a_kill_left_half_written_is_swept_away(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as run:
        run.save(checkpoint(1), keep=1)
        (run.checkpoints / ".partial-step-00000002").mkdir()
        run.write_settings("a = 1\n")
    for name in (".partial-params.safetensors", ".partial-params.safetensors.01ab.partial"):
        (tmp_path / "run" / name).write_bytes(b"half")
    with RunFolder(tmp_path / "run") as run:
        assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000001"]
        assert {path.name for path in (tmp_path / "run").iterdir()} == {".lock", "checkpoints", "settings.toml"}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def zero(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1000] + bytes(1000))


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def edit(path: Path) -> None:
    path.write_text(path.read_text().replace('"first": 14', '"first": 15'))


DAMAGE = {
    "a bit": ("state.safetensors", flip),
    "a block": ("state.safetensors", zero),
    "short": ("state.safetensors", shorten),
    "edited": ("state.json", edit),
    "no JSON": ("state.json", shorten),
    "gone": ("state.json", Path.unlink),
    "its checksums": ("checksums.json", flip),
    "no checksums": ("checksums.json", Path.unlink),
}


def save(run: RunFolder, step: int) -> None:
    notes = {"loader": {"first": 2 * step}, "note": "x" * 200}
    run.save(Checkpoint(step, {"weights.a": torch.full((1000,), float(step))}, notes), keep=3)


@pytest.mark.parametrize("kind", DAMAGE)
def test_of_a_damaged_checkpoint_the_one_before_is_taken(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    name, damage = DAMAGE[kind]
    with RunFolder(tmp_path) as run:
        for step in (3, 5, 7):
            save(run, step)
        damage(run.step_path(7) / name)
        left = sorted(path.name for path in run.step_path(7).iterdir())
        with pytest.raises(UserError, match="step-00000007: damaged") as error:
            run.load(7)
        assert "\n" not in str(error.value)
        found = run.load_latest()
        assert found is not None
        assert (found.step, found.notes["loader"]) == (5, {"first": 10})
        [line] = [record.getMessage() for record in caplog.records]
        assert "step-00000007: damaged" in line
        assert line.endswith("kept as damaged-step-00000007; the run continues from step 5")
        assert sorted(path.name for path in (run.checkpoints / "damaged-step-00000007").iterdir()) == left
        save(run, 7)  # the run repeats the step
        assert run.load(7).step == 7


def test_where_all_are_damaged_nothing_is_touched(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        assert run.load_latest() is None
        for step in (1, 2):
            save(run, step)
            flip(run.step_path(step) / "state.safetensors")
        with pytest.raises(UserError, match=r"no checkpoint is intact .*step-00000002: damaged") as error:
            run.load_latest()
        assert "\n" not in str(error.value)
        assert run.steps() == [1, 2]


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, bool]] = []
    with RunFolder(tmp_path) as run:
        monkeypatch.setattr(module, "sync_path", lambda path: synced.append((path.name, run.step_path(1).exists())))
        run.save(checkpoint(1), keep=1)
    # The last name is that of the folder.
    draft = {"state.safetensors", "state.json", "checksums.json", ".partial-step-00000001"}
    assert set(synced) == {(name, False) for name in draft} | {("checkpoints", True)}


def test_a_second_run_waits_outside(tmp_path: Path) -> None:
    code = "import sys; from warpfold.engine.checkpoint import RunFolder\nwith RunFolder(sys.argv[1]): pass"
    command = [sys.executable, "-c", code, str(tmp_path)]
    with RunFolder(tmp_path):
        refused = subprocess.run(command, capture_output=True, text=True)
        assert "another run is writing there" in refused.stderr
    assert subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.parametrize("released", [40, 1000])
def test_a_lock_of_another_machine_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, released: int
) -> None:
    """A file server may hold the lock of a machine that has crashed."""
    with RunFolder(tmp_path):
        pass
    (tmp_path / ".lock").write_text("process 7 on elsewhere\n")
    lock, slept = files.lock_file(tmp_path / ".lock", UserError("")), list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if sum(slept) >= released:
            lock.close()

    monkeypatch.setattr(files.time, "sleep", sleep)
    if released > files.LOCK_LASTS:
        with pytest.raises(UserError, match=r"another run is .* \(it is locked by process 7 on elsewhere\)$"):
            RunFolder(tmp_path).__enter__()
        lock.close()
    else:
        with RunFolder(tmp_path):
            assert (tmp_path / ".lock").read_text() == f"process {os.getpid()} on {platform.node()}\n"
    assert sum(slept) == min(released, files.LOCK_LASTS)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == -(-len(slept) // 15)
    assert all("locked by process 7 on elsewhere" in line for line in lines)


def test_what_helps_is_said_of_a_folder_that_is_gone(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as run:
        shutil.rmtree(run.path)
        for write in (lambda: run.save(checkpoint(1), 1), lambda: run.replace_file("params", Path.touch)):
            with pytest.raises(UserError, match="moved or removed meanwhile"):
                write()
        run.path.mkdir()
        with pytest.raises(UserError, match="moved or removed meanwhile"):
            run.replace_file("params", lambda path: save_file({}, path / "away"))


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO])
def test_without_locks_a_run_goes_on_with_a_word_and_a_lock_that_fails_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    monkeypatch.setattr(files.fcntl, "flock", Mock(side_effect=OSError(code, os.strerror(code))))
    if code == errno.EIO:
        with pytest.raises(UserError, match="cannot be made or written: Input/output error"), RunFolder(tmp_path):
            pass
        return
    with RunFolder(tmp_path) as run:
        save(run, 1)
    [line] = [record.getMessage() for record in caplog.records]
    assert f"has no locks ({os.strerror(code)})" in line


def test_a_folder_that_only_looks_like_a_run_is_left_alone(tmp_path: Path) -> None:
    """The folder of another tool may have files with the same names, which a run would overwrite."""
    (tmp_path / "checkpoints" / ".partial-mine").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n')
    with pytest.raises(UserError, match="something else"), RunFolder(tmp_path):
        pass
    assert (tmp_path / "checkpoints" / ".partial-mine").is_dir()
    with pytest.raises(UserError, match="Choose another --out"), RunFolder(tmp_path / "metrics.jsonl"):
        pass


def test_the_log_continues_after_the_checkpoint(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        run.open_log(0)
        for step in range(1, 6):
            run.log({"step": step, "loss": step / 3})
    with open(tmp_path / "metrics.jsonl", "a") as log:
        log.write('{"step": 3, "lo')  # torn
    with RunFolder(tmp_path) as run:
        run.open_log(3)
        run.log({"step": 4, "loss": 9.0, "terms": {"fape": float("nan")}})
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 1 / 3), (2, 2 / 3), (3, 1.0), (4, 9.0)]
    assert rows[-1]["terms"] == {"fape": None}


def test_checkpoints_without_settings_are_not_continued(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        assert run.settings_text() is None
        run.save(checkpoint(1), keep=1)
        with pytest.raises(UserError, match=r"without settings\.toml"):
            run.settings_text()
        run.write_settings("a = 1\n")
        assert run.settings_text() == "a = 1\n"


def test_a_checkpoint_is_written_beside_and_holds_what_was_then(tmp_path: Path) -> None:
    go, value = threading.Event(), torch.zeros(3)
    with RunFolder(tmp_path / "run") as run:
        copy = Snapshot.of({"weights.a": value})

        def write() -> None:
            assert go.wait(100)
            run.save(Checkpoint(1, copy.wait(), {}), keep=2)

        run.write_in_background(write)
        value += 1  # the next step
        assert run.latest() is None
        go.set()
    assert torch.equal(run.load(1).tensors["weights.a"], torch.zeros(3))


class Copies(TorchDispatchMode):
    """Count the numbers of each copy."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._opname in ("copy_", "clone", "_to_copy"):
            self.found.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def test_a_state_is_copied_as_the_buffers_in_which_it_lies_and_written_as_it_was(tmp_path: Path) -> None:
    optimizer = Optimizer(tiny_model(), OptimConfig())
    optimizer.weights.normal_()
    state = optimizer.state()
    apart = {name: x.clone() for name, x in state.items()}
    with Copies() as copies:
        copy = Snapshot.of(state)
    for x in state.values():
        x.add_(1)  # the next step
    # Weights, average, two moments, and the number of steps.
    assert len(copies.found) == 5
    for name, tensors in (("apart", apart), ("copy", copy.wait())):
        save_file(tensors, tmp_path / name)
    assert (tmp_path / "apart").read_bytes() == (tmp_path / "copy").read_bytes()


def test_a_snapshot_is_of_any_tensors() -> None:
    flat = torch.arange(20.0)
    given = {"part": flat[2:8].view(2, 3).T, "one": flat[9], "none": flat[:0], "other": torch.tensor(3), "all": flat}
    copies = Snapshot.of(given)
    expected = {name: x.clone() for name, x in given.items()}
    flat.zero_()
    for name, x in copies.wait().items():
        assert torch.equal(x, expected[name]), name


def test_what_writing_beside_raises_ends_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise UserError("full")

    with pytest.raises(UserError, match="full"), RunFolder(tmp_path / "run") as run:
        run.write_in_background(fail)
    with RunFolder(tmp_path / "run") as run:
        run.open_log(0)
        run.write_in_background(fail)
        with pytest.raises(UserError, match="full"):
            run.log({"kind": "validation", "step": 1})
        run.write_in_background(fail)
        with pytest.raises(UserError, match="full"):
            run.write_in_background(fail)

    def die() -> None:
        with RunFolder(tmp_path / "run") as run:
            run.write_in_background(fail)
            raise KeyError

    # The error that ended the run is raised.
    with pytest.raises(KeyError):
        die()
    assert "full" in caplog.messages
