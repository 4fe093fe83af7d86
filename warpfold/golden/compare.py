"""The rule by which a number of ours agrees with the official code's.

* The official fp32 run's own distance from fp64 is stated: max |ours - theirs| <= 10 * that + 1e-6 * scale.
* It is not stated: |ours - theirs|_2 / |theirs|_2 <= 1e-4.

Only valid entries count (masks of the case); what masked entries do is reported beside, never judged.
"""

import math
from dataclasses import dataclass

import numpy as np

from warpfold.golden.read import Noise

TIMES_NOISE = 10.0
OF_SCALE = 1e-6
RELATIVE_L2 = 1e-4
UNDEFINED_ABOVE, ZERO_ABOVE = 1e-2, 10.0


@dataclass(frozen=True)
class Check:
    """One array compared.  `error` and `bound` are both absolute (measure "max") or both relative ("l2")."""

    what: str
    error: float
    bound: float
    measure: str
    note: str = ""
    masked_error: float | None = None  # max |ours - theirs| on the entries that do not count; None: there are none

    @property
    def ok(self) -> bool:
        return self.error <= self.bound

    @property
    def ratio(self) -> float:
        """Error over bound, for sorting: 0 where both are 0, infinite where only the bound is."""
        if self.error == 0:
            return 0.0
        return self.error / self.bound if self.bound > 0 and math.isfinite(self.error) else math.inf


def compare(
    what: str,
    ours: np.ndarray,
    theirs: np.ndarray,
    noise: Noise | None = None,
    valid: np.ndarray | None = None,
    note: str = "",
) -> Check:
    """Judges one array by the rule above.

    `valid` is boolean and covers the leading axes of the arrays (None: every entry counts).  Anything that is not
    finite where it counts is an infinite error.  Stated noise between 1 % and 10 times of the array's scale is no
    rounding (undefined entries, a quaternion's sign), so the second rule is used; above that the exact value is zero
    and the array holds rounding alone, which the first rule bounds.
    """
    if ours.shape != theirs.shape:
        raise ValueError(f"{what}: WarpFold's shape is {list(ours.shape)}, the reference's {list(theirs.shape)}")
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    masked_error = None
    if valid is not None:
        counts = np.broadcast_to(valid.reshape(valid.shape + (1,) * (a.ndim - valid.ndim)), a.shape)
        if not counts.all():
            masked_error = float(np.abs(a[~counts] - b[~counts]).max())
        a, b = a[counts], b[counts]
    if a.size == 0:
        return Check(what, 0.0, 0.0, "max", "no entry counts", masked_error)
    difference = np.abs(a - b)
    if not np.isfinite(difference).all():
        return Check(what, math.inf, 0.0, "max", "not finite", masked_error)
    if noise is not None and not UNDEFINED_ABOVE < noise.max_abs_diff / max(noise.max_abs, 1e-30) < ZERO_ABOVE:
        bound = TIMES_NOISE * noise.max_abs_diff + OF_SCALE * noise.max_abs
        return Check(what, float(difference.max()), bound, "max", note, masked_error)
    size = float(np.linalg.norm(b))
    error = float(np.linalg.norm(difference))
    return Check(what, error / size if size else error, RELATIVE_L2, "l2", note, masked_error)


def same_sign(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """`ours` with each quaternion (first 4 of the last axis) in the sign of `theirs`: q and -q are one rotation."""
    dot = (ours[..., :4] * theirs[..., :4]).sum(-1, keepdims=True)
    turned = ours.copy()
    turned[..., :4] *= np.where(dot < 0, -1.0, 1.0)
    return turned
