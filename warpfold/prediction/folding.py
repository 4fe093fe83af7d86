"""Fold many queries: expensive ones first, short ones in shared passes; threads prepare features and write files.

docs/howto/many_proteins.md has the reasons and the measurements.
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

# Errors that fail one prediction while the others go on (torch.OutOfMemoryError is a RuntimeError).
FAILURES = (UserError, RuntimeError, MemoryError, ArithmeticError, ValueError)

# One short protein does not keep a device busy, and several in one pass are faster.  On one core of a CPU, a pass of
# four takes this share of the time of four passes: 0.4 at 12 residues, 0.5 to 0.65 at 24, 0.75 to 0.87 at 48, 0.84 at
# 64.  The values are the largest sum of residues x residues, and of residues x rows, in one pass; without a value,
# proteins do not share passes.  GPUs have none because this was not measured there.
SHARED_PASS_SIZE = {"cpu": 8192}
MAX_SHARING = 8  # proteins in a pass
DEFAULT_RECYCLING = Recycling()
PROGRESS_INTERVAL = 0.2  # seconds


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
        """Return the name of its folder in the folder of the query, if the query has several predictions."""
        return f"{self.model.name}_seed_{self.seed}"

    @cached_property
    def cost(self) -> float:
        """Return the predicted cost, in arbitrary units (`predicted_cost`)."""
        sample = self.model.sample
        rows = min(self.query.rows, sample.max_msa)
        return predicted_cost(self.query.residues, rows, min(self.query.rows - rows, sample.max_extra))


Group = tuple[FoldItem, ...]  # items that share a pass of the model


def predicted_cost(residues: int, rows: int, extra: int) -> float:
    """Estimate the operations of a pass through AlphaFold2's trunk, in units of a block's 1,536 per residue triple.

    The factors count Algorithms 6 to 18 with their channels (Supp. 1.6): the triangle products and attentions take
    1,536 N^3, the projections of z and of the outer product 810 times as many N^2, and so on.  Only ratios matter.
    """
    n = residues
    return n**3 + 810 * n**2 + rows * (2 * n**2 + 1536 * n + 0.67 * rows * n) + extra * (0.12 * n**2 + 8 * n)


def in_groups(
    items: Sequence[FoldItem],
    batch: int | None,
    device: str,
    recycling: Recycling = DEFAULT_RECYCLING,
    recycles: int | None = None,
) -> list[Group]:
    """Sort items into the order of folding, and group those that share a pass.

    Models keep the order of the items, so that each is loaded once.  The items of a model are sorted by falling cost:
    proteins that are too long fail at once, parts end at about the same time, the time left is known early, and
    proteins that are padded to one length have similar lengths.
    batch: the largest number in a group; None: the limit follows from `SHARED_PASS_SIZE`.  If recycling may end earlier
    for one protein than for another, each is alone.
    The result depends on the arguments alone, so that shards and continued runs form the same groups.
    """
    groups: list[Group] = []
    for _, model_items in groupby(items, lambda item: item.model.name):
        group: Group = ()
        for item in sorted(model_items, key=lambda item: -item.cost):
            folds_alone = recycling.may_end_early(item.model.config, recycles)
            if group and not folds_alone and _fits(item, group, batch, SHARED_PASS_SIZE.get(device.split(":")[0], 0)):
                group = (*group, item)
            else:
                groups += [group] if group else []
                group = (item,)
        groups += [group] if group else []
    return groups


def _fits(item: FoldItem, group: Group, batch: int | None, budget: int) -> bool:
    """Return whether an item may share a pass with a group."""
    members, count = (*group, item), len(group) + 1
    if count > (MAX_SHARING if batch is None else batch):
        return False
    if any((member.query.templates > 0) != (item.query.templates > 0) for member in group):
        return False
    longest, shortest = (extreme(member.query.residues for member in members) for extreme in (max, min))
    if batch is not None:
        return 2 * shortest**2 >= longest**2  # padding at most doubles the cost
    sample = item.model.sample
    rows = max(min(member.query.rows, sample.max_msa + sample.max_extra) for member in members)
    return count * longest * max(longest, rows) <= budget


def cost_of(groups: Iterable[Group]) -> float:
    """Sum the predicted costs of groups."""
    return sum(item.cost for group in groups for item in group)


def part_of(groups: Sequence[Group], part: JobPart) -> list[Group]:
    """Return the groups of a part.  The groups, by falling cost, each go to the part with the least cost so far."""
    load, chosen_ids = [0.0] * part.count, set[int]()
    for group in sorted(groups, key=lambda group: -cost_of([group])):
        lightest_part = load.index(min(load))
        load[lightest_part] += cost_of([group])
        if lightest_part == part.number - 1:
            chosen_ids.add(id(group))
    return [group for group in groups if id(group) in chosen_ids]


class Folds(Protocol):
    """The methods of `Predictor` that are used here; importing it would be circular."""

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
        """Make the features of one or several chains."""

    def compute(self, prepared: Prepared, options: FoldOptions) -> Prediction: ...
    def compute_together(self, several: Sequence[Prepared], options: FoldOptions) -> list[Prediction]: ...


@dataclass
class Clock:
    """Seconds in which a process computed, and in which its device waited for features and for files."""

    computing: float = 0.0
    features: float = 0.0
    files: float = 0.0

    def add(self, other: "Clock") -> None:
        """Add the seconds of another process."""
        self.computing += other.computing
        self.features += other.features
        self.files += other.files

    def summary(self) -> dict[str, float]:
        """Return the seconds, and the fraction of them in which the device waited."""
        waiting_seconds, total_seconds = self.features + self.files, self.computing + self.features + self.files
        seconds_by_name = {
            "computing": self.computing,
            "waiting_for_features": self.features,
            "waiting_for_files": self.files,
        }
        return {name: round(seconds, 3) for name, seconds in seconds_by_name.items()} | {
            "waiting": round(waiting_seconds / total_seconds, 4) if total_seconds else 0.0
        }


@dataclass
class FoldOutcome:
    """The state of an item; later steps skip an item that has an `error`.

    prediction: None on ranks that do not own it.  entry: its entry in the summary, once its files are written.
    """

    item: FoldItem
    prepared: Prepared | None = None
    prediction: Prediction | None = None
    entry: dict[str, Any] | None = None
    error: str = ""

    @contextmanager
    def attempt(self, failures: tuple[type[Exception], ...]) -> Iterator[None]:
        """Record an exception within the context as the failure of this item, unless the storage failed."""
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
    """Fold groups one after another.  One thread prepares the next group, another writes the files of the last one.

    At most two groups have features in memory.  load: returns a loaded model; one is in memory at a time.  team: the
    processes that share each protein.  write, record: called in the writing thread, in the order of the groups.
    follow: called with the position of the model in a group, at most five times a second.
    Errors: exceptions that do not fail one prediction alone (`failures_of`).
    """
    clock, failures, remaining_groups = Clock(), failures_of(team), iter(groups)

    def prepare(predictor: Folds, group: Group) -> list[FoldOutcome]:
        """Make the features of a group."""
        outcomes = [FoldOutcome(item) for item in group]
        for outcome in outcomes:
            query = outcome.item.query
            with outcome.attempt(failures):
                outcome.prepared = predictor.prepare(
                    query.assembly, seed=outcome.item.seed, recycles=options.recycles, ensemble=options.ensemble,
                    initial_guess=query.guess, fixed=query.fixed,
                )  # fmt: skip
        return outcomes

    def finish(outcomes: list[FoldOutcome]) -> None:
        for outcome in outcomes:
            if not team.is_example_leader:
                outcome.prediction = None
            if outcome.prediction is not None and write is not None:
                with outcome.attempt(failures):
                    outcome.entry = write(outcome.item, outcome.prediction)
            record(outcome)

    group = next(remaining_groups, None)
    next_outcomes: Future[list[FoldOutcome]] | None = None
    pending_write: Future[None] | None = None
    with ThreadPoolExecutor(1, "features") as maker, ThreadPoolExecutor(1, "files") as writer:
        while group is not None:
            predictor = load(group[0].model)
            start = time.perf_counter()
            outcomes = (next_outcomes or maker.submit(prepare, predictor, group)).result()
            clock.features += time.perf_counter() - start
            next_group = next(remaining_groups, None)
            next_outcomes = None
            if next_group is not None and next_group[0].model is group[0].model:
                next_outcomes = maker.submit(prepare, predictor, next_group)
            start = time.perf_counter()
            _compute(predictor, outcomes, options, failures, None if follow is None else partial(follow, group))
            computed_at = time.perf_counter()
            if pending_write is not None:
                pending_write.result()
            clock.computing += computed_at - start
            clock.files += time.perf_counter() - computed_at
            pending_write = writer.submit(finish, outcomes)
            group = next_group
        if pending_write is not None:
            start = time.perf_counter()
            pending_write.result()
            clock.files += time.perf_counter() - start
    return clock


def _compute(
    predictor: Folds,
    outcomes: Sequence[FoldOutcome],
    options: FoldOptions,
    failures: tuple[type[Exception], ...],
    follow: Callable[[PassPlace], None] | None,
) -> None:
    """Fold the prepared items in one pass, or one by one if that fails.  follow: called with the model's position."""
    prepared_outcomes = [(outcome, outcome.prepared) for outcome in outcomes if outcome.prepared is not None]
    if not prepared_outcomes:
        return
    passes = (prepared_outcomes[0][1].recycles + 1) * prepared_outcomes[0][1].ensemble
    with nullcontext() if follow is None else followed(predictor.model, passes, follow, PROGRESS_INTERVAL):
        if len(prepared_outcomes) > 1:
            with suppress(*failures):
                predictions = predictor.compute_together([prepared for _, prepared in prepared_outcomes], options)
                for (outcome, _), prediction in zip(prepared_outcomes, predictions):
                    outcome.prediction = prediction
        for outcome, prepared in prepared_outcomes:
            if outcome.prediction is None:
                with outcome.attempt(failures):
                    outcome.prediction = predictor.compute(prepared, options)
            outcome.prepared = None


def failures_of(team: Team) -> tuple[type[Exception], ...]:
    """Return the exceptions that fail one prediction alone.

    If one of several ranks fails in the middle of a protein, the others wait for it, so the run cannot go on.
    """
    return FAILURES if team.process.ranks == 1 else (UserError,)


def taken(groups: Sequence[Group], team: Team) -> Iterator[Group]:
    """Yield the groups that this process takes from those shared by several processes, whenever it is free."""
    while (number := team.take("predictions")) < len(groups):
        yield groups[number]


def one_line(error: BaseException) -> str:
    """Format an error for the summary."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text[:300]}"
