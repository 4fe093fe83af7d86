"""`warpfold golden DIR`: WarpFold against numbers of DeepMind's official code, array by array.

read     files -> Case
cases    which of WarpFold's functions and layers answers which case (geometry, losses, trunk, structure, models)
answer   an Answer -> checks, gradients included
compare  the rule: ten times the official code's own rounding noise
runner   every case under a folder -> CaseResult
show     results -> table, JSON, exit code
"""

from warpfold.golden.compare import Check
from warpfold.golden.runner import FAIL, NOT_IMPLEMENTED, NOT_RUN, PASS, CaseResult, run
from warpfold.golden.show import as_data, exit_code, failures, summary, table

__all__ = [
    "FAIL",
    "NOT_IMPLEMENTED",
    "NOT_RUN",
    "PASS",
    "CaseResult",
    "Check",
    "as_data",
    "exit_code",
    "failures",
    "run",
    "summary",
    "table",
]
