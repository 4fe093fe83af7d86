"""Pairwise sums of losses.

aligned_errors: the errors of all points in all frames, summed; the main work of FAPE (Supp. 1.9.2).
overlaps: the overlaps of each atom with the atoms of other residues, for the violation loss.
"""

import math
from typing import Any

import torch
from torch import Tensor

from warpfold.ops.dispatch import faster_on_cpu, register, upcast_half
from warpfold.ops.tensors import in_blocks

# Angstrom. Shorter distances count as this and have no gradient.
LEAST = 1e-4


def _unsupported(t: Any) -> str | None:
    truth_and_masks = [x for x in t[2:] if isinstance(x, Tensor)]
    if any(x.requires_grad for x in truth_and_masks):
        return "the truth and masks have no gradient"
    if (
        t.frames.shape[:-3] != t.points.shape[:-2]
        or [x.dim() for x in truth_and_masks] != [3, 2, 1, 1, 2][: len(truth_and_masks)]
    ):
        return "the truth and masks have no leading axes"
    return None


@register(
    shapes="frames [*, f, 3, 4], points [*, p, 3], true_frames [f, 3, 4], true_points [p, 3], frame_mask [f], "
    "point_mask [p], pair_mask [f, p], grad [*, 2]",
    empty=lambda t: t.frames.new_empty(*t.frames.shape[:-3], 2),
    keeps="frames points true_frames true_points frame_mask point_mask pair_mask clamp softening",
    gradients="frames points",
    empty_gradients=lambda t: (t.frames.new_empty(t.frames.shape), t.points.new_empty(t.points.shape)),
    same_dtype="frames points true_frames true_points frame_mask point_mask",
    caller_shapes="frames [..., f, 3, 4], points [..., p, 3], true_frames [..., f, 3, 4], true_points [..., p, 3], "
    "frame_mask [..., f], point_mask [..., p], pair_mask [..., f, p]",
    unsupported=_unsupported,
    prefer_definition=lambda t: faster_on_cpu(t.frames, math.prod(t.frames.shape[:-2]) * t.points.shape[-2], 2**14),
)
def aligned_errors(
    frames: Tensor,
    points: Tensor,
    true_frames: Tensor,
    true_points: Tensor,
    frame_mask: Tensor,
    point_mask: Tensor,
    pair_mask: Tensor | None = None,
    clamp: float = 10.0,
    softening: float = 0.01,
) -> Tensor:
    """Sum |R^T (x - t) - R'^T (x' - t')| over frames and points, clamped and unclamped: [*, 2].

    frames [*, f, 3, 4], each with the rotation R and the translation t as its last column; points x [*, p, 3]; the true
    frames and points, which may lack the leading axes.  frame_mask [*, f] and point_mask [*, p] weight the pairs;
    pair_mask bool [f, p] selects pairs (None: all).  A distance d counts as sqrt(d^2 + softening^2), and at least as
    `LEAST`; clamped, at most as `clamp`.  The truth has no gradient.  The result has the dtype of frames, which should
    have more than 16 bits for coordinates.
    """

    def sum_of_frames(rows: slice) -> tuple[Tensor, ...]:
        """Compute the sums over the pairs of some frames."""
        predicted, true = frames[..., rows, :, :], true_frames[..., rows, :, :]
        # Subtract t before the rotation. R^T x - R^T t would lose digits where the structure is far from the origin.
        local_points, true_local_points = _from_origins(predicted, points), _from_origins(true, true_points)
        squares = local_points[0].new_full((), softening**2)
        # One axis of the local frames at a time takes a third of the memory.
        for k in range(3):
            squares = (
                squares + (_along(predicted[..., k], local_points) - _along(true[..., k], true_local_points)).square()
            )
        distance = squares.clamp(min=LEAST**2).sqrt()
        weight = point_mask[..., None, :]
        if pair_mask is not None:
            weight = weight * pair_mask[rows]
        sums = [((x * weight).sum(-1) * frame_mask[..., rows]).sum(-1) for x in (distance.clamp(max=clamp), distance)]
        return tuple(sums)

    pairs = math.prod(frames.shape[:-3]) * points.shape[-2]
    blocks = in_blocks(sum_of_frames, frames.shape[-3], pairs)
    return torch.stack([torch.stack(sums).sum(0) for sums in zip(*blocks)], -1)


def _from_origins(frames: Tensor, points: Tensor) -> list[Tensor]:
    """Subtract the origins of frames from points, without rotation: x, y and z, each [*, f, p]."""
    return [points[..., None, :, c] - frames[..., c, 3, None] for c in range(3)]


def _along(axis: Tensor, away: list[Tensor]) -> Tensor:
    """Project vectors, x, y and z [*, f, p], onto an axis [*, f, 3] of each frame.

    The products are elementwise, because a GPU may compute a matmul in TF32, which is too coarse for coordinates.
    """
    product = axis[..., 0, None] * away[0]
    for c in (1, 2):
        product = torch.addcmul(product, axis[..., c, None], away[c])
    return product


# Indices in atom14. SG belongs to cysteine.
N_ATOM, C_ATOM, SG_ATOM = 0, 2, 5


@register(
    shapes="atoms [n, 3], radius [n], exists [n], index [n], order [n], chain [n], slot [n], grad [3, n]",
    empty=lambda t: t.atoms.new_empty(3, len(t.atoms)),
    keeps="atoms radius exists index order chain slot tolerance",
    gradients="atoms radius",
    empty_gradients=lambda t: (t.atoms.new_empty(t.atoms.shape), t.radius.new_empty(t.radius.shape)),
    same_dtype="atoms radius exists",
    unsupported=lambda t: "which atoms exist has no gradient" if t.exists.requires_grad else None,
    prefer_definition=lambda t: faster_on_cpu(t.atoms, len(t.atoms) ** 2, 2**14),
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
    """Compute for each atom the sum of its overlaps, their number, and the number of compared atoms: [3, n].

    atoms [n, 3] and radius [n] in angstrom; exists [n] (0 or 1); int64 [n] each: index of the residue; order, where
    atoms with the same value are not compared; chain; slot, the index in atom14.  Two atoms overlap by the sum of their
    radii minus `tolerance` minus their distance.  Exempt are C and N of residues with consecutive indices in a chain,
    and two atoms in the slot of SG.  The result has the dtype of atoms, which should have more than 16 bits.
    """
    positions, radius, exists = (upcast_half(x) for x in (atoms, radius, exists))

    def compare_rows(rows: slice) -> tuple[Tensor, ...]:
        """Compute the results of a block of atoms as the first atoms of pairs, and of all atoms as the second."""
        compared = exists[rows, None] * exists * (order[rows, None] < order)
        bonded = (index[rows, None] + 1 == index) & (slot[rows, None] == C_ATOM) & (slot == N_ATOM)
        disulfide = (slot[rows, None] == SG_ATOM) & (slot == SG_ATOM)
        compared = compared * ~(bonded & (chain[rows, None] == chain) | disulfide)
        # By default torch.cdist uses a matmul, which loses short distances to cancellation.
        distance = torch.cdist(positions[rows], positions, compute_mode="donot_use_mm_for_euclid_dist")
        allowed = radius[rows, None] + radius - tolerance
        results = compared * (allowed - distance).relu(), compared * (distance < allowed), compared
        return tuple(x.sum(axis) for axis in (1, 0) for x in results)

    blocks = list(zip(*in_blocks(compare_rows, len(atoms), len(atoms))))
    first = [torch.cat(parts) for parts in blocks[:3]]
    return torch.stack([a + torch.stack(parts).sum(0) for a, parts in zip(first, blocks[3:])]).to(atoms.dtype)
