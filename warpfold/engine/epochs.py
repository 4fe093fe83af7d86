"""The order of a `Ready` loader: every example once in each epoch, shared by the ranks, as a function of the seed."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from warpfold.data.load.ahead import BatchOrder
from warpfold.data.load.schedule import State, deal
from warpfold.data.load.workers import Failed
from warpfold.engine.checkpoint import AppendedFile
from warpfold.engine.ready_maker import ReadyError
from warpfold.errors import UserError
from warpfold.keyed import keyed_rng


class OrderRecord:
    """A file with a line "EPOCH STEP" for each batch, written before the batch is used.

    The first line identifies the loader.  After a kill a run uses the batches after its checkpoint in the recorded
    order.
    """

    def __init__(self, path: Path, identity: Mapping[str, int]) -> None:
        """Open or create the file.  Errors: UserError for a damaged file or the file of another loader."""
        header = json.dumps(dict(identity))
        self._file = AppendedFile(path, header + "\n")
        self._steps: dict[int, dict[int, None]] = {}
        first, *lines = path.read_text(encoding="utf-8").splitlines()
        if first != header:
            raise UserError(f"{path}: is the record of another loader ({first[:80]}). Remove it, or name another file.")
        for line in lines:
            try:
                epoch, step = map(int, line.split())
            except ValueError:
                raise UserError(f"{path}: has a line {line[:40]!r}. Remove the file, or put back a copy.") from None
            self._steps.setdefault(epoch, {})[step] = None

    def steps(self, epoch: int) -> list[int]:
        """Return the recorded steps of an epoch in the order in which their batches were used."""
        return list(self._steps.get(epoch, ()))

    def add(self, epoch: int, step: int) -> None:
        """Record the next batch, unless it is recorded already.  Errors: UserError if the disk is full."""
        steps = self._steps.setdefault(epoch, {})
        if step not in steps:
            steps[step] = None
            self._file.write(f"{epoch} {step}\n")


@dataclass(frozen=True)
class EpochBatch:
    """A planned batch.  place: its position since the iteration began, and the ticket of its job."""

    place: int
    epoch: int
    step: int
    indices: list[int]
    fixed: bool  # its place is recorded

    @property
    def kind(self) -> tuple[bool, int]:
        """A key that this batch shares with the batches with which it may exchange places, those of its epoch."""
        return (True, self.place) if self.fixed else (False, self.epoch)

    @property
    def job(self) -> tuple[int, list[int]]:
        return self.epoch, self.indices


class Epochs(BatchOrder[EpochBatch]):
    """The batches of one rank, epoch after epoch.  The arguments are those of `Ready`.

    size: number of examples in the dataset.
    costs: of each example, if they are balanced; None if they are not known yet.
    The loader calls `plan` ahead of time, `note` before a batch is used, and `hand_out` after.  Batches of equal `kind`
    may change places within the loader's window.
    """

    refusals: tuple[type[Exception], ...] = ()

    def __init__(
        self,
        *,
        size: int,
        batch_size: int,
        rank: int,
        ranks: int,
        seed: int,
        shuffle: bool,
        drop_last: bool,
        costs: np.ndarray | None,
        record: Path | None,
    ) -> None:
        self.size, self.batch_size, self.rank, self.ranks = size, batch_size, rank, ranks
        self.seed, self.shuffle, self.drop_last, self.costs = seed, shuffle, drop_last, costs
        self._permutation = lru_cache(2)(self._permuted)
        self._file = record
        if self._file is not None and ranks > 1:
            self._file = self._file.with_name(f"{self._file.stem}-{rank}-of-{ranks}{self._file.suffix}")
        self._record: OrderRecord | None = None
        # Examples that were used before the number of ranks or the batch size changed, and the steps of the rest of the
        # epoch that were handed out: all below `first`, and those in `early`.
        self.epoch, self._examples_before, self._used = 0, 0, State()
        self._begun = False  # a batch was handed out

    def __len__(self) -> int:
        return self.steps()

    # The order

    def steps(self, before: int = 0) -> int:
        """Count the steps of an epoch after `before` of its examples."""
        per_step = self.batch_size * self.ranks
        return (self.size - before) // per_step if self.drop_last else -(-(self.size - before) // per_step)

    def indices(self, epoch: int, before: int, step: int) -> list[int]:
        """Return the examples of this rank at a step, in the order of the epoch."""
        order = self._permutation(epoch)
        begin = before + step * self.batch_size * self.ranks
        examples = order[begin : begin + self.batch_size * self.ranks]
        # The last step is filled up from the beginning of the epoch, so that all ranks have equal numbers.
        if missing := -len(examples) % self.ranks:
            examples = np.concatenate([examples, np.resize(order, missing)])
        if self.costs is None or self.ranks == 1:
            return examples[self.rank :: self.ranks].tolist()
        return examples[deal(self.costs[examples].tolist(), self.ranks)[self.rank]].tolist()

    def _permuted(self, epoch: int) -> np.ndarray:
        return keyed_rng(self.seed, "ready", epoch).permutation(self.size) if self.shuffle else np.arange(self.size)

    def plan(self) -> Iterator[EpochBatch]:
        """Yield the remaining batches of this epoch, the recorded ones first, and then those of all later epochs."""
        if self._file is not None and self._record is None:
            self._record = OrderRecord(self._file, {**self._identity(), "rank": self.rank})
        epoch, before, used, place = self.epoch, self._examples_before, self._used, 0
        while (steps := self.steps(before)) or before:
            early = set(used.early)
            remaining = [step for step in range(used.first, steps) if step not in early]
            recorded = self._record.steps(epoch) if self._record is not None else []
            fixed = dict.fromkeys(step for step in recorded if step in set(remaining))
            for step in (*fixed, *(step for step in remaining if step not in fixed)):
                yield EpochBatch(place, epoch, step, self.indices(epoch, before, step), step in fixed)
                place += 1
            epoch, before, used = epoch + 1, 0, State()

    def substitute(self, planned: EpochBatch, failed: Failed) -> EpochBatch:
        """Raise the error of a batch that failed, since no other batch may replace it."""
        if failed.killed:
            raise ReadyError(f"examples {planned.indices} of the dataset: {failed.reason}")
        raise UserError(failed.reason)

    # Iterating

    @property
    def ended(self) -> bool:
        return self._used.first >= self.steps(self._examples_before)

    def begin(self) -> bool:
        left_early = self._begun and not self.ended
        if self._begun:
            self.end()
        return left_early

    def end(self) -> None:
        self._begin_epoch(self.epoch + 1)

    def note(self, planned: EpochBatch) -> None:
        if self._record is not None:
            self._record.add(planned.epoch, planned.step)

    def hand_out(self, planned: EpochBatch) -> None:
        self._used = self._used.changed(early=[planned.step])
        self._begun = True

    def _begin_epoch(self, epoch: int) -> None:
        self.epoch, self._examples_before, self._used, self._begun = epoch, 0, State(), False

    # State

    def _identity(self) -> dict[str, int]:
        return {
            "examples": self.size,
            "seed": self.seed,
            "shuffle": int(self.shuffle),
            "batch_size": self.batch_size,
            "ranks": self.ranks,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this rank, JSON-able.  Batches that are ready but unused do not count."""
        used = {"before": self._examples_before, "first": self._used.first, "early": [*self._used.early]}
        return {**self._identity(), "rank": self.rank, "epoch": self.epoch, **used}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was called: the next iteration yields the remaining batches of that epoch.

        With another batch size or number of ranks, the examples that no rank has used are left.  This needs a state in
        which no batches were exchanged within a window.
        Errors: UserError for the state of another dataset, seed or order.
        """
        identity = self._identity()
        if missing := sorted({*identity, "rank", "epoch", "before", "first", "early"} - {*state}):
            raise UserError(f"Ready: the state lacks {missing[0]}. Pass the result of state_dict() of a Ready.")
        for name in ("examples", "seed", "shuffle"):
            if state[name] != identity[name]:
                raise UserError(
                    f"Ready: the state is of {name} = {state[name]}, this loader has {identity[name]}. Use equal "
                    "arguments."
                )
        same_batches = all(state[name] == identity[name] for name in identity)
        if state["early"] and not (same_batches and state["rank"] == self.rank):
            raise UserError(
                f"Ready: the state is of rank {state['rank']} of {state['ranks']}, which used batches before their "
                "places. Use the same number of ranks, the same batch size, and each rank's own state."
            )
        used = State(state["first"], tuple(state["early"]))
        before = state["before"]
        if not same_batches:
            before = min(self.size, before + used.first * state["batch_size"] * state["ranks"])
            used = State()
        self._begin_epoch(state["epoch"])
        self._examples_before, self._used = before, used
