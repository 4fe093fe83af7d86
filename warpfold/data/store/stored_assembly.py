"""Assemblies in a store: records that name the records of their chains, and say where the chains stand.

The index has the keys of an assembly's chains in the column `chains`, which is None for a chain's own record, so that
sampling reads no record.
"""

from collections.abc import Sequence

import numpy as np

from warpfold.data.example.raw_example import Assembly
from warpfold.data.store.store import Packed, Store, pack_record
from warpfold.data.store.stored_example import StoredExample
from warpfold.data.structure.assemblies import is_rigid
from warpfold.errors import UserError

CHAINS = "chains"


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
    if CHAINS not in store.columns:
        return {}
    return {key: chains for key, chains in zip(store.keys, store.column(CHAINS)) if chains is not None}


def chain_keys(store: Store) -> list[str]:
    """Return the keys of a store's chains."""
    assemblies = chains_of(store)
    return [key for key in store.keys if key not in assemblies]


def entry_keys(store: Store, assemblies: bool) -> list[str]:
    """Return what a model is trained on: a complex's on assemblies, or chains if there are none; else on chains."""
    return (assemblies and list(chains_of(store))) or chain_keys(store)


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
        raise UserError(f"{store.path}: {key}: its chain {missing[0]} is not in the store; pack the store again")
    chains = {chain: StoredExample(store, chain) for chain in dict.fromkeys(keys)}
    operators = record.read("operators") if "operators" in record.arrays else None
    fits = len(notes["ids"]) == len(notes["entities"]) == len(keys) > 0
    if not fits or (operators is not None and (operators.shape != (len(keys), 3, 4) or not is_rigid(operators))):
        raise UserError(f"{store.path}: {key}: its chains and operators do not fit; pack the store again")
    placed = tuple(chains[chain] for chain in keys)
    return Assembly(notes["name"], tuple(notes["ids"]), placed, operators, tuple(notes["entities"]))


def open_entry(store: Store, key: str, assemblies: bool) -> StoredExample | Assembly:
    """Open what `entry_keys` names, as a model takes it: an assembly, or a chain without the rows for pairing alone."""
    return read_assembly(store, key) if assemblies else StoredExample(store, key, pairing=False)
