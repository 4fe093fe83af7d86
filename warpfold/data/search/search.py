"""`warpfold search`: alignments and template hits of many proteins, found once and kept (docs/search.md).

Every result lies in a cache under a key made of the sequence, the database's contents and all settings; the output is
written from there.  So a run that was stopped goes on, and nothing is searched for twice.
"""

import json
import os
import platform
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from warpfold import __version__
from warpfold.bulk import Part, in_order, pool
from warpfold.data.formats.alignment import LETTERS, is_nucleic
from warpfold.data.formats.sequences import read_fasta, write_fasta
from warpfold.data.search.cache import Cache, digest_of
from warpfold.data.search.database import Query, Survey, Tell
from warpfold.data.search.hmmer import LONGEST, Hmmsearch, Jackhmmer
from warpfold.data.search.programs import HHblits, MMseqs2
from warpfold.errors import UserError
from warpfold.files import file_name, update_file
from warpfold.geometry.residue import RESTYPES
from warpfold.progress import Progress, no_progress

FORMAT = "warpfold-search-1"
TEMPLATES = "templates"  # what template hits are called beside the databases of alignments
# Rows of an alignment, the query's included, by how its database is called: AlphaFold2's uniref_max_hits and
# mgnify_max_hits.
MOST_ROWS = {"uniref90": 10_000, "mgnify": 501, "mgy": 501}
MOST = 10_000  # of any other
HELD = 256  # alignments held at a time to search for templates with
CLUSTER_PASS = 4  # queries that share a reading on a cluster, where workers are many

ENGINES = {"jackhmmer": Jackhmmer, "mmseqs2": MMseqs2, "hhblits": HHblits}


class Engine(Protocol):
    """What finds things: `Jackhmmer`, `Hmmsearch`, `MMseqs2`, `HHblits`; picklable."""

    name: str

    def per_pass(self, threads: int) -> int: ...

    def identity(self) -> dict[str, Any]: ...

    def survey(self, path: Path, tell: Tell) -> Survey: ...

    def search(
        self, queries: Sequence[Query], path: Path, survey: Survey, most: int, threads: int, tell: Tell
    ) -> list[str | UserError]: ...


@dataclass(frozen=True)
class Database:
    """A database to search, and what its results are called."""

    name: str
    path: Path
    most: int = MOST  # rows of an alignment, the query's included

    @classmethod
    def parse(cls, text: str, most: Mapping[str, int] | None = None) -> "Database":
        """ "NAME=FILE", or "FILE", which is called like the file without its endings.

        most: rows by name over those of AlphaFold2; "" stands for every database.
        Errors: UserError for a name that is no file's.
        """
        name, given, file = text.partition("=")
        if not given or Path(text).exists():
            file = text
            name = re.sub(r"(\.(fasta|fas|fa|faa|fsa|txt|gz))+$", "", Path(text).name, flags=re.IGNORECASE)
        if not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", name, re.ASCII):
            raise UserError(f"--database {text}: {name!r} is no name for a file; give one, NAME={file}")
        known = (rows for start, rows in MOST_ROWS.items() if name.lower().startswith(start))
        own = next(known, MOST)
        return cls(name, Path(file), (most or {}).get(name, (most or {}).get("", own)))


def parse_most(texts: Sequence[str]) -> dict[str, int]:
    """ "N" and "NAME=N" -> rows by database name, "" for every database.  Errors: UserError for anything else."""
    found = {}
    for text in texts:
        name, _, count = text.rpartition("=")
        if not count.isdecimal() or int(count) < 2:
            raise UserError(f"--max-hits {text}: expected N or NAME=N, a number from 2 (the query is one of them)")
        found[name] = int(count)
    return found


@dataclass(frozen=True)
class Options:
    """How to search; nothing here changes what is found."""

    cache: Path | None = None  # None: in the output folder
    workers: int = 1  # processes
    threads: int | None = None  # of each process; None: all cores, shared among the processes; on a cluster one
    cluster: str | None = None  # the address of a Dask scheduler
    part: Part | None = None  # of the proteins, as one task of a job array does


def search(
    queries: Sequence[Path],
    databases: Sequence[Database],
    out: Path,
    engine: Engine | None = None,
    templates: Path | None = None,
    options: Options = Options(),
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Searches for every protein of FASTA files; returns the report that is in `out/search.json` as well.

    Writes `out/NAME/DATABASE.a3m`, and `out/NAME/templates.sto` from the sequences in `templates` (FASTA like
    pdb_seqres), which are searched with a profile of what the first database gave.  engine: None for jackhmmer as
    AlphaFold2 sets it.  The same command continues a run that was stopped.  A protein that fails is named under
    "failures" and leaves the others be.
    Errors: UserError for bad queries, databases, an engine that is not installed, an `out` that holds something else.
    """
    start = time.perf_counter()
    tell = progress or no_progress
    targets: list[tuple[Database, Engine]] = [(database, engine or Jackhmmer()) for database in databases]
    if templates is not None:
        targets.append((Database(TEMPLATES, templates), Hmmsearch()))
    names = [database.name.lower() for database, _ in targets]
    for database in databases:
        if names.count(database.name.lower()) > 1:
            raise UserError(f"--database {database.path}: another is called {database.name} too; use NAME=FILE")
    proteins = read_queries(queries)
    report = out / ("search.json" if options.part is None else f"search-{options.part}.json".replace("/", "-of-"))
    _claim(out)
    cache = Cache(options.cache or out / "cache")
    goals = [Goal(database, one, one.identity(), _survey(database, one, cache, tell)) for database, one in targets]
    run = _Run(out, cache, options, tell, proteins, goals)
    update_file(report, _json(run.report("running", start)))
    with pool(options.workers, options.cluster) as executor:
        run.find_all(executor)
    summary = run.report("failed" if run.failures else "complete", start)
    update_file(report, _json(summary))
    return summary


def read_queries(paths: Sequence[Path]) -> dict[str, str]:
    """Name -> sequence, upper case, of all records of FASTA files; a name is the first word of its header.

    Errors: UserError for what is no FASTA of proteins, and for two records of one name.
    """
    found: dict[str, str] = {}
    places: dict[str, Path] = {}
    for path in paths:
        for header, sequence in read_fasta(path):
            name = file_name((header.split() or ["query"])[0])
            if (key := name.lower()) in places:  # some file systems do not tell A from a
                where = "twice" if places[key] == path else f"in {places[key]} too"
                raise UserError(f"{path}: a record is called {name} {where}; give each protein a name of its own")
            places[key], found[name] = path, sequence
    return found


def refuses(sequence: str) -> str | None:
    """Why nothing can be searched for with this sequence, or None."""
    if len(sequence) > LONGEST:
        return f"{len(sequence)} residues, more than HMMER's {LONGEST}; search for its domains"
    if is_nucleic(sequence):
        return "looks like nucleic acid (only A, C, G, T, U, N); WarpFold searches for proteins"
    if not any(LETTERS[letter] < len(RESTYPES) for letter in sequence):
        return "has none of the 20 amino acids; there is nothing to search for"
    return None


@dataclass(frozen=True)
class Goal:
    """One database, and what searches it."""

    database: Database
    engine: Engine
    identity: Mapping[str, Any]
    survey: Survey

    @property
    def for_templates(self) -> bool:
        return isinstance(self.engine, Hmmsearch)

    def key(self, query: Query) -> str:
        """Of a result in the cache: all that it depends on."""
        return digest_of(query.sequence, query.rows, self.survey.digest, self.identity, self.database.most)


@dataclass(frozen=True)
class _Job:
    """Queries that are searched for in one reading of a database."""

    goal: Goal
    queries: Sequence[Query]
    threads: int


def _work(job: _Job, tell: Tell = lambda done, total: None) -> tuple[list[str | UserError], float]:
    """The results of a job's queries, and the seconds it took."""
    start = time.perf_counter()
    goal = job.goal
    results: list[str | UserError]
    try:
        results = goal.engine.search(
            job.queries, goal.database.path, goal.survey, goal.database.most, job.threads, tell
        )
    except UserError as error:  # a program that failed on all of them
        results = [error] * len(job.queries)
    return results, time.perf_counter() - start


@dataclass
class _Run:
    """The state of one run: what is to be found, and the account of what was."""

    out: Path
    cache: Cache
    options: Options
    tell: Progress
    proteins: Mapping[str, str]
    goals: Sequence[Goal]
    names: dict[str, list[str]] = field(default_factory=dict)  # of each sequence, in the order of the queries
    found: dict[str, dict[str, Any]] = field(default_factory=dict)  # by name: what stands in the report
    failures: list[dict[str, str]] = field(default_factory=list)
    done: int = 0

    def __post_init__(self) -> None:
        for name, sequence in self.proteins.items():
            self.names.setdefault(sequence, []).append(name)
        part = self.options.part
        chosen = list(self.names) if part is None else part.of(list(self.names))
        self.names = {sequence: self.names[sequence] for sequence in chosen}
        for sequence, names in list(self.names.items()):
            if reason := refuses(sequence):
                self.failures += [{"name": name, "error": reason} for name in names]
                del self.names[sequence]
            else:
                self.found |= {name: {"length": len(sequence), "databases": {}} for name in names}

    def find_all(self, executor: Executor | None) -> None:
        """Finds what the databases hold, for every sequence, and writes it: alignments first, then templates."""
        sequences = list(self.names)
        self._find([goal for goal in self.goals if not goal.for_templates], sequences, executor)
        for start in range(0, len(sequences), HELD):
            templates = [goal for goal in self.goals if goal.for_templates]
            self._find(templates, sequences[start : start + HELD], executor)

    def _find(self, goals: Sequence[Goal], sequences: Sequence[str], executor: Executor | None) -> None:
        jobs = [job for goal in goals for job in self._jobs(goal, sequences)]
        if executor is None:
            for job in jobs:
                self._keep(job, *_work(job, partial(self._tell_part, job)))
            return
        for job, (results, seconds) in zip(jobs, in_order(_work, jobs, executor)):
            self._keep(job, results, seconds)

    def _tell_part(self, job: _Job, done: int, total: int) -> None:
        share = f", {done / total:.0%}" if total else ""
        self._progress(f"{job.goal.database.name}{share}")

    def _progress(self, what: str) -> None:
        self.tell(self.done, len(self.names) * len(self.goals), what)

    def _jobs(self, goal: Goal, sequences: Sequence[str]) -> Iterator[_Job]:
        """What of one database is not yet known, in passes; what is known is written."""
        missing = []
        for query in self._queries(goal, sequences):
            text = self.cache.get(goal.key(query))
            if text is None:
                missing.append(query)
            else:
                self._write_result(goal, query, text, 0.0, cached=True)
        self._progress(goal.database.name)
        if self.options.cluster:
            size, threads = CLUSTER_PASS, 1
        else:
            size = max(1, -(-len(missing) // self.options.workers))
            threads = max(1, _cores() // self.options.workers)
        threads = self.options.threads or threads
        size = min(size, goal.engine.per_pass(threads))
        for start in range(0, len(missing), size):
            yield _Job(goal, missing[start : start + size], threads)

    def _queries(self, goal: Goal, sequences: Sequence[str]) -> Iterator[Query]:
        """What is searched for: sequences, or for templates the first database's alignments."""
        first = self.goals[0]
        for sequence in sequences:
            if not goal.for_templates:
                yield Query(sequence)
            elif (rows := self.cache.get(first.key(Query(sequence)))) is not None:
                yield Query(sequence, rows)
            else:
                self._fail(goal, sequence, f"{first.database.name} gave no alignment to start from")

    def _keep(self, job: _Job, results: Sequence[str | UserError], seconds: float) -> None:
        for query, result in zip(job.queries, results):
            if isinstance(result, UserError):
                self._fail(job.goal, query.sequence, str(result))
            else:
                self.cache.put(job.goal.key(query), result)
                self._write_result(job.goal, query, result, seconds / len(job.queries), cached=False)

    def _fail(self, goal: Goal, sequence: str, reason: str) -> None:
        self.done += 1
        for name in self.names[sequence]:
            self.failures.append({"name": name, "database": goal.database.name, "error": reason})
        self._progress(goal.database.name)

    def _write_result(self, goal: Goal, query: Query, text: str, seconds: float, cached: bool) -> None:
        """The file of every protein that has this sequence, and its line in the report."""
        for name in self.names[query.sequence]:
            file = Path(name, f"{goal.database.name}.{'sto' if goal.for_templates else 'a3m'}")
            own = text if goal.for_templates else write_fasta([(name, query.sequence)], width=0) + text
            update_file(self.out / file, own.encode())
            hits = len(re.findall(r"^[^#/\n]" if goal.for_templates else "^>", text, re.MULTILINE))
            self.found[name]["databases"][goal.database.name] = {
                "file": str(file), "hits": hits, "seconds": round(seconds, 3), "cached": cached
            }  # fmt: skip
        self.done += 1
        self._progress(goal.database.name)

    def report(self, status: str, start: float) -> dict[str, Any]:
        """What stands in search.json."""
        return {
            "format": FORMAT,
            "warpfold": __version__,
            "python": platform.python_version(),
            "status": status,
            "part": str(self.options.part) if self.options.part else None,
            "databases": [
                {
                    "name": goal.database.name,
                    "path": str(goal.database.path),
                    "max_rows": None if goal.for_templates else goal.database.most,
                    **vars(goal.survey),
                    "search": dict(goal.identity),
                }
                for goal in self.goals
            ],
            "proteins": [{"name": name, **self.found[name]} for name in self.proteins if name in self.found],
            "failures": self.failures,
            "seconds": round(time.perf_counter() - start, 3),
        }


def _survey(database: Database, engine: Engine, cache: Cache, tell: Progress) -> Survey:
    """What is known of a database, which is read if it was not before."""

    def listen(done: int, total: int) -> None:
        tell(done, total, f"reading {database.name}")

    return cache.survey(database.path, engine.name, lambda: engine.survey(database.path, listen))


def _claim(out: Path) -> None:
    """UserError if the output folder holds something else."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file; name a folder for the output")
    names = {path.name for path in out.iterdir() if not path.name.startswith(".")} if out.is_dir() else set()
    if names - {"cache"} and not any(map(_is_report, out.glob("search*.json"))):
        raise UserError(f"{out}: holds something else, which is left alone; name a new or an empty folder")


def _is_report(path: Path) -> bool:
    """Return whether this is the report of a search, and not somebody's file of such a name."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("format") == FORMAT


def _cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()
