"""Make the features of assemblies: shapes, chains side by side, shared alignments of copies, paired rows."""

import math
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.examples import example, templates
from warpfold.batch import Batch, at_pass, to_tensors
from warpfold.data.example.pairing import make_pairing, pair_rows
from warpfold.data.example.raw_example import Assembly, RawExample
from warpfold.data.features.choose import SampleConfig, choose_templates, delete_blocks
from warpfold.data.features.crop import (
    contiguous_crop,
    crop_assembly,
    draw_interface_residue,
    fixed_crop,
    near_other_chain,
    read_ca,
    spatial_crop,
)
from warpfold.data.features.make import concatenate_chains, make_features, read_entities
from warpfold.data.features.msa import mask_msa
from warpfold.geometry.atoms import CA
from warpfold.geometry.residue import ATOM14_MASK, ATOM37_MASK, GAP
from warpfold.keyed import keyed_rng
from warpfold.model.clusters import cluster_features

TRAIN = SampleConfig(crop=24, max_msa=8, max_extra=12)
WHOLE = SampleConfig(max_msa=6, max_extra=100)


def chain(length: int, depth: int, seed: int, species: int = 0) -> RawExample:
    """Return an example with atoms and rows of `species` different organisms (0: unknown)."""
    rng = np.random.default_rng(seed)
    raw = example(length, depth, seed=seed)
    keys = rng.integers(1, species + 1, len(raw.msa)) if species else np.zeros(len(raw.msa))
    positions = rng.normal(scale=8, size=(length, 37, 3)).astype(np.float32)
    return replace(
        raw,
        positions=positions,
        mask=(rng.random((length, 37)) < 0.9).astype(np.uint8),
        pairing=make_pairing(raw.msa, keys.astype(np.uint64), np.ones(len(raw.msa), bool)),
    )


def assembly(*chains: RawExample) -> Assembly:
    return Assembly("complex", tuple("ABCDEFGH"[: len(chains)]), chains)


def table(features: dict[str, np.ndarray], index: int = 0) -> Batch:
    """Return the features of one pass, those of clusters included."""
    batch = at_pass(to_tensors(features), index)
    return {**batch, **cluster_features(batch)}


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    copies=st.booleans(),
    depth=st.integers(0, 20),
    species=st.sampled_from([0, 3]),
    crop=st.integers(1, 60),
    sizes=st.tuples(st.integers(1, 30), st.integers(0, 30)),
    train=st.booleans(),
    pad=st.booleans(),
)
def test_features_fit_the_table_for_any_size(
    lengths: list[int],
    copies: bool,
    depth: int,
    species: int,
    crop: int,
    sizes: tuple[int, int],
    train: bool,
    pad: bool,
) -> None:
    chains = [chain(length, depth, seed, species) for seed, length in enumerate(lengths)]
    whole = assembly(*chains, *(chains[:1] if copies else []))
    config = SampleConfig(crop=crop, max_msa=sizes[0], max_extra=sizes[1], pad=pad, chain_rows=8)
    features = make_features(whole, config, 0, ("x", 3), 2, train)
    batch = to_tensors(features)  # all sizes of an axis are equal
    residues = min(crop, whole.length) if train else whole.length
    assert int(batch["seq_mask"].sum()) == residues
    assert len(batch["aatype"]) == (max(crop, residues) if pad and train else residues)
    seen = table(features, 1)
    assert all(torch.isfinite(x).all() for x in seen.values())
    assert 1 <= int(seen["msa_mask"][:, 0].sum()) <= sizes[0]
    assert int(seen["extra_msa_mask"][:, 0].sum()) <= sizes[1]
    used = batch["centre_rows"][0][seen["msa_mask"][:, 0] > 0].tolist()
    assert used[0] == 0
    assert used == sorted(set(used))
    present = set(batch["entity_id"].tolist())
    assert len(features["copy_atom_mask"]) == max((whole.entity_id == number).sum() for number in present - {0})


def test_chains_are_numbered_and_copies_of_a_sequence_are_one_entity() -> None:
    first, second = chain(7, 4, 0), chain(5, 4, 1)
    features = make_features(assembly(first, second, first), WHOLE, 0, ("x",))
    assert features["asym_id"].tolist() == [1] * 7 + [2] * 5 + [3] * 7
    assert features["entity_id"].tolist() == [1] * 7 + [2] * 5 + [1] * 7
    assert features["sym_id"].tolist() == [1] * 12 + [2] * 7
    assert features["residue_index"].tolist() == [*range(7), *range(5), *range(7)]
    assert (features["aatype"] == np.concatenate([first.aatype, second.aatype, first.aatype])).all()


def test_copies_have_the_alignment_of_the_first_even_where_it_is_not_in_the_crop() -> None:
    first, other, deeper = chain(20, 3, 1, species=2), chain(12, 8, 2, species=2), chain(20, 30, 3, species=2)
    copy = replace(first, msa=deeper.msa, deletions=deeper.deletions, pairing=deeper.pairing)  # under its own name
    for crops in ([0, 12, 20], [20, 12, 20]):
        residues = [np.arange(size) for size in crops]
        actual, expected = (
            read_entities(assembly(first, other, second), residues, WHOLE, 0, ("x",), train=False)
            for second in (copy, first)
        )
        for one, two in zip(actual, expected):
            for name in ("paired", "alone"):
                np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
            np.testing.assert_array_equal(one.raw.msa, two.raw.msa)


def test_copies_of_one_entity_are_not_paired() -> None:
    single = chain(9, 12, 0, species=4)
    features = make_features(assembly(single, single), WHOLE, 0, ("x",))
    assert (features["alignment"] == np.concatenate([single.msa, single.msa], 1)).all()


def test_without_pairing_only_the_queries_stand_side_by_side() -> None:
    first, second = chain(9, 12, 0, species=4), chain(6, 10, 1, species=4)
    for config, chains in (
        (replace(WHOLE, pairing=False), (first, second)),
        (WHOLE, (replace(first, pairing=None), second)),
    ):
        rows = make_features(assembly(*chains), config, 0, ("x",))["alignment"]
        gaps = np.stack([(rows[:, :9] == GAP).all(1), (rows[:, 9:] == GAP).all(1)])
        assert not gaps[:, 0].any()
        assert (gaps[:, 1:].sum(0) == 1).all()
        assert len(rows) == len(first.msa) + len(second.msa) - 1


def test_the_queries_are_the_only_certain_centre_and_draws_differ_between_passes() -> None:
    first, second = chain(9, 20, 0, species=4), chain(6, 20, 1, species=4)
    features = make_features(assembly(first, second), WHOLE, 0, ("x",), passes=40)
    rows, centres = features["alignment"], features["centre_rows"]
    for drawn, extra in zip(centres, features["extra_rows"]):
        assert drawn[0] == 0
        assert len(np.union1d(drawn, extra)) == len(rows)  # max_extra exceeds their number
        assert not np.intersect1d(drawn, extra).size
    assert np.bincount(centres.reshape(-1), minlength=len(rows))[1:].max() < len(centres)
    again = make_features(assembly(first, second), WHOLE, 0, ("x",), passes=40)
    assert all((again[name] == features[name]).all() for name in features)


@pytest.mark.parametrize("half", [2, 5, 100])
def test_rows_are_those_of_the_official_code(half: int) -> None:
    """Paired rows come first, then the unpaired rows of each entity (before pairs are cut), up to the limit."""
    first, second, third = (chain(4, 60, seed, species=9) for seed in (3, 4, 5))
    assert first.pairing is not None
    first = replace(first, pairing=replace(first.pairing, unpaired=np.arange(len(first.msa)) < 30))
    chains = (first, second, first, third)
    pairs = pair_rows([c.pairing for c in chains])
    kept = pairs[:half]
    expected = [[c.msa[row] if row >= 0 else [GAP] * 4 for c, row in zip(chains, rows)] for rows in kept]
    for entity in ([0, 2], [1], [3]):
        first_copy = chains[entity[0]]
        in_pairs = {tuple(first_copy.msa[row]) for row in pairs[:, entity[0]] if row >= 0}
        assert first_copy.pairing is not None
        alone = [
            row for row, may in zip(first_copy.msa, first_copy.pairing.unpaired) if may and tuple(row) not in in_pairs
        ]
        room = 2 * half - int((kept[:, entity[0]] >= 0).sum())
        expected += [[row if place in entity else [GAP] * 4 for place in range(4)] for row in alone[:room]]
    found = make_features(assembly(*chains), replace(WHOLE, chain_rows=2 * half), 0, ("x",))["alignment"]
    np.testing.assert_array_equal(found, np.array(expected).reshape(len(expected), -1))


def serving_pairing_alone(raw: RawExample, rows: int, species: int) -> RawExample:
    """Return an example in which the last `rows` rows, of one species, are only for pairing."""
    keys = np.where(np.arange(len(raw.msa)) < len(raw.msa) - rows, 0, species).astype(np.uint64)
    return replace(raw, pairing=make_pairing(raw.msa, keys, keys == 0))


def test_rows_that_serve_pairing_alone_stand_alone_where_their_entity_is_in_no_pair() -> None:
    """In a homomer, an entity without a partner, or with species that no other has, the rows are used unpaired."""
    a, two, other = chain(9, 12, 0), chain(6, 12, 1), chain(7, 12, 2)
    served = serving_pairing_alone(a, 5, species=7)
    homomer = make_features(assembly(served, served), WHOLE, 0, ("x",))["alignment"]
    assert (homomer == np.concatenate([a.msa, a.msa], 1)).all()
    for partner in (two, serving_pairing_alone(two, 4, species=8)):
        rows = make_features(assembly(served, partner), WHOLE, 0, ("x",))["alignment"]
        assert {tuple(row) for row in rows[:, :9]} == {tuple(row) for row in a.msa} | {(GAP,) * 9}
    # The other two are paired; their unpaired rows are those of the official code.
    trio = assembly(served, serving_pairing_alone(two, 4, species=8), serving_pairing_alone(other, 1, species=8))
    rows = make_features(trio, WHOLE, 0, ("x",))["alignment"]
    there = [(rows[:, part] != GAP).any(1).sum() for part in (slice(9), slice(9, 15), slice(15, 22))]
    assert there == [len(a.msa), len(two.msa) - 3, len(other.msa)]


def test_masked_positions_to_restore_are_residues_of_the_rows_own_entity() -> None:
    first, second = chain(9, 20, 0), chain(6, 20, 1)
    features = make_features(assembly(first, second), replace(WHOLE, masked_fraction=1.0), 0, ("x",))
    rows = features["alignment"][features["centre_rows"][0]]
    for row, asked in zip(rows[1:], features["bert_mask"][0][1:]):
        mine = slice(0, 9) if (row[:9] != GAP).any() else slice(9, None)
        assert asked[mine].all()
        assert asked.sum() == asked[mine].sum()
    assert features["bert_mask"][0][0].all()
    few = make_features(assembly(first, second), replace(WHOLE, masked_fraction=0.3), 0, ("x",))
    asked, changed = few["bert_mask"][0] > 0, few["masked_msa"][0] != few["true_msa"][0]
    assert 0.15 < asked.mean() / (features["bert_mask"][0] > 0).mean() < 0.45  # 0.3 of some 60 cells
    assert changed[0].sum() > 0
    assert not changed[0][~asked[0]].any()


def test_the_truth_of_every_copy_is_there_in_its_place_in_the_assembly() -> None:
    first, second = chain(9, 4, 0), chain(6, 4, 1)
    other = replace(first, positions=first.positions + 30 if first.positions is not None else None)
    operators = np.stack([np.eye(3, 4)] * 3)
    operators[1] = np.array([[0, -1, 0, 1], [1, 0, 0, 2], [0, 0, 1, 3]])
    features = make_features(Assembly("x", ("A", "B", "C"), (first, second, other), operators), WHOLE, 0, ("x",))
    truth, mask = features["copy_atom_positions"], features["copy_atom_mask"]
    assert truth.shape == (2, 24, 37, 3)
    assert first.positions is not None
    assert second.positions is not None
    assert first.mask is not None
    for columns in (slice(0, 9), slice(15, 24)):  # each copy may have the truth of either
        for copy in range(2):
            seen = first.mask > 0
            assert (mask[copy, columns] == seen).all()
            np.testing.assert_allclose(truth[copy, columns][seen], (first.positions + 30 * copy)[seen], atol=1e-5)
    seen = mask[0, 9:15] > 0
    x, y, z = np.moveaxis(second.positions, -1, 0)
    np.testing.assert_allclose(truth[0, 9:15][seen], np.stack([1 - y, 2 + x, 3 + z], -1)[seen], atol=1e-5)
    assert not mask[1, 9:15].any()
    assert "all_atom_positions" not in features


def test_templates_stand_side_by_side_and_are_always_as_many() -> None:
    first, second = replace(chain(9, 4, 0), templates=templates(2, 9)), chain(6, 4, 1)
    features = make_features(assembly(first, second), WHOLE, 0, ("x",))
    assert first.templates is not None
    assert features["template_aatype"].shape == (4, 15)
    assert (features["template_all_atom_positions"][:2, :9] == first.templates.positions).all()
    assert (features["template_aatype"][:2, :9] == first.templates.aatype).all()
    for name in ("aatype", "all_atom_positions", "all_atom_masks"):
        assert not features[f"template_{name}"][:, 9:].any()
        assert not features[f"template_{name}"][2:].any()
    assert features["template_mask"].tolist() == [1, 1, 0, 0]
    assert make_features(assembly(first), replace(WHOLE, max_templates=0), 0, ("x",))["template_mask"].shape == (0,)


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6), size=st.integers(1, 150), seed=st.integers(0, 99))
def test_contiguous_crops_are_spans_and_together_of_the_size(lengths: list[int], size: int, seed: int) -> None:
    crops = contiguous_crop(lengths, size, np.random.default_rng(seed))
    assert sum(map(len, crops)) == min(size, sum(lengths))
    for crop, length in zip(crops, lengths):
        assert (np.diff(crop) == 1).all()
        assert not len(crop) or (crop[0] >= 0 and crop[-1] < length)


def test_a_chain_may_give_as_few_and_as_many_residues_as_the_crop_allows() -> None:
    """The number of residues from the first chain is uniform from none to the whole crop."""

    class InOrder(np.random.Generator):
        def permutation(self, x: Any, axis: int = 0) -> Any:
            return np.arange(x)

    for lengths, few, many in (([10, 10], 0, 10), ([6, 10], 0, 6), ([10, 6], 4, 10), ([4, 3], 4, 4)):
        rng = InOrder(np.random.PCG64(0))
        counts = [len(contiguous_crop(lengths, 10, rng)[0]) for _ in range(300)]
        assert sorted(set(counts)) == list(range(few, many + 1))
        assert min(map(counts.count, set(counts))) > 10


@settings(max_examples=50, deadline=None)
@given(count=st.integers(2, 60), size=st.integers(1, 60), seed=st.integers(0, 99))
def test_spatial_crops_are_the_residues_nearest_to_one_of_an_interface(count: int, size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ca, seen, chains = rng.normal(scale=12, size=(count, 3)), rng.random(count) < 0.9, np.arange(count) % 2
    near = near_other_chain(ca, seen, chains, 10.0, np.arange(count))
    distances = np.linalg.norm(ca[:, None] - ca, axis=-1)
    other = (chains[:, None] != chains) & seen & seen[:, None]
    assert (near == ((distances < 10) & other).any(1)).all()
    drawn = [draw_interface_residue(ca, seen, chains, 10.0, rng) for _ in range(5)]
    assert set(drawn) <= (set(np.flatnonzero(near).tolist()) or {None})
    kept = spatial_crop(ca, seen, chains, size, 10.0, rng)
    if kept is None:
        assert not near.any()
        return
    assert kept.sum() == min(size, count)
    shown = np.where(seen, distances, np.inf)

    def is_centre(residue: int) -> bool:
        return bool(shown[residue, kept].max() <= shown[residue, ~kept].min(initial=np.inf))

    assert any(is_centre(residue) for residue in np.flatnonzero(near & kept))


def test_every_residue_of_an_interface_is_drawn_equally_often() -> None:
    ca = np.zeros((100, 3))
    ca[:, 0] = np.arange(100) * 4.0
    chains = (np.arange(100) >= 60).astype(int)  # two chains in a line: two residues of each are within 10 angstrom
    draws = [draw_interface_residue(ca, np.ones(100, bool), chains, 10.0, keyed_rng(0, i)) for i in range(2000)]
    counts = [draws.count(residue) for residue in (58, 59, 60, 61)]
    assert sum(counts) == 2000
    assert max(abs(count - 500) for count in counts) < 5 * (2000 * 0.25 * 0.75) ** 0.5  # five standard deviations


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_crops_of_assemblies_are_of_the_kind_that_the_settings_want(fraction: float) -> None:
    whole = assembly(chain(40, 0, 0), chain(30, 0, 1), chain(20, 0, 2))
    config = replace(TRAIN, spatial_fraction=fraction, interface_distance=30.0)
    crops = [crop_assembly(whole, config, keyed_rng(0, "crop", draw)) for draw in range(10)]
    assert all(sum(map(len, crop)) == 24 for crop in crops)
    spans = [all((np.diff(indices) == 1).all() for indices in crop) for crop in crops]
    assert all(spans) if fraction == 0 else not any(spans)


def flat(crops: list[np.ndarray]) -> list[list[int]]:
    return [crop.tolist() for crop in crops]


def plain_contiguous(lengths: list[int], size: int, rng: np.random.Generator) -> list[list[int]]:
    """AlphaFold-Multimer, Algorithm 1, with the numbers of the same generator."""
    crops: dict[int, list[int]] = {}
    order = rng.permutation(len(lengths)).tolist()
    for place, number in enumerate(order):
        room = size - sum(map(len, crops.values()))
        later = sum(lengths[other] for other in order[place + 1 :])
        count = int(rng.integers(min(lengths[number], max(0, room - later)), min(room, lengths[number]) + 1))
        start = int(rng.integers(lengths[number] - count + 1))
        crops[number] = list(range(start, start + count))
    return [crops[number] for number in range(len(lengths))]


def plain_near(ca: np.ndarray, seen: np.ndarray, chains: np.ndarray, distance: float, residue: int) -> bool:
    return any(
        seen[residue] and seen[other] and chains[other] != chains[residue]
        and ((ca[residue] - ca[other]) ** 2).sum() < distance**2
        for other in range(len(ca))
    )  # fmt: skip


def plain_spatial(
    ca: np.ndarray, seen: np.ndarray, chains: np.ndarray, size: int, distance: float, rng: np.random.Generator
) -> list[int] | None:
    """AlphaFold-Multimer, Algorithm 2, with the numbers of the same generator."""
    order = rng.permutation([i for i in range(len(ca)) if seen[i]]).tolist()
    centre = next((i for i in order if plain_near(ca, seen, chains, distance, i)), None)
    if centre is None:
        return None
    nearest = sorted(range(len(ca)), key=lambda i: (((ca[i] - ca[centre]) ** 2).sum() if seen[i] else math.inf, i))
    return sorted(nearest[:size])


def test_crops_are_the_algorithms_written_out() -> None:
    """In the larger complex, a few residues of an interface come late in the random order."""
    for seed in range(12):
        for lengths, size in (([9, 4, 7], 12), ([3, 1], 3), ([5, 5], 10), ([20], 6)):
            crops = contiguous_crop(lengths, size, keyed_rng(seed))
            assert flat(crops) == plain_contiguous(lengths, size, keyed_rng(seed))
    for count, spread in ((40, 12.0), (300, 45.0)):
        for seed in range(12):
            rng = np.random.default_rng(seed)
            # Whole coordinates, so that some distances are exactly 5.
            ca, seen = np.rint(rng.normal(scale=spread, size=(count, 3))), rng.random(count) < 0.8
            ca[~seen] = 0
            chains = np.repeat(np.arange(3), [count // 2, count // 4, count // 4])
            kept = spatial_crop(ca, seen, chains, 15, 5.0, keyed_rng(seed))
            expected = plain_spatial(ca, seen, chains, 15, 5.0, keyed_rng(seed))
            assert (None if kept is None else np.flatnonzero(kept).tolist()) == expected
            near = near_other_chain(ca, seen, chains, 5.0, np.arange(count)[::-1])
            assert near.tolist() == [plain_near(ca, seen, chains, 5.0, i) for i in reversed(range(count))]
    apart = np.array([[0.0, 0, 0], [10, 0, 0], [0, 0, 9.5]])
    assert near_other_chain(apart, np.ones(3, bool), np.arange(3), 10.0, np.arange(3)).tolist() == [True, False, True]
    assert draw_interface_residue(apart, np.ones(3, bool), np.zeros(3, int), 99.0, keyed_rng(0)) is None


def test_crops_of_assemblies_follow_from_the_generator() -> None:
    """An assembly is cropped in space if there is an interface, and contiguously otherwise."""
    operators = np.stack([np.eye(3, 4)] * 3)
    operators[1, :, :3] = [[0, -1, 0], [1, 0, 0], [0, 0, 1]]
    operators[2, :, 3] = 4.0, -3.0, 2.0
    chains = [chain(14, 0, seed) for seed in range(3)]
    whole = Assembly("complex", ("A", "B", "C"), tuple(chains), operators)
    lengths, config = [14, 14, 14], replace(TRAIN, crop=20, interface_distance=8.0)
    positions = []
    for raw, operator in zip(chains, operators):
        assert raw.positions is not None
        positions.append(raw.positions[:, CA] @ operator[:, :3].T + operator[:, 3])
    ca, seen = np.concatenate(positions), np.concatenate([raw.mask[:, CA] > 0 for raw in chains])  # type: ignore[index]
    read = read_ca(whole)
    assert read is not None
    assert read[1].tolist() == seen.tolist()
    np.testing.assert_allclose(read[0][seen], ca[seen], atol=1e-4)
    numbers = np.repeat(np.arange(3), 14)

    def split(residues: list[int] | None) -> list[list[int]] | None:
        if residues is None:
            return None
        return [[i - 14 * number for i in residues if i // 14 == number] for number in range(3)]

    kinds = set()
    for step in range(20):
        rng = keyed_rng(step)
        is_spatial = rng.random() < 0.5
        kinds.add(is_spatial)
        expected = split(plain_spatial(ca, seen, numbers, 20, 8.0, rng)) if is_spatial else None
        expected = expected or plain_contiguous(lengths, 20, rng)
        assert flat(crop_assembly(whole, config, keyed_rng(step))) == expected
        # Without an interface, or without atoms of a chain
        rng = keyed_rng(step)
        if rng.random() < 0.5:
            plain_spatial(ca, seen, numbers, 20, 0.0, rng)
        assert flat(crop_assembly(whole, replace(config, interface_distance=0.0), keyed_rng(step))) == (
            plain_contiguous(lengths, 20, rng)
        )
        rng = keyed_rng(step)
        rng.random()
        bare = replace(whole, chains=(chains[0], replace(chains[1], positions=None), chains[2]))
        assert flat(crop_assembly(bare, config, keyed_rng(step))) == plain_contiguous(lengths, 20, rng)
        assert read_ca(bare) is None
        # A single chain is cropped contiguously, without a draw of the kind.
        alone = crop_assembly(assembly(chains[0]), replace(config, crop=6), keyed_rng(step))
        assert flat(alone) == plain_contiguous([14], 6, keyed_rng(step))
        # Two chains have an interface, and a draw that equals the fraction is not below it.
        two = replace(whole, chains=tuple(chains[:2]))
        equal = replace(config, spatial_fraction=float(keyed_rng(step).random()))
        rng = keyed_rng(step)
        rng.random()
        assert flat(crop_assembly(two, equal, keyed_rng(step))) == plain_contiguous([14, 14], 20, rng)
        rng = keyed_rng(step)
        rng.random()
        near = plain_spatial(ca[:28], seen[:28], numbers[:28], 20, 99.0, rng)
        spatial = crop_assembly(two, replace(config, spatial_fraction=1.0, interface_distance=99.0), keyed_rng(step))
        assert flat(spatial) == split(near)[:2]  # type: ignore[index]
    assert kinds == {False, True}
    everything = [list(range(14))] * 3
    for crop in (None, 42, 60):
        assert flat(crop_assembly(whole, replace(config, crop=crop), keyed_rng(0))) == everything
    assert flat(fixed_crop(whole, 20, 8.0)) == split(
        plain_spatial(ca, seen, numbers, 20, 8.0, keyed_rng(0, "complex", "crop"))
    )
    for size in (42, 43):
        assert flat(fixed_crop(whole, size, 8.0)) == everything
    for other, distance in ((whole, 0.0), (bare, 8.0)):
        assert flat(fixed_crop(other, 20, distance)) == [list(range(14)), list(range(6)), []]


# The features of an assembly, written out


def plain_alignment(
    whole: Assembly, crops: list[list[int]], config: SampleConfig, rng: np.random.Generator | None
) -> tuple[np.ndarray, np.ndarray, list[int], list[int]]:
    """Return the rows, their deletions, the owner of each row (0: a pair), and the entities in the order of their rows.

    All copies of an entity have the alignment of its first chain.
    """
    numbers = whole.entity_id.tolist()
    present = [k for k in range(len(crops)) if crops[k]]
    firsts = [cast(RawExample, whole.chains[numbers.index(number)]) for number in numbers]
    entities = list(dict.fromkeys(numbers[k] for k in present))
    all_pairs = np.zeros((0, len(present)), np.int64)
    if len(entities) > 1:
        all_pairs = pair_rows([firsts[k].pairing for k in present]) if config.pairing else np.zeros((1, len(present)))
    pairs = all_pairs.astype(int).tolist()[: max(config.chain_rows // 2, 1)]
    if rng is not None and pairs:
        pairs = [pairs[i] for i in delete_blocks(len(pairs), config, rng)]
    kinds = [numbers[k] for k in present]
    rows = [{number: pair[kinds.index(number)] for number in entities} for pair in pairs]
    owners = [0] * len(pairs)
    for place, number in enumerate(entities, 1):
        raw = firsts[numbers.index(number)]
        paired = [int(row) for row in all_pairs[:, kinds.index(number)] if row >= 0]
        letters = [tuple(row) for row in raw.msa.tolist()]
        if raw.pairing is None:
            alone = [row for row in range(raw.depth) if row not in paired]
        else:
            may = raw.pairing.unpaired.tolist()
            if not any(paired):
                may = [letters.index(row) == i for i, row in enumerate(letters)]
            alone = [i for i in range(raw.depth) if may[i] and letters[i] not in {letters[row] for row in paired}]
        if rng is not None and alone:
            alone = [alone[i] for i in delete_blocks(len(alone), config, rng)]
        room = config.chain_rows - sum(pair[number] >= 0 for pair in rows[: len(pairs)])
        alone = alone[: max(room, 0)]
        rows += [{number: row} for row in alone]
        owners += [place] * len(alone)
    msa, deletions = [], []
    for row in rows:
        cells = [
            (int(firsts[k].msa[row[numbers[k]], i]), min(int(firsts[k].deletions[row[numbers[k]], i]), 32767))
            if row.get(numbers[k], -1) >= 0 else (GAP, 0)
            for k, crop in enumerate(crops) for i in crop
        ]  # fmt: skip
        msa.append([code for code, _ in cells])
        deletions.append([deletion for _, deletion in cells])
    return np.array(msa, np.uint8), np.array(deletions, np.int16), owners, entities


def plain_assembly(
    whole: Assembly, crops: list[list[int]], config: SampleConfig, key: tuple[str | int, ...], passes: int, train: bool
) -> dict[str, Any]:
    """Compute the features of an assembly residue by residue, from the seed 7."""
    numbers = whole.entity_id.tolist()
    chains = [cast(RawExample, raw) for raw in whole.chains]
    firsts = [chains[numbers.index(number)] for number in numbers]
    columns = [(k, i) for k, crop in enumerate(crops) for i in crop]
    n = len(columns)
    msa, deletions, owners, entities = plain_alignment(
        whole, crops, config, keyed_rng(7, *key, "blocks") if train else None
    )
    depth = len(msa)
    aatype = [int(firsts[k].aatype[i]) for k, i in columns]
    found: dict[str, Any] = {
        "aatype": aatype,
        "residue_index": [int(firsts[k].residue_index[i]) for k, i in columns],
        "seq_mask": [1] * n,
        "asym_id": [k + 1 for k, _ in columns],
        "entity_id": [numbers[k] for k, _ in columns],
        "sym_id": [numbers[: k + 1].count(numbers[k]) for k, _ in columns],
        "target_feat": [[float(code + 1 == channel) for channel in range(22)] for code in aatype],
        "atom14_atom_exists": ATOM14_MASK[aatype],
        "atom37_atom_exists": ATOM37_MASK[aatype],
        "alignment": msa, "alignment_deletions": deletions, "alignment_mask": np.ones((depth, n)),
    }  # fmt: skip
    drawn: dict[str, list[Any]] = {name: [] for name in (
        "centre_rows", "extra_rows", "masked_msa", "bert_mask", "true_msa")}  # fmt: skip
    profile = np.stack([(msa == code).mean(0) for code in range(22)], 1)
    for index in range(passes if config.resample_msa else 1):
        rng = keyed_rng(7, *key, index, "clusters")
        centres = [0, *sorted(rng.choice(np.arange(1, depth), min(config.max_msa, depth) - 1, replace=False).tolist())]
        others = [row for row in range(depth) if row not in centres]
        extra = sorted(rng.choice(np.array(others, int), min(len(others), config.max_extra), replace=False).tolist())
        rng = keyed_rng(7, *key, index, "mask")
        masked, bert = mask_msa(msa[centres], profile.astype(np.float32), config, rng)
        own = [[owners[row] == 0 or entities[owners[row] - 1] == numbers[k] for k, _ in columns] for row in centres]
        for name, value in zip(drawn, (centres, extra, masked, bert & np.array(own), msa[centres])):
            drawn[name].append(value)
    if not drawn["extra_rows"][0]:
        drawn["extra_rows"] = [[depth if config.empty_extra == "masked" else 0]] * len(drawn["extra_rows"])
        for name in ("alignment", "alignment_deletions", "alignment_mask"):
            found[name] = np.concatenate([found[name], np.zeros((1, n))])
    found |= drawn
    count = config.max_templates
    types, mask = np.zeros((count, n)), np.zeros((count, n, 37))
    positions = np.zeros((count, n, 37, 3))
    for number in entities:
        raw = chains[numbers.index(number)]
        total = raw.templates_count
        used = list(range(min(total, count)))
        if train:
            used = choose_templates(total, count, keyed_rng(7, *key, "templates", number)).tolist()
        for t, template in enumerate(used):
            for column, (k, i) in enumerate(columns):
                if numbers[k] == number:
                    assert raw.templates is not None
                    types[t, column] = raw.templates.aatype[template, i]
                    positions[t, column] = raw.templates.positions[template, i]
                    mask[t, column] = raw.templates.mask[template, i]
    for column, (k, i) in enumerate(columns):
        if whole.fixed and (fixed := whole.fixed[k]) is not None:
            for array, values in ((types, fixed.aatype), (positions, fixed.positions), (mask, fixed.mask)):
                array[1:, column] = array[:-1, column].copy()
                array[0, column] = values[0, i]
    if count:
        found |= {"template_aatype": types, "template_all_atom_positions": positions, "template_all_atom_masks": mask}
    found["template_mask"] = [float(mask[t].any()) for t in range(count)]
    if all(raw.positions is not None for raw, number in zip(chains, numbers) if number in entities):
        copies = max(numbers.count(number) for number in entities)
        truth, seen = np.zeros((copies, n, 37, 3)), np.zeros((copies, n, 37))
        for column, (k, i) in enumerate(columns):
            for copy, other in enumerate(j for j, number in enumerate(numbers) if number == numbers[k]):
                raw = chains[other]
                assert raw.positions is not None
                assert raw.mask is not None
                confident = raw.confidence is None or raw.confidence[i] >= config.min_confidence
                points = raw.positions[i].astype(float)
                if whole.operators is not None:
                    points = points @ whole.operators[other, :, :3].T + whole.operators[other, :, 3]
                seen[copy, column] = raw.mask[i] * confident
                truth[copy, column] = points * seen[copy, column][:, None]
        found |= {"copy_atom_positions": truth, "copy_atom_mask": seen}
        found["resolution"] = chains[numbers.index(entities[0])].resolution or 0.0
        clamped = not train or not keyed_rng(7, *key, "clamp").random() < config.unclamped_fraction
        found["use_clamped_fape"] = float(clamped)
    return found


def trimer(templates_of: tuple[int, int] = (3, 0)) -> Assembly:
    """Return chains A and C of one sequence, which differ in their atoms, and B, which rows of A and C are paired with.

    Some rows serve only pairing, some deletions are very large, and B is a prediction.
    """
    a, b = chain(11, 30, 1, species=4), chain(8, 24, 2, species=4)
    for raw in (a, b):
        assert raw.pairing is not None
        raw.deletions[1::5, ::3] = 60_000
    unpaired = np.arange(len(a.msa)) < 20
    a = replace(a, pairing=replace(a.pairing, unpaired=unpaired), resolution=None)  # type: ignore[type-var]
    a = replace(a, templates=templates(templates_of[0], 11) if templates_of[0] else None)
    b = replace(b, templates=templates(templates_of[1], 8, seed=1) if templates_of[1] else None)
    b = replace(b, confidence=np.linspace(30, 70, 8).astype(np.float16), residue_index=b.residue_index + 5)
    assert a.positions is not None
    copy = replace(a, positions=a.positions + 40, mask=np.roll(a.mask, 1, 0))  # type: ignore[arg-type]
    operators = np.stack([np.eye(3, 4)] * 3)
    operators[2, :, :3] = [[0, -1, 0], [1, 0, 0], [0, 0, 1]]
    operators[1, :, 3] = 4.0, -3.0, 2.0
    return Assembly("complex", ("A", "B", "C"), (a, b, copy), operators)


ASSEMBLIES: dict[str, tuple[SampleConfig, dict[str, Any]]] = {
    "whole": (SampleConfig(max_msa=6, max_extra=9, chain_rows=24, masked_fraction=0.5), {}),
    "few rows": (SampleConfig(max_msa=6, max_extra=9, chain_rows=7, max_templates=2), {"templates_of": (4, 1)}),
    "one row": (SampleConfig(max_msa=50, max_extra=9, chain_rows=1), {}),
    "without pairs": (SampleConfig(max_msa=6, max_extra=9, pairing=False, max_templates=0), {"resolution": 1.5}),
    "without an extra MSA": (SampleConfig(max_msa=60, max_extra=9, min_confidence=0.0), {"operators": None}),
    "the query as extra MSA": (SampleConfig(max_msa=5, max_extra=0, empty_extra="query"), {}),
    "one sample": (SampleConfig(max_msa=6, max_extra=9, resample_msa=False, interface_distance=99.0), {}),
    "fixed templates": (SampleConfig(max_msa=6, max_extra=9, max_templates=3), {"fixed": True}),
    "without atoms": (SampleConfig(max_msa=6, max_extra=9), {"atoms": False}),
    "without known species": (SampleConfig(max_msa=6, max_extra=9, chain_rows=30), {"species": False}),
    "one entity": (SampleConfig(max_msa=6, max_extra=9), {"homomer": True}),
}


@pytest.mark.parametrize("name", ASSEMBLIES)
@pytest.mark.parametrize("train", [False, True])
def test_an_assembly_has_the_features_that_its_definition_has(name: str, train: bool) -> None:
    config, more = ASSEMBLIES[name]
    whole = trimer(more.get("templates_of", (3, 0)))
    a, b, c = (cast(RawExample, raw) for raw in whole.chains)
    if "resolution" in more:
        whole = replace(whole, chains=(replace(a, resolution=more["resolution"]), b, c))
    if "operators" in more:
        whole = replace(whole, operators=None)
    if "atoms" in more:
        whole = replace(whole, chains=(a, replace(b, positions=None, mask=None), c))
    if "species" in more:
        whole = replace(whole, chains=(replace(a, pairing=None), b, replace(c, pairing=None)))
    if "fixed" in more:
        whole = replace(whole, fixed=(templates(1, 11, seed=4), None, templates(1, 11, seed=5)))
    if "homomer" in more:
        whole = replace(whole, ids=("A", "C"), chains=(a, c), operators=None)
    every = [list(range(chain.length)) for chain in whole.chains]
    crops = [every, [[1, 2, 5], [0, 7], [2, 3, 4, 10]], [[], [2, 3], [0, 5]], [[], [], [4, 5, 6]], [[4], [], [1, 4]]]
    crops = [crop if len(crop) == len(every) else [crop[0] or [3], crop[2]] for crop in crops]
    for step in range(8 if train else len(crops)):
        config = replace(config, crop=(15, 22, 30, 4)[step % 4])
        key = ("x", step)
        crop = crops[step % len(crops)]
        chosen = None if step == 0 else [np.array(residues, np.int64) for residues in crop]
        if train:
            crop = [x.tolist() for x in crop_assembly(whole, config, keyed_rng(7, *key, "crop"))]
        found = make_features(whole, config, 7, key, 3, train, None if train else chosen)
        expected = plain_assembly(whole, crop, config, key, 3, train)
        names = {"template_pseudo_beta", "template_pseudo_beta_mask"}
        if not config.max_templates:
            names |= {"template_aatype", "template_all_atom_positions", "template_all_atom_masks"}
        assert found.keys() - expected.keys() == names
        for feature, value in expected.items():
            np.testing.assert_allclose(found[feature], value, rtol=1e-6, atol=2e-5, err_msg=feature)
        equal = float(keyed_rng(7, *key, "clamp").random())
        if train and "use_clamped_fape" in expected:
            again = make_features(whole, replace(config, unclamped_fraction=equal), 7, key, train=True)
            assert again["use_clamped_fape"] == 1
            assert len(again["centre_rows"]) == 1
    # By default, an assembly has one pass and is not cropped.
    plain = make_features(whole, replace(config, crop=3), 7, ("x", 0))
    assert len(plain["aatype"]) == whole.length
    assert len(plain["centre_rows"]) == 1


def test_a_padded_assembly_has_the_features_of_the_plain_one() -> None:
    for max_msa, max_extra in ((5, 100), (100, 9)):
        config = replace(TRAIN, max_msa=max_msa, max_extra=max_extra)
        plain = make_features(trimer(), config, 0, ("x", 1), 2, train=True)
        padded = make_features(trimer(), replace(config, pad=True, crop=24), 0, ("x", 1), 2, train=True)
        assert padded["masked_msa"].shape == (2, max_msa, 24)
        assert padded["extra_rows"].shape == (2, max_extra)
        for index in range(2):
            one, two = (table(features, index) for features in (plain, padded))
            for name in ("msa_feat", "msa_mask", "extra_msa", "extra_msa_mask", "extra_deletion_value", "bert_mask"):
                inside = tuple(slice(size) for size in one[name].shape)
                torch.testing.assert_close(two[name][inside], one[name])
                if name != "msa_feat":
                    assert int(two[name].count_nonzero()) == int(one[name].count_nonzero())


def test_concatenated_chains_have_a_gap_between_them_and_the_alignment_of_the_assembly() -> None:
    config = SampleConfig(max_templates=4, chain_rows=24)
    of_a, of_b = (templates(1, 11, seed=4), None, None), (None, templates(1, 8, seed=4), None)
    for fixed, templates_of, count in (
        ((), (0, 0), 0), ((), (2, 3), 3), ((), (4, 4), 4), (of_b, (1, 3), 4), (of_b, (0, 0), 1), (of_a, (4, 1), 4),
    ):  # fmt: skip
        whole = replace(trimer(templates_of), fixed=fixed)
        every = [list(range(11)), list(range(8)), list(range(11))]
        found = concatenate_chains(whole, config, 200)
        expected = plain_assembly(whole, every, replace(config, max_templates=count), (), 1, train=False)
        assert found.name == "complex"
        assert found.aatype.tolist() == expected["aatype"]
        assert found.residue_index.tolist() == [*range(11), *range(211, 219), *range(419, 430)]
        msa, deletions, _, _ = plain_alignment(whole, every, config, None)
        np.testing.assert_array_equal(found.msa, msa)
        np.testing.assert_array_equal(found.deletions, deletions)
        profile = np.stack([(msa == code).mean(0) for code in range(22)], 1)
        np.testing.assert_allclose(found.profile, profile, atol=1e-6)
        assert found.templates_count == count
        if found.templates is not None:
            np.testing.assert_array_equal(found.templates.positions, expected["template_all_atom_positions"])
            np.testing.assert_array_equal(found.templates.mask, expected["template_all_atom_masks"])
            # Chains without a template there have gaps.
            blank = ~expected["template_all_atom_masks"].any(2) & (expected["template_aatype"] == 0)
            types = np.where(blank, found.templates.aatype, expected["template_aatype"])
            np.testing.assert_array_equal(found.templates.aatype, types)
            shown = {0: templates_of[0], 11: templates_of[1], 19: templates_of[0]}
            for start, own in shown.items():
                own += bool(fixed) and fixed[(0, 11, 19).index(start)] is not None
                assert (found.templates.aatype[own:, start : start + 8] == GAP).all()
