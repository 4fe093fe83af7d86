"""Check the output and all gradients of an operation's fast path against its definition, by their errors to fp64.

The error to the definition in fp64 must be at most twice the largest error of several samples of the definition in the
same dtype. A run of the definition is one sample of its rounding errors, and a machine with another order of additions
gives another one. The definition therefore runs several times. Each time, every intermediate result of torch, forward
and backward, is perturbed at random by the error that rounding and any order of summation may cause (`Jitter`). The
seeds are fixed, so that the bar is nearly equal on all machines. The bar follows from the dtype, the lengths of the
sums and the numbers, without constants for single operations.
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

# Allowed root mean square error, relative to the worst sample's.
BAR = 2.0
# Allowed largest error, relative to the worst sample's. A single wrong number must not hide in a mean.
PEAK_BAR = 4.0
# Samples of the definition.
DRAWS = 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Jitter(DispatchMode):
    """Perturb each result of torch at random like rounding (Monte Carlo arithmetic, Parker 1997).

    The perturbation of a number is at most one unit of roundoff of its dtype. For a sum of n terms, it is in addition
    at most sqrt(n) units of the accumulation dtype, which is the expected error of n roundings in any order.
    """

    # These operations move numbers without rounding.
    EXACT = ("clone", "_to_copy", "_unsafe_view", "cat", "masked_fill")

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
    """Return the number of terms in the sum of each element of a result."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    if name in ("mm", "bmm"):
        return float(tensors[0].shape[-1])
    if name in ("addmm", "baddbmm"):
        return float(tensors[1].shape[-1])
    return max([1.0, *(t.numel() / result.numel() for t in tensors)])


@dataclass(frozen=True)
class Error:
    """The error of a tensor to fp64, relative to its norm (mean) and to its largest element (worst).

    name: "output", or the argument of a gradient. definition, definition_worst: of the worst sample. roundoff: of the
    dtype, an error that any computation may have. numbers: elements of the tensor.
    rounded_truth: the tensor is fp64 itself, so that the reference has the error of a sample.
    """

    name: str
    ours: float
    definition: float
    ours_worst: float
    definition_worst: float
    roundoff: float
    numbers: int
    rounded_truth: bool = False

    @property
    def bar(self) -> float:
        """Allowed ratio of our error to the definition's.

        The relative accuracy of the ratio of two errors of n numbers is 1 / sqrt(n), and four times that is allowed.
        """
        return float(BAR * (1 + 4 * self.numbers**-0.5)) + self.rounded_truth

    @property
    def ratio(self) -> float:
        """Ratio of our error to the definition's, which counts as at least half a roundoff."""
        return self.ours / max(self.definition, self.roundoff / BAR)

    @property
    def red(self) -> bool:
        """Whether the error is above the bar, or not finite."""
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
    """The result of a check.

    way: "triton", "cpu", or "definition". reason: why the definition is used. errors: output first; empty if the
    definition is used, except on an Apple GPU. repeats: whether two runs are bitwise equal.
    """

    case: OpCase
    dtype: str
    way: str
    reason: str
    errors: tuple[Error, ...]
    repeats: bool

    @property
    def red(self) -> bool:
        """Whether the fast path must not be used."""
        return not self.repeats or any(e.red for e in self.errors)

    @property
    def worst(self) -> Error:
        """The error of the gradient that exceeds the bar most or comes closest to it."""
        return max(self.errors[1:], key=lambda e: (e.red, e.ratio))

    def says(self) -> str:
        """Describe the failure in one line."""
        subject = f"{self.case.op} ({self.case.where}: {size_in_words(self.case)}) in {self.dtype}, way {self.way}"
        wrong = [str(e) for e in self.errors if e.red]
        return f"{subject}: " + "; ".join(wrong if self.repeats else [*wrong, "two runs differ"])


@dataclass(frozen=True)
class Truth:
    """The results of a call in fp64, and the errors of samples of the definition in the dtype of the call.

    names: "output", and the arguments of the following gradients. draws: for each result, norm and maximum of the error
    of each sample. scale: norm of the incoming gradient.
    """

    names: tuple[str, ...]
    exact: list[Tensor]
    draws: list[tuple[tuple[float, float], ...]]
    dtypes: list[torch.dtype]
    scale: float

    def errors(self, ours: Sequence[Tensor]) -> tuple[Error, ...]:
        """Compute the errors of results; infinite for a wrong shape or dtype."""
        results = zip(self.names, ours, self.exact, self.draws, self.dtypes, strict=True)
        return tuple(
            compare(name, x, exact, draws, dtype, self.scale if i else 0.0)
            for i, (name, x, exact, draws, dtype) in enumerate(results)
        )


def run(way: Callable[..., Tensor], given: OpInputs) -> list[Tensor]:
    """Compute the output of a function and its gradients in the order of `given.names`."""
    return answer(way, given.args, given.grad)


def answer(way: Callable[..., Tensor], args: Sequence[Argument], grad: Tensor) -> list[Tensor]:
    """Compute the output of a function, and the gradient of every argument that requires one."""
    out = way(*args)
    inputs_with_gradient = [t for t in args if isinstance(t, Tensor) and t.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, inputs_with_gradient, grad)]


def truth(
    definition: Callable[..., Tensor],
    args: Sequence[Argument],
    grad: Tensor,
    names: Sequence[str] = (),
    draws: int = DRAWS,
) -> Truth:
    """Compute a definition's results in fp64 and samples of them. names: of the arguments with a gradient."""
    # The dropout factors must not be drawn by a kernel that is being checked.
    with using("definition"):
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
    samples = [tuple(errors) for errors in off]
    return Truth(("output", *names), exact, samples, [x.dtype for x in drawn], float(grad.double().norm()))


def wrong(
    definition: Callable[..., Tensor], args: Sequence[Argument], grad: Tensor, ours: Sequence[Tensor]
) -> list[str]:
    """Describe the results (of `answer`) whose errors to a definition are above the bar."""
    return [str(e) for e in truth(definition, args, grad).errors(ours) if e.red]


def check(case: OpCase, dtype: str, device: torch.device | str) -> Verdict:
    """Check an operation on a device against its definition in fp64, with masked keys and a row of only masked keys.

    An Apple GPU has no fp64 and no fast path, so its definition is checked against the CPU.
    """
    op = OPS[case.op]
    if torch.device(device).type == "mps":
        drawn_inputs = inputs(case, DTYPES[dtype], "cpu", masked=True)
        args = [_moved(t, device) for t in drawn_inputs.args]
        results, again = (
            [x.cpu() for x in answer(op.definition, args, drawn_inputs.grad.to(device))] for _ in range(2)
        )
        repeats = all(torch.equal(a, b) for a, b in zip(results, again))
        errors = truth(op.definition, drawn_inputs.args, drawn_inputs.grad, drawn_inputs.names).errors(results)
        return Verdict(case, dtype, "definition", op.unsupported_reason(*args) or "", errors, repeats)
    drawn_inputs = inputs(case, DTYPES[dtype], device, masked=True)
    reason = op.unsupported_reason(*drawn_inputs.args)
    if reason is not None:
        return Verdict(case, dtype, "definition", reason, (), True)
    way, results, again = backend(drawn_inputs.grad), run(op.fast, drawn_inputs), run(op.fast, drawn_inputs)
    repeats = all(torch.equal(a, b) for a, b in zip(results, again))
    if way == "triton":
        # The second call uses the cached launch of the first (ops/triton/recipe.py).
        with always_fast():
            for called in (run(op, drawn_inputs), run(op, drawn_inputs)):
                repeats &= all(torch.equal(a, b) for a, b in zip(called, results))
            with torch.no_grad():
                repeats &= torch.equal(op(*drawn_inputs.args), op(*drawn_inputs.args))
    errors = truth(op.definition, drawn_inputs.args, drawn_inputs.grad, drawn_inputs.names).errors(results)
    return Verdict(case, dtype, way, "", errors, repeats)


def _moved(x: Argument, device: torch.device | str) -> Argument:
    """Move an argument of an operation to another device."""
    if isinstance(x, DropoutFactors):
        return replace(x, key=x.key.to(device))
    return x.detach().to(device).requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


def compare(
    name: str, ours: Tensor, exact: Tensor, draws: Sequence[tuple[float, float]], dtype: torch.dtype, floor: float = 0.0
) -> Error:
    """Compute the error of a tensor to the exact one, with those of samples of the definition in this dtype.

    floor: the error is relative to this value if the exact tensor is zero.
    """
    size, peak = float(exact.norm()), float(exact.abs().max())
    if size <= 1e-9 * floor:
        # A gradient that cancels, for example through a softmax over a single key, consists of a few rounding errors.
        size = peak = 4 * floor or 1.0
    is_comparable = ours.shape == exact.shape and ours.dtype == dtype
    mean, worst = _distance(ours, exact) if is_comparable else (float("inf"), float("inf"))
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
    """Return the test cases of the operations that --op selects."""
    names = meant_by(ops)
    return [case for case in ODD if case.op in names]


def failures(cases: Sequence[OpCase], device: torch.device | str) -> list[Verdict]:
    """Check cases in every dtype, and return the failures."""
    return [v for case in cases for dtype in DTYPES if (v := check(case, dtype, device)).red]
