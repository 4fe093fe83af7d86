"""A step of Adam on a CPU: torch's fused kernel, then the average and the packed copy.

Blocks that stay in cache were not faster.  On one core they took 1.00 times as long with 2^17 elements per block and
1.08 times with 2^15, and on two cores much longer, because each operation on a block synchronises the threads (8
million elements, 2026-11-22).
"""

from torch.optim.adam import adam

from warpfold.ops.dispatch import Operands


def adam_step(t: Operands) -> None:
    """Compute warpfold::adam_step."""
    # Reading a value on a CPU does not wait for a device.
    if not t.used:
        return
    if t.scale != 1:
        t.gradient.mul_(t.scale)
    adam(
        [t.weights],
        [t.gradient],
        [t.moment1],
        [t.moment2],
        [],
        # torch increments this copy of the step number.
        [t.steps - 1],
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
