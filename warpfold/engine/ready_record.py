"""The order in which a loader's batches were used, where it depends on timing: a file that is appended to."""

import json
from collections.abc import Mapping
from pathlib import Path

from warpfold.engine.checkpoint import AppendedFile
from warpfold.errors import UserError


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
