"""triangle_factor on a GPU: gated, masked and laid out for the product in one pass, by the functions of `gate`.

triangle_multiplication on a GPU, in 16 bits: two kernels and a product forward, four and two products backward.

A plane is [*, h, n, n], channels in front, its rows padded to whole sectors of memory, so that any n is read in wide
words and multiplied by the quick products of the vendor's library, which want rows of 16 bytes.

What is read and written, in tensors the size of x (T: 16.8 MB for 256 residues, 128 channels, bf16), and the products
of matrices in GFLOP there:

    forward   factors: x -> a, b                                            3 T    8.6
              product: a, b -> product                                      3 T    4.3
              out: x, product -> y (the gate's logits are made again:
                  x is read for the residual anyway)                        3 T    4.3
    backward  out: grad, x, product -> dproduct, dprojected, dgate          6 T    6.4
              products: dproduct, b -> da; a, dproduct -> db                6 T    8.6
              out's weights: x, product, dprojected, dgate                  4 T    4.3
              factors' weights: x, da, db                                   3 T   17.2
              factors: grad, x, da, db, dgate -> dx                         6 T   19.3

Forward 9 T (151 MB), backward 25 T (419 MB) and 2 T of partial sums; programs that run at a time share x in the second
cache.  A model and not measured, for an H100 of 3 TB/s and 600 TFLOP/s in products: 50 us forward (its products 29),
150 us backward (its products 93).  As operations one after another (norm_linear, two of triangle_factor, the product,
norm_linear, gate, dropout, the residual) the layer moved 25 T forward: 140 us.

The gradients of a's and b's projections (4 T, written once and read twice, 70 us) are never in memory: the two kernels
that want them make the projections again, 8.6 GFLOP or 14 us each.  a, b and their product are kept (3 T): to make a
and b again would cost 3 T and 8.6 GFLOP more, some 20 us of 200.  Whoever lacks the memory recomputes the whole layer.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch import Tensor

from warpfold.ops.dispatch import Operands
from warpfold.ops.norm import empty_statistics
from warpfold.ops.tensors import empty_like, empty_parameters
from warpfold.ops.triangle import empty_factor, empty_planes, row_pitch
from warpfold.ops.triton.gate import gate_backward_kernel, gate_kernel, run_gate, run_gate_backward
from warpfold.ops.triton.launch import Kernel, TiledKernel, configs, register
from warpfold.ops.triton.noise import SCALARS, DropoutOperands, fill
from warpfold.ops.triton.positions import (
    Axes,
    Strided,
    Sum,
    cast_weight,
    coalesce,
    contiguous,
    empty_partials,
    or_unwanted,
    power_of_two,
    programs_for,
    sum_partials,
)
from warpfold.ops.triton.triangle_kernels import (
    FACTORS,
    FACTORS_BACKWARD,
    FACTORS_WEIGHT,
    OUT,
    OUT_BACKWARD,
    OUT_WEIGHT,
)

# Whole sectors of memory along both axes: the kernel reads along one and writes along the other.
_FACTOR_TILES = configs(
    "BLOCK_M BLOCK_C", *((m, c, warps, 1) for m in (32, 64, 128) for c in (32, 64) for warps in (4, 8))
)
FACTOR = register("triangle_factor", gate_kernel, _FACTOR_TILES)
FACTOR_BACKWARD = register("triangle_factor_backward", gate_backward_kernel, _FACTOR_TILES)


def triangle_factor(t: Operands) -> Tensor:
    """Compute warpfold::triangle_factor."""
    out = empty_factor(t.y)
    run_gate(FACTOR, t.y, t.g, t.mask, out.movedim(-3, -1))
    return out


def triangle_factor_backward(t: Operands) -> tuple[Tensor, Tensor]:
    """Compute warpfold::triangle_factor_backward."""
    dy, dg = empty_like(t.y), empty_like(t.g)
    run_gate_backward(FACTOR_BACKWARD, t.grad.movedim(-3, -1), t.y, t.g, t.mask, dy, dg)
    return dy, dg


PROGRAMS = 256  # of a weight's gradient, where there are positions enough: two on each core of a large GPU
STATISTICS = "mean", "scale", "out_mean", "out_scale"


def triangle_multiplication(t: Operands) -> tuple[Tensor, ...]:
    """Compute warpfold::triangle_multiplication."""
    x = t.x
    statistics = *empty_statistics(x), *empty_statistics(x)
    call = _Call(t.but(**dict(zip(STATISTICS, statistics))))
    a, b, product = (empty_planes(x, call.hidden) for _ in range(3))
    kernel = call.tiled(FACTORS)
    call.launch(kernel, (call.blocks(kernel),), {"a": channels_last(a), "b": channels_last(b)}, eps=t.eps)
    left, right, p = _matrices(a, b, product)
    if t.outgoing:
        torch.bmm(left, right.mT, out=p)
    else:
        torch.bmm(right.mT, left, out=p)
    out, kernel = empty_like(x), call.tiled(OUT)
    with call.written(out) as y:
        call.launch(kernel, (call.blocks(kernel),), {"product": channels_last(product), "y": y}, eps=t.eps)
    return (out, a, b, product, *statistics) if t.kept else (out, *(x.new_empty(0) for _ in range(7)))


def triangle_multiplication_backward(t: Operands) -> tuple[Tensor, ...]:
    """Compute warpfold::triangle_multiplication_backward."""
    x = t.x
    into = t.norm_weight, t.norm_bias, t.weight, t.bias
    out_of = t.out_norm_weight, t.out_norm_bias, t.out_weight, t.out_bias
    call = _Call(t)
    gradients = empty_parameters(*into, *out_of)
    dnorm, dnorm_bias, dweight, dbias, dout_norm, dout_norm_bias, dout_weight, dout_bias = gradients
    dproduct, dprojected, dgate = empty_planes(x, call.hidden), x.new_empty(x.shape), x.new_empty(x.shape)
    read = {"product": channels_last(t.product), "dprojected": dprojected, "dgate": dgate}

    kernel = call.tiled(OUT_BACKWARD)
    partials = empty_partials(x, call.blocks(kernel), 2 * call.hidden)
    tensors = read | {"grad": t.grad, "dproduct": channels_last(dproduct)}
    call.launch(kernel, (call.blocks(kernel),), tensors, partials=partials)
    sums = [Sum(partials, (dout_norm, or_unwanted(dout_norm_bias, partials, call.hidden)))]

    dfactors = _factor_gradients(t.a, t.b, dproduct, t.outgoing)
    factors_read = {"dfactors": channels_last(dfactors[0])}
    apart = dfactors.stride(0)
    sums += call.weight_sums(read, factors_read, apart, (dweight, dbias, dout_weight, dout_bias))

    dx, kernel = empty_like(x), call.tiled(FACTORS_BACKWARD)
    partials = empty_partials(x, call.blocks(kernel), 2 * call.channels)
    with call.written(dx) as y:
        tensors = {"grad": t.grad, "dgate": dgate, "dx": y, **factors_read}
        call.launch(kernel, (call.blocks(kernel),), tensors, partials=partials, apart=apart)
    sum_partials(*sums, Sum(partials, (dnorm, or_unwanted(dnorm_bias, partials, call.channels))))
    return dx, *gradients


def channels_last(plane: Tensor) -> Tensor:
    """Return a plane [*, h, n, n] as [*, n, n, h], where it lies."""
    return plane.movedim(-3, -1)


def _matrices(*planes: Tensor) -> list[Tensor]:
    """Return planes [*, h, n, n] as matrices one after another, [., n, n], where they lie."""
    return [plane.flatten(0, -3) for plane in planes]


def _factor_gradients(a: Tensor, b: Tensor, dproduct: Tensor, outgoing: bool) -> Tensor:
    """Return the gradients of both factors, [2, *, h, n, n], their rows padded as the factors' are."""
    dfactors = a.new_empty(2, *a.shape[:-1], a.stride(-2))[..., : a.shape[-1]]
    left, right, d = _matrices(a, b, dproduct)
    da, db = _matrices(*dfactors)
    torch.bmm(*((d, right) if outgoing else (right, d)), out=da)
    torch.bmm(*((d.mT, left) if outgoing else (left, d.mT)), out=db)
    return dfactors


class _Call:
    """What every kernel of a call is given, by the names of arguments; each takes those that it has."""

    def __init__(self, t: Operands) -> None:
        x = self.x = t.x
        self.n, self.channels, self.hidden = x.shape[-2], x.shape[-1], t.out_weight.shape[1]
        self.pitch = row_pitch(x)
        self.batches = x.numel() // (self.n**2 * self.channels)
        self.positions = self.batches * self.n * self.pitch
        self.tensors = {"x": x, "mask": t.mask[..., None], "mean": t.mean[..., None]}
        whole = "norm_weight", "norm_bias", "bias", "out_norm_weight", "out_norm_bias", "out_bias"
        self.arguments: dict[str, Any] = {
            **{name: contiguous(getattr(t, name)) for name in whole},
            "weight": cast_weight(t.weight, x, self.positions),
            "out_weight": cast_weight(t.out_weight, x, self.positions),
            "rstd": t.scale,
            "out_mean": t.out_mean,
            "out_rstd": t.out_scale,
            "n": self.n,
            "C": self.channels,
            "HIDDEN": self.hidden,
            "BIASED": 0 if t.bias is None else len(t.bias),
            "FUSED": t.fused,
            "RESIDUAL": t.residual,
            "PADDED": self.pitch != self.n,
            "BLOCK_C": power_of_two(self.channels),
            "BLOCK_H": power_of_two(self.hidden),
            **self._dropped(x, DropoutOperands(x, t)),
        }

    def tiled(self, kernel: Kernel) -> TiledKernel:
        """Return a kernel with its configuration for these channels."""
        return kernel.tiled((power_of_two(max(self.channels, self.hidden)),), self.x)

    def blocks(self, kernel: TiledKernel) -> int:
        """Return how many blocks of positions there are."""
        return triton.cdiv(self.positions, kernel["BLOCK_M"])

    def weight_sums(
        self, out_tensors: dict[str, Tensor], factor_tensors: dict[str, Tensor], apart: int, wanted: Sequence[Tensor]
    ) -> tuple[Sum, Sum]:
        """Return what is to be summed for the gradients of the output's weight and bias, of the joined weight and bias.

        wanted: the latter two, then the former;
        out_tensors, factor_tensors: what the kernels read, `apart` from one factor's gradient to the other's.
        """
        dweight, dbias, dout_weight, dout_bias = wanted
        rows = 4 * self.hidden  # of the weight that make a, b and their gates; the rest, the product's
        of_out, of_factors = (dweight[rows:], dbias[rows:], dout_weight, dout_bias), (dweight[:rows], dbias[:rows])
        kernel = self.tiled(OUT_WEIGHT)
        chunks = triton.cdiv(self.channels, kernel["BLOCK_O"])
        outs = self.span_partials(kernel, chunks, PROGRAMS // 2, of_out)
        self.launch(kernel, (chunks, len(outs)), out_tensors, partials=outs)
        kernel = self.tiled(FACTORS_WEIGHT)
        chunks = 2 * triton.cdiv(self.hidden, kernel["BLOCK_O"])
        partials = self.span_partials(kernel, chunks, PROGRAMS, of_factors)
        self.launch(kernel, (chunks, len(partials)), factor_tensors, partials=partials, apart=apart)
        return Sum(outs, of_out), Sum(partials, of_factors)

    def span_partials(self, kernel: TiledKernel, chunks: int, programs: int, sums: Sequence[Tensor]) -> Tensor:
        """Allocate what programs add up to these sums: a row for each span of positions, which `chunks` share."""
        spans = programs_for(self.positions, kernel["BLOCK_M"], max(1, programs // chunks))
        return empty_partials(self.x, spans, sum(t.numel() for t in sums))

    def launch(self, kernel: TiledKernel, grid: tuple[int, ...], tensors: dict[str, Tensor], **more: Any) -> None:
        """Launch a kernel over tensors [*, n, n, .], the layer's own among them."""
        names = kernel.kernel.function.arg_names
        walked = {name: self.flat(t) for name, t in (self.tensors | tensors).items() if name in names}
        axes, layouts = _walk(self.batches, self.n, self.pitch, tuple([t.stride() for t in walked.values()]))
        strided = {name: Strided(t, *layout) for (name, t), layout in zip(walked.items(), layouts)}
        key = self.arguments["key"]
        if key is not None and "factors" in strided:  # as in `DropoutOperands.walked_with`
            strided["factors"] = strided["factors"]._replace(data=key)
        given = {"factors": None, **self.arguments, **strided, "axes": axes, **more}
        kernel.run(grid, **{name: given[name] for name in names if name in given})

    def flat(self, t: Tensor) -> Tensor:
        """Return t [*, n, n, .] with one leading axis: as it lies, or a copy."""
        return t.reshape(self.batches, *t.shape[-3:])

    @contextmanager
    def written(self, out: Tensor) -> Iterator[Tensor]:
        """Give what to write within the context, [., n, n, c]: `out`, or what is copied there at its end."""
        if _one_axis(out):
            yield self.flat(out)
            return
        apart = out.new_empty(self.batches, *out.shape[-3:])
        yield apart
        out.copy_(apart.view(out.shape))

    def _dropped(self, x: Tensor, dropout: DropoutOperands) -> dict[str, Any]:
        """Note the dropout factors among the tensors, and return the other arguments about them."""
        if dropout.of is not None and dropout.key is not None and not _one_axis(dropout.of):
            # They are walked along one leading axis: draw first, once for each element that differs.
            shape = [1 if stride == 0 else size for size, stride in zip(x.shape, dropout.of.stride())]
            drawn = x.new_empty(shape)
            fill(drawn, dropout.key, dropout.number, dropout.of.stride(), dropout.draw)
            dropout.of, dropout.key = drawn.expand(x.shape), None
        if dropout.of is not None:
            self.tensors["factors"] = dropout.of
        return {"key": dropout.key, "number": dropout.number, **dict(zip(SCALARS[1:], dropout.draw))}


@functools.lru_cache(maxsize=4096)  # models have few shapes
def _walk(
    batches: int, n: int, pitch: int, strides: tuple[tuple[int, ...], ...]
) -> tuple[Axes, tuple[tuple[tuple[int, ...], Any], ...]]:
    """Return the axes of positions, and of tensors [., n, n, .] of these strides those of a `Strided`, and its unit.

    In the order of rows that are padded as those of planes are; where none is, they may be one axis.
    """
    found = coalesce((batches, n, pitch), (n * pitch, pitch, 1), *(each[:3] for each in strides))
    assert found is not None  # three axes are never too many
    laid = (Strided.of(None, own, 8, each[3]) for own, each in zip(found.strides[1:], strides))
    return found.argument, tuple((one.strides, one.unit) for one in laid)


def _one_axis(t: Tensor) -> bool:
    """Return whether the leading axes of t [*, n, n, c] are one in memory."""
    leading = coalesce(t.shape[:-3], t.stride()[:-3])
    return leading is not None and leading.axes == 1
