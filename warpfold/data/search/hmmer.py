"""Run jackhmmer and hmmsearch in this process with pyhmmer, on databases larger than memory.

A database is read once for many queries in chunks, which threads search in parallel. The results do not depend on the
chunks: E-values are those of the whole database, and thresholds that need the total number of hits are applied at the
end.
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
MAX_RESIDUES = 100_000  # HMMER's limit for queries and targets
NO_TEMPLATES = "# STOCKHOLM 1.0\n//\n"
Made = TypeVar("Made")
# Errors of a query that do not stop the other queries.
FAILURES = (MemoryError, EaselError)

# HMMER's thresholds by its names: E-values to report and include a target and a domain, and the three filters.
Thresholds = dict[str, Any]


class HmmerEngine(Engine):
    """Base class of jackhmmer and hmmsearch, which search FASTA databases."""

    def queries_per_pass(self, threads: int) -> int:
        """Return the number of queries that share a pass over a database.

        One thread reads as fast as six threads search for a query. With more queries, a stopped run would lose more.
        """
        return max(4, threads)

    def survey(self, path: Path, tell: Tell) -> Survey:
        return survey_fasta(path, tell)


@dataclass(frozen=True)
class Jackhmmer(HmmerEngine):
    """jackhmmer with AlphaFold2's settings for UniRef90 and MGnify (Supp. 1.2.2).

    These are -N 1 -E 1e-4 --incE 1e-4 --F1 5e-4 --F2 5e-5 --F3 5e-7, and jackhmmer's defaults (--domE 10, --incdomE
    1e-3: manual page). iterations: 1 to 3; later iterations use a profile of the included hits.
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
        profiles = _build({i: partial(_sequence_profile, query.sequence) for i, query in enumerate(queries)}, failed)
        for iteration in range(self.iterations):
            limit = None if max_rows is None else max_rows - 1
            best |= {i: _BestRows(limit, survey.records, self.thresholds["incdomE"]) for i in profiles}
            all_hits: dict[int, list[TopHits]] = {i: [] for i in profiles}
            for i, part in _scan(profiles, path, survey, self.thresholds, threads, tell):
                hits = _attempt(i, part.result, failed)
                if hits is not None:
                    best[i].add(hits, profiles[i].M)
                    if iteration + 1 < self.iterations:
                        all_hits[i].append(hits)
            next_makers: dict[int, Callable[[], HMM[AA]]] = {}
            for i in [i for i in profiles if i not in failed]:
                names = {hit.name for hits in all_hits[i] for hit in hits.included}
                # Without new hits, the search has converged, or this was the last iteration.
                if names - included[i]:
                    included[i] |= names
                    next_makers[i] = partial(_next_profile, queries[i].sequence, all_hits[i])
            profiles = _build(next_makers, failed)
        return [failed.get(i) or best[i].a3m() for i in range(len(queries))]


@dataclass(frozen=True)
class Hmmsearch(HmmerEngine):
    """hmmsearch for template hits as in AlphaFold-Multimer.

    A profile of an alignment with the query's residues as columns (hmmbuild --hand) is searched in the sequences of the
    PDB with the options that AlphaFold 2.2 logs: --F1 .1 --F2 .1 --F3 .1 -E 100 --domE 100 --incE 100 --incdomE 100.
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
        """Return Stockholm text for each query as `hmmsearch -A` writes it.

        There is a row per domain, best first, with the query's residues as match columns (#=GC RF). `max_rows` is
        ignored, because templates are chosen later by their dates.
        """
        failed: dict[int, UserError] = {}
        all_hits: dict[int, list[TopHits]] = {i: [] for i in range(len(queries))}
        profiles = _build({i: partial(_alignment_profile, query) for i, query in enumerate(queries)}, failed)
        for i, part in _scan(profiles, path, survey, self.thresholds, threads, tell):
            hits = _attempt(i, part.result, failed)
            if hits is not None:
                all_hits[i].append(hits)
        return [failed.get(i) or _stockholm(hits) for i, hits in all_hits.items()]


def _sequence_profile(sequence: str) -> "HMM[AA]":
    """Build the profile of a sequence with BLOSUM62, as in phmmer and in jackhmmer's first iteration."""
    query = TextSequence(name="query", sequence=sequence).digitize(AMINO)
    return Builder(AMINO).build(query, Background(AMINO))[0]


def _next_profile(sequence: str, hits: Sequence[TopHits]) -> "HMM[AA]":
    """Build the profile of the query and all included hits, with the query's residues as match columns."""
    query = TextSequence(name="query", sequence=sequence).digitize(AMINO)
    traces = [Trace.from_sequence(query)]
    alignment = hits[0].merge(*hits[1:]).to_msa(AMINO, [query], traces, digitize=True, all_consensus_cols=True)
    alignment.name = "query"
    return Builder(AMINO, architecture="hand").build_msa(cast("DigitalMSA[AA]", alignment), Background(AMINO))[0]


def _alignment_profile(query: SearchQuery) -> "HMM[AA]":
    """Build the profile of a query and its A3M rows, with a match state for every residue of the query."""
    text = io.BytesIO(f">query\n{query.sequence}\n{query.rows}".encode())
    # A3M is A2M without dots.
    with MSAFile(text, format="a2m", digital=True, alphabet=AMINO) as file:
        alignment = cast("DigitalMSA[AA]", file.read())
    alignment.name = "query"
    return Builder(AMINO, architecture="hand").build_msa(alignment, Background(AMINO))[0]


def _scan(
    profiles: Mapping[int, "HMM[AA]"], path: Path, survey: Survey, thresholds: Thresholds, threads: int, tell: Tell
) -> Iterator[tuple[int, Future[TopHits]]]:
    """Search every block of the database with every profile. Yields query and future hits in a fixed order."""
    done = 0
    with ThreadPoolExecutor(threads) as pool:
        blocks = _read_blocks(path)
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
            # The next block is read while the threads search.
            block = next(blocks, None)
            yield from tasks
            tell(min(done, survey.records), survey.records)


def _search(hmm: "HMM[AA]", part: "DigitalSequenceBlock[AA]", thresholds: Thresholds, records: int) -> TopHits:
    """Search a block with a profile. records: of the whole database, for E-values."""
    return Pipeline(AMINO, Z=records, **thresholds).search_hmm(hmm, part)


def _read_blocks(path: Path) -> Iterator["DigitalSequenceBlock[AA]"]:
    """Yield the database in blocks of `CHUNK` bytes, without sequences that are too long for HMMER."""
    for chunk in read_chunks(path):
        with SequenceFile(io.BytesIO(chunk), format="fasta", digital=True, alphabet=AMINO) as file:
            block = cast("DigitalSequenceBlock[AA]", file.read_block())
        if len(block.largest()) > MAX_RESIDUES:
            block = DigitalSequenceBlock(AMINO, (sequence for sequence in block if len(sequence) <= MAX_RESIDUES))
        if block:
            yield block


def _attempt(query: int, make: Callable[[], Made], failed: dict[int, UserError]) -> Made | None:
    """Call `make` and record a failure of the query. Returns None if the query has failed now or before."""
    try:
        result = make()
    except FAILURES as error:
        failed.setdefault(query, UserError(f"HMMER: {str(error) or type(error).__name__}"))
    return None if query in failed else result


def _build(makers: "Mapping[int, Callable[[], HMM[AA]]]", failed: dict[int, UserError]) -> "dict[int, HMM[AA]]":
    """Build the profiles of queries, and record failures."""
    profiles = ((i, _attempt(i, make, failed)) for i, make in makers.items())
    return {i: profile for i, profile in profiles if profile is not None}


@dataclass
class _BestRows:
    """The best `limit` rows of a query's alignment (None: all), collected during the search.

    threshold: E-value for including a domain. reported: HMMER's domZ, the number of reported targets so far. rows:
    negative score and name of the target, number and p-value of the domain, header and row.
    """

    limit: int | None
    records: int
    threshold: float
    reported: int = 0
    rows: list[tuple[float, str, int, float, str, str]] = field(default_factory=list)

    def add(self, hits: TopHits, length: int) -> None:
        """Add the hits of a block, as rows on the `length` match states of the profile."""
        self.reported += len(hits.reported)
        for hit in hits.included:
            for number, domain in enumerate(hit.domains):
                if domain.pvalue * self.reported <= self.threshold:
                    hit_range = domain.alignment
                    header = f"{hit.name}/{hit_range.target_from}-{hit_range.target_to} {hit.description or ''}"
                    # A stop codon may occur in an insertion.
                    letters = hit_range.target_sequence.replace("*", "x")
                    row = "-" * (hit_range.hmm_from - 1) + letters + "-" * (length - hit_range.hmm_to)
                    self.rows.append((-hit.score, hit.name, number, domain.pvalue, header.rstrip(), row))
        # Drop rows that cannot be among the best.
        if self.limit is not None and len(self.rows) > 2 * self.limit:
            self.rows.sort()
            # domZ may grow up to the number of records. Rows that pass the threshold even then are certain.
            certain = np.cumsum([row[3] * self.records <= self.threshold for row in self.rows])
            del self.rows[int(np.searchsorted(certain, self.limit)) + 1 :]

    def a3m(self) -> str:
        """Format the rows as A3M, best target first, with its domains in order."""
        included = [row for row in sorted(self.rows) if row[3] * self.reported <= self.threshold]
        return "".join(f">{header}\n{letters}\n" for *_, header, letters in included[: self.limit])


def _stockholm(hits: Sequence[TopHits]) -> str:
    """Format hits as `hmmsearch -A` does."""
    merged = hits[0].merge(*hits[1:])
    if not any(len(hit.domains.included) for hit in merged.included):
        return NO_TEMPLATES
    alignment = merged.to_msa(AMINO, all_consensus_cols=True)
    alignment.name, alignment.author = "query", "hmmsearch (HMMER, pyhmmer)"
    text = io.BytesIO()
    alignment.write(text, "pfam")
    return text.getvalue().decode()
