"""What lies in a store: chains, of which a crop is read without the rest, and assemblies of them.

The alignment of a chain lies in tiles of columns, one tile below the other.  The blobs of a store hold neighbouring
rows, so a reader gets the blobs around the rows it wants, of the tiles that the crop touches.  Deletions, which few
cells have, are compressed sparse columns: those of a crop are one piece of the list (measured).

The record of an assembly names the records of its chains, and says where they stand.  The index has the keys of its
chains in the column `chains`, which is None for a chain's own record, so that sampling reads no record.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
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
TILE = 128  # columns of a tile, at most: a crop of 256 touches three or four, and the rest of a chain stays unread
# Arrays whose first axis is residues.
PER_RESIDUE = ("aatype", "residue_index", "profile", "positions", "mask", "confidence")
TEMPLATE_ARRAYS = ("aatype", "positions", "mask", "sum_probs")  # of `Templates`; the names are a note
PAIRING_ARRAYS = {"species": "<u8", "identity": "<f4", "digest": "<u8", "unpaired": "?"}  # of `Pairing`, in this order
NEEDED = ("aatype", "residue_index", "profile", "msa", "deletion_starts", "deletion_rows", "deletion_counts")


def example_arrays(raw: RawExample) -> Arrays:
    """Build the arrays of an example for a store (docs/reference/formats.md); `example_notes` has the rest."""
    arrays = {name: getattr(raw, name) for name in PER_RESIDUE if getattr(raw, name) is not None}
    arrays |= {"msa": to_tiles(raw.msa), **to_columns(raw.deletions)}
    if raw.templates is not None and len(raw.templates):
        arrays |= {f"template_{name}": getattr(raw.templates, name) for name in TEMPLATE_ARRAYS}
    if raw.pairing is not None:
        arrays |= {f"pairing_{name}": getattr(raw.pairing, name) for name in PAIRING_ARRAYS}
    return arrays


def example_notes(raw: RawExample) -> dict[str, Any]:
    """Return everything else of an example, as JSON can hold it."""
    notes: dict[str, Any] = {name: getattr(raw, name) for name in ("name", "resolution", "release_date")}
    notes["sources"] = list(raw.sources)
    if raw.templates is not None:
        notes["templates"] = list(raw.templates.names)
    if raw.pairing is not None and not raw.pairing.unpaired.all():
        notes["alone"] = int(raw.pairing.unpaired.sum())
    return notes


def to_tiles(msa: np.ndarray) -> np.ndarray:
    """Return uint8 [R, N] as [tiles * R, width]: tile t holds columns [t * width, ...), the last one padded with gaps.

    There are as few tiles as `TILE` allows, all of one width.
    """
    depth, length = msa.shape
    width = ceil(length / ceil(length / TILE))
    tiles = np.full((ceil(length / width), depth, width), GAP, np.uint8)
    for number, tile in enumerate(tiles):
        part = msa[:, number * width : (number + 1) * width]
        tile[:, : part.shape[1]] = part
    return tiles.reshape(-1, width)


def to_columns(deletions: np.ndarray) -> Arrays:
    """Return the K values of uint16 [R, N] that are not 0, as compressed sparse columns.

    deletion_starts int64 [N + 1]: those of column n are [starts[n], starts[n + 1]) of deletion_rows, uint32 [K], and of
    deletion_counts, uint16 [K].
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
    """Example `key` of a store, with the interface of `RawExample`; nothing is read before it is needed.

    pairing: with the rows that serve pairing alone, which come last, as an assembly needs them; else without.
    Errors: KeyError for a key that the store does not have; UserError, on first use, if the entry is damaged or is not
    an example.
    """

    def __init__(self, store: Store, key: str, pairing: bool = True) -> None:
        store.row(key)
        self.store, self.key, self._with_pairing = store, key, pairing

    @cached_property
    def _record(self) -> Record:
        record = self.store.record(self.key)
        if missing := [name for name in NEEDED if name not in record.arrays]:
            raise UserError(f"{self.store.path}: {self.key}: lacks {', '.join(missing)}. Pack the store again")
        if wrong := _misfits(record):
            raise UserError(f"{self.store.path}: {self.key}: {', '.join(wrong)} do not fit. Pack the store again")
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
        """Return the number of alignment rows, the chain's own included."""
        return self._depth if self._with_pairing else self._record.notes.get("alone", self._depth)

    @property
    def _depth(self) -> int:
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
        """The keys that pair the rows with those of other chains; None if the store does not have them."""
        record = self._record
        if not self._with_pairing or "pairing_species" not in record.arrays:
            return None
        record.fetch({f"pairing_{name}": None for name in PAIRING_ARRAYS})
        return Pairing(*(record.read(f"pairing_{name}") for name in PAIRING_ARRAYS))

    def whole_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return some alignment rows (indices, ascending) over the whole chain: uint8 [len(rows), N]."""
        residues = np.arange(self.length)
        self._record.fetch({"msa": self._tile_rows(residues, rows), "profile": None})  # which is needed next
        return self._read_msa(residues, rows)

    @property
    def is_predicted(self) -> bool:
        return "confidence" in self._record.arrays

    def atoms(self, residues: np.ndarray, least: float = 0.0) -> Atoms | None:
        """Return positions [K, 37, 3] and mask [K, 37], as `RawExample.atoms`; None if not in the store."""
        read = self._record.read
        if "positions" not in self._record.arrays:
            return None
        names = ("positions", "mask", "confidence") if self.is_predicted else ("positions", "mask")
        self._record.fetch(dict.fromkeys(names, residues))
        sure = read("confidence", residues) >= least if self.is_predicted else None
        return read("positions", residues), mask_residues(read("mask", residues), sure)

    def take(
        self,
        residues: np.ndarray | slice,
        rows: np.ndarray | None = None,
        templates: np.ndarray | None = None,
        whole: np.ndarray | None = None,
    ) -> RawExample:
        """Return some residues, rows and templates, as `RawExample.take`: each blob that they touch is read once."""
        residues = np.arange(self.length)[residues]
        record, notes = self._record, self._record.notes
        chosen = np.arange(self.depth) if rows is None else rows
        names = notes.get("templates", ())
        which = np.arange(len(names)) if templates is None else templates
        wanted: dict[str, np.ndarray | None] = {name: residues for name in PER_RESIDUE if name in record.arrays}
        wanted |= {"deletion_starts": None}
        wanted |= {"msa": self._tile_rows(residues, chosen)} if whole is None else {}
        wanted |= {f"template_{name}": which for name in TEMPLATE_ARRAYS} if len(which) else {}
        record.fetch(wanted)
        parts: dict[str, Any] = {name: record.read(name, residues) for name in PER_RESIDUE if name in record.arrays}
        parts["msa"] = self._read_msa(residues, chosen) if whole is None else whole[:, as_slice(residues)]
        parts["templates"] = None
        if len(which):
            arrays = {name: record.read(f"template_{name}", which) for name in TEMPLATE_ARRAYS}
            parts["templates"] = Templates(**arrays, names=tuple(names[i] for i in which)).take(residues)
        parts["deletions"] = self._read_deletions(residues, chosen)
        parts["pairing"] = None if self.pairing is None else self.pairing.select(chosen)
        rest = {name: notes[name] for name in ("name", "resolution", "release_date")}
        return RawExample(**rest, sources=tuple(notes["sources"]), **parts)

    def ca_positions(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the CA atoms of the whole chain: float32 [N, 3], angstrom, and mask uint8 [N]; None without atoms.

        Stores with assemblies have an array of their own for them, so that spatial crops need not read all atoms.
        """
        record = self._record
        if "positions" not in record.arrays:
            return None
        atoms = "ca" if "ca" in record.arrays else "positions"
        record.fetch({atoms: None, "mask": None})
        positions = record.read(atoms)
        return positions if atoms == "ca" else positions[:, CA], record.read("mask")[:, CA]

    def _tile_rows(self, residues: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Name the rows of the array `msa` that hold `rows` of the alignment under these residues (ascending)."""
        tiles = np.unique(residues // self._record.arrays["msa"].shape[1])
        return (tiles[:, None] * self._depth + rows).ravel()

    def _read_msa(self, residues: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Read columns (ascending) of the tiles' `rows` (ascending): uint8 [len(rows), len(residues)]."""
        depth, width = self._depth, self._record.arrays["msa"].shape[1]
        msa = np.empty((len(rows), len(residues)), np.uint8)
        first, last = (int(residues[0]) // width, int(residues[-1]) // width) if len(residues) else (0, -1)
        bounds = np.searchsorted(residues, np.arange(first, last + 2) * width).tolist()
        for number, (begin, end) in enumerate(pairwise(bounds), start=first):
            if begin < end:
                tile = self._record.read("msa", number * depth + rows)
                msa[:, begin:end] = tile[:, as_slice(residues[begin:end] - number * width)]
        return msa

    def _read_deletions(self, residues: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Read columns (ascending) of the sparse columns' `rows`: uint16 [len(rows), len(residues)]."""
        read = self._record.read
        starts = read("deletion_starts")
        counts = starts[residues + 1] - starts[residues]
        column = np.repeat(np.arange(len(residues)), counts)
        piece = np.arange(len(column)) + (starts[residues] - (np.cumsum(counts) - counts))[column]
        self._record.fetch({"deletion_rows": piece, "deletion_counts": piece})
        row, count = read("deletion_rows", piece).astype(np.int64), read("deletion_counts", piece)
        place = np.full(self._depth, -1)  # of each row of the alignment among `rows`
        place[rows] = np.arange(len(rows))
        kept = place[row] >= 0
        deletions = np.zeros((len(rows), len(residues)), np.uint16)
        deletions[place[row[kept]], column[kept]] = count[kept]
        return deletions


def _misfits(record: Record) -> list[str]:
    """Return the arrays that do not fit the residues, rows or templates of the others, or are missing beside them."""
    arrays = record.arrays
    sizes = {name: array.shape[0] if array.shape else 0 for name, array in arrays.items()}
    length, shape, templates = sizes["aatype"], arrays["msa"].shape, len(record.notes.get("templates", ()))
    tiles = ceil(length / shape[1]) if len(shape) == 2 and shape[1] else 0
    if not tiles or shape[0] % tiles:
        return ["msa"]
    wanted = {"deletion_starts": length + 1, "deletion_counts": sizes["deletion_rows"]}
    wanted |= {name: length for name in (*PER_RESIDUE, "ca") if name in sizes}
    if "positions" in sizes:
        wanted["mask"] = length
    if any(f"pairing_{name}" in sizes for name in PAIRING_ARRAYS):
        wanted |= {f"pairing_{name}": shape[0] // tiles for name in PAIRING_ARRAYS}
    if templates:
        wanted |= {f"template_{name}": templates for name in TEMPLATE_ARRAYS}
    wrong = [name for name, size in wanted.items() if sizes.get(name) != size]
    kinds = {f"pairing_{name}": np.dtype(kind) for name, kind in PAIRING_ARRAYS.items()}
    return wrong or [name for name, kind in kinds.items() if name in arrays and arrays[name].dtype != kind]


def read_example(store: Store, key: str) -> RawExample:
    """Read the whole example `key`.  Errors: KeyError for a key that the store lacks; UserError if it is damaged."""
    example = StoredExample(store, key)
    return example.take(slice(None))


# ---- assemblies


def pack_assembly(
    name: str,
    ids: Sequence[str],
    keys: Sequence[str],
    entities: Sequence[int],
    operators: np.ndarray,
    release_date: str | None = None,
    resolution: float | None = None,
) -> Packed:
    """Make the record of an assembly of K chains: their names in it, the keys of their records, their entities from 1.

    operators: float64 [K, 3, 4], as of `Assembly`; they are left out if they move nothing.
    """
    notes = {"name": name, "ids": list(ids), CHAINS: list(keys), "entities": list(entities)}
    moved = not np.array_equal(operators, np.broadcast_to(np.eye(3, 4), operators.shape))
    arrays = {"operators": operators.astype(np.float64)} if moved else {}
    return pack_record(arrays, {**notes, "resolution": resolution, "release_date": release_date})


def chains_of(store: Store) -> dict[str, list[str]]:
    """Return the keys of the chains of every assembly of a store, by its key; {} for a store without assemblies."""
    return {key: store.column(CHAINS)[store.index.row(key)] for key in _assembly_keys(store)}


def _assembly_keys(store: Store) -> Keys:
    return store.keys.take(np.flatnonzero(members(store)[0]))


def members(store: Store) -> tuple[np.ndarray, np.ndarray]:
    """Return how many chains each entry of a store has, 0 for a chain, and of all in turn the rows of these chains.

    A row is -1 for a chain that is not in the store.
    """
    if CHAINS not in store.columns or store.column(CHAINS).kind != "list":  # no assembly at all
        return np.zeros(len(store), np.int64), np.empty(0, np.int64)
    return store.column(CHAINS).members


def chain_keys(store: Store) -> Keys:
    """Return the keys of a store's chains."""
    counts, _ = members(store)
    return store.keys.take(np.flatnonzero(counts == 0)) if counts.any() else store.keys


def entry_keys(store: Store, assemblies: bool) -> Keys:
    """Return the keys to train on: assemblies for a model of complexes, where there are any; otherwise chains."""
    found = _assembly_keys(store) if assemblies else None
    return found or chain_keys(store)


def read_assembly(store: Store, key: str) -> Assembly:
    """Open an assembly, or a chain as an assembly of one; of its chains nothing is read before it is needed.

    Chains that are one record, moved by several operators, are one object.
    Errors: KeyError for a key that the store lacks; UserError for a damaged entry.
    """
    record = store.record(key)
    if "entities" not in record.notes:
        return Assembly(key, (key,), (StoredExample(store, key, pairing=False),))
    notes, keys = record.notes, record.notes[CHAINS]
    if missing := [chain for chain in keys if chain not in store]:
        raise UserError(f"{store.path}: {key}: its chain {missing[0]} is not in the store. Pack the store again")
    chains = {chain: StoredExample(store, chain) for chain in dict.fromkeys(keys)}
    operators = record.read("operators") if "operators" in record.arrays else None
    fits = len(notes["ids"]) == len(notes["entities"]) == len(keys) > 0
    if not fits or (operators is not None and (operators.shape != (len(keys), 3, 4) or not is_rigid(operators))):
        raise UserError(f"{store.path}: {key}: its chains and operators do not fit. Pack the store again")
    placed = tuple(chains[chain] for chain in keys)
    return Assembly(notes["name"], tuple(notes["ids"]), placed, operators, tuple(notes["entities"]))


def open_entry(store: Store, key: str, assemblies: bool) -> StoredExample | Assembly:
    """Open what `entry_keys` names, as a model takes it: an assembly, or a chain without the rows for pairing alone."""
    return read_assembly(store, key) if assemblies else StoredExample(store, key, pairing=False)
