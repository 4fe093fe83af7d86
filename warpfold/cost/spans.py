"""Say which layer and which operation of the model is at work, forward and backward, while something watches.

Hooks on the model's layers, and a look at every call of an operation (ops/dispatch.py), open and close *spans*.  A node
of autograd's graph carries the number of its making, which only grows; so what runs in the backward pass belongs to the
innermost span during which its node was made.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from warpfold.model.axial import AxialUpdate
from warpfold.ops.dispatch import Op

MARK = "warpfold span "  # before the number of a place, in the names of a profile's ranges
DEPTH = 2  # of a path: modules as deep as this are layers, and so is every layer of the trunk
OUTSIDE = "gradients of parameters"  # the layer of what runs backward and belongs to no span: sums into p.grad
MODEL = "model"  # the layer of what the model does outside of its layers


@dataclass(frozen=True)
class Place:
    """A layer by its path in the model, an operation that it calls ("": none of ours), and the shape of its operand."""

    layer: str
    op: str = ""
    shape: tuple[int, ...] = ()


@dataclass
class OpCall:
    """A call of one of our operations: its place, arguments and result; the result is known when it has ended."""

    place: int
    args: tuple[Any, ...]
    result: Any = None

    def bytes(self, backward: bool) -> int:
        """Return what one pass must move: arguments read, the result written, or its gradient read and those written.

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
    """What was seen: the places, and during which numbers of autograd's nodes each was at work."""

    places: list[Place] = field(default_factory=list)
    owners: dict[int, int] = field(default_factory=dict)  # of a node, by its number: the innermost place
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

    def of_node(self, number: int) -> int:
        """Return the place of a node of autograd's graph."""
        found = self.owners.get(number)
        return self.number(Place(OUTSIDE)) if found is None else found

    @contextmanager
    def open(self, place: Place) -> Iterator[int]:
        """Be at a place within the context; its time is a range of a profile that runs."""
        number, forward = self.number(place), torch._C._current_graph_task_id() == -1
        begin = torch.autograd._get_sequence_nr() if forward else 0
        self._stack.append(number)
        try:
            with record_function(f"{MARK}{number}"):
                yield number
        finally:
            self._stack.pop()
            if forward:  # not what is computed again in a backward pass: its nodes are not the graph's
                for node in range(begin, torch.autograd._get_sequence_nr()):
                    self.owners.setdefault(node, number)

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Open spans for the layers of a model and for the operations that anything calls, within the context."""
        with ExitStack() as undo:
            for name, module in model.named_modules():
                if name.count(".") < DEPTH or isinstance(module, AxialUpdate):
                    self._hook(module, Place(name or MODEL), undo)
            original = Op.__call__

            def call(op: Op[..., Any], *args: Any, **kwargs: Any) -> Any:
                """Call an operation within a span of its own."""
                if self._stack and self.places[self._stack[-1]].op:  # one calls another: the outer one's work
                    return original(op, *args, **kwargs)
                first = next((a for a in args if isinstance(a, Tensor)), None)
                shape = () if first is None else tuple(first.shape)
                with self.open(Place(self.places[self.current].layer, op.name, shape)) as number:
                    ended = OpCall(number, (*args, *kwargs.values()))
                    ended.result = original(op, *args, **kwargs)
                    self.on_call(ended)
                return ended.result

            Op.__call__ = call  # type: ignore[method-assign, assignment]
            undo.callback(setattr, Op, "__call__", original)
            yield

    def _hook(self, module: nn.Module, place: Place, undo: ExitStack) -> None:
        entered: list[ExitStack] = []

        def enter(*_: Any) -> None:
            entered.append(ExitStack())
            entered[-1].enter_context(self.open(place))

        def leave(*_: Any) -> None:
            entered.pop().close()

        undo.callback(module.register_forward_pre_hook(enter).remove)
        undo.callback(module.register_forward_hook(leave, always_call=True).remove)
