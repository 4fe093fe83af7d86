"""The processes of a run: how they find each other, what they tell each other, and who is missing when one waits.

`torchrun` starts them and says to each which one it is.  A job that is restarted meets under a new name: left over
addresses of the processes before must not be found (torch keeps one store for all attempts).
"""

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from warpfold.errors import UserError
from warpfold.parallel.collectives import Event, watched
from warpfold.parallel.mesh import Mesh, make_mesh
from warpfold.parallel.plan import Plan

BEAT = 1.0  # seconds between signs of life
SILENT = 5 * BEAT  # after so long without one, a process is dead or frozen
BROKEN = ("timed out", "timeout", "connection closed", "connection reset", "connection refused", "broken pipe")


class TeamError(UserError):
    """A process of the run did not come where the others wait for it."""


@dataclass(frozen=True)
class Launch:
    """This process's place among those that were started together; the default: it is alone."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0  # on its machine; also the number of its GPU
    ranks_per_node: int = 1
    attempt: int = 0  # how often the job was restarted
    address: str = ""  # of the store where they meet
    port: int = 0
    agent_keeps_store: bool = False  # torchrun's agent does; otherwise rank 0

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
                attempt=int(variables.get("TORCHELASTIC_RESTART_COUNT", 0)),
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
    at: tuple[int, str] = (0, "the beginning")  # the last thing that this process waited for or began with others

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
        if self.launch.ranks == 1:
            return [value]
        self.at = (self.at[0] + 1, what)
        text = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.launch.ranks)]
        dist.all_gather(sizes, torch.tensor([len(text)]))
        longest = max(int(size) for size in sizes)
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
        dist.all_gather(parts, torch.nn.functional.pad(text, (0, longest - len(text))))
        return [json.loads(bytes(part[: int(size)].tolist())) for part, size in zip(parts, sizes)]

    def note(self, event: Event) -> None:
        """A collective of the plan began or was waited for."""
        self.at = (self.at[0] + 1, f"{event.kind} of {event.name}{' (backward)' if event.backward else ''}")


@contextmanager
def assembled(launch: Launch, plan: Plan, device: torch.device | str = "cpu") -> Iterator[Team]:
    """The processes of a run, met: the process groups exist within it, and a lost process is an error that names it.

    Errors: UserError if there are not as many as the plan needs, or they do not meet; TeamError as described.
    """
    if launch.ranks == 1:
        make_mesh(plan.data, plan.axial, plan.branch)
        yield Team(launch)
        return
    limit = timedelta(seconds=plan.time_limit)
    keeps = launch.rank == 0 and not launch.agent_keeps_store
    backend = "cpu:gloo,cuda:nccl" if torch.device(device).type == "cuda" else "gloo"
    try:
        shared = dist.TCPStore(launch.address, launch.port, launch.ranks, keeps, limit)
        store = dist.PrefixStore(f"warpfold-{launch.attempt}", shared)
        dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.ranks, timeout=limit)
    except (dist.DistError, RuntimeError) as error:
        where = f"{launch.address}:{launch.port}"
        raise TeamError(f"rank {launch.rank}: the {launch.ranks} processes did not meet at {where}: {error}") from None
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        team = Team(launch, make_mesh(plan.data, plan.axial, plan.branch, plan.time_limit))
        stack.enter_context(watched(team.note))
        pulse = stack.enter_context(_Pulse(team, plan.time_limit))
        try:
            yield team
        except RuntimeError as error:
            if any(sign in str(error).lower() for sign in BROKEN):
                raise TeamError(f"{pulse.missing()} ({str(error).splitlines()[0][:200]})") from error
            raise


class _Pulse:
    """Signs of life in the store, from a thread of its own: where each process is, and that it still is."""

    def __init__(self, team: Team, limit: float) -> None:
        launch = team.launch
        self._team = team
        store = dist.TCPStore(launch.address, launch.port, None, False, timedelta(seconds=min(limit, 60)))
        self._store = dist.PrefixStore(f"warpfold-{launch.attempt}-pulse", store)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> "_Pulse":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(2 * BEAT)

    def _beat(self) -> None:
        while not self._end.is_set():
            try:
                self._store.set(str(self._team.launch.rank), json.dumps([*self._team.at, time.time()]))
            except (RuntimeError, dist.DistError):
                return  # the store is gone: the run ends
            self._end.wait(BEAT)

    def missing(self) -> str:
        """Who did not arrive where this process waits, as far as the signs tell."""
        number, name = self._team.at
        here = f"rank {self._team.launch.rank} waited at {name!r} (number {number}) for others"
        found = []
        for rank in range(self._team.launch.ranks):
            if rank == self._team.launch.rank:
                continue
            try:
                there = self._store.check([str(rank)])
                at, where, when = json.loads(self._store.get(str(rank))) if there else (0, "nowhere", 0.0)
            except (RuntimeError, dist.DistError):
                return f"{here}; the store where they meet is gone too, so torchrun's agent or rank 0 has ended"
            silent = time.time() - when
            if not there or silent > SILENT:
                found.append(f"rank {rank} is dead or frozen: last heard of at {where!r} (number {at})")
            elif at < number:
                found.append(f"rank {rank} did not arrive: it is at {where!r} (number {at})")
        return f"{here}; " + ("; ".join(found) or "all of them are alive and as far: the network may be at fault")
