"""Time a user-supplied model before and after `accelerate`, in turns in one process: `warpfold bench --model`.

Each row is one pass: "forward" keeps nothing for a gradient, "both" is a forward pass and its backward pass.  Times are
medians; memory is the peak of what tensors take above the model itself, as torch's allocators count it.
"""

import contextlib
import copy
import datetime
import importlib
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from warpfold.adapt.accelerate import accelerate, acceleration
from warpfold.adapt.verify import SLOWER, subject, tensors_of
from warpfold.bench.timing import Times, measure
from warpfold.cost.machine import describe
from warpfold.errors import UserError
from warpfold.memory import is_out_of_memory
from warpfold.ops.dispatch import refusals
from warpfold.ops.torch_internals import map_tensors
from warpfold.progress import Progress, no_progress

REPEATS = {"cpu": 5, "cuda": 20}
BUDGET = {"cpu": 120.0, "cuda": 20.0}  # seconds for each way, without its warm-up
COLUMNS = ("model", "pass", "before_ms", "after_ms", "times_faster", "before_mib", "after_mib", "note")
HEADS = ("pass", "before, ms", "after, ms", "faster", "before, MiB", "after, MiB", "")
Row = dict[str, Any]
Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class ForeignModel:
    """A user-supplied model, and what it is called with."""

    name: str
    model: nn.Module
    call: Call


def foreign_model(factory: str, inputs: str | None, device: torch.device) -> ForeignModel:
    """Make a model and its inputs by functions that are named "module:function", and put both on a device.

    The model's function takes nothing and returns a model, or (model, inputs); that of the inputs takes nothing and
    returns a tensor, a tuple of arguments, a dict of them by name, or (tuple, dict).
    Errors: UserError for functions that are not there, or return something else.
    """
    made = _function("--model", factory)()
    given = None
    if isinstance(made, tuple) and len(made) == 2:
        made, given = made
    if not isinstance(made, nn.Module):
        raise UserError(f"--model {factory}: returns a {type(made).__name__}, not a torch.nn.Module")
    if inputs is not None:
        given = _function("--inputs", inputs)()
    if given is None:
        raise UserError(f"--inputs is missing: name a function that returns what {factory} is called with")
    args, kwargs = _call(given)
    moved: Call = map_tensors(lambda x: x.to(device), (args, kwargs))
    return ForeignModel(factory, made.to(device), moved)


def _function(option: str, text: str) -> Callable[[], Any]:
    """Return the function that "module:function" names, the modules of the current folder first."""
    name, _, attribute = text.partition(":")
    if not name or not attribute.isidentifier():
        raise UserError(f"{option} {text}: not of the form module:function")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise UserError(f"{option} {text}: {name} needs {error.name}, which is not installed") from error
        raise UserError(f"{option} {text}: there is no module {error.name}, here or among what is installed") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UserError(f"{option} {text}: {name} has no function {attribute}")
    return function


def _call(given: Any) -> Call:
    if isinstance(given, Mapping):
        return (), dict(given)
    if not isinstance(given, tuple):
        return (given,), {}
    if len(given) == 2 and isinstance(given[0], tuple) and isinstance(given[1], Mapping):
        return given[0], dict(given[1])
    return given, {}


def bench_foreign(
    given: ForeignModel,
    device: torch.device,
    *,
    only: Sequence[str] = (),
    memory: str | int | None = None,
    repeats: int = 0,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Time a model before and after `accelerate`, which is given `only` and `memory`; the model itself is not changed.

    Returns the machine, what was swapped, the rows, how far the outputs are apart, and what was refused.
    Errors: as of `accelerate`; UserError where memory does not suffice.
    """
    before, refused, (args, kwargs) = given.model, refusals(), given.call
    with contextlib.redirect_stdout(io.StringIO()):
        after = accelerate(copy.deepcopy(before), only=only or None, memory=memory)
    progress(0, 1, f"{given.name}, before and after")
    try:
        difference = _difference(before, after, given.call)
        ways = [
            subject(name, partial(model, *args, **kwargs), [p for p in model.parameters() if p.requires_grad])
            for name, model in (("before", before), ("after", after))
        ]
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(f"--model {given.name}: out of memory; give smaller inputs") from error
    times = measure(ways, device, repeats or REPEATS[device.type], BUDGET[device.type])
    report = acceleration(after)
    return {
        "what": f"{given.name}: medians of turns, before and after accelerate",
        "date": datetime.date.today().isoformat(),
        "machine": describe(device),
        "table": str(report),
        "swapped": {name: kind.operation for kind in report.swapped for name in kind.names},
        "difference": difference,
        "rows": _rows(given.name, times, trains=bool(ways[0].wanted)),
        "refused": refusals(refused),
    }


def _difference(before: nn.Module, after: nn.Module, call: Call) -> float:
    """Return how far the outputs are apart, relative to the largest number of each, without dropout."""
    args, kwargs = call
    found = []
    for model in (before, after):
        training = {module: module.training for module in model.modules()}
        with torch.no_grad():
            found.append([x for x in tensors_of(model.eval()(*args, **kwargs)) if x.is_floating_point() and x.numel()])
        for module, was in training.items():
            module.training = was
    return max((float((a - b).abs().max() / a.abs().max().clamp_min(1e-30)) for a, b in zip(*found)), default=0.0)


def _rows(name: str, times: Mapping[str, Times], trains: bool) -> list[Row]:
    """Return a row for each pass; a note says what is slower, or what failed."""
    failed = "; ".join(f"{way}: {found.failed}" for way, found in times.items() if found.failed)
    rows = []
    for which, parts in (("forward", ["forward"]), ("both", ["training", "backward"])):
        row: Row = {"model": name, "pass": which, "note": failed}
        if which == "both" and not trains:
            rows.append(row | {"note": "no parameter wants a gradient"})
            continue
        for way, found in times.items():
            seconds, peak = found.median(*parts), found.peaks.get(which)
            row[f"{way}_ms"] = seconds and seconds * 1e3
            row[f"{way}_mib"] = None if peak is None else peak / 2**20
        if row["before_ms"] and row["after_ms"]:
            row["times_faster"] = row["before_ms"] / row["after_ms"]
            row["note"] = "slower here" if row["times_faster"] < SLOWER else ""
        rows.append(row)
    return rows


def table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the rows as figures for people."""

    forms = {"before_ms": ".4g", "after_ms": ".4g", "times_faster": ".2f", "before_mib": ".0f", "after_mib": ".0f"}

    def number(row: Row, name: str) -> str:
        return "" if row.get(name) is None else format(row[name], forms[name])

    return [(row["pass"], *(number(row, name) for name in forms), row["note"]) for row in rows]
