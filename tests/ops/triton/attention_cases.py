"""Inputs of attention as the layers give them, what it makes of them, and what is wrong with that."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from warpfold.check.checks import truth
from warpfold.ops.attention import attention

GUARD = 512  # elements of NaN around a tensor, and where it has them between its vectors


@dataclass(frozen=True)
class Case:
    """Sizes and layout of one call; lead: the axes before queries and keys, of which the last are rows.

    layout: "row" (q, k and v parts of one projection [*, rows, K, c]), "column" (the same, turned), "own" (each a
    tensor of its own).  bias: "none", "shared" (one for all), "batched" (one for each of the leading axes but rows).
    mask: "clear", "random" (and one row masked throughout), "tail" (a padded end, of another length in each row).
    """

    lead: tuple[int, ...] = (3,)
    queries: int = 37
    keys: int = 37
    heads: int = 2
    width: int = 16
    layout: str = "row"
    bias: str = "shared"
    mask: str = "random"

    def __str__(self) -> str:
        shape = "x".join(map(str, (*self.lead, self.queries, self.keys, self.heads, self.width)))
        return f"{shape}-{self.layout}-{self.bias}-{self.mask}"


@dataclass
class Inputs:
    """q, k, v, mask and bias of a call, and the gradient of its output."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor
    bias: Tensor | None
    grad: Tensor


def guarded(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """A tensor to be filled, NaN, in the middle of NaN."""
    count = torch.Size(shape).numel()
    return torch.full((count + 2 * GUARD,), float("nan"), dtype=dtype, device=device)[GUARD : GUARD + count].view(shape)


def inputs(case: Case, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Inputs:
    """Random numbers, drawn on the CPU; what lies between and around them is NaN."""
    g = torch.Generator().manual_seed(seed)

    def fill(view: Tensor) -> Tensor:
        return view.copy_(torch.randn(view.shape, generator=g))

    outer, rows = case.lead[:-1], case.lead[-1:]
    lead, vectors = tuple(case.lead), (case.heads, case.width)
    if case.layout == "own":
        lengths = (case.queries, case.keys, case.keys)
        q, k, v = (fill(guarded((*lead, n, *vectors), dtype, device)) for n in lengths)
    else:
        c = case.heads * case.width
        padded = -(-(4 * c + case.heads) // 16) * 16
        turned = case.layout == "column"
        x = guarded((*outer, *((case.keys, *rows) if turned else (*rows, case.keys)), padded), dtype, device)
        x = x.transpose(-2, -3) if turned else x
        q, k, v = (fill(t.unflatten(-1, vectors)) for t in x.split([c, c, c, padded - 3 * c], -1)[:3])
        q = q[..., : case.queries, :, :]
    bias = None
    if case.bias != "none":
        own = outer if case.bias == "batched" else ()
        z = guarded((*own, case.queries, case.keys, case.heads + 3), dtype, device)[..., : case.heads]
        bias = fill(z).movedim(-1, -3)[..., None, :, :, :]
    grad = fill(guarded((*lead, case.queries, *vectors), dtype, device))
    return Inputs(q, k, v, _mask(case, g, device), bias, grad)


def _mask(case: Case, g: torch.Generator, device: str) -> Tensor:
    mask = guarded((*case.lead, case.keys), torch.float32, device)
    if case.mask == "clear":
        return mask.fill_(1)
    if case.mask == "random":
        mask.copy_(torch.rand(mask.shape, generator=g) > 0.3)
        mask.view(-1, case.keys)[1::7] = 0
        return mask
    lengths = torch.randint(1, case.keys + 1, (*case.lead, 1), generator=g)
    return mask.copy_(torch.arange(case.keys) < lengths)


def answers(op: Callable[..., Tensor], given: Inputs) -> dict[str, Tensor]:
    """The output of an operation and the gradients of q, k, v and the bias."""
    leaves = {n: t.detach().requires_grad_() for n in ("q", "k", "v", "bias") if (t := getattr(given, n)) is not None}
    out = op(leaves["q"], leaves["k"], leaves["v"], given.mask, leaves.get("bias"))
    gradients = torch.autograd.grad(out, list(leaves.values()), given.grad)
    return {"out": out.detach()} | {f"d{name}": x for name, x in zip(leaves, gradients)}


def mistakes(given: Inputs, found: dict[str, Tensor]) -> list[str]:
    """What is wrong (check/checks.py) with the results found, of `answers` or some of them."""
    args = [None if t is None else t.detach().requires_grad_() for t in (given.q, given.k, given.v, given.bias)]
    names = ("dq", "dk", "dv", "dbias")[: 3 if given.bias is None else 4]
    true = truth(_mask_last, [*args, given.mask], given.grad, names)
    ours = [found.get(name, x.to(given.q.dtype)) for name, x in zip(("out", *names), true.exact)]
    return [str(error) for error in true.errors(ours) if error.red]


def _mask_last(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor) -> Tensor:
    return attention.definition(q, k, v, mask, bias)
