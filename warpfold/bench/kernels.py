"""Make the launch table of a GPU: check and time every candidate of every kernel, and write down the fastest.

Sizes are those of the model's operations in initial training and in fine-tuning.
"""

import datetime
import json
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from warpfold.bench.kernel_bench import (
    Bench,
    GpuBench,
    Seconds,
    TuningTask,
    Workload,
    compile_ahead,
    tuning_tasks,
)
from warpfold.check.cases import meant_by
from warpfold.check.sizes import DataSizes, of_settings
from warpfold.cost.machine import describe
from warpfold.errors import UserError
from warpfold.files import update_file
from warpfold.model.alphafold import ModelConfig
from warpfold.ops.triton.launch import SHIPPED, KernelConfig, Key, TableEntry, file_of, read, reset, table_used
from warpfold.progress import Progress, no_progress

INITIAL, FINE_TUNING = DataSizes(crop=256, max_msa=128, max_extra=1024), DataSizes(crop=384)
SAME = 1.01  # faster by less is no difference: of such candidates the first is taken


@dataclass(frozen=True)
class Timed:
    """What the candidates of a kernel took in one workload; and why others were not timed."""

    kernel: str
    key: Key
    workload: str
    seconds: Seconds
    out: Mapping[KernelConfig, str]


def workloads(ops: Iterable[str], quick: bool = False) -> list[Workload]:
    """Return how the model calls the operations that --op means; quick: only in initial training, in bf16."""
    found: dict[Workload, None] = {}
    for op in ops:
        names = meant_by([op])
        for sizes in (INITIAL,) if quick else (INITIAL, FINE_TUNING):
            for dtype in ("bf16",) if quick else ("bf16", "fp32"):
                cases = (case for case in of_settings(ModelConfig(), sizes) if case.op in names)
                found |= dict.fromkeys(Workload(op, case, dtype) for case in cases)
    return list(found)


def tune_on(
    device: torch.device, ops: Sequence[str], quick: bool, folder: Path, progress: Progress = no_progress
) -> list[Timed]:
    """Try every candidate on a GPU; each entry is in the folder's table as soon as it is known.

    Errors: UserError where the device is not a GPU.
    """
    if device.type != "cuda":
        raise UserError(
            f"--device {device}: kernels run on a GPU, and launch tables are made there; --dry-run lists what would be "
            "timed, on any machine"
        )
    with table_used(read(SHIPPED / "default.json")):  # of the other kernels: the same wherever a table is made
        todo = tuning_tasks(workloads(ops, quick), quick)
        compile_ahead(todo, device, os.cpu_count() or 1, progress)
        return timed(
            todo, GpuBench(device), progress, lambda entries: write(folder, head(device), entries, whole=False)
        )


def timed(
    todo: Sequence[TuningTask],
    bench: Bench,
    progress: Progress = no_progress,
    known: Callable[[list[TableEntry]], object] = lambda entries: None,
) -> list[Timed]:
    """Try the candidates of every task, in order; `known` is given the entry of each key when its last task is done."""
    found: list[Timed] = []
    for done, task in enumerate(todo):
        progress(done, len(todo), f"{task.kernel}: {task.workload}")
        found.append(Timed(task.kernel, task.key, str(task.workload), *bench.time(task)))
        if not any((later.kernel, later.key) == (task.kernel, task.key) for later in todo[done + 1 :]):
            group = [one for one in found if (one.kernel, one.key) == (task.kernel, task.key)]
            if _totals(group):  # else `choose` says at the end why there is none
                known(choose(group))
    return found


def choose(found: Iterable[Timed]) -> list[TableEntry]:
    """Choose the fastest candidate for each kernel and key, by the sum of medians over all workloads with that key.

    A candidate must have been timed in each of them.  Of those within one per cent of the fastest, the first that the
    kernel names, so that noise decides less.
    Errors: UserError where no candidate is left.
    """
    entries = []
    for (kernel, key), group in sorted(_grouped(found).items()):
        totals = _totals(group)
        if not totals:
            reasons = dict.fromkeys(reason for one in group for reason in one.out.values())
            raise UserError(f"{kernel} {key}: no candidate is fit: {'; '.join(reasons)}; it gets no entry")
        best = min(totals.values())
        entries.append(TableEntry(kernel, key, next(c for c, total in totals.items() if total <= SAME * best)))
    return entries


def _grouped(found: Iterable[Timed]) -> dict[tuple[str, Key], list[Timed]]:
    groups: dict[tuple[str, Key], list[Timed]] = {}
    for one in found:
        groups.setdefault((one.kernel, one.key), []).append(one)
    return groups


def _totals(group: Sequence[Timed]) -> dict[KernelConfig, float]:
    """Return the seconds of each candidate that was timed in every workload."""
    return {
        candidate: sum(statistics.median(one.seconds[candidate]) for one in group)
        for candidate in group[0].seconds
        if all(one.seconds.get(candidate) for one in group)
    }


def report(found: Sequence[Timed], entries: Iterable[TableEntry]) -> list[dict[str, Any]]:
    """Return a row for each kernel and key: what was chosen, its microseconds and the slowest's, and what is out."""
    groups = _grouped(found)
    rows = []
    for entry in entries:
        group = groups[entry.kernel, entry.key]
        totals = _totals(group)
        rows.append(
            {
                "kernel": entry.kernel,
                "key": list(entry.key),
                "launch": str(entry.config),
                "microseconds": round(1e6 * totals[entry.config], 1),
                "slowest": round(1e6 * max(totals.values()), 1),
                "timed": len(totals),
                "out": {str(c): reason for one in group for c, reason in one.out.items()},
                "places": [one.workload for one in group],
            }
        )
    return rows


def write(folder: Path, head: Mapping[str, str], entries: Iterable[TableEntry], whole: bool = True) -> Path:
    """Write a GPU's table, one launch a line; entries of kernels that are not among these stay as they were, or, if
    these are not the `whole` of a kernel's, those of other keys.  A table of another version of Triton is dropped.

    head: says "gpu", the name.  Errors: UserError where it cannot be written, or what is there cannot be read.
    """
    path = folder / file_of(head["gpu"])
    entries = list(entries)
    if path.is_file():
        before, anew = read(path), {(entry.kernel, () if whole else entry.key) for entry in entries}
        if before.head.get("triton") == head.get("triton"):
            entries += [e for e in before.entries if (e.kernel, () if whole else e.key) not in anew]
    lines = []
    for entry in sorted(entries, key=lambda e: (e.kernel, e.key)):
        at, config = {"kernel": entry.kernel, "key": list(entry.key)}, entry.config
        launch = {"sizes": dict(config.sizes), "warps": config.warps, "stages": config.stages}
        lines.append(f"  {json.dumps(at | launch)}")
    facts = "".join(f" {json.dumps(name)}: {json.dumps(value)},\n" for name, value in head.items())
    update_file(path, ("{\n" + facts + ' "launches": [\n' + ",\n".join(lines) + "\n ]\n}\n").encode())
    reset()
    return path


def head(device: torch.device) -> dict[str, str]:
    """Return what a table says of its making."""
    found = describe(device)
    date = datetime.date.today().isoformat()
    return {
        "gpu": found["device"],
        **{name: found[name] for name in ("driver", "torch", "triton") if name in found},
        "date": date,
        "how": "warpfold tune",
    }
