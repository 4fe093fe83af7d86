"""The outer product mean on a GPU: one fused kernel forward, and cuBLAS products backward.

The traffic from the L2 cache for a tile of positions (i, j) determines the shape of the forward kernel.  With c = d =
32 channels, z = 128 and s sequences, a tile of 16 x 8 positions reads

    the projection's weight, once                   2 z c d                                   262 kB
    a and b, once for every TILE_C left channels    2 s (16 TILE_C + 8 d) c / TILE_C          655 kB

with s = 128 and TILE_C = 4, for 2 x 128 c d (s + z) = 67 million operations, 73 per byte.  Processing all left channels
at once would read less, but their products alone, 512 x 256 elements in fp32, fill two register files.  With TILE_C = 4
they take a quarter of one, and the sums of 128 positions by 128 channels take another quarter.  Between its two matrix
products a program changes the order of the products from (c, i), (j, d) to (i, j), (c, d); the tensor [i, j, c d] never
exists in memory.

The backward pass processes chunks of pair rows, whose products [i, j, c, d] stay in the L2 cache.  For a chunk,
`_outer_products` stores the products of the factors, or their gradients, in the order that the next product needs, and
torch.mm (cuBLAS) computes the gradients of the weight and of the factors from them.  In total it multiplies six times
as much as a forward product.  Five times would suffice, but then the gradient of b would be summed over chunks in fp32.

For the whole layer, outer_product_mean, the forward pass is two kernels.  `norm_linear` masks both factors as it writes
them, and stores b with its channels before the residues.  `_outer_product` counts sequences and adds the residual.
"""

import itertools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from warpfold.ops.attention import batched
from warpfold.ops.dispatch import Operands, empty_parameters
from warpfold.ops.linear import empty_statistics, padded
from warpfold.ops.outer import empty_factors, empty_share
from warpfold.ops.triton.launch import configs, register
from warpfold.ops.triton.linear import Planes, norm_linear_backward, project
from warpfold.ops.triton.positions import (
    Sum,
    cast_weight,
    cdiv,
    chunks_of,
    contiguous,
    empty_partials,
    fp32_product,
    power_of_two,
    sum_partials,
)

# Bytes of the products of a chunk of pair rows, [i, j, c, d]: 64 rows of 256 residues with 32 channels.  They must stay
# in the 50 MB of an H100's L2 cache between the kernel that writes them and the product that reads them.
CHUNK_BYTES = 2**25


@triton.jit
def _products(
    a: tl.tensor, b: tl.tensor, pitch: tl.tensor, i: tl.tensor, j: tl.tensor, first: tl.tensor,
    S: tl.tensor, I: tl.tensor, J: tl.tensor, C: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    TILE_I: tl.constexpr, TILE_J: tl.constexpr, TILE_C: tl.constexpr, BLOCK_S: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Compute the products [(i, j), (c, d)] from left channel `first` on, for positions from i and j on.

    a [s, c, i] and b [s, j, d] of one batch; pitch: the stride of the positions of b.
    """
    row = tl.arange(0, TILE_C * TILE_I)
    column = tl.arange(0, TILE_J * BLOCK_D)
    c = first + row // TILE_I
    at_i = i + row % TILE_I
    at_j = j + column // BLOCK_D
    d = column % BLOCK_D
    a_known = (c < C) & (at_i < I)
    b_known = (at_j < J) & (d < D)
    a_at = c * I + at_i
    b_at = at_j * pitch + d
    products = tl.zeros([TILE_C * TILE_I, TILE_J * BLOCK_D], tl.float32)
    for start in range(0, S, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        some_a = tl.load(
            a + s[:, None].to(tl.int64) * (C * I) + a_at[None, :], mask=(s < S)[:, None] & a_known[None, :], other=0
        )
        some_b = tl.load(
            b + s[:, None].to(tl.int64) * (J * pitch) + b_at[None, :], mask=(s < S)[:, None] & b_known[None, :], other=0
        )
        products = tl.dot(tl.trans(some_a), some_b, products)
    turned = tl.reshape(products.to(a.dtype.element_ty), [TILE_C, TILE_I, TILE_J, BLOCK_D])
    return tl.reshape(tl.permute(turned, (1, 2, 0, 3)), [TILE_I * TILE_J, TILE_C * BLOCK_D])


@triton.jit
def _shares(
    a_mask: tl.tensor, b_mask: tl.tensor, i: tl.tensor, j: tl.tensor, added: tl.tensor, least: tl.tensor,
    S: tl.tensor, I: tl.tensor, J: tl.tensor, TILE_I: tl.constexpr, TILE_J: tl.constexpr, BLOCK_S: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Compute 1 / count [(i, j)] for positions from i and j on, from the masks [s, i] and [s, j] of one batch."""
    at_i, at_j = i + tl.arange(0, TILE_I), j + tl.arange(0, TILE_J)
    both = tl.zeros([BLOCK_S, TILE_I, TILE_J], tl.float32)
    for start in range(0, S, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        of_i = tl.load(a_mask + s[:, None] * I + at_i[None, :], mask=(s < S)[:, None] & (at_i < I)[None, :], other=0)
        of_j = tl.load(b_mask + s[:, None] * J + at_j[None, :], mask=(s < S)[:, None] & (at_j < J)[None, :], other=0)
        both += of_i.to(tl.float32)[:, :, None] * of_j.to(tl.float32)[:, None, :]
    count = tl.maximum(tl.sum(both, 0) + added, least)
    return tl.reshape(1 / count, [TILE_I * TILE_J])


@triton.jit
def _outer_product(
    a: tl.tensor, b: tl.tensor, weight: tl.tensor, bias: tl.tensor, a_mask: tl.tensor, b_mask: tl.tensor,
    pair: tl.tensor, out: tl.tensor, share: tl.tensor, pitch: tl.tensor, added: tl.tensor, least: tl.tensor,
    stride_i: tl.tensor, stride_j: tl.tensor, S: tl.tensor, I: tl.tensor, J: tl.tensor,
    C: tl.constexpr, D: tl.constexpr, Z: tl.constexpr, BIAS_DIVIDED: tl.constexpr, BLOCK_D: tl.constexpr,
    TILE_I: tl.constexpr, TILE_J: tl.constexpr, TILE_C: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_Z: tl.constexpr,
) -> None:  # fmt: skip
    """Store BLOCK_Z channels of TILE_I x TILE_J positions of out [batch, positions, z], and their 1 / count.

    stride_i, stride_j: strides of i and j in positions.  BIAS_DIVIDED: the bias is added before the division by the
    count, otherwise after it.  pair: the residual that is added last, or None.
    """
    across, down = tl.cdiv(J, TILE_J), tl.cdiv(I, TILE_I)
    tile = tl.program_id(0)
    j = tile % across * TILE_J
    i = tile // across % down * TILE_I
    batch = (tile // (across * down)).to(tl.int64)
    a += batch * S * (C * I)
    b += batch * S * (J * pitch)
    z = tl.program_id(1) * BLOCK_Z + tl.arange(0, BLOCK_Z)
    k = tl.arange(0, TILE_C * BLOCK_D)
    acc = tl.zeros([TILE_I * TILE_J, BLOCK_Z], tl.float32)
    for first in range(0, C, TILE_C):
        products = _products(a, b, pitch, i, j, first, S, I, J, C, D, BLOCK_D, TILE_I, TILE_J, TILE_C, BLOCK_S)
        c, d = first + k // BLOCK_D, k % BLOCK_D
        known = (z < Z)[:, None] & ((c < C) & (d < D))[None, :]
        w = tl.load(weight + z[:, None] * (C * D) + (c * D + d)[None, :], mask=known, other=0)
        acc = tl.dot(products, tl.trans(w.to(products.dtype)), acc)
    if bias is not None and BIAS_DIVIDED:
        acc += tl.load(bias + z, mask=z < Z, other=0).to(tl.float32)[None, :]
    m = tl.arange(0, TILE_I * TILE_J)
    at_i, at_j = i + m // TILE_J, j + m % TILE_J
    real = (at_i < I) & (at_j < J)
    position = batch * I * J + at_i.to(tl.int64) * stride_i + at_j.to(tl.int64) * stride_j
    each = _shares(a_mask + batch * S * I, b_mask + batch * S * J, i, j, added, least, S, I, J, TILE_I, TILE_J, BLOCK_S)
    acc *= each[:, None]
    if bias is not None and not BIAS_DIVIDED:
        acc += tl.load(bias + z, mask=z < Z, other=0).to(tl.float32)[None, :]
    at, valid = position[:, None] * Z + z[None, :], real[:, None] & (z < Z)[None, :]
    if pair is not None:
        acc += tl.load(pair + at, mask=valid, other=0).to(tl.float32)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=valid)
    if tl.program_id(1) == 0:
        tl.store(share + position, each, mask=real)


class Operand(NamedTuple):
    """An operand [depth, outer, inner] of `_outer_products`.

    It has the strides of the depth, outer and inner axis, and those of outer and inner in the result (`_out`) and in
    the share (`_share`).  They are separate fields, because Triton 3.6 loses a stride of 1 in nested tuples.
    """

    data: Tensor
    depth: int
    outer: int
    inner: int
    outer_out: int
    inner_out: int
    outer_share: int
    inner_share: int
    outer_size: int
    inner_size: int

    @classmethod
    def of(
        cls, t: Tensor, strides: tuple[int, int, int], sizes: tuple[int, int], out: tuple[int, int],
        share: tuple[int, int] = (0, 0),
    ) -> "Operand":  # fmt: skip
        """Make the operand t [depth, outer, inner] with the strides of its axes in the result and the share."""
        return cls(t, *strides, *out, *share, *sizes)


@triton.jit
def _outer_products(
    left: tl.tuple, right: tl.tuple, share: tl.tensor, out: tl.tensor, depth: tl.tensor,
    SHARE_OF: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """Store share * left^T right for BLOCK_M of the left operand's (outer, inner) by BLOCK_N of the right operand's.

    This is a product with a free order of its four axes in `out`, which cuBLAS does not offer.
    SHARE_OF: "left" or "right" if the share has the axes of that operand only, otherwise "both".
    """
    rows, columns = left.outer_size * left.inner_size, right.outer_size * right.inner_size
    across = tl.cdiv(columns, BLOCK_N)
    m = tl.program_id(0) // across * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) % across * BLOCK_N + tl.arange(0, BLOCK_N)
    m_outer, m_inner = (m // left.inner_size).to(tl.int64), (m % left.inner_size).to(tl.int64)
    n_outer, n_inner = (n // right.inner_size).to(tl.int64), (n % right.inner_size).to(tl.int64)
    left_at = m_outer * left.outer + m_inner * left.inner
    right_at = n_outer * right.outer + n_inner * right.inner
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, depth, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        left_rows = left.data + k[:, None].to(tl.int64) * left.depth
        right_rows = right.data + k[:, None].to(tl.int64) * right.depth
        some = tl.load(left_rows + left_at[None, :], mask=(k < depth)[:, None] & (m < rows)[None, :], other=0)
        others = tl.load(right_rows + right_at[None, :], mask=(k < depth)[:, None] & (n < columns)[None, :], other=0)
        acc = tl.dot(tl.trans(some), others, acc)
    valid = (m < rows)[:, None] & (n < columns)[None, :]
    left_share = m_outer * left.outer_share + m_inner * left.inner_share
    right_share = n_outer * right.outer_share + n_inner * right.inner_share
    if SHARE_OF == "left":
        acc *= tl.load(share + left_share, mask=m < rows, other=0)[:, None]
    elif SHARE_OF == "right":
        acc *= tl.load(share + right_share, mask=n < columns, other=0)[None, :]
    else:
        acc *= tl.load(share + (left_share[:, None] + right_share[None, :]), mask=valid, other=0)
    left_out = m_outer * left.outer_out + m_inner * left.inner_out
    right_out = n_outer * right.outer_out + n_inner * right.inner_out
    tl.store(out + (left_out[:, None] + right_out[None, :]), acc.to(out.dtype.element_ty), mask=valid)


_NAMES = "TILE_I TILE_J TILE_C BLOCK_S BLOCK_Z"
FORWARD = register(
    "outer_product",
    _outer_product,
    configs(
        _NAMES,
        *((16, 8, 4, n, 128, 8, s) for n in (32, 64) for s in (2, 3)),
        *((16, 8, 8, n, 128, 8, 2) for n in (32, 64)),
        *((16, 4, 4, n, 128, w, 2) for n, w in ((32, 8), (64, 4))),
    ),
)
PRODUCTS = register(
    "outer_products",
    _outer_products,
    configs(
        "BLOCK_M BLOCK_N BLOCK_K",
        *((128, 128, k, 8, s) for k in (32, 64) for s in (2, 3)),
        *((128, 256, 32, 8, s) for s in (2, 3)),
        *((64, 128, 32, 4, s) for s in (2, 3)),
    ),
)


def outer_product(t: Operands) -> tuple[Tensor, Tensor]:
    """Compute warpfold::outer_product."""
    out = t.a.new_empty(t.a.shape[0], t.a.shape[2], t.b.shape[2], len(t.weight))
    share = empty_share(t.a, *out.shape[:-1])
    # A program reads few channels of many positions.
    _forward(t.but(turned=t.a.mT.contiguous(), b=t.b.contiguous()), (t.b.shape[2], 1), out, share)
    return out, share


def outer_product_backward(t: Operands) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute warpfold::outer_product_backward."""
    a, b = t.a.contiguous(), t.b.mT.contiguous()
    da, db = t.a.new_empty(t.a.shape), t.b.new_empty(t.b.shape)
    of_weight = empty_parameters(t.weight, t.bias)
    sum_partials(*_backward(t, a, b, da, db, None, of_weight))
    return da, db, *of_weight


def outer_product_mean(t: Operands) -> tuple[Tensor, ...]:
    """Compute warpfold::outer_product_mean."""
    x, h, mask = t.x, len(t.weight) // 2, t.mask.contiguous()
    *batch, _, r, _ = x.shape
    out, share = x.new_empty(*batch, r, r, len(t.out_weight)), empty_share(x, *batch, r, r)
    (a, b), (mean, scale) = empty_factors(x, h), empty_statistics(x)
    project(t.but(mean=mean, scale=scale), a, Planes(b, h), mask)
    # b is the transposed factor here, so the weight's channels and the axes of the pairs are exchanged.
    masks, weight = batched(mask, 3), _exchanged(t.out_weight, h, h, x)
    of_factors = t.but(turned=batched(b.mT, 4), b=batched(a, 4), a_mask=masks, b_mask=masks, bias=t.out_bias)
    _forward(of_factors.but(weight=weight), (1, r), batched(out, 4), batched(share, 3))
    return out, a, b, mean, scale, share


def outer_product_mean_backward(t: Operands) -> tuple[Tensor, ...]:
    """Compute warpfold::outer_product_mean_backward."""
    h, mask = len(t.weight) // 2, batched(t.mask, 3)
    *positions, _ = t.x.shape
    dy = t.x.new_empty(*positions, padded(2 * h)).narrow(-1, 0, 2 * h)
    of_weight = empty_parameters(t.out_weight, t.out_bias)
    a, b, da, db = (batched(each, 4) for each in (t.a, t.b.mT, *dy.split(h, -1)))
    of_factors = t.but(grad=batched(t.grad, 4), share=batched(t.share, 3), weight=t.out_weight, bias=t.out_bias)
    sums = _backward(of_factors, a.contiguous(), b, da, db, mask, of_weight)
    return *norm_linear_backward(t.but(grad=dy), None, sums), *of_weight


def _exchanged(weight: Tensor, c: int, d: int, like: Tensor) -> Tensor:
    """Reorder a weight [z, c d] to [z, d c], in the dtype of `like`."""
    return like.new_empty(len(weight), d, c).copy_(weight.unflatten(-1, (c, d)).mT).flatten(1)


def _forward(t: Operands, strides: tuple[int, int], out: Tensor, share: Tensor) -> None:
    """Compute the result [B, positions, z] and 1 / count of each pair from a^T [B, s, c, i] and b [B, s, j, d].

    strides: the strides of i and j in positions of the result.
    """
    (batches, s, c, i), (_, _, j, d), z = t.turned.shape, t.b.shape, len(t.weight)
    kernel = FORWARD.tiled((s, c, z), t.b)
    tiles = batches * cdiv(i, kernel["TILE_I"]) * cdiv(j, kernel["TILE_J"])
    kernel.run(
        (tiles, cdiv(z, kernel["BLOCK_Z"])),
        a=t.turned,
        b=t.b,
        weight=cast_weight(t.weight, t.b, batches * i * j),
        bias=contiguous(t.bias),
        a_mask=t.a_mask.contiguous(),
        b_mask=t.b_mask.contiguous(),
        pair=contiguous(t.z),
        out=out,
        share=share,
        pitch=t.b.stride(2),
        stride_i=strides[0],
        stride_j=strides[1],
        added=t.added,
        least=t.least,
        BIAS_DIVIDED=t.bias_divided,
        S=s,
        I=i,
        J=j,
        C=c,
        D=d,
        Z=z,
        BLOCK_D=power_of_two(d),
    )


def _backward(
    t: Operands, a: Tensor, b: Tensor, da: Tensor, db: Tensor, mask: Tensor | None, of_weight: tuple[Tensor, ...]
) -> list[Sum]:
    """Write the gradients of the factors, times a mask [B, s, i] for both, and return the sums for `of_weight`.

    a [B, s, i, c] and b [B, s, d, j] are contiguous; da [B, s, i, c] and db [B, s, j, d] may have any strides.
    """
    grad, share, (dweight, dbias) = t.grad.contiguous(), t.share, of_weight
    (batches, s, i, c), (_, _, d, j), z = a.shape, b.shape, len(t.weight)
    weight, exchanged = t.weight.to(a.dtype).contiguous(), _exchanged(t.weight, c, d, a)
    i_rows, j_rows = (_rows_at_once(n * c * d * a.element_size()) for n in (j, i))
    chunks = cdiv(i, i_rows)
    weights = empty_partials(a, batches * chunks, z * c * d)
    shares = _parts_of_share(t, share)
    biases = empty_partials(a, batches * chunks * len(shares), z)
    work = a.new_empty(max(min(i, i_rows) * j, min(j, j_rows) * i) * c * d)
    for at, (own, first, end) in itertools.product(range(batches), chunks_of(i, i_rows, a)):
        number, n, some, of_chunk = at * chunks + own, end - first, grad[at, first:end], share[at, first:end]
        products = work[: n * j * c * d]
        _product(
            # [(i, c), (d, j)] to [c, d, i, j]
            Operand.of(a[at, :, first:], (i * c, c, 1), (n, c), (j, d * n * j), (j, 0)),
            Operand.of(b[at], (d * j, j, 1), (d, j), (n * j, 1), (0, 1)),
            of_chunk, products, s,
        )  # fmt: skip
        fp32_product(some.flatten(0, 1).t(), products.view(c * d, n * j).t(), weights[number].view(z, c * d))
        if len(shares):
            of_bias = biases[number * len(shares) : (number + 1) * len(shares)]
            fp32_product(shares[:, at, first:end].flatten(1), some.flatten(0, 1), of_bias)
        _product(
            # [(c, d), (i, j)] to [i, c, d, j]
            Operand.of(weight, (c * d, d, 1), (c, d), (d * j, j)),
            Operand.of(some, (1, j * z, z), (n, j), (c * d * j, 1), (j, 1)),
            of_chunk, products, z,
        )  # fmt: skip
        gradient = torch.mm(b[at].flatten(1), products.view(n * c, d * j).t()).view(s, n, c)
        _put(da[at, :, first:end], gradient, None if mask is None else mask[at, :, first:end])
    for at in range(batches):
        for _, first, end in chunks_of(j, j_rows, a):
            n = end - first
            products = work[: n * i * c * d]
            _product(
                # [(j, i), (d, c)] to [j, d, i, c]
                Operand.of(grad[at, :, first:], (1, z, j * z), (n, i), (d * i * c, c), (1, j)),
                Operand.of(exchanged, (d * c, c, 1), (d, c), (i * c, 1)),
                share[at, :, first:], products, z,
            )  # fmt: skip
            gradient = torch.mm(a[at].flatten(1), products.view(n * d, i * c).t()).view(s, n, d)
            _put(db[at, :, first:end], gradient, None if mask is None else mask[at, :, first:end])
    sums = [Sum(weights, (dweight,))]
    return sums if not len(shares) else [*sums, Sum(biases, (dbias,))]


def _rows_at_once(row_bytes: int) -> int:
    """Return the number of rows of a chunk, a multiple of 4, so that the tiles of 32 channels are full."""
    rows = max(1, CHUNK_BYTES // row_bytes)
    return rows if rows < 4 else rows // 4 * 4


def _parts_of_share(t: Operands, share: Tensor) -> Tensor:
    """Return the rows [n, B, i, j] that multiply `grad` for the gradient of the bias; no rows without a bias.

    In 16 bits 1 / count is the sum of two rows, because one row would be off by up to 0.4 % for all pairs with the same
    count.
    """
    if t.bias is None:
        return t.grad.new_empty(0, *share.shape)
    if not t.bias_divided:
        return t.grad.new_ones(1, *share.shape)
    parts = t.grad.new_empty(2, *share.shape)
    parts[0].copy_(share)
    torch.sub(share, parts[0], out=parts[1])
    return parts


def _product(left: Operand, right: Operand, share: Tensor, out: Tensor, depth: int) -> None:
    kernel = PRODUCTS.tiled((depth,), out)
    rows, columns = left.outer_size * left.inner_size, right.outer_size * right.inner_size
    programs = cdiv(rows, kernel["BLOCK_M"]) * cdiv(columns, kernel["BLOCK_N"])
    of_left, of_right = (any((side.outer_share, side.inner_share)) for side in (left, right))
    share_of = "both" if of_left and of_right else "left" if of_left else "right"
    kernel.run((programs,), left=left, right=right, share=share, out=out, depth=depth, SHARE_OF=share_of)


def _put(where: Tensor, values: Tensor, mask: Tensor | None) -> None:
    """Store values [s, i, c] times a mask [s, i]."""
    if mask is None:
        where.copy_(values)
    else:
        torch.mul(values, mask[..., None], out=where)
