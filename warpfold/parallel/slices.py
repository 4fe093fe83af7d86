"""Layers in slices: one part of x after another, so that the intermediates are only ever a slice's.

Right because of the two laws of the contract (warpfold/model/axial.py).  x and what a layer reads may lie in host
memory (warpfold/host.py): slices are then fetched, and stored where they are written in place.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from warpfold.host import fetch_each, store
from warpfold.model.axial import ROWS, AxialUpdate, Block
from warpfold.model.execution import Tensors
from warpfold.model.layers import DeferredLayerNorm
from warpfold.ops.dispatch import alike, enough, watched
from warpfold.ops.noise import Factors


def layer_in_slices(
    layer: AxialUpdate, x: Tensor, mask: Tensor, other: Tensor | None, most: int, in_place: bool
) -> Tensor:
    """Return x with the layer's update, made in slices of rows (or columns) that hold `most` numbers each.

    in_place: write each slice over its part of x, so that no second x exists; right because a slice reads only itself
    and what is already whole.  Errors: RuntimeError for `in_place` where gradients are on.
    """
    operand = layer.operand(x, other)
    shared = shared_in_slices(layer, operand, mask, other, most)
    factors = layer.dropout_factors(x.shape, x)
    return add_in_slices(layer, x, operand, mask, shared, factors, cut_axes(layer, ROWS), most, in_place)


def pair_channels(model: nn.Module) -> int:
    """Return how many channels the z of a model has: the most of any layer that updates a z; 0: there is none."""
    steps = (step for block in model.modules() if isinstance(block, Block) for step in block.steps if step.state == "z")
    layers = (step.layer for step in steps if isinstance(step.layer, AxialUpdate) and not step.layer.operand_is_other)
    return max((layer.norm.normalized_shape[0] for layer in layers), default=0)


def slice_numbers(chunk: int, residues: int, channels: int) -> int:
    """Return how many numbers a slice holds: as many as `chunk` rows of z, of so many residues and channels.

    So a slice of m, of the extra MSA or of templates is as large as one of z, and has as many rows or columns as that.
    """
    return chunk * residues * channels


def slices(x: Tensor, axis: int, most: int) -> list[slice]:
    """Return slices of x along an axis that hold `most` numbers each, or are one row (or column); at least one."""
    count = x.shape[axis]
    size = max(1, most // max(1, x.numel() // max(1, count)))
    return slices_of(count, size)


def slices_of(count: int, size: int) -> list[slice]:
    """Return slices of so many rows, of `size` each; at least one, even of none."""
    return [slice(start, min(start + size, count)) for start in range(0, max(count, 1), size)]


def cut_axes(layer: AxialUpdate, anywhere: int) -> tuple[int, int]:
    """Return the axes along which x and the operand are cut; `anywhere`: for a layer that may be cut along any."""
    axis = anywhere if layer.axis is None else layer.axis
    return axis, axis if layer.operand_axis is None else layer.operand_axis


def shared_in_slices(layer: AxialUpdate, operand: Tensor, mask: Tensor, other: Tensor | None, most: int) -> Tensors:
    """Return `layer.shared`, made slice by slice, so that no whole normalised operand exists.

    Without gradients each part is written to its place at once, so that no tensor of `shared` exists twice.
    """
    if layer.shared_axis is None or layer.join_axis is None:
        return ()
    source = operand
    if layer.shared_from_other:
        assert other is not None
        source = other
    cuts, joined = slices(source, layer.shared_axis, most), torch.is_grad_enabled()
    parts = _shared_parts(layer, source, mask, cuts if joined else enough(cuts))
    if joined:
        return tuple(torch.cat(tensors, layer.join_axis) for tensors in zip(*(made for _, made in parts)))
    wholes: list[Tensor] = []
    for part, made in parts:
        if not wholes:
            wholes = [layer.empty_shared(t, source.shape[layer.shared_axis]) for t in made]
        for index, whole in enumerate(wholes):
            whole.narrow(layer.join_axis, part.start, part.stop - part.start).copy_(made[index])
        del made  # before the next slice is begun
    return tuple(wholes)


def _shared_parts(
    layer: AxialUpdate, source: Tensor, mask: Tensor, cuts: Sequence[slice]
) -> Iterator[tuple[slice, Tensors]]:
    """Yield `shared` of each slice of what it is made from."""
    axis = layer.shared_axis
    assert axis is not None
    for part, piece in watched(fetch_each(source, cuts, axis), len(cuts)):
        if layer.shared_from_other and not layer.mask_of_other:
            yield part, layer.shared_of(piece)
            continue
        piece_mask = mask.narrow(axis + 1, part.start, part.stop - part.start)
        if layer.shared_from_other:
            yield part, layer.shared_of(piece, piece_mask)
        else:
            yield part, layer.shared(DeferredLayerNorm(piece, layer.norm), piece_mask)


def add_in_slices(
    layer: AxialUpdate,
    x: Tensor,
    operand: Tensor,
    mask: Tensor,
    shared: Tensors,
    factors: Factors | None,
    axes: tuple[int, int],
    most: int,
    in_place: bool,
) -> Tensor:
    """Return x with the layer's update, in slices of `most` numbers along axes[0] of x (axes[1] of the operand).

    factors: of dropout, as long as x along that axis, or 1.  in_place: write over x, else into a new tensor.
    Errors: RuntimeError for `in_place` where gradients are on.
    """
    if in_place and torch.is_grad_enabled():
        raise RuntimeError("a plan with in_place cannot be differentiated: use torch.no_grad(), or chunk alone")
    axis, operand_axis = axes
    parts = []
    cuts: Sequence[slice] = slices(x, axis, most)
    cuts = enough(cuts) if in_place else cuts  # once where a rank has no row: for the gradient
    for part, piece in watched(fetch_each(x, cuts, axis), len(cuts)):
        start, length = part.start, part.stop - part.start
        read = piece if operand is x else operand.narrow(operand_axis, start, length)
        n_mask = mask if layer.mask_of_other else mask.narrow(operand_axis + 1, start, length)
        n = DeferredLayerNorm(read, layer.norm)
        drawn = factors
        if factors is not None and factors.shape[axis] != 1:
            drawn = factors.narrow(axis, start, length)
        new = layer.add_slice(piece, n, shared, n_mask, drawn)
        if in_place:
            store(x, part, new, axis)
            del new, n, read, piece
        else:
            parts.append(new)
    return x if in_place else torch.cat(parts, axis)


def delta_in_slices(layer: AxialUpdate, x: Tensor, mask: Tensor, other: Tensor | None, rows: int) -> Tensor:
    """Return the layer's update of x without x, before dropout, in slices of so many rows (or columns) of x.

    With gradients each slice is computed again in the backward pass: else all that is between would be kept.
    """
    operand = layer.operand(x, other)
    axis, operand_axis = cut_axes(layer, longest_axis(x))
    count = x.shape[axis]
    most = rows * max(1, x.numel() // max(1, count))
    shared = shared_in_slices(layer, operand, mask, other, most)
    sizes = [part.stop - part.start for part in slices_of(count, rows)]
    if layer.axis is not None and not layer.mask_of_other:
        mask = mask.expand(operand.shape[:-1])
    # A layer that may be cut anywhere reads no mask, and is given whatever there is.
    masked = not layer.mask_of_other and mask.shape == operand.shape[:-1]
    masks = mask.split(sizes, operand_axis + 1) if masked else [mask] * len(sizes)

    def update(part: Tensor, piece: Tensor, piece_mask: Tensor, *shared: Tensor) -> Tensor:
        with layer.computing():  # also where it is computed again, perhaps by another thread
            return layer.delta_slice(part, DeferredLayerNorm(piece, layer.norm), shared, piece_mask)

    pieces = list(zip(x.split(sizes, axis), operand.split(sizes, operand_axis), masks))
    if torch.is_grad_enabled():
        parts = (checkpoint(update, *p, *shared, use_reentrant=False, preserve_rng_state=False) for p in pieces)
        return torch.cat(list(parts), axis)
    whole, start = x.new_empty(0), 0
    for part, piece, piece_mask in alike(pieces):
        new = update(part, piece, piece_mask, *shared)
        if start == 0:
            shape = list(new.shape)
            shape[axis] = count
            whole = new.new_empty(shape)
        whole.narrow(axis, start, new.shape[axis]).copy_(new)
        start += new.shape[axis]
        del new  # before the next slice is begun
    return whole


def longest_axis(x: Tensor) -> int:
    """Return the longest axis of x but its channels, the first of such: where what may be cut anywhere is cut."""
    return max(range(-x.dim(), -1), key=lambda axis: (x.shape[axis], -axis))
