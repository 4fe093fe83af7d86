"""Notes that the processes of a job leave for each other, to be read whenever the other has time: no meeting."""

import json
from typing import Any

import torch.distributed as dist

from warpfold.parallel.waits import waiting


class Board:
    """Notes by name, JSON-able, in the store where the processes met.

    All of them may write and read, also those that are in no process group, and nobody waits for anybody but the store.
    """

    def __init__(self, store: dist.Store | None = None) -> None:
        """store: None: of a process that is alone."""
        self._store = dist.HashStore() if store is None else store

    def put(self, name: str, note: Any) -> None:
        """Leave a note, in place of an earlier one of this name."""
        with waiting(f"the store, for the note {name!r}"):
            self._store.set(name, json.dumps(note))

    def read(self, name: str) -> Any:
        """Return a note; None where there is none."""
        with waiting(f"the store, for the note {name!r}"):
            return json.loads(self._store.get(name)) if self._store.check([name]) else None

    def take(self, name: str) -> Any:
        """Return a note as `read` does, and remove it; for the one process that it is for."""
        note = self.read(name)
        if note is not None:
            with waiting(f"the store, for the note {name!r}"):
                self._store.delete_key(name)
        return note
