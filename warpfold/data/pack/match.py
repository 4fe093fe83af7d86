"""Which alignments, and which template hits, belong to a chain: by name, by sequence, by the nearest sequence."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache, lru_cache

import numpy as np

from warpfold.data.example.raw_example import check_map
from warpfold.data.formats.input_files import InputFile, stacked
from warpfold.data.similar.pairwise import MIN_IDENTITY, column_map

KMER = 6  # residues: alignments that share none with a chain are not tried
TRIED = 5  # similar alignments to compare with a chain


class Matcher:
    """Finds the alignments of a chain among many, by their names and their queries.

    alignments: (source, query sequence) each.
    """

    def __init__(self, alignments: Sequence[tuple[InputFile, str]], min_identity: float = MIN_IDENTITY) -> None:
        self.min_identity = min_identity
        self._sources: dict[str, list[InputFile]] = defaultdict(list)  # by query
        self._names: dict[str, list[tuple[InputFile, str]]] = defaultdict(list)
        for source, query in alignments:
            self._sources[query].append(source)
            for name in source.bears:
                self._names[name].append((source, query))
        self._queries = sorted(self._sources)
        words = [_kmers(query) for query in self._queries]
        self._sizes = np.array([len(found) for found in words], np.int64)
        kmers = np.concatenate([np.empty(0, np.int32), *words])
        order = np.argsort(kmers, kind="stable")
        self._kmers = kmers[order]
        self._holders = np.repeat(np.arange(len(words), dtype=np.int32), self._sizes)[order]
        self._nearest = lru_cache(maxsize=4096)(self._by_sequence)  # chains of one sequence come again and again

    def find(self, key: str, sequence: str) -> tuple[list[InputFile], str]:
        """Alignments of the chain `key` ("1crn_A"), and a note on those that bear its name but were refused.

        The first that there are of: those that bear the chain's name; those of its very sequence; those that bear its
        entry's name; those of the nearest precursor or part of it; those of the most similar query.  All must be of
        the same protein (`features.check_map`).  They are in the order of `sources.stacked`.
        """
        named, note = self._named(key, sequence)
        if found := named or stacked(self._sources.get(sequence, [])):
            return found, note
        named, more = self._named(key.rpartition("_")[0], sequence)
        return named or self._nearest(sequence), "; ".join(filter(None, (note, more)))

    def _named(self, name: str, sequence: str) -> tuple[list[InputFile], str]:
        return of_same_protein(self._names.get(name.lower(), []), sequence, self.min_identity)

    def _by_sequence(self, sequence: str) -> list[InputFile]:
        own = _kmers(sequence)
        begins, ends = (np.searchsorted(self._kmers, own, side) for side in ("left", "right"))
        holders = [self._holders[begin:end] for begin, end in zip(begins.tolist(), ends.tolist())]
        shared = np.bincount(np.concatenate([np.empty(0, np.int32), *holders]), minlength=len(self._queries))
        # One that holds the other shares all of the other's k-mers; the longest overlap, then the least else, is best.
        inside = np.flatnonzero((shared > 0) & ((shared == self._sizes) | (shared == len(own))))
        held = [self._queries[i] for i in inside.tolist()]
        held = [query for query in held if query in sequence or sequence in query]
        held.sort(key=lambda query: (-min(len(query), len(sequence)), len(query), query))
        alike = np.lexsort((np.arange(len(shared)), -shared))[:TRIED].tolist()
        near = [self._queries[i] for i in alike if shared[i]]
        for query in [*held[:1], *near]:
            if self._refuses(query, sequence) is None:
                return stacked(self._sources[query])
        return []

    def _refuses(self, query: str, sequence: str) -> str | None:
        return check_map(*column_map(query, sequence), self.min_identity)


def of_same_protein(
    named: Sequence[tuple[InputFile, str]], sequence: str, min_identity: float
) -> tuple[list[InputFile], str]:
    """Return those of some alignments, each with its query, that are a chain's, and a note on the others."""
    errors = [(source, check_map(*column_map(query, sequence), min_identity)) for source, query in named]
    note = "; ".join(f"{source.name}: {error}" for source, error in errors if error)
    return stacked(source for source, error in errors if not error), note


class HitsMatcher:
    """Finds the template hits of a chain: by its name, or by the name that its alignments bear.

    hits: their sources.  queries: gives those of all alignments that bear a name, or two different ones; it is asked
    once for a name.
    """

    def __init__(self, hits: Sequence[InputFile], queries: Callable[[str], set[str]]) -> None:
        self._queries = cache(queries)
        self._names: dict[str, list[InputFile]] = defaultdict(list)
        for source in hits:
            for name in source.bears:
                self._names[name].append(source)

    def find(self, key: str, sequence: str, alignments: Sequence[InputFile]) -> list[InputFile]:
        """Hits that bear the name of the chain `key`; else those that bear a name of one of its alignments (the same
        folder, as a rule), where all alignments of that name are of this sequence; else of its entry."""
        if named := self._names.get(key.lower()):
            return sorted(named)
        names = {name for source in alignments for name in source.bears} & self._names.keys()
        names = {name for name in names if self._queries(name) == {sequence}}
        if beside := sorted({source for name in names for source in self._names[name]}):
            return beside
        return sorted(self._names.get(key.rpartition("_")[0].lower(), []))


def _kmers(sequence: str) -> np.ndarray:
    """The different k-mers of a sequence, as numbers: int32 [K], ascending."""
    letters = np.frombuffer(sequence.encode("ascii", "replace"), np.uint8).astype(np.int32) % 32  # A to Z: 1 to 26
    windows = np.lib.stride_tricks.sliding_window_view(letters, KMER) if len(letters) >= KMER else letters[:0, None]
    return np.unique(windows @ (32 ** np.arange(windows.shape[1], dtype=np.int32)))
