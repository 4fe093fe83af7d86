"""Whose a piece of memory is: which layer or phase made it, and what for.

Watched are the calls of a model's modules and of the parts of its layers; in a backward pass, the node of autograd's
graph that runs says by the number of its making, which only grows, where it was made.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from warpfold.cost.fake import Memory, MemoryPiece
from warpfold.model.axial import AxialUpdate, Block, BlockStack

PARTS = ("local", "update", "add", "add_slice", "whole")  # of a layer, that work on a slice; the rest makes factors
# Of a model's parts, whose what they make is.
WHOSE = {
    **dict.fromkeys(("distogram", "masked_msa", "plddt", "resolved", "pae"), "heads"),
    "templates": "templates",
    "extra": "extra",
    "structure": "structure",
}
MODEL = "model"


class RunPlace(NamedTuple):
    """Say where a run is: the module or phase at work, whose what it makes is, and its block of a stack, if any."""

    name: str
    owner: str
    block: tuple[str, int] | None = None
    backward: bool = False


@dataclass(frozen=True)
class StateSizes:
    """What tells m and z from others: their channels, and the least numbers that they hold."""

    c_m: int
    c_z: int
    m: int
    z: int

    def owner(self, shape: Sequence[int]) -> str:
        """Return whose a tensor is that the model makes outside of its layers."""
        numbers = torch.Size(shape).numel()
        if shape and shape[-1] == self.c_z and numbers >= self.z:
            return "z"
        return "m" if shape and shape[-1] == self.c_m and numbers >= self.m else "slices"


class Watch:
    """Say where a model is (`place`), for `Memory`; note when (`course`), and when each block was begun (`begun`)."""

    def __init__(self, model: nn.Module, sizes: StateSizes) -> None:
        self.sizes, self.phase = sizes, MODEL
        self.memory: Memory | None = None
        self.course: list[tuple[int, str]] = []  # from which moment on what was at work
        self.begun: dict[tuple[str, int], int] = {}
        self.backward_from: int | None = None
        self._stack: list[RunPlace] = []
        self._block: tuple[str, int] | None = None
        self._numbers: list[int] = []  # of autograd's nodes: from which on they were made at
        self._places: list[RunPlace] = []
        for name, module in model.named_modules():
            if isinstance(module, BlockStack):
                self._watch_stack(name, module)
            elif name and "." not in name:
                self._watch(module, RunPlace(name, WHOSE.get(name, "")))

    def place(self) -> RunPlace:
        """Return where the run is now."""
        if torch._C._current_graph_task_id() == -1:
            return self._now()
        if self.backward_from is None:
            assert self.memory is not None
            self.backward_from = self.memory.moment
        place = self._stack[-1]._replace(backward=True) if self._stack else self._of_node()  # the former: again
        self._note(place)
        return place

    def enter_phase(self, name: str) -> None:
        """Be in a phase outside of the model's parts from now on: its name is whose what it makes is, too."""
        self.phase = name
        self._entered(RunPlace(name, name))

    def owner_of(self, piece: MemoryPiece) -> str:
        """Return whose a piece is: what the backward pass waits for is "kept"."""
        place: RunPlace = piece.place
        since = self.backward_from
        if (
            since is not None
            and not place.backward
            and piece.born < since
            and (piece.died is None or piece.died > since)
        ):
            return "kept"
        return place.owner or self.sizes.owner(piece.shape)

    def _now(self) -> RunPlace:
        if not self._stack:
            return RunPlace(self.phase, "" if self.phase == MODEL else self.phase)
        found = self._stack[-1]
        if self._block is not None and found.name == self._block[0]:  # between the layers of a stack's blocks
            return found._replace(block=self._block)
        return found

    def _of_node(self) -> RunPlace:
        node = torch._C._current_autograd_node()
        index = -1 if node is None else bisect_right(self._numbers, node._sequence_nr()) - 1
        if index < 0 or index >= len(self._places):
            return RunPlace("backward", "gradients", backward=True)
        found = self._places[index]
        return RunPlace(f"{found.name} backward", "gradients", found.block, True)

    def _note(self, place: RunPlace) -> None:
        assert self.memory is not None
        if not self.course or self.course[-1][1] != place.name:
            self.course.append((self.memory.moment, place.name))

    def _entered(self, place: RunPlace) -> None:
        """Note that the run has come to a place, or back to it."""
        backward = torch._C._current_graph_task_id() != -1
        self._note(place._replace(name=f"{place.name} again") if backward else place)
        if not backward and torch.is_grad_enabled():
            self._numbers.append(torch.autograd._get_sequence_nr())
            self._places.append(place)

    def _push(self, place: RunPlace) -> None:
        self._stack.append(place)
        self._entered(place)

    def _pop(self) -> None:
        self._stack.pop()
        self._entered(self._now())

    def _watch(self, module: nn.Module, place: RunPlace, label: str = "") -> None:
        """Be at a place while a module is called; label: whose its results are."""

        def leave(_module: nn.Module, _args: Any, out: Any) -> None:
            self._pop()
            if label:
                self._relabel(out, label)

        module.register_forward_pre_hook(lambda *_: self._push(place))
        module.register_forward_hook(leave)

    def _watch_stack(self, name: str, stack: BlockStack) -> None:
        top = name.split(".")[0]
        self._watch(stack, RunPlace(name, WHOSE.get(top, "factors")))
        for index, block in enumerate(stack.blocks):
            assert isinstance(block, Block)
            for step in block.steps:
                if not isinstance(step.layer, AxialUpdate):
                    continue
                of_m = {"extra_stack": "extra"}.get(top, "m")
                label = WHOSE.get(top) or (step.state if step.state != "m" else of_m)
                path = f"{name}.{index}.{type(step.layer).__name__}"
                within = RunPlace(path, WHOSE.get(top, "factors"), (name, index))
                self._watch(step.layer, within, label)
                for part in PARTS:
                    self._wrap(step.layer, part, within._replace(owner=WHOSE.get(top, "slices")))

    def _wrap(self, layer: AxialUpdate, part: str, place: RunPlace) -> None:
        """Be at a place while a part of a layer is called."""
        function: Callable[..., Any] | None = getattr(layer, part, None)
        if function is None:
            return

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._begin(place)
            self._push(place)
            try:
                return function(*args, **kwargs)
            finally:
                self._pop()

        setattr(layer, part, wrapped)

    def _begin(self, place: RunPlace) -> None:
        """Note when a block was begun, forward: the first of its parts."""
        if place.block is not None and place.block != self._block and torch._C._current_graph_task_id() == -1:
            assert self.memory is not None
            self._block = place.block
            self.begun[place.block] = self.memory.moment

    def _relabel(self, out: Any, owner: str) -> None:
        if isinstance(out, Tensor) and self.memory is not None and (piece := self.memory.piece_of(out)) is not None:
            piece.place = piece.place._replace(owner=owner)
