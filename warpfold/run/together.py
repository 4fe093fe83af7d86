"""What the processes of a run tell each other on the way.  One that is alone hears itself, and nothing changes."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict

from torch import Tensor

from warpfold.data.loader import Loader, Sample
from warpfold.errors import UserError
from warpfold.parallel.team import Team
from warpfold.run.ledger import Ledger
from warpfold.run.signals import StopSignals
from warpfold.run.watch import Clock, Seen


def take(examples: Loader, number: int, clock: Clock, team: Team) -> Iterator[Sample]:
    """The next examples of this process.

    Errors: UserError on all that share one, if they have not the same: one of them could not make it.
    """
    for _ in range(number):
        with clock.waiting():
            example = next(examples)
        names = team.share_example([example.index, example.name], "the next example")
        if any(name != names[0] for name in names):
            said = ", ".join(f"rank {rank} has {name}" for rank, (_, name) in zip(team.mesh.model.ranks, names))
            raise UserError(
                f"example {example.index}: {said}, but they share it; one of them could not make it, for lack of "
                "memory perhaps; the same command continues from the last checkpoint"
            )
        yield example


def summed(parts: Mapping[str, Tensor], team: Team) -> dict[str, float]:
    """Numbers of an example, of which each process that shares it has a part of the sum."""
    plain = {name: float(part.detach()) for name, part in parts.items()}
    said = team.share_example(plain, "the losses")
    return {name: sum(part[name] for part in said) for name in plain}


def heard(signals: StopSignals, team: Team) -> int:
    """The signal on which the run is to stop, which may have come to any process; 0: none."""
    return max(team.share(signals.came, "stopping or going on"))


def meet(step: int, seen: list[Seen], clock: Clock, examples: Loader, ledger: Ledger, team: Team) -> list[Seen]:
    """The end of a step: all its examples, by number.

    The clock has then waited as long as the process that waited longest, and all know which entries any set aside.
    """
    own = {"seen": [asdict(one) for one in seen], "waited": clock.waited, "aside": ledger.news()}
    said = team.share(own, f"the end of step {step}")
    clock.waited = max(one["waited"] for one in said)
    for one in said:
        for name, index, reason in one["aside"]:
            examples.quarantine.add(name, index, reason)
    ledger.news()  # which all have heard now
    every = [Seen(**example) for one in team.spoken(said) for example in one["seen"]]
    return sorted(every, key=lambda example: example.index)
