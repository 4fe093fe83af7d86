"""Create the launch table of a GPU: check and time every candidate of every kernel, and write the fastest ones.

The sizes are those of the model's operations in initial training and in fine-tuning.

Each kernel is timed separately: the launches of a forward and a backward pass are recorded, and then repeated one by
one. A candidate whose results are not exact enough (check/checks.py) is not timed.
"""

import datetime
import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from warpfold.bench.timing import Whole, measure
from warpfold.bulk import IsolatedProcess, ProcessDied
from warpfold.check.cases import OPS, PROFILES, inputs, meant_by, size_in_words
from warpfold.check.checks import DTYPES, run, truth
from warpfold.check.op_profile import OpCase
from warpfold.check.sizes import DataSizes, of_settings
from warpfold.cost.launches import Operations
from warpfold.cost.machine import describe
from warpfold.errors import UserError
from warpfold.files import update_file
from warpfold.model.alphafold import ModelConfig
from warpfold.ops import dispatch
from warpfold.ops.triton.launch import (
    KERNELS,
    KernelConfig,
    KernelLaunch,
    Key,
    TableEntry,
    family_table,
    file_of,
    forced,
    read,
    recorded,
    reset,
    table_used,
)
from warpfold.progress import Progress, no_progress

REPEATS = 20
# Most elements of the largest tensor of a case that is checked in fp64.
MAX_CHECKED = 2**26

# The seconds of each repetition.
Seconds = dict[KernelConfig, list[float]]


@contextmanager
def launching() -> Iterator[list[KernelLaunch]]:
    """Record the launches of registered operations on "meta" within the context."""
    with dispatch.interpreting(), recorded() as launches, Operations(lambda *_: None):
        yield launches


@dataclass(frozen=True)
class Workload:
    """An operation at a size of the model in a dtype."""

    op: str
    case: OpCase
    dtype: str

    def __str__(self) -> str:
        return f"{self.op}, {self.case.where}, {size_in_words(self.case)}, {self.dtype}"


@dataclass(frozen=True)
class TuningTask:
    """A kernel that a workload launches with a key, and whose candidates are to be timed."""

    workload: Workload
    kernel: str
    key: Key

    @property
    def candidates(self) -> list[KernelConfig]:
        """Distinct candidates of the kernel in its order."""
        return list(dict.fromkeys(KERNELS[self.kernel].candidates))


def launches_of(workload: Workload) -> list[KernelLaunch]:
    """Record the launches of a workload's forward and backward pass with meta tensors, on any machine."""
    case_inputs = inputs(workload.case, DTYPES[workload.dtype], "meta")
    with launching() as launches:
        run(OPS[workload.case.op].fast, case_inputs)
    return launches


def tuning_tasks(workloads: Iterable[Workload], quick: bool = False) -> list[TuningTask]:
    """List every kernel that workloads launch with its keys. Tasks of equal keys are consecutive.

    Workloads with the same key are timed together, so that the choice does not depend on the rows of a single one.
    quick: of layers with equal sizes (such as starting and ending node) only the first.
    """
    tasks: dict[tuple[str, Key], list[TuningTask]] = {}
    covered: set[Any] = set()
    for workload in workloads:
        case = workload.case
        sizes = (case.rows, case.length, case.keys, case.heads, case.width, case.channels, case.outputs, case.bias)
        for kernel, key in dict.fromkeys((launch.kernel.name, launch.key) for launch in launches_of(workload)):
            if not (quick and (kernel, key, workload.dtype, sizes) in covered):
                tasks.setdefault((kernel, key), []).append(TuningTask(workload, kernel, key))
            covered.add((kernel, key, workload.dtype, sizes))
    return [task for group in tasks.values() for task in group]


def choose_kernels(todo: Sequence[TuningTask], wanted: Sequence[str]) -> list[TuningTask]:
    """Select the tasks of kernels in this order: NAME for all keys of a kernel, NAME:32x2x256x256 for one key.

    Raises UserError for a kernel or key without a task.
    """
    selected: dict[TuningTask, None] = {}
    for text in wanted:
        name, _, key = text.partition(":")
        matching = [t for t in todo if t.kernel == name and key in ("", "x".join(map(str, t.key)))]
        if not matching:
            keys = dict.fromkeys("x".join(map(str, t.key)) for t in todo if t.kernel == name)
            choices = [f"{name}:{key}" for key in keys] or sorted({t.kernel for t in todo})
            raise UserError(f"--kernel {text}: nothing to tune. Choose from: {', '.join(choices)}")
        selected |= dict.fromkeys(matching)
    return list(selected)


def compile_candidates(todo: Sequence[TuningTask], device: torch.device, progress: Progress) -> None:
    """Fill Triton's cache with every candidate.

    A candidate that does not compile is skipped, because its trial will report the error.
    """
    if torch.version.hip is not None:
        return
    from triton.backends.compiler import GPUTarget

    from warpfold.ops.triton.ahead import compile_ahead

    major, minor = torch.cuda.get_device_capability(device)
    with table_used(family_table(device)):
        launches = [launch for task in todo for launch in trial_launches(task)]
    # Without a writable cache, the trials compile.
    with suppress(OSError):
        compile_ahead(launches, GPUTarget("cuda", 10 * major + minor, 32), progress)


def trial_launches(task: TuningTask) -> Iterator[KernelLaunch]:
    """Yield all launches of a task's trials, including the operation's other kernels by the table in use."""
    # Loading the kernel registers it.
    launches_of(task.workload)
    # A check has fewer rows than the model, and Triton may specialise the code for this number.
    workloads = dict.fromkeys((task.workload, replace(task.workload, case=with_room(task.workload.case))))
    for candidate in task.candidates:
        with forced({task.kernel: candidate}):
            launches = [launch for workload in workloads for launch in launches_of(workload)]
        yield from launches


class GpuBench:
    """The steps of tuning that need a CUDA device. Tests replace it."""

    def __init__(self, device: torch.device, repeats: int = REPEATS) -> None:
        self.device, self.repeats = device, repeats
        self.workload: Workload | None = None

    def time(
        self, task: TuningTask, candidates: Sequence[KernelConfig] | None = None
    ) -> tuple[Seconds, dict[KernelConfig, str]]:
        """Check each candidate at a size for which the definition has memory, and time it at the full size.

        candidates: all by default. Returns the seconds, and the reasons why candidates were not timed.
        """
        if task.workload != self.workload:
            self._prepare(task.workload)
        launches: dict[KernelConfig, list[KernelLaunch]] = {}
        out: dict[KernelConfig, str] = {}
        for candidate in task.candidates if candidates is None else candidates:
            with forced({task.kernel: candidate}):
                reason = self._reason_against()
                if reason:
                    out[candidate] = reason
                    continue
                with recorded(run=True) as made:
                    run(self.fast, self.whole)
            if of_task := [x for x in made if (x.kernel.name, x.key) == (task.kernel, task.key)]:
                launches[candidate] = of_task
            else:
                out[candidate] = "not launched with this key"
        ways = {
            str(c): Whole(str(c), lambda made=made: [launch.run() for launch in made])  # type: ignore[misc]
            for c, made in launches.items()
        }
        with torch.cuda.device(self.device):
            times = measure(list(ways.values()), self.device, self.repeats, math.inf, peaks=False)
        out |= {c: times[str(c)].failed for c in launches if times[str(c)].failed}
        return {c: times[str(c)].seconds["whole"] for c in launches if c not in out}, out

    def _prepare(self, workload: Workload) -> None:
        """Draw inputs and compute the definition's results for all kernels of a workload."""
        dtype, op = DTYPES[workload.dtype], OPS[workload.case.op]
        self.workload, self.fast = workload, op.fast
        self.whole = inputs(workload.case, dtype, self.device)
        self.checked = inputs(with_room(workload.case), dtype, self.device, masked=True)
        self.truth = truth(op.definition, self.checked.args, self.checked.grad, self.checked.names)

    def _reason_against(self) -> str:
        """Explain why the forced candidate is excluded; "" if its results are correct."""
        from triton.backends.nvidia.compiler import PTXASError
        from triton.compiler.errors import CompilationError
        from triton.runtime.errors import OutOfResources

        try:
            ours = run(self.fast, self.checked)
            # Errors of asynchronous kernels appear here.
            torch.cuda.synchronize(self.device)
        except (OutOfResources, PTXASError, CompilationError) as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())}"
        red = [e.name for e in self.truth.errors(ours) if e.red]
        return f"not exact: {', '.join(red)}" if red else ""


@dataclass(frozen=True)
class Trial:
    """Candidates of a task that another process tries on a device."""

    task: TuningTask
    candidates: tuple[KernelConfig, ...]
    device: torch.device


# The bench of this process, which keeps a workload's inputs between trials.
_bench: list[GpuBench] = []


def try_candidates(trial: Trial) -> tuple[Seconds, dict[KernelConfig, str]]:
    """Time candidates (`GpuBench.time`). After an illegal access this process ends, since its device is unusable."""
    # Loading the kernel registers it.
    launches_of(trial.task.workload)
    if not _bench:
        _bench.append(GpuBench(trial.device))
    try:
        # The table for the other kernels, which is equal on every GPU of the family.
        with table_used(family_table(trial.device)):
            return _bench[0].time(trial.task, trial.candidates)
    except RuntimeError as error:
        # torch and Triton have no class for these errors.
        if "CUDA error" not in str(error) and "[CUDA]" not in str(error):
            raise
        os._exit(1)


class IsolatedBench:
    """A `GpuBench` in a separate process, because a candidate may kill its process.

    The assembler sometimes generates wrong code: for one of 36 candidates of the transition, ptxas 12.8 generated an
    illegal read (H200, 2026-11-26).
    """

    def __init__(
        self,
        device: torch.device,
        process: IsolatedProcess,
        trial: Callable[[Trial], tuple[Seconds, dict[KernelConfig, str]]] = try_candidates,
    ) -> None:
        self.device, self.process, self.trial = device, process, trial

    def time(self, task: TuningTask) -> tuple[Seconds, dict[KernelConfig, str]]:
        """Time all candidates together. If this kills the process, find the responsible candidates and exclude them."""
        whole = Trial(task, tuple(task.candidates), self.device)
        with suppress(ProcessDied):
            return self.process(self.trial, whole)
        out: dict[KernelConfig, str] = {}
        for candidate in task.candidates:
            try:
                self.process(self.trial, replace(whole, candidates=(candidate,)))
            except ProcessDied:
                out[candidate] = "its code broke the device's context"
        if not out:
            raise UserError(
                f"{task.kernel} {task.key}: its candidates end a process together, but no candidate does so alone. "
                "Check the device with: warpfold doctor --kernels"
            )
        remaining = tuple(candidate for candidate in task.candidates if candidate not in out)
        seconds, trial_out = self.process(self.trial, replace(whole, candidates=remaining)) if remaining else ({}, {})
        return seconds, out | trial_out


def with_room(case: OpCase) -> OpCase:
    """Reduce the rows of a case so that its definition in fp64 fits in memory."""
    return case.with_rows(case.rows * MAX_CHECKED // PROFILES[case.op].numbers(case))


# ---- tables


INITIAL, FINE_TUNING = DataSizes(crop=256, max_msa=128, max_extra=1024), DataSizes(crop=384)
# Candidates within this factor of the fastest count as equal, and the first of them is chosen.
TIE_TOLERANCE = 1.01


@dataclass(frozen=True)
class Timed:
    """The seconds of a kernel's candidates in a workload, and the reasons why others were not timed."""

    kernel: str
    key: Key
    workload: str
    seconds: Seconds
    out: Mapping[KernelConfig, str]


def workloads(ops: Iterable[str], quick: bool = False) -> list[Workload]:
    """List the model's calls of the operations that --op selects. quick: only for initial training in bf16."""
    calls: dict[Workload, None] = {}
    for op in ops:
        names = meant_by([op])
        for sizes in (INITIAL,) if quick else (INITIAL, FINE_TUNING):
            for dtype in ("bf16",) if quick else ("bf16", "fp32"):
                cases = (case for case in of_settings(ModelConfig(), sizes) if case.op in names)
                calls |= dict.fromkeys(Workload(op, case, dtype) for case in cases)
    return list(calls)


def tune_on(
    device: torch.device,
    ops: Sequence[str],
    quick: bool,
    folder: Path,
    progress: Progress = no_progress,
    kernels: Sequence[str] = (),
    sink: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[Timed]:
    """Try every candidate on a GPU, and write each entry to the folder's table as soon as it is known.

    kernels: see `choose_kernels`; all by default. sink: receives the times of each task.
    Raises UserError if the device is not a GPU, or for kernels that the operations do not launch.
    """
    if device.type != "cuda":
        raise UserError(
            f"--device {device}: launch tables are made on a GPU. Run it there, or pass --dry-run to list the tasks on "
            "any machine."
        )
    # The table for the other kernels, which is equal on every GPU of the family.
    with table_used(family_table(device)):
        todo = tuning_tasks(workloads(ops, quick), quick)
        todo = choose_kernels(todo, kernels) if kernels else todo
        compile_candidates(todo, device, progress)
        with IsolatedProcess() as process:
            bench = IsolatedBench(device, process)
            return timed(
                todo, bench.time, progress, lambda entries: write(folder, head(device), entries, whole=False), sink
            )


def timed(
    todo: Sequence[TuningTask],
    time: Callable[[TuningTask], tuple[Seconds, dict[KernelConfig, str]]],
    progress: Progress = no_progress,
    known: Callable[[list[TableEntry]], object] = lambda entries: None,
    sink: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[Timed]:
    """Try the candidates of every task in order.

    time: returns the seconds of each candidate, and the reasons why others were not timed. known: receives the entry of
    each key after its last task. sink: receives the times of each task.
    """
    results: list[Timed] = []
    for done, task in enumerate(todo):
        progress(done, len(todo), f"{task.kernel}: {task.workload}")
        results.append(Timed(task.kernel, task.key, str(task.workload), *time(task)))
        medians = {str(c): round(1e6 * statistics.median(s), 1) for c, s in results[-1].seconds.items() if s}
        out = {str(c): reason for c, reason in results[-1].out.items()}
        row = {"kernel": task.kernel, "key": list(task.key), "workload": str(task.workload)}
        sink(row | {"microseconds": medians, "out": out})
        if not any((later.kernel, later.key) == (task.kernel, task.key) for later in todo[done + 1 :]):
            group = [result for result in results if (result.kernel, result.key) == (task.kernel, task.key)]
            # Without totals, `choose` explains at the end why there is no entry.
            if _totals(group):
                known(choose(group))
    return results


def choose(results: Iterable[Timed]) -> list[TableEntry]:
    """Choose the fastest candidate for each kernel and key, by the sum of medians over all workloads with that key.

    A candidate must have been timed in each of them. Among candidates within 1 % of the fastest, the first in the
    kernel's order is chosen, which reduces the influence of noise.
    Raises UserError if no candidate is left.
    """
    entries = []
    for (kernel, key), group in sorted(_grouped(results).items()):
        totals = _totals(group)
        if not totals:
            reasons = dict.fromkeys(reason for result in group for reason in result.out.values())
            raise UserError(f"{kernel} {key}: it gets no entry, because no candidate works: {'; '.join(reasons)}")
        best = min(totals.values())
        fastest = next(candidate for candidate, total in totals.items() if total <= TIE_TOLERANCE * best)
        entries.append(TableEntry(kernel, key, fastest))
    return entries


def _grouped(results: Iterable[Timed]) -> dict[tuple[str, Key], list[Timed]]:
    groups: dict[tuple[str, Key], list[Timed]] = {}
    for result in results:
        groups.setdefault((result.kernel, result.key), []).append(result)
    return groups


def _totals(group: Sequence[Timed]) -> dict[KernelConfig, float]:
    """Sum the median seconds of each candidate that was timed in every workload."""
    return {
        candidate: sum(statistics.median(result.seconds[candidate]) for result in group)
        for candidate in group[0].seconds
        if all(result.seconds.get(candidate) for result in group)
    }


def report(results: Sequence[Timed], entries: Iterable[TableEntry]) -> list[dict[str, Any]]:
    """Report for each kernel and key the choice, its microseconds and the slowest's, and the excluded candidates."""
    rows, groups = [], _grouped(results)
    for entry in entries:
        group = groups[entry.kernel, entry.key]
        totals = _totals(group)
        rows.append({
            "kernel": entry.kernel,
            "key": list(entry.key),
            "launch": str(entry.config),
            "microseconds": round(1e6 * totals[entry.config], 1),
            "slowest": round(1e6 * max(totals.values()), 1),
            "timed": len(totals),
            "out": {str(c): reason for result in group for c, reason in result.out.items()},
            "places": [result.workload for result in group],
        })  # fmt: skip
    return rows


def write(folder: Path, head: Mapping[str, str], entries: Iterable[TableEntry], whole: bool = True) -> Path:
    """Write a GPU's table with one launch per line.

    Entries of other kernels are kept; unless `whole`, also those of other keys of the same kernel. A table of another
    version of Triton is replaced completely.
    head: includes "gpu", the name. Raises UserError if the table cannot be written or the existing one not be read.
    """
    path = folder / file_of(head["gpu"])
    entries = list(entries)
    if path.is_file():
        before, anew = read(path), {(entry.kernel, () if whole else entry.key) for entry in entries}
        if before.head.get("triton") == head.get("triton"):
            entries += [e for e in before.entries if (e.kernel, () if whole else e.key) not in anew]
    _write_table(path, head, entries)
    return path


def ship(table: Path, family: Path) -> int:
    """Merge a tuned table into a shipped one, replacing entries of equal keys; returns the number of new entries.

    A shipped table has no version of Triton: `./dev triton` compiles its launches with the oldest and the newest one,
    and fails if one does not compile. Raises UserError if a table cannot be read or written.
    """
    tuned, before = read(table), read(family)
    new = {(entry.kernel, entry.key) for entry in tuned.entries}
    unchanged = [entry for entry in before.entries if (entry.kernel, entry.key) not in new]
    source = ", ".join(tuned.head[name] for name in ("gpu", "date") if name in tuned.head)
    _write_table(family, {**before.head, "tuned": source}, [*unchanged, *tuned.entries])
    return len(new)


def _write_table(path: Path, head: Mapping[str, str], entries: Iterable[TableEntry]) -> None:
    lines = []
    for entry in sorted(entries, key=lambda e: (e.kernel, e.key)):
        at, config = {"kernel": entry.kernel, "key": list(entry.key)}, entry.config
        launch = {"sizes": dict(config.sizes), "warps": config.warps, "stages": config.stages}
        lines.append(f"  {json.dumps(at | launch)}")
    facts = "".join(f" {json.dumps(name)}: {json.dumps(value)},\n" for name, value in head.items())
    update_file(path, ("{\n" + facts + ' "launches": [\n' + ",\n".join(lines) + "\n ]\n}\n").encode())
    reset()


def head(device: torch.device) -> dict[str, str]:
    """Return the head of a table, which describes its creation."""
    machine = describe(device)
    versions: dict[str, str] = {name: machine[name] for name in ("driver", "torch", "triton") if name in machine}
    return {"gpu": machine["device"], **versions, "date": datetime.date.today().isoformat(), "how": "warpfold tune"}
