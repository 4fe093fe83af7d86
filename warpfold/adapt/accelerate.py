"""accelerate: have the layers of any model that are known here compute by our operations; restore: undo it.

    warpfold.accelerate(model)      # prints what was swapped, what was left and why
    warpfold.restore(model)

Parameters, their names, hooks, `state_dict`, devices and dtypes stay as they are: a swapped module is of a class made
of its own (`adapter.swapped_class`), with another `forward`.
"""

import importlib
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cache
from typing import TypeVar

import torch
from torch import nn

from warpfold.adapt.adapter import Adapter, NotServed, adapter_of, is_swapped, name_of, swap, swap_back
from warpfold.adapt.verify import compare
from warpfold.errors import UserError

PACKAGES: tuple[str, ...] = ("esmfold", "esmfold2")  # of warpfold.adapt: modules with adapters
REPORT = "_warpfold_acceleration"  # the attribute of an accelerated model
M = TypeVar("M", bound=nn.Module)
log = logging.getLogger("warpfold")


@dataclass(frozen=True)
class LayerKind:
    """Modules of a model that are alike: of one class, with parameters of the same shapes."""

    names: tuple[str, ...]  # of the modules
    of_class: str
    operation: str = ""  # what computes them now; nothing: they were left
    why: str = ""  # they were left
    difference: float | None = None  # the greatest that was found between both ways, relative; None: not compared


@dataclass(frozen=True)
class Acceleration:
    """What `accelerate` did to a model: print it."""

    kinds: tuple[LayerKind, ...]

    @property
    def swapped(self) -> tuple[LayerKind, ...]:
        """The kinds of layers that compute by our operations."""
        return tuple(kind for kind in self.kinds if kind.operation)

    @property
    def left(self) -> tuple[LayerKind, ...]:
        """The kinds that are known and were left, and those that have parameters and are not known."""
        return tuple(kind for kind in self.kinds if not kind.operation)

    def __str__(self) -> str:
        rows = [("layers", "class", "", "difference")]
        rows += [
            (_pattern(k.names), f"{len(k.names)} {k.of_class}", k.operation or f"left: {k.why}", _shown(k.difference))
            for k in (*self.swapped, *self.left)
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def accelerate(
    model: M,
    *,
    only: str | Iterable[str] | None = None,
    strict: bool = False,
    verify: bool = True,
) -> M:
    """Have the layers of a model that are known here compute by our operations; print what was done; return the model.

    only: patterns of module names ("trunk.blocks.*"), or names of operations; None: every layer that is known.
    strict: a known layer that cannot be swapped is an error, and so is an operation that refuses what it is given.
    verify: compare each kind of layer both ways, forward and backward; one that does not agree is left.
    `acceleration(model)` returns what was printed.
    Errors: UserError where nothing is swapped, for a model that is compiled, quantised, on a device or of a dtype that
    is not served, or accelerated already.  The model is then as it was.
    """
    check_model(model)
    names = dict(model.named_modules())
    wanted = _wanted(names, only)
    kinds, found = [], {}
    for group in _alike(names):
        kind, adapter = _look(names[group[0]], group, wanted, verify)
        kinds.append(kind)
        if adapter is not None and kind.operation:
            found[kind] = adapter
        elif strict and adapter is not None and not kind.operation and kind.why != NOT_ASKED:
            raise UserError(f"accelerate: {group[0]} ({kind.of_class}) cannot be swapped: {kind.why}; leave strict out")
    report = Acceleration(tuple(kinds))
    if not report.swapped:
        raise UserError(_nothing(model, report))
    layers = [
        (names[name], adapter, adapter.build(names[name])) for kind, adapter in found.items() for name in kind.names
    ]
    for module, adapter, layer in layers:
        swap(module, adapter, layer)
    object.__setattr__(model, REPORT, report)
    if not (torch.distributed.is_initialized() and torch.distributed.get_rank()):
        print(report)
    return model


def restore(model: M) -> M:
    """Have every layer of a model compute as its own class does; return the model.

    Errors: UserError for a model that is not accelerated.
    """
    swapped = [module for module in model.modules() if is_swapped(module)]
    if not swapped:
        raise UserError("restore: this model is not accelerated")
    for module in swapped:
        swap_back(module)
    vars(model).pop(REPORT, None)
    return model


def acceleration(model: nn.Module) -> Acceleration:
    """Return what `accelerate` did to a model.  Errors: UserError for one that is not accelerated."""
    report: Acceleration | None = vars(model).get(REPORT)
    if report is None:
        raise UserError("acceleration: this model is not accelerated")
    return report


@cache
def adapters() -> Mapping[str, Adapter]:
    """Return the adapter of each class, by the class's name."""
    modules = [importlib.import_module(f"warpfold.adapt.{name}") for name in PACKAGES]
    kinds = [k for m in modules for k in vars(m).values() if isinstance(k, type) and issubclass(k, Adapter)]
    return {name: kind() for kind in kinds for name in kind.serves}


NOT_ASKED = "not asked for"
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DEVICES = ("cpu", "cuda")


def check_model(model: nn.Module) -> None:
    """Raise UserError for what `accelerate` does not take."""
    if not isinstance(model, nn.Module):
        raise UserError(f"accelerate: a {type(model).__name__} is no torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise UserError("accelerate: this model is scripted; accelerate the Python module")
    if any(isinstance(module, torch._dynamo.OptimizedModule) for module in model.modules()):
        raise UserError("accelerate: this model is compiled; accelerate it first, then torch.compile it")
    if any(is_swapped(module) for module in model.modules()):
        raise UserError("accelerate: this model is accelerated already; warpfold.restore(model) undoes it")
    for name, p in model.named_parameters():
        if p.device.type not in DEVICES:
            raise UserError(f"accelerate: {name} is on {p.device}; layers are swapped on {' and '.join(DEVICES)}")
        if p.dtype not in DTYPES:
            raise UserError(f"accelerate: {name} is {p.dtype}: a quantised model computes by its own operations")


def _wanted(names: Mapping[str, nn.Module], only: str | Iterable[str] | None) -> list[str] | None:
    """Return the patterns; None: everything.  Errors: UserError for one that no module and no operation has."""
    if only is None:
        return None
    patterns = [only] if isinstance(only, str) else list(only)
    operations = {adapter.operation for adapter in adapters().values()}
    for pattern in patterns:
        if pattern not in operations and not any(fnmatch(name, pattern) for name in names):
            known = ", ".join(sorted(operations))
            raise UserError(f"accelerate: only={pattern!r} is neither the name of a module nor one of {known}")
    return patterns


def _alike(names: Mapping[str, nn.Module]) -> list[list[str]]:
    """Return the names of modules that are known, or have parameters of their own; those that are alike together."""
    groups: dict[tuple[object, ...], list[str]] = defaultdict(list)
    inside: tuple[str, ...] = ()  # of modules that are known: what they are made of is swapped with them
    for name, module in names.items():
        if any(name.startswith(f"{one}.") for one in inside):
            continue
        known = adapter_of(module, adapters())[0]
        if known is not None:
            inside += (name,)
        own = module.named_parameters(recurse=known is not None)
        shapes = tuple((key, tuple(p.shape), p.dtype, p.device) for key, p in own)
        if known is not None:
            flags = tuple((key, value) for key, value in vars(module).items() if isinstance(value, int | float | str))
            groups[type(module), shapes, flags].append(name)
        elif shapes:
            groups[type(module),].append(name)
    return list(groups.values())


def _look(
    module: nn.Module, names: list[str], wanted: list[str] | None, verify: bool
) -> tuple[LayerKind, Adapter | None]:
    """Return what becomes of modules that are alike, of which one is given, and their adapter if they are known."""
    kind = LayerKind(tuple(names), type(module).__name__)
    adapter, why = adapter_of(module, adapters())
    if adapter is None:
        return replace(kind, why="no operation of ours"), None
    if wanted is not None:
        chosen = tuple(name for name in names if adapter.operation in wanted or any(fnmatch(name, p) for p in wanted))
        if not chosen:
            return replace(kind, why=NOT_ASKED), adapter
        kind = replace(kind, names=chosen)
    try:
        if why is not None:
            raise NotServed(why)
        adapter.build(module)
        if not verify:
            return replace(kind, operation=adapter.operation), adapter
        found = compare(module, adapter)
    except NotServed as error:
        return replace(kind, why=str(error)), adapter
    if not found.agrees:
        return replace(kind, why=f"differs by {found.difference:.1g} in the {found.where}"), adapter
    return replace(kind, operation=adapter.operation, difference=found.difference), adapter


def _nothing(model: nn.Module, report: Acceleration) -> str:
    """Return what to say of a model in which nothing was swapped."""
    known = [f"{kind.names[0]}: {kind.why}" for kind in report.left if kind.why != "no operation of ours"]
    packages = Counter(name_of(type(module)).partition(".")[0] for module in model.modules())
    said = "; ".join(known[:3]) or f"no layer of {packages.most_common(1)[0][0]} that is known here"
    return f"accelerate: nothing to swap in this {type(model).__name__}: {said}"


def _pattern(names: tuple[str, ...]) -> str:
    """Return names of modules as one pattern: what differs is a star."""
    split = [name.split(".") for name in names]
    if len({len(parts) for parts in split}) > 1:
        return f"{names[0]}, ..."
    return ".".join(part[0] if len(set(part)) == 1 else "*" for part in zip(*split)) or "(the model)"


def _shown(difference: float | None) -> str:
    return "" if difference is None else f"{difference:.0e}"
