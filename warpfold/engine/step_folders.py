"""Checkpoints in a folder, each whole after a `kill -9` at any moment, and found damaged if it is.

    step-00000100/    state.safetensors (tensors), state.json (the rest), and checksums.json of both

Every file is written under another name, synced, and renamed into its place.
"""

import errno
import json
import logging
import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from warpfold.errors import UserError
from warpfold.files import checksum, sync_path

logger = logging.getLogger("warpfold")

STEP_FOLDER = re.compile(r"step-(\d{8})")
STATE = ("state.safetensors", "state.json")
CHECKSUMS = "checksums.json"


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

    def sweep(self) -> None:
        """Remove what a run left that was killed while saving."""
        for leftover in self.checkpoints.glob(".partial-*"):
            shutil.rmtree(leftover)

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
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
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
            names = (f"damaged-{self.step_path(step).name}{end}" for end in ("", *(f"-{n}" for n in range(2, 10_000))))
            aside = next(path for path in map(self.checkpoints.joinpath, names) if not path.exists())
            self.step_path(step).rename(aside)
            logger.warning("%s; kept as %s; the run continues from step %d", why, aside.name, found.step)
        return found

    def save(self, checkpoint: Checkpoint, keep: int) -> None:
        """Write a checkpoint whole or not at all, then delete old ones; the last `keep` stay, and those of `spared`.

        Errors: UserError if it cannot be written (a full disk); the checkpoints before it are untouched.
        """
        place = self.step_path(checkpoint.step)
        if place.exists():  # a resumed run that stops where it began: the same to the bit
            return
        draft = self.checkpoints / f".partial-{place.name}"
        try:
            draft.mkdir(exist_ok=True)
            save_file(checkpoint.tensors, draft / "state.safetensors")
            (draft / "state.json").write_text(json.dumps(finite(checkpoint.notes), indent=1) + "\n", encoding="utf-8")
            sums = {name: checksum(draft / name) for name in STATE}
            (draft / CHECKSUMS).write_text(json.dumps(sums, indent=1) + "\n", encoding="utf-8")
            for path in (*draft.iterdir(), draft):
                sync_path(path)
            draft.rename(place)
            sync_path(self.checkpoints)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(draft, ignore_errors=True)
            before = [step for step in self.steps() if step != checkpoint.step]
            kept = (
                f"step {max(before)} is safe in {self.step_path(max(before))}" if before else "there was none before it"
            )
            raise UserError(
                f"{place}: the checkpoint could not be written ({reason(error)}); {kept}; {cure(error)} and start again"
            ) from error
        self.prune(keep)

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


def reason(error: Exception) -> str:
    """Return why something could not be written."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def cure(error: Exception) -> str:
    """Return what helps where something could not be written; safetensors says an error's number in its text."""
    said = re.search(r"os error (\d+)", str(error))
    code = error.errno if isinstance(error, OSError) else int(said[1]) if said else None
    if code == errno.ENOENT:
        return "the folder was moved or removed meanwhile: put it back"
    return "make room" if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "see to the disk"
