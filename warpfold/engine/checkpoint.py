"""The folder of a run: settings, checkpoints and log, consistent after a `kill -9` at any moment.

    DIR/settings.toml                 the resolved settings
    DIR/metrics.jsonl                 one JSON object per line: steps and validations
    DIR/checkpoints/step-00000100/    state.safetensors (weights, averages, moments), state.json (other state), and
                                      checksums.json of both, by which a damaged checkpoint is skipped
    DIR/params.safetensors            the averaged weights at the last checkpoint, for `predict --params`
    DIR/params_best.safetensors       the averaged weights of the best validation
    DIR/card.md                       origin, data, settings and results of a finished run (training/card.py)
    DIR/frozen.safetensors            the frozen parameters, which checkpoints lack
    DIR/failures/example-00000042/    batch and weights that reproduce a loss or gradient that was not finite

If several processes share a run, rank 0 locks the folder and writes the files.  Only a failure is saved by the process
in which it occurred.  Every file is written under a temporary name, synced, and renamed.
"""

import errno
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from warpfold.errors import UserError
from warpfold.files import cannot_write, checksum, error_number, sync_path, wait_for_lock
from warpfold.parallel.waits import saving

logger = logging.getLogger("warpfold")

STEP_FOLDER = re.compile(r"step-(\d{8})")
STATE = ("state.safetensors", "state.json")
CHECKSUMS = "checksums.json"
FROZEN = "frozen.safetensors"
MAX_FAILURES = 3  # saved for each run


class DamagedCheckpoint(UserError):
    """The files of a checkpoint do not match their checksums."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run: steps done, tensors by name, and JSON-able notes."""

    step: int
    tensors: dict[str, Tensor]
    notes: dict[str, Any]


class StepFolders:
    """The checkpoints in a folder, by their steps.  place: the option that chooses the folder, for errors."""

    place = "folder"

    def __init__(self, checkpoints: Path) -> None:
        self.checkpoints = checkpoints

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, ascending."""
        names = (STEP_FOLDER.fullmatch(path.name) for path in self.checkpoints.glob("step-*"))
        return sorted(int(name[1]) for name in names if name)

    def latest(self) -> int | None:
        return max(self.steps(), default=None)

    def step_path(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    def load(self, step: int) -> Checkpoint:
        """Load the checkpoint of a step.  Errors: DamagedCheckpoint if a bit of it has changed."""
        path = self.step_path(step)
        try:
            sums = json.loads((path / CHECKSUMS).read_text(encoding="utf-8"))
            if changed := [name for name in STATE if checksum(path / name) != sums[name]]:
                raise ValueError(f"{changed[0]} does not fit its checksum")
            notes = json.loads((path / "state.json").read_text(encoding="utf-8"))
            return Checkpoint(step, load_file(path / "state.safetensors"), notes)
        except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
            raise DamagedCheckpoint(f"{path}: damaged ({error})") from error

    def load_latest(self) -> Checkpoint | None:
        """Load the last intact checkpoint; None if the folder has no checkpoints.

        Damaged checkpoints after it are renamed with a warning, so that the run can write these steps again.
        Errors: UserError if all checkpoints are damaged.  Nothing is renamed then.
        """
        damaged: dict[int, DamagedCheckpoint] = {}
        checkpoint = None
        for step in reversed(self.steps()):
            try:
                checkpoint = self.load(step)
                break
            except DamagedCheckpoint as error:
                damaged[step] = error
        if checkpoint is None:
            if damaged:
                raise UserError(
                    f"{self.checkpoints}: no checkpoint is intact (the last one: {damaged[max(damaged)]}). "
                    f"Put back a copy, or choose another {self.place}."
                )
            return None
        for step, damage in damaged.items():
            # Renamed, so that no run continues from it.
            old = self.step_path(step)
            names = (f"damaged-{old.name}{end}" for end in ("", *(f"-{n}" for n in range(2, 10_000))))
            new = next(path for path in map(self.checkpoints.joinpath, names) if not path.exists())
            old.rename(new)
            logger.warning("%s; kept as %s; the run continues from step %d", damage, new.name, checkpoint.step)
        return checkpoint

    def save(self, checkpoint: Checkpoint, keep: int) -> None:
        """Write a checkpoint atomically, then delete old checkpoints except for the last `keep` and `spared` ones.

        Errors: UserError if the checkpoint cannot be written, such as on a full disk.  Earlier ones are untouched.
        """
        path = self.step_path(checkpoint.step)
        # A resumed run that stops at its first step has the same bits.
        if path.exists():
            return
        draft = self.checkpoints / f".partial-{path.name}"
        with self._reporting_write_errors(path, lambda: shutil.rmtree(draft, ignore_errors=True)):
            draft.mkdir(exist_ok=True)
            save_file(checkpoint.tensors, draft / "state.safetensors")
            (draft / "state.json").write_text(json.dumps(finite(checkpoint.notes), indent=1) + "\n", encoding="utf-8")
            sums = {name: checksum(draft / name) for name in STATE}
            (draft / CHECKSUMS).write_text(json.dumps(sums, indent=1) + "\n", encoding="utf-8")
            for draft_path in (*draft.iterdir(), draft):
                sync_path(draft_path)
            draft.rename(path)
            sync_path(self.checkpoints)
        self.prune(keep)

    @contextmanager
    def _reporting_write_errors(self, path: Path, clean: Callable[[], object]) -> Iterator[None]:
        """Convert a failure to write into a UserError that names the last safe checkpoint, after calling `clean`."""
        before = self.latest()
        try:
            yield
        except (OSError, SafetensorError) as error:
            clean()
            safe_note = "" if before is None else f"Step {before} is safe in {self.step_path(before)}"
            raise cannot_write(path, error, remedy(error), safe_note) from error

    def lock(self, folder: Path) -> TextIO:
        """Create a folder if needed, lock it against other runs, and remove partial checkpoints of a killed run.

        Errors: UserError if another run is writing there, or if the folder cannot be created.
        """
        busy_error = UserError(f"{folder}: another run is writing there. Wait for it, or choose another {self.place}.")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = wait_for_lock(folder / ".lock", busy_error)
            self.checkpoints.mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(
                f"{folder}: cannot be made or written: {error.strerror}. Choose another {self.place}."
            ) from error
        for leftover in self.checkpoints.glob(".partial-*"):
            shutil.rmtree(leftover)
        return lock

    def spared(self, steps: list[int], keep: int) -> set[int]:
        """Return steps whose checkpoints are retained in addition to the last ones."""
        return set()

    def prune(self, keep: int) -> None:
        """Delete old checkpoints except for the last `keep` and the `spared` ones."""
        steps = self.steps()
        for step in sorted({*steps[: -max(1, keep)]} - self.spared(steps, keep)):
            path = self.step_path(step)
            # A user may have stored other files there.
            if {file.name for file in path.iterdir()} - {*STATE, CHECKSUMS}:
                continue
            # Renamed first, so that a kill never leaves a checkpoint with a missing file.
            doomed = self.checkpoints / f".partial-{step}"
            path.rename(doomed)
            shutil.rmtree(doomed)


def finite(value: Any) -> Any:
    """Replace NaN and infinity by None, since JSON lacks them."""
    if isinstance(value, Mapping):
        return {key: finite(v) for key, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def remedy(error: Exception) -> str:
    """Suggest a remedy for a failure to write."""
    number = error_number(error)
    if number == errno.ENOENT:
        return "The folder was moved or removed meanwhile: put it back, and start again"
    return f"{'Make room' if number == errno.EFBIG else 'Check the disk'}, and start again"


class RunFolder(StepFolders):
    """The output folder of a run, locked while it is open (`with`), so that no second run writes into it.

    writes: False in processes that only read.
    score: the key in a validation's row by which checkpoints are compared; higher is better.
    """

    place = "--out"

    def __init__(self, path: Path | str, writes: bool = True, score: str = "score") -> None:
        super().__init__(Path(path) / "checkpoints")
        self.path, self._writes, self._score = Path(path), writes, score
        self._lock: TextIO | None = None
        self._log: AppendedFile | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        # Scores by step, of the validations in the log that have the examples `_compared`.
        self.scores: dict[int, float] = {}
        self._compared: frozenset[str] = frozenset()

    def __enter__(self) -> "RunFolder":
        if not self._writes:
            return self
        names = {path.name for path in self.path.iterdir()} if self.path.is_dir() else set()
        # The folder of a run has a lock.  A copy of it may lack the lock, but has these two.
        if names and ".lock" not in names and not {"settings.toml", "checkpoints"} <= names:
            raise UserError(f"{self.path}: holds something else, which is left alone. Choose another --out.")
        self._lock = self.lock(self.path)
        # A killed run may have left drafts of files.
        for leftover in self.path.glob(".partial-*"):
            leftover.unlink()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            # Waits until the checkpoint in progress is written.
            self._thread.shutdown()
            if kind is None:
                self.wait_for_writing()
            elif self._writing is not None and (lost := self._writing.exception()) is not None:
                # The run raises its own error, so this one is only logged.
                logger.warning("%s", lost)
        finally:
            for file in (self._log, self._lock):
                if file is not None:
                    file.close()

    def write_in_background(self, write: Callable[[], None]) -> None:
        """Wait until the previous checkpoint is written, and begin to write the next one in a thread.

        Until it is written, this process survives the failure of another one (parallel/heartbeat.py).
        Errors: those of the previous checkpoint.  Errors of this one are raised by the next call, by `log`, or at the
        end.
        """
        self.wait_for_writing()
        self._writing = self._thread.submit(saving()(write))

    def wait_for_writing(self) -> None:
        """Wait until the last checkpoint is on the disk.  Errors: those of writing it."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    @property
    def params(self) -> Path:
        """Return the path of the averaged weights at the last checkpoint."""
        return self.path / "params.safetensors"

    # Settings

    def settings_text(self) -> str | None:
        """Read the text of the run's settings; None in a new folder.

        Errors: UserError for a folder with checkpoints but without settings.
        """
        path = self.path / "settings.toml"
        if path.is_file():
            try:
                return path.read_text(encoding="utf-8")
            except ValueError as error:
                raise UserError(f"{path}: damaged ({error}). Restore it, or choose another {self.place}.") from error
        if self.latest() is not None:
            raise UserError(f"{self.path}: checkpoints without settings.toml. Restore it, or choose another --out.")
        return None

    def write_settings(self, text: str) -> None:
        self.replace_file("settings.toml", lambda path: path.write_text(text, encoding="utf-8"))

    # Checkpoints

    def spared(self, steps: list[int], keep: int) -> set[int]:
        """Return the last `keep` steps before which no example was skipped, and the step of the best validation.

        A run that skips examples therefore does not delete its sound checkpoints (notes: skipped).  The best step is
        that of the log so far, since a step is validated after it is saved.
        """
        notes = {step: self.notes(step) for step in steps}
        best = max(self.scores.keys() & notes, key=self.scores.__getitem__, default=None)
        good = [step for step in steps if "skipped" in notes[step] and not notes[step]["skipped"]]
        return {*good[-max(1, keep) :], *([] if best is None else [best])}

    def notes(self, step: int) -> dict[str, Any]:
        """Read the notes of a checkpoint; empty if they are damaged, which `load` reports."""
        try:
            notes = json.loads((self.step_path(step) / "state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return notes if isinstance(notes, dict) else {}

    def replace_file(self, name: str, write: Callable[[Path], object]) -> None:
        """Replace a file of the folder atomically.  write: writes the file at a temporary path.

        Errors: UserError if the file cannot be written.
        """
        path, draft = self.path / name, self.path / f".partial-{name}"

        def clean() -> None:
            for draft_file in self.path.glob(f"{draft.name}*"):
                draft_file.unlink()

        with self._reporting_write_errors(path, clean):
            write(draft)
            sync_path(draft)
            draft.replace(path)
            sync_path(self.path)

    def write_frozen(self, tensors: Mapping[str, Tensor], overwrite: bool) -> None:
        """Write the frozen parameters, which are the same in the whole run.

        overwrite: replace an existing file, which a run without a checkpoint has left.
        """
        if overwrite or not (self.path / FROZEN).exists():
            self.replace_file(FROZEN, lambda path: save_file({name: x.cpu() for name, x in tensors.items()}, path))

    def save_failure(
        self, index: int, arrays: Mapping[str, np.ndarray], tensors: Mapping[str, Tensor], notes: Mapping[str, Any]
    ) -> Path:
        """Save the batch, the weights and other data (failure.json) that reproduce a failure; return the folder.

        If a run continues after failures, only the first `MAX_FAILURES` are saved.
        """
        folder = self.path / "failures" / f"example-{index:08d}"
        if len(list(self.path.glob("failures/*"))) >= MAX_FAILURES and not folder.exists():
            return folder.parent
        with self._reporting_write_errors(folder, lambda: None):
            folder.mkdir(parents=True, exist_ok=True)
            # mypy: a key might be called allow_pickle.
            np.savez_compressed(folder / "batch.npz", **arrays)  # type: ignore[arg-type]
            save_file(dict(tensors), folder / "state.safetensors")
            (folder / "failure.json").write_text(json.dumps(finite(notes), indent=1) + "\n", encoding="utf-8")
        return folder

    # Log

    def open_log(self, step: int) -> dict[str, Any] | None:
        """Begin or continue metrics.jsonl after `step` steps, without damaged lines and lines of later steps.

        Returns the row of the last validation.
        """
        path = self.path / "metrics.jsonl"
        last = None
        if path.exists():
            lines = [line for line in path.read_bytes().splitlines(keepends=True) if self._is_valid(line, step)]
            self.replace_file(path.name, lambda draft: draft.write_bytes(b"".join(lines)))
            for row in map(json.loads, lines):
                if row.get("kind") == "validation":
                    self._note_score(row)
                    last = row
        self._log = AppendedFile(path)
        return last

    def _is_valid(self, line: bytes, step: int) -> bool:
        """Whether a line of the log is complete, has valid values where a run reads them, and is not after `step`."""
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return False
        if not line.endswith(b"\n") or not isinstance(row, dict) or type(row.get("step")) is not int:
            return False
        numbers = row.get("seconds"), row.get(self._score)
        return row["step"] <= step and all(isinstance(number, int | float | None) for number in numbers)

    def _note_score(self, row: Mapping[str, Any]) -> None:
        """Add the score of a validation to `scores` if it can be compared with the others.

        Scores of validations with equal examples are compared.  A validation without time for all examples does not
        count, since its examples may be easier.  Examples that failed need not be there.
        """
        # The log may be damaged, so the types are checked.
        named, left_out, total = (row.get(name) for name in ("examples", "left_out", "of"))
        examples = frozenset(named if isinstance(named, dict) else ())
        failed = len(left_out) if isinstance(left_out, dict | list) else 0
        if isinstance(total, int) and len(examples) + failed < total:
            return
        if len(examples) > len(self._compared):
            self.scores, self._compared = {}, examples
        if examples != self._compared:
            return
        if isinstance(score := row.get(self._score), float) and math.isfinite(score):
            self.scores[row["step"]] = score

    def best(self) -> tuple[int, int]:
        """Return the step of the best validation, -1 if there is none, and the number of validations after it."""
        # Of equal scores the first counts.
        best = max(self.scores, key=self.scores.__getitem__, default=-1)
        return best, sum(step > best for step in self.scores)

    def log(self, row: Mapping[str, Any]) -> None:
        """Append one line.  Errors: UserError if the disk is full, also while a thread wrote a checkpoint."""
        # The scores decide which checkpoints are retained.  A validation waits until the checkpoint in progress is
        # written, so that the decision does not depend on the time of writing.
        if row.get("kind") == "validation" or (self._writing is not None and self._writing.done()):
            self.wait_for_writing()
        if self._log is None:
            raise RuntimeError("call open_log before log")
        self._log.write(json.dumps(finite(row)) + "\n")
        if row.get("kind") == "validation":
            self._note_score(row)


class AppendedFile:
    """A text file for appending lines.  `write` returns once the operating system has the line."""

    def __init__(self, path: Path, header: str = "") -> None:
        """Open `path`, cut off a last line that a kill left incomplete, and write `header` into an empty file."""
        self.path = path
        try:
            with suppress(FileNotFoundError), open(path, "rb+") as file:
                file.truncate(file.read().rfind(b"\n") + 1)
            # Unbuffered, so that written lines survive the process, and a full disk is an error now, not on closing.
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (see close)
        except OSError as error:
            raise cannot_write(path, error) from error
        if header and not self._file.tell():
            self.write(header)

    def write(self, line: str) -> None:
        """Append a line.  Errors: UserError if the disk is full."""
        data = line.encode()
        try:
            if self._file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise cannot_write(self.path, error, remedy(error)) from error

    def close(self) -> None:
        self._file.close()
