"""How each kernel is launched: tables of tile sizes, made ahead for each GPU and never while running.

So every rank, and every run, computes in the same order.  A kernel module registers its kernels, asks for a launch, and
runs the kernel with it:

    FORWARD = register(Kernel("attention_forward", _forward, candidates=(Launch({"BLOCK_Q": 64}, 4, 2), ...)))
    ...
    choice = launch(FORWARD.name, (width, queries, keys), q.device)
    FORWARD.run((triton.cdiv(queries, choice.sizes["BLOCK_Q"]), rows), choice, q, k, *q.stride(), WIDTH=32)
"""

import functools
import importlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from warpfold.errors import UserError

Key = tuple[int, ...]  # what a launch depends on, as the kernel says: widths, lengths, channels, bytes of an element
SHIPPED = Path(__file__).parent / "tuned"
MODULES = ("attention", "norm", "gate", "noise")  # of this package, that register kernels


@dataclass(frozen=True)
class Launch:
    """Tile sizes (values of the kernel's constexpr arguments of those names), warps of a program, pipeline stages."""

    sizes: Mapping[str, int]
    warps: int
    stages: int

    def __hash__(self) -> int:
        return hash((frozenset(self.sizes.items()), self.warps, self.stages))

    def __str__(self) -> str:
        """ "BLOCK_Q 64, BLOCK_K 32, 4 warps, 2 stages"."""
        return ", ".join([*(f"{n} {v}" for n, v in self.sizes.items()), f"{self.warps} warps, {self.stages} stages"])


@dataclass(frozen=True)
class Call:
    """A kernel's launch: the grid, the key that the table was asked for, and the arguments by name."""

    kernel: "Kernel"
    grid: tuple[int, ...]
    launch: Launch
    key: Key
    arguments: Mapping[str, Any]  # with constexprs and sizes

    def run(self) -> None:
        """Launch it, on the device of its first tensor."""
        device = next(a for a in self.arguments.values() if isinstance(a, torch.Tensor)).device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.kernel.function[self.grid](
                **self.arguments, num_warps=self.launch.warps, num_stages=self.launch.stages
            )


@dataclass(frozen=True)
class Kernel:
    """A Triton kernel and the launches that `warpfold tune --op` tries for it."""

    name: str
    function: Any  # what @triton.jit made
    candidates: tuple[Launch, ...]

    def run(self, grid: Sequence[int], choice: Launch, *args: Any, **constants: Any) -> None:
        """Launch it on the device of its first tensor: args in the kernel's order, then its other constexprs."""
        arguments = {**dict(zip(self.function.arg_names, args)), **constants, **choice.sizes}
        call = Call(self, tuple(grid), choice, _asked.get(self.name, ()), arguments)
        if _listeners:
            _listeners[-1](call)
        else:
            call.run()


@dataclass(frozen=True)
class Entry:
    """One line of a table."""

    kernel: str
    key: Key
    launch: Launch


@dataclass(frozen=True)
class Table:
    """Launches for one GPU.  head: GPU, driver, torch, triton and date of the measurement, or how they were chosen."""

    path: Path
    head: Mapping[str, str]
    entries: tuple[Entry, ...]

    def nearest(self, kernel: str, key: Key) -> Entry | None:
        """The entry whose key is nearest: least sum of |log2|; of equally near ones the smallest key's."""
        of_kernel = [e for e in self.entries if e.kernel == kernel]
        return min(of_kernel, key=lambda e: (_distance(e.key, key, self.path), e.key)) if of_kernel else None


KERNELS: dict[str, Kernel] = {}
_listeners: list[Callable[[Call], None]] = []  # of which the last is told of every call, instead of running it
_asked: dict[str, Key] = {}  # while there are listeners: the key that was last asked for, by kernel
_forced: dict[str, Launch] = {}
_table: list[Table] = []


def register(kernel: Kernel) -> Kernel:
    """Make a kernel known, under its name, to offline compilation and to tuning; returns it."""
    KERNELS[kernel.name] = kernel
    return kernel


def kernels() -> dict[str, Kernel]:
    """Every kernel that there is, by name; loads their modules, and so Triton."""
    for module in MODULES:
        importlib.import_module(f"warpfold.ops.triton.{module}")
    return KERNELS


def launch(kernel: str, key: Key, device: torch.device) -> Launch:
    """How to launch a kernel there: the entry for this very key in the device's table, or else in default.json; or the
    nearest entry of the first of them that has the kernel.

    Errors: UserError for a table that cannot be read or is not of this version.
    """
    if _listeners:
        _asked[kernel] = key
    if kernel in _forced:
        return _forced[kernel]
    if _table:
        return _find((*_table[-1:], read(SHIPPED / "default.json")), kernel, key)
    return _launch(kernel, key, device)


@contextmanager
def forced(launches: Mapping[str, Launch]) -> Iterator[None]:
    """Within it, and in every thread, these kernels are launched thus, whatever their key."""
    before = dict(_forced)
    _forced.update(launches)
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)


@contextmanager
def table_used(table: Table) -> Iterator[None]:
    """Within it launches come from this table, whatever the device; from default.json as `launch` says."""
    _table.append(table)
    try:
        yield
    finally:
        _table.remove(table)


@contextmanager
def recorded(run: bool = False) -> Iterator[list[Call]]:
    """Within it kernels' calls are noted, in the list that it gives, and run only if `run`.

    Not run, launchers take tensors of any size on device "meta": to compile what would be run, and to look at it.
    """
    calls: list[Call] = []

    def note(call: Call) -> None:
        calls.append(call)
        if run:
            call.run()

    _listeners.append(note)
    try:
        yield calls
    finally:
        _listeners.remove(note)


def home() -> Path:
    """Where `warpfold tune --op` writes and launches are looked for first; tables of the package come second."""
    return Path("~/.cache/warpfold/tuned").expanduser()


def file_of(gpu: str) -> str:
    """The name of a GPU's table: "NVIDIA H100 80GB HBM3" -> "NVIDIA-H100-80GB-HBM3.json"."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", gpu).strip("-.") + ".json"


@dataclass(frozen=True)
class Choice:
    """The table in use for a device, and in words why that one."""

    table: Table
    why: str


def choice_of(device: torch.device) -> Choice:
    """Which table a device's launches come from, and why: for `doctor` and `bench`.

    Errors: UserError for a table that cannot be read.
    """
    if device.type == "cpu":
        return Choice(read(SHIPPED / "interpreter.json"), "kernels on a CPU are interpreted")
    if device.type != "cuda":
        return Choice(read(SHIPPED / "default.json"), f"{device.type} is no GPU")
    gpu = torch.cuda.get_device_name(device)
    for folder, whose in ((home(), "made on this machine"), (SHIPPED, "shipped")):
        path = folder / file_of(gpu)
        if path.is_file():
            return Choice(read(path), f"{whose} for {gpu}")
    why = f"no table for {gpu}; make one: warpfold tune"
    return Choice(read(SHIPPED / "default.json"), why)


@functools.cache
def read(path: Path) -> Table:
    """A table as its file says, read once in a process.  Errors: UserError."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        entries = tuple(
            Entry(e["kernel"], tuple(e["key"]), Launch(dict(e["sizes"]), e["warps"], e["stages"]))
            for e in held.pop("launches")
        )
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not a launch table ({error!r}); make it anew: warpfold tune") from error
    return Table(path, held, entries)


def reset() -> None:
    """Forget the tables that were read: one was written."""
    read.cache_clear()
    _launch.cache_clear()


@functools.cache
def _launch(kernel: str, key: Key, device: torch.device) -> Launch:
    table = choice_of(device).table
    # The interpreter wants large tiles, a GPU small ones: no entry of default.json is one for it.
    return _find((table,) if device.type == "cpu" else (table, read(SHIPPED / "default.json")), kernel, key)


def _find(tables: Sequence[Table], kernel: str, key: Key) -> Launch:
    found = []
    for table in tables:
        entry = table.nearest(kernel, key)
        if entry is None:
            continue
        known = KERNELS.get(kernel)
        if known is not None and set(known.candidates[0].sizes) != set(entry.launch.sizes):
            raise UserError(
                f"{table.path}: {kernel} has sizes {', '.join(sorted(entry.launch.sizes))}, of another version; "
                "remove the file, or make it anew: warpfold tune"
            )
        found.append(entry)
    if not found:
        raise LookupError(f"no table has a launch for {kernel}")
    return next((entry for entry in found if entry.key == key), found[0]).launch


def _distance(a: Key, b: Key, where: Path) -> float:
    """Sum of |log2(a / b)|, zeros taken as halves; rounded, so that machines agree on what is equally near."""
    if len(a) != len(b):
        raise UserError(f"{where}: key {a} is of another version ({b}); make it anew: warpfold tune")
    return round(sum(abs(math.log2((x or 0.5) / (y or 0.5))) for x, y in zip(a, b)), 6)
