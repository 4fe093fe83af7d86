"""How a layer's work is executed: schedules on the axial contract (warpfold/model/axial.py).

A schedule is a function (layer, x, mask, source) -> x that equals `whole` in exact arithmetic; the two laws of the
contract are why.  It is put on a layer from outside, `layer.schedule = chunked(64)`, and the layer never knows.
"""

import torch
from torch import Tensor

from warpfold.model.axial import ROWS, AxialUpdate, Schedule, Tensors, whole
from warpfold.ops.noise import Factors

__all__ = ["chunked", "in_place", "whole"]


def chunked(size: int) -> Schedule:
    """One slice of `size` rows (or columns) after another: the intermediates are a slice's, x is copied once."""
    return _in_slices(size, in_place=False)


def in_place(size: int) -> Schedule:
    """Slices of `size`, each written over its part of x: no second x exists.  For inference: x itself is changed.

    Right because a slice reads only itself and what is already whole.  Errors: RuntimeError where gradients are on.
    """
    return _in_slices(size, in_place=True)


def _in_slices(size: int, in_place: bool) -> Schedule:
    if size < 1:
        raise ValueError(f"a chunk of {size} rows: at least 1 is needed")

    def schedule(layer: AxialUpdate, x: Tensor, mask: Tensor, source: Tensor | None = None) -> Tensor:
        axis = ROWS if layer.axis is None else layer.axis
        reads = axis if layer.reads is None else layer.reads
        shared = shared_in_slices(layer, x, mask, source, size)
        factors = layer.dropout_factors(x.shape, x)
        return joined_updates(layer, x, layer.operand(x, source), mask, shared, factors, (axis, reads), size, in_place)

    return schedule


def shared_in_slices(layer: AxialUpdate, x: Tensor, mask: Tensor, source: Tensor | None, size: int) -> Tensors:
    """`layer.shared`, made slice by slice and joined (the first law), so that no whole normalised operand exists."""
    operand = layer.operand(x, source)
    axis = layer.gathers
    if axis is None:
        return ()
    if layer.shares_source:
        assert source is not None
        # The operand and its mask are not read; the source alone is cut.
        parts = [layer.shared(layer.normed(operand), mask, piece) for piece in source.split(size, axis)]
    else:
        cuts = zip(operand.split(size, axis), mask.split(size, axis + 1))
        parts = [layer.shared(layer.normed(piece), piece_mask, source) for piece, piece_mask in cuts]
    assert layer.joins is not None
    return tuple(torch.cat(tensors, layer.joins) for tensors in zip(*parts))


def joined_updates(
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
    """x with the layer's update, slice by slice of `size` along axes[0] of x, which is axes[1] of the operand.

    factors: of dropout, as long as x along that axis, or 1.  in_place: write over x, else into a new tensor.
    Errors: RuntimeError for `in_place` where gradients are on.
    """
    if in_place and torch.is_grad_enabled():
        raise RuntimeError("the in_place schedule cannot be differentiated: use torch.no_grad(), or `chunked`")
    axis, reads = axes
    parts = []
    for start in range(0, max(x.shape[axis], 1), size):  # once where a rank has no row: it takes part in the gradient
        length = min(size, x.shape[axis] - start)
        n = layer.normed(operand.narrow(reads, start, length))
        n_mask = mask.narrow(reads + 1, start, length)
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
