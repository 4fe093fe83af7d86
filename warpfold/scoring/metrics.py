"""Compute the similarity of two structures (lDDT, RMSD, TM-score, GDT), and align sequences to pair residues.

All functions use NumPy and compute in float64. Coordinates are in angstrom. Row i of the prediction corresponds to row
i of the reference, and masks mark the atoms that each of them has.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

# Mariani et al. 2013, in angstrom: lDDT counts pairs nearer than the radius in the reference, and a pair is preserved
# if its distance differs by less than a tolerance.
LDDT_RADIUS = 15.0
LDDT_TOLERANCES = (0.5, 1.0, 2.0, 4.0)
# Zemla 2003: distances in angstrom of the fractions that GDT averages.
GDT_TS = (1.0, 2.0, 4.0, 8.0)
GDT_HA = (0.5, 1.0, 2.0, 4.0)
# Rows of a distance matrix, and distances after superpositions, that are computed at a time. Both bound memory.
BLOCK = 256
MAX_DISTANCES = 1_000_000
# Most fragments of each size that are superposed to start a search.
MAX_FRAGMENTS = 1024

Array = np.ndarray


def lddt(predicted: Array, truth: Array, mask: Array, predicted_mask: Array | None = None) -> float:
    """Compute lDDT over pairs of atoms of different residues, 0 to 1 (Mariani et al. 2013, no stereochemical checks).

    predicted, truth: [N, A, 3]; with A = 1 and the Ca the result is lDDT-Ca. mask: [N, A], the atoms of the reference.
    predicted_mask: [N, A], the atoms of the prediction, default all; missing atoms count as wrong.
    Returns NaN if there are no pairs.
    """
    preserved, pairs = lddt_counts(predicted, truth, mask, predicted_mask)
    return float(preserved.sum() / pairs.sum()) if pairs.any() else float("nan")


def lddt_per_residue(predicted: Array, truth: Array, mask: Array, predicted_mask: Array | None = None) -> Array:
    """Compute lDDT of each residue [N] over the pairs that contain it; NaN for a residue without pairs."""
    preserved, pairs = lddt_counts(predicted, truth, mask, predicted_mask)
    # 0 / 0 is NaN.
    with np.errstate(invalid="ignore"):
        return preserved / pairs


def lddt_counts(
    predicted: Array,
    truth: Array,
    mask: Array,
    predicted_mask: Array | None = None,
    others: Array | None = None,
    ours: Array | None = None,
) -> tuple[Array, Array]:
    """Count the preserved pairs (mean over the tolerances) and all pairs of each residue: two arrays [N].

    ours, others: bool [N, A] or [N, 1], the atoms that count as first and as second atom of a pair; default all. The
    other arguments are those of `lddt`.
    """
    mask = np.asarray(mask, bool)
    present = np.ones_like(mask) if predicted_mask is None else np.asarray(predicted_mask, bool)
    first = mask if ours is None else mask & np.asarray(ours, bool)
    second = mask if others is None else mask & np.asarray(others, bool)
    residue, second_residue = np.nonzero(first)[0], np.nonzero(second)[0]
    truth, predicted = np.asarray(truth, np.float64), np.asarray(predicted, np.float64)
    first_predicted, second_predicted = predicted[first], predicted[second]
    first_present, second_present = present[first], present[second]
    preserved_counts, pairs = np.zeros(len(mask)), np.zeros(len(mask))
    for i, j, distance in near_pairs(truth[first], truth[second], LDDT_RADIUS):
        different = residue[i] != second_residue[j]
        i, j, distance = i[different], j[different], distance[different]
        predicted_distance = np.linalg.norm(first_predicted[i] - second_predicted[j], axis=-1)
        error = np.abs(predicted_distance - distance)
        preserved = np.mean([error < tolerance for tolerance in LDDT_TOLERANCES], axis=0)
        preserved *= first_present[i] & second_present[j]
        preserved_counts += np.bincount(residue[i], preserved, minlength=len(mask))
        pairs += np.bincount(residue[i], minlength=len(mask))
    return preserved_counts, pairs


def near_pairs(a: Array, b: Array, within: float) -> Iterator[tuple[Array, Array, Array]]:
    """Find all pairs of points of a [N, 3] and b [M, 3] nearer than `limit`; yields indices i, j and distances.

    Works in blocks of a, so memory grows as M. A bounding box preselects the points of b for each block.
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    for start in range(0, len(a), BLOCK):
        block = a[start : start + BLOCK]
        low, high = block.min(0) - within, block.max(0) + within
        boxed = np.flatnonzero(((b >= low) & (b <= high)).all(-1))
        # Squared distances by a matrix product are fast but inaccurate, so they only preselect, with a margin.
        centre = block.mean(0)
        rows, columns = block - centre, b[boxed] - centre
        squares = np.sum(rows**2, -1)[:, None] + np.sum(columns**2, -1) - 2 * rows @ columns.T
        i, j = np.nonzero(squares < (within + 1e-3) ** 2)
        i, j = i + start, boxed[j]
        distance = np.linalg.norm(a[i] - b[j], axis=-1)
        near = distance < within
        yield i[near], j[near], distance[near]


def rename_symmetric(predicted: Array, truth: Array, mask: Array, predicted_mask: Array, swap: Array) -> Array:
    """Rename the atoms of symmetric side chains (Asp, Glu, Phe, Tyr) so that the lDDT of each residue is highest.

    swap: [N, A], the index of each atom's symmetric counterpart, or its own index. Each residue is scored by its pairs
    with unambiguous atoms of other residues (Mariani et al. 2013). Returns positions [N, A, 3].
    """
    ambiguous = swap != np.arange(swap.shape[1])
    rows = np.arange(len(swap))[:, None]
    flipped, flipped_mask = predicted[rows, swap], predicted_mask[rows, swap]
    scores = []
    for positions, present in ((predicted, predicted_mask), (flipped, flipped_mask)):
        preserved, _ = lddt_counts(positions, truth, mask, present, others=~ambiguous)
        scores.append(preserved)
    better = (scores[1] > scores[0]) & (flipped_mask == predicted_mask).all(-1)
    return np.where(better[:, None, None], flipped, predicted)


def superpose(mobile: Array, target: Array, weights: Array | None = None) -> tuple[Array, Array]:
    """Compute the rotation [*, 3, 3] and translation [*, 3] that superpose mobile on target [*, N, 3] (Kabsch 1976).

    `mobile @ rotation.T + translation` minimises the weighted squared distance to target; weights: [*, N], >= 0.
    """
    mobile, target = np.asarray(mobile, np.float64), np.asarray(target, np.float64)
    weights = np.ones(mobile.shape[:-1]) if weights is None else np.asarray(weights, np.float64)
    share = weights / np.maximum(weights.sum(-1, keepdims=True), 1e-12)
    centre = np.einsum("...n,...nd->...d", share, mobile)
    goal = np.einsum("...n,...nd->...d", share, target)
    # Matrix products instead of centred copies: a batch of weights may share one pair of structures.
    covariance = np.swapaxes(mobile * share[..., None], -1, -2) @ target - centre[..., :, None] * goal[..., None, :]
    u, _, vt = np.linalg.svd(covariance)
    handedness = np.sign(np.linalg.det(u @ vt))
    # Flipping the last axis excludes mirror images.
    u[..., :, -1] *= handedness[..., None]
    rotation = np.swapaxes(u @ vt, -1, -2)
    return rotation, goal - np.einsum("...ij,...j->...i", rotation, centre)


def rmsd(predicted: Array, truth: Array) -> float:
    """Compute the RMSD of points [N, 3] after the best superposition, in angstrom; NaN if N is 0."""
    if not len(truth):
        return float("nan")
    rotation, translation = superpose(predicted, truth)
    superposed = np.asarray(predicted, np.float64) @ rotation.T + translation
    return float(np.sqrt(np.mean(np.sum((superposed - truth) ** 2, -1))))


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """TM-score and GDT, 0 to 1, each at the superposition that maximises it."""

    tm: float
    gdt_ts: float
    gdt_ha: float


def tm_d0(length: int) -> float:
    """Compute the distance in angstrom at which a TM-score term is 1/2 (Zhang & Skolnick 2004, eq. 5).

    length: residues of the reference.
    """
    return max(0.5, 1.24 * np.cbrt(length - 15) - 1.8)


def overlap(predicted: Array, truth: Array, length: int | None = None) -> Overlap:
    """Compute TM-score, GDT-TS and GDT-HA of paired Ca atoms [N, 3], each at the superposition that maximises it.

    length: residues of the reference, paired or not, by which the scores are normalised; default N. The search tries
    the same superpositions as the TM-score program (C++ version; Zhang & Skolnick 2004) and reproduces every digit that
    the program prints, for chains of up to `MAX_FRAGMENTS` residues.
    """
    n = len(truth)
    length = n if length is None else length
    if n == 0:
        return Overlap(tm=0.0, gdt_ts=0.0, gdt_ha=0.0)
    # Centring avoids a loss of digits far from the origin.
    predicted = np.asarray(predicted, np.float64) - np.mean(predicted, 0, dtype=np.float64)
    truth = np.asarray(truth, np.float64) - np.mean(truth, 0, dtype=np.float64)
    d0, tm = tm_d0(length), 0.0
    for squares in _superpositions(predicted, truth, d0):
        tm = max(tm, float(np.sum(1 / (1 + squares / d0**2), -1).max()))
    # The program computes GDT in a separate search with a d0 that is larger by 0.8, so this search does as well.
    counts = dict.fromkeys((*GDT_TS, *GDT_HA), 0)
    for squares in _superpositions(predicted, truth, tm_d0(n) + 0.8):
        for cutoff, highest in counts.items():
            counts[cutoff] = max(highest, int(np.count_nonzero(squares < cutoff**2, axis=-1).max()))
    return Overlap(
        tm=tm / length,
        gdt_ts=float(np.mean([counts[cutoff] for cutoff in GDT_TS])) / length,
        gdt_ha=float(np.mean([counts[cutoff] for cutoff in GDT_HA])) / length,
    )


def _superpositions(predicted: Array, truth: Array, d0: float) -> Iterator[Array]:
    """Yield the squared distances [S, N] of paired points after each superposition that the TM-score program tries.

    The search superposes fragments of N, N/2 ... N/16 and 4 residues, at most `MAX_FRAGMENTS` of each size. It then
    superposes the residues that came near, and repeats this until their set no longer changes, at most 20 times.
    """
    n = len(truth)
    reach = float(np.clip(d0, 4.5, 8.0))
    smallest = min(4, n)
    sizes = [size for size in (n // 2**i for i in range(5)) if size > smallest]
    for size in (*sizes, smallest):
        starts = np.unique(np.linspace(0, n - size, min(MAX_FRAGMENTS, n - size + 1)).astype(int))[:, None]
        is_selected = (np.arange(n) >= starts) & (np.arange(n) < starts + size)
        # Sets of residues that were superposed before lead to nothing new.
        seen_sets: set[bytes] = set()
        for limit in [reach - 1] + [reach + 1] * 20:
            parts = []
            for block in np.array_split(is_selected, -(-is_selected.size // MAX_DISTANCES)):
                rotation, translation = superpose(predicted[None], truth[None], block)
                superposed = predicted @ np.swapaxes(rotation, -1, -2) + translation[:, None]
                squares = np.sum((superposed - truth) ** 2, -1)
                yield squares
                # The residues nearer than `limit`. The limit grows in steps of 0.5 until there are three.
                third = np.sqrt(np.partition(squares, min(2, n - 1), axis=-1)[:, min(2, n - 1)])
                steps = np.maximum(0, np.floor((third - limit) / 0.5) + 1)
                parts.append(squares < ((limit + 0.5 * steps) ** 2)[:, None])
            is_selected = np.concatenate(parts)
            rows = {bytes(row): i for i, row in enumerate(np.packbits(is_selected, axis=-1))}
            new = [i for row, i in rows.items() if row not in seen_sets]
            if not new:
                break
            seen_sets |= rows.keys()
            is_selected = is_selected[new]


# Scores of an alignment. Only identity counts, since the sequences are versions of one protein or close relatives.
MATCH, MISMATCH, GAP_OPENING, GAP_EXTENSION = 2.0, -1.0, 5.0, 0.5


def align(a: str, b: str) -> Array:
    """Align two sequences globally with affine gaps that are free at the ends; returns paired indices [K, 2].

    A gap of k residues costs GAP_OPENING + GAP_EXTENSION * (k - 1) (Gotoh 1982). X scores 0 against every residue.
    Time and memory grow as len(a) * len(b).
    """
    codes = [np.frombuffer(s.encode("latin-1", "replace"), np.uint8) for s in (a, b)]
    n, m = map(len, codes)
    unknown = ord("X")
    columns = np.arange(m + 1)
    # Score of the best alignment of a[:i] with b[:j]. It starts at zero because gaps at the start are free.
    score = np.zeros(m + 1)
    # Score of the best alignment that ends with a residue of a against a gap.
    up = np.full(m + 1, -np.inf)
    # 0 means paired, 1 a gap in b, and 2 a gap in a.
    steps, up_opens, left_from = (np.zeros((n + 1, m + 1), dtype) for dtype in (np.int8, bool, np.int32))
    for i in range(1, n + 1):
        # Gaps after the end of a are free, as are those after the end of b below.
        is_free = i == n
        same = np.where(codes[1] == codes[0][i - 1], MATCH, MISMATCH)
        same[(codes[1] == unknown) | (codes[0][i - 1] == unknown)] = 0.0
        opens = np.full(m + 1, GAP_OPENING)
        extends = np.full(m + 1, GAP_EXTENSION)
        opens[m] = extends[m] = 0.0
        up_opens[i] = score - opens >= up - extends
        up = np.maximum(score - opens, up - extends)
        paired = np.concatenate([[0.0], score[:-1] + same])
        without_gap_in_a = np.maximum(paired, up)
        # A gap in a that ends at j and began after k costs o + e * (j - k - 1): a running maximum over k.
        o, e = (0.0, 0.0) if is_free else (GAP_OPENING, GAP_EXTENSION)
        reached = without_gap_in_a + e * columns
        leader = np.maximum.accumulate(reached)
        origin = np.maximum.accumulate(np.where(reached >= leader, columns, 0))
        left = np.concatenate([[-np.inf], leader[:-1] - o - e * (columns[1:] - 1)])
        steps[i] = np.where(left > without_gap_in_a, 2, np.where(paired >= up, 0, 1))
        left_from[i, 1:] = origin[:-1]
        score = np.maximum(without_gap_in_a, left)
    # Trace the best path from the last corner back to an edge.
    i, j, pairs = n, m, []
    while i > 0 and j > 0:
        if steps[i, j] == 0:
            i, j = i - 1, j - 1
            pairs.append((i, j))
        elif steps[i, j] == 2:
            j = int(left_from[i, j])
        else:
            while not up_opens[i, j]:
                i -= 1
            i -= 1
    return np.array(pairs[::-1], np.int64).reshape(len(pairs), 2)
