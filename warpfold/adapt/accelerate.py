"""accelerate: replace the forward of supported layers in any model by our operations; restore: undo it.

    warpfold.accelerate(model)      # prints which layers were swapped, which were left, and why
    warpfold.restore(model)

Parameters and their names, hooks, `state_dict`, devices and dtypes do not change. The class of a swapped module becomes
a subclass of its own class with another `forward` (`adapter.swapped_class`).
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
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from warpfold.adapt.adapter import (
    Adapter,
    NotServed,
    find_adapter,
    is_swapped,
    qualified_name,
    swap,
    swap_back,
    was_wrapped,
)  # fmt: skip
from warpfold.adapt.report import NO_OPERATION, Acceleration, LayerKind, pattern
from warpfold.adapt.slices import SlicedExecution, meta_twin
from warpfold.adapt.verify import brief_speed, compare, measured_speed, reason_to_leave
from warpfold.arguments import parse_memory
from warpfold.device import keep_memory, slow_precision, spinning_threads
from warpfold.errors import UserError
from warpfold.memory import is_out_of_memory, memory_in_use
from warpfold.ops.capabilities import slow_notice
from warpfold.ops.dispatch import unsupported_device
from warpfold.ops.torch_internals import is_compiled
from warpfold.parallel.plan import DTYPES as PRECISIONS
from warpfold.progress import format_gb

# Modules of warpfold.adapt with adapters.
PACKAGES: tuple[str, ...] = ("plain", "esmfold", "openfold3", "boltz", "protenix", "rf3")
# Attribute of an accelerated model.
REPORT = "_warpfold_acceleration"
NOT_ASKED = "not asked for"
PLAIN = "plain torch: swapped where only= names it, or where verify='speed' finds a gain"
NOT_TIMED = "not timed: some layers may be slower than their own code; verify='speed' finds and leaves them"
WAS_TIMED = "timed briefly: what is slower than its own code here was left; verify=True swaps it, too"
ADAPTER_PAGE = "docs/howto/accelerate.md (How to serve another class)"
# Interval of the progress lines of a long verification.
PROGRESS_SECONDS = 10.0
FORWARD_COUNTS = "judged by the forward pass: the model is in eval() or has no trainable parameters"
Verify = bool | Literal["speed"] | None
M = TypeVar("M", bound=nn.Module)
# A row of the report for a group of equal layers, their adapter, and the layers.
Decision = tuple[LayerKind, Adapter | None, Sequence[nn.Module]]


def accelerate(
    model: M,
    *,
    only: str | Iterable[str] | None = None,
    strict: bool = False,
    verify: Verify = None,
    memory: str | int | None = None,
    size: int | None = None,
) -> M:
    """Replace the forward of a model's supported layers by our operations, print a report, and return the model.

    only: patterns of module names ("trunk.blocks.*", which includes submodules), or names of operations. None: all
    supported layers.
    strict: raise an error if a supported layer cannot be swapped, or an operation does not serve its arguments.
    verify: True compares each kind of layer with its own code, forward and backward, and leaves those that differ.
    "speed" also times both with `size` residues or tokens (128 on a CPU, 256 on a GPU), and leaves those that are
    slower. False does neither. None compares, and leaves layers that are slower in a brief timing, which is skipped if
    several processes share the machine, or if `only`, `strict` or `memory` is given. Only the forward pass is judged
    if the model is in eval() or has no trainable parameters.
    memory: of the device, such as "24GB". A swapped layer runs in slices so that the device holds no more than this,
    and with gradients is recomputed in the backward pass.
    `acceleration(model)` returns the report.
    Raises UserError, and changes nothing, if nothing can be swapped, or if the model is compiled, quantised, sharded,
    on an unsupported device, of an unsupported dtype, or accelerated already.
    """
    if verify not in (None, True, False, "speed"):
        raise UserError(f"accelerate: verify={verify!r}: not True, False, 'speed' or None")
    check_model(model)
    inner = unwrap_ddp(model)
    if memory is not None:
        # Raises an error if the memory in use cannot be determined.
        memory_in_use(next((p.device for p in inner.parameters()), torch.device("cpu")))
    trains = inner.training and any(p.requires_grad for p in inner.parameters())
    limit = None if memory is None else parse_memory(memory)
    options = _Options(_patterns(inner, only), strict, verify, limit, size, trains)
    if any(p.device.type == "cpu" for p in inner.parameters()):
        # Before the timing, so that both ways are timed with the allocator's settings of later runs.
        keep_memory()
    kinds, layers = [], []
    with _progress_lines() as tell:
        for kind, adapter, modules in _decisions(inner, options, tell):
            kinds.append(kind)
            if adapter is not None and kind.operation:
                execution = options.execution(adapter, modules[0])
                layers += [(module, adapter, adapter.build(module), execution) for module in modules]
    report = Acceleration(tuple(kinds), sum(p.numel() for p in inner.parameters()), _notes(inner, options, kinds))
    # Without an error if layers were left because they are slower.
    if not report.swapped and not any(kind.speed for kind in kinds):
        reasons = [f"{kind.names[0] or 'the model'}: {kind.why}" for kind in report.left if kind.why != NO_OPERATION]
        packages = Counter(qualified_name(type(module)).partition(".")[0] for module in inner.modules())
        reason = (
            "; ".join(dict.fromkeys(reasons[:3])) or f"no layer of {packages.most_common(1)[0][0]} that is known here"
        )
        nothing = f"accelerate: nothing to swap in this {type(inner).__name__}: {reason}"
        raise UserError("; ".join([nothing, *lookalikes(inner)]))
    for module, adapter, layer, execution in layers:
        swap(module, adapter, layer, execution)
    object.__setattr__(model, REPORT, report)
    if not (torch.distributed.is_initialized() and torch.distributed.get_rank()):
        print(report)
    return model


def restore(model: M) -> M:
    """Restore the own forward of all layers of a model, and return the model.

    Raises UserError if the model is not accelerated, or was sharded since.
    """
    swapped = [module for module in model.modules() if is_swapped(module)]
    if not swapped and REPORT not in {**vars(model), **vars(unwrap_ddp(model))}:
        raise UserError("restore: this model is not accelerated")
    if wrapped := [module for module in swapped if was_wrapped(module)]:
        raise UserError(f"restore: a {type(wrapped[0]).__name__} was wrapped since it was swapped; restore before that")
    for module in swapped:
        swap_back(module)
    for module in model.modules():
        vars(module).pop(REPORT, None)
    return model


def acceleration(model: nn.Module) -> Acceleration:
    """Return the report of `accelerate` on a model. Raises UserError if the model is not accelerated."""
    report: Acceleration | None = vars(model).get(REPORT) or vars(unwrap_ddp(model)).get(REPORT)
    if report is None:
        raise UserError("acceleration: this model is not accelerated")
    return report


@cache
def adapters() -> Mapping[str, Adapter]:
    """Collect the adapters by the names of the classes that they serve."""
    modules = [importlib.import_module(f"warpfold.adapt.{name}") for name in PACKAGES]
    kinds = [k for m in modules for k in vars(m).values() if isinstance(k, type) and issubclass(k, Adapter)]
    return {name: kind() for kind in kinds for name in kind.serves}


@dataclass(frozen=True)
class _Options:
    """The arguments of a call of `accelerate`.

    trains: whether the model is in train() and has trainable parameters. If not, only the forward pass is judged.
    """

    patterns: tuple[str, ...] | None
    strict: bool
    verify: Verify
    memory: int | None
    size: int | None
    trains: bool

    @property
    def times_briefly(self) -> bool:
        """Whether to time each kind briefly: without explicit choices of the user, and with a single process."""
        alone = not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1
        is_explicit = self.patterns is not None or self.strict or self.memory is not None
        return self.verify is None and alone and not is_explicit

    def wants(self, name: str, adapter: Adapter) -> bool:
        """Whether `only` selects a module."""
        if self.patterns is None:
            return True
        return any(adapter.operation == p or fnmatch(name, p) or fnmatch(name, f"{p}.*") for p in self.patterns)

    def execution(self, adapter: Adapter, module: nn.Module | None) -> SlicedExecution:
        """Build the execution of layers like a module's."""
        twin = None if self.memory is None or module is None else meta_twin(adapter, module)
        return SlicedExecution("strict" if self.strict else None, self.memory, twin)


def _patterns(model: nn.Module, only: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """Return the patterns of `only`, or None for all layers. Raises UserError for a pattern that matches nothing."""
    if only is None:
        return None
    patterns = (only,) if isinstance(only, str) else tuple(only)
    operations = {adapter.operation for adapter in adapters().values()}
    names = [name for name, module in model.named_modules() if find_adapter(module, adapters())[0] is not None]
    for selector in patterns:
        below = (selector, f"{selector}.*")
        if selector not in operations and not any(fnmatch(name, p) for name in names for p in below):
            supported = ", ".join(sorted(operations))
            raise UserError(
                f"accelerate: only={selector!r} is neither the name of a layer that is known nor of {supported}"
            )
    return patterns


@contextmanager
def _progress_lines() -> Iterator[Callable[[str], None]]:
    """Yield a function that sets the current step, and print the step on stderr every `PROGRESS_SECONDS`.

    Only rank 0 prints.
    """
    began, ended, current = time.monotonic(), threading.Event(), ["the layers"]

    def tell(step: str) -> None:
        current[0] = step

    def watch() -> None:
        while not ended.wait(PROGRESS_SECONDS):
            seconds = time.monotonic() - began
            print(f"accelerate: checking {current[0]}, {seconds:.0f} s so far", file=sys.stderr, flush=True)

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


def _decisions(model: nn.Module, options: _Options, tell: Callable[[str], None]) -> Iterator[Decision]:
    """Yield the decision for each kind of layer. For supported layers that are left, their submodules follow.

    Raises UserError for a layer that cannot be swapped if `strict`.
    """
    names = {module: name for name, module in model.named_modules()}
    roots: list[nn.Module] = [model]
    while roots:
        groups, roots = _groups(roots), []
        for group in groups:
            adapter = find_adapter(group[0], adapters())[0]
            selected = [m for m in group if adapter is None or options.wants(names[m], adapter)]
            unselected = [m for m in group if m not in selected]
            if selected:
                if adapter is not None:
                    tell(f"{type(selected[0]).__name__} ({pattern([names[m] for m in selected])})")
                kind = _decide(selected[0], tuple(names[m] for m in selected), adapter, options)
                # Count shared parameters once.
                parameters = {p for module in selected for p in module.parameters(adapter is not None)}
                yield replace(kind, parameters=sum(p.numel() for p in parameters)), adapter, selected
                roots += [] if kind.operation or adapter is None else selected
            if unselected:
                left_kind = LayerKind(tuple(names[m] for m in unselected), type(unselected[0]).__name__, why=NOT_ASKED)
                yield left_kind, adapter, unselected
                roots += unselected
        roots = [child for module in roots for child in module.children()]


def _groups(roots: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Group the modules at and below `roots` that have an adapter or parameters of their own.

    Modules of one class with the same parameter shapes and settings form a group. Submodules of a module with an
    adapter are swapped with it, so they are not visited.
    """
    groups: dict[tuple[object, ...], list[nn.Module]] = defaultdict(list)
    stack, visited = list(reversed(roots)), set[nn.Module]()
    while stack:
        module = stack.pop()
        if module in visited:
            continue
        visited.add(module)
        has_adapter = find_adapter(module, adapters())[0] is not None
        shapes = tuple(
            (key, tuple(p.shape), p.dtype, p.device) for key, p in module.named_parameters(recurse=has_adapter)
        )
        if has_adapter:
            flags = tuple((key, value) for key, value in vars(module).items() if isinstance(value, int | float | str))
            groups[type(module), shapes, flags].append(module)
            continue
        if shapes:
            groups[type(module),].append(module)
        stack += reversed(list(module.children()))
    return list(groups.values())


def _decide(module: nn.Module, names: tuple[str, ...], adapter: Adapter | None, options: _Options) -> LayerKind:
    """Decide whether to swap the modules of a group, given one of them and their names."""
    kind = LayerKind(names, type(module).__name__)
    if adapter is None:
        return replace(kind, why=NO_OPERATION)
    if adapter.plain and options.patterns is None and options.verify != "speed":
        return replace(kind, why=PLAIN)
    try:
        return _checked(kind, module, adapter, options)
    except NotServed as error:
        reason = str(error)
    except AttributeError as error:
        reason = f"its submodules are not those that the adapter expects: {error}"
    if options.strict:
        raise UserError(f"accelerate: {names[0]} ({kind.class_name}) cannot be swapped: {reason}; leave strict out")
    return replace(kind, why=reason)


def _checked(kind: LayerKind, module: nn.Module, adapter: Adapter, options: _Options) -> LayerKind:
    """Check the modules of a group with an adapter. Raises NotServed if they cannot be swapped."""
    if reason := find_adapter(module, adapters())[1]:
        raise NotServed(reason)
    adapter.build(module)
    parameters = [*module.parameters()]
    if reason := unsupported_device(parameters) if parameters else "it has no parameters":
        raise NotServed(reason)
    if options.verify is False:
        return replace(kind, operation=adapter.operation)
    comparison = compare(module, adapter, execution=options.execution(adapter, None))
    if not comparison.agrees:
        raise NotServed(f"differs by {comparison.difference:.1g} in the {comparison.where}")
    kind = replace(kind, difference=comparison.difference)
    if options.verify != "speed" and not options.times_briefly:
        return replace(kind, operation=adapter.operation)
    try:
        is_brief = options.times_briefly and options.size is None
        speed = brief_speed(module, adapter) if is_brief else measured_speed(module, adapter, options.size)
    except (RuntimeError, MemoryError) as error:
        if options.verify == "speed" or not is_out_of_memory(error):
            raise
        # The user did not ask for a timing, so running out of memory in it is only a note (`_notes`).
        return replace(kind, operation=adapter.operation)
    kind = replace(kind, speed=speed)
    if reason := reason_to_leave(speed, adapter.plain, options.trains):
        return replace(kind, why=reason)
    return replace(kind, operation=adapter.operation)


def _notes(model: nn.Module, options: _Options, kinds: Sequence[LayerKind]) -> tuple[str, ...]:
    """Collect the remarks that follow the table."""
    notes = lookalikes(model)
    if not options.trains and any(kind.speed for kind in kinds):
        notes.append(FORWARD_COUNTS)
    if options.times_briefly:
        notes += [WAS_TIMED] if any(kind.speed for kind in kinds if not kind.operation) else []
        short = [name for kind in kinds if kind.operation and kind.speed is None for name in kind.names]
        notes += [f"{pattern(short)}: {NOT_TIMED} (memory did not suffice to time it)"] if short else []
    elif options.verify is None:
        notes.append(NOT_TIMED)
    if options.memory is not None:
        notes.append(f"within {format_gb(options.memory)}: in slices, and computed again in the backward pass")
    gpus = {p.device for p in model.parameters() if p.device.type == "cuda"}
    notes += [notice for gpu in gpus if (notice := slow_notice(gpu))]
    if any(p.device.type == "cpu" for p in model.parameters()):
        dtypes = {p.dtype for p in model.parameters()}
        slow = [slow_precision(name, "cpu") for name in ("bf16", "fp16") if PRECISIONS[name] in dtypes]
        notes += [*(f"{warning}: model.float()" for warning in slow if warning), *filter(None, [spinning_threads()])]
    return tuple(notes)


def lookalikes(model: nn.Module) -> list[str]:
    """Describe classes without an adapter whose projections resemble a layer of ours.

    A triangle product has five projections of its input: two factors, their gates, and the output's gate. Triangle
    attention has q, k, v, a gate, and a bias with one channel per head. Both have one projection back, and a norm.
    """
    similar: dict[tuple[str, str], list[str]] = {}
    served: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in served or find_adapter(module, adapters())[0] is not None:
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
        other_widths = [
            linear.out_features for linear in linears if (linear.in_features, linear.out_features) != (c, hidden)
        ]
        if (c != hidden and other_widths in ([c], [c, c])) or (c == hidden and not other_widths):
            kind = "a triangle product"
        elif same >= 4 and min(other_widths) < min(c, hidden):
            kind = "attention with a pair bias"
        else:
            continue
        similar.setdefault((type(module).__name__, kind), []).append(name)
    return [
        f"{class_name} ({pattern(names)}) looks like {kind} and has no adapter: {ADAPTER_PAGE} shows how to write one"
        for (class_name, kind), names in similar.items()
    ]


# The models that accelerate accepts.

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DEVICES = ("cpu", "cuda")
QUANTISED = ("torch.ao.nn.", "torch.nn.quantized", "torch.nn.intrinsic")
SHARDED = ("FullyShardedDataParallel", "FSDPModule")


def check_model(model: nn.Module) -> None:
    """Raise UserError for a model that `accelerate` does not accept."""
    if not isinstance(model, nn.Module):
        raise UserError(f"accelerate: a {type(model).__name__} is no torch.nn.Module; give the model")
    for kind, problem in (
        (torch.jit.ScriptModule, "is scripted; accelerate the Python module, before torch.jit.script"),
        (torch.fx.GraphModule, "is a traced graph; accelerate it before tracing"),
        (DataParallel, "is wrapped in DataParallel; accelerate what is inside, then wrap it"),
    ):
        if isinstance(model, kind):
            raise UserError(f"accelerate: this model {problem}")
    for name, module in model.named_modules():
        if is_swapped(module):
            raise UserError("accelerate: this model is accelerated already; warpfold.restore(model) undoes it")
        problem = ""
        if is_compiled(module):
            problem = "is compiled; accelerate the model first, then torch.compile it"
        elif qualified_name(type(module)).startswith(QUANTISED):
            problem = "is quantised: it computes by operations of its own; accelerate it before"
        elif {kind.__name__ for kind in type(module).__mro__} & set(SHARDED):
            problem = "is sharded (FSDP); accelerate the model first, then shard it"
        if problem:
            raise UserError(f"accelerate: {name or type(module).__name__} {problem}")
    for name, p in model.named_parameters():
        problem = ""
        if nn.parameter.is_lazy(p):
            problem = "has no shape yet; run the model once before"
        elif type(p).__name__ == "DTensor":
            problem = "is sharded (DTensor); accelerate the model first, then shard it"
        elif p.device.type == "meta":
            problem = "has no memory (it is on meta); load the weights first"
        elif p.device.type not in DEVICES:
            problem = f"is on {p.device}; layers are swapped on {' and '.join(DEVICES)}"
        elif p.dtype not in DTYPES:
            problem = f"is {p.dtype}: a quantised model computes by operations of its own"
        if problem:
            raise UserError(f"accelerate: {name} {problem}")


def unwrap_ddp(model: nn.Module) -> nn.Module:
    """Return the model within DistributedDataParallel, whose module names are those that the user knows."""
    while isinstance(model, DistributedDataParallel):
        model = model.module
    return model
