"""Which atoms residues have, and the labels of an example whose atoms are known before the model runs."""

import numpy as np
import torch

from warpfold.batch import Arrays
from warpfold.geometry.labels import structure_labels
from warpfold.geometry.residue import ATOM14_MASK, ATOM37_MASK


def atom_masks(aatype: np.ndarray) -> Arrays:
    """Return which atoms the residues have: `atom14_atom_exists` [N, 14], `atom37_atom_exists` [N, 37], float32."""
    return {"atom14_atom_exists": ATOM14_MASK[aatype], "atom37_atom_exists": ATOM37_MASK[aatype]}


def add_labels(features: Arrays) -> Arrays:
    """Return `features` and the labels that follow from `aatype`, `all_atom_positions` and `all_atom_mask`, float32.

    They are those of `structure_labels`.
    """
    aatype = torch.from_numpy(features["aatype"]).long()
    positions, mask = (torch.from_numpy(features[name]).float() for name in ("all_atom_positions", "all_atom_mask"))
    labels = structure_labels(aatype, positions, mask)
    return {**features, **{name: label.numpy() for name, label in labels.items()}}
