"""Cached calls of operations on a GPU: what a call did is recorded once and then repeated by a recipe.

The kernels that an operation launches, with their strides, tiles and grids, depend on shapes, strides, dtypes and
numbers alone, and determining them takes the host longer than the kernels take the GPU.  Therefore `dispatch` stores a
recipe for each layout of the arguments: the allocations, the launches and the calls of torch, and the argument or
allocation that each pointer refers to.  Without a gradient a recipe covers the whole call of an operation.  With a
gradient one recipe covers the registered operation, and another the backward operation.  Recipes are not used under
dispatch modes and profilers, nor in contexts that force, record or look up launches.

A recipe launches the compiled code of a kernel directly.  Triton selects this code by dtypes, by numbers and by
whether addresses are multiples of 16 bytes, and a layout fixes all but the addresses.  If all addresses are multiples
of 16 bytes in the recorded call and in the repeated call, both use the same code.

Operations must not depend on anything that is not part of `layout`, such as the values or addresses of tensors, because
a recipe would repeat them incorrectly.
"""

import functools
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
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
# Kernels may read up to this many elements past the end of a tensor: rows of a bias are read in whole wide words.
BEHIND = 15
# Shape and stride of a tensor that passes only its address.
ONE = (1,)
# The largest number of recipes per operation.
MOST = 512
# The arguments of a call, followed by its allocations.
Memory = list[Any]


def layout(arguments: Sequence[Any], gradient: bool | None = None) -> tuple[Any, ...] | None:
    """Return the cache key for a call with these arguments, or None if the call cannot be cached.

    gradient: whether the call is of an operation's public function with a gradient, for the arguments that require
    one, or without.  None: the call is of the registered operation, which returns all of its results.
    """
    state = launch.state()
    if state is None:
        return None
    key: list[Any] = [state, dispatch.products, gradient]
    for t in arguments:
        kind = type(t)
        if kind is Tensor or kind is nn.Parameter:
            key += t.shape, t.stride(), t.dtype, t.device, gradient and t.requires_grad
            if not t.is_contiguous():
                behind = t.untyped_storage().nbytes() // t.element_size() - t.storage_offset() - _span(t)
                key.append(min(BEHIND, behind))
        elif t is None or kind in (int, float, bool, str):
            key.append(t)
        # The list holds the strides of dropout factors that the kernel draws. They are not cached, because each layer
        # draws with its own numbers.
        elif kind is list and not t:
            continue
        else:
            return None
    return tuple(key)


def _span(t: Tensor) -> int:
    """Return the number of elements from a tensor's first to its last, inclusive; it must not be empty."""
    return 1 + sum(map(operator.mul, t.shape, t.stride())) - sum(t.stride())


@dataclass(frozen=True)
class _Place:
    """The location of a tensor in a slot, that is an argument or an allocation.

    offset: elements from the start of the slot.  whole: whether the tensor is that of the slot.
    """

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
    """A tensor without elements.  It is allocated at each call, because no two results may be the same tensor."""

    make: Callable[[], Tensor]

    def of(self, memory: Memory) -> Tensor:
        """Return the tensor."""
        return self.make()


@dataclass(frozen=True)
class _Call:
    """A call of a torch operation.

    function: the operation, without its Python wrapper.
    args, kwargs: its arguments, with `_Place` or `_Empty` instead of tensors.
    places: (position, place) of each tensor with elements among `args`.
    nested: the positions of lists, tuples and empty tensors among `args`.
    named: (name, place) of each tensor among `kwargs`, such as `out`.
    slot: the slot of the result, or None if the operation changes its arguments.
    """

    function: Callable[..., Any]
    args: list[Any]
    kwargs: Mapping[str, Any]
    places: Sequence[tuple[int, _Place]]
    nested: Sequence[int]
    named: Sequence[tuple[str, _Place | _Empty]]
    slot: int | None


# The steps that build an argument of a launch: push an address (slot, bytes from its start), push a constant, push the
# address 0 of an empty tensor (function that allocates it), or join the last values into a tuple (length, type).
ADDRESS, CONSTANT, EMPTY, TUPLE = range(4)
# Triton compiles different code for pointers that are not multiples of this many bytes.
ALIGNMENT = 16


@dataclass(frozen=True)
class _Launch:
    """The launch of a kernel.

    launcher, options: Triton's launcher, which selects the compiled code by the arguments, and its options.
    run: the launcher of the code that the recorded call used, or None if an address was not aligned.
    grid: three numbers.
    fixed: code, metadata and hooks, the arguments of `run` after the stream and before the kernel's own.
    names, values: the kernel's arguments in its order, with None instead of tensors.
    pointers: (position, slot, offset in bytes, remainder of the tuple, type of the tuple) of each argument with one
        tensor; the last two are None if the argument is the tensor itself.
    nested: (position, steps that build the argument) of each argument with several tensors.
    """

    launcher: Any
    options: Mapping[str, Any]
    run: Any
    grid: tuple[int, int, int]
    fixed: tuple[Any, ...]
    names: list[str]
    values: list[Any]
    pointers: Sequence[tuple[int, int, int, tuple[Any, ...] | None, Any]]
    nested: Sequence[tuple[int, Sequence[tuple[int, Any, Any]]]]

    def specialise(self, memory: Memory) -> None:
        """Launch the kernel through Triton, with tensors instead of addresses."""

        def tensor(slot: int, offset: int) -> Tensor:
            t: Tensor = memory[slot]
            return t.as_strided(ONE, ONE, t.storage_offset() + offset // t.element_size()) if offset else t

        values = self.values.copy()
        for at, slot, offset, rest, kind in self.pointers:
            t = tensor(slot, offset)
            # A named tuple is made like any other tuple.
            values[at] = t if rest is None else tuple.__new__(kind, (t, *rest))
        for at, steps in self.nested:
            made: list[Any] = []
            for step, value, more in steps:
                if step == TUPLE:
                    made[len(made) - value :] = [tuple.__new__(more, made[len(made) - value :])]
                else:
                    made.append(tensor(value, more) if step == ADDRESS else value() if step == EMPTY else value)
            (values[at],) = made
        self.launcher(**dict(zip(self.names, values)), **self.options)


class Recipe:
    """A recorded call, to be repeated with other arguments of the same layout.

    steps: (launch, call or allocation, slot of an allocation, slots that no later step uses).
    slots: the number of slots besides the arguments.
    result: the places of the results in the structure that the call returns, or None.
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

    def repeat(self, arguments: Sequence[Any]) -> Any:
        """Repeat the call with these arguments and return its results."""
        if self._gpu is not None and current_cuda_device() != self._gpu:
            with launch.on(self._device):
                return self.repeat(arguments)
        # This is a single function, because Python calls take most of the host's time for a launch.
        memory = [*arguments, *self._slots]
        stream = 0 if self._gpu is None else current_cuda_stream(self._gpu)
        for action, made, unused in self._steps:
            if isinstance(action, _Launch):
                if action.run is None:
                    action.specialise(memory)
                else:
                    values, addresses = action.values.copy(), 0
                    for at, slot, offset, rest, _ in action.pointers:
                        address = memory[slot].data_ptr() + offset
                        addresses |= address
                        values[at] = address if rest is None else (address, *rest)
                    for at, steps in action.nested:
                        made_of: list[Any] = []
                        for step, value, offset in steps:
                            if step == ADDRESS:
                                address = memory[value].data_ptr() + offset
                                addresses |= address
                                made_of.append(address)
                            elif step == TUPLE:
                                made_of[len(made_of) - value :] = [tuple(made_of[len(made_of) - value :])]
                            else:
                                made_of.append(value if step == CONSTANT else 0)
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
    arguments: Sequence[Any],
) -> Any:
    """Make a call and store its recipe under the layout of its arguments, or None if it cannot be repeated."""
    if key in recipes:
        return call(*arguments)
    recorder = _Recorder(arguments)
    with recorder.noting():
        result = call(*arguments)
    made = recorder.recipe(result, arguments[0].device)
    keep(recipes, key, None if made is None else made.repeat)
    return result


def keep(recipes: MutableMapping[Any, Any], key: tuple[Any, ...], made: Callable[[Any], Any] | None) -> None:
    """Store the recipe of a layout.  If there are `MOST` recipes already, all of them are removed first."""
    if len(recipes) >= MOST:
        recipes.clear()
    recipes[key] = made


class _Slot(NamedTuple):
    """An argument or an allocation: its first address, the address after its last, and its layout."""

    begin: int
    end: int
    shape: Sequence[int]
    stride: Sequence[int]
    dtype: torch.dtype

    @classmethod
    def of(cls, t: Any) -> "_Slot | None":
        """Return the slot of a tensor, or None for other objects."""
        if not isinstance(t, Tensor):
            return None
        span = _span(t) * t.element_size() if t.numel() else 0
        return cls(t.data_ptr(), t.data_ptr() + span, t.shape, t.stride(), t.dtype)

    def is_same(self, t: Tensor) -> bool:
        """Return whether a tensor has the address, shape and strides of the slot."""
        return (self.begin, self.shape, self.stride) == (t.data_ptr(), t.shape, t.stride())


class _Recorder(DispatchMode):
    """Records the allocations, launches and calls of torch in a call with these arguments."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        super().__init__()
        self._arguments = len(arguments)
        # Each action with the slot of its allocation.
        self._actions: list[tuple[_Launch | _Call | Callable[..., Any], int | None]] = []
        # The last action that uses each slot.
        self._last: dict[int, int] = {}
        # Freed memory may be allocated again, so an address belongs to the last slot that contains it.
        self._slots = [_Slot.of(t) for t in arguments]
        spans = sorted(slot[:2] for slot in self._slots if slot is not None)
        # A view of overlapping arguments could belong to either.
        self._failed = any(after[0] < before[1] for before, after in pairwise(spans))

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Record within the context."""
        launch.noting.tell = self._launched
        try:
            with self:
                yield
        finally:
            launch.noting.tell = None

    def recipe(self, result: Any, device: torch.device) -> Recipe | None:
        """Make the recipe of a call that returned `result`, or None if a step cannot be repeated."""
        place = map_tensors(self._result, result)
        if self._failed:
            return None
        unused: dict[int, list[int]] = {}
        for slot, last in self._last.items():
            if slot >= self._arguments:
                unused.setdefault(last, []).append(slot)
        # Allocations that no step uses are omitted: results that only a gradient would need.
        steps = [
            (action, made, unused.get(i, ()))
            for i, (action, made) in enumerate(self._actions)
            if made in (None, *self._last)
        ]
        return Recipe(steps, len(self._slots) - self._arguments, place, device)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        # Record the steps of a registered operation instead of its call.
        if func.namespace == "warpfold":
            with self:
                return dispatch.runs[func._opname](*args, **kwargs)
        out = func(*args, **kwargs)
        changes = func._schema.is_mutable
        aliases = any(returned.alias_info is not None for returned in func._schema.returns)
        # A view needs no step, since its place is found by its address.
        if not changes and aliases and not _is_copy(out, (args, kwargs)):
            return out
        self._failed |= not (changes or isinstance(out, Tensor))
        slot = None if changes else len(self._slots)
        if func._opname in ALLOCATE:
            self._note(_allocation(out), slot)
        else:
            placed, named = map_tensors(self._place, list(args)), map_tensors(self._place, dict(kwargs))
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
        """Return the place of a result.  Empty results are allocated at each call: no two may be the same tensor."""
        if t.numel():
            place = self._place(t)
        else:
            place = _Place(len(self._slots), 0, tuple(t.shape), t.stride(), True)
            self._note(_allocation(t), len(self._slots))
            self._slots.append(_Slot.of(t))
        if isinstance(place, _Place):
            # The slot is never freed.
            self._last[place.slot] = sys.maxsize
        return place

    def _place(self, t: Tensor) -> "_Place | _Empty | None":
        """Return the place of a tensor that the next action uses, and note the use of its slot."""
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
        """Record a launch.  compiled: the code that it used, or None in Triton's interpreter."""
        names, addresses = list(kernel.kernel.function.arg_names), 0
        values, pointers, nested = [arguments[name] for name in names], [], []
        for at, value in enumerate(values):
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
            if not tensors:
                continue
            # The recipe must not keep memory alive.
            values[at] = None
            for tensor in tensors:
                addresses |= tensor.data_ptr()
            tensor, *rest = (value, ()) if isinstance(value, Tensor) else value
            # Several tensors, as in the jobs of `sum_partials`, or an empty one.
            if tensors[0] is not tensor or len(tensors) > 1 or not tensor.numel():
                nested.append((at, list(self._steps_of(value))))
            elif isinstance(place := self._place(tensor), _Place):
                in_tuple = (None, None) if tensor is value else (tuple(rest), type(value))
                pointers.append((at, place.slot, place.offset * tensor.element_size(), *in_tuple))
        is_direct = compiled is not None and not addresses % ALIGNMENT
        run, code = (compiled.run, (compiled.function, compiled.packed_metadata)) if is_direct else (None, ())
        (x, y, z), fixed = (*grid, 1, 1)[:3], (*code, None, None, None)
        launcher, options = kernel.kernel.function[grid], kernel.config.options
        self._note(_Launch(launcher, options, run, (x, y, z), fixed, names, values, pointers, nested))

    def _steps_of(self, value: Any) -> Iterator[tuple[int, Any, Any]]:
        """Yield the steps that build an argument of a launch."""
        if isinstance(value, Tensor):
            place = self._place(value)
            if isinstance(place, _Place):
                yield ADDRESS, place.slot, place.offset * value.element_size()
            elif isinstance(place, _Empty):
                yield EMPTY, place.make, 0
        elif isinstance(value, tuple):
            for part in value:
                yield from self._steps_of(part)
            yield TUPLE, len(value), type(value)
        else:
            yield CONSTANT, value, 0


def _allocation(t: Tensor) -> Callable[[], Tensor]:
    """Return a function that allocates a tensor with the layout of this one."""
    return functools.partial(torch.empty_strided, t.shape, t.stride(), dtype=t.dtype, device=t.device)


def _is_copy(out: Any, arguments: Any) -> bool:
    """Return whether the result of an operation that may return a view, such as `contiguous`, has its own memory."""
    if not isinstance(out, Tensor) or not out.numel():
        return False
    inputs = [t.untyped_storage().data_ptr() for t in tree_leaves(arguments) if isinstance(t, Tensor)]
    return out.untyped_storage().data_ptr() not in inputs


def _filled(value: Any, memory: Memory) -> Any:
    """Replace places in an argument of a torch operation by tensors."""
    if isinstance(value, _Place | _Empty):
        return value.of(memory)
    return type(value)([_filled(item, memory) for item in value]) if isinstance(value, tuple | list) else value
