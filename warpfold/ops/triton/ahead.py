"""Compile kernels before their first launch, in parallel processes, into Triton's own cache.

    compile_ahead(launches, target, tell)     # launches: of cost.launches.launches_of, for example

The processes are ordinary subprocesses that run `main`.  A fork would inherit the CUDA context and the threads of
this process, and processes of `multiprocessing` would import the user's script again.  A kernel is sent to a process as
a line of JSON with its name and its specialisation by Triton.
"""

import hashlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import PTXASError
from triton.compiler import ASTSource
from triton.compiler import compile as triton_compile
from triton.compiler.compiler import make_backend
from triton.compiler.errors import CompilationError
from triton.runtime.cache import get_cache_key, get_cache_manager

from warpfold.errors import UserError
from warpfold.memory import host_memory
from warpfold.ops.triton.compile import compiled, identity, make_launcher, reason, source
from warpfold.ops.triton.launch import DOTS, KERNELS, KernelLaunch, kernels

# (compiled kernels, kernels to compile, a line of text)
Tell = Callable[[int, int, str], object]
# Memory that a process with torch and LLVM may need.
WORKER_BYTES = 2**30
# A process takes some seconds to import torch. For fewer kernels this process compiles them itself.
FEW = 2
POLL_SECONDS = 0.5
# A pass of the compiler raises RuntimeError. Making a launcher fails without libcuda or without a C compiler.
FAILURES = (PTXASError, CompilationError, RuntimeError, AssertionError, OSError, subprocess.SubprocessError)
# The process finds modules where this one does.
BEGIN = f"import sys; sys.path[:0] = sys.argv[1:]; from {__name__} import main; main()"


@dataclass
class Compilations:
    """The result of `compile_ahead`: cached kernels, compiled kernels, and reasons of failures."""

    cached: int = 0
    compiled: int = 0
    failed: list[str] = field(default_factory=list)


def cache_folder() -> Path:
    """Return the folder of Triton's cache."""
    return Path(triton.knobs.cache.dir)


def is_cached(launch: KernelLaunch, target: GPUTarget) -> bool:
    """Return whether Triton's cache has the code of a launch, by Triton's own key."""
    specialised, options = source(launch, target)
    environment = get_cache_invalidating_env_vars()
    key = get_cache_key(specialised, make_backend(target), options, env_vars=environment)
    files = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    # Triton shortens the name like this, too.
    name = f"{specialised.name[:150]}.json"
    return name in (files.get_group(name) or {})


def compile_ahead(
    launches: Sequence[KernelLaunch],
    target: GPUTarget,
    tell: Tell = lambda done, total, what: None,
    workers: int | None = None,
    launchers: bool = False,
    again: bool = False,
) -> Compilations:
    """Compile the kernels of some launches that Triton's cache lacks, and report kernels that do not compile.

    tell: receives the progress, counted in missing kernels.
    workers: the number of processes; None: one per core, if memory suffices.
    launchers: also make the C launchers of Triton 3.6, which needs a C compiler and libcuda.
    again: include kernels in the cache, whose launchers may be missing.

    One process per machine compiles at a time, even if there are several ranks or runs.  The others wait for a lock,
    and then find the kernels in the cache, so that ranks exchange no messages.  On a file system without locks each
    process compiles its missing kernels.  This is safe, because Triton completes its files by atomic renames.
    Raises OSError if the cache cannot be written.
    """
    distinct = {identity(launch, target): launch for launch in launches}
    missing = [launch for launch in distinct.values() if not is_cached(launch, target)]
    result = Compilations(cached=len(distinct) - len(missing))
    if not missing and not again:
        return result
    with _one_at_a_time(lambda: tell(0, len(missing), "waiting for another process that compiles kernels")):
        todo = list(distinct.values()) if again else [launch for launch in missing if not is_cached(launch, target)]
        result.cached += 0 if again else len(missing) - len(todo)
        if not todo:
            return result
        workers = min(_most_workers() if workers is None else workers, len(todo))
        outcomes = (
            _compile_here(todo, target, launchers)
            if len(todo) < FEW or workers < 1
            else _compile_in_processes(todo, target, workers, launchers)
        )
        line = f"compiling {len(todo)} kernel{'s' if len(todo) > 1 else ''}, {{}} done; kept in {cache_folder()}"
        tell(0, len(todo), line.format(0))
        for done, (was_cached, failure) in enumerate(outcomes, 1):
            if failure:
                result.failed.append(failure)
            elif not was_cached:
                result.compiled += 1
            tell(done, len(todo), line.format(done))
    return result


def _most_workers() -> int:
    """Return the number of compiling processes: one per core that this process may use, if memory suffices."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Ignore memory if the system does not report how much is free.
    with suppress(UserError):
        available = min(available, host_memory() // WORKER_BYTES)
    return max(1, available)


@contextmanager
def _one_at_a_time(wait: Callable[[], object]) -> Iterator[None]:
    """Hold the lock of Triton's cache; wait: called before waiting for another process."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        file = stack.enter_context((folder / "warpfold.lock").open("a"))
        try:
            import fcntl
        except ImportError:  # Windows
            yield
            return
        is_told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not is_told:
                    wait()
                is_told = True
                time.sleep(POLL_SECONDS)
            except OSError:  # file system without locks
                break
        yield


def _compile_here(todo: Sequence[KernelLaunch], target: GPUTarget, launchers: bool) -> Iterator[tuple[bool, str]]:
    """Compile kernels one after another; yield for each whether the cache had it, and the reason of a failure."""
    for launch in todo:
        was_cached = is_cached(launch, target)
        try:
            kernel = compiled(launch, target)
            if launchers:
                make_launcher(kernel)
        except FAILURES as error:
            yield was_cached, f"{launch.kernel.name} {launch.key} {launch.config}: {reason(error)}"
        else:
            yield was_cached, ""


def _compile_in_processes(
    todo: Sequence[KernelLaunch], target: GPUTarget, workers: int, launchers: bool
) -> Iterator[tuple[bool, str]]:
    """Compile kernels in processes, which each take the next kernel after finishing one; yield like `_compile_here`."""
    jobs: queue.SimpleQueue[KernelLaunch] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[bool, str]] = queue.SimpleQueue()
    for launch in todo:
        jobs.put(launch)
    with ExitStack() as stack:
        for _ in range(workers):
            process = subprocess.Popen(
                [sys.executable, "-c", BEGIN, *filter(None, sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            thread = threading.Thread(target=_feed, args=(process, jobs, done, target, launchers), daemon=True)
            stack.callback(_end, process, thread)
            thread.start()
        for _ in todo:
            yield done.get()


def _feed(
    process: "subprocess.Popen[str]",
    jobs: "queue.SimpleQueue[KernelLaunch]",
    done: "queue.SimpleQueue[tuple[bool, str]]",
    target: GPUTarget,
    launchers: bool,
) -> None:
    """Send kernels to a process one after another.  If the process ends, its kernels fail, and the run continues."""
    assert process.stdin is not None
    assert process.stdout is not None
    while True:
        try:
            launch = jobs.get_nowait()
        except queue.Empty:
            return
        name = f"{launch.kernel.name} {launch.key} {launch.config}"
        try:
            process.stdin.write(json.dumps(_job(launch, target, launchers)) + "\n")
            process.stdin.flush()
            was_cached, failure = json.loads(process.stdout.readline())
            done.put((was_cached, f"{name}: {failure}" if failure else ""))
        except (OSError, ValueError):
            done.put((False, f"{name}: its process ended"))


def _end(process: "subprocess.Popen[str]", thread: threading.Thread) -> None:
    process.kill()
    process.wait()
    thread.join()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            pipe.close()  # type: ignore[union-attr]


# ---- kernels as JSON


def _job(launch: KernelLaunch, target: GPUTarget, launchers: bool) -> dict[str, Any]:
    """Describe a kernel to the process that compiles it, as plain values."""
    specialised, _ = source(launch, target)
    return {
        "kernel": launch.kernel.name,
        "signature": [[name, _plain(kind)] for name, kind in specialised.signature.items()],
        "constants": [[list(path), _plain(value)] for path, value in specialised.constants.items()],
        "attributes": [[list(path), value] for path, value in specialised.attrs.items()],
        "options": launch.options,
        "target": [target.backend, target.arch, target.warp_size],
        "launchers": launchers,
    }


def _plain(value: Any) -> Any:
    """Convert a type or a constant of a kernel to JSON; tuples keep their names, because Triton's key has them."""
    if isinstance(value, tl.constexpr):
        return {"constexpr": _plain(value.value)}
    if isinstance(value, tuple):
        return {
            "tuple": type(value).__name__,
            "fields": getattr(value, "_fields", None),
            "values": list(map(_plain, value)),
        }
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{value!r}: a constant that has no form in JSON")


def _value(plain: Any) -> Any:
    """Convert the JSON of `_plain` back to the value."""
    if not isinstance(plain, dict):
        return plain
    if "constexpr" in plain:
        return tl.constexpr(_value(plain["constexpr"]))
    values = tuple(map(_value, plain["values"]))
    # Triton reads the fields of a named tuple, and its key holds the name.
    return namedtuple(plain["tuple"], plain["fields"])(*values) if plain["fields"] else values


def _compile_job(job: dict[str, Any]) -> tuple[bool, str]:
    """Compile the kernel of a job; return whether the cache had it, and the reason of a failure."""
    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda **compilation: hits.append(compilation["cache_hit"])
    target = GPUTarget(*job["target"])
    specialised = ASTSource(
        KERNELS[job["kernel"]].function,
        {name: _value(kind) for name, kind in job["signature"]},
        {tuple(path): _value(value) for path, value in job["constants"]},
        {tuple(path): value for path, value in job["attributes"]},
    )
    options = job["options"] | {DOTS: tuple(job["options"][DOTS])}
    try:
        kernel = triton_compile(specialised, target, make_backend(target).parse_options(options).__dict__)
        if job["launchers"]:
            make_launcher(kernel)
    except FAILURES as error:
        return False, reason(error)
    return hits == [True], ""


def main() -> None:
    """Compile the kernel of each line of standard input, and answer with a line."""
    kernels()
    for line in sys.stdin:
        print(json.dumps(_compile_job(json.loads(line))), flush=True)
