"""Find relatives of held-out proteins, including fragments, fusions and tandem repeats.

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

from warpfold.data.formats.alignment import LETTERS
from warpfold.data.similar.pairwise import rost_identity
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
_CODES = np.full(256, UNKNOWN, np.uint8)
_CODES[[ord(letter) for letter in LETTERS]] = list(LETTERS.values())


def find_relatives(
    queries: Sequence[str], targets: Sequence[str], min_identity: float = MIN_IDENTITY, threads: int = 1
) -> list[set[int]]:
    """Find the related targets of each query; returns their indices.

    If there are few pairs, all are aligned. Otherwise, those that pass phmmer's filters are aligned
    (tests/data/similar). min_identity: fraction of identical pairs, 0 to 1.
    """
    indices: dict[str, list[int]] = defaultdict(list)
    for index, target in enumerate(targets):
        indices[target].append(index)
    unique_targets = sorted(indices, key=len)
    unique_queries = list(dict.fromkeys(queries))
    cells = sum(map(len, unique_queries)) * sum(map(len, unique_targets))
    candidates: Iterable[tuple[str, Sequence[int]]]
    if cells <= MAX_CELLS:
        candidates = ((query, range(len(unique_targets))) for query in unique_queries)
    else:
        candidates = _candidates(unique_queries, unique_targets, threads)
    relatives: dict[str, set[int]] = {}
    for query, numbers in candidates:
        related = {query, *_related(query, [unique_targets[n] for n in numbers], min_identity)}
        relatives[query] = {index for sequence in related for index in indices.get(sequence, ())}
    return [relatives[query] for query in queries]


def _candidates(queries: Sequence[str], targets: Sequence[str], threads: int) -> Iterator[tuple[str, list[int]]]:
    """Yield each query with the numbers of the targets that pass phmmer's filters, ascending."""
    amino = Alphabet.amino()

    def digital(name: int, sequence: str) -> Any:
        return TextSequence(name=f"{name}", sequence=sequence[:MAX_RESIDUES]).digitize(amino)

    block = DigitalSequenceBlock(amino, (digital(i, target) for i, target in enumerate(targets)))
    digital_queries: Any = [digital(i, query) for i, query in enumerate(queries)]
    # With Z = 1, an E-value is a P-value, independent of the number of targets.
    limits: dict[str, Any] = {"E": MAX_P_VALUE, "domE": 1e3, "Z": 1.0, "domZ": 1.0, **FILTERS}
    for query, hits in zip(queries, pyhmmer.phmmer(digital_queries, block, cpus=threads, **limits)):
        yield query, sorted(int(hit.name) for hit in hits.reported)


def _related(query: str, targets: Sequence[str], min_identity: float) -> Iterator[str]:
    """Yield the targets that are related to the query. The targets are sorted by length."""
    size = max(1, BATCH_CELLS // (len(query) * max(map(len, targets), default=1)))
    for start in range(0, len(targets), size):
        batch = targets[start : start + size]
        for target, same in zip(batch, _local_alignments(query, batch)):
            if _has_related_segment(same, min(len(query), len(target)), min_identity):
                yield target


def _has_related_segment(same: np.ndarray, shorter: int, min_identity: float) -> bool:
    """Return whether a segment of an alignment is long enough and identical enough.

    same: bool [pairs], whether the residues of each pair are equal. shorter: length of the shorter chain.
    """
    total = np.append(0, np.cumsum(same))
    for pairs in range(max(1, ceil(MIN_COVERAGE * shorter)), len(same) + 1):
        if (total[pairs:] - total[:-pairs]).max() >= max(min_identity, rost_identity(pairs)) * pairs:
            return True
    return False


def _local_alignments(query: str, targets: Sequence[str]) -> list[np.ndarray]:
    """Align a query locally to each target (Smith and Waterman, Gotoh); returns whether each aligned pair is equal.

    The matrices of all targets are computed together, row by row.
    """
    codes = _codes(query)
    longest = max(map(len, targets))
    others = np.full((len(targets), longest), UNKNOWN, np.uint8)
    for row, target in zip(others, targets):
        row[: len(target)] = _codes(target)
    inside = np.arange(longest) < np.array([len(target) for target in targets])[:, None]
    profile = _BLOSUM62[:, others]  # [21, targets, residues]
    scores = np.zeros((len(codes) + 1, len(targets), longest + 1), np.int32)
    # The best score that ends in a gap of the target.
    down = np.full((len(targets), longest), -(10**6), np.int32)
    ramp = GAP_EXTEND * np.arange(longest, dtype=np.int32)
    for i, code in enumerate(codes, 1):
        above, here = scores[i - 1], scores[i][:, 1:]
        np.maximum(down, above[:, 1:] - GAP_OPEN, out=down)
        down -= GAP_EXTEND
        np.maximum(above[:, :-1] + profile[code], down, out=here)
        np.maximum(here, 0, out=here)
        # A gap of the query that ends at column j starts at some k < j. The best k is a running maximum.
        best = np.maximum.accumulate(here + ramp, axis=1)
        np.maximum(here[:, 1:], best[:, :-1] - (ramp[1:] + GAP_OPEN), out=here[:, 1:])
        here *= inside
    return [_trace(scores[:, n], codes, others[n]) for n in range(len(targets))]


def _trace(scores: np.ndarray, query: np.ndarray, target: np.ndarray) -> np.ndarray:
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


def _codes(sequence: str) -> np.ndarray:
    """Encode a sequence as uint8 [N]: 0 to 19, and 20 for other letters."""
    return _CODES[np.frombuffer(sequence.encode("ascii", "replace"), dtype=np.uint8)]


def _blosum62() -> np.ndarray:
    """Read gemmi's BLOSUM62 as int32 [21, 21]. An unknown residue scores -1 with every residue."""
    scoring = gemmi.AlignmentScoring("b")
    matrix = np.full((UNKNOWN + 1, UNKNOWN + 1), -1, np.int32)
    for a, name in enumerate(RESTYPE_3[:UNKNOWN]):
        for b, other in enumerate(RESTYPE_3[:UNKNOWN]):
            matrix[a, b] = gemmi.align_string_sequences([name], [other], [], scoring).score
    return matrix


_BLOSUM62 = _blosum62()
