"""Match alignments and template hits to chains, and read only the necessary queries of alignments.

Alignments named after a chain have priority, so a task of a job array first reads the queries of alignments that are
named after its structures. A chain without such an alignment may match any alignment, which requires all queries. The
first task that needs all queries reads them, and writes them to a file for the other tasks.
"""

import fcntl
import json
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, cached_property, lru_cache
from pathlib import Path

import numpy as np

from warpfold import __version__
from warpfold.data.example.raw_example import check_map
from warpfold.data.formats.input_files import InputFile, digest, stacked
from warpfold.data.pack.build import ChainJob, read_queries
from warpfold.data.pack.jobs import DIED, JobRunner, PackJob
from warpfold.data.pack.part import QUERIES, QueryOrError
from warpfold.data.similar.pairwise import column_map
from warpfold.errors import UserError
from warpfold.files import writing
from warpfold.progress import Progress, no_progress

BATCH = 64  # queries per job
KMER = 6  # residues
# Most similar queries that are compared with a chain.
MAX_CANDIDATES = 5


class Queries:
    """The queries of alignments, which are read on demand and stored in the part being written.

    alignments: of all parts. limit: largest size of a file in bytes. shared: file by which the tasks of a job array
    share all queries; None for a single run.
    """

    def __init__(
        self, runner: JobRunner, alignments: Sequence[InputFile], limit: int, shared: Path | None = None
    ) -> None:
        self.runner, self.alignments, self.limit, self.shared = runner, alignments, limit, shared
        # By the names of the alignments.
        self.read_so_far: dict[str, QueryOrError] = runner.writer.queries()
        # Names of the alignments in this part.
        self._stored = set(self.read_so_far)
        self._made_of = [__version__, limit, digest(alignments)]
        if shared is not None and shared.exists():
            with suppress(OSError):
                self._load(shared.read_text(encoding="utf-8"))

    def known(self, sources: Sequence[InputFile]) -> list[tuple[InputFile, str]]:
        """Return pairs of alignment and query for the queries read so far. A complex has a pair for each chain."""
        queries = ((source, self.read_so_far.get(source.name, ("", ""))[0]) for source in sources)
        return [(source, query) for source, several in queries for query in dict.fromkeys(several.split(":")) if query]

    def read(self, sources: Sequence[InputFile], progress: Progress = no_progress) -> None:
        """Read the queries of `sources` that have not been read yet."""
        missing = [source for source in sources if source.name not in self.read_so_far]
        if not missing:
            return

        def job(batch: Sequence[InputFile], singles: tuple[PackJob, ...] = ()) -> PackJob:
            return PackJob(QUERIES + batch[0].name, (read_queries, (batch, self.limit)), singles)

        batches = (missing[start : start + BATCH] for start in range(0, len(missing), BATCH))
        jobs = (job(batch, tuple(job([source]) for source in batch) if len(batch) > 1 else ()) for batch in batches)
        done = len(sources) - len(missing)
        for finished, result in self.runner.run(jobs):
            batch: Sequence[InputFile] = finished.call[1][0]
            queries = [("", f"{source.name}: {DIED}") for source in batch] if result is None else result
            self.read_so_far |= dict(zip((source.name for source in batch), queries))
            self.keep(batch)
            done += len(batch)
            progress(done, len(sources), "reading alignments")

    def keep(self, sources: Sequence[InputFile]) -> None:
        """Store the queries of `sources` in the part, also those that another task has read.

        Every alignment must belong to a part, because the merge reports unused alignments.
        """
        new = {source.name: self.read_so_far[source.name] for source in sources if source.name not in self._stored}
        if new:
            rows = [[name, *query] for name, query in new.items()]
            self.runner.writer.add(QUERIES + next(iter(new)), rows)
            self._stored |= new.keys()

    def read_all(self, progress: Progress) -> None:
        """Read the queries of all alignments, or load them from another task of the job array."""
        if self.shared is None or all(source.name in self.read_so_far for source in self.alignments):
            self.read(self.alignments, progress)
            return
        with writing(self.shared), open(self.shared, "a+", encoding="utf-8") as file:
            # Wait for a task that is reading them. On a file system without locks, each task reads them itself.
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            text = file.read()
            if text and not text.startswith('{"made_of":'):
                raise UserError(f"{self.shared}: exists already, and holds no queries. Move it away.")
            if not self._load(text):
                self.read(self.alignments, progress)
                file.truncate(0)
                queries = [self.read_so_far[source.name] for source in self.alignments]
                json.dump({"made_of": self._made_of, "queries": queries}, file)

    def _load(self, text: str) -> bool:
        """Load the queries of another task. Returns False if they are of other files or incomplete after a kill."""
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            shared = json.loads(text)
            if shared["made_of"] == self._made_of and len(shared["queries"]) == len(self.alignments):
                queries = [(str(query), str(error)) for query, error in shared["queries"]]
                self.read_so_far |= dict(zip((source.name for source in self.alignments), queries))
                return True
        return False


class Matcher:
    """Find the alignments and template hits of a chain by names and sequences, with as few queries read as possible.

    progress: called while all queries are read, if this is necessary.
    """

    def __init__(
        self,
        queries: Queries,
        alignments: Sequence[InputFile],
        hits: Sequence[InputFile] = (),
        progress: Progress = no_progress,
    ) -> None:
        self.queries, self.alignments, self.progress = queries, alignments, progress
        self._alignments_named, self._hits_named = _group_by_name(alignments), _group_by_name(hits)
        # Many chains have equal sequences.
        self._nearest = lru_cache(maxsize=4096)(self._find_nearest)
        self._queries_named = cache(self._find_queries)

    def find(self, key: str, chain: str, sequence: str) -> ChainJob:
        """Match a chain, for example key "1crn_A" and chain "A".

        The first of these criteria with a match is used: alignments with the chain's name; with exactly its sequence;
        with its entry's name; of the nearest precursor or fragment; of the most similar query. All must be of the same
        protein (`check_map`), and are sorted by `stacked`. The note of the job lists alignments with the chain's name
        that are of another protein.

        Hits: with the name of the chain; with a name of one of its alignments (usually the same folder), if all
        alignments of that name are of this sequence; with its entry's name.
        """
        entry = key.rpartition("_")[0]
        alignments, note = self._find_named(key, sequence)
        if not (alignments := alignments or stacked(self._index.sources.get(sequence, []))):
            alignments, entry_note = self._find_named(entry, sequence)
            alignments = alignments or self._nearest(sequence)
            note = "; ".join(filter(None, (note, entry_note)))
        hits = self._hits_named.get(key.lower(), [])
        if not hits:
            names = {name for source in alignments for name in source.protein_names} & self._hits_named.keys()
            names = {name for name in names if self._queries_named(name) == {sequence}}
            hits = [*{source for name in names for source in self._hits_named[name]}]
        return ChainJob(chain, alignments, sorted(hits or self._hits_named.get(entry.lower(), [])), note)

    def _find_named(self, name: str, sequence: str) -> tuple[list[InputFile], str]:
        """Find the alignments with a name that are of this protein. Returns them, and a note on the others."""
        sources = self._alignments_named.get(name.lower(), [])
        self.queries.read(sources)
        queries = self.queries.known(sources)
        errors = [(source, check_map(*column_map(query, sequence))) for source, query in queries]
        fitting = dict.fromkeys(source for source, error in errors if not error)
        note = "; ".join(f"{source.name}: {error}" for source, error in errors if error and source not in fitting)
        return stacked(fitting), note

    def _find_nearest(self, sequence: str) -> list[InputFile]:
        """Find the alignments of the most similar query of this protein."""
        for query in self._index.similar(sequence):
            if check_map(*column_map(query, sequence)) is None:
                return stacked(self._index.sources[query])
        return []

    @cached_property
    def _index(self) -> "_QueryIndex":
        """An index of all queries. Most runs do not need it."""
        self.queries.read_all(self.progress)
        return _QueryIndex(self.queries.known(self.alignments))

    def _find_queries(self, name: str) -> set[str]:
        """Return the queries of all alignments with a name. If two of them differ, the others are not read."""
        named = self._alignments_named.get(name, [])
        if len({query for _, query in self.queries.known(named)}) < 2:
            self.queries.read(named)
        return {query for _, query in self.queries.known(named)}


def _group_by_name(sources: Sequence[InputFile]) -> dict[str, list[InputFile]]:
    """Group files by the names of their proteins."""
    named: dict[str, list[InputFile]] = defaultdict(list)
    for source in sources:
        for name in source.protein_names:
            named[name].append(source)
    return dict(named)


class _QueryIndex:
    """An index of alignments by query, and of queries by k-mer."""

    def __init__(self, alignments: Sequence[tuple[InputFile, str]]) -> None:
        self.sources: dict[str, list[InputFile]] = defaultdict(list)
        for source, query in alignments:
            self.sources[query].append(source)
        self._queries = sorted(self.sources)
        words = [_list_kmers(query) for query in self._queries]
        self._sizes = np.array([len(kmers) for kmers in words], np.int64)
        kmers = np.concatenate([np.empty(0, np.int32), *words])
        order = np.argsort(kmers, kind="stable")
        self._list_kmers = kmers[order]
        self._holders = np.repeat(np.arange(len(words), dtype=np.int32), self._sizes)[order]

    def similar(self, sequence: str) -> list[str]:
        """Return the query with the best containment of or in the sequence, then those that share most k-mers."""
        kmers = _list_kmers(sequence)
        begins, ends = (np.searchsorted(self._list_kmers, kmers, side) for side in ("left", "right"))
        holders = [self._holders[begin:end] for begin, end in zip(begins.tolist(), ends.tolist())]
        shared = np.bincount(np.concatenate([np.empty(0, np.int32), *holders]), minlength=len(self._queries))
        # If one sequence contains the other, they share all k-mers of the shorter one. The longest overlap is best,
        # then the shortest query.
        may_contain = np.flatnonzero((shared > 0) & ((shared == self._sizes) | (shared == len(kmers))))
        nested = [self._queries[i] for i in may_contain.tolist()]
        nested = [query for query in nested if query in sequence or sequence in query]
        nested.sort(key=lambda query: (-min(len(query), len(sequence)), len(query), query))
        closest = np.lexsort((np.arange(len(shared)), -shared))[:MAX_CANDIDATES].tolist()
        return [*nested[:1], *(self._queries[i] for i in closest if shared[i])]


def _list_kmers(sequence: str) -> np.ndarray:
    """List the unique k-mers of a sequence as numbers: int32 [K], ascending."""
    # The letters A to Z become 1 to 26.
    letters = np.frombuffer(sequence.encode("ascii", "replace"), np.uint8).astype(np.int32) % 32
    windows = np.lib.stride_tricks.sliding_window_view(letters, KMER) if len(letters) >= KMER else letters[:0, None]
    return np.unique(windows @ (32 ** np.arange(windows.shape[1], dtype=np.int32)))
