"""The launch table of a GPU: every candidate of every kernel, checked, timed, and the fastest written down.

Kernels are launched by their own launchers, at the sizes at which the model calls them in initial training and in
fine-tuning, and each is timed alone: the calls of a forward and a backward pass are noted as they run, then run again
by themselves.  No candidate is timed whose results are not as exact as they have to be (tune/checks.py).
"""

import datetime
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from warpfold.errors import UserError
from warpfold.files import update_file
from warpfold.model.alphafold import ModelConfig
from warpfold.ops.triton.launch import KERNELS, Call, Entry, Key, Launch, file_of, forced, read, recorded
from warpfold.tune.cases import OPS, Case, inputs
from warpfold.tune.checks import DTYPES, errors, run
from warpfold.tune.kernel_calls import launching
from warpfold.tune.machine import describe
from warpfold.tune.sizes import DataSizes, of_settings
from warpfold.tune.timing import FLUSH, SETTLE

TUNED = ("attention", "layer_norm", "norm_linear", "gate", "tail")  # operations, as --op names them
SIZES = {"initial training": DataSizes(crop=256, max_msa=128, max_extra=1024), "fine-tuning": DataSizes(crop=384)}
REPEATS = 20
CHECKED = 2**26  # logits, or numbers of the widest tensor, of a case that is checked: in fp64 there is room for it
SAME = 1.01  # faster by less is no difference: of such candidates the first is taken
BUSY = 1_000_000  # cycles, half a millisecond, for which the GPU is kept busy while calls are queued

Progress = Callable[[int, int, str], None]
Seconds = dict[Launch, list[float]]  # of each repeat


@dataclass(frozen=True)
class Place:
    """An operation at a size of the model, in a dtype."""

    op: str
    case: Case
    dtype: str

    def __str__(self) -> str:
        return f"{self.op}, {self.case.where}, {self.case.shape}, {self.dtype}"


@dataclass(frozen=True)
class Timed:
    """What the candidates of a kernel took at one place; and why others were not timed."""

    kernel: str
    key: Key
    place: str
    seconds: Seconds
    out: dict[Launch, str]


class Bench(Protocol):
    """How candidates are tried: the device's side of tuning, which tests replace."""

    def used(self, place: Place) -> dict[str, Key]:
        """The kernels that a place launches, with their keys."""

    def time(self, place: Place, kernel: str, candidates: Sequence[Launch]) -> tuple[Seconds, dict[Launch, str]]:
        """Seconds of each candidate of a kernel there, and those that are out, with the reason."""


def places(ops: Iterable[str], quick: bool = False) -> list[Place]:
    """Where the model calls operations; "attention" has the global one with it, of the same kernels.

    quick: at the sizes of initial training, in bf16, alone.
    """
    found: dict[Place, None] = {}
    for op in ops:
        names = ("attention", "global_attention") if op == "attention" else (op,)
        for sizes in list(SIZES.values())[: 1 if quick else None]:
            for dtype in ("bf16",) if quick else ("bf16", "fp32"):
                cases = (case for case in of_settings(ModelConfig(), sizes) if case.op in names)
                found |= dict.fromkeys(Place(op, case, dtype) for case in cases)
    return list(found)


def tune(todo: Sequence[Place], bench: Bench, quick: bool = False, progress: Progress | None = None) -> list[Timed]:
    """Try the candidates of every kernel at every place; quick: of places with the same key only the first."""
    found: list[Timed] = []
    seen: set[tuple[str, Key]] = set()
    for done, place in enumerate(todo):
        for kernel, key in bench.used(place).items():
            if quick and (kernel, key) in seen:
                continue
            seen.add((kernel, key))
            if progress:
                progress(done, len(todo), f"{kernel}: {place}")
            candidates = list(dict.fromkeys(KERNELS[kernel].candidates))
            found.append(Timed(kernel, key, str(place), *bench.time(place, kernel, candidates)))
    return found


def choose(timed: Iterable[Timed]) -> list[Entry]:
    """The fastest candidate for each kernel and key: by the sum of medians over all places with that key.

    A candidate must have been timed at each of them.  Of those within one per cent of the fastest, the first that the
    kernel names, so that noise decides less.
    Errors: UserError where no candidate is left.
    """
    groups: dict[tuple[str, Key], list[Timed]] = {}
    for one in timed:
        groups.setdefault((one.kernel, one.key), []).append(one)
    entries = []
    for (kernel, key), group in sorted(groups.items()):
        totals = {
            candidate: sum(statistics.median(one.seconds[candidate]) for one in group)
            for candidate in group[0].seconds
            if all(one.seconds.get(candidate) for one in group)
        }
        if not totals:
            reasons = dict.fromkeys(reason for one in group for reason in one.out.values())
            raise UserError(f"{kernel} {key}: every candidate is out: {'; '.join(reasons)}; keep default.json")
        best = min(totals.values())
        entries.append(Entry(kernel, key, next(c for c, total in totals.items() if total <= SAME * best)))
    return entries


def write(folder: Path, head: Mapping[str, str], entries: Iterable[Entry]) -> Path:
    """Write a GPU's table, one launch a line; entries of kernels that are not among these stay as they were.

    head: says "gpu", the name.  Errors: UserError where it cannot be written, or what is there cannot be read.
    """
    path = folder / file_of(head["gpu"])
    entries = list(entries)
    if path.is_file():
        anew = {entry.kernel for entry in entries}
        entries += [entry for entry in read(path).entries if entry.kernel not in anew]
    lines = [json.dumps(_line(entry)) for entry in sorted(entries, key=lambda e: (e.kernel, e.key))]
    facts = "".join(f"{json.dumps(name)}: {json.dumps(value)},\n" for name, value in head.items())
    update_file(path, ("{\n" + facts + '"launches": [\n' + ",\n".join(lines) + "\n]}\n").encode())
    read.cache_clear()
    return path


def _line(entry: Entry) -> dict[str, Any]:
    launch = entry.launch
    return {
        "kernel": entry.kernel,
        "key": list(entry.key),
        "sizes": dict(launch.sizes),
        "warps": launch.warps,
        "stages": launch.stages,
    }


def head(device: torch.device) -> dict[str, str]:
    """What a table says of its making."""
    found = describe(device)
    kept = ("driver", "torch", "triton")
    date = datetime.date.today().isoformat()
    return {"gpu": found["device"], **{name: found[name] for name in kept}, "date": date, "how": "warpfold tune"}


def planned(todo: Iterable[Place]) -> list[tuple[str, Key, str, int]]:
    """Kernel, key, place and number of candidates of everything that tuning would time; on any machine."""
    found = []
    for place in todo:
        for kernel, key in DryBench().used(place).items():
            found.append((kernel, key, str(place), len(set(KERNELS[kernel].candidates))))
    return found


class DryBench:
    """A bench that has no device: it can tell what would be used."""

    def used(self, place: Place) -> dict[str, Key]:
        """As `Bench.used`, by tensors without memory."""
        given = inputs(place.case, DTYPES[place.dtype], "meta")
        with launching() as calls:
            run(OPS[place.case.op].fast, given)
        return {call.kernel.name: call.key for call in calls}


class GpuBench:
    """A bench on a CUDA device."""

    def __init__(self, device: torch.device, repeats: int = REPEATS) -> None:
        self.device, self.repeats = device, repeats
        self.cache = torch.empty(FLUSH, dtype=torch.int8, device=device)
        self.place: Place | None = None

    def used(self, place: Place) -> dict[str, Key]:
        """As `Bench.used`."""
        return DryBench().used(place)

    def time(self, place: Place, kernel: str, candidates: Sequence[Launch]) -> tuple[Seconds, dict[Launch, str]]:
        """As `Bench.time`: checked at a size that the definition has room for, timed at the whole."""
        if place != self.place:
            self._prepare(place)
        calls: dict[Launch, list[Call]] = {}
        out: dict[Launch, str] = {}
        for candidate in candidates:
            with forced({kernel: candidate}):
                reason = self._wrong()
                if not reason:
                    with recorded(run=True) as noted:
                        run(self.way, self.whole)
                    calls[candidate] = [call for call in noted if call.kernel.name == kernel]
                else:
                    out[candidate] = reason
        return self._time(calls), out

    def _prepare(self, place: Place) -> None:
        """Inputs, and what the definition makes of them, for all kernels of a place."""
        self.place, self.way = place, OPS[place.case.op].fast
        dtype = DTYPES[place.dtype]
        self.whole = inputs(place.case, dtype, self.device)
        self.small = inputs(smaller(place.case), dtype, self.device, masked=True)
        definition = OPS[place.case.op].definition
        self.exact: list[Tensor] = run(definition, self.small.double())
        self.plain: list[Tensor] = run(definition, self.small)

    def _wrong(self) -> str:
        """Why the launches that are forced now are out; nothing if they are right."""
        from triton.backends.nvidia.compiler import PTXASError
        from triton.runtime.errors import OutOfResources

        try:
            ours = run(self.way, self.small)
            torch.cuda.synchronize(self.device)
        except (OutOfResources, PTXASError) as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"
        red = [e.name for e in errors(self.small, ours, self.plain, self.exact) if e.red]
        return f"wrong {', '.join(red)}" if red else ""

    def _time(self, calls: Mapping[Launch, Sequence[Call]]) -> Seconds:
        """In turn, the cache flushed before each, the GPU busy until all is queued."""
        marks: dict[Launch, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {c: [] for c in calls}
        with torch.cuda.device(self.device):
            for _ in range(SETTLE + self.repeats):
                for candidate, noted in calls.items():
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    self.cache.zero_()
                    torch.cuda._sleep(BUSY)
                    begin.record()
                    for call in noted:
                        call.run()
                    end.record()
                    marks[candidate].append((begin, end))
                torch.cuda.synchronize()
        return {c: [a.elapsed_time(b) / 1e3 for a, b in found[SETTLE:]] for c, found in marks.items()}


def smaller(case: Case) -> Case:
    """The same with no more rows than its definition in fp64 has room for."""
    numbers = case.logits or case.rows * case.length * max(case.channels, case.outputs)
    return case.fewer(case.rows * CHECKED // numbers) if numbers > CHECKED else case
