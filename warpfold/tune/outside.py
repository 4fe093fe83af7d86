"""What the model has to do outside of its trunk's blocks: embedders, structure module, heads, losses; counted.

Counted by the definitions on three tiny proteins of the wanted depth.  All of it is a polynomial of the second degree
in the residues, so three counts give it exactly for any length.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import torch

from warpfold.model.alphafold import AlphaFold, ModelConfig
from warpfold.model.losses import LossConfig, total_loss
from warpfold.model.permutation import with_truth
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import Plan
from warpfold.tune.example import ExampleSizes, random_example, shortened
from warpfold.tune.spans import OUTSIDE, Place, Spans
from warpfold.tune.work import WorkKey, work_of

LENGTHS = (8, 12, 16)  # even: a complex has two equal chains
HEADS = ("distogram", "masked_msa", "plddt", "resolved", "pae")  # of the last pass alone
LOSSES = "losses"
ELSEWHERE = ("attention", "aligned_errors", "overlaps")  # counted with the layers (tune/layer_work.py)


@dataclass(frozen=True)
class OutsideKey:
    """A part of the model, an operation (ours or torch's), and whether it runs backward."""

    part: str
    op: str
    ours: bool
    backward: bool


@dataclass(frozen=True)
class Amounts:
    """Floating point operations, exponentials, bytes and calls."""

    flops: float = 0
    exps: float = 0
    bytes: float = 0
    calls: float = 0


Outside = Mapping[OutsideKey, Amounts]


def outside_work(model: ModelConfig, sizes: ExampleSizes, loss: LossConfig | None) -> dict[OutsideKey, Amounts]:
    """Return what one pass does outside of the blocks, heads included; with `loss` also that and its backward pass."""
    counts = _counts(shortened(model, 0), sizes.sequences, sizes.extra, sizes.templates, loss)
    weights = _lagrange(sizes.residues)
    return {key: Amounts(*(float(sum(w * v for w, v in zip(weights, values, strict=True))) for values in table))
            for key, table in counts.items()}  # fmt: skip


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
def _counts(model: ModelConfig, sequences: int, extra: int, templates: int, loss: LossConfig | None) -> Counts:
    found: dict[OutsideKey, list[list[int]]] = defaultdict(lambda: [[0] * len(LENGTHS) for _ in range(4)])
    one = _without_numbers(replace(model, ensemble=1)).train(loss is not None)
    for at, residues in enumerate((LENGTHS[0], *LENGTHS), -1):  # the first run makes tables that are kept
        sizes = ExampleSizes(residues=residues, sequences=sequences, extra=extra, templates=templates)
        for key, work in _counted(one, model, sizes, loss).items():
            if at >= 0 and key.op not in ELSEWHERE and key.layer != OUTSIDE:
                part = key.layer.split(".")[0]
                table = found[OutsideKey(part, key.op, bool(key.shape), key.backward)]
                for values, amount in zip(table, (work.flops, work.exps, work.bytes, work.calls)):
                    values[at] += amount
    return {key: tuple(map(tuple, table)) for key, table in found.items()}


def _without_numbers(model: ModelConfig) -> AlphaFold:
    """Return the model with weights of zero, which costs a tenth of drawing them."""
    with torch.device("meta"):
        one = AlphaFold(model)
    one = one.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*one.parameters(), *one.buffers()):
            tensor.zero_()
    one.noise.seed(0)
    return Execution(Plan(kernels="definition")).bind(one)


def _counted(one: AlphaFold, model: ModelConfig, sizes: ExampleSizes, loss: LossConfig | None) -> Mapping[WorkKey, Any]:
    batch = random_example(model, sizes, "cpu")
    one.zero_grad()  # so that no run adds to the gradients of another

    def run(spans: Spans) -> None:
        """Run the model once, and its losses."""
        if loss is None:
            with torch.no_grad():
                one(batch, 0)
            return
        with spans.open(Place(LOSSES)):
            output = one(batch, 0)
            value = total_loss(output, with_truth(batch, output.structure.final_atom37), loss)[0]
        value.backward()

    return work_of(one, run, "cpu")
