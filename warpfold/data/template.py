"""Templates: known structures on the residues of a chain (Supp. 1.2.3), and the features that the model sees of them.

What can be prepared ahead, atoms of up to 20 templates, is a `Templates`; which of them an example gets is drawn anew
each time (`choose_templates`).
"""

from dataclasses import dataclass

import numpy as np
import torch

from warpfold.batch import FEATURES, Arrays
from warpfold.geometry import atoms

MOST_STORED = 20  # the best of the search; training chooses among these (Supp. 1.2.3)


@dataclass(frozen=True)
class Templates:
    """T structures on the N residues of a chain, best first.  What no template residue stands for is masked."""

    aatype: np.ndarray  # uint8 [T, N], the template's residues: 0-19, 20 = X, 21 = gap
    positions: np.ndarray  # float32 [T, N, 37, 3], angstrom, 0 where masked
    mask: np.ndarray  # uint8 [T, N, 37]
    names: tuple[str, ...]  # [T], such as "1abc_A"
    sum_probs: np.ndarray  # float32 [T], expected number of correctly aligned residues

    def __len__(self) -> int:
        return len(self.names)

    def take(self, start: int, stop: int) -> "Templates":
        """Residues [start, stop) of every template."""
        span = slice(start, stop)
        return Templates(self.aatype[:, span], self.positions[:, span], self.mask[:, span], self.names, self.sum_probs)

    def choose(self, indices: np.ndarray) -> "Templates":
        """The templates at `indices` (int [K]), in that order."""
        return Templates(
            self.aatype[indices],
            self.positions[indices],
            self.mask[indices],
            tuple(self.names[i] for i in indices),
            self.sum_probs[indices],
        )


def choose_templates(count: int, most: int, rng: np.random.Generator | None) -> np.ndarray:
    """Which of `count` templates (best first) an example gets: int64 [K], ascending, K <= `most`.

    Training (with `rng`): k = min(uniform[0, n], most) random ones of the n that there are, at most 20 (Supp. 1.2.3),
    so that the model learns to do without.  Inference (`rng` None): the best.
    """
    if rng is None:
        return np.arange(min(count, most))
    count = min(count, MOST_STORED)
    size = min(int(rng.integers(0, count + 1)), most)
    return np.sort(rng.choice(count, size, replace=False)).astype(np.int64)


def template_features(templates: Templates | None, length: int) -> Arrays:
    """The template features of the feature table (`warpfold.batch.FEATURES`); arrays of none without templates.

    `length`: residues of the example.  The pseudo beta is CB, or CA of glycine (Supp. 1.2.9, table 1); it is of the
    template's own residue type, and masked where that atom was not seen.
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
