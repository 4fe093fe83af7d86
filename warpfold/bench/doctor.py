"""Check that this device computes every operation of given settings correctly, and describe its suitability.

Each operation runs as dispatch chooses: by its fast path, or by its definition, with the reason. Errors are relative to
the definition in fp64. Speeds are rough, since they come from a few passes. The sentences are the last lines of
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
from warpfold.check.sizes import of_settings
from warpfold.cost.example import data_sizes
from warpfold.cost.machine import describe
from warpfold.device import caveats
from warpfold.memory import free_memory, host_memory
from warpfold.model.alphafold import ModelConfig
from warpfold.ops.capabilities import slow_notice
from warpfold.progress import Progress, format_gb, no_progress

# Most logits of an attention case, and most elements of other cases. Larger cases get fewer rows.
MAX_LOGITS = {"cpu": 2**21, "cuda": 2**27}
MAX_ELEMENTS = {"cpu": 2**20, "cuda": 2**27}
REPEATS = 3
# Seconds for timing a case.
BUDGET = 0.6


@dataclass(frozen=True)
class Finding:
    """The result for an operation in a layer of the model.

    speed: time of the definition relative to ours, forward and backward; None if the definition is used. small: at the
    model's own size, the definition is faster and is chosen.
    """

    verdict: Verdict
    speed: float | None
    small: bool = False

    @property
    def says(self) -> str:
        """Verdict in a few words."""
        if self.verdict.red:
            return "RED"
        if self.verdict.reason:
            return f"not fast: {self.verdict.reason}"
        return "ok; small, so its definition is chosen" if self.small else "ok"


def cases_of(values: Mapping[str, Any], source: str) -> list[OpCase]:
    """List every operation that a model of these settings calls, at the sizes of its training examples.

    Raises UserError for unknown sections of the settings.
    """
    sizes = data_sizes(values, source)
    return of_settings(settings.build(ModelConfig, values.get("model", {}), source), sizes)


def cut(case: OpCase, device: torch.device) -> OpCase:
    """Reduce the rows of a case so that the device checks it in a moment."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    room = (MAX_LOGITS if case.logits else MAX_ELEMENTS)[kind]
    return case.with_rows(max(2, case.rows * room // PROFILES[case.op].numbers(case)))


def examine(
    cases: Sequence[OpCase],
    device: torch.device,
    dtypes: Sequence[str] = tuple(DTYPES),
    progress: Progress = no_progress,
    sink: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[Finding]:
    """Check every case in every dtype, and time those with a fast path. sink: receives each finding at once."""
    findings = []
    todo = [(whole, cut(whole, device), dtype) for whole in cases for dtype in dtypes]
    for done, (whole, case, dtype) in enumerate(todo):
        progress(done, len(todo), f"{case.op} {case.where} {dtype}")
        verdict = check(case, dtype, device)
        speed = _speed(case, dtype, device) if verdict.errors and not (verdict.red or verdict.reason) else None
        op, is_small = OPS[whole.op], False
        if device.type == "cpu" and op.prefer_definition is not None:
            # The decision depends only on sizes, so meta tensors suffice. A GPU always uses the fast path.
            is_small = op.prefer_definition(op.arguments(*inputs(whole, DTYPES[dtype], "meta").args))
        findings.append(Finding(verdict, speed, is_small))
        sink(_plain(findings[-1]))
    return findings


def _speed(case: OpCase, dtype: str, device: torch.device) -> float | None:
    case_inputs = inputs(case, DTYPES[dtype], device)
    times = measure([DEFINITION.make(case_inputs), OURS.make(case_inputs)], device, REPEATS, BUDGET / 2, peaks=False)
    seconds = {name: (t.median("training"), t.median("backward")) for name, t in times.items()}
    # A missing time means that the run was out of memory.
    if any(None in pair for pair in seconds.values()):
        return None
    total = {name: sum(s for s in pair if s) for name, pair in seconds.items()}
    return total["definition"] / total["ours"]


def report(findings: Sequence[Finding], device: torch.device, source: str) -> dict[str, Any]:
    """Report the findings and the machine as a JSON value."""
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
    """Format the findings as rows of a table. Errors are "ours / definition's"."""
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


# ---- sentences


# Bytes of memory below which a full-size model hardly runs.
MIN_MEMORY = 4 * 10**9
# Bytes of /dev/shm below which torch's own loaders run out.
MIN_SHARED = 10**9
# Packages with their purpose and their installation.
OPTIONAL = {
    "openmm": ("relax", "pip install '.[relax]'"),
    "tensorboard": ("curves in TensorBoard", "pip install '.[tensorboard]'"),
}


def of_machine(device: torch.device) -> list[str]:
    """Describe what a machine is suitable for, and what is missing or slow and why. The first sentence is a summary."""
    if device.type not in ("cpu", "cuda"):
        return [
            f"WarpFold supports CPUs and CUDA GPUs: on {device.type} every operation runs by its definition.",
            *(f"Never tried: {caveat}" for caveat in caveats("fp32", device)),
        ]
    free, cores = free_memory(device), os.cpu_count() or 1
    if device.type == "cuda":
        notice = slow_notice(device)
        fit = "is slow" if notice else "is fine"
        sentences = [
            f"This machine {fit} for training, fine-tuning and predictions: a GPU with {format_gb(free)} free."
        ]
        if notice:
            sentences.append(f"Slow: {notice}")
    else:
        sentences = [
            f"This machine is fine for the demo, for data (sample, search, pack, score), for small models and short "
            f"proteins: {cores} {'core' if cores == 1 else 'cores'}, {format_gb(free)} free.",
            "Slow: full-size models, because there is no GPU. warpfold plan monomer --residues 300 estimates the time "
            "of one protein here",
        ]
        if torch.backends.mps.is_available():
            sentences.append("Not used: this Mac's GPU, without --device mps; WarpFold was never run on one")
    if free < MIN_MEMORY:
        sentences.append(
            f"Short: {format_gb(free)} of memory is free; warpfold plan says what fits, --memory limits a run"
        )
    if device.type == "cuda" and host_memory() < MIN_MEMORY:
        sentences.append(f"Short: {format_gb(host_memory())} of host memory is free for the processes of the loader")
    shared = Path("/dev/shm")
    if shared.is_dir() and shutil.disk_usage(shared).free < MIN_SHARED:
        sentences.append("Short: /dev/shm has less than 1 GB, which torch's DataLoader needs and WarpFold's does not")
    for package, (purpose, remedy) in OPTIONAL.items():
        if importlib.util.find_spec(package) is None:
            sentences.append(f"Not here: {purpose}, because {package} is not installed. Install it: {remedy}")
    return sentences


def of_findings(findings: Sequence[Finding], source: str, device: torch.device) -> list[str]:
    """Summarise the check of the operations. The first sentence is the shortest summary."""
    red = [f for f in findings if f.verdict.red]
    if red:
        remedy = "Use --device cpu" if device.type != "cpu" else "Do not trust results of this machine"
        sentences = [
            f"WRONG: {len(red)} of {len(findings)} operations are computed incorrectly ({_names(red)}). {remedy}, and "
            "report the output of warpfold doctor --kernels --json"
        ]
    else:
        sentences = [f"All {len(findings)} operations of {source} are computed correctly, forward and backward."]
    fine = [f for f in findings if not f.verdict.red]
    fast = [f.speed for f in fine if f.speed is not None and not f.small and not f.verdict.reason]
    if fast:
        sentences.append(
            f"Ours: {len(fast)} run by WarpFold's fast paths, {statistics.median(fast):.1f} times as fast as their "
            "definitions in the median, with less memory"
        )
    small = sum(f.small and not f.verdict.reason for f in fine)
    if small:
        sentences.append(f"As good: {small} are so small in {source} that their definitions are as fast, and are used")
    by_reason = defaultdict(list)
    for finding in fine:
        if finding.verdict.reason:
            by_reason[finding.verdict.reason].append(finding)
    for reason, slow_findings in by_reason.items():
        sentences.append(
            f"Slow: {len(slow_findings)} run by their definitions ({_names(slow_findings)}), because {reason}"
        )
    return sentences


def _names(findings: Sequence[Finding]) -> str:
    return ", ".join(dict.fromkeys(f.verdict.case.op for f in findings))
