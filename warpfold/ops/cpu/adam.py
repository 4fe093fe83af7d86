"""A step of Adam on a CPU: torch's fused kernel, then the average and the packed copy.

Blocks that stay in cache were no faster: 1.00 times this on one core at 2^17 numbers and 1.08 at 2^15, and far slower
on two, as each operation on a block has its threads meet (8 million numbers, 2026-11-22).
"""

from torch.optim.adam import adam

from warpfold.ops.dispatch import Operands


def adam_step(t: Operands) -> None:
    """Compute warpfold::adam_step."""
    if not t.used:  # on a CPU reading a number waits for nothing
        return
    if t.scale != 1:
        t.gradient.mul_(t.scale)
    adam(
        [t.weights],
        [t.gradient],
        [t.moment1],
        [t.moment2],
        [],
        [t.steps - 1],  # torch counts the step itself, in this copy
        fused=True,
        amsgrad=False,
        beta1=t.beta1,
        beta2=t.beta2,
        lr=float(t.rate),
        weight_decay=0.0,
        eps=t.eps,
        maximize=False,
    )
    t.average.lerp_(t.weights, 1 - t.decay)
    if t.packed is not None:
        t.packed.copy_(t.weights)
