"""The processes of a run: how they meet, and what they tell each other outside of the computation.

`torchrun` or `srun` starts them and tells each its rank.  A job that is restarted meets under a new name, so that
nobody finds the addresses of the processes before it (torch keeps one store for all attempts, and its count of restarts
is not the same on all machines).

What a process asks of the store does not grow with their number, but for rank 0's one question and one answer: at 2,048
processes a list that each of them reads would be 138 MB of one server's.
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
    begin_largest,
    digest,
    pieces,
    to_bytes,
)
from warpfold.parallel.plan import Plan
from warpfold.parallel.process import ProcessInfo
from warpfold.parallel.waits import Event, waiting, watched

BROADCAST_BYTES = 2**26  # bytes of a broadcast that are sent together
MANY = 64  # processes: more of them connect to each other only when they first send something (cli/common.py)
POLL = 0.1  # seconds between the first two looks at the store, while others finish their work; then longer, to a beat
# Seconds between two looks at the store, first and last.  Where a blocking read times out, torch prints a warning, and
# first asks a name server for the name of the peer.
FIRST, LAST = 0.1, 0.5
NAMED = 10  # missing ranks, and hosts, that an error lists at most
SPARE_FILES = 1024  # that a process may have open besides its connections


@dataclass
class Team:
    """The processes of a run, seen from one of them; the default: it is alone.

    Every process, or every one that shares the example, must call the collectives below.  what: a name for messages.
    """

    process: ProcessInfo = field(default_factory=ProcessInfo)
    mesh: Mesh = field(default_factory=Mesh)
    position: Position = field(default_factory=Position)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    _alone: dist.Store = field(default_factory=dist.HashStore, repr=False, compare=False)  # for one process
    failure: Callable[[], str] = field(default=str, repr=False, compare=False)  # why another process has failed, or ""
    relieve: Callable[[int], None] = field(default=lambda ranks: None, repr=False, compare=False)
    _meshes: dict[tuple[int, ...], Mesh] = field(default_factory=dict, repr=False, compare=False)

    @property
    def _store(self) -> dist.Store:
        """What all processes can write to and read, whatever they are doing."""
        if self.process.ranks + self.process.idle == 1:
            return self._alone
        world = dist.group.WORLD
        assert world is not None
        return dist.PrefixStore("team", world.get_group_store())

    def remesh(self, plan: Plan, idle: bool = False) -> Mesh:
        """Have the processes work as a plan says from now on; return its mesh, which is also `mesh`.

        All must call it with the same plan (`broadcast` tells them), while nothing is under way.  Groups that were made
        once are used again.  idle: processes that the plan leaves over are in no group from now on (`wait_idle`).
        Errors: UserError if the processes do not fill the plan's grid, or have to be more.
        """
        sizes, ranks = (plan.data, plan.axial, plan.branch), self.process.ranks
        left = max(ranks - math.prod(sizes), 0) if idle else 0
        check_grid(*sizes, ranks - left)
        if left or sizes not in self._meshes:
            self._enter_global(f"the groups of {' x '.join(map(str, sizes))} ranks")
            self._meshes[sizes] = make_mesh(*sizes, self.mesh.limit, left)
        self.mesh = self._meshes[sizes]
        if left:
            used = ranks - left
            on_node = min(self.process.ranks_per_node, used)
            self.process = replace(self.process, ranks=used, idle=self.process.idle + left, ranks_per_node=on_node)
            self.relieve(used)
        return self.mesh

    def wait_idle(self) -> Any:
        """Wait, as a process that the plan leaves over, until the others are done; return what rank 0 tells then.

        It does not leave, so that it can stand in when the job is restarted after a loss.
        Errors: TeamError if one of the others fails.
        """
        while not self._store.check(["done"]):
            if reason := self.failure():
                raise TeamError(reason)
            time.sleep(BEAT / 4)
        told = json.loads(self._store.get("done"))
        self._store.add("left", 1)
        return told

    def tell_idle(self, value: Any) -> None:
        """Tell those that wait, on rank 0, that all is done; return when they know: the store may end with it."""
        if not (self.process.idle and self.is_rank_zero):
            return
        self._store.set("done", json.dumps(value))
        end = time.monotonic() + 10 * BEAT  # a process that is gone by now is not missed
        while self._store.add("left", 0) < self.process.idle and time.monotonic() < end:
            time.sleep(POLL)

    def smallest(self, value: float, what: str) -> float:
        """Return the smallest of all processes' values, such as the free memory of their devices."""
        return -self.largest(-value, what)

    def largest(self, value: float, what: str) -> float:
        """Return the largest of all processes' values."""
        return float(self.begin_largest(torch.tensor([value], dtype=torch.float64), what).wait())

    def begin_largest(self, x: Tensor, what: str) -> PendingGather:
        """Begin to find the largest of all processes' x, number by number: [1, length]."""
        self._enter_global(what)
        return begin_largest(x, self.mesh.world, what)

    def if_different(self, value: Any, what: str) -> list[Any]:
        """Return every process's value, JSON-able, in the order of ranks, if they are not all the same; else nothing.

        Digests are compared, so that where all is well no process gets what all have.
        """
        own = digest(value)
        largest, smallest = self.begin_largest(torch.tensor([own, -own]), what).wait()[0].tolist()
        return [] if largest == -smallest else self.all_gather_object(value, what)

    def take(self, what: str) -> int:
        """Return the next of the numbers 0, 1, 2 ... that nobody has taken under this name.

        For work that is shared out as it is done: all processes that share an example get the same number.
        """
        number = None
        if self.is_example_leader:
            with waiting(f"a number of {what}"):
                number = self._store.add(f"taken-{what}", 1) - 1
        found: int = self.all_gather_object_of_example(number, what)[0]
        return found

    def wait_for_all(self, what: str) -> None:
        """Wait until all processes are here, however long they compute before: after work that each took its share of.

        Errors: TeamError if one fails meanwhile.
        """
        self._record_progress(what)
        round, here = divmod(self._store.add(f"here-{what}", 1) - 1, self.process.ranks)
        all_here, pause = f"all-here-{what}-{round}", POLL
        if here == self.process.ranks - 1:
            self._store.set(all_here, "")
        while not self._store.check([all_here]):
            if reason := self.failure():
                raise TeamError(reason)
            time.sleep(pause)
            pause = min(1.5 * pause, BEAT)

    @property
    def is_rank_zero(self) -> bool:
        """Whether this process writes what only one may write."""
        return self.process.rank == 0

    @property
    def is_example_leader(self) -> bool:
        """Whether it is the first of those that share its examples."""
        return self.mesh.model.rank == 0

    def all_gather_object(self, value: Any, what: str, to_all: bool = True) -> list[Any]:
        """Return every process's value, JSON-able, in the order of ranks.  NaN and inf are kept.

        to_all: or on rank 0 alone, and nothing on the others.
        """
        self._enter_global(what)
        return all_gather_object(value, self.mesh.world, what, to_all)

    def all_gather_object_of_example(self, value: Any, what: str) -> list[Any]:
        """Return the values of those that share this process's example."""
        self._record_progress(what, slices=1)
        return all_gather_object(value, self.mesh.model, what)

    def all_gather(self, x: Tensor, what: str, to_all: bool = True) -> PendingGather:
        """Begin to gather a flat tensor, of the same length on every process.  to_all: or only on rank 0."""
        self._enter_global(what)
        return begin_gather(x, self.mesh.world, what, to_all)

    def all_gather_of_example(self, x: Tensor, what: str) -> PendingGather:
        """Begin to gather a flat tensor from those that share this process's example."""
        self._record_progress(what, slices=1)
        return begin_gather(x, self.mesh.model, what)

    def of_example_leaders(self, values: list[Any]) -> list[Any]:
        """Pick those of the example leaders from values gathered from all processes; in the order of data ranks."""
        return values[:: self.mesh.model.size]

    def gather_shards(
        self, x: Tensor, axis: int, length: int, dtype: torch.dtype | None = None, out: Tensor | None = None
    ) -> Tensor | None:
        """Join the axial ranks' shards in the main memory of the first of them; return None on the others.

        They come in pieces of at most `BROADCAST_BYTES` (`pieces_of_shards`), so no device holds more than its shard
        and a piece, and no other rank's memory more than a piece.  dtype: of the result; each piece is cast alone.
        out: where to join them on the first rank, such as a file that is mapped to memory.
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
        """Yield on the first axial rank every piece of the whole, in order, in main memory, with where it begins.

        On the others it yields nothing, but must be gone through to its end: they send meanwhile.  At least one piece,
        even of nothing.  x: this rank's shard; a piece is some of it along `axis`, of `BROADCAST_BYTES` or one row.
        """
        self._record_progress("a result for the first rank", slices=1)
        group, dtype = self.mesh.axial, dtype or x.dtype
        if self.mesh.branch.rank > 0:
            return
        others = [size for at, size in enumerate(x.shape) if at != axis % x.ndim]
        rows = max(BROADCAST_BYTES // max(math.prod(others) * dtype.itemsize, 1), 1)
        begin = 0
        for rank, size in enumerate(shard_sizes(length, group.size)):
            for start in range(0, max(size, rank == 0), rows):
                count = min(rows, size - start)
                if rank == group.rank:
                    piece = x.detach().narrow(axis, start, count).to("cpu", dtype).contiguous()
                    if rank > 0:
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
        """Return on every process the value, JSON-able, of rank 0; those of the others are ignored.

        If rank 0 fails before it comes here, the others end with its reason.
        """
        self._enter_global(what)
        if self.mesh.world.size == 1:
            return value
        data = to_bytes(value) if self.is_rank_zero else torch.empty(0, dtype=torch.uint8)
        length = torch.tensor([len(data)])
        self._broadcast(length)
        data = data if self.is_rank_zero else data.new_empty(int(length))
        self._broadcast(data)
        return json.loads(bytes(data.tolist()))

    def broadcast_tensors(self, tensors: Mapping[str, Tensor] | None, what: str) -> dict[str, Tensor]:
        """Return on every process, in main memory, the tensors of rank 0; the others pass None.

        They are sent as bytes, so every dtype arrives to the bit, and in pieces of `BROADCAST_BYTES`, so that little
        memory is needed beside the tensors.
        """
        given = (
            {name: x.detach().cpu().contiguous() for name, x in (tensors or {}).items()} if self.is_rank_zero else {}
        )
        table = [[name, str(x.dtype).removeprefix("torch."), list(x.shape)] for name, x in given.items()]
        table = self.broadcast(table, what)
        if self.mesh.world.size == 1:
            return given
        found = given or {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in table}
        for piece in pieces([x.view(-1).view(torch.uint8) for x in found.values() if x.numel()], BROADCAST_BYTES):
            sent = torch.cat(piece)
            self._broadcast(sent)
            if not self.is_rank_zero:
                for part, arrived in zip(piece, sent.split([len(part) for part in piece])):
                    part.copy_(arrived)
        return found

    def _broadcast(self, x: Tensor) -> None:
        with waiting(self.position.name):
            dist.broadcast(x, 0, group=self.mesh.world.handle)

    def note(self, event: Event) -> None:
        """Note that a collective began or was waited for."""
        self._record_progress(event.title, **{event.carries: 1})

    def _enter_global(self, name: str) -> None:
        self.position = Position(self.position.meetings + 1, name=name)

    def _record_progress(self, name: str, gradients: int = 0, slices: int = 0) -> None:
        with self._lock:  # exchanges begin in a thread of their own (parallel/reducer.py)
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
    """Have the processes of a run meet; the process groups exist as long as the context lasts.

    plan: None: not chosen yet, so that each process is alone with its examples until `Team.remesh`.
    When one fails, it tells the others why before it ends, and they end too: with a TeamError, or, should they be
    stuck where no error reaches them, by `os._exit`.  They must meet within `plan.start_limit` seconds, and may later
    wait for each other `plan.time_limit` seconds; without a plan `start_limit` and `limit` count.
    Errors: UserError if there are not as many as the plan needs, or they do not meet; TeamError as described.
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
        team.failure, team.relieve = heartbeat.failure, heartbeat.relieve
        with heartbeat, watched(team.note):
            team.remesh(plan)
            # All must believe the same: of machines with 4 and 2 processes, that two neighbours share one.
            if unequal := team.if_different(process.ranks_per_node, "the processes of each machine"):
                team.process = replace(process, ranks_per_node=math.gcd(*unequal))
            yield team
            if not team.process.is_idle:
                team.all_gather_object(None, "the end")  # nobody leaves before all know that none has failed
        # Only if all went well: otherwise it would wait for collectives that others never join.
        with waiting("the end of the process groups"):
            dist.destroy_process_group()


def _initialise(process: ProcessInfo, plan: Plan, device: torch.device) -> dist.Store:
    """Initialise torch.distributed, NCCL for GPUs and gloo for CPUs; return a store for heartbeats."""
    limit, start_limit = timedelta(seconds=plan.time_limit), timedelta(seconds=plan.start_limit)
    backend, own_gpu = "gloo", None
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend, own_gpu = "cpu:gloo,cuda:nccl", torch.device("cuda", torch.cuda.current_device())
    allow_connections(process.ranks)
    keeps = process.rank == 0 and not process.agent_keeps_store
    where = f"{process.address}:{process.port}"
    try:
        with waiting(f"reaching the store at {where}"):
            shared = dist.TCPStore(process.address, process.port, None, keeps, start_limit, wait_for_workers=False)
        with waiting(f"the meeting at {where}"):
            node = platform.node()
            name = agree_on_name(shared, process.rank, process.ranks, plan.start_limit, node, process.on_node)
        shared.set_timeout(limit)
        store = dist.PrefixStore(f"warpfold-{name}", shared)
        with waiting(f"joining the {process.ranks} processes"):
            # With its GPU, NCCL connects now, and groups that are made later are split from this one.
            dist.init_process_group(backend, None, limit, process.ranks, process.rank, store, device_id=own_gpu)
        with waiting(f"reaching the store at {where} again"):
            own = dist.TCPStore(process.address, process.port, None, False, limit)  # a client of its own for its thread
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        raise TeamError(
            f"rank {process.rank}: the {process.ranks} processes did not meet at {where} within "
            f"{plan.start_limit:g} s: {why}. See why the missing ranks did not start, or give them longer "
            "(plan.start_limit, in training)"
        ) from error
    return dist.PrefixStore(f"warpfold-{name}-heartbeat", own)


def team_of(value: Any) -> Team:
    """Return the processes that share the work; None: this one alone."""
    if value is not None and not isinstance(value, Team):
        raise WrongArgument(
            f"team = {shown(value)}: a Team is needed, as in docs/howto/clusters.md; none for one process"
        )
    return value or Team()


def agree_on_name(
    store: dist.Store, rank: int, ranks: int, limit: float, host: str = "", on_host: range = range(0)
) -> str:
    """Agree on a name that no earlier meeting had: rank 0 draws it, and answers when all others have signed.

    Nothing that earlier processes left in the store can be mistaken for it: every process signs with a random word, and
    waits until its own word is answered.  host, on_host: where this process is, and the ranks that should be there.
    Errors: RuntimeError if some do not come within `limit` seconds; it names them, and their hosts if others are there.
    """
    word, end, pause = uuid4().hex, time.monotonic() + limit, FIRST
    sign = f"{word} {on_host.start} {on_host.stop} {host}"
    if rank == 0:
        store.set("warpfold-meeting", word)
        signed = [f"warpfold-{word}-{other}" for other in range(1, ranks)]
        while signed and not store.check(signed):
            if time.monotonic() > end:
                raise RuntimeError(_absent(store, signed, sign))
            time.sleep(FIRST)
        if signed:
            words = [found.decode().split()[0] for found in store.multi_get(signed)]
            store.multi_set([_answer(key) for key in signed], words)  # type: ignore[attr-defined]  # the stub lacks it
        return word
    name = ""
    while time.monotonic() < end:
        if store.check(["warpfold-meeting"]):
            found = store.get("warpfold-meeting").decode()  # perhaps that of an earlier meeting
            key = f"warpfold-{found}-{rank}"
            if found != name:
                store.set(key, sign)
                name = found
            if store.check([_answer(key)]) and store.get(_answer(key)).decode() == word:
                return name
        time.sleep(pause)
        pause = min(1.2 * pause, LAST)
    raise RuntimeError("no word from rank 0")


def _absent(store: dist.Store, signed: Sequence[str], own: str) -> str:
    """Say which ranks have not signed, and on which hosts the others are."""
    there = [store.check([key]) for key in signed]
    hosts: dict[int, str] = {}
    for sign in [own, *(store.get(key).decode() for key, came in zip(signed, there) if came)]:
        _, start, stop, host = sign.split(" ", 3)
        hosts |= dict.fromkeys(range(int(start), int(stop)), host)
    absent = [rank for rank, came in enumerate(there, 1) if not came]
    names = [f"{rank} ({hosts[rank]})" if hosts.get(rank) else f"{rank}" for rank in absent]
    says = f"no sign of rank {_first(names)}"
    known = dict.fromkeys(filter(None, hosts.values()))
    return f"{says}; others are on {_first(list(known))}" if known and set(absent) - set(hosts) else says


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"


def _answer(key: str) -> str:
    return f"{key}-answer"


def free_port() -> int:
    """Return a TCP port of this machine at which nothing listens now."""
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False).port


def allow_connections(ranks: int) -> None:
    """Raise this process's soft limit of open files, often 1,024, to what a connection to each of `ranks` ranks needs.

    Two groups may hold all ranks.  Where the hard limit is lower, that is taken: `warpfold doctor --cluster` says so.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * ranks + SPARE_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # a system that allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
