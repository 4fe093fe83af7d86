"""Layers in slices: one part of x after another, so that the intermediates are only ever a slice's.

Right because of the two laws of the contract (warpfold/model/axial.py).
"""

import torch
from torch import Tensor

from warpfold.model.axial import ROWS, AxialUpdate
from warpfold.model.execution import Tensors
from warpfold.ops.noise import Factors


def layer_in_slices(
    layer: AxialUpdate, x: Tensor, mask: Tensor, other: Tensor | None, size: int, in_place: bool
) -> Tensor:
    """Return x with the layer's update, made in slices of `size` rows (or columns).

    in_place: write each slice over its part of x, so that no second x exists; right because a slice reads only itself
    and what is already whole.  Errors: RuntimeError for `in_place` where gradients are on.
    """
    operand = layer.operand(x, other)
    shared = shared_in_slices(layer, operand, mask, other, size)
    factors = layer.dropout_factors(x.shape, x)
    return add_in_slices(layer, x, operand, mask, shared, factors, cut_axes(layer, ROWS), size, in_place)


def cut_axes(layer: AxialUpdate, anywhere: int) -> tuple[int, int]:
    """Return the axes along which x and the operand are cut; `anywhere`: for a layer that may be cut along any."""
    axis = anywhere if layer.axis is None else layer.axis
    return axis, axis if layer.operand_axis is None else layer.operand_axis


def shared_in_slices(layer: AxialUpdate, operand: Tensor, mask: Tensor, other: Tensor | None, size: int) -> Tensors:
    """Return `layer.shared`, made slice by slice and joined, so that no whole normalised operand exists."""
    if layer.shared_axis is None or layer.join_axis is None:
        return ()
    if layer.shared_from_other:
        assert other is not None
        parts = [layer.shared_of(piece) for piece in other.split(size, layer.shared_axis)]
    else:
        cuts = zip(operand.split(size, layer.shared_axis), mask.split(size, layer.shared_axis + 1))
        parts = [layer.shared(layer.deferred_norm(piece), piece_mask) for piece, piece_mask in cuts]
    return tuple(torch.cat(tensors, layer.join_axis) for tensors in zip(*parts))


def add_in_slices(
    layer: AxialUpdate,
    x: Tensor,
    operand: Tensor,
    mask: Tensor,
    shared: Tensors,
    factors: Factors | None,
    axes: tuple[int, int],
    size: int,
    in_place: bool,
) -> Tensor:
    """Return x with the layer's update, slice by slice of `size` along axes[0] of x, which is axes[1] of the operand.

    factors: of dropout, as long as x along that axis, or 1.  in_place: write over x, else into a new tensor.
    Errors: RuntimeError for `in_place` where gradients are on.
    """
    if in_place and torch.is_grad_enabled():
        raise RuntimeError("a plan with in_place cannot be differentiated: use torch.no_grad(), or chunk alone")
    axis, operand_axis = axes
    parts = []
    for start in range(0, max(x.shape[axis], 1), size):  # once where a rank has no row: it takes part in the gradient
        length = min(size, x.shape[axis] - start)
        n = layer.deferred_norm(operand.narrow(operand_axis, start, length))
        n_mask = mask.narrow(operand_axis + 1, start, length)
        part = x.narrow(axis, start, length)
        part_factors = factors
        if factors is not None and factors.shape[axis] != 1:
            part_factors = factors.narrow(axis, start, length)
        new = layer.add(part, layer.local(n, n_mask), shared, n_mask, part_factors)
        if in_place:
            part.copy_(new)
        else:
            parts.append(new)
    return x if in_place else torch.cat(parts, axis)
