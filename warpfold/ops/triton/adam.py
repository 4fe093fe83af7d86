"""A step of Adam on a GPU: every element of the flat buffers is read once and written once.

With a packed copy in 16 bits a parameter moves 38 bytes: 4 for the gradient, 8 each for the weights, both moments and
the average, and 2 for the copy.
"""

import math

import triton
import triton.language as tl

from warpfold.ops.adam import FLAT
from warpfold.ops.dispatch import Operands
from warpfold.ops.triton.launch import configs, register
from warpfold.ops.triton.positions import cdiv


@triton.jit
def _unbias(time: tl.tensor, log: tl.tensor) -> tl.tensor:
    """Compute 1 - beta^time from log(beta).

    If the power is near 1, use nine terms of its series, because the difference would keep few digits in fp32.  In
    fp64, on a consumer GPU, the difference would take each thread longer than its loads.
    """
    x = time * log
    series = 1.0
    for term in tl.static_range(8):
        series = 1.0 + x / (9 - term) * series
    return tl.where(x > -0.5, -x * series, 1.0 - tl.exp(x))


@triton.jit
def _adam_step(
    weights: tl.tensor, gradient: tl.tensor, moment1: tl.tensor, moment2: tl.tensor, average: tl.tensor,
    packed: tl.tensor, used: tl.tensor, scale: tl.tensor, rate: tl.tensor, steps: tl.tensor, keep1: tl.tensor,
    take1: tl.tensor, keep2: tl.tensor, take2: tl.tensor, log1: tl.tensor, log2: tl.tensor, eps: tl.tensor,
    take: tl.tensor, numbers: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Take the step for BLOCK elements; keep, take and log: beta, 1 - beta and log(beta) of each moment."""
    if tl.load(used) != 0:
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        there = i < numbers
        time = tl.load(steps)
        unbias1, unbias2 = _unbias(time, log1), _unbias(time, log2)
        g = tl.load(gradient + i, mask=there, other=0) * tl.load(scale)
        m = tl.load(moment1 + i, mask=there, other=0) * keep1 + g * take1
        v = tl.load(moment2 + i, mask=there, other=0) * keep2 + g * g * take2
        root = tl.sqrt_rn(tl.div_rn(v, unbias2)) + eps
        step = tl.div_rn(tl.load(rate) * tl.div_rn(m, unbias1), root)
        w = tl.load(weights + i, mask=there, other=0) - step
        a = tl.load(average + i, mask=there, other=0)
        tl.store(moment1 + i, m, mask=there)
        tl.store(moment2 + i, v, mask=there)
        tl.store(weights + i, w, mask=there)
        tl.store(average + i, a + (w - a) * take, mask=there)
        if packed is not None:
            tl.store(packed + i, w.to(packed.dtype.element_ty), mask=there)


# There is one configuration: programs only stream, and tuning cannot run an operation that changes its operands.
ADAM = register("adam_step", _adam_step, configs("BLOCK", (1024, 4, 1)))


def adam_step(t: Operands) -> None:
    """Compute warpfold::adam_step."""
    weights, beta1, beta2 = t.weights, t.beta1, t.beta2
    kernel = ADAM.tiled((weights.numel(),), weights)
    kernel.run(
        (cdiv(weights.numel(), kernel["BLOCK"]),),
        **{name: getattr(t, name) for name in (*FLAT, "packed", "used", "scale", "rate", "steps", "eps")},
        keep1=beta1,
        take1=1 - beta1,
        keep2=beta2,
        take2=1 - beta2,
        log1=math.log(beta1) if beta1 else -math.inf,
        log2=math.log(beta2) if beta2 else -math.inf,
        take=1 - t.decay,
        numbers=weights.numel(),
    )
