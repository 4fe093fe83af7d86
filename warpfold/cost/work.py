"""Count what a model has to do, layer by layer and operation by operation: products, exponentials, bytes, calls.

The model runs by its definitions on tensors without memory.  One of our operations must read its arguments and write
its result once (backward: arguments and the result's gradient read, gradients written); of torch's own operations each
reads and writes what it is given.  What is computed again in a backward pass is not counted.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from warpfold.check.op_profile import Cost
from warpfold.cost.launches import launches, products
from warpfold.cost.spans import OpCall, Spans, size

EXPONENTIALS = {"_softmax", "exp", "sigmoid", "softplus"}  # operations of torch that take one of each number


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
        """The same, as cost/roofline.py takes it."""
        return Cost(self.flops, self.exps, self.bytes)


class _Counting(TorchDispatchMode):
    def __init__(self, spans: Spans, device: Literal["meta", "cpu"]) -> None:
        super().__init__()
        self.spans, self.device = spans, device
        self.found: dict[WorkKey, CountedWork] = defaultdict(CountedWork)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        node = torch._C._current_autograd_node() if torch._C._current_graph_task_id() != -1 else None
        place = self.spans.places[self.spans.current if node is None else self.spans.of_node(node._sequence_nr())]
        flops = products(func, args, kwargs, out)
        launched = launches(func, (args, kwargs), out, self.device == "cpu")
        if not (flops or launched):
            return out
        op = place.op or func._opname
        one = self.found[WorkKey(place.layer, op, place.shape, node is not None)]
        one.flops += flops
        if func._opname in EXPONENTIALS:
            one.exps += sum(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))
        if not place.op:
            one.bytes += sum(size(t) for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor))
            one.calls += 1
        return out

    def called(self, call: OpCall) -> None:
        """Count the bytes of one of our operations, and of its backward pass."""
        place = self.spans.places[call.place]
        one = self.found[WorkKey(place.layer, place.op, place.shape, False)]
        one.bytes += call.bytes(False)
        one.calls += 1
        if isinstance(call.result, Tensor) and call.result.requires_grad:
            back = self.found[WorkKey(place.layer, place.op, place.shape, True)]
            back.bytes += call.bytes(True)
            back.calls += 1


def work_of(
    model: nn.Module, run: Callable[[Spans], object], device: Literal["meta", "cpu"] = "meta"
) -> dict[WorkKey, CountedWork]:
    """Count what `run` does with a model on a device, which must be bound to its definitions.

    run: is given the spans, to open some of its own.  device: "meta", where sizes cost nothing, or "cpu", where tiny
    ones are counted ten times as fast; there numbers of the host cannot be told from tensors, and count.
    """
    spans = Spans()
    counting = _Counting(spans, device)
    spans.on_call = counting.called
    with torch.device(device), spans.watching(model), counting:
        run(spans)
    for key, one in list(counting.found.items()):
        if key.backward:  # an ideal backward pass takes its exponentials again, rather than keep them
            forward = counting.found.get(WorkKey(key.layer, key.op, key.shape, False))
            one.exps = max(one.exps, forward.exps) if forward is not None else one.exps
    return dict(counting.found)
