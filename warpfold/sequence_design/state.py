"""The files from which a stopped start of a design continues: its state, and the rows of its steps."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from warpfold.errors import UserError
from warpfold.files import check_tensors, sealed_tensors, write_atomically


@dataclass
class StartState:
    """The state of a start.

    step: the number of finished steps.
    best, letters: the lowest loss of a hard sequence so far, and its letters by key.
    logos: step -> shares [N, 20] of the letters of all free chains before that step.
    """

    logits: dict[str, np.ndarray]
    step: int = 0
    best: float | None = None
    letters: dict[str, str] | None = None
    logos: dict[int, np.ndarray] | None = None

    def write(self, path: Path) -> None:
        """Write the state atomically."""
        arrays = {f"logits.{key}": x for key, x in self.logits.items()}
        arrays |= {f"logo.{step}": x for step, x in (self.logos or {}).items()}
        notes = {"step": self.step, "best": self.best, "letters": self.letters}
        write_atomically(path, sealed_tensors(save(arrays, {"state": json.dumps(notes)})))

    @classmethod
    def read(cls, path: Path) -> "StartState | None":
        """Read a state, or return None if the file does not exist. Errors: UserError for a damaged file."""
        if not path.is_file():
            return None
        try:
            check_tensors(path, always=True)
            with safe_open(path, framework="numpy") as file:
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
                notes = json.loads(file.metadata()["state"])
            logits = {name.removeprefix("logits."): x for name, x in arrays.items() if name.startswith("logits.")}
            logos = {int(name.removeprefix("logo.")): x for name, x in arrays.items() if name.startswith("logo.")}
            return cls(logits=logits, logos=logos, **notes)
        except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
            raise UserError(f"{path}: damaged ({error}). Remove it to repeat this start.") from None


def read_rows(path: Path, steps: int | None = None) -> list[dict[str, Any]]:
    """Read the rows of a start's first `steps` steps (default: all). A missing file has no rows.

    Errors: UserError for a damaged file.
    """
    # A kill may have truncated the last line, which then lacks its newline.
    lines = path.read_bytes().split(b"\n")[:-1][:steps] if path.is_file() else []
    try:
        rows = [json.loads(line) for line in lines]
        json.dumps(rows, allow_nan=False)
        if [row["step"] for row in rows] != list(range(len(rows))):
            raise ValueError("steps out of order")
        if not all(isinstance(row["terms"], dict) and {"loss", "hard", "letters"} <= row.keys() for row in rows):
            raise ValueError("a row is incomplete")
        return rows
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        start = path.with_suffix("")
        raise UserError(f"{path}: damaged ({error}). Remove {start}.* to repeat this start.") from None
