"""What rounding alone decides in a whole model, decided as the reference did, so that the rest can be judged strictly.

Some outputs are discrete: the bins that losses aim at, the naming of ambiguous atoms, violations.  A value on an edge
falls to either side by rounding, and losses and gradients jump (by 1e-3 and less).  Nothing is loosened for that:

* They are computed by our functions on the reference's structure.  Ours is compared with it by itself.
* A residue's aligned error in its own frame is zero, the edge of the first bin.  In compiled code rounding lifts most
  of them off zero, and which ones differs even between the reference's loss and its gradient.  For the gradient the
  choice is read off that of the one layer which the bins touch directly; all other gradients then have to follow.

Either leaves a note beside the result.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from warpfold.geometry.rigid import Rigid
from warpfold.golden.read import Case
from warpfold.model.structure import StructureOutput

ON_EDGE = "on an edge: decided on the reference's structure"
OWN_ERROR = "own errors of zero, on an edge: decided by the reference's gradient"
AT_MOST = 200_000  # choices of residues to try


def reference_structure(case: Case, ours: StructureOutput) -> StructureOutput:
    """Our structure, but with the reference's backbone and final atoms, where the case has them."""
    stored = {
        name: torch.from_numpy(case.expected[f"out/structure_module/{name}"])
        for name in ("traj", "final_atom14_positions", "final_atom_positions")
        if f"out/structure_module/{name}" in case.expected
    }
    traj = stored.get("traj", ours.traj)
    return replace(
        ours,
        traj=traj,
        frames=Rigid.from_quaternion7(traj),
        final_atom14=stored.get("final_atom14_positions", ours.final_atom14),
        final_atom37=stored.get("final_atom_positions", ours.final_atom37),
    )


def differences(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> dict[str, str]:
    """Notes, by output, on the discrete quantities that our own structure decides otherwise than the reference's."""
    return {f"out/{name}": ON_EDGE for name, x in ours.items() if not torch.equal(x, theirs[name])}


def own_error_step(ours: np.ndarray, theirs: np.ndarray, pair: Tensor, log_p: Tensor, mask: Tensor) -> Tensor | None:
    """What to add to the loss on the aligned error, so that own errors of zero are in the bins of the reference.

    ours, theirs [c_z + 1, bins]: the gradient of that loss by the head's weights and bias; ours for own errors that are
    all in the second bin.  pair [N, N, c_z] is the head's input, log_p [N, N, bins] its log-probabilities, mask [N].
    Moving residue i to the first bin adds pair[i, i] over the number of pairs to column 1 of the gradient, and the
    opposite to column 0.  None where no residue was moved, or too many to try.
    """
    pairs = float(mask.sum()) ** 2
    moved = ((theirs - ours)[:, 1] - (theirs - ours)[:, 0]) / 2 * pairs
    count, residues = round(float(moved[-1])), np.flatnonzero(mask.numpy() > 0)
    if count < 1 or math.comb(len(residues), count) > AT_MOST:
        return None
    own = pair.detach().numpy()[residues, residues]
    choices = np.array(list(itertools.combinations(range(len(residues)), count)))
    miss = np.linalg.norm(own[choices].sum(1) - moved[:-1], axis=-1)
    chosen = residues[choices[miss.argmin()]]
    return (log_p[chosen, chosen, 1] - log_p[chosen, chosen, 0]).sum() / pairs
