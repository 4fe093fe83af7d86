"""aligned_errors and overlaps on a CPU in blocks, so that distances stay in cache.

aligned_errors computes the distances along an axis of a frame by one product, of
[R^T, -R^T (t - o), -R'^T, R'^T (t' - o')] by [x - o, 1, x' - o', 1].  The origins o and o' are those of the middle
frame in a group of consecutive frames.  So the product subtracts small numbers and loses few digits, wherever the
structures are.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from warpfold.ops.dispatch import Operands, accumulation_dtype, uniform_loop
from warpfold.ops.pairs import C_ATOM, LEAST, N_ATOM, SG_ATOM

PAIRS = 2**16  # pairs per block
# Consecutive frames with one origin: those of a residue, or the backbones of some residues.
GROUP = 8


def aligned_errors(t: Operands) -> Tensor:
    """Compute warpfold::aligned_errors."""
    dtype, acc = t.frames.dtype, accumulation_dtype(t.frames)
    operands = t.frames, t.points, t.true_frames, t.true_points, t.frame_mask, t.point_mask
    frames, points, true_frames, true_points, frame_mask, point_mask = (x.to(acc) for x in operands)
    sums = frames.new_zeros(*frames.shape[:-3], 2)
    true = _operands(true_frames, true_points, -1)
    for total, example_frames, x in zip(sums.view(-1, 2), *_each(frames, points)):
        axes, columns, origins = _joined(_operands(example_frames, x, 1), true)
        for groups, rows in uniform_loop(_blocks(len(example_frames), len(x))):
            products = axes[groups] @ (columns - origins[groups])
            distance = _squares(_of_frames(products, rows), t.softening).clamp_(min=LEAST**2).sqrt_()
            if t.pair_mask is not None:
                distance *= t.pair_mask[rows]
            total[1] += frame_mask[rows] @ (distance @ point_mask)
            total[0] += frame_mask[rows] @ (distance.clamp_(max=t.clamp) @ point_mask)
    return sums.to(dtype)


def aligned_errors_backward(t: Operands) -> tuple[Tensor, Tensor]:
    """Compute warpfold::aligned_errors_backward."""
    dtype, acc = t.frames.dtype, accumulation_dtype(t.frames)
    operands = t.frames, t.points, t.true_frames, t.true_points, t.frame_mask, t.point_mask
    frames, points, true_frames, true_points, frame_mask, point_mask = (x.to(acc) for x in operands)
    dframes, dpoints = frames.new_zeros(frames.shape), points.new_zeros(points.shape)
    gradients = _each(dframes, dpoints)
    true = _operands(true_frames, true_points, -1)
    for (capped, whole), example_frames, x, dexample_frames, dx in zip(
        t.grad.reshape(-1, 2).to(acc), *_each(frames, points), *gradients
    ):
        axes, columns, origins = _joined(_operands(example_frames, x, 1), true)
        frame_offsets = example_frames[:, :, 3] - origins[:, :3, 0].repeat_interleave(GROUP, 0)[: len(example_frames)]
        inverse = example_frames[:, :, :3].mT * frame_mask[:, None, None]
        for groups, rows in uniform_loop(_blocks(len(example_frames), len(x))):
            relative_columns = columns - origins[groups]
            products = axes[groups] @ relative_columns
            apart = _of_frames(products, rows)
            squares = _squares(apart, t.softening)
            distance = squares.clamp(min=LEAST**2).sqrt_()
            # In-place comparisons give 0.0 and 1.0 and are faster than torch.where.
            slope = distance.clone().le_(t.clamp).mul_(capped).add_(whole).div_(distance)
            # Compare squares, because the root of LEAST**2 may be rounded to more than LEAST.
            slope *= squares.ge_(LEAST**2)
            if t.pair_mask is not None:
                slope *= t.pair_mask[rows]
            # Gradients of the coordinates before the two masks, [frames, 3, p].
            apart *= slope[:, None]
            dx += (inverse[rows].flatten(0, 1).T @ apart.flatten(0, 1)).T
            # The gradient of [R^T, -R^T (t - o)].
            daxes = _of_frames(products @ (relative_columns[:, :4] * point_mask).mT, rows)
            dstart = daxes[..., 3]
            dexample_frames[rows, :, :3] = daxes[..., :3].mT - frame_offsets[rows, :, None] * dstart[:, None, :]
            dexample_frames[rows, :, 3] = -(example_frames[rows, :, :3] * dstart[:, None, :]).sum(-1)
        dexample_frames *= frame_mask[:, None, None]
        dx *= point_mask[:, None]
    return dframes.to(dtype), dpoints.to(dtype)


def _operands(frames: Tensor, points: Tensor, sign: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the operands of the product for one structure, and the origins to subtract from the second operand.

    Returns sign times [R^T, -R^T (t - o)], [groups, GROUP x 3 axes, 4], with zeros after the last frame; [x, 1],
    [4, p]; and [o, 0], [groups, 4, 1].
    """
    last = len(frames) - 1
    middle = torch.arange(GROUP // 2, last + 1 + GROUP // 2, GROUP, device=frames.device).clamp(max=last)
    inverse, translation = frames[..., :3].mT, frames[..., 3]
    origin = translation[middle]
    offsets = translation - origin.repeat_interleave(GROUP, 0)[: last + 1]
    axes = sign * torch.cat([inverse, -(inverse * offsets[:, None]).sum(-1, keepdim=True)], -1)
    padded_axes = torch.nn.functional.pad(axes, (0, 0, 0, 0, 0, len(middle) * GROUP - last - 1))
    columns = torch.cat([points.T, points.new_ones(1, len(points))])
    return padded_axes.view(len(middle), GROUP * 3, 4), columns, torch.nn.functional.pad(origin, (0, 1))[..., None]


def _joined(ours: tuple[Tensor, ...], true: tuple[Tensor, ...]) -> list[Tensor]:
    """Concatenate the operands of both structures."""
    return [torch.cat(parts, dim) for *parts, dim in zip(ours, true, (-1, 0, 1))]


def _each(frames: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """Reshape frames [*, f, 3, 4] and points [*, p, 3] to a single leading axis."""
    return frames.reshape(-1, *frames.shape[-3:]), points.reshape(-1, *points.shape[-2:])


def _blocks(frames: int, points: int) -> Iterator[tuple[slice, slice]]:
    """Yield the groups and the frames of each block."""
    size = max(PAIRS // (points * GROUP), 1)
    for start in range(0, -(-frames // GROUP), size):
        yield slice(start, start + size), slice(start * GROUP, min((start + size) * GROUP, frames))


def _of_frames(products: Tensor, rows: slice) -> Tensor:
    """View products [groups, GROUP x 3, n] by frames, [frames, 3, n]."""
    return products.view(-1, 3, products.shape[-1])[: rows.stop - rows.start]


def _squares(apart: Tensor, softening: float) -> Tensor:
    """Compute squared distances plus softening^2, [frames, p], from the differences per axis, [frames, 3, p]."""
    x, y, z = apart.unbind(1)
    return (x * x).add_(softening**2).addcmul_(y, y).addcmul_(z, z)


def overlaps(t: Operands) -> Tensor:
    """Compute warpfold::overlaps."""
    atoms, radius, exists = t.atoms, t.radius, t.exists
    dtype, acc = atoms.dtype, accumulation_dtype(atoms)
    atoms, radius, exists = (x.to(acc) for x in (atoms, radius, exists))
    results = atoms.new_empty(3, len(atoms))
    for rows in uniform_loop(_atom_blocks(len(atoms))):
        compared = _compared(t, exists, rows)
        overlap = _overlap(atoms, radius, t.tolerance, rows)[0]
        results[0, rows] = (overlap.relu() * compared).sum(1)
        results[1, rows] = ((overlap > 0) * compared).sum(1)
        results[2, rows] = compared.sum(1)
    return results.to(dtype)


def overlaps_backward(t: Operands) -> tuple[Tensor, Tensor]:
    """Compute warpfold::overlaps_backward."""
    grad, atoms, radius, exists = t.grad, t.atoms, t.radius, t.exists
    dtype, acc = atoms.dtype, accumulation_dtype(atoms)
    grad, atoms, radius, exists = (x.to(acc) for x in (grad, atoms, radius, exists))
    datoms, dradius = atoms.new_empty(atoms.shape), radius.new_empty(radius.shape)
    for rows in uniform_loop(_atom_blocks(len(atoms))):
        overlap, distance = _overlap(atoms, radius, t.tolerance, rows)
        slope = _compared(t, exists, rows) * (overlap > 0)
        slope *= grad[0, rows, None] + grad[0]
        dradius[rows] = slope.sum(1)
        slope = (slope / distance).masked_fill_(distance == 0, 0)
        # A product instead would lose digits for near atoms.
        differences = atoms[rows, None] - atoms
        datoms[rows] = -(slope[..., None] * differences).sum(1)
    return datoms.to(dtype), dradius.to(dtype)


def _atom_blocks(atoms: int) -> Iterator[slice]:
    """Split the atoms into blocks."""
    size = max(PAIRS // atoms, 1)
    return (slice(start, start + size) for start in range(0, atoms, size))


def _overlap(atoms: Tensor, radius: Tensor, tolerance: float, rows: slice) -> tuple[Tensor, Tensor]:
    """Compute the overlaps and distances of some atoms with all atoms."""
    distance = torch.cdist(atoms[rows], atoms, compute_mode="donot_use_mm_for_euclid_dist")
    return radius[rows, None] + radius - tolerance - distance, distance


def _compared(t: Operands, exists: Tensor, rows: slice) -> Tensor:
    """Return 1 for the pairs of some atoms with all atoms that are compared, in either order."""
    index, order, chain, slot = t.index, t.order, t.chain, t.slot
    own_index, own_slot, before = index[rows, None], slot[rows, None], order[rows, None] < order
    forward = (own_slot == C_ATOM) & (slot == N_ATOM) & (own_index + 1 == index) & before
    backward = (own_slot == N_ATOM) & (slot == C_ATOM) & (own_index == index + 1) & ~before
    bonded = (forward | backward) & (chain[rows, None] == chain)
    exempt = bonded | (own_slot == SG_ATOM) & (slot == SG_ATOM) | (order[rows, None] == order)
    return (exists[rows, None] * exists).masked_fill_(exempt, 0)
