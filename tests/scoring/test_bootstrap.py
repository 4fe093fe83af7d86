"""The bootstrap: intervals as wide as theory says, and what pairing brings."""

import numpy as np
import pytest

from warpfold.scoring import bootstrap
from warpfold.scoring.bootstrap import interval, paired_bootstrap


def test_the_interval_is_that_of_a_mean() -> None:
    """Near to the normal one where there are many values; the same for the same values."""
    values = np.random.default_rng(1).normal(0.9, 0.1, 200).tolist()
    low, high = interval(values) or (0, 0)
    half = 1.96 * np.std(values) / np.sqrt(200)
    np.testing.assert_allclose([low, high], [np.mean(values) - half, np.mean(values) + half], atol=half / 20)
    assert interval(values) == (low, high)
    assert interval([0.5]) is None


def test_pairing_finds_a_gain_that_is_small_beside_the_spread_of_the_targets() -> None:
    random = np.random.default_rng(0)
    before = random.uniform(0.2, 0.9, 60)
    after = before + 0.02 + random.normal(0, 0.03, 60)
    found = paired_bootstrap(after.tolist(), before.tolist())
    assert found.difference == pytest.approx((after - before).mean())
    assert found.interval is not None
    half = 1.96 * np.std(after - before) / np.sqrt(60)
    np.testing.assert_allclose(np.subtract(found.interval, found.difference), [-half, half], atol=half / 8)
    assert found.is_clear
    assert found.better > 0.99
    assert (found.wins, found.losses) == (int((after > before).sum()), int((after < before).sum()))
    apart = interval(after.tolist()), interval(before.tolist())
    assert apart[0] is not None
    assert apart[1] is not None
    assert apart[0][0] < apart[1][1]  # unpaired, the two intervals overlap


def test_the_other_way_round_is_the_opposite() -> None:
    a, b = [0.5, 0.7, 0.9, 0.4], [0.4, 0.7, 0.95, 0.1]
    one, other = paired_bootstrap(a, b, seed=3), paired_bootstrap(b, a, seed=3)
    assert one.interval is not None
    assert other.interval == pytest.approx((-one.interval[1], -one.interval[0]))
    assert one.better == pytest.approx(1 - other.better)
    assert (one.wins, one.losses) == (other.losses, other.wins) == (2, 1)
    assert one == paired_bootstrap(a, b, seed=3)
    assert one.better != paired_bootstrap(a, b, seed=4).better
    assert str(one).startswith("+0.0875 [")


def test_equal_sets_are_no_better_and_one_target_has_no_interval() -> None:
    equal = paired_bootstrap([0.3, 0.6], [0.3, 0.6])
    assert (equal.difference, equal.interval, equal.better, equal.is_clear) == (0, (0, 0), 0.5, False)
    single = paired_bootstrap([0.5], [0.4])
    assert (single.interval, single.is_clear) == (None, False)
    assert "too few for an interval" in str(single)


def test_many_targets_are_drawn_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).random(300).tolist()
    whole = interval(values)
    monkeypatch.setattr(bootstrap, "BLOCK", 1000)
    assert interval(values) == pytest.approx(whole, abs=0.002)


@pytest.mark.parametrize(("a", "b"), [([0.1], [0.1, 0.2]), ([], []), ([np.nan], [0.1]), ([np.inf], [np.inf])])
def test_what_is_not_paired_is_refused(a: list[float], b: list[float]) -> None:
    with pytest.raises(ValueError, match="paired_bootstrap"):
        paired_bootstrap(a, b)
