"""A whole training: steps, checkpoints, validation, and failures that come at random (Poisson) and cost what was lost.

Between two checkpoints the same work is done again until no failure comes; of failures at a constant rate r, work of W
seconds takes (exp(r W) - 1) / r in the mean, and is begun anew exp(r W) - 1 times (J. Daly, Future Generation Computer
Systems 22, 303, 2006).  Restarts fail at the same rate: each is work of its own, R seconds of which take as above.
"""

import math
from dataclasses import dataclass

from warpfold.errors import UserError

DAY = 86_400.0
STATES = 4  # numbers of fp32 that a checkpoint has of each parameter: weights, their average, two moments
HOPELESS = 50.0  # failures between two checkpoints, from which on nothing is gained


@dataclass(frozen=True, kw_only=True)
class Interruptions:
    """What keeps a training from its steps, in seconds where nothing else is said.

    failures: of all devices together, a day.  restart: until it trains again, the checkpoint read.
    save_every, validate_every: steps; 0: never.  save: that a step waits for its checkpoint; the file is written by a
    thread.  validate: that the ranks validate.
    """

    failures: float = 0.0
    restart: float = 120.0
    save_every: int = 500
    save: float = 1.0
    validate_every: int = 1000
    validate: float = 0.0


@dataclass(frozen=True)
class WholeTraining:
    """How long a training takes in the mean, in seconds: the parts add up to `seconds`.

    failed: how many failures there are.
    """

    steps: float
    saving: float
    validating: float
    repeated: float  # work that was lost and is done again
    restarting: float
    failed: float

    @property
    def seconds(self) -> float:
        """Return all of it."""
        return self.steps + self.saving + self.validating + self.repeated + self.restarting

    @property
    def days(self) -> float:
        """Return all of it in days."""
        return self.seconds / DAY


def whole_training(step: float, steps: int, told: Interruptions) -> WholeTraining:
    """Return how long so many steps of `step` seconds take in the mean.

    Errors: UserError where failures come so often that no checkpoint is reached.
    """
    saves = steps / told.save_every if told.save_every else 1.0
    validations = steps / told.validate_every if told.validate_every else 0.0
    saving, validating = (saves * told.save if told.save_every else 0.0), validations * told.validate
    work = (steps * step + saving + validating) / max(1.0, saves)  # between two checkpoints
    rate = told.failures / DAY
    if rate * (work + told.restart) > HOPELESS:
        raise UserError(
            f"failures: {told.failures:g} a day leave {1 / rate:.0f} s between two, and {work:.0f} s lie between two "
            f"checkpoints, {told.restart:.0f} s of restart aside, so the training would not end; save more often "
            "(train.save_every)"
        )
    repeated = max(0.0, max(1.0, saves) * work * (_stretched(rate * work) - 1))
    begun = max(1.0, saves) * math.expm1(rate * work)  # restarts, each until one is not interrupted
    restarting = begun * told.restart * _stretched(rate * told.restart)
    failed = begun * math.exp(rate * told.restart)
    return WholeTraining(steps * step, saving, validating, repeated, restarting, failed)


def _stretched(failures: float) -> float:
    """Return how many times as long work takes that so many failures are expected in: (exp(r W) - 1) / (r W)."""
    return math.expm1(failures) / failures if failures else 1.0
