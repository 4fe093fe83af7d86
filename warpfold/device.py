"""Devices: asynchronous copies between host and GPU, graphs of recorded work, and the CPU's threads and memory."""

import ctypes
import gc
import logging
import os
import platform
import re
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from warpfold.errors import LostError, UserError
from warpfold.ops.capabilities import capabilities, slow_notice
from warpfold.ops.dispatch import backend

log = logging.getLogger(__name__)
# Commands print the messages of this logger next to their plans.
plan_log = logging.getLogger("warpfold.plan")

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@contextmanager
def one_thread() -> Iterator[None]:
    """Make processes that are started within the context use a single thread in NumPy and torch.

    The libraries read these variables when they are loaded, so this process is unaffected.
    """
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# Common names of devices, and their names in torch.
DEVICE_ALIASES = {"gpu": "cuda", "nvidia": "cuda", "rocm": "cuda", "hip": "cuda", "metal": "mps", "apple": "mps"}
# First version of torch with correct products along more than 32,768 elements on an M1 and M2.
MPS_FIXED = "2.14"


def default_workers(device: torch.device | str) -> int:
    """Return the default number of processes that prepare examples: up to 8 per GPU, and none on a CPU."""
    if torch.device(device).type != "cuda":
        return 0
    return max(1, min(8, cores() // torch.cuda.device_count() - 1))


def cores() -> int:
    """Count the CPU cores that this process may use; on systems other than Linux, all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# Parameters of glibc's mallopt, from malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# Larger tensors are returned to the system at once. A block at 256 residues has none.
MAX_CACHED_BYTES = 2**28


def keep_memory() -> str | None:
    """Make the CPU allocator reuse the memory of freed tensors, from now on in the whole process.

    By default glibc returns blocks above 32 MiB to the system at once, and each new block causes page faults, which
    cost 0.22 s per GiB on 2 cores of an EPYC. One Evoformer block forward and backward (128 x 256, fp32) has 1.17
    million faults by default, and 16 thousand with this setting. Its peak memory grows from 2.0 to 2.5 GiB because of
    fragmentation: the hole of a freed aligned tensor is slightly too small for the next tensor of the same size.
    Returns the reason if nothing was done, otherwise None.
    """
    if platform.libc_ver()[0] != "glibc":
        return "memory can be kept with glibc only"
    libc = ctypes.CDLL(None)
    if not libc.mallopt(M_MMAP_THRESHOLD, MAX_CACHED_BYTES):
        return "this version of glibc cannot keep blocks of this size"
    # -1 disables trimming.
    libc.mallopt(M_TRIM_THRESHOLD, -1)
    return None


def slow_precision(precision: str, device: torch.device | str) -> str | None:
    """Return a warning if this CPU has no instructions for a precision, otherwise None.

    Without them torch converts each element to fp32 and back. A matrix product of size 256 then takes 23 times as long
    as in fp32, and one of size 2,048 over a hundred times as long (CPU with AVX2 only, torch 2.13).
    """
    if precision not in ("bf16", "bf16_all", "fp16") or torch.device(device).type != "cpu":
        return None
    cpus = Path("/proc/cpuinfo")
    if cpus.exists():
        flags = set(re.findall(r"\w+", cpus.read_text(encoding="utf-8")))
        needed = {"amx_fp16", "avx512_fp16", "asimdhp"} if precision == "fp16" else {"avx512_bf16", "amx_bf16", "bf16"}
    else:
        # Among Apple's processors, the M1 has no bf16.
        flags, needed = {sysctl(f"hw.optional.arm.FEAT_{precision[:4].upper()}")}, {"1", ""}
    if flags & needed:
        return None
    return f"{precision} is many times slower than fp32 on this CPU, which has no instructions for it; use fp32"


def sysctl(name: str) -> str:
    """Read a sysctl value of macOS, such as "machdep.cpu.brand_string"; "" if there is none."""
    if sys.platform != "darwin":
        return ""
    return subprocess.run(["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, check=False).stdout.strip()


def caveats(precision: str, device: torch.device | str) -> list[str]:
    """Return warnings about a device and a precision: slow combinations, and platforms that were never tested."""
    slow = slow_precision(precision, device)
    warnings = [slow] if slow else []
    is_gpu = torch.device(device).type == "cuda"
    if is_gpu and precision.startswith("bf16") and not capabilities(torch.device(device)).has_bf16:
        warnings.append(f"{precision} is slower than fp32 on this GPU, which does not multiply bf16. Use fp32 or fp16.")
    if torch.device(device).type == "mps":
        warnings.append(
            "mps: WarpFold was never run on an Apple GPU. Compare a result with that of --device cpu first."
        )
        if torch.__version__ < MPS_FIXED:
            warnings.append(
                f"mps: with torch {torch.__version__} an M1 or M2 computes wrong gradients above 180 residues "
                "(github.com/pytorch/pytorch/issues/177116). Train with torch 2.14 or newer."
            )
    return warnings


def unsupported_on_mps(device: torch.device | str, requested: Mapping[str, bool]) -> str | None:
    """Explain which requested features do not run on an Apple GPU ("mps"), or return None.

    requested: whether each feature is requested, by the name for the message.
    """
    if torch.device(device).type != "mps":
        return None
    features = [name for name, is_requested in requested.items() if is_requested]
    if not features:
        return None
    return f"{' and '.join(features)}: not supported on mps, an Apple GPU. Leave it out, or pass --device cpu."


def spinning_threads() -> str | None:
    """Return a warning if CPU threads spin while they wait for each other, otherwise None.

    GNU OpenMP makes threads spin for milliseconds after each operation, unless environment variables disable it before
    the library is loaded. This takes time from other programs on the same cores. With eight such programs on 2 cores of
    a Xeon, a block of pair layers took 10 times as long (2026-11, 96 residues, with the layers of any package).
    """
    if "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ or torch.get_num_threads() == 1:
        return None
    if sys.platform != "linux":
        return None
    return (
        "if other programs run on these cores, set OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=10000 before Python starts, "
        "and OMP_NUM_THREADS to the number of free cores: otherwise spinning threads take most of the time"
    )


@dataclass(frozen=True)
class Upload:
    """A copy to a device, in flight."""

    _copy: Tensor
    _done: torch.cuda.Event | None

    def wait(self) -> Tensor:
        """Return the copy for use on the current stream. The stream waits for the copy, the host does not."""
        if self._done is not None:
            current = torch.cuda.current_stream(self._copy.device)
            current.wait_event(self._done)
            # The side stream owns the memory, and must not reuse it before `current` is done with it.
            self._copy.record_stream(current)
        return self._copy


@dataclass(frozen=True)
class Snapshot:
    """Copies of tensors in host memory, in flight. Later changes of the tensors do not affect them."""

    _copies: dict[str, Tensor]
    _done: torch.cuda.Event | None

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Snapshot":
        """Start to copy named tensors; those on a GPU to pinned memory, on the current stream.

        Views of one buffer are copied together, from the first to the last. Separate pinned memory for each of
        thousands of parameters would take longer to allocate than the copy takes.
        """
        buffers: dict[Hashable, list[str]] = {}
        for name, x in tensors.items():
            buffers.setdefault((x.untyped_storage()._cdata, x.dtype), []).append(name)
        copies: dict[str, Tensor] = {}
        for names in buffers.values():
            views = [tensors[name].detach() for name in names]
            begin = min(x.storage_offset() for x in views)
            end = max(x.storage_offset() + sum((n - 1) * step for n, step in zip(x.shape, x.stride())) for x in views)
            whole = views[0].as_strided((end + 1 - begin,), (1,), begin)
            copy = torch.empty_like(whole, device="cpu", pin_memory=whole.is_cuda)
            # On mps there is no event to wait for, so the copy blocks.
            copy.copy_(whole, non_blocking=whole.device.type != "mps")
            for name, x in zip(names, views):
                copies[name] = copy.as_strided(x.shape, x.stride(), x.storage_offset() - begin)
        on_gpu = next((x.device for x in tensors.values() if x.is_cuda), None)
        done = None if on_gpu is None else torch.cuda.current_stream(on_gpu).record_event()
        return cls({name: copies[name] for name in tensors}, done)

    def wait(self) -> dict[str, Tensor]:
        """Return the copies when they are complete. Only the calling thread waits."""
        # The host reads the copies next, so it must wait, and not only a stream.
        if self._done is not None:
            self._done.synchronize()
        return self._copies


class Uploads:
    """Copy from host memory to a device on a separate stream, while the device computes."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def host(self, size: int) -> Tensor:
        """Allocate host memory to copy from, uint8 [size]; pinned for CUDA."""
        if self._stream is None:
            return torch.empty(size, dtype=torch.uint8)
        # Pinning creates a context on the thread's current device.
        with torch.cuda.device(self.device):
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    @property
    def buffer(self) -> Callable[[int], Tensor] | None:
        """Allocator of a loader's receive buffers: `host`, or None if the memory need not be pinned."""
        return None if self._stream is None else self.host

    def start(self, buffer: Tensor) -> Upload:
        """Start to copy a buffer from `host` to the device. Call `wait` on the result to use the copy.

        `buffer` may be freed at once, because torch keeps pinned memory until the copies from it are done.
        """
        if self._stream is None:
            return Upload(buffer.to(self.device), None)
        with torch.cuda.stream(self._stream):
            return Upload(buffer.to(self.device, non_blocking=True), self._stream.record_event())


class OnHost:
    """A tensor that autograd has saved, kept in host memory until the backward pass needs it.

    It is restored with its original strides, because an operation that saved some channels of a padded buffer relies on
    them.
    """

    def __init__(self, x: Tensor, stream: torch.cuda.Stream | None, earlier: "OnHost | None") -> None:
        """stream: for the copies; None if x is on the host. earlier: the tensor that was saved before this one."""
        self._device, self._stream = x.device, stream
        self._earlier = None if earlier is None else weakref.ref(earlier)
        self._copy: Upload | None = None
        self._shape = x.shape
        # Copy expanded axes once.
        x = x[tuple(slice(None) if step else slice(1) for step in x.stride())]
        self._size, self._strides = x.shape, x.stride()
        self._host = torch.empty_like(x, device="cpu", pin_memory=stream is not None)
        if stream is None:
            self._host.copy_(x)
            return
        # The kernels that write x are queued on the current stream.
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            self._host.copy_(x, non_blocking=True)
        # The memory of x must not be reused before the copy is done.
        x.record_stream(stream)

    def fetch(self) -> None:
        """Start to copy the tensor back to the device."""
        if self._copy is not None:
            return
        if self._stream is None:
            self._copy = Upload(self._laid_out(self._host.clone()), None)
            return
        with torch.cuda.stream(self._stream):
            copy = self._laid_out(self._host.to(self._device, non_blocking=True))
            self._copy = Upload(copy, self._stream.record_event())

    def _laid_out(self, copy: Tensor) -> Tensor:
        if copy.stride() != self._strides:
            copy = copy.new_empty_strided(self._size, self._strides).copy_(copy)
        return copy.expand(self._shape)

    def take(self) -> Tensor:
        """Return the tensor on the device, and prefetch the tensor saved before it, which is probably needed next."""
        self.fetch()
        assert self._copy is not None
        x, self._copy = self._copy.wait(), None
        if self._earlier is not None and (earlier := self._earlier()) is not None:
            earlier.fetch()
        return x


class Offload:
    """Keep large CUDA tensors that autograd saves in pinned host memory until the backward pass.

    They are copied in both directions on a separate stream while the device computes. Parameters and their views stay
    on the device. A tensor that several operations save is copied for each of them.
    """

    # Smaller tensors are not worth a copy.
    MIN_BYTES = 2**20

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._last: weakref.ref[OnHost] | None = None

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Offload the tensors that autograd saves within the context."""
        with saved_tensors_hooks(self._pack, self._unpack):
            yield

    def moves(self, x: Tensor) -> bool:
        """Return whether a tensor that autograd saves is moved to the host."""
        base = x if x._base is None else x._base
        # A meta tensor may represent a CUDA tensor.
        on_gpu = x.is_cuda or (x.is_meta and backend(x) == "triton")
        return on_gpu and x.nbytes >= self.MIN_BYTES and not (base.is_leaf and base.requires_grad)

    def _pack(self, x: Tensor) -> Tensor | OnHost:
        if not self.moves(x):
            return x
        if x.is_cuda and self._stream is None:
            self._stream = torch.cuda.Stream(x.device)
        saved = OnHost(x.detach(), self._stream, None if self._last is None else self._last())
        self._last = weakref.ref(saved)
        return saved

    @staticmethod
    def _unpack(saved: Tensor | OnHost) -> Tensor:
        return saved.take() if isinstance(saved, OnHost) else saved


# Graphs


# Bytes: the alignment of torch's allocations on a GPU.
ALIGNED = 512
Named = dict[str, Tensor]
Function = Callable[[Mapping[str, Tensor]], Named]


class Recorder(Protocol):
    """Protocol for recording a function's work on a device and replaying it without the function."""

    def warm_up(self, function: Callable[[], Named]) -> tuple[Named, bool]:
        """Call a function in the conditions of its recording.

        Returns its results, and whether the call left tensors in memory that earlier graphs will overwrite.
        """
        ...

    def record(self, function: Callable[[], Named]) -> tuple[Named, Callable[[], None]]:
        """Record a call of a function without executing its work; returns the memory of the results and the replay.

        Actions that the function passes to `outside_graph` run in each replay.
        """
        ...


# Callbacks of the active recordings, which defer an action to the replays.
_cut: list[Callable[[Callable[[], object]], None]] = []


def outside_graph(action: Callable[[], object]) -> None:
    """Run an action on the host that a graph cannot contain, such as sending to other ranks.

    The action may read tensors of the call and write to them. If a call is being recorded, the action runs in each
    replay instead: after the preceding work was submitted to the device, and before the following work. No recorded
    collective is in flight then.
    """
    if _cut:
        _cut[-1](action)
    else:
        action()


@contextmanager
def cutting(cut: Callable[[Callable[[], object]], None]) -> Iterator[None]:
    """Pass actions of `outside_graph` to the callback within the context."""
    _cut.append(cut)
    try:
        yield
    finally:
        _cut.pop()


class CUDARecorder:
    """Recorder of CUDA graphs. They share one memory pool, since they never run concurrently and retain no tensors."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        with torch.cuda.device(device):
            self._pool = torch.cuda.MemPool()
        # Work-around for torch 2.11, which cannot record into a pool whose last graph was deleted ("use_count > 0" of
        # its pinned memory): one graph lives as long as the pool.
        self._first: Callable[[], None] | None = None

    def warm_up(self, function: Callable[[], Named]) -> tuple[Named, bool]:
        """Call a function on the recording stream, which compiles kernels and creates caches and workspaces.

        The memory comes from the graphs' pool, which keeps it. In another pool, the same amount of memory would stay
        unused. But graphs treat their intermediates' memory in the pool as free, and each replay overwrites it. The
        results are therefore copied. Other tensors that remain in the pool, such as a table that the function caches
        for later calls, are detected by comparing the addresses in use.
        """
        current, held_addresses = torch.cuda.current_stream(self._device), self._held()
        # The inputs were written on the current stream; below, the current stream reads the results.
        self._stream.wait_stream(current)
        with self._here():
            with torch.cuda.use_mem_pool(self._pool, self._device):
                outputs = function()
            results = {name: x.clone() for name, x in outputs.items()}
            del outputs
        current.wait_stream(self._stream)
        # The results were allocated on the recording stream, and must not be reused before `current` is done.
        for result in results.values():
            result.record_stream(current)
        return results, not self._held() <= held_addresses

    def _held(self) -> set[int]:
        """Return the addresses of the blocks in the graphs' pool that tensors use."""
        addresses: set[int] = set()
        for segment in self._pool.snapshot():
            address = segment["address"]
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    addresses.add(address)
                address += block["size"]
        return addresses

    def record(self, function: Callable[[], Named]) -> tuple[Named, Callable[[], None]]:
        """Capture a call of a function as a graph, or as several graphs with host actions between them.

        Raises RuntimeError if the function cannot be captured, or if it leaves tensors in the graphs' pool: an earlier
        graph may use the same memory, and only a replay would fill it.
        """
        if self._first is None:
            self._first = self._capture(lambda: {"x": torch.zeros(1, device=self._device)})[1]
        held_addresses = self._held()
        results, replay = self._capture(function)
        if not self._held() <= held_addresses:
            # Garbage collection was disabled during the capture, so tensors in reference cycles are still there.
            gc.collect()
            if leaked := self._held() - held_addresses:
                raise RuntimeError(f"{len(leaked)} tensors that were made in the recording are still in use")
        return results, replay

    def _capture(self, function: Callable[[], Named]) -> tuple[Named, Callable[[], None]]:
        steps: list[Callable[[], object]] = []
        # The graph that is being captured.
        graph: torch.cuda.CUDAGraph | None = None
        # thread_local: threads of a loader may allocate memory during the capture.
        options: dict[str, Any] = {"pool": self._pool.id, "capture_error_mode": "thread_local"}

        def begin() -> None:
            nonlocal graph
            new_graph = torch.cuda.CUDAGraph()
            new_graph.capture_begin(**options)
            graph = new_graph

        def end() -> None:
            nonlocal graph
            assert graph is not None
            ended, graph = graph, None
            ended.capture_end()
            steps.append(ended.replay)

        def cut(action: Callable[[], object]) -> None:
            end()
            steps.append(action)
            begin()

        def replay() -> None:
            for step in steps:
                step()

        # A capture must not depend on uncaptured work, and needs the memory that the cache holds.
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        # A graph or a compiled kernel that is deleted while a stream captures unloads code, which invalidates the
        # capture. So garbage is collected before the capture and not during it.
        gc.collect()
        with self._here(), cutting(cut), uncollected():
            begin()
            is_complete = False
            try:
                results = function()
                is_complete = True
            finally:
                if not is_complete and graph is not None:
                    # The error of `function` explains the failure; that of capture_end would hide it.
                    with suppress(RuntimeError):
                        graph.capture_end()
            end()
        return results, replay

    @contextmanager
    def _here(self) -> Iterator[None]:
        """Use the recording stream within the context, and run backward passes in the calling thread.

        A memory pool applies to the thread that activates it, and a capture must end in the thread in which it began.
        By default autograd runs backward passes in a separate thread.
        """
        with torch.cuda.stream(self._stream), torch.autograd.set_multithreading_enabled(False):
            yield


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection within the context."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def find_recorder(device: torch.device) -> Recorder | None:
    """Create a recorder for the device; returns None if the device has no graphs."""
    return CUDARecorder(device) if device.type == "cuda" else None


@dataclass(frozen=True)
class _Graph:
    """A recorded call: the memory of its inputs and results, and the replay."""

    inputs: Named
    results: Named
    replay: Callable[[], None]

    def __call__(self, inputs: Mapping[str, Tensor]) -> Named:
        _copy_all(self.inputs, inputs)
        self.replay()
        results = {name: torch.empty_like(x) for name, x in self.results.items()}
        _copy_all(results, self.results)
        return results


def _copy_all(targets: Named, sources: Mapping[str, Tensor]) -> None:
    """Copy tensors by name with one call per dtype, since most are small."""
    for dtype in {x.dtype for x in targets.values()}:
        names = [name for name, x in targets.items() if x.dtype == dtype]
        torch._foreach_copy_([targets[name] for name in names], [sources[name] for name in names])


class Graphs:
    """Call functions of tensors, and record and replay repeated calls with the same shapes.

    A function may depend on its inputs and on memory that is overwritten between calls but never replaced. It may
    change such memory on the device, and must not read tensors on the host. The first call with given shapes and dtypes
    is an ordinary one, which compiles kernels and copies constants to the device. The second call is recorded.

    Collectives are recorded too if all participating ranks make the same calls: NCCL needs each collective in the
    graphs of all of them, or of none.
    agreed: a collective that returns whether its argument was True on any of these ranks.

    refused: reasons why calls were not replayed, with counts. replayed: number of replayed calls.
    recorded: number of present graphs. rerecorded: number of graphs that were dropped and recorded again, because a
    first call left tensors in their pool.
    """

    # Most recorded shapes. Beyond, the least recently used graph is deleted.
    MAX_SHAPES = 64

    def __init__(self, agreed: Callable[[bool], bool] = bool) -> None:
        self.refused: Counter[str] = Counter()
        self.most = self.MAX_SHAPES
        self._agreed = agreed
        self.replayed = self.rerecorded = 0
        self._recorder: Recorder | None = None
        # All graphs share two buffers for their inputs and results, which are as large as z.
        self._buffers = {"inputs": torch.empty(0, dtype=torch.uint8), "results": torch.empty(0, dtype=torch.uint8)}
        # Least recently used first. None after a first call that was not recorded.
        self._graphs: dict[Hashable, _Graph | None] = {}

    @property
    def recorded(self) -> int:
        """Number of graphs."""
        return sum(graph is not None for graph in self._graphs.values())

    def call(
        self, function: Function, inputs: Mapping[str, Tensor], context: Hashable = (), reason: str | None = None
    ) -> Named:
        """Call or replay the function; the results are new tensors without gradients.

        context: further conditions that must be equal for a replay. reason: why this call cannot be recorded, or None.
        Raises UserError if recording fails.
        """
        device = next((x.device for x in inputs.values()), torch.device("cpu"))
        if reason is None and self._recorder is None:
            self._recorder = find_recorder(device)
            reason = None if self._recorder else f"a {device.type} has no graphs"
        name = getattr(function, "__name__", str(function))
        form = tuple((key, x.shape, x.dtype, x.device) for key, x in inputs.items())
        called = (function, context, torch.is_grad_enabled(), form)
        if reason is not None or self._recorder is None:
            self._refuse(f"graph of {name.strip('_')}: {reason}")
            return function(inputs)
        if called not in self._graphs:
            if len(self._graphs) >= self.most:
                del self._graphs[next(iter(self._graphs))]
                self._refuse(f"graph of {name.strip('_')}: more than {self.most} shapes (plan.sizes makes them fewer)")
            # Call with inputs in the buffer of the recording, since kernels are compiled for alignment and strides, and
            # no code can be loaded during a capture.
            placed = self._place(inputs, "inputs")
            _copy_all(placed, inputs)
            results, has_left_tensors = self._recorder.warm_up(lambda: function(placed))
            if self._agreed(has_left_tensors):
                # Earlier graphs would overwrite these tensors, so they are recorded again.
                self.rerecorded += self.recorded
                if self.recorded:
                    plan_log.info("graphs: recording %d again, %d so far", self.recorded, self.rerecorded)
                self._graphs = dict.fromkeys(self._graphs)
            self._graphs[called] = None
            # Grow the buffer now: it cannot grow during a recording.
            self._place(results, "results")
            return results
        graph = self._graphs.pop(called)
        if graph is None:
            graph = self._record(name, function, inputs)
        self._graphs[called] = graph
        self.replayed += 1
        return graph(inputs)

    def _record(self, name: str, function: Function, inputs: Mapping[str, Tensor]) -> _Graph:
        assert self._recorder is not None
        placed = self._place(inputs, "inputs")
        _copy_all(placed, inputs)

        def call() -> Named:
            outputs = function(placed)
            results = self._place(outputs, "results")
            _copy_all(results, outputs)
            return results

        try:
            results, replay = self._recorder.record(call)
        except (torch.OutOfMemoryError, LostError):
            raise
        except RuntimeError as error:
            raise UserError(f"plan.graph: {name} cannot be recorded ({error}). Set plan.graph = false.") from error
        return _Graph(placed, results, replay)

    def _place(self, like: Mapping[str, Tensor], what: str) -> Named:
        """Return memory for tensors of these shapes in the buffer of inputs or results."""
        sizes = [-(-x.nbytes // ALIGNED) * ALIGNED for x in like.values()]
        if sum(sizes) > len(self._buffers[what]):
            # Existing graphs keep the smaller buffer alive.
            device = next(x.device for x in like.values())
            self._buffers[what] = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        parts = zip(like.items(), self._buffers[what][: sum(sizes)].split(sizes))
        return {name: part[: x.nbytes].view(x.dtype).view(x.shape) for (name, x), part in parts}

    def _refuse(self, reason: str) -> None:
        self.refused[reason] += 1
        if self.refused[reason] == 1:
            log.info("%s", reason)


def device_of(value: Any, local_rank: int | None = None) -> str:
    """Validate and choose the device to run on; None means the first CUDA GPU, or the CPU without one.

    local_rank: index of this process on its machine if there are several; each uses its own GPU.
    On a CPU, the allocator keeps freed memory from now on (`keep_memory`).
    Raises UserError for a device that torch does not know or this machine does not have.
    """
    if value is not None and not isinstance(value, str | torch.device):
        raise UserError(f'device = {value!r}: it must be a name such as "cpu" or "cuda:1"')
    name = ("cuda" if torch.cuda.is_available() else "cpu") if value is None else str(value)
    if not re.fullmatch(r"cpu|mps(:0)?|(cuda|xpu|hpu|mtia)(:\d+)?", name):
        if (meant := device_meant(name)) is None:
            raise UserError(
                f"--device {name}: not known. Pass cpu, cuda, cuda:1 and so on, or mps on a Mac (only `warpfold plan` "
                "accepts the model of a GPU)."
            )
        missing = _why_missing(meant)
        remedy = f"Pass {meant}" if missing is None else f"{meant}: {missing}"
        raise UserError(f"--device {name}: not known. {remedy}")
    # Neither gloo nor NCCL takes tensors of an Apple GPU.
    if reason := unsupported_on_mps(name, {"several processes": local_rank is not None}):
        raise UserError(reason)
    if name == "cuda" and local_rank is not None:
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"--device {name}: process {local_rank} of this machine needs its own GPU, but there are "
                f"{torch.cuda.device_count()}. Start no more processes than GPUs (Slurm: --gpus-per-node, not "
                "--gpus-per-task), or pass --device cpu."
            )
        name = f"cuda:{local_rank}"
    if missing := _why_missing(name):
        raise UserError(f"--device {name}: {missing}")
    if name == "cpu":
        keep_memory()
    if not local_rank:
        _warn_if_slow(name)
    return name


@cache
def _warn_if_slow(name: str) -> None:
    """Log once if the fast kernels do not run on a device."""
    if notice := slow_notice(torch.device(name)):
        log.warning("--device %s: %s", name, notice)


def device_meant(name: str) -> str | None:
    """Translate a common name to torch's name of a device, such as "GPU" to "cuda" and "0" to "cuda:0"; else None."""
    plain = name.strip().lower()
    if number := re.fullmatch(r"(?:cuda|gpu)?\s*:?\s*(\d+)", plain):
        return f"cuda:{int(number[1])}"
    if plain == "gpu" and torch.backends.mps.is_available():
        return "mps"
    kind = plain.partition(":")[0]
    kind = DEVICE_ALIASES.get(kind, kind)
    return kind if kind in ("cpu", "cuda", "mps") else None


def _why_missing(name: str) -> str | None:
    """Explain why a device is missing or does not compute, with a remedy; returns None if it computes."""
    index = torch.device(name).index or 0
    is_found = name.startswith("cuda") and index < torch.cuda.device_count()
    if is_found and (unusable := capabilities(torch.device(name)).unusable):
        return unusable
    try:
        # On a GPU for which torch has no code, an allocation succeeds but a launch fails.
        torch.zeros(1, device=name).add_(1).item()
    except (RuntimeError, AssertionError) as error:
        if is_found:
            return f"torch cannot compute on it ({str(error).splitlines()[0]}). Check nvidia-smi, or pass cpu."
    else:
        return None
    other = "cpu, or mps (this Mac's GPU)" if torch.backends.mps.is_available() else "cpu"
    if name.startswith("mps"):
        if not torch.backends.mps.is_built():
            return f"torch {torch.__version__} was built without mps, which needs an Apple processor. Pass cpu."
        return "torch finds no Apple GPU here. It needs an M1 or newer, and macOS 14. Pass cpu."
    if not name.startswith("cuda"):
        return f"torch {torch.__version__} finds no such device here. Pass {other}."
    if not torch.backends.cuda.is_built():
        remedy = "" if "mps" in other else ", or install another build (docs/install.md)"
        return f"torch {torch.__version__} was built without CUDA. Pass {other}{remedy}."
    count = torch.cuda.device_count()
    if not count:
        return f"torch finds no GPU here. Pass {other}, or check nvidia-smi."
    return f"this machine has no such GPU. Pass cpu, or one of {', '.join(f'cuda:{i}' for i in range(count))}."
