"""Ranks for tests: a function run by several forked processes that speak gloo, in some 0.2 s."""

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
import torch._dynamo  # what it loads, forked children share: without it each would load it for itself, seconds
import torch.distributed as dist

T = TypeVar("T")


class RankError(AssertionError):
    """One or more ranks failed; the message holds their tracebacks, the first to fail first."""


def run_ranks(function: Callable[..., T], ranks: int, *args: Any, timeout: float = 120) -> list[T]:
    """`function(*args)` in `ranks` processes with torch.distributed initialised (gloo); the results in rank order.

    The processes are forked: the function may be a closure, and arguments are not copied.  A result may hold tensors
    (without a graph).  One thread per rank.  timeout: seconds for all of it, and for any one collective.
    Errors: RankError when a rank raises, dies or does not come back in time; the others are ended.
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
                end = min(end, time.monotonic() + 1)  # what the others say about it is of less interest
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
    """One rank's life.  It stays until all results were received: tensors travel as shared memory."""
    torch.set_num_threads(1)
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_pid = server._forkserver_alive_fd = server._forkserver_address = None  # the parent's, not ours
    if os.path.exists("/sys/class/net/lo"):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # whatever this machine's name resolves to
    limit = timedelta(seconds=timeout)
    faulthandler.dump_traceback_later(0.9 * timeout)  # where it hangs goes to stderr, which pytest shows
    try:
        # A file, not a server: a thread of the parent's may hold a lock when it forks, and the child waits for ever.
        store = dist.FileStore(str(meet), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
        pipe.send((True, function(*args)))
        pipe.recv()
        dist.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
