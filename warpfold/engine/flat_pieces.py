"""One of torch's optimizers on pieces of flat buffers: it takes each piece for one parameter."""

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim import Optimizer as TorchOptimizer

from warpfold.engine.elementwise import FUSED, kept_by
from warpfold.engine.flat_buffer import FlatBuffer, FlatPiece, changes

if TYPE_CHECKING:
    from warpfold.engine.flat import GradientReducer

PIECE = 2**17  # numbers: on a CPU an optimizer that is not fused works through its caches, piece by piece
State = dict[str, Any]  # what an optimizer keeps of a parameter, as torch names it
States = dict[nn.Parameter, State]


class PieceOptimizer:
    """torch's optimizer on the pieces of buffers, and what it keeps, for each parameter.

    What it keeps for every number lies in `FlatBuffer.moments`; other tensors (its count of steps) belong to a piece.
    """

    def __init__(
        self,
        optimizer: type[TorchOptimizer],
        options: Mapping[str, Any],
        groups: Sequence[Mapping[str, Any]],
        buffers: Sequence[FlatBuffer],
        states: Mapping[nn.Parameter, State],
    ) -> None:
        """Cut the buffers into pieces of one history each.

        groups: the param_groups as users see them.  states: what was kept of each parameter before, whole.
        """
        self.optimizer, self.options, self.buffers = optimizer, options, buffers
        self.present = [[False] * len(buffer.parameters) for buffer in buffers]
        self._fused = [self._is_fused(number, group) for number, group in enumerate(groups)]
        known = [
            {name: _present(state) for name, p in b.parameters.items() if (state := states.get(p))} for b in buffers
        ]
        kinds = [self._kinds(b, groups[b.group]) if named else ({}, set()) for b, named in zip(buffers, known)]
        for buffer, named, (_, elementwise) in zip(buffers, known, kinds):
            buffer.cuts |= set(changes([_history(named.get(name), elementwise) for name in buffer.places], buffer.cuts))
        self.pieces = [buffer.cut(self._limit(buffer)) for buffer in buffers]
        ready = [{**self._options_of(i, group), "params": self._of_group(i)} for i, group in enumerate(groups)]
        self.inner = optimizer(ready, **options)
        for buffer, pieces, named, (example, elementwise) in zip(buffers, self.pieces, known, kinds):
            self._restore(buffer, pieces, named, example, elementwise)
        self._adopt()

    def step(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Take a step; return whether tensors that it keeps are others than before.  groups: with today's options."""
        for i, (group, inner) in enumerate(zip(groups, self.inner.param_groups)):
            inner.update(self._options_of(i, group))
        for buffer, present, pieces in zip(self.buffers, self.present, self.pieces):
            for piece in pieces:
                gradient = piece.gradient if present[piece.first] else None
                piece.weights.grad = gradient if gradient is None or buffer.master is None else gradient.float()
        if issubclass(self.optimizer, SGD):
            self._begin_momenta()
        self.inner.step()
        for piece in (piece for pieces in self.pieces for piece in pieces):
            piece.weights.grad = None  # or it would live on after zero_grad
        return self._adopt()

    def _begin_momenta(self) -> None:
        """Give pieces that are stepped for the first time a momentum of zero, where others of their group have one.

        torch 2.13's fused SGD fails there.  As there is no dampening, zero is what a first step begins with anyway.
        """
        for number in {i for i, fused in enumerate(self._fused) if fused}:
            pieces = [w for w in self._of_group(number) if w.grad is not None]
            without = [w for w in pieces if not self.inner.state.get(w)]
            if self.inner.param_groups[number]["momentum"] and len(without) < len(pieces):
                for weights in without:
                    self.inner.state[weights]["momentum_buffer"] = torch.zeros_like(weights)

    def find_present(self) -> bool:
        """Put the gradients in place, and cut pieces where only a part has one; return whether any was cut."""
        cut = False
        for number, buffer in enumerate(self.buffers):
            present = buffer.gather()
            if present != self.present[number]:
                self.present[number] = present
                if cuts := set(changes(present, buffer.cuts)):
                    buffer.cuts |= cuts
                    self._cut_again(number)
                    cut = True
        return cut

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the pieces that have one."""
        return [
            piece.gradient
            for present, pieces in zip(self.present, self.pieces)
            for piece in pieces
            if present[piece.first]
        ]

    # What is kept

    def live(self) -> States:
        """Return what is kept of each parameter, as views; of what ranks share out, no more than its counts."""
        found: States = {}
        for number, buffer in enumerate(self.buffers):
            flat = {} if buffer.sharded else buffer.moments
            for (name, p), state in zip(buffer.parameters.items(), self._by_parameter(number)):
                if state:
                    kept = {k: v for k, v in state.items() if k not in buffer.moments}
                    found[p] = {**kept, **{k: buffer.view(flat[k], name) for k in state if k in flat}}
        return found

    def whole(self, groups: Sequence[Mapping[str, Any]], reducer: "GradientReducer | None") -> States:
        """Return what is kept of each parameter, whole, with counts of its own; ranks that share it all call this."""
        found: States = {}
        live = self.live()
        for number, buffer in enumerate(self.buffers):
            if buffer.sharded:
                assert reducer is not None
                found |= self._gathered(number, groups[buffer.group], reducer)
                continue
            for p in buffer.parameters.values():
                if p in live:
                    found[p] = {k: v if k in buffer.moments else _copied(v) for k, v in live[p].items()}
                    if "step" in found[p] and self._fused[buffer.group] and not groups[buffer.group].get("capturable"):
                        found[p]["step"] = found[p]["step"].cpu()  # as torch has it where nobody asked for fused
        return found

    def _gathered(self, number: int, group: Mapping[str, Any], reducer: "GradientReducer") -> States:
        """Return what all ranks together keep of the parameters of a buffer."""
        buffer = self.buffers[number]
        example, elementwise = self._kinds(buffer, group)
        scalars = [key for key in example if key not in elementwise]
        numbers = buffer.weights.new_zeros(len(scalars) + 1, len(buffer.parameters), dtype=torch.float64)
        for i, state in enumerate(self._by_parameter(number)):
            if state:
                numbers[:, i] = numbers.new_tensor([1.0] + [float(state[key]) for key in scalars])
        numbers = reducer.sum(numbers).cpu()
        flat = {}
        for key in sorted(elementwise):
            mine = buffer.moments.get(key)
            flat[key] = reducer.all_gather(number, buffer.joined({}, example[key].dtype) if mine is None else mine)
        found: States = {}
        for i, (name, p) in enumerate(buffer.parameters.items()):
            if numbers[0, i]:
                counts = {key: numbers[1 + j, i].to(example[key].dtype) for j, key in enumerate(scalars)}
                found[p] = {**counts, **{key: buffer.view(whole, name) for key, whole in flat.items()}}
        return found

    def _restore(
        self,
        buffer: FlatBuffer,
        pieces: Sequence[FlatPiece],
        named: Mapping[str, State],
        example: Mapping[str, Any],
        elementwise: Collection[str],
    ) -> None:
        """Take over what was kept of each parameter of a buffer."""
        buffer.moments = {
            key: buffer.joined({name: state[key] for name, state in named.items() if key in state}, example[key].dtype)
            for key in sorted(elementwise)
        }
        names = list(buffer.places)
        for piece in pieces:
            if state := named.get(names[piece.first]):
                self.inner.state[piece.weights] = {
                    key: buffer.moments[key][piece.local] if key in elementwise else _like(example.get(key), value)
                    for key, value in state.items()
                }

    def _by_parameter(self, number: int) -> Iterator[State]:
        """Yield what is kept of the piece in which each parameter begins; {} where nothing is, or that is another's."""
        pieces = self.pieces[number]
        starts = [piece.where.start for piece in pieces]
        for place in self.buffers[number].places.values():
            i = bisect_right(starts, place.start) - 1
            mine = i >= 0 and place.start < pieces[i].where.stop
            yield self.inner.state.get(pieces[i].weights, {}) if mine else {}

    def _cut_again(self, number: int) -> None:
        """Cut the pieces of a buffer, and let each new one inherit what was kept of the old one."""
        buffer, before = self.buffers[number], self.pieces[number]
        kept = [self.inner.state.pop(piece.weights, {}) for piece in before]
        self.pieces[number] = buffer.cut(self._limit(buffer))
        old = 0
        for piece in self.pieces[number]:
            while before[old].where.stop <= piece.where.start:
                old += 1
            if kept[old]:
                self.inner.state[piece.weights] = {
                    key: buffer.moments[key][piece.local] if key in buffer.moments else _copied(value)
                    for key, value in kept[old].items()
                }
        self.inner.param_groups[buffer.group]["params"] = self._of_group(buffer.group)

    def _adopt(self) -> bool:
        """Have what is kept for every number lie in `moments`; return whether anything did not."""
        moved = False
        for buffer, pieces in zip(self.buffers, self.pieces):
            begin = {key: (flat.data_ptr(), flat.element_size()) for key, flat in buffer.moments.items()}
            for piece in pieces:  # this runs in every step
                state = self.inner.state.get(piece.weights, {})
                for key, value in state.items():
                    if key in begin:
                        first, size = begin[key]
                        if value.data_ptr() == first + piece.local.start * size:
                            continue
                    elif not isinstance(value, Tensor) or value.shape != piece.weights.shape:
                        continue
                    else:
                        length = pieces[-1].local.stop
                        flat = buffer.moments[key] = value if len(value) == length else value.new_zeros(length)
                        begin[key] = flat.data_ptr(), flat.element_size()
                    state[key] = buffer.moments[key][piece.local].copy_(value)
                    moved = True
        return moved

    # How it is called

    def _of_group(self, group: int) -> list[Tensor]:
        """Return what the optimizer has for parameters in a group."""
        return [p.weights for b, pieces in zip(self.buffers, self.pieces) if b.group == group for p in pieces]

    def _options_of(self, number: int, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a group, as the optimizer on pieces gets them."""
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        return {**options, "fused": True} if self._fused[number] else options

    def _is_fused(self, number: int, group: Mapping[str, Any]) -> bool:
        """Return whether a group takes torch's fused kernel, where nothing was said: it is the fastest there is."""
        devices = {buffer.weights.device.type for buffer in self.buffers if buffer.group == number}
        said = any(group.get(key) for key in ("differentiable", "dampening"))
        said |= any(group.get(key) is not None for key in ("fused", "foreach"))
        return not said and devices <= set(FUSED.get(self.optimizer, ()))

    def _limit(self, buffer: FlatBuffer) -> int | None:
        """Return how long a piece may be."""
        return None if buffer.weights.device.type != "cpu" or self._fused[buffer.group] else PIECE

    def _kinds(self, buffer: FlatBuffer, group: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
        """Return an example of what is kept of a buffer's parameters, and the names of what is kept for each number."""
        like = buffer.weights if buffer.master is None else buffer.master
        return kept_by(self.optimizer, self.options, self._options_of(buffer.group, group), like)


def _history(state: State | None, elementwise: Collection[str]) -> object:
    """Return what must be equal for parameters to share a piece: that they have a state, and its counts."""
    if not state:
        return None
    return {k: float(v) if isinstance(v, Tensor) else v for k, v in state.items() if k not in elementwise}


def _present(state: Mapping[str, Any]) -> State:
    return {key: value for key, value in state.items() if value is not None}


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _like(example: Any, value: Any) -> Any:
    """Return a copy of a count as the optimizer wants it: of the example's dtype, on its device."""
    if not isinstance(example, Tensor):
        return _copied(value)
    return torch.as_tensor(value).to(example.device, example.dtype, copy=True)
