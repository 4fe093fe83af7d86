"""Find entries of stores that are related to held-out entries (data/similar/relatives.py)."""

from collections.abc import Iterable, Sequence

import numpy as np

from warpfold.data.load.order import Source
from warpfold.data.similar.relatives import find_relatives
from warpfold.data.store.store import Store
from warpfold.data.store.stored_example import StoredExample
from warpfold.errors import StorageError, UserError

Entry = tuple[Store, str]


def related_entries(source: Source, held_out: Iterable[Entry], min_identity: float, threads: int) -> np.ndarray:
    """Find the entries of a source with a chain that is related to a chain of a held-out entry.

    Returns sorted indices of the source's keys. A held-out entry of the source is related to itself. min_identity:
    fraction of identical pairs, 0 to 1.
    """
    queries = sorted({sequence for store, key in held_out for sequence in chain_sequences(Source(store, [key]))[0]})
    sequences, entries = chain_sequences(source)
    related = set[int]().union(*find_relatives(queries, sequences, min_identity, threads))
    return np.unique(entries[sorted(related)])


def chain_sequences(source: Source) -> tuple[list[str], np.ndarray]:
    """Read the sequences of the unique chains of all entries. Returns them and the entry index of each, int64.

    An unreadable chain has an empty sequence, because training skips its entry too.
    """
    counts, rows = source.members()
    sequence_of: dict[int, str] = {}
    for row in np.unique(rows).tolist():
        try:
            sequence_of[row] = StoredExample(source.store, source.store.keys[row]).sequence
        except StorageError:
            raise
        except UserError:
            sequence_of[row] = ""
    return [sequence_of[row] for row in rows.tolist()], np.repeat(np.arange(len(counts)), counts)


def families(source: Source, clusters: Sequence[str], min_identity: float, threads: int = 1) -> list[str]:
    """Merge clusters that are connected by related chains; returns the family of each entry.

    A family is named by its first cluster.
    """
    sequences, entries = chain_sequences(source)
    unique = sorted(set(sequences) - {""})
    clusters_of: dict[str, list[str]] = {}
    for sequence, entry in zip(sequences, entries.tolist()):
        clusters_of.setdefault(sequence, []).append(clusters[entry])
    # Union-find over the names of clusters.
    parent = {name: name for name in clusters}

    def root(name: str) -> str:
        while parent[name] != name:
            parent[name] = name = parent[parent[name]]
        return name

    for sequence, related in zip(unique, find_relatives(unique, unique, min_identity, threads)):
        members = (sequence, *(unique[n] for n in related))
        names = {root(name) for member in members for name in clusters_of[member]}
        for name in names:
            parent[name] = min(names)
    return [root(name) for name in clusters]
