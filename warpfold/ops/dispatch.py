"""Registration and dispatch of operations: a reference implementation plus CPU and Triton kernels.

Each operation has a *definition* in plain torch, which documents it and is the reference for its tests, and a *fast
path*: an operation registered with torch, computed by Triton kernels on a GPU (ops/triton) and in blocks on a CPU
(ops/cpu).  The fast path may not support some arguments.  It then gives a reason, the definition computes the result,
and the reason is counted.  Besides its kernels, an operation needs only `@register(...)`:

    @register(
        shapes="x [*, c], g [*, c], grad [*, c]",
        keeps="x g",
        gradients="x g",
    )
    def gate(x: Tensor, g: Tensor) -> Tensor:
        return x * g.sigmoid()

This registers `warpfold::gate` and `warpfold::gate_backward` with torch and returns an `Op`, which calls the registered
operation where it can and the definition elsewhere.  If the definition is in `ops/linear.py`, the modules
`ops/cpu/linear.py` and `ops/triton/linear.py` contain functions `gate` and `gate_backward` that compute both
operations; they receive the operands by name (`Operands`).  The registration tells torch the schema (from the type
hints of the definition), the shapes and strides of the results (for fake tensors and torch.compile), and the gradient.
torch.compile, `opcheck` and selective checkpointing see one opaque operation per call, forward and backward.  A second
derivative raises an error; use the definition for it.  An operation that changes its operands in place (`mutates`) has
neither results nor a gradient.

A kernel takes its sizes from one operand and uses them for the others.  It would read past the end of a smaller
operand, and it would misread an operand that the definition broadcasts.  Therefore each call is checked against
`shapes`.  The name of an axis stands for one size, which the first operand with that axis sets.  "c d" is a product of
sizes, the digits 1 to 4 stand for themselves, and [] is a scalar.  "*" stands for any leading axes that all operands
share; "..." stands for any leading axes, which are not compared.  A shape in parentheses accepts every shape that
expands to it.  Every call of an `Op` runs the check, whichever implementation computes the result, so that a wrong
shape raises the same error on every device: the error names the operand, and does not depend on whether torch would
broadcast it.  The registered operation runs the check again, because compiled graphs and direct calls of
`torch.ops.warpfold` bypass the `Op`.
"""

import functools
import importlib
import inspect
import logging
import math
import re
import threading
from collections import Counter, namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, TypeVar, get_type_hints

import torch
from torch import Tensor

from warpfold.errors import UserError
from warpfold.ops.capabilities import NO_TRITON, TRITON, no_kernels_reason
from warpfold.ops.torch_internals import below_autograd, direct_function, is_observed

# fast: use the fast path if it supports the arguments, otherwise the definition.
# strict: raise an error if the fast path does not support the arguments.
# definition: always use the definition.
Kernels = Literal["fast", "strict", "definition"]

# Iterations of a subsampled loop: warm-up, steady state, one spare.
SUBSAMPLED_ITERATIONS = 3
# The running loops, outermost first: completed iterations and their total number.
Loops = list[tuple[int, int]]
P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
log = logging.getLogger("warpfold")


class Choice(threading.local):
    """The settings of this thread, above all which kernels it uses.

    They are thread-local, so that two models can run with different settings at the same time.  A contextvar would not
    do, because torch.compile cannot trace it.  A new thread starts with the values below.  This includes autograd's
    threads, which run the backward pass of CUDA tensors, so code that recomputes there must enter `using` itself.
    """

    # Set here and not in the class body: torch.compile treats attributes of the class as constants without a guard.
    def __init__(self) -> None:
        self.kernels: Kernels = "fast"
        # The device that meta tensors represent.
        self.stands_for: Literal["cpu", "cuda", "mps"] | None = None
        # Use the fast path even where the definition would be faster.
        self.always_fast = False
        # The callback that `with_progress` notifies before each iteration.
        self.watcher: Callable[[Loops], object] | None = None
        # Maintained only while there is a watcher.
        self.running: Loops = []
        # Iterations that the current one represents where loops are subsampled.
        self.represented = 1.0


choice = Choice()
NOTHING = nullcontext()  # changes no setting
_tf32 = False
_exact = 0  # `exact_products` contexts, all threads
# How the kernels may multiply fp32 now, as Triton's option names it. AMD GPUs always compute exactly.
products: tuple[str, ...] = ("ieee",)
_exact_lock = threading.Lock()
_interpreting = False
_refused: Counter[str] = Counter()
# The module below ops/cpu and ops/triton that computes each registered operation, and the names of its operands.
modules: dict[str, tuple[str, tuple[str, ...]]] = {}
# A function for each registered operation that checks the operands and computes it.
runs: dict[str, Callable[..., Any]] = {}
# The recipes of each registered operation (ops/triton/recipe.py), by the layout of the arguments of a call. The call is
# of the public function, with or without a gradient, or of the registered operation.
recipes: dict[str, dict[Any, Any]] = {}


class Operands(SimpleNamespace):
    """The operands of a registered operation by name, as its implementations receive them."""

    def but(self, **changed: Any) -> "Operands":
        """Return a copy with some operands changed or added, for an operation that is part of another."""
        return Operands(**{**self.__dict__, **changed})


class Op(Generic[P, R]):
    """An operation that decides at each call whether `definition` or `fast` computes it.

    All functions below except `definition` take one record: the definition's arguments by name, with defaults.

    fast: computes the operation.
    unsupported: returns the reason why `fast` does not support the arguments, or None.
    prefer_definition: returns whether the definition is faster than `fast`.  This does not count as a refusal.
    misfit: describes an operand of a wrong shape, which raises an error; returns EMPTY if there is nothing to compute,
        otherwise None.
    composed: computes the operation from other operations where that is faster than the registered one, and returns
        None elsewhere.
    direct(arguments, repeat): computes the operation with a gradient and past torch's dispatcher, where
        `repeat(operands)` computes the registered operation.  It requires plain tensors, and no active dispatch mode,
        profiler or functorch transform.
    recipes: the recipes of the registered operation.
    declared: what `register` was given, from which tests generate the cases of the operation.
    """

    def __init__(
        self,
        definition: Callable[P, R],
        fast: Callable[[Any], R],
        unsupported: Callable[[Any], str | None],
        prefer_definition: Callable[[Any], bool] | None = None,
        misfit: Callable[[Any], str | None] | None = None,
        composed: Callable[[Any], Any] | None = None,
        direct: Callable[[Any, Callable[[Any], Any]], R] | None = None,
        recipes: dict[Any, Any] | None = None,
        declared: "register | None" = None,
    ) -> None:
        self.definition, self.prefer_definition, self.declared = definition, prefer_definition, declared
        self._fast, self._unsupported, self._misfit = fast, unsupported, misfit
        self._composed, self._direct = composed, direct
        self._recipes: dict[Any, Any] = {} if recipes is None else recipes
        self.name = definition.__name__
        parameters = inspect.signature(definition).parameters
        defaults = [p.default for p in parameters.values() if p.default is not p.empty]
        self.arguments: Any = namedtuple("Arguments", list(parameters), defaults=defaults)  # type: ignore[misc]
        self._count = len(parameters)
        functools.update_wrapper(self, definition)

    def choose(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Compute the operation.  Raises ValueError for an operand of a wrong shape."""
        if choice.kernels == "definition":
            self._is_empty(self.arguments(*args, **kwargs))
            return self.definition(*args, **kwargs)
        # Kernels take a few microseconds, so the path to a recipe makes as few Python calls as possible. The arguments
        # get their names only after it.
        is_complete = len(args) == self._count and not kwargs
        arguments: Any = args if is_complete else self.arguments(*args, **kwargs)
        gradient, direct, key = torch.is_grad_enabled(), self._direct, None
        if (arguments[0].is_cuda or _interpreting) and (direct is not None or not gradient) and repeats():
            key = _module("triton", "recipe").layout(arguments, gradient)
            repeat = self._recipes.get(key)
            if repeat is not None:
                return direct(arguments, repeat) if gradient and direct is not None else repeat(arguments)
        arguments = self.arguments(*arguments)
        if self._is_empty(arguments):
            return self.definition(*args, **kwargs)
        if self.prefer_definition is not None and not choice.always_fast and self.prefer_definition(arguments):
            return self.definition(*args, **kwargs)
        reason = self._unsupported(arguments)
        if reason is None:
            if key is None:
                return self._fast(arguments)
            record = functools.partial(_module("triton", "recipe").record, self._recipes, key)
            if not gradient or direct is None:
                noted: R = record(self.fast, arguments)
                return noted
            composed: R | None = None if self._composed is None else self._composed(arguments)
            return direct(arguments, functools.partial(record, runs[self.name])) if composed is None else composed
        if reason != EMPTY:
            report_refusal(f"{self.name}: {reason}")
        return self.definition(*args, **kwargs)

    __call__ = choose  # `observed` replaces it

    def _is_empty(self, arguments: Any) -> bool:
        """Return whether there is nothing to compute.  Raises ValueError for an operand of a wrong shape."""
        misfit = None if self._misfit is None else self._misfit(arguments)
        if misfit:
            raise ValueError(f"{self.name}: {misfit}")
        return misfit == EMPTY

    def fast(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Compute the operation by the fast path, which must support the arguments."""
        return self._fast(self.arguments(*args, **kwargs))

    def unsupported_reason(self, *args: P.args, **kwargs: P.kwargs) -> str | None:
        """Return the reason why the fast path does not support the arguments, or None."""
        arguments = self.arguments(*args, **kwargs)
        misfit = None if self._misfit is None else self._misfit(arguments)
        return self._unsupported(arguments) if misfit is None else misfit


def op(
    fast: Callable[[Any], R],
    unsupported: Callable[[Any], str | None],
    prefer_definition: Callable[[Any], bool] | None = None,
    misfit: Callable[[Any], str | None] | None = None,
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Return a decorator that turns a definition into an `Op`."""
    return lambda definition: Op(definition, fast, unsupported, prefer_definition, misfit)


@contextmanager
def observed(
    around: Callable[[Callable[..., Any], Op[..., Any], tuple[Any, ...], dict[str, Any]], Any],
) -> Iterator[None]:
    """Pass every call of an operation to `around(call, op, args, kwargs)` within the context, in all threads.

    `around` obtains the result by `call(op, *args, **kwargs)`.
    """
    before = Op.__call__

    def observe(op: Op[..., Any], *args: Any, **kwargs: Any) -> Any:
        return around(Op.choose, op, args, kwargs)

    Op.__call__ = observe  # type: ignore[method-assign]
    try:
        yield
    finally:
        Op.__call__ = before  # type: ignore[method-assign]


def kernels() -> Kernels:
    """Return this thread's current choice of kernels."""
    return choice.kernels


def using(kernels: Kernels) -> AbstractContextManager[None]:
    """Select the kernels of this thread within the context."""
    # A layer's call enters two of these contexts, so an unchanged choice must cost nothing.
    return NOTHING if choice.kernels == kernels else _using(kernels)


@contextmanager
def _using(kernels: Kernels) -> Iterator[None]:
    before = choice.kernels
    choice.kernels = kernels
    try:
        yield
    finally:
        choice.kernels = before


@contextmanager
def always_fast() -> Iterator[None]:
    """Use the fast path in this thread even where the definition is faster, to compare both."""
    before, choice.always_fast = choice.always_fast, True
    try:
        yield
    finally:
        choice.always_fast = before


def allow_tf32(allowed: bool) -> None:
    """Allow or forbid fp32 matrix products on CUDA devices to round their operands to TF32 (10-bit mantissa).

    The setting applies to the whole process, to torch and to the kernels here, except within `exact_products`.
    """
    global _tf32
    with _exact_lock:
        _tf32 = allowed
        _set_products()


@contextmanager
def exact_products() -> Iterator[None]:
    """Compute fp32 matrix products that start within the context without TF32, whatever `allow_tf32` has set.

    The setting belongs to the process, so other threads compute exactly as long as the context lasts.
    """
    global _exact
    # Without TF32 this module has not changed torch's setting, and must not.
    if not _tf32:
        yield
        return
    with _exact_lock:
        _exact += 1
        _set_products()
    try:
        yield
    finally:
        with _exact_lock:
            _exact -= 1
            _set_products()


def _set_products() -> None:
    global products
    # Do not use torch.backends.cuda.matmul.fp32_precision: once it is set, reading this setting raises an error, and
    # torch.compile reads it.
    torch.set_float32_matmul_precision("high" if _tf32 and not _exact else "highest")
    products = ("ieee", "tf32") if _tf32 and not _exact and torch.version.hip is None else ("ieee",)


def refusals(before: Mapping[str, int] | None = None) -> dict[str, int]:
    """Count each refusal, "operation: reason", for the summary of a run.

    before: an earlier result of this function, whose counts are subtracted.  None: count since the process started.
    """
    return dict(_refused - Counter(before or {}))


def report_refusal(refusal: str) -> None:
    """Count a refusal and log it the first time; raise UserError if kernels are "strict"."""
    if choice.kernels == "strict":
        raise UserError(f"{refusal}. Omit --strict to compute it more slowly by its definition.")
    # A compiled graph has no state for the count, and meta tensors compute nothing.
    if torch.compiler.is_compiling() or choice.stands_for is not None:
        return
    _refused[refusal] += 1
    if _refused[refusal] == 1:
        log.info("%s: computed by its definition", refusal)


@contextmanager
def interpreting() -> Iterator[None]:
    """Pass CPU tensors to the Triton kernels within the context.

    Tests use it in a process that was started with TRITON_INTERPRET=1, which Triton reads when a kernel is defined. It
    also serves meta tensors, whose launches are recorded and not run.
    """
    global _interpreting
    before, _interpreting = _interpreting, True
    try:
        yield
    finally:
        _interpreting = before


@contextmanager
def standing_for(device: Literal["cpu", "cuda", "mps"]) -> Iterator[None]:
    """Treat meta tensors as tensors of a device of this kind within the context, to find out what would run there."""
    before, choice.stands_for = choice.stands_for, device
    try:
        with interpreting() if device == "cuda" else nullcontext():
            yield
    finally:
        choice.stands_for = before


def uniform_loop(items: Iterable[T]) -> Iterable[T]:
    """Iterate over a loop with uniform iterations: notify this thread's watcher, and subsample on meta tensors."""
    return with_progress(items) if choice.stands_for is None else subsample(list(items))


def seen_by_others() -> bool:
    """Return whether work moved to another thread would be missed.

    A profiler or dispatch mode of this thread does not see the other thread, and another thread would not know which
    device meta tensors represent.
    """
    return choice.stands_for is not None or is_observed()


def subsample(items: Sequence[T]) -> Sequence[T]:
    """Return all items of a loop with uniform iterations, or a few of them on meta tensors.

    Each iteration may only write to memory that was allocated before the loop.  On meta tensors a few iterations show
    how much memory one needs while the results of the previous one are not yet freed.
    """
    return items if choice.stands_for is None else SubsampledLoop(items)


class SubsampledLoop(list[T]):
    """The first items of a loop.  While an item is processed it represents the omitted ones, too."""

    def __init__(self, items: Sequence[T]) -> None:
        super().__init__(items[:SUBSAMPLED_ITERATIONS])
        self.each = len(items) / max(1, len(self))

    def __iter__(self) -> Iterator[T]:
        before, choice.represented = choice.represented, choice.represented * self.each
        try:
            yield from super().__iter__()
        finally:
            choice.represented = before


def represented_iterations() -> float:
    """Return how many iterations the current one represents: more than 1 where loops are subsampled."""
    return choice.represented


def with_progress(items: Iterable[T], count: int | None = None) -> Iterable[T]:
    """Iterate over a loop, and notify this thread's watcher before each iteration.

    count: the number of items, required if `items` has no length.
    """
    return items if choice.watcher is None else _with_progress(items, count, choice.watcher)


def _with_progress(items: Iterable[T], count: int | None, notify: "Callable[[Loops], object]") -> Iterator[T]:
    if count is None:
        items = list(items)
        count = len(items)
    running, depth, done = choice.running, len(choice.running), 0
    try:
        for item in items:
            running[depth:] = [(done, count)]
            notify(running)
            yield item
            # Free the item before the next one is made.
            del item
            done += 1
    finally:
        del running[depth:]


@contextmanager
def watching(notify: "Callable[[Loops], object]") -> Iterator[None]:
    """Call `notify` before each iteration of this thread's loops over slices and blocks of tensors, within the context.

    An exception from `notify` ends the loop.  Without a watcher, loops have no overhead.
    """
    before, choice.watcher = choice.watcher, notify
    try:
        yield
    finally:
        choice.watcher = before


def backend(x: Tensor) -> Literal["cpu", "triton"]:
    """Return the package below ops that has the fast paths for a tensor's device."""
    return "triton" if x.is_cuda or _interpreting else "cpu"


def repeats() -> bool:
    """Return whether recipes (ops/triton/recipe.py) may repeat the calls of operations now."""
    # `is_dynamo_compiling` is one Python call, `is_compiling` two. Exports without Dynamo use a dispatch mode.
    return TRITON and not torch.compiler.is_dynamo_compiling() and not is_observed()


def repeat_or_run(name: str, operands: Sequence[Any]) -> Any:
    """Compute a registered operation; on a GPU by the recipe for operands of this layout, recorded at the first call.

    Call it only if `repeats()`.
    """
    key, table = None, recipes[name]
    if operands[0].is_cuda or _interpreting:
        key = _module("triton", "recipe").layout(operands)
        repeat = table.get(key)
        if repeat is not None:
            return repeat(operands)
    if key is None:
        return runs[name](*operands)
    return _module("triton", "recipe").record(table, key, runs[name], operands)


def implementation(name: str, x: Tensor) -> Callable[..., Any]:
    """Return a function of the operands, in order, that computes a registered operation on a tensor's device.

    This imports the module of the operation below ops/cpu or ops/triton, and so Triton at its first use.
    """
    module, names = modules[name]
    function = getattr(_module(backend(x), module), name)
    return lambda *operands: _needed(function, Operands(**dict(zip(names, operands, strict=True))))


def _needed(function: Callable[[Operands], Any], t: Operands) -> Any:
    """Return the results of a function of operands; if `kept` is False, all except the first without elements."""
    results = function(t)
    if getattr(t, "kept", True):
        return results
    out, *extra_outputs = results
    return out, *(out.new_empty(0) for _ in extra_outputs)


@functools.cache
def _module(package: str, name: str) -> ModuleType:
    return importlib.import_module(f"warpfold.ops.{package}.{name}")


def faster_on_cpu(x: Tensor, elements: int, enough: int) -> bool:
    """Return whether x is on a CPU and `elements` is below `enough`, so that the definition is faster."""
    return elements < enough and backend(x) == "cpu"


def small_on_cpu(x: object, least: int) -> bool:
    """Return whether x is a CPU tensor of fewer than `least` elements, unless fast paths are forced or "strict"."""
    small = isinstance(x, Tensor) and faster_on_cpu(x, x.numel(), least)
    return small and not choice.always_fast and choice.kernels == "fast"


def unsupported_device(operands: Sequence[Any]) -> str | None:
    """Return the reason why no fast path supports the devices and dtypes of the operands, or None.

    operands: tensors, other objects with a device and a dtype, or None for operands that were omitted.
    """
    device = operands[0].device
    kernels = _interpreting or device.type == "cuda"
    for t in operands:
        if t is None:
            continue
        if t.device != device:
            return "its tensors are on several devices"
        if kernels and t.dtype == torch.float64:
            return "in fp64 no kernel is exact"
    if kernels:
        return _unsupported_by_triton(device)
    if device.type == "cpu" or (choice.stands_for == "cpu" and device.type == "meta"):
        return None
    return f"there are no fast paths for {device.type}"


def _unsupported_by_triton(device: torch.device) -> str | None:
    """Return the reason why Triton kernels cannot run on a device, or None."""
    if device.type == "cuda":
        return no_kernels_reason(device)
    return None if TRITON else NO_TRITON


Shape = tuple[int, ...]
# The size of each axis by name. "*" has the shape of the leading axes.
Sizes = dict[str, Any]
# The reason to use the definition if there is nothing to compute. It is not reported.
EMPTY = ""
LEADING = ("*", "...")


class _Operand(NamedTuple):
    """An operand in `shapes`.

    text: its axes as an error message shows them.
    leading: "*", "..." or "" for none.
    axes: the other axes.
    expands: every shape that expands to this one is accepted.
    """

    name: str
    text: str
    leading: str
    axes: tuple[str, ...]
    expands: bool


class Shapes:
    """The shapes that operands must have, parsed from the text of `register.shapes` for the operands in `names`."""

    def __init__(self, text: str, names: Sequence[str]) -> None:
        self.operands: list[_Operand] = []
        # The index of each operand in `names`.
        positions: list[int] = []
        for name, parenthesis, inner in re.findall(r"(\w+) (\(?)\[(.*?)\]", text):
            if name in names:
                axes = tuple(inner.split(", ")) if inner else ()
                leading = axes[0] if axes[:1] and axes[0] in LEADING else ""
                trailing = axes[1:] if leading else axes
                written = f"[{inner}] or 1 on an axis" if parenthesis else f"[{inner}]"
                self.operands.append(_Operand(name, written, leading, trailing, bool(parenthesis)))
                positions.append(list(names).index(name))
        self._positions = None if positions == list(range(len(names))) else positions
        # Models call an operation with few different shapes, and a lookup is faster than a comparison.
        self._remembered = functools.lru_cache(maxsize=1024)(self._compare)

    def select(self, args: Sequence[Any]) -> Sequence[Any]:
        """Select the operands with a shape from all operands in the order of `names`."""
        return args if self._positions is None else [args[i] for i in self._positions]

    def misfit(self, args: Sequence[Any]) -> str | None:
        """Describe the first operand of a wrong shape; EMPTY if there is nothing to compute, else None.

        args: all operands, in the order of `names`.  A description is, for example, "mask is [4, 1], not [*, i, k] =
        [4, 4], as x is [4, 4, 16]".
        """
        arguments = self.select(args)
        shapes = tuple([None if t is None else t.shape for t in arguments])
        # A graph cannot contain the cache, and symbolic sizes have no hash.
        misfit, sizes = self._compare(shapes) if torch.compiler.is_compiling() else self._remembered(shapes)
        if misfit is None:
            return EMPTY if sizes["empty"] else None
        actual = {operand.name: list(t.shape) for operand, t in zip(self.operands, arguments) if t is not None}
        right, decided = _right(misfit, sizes), sizes["decided by"]
        if right is None:
            return f"{misfit.name} is {actual[misfit.name]}, not {misfit.text}"
        by = dict.fromkeys(decided[axis] for axis in (misfit.leading, *misfit.axes) if axis in decided)
        because = " and ".join(f"{name} is {actual[name]}" for name in by if name != misfit.name)
        return (
            f"{misfit.name} is {actual[misfit.name]}, not {misfit.text} = {list(right)}{because and f', as {because}'}"
        )

    def _compare(self, shapes: tuple[Shape | None, ...]) -> tuple[_Operand | None, Sizes]:
        """Return the first operand with a wrong shape, or None, and the sizes of the axes before it."""
        # The operand that sets the size of each axis.
        decided: dict[str, str] = {}
        sizes: Sizes = {"1": 1, "2": 2, "3": 3, "4": 4, "empty": False, "decided by": decided}
        for operand, actual in zip(self.operands, shapes):
            if actual is None:
                continue
            shape, rank = tuple(actual), len(operand.axes)
            sizes["empty"] = sizes["empty"] or 0 in shape
            if operand.expands:
                # After "..." only the named axes are compared. Missing axes count as shared.
                right = _right(operand, sizes)
                if right is None or not expands_to(shape[-rank:] if operand.leading == "..." else shape, right):
                    return operand, sizes
                continue
            split = len(shape) - rank
            if split < 0 or (split > 0 and not operand.leading):
                return operand, sizes
            if operand.leading == "*":
                decided.setdefault("*", operand.name)
                if sizes.setdefault("*", shape[:split]) != shape[:split]:
                    return operand, sizes
            for axis, size in zip(operand.axes, shape[split:]):
                if axis not in sizes:
                    decided[axis] = operand.name
                    sizes[axis] = math.prod([sizes[factor] for factor in axis.split()]) if " " in axis else size
                if sizes[axis] != size:
                    return operand, sizes
        return None, sizes


def _right(operand: _Operand, sizes: Sizes) -> Shape | None:
    """Return the shape that an operand should have, or None if the other operands do not determine it."""
    leading = sizes.get("*") if operand.leading == "*" else ()
    if leading is None or any(axis not in sizes for axis in operand.axes):
        return None
    return (*leading, *(sizes[axis] for axis in operand.axes))


def broadcast_shape(*shapes: Shape) -> Shape | None:
    """Return the shape that these broadcast to, or None if they do not.

    Like torch.broadcast_shapes, which takes ten times as long for equal shapes, the usual case.
    """
    first = shapes[0]
    for shape in shapes:
        if shape != first:
            break
    else:
        return first
    sizes = []
    for axis in zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1):
        longer = {size for size in axis if size != 1}
        if len(longer) > 1:
            return None
        sizes.append(longer.pop() if longer else 1)
    return tuple(reversed(sizes))


def expands_to(shape: Shape, target: Shape) -> bool:
    """Return whether a tensor of this shape expands to the target."""
    added = len(target) - len(shape)
    if added < 0:
        return False
    # A generator takes twice the time.
    for a, b in zip(shape, target[added:]):  # noqa: SIM110
        if a != b and a != 1:
            return False
    return True


def upcast_half(x: Tensor) -> Tensor:
    """Convert 16-bit floats to fp32 and return others unchanged, for norms, softmax, frames, losses and logits."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype for sums over x, statistics and logits: fp64 for fp64, otherwise fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def widen(x: Tensor) -> Tensor:
    """Convert x to fp64, for the few values that need more digits than fp32; to fp32 on Apple GPUs, which lack fp64."""
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64)


def empty_like(x: Tensor) -> Tensor:
    """Allocate a dense tensor of x's shape with the axes in the memory order of x.

    torch.empty_like would make it row-major if x is expanded or a slice.
    """
    order = sorted(range(x.dim()), key=lambda axis: x.stride(axis), reverse=True)
    inverse_order = [order.index(axis) for axis in range(x.dim())]
    return x.new_empty([x.shape[axis] for axis in order]).permute(inverse_order)


def laid_out_as(y: Tensor, x: Tensor) -> Tensor:
    """Return y with its axes in the memory order of x: y itself if it has this order, otherwise a copy."""
    like = empty_like(x)
    return y if y.stride() == like.stride() else like.copy_(y)


def empty_parameters(*parameters: Tensor | None) -> tuple[Tensor, ...]:
    """Allocate a contiguous tensor for the gradient of each parameter, in fp32 at least, as it sums over all positions.

    A parameter that is None gets a tensor without elements.
    """
    like = next(p for p in parameters if p is not None)
    templates = (like.new_empty(0) if p is None else p for p in parameters)
    return tuple(p.new_empty(p.shape, dtype=accumulation_dtype(p)) for p in templates)


class Expansion(NamedTuple):
    """The operands that replace a parameter for which torch has no type.

    types: the types of the operands by name; the first operand has the name of the parameter.
    split: (argument, first argument of the call) -> operands.
    """

    types: Mapping[str, Any]
    split: Callable[[Any, Tensor], tuple[Any, ...]]


@dataclass(frozen=True, kw_only=True)
class register:
    """Decorator that registers the operation of a definition.

    Functions receive arguments or operands by name (`Operands`, or a named tuple of the definition's arguments).

    shapes: the shapes of all operands of the registered operation, of its results and of `grad`, in the notation that
        ops/dispatch.py describes.
    empty: operands -> results, allocated with the strides that the kernels return.  None: the operation has one
        result, with the layout of the first operand.
    mutates: the operands that the operation changes in place; it then has no results.
    results: the names of the results.  The caller gets the first; the others are saved for the backward pass.
    keeps: the operands of the backward operation besides `grad`.  They are operands and results by name, and
        `NAME_wanted`, which says whether the gradient of NAME is needed.
    gradients: the operands whose gradients the backward operation returns, at least two; "" if there is no gradient.
    empty_gradients: operands of the backward operation -> gradients, allocated as `empty` allocates the results.  None:
        gradients of tensors with leading axes get the layout of the tensors, and gradients of parameters are
        contiguous sums over all positions.
    residual: the operand to which the operation adds its update, so that the gradient of this operand is `grad` itself.
    composed: definition's arguments -> result, computed from other operations where that is faster than the registered
        one, or None.  The decision may depend on dtypes, shapes, strides, devices and numbers only.
    same_dtype: the operands that must have the same dtype.
    kept: adds a last operand `kept` to the registered operation, which says whether a backward pass may follow.  If
        not, all results except the first are replaced by tensors without elements.
    misfit: definition's arguments, or operands of the registered or the backward operation -> description of a wrong
        size that `shapes` cannot express, or None.  It is called if the shapes are right.
    expand: the parameter of the definition that is several operands of the registered operation.
    adapter: (registered operation, *definition's arguments) -> result of the registered operation, called with other
        arguments.
    caller_shapes, caller_misfit: replace `shapes` and `misfit` for the definition's arguments, if they differ from
        the operands.
    unsupported: definition's arguments -> reason why the fast path does not support them, or None.  It is called if
        devices, shapes and dtypes are right.
    prefer_definition: definition's arguments -> whether the definition is faster.
    """

    shapes: str
    empty: Callable[[Operands], Any] | None = None
    mutates: str = ""
    results: str = "out"
    keeps: str = ""
    gradients: str = ""
    empty_gradients: Callable[[Operands], tuple[Tensor, ...]] | None = None
    residual: str = ""
    composed: Callable[[Any], Any] | None = None
    same_dtype: str = ""
    kept: bool = False
    misfit: Callable[[Any], str | None] | None = None
    expand: Expansion | None = None
    adapter: Callable[..., Tensor] | None = None
    caller_shapes: str = ""
    caller_misfit: Callable[[Any], str | None] | None = None
    unsupported: Callable[[Any], str | None] | None = None
    prefer_definition: Callable[[Any], bool] | None = None

    def __call__(self, definition: Callable[P, R]) -> Op[P, R]:
        """Register the operation of a definition and its backward operation, and return the `Op`."""
        name, module = definition.__name__, definition.__module__.rpartition(".")[2]
        results, gradients = [] if self.mutates else self.results.split(), self.gradients.split()
        types = {**get_type_hints(definition), **dict.fromkeys((*results, "grad"), Tensor)}
        operands = self._operands(list(inspect.signature(definition).parameters), types)
        first = next(iter(operands))
        if self.kept:
            operands["kept"] = bool
        like_first = (lambda t: None) if self.mutates else (lambda t: empty_like(getattr(t, first)))
        op = self._define(name, module, operands, len(results), self.empty or like_first)
        if gradients:
            backward_name, backward_operands = f"{name}_backward", self._operands(["grad", *self.keeps.split()], types)
            backward_operands = dict(sorted(backward_operands.items(), key=lambda need: _backward_order(*need)))
            self._define(
                backward_name, module, backward_operands, len(gradients), self.empty_gradients or self._empty_gradients
            )
            save, differentiate = self._autograd(backward_name, list(operands), backward_operands)
            op.register_autograd(differentiate, setup_context=save)
            return self._make_op(definition, direct_function(save, differentiate))
        return self._make_op(definition, None)

    def _operands(self, names: Sequence[str], types: Mapping[str, Any]) -> dict[str, Any]:
        """Return the operands of a registered operation: types by name."""
        expanded = {} if self.expand is None else self.expand.types
        operands: dict[str, Any] = {}
        for name in names:
            operands.update(expanded if name in expanded else {name: bool if name.endswith("_wanted") else types[name]})
        return operands

    def _empty_gradients(self, t: Operands) -> tuple[Tensor, ...]:
        shapes = {operand.name: operand for operand in Shapes(self.shapes, self.gradients.split()).operands}
        leading = [name for name in self.gradients.split() if shapes[name].leading]
        parameters = [getattr(t, name) for name in self.gradients.split() if name not in leading]
        return *(empty_like(getattr(t, name)) for name in leading), *(
            empty_parameters(*parameters) if parameters else ()
        )

    def _define(
        self, name: str, module: str, operands: Mapping[str, Any], returns: int, empty: Callable[[Operands], Any]
    ) -> torch.library.CustomOpDef:
        """Register `warpfold::name` with torch: its schema, its checks, its implementations and its fake function."""
        modules[name], recipes[name] = (module, tuple(operands)), {}
        qualified, shapes, misfit = f"warpfold::{name}", Shapes(self.shapes, list(operands)), self.misfit

        def run(*args: Any) -> Any:
            """Check the operands and compute the operation."""
            problem = shapes.misfit(args)
            if not problem and misfit is not None:
                problem = misfit(Operands(**dict(zip(operands, args))))
            if problem:
                raise ValueError(f"{qualified}: {problem}")
            return implementation(name, args[0])(*args)

        def run_or_repeat(*args: Any) -> Any:
            return repeat_or_run(name, args) if repeats() else run(*args)

        # torch reads the schema from a function's signature: set the one that the operands make.
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        run_or_repeat.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(operand, kind, annotation=hint) for operand, hint in operands.items()],
            return_annotation=(None, Tensor)[returns] if returns < 2 else tuple[(Tensor,) * returns],  # type: ignore[misc]
        )
        runs[name] = run
        op = torch.library.custom_op(qualified, run_or_repeat, mutates_args=self.mutates.split())
        op.register_fake(lambda *args: _needed(empty, Operands(**dict(zip(operands, args)))))
        return op

    def _autograd(
        self, backward: str, operands: list[str], backward_operands: Mapping[str, Any]
    ) -> tuple[Callable[..., None], Callable[..., tuple[Tensor | None, ...]]]:
        """Make the two functions of an operation's gradient: one saves what the backward operation needs, one calls it.

        backward: the name of the backward operation.
        """
        names, gradients = [*operands, *self.results.split()], self.gradients.split()
        tensors = [name for name, hint in backward_operands.items() if hint in (Tensor, Tensor | None)]
        saved = [names.index(name) for name in tensors if name in names]
        constants = [names.index(name) for name in backward_operands if name in names and name not in tensors]
        flags = [operands.index(name.removesuffix("_wanted")) for name in backward_operands if name.endswith("_wanted")]
        # The index of each operand's gradient among the returned ones, after which `grad` itself is appended.
        gradient_index = {**{name: i for i, name in enumerate(gradients)}, self.residual: len(gradients)}
        sources = [gradient_index.get(name) for name in operands]
        through_dispatcher = _registered(backward)

        def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            value_at = (*inputs, *(output if isinstance(output, tuple) else (output,))).__getitem__
            ctx.save_for_backward(*map(value_at, saved))
            ctx.constants = list(map(value_at, constants))
            ctx.set_materialize_grads(False)

        def differentiate(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
            """Compute the gradient of each operand; None where it is not needed."""
            if grad is None:
                return (None,) * len(sources)
            is_needed = ctx.needs_input_grad
            # Through the dispatcher a request for a second derivative raises an error.
            needed = grad, *ctx.saved_tensors, *ctx.constants, *map(is_needed.__getitem__, flags)
            if type(grad) is not Tensor or grad.is_meta or torch.is_grad_enabled() or not repeats():
                computed = through_dispatcher(*needed)
            else:
                with below_autograd():
                    computed = repeat_or_run(backward, needed)
            computed = *computed, grad
            return tuple([computed[at] if at is not None and is_needed[i] else None for i, at in enumerate(sources)])

        return save, differentiate

    def _make_op(self, definition: Callable[P, R], past_dispatcher: Callable[..., Any] | None) -> Op[P, R]:
        """Make the `Op` of a definition, whose fast path is the registered operation.

        past_dispatcher(*operands, repeat): calls repeat(operands) and attaches the gradient to the results.
        """
        parameters, registered = list(inspect.signature(definition).parameters), _registered(definition.__name__)
        shapes = Shapes(self.caller_shapes or self.shapes, parameters)
        adapter, unsupported, expand, kept = self.adapter, self.unsupported, self.expand, self.kept
        misfit_of_sizes, composed = self.caller_misfit if self.caller_shapes else self.misfit, self.composed
        several = " " in self.results
        at = 0 if expand is None else parameters.index(next(iter(expand.types)))
        same = self.same_dtype.split()
        first, *other_indexes = [parameters.index(name) for name in same] or [0]
        differ = f"{', '.join(same[:-1])} and {''.join(same[-1:])} differ in dtype"

        def call_with(compute: Callable[..., Any], arguments: Any, *last: Any) -> Any:
            """Call the registered operation by compute(*operands, *last), with the arguments of the adapter."""
            if expand is not None:
                arguments = *arguments[:at], *expand.split(arguments[at], arguments[0]), *arguments[at + 1 :]
            out = compute(*arguments, torch.is_grad_enabled(), *last) if kept else compute(*arguments, *last)
            return out[0] if several else out

        def call(compute: Callable[..., Any], arguments: Any, *last: Any) -> Any:
            """Call the registered operation by compute(*operands, *last), with the definition's arguments."""
            if adapter is None:
                return call_with(compute, arguments, *last)
            return adapter(lambda *adapted: call_with(compute, adapted, *last), *arguments)

        def fast(arguments: Any) -> Any:
            computed = None if composed is None else composed(arguments)
            return call(registered, arguments) if computed is None else computed

        def misfit(arguments: Any) -> str | None:
            """Describe the first operand of a wrong shape; EMPTY if there is nothing to compute, else None."""
            problem = shapes.misfit(arguments)
            other = None if problem or misfit_of_sizes is None else misfit_of_sizes(arguments)
            return problem if other is None else other

        def why_not(arguments: Any) -> str | None:
            """Return the reason why the fast path does not support the arguments: common reasons first."""
            reason = unsupported_device(shapes.select(arguments))
            if reason is not None:
                return reason
            for i in other_indexes:
                if arguments[i].dtype != arguments[first].dtype:
                    return differ
            return None if unsupported is None else unsupported(arguments)

        direct = None
        if past_dispatcher is not None:
            direct = functools.partial(call_with if adapter is None else call, past_dispatcher)
        table = recipes[definition.__name__]
        return Op(definition, fast, why_not, self.prefer_definition, misfit, composed, direct, table, self)


def _backward_order(name: str, hint: Any) -> int:
    """Return the sort key of an operand of a backward operation: `grad`, tensors, numbers, `NAME_wanted`."""
    if name == "grad":
        return 0
    return 1 if hint in (Tensor, Tensor | None) else 3 if name.endswith("_wanted") else 2


def _registered(name: str) -> Callable[..., Any]:
    """Return the overload in torch.ops.warpfold, whose call is faster than that of its packet of overloads."""
    overload: Callable[..., Any] = getattr(torch.ops.warpfold, name).default
    return overload
