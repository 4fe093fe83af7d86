"""A run's folder: its settings, its checkpoints, its log; whole after a `kill -9` at any moment.

    DIR/settings.toml                 the resolved settings
    DIR/metrics.jsonl                 one JSON object per line: steps and validations
    DIR/checkpoints/step-00000100/    state.safetensors (weights, averages, moments), state.json (the rest), and
                                      checksums.json of both: a damaged checkpoint is skipped
    DIR/params.safetensors            the averaged weights at the last checkpoint: what `predict --params` takes
    DIR/params_best.safetensors       those of the best validation
    DIR/card.md                       of a finished run: origin, data, settings and results (training/card.py)
    DIR/frozen.safetensors            the parameters that are not trained, which checkpoints do not hold
    DIR/failures/example-00000042/    what reproduces a loss or gradient that was not finite

Of several processes that run together, rank 0 locks the folder and writes; only failures are saved by the process that
had them.  Every file is written under another name, synced, and renamed into its place.
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


class DamagedCheckpoint(UserError):
    """A checkpoint whose files are not what was written."""


@dataclass(frozen=True)
class Checkpoint:
    """What a run continues from: steps done, tensors by name, and JSON-able notes."""

    step: int
    tensors: dict[str, Tensor]
    notes: dict[str, Any]


class StepFolders:
    """The checkpoints in a folder, by their steps.  place: what a user chose it by, for errors."""

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
        """Return the checkpoint of a step.  Errors: DamagedCheckpoint if it is not, bit for bit, what was written."""
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
        """Return the last checkpoint that is whole; None where there is none at all.

        Damaged ones after it are renamed, so that the run can write these steps again, and a warning names each.
        Errors: UserError when all are damaged; then nothing is changed.
        """
        damaged: dict[int, DamagedCheckpoint] = {}
        found = None
        for step in reversed(self.steps()):
            try:
                found = self.load(step)
                break
            except DamagedCheckpoint as error:
                damaged[step] = error
        if found is None:
            if damaged:
                raise UserError(
                    f"{self.checkpoints}: no checkpoint is whole (of the last: {damaged[max(damaged)]}); "
                    f"put back a copy, or choose another {self.place}"
                )
            return None
        for step, why in damaged.items():
            aside = self.set_aside(step)
            logger.warning("%s; kept as %s; the run continues from step %d", why, aside, found.step)
        return found

    def set_aside(self, step: int) -> str:
        """Rename a checkpoint, so that no run continues from it; return its new name."""
        names = (f"damaged-{self.step_path(step).name}{end}" for end in ("", *(f"-{n}" for n in range(2, 10_000))))
        aside = next(path for path in map(self.checkpoints.joinpath, names) if not path.exists())
        self.step_path(step).rename(aside)
        return aside.name

    def save(self, checkpoint: Checkpoint, keep: int) -> None:
        """Write a checkpoint whole or not at all, then delete old ones; the last `keep` stay, and those of `spared`.

        Errors: UserError if it cannot be written (a full disk); the checkpoints before it are untouched.
        """
        place = self.step_path(checkpoint.step)
        if place.exists():  # a resumed run that stops where it began: the same to the bit
            return
        draft = self.checkpoints / f".partial-{place.name}"
        with self._whole(place, lambda: shutil.rmtree(draft, ignore_errors=True)):
            draft.mkdir(exist_ok=True)
            save_file(checkpoint.tensors, draft / "state.safetensors")
            (draft / "state.json").write_text(json.dumps(finite(checkpoint.notes), indent=1) + "\n", encoding="utf-8")
            sums = {name: checksum(draft / name) for name in STATE}
            (draft / CHECKSUMS).write_text(json.dumps(sums, indent=1) + "\n", encoding="utf-8")
            for path in (*draft.iterdir(), draft):
                sync_path(path)
            draft.rename(place)
            sync_path(self.checkpoints)
        self.prune(keep)

    @contextmanager
    def _whole(self, path: Path, clean: Callable[[], object]) -> Iterator[None]:
        """Have a failure to write be a UserError that says which checkpoint is safe, once its leftovers are removed."""
        before = self.latest()
        try:
            yield
        except (OSError, SafetensorError) as error:
            clean()
            kept = "" if before is None else f"step {before} is safe in {self.step_path(before)}"
            raise cannot_write(path, error, cure(error), kept) from error

    def lock(self, folder: Path) -> TextIO:
        """Keep other runs out of a folder, which is made if it is not there; remove what a killed one has left.

        Errors: UserError where another run is writing there, or the folder cannot be made.
        """
        taken = UserError(f"{folder}: another run is writing there; wait for it or choose another {self.place}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = wait_for_lock(folder / ".lock", taken)
            self.checkpoints.mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(
                f"{folder}: cannot be made or written: {error.strerror}; choose another {self.place}"
            ) from error
        for leftover in self.checkpoints.glob(".partial-*"):
            shutil.rmtree(leftover)
        return lock

    def spared(self, steps: list[int], keep: int) -> set[int]:
        """Return steps whose checkpoints stay, besides the last ones."""
        return set()

    def prune(self, keep: int) -> None:
        """Delete old checkpoints, but the last `keep` and those of `spared`."""
        steps = self.steps()
        for step in sorted({*steps[: -max(1, keep)]} - self.spared(steps, keep)):
            place = self.step_path(step)
            if {path.name for path in place.iterdir()} - {*STATE, CHECKSUMS}:
                continue  # somebody keeps other files there
            doomed = self.checkpoints / f".partial-{step}"
            place.rename(doomed)  # first, so that a kill never leaves a checkpoint with a file missing
            shutil.rmtree(doomed)


def finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by None."""
    if isinstance(value, Mapping):
        return {key: finite(v) for key, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def cure(error: Exception) -> str:
    """Suggest a remedy where something could not be written, and the disk is not known to be the reason."""
    number = error_number(error)
    if number == errno.ENOENT:
        return "the folder was moved or removed meanwhile: put it back, and start again"
    return f"{'make room' if number == errno.EFBIG else 'see to the disk'}, and start again"


MAX_FAILURES = 3


class RunFolder(StepFolders):
    """One run's output folder, locked while it is open (`with`), so that no second run writes into it.

    writes: False in the processes that only read.  score: the key of the number in a validation's row by which
    checkpoints are compared; higher is better.
    """

    place = "--out"

    def __init__(self, path: Path | str, writes: bool = True, score: str = "score") -> None:
        super().__init__(Path(path) / "checkpoints")
        self.path, self._writes, self._score = Path(path), writes, score
        self._lock: TextIO | None = None
        self._log: AppendedFile | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self.scores: dict[int, float] = {}  # of the validations in the log, by step, that have the same examples
        self._judged: frozenset[str] = frozenset()  # these examples

    def __enter__(self) -> "RunFolder":
        if not self._writes:
            return self
        found = {path.name for path in self.path.iterdir()} if self.path.is_dir() else set()
        # A run's folder has a lock; a copy of one may lack it, but has these two.
        if found and ".lock" not in found and not {"settings.toml", "checkpoints"} <= found:
            raise UserError(f"{self.path}: holds something else, which is left alone; choose another --out")
        self._lock = self.lock(self.path)
        for leftover in self.path.glob(".partial-*"):  # of a file that was being replaced
            leftover.unlink()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._thread.shutdown()  # waits for what is being written
            if kind is None:
                self._end_writing(wait=True)
            elif self._writing is not None and (lost := self._writing.exception()) is not None:
                logger.warning("%s", lost)  # the run ends with its own error, but this is to be known, too
        finally:
            for file in (self._log, self._lock):
                if file is not None:
                    file.close()

    def write_beside(self, write: Callable[[], None]) -> None:
        """Begin to write a checkpoint in a thread, when the one before is written.

        Until it is written, this process outlives the failure of another one (parallel/heartbeat.py).
        Errors: what writing that one raised.  What this one raises, the next `write_beside`, `log` or the end raises.
        """
        self._end_writing(wait=True)
        self._writing = self._thread.submit(saving()(write))

    def wait_for_writing(self) -> None:
        """Return when the last checkpoint is on the disk.  Errors: what writing it raised."""
        self._end_writing(wait=True)

    def _end_writing(self, wait: bool) -> None:
        """Raise what writing beside has raised, once it has ended."""
        if self._writing is not None and (wait or self._writing.done()):
            writing, self._writing = self._writing, None
            writing.result()

    @property
    def params(self) -> Path:
        """Return the path of the averaged weights at the last checkpoint."""
        return self.path / "params.safetensors"

    # Settings

    def settings_text(self) -> str | None:
        """Return the text of the settings that a run left here; None in a new folder.

        Errors: UserError for a folder with checkpoints but without settings.
        """
        path = self.path / "settings.toml"
        if path.is_file():
            try:
                return path.read_text(encoding="utf-8")
            except ValueError as error:
                raise UserError(f"{path}: damaged ({error}); restore it or choose another {self.place}") from error
        if self.latest() is not None:
            raise UserError(f"{self.path}: checkpoints without settings.toml; restore it or choose another --out")
        return None

    def write_settings(self, text: str) -> None:
        self.replace_file("settings.toml", lambda path: path.write_text(text, encoding="utf-8"))

    # Checkpoints

    def spared(self, steps: list[int], keep: int) -> set[int]:
        """Return the last `keep` before which no example was skipped, and the one with the best validation.

        So a run in trouble does not replace what was good (notes: skipped).  The best is so as far as the log says: a
        step is validated after it is saved.
        """
        notes = {step: self.notes(step) for step in steps}
        best = max(self.scores.keys() & notes, key=self.scores.__getitem__, default=None)
        good = [step for step in steps if "skipped" in notes[step] and not notes[step]["skipped"]]
        return {*good[-max(1, keep) :], *([] if best is None else [best])}

    def notes(self, step: int) -> dict[str, Any]:
        """Return the notes of a checkpoint, empty where they are damaged (`load` reports that)."""
        try:
            notes = json.loads((self.step_path(step) / "state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return notes if isinstance(notes, dict) else {}

    def replace_file(self, name: str, write: Callable[[Path], object]) -> None:
        """Replace a file of the folder by what `write` writes, entirely or not at all.

        Errors: UserError when it cannot be written.
        """
        path, draft = self.path / name, self.path / f".partial-{name}"

        def clean() -> None:
            for left in self.path.glob(f"{draft.name}*"):
                left.unlink()

        with self._whole(path, clean):
            write(draft)
            sync_path(draft)
            draft.replace(path)
            sync_path(self.path)

    def write_frozen(self, tensors: Mapping[str, Tensor], again: bool) -> None:
        """Write the parameters that are not trained, which are the same in the whole run.

        again: also where they are there already, of a run that was stopped before its first checkpoint.
        """
        if again or not (self.path / FROZEN).exists():
            self.replace_file(FROZEN, lambda path: save_file({name: x.cpu() for name, x in tensors.items()}, path))

    def save_failure(
        self, index: int, arrays: Mapping[str, np.ndarray], tensors: Mapping[str, Tensor], notes: Mapping[str, Any]
    ) -> Path:
        """Save what reproduces a failure: the batch, the weights, and the rest in failure.json; return the folder.

        If a run goes on after failures, only the first MAX_FAILURES are saved.
        """
        folder = self.path / "failures" / f"example-{index:08d}"
        if len(list(self.path.glob("failures/*"))) >= MAX_FAILURES and not folder.exists():
            return folder.parent
        with self._whole(folder, lambda: None):
            folder.mkdir(parents=True, exist_ok=True)
            np.savez_compressed(folder / "batch.npz", **arrays)  # type: ignore[arg-type]  # mypy: a key might be called allow_pickle
            save_file(dict(tensors), folder / "state.safetensors")
            (folder / "failure.json").write_text(json.dumps(finite(notes), indent=1) + "\n", encoding="utf-8")
        return folder

    # Log

    def open_log(self, step: int) -> dict[str, Any] | None:
        """Begin or continue metrics.jsonl after `step` steps; drop lines of later steps and damaged ones.

        Returns the row of the last validation that stays.
        """
        path = self.path / "metrics.jsonl"
        last = None
        if path.exists():
            kept = [line for line in path.read_bytes().splitlines(keepends=True) if self._belongs(line, step)]
            self.replace_file(path.name, lambda draft: draft.write_bytes(b"".join(kept)))
            for row in map(json.loads, kept):
                if row.get("kind") == "validation":
                    self._note_score(row)
                    last = row
        self._log = AppendedFile(path)
        return last

    def _belongs(self, line: bytes, step: int) -> bool:
        """Return whether a line of the log is whole, as far as a run reads it again, and of a step that is done."""
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return False
        if not line.endswith(b"\n") or not isinstance(row, dict) or type(row.get("step")) is not int:
            return False
        numbers = row.get("seconds"), row.get(self._score)
        return row["step"] <= step and all(isinstance(one, int | float | None) for one in numbers)

    def _note_score(self, row: Mapping[str, Any]) -> None:
        """Note by what checkpoints are compared: validations of all examples but those that failed in each of them.

        Not of one that had no time for all: others are easier.
        """
        named, left_out, of = (row.get(name) for name in ("examples", "left_out", "of"))  # a damaged log has anything
        examples = frozenset(named if isinstance(named, dict) else ())
        if isinstance(of, int) and len(examples) + (len(left_out) if isinstance(left_out, dict | list) else 0) < of:
            return
        if len(examples) > len(self._judged):
            self.scores, self._judged = {}, examples
        if examples != self._judged:
            return
        if isinstance(score := row.get(self._score), float) and math.isfinite(score):
            self.scores[row["step"]] = score

    def best(self) -> tuple[int, int]:
        """Return the step of the best validation, -1 without any, and how many came after it that were no better."""
        best = max(self.scores, key=self.scores.__getitem__, default=-1)  # of equal ones the first
        return best, sum(step > best for step in self.scores)

    def log(self, row: Mapping[str, Any]) -> None:
        """Append one line.  Errors: UserError when the disk is full, also for a checkpoint that was written beside."""
        # Which checkpoints stay depends on the scores known when one is written: not on how long that takes.
        self._end_writing(wait=row.get("kind") == "validation")
        if self._log is None:
            raise RuntimeError("call open_log before log")
        self._log.write(json.dumps(finite(row)) + "\n")
        if row.get("kind") == "validation":
            self._note_score(row)


class AppendedFile:
    """A text file that is appended to line by line; `write` returns once the system has the line."""

    def __init__(self, path: Path, header: str = "") -> None:
        """Open `path`, cut off a last line that a kill left incomplete, and write `header` into an empty file."""
        self.path = path
        try:
            with suppress(FileNotFoundError), open(path, "rb+") as file:
                file.truncate(file.read().rfind(b"\n") + 1)
            # Unbuffered: what was written survives the process, and a full disk is an error now, not on closing.
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (see close)
        except OSError as error:
            raise cannot_write(path, error) from error
        if header and not self._file.tell():
            self.write(header)

    def write(self, line: str) -> None:
        """Append a line.  Errors: UserError when the disk is full."""
        data = line.encode()
        try:
            if self._file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise cannot_write(self.path, error, cure(error)) from error

    def close(self) -> None:
        self._file.close()
