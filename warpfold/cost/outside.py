"""What the model has to do outside of its trunk's blocks: embedders, structure module, heads, losses; counted.

Counted by the definitions on three tiny proteins of the wanted depth.  All of it is a polynomial of the second degree
in the residues, so three counts give it exactly for any length.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from warpfold.check.op_profile import Cost
from warpfold.cost.example import ExampleSizes, random_example, shortened
from warpfold.cost.observe import OUTSIDE as PARAMETERS
from warpfold.cost.observe import Place, Spans
from warpfold.cost.work import WorkKey, work_of
from warpfold.model.alphafold import AlphaFold, ModelConfig
from warpfold.model.losses import LossConfig, total_loss
from warpfold.model.permutation import with_truth
from warpfold.ops.dispatch import Kernels
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import Plan

LENGTHS = (8, 12, 16)  # even: a complex has two equal chains
HEADS = ("distogram", "masked_msa", "plddt", "resolved", "pae")  # of the last pass alone
LOSSES = "losses"
OUTSIDE = "outside of the trunk"  # the name of what is done there, among the rates of a device
ELSEWHERE = ("attention", "aligned_errors", "overlaps")  # counted with the layers (cost/layer_work.py)


@dataclass(frozen=True)
class OutsideKey:
    """A part of the model, and whether it runs backward."""

    part: str
    backward: bool


@dataclass(frozen=True)
class OutsideWork:
    """What torch's operations have to do in one part."""

    cost: Cost
    calls: float


def outside_work(
    model: ModelConfig, sizes: ExampleSizes, loss: LossConfig | None, all_of_it: bool = False
) -> dict[OutsideKey, OutsideWork]:
    """Return what one pass does outside of the blocks, heads included; with `loss` also that and its backward pass.

    all_of_it: also the operations that are counted with the layers.
    """
    counts = _counts(shortened(model, 0), sizes.sequences, sizes.extra, sizes.templates, loss, all_of_it)
    weights, found = _lagrange(sizes.residues), {}
    for key, table in counts.items():
        flops, exps, moved, calls = (
            float(sum(w * value for w, value in zip(weights, values, strict=True))) for values in table
        )
        found[key] = OutsideWork(Cost(flops, exps, moved), calls)
    return found


def _lagrange(at: int) -> list[Fraction]:
    """Return the weights of values at `LENGTHS` in a polynomial's value there."""
    weights = []
    for x in LENGTHS:
        weight = Fraction(1)
        for other in LENGTHS:
            if other != x:
                weight *= Fraction(at - other, x - other)
        weights.append(weight)
    return weights


Counts = dict[OutsideKey, tuple[tuple[int, ...], ...]]  # flops, exps, bytes, calls, each at `LENGTHS`


@lru_cache(maxsize=64)
def _counts(
    model: ModelConfig, sequences: int, extra: int, templates: int, loss: LossConfig | None, all_of_it: bool
) -> Counts:
    found: dict[OutsideKey, list[list[int]]] = defaultdict(lambda: [[0] * len(LENGTHS) for _ in range(4)])
    run = OutsideRun(model, loss, "definition")
    for at, residues in enumerate((LENGTHS[0], *LENGTHS), -1):  # the first run makes tables that are kept
        run.resize(ExampleSizes(residues=residues, sequences=sequences, extra=extra, templates=templates))
        for key, work in run.counted().items():
            if at >= 0 and key.layer != PARAMETERS and (all_of_it or key.op not in ELSEWHERE):
                table = found[OutsideKey(key.layer.split(".")[0], key.backward)]
                for values, amount in zip(table, (work.flops, work.exps, work.bytes, work.calls)):
                    values[at] += amount
    return {key: tuple(map(tuple, table)) for key, table in found.items()}


class OutsideRun:
    """A model without blocks, to be counted or timed."""

    def __init__(
        self,
        model: ModelConfig,
        loss: LossConfig | None,
        kernels: Kernels = "fast",
        device: torch.device | str = "cpu",
    ) -> None:
        self.config, self.loss, self.device = replace(shortened(model, 0), ensemble=1), loss, device
        with torch.device("meta"):
            one = AlphaFold(self.config)
        one = one.to_empty(device=device).train(loss is not None)
        with torch.no_grad():
            for tensor in (*one.parameters(), *one.buffers()):
                tensor.zero_()  # a tenth of the time that drawing them takes
        one.noise.seed(0)
        self.model = Execution(Plan(kernels=kernels)).bind(one)

    def resize(self, sizes: ExampleSizes) -> None:
        """Draw an example of these sizes, to be run from now on."""
        self.batch = random_example(self.config, sizes, self.device)

    def forward(self) -> Tensor | None:
        """Run the model, and the losses, if there are any."""
        if self.loss is None:
            with torch.no_grad():
                self.model(self.batch, 0)
            return None
        output = self.model(self.batch, 0)
        truth = with_truth(self.batch, output.structure.final_atom37)
        return total_loss(output, truth, self.loss)[0]

    def counted(self) -> Mapping[WorkKey, Any]:
        """Return what a run has to do."""
        self.model.zero_grad()  # so that no run adds to the gradients of another

        def run(spans: Spans) -> None:
            """Run both passes."""
            with spans.open(Place(LOSSES)):
                loss = self.forward()
            if loss is not None:
                loss.backward()

        return work_of(self.model, run, "cpu")

    def timed(self, seconds: Callable[[Callable[[], object]], float], backward: bool) -> float:
        """Return the seconds of the forward pass, or of the backward pass.

        seconds: times a function.
        """
        if not backward:
            return seconds(self.forward)
        loss = self.forward()
        assert loss is not None
        wanted = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return seconds(partial(torch.autograd.grad, loss, wanted, retain_graph=True, allow_unused=True))
