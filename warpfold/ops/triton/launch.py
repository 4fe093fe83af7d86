"""Launch configurations of kernels: tile sizes from tables that are made in advance for each GPU.

Nothing is tuned at run time, so every rank and every run computes in the same order.  A module registers a kernel below
its function with the configurations that `warpfold tune` tries.  A launcher looks up the configuration for a key and
runs the kernel with it:

    FORWARD = register("layer_norm", _layer_norm, configs("BLOCK_M", (16, 4, 1), (32, 4, 1)))
    ...
    kernel = FORWARD.tiled((c, x.element_size()), x)
    kernel.run((cdiv(rows, kernel["BLOCK_M"]),), x=x, y=y, rows=rows, C=c)
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
from warpfold.ops import dispatch
from warpfold.ops.torch_internals import tree_leaves, without_modes

# The values that a kernel's configuration depends on: widths, lengths, bytes per element.
Key = tuple[int, ...]
SHIPPED = Path(__file__).parent / "tuned"
# The modules of this package that register kernels.
MODULES = "adam", "attention", "linear", "noise", "outer", "pairs", "transition", "triangle"


@dataclass(frozen=True)
class KernelConfig:
    """Tile sizes (constexpr arguments of the kernel by name), warps per program and pipeline stages."""

    sizes: Mapping[str, int]
    warps: int
    stages: int

    def __hash__(self) -> int:
        return hash((frozenset(self.sizes.items()), self.warps, self.stages))

    @property
    def options(self) -> dict[str, Any]:
        """Triton's compile options: warps, stages, fused multiply-adds and the precisions of fp32 products.

        Triton 3.10 does not fuse multiply-adds by default.
        """
        return {
            "num_warps": self.warps,
            "num_stages": self.stages,
            "enable_fp_fusion": True,
            DOTS: dispatch.products,
        }

    def __str__(self) -> str:
        """ "BLOCK_Q 64, BLOCK_K 32, 4 warps, 2 stages"."""
        return ", ".join([*(f"{n} {v}" for n, v in self.sizes.items()), f"{self.warps} warps, {self.stages} stages"])


def configs(names: str, *tiles: tuple[int, ...]) -> tuple[KernelConfig, ...]:
    """Make one configuration from each tuple: tile sizes in the order of `names`, then warps and stages."""
    return tuple(KernelConfig(dict(zip(names.split(), tile)), tile[-2], tile[-1]) for tile in tiles)


@dataclass(frozen=True)
class Kernel:
    """A Triton kernel and the configurations that `warpfold tune` tries for it."""

    name: str
    function: Any  # result of @triton.jit
    candidates: tuple[KernelConfig, ...]

    def tiled(self, key: Key, like: Tensor) -> "TiledKernel":
        """Return the kernel with its configuration for a key on the device of a tensor."""
        device = like.device
        return TiledKernel(self, key, config_for(self.name, key, device), device)


@dataclass(frozen=True)
class ByPrecision:
    """A kernel with configurations for 16-bit dtypes and, under another name, for fp32.

    Products without tensor cores hold their operands in registers, so the two need different tiles.
    """

    half: Kernel
    fp32: Kernel

    def tiled(self, key: Key, like: Tensor) -> "TiledKernel":
        """Return the kernel with its configuration for a key and for the dtype and device of a tensor."""
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
        """Launch the kernel on its device; the tile sizes are added to the arguments."""
        all_arguments, config = {**arguments, **self.config.sizes}, self.config
        # This path serves every run, so it has no step that could be omitted.
        if not _listeners:
            start = functools.partial(self.kernel.function[tuple(grid)], **all_arguments, **config.options)
            with on(self.device):
                if noting.tell is None:
                    start()
                else:
                    # Dispatch modes must not see the torch calls of Triton's interpreter.
                    noting.tell(self, tuple(grid), all_arguments, without_modes(start))
            return
        ordered = {name: all_arguments.pop(name) for name in self.kernel.function.arg_names}
        if all_arguments:
            raise TypeError(f"{self.kernel.name} takes no {', '.join(all_arguments)}")
        _listeners[-1](KernelLaunch(self.kernel, tuple(grid), config, self.key, ordered))


@dataclass(frozen=True)
class KernelLaunch:
    """A launch of a kernel: grid, configuration, the key of its lookup, and all arguments in the kernel's order."""

    kernel: Kernel
    grid: tuple[int, ...]
    config: KernelConfig
    key: Key
    arguments: Mapping[str, Any]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments and within tuples, in order."""
        return [leaf for leaf in tree_leaves(list(self.arguments.values())) if isinstance(leaf, Tensor)]

    @property
    def options(self) -> dict[str, Any]:
        """Triton's compile options."""
        return self.config.options

    def run(self) -> None:
        """Launch the kernel on the device of its first tensor."""
        with on(self.tensors[0].device):
            self.kernel.function[self.grid](**self.arguments, **self.options)


def on(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which kernels are launched on this device."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)


@dataclass(frozen=True)
class TableEntry:
    """A line of a launch table."""

    kernel: str
    key: Key
    config: KernelConfig


@dataclass(frozen=True)
class LaunchTable:
    """Configurations for one GPU.  head: GPU, driver, torch, triton and date, or a note on their origin."""

    path: Path
    head: Mapping[str, str]
    entries: tuple[TableEntry, ...]

    def nearest(self, kernel: str, key: Key) -> TableEntry | None:
        """Find the entry with the nearest key, by the sum of |log2| ratios; on ties the entry with the smallest key."""
        of_kernel = [e for e in self.entries if e.kernel == kernel]
        return min(of_kernel, key=lambda e: (_distance(e.key, key, self.path), e.key)) if of_kernel else None


_NOTHING = nullcontext()
KERNELS: dict[str, Kernel] = {}
# Triton's option for fp32 operands of `tl.dot`: TF32 if its value contains it, otherwise exact products.
DOTS = "allowed_dot_input_precisions"


class _Noting(threading.local):
    """Observer of this thread's launches: (kernel, grid, arguments, compiled code) of each."""

    tell: Callable[[TiledKernel, tuple[int, ...], Mapping[str, Any], Any], None] | None = None


noting = _Noting()
# The last one receives every launch, which is then not run.
_listeners: list[Callable[[KernelLaunch], None]] = []
_forced: dict[str, KernelConfig] = {}
_tables: list[tuple[LaunchTable, ...]] = []
_stood_for: list[torch.device] = []
_resets = 0


def register(name: str, function: Any, candidates: tuple[KernelConfig, ...]) -> Kernel:
    """Register a kernel under its name for offline compilation and tuning."""
    KERNELS[name] = Kernel(name, function, candidates)
    return KERNELS[name]


def register_by_precision(
    name: str, function: Any, half: tuple[KernelConfig, ...], fp32: tuple[KernelConfig, ...]
) -> ByPrecision:
    """Register a kernel under its name for 16-bit dtypes and as NAME_fp32 for fp32."""
    return ByPrecision(register(name, function, half), register(f"{name}_fp32", function, fp32))


def kernels() -> dict[str, Kernel]:
    """Return all kernels by name.  This imports their modules, and so Triton."""
    for module in MODULES:
        importlib.import_module(f"warpfold.ops.triton.{module}")
    return KERNELS


def config_for(kernel: str, key: Key, device: torch.device) -> KernelConfig:
    """Look up the configuration of a kernel: the nearest entry in all tables of the device (`tables_for`).

    On ties, and so also for an exact match, the first table wins.
    Raises UserError for a table that cannot be read or has another version.
    """
    if kernel in _forced:
        return _forced[kernel]
    if _tables:
        return _find(_tables[-1], kernel, key)
    return _config_for(kernel, key, device)


def state() -> int | None:
    """Return a number that `reset` changes, or None within contexts that observe or choose launches."""
    return None if _listeners or _forced or _tables else _resets


@contextmanager
def forced(chosen: Mapping[str, KernelConfig]) -> Iterator[None]:
    """Use these configurations for these kernels within the context, for every key and in every thread."""
    before = dict(_forced)
    _forced.update(chosen)
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)


@contextmanager
def table_used(*tables: LaunchTable) -> Iterator[None]:
    """Look up configurations within the context in these tables and default.json instead of the device's."""
    _tables.append((*tables, read(SHIPPED / "default.json")))
    try:
        yield
    finally:
        _tables.pop()


@contextmanager
def recorded(run: bool = False) -> Iterator[list[KernelLaunch]]:
    """Record the launches of kernels within the context in the list that it yields, and run them only if `run`.

    Without `run`, launchers accept meta tensors of any size, so that launches can be compiled or inspected.
    """
    launches: list[KernelLaunch] = []

    def note(launch: KernelLaunch) -> None:
        launches.append(launch)
        if run:
            launch.run()

    with unlaunched(note):
        yield launches


@contextmanager
def unlaunched(tell: Callable[[KernelLaunch], None] = lambda launch: None) -> Iterator[None]:
    """Pass each launch to `tell` within the context and run none.  Unlike `recorded`, this keeps no launch."""
    _listeners.append(tell)
    try:
        yield
    finally:
        _listeners.pop()


def home() -> Path:
    """Return the folder of the tables that `warpfold tune` writes, which take precedence over the package's."""
    # Without HOME and an entry in passwd, os.path.expanduser keeps "~", whereas Path.expanduser raises an error.
    return Path(os.path.expanduser("~/.cache/warpfold/tuned"))


def file_of(gpu: str) -> str:
    """Return the file name of a GPU's table: "NVIDIA H100 80GB HBM3" -> "NVIDIA-H100-80GB-HBM3.json"."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", gpu).strip("-.") + ".json"


# The tables for GPUs with less shared memory per program than this, in bytes. default.json fits the 163 KB of an A100.
# GeForce and L40 have 99 KB, and AMD GPUs have 64 KB, in which the tiles of the larger tables do not fit.
SMALLER = {"64KB": 99 * 1024, "99KB": 163 * 1024}


def tables_for(device: torch.device) -> tuple[LaunchTable, ...]:
    """Return the tables for a device in order of precedence: its own, that of its family, default.json.

    Raises UserError for a table that cannot be read.
    """
    return table_for(device)[0], family_table(device), read(SHIPPED / "default.json")


def family_table(device: torch.device) -> LaunchTable:
    """Select the shipped table for a GPU by its shared memory, and by the newest architecture that is not newer."""
    name = "default"
    if device.type == "cuda":
        if torch.version.hip is not None:
            return read(SHIPPED / "64KB.json")
        gpu = torch.cuda.get_device_properties(device)
        smaller = (name for name, most in SMALLER.items() if gpu.shared_memory_per_block_optin < most)  # type: ignore[attr-defined]
        name = next(smaller, "sm_90" if gpu.major >= 9 else "default")
    return read(SHIPPED / f"{name}.json")


def table_for(device: torch.device) -> tuple[LaunchTable, str]:
    """Return the first table for a device and the reason for this choice in words, for `doctor` and `bench`.

    Raises UserError for a table that cannot be read.
    """
    if device.type != "cuda":
        return read(SHIPPED / "default.json"), f"{device.type} is no GPU"
    gpu, stale = torch.cuda.get_device_name(device), ""
    own, shipped = home() / file_of(gpu), SHIPPED / file_of(gpu)
    if own.is_file():
        table = read(own)
        if table.head.get("triton", triton_version()) == triton_version():
            return table, f"made on this machine for {gpu}"
        # Another compiler generates other code, for which other tiles may be fastest or fit the registers.
        stale = f"the table made on this machine is of Triton {table.head['triton']}, not {triton_version()}; "
    # `./dev triton` checks shipped tables with every supported version.
    if shipped.is_file():
        return read(shipped), f"{stale}shipped for {gpu}"
    return family_table(device), f"{stale}no table for {gpu}; make one: warpfold tune"


@functools.cache
def triton_version() -> str:
    """Return the version of the installed Triton, whatever the name of its distribution."""
    return str(importlib.import_module("triton").__version__)


def cores(device: torch.device) -> int:
    """Return the number of cores (streaming multiprocessors) of a device.

    For devices that are no GPU this is the number of the GPU of `launched_on`, or of an H100.
    """
    if device.type != "cuda":
        return _cores(_stood_for[-1]) if _stood_for else 132
    return _cores(device)


@functools.cache
def _cores(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@contextmanager
def launched_on(device: torch.device) -> Iterator[None]:
    """Choose launches of meta tensors within the context as on a CUDA device."""
    own, family, _ = tables_for(device)
    _stood_for.append(device)
    try:
        with table_used(own, family):
            yield
    finally:
        _stood_for.pop()


@functools.cache
def read(path: Path) -> LaunchTable:
    """Read a table, once per process.  Raises UserError."""
    try:
        head = json.loads(path.read_text(encoding="utf-8"))
        entries = tuple(
            TableEntry(e["kernel"], tuple(e["key"]), KernelConfig(dict(e["sizes"]), e["warps"], e["stages"]))
            for e in head.pop("launches")
        )
        numbers = (
            number
            for entry in entries
            for number in (*entry.key, *entry.config.sizes.values(), entry.config.warps, entry.config.stages)
        )
        if not all(type(number) is int for number in numbers):
            raise ValueError("keys, sizes, warps and stages are whole numbers")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: not a launch table ({error!r}). Create it with: warpfold tune") from error
    return LaunchTable(path, head, entries)


def reset() -> None:
    """Clear the caches of tables, after one was written."""
    global _resets
    _resets += 1
    read.cache_clear()
    _config_for.cache_clear()


@functools.cache
def _config_for(kernel: str, key: Key, device: torch.device) -> KernelConfig:
    return _find(tables_for(device), kernel, key)


def _find(tables: Sequence[LaunchTable], kernel: str, key: Key) -> KernelConfig:
    candidates = []
    for table in tables:
        entry = table.nearest(kernel, key)
        if entry is None:
            continue
        registered = KERNELS.get(kernel)
        if registered is not None and set(registered.candidates[0].sizes) != set(entry.config.sizes):
            raise UserError(
                f"{table.path}: {kernel} has sizes {', '.join(sorted(entry.config.sizes))}, which belong to another "
                "version. Remove the file, or create it again with: warpfold tune"
            )
        candidates.append(entry)
    if not candidates:
        raise LookupError(f"no table has a launch for {kernel}")
    # On ties the first table wins. Its entries are not always nearest: a device's table may cover other sizes only.
    return min(candidates, key=lambda entry: _distance(entry.key, key, tables[0].path)).config


def _distance(a: Key, b: Key, where: Path) -> float:
    """Sum |log2(a / b)|, with zeros as halves, and round the sum, so that all machines see the same ties."""
    if len(a) != len(b):
        raise UserError(f"{where}: key {a} belongs to another version ({b}). Create the table with: warpfold tune")
    return round(sum(abs(math.log2((x or 0.5) / (y or 0.5))) for x, y in zip(a, b)), 6)
