"""Find relatives of proteins, including fragments, fusions and tandem repeats, and the identity with the nearest one.

Two chains are related if a segment of their local alignment (BLOSUM62, gap cost 11 + 1 per residue) pairs at least half
of the shorter chain's residues, and if the fraction of identical pairs in it reaches both `min_identity` and Rost's
curve for the length of the segment. Clusters (clusters.py) require a coverage of 0.8 of both chains, so they separate
a fragment from the whole chain.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import ceil
from typing import Any

import gemmi
import numpy as np
import pyhmmer
from pyhmmer.easel import Alphabet, DigitalSequenceBlock, TextSequence

from warpfold.data.similar.pairwise import residue_codes, rost_identity
from warpfold.geometry.residue import RESTYPE_3, UNKNOWN

MIN_IDENTITY = 0.3  # of the paired residues
MIN_COVERAGE = 0.5  # of the shorter chain
# The first residue of a gap costs both.
GAP_OPEN, GAP_EXTEND = 11, 1
# Every pair is aligned if all alignment matrices together have at most this number of cells, about 20 s on one core.
MAX_CELLS = 500_000_000
# Cells of the matrices that are computed together.
BATCH_CELLS = 4_000_000
# phmmer's filters, less strict than its defaults, and the largest P-value of a candidate that is aligned.
FILTERS = {"F1": 0.1, "F2": 0.1, "F3": 0.1}
MAX_P_VALUE = 1e-2
MAX_RESIDUES = 100_000  # HMMER's limit
# Largest E-value of `nearest_identities` in the whole set. Hits above it count as chance.
E_VALUE = 1e-3


def find_relatives(
    queries: Sequence[str], targets: Sequence[str], min_identity: float = MIN_IDENTITY, threads: int = 1
) -> list[set[int]]:
    """Find the related targets of each query; returns their indices.

    If there are few pairs, all are aligned. Otherwise, those that pass phmmer's filters are aligned
    (tests/data/similar). min_identity: fraction of identical pairs, 0 to 1. Empty sequences have no relatives.
    """
    indices: dict[str, list[int]] = defaultdict(list)
    for index, target in enumerate(targets):
        indices[target].append(index)
    # The sequence of an unreadable chain is empty. It has no relatives, and phmmer crashes on it.
    unique_targets = sorted(filter(None, indices), key=len)
    unique_queries = list(dict.fromkeys(filter(None, queries)))
    cells = sum(map(len, unique_queries)) * sum(map(len, unique_targets))
    candidates: Iterable[tuple[str, Sequence[int]]]
    if cells <= MAX_CELLS:
        candidates = ((query, range(len(unique_targets))) for query in unique_queries)
    else:
        # With Z = 1, an E-value is a P-value, independent of the number of targets.
        limits = {"E": MAX_P_VALUE, "domE": 1e3, "Z": 1.0, "domZ": 1.0, **FILTERS}
        all_hits = zip(unique_queries, _run_phmmer(unique_queries, unique_targets, threads, limits))
        candidates = ((query, sorted(int(hit.name) for hit in hits.reported)) for query, hits in all_hits)
    relatives: dict[str, set[int]] = {}
    for query, numbers in candidates:
        sequences = [unique_targets[n] for n in numbers]  # by length
        batch_size = max(1, BATCH_CELLS // (len(query) * max(map(len, sequences), default=1)))
        related = {query}
        for start in range(0, len(sequences), batch_size):
            batch = sequences[start : start + batch_size]
            for target, same in zip(batch, _align_locally(query, batch)):
                # Search for a segment that is long enough and identical enough.
                shortest = ceil(MIN_COVERAGE * min(len(query), len(target)))
                total = np.append(0, np.cumsum(same))
                if any(
                    (total[pairs:] - total[:-pairs]).max() >= max(min_identity, rost_identity(pairs)) * pairs
                    for pairs in range(shortest, len(same) + 1)
                ):
                    related.add(target)
        relatives[query] = {index for sequence in related for index in indices.get(sequence, ())}
    return [relatives.get(query, set()) for query in queries]


def _run_phmmer(queries: Sequence[str], targets: Sequence[str], threads: int, limits: dict[str, Any]) -> Iterator[Any]:
    """Run phmmer; yields the hits of each query, which are named by their numbers in `targets`."""
    amino = Alphabet.amino()
    digital: list[Any] = [
        [TextSequence(name=f"{i}", sequence=s[:MAX_RESIDUES]).digitize(amino) for i, s in enumerate(sequences)]
        for sequences in (queries, targets)
    ]
    return iter(pyhmmer.phmmer(digital[0], DigitalSequenceBlock(amino, digital[1]), cpus=threads, **limits))


def nearest_identities(queries: Sequence[str], sequences: Sequence[str], threads: int = 1) -> list[float]:
    """Compute for each query the largest identity with any of the sequences, 0 to 1; 0 without a relative.

    The identity is the fraction of the query's residues that are equal in the local alignments with one sequence
    (phmmer, E-value at most 1e-3), so a relative of a fragment counts for that fragment. It is 1 if a sequence contains
    the query.
    """
    unique = list(dict.fromkeys(sequence for sequence in sequences if 0 < len(sequence) <= MAX_RESIDUES))
    joined = "\n".join(unique)
    identities = []
    for query, hits in zip(queries, _run_phmmer(queries, unique, threads, {"E": E_VALUE, "incE": E_VALUE})):
        best = len(query) if query in joined else 0
        for hit in hits.reported:
            same = set[int]()
            for domain in hit.domains.reported:
                # Insertions are lower case. Match columns are upper case, or "-" where the target has a gap.
                aligned = [letter for letter in domain.alignment.target_sequence if not letter.islower()]
                start = domain.alignment.hmm_from - 1
                same |= {i for i, letter in enumerate(aligned, start) if letter == query[i]}
            best = max(best, len(same))
        identities.append(best / len(query))
    return identities


def _align_locally(query: str, targets: Sequence[str]) -> list[np.ndarray]:
    """Align a query locally to each target (Smith and Waterman, Gotoh); returns whether each aligned pair is equal.

    The matrices of all targets are computed together, row by row.
    """
    codes = residue_codes(query)
    longest = max(map(len, targets))
    # Unknown residues pad the targets. All their scores are negative, so no best alignment contains them.
    other_codes = np.full((len(targets), longest), UNKNOWN, np.uint8)
    for row, target in zip(other_codes, targets):
        row[: len(target)] = residue_codes(target)
    profile = _BLOSUM62[:, other_codes]  # [21, targets, residues]
    scores = np.zeros((len(codes) + 1, len(targets), longest + 1), np.int32)
    # The best score that ends in a gap of the target.
    gap_scores = np.full((len(targets), longest), -(10**6), np.int32)
    ramp = GAP_EXTEND * np.arange(longest, dtype=np.int32)
    for i, code in enumerate(codes, 1):
        above, row_scores = scores[i - 1], scores[i][:, 1:]
        np.maximum(gap_scores, above[:, 1:] - GAP_OPEN, out=gap_scores)
        gap_scores -= GAP_EXTEND
        np.maximum(above[:, :-1] + profile[code], gap_scores, out=row_scores)
        np.maximum(row_scores, 0, out=row_scores)
        # A gap of the query that ends at column j starts at some k < j. The best k is a running maximum.
        best = np.maximum.accumulate(row_scores + ramp, axis=1)
        np.maximum(row_scores[:, 1:], best[:, :-1] - (ramp[1:] + GAP_OPEN), out=row_scores[:, 1:])
    return [_trace_back(scores[:, n], codes, other_codes[n]) for n in range(len(targets))]


def _trace_back(scores: np.ndarray, query: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Trace an alignment back from its best score; returns in reverse order whether each pair is equal."""
    i, j = (int(n) for n in np.unravel_index(np.argmax(scores), scores.shape))
    same = list[bool]()
    while (score := int(scores[i, j])) > 0:
        a, b = int(query[i - 1]), int(target[j - 1])
        if score == int(scores[i - 1, j - 1]) + int(_BLOSUM62[a, b]):
            same.append(a == b != UNKNOWN)
            i, j = i - 1, j - 1
            continue
        gaps_up = np.flatnonzero(scores[i - 1 :: -1, j] - GAP_OPEN - GAP_EXTEND * np.arange(1, i + 1) == score)
        if len(gaps_up):
            i -= int(gaps_up[0]) + 1
        else:
            gaps_left = np.flatnonzero(scores[i, j - 1 :: -1] - GAP_OPEN - GAP_EXTEND * np.arange(1, j + 1) == score)
            j -= int(gaps_left[0]) + 1
    return np.array(same, bool)


def _read_blosum62() -> np.ndarray:
    """Read gemmi's BLOSUM62 as int32 [21, 21]. An unknown residue scores -1 with every residue."""
    scoring = gemmi.AlignmentScoring("b")
    matrix = np.full((UNKNOWN + 1, UNKNOWN + 1), -1, np.int32)
    for a, name in enumerate(RESTYPE_3[:UNKNOWN]):
        for b, other in enumerate(RESTYPE_3[:UNKNOWN]):
            matrix[a, b] = gemmi.align_string_sequences([name], [other], [], scoring).score
    return matrix


_BLOSUM62 = _read_blosum62()
