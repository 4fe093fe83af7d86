"""Spare ranks: they fold the held-out proteins while the others train, and stand in for lost ones after a restart.

The last processes of a job are its spares (`train.spare`).  They are in no process group, and train waits for none of
them.  They and rank 0 leave notes for each other on the team's board:

    run            rank 0: the settings, and what is held out
    validate       rank 0: a step whose checkpoint is on the disk
    scores-STEP-R  spare R: the scores of its share of the held-out examples
    signal-R       spare R: a signal, which stops the run as one of any rank does
    end            rank 0: how the run ended
    left-R         spare R: it has read that
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from warpfold import settings
from warpfold.data.load.order import Source
from warpfold.data.store.store import Store
from warpfold.engine.checkpoint import RunFolder
from warpfold.engine.loop import StopSignals
from warpfold.engine.packed import PackedWeights
from warpfold.engine.step_folders import StepFolders
from warpfold.engine.watch import Row
from warpfold.errors import UserError
from warpfold.model.alphafold import AlphaFold
from warpfold.parallel.heartbeat import Position, TeamError
from warpfold.parallel.plan import DTYPES
from warpfold.parallel.team import ProcessInfo, Team
from warpfold.training.config import GivenSettings, RunConfig
from warpfold.training.examples import fingerprint, held_out_features, hold_out
from warpfold.training.ranks import stop_requested
from warpfold.training.validation import Judge, Scores, Validation, averages_of, scores_row

logger = logging.getLogger("warpfold")

POLL = 0.25  # seconds between two looks at the board


def set_apart(process: ProcessInfo, given: GivenSettings) -> ProcessInfo:
    """Return what a process is in a job of which at most `train.spare` processes do not train.

    The plan's ranks come first, and what is left are spares; a plan whose sizes are open has all ranks but these.
    Errors: UserError if there are fewer processes than the plan needs, or more than it and the spares.
    """
    config, there = given.config(), process.ranks
    plan, spare = config.plan, config.train.spare
    if not spare:
        return process
    sizes = {
        name: getattr(plan, name) if name in given.own or not given.auto else 1 for name in ("data", "axial", "branch")
    }
    ranks = sizes["data"] * sizes["axial"] * sizes["branch"]
    if given.auto and "data" not in given.own:
        ranks = max(there - spare, 1)
    if not ranks <= there <= ranks + spare:
        grid = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise UserError(
            f"plan: {grid} needs {ranks} processes, and train.spare = {spare} takes up to {spare} more, there are "
            f"{there}; start it with torchrun, {ranks} to {ranks + spare} processes in all, or change the plan"
        )
    return replace(process, ranks=ranks, spares=there - ranks, ranks_per_node=min(process.ranks_per_node, ranks))


def validations_of(team: Team) -> type[Validation]:
    """Return who validates in a run: spares if there are any, or the ranks that train."""
    return SpareValidation if team.process.spares else Validation


class SpareValidation(Validation):
    """The validations of a run with spares: they fold a step's examples while the ranks train on.

    One step may wait while they fold another; of several that wait, the newest stays.  Rank 0 asks and logs; the others
    hear of it when the next validation is due.  If a spare is gone, the ranks validate as they do without.
    """

    def __init__(self, *of_validation: Any) -> None:
        """Tell the spares what the run is.  of_validation: as of `Validation`."""
        super().__init__(*of_validation)
        self._queue: list[int] = []  # on rank 0, and so are the following: the step that is folded, and one that waits
        self._asked = False  # whether the spares know of the first
        self._found: dict[int, dict[str, Scores]] = {}  # its scores, by spare
        self._rows: list[Row] = []  # that rank 0 has logged, and the others have not yet
        self._looked = 0.0
        self._behind = False  # whether a validation was left out; it is said once
        self._lost = ""  # why nobody validates any more; when the next one is due, all ranks know it
        if self.team.is_rank_zero:
            told = {"config": settings.to_dict(self.config), "held out": said_of(self.held_out)}
            told["spares"] = [*self._spares]
            self.team.board.put("run", told)

    def rounds_at(self, step: int) -> int:
        """Return a number above 0 if a validation is due after this step: spares need no time of the training.

        Called after every step: here rank 0 hears what spares have found meanwhile.
        """
        self._hear()
        if not self.is_owed(step):
            return 0
        self._tell_all()
        return super().rounds_at(step) if self._lost else self.rounds

    def catch_up(self, step: int) -> int:
        """Have spares validate what was not finished when the run was stopped, and the first weights."""
        run = self.log.run
        if run is not None:
            self._queue = [owed for owed in sorted(run.owed) if owed in (0, *run.steps())]
        rounds = self.rounds_at(step)
        return self(step, rounds) if rounds else 0

    def __call__(self, step: int, rounds: int, *averages: Any) -> int:
        """Ask the spares; after the last step also wait for them.  Return the signal that stops the run, or 0."""
        if self._lost:
            return super().__call__(step, rounds, *averages)
        if self.log.run is not None:
            self._ask(step)
        return self._wait(step) if step == self.config.train.steps else 0

    def _hear(self, due: bool = False) -> None:
        """Ask spares for what is next, and log what they have found, on rank 0; notice a signal, and if one is gone.

        due: a checkpoint is about to be saved, for which the one before has to be written; else nothing waits for that.
        """
        run, now = self.log.run, time.monotonic()
        if run is None or self._lost or (now < self._looked + POLL and not due):
            return
        self._looked = now
        self._lost = self.team.lost_spare()
        if self._lost:
            self._go_alone()
            return
        for rank in self._spares:
            self.signals.received = self.signals.received or self.team.board.read(f"signal-{rank}") or 0
        if not self._queue:
            return
        step = self._queue[0]
        if not self._asked and step in (0, *run.steps()):  # its checkpoint is on the disk
            self.team.board.put("validate", step)
            self._asked = True
        for rank in self._spares:
            if rank not in self._found and (scores := self.team.board.take(f"scores-{step}-{rank}")) is not None:
                self._found[rank] = scores
        if len(self._found) == self.team.process.spares and (due or not run.is_writing):
            self._enter(run, step)

    def end(self, step: int, stop: int) -> dict[str, Any]:
        """Tell the spares how the run ended, and return it when they know: the store may end with this process."""
        how = super().end(step, stop)
        if not self.team.is_rank_zero or self._lost:  # whoever lost one has said the end to the others
            return how
        self.team.board.put("end", how)
        left = set(self._spares)
        while left and not self.team.lost_spare():
            left -= {rank for rank in left if self.team.board.read(f"left-{rank}")}
            time.sleep(POLL if left else 0)
        return how

    @property
    def _spares(self) -> range:
        return range(self.team.process.ranks, self.team.process.ranks + self.team.process.spares)

    def _ask(self, step: int) -> None:
        """Queue a step, in place of one that waits."""
        assert self.log.run is not None
        if len(self._queue) > 1 and step not in self._queue:
            left_out = self._queue.pop()
            if not self._behind:
                logger.warning(
                    "validations are due faster than spares fold them: that after step %d is left out, and so may be "
                    "others; raise train.validate_every or train.spare",
                    left_out,
                )
            self._behind = True
        self._queue += [step] if step not in self._queue else []
        self.log.run.owe(self._queue)

    def _enter(self, run: RunFolder, step: int) -> None:
        """Log what was found; the step's checkpoint may go, unless it is the best."""
        every = {key: scores for found in self._found.values() for key, scores in found.items()}
        row = scores_row(step, [key for _, key in self.held_out], every)
        self.log(row)
        self._rows.append(row)
        self._queue, self._asked, self._found = self._queue[1:], False, {}
        run.owe(self._queue)
        if step < (run.latest() or 0):
            run.write_beside(lambda: run.prune(self.config.train.keep))

    def _go_alone(self) -> None:
        """Say that spares validate no more, and let those that are left go."""
        assert self.log.run is not None
        steps = " and ".join(str(step) for step in self._queue if step != self.config.train.steps)  # that one is not
        left_out = f"; the validation after step {steps} is left out" if steps else ""
        logger.warning("%s; the ranks that train validate from here on, as without spares%s", self._lost, left_out)
        self._queue = []
        self.log.run.owe(())
        self.team.board.put("end", {"steps": self.log.step, "finished": True, "lddt_ca": None, "signal": 0})

    def _tell_all(self) -> None:
        """Have all ranks know what rank 0 knows: the rows of spares, and whether one is gone."""
        self._hear(due=True)
        self._lost, rows = self.team.broadcast([self._lost, self._rows], "what spares have found")
        for row in rows if self.log.run is None else ():
            self.log(row)
        self._rows = []

    def _wait(self, step: int) -> int:
        """Wait for what the spares still fold; return the signal that stops the run, or 0."""
        self.log.phase("validating")
        while not (stop := stop_requested(self.signals, self.team)):
            self._hear()
            if not self.team.largest(len(self._queue), "waiting for spares"):
                break
            time.sleep(POLL)
        self._tell_all()
        rounds = super().rounds_at(step) if self._lost and not stop else 0
        return super().__call__(step, rounds) if rounds else stop


class _Ended(Exception):
    """The run has ended."""

    def __init__(self, how: dict[str, Any]) -> None:
        super().__init__()
        self.how = how


class Spare:
    """One spare: folds its share of the held-out examples of each step that rank 0 asks for."""

    def __init__(self, team: Team, data: Store | Sequence[Source], out: Path | str, device: torch.device | str) -> None:
        self.team, self.data, self.device = team, data, torch.device(device)
        self.checkpoints = StepFolders(Path(out) / "checkpoints")
        self.signals = StopSignals()
        self._looked = 0.0

    def stand_by(self, first: Callable[[RunConfig], AlphaFold]) -> dict[str, Any]:
        """Validate what rank 0 asks for until the run ends; return how it did, what a `Summary` has of it.

        first: returns the model with its first weights.
        Errors: TeamError if a rank that trains fails; UserError if this one does not see the same data.
        """
        step = -1
        try:
            with self.signals:
                self._begin(first)
                while True:
                    step = self._next("validate", step)
                    self.team.position = Position(name=f"the validation after step {step}")
                    self._load(step)
                    self.team.board.put(f"scores-{step}-{self.team.process.rank}", self._scores())
                    self.team.position = Position(name="waiting for a step to validate")
        except _Ended as end:
            self.team.board.put(f"left-{self.team.process.rank}", True)
            return end.how

    def _begin(self, first: Callable[[RunConfig], AlphaFold]) -> None:
        """Learn what the run is, and make its model."""
        told, process = self._next("run", None), self.team.process
        self.config = config = settings.build(RunConfig, told["config"], "the settings of rank 0")
        _, held_out = hold_out(self.data, config)
        if said_of(held_out) != told["held out"]:
            raise UserError(
                f"rank {process.rank}, a spare, and rank 0 hold out different proteins; give all ranks the same --data"
            )
        self.share = held_out[told["spares"].index(process.rank) :: len(told["spares"])]
        self.model = first(config).to(self.device).eval()
        self.packed = PackedWeights(self.model, DTYPES[config.plan.precision])

    def _load(self, step: int) -> None:
        """Give the model the averaged weights of a step, whose checkpoint another machine may see a little later."""
        if step == 0:
            return  # the first weights, which no step comes before
        path, limit = self.checkpoints.step_path(step), self.config.plan.time_limit
        until = time.monotonic() + limit
        while not path.is_dir():
            self._look()
            if time.monotonic() > until:
                raise UserError(
                    f"{path}: rank {self.team.process.rank} does not see it after {limit:.0f} s; put --out on a file "
                    "system that all machines share"
                )
            time.sleep(POLL)
        for name, average in averages_of(self.checkpoints.load(step)).items():
            self.packed.parameters[name].data.copy_(average)
        self.packed.refresh()

    def _scores(self) -> dict[str, Scores]:
        judge = Judge(self.model, self.config, self.device, lambda _: self._look())
        with torch.no_grad(), closing(held_out_features(self.share, self.config)) as examples:
            return {example.key: judge.scores(example) for example in examples}

    def _next(self, name: str, before: Any) -> Any:
        """Wait for a note that is another than before."""
        while (note := self.team.board.read(name)) in (None, before):
            self._look()
            time.sleep(POLL)
        return note

    def _look(self) -> None:
        """Pass on a signal; raise where the run has ended or failed.  Cheap: it may be called at any time."""
        if time.monotonic() < self._looked + POLL:
            return
        self._looked = time.monotonic()
        if (how := self.team.board.read("end")) is not None:
            raise _Ended(how)
        if reason := self.team.failure():
            raise TeamError(reason)
        if self.signals.received:
            self.team.board.put(f"signal-{self.team.process.rank}", self.signals.received)


def said_of(held_out: Sequence[tuple[Store, str]]) -> list[str]:
    """Return what must be the same on all ranks of what is held out: the keys, and the stores' manifests."""
    stores = dict.fromkeys(store.path for store, _ in held_out)
    manifests = [fingerprint((path / "store.json").read_bytes()) for path in stores]
    return manifests + [key for _, key in held_out]
