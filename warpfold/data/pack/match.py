"""Match alignments and template hits to chains, reading only the queries of alignments that this needs.

An alignment named after a chain comes first, so a task of a job array reads the queries of the alignments that are
named after its own structures.  A chain without one may belong to any alignment, for which all queries are needed.  The
first task that needs them all reads them, and writes them into one file for the other tasks.
"""

import fcntl
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
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

BATCH = 64  # alignments whose queries one job reads
KMER = 6  # residues: alignments that share no k-mer with a chain are not tried
TRIED = 5  # similar alignments to compare with a chain
READING = "reading alignments"


class Queries:
    """The queries of alignments, read when they are needed, and kept in the part that is written.

    alignments: of all parts.  limit: bytes that a file may have.  shared: the file in which the tasks of a job array
    share the queries of all alignments; None for a run alone.
    """

    def __init__(
        self, runner: JobRunner, alignments: Sequence[InputFile], limit: int, shared: Path | None = None
    ) -> None:
        self.runner, self.alignments, self.limit, self.shared = runner, alignments, limit, shared
        self.found: dict[str, QueryOrError] = runner.writer.queries()  # by the alignments' names
        self._kept = set(self.found)  # in this part
        self._made_of = [__version__, limit, digest(alignments)]
        if shared is not None and shared.exists():
            with suppress(OSError):
                self._load(shared.read_text(encoding="utf-8"))

    def known(self, sources: Sequence[InputFile]) -> list[tuple[InputFile, str]]:
        """Return the alignments whose queries are known, each with its query; that of a complex with each of them."""
        queries = ((source, self.found.get(source.name, ("", ""))[0]) for source in sources)
        return [(source, query) for source, several in queries for query in dict.fromkeys(several.split(":")) if query]

    def read(self, sources: Sequence[InputFile], progress: Progress = no_progress) -> None:
        """Read the queries of these alignments that are not known yet."""
        missing = [source for source in sources if source.name not in self.found]
        if not missing:
            return
        done = len(sources) - len(missing)
        for job, result in self.runner.run(self._jobs(missing)):
            batch: Sequence[InputFile] = job.call[1][0]
            queries = [("", f"{source.name}: {DIED}") for source in batch] if result is None else result
            rows = dict(zip((source.name for source in batch), queries))
            self.found |= rows
            self.keep(batch)
            done += len(rows)
            progress(done, len(sources), READING)

    def keep(self, sources: Sequence[InputFile]) -> None:
        """Keep the queries of these alignments in the part, also of those that another task has read.

        The merge reports unused alignments, so each of them belongs to a part.
        """
        if new := {one.name: self.found[one.name] for one in sources if one.name not in self._kept}:
            self.runner.writer.add_queries(new)
            self._kept |= new.keys()

    def read_all(self, progress: Progress = no_progress) -> None:
        """Read the queries of all alignments, or take them from the task of the job array that has read them."""
        if self.shared is None or all(source.name in self.found for source in self.alignments):
            self.read(self.alignments, progress)
            return
        with writing(self.shared), open(self.shared, "a+", encoding="utf-8") as file:
            # Wait for another task that is reading them.  On a file system without locks each task reads them itself.
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            text = file.read()
            if text and not text.startswith('{"made_of":'):
                raise UserError(f"{self.shared}: exists already, and holds no queries. Move it away")
            if not self._load(text):
                self.read(self.alignments, progress)
                file.truncate(0)
                queries = [self.found[source.name] for source in self.alignments]
                json.dump({"made_of": self._made_of, "queries": queries}, file)

    def _load(self, text: str) -> bool:
        """Take the queries that another task has written, unless they are of other files or cut short by a kill."""
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            shared = json.loads(text)
            if shared["made_of"] == self._made_of and len(shared["queries"]) == len(self.alignments):
                queries = [(str(query), str(error)) for query, error in shared["queries"]]
                self.found |= dict(zip((source.name for source in self.alignments), queries))
                return True
        return False

    def _jobs(self, sources: Sequence[InputFile]) -> Iterator[PackJob]:
        def job(batch: Sequence[InputFile], singles: tuple[PackJob, ...] = ()) -> PackJob:
            return PackJob(QUERIES + batch[0].name, (read_queries, (batch, self.limit)), singles)

        for start in range(0, len(sources), BATCH):
            batch = sources[start : start + BATCH]
            yield job(batch, tuple(job([one]) for one in batch) if len(batch) > 1 else ())


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
        self.queries.read_all(self.progress)
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
