"""Layers in slices: one part of x after another, so that the intermediates are only ever a slice's.

Right because of the two laws of the contract (warpfold/model/axial.py).  x and what a layer reads may lie in host
memory (warpfold/host.py): slices are then fetched, and stored where they are written in place.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from warpfold.host import fetch_each, store
from warpfold.model.axial import ROWS, AxialUpdate, Block, Shared, Tensors, Which
from warpfold.ops.dispatch import representative_turns, watched
from warpfold.ops.noise import Factors


def layer_in_slices(
    layer: AxialUpdate,
    x: Tensor,
    mask: Tensor,
    other: Tensor | None,
    most: int,
    in_place: bool = False,
    residual: bool = True,
    anywhere: int = ROWS,
    recompute: bool = False,
) -> Tensor:
    """Return x with the layer's update, or without `residual` the update alone, in slices of `most` numbers each.

    anywhere: the axis along which a layer is cut that may be cut along any.  The rest: as of `update_in_slices`.
    """
    shared = None
    if layer.shares is not None:
        source, axis = layer.named(layer.shares, x, other), ROWS if layer.shares != layer.reads else layer.read_axis
        assert axis is not None
        shared = shared_in_slices(layer, source, mask, axis, most)
    factors = layer.dropout_factors(x.shape, x) if residual else None
    axes, read = cut_axes(layer, anywhere), layer.named(layer.reads, x, other)
    return update_in_slices(layer, x, read, mask, shared, factors, axes, most, in_place, residual, recompute)


def pair_channels(model: nn.Module) -> int:
    """Return how many channels the z of a model has: the most of any layer that updates a z; 0: there is none."""
    steps = (step for block in model.modules() if isinstance(block, Block) for step in block.steps if step.state == "z")
    layers = (step.layer for step in steps if isinstance(step.layer, AxialUpdate) and step.layer.reads == "x")
    return max((layer.norm.normalized_shape[0] for layer in layers), default=0)


def slice_numbers(chunk: int, residues: int, channels: int) -> int:
    """Return how many numbers a slice holds: as many as `chunk` rows of z.

    So a slice of m, of the extra MSA or of templates is as large as one of z, and has as many rows or columns as that.
    """
    return chunk * residues * channels


def slices(x: Tensor, axis: int, most: int) -> list[slice]:
    """Return slices of x along an axis that hold `most` numbers each, or are one row (or column); at least one."""
    count = x.shape[axis]
    size = max(1, most // max(1, x.numel() // max(1, count)))
    return slices_of(count, size)


def slices_of(count: int, size: int) -> list[slice]:
    """Split `count` rows into slices of `size` each; at least one slice, even of no rows."""
    return [slice(start, min(start + size, count)) for start in range(0, max(count, 1), size)]


def cut_axes(layer: AxialUpdate, anywhere: int) -> tuple[int, int]:
    """Return the axes along which x and what is read are cut; `anywhere`: for a layer that may be cut along any."""
    axis = anywhere if layer.axis is None else layer.axis
    return axis, axis if layer.read_axis is None else layer.read_axis


def mask_slice(layer: AxialUpdate, which: Which, mask: Tensor, axis: int, part: slice) -> Tensor:
    """Return the mask of a slice of what `which` names: of another tensor, the mask is given as it is."""
    return mask.narrow(axis + 1, part.start, part.stop - part.start) if layer.mask_of == which else mask


def cut_factors(factors: Factors | None, axis: int, start: int, length: int) -> Factors | None:
    """Return some rows of dropout factors, where they differ along `axis`."""
    if factors is None or factors.shape[axis] == 1:
        return factors
    return factors.narrow(axis, start, length)


def shared_in_slices(layer: AxialUpdate, source: Tensor, mask: Tensor, axis: int, most: int) -> Tensors:
    """Return `layer.shared`, made in slices along `axis` of the source, so that nothing between is there whole.

    Without gradients each part is written to its place at once, so that no tensor of `shared` exists twice.
    """
    assert layer.shares is not None
    joined, keeps = layer.join_axis(axis), torch.is_grad_enabled()
    cuts: Sequence[slice] = slices(source, axis, most)
    cuts = cuts if keeps else representative_turns(cuts)
    parts: list[Tensors] = []
    wholes: list[Tensor] = []
    for part, piece in watched(fetch_each(source, cuts, axis), len(cuts)):
        made = layer.shared(piece, mask_slice(layer, layer.shares, mask, axis, part))
        if keeps:
            parts.append(made)
            continue
        for index, new in enumerate(made):
            if len(wholes) == index:
                shape = list(new.shape)
                shape[joined] = source.shape[axis]
                wholes.append(layer.empty_shared(new, shape))
            wholes[index].narrow(joined, part.start, part.stop - part.start).copy_(new)
        del made, new, piece  # before the next slice is begun
    return tuple(torch.cat(tensors, joined) for tensors in zip(*parts)) if keeps else tuple(wholes)


def update_in_slices(
    layer: AxialUpdate,
    x: Tensor,
    read: Tensor,
    mask: Tensor,
    shared: Shared,
    factors: Factors | None,
    axes: tuple[int, int],
    most: int,
    in_place: bool = False,
    residual: bool = True,
    recompute: bool = False,
) -> Tensor:
    """Return x with the layer's update, in slices of `most` numbers along axes[0] of x and axes[1] of what is read.

    factors: of dropout, as long as x along that axis, or 1.  in_place: write over x, so that no second x exists; right
    because a slice reads only itself and what is already whole.  residual: else return the update alone.
    recompute: compute each slice again in the backward pass, which else keeps all that is between.
    Errors: RuntimeError for `in_place` where gradients are on.
    """
    keeps = torch.is_grad_enabled()
    if in_place and keeps:
        raise RuntimeError("a plan with in_place cannot be differentiated: use torch.no_grad(), or chunk alone")
    axis, read_axis = axes
    if layer.mask_of == layer.reads:
        mask = mask.expand(read.shape[:-1])

    def update(part: slice, piece: Tensor, of_read: Tensor, *all_shared: Tensor) -> Tensor:
        n_mask = mask_slice(layer, layer.reads, mask, read_axis, part)
        drawn = cut_factors(factors, axis, part.start, part.stop - part.start)
        with layer.computing():  # also where it is computed again, perhaps by another thread
            return layer.update(of_read, n_mask, all_shared or None, piece if residual else None, drawn)

    cuts: Sequence[slice] = slices(x, axis, most)
    cuts = cuts if keeps else representative_turns(cuts)  # all where a rank has no row: for the gradient
    parts: list[Tensor] = []
    whole = x if in_place else None
    for part, piece in watched(fetch_each(x, cuts, axis), len(cuts)):
        of_read = piece if read is x else read.narrow(read_axis, part.start, part.stop - part.start)
        if recompute and keeps:
            given = part, piece, of_read, *(shared or ())
            parts.append(checkpoint(update, *given, use_reentrant=False, preserve_rng_state=False))
            continue
        new = update(part, piece, of_read, *(shared or ()))
        if keeps:
            parts.append(new)
            continue
        if whole is None:
            shape = list(new.shape)
            shape[axis] = x.shape[axis]
            whole = new.new_empty(shape)
        store(whole, part, new, axis)
        del new, of_read, piece  # before the next slice is begun
    return torch.cat(parts, axis) if whole is None else whole


def longest_axis(x: Tensor) -> int:
    """Return the longest axis of x but its channels, the first of such: where what may be cut anywhere is cut."""
    return max(range(-x.dim(), -1), key=lambda axis: (x.shape[axis], -axis))
