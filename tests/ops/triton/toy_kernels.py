"""Small correct and incorrect kernels that test the analyses of kernels."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from warpfold.ops.triton.launch import Kernel, KernelConfig, KernelLaunch, TiledKernel, configs, recorded


@triton.jit
def _copy(x, y, rows, channels, stride, BLOCK: tl.constexpr):
    """y = x, one row per program, with offsets of the stride's bits."""
    row, c = tl.program_id(0), tl.arange(0, BLOCK)
    kept = c < channels
    tl.store(y + row * stride + c, tl.load(x + row * stride + c, mask=kept), mask=kept)


@triton.jit
def _copy_wide(x, y, rows, channels, stride, BLOCK: tl.constexpr):
    """The same with 64-bit offsets."""
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    kept = c < channels
    tl.store(y + row * stride + c, tl.load(x + row * stride + c, mask=kept), mask=kept)


@triton.jit
def _copy_late(x, y, rows, channels, stride, BLOCK: tl.constexpr):
    """Widens offsets after the product, which is too late."""
    row, c = tl.program_id(0), tl.arange(0, BLOCK)
    kept = c < channels
    start = (row * stride).to(tl.int64)
    tl.store(y + start + c, tl.load(x + start + c, mask=kept), mask=kept)


@triton.jit
def _copy_walking(x, y, rows, channels, stride, BLOCK: tl.constexpr):
    """One program whose offset grows with each iteration."""
    c = tl.arange(0, BLOCK)
    kept, start = c < channels, 0
    for _ in range(rows):
        tl.store(y + start + c, tl.load(x + start + c, mask=kept), mask=kept)
        start += stride


@triton.jit
def _copy_looking_up(x, y, rows, channels, stride, BLOCK: tl.constexpr):
    """Copies the row whose number is in x; the number of rows is unknown."""
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    kept = c < channels
    other = tl.load(x + row).to(tl.int64) * stride
    tl.store(y + row * stride + c, tl.load(x + other + c, mask=kept), mask=kept)


@triton.jit
def _copy_until(x, y, rows, channels, stride, BLOCK: tl.constexpr):
    """Copies as many rows as the last one says, but at most all."""
    c = tl.arange(0, BLOCK)
    kept = c < channels
    fewest = tl.zeros([BLOCK], tl.int32) + rows
    for row in range(rows):
        held = tl.load(x + row.to(tl.int64) * stride + c, mask=kept, other=0)
        fewest = tl.minimum(fewest, tl.where(held > 0, c, rows))
    for row in range(tl.min(fewest, 0)):
        start = row * stride
        tl.store(y + start + c, tl.load(x + start + c, mask=kept), mask=kept)


@triton.jit
def _copy_uneven(x, y, rows, channels, stride, BLOCK: tl.constexpr):
    """The same with a width that is no power of two, which the interpreter accepts and compilers reject."""
    i = tl.program_id(0) * stride + tl.arange(0, BLOCK - BLOCK // 4)
    tl.store(y + i, tl.load(x + i))


@triton.jit
def _product(x, y, z, n, stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """z = x y for matrices whose sizes are multiples of the blocks."""
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None] * stride
    columns, k = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, n, BLOCK_K):
        a = tl.load(x + m + start + k)
        b = tl.load(y + (start + k).to(tl.int64)[:, None] * stride + columns)
        sums = tl.dot(a, b, sums)
    tl.store(z + m + columns, sums.to(z.dtype.element_ty))


COPY, WIDE, LATE, WALKING, LOOKING_UP, UNTIL, UNEVEN = (
    Kernel(f.__name__, f, configs("BLOCK", (64, 1, 1), (128, 2, 1)))
    for f in (_copy, _copy_wide, _copy_late, _copy_walking, _copy_looking_up, _copy_until, _copy_uneven)
)
SMALL_TILES, GIANT_TILES = configs("BLOCK_M BLOCK_N BLOCK_K", (64, 64, 32, 4, 2), (128, 256, 64, 4, 6))
PRODUCT = Kernel("_product", _product, (SMALL_TILES, GIANT_TILES))


def launch_of(kernel: Kernel, grid: tuple[int, ...], config: KernelConfig, **arguments: Any) -> KernelLaunch:
    """Make a launch of the kernel."""
    with recorded() as launches:
        TiledKernel(kernel, (), config, torch.device("meta")).run(grid, **arguments)
    return launches[0]


def copy_launch(kernel: Kernel, rows: int, stride: int, programs: int | None = None) -> KernelLaunch:
    """Make a launch that copies [rows, 64] in fp32, with this stride of rows."""
    x = torch.empty_strided((rows, 64), (stride, 1), device="meta")
    grid = (rows if programs is None else programs,)
    return launch_of(kernel, grid, kernel.candidates[0], x=x, y=x, rows=rows, channels=64, stride=stride)


def product_launch(config: KernelConfig, dtype: torch.dtype, n: int = 1024) -> KernelLaunch:
    """Make a launch of a product of two [n, n] matrices."""
    x: Tensor = torch.empty(n, n, dtype=dtype, device="meta")
    return launch_of(PRODUCT, (n // config.sizes["BLOCK_M"],), config, x=x, y=x, z=x, n=n, stride=n)
