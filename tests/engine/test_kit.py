"""The training kit as a whole: two small models trained as by plain torch, killed, and continued to the bit."""

import os
import signal
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import warpfold
from tests.engine.small_models import LanguageModel, Pictures, Sentences, VisionModel, padded, stacked
from tests.ranks import RankError, run_ranks
from warpfold.errors import UserError

EPOCHS, RATE, CLIP = 2, 3e-3, 0.5
COSTS = [float(5 + index % 7) for index in range(24)]  # letters of a sentence


class Fixed(Dataset):
    """Examples that are the same in every epoch: torch's DataLoader seeds otherwise."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(index)
            return self.data[index]


class Task(NamedTuple):
    """What is trained, in steps of so many batches."""

    model: type[LanguageModel] | type[VisionModel]
    data: Dataset
    loader: dict[str, Any]  # how `Ready` is asked for it
    batches: int
    average: str  # the parameter whose average over the steps is looked at


TASKS = {
    "language": Task(LanguageModel, Fixed(Sentences()), {"collate": padded, "cost": COSTS}, 1, "head.weight"),
    "vision": Task(VisionModel, Fixed(Pictures()), {"collate": stacked}, 2, "body.7.weight"),
}


pytestmark = pytest.mark.usefixtures("one_thread")  # as on the ranks


def prepared(task: Task, dropout: float, dtype: torch.dtype) -> tuple[nn.Module, warpfold.Ready]:
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)  # the first weights count, and the ranks' noise
    model = task.model(dropout).to(dtype)
    return model, warpfold.Ready(task.data, 4, workers=0, seed=3, **task.loader)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return the parameters in two groups: vectors do not decay."""
    learned = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in learned if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in learned if p.dim() == 1], "weight_decay": 0.0, "lr": RATE / 2},
    ]


def with_kit(
    folder: Path, name: str, kill_at: int = -1, dropout: float = 0.1, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Train by the kit's lines, on one rank or several; each is killed at a step."""
    task = TASKS[name]
    model, loader = prepared(task, dropout, dtype)
    optimizer = warpfold.Flat(groups(model), torch.optim.AdamW, lr=RATE, clip=CLIP, ema=0.9)
    replicas = warpfold.Replicas(model, optimizer)
    checkpoints = warpfold.Checkpoints(folder)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader, "more": {"replicas": replicas}}
    step, seen = checkpoints.load_latest(**parts).step, 0
    for _ in range(loader.epoch, EPOCHS):
        for batch in loader:
            seen += 1
            with replicas.no_sync() if seen % task.batches else nullcontext():
                (model(batch) / task.batches).backward()
            if seen % task.batches:
                continue
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            checkpoints.save(step, **parts)
    found = {name: x.detach().clone() for name, x in model.state_dict().items()}
    with optimizer.averaged():
        averaged = model.get_parameter(task.average).detach().clone()
    return {**found, "averaged": averaged, "drawn": torch.rand(2)}


def with_torch(name: str) -> dict[str, Tensor]:
    """Train by plain torch: DataLoader, DistributedDataParallel, AdamW, clip_grad_norm_."""
    task = TASKS[name]
    model, order = prepared(task, 0.0, torch.float64)
    ranks = dist.is_initialized()
    wrapped: Any = DistributedDataParallel(model, find_unused_parameters=True) if ranks else model
    optimizer = torch.optim.AdamW(groups(model), lr=RATE)
    watched, seen = model.get_parameter(task.average), 0
    average = watched.detach().clone()
    for epoch in range(EPOCHS):
        batches = order.batches(epoch)
        for batch in DataLoader(task.data, batch_sampler=batches, collate_fn=task.loader["collate"]):
            seen += 1
            with wrapped.no_sync() if ranks and seen % task.batches else nullcontext():
                (wrapped(batch) / task.batches).backward()
            if seen % task.batches:
                continue
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            average.lerp_(watched.detach(), 0.1)
    return {**model.state_dict(), "averaged": average}


def on(ranks: int, function: Any, *args: Any) -> list[dict[str, Tensor]]:
    """Return each rank's result."""
    return [function(*args)] if ranks == 1 else run_ranks(function, ranks, *args)


ON = pytest.mark.parametrize("ranks", [1, 2, 4])


@ON
@pytest.mark.parametrize("name", TASKS)
def test_it_trains_as_plain_torch_does(tmp_path: Path, ranks: int, name: str) -> None:
    ours, *others = on(ranks, with_kit, tmp_path, name, -1, 0.0, torch.float64)
    theirs, *_ = on(ranks, with_torch, name)  # of whose ranks each keeps its own statistics of batch norms
    for part, x in theirs.items():
        # fp64; Adam divides by the root of a second moment, which for 12 steps multiplies rounding by some thousands
        assert torch.allclose(ours[part], x, rtol=0, atol=1e-9), part
    for other in others:
        assert [part for part in ours if not torch.equal(ours[part], other[part])] in ([], ["drawn"])
    assert not torch.allclose(ours["averaged"], ours[TASKS[name].average], atol=1e-6)


@ON
@pytest.mark.parametrize("name", TASKS)
def test_killed_at_any_step_it_continues_to_the_bit(tmp_path: Path, ranks: int, name: str) -> None:
    whole = on(ranks, with_kit, tmp_path / "whole", name)
    for step in (1, 4, 6) if ranks == 1 else (2,):
        if ranks == 1:
            process = get_context("fork").Process(target=with_kit, args=(tmp_path / "killed", name, step))
            process.start()
            process.join(60)
            assert process.exitcode == -signal.SIGKILL
        else:
            with pytest.raises(RankError, match="died with exit code -9"):
                run_ranks(with_kit, ranks, tmp_path / "killed", name, step)
    for before, after in zip(whole, on(ranks, with_kit, tmp_path / "killed", name), strict=True):
        assert [part for part in before if not torch.equal(after[part], before[part])] == []


def test_the_loader_is_stateful_for_torch_distributed_checkpoint(tmp_path: Path) -> None:
    loader = warpfold.Ready(Fixed(Sentences()), 4, workers=0, collate=padded)
    batches = iter(loader)
    next(batches)
    dcp.save({"loader": loader}, checkpoint_id=tmp_path / "dcp")
    rest = [batch["letters"] for batch in batches]
    again = warpfold.Ready(Fixed(Sentences()), 4, workers=0, collate=padded)
    dcp.load({"loader": again}, checkpoint_id=tmp_path / "dcp")
    assert all(torch.equal(x, batch["letters"]) for x, batch in zip(rest, again, strict=True))


def _with_dcp(folder: Path) -> list[str]:
    """Train two steps, save by torch.distributed.checkpoint, train a third; load it, and train it again."""
    model, loader = prepared(TASKS["language"], 0.0, torch.float64)
    optimizer = warpfold.Flat(model, torch.optim.AdamW, lr=RATE)
    warpfold.Replicas(model, optimizer)

    def train(batches: list[Any]) -> dict[str, Tensor]:
        for batch in batches:
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: x.detach().clone() for name, x in model.state_dict().items()}

    batches = list(loader)
    train(batches[:2])
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
    expected = train(batches[2:3])
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
    states = {"model_state_dict": of_model, "optim_state_dict": of_optimizer}
    set_state_dict(model, optimizer, **states, options=StateDictOptions(strict=False))  # what is unused has no state
    found = train(batches[2:3])
    return [name for name, x in expected.items() if not torch.equal(found[name], x)]


def test_ranks_save_and_load_by_torch_distributed_checkpoint(tmp_path: Path) -> None:
    assert run_ranks(_with_dcp, 2, tmp_path / "dcp") == [[], []]


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
