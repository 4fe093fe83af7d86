"""`warpfold search`: search for alignments and template hits of many proteins (docs/howto/alignments.md).

Every result is cached under a hash of the sequence, the database's contents and all settings, and the output is written
from the cache. A stopped run continues, and no search is repeated.
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
from warpfold.data.search.hmmer import MAX_RESIDUES, Hmmsearch, Jackhmmer
from warpfold.data.search.programs import HHblits, MMseqs2
from warpfold.device import cores
from warpfold.errors import UserError
from warpfold.files import digest_of, update_file
from warpfold.progress import Progress, no_progress

TEMPLATES = "templates"  # name of the database of template hits
# Number of alignments with which templates are searched at once.
TEMPLATE_BATCH = 256
# Queries per pass over a database on a cluster, which has many workers.
CLUSTER_PASS = 4

ENGINES = {"jackhmmer": Jackhmmer, "mmseqs2": MMseqs2, "hhblits": HHblits}


@dataclass(frozen=True)
class SearchOptions:
    """Options that do not change the results.

    cache: None for a folder in the output folder. workers: number of processes. threads: per process; None divides all
    cores among the processes, or uses one on a cluster. cluster: as for `bulk.pool`. part: the proteins of a task of a
    job array.
    """

    cache: Path | None = None
    workers: int = 1
    threads: int | None = None
    cluster: str | None = None
    part: JobPart | None = None


def search(
    queries: Sequence[Given],
    databases: Sequence[Database],
    out: Path,
    engine: Engine | None = None,
    templates: Path | None = None,
    options: SearchOptions = SearchOptions(),
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Search for every protein and every unique chain of complexes. Returns the report (`out/search.json`).

    queries: see `read_query_files`. engine: by default jackhmmer with AlphaFold2's settings. Writes
    `out/NAME/DATABASE.a3m`, and `out/NAME/templates.sto` with hits in `templates` (FASTA like pdb_seqres), which is
    searched with a profile of the first database's alignment. The same call continues a stopped run. A protein that
    fails is listed under "failures", and the others continue.
    Raises UserError for invalid queries or databases, an engine that is not installed, and an `out` with other files.
    """
    start = time.perf_counter()
    targets: list[tuple[Database, Engine]] = [(database, engine or Jackhmmer()) for database in databases]
    if templates is not None:
        targets.append((Database(TEMPLATES, templates), Hmmsearch()))
    names = [database.name.lower() for database, _ in targets]
    for database in databases:
        if names.count(database.name.lower()) > 1:
            raise UserError(f"--database {database.path}: another is called {database.name} too. Use NAME=FILE.")
    if templates is not None and not templates.exists():
        raise UserError(f"{templates}: no such file. Pass a FASTA file like pdb_seqres, or remove the option.")
    proteins = sequences_to_search(queries)
    report = out / ("search.json" if options.part is None else f"search-{options.part}.json".replace("/", "-of-"))
    check_output(out)
    cache = Cache(options.cache or out / "cache")
    searches = [
        DatabaseSearch(database, program, program.identity(), cache.survey(database, program, progress))
        for database, program in targets
    ]
    run = _SearchRun(out, cache, options, progress, proteins, searches)

    def write_report(status: str) -> dict[str, Any]:
        content = run.report(status, time.perf_counter() - start)
        update_file(report, (json.dumps(content, indent=1) + "\n").encode())
        return content

    write_report("running")
    sequences = list(run.names)
    with pool(options.workers, options.cluster) as executor:
        # The search for templates needs the alignments.
        run.find([target for target in searches if not target.for_templates], sequences, executor)
        for at in range(0, len(sequences), TEMPLATE_BATCH):
            batch = sequences[at : at + TEMPLATE_BATCH]
            run.find([target for target in searches if target.for_templates], batch, executor)
    return write_report("failed" if run.failures else "complete")


class Cache:
    """A cache of results and surveys in a folder that any number of processes may share.

    Entries are written atomically and have a checksum (zstd). A damaged entry counts as missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.zst"

    def get(self, key: str) -> str | None:
        """Return the text with a key, or None."""
        try:
            return zstandard.ZstdDecompressor().decompress(self._path(key).read_bytes()).decode()
        except (OSError, zstandard.ZstdError):
            return None

    def put(self, key: str, text: str) -> None:
        """Store a text under a key. Raises UserError if it cannot be written."""
        update_file(self._path(key), zstandard.ZstdCompressor(level=3, write_checksum=True).compress(text.encode()))

    def survey(self, database: Database, engine: Engine, progress: Progress) -> Survey:
        """Survey a database, or return the cached survey for the same paths, sizes and modification times.

        The files of a database are those with names that start with its path. Raises the errors of `Engine.survey`.
        """
        path = database.path
        files = sorted(path.parent.glob(f"{glob.escape(path.name)}*"))
        states = [(str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        key = cache_key("survey", engine.name, states)
        if (text := self.get(key)) is not None:
            return Survey(**json.loads(text))
        survey = engine.survey(path, lambda done, total: progress(done, total, f"reading {database.name}"))
        self.put(key, json.dumps(vars(survey)))
        return survey


def cache_key(*values: Any) -> str:
    """Hash JSON data to 32 hexadecimal digits."""
    return digest_of(json.dumps(values, sort_keys=True).encode())


@dataclass(frozen=True)
class DatabaseSearch:
    """A database, and the engine that searches it."""

    database: Database
    engine: Engine
    identity: Mapping[str, Any]
    survey: Survey

    @property
    def for_templates(self) -> bool:
        return isinstance(self.engine, Hmmsearch)

    def key(self, query: SearchQuery) -> str:
        """Return the cache key of a result: a hash of everything that affects the result."""
        return cache_key(query.sequence, query.rows, self.survey.digest, self.identity, self.database.max_rows)


@dataclass(frozen=True)
class SearchJob:
    """Queries that share a pass over a database."""

    search: DatabaseSearch
    queries: Sequence[SearchQuery]
    threads: int


def search_batch(job: SearchJob, tell: Tell = lambda done, total: None) -> tuple[list[str | UserError], float]:
    """Run a search job; returns the results of its queries, and its duration in seconds."""
    start = time.perf_counter()
    database = job.search.database
    results: list[str | UserError]
    try:
        results = job.search.engine.search(
            job.queries, database.path, job.search.survey, database.max_rows, job.threads, tell
        )
    except UserError as error:
        # The program failed for all queries.
        results = [error] * len(job.queries)
    return results, time.perf_counter() - start


class _SearchRun:
    """The state of a run: its proteins, results and failures. proteins: sequences by name."""

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
        # Entries of the report by name, in the order of the queries.
        self.proteins: dict[str, dict[str, Any]] = {}
        self.failures: list[dict[str, str]] = []
        self.done = 0
        names: dict[str, list[str]] = {}
        for name, sequence in proteins.items():
            names.setdefault(sequence, []).append(name)
        sequences = list(names) if options.part is None else options.part.of(list(names))
        # The names of each sequence in this run.
        self.names: dict[str, list[str]] = {}
        for sequence in sequences:
            if reason := unsearchable_reason(sequence, MAX_RESIDUES):
                self.failures += [{"name": name, "error": reason} for name in names[sequence]]
            else:
                self.names[sequence] = names[sequence]
        for name, sequence in proteins.items():
            if sequence in self.names:
                self.proteins[name] = {"length": len(sequence), "databases": {}}

    def find(self, searches: Sequence[DatabaseSearch], sequences: Sequence[str], executor: Executor | None) -> None:
        """Search databases for all sequences, and write the results."""

        def search_here(job: SearchJob) -> tuple[list[str | UserError], float]:
            name = job.search.database.name
            return search_batch(job, lambda done, total: self._report(f"{name}, {done / total:.0%}" if total else name))

        jobs = [job for target in searches for job in self._make_jobs(target, sequences)]
        answers = in_order(search_batch, jobs, executor) if executor else map(search_here, jobs)
        for job, (results, seconds) in zip(jobs, answers):
            for query, result in zip(job.queries, results):
                if isinstance(result, UserError):
                    self._add_failure(job.search, query.sequence, str(result))
                else:
                    self.cache.put(job.search.key(query), result)
                    self._write_result(job.search, query, result, seconds / len(job.queries), cached=False)

    def _report(self, activity: str) -> None:
        """Update the progress bar."""
        self.progress(self.done, len(self.names) * len(self.searches), activity)

    def _make_jobs(self, search: DatabaseSearch, sequences: Sequence[str]) -> Iterator[SearchJob]:
        """Write the cached results of a database, and yield jobs for the missing ones."""
        missing, first = [], self.searches[0]
        for sequence in sequences:
            query = SearchQuery(sequence)
            if search.for_templates:
                # Templates are searched with the alignment of the first database.
                if (rows := self.cache.get(first.key(query))) is None:
                    self._add_failure(search, sequence, f"{first.database.name} gave no alignment to start from")
                    continue
                query = SearchQuery(sequence, rows)
            text = self.cache.get(search.key(query))
            if text is None:
                missing.append(query)
            else:
                self._write_result(search, query, text, 0.0, cached=True)
        self._report(search.database.name)
        if self.options.cluster:
            size, threads = CLUSTER_PASS, 1
            # Workers on other machines have another working directory.
            database = search.database
            search = replace(search, database=replace(database, path=database.path.absolute()))
        else:
            size = max(1, -(-len(missing) // self.options.workers))
            threads = max(1, cores() // self.options.workers)
        threads = self.options.threads or threads
        size = min(size, search.engine.queries_per_pass(threads))
        for start in range(0, len(missing), size):
            yield SearchJob(search, missing[start : start + size], threads)

    def _add_failure(self, search: DatabaseSearch, sequence: str, reason: str) -> None:
        """Record a failure for every protein with this sequence."""
        self.done += 1
        for name in self.names[sequence]:
            self.failures.append({"name": name, "database": search.database.name, "error": reason})
        self._report(search.database.name)

    def _write_result(
        self, search: DatabaseSearch, query: SearchQuery, text: str, seconds: float, cached: bool
    ) -> None:
        """Write the file and the report entry of every protein with this sequence."""
        database = search.database.name
        for name in self.names[query.sequence]:
            file = Path(name, f"{database}.{'sto' if search.for_templates else 'a3m'}")
            content = text if search.for_templates else write_fasta([(name, query.sequence)], width=0) + text
            update_file(self.out / file, content.encode())
            hits = len(re.findall(r"^[^#/\n]" if search.for_templates else "^>", text, re.MULTILINE))
            entry = {"file": str(file), "hits": hits, "seconds": round(seconds, 3), "cached": cached}
            self.proteins[name]["databases"][database] = entry
        self.done += 1
        self._report(database)

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
                    "name": target.database.name,
                    "path": str(target.database.path),
                    "max_rows": None if target.for_templates else target.database.max_rows,
                    **vars(target.survey),
                    "search": dict(target.identity),
                }
                for target in self.searches
            ],
            "proteins": [{"name": name, **entry} for name, entry in self.proteins.items()],
            "failures": self.failures,
            "seconds": round(seconds, 3),
        }
