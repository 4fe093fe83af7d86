"""Plant a flipped bit in a weight, a moment or a gradient of a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from warpfold.engine.learn import Learner
from warpfold.engine.optim import Optimizer
from warpfold.parallel.exchange import Segment
from warpfold.parallel.reducer import Reducer

Place = Literal["weight", "moment", "gradient"]
PLACES = get_args(Place)


@dataclass(frozen=True)
class Flip:
    """One bit, flipped once on one rank, in a step that is counted from 0 in the process.

    at: the number that changes, as a share of all numbers.  bit: of its 32.
    """

    place: Place
    step: int
    rank: int = 0
    at: float = 0.5
    bit: int = 20

    def apply(self, flat: Tensor, segments: Sequence[Segment]) -> None:
        """Flip the bit in a flat buffer, but not in the padding between parameters."""
        left = int(self.at * sum(one.where.stop - one.where.start for one in segments))
        for one in segments:
            size = one.where.stop - one.where.start
            if left < size:
                number = one.where.start + left
                flat.detach()[number : number + 1].view(torch.int32).bitwise_xor_(1 << self.bit)
                return
            left -= size


def plant(flip: Flip, patch: pytest.MonkeyPatch) -> None:
    """Flip the bit in the next run of this process or of ranks that are forked from it."""
    steps, done = [0], [False]
    finish, launch, learn, step = Reducer.finish, Reducer._launch, Learner.learn, Learner.step

    def due() -> bool:
        rank = dist.get_rank() if dist.is_initialized() else 0
        if done[0] or (steps[0], rank) != (flip.step, flip.rank):
            return False
        done[0] = True
        return True

    def owned(optimizer: Optimizer) -> list[Segment]:
        return optimizer.layout.segments(optimizer.reducer.shards, optimizer.reducer.shard_index)

    def counting(learner: Learner, number: int) -> Any:
        result = step(learner, number)
        steps[0] += 1
        return result

    def learning(learner: Learner, *args: Any) -> Any:
        found, optimizer = learn(learner, *args), learner.optimizer
        if flip.place != "gradient" and due():
            flat = optimizer.rule.moments["moment2"] if flip.place == "moment" else optimizer.owned
            flip.apply(flat, owned(optimizer))
        return found

    def finishing(reducer: Reducer) -> Tensor:
        gradient = finish(reducer)
        if flip.place == "gradient" and not reducer.early and due():
            flip.apply(gradient, reducer.layout.segments(reducer.mesh.model.size, reducer.mesh.model.rank))
        return gradient

    def launching(reducer: Reducer, bucket: int) -> None:
        # Data ranks exchange this bucket in the backward pass, so a later flip would have no effect.
        if flip.place == "gradient" and due():
            names = reducer.layout.members[bucket]
            flip.apply(reducer.summed, [one for one in reducer.layout.segments() if one.name in names])
        launch(reducer, bucket)

    patch.setattr(Learner, "step", counting)
    patch.setattr(Learner, "learn", learning)
    patch.setattr(Reducer, "finish", finishing)
    patch.setattr(Reducer, "_launch", launching)
