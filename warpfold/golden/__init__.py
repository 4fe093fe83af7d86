"""`warpfold golden DIR`: compare WarpFold with numbers of DeepMind's official code, array by array.

read      files -> ReferenceCase
config    the official configuration -> WarpFold's settings
geometry  WarpFold's outputs for the cases of geometry and losses
layers    ... for those of layers, blocks and the structure module
multimer  ... for those of Multimer's own parts
models    ... for those of whole models
compare   outputs -> checks, gradients included: ten times the official code's own rounding noise
"""

import fnmatch
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from warpfold.errors import UserError
from warpfold.golden.compare import CaseOutputs, Check, Compute, checks, tensors
from warpfold.golden.geometry import GEOMETRY, LOSSES
from warpfold.golden.layers import UNITS
from warpfold.golden.models import whole_model
from warpfold.golden.read import BrokenCase, CaseFiles, ReferenceCase, find, read
from warpfold.model.deepmind import PREFIX
from warpfold.progress import Progress, no_progress

PASS, FAIL, NOT_RUN = "pass", "FAIL", "could not be run"
_COLOURS = {PASS: "green", FAIL: "bold red", NOT_RUN: "bold red"}

# What a case that does not fit the code raises: a missing array, a shape that does not match, a wrong dtype.
_DOES_NOT_FIT = (UserError, KeyError, IndexError, TypeError, ValueError, RuntimeError, AttributeError)

_KNOWN: dict[str, Compute] = {
    f"{kind}/{name}": compute
    for kind, cases in (("geometry", GEOMETRY), ("losses", LOSSES), ("units", UNITS))
    for name, compute in cases.items()
}


@dataclass(frozen=True)
class CaseResult:
    """The outcome of one case.

    case:    its path under the folder, e.g. "units/outer_product_mean".
    verdict: PASS, FAIL or NOT_RUN.
    checks:  one per array compared (outputs, gradients); empty unless the case ran.
    reason:  why it could not be run, in one line.
    seconds: time that it took.
    """

    case: str
    verdict: str
    checks: tuple[Check, ...] = ()
    reason: str = ""
    seconds: float = 0.0

    @property
    def worst(self) -> Check | None:
        """Return the check of the array nearest to its bound, or furthest beyond it."""
        return max(self.checks, key=lambda check: check.ratio, default=None)


def run(folder: str | Path, only: str | None = None, progress: Progress = no_progress) -> list[CaseResult]:
    """Run the reference cases under `folder`, one after another, in fp32 on the CPU.

    only:     a shell pattern on the case's path ("units/*", "*triangle*"); a bare word matches anywhere in it.
    progress: called before each case, with its name, and once at the end.

    A case that fails or cannot be run is a result, never an exception.  Errors: UserError if `folder` holds no case,
    or none that `only` selects.
    """
    found = find(Path(folder))
    pattern = only if only is None or any(mark in only for mark in "*?[") else f"*{only}*"
    chosen = [files for files in found if pattern is None or fnmatch.fnmatchcase(files.name, pattern)]
    if not chosen:
        raise UserError(f"--only {only}: none of the {len(found)} cases matches; the first is {found[0].name}")
    results = []
    for done, files in enumerate(chosen):
        progress(done, len(chosen), files.name)
        results.append(run_case(files))
    progress(len(chosen), len(chosen), "")
    return results


def run_case(files: CaseFiles) -> CaseResult:
    """Read, compute and compare one case."""
    start = time.perf_counter()

    def result(verdict: str, found: tuple[Check, ...] = (), reason: str = "") -> CaseResult:
        return CaseResult(files.name, verdict, found, reason, time.perf_counter() - start)

    try:
        case = read(files)
        found = tuple(checks(case, compute(case)))
    except _DOES_NOT_FIT as error:
        told = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        return result(NOT_RUN, reason=" ".join(told.split())[:300])
    if not found:
        return result(NOT_RUN, reason="nothing to compare")
    return result(PASS if all(check.ok for check in found) else FAIL, found)


def compute(case: ReferenceCase) -> CaseOutputs:
    """Compute WarpFold's outputs for a case.

    Cases are known by the beginning of their file's name, longest first, so that another size or seed of a known case
    (`outer_product_mean_truesize`) needs no entry here; everything else about it is read from its files.
    Errors: BrokenCase (an unknown name).
    """
    if case.kind == "models":
        return whole_model(case)
    key = f"{case.kind}/{case.title}"
    begins = [name for name in _KNOWN if key == name or key.startswith(tuple(name + c for c in "_.-"))]
    known = max(begins, key=len, default=None)
    if known is None:
        raise BrokenCase(f"{key}: a case of an unknown name")
    inputs = tensors(case)
    return replace(_KNOWN[known](case, inputs), inputs=inputs)


# Results for people and for programs


def table(results: Sequence[CaseResult]) -> Table:
    """Return one row per case: how many arrays, the worst of them, its error and bound, the verdict; then notes.

    Errors and bounds are absolute, or relative L2 norms where "L2" follows them.
    """
    shown = Table(
        "case", "arrays", Column("worst", overflow="fold"), "error", "bound", "verdict", box=None, pad_edge=False
    )
    for result in results:
        verdict = f"[{_COLOURS[result.verdict]}]{result.verdict}[/]"
        worst = result.worst
        if worst is None:
            shown.add_row(result.case, "", escape(result.reason), "", "", verdict)
            continue
        shown.add_row(result.case, str(len(result.checks)), *_figures(worst), verdict)
        for check in failures(result)[1:6]:
            shown.add_row("", "", *_figures(check), "")
        for note, count in Counter(check.note for check in result.checks if check.note).items():
            shown.add_row("", str(count), note, "", "", "")
    return shown


def _figures(check: Check) -> tuple[str, str, str]:
    unit = " L2" if check.measure == "l2" else ""
    return check.what.replace(PREFIX, ""), f"{check.error:.2g}{unit}", f"{check.bound:.2g}{unit}"


def failures(result: CaseResult) -> list[Check]:
    """Return the checks of one case that failed, worst first."""
    return sorted((check for check in result.checks if not check.ok), key=lambda check: -check.ratio)


def summary(results: Sequence[CaseResult]) -> str:
    """Return one line: how many cases passed, failed, and could not be run."""
    counts = {verdict: [r for r in results if r.verdict == verdict] for verdict in _COLOURS}
    return (
        f"{len(results)} cases: {len(counts[PASS])} passed, {len(counts[FAIL])} failed, "
        f"{len(counts[NOT_RUN])} could not be run"
    )


def exit_code(results: Sequence[CaseResult]) -> int:
    """Return 1 if any case failed or could not be run, else 0."""
    return int(any(result.verdict != PASS for result in results))


def as_data(results: Sequence[CaseResult]) -> dict[str, Any]:
    """Return the results as plain data, fit for JSON: every check of every case, not the worst alone.

    An infinite error (something was not finite) is null.
    """
    return {
        "cases": [
            {
                "case": result.case,
                "verdict": result.verdict,
                "reason": result.reason,
                "seconds": round(result.seconds, 3),
                "worst": _check_data(result.worst) if result.worst else None,
                "checks": [_check_data(check) for check in result.checks],
            }
            for result in results
        ],
        "counts": {verdict: sum(r.verdict == verdict for r in results) for verdict in _COLOURS},
    }


def _check_data(check: Check) -> dict[str, Any]:
    errors = {"error": check.error, "masked_error": check.masked_error}
    finite = {name: None if x is None or not math.isfinite(x) else x for name, x in errors.items()}
    return {**asdict(check), **finite, "ok": check.ok}
