"""Run reference cases: read, compute and compare each, and show the results."""

import fnmatch
import math
import zipfile
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from tests.golden.design import gradient_by_inputs
from tests.golden.geometry import GEOMETRY, LOSSES
from tests.golden.layers import UNITS
from tests.golden.models import whole_model
from tests.golden.of_pairs import confidences
from tests.golden.reference import BrokenCase, CaseFiles, CaseOutputs, Check, ReferenceCase, checks, find, read, tensors
from warpfold.errors import UserError
from warpfold.model.weights.deepmind import PREFIX
from warpfold.progress import Progress, no_progress

BROKEN_FILE = OSError, EOFError, zipfile.BadZipFile, zlib.error
PASS, FAIL, NOT_RUN = "pass", "FAIL", "could not be run"
COLOURS = {PASS: "green", FAIL: "bold red", NOT_RUN: "bold red"}
KNOWN = {
    f"{kind}/{name}": compute
    for kind, cases in (("geometry", GEOMETRY), ("losses", LOSSES), ("units", UNITS))
    for name, compute in cases.items()
}


@dataclass(frozen=True)
class CaseResult:
    """The result of one case: PASS, FAIL or NOT_RUN, a check per array, and the reason if it could not be run."""

    case: str
    verdict: str
    checks: tuple[Check, ...] = ()
    reason: str = ""

    @property
    def worst_first(self) -> list[Check]:
        return sorted(self.checks, key=lambda check: -check.ratio)


def run(folder: Path, only: str | None = None, progress: Progress = no_progress) -> list[CaseResult]:
    """Run the cases under `folder` in fp32 on the CPU.

    only: a shell pattern for the case's path ("units/*", "*triangle*"); a word matches anywhere in it.
    Raises UserError if `folder` has no case, or `only` selects none. A case that fails or cannot be run is a result.
    """
    found = find(folder)
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
    try:
        case = read(files)
        found = tuple(checks(case, compute(case)))
    # Errors of broken files, and of cases that do not match the code: missing arrays, wrong shapes or dtypes.
    except (*BROKEN_FILE, UserError, LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        why = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        return CaseResult(files.name, NOT_RUN, reason=" ".join(why.split())[:300])
    if not found:
        return CaseResult(files.name, NOT_RUN, reason="nothing to compare")
    return CaseResult(files.name, PASS if all(check.ok for check in found) else FAIL, found)


def compute(case: ReferenceCase) -> CaseOutputs:
    """Compute WarpFold's outputs for a case.

    Cases are recognised by the longest matching prefix of their file's name, so that another size or seed of a case
    (`outer_product_mean_truesize`) needs no entry here. Raises BrokenCase for an unknown name.
    """
    if case.kind == "models":
        return whole_model(case)
    if case.kind == "models_design":
        return gradient_by_inputs(case)
    if case.kind == "confidences":
        return confidences(case)
    key = f"{case.kind}/{case.title}"
    begins = [name for name in KNOWN if key == name or key.startswith(tuple(name + c for c in "_.-"))]
    if not begins:
        raise BrokenCase(f"{key}: a case of an unknown name")
    inputs = tensors(case)
    return replace(KNOWN[max(begins, key=len)](case, inputs), inputs=inputs)


def table(results: Sequence[CaseResult]) -> Table:
    """Format a row per case: number of arrays, worst array, its error and bound, result. Notes follow the rows.

    Errors and bounds are absolute, or relative L2 norms if "L2" follows them.
    """
    shown = Table(
        "case", "arrays", Column("worst", overflow="fold"), "error", "bound", "verdict", box=None, pad_edge=False
    )
    for result in results:
        verdict = f"[{COLOURS[result.verdict]}]{result.verdict}[/]"
        if not result.checks:
            shown.add_row(result.case, "", escape(result.reason), "", "", verdict)
            continue
        for place, check in enumerate(result.worst_first[:6]):
            unit = " L2" if check.measure == "l2" else ""
            figures = check.what.replace(PREFIX, ""), f"{check.error:.2g}{unit}", f"{check.bound:.2g}{unit}"
            if place == 0:
                shown.add_row(result.case, str(len(result.checks)), *figures, verdict)
            elif not check.ok:
                shown.add_row("", "", *figures, "")
        for note, count in Counter(check.note for check in result.checks if check.note).items():
            shown.add_row("", str(count), note, "", "", "")
    return shown


def summary(results: Sequence[CaseResult]) -> str:
    """Format the numbers of cases that passed, failed, and could not be run, in one line."""
    counts = Counter(result.verdict for result in results)
    return f"{len(results)} cases: {counts[PASS]} passed, {counts[FAIL]} failed, {counts[NOT_RUN]} could not be run"


def as_data(results: Sequence[CaseResult]) -> list[dict[str, Any]]:
    """Convert the results to JSON data with every check of every case. An infinite error is null."""
    return [
        {
            "case": result.case,
            "verdict": result.verdict,
            "reason": result.reason,
            "checks": [asdict(check) | {"error": _finite(check.error), "ok": check.ok} for check in result.worst_first],
        }
        for result in results
    ]


def _finite(error: float) -> float | None:
    return error if math.isfinite(error) else None
