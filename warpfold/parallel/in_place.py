"""Layers on a rank's shard, written over it: what is shared comes in pieces, and little else is ever there.

Beside the shards of m and z a rank holds what a layer shares, and a few pieces: of a triangle product one factor, all
rows and columns of this rank's channels; of an attention its bias; of an outer product a piece of the right factor.
"""

from collections import deque
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor

from warpfold.model.axial import AxialUpdate, ChannelProduct
from warpfold.model.execution import Tensors
from warpfold.model.layers import DeferredLayerNorm
from warpfold.ops.dispatch import alike
from warpfold.ops.noise import Factors
from warpfold.parallel.collectives import Pending, all_gather, all_to_all
from warpfold.parallel.pieces import Piece, cut_factors, join_pieces, pieces
from warpfold.parallel.sharded_tensor import ShardedTensor
from warpfold.parallel.slices import cut_axes

T = TypeVar("T")
GATHERED = (
    8  # ranks whose rows are gathered at a time as one rank's slice has them: where there are more, fewer of each
)
Cut = tuple[int, int, int]  # the first of this rank's rows, how many, and how many of all ranks


def shared_in_pieces(layer: AxialUpdate, of: ShardedTensor, mask: Tensor | None, axis: int, name: str) -> Tensors:
    """Return `shared` whole, made of all ranks' shards along `axis`.

    mask: of the shard; None where the layer makes `shared` from the other representation.
    """
    x, length, group = of.along(axis), of.lengths[axis], of.group
    # Gathered, a piece has the rows of all ranks; of a bias, few channels.
    rows = max(min(of.rows(axis), of.rows(axis) * GATHERED // group.size), 1)
    join_axis = axis if mask is None or layer.join_axis is None else layer.join_axis

    def begin(piece: Piece) -> list[Pending]:
        part = piece.of_shard(x, axis)
        if mask is None:
            made = layer.shared_of(part)
        else:
            made = layer.shared(DeferredLayerNorm(part, layer.norm), piece.of_shard(mask, axis + 1))
        return [all_gather(t, join_axis, piece.length, group, f"{name} {i}") for i, t in enumerate(made)]

    return join_pieces(begin, join_axis, length, rows, group, lambda like: layer.empty_shared(like, length))


def add_by_shared(
    layer: AxialUpdate, to: ShardedTensor, of: ShardedTensor, mask: Tensor, factors: Factors | None, name: str
) -> Tensor:
    """Return this rank's shard of x, updated in one piece of what is shared after another; for layers with
    `shared_cuts`.

    to: x [*, i, j, c].  of: the operand, mask: of this rank's shard of it; `local` of that is there whole.
    """
    cuts, axis, join_axis = layer.shared_cuts, layer.operand_axis, layer.join_axis
    assert cuts is not None
    assert axis is not None
    assert join_axis is not None
    operand, length, group = of.along(axis), of.lengths[axis], of.group
    along, _ = cut_axes(layer, to.present)
    x, rows = to.along(along), to.rows(along)
    starts = range(0, max(operand.shape[axis], 1), rows)
    sizes = [min(rows, operand.shape[axis] - start) for start in starts]

    def normalised(start: int, size: int) -> tuple[DeferredLayerNorm, Tensor]:
        return DeferredLayerNorm(operand.narrow(axis, start, size), layer.norm), mask.narrow(axis + 1, start, size)

    made = [layer.local(*normalised(start, size)) for start, size in zip(starts, sizes)]
    local = tuple(torch.cat(tensors, axis) for tensors in zip(*made))
    del made

    def begin(piece: Piece) -> tuple[Piece, list[Pending]]:
        shared = layer.shared(*normalised(piece.start, piece.sizes[piece.rank]))
        return piece, [
            all_gather(t, join_axis, piece.length, group, f"{name} shared {i}") for i, t in enumerate(shared)
        ]

    for piece, arriving in _ahead(map(begin, pieces(length, rows, group))):
        shared = [pending.wait().split(piece.sizes, join_axis) for pending in arriving]
        for offset, size, *of_rank in zip(piece.offsets, piece.sizes, *shared):
            part = x.narrow(cuts, offset, size)
            part.copy_(layer.add(part, local, tuple(of_rank), mask, cut_factors(factors, cuts, offset, size)))
    return x


def multiply_in_place(
    layer: ChannelProduct, of: ShardedTensor, mask: Tensor, factors: Factors | None, name: str
) -> Tensor:
    """Return this rank's shard, as it is present, with a triangle product's update.

    The right factor comes whole, of this rank's channels: as large as x where the product is as wide as z.  The left
    one, the product and the update are pieces: while one is multiplied, the next factor and the product before travel.
    """
    axis, group = of.present, of.group
    x, length, rows = of.along(axis), of.lengths[axis], of.rows(axis)
    here = axis + 1  # of the factors, which have no channels behind

    def normalised(along: int, start: int, size: int) -> tuple[DeferredLayerNorm, Tensor]:
        return DeferredLayerNorm(x.narrow(along, start, size), layer.norm), mask.narrow(along + 1, start, size)

    def begin_right(piece: Piece) -> list[Pending]:
        factor = layer.right(*normalised(axis, piece.start, piece.sizes[piece.rank]))
        return [all_to_all(factor, here, -3, piece.length, group, f"{name} right")]

    def begin_left(cut: Cut) -> tuple[Cut, Pending]:
        start, size, every = cut
        factor = layer.left(*normalised(along, start, size))
        return cut, all_to_all(factor, here, -3, every, group, f"{name} left")

    def finish(cut: Cut, product: Pending) -> None:
        start, size, _ = cut
        n, _ = normalised(along, start, size)
        dx = layer.finish(product.wait(), layer.gate_logits(n))
        part = cut_factors(factors, along, start, size)
        x.narrow(along, start, size).add_(dx if part is None else dx * part)

    (right,) = join_pieces(begin_right, here, length, rows, group)
    assert layer.axis is not None
    along = layer.axis
    cuts: Iterator[Cut]
    if along == axis:
        cuts = ((piece.start, piece.sizes[piece.rank], piece.length) for piece in pieces(length, rows, group))
    else:  # all ranks have these
        width = rows * group.size
        there = x.shape[along]
        cuts = ((start, min(width, there - start), length) for start in alike(range(0, there, width)))
    before = None
    for cut, left in _ahead(map(begin_left, cuts)):
        product = layer.product(left.wait(), right)
        travelling = all_to_all(product, -1, axis, layer.channels, group, f"{name} product")
        del left, product
        if before is not None:
            finish(*before)
        before = cut, travelling
    if before is not None:
        finish(*before)
    return x


def _ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield the items, each when the next one has been made: a collective begins before the last one is awaited."""
    waiting: deque[T] = deque()
    for item in items:
        waiting.append(item)
        del item
        if len(waiting) > 1:
            yield waiting.popleft()
    yield from waiting
