"""The order of a `Ready` over a dataset: every example once in each epoch, shared by the ranks, from the seed alone."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from warpfold.data.load.schedule import State, deal
from warpfold.data.load.workers import Failed
from warpfold.engine.checkpoint import AppendedFile
from warpfold.engine.ready_maker import ReadyError
from warpfold.errors import UserError
from warpfold.keyed import keyed_rng


class OrderRecord:
    """A file with a line "EPOCH STEP" for each batch before it is used; its first line says of which loader.

    A run that was killed finds what it had used after its checkpoint, and follows that.
    """

    def __init__(self, path: Path, identity: Mapping[str, int]) -> None:
        """Open the file, or make it.  Errors: UserError for one of another loader, or one that is none."""
        header = json.dumps(dict(identity))
        self._file = AppendedFile(path, header + "\n")
        self._steps: dict[int, dict[int, None]] = {}
        first, *lines = path.read_text(encoding="utf-8").splitlines()
        if first != header:
            raise UserError(f"{path}: is the record of another loader ({first[:80]}); remove it, or name another file")
        for line in lines:
            try:
                epoch, step = map(int, line.split())
            except ValueError:
                raise UserError(f"{path}: has a line {line[:40]!r}; remove the file, or put back a copy") from None
            self._steps.setdefault(epoch, {})[step] = None

    def steps(self, epoch: int) -> list[int]:
        """Return the steps of an epoch in the order in which their batches were used, as far as they were."""
        return list(self._steps.get(epoch, ()))

    def add(self, epoch: int, step: int) -> None:
        """Note that a batch is used next, unless it is known already.  Errors: UserError when the disk is full."""
        known = self._steps.setdefault(epoch, {})
        if step not in known:
            known[step] = None
            self._file.write(f"{epoch} {step}\n")


@dataclass(frozen=True)
class EpochBatch:
    """A batch that is being made.  place: its number since this iteration began, and the ticket of its job."""

    place: int
    epoch: int
    step: int
    indices: list[int]
    fixed: bool  # the record says that it comes here

    @property
    def kind(self) -> tuple[bool, int]:
        """Return a key that all batches share with which it may exchange places: those of its epoch."""
        return (True, self.place) if self.fixed else (False, self.epoch)

    @property
    def job(self) -> tuple[int, list[int]]:
        return self.epoch, self.indices


class Epochs:
    """The batches of one rank, epoch after epoch (`BatchOrder`).  The arguments are those of `Ready`.

    size: examples of the dataset.  costs: of each, if they are balanced and known.
    """

    refusals: tuple[type[Exception], ...] = ()

    def __init__(
        self,
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
        self.epoch, self._before, self._used = 0, 0, State()  # examples used before `_used`, which counts batches
        self._begun = False  # whether this iteration has given a batch

    def __len__(self) -> int:
        return self.steps()

    # What comes when

    def steps(self, before: int = 0) -> int:
        """Return the steps left in an epoch once `before` of its examples have been used."""
        whole = self.batch_size * self.ranks
        return (self.size - before) // whole if self.drop_last else -(-(self.size - before) // whole)

    def indices(self, epoch: int, before: int, step: int) -> list[int]:
        """Return the examples of this rank at a step, in the order of the epoch."""
        order = self._permutation(epoch)
        begin = before + step * self.batch_size * self.ranks
        part = order[begin : begin + self.batch_size * self.ranks]
        if missing := -len(part) % self.ranks:
            part = np.concatenate([part, np.resize(order, missing)])
        if self.costs is None or self.ranks == 1:
            return part[self.rank :: self.ranks].tolist()
        return part[deal(self.costs[part].tolist(), self.ranks)[self.rank]].tolist()

    def _permuted(self, epoch: int) -> np.ndarray:
        return keyed_rng(self.seed, "ready", epoch).permutation(self.size) if self.shuffle else np.arange(self.size)

    def plan(self) -> Iterator[EpochBatch]:
        """Yield the batches that are left of this epoch, first those of the record, then all epochs after it."""
        if self._file is not None and self._record is None:
            self._record = OrderRecord(self._file, {**self._identity(), "rank": self.rank})
        epoch, before, used, place = self.epoch, self._before, self._used, 0
        while (steps := self.steps(before)) or before:
            early = set(used.early)
            remaining = [step for step in range(used.first, steps) if step not in early]
            known = self._record.steps(epoch) if self._record is not None else []
            fixed = [step for step in known if step in set(remaining)]
            late = set(fixed)
            for step in (*fixed, *(step for step in remaining if step not in late)):
                yield EpochBatch(place, epoch, step, self.indices(epoch, before, step), step in late)
                place += 1
            epoch, before, used = epoch + 1, 0, State()

    def substitute(self, planned: EpochBatch, failed: Failed) -> EpochBatch:
        """Raise what a failure is: nothing is made instead of a batch."""
        if failed.killed:
            raise ReadyError(f"examples {planned.indices} of the dataset: {failed.reason}")
        raise UserError(failed.reason)

    # Iterating

    @property
    def ended(self) -> bool:
        return self._used.first >= self.steps(self._before)

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
        self.epoch, self._before, self._used, self._begun = epoch, 0, State(), False

    # Going on

    def _identity(self) -> dict[str, int]:
        return {
            "examples": self.size,
            "seed": self.seed,
            "shuffle": int(self.shuffle),
            "batch_size": self.batch_size,
            "ranks": self.ranks,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the examples that this rank has used, JSON-able.  Batches that are ready but unused do not count."""
        used = {"epoch": self.epoch, "before": self._before, "first": self._used.first, "early": [*self._used.early]}
        return {**self._identity(), "rank": self.rank, **used}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called; the next iteration yields the rest of that epoch.

        Other numbers of ranks and batches go on with the examples that no rank has used, where none were exchanged
        within a window.  Errors: UserError for the state of another dataset, seed or order.
        """
        own = self._identity()
        if missing := sorted({*own, "rank", "epoch", "before", "first", "early"} - {*state}):
            raise UserError(f"Ready: the state lacks {missing[0]}; give what state_dict() of a Ready returned")
        for name in ("examples", "seed", "shuffle"):
            if state[name] != own[name]:
                raise UserError(
                    f"Ready: the state is of {name} = {state[name]}, this loader has {own[name]}; make it as it was"
                )
        alike = all(state[name] == own[name] for name in own)
        if state["early"] and not (alike and state["rank"] == self.rank):
            raise UserError(
                f"Ready: the state is of rank {state['rank']} of {state['ranks']}, which used batches before their "
                "places; go on with as many ranks, batches as large, and each rank's own state"
            )
        used = State(state["first"], tuple(state["early"]))
        before = state["before"]
        if not alike:
            before = min(self.size, before + used.first * state["batch_size"] * state["ranks"])
            used = State()
        self._begin_epoch(state["epoch"])
        self._before, self._used = before, used
