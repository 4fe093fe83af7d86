"""The labels that supervise the model, all computed from the residue types and the atoms of a chain."""

import numpy as np
import torch

from warpfold.batch import Arrays
from warpfold.geometry import atoms
from warpfold.geometry.residue import ATOM14_MASK, ATOM37_MASK


def atom_masks(aatype: np.ndarray) -> Arrays:
    """Return which atoms the residues have: `atom14_atom_exists` [N, 14], `atom37_atom_exists` [N, 37], float32."""
    return {"atom14_atom_exists": ATOM14_MASK[aatype], "atom37_atom_exists": ATOM37_MASK[aatype]}


def add_labels(features: Arrays) -> Arrays:
    """Return `features` and the labels that follow from `aatype`, `all_atom_positions` and `all_atom_mask`.

    Labels: atoms in the 14 places of their residue type, under both namings of the ambiguous ones (Supp. 1.8.5); the
    frames of the backbone and of the other rigid groups (1.8.1); chi angles in radians (1.9.3); the distogram's points
    (1.9.8).  float32, angstrom; quaternions w x y z with w >= 0.  Masked values are finite but mean nothing.
    """
    aatype = torch.from_numpy(features["aatype"]).long()
    positions, mask = (torch.from_numpy(features[name]).float() for name in ("all_atom_positions", "all_atom_mask"))
    gt = atoms.atom37_to_atom14(aatype, positions * mask[..., None])
    gt_exists = atoms.atom37_to_atom14(aatype, mask)
    groups = atoms.atom37_to_frames(aatype, positions, mask)
    torsions = atoms.atom37_to_torsions(aatype, positions, mask)
    chi = torsions.sin_cos[..., 3:, :]
    labels = {
        "atom14_gt_positions": gt,
        "atom14_gt_exists": gt_exists,
        "atom14_alt_gt_positions": atoms.swap_atom14(aatype, gt),
        "atom14_alt_gt_exists": atoms.swap_atom14(aatype, gt_exists),
        "atom14_atom_is_ambiguous": atoms.residue_rows("ATOM14_AMBIGUOUS", aatype),
        "rigidgroups_gt_frames": groups.frames.to_flat12(),
        "rigidgroups_alt_gt_frames": groups.alt_frames.to_flat12(),
        "rigidgroups_gt_exists": groups.mask,
        "rigidgroups_group_exists": groups.exists,
        "rigidgroups_group_is_ambiguous": groups.ambiguous,
        "backbone_affine_tensor": groups.frames[..., 0].to_quaternion7(),
        "backbone_affine_mask": groups.mask[..., 0],
        "pseudo_beta": atoms.pseudo_beta(aatype, positions),
        "pseudo_beta_mask": atoms.pseudo_beta_mask(aatype, mask),
        "chi_angles": torch.atan2(chi[..., 0], chi[..., 1]),
        "chi_mask": torsions.mask[..., 3:],
    }
    return {**features, **{name: label.numpy() for name, label in labels.items()}}
