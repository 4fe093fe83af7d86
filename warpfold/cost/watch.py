"""Track the position of a run in a model, and the owners of the tensors that it allocates."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from warpfold.cost.example import MODEL, RunPhase
from warpfold.cost.recorder import MemoryPiece, Place, Recorder
from warpfold.model.axial import AxialUpdate, Block, BlockStack
from warpfold.ops.torch_internals import current_node, in_backward, next_node_number, node_number

# Methods of a layer that work on slices. Other methods compute factors.
SLICE_METHODS = ("prepare", "update")
# The trunk's stacks, of which only a few blocks are run.
STACKS = ("extra_stack", "evoformer")
# Autograd nodes that accumulate gradients into parameters have numbers from here on.
ACCUMULATING_NODES = 2**62
# Owners of the tensors that other modules allocate.
OWNERS = {
    **dict.fromkeys(("distogram", "masked_msa", "plddt", "resolved", "pae"), "heads"),
    "templates": "templates",
    "extra": "extra",
    "structure": "structure",
}


@dataclass(frozen=True)
class StateSizes:
    """Channels and least number of elements of m and z, which distinguish them from other tensors."""

    c_m: int
    c_z: int
    m: int
    z: int

    def owner(self, shape: Sequence[int]) -> str:
        """Return the owner of a tensor that the model allocates outside of its layers."""
        numbers = torch.Size(shape).numel()
        if shape and shape[-1] == self.c_z and numbers >= self.z:
            return "z"
        return "m" if shape and shape[-1] == self.c_m and numbers >= self.m else "slices"


class Watch:
    """Tell a recorder the position in a model (`place`), and record when each block of a stack began (`begun`)."""

    def __init__(self, model: nn.Module, sizes: StateSizes, recorder: Recorder) -> None:
        self.sizes, self.recorder, self.phase = sizes, recorder, MODEL
        recorder.place = self.place
        self.begun: dict[tuple[str, int], int] = {}
        self.backward_from: int | None = None
        # Places of the running modules, from the outermost to the innermost.
        self._places: list[Place] = []
        self._block: tuple[str, int] | None = None
        # Places of autograd nodes: a node belongs to the place of the largest number that is not above its own. Numbers
        # increase with each creation within a thread.
        self._node_numbers: list[int] = []
        self._node_places: list[Place] = []
        for name, module in model.named_modules():
            if isinstance(module, BlockStack):
                self._watch_stack(name, module)
            elif name and "." not in name:
                self._watch(module, Place(name, OWNERS.get(name, "")))

    def place(self) -> Place:
        """Return the present position. In the backward pass, it is where the forward pass created the node."""
        if not in_backward():
            return self._forward_place()
        if self.backward_from is None:
            self.backward_from = self.recorder.moment
        node = current_node()
        number = -1 if node is None else node_number(node)
        index = bisect_right(self._node_numbers, number) - 1
        if self._places:
            # A layer is being recomputed.
            place = self._places[-1]._replace(backward=True)
        elif index < 0 or number >= ACCUMULATING_NODES:
            place = Place("backward", "gradients", backward=True)
        else:
            made_at = self._node_places[index]
            place = Place(f"{made_at.name} backward", "gradients", made_at.stack, made_at.block, backward=True)
        self._note(place)
        return place

    def enter_phase(self, name: RunPhase) -> None:
        """Start a phase outside of the model's modules, which owns the tensors that it allocates."""
        self.phase = name
        self._entered(self._forward_place())

    def owner_of(self, piece: MemoryPiece) -> str:
        """Return the owner of a memory piece. Tensors that are saved for the backward pass are "kept"."""
        since, place = self.backward_from, piece.place
        is_saved = piece.born < (since or 0) and (piece.died is None or piece.died > (since or 0))
        if since is not None and not place.backward and is_saved:
            return "kept"
        return place.owner or self.sizes.owner(piece.shape)

    def _forward_place(self) -> Place:
        if not self._places:
            return Place(self.phase, "" if self.phase == MODEL else self.phase)
        place = self._places[-1]
        if self._block is not None and place.name == self._block[0]:
            # Between the layers of a stack's blocks.
            return place._replace(block=self._block)
        return place

    def _note(self, place: Place) -> None:
        course = self.recorder.course
        if not course or course[-1][1] != place.name:
            course.append((self.recorder.moment, place.name))

    def _entered(self, place: Place) -> None:
        if in_backward():
            # A recomputation may run in a thread with its own numbers of nodes.
            self._note(place._replace(name=f"{place.name} again"))
            return
        self._note(place)
        if torch.is_grad_enabled():
            self._node_numbers.append(next_node_number())
            self._node_places.append(place)

    def _push(self, place: Place) -> None:
        self._places.append(place)
        self._entered(place)

    def _pop(self) -> None:
        self._places.pop()
        self._entered(self._forward_place())

    def _watch(self, module: nn.Module, place: Place, result_owner: str = "") -> None:
        """Be at a place while a module is called. result_owner: owner of its result."""

        def leave(_module: nn.Module, _args: Any, out: Any) -> None:
            self._pop()
            if result_owner and isinstance(out, Tensor) and (piece := self.recorder.piece_of(out)) is not None:
                piece.place = piece.place._replace(owner=result_owner)

        module.register_forward_pre_hook(lambda *_: self._push(place))
        module.register_forward_hook(leave)

    def _watch_stack(self, name: str, stack: BlockStack) -> None:
        top = name.split(".")[0]
        whole = Place(name, OWNERS.get(top, "factors"), name if name in STACKS else "")
        self._watch(stack, whole)
        self._repeat(stack)
        for index, block in enumerate(stack.blocks):
            assert isinstance(block, Block)
            for step in block.steps:
                if not isinstance(step.layer, AxialUpdate):
                    continue
                owner_of_m = "extra" if top == "extra_stack" else "m"
                result_owner = OWNERS.get(top) or (step.state if step.state != "m" else owner_of_m)
                path = f"{name}.{index}.{type(step.layer).__name__}"
                place = whole._replace(name=path, block=(name, index))
                self._watch(step.layer, place, result_owner)
                for method in SLICE_METHODS:
                    self._wrap(step.layer, method, place._replace(owner=OWNERS.get(top, "slices")))

    def _repeat(self, stack: BlockStack) -> None:
        """Without gradients, run a stack once per layout of its arguments, because templates call it many times."""
        forward = stack.forward

        def run(*args: Any) -> Any:
            return forward(*args) if torch.is_grad_enabled() else self.recorder.run(stack, forward, args, {})

        stack.forward = run

    def _wrap(self, layer: AxialUpdate, method: str, place: Place) -> None:
        """Be at a place while a method of a layer is called. The first method of a block marks its beginning."""
        function: Callable[..., Any] | None = getattr(layer, method, None)
        if function is None:
            return

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            """Call the method at its place."""
            if place.block is not None and place.block != self._block and not in_backward():
                self._block = place.block
                self.begun[place.block] = self.recorder.moment
            self._push(place)
            try:
                return function(*args, **kwargs)
            finally:
                self._pop()

        setattr(layer, method, wrapped)
