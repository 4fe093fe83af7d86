"""Test fine-tuning: saved and frozen parameters, resuming, and the cached trunk."""

import dataclasses
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.training.runs import rows, steps, tiny_run
from warpfold.data.load.order import Source
from warpfold.data.store.store import Store
from warpfold.engine import trunk
from warpfold.engine.trainable import AdapterConfig, FinetuneConfig
from warpfold.errors import UserError
from warpfold.model.alphafold import AlphaFold
from warpfold.model.weights.files import load_model
from warpfold.parallel.plan import Plan
from warpfold.training.config import RunConfig
from warpfold.training.train import train
from warpfold.training.validate import validate

ADAPTERS = AdapterConfig(on=("evoformer", "structure"), rank=2)
STRUCTURE = FinetuneConfig(trainable=("structure", "plddt"), draws=2, trunk="cached")


def run_of(finetune: FinetuneConfig, precision: str = "fp32", **train_settings: Any) -> RunConfig:
    plan = Plan(precision=precision)  # type: ignore[arg-type]
    return dataclasses.replace(tiny_run(**train_settings), finetune=finetune, plan=plan)


def stop_after(step: int) -> Any:
    def stop(row: dict) -> None:
        if row["kind"] == "step" and row["step"] == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return stop


@pytest.fixture(scope="module")
def init(unbroken: Path) -> Path:
    return unbroken / "params.safetensors"


def test_what_a_run_with_adapters_leaves(store: Store, init: Path, tmp_path: Path) -> None:
    config = run_of(FinetuneConfig(trainable=("plddt",), adapters=ADAPTERS))
    train(config, store, tmp_path / "run", init=init)
    before, after = load_file(init), load_file(tmp_path / "run/params.safetensors")
    assert after.keys() == before.keys()
    load_model(tmp_path / "run/params.safetensors")
    small = load_file(tmp_path / "run/adapters.safetensors")
    adapted = {name.rpartition(".")[0] for name in small}
    changed = {name for name, x in after.items() if not torch.equal(x, before[name])}
    assert changed == {f"{name}.weight" for name in adapted} | {name for name in after if name.startswith("plddt.")}
    # The file has A and B.
    for name in adapted:
        weight = before[f"{name}.weight"] + small[f"{name}.adapter_b"] @ small[f"{name}.adapter_a"]
        torch.testing.assert_close(after[f"{name}.weight"], weight)
    with safe_open(tmp_path / "run/adapters.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["finetune"])["adapters"]["rank"] == 2
    state = load_file(tmp_path / "run/checkpoints/step-00000006/state.safetensors")
    held = {name.partition(".")[2] for name in state if name.startswith("weights.")}
    assert held == {*small, *(name for name in after if name.startswith("plddt."))}
    frozen = load_file(tmp_path / "run/frozen.safetensors")
    assert all(torch.equal(x, before[name]) for name, x in frozen.items())
    assert frozen.keys() == before.keys() - held


def test_validate_folds_with_the_whole_model(store: Store, init: Path, tmp_path: Path) -> None:
    config = run_of(FinetuneConfig(trainable=("plddt",), adapters=ADAPTERS), save_every=3)
    train(config, store, tmp_path / "run", init=init)
    found = {row["step"]: row["lddt_ca"] for row in validate(tmp_path / "run", [Source(store)])}
    own = {row["step"]: row["lddt_ca"] for row in rows(tmp_path / "run", kind="validation")}
    assert found
    assert all(own[step] == pytest.approx(score, abs=1e-6) for step, score in found.items())
    assert load_file(tmp_path / "run/best.safetensors").keys() == load_file(init).keys()


# The cached trunk


@pytest.fixture
def computed_trunks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the trunk passes for each entry."""
    calls: list[int] = []
    original = AlphaFold.trunk_pass

    def counted(model: AlphaFold, *given: Any, **more: Any) -> Any:
        calls.append(1)
        return original(model, *given, **more)

    monkeypatch.setattr(AlphaFold, "trunk_pass", counted)
    return calls


@pytest.mark.parametrize("trainable", [("heads", "structure"), ("pae", "distogram")])
def test_a_cached_trunk_changes_nothing(
    trainable: tuple[str, ...], store: Store, init: Path, tmp_path: Path, computed_trunks: list[int]
) -> None:
    """Compare losses, gradient norms and weights in fp64.  With a trained masked_msa head nothing is cached."""
    found = {}
    if trainable == ("heads", "structure"):
        trainable = ("structure", "distogram", "plddt", "resolved")
    for name in ("computed", "cached"):
        finetune = FinetuneConfig(trainable=trainable, draws=2, trunk=name)  # type: ignore[arg-type]
        config = run_of(finetune, "fp64", steps=12, validate_every=0)
        config = dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, heads=dataclasses.replace(config.model.heads, pae=True)),
            loss=dataclasses.replace(config.loss, predicted_aligned_error=0.1, experimentally_resolved=0.01),
            train=dataclasses.replace(config.train, new_heads=True),
        )
        computed_trunks.clear()
        train(config, store, tmp_path / name, init=init)
        found[name] = len(computed_trunks)
    keys = {name for row in steps(tmp_path / "cached") for name in row["examples"]}
    assert found["computed"] == 24
    assert found["cached"] == len(list((tmp_path / "cached/trunk").glob("*.safetensors"))) <= 2 * len(keys)
    for one, other in zip(steps(tmp_path / "computed"), steps(tmp_path / "cached")):
        for key in ("loss", "grad_norm", "lddt_ca"):
            assert one[key] == pytest.approx(other[key], rel=1e-12)
        assert one["terms"] == pytest.approx(other["terms"], rel=1e-12)
    a, b = (load_file(tmp_path / name / "params.safetensors") for name in found)
    moved = [name for name, x in a.items() if not torch.equal(x, load_file(init).get(name, x[:0]).to(x.dtype))]
    assert {name.split(".")[0] for name in moved} >= {part for part in trainable}
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-10, atol=1e-12)


def test_early_passes_take_the_first_weights_also_when_a_run_continues(
    store: Store, init: Path, tmp_path: Path
) -> None:
    """All entries are deleted after the stop, so a run that made them with trained weights would differ."""
    config = run_of(STRUCTURE)
    train(config, store, tmp_path / "whole", init=init)
    train(config, store, tmp_path / "run", init=init, watch=stop_after(3))
    for entry in (tmp_path / "run/trunk").glob("*.safetensors"):
        entry.unlink()
    train(config, store, tmp_path / "run", init=init)
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")


def test_entries_of_other_weights_and_damaged_ones_are_made_again(
    store: Store, init: Path, unbroken: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = run_of(STRUCTURE, steps=2, validation=0.0)
    train(config, store, tmp_path / "first", init=init)
    (tmp_path / "run").mkdir()
    train(config, store, tmp_path / "other")
    shutil.copytree(tmp_path / "other/trunk", tmp_path / "run/trunk")
    (tmp_path / "run/.lock").touch()
    some = next((tmp_path / "run/trunk").glob("*.safetensors"))
    # The existing entries were made with random weights.
    train(config, store, tmp_path / "run", init=init)
    assert rows(tmp_path / "run") == rows(tmp_path / "first")
    some.write_bytes(some.read_bytes()[:100])
    shutil.rmtree(tmp_path / "run/checkpoints")
    train(config, store, tmp_path / "run", init=init)
    assert "damaged" in caplog.text
    assert rows(tmp_path / "run") == rows(tmp_path / "first")


def test_a_run_says_whether_its_trunk_is_kept(
    store: Store, init: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(finetune: FinetuneConfig, name: str, **more: Any) -> str:
        caplog.clear()
        with caplog.at_level("INFO"):
            train(run_of(finetune, steps=1, validation=0.0, **more), store, tmp_path / name, init=init)
        return caplog.text

    auto = FinetuneConfig(trainable=("structure",), draws=2, trunk="auto")
    assert "trunk: kept in" in (text := said(auto, "kept"))
    assert "for 2 draws of examples, in fp32, as nothing of it is trained" in text
    assert "trunk:" not in said(FinetuneConfig(), "usual")
    for finetune, why in (
        (FinetuneConfig(trainable=("structure",), trunk="auto"), "finetune.draws is 0"),
        (FinetuneConfig(trainable=("single", "structure"), draws=2, trunk="auto"), "single.weight is trained"),
        (FinetuneConfig(trainable=("heads",), draws=2, trunk="auto"), "the head masked_msa is trained"),
    ):
        assert f"trunk: computed each time, as {why}" in said(finetune, f"computed {why}")
        if finetune.draws:
            with pytest.raises(UserError, match=f'trunk = "cached" is impossible: {why}'):
                said(dataclasses.replace(finetune, trunk="cached"), f"cached {why}")
    monkeypatch.setattr(trunk.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 10))
    with pytest.raises(UserError, match=r"GB are free\. Lower finetune\.draws") as error:
        said(dataclasses.replace(auto, trunk="cached"), "full")
    assert "\n" not in str(error.value)
    assert "trunk: computed each time, as" in said(auto, "full too")


def test_the_size_that_is_said_is_that_of_the_entries(store: Store, init: Path, tmp_path: Path) -> None:
    config = run_of(STRUCTURE, steps=12, validation=0.0)
    train(config, store, tmp_path / "run", init=init)
    (size, entries), (more, _) = (
        trunk.largest_store([Source(store)], 2, 24, config.model, config.data.crop, rows, torch.float32)
        for rows in (config.data.max_msa, config.data.max_msa + 1)
    )
    there = trunk.TrunkStore(tmp_path / "run/trunk")
    assert entries == 12
    # Headers make up much of such small entries.
    assert 0.7 * size < there.bytes < 1.6 * size
    entry = load_file(next(there.folder.glob("*.safetensors")))
    row = sum(entry[name].nbytes for name in ("true_msa", "bert_mask", "masked_msa_logits"))
    assert more - size == entries * row // entry["true_msa"].shape[-2]
