"""aligned_errors and overlaps on a GPU, without a pair matrix in memory.

aligned_errors uses tiles of frames by points.  In the forward pass a program owns a tile.  In the backward pass one
kernel owns frames and iterates over all points, and another owns points and iterates over all frames; both recompute
the distances.  There are no matrix products, so nothing is rounded to TF32.

A program of overlaps owns some atoms and iterates over all atoms, forward and backward.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from warpfold.ops.dispatch import Operands
from warpfold.ops.pairs import C_ATOM, LEAST, N_ATOM, SG_ATOM
from warpfold.ops.triton.launch import configs, register
from warpfold.ops.triton.positions import cdiv, contiguous


@triton.jit
def _load_fp32(at: tl.tensor, there: tl.tensor) -> tl.tensor:
    """Load in fp32, with 0 where the mask is false."""
    return tl.load(at, mask=there, other=0).to(tl.float32)


@triton.jit
def _local_difference(
    rotation: tl.tuple, y: tl.tuple, true_rotation: tl.tuple, z: tl.tuple, K: tl.constexpr
) -> tl.tensor:
    """Compute the differences along axis K of frames, [frames, points]; rotations are row-major."""
    seen = rotation[K][:, None] * y[0] + rotation[3 + K][:, None] * y[1] + rotation[6 + K][:, None] * y[2]
    true = (
        true_rotation[K][:, None] * z[0] + true_rotation[3 + K][:, None] * z[1] + true_rotation[6 + K][:, None] * z[2]
    )
    return seen - true


@triton.jit
def _frames(frames: tl.tensor, f: tl.tensor, there: tl.tensor) -> tl.tuple:
    """Load the row-major rotation and the translation of frames, each element [frames]."""
    at = frames + f * 12
    r0, r1, r2, t0 = (
        _load_fp32(at, there),
        _load_fp32(at + 1, there),
        _load_fp32(at + 2, there),
        _load_fp32(at + 3, there),
    )
    r3, r4, r5, t1 = (
        _load_fp32(at + 4, there),
        _load_fp32(at + 5, there),
        _load_fp32(at + 6, there),
        _load_fp32(at + 7, there),
    )
    r6, r7, r8, t2 = (
        _load_fp32(at + 8, there),
        _load_fp32(at + 9, there),
        _load_fp32(at + 10, there),
        _load_fp32(at + 11, there),
    )
    return (r0, r1, r2, r3, r4, r5, r6, r7, r8), (t0, t1, t2)


@triton.jit
def _relative_to(points: tl.tensor, p: tl.tensor, there: tl.tensor, origin: tl.tuple) -> tl.tuple:
    """Subtract origins [frames] from points, without rotation: x, y and z, each [frames, points]."""
    at = points + p * 3
    x, y, z = _load_fp32(at, there), _load_fp32(at + 1, there), _load_fp32(at + 2, there)
    return x[None, :] - origin[0][:, None], y[None, :] - origin[1][:, None], z[None, :] - origin[2][:, None]


@triton.jit
def _weights(
    frame_mask: tl.tensor, point_mask: tl.tensor, pair_mask: tl.tensor, f: tl.tensor, p: tl.tensor, F: tl.tensor,
    P: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Load the weight of each pair, 0 out of range."""
    weight = _load_fp32(frame_mask + f, f < F)[:, None] * _load_fp32(point_mask + p, p < P)[None, :]
    if pair_mask is not None:
        at = pair_mask + (f.to(tl.int64) * P)[:, None] + p[None, :]
        weight = tl.where(tl.load(at, (f < F)[:, None] & (p < P)[None, :], 0) != 0, weight, 0.0)
    return weight


@triton.jit
def _softened_squares(a: tl.tensor, b: tl.tensor, c: tl.tensor, added: tl.tensor) -> tl.tensor:
    """Compute the squares of the softened lengths of vectors."""
    return a * a + b * b + c * c + added


@triton.jit
def aligned_errors_kernel(
    frames: tl.tensor, points: tl.tensor, true_frames: tl.tensor, true_points: tl.tensor, frame_mask: tl.tensor,
    point_mask: tl.tensor, pair_mask: tl.tensor, sums: tl.tensor, F: tl.tensor, P: tl.tensor, clamp: tl.tensor,
    added: tl.tensor, least: tl.tensor,
    BLOCK_F: tl.constexpr, BLOCK_P: tl.constexpr,
) -> None:  # fmt: skip
    """Store the two sums of a tile, sums [leading, tiles of frames, tiles of points, 2]."""
    leading = tl.program_id(2).to(tl.int64)
    f = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    rotation, t = _frames(frames + leading * F * 12, f, f < F)
    true_rotation, true_t = _frames(true_frames, f, f < F)
    y = _relative_to(points + leading * P * 3, p, p < P, t)
    z = _relative_to(true_points, p, p < P, true_t)
    a = _local_difference(rotation, y, true_rotation, z, 0)
    b = _local_difference(rotation, y, true_rotation, z, 1)
    c = _local_difference(rotation, y, true_rotation, z, 2)
    distance = tl.sqrt(tl.maximum(_softened_squares(a, b, c, added), least))
    weight = _weights(frame_mask, point_mask, pair_mask, f, p, F, P)
    tile = (leading * tl.num_programs(0) + tl.program_id(0)) * tl.num_programs(1) + tl.program_id(1)
    tl.store(sums + tile * 2, tl.sum(tl.minimum(distance, clamp) * weight))
    tl.store(sums + tile * 2 + 1, tl.sum(distance * weight))


@triton.jit
def _slope(squares: tl.tensor, weight: tl.tensor, grad: tl.tensor, clamp: tl.tensor, least: tl.tensor) -> tl.tensor:
    """Compute the factor of a pair's coordinates in its gradient; grad: the gradients of the two sums."""
    capped, whole = tl.load(grad).to(tl.float32), tl.load(grad + 1).to(tl.float32)
    distance = tl.sqrt(tl.maximum(squares, least))
    slope = weight * (tl.where(distance <= clamp, capped, 0.0) + whole) / distance
    # Compare squares, because the root of `least` may be rounded up.
    return tl.where(squares < least, 0.0, slope)


@triton.jit
def aligned_errors_frames_kernel(
    grad: tl.tensor, frames: tl.tensor, points: tl.tensor, true_frames: tl.tensor, true_points: tl.tensor,
    frame_mask: tl.tensor, point_mask: tl.tensor, pair_mask: tl.tensor, dframes: tl.tensor, F: tl.tensor, P: tl.tensor,
    clamp: tl.tensor, added: tl.tensor, least: tl.tensor,
    BLOCK_F: tl.constexpr, BLOCK_P: tl.constexpr,
) -> None:  # fmt: skip
    """Store the gradients of frames."""
    leading = tl.program_id(1).to(tl.int64)
    f = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    rotation, t = _frames(frames + leading * F * 12, f, f < F)
    true_rotation, true_t = _frames(true_frames, f, f < F)
    zero = tl.zeros([BLOCK_F], tl.float32)
    r0, r1, r2, r3, r4, r5, r6, r7, r8 = zero, zero, zero, zero, zero, zero, zero, zero, zero
    s0, s1, s2 = zero, zero, zero
    for start in range(0, P, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        y = _relative_to(points + leading * P * 3, p, p < P, t)
        z = _relative_to(true_points, p, p < P, true_t)
        a = _local_difference(rotation, y, true_rotation, z, 0)
        b = _local_difference(rotation, y, true_rotation, z, 1)
        c = _local_difference(rotation, y, true_rotation, z, 2)
        weight = _weights(frame_mask, point_mask, pair_mask, f, p, F, P)
        slope = _slope(_softened_squares(a, b, c, added), weight, grad + leading * 2, clamp, least)
        a, b, c = a * slope, b * slope, c * slope
        s0, s1, s2 = s0 + tl.sum(a, 1), s1 + tl.sum(b, 1), s2 + tl.sum(c, 1)
        r0, r1, r2 = r0 + tl.sum(a * y[0], 1), r1 + tl.sum(b * y[0], 1), r2 + tl.sum(c * y[0], 1)
        r3, r4, r5 = r3 + tl.sum(a * y[1], 1), r4 + tl.sum(b * y[1], 1), r5 + tl.sum(c * y[1], 1)
        r6, r7, r8 = r6 + tl.sum(a * y[2], 1), r7 + tl.sum(b * y[2], 1), r8 + tl.sum(c * y[2], 1)
    at = dframes + leading * F * 12 + f * 12
    tl.store(at, r0, f < F)
    tl.store(at + 1, r1, f < F)
    tl.store(at + 2, r2, f < F)
    tl.store(at + 3, -(rotation[0] * s0 + rotation[1] * s1 + rotation[2] * s2), f < F)
    tl.store(at + 4, r3, f < F)
    tl.store(at + 5, r4, f < F)
    tl.store(at + 6, r5, f < F)
    tl.store(at + 7, -(rotation[3] * s0 + rotation[4] * s1 + rotation[5] * s2), f < F)
    tl.store(at + 8, r6, f < F)
    tl.store(at + 9, r7, f < F)
    tl.store(at + 10, r8, f < F)
    tl.store(at + 11, -(rotation[6] * s0 + rotation[7] * s1 + rotation[8] * s2), f < F)


@triton.jit
def aligned_errors_points_kernel(
    grad: tl.tensor, frames: tl.tensor, points: tl.tensor, true_frames: tl.tensor, true_points: tl.tensor,
    frame_mask: tl.tensor, point_mask: tl.tensor, pair_mask: tl.tensor, dpoints: tl.tensor, F: tl.tensor, P: tl.tensor,
    clamp: tl.tensor, added: tl.tensor, least: tl.tensor,
    BLOCK_F: tl.constexpr, BLOCK_P: tl.constexpr,
) -> None:  # fmt: skip
    """Store the gradients of points."""
    leading = tl.program_id(1).to(tl.int64)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    zero = tl.zeros([BLOCK_P], tl.float32)
    d0, d1, d2 = zero, zero, zero
    for start in range(0, F, BLOCK_F):
        f = start + tl.arange(0, BLOCK_F)
        r, t = _frames(frames + leading * F * 12, f, f < F)
        true_rotation, true_t = _frames(true_frames, f, f < F)
        y = _relative_to(points + leading * P * 3, p, p < P, t)
        z = _relative_to(true_points, p, p < P, true_t)
        a = _local_difference(r, y, true_rotation, z, 0)
        b = _local_difference(r, y, true_rotation, z, 1)
        c = _local_difference(r, y, true_rotation, z, 2)
        weight = _weights(frame_mask, point_mask, pair_mask, f, p, F, P)
        slope = _slope(_softened_squares(a, b, c, added), weight, grad + leading * 2, clamp, least)
        a, b, c = a * slope, b * slope, c * slope
        d0 += tl.sum(r[0][:, None] * a + r[1][:, None] * b + r[2][:, None] * c, 0)
        d1 += tl.sum(r[3][:, None] * a + r[4][:, None] * b + r[5][:, None] * c, 0)
        d2 += tl.sum(r[6][:, None] * a + r[7][:, None] * b + r[8][:, None] * c, 0)
    at = dpoints + leading * P * 3 + p * 3
    tl.store(at, d0, p < P)
    tl.store(at + 1, d1, p < P)
    tl.store(at + 2, d2, p < P)


_TILES = configs("BLOCK_F BLOCK_P", (16, 32, 4, 1), (8, 64, 4, 1), (8, 32, 2, 1), (4, 128, 4, 1), (16, 64, 8, 1))
ALIGNED = register("aligned_errors", aligned_errors_kernel, _TILES)
FRAMES = register("aligned_errors_frames", aligned_errors_frames_kernel, _TILES)
POINTS = register("aligned_errors_points", aligned_errors_points_kernel, _TILES)


def aligned_errors(t: Operands) -> Tensor:
    """Compute warpfold::aligned_errors."""
    frames = t.frames
    operands = _operands(t)
    f, p, leading = operands["F"], operands["P"], frames.shape[:-3].numel()
    kernel = ALIGNED.tiled((f, p), frames)
    tiles = cdiv(f, kernel["BLOCK_F"]), cdiv(p, kernel["BLOCK_P"])
    sums = frames.new_empty(leading, tiles[0] * tiles[1], 2, dtype=torch.float32)
    kernel.run((*tiles, leading), sums=sums, **operands)
    return sums.sum(1).to(frames.dtype).view(*frames.shape[:-3], 2)


def aligned_errors_backward(t: Operands) -> tuple[Tensor, Tensor]:
    """Compute warpfold::aligned_errors_backward."""
    frames = t.frames
    operands = _operands(t)
    operands["grad"] = t.grad.contiguous()
    f, p, leading = operands["F"], operands["P"], frames.shape[:-3].numel()
    dframes, dpoints = frames.new_empty(frames.shape), t.points.new_empty(t.points.shape)
    kernel = FRAMES.tiled((f, p), frames)
    kernel.run((cdiv(f, kernel["BLOCK_F"]), leading), dframes=dframes, **operands)
    kernel = POINTS.tiled((f, p), frames)
    kernel.run((cdiv(p, kernel["BLOCK_P"]), leading), dpoints=dpoints, **operands)
    return dframes, dpoints


def _operands(t: Operands) -> dict[str, Any]:
    """Return the arguments that all kernels of aligned_errors share."""
    names = "frames", "points", "true_frames", "true_points", "frame_mask", "point_mask", "pair_mask"
    sizes = {"F": t.frames.shape[-3], "P": t.points.shape[-2]}
    numbers = {"clamp": t.clamp, "added": t.softening**2, "least": LEAST**2}
    return {**{name: contiguous(getattr(t, name)) for name in names}, **sizes, **numbers}


C_SLOT, N_SLOT, SG_SLOT = tl.constexpr(C_ATOM), tl.constexpr(N_ATOM), tl.constexpr(SG_ATOM)


@triton.jit
def _atoms(atoms: tl.tensor, radius: tl.tensor, exists: tl.tensor, a: tl.tensor, n: tl.tensor) -> tl.tuple:
    """Load x, y, z, radius and existence of atoms in fp32."""
    at, there = atoms + a * 3, a < n
    x, y, z = _load_fp32(at, there), _load_fp32(at + 1, there), _load_fp32(at + 2, there)
    return x, y, z, _load_fp32(radius + a, there), _load_fp32(exists + a, there)


@triton.jit
def _load_ids(
    index: tl.tensor, after: tl.tensor, order: tl.tensor, chain: tl.tensor, slot: tl.tensor, a: tl.tensor, n: tl.tensor,
) -> tl.tuple:  # fmt: skip
    """Load index, next index, order, chain and slot of atoms (ops/pairs.py).

    The next index is loaded, since a sum of numbers from memory could overflow (tests/ops/triton/test_offsets.py).
    """
    there = a < n
    i, o = tl.load(index + a, mask=there, other=0), tl.load(order + a, mask=there, other=0)
    c, s = tl.load(chain + a, mask=there, other=0), tl.load(slot + a, mask=there, other=0)
    return i, tl.load(after + a, mask=there, other=0), o, c, s


@triton.jit
def _pairs(atoms: tl.tuple, others: tl.tuple, ids: tl.tuple, other_ids: tl.tuple, tolerance: tl.tensor) -> tl.tuple:
    """Compute the overlap and distance of pairs [a, b], and 1 for pairs that are compared.

    Atoms of equal order are not compared.  Every pair occurs twice, so the residue of C may be the first or the second.
    """
    x, y, z, radius, exists = atoms
    other_x, other_y, other_z, other_radius, other_exists = others
    index, next_index, order, chain, slot = ids
    other_index, other_next_index, other_order, other_chain, other_slot = other_ids
    dx, dy, dz = x[:, None] - other_x[None, :], y[:, None] - other_y[None, :], z[:, None] - other_z[None, :]
    distance = tl.sqrt(dx * dx + dy * dy + dz * dz)
    overlap = radius[:, None] + other_radius[None, :] - tolerance - distance
    i, j, s, t = index[:, None], other_index[None, :], slot[:, None], other_slot[None, :]
    ordered = order[:, None] < other_order[None, :]
    c_before_n = (s == C_SLOT) & (t == N_SLOT) & (next_index[:, None] == j) & ordered
    n_after_c = (s == N_SLOT) & (t == C_SLOT) & (i == other_next_index[None, :]) & (ordered == 0)
    bonded = (c_before_n | n_after_c) & (chain[:, None] == other_chain[None, :])
    exempt = bonded | ((s == SG_SLOT) & (t == SG_SLOT)) | (order[:, None] == other_order[None, :])
    return overlap, distance, tl.where(exempt, 0.0, exists[:, None] * other_exists[None, :])


@triton.jit
def overlaps_kernel(
    atoms: tl.tensor, radius: tl.tensor, exists: tl.tensor, index: tl.tensor, after: tl.tensor, order: tl.tensor,
    chain: tl.tensor, slot: tl.tensor, out: tl.tensor, n: tl.tensor, tolerance: tl.tensor,
    BLOCK_F: tl.constexpr, BLOCK_P: tl.constexpr,
) -> None:  # fmt: skip
    """Store the sum and number of overlaps of BLOCK_F atoms, and the number of compared atoms."""
    a = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    own, ids = _atoms(atoms, radius, exists, a, n), _load_ids(index, after, order, chain, slot, a, n)
    errors, count = tl.zeros([BLOCK_F], tl.float32), tl.zeros([BLOCK_F], tl.float32)
    pairs = tl.zeros([BLOCK_F], tl.float32)
    for start in range(0, n, BLOCK_P):
        b = start + tl.arange(0, BLOCK_P)
        others, other_ids = _atoms(atoms, radius, exists, b, n), _load_ids(index, after, order, chain, slot, b, n)
        overlap, _, compared = _pairs(own, others, ids, other_ids, tolerance)
        errors += tl.sum(tl.maximum(overlap, 0.0) * compared, 1)
        count += tl.sum(tl.where(overlap > 0, compared, 0.0), 1)
        pairs += tl.sum(compared, 1)
    tl.store(out + a, errors, mask=a < n)
    tl.store(out + n + a, count, mask=a < n)
    tl.store(out + 2 * n + a, pairs, mask=a < n)


@triton.jit
def overlaps_backward_kernel(
    grad: tl.tensor, atoms: tl.tensor, radius: tl.tensor, exists: tl.tensor, index: tl.tensor, after: tl.tensor,
    order: tl.tensor, chain: tl.tensor, slot: tl.tensor, datoms: tl.tensor, dradius: tl.tensor, n: tl.tensor,
    tolerance: tl.tensor,
    BLOCK_F: tl.constexpr, BLOCK_P: tl.constexpr,
) -> None:  # fmt: skip
    """Store the gradients of BLOCK_F atoms and their radii."""
    a = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    own, ids = _atoms(atoms, radius, exists, a, n), _load_ids(index, after, order, chain, slot, a, n)
    own_grad = _load_fp32(grad + a, a < n)
    zero = tl.zeros([BLOCK_F], tl.float32)
    x, y, z, r = zero, zero, zero, zero
    for start in range(0, n, BLOCK_P):
        b = start + tl.arange(0, BLOCK_P)
        others, other_ids = _atoms(atoms, radius, exists, b, n), _load_ids(index, after, order, chain, slot, b, n)
        overlap, distance, compared = _pairs(own, others, ids, other_ids, tolerance)
        other_grad = _load_fp32(grad + b, b < n)
        slope = tl.where(overlap > 0, compared, 0.0) * (own_grad[:, None] + other_grad[None, :])
        r += tl.sum(slope, 1)
        slope = tl.where(distance > 0, slope / tl.maximum(distance, 1e-30), 0.0)
        x -= tl.sum(slope * (own[0][:, None] - others[0][None, :]), 1)
        y -= tl.sum(slope * (own[1][:, None] - others[1][None, :]), 1)
        z -= tl.sum(slope * (own[2][:, None] - others[2][None, :]), 1)
    tl.store(datoms + a * 3, x, mask=a < n)
    tl.store(datoms + a * 3 + 1, y, mask=a < n)
    tl.store(datoms + a * 3 + 2, z, mask=a < n)
    tl.store(dradius + a, r, mask=a < n)


_OVERLAPS = configs("BLOCK_F BLOCK_P", (16, 32, 4, 1), (8, 64, 4, 1), (16, 64, 4, 1), (8, 32, 2, 1), (32, 32, 4, 1))
OVERLAPS = register("overlaps", overlaps_kernel, _OVERLAPS)
OVERLAPS_BACKWARD = register("overlaps_backward", overlaps_backward_kernel, _OVERLAPS)


def overlaps(t: Operands) -> Tensor:
    """Compute warpfold::overlaps."""
    atoms = t.atoms
    out, n = atoms.new_empty(3, len(atoms)), len(atoms)
    kernel = OVERLAPS.tiled((n,), atoms)
    operands = _atoms_of(t)
    kernel.run((cdiv(n, kernel["BLOCK_F"]),), **operands, out=out, n=n, tolerance=t.tolerance)
    return out


def overlaps_backward(t: Operands) -> tuple[Tensor, Tensor]:
    """Compute warpfold::overlaps_backward."""
    atoms = t.atoms
    datoms, dradius, n = atoms.new_empty(atoms.shape), t.radius.new_empty(t.radius.shape), len(atoms)
    kernel = OVERLAPS_BACKWARD.tiled((n,), atoms)
    operands = _atoms_of(t)
    kernel.run(
        (cdiv(n, kernel["BLOCK_F"]),),
        grad=t.grad[0].contiguous(),
        **operands,
        datoms=datoms,
        dradius=dradius,
        n=n,
        tolerance=t.tolerance,
    )
    return datoms, dradius


def _atoms_of(t: Operands) -> dict[str, Tensor]:
    """Return the tensors that both kernels of overlaps take, by name."""
    names = "atoms", "radius", "exists", "index", "order", "chain", "slot"
    return {name: getattr(t, name).contiguous() for name in names} | {"after": t.index.contiguous() + 1}
