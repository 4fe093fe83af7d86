"""The processes of a run: how they find each other, what they tell each other, and who is missing when one waits.

`torchrun` starts them and says to each which one it is.  A job that is restarted meets under a new name: left over
addresses of the processes before must not be found (torch keeps one store for all attempts, and its count of restarts
is not the same on all machines).
"""

import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from warpfold.errors import UserError
from warpfold.parallel.collectives import Event, all_gather, sizes_of, watched
from warpfold.parallel.exchange import overheard
from warpfold.parallel.mesh import Group, Mesh, check_grid, make_mesh
from warpfold.parallel.plan import Plan
from warpfold.parallel.pulse import Clock, Place, Pulse, TeamError
from warpfold.parallel.waits import Work, waiting

PIECE = 2**26  # bytes of a broadcast that travel together
POLL = 0.1  # seconds between two looks, while processes meet


@dataclass(frozen=True)
class Launch:
    """This process's place among those that were started together; the default: it is alone."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0  # on its machine; also the number of its GPU
    ranks_per_node: int = 1
    address: str = ""  # of the store where they meet
    port: int = 0
    agent_keeps_store: bool = False  # torchrun's agent does; otherwise rank 0

    @property
    def keeper(self) -> str:
        """Who keeps the store where they meet."""
        return f"torchrun's agent at {self.address}:{self.port}" if self.agent_keeps_store else "rank 0"

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> "Launch":
        """From the environment variables that torchrun sets; alone where they are not.

        Errors: UserError for variables that are incomplete or no numbers.
        """
        if "WORLD_SIZE" not in variables:
            return cls()
        try:
            return cls(
                rank=int(variables["RANK"]),
                ranks=int(variables["WORLD_SIZE"]),
                local_rank=int(variables.get("LOCAL_RANK", 0)),
                ranks_per_node=int(variables.get("LOCAL_WORLD_SIZE", 1)),
                address=variables["MASTER_ADDR"],
                port=int(variables["MASTER_PORT"]),
                agent_keeps_store=variables.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True",
            )
        except (KeyError, ValueError) as error:
            raise UserError(f"WORLD_SIZE is set, but {error} is missing or no number; start with torchrun") from None


@dataclass
class Team:
    """The processes of a run, seen from one of them; the default: it is alone."""

    launch: Launch = field(default_factory=Launch)
    mesh: Mesh = field(default_factory=Mesh)
    place: Place = field(default_factory=Place)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def leads(self) -> bool:
        """Whether this process writes what one alone may write."""
        return self.launch.rank == 0

    @property
    def speaks(self) -> bool:
        """Whether it is the first of those that share its examples."""
        return self.mesh.model.rank == 0

    def share(self, value: Any, what: str) -> list[Any]:
        """What every process has to say, JSON-able, in the order of ranks; all must call it.  NaN and inf are kept."""
        self.place = Place(self.place.meetings + 1, name=what)
        return _all_gather(value, self.mesh.world, what)

    def share_example(self, value: Any, what: str) -> list[Any]:
        """The same among those that share an example."""
        self._went_on(what, slices=1)
        return _all_gather(value, self.mesh.model, what)

    def gather(self, x: Tensor, what: str) -> "Gathering":
        """Begin to gather a flat tensor of one length from every process; all must call it.  It travels meanwhile."""
        self.place = Place(self.place.meetings + 1, name=what)
        return _begin(x, self.mesh.world, what)

    def gather_example(self, x: Tensor, what: str) -> "Gathering":
        """The same among those that share an example."""
        self._went_on(what, slices=1)
        return _begin(x, self.mesh.model, what)

    def spoken(self, values: list[Any]) -> list[Any]:
        """Of what all shared, that of the first of each example: in the order of data ranks."""
        return values[:: self.mesh.model.size]

    def collect(self, x: Tensor, axis: int, length: int) -> Tensor | None:
        """Slices of a tensor on the axial ranks -> the whole, in the main memory of the first rank; None elsewhere."""
        self._went_on("a result for the first rank", slices=1)
        group, sizes = self.mesh.axial, sizes_of(length, self.mesh.axial.size)
        if self.mesh.branch.rank > 0:
            return None
        here = x.detach().cpu().contiguous()
        if group.size == 1:
            return here
        if group.rank > 0:
            if sizes[group.rank]:
                with waiting(self.place.name):
                    dist.send(here, group.ranks[0], group=group.handle)
            return None
        shape = list(here.shape)
        shape[axis] = length
        whole = here.new_empty(shape)
        for rank, part in enumerate(whole.split(sizes, axis)):
            there = here if rank == 0 else torch.empty_like(part, memory_format=torch.contiguous_format)
            if rank > 0 and sizes[rank]:
                with waiting(self.place.name):
                    dist.recv(there, group.ranks[rank], group=group.handle)
            part.copy_(there)
        return whole

    def from_first(self, value: Any, what: str) -> Any:
        """Return on every process what the first one gives, JSON-able; the others' value is not looked at.

        All must call it.  If the first one fails before it comes here, the others end with its reason.
        """
        self.place = Place(self.place.meetings + 1, name=what)
        if self.mesh.world.size == 1:
            return value
        data = _bytes_of(value) if self.leads else torch.empty(0, dtype=torch.uint8)
        length = torch.tensor([len(data)])
        self._broadcast(length)
        data = data if self.leads else data.new_empty(int(length))
        self._broadcast(data)
        return json.loads(bytes(data.tolist()))

    def tensors_from_first(self, tensors: Mapping[str, Tensor] | None, what: str) -> dict[str, Tensor]:
        """Return on every process the tensors, in main memory, that the first one gives; the others give None.

        All must call it.  They travel as bytes in pieces of `PIECE`, so every dtype arrives to the bit, and what is
        needed beside the tensors is one piece.
        """
        given = {name: x.detach().cpu().contiguous() for name, x in (tensors or {}).items()} if self.leads else {}
        table = [[name, str(x.dtype).removeprefix("torch."), list(x.shape)] for name, x in given.items()]
        table = self.from_first(table, what)
        if self.mesh.world.size == 1:
            return given
        found = given or {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in table}
        for piece in _pieces([x.view(-1).view(torch.uint8) for x in found.values() if x.numel()]):
            sent = torch.cat(piece)
            self._broadcast(sent)
            if not self.leads:
                for part, arrived in zip(piece, sent.split([len(part) for part in piece])):
                    part.copy_(arrived)
        return found

    def _broadcast(self, x: Tensor) -> None:
        with waiting(self.place.name):
            dist.broadcast(x, 0, group=self.mesh.world.handle)

    def note_slices(self, event: Event) -> None:
        """A collective of an example's slices began or was waited for."""
        self._went_on(f"{event.kind} of {event.name}{' (backward)' if event.backward else ''}", slices=1)

    def note_gradients(self, what: str) -> None:
        """A collective of gradients or weights began."""
        self._went_on(what, gradients=1)

    def _went_on(self, name: str, gradients: int = 0, slices: int = 0) -> None:
        with self._lock:  # exchanges begin in a thread of their own (parallel/reducer.py)
            at = self.place
            self.place = Place(at.meetings, at.gradients + gradients, at.slices + slices, name)


@dataclass(frozen=True)
class Gathering:
    """A tensor of every process of a group, on its way."""

    found: Tensor  # [processes, length]
    sent: Tensor
    work: Work

    def wait(self) -> Tensor:
        """Return the tensors of all, [processes, length], in the order of ranks."""
        self.work.wait()
        return self.found


def _begin(x: Tensor, group: Group, what: str) -> Gathering:
    x = x.contiguous()
    if group.size == 1:
        return Gathering(x[None], x, Work(None, what))
    found = x.new_empty(group.size * len(x))
    work = Work(all_gather(found, x, group=group.handle, async_op=True), what)
    return Gathering(found.view(group.size, -1), x, work)


def _bytes_of(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _pieces(flat: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield pieces of at most `PIECE` bytes in all, each a list of parts of the flat tensors of bytes."""
    piece: list[Tensor] = []
    room = PIECE
    for x in flat:
        while len(x):
            part, x = x[:room], x[room:]
            piece.append(part)
            room -= len(part)
            if not room:
                yield piece
                piece, room = [], PIECE
    if piece:
        yield piece


def _all_gather(value: Any, group: Group, what: str) -> list[Any]:
    if group.size == 1:
        return [value]
    text = _bytes_of(value)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size)]
    with waiting(what):
        dist.all_gather(sizes, torch.tensor([len(text)]), group=group.handle)
        longest = max(int(size) for size in sizes)
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
        dist.all_gather(parts, torch.nn.functional.pad(text, (0, longest - len(text))), group=group.handle)
    return [json.loads(bytes(part[: int(size)].tolist())) for part, size in zip(parts, sizes)]


@contextmanager
def assembled(launch: Launch, plan: Plan, device: torch.device | str = "cpu") -> Iterator[Team]:
    """The processes of a run, met: the process groups exist within it, and a lost process is an error that names it.

    When one fails, it tells the others why before it ends, and they end too: with a TeamError, or, should they be
    stuck where no error reaches them, by `os._exit`.  They may wait `plan.time_limit` for each other, not longer.
    Errors: UserError if there are not as many as the plan needs, or they do not meet; TeamError as described.
    """
    check_grid(plan.data, plan.axial, plan.branch, launch.ranks)
    if launch.ranks == 1:
        yield Team(launch)
        return

    def meeting(name: str, seconds: float) -> str:
        return f"rank {launch.rank}: {name} took more than {seconds:.0f} s: {launch.keeper} may be dead or frozen"

    team = Team(launch)
    with Clock(plan.time_limit, meeting) as clock:
        store = _meet(launch, plan, torch.device(device))
        sharing = lambda: team.mesh.model.ranks  # noqa: E731
        pulse = Pulse(
            store, launch.rank, launch.ranks, launch.keeper, plan.time_limit, clock, lambda: team.place, sharing
        )
        with pulse, watched(team.note_slices), overheard(team.note_gradients):
            team.mesh = make_mesh(plan.data, plan.axial, plan.branch, plan.time_limit)
            yield team
            team.share(None, "the end")  # so that nobody is gone who might hear that another failed
        # Only where all went well: otherwise it would wait for collectives that others never join.
        with waiting("the end of the process groups"):
            dist.destroy_process_group()


def _meet(launch: Launch, plan: Plan, device: torch.device) -> dist.Store:
    """Initialise torch.distributed: NCCL for tensors on GPUs, gloo for others.  Returns a store for the team's use."""
    limit = timedelta(seconds=plan.time_limit)
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    keeps = launch.rank == 0 and not launch.agent_keeps_store
    where = f"{launch.address}:{launch.port}"
    try:
        with waiting(f"reaching the store at {where}"):
            shared = dist.TCPStore(launch.address, launch.port, None, keeps, limit, wait_for_workers=False)
        with waiting(f"the meeting at {where}"):
            name = _name_of_meeting(shared, launch, plan.time_limit)
        store = dist.PrefixStore(f"warpfold-{name}", shared)
        with waiting(f"joining the {launch.ranks} processes"):
            dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.ranks, timeout=limit)
        with waiting(f"reaching the store at {where} again"):
            own = dist.TCPStore(launch.address, launch.port, None, False, limit)  # asked while the other waits
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        raise TeamError(f"rank {launch.rank}: the {launch.ranks} processes did not meet at {where}: {why}") from error
    return dist.PrefixStore(f"warpfold-{name}-pulse", own)


def _name_of_meeting(store: dist.Store, launch: Launch, limit: float) -> str:
    """A name that no meeting before had: rank 0's, once it has heard of all that they go by it.

    What the processes before left in the store cannot be mistaken for it: every process signs with a word of its own.
    Errors: RuntimeError if some do not come.
    """
    word, end = uuid4().hex, time.monotonic() + limit
    if launch.rank == 0:
        store.set("warpfold-meeting", word)
        missing = {f"warpfold-{word}-{rank}": rank for rank in range(1, launch.ranks)}
        signed = []
        while missing:
            for key in [key for key in missing if store.check([key])]:
                signed.append(store.get(key).decode())
                del missing[key]
            _wait_until(end, f"no sign of rank {', '.join(map(str, sorted(missing.values())))}")
        store.set(f"warpfold-{word}-all", " ".join(signed))
        return word
    while True:
        if store.check(["warpfold-meeting"]):
            name = store.get("warpfold-meeting").decode()  # perhaps of the meeting before
            store.set(f"warpfold-{name}-{launch.rank}", word)
            if store.check([f"warpfold-{name}-all"]) and word in store.get(f"warpfold-{name}-all").decode():
                return name
        _wait_until(end, "no word from rank 0")


def _wait_until(end: float, reason: str) -> None:
    if time.monotonic() > end:
        raise RuntimeError(reason)
    time.sleep(POLL)
