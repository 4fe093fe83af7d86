"""aligned_errors: how far points are off, seen from every frame, summed; the work of FAPE (Supp. 1.9.2)."""

import math
from typing import Any

import torch
from torch import Tensor

from warpfold.ops.dispatch import faster_on_cpu
from warpfold.ops.register import register
from warpfold.ops.tensors import in_blocks

LEAST = 1e-4  # angstrom: a shorter distance counts as this, and has no gradient


def _unsupported(_: Tensor, points: Tensor, *rest: Any) -> str | None:
    others = (t for t in rest if isinstance(t, Tensor))
    return "the truth and masks have no gradient" if any(t.requires_grad for t in others) else None


def _prefer_definition(frames: Tensor, points: Tensor, *_: Any) -> bool:
    return faster_on_cpu(frames, math.prod(frames.shape[:-2]) * points.shape[-2], 2**14)


@register(
    shapes="frames [*, f, 3, 4], points [*, p, 3], true_frames [f, 3, 4], true_points [p, 3], frame_mask [f], "
    "point_mask [p], pair_mask [f, p], grad [*, 2]",
    empty=lambda frames, *_: frames.new_empty(*frames.shape[:-3], 2),
    keeps="frames points true_frames true_points frame_mask point_mask pair_mask clamp softening",
    gradients="frames points",
    empty_gradients=lambda grad, frames, points, *_: (frames.new_empty(frames.shape), points.new_empty(points.shape)),
    same_dtype="frames points true_frames true_points frame_mask point_mask",
    unsupported_reason=_unsupported,
    prefer_definition=_prefer_definition,
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
    """Return the sum over frames and points of |R^T (x - t) - R'^T (x' - t')|, capped, and not capped: [*, 2].

    frames [*, f, 3, 4], each the rotation R and the translation t as its last column, and points x [*, p, 3]; the true
    ones, which may lack the leading axes; frame_mask [*, f] and point_mask [*, p] weigh the pairs; pair_mask bool
    [f, p]: those that count (None: all).  A distance d counts as the root of d^2 + softening^2, and as `LEAST` at
    least; capped, as `clamp` at most.  No gradient reaches the truth.  In the dtype of frames, which should not be one
    of 16 bits: coordinates need more.
    """

    def of_frames(rows: slice) -> tuple[Tensor, ...]:
        """Return the sums over the pairs of some frames."""
        seen, true = frames[..., rows, :, :], true_frames[..., rows, :, :]
        # x - t and then R^T: R^T x - R^T t would lose the digits of both where the structure is far from the origin.
        away, true_away = _from_origins(seen, points), _from_origins(true, true_points)
        squares = away[0].new_full((), softening**2)
        for k in range(3):  # one axis of the local frames at a time: three times less memory than all together
            squares = squares + (_along(seen[..., k], away) - _along(true[..., k], true_away)).square()
        distance = squares.clamp(min=LEAST**2).sqrt()
        weight = point_mask[..., None, :]
        if pair_mask is not None:
            weight = weight * pair_mask[rows]
        each = [((x * weight).sum(-1) * frame_mask[..., rows]).sum(-1) for x in (distance.clamp(max=clamp), distance)]
        return tuple(each)

    pairs = math.prod(frames.shape[:-3]) * points.shape[-2]
    blocks = in_blocks(of_frames, frames.shape[-3], pairs)
    return torch.stack([torch.stack(sums).sum(0) for sums in zip(*blocks)], -1)


def _from_origins(frames: Tensor, points: Tensor) -> list[Tensor]:
    """Return points as seen from the origins of frames, not turned: x, y and z, each [*, f, p]."""
    return [points[..., None, :, c] - frames[..., c, 3, None] for c in range(3)]


def _along(axis: Tensor, away: list[Tensor]) -> Tensor:
    """Return vectors, given as x, y and z [*, f, p], on one axis [*, f, 3] of each frame.

    In plain products and sums, for a GPU may compute a matmul in TF32, which is not enough for coordinates.
    """
    product = axis[..., 0, None] * away[0]
    for c in (1, 2):
        product = torch.addcmul(product, axis[..., c, None], away[c])
    return product
