"""Choose how an operation is computed: by its definition, or by what is faster on the device of its tensors.

An operation has a *definition* in plain torch, which is its documentation and the truth, and a *fast* way of its own:
an operation registered with torch (ops/register.py), computed by Triton kernels on a GPU (ops/triton) and block by
block on a CPU (ops/cpu).  The fast way may be unable to serve some arguments, for a reason that it gives; the
definition then computes them, and the reason is counted.
"""

import functools
import importlib
import importlib.util
import inspect
import logging
import threading
from collections import Counter, namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from warpfold.errors import UserError
from warpfold.ops.shapes import EMPTY

# fast: the fast way where it can be; strict: likewise, but where it cannot is an error; definition: never.
Kernels = Literal["fast", "strict", "definition"]

TRITON = importlib.util.find_spec("triton") is not None  # looked for, and not loaded
TURNS = 3  # of a loop, where nothing is computed: the first begins, the second meets what it left; one to spare
Loops = list[tuple[int, int]]  # of each loop that runs, the outer first: turns done, and of how many
P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
log = logging.getLogger("warpfold")


class _Choice(threading.local):
    """Which kernels this thread uses.

    Thread-local, so that two models may run differently at once; and not a contextvar, which torch.compile cannot
    trace.  A new thread begins with the values below: also autograd's own threads, which run the backward pass of
    CUDA tensors, so whatever recomputes there must enter `using` itself.
    """

    def __init__(self) -> None:  # not attributes of the class, which torch.compile takes for constants without a guard
        self.kernels: Kernels = "fast"
        self.stands_for: Literal["cpu", "cuda"] | None = None  # what tensors without memory are taken for
        self.always_fast = False  # also where the definition would be faster
        self.watcher: Callable[[Loops], object] | None = None  # told of each turn of a loop
        self.turns = 1.0  # for how many turns of loops the one that runs stands, where few of them do


_choice = _Choice()
_tf32 = False
_exact = 0  # how many `exact_products` are entered, in all threads
_exact_lock = threading.Lock()
_interpreting = False
_refused: Counter[str] = Counter()
# Of each registered operation: the module below ops/cpu and ops/triton that computes it, and its operands' names.
modules: dict[str, tuple[str, tuple[str, ...]]] = {}
_around: Any = None  # makes the calls of operations instead of themselves: see `observed`


class Operands(SimpleNamespace):
    """The operands of a registered operation, by their names: what computes it is given all of them as one."""

    def but(self, **changed: Any) -> "Operands":
        """Return these operands with some changed or added: for an operation that is part of another."""
        return Operands(**{**self.__dict__, **changed})


class Op(Generic[P, R]):
    """An operation that chooses each time it is called whether `definition` or `fast` computes it.

    What it is made of takes the definition's arguments as one, by their names, defaults filled in:
    fast computes it; unsupported says why `fast` cannot take them, or None; prefer_definition says whether the
    definition is the faster of the two, which is not counted as a refusal.
    """

    def __init__(
        self,
        definition: Callable[P, R],
        fast: Callable[[Any], R],
        unsupported: Callable[[Any], str | None],
        prefer_definition: Callable[[Any], bool] | None = None,
    ) -> None:
        self.definition, self.prefer_definition = definition, prefer_definition
        self._fast, self._unsupported = fast, unsupported
        self.name = definition.__name__
        parameters = inspect.signature(definition).parameters
        defaults = [p.default for p in parameters.values() if p.default is not p.empty]
        self.arguments: Any = namedtuple("Arguments", list(parameters), defaults=defaults)  # type: ignore[misc]
        functools.update_wrapper(self, definition)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if _around is not None:
            around: Any = _around
            called: R = around(Op.choose, self, args, kwargs)
            return called
        return self.choose(*args, **kwargs)

    def choose(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Compute it, one way or the other."""
        if _choice.kernels == "definition":
            return self.definition(*args, **kwargs)
        # This runs at every call on a GPU, beside kernels of a few microseconds: no step that can be left out.
        given = self.arguments(*args, **kwargs)
        if self.prefer_definition is not None and not _choice.always_fast and self.prefer_definition(given):
            return self.definition(*args, **kwargs)
        reason = self._unsupported(given)
        if reason is None:
            return self._fast(given)
        if reason != EMPTY:
            report_refusal(f"{self.name}: {reason}")
        return self.definition(*args, **kwargs)

    def fast(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Compute it the fast way, which must be able to."""
        return self._fast(self.arguments(*args, **kwargs))

    def unsupported_reason(self, *args: P.args, **kwargs: P.kwargs) -> str | None:
        """Return why the fast way does not take these arguments, or None."""
        return self._unsupported(self.arguments(*args, **kwargs))


def op(
    fast: Callable[[Any], R],
    unsupported: Callable[[Any], str | None],
    prefer_definition: Callable[[Any], bool] | None = None,
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Return a decorator that makes an `Op` of a definition."""
    return lambda definition: Op(definition, fast, unsupported, prefer_definition)


@contextmanager
def observed(
    around: Callable[[Callable[..., Any], Op[..., Any], tuple[Any, ...], dict[str, Any]], Any],
) -> Iterator[None]:
    """Have `around(call, op, args, kwargs)` make every call of an operation within the context, in all threads.

    It computes the result by `call(op, *args, **kwargs)`.
    """
    global _around
    before, _around = _around, around
    try:
        yield
    finally:
        _around = before


def kernels() -> Kernels:
    """Return how this thread computes operations now."""
    return _choice.kernels


@contextmanager
def using(kernels: Kernels) -> Iterator[None]:
    """Compute operations that way within the context, in this thread."""
    before = _choice.kernels
    _choice.kernels = kernels
    try:
        yield
    finally:
        _choice.kernels = before


@contextmanager
def always_fast() -> Iterator[None]:
    """Compute operations the fast way also where the definition would be faster, in this thread: to compare the two."""
    before, _choice.always_fast = _choice.always_fast, True
    try:
        yield
    finally:
        _choice.always_fast = before


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
    # Not torch.backends.cuda.matmul.fp32_precision: once that is set, this setting cannot be read any more, and
    # torch.compile reads it.
    torch.set_float32_matmul_precision("high" if _tf32 and not _exact else "highest")


def fp32_products() -> tuple[str, ...]:
    """Return how the kernels may multiply fp32, as Triton calls it; AMD's GPUs stay exact."""
    return ("ieee", "tf32") if _tf32 and not _exact and torch.version.hip is None else ("ieee",)


def refusals(before: Mapping[str, int] | None = None) -> dict[str, int]:
    """Return every refusal, "operation: reason", and how often it occurred: for a run's summary.

    before: what this returned earlier; only what came after it is counted.  None: since the process began.
    """
    return dict(_refused - Counter(before or {}))


def report_refusal(refusal: str) -> None:
    """Count a refusal and log it the first time; raise UserError if kernels are "strict"."""
    if _choice.kernels == "strict":
        raise UserError(f"{refusal}; without --strict its definition would compute it, slower")
    if torch.compiler.is_compiling() or _choice.stands_for is not None:
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
def standing_for(device: Literal["cpu", "cuda"]) -> Iterator[None]:
    """Take tensors without memory (on "meta") for those of such a device within the context: to see what would run."""
    before, _choice.stands_for = _choice.stands_for, device
    try:
        with interpreting() if device == "cuda" else nullcontext():
            yield
    finally:
        _choice.stands_for = before


def alike(turns: Iterable[T]) -> Iterable[T]:
    """Return `enough` turns of a loop that are alike; who watches this thread is told before each."""
    return watched(turns) if _choice.stands_for is None else enough(list(turns))


def enough(turns: Sequence[T]) -> Sequence[T]:
    """Return the turns of a loop that are alike: each writes to memory made before the loop and leaves nothing else.

    Where tensors have no memory a few are enough to see what a turn needs, while the one before is not yet forgotten.
    """
    return turns if _choice.stands_for is None else _Few(turns)


class _Few(list[T]):
    """Some turns of a loop, each of which stands for others, too, while it runs."""

    def __init__(self, turns: Sequence[T]) -> None:
        super().__init__(turns[:TURNS])
        self.each = len(turns) / max(1, len(self))

    def __iter__(self) -> Iterator[T]:
        before, _choice.turns = _choice.turns, _choice.turns * self.each
        try:
            yield from super().__iter__()
        finally:
            _choice.turns = before


def turns() -> float:
    """Return for how many turns of loops this one stands; more than one where tensors have no memory."""
    return _choice.turns


def watched(turns: Iterable[T], count: int | None = None) -> Iterable[T]:
    """Return the turns of a loop; who watches this thread is told before each.  count: of them, if they are no list."""
    return turns if _choice.watcher is None else _watched(turns, count, _choice.watcher)


def _watched(turns: Iterable[T], count: int | None, tell: "Callable[[Loops], object]") -> Iterator[T]:
    if count is None:
        turns = list(turns)
        count = len(turns)
    running, depth, done = _loops.running, len(_loops.running), 0
    try:
        for turn in turns:
            running[depth:] = [(done, count)]
            tell(running)
            yield turn
            del turn  # before the next one is made
            done += 1
    finally:
        del running[depth:]


class _Loops(threading.local):
    """The loops that run in this thread, while somebody watches."""

    def __init__(self) -> None:
        self.running: Loops = []


_loops = _Loops()


@contextmanager
def watching(tell: "Callable[[Loops], object]") -> Iterator[None]:
    """Have each turn of this thread's loops over parts of tensors told, within the context; what it raises ends them.

    Without, a loop costs what it costs.
    """
    before, _choice.watcher = _choice.watcher, tell
    try:
        yield
    finally:
        _choice.watcher = before


def backend(x: Tensor) -> Literal["cpu", "triton"]:
    """Return which package below ops has the fast ways for a tensor's device."""
    return "triton" if x.is_cuda or _interpreting else "cpu"


def implementation(name: str, x: Tensor) -> Callable[..., Any]:
    """Return what computes a registered operation on a tensor's device, of its operands in order.

    It is the function of the operation's name, which takes them by name; Triton is loaded here and nowhere before.
    """
    module, names = modules[name]
    function = getattr(_module(backend(x), module), name)
    return lambda *operands: function(Operands(**dict(zip(names, operands, strict=True))))


@functools.cache
def _module(package: str, name: str) -> ModuleType:
    return importlib.import_module(f"warpfold.ops.{package}.{name}")


def faster_on_cpu(x: Tensor, elements: int, enough: int) -> bool:
    """Return whether x is on a CPU, where the definition is faster for fewer than `enough` elements."""
    return elements < enough and backend(x) == "cpu"


def small_on_cpu(x: object, least: int) -> bool:
    """Return whether x is a tensor of fewer numbers on a CPU, and fast ways are not asked for whatever the size."""
    small = isinstance(x, Tensor) and faster_on_cpu(x, x.numel(), least)
    return small and not _choice.always_fast and _choice.kernels == "fast"


def unsupported_device(operands: Sequence[Any]) -> str | None:
    """Return why no fast way serves the devices and dtypes of tensors (or what has those; None: left out), or None."""
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
    if device.type == "cpu" or (_choice.stands_for == "cpu" and device.type == "meta"):
        return None
    return f"nothing faster was written for {device.type}"


def _unsupported_by_triton(device: torch.device) -> str | None:
    """Return why Triton kernels cannot run on a device, or None.

    torch.compile traces this whole: it takes the properties of a device for a constant, but not a cache of ours.
    """
    if not TRITON:
        return "triton is not installed (pip install triton)"
    if device.type == "cuda" and torch.version.hip is None:
        properties = torch.cuda.get_device_properties if torch.compiler.is_compiling() else _properties
        if properties(device).major < 8:
            return "GPUs before Ampere (compute capability 8.0) have no kernels"
    return None


@functools.cache
def _properties(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device)
