"""How a layer's work is executed: schedules on the axial contract (warpfold/model/axial.py).

A schedule is a function (layer, x, mask, source) -> x that equals `whole` in exact arithmetic; the two laws of the
contract are why.  It is put on a layer from outside, `layer.schedule = chunked(64)`, and the layer never knows.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from warpfold.model.axial import ROWS, AxialUpdate, Schedule, Tensors, whole

__all__ = ["chunked", "in_place", "whole"]


def chunked(size: int) -> Schedule:
    """One slice of `size` rows (or columns) after another: the intermediates are a slice's, x is copied once."""
    if size < 1:
        raise ValueError(f"a chunk of {size} rows: at least 1 is needed")

    def schedule(layer: AxialUpdate, x: Tensor, mask: Tensor, source: Tensor | None = None) -> Tensor:
        parts = [x_slice + dx for x_slice, dx in _slices(layer, x, mask, source, size)]
        return torch.cat(parts, _axis(layer))

    return schedule


def in_place(size: int) -> Schedule:
    """Slices of `size`, each written over its part of x: no second x exists.  For inference: x itself is changed.

    Right because a slice reads only itself and what is already whole.  Errors: RuntimeError where gradients are on.
    """
    if size < 1:
        raise ValueError(f"a chunk of {size} rows: at least 1 is needed")

    def schedule(layer: AxialUpdate, x: Tensor, mask: Tensor, source: Tensor | None = None) -> Tensor:
        if torch.is_grad_enabled():
            raise RuntimeError("the in_place schedule cannot be differentiated: use torch.no_grad(), or `chunked`")
        for x_slice, dx in _slices(layer, x, mask, source, size):
            x_slice += dx
        return x

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
        parts = [layer.shared(operand, mask, piece) for piece in source.split(size, axis)]
    else:
        cuts = zip(operand.split(size, axis), mask.split(size, axis + 1))
        parts = [layer.shared(layer.norm(piece), piece_mask, source) for piece, piece_mask in cuts]
    assert layer.joins is not None
    return tuple(torch.cat(tensors, layer.joins) for tensors in zip(*parts))


def _axis(layer: AxialUpdate) -> int:
    return ROWS if layer.axis is None else layer.axis


def _slices(
    layer: AxialUpdate, x: Tensor, mask: Tensor, source: Tensor | None, size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Every slice of x (a view) with its update, dropout included."""
    axis = _axis(layer)
    reads = axis if layer.reads is None else layer.reads
    shared = shared_in_slices(layer, x, mask, source, size)
    factors = layer.dropout_factors(x)
    operand = layer.operand(x, source)
    for start in range(0, x.shape[axis], size):
        length = min(size, x.shape[axis] - start)
        n = layer.norm(operand.narrow(reads, start, length))
        n_mask = mask.narrow(reads + 1, start, length)
        dx = layer.update(layer.local(n, n_mask), shared, n_mask)
        if factors is not None:
            spread = factors.shape[axis] == 1
            dx = dx * (factors if spread else factors.narrow(axis, start, length))
        yield x.narrow(axis, start, length), dx
