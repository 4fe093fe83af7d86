"""The loops of docs/kit.md on 1, 2 and 4 processes: killed, and continued to the bit; and what the kit goes with."""

import importlib
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import warpfold
from tests.engine.small_models import Sentences, padded
from tests.ranks import RankError, run_ranks
from tests.test_docs import ROOT, blocks
from warpfold.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")  # as on the ranks


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    """A folder with the files of the page."""
    for block in blocks(ROOT / "docs" / "kit.md", "python"):
        if name := re.match(r"# (\w+\.py)\n", block):
            (tmp_path / name[1]).write_text(block, encoding="utf-8")
    return tmp_path


def run(scripts: Path, name: str, folder: Path, kill_at: int = 0) -> list[Tensor]:
    """Train as a script of the page does, on this rank; die before checkpoint `kill_at`.  Return all it ends with."""
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

    warpfold.Checkpoints.save = dying(warpfold.Checkpoints.save)  # type: ignore[method-assign]
    dcp.save = dying(dcp.save)
    result = importlib.import_module(name).train(folder)
    every = [x for part in (result if isinstance(result, tuple) else (result,)) for x in part.state_dict().values()]
    whole = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in every]
    return [x.detach().clone() for x in whole] + [torch.rand(2)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", ["train", "sharded"])
def test_a_script_of_the_page_continues_to_the_bit(scripts: Path, name: str, ranks: int) -> None:
    whole = run_ranks(run, ranks, scripts, name, scripts / "whole")
    with pytest.raises(RankError, match="died with exit code -9"):
        run_ranks(run, ranks, scripts, name, scripts / "killed", 2)
    for before, after in zip(whole, run_ranks(run, ranks, scripts, name, scripts / "killed"), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    for other in whole:  # the noise of each is its own
        assert all(torch.equal(x, y) for x, y in zip(whole[0][:-1], other[:-1], strict=True))


def test_the_loader_is_stateful_for_torch_distributed_checkpoint(tmp_path: Path) -> None:
    loader = warpfold.Ready(Sentences(), 4, workers=0, collate=padded)
    batches = iter(loader)
    next(batches)
    dcp.save({"loader": loader}, checkpoint_id=tmp_path / "dcp")
    rest = [batch["letters"] for batch in batches]
    again = warpfold.Ready(Sentences(), 4, workers=0, collate=padded)
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
