"""What the tests of the CPU's fast ways share: layouts, and a way against its definition in fp64."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from warpfold.ops.dispatch import Op

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "in order": lambda t: t,
    "turned": lambda t: t.transpose(-3, -2).contiguous().transpose(-3, -2),
    "channels in front": lambda t: t.movedim(-1, -3).contiguous().movedim(-3, -1),
    "a slice of columns": lambda t: torch.cat([t, t], -2)[..., t.shape[-2] :, :],
    "a slice of channels": lambda t: torch.cat([t, t], -1)[..., t.shape[-1] :],
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def given(*shapes: Sequence[int], seed: int = 0) -> list[Tensor]:
    """Random tensors in fp64."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def excess(
    op: Op[..., Tensor], arguments: Sequence[Tensor], parameters: int, dtype: torch.dtype, **fixed: object
) -> list[float]:
    """Of the output and each gradient: the error of the fast way, over that of the definition in the same dtype.

    The last `parameters` arguments stay in fp32 where the others are in bf16.  Both errors are of the norm, against the
    definition in fp64; in fp64 itself the fast way's own error is returned, in units of 1e-12 relative.  What is
    exact to a quarter of the dtype's precision is right, however exact the definition happens to be; and what is
    nothing but rounding (arguments are about 1) is held to a scale of 0.01.
    """
    keep = torch.float64 if dtype == torch.float64 else torch.float32
    first = len(arguments) - parameters
    truth = _answer(op.definition, list(arguments), fixed)
    cast = [t.to(dtype) if i < first else t.to(keep) for i, t in enumerate(arguments)]
    mine, plain = _answer(op.fast, cast, fixed), _answer(op.definition, cast, fixed)
    least = torch.finfo(dtype).eps / 4
    ratios = []
    for ours, theirs, right in zip(mine, plain, truth, strict=True):
        scale = right.norm().clamp_min(0.01 * right.numel() ** 0.5)
        error, bar = ((x.double() - right).norm() / scale for x in (ours, theirs))
        assert ours.dtype == theirs.dtype
        ratios.append(float(error / (1e-12 if dtype == torch.float64 else bar.clamp_min(least))))
    return ratios


def _answer(run: Callable[..., Tensor], arguments: list[Tensor], fixed: dict[str, object]) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in arguments]
    out = run(*leaves, **fixed)
    towards = given(out.shape, seed=1)[0].to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, towards)]


class Largest(TorchDispatchMode):
    """Notes how many elements the largest storage has that any torch operation returns, views of `inputs` apart."""

    elements = 0

    def __init__(self, *inputs: Tensor) -> None:
        super().__init__()
        self._inputs = {t.untyped_storage().data_ptr() for t in inputs}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = function(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in self._inputs:
                self.elements = max(self.elements, t.untyped_storage().nbytes() // t.element_size())
        return out
