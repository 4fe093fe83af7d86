"""The training kit as a whole: a small language model trained as by plain torch, killed, and continued to the bit."""

import os
import signal
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import warpfold
from tests.engine.small_models import LanguageModel, Sentences, padded
from tests.ranks import RankError, run_ranks
from warpfold.errors import UserError

EPOCHS, RATE, CLIP = 2, 3e-3, 0.5
COSTS = [float(5 + index % 7) for index in range(24)]  # letters of a sentence


class Fixed(Sentences):
    """Sentences that are the same in every epoch: torch's DataLoader seeds otherwise."""

    def __getitem__(self, index: int) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(index)
            return super().__getitem__(index)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As on the ranks: sums of another number of threads are rounded otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prepared(dropout: float, dtype: torch.dtype) -> tuple[LanguageModel, warpfold.Ready]:
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)  # the first weights count, and the ranks' noise
    model = LanguageModel(dropout).to(dtype)
    return model, warpfold.Ready(Fixed(), 4, workers=0, collate=padded, cost=COSTS, seed=3)


def with_kit(
    folder: Path, kill_at: int = -1, dropout: float = 0.1, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Train by the kit's lines, on one rank or several; each is killed at a step."""
    model, loader = prepared(dropout, dtype)
    optimizer = warpfold.Flat(model, torch.optim.AdamW, lr=RATE, clip=CLIP, ema=0.9)
    checkpoints = warpfold.Checkpoints(folder)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
    if dist.is_initialized():
        parts["more"] = {"replicas": warpfold.Replicas(model, optimizer)}
    step = checkpoints.load_latest(**parts).step
    for _ in range(loader.epoch, EPOCHS):
        for batch in loader:
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            checkpoints.save(step, **parts)
    found = {name: x.detach().clone() for name, x in model.state_dict().items()}
    with optimizer.averaged():
        return {**found, "averaged": model.head.weight.detach().clone(), "drawn": torch.rand(2)}


def with_torch() -> dict[str, Tensor]:
    """Train by plain torch: DataLoader, DistributedDataParallel, AdamW, clip_grad_norm_."""
    model, order = prepared(0.0, torch.float64)
    ranks = dist.is_initialized()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True) if ranks else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    average = model.head.weight.detach().clone()
    for epoch in range(EPOCHS):
        for batch in DataLoader(Fixed(), batch_sampler=order.batches(epoch), collate_fn=padded):
            wrapped(batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            average.lerp_(model.head.weight.detach(), 0.1)
    return {**model.state_dict(), "averaged": average}


def on(ranks: int, function: Any, *args: Any) -> dict[str, Tensor]:
    """Return rank zero's result, and make sure that all have the same weights."""
    if ranks == 1:
        return function(*args)
    first, *others = run_ranks(function, ranks, *args)
    for other in others:
        assert [name for name in first if not torch.equal(first[name], other[name])] in ([], ["drawn"])
    return first


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_it_trains_as_plain_torch_does(tmp_path: Path, ranks: int) -> None:
    ours = on(ranks, with_kit, tmp_path, -1, 0.0, torch.float64)
    theirs = on(ranks, with_torch)
    for name, x in theirs.items():
        # fp64; Adam divides by the root of a second moment, which for 12 steps multiplies rounding by some thousands
        assert torch.allclose(ours[name], x, rtol=0, atol=1e-9), name
    assert not torch.allclose(ours["averaged"], ours["head.weight"], atol=1e-6)


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_killed_at_any_step_it_continues_to_the_bit(tmp_path: Path, ranks: int) -> None:
    whole = on(ranks, with_kit, tmp_path / "whole")
    for step in (1, 4, 6) if ranks == 1 else (3,):
        if ranks == 1:
            process = get_context("fork").Process(target=with_kit, args=(tmp_path / "killed", step))
            process.start()
            process.join(60)
            assert process.exitcode == -signal.SIGKILL
        else:
            with pytest.raises(RankError, match="died with exit code -9"):
                run_ranks(with_kit, ranks, tmp_path / "killed", step)
    again = on(ranks, with_kit, tmp_path / "killed")
    for name, x in whole.items():
        assert torch.equal(again[name], x), name


def test_the_loader_is_stateful_for_torch_distributed_checkpoint(tmp_path: Path) -> None:
    loader = warpfold.Ready(Fixed(), 4, workers=0, collate=padded)
    batches = iter(loader)
    next(batches)
    dcp.save({"loader": loader}, checkpoint_id=tmp_path / "dcp")
    rest = [batch["letters"] for batch in batches]
    again = warpfold.Ready(Fixed(), 4, workers=0, collate=padded)
    dcp.load({"loader": again}, checkpoint_id=tmp_path / "dcp")
    assert all(torch.equal(x, batch["letters"]) for x, batch in zip(rest, again, strict=True))


def _fully_sharded(folder: Path) -> tuple[bool, bool]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(UserError, match=r"\['model'\]\['state'\]\['0.weight'\]: is a DTensor; give ordinary tensors"):
        warpfold.Checkpoints(folder).save(1, model=model)
    whole = StateDictOptions(full_state_dict=True)
    warpfold.Checkpoints(folder).save(1, more={"model": get_model_state_dict(model, options=whole)})
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    saved = warpfold.Checkpoints(folder).load_latest().more["model"]
    same = all(torch.equal(saved[name], x) for name, x in before.items())
    set_model_state_dict(model, saved, options=whole)
    return same, all(torch.equal(p.full_tensor(), before[name]) for name, p in model.named_parameters())


def test_fsdp_is_refused_and_its_whole_state_is_taken(tmp_path: Path) -> None:
    assert run_ranks(_fully_sharded, 2, tmp_path) == [(True, True)] * 2


def test_a_grad_scaler_is_an_ordinary_part(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    warpfold.Checkpoints(tmp_path).save(1, more={"scaler": scaler})
    again = torch.amp.GradScaler("cpu")
    warpfold.Checkpoints(tmp_path).load_latest(more={"scaler": again})
    assert again.get_scale() == 8.0
