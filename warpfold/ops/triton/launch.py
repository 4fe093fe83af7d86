"""How each kernel is launched: tile sizes from tables that are made ahead for each GPU, and never while running.

So every rank, and every run, computes in the same order.  A module registers a kernel below its function, with the
configurations that `warpfold tune` tries; a launcher asks for the one of a key, and runs the kernel with it:

    FORWARD = register("layer_norm", _layer_norm, configs("BLOCK_M", (16, 4, 1), (32, 4, 1)))
    ...
    kernel = FORWARD.tiled((c, x.element_size()), x)
    kernel.run((triton.cdiv(rows, kernel["BLOCK_M"]),), x=x, y=y, rows=rows, C=c)
"""

import functools
import importlib
import json
import math
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from warpfold.errors import UserError
from warpfold.ops.dispatch import fp32_products
from warpfold.ops.torch_internals import tree_leaves, without_modes

Key = tuple[int, ...]  # what a configuration depends on, as the kernel says: widths, lengths, bytes of an element
SHIPPED = Path(__file__).parent / "tuned"
# Of this package, that register kernels.
MODULES = "adam", "attention", "linear", "noise", "outer", "pairs", "transition", "triangle"


@dataclass(frozen=True)
class KernelConfig:
    """Tile sizes (values of the kernel's constexpr arguments of those names), warps of a program, pipeline stages."""

    sizes: Mapping[str, int]
    warps: int
    stages: int

    def __hash__(self) -> int:
        return hash((frozenset(self.sizes.items()), self.warps, self.stages))

    @property
    def options(self) -> dict[str, Any]:
        """How a kernel is compiled: warps, stages, fused multiply-adds (which Triton 3.10 leaves out unless it is
        asked), and how products of fp32 may be made.
        """
        return {
            "num_warps": self.warps,
            "num_stages": self.stages,
            "enable_fp_fusion": True,
            DOTS: fp32_products(),
        }

    def __str__(self) -> str:
        """ "BLOCK_Q 64, BLOCK_K 32, 4 warps, 2 stages"."""
        return ", ".join([*(f"{n} {v}" for n, v in self.sizes.items()), f"{self.warps} warps, {self.stages} stages"])


def configs(names: str, *tiles: tuple[int, ...]) -> tuple[KernelConfig, ...]:
    """Return one configuration for each tile: its sizes in the order of their names, then warps and stages."""
    return tuple(KernelConfig(dict(zip(names.split(), tile)), tile[-2], tile[-1]) for tile in tiles)


@dataclass(frozen=True)
class Kernel:
    """A Triton kernel and the configurations that `warpfold tune` tries for it."""

    name: str
    function: Any  # what @triton.jit made
    candidates: tuple[KernelConfig, ...]

    def tiled(self, key: Key, like: Tensor) -> "TiledKernel":
        """Return the kernel with the configuration of this key on the device of a tensor."""
        device = like.device
        return TiledKernel(self, key, config_for(self.name, key, device), device)


@dataclass(frozen=True)
class ByPrecision:
    """A kernel with configurations for 16 bits, and, by another name, for fp32.

    Products without tensor cores are made of operands in registers, and tiles that suit the one do not run with the
    other.
    """

    half: Kernel
    fp32: Kernel

    def tiled(self, key: Key, like: Tensor) -> "TiledKernel":
        """Return the kernel for the dtype and the device of a tensor, with the configuration of this key."""
        return (self.half if like.element_size() == 2 else self.fp32).tiled(key, like)


@dataclass(frozen=True)
class TiledKernel:
    """A kernel and the configuration of one key; `kernel["BLOCK_M"]` is a tile size."""

    kernel: Kernel
    key: Key
    config: KernelConfig
    device: torch.device

    def __getitem__(self, size: str) -> int:
        return self.config.sizes[size]

    def run(self, grid: Sequence[int], **arguments: Any) -> None:
        """Launch the kernel on the device that it was asked for; its tile sizes are added to the arguments."""
        given, config = {**arguments, **self.config.sizes}, self.config
        if not _listeners:  # as in every run: no step that can be left out
            start = functools.partial(self.kernel.function[tuple(grid)], **given, **config.options)
            with on(self.device):
                if noting.tell is None:
                    start()
                else:
                    # Without modes: the interpreter calls torch, which is none of the operation's doing.
                    noting.tell(self, tuple(grid), given, without_modes(start))
            return
        ordered = {name: given.pop(name) for name in self.kernel.function.arg_names}
        if given:
            raise TypeError(f"{self.kernel.name} takes no {', '.join(given)}")
        _listeners[-1](KernelLaunch(self.kernel, tuple(grid), config, self.key, ordered))


@dataclass(frozen=True)
class KernelLaunch:
    """A kernel with its grid, the key that a table was asked for, and all arguments by name, in the kernel's order."""

    kernel: Kernel
    grid: tuple[int, ...]
    config: KernelConfig
    key: Key
    arguments: Mapping[str, Any]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, also within tuples, in order."""
        return [leaf for leaf in tree_leaves(list(self.arguments.values())) if isinstance(leaf, Tensor)]

    @property
    def options(self) -> dict[str, Any]:
        """How it is compiled."""
        return self.config.options

    def run(self) -> None:
        """Launch it, on the device of its first tensor."""
        with on(self.tensors[0].device):
            self.kernel.function[self.grid](**self.arguments, **self.options)


def on(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which kernels are launched on a device: nothing to do where it is the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)


@dataclass(frozen=True)
class TableEntry:
    """One line of a launch table."""

    kernel: str
    key: Key
    config: KernelConfig


@dataclass(frozen=True)
class LaunchTable:
    """Configurations for one GPU.  head: GPU, driver, torch, triton and date, or how they were chosen."""

    path: Path
    head: Mapping[str, str]
    entries: tuple[TableEntry, ...]

    def nearest(self, kernel: str, key: Key) -> TableEntry | None:
        """Return the entry whose key is nearest: least sum of |log2|; of equally near ones the smallest key's."""
        of_kernel = [e for e in self.entries if e.kernel == kernel]
        return min(of_kernel, key=lambda e: (_distance(e.key, key, self.path), e.key)) if of_kernel else None


_NOTHING = nullcontext()
KERNELS: dict[str, Kernel] = {}
# Triton's option of how `tl.dot` may multiply fp32: with TF32 wherever that is among these, otherwise exactly.
DOTS = "allowed_dot_input_precisions"


class _Noting(threading.local):
    """Observer of this thread's launches, which it gets together with the compiled code of each."""

    tell: Callable[[TiledKernel, tuple[int, ...], Mapping[str, Any], Any], None] | None = None


noting = _Noting()
_listeners: list[Callable[[KernelLaunch], None]] = []  # the last is told of every launch, instead of its being run
_forced: dict[str, KernelConfig] = {}
_tables: list[tuple[LaunchTable, ...]] = []
_stood_for: list[torch.device] = []
_resets = 0


def register(name: str, function: Any, candidates: tuple[KernelConfig, ...]) -> Kernel:
    """Make a kernel known, under its name, to offline compilation and to tuning."""
    KERNELS[name] = Kernel(name, function, candidates)
    return KERNELS[name]


def register_by_precision(
    name: str, function: Any, half: tuple[KernelConfig, ...], fp32: tuple[KernelConfig, ...]
) -> ByPrecision:
    """Make a kernel known under its name for 16 bits, and as NAME_fp32 for fp32."""
    return ByPrecision(register(name, function, half), register(f"{name}_fp32", function, fp32))


def kernels() -> dict[str, Kernel]:
    """Return every kernel that there is, by name; loads their modules, and so Triton."""
    for module in MODULES:
        importlib.import_module(f"warpfold.ops.triton.{module}")
    return KERNELS


def config_for(kernel: str, key: Key, device: torch.device) -> KernelConfig:
    """Return how to launch a kernel there: the nearest entry of `tables_for` the device together; of equally near
    ones, and so for this very key, the first table's.

    Errors: UserError for a table that cannot be read or is not of this version.
    """
    if kernel in _forced:
        return _forced[kernel]
    if _tables:
        return _find(_tables[-1], kernel, key)
    return _config_for(kernel, key, device)


def state() -> int | None:
    """Return which tables are in use: another number after a `reset`; None where a context looks on, or has its own."""
    return None if _listeners or _forced or _tables else _resets


@contextmanager
def forced(chosen: Mapping[str, KernelConfig]) -> Iterator[None]:
    """Launch these kernels with these configurations within the context, for every key and in every thread."""
    before = dict(_forced)
    _forced.update(chosen)
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)


@contextmanager
def table_used(*tables: LaunchTable) -> Iterator[None]:
    """Take configurations within the context from these tables and default.json, as `config_for` from a device's."""
    _tables.append((*tables, read(SHIPPED / "default.json")))
    try:
        yield
    finally:
        _tables.pop()


@contextmanager
def recorded(run: bool = False) -> Iterator[list[KernelLaunch]]:
    """Note the kernels' launches within the context, in the list that it gives, and run them only if `run`.

    Not run, launchers take tensors of any size on device "meta": to compile what would be run, and to look at it.
    """
    launches: list[KernelLaunch] = []

    def note(launch: KernelLaunch) -> None:
        launches.append(launch)
        if run:
            launch.run()

    _listeners.append(note)
    try:
        yield launches
    finally:
        _listeners.remove(note)


@contextmanager
def unlaunched(tell: Callable[[KernelLaunch], None] = lambda launch: None) -> Iterator[None]:
    """Launch nothing within the context, and tell of what would have been; unlike `recorded`, keep nothing of it."""
    _listeners.append(tell)
    try:
        yield
    finally:
        _listeners.pop()


def home() -> Path:
    """Return where `warpfold tune` writes tables and where they are looked for first; the package's come second."""
    # os.path.expanduser leaves ~ where there is no HOME and the user has no entry in passwd; Path.expanduser raises.
    return Path(os.path.expanduser("~/.cache/warpfold/tuned"))


def file_of(gpu: str) -> str:
    """Return the name of a GPU's table: "NVIDIA H100 80GB HBM3" -> "NVIDIA-H100-80GB-HBM3.json"."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", gpu).strip("-.") + ".json"


# Tables for GPUs with less shared memory per program than these numbers of bytes. default.json fits the 163 KB of an
# A100. GeForce and L40 have 99 KB, and AMD's GPUs 64 KB, where tiles of the larger tables do not fit.
SMALLER = {"64KB": 99 * 1024, "99KB": 163 * 1024}


def tables_for(device: torch.device) -> tuple[LaunchTable, ...]:
    """Return the tables that a device's configurations come from, the first before the others: its own if there is one,
    that of its family if there is one, default.json.

    Errors: UserError for a table that cannot be read.
    """
    return table_for(device)[0], family_table(device), read(SHIPPED / "default.json")


def family_table(device: torch.device) -> LaunchTable:
    """Select the shipped table for a GPU by its shared memory, and by the newest architecture that is not newer."""
    name = "default"
    if device.type == "cuda":
        if torch.version.hip is not None:
            return read(SHIPPED / "64KB.json")
        found = torch.cuda.get_device_properties(device)
        smaller = (name for name, most in SMALLER.items() if found.shared_memory_per_block_optin < most)  # type: ignore[attr-defined]
        name = next(smaller, "sm_90" if found.major >= 9 else "default")
    return read(SHIPPED / f"{name}.json")


def table_for(device: torch.device) -> tuple[LaunchTable, str]:
    """Return the first table that a device's configurations come from, and in words why that one: for `doctor` and
    `bench`.

    Errors: UserError for a table that cannot be read.
    """
    if device.type != "cuda":
        return read(SHIPPED / "default.json"), f"{device.type} is no GPU"
    gpu, out = torch.cuda.get_device_name(device), ""
    own, shipped = home() / file_of(gpu), SHIPPED / file_of(gpu)
    if own.is_file():
        made = read(own)
        if made.head.get("triton", triton_version()) == triton_version():
            return made, f"made on this machine for {gpu}"
        # Another compiler makes other code: what was fastest, or fitted the registers, need not be so any more.
        out = f"the table made on this machine is of Triton {made.head['triton']}, not {triton_version()}; "
    if shipped.is_file():  # `./dev triton` has checked it with every version
        return read(shipped), f"{out}shipped for {gpu}"
    return family_table(device), f"{out}no table for {gpu}; make one: warpfold tune"


@functools.cache
def triton_version() -> str:
    """Return the version of Triton that is installed; as tables say it, whatever its distribution is called."""
    return str(importlib.import_module("triton").__version__)


def cores(device: torch.device) -> int:
    """Return how many programs of one a core a device runs at once.

    Tensors that lie on no GPU count as on the GPU of `launched_on`, or as on an H100.
    """
    if device.type != "cuda":
        return _cores(_stood_for[-1]) if _stood_for else 132
    return _cores(device)


@functools.cache
def _cores(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@contextmanager
def launched_on(device: torch.device) -> Iterator[None]:
    """Choose launches within the context as on a CUDA device, for tensors without memory."""
    own, family, _ = tables_for(device)
    _stood_for.append(device)
    try:
        with table_used(own, family):
            yield
    finally:
        _stood_for.pop()


@functools.cache
def read(path: Path) -> LaunchTable:
    """Read a table, once in a process.  Errors: UserError."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        entries = tuple(
            TableEntry(e["kernel"], tuple(e["key"]), KernelConfig(dict(e["sizes"]), e["warps"], e["stages"]))
            for e in held.pop("launches")
        )
        numbers = (
            number
            for one in entries
            for number in (*one.key, *one.config.sizes.values(), one.config.warps, one.config.stages)
        )
        if not all(type(number) is int for number in numbers):
            raise ValueError("keys, sizes, warps and stages are whole numbers")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: not a launch table ({error!r}); make it anew: warpfold tune") from error
    return LaunchTable(path, held, entries)


def reset() -> None:
    """Forget the tables that were read: one was written."""
    global _resets
    _resets += 1
    read.cache_clear()
    _config_for.cache_clear()


@functools.cache
def _config_for(kernel: str, key: Key, device: torch.device) -> KernelConfig:
    return _find(tables_for(device), kernel, key)


def _find(tables: Sequence[LaunchTable], kernel: str, key: Key) -> KernelConfig:
    found = []
    for each in tables:
        entry = each.nearest(kernel, key)
        if entry is None:
            continue
        known = KERNELS.get(kernel)
        if known is not None and set(known.candidates[0].sizes) != set(entry.config.sizes):
            raise UserError(
                f"{each.path}: {kernel} has sizes {', '.join(sorted(entry.config.sizes))}, of another version; "
                "remove the file, or make it anew: warpfold tune"
            )
        found.append(entry)
    if not found:
        raise LookupError(f"no table has a launch for {kernel}")
    # The nearest one; of equally near ones the first table's.  A device's may have been made for other sizes alone.
    return min(found, key=lambda entry: _distance(entry.key, key, tables[0].path)).config


def _distance(a: Key, b: Key, where: Path) -> float:
    """Return the sum of |log2(a / b)|, zeros taken as halves; rounded, so that all machines see the same ties."""
    if len(a) != len(b):
        raise UserError(f"{where}: key {a} is of another version ({b}); make it anew: warpfold tune")
    return round(sum(abs(math.log2((x or 0.5) / (y or 0.5))) for x, y in zip(a, b)), 6)
