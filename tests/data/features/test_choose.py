"""Choose crops and rows of an example: distributions, equal chances of all rows, and costs by size."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warpfold.data.features import choose
from warpfold.data.features.choose import (
    RUN_ROWS,
    SampleConfig,
    crop_start,
    delete_blocks,
    expected_rows,
    predicted_assembly_cost,
    predicted_cost,
    row_budget,
    select,
    thin_runs,
)
from warpfold.keyed import keyed_rng

TRAIN = SampleConfig(crop=16, max_msa=8, max_extra=12)
THIN = SampleConfig(max_msa=3, max_extra=7, max_cost=1e-9, blocks=0)  # the smallest budget: 10 rows


def test_block_deletion_keeps_the_query_and_deletes_contiguous_blocks() -> None:
    config = SampleConfig()
    kept = [delete_blocks(1000, config, keyed_rng(i)) for i in range(300)]
    assert all(rows[0] == 0 for rows in kept)
    assert all((np.diff(rows) > 0).all() for rows in kept)
    assert max((np.diff(rows) > 1).sum() for rows in kept) <= 5
    # With a deleted block of 300 rows that starts at any of 1000, row r is kept with probability
    # 1 - min(r + 1, 300) / 1000.
    expected = np.mean((1 - np.minimum(np.arange(1000) + 1, 300) / 1000) ** 5)
    assert np.mean([len(rows) for rows in kept]) / 1000 == pytest.approx(expected, abs=0.03)
    np.testing.assert_array_equal(delete_blocks(1, config, keyed_rng(0)), [0])
    np.testing.assert_array_equal(delete_blocks(3, config, keyed_rng(0)), [0, 1, 2])  # empty blocks


def test_crop_starts_are_uniform_when_clamped_and_lean_to_the_start_otherwise() -> None:
    rng = keyed_rng(0, "crop")
    clamped = np.bincount([crop_start(20, 11, True, rng) for _ in range(20_000)]) / 20_000
    np.testing.assert_allclose(clamped, 0.1, atol=0.015)
    unclamped = np.bincount([crop_start(20, 11, False, rng) for _ in range(20_000)]) / 20_000
    expected = [sum(1 / (n + 1) for n in range(s, 10)) / 10 for s in range(10)]
    np.testing.assert_allclose(unclamped, expected, atol=0.015)


@pytest.mark.parametrize(
    "bad", [{"crop": 0}, {"max_msa": 0}, {"max_extra": -1}, {"masked_fraction": 1.5}, {"mask_same": 0.95}]
)
def test_settings_that_cannot_be_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        SampleConfig(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("thin", ["rows", "runs"])
@pytest.mark.parametrize("depth", [11, 40, 41])
def test_every_row_is_left_out_with_the_same_probability(thin: str, depth: int) -> None:
    config = dataclasses.replace(THIN, thin=thin)
    draws = 4000
    counts, sizes = np.zeros(depth), []
    for seed in range(draws):
        rows = select(30, depth, config, seed, ("x",), train=True).rows
        assert (np.diff(rows) > 0).all()
        counts[rows] += 1
        sizes.append(len(rows))
    assert max(sizes) <= row_budget(30, config) == 10
    assert counts[0] == draws  # the query
    share = (np.mean(sizes) - 1) / (depth - 1)
    assert share > 0.1
    deviation = (counts[1:] - draws * share) / np.sqrt(draws * share * (1 - share))
    assert np.abs(deviation).max() < 4  # 10 to 40 standard deviates, with a fixed seed
    assert deviation.std() < 1.5


@settings(max_examples=60, deadline=None)
@given(depth=st.integers(2, 900), count=st.integers(1, 300), seed=st.integers(0, 9))
def test_runs_stay_whole_and_within_the_budget(depth: int, count: int, seed: int) -> None:
    count = min(count, depth - 1)
    rows = thin_runs(np.arange(0, 3 * depth, 3), count, keyed_rng(seed))
    assert rows[0] == 0
    assert (np.diff(rows) > 0).all()
    assert len(rows) <= count
    if count > 4 * RUN_ROWS:
        assert len(rows) > count - 2 * RUN_ROWS  # the budget is used
        assert (np.diff(rows) > 3).sum() <= len(rows) / (RUN_ROWS / 2) + 2  # in few runs


def test_a_prediction_uses_every_row_and_the_best_templates() -> None:
    chosen = select(30, 50_000, SampleConfig(max_cost=1e-9), 0, ("x",), train=False, templates=9)
    np.testing.assert_array_equal(chosen.rows, np.arange(50_000))
    np.testing.assert_array_equal(chosen.templates, np.arange(4))
    assert (chosen.start, chosen.stop, chosen.clamped) == (0, 30, True)


def test_training_uses_every_row_that_block_deletion_leaves_if_no_cost_is_set() -> None:
    config = SampleConfig()
    rows = select(30, 50_000, config, 0, ("x",), train=True).rows
    np.testing.assert_array_equal(rows, delete_blocks(50_000, config, keyed_rng(0, "x", "blocks")))
    clamped = [select(50, 5, TRAIN, i, ("x",), train=True).clamped for i in range(3000)]
    assert np.mean(clamped) == pytest.approx(0.9, abs=0.02)  # one in ten is uncropped


def test_the_budget_leaves_what_the_model_sees_and_does_not_depend_on_where_the_crop_lies() -> None:
    config = SampleConfig(max_cost=1e-9)  # the defaults of AlphaFold2: 512 cluster centres, 5,120 rows of the extra MSA
    assert (row_budget(256, config), row_budget(256, SampleConfig())) == (5632, None)
    assert row_budget(256, dataclasses.replace(config, max_cost=1e3)) > 5632
    config = dataclasses.replace(THIN, crop=10, blocks=5)
    chosen = [select(40, 400, config, 0, ("x", step), train=True) for step in range(30)]
    assert {len(choice.rows) for choice in chosen} == {10}
    whole = select(40, 400, dataclasses.replace(config, crop=None), 0, ("x", 0), train=True)
    np.testing.assert_array_equal(whole.rows, chosen[0].rows)


def test_the_budget_bounds_the_cost_of_a_pass_whatever_clusters_are_made_over() -> None:
    config = SampleConfig(crop=256, max_msa=128, max_extra=1024, max_cost=20)
    budgets = {}
    for clustering in ("chain", "crop"):
        clustered = dataclasses.replace(config, clustering=clustering, blocks=0)
        most = row_budget(600, clustered)
        assert most is not None
        budgets[clustering] = most
        assert predicted_cost(600, most, clustered) <= 20
        assert predicted_cost(600, most + 1, dataclasses.replace(clustered, max_cost=0)) == pytest.approx(20, rel=1e-3)
    assert budgets["crop"] > 1.5 * budgets["chain"] > 1.5 * 1152


@pytest.mark.parametrize("randomize", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3, 10, 333, 1000])
def test_expected_rows_is_the_mean_of_block_deletion(depth: int, randomize: bool) -> None:
    config = SampleConfig(randomize_num_blocks=randomize)
    drawn = [len(delete_blocks(depth, config, keyed_rng(i))) for i in range(2000)]
    assert expected_rows(depth, config) == pytest.approx(np.mean(drawn), rel=0.03, abs=0.3)


def test_the_predicted_cost_grows_with_the_work_and_stops_at_the_bound() -> None:
    config = SampleConfig(crop=256, max_msa=128, max_extra=1024, max_cost=8)
    free = dataclasses.replace(config, max_cost=0)
    for length, depth in [(50, 10), (200, 1000), (400, 1000)]:
        cost = predicted_cost(length, depth, config)
        assert predicted_cost(length + 50, depth, free) >= cost
        assert predicted_cost(length, depth + 5000, free) > cost
        assert predicted_cost(length, depth, config, passes=4) > 2 * cost - predicted_cost(1, 1, config)
    crop = dataclasses.replace(free, clustering="crop")
    assert predicted_cost(1000, 1000, crop) == predicted_cost(256, 1000, crop)  # crops cost the same
    assert predicted_cost(256, 1000, crop) == predicted_cost(256, 1000, free)
    # With clusters of the whole chain, reading and comparing grow with its length; the rest does not.
    chains = [predicted_cost(length, 1000, free, passes) for length in (1000, 2000, 3000) for passes in (1, 2)]
    assert chains[2] - chains[0] == pytest.approx(chains[4] - chains[2])
    assert chains[3] - chains[1] > chains[2] - chains[0] > 0
    bounded = predicted_cost(256, 200_000, config), predicted_cost(256, 50_000, config)
    twice = [predicted_cost(256, depth, config, passes=2) for depth in (200_000, 50_000)]
    assert twice[0] - bounded[0] == pytest.approx(twice[1] - bounded[1])  # except for reading, a pass costs the same
    assert predicted_cost(256, 200_000, free) > 3 * predicted_cost(256, 50_000, free)
    assert predicted_cost(300, 100, config, train=False) > predicted_cost(300, 100, config)


def test_an_assembly_costs_what_a_chain_does_but_for_comparing_and_pairing(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds if all rows are used. Further rows are only read, in the cropped columns of their entity."""
    monkeypatch.setattr(choose, "COST_COMPARE", 0.0)  # the model compares rows of assemblies
    config = SampleConfig(crop=64, max_msa=8, max_extra=16, chain_rows=40, clustering="crop", blocks=0)
    for length, depth in [(50, 5), (50, 20), (64, 40), (200, 40)]:
        alone = predicted_assembly_cost([(length, depth)], config)
        assert alone == pytest.approx(predicted_cost(length, depth, config), rel=1e-12)
    costs = [predicted_assembly_cost([(200, depth)], config) for depth in (40, 1040, 2040)]
    assert costs[1] - costs[0] == pytest.approx(costs[2] - costs[1])
    assert costs[1] - costs[0] == pytest.approx(64 * 1000 * choose.COST_READ)
    unpaired = dataclasses.replace(config, pairing=False)
    both, swapped = (predicted_assembly_cost([(a, 1040), (b, 40)], unpaired) for a, b in ((150, 50), (50, 150)))
    assert both - swapped == pytest.approx((48 - 16) * 1000 * choose.COST_READ)
    paired = predicted_assembly_cost([(150, 1040), (50, 40)], config)
    assert paired - both == pytest.approx(1080 * choose.COST_PAIR)
