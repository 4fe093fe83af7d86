"""Exchange what the processes of a run have to tell each other in each step.  A single process runs the same code.

No step waits for it: messages of fixed size travel while the backward pass or the optimizer works.  What all must know
is five numbers, the largest of all ranks'; what is for the log goes to rank 0 alone.  If a rank has more to tell (an
entry that was set aside, a long name, an example that is not finite), all ranks gather it.
"""

import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch

from warpfold.batch import to_tensors
from warpfold.data.load.examples import RunOrder, Sample
from warpfold.engine.loop import StepTimer, StopSignals
from warpfold.errors import UserError
from warpfold.parallel.messages import PendingGather
from warpfold.parallel.team import Team
from warpfold.training.ledger import Ledger
from warpfold.training.results import ExampleResult

KEY = 64  # bytes of an example's name that fit into a message
NUMBERS = (
    "length",
    "index",
    "loss",
    "norm",
    "lddt_ca",
    "overflowed",
)  # of an example, float64 each: whole numbers below 2**53


def next_examples(loader: Iterator[Sample], number: int, timer: StepTimer, team: Team) -> Iterator[Sample]:
    """Begin a step and yield this process's examples of it.

    Errors: UserError on all ranks that share an example, if they do not have the same: one could not make it.
    """
    timer.begin()
    for _ in range(number):
        with timer.waiting():
            example = next(loader)
            # Codes and masks of one byte are widened here, on the device.
            example = replace(example, features=to_tensors(example.features))
        # Compared before anything is computed: slices of different examples do not fit together.
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


def stop_requested(signals: StopSignals, team: Team) -> int:
    """Return the signal that stops the run, whichever rank received it; 0: none.  All ranks wait here."""
    return int(team.largest(signals.received, "stopping or going on"))


@dataclass(frozen=True)
class StepEnd:
    """This rank's results of a step, while those of all ranks are being gathered."""

    step: int
    results: list[ExampleResult]
    room: int  # for results, in each rank's message
    largest: PendingGather  # of what all must know
    gathering: PendingGather  # of what is for the log


def begin_end_step(
    step: int,
    results: list[ExampleResult],
    timer: StepTimer,
    ledger: Ledger,
    signals: StopSignals,
    team: Team,
    to_all: bool = False,
    most: int = 0,
) -> StepEnd:
    """Start to gather the results of a step's examples; `end_step` returns those of all ranks.

    to_all: every rank wants them; or rank 0 alone, which writes the log.  most: examples that any rank has, where some
    have more than this one.
    """
    keys = [example.key.encode() for example in results]
    not_finite = not all(example.finite for example in results)
    head = [signals.received, timer.waited, ledger.unshared, max(map(len, keys)), not_finite]
    largest = team.begin_largest(torch.tensor(head, dtype=torch.float64), f"the end of step {step}")
    numbers = [[getattr(example, name) for name in NUMBERS] + list(example.terms.values()) for example in results]
    room = max(most, len(results))
    numbers += [[0.0] * len(numbers[0])] * (room - len(results))
    # The bytes of the names are reinterpreted as float64, so that one tensor holds everything.
    names = np.frombuffer(b"".join(key[:KEY].ljust(KEY, b"\0") for key in keys).ljust(room * KEY, b"\0"), np.float64)
    own = torch.from_numpy(np.concatenate([[len(results)], np.array(numbers, np.float64).ravel(), names]))
    return StepEnd(step, results, room, largest, team.all_gather(own, f"the results of step {step}", to_all))


def end_step(
    end: StepEnd, timer: StepTimer, examples: RunOrder, ledger: Ledger, team: Team
) -> tuple[list[ExampleResult], int]:
    """End a step: return the results of all ranks, by number, and the signal that stops the run (0: none).

    Ranks that did not want them get their own alone, unless one of all examples was not finite.
    It sets the timer to the longest wait of any rank, and tells every rank which entries the others set aside.
    A signal that came to any rank before `begin_end_step` is known to all; a later one after the next step.
    """
    received, timer.waited, aside, longest, not_finite = end.largest.wait()[0].tolist()
    every = end.gathering.wait()
    if aside:
        for entries in team.all_gather_object(
            ledger.take_unshared(), f"entries that were set aside until step {end.step}"
        ):
            for name, index, reason in entries:
                examples.quarantine.add(name, index, reason)
        ledger.take_unshared()  # those of the others, which `add` has just put into this rank's ledger
    if longest > KEY or not_finite:
        said = team.all_gather_object([asdict(one) for one in end.results], f"all results of step {end.step}")
        found = [ExampleResult(**example) for one in team.of_example_leaders(said) for example in one]
    elif not len(every):
        found = end.results
    else:
        rows = every[:: team.mesh.model.size].contiguous().numpy()  # ranks that share an example send the same
        found = [one for row in rows for one in _unpack(row, end.room, tuple(end.results[0].terms))]
    return sorted(found, key=lambda example: example.index), int(received)


def _unpack(row: np.ndarray, room: int, terms: tuple[str, ...]) -> Iterator[ExampleResult]:
    """Yield the results of one rank's message, which has room for so many."""
    width, (count, *_), row = len(NUMBERS) + len(terms), row, row[1:]
    keys = row[room * width :].tobytes()
    for number, values in enumerate(row[: room * width].reshape(room, width)[: int(count)].tolist()):
        length, index, loss, norm, lddt_ca, overflowed, *rest = values
        key = keys[number * KEY : (number + 1) * KEY].rstrip(b"\0").decode()
        found = key, int(length), loss, norm, lddt_ca, dict(zip(terms, rest)), int(index)
        yield ExampleResult(*found, overflowed=bool(overflowed))
