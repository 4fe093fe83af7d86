"""What every kernel that normalises does with a tile of positions."""

import triton
import triton.language as tl


@triton.jit
def statistics(v: tl.tensor, valid: tl.tensor, eps: tl.tensor, C: tl.constexpr) -> tl.tuple:
    """Return of channels v [m, c] in fp32 the deviations from the mean [m, c], the mean and 1 / deviation [m].

    v is 0 where it is not valid.  The mean is corrected by the mean of the deviations: of channels around 1e4 its first
    rounding would be seen.
    """
    mean = tl.sum(v, 1) / C
    d = tl.where(valid, v - mean[:, None], 0.0)
    rest = tl.sum(d, 1) / C
    d = tl.where(valid, d - rest[:, None], 0.0)
    return d, mean + rest, tl.rsqrt(tl.sum(d * d, 1) / C + eps)


@triton.jit
def shifted(n: tl.tensor, bias: tl.tensor, c: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """Return n [m, c] plus a norm's bias, if it has one."""
    if bias is not None:
        return n + tl.load(bias + c, mask=c < C, other=0).to(tl.float32)[None, :]
    else:  # not after the `if`: Triton compiles what follows it
        return n
