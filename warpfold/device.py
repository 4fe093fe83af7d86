"""Asynchronous copies to a GPU and back, for which a CPU does not wait, and graphs of its work; the CPU's threads and
memory.
"""

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

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@contextmanager
def one_thread() -> Iterator[None]:
    """Have processes that are started within the context compute with one thread each, in NumPy and torch.

    The libraries read these variables when they are loaded, so nothing changes in this process.
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


# Of names that people give: what torch calls such a device.
MEANT = {"gpu": "cuda", "nvidia": "cuda", "rocm": "cuda", "hip": "cuda", "metal": "mps", "apple": "mps"}
MPS_FIXED = "2.14"  # of torch, in which products along more than 32,768 numbers are right on an M1 and M2


def default_workers(device: torch.device | str) -> int:
    """Return the default number of processes that prepare examples for a device.

    Up to 8 for each GPU; none on a CPU, whose cores compute.
    """
    if torch.device(device).type != "cuda":
        return 0
    return max(1, min(8, cores() // torch.cuda.device_count() - 1))


def cores() -> int:
    """Count the CPU's cores that this process may use; without Linux, all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
KEPT = 2**28  # bytes; larger tensors, which a block at 256 residues does not have, go back to the system at once


def keep_memory() -> str | None:
    """Reuse the memory of freed tensors for new ones, from now on and in the whole process.

    glibc returns blocks above 32 MiB to the system at once, and page faults bring each new one in: 0.22 s for each GiB
    on 2 cores of an EPYC, 1.17 million faults in one Evoformer block forward and backward (128 x 256, fp32).  With this
    there are 16 thousand.  The peak grows from 2.0 to 2.5 GiB, as the hole that an aligned tensor leaves is a little
    too small for the next of its size, until holes join.
    Returns why nothing was done, or None.
    """
    if platform.libc_ver()[0] != "glibc":
        return "memory can be kept with glibc only"
    libc = ctypes.CDLL(None)
    if not libc.mallopt(M_MMAP_THRESHOLD, KEPT):
        return "this glibc cannot keep blocks so large"
    libc.mallopt(M_TRIM_THRESHOLD, -1)  # never trim
    return None


def slow_precision(precision: str, device: torch.device | str) -> str | None:
    """Return a warning about a precision that this CPU has no instructions for, or None.

    Without them torch converts each number to fp32 and back: a matrix product of side 256 takes 23 times as long as in
    fp32, one of side 2,048 over a hundred times (a CPU with AVX2 alone, torch 2.13).
    """
    if precision not in ("bf16", "bf16_all", "fp16") or torch.device(device).type != "cpu":
        return None
    cpus = Path("/proc/cpuinfo")
    if cpus.exists():
        flags = set(re.findall(r"\w+", cpus.read_text(encoding="utf-8")))
        needed = {"amx_fp16", "avx512_fp16", "asimdhp"} if precision == "fp16" else {"avx512_bf16", "amx_bf16", "bf16"}
    else:  # of Apple's processors M1 has no bf16
        flags, needed = {sysctl(f"hw.optional.arm.FEAT_{precision[:4].upper()}")}, {"1", ""}
    if flags & needed:
        return None
    return f"{precision} is many times slower than fp32 on this CPU, which has no instructions for it; use fp32"


def sysctl(name: str) -> str:
    """Return what macOS knows under a name, such as "machdep.cpu.brand_string"; "" where it knows nothing."""
    if sys.platform != "darwin":
        return ""
    return subprocess.run(["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, check=False).stdout.strip()


def caveats(precision: str, device: torch.device | str) -> list[str]:
    """Return what is to be said before a device computes in a precision: that it is slow, or was never tried."""
    slow = slow_precision(precision, device)
    said = [slow] if slow else []
    is_gpu = torch.device(device).type == "cuda"
    if is_gpu and precision.startswith("bf16") and not capabilities(torch.device(device)).has_bf16:
        said.append(f"{precision} is slower than fp32 on this GPU, which does not multiply bf16; use fp32 or fp16")
    if torch.device(device).type == "mps":
        said.append("mps: WarpFold was never run on an Apple GPU; compare a result with that of --device cpu first")
        if torch.__version__ < MPS_FIXED:
            said.append(
                f"mps: with torch {torch.__version__} an M1 or M2 computes wrong gradients above 180 residues "
                "(github.com/pytorch/pytorch/issues/177116); train with torch 2.14 or newer"
            )
    return said


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
    """Return a warning about threads that spin while they wait for each other, or None where they do not.

    GNU's OpenMP lets them spin for milliseconds after each operation, unless it was told otherwise before it was
    loaded.  Where other programs run on the same cores, that is time taken from those that compute: with eight such on
    2 cores of a Xeon a block of pair layers took 10 times as long (2026-11, 96 residues, whoever's layers).
    """
    if "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ or torch.get_num_threads() == 1:
        return None
    if sys.platform != "linux":
        return None
    return (
        "if other programs run on these cores, set OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=10000 before Python starts, "
        "and OMP_NUM_THREADS to how many cores are free: threads that wait for each other take most of the time else"
    )


@dataclass(frozen=True)
class Upload:
    """A copy to a device, in flight."""

    _copy: Tensor
    _done: torch.cuda.Event | None

    def wait(self) -> Tensor:
        """Return the copy for the current stream, which waits for it; this process does not."""
        if self._done is not None:
            current = torch.cuda.current_stream(self._copy.device)
            current.wait_event(self._done)
            self._copy.record_stream(current)  # the side stream owns it, and must not reuse it before `current` is done
        return self._copy


@dataclass(frozen=True)
class Snapshot:
    """Copies of tensors in host memory, in flight: what happens to the tensors from now on does not change them."""

    _copies: dict[str, Tensor]
    _done: torch.cuda.Event | None

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Snapshot":
        """Begin to copy tensors by name; those on a GPU to pinned memory, behind what the current stream has to do.

        Views of one buffer are copied with it at once, from the first to the last: of thousands of parameters each
        would need pinned memory of its own, which takes the system longer to make than the copy.
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
            copy.copy_(whole, non_blocking=whole.device.type != "mps")  # for which there is no event to wait for
            for name, x in zip(names, views):
                copies[name] = copy.as_strided(x.shape, x.stride(), x.storage_offset() - begin)
        on_gpu = next((x.device for x in tensors.values() if x.is_cuda), None)
        done = None if on_gpu is None else torch.cuda.current_stream(on_gpu).record_event()
        return cls({name: copies[name] for name in tensors}, done)

    def wait(self) -> dict[str, Tensor]:
        """Return the copies when they are complete; called by a thread, only that one waits."""
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
        with torch.cuda.device(self.device):  # pinning creates a context on the thread's current device
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    @property
    def buffer(self) -> Callable[[int], Tensor] | None:
        """What a loader receives bytes into before they are copied: `host`, or nothing where none is pinned."""
        return None if self._stream is None else self.host

    def start(self, buffer: Tensor) -> Upload:
        """Begin to copy a buffer that `host` returned; call `wait` on the result to use the copy.

        `buffer` may be freed at once: torch keeps pinned memory until the copies from it are done.
        """
        if self._stream is None:
            return Upload(buffer.to(self.device), None)
        with torch.cuda.stream(self._stream):
            return Upload(buffer.to(self.device, non_blocking=True), self._stream.record_event())


class OnHost:
    """A tensor that autograd saved: in host memory, from the forward pass until the backward pass asks for it.

    It comes back with the strides that it had.  An operation that saved some channels of a padded buffer knows how far
    apart they lay, and reads them so.
    """

    def __init__(self, x: Tensor, stream: torch.cuda.Stream | None, earlier: "OnHost | None") -> None:
        """stream: what copies; None where x is on the host itself.  earlier: the one that was saved before this."""
        self._device, self._stream = x.device, stream
        self._earlier = None if earlier is None else weakref.ref(earlier)
        self._copy: Upload | None = None
        self._shape = x.shape
        x = x[tuple(slice(None) if step else slice(1) for step in x.stride())]  # once, where it was expanded
        self._size, self._strides = x.shape, x.stride()
        self._host = torch.empty_like(x, device="cpu", pin_memory=stream is not None)
        if stream is None:
            self._host.copy_(x)
            return
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            self._host.copy_(x, non_blocking=True)
        x.record_stream(stream)  # its memory is not used again before the copy is done

    def fetch(self) -> None:
        """Begin to copy it back."""
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
        """Return it on the device, and begin to copy back the one saved before it, which is probably asked for next."""
        self.fetch()
        assert self._copy is not None
        x, self._copy = self._copy.wait(), None
        if self._earlier is not None and (earlier := self._earlier()) is not None:
            earlier.fetch()
        return x


class Offload:
    """Within it, large CUDA tensors that autograd saves for the backward pass wait in pinned host memory.

    Both ways they are copied on a stream of their own while the device computes.  Parameters, and what was made of them
    as a view, stay.  A tensor that several operations save is copied for each.
    """

    LEAST = 2**20  # bytes; what is smaller is not worth a copy

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._last: weakref.ref[OnHost] | None = None

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Move what is saved within the context."""
        with saved_tensors_hooks(self._pack, self._unpack):
            yield

    def moves(self, x: Tensor) -> bool:
        """Return whether a tensor that autograd saves goes to the host."""
        base = x if x._base is None else x._base
        on_gpu = x.is_cuda or (x.is_meta and backend(x) == "triton")  # or stands for what is
        return on_gpu and x.nbytes >= self.LEAST and not (base.is_leaf and base.requires_grad)

    def _pack(self, x: Tensor) -> Tensor | OnHost:
        if not self.moves(x):
            return x
        if x.is_cuda and self._stream is None:
            self._stream = torch.cuda.Stream(x.device)
        kept = OnHost(x.detach(), self._stream, None if self._last is None else self._last())
        self._last = weakref.ref(kept)
        return kept

    @staticmethod
    def _unpack(kept: Tensor | OnHost) -> Tensor:
        return kept.take() if isinstance(kept, OnHost) else kept


# Graphs


ALIGNED = 512  # bytes, as of what torch allocates on a GPU
Named = dict[str, Tensor]
Function = Callable[[Mapping[str, Tensor]], Named]


class Recorder(Protocol):
    """What can record the work that a function gives to a device, to have it done again without the function."""

    def warm_up(self, function: Callable[[], Named]) -> tuple[Named, bool]:
        """Call a function as it will be recorded; return what it returns, and whether the call left anything behind in
        memory that graphs recorded before will write to."""
        ...

    def record(self, function: Callable[[], Named]) -> tuple[Named, Callable[[], None]]:
        """Record a call of a function; return its results' memory, and what does its work: it is not done yet.

        What the function does `between` is left to each replay.
        """
        ...


_cut: list[Callable[[Callable[[], object]], None]] = []  # of the recording under way: leaves an action to its replays


def between(action: Callable[[], object]) -> None:
    """Do something on the host that no graph can hold, such as sending to other ranks.

    Or to compute what no device can: it may read tensors of the call, and write to them.
    In a call that is recorded: not now, but in each replay, when what was recorded before has been given to the device
    and before what follows.  No message that was recorded before is under way then.
    """
    if _cut:
        _cut[-1](action)
    else:
        action()


@contextmanager
def cutting(cut: Callable[[Callable[[], object]], None]) -> Iterator[None]:
    """Hand over what is done `between` within the context."""
    _cut.append(cut)
    try:
        yield
    finally:
        _cut.pop()


class CUDARecorder:
    """CUDA graphs.  They share one pool of memory, as no two of them run at the same time and none keeps anything."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        with torch.cuda.device(device):
            self._pool = torch.cuda.MemPool()
        # torch 2.11 cannot record into a pool whose last graph was deleted ("use_count > 0" of its pinned memory).  A
        # graph that lives as long as the pool lets all other graphs be deleted.
        self._first: Callable[[], None] | None = None

    def warm_up(self, function: Callable[[], Named]) -> tuple[Named, bool]:
        """Call a function on the stream of the recording, where kernels, caches and workspaces are made ready.

        It takes its memory from the graphs' pool, which keeps it: elsewhere as much again would lie unused beside.  But
        what a graph wrote to between its inputs and results is free in that pool, and each replay writes there again.
        So the results are copied out of it; and what stays there, such as a table that the function made for all later
        calls, is seen from the addresses that are held.
        """
        current, held = torch.cuda.current_stream(self._device), self._held()
        self._stream.wait_stream(current)
        with self._here():
            with torch.cuda.use_mem_pool(self._pool, self._device):
                made = function()
            results = {name: x.clone() for name, x in made.items()}
            del made
        current.wait_stream(self._stream)
        for result in results.values():
            result.record_stream(current)
        return results, not self._held() <= held

    def _held(self) -> set[int]:
        """Return the addresses in the graphs' pool of what tensors hold."""
        found: set[int] = set()
        for segment in self._pool.snapshot():
            address = segment["address"]
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    found.add(address)
                address += block["size"]
        return found

    def record(self, function: Callable[[], Named]) -> tuple[Named, Callable[[], None]]:
        """Capture a call of a function, as one graph, or several and what the host does between them.

        Raises: RuntimeError where the function cannot be captured, or leaves memory in the graphs' pool: an earlier
        graph may use the same memory, and only a replay would fill it.
        """
        if self._first is None:
            self._first = self._capture(lambda: {"x": torch.zeros(1, device=self._device)})[1]
        held = self._held()
        results, replay = self._capture(function)
        if not self._held() <= held:
            gc.collect()  # tensors in reference cycles, which were not collected during the capture
            if left := self._held() - held:
                raise RuntimeError(f"{len(left)} tensors that were made in the recording are still in use")
        return results, replay

    def _capture(self, function: Callable[[], Named]) -> tuple[Named, Callable[[], None]]:
        steps: list[Callable[[], object]] = []
        graph: torch.cuda.CUDAGraph | None = None  # being captured
        # thread_local: the threads of a loader may allocate memory meanwhile.
        how: dict[str, Any] = {"pool": self._pool.id, "capture_error_mode": "thread_local"}

        def begin() -> None:
            nonlocal graph
            made = torch.cuda.CUDAGraph()
            made.capture_begin(**how)
            graph = made

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
                    # The error of `function` says why the capture failed; that of capture_end only says that it did.
                    with suppress(RuntimeError):
                        graph.capture_end()
            end()
        return results, replay

    @contextmanager
    def _here(self) -> Iterator[None]:
        """Work on the stream of recordings within the context.

        In one thread: a pool serves the thread that asks for it, and a capture ends where it began; but a backward pass
        has a thread of its own unless it is told not to.
        """
        with torch.cuda.stream(self._stream), torch.autograd.set_multithreading_enabled(False):
            yield


@contextmanager
def uncollected() -> Iterator[None]:
    """Leave cyclic garbage where it is within the context."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def find_recorder(device: torch.device) -> Recorder | None:
    """Return a recorder for the device, or None where it has no graphs."""
    return CUDARecorder(device) if device.type == "cuda" else None


@dataclass(frozen=True)
class _Graph:
    """A recorded call: the memory of its inputs and of its results, and what does its work."""

    inputs: Named
    results: Named
    replay: Callable[[], None]

    def __call__(self, inputs: Mapping[str, Tensor]) -> Named:
        _copy_all(self.inputs, inputs)
        self.replay()
        found = {name: torch.empty_like(x) for name, x in self.results.items()}
        _copy_all(found, self.results)
        return found


def _copy_all(into: Named, given: Mapping[str, Tensor]) -> None:
    """Copy tensors to others of their names, shapes and dtypes: one call for all of a dtype, as most are small."""
    for dtype in {x.dtype for x in into.values()}:
        names = [name for name, x in into.items() if x.dtype == dtype]
        torch._foreach_copy_([into[name] for name in names], [given[name] for name in names])


class Graphs:
    """Call functions of tensors; what was called before with the same shapes is recorded once and then replayed.

    A function may depend on its inputs, and on memory that is overwritten between calls and never replaced; on the
    device it may change such memory.  It reads nothing on the host.  The first call with inputs of some shapes and
    dtypes is an ordinary one, in which kernels are compiled and constants go to the device; the second is recorded.

    Messages are recorded too where all ranks that take part make the same calls: NCCL wants each message in the graphs
    of all of them, or of none.  agreed: returns whether it was given True on any of these ranks.

    refused: why calls were not replayed, and how often.  replayed: calls that were; recorded: graphs there are;
    rerecorded: graphs that were dropped, to be recorded again, because a first call left memory in their pool.
    """

    MOST = 64  # shapes; the graph of the one that was called least recently is deleted for a further one

    def __init__(self, agreed: Callable[[bool], bool] = bool) -> None:
        self.refused: Counter[str] = Counter()
        self.most = self.MOST
        self._agreed = agreed
        self.replayed = self.rerecorded = 0
        self._recorder: Recorder | None = None
        # What graphs are given and return lies in two buffers that serve one after another: of each graph it would be
        # as large as z.
        self._buffers = {"inputs": torch.empty(0, dtype=torch.uint8), "results": torch.empty(0, dtype=torch.uint8)}
        self._graphs: dict[Hashable, _Graph | None] = {}  # the last call's at the end; None: called once

    @property
    def recorded(self) -> int:
        """How many graphs there are."""
        return sum(graph is not None for graph in self._graphs.values())

    def call(
        self, function: Function, inputs: Mapping[str, Tensor], context: Hashable = (), reason: str | None = None
    ) -> Named:
        """Call the function, or replay it; the results are new tensors, without a gradient.

        context: what else must be the same for a graph to serve again.  reason: why this call cannot be recorded.
        Errors: UserError where recording fails.
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
            # Kernels are compiled for the alignment and the strides of the memory that the recording will read: no code
            # can be loaded while a stream captures.
            own = self._place(inputs, "inputs")
            _copy_all(own, inputs)
            results, left = self._recorder.warm_up(lambda: function(own))
            if self._agreed(left):  # graphs of before would write over it: they are recorded again
                self.rerecorded += self.recorded
                self._graphs = dict.fromkeys(self._graphs)
            self._graphs[called] = None
            self._place(results, "results")  # no buffer can grow in a recording
            return results
        graph = self._graphs.pop(called)
        if graph is None:
            graph = self._record(name, function, inputs)
        self._graphs[called] = graph
        self.replayed += 1
        return graph(inputs)

    def _record(self, name: str, function: Function, inputs: Mapping[str, Tensor]) -> _Graph:
        assert self._recorder is not None
        own = self._place(inputs, "inputs")
        _copy_all(own, inputs)

        def call() -> Named:
            found = function(own)
            results = self._place(found, "results")
            _copy_all(results, found)
            return results

        try:
            results, replay = self._recorder.record(call)
        except (torch.OutOfMemoryError, LostError):
            raise
        except RuntimeError as error:
            raise UserError(f"plan.graph: {name} cannot be recorded ({error}); set plan.graph = false") from error
        return _Graph(own, results, replay)

    def _place(self, like: Mapping[str, Tensor], what: str) -> Named:
        """Return memory for tensors of these shapes, in the buffer of inputs or results."""
        sizes = [-(-x.nbytes // ALIGNED) * ALIGNED for x in like.values()]
        if sum(sizes) > len(self._buffers[what]):  # graphs that were recorded before keep the smaller one
            device = next(x.device for x in like.values())
            self._buffers[what] = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        parts = zip(like.items(), self._buffers[what][: sum(sizes)].split(sizes))
        return {name: part[: x.nbytes].view(x.dtype).view(x.shape) for (name, x), part in parts}

    def _refuse(self, reason: str) -> None:
        self.refused[reason] += 1
        if self.refused[reason] == 1:
            log.info("%s", reason)


def device_of(value: Any, local_rank: int | None = None) -> str:
    """Return the device to run on; None: the first CUDA GPU, or the CPU.

    local_rank: which of several processes on a machine this is; each takes a GPU of its own.  On a CPU, the allocator
    keeps freed memory from now on: whatever folds or trains, from Python or the command line, asks here.
    Errors: UserError for one that torch does not know or this machine lacks.
    """
    if value is not None and not isinstance(value, str | torch.device):
        raise UserError(f'device = {value!r}: a name is needed, such as "cpu" or "cuda:1"')
    name = ("cuda" if torch.cuda.is_available() else "cpu") if value is None else str(value)
    if not re.fullmatch(r"cpu|mps(:0)?|(cuda|xpu|hpu|mtia)(:\d+)?", name):
        if (meant := device_meant(name)) is None:
            raise UserError(
                f"--device {name}: not known; give cpu, cuda, cuda:1 and so on, or mps on a Mac (the model of a GPU is "
                "for `warpfold plan` alone)"
            )
        missing = _why_missing(meant)
        cure = f"give {meant}" if missing is None else f"{meant}: {missing}"
        raise UserError(f"--device {name}: not known; {cure}")
    # Neither gloo nor NCCL takes tensors of an Apple GPU.
    if reason := unsupported_on_mps(name, {"several processes": local_rank is not None}):
        raise UserError(reason)
    if name == "cuda" and local_rank is not None:
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"process {local_rank} of this machine needs a GPU of its own, but there are "
                f"{torch.cuda.device_count()}; start no more processes than GPUs (Slurm: --gpus-per-node, not "
                "--gpus-per-task), or run with --device cpu"
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
    """Log once that the kernels do not run on a device."""
    if notice := slow_notice(torch.device(name)):
        log.warning("--device %s: %s", name, notice)


def device_meant(name: str) -> str | None:
    """Return what torch calls the device that a name means, "cuda" of "GPU" and "cuda:0" of "0"; None: no idea."""
    plain = name.strip().lower()
    if number := re.fullmatch(r"(?:cuda|gpu)?\s*:?\s*(\d+)", plain):
        return f"cuda:{int(number[1])}"
    if plain == "gpu" and torch.backends.mps.is_available():
        return "mps"
    kind = plain.partition(":")[0]
    kind = MEANT.get(kind, kind)
    return kind if kind in ("cpu", "cuda", "mps") else None


def _why_missing(name: str) -> str | None:
    """Return why there is no such device here or why it does not compute, and what to give; None: it computes."""
    index = torch.device(name).index or 0
    is_found = name.startswith("cuda") and index < torch.cuda.device_count()
    if is_found and (unusable := capabilities(torch.device(name)).unusable):
        return unusable
    try:
        # An allocation succeeds on a GPU for which torch has no code; a launch does not.
        torch.zeros(1, device=name).add_(1).item()
    except (RuntimeError, AssertionError) as error:
        if is_found:
            return f"torch cannot compute on it ({str(error).splitlines()[0]}); see what nvidia-smi says, or give cpu"
    else:
        return None
    other = "cpu, or mps (this Mac's GPU)" if torch.backends.mps.is_available() else "cpu"
    if name.startswith("mps"):
        if not torch.backends.mps.is_built():
            return f"torch {torch.__version__} was built without it: it is for Macs with an Apple processor; give cpu"
        return "torch finds no Apple GPU here: it needs an M1 or newer, and macOS 14; give cpu"
    if not name.startswith("cuda"):
        return f"torch {torch.__version__} finds none such here; give {other}"
    if not torch.backends.cuda.is_built():
        cure = "" if "mps" in other else ", or install another build (docs/install.md)"
        return f"torch {torch.__version__} was built without CUDA; give {other}{cure}"
    count = torch.cuda.device_count()
    if not count:
        return f"torch finds no GPU here; give {other}, or look at what nvidia-smi says"
    return f"there is none such here; give cpu, or one of {', '.join(f'cuda:{i}' for i in range(count))}"
