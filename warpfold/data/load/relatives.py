"""Leave out entries of stores that are related to held-out ones (data/similar/relatives.py)."""

from collections.abc import Iterable, Sequence

import numpy as np

from warpfold.data.load.order import Source
from warpfold.data.similar.relatives import find_relatives
from warpfold.data.store.store import Store
from warpfold.data.store.stored_example import StoredExample
from warpfold.errors import StorageError, UserError

Entry = tuple[Store, str]


def related_entries(source: Source, held_out: Iterable[Entry], min_identity: float, threads: int = 1) -> np.ndarray:
    """Return the places of the source's keys of which a chain is related to a chain of a held-out entry, in order.

    A held-out entry is related to itself if the source has it.  min_identity: share of identical pairs, 0 to 1.
    """
    queries = sorted({text for store, key in held_out for text in chain_sequences(Source(store, [key]))[0]})
    texts, entries = chain_sequences(source)
    places = set[int]().union(*find_relatives(queries, texts, min_identity, threads))
    return np.unique(entries[sorted(places)])


def chain_sequences(source: Source) -> tuple[list[str], np.ndarray]:
    """Return the sequences of the different chains of all entries, and the place of the entry of each, int64.

    A chain that cannot be read has the empty sequence: training leaves its entry out, too.
    """
    counts, rows = source.members()
    known: dict[int, str] = {}
    for row in np.unique(rows).tolist():
        try:
            known[row] = StoredExample(source.store, source.store.keys[row]).sequence
        except StorageError:
            raise
        except UserError:
            known[row] = ""
    return [known[row] for row in rows.tolist()], np.repeat(np.arange(len(counts)), counts)


def families(source: Source, clusters: Sequence[str], min_identity: float, threads: int = 1) -> list[str]:
    """Join clusters of which chains are related, directly or by way of others; return the family of each entry.

    A family has the name of its first cluster.
    """
    texts, entries = chain_sequences(source)
    distinct = sorted(set(texts) - {""})
    of_text: dict[str, list[str]] = {}
    for text, entry in zip(texts, entries.tolist()):
        of_text.setdefault(text, []).append(clusters[entry])
    first = {name: name for name in clusters}

    def root(name: str) -> str:
        while first[name] != name:
            first[name] = name = first[first[name]]
        return name

    for text, related in zip(distinct, find_relatives(distinct, distinct, min_identity, threads)):
        names = {root(name) for one in (text, *(distinct[n] for n in related)) for name in of_text[one]}
        for name in names:
            first[name] = min(names)
    return [root(name) for name in clusters]
