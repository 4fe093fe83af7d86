"""Steps of many ranks and whole trainings: chance costs time, the same seed the same, and more failures never less."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from warpfold.cost.replay import ReplayedStep
from warpfold.cost.simulation import DAY, Chance, Interruptions, draw_steps, whole_training
from warpfold.errors import UserError

TIMES = {0: ReplayedStep(seconds=1.0, compute=0.7, exposed=0.2, launch=0.1), 1: ReplayedStep(1.5, 1.1, 0.3, 0.1)}
CALM = Chance(spread=0.0, noise=0.0, workers=0)


def test_where_nothing_happens_by_chance_a_step_takes_what_it_takes() -> None:
    found = draw_steps(TIMES, 4, 2, CALM, count=400)
    assert set(np.round(found.seconds, 9)) == {1.0, 1.5}
    assert found.mean == pytest.approx(1.25, abs=0.05)
    assert sum(found.parts.values()) == pytest.approx(found.mean)
    assert found.parts["loader"] == found.parts["stragglers"] == pytest.approx(0)


def test_the_same_seed_draws_the_same() -> None:
    one, two, other = (draw_steps(TIMES, 8, 2, Chance(slow=0.1), seed=seed) for seed in (3, 3, 4))
    assert (one.seconds == two.seconds).all()
    assert one.parts == two.parts
    assert (one.seconds != other.seconds).any()


def test_more_ranks_have_slower_ones_among_them() -> None:
    means = [draw_steps(TIMES, data, 1, Chance(workers=0, spread=0.05), count=200).mean for data in (1, 8, 64, 512)]
    assert means == sorted(means)
    assert means[-1] < 1.25 * np.exp(0.05 * 5)  # five standard deviations


@pytest.mark.parametrize("examples", [1, 4])
def test_a_loader_that_is_too_slow_decides_and_one_that_is_quick_is_not_waited_for(examples: int) -> None:
    quick, slow = (
        draw_steps({0: TIMES[0]}, 2, 1, Chance(spread=0, noise=0, tail=0, workers=2, example=x), examples, 100)
        for x in (0.1, 6.0)
    )
    assert quick.parts["loader"] == pytest.approx(0, abs=1e-9)
    assert slow.mean == pytest.approx(examples * 6.0 / 2, rel=0.05)
    assert sum(slow.parts.values()) == pytest.approx(slow.mean)


def test_one_slow_example_in_twenty_stops_a_step_of_many_ranks_unless_workers_are_ahead() -> None:
    """HFAiLab: where 5 % of the examples are slow, 128 ranks wait at nearly every step (1 - 0.95^128)."""
    late = Chance(spread=0, noise=0, example=0.5, tail=0.1, slow=0.05, slower=20.0, workers=1, ahead=1)
    ahead = Chance(spread=0, noise=0, example=0.5, tail=0.1, slow=0.05, slower=20.0, workers=8, ahead=4)
    waiting, prepared = (draw_steps({0: TIMES[0]}, 128, 1, chance, count=200) for chance in (late, ahead))
    assert waiting.mean > 5
    assert prepared.mean < 1.1


@given(st.floats(0.1, 20), st.floats(0, 30), st.floats(1, 3), st.integers(1, 5000))
@example(0.375, 2.2250738585e-313, 1.5, 1)
def test_more_failures_never_shorten_a_training(step: float, failures: float, more: float, every: int) -> None:
    def days(number: float) -> float:
        try:
            return whole_training(step, 10_000, Interruptions(failures=number, save_every=every)).days
        except UserError:
            return float("inf")

    assert days(0) <= days(failures) <= days(failures * more) * (1 + 1e-9)


def test_the_parts_of_a_training_are_all_of_it() -> None:
    told = Interruptions(failures=3, restart=600, save_every=100, save=10, validate_every=1000, validate=60)
    found = whole_training(2.0, 100_000, told)
    assert found.steps == 200_000
    assert found.saving == 10_000
    assert found.validating == 6_000
    assert found.failed == pytest.approx(3 * found.seconds / DAY)  # whatever is being done
    # A failure costs its restart and half of what lies between two checkpoints.
    assert found.repeated / found.failed == pytest.approx((100 * 2 + 16) / 2, rel=0.04)
    assert found.restarting == pytest.approx(600 * found.failed, rel=0.02)  # but for those that failed themselves
    assert found.seconds == pytest.approx(
        found.steps + found.saving + found.validating + found.repeated + found.restarting
    )


def test_a_training_that_would_never_end_is_refused() -> None:
    with pytest.raises(UserError, match="save more often"):
        whole_training(10.0, 10_000, Interruptions(failures=5_000, save_every=1_000))


def test_failures_drawn_one_by_one_cost_what_the_formula_says() -> None:
    """Those that interrupt a restart, too: without them it was 18 % too short here."""
    rng, rate, work, restart = np.random.default_rng(0), 20 / DAY, 3600.0, 1800.0
    taken, failures = [], 0
    for _ in range(4000):
        total, left, needed = 0.0, rng.exponential(1 / rate), work
        while left < needed:  # it failed, restarting or at work
            total, left, needed, failures = total + left, rng.exponential(1 / rate), restart, failures + 1
            if left >= restart:
                total, left, needed = total + restart, left - restart, work
        taken.append(total + work)
    told = Interruptions(failures=20, restart=restart, save_every=3600, save=0, validate_every=0)
    found = whole_training(1.0, 3600, told)
    assert found.seconds == pytest.approx(np.mean(taken), rel=0.04)
    assert found.failed == pytest.approx(failures / 4000, rel=0.04)
