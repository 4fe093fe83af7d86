"""What the kernels of triangle_multiplication share: which positions there are, normalised tiles, rows of a weight.

Positions are counted along rows that are padded as those of the planes are, so that 16 bytes of a plane are one channel
of neighbouring positions.  Tiles [positions, channels] are read and written along the channels in x, along the
positions in a plane, and change hands in shared memory on the way.

Rows of the joined weight make a, a's gate, b, b's gate and the product's gate; FUSED (AlphaFold 2.3) they make a, b,
a's gate, b's gate and the product's.
"""

import triton
import triton.language as tl

from warpfold.ops.triton.norm_tiles import shifted
from warpfold.ops.triton.positions import pointers


@triton.jit
def present_of(m: tl.tensor, axes: tl.tuple, n: tl.tensor, PADDED: tl.constexpr) -> tl.tensor:
    """Return which of these positions there are: not those past the last, nor those that pad a row of n."""
    present = m < axes.positions
    if PADDED:
        present = present & (m % axes.inner < n)
    return present


@triton.jit
def in_memory(m: tl.tensor, c: tl.tensor, axes: tl.tuple, C: tl.constexpr) -> tl.tensor:
    """Return which elements of a plane there is memory for, also those that pad its rows: so words of it are wide."""
    return (m < axes.positions)[:, None] & (c < C)[None, :]


@triton.jit
def load_normed(
    x: tl.tuple,
    readable: tl.tensor,
    norm_weight: tl.tensor,
    norm_bias: tl.tensor,
    mean: tl.tensor,
    rstd: tl.tensor,
    at: tl.tensor,
    m: tl.tensor,
    present: tl.tensor,
    axes: tl.tuple,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    AGAIN: tl.constexpr = False,
) -> tl.tuple:
    """Return the normalised channels of positions [m, c], in fp32 before weight and bias, in the dtype of x after them.

    at: where the statistics of these positions lie.  readable: which elements of x may be read.  AGAIN: they were read
    before, and are not to be held in registers meanwhile: so that the compiler does not, the loads are of another kind.
    """
    c = tl.arange(0, BLOCK_C)
    once: tl.constexpr = "evict_first" if AGAIN else ""
    v = tl.load(pointers(x, m, c, axes), mask=readable, other=0, eviction_policy=once).to(tl.float32)
    mu = tl.load(mean + at, mask=present, other=0)
    r = tl.load(rstd + at, mask=present, other=0)
    x_hat = tl.where(present[:, None] & (c < C)[None, :], (v - mu[:, None]) * r[:, None], 0.0)
    w = tl.load(norm_weight + c, mask=c < C, other=0).to(tl.float32)
    return x_hat, shifted(x_hat * w[None, :], norm_bias, c, C).to(x.data.dtype.element_ty)


@triton.jit
def rows_of(
    weight: tl.tensor,
    first: tl.tensor,
    o: tl.tensor,
    c: tl.tensor,
    dtype: tl.constexpr,
    ROWS: tl.constexpr,
    C: tl.constexpr,
) -> tl.tensor:
    """Load rows first + o of a weight [., C], of those with o < ROWS, transposed: [c, o]."""
    known = (c < C)[:, None] & (o < ROWS)[None, :]
    return tl.load(weight + first * C + o[None, :] * C + c[:, None], mask=known, other=0).to(dtype)


@triton.jit
def biased(
    y: tl.tensor,
    bias: tl.tensor,
    first: tl.tensor,
    o: tl.tensor,
    ROWS: tl.constexpr,
    BIASED: tl.constexpr,
) -> tl.tensor:
    """Return y [m, o] with elements first + o of a bias, which BIASED outputs have."""
    if bias is not None:
        known = (o < ROWS) & (first + o < BIASED)
        return y + tl.load(bias + first + o, mask=known, other=0).to(tl.float32)[None, :]
    else:
        return y


@triton.jit
def norm_backward(
    dn: tl.tensor,
    x_hat: tl.tensor,
    norm_weight: tl.tensor,
    r: tl.tensor,
    partials: tl.tensor,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> tl.tensor:
    """Return the gradient of what was normalised, given that of the result; store this program's part of the norm's.

    partials: [programs, 2 C], of the norm's weight and of its bias.
    """
    c = tl.arange(0, BLOCK_C)
    mine = partials + tl.program_id(0).to(tl.int64) * (2 * C) + c
    tl.store(mine, tl.sum(dn * x_hat, 0), mask=c < C)
    tl.store(mine + C, tl.sum(dn, 0), mask=c < C)
    dn = dn * tl.load(norm_weight + c, mask=c < C, other=0).to(tl.float32)[None, :]
    c1 = tl.sum(dn * x_hat, 1) / C
    c2 = tl.sum(dn, 1) / C
    return (dn - c2[:, None] - x_hat * c1[:, None]) * r[:, None]
