"""Read and write the examples of a store: chains, which are read partially, and assemblies of chains.

The alignment of a chain is stored in tiles of columns. The blobs of a store contain neighbouring rows, so a reader
fetches the blobs around the sampled rows, from the tiles that overlap the crop. Deletions are sparse and stored as
compressed sparse columns, so that those of a crop are contiguous (measured).

The record of an assembly lists the keys of its chains and their operators. The index column `chains` holds the keys of
the chains too (None for a chain's own record), so that sampling reads no records.
"""

from collections.abc import Sequence
from functools import cached_property
from math import ceil
from typing import Any

import numpy as np

from warpfold.batch import Arrays
from warpfold.data.example.pairing import Pairing
from warpfold.data.example.raw_example import CA, Assembly, Atoms, RawExample, Templates, as_slice, mask_residues
from warpfold.data.formats.alignment import decode
from warpfold.data.store.index import Keys
from warpfold.data.store.store import Packed, Record, Store, pack_record
from warpfold.data.structure.assemblies import is_rigid
from warpfold.errors import UserError
from warpfold.geometry.residue import GAP

CHAINS = "chains"
# Largest number of columns per tile. A crop of 256 overlaps three or four tiles.
TILE = 128
# Arrays with residues as the first axis.
PER_RESIDUE = ("aatype", "residue_index", "profile", "positions", "mask", "confidence")
# Arrays of `Templates`. Their names are in the notes.
TEMPLATE_ARRAYS = ("aatype", "positions", "mask", "sum_probs")
# Arrays of `Pairing`, in this order.
PAIRING_ARRAYS = {"species": "<u8", "identity": "<f4", "digest": "<u8", "unpaired": "?"}
REQUIRED = ("aatype", "residue_index", "profile", "msa", "deletion_starts", "deletion_rows", "deletion_counts")


def example_arrays(raw: RawExample) -> Arrays:
    """Convert an example to the arrays of a store (docs/reference/formats.md). `example_notes` has the other fields."""
    arrays = {name: getattr(raw, name) for name in PER_RESIDUE if getattr(raw, name) is not None}
    arrays |= {"msa": to_tiles(raw.msa), **to_columns(raw.deletions)}
    if raw.templates is not None and len(raw.templates):
        arrays |= {f"template_{name}": getattr(raw.templates, name) for name in TEMPLATE_ARRAYS}
    if raw.pairing is not None:
        arrays |= {f"pairing_{name}": getattr(raw.pairing, name) for name in PAIRING_ARRAYS}
    return arrays


def example_notes(raw: RawExample) -> dict[str, Any]:
    """Return the fields of an example that are not arrays, JSON-serialisable."""
    notes: dict[str, Any] = {name: getattr(raw, name) for name in ("name", "resolution", "release_date")}
    notes["sources"] = list(raw.sources)
    if raw.templates is not None:
        notes["templates"] = list(raw.templates.names)
    if raw.pairing is not None and not raw.pairing.unpaired.all():
        notes["alone"] = int(raw.pairing.unpaired.sum())
    return notes


def to_tiles(msa: np.ndarray) -> np.ndarray:
    """Split an alignment, uint8 [R, N], into tiles of columns: [tiles * R, width].

    Tile t holds the columns from t * width on. The number of tiles is minimal, and the last one is padded with gaps.
    """
    depth, length = msa.shape
    width = ceil(length / ceil(length / TILE))
    tiles = np.full((ceil(length / width), depth, width), GAP, np.uint8)
    for number, tile in enumerate(tiles):
        columns = msa[:, number * width : (number + 1) * width]
        tile[:, : columns.shape[1]] = columns
    return tiles.reshape(-1, width)


def to_columns(deletions: np.ndarray) -> Arrays:
    """Compress a deletion matrix, uint16 [R, N], with K values other than 0, to sparse columns.

    Column n has the elements [starts[n], starts[n + 1]) of deletion_rows, uint32 [K], and deletion_counts, uint16 [K],
    where starts is deletion_starts, int64 [N + 1].
    """
    row, column = np.divmod(np.flatnonzero(deletions), deletions.shape[1])
    order = np.argsort(column, kind="stable")
    row, column = row[order], column[order]
    return {
        "deletion_starts": np.searchsorted(column, np.arange(deletions.shape[1] + 1)),
        "deletion_rows": row.astype(np.uint32),
        "deletion_counts": deletions[row, column],
    }


class StoredExample:
    """Example `key` of a store with the interface of `RawExample`. Data is read on demand.

    pairing: include the rows that are used only for pairing, which come last; assemblies need them.
    Raises KeyError for a key that the store lacks, and on first use UserError if the entry is damaged or is not an
    example.
    """

    def __init__(self, store: Store, key: str, pairing: bool = True) -> None:
        store.row(key)
        self.store, self.key, self._with_pairing = store, key, pairing

    @cached_property
    def _record(self) -> Record:
        """The checked record."""
        record = self.store.record(self.key)
        if missing := [name for name in REQUIRED if name not in record.arrays]:
            raise UserError(f"{self.store.path}: {self.key}: lacks {', '.join(missing)}. Pack the store again.")
        if misfits := _list_misfits(record):
            raise UserError(f"{self.store.path}: {self.key}: {', '.join(misfits)} do not fit. Pack the store again.")
        return record

    @cached_property
    def sequence(self) -> str:
        return decode(self._record.read("aatype"))

    @property
    def length(self) -> int:
        """Return the number of residues."""
        return self._record.arrays["aatype"].shape[0]

    @property
    def depth(self) -> int:
        """Return the number of alignment rows, including the chain itself."""
        return self._depth if self._with_pairing else self._record.notes.get("alone", self._depth)

    @property
    def _depth(self) -> int:
        """The number of stored alignment rows."""
        rows, width = self._record.arrays["msa"].shape
        return rows // ceil(self.length / width)

    @property
    def templates_count(self) -> int:
        return len(self._record.notes.get("templates", ()))

    @property
    def profile(self) -> np.ndarray:
        """Return the frequencies in the whole alignment: float32 [N, 22]."""
        return self._record.read("profile")

    @cached_property
    def pairing(self) -> Pairing | None:
        """The pairing of the rows; None if it is not stored."""
        record = self._record
        if not self._with_pairing or "pairing_species" not in record.arrays:
            return None
        record.fetch({f"pairing_{name}": None for name in PAIRING_ARRAYS})
        return Pairing(*(record.read(f"pairing_{name}") for name in PAIRING_ARRAYS))

    def whole_rows(self, rows: np.ndarray) -> np.ndarray:
        """Read alignment rows (ascending indices) over the whole chain: uint8 [len(rows), N]."""
        residues = np.arange(self.length)
        # The caller needs the profile next.
        self._record.fetch({"msa": self._tile_rows(residues, rows), "profile": None})
        return self._read_msa(residues, rows)

    @property
    def is_predicted(self) -> bool:
        return "confidence" in self._record.arrays

    def atoms(self, residues: np.ndarray, least: float = 0.0) -> Atoms | None:
        """Read positions [K, 37, 3] and mask [K, 37], as `RawExample.atoms` does; None if they are not stored."""
        read = self._record.read
        if "positions" not in self._record.arrays:
            return None
        names = ("positions", "mask", "confidence") if self.is_predicted else ("positions", "mask")
        self._record.fetch(dict.fromkeys(names, residues))
        is_confident = read("confidence", residues) >= least if self.is_predicted else None
        return read("positions", residues), mask_residues(read("mask", residues), is_confident)

    def take(
        self,
        residues: np.ndarray | slice,
        rows: np.ndarray | None = None,
        templates: np.ndarray | None = None,
        whole: np.ndarray | None = None,
    ) -> RawExample:
        """Read residues, rows and templates, as `RawExample.take` does. Each blob is read once."""
        residues = np.arange(self.length)[residues]
        record, notes = self._record, self._record.notes
        rows = np.arange(self.depth) if rows is None else rows
        names = notes.get("templates", ())
        templates = np.arange(len(names)) if templates is None else templates
        prefetch: dict[str, np.ndarray | None] = {name: residues for name in PER_RESIDUE if name in record.arrays}
        prefetch |= {"deletion_starts": None}
        prefetch |= {"msa": self._tile_rows(residues, rows)} if whole is None else {}
        prefetch |= {f"template_{name}": templates for name in TEMPLATE_ARRAYS} if len(templates) else {}
        record.fetch(prefetch)
        fields: dict[str, Any] = {name: record.read(name, residues) for name in PER_RESIDUE if name in record.arrays}
        fields["msa"] = self._read_msa(residues, rows) if whole is None else whole[:, as_slice(residues)]
        if len(templates):
            arrays = {name: record.read(f"template_{name}", templates) for name in TEMPLATE_ARRAYS}
            fields["templates"] = Templates(**arrays, names=tuple(names[i] for i in templates)).take(residues)
        fields["deletions"] = self._read_deletions(residues, rows)
        fields["pairing"] = None if self.pairing is None else self.pairing.select(rows)
        fields |= {name: notes[name] for name in ("name", "resolution", "release_date")}
        return RawExample(sources=tuple(notes["sources"]), **fields)

    def ca_positions(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Read CA positions float32 [N, 3] in angstrom and mask uint8 [N] of the whole chain; None without atoms.

        Stores with assemblies have a separate array for these, so that spatial crops do not read all atoms.
        """
        record = self._record
        if "positions" not in record.arrays:
            return None
        atoms = "ca" if "ca" in record.arrays else "positions"
        record.fetch({atoms: None, "mask": None})
        positions = record.read(atoms)
        return positions if atoms == "ca" else positions[:, CA], record.read("mask")[:, CA]

    def _tile_rows(self, residues: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """List the rows of the array `msa` that contain `rows` of the alignment for `residues` (ascending)."""
        tiles = np.unique(residues // self._record.arrays["msa"].shape[1])
        return (tiles[:, None] * self._depth + rows).ravel()

    def _read_msa(self, residues: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Read alignment rows and columns (both ascending) from the tiles: uint8 [len(rows), len(residues)]."""
        depth, width = self._depth, self._record.arrays["msa"].shape[1]
        msa = np.empty((len(rows), len(residues)), np.uint8)
        for number in np.unique(residues // width).tolist():
            begin, end = np.searchsorted(residues, [number * width, (number + 1) * width]).tolist()
            tile = self._record.read("msa", number * depth + rows)
            msa[:, begin:end] = tile[:, as_slice(residues[begin:end] - number * width)]
        return msa

    def _read_deletions(self, residues: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Read rows and columns (ascending) of the deletion matrix: uint16 [len(rows), len(residues)]."""
        read = self._record.read
        starts = read("deletion_starts")
        counts = starts[residues + 1] - starts[residues]
        column = np.repeat(np.arange(len(residues)), counts)
        elements = np.arange(len(column)) + (starts[residues] - (np.cumsum(counts) - counts))[column]
        self._record.fetch({"deletion_rows": elements, "deletion_counts": elements})
        row, count = read("deletion_rows", elements).astype(np.int64), read("deletion_counts", elements)
        # Index of each row of the alignment in `rows`, -1 for the others.
        number = np.full(self._depth, -1)
        number[rows] = np.arange(len(rows))
        is_selected = number[row] >= 0
        deletions = np.zeros((len(rows), len(residues)), np.uint16)
        deletions[number[row[is_selected]], column[is_selected]] = count[is_selected]
        return deletions


def _list_misfits(record: Record) -> list[str]:
    """List the arrays with another number of residues, rows or templates than the others, and missing arrays."""
    arrays = record.arrays
    sizes = {name: array.shape[0] if array.shape else 0 for name, array in arrays.items()}
    length, shape, templates = sizes["aatype"], arrays["msa"].shape, len(record.notes.get("templates", ()))
    tiles = ceil(length / shape[1]) if len(shape) == 2 and shape[1] else 0
    if not tiles or shape[0] % tiles:
        return ["msa"]
    expected = {"deletion_starts": length + 1, "deletion_counts": sizes["deletion_rows"]}
    expected |= {name: length for name in (*PER_RESIDUE, "ca") if name in sizes}
    if "positions" in sizes:
        expected["mask"] = length
    if any(f"pairing_{name}" in sizes for name in PAIRING_ARRAYS):
        expected |= {f"pairing_{name}": shape[0] // tiles for name in PAIRING_ARRAYS}
    if templates:
        expected |= {f"template_{name}": templates for name in TEMPLATE_ARRAYS}
    misfits = [name for name, size in expected.items() if sizes.get(name) != size]
    kinds = {f"pairing_{name}": np.dtype(kind) for name, kind in PAIRING_ARRAYS.items()}
    return misfits or [name for name, kind in kinds.items() if name in arrays and arrays[name].dtype != kind]


def pack_assembly(
    name: str,
    ids: Sequence[str],
    keys: Sequence[str],
    entities: Sequence[int],
    operators: np.ndarray,
    release_date: str | None = None,
    resolution: float | None = None,
) -> Packed:
    """Encode the record of an assembly of K chains.

    ids: names of the chains in the assembly. keys: of their records. entities: numbered from 1. operators: float64
    [K, 3, 4], see `Assembly`; not stored if they are identities.
    """
    notes = {"name": name, "ids": list(ids), CHAINS: list(keys), "entities": list(entities)}
    is_moved = not np.array_equal(operators, np.broadcast_to(np.eye(3, 4), operators.shape))
    arrays = {"operators": operators.astype(np.float64)} if is_moved else {}
    return pack_record(arrays, {**notes, "resolution": resolution, "release_date": release_date})


def members(store: Store) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of chains of each entry (0 for a chain), and the rows of all these chains (-1 if missing)."""
    # A store without assemblies has no lists in this column.
    if CHAINS not in store.columns or store.column(CHAINS).kind != "list":
        return np.zeros(len(store), np.int64), np.empty(0, np.int64)
    return store.column(CHAINS).members


def entry_keys(store: Store, assemblies: bool) -> Keys:
    """Return the keys for training: with `assemblies` (for a multimer model) the assemblies if any, else the chains."""
    counts, _ = members(store)
    if not counts.any():
        return store.keys
    return store.keys.take(np.flatnonzero(counts > 0 if assemblies else counts == 0))


def read_assembly(store: Store, key: str) -> Assembly:
    """Open an assembly, or a chain as an assembly of one. The data of its chains is read on demand.

    Chains that share a record, with different operators, share an object.
    Raises KeyError for a key that the store lacks, and UserError for a damaged entry.
    """
    record = store.record(key)
    if "entities" not in record.notes:
        return Assembly(key, (key,), (StoredExample(store, key, pairing=False),))
    notes, keys = record.notes, record.notes[CHAINS]
    if missing := [chain for chain in keys if chain not in store]:
        raise UserError(f"{store.path}: {key}: its chain {missing[0]} is not in the store. Pack the store again.")
    chains = {chain: StoredExample(store, chain) for chain in dict.fromkeys(keys)}
    operators = record.read("operators") if "operators" in record.arrays else None
    fits = len(notes["ids"]) == len(notes["entities"]) == len(keys) > 0
    if not fits or (operators is not None and (operators.shape != (len(keys), 3, 4) or not is_rigid(operators))):
        raise UserError(f"{store.path}: {key}: its chains and operators do not fit. Pack the store again.")
    placed = tuple(chains[chain] for chain in keys)
    return Assembly(notes["name"], tuple(notes["ids"]), placed, operators, tuple(notes["entities"]))


def open_entry(store: Store, key: str, assemblies: bool) -> StoredExample | Assembly:
    """Open an entry of `entry_keys`: an assembly, or a chain without the rows that are used only for pairing."""
    return read_assembly(store, key) if assemblies else StoredExample(store, key, pairing=False)
