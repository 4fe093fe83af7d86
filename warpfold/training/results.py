"""Collect the results of a step's examples: tensors on the device, then plain numbers, then rows of the log."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from warpfold.device import Snapshot
from warpfold.engine.learn import DeviceResult
from warpfold.engine.loop import StepTimer
from warpfold.engine.optim import OptimConfig, learning_rate
from warpfold.engine.watch import Row
from warpfold.errors import UserError
from warpfold.ops.dispatch import widen

WINDOW = 1_000  # train.max_skipped counts within this many examples in a row


@dataclass(frozen=True)
class ExampleResult:
    """The result of one example of a step, in plain numbers."""

    key: str
    length: int
    loss: float
    norm: float  # of its gradient, before clipping
    lddt_ca: float
    terms: dict[str, float]
    index: int = 0  # its number among the run's examples
    overflowed: bool = False  # its gradient was too large for the loss scale of fp16, which is halved for it

    @property
    def finite(self) -> bool:
        """Whether nothing is wrong with it; that its gradient overflowed is not its fault."""
        return math.isfinite(self.loss) and (math.isfinite(self.norm) or self.overflowed)

    @property
    def used(self) -> bool:
        """Whether its gradient is part of the step's."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)


def begin_results(results: Sequence[DeviceResult]) -> Snapshot:
    """Begin to copy the results of a step's examples from the device, all at once."""
    numbers = [
        torch.stack([widen(x) for x in (*one.losses.values(), one.norm, one.lddt_ca, one.overflowed, one.length)])
        for one in results
    ]
    return Snapshot.of({"numbers": torch.stack(numbers)})


def read_results(results: Sequence[DeviceResult], copied: Snapshot) -> list[ExampleResult]:
    """Return the results of a step's examples as plain numbers; here the host waits for what `begin_results` began."""
    found = []
    for one, (*losses, norm, lddt, overflowed, length) in zip(results, copied.wait()["numbers"].tolist()):
        terms = dict(zip(one.losses, losses))
        loss = terms.pop("")
        where = one.example.name, int(length), loss, norm, lddt, terms, one.example.index
        found.append(ExampleResult(*where, bool(overflowed)))
    return found


def rate_taken(config: OptimConfig, step: int, results: Sequence[ExampleResult]) -> float:
    """Return the learning rate of a step, or 0 if it changed nothing; results: of the examples of all ranks.

    What `Optimizer.step` returns, without waiting for the device: the mean over examples is finite if all of them are.
    """
    used = sum(example.used for example in results)
    taken = used == len(results) if config.clip == "step" else used > 0
    return learning_rate(config, step) if taken else 0.0


def step_row(step: int, results: Sequence[ExampleResult], rate: float, recycles: int, timer: StepTimer) -> Row:
    """Return the row of a training step, which ends here: means over its examples that were finite."""
    seconds, waiting, waiting_so_far = timer.end()
    finite = [example for example in results if example.finite]
    names = finite[0].terms if finite else {}
    return {
        "kind": "step",
        "step": step,
        "loss": _mean([example.loss for example in finite]),
        "lddt_ca": _mean([example.lddt_ca for example in finite]),
        "terms": {name: _mean([example.terms[name] for example in finite]) for name in names},
        "grad_norm": _mean([example.norm for example in finite if example.used]),
        "learning_rate": rate,
        "recycles": recycles,
        "examples": [example.key for example in results],
        "lengths": [example.length for example in results],
        "skipped": len(results) - len(finite),
        "overflowed": sum(example.overflowed for example in results),
        "samples_per_second": len(results) / seconds,
        "waiting": waiting,
        "waiting_so_far": waiting_so_far,
    }


def validation_row(step: int, scores: Mapping[str, Mapping[str, Any]]) -> Row:
    """Return the row of a validation: means over the examples, and what each has; scores: of `Judge`, by example.

    The scores of interfaces are means over the examples that have any; the row has them if one does.
    """
    row: Row = {"kind": "validation", "step": step}
    for name, each in (("lddt_ca", "examples"), ("interface_lddt", "interfaces"), ("dockq", "docked")):
        found = {key: one[name] for key, one in scores.items()}
        if each != "examples":
            found = {key: value for key, value in found.items() if not math.isnan(value)}
        if found or each == "examples":
            row |= {name: _mean(list(found.values())), each: found}
    if scores:
        row["loss"] = _mean([one["loss"] for one in scores.values()])
        names = dict.fromkeys(name for one in scores.values() for name in one["terms"])
        row["terms"] = {name: _mean([one["terms"].get(name, math.nan) for one in scores.values()]) for name in names}
    cut = {key: one["residues"] for key, one in scores.items() if one["residues"][0] < one["residues"][1]}
    if cut:
        kept, whole = (sum(one["residues"][place] for one in scores.values()) for place in (0, 1))
        row |= {"cropped": len(cut), "residues": kept, "whole_residues": whole, "cut": cut}
    return row


def _mean(values: Sequence[float]) -> float:
    """Return the mean without NaNs; NaN if nothing is left."""
    numbers = [value for value in values if not math.isnan(value)]
    return float(np.mean(numbers)) if numbers else float("nan")


class SkippedExamples:
    """Which of the last WINDOW examples were skipped since they were not finite; the same on all ranks.

    A few are bad luck, many are divergence.  They add nothing to a step (engine/optim.py).  Part of a checkpoint.
    """

    def __init__(self, most: int, places: Sequence[int] = ()) -> None:
        """most: train.max_skipped.  places: `places` of the checkpoint that the run continues from."""
        self.most = most
        self.places = list(places)  # how many examples the run had used before each

    def add(self, step: int, results: Sequence[ExampleResult], examples: int = 0) -> None:
        """Count the examples of a step in one order that is the same on all ranks; step: how many are done with it.

        results: of all of them; or, where all are finite, of some of its `examples`.
        Errors: UserError when more than `most` of any WINDOW in a row were skipped.
        """
        end = step * (examples or len(results))
        for place, example in enumerate(results, end - len(results)):
            if example.finite:
                continue
            self.places = [*(p for p in self.places if p > place - WINDOW), place]
            if len(self.places) > self.most:
                raise UserError(
                    f"step {step}: the loss or gradient of {len(self.places)} of the last {min(place + 1, WINDOW)} "
                    f"examples is not finite, and train.max_skipped = {self.most}: the run diverges; its failures "
                    "folder has what reproduces the first of them, and the checkpoints from before them are kept"
                )
        self.places = [p for p in self.places if p >= end - WINDOW]
