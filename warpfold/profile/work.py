"""Count what a model has to do, layer by layer and operation by operation: products, exponentials, bytes, calls.

The model runs by its definitions on tensors without memory.  One of our operations must read its arguments and write
its result once (backward: arguments and the result's gradient read, gradients written); of torch's own operations each
reads and writes what it is given.  What is computed again in a backward pass is not counted.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from warpfold.check.op_profile import Cost
from warpfold.cost.launches import EXPONENTIALS, launches, products
from warpfold.cost.observe import OpCall, Operations, Spans, size
from warpfold.ops.torch_internals import tree_leaves


@dataclass(frozen=True)
class WorkKey:
    """A layer, an operation (ours or torch's), the shape of its operand (of ours), and whether it ran backward."""

    layer: str
    op: str
    shape: tuple[int, ...]
    backward: bool


@dataclass
class CountedWork:
    """What was to be done at one key."""

    flops: int = 0
    exps: int = 0
    bytes: int = 0
    calls: int = 0

    @property
    def cost(self) -> Cost:
        """The same, as cost/rates.py takes it."""
        return Cost(self.flops, self.exps, self.bytes)


def work_of(model: nn.Module, run: Callable[[Spans], object]) -> dict[WorkKey, CountedWork]:
    """Count what `run` does with a model on "meta", which must be bound to its definitions.

    run: is given the spans, to open some of its own.
    """
    spans, found = Spans(), defaultdict[WorkKey, CountedWork](CountedWork)

    def seen(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Add what one operation costs to its place."""
        flops = products(func, args, kwargs, out)
        if not (flops or launches(func, (args, kwargs), out)):
            return
        place, backward = spans.now()
        one = found[WorkKey(place.layer, place.op or func._opname, place.shape, backward)]
        one.flops += flops
        if func._opname in EXPONENTIALS:
            one.exps += sum(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))
        if not place.op:
            one.bytes += sum(size(t) for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor))
            one.calls += 1

    def called(call: OpCall) -> None:
        """Count the bytes of one of our operations, and of its backward pass."""
        place, differentiable = spans.places[call.place], isinstance(call.result, Tensor) and call.result.requires_grad
        for backward in (False, True) if differentiable else (False,):
            one = found[WorkKey(place.layer, place.op, place.shape, backward)]
            one.bytes += call.bytes(backward)
            one.calls += 1

    spans.on_call = called
    with torch.device("meta"), spans.watching(model), Operations(seen):
        run(spans)
    for key, one in list(found.items()):
        if key.backward:  # an ideal backward pass takes its exponentials again, rather than keep them
            forward = found.get(WorkKey(key.layer, key.op, key.shape, False))
            one.exps = max(one.exps, forward.exps) if forward is not None else one.exps
    return dict(found)
