"""Make the launch table of a GPU: check and time every candidate of every kernel, and write down the fastest.

Sizes are those of the model's operations in initial training and in fine-tuning.

Kernels are launched by their own launchers, and each is timed alone: the launches of a forward and a backward pass are
recorded as they run, then run again one by one.  A candidate whose results are not exact enough (check/checks.py) is
not timed.
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
from warpfold.cost.machine import describe
from warpfold.cost.observe import Operations
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
CHECKED = 2**26  # the most numbers in the largest tensor of a case that is checked, in fp64

Seconds = dict[KernelConfig, list[float]]  # of each repeat


@contextmanager
def launching() -> Iterator[list[KernelLaunch]]:
    """Note what registered operations on "meta" would launch within the context."""
    with dispatch.interpreting(), recorded() as launches, Operations(lambda *_: None, launchers=True):
        yield launches


@dataclass(frozen=True)
class Workload:
    """An operation at a size of the model, in a dtype."""

    op: str
    case: OpCase
    dtype: str

    def __str__(self) -> str:
        return f"{self.op}, {self.case.where}, {size_in_words(self.case)}, {self.dtype}"


@dataclass(frozen=True)
class TuningTask:
    """The candidates of a kernel that a workload launches with this key."""

    workload: Workload
    kernel: str
    key: Key

    @property
    def candidates(self) -> list[KernelConfig]:
        """The kernel's candidates in its order, each once."""
        return list(dict.fromkeys(KERNELS[self.kernel].candidates))

    def among(self, launches: Iterable[KernelLaunch]) -> list[KernelLaunch]:
        """Return the launches of this kernel with this key."""
        return [launch for launch in launches if (launch.kernel.name, launch.key) == (self.kernel, self.key)]


def launches_of(workload: Workload) -> list[KernelLaunch]:
    """Return the launches of a workload's forward and backward pass, on any machine: tensors have no memory."""
    given = inputs(workload.case, DTYPES[workload.dtype], "meta")
    with launching() as launches:
        run(OPS[workload.case.op].fast, given)
    return launches


def tuning_tasks(workloads: Iterable[Workload], quick: bool = False) -> list[TuningTask]:
    """Return every kernel that workloads launch, with its keys, those of one key behind one another.

    quick: of layers with the same sizes (a starting and an ending node) only the first; others of one key decide
    together, so that none inherits what was tuned on another's rows.
    """
    found: dict[tuple[str, Key], list[TuningTask]] = {}
    seen: set[Any] = set()
    for workload in workloads:
        case = workload.case
        sizes = (case.rows, case.length, case.keys, case.heads, case.width, case.channels, case.outputs, case.bias)
        for kernel, key in dict.fromkeys((launch.kernel.name, launch.key) for launch in launches_of(workload)):
            if not (quick and (kernel, key, workload.dtype, sizes) in seen):
                found.setdefault((kernel, key), []).append(TuningTask(workload, kernel, key))
            seen.add((kernel, key, workload.dtype, sizes))
    return [task for tasks in found.values() for task in tasks]


def choose_kernels(todo: Sequence[TuningTask], wanted: Sequence[str]) -> list[TuningTask]:
    """Keep the tasks of these kernels, in this order: NAME for all keys of a kernel, NAME:32x2x256x256 for one key.

    Errors: UserError for a kernel or key that no task has.
    """
    found: dict[TuningTask, None] = {}
    for text in wanted:
        name, _, key = text.partition(":")
        matching = [t for t in todo if t.kernel == name and key in ("", "x".join(map(str, t.key)))]
        if not matching:
            keys = dict.fromkeys("x".join(map(str, t.key)) for t in todo if t.kernel == name)
            known = [f"{name}:{one}" for one in keys] or sorted({t.kernel for t in todo})
            raise UserError(f"--kernel {text}: nothing to tune. Choose from: {', '.join(known)}")
        found |= dict.fromkeys(matching)
    return list(found)


def compile_candidates(todo: Sequence[TuningTask], device: torch.device, progress: Progress) -> None:
    """Fill Triton's cache with every candidate.

    A candidate that does not compile is skipped: its trial will report the error.
    """
    if torch.version.hip is not None:
        return
    from triton.backends.compiler import GPUTarget

    from warpfold.ops.triton.ahead import compile_ahead

    major, minor = torch.cuda.get_device_capability(device)
    with table_used(family_table(device)):
        launches = [launch for task in todo for launch in trial_launches(task)]
    with suppress(OSError):  # the cache cannot be written to
        compile_ahead(launches, GPUTarget("cuda", 10 * major + minor, 32), progress)


def trial_launches(task: TuningTask) -> Iterator[KernelLaunch]:
    """Yield everything that the trials of a task launch, also the operation's other kernels, by the table in use."""
    launches_of(task.workload)  # loads, and so registers, the kernel
    # A check has fewer rows than the model: another number, which Triton may specialise the code for.
    places = dict.fromkeys((task.workload, replace(task.workload, case=with_room(task.workload.case))))
    for candidate in task.candidates:
        with forced({task.kernel: candidate}):
            launches = [launch for place in places for launch in launches_of(place)]
        yield from launches


class GpuBench:
    """The part of tuning that needs a CUDA device; tests replace it."""

    def __init__(self, device: torch.device, repeats: int = REPEATS) -> None:
        self.device, self.repeats = device, repeats
        self.workload: Workload | None = None

    def time(
        self, task: TuningTask, candidates: Sequence[KernelConfig] | None = None
    ) -> tuple[Seconds, dict[KernelConfig, str]]:
        """Check each candidate at a size that the definition has room for, and time it at the whole; or only some."""
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
            if of_task := task.among(made):
                launches[candidate] = of_task
            else:
                out[candidate] = "not launched with this key"
        ways = {str(c): Whole(str(c), lambda made=made: [one.run() for one in made]) for c, made in launches.items()}  # type: ignore[misc]
        with torch.cuda.device(self.device):
            times = measure(list(ways.values()), self.device, self.repeats, math.inf, peaks=False)
        out |= {c: times[str(c)].failed for c in launches if times[str(c)].failed}
        return {c: times[str(c)].seconds["whole"] for c in launches if c not in out}, out

    def _prepare(self, workload: Workload) -> None:
        """Draw inputs and compute the definition's results, for all kernels of a workload."""
        dtype, op = DTYPES[workload.dtype], OPS[workload.case.op]
        self.workload, self.fast = workload, op.fast
        self.whole = inputs(workload.case, dtype, self.device)
        self.checked = inputs(with_room(workload.case), dtype, self.device, masked=True)
        self.truth = truth(op.definition, self.checked.args, self.checked.grad, self.checked.names)

    def _reason_against(self) -> str:
        """Return why the candidate that is forced now is out; an empty string if it is right."""
        from triton.backends.nvidia.compiler import PTXASError
        from triton.compiler.errors import CompilationError
        from triton.runtime.errors import OutOfResources

        try:
            ours = run(self.fast, self.checked)
            torch.cuda.synchronize(self.device)
        except (OutOfResources, PTXASError, CompilationError) as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())}"
        red = [e.name for e in self.truth.errors(ours) if e.red]
        return f"not exact: {', '.join(red)}" if red else ""


@dataclass(frozen=True)
class Trial:
    """Candidates of a task to be tried on a device, in the process that is given them."""

    task: TuningTask
    candidates: tuple[KernelConfig, ...]
    device: torch.device


_bench: list[GpuBench] = []  # of this process, which keeps a workload's inputs from one trial to the next


def try_candidates(trial: Trial) -> tuple[Seconds, dict[KernelConfig, str]]:
    """Time candidates (`GpuBench.time`).  An illegal access takes the device from a process for good: this one ends."""
    launches_of(trial.task.workload)  # loads, and so registers, the kernel
    if not _bench:
        _bench.append(GpuBench(trial.device))
    try:
        with table_used(family_table(trial.device)):  # of the other kernels: the same on every GPU of its kind
            return _bench[0].time(trial.task, trial.candidates)
    except RuntimeError as error:  # torch's and Triton's
        if "CUDA error" not in str(error) and "[CUDA]" not in str(error):
            raise
        os._exit(1)


class IsolatedBench:
    """Times tasks as a `GpuBench` in a process of its own, which a candidate may kill.

    An assembler makes wrong code now and then: of 36 candidates for the transition, ptxas 12.8 made one that read
    where no memory is (H200, 2026-11-26).
    """

    def __init__(
        self,
        device: torch.device,
        process: IsolatedProcess,
        trial: Callable[[Trial], tuple[Seconds, dict[KernelConfig, str]]] = try_candidates,
    ) -> None:
        self.device, self.process, self.trial = device, process, trial

    def time(self, task: TuningTask) -> tuple[Seconds, dict[KernelConfig, str]]:
        """Time all candidates together; if that kills the process, those that do not do so alone."""
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
                f"{task.kernel} {task.key}: its candidates end a process together, and none alone; is the device fit? "
                "warpfold doctor --kernels"
            )
        rest = tuple(candidate for candidate in task.candidates if candidate not in out)
        seconds, others = self.process(self.trial, replace(whole, candidates=rest)) if rest else ({}, {})
        return seconds, out | others


def with_room(case: OpCase) -> OpCase:
    """Return the case with no more rows than its definition in fp64 has room for."""
    return case.with_rows(case.rows * CHECKED // PROFILES[case.op].numbers(case))


# ---- tables


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
    device: torch.device,
    ops: Sequence[str],
    quick: bool,
    folder: Path,
    progress: Progress = no_progress,
    kernels: Sequence[str] = (),
    sink: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[Timed]:
    """Try every candidate on a GPU; each entry is in the folder's table as soon as it is known.

    kernels: as of `choose_kernels`; by default all.  sink: gets the times of each task as soon as it is done.
    Errors: UserError where the device is not a GPU, or for kernels that the operations do not launch.
    """
    if device.type != "cuda":
        raise UserError(
            f"--device {device}: kernels run on a GPU, and launch tables are made there; --dry-run lists what would be "
            "timed, on any machine"
        )
    with table_used(family_table(device)):  # of the other kernels: the same on every GPU of its kind
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
    """Try the candidates of every task, in order; `known` is given the entry of each key when its last task is done.

    time: measures the seconds of each candidate, and says why others are out.  sink: gets the times of each task.
    """
    found: list[Timed] = []
    for done, task in enumerate(todo):
        progress(done, len(todo), f"{task.kernel}: {task.workload}")
        found.append(Timed(task.kernel, task.key, str(task.workload), *time(task)))
        medians = {str(c): round(1e6 * statistics.median(s), 1) for c, s in found[-1].seconds.items() if s}
        out = {str(c): reason for c, reason in found[-1].out.items()}
        row = {"kernel": task.kernel, "key": list(task.key), "workload": str(task.workload)}
        sink(row | {"microseconds": medians, "out": out})
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
    """Add up the seconds of each candidate that was timed in every workload."""
    return {
        candidate: sum(statistics.median(one.seconds[candidate]) for one in group)
        for candidate in group[0].seconds
        if all(one.seconds.get(candidate) for one in group)
    }


def report(found: Sequence[Timed], entries: Iterable[TableEntry]) -> list[dict[str, Any]]:
    """Make a row for each kernel and key: what was chosen, its microseconds and the slowest's, and what is out."""
    rows, groups = [], _grouped(found)
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
            "out": {str(c): reason for one in group for c, reason in one.out.items()},
            "places": [one.workload for one in group],
        })  # fmt: skip
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
    _write_table(path, head, entries)
    return path


def ship(table: Path, family: Path) -> int:
    """Write the entries of a tuned table into a shipped one, replacing those of the same keys; return how many.

    A shipped table names no version of Triton: `./dev triton` compiles its launches with the oldest and the newest, and
    fails where one does not fit. Errors: UserError where a table cannot be read or written.
    """
    tuned, before = read(table), read(family)
    anew = {(entry.kernel, entry.key) for entry in tuned.entries}
    kept = [entry for entry in before.entries if (entry.kernel, entry.key) not in anew]
    made = ", ".join(tuned.head[name] for name in ("gpu", "date") if name in tuned.head)
    _write_table(family, {**before.head, "tuned": made}, [*kept, *tuned.entries])
    return len(anew)


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
    """Return the head of a table: how it was made."""
    found = describe(device)
    versions: dict[str, str] = {name: found[name] for name in ("driver", "torch", "triton") if name in found}
    return {"gpu": found["device"], **versions, "date": datetime.date.today().isoformat(), "how": "warpfold tune"}
