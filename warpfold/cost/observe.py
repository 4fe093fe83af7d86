"""Observe a running model: the operations that torch dispatches, and where in the model.

`Operations` tells of every operation of torch; `MadeAt` where a node of autograd's graph was made.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from warpfold.ops import dispatch
from warpfold.ops.torch_internals import DispatchMode, current_node, in_backward, next_node_number, node_number

T = TypeVar("T")
Seen = Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any], object]  # of a function, args, kwargs, and the result

SUMS = 2**62  # numbers from here on: nodes that sum gradients into parameters
# Operations of torch that launch nothing: they allocate, or replace the storage of a tensor.
ALLOCATE = {"set_", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
EXPONENTIALS = {"_softmax", "exp", "sigmoid", "softplus"}  # operations of torch that take one of each number
MODEL = "model"  # the layer of what the model does outside of its layers


class Operations(DispatchMode):
    """Tell `seen` of each of torch's operations within the context, forward and backward, once it has run.

    launchers: a registered operation of ours runs the launchers of its kernels on tensors without memory (device
    "meta"), and what these call is told of instead of the operation.
    """

    def __init__(self, seen: Seen, launchers: bool = False) -> None:
        super().__init__()
        self.seen, self.launchers = seen, launchers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self.launchers and func.namespace == "warpfold":
            with self:
                return dispatch.implementation(func._opname, args[0])(*args, **kwargs)
        out = func(*args, **kwargs)
        self.seen(func, args, kwargs, out)
        return out


class MadeAt(Generic[T]):
    """Where each node of autograd's graph was made: the backward pass runs at the place of the forward pass.

    A node carries the number of its making, which only grows within a thread.  Nodes that a recomputation makes in the
    backward pass are not noted: that may run in a thread with numbers of its own.
    """

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._places: list[T | None] = []

    def now(self, place: T | None) -> None:
        """Have nodes that are made from now on belong to a place; None: to nowhere."""
        if not in_backward():
            self.since(next_node_number(), place)

    def since(self, number: int, place: T | None) -> None:
        """Have nodes from this number on belong to a place."""
        self._numbers.append(number)
        self._places.append(place)

    def of(self, number: int) -> T | None:
        """Return the place of a node, by its number; None for those of nowhere, and for sums into parameters."""
        index = bisect_right(self._numbers, number) - 1
        return None if index < 0 or not 0 <= number < SUMS else self._places[index]

    def of_current(self) -> T | None:
        """Return the place of the node that the backward pass runs now."""
        node = current_node()
        return None if node is None else self.of(node_number(node))


def size(t: Tensor) -> int:
    """Return the bytes of a tensor's numbers."""
    return t.numel() * t.element_size()


def products(func: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> int:
    """Return the floating point operations of one of torch's operations, if it is a matrix product; else 0."""
    formula = flop_registry.get(func._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))
