"""aligned_errors on a CPU: some frames at a time, so that their distances to all points stay in cache.

A distance along an axis of a frame is one product, of [R^T, -R^T t, -R'^T, R'^T t'] by [x, 1, x', 1].
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from warpfold.ops.aligned import LEAST
from warpfold.ops.dispatch import alike
from warpfold.ops.tensors import accumulation_dtype

PAIRS = 2**16  # of frames and points at a time


def aligned_errors(
    frames: Tensor,
    points: Tensor,
    true_frames: Tensor,
    true_points: Tensor,
    frame_mask: Tensor,
    point_mask: Tensor,
    pair_mask: Tensor | None,
    clamp: float,
    softening: float,
) -> Tensor:
    """Compute warpfold::aligned_errors."""
    dtype, acc = frames.dtype, accumulation_dtype(frames)
    frames, points, true_frames, true_points = (x.to(acc) for x in (frames, points, true_frames, true_points))
    sums = frames.new_zeros(*frames.shape[:-3], 2)
    for total, some, x in zip(sums.view(-1, 2), *_each(frames, points)):
        axes, columns = _operands(some, x, true_frames, true_points)
        for rows in alike(_blocks(len(some), len(x))):
            distance = _distances(axes[rows], columns, softening)[1]
            weight = _weight(frame_mask[rows], point_mask, pair_mask, rows)
            total[1] += (distance * weight).sum()
            total[0] += distance.clamp_(max=clamp).mul_(weight).sum()
    return sums.to(dtype)


def aligned_errors_backward(
    grad: Tensor,
    frames: Tensor,
    points: Tensor,
    true_frames: Tensor,
    true_points: Tensor,
    frame_mask: Tensor,
    point_mask: Tensor,
    pair_mask: Tensor | None,
    clamp: float,
    softening: float,
) -> tuple[Tensor, Tensor]:
    """Compute warpfold::aligned_errors_backward."""
    dtype, acc = frames.dtype, accumulation_dtype(frames)
    frames, points, true_frames, true_points = (x.to(acc) for x in (frames, points, true_frames, true_points))
    dframes, dpoints = frames.new_zeros(frames.shape), points.new_zeros(points.shape)
    gradients = _each(dframes, dpoints)
    for (capped, whole), some, x, dsome, dx in zip(grad.reshape(-1, 2).to(acc), *_each(frames, points), *gradients):
        axes, columns = _operands(some, x, true_frames, true_points)
        for rows in alike(_blocks(len(some), len(x))):
            apart, distance = _distances(axes[rows], columns, softening)
            slope = torch.where(distance <= clamp, capped + whole, whole)
            slope *= _weight(frame_mask[rows], point_mask, pair_mask, rows)
            slope = (slope / distance).masked_fill_(distance <= LEAST, 0)
            apart *= slope[:, None]  # the gradient of each coordinate, [frames, 3, p]
            dx += (axes[rows, :, :3].flatten(0, 1).T @ apart.flatten(0, 1)).T
            daxes = apart @ columns[:4].T  # of [R^T, -R^T t]
            rotation, translation, dstart = some[rows, :, :3], some[rows, :, 3], daxes[..., 3]
            dsome[rows, :, :3] = daxes[..., :3].mT - translation[..., None] * dstart[:, None, :]
            dsome[rows, :, 3] = -(rotation * dstart[:, None, :]).sum(-1)
    return dframes.to(dtype), dpoints.to(dtype)


def _operands(frames: Tensor, points: Tensor, true_frames: Tensor, true_points: Tensor) -> tuple[Tensor, Tensor]:
    """Return the operands of the product, [f, 3 axes, 8] and [8, p]."""
    inverse, true = (torch.cat([r.mT, -(r * t).sum(-2)[..., None]], -1) for r, t in map(_split, (frames, true_frames)))
    ones = points.new_ones(1, len(points))
    return torch.cat([inverse, -true], -1), torch.cat([points.T, ones, true_points.T, ones])


def _each(frames: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """Return frames [*, f, 3, 4] and points [*, p, 3] with one leading axis."""
    return frames.reshape(-1, *frames.shape[-3:]), points.reshape(-1, *points.shape[-2:])


def _split(frames: Tensor) -> tuple[Tensor, Tensor]:
    return frames[..., :3], frames[..., 3:]


def _blocks(frames: int, points: int) -> Iterator[slice]:
    """Return the frames of each block."""
    size = max(PAIRS // points, 1)
    return (slice(start, start + size) for start in range(0, frames, size))


def _distances(axes: Tensor, columns: Tensor, softening: float) -> tuple[Tensor, Tensor]:
    """Return how far points are off along each axis [frames, 3, p], and their distances [frames, p]."""
    apart = (axes.flatten(0, 1) @ columns).unflatten(0, (-1, 3))
    x, y, z = apart.unbind(1)
    squares = (x * x).add_(softening**2).addcmul_(y, y).addcmul_(z, z)
    return apart, squares.clamp_(min=LEAST**2).sqrt_()


def _weight(frame_mask: Tensor, point_mask: Tensor, pair_mask: Tensor | None, rows: slice) -> Tensor:
    weight = frame_mask[:, None] * point_mask
    return weight if pair_mask is None else weight * pair_mask[rows]
