"""Dynamic loss scaling, for gradients in fp16 (Micikevicius et al. 2018, section 3.2).

Below 6e-8 a number is zero in fp16, and above 65,504 infinite.  The loss is multiplied by a power of two before the
backward pass, so that small gradients keep their digits, and the gradients of the parameters, which are summed in fp32,
are divided by it: what is computed stays the same.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

FIRST = 2.0**16
MOST = 2.0**24
GROWTH = 2_000  # steps without an overflow, after which the scale is doubled


class LossScale:
    """A factor of the loss, on the device: halved after a step in which a gradient overflowed, doubled after `GROWTH`
    steps in which none did; from 1 to `MOST`.
    """

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), FIRST, device=device)
        self.steps = torch.zeros((), device=device)  # since the scale was changed

    def overflowed(self, norm: Tensor, loss_is_finite: Tensor) -> Tensor:
        """Return whether a smaller scale may bring the norm of a gradient below infinity.

        At a scale of 1, or where the loss itself is not finite, it cannot: that is a failure of the example.
        """
        return loss_is_finite & ~norm.isfinite() & (self.scale > 1)

    def update(self, overflowed: Tensor) -> None:
        """End a step; overflowed: whether any gradient of it has."""
        grown = self.steps + 1 >= GROWTH
        up = torch.where(grown, (2 * self.scale).clamp(max=MOST), self.scale)
        self.scale.copy_(torch.where(overflowed, (self.scale / 2).clamp(min=1), up))
        self.steps.copy_(torch.where(overflowed | grown, 0, self.steps + 1))

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint holds: "loss_scale.scale" and "loss_scale.steps"."""
        return {"loss_scale.scale": self.scale, "loss_scale.steps": self.steps}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Bring back a `state`; a run that had no scale so far begins with the first."""
        for name, tensor in self.state().items():
            if name in state:
                tensor.copy_(state[name])
