"""A step of Adam on a CPU: torch's fused kernel, then the average and the packed copy.

Blocks that stay in cache were no faster: 1.00 times this on one core at 2^17 numbers and 1.08 at 2^15, and far slower
on two, as each operation on a block has its threads meet (8 million numbers, 2026-11-22).
"""

from torch import Tensor
from torch.optim.adam import adam


def adam_step(
    weights: Tensor,
    gradient: Tensor,
    moment1: Tensor,
    moment2: Tensor,
    average: Tensor,
    packed: Tensor | None,
    used: Tensor,
    scale: Tensor,
    rate: Tensor,
    steps: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
) -> None:
    """Compute warpfold::adam_step."""
    if not used:  # on a CPU reading a number waits for nothing
        return
    if scale != 1:
        gradient.mul_(scale)
    adam(
        [weights],
        [gradient],
        [moment1],
        [moment2],
        [],
        [steps - 1],  # torch counts the step itself, in this copy
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=float(rate),
        weight_decay=0.0,
        eps=eps,
        maximize=False,
    )
    average.lerp_(weights, 1 - decay)
    if packed is not None:
        packed.copy_(weights)
