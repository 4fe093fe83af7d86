"""What the processes of a run tell each other on the way.  One that is alone hears itself, and nothing changes.

No step waits for any of it: numbers of fixed size travel while the backward pass or the optimiser works.  Where there
is more to say (an entry that was set aside, a long name), they say so, and all meet.
"""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from warpfold.data.load.loader import Loader, Sample
from warpfold.engine.log import Clock, Seen
from warpfold.engine.signals import StopSignals
from warpfold.errors import UserError
from warpfold.parallel.team import PendingGather, Team
from warpfold.run.ledger import Ledger

KEY = 64  # bytes of an example's name that fit into a message
NUMBERS = ("length", "index", "loss", "norm", "lddt_ca")  # of an example, float64 each: whole numbers below 2**53


def take(examples: Loader, number: int, clock: Clock, team: Team) -> Iterator[Sample]:
    """Yield this process's examples of a step, whose time begins here.

    Errors: UserError on all that share one, if they have not the same: one of them could not make it.
    """
    clock.begin()
    for _ in range(number):
        with clock.waiting():
            example = next(examples)
        # Before anything is computed: slices of different examples do not fit together.
        own = torch.tensor([example.index, zlib.crc32(example.name.encode())])
        every = team.all_gather_of_example(own, "the next example").wait()
        if bool((every != own).any()):
            names = team.all_gather_object_of_example([example.index, example.name], "the next example")
            said = ", ".join(f"rank {rank} has {name}" for rank, (_, name) in zip(team.mesh.model.ranks, names))
            raise UserError(
                f"example {example.index}: {said}, but they share it; one of them could not make it, for lack of "
                "memory perhaps; the same command continues from the last checkpoint"
            )
        yield example


@dataclass(frozen=True)
class Sums:
    """Numbers of an example, of which each process that shares it has a part of the sum."""

    names: tuple[str, ...]
    parts: PendingGather

    def wait(self) -> Tensor:
        """Return the sums [names], the same on all that share the example; float64, on the device."""
        first, *others = self.parts.wait()
        return sum(others, first)


def summing(parts: Mapping[str, Tensor], team: Team) -> Sums:
    """Begin to add up an example's numbers over the processes that share it: they travel during the backward pass."""
    own = torch.stack([part.detach().double() for part in parts.values()])
    return Sums(tuple(parts), team.all_gather_of_example(own, "the losses"))


def heard(signals: StopSignals, team: Team) -> int:
    """The signal on which the run is to stop, which may have come to any process; 0: none.  All wait for each other."""
    return max(team.all_gather_object(signals.came, "stopping or going on"))


@dataclass(frozen=True)
class Told:
    """What this process told the others at the end of a step, and what they tell it, on its way."""

    step: int
    seen: list[Seen]
    said: PendingGather


def tell(step: int, seen: list[Seen], clock: Clock, ledger: Ledger, signals: StopSignals, team: Team) -> Told:
    """Begin to tell the others what this process's examples of a step came to; `meet` has what all did."""
    keys = [example.key.encode() for example in seen]
    head = [signals.came, clock.waited, ledger.untold, max(map(len, keys))]
    numbers = [[getattr(example, name) for name in NUMBERS] + list(example.terms.values()) for example in seen]
    names = np.frombuffer(b"".join(key[:KEY].ljust(KEY, b"\0") for key in keys), np.float64)
    own = np.concatenate([np.array(head, np.float64), np.array(numbers, np.float64).ravel(), names])
    return Told(step, seen, team.all_gather(torch.from_numpy(own), f"the end of step {step}"))


def meet(told: Told, clock: Clock, examples: Loader, ledger: Ledger, team: Team) -> tuple[list[Seen], int]:
    """End a step: return all its examples, by number, and the signal on which the run is to stop after it (0: none).

    The clock has then waited as long as the process that waited longest, and all know which entries any set aside.
    A signal that came to any process before it told is heard by all; a later one is heard at the end of the next step.
    """
    every = told.said.wait()
    came, waited, aside, longest = every[:, :4].amax(0).tolist()
    clock.waited = waited
    if aside:
        for news in team.all_gather_object(ledger.news(), f"entries that were set aside until step {told.step}"):
            for name, index, reason in news:
                examples.quarantine.add(name, index, reason)
        ledger.news()  # which all have heard now
    if longest > KEY:
        said = team.all_gather_object([asdict(one) for one in told.seen], f"long names of step {told.step}")
        seen = [Seen(**example) for one in team.of_example_leaders(said) for example in one]
    else:
        spoken = every[:: team.mesh.model.size, 4:].contiguous()
        seen = _read(spoken.numpy(), len(told.seen), tuple(told.seen[0].terms))
    return sorted(seen, key=lambda example: example.index), int(came)


def _read(rows: np.ndarray, each: int, terms: tuple[str, ...]) -> list[Seen]:
    """Return the examples that were told, `each` of every row."""
    width = len(NUMBERS) + len(terms)
    found = []
    for row in rows:
        keys = row[each * width :].tobytes()
        for number, (length, index, loss, norm, lddt_ca, *rest) in enumerate(
            row[: each * width].reshape(each, width).tolist()
        ):
            key = keys[number * KEY : (number + 1) * KEY].rstrip(b"\0").decode()
            found.append(Seen(key, int(length), loss, norm, lddt_ca, dict(zip(terms, rest)), int(index)))
    return found
