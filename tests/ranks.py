"""Run a function on several ranks: forked processes that communicate by gloo.  Starting them takes about 0.2 s.

`run_ranks` returns the results of ranks that all succeed.  `Crew` runs ranks as `warpfold` does under torchrun, of
which some may fail, freeze or die.
"""

import faulthandler
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing import connection, forkserver, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch

# Forked children share the modules that this loads. Otherwise each child would spend seconds loading them.
import torch._dynamo
import torch.distributed as dist

from warpfold.errors import UserError
from warpfold.parallel.plan import Plan
from warpfold.parallel.team import ProcessInfo, Team, distributed_context

T = TypeVar("T")
FINE, FAILED = 0, 7
# Seconds after which a process of a `Crew` counts as not ending.
WAITED = 100.0
# A store is kept for so many seconds.
LONG = 130.0


class RankError(AssertionError):
    """One or more ranks failed.  The message holds their tracebacks in the order of the failures."""


def forget_fork_server() -> None:
    """Make a forked process start a fork server of its own: that of its parent belongs to the parent."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_pid = server._forkserver_alive_fd = server._forkserver_address = None


def _begin(function: Callable[[Connection], object], pipe: Connection) -> None:
    torch.set_num_threads(1)
    forget_fork_server()
    function(pipe)


@contextmanager
def forked(functions: Sequence[Callable[[Connection], object]]) -> Iterator[list[tuple[BaseProcess, Connection]]]:
    """Run each function in a forked process with one thread, and kill the processes at the end of the context.

    Each function receives its end of a pipe.  Yields the processes and the other ends.
    """
    context, started = get_context("fork"), list[tuple[BaseProcess, Connection]]()
    try:
        for function in functions:
            ours, theirs = context.Pipe()
            process = context.Process(target=_begin, args=(function, theirs))
            process.start()
            theirs.close()
            started.append((process, ours))
        yield started
    finally:
        for process, _ in started:
            process.kill()
            process.join()


def descendants(pid: int | str) -> list[Path]:
    """Return the /proc entries of all descendants of a process; empty without /proc."""
    listing = Path(f"/proc/{pid}/task/{pid}/children")
    own = listing.read_text().split() if listing.exists() else []
    return [Path("/proc") / child for child in own] + [entry for child in own for entry in descendants(child)]


def run_ranks(function: Callable[..., T], ranks: int, *args: Any, timeout: float = 120) -> list[T]:
    """Run `function(*args)` in `ranks` processes with torch.distributed initialised (gloo).

    The processes are forked, so the function may be a closure, and arguments are not copied. Each rank has one thread.
    A result may contain tensors without a graph.
    timeout: limit in seconds for the whole call and for each collective.
    Returns the results in rank order.  Raises RankError if a rank raises, dies or exceeds the limit, and ends the
    other ranks.
    """
    with tempfile.TemporaryDirectory() as folder:
        meet = Path(folder) / "store"
        with forked([partial(_rank, function, args, rank, ranks, meet, timeout) for rank in range(ranks)]) as started:
            processes, pipes = zip(*started)
            return _gather(pipes, processes, time.monotonic() + timeout)


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


def _use_loopback() -> None:
    """Let gloo use the loopback interface, since the machine's name may resolve to an address that does not work."""
    if os.path.exists("/sys/class/net/lo"):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def _rank(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    ranks: int,
    meet: Path,
    timeout: float,
    pipe: Connection,
) -> None:
    """Run the function in a child process.

    Tensors are sent through shared memory, so the process waits until the parent has received all results.
    """
    _use_loopback()
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


# Ranks that may fail


class Crew:
    """Processes that meet at a store of this process, like torchrun's agent, unless `keep_store` is called."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, None
        self.keeper: BaseProcess | None = None

    def run(
        self,
        function: Callable[[Team], object],
        plan: Plan,
        keeps: bool = False,
        lost: Sequence[int] = (),
        nodes: Sequence[int] = (),
        late: float = 0.0,
        address: str = "127.0.0.1",
        enter: Callable[[int], None] | None = None,
    ) -> tuple[list[int | None], list[str]]:
        """Run `function` in each of the plan's processes; returns exit codes (-9: it did not end) and their stderr.

        keeps: rank 0 runs the store.  lost: ranks that freeze or end, which are not waited for.  nodes: the number of
        ranks on each machine; by default all are on one.  late: seconds by which the last rank is late.
        address: of the store.  enter: called first by each process, with its machine; the default is this machine.
        """
        ranks = plan.data * plan.axial * plan.branch
        places = [(node, local, size) for node, size in enumerate(nodes or (ranks,)) for local in range(size)]
        functions = [
            partial(
                self._live, function, plan, None if enter is None else partial(enter, node),
                ProcessInfo(rank, ranks, local, size, address, agent_keeps_store=not keeps),
            )
            for rank, (node, local, size) in enumerate(places)
        ]  # fmt: skip
        with forked(functions) as started:
            port = free_port() if keeps else self._port()
            for rank, (_, pipe) in enumerate(started):
                time.sleep(late if rank == ranks - 1 else 0)
                pipe.send(port)
            for rank, (process, _) in enumerate(started):
                if rank not in lost:
                    process.join(WAITED)
        if self.keeper is not None:
            self.keeper.kill()
            self.keeper.join()
        said = [(self.folder / f"{rank}.txt").read_text() for rank in range(ranks)]
        return [process.exitcode for process, _ in started], said

    def keep_store(self) -> int:
        """Run the store in a separate process; returns its pid."""
        context = get_context("fork")
        ours, theirs = context.Pipe()
        self.keeper = context.Process(target=keep, args=(theirs,))
        self.keeper.start()
        self._port = ours.recv
        return self.keeper.pid or 0

    def _port(self) -> int:
        # After the forks, because it starts a thread.
        if self.store is None:
            self.store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30))
        return self.store.port

    def _live(
        self,
        function: Callable[[Team], object],
        plan: Plan,
        enter: Callable[[], None] | None,
        process: ProcessInfo,
        pipe: Connection,
    ) -> None:
        (enter or _use_loopback)()
        sys.stderr = open(self.folder / f"{process.rank}.txt", "w", buffering=1)  # noqa: SIM115 (ends with the process)
        try:
            with distributed_context(replace(process, port=pipe.recv()), plan) as team:
                function(team)
        except UserError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            cause = error.__cause__
            while cause is not None:
                print(f"caused by {type(cause).__name__}", file=sys.stderr)
                cause = cause.__cause__
            os._exit(FAILED)
        os._exit(FINE)


def keep(pipe: Connection) -> None:
    """Run a store, and send its port."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30))
    pipe.send(store.port)
    time.sleep(LONG)


def free_port() -> int:
    """Find an unused port."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
