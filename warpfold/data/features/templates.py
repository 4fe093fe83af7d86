"""The features of templates."""

import numpy as np
import torch

from warpfold.batch import FEATURES, Arrays
from warpfold.data.example.raw_example import Templates
from warpfold.geometry import atoms


def template_features(templates: Templates | None, length: int) -> Arrays:
    """Return the template features of the feature table (`warpfold.batch.FEATURES`), empty arrays without templates.

    length: residues of the example.  The pseudo beta is CB, or CA of glycine (Supp. 1.2.9, table 1), of the template's
    own residue type; it is masked where that atom was not seen.
    """
    if templates is None or not len(templates):
        sizes = {"tmpl": 0, "res": length}
        return {
            name: np.zeros([sizes[axis] if isinstance(axis, str) else axis for axis in feature.axes], feature.dtype)
            for name, feature in FEATURES.items()
            if name.startswith("template_")
        }
    if templates.aatype.shape[1] != length:
        raise ValueError(f"templates of {templates.aatype.shape[1]} residues for an example of {length}")
    aatype, positions = templates.aatype.astype(np.int64), templates.positions
    mask = templates.mask.astype(np.float32)
    codes, xyz, seen = (torch.from_numpy(array) for array in (aatype, positions, mask))
    return {
        "template_aatype": aatype,
        "template_all_atom_positions": positions,
        "template_all_atom_masks": mask,
        "template_pseudo_beta": atoms.pseudo_beta(codes, xyz).numpy(),
        "template_pseudo_beta_mask": atoms.pseudo_beta_mask(codes, seen).numpy(),
        "template_mask": np.ones(len(templates), np.float32),
    }
