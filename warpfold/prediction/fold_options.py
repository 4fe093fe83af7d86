"""What a prediction is asked for: when recycling ends, how often the model runs, what is kept."""

import math
from dataclasses import dataclass
from typing import Any

from warpfold import arguments
from warpfold.errors import UserError


@dataclass(frozen=True)
class Recycling:
    """When recycling ends before all passes are done; it changes what is predicted.

    tolerance: angstrom, as `ModelConfig.recycle_tolerance`; None: the model's own.
    long: a protein of more than so many residues has at most so many passes after the first.
    Errors: UserError for what is not at least 0.
    """

    tolerance: float | None = None
    long: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.tolerance is not None and not 0 <= self.tolerance < math.inf:
            raise UserError(f"--recycle-tolerance {self.tolerance:g}: angstrom, at least 0")
        if self.long is not None and min(self.long) < 0:
            raise UserError(f"--max-recycles {self.long[0]}:{self.long[1]}: two numbers of at least 0")

    @classmethod
    def of(cls, tolerance: float | None, most: str | tuple[int, int] | None) -> "Recycling":
        """Return when recycling ends, with `long` also as LENGTH:RECYCLES.  Errors: UserError for anything else."""
        long = None
        if isinstance(most, str):
            numbers = most.split(":")
            if len(numbers) != 2 or not all(map(str.isdecimal, numbers)):
                raise UserError(f"--max-recycles {most}: is not LENGTH:RECYCLES; write two numbers, such as 1500:3")
            long = int(numbers[0]), int(numbers[1])
        elif most is not None:
            if not arguments.is_list(most) or len(most) != 2:
                raise arguments.WrongArgument(f"max_recycles = {arguments.shown(most)}: two numbers are needed")
            long = arguments.whole("max_recycles[0]", most[0]), arguments.whole("max_recycles[1]", most[1])
        return cls(arguments.number_or_none("recycle_tolerance", tolerance), long)

    @property
    def ends_early(self) -> bool:
        """Return whether the end of one protein's recycling may differ from another's."""
        return self != Recycling()

    def at_most(self, recycles: int, residues: int) -> int:
        """Return how many of so many passes after the first a protein gets."""
        return recycles if self.long is None or residues <= self.long[0] else min(recycles, self.long[1])


@dataclass(frozen=True)
class Kept:
    """What a prediction keeps beside structure and confidence."""

    representations: bool = True
    distogram: bool = False
    logits: bool = False
    save_recycles: bool = False  # the structures of the passes before the last


def kept_of(representations: bool, distogram: bool, logits: bool, save_recycles: bool) -> Kept:
    """Return what predictions keep.  Errors: UserError for what is not True or False."""
    given = {"representations": representations, "distogram": distogram, "logits": logits}
    given["save_recycles"] = save_recycles
    return Kept(**{name: arguments.flag(name, value) for name, value in given.items()})


def passes_of(seed: int, recycles: int | None, ensemble: int | None) -> dict[str, Any]:
    """Return the numbers that `Predictor.prepare` takes.  Errors: UserError for what is none."""
    return {
        "seed": arguments.whole("seed", seed),
        "recycles": arguments.whole_or_none("recycles", recycles, 0),
        "ensemble": arguments.whole_or_none("ensemble", ensemble, 1),
    }


def batch_of(value: Any) -> int | None:
    """Return how many queries may share a pass; None for "auto".  Errors: UserError for anything else."""
    if value == "auto":
        return None
    if isinstance(value, str):
        if not (value.isdecimal() and len(value) < 6 and int(value) > 0):
            raise arguments.WrongArgument(f"--batch {value}: a number from 1 on, or auto")
        return int(value)
    return arguments.whole("batch", value, 1)
