"""Processes for tests of the doctor: ranks on emulated nodes, some of which end early."""

import contextlib
import json
import os
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch._dynamo  # imported before the forks, as each would import it again
import torch.distributed as dist

from warpfold.cluster import folder, links
from warpfold.parallel.team import ProcessInfo, Team, TeamError, distributed_context

# Seconds until a process counts as stuck
WAITED = 100.0

QUICK: dict[Any, dict[str, Any]] = {
    links: {
        "PINGS": 6, "REPEATS": 2, "PAIR_SECONDS": 0.002, "RING_SECONDS": 0.002, "MAX_BYTES": {"cpu": 2**19}, "CALLS": 3,
    },
    folder: {"REPLACE_SECONDS": 0.1, "VISIBLE_SECONDS": 0.3},
}  # fmt: skip


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the doctor measure only briefly; the measured speeds are meaningless."""
    for module, values in QUICK.items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)


def examine(
    function: Callable[[Team], Any],
    nodes: int = 2,
    per_node: int = 2,
    limit: float = 60.0,
    address: str = "127.0.0.1",
    enter: Callable[[int], None] | None = None,
    lost: tuple[int, ...] = (),
    sizes: tuple[int, ...] = (),
) -> list[Any]:
    """Run `function(team)` on each rank, and return the results, which must be JSON-compatible.

    If a rank fails, the result of another one is "error: ...".
    enter: called first by each process, with its node. lost: ranks that end or freeze, which are not waited for.
    sizes: the sizes of nodes that are not equal.
    """
    context, pipes, processes = get_context("fork"), [], []
    places = [(local, size) for size in sizes or (per_node,) * nodes for local in range(size)]
    for rank, (local, size) in enumerate(places):
        ours, theirs = context.Pipe()
        info = ProcessInfo(rank, len(places), local, size, address, agent_keeps_store=enter is None)
        processes.append(context.Process(target=_live, args=(function, info, limit, enter, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    store = None if enter else dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    found = []
    try:
        for pipe in pipes:
            pipe.send(29_777 if store is None else store.port)
        for rank, pipe in enumerate(pipes):
            found.append(_answer(pipe) if rank not in lost else None)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return found


def _answer(pipe: Connection) -> Any:
    assert pipe.poll(WAITED), "a rank did not come back in time"
    try:
        return json.loads(pipe.recv())
    except EOFError:
        return "error: it has ended without a word"


def _live(
    function: Callable[[Team], Any],
    info: ProcessInfo,
    limit: float,
    enter: Callable[[int], None] | None,
    pipe: Connection,
) -> None:
    torch.set_num_threads(1)
    if enter is None:
        # The name of this machine may resolve to any address.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    else:
        enter(info.rank // info.ranks_per_node)
    info = ProcessInfo(**{**vars(info), "port": pipe.recv()})
    with contextlib.suppress(BrokenPipeError):
        try:
            with distributed_context(info, None, "cpu", limit, limit) as team:
                found = function(team)
            pipe.send(json.dumps(found))
        except TeamError as error:
            pipe.send(json.dumps(f"error: {error}"))
    pipe.close()
    os._exit(0)
