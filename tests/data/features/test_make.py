"""Make the features of an example: their shapes at any size, and equal results for equal draws."""

import dataclasses
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.examples import example, templates
from warpfold.batch import FEATURES, NO_ROW, to_tensors
from warpfold.data.example.raw_example import from_sequence
from warpfold.data.features.choose import SampleConfig, select
from warpfold.data.features.make import make_features, pad_batch, pad_features, padded_shape, template_features
from warpfold.data.features.msa import msa_features
from warpfold.geometry.labels import structure_labels
from warpfold.geometry.residue import ATOM14_MASK, ATOM37_MASK, GAP
from warpfold.keyed import keyed_rng

ROOT = Path(__file__).parents[3]
TRAIN = SampleConfig(crop=16, max_msa=8, max_extra=12)


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(1, 40),
    depth=st.integers(0, 50),
    crop=st.integers(1, 60),
    max_msa=st.integers(1, 30),
    max_extra=st.integers(0, 30),
    passes=st.integers(1, 3),
    train=st.booleans(),
    pad=st.booleans(),
)
def test_features_fit_the_table_for_any_size(
    length: int, depth: int, crop: int, max_msa: int, max_extra: int, passes: int, train: bool, pad: bool
) -> None:
    raw = example(length, depth)
    config = SampleConfig(crop=crop, max_msa=max_msa, max_extra=max_extra, pad=pad)
    features = make_features(raw, config, 0, ("x", 3), passes, train)
    batch = to_tensors(features)  # all sizes of an axis are equal
    residues = min(crop, length) if train else length
    assert features["seq_mask"].sum() == residues
    assert len(features["aatype"]) == (max(crop, residues) if pad and train else residues)
    assert len(batch["msa_feat"]) == passes
    assert all(np.isfinite(array).all() for array in features.values())
    rows = int(features["msa_mask"][0, :, 0].sum())
    extra = int(features["extra_msa_mask"][0, :, 0].sum())
    assert 1 <= rows <= min(max_msa, len(raw.msa))
    assert extra <= max_extra
    assert rows + extra <= len(raw.msa)
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


COMPLEX = (
    *("asym_id", "entity_id", "sym_id", "alignment", "alignment_mask", "alignment_deletions", "centre_rows"),
    *("extra_rows", "masked_msa", "copy_atom_positions", "copy_atom_mask"),
)
SOFT = ("soft_alignment", "soft_extra")
ASSEMBLIES = ("extra_rows", "masked_msa")  # arrays that only assemblies have
MSA_FEATURES = [
    name for name in FEATURES if ("msa" in name or name.startswith(("bert", "extra"))) and name not in ASSEMBLIES
]


@pytest.mark.parametrize("max_msa", [1, 8, 100])
def test_clusters_are_those_of_the_whole_chain_then_cropped(max_msa: int) -> None:
    raw = dataclasses.replace(example(length=60, depth=80), profile=example(length=60, seed=1).profile)
    config = dataclasses.replace(TRAIN, max_msa=max_msa)
    starts = set()
    for step in range(6):
        whole = make_features(raw, dataclasses.replace(config, crop=None), 0, ("x", step), 2, train=True)
        crop = make_features(raw, config, 0, ("x", step), 2, train=True)
        start = int(crop["residue_index"][0])
        starts.add(start)
        assert len(crop["residue_index"]) == 16
        for name in MSA_FEATURES:  # rows, masks, clusters and profiles of one draw are equal bit for bit
            np.testing.assert_array_equal(crop[name], whole[name][:, :, start : start + 16], err_msg=name)
    assert max(starts) > 22


def test_clusters_of_the_crop_alone_are_those_of_a_chain_that_ends_there() -> None:
    raw = example(length=60, depth=80)
    config = dataclasses.replace(TRAIN, clustering="crop")
    crop = make_features(raw, config, 0, ("x", 0), 2, train=True)
    start = crop["residue_index"][0]
    chosen = select(60, raw.depth, config, 0, ("x", 0), train=True)
    alone = msa_features(raw.take(slice(start, start + 16), chosen.rows), config, 0, ("x", 0), 2)
    for name in MSA_FEATURES:
        np.testing.assert_array_equal(crop[name], alone[name], err_msg=name)
    chain = make_features(raw, TRAIN, 0, ("x", 0), 2, train=True)
    np.testing.assert_array_equal(crop["true_msa"], chain["true_msa"])  # the same rows
    assert not np.array_equal(crop["msa_feat"], chain["msa_feat"])


@pytest.mark.parametrize("clustering", ["chain", "crop"])
def test_a_row_without_residues_in_the_crop_joins_the_cluster_that_it_has_elsewhere(clustering: str) -> None:
    raw = example(length=6, depth=3)
    raw.msa[1:] = GAP
    raw.msa[1, 5] = raw.msa[0, 5]  # equal to the query, outside the crop; row 2 has only gaps
    config = SampleConfig(crop=3, max_msa=1, masked_fraction=0.0, block_fraction=0.0, clustering=clustering)
    steps = (make_features(raw, config, 0, ("x", step), train=True) for step in range(20))
    features = next(found for found in steps if found["residue_index"][-1] < 5)
    gaps = 0.5 if clustering == "chain" else 0.0  # the query and row 1, or only the query
    np.testing.assert_allclose(features["msa_feat"][0, 0, :, 25 + GAP], gaps, rtol=1e-6)
    assert features["extra_msa"].shape[1] == len(raw.msa) - 1


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


def test_keys_and_seeds_give_other_samples() -> None:
    raw = example()
    sums = {
        make_features(raw, TRAIN, seed, (name, step), train=True)["msa_feat"].tobytes()
        for seed, name, step in [(0, "x", 0), (1, "x", 0), (0, "y", 0), (0, "x", 1)]
    }
    assert len(sums) == 4
    other = make_features(raw, dataclasses.replace(TRAIN, max_extra=3, masked_fraction=0.5), 0, ("x", 0), train=True)
    for name in ("true_msa", "residue_index"):  # draws for different purposes are independent
        np.testing.assert_array_equal(make_features(raw, TRAIN, 0, ("x", 0), train=True)[name], other[name])
    assert keyed_rng(0, "a", "b").random() != keyed_rng(0, "ab").random()
    assert keyed_rng(0, 1).random() != keyed_rng(0, "1").random()
    assert keyed_rng(0, np.int64(7)).random() == keyed_rng(0, 7).random()


def test_another_process_and_another_thread_make_the_same() -> None:
    code = "from tests.data.features.test_make import digest; print(digest())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    with ThreadPoolExecutor(2) as pool:
        digests = list(pool.map(lambda _: digest(), range(4)))
    assert {out.stdout.strip(), *digests} == {digest()}


def digest() -> str:
    """Return a checksum of all features of one draw."""
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


def test_an_empty_extra_msa_is_masked_or_the_query():
    raw = from_sequence("MKVLAAGH", [], "one")
    masked = make_features(raw, SampleConfig(), 0, ("a",))
    query = make_features(raw, SampleConfig(empty_extra="query"), 0, ("a",))
    assert masked["extra_msa_mask"].shape == query["extra_msa_mask"].shape == (1, 1, 8)
    assert not masked["extra_msa_mask"].any()
    assert query["extra_msa_mask"].all()
    assert np.array_equal(query["extra_msa"][0, 0], raw.msa[0])


def test_templates_are_drawn_in_training_and_the_best_ones_at_inference() -> None:
    raw = dataclasses.replace(example(), templates=templates(7, 40))
    features = make_features(raw, SampleConfig(), 0, ("x",))
    np.testing.assert_array_equal(features["template_aatype"], raw.templates.aatype[:4])
    assert features["template_all_atom_positions"].shape == (4, 40, 37, 3)
    drawn = [make_features(raw, TRAIN, 0, ("x", step), train=True) for step in range(12)]
    assert len({len(features["template_mask"]) for features in drawn}) > 2
    start = drawn[0]["residue_index"][0]
    windows = raw.templates.aatype[:, start : start + 16]
    assert all((windows == row).all(1).any() for row in drawn[0]["template_aatype"])
    none = make_features(raw, dataclasses.replace(TRAIN, max_templates=0), 0, ("x", 0), train=True)
    assert none["template_aatype"].shape == (0, 16)
    assert all(array.itemsize <= np.dtype(FEATURES[name].dtype).itemsize for name, array in features.items())
    for name, tensor in to_tensors(features).items():
        assert str(tensor.dtype) == f"torch.{FEATURES[name].dtype}"
        np.testing.assert_array_equal(tensor.numpy(), features[name])
    unlabelled = make_features(example(labels=False), SampleConfig(), 0, ("x",))
    assert ("all_atom_positions" in unlabelled, "atom14_atom_exists" in unlabelled) == (False, True)


def test_templates_of_other_residues_are_refused() -> None:
    with pytest.raises(ValueError, match="templates of 40 residues for an example of 39"):
        template_features(templates(2, 40), 39)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_loss_is_clamped_in_as_many_examples_as_the_settings_say(share: float) -> None:
    config = dataclasses.replace(TRAIN, unclamped_fraction=share)
    for train in (True, False):
        features = make_features(example(), config, 0, ("x", 0), train=train)
        assert features["use_clamped_fape"] == (share == 0 or not train)
    assert "use_clamped_fape" not in make_features(example(labels=False), config, 0, ("x", 0), train=True)


def shapes_of(**sizes: int) -> dict[str, np.ndarray]:
    """Return features that show the sizes of the axes."""
    shapes = {
        "aatype": (sizes["res"],),
        "bert_mask": (1, sizes["seq"], sizes["res"]),
        "extra_msa": (1, sizes["extra"], sizes["res"]),
        "template_aatype": (sizes["tmpl"], sizes["res"]),
    }
    features = {name: np.ones(shape, np.uint8) for name, shape in shapes.items()}
    if "row" in sizes:
        features["alignment"] = np.ones((sizes["row"], sizes["res"]), np.uint8)
        features["centre_rows"] = np.zeros((1, sizes["seq"]), np.int64)
    return features


def test_a_training_has_few_sizes_of_every_axis() -> None:
    config = SampleConfig(crop=8, max_msa=6, max_extra=9, max_templates=4, chain_rows=14)
    features = shapes_of(res=5, seq=2, extra=7, tmpl=3)
    assert padded_shape(features, 1, config, 1) == {"res": 8, "seq": 6, "extra": 9, "tmpl": 4}
    assert padded_shape(features, 1, config, 2) == {"res": 8, "seq": 3, "extra": 10, "tmpl": 4}
    assert padded_shape(features, 1, config, 4) == {"res": 6, "seq": 2, "extra": 9, "tmpl": 3}
    assert padded_shape(shapes_of(res=5, seq=2, extra=7, tmpl=0), 1, config, 1)["tmpl"] == 0
    joined = shapes_of(res=5, seq=2, extra=7, tmpl=3, row=9)
    assert padded_shape(joined, 1, config, 2) == {"res": 8, "seq": 3, "extra": 10, "row": 14, "tmpl": 3}
    assert pad_features(joined, {"seq": 3})["centre_rows"].tolist() == [[0, 0, NO_ROW]]
    assert padded_shape(features, 1, SampleConfig(), 2)["res"] == 5  # whole chains
    padded = pad_features(features, padded_shape(features, 1, config, 2))
    assert [x.shape for x in padded.values()] == [(8,), (1, 3, 8), (1, 10, 8), (4, 8)]


def test_a_padded_shape_has_multiples_that_kernels_serve() -> None:
    """This includes the rows of m, of alignment and templates. A complex keeps its templates."""
    features = shapes_of(res=101, seq=124, extra=1024, tmpl=4)
    assert padded_shape(features, 16) == {"res": 112, "seq": 124, "extra": 1024, "tmpl": 4}
    features = shapes_of(res=96, seq=1, extra=1, tmpl=1)
    assert padded_shape(features, 16) == {"res": 96, "seq": 14, "extra": 16, "tmpl": 2}
    assert padded_shape(features, 1) == {"res": 96, "seq": 1, "extra": 1, "tmpl": 1}
    complex_of_two = shapes_of(res=30, seq=5, extra=3, tmpl=1, row=9)
    assert padded_shape(complex_of_two, 16) == {"res": 32, "seq": 15, "extra": 16, "row": 16, "tmpl": 1}
    config = SampleConfig(crop=250, max_msa=124, max_extra=1024, max_templates=4)
    assert padded_shape(features, 16, config, 2) == {"res": 128, "seq": 62, "extra": 512, "tmpl": 2}


def test_an_example_has_the_features_of_the_table_and_one_pass_by_default() -> None:
    raw = dataclasses.replace(example(), resolution=None, templates=templates(2, 40))
    assert raw.positions is not None
    assert raw.mask is not None
    features = make_features(raw, SampleConfig(crop=8), 0, ("x",))
    monomer = [name for name in FEATURES if name not in (*COMPLEX, *SOFT)]
    assert sorted(features) == sorted(monomer)
    assert (features["resolution"], features["use_clamped_fape"]) == (0.0, 1.0)
    assert make_features(example(), SampleConfig(), 0, ("x",))["resolution"] == 2.0
    for passes, config in ((1, SampleConfig()), (3, SampleConfig(resample_msa=False))):
        features = make_features(raw, config, 0, ("x",), passes)
        assert features["msa_feat"].shape[::2] == (1, 40)
    labels = structure_labels(
        torch.from_numpy(raw.aatype).long(), torch.from_numpy(raw.positions), torch.from_numpy(raw.mask).float()
    )
    for name, label in labels.items():
        np.testing.assert_array_equal(features[name], label, err_msg=name)
    np.testing.assert_array_equal(features["all_atom_mask"], raw.mask)
    np.testing.assert_array_equal(features["atom14_atom_exists"], ATOM14_MASK[raw.aatype])
    np.testing.assert_array_equal(features["atom37_atom_exists"], ATOM37_MASK[raw.aatype])
    np.testing.assert_array_equal(features["target_feat"], np.eye(22)[raw.aatype.astype(int) + 1])
    # Residues of a prediction with a low confidence are masked.
    confidence = np.linspace(30, 70, 40).astype(np.float16)
    features = make_features(dataclasses.replace(raw, confidence=confidence), SampleConfig(), 0, ("x",))
    np.testing.assert_array_equal(features["all_atom_mask"], raw.mask * (confidence >= 50)[:, None])


def test_a_multiple_of_two_is_one_too() -> None:
    features = shapes_of(res=5, seq=2, extra=7, tmpl=1)
    assert padded_shape(features, 2) == {"res": 6, "seq": 2, "extra": 8, "tmpl": 2}
    assert padded_shape(features, 1, SampleConfig(max_msa=3)) == padded_shape(features, 1, None, 4)
    batch = {"aatype": torch.ones(3, dtype=torch.uint8), "msa_mask": torch.ones(1, 3, 3)}
    assert {name: x.shape for name, x in pad_batch(batch, 2).items()} == {"aatype": (4,), "msa_mask": (1, 4, 4)}


def test_features_of_several_examples_are_padded_alike() -> None:
    features = {"aatype": torch.ones(2, 5, dtype=torch.uint8), "msa_mask": torch.ones(2, 1, 3, 5)}
    padded = pad_batch(features, 4)
    assert {name: x.shape for name, x in padded.items()} == {"aatype": (2, 8), "msa_mask": (2, 1, 4, 8)}
    assert padded["msa_mask"].sum() == features["msa_mask"].sum()
    assert pad_batch(features, 1) is features


# Features that are computed from residue types and atoms.
LABELS = ["atom14_atom_exists", "atom37_atom_exists", *list(FEATURES)[list(FEATURES).index("pseudo_beta") :]]


@pytest.mark.parametrize("case", ["monomer_model_1", "monomer_model_3_rec2"])
def test_labels_are_the_official_ones(case: str) -> None:
    file = ROOT.parent / "shared/golden/models" / case / "features.npz"
    if not file.exists():
        pytest.skip("no golden data beside the repository")
    golden = {name: array[0] for name, array in np.load(file, allow_pickle=False).items()}
    valid = golden["seq_mask"] > 0
    aatype = golden["aatype"].astype(np.int64)
    raw = example(len(aatype), 1)
    known = {"positions": golden["all_atom_positions"], "mask": golden["all_atom_mask"].astype(np.uint8)}
    features = make_features(
        dataclasses.replace(raw, aatype=aatype.astype(np.uint8), **known), SampleConfig(), 0, ("x",)
    )
    ours = {name: x for name, x in features.items() if name in LABELS}
    assert len(ours) == len(LABELS)
    undefined = {  # where the mask is 0, the value has no meaning
        "rigidgroups_gt_frames": "rigidgroups_gt_exists",
        "rigidgroups_alt_gt_frames": "rigidgroups_gt_exists",
        "backbone_affine_tensor": "backbone_affine_mask",
        "chi_angles": "chi_mask",
    }
    for name, array in ours.items():
        where = valid if name not in undefined else (golden[undefined[name]].T * valid).T > 0
        a, b = array[where], golden[name][where]
        if name == "backbone_affine_tensor":  # q and -q are one rotation
            b = np.concatenate([b[:, :4] * np.sign((a[:, :4] * b[:, :4]).sum(1, keepdims=True)), b[:, 4:]], 1)
        if name == "chi_angles":
            a, b = np.stack([np.sin(a), np.cos(a)]), np.stack([np.sin(b), np.cos(b)])
        np.testing.assert_allclose(a, b, atol=1e-5, err_msg=name)
