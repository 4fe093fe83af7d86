"""Fold many queries: the costly first, tiny ones together, features made ahead and files written behind.

docs/howto/many_proteins.md says why, and what was measured.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from typing import Any, Protocol

from warpfold.bulk import JobPart
from warpfold.data.example.guess import GuessStructure
from warpfold.data.example.raw_example import Assembly
from warpfold.errors import StorageError, UserError
from warpfold.model.alphafold import AlphaFold
from warpfold.parallel.team import Team
from warpfold.prediction.outputs import Prediction
from warpfold.prediction.params import Params
from warpfold.prediction.queries import Query
from warpfold.prediction.read_out import Prepared
from warpfold.prediction.request import FoldOptions, Recycling
from warpfold.training.passes import PassPlace, followed

# What may fail for one prediction while the others go on: numbers, memory (torch.OutOfMemoryError is a RuntimeError).
FAILURES = (UserError, RuntimeError, MemoryError, ArithmeticError, ValueError)

# Where a device is not busy with one protein, several at once are faster.  One core of a CPU, a pass of four against
# one after another: 0.4 of the time at 12 residues, 0.5 to 0.65 at 24, 0.75 to 0.87 at 48, 0.84 at 64.  The sum of
# residues x residues, and of residues x rows, in one pass; 0: never.  On a GPU this was not measured.
TOGETHER = {"cpu": 8192}
MOST_TOGETHER = 8
AS_THE_MODEL = Recycling()
OFTEN = 0.2  # seconds between two words about where the model is


Key = tuple[str, str, int]  # of a prediction: protein, model, seed


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
        """Return the predicted cost, in arbitrary units (`predicted_cost`)."""
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


def in_groups(
    items: Sequence[FoldItem],
    batch: int | None,
    device: str,
    recycling: Recycling = AS_THE_MODEL,
    recycles: int | None = None,
) -> list[Group]:
    """Return the items in the order in which they are folded, with what goes through the model together.

    Models come in the order of the items, so that each is loaded once; of each, the most costly item first: what is too
    long fails at once, parts end at one time, the time that is left is known early, and what is padded to one length is
    alike.  batch: at most so many together; None: as many as `TOGETHER` allows.  Where the recycling of one may end
    before that of another, each is alone.  A pure function of its arguments: a run that is shared out, or stopped and
    continued, forms the same groups.
    """
    found: list[Group] = []
    for _, of_model in groupby(items, lambda item: item.model.name):
        group: Group = ()
        for item in sorted(of_model, key=lambda item: -item.cost):
            alone = recycling.may_end_early(item.model.config, recycles)
            if group and not alone and _fits(item, group, batch, TOGETHER.get(device.split(":")[0], 0)):
                group = (*group, item)
            else:
                found += [group] if group else []
                group = (item,)
        found += [group] if group else []
    return found


def _fits(item: FoldItem, group: Group, batch: int | None, budget: int) -> bool:
    """Return whether an item may go through the model with a group."""
    every, count = (*group, item), len(group) + 1
    if count > (MOST_TOGETHER if batch is None else batch):
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


class Folds(Protocol):
    """A model that folds: `Predictor`."""

    @property
    def model(self) -> AlphaFold: ...
    def prepare(
        self,
        assembly: Assembly,
        *,
        seed: int,
        recycles: int | None,
        ensemble: int | None,
        initial_guess: GuessStructure | None,
        fixed: Sequence[str],
    ) -> Prepared:
        """Make the features of one chain or several."""

    def compute(self, prepared: Prepared, options: FoldOptions) -> Prediction: ...
    def compute_together(self, several: Sequence[Prepared], options: FoldOptions) -> list[Prediction]: ...


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


@dataclass
class FoldOutcome:
    """What has become of an item so far; what has an `error` is left alone by all that follows.

    prediction: None on ranks that do not hold it.  entry: what the summary has of it, once it is written.
    """

    item: FoldItem
    prepared: Prepared | None = None
    prediction: Prediction | None = None
    entry: dict[str, Any] | None = None
    error: str = ""

    @contextmanager
    def attempt(self, failures: tuple[type[Exception], ...]) -> Iterator[None]:
        """Make what fails within the context this item's own failure, unless it is the storage's."""
        try:
            yield
        except StorageError:
            raise
        except failures as error:
            self.error = one_line(error)


Write = Callable[[FoldItem, Prediction], dict[str, Any]]  # returns the entry
Record = Callable[[FoldOutcome], None]
Follow = Callable[[Group, PassPlace], None]


def fold_groups(
    load: Callable[[Params], Folds],
    options: FoldOptions,
    team: Team,
    groups: Iterable[Group],
    write: Write | None,
    record: Record,
    follow: Follow | None = None,
) -> Clock:
    """Fold groups one after another, while a thread makes the features of the next and another writes the last's files.

    So there are features of two groups at most.  load: returns a model, of which one is in memory.  team: the processes
    that share each protein.  write, record: called in the writing thread, in the order of the groups.  follow: told
    where the model is in a group, some times in a second at most.
    Errors: what is no failure of one prediction alone (`failures_of`) ends it.
    """
    clock, failures, coming = Clock(), failures_of(team), iter(groups)

    def prepare(predictor: Folds, group: Group) -> list[FoldOutcome]:
        """Make the features of a group."""
        made = [FoldOutcome(item) for item in group]
        for one in made:
            query = one.item.query
            with one.attempt(failures):
                one.prepared = predictor.prepare(
                    query.assembly, seed=one.item.seed, recycles=options.recycles, ensemble=options.ensemble,
                    initial_guess=query.guess, fixed=query.fixed,
                )  # fmt: skip
        return made

    def finish(folded: list[FoldOutcome]) -> None:
        for one in folded:
            if not team.is_example_leader:
                one.prediction = None
            if one.prediction is not None and write is not None:
                with one.attempt(failures):
                    one.entry = write(one.item, one.prediction)
            record(one)

    group = next(coming, None)
    making: Future[list[FoldOutcome]] | None = None
    written: Future[None] | None = None
    with ThreadPoolExecutor(1, "features") as maker, ThreadPoolExecutor(1, "files") as writer:
        while group is not None:
            predictor = load(group[0].model)
            start = time.perf_counter()
            made = (making or maker.submit(prepare, predictor, group)).result()
            clock.features += time.perf_counter() - start
            following = next(coming, None)
            making = None
            if following is not None and following[0].model is group[0].model:
                making = maker.submit(prepare, predictor, following)
            start = time.perf_counter()
            _compute(predictor, made, options, failures, None if follow is None else partial(follow, group))
            done = time.perf_counter()
            if written is not None:
                written.result()
            clock.computing += done - start
            clock.files += time.perf_counter() - done
            written = writer.submit(finish, made)
            group = following
        if written is not None:
            start = time.perf_counter()
            written.result()
            clock.files += time.perf_counter() - start
    return clock


def _compute(
    predictor: Folds,
    made: Sequence[FoldOutcome],
    options: FoldOptions,
    failures: tuple[type[Exception], ...],
    follow: Callable[[PassPlace], None] | None,
) -> None:
    """Fold what could be prepared; what fails together is folded one by one.  follow: told where the model is."""
    ready = [(one, one.prepared) for one in made if one.prepared is not None]
    if not ready:
        return
    passes = (ready[0][1].recycles + 1) * ready[0][1].ensemble
    with nullcontext() if follow is None else followed(predictor.model, passes, follow, OFTEN):
        if len(ready) > 1:
            with suppress(*failures):
                for (one, _), found in zip(ready, predictor.compute_together([x for _, x in ready], options)):
                    one.prediction = found
        for one, prepared in ready:
            if one.prediction is None:
                with one.attempt(failures):
                    one.prediction = predictor.compute(prepared, options)
            one.prepared = None


def failures_of(team: Team) -> tuple[type[Exception], ...]:
    """Return the exceptions that fail one prediction alone.

    If one of several ranks fails in the middle of a protein, the others wait for it: the run cannot go on.
    """
    return FAILURES if team.process.ranks == 1 else (UserError,)


def taken(groups: Sequence[Group], team: Team) -> Iterator[Group]:
    """Yield the groups that this process folds, as it becomes free, of those that several processes share out."""
    while (number := team.take("predictions")) < len(groups):
        yield groups[number]


def one_line(error: BaseException) -> str:
    """Return an error as the summary has it."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text[:300]}"
