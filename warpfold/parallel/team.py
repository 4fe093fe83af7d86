"""The processes of a run: their rendezvous, and their communication outside of the model.

`torchrun` or `srun` starts the processes and assigns their ranks. A restarted job meets under a new name, so that no
process reads the addresses of an earlier attempt: torch uses one store for all attempts, and its count of restarts
differs between machines.

The load on the store per process does not grow with the number of processes, except for one request and one answer of
rank 0. With 2,048 processes, a list that every process reads would cost the server 138 MB.
"""

import json
import math
import platform
import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from warpfold.arguments import WrongArgument, shown
from warpfold.parallel.collectives import shard_sizes
from warpfold.parallel.heartbeat import BEAT, Heartbeat, Position, TeamError, Watchdog
from warpfold.parallel.mesh import START_LIMIT, TIME_LIMIT, Mesh, check_grid, make_mesh
from warpfold.parallel.messages import (
    PendingGather,
    all_gather_object,
    begin_gather,
    digest,
    pieces,
    to_bytes,
)
from warpfold.parallel.plan import Plan
from warpfold.parallel.process import ProcessInfo
from warpfold.parallel.waits import Event, Work, waiting, watched

# Bytes of a broadcast that are sent at once.
BROADCAST_BYTES = 2**26
# With more processes, connections are made only when they are first used (cli/common.py).
MANY = 64
# Seconds between the first two polls of the store while others finish their work. The interval grows to one BEAT.
POLL = 0.1
# Shortest and longest interval in seconds between polls of the store during the rendezvous. A blocking read is avoided:
# if it times out, torch prints a warning, after asking a name server for the name of the peer.
MIN_POLL, MAX_POLL = 0.1, 0.5
# Missing ranks, and hosts, that an error lists at most.
MAX_LISTED = 10
# Files that a process may have open in addition to its connections.
SPARE_FILES = 1024


@dataclass
class Team:
    """The processes of a run, seen from one of them. By default there is only one.

    Every process, or every process that shares the example, must call the collectives below. Their argument `what`
    names the collective in messages.
    failure: returns why another process has failed, or "".
    """

    process: ProcessInfo = field(default_factory=ProcessInfo)
    mesh: Mesh = field(default_factory=Mesh)
    position: Position = field(default_factory=Position)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    # The store of a single process.
    _alone: dist.Store = field(default_factory=dist.HashStore, repr=False, compare=False)
    failure: Callable[[], str] = field(default=str, repr=False, compare=False)
    ignore_idle_ranks: Callable[[int], None] = field(default=lambda ranks: None, repr=False, compare=False)
    _meshes: dict[tuple[int, ...], Mesh] = field(default_factory=dict, repr=False, compare=False)

    @property
    def _store(self) -> dist.Store:
        """A store that all processes can read and write at any time."""
        if self.process.ranks + self.process.idle == 1:
            return self._alone
        world = dist.group.WORLD
        assert world is not None
        return dist.PrefixStore("team", world.get_group_store())

    def remesh(self, plan: Plan, idle: bool = False) -> Mesh:
        """Create the groups of a plan; returns its mesh, which is also assigned to `mesh`.

        All processes must call it with the same plan (use `broadcast`) while no collective is in flight. Existing
        groups are reused. idle: allow processes that the plan does not use; they are in no group from now on
        (`wait_idle`).
        Raises UserError if the processes do not fill the plan's grid.
        """
        sizes, ranks = (plan.data, plan.axial, plan.branch), self.process.ranks
        idle_ranks = max(ranks - math.prod(sizes), 0) if idle else 0
        check_grid(*sizes, ranks - idle_ranks)
        if idle_ranks or sizes not in self._meshes:
            self._enter_global(f"the groups of {' x '.join(map(str, sizes))} ranks")
            self._meshes[sizes] = make_mesh(*sizes, self.mesh.limit, idle_ranks)
        self.mesh = self._meshes[sizes]
        if idle_ranks:
            used = ranks - idle_ranks
            on_node = min(self.process.ranks_per_node, used)
            self.process = replace(
                self.process, ranks=used, idle=self.process.idle + idle_ranks, ranks_per_node=on_node
            )
            self.ignore_idle_ranks(used)
        return self.mesh

    def wait_idle(self) -> Any:
        """Wait, as a process that the plan does not use, until the others are done; returns the value of `tell_idle`.

        The process stays alive so that it can replace a lost one when the job restarts.
        Raises TeamError if another process fails.
        """
        # The wait is unlimited, so it polls the store instead of joining a collective, which would time out.
        while not self._store.check(["done"]):
            if reason := self.failure():
                raise TeamError(reason)
            time.sleep(BEAT / 4)
        value = json.loads(self._store.get("done"))
        self._store.add("left", 1)
        return value

    def tell_idle(self, value: Any) -> None:
        """Release the idle processes with a value, on rank 0. Waits until they have read it, as the store may end."""
        if not (self.process.idle and self.is_rank_zero):
            return
        self._store.set("done", json.dumps(value))
        # Limited, because an idle process may have died unnoticed.
        end = time.monotonic() + 10 * BEAT
        while self._store.add("left", 0) < self.process.idle and time.monotonic() < end:
            time.sleep(POLL)

    def smallest(self, value: float, what: str) -> float:
        """Compute the minimum over all processes, for example of the free memory of their devices."""
        return -self.largest(-value, what)

    def largest(self, value: float, what: str) -> float:
        """Compute the maximum over all processes."""
        return float(self.begin_largest(torch.tensor([value], dtype=torch.float64), what).wait())

    def begin_largest(self, x: Tensor, what: str) -> PendingGather:
        """Start to compute the elementwise maximum of x over all processes, [1, length]."""
        self._enter_global(what)
        x, world = x.clone(), self.mesh.world
        work = None if world.size == 1 else dist.all_reduce(x, dist.ReduceOp.MAX, group=world.handle, async_op=True)
        return PendingGather(x[None], x, Work(work, what))

    def if_different(self, value: Any, what: str) -> list[Any]:
        """Gather the JSON values of all processes in the order of ranks if they differ; otherwise return an empty list.

        Digests are compared first, so that equal values are not sent to every process.
        """
        own_digest = digest(value)
        largest, smallest = self.begin_largest(torch.tensor([own_digest, -own_digest]), what).wait()[0].tolist()
        return [] if largest == -smallest else self.all_gather_object(value, what)

    def take(self, what: str) -> int:
        """Take the next of the numbers 0, 1, 2 ... under this name, for dynamic load balancing.

        All processes that share an example get the same number.
        """
        number = None
        if self.is_example_leader:
            with waiting(f"a number of {what}"):
                number = self._store.add(f"taken-{what}", 1) - 1
        taken_number: int = self.all_gather_object_of_example(number, what)[0]
        return taken_number

    def wait_for_all(self, what: str) -> None:
        """Wait without a time limit until all processes arrive, after work whose duration differs between them.

        Raises TeamError if a process fails meanwhile.
        """
        self._record_progress(what)
        round, arrival = divmod(self._store.add(f"here-{what}", 1) - 1, self.process.ranks)
        all_here, pause = f"all-here-{what}-{round}", POLL
        if arrival == self.process.ranks - 1:
            self._store.set(all_here, "")
        # A collective would time out, so the store is polled.
        while not self._store.check([all_here]):
            if reason := self.failure():
                raise TeamError(reason)
            time.sleep(pause)
            pause = min(1.5 * pause, BEAT)

    @property
    def is_rank_zero(self) -> bool:
        """Whether this process is rank 0, which writes shared files."""
        return self.process.rank == 0

    @property
    def is_example_leader(self) -> bool:
        """Whether this process is the first of those that share its examples."""
        return self.mesh.model.rank == 0

    def all_gather_object(self, value: Any, what: str, to_all: bool = True) -> list[Any]:
        """Gather the JSON values of all processes in the order of ranks. NaN and inf are allowed.

        to_all: on every process. Otherwise on rank 0, and the other processes get an empty list.
        """
        self._enter_global(what)
        return all_gather_object(value, self.mesh.world, what, to_all)

    def all_gather_object_of_example(self, value: Any, what: str) -> list[Any]:
        """Gather the JSON values of the processes that share this process's example."""
        self._record_progress(what, slices=1)
        return all_gather_object(value, self.mesh.model, what)

    def all_gather(self, x: Tensor, what: str, to_all: bool = True) -> PendingGather:
        """Start to gather a flat tensor of the same length from every process. to_all: otherwise on rank 0 only."""
        self._enter_global(what)
        return begin_gather(x, self.mesh.world, what, to_all)

    def all_gather_of_example(self, x: Tensor, what: str) -> PendingGather:
        """Start to gather a flat tensor from the processes that share this process's example."""
        self._record_progress(what, slices=1)
        return begin_gather(x, self.mesh.model, what)

    def of_example_leaders(self, values: list[Any]) -> list[Any]:
        """Select the values of the example leaders from those of all processes, in the order of data ranks."""
        return values[:: self.mesh.model.size]

    def gather_shards(
        self, x: Tensor, axis: int, length: int, dtype: torch.dtype | None = None, out: Tensor | None = None
    ) -> Tensor | None:
        """Gather the axial ranks' shards in the host memory of the first rank; returns None on the others.

        The shards are sent in pieces of at most `BROADCAST_BYTES` (`pieces_of_shards`). No device holds more than its
        shard and a piece, and the host memory of the other ranks holds no more than a piece.
        dtype: of the result; pieces are cast one by one. out: destination on the first rank, such as a memory-mapped
        file.
        """
        if self.mesh.axial.size == 1 and out is None and x.device.type == "cpu" and x.dtype == (dtype or x.dtype):
            return x.detach().contiguous() if self.is_example_leader else None
        whole = out
        for start, piece in self.pieces_of_shards(x, axis, length, dtype):
            if whole is None:
                shape = list(piece.shape)
                shape[axis] = length
                whole = piece.new_empty(shape)
            whole.narrow(axis, start, piece.shape[axis]).copy_(piece)
        return whole if self.is_example_leader else None

    def pieces_of_shards(
        self, x: Tensor, axis: int, length: int, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, piece) for all pieces of the full tensor in order, in host memory of the first axial rank.

        The other ranks yield nothing, but must exhaust the iterator, because they send meanwhile. The first rank yields
        at least one piece, even of no rows.
        x: this rank's shard. A piece has `BROADCAST_BYTES` along `axis`, or one row.
        """
        self._record_progress("a result for the first rank", slices=1)
        group, dtype = self.mesh.axial, dtype or x.dtype
        if self.mesh.branch.rank > 0:
            return
        other_sizes = [size for at, size in enumerate(x.shape) if at != axis % x.ndim]
        rows = max(BROADCAST_BYTES // max(math.prod(other_sizes) * dtype.itemsize, 1), 1)
        begin = 0
        for rank, size in enumerate(shard_sizes(length, group.size)):
            for start in range(0, max(size, rank == 0), rows):
                count = min(rows, size - start)
                if rank == group.rank:
                    piece = x.detach().narrow(axis, start, count).to("cpu", dtype).contiguous()
                    if rank > 0:
                        # Blocking: the first rank writes the pieces in order, and each may use much memory.
                        with waiting(self.position.name):
                            dist.send(piece, group.ranks[0], group=group.handle)
                elif group.rank == 0:
                    shape = list(x.shape)
                    shape[axis] = count
                    piece = torch.empty(shape, dtype=dtype)
                    with waiting(self.position.name):
                        dist.recv(piece, group.ranks[rank], group=group.handle)
                if group.rank == 0:
                    yield begin + start, piece
            begin += size

    def broadcast(self, value: Any, what: str) -> Any:
        """Send the JSON value of rank 0 to every process; values of other processes are ignored.

        If rank 0 fails before this call, the other processes end with its error.
        """
        self._enter_global(what)
        if self.mesh.world.size == 1:
            return value
        data = to_bytes(value) if self.is_rank_zero else torch.empty(0, dtype=torch.uint8)
        # The length comes first, because the receivers must allocate the buffer.
        length = torch.tensor([len(data)])
        self._broadcast(length)
        data = data if self.is_rank_zero else data.new_empty(int(length))
        self._broadcast(data)
        return json.loads(bytes(data.tolist()))

    def broadcast_tensors(self, tensors: Mapping[str, Tensor] | None, what: str) -> dict[str, Tensor]:
        """Send the tensors of rank 0 to the host memory of every process; the others pass None.

        Tensors are sent as bytes, which preserves every dtype bitwise, in pieces of `BROADCAST_BYTES`, which bounds the
        additional memory.
        """
        tensors = tensors if self.is_rank_zero and tensors is not None else {}
        result = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
        table = [[name, str(x.dtype).removeprefix("torch."), list(x.shape)] for name, x in result.items()]
        table = self.broadcast(table, what)
        if self.mesh.world.size == 1:
            return result
        result = result or {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in table}
        for piece in pieces([x.view(-1).view(torch.uint8) for x in result.values() if x.numel()], BROADCAST_BYTES):
            sent = torch.cat(piece)
            self._broadcast(sent)
            if not self.is_rank_zero:
                for part, received in zip(piece, sent.split([len(part) for part in piece])):
                    part.copy_(received)
        return result

    def _broadcast(self, x: Tensor) -> None:
        with waiting(self.position.name):
            dist.broadcast(x, 0, group=self.mesh.world.handle)

    def note(self, event: Event) -> None:
        """Record that a collective was started or waited for."""
        self._record_progress(event.title, **{event.carries: 1})

    def _enter_global(self, name: str) -> None:
        self.position = Position(self.position.meetings + 1, name=name)

    def _record_progress(self, name: str, gradients: int = 0, slices: int = 0) -> None:
        # A thread of the reducer starts exchanges, too (parallel/reducer.py).
        with self._lock:
            at = self.position
            self.position = Position(at.meetings, at.gradients + gradients, at.slices + slices, name)


@contextmanager
def distributed_context(
    process: ProcessInfo,
    plan: Plan | None,
    device: torch.device | str = "cpu",
    limit: float = TIME_LIMIT,
    start_limit: float = START_LIMIT,
) -> Iterator[Team]:
    """Initialise the processes of a run. The process groups exist within the context.

    plan: if None, each process has its own examples until `Team.remesh`, and `start_limit` and `limit` replace the time
    limits of the plan. The processes must meet within `plan.start_limit` seconds, and later wait for each other at most
    `plan.time_limit` seconds.
    A failing process reports its error to the others, which then end with a TeamError. If they wait where no error
    reaches them, they end by `os._exit`.
    Raises UserError if the number of processes does not fit the plan or they do not meet, and TeamError as described.
    """
    if plan is None:
        plan = Plan(data=process.ranks, time_limit=limit, start_limit=start_limit)
    check_grid(plan.data, plan.axial, plan.branch, process.ranks)
    if process.ranks == 1:
        yield Team(process)
        return

    def meeting(name: str, seconds: float) -> str:
        return f"rank {process.rank}: {name} took more than {seconds:.0f} s: {process.keeper} may be dead or frozen"

    team = Team(process, Mesh(limit=plan.time_limit))
    with Watchdog(max(plan.start_limit, plan.time_limit), meeting) as watchdog:
        beats = _initialise(process, plan, torch.device(device))
        watchdog.limit = plan.time_limit
        heartbeat = Heartbeat(
            beats,
            process.rank,
            process.ranks,
            process.keeper,
            plan.time_limit,
            watchdog,
            position=lambda: team.position,
            sharing=lambda: team.mesh.model.ranks,
        )
        team.failure, team.ignore_idle_ranks = heartbeat.failure, heartbeat.ignore_idle_ranks
        with heartbeat, watched(team.note):
            team.remesh(plan)
            # All processes must assume the same number per node. With machines of 4 and 2 processes, the greatest
            # common divisor says correctly that 2 neighbours share a node.
            if unequal := team.if_different(process.ranks_per_node, "the processes of each machine"):
                team.process = replace(process, ranks_per_node=math.gcd(*unequal))
            yield team
            if not team.process.is_idle:
                # A barrier: no process leaves before all know that none has failed.
                team.all_gather_object(None, "the end")
        # Only without errors: otherwise it would wait for collectives that other processes never join.
        with waiting("the end of the process groups"):
            dist.destroy_process_group()


def _initialise(process: ProcessInfo, plan: Plan, device: torch.device) -> dist.Store:
    """Initialise torch.distributed with NCCL for GPUs and gloo for CPUs; returns a store for heartbeats."""
    limit, start_limit = timedelta(seconds=plan.time_limit), timedelta(seconds=plan.start_limit)
    backend, own_gpu = "gloo", None
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend, own_gpu = "cpu:gloo,cuda:nccl", torch.device("cuda", torch.cuda.current_device())
    allow_connections(process.ranks)
    keeps = process.rank == 0 and not process.agent_keeps_store
    store_address = f"{process.address}:{process.port}"
    try:
        with waiting(f"reaching the store at {store_address}"):
            shared = dist.TCPStore(process.address, process.port, None, keeps, start_limit, wait_for_workers=False)
        with waiting(f"the meeting at {store_address}"):
            node = platform.node()
            name = agree_on_name(shared, process.rank, process.ranks, plan.start_limit, node, process.on_node)
        shared.set_timeout(limit)
        store = dist.PrefixStore(f"warpfold-{name}", shared)
        with waiting(f"joining the {process.ranks} processes"):
            # With a device, NCCL connects at once, and later groups are split from this communicator.
            dist.init_process_group(backend, None, limit, process.ranks, process.rank, store, device_id=own_gpu)
        with waiting(f"reaching the store at {store_address} again"):
            # The heartbeat's thread needs its own client, since a blocked request blocks its client.
            heartbeat_store = dist.TCPStore(process.address, process.port, None, False, limit)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise TeamError(
            f"rank {process.rank}: the {process.ranks} processes did not meet at {store_address} within "
            f"{plan.start_limit:g} s: {reason}. Check why the missing ranks did not start, or increase the limit "
            "(plan.start_limit, in training)."
        ) from error
    return dist.PrefixStore(f"warpfold-{name}-heartbeat", heartbeat_store)


def team_of(value: Any) -> Team:
    """Validate an argument `team`. None means a single process."""
    if value is not None and not isinstance(value, Team):
        raise WrongArgument(
            f"team = {shown(value)}: it must be a Team, as in docs/howto/clusters.md, or None for one process"
        )
    return value or Team()


def agree_on_name(
    store: dist.Store, rank: int, ranks: int, limit: float, host: str = "", on_host: range = range(0)
) -> str:
    """Agree on a name for this rendezvous: rank 0 draws it, and confirms it when all other ranks have registered.

    Entries that an earlier attempt left in the store do no harm: every process registers with a random word, and waits
    until rank 0 confirms this word.
    host: name of this process's host. on_host: the ranks that should run on it.
    Raises RuntimeError if ranks are missing after `limit` seconds. It names them, and their hosts if other ranks run
    there.
    """
    word, end, pause = uuid4().hex, time.monotonic() + limit, MIN_POLL
    sign = f"{word} {on_host.start} {on_host.stop} {host}"
    if rank == 0:
        store.set("warpfold-meeting", word)
        signed = [f"warpfold-{word}-{other}" for other in range(1, ranks)]
        while signed and not store.check(signed):
            if time.monotonic() > end:
                raise RuntimeError(_absent(store, signed, sign))
            time.sleep(MIN_POLL)
        if signed:
            words = [entry.decode().split()[0] for entry in store.multi_get(signed)]
            # torch's stub lacks `multi_set`.
            store.multi_set([_answer(key) for key in signed], words)  # type: ignore[attr-defined]
        return word
    name = ""
    while time.monotonic() < end:
        if store.check(["warpfold-meeting"]):
            # It may be the name of an earlier attempt, so it is read again in each iteration.
            proposed = store.get("warpfold-meeting").decode()
            key = f"warpfold-{proposed}-{rank}"
            if proposed != name:
                store.set(key, sign)
                name = proposed
            if store.check([_answer(key)]) and store.get(_answer(key)).decode() == word:
                return name
        time.sleep(pause)
        pause = min(1.2 * pause, MAX_POLL)
    raise RuntimeError("no word from rank 0")


def _absent(store: dist.Store, signed: Sequence[str], own: str) -> str:
    """Describe which ranks have not registered, and on which hosts the other ranks run."""
    has_signed = [store.check([key]) for key in signed]
    hosts: dict[int, str] = {}
    for sign in [own, *(store.get(key).decode() for key, came in zip(signed, has_signed) if came)]:
        _, start, stop, host = sign.split(" ", 3)
        hosts |= dict.fromkeys(range(int(start), int(stop)), host)
    absent = [rank for rank, came in enumerate(has_signed, 1) if not came]
    names = [f"{rank} ({hosts[rank]})" if hosts.get(rank) else f"{rank}" for rank in absent]
    message = f"no sign of rank {_listed(names)}"
    present = dict.fromkeys(filter(None, hosts.values()))
    has_unknown_host = set(absent) - set(hosts)
    return f"{message}; others are on {_listed(list(present))}" if present and has_unknown_host else message


def _listed(names: Sequence[str]) -> str:
    ending = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"{', '.join(names[:MAX_LISTED])}{ending}"


def _answer(key: str) -> str:
    return f"{key}-answer"


def free_port() -> int:
    """Find an unused TCP port of this machine."""
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False).port


def allow_connections(ranks: int) -> None:
    """Raise the soft limit of open files, often 1,024, so that this process can connect to all `ranks` ranks.

    Two groups may connect all ranks. A lower hard limit is used instead, and `warpfold doctor --cluster` reports it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed_files = 2 * ranks + SPARE_FILES
    if hard != resource.RLIM_INFINITY:
        needed_files = min(needed_files, hard)
    if soft != resource.RLIM_INFINITY and soft < needed_files:
        # Some systems reject values below the limit that they report.
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed_files, hard))
