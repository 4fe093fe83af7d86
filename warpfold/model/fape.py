"""Frame aligned point error: how far atoms are off, seen from every frame (Supp. 1.9.2, 1.9.3)."""

import math

import torch
from torch import Tensor

from warpfold.geometry.rigid import Rigid
from warpfold.ops.tensors import in_blocks, upcast_half

# Angstrom; code: the monomer's distance is sqrt(d^2 + 1e-4), Multimer's sqrt(max(d^2, 1e-8)).
SOFTENING, LEAST = 0.01, 1e-4


def frame_aligned_point_error(
    frames: Rigid,
    points: Tensor,
    true_frames: Rigid,
    true_points: Tensor,
    frame_mask: Tensor,
    point_mask: Tensor,
    clamp: float | None = 10.0,
    clamped: Tensor | float = 1.0,
    scale: float = 10.0,
    softening: float = SOFTENING,
    pair_mask: Tensor | None = None,
) -> Tensor:
    """Return the mean distance [*] of predicted to true points, each pair seen from its own frame (Algorithm 28).

    frames [*, F] and points [*, P, 3] in angstrom, likewise the true ones (leading axes may broadcast); frame_mask
    [*, F]; point_mask [*, P]; `clamp` caps a distance, angstrom (None: no cap); `clamped`: the share of the loss, 0 to
    1, that is capped (Supp. 1.11.5: in 10 % of the examples it is not); `scale`: the distance that counts as 1;
    `softening` (angstrom): a distance d counts as the root of d^2 + softening^2, so that it has a gradient at 0; with 0
    as `LEAST` at least, below which there is none (Multimer); pair_mask [F, P]: the pairs that count, all by default.

    Invariant under a rigid motion of the prediction and, independently, of the truth; not under a reflection.
    """
    offset = _offset(true_frames) - _offset(frames)
    frame_mask, point_mask = frame_mask.to(offset.dtype), point_mask.to(offset.dtype)

    def of_frames(rows: slice) -> tuple[Tensor, ...]:
        """Return the sum of the distances from some frames, each weighed by its masks, and the sum of the weights."""
        seen, true = frames[..., rows], true_frames[..., rows]
        squares = offset.new_full((), softening**2)
        for k in range(3):  # one axis of the local frames at a time: three times less memory than all together
            apart = _project(offset[..., rows, k, None], seen, points, k, 1)
            squares = squares + _project(apart, true, true_points, k, -1).square()
        distance = (squares if softening else squares.clamp(min=LEAST**2)).sqrt()
        if clamp is not None:
            distance = clamped * distance.clamp(max=clamp) + (1 - clamped) * distance
        if pair_mask is not None:
            pairs = frame_mask[..., rows, None] * point_mask[..., None, :] * pair_mask[..., rows, :]
            return (distance * pairs).sum((-2, -1)), pairs.sum((-2, -1))
        total = ((distance * point_mask[..., None, :]).sum(-1) * frame_mask[..., rows]).sum(-1)
        return total, frame_mask[..., rows].sum(-1) * point_mask.sum(-1)

    blocks = in_blocks(of_frames, offset.shape[-2], math.prod(offset.shape[:-2]) * points.shape[-2])
    total, weight = (torch.stack(sums).sum(0) for sums in zip(*blocks))
    return total / scale / (1e-4 + weight)


def backbone_fape(
    frames: Rigid,
    true_frames: Rigid,
    mask: Tensor,
    clamp: float = 10.0,
    clamped: Tensor | float = 1.0,
    scale: float = 10.0,
    softening: float = SOFTENING,
    pair_mask: Tensor | None = None,
) -> Tensor:
    """Return the FAPE of Ca positions from backbone frames (Algorithm 20): frames [*, N], true [N], mask [N] -> [*].

    One value for every leading axis of `frames`, for example for every layer; angstrom.  pair_mask [N, N]: of frames
    and Ca; the rest as in `frame_aligned_point_error`.
    """
    points, true_points = frames.translation, true_frames.translation
    return frame_aligned_point_error(
        frames, points, true_frames, true_points, mask, mask, clamp, clamped, scale, softening, pair_mask
    )


def sidechain_fape(
    frames: Rigid,
    atoms: Tensor,
    true_frames: Rigid,
    true_atoms: Tensor,
    frame_mask: Tensor,
    atom_mask: Tensor,
    clamp: float = 10.0,
    softening: float = SOFTENING,
) -> Tensor:
    """Return the FAPE of all atoms from all rigid groups (Algorithm 20), a scalar.

    frames [N, 8], atoms [N, 14, 3], frame_mask [N, 8], atom_mask [N, 14]; angstrom.  The truth must already bear the
    better of its two names (`rename_ground_truth`), frames and atoms alike.
    """
    return frame_aligned_point_error(
        _flat(frames),
        atoms.flatten(-3, -2),
        _flat(true_frames),
        true_atoms.flatten(-3, -2),
        frame_mask.flatten(-2),
        atom_mask.flatten(-2),
        clamp,
        softening=softening,
    )


def _flat(frames: Rigid) -> Rigid:
    """Flatten frames [*, N, G] to [*, N G]."""
    return Rigid(frames.rotation.flatten(-4, -3), frames.translation.flatten(-3, -2))


def _offset(frames: Rigid) -> Tensor:
    """Return R^T t [*, F, 3]: what inverting a frame subtracts once the point is rotated."""
    return (upcast_half(frames.rotation) * upcast_half(frames.translation)[..., None]).sum(-2)


def _project(start: Tensor, frames: Rigid, points: Tensor, k: int, sign: int) -> Tensor:
    """Return start + sign (R^T x)_k [*, F, P]: points on axis k of frames.

    In plain products and sums, for a GPU may compute a matmul in TF32, which is not enough for coordinates.
    """
    axis, points = upcast_half(frames.rotation)[..., k], upcast_half(points)
    for c in range(3):
        start = torch.addcmul(start, axis[..., c, None], points[..., None, :, c], value=sign)
    return start
