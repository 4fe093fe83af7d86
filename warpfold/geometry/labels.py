"""Compute the model's training labels from residue types and atoms."""

import torch
from torch import Tensor

from warpfold.geometry import atoms


def structure_labels(aatype: Tensor, positions: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Compute the labels of a structure, by the names of the feature table (warpfold/batch.py).

    aatype: int64 [*, N]; positions: [*, N, 37, 3], angstrom; mask: [*, N, 37]. The labels are atom14 positions under
    both namings of the ambiguous atoms (Supp. 1.8.5), the frames of the backbone and of the other rigid groups (1.8.1),
    chi angles in radians (1.9.3), and the distogram's points (1.9.8). They have the positions' dtype and device.
    Quaternions are w x y z with w >= 0. Masked values are finite but meaningless. No label depends on which residues
    are neighbours.
    """
    gt = atoms.atom37_to_atom14(aatype, positions * mask[..., None])
    gt_exists = atoms.atom37_to_atom14(aatype, mask)
    groups = atoms.atom37_to_frames(aatype, positions, mask)
    torsions = atoms.atom37_to_torsions(aatype, positions, mask)
    chi = torsions.sin_cos[..., 3:, :]
    return {
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
