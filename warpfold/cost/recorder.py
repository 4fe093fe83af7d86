"""Record a run on meta tensors: allocations and releases of memory, operations, and collectives.

`Recorder` is a dispatch mode that follows each memory block from its allocation to its release. While it listens
(`Recorder.listening`), it also writes an entry for each of our operations, for each torch operation outside of ours,
and for each collective. If a call without gradients repeats an earlier one, the record of the earlier call is copied.
"""

import enum
import functools
import weakref
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from warpfold.check.op_profile import Cost
from warpfold.cost.rates import TORCH, PassName, arguments_of, call_cost, name_of
from warpfold.device import OnHost, Upload
from warpfold.host import HostTensor
from warpfold.ops import dispatch
from warpfold.ops.dispatch import Op
from warpfold.ops.torch_internals import (
    DispatchMode,
    current_node,
    in_backward,
    is_composite,
    next_node_number,
    node_number,
    without_modes,
)
from warpfold.parallel.waits import Event, Work, watched

META = torch.device("meta")
aten = torch.ops.aten
FACTORIES = {
    *(aten.empty.memory_format, aten.empty_strided.default, aten.zeros.default, aten.ones.default, aten.full.default),
    *(aten.arange.default, aten.arange.start, aten.arange.start_step, aten.eye.default, aten.eye.m),
    *(aten.linspace.default, aten.scalar_tensor.default, aten.rand.default, aten.randn.default),
}
# Torch operations that launch nothing: they allocate, or replace the storage of a tensor.
ALLOCATE = {"set_", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
# Torch operations that compute one exponential per element.
EXPONENTIALS = {"_softmax", "exp", "sigmoid", "softplus"}
PLAIN_TYPES = (Tensor, nn.Parameter)
# Cached results in `_layouts`. The cache is emptied when it is full.
MAX_LAYOUTS = 1 << 16
# Larger tensors are not copied to the host.
MAX_HOST_ELEMENTS = 2**20
# Above the numbers of collectives of slices.
FIRST_GRADIENT_NUMBER = 1 << 24
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
# Shapes, strides and dtypes of the results of earlier torch operations on meta tensors. Allocating results from this
# cache takes a twentieth of the time of torch's shape inference, which runs in Python.
_layouts: dict[Any, list[Layout]] = {}

Phase = Literal["early", "forward", "recomputed", "backward", "update"]
# The group of copies to and from host memory.
HOST = "host"


class Kind(enum.Enum):
    """Effect of a torch operation on memory.

    COMPOSITE: composed of other operations. IN_PLACE: changes and returns its first argument. VIEW: returns views; half
    of all calls of a model. NEW: allocates its results. OUT: writes to its argument `out` and returns it.
    OTHER: unknown; the storages of its arguments and results are compared after the call.
    """

    COMPOSITE = enum.auto()
    IN_PLACE = enum.auto()
    VIEW = enum.auto()
    NEW = enum.auto()
    OUT = enum.auto()
    OTHER = enum.auto()


class Place(NamedTuple):
    """A position in the model: module or phase, owner of the tensors in memory figures, and block of a stack.

    owner: "" if the shape of a tensor decides. stack: stack of the trunk, or "".
    """

    name: str = ""
    owner: str = ""
    stack: str = ""
    block: tuple[str, int] | None = None
    backward: bool = False


@dataclass(slots=True)
class Operation:
    """One pass of one of our operations, or of a torch operation outside of ours.

    op: name in the rates of a device. launches: number of kernels. phase: "early" is a pass without gradients.
    part: stack to which it belongs, or "". times: number of equal operations that the entry represents.
    replayed: a graph contains it, so the host does not launch its kernels.
    """

    op: str
    which: PassName
    cost: Cost
    dtype: torch.dtype
    launches: int
    phase: Phase
    part: str = ""
    times: float = 1.0
    replayed: bool = False


@dataclass(slots=True)
class Begin:
    """The start of a collective with which `sent` bytes leave this rank.

    group: "axial", "branch", "model" or "data"; "node" and "nodes" for hierarchical sums; "host" for a copy between
    device and host memory. after: collectives for which it waits on a side stream. part, times, replayed: as in
    `Operation`.
    """

    number: int
    kind: str
    group: str
    sent: int
    phase: Phase
    after: tuple[int, ...] = ()
    part: str = ""
    times: float = 1.0
    replayed: bool = False


@dataclass(frozen=True, slots=True)
class Await:
    """A wait for a collective, whose result the following entries need."""

    number: int


Entry = Operation | Begin | Await


@dataclass(eq=False, slots=True)
class MemoryPiece:
    """A memory block and the operation that allocated it.

    born, died: moments, which count allocations and releases. host: in host memory, although the run is on another
    device.
    """

    bytes: int
    shape: tuple[int, ...]
    made_by: str
    place: Place
    born: int
    died: int | None = None
    host: bool = False

    def shifted(self, moments: int, place: Place | None = None) -> "MemoryPiece":
        """Return a copy at a later moment, and at another place unless it is None."""
        died, place = None if self.died is None else self.died + moments, self.place if place is None else place
        return MemoryPiece(self.bytes, self.shape, self.made_by, place, self.born + moments, died, self.host)


@dataclass
class _Call:
    """A call of one of our operations, whose autograd nodes have the numbers from `first` up to `end`.

    backward: entry of its backward pass, which is written when the backward pass of the call begins.
    """

    backward: Operation
    first: int
    end: int
    is_written: bool = False


@dataclass(frozen=True)
class _Trace:
    """The record of a call that can be copied. Moments count from the start of the call.

    results: for each result, the index of an argument, or the index of a memory piece and its layout.
    single: the call returned a tensor instead of a tuple. most, host_most: largest number of bytes in addition to those
    before the call. most_at: moment at which `most` was reached. one_place: all pieces were allocated at the same
    place, for example by an operation that several layers call. moments: number of allocations and releases.
    course, entries: as in `Recorder`. launches: number of kernels.
    """

    pieces: list[MemoryPiece]
    results: list[tuple[int, Layout | None]]
    single: bool
    most: int
    most_at: int
    host_most: int
    one_place: bool
    moments: int
    course: list[tuple[int, str]]
    entries: list[Entry]
    launches: int


class Recorder(DispatchMode):
    """Record memory, operations and collectives of the code that runs within the context.

    Tensors within the implementations of our operations are included. Workspaces of torch's operations, and tensors
    that existed before, are not. Reading a number of a meta tensor yields zero.

    now, peak: bytes. pieces: all memory pieces in the order of allocation. course: pairs of a moment and the name of
    the code that begins then. entries: operations and collectives, while it listens.
    unit: granularity of allocations in bytes. place: returns the present position in the model.
    host_apart: tensors that are created on the CPU explicitly or by default do not count as memory of the device
    (`MemoryPiece.host`).
    """

    def __init__(self, unit: int = 1, host_apart: bool = False) -> None:
        super().__init__()
        self.unit, self.host_apart = unit, host_apart
        self.place: Callable[[], Place] = Place
        self.now = self.peak = self.moment = self.host_now = self.host_peak = 0
        self.pieces: list[MemoryPiece] = []
        self.course: list[tuple[int, str]] = []
        self._live: dict[int, MemoryPiece] = {}
        self._peak_moment = 0
        self._traces: dict[Any, _Trace] = {}

        self.entries: list[Entry] = []
        self.phase: Phase = "forward"
        # Launches within our operations: Triton kernels and torch operations.
        self.launches = 0
        self._listens = False
        # Nesting depth of our operations.
        self._depth = 0
        # Calls in forward passes with gradients, in order, and their first node numbers.
        self._calls: list[_Call] = []
        self._firsts: list[int] = []
        # The stack of the last entry.
        self._part = ""
        # Collectives of gradients in flight, by title.
        self._due: dict[str, deque[int]] = defaultdict(deque)
        # Waits on the side stream delay only the collectives that begin there.
        self._after: list[int] = []
        self._on_side_stream = False
        self._numbers = count(FIRST_GRADIENT_NUMBER)
        self._uploads: dict[int, int] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Disable torch's check for compilation, which takes more time than the mode itself."""
        return False

    # Dispatch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "warpfold":
            return self._registered(func, args, kwargs)
        kind = _kind(func)
        if kind is Kind.COMPOSITE:
            # Below autograd, torch does not decompose these by itself.
            with self:
                return func.decompose(*args, **kwargs)
        if kind is Kind.VIEW:
            return func(*args, **kwargs)
        if kind is Kind.IN_PLACE and args[0].is_meta and type(args[0]) in PLAIN_TYPES:
            if self._listens:
                self._count_torch_op(func, args, kwargs, args[0])
            return args[0]
        out, is_new = self._run(kind, func, args, kwargs)
        if self._listens and func._opname not in ALLOCATE:
            self._count_torch_op(func, args, kwargs, out, is_new)
        return out

    def _registered(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Run the implementation of one of our registered operations for this device."""
        owner = None if self._depth or not self._listens else self._backward_owner()
        before = self.launches
        self._depth += 1
        try:
            with self:
                out = self.run(func, dispatch.implementation(func._opname, args[0]), args, kwargs)
        finally:
            self._depth -= 1
        if owner is not None:
            owner.launches += self.launches - before
        return out

    def _run(self, kind: Kind, func: Any, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, bool]:
        """Run a torch operation and record its allocations; returns the result, and whether it is certainly new."""
        key = call_key(func, args, kwargs) if kind in (Kind.NEW, Kind.OUT) else None
        if key is not None and (layouts := _layouts.get(key)) is not None:
            if kind is Kind.OUT:
                return kwargs["out"], True
            # Allocate the results as before, without running the operation.
            new_tensors = [
                torch.empty_strided(shape, stride, dtype=dtype, device=META) for shape, stride, dtype in layouts
            ]
            for tensor in new_tensors:
                self._allocated(tensor, func, False)
            return new_tensors[0] if len(new_tensors) == 1 else tuple(new_tensors), True
        operands = tensors_in(kwargs.values(), tensors_in(args, []))
        name, device = func._opname, kwargs.get("device")
        reads_meta, is_factory = bool(operands) and operands[0].is_meta, not operands and func in FACTORIES
        on_host = device is not None and device.type == "cpu"
        # A meta tensor has no numbers: those that the host reads are zero, and comparisons are true.
        if reads_meta and name == "_local_scalar_dense":
            return operands[0].dtype.is_floating_point and 0.0, False
        if reads_meta and name == "equal":
            return True, False
        if reads_meta and on_host and name == "_to_copy" and operands[0].numel() <= MAX_HOST_ELEMENTS:
            dtype = kwargs.get("dtype") or operands[0].dtype
            return torch.zeros(operands[0].shape, dtype=dtype, device="cpu"), False
        host = self.host_apart and (on_host or (not operands and device is None))
        if is_factory and device is None:
            kwargs = {**kwargs, "device": META}
        elif on_host and (reads_meta or is_factory):
            kwargs = {**kwargs, "device": META, "pin_memory": None}
        out = func(*args, **kwargs)
        storages = {t.untyped_storage()._cdata for t in operands}
        new_tensors = [t for t in tensors_in((out,), []) if t.untyped_storage()._cdata not in storages]
        for tensor in new_tensors:
            self._allocated(tensor, func, host or (self.host_apart and not tensor.is_meta))
        # An `out` that was resized has another key now, and may not be cached.
        repeats = key is not None and (
            call_key(func, args, kwargs) == key if kind is Kind.OUT else _can_be_made_again(out, new_tensors)
        )
        if repeats:
            if len(_layouts) >= MAX_LAYOUTS:
                _layouts.clear()
            _layouts[key] = [(tuple(t.shape), t.stride(), t.dtype) for t in new_tensors]
        return out, False

    # Memory

    @property
    def at_peak(self) -> list[MemoryPiece]:
        """The memory pieces at the peak, largest first."""
        at = self._peak_moment
        held_pieces = [piece for piece in self.pieces if piece.born <= at and (piece.died is None or at < piece.died)]
        return sorted(held_pieces, key=lambda piece: -piece.bytes)

    def restart(self) -> int:
        """Return the peak so far, and start a new one at the present memory."""
        before, self.peak, self._peak_moment = self.peak, self.now, self.moment
        return before

    def piece_of(self, tensor: Tensor) -> MemoryPiece | None:
        """Return the memory piece of a tensor's storage; None if it was allocated before."""
        return self._live.get(tensor.untyped_storage()._cdata)

    def _allocated(self, tensor: Tensor, func: Any, host: bool) -> None:
        storage = tensor.untyped_storage()
        # Two results may share a storage.
        if storage._cdata in self._live:
            return
        self.moment += 1
        size = -(-storage.nbytes() // self.unit) * self.unit
        piece = MemoryPiece(size, tuple(tensor.shape), str(func), self.place(), self.moment, host=host)
        self.pieces.append(piece)
        self._hold(storage, piece)
        if self.now > self.peak:
            self.peak, self._peak_moment = self.now, self.moment

    def _hold(self, storage: Any, piece: MemoryPiece) -> None:
        """Count a memory piece until its storage is released."""
        self._live[storage._cdata] = piece
        weakref.finalize(storage, self._released, storage._cdata)
        if piece.host:
            self.host_now += piece.bytes
            self.host_peak = max(self.host_peak, self.host_now)
        else:
            self.now += piece.bytes

    def _released(self, key: int) -> None:
        self.moment += 1
        piece = self._live.pop(key)
        piece.died = self.moment
        if piece.host:
            self.host_now -= piece.bytes
        else:
            self.now -= piece.bytes

    # Repeated calls

    def run(self, what: Any, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Call a function, or copy the record of an earlier call whose arguments had the same layout.

        what: identity of the function, including everything else that its record depends on. The call must not be
        visible to autograd.
        """
        key = call_key(what, args, kwargs)
        if key is None:
            return function(*args, **kwargs)
        key = key, dispatch.represented_iterations(), self.phase
        if (trace := self._traces.get(key)) is not None:
            # Without modes, because `_repeat` records the results itself.
            return without_modes(self._repeat, trace, args)
        before = self.moment, len(self.pieces), len(self.course), len(self.entries), self.launches
        out = function(*args, **kwargs)
        trace = self._traced(out, args, *before)
        if trace is not None:
            self._traces[key] = trace
        return out

    def _traced(
        self, out: Any, args: Sequence[Any], begun: int, pieces_before: int, course_before: int, entries_before: int,
        launches_before: int,
    ) -> _Trace | None:  # fmt: skip
        """Build the trace of a call from the state before it; returns None if it left more behind than its results."""
        made, entries = self.pieces[pieces_before:], self.entries[entries_before:]
        results = (out,) if isinstance(out, Tensor) else out
        if not isinstance(results, tuple) or not all(type(t) in PLAIN_TYPES and t.is_meta for t in results):
            return None
        started = {entry.number for entry in entries if isinstance(entry, Begin)}
        if started != {entry.number for entry in entries if isinstance(entry, Await)}:
            # A collective outlasts the call.
            return None
        sources: list[tuple[int, Layout | None]] = []
        numbers = {id(piece): number for number, piece in enumerate(made)}
        for t in results:
            same = [number for number, x in enumerate(args) if x is t]
            piece = self.piece_of(t)
            if same:
                sources.append((same[0], None))
            elif piece is not None and id(piece) in numbers and _is_whole(t):
                sources.append((numbers[id(piece)], (tuple(t.shape), t.stride(), t.dtype)))
            else:
                return None
        left_numbers = {number for number, piece in enumerate(made) if piece.died is None}
        returned = [number for number, layout in sources if layout is not None]
        died = sum(piece.died is not None for piece in made)
        # The second condition fails if memory from before the call was released during it.
        if sorted(returned) != sorted(left_numbers) or self.moment - begun != len(made) + died:
            return None
        pieces = [piece.shifted(-begun) for piece in made]
        most, most_at, host_most = _highest(pieces)
        return _Trace(
            pieces=pieces,
            results=sources,
            single=isinstance(out, Tensor),
            most=most,
            most_at=most_at,
            host_most=host_most,
            one_place=len({p.place for p in pieces}) == 1,
            moments=self.moment - begun,
            course=[(moment - begun, name) for moment, name in self.course[course_before:]],
            entries=entries,
            launches=self.launches - launches_before,
        )

    def _repeat(self, trace: _Trace, args: Sequence[Any]) -> Any:
        """Copy a trace as if its allocations and releases happened now, and return new results."""
        begun, first = self.moment, len(self.pieces)
        if self.now + trace.most > self.peak:
            self.peak, self._peak_moment = self.now + trace.most, begun + trace.most_at
        self.host_peak = max(self.host_peak, self.host_now + trace.host_most)
        place = self.place() if trace.one_place else None
        self.pieces += [p.shifted(begun, place) for p in trace.pieces]
        self.course += [(begun + moment, name) for moment, name in trace.course]
        self.entries += trace.entries
        self.launches += trace.launches
        self.moment = begun + trace.moments
        results = []
        for number, layout in trace.results:
            if layout is None:
                results.append(args[number])
                continue
            results.append(torch.empty_strided(*layout[:2], dtype=layout[2], device=META))
            self._hold(results[-1].untyped_storage(), self.pieces[first + number])
        return results[0] if trace.single else tuple(results)

    # Operations

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Write entries within the context for everything that this thread does.

        Collectives and operations have observers. Copies between host and device, and waits, have none, so the context
        replaces `Work.wait`, `OnHost.__init__`, `HostTensor._start`, `HostTensor.store` and `Upload.wait`.
        """
        save, start, fetch, store = OnHost.__init__, HostTensor._start, Upload.wait, HostTensor.store

        def saved(host: OnHost, x: Tensor, *more: Any) -> None:
            # A tensor that is saved for the backward pass is copied to host memory and back.
            self.entries.append(self._copy(2 * x.nbytes))
            save(host, x, *more)

        def started(host: HostTensor, *args: Any) -> Upload:
            upload = start(host, *args)
            self.entries.append(copy := self._copy(upload._copy.nbytes))
            self._uploads[id(upload)] = copy.number
            return upload

        def fetched(upload: Upload) -> Tensor:
            # There is no number for a tensor that is saved for the backward pass.
            if (number := self._uploads.pop(id(upload), None)) is not None:
                self._wait(number)
            return fetch(upload)

        def stored(*args: Any) -> None:
            self.entries.append(self._copy(args[2].nbytes))
            store(*args)

        def waited(work: Work) -> None:
            # Collectives of gradients with equal titles are awaited in the order of their starts.
            if self._due[work.name]:
                self._wait(self._due[work.name].popleft())

        replaced: dict[tuple[type, str], Callable[..., Any]] = {
            (Work, "wait"): waited,
            (OnHost, "__init__"): saved,
            (HostTensor, "_start"): started,
            (HostTensor, "store"): stored,
            (Upload, "wait"): fetched,
        }
        with ExitStack() as undo:
            undo.enter_context(watched(self._on_event))
            undo.enter_context(dispatch.observed(self._record_call))
            for (owner, name), function in replaced.items():
                undo.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, function)
            self._listens = True
            undo.callback(setattr, self, "_listens", False)
            yield

    def taken(self) -> list[Entry]:
        """Return and remove the entries since the last call."""
        entries, self.entries = self.entries, []
        return entries

    @property
    def part(self) -> str:
        """The stack that is running forward or backward.

        The gradient of a leaf belongs to the previous node's stack.
        """
        place = self.place()
        if not (place.backward and place.owner == "gradients" and place.name == "backward"):
            self._part = place.stack
        return self._part

    def _record_call(self, original: Callable[..., Any], op: Op[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Call one of our operations and write its entry, which includes nested operations."""
        call = functools.partial(original, op)
        if self._depth or not any(isinstance(x, Tensor) for x in args):
            return call(*args, **kwargs) if torch.is_grad_enabled() else self.run(op, call, args, kwargs)
        arguments = arguments_of(op, args, kwargs)
        dtype = next(_float(x) for x in arguments.values() if isinstance(x, Tensor))
        forward, with_gradient = not in_backward(), torch.is_grad_enabled()
        phase = self.phase if forward else "recomputed"
        cost, pass_name = call_cost(op, arguments, True), "training" if with_gradient else "forward"
        entry = Operation(name_of(op), pass_name, cost, dtype, 0, phase, self.part, dispatch.represented_iterations())  # type: ignore[arg-type]
        keeps_graph = forward and with_gradient
        # Compute the cost of the backward pass now, because keeping the arguments would keep their memory alive.
        backward_cost = call_cost(op, arguments, False) if keeps_graph else cost
        del arguments
        first, before = next_node_number() if keeps_graph else 0, self.launches
        self._depth += 1
        try:
            result = call(*args, **kwargs) if with_gradient else self.run(op, call, args, kwargs)
        finally:
            self._depth -= 1
        entry.launches = self.launches - before
        self.entries.append(entry)
        if keeps_graph and (end := next_node_number()) > first:
            backward = Operation(entry.op, "backward", backward_cost, dtype, 0, "backward")
            self._calls.append(_Call(backward, first, end))
            self._firsts.append(first)
        return result

    def _backward_owner(self) -> Operation | None:
        """Return the entry of our operation whose backward pass is running; None for torch's own or a recomputation."""
        if not in_backward() or torch.is_grad_enabled():
            return None
        node = current_node()
        number = -1 if node is None else node_number(node)
        at = bisect_right(self._firsts, number) - 1
        if at < 0 or number >= self._calls[at].end:
            return None
        call = self._calls[at]
        if not call.is_written:
            call.is_written, call.backward.part = True, self.part
            self.entries.append(call.backward)
        return call.backward

    def _count_torch_op(self, func: Any, args: Any, kwargs: Mapping[str, Any], out: Any, is_new: bool = True) -> None:
        """Count a torch operation as a launch of one of our operations, or write its own entry."""
        if is_new and self._depth:
            self.launches += 1
            return
        # Operations that change lists of tensors, their first operand, return nothing.
        changed = out is None and func._schema.is_mutable
        results = tensors_in(args[:1] if changed else (out,), [])
        if not results:
            return
        operands = tensors_in(kwargs.values(), tensors_in(args, []))
        if not (is_new or func._schema.is_mutable):
            storages = {x.untyped_storage()._cdata for x in operands}
            # Views launch nothing.
            if all(x.untyped_storage()._cdata in storages or not x.numel() for x in results):
                return
        if self._depth:
            self.launches += 1
            return
        owner = self._backward_owner()
        if owner is not None:
            owner.launches += 1
            return
        phase = self.phase
        if in_backward():
            phase = "recomputed" if torch.is_grad_enabled() else "backward"
        exps = sum(x.numel() for x in results) if func._opname in EXPONENTIALS else 0
        cost = Cost(products(func, args, kwargs, out), exps, sum(x.nbytes for x in (*operands, *results)))
        dtype, times = _float(results[0]), dispatch.represented_iterations()
        self.entries.append(Operation(TORCH, "forward", cost, dtype, 1, phase, self.part, times))

    # Collectives and copies

    def _on_event(self, event: Event) -> None:
        """Write the start of a collective, or the wait for a collective of an example's slices."""
        if event.what == "wait":
            self._wait(event.number)
            return
        number, group = event.number, "branch" if event.kind == "sendrecv" else "axial"
        if event.carries == "gradients":
            number, group = next(self._numbers), event.name.split(" over ")[1].removesuffix(" ranks")
            self._due[event.title].append(number)
        phase = self.phase
        if in_backward():
            phase = "backward" if event.backward or event.carries == "gradients" else "recomputed"
        after, times = tuple(self._after), dispatch.represented_iterations()
        self.entries.append(Begin(number, event.kind, group, event.bytes, phase, after, self.part, times))
        self._after = [] if self._on_side_stream else self._after

    def _wait(self, number: int) -> None:
        if self._on_side_stream:
            self._after.append(number)
        else:
            self.entries.append(Await(number))

    def submit(self, call: Callable[[], None]) -> Future[None]:
        """Run a call at once, as if on a side stream. The recorder replaces the reducer's thread."""
        self._on_side_stream, done = True, Future[None]()
        call()
        self._on_side_stream, self._after = False, []
        done.set_result(None)
        return done

    def _copy(self, size: int) -> Begin:
        """Create the entry of a copy to or from host memory."""
        times = dispatch.represented_iterations()
        return Begin(next(self._numbers), HOST, HOST, size, self.phase, (), self.part, times)


@functools.cache
def _kind(func: Any) -> Kind:
    if is_composite(func):
        return Kind.COMPOSITE
    schema = func._schema
    if func.namespace != "aten" or torch.Tag.inplace_view in func.tags:
        return Kind.OTHER
    if not schema.is_mutable:
        return Kind.VIEW if any(a.alias_info is not None for a in (*schema.arguments, *schema.returns)) else Kind.NEW
    changed = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    returned = [a.alias_info is not None and a.alias_info.is_write for a in schema.returns]
    if sum(changed) != 1 or returned != [True]:
        return Kind.OTHER
    if schema.arguments[changed.index(True)].name == "out":
        return Kind.OUT
    return Kind.IN_PLACE if changed[0] and func._opname.endswith("_") else Kind.OTHER


def products(func: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> int:
    """Compute the floating point operations of a torch operation if it is a matrix product; otherwise 0."""
    formula = flop_registry.get(func._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def _float(x: Tensor) -> torch.dtype:
    """Return the dtype for the rates of a device; integers and fp64 count as fp32."""
    return x.dtype if x.dtype in (torch.bfloat16, torch.float16) else torch.float32


def _highest(pieces: Sequence[MemoryPiece]) -> tuple[int, int, int]:
    """Compute the largest number of bytes on the device, its moment, and the largest number in host memory."""
    changes = [(piece.born, piece.bytes, piece.host) for piece in pieces]
    changes += [(piece.died, -piece.bytes, piece.host) for piece in pieces if piece.died is not None]
    now = most = at = host_now = host_most = 0
    for moment, change, host in sorted(changes):
        if host:
            host_now += change
            host_most = max(host_most, host_now)
            continue
        now += change
        if now > most:
            most, at = now, moment
    return most, at, host_most


def call_key(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return a key that determines the layout of a call's results; None if a tensor is not on "meta"."""
    parts: list[Any] = [func]
    if not _add_to_key(parts, args):
        return None
    for name, x in kwargs.items():
        parts.append(name)
        if not _add_to_key(parts, (x,)):
            return None
    return tuple(parts)


def _add_to_key(parts: list[Any], values: Sequence[Any]) -> bool:
    for x in values:
        kind = type(x)
        if kind in PLAIN_TYPES:
            if not x.is_meta:
                return False
            parts += (x.shape, x.stride(), x.dtype)
        elif kind is list or kind is tuple:
            parts.append(len(x))
            if not _add_to_key(parts, x):
                return False
        elif isinstance(x, Tensor) or (isinstance(x, torch.device) and x.type != "meta"):
            return False
        else:
            # The type distinguishes 1, 1.0 and True, which are equal.
            parts += (kind, x)
    return True


def _can_be_made_again(out: Any, made: Sequence[Tensor]) -> bool:
    """Return whether an operation returned exactly these tensors, each in its own memory."""
    results = (out,) if isinstance(out, Tensor) else out
    if not isinstance(results, tuple) or len(results) != len(made) or not all(a is b for a, b in zip(results, made)):
        return False
    if len({t.untyped_storage()._cdata for t in made}) < len(made) or not all(t.is_meta for t in made):
        return False
    return all(map(_is_whole, made))


def _is_whole(t: Tensor) -> bool:
    """Return whether a tensor fills its memory, like a newly allocated one."""
    reaches = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride())) if t.numel() else 0
    return t.untyped_storage().nbytes() == reaches * t.element_size()


def tensors_in(values: Any, found: list[Tensor]) -> list[Tensor]:
    """Append the tensors among an operation's arguments or results to a list, five times as fast as torch's pytree."""
    for x in values:
        if isinstance(x, Tensor):
            found.append(x)
        elif type(x) in (list, tuple):
            tensors_in(x, found)
    return found
