"""An example in a store: its sizes are known at once, and only the residues, rows and templates asked for are read."""

from functools import cached_property
from typing import Any

import numpy as np

from warpfold.data.features import TEMPLATE_ARRAYS, RawExample
from warpfold.data.layout import read_columns, read_tiles
from warpfold.data.store import Record, Store
from warpfold.data.template import Templates
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

    def take(
        self, start: int, stop: int, rows: np.ndarray | None = None, templates: np.ndarray | None = None
    ) -> RawExample:
        """Residues [start, stop), these alignment rows and these templates (indices, ascending; None: all).

        The same as `RawExample.take` of the whole example.
        """
        record, notes = self._record, self._record.notes
        span = np.arange(start, stop)
        parts: dict[str, Any] = {name: record.read(name, span) for name in PER_RESIDUE if name in record.arrays}
        parts["msa"] = read_tiles(record.read, self.depth, record.arrays["msa"].shape[1], start, stop, rows)
        parts["deletions"] = read_columns(record.read, self.depth, start, stop, rows)
        parts["templates"] = self._templates(start, stop, templates)
        return RawExample(**{**notes, "sources": tuple(notes["sources"]), **parts})

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
