"""What an operation does on a GPU with arguments of one layout: noted once, and repeated without working it out again.

Which kernels an operation launches, with which strides, tiles and grids, follows from shapes, strides, dtypes and
numbers alone; to find it takes the host longer than the kernels take the device.  So `dispatch` keeps a recipe for each
layout: what to allocate, to launch and to call, and where among arguments and allocations each pointer lies.  Without a
gradient that is of an operation's whole call, with one of what torch calls forward and backward.  Recipes serve where
nobody looks on: no modes, profilers, and launches that a context has forced, noted or looked up.

A kernel is launched directly: Triton chooses compiled code by dtypes, by numbers and by which addresses 16 divides, and
a layout fixes all but the addresses.  Where 16 divides all of them in the noted call and in the repeated one, the code
of the noted call serves.

An operation that decided by anything else, such as the values or the addresses of its tensors, would be repeated
wrongly: `layout` says what it may decide by.
"""

import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from warpfold.ops import dispatch
from warpfold.ops.torch_internals import (
    DispatchMode,
    current_cuda_device,
    current_cuda_stream,
    map_tensors,
    tree_leaves,
    without_wrapper,
)
from warpfold.ops.triton import launch
from warpfold.ops.triton.launch import TiledKernel

ALLOCATE = "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"
BEHIND = 15  # elements behind a tensor that may matter: rows of a bias are read to where a wide word ends
ONE = (1,)  # shape and stride of a tensor of which only the address counts
MOST = 512  # recipes of one operation, kept at a time
Memory = list[Any]  # the arguments of a call, and behind them what is allocated


def layout(given: Sequence[Any], gradient: bool | None = None) -> tuple[Any, ...] | None:
    """Return the cache key for a call with these arguments, or None if the call cannot be cached.

    gradient: whether the call is of an operation's public function with a gradient, for the arguments that require
    one, or without.  None: the call is of the registered operation, which returns all of its results.
    """
    state = launch.state()
    if state is None:
        return None
    key: list[Any] = [state, dispatch.products, gradient]
    for t in given:
        kind = type(t)
        if kind is Tensor or kind is nn.Parameter:
            key += t.shape, t.stride(), t.dtype, t.device, gradient and t.requires_grad
            if not t.is_contiguous():
                behind = t.untyped_storage().nbytes() // t.element_size() - t.storage_offset() - _span(t)
                key.append(min(BEHIND, behind))
        elif t is None or kind in (int, float, bool, str):
            key.append(t)
        elif kind is list and not t:  # the strides of dropout that is drawn: each layer draws its own, so none is
            continue
        else:
            return None
    return tuple(key)


def _span(t: Tensor) -> int:
    """Return how many elements of memory a tensor with elements reaches over."""
    return 1 + sum(map(operator.mul, t.shape, t.stride())) - sum(t.stride())


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies: so many elements behind the beginning of an argument or an allocation; whole: it is that."""

    slot: int
    offset: int
    shape: Sequence[int]
    stride: Sequence[int]
    whole: bool

    def of(self, memory: Memory) -> Tensor:
        """Return the tensor."""
        t: Tensor = memory[self.slot]
        return t if self.whole else t.as_strided(self.shape, self.stride, t.storage_offset() + self.offset)


@dataclass(frozen=True)
class _Empty:
    """A tensor without elements, which lies nowhere: each time another, as no two results may be one."""

    make: Callable[[], Tensor]

    def of(self, memory: Memory) -> Tensor:
        """Return the tensor."""
        return self.make()


@dataclass(frozen=True)
class _Call:
    """A call of one of torch's operations.

    function: the operation, without its Python wrapper
    args, kwargs: its arguments; tensors are places
    places: (position, place) of each tensor among `args`
    nested: positions of the lists, tuples and tensors without elements among `args`
    named: (name, place) of each tensor among `kwargs`, such as `out`
    slot: which slot the result fills; None: the operation changes its arguments
    """

    function: Callable[..., Any]
    args: list[Any]
    kwargs: Mapping[str, Any]
    places: Sequence[tuple[int, _Place]]
    nested: Sequence[int]
    named: Sequence[tuple[str, _Place | _Empty]]
    slot: int | None


# How an argument of a launch is made: an address (slot, bytes behind its beginning), a constant, or a tuple of the last
# values.
ADDRESS, CONSTANT, TUPLE = range(3)
ALIGNMENT = 16  # bytes; Triton compiles other code for pointers that this does not divide


@dataclass(frozen=True)
class _Launch:
    """The launch of a kernel.

    specialise: launches the kernel through Triton, which chooses the compiled code by the arguments
    run: the launcher of the code that served the noted call, or None if 16 did not divide all addresses
    grid: three numbers
    fixed: arguments of `run` between the stream and the kernel's own: code, metadata and hooks
    values: the kernel's arguments in its order, with None in place of tensors
    pointers: (position, slot, offset in bytes, rest of the tuple) of each argument with one tensor
    nested: (position, steps that make the argument) of each argument with several tensors
    """

    specialise: Callable[[Memory], None]
    run: Any
    grid: tuple[int, int, int]
    fixed: tuple[Any, ...]
    values: list[Any]
    pointers: Sequence[tuple[int, int, int, tuple[Any, ...] | None]]
    nested: Sequence[tuple[int, Sequence[tuple[int, Any, int]]]]


class Recipe:
    """What a call did, to be done again with other arguments of the same layout.

    steps: a launch or another action, the slot that its result fills, and the slots that no later step uses.
    slots: how many there are beside the arguments.
    result: where the results lie, as the call returns them; None: there are none.
    """

    def __init__(
        self,
        steps: Sequence[tuple[_Launch | _Call | Callable[..., Any], int | None, Sequence[int]]],
        slots: int,
        result: Any,
        device: torch.device,
    ) -> None:
        self._steps, self._slots, self._result, self._device = steps, [None] * slots, result, device
        self._gpu = device.index if device.type == "cuda" else None
        self._places = result if isinstance(result, tuple) else (result,)

    def repeat(self, given: Sequence[Any]) -> Any:
        """Do it, and return what the call would."""
        if self._gpu is not None and current_cuda_device() != self._gpu:
            with launch.on(self._device):
                return self.repeat(given)
        # This is one function without helpers, because Python calls take most of the host's time for a launch.
        memory = [*given, *self._slots]
        stream = 0 if self._gpu is None else current_cuda_stream(self._gpu)
        for action, made, unused in self._steps:
            if isinstance(action, _Launch):
                if action.run is None:
                    action.specialise(memory)
                else:
                    values, addresses = action.values.copy(), 0
                    for at, slot, offset, rest in action.pointers:
                        address = memory[slot].data_ptr() + offset
                        addresses |= address
                        values[at] = address if rest is None else (address, *rest)
                    for at, parts in action.nested:
                        made_of: list[Any] = []
                        for kind, value, offset in parts:
                            if kind == ADDRESS:
                                address = memory[value].data_ptr() + offset
                                addresses |= address
                                made_of.append(address)
                            elif kind == CONSTANT:
                                made_of.append(value)
                            else:
                                made_of[len(made_of) - value :] = [tuple(made_of[len(made_of) - value :])]
                        (values[at],) = made_of
                    if addresses % ALIGNMENT:
                        action.specialise(memory)
                    else:
                        action.run(*action.grid, stream, *action.fixed, *values)
            elif isinstance(action, _Call):
                args, kwargs = action.args.copy(), action.kwargs
                for at, place in action.places:
                    t = memory[place.slot]
                    if not place.whole:
                        t = t.as_strided(place.shape, place.stride, t.storage_offset() + place.offset)
                    args[at] = t
                for at in action.nested:
                    args[at] = _filled(args[at], memory)
                for name, tensor in action.named:
                    if isinstance(tensor, _Place) and tensor.whole:
                        kwargs = {**kwargs, name: memory[tensor.slot]}
                    else:
                        kwargs = {**kwargs, name: tensor.of(memory)}
                out = action.function(*args, **kwargs)
                if action.slot is not None:
                    memory[action.slot] = out
            elif made is not None:  # an allocation
                memory[made] = action()
            for slot in unused:
                memory[slot] = None
        results: list[Tensor | None] = []
        for place in self._places:
            t = None if place is None else memory[place.slot]
            if t is not None and not place.whole:
                t = t.as_strided(place.shape, place.stride, t.storage_offset() + place.offset)
            results.append(t)
        return tuple(results) if isinstance(self._result, tuple) else results[0]


def record(
    recipes: MutableMapping[Any, Callable[[Any], Any] | None],
    key: tuple[Any, ...],
    call: Callable[..., Any],
    given: Sequence[Any],
) -> Any:
    """Make the call, and note its recipe under the layout of its arguments; None where it cannot be repeated."""
    if key in recipes:
        return call(*given)
    recorder = _Recorder(given)
    with recorder.noting():
        result = call(*given)
    made = recorder.recipe(result, given[0].device)
    keep(recipes, key, None if made is None else made.repeat)
    return result


def keep(recipes: MutableMapping[Any, Any], key: tuple[Any, ...], made: Callable[[Any], Any] | None) -> None:
    """Keep what serves a layout; all others are forgotten where there are too many."""
    if len(recipes) >= MOST:
        recipes.clear()
    recipes[key] = made


class _Slot(NamedTuple):
    """An argument or an allocation: its first address, the one behind its last, and how it lies."""

    begin: int
    end: int
    shape: Sequence[int]
    stride: Sequence[int]
    dtype: torch.dtype

    @classmethod
    def of(cls, t: Any) -> "_Slot | None":
        """Return that of a tensor; None for anything else."""
        if not isinstance(t, Tensor):
            return None
        span = _span(t) * t.element_size() if t.numel() else 0
        return cls(t.data_ptr(), t.data_ptr() + span, t.shape, t.stride(), t.dtype)

    def is_same(self, t: Tensor) -> bool:
        """Return whether a tensor is all of it, as it lies."""
        return (self.begin, self.shape, self.stride) == (t.data_ptr(), t.shape, t.stride())


class _Recorder(DispatchMode):
    """Notes what a call with these arguments does."""

    def __init__(self, given: Sequence[Any]) -> None:
        super().__init__()
        self._arguments = len(given)
        self._actions: list[
            tuple[_Launch | _Call | Callable[..., Any], int | None]
        ] = []  # and the slot that an allocation fills
        self._last: dict[int, int] = {}  # of each slot, the last action that uses it
        # Memory that was given back may be allocated again, so of two slots the later is meant.
        self._slots = [_Slot.of(t) for t in given]
        spans = sorted(slot[:2] for slot in self._slots if slot is not None)
        self._failed = any(after[0] < before[1] for before, after in pairwise(spans))  # whose would a view be?

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what happens within the context."""
        launch.noting.tell = self._launched
        try:
            with self:
                yield
        finally:
            launch.noting.tell = None

    def recipe(self, result: Any, device: torch.device) -> Recipe | None:
        """Return the recipe of a call that returned this; None where something of it cannot be repeated."""
        place = map_tensors(self._result, result)
        if self._failed:
            return None
        unused: dict[int, list[int]] = {}
        for slot, last in self._last.items():
            if slot >= self._arguments:
                unused.setdefault(last, []).append(slot)
        # What nothing uses is not allocated: results that are there for a gradient alone.
        steps = [
            (action, made, unused.get(i, ()))
            for i, (action, made) in enumerate(self._actions)
            if made in (None, *self._last)
        ]
        return Recipe(steps, len(self._slots) - self._arguments, place, device)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        given = kwargs or {}
        if func.namespace == "warpfold":  # what is noted is what it does
            with self:
                return dispatch.runs[func._opname](*args, **given)
        out = func(*args, **given)
        changes = func._schema.is_mutable
        aliases = any(one.alias_info is not None for one in func._schema.returns)
        if not changes and aliases and not _is_copy(out, (args, given)):  # a view
            return out
        self._failed |= not (changes or isinstance(out, Tensor))
        slot = None if changes else len(self._slots)
        if func._opname in ALLOCATE:
            self._note(_allocation(out), slot)
        else:
            placed, named = map_tensors(self._place, list(args)), map_tensors(self._place, dict(given))
            places = [(at, value) for at, value in enumerate(placed) if isinstance(value, _Place)]
            nested = [at for at, value in enumerate(placed) if isinstance(value, _Empty | tuple | list)]
            of_kwargs = [(name, value) for name, value in named.items() if isinstance(value, _Place | _Empty)]
            self._note(_Call(without_wrapper(func), placed, named, places, nested, of_kwargs, slot))
        if not changes:
            self._slots.append(_Slot.of(out))
        return out

    def _note(self, action: _Launch | _Call | Callable[..., Any], allocates: int | None = None) -> None:
        self._actions.append((action, allocates))

    def _result(self, t: Tensor) -> "_Place | _Empty | None":
        """Return the place of a result; one without elements is allocated in each call, as no two may be one."""
        if t.numel():
            place = self._place(t)
        else:
            place = _Place(len(self._slots), 0, tuple(t.shape), t.stride(), True)
            self._note(_allocation(t), len(self._slots))
            self._slots.append(_Slot.of(t))
        if isinstance(place, _Place):
            self._last[place.slot] = sys.maxsize  # the slot is not freed
        return place

    def _place(self, t: Tensor) -> "_Place | _Empty | None":
        """Return the place of a tensor that the next action uses."""
        if not t.numel():
            return _Empty(_allocation(t))
        for number in reversed(range(len(self._slots))):
            slot = self._slots[number]
            if slot is not None and (slot.begin <= t.data_ptr() < slot.end or slot.is_same(t)):
                self._failed |= slot.dtype != t.dtype
                self._last[number] = len(self._actions)
                offset = (t.data_ptr() - slot.begin) // t.element_size()
                return _Place(number, offset, tuple(t.shape), t.stride(), slot.is_same(t))
        self._failed = True
        return None

    def _launched(
        self, kernel: TiledKernel, grid: tuple[int, ...], arguments: Mapping[str, Any], compiled: Any
    ) -> None:
        """Note a launch.  compiled: the code that served it; None in Triton's interpreter."""
        pointers, nested, fixed = [], [], {**kernel.config.options, **arguments}
        defaults = inspect.signature(kernel.kernel.function.fn).parameters
        names, addresses = list(kernel.kernel.function.arg_names), 0
        values = [arguments.get(name, defaults[name].default) for name in names]
        direct: list[tuple[int, int, int, tuple[Any, ...] | None]] = []
        nested_direct = []
        for name, value in arguments.items():
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
            if not tensors:
                continue
            at = names.index(name)
            fixed[name] = values[at] = None  # so that the recipe holds no memory
            for tensor in tensors:
                addresses |= tensor.data_ptr()
            tensor, *rest = (value, ()) if isinstance(value, Tensor) else value
            if tensors[0] is not tensor or len(tensors) > 1 or not tensor.numel():  # several, as of `sum_partials`
                nested.append((name, self._pointed(value)))
                nested_direct.append((at, list(self._made_of(value))))
            elif isinstance(place := self._place(tensor), _Place):
                pointers.append((name, None if tensor is value else type(value), place.slot, place.offset, rest))
                bytes_behind = place.offset * tensor.element_size()
                direct.append((at, place.slot, bytes_behind, None if tensor is value else tuple(rest)))
        specialise = _specialised(kernel.kernel.function[grid], fixed, pointers, nested)
        is_direct = compiled is not None and not addresses % ALIGNMENT
        run, code = (compiled.run, (compiled.function, compiled.packed_metadata)) if is_direct else (None, ())
        x, y, z = (*grid, 1, 1)[:3]
        self._note(_Launch(specialise, run, (x, y, z), (*code, None, None, None), values, direct, nested_direct))

    def _made_of(self, value: Any) -> Iterator[tuple[int, Any, int]]:
        """Return the steps that make an argument of a launch, with addresses for its tensors."""
        if isinstance(value, Tensor):
            place = self._place(value)
            if isinstance(place, _Place):
                yield ADDRESS, place.slot, place.offset * value.element_size()
            else:
                yield CONSTANT, 0, 0  # a tensor without elements, whose address is 0
        elif isinstance(value, tuple):
            for part in value:
                yield from self._made_of(part)
            yield TUPLE, len(value), 0
        else:
            yield CONSTANT, value, 0

    def _pointed(self, value: Any) -> Any:
        """Return an argument of a launch with the places of its tensors, of which only the addresses count."""
        if isinstance(value, Tensor):
            place = self._place(value)
            if not isinstance(place, _Place):
                return place
            return _Place(place.slot, place.offset, ONE, ONE, not place.offset)
        return _like(value, map(self._pointed, value)) if isinstance(value, tuple) else value


def _allocation(t: Tensor) -> Callable[[], Tensor]:
    """Return what allocates memory for another tensor like this one."""
    return functools.partial(torch.empty_strided, t.shape, t.stride(), dtype=t.dtype, device=t.device)


def _is_copy(out: Any, given: Any) -> bool:
    """Return whether the result of `contiguous` and others, which may be views, lies in memory of its own."""
    if not isinstance(out, Tensor) or not out.numel():
        return False
    inputs = [t.untyped_storage().data_ptr() for t in tree_leaves(given) if isinstance(t, Tensor)]
    return out.untyped_storage().data_ptr() not in inputs


def _filled(value: Any, memory: Memory) -> Any:
    """Return what an operation of torch's is given, with tensors for their places."""
    if isinstance(value, _Place | _Empty):
        return value.of(memory)
    return type(value)([_filled(each, memory) for each in value]) if isinstance(value, tuple | list) else value


def _like(value: tuple[Any, ...], parts: Iterable[Any]) -> tuple[Any, ...]:
    """Return a tuple, perhaps a named one, of other parts."""
    return tuple.__new__(type(value), parts)


def _pointing(value: Any, memory: Memory) -> Any:
    """Return an argument of a launch with tensors for their places."""
    if isinstance(value, _Place | _Empty):
        return value.of(memory)
    return _like(value, [_pointing(part, memory) for part in value]) if isinstance(value, tuple) else value


def _specialised(
    launcher: Any,
    fixed: Mapping[str, Any],
    pointers: Sequence[tuple[str, Any, int, int, Any]],
    nested: Sequence[tuple[str, Any]],
) -> Callable[[Memory], None]:
    """Return the launch of a kernel through Triton, which gets dtypes and addresses of tensors, and numbers.

    pointers: arguments that are, or begin with, a tensor; nested: those with several.
    """

    def action(memory: Memory) -> None:
        """Launch it, with tensors of this memory."""
        arguments = dict(fixed)
        for name, kind, slot, offset, rest in pointers:
            t = memory[slot]
            if offset:
                t = t.as_strided(ONE, ONE, t.storage_offset() + offset)
            arguments[name] = t if kind is None else tuple.__new__(kind, (t, *rest))
        for name, value in nested:
            arguments[name] = _pointing(value, memory)
        launcher(**arguments)

    return action
