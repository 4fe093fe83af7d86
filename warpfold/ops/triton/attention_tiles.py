"""What the attention kernels share: where a program stands, how tiles are read and written, where a mask begins."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
NEIGHBOURS = tl.constexpr(8)  # groups of rows whose keys and values stay in the cache while the bias passes by
BIAS_UNIT = tl.constexpr(16)  # divides the strides of the bias as the kernels are given it
SCAN = tl.constexpr(512)  # entries of a mask looked at together


@triton.jit
def at(index: tl.tensor, stride: tl.tensor, unit: tl.constexpr) -> tl.tensor:
    """An offset in 64 bits.  Strides come divided by `unit`, so that the compiler knows what divides an address."""
    return index.to(tl.int64) * stride * unit


@triton.jit
def row_of(
    base: tl.tensor, strides: tl.tuple, batch: tl.tensor, row: tl.tensor, head: tl.tensor, UNIT: tl.constexpr
) -> tl.tensor:
    """Where the vectors of one head of one row begin; strides are (batch, row, query or key, head)."""
    return base + at(batch, strides[0], UNIT) + at(row, strides[1], UNIT) + at(head, strides[3], UNIT)


@triton.jit
def place(tiles: tl.tensor, heads: tl.tensor, groups: tl.tensor) -> tl.tensor:
    """Which (tile, head, group of rows, batch) this program has; neighbours in time share keys, values and bias."""
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
    base: tl.tensor,
    index: tl.tensor,
    stride: tl.tensor,
    count: tl.tensor,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    WHOLE: tl.constexpr = False,
) -> tl.tensor:
    """Vectors [index, WIDTH], of which there are `count` (WHOLE: no index is past them), padded with zeros to 16."""
    across = tl.arange(0, WIDTH if WIDTH > 16 else 16)
    pointers = base + at(index[:, None], stride, UNIT) + across[None, :]
    if WHOLE and WIDTH >= 16:
        return tl.load(pointers)
    known = across[None, :] < WIDTH
    if not WHOLE:
        known = known & (index[:, None] < count)
    return tl.load(pointers, mask=known, other=0.0)


@triton.jit
def store_tile(
    base: tl.tensor,
    tile: tl.tensor,
    index: tl.tensor,
    stride: tl.tensor,
    count: tl.tensor,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
) -> None:
    """The reverse of `load_tile`."""
    across = tl.arange(0, WIDTH if WIDTH > 16 else 16)
    known = (across[None, :] < WIDTH) & (index[:, None] < count)
    tl.store(base + at(index[:, None], stride, UNIT) + across[None, :], tile.to(base.dtype.element_ty), mask=known)


@triton.jit
def load_bias(
    base: tl.tensor,
    stride: tl.tensor,
    i: tl.tensor,
    j: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
) -> tl.tensor:
    """The bias of queries i and keys j, of which one index is a column and the other a row."""
    return tl.load(base + at(i, stride, BIAS_UNIT) + j, mask=(i < queries) & (j < keys), other=0.0)


@triton.jit
def power(s: tl.tensor, shift: tl.tensor, EXACT: tl.constexpr) -> tl.tensor:
    """e^(s - shift) in one fused multiply-add and one exp2; EXACT, for fp32, subtracts before it multiplies."""
    if EXACT:
        return tl.math.exp2((s - shift) * LOG2E)
    return tl.math.exp2(s * LOG2E - shift * LOG2E)


@triton.jit
def first_masked(
    mask: tl.tensor,
    strides: tl.tuple,
    batch: tl.tensor,
    first_row: tl.tensor,
    rows: tl.tensor,
    keys: tl.tensor,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """The first key that some of the rows masks; `keys` if none does."""
    firsts = tl.zeros([SCAN], tl.int32) + keys
    for start in range(0, keys, SCAN):
        j = start + tl.arange(0, SCAN)
        for n in tl.static_range(ROWS):
            row = tl.minimum(first_row + n, rows - 1)
            keep = tl.load(mask + at(batch, strides[0], 1) + at(row, strides[1], 1) + j, j < keys, 1)
            firsts = tl.minimum(firsts, tl.where(keep != 0, keys, j))
    return tl.min(firsts, 0)


@triton.jit
def load_keep(
    mask: tl.tensor, strides: tl.tuple, batch: tl.tensor, row: tl.tensor, j: tl.tensor, keys: tl.tensor
) -> tl.tensor:
    """Which of the keys j one row attends to."""
    return tl.load(mask + at(batch, strides[0], 1) + at(row, strides[1], 1) + j, j < keys, 0) != 0
