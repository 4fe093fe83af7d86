"""The results of reference cases, for people (a table) and for programs (plain data)."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from warpfold.golden.compare import Check
from warpfold.golden.runner import FAIL, NOT_IMPLEMENTED, NOT_RUN, PASS, CaseResult
from warpfold.model.deepmind import PREFIX

_COLOURS = {PASS: "green", FAIL: "bold red", NOT_RUN: "bold red", NOT_IMPLEMENTED: "yellow"}


def table(results: Sequence[CaseResult]) -> Table:
    """One row per case: how many arrays, the worst of them, its error and bound, the verdict; then notes, with counts.

    Errors and bounds are absolute, or relative L2 norms where "L2" stands beside them.
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
    """The checks of one case that failed, worst first."""
    return sorted((check for check in result.checks if not check.ok), key=lambda check: -check.ratio)


def summary(results: Sequence[CaseResult]) -> str:
    """One line: how many cases passed, failed, could not be run, and are not implemented (those by name)."""
    counts = {verdict: [r for r in results if r.verdict == verdict] for verdict in _COLOURS}
    line = (
        f"{len(results)} cases: {len(counts[PASS])} passed, {len(counts[FAIL])} failed, "
        f"{len(counts[NOT_RUN])} could not be run, {len(counts[NOT_IMPLEMENTED])} not implemented"
    )
    names = ", ".join(result.case for result in counts[NOT_IMPLEMENTED])
    return f"{line} ({names})" if names else line


def exit_code(results: Sequence[CaseResult], strict: bool = False) -> int:
    """1 if any case failed or could not be run, else 0.

    Cases of Multimer are named as not implemented and do not count, unless `strict`.
    """
    bad = {FAIL, NOT_RUN} | ({NOT_IMPLEMENTED} if strict else set())
    return int(any(result.verdict in bad for result in results))


def as_data(results: Sequence[CaseResult]) -> dict[str, Any]:
    """The results as plain data, fit for JSON: every check of every case, not the worst alone.

    An infinite error (something was not finite) is null.
    """
    return {
        "cases": [
            {
                "case": result.case,
                "verdict": result.verdict,
                "reason": result.reason,
                "seconds": round(result.seconds, 3),
                "worst": _check(result.worst) if result.worst else None,
                "checks": [_check(check) for check in result.checks],
            }
            for result in results
        ],
        "counts": {verdict: sum(r.verdict == verdict for r in results) for verdict in _COLOURS},
    }


def _check(check: Check) -> dict[str, Any]:
    def finite(x: float | None) -> float | None:
        return x if x is not None and math.isfinite(x) else None

    return {
        "what": check.what,
        "error": finite(check.error),
        "bound": check.bound,
        "measure": check.measure,
        "ok": check.ok,
        "note": check.note,
        "masked_error": finite(check.masked_error),
    }
