"""AlphaFold's optimiser (Supp. 1.11.3): each example's gradient is clipped, the mean feeds Adam, weights are averaged.

All parameters live in one flat buffer, and so do their gradients, Adam's moments and the moving average.  Clipping,
Adam and averaging are then a handful of operations whatever the number of parameters: thousands of tiny steps are not
spent in the optimiser, and gradients of several ranks can be summed in one piece.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Each parameter starts at a multiple of 64 bytes, as if it had been allocated alone: matrix kernels like it so.
ALIGN = 16


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """[optim]: Supp. 1.11.3 and 1.11.7; its counts of samples are steps here, one step being 128 samples there."""

    learning_rate: float = 1e-3
    warmup_steps: int = 1_000  # 128,000 samples
    decay_after_steps: int = 50_000  # 6,400,000 samples
    decay_factor: float = 0.95
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-6
    clip_norm: float = 0.1  # of each example's gradient
    average_decay: float = 0.999
    accumulate: int = 1  # examples per step and rank

    def __post_init__(self) -> None:
        if self.accumulate < 1:
            raise ValueError("accumulate must be at least 1")
        if not self.clip_norm > 0:
            raise ValueError("clip_norm must be positive; inf switches clipping off")
        if not 0 <= self.average_decay < 1:
            raise ValueError("average_decay must be at least 0 and below 1")


def learning_rate(config: OptimConfig, step: int) -> float:
    """The rate of step 0, 1, ...: a linear rise, then constant, then lower by a factor (Supp. 1.11.3)."""
    rise = min(1.0, (step + 1) / max(1, config.warmup_steps))
    return config.learning_rate * rise * (config.decay_factor if step >= config.decay_after_steps else 1.0)


class Optimizer:
    """Adam on the mean of clipped per-example gradients, and the moving average of the weights.

    After `loss.backward()` of each example comes `collect()`; after `accumulate` of them comes `step(i)`.
    The model's parameters (float32, on one device) become views of one buffer; keep the model where it is from then on.
    """

    def __init__(self, model: nn.Module, config: OptimConfig) -> None:
        self.config = config
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        starts, end = [], 0
        for p in named.values():
            starts.append(end)
            end += -(-p.numel() // ALIGN) * ALIGN
        self.slices = {
            name: (slice(start, start + p.numel()), p.shape) for start, (name, p) in zip(starts, named.items())
        }
        some = next(iter(named.values()))
        self.weights = torch.zeros(end, device=some.device, dtype=some.dtype)
        self.gradient = torch.zeros_like(self.weights)  # of the example at hand; every p.grad is a view of it
        self.total = torch.zeros_like(self.weights)  # of the clipped gradients since the last step
        for name, p in named.items():
            self._view(self.weights, name).copy_(p.detach())
            p.data = self._view(self.weights, name)
            p.grad = self._view(self.gradient, name)
        self.average = self.weights.clone()
        self.weights.grad = self.total
        betas = config.beta1, config.beta2
        self.adam = torch.optim.Adam([self.weights], betas=betas, eps=config.eps, fused=True)

    def _view(self, flat: Tensor, name: str) -> Tensor:
        where, shape = self.slices[name]
        return flat[where].view(shape)

    def collect(self) -> float:
        """Clip the gradient of one example by its global norm, add it to the step's sum, and clear it.

        Returns the norm before clipping.  A gradient that is not finite adds nothing: the caller sees it in the norm.
        """
        norm = float(torch.linalg.vector_norm(self.gradient))
        if norm < float("inf"):  # false for NaN too
            self.total.add_(self.gradient, alpha=min(1.0, self.config.clip_norm / max(norm, 1e-12)))
        self.gradient.zero_()
        return norm

    def step(self, step: int) -> float:
        """Adam on the mean over `accumulate` examples, then the moving average; returns the learning rate used."""
        rate = learning_rate(self.config, step)
        self.adam.param_groups[0]["lr"] = rate
        self.total.div_(self.config.accumulate)
        self.adam.step()
        self.total.zero_()
        self.average.lerp_(self.weights, 1 - self.config.average_decay)
        return rate

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it, the model has the averaged weights (for validation and for the saved parameters)."""
        trained = self.weights.clone()
        self.weights.copy_(self.average)
        try:
            yield
        finally:
            self.weights.copy_(trained)

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint holds: "weights.NAME", "average.NAME", "moment1.NAME", "moment2.NAME", and "steps"."""
        adam = self.adam.state[self.weights]
        zeros = torch.zeros_like(self.weights) if not adam else None  # before the first step Adam has no state
        flats = {
            "weights": self.weights,
            "average": self.average,
            "moment1": adam.get("exp_avg", zeros),
            "moment2": adam.get("exp_avg_sq", zeros),
        }
        named = {f"{kind}.{name}": self._view(flat, name) for kind, flat in flats.items() for name in self.slices}
        return {**named, "steps": adam.get("step", torch.tensor(0.0))}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `state`, exact to the bit.

        Errors: KeyError for a missing name, RuntimeError for one of another shape.
        """
        moments = torch.zeros_like(self.weights), torch.zeros_like(self.weights)
        flats = {"weights": self.weights, "average": self.average, "moment1": moments[0], "moment2": moments[1]}
        for kind, flat in flats.items():
            for name in self.slices:
                self._view(flat, name).copy_(state[f"{kind}.{name}"])
        steps = state["steps"].to(self.weights.device, copy=True)
        self.adam.state[self.weights] = {"step": steps, "exp_avg": moments[0], "exp_avg_sq": moments[1]}
