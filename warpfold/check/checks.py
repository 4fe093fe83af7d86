"""Check an operation's fast path against its definition: the output and every gradient, by their errors to fp64.

The bar: the error to the definition in fp64 is at most twice the worst of several draws of the
definition in the same dtype.  One run of the definition is one draw of its rounding errors; a machine that adds in
another order draws others.  So the definition runs several times, and each time every result of torch on the way,
forward and backward, is perturbed at random by as much as rounding it and summing it in any order may cost (`Jitter`).
The seeds are fixed, so the bar is nearly the same on every machine.  It follows from the dtype, the lengths of the sums
and the numbers themselves; no operation has a constant of its own.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from warpfold.check.cases import ODD, OPS, inputs, meant_by, size_in_words
from warpfold.check.op_profile import Argument, OpCase, OpInputs
from warpfold.ops.dispatch import accumulation_dtype, always_fast, backend, using
from warpfold.ops.noise import DropoutFactors
from warpfold.ops.torch_internals import DispatchMode

BAR = 2.0  # times the worst draw's error, as a root mean square
PEAK_BAR = 4.0  # times the worst draw's largest error: one wrong number must not hide in a mean
DRAWS = 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Jitter(DispatchMode):
    """Perturb each result of torch at random, as rounding may (Monte Carlo arithmetic, Parker 1997).

    Each number by up to one unit of roundoff of its dtype; and a sum of n terms by up to sqrt(n) units of the dtype
    that such sums are made in: what n roundings of either sign come to, in whatever order.
    """

    EXACT = ("clone", "_to_copy", "_unsafe_view", "cat", "masked_fill")  # these move numbers and round nothing

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
    """Return how many terms each number of a result is the sum of."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    if name in ("mm", "bmm"):
        return float(tensors[0].shape[-1])
    if name in ("addmm", "baddbmm"):
        return float(tensors[1].shape[-1])
    return max([1.0, *(t.numel() / result.numel() for t in tensors)])


@dataclass(frozen=True)
class Error:
    """How far a tensor is from fp64, relative to its size: in the mean, and its worst number."""

    name: str  # "output", or the argument whose gradient it is
    ours: float
    definition: float  # the worst of its draws
    ours_worst: float
    definition_worst: float
    roundoff: float  # of the dtype: an error that every computation may have
    numbers: int  # in the tensor
    rounded_truth: bool = False  # the tensor is of fp64 itself: the truth is off by as much as a draw

    @property
    def bar(self) -> float:
        """How many times the definition's error ours may be.

        From n numbers, the ratio of two errors is known to one part in sqrt(n); four times that is allowed.
        """
        return float(BAR * (1 + 4 * self.numbers**-0.5)) + self.rounded_truth

    @property
    def ratio(self) -> float:
        """Our error over the definition's, which counts as half a roundoff at least."""
        return self.ours / max(self.definition, self.roundoff / BAR)

    @property
    def red(self) -> bool:
        """Whether it is over the bar; so is what is not finite where the truth is."""
        mean = self.ours <= max(self.bar * self.definition, self.roundoff)
        worst = self.ours_worst <= (PEAK_BAR + self.rounded_truth) * max(self.definition_worst, self.roundoff)
        return not (mean and worst)

    def __str__(self) -> str:
        return (
            f"{self.name} is {self.ours:.1e} from fp64 (worst {self.ours_worst:.1e}), "
            f"the definition {self.definition:.1e} (worst {self.definition_worst:.1e})"
        )


@dataclass(frozen=True)
class Verdict:
    """What a check found."""

    case: OpCase
    dtype: str
    way: str  # "triton", "cpu", or "definition"
    reason: str  # why the definition computes it
    errors: tuple[Error, ...]  # output first; none where the definition computes it, but on an Apple GPU
    repeats: bool  # two runs are the same, bit for bit

    @property
    def red(self) -> bool:
        """Whether the fast path must not be used."""
        return not self.repeats or any(e.red for e in self.errors)

    @property
    def worst(self) -> Error:
        """The error of a gradient that is farthest above the bar, or nearest to it."""
        return max(self.errors[1:], key=lambda e: (e.red, e.ratio))

    def says(self) -> str:
        """Say what is wrong, in one line."""
        what = f"{self.case.op} ({self.case.where}: {size_in_words(self.case)}) in {self.dtype}, way {self.way}"
        wrong = [str(e) for e in self.errors if e.red]
        return f"{what}: " + "; ".join(wrong if self.repeats else [*wrong, "two runs differ"])


@dataclass(frozen=True)
class Truth:
    """A call's results in fp64, and the errors of draws of the definition in the dtype of the call."""

    names: tuple[str, ...]  # "output", and the arguments whose gradients follow
    exact: list[Tensor]
    draws: list[tuple[tuple[float, float], ...]]  # for each result, the error of each draw: its norm, its largest
    dtypes: list[torch.dtype]
    scale: float  # of the gradient that came in

    def errors(self, ours: Sequence[Tensor]) -> tuple[Error, ...]:
        """Return the errors of results; infinite if they have another shape or dtype."""
        results = zip(self.names, ours, self.exact, self.draws, self.dtypes, strict=True)
        return tuple(
            compare(name, x, exact, draws, dtype, self.scale if i else 0.0)
            for i, (name, x, exact, draws, dtype) in enumerate(results)
        )


def run(way: Callable[..., Tensor], given: OpInputs) -> list[Tensor]:
    """Return the output of a way and its gradients, in the order of `given.names`."""
    return answer(way, given.args, given.grad)


def answer(way: Callable[..., Tensor], args: Sequence[Argument], grad: Tensor) -> list[Tensor]:
    """Return the output of a way, and the gradient of every argument that requires one."""
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
    """Compute a definition's results in fp64, and draws of them; names: of the arguments with a gradient."""
    with using("definition"):  # so that no kernel draws the dropout factors
        args = [t.draw() if isinstance(t, DropoutFactors) else t for t in args]
    doubles = [t.detach().double().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t for t in args]
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
    """Say which results (`answer`) of a way of computing a definition are over the bar."""
    return [str(e) for e in truth(definition, args, grad).errors(ours) if e.red]


def check(case: OpCase, dtype: str, device: torch.device | str) -> Verdict:
    """Check one operation on one device against its definition in fp64, with masked keys and a row of only those.

    On an Apple GPU, which has no fp64 and no fast path, its definition: what torch computes there, against the CPU.
    """
    op = OPS[case.op]
    if torch.device(device).type == "mps":
        given = inputs(case, DTYPES[dtype], "cpu", masked=True)
        args = [_moved(t, device) for t in given.args]
        ours, again = ([x.cpu() for x in answer(op.definition, args, given.grad.to(device))] for _ in range(2))
        repeats = all(torch.equal(a, b) for a, b in zip(ours, again))
        found = truth(op.definition, given.args, given.grad, given.names).errors(ours)
        return Verdict(case, dtype, "definition", op.unsupported_reason(*args) or "", found, repeats)
    given = inputs(case, DTYPES[dtype], device, masked=True)
    reason = op.unsupported_reason(*given.args)
    if reason is not None:
        return Verdict(case, dtype, "definition", reason, (), True)
    way, ours, again = backend(given.grad), run(op.fast, given), run(op.fast, given)
    repeats = all(torch.equal(a, b) for a, b in zip(ours, again))
    if way == "triton":
        with always_fast():  # the first call is worked out, the second repeats it (ops/triton/recipe.py)
            for called in (run(op, given), run(op, given)):
                repeats &= all(torch.equal(a, b) for a, b in zip(called, ours))
            with torch.no_grad():
                repeats &= torch.equal(op(*given.args), op(*given.args))
    found = truth(op.definition, given.args, given.grad, given.names).errors(ours)
    return Verdict(case, dtype, way, "", found, repeats)


def _moved(x: Argument, device: torch.device | str) -> Argument:
    """Return an argument of an operation on another device."""
    if isinstance(x, DropoutFactors):
        return replace(x, key=x.key.to(device))
    return x.detach().to(device).requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


def compare(
    name: str, ours: Tensor, exact: Tensor, draws: Sequence[tuple[float, float]], dtype: torch.dtype, floor: float = 0.0
) -> Error:
    """Return the error of a tensor to the exact one, beside those of draws of the definition in this dtype.

    floor: the error is relative to this where the exact tensor is zero.
    """
    size, peak = float(exact.norm()), float(exact.abs().max())
    if size <= 1e-9 * floor:  # a gradient that cancels (through a softmax over one key, say) leaves a few roundings
        size = peak = 4 * floor or 1.0
    known = ours.shape == exact.shape and ours.dtype == dtype
    mean, worst = _distance(ours, exact) if known else (float("inf"), float("inf"))
    of_mean, of_worst = (max(d[i] for d in draws) for i in range(2))
    roundoff = torch.finfo(dtype).eps / 2
    errors = mean / size, of_mean / size, worst / peak, of_worst / peak
    return Error(name, *errors, roundoff, exact.numel(), rounded_truth=dtype == exact.dtype)


def _distance(x: Tensor, exact: Tensor) -> tuple[float, float]:
    difference = x.detach().double() - exact
    if not bool(difference.isfinite().all()):
        return float("inf"), float("inf")
    return float(difference.norm()), float(difference.abs().max())


def odd(ops: Iterable[str]) -> list[OpCase]:
    """Return the sizes that find mistakes, of the operations that --op means."""
    names = meant_by(ops)
    return [case for case in ODD if case.op in names]


def failures(cases: Sequence[OpCase], device: torch.device | str) -> list[Verdict]:
    """Check cases in every dtype, and return the verdicts that are red."""
    return [v for case in cases for dtype in DTYPES if (v := check(case, dtype, device)).red]
