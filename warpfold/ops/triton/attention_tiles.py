"""What the attention kernels share: which tile a program has, how tiles are read and written, where a mask begins.

q, k, v, the output and their gradients are `Strided` with strides (batch, row, query or key, head), and stride 1 along
the width; a mask has strides (batch, row), a bias (batch, head, query).
"""

from typing import NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
NEIGHBOURS = tl.constexpr(8)  # groups of rows whose keys and values stay in the cache while the bias passes by
BIAS_UNIT = 16  # divides the strides of a bias as the kernels are given it
SCAN = tl.constexpr(512)  # entries of a mask looked at together


class Sizes(NamedTuple):
    """Sizes of one call, as the kernels are given them; bias_keys: keys of the bias as it lies in memory."""

    rows: int
    queries: int
    keys: int
    heads: int
    bias_keys: int


@triton.constexpr_function
def padded_width(width: int) -> int:
    """Return how wide a tile of vectors is: a power of two that tensor cores take."""
    return max(16, 1 << (int(width) - 1).bit_length())


@triton.jit
def offset(index: tl.tensor, stride: tl.tensor, unit: tl.constexpr) -> tl.tensor:
    """Return an offset in 64 bits.  Strides come divided by `unit`: the compiler knows then what divides an address."""
    return index.to(tl.int64) * stride * unit


@triton.jit
def vectors_of(x: tl.tuple, batch: tl.tensor, row: tl.tensor, head: tl.tensor) -> tl.tensor:
    """Return where the vectors of one head of one row begin."""
    start = x.data + offset(batch, x.strides[0], x.unit)
    return start + offset(row, x.strides[1], x.unit) + offset(head, x.strides[3], x.unit)


@triton.jit
def program_tile(tiles: tl.tensor, heads: tl.tensor, groups: tl.tensor) -> tl.tensor:
    """Return this program's tile, head, group of rows and batch; neighbours in time share keys, values and bias."""
    program = tl.program_id(0)
    each = groups * heads * tiles
    batch = program // each
    program = program % each
    block = NEIGHBOURS * heads * tiles
    first = program // block * NEIGHBOURS
    program = program % block
    size = tl.minimum(groups - first, NEIGHBOURS)
    group = first + program % size
    program = program // size
    return program % tiles, program // tiles, group, batch


@triton.jit
def load_tile(
    x: tl.tuple,
    batch: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    index: tl.tensor,
    count: tl.tensor,
    WIDTH: tl.constexpr,
    WHOLE: tl.constexpr = False,
) -> tl.tensor:
    """Load vectors [index, WIDTH], of which there are `count` (WHOLE: no index is past them), padded with 0."""
    start = vectors_of(x, batch, row, head)
    across = tl.arange(0, padded_width(WIDTH))
    pointers = start + offset(index[:, None], x.strides[2], x.unit) + across[None, :]
    if WHOLE and padded_width(WIDTH) == WIDTH:
        return tl.load(pointers)
    valid = across[None, :] < WIDTH
    if not WHOLE:
        valid = valid & (index[:, None] < count)
    return tl.load(pointers, mask=valid, other=0.0)


@triton.jit
def store_tile(
    x: tl.tuple,
    batch: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    tile: tl.tensor,
    index: tl.tensor,
    count: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    """Store vectors, as `load_tile` loads them."""
    start = vectors_of(x, batch, row, head)
    across = tl.arange(0, padded_width(WIDTH))
    valid = (across[None, :] < WIDTH) & (index[:, None] < count)
    pointers = start + offset(index[:, None], x.strides[2], x.unit) + across[None, :]
    tl.store(pointers, tile.to(x.data.dtype.element_ty), mask=valid)


@triton.jit
def bias_of(bias: tl.tuple, batch: tl.tensor, head: tl.tensor) -> tl.tensor:
    """Return where the bias of one head begins."""
    return bias.data + (offset(batch, bias.strides[0], bias.unit) + offset(head, bias.strides[1], bias.unit))


@triton.jit
def load_bias(
    bias: tl.tuple, start: tl.tensor, i: tl.tensor, j: tl.tensor, queries: tl.tensor, bias_keys: tl.tensor
) -> tl.tensor:
    """Load the bias of queries i and keys j, of which one is a column and the other a row, in fp32."""
    valid = (i < queries) & (j < bias_keys)
    return tl.load(start + offset(i, bias.strides[2], bias.unit) + j, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def exp_shifted(s: tl.tensor, shift: tl.tensor, EXACT: tl.constexpr) -> tl.tensor:
    """Return e^(s - shift) by one fused multiply-add and one exp2; EXACT, for fp32, subtracts before it multiplies."""
    if EXACT:
        return tl.math.exp2((s - shift) * LOG2E)
    return tl.math.exp2(s * LOG2E - shift * LOG2E)


@triton.jit
def mask_of(mask: tl.tuple, batch: tl.tensor, row: tl.tensor) -> tl.tensor:
    """Return where the mask of one row begins."""
    return mask.data + offset(batch, mask.strides[0], mask.unit) + offset(row, mask.strides[1], mask.unit)


@triton.jit
def load_mask(mask: tl.tuple, batch: tl.tensor, row: tl.tensor, j: tl.tensor, keys: tl.tensor) -> tl.tensor:
    """Return which of the keys j one row attends to."""
    return tl.load(mask_of(mask, batch, row) + j, j < keys, 0) != 0


@triton.jit
def first_masked_key(
    mask: tl.tuple, batch: tl.tensor, first_row: tl.tensor, rows: tl.tensor, keys: tl.tensor, ROWS: tl.constexpr
) -> tl.tensor:
    """Return the first key that some of the rows masks; `keys` if none does."""
    firsts = tl.zeros([SCAN], tl.int32) + keys
    for start in range(0, keys, SCAN):
        j = start + tl.arange(0, SCAN)
        for n in tl.static_range(ROWS):
            row = tl.minimum(first_row + n, rows - 1)
            attended = tl.load(mask_of(mask, batch, row) + j, j < keys, 1)
            firsts = tl.minimum(firsts, tl.where(attended != 0, keys, j))
    return tl.min(firsts, 0)
