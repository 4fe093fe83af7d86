"""One rank of many, run alone and without computing: what it would say, and what it would hold.

Nothing travels (torch's fake process group: collectives end at once), and nothing is stored (tensors on the device
"meta": shapes alone).  So plans for 512 ranks and thousands of residues can be counted on any machine.
"""

import enum
import functools
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from warpfold.batch import FEATURES, Batch
from warpfold.engine.packed import PackedWeights
from warpfold.model.alphafold import AlphaFold, ModelConfig
from warpfold.model.losses import LossConfig, total_loss
from warpfold.ops import dispatch
from warpfold.ops.torch_internals import (
    DispatchMode,
    fake_process_group,
    is_composite,
    without_modes,
)
from warpfold.parallel.execution import Execution
from warpfold.parallel.mesh import Mesh, make_mesh
from warpfold.parallel.plan import Plan

META = torch.device("meta")
aten = torch.ops.aten
FACTORIES = {
    *(aten.empty.memory_format, aten.empty_strided.default, aten.zeros.default, aten.ones.default, aten.full.default),
    *(aten.arange.default, aten.arange.start, aten.arange.start_step, aten.eye.default, aten.eye.m),
    *(aten.linspace.default, aten.scalar_tensor.default, aten.rand.default, aten.randn.default),
}
PLAIN = (Tensor, nn.Parameter)
# What torch's operations made before of tensors without memory: shapes, strides and dtypes.  To make the same again
# takes a twentieth of what torch needs to find it out, in Python.
_made: dict[Any, "list[_Layout]"] = {}
MOST = 1 << 16  # that are remembered
READ = 2**20  # numbers: what is larger is not brought to the host to be read


@contextmanager
def uncollected() -> Iterator[None]:
    """Leave cyclic garbage where it is within the context: looking for it among all the pieces takes half the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def fake_ranks(data: int = 1, axial: int = 1, branch: int = 1, rank: int = 0) -> Iterator[Mesh]:
    """Within it, this process is rank `rank` of a grid whose others do not exist, and new tensors are on "meta".

    Errors: as of `fake_mesh`.
    """
    with fake_mesh(data, axial, branch, rank) as mesh, META:
        yield mesh


@contextmanager
def fake_mesh(data: int = 1, axial: int = 1, branch: int = 1, rank: int = 0) -> Iterator[Mesh]:
    """Within it, this process is rank `rank` of a grid whose others do not exist.

    Errors: RuntimeError within another one.
    """
    if data * axial * branch == 1:
        yield Mesh()
        return
    if dist.is_initialized() and dist.get_backend() == "fake":
        raise RuntimeError("fake ranks need a process that is no rank of others")
    with fake_process_group(rank, data * axial * branch):
        with META:
            mesh = make_mesh(data, axial, branch)
        yield mesh


def fake_batch(**sizes: int) -> Batch:
    """The features of the table (warpfold/batch.py) on "meta", labels too, whose named axes have a size in `sizes`."""
    given = {name: f for name, f in FEATURES.items() if {a for a in f.axes if isinstance(a, str)} <= set(sizes)}
    shapes = {name: [sizes[a] if isinstance(a, str) else a for a in f.axes] for name, f in given.items()}
    return {
        name: torch.empty(shape, dtype=getattr(torch, FEATURES[name].dtype), device="meta")
        for name, shape in shapes.items()
    }


@dataclass(eq=False, slots=True)
class MemoryPiece:
    """A piece of memory, as the operation that made it left it; born and died: after how many pieces came or went."""

    bytes: int
    shape: tuple[int, ...]
    made_by: str
    place: Any  # what `Memory.place` said then
    born: int
    died: int | None = None
    host: bool = False  # in host memory, though the run is on another device

    def lives(self, moment: int) -> bool:
        """Return whether it exists when so many pieces have come or gone."""
        return self.born <= moment and (self.died is None or moment < self.died)

    def shifted(self, moments: int, place: Any = None) -> "MemoryPiece":
        """Return one like it, so many moments later; place: where it is made then, None: where this one was."""
        died, place = None if self.died is None else self.died + moments, self.place if place is None else place
        return MemoryPiece(self.bytes, self.shape, self.made_by, place, self.born + moments, died, self.host)


class Memory(DispatchMode):
    """Within it, every piece of memory that an operation makes is counted while it lives.

    Of an operation of ours what its implementation makes is counted, too; what torch's own need for themselves while
    they run, and what existed before, is not seen.  What is read of a tensor without memory is answered with zeros.

    now, peak: bytes; pieces: all there were, in order; seen: shapes for which `noted` is true, with who made them.
    unit: bytes that each piece takes a multiple of.  place: says where the run is, for each piece.
    host_apart: what is made on the CPU by name or by default is no memory of the device (`MemoryPiece.host`).
    """

    def __init__(
        self,
        noted: Callable[[Sequence[int]], bool] = lambda shape: False,
        unit: int = 1,
        place: Callable[[], Any] = lambda: None,
        host_apart: bool = False,
    ) -> None:
        super().__init__()
        self.noted, self.unit, self.place, self.host_apart = noted, unit, place, host_apart
        self.now = self.peak = self.moment = self.host_now = self.host_peak = 0
        self.pieces: list[MemoryPiece] = []
        self.seen: set[tuple[str, tuple[int, ...]]] = set()
        self._live: dict[int, MemoryPiece] = {}
        self._peak_moment = 0
        self._traces: dict[Any, _Trace] = {}  # of functions: what they made and let go
        self.course: list[tuple[int, str]] = []  # from which moment on what was at work, as whoever watches notes it

    @property
    def at_peak(self) -> list[MemoryPiece]:
        """What was held when most was held, largest first."""
        return sorted((piece for piece in self.pieces if piece.lives(self._peak_moment)), key=lambda h: -h.bytes)

    def restart(self) -> int:
        """Return the peak so far, and look for another from now on."""
        before, self.peak, self._peak_moment = self.peak, self.now, self.moment
        return before

    def piece_of(self, tensor: Tensor) -> MemoryPiece | None:
        """Return the piece that a tensor lies in, if it was made within."""
        return self._live.get(tensor.untyped_storage()._cdata)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Take torch's word that nothing is compiled within: what keeps its compiler out costs more than we do."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "warpfold":
            with self:
                return self.run(func, dispatch.implementation(func._opname, args[0]), args, kwargs)
        kind = _kind(func)
        if kind is Kind.COMPOSITE:  # below autograd torch does not take these apart by itself
            with self:
                return func.decompose(*args, **kwargs)
        if kind is Kind.IN_PLACE and args[0].is_meta and type(args[0]) in PLAIN:
            return args[0]
        if kind is Kind.VIEW:
            return func(*args, **kwargs)
        key = call_key(func, args, kwargs) if kind in (Kind.NEW, Kind.OUT) else None
        if key is not None and (known := _made.get(key)) is not None:
            if kind is Kind.OUT:
                return kwargs["out"]
            made = [torch.empty_strided(shape, stride, dtype=dtype, device=META) for shape, stride, dtype in known]
            for tensor in made:
                self._note(tensor, func, False)
            return made[0] if len(made) == 1 else tuple(made)
        given = tensors_in(kwargs.values(), tensors_in(args, []))
        name, device = func._opname, kwargs.get("device")
        on_host = device is not None and device.type == "cpu"
        host = self.host_apart and (on_host or (not given and device is None))
        if given and given[0].is_meta and name == "_local_scalar_dense":
            return given[0].dtype.is_floating_point and 0.0
        if name == "equal" and given[0].is_meta:
            return True
        if not given and device is None and func in FACTORIES:
            kwargs = {**kwargs, "device": META}
        elif on_host and (given[0].is_meta if given else func in FACTORIES):
            if name == "_to_copy" and given[0].numel() <= READ:
                return torch.zeros(given[0].shape, dtype=kwargs.get("dtype") or given[0].dtype, device="cpu")
            kwargs = {**kwargs, "device": META, "pin_memory": None}
        out = func(*args, **kwargs)
        storages = {t.untyped_storage()._cdata for t in given}
        made = [t for t in tensors_in((out,), []) if t.untyped_storage()._cdata not in storages]
        for tensor in made:
            self._note(tensor, func, host or (self.host_apart and not tensor.is_meta))
        if key is None:
            return out
        if call_key(func, args, kwargs) == key if kind is Kind.OUT else _can_be_made_again(out, made):
            if len(_made) >= MOST:
                _made.clear()
            _made[key] = [(tuple(t.shape), t.stride(), t.dtype) for t in made]
        return out

    def run(self, what: Any, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Call a function; where it was called with the like before, repeat what it made and let go instead.

        what: stands for the function, and whatever else decides about what it does.  No graph of autograd is made.
        """
        key = call_key(what, args, kwargs)
        if key is None:
            return function(*args, **kwargs)
        if (trace := self._traces.get(key)) is not None:
            return without_modes(self._repeat, trace, args)  # what is made for the record is noted by hand
        begun, first, noted = self.moment, len(self.pieces), len(self.course)
        out = function(*args, **kwargs)
        trace = self._traced(out, args, self.pieces[first:], begun)
        if trace is not None:
            course = [(moment - begun, name) for moment, name in self.course[noted:]]
            self._traces[key] = replace(trace, moments=self.moment - begun, course=course)
        return out

    def _traced(self, out: Any, args: Sequence[Any], made: list[MemoryPiece], begun: int) -> "_Trace | None":
        """Return the trace of a function that made these pieces; None where its arguments do not tell it all."""
        results = (out,) if isinstance(out, Tensor) else out
        if not isinstance(results, tuple) or not all(type(t) in PLAIN and t.is_meta for t in results):
            return None
        sources: list[tuple[int, _Layout | None]] = []  # an argument's number; or a piece's, and how it lies
        places = {id(piece): number for number, piece in enumerate(made)}
        for t in results:
            given = [number for number, x in enumerate(args) if x is t]
            piece = self.piece_of(t)
            if given:
                sources.append((given[0], None))
            elif piece is not None and id(piece) in places and _whole(t):
                sources.append((places[id(piece)], (tuple(t.shape), t.stride(), t.dtype)))
            else:
                return None
        left = {number for number, piece in enumerate(made) if piece.died is None}
        own = [number for number, layout in sources if layout is not None]
        released = sum(piece.died is not None for piece in made)
        if sorted(own) != sorted(left) or self.moment - begun != len(made) + released:  # the latter: of others', too
            return None
        pieces = [piece.shifted(-begun) for piece in made]
        return _Trace(pieces, sources, isinstance(out, Tensor), *_highest(pieces), len({p.place for p in pieces}) == 1)

    def _repeat(self, trace: "_Trace", args: Sequence[Any]) -> Any:
        """Note the pieces of a trace as if they came and went now, and return new results."""
        begun, first = self.moment, len(self.pieces)
        if self.now + trace.most > self.peak:
            self.peak, self._peak_moment = self.now + trace.most, begun + trace.most_at
        self.host_peak = max(self.host_peak, self.host_now + trace.host_most)
        place = self.place() if trace.one_place else None
        self.pieces += [p.shifted(begun, place) for p in trace.pieces]
        self.course += [(begun + moment, name) for moment, name in trace.course]
        self.moment = begun + trace.moments
        results = []
        for number, layout in trace.results:
            if layout is None:
                results.append(args[number])
                continue
            results.append(torch.empty_strided(*layout[:2], dtype=layout[2], device=META))
            self._keep(results[-1].untyped_storage(), self.pieces[first + number])
        return results[0] if trace.single else tuple(results)

    def _keep(self, storage: Any, piece: MemoryPiece) -> None:
        """Count a piece until its storage is released."""
        self._live[storage._cdata] = piece
        weakref.finalize(storage, self._forget, storage._cdata)
        if piece.host:
            self.host_now += piece.bytes
            self.host_peak = max(self.host_peak, self.host_now)
        else:
            self.now += piece.bytes

    def _note(self, tensor: Tensor, func: Any, host: bool) -> None:
        storage, shape, made_by = tensor.untyped_storage(), tuple(tensor.shape), _name(func)
        key = storage._cdata
        if key in self._live:  # two results in one piece
            return
        self.moment += 1
        size = -(-storage.nbytes() // self.unit) * self.unit
        piece = MemoryPiece(size, shape, made_by, self.place(), self.moment, host=host)
        self.pieces.append(piece)
        self._keep(storage, piece)
        if self.noted(shape):
            self.seen.add((made_by, shape))
        if self.now > self.peak:
            self.peak, self._peak_moment = self.now, self.moment

    def _forget(self, key: int) -> None:
        self.moment += 1
        piece = self._live.pop(key)
        piece.died = self.moment
        if piece.host:
            self.host_now -= piece.bytes
        else:
            self.now -= piece.bytes


_Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class _Trace:
    """What a function makes and lets go, in moments since it began.

    results: of each the number of an argument, or of a piece, and how it lies there.  most, host_most: bytes that are
    held at most beyond those before.  one_place: all was made at one place, as by an operation, which is called from
    others, too.  course: as of `Memory`.
    """

    pieces: list[MemoryPiece]
    results: list[tuple[int, _Layout | None]]
    single: bool
    most: int
    most_at: int
    host_most: int
    one_place: bool
    moments: int = 0
    course: Sequence[tuple[int, str]] = ()


def _highest(pieces: Sequence[MemoryPiece]) -> tuple[int, int, int]:
    """Return the most bytes that pieces hold on the device together, the moment when, and the most in host memory."""
    changes = [(piece.born, piece.bytes, piece.host) for piece in pieces]
    changes += [(piece.died, -piece.bytes, piece.host) for piece in pieces if piece.died is not None]
    now = most = at = host_now = host_most = 0
    for moment, size, host in sorted(changes):
        if host:
            host_now += size
            host_most = max(host_most, host_now)
            continue
        now += size
        if now > most:
            most, at = now, moment
    return most, at, host_most


class Kind(enum.Enum):
    """What an operation of torch does, as far as memory goes."""

    COMPOSITE = enum.auto()  # made of others, which are to be seen
    IN_PLACE = enum.auto()  # changes numbers of its first argument, and returns it
    VIEW = enum.auto()  # shows memory of its arguments: half of all that a model calls
    NEW = enum.auto()  # makes tensors of their own
    OUT = enum.auto()  # writes to its argument `out`, and returns it
    OTHER = enum.auto()


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


@functools.cache
def _name(func: Any) -> str:
    return str(func)


def call_key(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the key of a call, which decides about the layout of its results; None where a tensor is not on "meta"."""
    parts: list[Any] = [func]
    if not _add_to_key(parts, args):
        return None
    for name, x in kwargs.items():
        parts.append(name)
        if not _add_to_key(parts, (x,)):
            return None
    return tuple(parts)


def _add_to_key(parts: list[Any], given: Sequence[Any]) -> bool:
    for x in given:
        kind = type(x)
        if kind in PLAIN:
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
            parts += (kind, x)  # 1, 1.0 and True are not the same
    return True


def _can_be_made_again(out: Any, made: Sequence[Tensor]) -> bool:
    """Return whether what an operation returned is these tensors and nothing else, each in memory of its own."""
    whole = (out,) if isinstance(out, Tensor) else out
    if not isinstance(whole, tuple) or len(whole) != len(made) or not all(a is b for a, b in zip(whole, made)):
        return False
    if len({t.untyped_storage()._cdata for t in made}) < len(made) or not all(t.is_meta for t in made):
        return False
    return all(map(_whole, made))


def _whole(t: Tensor) -> bool:
    """Return whether a tensor fills its memory, as one that is made anew does."""
    reaches = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride())) if t.numel() else 0
    return t.untyped_storage().nbytes() == reaches * t.element_size()


def tensors_in(given: Any, found: list[Tensor]) -> list[Tensor]:
    """Add the tensors among the arguments or results of one of torch's operations; torch's own way takes five times as
    long."""
    for x in given:
        if isinstance(x, Tensor):
            found.append(x)
        elif type(x) in (list, tuple):
            tensors_in(x, found)
    return found


def memory_of(
    plan: Plan,
    config: ModelConfig,
    sizes: Mapping[str, int],
    losses: LossConfig | None = None,
    recycles: int = 1,
    noted: Callable[[Sequence[int]], bool] = lambda shape: False,
) -> Memory:
    """What the first rank holds while it folds one example, or with `losses` trains on it; parameters, packed or not,
    their gradients and the example itself apart.

    sizes: of the feature table's named axes (`pass`: 1).  noted: as in `Memory`.
    """
    training = losses is not None
    with fake_ranks(plan.data, plan.axial, plan.branch) as mesh:
        model = AlphaFold(config).train(training)
        Execution(plan, mesh).bind(model)
        model.noise.seed(0)
        packed = PackedWeights(model, model.execution.dtype, trained=training)
        batch = fake_batch(**{"pass": 1, **sizes})
        with Memory(noted) as memory, torch.set_grad_enabled(training):
            output = model(batch, recycles)
            if losses is not None:
                total_loss(output, batch, losses, residues=model.residues)[0].backward()
        del packed
    return memory
