"""Sampling: the steps of Supp. 1.2.6 to 1.2.9 against plain formulas, their distributions, what must never change."""

import dataclasses
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warpfold.batch import to_tensors
from warpfold.data.features import RawExample, from_sequence, merge, profile_of
from warpfold.data.sample import (
    SampleConfig,
    cluster_statistics,
    crop_start,
    delete_blocks,
    deletion_value,
    keyed_rng,
    make_features,
    mask_msa,
    nearest_cluster,
    pad_features,
    select,
)
from warpfold.geometry.residue import GAP, MASK

ROOT = Path(__file__).parents[2]
TRAIN = SampleConfig(crop=16, max_msa=8, max_extra=12)


def example(length: int = 40, depth: int = 60, seed: int = 0, labels: bool = True) -> RawExample:
    """A random example: a family of noisy copies with gaps."""
    rng = np.random.default_rng(seed)
    aatype = rng.integers(0, 21, length).astype(np.uint8)
    rows = np.where(rng.random((depth, length)) < 0.4, rng.integers(0, 22, (depth, length)), aatype).astype(np.uint8)
    rows[rng.random(rows.shape) < 0.1] = GAP
    deletions = rng.poisson(0.1, rows.shape).astype(np.uint16)
    msa, deletions = merge(aatype, [(rows, deletions)])
    positions = rng.normal(size=(length, 37, 3)).astype(np.float32) * 10 if labels else None
    mask = rng.integers(0, 2, (length, 37)).astype(np.uint8) if labels else None
    index = np.arange(length, dtype=np.int32)
    return RawExample("x", aatype, index, msa, deletions, profile_of(msa), positions, mask, 2.0)


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(1, 40),
    depth=st.integers(0, 50),
    crop=st.integers(1, 60),
    max_msa=st.integers(1, 30),
    max_extra=st.integers(0, 30),
    max_rows=st.integers(1, 60),
    passes=st.integers(1, 3),
    train=st.booleans(),
    pad=st.booleans(),
)
def test_features_fit_the_table_for_any_size(
    length: int, depth: int, crop: int, max_msa: int, max_extra: int, max_rows: int, passes: int, train: bool, pad: bool
) -> None:
    raw = example(length, depth)
    config = SampleConfig(crop=crop, max_msa=max_msa, max_extra=max_extra, max_rows=max_rows, pad=pad)
    features = make_features(raw, config, 0, ("x", 3), passes, train)
    batch = to_tensors(features)  # every axis agrees
    residues = min(crop, length) if train else length
    assert features["seq_mask"].sum() == residues
    assert len(features["aatype"]) == (max(crop, residues) if pad and train else residues)
    assert len(batch["msa_feat"]) == passes
    assert all(np.isfinite(array).all() for array in features.values())
    rows = int(features["msa_mask"][0, :, 0].sum())
    extra = int(features["extra_msa_mask"][0, :, 0].sum())
    assert 1 <= rows <= min(max_msa, max_rows, len(raw.msa))
    assert extra <= max_extra
    assert rows + extra <= min(max_rows, len(raw.msa))
    if pad:
        assert features["msa_mask"].shape[1] == max_msa
        assert features["extra_msa_mask"].shape[1] == max(max_extra, 1)


def test_the_query_is_the_first_centre_and_the_crop_is_one_window_everywhere() -> None:
    raw = example()
    features = make_features(raw, TRAIN, 1, ("x", 0), 2, train=True)
    start = features["residue_index"][0]
    np.testing.assert_array_equal(features["residue_index"], np.arange(start, start + 16))
    window = raw.aatype[start : start + 16]
    np.testing.assert_array_equal(features["aatype"], window)
    for true_msa in features["true_msa"]:
        np.testing.assert_array_equal(true_msa[0], window)
        for row in true_msa:  # each is a row of the alignment
            assert (raw.msa[:, start : start + 16] == row).all(1).any()
    np.testing.assert_array_equal(features["all_atom_positions"], raw.positions[start : start + 16])
    np.testing.assert_array_equal(features["target_feat"].argmax(-1) - 1, window)
    assert not features["target_feat"][:, 0].any()


def test_centres_and_extra_rows_share_nothing_and_use_all_there_is() -> None:
    raw = example(depth=30)
    config = SampleConfig(max_msa=10, max_extra=100, masked_fraction=0.0)
    features = make_features(raw, config, 0, ("x",))
    rows = np.concatenate([features["true_msa"][0], features["extra_msa"][0]])
    np.testing.assert_array_equal(np.unique(rows, axis=0), np.unique(raw.msa, axis=0))
    assert len(rows) == len(raw.msa)


def test_msa_feat_is_table_1_written_out() -> None:
    raw = example(length=9, depth=25)
    features = make_features(raw, SampleConfig(max_msa=5), 0, ("x",))
    feat, true_msa, extra = features["msa_feat"][0], features["true_msa"][0], features["extra_msa"][0]
    depth, length = true_msa.shape
    order = {row.tobytes(): i for i, row in enumerate(raw.msa)}
    deletions = np.array([raw.deletions[order[row.astype(np.uint8).tobytes()]] for row in true_msa])
    extra_deletions = np.array([raw.deletions[order[row.astype(np.uint8).tobytes()]] for row in extra])
    masked = feat[..., :23].argmax(-1)
    members: list[list[int]] = [[] for _ in range(depth)]
    for e, row in enumerate(extra):
        agreement = [sum(a == b and a < GAP for a, b in zip(row, centre)) for centre in masked]
        members[int(np.argmax(agreement))].append(e)
    for s in range(depth):
        for n in range(length):
            column = [masked[s, n], *(extra[e, n] for e in members[s])]
            deleted = [deletions[s, n], *(extra_deletions[e, n] for e in members[s])]
            profile = [column.count(code) / (len(column) + 1e-6) for code in range(23)]
            mean = sum(map(int, deleted)) / (len(column) + 1e-6)
            expected = [min(deletions[s, n], 1), np.arctan(deletions[s, n] / 3) * 2 / np.pi]
            expected += [*profile, np.arctan(mean / 3) * 2 / np.pi]
            np.testing.assert_allclose(feat[s, n, 23:], expected, atol=1e-6)
    np.testing.assert_allclose(
        features["extra_deletion_value"][0], np.arctan(extra_deletions / 3) * 2 / np.pi, atol=1e-6
    )
    np.testing.assert_array_equal(features["extra_has_deletion"][0], extra_deletions > 0)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 300), st.integers(0, 5))
def test_nearest_cluster_counts_agreement_and_takes_the_first_of_equals(e: int, s: int, n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, centres = rng.integers(17, 22, (e, n)).astype(np.uint8), rng.integers(17, 23, (s, n)).astype(np.uint8)
    agreement = ((rows[:, None] == centres) & (rows[:, None] != GAP)).sum(-1)
    np.testing.assert_array_equal(nearest_cluster(rows, centres, block=7), agreement.argmax(1))


def test_long_sequences_do_not_overflow_the_byte_counters() -> None:
    centres = np.stack([np.full(600, 3), np.full(600, 4)]).astype(np.uint8)
    rows = np.full((1, 600), 4, np.uint8)
    rows[0, :256] = 3  # modulo 256 the first centre would have 0 or the second more
    assert nearest_cluster(rows, centres)[0] == 1


def test_a_row_without_residues_in_the_crop_joins_no_cluster() -> None:
    raw = example(length=6, depth=3)
    raw.msa[1:] = GAP
    raw.msa[1, 5] = 3  # row 1 has a residue outside the crop only, row 2 is one of gaps
    config = SampleConfig(crop=3, max_msa=1, masked_fraction=0.0, block_fraction=0.0)
    for step in range(20):
        features = make_features(raw, config, 0, ("x", step), train=True)
        if features["residue_index"][-1] < 5:
            assert features["msa_feat"][0, 0, :, 25 + GAP].max() == 0  # the query has no gaps
            assert features["extra_msa"].shape[1] == len(raw.msa) - 1
            return
    pytest.fail("no crop without the last residue in 20 draws")


def test_mask_kinds_come_in_their_proportions() -> None:
    raw = example(length=300, depth=400, labels=False)
    msa = np.zeros_like(raw.msa)  # all alanine: what is changed shows
    profile = np.zeros_like(raw.profile)
    profile[:, [7, GAP]] = 0.5
    masked, chosen = mask_msa(msa, profile, SampleConfig(), keyed_rng(0, "test"))
    total = chosen.sum()
    assert total / msa.size == pytest.approx(0.15, abs=0.005)
    assert (masked[~chosen] == 0).all()
    share = np.bincount(masked[chosen], minlength=23) / total
    assert share[MASK] == pytest.approx(0.7, abs=0.01)
    assert share[GAP] == pytest.approx(0.05, abs=0.005)  # from the profile alone
    assert share[7] == pytest.approx(0.05 + 0.005, abs=0.005)
    assert share[0] == pytest.approx(0.1 + 0.005, abs=0.008)  # left as it was
    assert share[5] == pytest.approx(0.005, abs=0.003)
    assert share[20] == 0  # X is never drawn uniformly


def test_masking_is_uniform_over_columns_and_includes_the_query() -> None:
    raw = example(length=50, depth=2000, labels=False)
    _, chosen = mask_msa(raw.msa, raw.profile, SampleConfig(), keyed_rng(1, "test"))
    np.testing.assert_allclose(chosen.mean(0), 0.15, atol=0.04)
    query = [mask_msa(raw.msa[:1], raw.profile, SampleConfig(), keyed_rng(i))[1].mean() for i in range(200)]
    assert np.mean(query) == pytest.approx(0.15, abs=0.02)


def test_block_deletion_keeps_the_query_and_deletes_contiguous_blocks() -> None:
    config = SampleConfig()
    kept = [delete_blocks(1000, config, keyed_rng(i)) for i in range(300)]
    assert all(rows[0] == 0 for rows in kept)
    assert all((np.diff(rows) > 0).all() for rows in kept)
    assert max((np.diff(rows) > 1).sum() for rows in kept) <= 5
    # Row r survives a block of 300 that starts in any of 1000 places with probability 1 - min(r + 1, 300) / 1000.
    expected = np.mean((1 - np.minimum(np.arange(1000) + 1, 300) / 1000) ** 5)
    assert np.mean([len(rows) for rows in kept]) / 1000 == pytest.approx(expected, abs=0.03)
    np.testing.assert_array_equal(delete_blocks(1, config, keyed_rng(0)), [0])
    np.testing.assert_array_equal(delete_blocks(3, config, keyed_rng(0)), [0, 1, 2])  # blocks of no rows


def test_crop_starts_are_uniform_when_clamped_and_lean_to_the_start_otherwise() -> None:
    rng = keyed_rng(0, "crop")
    clamped = np.bincount([crop_start(20, 11, True, rng) for _ in range(20_000)]) / 20_000
    np.testing.assert_allclose(clamped, 0.1, atol=0.015)
    unclamped = np.bincount([crop_start(20, 11, False, rng) for _ in range(20_000)]) / 20_000
    expected = [sum(1 / (n + 1) for n in range(s, 10)) / 10 for s in range(10)]
    np.testing.assert_allclose(unclamped, expected, atol=0.015)


def test_the_row_budget_is_a_uniform_sample_not_the_first_rows() -> None:
    config = SampleConfig(max_rows=100)
    chosen = [select(50, 1000, config, i, ("x",), train=False).rows for i in range(200)]
    assert all(len(rows) == 100 and rows[0] == 0 and (np.diff(rows) > 0).all() for rows in chosen)
    assert np.mean([rows[1:].mean() for rows in chosen]) == pytest.approx(500, abs=15)


def test_one_example_in_ten_is_unclamped() -> None:
    clamped = [select(50, 5, TRAIN, i, ("x",), train=True).clamped for i in range(3000)]
    assert np.mean(clamped) == pytest.approx(0.9, abs=0.02)
    assert select(50, 5, TRAIN, 0, ("x",), train=False).clamped


def test_passes_differ_and_the_first_ones_do_not_depend_on_how_many_there_are() -> None:
    raw = example()
    four = make_features(raw, TRAIN, 0, ("x", 0), 4, train=True)
    two = make_features(raw, TRAIN, 0, ("x", 0), 2, train=True)
    assert not np.array_equal(four["msa_feat"][0], four["msa_feat"][1])
    for name in ("msa_feat", "extra_msa", "bert_mask"):
        np.testing.assert_array_equal(four[name][:2], two[name])
    np.testing.assert_array_equal(four["aatype"], two["aatype"])
    once = make_features(raw, dataclasses.replace(TRAIN, resample_msa=False), 0, ("x", 0), 4, train=True)
    np.testing.assert_array_equal(once["msa_feat"], four["msa_feat"][:1])


def test_one_purpose_does_not_shift_another() -> None:
    raw = example()
    a = make_features(raw, TRAIN, 0, ("x", 0), train=True)
    b = make_features(raw, dataclasses.replace(TRAIN, max_extra=3, masked_fraction=0.5), 0, ("x", 0), train=True)
    np.testing.assert_array_equal(a["true_msa"], b["true_msa"])
    np.testing.assert_array_equal(a["residue_index"], b["residue_index"])


def test_keys_and_seeds_give_other_samples() -> None:
    raw = example()
    sums = {
        make_features(raw, TRAIN, seed, (name, step), train=True)["msa_feat"].tobytes()
        for seed, name, step in [(0, "x", 0), (1, "x", 0), (0, "y", 0), (0, "x", 1)]
    }
    assert len(sums) == 4
    assert keyed_rng(0, "a", "b").random() != keyed_rng(0, "ab").random()
    assert keyed_rng(0, 1).random() != keyed_rng(0, "1").random()
    assert keyed_rng(0, np.int64(7)).random() == keyed_rng(0, 7).random()


def test_another_process_and_another_thread_make_the_same() -> None:
    code = "from tests.data.test_sample import digest; print(digest())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    with ThreadPoolExecutor(2) as pool:
        digests = list(pool.map(lambda _: digest(), range(4)))
    assert {out.stdout.strip(), *digests} == {digest()}


def digest() -> str:
    """One number for all features of one draw."""
    import hashlib

    features = make_features(example(), TRAIN, 5, ("x", 9), 2, train=True)
    return hashlib.sha256(b"".join(features[name].tobytes() for name in sorted(features))).hexdigest()


def test_padding_adds_masked_zeros_and_changes_nothing_else() -> None:
    raw = example(length=10, depth=5)
    plain = make_features(raw, TRAIN, 0, ("x", 0), train=True)
    padded = make_features(raw, dataclasses.replace(TRAIN, pad=True), 0, ("x", 0), train=True)
    assert padded["msa_feat"].shape == (1, 8, 16, 49)
    for name, array in plain.items():
        inside = tuple(slice(size) for size in array.shape)
        np.testing.assert_array_equal(padded[name][inside], array)
        assert np.count_nonzero(padded[name]) == np.count_nonzero(array)
    assert pad_features(plain, {}) == plain


def test_without_coordinates_there_are_no_labels() -> None:
    features = make_features(example(labels=False), SampleConfig(), 0, ("x",))
    assert "all_atom_positions" not in features
    assert "atom14_atom_exists" in features


def test_deletion_value_and_means() -> None:
    np.testing.assert_allclose(deletion_value(np.array([0, 3], np.uint16)), [0, 0.5], atol=1e-7)
    centres, rows = np.array([[1, 2]], np.uint8), np.array([[1, GAP]], np.uint8)
    profile, mean = cluster_statistics(
        centres, np.array([[0, 4]], np.uint16), rows, np.array([[2, 0]], np.uint16), np.array([0])
    )
    np.testing.assert_allclose(mean, [[1, 2]], atol=1e-5)
    np.testing.assert_allclose(profile[0, 0, 1], 1, atol=1e-5)
    np.testing.assert_allclose(profile[0, 1, [2, GAP]], 0.5, atol=1e-5)


@pytest.mark.parametrize(
    "bad", [{"crop": 0}, {"max_msa": 0}, {"max_extra": -1}, {"masked_fraction": 1.5}, {"mask_same": 0.95}]
)
def test_settings_that_cannot_be_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        SampleConfig(**bad)  # type: ignore[arg-type]


def test_an_empty_extra_msa_is_masked_or_the_query():
    raw = from_sequence("MKVLAAGH", [], "one")
    masked = make_features(raw, SampleConfig(), 0, ("a",))
    query = make_features(raw, SampleConfig(empty_extra="query"), 0, ("a",))
    assert masked["extra_msa_mask"].shape == query["extra_msa_mask"].shape == (1, 1, 8)
    assert not masked["extra_msa_mask"].any()
    assert query["extra_msa_mask"].all()
    assert np.array_equal(query["extra_msa"][0, 0], raw.msa[0])
