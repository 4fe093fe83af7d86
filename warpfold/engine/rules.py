"""Update rules on flat buffers: from the mean gradient to the weights.

A new rule is a subclass of `PlainRule` with its name in `RULES`.  `optim.name` then finds it, checkpoints hold its
state, and tests/engine/test_rules.py runs it against its definition once that is written there.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from warpfold.ops.adam import adam_step
from warpfold.parallel.buckets import ALIGN, Segment

if TYPE_CHECKING:
    from warpfold.engine.optim import OptimConfig


class Shard:
    """The flat part of the weights that this rank updates, and norms of whole parameters, which may cross shards.

    weights: the shard itself.  segments: where in it which part of which parameter lies.  names: of all parameters.
    sum_shards: sums a tensor over the ranks that hold the other shards, in place.
    """

    def __init__(
        self,
        weights: Tensor,
        segments: Sequence[Segment],
        names: Sequence[str],
        sum_shards: Callable[[Tensor], Tensor],
    ) -> None:
        self.weights, self._sum_shards, self._names = weights, sum_shards, len(names)
        number = {name: i for i, name in enumerate(names)}
        # Runs of rows of ALIGN elements: parameters begin at multiples of ALIGN, so no row has two.  What lies between
        # parameters belongs to one more, after the last.
        owners, lengths, end = [], [], 0
        for segment in segments:
            start, stop = segment.where.start // ALIGN, -(-segment.where.stop // ALIGN)
            owners += [len(names), number[segment.name]]
            lengths += [start - end, stop - start]
            end = stop
        owners.append(len(names))
        lengths.append(len(weights) // ALIGN - end)
        self._owners = torch.tensor(owners, device=weights.device)
        self._lengths, self._rows = torch.tensor(lengths, device=weights.device), sum(lengths)

    def norms(self, flat: Tensor) -> Tensor:
        """Return the norm of each parameter's part of the whole flat vector, [parameters]; flat: this rank's shard."""
        rows = flat.view(-1, ALIGN).square().sum(1).double()
        # unsafe: the check of the lengths would wait for the device.
        sums = torch.segment_reduce(rows, "sum", lengths=self._lengths, unsafe=True)
        squares = sums.new_zeros(self._names + 1)
        squares[self._owners[1::2]] = sums[1::2]  # a shard has at most one part of a parameter
        return self._sum_shards(squares)[:-1].sqrt().to(flat.dtype)

    def per_row(self, numbers: Tensor) -> Tensor:
        """Repeat a number for each parameter over its rows of `ALIGN` elements, [rows, 1]; 1 between parameters."""
        padded = torch.cat([numbers, numbers.new_ones(1)])
        return padded[self._owners].repeat_interleave(self._lengths, output_size=self._rows)[:, None]


@dataclass(frozen=True)
class Change:
    """A step that a rule is to take.  Numbers are tensors on the device, which the host does not wait for.

    gradient: this rank's shard, which the rule may write over; times `scale` it is the mean.  used: whether to take the
    step at all: where not, nothing changes, whatever the gradient holds.
    """

    gradient: Tensor
    scale: Tensor
    used: Tensor
    rate: Tensor


class Rule(ABC):
    """One way to change the weights by a gradient.

    A rule may keep two kinds of state; checkpoints hold both, and fit any number of ranks:

    moments     flat tensors of the shard's size, sharded as the weights are; in checkpoints "moment1.PARAMETER" ...
    replicated  tensors of any shape, the same on every rank: the steps taken, a number for each parameter, factors of
                a moment by row and by column (summed over the shards); in checkpoints under their own names
    """

    kept: ClassVar[tuple[str, ...]] = ()  # names of its moments
    decays_weights: ClassVar[bool] = True  # whether it uses optim.weight_decay

    def __init__(self, config: "OptimConfig", shard: Shard) -> None:
        self.config, self.shard = config, shard
        self.moments = {name: torch.zeros_like(shard.weights) for name in self.kept}
        self.steps = torch.zeros((), device=shard.weights.device)  # float32, as torch's fused Adam wants it
        self.replicated = {"steps": self.steps}

    @abstractmethod
    def take(self, change: Change, average: Tensor, packed: Tensor | None = None) -> None:
        """Change the shard's weights in place, their moving average, and their packed copy in another dtype."""


class PlainRule(Rule):
    """A rule that is written in plain torch, as `step`, and undone where the step is not used."""

    def take(self, change: Change, average: Tensor, packed: Tensor | None = None) -> None:
        """Take the rule's step; then put back what it changed, where the step is not used."""
        weights = self.shard.weights
        changing = [weights, *self.moments.values(), *self.replicated.values()]
        before = [tensor.clone() for tensor in changing]
        self.steps += 1
        self.step(change.rate, torch.where(change.used, change.gradient.mul_(change.scale), 0))
        for tensor, old in zip(changing, before):
            tensor.copy_(torch.where(change.used, tensor, old))
        average.copy_(torch.where(change.used, average.lerp(weights, 1 - self.config.average_decay), average))
        if packed is not None:
            packed.copy_(weights)

    @abstractmethod
    def step(self, rate: Tensor, gradient: Tensor) -> None:
        """Change the shard's weights in place; gradient: the mean, this rank's shard of it; `steps` counts this one."""


class Adam(Rule):
    """Adam (Kingma and Ba 2015, algorithm 1): one operation, one pass over the buffers."""

    kept = ("moment1", "moment2")
    decays_weights = False

    def take(self, change: Change, average: Tensor, packed: Tensor | None = None) -> None:
        c, m, v = self.config, self.moments["moment1"], self.moments["moment2"]
        self.steps += change.used
        numbers = change.used, change.scale.to(m.dtype), change.rate.to(m.dtype), self.steps
        factors = c.beta1, c.beta2, c.eps, c.average_decay
        adam_step(self.shard.weights, change.gradient, m, v, average, packed, *numbers, *factors)


class Lamb(PlainRule):
    """LAMB (You et al. 2020, algorithm 2): Adam's step, scaled in each parameter to the norm of its weights.

    The scaling function of norms is the identity; a parameter that is zero, or whose step is, is not scaled.
    """

    kept = ("moment1", "moment2")

    def step(self, rate: Tensor, gradient: Tensor) -> None:
        """Update the moments; subtract their unbiased ratio plus weight decay, scaled."""
        c, weights = self.config, self.shard.weights
        m, v = self.moments["moment1"], self.moments["moment2"]
        m.lerp_(gradient, 1 - c.beta1)
        v.mul_(c.beta2).addcmul_(gradient, gradient, value=1 - c.beta2)
        steps = self.steps.double()  # stays on the device: reading it would make the host wait
        root = (v / (1 - c.beta2**steps)).sqrt_().add_(c.eps)
        update = (m / (1 - c.beta1**steps)).div_(root).add_(weights, alpha=c.weight_decay)
        have, want = self.shard.norms(weights), self.shard.norms(update)
        trust = torch.where((have > 0) & (want > 0), have / want, 1)
        weights.view(-1, ALIGN).sub_(update.view(-1, ALIGN).mul_(rate * self.shard.per_row(trust)))


class Lars(PlainRule):
    """LARS (You et al. 2017, algorithm 1): momentum SGD whose rate in each parameter is trust |w| / (|g| + decay |w|).

    A parameter that is zero, or has no gradient, keeps the global rate.  The momentum is beta1.
    """

    kept = ("moment1",)

    def step(self, rate: Tensor, gradient: Tensor) -> None:
        c, weights = self.config, self.shard.weights
        have, slope = self.shard.norms(weights), self.shard.norms(gradient)
        local = torch.where((have > 0) & (slope > 0), c.trust * have / (slope + c.weight_decay * have), 1)
        update = gradient.add(weights, alpha=c.weight_decay).view(-1, ALIGN).mul_(rate * self.shard.per_row(local))
        weights.sub_(self.moments["moment1"].mul_(c.beta1).add_(update.view(-1)))


RULES: dict[str, type[Rule]] = {"adam": Adam, "lamb": Lamb, "lars": Lars}
