"""Structure and alignment files -> a packed store, with an account of everything kept and dropped (Supp. 1.2.4, 1.2.5).

Three steps: survey every file (in parallel), match alignments to chains (by sequence and by name), pack (in parallel,
written in order).  One bad file is an entry of the report, never the end of the run.
"""

import hashlib
import json
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from warpfold.data.features import MIN_IDENTITY, check_map, column_map, from_chain
from warpfold.data.formats import read_alignment
from warpfold.data.mmcif import Chain, Structure, read_structure
from warpfold.data.store import Packed, StoreWriter, pack_record
from warpfold.errors import UserError
from warpfold.geometry.residue import ATOM_ORDER

STRUCTURE_SUFFIXES = (".cif", ".mmcif", ".pdb", ".ent")
ALIGNMENT_SUFFIXES = (".a3m", ".a2m", ".sto", ".stk", ".stockholm", ".aln", ".afa")  # .fasta only if named itself
KMER = 6  # residues: alignments that share none with a chain are not tried
AHEAD = 64  # jobs handed to the workers, finished ones included
TRIED = 5  # similar alignments to compare with a chain

Progress = Callable[[str, int, int], None]  # stage, done, total
Job = TypeVar("Job")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Filters:
    """Which chains are kept.  The paper's are the resolution and the share of one amino acid (Supp. 1.2.5)."""

    max_resolution: float = 9.0  # angstrom; structures without one (NMR) pass
    max_single: float = 0.8  # share of the sequence that one amino acid may have
    min_length: int = 10  # residues, and as many must have a CA
    max_length: int | None = None
    require_msa: bool = False  # otherwise a chain without alignment is kept with its sequence alone
    min_identity: float = MIN_IDENTITY  # between a chain and an alignment's query

    def refuses(self, structure: Structure, chain: Chain) -> str | None:
        """Why this chain is dropped, or None."""
        length, resolved = len(chain.sequence), int((chain.mask[:, ATOM_ORDER["CA"]] > 0).sum())
        residue, count = Counter(chain.sequence).most_common(1)[0] if length else ("", 0)
        if structure.resolution is not None and structure.resolution > self.max_resolution:
            return f"resolution {structure.resolution:g} Å, over {self.max_resolution:g}"
        if length < self.min_length:
            return f"{length} residues, fewer than {self.min_length}"
        if self.max_length is not None and length > self.max_length:
            return f"{length} residues, more than {self.max_length}"
        if resolved < self.min_length:
            return f"{resolved} residues with a CA, fewer than {self.min_length}"
        if count > self.max_single * length:
            return f"{count / length:.0%} of the sequence is {residue}, over {self.max_single:.0%}"
        return None


@dataclass
class Entry:
    """What became of one chain, or of one file that could not be read."""

    name: str
    file: str
    kept: bool
    reason: str = ""  # why it was dropped, or what is to be noted
    length: int = 0
    depth: int = 0  # alignment rows
    alignments: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """The account of a run; `pack.json` in the store holds the same."""

    entries: list[Entry]
    unused: dict[str, str]  # alignment file -> why no chain uses it

    @property
    def kept(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.kept]

    @property
    def dropped(self) -> list[Entry]:
        return [entry for entry in self.entries if not entry.kept]

    def to_json(self) -> dict[str, Any]:
        """kept and dropped entries, and unused alignments, as JSON can hold them."""
        return {
            "kept": [asdict(entry) for entry in self.kept],
            "dropped": [asdict(entry) for entry in self.dropped],
            "unused_alignments": self.unused,
        }

    def summary(self) -> str:
        """One line of numbers."""
        alone = sum(not entry.alignments for entry in self.kept)
        return (
            f"{len(self.kept)} chains kept ({alone} with their sequence alone), {len(self.dropped)} dropped, "
            f"{len(self.unused)} alignments unused"
        )


@dataclass(frozen=True)
class _Survey:
    """What a file holds, as far as matching needs it."""

    file: Path
    error: str = ""
    query: str = ""  # of an alignment
    chains: tuple[tuple[str, str, str, str | None], ...] = ()  # of a structure: key, chain, sequence, why dropped


def pack(
    structures: Sequence[Path],
    msas: Sequence[Path],
    out: Path,
    filters: Filters = Filters(),
    workers: int = 1,
    progress: Progress | None = None,
) -> Report:
    """Makes the store `out` from structure files and alignment files, or folders of them (searched recursively).

    The same files give the same store, byte for byte, whatever `workers` (processes; 1 works in this one).
    Errors: UserError if a path does not exist, `out` exists or cannot be written, or nothing is kept (then there is
    no store).  Anything wrong with single files is in the report.
    """
    tell = progress or (lambda stage, done, total: None)
    structure_files = find_files(structures, STRUCTURE_SUFFIXES, "structures")
    alignment_files = find_files(msas, ALIGNMENT_SUFFIXES, "alignments") if msas else []
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn")) if workers > 1 else nullcontext()
    try:
        with StoreWriter(out) as writer, pool as executor:
            surveys = [(file, filters) for file in structure_files]
            found = list(_each(_survey_structure, surveys, executor, tell, "reading structures"))
            alignments = list(_each(_survey_alignment, alignment_files, executor, tell, "reading alignments"))
            entries, jobs, unused = _plan(found, alignments, filters)
            for built in _each(_build, jobs, executor, tell, "packing"):
                for entry, record, meta in built:
                    entries.append(entry)
                    if record is not None:
                        writer.add(entry.name, record, meta)
            report = Report(sorted(entries, key=lambda entry: (entry.file, entry.name)), unused)
            if not report.kept:
                reason = Counter(entry.reason for entry in report.dropped).most_common(1)[0][0]
                raise UserError(f"{out}: nothing to keep, entries: {len(entries)}; most often: {reason}")
            writer.finish({"pack.json": json.dumps(report.to_json(), indent=1) + "\n"})
    except BrokenProcessPool:
        raise UserError(f"{out}: a worker process died, most likely of too little memory; use fewer workers") from None
    return report


def find_files(paths: Sequence[Path], suffixes: Sequence[str], what: str) -> list[Path]:
    """Files as they are, folders searched for names with these suffixes (also .gz); sorted, each once.

    Errors: UserError for a path that does not exist, or when nothing is found.
    """
    found = set()
    for path in map(Path, paths):
        if path.is_dir():
            endings = tuple(suffixes) + tuple(suffix + ".gz" for suffix in suffixes)
            found |= {file for file in path.rglob("*") if file.name.lower().endswith(endings) and file.is_file()}
        elif path.exists():
            found.add(path)
        else:
            raise UserError(f"{path}: no such file or folder")
    if not found:
        raise UserError(f"{', '.join(map(str, paths))}: no {what} found; files end in {', '.join(suffixes)}, or .gz")
    return sorted(found)


def _survey_structure(job: tuple[Path, Filters]) -> _Survey:
    file, filters = job
    try:
        structure = read_structure(file)
    except UserError as error:
        return _Survey(file, error=str(error))
    chains = [
        (f"{structure.id}_{name}", name, chain.sequence, filters.refuses(structure, chain))
        for name, chain in structure.chains.items()
    ]
    chains += [(f"{structure.id}_{name}", name, "", reason) for name, reason in structure.dropped.items()]
    return _Survey(file, chains=tuple(chains))


def _survey_alignment(file: Path) -> _Survey:
    try:
        return _Survey(file, query=read_alignment(file).query)
    except UserError as error:
        return _Survey(file, error=str(error))


@dataclass(frozen=True)
class _Job:
    """One structure file, the chains to pack of it, and each one's alignments."""

    file: Path
    chains: list[tuple[str, str, list[Path], str]]  # key, chain, alignments, note
    filters: Filters


def _plan(
    found: Sequence[_Survey], alignments: Sequence[_Survey], filters: Filters
) -> tuple[list[Entry], list[_Job], dict[str, str]]:
    """Entries that are dropped already, jobs for the others, and the alignments that nobody uses, with the reason."""
    matcher = Matcher([(a.file, a.query) for a in alignments if not a.error], filters.min_identity)
    entries, jobs = [], []
    holders: dict[str, Path] = {}
    used: set[Path] = set()
    for survey in found:
        if survey.error:
            entries.append(Entry(survey.file.name, str(survey.file), False, survey.error))
        wanted = []
        for key, chain, sequence, reason in survey.chains:
            files, note = ([], "") if reason else matcher.find(key, sequence)
            if not reason and key in holders:
                reason = f"the same name as in {holders[key]}"
            if not reason and not files and filters.require_msa:
                reason = "no alignment" + (f": {note}" if note else "")
            if reason:
                entries.append(Entry(key, str(survey.file), False, reason, len(sequence)))
                continue
            holders[key] = survey.file
            used |= set(files)
            wanted.append((key, chain, files, note))
        if wanted:
            jobs.append(_Job(survey.file, wanted, filters))
    unused = {str(a.file): a.error or "no chain has this sequence" for a in alignments if a.file not in used}
    return entries, jobs, unused


class Matcher:
    """Finds the alignments of a chain among many, by their queries.

    alignments: (file, query sequence) each.
    """

    def __init__(self, alignments: Sequence[tuple[Path, str]], min_identity: float = MIN_IDENTITY) -> None:
        self.min_identity = min_identity
        self._files: dict[str, list[Path]] = defaultdict(list)  # by query
        self._names: dict[str, list[tuple[Path, str]]] = defaultdict(list)
        self._queries: dict[str, set[str]] = defaultdict(set)  # by k-mer
        for file, query in alignments:
            self._files[query].append(file)
            for name in {file.parent.name.lower(), file.name.split(".")[0].lower()}:
                self._names[name].append((file, query))
            for kmer in _kmers(query):
                self._queries[kmer].add(query)

    def find(self, key: str, sequence: str) -> tuple[list[Path], str]:
        """Alignments of the chain `key` ("1crn_A"), and a note on those that bear its name but were refused.

        Those of this sequence, of a precursor or a part of it, and those that bear its name or its structure's;
        without any, those of the most similar query.  All must be of the same protein (`features.check_map`).
        """
        named = self._names.get(key.lower(), []) or self._names.get(key.rpartition("_")[0].lower(), [])
        errors = [(file, self._refuses(query, sequence)) for file, query in named]
        note = "; ".join(f"{file.name}: {error}" for file, error in errors if error)

        shared = Counter(query for kmer in _kmers(sequence) for query in self._queries.get(kmer, ()))
        nearest = sorted(shared, key=lambda query: (query != sequence, -shared[query], query))[:TRIED]
        similar = [query for query in nearest if self._refuses(query, sequence) is None]
        same = [query for query in similar if query in sequence or sequence in query]
        files = {file for file, error in errors if not error}.union(*(self._files[query] for query in same))
        return sorted(files or {file for query in similar[:1] for file in self._files[query]}), note

    def _refuses(self, query: str, sequence: str) -> str | None:
        return check_map(*column_map(query, sequence), self.min_identity)


def _kmers(sequence: str) -> set[str]:
    return {sequence[start : start + KMER] for start in range(len(sequence) - KMER + 1)}


def _build(job: _Job) -> list[tuple[Entry, Packed | None, dict[str, Any]]]:
    """The records of one structure file."""
    results: list[tuple[Entry, Packed | None, dict[str, Any]]] = []
    structure = read_structure(job.file)
    for key, name, files, note in job.chains:
        chain = structure.chains[name]
        entry = Entry(key, str(job.file), True, note, len(chain.sequence), alignments=[str(file) for file in files])
        try:
            alignments = [read_alignment(file) for file in files]
            sources = [f"{file.parent.name}/{file.name}" for file in files]
            raw = from_chain(key, structure, chain, alignments, sources, job.filters.min_identity)
        except UserError as error:
            entry.kept, entry.reason = False, str(error)
            results.append((entry, None, {}))
            continue
        entry.depth = len(raw.msa)
        meta = {
            "length": entry.length,
            "depth": entry.depth,
            "resolution": raw.resolution,
            "release_date": raw.release_date,
            "cluster": hashlib.blake2b(raw.sequence.encode(), digest_size=8).hexdigest(),  # of equal sequences
        }
        results.append((entry, pack_record(raw.to_arrays(), raw.notes()), meta))
    return results


def _each(
    function: Callable[[Job], Result], jobs: Sequence[Job], pool: Executor | None, tell: Progress, stage: str
) -> Iterator[Result]:
    """`function` of each job, in order: in `pool`, a bounded number of jobs ahead, or without one here."""
    tell(stage, 0, len(jobs))
    waiting: deque[Future[Result]] = deque()
    queue = iter(jobs)
    for done in range(len(jobs)):
        if pool is None:
            yield function(next(queue))
        else:
            waiting.extend(pool.submit(function, job) for job in islice(queue, AHEAD - len(waiting)))
            yield waiting.popleft().result()
        tell(stage, done + 1, len(jobs))
