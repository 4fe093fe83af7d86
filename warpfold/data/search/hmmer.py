"""jackhmmer and hmmsearch in this process, with pyhmmer, over databases larger than memory.

A database is read once for many queries, some megabytes at a time; threads search a part each.  The results do not
depend on how it is divided: E-values are those of the whole database, and thresholds that need the number of hits in
all of it are applied at the end.
"""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import pyhmmer
from pyhmmer.easel import AA, Alphabet, DigitalMSA, DigitalSequenceBlock, MSAFile, SequenceFile, TextSequence
from pyhmmer.errors import EaselError
from pyhmmer.plan7 import HMM, Background, Builder, Pipeline, TopHits, Trace

from warpfold.data.search.database import Engine, SearchQuery, Survey, Tell, read_chunks, survey_fasta
from warpfold.errors import UserError

AMINO = Alphabet.amino()
LONGEST = 100_000  # residues of a query or target: HMMER's limit
NO_TEMPLATES = "# STOCKHOLM 1.0\n//\n"
Made = TypeVar("Made")
FAILURES = (MemoryError, EaselError)  # errors of one query, which do not stop the others

# HMMER's thresholds under its own names: E-values to report and include a target and a domain, and the three filters.
Thresholds = dict[str, Any]


class HmmerEngine(Engine):
    """The common part of jackhmmer and hmmsearch: databases are FASTA."""

    def queries_per_pass(self, threads: int) -> int:
        """Return the number of queries that share one reading of a database.

        One thread reads as fast as six search for one query.  More queries would lose more when a run is stopped.
        """
        return max(4, threads)

    def survey(self, path: Path, tell: Tell) -> Survey:
        return survey_fasta(path, tell)


@dataclass(frozen=True)
class Jackhmmer(HmmerEngine):
    """Alignments as AlphaFold2 makes them of UniRef90 and MGnify (Supp. 1.2.2): jackhmmer -N 1 -E 1e-4 --incE 1e-4
    --F1 5e-4 --F2 5e-5 --F3 5e-7, the rest as jackhmmer has it (--domE 10, --incdomE 1e-3: its manual page).

    iterations: 1 to 3; from the second on with a profile of the hits included before.
    """

    iterations: int = 1
    e_value: float = 1e-4
    name = "jackhmmer"

    @property
    def thresholds(self) -> Thresholds:
        e_values = {"E": self.e_value, "domE": 10.0, "incE": self.e_value, "incdomE": 1e-3}
        return e_values | {"F1": 5e-4, "F2": 5e-5, "F3": 5e-7}

    def identity(self) -> dict[str, Any]:
        versions = {"engine": self.name, "pyhmmer": pyhmmer.__version__}
        return {**versions, "iterations": self.iterations, **self.thresholds}

    def search(
        self, queries: Sequence[SearchQuery], path: Path, survey: Survey, max_rows: int | None, threads: int, tell: Tell
    ) -> list[str | UserError]:
        """Return A3M rows; see `Engine`."""
        failed: dict[int, UserError] = {}
        best: dict[int, _BestRows] = {}
        included: dict[int, set[str]] = {i: set() for i in range(len(queries))}
        profiles = _profiles({i: partial(_sequence_profile, query.sequence) for i, query in enumerate(queries)}, failed)
        for iteration in range(self.iterations):
            most = None if max_rows is None else max_rows - 1
            best |= {i: _BestRows(most, survey.records, self.thresholds["incdomE"]) for i in profiles}
            kept: dict[int, list[TopHits]] = {i: [] for i in profiles}
            for i, part in _scan(profiles, path, survey, self.thresholds, threads, tell):
                hits = _attempt(i, part.result, failed)
                if hits is not None:
                    best[i].add(hits, profiles[i].M)
                    if iteration + 1 < self.iterations:
                        kept[i].append(hits)
            following: dict[int, Callable[[], HMM[AA]]] = {}
            for i in [i for i in profiles if i not in failed]:
                names = {hit.name for hits in kept[i] for hit in hits.included}
                if names - included[i]:  # otherwise it has converged, or this was the last iteration
                    included[i] |= names
                    following[i] = partial(_next_profile, queries[i].sequence, kept[i])
            profiles = _profiles(following, failed)
        return [failed.get(i) or best[i].a3m() for i in range(len(queries))]


@dataclass(frozen=True)
class Hmmsearch(HmmerEngine):
    """Template hits as AlphaFold-Multimer finds them: a profile of an alignment, its columns the query's residues
    (hmmbuild --hand), against the sequences of the PDB (hmmsearch --F1 .1 --F2 .1 --F3 .1 -E 100 --domE 100 --incE 100
    --incdomE 100, the command that AlphaFold 2.2 logs).
    """

    name = "hmmsearch"

    @property
    def thresholds(self) -> Thresholds:
        e_values = dict.fromkeys(("E", "domE", "incE", "incdomE"), 100.0)
        return e_values | {"F1": 0.1, "F2": 0.1, "F3": 0.1}

    def identity(self) -> dict[str, Any]:
        return {"engine": self.name, "pyhmmer": pyhmmer.__version__, **self.thresholds}

    def search(
        self, queries: Sequence[SearchQuery], path: Path, survey: Survey, max_rows: int | None, threads: int, tell: Tell
    ) -> list[str | UserError]:
        """Return Stockholm text for each query as `hmmsearch -A` writes it: a row per domain, best first, its match
        columns (#=GC RF) the query's residues.  `max_rows` is ignored: templates are chosen later, by their dates.
        """
        failed: dict[int, UserError] = {}
        kept: dict[int, list[TopHits]] = {i: [] for i in range(len(queries))}
        profiles = _profiles({i: partial(_alignment_profile, query) for i, query in enumerate(queries)}, failed)
        for i, part in _scan(profiles, path, survey, self.thresholds, threads, tell):
            hits = _attempt(i, part.result, failed)
            if hits is not None:
                kept[i].append(hits)
        return [failed.get(i) or _stockholm(kept[i]) for i in kept]


def _sequence_profile(sequence: str) -> "HMM[AA]":
    """Return the profile of one sequence: BLOSUM62, as phmmer and jackhmmer's first iteration make it."""
    query = TextSequence(name="query", sequence=sequence).digitize(AMINO)
    return Builder(AMINO).build(query, Background(AMINO))[0]


def _next_profile(sequence: str, hits: Sequence[TopHits]) -> "HMM[AA]":
    """Return the profile of the query and all included hits; its match columns stay the query's residues."""
    query = TextSequence(name="query", sequence=sequence).digitize(AMINO)
    traces = [Trace.from_sequence(query)]
    alignment = hits[0].merge(*hits[1:]).to_msa(AMINO, [query], traces, digitize=True, all_consensus_cols=True)
    alignment.name = "query"
    return Builder(AMINO, architecture="hand").build_msa(cast("DigitalMSA[AA]", alignment), Background(AMINO))[0]


def _alignment_profile(query: SearchQuery) -> "HMM[AA]":
    """Return the profile of a query and its A3M rows, with a match state for every residue of the query."""
    text = io.BytesIO(f">query\n{query.sequence}\n{query.rows}".encode())
    with MSAFile(text, format="a2m", digital=True, alphabet=AMINO) as file:  # A3M is A2M without its dots
        alignment = cast("DigitalMSA[AA]", file.read())
    alignment.name = "query"
    return Builder(AMINO, architecture="hand").build_msa(alignment, Background(AMINO))[0]


def _scan(
    profiles: Mapping[int, "HMM[AA]"], path: Path, survey: Survey, thresholds: Thresholds, threads: int, tell: Tell
) -> Iterator[tuple[int, Future[TopHits]]]:
    """Search every part of the database with every profile; yield query and hits in a fixed order."""
    done = 0
    with ThreadPoolExecutor(threads) as pool:
        blocks = _blocks(path)
        block = next(blocks, None) if profiles else None
        while block is not None:
            size = -(-len(block) // threads)
            parts = [block[start : start + size] for start in range(0, len(block), size)]
            tasks = [
                (i, pool.submit(_search, hmm, part, thresholds, survey.records))
                for i, hmm in profiles.items()
                for part in parts
            ]
            done += len(block)
            block = next(blocks, None)  # read while the threads search
            yield from tasks
            tell(min(done, survey.records), survey.records)


def _search(hmm: "HMM[AA]", part: "DigitalSequenceBlock[AA]", thresholds: Thresholds, records: int) -> TopHits:
    return Pipeline(AMINO, Z=records, **thresholds).search_hmm(hmm, part)


def _blocks(path: Path) -> Iterator["DigitalSequenceBlock[AA]"]:
    """Yield the database, `CHUNK` bytes at a time, without the sequences that are too long for HMMER."""
    for chunk in read_chunks(path):
        with SequenceFile(io.BytesIO(chunk), format="fasta", digital=True, alphabet=AMINO) as file:
            block = cast("DigitalSequenceBlock[AA]", file.read_block())
        if block and len(block.largest()) > LONGEST:
            block = DigitalSequenceBlock(AMINO, (sequence for sequence in block if len(sequence) <= LONGEST))
        if block:
            yield block


def _attempt(query: int, make: Callable[[], Made], failed: dict[int, UserError]) -> Made | None:
    """Return the result of `make`, or None for a query that has failed, now or before."""
    try:
        made = make()
    except FAILURES as error:
        failed.setdefault(query, UserError(f"HMMER: {str(error) or type(error).__name__}"))
    return None if query in failed else made


def _profiles(makers: "Mapping[int, Callable[[], HMM[AA]]]", failed: dict[int, UserError]) -> "dict[int, HMM[AA]]":
    """Return the profiles of the queries for which one can be made."""
    made = ((i, _attempt(i, make, failed)) for i, make in makers.items())
    return {i: profile for i, profile in made if profile is not None}


@dataclass
class _BestRows:
    """The best `most` rows of one query's alignment (None: all), collected while the database is searched."""

    most: int | None
    records: int
    threshold: float  # E-value of a domain to be included
    reported: int = 0  # HMMER's domZ: targets reported, so far
    # -score of the target, its name, number and p-value of the domain, its header and row
    rows: list[tuple[float, str, int, float, str, str]] = field(default_factory=list)

    def add(self, hits: TopHits, length: int) -> None:
        """Add the hits of one part of the database; rows on the `length` match states of the profile."""
        self.reported += len(hits.reported)
        for hit in hits.included:
            for number, domain in enumerate(hit.domains):
                if domain.pvalue * self.reported <= self.threshold:
                    one = domain.alignment
                    header = f"{hit.name}/{one.target_from}-{one.target_to} {hit.description or ''}".rstrip()
                    letters = one.target_sequence.replace("*", "x")  # a stop codon inside an insertion
                    row = "-" * (one.hmm_from - 1) + letters + "-" * (length - one.hmm_to)
                    self.rows.append((-hit.score, hit.name, number, domain.pvalue, header, row))
        if self.most is not None and len(self.rows) > 2 * self.most:  # drop rows that cannot be among the best
            self.rows.sort()
            # domZ may still grow, up to the number of records: rows below the threshold even then are certain.
            certain = np.cumsum([row[3] * self.records <= self.threshold for row in self.rows])
            del self.rows[int(np.searchsorted(certain, self.most)) + 1 :]

    def a3m(self) -> str:
        """Return rows as A3M, best target first, its domains in their order."""
        good = [row for row in sorted(self.rows) if row[3] * self.reported <= self.threshold]
        return "".join(f">{header}\n{letters}\n" for *_, header, letters in good[: self.most])


def _stockholm(hits: Sequence[TopHits]) -> str:
    """Return the text that `hmmsearch -A` writes."""
    merged = hits[0].merge(*hits[1:])
    if not any(len(hit.domains.included) for hit in merged.included):
        return NO_TEMPLATES
    alignment = merged.to_msa(AMINO, all_consensus_cols=True)
    alignment.name, alignment.author = "query", "hmmsearch (HMMER, pyhmmer)"
    text = io.BytesIO()
    alignment.write(text, "pfam")
    return text.getvalue().decode()
