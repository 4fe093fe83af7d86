"""Bits that flip in a run that is otherwise right: in a weight, a moment, an activation, a gradient, a message."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import RankError, run_ranks
from tests.training.runs import tiny_run
from warpfold.data.store.store import Store
from warpfold.engine import optim
from warpfold.engine.learn import Learner
from warpfold.engine.optim import Optimizer
from warpfold.model.alphafold import AlphaFold
from warpfold.parallel.exchange import Segment
from warpfold.parallel.mesh import make_mesh
from warpfold.parallel.plan import Plan
from warpfold.parallel.process import ProcessInfo
from warpfold.parallel.reducer import Reducer
from warpfold.parallel.team import Team
from warpfold.parallel.witness import CorruptionError, Finding
from warpfold.training.config import RunConfig
from warpfold.training.train import train

Place = Literal["weight", "resting weight", "moment", "activation", "gradient", "message", "update"]
PLACES = get_args(Place)


@dataclass(frozen=True)
class Flip:
    """One bit, flipped once.  The weight and the moment flip during a step, a resting weight right after it.

    at: which number, 0 to 1 of all there are.  bit: of its 32.
    """

    place: Place
    step: int
    rank: int
    at: float = 0.5
    bit: int = 20

    def apply(self, x: Tensor) -> None:
        """Flip the bit in x, in place, unnoticed by autograd."""
        flat = x.detach().view(-1)
        number = int(self.at * len(flat))
        flat[number : number + 1].view(torch.int32).bitwise_xor_(-(2**31) if self.bit == 31 else 1 << self.bit)

    def of_parameters(self, flat: Tensor, segments: Sequence[Segment]) -> None:
        """Flip the bit in a flat buffer, but not in what lies between parameters."""
        numbers = sum(one.where.stop - one.where.start for one in segments)
        left = int(self.at * numbers)
        for one in segments:
            size = one.where.stop - one.where.start
            if left < size:
                place = one.where.start + left
                Flip(self.place, self.step, self.rank, 0.0, self.bit).apply(flat[place : place + 1])
                return
            left -= size


class _Arriving:
    """A collective under way, whose result changes when it is there."""

    def __init__(self, work: Any, change: Callable[[], None]) -> None:
        self._work, self._change = work, change

    def wait(self) -> None:
        """Wait for it, and change it, once."""
        self._work.wait()
        self._change()
        self._change = lambda: None


def plant(flip: Flip, patch: pytest.MonkeyPatch) -> None:
    """Have the bit flip in the run that this process, or the ranks that are forked from it, begins next."""
    steps, done = [0], [False]

    def due() -> bool:
        rank = dist.get_rank() if dist.is_initialized() else 0
        if done[0] or (steps[0], rank) != (flip.step, flip.rank):
            return False
        done[0] = True
        return True

    def owned(optimizer: Optimizer) -> list[Segment]:
        return optimizer.layout.segments(optimizer.reducer.shards, optimizer.reducer.shard_index)

    def around(owner: Any, name: str, change: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **more: change(original, *args, **more))

    def step(original: Any, learner: Learner, number: int) -> Any:
        result = original(learner, number)
        if flip.place == "resting weight" and due():
            flip.of_parameters(learner.optimizer.owned, owned(learner.optimizer))
        steps[0] += 1
        return result

    def learn(original: Any, learner: Learner, *args: Any) -> Any:
        found, optimizer = original(learner, *args), learner.optimizer
        if due():
            flat = optimizer.rule.moments["moment2"] if flip.place == "moment" else optimizer.owned
            flip.of_parameters(flat, owned(optimizer))
        return found

    def trunk(original: Any, *args: Any, **more: Any) -> Any:
        found = original(*args, **more)
        if due():
            flip.apply(found.pair)
        return found

    def finish(original: Any, reducer: Reducer) -> Tensor:
        gradient: Tensor = original(reducer)
        if due():
            flip.of_parameters(gradient, reducer.layout.segments(reducer.mesh.model.size, reducer.mesh.model.rank))
        return gradient

    def send(original: Any, out: Tensor, x: Tensor, **more: Any) -> Any:
        work = original(out, x, **more)
        changes = out.dtype == torch.float32 and due()
        return _Arriving(work, partial(flip.apply, out)) if changes else work

    def update(original: Any, weights: Tensor, *args: Any) -> Any:
        result = original(weights, *args)
        if due():
            flip.apply(weights)
        return result

    around(Learner, "step", step)
    places: dict[str, tuple[Any, str, Callable[..., Any]]] = {
        "weight": (Learner, "learn", learn),
        "moment": (Learner, "learn", learn),
        "activation": (AlphaFold, "_trunk_of_pass", trunk),
        "gradient": (Reducer, "finish", finish),
        "message": (dist, "all_to_all_single", send),
        "update": (optim, "adam_step", update),
    }
    if flip.place in places:
        around(*places[flip.place])


def config_for(
    plan: Plan | None = None, accumulate: int = 0, optim: Mapping[str, Any] | None = None, **more: Any
) -> RunConfig:
    """A short run in which every step is witnessed; accumulate: 0, an example for each data rank.  more: of [train]."""
    plan = plan or Plan()
    config = tiny_run(**({"steps": 2, "witness": 1.0, "validation": 0.0, "save_every": 9} | more))
    changes = {"accumulate": accumulate or plan.data, **(optim or {})}
    return replace(config, plan=plan, optim=replace(config.optim, **changes))


def run(config: RunConfig, store: Store, out: Path) -> tuple[int, Finding] | str:
    """What a witness found in a run, and at which step; or what else ended it, "" for a run that ended well."""
    plan = config.plan

    def on_a_rank() -> tuple[int, Finding] | None:
        mesh = make_mesh(plan.data, plan.axial, plan.branch)
        try:
            train(config, store, out, team=Team(ProcessInfo(mesh.world.rank, mesh.world.size), mesh))
        except CorruptionError as error:
            return error.step, error.finding
        return None

    try:
        first, *others = run_ranks(on_a_rank, plan.data * plan.axial * plan.branch)
    except RankError as error:
        return str(error)
    return (first or "") if all(other == first for other in others) else f"ranks differ: {[first, *others]}"
