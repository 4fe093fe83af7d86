"""Make the features of assemblies: shapes, chains side by side, shared alignments of copies, paired rows."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.examples import example, templates
from warpfold.batch import Batch, at_pass, to_tensors
from warpfold.data.example.pairing import make_pairing, pair_rows
from warpfold.data.example.raw_example import Assembly, RawExample
from warpfold.data.features.choose import SampleConfig
from warpfold.data.features.crop import (
    contiguous_crop,
    crop_assembly,
    draw_interface_residue,
    near_other_chain,
    spatial_crop,
)
from warpfold.data.features.make import make_features, read_entities
from warpfold.geometry.residue import GAP
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
