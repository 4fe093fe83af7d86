"""The run's folder: whole after any failure, and never two runs'."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from warpfold.errors import UserError
from warpfold.run.checkpoint import Checkpoint, RunFolder


def checkpoint(step: int, lddt: float | None = None, size: int = 10) -> Checkpoint:
    return Checkpoint(
        step, {"weights.a": torch.full((size,), float(step))}, {"validation": {"step": step, "lddt_ca": lddt}}
    )


def test_a_checkpoint_comes_back_to_the_bit(tmp_path: Path) -> None:
    flat = torch.randn(32)
    tensors = {"a": flat[:7], "b": flat[8:20].view(3, 4), "steps": torch.tensor(3.0)}  # views of one buffer
    with RunFolder(tmp_path / "run") as run:
        run.save(Checkpoint(3, tensors, {"x": [1, "ä"]}), keep=2)
        back = run.load(3)
    assert back.notes == {"x": [1, "ä"]}
    assert all(torch.equal(back.tensors[name], tensors[name]) for name in tensors)


def test_the_last_ones_and_the_best_are_kept(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        for step, lddt in [(1, 0.2), (2, 0.5), (3, 0.4), (4, None), (5, None)]:
            run.save(checkpoint(step, lddt), keep=2)
        assert run.steps() == [2, 4, 5]
        assert run.latest() == 5


def limited(size: int):
    """A disk that is full after `size` bytes of a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_on_a_full_disk_the_checkpoint_before_survives(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        run.save(checkpoint(1), keep=1)
        release = limited(20_000)
        try:
            with pytest.raises(UserError, match="step 1 is safe") as error:
                run.save(checkpoint(2, size=100_000), keep=1)
        finally:
            release()
        assert "\n" not in str(error.value)
        assert run.steps() == [1]
        assert [p.name for p in run.checkpoints.iterdir()] == ["step-00000001"]
        assert torch.equal(run.load(1).tensors["weights.a"], torch.ones(10))


def test_files_are_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        run.replace_file("params", lambda path: path.write_bytes(b"old"))
        release = limited(1_000)
        try:
            with pytest.raises(UserError, match="could not be written"):
                run.replace_file("params", lambda path: path.write_bytes(b"x" * 10_000))
        finally:
            release()
    assert (tmp_path / "params").read_bytes() == b"old"
    assert not list(tmp_path.glob(".partial*"))


def test_a_half_written_checkpoint_is_swept_away(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        run.save(checkpoint(1), keep=1)
        (run.checkpoints / ".partial-step-00000002").mkdir()
    with RunFolder(tmp_path) as run:
        assert run.steps() == [1]
        assert len(list(run.checkpoints.iterdir())) == 1


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        run.save(checkpoint(7, size=1000), keep=1)
        state = run.step_path(7) / "state.safetensors"
        state.write_bytes(state.read_bytes()[:-100])
        with pytest.raises(UserError, match="step-00000007: damaged"):
            run.load(7)


def test_a_second_run_waits_outside(tmp_path: Path) -> None:
    code = "import sys; from warpfold.run.checkpoint import RunFolder\nwith RunFolder(sys.argv[1]): pass"
    command = [sys.executable, "-c", code, str(tmp_path)]
    with RunFolder(tmp_path):
        refused = subprocess.run(command, capture_output=True, text=True)
        assert "another run is writing there" in refused.stderr
    assert subprocess.run(command, capture_output=True).returncode == 0


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="choose another --out"), RunFolder(tmp_path / "file"):
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


def test_a_full_disk_ends_the_log_with_one_line(tmp_path: Path) -> None:
    def fill() -> None:
        with RunFolder(tmp_path) as run:
            run.open_log(0)
            release = limited(1_000)
            try:
                for step in range(100):
                    run.log({"step": step, "loss": 0.5})
            finally:
                release()

    with pytest.raises(UserError, match=r"metrics.jsonl: .*make room"):
        fill()
    with RunFolder(tmp_path) as run:
        run.open_log(10)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 11


def test_checkpoints_without_settings_are_not_continued(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        assert run.settings_text() is None
        run.save(checkpoint(1), keep=1)
        with pytest.raises(UserError, match=r"without settings\.toml"):
            run.settings_text()
        run.write_settings("a = 1\n")
        assert run.settings_text() == "a = 1\n"
