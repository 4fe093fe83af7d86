"""An operation: its definition, and what is faster on the device of its tensors where that can serve them.

An operation has a *definition* in plain torch, which is its documentation and the truth, and a *fast path*: an
operation registered with torch, computed by Triton kernels on a GPU (ops/triton) and block by block on a CPU (ops/cpu).
The fast path may be unable to serve some arguments, for a reason that it gives; the definition then computes them, and
the reason is counted.  `@register(...)` is all that an operation needs beside its kernels:

    @register(
        shapes="x [*, c], g [*, c], grad [*, c]",
        keeps="x g",
        gradients="x g",
    )
    def gate(x: Tensor, g: Tensor) -> Tensor:
        return x * g.sigmoid()

This registers `warpfold::gate` and `warpfold::gate_backward` with torch and returns an `Op`, which calls the first
where it can and the definition elsewhere.  The modules below `ops/cpu` and `ops/triton` named like that of the
definition hold functions `gate` and `gate_backward` that compute them, of their operands by name (`Operands`): an
operand is declared here and used there, and stands nowhere else.  torch knows the rest from here: the schema from the
definition's type hints, the shapes and strides of the results (fake tensors, torch.compile), and the gradient.
torch.compile, `opcheck` and selective checkpointing see one opaque operation per call, forward and backward.  A second
derivative is an error: the definition has it.  An operation that changes its operands in place (`mutates`) returns
nothing, and has no gradient.

A kernel takes its sizes from one operand and uses them for the others: it would read past the end of one that is
smaller, and read one that the definition broadcasts wrongly.  So `shapes` is checked against each call.  Each name of
an axis stands for one size, which the first operand that has it decides.  "c d" is a product of sizes, 1 to 4 are
themselves; [] is a number.  "*" stands for any leading axes, the same for all operands; "..." for any, not compared.
In parentheses: any shape that expands to this one.  The check runs in each call of an `Op`, whatever computes it, so
that a wrong shape is the same error on every device: it names the operand, and does not depend on whether torch would
broadcast it.  It runs again in the registered operation, which compiled graphs and direct calls of
`torch.ops.warpfold` reach too.
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

# fast: the fast path where it can be; strict: likewise, but where it cannot is an error; definition: never.
Kernels = Literal["fast", "strict", "definition"]

TURNS = 3  # of a loop, where nothing is computed: the first begins, the second meets what it left; one to spare
Loops = list[tuple[int, int]]  # of each loop that runs, the outer first: turns done, and of how many
P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
log = logging.getLogger("warpfold")


class Choice(threading.local):
    """The settings of this thread, above all which kernels it uses.

    Thread-local, so that two models may run differently at once; and not a contextvar, which torch.compile cannot
    trace.  A new thread begins with the values below: also autograd's own threads, which run the backward pass of
    CUDA tensors, so whatever recomputes there must enter `using` itself.
    """

    def __init__(self) -> None:  # not attributes of the class, which torch.compile takes for constants without a guard
        self.kernels: Kernels = "fast"
        self.stands_for: Literal["cpu", "cuda", "mps"] | None = None  # what tensors without memory are taken for
        self.always_fast = False  # also where the definition would be faster
        self.watcher: Callable[[Loops], object] | None = None  # told of each turn of a loop
        self.running: Loops = []  # while somebody watches
        self.turns = 1.0  # for how many turns of loops the one that runs stands, where few of them do


choice = Choice()
NOTHING = nullcontext()  # a context in which everything stays as it is
_tf32 = False
_exact = 0  # how many `exact_products` are entered, in all threads
# How the kernels may multiply fp32 now, as Triton's option names it; `fp32_products` returns it.
products: tuple[str, ...] = ("ieee",)
_exact_lock = threading.Lock()
_interpreting = False
_refused: Counter[str] = Counter()
# Of each registered operation: the module below ops/cpu and ops/triton that computes it, and its operands' names.
modules: dict[str, tuple[str, tuple[str, ...]]] = {}
runs: dict[str, Callable[..., Any]] = {}  # of each registered operation: checks its operands and computes it
# The recipes of each registered operation (ops/triton/recipe.py), by the layout of the arguments of a call: of the
# operation's public function, with or without a gradient, or of the registered operation.
recipes: dict[str, dict[Any, Any]] = {}


class Operands(SimpleNamespace):
    """The operands of a registered operation, by their names: what computes it is given all of them as one."""

    def but(self, **changed: Any) -> "Operands":
        """Return these operands with some changed or added: for an operation that is part of another."""
        return Operands(**{**self.__dict__, **changed})


class Op(Generic[P, R]):
    """An operation that chooses each time it is called whether `definition` or `fast` computes it.

    What it is made of takes the definition's arguments as one, by their names, defaults filled in:
    fast computes it; unsupported says why `fast` cannot take them, or None; prefer_definition says whether the
    definition is the faster of the two, which is not counted as a refusal; misfit describes an operand of a wrong
    shape, which is an error, or returns EMPTY if there is nothing to compute, else None.
    composed: computes it from other operations where that is faster than the registered one, and returns None
    elsewhere.
    direct(arguments, repeat): computes it by the registered operation with a gradient, past torch's dispatcher, where
    `repeat(operands)` computes the registered operation.  Only where no mode, profiler or transform watches, and for
    plain tensors.
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
    ) -> None:
        self.definition, self.prefer_definition = definition, prefer_definition
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
        """Compute it, one way or the other.  Errors: ValueError for an operand of a wrong shape."""
        if choice.kernels == "definition":
            self._is_empty(self.arguments(*args, **kwargs))
            return self.definition(*args, **kwargs)
        # The kernels take a few microseconds, so a call that was made before is repeated by as few calls of Python as
        # possible: the arguments get their names only where they are needed.
        is_complete = len(args) == self._count and not kwargs
        given: Any = args if is_complete else self.arguments(*args, **kwargs)
        gradient, direct, key = torch.is_grad_enabled(), self._direct, None
        if (given[0].is_cuda or _interpreting) and (direct is not None or not gradient) and repeats():
            key = _module("triton", "recipe").layout(given, gradient)
            repeat = self._recipes.get(key)
            if repeat is not None:
                return direct(given, repeat) if gradient and direct is not None else repeat(given)
        given = self.arguments(*given)
        if self._is_empty(given):
            return self.definition(*args, **kwargs)
        if self.prefer_definition is not None and not choice.always_fast and self.prefer_definition(given):
            return self.definition(*args, **kwargs)
        reason = self._unsupported(given)
        if reason is None:
            if key is None:
                return self._fast(given)
            record = functools.partial(_module("triton", "recipe").record, self._recipes, key)
            if not gradient or direct is None:
                noted: R = record(self.fast, given)
                return noted
            composed: R | None = None if self._composed is None else self._composed(given)
            return direct(given, functools.partial(record, runs[self.name])) if composed is None else composed
        if reason != EMPTY:
            report_refusal(f"{self.name}: {reason}")
        return self.definition(*args, **kwargs)

    __call__ = choose  # `observed` replaces it

    def _is_empty(self, given: Any) -> bool:
        """Return whether there is nothing to compute.  Errors: ValueError for an operand of a wrong shape."""
        misfit = None if self._misfit is None else self._misfit(given)
        if misfit:
            raise ValueError(f"{self.name}: {misfit}")
        return misfit == EMPTY

    def fast(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Compute it by the fast path, which must take these arguments."""
        return self._fast(self.arguments(*args, **kwargs))

    def unsupported_reason(self, *args: P.args, **kwargs: P.kwargs) -> str | None:
        """Return why the fast path does not take these arguments, or None."""
        given = self.arguments(*args, **kwargs)
        misfit = None if self._misfit is None else self._misfit(given)
        return self._unsupported(given) if misfit is None else misfit


def op(
    fast: Callable[[Any], R],
    unsupported: Callable[[Any], str | None],
    prefer_definition: Callable[[Any], bool] | None = None,
    misfit: Callable[[Any], str | None] | None = None,
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Return a decorator that makes an `Op` of a definition."""
    return lambda definition: Op(definition, fast, unsupported, prefer_definition, misfit)


@contextmanager
def observed(
    around: Callable[[Callable[..., Any], Op[..., Any], tuple[Any, ...], dict[str, Any]], Any],
) -> Iterator[None]:
    """Have `around(call, op, args, kwargs)` make every call of an operation within the context, in all threads.

    It computes the result by `call(op, *args, **kwargs)`.
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
    """Return how this thread computes operations now."""
    return choice.kernels


def using(kernels: Kernels) -> AbstractContextManager[None]:
    """Compute operations that way within the context, in this thread."""
    return NOTHING if choice.kernels == kernels else _using(kernels)  # a layer's call enters two of them


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
    """Compute operations by the fast path even where the definition is faster, in this thread: to compare them."""
    before, choice.always_fast = choice.always_fast, True
    try:
        yield
    finally:
        choice.always_fast = before


def allow_tf32(allowed: bool) -> None:
    """Have products of fp32 on CUDA devices round their operands to TF32, ten bits of a mantissa, or not.

    For the whole process: products of torch and those of the kernels here, but for those within `exact_products`.
    """
    global _tf32
    with _exact_lock:
        _tf32 = allowed
        _set_products()


@contextmanager
def exact_products() -> Iterator[None]:
    """Have products of fp32 that are begun within the context exact, whatever `allow_tf32` says.

    The setting is of the process: other threads compute exactly meanwhile.
    """
    global _exact
    if not _tf32:  # the setting is whatever it is; nothing here has changed it
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
    # Not torch.backends.cuda.matmul.fp32_precision: once that is set, this setting cannot be read any more, and
    # torch.compile reads it.
    torch.set_float32_matmul_precision("high" if _tf32 and not _exact else "highest")
    products = ("ieee", "tf32") if _tf32 and not _exact and torch.version.hip is None else ("ieee",)


def fp32_products() -> tuple[str, ...]:
    """Return how the kernels may multiply fp32, as Triton calls it; AMD's GPUs stay exact."""
    return products


def refusals(before: Mapping[str, int] | None = None) -> dict[str, int]:
    """Return every refusal, "operation: reason", and how often it occurred: for a run's summary.

    before: what this returned earlier; only what came after it is counted.  None: since the process began.
    """
    return dict(_refused - Counter(before or {}))


def report_refusal(refusal: str) -> None:
    """Count a refusal and log it the first time; raise UserError if kernels are "strict"."""
    if choice.kernels == "strict":
        raise UserError(f"{refusal}; without --strict its definition would compute it, slower")
    if torch.compiler.is_compiling() or choice.stands_for is not None:
        return  # seen by whoever runs uncompiled, as a graph has no memory; and nothing was computed
    _refused[refusal] += 1
    if _refused[refusal] == 1:
        log.info("%s: computed by its definition", refusal)


@contextmanager
def interpreting() -> Iterator[None]:
    """Give CPU tensors to the Triton kernels within the context: for tests, in a process begun with TRITON_INTERPRET=1,
    which Triton reads when a kernel is defined; and for tensors without memory, whose launches are noted and not run.
    """
    global _interpreting
    before, _interpreting = _interpreting, True
    try:
        yield
    finally:
        _interpreting = before


@contextmanager
def standing_for(device: Literal["cpu", "cuda", "mps"]) -> Iterator[None]:
    """Take tensors without memory (on "meta") for those of such a device within the context: to see what would run."""
    before, choice.stands_for = choice.stands_for, device
    try:
        with interpreting() if device == "cuda" else nullcontext():
            yield
    finally:
        choice.stands_for = before


def uniform_loop(turns: Iterable[T]) -> Iterable[T]:
    """Return `representative_turns` turns of a loop that are alike; who watches this thread is told before each."""
    return watched(turns) if choice.stands_for is None else representative_turns(list(turns))


def seen_by_others() -> bool:
    """Return whether each of torch's operations in this thread is seen by a profiler or a mode of dispatch, or is of
    tensors without memory: another thread's would not be.
    """
    return choice.stands_for is not None or is_observed()


def representative_turns(turns: Sequence[T]) -> Sequence[T]:
    """Return the turns of a loop that are alike: each writes to memory made before the loop and leaves nothing else.

    Where tensors have no memory a few are enough to see what a turn needs, while the one before is not yet forgotten.
    """
    return turns if choice.stands_for is None else _Few(turns)


class _Few(list[T]):
    """Some turns of a loop, each of which stands for others, too, while it runs."""

    def __init__(self, turns: Sequence[T]) -> None:
        super().__init__(turns[:TURNS])
        self.each = len(turns) / max(1, len(self))

    def __iter__(self) -> Iterator[T]:
        before, choice.turns = choice.turns, choice.turns * self.each
        try:
            yield from super().__iter__()
        finally:
            choice.turns = before


def turns() -> float:
    """Return for how many turns of loops this one stands; more than one where tensors have no memory."""
    return choice.turns


def watched(turns: Iterable[T], count: int | None = None) -> Iterable[T]:
    """Return the turns of a loop; who watches this thread is told before each.  count: of them, if they are no list."""
    return turns if choice.watcher is None else _watched(turns, count, choice.watcher)


def _watched(turns: Iterable[T], count: int | None, tell: "Callable[[Loops], object]") -> Iterator[T]:
    if count is None:
        turns = list(turns)
        count = len(turns)
    running, depth, done = choice.running, len(choice.running), 0
    try:
        for turn in turns:
            running[depth:] = [(done, count)]
            tell(running)
            yield turn
            del turn  # before the next one is made
            done += 1
    finally:
        del running[depth:]


@contextmanager
def watching(tell: "Callable[[Loops], object]") -> Iterator[None]:
    """Have each turn of this thread's loops over parts of tensors told, within the context; what it raises ends them.

    Without, a loop costs what it costs.
    """
    before, choice.watcher = choice.watcher, tell
    try:
        yield
    finally:
        choice.watcher = before


def backend(x: Tensor) -> Literal["cpu", "triton"]:
    """Return which package below ops has the fast paths for a tensor's device."""
    return "triton" if x.is_cuda or _interpreting else "cpu"


def repeats() -> bool:
    """Return whether operations on a GPU may be repeated by recipe: ops/triton/recipe.py."""
    # `is_dynamo_compiling` is one call of Python, `is_compiling` two; what else exports a graph does so by a mode.
    return TRITON and not torch.compiler.is_dynamo_compiling() and not is_observed()


def repeat_or_run(name: str, operands: Sequence[Any]) -> Any:
    """Compute a registered operation: on a GPU by the recipe for operands of this layout, or noting it if possible.

    The caller has checked `repeats`.
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
    """Return the function that computes a registered operation on a tensor's device, from its operands in order.

    It is the function of the operation's name, which takes them by name; Triton is loaded here and nowhere before.
    """
    module, names = modules[name]
    function = getattr(_module(backend(x), module), name)
    return lambda *operands: function(Operands(**dict(zip(names, operands, strict=True))))


@functools.cache
def _module(package: str, name: str) -> ModuleType:
    return importlib.import_module(f"warpfold.ops.{package}.{name}")


def faster_on_cpu(x: Tensor, elements: int, enough: int) -> bool:
    """Return whether x is on a CPU, where the definition is faster for fewer than `representative_turns` elements."""
    return elements < enough and backend(x) == "cpu"


def small_on_cpu(x: object, least: int) -> bool:
    """Return whether x is a tensor of fewer numbers on a CPU, and fast paths are not asked for whatever the size."""
    small = isinstance(x, Tensor) and faster_on_cpu(x, x.numel(), least)
    return small and not choice.always_fast and choice.kernels == "fast"


def unsupported_device(operands: Sequence[Any]) -> str | None:
    """Return why no fast path serves the devices and dtypes of tensors (or what has those; None: left out), or None."""
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
    return f"nothing faster was written for {device.type}"


def _unsupported_by_triton(device: torch.device) -> str | None:
    """Return why Triton kernels cannot run on a device, or None."""
    if device.type == "cuda":
        return no_kernels_reason(device)
    return None if TRITON else NO_TRITON


Shape = tuple[int, ...]
Sizes = dict[str, Any]  # of each axis by name; of "*": those of the leading axes
EMPTY = ""  # the reason not to take the fast path where there is nothing to compute: not worth reporting
LEADING = ("*", "...")


class _Operand(NamedTuple):
    name: str
    text: str  # its axes as written
    leading: str  # "*", "..." or "" for none
    axes: tuple[str, ...]  # the others
    expands: bool  # any shape that expands to this one will do


class Shapes:
    """The shapes that operands must have; operands in the text that are not among `names` are left out."""

    def __init__(self, text: str, names: Sequence[str]) -> None:
        self.operands: list[_Operand] = []
        self.positions: list[int] = []  # of the operands among the names
        for name, parenthesis, inner in re.findall(r"(\w+) (\(?)\[(.*?)\]", text):
            if name in names:
                axes = tuple(inner.split(", ")) if inner else ()
                leading = axes[0] if axes[:1] and axes[0] in LEADING else ""
                own = axes[1:] if leading else axes
                written = f"[{inner}] or 1 on an axis" if parenthesis else f"[{inner}]"
                self.operands.append(_Operand(name, written, leading, own, bool(parenthesis)))
                self.positions.append(list(names).index(name))
        # Models call an operation with few different shapes, and looking these up takes less than comparing them.
        self._remembered = functools.lru_cache(maxsize=1024)(self._compare)

    def misfit(self, given: Sequence[Any]) -> str | None:
        """Describe the first operand of a wrong shape; EMPTY if there is nothing to compute, else None.

        given: the operands that have a shape here, in order.
        """
        wrong, sizes = self._find(given)
        if wrong is not None:
            return self._misfit(wrong, sizes, given)
        return EMPTY if sizes["empty"] else None

    def require(self, op: str, args: Sequence[Any]) -> Sizes:
        """Raise ValueError if an operand among `args`, which go by the names, has another shape; return all sizes."""
        given = [args[i] for i in self.positions]
        wrong, sizes = self._find(given)
        if wrong is not None:
            raise ValueError(f"{op}: {self._misfit(wrong, sizes, given)}")
        return sizes

    def _misfit(self, wrong: _Operand, sizes: Sizes, given: Sequence[Any]) -> str:
        """Return "mask is [4, 1], not [*, i, k] = [4, 4], as x is [4, 4, 16]"."""
        shapes = {operand.name: list(t.shape) for operand, t in zip(self.operands, given) if t is not None}
        right, decided = _right(wrong, sizes), sizes["decided by"]
        if right is None:
            return f"{wrong.name} is {shapes[wrong.name]}, not {wrong.text}"
        by = dict.fromkeys(decided[axis] for axis in (wrong.leading, *wrong.axes) if axis in decided)
        because = " and ".join(f"{name} is {shapes[name]}" for name in by if name != wrong.name)
        return f"{wrong.name} is {shapes[wrong.name]}, not {wrong.text} = {list(right)}{because and f', as {because}'}"

    def _find(self, given: Sequence[Any]) -> tuple[_Operand | None, Sizes]:
        shapes = tuple([None if t is None else t.shape for t in given])
        if torch.compiler.is_compiling():  # a graph can hold no cache, and sizes that it does not know have no hash
            return self._compare(shapes)
        return self._remembered(shapes)

    def _compare(self, shapes: tuple[Shape | None, ...]) -> tuple[_Operand | None, Sizes]:
        """Return the first operand whose shape is wrong, if any, and the sizes found before it."""
        decided: dict[str, str] = {}  # by which operand an axis is decided
        sizes: Sizes = {"1": 1, "2": 2, "3": 3, "4": 4, "empty": False, "decided by": decided}
        for operand, given in zip(self.operands, shapes):
            if given is None:
                continue
            shape, rank = tuple(given), len(operand.axes)
            sizes["empty"] = sizes["empty"] or 0 in shape
            if operand.expands:
                # After "..." only the axes that are named are compared; axes left out count as shared.
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
    """Return the shape that an operand should have, or None if the others do not decide it."""
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
    for a, b in zip(shape, target[added:]):  # noqa: SIM110  (a generator takes twice the time)
        if a != b and a != 1:
            return False
    return True


def upcast_half(x: Tensor) -> Tensor:
    """Return x in fp32 if it has 16 bits, else x itself: for norms, softmax, frames, losses and logits."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of sums over x, of its statistics and its logits: fp64 for fp64, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def widen(x: Tensor) -> Tensor:
    """Return x in fp64, for the few numbers that want more digits than fp32; in fp32 on Apple's GPUs, which lack it."""
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64)


def empty_like(x: Tensor) -> Tensor:
    """Allocate a dense tensor of x's shape whose axes lie in memory in the order of x's.

    Not torch.empty_like, which makes a tensor in row-major order of one that is expanded or a slice.
    """
    order = sorted(range(x.dim()), key=lambda axis: x.stride(axis), reverse=True)
    back = [order.index(axis) for axis in range(x.dim())]
    return x.new_empty([x.shape[axis] for axis in order]).permute(back)


def laid_out_as(y: Tensor, x: Tensor) -> Tensor:
    """Return y, whose axes lie in memory in the order of x's: as it is, or a copy."""
    like = empty_like(x)
    return y if y.stride() == like.stride() else like.copy_(y)


def empty_parameters(*parameters: Tensor | None) -> tuple[Tensor, ...]:
    """Allocate a contiguous tensor for the gradient of each of these, in fp32 at least: sums over all positions.

    For None, which is no parameter, one without numbers.
    """
    some = next(p for p in parameters if p is not None)
    given = (some.new_empty(0) if p is None else p for p in parameters)
    return tuple(p.new_empty(p.shape, dtype=accumulation_dtype(p)) for p in given)


Registered = Callable[..., Any]  # an operation of torch.ops.warpfold


class Expansion(NamedTuple):
    """How a parameter that torch has no type for becomes several operands of the registered operation."""

    types: Mapping[str, Any]  # of those operands, by name; the first is named like the parameter
    split: Callable[[Any, Tensor], tuple[Any, ...]]  # (argument, first argument of all) -> those operands


@dataclass(frozen=True, kw_only=True)
class register:
    """What an operation needs to be one beside its definition, which this decorates.

    shapes: of all operands of the registered operation, of its results and of `grad`, as ops/dispatch.py reads them.
    empty: of the operands, allocates the results; they must have the strides that the kernels return.  None: one
        result that lies as the first operand does.
    mutates: the operands that are changed in place, by an operation that has no results.
    results: the names of the results, of which the caller gets the first; the others are kept for the backward pass.
    keeps: what the backward operation is given beside `grad`: operands and results by their names; `NAME_wanted`:
        whether the gradient of NAME is wanted at all.
    gradients: the operands whose gradients the backward operation returns, at least two; none: there is no gradient.
    empty_gradients: of what the backward operation is given, allocates them, as `empty` does the results.  None: those
        of tensors with leading axes as the tensors lie, those of parameters as sums over all positions.
    residual: the operand to which the rest is added, so that its gradient is `grad` itself.
    composed: of the definition's arguments by name, computes it from other operations where that is faster than the
        registered one, and returns None elsewhere; decided by dtypes, shapes, strides, devices and numbers.
    same_dtype: operands that must share a dtype.
    kept: whether the operation has one operand more than the definition, the last: `kept`, whether a backward pass may
        follow.  Where it may not, the results but the first are left out, as tensors without elements.
    check: of (name, sizes, operands), raises ValueError for what `shapes` cannot describe.
    expand: a parameter of the definition that is several operands of the registered operation.
    caller_shapes: the shapes that the definition's arguments must have, where `adapter` makes others of them.
    adapter: of the registered operation and the definition's arguments, calls it with others.
    misfit: of the definition's arguments by name, describes one whose size is wrong in a way that `shapes` cannot
        express, or returns None.  It is called if the shapes are right.
    unsupported: of the definition's arguments by name, why the fast path does not take them, or None; asked where
        devices, shapes and dtypes are right.
    prefer_definition: of the definition's arguments by name, whether that is faster.
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
    check: Callable[[str, Sizes, Operands], None] | None = None
    expand: Expansion | None = None
    caller_shapes: str | None = None
    adapter: Callable[..., Tensor] | None = None
    misfit: Callable[[Any], str | None] | None = None
    unsupported: Callable[[Any], str | None] | None = None
    prefer_definition: Callable[[Any], bool] | None = None

    def __call__(self, definition: Callable[P, R]) -> Op[P, R]:
        """Register the operation of a definition, and the backward one, and return the `Op`."""
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
            back, needs = f"{name}_backward", self._operands(["grad", *self.keeps.split()], types)
            needs = dict(sorted(needs.items(), key=lambda need: _kind(*need)))
            self._define(back, module, needs, len(gradients), self.empty_gradients or self._empty_gradients)
            save, differentiate = self._autograd(back, list(operands), needs)
            op.register_autograd(differentiate, setup_context=save)
            return self._choosing(definition, _registered(name), direct_function(save, differentiate))
        return self._choosing(definition, _registered(name))

    def _operands(self, names: Sequence[str], types: Mapping[str, Any]) -> dict[str, Any]:
        """Return the operands of a registered operation, name and type."""
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
        modules[name] = module, tuple(operands)
        qualified, shapes, check = f"warpfold::{name}", Shapes(self.shapes, list(operands)), self.check

        recipes[name] = {}

        def run(*args: Any) -> Any:
            """Check the operands and compute the operation."""
            sizes = shapes.require(qualified, args)
            if check is not None:
                check(qualified, sizes, Operands(**dict(zip(operands, args))))
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
        op.register_fake(lambda *args: empty(Operands(**dict(zip(operands, args)))))
        return op

    def _autograd(
        self, backward: str, operands: list[str], needs: Mapping[str, Any]
    ) -> tuple[Callable[..., None], Callable[..., tuple[Tensor | None, ...]]]:
        """Make the two functions of an operation's gradient: one saves what the backward operation needs, one calls it.

        backward: the name of the backward operation.
        """
        known, gradients = [*operands, *self.results.split()], self.gradients.split()
        tensors = [name for name, hint in needs.items() if hint in (Tensor, Tensor | None)]
        saved = [known.index(name) for name in tensors if name in known]
        constants = [known.index(name) for name in needs if name in known and name not in tensors]
        flags = [operands.index(name.removesuffix("_wanted")) for name in needs if name.endswith("_wanted")]
        # Where the gradient of each operand is among those returned; `grad` itself is put behind them.
        places = {**{name: i for i, name in enumerate(gradients)}, self.residual: len(gradients)}
        sources = [places.get(name) for name in operands]
        through_dispatcher = _registered(backward)

        def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            value_at = (*inputs, *(output if isinstance(output, tuple) else (output,))).__getitem__
            ctx.save_for_backward(*map(value_at, saved))
            ctx.constants = list(map(value_at, constants))
            ctx.set_materialize_grads(False)

        def differentiate(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
            """Return the gradient of each operand, or None."""
            if grad is None:
                return (None,) * len(sources)
            wanted = ctx.needs_input_grad
            # Where the gradient shall have a gradient itself, the registered operation raises an error.
            given = grad, *ctx.saved_tensors, *ctx.constants, *map(wanted.__getitem__, flags)
            if type(grad) is not Tensor or grad.is_meta or torch.is_grad_enabled() or not repeats():
                computed = through_dispatcher(*given)
            else:
                with below_autograd():
                    computed = repeat_or_run(backward, given)
            computed = *computed, grad
            return tuple([computed[at] if at is not None and wanted[i] else None for i, at in enumerate(sources)])

        return save, differentiate

    def _choosing(
        self, definition: Callable[P, R], registered: Registered, past_dispatcher: Callable[..., Any] | None = None
    ) -> Op[P, R]:
        """Return the `Op` of a definition, whose fast path is the registered operation.

        past_dispatcher(*operands, repeat): calls repeat(operands), and gives the results a gradient.
        """
        parameters = list(inspect.signature(definition).parameters)
        shapes = Shapes(self.caller_shapes or self.shapes, parameters)
        adapter, unsupported, expand, kept = self.adapter, self.unsupported, self.expand, self.kept
        further, composed = self.misfit, self.composed
        several = " " in self.results
        at = 0 if expand is None else parameters.index(next(iter(expand.types)))
        same = self.same_dtype.split()
        first, *others = [parameters.index(name) for name in same] or [0]
        all_have_shapes = shapes.positions == list(range(len(parameters)))
        differ = f"{', '.join(same[:-1])} and {''.join(same[-1:])} differ in dtype"

        def call_with(compute: Callable[..., Any], given: Any, *last: Any) -> Any:
            """Call the registered operation by compute(*operands, *last), with the arguments of the adapter."""
            if expand is not None:
                given = *given[:at], *expand.split(given[at], given[0]), *given[at + 1 :]
            out = compute(*given, torch.is_grad_enabled(), *last) if kept else compute(*given, *last)
            return out[0] if several else out

        def call(compute: Callable[..., Any], given: Any, *last: Any) -> Any:
            """Call the registered operation by compute(*operands, *last), with the definition's arguments."""
            if adapter is None:
                return call_with(compute, given, *last)
            return adapter(lambda *adapted: call_with(compute, adapted, *last), *given)

        def fast(given: Any) -> Any:
            computed = None if composed is None else composed(given)
            return call(registered, given) if computed is None else computed

        def misfit(given: Any) -> str | None:
            """Describe the first operand of a wrong shape; EMPTY if there is nothing to compute, else None."""
            found = shapes.misfit(given if all_have_shapes else [given[i] for i in shapes.positions])
            more = None if found or further is None else further(given)
            return found if more is None else more

        def why_not(given: Any) -> str | None:
            """Return why the fast path does not take these arguments, or None: first what all operations share."""
            reason = unsupported_device(given if all_have_shapes else [given[i] for i in shapes.positions])
            if reason is not None:
                return reason
            for i in others:
                if given[i].dtype != given[first].dtype:
                    return differ
            return None if unsupported is None else unsupported(given)

        direct = (
            None
            if past_dispatcher is None
            else functools.partial(call_with if adapter is None else call, past_dispatcher)
        )
        table = recipes[definition.__name__]
        return Op(definition, fast, why_not, self.prefer_definition, misfit, composed, direct, table)


def _kind(name: str, hint: Any) -> int:
    """Return where an operand of a backward operation stands: `grad`, tensors, numbers, what is wanted."""
    if name == "grad":
        return 0
    return 1 if hint in (Tensor, Tensor | None) else 3 if name.endswith("_wanted") else 2


def _registered(name: str) -> Registered:
    """Return the overload of torch.ops.warpfold, which is called faster than the name that stands for all overloads."""
    overload: Registered = getattr(torch.ops.warpfold, name).default
    return overload
