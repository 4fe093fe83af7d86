"""Compare MSA features with loops over the formulas of Supp. 1.2.7 and table 1, and check their distributions."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.examples import example
from warpfold.data.features import msa as module
from warpfold.data.features.choose import SampleConfig
from warpfold.data.features.msa import mask_msa, msa_features, nearest_cluster, query_weight
from warpfold.geometry.residue import GAP, MASK
from warpfold.keyed import keyed_rng


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 300), st.integers(0, 5))
def test_nearest_cluster_counts_agreement_and_takes_the_first_of_equals(e: int, s: int, n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, centres = rng.integers(17, 22, (e, n)).astype(np.uint8), rng.integers(17, 23, (s, n)).astype(np.uint8)
    agreement = ((rows[:, None] == centres) & (rows[:, None] != GAP)).sum(-1)
    np.testing.assert_array_equal(nearest_cluster(rows, centres[None])[0], agreement.argmax(1))


@pytest.mark.parametrize(
    ("name", "size"), [("TABLE_BYTES", 1), ("TABLE_BYTES", 200_000), ("BLOCK_ROWS", 16)]
)  # for one pass, for two
def test_what_does_not_fit_together_follows_one_another(monkeypatch: pytest.MonkeyPatch, name: str, size: int) -> None:
    rng = np.random.default_rng(0)
    rows, centres = rng.integers(0, 22, (50, 300), np.uint8), rng.integers(0, 23, (5, 7, 300), np.uint8)
    together = nearest_cluster(rows, centres)
    monkeypatch.setattr(module, name, size)
    np.testing.assert_array_equal(nearest_cluster(rows, centres), together)


def test_mask_kinds_come_in_their_proportions() -> None:
    raw = example(length=300, depth=400, labels=False)
    msa = np.zeros_like(raw.msa)  # all alanine, so that every change is seen
    profile = np.zeros_like(raw.profile)
    profile[:, [7, GAP]] = 0.5
    masked, chosen = mask_msa(msa, profile, SampleConfig(), keyed_rng(0, "test"))
    total = chosen.sum()
    assert total / msa.size == pytest.approx(0.15, abs=0.005)
    assert (masked[~chosen] == 0).all()
    share = np.bincount(masked[chosen], minlength=23) / total
    assert share[MASK] == pytest.approx(0.7, abs=0.01)
    assert share[GAP] == pytest.approx(0.05, abs=0.005)  # from the profile only
    assert share[7] == pytest.approx(0.05 + 0.005, abs=0.005)
    assert share[0] == pytest.approx(0.1 + 0.005, abs=0.008)  # unchanged
    assert share[5] == pytest.approx(0.005, abs=0.003)
    assert share[20] == 0  # X is never drawn uniformly


def test_masking_is_uniform_over_columns_and_includes_the_query() -> None:
    raw = example(length=50, depth=2000, labels=False)
    _, chosen = mask_msa(raw.msa, raw.profile, SampleConfig(), keyed_rng(1, "test"))
    np.testing.assert_allclose(chosen.mean(0), 0.15, atol=0.04)
    query = [mask_msa(raw.msa[:1], raw.profile, SampleConfig(), keyed_rng(i))[1].mean() for i in range(200)]
    assert np.mean(query) == pytest.approx(0.15, abs=0.02)


def plain_features(raw, centres, masked, others, size):
    """Compute msa_feat [S, N, 49] and the extra features [E, N] cell by cell, by the formulas of the supplement."""
    length = raw.length
    clusters = [[(masked[s], raw.deletions[row])] for s, row in enumerate(centres)]
    for row in set(range(raw.depth)) - set(centres.tolist()):
        if all(code == GAP for code in raw.msa[row]):
            continue
        agreement = [sum(int(a == b and a != GAP) for a, b in zip(raw.msa[row], centre)) for centre in masked]
        clusters[agreement.index(max(agreement))].append((raw.msa[row], raw.deletions[row]))
    squeeze = lambda d: 2 / np.pi * np.arctan(d / 3)  # noqa: E731
    feat = np.zeros((size, length, 49))
    for s, members in enumerate(clusters):
        for n in range(length):
            deletion = int(raw.deletions[centres[s], n])
            codes = [int(codes[n]) for codes, _ in members]
            mean = sum(int(deletions[n]) for _, deletions in members) / (len(members) + 1e-6)
            one_hot = [float(code == masked[s, n]) for code in range(23)]
            profile = [codes.count(code) / (len(members) + 1e-6) for code in range(23)]
            feat[s, n] = [*one_hot, min(deletion, 1), squeeze(deletion), *profile, squeeze(mean)]
    has = np.array([[min(int(d), 1) for d in raw.deletions[row]] for row in others]).reshape(-1, length)
    value = np.array([[squeeze(int(d)) for d in raw.deletions[row]] for row in others]).reshape(-1, length)
    return feat, has, value


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(1, 40),
    depth=st.integers(0, 40),
    max_msa=st.integers(1, 20),
    max_extra=st.integers(0, 20),
    seed=st.integers(0, 5),
)
def test_features_are_the_formulas_written_out(
    length: int, depth: int, max_msa: int, max_extra: int, seed: int
) -> None:
    raw = example(length, depth, seed)
    raw.msa[1::7] = GAP  # rows with only gaps in this crop
    config = SampleConfig(max_msa=max_msa, max_extra=max_extra)
    features = {name: array[1] for name, array in msa_features(raw, config, seed, ("x",), passes=2).items()}
    # a copy has row numbers as deletions, which show the drawn rows
    numbered = example(length, depth, seed)
    numbered.msa[1::7] = GAP
    numbered.deletions[:] = np.arange(raw.depth)[:, None]
    rows = msa_features(numbered, config, seed, ("x",), passes=2)
    number = lambda value: np.rint(3 * np.tan(value.astype(np.float64) * np.pi / 2)).astype(int)  # noqa: E731
    centres = number(rows["msa_feat"][1, :, 0, 24])
    others = number(rows["extra_deletion_value"][1, :, 0])[features["extra_msa_mask"][:, 0] > 0]
    assert len({*centres, *others}) == len(centres) + len(others)
    assert centres[0] == 0

    masked = features["msa_feat"][..., :23].argmax(-1)
    feat, has, value = plain_features(raw, centres, masked, others, len(centres))
    np.testing.assert_allclose(features["msa_feat"], feat, atol=2e-6)
    np.testing.assert_array_equal(features["true_msa"], raw.msa[centres])
    kept = features["bert_mask"] == 0
    np.testing.assert_array_equal(masked[kept], raw.msa[centres][kept])
    np.testing.assert_array_equal(features["extra_msa"][: len(others)], raw.msa[others])
    np.testing.assert_array_equal(features["extra_has_deletion"][: len(others)], has)
    np.testing.assert_allclose(features["extra_deletion_value"][: len(others)], value, atol=2e-6)


def test_very_long_sequences_are_counted_without_error() -> None:
    rng = np.random.default_rng(0)
    centres = rng.integers(0, 4, (3, 5000)).astype(np.uint8)
    centres[2] = centres[1]
    centres[2, 4321] = 9
    rows = np.stack([centres[2], centres[1]])  # one identical residue in 5,000 decides
    np.testing.assert_array_equal(nearest_cluster(rows, centres[None])[0], [2, 1])
    centres = np.stack([np.full(600, 3), np.full(600, 4)]).astype(np.uint8)
    rows = np.full((1, 600), 4, np.uint8)
    rows[0, :256] = 3  # modulo 256, the first centre would have 0, or the second more
    assert nearest_cluster(rows, centres[None])[0, 0] == 1


class Fixed(np.random.Generator):
    """Return the given numbers instead of random ones."""

    def __init__(self, chosen: np.ndarray, kinds: list[float], levels: list[float]) -> None:
        super().__init__(np.random.PCG64(0))
        self.numbers = iter((chosen, np.array([kinds, levels])))

    def random(self, *_: Any, **__: Any) -> Any:
        return next(self.numbers)

    def integers(self, low: Any, high: Any = None, size: Any = None, *_: Any, **__: Any) -> Any:
        assert (low, high) == (0, 20)
        return np.arange(10, 10 + size)


def test_masking_at_its_thresholds() -> None:
    """Numbers that equal a threshold belong to the next kind, and those that equal a level to the next code."""
    config = SampleConfig(masked_fraction=0.5, mask_uniform=0.25, mask_profile=0.25, mask_same=0.25)
    msa = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.uint8)
    profile = np.zeros((4, 22), np.float32)
    profile[:, 3], profile[:, 9], profile[:, 21] = 0.5, 0.25, 0.25
    profile[2] = np.eye(22)[17]
    chosen = np.array([[0.5, 0.49, 0.0, 0.9], [0.1, 0.2, 0.3, 0.4]])
    kinds = [0.24, 0.25, 0.49, 0.5, 0.74, 0.75]
    for level, codes in ((0.0, (3, 17)), (0.49, (3, 17)), (0.5, (9, 17)), (0.75, (21, 17)), (0.99, (21, 17))):
        rng = Fixed(chosen, kinds, [level] * 6)
        masked, positions = mask_msa(msa, profile, config, rng)
        assert positions.tolist() == [[False, True, True, False], [True] * 4]
        # Kinds: uniform (the first draw), twice from the profile of columns 2 and 0, twice the same, the mask token.
        assert masked.tolist() == [[1, 10, codes[1], 4], [codes[0], 6, 7, MASK]]
    np.testing.assert_array_equal(msa, [[1, 2, 3, 4], [5, 6, 7, 8]])


@pytest.mark.parametrize("length", [1, 2, 254, 255, 256, 511])
def test_agreement_is_counted_in_every_column(length: int) -> None:
    """Each row but the last agrees in one column only, and with the last centre. The last row agrees everywhere."""
    rows = np.full((length + 1, length), GAP, np.uint8)
    np.fill_diagonal(rows, 3)
    rows[length] = 3
    centres = np.stack([np.full((7, length), 4), np.full((7, length), 5)]).astype(np.uint8)
    centres[0, 6], centres[1, 5] = 3, 3
    np.testing.assert_array_equal(nearest_cluster(rows, centres), [[6] * (length + 1), [5] * (length + 1)])


def test_the_weight_of_the_query_is_one_over_the_size_of_its_cluster() -> None:
    raw = example(12, 30, 1)
    for config, is_extra in (
        (SampleConfig(max_msa=4, max_extra=10), False),
        (SampleConfig(max_msa=100, empty_extra="query"), True),
        (SampleConfig(max_msa=100), False),
        (SampleConfig(max_msa=len(raw.msa) - 1), False),
    ):
        features = msa_features(raw, config, 0, ("x",), 3)
        weight, alone = query_weight(raw, config, 0, ("x",), 3)
        assert (alone, weight.dtype, weight.shape) == (is_extra, np.float32, (3,))
        # The profile is a sum over the members divided by their number, of which each residue is one.
        code = features["msa_feat"][:, 0, 0, :23].argmax(-1)
        others = query_weight(raw, config, 0, ("x",))
        assert others[0].tolist() == weight[:1].tolist()
        for index, share in enumerate(weight):
            profile = features["msa_feat"][index, 0, :, 25:48] / share
            np.testing.assert_allclose(profile, np.rint(profile), atol=1e-3)
            assert profile[0, code[index]] >= 1 - 1e-3
            total = profile.sum(-1)
            np.testing.assert_allclose(total, 1 / share - 1e-6, rtol=1e-5)
    assert len(msa_features(raw, SampleConfig(), 0, ("x",))["msa_feat"]) == 1
    lone = example(12, 0, 1)
    weight, alone = query_weight(lone, SampleConfig(), 0, ("x",), 2)
    assert not alone
    assert weight.tolist() == [np.float32(1) / np.float32(1 + 1e-6)] * 2
