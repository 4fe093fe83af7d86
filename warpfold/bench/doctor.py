"""Check that this device computes what it should, every operation of given settings, and say what it is good for.

Each operation runs as dispatch chooses: by its fast path, or by its definition, with the reason.  Errors are against
the definition in fp64; speeds come from a few passes and are rough.  The sentences are the last lines of
`warpfold doctor`.
"""

import importlib.util
import os
import shutil
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from warpfold import settings
from warpfold.bench.peers import DEFINITION, OURS
from warpfold.bench.timing import measure
from warpfold.check.cases import OPS, PROFILES, inputs, size_in_words
from warpfold.check.checks import DTYPES, Verdict, check
from warpfold.check.op_profile import OpCase
from warpfold.check.sizes import DataSizes, of_settings
from warpfold.cost.example import SECTIONS
from warpfold.cost.machine import describe, in_gb
from warpfold.device import caveats
from warpfold.errors import UserError
from warpfold.memory import free_memory, host_memory
from warpfold.model.alphafold import ModelConfig
from warpfold.ops.capabilities import slow_notice
from warpfold.progress import Progress, no_progress

LOGITS = {"cpu": 2**21, "cuda": 2**27}  # the most logits, or numbers in keys, of a case: it gets fewer rows
NUMBERS = {"cpu": 2**20, "cuda": 2**27}  # likewise, of a case that is not attention
REPEATS = 3
BUDGET = 0.6  # seconds of timing for a case


@dataclass(frozen=True)
class Finding:
    """What was found about one operation in one layer of the model."""

    verdict: Verdict
    speed: float | None  # the definition's time over ours, forward and backward; None where it is the definition
    small: bool = False  # at the model's own size the definition is faster, and chosen

    @property
    def says(self) -> str:
        """The verdict in a few words."""
        if self.verdict.red:
            return "RED"
        if self.verdict.reason:
            return f"not fast: {self.verdict.reason}"
        return "ok; small, so its definition is chosen" if self.small else "ok"


def cases_of(values: Mapping[str, Any], source: str) -> list[OpCase]:
    """Return every operation that a model of these settings calls, at the sizes of its training examples.

    Errors: UserError for sections that are not settings.
    """
    for key in values:
        if key not in SECTIONS:
            raise UserError(f"{source}: {key} is not a section of the settings; known: {', '.join(SECTIONS)}")
    model = settings.build(ModelConfig, values.get("model", {}), source)
    sizes = {key: value for key, value in values.get("data", {}).items() if key in DataSizes.__dataclass_fields__}
    return of_settings(model, settings.build(DataSizes, sizes, source))


def cut(case: OpCase, device: torch.device) -> OpCase:
    """Return the case with as many rows as the device checks in a moment; lengths stay."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    room = (LOGITS if case.logits else NUMBERS)[kind]
    return case.with_rows(max(2, case.rows * room // PROFILES[case.op].numbers(case)))


def examine(
    cases: Sequence[OpCase],
    device: torch.device,
    dtypes: Sequence[str] = tuple(DTYPES),
    progress: Progress = no_progress,
    sink: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[Finding]:
    """Check every case in every dtype, and time those that have a fast path; sink: gets each finding at once."""
    found = []
    todo = [(whole, cut(whole, device), dtype) for whole in cases for dtype in dtypes]
    for done, (whole, case, dtype) in enumerate(todo):
        progress(done, len(todo), f"{case.op} {case.where} {dtype}")
        verdict = check(case, dtype, device)
        speed = _speed(case, dtype, device) if verdict.errors and not (verdict.red or verdict.reason) else None
        found.append(Finding(verdict, speed, _is_small(whole, dtype, device)))
        sink(_plain(found[-1]))
    return found


def _is_small(case: OpCase, dtype: str, device: torch.device) -> bool:
    op = OPS[case.op]
    if device.type != "cpu" or op.prefer_definition is None:  # a GPU always takes the fast path
        return False
    return op.prefer_definition(op.arguments(*inputs(case, DTYPES[dtype], "meta").args))  # sizes alone decide


def _speed(case: OpCase, dtype: str, device: torch.device) -> float | None:
    given = inputs(case, DTYPES[dtype], device)
    times = measure([DEFINITION.make(given), OURS.make(given)], device, REPEATS, BUDGET / 2, peaks=False)
    seconds = {name: (t.median("training"), t.median("backward")) for name, t in times.items()}
    if any(None in pair for pair in seconds.values()):
        return None  # out of memory
    total = {name: sum(s for s in pair if s) for name, pair in seconds.items()}
    return total["definition"] / total["ours"]


def report(findings: Sequence[Finding], device: torch.device, source: str) -> dict[str, Any]:
    """Return the findings and the machine, for JSON."""
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
        "shape": size_in_words(v.case),
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
    """Return the rows of a table; errors are "ours / definition's"."""
    lines: list[tuple[str, ...]] = []
    for f in findings:
        v = f.verdict
        output = gradient = ""
        if v.errors:
            output, gradient = (f"{e.ours:.1e} / {e.definition:.1e}" for e in (v.errors[0], v.worst))
            gradient = f"{v.worst.name} {gradient}"
        speed = "" if f.speed is None else f"{f.speed:.1f}"
        lines.append((v.case.op, v.case.where, size_in_words(v.case), v.dtype, v.way, output, gradient, speed, f.says))
    return lines


# ---- in sentences


LITTLE = 4 * 10**9  # bytes of memory below which a full-size model hardly runs
LITTLE_SHARED = 10**9  # bytes of /dev/shm below which torch's own loaders run out
OPTIONAL = {  # package: what it is for, and how to have it
    "openmm": ("relax", "pip install '.[relax]'"),
    "tensorboard": ("curves in TensorBoard", "pip install '.[tensorboard]'"),
}


def of_machine(device: torch.device) -> list[str]:
    """Say what a machine is fit for, and what is missing or slow and why; the first sentence sums it up."""
    if device.type not in ("cpu", "cuda"):
        return [
            f"WarpFold is made for CPUs and CUDA GPUs: on {device.type} every operation runs by its definition.",
            *(f"Never tried: {caveat}" for caveat in caveats("fp32", device)),
        ]
    free, cores = free_memory(device), os.cpu_count() or 1
    if device.type == "cuda":
        notice = slow_notice(device)
        fit = "is slow" if notice else "is fine"
        said = [f"This machine {fit} for training, fine-tuning and predictions: a GPU with {in_gb(free)} free."]
        if notice:
            said.append(f"Slow: {notice}")
    else:
        said = [
            f"This machine is fine for the demo, for data (sample, search, pack, score), for small models and short "
            f"proteins: {cores} {'core' if cores == 1 else 'cores'}, {in_gb(free)} free.",
            "Slow: full-size models, because there is no GPU; warpfold plan monomer --residues 300 says how long one "
            "protein takes here",
        ]
        if torch.backends.mps.is_available():
            said.append("Not used: this Mac's GPU, unless --device mps is given; WarpFold was never run on one")
    if free < LITTLE:
        said.append(f"Short: {in_gb(free)} of memory is free; warpfold plan says what fits, --memory limits a run")
    if device.type == "cuda" and host_memory() < LITTLE:
        said.append(f"Short: {in_gb(host_memory())} of host memory is free, for the data's processes")
    shared = Path("/dev/shm")
    if shared.is_dir() and shutil.disk_usage(shared).free < LITTLE_SHARED:
        said.append("Short: /dev/shm has less than 1 GB; WarpFold's loaders do not need it, torch's DataLoader does")
    for package, (purpose, cure) in OPTIONAL.items():
        if importlib.util.find_spec(package) is None:
            said.append(f"Not here: {purpose}, because {package} is not installed; {cure}")
    return said


def of_findings(findings: Sequence[Finding], source: str, device: torch.device) -> list[str]:
    """Sum up the check of the operations; the first sentence says it in short."""
    red = [f for f in findings if f.verdict.red]
    if red:
        cure = "use --device cpu" if device.type != "cpu" else "do not trust what is computed here"
        said = [
            f"WRONG: {len(red)} of {len(findings)} operations are not computed as they should be "
            f"({_names(red)}); {cure}, and report it with what warpfold doctor --kernels --json prints"
        ]
    else:
        said = [f"All {len(findings)} operations of {source} are computed as they should be, forward and backward."]
    fine = [f for f in findings if not f.verdict.red]
    fast = [f.speed for f in fine if f.speed is not None and not f.small and not f.verdict.reason]
    if fast:
        said.append(
            f"Ours: {len(fast)} run in WarpFold's own way, {statistics.median(fast):.1f} times as fast as their "
            "definitions in the median, in less memory"
        )
    small = sum(f.small and not f.verdict.reason for f in fine)
    if small:
        said.append(f"As good: {small} are so small in {source} that their definitions are as fast, and are used")
    for reason, some in _by_reason(fine).items():
        said.append(f"Slow: {len(some)} run by their definitions ({_names(some)}), because {reason}")
    return said


def _by_reason(findings: Sequence[Finding]) -> Mapping[str, list[Finding]]:
    found = defaultdict(list)
    for finding in findings:
        if finding.verdict.reason:
            found[finding.verdict.reason].append(finding)
    return found


def _names(findings: Sequence[Finding]) -> str:
    return ", ".join(dict.fromkeys(f.verdict.case.op for f in findings))
