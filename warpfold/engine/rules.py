"""Update rules on flat buffers: from the mean gradient to the weights.

A buffer may be one rank's shard of all parameters.  What a rule needs of a whole parameter, its norm, is summed over
the shards.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from warpfold.parallel.buckets import ALIGN, Segment


class Rule(Protocol):
    """moments: flat tensors as long as the weights, by name.  steps: taken so far, a float32 number in a tensor."""

    moments: dict[str, Tensor]
    steps: Tensor

    def step(self, rate: float, gradient: Tensor) -> None:
        """Change the weights, in place."""
        ...


class Adam:
    """Adam (Kingma and Ba 2015, algorithm 1), torch's fused kernel: one pass over the buffers."""

    def __init__(self, weights: Tensor, betas: tuple[float, float], eps: float) -> None:
        self.moments = {"moment1": torch.zeros_like(weights), "moment2": torch.zeros_like(weights)}
        self.steps = torch.zeros((), device=weights.device)
        self._weights = weights.detach()  # the same memory; its grad is its own
        self._adam = torch.optim.Adam([self._weights], betas=betas, eps=eps, fused=True)
        self._adam.state[self._weights] = {
            "step": self.steps,
            "exp_avg": self.moments["moment1"],
            "exp_avg_sq": self.moments["moment2"],
        }

    def step(self, rate: float, gradient: Tensor) -> None:
        self._adam.param_groups[0]["lr"] = rate
        self._weights.grad = gradient
        self._adam.step()


class Norms:
    """Norms of all parameters from shards of them.

    segments: what of which parameter lies in this shard.  total: sums a tensor over the shards, in place.
    """

    def __init__(
        self, segments: Sequence[Segment], names: Sequence[str], like: Tensor, total: Callable[[Tensor], Tensor]
    ) -> None:
        number = {name: i for i, name in enumerate(names)}
        self._names, self._total = len(names), total
        owners, lengths, end = [], [], 0
        for segment in segments:
            start, stop = segment.where.start // ALIGN, -(-segment.where.stop // ALIGN)
            owners += [len(names), number[segment.name]]  # what lies between parameters belongs to one more
            lengths += [start - end, stop - start]
            end = stop
        owners.append(len(names))
        lengths.append(len(like) // ALIGN - end)
        self._owners = torch.tensor(owners, device=like.device)
        self._lengths, self._rows = torch.tensor(lengths, device=like.device), sum(lengths)

    def __call__(self, flat: Tensor) -> Tensor:
        """The norm of each parameter's part of the whole flat vector, [parameters]."""
        rows = flat.view(-1, ALIGN).square().sum(1).double()
        sums = torch.segment_reduce(rows, "sum", lengths=self._lengths, unsafe=True)  # to check them is to read them
        squares = sums.new_zeros(self._names + 1)
        squares[self._owners[1::2]] = sums[1::2]  # a shard has at most one part of a parameter
        return self._total(squares)[:-1].sqrt().to(flat.dtype)

    def spread(self, numbers: Tensor) -> Tensor:
        """A number for each parameter -> for every row of `ALIGN` elements, [rows, 1]; 1 between the parameters."""
        padded = torch.cat([numbers, numbers.new_ones(1)])
        return padded[self._owners].repeat_interleave(self._lengths, output_size=self._rows)[:, None]


class Lamb:
    """LAMB (You et al. 2020, algorithm 2): Adam's step, scaled in each parameter to the norm of its weights.

    The scaling function of norms is the identity; a parameter that is zero, or whose step is, is not scaled.
    """

    def __init__(
        self, weights: Tensor, betas: tuple[float, float], eps: float, weight_decay: float, norms: Norms
    ) -> None:
        self.moments = {"moment1": torch.zeros_like(weights), "moment2": torch.zeros_like(weights)}
        self.steps = torch.zeros((), device=weights.device)
        self._weights, self._betas, self._eps, self._decay, self._norms = weights, betas, eps, weight_decay, norms

    def step(self, rate: float, gradient: Tensor) -> None:
        """Moments, their ratio without bias, plus weight decay; scaled, and subtracted."""
        beta1, beta2 = self._betas
        m, v = self.moments["moment1"], self.moments["moment2"]
        self.steps += 1
        m.lerp_(gradient, 1 - beta1)
        v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        steps = self.steps.double()  # on the device: a number that is read is waited for
        root = (v / (1 - beta2**steps)).sqrt_().add_(self._eps)
        update = (m / (1 - beta1**steps)).div_(root).add_(self._weights, alpha=self._decay)
        have, want = self._norms(self._weights), self._norms(update)
        trust = torch.where((have > 0) & (want > 0), have / want, 1)
        self._weights.view(-1, ALIGN).sub_(update.view(-1, ALIGN).mul_(rate * self._norms.spread(trust)))


class Lars:
    """LARS (You et al. 2017, algorithm 1): momentum SGD whose rate in each parameter is trust |w| / (|g| + decay |w|).

    A parameter that is zero, or has no gradient, keeps the global rate.
    """

    def __init__(self, weights: Tensor, momentum: float, trust: float, weight_decay: float, norms: Norms) -> None:
        self.moments = {"moment1": torch.zeros_like(weights)}
        self.steps = torch.zeros((), device=weights.device)
        self._weights, self._momentum, self._trust, self._decay = weights, momentum, trust, weight_decay
        self._norms = norms

    def step(self, rate: float, gradient: Tensor) -> None:
        self.steps += 1
        weight, slope = self._norms(self._weights), self._norms(gradient)
        local = self._trust * weight / (slope + self._decay * weight)
        local = torch.where((weight > 0) & (slope > 0), local, 1)
        update = gradient.add(self._weights, alpha=self._decay).view(-1, ALIGN).mul_(rate * self._norms.spread(local))
        velocity = self.moments["moment1"].mul_(self._momentum).add_(update.view(-1))
        self._weights.sub_(velocity)
