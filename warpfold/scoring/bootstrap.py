"""Say how sure a mean over targets is, and a difference between two sets of predictions: the bootstrap (Efron 1979)."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

DRAWS = 10_000  # resamples, each of as many targets as there are
BLOCK = 2_000_000  # values drawn at a time, so that thousands of targets need little memory


@dataclass(frozen=True, kw_only=True)
class Paired:
    """How much better a is than b on the same targets; a positive difference means that a is better."""

    difference: float  # mean of a - b
    interval: tuple[float, float] | None  # 95% bootstrap interval of the difference; None for fewer than two targets
    better: float  # share of resamples in which the mean of a is larger, 0 to 1; an equal mean counts half
    targets: int
    wins: int  # targets on which a is larger
    losses: int  # ... and on which b is; the others are ties

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes zero: a difference that the choice of targets does not explain."""
        return self.interval is not None and (self.interval[0] > 0 or self.interval[1] < 0)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return asdict(self)

    def __str__(self) -> str:
        counts = f"better on {self.wins} of {self.targets} targets, worse on {self.losses}"
        if self.interval is None:
            return f"{self.difference:+.4f} ({counts}; too few for an interval)"
        low, high = self.interval
        return f"{self.difference:+.4f} [{low:+.4f}, {high:+.4f}] ({counts}; better in {self.better:.1%} of resamples)"


def paired_bootstrap(a: Sequence[float], b: Sequence[float], *, seed: int = 0) -> Paired:
    """Compare two scores of the same targets in the same order, larger ones better, by resampling whole targets.

    What makes a target easy or hard is in both scores and cancels, so that far fewer targets show a difference than
    two separate intervals would need.  The same seed gives the same interval.
    Errors: ValueError for lists that differ in length or are empty, and for values that are not finite.
    """
    one, other = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if one.shape != other.shape or one.ndim != 1 or not len(one):
        raise ValueError(f"paired_bootstrap: lists of {one.shape} and {other.shape} values; each target needs both")
    if not (np.isfinite(one) & np.isfinite(other)).all():
        raise ValueError("paired_bootstrap: a value is not finite; leave its target out of both lists")
    difference = one - other
    means = resampled_means(difference, seed)
    return Paired(
        difference=float(difference.mean()),
        interval=_middle(means) if len(difference) > 1 else None,
        better=float(np.mean(means > 0) + np.mean(means == 0) / 2),
        targets=len(difference),
        wins=int((difference > 0).sum()),
        losses=int((difference < 0).sum()),
    )


def interval(values: Sequence[float], seed: int = 0) -> tuple[float, float] | None:
    """Return the 95% bootstrap interval of a mean, over `DRAWS` draws of as many values; None for fewer than two."""
    return _middle(resampled_means(np.asarray(values), seed)) if len(values) > 1 else None


def resampled_means(values: np.ndarray, seed: int) -> np.ndarray:
    """Return the means [DRAWS] of as many values [N], drawn with replacement."""
    random = np.random.default_rng(seed)
    rows = max(1, BLOCK // len(values))
    blocks = (min(rows, DRAWS - start) for start in range(0, DRAWS, rows))
    return np.concatenate([random.choice(values, (count, len(values))).mean(1) for count in blocks])


def _middle(means: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)
