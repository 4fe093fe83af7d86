"""An example in a store: its sizes are known at once, and only the residues, rows and templates asked for are read."""

from functools import cached_property
from typing import Any

import numpy as np

from warpfold.data.example.layout import read_columns, read_tiles
from warpfold.data.example.raw import TEMPLATE_ARRAYS, RawExample
from warpfold.data.example.template import Templates
from warpfold.data.store.store import Record, Store
from warpfold.errors import UserError

PER_RESIDUE = ("aatype", "residue_index", "profile", "positions", "mask")  # arrays whose first axis is residues
NEEDED = ("aatype", "residue_index", "profile", "msa", "deletion_starts", "deletion_rows", "deletion_counts")


class StoredExample:
    """Example `key` of a store.  Its sizes are those of `RawExample`, and so is `take`; nothing is read before.

    Errors: KeyError for a key that the store does not have; UserError, on first use, if the entry is damaged or holds
    something else.
    """

    def __init__(self, store: Store, key: str) -> None:
        if key not in store:
            raise KeyError(key)
        self.store, self.key = store, key

    @property
    def length(self) -> int:
        """Residues."""
        return self._record.arrays["aatype"].shape[0]

    @property
    def depth(self) -> int:
        """Alignment rows, the chain's own included."""
        rows, width = self._record.arrays["msa"].shape
        return rows // -(-self.length // width)

    @property
    def templates_count(self) -> int:
        return len(self._record.notes.get("templates", ()))

    @property
    def profile(self) -> np.ndarray:
        """Return the frequencies in the whole alignment: float32 [N, 22]."""
        return self._record.read("profile")

    def whole_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return some alignment rows (indices, ascending) over the whole chain: uint8 [len(rows), N]."""
        return self._rows(0, self.length, rows)

    def take(
        self,
        start: int,
        stop: int,
        rows: np.ndarray | None = None,
        templates: np.ndarray | None = None,
        whole: np.ndarray | None = None,
    ) -> RawExample:
        """Residues [start, stop), these alignment rows and these templates (indices, ascending; None: all).

        The same as `RawExample.take` of the whole example.  whole: `whole_rows(rows)`, if it has been read already.
        """
        record, notes = self._record, self._record.notes
        span = np.arange(start, stop)
        parts: dict[str, Any] = {name: record.read(name, span) for name in PER_RESIDUE if name in record.arrays}
        parts["msa"] = self._rows(start, stop, rows) if whole is None else whole[:, start:stop]
        parts["deletions"] = read_columns(record.read, self.depth, start, stop, rows)
        parts["templates"] = self._templates(start, stop, templates)
        return RawExample(**{**notes, "sources": tuple(notes["sources"]), **parts})

    def _rows(self, start: int, stop: int, rows: np.ndarray | None) -> np.ndarray:
        width = self._record.arrays["msa"].shape[1]
        return read_tiles(self._record.read, self.depth, width, start, stop, rows)

    @cached_property
    def _record(self) -> Record:
        record = self.store.record(self.key)
        if missing := [name for name in NEEDED if name not in record.arrays]:
            raise UserError(f"{self.store.path}: {self.key}: lacks {', '.join(missing)}; pack the store again")
        return record

    def _templates(self, start: int, stop: int, chosen: np.ndarray | None) -> Templates | None:
        names = self._record.notes.get("templates", ())
        if chosen is None:
            chosen = np.arange(len(names))
        if not len(chosen):
            return None
        arrays = {name: self._record.read(f"template_{name}", chosen) for name in TEMPLATE_ARRAYS}
        return Templates(**arrays, names=tuple(names[index] for index in chosen)).take(start, stop)


def read_example(store: Store, key: str) -> RawExample:
    """The raw example `key`, whole.  Errors: KeyError for a key that the store does not have; UserError if damaged."""
    example = StoredExample(store, key)
    return example.take(0, example.length)
