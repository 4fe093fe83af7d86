"""Test metrics against plain implementations of their definitions, invariances, and values of other programs."""

import csv
import gzip
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from warpfold.scoring import metrics

REAL = Path(__file__).parents[2] / "../shared/realdata"


def chain(n: int, seed: int = 0) -> np.ndarray:
    """Generate a compact random walk of n points with steps of 3.8 angstrom, as between Ca atoms."""
    rng = np.random.default_rng(seed)
    points = [np.zeros(3)]
    for _ in range(n - 1):
        step = rng.normal(size=3) - 0.05 * points[-1]
        points.append(points[-1] + 3.8 * step / np.linalg.norm(step))
    return np.array(points)


def turned(points: np.ndarray, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    q, _ = np.linalg.qr(rng.normal(size=(3, 3)))
    return points @ (q * np.sign(np.linalg.det(q))).T + 50 * rng.normal(size=3)


def test_lddt_is_its_definition() -> None:
    rng = np.random.default_rng(0)
    truth = np.repeat(chain(30), 3, axis=0).reshape(30, 3, 3) + rng.normal(size=(30, 3, 3))
    predicted = truth + rng.normal(size=truth.shape)
    mask, known = rng.random((2, 30, 3)) < 0.8
    kept = total = 0.0
    for i, a in np.argwhere(mask):
        for j, b in np.argwhere(mask):
            distance = np.linalg.norm(truth[i, a] - truth[j, b])
            if i == j or distance >= 15:
                continue
            total += 1
            if known[i, a] and known[j, b]:
                error = abs(distance - np.linalg.norm(predicted[i, a] - predicted[j, b]))
                kept += np.mean([error < 0.5, error < 1, error < 2, error < 4])
    assert metrics.lddt(predicted, truth, mask, known) == pytest.approx(kept / total)
    assert 0.2 < kept / total < 0.9


def test_pairs_and_errors_at_a_limit_do_not_count() -> None:
    """Residues 0 to 4 on a line. In the prediction, residues 1 to 3 are moved by exactly a tolerance."""
    truth = np.zeros((5, 1, 3))
    truth[:, 0, 0] = [0, 3, 6, 9, 15]
    predicted = truth.copy()
    predicted[1:4, 0, 0] += [0.5, 1, 2]
    mask = np.ones((5, 1), bool)
    # The pair of the first and the last residue is not nearer than 15 angstrom.
    assert metrics.lddt_counts(predicted, truth, mask)[1].tolist() == [3, 4, 4, 4, 3]
    errors = {(0, 1): 0.5, (0, 2): 1, (0, 3): 2, (1, 2): 0.5, (1, 3): 1.5, (1, 4): 0.5, (2, 3): 1, (2, 4): 1, (3, 4): 2}
    kept = np.zeros(5)
    for (i, j), error in errors.items():
        kept[[i, j]] += {0.5: 0.75, 1: 0.5, 1.5: 0.5, 2: 0.25}[error]
    assert metrics.lddt_counts(predicted, truth, mask)[0].tolist() == kept.tolist()
    assert metrics.lddt(predicted, truth, mask) == pytest.approx(kept.sum() / 18)
    # A residue without pairs has no score, and the others keep theirs.
    mask[1] = False
    found = metrics.lddt_per_residue(predicted, truth, mask)
    assert np.isnan(found).tolist() == [False, True, False, False, False]
    assert found[[0, 2, 3, 4]] == pytest.approx([0.75 / 2, 1.5 / 3, 1.0 / 3, 0.75 / 2])
    assert metrics.lddt(predicted, truth, mask) == pytest.approx(4.0 / 10)


@pytest.mark.parametrize("count", [0, 1, metrics.BLOCK, metrics.BLOCK + 1, 2 * metrics.BLOCK + 3])
def test_near_pairs_are_all_there_are(count: int) -> None:
    rng = np.random.default_rng(count)
    # Far from the origin, squared distances by a product of matrices are wrong by more than the limit.
    far = np.array([3e6, -1e6, 2e6])
    a, b = far + rng.uniform(0, 20, (count, 3)), far + rng.uniform(0, 20, (40, 3))
    found = [
        (i, j, x) for block in metrics.near_pairs(a, b, 4.0) for i, j, x in zip(*(column.tolist() for column in block))
    ]
    distances = np.linalg.norm(a[:, None] - b, axis=-1)
    assert [(i, j) for i, j, _ in found] == [tuple(pair) for pair in np.argwhere(distances < 4).tolist()]
    assert [x for _, _, x in found] == pytest.approx(distances[distances < 4].tolist())


def test_a_pair_just_below_the_limit_is_near() -> None:
    a, b = np.zeros((1, 3)), np.array([[2.0, 0, 0], [1.9995, 0, 0], [0, 0, -1.9995], [0, -2.0001, 0]])
    ((_, j, distance),) = metrics.near_pairs(a, b, 2.0)
    assert (j.tolist(), distance.tolist()) == ([1, 2], [1.9995, 1.9995])
    # The points of a pair may be on opposite sides of the centre of the first points.
    ((i, j, _),) = metrics.near_pairs(np.array([[-1.0, 0, 0], [1, 0, 0]]), np.array([[0.9995, 0, 0]]), 2.0)
    assert (i.tolist(), j.tolist()) == ([0, 1], [0, 0])


def test_lddt_agrees_with_biotite() -> None:
    structure = pytest.importorskip("biotite.structure")
    rng = np.random.default_rng(0)
    truth = chain(700).astype(np.float32)  # several blocks of rows
    predicted = truth + rng.normal(size=truth.shape).astype(np.float32)
    atoms = structure.AtomArray(len(truth))
    atoms.coord, atoms.res_id = truth, np.arange(len(truth))
    other = atoms.copy()
    other.coord = predicted
    mask = np.ones((len(truth), 1))
    ours = metrics.lddt(predicted[:, None], truth[:, None], mask)
    assert ours == pytest.approx(float(structure.lddt(atoms, other)), abs=1e-5)
    theirs = structure.lddt(atoms, other, aggregation="residue")
    np.testing.assert_allclose(metrics.lddt_per_residue(predicted[:, None], truth[:, None], mask), theirs, atol=1e-5)


def test_symmetric_side_chains_are_named_for_the_best_score() -> None:
    rng = np.random.default_rng(3)
    truth = np.repeat(chain(20), 4, axis=0).reshape(20, 4, 3) + 2 * rng.normal(size=(20, 4, 3))
    swap = np.tile(np.arange(4), (20, 1))
    # In every second residue, atoms 2 and 3 are equivalent.
    swap[::2] = [0, 1, 3, 2]
    wrong = truth.copy()
    wrong[::4] = truth[::4][:, [0, 1, 3, 2]]
    mask = np.ones((20, 4), bool)
    assert metrics.lddt(wrong, truth, mask) < 0.99
    np.testing.assert_array_equal(metrics.rename_symmetric(wrong, truth, mask, mask, swap), truth)
    # Without other residues nothing is better, and the predicted names stay.
    alone = metrics.rename_symmetric(wrong[:1], truth[:1], mask[:1], mask[:1], swap[:1])
    np.testing.assert_array_equal(alone, wrong[:1])


def test_symmetric_side_chains_are_judged_by_the_unambiguous_atoms_of_others() -> None:
    """Compare with the definition.  The predictions are so wrong that ambiguous atoms would often change the result."""
    swap = np.tile([0, 1, 3, 2], (12, 1))
    swap[::4] = np.arange(4)
    unambiguous = swap == np.arange(4)
    mask, flips = np.ones((12, 4), bool), 0

    def kept(own: np.ndarray, residue: int, predicted: np.ndarray, truth: np.ndarray) -> float:
        total = 0.0
        for other, atom in np.argwhere(unambiguous):
            if other != residue:
                distance = np.linalg.norm(truth[residue] - truth[other, atom], axis=-1)
                error = np.abs(np.linalg.norm(own - predicted[other, atom], axis=-1) - distance)
                total += sum(((error < limit) & (distance < 15)).sum() / 4 for limit in (0.5, 1, 2, 4))
        return total

    for seed in range(8):
        rng = np.random.default_rng(seed)
        truth = np.repeat(chain(12, seed), 4, axis=0).reshape(12, 4, 3) + 2 * rng.normal(size=(12, 4, 3))
        predicted = truth + rng.normal(size=truth.shape)
        predicted[1::2] = predicted[1::2][:, [0, 1, 3, 2]]
        expected = predicted.copy()
        for residue in range(12):
            flipped = predicted[residue, swap[residue]]
            if kept(flipped, residue, predicted, truth) > kept(predicted[residue], residue, predicted, truth):
                expected[residue], flips = flipped, flips + 1
        np.testing.assert_array_equal(metrics.rename_symmetric(predicted, truth, mask, mask, swap), expected)
    assert flips > 8


def test_a_residue_that_lacks_one_of_two_symmetric_atoms_keeps_its_names() -> None:
    """Its single atom would fit better under the other name."""
    truth = np.repeat(chain(8), 4, axis=0).reshape(8, 4, 3) + 2 * np.random.default_rng(0).normal(size=(8, 4, 3))
    swap = np.tile([0, 1, 3, 2], (8, 1))
    predicted, present = truth[:, [0, 1, 3, 2]].copy(), np.ones((8, 4), bool)
    present[3, 3] = False
    renamed = metrics.rename_symmetric(predicted, truth, np.ones((8, 4), bool), present, swap)
    expected = truth.copy()
    expected[3] = predicted[3]
    np.testing.assert_array_equal(renamed, expected)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 50])
def test_rigid_motion_is_ignored(n: int) -> None:
    points = chain(n)
    assert metrics.rmsd(turned(points), points) < 1e-6
    assert metrics.overlap(turned(points), points).tm == pytest.approx(1)


def test_scores_of_nothing() -> None:
    one = np.zeros((1, 1, 3))
    assert np.isnan(metrics.lddt(one, one, np.ones((1, 1))))
    assert np.isnan(metrics.lddt(one, one, np.zeros((1, 1))))
    assert np.isnan(metrics.lddt(one[:0], one[:0], np.ones((0, 1))))
    assert np.isnan(metrics.rmsd(one[0, :0], one[0, :0]))
    assert metrics.overlap(one[0, :0], one[0, :0], length=9) == metrics.Overlap(tm=0.0, gdt_ts=0.0, gdt_ha=0.0)


def test_a_mirror_image_is_not_superposed() -> None:
    assert metrics.rmsd(chain(50) * [1, 1, -1], chain(50)) > 2


def test_superpose_minimises_the_weighted_deviation() -> None:
    rng = np.random.default_rng(0)
    a, b, weights = rng.normal(size=(20, 3)), rng.normal(size=(20, 3)), rng.random(20)
    rotation, translation = metrics.superpose(a, b, weights)
    best = np.sum(weights * np.sum((a @ rotation.T + translation - b) ** 2, -1))
    assert np.linalg.det(rotation) == pytest.approx(1)
    for seed in range(20):
        turn = turned(np.eye(3), seed) - turned(np.zeros((3, 3)), seed)
        small = np.linalg.qr(np.eye(3) + 0.05 * turn)[0]
        small = small * np.sign(np.diag(small))
        moved = (a @ rotation.T) @ small + translation
        assert np.sum(weights * np.sum((moved - b) ** 2, -1)) > best


def test_overlap_of_equals_and_of_halves() -> None:
    truth = chain(60)
    assert metrics.overlap(turned(truth), truth) == metrics.Overlap(tm=1.0, gdt_ts=1.0, gdt_ha=1.0)
    half = metrics.overlap(turned(truth)[:30], truth[:30], length=60)
    assert half.tm == half.gdt_ts == half.gdt_ha == pytest.approx(0.5)


def test_overlap_finds_the_half_that_fits() -> None:
    """Two domains have moved apart.  No superposition fits both, so the search must find the larger domain."""
    truth = chain(100)
    predicted = turned(truth)
    predicted[60:] = turned(truth, seed=7)[60:]
    found = metrics.overlap(predicted, truth)
    assert found.gdt_ha >= 0.6
    assert found.tm >= 0.6
    assert metrics.rmsd(predicted, truth) > 8


def plain_search(predicted: np.ndarray, truth: np.ndarray, d0: float) -> Iterator[np.ndarray]:
    """Yield the distances after each superposition of the program's search: up to 21 for each fragment."""
    n, reach = len(truth), min(8.0, max(4.5, d0))
    for size in sorted({x for x in (n, n // 2, n // 4, n // 8, n // 16) if x > 4} | {min(4, n)}):
        for start in range(n - size + 1):
            chosen, within = np.arange(start, start + size), reach - 1
            for _ in range(21):
                rotation, translation = metrics.superpose(predicted[chosen], truth[chosen])
                distance = np.linalg.norm(predicted @ rotation.T + translation - truth, axis=-1)
                yield distance
                grown, wider = np.flatnonzero(distance < within), within
                while len(grown) < min(3, n):
                    wider += 0.5
                    grown = np.flatnonzero(distance < wider)
                if within > reach and np.array_equal(grown, chosen):
                    break
                chosen, within = grown, reach + 1


def noisy(length: int, most: float) -> tuple[np.ndarray, np.ndarray]:
    """Build a prediction that is wrong by more and more towards the end, and its truth."""
    truth = chain(length)
    noise = np.random.default_rng(5).normal(size=truth.shape) * np.linspace(0.2, most, length)[:, None]
    return turned(truth + noise), truth


def test_overlap_is_the_search_of_the_program_written_out() -> None:
    """GDT is counted during a search with a d0 that is larger by 0.8."""
    predicted, truth = noisy(45, 5.0)
    most: dict[float, int] = dict.fromkeys((0.5, 1.0, 2.0, 4.0, 8.0), 0)
    d0 = 1.24 * 30 ** (1 / 3) - 1.8
    tm = max(float(np.mean(1 / (1 + (distance / d0) ** 2))) for distance in plain_search(predicted, truth, d0))
    for distance in plain_search(predicted, truth, d0 + 0.8):
        most = {cutoff: max(count, int((distance < cutoff).sum())) for cutoff, count in most.items()}
    found = metrics.overlap(predicted, truth)
    assert found.tm == pytest.approx(tm, abs=1e-12)
    assert found.gdt_ts == pytest.approx(sum(most[cutoff] for cutoff in (1, 2, 4, 8)) / 4 / 45)
    assert found.gdt_ha == pytest.approx(sum(most[cutoff] for cutoff in (0.5, 1, 2, 4)) / 4 / 45)
    assert 0.2 < found.tm < 0.9


@pytest.mark.parametrize(
    ("length", "most", "d0"), [(2, 1, 0.5), (3, 1, 0.5), (4, 9, 0.5), (9, 40, 1), (40, 20, 4.7), (82, 8, 2), (33, 5, 9)]
)
def test_the_search_tries_each_superposition_of_the_program(length: int, most: float, d0: float) -> None:
    predicted, truth = noisy(length, most)
    searches = [list(plain_search(predicted, truth, d0)), [*np.sqrt(np.concatenate([*_search(predicted, truth, d0)]))]]
    # The sets of superpositions are equal: each is numbered by a rounded product with the same random vector.
    weights = np.random.default_rng(0).random(length)
    ours, plain = (np.unique(np.round(np.array(found) @ weights, 5)) for found in searches)
    np.testing.assert_allclose(ours, plain, atol=1.1e-5)


def _search(predicted: np.ndarray, truth: np.ndarray, d0: float) -> Iterator[np.ndarray]:
    return metrics._superpositions(predicted, truth, d0)


def test_fragments_are_those_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """If all superpositions are perfect, each size has one for each fragment and one for the whole chain."""
    truth = chain(160)
    counts = [len(squares) for squares in _search(turned(truth), truth, 5.0)]
    assert counts == [1, 1, 81, 1, 121, 1, 141, 1, 151, 1, 157, 1]
    assert [len(squares) for squares in _search(truth[:64], truth[:64], 5.0)] == [1, 1, 33, 1, 49, 1, 57, 1, 61, 1]
    # Long chains have 1024 fragments of each size, from the first to the last.
    assert metrics.MAX_FRAGMENTS == 1024
    monkeypatch.setattr(metrics, "MAX_FRAGMENTS", 5)
    predicted, truth = noisy(40, 9.0)
    blocks = list(_search(predicted, truth, 5.0))
    assert [len(blocks[0]), max(map(len, blocks))] == [1, 5]
    rows = np.concatenate(blocks)
    for start in (0, 9, 18, 27, 36):
        fragment = slice(start, start + 4)
        rotation, translation = metrics.superpose(predicted[fragment], truth[fragment])
        squares = np.sum((predicted @ rotation.T + translation - truth) ** 2, 1)
        assert np.abs(rows - squares).max(1).min() < 1e-6
    # The number of distances in memory is bounded.
    monkeypatch.undo()
    monkeypatch.setattr(metrics, "MAX_DISTANCES", 1000)
    assert 500 < max(squares.size for squares in _search(predicted, truth, 5.0)) <= 1000


def test_overlap_searches_with_the_d0_of_the_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """The TM-score depends on the length of the reference, and the search for GDT on the number of pairs."""
    searched = []

    def search(predicted: np.ndarray, truth: np.ndarray, d0: float) -> Iterator[np.ndarray]:
        searched.append(d0)
        yield from _superpositions(predicted, truth, d0)

    _superpositions = metrics._superpositions
    monkeypatch.setattr(metrics, "_superpositions", search)
    truth = chain(30)
    assert metrics.overlap(truth, truth, length=142) == metrics.Overlap(tm=30 / 142, gdt_ts=30 / 142, gdt_ha=30 / 142)
    assert searched == pytest.approx([1.24 * 127 ** (1 / 3) - 1.8, 1.24 * 15 ** (1 / 3) - 1.0])
    assert [metrics.tm_d0(length) for length in (1, 15, 20, 23)] == pytest.approx([0.5, 0.5, 0.5, 0.68])


def test_the_best_superposition_of_each_score_counts_the_distances_below_its_cutoffs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Give the squared distances of two superpositions: at the cutoffs, and of two near points among far ones."""
    squares = np.array([[0.25, 1, 4, 16, 64], [0.04, 0.16, 900, 900, 900]])
    monkeypatch.setattr(metrics, "_superpositions", lambda predicted, truth, d0: iter((squares, squares[:1] + 900)))
    found = metrics.overlap(chain(5), chain(5), length=10)
    # The counts below 0.5, 1, 2, 4 and 8 are 0 to 4 and 2.
    assert found.gdt_ts == pytest.approx((2 + 2 + 3 + 4) / 4 / 10)
    assert found.gdt_ha == pytest.approx((2 + 2 + 2 + 3) / 4 / 10)
    # With a d0 of 0.5, the near points have the higher TM-score.
    assert found.tm == pytest.approx(sum(1 / (1 + x / 0.25) for x in squares[1]) / 10)


def test_scores_do_not_depend_on_the_distance_from_the_origin() -> None:
    predicted, truth = (np.round(x * 1024) / 1024 for x in noisy(25, 3.0))
    near = metrics.overlap(predicted, truth)
    # The positions are exact numbers at this distance, too.
    for far in ([1e12, 0, 0], [0, -1e12, 3e11]):
        for ours, theirs in ((predicted + far, truth), (predicted, truth + far)):
            found = metrics.overlap(ours, theirs)
            assert vars(found) == pytest.approx(vars(near), abs=1e-6)


def test_the_superposition_of_mirror_images_is_the_best_rotation() -> None:
    """Compare the deviation with that of Horn's quaternions (1987), the largest eigenvalue of a 4 x 4 matrix."""
    rng = np.random.default_rng(0)
    mobile, target = rng.normal(size=(2, 12, 9, 3)) * [3, 2, 1]
    mobile[::2] = target[::2] * [1, 1, -1] + 0.3 * rng.normal(size=(6, 9, 3))
    weights = rng.random((12, 9))
    rotations, translations = metrics.superpose(mobile, target, weights)
    for one, x, y, w, translation in zip(rotations, mobile, target, weights, translations, strict=True):
        x0, y0 = (points - np.average(points, 0, weights=w) for points in (x, y))
        (xx, xy, xz), (yx, yy, yz), (zx, zy, zz) = (w[:, None] * x0).T @ y0
        quaternions = [
            [xx + yy + zz, yz - zy, zx - xz, xy - yx],
            [yz - zy, xx - yy - zz, xy + yx, zx + xz],
            [zx - xz, xy + yx, yy - xx - zz, yz + zy],
            [xy - yx, zx + xz, yz + zy, zz - xx - yy],
        ]
        spread = np.sum(w[:, None] * (x0**2 + y0**2))
        least = spread - 2 * np.linalg.eigvalsh(quaternions).max()
        assert np.sum(w * np.sum((x @ one.T + translation - y) ** 2, 1)) == pytest.approx(least)
        assert np.linalg.det(one) == pytest.approx(1)
        alone = metrics.superpose(x, y, w)
        np.testing.assert_allclose(alone[0], one, atol=1e-9)
        np.testing.assert_allclose(alone[1], translation, atol=1e-9)
    np.testing.assert_allclose(
        metrics.superpose(mobile, target)[0], metrics.superpose(mobile, target, weights * 0 + 3)[0]
    )
    assert all(np.isfinite(x).all() for x in metrics.superpose(mobile[0], target[0], np.zeros(9)))


def gap(length: int) -> float:
    return 5 + 0.5 * (length - 1) if length else 0.0


def ends(i: int, j: int) -> float:
    """Compute the cost of an end.

    An overhang of one sequence is free. If both overhang, the cheaper overhang becomes an inner gap.
    """
    return min(gap(i), gap(j))


def pair(a: str, b: str) -> float:
    return 0 if "X" in (a, b) else (2 if a == b else -1)


def score_of(a: str, b: str, pairs: list[list[int]]) -> float:
    """Compute the score of an alignment from its pairs."""
    if not pairs:
        return 0.0
    total = sum(pair(a[i], b[j]) for i, j in pairs)
    total -= sum(gap(k - i - 1) + gap(l - j - 1) for (i, j), (k, l) in itertools.pairwise(pairs))
    (i, j), (k, l) = pairs[0], pairs[-1]
    return total - ends(i, j) - ends(len(a) - 1 - k, len(b) - 1 - l)


def best_score(a: str, b: str) -> float:
    """Compute the best score of all alignments by a plain recursion over the last pair."""
    best = np.zeros((len(a), len(b)))
    whole = [0.0]
    for i, j in np.ndindex(best.shape):
        before = [best[k, l] - gap(i - k - 1) - gap(j - l - 1) for k in range(i) for l in range(j)]
        best[i, j] = max([-ends(i, j), *before]) + pair(a[i], b[j])
        whole.append(best[i, j] - ends(len(a) - 1 - i, len(b) - 1 - j))
    return max(whole)


@given(st.text("ACX", max_size=9), st.text("ACX", max_size=9))
def test_alignment_is_the_best_there_is(a: str, b: str) -> None:
    pairs = metrics.align(a, b)
    assert (np.diff(pairs, axis=0) > 0).all()
    assert score_of(a, b, pairs.tolist()) == pytest.approx(best_score(a, b))


def test_alignment_of_a_part_and_of_a_loop_cut_out() -> None:
    whole = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRVGDGTQDNLSGAEKAVQ"
    assert metrics.align(whole[10:40], whole).tolist() == [[i, i + 10] for i in range(30)]
    cut = whole[:20] + whole[28:]
    expected = [[i, i if i < 20 else i + 8] for i in range(len(cut))]
    assert metrics.align(cut, whole).tolist() == expected
    assert metrics.align("", whole).shape == (0, 2)


# Alignments that depend on each score and on the choice between equal scores, which are checked to be the best.
ALIGNED = [
    ("-AC", "CA-"),
    ("CCCA", "--C-"),
    ("---XCAA", "XAXAXA-"),
    ("GCEACAF-----FKACA", "----GAFLEEECFKACA"),
    ("KKKIDKGKKGLKHCDGIEHIKAL", "-KK--KGKKGLKHCDGIEHIKAL"),
    ("DGLCCGLGCCKEEH", "DGLCGLGECCKEEH"),
    (14 * "W" + 10 * "-" + "ACDEFGHIKL", 14 * "-" + 10 * "Y" + "ACDEFGHIKL"),
    (10 * "-" + 14 * "W" + "ACDEFGHIKL", 10 * "Y" + 14 * "-" + "ACDEFGHIKL"),
    # The gap at the end is free, however long it is.
    ("ACDE" + 1303 * "-", "ACDE" + 1300 * "W" + "ACD"),
    ("ACDE" + 1300 * "W" + "ACD", "ACDE" + 1303 * "-"),
]


@pytest.mark.parametrize(("a", "b"), ALIGNED, ids=range(len(ALIGNED)))
def test_alignments_of_equal_scores_are_always_the_same(a: str, b: str) -> None:
    indices = [np.cumsum([letter != "-" for letter in text]) - 1 for text in (a, b)]
    expected = [[int(i), int(j)] for i, j, x, y in zip(*indices, a, b) if "-" not in (x, y)]
    first, second = a.replace("-", ""), b.replace("-", "")
    assert metrics.align(first, second).tolist() == expected
    if len(a) < 100:
        assert score_of(first, second, expected) == pytest.approx(best_score(first, second))


NAMES = "ALA ARG ASN ASP CYS GLN GLU GLY HIS ILE LEU LYS MET PHE PRO SER THR TRP TYR VAL"
THREE = dict(zip(NAMES.split(), "ARNDCQEGHILKMFPSTWYV"))


def read_ca(path: Path) -> tuple[str, np.ndarray]:
    """Read the sequence and Ca positions of a PDB file, with the first alternative of each residue."""
    path = path if path.exists() else path.with_name(path.name + ".gz")
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as lines:
        atoms = [x for x in lines if x.startswith("ATOM") and x[12:16] == " CA "]
    first = {x[21:27]: x for x in reversed(atoms)}
    atoms = [first[key] for key in dict.fromkeys(x[21:27] for x in atoms)]
    positions = [[float(x[30:38]), float(x[38:46]), float(x[46:54])] for x in atoms]
    return "".join(THREE[x[17:20]] for x in atoms), np.array(positions)


# EigenFold numbered the residues of the references by an alignment without gap penalties, and OpenStructure pairs
# residues by number. Next to a gap, one residue is therefore compared with an identical residue at the gap's other end.
# Key: the reference. Value: the residue, and the position of its partner.
NUMBERED = {"7u0e.H": (141, 145), "7w89.A": (0, 2)}
LAST_DIGIT = {"rmsd": 0.0005, "tm": 0.00005, "gdt_ts": 0.00005, "gdt_ha": 0.00005, "lddt": 0.00005}


@pytest.mark.skipif(not REAL.is_dir(), reason="needs shared/realdata beside the repository")
def test_values_of_tmscore_and_openstructure() -> None:
    """Reproduce the published digits of 36 models of CAMEO targets.

    EigenFold published these values of the TM-score program and OpenStructure.
    """
    with open(REAL / "metrics/REFERENCE_VALUES.tsv") as lines:
        rows = [row for row in csv.DictReader(lines, delimiter="\t") if row["tool"].startswith("EigenFold")]
    assert len(rows) == 5 * 36
    ours: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["model"] not in ours:
            sequence, predicted = read_ca(REAL / row["model"])
            reference, truth = read_ca(REAL / row["reference"])
            i, j = metrics.align(sequence, reference).T
            assert len(j) == len(reference)
            numbered = i.copy()
            for residue, place in (at for name, at in NUMBERED.items() if name in row["model"]):
                assert sequence[place] == sequence[i[residue]] == reference[residue]
                numbered[residue] = place
            ours[row["model"]] = {
                "rmsd": metrics.rmsd(predicted[i], truth[j]),
                "lddt": metrics.lddt(predicted[numbered, None], truth[j, None], np.ones((len(j), 1))),
                **vars(metrics.overlap(predicted[i], truth[j])),
            }
        metric, bound = row["metric"], LAST_DIGIT[row["metric"]]
        if (metric, row["model"].split("/")[-1]) == ("lddt", "7sz2.B.pdb.0.pdb"):
            # One of 3,438 pairs is off by 0.500002 angstrom, which is below 0.5 in OpenStructure's single precision.
            bound += 0.25 / 3438
        assert ours[row["model"]][metric] == pytest.approx(float(row["value"]), abs=bound + 1e-9), row
