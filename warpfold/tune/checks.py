"""An operation's fast way against its definition: the output and every gradient, by their errors to fp64.

The bar (DESIGN section 3): an error to the definition in fp64 at most twice the worst of several draws of the
definition in the same dtype.  One run of the definition is one draw of its rounding errors; another machine, which adds
in another order, draws others.  So draws are made here: the definition runs several times, and each time every result
of torch on the way, forward and backward, is off at random by as much as rounding it and adding it up in any order may
cost (`Jitter`).  Their seeds are fixed, so the bar is nearly the same on every machine; and it follows from the dtype,
the lengths of the sums and the numbers themselves, with no constant for each operation.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from warpfold.ops.dispatch import backend, using
from warpfold.ops.noise import DropoutFactors
from warpfold.ops.tensors import accumulation_dtype
from warpfold.tune.cases import OPS, Argument, Case, Inputs, inputs
from warpfold.tune.sizes import ODD

BAR = 2.0  # of the worst draw's error, in the root of the mean square
PEAK_BAR = 4.0  # of its largest: one wrong number must not hide in a mean
DRAWS = 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Jitter(TorchDispatchMode):
    """Within it, each result of torch is off at random, as rounding may have it (Monte Carlo arithmetic, Parker 1997).

    Each number by up to one unit of roundoff of its dtype; and, where it is a sum of n terms, by up to sqrt(n) of the
    dtype that such sums are made in: what n roundings of either sign come to, in whatever order.
    """

    EXACT = ("clone", "_to_copy", "_unsafe_view", "cat", "masked_fill")  # these move numbers and round none anew

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        name, returns = func._schema.name.partition("::")[2], func._schema.returns
        if name not in self.EXACT and not any(r.alias_info for r in returns):
            for result in results if isinstance(results, (tuple, list)) else (results,):
                if isinstance(result, Tensor) and result.is_floating_point() and result.numel():
                    self._shake(result, _terms(name, args, result))
        return results

    def _shake(self, x: Tensor, terms: float) -> None:
        generator = self.generators.get(x.device)
        if generator is None:
            generator = self.generators[x.device] = torch.Generator(x.device).manual_seed(self.seed)
        dtype = accumulation_dtype(x)
        amount = (torch.finfo(x.dtype).eps + (terms - 1) ** 0.5 * torch.finfo(dtype).eps) / 2
        by = torch.rand(x.shape, generator=generator, device=x.device, dtype=dtype)
        x.copy_(by.mul_(2 * amount).add_(1 - amount).mul_(x))


def _terms(name: str, args: Sequence[Any], result: Tensor) -> float:
    """How many terms each number of a result is a sum of."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    if name in ("mm", "bmm"):
        return float(tensors[0].shape[-1])
    if name in ("addmm", "baddbmm"):
        return float(tensors[1].shape[-1])
    return max([1.0, *(t.numel() / result.numel() for t in tensors)])


@dataclass(frozen=True)
class Error:
    """How far a tensor is from fp64, relative to its size: in the mean, and at its worst place."""

    name: str  # "output", or whose gradient
    ours: float
    definition: float  # the worst of its draws
    ours_worst: float
    definition_worst: float
    roundoff: float  # of the dtype; what no computation is blamed for
    numbers: int  # of the tensor

    @property
    def bar(self) -> float:
        """How many times the definition's error ours may be.

        From n numbers the ratio of two such errors is known to 1 in sqrt(n); four times that are allowed for.
        """
        return float(BAR * (1 + 4 * self.numbers**-0.5))

    @property
    def ratio(self) -> float:
        """Our error by what is allowed to be one."""
        return self.ours / max(self.definition, self.roundoff / BAR)

    @property
    def red(self) -> bool:
        """Whether it is over the bar; so is what is not finite where the truth is."""
        mean = self.ours <= max(self.bar * self.definition, self.roundoff)
        worst = self.ours_worst <= max(PEAK_BAR * self.definition_worst, PEAK_BAR * self.roundoff)
        return not (mean and worst)

    def __str__(self) -> str:
        return (
            f"{self.name} is {self.ours:.1e} from fp64 (worst {self.ours_worst:.1e}), "
            f"the definition {self.definition:.1e} (worst {self.definition_worst:.1e})"
        )


@dataclass(frozen=True)
class Verdict:
    """What a check found."""

    case: Case
    dtype: str
    way: str  # "triton", "cpu", or "definition"
    reason: str  # why it is the definition
    errors: tuple[Error, ...]  # output first; none where the definition computes it anyway
    repeats: bool  # twice the same, bit for bit

    @property
    def red(self) -> bool:
        """Whether the fast way must not be used."""
        return not self.repeats or any(e.red for e in self.errors)

    @property
    def worst(self) -> Error:
        """The gradient farthest over, or nearest to, the bar."""
        return max(self.errors[1:], key=lambda e: (e.red, e.ratio))

    def says(self) -> str:
        """What is wrong, in one line."""
        what = f"{self.case.op} ({self.case.where}: {self.case.shape}) in {self.dtype}, way {self.way}"
        wrong = [str(e) for e in self.errors if e.red]
        return f"{what}: " + "; ".join(wrong if self.repeats else [*wrong, "two runs differ"])


@dataclass(frozen=True)
class Truth:
    """What a call's results are in fp64, and what draws of the definition in the dtype of the call make of them."""

    names: tuple[str, ...]  # "output", and whose gradients
    exact: list[Tensor]
    draws: list[tuple[tuple[float, float], ...]]  # of each result, how far each draw is off: together, at most
    dtypes: list[torch.dtype]
    scale: float  # of the gradient that came in

    def errors(self, ours: Sequence[Tensor]) -> tuple[Error, ...]:
        """How far off results are; infinitely, where they have another shape or dtype."""
        results = zip(self.names, ours, self.exact, self.draws, self.dtypes, strict=True)
        return tuple(
            compare(name, x, exact, draws, dtype, self.scale if i else 0.0)
            for i, (name, x, exact, draws, dtype) in enumerate(results)
        )


def run(way: Callable[..., Tensor], given: Inputs) -> list[Tensor]:
    """The output of a way and its gradients, in the order of `given.names`."""
    return answer(way, given.args, given.grad)


def answer(way: Callable[..., Tensor], args: Sequence[Argument], grad: Tensor) -> list[Tensor]:
    """The output of a way, and the gradient of every argument that wants one."""
    out = way(*args)
    wanted = [t for t in args if isinstance(t, Tensor) and t.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, wanted, grad)]


def truth(
    definition: Callable[..., Tensor],
    args: Sequence[Argument],
    grad: Tensor,
    names: Sequence[str] = (),
    draws: int = DRAWS,
) -> Truth:
    """Compute in fp64, and in draws, what a definition makes of arguments; names: of those with a gradient."""
    with using("definition"):  # what is drawn is exact, and no kernel's
        args = [t.draw() if isinstance(t, DropoutFactors) else t for t in args]
    doubles = [t.detach().double().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else None for t in args]
    exact = answer(definition, doubles, grad.double())
    off: list[list[tuple[float, float]]] = [[] for _ in exact]
    for seed in range(draws):
        with Jitter(seed):
            drawn = answer(definition, args, grad)
        for errors, x, right in zip(off, drawn, exact):
            errors.append(_distance(x, right))
    names = names or [f"gradient {i}" for i in range(1, len(exact))]
    apart = [tuple(errors) for errors in off]
    return Truth(("output", *names), exact, apart, [x.dtype for x in drawn], float(grad.double().norm()))


def wrong(
    definition: Callable[..., Tensor], args: Sequence[Argument], grad: Tensor, ours: Sequence[Tensor]
) -> list[str]:
    """What is over the bar in the results (`answer`) of a way of computing a definition; in words."""
    return [str(e) for e in truth(definition, args, grad).errors(ours) if e.red]


def check(case: Case, dtype: str, device: torch.device | str) -> Verdict:
    """One operation on one device, against its definition in fp64, with masked keys and a row of nothing else."""
    op = OPS[case.op]
    given = inputs(case, DTYPES[dtype], device, masked=True)
    reason = op.unsupported_reason(*given.args)
    if reason is not None:
        return Verdict(case, dtype, "definition", reason, (), True)
    ours, again = run(op.fast, given), run(op.fast, given)
    repeats = all(torch.equal(a, b) for a, b in zip(ours, again))
    found = truth(op.definition, given.args, given.grad, given.names).errors(ours)
    return Verdict(case, dtype, backend(given.grad), "", found, repeats)


def compare(
    name: str, ours: Tensor, exact: Tensor, draws: Sequence[tuple[float, float]], dtype: torch.dtype, floor: float = 0.0
) -> Error:
    """The error of a tensor to the exact one, beside those of draws of the definition in this dtype.

    `floor`: what is measured against where the truth is nothing.
    """
    size, peak = float(exact.norm()), float(exact.abs().max())
    if size <= 1e-9 * floor:  # a gradient that cancels (through a softmax over one key, say) has a few roundings left
        size = peak = 4 * floor or 1.0
    known = ours.shape == exact.shape and ours.dtype == dtype
    mean, worst = _distance(ours, exact) if known else (float("inf"), float("inf"))
    of_mean, of_worst = (max(d[i] for d in draws) for i in range(2))
    roundoff = torch.finfo(dtype).eps / 2
    return Error(name, mean / size, of_mean / size, worst / peak, of_worst / peak, roundoff, exact.numel())


def _distance(x: Tensor, exact: Tensor) -> tuple[float, float]:
    difference = x.detach().double() - exact
    if not bool(difference.isfinite().all()):
        return float("inf"), float("inf")
    return float(difference.norm()), float(difference.abs().max())


def odd(ops: Iterable[str]) -> list[Case]:
    """The sizes that find mistakes, of these operations; "attention" has two, the global one being a call of it."""
    wanted = set(ops) | ({"global_attention"} if "attention" in ops else set())
    return [case for case in ODD if case.op in wanted]


def failures(cases: Sequence[Case], device: torch.device | str, dtypes: Iterable[str] = DTYPES) -> list[Verdict]:
    """The verdicts that are red."""
    return [v for case in cases for dtype in dtypes if (v := check(case, dtype, device)).red]
