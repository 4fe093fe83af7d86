"""Runs reference cases and says of each: passed, failed, could not be run, or not implemented."""

import fnmatch
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from warpfold.errors import UserError
from warpfold.golden.answer import checks
from warpfold.golden.cases import answer_for
from warpfold.golden.compare import Check
from warpfold.golden.read import NotImplementedCase, Place, find, read

PASS, FAIL, NOT_RUN, NOT_IMPLEMENTED = "pass", "FAIL", "could not be run", "not implemented"

# What a case that does not fit the code runs into: a missing array, a shape that does not match, a wrong dtype.
_DOES_NOT_FIT = (UserError, KeyError, IndexError, TypeError, ValueError, RuntimeError, AttributeError)


@dataclass(frozen=True)
class CaseResult:
    """The outcome of one case.

    case:    its path under the folder, e.g. "units/outer_product_mean".
    verdict: PASS, FAIL, NOT_RUN or NOT_IMPLEMENTED.
    checks:  one per array compared (outputs, gradients); empty unless the case ran.
    reason:  why it could not be run or is not implemented, in one line.
    seconds: time that it took.
    """

    case: str
    verdict: str
    checks: tuple[Check, ...] = ()
    reason: str = ""
    seconds: float = 0.0

    @property
    def worst(self) -> Check | None:
        """The array nearest to its bound, or furthest beyond it."""
        return max(self.checks, key=lambda check: check.ratio, default=None)


def run(
    folder: str | Path, only: str | None = None, progress: Callable[[int, int, str], None] | None = None
) -> list[CaseResult]:
    """Runs the reference cases under `folder`, one after another, in fp32 on the CPU.

    only:     a shell pattern on the case's path ("units/*", "*triangle*"); a bare word matches anywhere in it.
    progress: called with (cases done, cases in all, name of the next one) before each case and once at the end.

    A case that fails or cannot be run is a result, never an exception.  Errors: UserError if `folder` holds no case,
    or none that `only` selects.
    """
    places = select(find(Path(folder)), only)
    results = []
    for done, place in enumerate(places):
        if progress:
            progress(done, len(places), place.name)
        results.append(run_case(place))
    if progress:
        progress(len(places), len(places), "")
    return results


def select(places: list[Place], only: str | None) -> list[Place]:
    """The places that the pattern selects.  Errors: UserError if none is left."""
    if only is None:
        return places
    pattern = only if any(mark in only for mark in "*?[") else f"*{only}*"
    chosen = [place for place in places if fnmatch.fnmatchcase(place.name, pattern)]
    if not chosen:
        raise UserError(f"--only {only}: none of the {len(places)} cases matches; the first is {places[0].name}")
    return chosen


def run_case(place: Place) -> CaseResult:
    """Reads, computes and compares one case."""
    start = time.perf_counter()

    def result(verdict: str, found: tuple[Check, ...] = (), reason: str = "") -> CaseResult:
        return CaseResult(place.name, verdict, found, reason, time.perf_counter() - start)

    try:
        case = read(place)
        found = tuple(checks(case, answer_for(case)))
    except NotImplementedCase as error:
        return result(NOT_IMPLEMENTED, reason=str(error))
    except _DOES_NOT_FIT as error:
        told = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        return result(NOT_RUN, reason=" ".join(told.split())[:300])
    if not found:
        return result(NOT_RUN, reason="nothing to compare")
    return result(PASS if all(check.ok for check in found) else FAIL, found)
