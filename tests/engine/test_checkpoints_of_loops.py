"""Test checkpoints of a user's loop: consistent after a kill at any moment, and resuming without a changed bit."""

import importlib
import os
import random
import re
import signal
import sys
from collections import OrderedDict
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.engine.small_models import LanguageModel, Sentences, padded
from tests.ranks import RankError, forked, run_ranks
from tests.test_docs import ROOT, blocks
from warpfold.engine import checkpoint
from warpfold.engine.ready import Ready
from warpfold.engine.resume import Checkpoints
from warpfold.errors import UserError

EPOCHS = 3


pytestmark = pytest.mark.usefixtures("one_thread")  # like the children


def train(
    folder: Path, kill_at: int = -1, workers: int = 0, every: int = 2, window: int = 0
) -> dict[str, torch.Tensor]:
    """Train the language model.  kill_at: a step, or a synced file while its checkpoint is written."""
    torch.manual_seed(0)
    random.seed(0)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rates = torch.optim.lr_scheduler
    phases = [rates.LinearLR(optimizer, 0.1, total_iters=5), rates.MultiStepLR(optimizer, [9])]
    scheduler = rates.SequentialLR(optimizer, phases, [5])
    record = folder / "order.txt" if window else None
    loader = Ready(Sentences(), 4, workers=workers, seed=1, collate=padded, window=window, record=record)
    checkpoints = Checkpoints(folder)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader, "scheduler": scheduler}
    step, more = checkpoints.load_latest(**parts)
    losses = more.get("losses", [])
    with loader:
        for _ in range(loader.epoch, EPOCHS):
            for batch in loader:
                loss = model(batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                step += 1
                losses.append(loss.item())
                if step == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                if step % every == 0:
                    checkpoints.save(step, **parts, more={"losses": losses})
    return {**model.state_dict(), "losses": torch.tensor(losses), "drawn": torch.rand(3) + random.random()}


def killed(folder: Path, **how: Any) -> None:
    """Train in a process until it is killed."""
    synced = how.pop("synced", None)

    def run(pipe: Connection) -> None:
        if synced is not None:
            left = iter(range(synced))

            def sync(path: Path) -> None:
                if next(left, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)

            checkpoint.sync_path = sync
        train(folder, **how)

    with forked([run]) as [(process, _)]:
        process.join(60)
    assert process.exitcode == -signal.SIGKILL


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_a_run_that_is_killed_continues_to_the_bit(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    kills = sorted(random.Random(0).sample(range(1, 18), 4))
    for step in kills:
        killed(tmp_path / "killed", kill_at=step)
    # Kills while files, their folder and its name are written, and later.
    for synced in (0, 3, 4, 9):
        killed(tmp_path / "killed", synced=synced, every=1)
    assert_same(train(tmp_path / "killed"), whole)
    assert Checkpoints(tmp_path / "killed").steps()[-1] == 18


@pytest.mark.slow
@pytest.mark.parametrize("window", [0, 2])
def test_with_workers_too(tmp_path: Path, window: int) -> None:
    (tmp_path / "a").mkdir()
    steps = iter([2, 5, 7, 12, 15])
    killed(tmp_path / "a", kill_at=next(steps), workers=2, window=window)
    for step in steps:
        killed(tmp_path / "a", kill_at=step, workers=2, window=window)
    again = train(tmp_path / "a", workers=2, window=window)
    # An uninterrupted run follows the recorded order.
    if window:
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / "order.txt").write_bytes((tmp_path / "a" / "order.txt").read_bytes())
    assert_same(again, train(tmp_path / ("b" if window else "c"), workers=1, window=window))


class Anything:
    def __init__(self) -> None:
        self.state: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["held"]


def test_every_kind_of_value_comes_back(tmp_path: Path) -> None:
    x = torch.randn(4, 3)
    value = [
        {"a": x, 3: (x.T, x[1:], x.bfloat16()), None: True},
        OrderedDict(b=[np.arange(3, dtype=np.uint32), np.float64(0.1), np.zeros((0, 2))]),
        [float("nan"), float("inf"), 10**30, "ä", b"\0x", torch.tensor(7), torch.Size([2, 3]), x * 1j],
    ]
    one, other = Anything(), Anything()
    one.state = value
    Checkpoints(tmp_path).save(0, model=nn.BatchNorm1d(3), more={"any": one, "note": {"x": (1, [2.5])}, "t": x})
    norm = nn.BatchNorm1d(3)
    step, more = Checkpoints(tmp_path).load_latest(model=norm, more={"any": other})
    assert step == 0
    assert more["note"] == {"x": (1, [2.5])}
    assert torch.equal(more["t"], x)
    first, second, third = other.state
    assert torch.equal(first["a"], x)
    assert torch.equal(first[3][0], x.T)
    assert first[3][2].dtype == torch.bfloat16
    assert first[None] is True
    assert type(second) is OrderedDict
    assert second["b"][0].dtype == np.uint32
    assert (second["b"][0] == [0, 1, 2]).all()
    assert second["b"][1] == 0.1
    assert second["b"][2].shape == (0, 2)
    assert str(third[:5]) == str(value[2][:5])
    assert third[5] == 7
    assert torch.equal(third[7], x * 1j)
    assert (tmp_path / "step-00000000" / "state.safetensors").is_file()


def test_names_in_the_file_are_those_of_the_model(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = LanguageModel()
    path = Checkpoints(tmp_path).save(5, model=model)
    saved = load_file(path / "state.safetensors")
    assert torch.equal(saved["model.mlp.0.weight"], model.mlp[0].weight)
    # A shared parameter is saved once.
    assert sum("embed" in name or "head" in name for name in saved) == 1


def test_the_last_ones_stay_and_the_newest_whole_one_is_taken(tmp_path: Path, caplog: Any) -> None:
    model = nn.Linear(2, 2)
    one = Checkpoints(tmp_path / "one", keep=1)
    for step in (1, 2):
        one.save(step, model=model)
    assert one.steps() == [2]
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.load_latest(model=model) == (0, {})
    for step in (1, 2, 3):
        model.weight.data.fill_(step)
        checkpoints.save(step, model=model)
    assert checkpoints.steps() == [2, 3]
    (tmp_path / "step-00000003" / "state.json").write_text("{}")
    assert Checkpoints(tmp_path).load_latest(model=model).step == 2
    assert model.weight[0, 0] == 2
    assert "kept as damaged-step-00000003" in caplog.text


def _two(folder: Path) -> list[Any]:
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    loader = Ready(Sentences(), 2, workers=0, collate=padded)
    used = [next(iter(loader))["letters"]]
    Checkpoints(folder).save(1, loader=loader)
    drawn = torch.rand(3)
    torch.manual_seed(100)
    again = Ready(Sentences(), 2, workers=0, collate=padded)
    assert Checkpoints(folder).load_latest(loader=again).step == 1
    same = torch.equal(drawn, torch.rand(3))
    used.append(next(iter(again))["letters"])
    with pytest.raises(UserError, match="exists already"):  # on every rank
        Checkpoints(folder).save(1)
    return [same, loader.batches(0), used, drawn]


def test_each_rank_continues_with_its_own(tmp_path: Path) -> None:
    both = run_ranks(_two, 2, tmp_path)
    assert both[0][0]
    assert both[1][0]
    assert not torch.equal(both[0][3], both[1][3])
    assert not set(map(tuple, both[0][1])) & set(map(tuple, both[1][1]))
    loader = Ready(Sentences(), 4, workers=0, collate=padded)
    assert Checkpoints(tmp_path).load_latest(loader=loader).step == 1  # saved by two ranks
    assert len([*loader]) == 5


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, model=model, more={"a": 1})
    checkpoints.save(1, model=model)  # no new step
    for call, said in (
        (lambda: Checkpoints(tmp_path, keep=0), "keep = 0"),
        (lambda: checkpoints.save(2, model=3), "model is a int without state_dict"),
        (lambda: checkpoints.save(2, more={"x": {"y": [object()]}}), r"\['x'\]\[1\]\['y'\]\[0\]: is a object"),
        (lambda: checkpoints.save(2, more={"x": np.array(["a"])}), "more.x.* is an array of <U1"),
        (lambda: checkpoints.load_latest(optimizer=model), "has no optimizer. Leave it out"),
        (lambda: checkpoints.load_latest(loader=model), "has no loader. Leave it out"),
        (lambda: checkpoints.load_latest(more={"b": model}), "has no b. Leave it out"),
        (lambda: Checkpoints(tmp_path).save(3), "another run is writing there"),
    ):
        with pytest.raises(UserError, match=said) as error:
            call()
        assert "\n" not in str(error.value)
    assert checkpoints.steps() == [1]
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be made or written"):
        Checkpoints(tmp_path / "file").save(1)


# The loops of docs/howto/kit.md on 1, 2 and 4 processes


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    """Make a folder with the files of the page."""
    for block in blocks(ROOT / "docs" / "howto" / "kit.md", "python"):
        if name := re.match(r"# (\w+\.py)\n", block):
            (tmp_path / name[1]).write_text(block, encoding="utf-8")
    return tmp_path


def run_script(scripts: Path, name: str, folder: Path, kill_at: int = 0) -> list[Tensor]:
    """Run a script of the page on this rank, exit before checkpoint `kill_at`, and return the final state."""
    sys.path.insert(0, str(scripts))
    saved = 0

    def dying(save: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal saved
            saved += 1
            if saved == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return save(*args, **options)

        return call

    Checkpoints.save = dying(Checkpoints.save)  # type: ignore[method-assign]
    dcp.save = dying(dcp.save)
    result = importlib.import_module(name).train(folder)
    every = [x for part in (result if isinstance(result, tuple) else (result,)) for x in part.state_dict().values()]
    whole = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in every]
    return [x.detach().clone() for x in whole] + [torch.rand(2)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", ["train", "sharded"])
def test_a_script_of_the_page_continues_to_the_bit(scripts: Path, name: str, ranks: int) -> None:
    whole = run_ranks(run_script, ranks, scripts, name, scripts / "whole")
    with pytest.raises(RankError, match="died with exit code -9"):
        run_ranks(run_script, ranks, scripts, name, scripts / "killed", 2)
    for before, after in zip(whole, run_ranks(run_script, ranks, scripts, name, scripts / "killed"), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    # Each rank has its own noise.
    for other in whole:
        assert all(torch.equal(x, y) for x, y in zip(whole[0][:-1], other[:-1], strict=True))


def test_the_loader_is_stateful_for_torch_distributed_checkpoint(tmp_path: Path) -> None:
    loader = Ready(Sentences(), 4, workers=0, collate=padded)
    batches = iter(loader)
    next(batches)
    dcp.save({"loader": loader}, checkpoint_id=tmp_path / "dcp")
    rest = [batch["letters"] for batch in batches]
    again = Ready(Sentences(), 4, workers=0, collate=padded)
    dcp.load({"loader": again}, checkpoint_id=tmp_path / "dcp")
    assert all(torch.equal(x, batch["letters"]) for x, batch in zip(rest, again, strict=True))


def _fully_sharded(folder: Path) -> tuple[bool, bool]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(UserError, match=r"\['model'\]\['state'\]\['0.weight'\]: is a DTensor. Use ordinary tensors"):
        Checkpoints(folder).save(1, model=model)
    whole = StateDictOptions(full_state_dict=True)
    Checkpoints(folder).save(1, more={"model": get_model_state_dict(model, options=whole)})
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    saved = Checkpoints(folder).load_latest().more["model"]
    same = all(torch.equal(saved[name], x) for name, x in before.items())
    set_model_state_dict(model, saved, options=whole)
    return same, all(torch.equal(p.full_tensor(), before[name]) for name, p in model.named_parameters())


def test_fsdp_is_refused_and_its_whole_state_is_taken(tmp_path: Path) -> None:
    assert run_ranks(_fully_sharded, 2, tmp_path) == [(True, True)] * 2
