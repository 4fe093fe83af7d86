"""Test intervals of means and verdicts on paired scores: their error rates, and how often there is a verdict."""

import statistics
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import pytest

from warpfold.scoring import intervals
from warpfold.scoring.intervals import MIN_CLUSTERS, interval, paired_difference, t_quantile

# Distributions of differences with mean 0 and standard deviation 1.
SHAPES: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "normal": lambda random, size: random.normal(size=size),
    "skewed": lambda random, size: random.exponential(size=size) - 1,
    "skewed to the other side": lambda random, size: 1 - random.exponential(size=size),
    "tied": lambda random, size: random.choice([-1.0, 0.0, 0.0, 0.0, 1.0], size) / 0.4**0.5,
    "rounded": lambda random, size: np.round(random.normal(size=size), 1),
}


def test_the_interval_is_that_of_a_mean() -> None:
    """For many values, the interval is close to the normal one.  It is deterministic."""
    values = np.random.default_rng(1).normal(0.9, 0.1, 200).tolist()
    low, high = interval(values) or (0, 0)
    half = 1.96 * np.std(values) / np.sqrt(200)
    np.testing.assert_allclose([low, high], [np.mean(values) - half, np.mean(values) + half], atol=half / 20)
    assert interval(values) == (low, high)
    assert interval([0.5]) is None


def _verdicts(shape: str, count: int, shared: float, effect: float, draws: int) -> dict[str | None, float]:
    """Compute the frequency of each verdict over draws of `count` clusters of 1 to 6 chains.

    shared: the fraction of a chain's variance that is common to its cluster.  At 1, the chains are copies.
    """
    random = np.random.default_rng([count, int(10 * shared)])
    given = []
    for _ in range(draws):
        clusters = np.repeat(np.arange(count), random.integers(1, 7, count))
        of_cluster, of_chain = SHAPES[shape](random, count), SHAPES[shape](random, len(clusters))
        change = effect + shared**0.5 * of_cluster[clusters] + (1 - shared) ** 0.5 * of_chain
        given.append(paired_difference(change, np.zeros(len(change)), clusters.tolist()).verdict)
    return {verdict: given.count(verdict) / draws for verdict in set(given)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [8, 12, 20, 60])
def test_without_an_effect_a_verdict_is_rare(shape: str, count: int) -> None:
    for shared in (0.5, 1.0):
        found = _verdicts(shape, count, shared, 0.0, 4000)
        assert found.get("better", 0) + found.get("worse", 0) <= 0.07
        assert None not in found


@pytest.mark.parametrize("shape", SHAPES)
def test_an_effect_of_a_standard_deviation_is_found_with_12_clusters(shape: str) -> None:
    for shared in (0.5, 1.0):
        for effect, verdict in ((1.0, "better"), (-1.0, "worse")):
            assert _verdicts(shape, 12, shared, effect, 2000)[verdict] >= 0.6


def test_there_is_no_verdict_below_8_clusters() -> None:
    """Copies of chains do not replace clusters."""
    few = MIN_CLUSTERS - 1
    clusters = [number % few for number in range(10 * few)]
    found = paired_difference([0.9] * len(clusters), [0.1] * len(clusters), clusters)
    assert (found.interval, found.verdict, found.clusters, found.targets) == (None, None, few, 10 * few)
    assert found.difference == pytest.approx(0.8)


def test_copies_change_nothing() -> None:
    random = np.random.default_rng(0)
    after, before = random.uniform(size=(2, 10))
    copies = np.repeat(np.arange(10), [1, 2, 3, 4, 5, 6, 1, 1, 9, 1])
    single, copied = paired_difference(after, before), paired_difference(after[copies], before[copies], copies.tolist())
    assert copied.interval == pytest.approx(single.interval)
    assert copied.means == pytest.approx(single.means)
    assert copied.difference == pytest.approx(copied.means[0] - copied.means[1])


def test_pairing_finds_a_gain_that_is_small_beside_the_spread_of_the_targets() -> None:
    random = np.random.default_rng(0)
    before = random.uniform(0.2, 0.9, 60)
    after = before + 0.02 + random.normal(0, 0.03, 60)
    found = paired_difference(after.tolist(), before.tolist())
    assert found.difference == pytest.approx((after - before).mean())
    assert found.verdict == "better"
    assert (found.wins, found.losses) == (int((after > before).sum()), int((after < before).sum()))
    apart = interval(after.tolist()), interval(before.tolist())
    assert apart[0] is not None
    assert apart[1] is not None
    assert apart[0][0] < apart[1][1]  # unpaired, the two intervals overlap


def test_the_other_way_round_is_the_opposite() -> None:
    a, b = np.random.default_rng(1).uniform(size=(2, 9))
    one, other = paired_difference(a, b), paired_difference(b, a)
    assert one.interval is not None
    assert other.interval == pytest.approx((-one.interval[1], -one.interval[0]))
    assert (one.wins, one.losses) == (other.losses, other.wins)


def test_equal_sets_are_no_better() -> None:
    equal = paired_difference([0.3] * 9, [0.3] * 9)
    assert (equal.difference, equal.interval, equal.verdict) == (0, (0, 0), "unclear")


def test_a_difference_is_that_of_the_means_of_clusters() -> None:
    """Compare all fields with their definitions, for clusters of different sizes and equal scores of some targets."""
    random = np.random.default_rng(4)
    clusters = [*"aabbbcddddeffghhi"]
    a, b = random.uniform(0.5, 0.9, 17), random.uniform(0.4, 0.8, 17)
    b[[3, 8]] = a[[3, 8]]
    means = [[float(np.mean([x[k] for k in range(17) if clusters[k] == c])) for c in "abcdefghi"] for x in (a, b)]
    differences = [x - y for x, y in zip(*means)]
    middle = statistics.mean(differences)
    # 3.0851 is the 99.25 % quantile of Student's t with 8 degrees of freedom.
    half = 3.0851 * statistics.stdev(differences) / 3
    found = paired_difference(a.tolist(), b.tolist(), clusters).to_dict()
    assert found.pop("means") == pytest.approx([statistics.mean(x) for x in means])
    assert found.pop("difference") == pytest.approx(middle)
    assert found.pop("interval") == pytest.approx((middle - half, middle + half), rel=1e-3)
    wins, losses = sum(a > b), sum(a < b)
    verdict = "better" if middle > half else "unclear"
    assert found == {"targets": 17, "clusters": 9, "wins": wins, "losses": losses, "verdict": verdict}
    assert wins + losses == 15
    # Without clusters, each target is one.
    assert paired_difference(a[:8], b[:8]) == paired_difference(a[:8], b[:8], "abcdefgh")
    assert paired_difference(a[:8], b[:8]).interval is not None


def test_quantiles_of_t_are_those_of_tables() -> None:
    for degrees, expected in ((7, 3.2032), (11, 2.8789), (19, 2.6742), (59, 2.5057)):
        assert t_quantile(degrees) == pytest.approx(expected, rel=1e-3)


def test_quantiles_of_t_are_the_expansion_of_abramowitz_and_stegun() -> None:
    z = statistics.NormalDist().inv_cdf(1 - 0.015 / 2)
    # The coefficients of z, z^3, z^5, z^7 and z^9, and their divisor, for each power of 1 / degrees.
    terms = {
        0: ([1], 1),
        1: ([1, 1], 4),
        2: ([3, 16, 5], 96),
        3: ([-15, 17, 19, 3], 384),
        4: ([-945, -1920, 1482, 776, 79], 92160),
    }
    for degrees in (1, 2, 7, 30):
        expected = sum(
            coefficient * z ** (2 * k + 1) / divisor / degrees**power
            for power, (coefficients, divisor) in terms.items()
            for k, coefficient in enumerate(coefficients)
        )
        assert t_quantile(degrees) == pytest.approx(expected, rel=1e-7)


def test_many_targets_are_drawn_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).random(300).tolist()
    whole = interval(values)
    # Blocks of three draws do not divide the number of draws, so the last block is shorter.
    monkeypatch.setattr(intervals, "BLOCK", 1000)
    assert interval(values) == pytest.approx(whole, abs=0.002)
    # There are 10,000 draws.
    random, sizes = np.random.default_rng(0), [3] * 3333 + [1]
    means = np.concatenate([random.choice(values, (size, 300)).mean(1) for size in sizes])
    expected = tuple(np.percentile(means, (2.5, 97.5)))
    assert interval(values) == interval(values, seed=0) == pytest.approx(expected, rel=1e-12)
    assert interval(values, seed=1) != interval(values)
    # A block has at least one draw.
    few = interval(values[:40])
    monkeypatch.setattr(intervals, "BLOCK", 30)
    assert interval(values[:40]) == pytest.approx(few, rel=1e-12)
    assert interval([0.25, 0.75]) == (0.25, 0.75)


UNPAIRED = "paired_difference: lists of {} and {} values; each target needs both"
NOT_FINITE = "paired_difference: a value is not finite; leave its target out of both lists"


@pytest.mark.parametrize(
    ("a", "b", "clusters", "message"),
    [
        ([0.1], [0.1, 0.2], None, UNPAIRED.format("(1,)", "(2,)")),
        ([], [], None, UNPAIRED.format("(0,)", "(0,)")),
        ([[0.1]], [[0.1]], None, UNPAIRED.format("(1, 1)", "(1, 1)")),
        ([0.1, 0.2], [0.1, 0.2], ["a"], UNPAIRED.format("(2,)", "(2,)")),
        ([np.nan], [0.1], None, NOT_FINITE),
        ([0.1, 0.2], [0.1, np.nan], None, NOT_FINITE),
        ([np.inf, 0.2], [np.inf, 0.2], None, NOT_FINITE),
    ],
)
def test_what_is_not_paired_is_refused(a: Any, b: Any, clusters: Sequence[Hashable] | None, message: str) -> None:
    with pytest.raises(ValueError, match="paired_difference") as error:
        paired_difference(a, b, clusters)
    assert str(error.value) == message
