"""accelerate: have the layers of any model that are known here compute by our operations; restore: undo it.

    warpfold.accelerate(model)      # prints what was swapped, what was left and why
    warpfold.restore(model)

Parameters, their names, hooks, `state_dict`, devices and dtypes stay as they are: a swapped module is of a class made
of its own (`adapter.swapped_class`), with another `forward`.
"""

import importlib
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cache
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from warpfold.adapt.adapter import Adapter, NotServed, adapter_of, is_swapped, name_of, swap, swap_back, was_wrapped
from warpfold.adapt.report import NO_OPERATION, Acceleration, LayerKind, pattern
from warpfold.adapt.slices import SlicedExecution, on_meta
from warpfold.adapt.verify import compare, gain, glanced_speed, measured_speed
from warpfold.arguments import parse_memory
from warpfold.cost.machine import in_gb
from warpfold.device import keep_memory, slow_precision, spinning_threads
from warpfold.errors import UserError
from warpfold.memory import is_out_of_memory, memory_in_use
from warpfold.ops.capabilities import slow_notice
from warpfold.ops.dispatch import unsupported_device
from warpfold.ops.torch_internals import is_compiled
from warpfold.parallel.plan import DTYPES as PRECISIONS

PACKAGES: tuple[str, ...] = (  # modules of warpfold.adapt, with adapters
    "plain",
    "esmfold",
    "openfold3",
    "boltz",
    "protenix",
    "rf3",
)
REPORT = "_warpfold_acceleration"  # the attribute of an accelerated model
NOT_ASKED = "not asked for"
PLAIN = "plain torch: swapped where only= names it, or where verify='speed' finds a gain"
NOT_TIMED = "not timed: something may be slower than its own code here; verify='speed' leaves what is"
WAS_TIMED = "timed briefly: what is slower than its own code here was left; verify=True swaps it, too"
ADAPTER_PAGE = "docs/howto/accelerate.md (How to serve another class)"
PROGRESS_SECONDS = 10.0  # between two lines of a verification that takes long
FORWARD_COUNTS = "judged by the forward pass: the model is in eval() or has no trainable parameters"
Verify = bool | Literal["speed"] | None
M = TypeVar("M", bound=nn.Module)


def accelerate(
    model: M,
    *,
    only: str | Iterable[str] | None = None,
    strict: bool = False,
    verify: Verify = None,
    memory: str | int | None = None,
    size: int | None = None,
) -> M:
    """Have the layers of a model that are known here compute by our operations; print what was done; return the model.

    only: patterns of module names ("trunk.blocks.*"; what is below is meant, too), or names of operations; None: every
    layer that is known.
    strict: a known layer that cannot be swapped is an error, and so is an operation that refuses what it is given.
    verify: compare each kind of layer both ways, forward and backward; one that does not agree is left.  "speed": time
    both ways, too, with `size` residues or tokens (128 on a CPU, 256 on a GPU), and leave what is slower here.  None:
    compare, and leave what a brief look finds slower (of a model in eval() or without trainable parameters, what is
    slower in its forward pass), unless several processes share the machine, or `only`, `strict`
    or `memory` says what is wanted.
    memory: of the device, "24GB": a swapped layer takes no more than what is left of it, in slices; with gradients it
    is computed again in the backward pass.
    `acceleration(model)` returns what was printed.
    Errors: UserError where nothing can be swapped, for a model that is compiled, quantised, sharded, on a device or of
    a dtype that is not served, or accelerated already.  The model is then as it was.
    """
    if verify not in (None, True, False, "speed"):
        raise UserError(f"accelerate: verify={verify!r}: not True, False, 'speed' or None")
    check_model(model)
    of = inside(model)
    if memory is not None:
        memory_in_use(next((p.device for p in of.parameters()), torch.device("cpu")))  # known, or an error
    asked = _Asked(
        _patterns(of, only), strict, verify, None if memory is None else parse_memory(memory), size, is_trained(of)
    )
    if any(p.device.type == "cpu" for p in of.parameters()):
        keep_memory()  # before anything is timed: so will both ways run
    kinds, layers = [], []
    with _progress_lines() as tell:
        for kind, adapter, modules in _kinds(of, asked, tell):
            kinds.append(kind)
            if adapter is not None and kind.operation:
                execution = asked.execution(adapter, modules[0])
                layers += [(module, adapter, adapter.build(module), execution) for module in modules]
    report = Acceleration(tuple(kinds), sum(p.numel() for p in of.parameters()), _notes(of, asked, kinds))
    if not report.swapped and not any(kind.speed for kind in kinds):  # to leave all that is slower is no failure
        raise UserError(_nothing(of, report))
    for module, adapter, layer, execution in layers:
        swap(module, adapter, layer, execution)
    object.__setattr__(model, REPORT, report)
    if not (torch.distributed.is_initialized() and torch.distributed.get_rank()):
        print(report)
    return model


def restore(model: M) -> M:
    """Have every layer of a model compute as its own class does; return the model.

    Errors: UserError for a model that is not accelerated, or was sharded since.
    """
    swapped = [module for module in model.modules() if is_swapped(module)]
    if not swapped and REPORT not in {**vars(model), **vars(inside(model))}:
        raise UserError("restore: this model is not accelerated")
    if wrapped := [module for module in swapped if was_wrapped(module)]:
        raise UserError(f"restore: a {type(wrapped[0]).__name__} was wrapped since it was swapped; restore before that")
    for module in swapped:
        swap_back(module)
    for module in model.modules():
        vars(module).pop(REPORT, None)
    return model


def acceleration(model: nn.Module) -> Acceleration:
    """Return the record of `accelerate` on a model.  Errors: UserError for one that is not accelerated."""
    report: Acceleration | None = vars(model).get(REPORT) or vars(inside(model)).get(REPORT)
    if report is None:
        raise UserError("acceleration: this model is not accelerated")
    return report


@cache
def adapters() -> Mapping[str, Adapter]:
    """Return the adapter of each class, by the class's name."""
    modules = [importlib.import_module(f"warpfold.adapt.{name}") for name in PACKAGES]
    kinds = [k for m in modules for k in vars(m).values() if isinstance(k, type) and issubclass(k, Adapter)]
    return {name: kind() for kind in kinds for name in kind.serves}


@dataclass(frozen=True)
class _Asked:
    """What a call of `accelerate` asks for."""

    patterns: tuple[str, ...] | None
    strict: bool
    verify: Verify
    memory: int | None
    size: int | None
    trains: bool  # the model is in train() and has trainable parameters; otherwise the forward pass alone decides

    @property
    def glances(self) -> bool:
        """Whether each kind is timed briefly, as nothing says what is wanted, and one process has the machine."""
        alone = not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1
        said = self.patterns is not None or self.strict or self.memory is not None
        return self.verify is None and alone and not said

    def wants(self, name: str, adapter: Adapter) -> bool:
        """Return whether a module is asked for."""
        if self.patterns is None:
            return True
        return any(adapter.operation == p or fnmatch(name, p) or fnmatch(name, f"{p}.*") for p in self.patterns)

    def execution(self, adapter: Adapter, module: nn.Module | None) -> SlicedExecution:
        """Return how layers like that of a module compute."""
        twin = None if self.memory is None or module is None else on_meta(adapter, module)
        return SlicedExecution("strict" if self.strict else None, self.memory, twin)


def _patterns(model: nn.Module, only: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """Return the patterns; None: everything.  Errors: UserError for one that no known layer and no operation has."""
    if only is None:
        return None
    patterns = (only,) if isinstance(only, str) else tuple(only)
    operations = {adapter.operation for adapter in adapters().values()}
    names = [name for name, module in model.named_modules() if adapter_of(module, adapters())[0] is not None]
    for asked in patterns:
        below = (asked, f"{asked}.*")
        if asked not in operations and not any(fnmatch(name, p) for name in names for p in below):
            known = ", ".join(sorted(operations))
            raise UserError(f"accelerate: only={asked!r} is neither the name of a layer that is known nor of {known}")
    return patterns


Found = tuple[LayerKind, Adapter | None, Sequence[nn.Module]]


@contextmanager
def _progress_lines() -> Iterator[Callable[[str], None]]:
    """Print on stderr, every `PROGRESS_SECONDS` within the context, what was last told; one process of several does."""
    began, ended, said = time.monotonic(), threading.Event(), ["the layers"]

    def tell(what: str) -> None:
        said[0] = what

    def watch() -> None:
        while not ended.wait(PROGRESS_SECONDS):
            seconds = time.monotonic() - began
            print(f"accelerate: checking {said[0]}, {seconds:.0f} s so far", file=sys.stderr, flush=True)

    if torch.distributed.is_initialized() and torch.distributed.get_rank():
        yield tell
        return
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield tell
    finally:
        ended.set()
        thread.join()


def _kinds(model: nn.Module, asked: _Asked, tell: Callable[[str], None]) -> Iterator[Found]:
    """Yield what becomes of every layer of a model, kind by kind; of what is known and left, what is inside of it, too.

    Errors: UserError for a layer that cannot be swapped, if that is `strict`.
    """
    names = {module: name for name, module in model.named_modules()}
    roots: list[nn.Module] = [model]
    while roots:
        groups, roots = _alike(roots, names), []
        for group in groups:
            adapter = adapter_of(group[0], adapters())[0]
            own = [m for m in group if adapter is None or asked.wants(names[m], adapter)]
            rest = [m for m in group if m not in own]
            if own:
                if adapter is not None:
                    tell(f"{type(own[0]).__name__} ({pattern([names[m] for m in own])})")
                kind = _look(own[0], tuple(names[m] for m in own), adapter, asked)
                yield replace(kind, parameters=_count(own, adapter is not None)), adapter, own
                roots += [] if kind.operation or adapter is None else own
            if rest:
                yield LayerKind(tuple(names[m] for m in rest), type(rest[0]).__name__, why=NOT_ASKED), adapter, rest
                roots += rest
        roots = [child for module in roots for child in module.children()]


def _alike(roots: Sequence[nn.Module], names: Mapping[nn.Module, str]) -> list[list[nn.Module]]:
    """Return the modules at and below some that are known, or have parameters of their own; those alike together.

    What is inside of one that is known is swapped with it, and not looked at.
    """
    groups: dict[tuple[object, ...], list[nn.Module]] = defaultdict(list)
    left, seen = list(reversed(roots)), set[nn.Module]()
    while left:
        module = left.pop()
        if module in seen:
            continue
        seen.add(module)
        known = adapter_of(module, adapters())[0] is not None
        shapes = tuple((key, tuple(p.shape), p.dtype, p.device) for key, p in module.named_parameters(recurse=known))
        if known:
            flags = tuple((key, value) for key, value in vars(module).items() if isinstance(value, int | float | str))
            groups[type(module), shapes, flags].append(module)
            continue
        if shapes:
            groups[type(module),].append(module)
        left += reversed(list(module.children()))
    return list(groups.values())


def _count(modules: Sequence[nn.Module], recurse: bool) -> int:
    """Return how many numbers the parameters of modules have, those that they share once."""
    return sum(p.numel() for p in {p for module in modules for p in module.parameters(recurse)})


def _look(module: nn.Module, names: tuple[str, ...], adapter: Adapter | None, asked: _Asked) -> LayerKind:
    """Decide about modules that are alike, of which one is given; return rows, and their adapter if they are known."""
    kind = LayerKind(names, type(module).__name__)
    if adapter is None:
        return replace(kind, why=NO_OPERATION)
    if adapter.plain and asked.patterns is None and asked.verify != "speed":
        return replace(kind, why=PLAIN)
    try:
        return _served(kind, module, adapter, asked)
    except NotServed as error:
        why = str(error)
    except AttributeError as error:
        why = f"its parts are not those that are known: {error}"
    if asked.strict:
        raise UserError(f"accelerate: {names[0]} ({kind.of_class}) cannot be swapped: {why}; leave strict out")
    return replace(kind, why=why)


def _served(kind: LayerKind, module: nn.Module, adapter: Adapter, asked: _Asked) -> LayerKind:
    """Decide about modules whose class is known.  Errors: NotServed where they cannot be swapped."""
    if why := adapter_of(module, adapters())[1]:
        raise NotServed(why)
    adapter.build(module)
    parameters = [*module.parameters()]
    if why := unsupported_device(parameters) if parameters else "it has no parameters":
        raise NotServed(why)
    if asked.verify is False:
        return replace(kind, operation=adapter.operation)
    found = compare(module, adapter, execution=asked.execution(adapter, None))
    if not found.agrees:
        raise NotServed(f"differs by {found.difference:.1g} in the {found.where}")
    kind = replace(kind, difference=found.difference)
    if asked.verify != "speed" and not asked.glances:
        return replace(kind, operation=adapter.operation)
    try:
        glance = asked.glances and asked.size is None
        speed = glanced_speed(module, adapter) if glance else measured_speed(module, adapter, asked.size)
    except (RuntimeError, MemoryError) as error:
        if asked.verify == "speed" or not is_out_of_memory(error):
            raise
        return replace(kind, operation=adapter.operation)  # nobody asked for the clock: `_notes` says what it missed
    kind = replace(kind, speed=speed)
    if why := gain(speed, adapter.plain, asked.trains):
        return replace(kind, why=why)
    return replace(kind, operation=adapter.operation)


def _notes(model: nn.Module, asked: _Asked, kinds: Sequence[LayerKind]) -> tuple[str, ...]:
    """Return the remarks that a user needs beside the table."""
    notes = lookalikes(model)
    if not asked.trains and any(kind.speed for kind in kinds):
        notes.append(FORWARD_COUNTS)
    if asked.glances:
        notes += [WAS_TIMED] if any(kind.speed for kind in kinds if not kind.operation) else []
        short = [name for kind in kinds if kind.operation and kind.speed is None for name in kind.names]
        notes += [f"{pattern(short)}: {NOT_TIMED} (memory did not suffice to time it)"] if short else []
    elif asked.verify is None:
        notes.append(NOT_TIMED)
    if asked.memory is not None:
        notes.append(f"within {in_gb(asked.memory)}: in slices, and computed again in the backward pass")
    gpus = {p.device for p in model.parameters() if p.device.type == "cuda"}
    notes += [notice for gpu in gpus if (notice := slow_notice(gpu))]
    if any(p.device.type == "cpu" for p in model.parameters()):
        dtypes = {p.dtype for p in model.parameters()}
        slow = [slow_precision(name, "cpu") for name in ("bf16", "fp16") if PRECISIONS[name] in dtypes]
        notes += [*(f"{one}: model.float()" for one in slow if one), *filter(None, [spinning_threads()])]
    return tuple(notes)


def lookalikes(model: nn.Module) -> list[str]:
    """Name classes that no adapter serves and whose projections are those of a layer of ours.

    A triangle product has five projections of its input (two factors, their gates, the output's gate), triangle
    attention has q, k, v, a gate and a bias with a channel per head; both have one projection back, and a norm.
    """
    found: dict[tuple[str, str], list[str]] = {}
    served: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in served or adapter_of(module, adapters())[0] is not None:
            served.update(module.modules())
            continue
        children = list(module.children())
        linears = [child for child in children if isinstance(child, nn.Linear)]
        if len(linears) != 6 or not any("Norm" in type(child).__name__ for child in children):
            continue
        (c, count), *_ = Counter(linear.in_features for linear in linears).most_common(1)
        if count < 5:
            continue
        hidden, same = Counter(linear.out_features for linear in linears if linear.in_features == c).most_common(1)[0]
        others = [linear.out_features for linear in linears if (linear.in_features, linear.out_features) != (c, hidden)]
        if (c != hidden and others in ([c], [c, c])) or (c == hidden and not others):
            kind = "a triangle product"
        elif same >= 4 and min(others) < min(c, hidden):
            kind = "attention with a pair bias"
        else:
            continue
        found.setdefault((type(module).__name__, kind), []).append(name)
    return [
        f"{of_class} ({pattern(names)}) looks like {kind} and has no adapter: {ADAPTER_PAGE} shows how to write one"
        for (of_class, kind), names in found.items()
    ]


def _nothing(model: nn.Module, report: Acceleration) -> str:
    """Return the sentence about a model in which nothing was swapped."""
    known = [f"{kind.names[0] or 'the model'}: {kind.why}" for kind in report.left if kind.why != NO_OPERATION]
    packages = Counter(name_of(type(module)).partition(".")[0] for module in model.modules())
    said = "; ".join(dict.fromkeys(known[:3])) or f"no layer of {packages.most_common(1)[0][0]} that is known here"
    return "; ".join([f"accelerate: nothing to swap in this {type(model).__name__}: {said}", *lookalikes(model)])


def is_trained(model: nn.Module) -> bool:
    """Return whether a model is in train() and has trainable parameters, so that its backward pass counts."""
    return model.training and any(p.requires_grad for p in model.parameters())


# Which models are taken


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DEVICES = ("cpu", "cuda")
QUANTISED = ("torch.ao.nn.", "torch.nn.quantized", "torch.nn.intrinsic")
SHARDED = ("FullyShardedDataParallel", "FSDPModule")


def check_model(model: nn.Module) -> None:
    """Raise UserError for what `accelerate` does not take."""
    if not isinstance(model, nn.Module):
        raise UserError(f"accelerate: a {type(model).__name__} is no torch.nn.Module; give the model")
    for kind, why in (
        (torch.jit.ScriptModule, "is scripted; accelerate the Python module, before torch.jit.script"),
        (torch.fx.GraphModule, "is a traced graph; accelerate it before tracing"),
        (DataParallel, "is wrapped in DataParallel; accelerate what is inside, then wrap it"),
    ):
        if isinstance(model, kind):
            raise UserError(f"accelerate: this model {why}")
    for name, module in model.named_modules():
        if is_swapped(module):
            raise UserError("accelerate: this model is accelerated already; warpfold.restore(model) undoes it")
        if why := _why_not(module):
            raise UserError(f"accelerate: {name or type(module).__name__} {why}")
    for name, p in model.named_parameters():
        if why := _why_not_of(p):
            raise UserError(f"accelerate: {name} {why}")


def _why_not(module: nn.Module) -> str:
    if is_compiled(module):
        return "is compiled; accelerate the model first, then torch.compile it"
    if name_of(type(module)).startswith(QUANTISED):
        return "is quantised: it computes by operations of its own; accelerate it before"
    if {kind.__name__ for kind in type(module).__mro__} & set(SHARDED):
        return "is sharded (FSDP); accelerate the model first, then shard it"
    return ""


def _why_not_of(p: Tensor) -> str:
    if nn.parameter.is_lazy(p):
        return "has no shape yet; run the model once before"
    if type(p).__name__ == "DTensor":
        return "is sharded (DTensor); accelerate the model first, then shard it"
    if p.device.type == "meta":
        return "has no memory (it is on meta); load the weights first"
    if p.device.type not in DEVICES:
        return f"is on {p.device}; layers are swapped on {' and '.join(DEVICES)}"
    return "" if p.dtype in DTYPES else f"is {p.dtype}: a quantised model computes by operations of its own"


def inside(model: nn.Module) -> nn.Module:
    """Return the model inside of DistributedDataParallel, whose names are those that its owner knows."""
    while isinstance(model, DistributedDataParallel):
        model = model.module
    return model
