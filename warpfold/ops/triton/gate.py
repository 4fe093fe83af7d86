"""gate and tail on a GPU: from tensors to launches.

Forward, gate reads x and g and writes y; tail reads x, o, g and writes y.  Backward, gate reads grad, x, g and writes
dx, dg; tail reads grad, o, g twice, for the gradients of o and g and for that of the weight, as `norm` says.  One
pass for both was tried, for weights of 128 x 128: compiled for sm_80, sm_90 and gfx942 its registers are spilled.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from warpfold.ops.tensors import empty_like
from warpfold.ops.triton import gate_kernels, noise, tail_kernels
from warpfold.ops.triton.launch import Kernel, launch
from warpfold.ops.triton.positions import Positions, Tensors, channels_last, cuts, deliver, operand, walk
from warpfold.ops.triton.sums import partials_of, sum_partials

TILES = 256  # of the gradient of a weight: as in `norm`


def gate(x: Tensor, g: Tensor) -> Tensor:
    """warpfold::gate."""
    out = empty_like(x)
    x, g, y = _innermost_last(x, g, out)
    gated(gate_kernels.FORWARD, x, g, y, None)
    return out


def gate_backward(grad: Tensor, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """warpfold::gate_backward."""
    out = empty_like(x), empty_like(g)
    x, g, grad, *last = _innermost_last(x, g, grad, *out)
    gated_backward(gate_kernels.BACKWARD, grad, x, g, (last[0], last[1]), None)
    return out


def gated(kernel: Kernel, x: Tensor, g: Tensor, out: Tensor, mask: Tensor | None) -> None:
    """x * sigmoid(g) into `out`, all [*, c] of any strides, times the mask [*]."""
    given = (x, g) if mask is None else (x, g, mask[..., None])
    p, (x, g, *kept), (y,) = walk(given, (out,))
    unit, y_unit, c = p.unit(0, 1), p.unit(len(given)), x.shape[-1]
    choice = launch(kernel.name, (c, x.element_size()), x.device)
    kernel.run(
        (triton.cdiv(p.count, choice.sizes["BLOCK_M"]), triton.cdiv(c, choice.sizes["BLOCK_C"])),
        choice,
        *(x, g, *(kept or [x]), y, p.count, p.sizes),
        *(p.of(0, x, unit), p.of(1, g, unit), p.of(len(given) - 1, g), p.of(len(given), y, y_unit)),
        C=c,
        MASKED=mask is not None,
        AXES=p.axes,
        UNIT=unit,
        Y_UNIT=y_unit,
    )
    deliver((out,), (y,))


def gated_backward(
    kernel: Kernel, grad: Tensor, x: Tensor, g: Tensor, out: tuple[Tensor, Tensor], mask: Tensor | None
) -> None:
    """The gradients of x and g into `out`, given that of `gated`."""
    given = (x, g, grad) if mask is None else (x, g, grad, mask[..., None])
    p, (x, g, grad, *kept), (dx, dg) = walk(given, out)
    n = len(given)
    unit, y_unit, c = p.unit(0, 1, n, n + 1), p.unit(2), x.shape[-1]
    choice = launch(kernel.name, (c, x.element_size()), x.device)
    kernel.run(
        (triton.cdiv(p.count, choice.sizes["BLOCK_M"]), triton.cdiv(c, choice.sizes["BLOCK_C"])),
        choice,
        *(grad, x, g, *(kept or [x]), dx, dg, p.count, p.sizes),
        *(p.of(2, grad, y_unit), p.of(0, x, unit), p.of(1, g, unit), p.of(n - 1, g)),
        *(p.of(n, dx, unit), p.of(n + 1, dg, unit)),
        C=c,
        MASKED=mask is not None,
        AXES=p.axes,
        UNIT=unit,
        Y_UNIT=y_unit,
    )
    deliver(out, (dx, dg))


@dataclass(frozen=True)
class _Kept:
    """Dropout factors as the kernels take them: given, to be drawn by the kernel, or none.

    at: the factors that are given; or a tensor on "meta" whose strides are those of the numbers to be drawn for; or,
    where nothing is dropped, any tensor of that shape.
    """

    at: Tensor
    key: Tensor | None = None
    offset: int = 0
    draw: tuple[int, float, float] = (0, 0.0, 0.0)
    dropped: bool = True

    @property
    def pointer(self) -> Tensor:
        return self.at if self.key is None else self.key

    @property
    def scalars(self) -> tuple[int, int, float, float]:
        return self.offset, *self.draw

    @property
    def flags(self) -> dict[str, bool]:
        return {"FACTORS": self.dropped, "DRAWN": self.key is not None}


def _kept(
    x: Tensor,
    factors: Tensor | None,
    key: Tensor | None,
    strides: Sequence[int],
    offset: int,
    stream: int,
    rate: float,
) -> _Kept:
    if key is not None:
        numbers = torch.empty_strided(x.shape, tuple(strides), device="meta")
        return _Kept(numbers, key, offset, noise.scalars(stream, rate, x.dtype))
    return _Kept(x, dropped=False) if factors is None else _Kept(factors.expand(x.shape))


def _walk(inputs: Tensors, kept: _Kept, outputs: Tensors) -> tuple[Positions, Tensors, _Kept, Tensors]:
    """As `walk`, with the factors after the inputs."""
    p, (*read, at), written = walk((*inputs, kept.at), outputs)
    if kept.key is not None and at is not kept.at:  # it wants a copy in order, and "meta" holds nothing: draw it first
        shape = [1 if stride == 0 else size for size, stride in zip(kept.at.shape, kept.at.stride())]
        drawn = inputs[0].new_empty(shape)
        noise.fill(drawn, kept.key, kept.offset, kept.at.stride(), kept.draw)
        return _walk(inputs, _Kept(drawn.expand(kept.at.shape)), outputs)
    return p, tuple(read), _Kept(at, kept.key, kept.offset, kept.draw, kept.dropped), written


def gated_linear_residual(
    x: Tensor,
    o: Tensor,
    g: Tensor,
    weight: Tensor,
    bias: Tensor,
    factors: Tensor | None,
    key: Tensor | None,
    strides: Sequence[int],
    offset: int,
    stream: int,
    rate: float,
) -> Tensor:
    """warpfold::gated_linear_residual."""
    c, inputs, out = x.shape[-1], o.shape[-1], empty_like(x)
    kept = _kept(x, factors, key, strides, offset, stream, rate)
    p, (x, o, g), kept, (y,) = _walk((x, channels_last(o), channels_last(g)), kept, (out,))
    unit, kept_unit = p.unit(0, 1, 2, 4), p.unit(3)
    kernel = tail_kernels.FORWARD.of(x)
    choice = launch(kernel.name, (c, inputs), x.device)
    kernel.run(
        (triton.cdiv(p.count, choice.sizes["BLOCK_M"]), triton.cdiv(c, choice.sizes["BLOCK_C"])),
        choice,
        *(x, o, g, operand(weight, x, p.count), bias.contiguous(), kept.pointer, y),
        *(p.count, p.sizes),
        *(p.of(0, x, unit), p.of(1, o, unit), p.of(2, g, unit)),
        *(p.of(3, kept.at, kept_unit), p.of(4, y, unit)),
        *kept.scalars,
        C=c,
        INPUTS=inputs,
        **kept.flags,
        AXES=p.axes,
        UNIT=unit,
        F_UNIT=kept_unit,
    )
    deliver((out,), (y,))
    return out


def gated_linear_residual_backward(
    grad: Tensor,
    o: Tensor,
    g: Tensor,
    weight: Tensor,
    bias: Tensor,
    factors: Tensor | None,
    key: Tensor | None,
    strides: Sequence[int],
    offset: int,
    stream: int,
    rate: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """warpfold::gated_linear_residual_backward."""
    kept = _kept(grad, factors, key, strides, offset, stream, rate)
    grad, o, g = channels_last(grad), channels_last(o), channels_last(g)
    do, dg = _through_gate(grad, o, g, weight, kept)
    partials = _of_weight(grad, o, g, kept)
    dweight, dbias = weight.new_empty(weight.shape), bias.new_empty(bias.shape)
    sum_partials(partials, dweight, dbias)
    return do, dg, dweight, dbias


def _through_gate(grad: Tensor, o: Tensor, g: Tensor, weight: Tensor, kept: _Kept) -> tuple[Tensor, Tensor]:
    """The gradients of o and g."""
    c, inputs, out = grad.shape[-1], o.shape[-1], (empty_like(o), empty_like(g))
    p, (grad, o, g), kept, (do, dg) = _walk((grad, o, g), kept, out)
    unit, kept_unit = p.unit(0, 1, 2, 4, 5), p.unit(3)
    kernel = tail_kernels.BACKWARD.of(o)
    choice = launch(kernel.name, (inputs, c), o.device)
    kernel.run(
        (triton.cdiv(p.count, choice.sizes["BLOCK_M"]), triton.cdiv(inputs, choice.sizes["BLOCK_I"])),
        choice,
        *(grad, o, g, operand(weight, o, p.count), kept.pointer, do, dg),
        *(p.count, p.sizes),
        *(p.of(0, grad, unit), p.of(1, o, unit), p.of(2, g, unit), p.of(3, kept.at, kept_unit)),
        *(p.of(4, do, unit), p.of(5, dg, unit)),
        *kept.scalars,
        C=c,
        INPUTS=inputs,
        **kept.flags,
        AXES=p.axes,
        UNIT=unit,
        F_UNIT=kept_unit,
    )
    deliver(out, (do, dg))
    return out


def _of_weight(grad: Tensor, o: Tensor, g: Tensor, kept: _Kept) -> Tensor:
    """Of the gradients of weight and bias what each span of positions adds."""
    c, inputs = grad.shape[-1], o.shape[-1]
    p, (grad, o, g), kept, _ = _walk((grad, o, g), kept, ())
    unit, kept_unit = p.unit(0, 1, 2), p.unit(3)
    kernel = tail_kernels.WEIGHT.of(o)
    choice = launch(kernel.name, (c, inputs), o.device)
    tiles = triton.cdiv(c, choice.sizes["BLOCK_C"]), triton.cdiv(inputs, choice.sizes["BLOCK_I"])
    programs = cuts(p.count, choice.sizes["BLOCK_M"], max(1, TILES // (tiles[0] * tiles[1])))
    partials = partials_of(o, programs, c * (inputs + 1))
    kernel.run(
        (*tiles, programs),
        choice,
        *(grad, o, g, kept.pointer, partials, p.count, p.sizes),
        *(p.of(0, grad, unit), p.of(1, o, unit), p.of(2, g, unit), p.of(3, kept.at, kept_unit)),
        *kept.scalars,
        C=c,
        INPUTS=inputs,
        **kept.flags,
        AXES=p.axes,
        UNIT=unit,
        F_UNIT=kept_unit,
    )
    return partials


def _innermost_last(*tensors: Tensor) -> Tensors:
    """Views whose last axis is the one that lies innermost in memory in the first of them."""
    x = tensors[0]
    axes = [axis for axis in range(x.dim()) if x.shape[axis] != 1] or [x.dim() - 1]
    inner = min(reversed(axes), key=x.stride)
    return tuple(t.transpose(inner, -1) for t in tensors)
