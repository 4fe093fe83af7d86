"""Steps of all ranks, one after another: devices that differ, examples that come late, passes that are drawn.

What nothing disturbs is replayed once (`replay.py`); what chance does to it is drawn for every rank and step, from a
seed.  Ranks that share an example wait for each other in every layer, and all ranks at the end of a step.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from warpfold.cost.replay import ReplayedStep

SETTLING = 0.1  # the share of the steps that are left out: full queues hide at first how slow a loader is


@dataclass(frozen=True, kw_only=True)
class Chance:
    """How ranks differ.  Defaults are guesses, but for the loader's: its figures were measured (docs/figures.md).

    spread: of the devices' lasting speeds, as the standard deviation of their logarithms; noise: of one step.
    example: seconds in which one process of the loader makes one example, in the median; tail: the standard deviation
    of its logarithm.  slow: the share of examples that take `slower` times as long.
    workers: processes of each data rank; 0: the loader keeps nobody waiting.  ahead: examples that each makes ahead.
    """

    spread: float = 0.01
    noise: float = 0.01
    example: float = 0.04
    tail: float = 0.7
    slow: float = 0.0
    slower: float = 10.0
    workers: int = 8
    ahead: int = 4


@dataclass(frozen=True)
class Steps:
    """What was drawn.  seconds: of each step.  parts: where a step's time goes in the mean, seconds; they add up to it.

    ideal: the seconds of each step if no rank were late.
    """

    seconds: np.ndarray
    ideal: np.ndarray
    parts: dict[str, float]

    @property
    def mean(self) -> float:
        """Return the mean seconds of a step."""
        return float(self.seconds.mean())

    def percentile(self, share: float) -> float:
        """Return what so many percent of the steps take at most."""
        return float(np.percentile(self.seconds, share))


def draw_steps(
    times: Mapping[int, ReplayedStep],
    data: int,
    model: int,
    chance: Chance,
    examples: int = 1,
    count: int = 300,
    seed: int = 0,
) -> Steps:
    """Draw `count` steps of data x model ranks.

    times: of a step, by its passes without gradient; each is as likely.  examples: of a rank and step.
    """
    settle = int(SETTLING * count)
    rng = [np.random.default_rng([seed, stream]) for stream in range(4)]
    recycles = rng[0].choice(sorted(times), count + settle)
    lasting = np.exp(chance.spread * rng[1].standard_normal((data, model)))
    loader = _Loader(chance, data, rng[2])
    now, seconds, ideal, late = 0.0, [], [], []
    for passes in recycles:
        base = times[int(passes)].seconds
        factors = (lasting * np.exp(chance.noise * rng[3].standard_normal((data, model)))).max(axis=1)
        ends = np.full(data, now)
        for _ in range(examples):
            begin = np.maximum(ends, loader.next())
            loader.used(begin)
            ends = begin + base / examples * factors
        undisturbed = base * float(factors.max())
        seconds.append(float(ends.max()) - now)
        ideal.append(base)
        late.append((undisturbed - base, seconds[-1] - undisturbed))
        now = float(ends.max())
    stragglers, loading = np.mean(late[settle:], axis=0)
    drawn = [times[int(passes)] for passes in recycles[settle:]]
    parts = {name: float(np.mean([getattr(one, name) for one in drawn])) for name in ("compute", "exposed", "launch")}
    parts |= {"stragglers": float(stragglers), "loader": float(loading)}
    return Steps(np.array(seconds[settle:]), np.array(ideal[settle:]), parts)


class _Loader:
    """The queues of all data ranks: each example is made by the process that is free first, and used in its turn."""

    def __init__(self, chance: Chance, ranks: int, rng: np.random.Generator) -> None:
        self.chance, self.rng = chance, rng
        self.free = np.zeros((ranks, max(1, chance.workers)))
        self.slots = chance.workers * chance.ahead
        self.ready = np.zeros((ranks, max(1, self.slots)))  # when each of those that are being made will be
        self.turn = 0

    def next(self) -> np.ndarray:
        """Return when the next example of each rank is ready."""
        return self.ready[:, self.turn % self.slots] if self.slots else np.zeros(len(self.free))

    def used(self, when: np.ndarray) -> None:
        """Have another example made in the place of the one that a step has begun with."""
        if not self.slots:
            return
        ranks, place = np.arange(len(self.free)), self.turn % self.slots
        worker = self.free.argmin(axis=1)
        cost = self.chance.example * np.exp(self.chance.tail * self.rng.standard_normal(len(ranks)))
        cost *= np.where(self.rng.random(len(ranks)) < self.chance.slow, self.chance.slower, 1.0)
        begin = np.maximum(self.free[ranks, worker], when)
        self.ready[:, place] = self.free[ranks, worker] = begin + cost
        self.turn += 1
