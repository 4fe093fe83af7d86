"""overlaps on a CPU: some atoms at a time with all others, so that their distances stay in cache."""

from collections.abc import Iterator

import torch
from torch import Tensor

from warpfold.ops.dispatch import alike
from warpfold.ops.overlaps import C_ATOM, N_ATOM, SG_ATOM
from warpfold.ops.tensors import accumulation_dtype

PAIRS = 2**16  # at a time


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
    dtype, acc = atoms.dtype, accumulation_dtype(atoms)
    atoms, radius, exists = (x.to(acc) for x in (atoms, radius, exists))
    found = atoms.new_empty(3, len(atoms))
    for rows in alike(_blocks(len(atoms))):
        compared = _compared(exists, index, order, chain, slot, rows)
        overlap = _overlap(atoms, radius, tolerance, rows)[0]
        found[0, rows] = (overlap.relu() * compared).sum(1)
        found[1, rows] = ((overlap > 0) * compared).sum(1)
        found[2, rows] = compared.sum(1)
    return found.to(dtype)


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
    dtype, acc = atoms.dtype, accumulation_dtype(atoms)
    grad, atoms, radius, exists = (x.to(acc) for x in (grad, atoms, radius, exists))
    datoms, dradius = atoms.new_empty(atoms.shape), radius.new_empty(radius.shape)
    for rows in alike(_blocks(len(atoms))):
        overlap, distance = _overlap(atoms, radius, tolerance, rows)
        slope = _compared(exists, index, order, chain, slot, rows) * (overlap > 0)
        slope *= grad[0, rows, None] + grad[0]
        dradius[rows] = slope.sum(1)
        slope = (slope / distance).masked_fill_(distance == 0, 0)
        away = atoms[rows, None] - atoms  # not as a product: near atoms would cancel
        datoms[rows] = -(slope[..., None] * away).sum(1)
    return datoms.to(dtype), dradius.to(dtype)


def _blocks(atoms: int) -> Iterator[slice]:
    """Return the atoms of each block."""
    size = max(PAIRS // atoms, 1)
    return (slice(start, start + size) for start in range(0, atoms, size))


def _overlap(atoms: Tensor, radius: Tensor, tolerance: float, rows: slice) -> tuple[Tensor, Tensor]:
    """Return how far some atoms reach into all, and how far they are from them."""
    distance = torch.cdist(atoms[rows], atoms, compute_mode="donot_use_mm_for_euclid_dist")
    return radius[rows, None] + radius - tolerance - distance, distance


def _compared(exists: Tensor, index: Tensor, order: Tensor, chain: Tensor, slot: Tensor, rows: slice) -> Tensor:
    """Return 1 where some atoms are compared with all, in either order."""
    own, own_slot, before = index[rows, None], slot[rows, None], order[rows, None] < order
    forward = (own_slot == C_ATOM) & (slot == N_ATOM) & (own + 1 == index) & before
    backward = (own_slot == N_ATOM) & (slot == C_ATOM) & (own == index + 1) & ~before
    bonded = (forward | backward) & (chain[rows, None] == chain)
    exempt = bonded | (own_slot == SG_ATOM) & (slot == SG_ATOM) | (order[rows, None] == order)
    return (exists[rows, None] * exists).masked_fill_(exempt, 0)
