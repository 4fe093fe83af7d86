"""Where a start of a design stands, and the rows of its steps: files that a stopped run goes on from."""

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
    """Where a start stands: `step` steps are done; best: the lowest loss of a hard sequence, and its letters by key."""

    logits: dict[str, np.ndarray]
    step: int = 0
    best: float | None = None
    letters: dict[str, str] | None = None
    logos: dict[int, np.ndarray] | None = None  # shares of the free chains, one below another, before a step

    def write(self, path: Path) -> None:
        """Write it, whole or not at all."""
        arrays = {f"logits.{key}": x for key, x in self.logits.items()}
        arrays |= {f"logo.{step}": x for step, x in (self.logos or {}).items()}
        about = {"step": self.step, "best": self.best, "letters": self.letters}
        write_atomically(path, sealed_tensors(save(arrays, {"state": json.dumps(about)})))

    @classmethod
    def read(cls, path: Path) -> "StartState | None":
        """Read it; None where there is none.  Errors: UserError for a file that is damaged."""
        if not path.is_file():
            return None
        try:
            check_tensors(path, always=True)
            with safe_open(path, framework="numpy") as file:
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
                about = json.loads(file.metadata()["state"])
            logits = {name.removeprefix("logits."): x for name, x in arrays.items() if name.startswith("logits.")}
            logos = {int(name.removeprefix("logo.")): x for name, x in arrays.items() if name.startswith("logo.")}
            return cls(logits=logits, logos=logos, **about)
        except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
            raise UserError(f"{path}: damaged ({error}); remove it, and this start begins again") from None


def read_rows(path: Path, steps: int | None = None) -> list[dict[str, Any]]:
    """Return the rows of a start's steps, at most of the first `steps`; none where there is no file.

    Errors: UserError for a file that is damaged.
    """
    lines = path.read_bytes().split(b"\n")[:-1][:steps] if path.is_file() else []  # a kill may have cut the last one
    try:
        rows = [json.loads(line) for line in lines]
        json.dumps(rows, allow_nan=False)
        if [row["step"] for row in rows] != list(range(len(rows))):
            raise ValueError("its steps are not in their order")
        if not all(isinstance(row["terms"], dict) and {"loss", "hard", "letters"} <= row.keys() for row in rows):
            raise ValueError("a row lacks something")
        return rows
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        start = path.with_suffix("")
        raise UserError(f"{path}: damaged ({error}); remove {start}.*, and this start begins again") from None
