"""Fold many queries: the costly first, tiny ones together, features made ahead and files written behind.

docs/throughput.md says why, and what was measured.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from typing import Any, Protocol

from warpfold.bulk import JobPart
from warpfold.data.example.raw_example import Assembly
from warpfold.errors import UserError
from warpfold.model.alphafold import AlphaFold
from warpfold.parallel.team import Team
from warpfold.prediction.fold_options import Kept
from warpfold.prediction.journal import Key
from warpfold.prediction.outputs import Prediction
from warpfold.prediction.params import Params
from warpfold.prediction.queries import Query
from warpfold.prediction.read_out import Prepared
from warpfold.training.passes import PassPlace, followed

# What may fail for one prediction while the others go on: numbers, memory (torch.OutOfMemoryError is a RuntimeError).
FAILURES = (UserError, RuntimeError, MemoryError, ArithmeticError, ValueError)

# Where a device is not busy with one protein, several at once are faster.  One core of a CPU, a pass of four against
# one after another: 0.4 of the time at 12 residues, 0.5 to 0.65 at 24, 0.75 to 0.87 at 48, 0.84 at 64.  The sum of
# residues x residues, and of residues x rows, in one pass; 0: never.  On a GPU this was not measured.
TOGETHER = {"cpu": 8192}
MOST_TOGETHER = 8
OFTEN = 0.2  # seconds between two words about where the model is


@dataclass(frozen=True)
class FoldItem:
    """One prediction to make."""

    model: Params
    query: Query
    seed: int

    @property
    def key(self) -> Key:
        return self.query.name, self.model.name, self.seed

    @property
    def below(self) -> str:
        """Return its folder in that of the query, where the query has several predictions."""
        return f"{self.model.name}_seed_{self.seed}"

    @cached_property
    def cost(self) -> float:
        """Return how much there is to compute, in no unit: `predicted_cost`."""
        sample = self.model.sample
        rows = min(self.query.rows, sample.max_msa)
        return predicted_cost(self.query.residues, rows, min(self.query.rows - rows, sample.max_extra))


Group = tuple[FoldItem, ...]  # what goes through the model together


def predicted_cost(residues: int, rows: int, extra: int) -> float:
    """Return the operations of a pass through AlphaFold2's trunk, for each of a block's 1,536 per triple of residues.

    Counted of Algorithms 6 to 18 with their channels (Supp. 1.6): both triangle products and attentions are 1,536
    N^3, projections of z and what the outer product projects 810 times as many N^2, and so on.  Only ratios matter.
    """
    n = residues
    return n**3 + 810 * n**2 + rows * (2 * n**2 + 1536 * n + 0.67 * rows * n) + extra * (0.12 * n**2 + 8 * n)


def in_groups(items: Sequence[FoldItem], batch: int | None, device: str) -> list[Group]:
    """Return the items in the order in which they are folded, with what goes through the model together.

    Models come in the order of the items, so that each is loaded once; of each, the most costly item first: what is too
    long fails at once, parts end at one time, the time that is left is known early, and what is padded to one length is
    alike.  batch: at most so many together; None: as many as `TOGETHER` allows.  A pure function of its arguments: a
    run that is shared out, or stopped and continued, forms the same groups.
    """
    found: list[Group] = []
    for _, of_model in groupby(items, lambda item: item.model.name):
        group: Group = ()
        for item in sorted(of_model, key=lambda item: -item.cost):
            if group and _fits(item, group, batch, TOGETHER.get(device.split(":")[0], 0)):
                group = (*group, item)
            else:
                found += [group] if group else []
                group = (item,)
        found += [group] if group else []
    return found


def _fits(item: FoldItem, group: Group, batch: int | None, budget: int) -> bool:
    """Return whether an item may go through the model with a group."""
    every, count, config = (*group, item), len(group) + 1, item.model.config
    if count > (MOST_TOGETHER if batch is None else batch) or any(one.query.is_complex for one in every):
        return False
    if config.multimer is not None or config.recycle_tolerance is not None:  # the end of one must not be that of others
        return False
    if any((one.query.templates > 0) != (item.query.templates > 0) for one in group):
        return False
    longest, shortest = (f(one.query.residues for one in every) for f in (max, min))
    if batch is not None:
        return 2 * shortest**2 >= longest**2  # padding costs at most as much again
    sample = item.model.sample
    rows = max(min(one.query.rows, sample.max_msa + sample.max_extra) for one in every)
    return count * longest * max(longest, rows) <= budget


def cost_of(groups: Iterable[Group]) -> float:
    """Return the predicted cost of groups."""
    return sum(item.cost for group in groups for item in group)


def part_of(groups: Sequence[Group], part: JobPart) -> list[Group]:
    """Return a part's groups: each group in turn goes to the part that has the least to compute."""
    load, own = [0.0] * part.count, []
    for group in sorted(groups, key=lambda group: -cost_of([group])):
        least = load.index(min(load))
        load[least] += cost_of([group])
        own += [group] if least == part.number - 1 else []
    chosen = set(map(id, own))
    return [group for group in groups if id(group) in chosen]


@dataclass(frozen=True)
class Asked:
    """What every prediction of a run is asked for; recycles, ensemble: None for the model's own."""

    recycles: int | None
    ensemble: int | None
    kept: Kept


class Folds(Protocol):
    """A model that folds: `Predictor`."""

    @property
    def model(self) -> AlphaFold: ...
    def prepare(self, assembly: Assembly, *, seed: int, recycles: int | None, ensemble: int | None) -> Prepared: ...
    def compute(self, prepared: Prepared, kept: Kept) -> Prediction: ...
    def compute_together(self, several: Sequence[Prepared], kept: Kept) -> list[Prediction]: ...


@dataclass
class Clock:
    """Seconds that a process computed, and that its device waited meanwhile for features and for files."""

    computing: float = 0.0
    features: float = 0.0
    files: float = 0.0

    def add(self, other: "Clock") -> None:
        """Add the seconds of another process."""
        self.computing += other.computing
        self.features += other.features
        self.files += other.files

    def summary(self) -> dict[str, float]:
        """Return the seconds, and which share of them the device waited."""
        waited, whole = self.features + self.files, self.computing + self.features + self.files
        named = {"computing": self.computing, "waiting_for_features": self.features, "waiting_for_files": self.files}
        return {name: round(seconds, 3) for name, seconds in named.items()} | {
            "waiting": round(waited / whole, 4) if whole else 0.0
        }


@dataclass(frozen=True)
class FoldOutcome:
    """What became of an item: its entry in the summary, or why there is none; neither where another rank writes."""

    item: FoldItem
    entry: dict[str, Any] | None = None
    error: str = ""


Write = Callable[[FoldItem, Prediction], dict[str, Any]]  # returns the entry
Follow = Callable[[Group, PassPlace], None]
Made = list[tuple[FoldItem, Prepared | str]]
Folded = list[tuple[FoldItem, Prediction | str]]


def fold_groups(
    load: Callable[[Params], Folds],
    asked: Asked,
    team: Team,
    groups: Iterable[Group],
    write: Write,
    record: Callable[[FoldOutcome], None],
    follow: Follow | None = None,
) -> Clock:
    """Fold groups one after another, while a thread makes the features of the next and another writes the last's files.

    So there are features of two groups at most.  load: returns a model, of which one is in memory.  team: the processes
    that share each protein.  record: called in the writing thread, in the order of the groups.  follow: told where the
    model is in a group, some times in a second at most.
    Errors: what is no failure of one prediction alone (`failures_of`) ends it.
    """
    clock, failures, coming = Clock(), failures_of(team), iter(groups)
    group = next(coming, None)
    making: Future[Made] | None = None
    written: Future[None] | None = None
    with ThreadPoolExecutor(1, "features") as maker, ThreadPoolExecutor(1, "files") as writer:
        while group is not None:
            predictor = load(group[0].model)
            start = time.perf_counter()
            making = making or maker.submit(_prepare, predictor, group, asked, failures)
            made = making.result()
            clock.features += time.perf_counter() - start
            following = next(coming, None)
            making = None
            if following is not None and following[0].model is group[0].model:
                making = maker.submit(_prepare, predictor, following, asked, failures)
            start = time.perf_counter()
            with following_passes(predictor, group, made, follow):
                folded = _compute(predictor, made, asked, failures)
            done = time.perf_counter()
            if written is not None:
                written.result()
            clock.computing += done - start
            clock.files += time.perf_counter() - done
            written = writer.submit(_write, folded, write, record, failures, team.is_example_leader)
            group = following
        if written is not None:
            start = time.perf_counter()
            written.result()
            clock.files += time.perf_counter() - start
    return clock


def following_passes(predictor: Folds, group: Group, made: Made, follow: Follow | None) -> AbstractContextManager[None]:
    """Tell `follow` where the model is while it folds a group, within the context."""
    ready = [prepared for _, prepared in made if isinstance(prepared, Prepared)]
    if follow is None or not ready:
        return nullcontext()
    passes = (ready[0].recycles + 1) * ready[0].ensemble
    return followed(predictor.model, passes, partial(follow, group), OFTEN)


def failures_of(team: Team) -> tuple[type[Exception], ...]:
    """Return what may fail for one prediction while the others go on.

    If one of several ranks fails in the middle of a protein, the others wait for it: the run cannot go on.
    """
    return FAILURES if team.process.ranks == 1 else (UserError,)


def taken(groups: Sequence[Group], team: Team) -> Iterator[Group]:
    """Yield the groups that this process folds, as it becomes free, of those that several processes share out."""
    while (number := team.take("predictions")) < len(groups):
        yield groups[number]


def _prepare(predictor: Folds, group: Group, asked: Asked, failures: tuple[type[Exception], ...]) -> Made:
    made: Made = []
    for item in group:
        try:
            assembly, seed = item.query.assembly, item.seed
            prepared = predictor.prepare(assembly, seed=seed, recycles=asked.recycles, ensemble=asked.ensemble)
            made.append((item, prepared))
        except failures as error:
            made.append((item, one_line(error)))
    return made


def _compute(predictor: Folds, made: Made, asked: Asked, failures: tuple[type[Exception], ...]) -> Folded:
    """Fold what could be prepared; what fails together is folded one by one."""
    ready = [prepared for _, prepared in made if isinstance(prepared, Prepared)]
    together: Iterator[Prediction] | None = None
    if len(ready) > 1:
        try:
            together = iter(predictor.compute_together(ready, asked.kept))
        except failures:
            together = None
    found: Folded = []
    for item, prepared in made:
        if isinstance(prepared, str):
            found.append((item, prepared))
        elif together is not None:
            found.append((item, next(together)))
        else:
            try:
                found.append((item, predictor.compute(prepared, asked.kept)))
            except failures as error:
                found.append((item, one_line(error)))
    return found


def _write(
    folded: Folded,
    write: Write,
    record: Callable[[FoldOutcome], None],
    failures: tuple[type[Exception], ...],
    writes: bool,
) -> None:
    """Write the files of predictions, and record what became of each."""
    for item, prediction in folded:
        if isinstance(prediction, str):
            record(FoldOutcome(item, error=prediction))
        elif not writes:
            record(FoldOutcome(item))
        else:
            try:
                outcome = FoldOutcome(item, write(item, prediction))
            except failures as error:
                outcome = FoldOutcome(item, error=one_line(error))
            record(outcome)


def one_line(error: BaseException) -> str:
    """Return an error as the summary has it."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text[:300]}"
