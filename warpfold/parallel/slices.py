"""Run layers in slices: x is updated slice by slice, so that intermediates never exceed the size of one slice.

The result is the same because of the two laws of the axial contract (warpfold/model/axial.py). x and the state that a
layer reads may be in host memory (warpfold/host.py). Their slices are then fetched, and stored again if x is updated in
place.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from warpfold.host import fetch_each, store
from warpfold.model.axial import ROWS, AxialUpdate, Block, Shared, Tensors, Which
from warpfold.ops.dispatch import subsample, with_progress
from warpfold.ops.noise import Factors


def layer_in_slices(
    layer: AxialUpdate,
    x: Tensor,
    mask: Tensor,
    other: Tensor | None,
    max_elements: int,
    *,
    in_place: bool = False,
    residual: bool = True,
    free_axis: int = ROWS,
    recompute: bool = False,
) -> Tensor:
    """Compute x + update of a layer, or the update alone without `residual`, in slices of `max_elements`.

    free_axis: the axis for a layer that may be sliced along any axis. The other arguments are those of
    `update_in_slices`, and `AxialUpdate` describes what a layer declares (`reads`, `shares`, `mask_of`).
    """
    shared = None
    if layer.shares is not None:
        source, axis = layer.named(layer.shares, x, other), ROWS if layer.shares != layer.reads else layer.read_axis
        assert axis is not None
        shared = shared_in_slices(layer, source, mask, axis, max_elements)
    factors = layer.dropout_factors(x.shape, x) if residual else None
    return update_in_slices(
        layer,
        x,
        layer.named(layer.reads, x, other),
        mask,
        shared=shared,
        factors=factors,
        axes=cut_axes(layer, free_axis),
        max_elements=max_elements,
        in_place=in_place,
        residual=residual,
        recompute=recompute,
    )


def pair_channels(model: nn.Module) -> int:
    """Return the number of channels of a model's z: the largest of all layers that update a z, or 0 without a z."""
    steps = (step for block in model.modules() if isinstance(block, Block) for step in block.steps if step.state == "z")
    layers = (step.layer for step in steps if isinstance(step.layer, AxialUpdate) and step.layer.reads == "x")
    return max((layer.norm.normalized_shape[0] for layer in layers), default=0)


def slice_elements(chunk: int, residues: int, channels: int) -> int:
    """Return the number of elements of a slice, which is that of `chunk` rows of z.

    Slices of m, of the extra MSA and of templates have the same number of elements, so `chunk` bounds the memory of all
    layers.
    """
    return chunk * residues * channels


def slices(x: Tensor, axis: int, max_elements: int) -> list[slice]:
    """Split x along an axis into slices of at most `max_elements`, but at least one row (or column) each.

    Returns at least one slice, even if x has no rows.
    """
    count = x.shape[axis]
    size = max(1, max_elements // max(1, x.numel() // max(1, count)))
    return split_rows(count, size)


def split_rows(count: int, size: int) -> list[slice]:
    """Split `count` rows into slices of `size` rows; returns at least one slice, even of no rows."""
    return [slice(start, min(start + size, count)) for start in range(0, max(count, 1), size)]


def cut_axes(layer: AxialUpdate, free_axis: int) -> tuple[int, int]:
    """Return the axes along which x and the layer's input are sliced. free_axis: for a layer without a fixed axis."""
    axis = free_axis if layer.axis is None else layer.axis
    return axis, axis if layer.read_axis is None else layer.read_axis


def mask_slice(layer: AxialUpdate, which: Which, mask: Tensor, axis: int, part: slice) -> Tensor:
    """Narrow the mask to a slice of the tensor `which`; returns it unchanged if it masks the other tensor."""
    return mask.narrow(axis + 1, part.start, part.stop - part.start) if layer.mask_of == which else mask


def cut_factors(factors: Factors | None, axis: int, start: int, length: int) -> Factors | None:
    """Narrow dropout factors to some rows, unless the factors are shared along `axis`."""
    if factors is None or factors.shape[axis] == 1:
        return factors
    return factors.narrow(axis, start, length)


def shared_in_slices(layer: AxialUpdate, source: Tensor, mask: Tensor, axis: int, max_elements: int) -> Tensors:
    """Compute `layer.shared` in slices along `axis` of the source, so that no intermediate has the full size.

    Without gradients each slice is copied to the result at once, so that no tensor of `shared` exists twice.
    """
    assert layer.shares is not None
    joined, needs_graph = layer.join_axis(axis), torch.is_grad_enabled()
    cuts: Sequence[slice] = slices(source, axis, max_elements)
    cuts = cuts if needs_graph else subsample(cuts)
    parts: list[Tensors] = []
    wholes: list[Tensor] = []
    for part, piece in with_progress(fetch_each(source, cuts, axis), len(cuts)):
        shared_tensors = layer.shared(piece, mask_slice(layer, layer.shares, mask, axis, part))
        if needs_graph:
            parts.append(shared_tensors)
            continue
        for index, new in enumerate(shared_tensors):
            if len(wholes) == index:
                shape = list(new.shape)
                shape[joined] = source.shape[axis]
                wholes.append(layer.empty_shared(new, shape))
            wholes[index].narrow(joined, part.start, part.stop - part.start).copy_(new)
        # Free this slice before the next one is computed.
        del shared_tensors, new, piece
    return tuple(torch.cat(tensors, joined) for tensors in zip(*parts)) if needs_graph else tuple(wholes)


def update_in_slices(
    layer: AxialUpdate,
    x: Tensor,
    read: Tensor,
    mask: Tensor,
    *,
    shared: Shared,
    factors: Factors | None,
    axes: tuple[int, int],
    max_elements: int,
    in_place: bool = False,
    residual: bool = True,
    recompute: bool = False,
) -> Tensor:
    """Compute x + update in slices of `max_elements` along axes[0] of x and axes[1] of the layer's input `read`.

    factors: dropout factors, whose length along axes[0] is that of x or 1.
    in_place: write over x, so that no second x exists. This is safe because a slice reads only itself and the shared
    tensors, which are complete.
    residual: add x; otherwise the result is the update alone.
    recompute: recompute each slice in the backward pass instead of saving its intermediates.
    Raises RuntimeError for `in_place` if gradients are enabled.
    """
    needs_graph = torch.is_grad_enabled()
    if in_place and needs_graph:
        raise RuntimeError("plan.in_place: it cannot be differentiated. Use torch.no_grad(), or plan.chunk alone.")
    axis, read_axis = axes
    if layer.mask_of == layer.reads:
        mask = mask.expand(read.shape[:-1])

    def update(part: slice, piece: Tensor, read_piece: Tensor, *all_shared: Tensor) -> Tensor:
        n_mask = mask_slice(layer, layer.reads, mask, read_axis, part)
        drawn = cut_factors(factors, axis, part.start, part.stop - part.start)
        # Autograd may recompute the slice in another thread, where the layer needs its context, too.
        with layer.computing():
            return layer.update(read_piece, n_mask, all_shared or None, piece if residual else None, drawn)

    cuts: Sequence[slice] = slices(x, axis, max_elements)
    # With gradients no slice may be left out: a rank without rows must take part in the backward pass.
    cuts = cuts if needs_graph else subsample(cuts)
    parts: list[Tensor] = []
    whole = x if in_place else None
    for part, piece in with_progress(fetch_each(x, cuts, axis), len(cuts)):
        read_piece = piece if read is x else read.narrow(read_axis, part.start, part.stop - part.start)
        if recompute and needs_graph:
            arguments = part, piece, read_piece, *(shared or ())
            parts.append(checkpoint(update, *arguments, use_reentrant=False, preserve_rng_state=False))
            continue
        new = update(part, piece, read_piece, *(shared or ()))
        if needs_graph:
            parts.append(new)
            continue
        if whole is None:
            shape = list(new.shape)
            shape[axis] = x.shape[axis]
            whole = new.new_empty(shape)
        store(whole, part, new, axis)
        # Free this slice before the next one is fetched.
        del new, read_piece, piece
    return torch.cat(parts, axis) if whole is None else whole


def longest_axis(x: Tensor) -> int:
    """Return the longest non-channel axis of x (the first on ties), for layers that may be sliced along any axis."""
    return max(range(-x.dim(), -1), key=lambda axis: (x.shape[axis], -axis))
