"""Test validations: their cost, their examples, interruptions, and that they do not change the training."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.training.runs import equal_tensors, helix, make_store, rows, steps, tiny_run
from warpfold.data.load.order import Source
from warpfold.data.store.store import Store, StoreWriter, pack_record
from warpfold.data.store.stored_example import example_arrays, example_notes
from warpfold.engine.checkpoint import RunFolder
from warpfold.engine.watch import Phase, Watcher
from warpfold.errors import UserError
from warpfold.model.alphafold import AlphaFold
from warpfold.training import examples
from warpfold.training.config import TrainConfig
from warpfold.training.examples import split
from warpfold.training.train import initial_model, train
from warpfold.training.validate import validate
from warpfold.training.validation import Judge, Spending, Validation

ROOT = Path(__file__).parents[2]


# Cost


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5])
@pytest.mark.parametrize(("steps", "each", "rounds"), [(100, 0.2, 12), (100, 3.0, 12), (1000, 0.01, 5), (20, 9.0, 2)])
def test_the_time_of_validations_is_bounded(share: float, steps: int, each: float, rounds: int) -> None:
    """Simulate a run with steps of one second and validations of rounds * each seconds after every step."""
    spent = Spending(round=each)
    ratio = share / (1 - share)
    counts = []
    for step in range(1, steps + 1):
        spent = dataclasses.replace(spent, training=float(step))
        counts.append(spent.affords(share, rounds, step / steps))
        spent = dataclasses.replace(spent, validation=spent.validation + counts[-1] * each)
        # One example is always folded at the end.
        slack = each if step == steps else 0.0
        assert spent.validation <= ratio * step + slack + 1e-9
    assert set(counts[:-1]) <= {0, rounds}
    # The last validation is whole if there is time.
    if ratio * steps >= rounds * each:
        assert counts[-1] == rounds
        whole = rounds * each
        assert spent.validation >= min(ratio * (steps - 1) - 2 * whole, (steps - 2) * whole) - 1e-9
    else:
        assert counts[-1] == max(1, int(ratio * steps / each + 1e-6))


def test_a_share_that_is_none_is_refused() -> None:
    for share in (0.0, 1.5):
        with pytest.raises(ValueError, match="validation_share must be above 0"):
            TrainConfig(validation_share=share)


class Slow(Watcher):
    """Record the reported phases of validations."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []

    def on_phase(self, phase: Phase) -> None:
        self.phases.append(phase)


def test_what_is_validated_changes_no_bit_that_is_trained(store: Store, unbroken: Path, tmp_path: Path) -> None:
    watcher = Slow()
    train(tiny_run(validation_share=0.1, validate_every=2), store, tmp_path / "bounded", watch=watcher)
    train(tiny_run(validate_every=1), store, tmp_path / "all")
    assert steps(unbroken) == steps(tmp_path / "bounded") == steps(tmp_path / "all")
    for name in ("bounded", "all"):
        last = "checkpoints/step-00000006/state.safetensors"
        assert equal_tensors(tmp_path / name / last, unbroken / last)
    told = [(p.name, p.step, p.done, p.total) for p in watcher.phases if p.name == "validating"]
    assert told[-1][:2] == ("validating", 6)
    assert {"saving", "training", "validating"} <= {p.name for p in watcher.phases}
    ends = [p.left for p in watcher.phases if p.name == "training" and p.step > 1]
    assert all(left is not None and left >= 0 for left in ends)


def test_a_short_run_with_little_time_folds_one_and_says_of_how_many(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Spending, "affords", lambda *_: 1)
    train(tiny_run(steps=2, validation_share=0.001), store, tmp_path / "run")
    [row] = rows(tmp_path / "run", kind="validation")
    assert (row["step"], row["of"], len(row["examples"])) == (2, 2, 1)
    with RunFolder(tmp_path / "run", score="lddt_ca") as run:
        run.open_log(2)
        # Scores of a part of the examples do not decide which checkpoint is best.
        assert not run.scores


@pytest.mark.parametrize("times", [1, 10**9])
def test_where_memory_runs_out_in_a_validation_the_training_goes_on(
    store: Store, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    times: int,
) -> None:  # fmt: skip
    """The next tighter plan is tried.  An example without a plan is left out with a reason, also after a restart."""
    held_out = rows(unbroken, kind="validation")[0]["examples"]
    longest = max(held_out)
    forward, failed = AlphaFold.forward, 0

    def stub(model: AlphaFold, batch: dict, *more: Any, **named: Any) -> Any:
        nonlocal failed
        if not model.training and batch["aatype"].shape[-1] == 10 + int(longest[-1]) and failed < times:
            failed += 1
            raise torch.OutOfMemoryError("out of memory")
        return forward(model, batch, *more, **named)

    monkeypatch.setattr(AlphaFold, "forward", stub)
    out = tmp_path / "run"
    assert train(tiny_run(), store, out).finished
    assert equal_tensors(out / "params.safetensors", unbroken / "params.safetensors")
    found = rows(out, kind="validation")
    assert [row["step"] for row in found] == [0, 3, 6]
    if times == 1:
        assert all(row["examples"].keys() == held_out.keys() and "left_out" not in row for row in found)
        return
    for row in found:
        assert (len(row["examples"]), row["of"], row["left_out"].keys()) == (1, 2, {longest})
        assert "out of memory even with the tightest plan" in row["left_out"][longest]
    assert f"the validation after step 3 leaves out {longest}" in caplog.text
    before = failed
    assert train(tiny_run(), store, out).finished
    assert failed == before


# Examples


def families(path: Path) -> Store:
    """Make a store of eight helices: five copies of one, and three others."""
    with StoreWriter(path) as writer:
        for i in range(8):
            raw = helix(f"helix{i}", 10 + i, seed=i)
            meta = {"length": raw.length, "depth": raw.depth, "cluster": str(max(i - 4, 0))}
            writer.add(raw.name, pack_record(example_arrays(raw), example_notes(raw)), meta)
        writer.finish()
    return Store(path)


def test_a_family_is_validated_once(tmp_path: Path) -> None:
    other = families(tmp_path / "families")
    clusters = dict(zip(other.keys, other.column("cluster")))
    for seed in range(4):
        training, held_out = split(other, tiny_run(validation=0.2, seed=seed))
        found = [clusters[key] for _, key in held_out]
        assert len(set(found)) == len(found)
        assert not set(found) & {clusters[key] for key in training}
    _, held_out = split(make_store(tmp_path / "one"), tiny_run(validation=str(other.path)))
    assert len(held_out) == 4
    named = tuple(other.keys[:3])
    assert [key for _, key in split(other, tiny_run(validation=named))[1]] == list(named)


# Interruptions


class Stops(Watcher):
    """Send a signal before the first held-out example of a step is folded."""

    def __init__(self, step: int, number: int = signal.SIGINT) -> None:
        self.step, self.number, self.answered = step, number, False

    def on_phase(self, phase: Phase) -> None:
        self.answered = self.answered or phase.name == "stopping"
        if (phase.name, phase.step, phase.done) == ("validating", self.step, 0):
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("step", [0, 3, 6])
def test_a_signal_ends_a_validation_which_is_made_up_for(
    store: Store, unbroken: Path, tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    completed: list[bool] = []
    original = Judge.scores

    def noted(judge: Judge, *arguments: Any) -> Any:
        completed.append(False)
        scores = original(judge, *arguments)
        completed[-1] = True
        return scores

    with monkeypatch.context() as patch:
        patch.setattr(Judge, "scores", noted)
        watcher = Stops(step)
        stopped = train(tiny_run(), store, tmp_path / "run", watch=watcher)
    assert (stopped.steps, stopped.finished, stopped.signal) == (step, False, signal.SIGINT)
    assert watcher.answered
    assert completed[-1] is False  # the signal ended the pass
    assert train(tiny_run(), store, tmp_path / "run").finished
    assert rows(tmp_path / "run") == rows(unbroken)
    assert equal_tensors(tmp_path / "run/params.safetensors", unbroken / "params.safetensors")


def test_kill_9_in_a_validation_loses_no_step(store: Store, unbroken: Path, tmp_path: Path) -> None:
    code = (
        "import sys, signal; from tests.training.runs import tiny_run; "
        "from tests.training.test_validation import Stops; "
        "from warpfold.data.store.store import Store; from warpfold.training.train import train; "
        "train(tiny_run(save_every=100), Store(sys.argv[1]), sys.argv[2], watch=Stops(3, signal.SIGKILL))"
    )
    killed = subprocess.run([sys.executable, "-c", code, store.path, tmp_path / "run"], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    with RunFolder(tmp_path / "run") as run:
        assert run.latest() == 3
    train(tiny_run(save_every=100), store, tmp_path / "run")
    assert rows(tmp_path / "run") == rows(unbroken)
    assert equal_tensors(tmp_path / "run/params.safetensors", unbroken / "params.safetensors")


def test_what_a_run_spent_is_known_when_it_continues(store: Store, tmp_path: Path) -> None:
    train(tiny_run(steps=3), store, tmp_path / "run")
    with RunFolder(tmp_path / "run") as run:
        before = run.load(3).notes["seconds"]
    assert before["training"] > 0
    train(tiny_run(steps=6), store, tmp_path / "run")
    with RunFolder(tmp_path / "run") as run:
        after = run.load(6).notes["seconds"]
    found = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    spent = [row["seconds"] for row in found if row["kind"] == "validation"]
    assert after["training"] > before["training"]
    # The last validation follows the last checkpoint.
    assert np.isclose(after["validation"], sum(spent[:-1]), atol=0.01)


def test_a_watcher_that_is_none_is_refused_before_anything_is_done(store: Store, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither a Watcher nor a function"):
        train(tiny_run(), store, tmp_path / "run", watch="tensorboard")  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (UserError("its bytes do not fit their checksum"), "do not fit their checksum"),
        (MemoryError(), "too little memory"),
    ],
)
def test_a_damaged_example_is_named_and_counted_and_none_takes_its_place(
    store: Store, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, says: str
) -> None:
    held_out = [*rows(unbroken, kind="validation")[0]["examples"]]
    original, bad = examples.open_entry, held_out[0]

    def damaged(store: Store, key: str, assemblies: bool) -> Any:
        if key == bad:
            raise error
        return original(store, key, assemblies)

    monkeypatch.setattr(examples, "open_entry", damaged)
    assert train(tiny_run(), store, tmp_path / "run").finished
    found = rows(tmp_path / "run", kind="validation")
    assert len(found) == 3
    for row in found:
        assert [*row["examples"]] == held_out[1:]
        assert (row["of"], [*row["left_out"]]) == (2, [bad])
        assert says in row["left_out"][bad]
    scores = {row["step"]: row["lddt_ca"] for row in found}  # of equal examples
    best = max(scores, key=scores.__getitem__)
    with RunFolder(tmp_path / "run", score="lddt_ca") as run:
        run.open_log(6)
        assert run.best() == (best, sum(step > best for step in scores))


@pytest.mark.parametrize(
    ("scores", "best", "ended"), [((3, 4, 2, 5), 9, 0), ((3, 4, 4, 2), 3, 9), ((5, 3, 3, 9), 0, 6)]
)
def test_the_best_is_kept_and_the_run_ends_where_none_is_better(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scores: tuple[int, ...], best: int, ended: int
) -> None:
    """Validate after steps 0, 3, 6 and 9, with a patience of two.  The first weights may be the best."""
    given = dict(zip((0, 3, 6, 9), scores))
    at = {"step": 0}
    measure = Validation._fold_share

    def scored_by_hand(self: Validation, step: int, rounds: int, began: float) -> Any:
        at["step"] = step
        asked, found = measure(self, step, rounds, began)
        return asked, {key: {**one, "lddt_ca": given[step] / 10} for key, one in found.items() if isinstance(one, dict)}

    monkeypatch.setattr(Validation, "_fold_share", scored_by_hand)
    config, out = tiny_run(steps=9, patience=2, save_every=3, keep=9), tmp_path / "run"
    done = train(config, store, out)
    assert (done.finished, done.steps) == (True, ended or 9)
    assert at["step"] == done.steps
    ends = rows(out, kind="end")
    assert [(row["step"], row["best"]) for row in ends] == ([(ended, best)] if ended else [])
    kept = load_file(out / "params_best.safetensors")
    if best:
        state = load_file(out / f"checkpoints/step-{best:08d}/state.safetensors")
        assert all(torch.equal(x, state[f"average.{name}"]) for name, x in kept.items())
    else:
        first = initial_model(config, None).state_dict()
        assert all(torch.equal(x, first[name]) for name, x in kept.items())
    before = rows(out)
    # The run is finished, and adds no rows.
    assert train(config, store, out) == done
    assert rows(out) == before
    # It does not wait for steps after the end.
    assert validate(out, [Source(store)], follow=True) is not None
