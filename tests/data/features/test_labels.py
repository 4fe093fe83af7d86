"""Labels: of the table's shapes, finite, and equal to the official ones."""

from pathlib import Path

import numpy as np
import pytest

from warpfold.batch import to_tensors
from warpfold.data.features.labels import add_labels, atom_masks
from warpfold.data.formats.alignment import encode

SHARED = Path(__file__).parents[4] / "shared"
SEQUENCE = "MKVLAAGIVGLCAKWDERSTFYHNQPMEAL"


def labels_of(sequence: str) -> dict[str, np.ndarray]:
    positions = np.random.default_rng(0).normal(size=(len(sequence), 37, 3)).astype(np.float32)
    aatype = encode(sequence).astype(np.int64)
    exists = atom_masks(aatype)["atom37_atom_exists"]
    return add_labels({"aatype": aatype, "all_atom_positions": positions, "all_atom_mask": exists})


def test_labels_fit_the_table_and_are_finite() -> None:
    labels = labels_of(SEQUENCE + "X")
    to_tensors(labels)
    assert all(np.isfinite(array).all() for array in labels.values())
    assert all(array.dtype == np.float32 for name, array in labels.items() if name != "aatype")
    assert not labels["atom14_gt_exists"][-1, 5:].any()


def test_labels_of_a_window_are_the_window_of_the_labels() -> None:
    whole = labels_of(SEQUENCE)
    window = add_labels({k: whole[k][7:19] for k in ("aatype", "all_atom_positions", "all_atom_mask")})
    for name, array in window.items():
        np.testing.assert_array_equal(array, whole[name][7:19])


@pytest.mark.parametrize("case", ["monomer_model_1", "monomer_model_3_rec2"])
def test_labels_are_the_official_ones(case: str) -> None:
    file = SHARED / "golden/models" / case / "features.npz"
    if not file.exists():
        pytest.skip("no golden data beside the repository")
    golden = {name: array[0] for name, array in np.load(file, allow_pickle=False).items()}
    valid = golden["seq_mask"] > 0
    aatype = golden["aatype"].astype(np.int64)
    ours = add_labels({"aatype": aatype, **{k: golden[k] for k in ("all_atom_positions", "all_atom_mask")}})
    ours |= atom_masks(aatype)
    undefined = {  # where the mask is 0 the value means nothing
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
