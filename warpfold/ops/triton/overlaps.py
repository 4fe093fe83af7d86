"""overlaps on a GPU: a program owns some atoms and runs over all, forward and backward; no pair is ever written."""

import triton
import triton.language as tl
from torch import Tensor

from warpfold.ops.overlaps import C_ATOM, N_ATOM, SG_ATOM
from warpfold.ops.triton.launch import configs, register

C_PLACE, N_PLACE, SG_PLACE = tl.constexpr(C_ATOM), tl.constexpr(N_ATOM), tl.constexpr(SG_ATOM)


@triton.jit
def _atoms(atoms: tl.tensor, radius: tl.tensor, exists: tl.tensor, a: tl.tensor, n: tl.tensor) -> tl.tuple:
    """Return coordinates and radii of atoms, and whether they are there, in fp32."""
    at, there = atoms + a * 3, a < n
    x = tl.load(at, mask=there, other=0).to(tl.float32)
    y = tl.load(at + 1, mask=there, other=0).to(tl.float32)
    z = tl.load(at + 2, mask=there, other=0).to(tl.float32)
    r = tl.load(radius + a, mask=there, other=0).to(tl.float32)
    return x, y, z, r, tl.load(exists + a, mask=there, other=0).to(tl.float32)


@triton.jit
def _numbers(
    index: tl.tensor,
    after: tl.tensor,
    order: tl.tensor,
    chain: tl.tensor,
    slot: tl.tensor,
    a: tl.tensor,
    n: tl.tensor,
) -> tl.tuple:
    """Return index, order, chain and slot of atoms, and the index that follows."""
    there = a < n
    i, o = tl.load(index + a, mask=there, other=0), tl.load(order + a, mask=there, other=0)
    c, s = tl.load(chain + a, mask=there, other=0), tl.load(slot + a, mask=there, other=0)
    return i, o, c, s, tl.load(after + a, mask=there, other=0)


@triton.jit
def _pairs(one: tl.tuple, other: tl.tuple, ids: tl.tuple, other_ids: tl.tuple, tolerance: tl.tensor) -> tl.tuple:
    """Return of pairs [a, b] the overlap, the distance, and 1 where they are compared."""
    dx = one[0][:, None] - other[0][None, :]
    dy = one[1][:, None] - other[1][None, :]
    dz = one[2][:, None] - other[2][None, :]
    distance = tl.sqrt(dx * dx + dy * dy + dz * dz)
    overlap = one[3][:, None] + other[3][None, :] - tolerance - distance
    i, j, s, t = ids[0][:, None], other_ids[0][None, :], ids[3][:, None], other_ids[3][None, :]
    before = ids[1][:, None] < other_ids[1][None, :]
    forward = (s == C_PLACE) & (t == N_PLACE) & (ids[4][:, None] == j) & before
    backward = (s == N_PLACE) & (t == C_PLACE) & (i == other_ids[4][None, :]) & (before == 0)
    bonded = (forward | backward) & (ids[2][:, None] == other_ids[2][None, :])
    exempt = bonded | ((s == SG_PLACE) & (t == SG_PLACE)) | (ids[1][:, None] == other_ids[1][None, :])
    return overlap, distance, tl.where(exempt, 0.0, one[4][:, None] * other[4][None, :])


@triton.jit
def overlaps_kernel(
    atoms: tl.tensor,
    radius: tl.tensor,
    exists: tl.tensor,
    index: tl.tensor,
    after: tl.tensor,
    order: tl.tensor,
    chain: tl.tensor,
    slot: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    tolerance: tl.tensor,
    BLOCK_F: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> None:
    """Store the overlaps of BLOCK_F atoms, how many, and with how many they were compared."""
    a = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    one, ids = _atoms(atoms, radius, exists, a, n), _numbers(index, after, order, chain, slot, a, n)
    errors, count = tl.zeros([BLOCK_F], tl.float32), tl.zeros([BLOCK_F], tl.float32)
    pairs = tl.zeros([BLOCK_F], tl.float32)
    for start in range(0, n, BLOCK_P):
        b = start + tl.arange(0, BLOCK_P)
        other, other_ids = _atoms(atoms, radius, exists, b, n), _numbers(index, after, order, chain, slot, b, n)
        overlap, _, compared = _pairs(one, other, ids, other_ids, tolerance)
        errors += tl.sum(tl.maximum(overlap, 0.0) * compared, 1)
        count += tl.sum(tl.where(overlap > 0, compared, 0.0), 1)
        pairs += tl.sum(compared, 1)
    tl.store(out + a, errors, mask=a < n)
    tl.store(out + n + a, count, mask=a < n)
    tl.store(out + 2 * n + a, pairs, mask=a < n)


@triton.jit
def overlaps_backward_kernel(
    grad: tl.tensor,
    atoms: tl.tensor,
    radius: tl.tensor,
    exists: tl.tensor,
    index: tl.tensor,
    after: tl.tensor,
    order: tl.tensor,
    chain: tl.tensor,
    slot: tl.tensor,
    datoms: tl.tensor,
    dradius: tl.tensor,
    n: tl.tensor,
    tolerance: tl.tensor,
    BLOCK_F: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> None:
    """Store the gradients of BLOCK_F atoms and their radii."""
    a = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    one, ids = _atoms(atoms, radius, exists, a, n), _numbers(index, after, order, chain, slot, a, n)
    own = tl.load(grad + a, mask=a < n, other=0).to(tl.float32)
    zero = tl.zeros([BLOCK_F], tl.float32)
    x, y, z, r = zero, zero, zero, zero
    for start in range(0, n, BLOCK_P):
        b = start + tl.arange(0, BLOCK_P)
        other, other_ids = _atoms(atoms, radius, exists, b, n), _numbers(index, after, order, chain, slot, b, n)
        overlap, distance, compared = _pairs(one, other, ids, other_ids, tolerance)
        theirs = tl.load(grad + b, mask=b < n, other=0).to(tl.float32)
        slope = tl.where(overlap > 0, compared, 0.0) * (own[:, None] + theirs[None, :])
        r += tl.sum(slope, 1)
        slope = tl.where(distance > 0, slope / tl.maximum(distance, 1e-30), 0.0)
        x -= tl.sum(slope * (one[0][:, None] - other[0][None, :]), 1)
        y -= tl.sum(slope * (one[1][:, None] - other[1][None, :]), 1)
        z -= tl.sum(slope * (one[2][:, None] - other[2][None, :]), 1)
    tl.store(datoms + a * 3, x, mask=a < n)
    tl.store(datoms + a * 3 + 1, y, mask=a < n)
    tl.store(datoms + a * 3 + 2, z, mask=a < n)
    tl.store(dradius + a, r, mask=a < n)


_CANDIDATES = configs("BLOCK_F BLOCK_P", (16, 32, 4, 1), (8, 64, 4, 1), (16, 64, 4, 1), (8, 32, 2, 1), (32, 32, 4, 1))
FORWARD = register("overlaps", overlaps_kernel, _CANDIDATES)
BACKWARD = register("overlaps_backward", overlaps_backward_kernel, _CANDIDATES)


def overlaps(
    atoms: Tensor,
    radius: Tensor,
    exists: Tensor,
    index: Tensor,
    order: Tensor,
    chain: Tensor,
    slot: Tensor,
    tolerance: float,
) -> Tensor:
    """Compute warpfold::overlaps."""
    out, n = atoms.new_empty(3, len(atoms)), len(atoms)
    kernel = FORWARD.tiled((n,), atoms)
    operands = _contiguous(atoms, radius, exists, index, order, chain, slot)
    kernel.run((triton.cdiv(n, kernel["BLOCK_F"]),), **operands, out=out, n=n, tolerance=tolerance)
    return out


def overlaps_backward(
    grad: Tensor,
    atoms: Tensor,
    radius: Tensor,
    exists: Tensor,
    index: Tensor,
    order: Tensor,
    chain: Tensor,
    slot: Tensor,
    tolerance: float,
) -> tuple[Tensor, Tensor]:
    """Compute warpfold::overlaps_backward."""
    datoms, dradius, n = atoms.new_empty(atoms.shape), radius.new_empty(radius.shape), len(atoms)
    kernel = BACKWARD.tiled((n,), atoms)
    operands = _contiguous(atoms, radius, exists, index, order, chain, slot)
    kernel.run(
        (triton.cdiv(n, kernel["BLOCK_F"]),),
        grad=grad[0].contiguous(),
        **operands,
        datoms=datoms,
        dradius=dradius,
        n=n,
        tolerance=tolerance,
    )
    return datoms, dradius


def _contiguous(*tensors: Tensor) -> dict[str, Tensor]:
    """Return the tensors that both kernels are given, by their names."""
    names = "atoms", "radius", "exists", "index", "order", "chain", "slot"
    found = dict(zip(names, (t.contiguous() for t in tensors)))
    return found | {"after": found["index"] + 1}
