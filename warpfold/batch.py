"""The feature table: every array that `data` passes to `model`, with its dtype and its axes.

This table is the only interface between `data` and `model`.  The names are AlphaFold2's.  A batch is a plain mapping
from these names to arrays of one example; leading batch axes are allowed if every array has them.

Axes: `res` residues, `seq` rows of the clustered MSA, `extra` rows of the extra MSA, `row` all rows of an assembly's
alignment, `soft` rows of probabilities instead of codes, `tmpl` templates, `copy` the copies of an entity (the largest
number of any entity), `pass` the passes of one example through the trunk, (recycles + 1) x ensemble, recycle-major.
Only features that differ between passes have the `pass` axis.  If its length is 1, the array serves every pass.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Batch = dict[str, Tensor]
Arrays = dict[str, np.ndarray]

NO_ROW = -1  # padding of row numbers


@dataclass(frozen=True)
class Feature:
    """An array: its NumPy dtype, and its axes as names or fixed sizes, outermost first."""

    dtype: str
    axes: tuple[str | int, ...]

    @property
    def per_pass(self) -> bool:
        return "pass" in self.axes


def _table(dtype: str, axes: str, names: str) -> dict[str, Feature]:
    parsed = tuple(int(a) if a.isdigit() else a for a in axes.split())
    return {name: Feature(dtype, parsed) for name in names.split()}


# The labels, and features derived from them (geometry/labels.py), which predictions lack.
LABELS: dict[str, Feature] = {
    # In an assembly, the residue in each copy of its entity (copy c has sym_id c + 1), masked where an entity has fewer
    # copies.  Copies are assigned to chains once there is a prediction, and the other labels follow from that.
    **_table("float32", "copy res 37 3", "copy_atom_positions"),
    **_table("float32", "copy res 37", "copy_atom_mask"),
    **_table("float32", "res 37 3", "all_atom_positions"),
    **_table("float32", "res 37", "all_atom_mask"),
    **_table("float32", "", "resolution use_clamped_fape"),
    **_table("float32", "res 3", "pseudo_beta"),
    **_table("float32", "res", "pseudo_beta_mask backbone_affine_mask"),
    **_table("float32", "res 7", "backbone_affine_tensor"),  # quaternion w x y z, translation in angstrom
    **_table("float32", "res 8 12", "rigidgroups_gt_frames rigidgroups_alt_gt_frames"),
    **_table("float32", "res 8", "rigidgroups_gt_exists rigidgroups_group_exists rigidgroups_group_is_ambiguous"),
    **_table("float32", "res 14 3", "atom14_gt_positions atom14_alt_gt_positions"),
    **_table("float32", "res 14", "atom14_gt_exists atom14_alt_gt_exists atom14_atom_is_ambiguous"),
    **_table("float32", "res 4", "chi_angles chi_mask"),
}
FEATURES: dict[str, Feature] = {
    # The target.
    **_table("int64", "res", "aatype residue_index"),  # aatype 0-19, 20 = X
    **_table("float32", "res", "seq_mask"),
    **_table("float32", "res 22", "target_feat"),  # chain break, one-hot of 21
    # The chains of an assembly: the numbers of the chain, of its sequence, and of the copy of this sequence, from 1;
    # 0 in padding.
    **_table("int64", "res", "asym_id entity_id sym_id"),
    # The alignment (Supp. 1.2.9, table 1).
    **_table("float32", "pass seq res 49", "msa_feat"),
    **_table("float32", "pass seq res", "msa_mask bert_mask"),
    **_table("int64", "pass seq res", "true_msa"),  # 0-19, 20 = X, 21 = gap
    **_table("int64", "pass extra res", "extra_msa"),  # 0-22, 22 = masked
    **_table("float32", "pass extra res", "extra_has_deletion extra_deletion_value extra_msa_mask"),
    # The alignment of an assembly: all rows, and in each pass the rows that are centres and those of the extra MSA,
    # -1 in padding.  The model computes the features of the alignment above from these (model/clusters.py).
    **_table("uint8", "row res", "alignment alignment_mask"),  # 0-19, 20 = X, 21 = gap; 1 where a row may be read
    **_table("int16", "row res", "alignment_deletions"),
    **_table("int64", "pass seq", "centre_rows"),
    **_table("int64", "pass extra", "extra_rows"),
    **_table("uint8", "pass seq res", "masked_msa"),  # the centres: 0-22, 22 = masked
    # A sequence being designed: probabilities of the 23 classes instead of codes, for the first row of an assembly's
    # alignment, and for all rows of a chain's extra MSA.
    **_table("float32", "soft res 23", "soft_alignment soft_extra"),
    # Templates.
    **_table("int64", "tmpl res", "template_aatype"),  # 0-19, 20 = X, 21 = gap
    **_table("float32", "tmpl res 37 3", "template_all_atom_positions"),
    **_table("float32", "tmpl res 37", "template_all_atom_masks"),
    **_table("float32", "tmpl res 3", "template_pseudo_beta"),
    **_table("float32", "tmpl res", "template_pseudo_beta_mask"),
    **_table("float32", "tmpl", "template_mask"),
    # The atoms of each residue type.
    **_table("float32", "res 14", "atom14_atom_exists"),
    **_table("float32", "res 37", "atom37_atom_exists"),
    **LABELS,
}


def to_tensors(
    arrays: Mapping[str, np.ndarray | Tensor], device: torch.device | str | None = None, widen: bool = True
) -> Batch:
    """Convert the arrays of one example to tensors with the table's dtypes on `device` (default: their own device).

    Arrays may be narrower than in the table (codes and masks have one byte).  They are widened on the device, so that
    less data moves between processes and to the device.  Without `widen` they keep their dtypes, and the model widens
    the features of each pass.
    Errors: KeyError for a name that is not in the table; ValueError for an array with a wrong number of axes, or whose
    axes disagree with those of another array.
    """
    sizes: dict[str, tuple[int, str]] = {}
    for name, array in arrays.items():
        if name not in FEATURES:
            raise KeyError(f"{name!r} is not in the feature table (warpfold/batch.py)")
        axes = FEATURES[name].axes
        if np.ndim(array) != len(axes):
            raise ValueError(f"{name}: {np.ndim(array)} axes, {len(axes)} expected {axes}")
        for axis, size in zip(axes, np.shape(array)):
            if axis == "pass":
                continue  # checked by the model
            if isinstance(axis, int) and size != axis:
                raise ValueError(f"{name}: an axis of {size}, {axis} expected {axes}")
            if isinstance(axis, str) and sizes.setdefault(axis, (size, name))[0] != size:
                raise ValueError(f"{name}: {axis} is {size}, but {sizes[axis][0]} in {sizes[axis][1]}")
    tensors = {
        name: array if isinstance(array, Tensor) else torch.from_numpy(np.asarray(array, order="C"))
        for name, array in arrays.items()
    }
    if not widen:
        return tensors
    return {name: x.to(device or x.device).to(getattr(torch, FEATURES[name].dtype)) for name, x in tensors.items()}


def on_device(batch: Mapping[str, Tensor], device: torch.device | str) -> Batch:
    """Move the features of a batch to a device, and widen them to the table's dtypes."""

    def moved(name: str, x: Tensor) -> Tensor:
        dtype: torch.dtype = getattr(torch, FEATURES[name].dtype)
        return x.to(device).to(dtype) if x.element_size() < dtype.itemsize else x.to(device)

    return {name: moved(name, x) for name, x in batch.items()}


def at_pass(batch: Mapping[str, Tensor], index: int, names: Iterable[str] | None = None) -> Batch:
    """Select the features of one pass through the trunk: per-pass features lose their `pass` axis."""
    picked: Batch = {}
    for name in batch if names is None else names:
        feature, x = FEATURES[name], batch[name]
        if feature.per_pass:
            # Counted from the end, since batch axes may precede those of the table.
            axis = -len(feature.axes)
            x = x.select(axis, 0 if x.shape[axis] == 1 else index)
        picked[name] = x
    return picked


def passes(batch: Mapping[str, Tensor], start: int, count: int) -> Batch:
    """Select `count` passes from `start` of each per-pass feature; features with a single pass stay."""

    def of(name: str, x: Tensor) -> Tensor:
        axis = -len(FEATURES[name].axes)
        return x.narrow(axis, start, count) if FEATURES[name].per_pass and x.shape[axis] > 1 else x

    return {name: of(name, x) for name, x in batch.items()}


def stack(examples: Sequence[Mapping[str, Tensor]]) -> Batch:
    """Stack examples of the same features along a new leading axis, and pad each axis to its largest size.

    The padding is 0, which the masks exclude, or NO_ROW for row numbers.  Complexes need equal numbers of templates,
    since a multimer averages over all templates, including those without atoms.
    """
    batch = {}
    for name in examples[0]:
        arrays = [example[name] for example in examples]
        largest = [max(sizes) for sizes in zip(*(x.shape for x in arrays))]
        batch[name] = torch.stack([_padded(x, largest, padding(name)) for x in arrays])
    return batch


def padding(name: str) -> int:
    """Return the padding value of a feature."""
    return NO_ROW if name in ("centre_rows", "extra_rows") else 0


def _padded(x: Tensor, sizes: Sequence[int], value: int) -> Tensor:
    """Pad the end of each axis of x to these sizes."""
    missing = [pad for size, present in zip(reversed(sizes), reversed(x.shape)) for pad in (0, size - present)]
    return F.pad(x, missing, value=value) if any(missing) else x
