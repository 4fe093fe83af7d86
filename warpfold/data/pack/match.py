"""Match alignments and template hits to chains, reading only the queries of alignments that this needs.

The tasks of a job array share what they read, so that every query is read once.  A part reads the queries of its own
alignments and writes them into its journal.  For most chains these are enough, since an alignment named after the chain
comes first.  A chain without one may belong to any alignment: its part then takes the queries of the other parts from
their folders, beside its own, and reads those that are still missing.
"""

import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache, cached_property, lru_cache
from pathlib import Path

import numpy as np

from warpfold.bulk import JobPart
from warpfold.data.example.raw_example import check_map
from warpfold.data.formats.input_files import InputFile, stacked
from warpfold.data.pack.build import ChainJob, read_queries
from warpfold.data.pack.jobs import DIED, JobRunner, PackJob
from warpfold.data.pack.part import FileVersion, QueryOrError, part_paths, queries_of_part, query_job
from warpfold.data.similar.pairwise import column_map
from warpfold.progress import Progress, no_progress

BATCH = 64  # alignments whose queries one job reads
# The folders of the other parts are looked at every 10 seconds, but for no more than a twentieth of the time.
LOOK, SELDOM = 10.0, 20
KMER = 6  # residues: alignments that share no k-mer with a chain are not tried
TRIED = 5  # similar alignments to compare with a chain
READING = "reading alignments"


class Queries:
    """The queries of alignments, read when they are asked for.

    limit: bytes that a file may have.  out: the store; the folders of its other parts lie beside it.
    """

    def __init__(self, runner: JobRunner, limit: int, part: JobPart, out: Path) -> None:
        self.runner, self.limit, self.part, self.out = runner, limit, part, out
        self.found: dict[FileVersion, QueryOrError] = dict(runner.writer.queries)
        self._others: Counter[Path] = Counter()  # bytes of each other part's journal that were read
        self._next_look = -math.inf

    def known(self, sources: Sequence[InputFile]) -> list[tuple[InputFile, str]]:
        """Return the alignments whose queries are known, each with its query; that of a complex with each of them."""
        found = ((source, self.found.get(source.version, ("", ""))[0]) for source in sources)
        return [(source, query) for source, queries in found for query in dict.fromkeys(queries.split(":")) if query]

    def read(self, sources: Sequence[InputFile], progress: Progress = no_progress, shuffle: bool = False) -> None:
        """Read the queries of these alignments that are not known here or in another part yet.

        shuffle: in another order in every part, so that parts that run together read different files.
        """
        missing = self._missing(sources)
        if not missing:
            return
        if shuffle:
            self._next_look = -math.inf  # look now: what the others have read need not be read again
            self._look_at_others()
            missing = self._missing(sources)
        batches = [missing[start : start + BATCH] for start in range(0, len(missing), BATCH)]
        if shuffle:
            random.Random(self.part.number).shuffle(batches)
        known = len(sources) - len(missing)
        for job, result in self.runner.run(self._jobs(batches)):
            batch: Sequence[InputFile] = job.call[1][0]
            queries = [("", f"{source.name}: {DIED}") for source in batch] if result is None else result
            rows = [(source.version, query) for source, query in zip(batch, queries)]
            self.runner.writer.add_queries(rows)
            self.found.update(rows)
            known += len(rows)
            progress(known, len(sources), READING)
        progress(len(sources), len(sources), READING)

    def _missing(self, sources: Sequence[InputFile]) -> list[InputFile]:
        return [source for source in sources if source.version not in self.found]

    def _jobs(self, batches: Sequence[Sequence[InputFile]]) -> Iterator[PackJob]:
        """Yield jobs as they are handed out, without the queries that another part has read in the meantime."""

        def job(batch: Sequence[InputFile], singles: tuple[PackJob, ...] = ()) -> PackJob:
            return PackJob(tuple(query_job(one.version) for one in batch), (read_queries, (batch, self.limit)), singles)

        for each in batches:
            self._look_at_others()
            if batch := self._missing(each):
                yield job(batch, tuple(job([one]) for one in batch) if len(batch) > 1 else ())

    def _look_at_others(self) -> None:
        """Take what other parts of the same options and version have written since the last look."""
        begun = time.monotonic()
        if begun < self._next_look:
            return
        writer = self.runner.writer
        for path in part_paths(self.out, self.part.count):
            if path != writer.path:
                with suppress(OSError):  # just begun, just removed, or not readable for us
                    found, self._others[path] = queries_of_part(path, writer.manifest, self._others[path])
                    self.found |= found
        now = time.monotonic()
        self._next_look = now + max(LOOK, SELDOM * (now - begun))


class Matcher:
    """Find the alignments and the template hits of a chain by names and sequences, reading as few queries as possible.

    progress: called while all queries are read, if that is necessary.
    """

    def __init__(
        self,
        queries: Queries,
        alignments: Sequence[InputFile],
        hits: Sequence[InputFile] = (),
        progress: Progress = no_progress,
    ) -> None:
        self.queries, self.alignments, self.progress = queries, alignments, progress
        self._alignments_named, self._hits_named = _by_name(alignments), _by_name(hits)
        self._nearest = lru_cache(maxsize=4096)(self._find_nearest)  # chains of one sequence come again and again
        self._queries_named = cache(self._find_queries)

    def find(self, key: str, chain: str, sequence: str) -> ChainJob:
        """Return the job of a chain: `key` is "1crn_A", `chain` "A".

        Of its alignments, the first of these that finds any counts: alignments with the chain's name; with exactly its
        sequence; with its entry's name; of the nearest precursor or part of it; of the most similar query.  All must be
        of the same protein (`check_map`).  They are in the order of `stacked`.  The job's note says which alignments
        have its name but are of another protein.
        """
        found, note = self._find_named(key, sequence)
        if not (found := found or stacked(self._index.sources.get(sequence, []))):
            found, more = self._find_named(key.rpartition("_")[0], sequence)
            found, note = found or self._nearest(sequence), "; ".join(filter(None, (note, more)))
        return ChainJob(chain, found, self._find_hits(key, sequence, found), note)

    def _find_named(self, name: str, sequence: str) -> tuple[list[InputFile], str]:
        sources = self._alignments_named.get(name.lower(), [])
        self.queries.read(sources)
        errors = [(source, self._check(query, sequence)) for source, query in self.queries.known(sources)]
        fitting = dict.fromkeys(source for source, error in errors if not error)
        note = "; ".join(f"{source.name}: {error}" for source, error in errors if error and source not in fitting)
        return stacked(fitting), note

    def _find_nearest(self, sequence: str) -> list[InputFile]:
        for query in self._index.similar(sequence):
            if self._check(query, sequence) is None:
                return stacked(self._index.sources[query])
        return []

    def _check(self, query: str, sequence: str) -> str | None:
        return check_map(*column_map(query, sequence))

    @cached_property
    def _index(self) -> "_QueryIndex":
        """All alignments by their queries, which are all read for this; most runs never need it."""
        self.queries.read(self.alignments, self.progress, shuffle=True)
        return _QueryIndex(self.queries.known(self.alignments))

    def _find_hits(self, key: str, sequence: str, alignments: Sequence[InputFile]) -> list[InputFile]:
        """Return the template hits of a chain.

        The first of these that finds any counts: hits with the name of the chain `key`; with a name of one of its
        alignments (usually the same folder), if all alignments of that name are of this sequence; with its entry's
        name.
        """
        if named := self._hits_named.get(key.lower()):
            return sorted(named)
        names = {name for source in alignments for name in source.protein_names} & self._hits_named.keys()
        names = {name for name in names if self._queries_named(name) == {sequence}}
        if beside := sorted({source for name in names for source in self._hits_named[name]}):
            return beside
        return sorted(self._hits_named.get(key.rpartition("_")[0].lower(), []))

    def _find_queries(self, name: str) -> set[str]:
        """Return the queries of all alignments with a name; once two differ, the others need not be read."""
        named = self._alignments_named.get(name, [])
        if len({query for _, query in self.queries.known(named)}) < 2:
            self.queries.read(named)
        return {query for _, query in self.queries.known(named)}


def _by_name(sources: Sequence[InputFile]) -> dict[str, list[InputFile]]:
    named: dict[str, list[InputFile]] = defaultdict(list)
    for source in sources:
        for name in source.protein_names:
            named[name].append(source)
    return dict(named)


class _QueryIndex:
    """Alignments by their queries, and queries by their k-mers."""

    def __init__(self, alignments: Sequence[tuple[InputFile, str]]) -> None:
        self.sources: dict[str, list[InputFile]] = defaultdict(list)
        for source, query in alignments:
            self.sources[query].append(source)
        self._queries = sorted(self.sources)
        words = [_kmers(query) for query in self._queries]
        self._sizes = np.array([len(found) for found in words], np.int64)
        kmers = np.concatenate([np.empty(0, np.int32), *words])
        order = np.argsort(kmers, kind="stable")
        self._kmers = kmers[order]
        self._holders = np.repeat(np.arange(len(words), dtype=np.int32), self._sizes)[order]

    def similar(self, sequence: str) -> list[str]:
        """Return the query that best contains the sequence or lies in it, then those that share most k-mers with it."""
        own = _kmers(sequence)
        begins, ends = (np.searchsorted(self._kmers, own, side) for side in ("left", "right"))
        holders = [self._holders[begin:end] for begin, end in zip(begins.tolist(), ends.tolist())]
        shared = np.bincount(np.concatenate([np.empty(0, np.int32), *holders]), minlength=len(self._queries))
        # A query that contains the other shares all its k-mers; the longest overlap is best, then the shortest query.
        inside = np.flatnonzero((shared > 0) & ((shared == self._sizes) | (shared == len(own))))
        held = [self._queries[i] for i in inside.tolist()]
        held = [query for query in held if query in sequence or sequence in query]
        held.sort(key=lambda query: (-min(len(query), len(sequence)), len(query), query))
        most = np.lexsort((np.arange(len(shared)), -shared))[:TRIED].tolist()
        return [*held[:1], *(self._queries[i] for i in most if shared[i])]


def _kmers(sequence: str) -> np.ndarray:
    """Return the different k-mers of a sequence, as numbers: int32 [K], ascending."""
    letters = np.frombuffer(sequence.encode("ascii", "replace"), np.uint8).astype(np.int32) % 32  # A to Z: 1 to 26
    windows = np.lib.stride_tricks.sliding_window_view(letters, KMER) if len(letters) >= KMER else letters[:0, None]
    return np.unique(windows @ (32 ** np.arange(windows.shape[1], dtype=np.int32)))
