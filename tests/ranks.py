"""Run a function on several ranks: forked processes that communicate by gloo.  Starting them takes about 0.2 s."""

import faulthandler
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import connection, forkserver, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch

# Forked children share the modules that this loads. Otherwise each child would spend seconds loading them.
import torch._dynamo
import torch.distributed as dist

T = TypeVar("T")


class RankError(AssertionError):
    """One or more ranks failed.  The message holds their tracebacks in the order of the failures."""


def run_ranks(function: Callable[..., T], ranks: int, *args: Any, timeout: float = 120) -> list[T]:
    """Run `function(*args)` in `ranks` processes with torch.distributed initialised (gloo).

    The processes are forked, so the function may be a closure, and arguments are not copied. Each rank has one thread.
    A result may contain tensors without a graph.
    timeout: limit in seconds for the whole call and for each collective.
    Returns the results in rank order.  Raises RankError if a rank raises, dies or exceeds the limit, and ends the
    other ranks.
    """
    context = get_context("fork")
    pipes, processes = [], []
    folder = tempfile.TemporaryDirectory()
    meet = Path(folder.name) / "store"
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=_rank, args=(function, args, rank, ranks, meet, timeout, theirs))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return _gather(pipes, processes, time.monotonic() + timeout)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        folder.cleanup()


def _gather(pipes: Sequence[connection.Connection], processes: Sequence[BaseProcess], end: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[str] = []
    waiting = dict(zip(pipes, range(len(pipes))))
    while waiting:
        ready = connection.wait(waiting, max(0.0, end - time.monotonic()))
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                fine, value = pipe.recv()
            except EOFError:
                processes[rank].join()
                fine, value = False, f"died with exit code {processes[rank].exitcode}\n"
            if fine:
                results[rank] = value
            else:
                failures.append(f"rank {rank}: {value}")
                # Wait only briefly for the other ranks, whose errors usually follow from this one.
                end = min(end, time.monotonic() + 1)
        if not ready:
            if not failures:
                failures.append(f"ranks {sorted(waiting.values())} did not come back in time\n")
            break
    if failures:
        raise RankError("\n" + "\n".join(failures))
    for pipe in pipes:
        pipe.send("all are received")
    for process in processes:
        process.join()
    return [results[rank] for rank in range(len(pipes))]


def _rank(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    ranks: int,
    meet: Path,
    timeout: float,
    pipe: connection.Connection,
) -> None:
    """Run the function in a child process.

    Tensors are sent through shared memory, so the process waits until the parent has received all results.
    """
    torch.set_num_threads(1)
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    # A fork server belongs to the parent process, so the child must not use it.
    server._forkserver_pid = server._forkserver_alive_fd = server._forkserver_address = None
    if os.path.exists("/sys/class/net/lo"):
        # The machine's name may resolve to an address that does not work.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = timedelta(seconds=timeout)
    # pytest shows stderr, so this prints the location of a hang.
    faulthandler.dump_traceback_later(0.9 * timeout)
    try:
        # Use a file instead of a server: if a thread of the parent held a lock during the fork, the child would wait
        # forever.
        store = dist.FileStore(str(meet), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
        pipe.send((True, function(*args)))
        pipe.recv()
        dist.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
