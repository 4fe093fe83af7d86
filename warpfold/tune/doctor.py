"""Whether this device computes what it should: every operation, at the sizes of given settings, against its definition.

As each is chosen here (dispatch): its fast way, or its definition with the reason why.  Errors are to fp64; the speed
is that of a few passes, rough.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from warpfold import settings
from warpfold.errors import UserError
from warpfold.model.alphafold import ModelConfig
from warpfold.tune.cases import OPS, Case, inputs
from warpfold.tune.checks import DTYPES, Verdict, check
from warpfold.tune.machine import describe
from warpfold.tune.sizes import DataSizes, of_settings
from warpfold.tune.timing import Subject, measure

SECTIONS = ("model", "loss", "data", "optim", "plan", "train")  # of a settings file
LOGITS = {"cpu": 2**21, "cuda": 2**27}  # of a case, and numbers in its keys; rows are cut until there are no more
NUMBERS = {"cpu": 2**20, "cuda": 2**27}  # likewise, in x
REPEATS = 3
BUDGET = 0.6  # seconds of timing for a case

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Finding:
    """What was found of one operation in one place of the model."""

    verdict: Verdict
    speed: float | None  # the definition's time by ours, forward and backward; None where it is the definition
    small: bool = False  # at the model's own size the definition is sooner done, and chosen

    @property
    def says(self) -> str:
        """The verdict in a few words."""
        if self.verdict.red:
            return "RED"
        if self.verdict.reason:
            return f"not fast: {self.verdict.reason}"
        return "ok; small, so its definition is chosen" if self.small else "ok"


def cases_of(values: Mapping[str, Any], source: str) -> list[Case]:
    """Every operation that a model of these settings (`settings.load`) calls, at the sizes of its training examples.

    Errors: UserError for settings that are none.
    """
    for key in values:
        if key not in SECTIONS:
            raise UserError(f"{source}: {key} is not a section of the settings; known: {', '.join(SECTIONS)}")
    model = settings.build(ModelConfig, values.get("model", {}), source)
    sizes = {key: value for key, value in values.get("data", {}).items() if key in DataSizes.__dataclass_fields__}
    return of_settings(model, settings.build(DataSizes, sizes, source))


def cut(case: Case, device: torch.device) -> Case:
    """The case with as many rows as the device checks in a moment; lengths stay."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    if case.logits:
        numbers = case.rows * case.attended * case.width * (case.heads if case.op == "attention" else 1)
        return case.fewer(max(2, case.rows * LOGITS[kind] // max(case.logits, numbers)))
    each = case.length * max(case.channels, case.outputs)
    if case.op == "outer_product":  # the definition has the products of all channels in memory
        each = max(each, case.attended * case.channels**2)
    return case.fewer(max(2, NUMBERS[kind] // each))


def examine(
    cases: Sequence[Case],
    device: torch.device,
    dtypes: Sequence[str] = tuple(DTYPES),
    progress: Progress | None = None,
) -> list[Finding]:
    """Check every case in every dtype, and time those that have a fast way."""
    found = []
    todo = [(whole, cut(whole, device), dtype) for whole in cases for dtype in dtypes]
    for done, (whole, case, dtype) in enumerate(todo):
        if progress:
            progress(done, len(todo), f"{case.op} {case.where} {dtype}")
        verdict = check(case, dtype, device)
        speed = _speed(case, dtype, device) if verdict.errors and not verdict.red else None
        found.append(Finding(verdict, speed, _is_small(whole, dtype, device)))
    return found


def _is_small(case: Case, dtype: str, device: torch.device) -> bool:
    prefer = OPS[case.op].prefer_definition
    # Without numbers: sizes decide.  What a GPU is given is never small.
    return device.type == "cpu" and prefer is not None and prefer(*inputs(case, DTYPES[dtype], "meta").args)


def _speed(case: Case, dtype: str, device: torch.device) -> float | None:
    given = inputs(case, DTYPES[dtype], device)
    op = OPS[case.op]
    ways = {"definition": op.definition, "ours": op.fast}
    subjects = [
        Subject(name, lambda way=way: way(*given.args), given.wanted, given.grad)  # type: ignore[misc]
        for name, way in ways.items()
    ]
    times = measure(subjects, device, REPEATS, BUDGET / 2, peaks=False)
    seconds = {name: (t.median("training"), t.median("backward")) for name, t in times.items()}
    if any(None in pair for pair in seconds.values()):
        return None  # out of memory
    total = {name: sum(s for s in pair if s) for name, pair in seconds.items()}
    return total["definition"] / total["ours"]


def report(findings: Sequence[Finding], device: torch.device, source: str) -> dict[str, Any]:
    """All of it, for JSON."""
    return {
        "machine": describe(device),
        "settings": source,
        "red": sum(f.verdict.red for f in findings),
        "ops": [_plain(f) for f in findings],
    }


def _plain(finding: Finding) -> dict[str, Any]:
    v = finding.verdict
    errors = {e.name: {"ours": _number(e.ours), "definition": _number(e.definition)} for e in v.errors}
    return {
        "op": v.case.op,
        "where": v.case.where,
        "shape": v.case.shape,
        "dtype": v.dtype,
        "way": v.way,
        "reason": v.reason,
        "errors": errors,
        "repeats": v.repeats,
        "speed": finding.speed,
        "small": finding.small,
        "verdict": finding.says,
    }


def _number(error: float) -> float | str:
    return error if error < float("inf") else "not finite"


HEADS = ("op", "where", "shape", "dtype", "way", "output", "worst gradient", "x definition", "verdict")


def table(findings: Sequence[Finding]) -> list[tuple[str, ...]]:
    """Lines for people; errors are "ours / definition's"."""
    lines: list[tuple[str, ...]] = []
    for f in findings:
        v = f.verdict
        errors = ("", "")
        if v.errors:
            worst = v.worst
            errors = (
                _pair(v.errors[0].ours, v.errors[0].definition),
                f"{worst.name} {_pair(worst.ours, worst.definition)}",
            )
        speed = "" if f.speed is None else f"{f.speed:.1f}"
        lines.append((v.case.op, v.case.where, v.case.shape, v.dtype, v.way, *errors, speed, f.says))
    return lines


def _pair(ours: float, definition: float) -> str:
    return f"{ours:.1e} / {definition:.1e}"
