"""Find relatives of held-out proteins, also if only a part of the chains is related: fragments, fusions and tandems.

Two chains are related if some stretch of their local alignment (BLOSUM62, gaps 11 + 1 per residue) pairs at least half
of the shorter chain's residues, and the share of identical pairs in it reaches both `min_identity` and Rost's curve for
the length of the stretch.  Clusters (clusters.py) ask for 0.8 coverage of both chains, so a fragment is in another one.
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
GAP_OPEN, GAP_EXTEND = 11, 1  # the first residue of a gap costs both
# Up to so many cells of alignment matrices, every pair is aligned: about 20 s of one core.
MAX_CELLS = 500_000_000
BATCH_CELLS = 4_000_000  # of the matrices that are filled together
# phmmer's filters, wider than its own, and the largest P-value of a candidate that is aligned.
FILTERS = {"F1": 0.1, "F2": 0.1, "F3": 0.1}
MAX_P_VALUE = 1e-2
LONGEST = 100_000  # residues: HMMER's limit
_CODES = np.full(256, UNKNOWN, np.uint8)
_CODES[[ord(letter) for letter in LETTERS]] = list(LETTERS.values())


def find_relatives(
    queries: Sequence[str], targets: Sequence[str], min_identity: float = MIN_IDENTITY, threads: int = 1
) -> list[set[int]]:
    """Return for each query the indices of the targets that it is related to.

    Few pairs are all aligned.  Of more, those are aligned that phmmer's filters let pass (tests/data/similar).
    min_identity: share of identical pairs, 0 to 1.
    """
    places: dict[str, list[int]] = defaultdict(list)
    for index, target in enumerate(targets):
        places[target].append(index)
    distinct = sorted(places, key=len)
    asked = list(dict.fromkeys(queries))
    cells = sum(map(len, asked)) * sum(map(len, distinct))
    every = range(len(distinct))
    candidates: Iterable[tuple[str, Sequence[int]]]
    candidates = ((q, every) for q in asked) if cells <= MAX_CELLS else _candidates(asked, distinct, threads)
    found: dict[str, set[int]] = {}
    for query, numbers in candidates:
        related = {query} | {one for one in _related(query, [distinct[n] for n in numbers], min_identity)}
        found[query] = {index for one in related for index in places.get(one, ())}
    return [found[query] for query in queries]


def _candidates(queries: Sequence[str], targets: Sequence[str], threads: int) -> Iterator[tuple[str, list[int]]]:
    """Yield each query and the numbers of the targets that phmmer's filters do not exclude, in their order."""
    amino = Alphabet.amino()

    def digital(name: int, sequence: str) -> Any:
        return TextSequence(name=f"{name}", sequence=sequence[:LONGEST]).digitize(amino)

    block = DigitalSequenceBlock(amino, (digital(i, target) for i, target in enumerate(targets)))
    asked: Any = [digital(i, query) for i, query in enumerate(queries)]
    # Z = 1: an E-value is then a P-value, whatever the number of targets.
    limits: dict[str, Any] = {"E": MAX_P_VALUE, "domE": 1e3, "Z": 1.0, "domZ": 1.0, **FILTERS}
    for query, hits in zip(queries, pyhmmer.phmmer(asked, block, cpus=threads, **limits)):
        yield query, sorted(int(hit.name) for hit in hits.reported)


def _related(query: str, targets: Sequence[str], min_identity: float) -> Iterator[str]:
    """Yield those targets, given from the shortest on, that are related to the query."""
    size = max(1, BATCH_CELLS // (len(query) * max(map(len, targets), default=1)))
    for start in range(0, len(targets), size):
        batch = targets[start : start + size]
        for target, same in zip(batch, _local_alignments(query, batch)):
            if _has_related_stretch(same, min(len(query), len(target)), min_identity):
                yield target


def _has_related_stretch(same: np.ndarray, shorter: int, min_identity: float) -> bool:
    """Return whether some stretch of an alignment's pairs is long and identical enough; same: bool [pairs]."""
    total = np.append(0, np.cumsum(same))
    for pairs in range(max(1, ceil(MIN_COVERAGE * shorter)), len(same) + 1):
        if (total[pairs:] - total[:-pairs]).max() >= max(min_identity, rost_identity(pairs)) * pairs:
            return True
    return False


def _local_alignments(query: str, targets: Sequence[str]) -> list[np.ndarray]:
    """Return for each target which pairs of the best local alignment (Smith and Waterman, Gotoh) are identical.

    The matrices of all targets are filled together, a row of the query's residue at a time.
    """
    codes = _codes(query)
    longest = max(map(len, targets))
    others = np.full((len(targets), longest), UNKNOWN, np.uint8)
    for row, target in zip(others, targets):
        row[: len(target)] = _codes(target)
    inside = np.arange(longest) < np.array([len(target) for target in targets])[:, None]
    profile = _BLOSUM62[:, others]  # [21, targets, residues]
    scores = np.zeros((len(codes) + 1, len(targets), longest + 1), np.int32)
    down = np.full((len(targets), longest), -(10**6), np.int32)  # best score that ends in a gap of the target
    ramp = GAP_EXTEND * np.arange(longest, dtype=np.int32)
    for i, code in enumerate(codes, 1):
        above, here = scores[i - 1], scores[i][:, 1:]
        np.maximum(down, above[:, 1:] - GAP_OPEN, out=down)
        down -= GAP_EXTEND
        np.maximum(above[:, :-1] + profile[code], down, out=here)
        np.maximum(here, 0, out=here)
        # A gap of the query that ends at column j began at some k < j: the best k is a running maximum.
        best = np.maximum.accumulate(here + ramp, axis=1)
        np.maximum(here[:, 1:], best[:, :-1] - (ramp[1:] + GAP_OPEN), out=here[:, 1:])
        here *= inside
    return [_trace(scores[:, n], codes, others[n]) for n in range(len(targets))]


def _trace(scores: np.ndarray, query: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return which pairs on the way back from the best score are identical, in reverse order."""
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
    """Return uint8 [N], 0 to 19, and 20 for everything else."""
    return _CODES[np.frombuffer(sequence.encode("ascii", "replace"), dtype=np.uint8)]


def _blosum62() -> np.ndarray:
    """Return gemmi's matrix as int32 [21, 21]; an unknown residue scores -1 against everything."""
    scoring = gemmi.AlignmentScoring("b")
    matrix = np.full((UNKNOWN + 1, UNKNOWN + 1), -1, np.int32)
    for a, one in enumerate(RESTYPE_3[:UNKNOWN]):
        for b, other in enumerate(RESTYPE_3[:UNKNOWN]):
            matrix[a, b] = gemmi.align_string_sequences([one], [other], [], scoring).score
    return matrix


_BLOSUM62 = _blosum62()
