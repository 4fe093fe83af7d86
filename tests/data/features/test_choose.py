"""Choose crops and rows of an example: distributions, equal chances of all rows, and costs by size."""

import dataclasses
import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warpfold.data.features import choose
from warpfold.data.features.choose import (
    RUN_ROWS,
    SampleConfig,
    all_but,
    choose_templates,
    crop_start,
    delete_blocks,
    expected_rows,
    predicted_assembly_cost,
    predicted_cost,
    row_budget,
    sample_with_query,
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


def test_the_defaults_are_those_of_alphafold2() -> None:
    assert SampleConfig() == SampleConfig(
        crop=None, max_msa=512, max_extra=5120, max_templates=4, clustering="chain", max_cost=0.0, thin="rows",
        resample_msa=True, masked_fraction=0.15, mask_uniform=0.1, mask_profile=0.1, mask_same=0.1, block_fraction=0.3,
        blocks=5, randomize_num_blocks=False, chain_rows=2048, pairing=True, spatial_fraction=0.5,
        interface_distance=10.0, unclamped_fraction=0.1, empty_extra="masked", min_confidence=50.0,
        predicted_rows=1000, pad=False,
    )  # fmt: skip


COUNTS = ("crop", "max_msa", "chain_rows")
UNSIGNED = (
    "max_extra", "max_templates", "max_cost", "blocks", "interface_distance", "min_confidence", "predicted_rows"
)  # fmt: skip
FRACTIONS = ("masked_fraction", "block_fraction", "spatial_fraction", "unclamped_fraction")
MASKS = "mask_uniform, mask_profile and mask_same must not be negative, nor add up to more than 1"


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        *(({name: 0}, f"{name} = 0: must be at least 1") for name in COUNTS),
        *(({name: 1_000_001}, f"{name} = 1000001: must be at most 1,000,000") for name in COUNTS),
        *(({name: -1}, f"{name} = -1: must not be negative") for name in UNSIGNED),
        *(
            ({name: value}, f"{name} = {value}: must lie between 0 and 1")
            for name in FRACTIONS
            for value in (-0.1, 1.1)
        ),
        ({"mask_same": 0.95}, MASKS),
        ({"mask_profile": -0.1}, MASKS),
    ],
)
def test_settings_that_cannot_be_are_refused(bad: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        SampleConfig(**bad)


@pytest.mark.parametrize(
    "good",
    [
        *(dict.fromkeys(COUNTS, value) for value in (1, 1_000_000)),
        *(dict.fromkeys(UNSIGNED, value) for value in (0, 1)),
        *(dict.fromkeys(FRACTIONS, value) for value in (0.0, 1.0)),
        {"mask_uniform": 0.5, "mask_profile": 0.25, "mask_same": 0.25},
        {"mask_uniform": 0.0, "mask_profile": 0.0, "mask_same": 0.0},
    ],
)
def test_settings_at_their_limits_are_accepted(good: dict[str, Any]) -> None:
    config = SampleConfig(**good)
    assert {name: getattr(config, name) for name in good} == good


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


# The draws are compared with loops over the definitions, which take the same numbers from the same generator.


def plain_blocks(depth: int, config: SampleConfig, rng: np.random.Generator) -> list[int]:
    size = math.floor(depth * config.block_fraction)
    count = int(rng.integers(config.blocks + 1)) if config.randomize_num_blocks else config.blocks
    starts = rng.integers(depth, size=count).tolist()
    return [row for row in range(depth) if row == 0 or not any(start <= row < start + size for start in starts)]


def plain_rows(rows: list[int], count: int, rng: np.random.Generator) -> list[int]:
    return [rows[0], *sorted(rng.choice(rows[1:], count - 1, replace=False).tolist())]


def plain_runs(rows: list[int], count: int, rng: np.random.Generator) -> list[int]:
    """Keep runs of at most 64 rows of a ring that is rotated to the right."""
    others = rows[1:]
    turn = len(others) - int(rng.integers(len(others)))
    ring = others[turn:] + others[:turn]
    number = math.ceil(len(ring) / min(64, max(count - 1, 1)))
    sizes = [len(ring) // number + (run < len(ring) % number) for run in range(number)]
    drawn = rng.choice(number, (count - 1) // sizes[0], replace=False).tolist()
    return [rows[0], *sorted(row for run in drawn for row in ring[sum(sizes[:run]) : sum(sizes[: run + 1])])]


def plain_start(length: int, size: int, clamped: bool, rng: np.random.Generator) -> int:
    last = length - size
    if not clamped:
        last = last - int(rng.integers(last + 1))
    return int(rng.integers(last + 1))


def plain_templates(count: int, most: int, rng: np.random.Generator) -> list[int]:
    """Draw from at most 20 templates."""
    count = 20 if count > 20 else count
    drawn = int(rng.integers(count + 1))
    return sorted(rng.choice(count, most if drawn > most else drawn, replace=False).tolist())


def test_draws_are_their_definitions_written_out() -> None:
    for seed in range(30):
        for depth in (2, 3, 10, 101):
            for config in (SampleConfig(), SampleConfig(blocks=2, block_fraction=0.45, randomize_num_blocks=True)):
                kept = delete_blocks(depth, config, keyed_rng(seed))
                assert (kept.dtype, kept.tolist()) == (np.int64, plain_blocks(depth, config, keyed_rng(seed)))
        for depth, count in ((2, 1), (2, 2), (3, 2), (9, 3), (66, 65), (66, 66), (200, 65), (200, 131), (400, 260)):
            rows = list(range(5, 5 + 3 * depth, 3))
            for draw, plain in ((thin_runs, plain_runs), (sample_with_query, plain_rows)):
                found = draw(np.array(rows), count, keyed_rng(seed)).tolist()
                assert found == plain(rows, count, keyed_rng(seed))
        for clamped in (False, True):
            start = crop_start(9 + seed, 9, clamped, keyed_rng(seed))
            assert start == plain_start(9 + seed, 9, clamped, keyed_rng(seed))
        for count, most in ((0, 4), (1, 4), (3, 4), (19, 30), (20, 30), (25, 30), (25, 4)):
            chosen = choose_templates(count, most, keyed_rng(seed))
            assert (chosen.dtype, chosen.tolist()) == (np.int64, plain_templates(count, most, keyed_rng(seed)))
    assert all_but(np.array([0, 3, 4]), 6).tolist() == [1, 2, 5]
    assert [choose_templates(*sizes, None).tolist() for sizes in ((2, 4), (7, 3))] == [[0, 1], [0, 1, 2]]


BLOCKS = SampleConfig(crop=16, blocks=2, max_templates=3, unclamped_fraction=0.5, predicted_rows=20)
CASES = {
    "defaults": (SampleConfig(), {}),
    "blocks": (BLOCKS, {"templates": 9}),
    "a prediction": (BLOCKS, {"predicted": True}),
    "a prediction with as many rows": (dataclasses.replace(BLOCKS, predicted_rows=90), {"predicted": True}),
    "one row of a prediction": (dataclasses.replace(BLOCKS, predicted_rows=1), {"predicted": True}),
    "all rows of a prediction": (dataclasses.replace(BLOCKS, predicted_rows=0), {"predicted": True}),
    "longer than the chain": (dataclasses.replace(BLOCKS, crop=60), {}),
    "thinned rows": (dataclasses.replace(THIN, crop=16, blocks=1), {}),
    "thinned runs": (dataclasses.replace(THIN, thin="runs"), {}),
    "exactly the budget": (dataclasses.replace(THIN, thin="runs", max_extra=87), {}),
    "fewer than the budget": (dataclasses.replace(THIN, max_extra=200), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_selection_is_its_definition(name: str) -> None:
    config, more = CASES[name]
    for step in range(12):
        key = ("x", step)
        rng = {purpose: keyed_rng(4, *key, purpose) for purpose in (
            "clamp", "crop", "predicted", "blocks", "budget", "templates")}  # fmt: skip
        clamped = not rng["clamp"].random() < config.unclamped_fraction
        size = 50 if config.crop is None or config.crop > 50 else config.crop
        start = plain_start(50, size, clamped, rng["crop"])
        rows = list(range(90))
        if more.get("predicted") and config.predicted_rows:
            rows = plain_rows(rows, config.predicted_rows, rng["predicted"])
        rows = [rows[i] for i in plain_blocks(len(rows), config, rng["blocks"])]
        budget = row_budget(50, config) or len(rows)
        if len(rows) > budget:
            rows = (plain_runs if config.thin == "runs" else plain_rows)(rows, budget, rng["budget"])
        found = select(50, 90, config, 4, key, train=True, **more)
        assert (found.start, found.stop, found.clamped) == (start, start + size, clamped)
        assert found.rows.tolist() == rows
        drawn = plain_templates(more.get("templates", 0), config.max_templates, rng["templates"])
        assert found.templates.tolist() == drawn
    # The draw itself is not below a fraction that equals it.
    fraction = float(keyed_rng(4, "x", 0, "clamp").random())
    assert select(50, 90, dataclasses.replace(config, unclamped_fraction=fraction), 4, ("x", 0), train=True).clamped


def plain_cost(length: int, read: float, rows: float, config: SampleConfig, crop: int | None, passes: int = 1) -> float:
    residues = length if crop is None or crop > length else crop
    columns = length if config.clustering == "chain" else residues
    centres = rows if rows < config.max_msa else config.max_msa
    extra = rows - centres if rows - centres < config.max_extra else config.max_extra
    cells = 7e-5 * residues * centres + 4.5e-6 * residues * extra + 2.3e-6 * residues * rows
    return 2.1 + 3e-6 * columns * read + passes * (cells + 2.6e-8 * columns * rows * centres)


def plain_expected_rows(depth: int, config: SampleConfig) -> float:
    """Integrate the probability that no block covers a row, over the rows."""
    size, counts = math.floor(depth * config.block_fraction), [config.blocks]
    if config.randomize_num_blocks:
        counts = list(range(config.blocks + 1))
    places = (np.arange(200_000) + 0.5) * depth / 200_000
    shares = [np.mean((1 - np.minimum(places, size) / depth) ** count) for count in counts]
    return max(depth * float(np.mean(shares)), 1.0)


COSTS = [
    SampleConfig(crop=64, max_msa=20, max_extra=50, max_cost=3.0),
    SampleConfig(crop=300, max_msa=20, max_extra=50, max_cost=2.5, clustering="crop", blocks=3),
    SampleConfig(max_msa=20, max_extra=50, block_fraction=1.0, randomize_num_blocks=True),
    SampleConfig(crop=64, max_msa=20, max_extra=50, max_cost=2.0, blocks=1, block_fraction=0.5),
]


@pytest.mark.parametrize("config", COSTS)
def test_costs_are_their_formulas(config: SampleConfig) -> None:
    for length in (10, 64, 200):
        budget = math.inf
        if config.max_cost:
            budget = 70
            while plain_cost(length, budget + 1, budget + 1, config, config.crop) <= config.max_cost:
                budget += 1
            assert row_budget(length, config) == budget
        for depth in (1, 2, 15, 60, 1000):
            expected = plain_expected_rows(depth, config)
            assert expected_rows(depth, config) == pytest.approx(expected, rel=1e-6)
            used = min(expected, budget)
            for passes in (1, 3):
                cost = plain_cost(length, expected, used, config, config.crop, passes)
                assert predicted_cost(length, depth, config, passes) == pytest.approx(cost, rel=1e-6)
                cost = plain_cost(length, depth, depth, config, None, passes)
                assert predicted_cost(length, depth, config, passes, train=False) == pytest.approx(cost)
            assert predicted_cost(length, depth, config) == predicted_cost(length, depth, config, 1, True)


@pytest.mark.parametrize("entities", [[(50, 9)], [(200, 100)], [(30, 5), (34, 12)], [(150, 70), (60, 8), (1, 1)]])
@pytest.mark.parametrize("pairing", [False, True])
@pytest.mark.parametrize("crop", [None, 64])
def test_the_cost_of_an_assembly_is_its_formula(
    entities: list[tuple[int, int]], pairing: bool, crop: int | None
) -> None:
    config = SampleConfig(crop=crop, max_msa=20, max_extra=15, chain_rows=40, pairing=pairing)
    length = sum(residues for residues, _ in entities)
    residues = length if crop is None or crop > length else crop
    rows = sum(40 if rows > 40 else rows for _, rows in entities)
    expected = 2.1 + 2.3e-6 * residues * rows
    for size, depth in entities:
        expected += 3e-6 * residues * size / length * depth
        if pairing and len(entities) > 1:
            expected += 9e-4 * depth
    centres = 20 if rows > 20 else rows
    extra = 15 if rows - centres > 15 else rows - centres
    expected += residues * (7e-5 * centres + 4.5e-6 * extra)
    assert predicted_assembly_cost(entities, config) == pytest.approx(expected, rel=1e-12)
