"""Test watchers: accepted objects, TensorBoard, and Weights & Biases."""

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from warpfold.engine.checkpoint import RunFolder
from warpfold.engine.loop import Log
from warpfold.engine.watch import TensorBoard, Watcher, WeightsAndBiases, as_watchers
from warpfold.errors import UserError


def step(number: int, loss: float = 1.5, **terms: float) -> dict[str, Any]:
    return {"kind": "step", "step": number, "loss": loss, "terms": terms, "examples": ["a"], "learning_rate": 0.1}


def validation(number: int, score: float) -> dict[str, Any]:
    return {"kind": "validation", "step": number, "lddt_ca": score, "examples": {"a": score}}


class Noted(Watcher):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_begin(self, step: int) -> None:
        self.seen.append(("begin", step))

    def on_metrics(self, row: dict) -> None:
        self.seen.append((row["kind"], row["step"]))

    def on_end(self, finished: bool) -> None:
        self.seen.append(("end", finished))


def test_watchers_functions_and_lists_of_both_may_watch() -> None:
    seen: list[dict] = []
    one, other = as_watchers([Watcher(), seen.append])
    other.on_metrics(step(1))
    assert seen == [step(1)]
    assert as_watchers(None) == []
    assert as_watchers(one) == [one]
    for wrong in ("tensorboard", 3, Watcher, [Watcher]):
        with pytest.raises(UserError, match=r"neither a Watcher nor a function of a row\. Pass one of them"):
            as_watchers(wrong)  # type: ignore[arg-type]


def test_a_log_tells_its_watchers_from_beginning_to_end(tmp_path: Path) -> None:
    noted = Noted()
    with RunFolder(tmp_path) as run, Log(run, 3, 9, run.open_log(3), [noted]) as log:
        log(step(4))
        log.phase("validating", 1, 2)
        log(validation(4, 0.5))
    assert noted.seen == [("begin", 3), ("step", 4), ("validation", 4), ("end", False)]
    with pytest.raises(KeyError), RunFolder(tmp_path) as run, Log(run, 4, 9, run.open_log(4), [noted := Noted()]):
        raise KeyError
    assert noted.seen[-1] == ("end", False)
    assert '"time": ' in (tmp_path / "metrics.jsonl").read_text()


def test_tensorboard_is_optional(tmp_path: Path) -> None:
    if importlib.util.find_spec("tensorboard") is None:
        with pytest.raises(UserError, match=r"pip install '\.\[tensorboard\]'"):
            TensorBoard(tmp_path)
        return
    board = TensorBoard(tmp_path)
    board.on_begin(0)
    board.on_metrics(step(1, fape=0.5))
    board.on_end(True)
    assert any(tmp_path.iterdir())


def test_curves_are_told_in_order_and_the_file_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            told.append((folder, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            told.append((name, value, step))

        def flush(self) -> None:
            told.append("flush")

        def close(self) -> None:
            told.append("close")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    board = TensorBoard(tmp_path)
    # Without rows there is no file to close.
    board.on_end(False)
    board.on_begin(3)
    board.on_metrics({"kind": "step", "step": 4, "loss": 2.0, "terms": {"fape": 0.5}})
    board.on_end(True)
    assert told == [(str(tmp_path), 4), ("step/loss", 2.0, 4), ("step/fape", 0.5, 4), "flush", "close"]


def test_weights_and_biases_is_optional_and_writes_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("wandb") is None:
        with pytest.raises(UserError, match=r"train\.wandb: the package is missing\. Run pip install wandb"):
            WeightsAndBiases(tmp_path)
        return
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "true")  # W&B's default
    with pytest.raises(UserError, match="would look for its server even offline"):
        WeightsAndBiases(tmp_path)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    for begins in (0, 1):
        run = WeightsAndBiases(tmp_path, settings={"train": {"steps": 2}})
        run.on_begin(begins)
        run.on_metrics(step(begins + 1, fape=0.5))
        run.on_end(bool(begins))
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 2
    assert (tmp_path / "wandb" / "warpfold-run-id").is_file()  # one run for W&B
