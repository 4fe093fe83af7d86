"""Observe a running model: what torch dispatches, which of our operations are called, and where in the model.

`Operations` tells of every operation of torch; `Spans` says which layer and which operation is at work, forward and
backward; `MadeAt` where a node of autograd's graph was made.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import Tensor, nn
from torch.autograd.profiler import record_function

from warpfold.model.axial import AxialUpdate
from warpfold.ops import dispatch
from warpfold.ops.dispatch import Op
from warpfold.ops.torch_internals import DispatchMode, current_node, in_backward, next_node_number, node_number

T = TypeVar("T")
Seen = Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any], object]  # of a function, args, kwargs, and the result

MARK = "warpfold: "  # before a place, in the names of a profile's ranges
DEPTH = 2  # of a path: modules as deep as this are layers, and so is every layer of the trunk
UNATTRIBUTED = "gradients of parameters"  # the layer of what runs backward and belongs to no span: sums into p.grad
SUMS = 2**62  # numbers from here on: nodes that sum gradients into parameters
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


@dataclass(frozen=True)
class Place:
    """A layer by its path in the model, an operation that it calls ("": none of ours), and the shape of its operand."""

    layer: str
    op: str = ""
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        """As a profile shows it: "evoformer.blocks.3.msa.row: attention [128, 256, 64]"."""
        return f"{self.layer}: {self.op} {list(self.shape)}" if self.op else self.layer


@dataclass
class OpCall:
    """A call of one of our operations: its place, arguments and result; the result is known when it has ended."""

    place: int
    args: tuple[Any, ...]
    result: Any = None

    def bytes(self, backward: bool) -> int:
        """Return the bytes that one pass must move: arguments and the result, or its gradient and the arguments'.

        Dropout that is drawn on the way is no tensor, and moves nothing.
        """
        tensors = [a for a in self.args if isinstance(a, Tensor)]
        given = sum(size(t) for t in tensors)
        wanted = sum(size(t) for t in tensors if t.requires_grad)
        return given + (size(self.result) if isinstance(self.result, Tensor) else 0) + (wanted if backward else 0)


def size(t: Tensor) -> int:
    """Return the bytes of a tensor's numbers."""
    return t.numel() * t.element_size()


@dataclass
class Spans:
    """Which layer and operation of a model is at work: hooks on its layers and calls of our operations open *spans*."""

    places: list[Place] = field(default_factory=list)
    made_at: MadeAt[int] = field(default_factory=MadeAt)
    on_call: Callable[[OpCall], None] = lambda call: None  # is told of every call of an operation that has ended
    _numbers: dict[Place, int] = field(default_factory=dict)
    _stack: list[int] = field(default_factory=list)

    @property
    def current(self) -> int:
        """The number of the place that is at work."""
        return self._stack[-1] if self._stack else self.number(Place(MODEL))

    def number(self, place: Place) -> int:
        """Return the number of a place, one for each."""
        if place not in self._numbers:
            self._numbers[place] = len(self.places)
            self.places.append(place)
        return self._numbers[place]

    @property
    def by_name(self) -> dict[str, Place]:
        """The places by the names that a profile has of them."""
        return {f"{MARK}{place}": place for place in self.places}

    def of_node(self, number: int) -> int:
        """Return the place of a node of autograd's graph."""
        found = self.made_at.of(number)
        return self.number(Place(UNATTRIBUTED)) if found is None else found

    def now(self) -> tuple[Place, bool]:
        """Return the place that is at work, and whether in the backward pass."""
        node = current_node() if in_backward() else None
        number = self.current if node is None else self.of_node(node_number(node))
        return self.places[number], node is not None

    @contextmanager
    def open(self, place: Place) -> Iterator[int]:
        """Be at a place within the context; its time is a range of a profile that runs."""
        number = self.number(place)
        self._stack.append(number)
        self.made_at.now(number)
        try:
            with record_function(f"{MARK}{place}"):
                yield number
        finally:
            self._stack.pop()
            self.made_at.now(self._stack[-1] if self._stack else None)

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Open spans for the layers of a model and for the operations that anything calls, within the context."""
        with ExitStack() as undo:
            for name, module in model.named_modules():
                if name.count(".") < DEPTH or isinstance(module, AxialUpdate):
                    self._hook(module, Place(name or MODEL), undo)
            undo.enter_context(dispatch.observed(self._call))
            yield

    def _call(
        self, original: Callable[..., Any], op: Op[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._stack and self.places[self._stack[-1]].op:  # one calls another: the outer one's work
            return original(op, *args, **kwargs)
        first = next((a for a in args if isinstance(a, Tensor)), None)
        shape = () if first is None else tuple(first.shape)
        with self.open(Place(self.places[self.current].layer, op.name, shape)) as number:
            ended = OpCall(number, (*args, *kwargs.values()))
            ended.result = original(op, *args, **kwargs)
            self.on_call(ended)
        return ended.result

    def _hook(self, module: nn.Module, place: Place, undo: ExitStack) -> None:
        entered: list[ExitStack] = []

        def enter(*_: Any) -> None:
            entered.append(ExitStack())
            entered[-1].enter_context(self.open(place))

        def leave(*_: Any) -> None:
            entered.pop().close()

        undo.callback(module.register_forward_pre_hook(enter).remove)
        undo.callback(module.register_forward_hook(leave, always_call=True).remove)
