"""Which way an operation is computed: by its definition, or by what is faster on the device of its tensors.

An operation has a *definition* in plain torch, which is its documentation and the truth, and a *fast* way of its own
(ops/library: registered with torch, with kernels in ops/triton for GPUs and row by row in ops/cpu).  The fast way may
refuse what it was not made for, with a reason; the definition then computes it, and the reason is remembered.
"""

import functools
import importlib
import importlib.util
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from warpfold.errors import UserError

# fast: the fast way where it does not refuse; strict: likewise, but a refusal is an error; definition: never.
Kernels = Literal["fast", "strict", "definition"]

TRITON = importlib.util.find_spec("triton") is not None  # looked for, and not loaded
EMPTY = ""  # the reason where there is nothing to compute: not worth a word
P = ParamSpec("P")
R = TypeVar("R")
log = logging.getLogger("warpfold")
_kernels: Kernels = "fast"
_interpreting = False
_refused: Counter[str] = Counter()


class Op(Generic[P, R]):
    """An operation that chooses its way each time it is called; `definition` and `fast` are the two.

    Where `small` says so, the definition is the faster of them, and no refusal.
    """

    def __init__(
        self,
        definition: Callable[P, R],
        fast: Callable[P, R],
        refuses: Callable[P, str | None],
        small: Callable[P, bool] | None = None,
    ) -> None:
        self.definition, self.fast, self.refuses, self.small = definition, fast, refuses, small
        self.name = definition.__name__
        functools.update_wrapper(self, definition)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if _kernels == "definition":
            return self.definition(*args, **kwargs)
        if self.small is not None and self.small(*args, **kwargs):
            return self.definition(*args, **kwargs)
        reason = self.refuses(*args, **kwargs)
        if reason is None:
            return self.fast(*args, **kwargs)
        if reason != EMPTY:
            _note(f"{self.name}: {reason}")
        return self.definition(*args, **kwargs)


def op(
    fast: Callable[P, R], refuses: Callable[P, str | None], small: Callable[P, bool] | None = None
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Decorates the definition of an operation with its fast way, with what that refuses: the reason, or None; and with
    where the definition is faster."""
    return lambda definition: Op(definition, fast, refuses, small)


def small_on_cpu(x: Tensor, numbers: int, enough: int) -> bool:
    """Whether a CPU is done with so many numbers sooner than with calling what is faster where there are `enough`."""
    return numbers < enough and place(x) == "cpu"


def choose(kernels: Kernels) -> None:
    """From now on, and for the whole process, compute operations that way."""
    global _kernels
    _kernels = kernels


def kernels() -> Kernels:
    """Return how operations are computed now."""
    return _kernels


@contextmanager
def using(kernels: Kernels) -> Iterator[None]:
    """Compute operations that way within the context."""
    before = _kernels
    choose(kernels)
    try:
        yield
    finally:
        choose(before)


def refusals(before: Mapping[str, int] | None = None) -> dict[str, int]:
    """Return every refusal, "operation: reason", and how often: for a run's summary.

    before: what this returned earlier; only what came after it is counted.  None: since the process began.
    """
    return dict(_refused - Counter(before or {}))


def _note(refusal: str) -> None:
    if _kernels == "strict":
        raise UserError(f"{refusal}; without --strict its definition would compute it, slower")
    if torch.compiler.is_compiling():
        return  # seen by whoever runs uncompiled; a graph has no memory
    _refused[refusal] += 1
    if _refused[refusal] == 1:
        log.info("%s: computed by its definition", refusal)


def interpret() -> None:
    """From now on give CPU tensors to the Triton kernels: for tests, in a process begun with TRITON_INTERPRET=1.

    Triton reads that variable when a kernel is defined; interpreted, a kernel takes thousands of times longer.
    """
    global _interpreting
    _interpreting = True


@contextmanager
def interpreting() -> Iterator[None]:
    """As `interpret`, within the context: also for tensors without memory, whose kernels are noted and not run."""
    global _interpreting
    before, _interpreting = _interpreting, True
    try:
        yield
    finally:
        _interpreting = before


def place(x: Tensor) -> Literal["cpu", "triton"]:
    """Where the fast ways for a tensor's device are: the package below ops."""
    return "triton" if x.device.type == "cuda" or _interpreting else "cpu"


def implementation(name: str, x: Tensor) -> ModuleType:
    """The module of that name with the fast ways for a tensor's device; Triton is loaded here and nowhere before."""
    return _module(place(x), name)


@functools.cache
def _module(place: str, name: str) -> ModuleType:
    return importlib.import_module(f"warpfold.ops.{place}.{name}")


def refuses_device(*tensors: Tensor | None) -> str | None:
    """Why no fast way serves the devices and dtypes of the tensors; None if one does."""
    given = [t for t in tensors if t is not None]
    device = given[0].device
    kernels = _interpreting or device.type == "cuda"
    for t in given:
        if t.device != device:
            return "its tensors are on several devices"
        if kernels and t.dtype == torch.float64:
            return "in fp64 no kernel is exact"
    if kernels:
        return _refuses_triton(device)
    return None if device.type == "cpu" else f"nothing faster was written for {device.type}"


def _refuses_triton(device: torch.device) -> str | None:
    """Traced whole by torch.compile: that takes the properties of a device for a constant, but not a cache of ours."""
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
