"""Observe a running model: the dispatched torch operations, and the places where autograd nodes were created."""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from warpfold.ops import dispatch
from warpfold.ops.torch_internals import DispatchMode, current_node, in_backward, next_node_number, node_number

T = TypeVar("T")
# A callback with an operation, its arguments, its keyword arguments and its result.
Seen = Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any], object]

# Nodes that accumulate gradients into parameters have numbers from here on.
SUMS = 2**62
# Torch operations that launch nothing: they allocate, or replace the storage of a tensor.
ALLOCATE = {"set_", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
# Torch operations that compute one exponential per element.
EXPONENTIALS = {"_softmax", "exp", "sigmoid", "softplus"}
# Name of the model's code outside of its layers.
MODEL = "model"


class Operations(DispatchMode):
    """Call `seen` with each torch operation within the context, forward and backward, after it has run.

    launchers: for our registered operations, run the launchers of their kernels on meta tensors, and report the
    operations that these call instead.
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
    """Places of autograd nodes, so that the backward pass can be attributed to the place of the forward pass.

    The number of a node increases with each creation within a thread. Nodes that a recomputation creates in the
    backward pass are ignored, because it may run in a thread with its own numbers.
    """

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._places: list[T | None] = []

    def now(self, place: T | None) -> None:
        """Attribute nodes that are created from now on to a place; None for no place."""
        if not in_backward():
            self.since(next_node_number(), place)

    def since(self, number: int, place: T | None) -> None:
        """Attribute nodes from this number on to a place."""
        self._numbers.append(number)
        self._places.append(place)

    def of(self, number: int) -> T | None:
        """Return the place of a node by its number; None without a place, and for accumulation into parameters."""
        index = bisect_right(self._numbers, number) - 1
        return None if index < 0 or not 0 <= number < SUMS else self._places[index]

    def of_current(self) -> T | None:
        """Return the place of the node that the backward pass is running."""
        node = current_node()
        return None if node is None else self.of(node_number(node))


def size(t: Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return t.numel() * t.element_size()


def products(func: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> int:
    """Compute the floating point operations of a torch operation if it is a matrix product; otherwise 0."""
    formula = flop_registry.get(func._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))
