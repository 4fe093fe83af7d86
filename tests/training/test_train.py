"""Test the training loop: its files, its errors, and how it stops."""

import dataclasses
import errno
import hashlib
import json
import math
import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.training.runs import equal_tensors, make_store, poison, rows, scored, steps, tiny_run
from warpfold import settings
from warpfold.cli import train as command
from warpfold.data.load.order import Source
from warpfold.data.store.store import Store
from warpfold.engine import checkpoint, optim
from warpfold.engine import learn as learning
from warpfold.engine.loop import StepTimer
from warpfold.engine.optim import OptimConfig
from warpfold.errors import DiskError, UserError
from warpfold.files import checksum
from warpfold.model.weights.files import load_model
from warpfold.parallel.plan import Plan
from warpfold.training import examples as chosen
from warpfold.training.config import RunConfig, load_settings
from warpfold.training.examples import draw_recycles, split
from warpfold.training.planning import graphs_in_words, setting_with_less_memory
from warpfold.training.train import ExampleResult, SkippedExamples, Summary, step_row, train
from warpfold.training.validation import Validation, validation_row


def test_what_a_run_leaves(unbroken: Path) -> None:
    validations, found = rows(unbroken, kind="validation"), steps(unbroken)
    assert [r["step"] for r in validations] == [0, 3, 6]
    assert [r["step"] for r in found] == [1, 2, 3, 4, 5, 6]
    assert [r["learning_rate"] for r in found[:3]] == [0.0005, 0.001, 0.001]
    assert all(len(r["examples"]) == 2 and np.isfinite(r["loss"]) and r["grad_norm"] > 0 for r in found)
    held_out = set(validations[0]["examples"])
    assert len(held_out) == 2
    assert not held_out & {name for r in found for name in r["examples"]}
    lines = map(json.loads, (unbroken / "metrics.jsonl").read_text().splitlines())
    timed = [line for line in lines if line["kind"] == "step"]
    assert all(0 < line["waiting"] < 1 and 0 < line["waiting_so_far"] < 1 for line in timed)
    assert timed[0]["waiting_so_far"] == timed[0]["waiting"]
    assert {p.name for p in (unbroken / "checkpoints").iterdir()} >= {"step-00000004", "step-00000006"}
    assert settings.build(RunConfig, settings.load(unbroken / "settings.toml")) == tiny_run()


def test_a_finished_run_has_its_card(store: Store, unbroken: Path, tmp_path: Path) -> None:
    text, scores = (
        (unbroken / "card.md").read_text(),
        {r["step"]: r["lddt_ca"] for r in rows(unbroken, kind="validation")},
    )
    best = max(scores, key=scores.__getitem__)
    assert f"entries {scores[6]:.4f} after step 6, and at best {scores[best]:.4f}, after step {best}." in text
    for name in ("params", "params_best"):
        assert hashlib.sha256((unbroken / f"{name}.safetensors").read_bytes()).hexdigest() in text
    assert (
        f"`store`, 4 entries, 100% of the examples, checksum of `store.json` `{checksum(store.path / 'store.json')}`"
        in text
    )
    assert f"| 6 | {scores[6]:.4f} | 2 of 2 |" in text
    assert "it started from no other parameters" in text
    assert settings.tomllib.loads(text.split("```toml")[1].split("```")[0])["optim"]["accumulate"] == 2
    assert text.endswith("# from Python\n```\n")

    init, data = unbroken / "params.safetensors", [Source(store, weight=1.0), Source(store, weight=3.0)]
    said = "warpfold train tiny --set 'a=b c'"
    train(tiny_run(steps=1, validation=0.0), data, tmp_path / "run", init=init, command=said)
    text = (tmp_path / "run/card.md").read_text()
    assert "DeepMind's: CC BY 4.0" in text
    assert hashlib.sha256(init.read_bytes()).hexdigest() in text
    assert "75% of the examples" in text
    assert "nothing was validated" in text
    assert said in text


def test_a_stopped_run_has_no_card(store: Store, tmp_path: Path) -> None:
    def stop(row: dict) -> None:
        if row["kind"] == "step":
            os.kill(os.getpid(), signal.SIGTERM)

    train(tiny_run(validation=0.0), store, tmp_path / "run", watch=stop)
    assert not (tmp_path / "run/card.md").exists()


def test_the_saved_parameters_are_the_averaged_ones(unbroken: Path) -> None:
    with checkpoint.RunFolder(unbroken) as run:
        tensors = run.load(6).tensors
    for name, value in load_model(unbroken / "params.safetensors").named_parameters():
        assert torch.equal(value, tensors[f"average.{name}"]), name
    changed = [name for name, t in tensors.items() if name.startswith("weights.") and "norm" not in name]
    assert any(not torch.equal(tensors[name], tensors["average." + name[8:]]) for name in changed)


def test_sigterm_saves_and_the_same_command_continues(store: Store, unbroken: Path, tmp_path: Path) -> None:
    def stop_after_three(row: dict) -> None:
        if row["kind"] == "step" and row["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    stopped = train(tiny_run(), store, tmp_path / "run", watch=stop_after_three)
    assert (stopped.steps, stopped.finished) == (3, False)
    assert signal.getsignal(signal.SIGTERM) == before
    done = train(tiny_run(), store, tmp_path / "run")
    assert (done.steps, done.finished) == (6, True)
    assert rows(tmp_path / "run") == rows(unbroken)
    assert equal_tensors(tmp_path / "run/params.safetensors", unbroken / "params.safetensors")
    assert train(tiny_run(), store, tmp_path / "run") == done  # the run is finished


def test_on_a_full_disk_the_run_ends_and_continues_later(
    store: Store, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        original = checkpoint.save_file

        def full(tensors: dict, path: Path) -> None:
            if "00000004" in str(path):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            original(tensors, path)

        patch.setattr(checkpoint, "save_file", full)
        with pytest.raises(DiskError, match=r"No space left on device\. Step 3 is safe in .*\. Make room\.$"):
            train(tiny_run(), store, tmp_path / "run")
    train(tiny_run(), store, tmp_path / "run")
    assert rows(tmp_path / "run") == rows(unbroken)


def test_a_run_that_ended_while_old_checkpoints_were_deleted_deletes_them_later(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, original, folder = tiny_run(keep=1, validation=0.0), checkpoint.RunFolder.prune, tmp_path / "run"

    def prune(run: checkpoint.RunFolder, keep: int) -> None:
        if run.latest() == config.train.steps:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        original(run, keep)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.RunFolder, "prune", prune)
        with pytest.raises(OSError, match="Read-only"):
            train(config, store, folder)
    assert len(list((folder / "checkpoints").iterdir())) == 2
    train(config, store, folder)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step-{config.train.steps:08d}"]


def test_another_runs_folder_is_refused(store: Store, unbroken: Path, tmp_path: Path) -> None:
    config = tiny_run(seed=1)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, c_z=8))
    with pytest.raises(UserError, match=r"other settings \(model.c_z: 8, not 12; train.seed: 1, not 0\)"):
        train(config, store, unbroken)
    with pytest.raises(UserError, match="another store"):
        train(tiny_run(), make_store(tmp_path / "other", proteins=7), unbroken)
    with pytest.raises(UserError, match="another init"):
        train(tiny_run(), store, unbroken, init=unbroken / "params.safetensors")
    assert rows(unbroken)[-1]["step"] == 6


def test_a_stage_takes_the_moments_of_the_one_before(
    store: Store, unbroken: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, init = tiny_run(steps=1, validation=0.0, moments=True), unbroken / "params.safetensors"
    train(
        dataclasses.replace(config, optim=dataclasses.replace(config.optim, beta1=0.999)),
        store,
        tmp_path / "a",
        init=init,
    )
    with checkpoint.RunFolder(tmp_path / "a") as run, checkpoint.RunFolder(unbroken) as first:
        after, before = run.load(1).tensors, first.load(6).tensors
    assert (before["steps"], after["steps"]) == (6, 7)
    for name in (name for name in before if name.startswith("moment1.")):
        assert torch.allclose(after[name], before[name], rtol=1e-3, atol=1e-4), name
    assert any(before[name].abs().max() > 1e-3 for name in before if name.startswith("moment1."))
    assert "without moments" not in caplog.text

    heads = dataclasses.replace(config.model.heads, pae=True)
    config = dataclasses.replace(config, loss=dataclasses.replace(config.loss, predicted_aligned_error=0.1))
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, new_heads=True))
    with caplog.at_level("INFO", "warpfold"):
        train(
            dataclasses.replace(config, model=dataclasses.replace(config.model, heads=heads)),
            store,
            tmp_path / "b",
            init=init,
        )
    new = next(line for line in caplog.messages if "without moments" in line)
    assert "pae." in new
    assert "trunk" not in new


MOMENTS = {
    "no --init": (lambda run: None, {}, "moments are taken from the run of init"),
    "a file of no run": (lambda run: run.parent / "other/params.safetensors", {}, "checkpoints in the same folder"),
    "another rule": (lambda run: run / "params.safetensors", {"optim.name": "lamb"}, "optim.name=adam, not lamb"),
}


@pytest.mark.parametrize(("init", "changes", "said"), MOMENTS.values(), ids=list(MOMENTS))
def test_moments_that_are_not_there_are_refused(
    init: Any, changes: dict, said: str, store: Store, unbroken: Path, tmp_path: Path
) -> None:
    shutil.copytree(unbroken, tmp_path / "run")
    (tmp_path / "other").mkdir()
    shutil.copy(unbroken / "params.safetensors", tmp_path / "other")
    wanted = {"train.moments": True, **changes}
    with pytest.raises(UserError, match=said) as caught:
        command.train(tiny_run(), store, tmp_path / "new", init=init(tmp_path / "run"), set=wanted, device="cpu")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_a_run_of_an_earlier_version_goes_on(store: Store, unbroken: Path, tmp_path: Path) -> None:
    """The settings of an older run lack newer keys, whose defaults change nothing."""
    out = Path(shutil.copytree(unbroken, tmp_path / "run"))
    text = (out / "settings.toml").read_text()
    new = [line for line in text.splitlines() if line.startswith(("min_confidence", "predicted_rows"))]
    assert len(new) == 2
    (out / "settings.toml").write_text("".join(f"{line}\n" for line in text.splitlines() if line not in new))
    assert train(tiny_run(), store, out).finished
    (out / "settings.toml").write_text(text.replace("distogram = 0.3", "distogram = 0.6"))
    with pytest.raises(UserError, match=r"loss\.distogram: 0\.3, not 0\.6"):
        train(tiny_run(), store, out)


def test_how_a_run_is_executed_may_change(store: Store, unbroken: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(unbroken, tmp_path / "run"))
    assert train(tiny_run(keep=1, save_every=1), store, out) == Summary(
        steps=6, finished=True, best=6, lddt_ca=rows(out)[-1]["lddt_ca"], params=out / "params.safetensors"
    )


def test_a_loss_that_is_not_finite_stops_with_what_reproduces_it(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, 3)
    with pytest.raises(UserError, match=r"step 1: .* is not finite") as error:
        train(tiny_run(), store, tmp_path / "run")
    folder = tmp_path / "run/failures/example-00000003"
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)
    notes = json.loads((folder / "failure.json").read_text())
    assert (notes["seed"], notes["step"], notes["index"], notes["loss"]) == (0, 1, 3, None)
    with np.load(folder / "batch.npz", allow_pickle=False) as arrays:
        assert len(arrays["aatype"]) == notes["length"]
    assert (folder / "state.safetensors").is_file()


CPU_ERROR = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "147968 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize("error", [RuntimeError(CPU_ERROR), torch.OutOfMemoryError("CUDA out of memory. Tried ...")])
def test_out_of_memory_is_one_line_and_the_run_continues_with_the_plan_that_it_names(
    error: RuntimeError, store: Store, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, losses = iter(range(100)), learning.total_loss

    def fails(*given: Any, **options: Any) -> Any:
        # Step 4, with two examples per step.
        if next(calls) == 7:
            raise error
        return losses(*given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(learning, "total_loss", fails)
        with pytest.raises(UserError) as caught:
            train(tiny_run(), store, tmp_path / "run")
    key = steps(unbroken)[3]["examples"][1]
    sizes = r"\(8 residues, 3 sequences, \d extra, 0 templates\)"
    says = rf"step 4: out of memory on cpu with {key} {sizes}; plan: everything kept\. "
    says += r'Set plan\.recompute = "block"; the same command then continues from the last checkpoint\.'
    assert re.fullmatch(says, str(caught.value))
    config = tiny_run()
    assert train(dataclasses.replace(config, plan=Plan(recompute="block")), store, tmp_path / "run").finished
    assert [row["examples"] for row in steps(tmp_path / "run")] == [row["examples"] for row in steps(unbroken)]


def test_what_needs_less_memory_is_named_until_nothing_is_left() -> None:
    config = tiny_run()
    config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, clip="step"))
    plan, said = Plan(batch=2), list[str]()
    for changes in (
        {"batch": 1},
        {"recompute": "layer", "keep_blocks": 1},
        {"keep_blocks": 0},
        {"recompute": "block"},
        {"offload": True},
        {"chunk": 8},
        {"chunk": 4},
        {},
    ):
        said.append(setting_with_less_memory(dataclasses.replace(config, plan=plan), "cuda"))
        plan = dataclasses.replace(plan, **changes)
    assert said == [
        *("plan.batch = 1", 'plan.recompute = "block"', "plan.keep_blocks = 0", 'plan.recompute = "block"'),
        *("plan.offload = true", "plan.chunk = 64", "plan.chunk = 4"),
        "plan.axial = 2 on more processes, or in a new run data.crop below 8",
    ]


def test_or_it_is_skipped(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, 3)
    train(tiny_run(steps=2, on_nonfinite="skip", validation=0.0), store, tmp_path / "run")
    assert [(r["skipped"], np.isfinite(r["loss"])) for r in rows(tmp_path / "run")] == [(0, True), (1, True)]
    assert all(p.isfinite().all() for p in load_model(tmp_path / "run/params.safetensors").parameters())


def test_what_a_failure_saves_is_the_model_that_failed(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure is known after the update.  With "stop" the update changes nothing, with "skip" it uses the rest."""
    train(tiny_run(steps=1, save_every=1, validation=0.0), store, tmp_path / "one")
    poison(monkeypatch, 3)
    with pytest.raises(UserError, match="is not finite"):
        train(tiny_run(validation=0.0), store, tmp_path / "stop")
    poison(monkeypatch, 3)
    train(tiny_run(steps=2, on_nonfinite="skip", validation=0.0), store, tmp_path / "skip")
    expected = load_file(tmp_path / "one/checkpoints/step-00000001/state.safetensors")
    for name in ("stop", "skip"):
        found = load_file(tmp_path / name / "failures/example-00000003/state.safetensors")
        assert found.keys() < expected.keys()
        assert all(torch.equal(x, expected[key]) for key, x in found.items())
    after = load_file(tmp_path / "skip/checkpoints/step-00000002/state.safetensors")
    assert any(not torch.equal(x, expected[key]) for key, x in after.items() if key.startswith("weights."))


def test_a_run_says_first_whether_it_records_graphs(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = dataclasses.replace(tiny_run(steps=1, validation=0.0), plan=Plan(graph=True))
    with caplog.at_level("INFO"):
        found = command.train(config, store, tmp_path / "run", device="cpu")
    assert "graphs: off, as a cpu has no graphs" in caplog.text
    assert found.unrecorded
    for plan, device, said in (
        (Plan(), "cpu", ""),
        (Plan(), "cuda", "off, as examples have too many shapes; plan.sizes pads them to few"),
        (Plan(sizes=2), "cuda:1", "passes are recorded and replayed, examples padded to 2 sizes of each axis"),
        (Plan(data=2, graph=True), "cuda", "passes are recorded and replayed"),
        (Plan(graph=True, offload=True), "cuda", "off, as the copies of plan.offload are not recorded"),
    ):  # fmt: skip
        assert graphs_in_words(plan, device) == said


@pytest.mark.parametrize("graph", [True, False, "auto"])
def test_settings_of_before_are_read(graph: Any) -> None:
    given = load_settings({"base": "tiny", "plan": {"graph": graph}})
    assert given.config().plan.graph == graph


def test_a_run_can_begin_from_other_parameters(store: Store, unbroken: Path, tmp_path: Path) -> None:
    init = unbroken / "params.safetensors"
    train(tiny_run(steps=1), store, tmp_path / "run", init=init)
    assert rows(tmp_path / "run")[0]["lddt_ca"] == rows(unbroken)[-1]["lddt_ca"]
    config = tiny_run()
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, c_m=8))
    with pytest.raises(UserError, match=r"params.safetensors"):
        train(config, store, tmp_path / "other", init=init)


def test_held_out_examples_by_name_or_from_another_store(store: Store, tmp_path: Path) -> None:
    training, held_out = split(store, tiny_run(validation=("helix3",)))
    assert [key for _, key in held_out] == ["helix3"]
    assert "helix3" not in training
    other = make_store(tmp_path / "other", proteins=2)
    training, held_out = split(store, tiny_run(validation=str(other.path), validation_examples=1))
    assert training == store.keys
    assert [s.path for s, _ in held_out] == [other.path]
    with pytest.raises(UserError, match="helix9 is not in"):
        split(store, tiny_run(validation=("helix9",)))


def test_held_out_features_are_made_one_ahead_and_always_alike(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    original = chosen.make_features

    def noted(entry: Any, config: Any, seed: int, key: tuple[str, str], passes: int, **rest: Any) -> Any:
        features = original(entry, config, seed, key, passes, **rest)
        made.append(key[0])
        return features

    monkeypatch.setattr(chosen, "make_features", noted)
    keys = sorted(store.keys)[:4]
    held_out, config = [(store, key) for key in keys], tiny_run()
    first = []
    for number, example in enumerate(chosen.held_out_features(held_out, config)):
        end = time.monotonic() + 100
        while len(made) < min(number + 2, 4) and time.monotonic() < end:
            time.sleep(0.001)  # stands in for folding
        assert made == keys[: number + 2]  # one is made ahead
        first.append(example)
    assert [example.key for example in first] == keys
    for example, again in zip(first, chosen.held_out_features(held_out, config), strict=True):
        one, other = example.features, again.features
        assert all(np.array_equal(one[name], other[name], equal_nan=one[name].dtype.kind == "f") for name in other)
    with pytest.raises(KeyError, match="nobody"):
        list(chosen.held_out_features([(store, "nobody")], config))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("draws", "expected"), [(1, [3]), (2, [1, 3]), (3, [1, 2, 3]), (4, [0, 1, 2, 3]), (8, [0, 0, 1, 1, 2, 2, 3, 3])]
)
def test_few_draws_have_stratified_recycles(seed: int, draws: int, expected: list[int]) -> None:
    """For every seed one draw has the model's number of recycles, which predictions use."""
    base = tiny_run()
    config = dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, recycles=3),
        train=dataclasses.replace(base.train, seed=seed),
        finetune=dataclasses.replace(base.finetune, draws=draws),
    )
    drawn = [draw_recycles(config, step) for step in range(3 * draws)]
    assert sorted(drawn[:draws]) == expected
    assert drawn == 3 * drawn[:draws]


def test_recycles_are_uniform_and_a_function_of_the_step() -> None:
    config = tiny_run()
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, recycles=3))
    drawn = [draw_recycles(config, step) for step in range(4000)]
    assert drawn == [draw_recycles(config, step) for step in range(4000)]
    assert np.abs(np.bincount(drawn, minlength=4) / 4000 - 0.25).max() < 0.03


def damage(store: Store, key: str, path: Path) -> Store:
    """Copy a store and damage the alignment of an entry."""
    shutil.copytree(store.path, path)
    stored = store.record(key).arrays["msa"]
    shard = path / f"shard-{stored.shard:05d}.wfs"
    data = bytearray(shard.read_bytes())
    data[stored.starts[0]] ^= 1
    shard.write_bytes(data)
    return Store(path)


def test_a_damaged_entry_is_set_aside_and_named(store: Store, unbroken: Path, tmp_path: Path) -> None:
    used = steps(unbroken)[0]["examples"][0]
    damaged = damage(store, used, tmp_path / "damaged")
    result = train(tiny_run(workers=1), damaged, tmp_path / "run")
    assert (result.finished, result.quarantined) == (True, (used,))
    found = rows(tmp_path / "run")
    [told] = [row for row in found if row["kind"] == "quarantine"]
    assert (told["step"], told["example"]) == (0, used)
    assert "damaged" in told["reason"]
    assert used not in {name for row in steps(tmp_path / "run") for name in row["examples"]}
    assert train(tiny_run(workers=1), damaged, tmp_path / "run") == result
    train(tiny_run(), damaged, tmp_path / "follower", replay=tmp_path / "run/order.txt")
    assert steps(tmp_path / "run") == steps(tmp_path / "follower")
    with pytest.raises(UserError, match=r"more than 0 stop a run \(train.quarantine\)"):
        train(tiny_run(quarantine=0.0), damaged, tmp_path / "strict")


def test_a_mixture_of_stores(store: Store, tmp_path: Path) -> None:
    other = make_store(tmp_path / "other", proteins=3)
    sources = [Source(store, weight=1), Source(other, weight=3)]
    train(tiny_run(steps=3), sources, tmp_path / "run")
    train(tiny_run(steps=6), sources, tmp_path / "run")
    train(tiny_run(steps=6), [Source(store, weight=0.25), Source(other, weight=0.75)], tmp_path / "unbroken")
    assert steps(tmp_path / "run") == steps(tmp_path / "unbroken")
    names = {name for row in steps(tmp_path / "run") for name in row["examples"]}
    assert {name.partition(":")[0] for name in names} == {"store", "other"}
    held_out = set(rows(tmp_path / "run")[0]["examples"])
    assert not held_out & {name.removeprefix("store:") for name in names}
    with pytest.raises(UserError, match="began with another store"):
        train(tiny_run(), [Source(store), Source(other)], tmp_path / "run")


def test_a_damaged_checkpoint_costs_its_steps_and_nothing_else(
    store: Store, unbroken: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tiny_run(steps=4), store, tmp_path / "run")
    state = max((tmp_path / "run/checkpoints").glob("step-*")) / "state.safetensors"
    data = bytearray(state.read_bytes())
    data[-1] ^= 1
    state.write_bytes(data)
    done = train(tiny_run(), store, tmp_path / "run")
    assert done.finished
    assert [r.getMessage().rsplit("; ")[-1] for r in caplog.records] == ["the run continues from step 3"]
    assert rows(tmp_path / "run") == rows(unbroken)
    assert equal_tensors(tmp_path / "run/params.safetensors", unbroken / "params.safetensors")


def test_a_step_is_safe_before_it_is_validated(
    store: Store, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_run(validate_every=2)
    train(config, store, tmp_path / "unbroken")
    with monkeypatch.context() as patch:
        original = Validation.__call__

        def killed(validation: Validation, step: int, rounds: int) -> int:
            if step == 4:
                raise KeyboardInterrupt
            return original(validation, step, rounds)

        patch.setattr(Validation, "__call__", killed)
        with pytest.raises(KeyboardInterrupt):
            train(config, store, tmp_path / "run")
    with checkpoint.RunFolder(tmp_path / "run") as run:
        assert run.latest() == 4
    train(config, store, tmp_path / "run")
    assert rows(tmp_path / "run") == rows(tmp_path / "unbroken")


def test_a_run_that_skips_too_much_stops_and_keeps_what_was_good(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, *range(4, 100), grows=False)
    config = tiny_run(steps=50, on_nonfinite="skip", max_skipped=7, save_every=1, validation=0.0)
    with pytest.raises(UserError, match=r"step 6: .* 8 of the last 12 .*train\.max_skipped = 7") as error:
        train(config, store, tmp_path / "run")
    assert "\n" not in str(error.value)
    with checkpoint.RunFolder(tmp_path / "run") as run:
        # The last two, and the last two before a skipped example.
        assert run.steps() == [1, 2, 4, 5]
        states = [run.load(step) for step in (2, 5)]
    assert [state.notes["skipped"] for state in states] == [[], [4, 5, 6, 7, 8, 9]]
    assert all(torch.equal(states[0].tensors[name], states[1].tensors[name]) for name in states[0].tensors)
    found = rows(tmp_path / "run")
    assert [(row["skipped"], row["learning_rate"] > 0) for row in found] == [(0, True)] * 2 + [(2, False)] * 4
    poison(monkeypatch, 0, grows=False)  # the checkpoint has the window
    with pytest.raises(UserError, match=r"step 6: .* 7 of the last 11 .*train\.max_skipped = 6"):
        train(
            tiny_run(steps=50, on_nonfinite="skip", max_skipped=6, save_every=1, validation=0.0),
            store,
            tmp_path / "run",
        )


def test_few_in_a_thousand_may_be_skipped_however_long_it_takes() -> None:
    def results(*losses: float) -> list[ExampleResult]:
        return [ExampleResult(key="", length=1, loss=loss, norm=1.0, lddt_ca=0.0, terms={}) for loss in losses]

    skipped = SkippedExamples(most=2)
    for step in range(1, 3_001):
        skipped.add(step, results(math.nan if step % 600 == 0 else 1.0))
    with pytest.raises(UserError, match=r"step 3001: .* 3 of the last 1000"):
        skipped.add(3_001, results(math.nan))
    with pytest.raises(UserError, match="3 of the last 3 "):
        # The other examples of the step follow.
        SkippedExamples(most=2).add(1, results(*[math.nan] * 3, *[1.0] * 5_000))


# ---- rows


def result(loss: float, lddt: float = 0.5) -> ExampleResult:
    return ExampleResult("a", 10, loss, norm=1.0, lddt_ca=lddt, terms={"fape": loss / 2})


def test_a_row_averages_what_was_finite() -> None:
    row = step_row(3, [result(1.0), result(math.nan), result(3.0, lddt=math.nan)], 0.1, 2, StepTimer())
    assert (row["loss"], row["lddt_ca"], row["terms"]["fape"], row["skipped"]) == (2.0, 0.5, 1.0, 1)
    nothing = step_row(3, [result(math.inf)], 0.1, 2, StepTimer())
    assert math.isnan(nothing["loss"])
    assert nothing["terms"] == {}
    scores = {"a": scored(0.4), "b": scored(math.nan), "c": scored(0.6, interface_lddt=0.2, dockq=0.1)}
    row = validation_row(0, list(scores), scores)
    assert row["lddt_ca"] == 0.5
    assert (row["interface_lddt"], row["interfaces"], row["dockq"], row["docked"]) == (0.2, {"c": 0.2}, 0.1, {"c": 0.1})
    assert not {"interface_lddt", "dockq"} & validation_row(3, ["a"], {"a": scored(0.5)}).keys()


def test_the_share_of_waiting_is_of_the_step_and_of_all_steps_so_far() -> None:
    timer = StepTimer()
    for waited in (0.0, 1.0):
        timer.begin()
        timer.began -= 2.0  # two seconds ago
        timer.waited = waited
        row = step_row(1, [result(1.0)], 0.1, 0, timer)
    assert (round(row["waiting"], 2), round(row["waiting_so_far"], 2)) == (0.5, 0.25)


# ---- in fp16, and in batches


def test_overflows_are_counted_apart_and_a_resumed_run_is_the_same(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a scale of 2^24 gradients overflow until the scale is lower, which on_nonfinite = "stop" tolerates."""

    def config_of(steps: int) -> RunConfig:
        return dataclasses.replace(tiny_run(steps=steps, validation=0.0, save_every=2), plan=Plan(precision="fp16"))

    monkeypatch.setattr(optim, "FIRST_LOSS_SCALE", 2.0**24)
    train(config_of(4), store, tmp_path / "unbroken")
    found = rows(tmp_path / "unbroken")
    assert found[0]["overflowed"] > 0
    for row in found:
        assert row["skipped"] == 0
        assert math.isfinite(row["loss"])
        assert (row["learning_rate"] > 0) == (row["overflowed"] < 2)
    with checkpoint.RunFolder(tmp_path / "unbroken") as run:
        state = run.load(4).tensors
    halved = sum(row["overflowed"] > 0 for row in found)
    assert state["loss_scale.scale"] == 2.0 ** (24 - halved)
    assert state["steps"] == sum(row["learning_rate"] > 0 for row in found)
    train(config_of(2), store, tmp_path / "broken")
    train(config_of(4), store, tmp_path / "broken")
    name = "checkpoints/step-00000004/state.safetensors"
    assert equal_tensors(tmp_path / "broken" / name, tmp_path / "unbroken" / name)
    poison(monkeypatch, *range(9))
    with pytest.raises(UserError, match="is not finite"):  # the loss itself
        train(config_of(2), store, tmp_path / "run")


ALONE = dataclasses.replace(
    tiny_run(steps=2, validation=0.0, save_every=9),
    optim=OptimConfig(accumulate=4, clip="step", warmup_steps=2),
    plan=Plan(kernels="definition"),
)
TOGETHER = dataclasses.replace(ALONE, plan=dataclasses.replace(ALONE.plan, batch=2, sizes=2))


def test_a_run_in_batches_is_the_run(store: Store, tmp_path: Path) -> None:
    """The proteins have at least 10 residues and the crop has 8, so all lengths are equal."""
    train(ALONE, store, tmp_path / "alone")
    train(TOGETHER, store, tmp_path / "together")
    alone, together = steps(tmp_path / "alone"), steps(tmp_path / "together")
    for one, other in zip(alone, together, strict=True):
        for same in ("examples", "lengths", "recycles", "learning_rate", "skipped"):
            assert one[same] == other[same]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert one["lddt_ca"] == pytest.approx(other["lddt_ca"], rel=1e-3)
    assert together[0]["grad_norm"] > alone[0]["grad_norm"]  # sums of two
    with pytest.raises(ValueError, match=r'plan.batch = 2: .* Set optim.clip = "step"'):
        dataclasses.replace(TOGETHER, optim=OptimConfig(accumulate=4))


def test_lengths_are_those_of_the_proteins_and_not_of_the_padding(store: Store, tmp_path: Path) -> None:
    uncut, plan = dataclasses.replace(TOGETHER.data, crop=40), dataclasses.replace(TOGETHER.plan, sizes=1)
    config = dataclasses.replace(TOGETHER, data=uncut, plan=plan, train=dataclasses.replace(TOGETHER.train, steps=1))
    train(config, store, tmp_path / "run")
    (row,) = steps(tmp_path / "run")
    assert row["lengths"] == [10 + int(name.removeprefix("helix")) for name in row["examples"]]


def test_where_a_batch_is_not_finite_all_of_it_is_named(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, 3)
    with pytest.raises(UserError, match=r"gradient of helix\d and helix\d is not finite") as error:
        train(TOGETHER, store, tmp_path / "run")
    assert f"{tmp_path / 'run/failures'}/example-00000002" in str(error.value)
