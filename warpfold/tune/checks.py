"""An operation's fast way against its definition: the output and every gradient, by their errors to fp64.

The bar (DESIGN section 3): an error to the definition in fp64 at most twice that of the definition in the same dtype.
Errors are drawn by chance, and of few numbers their size is known roughly; the bar allows for that (`Error.bar`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from warpfold.ops.dispatch import place
from warpfold.tune.cases import OPS, Case, Inputs, inputs
from warpfold.tune.sizes import ODD

BAR = 2.0  # of the definition's error, in the root of the mean square
PEAK_BAR = 8.0  # of its largest: one wrong number must not hide in a mean
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Error:
    """How far a tensor is from fp64, relative to its size: in the mean, and at its worst place."""

    name: str  # "output", or whose gradient
    ours: float
    definition: float
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
        wrong = [
            f"{e.name} is {e.ours:.1e} from fp64 (worst {e.ours_worst:.1e}), "
            f"the definition {e.definition:.1e} (worst {e.definition_worst:.1e})"
            for e in self.errors
            if e.red
        ]
        return f"{what}: " + "; ".join(wrong if self.repeats else [*wrong, "two runs differ"])


def run(way: Callable[..., Tensor], given: Inputs) -> list[Tensor]:
    """The output of a way and its gradients, in the order of `given.names`."""
    out = way(*given.args)
    return [out.detach(), *torch.autograd.grad(out, given.wanted, given.grad)]


def check(case: Case, dtype: str, device: torch.device | str) -> Verdict:
    """One operation on one device, against its definition in fp64, with masked keys and a row of nothing else."""
    op = OPS[case.op]
    given = inputs(case, DTYPES[dtype], device, masked=True)
    reason = op.refuses(*given.args)
    if reason is not None:
        return Verdict(case, dtype, "definition", reason, (), True)
    exact = run(op.definition, given.double())
    plain, ours, again = run(op.definition, given), run(op.fast, given), run(op.fast, given)
    repeats = all(torch.equal(a, b) for a, b in zip(ours, again))
    return Verdict(case, dtype, place(given.grad), "", errors(given, ours, plain, exact), repeats)


def errors(given: Inputs, ours: list[Tensor], plain: list[Tensor], exact: list[Tensor]) -> tuple[Error, ...]:
    """Of what `run` returned for the fast way, for the definition, and for the definition in fp64."""
    roundoff = torch.finfo(given.grad.dtype).eps / 2
    scale = float(given.grad.double().norm())
    return tuple(
        compare(name, *tensors, roundoff=roundoff, floor=scale if i else 0.0)
        for i, (name, *tensors) in enumerate(zip(("output", *given.names), ours, plain, exact))
    )


def compare(name: str, ours: Tensor, plain: Tensor, exact: Tensor, *, roundoff: float, floor: float = 0.0) -> Error:
    """The errors of two tensors to the exact one; `floor`: what is measured against where that is nothing."""
    size, peak = float(exact.norm()), float(exact.abs().max())
    if size <= 1e-9 * floor:  # a gradient that cancels: through a softmax over one key, say
        size = peak = floor or 1.0
    mine, theirs = _distance(ours, exact), _distance(plain, exact)
    return Error(name, mine[0] / size, theirs[0] / size, mine[1] / peak, theirs[1] / peak, roundoff, exact.numel())


def _distance(x: Tensor, exact: Tensor) -> tuple[float, float]:
    difference = x.double() - exact
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
