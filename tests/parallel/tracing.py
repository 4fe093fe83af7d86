"""Record what a rank computes and waits for, and find work that could have run during waits.

Every operation is recorded in order with the operations that made its operands, by storage, so that views count as
their base. For each operation follows the last collective on which it depends.
"""

import inspect
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from warpfold.model import evoformer
from warpfold.model.axial import COLS, ROWS
from warpfold.model.evoformer import Evoformer, EvoformerConfig, PairConfig
from warpfold.ops.dispatch import Op
from warpfold.parallel import collectives, sharded
from warpfold.parallel.collectives import Pending, local_shard
from warpfold.parallel.execution import Execution
from warpfold.parallel.mesh import make_mesh
from warpfold.parallel.plan import Plan
from warpfold.parallel.waits import Event, watched

Order = Literal["middle", "first", "last"]

# Offsets of unit numbers: backward passes of units, and autograd nodes.
BACKWARD, NODES = 10**6, 10**9
HANDLES_MEMORY = ("empty", "new_empty", "zeros", "new_zeros", "detach", "ones_like", "zeros_like")


@dataclass
class Step:
    """An operation, the start of a collective, or the wait for one."""

    number: int
    # "work", "small" (views, allocations, tensors smaller than m or z), "start", "wait".
    what: str
    name: str
    # The layer, or "" between layers.
    layer: str
    # Forward pass, backward pass, or number of a block's recomputation.
    passage: tuple[str, int]
    made_of: set[int]  # numbers of earlier steps
    # Operations of a unit count as one operation, since one kernel computes them.
    unit: int
    collective: int = -1
    # The last wait on which it depends.
    needs: int = -1


class InReverse:
    """Replacement of collectives._reserved: autograd's own order, the reverse of the forward pass."""

    def next(self) -> int:
        return torch.autograd._get_sequence_nr()


def at_once(begin: Callable[..., Pending]) -> Callable[..., Pending]:
    """Replace collectives._begin by blocking collectives, like most of FastFold's and all of HelixFold's."""

    def blocking(*args: Any) -> Pending:
        pending = begin(*args)
        pending.wait()
        return pending

    return blocking


class Trace(TorchDispatchMode):
    """Record everything that this process computes within the context in `steps`.

    size: elements that an operation must read or write to count as work. An operation of warpfold.ops (attention,
    triangle product) is one unit, forward and backward, because it is one kernel. So is a node of autograd's graph.
    Packing and unpacking belong to the collective.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.steps = size, list[Step]()
        # Kept alive, so that no storage is reused.
        self._alive: list[Tensor] = []
        # The last step that wrote each storage.
        self._writer: dict[int, int] = {}
        # The storage that each collective fills.
        self._buffers: dict[int, int] = {}
        self._packing = False
        self._unit, self._units = -1, 0
        self._kind, self._recomputations = "forward", 0
        # Autograd's sequence number after an operation, its layer, and its unit.
        self._known: list[tuple[int, str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        written = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        self._alive += read + written
        name = func.name().removeprefix("aten::")
        there = {_storage(t) for t in read}
        fresh = {_storage(t) for t in written} - there
        # Its event follows.
        if name.startswith("c10d::"):
            buffer, sent = read
            step = self._note("start", name, {self._writer.get(_storage(sent), -1)})
            self._writer[_storage(buffer)] = step.number
            return out
        if func._schema.is_mutable:
            fresh |= {_storage(t) for t in read[:1]}
        elif not fresh:
            return out  # a view
        handled = self._packing or name.split(".")[0] in HANDLES_MEMORY
        large = max((t.numel() for t in read + written), default=0) >= self.size
        step = self._note("work" if large and not handled else "small", name, {self._writer.get(s, -1) for s in there})
        self._writer.update(dict.fromkeys(fresh, step.number))
        return out

    def _note(self, what: str, name: str, made_of: set[int]) -> Step:
        node = torch._C._current_autograd_node()
        layer, recomputed = _called_by()
        if node is None or recomputed:
            unit = self._unit
            self._known.append((torch.autograd._get_sequence_nr(), layer, unit))
        else:
            layer, unit = self._backward_of(node._sequence_nr())
        kind = "recomputed" if recomputed else "forward" if node is None else "backward"
        if recomputed and self._kind == "backward":
            self._recomputations += 1
        self._kind = kind
        step = Step(len(self.steps), what, name, layer, (kind, recomputed * self._recomputations), made_of - {-1}, unit)
        self.steps.append(step)
        return step

    def _backward_of(self, number: int) -> tuple[str, int]:
        """Return the layer and the unit of the backward operations of autograd's node `number`."""
        place = bisect_right(self._known, number, key=lambda known: known[0])
        _, layer, unit = self._known[place] if place < len(self._known) else (0, "", -1)
        return layer, (NODES + number if unit < 0 else BACKWARD + unit)

    def told(self, event: Event) -> None:
        if event.what == "start":
            step = self.steps[-1]
            self._buffers[event.number] = next(s for s, n in self._writer.items() if n == step.number)
        else:
            step = self._note("wait", "", set())
            buffer = self._buffers[event.number]
            step.made_of = {self._writer[buffer]}
            self._writer[buffer] = step.number
        step.name, step.collective = f"{event.kind} {event.name.strip()}", event.number

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record within the context."""
        with watched(self.told), _wrapped(self), self:
            yield
        self._settle()

    def _settle(self) -> None:
        """Find the last wait on which each step depends; the operations of a unit depend on the union."""
        of_unit: dict[int, int] = {}
        for _ in range(2):
            for step in self.steps:
                step.needs = max([self._arrival(n) for n in step.made_of] + [of_unit.get(step.unit, -1)], default=-1)
                if step.unit != -1:
                    of_unit[step.unit] = max(step.needs, of_unit.get(step.unit, -1))

    def _arrival(self, number: int) -> int:
        step = self.steps[number]
        return number if step.what == "wait" else step.needs

    # Results

    def left_while_waiting(self) -> list[tuple[str, str, list[str]]]:
        """List for every wait its pass, its collective, and later independent work of the pass.

        The work depends neither on this wait nor on a later one.
        """
        found = []
        # Tensors for which a layer waits together are one wait.
        since = -1
        for step in self.steps:
            if step.what == "work":
                since = -1
            if step.what == "wait":
                since = step.number if since < 0 else since
                later = [s for s in self.steps[step.number :] if s.what == "work" and s.passage == step.passage]
                found.append((step.passage[0], _says(step), [_says(s) for s in later if s.needs < since]))
        return found

    def done_before_starting(self) -> list[tuple[str, str, list[str]]]:
        """List for every start its pass, its collective, and unrelated work since its input existed."""
        found = []
        serves: set[int] = set()
        for step in self.steps:
            if step.what == "start":
                needed = self._ancestors(step.number)
                serves |= needed
                made = max((n for n in needed if self.steps[n].what in ("work", "wait")), default=-1)
                unit = self.steps[made].unit
                between = [s for s in self.steps[made + 1 : step.number] if s.passage == step.passage]
                own = {s.number for s in between if s.unit == unit >= 0}
                wasted = [s for s in between if (s.what == "work" and s.number not in serves | own) or s.what == "wait"]
                found.append((step.passage[0], _says(step), [_says(s) for s in wasted if made >= 0]))
        return found

    def _ancestors(self, number: int) -> set[int]:
        found: set[int] = set()
        front = [number]
        while front:
            for n in self.steps[front.pop()].made_of - found:
                found.add(n)
                front.append(n)
        return found


def _says(step: Step) -> str:
    return step.name if step.collective >= 0 else f"{step.layer}: {step.name}"


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _called_by() -> tuple[str, bool]:
    """Find the running layer, and whether it is recomputed, from the call stack."""
    frame, layer = sys._getframe(3), ""
    while frame is not None:
        name = frame.f_code.co_name
        if not layer and name in ("_by_slices", "_by_channels", "_share"):
            layer = frame.f_locals["layout"].name.strip()
        if name == "recompute_fn":
            return layer, True
        frame = frame.f_back
    return layer, False


def _is_operation(member: object) -> bool:
    """Return whether a function is an operation, or a complete layer as one operation (ops/layers.py)."""
    return isinstance(member, Op) or (inspect.isfunction(member) and member.__module__ == "warpfold.ops.layers")


@contextmanager
def _wrapped(trace: Trace) -> Iterator[None]:
    """Record the begin and end of collectives' packing and of operations of warpfold.ops."""

    def unit(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            before = trace._unit
            if before < 0:
                trace._unit, trace._units = trace._units, trace._units + 1
            try:
                return function(*args, **kwargs)
            finally:
                trace._unit = before

        return inside

    def packing(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            before, trace._packing = trace._packing, True
            try:
                return function(*args, **kwargs)
            finally:
                trace._packing = before

        return inside

    changed: list[tuple[Any, str, Any]] = []
    for module in [m for name, m in sys.modules.items() if name.startswith("warpfold.model.")]:
        for name, operation in inspect.getmembers(module, _is_operation):
            changed.append((module, name, operation))
            setattr(module, name, unit(operation))
    for place in (evoformer, sharded):
        changed.append((place, "triangle_product", place.triangle_product))
        place.triangle_product = unit(place.triangle_product)
    for place, name in ((collectives, "_send"), (collectives._InFlight, "wait")):
        changed.append((place, name, getattr(place, name)))
        setattr(place, name, packing(getattr(place, name)))
    try:
        yield
    finally:
        for place, name, function in changed:
            setattr(place, name, function)


# A small stack, whose m and z are larger than its parameters and masks.

SEQUENCES, RESIDUES, C_M, C_Z = 12, 25, 8, 6


def traced(plan: Plan, outer: Order, blocks: int = 2, global_column: bool = False) -> Trace:
    """Trace a stack of Evoformer blocks forward and backward on this rank of `plan`. Call it on every rank."""
    mesh = make_mesh(plan.data, plan.axial, plan.branch)
    torch.manual_seed(0)
    pairs = PairConfig(heads=2, c_triangle=4, transition=2)
    config = EvoformerConfig(blocks=blocks, heads=2, c_outer=3, transition=2, outer=outer, pair=pairs)
    stack = Execution(plan, mesh).bind(Evoformer(C_M, C_Z, config, global_column)).train()
    m, z = torch.randn(SEQUENCES, RESIDUES, C_M), torch.randn(RESIDUES, RESIDUES, C_Z)
    m, z = (local_shard(x, axis, mesh.axial).requires_grad_() for x, axis in ((m, COLS), (z, ROWS)))
    masks = torch.ones(SEQUENCES, RESIDUES), local_shard(torch.ones(RESIDUES, RESIDUES), -2, mesh.axial)
    gradients = torch.randn_like(m), torch.randn_like(z)
    # The fewest rows and residues that a rank has, or works on at a time.
    rows, residues = (min(n // plan.axial, plan.chunk or n) for n in (SEQUENCES, RESIDUES))
    trace = Trace(min(rows * RESIDUES * C_M, residues * SEQUENCES * C_M, residues * RESIDUES * C_Z))
    with trace.recording():
        torch.autograd.backward(stack(m, z, *masks), gradients)
    return trace
