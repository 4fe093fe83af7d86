"""overlaps: how far atoms of different residues reach into one another, for every atom; of the violation loss."""

from typing import Any

import torch
from torch import Tensor

from warpfold.ops.dispatch import faster_on_cpu
from warpfold.ops.register import register
from warpfold.ops.tensors import in_blocks, upcast_half

N_ATOM, C_ATOM, SG_ATOM = 0, 2, 5  # places in atom14; SG is cysteine's


def _unsupported(_: Tensor, radius: Tensor, exists: Tensor, *rest: Any) -> str | None:
    return "which atoms exist has no gradient" if exists.requires_grad else None


def _prefer_definition(atoms: Tensor, *_: Any) -> bool:
    return faster_on_cpu(atoms, len(atoms) ** 2, 2**14)


@register(
    shapes="atoms [n, 3], radius [n], exists [n], index [n], order [n], chain [n], slot [n], grad [3, n]",
    empty=lambda atoms, *_: atoms.new_empty(3, len(atoms)),
    keeps="atoms radius exists index order chain slot tolerance",
    gradients="atoms radius",
    empty_gradients=lambda grad, atoms, radius, *_: (atoms.new_empty(atoms.shape), radius.new_empty(radius.shape)),
    same_dtype="atoms radius exists",
    unsupported_reason=_unsupported,
    prefer_definition=_prefer_definition,
)
def overlaps(
    atoms: Tensor,
    radius: Tensor,
    exists: Tensor,
    index: Tensor,
    order: Tensor,
    chain: Tensor,
    slot: Tensor,
    tolerance: float = 1.5,
) -> Tensor:
    """Return of each atom the sum of its overlaps, how many there are, and with how many it was compared: [3, n].

    atoms [n, 3] and radius [n] in angstrom; exists [n] (0 or 1); int64 [n] each: index of the residue, order: atoms of
    the same are not compared, chain, and slot, the place in atom14.  Two atoms overlap by the sum of their radii, less
    `tolerance`, less their distance.  Exempt are C and N of residues of following index in a chain, and two atoms at
    the place of SG.  In the dtype of atoms, which should not be one of 16 bits.
    """
    places, radius, exists = (upcast_half(x) for x in (atoms, radius, exists))

    def of_rows(rows: slice) -> tuple[Tensor, ...]:
        """Return of some atoms, which come first in their order, and of all others, what is to be returned."""
        looked_at = exists[rows, None] * exists * (order[rows, None] < order)
        bonded = (index[rows, None] + 1 == index) & (slot[rows, None] == C_ATOM) & (slot == N_ATOM)
        disulfide = (slot[rows, None] == SG_ATOM) & (slot == SG_ATOM)
        looked_at = looked_at * ~(bonded & (chain[rows, None] == chain) | disulfide)
        # Not through matmul: the default would lose the short distances to cancellation.
        distance = torch.cdist(places[rows], places, compute_mode="donot_use_mm_for_euclid_dist")
        allowed = radius[rows, None] + radius - tolerance
        found = looked_at * (allowed - distance).relu(), looked_at * (distance < allowed), looked_at
        return tuple(x.sum(axis) for axis in (1, 0) for x in found)

    of_blocks = list(zip(*in_blocks(of_rows, len(atoms), len(atoms))))
    first = [torch.cat(parts) for parts in of_blocks[:3]]
    return torch.stack([a + torch.stack(parts).sum(0) for a, parts in zip(first, of_blocks[3:])]).to(atoms.dtype)
