"""Frame aligned point error: how far atoms are off, seen from every frame (Supp. 1.9.2, 1.9.3)."""

import math

from torch import Tensor

from warpfold.geometry.rigid import Rigid
from warpfold.ops.pairs import aligned_errors
from warpfold.ops.tensors import upcast_half

# Angstrom; code: the monomer's distance is sqrt(d^2 + 1e-4), Multimer's sqrt(max(d^2, 1e-8)).
SOFTENING = 0.01


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
    seen, true = (upcast_half(x.to_matrix()) for x in (frames, true_frames))
    points, true_points = upcast_half(points), upcast_half(true_points)
    frame_mask, point_mask = frame_mask.to(seen.dtype), point_mask.to(seen.dtype)
    cap = math.inf if clamp is None else clamp
    sums = aligned_errors(seen, points, true, true_points, frame_mask, point_mask, pair_mask, cap, softening)
    capped, whole = sums.unbind(-1)
    total = clamped * capped + (1 - clamped) * whole
    if pair_mask is None:
        weight = frame_mask.sum(-1) * point_mask.sum(-1)
    else:
        weight = (frame_mask[..., :, None] * point_mask[..., None, :] * pair_mask).sum((-2, -1))
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
