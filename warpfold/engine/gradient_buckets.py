"""Flat gradient buffers in buckets, and where the gradient of each parameter lies in them (engine/mean.py)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from warpfold.engine.flat_buffer import FlatBuffer
from warpfold.errors import UserError
from warpfold.parallel.buckets import ALIGN


@dataclass(frozen=True)
class GradientLeaf:
    """A parameter, where its gradient goes, and the buckets in which that lies."""

    name: str
    parameter: nn.Parameter
    view: Tensor
    node: Node
    buckets: tuple[int, ...]


@dataclass(frozen=True)
class FlatBucket:
    """A part of a flat buffer that is sent at once; leaves: numbers of the parameters that lie in it, or partly."""

    buffer: int
    where: slice
    leaves: tuple[int, ...]


def cut(size: int, itemsize: int, bucket_bytes: float, ranks: int) -> list[slice]:
    """Cut a buffer into buckets of about `bucket_bytes` from its end; the first, whose gradients come last, is less.

    Every length divides by ALIGN times the ranks, as `size` does.
    """
    unit = ALIGN * ranks
    step = max(1, round(bucket_bytes / itemsize / unit)) * unit
    ends = range(size, 0, -step)
    return [slice(max(0, end - step), end) for end in ends]


def put(leaf: GradientLeaf, scale: float) -> None:
    """Put a gradient, scaled, into its place, while it is in the caches."""
    grad = leaf.parameter.grad
    if grad is None:
        leaf.view.zero_()
        return
    if grad.layout != torch.strided:
        raise UserError(f"{leaf.name}: its gradient is sparse, which flat buffers do not hold; set sparse=False")
    if grad.requires_grad:
        grad = grad.detach()
    if scale != 1:
        torch.mul(grad, scale, out=leaf.view)
    elif grad is not leaf.view:
        leaf.view.copy_(grad)
    if grad is not leaf.view:
        leaf.parameter.grad = leaf.view


def gaps(buffer: FlatBuffer) -> Tensor:
    """Return the indices of the numbers that lie between parameters."""
    between = torch.ones(len(buffer.gradient), dtype=torch.bool)
    for place in buffer.places.values():
        between[place] = False
    return between.nonzero().flatten().to(buffer.gradient.device)
