"""Measure how similar two structures are: lDDT, RMSD, TM-score, GDT; align the sequences to pair residues.

NumPy only, float64 inside, angstrom.  Everything compares a prediction with a reference residue by residue: row i of
one belongs to row i of the other, and masks say which atoms each of them has.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

LDDT_RADIUS = 15.0  # Mariani et al. 2013: pairs nearer than this in the reference count ...
LDDT_TOLERANCES = (0.5, 1.0, 2.0, 4.0)  # ... as preserved within each of these
GDT_TS = (1.0, 2.0, 4.0, 8.0)  # Zemla 2003
GDT_HA = (0.5, 1.0, 2.0, 4.0)
BLOCK = 256  # rows of a distance matrix made at a time
DISTANCES = 1_000_000  # computed at a time after superpositions

Array = np.ndarray


def lddt(predicted: Array, truth: Array, mask: Array, predicted_mask: Array | None = None) -> float:
    """Return lDDT over pairs of atoms of different residues, 0 to 1 (Mariani et al. 2013, no stereochemical checks).

    predicted, truth [N, A, 3]; mask [N, A] atoms of the reference; predicted_mask [N, A] those of the prediction (its
    missing atoms count as wrong; default: it has all).  A = 1 with the Ca gives lDDT-Ca.  NaN where no pair counts.
    """
    kept, pairs = lddt_counts(predicted, truth, mask, predicted_mask)
    return float(kept.sum() / pairs.sum()) if pairs.sum() else float("nan")


def lddt_per_residue(predicted: Array, truth: Array, mask: Array, predicted_mask: Array | None = None) -> Array:
    """Return lDDT of each residue's own pairs [N], as `lddt`; NaN for a residue that has none."""
    kept, pairs = lddt_counts(predicted, truth, mask, predicted_mask)
    return np.divide(kept, pairs, out=np.full(len(pairs), np.nan), where=pairs > 0)


def lddt_counts(
    predicted: Array,
    truth: Array,
    mask: Array,
    predicted_mask: Array | None = None,
    others: Array | None = None,
    ours: Array | None = None,
) -> tuple[Array, Array]:
    """Count for each residue [N] how many of its pairs are preserved (mean over the tolerances), and how many it has.

    `ours` and `others` [N, A] restrict the near and the far end of each pair to these atoms; the rest as in `lddt`.
    """
    mask = np.asarray(mask, bool)
    known = np.ones_like(mask) if predicted_mask is None else np.asarray(predicted_mask, bool)
    near_end = mask if ours is None else mask & np.asarray(ours, bool)
    far_end = mask if others is None else mask & np.asarray(others, bool)
    residue, far_residue = np.nonzero(near_end)[0], np.nonzero(far_end)[0]
    truth, predicted = np.asarray(truth, np.float64), np.asarray(predicted, np.float64)
    near_predicted, far_predicted = predicted[near_end], predicted[far_end]
    near_known, far_known = known[near_end], known[far_end]
    kept, pairs = np.zeros(len(mask)), np.zeros(len(mask))
    for i, j, distance in near_pairs(truth[near_end], truth[far_end], LDDT_RADIUS):
        apart = residue[i] != far_residue[j]
        i, j, distance = i[apart], j[apart], distance[apart]
        moved = np.linalg.norm(near_predicted[i] - far_predicted[j], axis=-1)
        error = np.abs(moved - distance)
        preserved = np.mean([error < tolerance for tolerance in LDDT_TOLERANCES], axis=0)
        preserved *= near_known[i] & far_known[j]
        kept += np.bincount(residue[i], preserved, minlength=len(mask))
        pairs += np.bincount(residue[i], minlength=len(mask))
    return kept, pairs


def near_pairs(a: Array, b: Array, within: float) -> Iterator[tuple[Array, Array, Array]]:
    """Yield the pairs of points of a [N, 3] and b [M, 3] that are nearer than `within`: indices i, j and distances.

    Block by block of a, so that memory grows as M.  Of b only the points near a block's box are looked at.
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    for start in range(0, len(a), BLOCK):
        block = a[start : start + BLOCK]
        low, high = block.min(0) - within, block.max(0) + within
        boxed = np.flatnonzero(((b >= low) & (b <= high)).all(-1))
        # Squares by a matrix product are fast and lose some digits: they only preselect, with a margin.
        centre = block.mean(0)
        rows, columns = block - centre, b[boxed] - centre
        squares = np.sum(rows**2, -1)[:, None] + np.sum(columns**2, -1) - 2 * rows @ columns.T
        i, j = np.nonzero(squares < (within + 1e-3) ** 2)
        i, j = i + start, boxed[j]
        distance = np.linalg.norm(a[i] - b[j], axis=-1)
        near = distance < within
        yield i[near], j[near], distance[near]


def rename_symmetric(predicted: Array, truth: Array, mask: Array, predicted_mask: Array, swap: Array) -> Array:
    """Return the prediction with atoms of symmetric side chains named so that each residue's lDDT is best.

    swap [N, A]: for every atom the index of its twin, itself if it has none (Asp, Glu, Phe, Tyr).  Each residue is
    judged by its pairs with the unambiguous atoms of the others (Mariani et al. 2013).  Shapes as in `lddt`.
    """
    ambiguous = swap != np.arange(swap.shape[1])
    rows = np.arange(len(swap))[:, None]
    flipped, flipped_mask = predicted[rows, swap], predicted_mask[rows, swap]
    ours = np.asarray(mask, bool) & ~ambiguous
    scores = []
    for positions, present in ((predicted, predicted_mask), (flipped, flipped_mask)):
        kept, _ = lddt_counts(positions, truth, mask, present, others=ours)
        scores.append(kept)
    better = (scores[1] > scores[0]) & (flipped_mask == predicted_mask).all(-1)
    return np.where(better[:, None, None], flipped, predicted)


def superpose(mobile: Array, target: Array, weights: Array | None = None) -> tuple[Array, Array]:
    """Return the rotation [*, 3, 3] and translation [*, 3] that bring mobile [*, N, 3] nearest to target (Kabsch 1976).

    weights [*, N], not negative; `mobile @ rotation.T + translation` is then nearest in weighted least squares.
    """
    mobile, target = np.asarray(mobile, np.float64), np.asarray(target, np.float64)
    weights = np.ones(mobile.shape[:-1]) if weights is None else np.asarray(weights, np.float64)
    share = weights / np.maximum(weights.sum(-1, keepdims=True), 1e-12)
    centre = np.einsum("...n,...nd->...d", share, mobile)
    goal = np.einsum("...n,...nd->...d", share, target)
    # Written as products of matrices, not of centred copies: batches of weights may share one pair of structures.
    covariance = np.swapaxes(mobile * share[..., None], -1, -2) @ target - centre[..., :, None] * goal[..., None, :]
    u, _, vt = np.linalg.svd(covariance)
    handedness = np.sign(np.linalg.det(u @ vt))
    u[..., :, -1] *= handedness[..., None]  # a mirror image is not a superposition
    rotation = np.swapaxes(u @ vt, -1, -2)
    return rotation, goal - np.einsum("...ij,...j->...i", rotation, centre)


def rmsd(predicted: Array, truth: Array) -> float:
    """Return the root mean square deviation [N, 3] after the best superposition, in angstrom; NaN without points."""
    if not len(truth):
        return float("nan")
    rotation, translation = superpose(predicted, truth)
    moved = np.asarray(predicted, np.float64) @ rotation.T + translation
    return float(np.sqrt(np.mean(np.sum((moved - truth) ** 2, -1))))


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Scores at the superposition that is best for each, 0 to 1."""

    tm: float
    gdt_ts: float
    gdt_ha: float


def tm_d0(length: int) -> float:
    """Return the distance that TM-score counts as half, by the reference's length (Zhang & Skolnick 2004, eq. 5)."""
    return max(0.5, 1.24 * np.cbrt(length - 15) - 1.8)


def overlap(predicted: Array, truth: Array, length: int | None = None, starts: int = 1024) -> Overlap:
    """Return TM-score, GDT-TS and GDT-HA of paired Ca atoms [N, 3], each at the superposition that is best for it.

    Normalised by `length` (default N): the residues of the reference, paired or not.  What is tried is what the
    TM-score program tries (its C++ version; Zhang & Skolnick 2004), so that its values come out to the last digit that
    it prints.  Only of chains longer than `starts`, fewer fragments are tried: so many of each size.
    """
    n = len(truth)
    length = n if length is None else length
    if n == 0:
        return Overlap(tm=0.0, gdt_ts=0.0, gdt_ha=0.0)
    # Centered once, so that no digits are lost far from the origin.
    predicted = np.asarray(predicted, np.float64) - np.mean(predicted, 0, dtype=np.float64)
    truth = np.asarray(truth, np.float64) - np.mean(truth, 0, dtype=np.float64)
    d0, tm = tm_d0(length), 0.0
    for squares in _superpositions(predicted, truth, d0, starts):
        tm = max(tm, float(np.sum(1 / (1 + squares / d0**2), -1).max()))
    # The program counts for GDT while it looks with a d0 that is 0.8 larger, before its search for the TM-score.
    within = dict.fromkeys((*GDT_TS, *GDT_HA), 0)
    for squares in _superpositions(predicted, truth, tm_d0(n) + 0.8, starts):
        for cutoff, most in within.items():
            within[cutoff] = max(most, int(np.count_nonzero(squares < cutoff**2, axis=-1).max()))
    return Overlap(
        tm=tm / length,
        gdt_ts=float(np.mean([within[cutoff] for cutoff in GDT_TS])) / length,
        gdt_ha=float(np.mean([within[cutoff] for cutoff in GDT_HA])) / length,
    )


def _superpositions(predicted: Array, truth: Array, d0: float, starts: int) -> Iterator[Array]:
    """Yield the squared distances [S, N] of paired points after each superposition that the TM-score program tries.

    Fragments of N, N/2 ... N/16 and 4 residues, at most `starts` of a size, are superposed; then all residues that came
    near, again and again until they stay the same, 20 times at most.
    """
    n = len(truth)
    reach = float(np.clip(d0, 4.5, 8.0))
    least = min(4, n)
    sizes = [size for size in (n // 2**i for i in range(5)) if size > least]
    for size in (*sizes, least):
        places = np.unique(np.linspace(0, n - size, min(starts, n - size + 1)).astype(int))
        chosen = (np.arange(n) >= places[:, None]) & (np.arange(n) < places[:, None] + size)
        seen: set[bytes] = set()  # what was superposed once leads to nothing new
        for within in [reach - 1] + [reach + 1] * 20:
            parts = []
            for some in np.array_split(chosen, -(-chosen.size // DISTANCES)):
                rotation, translation = superpose(predicted[None], truth[None], some)
                moved = predicted @ np.swapaxes(rotation, -1, -2) + translation[:, None]
                squares = np.sum((moved - truth) ** 2, -1)
                yield squares
                parts.append(_nearest(squares, within))
            chosen = np.concatenate(parts)
            rows = {bytes(row): i for i, row in enumerate(np.packbits(chosen, axis=-1))}
            new = [i for row, i in rows.items() if row not in seen]
            if not new:
                break
            seen |= rows.keys()
            chosen = chosen[new]


def _nearest(squares: Array, within: float) -> Array:
    """Return which residues are nearer than `within`, bool [S, N]; it grows by 0.5 until there are three."""
    third = np.sqrt(np.partition(squares, min(2, squares.shape[-1] - 1), axis=-1)[:, min(2, squares.shape[-1] - 1)])
    steps = np.maximum(0, np.floor((third - within) / 0.5) + 1)
    return squares < ((within + 0.5 * steps) ** 2)[:, None]


# Scores of an alignment.  The sequences are versions of one protein or close relatives: only identity counts.
MATCH, MISMATCH, GAP_OPENING, GAP_EXTENSION = 2.0, -1.0, 5.0, 0.5


def align(a: str, b: str) -> Array:
    """Return pairs [K, 2] of indices into two sequences: the best global alignment, gaps affine and free at the ends.

    A gap of k costs GAP_OPENING + GAP_EXTENSION * (k - 1) (Gotoh 1982).  X matches nothing and mismatches nothing.
    Time and memory grow as len(a) * len(b).
    """
    codes = [np.frombuffer(s.encode("latin-1", "replace"), np.uint8) for s in (a, b)]
    n, m = map(len, codes)
    unknown = ord("X")
    columns = np.arange(m + 1)
    score = np.zeros(m + 1)  # of the best alignment of a[:i] with b[:j]; a row of zeros: gaps at the start are free
    up = np.full(m + 1, -np.inf)  # of the best that ends with a residue of a against a gap
    steps = np.zeros((n + 1, m + 1), np.int8)  # 0: paired, 1: gap in b, 2: gap in a
    up_opens = np.zeros((n + 1, m + 1), bool)
    left_from = np.zeros((n + 1, m + 1), np.int32)
    for i in range(1, n + 1):
        free = i == n  # gaps after the end of a cost nothing, nor do those after the end of b below
        same = np.where(codes[1] == codes[0][i - 1], MATCH, MISMATCH)
        same[(codes[1] == unknown) | (codes[0][i - 1] == unknown)] = 0.0
        opens = np.full(m + 1, GAP_OPENING)
        extends = np.full(m + 1, GAP_EXTENSION)
        opens[m] = extends[m] = 0.0
        up_opens[i] = score - opens >= up - extends
        up = np.maximum(score - opens, up - extends)
        paired = np.concatenate([[0.0], score[:-1] + same])
        paired[0] = 0.0
        here = np.maximum(paired, up)
        here[0] = 0.0
        # A gap in a that ends at j and began after k costs o + e * (j - k - 1): a running maximum over k.
        o, e = (0.0, 0.0) if free else (GAP_OPENING, GAP_EXTENSION)
        reached = here + e * columns
        leader = np.maximum.accumulate(reached)
        origin = np.maximum.accumulate(np.where(reached >= leader, columns, 0))
        left = np.concatenate([[-np.inf], leader[:-1] - o - e * (columns[1:] - 1)])
        steps[i] = np.where(left > here, 2, np.where(paired >= up, 0, 1))
        left_from[i, 1:] = origin[:-1]
        score = np.maximum(here, left)
    return _trace(steps, up_opens, left_from)


def _trace(steps: Array, up_opens: Array, left_from: Array) -> Array:
    """Return the pairs along the best path, from the last corner back to an edge."""
    i, j = steps.shape[0] - 1, steps.shape[1] - 1
    pairs = []
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
    return np.array(pairs[::-1], np.int64).reshape(-1, 2)
