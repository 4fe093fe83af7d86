"""Watch a training run: the interface of watchers, and TensorBoard and Weights & Biases as watchers."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from warpfold.errors import UserError
from warpfold.files import write_atomically

Row = dict[str, Any]  # of metrics.jsonl; it has a "kind" and a "step"
PhaseName = Literal["starting", "compiling", "training", "validating", "saving", "stopping"]


@dataclass(frozen=True, kw_only=True)
class Phase:
    """What a run is doing at the moment."""

    name: PhaseName
    step: int  # steps done
    steps: int  # of the whole run
    done: int = 0  # in this phase, of `total`: held-out examples
    total: int = 0  # 0: nothing is counted
    left: float | None = None  # seconds until the run ends, validations included; None: not known yet


class Watcher:
    """Listen to a training run: override what you want to know; `train(watch=...)` takes one, several, or a function.

    The process that it was given to calls it, from the loop: what takes long here makes the run slow, and an exception
    ends the run (whose last checkpoint stays).
    """

    def on_begin(self, step: int) -> None:
        """Begin to watch, after `step` steps: rows of later steps that an earlier process reported come again."""

    def on_metrics(self, row: Row) -> None:
        """Take a row of metrics.jsonl.

        Its "kind" is "step", "validation", "quarantine", "end", or with `train.digest_every` "session" or "digest".
        """

    def on_phase(self, phase: Phase) -> None:
        """Take what the run does now.  A signal handler may call it ("stopping"), at any moment."""

    def on_end(self, finished: bool) -> None:
        """End; finished: False where the run was stopped or failed, so that the same command would continue it."""


Watching = Watcher | Callable[[Row], object] | Sequence[Watcher | Callable[[Row], object]]


def as_watchers(watch: Watching | None) -> list[Watcher]:
    """Return the watchers that were given: one or several, each a `Watcher` or a function that is called with each row.

    Errors: UserError for anything else, such as a class that was not called.
    """
    if watch is None:
        return []
    every = list(watch) if isinstance(watch, Sequence) and not isinstance(watch, str) else [watch]
    found: list[Watcher] = []
    for one in every:
        if isinstance(one, Watcher):
            found.append(one)
        elif callable(one) and not isinstance(one, type):
            watcher = Watcher()
            watcher.on_metrics = one  # type: ignore[assignment]
            found.append(watcher)
        else:
            raise UserError(f"watch: {one!r} is neither a Watcher nor a function of a row; give one of them")
    return found


def numbers_of(row: Row) -> Iterator[tuple[str, float]]:
    """Yield what is a number in a row, its loss terms included, by name; its step and its time apart."""
    for name, value in [*row.items(), *row.get("terms", {}).items()]:
        if isinstance(value, int | float) and name not in ("step", "time"):
            yield name, value


class TensorBoard(Watcher):
    """Writes every number of a row as a curve, for TensorBoard."""

    def __init__(self, folder: Path | str) -> None:
        """folder: for TensorBoard's files.  Errors: UserError where the package is missing."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError("train.tensorboard: the package is missing; pip install '.[tensorboard]'") from error
        self._open, self.folder = SummaryWriter, Path(folder)
        self._writer: Any = None

    def on_begin(self, step: int) -> None:
        self._writer = self._open(str(self.folder), purge_step=step + 1)

    def on_metrics(self, row: Row) -> None:
        if self._writer is None:
            self.on_begin(0)
        for name, value in numbers_of(row):
            self._writer.add_scalar(f"{row['kind']}/{name}", value, row["step"])
        self._writer.flush()

    def on_end(self, finished: bool) -> None:
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases(Watcher):
    """Gives every number of a row to Weights & Biases: into files of the run's folder, or to a server if asked to."""

    def __init__(
        self, folder: Path | str, online: bool = False, name: str | None = None, settings: Row | None = None
    ) -> None:
        """folder: of the run; W&B's files go to its `wandb`, for `wandb sync`, and its name is the run's there.

        online: send them as W&B itself is set up (WANDB_MODE, `wandb login`); else nothing leaves this machine.
        settings: shown beside the curves.
        Errors: UserError where the package is missing, or would look for its server though it is to stay offline.
        """
        try:
            self._wandb = importlib.import_module("wandb")
        except ImportError as error:
            raise UserError("train.wandb: the package is missing; pip install wandb") from error
        if not online and self._wandb.env.error_reporting_enabled():  # seen: it looks for a server to report crashes to
            raise UserError(
                "train.wandb: W&B would look for its server even offline, to report its own crashes; "
                "set WANDB_ERROR_REPORTING=false (`warpfold train` does), or ask for online"
            )
        self.folder, self.online = Path(folder), online
        self.name, self.settings = name or self.folder.resolve().name, settings
        self._run: Any = None

    def on_begin(self, step: int) -> None:
        """Begin W&B's run, or continue that of the folder."""
        path = self.folder / "wandb" / "warpfold-run-id"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, uuid4().hex[:12])
        own = self._wandb.Settings(console="off", disable_git=True, disable_code=True, silent=True)
        mode = None if self.online else "offline"  # None: as W&B is set up
        self._run = self._wandb.init(
            project="warpfold", name=self.name, dir=str(self.folder), mode=mode, id=path.read_text(encoding="utf-8"),
            resume="allow", config=self.settings, settings=own,
        )  # fmt: skip
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")  # W&B's own count would refuse steps that come again

    def on_metrics(self, row: Row) -> None:
        if self._run is None:
            self.on_begin(0)
        self._run.log({"step": row["step"]} | {f"{row['kind']}/{name}": value for name, value in numbers_of(row)})

    def on_end(self, finished: bool) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if finished else 1)
