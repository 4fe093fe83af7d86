"""`warpfold search`: find alignments and template hits of many proteins, and keep them (docs/howto/alignments.md).

Every result is cached under a hash of the sequence, the database's contents and all settings, and the output is written
from there.  So a stopped run continues, and nothing is searched for twice.
"""

import glob
import json
import platform
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import zstandard

from warpfold import __version__
from warpfold.bulk import JobPart, in_order, pool
from warpfold.data.example.query_files import Given, sequences_to_search
from warpfold.data.formats.alignment import write_fasta
from warpfold.data.search.database import (
    REPORT_FORMAT,
    Database,
    Engine,
    SearchQuery,
    Survey,
    Tell,
    check_output,
    unsearchable_reason,
)
from warpfold.data.search.hmmer import LONGEST, Hmmsearch, Jackhmmer
from warpfold.data.search.programs import HHblits, MMseqs2
from warpfold.device import cores
from warpfold.errors import UserError
from warpfold.files import digest_of, update_file
from warpfold.progress import Progress, no_progress

TEMPLATES = "templates"  # the name of the database of template hits
HELD = 256  # alignments held at a time to search for templates with
CLUSTER_PASS = 4  # queries that share a pass over a database on a cluster, which has many workers

ENGINES = {"jackhmmer": Jackhmmer, "mmseqs2": MMseqs2, "hhblits": HHblits}


@dataclass(frozen=True)
class SearchOptions:
    """How to search; nothing here changes the results."""

    cache: Path | None = None  # None: in the output folder
    workers: int = 1  # processes
    threads: int | None = None  # of each process; None: all cores, shared among the processes; on a cluster one
    cluster: str | None = None  # as for `bulk.pool`
    part: JobPart | None = None  # of the proteins, for one task of a job array


def search(
    queries: Sequence[Given],
    databases: Sequence[Database],
    out: Path,
    engine: Engine | None = None,
    templates: Path | None = None,
    options: SearchOptions = SearchOptions(),
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Search for every protein, and every different chain of complexes; return the report (`out/search.json`).

    queries: as `read_query_files` takes them.  Writes `out/NAME/DATABASE.a3m`, and `out/NAME/templates.sto` from the
    sequences in `templates` (FASTA like pdb_seqres), which are searched with a profile of the first database's
    alignment.  engine: None for jackhmmer with AlphaFold2's settings.  The same command continues a stopped run.  A
    protein that fails is named under "failures" and does not stop the others.
    Errors: UserError for bad queries or databases, an engine that is not installed, or an `out` with other files.
    """
    start = time.perf_counter()
    targets: list[tuple[Database, Engine]] = [(database, engine or Jackhmmer()) for database in databases]
    if templates is not None:
        targets.append((Database(TEMPLATES, templates), Hmmsearch()))
    names = [database.name.lower() for database, _ in targets]
    for database in databases:
        if names.count(database.name.lower()) > 1:
            raise UserError(f"--database {database.path}: another is called {database.name} too. Use NAME=FILE")
    if templates is not None and not templates.exists():
        raise UserError(f"{templates}: no such file. Name a FASTA file like pdb_seqres, or leave it out")
    proteins = sequences_to_search(queries)
    report = out / ("search.json" if options.part is None else f"search-{options.part}.json".replace("/", "-of-"))
    check_output(out)
    cache = Cache(options.cache or out / "cache")
    searches = [DatabaseSearch(one, by, by.identity(), cache.survey(one, by, progress)) for one, by in targets]
    run = _SearchRun(out, cache, options, progress, proteins, searches)

    def write_report(status: str) -> dict[str, Any]:
        found = run.report(status, time.perf_counter() - start)
        update_file(report, (json.dumps(found, indent=1) + "\n").encode())
        return found

    write_report("running")
    sequences = list(run.names)
    with pool(options.workers, options.cluster) as executor:  # alignments first, then templates
        run.find([one for one in searches if not one.for_templates], sequences, executor)
        for at in range(0, len(sequences), HELD):
            run.find([one for one in searches if one.for_templates], sequences[at : at + HELD], executor)
    return write_report("failed" if run.failures else "complete")


class Cache:
    """Results and surveys by their keys, in a folder that any number of processes may share.

    Entries are written atomically and have zstd's checksum: a damaged one counts as missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.zst"

    def get(self, key: str) -> str | None:
        """Return the text that is kept under a key, or None."""
        try:
            return zstandard.ZstdDecompressor().decompress(self._path(key).read_bytes()).decode()
        except (OSError, zstandard.ZstdError):
            return None

    def put(self, key: str, text: str) -> None:
        """Keep a text under a key.  Errors: UserError if it cannot be written."""
        update_file(self._path(key), zstandard.ZstdCompressor(level=3, write_checksum=True).compress(text.encode()))

    def survey(self, database: Database, engine: Engine, progress: Progress) -> Survey:
        """Survey a database: it is read once, then remembered by path, size and time of its files.

        Its files are all whose names begin with its path.  Errors: those of `Engine.survey`.
        """
        path = database.path
        files = sorted(path.parent.glob(f"{glob.escape(path.name)}*"))
        states = [(str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        key = key_of("survey", engine.name, states)
        if (known := self.get(key)) is not None:
            return Survey(**json.loads(known))
        found = engine.survey(path, lambda done, total: progress(done, total, f"reading {database.name}"))
        self.put(key, json.dumps(vars(found)))
        return found


def key_of(*parts: Any) -> str:
    """Return a hash of plain data: 32 hexadecimal digits."""
    return digest_of(json.dumps(parts, sort_keys=True).encode())


@dataclass(frozen=True)
class DatabaseSearch:
    """One database, and the engine that searches it."""

    database: Database
    engine: Engine
    identity: Mapping[str, Any]
    survey: Survey

    @property
    def for_templates(self) -> bool:
        return isinstance(self.engine, Hmmsearch)

    def key(self, query: SearchQuery) -> str:
        """Return the key of a result in the cache: a hash of everything that the result depends on."""
        return key_of(query.sequence, query.rows, self.survey.digest, self.identity, self.database.max_rows)


@dataclass(frozen=True)
class SearchJob:
    """Queries that are searched for in one pass over a database."""

    search: DatabaseSearch
    queries: Sequence[SearchQuery]
    threads: int


def search_batch(job: SearchJob, tell: Tell = lambda done, total: None) -> tuple[list[str | UserError], float]:
    """Return the results of a job's queries, and the seconds it took."""
    start = time.perf_counter()
    database = job.search.database
    results: list[str | UserError]
    try:
        results = job.search.engine.search(
            job.queries, database.path, job.search.survey, database.max_rows, job.threads, tell
        )
    except UserError as error:  # the program failed for all of them
        results = [error] * len(job.queries)
    return results, time.perf_counter() - start


class _SearchRun:
    """The state of one run: its proteins, and what was found so far.

    proteins: name -> sequence.  `failures` says why some cannot be searched for.
    """

    def __init__(
        self,
        out: Path,
        cache: Cache,
        options: SearchOptions,
        progress: Progress,
        proteins: Mapping[str, str],
        searches: Sequence[DatabaseSearch],
    ) -> None:
        self.out, self.cache, self.options, self.progress, self.searches = out, cache, options, progress, searches
        self.proteins: dict[str, dict[str, Any]] = {}  # by name, in the order of the queries: entries of the report
        self.failures: list[dict[str, str]] = []
        self.done = 0
        names: dict[str, list[str]] = {}
        for name, sequence in proteins.items():
            names.setdefault(sequence, []).append(name)
        chosen = list(names) if options.part is None else options.part.of(list(names))
        self.names: dict[str, list[str]] = {}  # of each sequence that is searched for
        for sequence in chosen:
            if reason := unsearchable_reason(sequence, LONGEST):
                self.failures += [{"name": name, "error": reason} for name in names[sequence]]
            else:
                self.names[sequence] = names[sequence]
        for name, sequence in proteins.items():
            if sequence in self.names:
                self.proteins[name] = {"length": len(sequence), "databases": {}}

    def find(self, searches: Sequence[DatabaseSearch], sequences: Sequence[str], executor: Executor | None) -> None:
        """Search databases for every sequence, and write the results."""

        def search_here(job: SearchJob) -> tuple[list[str | UserError], float]:
            name = job.search.database.name
            return search_batch(job, lambda done, total: self._tell(f"{name}, {done / total:.0%}" if total else name))

        jobs = [job for one in searches for job in self._jobs(one, sequences)]
        answers = in_order(search_batch, jobs, executor) if executor else map(search_here, jobs)
        for job, (results, seconds) in zip(jobs, answers):
            for query, result in zip(job.queries, results):
                if isinstance(result, UserError):
                    self._fail(job.search, query.sequence, str(result))
                else:
                    self.cache.put(job.search.key(query), result)
                    self._write_result(job.search, query, result, seconds / len(job.queries), cached=False)

    def _tell(self, what: str) -> None:
        self.progress(self.done, len(self.names) * len(self.searches), what)

    def _jobs(self, search: DatabaseSearch, sequences: Sequence[str]) -> Iterator[SearchJob]:
        """Yield the searches of one database that are still missing, in passes; write the results that are cached."""
        missing = []
        for query in self._queries(search, sequences):
            text = self.cache.get(search.key(query))
            if text is None:
                missing.append(query)
            else:
                self._write_result(search, query, text, 0.0, cached=True)
        self._tell(search.database.name)
        if self.options.cluster:
            size, threads = CLUSTER_PASS, 1
            database = search.database  # whose path means another file where the workers are
            search = replace(search, database=replace(database, path=database.path.absolute()))
        else:
            size = max(1, -(-len(missing) // self.options.workers))
            threads = max(1, cores() // self.options.workers)
        threads = self.options.threads or threads
        size = min(size, search.engine.queries_per_pass(threads))
        for start in range(0, len(missing), size):
            yield SearchJob(search, missing[start : start + size], threads)

    def _queries(self, search: DatabaseSearch, sequences: Sequence[str]) -> Iterator[SearchQuery]:
        """Yield the queries of one database: sequences, or for templates the first database's alignments."""
        first = self.searches[0]
        for sequence in sequences:
            if not search.for_templates:
                yield SearchQuery(sequence)
            elif (rows := self.cache.get(first.key(SearchQuery(sequence)))) is not None:
                yield SearchQuery(sequence, rows)
            else:
                self._fail(search, sequence, f"{first.database.name} gave no alignment to start from")

    def _fail(self, search: DatabaseSearch, sequence: str, reason: str) -> None:
        self.done += 1
        for name in self.names[sequence]:
            self.failures.append({"name": name, "database": search.database.name, "error": reason})
        self._tell(search.database.name)

    def _write_result(
        self, search: DatabaseSearch, query: SearchQuery, text: str, seconds: float, cached: bool
    ) -> None:
        """Write the file of every protein that has this sequence, and its line in the report."""
        database = search.database.name
        for name in self.names[query.sequence]:
            file = Path(name, f"{database}.{'sto' if search.for_templates else 'a3m'}")
            own = text if search.for_templates else write_fasta([(name, query.sequence)], width=0) + text
            update_file(self.out / file, own.encode())
            hits = len(re.findall(r"^[^#/\n]" if search.for_templates else "^>", text, re.MULTILINE))
            found = {"file": str(file), "hits": hits, "seconds": round(seconds, 3), "cached": cached}
            self.proteins[name]["databases"][database] = found
        self.done += 1
        self._tell(database)

    def report(self, status: str, seconds: float) -> dict[str, Any]:
        """Return the content of search.json."""
        return {
            "format": REPORT_FORMAT,
            "warpfold": __version__,
            "python": platform.python_version(),
            "status": status,
            "part": str(self.options.part) if self.options.part else None,
            "databases": [
                {
                    "name": one.database.name,
                    "path": str(one.database.path),
                    "max_rows": None if one.for_templates else one.database.max_rows,
                    **vars(one.survey),
                    "search": dict(one.identity),
                }
                for one in self.searches
            ],
            "proteins": [{"name": name, **found} for name, found in self.proteins.items()],
            "failures": self.failures,
            "seconds": round(seconds, 3),
        }
