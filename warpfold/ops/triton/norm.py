"""layer_norm and norm_linear on a GPU: from tensors to launches.

What is read and written, in tensors [*, c] or [*, o]: forward x and y, once each; backward of layer_norm grad, x and
dx, once each.  The backward of norm_linear reads grad and x twice, for the gradient of x and for that of the weight:
the two want different sums (over outputs, over positions), and one program cannot hold both ([o, c] in fp32 is
270 kB for the 520 outputs of 128 channels that a triangle attention has; a program's registers are 256 kB).
"""

import triton
from torch import Tensor

from warpfold.ops.norm import empty_projected, empty_statistics
from warpfold.ops.tensors import empty_like
from warpfold.ops.triton import norm_kernels, norm_linear_kernels
from warpfold.ops.triton.launch import launch
from warpfold.ops.triton.positions import channels_last, cuts, deliver, operand, power, walk
from warpfold.ops.triton.sums import partials_of, sum_partials

PROGRAMS = 1024  # at most, of the backward kernel of a norm alone: eight on each core of a large GPU
TILES = 256  # of gradients of a weight, where there are positions enough: two on each core of a large GPU
WIDEST = 256  # channels of 16 bits that a program of the projection holds


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """warpfold::layer_norm."""
    c, out, (mean, scale) = x.shape[-1], empty_like(x), empty_statistics(x)
    p, (x,), (y, _) = walk((x,), (out, mean[..., None]))
    unit = p.unit(0, 1)
    choice = launch("layer_norm", (c, x.element_size()), x.device)
    norm_kernels.FORWARD.run(
        (triton.cdiv(p.count, choice.sizes["BLOCK_M"]),),
        choice,
        *(x, weight.contiguous(), bias.contiguous(), y, mean, scale, p.count, p.sizes),
        *(p.of(0, x, unit), p.of(1, y, unit), p.of(2, mean), eps),
        C=c,
        AXES=p.axes,
        UNIT=unit,
        BLOCK_C=power(c),
    )
    deliver((out,), (y,))
    return out, mean, scale


def layer_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """warpfold::layer_norm_backward."""
    c, out = x.shape[-1], empty_like(x)
    p, (x, grad, *_), (dx,) = walk((x, grad, mean[..., None]), (out,))
    unit = p.unit(0, 1, 3)
    choice = launch("layer_norm_backward", (c, x.element_size()), x.device)
    programs = cuts(p.count, choice.sizes["BLOCK_M"], PROGRAMS)
    partials = partials_of(x, programs, 2 * c)
    norm_kernels.BACKWARD.run(
        (programs,),
        choice,
        *(grad, x, weight.contiguous(), mean, scale, dx, partials, p.count, p.sizes),
        *(p.of(1, grad, unit), p.of(0, x, unit), p.of(3, dx, unit), p.of(2, mean)),
        C=c,
        AXES=p.axes,
        UNIT=unit,
        BLOCK_C=power(c),
    )
    deliver((out,), (dx,))
    dweight, dbias = weight.new_empty(weight.shape), weight.new_empty(weight.shape)
    sum_partials(partials, dweight, dbias)
    return out, dweight, dbias


def norm_linear(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """warpfold::norm_linear."""
    c, outputs = x.shape[-1], weight.shape[0]
    out, (mean, scale) = empty_projected(x, outputs), empty_statistics(x)
    p, (x,), (y, _) = walk((x,), (out, mean[..., None]))
    units = p.unit(0), p.unit(1)
    wide = c > WIDEST or x.element_size() > 2
    kernel = norm_linear_kernels.WIDE.of(x) if wide else norm_linear_kernels.FORWARD
    choice = launch(kernel.name, (c, outputs), x.device)
    rows = triton.cdiv(p.count, choice.sizes["BLOCK_M"])
    weights = (norm_weight.contiguous(), norm_bias.contiguous(), operand(weight, x, p.count))
    kernel.run(
        (rows, triton.cdiv(outputs, choice.sizes["BLOCK_O"])) if wide else (rows,),
        choice,
        *(x, *weights, weights[-1] if bias is None else bias.contiguous(), y, mean, scale, p.count, p.sizes),
        *(p.of(0, x, units[0]), p.of(1, y, units[1]), p.of(2, mean), eps),
        C=c,
        OUTPUTS=outputs,
        PADDED=-(-outputs // 8) * 8 if y is out else outputs,
        BIAS=bias is not None,
        AXES=p.axes,
        X_UNIT=units[0],
        Y_UNIT=units[1],
        **({} if wide else {"BLOCK_C": power(c)}),
    )
    deliver((out,), (y,))
    return out, mean, scale


def norm_linear_backward(
    grad: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor,
    scale: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """warpfold::norm_linear_backward."""
    grad = channels_last(grad)
    dx, partials = _through_norm(grad, x, norm_weight, weight, mean, scale)
    dnorm_weight, dnorm_bias = norm_weight.new_empty(norm_weight.shape), norm_bias.new_empty(norm_bias.shape)
    sum_partials(partials, dnorm_weight, dnorm_bias)
    partials = _of_weight(grad, x, norm_weight, norm_bias, weight, bias is not None, mean, scale)
    dweight = weight.new_empty(weight.shape)
    dbias = weight.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    sum_partials(partials, dweight, dbias)
    return dx, dnorm_weight, dnorm_bias, dweight, dbias


def _through_norm(
    grad: Tensor, x: Tensor, norm_weight: Tensor, weight: Tensor, mean: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of x, and of those of the norm's parameters what each program adds."""
    c, outputs, out = x.shape[-1], weight.shape[0], empty_like(x)
    p, (x, grad, *_), (dx,) = walk((x, grad, mean[..., None]), (out,))
    unit, grad_unit = p.unit(0, 3), p.unit(1)
    kernel = norm_linear_kernels.BACKWARD.of(x)
    choice = launch(kernel.name, (c, outputs), x.device)
    programs = triton.cdiv(p.count, choice.sizes["BLOCK_M"])
    partials = partials_of(x, programs, 2 * c)
    kernel.run(
        (programs,),
        choice,
        *(grad, x, norm_weight.contiguous(), operand(weight, x, p.count), mean, scale, dx, partials, p.count, p.sizes),
        *(p.of(1, grad, grad_unit), p.of(0, x, unit), p.of(3, dx, unit), p.of(2, mean)),
        C=c,
        OUTPUTS=outputs,
        AXES=p.axes,
        G_UNIT=grad_unit,
        X_UNIT=unit,
        BLOCK_C=power(c),
    )
    deliver((out,), (dx,))
    return out, partials


def _of_weight(
    grad: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    biased: bool,
    mean: Tensor,
    scale: Tensor,
) -> Tensor:
    """Of the gradients of weight and bias what each span of positions adds.

    A kernel of our own and not torch.mm: that would want the normalised tensor written and read (twice c numbers of a
    position), grad read once more for the gradient of the bias, and its sums rounded to the dtype of x.
    """
    c, outputs = x.shape[-1], weight.shape[0]
    p, (x, grad, *_), _ = walk((x, grad, mean[..., None]), ())
    unit, grad_unit = p.unit(0), p.unit(1)
    kernel = norm_linear_kernels.WEIGHT.of(x)
    choice = launch(kernel.name, (c, outputs), x.device)
    tiles = triton.cdiv(outputs, choice.sizes["BLOCK_O"]), triton.cdiv(c, choice.sizes["BLOCK_C"])
    programs = cuts(p.count, choice.sizes["BLOCK_M"], max(1, TILES // (tiles[0] * tiles[1])))
    width = outputs * (c + biased)
    partials = partials_of(x, programs, width)
    kernel.run(
        (*tiles, programs),
        choice,
        *(grad, x, norm_weight.contiguous(), norm_bias.contiguous(), mean, scale, partials, p.count, p.sizes),
        *(p.of(1, grad, grad_unit), p.of(0, x, unit), p.of(2, mean)),
        C=c,
        OUTPUTS=outputs,
        BIAS=biased,
        AXES=p.axes,
        G_UNIT=grad_unit,
        X_UNIT=unit,
    )
    return partials
