"""Watchers of a training run: their interface, TensorBoard, and Weights & Biases."""

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
    """The current activity of a run."""

    name: PhaseName
    step: int  # steps done
    steps: int  # of the whole run
    done: int = 0  # held-out examples in this phase
    total: int = 0  # 0: nothing is counted
    left: float | None = None  # seconds until the end; None: unknown


class Watcher:
    """Base class of watchers; override the methods of interest.

    `train(watch=...)` takes a watcher, several, or a function of a row.  The training loop calls them in its process,
    so a slow method slows the run, and an exception ends it.  The last checkpoint stays.
    """

    def on_begin(self, step: int) -> None:
        """Called first, after `step` steps.  Rows of later steps that an earlier process reported come again."""

    def on_metrics(self, row: Row) -> None:
        """Called with each row of metrics.jsonl.

        Its "kind" is "step", "validation", "quarantine", "end", or with `train.digest_every` "session" or "digest".
        """

    def on_phase(self, phase: Phase) -> None:
        """Called when the phase changes.  A signal handler may call it at any time with the phase "stopping"."""

    def on_end(self, finished: bool) -> None:
        """Called last.  finished: False if the run was stopped or failed, so that the same command continues it."""


Watching = Watcher | Callable[[Row], object] | Sequence[Watcher | Callable[[Row], object]]


def as_watchers(watch: Watching | None) -> list[Watcher]:
    """Convert watchers and functions of a row, one or several, to a list of watchers.

    Errors: UserError for other objects, such as a class that was not called.
    """
    if watch is None:
        return []
    watchers: list[Watcher] = []
    for item in list(watch) if isinstance(watch, Sequence) and not isinstance(watch, str) else [watch]:
        if isinstance(item, Watcher):
            watchers.append(item)
        elif callable(item) and not isinstance(item, type):
            watcher = Watcher()
            watcher.on_metrics = item  # type: ignore[assignment]
            watchers.append(watcher)
        else:
            raise UserError(f"watch: {item!r} is neither a Watcher nor a function of a row. Pass one of them.")
    return watchers


def numbers_in_row(row: Row) -> Iterator[tuple[str, float]]:
    """Yield the names and numbers of a row and of its loss terms, without its step and time."""
    for name, value in [*row.items(), *row.get("terms", {}).items()]:
        if isinstance(value, int | float) and name not in ("step", "time"):
            yield name, value


class TensorBoard(Watcher):
    """Write every number of a row as a curve for TensorBoard."""

    def __init__(self, folder: Path | str) -> None:
        """folder: for TensorBoard's files.  Errors: UserError if the package is missing."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError("train.tensorboard: the package is missing. Run pip install '.[tensorboard]'.") from error
        self._open, self.folder = SummaryWriter, Path(folder)
        self._writer: Any = None

    def on_begin(self, step: int) -> None:
        self._writer = self._open(str(self.folder), purge_step=step + 1)

    def on_metrics(self, row: Row) -> None:
        if self._writer is None:
            self.on_begin(0)
        for name, value in numbers_in_row(row):
            self._writer.add_scalar(f"{row['kind']}/{name}", value, row["step"])
        self._writer.flush()

    def on_end(self, finished: bool) -> None:
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases(Watcher):
    """Log every number of a row with Weights & Biases, in files of the run's folder or on a server."""

    def __init__(
        self, folder: Path | str, online: bool = False, name: str | None = None, settings: Row | None = None
    ) -> None:
        """folder: of the run.  W&B's files go to its subfolder `wandb`, for `wandb sync`.

        online: follow the setup of W&B (WANDB_MODE, `wandb login`).  Otherwise no data leaves this machine.
        name: of the run in W&B; default: the name of the folder.
        settings: shown with the curves.
        Errors: UserError if the package is missing, or if it would contact its server although `online` is False.
        """
        try:
            self._wandb = importlib.import_module("wandb")
        except ImportError as error:
            raise UserError("train.wandb: the package is missing. Run pip install wandb.") from error
        # W&B contacts a server to report its own crashes even when it is offline.
        if not online and self._wandb.env.error_reporting_enabled():
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
        options = self._wandb.Settings(console="off", disable_git=True, disable_code=True, silent=True)
        # None follows the setup of W&B.
        mode = None if self.online else "offline"
        self._run = self._wandb.init(
            project="warpfold", name=self.name, dir=str(self.folder), mode=mode, id=path.read_text(encoding="utf-8"),
            resume="allow", config=self.settings, settings=options,
        )  # fmt: skip
        # W&B's own step counter would refuse the repeated steps of a run that continues from a checkpoint.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def on_metrics(self, row: Row) -> None:
        if self._run is None:
            self.on_begin(0)
        self._run.log({"step": row["step"]} | {f"{row['kind']}/{name}": value for name, value in numbers_in_row(row)})

    def on_end(self, finished: bool) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if finished else 1)
