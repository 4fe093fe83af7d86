"""Learn from examples: the passes, losses and backward pass of each batch, and the update at the end of a step.

What the device does here is written as functions of tensors, which the model's execution may record and replay
(`plan.graph`).  The host decides beforehand how many passes there are, what dropout draws, and the learning rate.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

from warpfold.batch import FEATURES, Batch, stack
from warpfold.data.load.examples import Sample
from warpfold.engine.optim import Optimizer
from warpfold.engine.trunk import FrozenTrunk
from warpfold.model.alphafold import AlphaFold, Output
from warpfold.model.losses import LossConfig, Terms, ca_lddt, total_loss
from warpfold.model.permutation import with_truth
from warpfold.ops.dispatch import widen
from warpfold.parallel.team import Team

T = TypeVar("T")


@dataclass(frozen=True)
class DeviceResult:
    """What a step says of one of its examples, while it is on the device."""

    example: Sample
    losses: dict[str, Tensor]  # "", the whole, and its terms
    norm: Tensor
    lddt_ca: Tensor
    overflowed: Tensor  # bool
    length: Tensor  # residues, without padding


class Learner:
    """Bring a model forward, batch by batch and step by step, as its execution says."""

    def __init__(
        self,
        model: AlphaFold,
        optimizer: Optimizer,
        loss: LossConfig,
        seed: int,
        team: Team,
        trunk: FrozenTrunk | None = None,
    ) -> None:
        """seed: of the run; it and an example's number decide what dropout draws.

        trunk: says what the trunk makes of an example, where nothing of it is trained and examples have few draws.
        """
        self.model, self.optimizer, self.loss, self.seed, self.team = model, optimizer, loss, seed, team
        self.trunk = trunk

    def learn(self, examples: Sequence[Sample], recycles: int) -> list[DeviceResult]:
        """Add the gradient of a batch to the step's; several examples go through the model together."""
        model, alone = self.model, len(examples) == 1
        keys = [(self.seed, example.index) for example in examples]
        if self.trunk is None:
            features = examples[0].features if alone else stack([example.features for example in examples])
            model.noise.seed(*keys[0]) if alone else model.noise.seed_batch(keys)  # of dropout
            recycled, done = model.recycle(features, recycles)  # Algorithms 30 and 31: these passes have no gradient
            inputs = model.inputs_of_pass(features, done, recycled)
        else:
            inputs = features = self.trunk.inputs(examples)
            model.noise.seed(*keys[0]) if alone else model.noise.seed_batch(keys)  # that of the trunk was by the draw
            inputs = inputs | {"key": model.noise.key}
        # A graph of a pass that sends is cut where its buckets leave, so it must not serve one that does not send.
        sends = self.optimizer.sends
        if self.optimizer.mesh.model.size > 1 or sends:
            # Adding the gradient waits for other ranks here, which no graph can hold.
            found = model.execution.call(model, self._backward, inputs, ("sends", sends))
            found |= self._add(found)
        else:
            found = model.execution.call(model, self._last_pass, inputs, ("sends", sends))
        self.optimizer.end_example()
        losses = {name.removeprefix("loss:"): x for name, x in found.items() if name.startswith("loss:")}
        return [
            DeviceResult(
                example,
                {name: loss[i] for name, loss in losses.items()},
                found["norm"],
                found["lddt_ca"][i],
                found["overflowed"],
                found["length"][i],
            )
            for i, example in enumerate(examples)
        ]

    def step(self, step: int) -> Tensor:
        """Apply the mean over the step's examples to the weights; return the learning rate, 0 where nothing changed."""
        call, rate = self.model.execution.call, {"rate": self.optimizer.rate}
        if self.optimizer.mesh.world.size > 1:  # exchanges are not recorded
            return self.optimizer.step(step)
        return self.optimizer.step(step, lambda: call(self.model, self._update, rate)["rate"])

    def _last_pass(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the pass that has a gradient, and add that to the step's.  inputs: `AlphaFold.inputs_of_pass`."""
        found = self._backward(inputs)
        return found | self._add(found)

    def _add(self, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Clip an example's gradient, and add it to the step's (Supp. 1.11.3).  found: what `_backward` returned."""
        norm = self.optimizer.add(found["loss"])
        return {"norm": norm, "overflowed": self.optimizer.overflowed.clone()}

    def _backward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the pass that has a gradient, backward too."""
        batch = {name: x for name, x in inputs.items() if name in FEATURES}
        output = self.model.last_pass(inputs)  # Algorithm 2
        several = batch["aatype"].dim() > 1
        outputs, batches = (output.unbind(), unstack(batch)) if several else ([output], [batch])
        losses, terms, scores = zip(*(self._losses(one, labels) for one, labels in zip(outputs, batches)))
        every = {"": torch.stack(losses)} | {name: torch.stack([each[name] for each in terms]) for name in terms[0]}
        # Summed over the ranks that share the example: they travel during the backward pass.
        own = torch.stack([widen(part.detach()) for part in every.values()])
        arriving = self.team.all_gather_of_example(own.flatten(), "the losses")
        loss = every[""].sum()
        self.optimizer.scaled(loss).backward()
        first, *others = arriving.wait()
        sums = sum(others, first).view(own.shape)
        return {
            **{f"loss:{name}": x for name, x in zip(every, sums)},
            "loss": loss.detach(),
            "lddt_ca": torch.stack(scores),
            "length": torch.stack([one["seq_mask"].sum() for one in batches]),
        }

    def _losses(self, output: Output, batch: Batch) -> tuple[Tensor, Terms, Tensor]:
        """Return the loss of an example, its terms, and lDDT-Ca."""
        truth = with_truth(batch, output.structure.final_atom37)  # of equal chains
        loss, terms = total_loss(output, truth, self.loss, residues=self.model.residues)  # Supp. 1.9
        return loss, terms, ca_lddt(output, truth)

    def _update(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"rate": self.optimizer.update()}  # Adam; the moving average


def unstack(batch: Batch) -> list[Batch]:
    """Return the examples of a batch, one leading axis."""
    parts = {name: x.unbind() for name, x in batch.items()}
    return [{name: x[i] for name, x in parts.items()} for i in range(len(batch["aatype"]))]


def in_batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of `size` items, the last one perhaps shorter."""
    left = iter(items)
    while found := list(islice(left, size)):
        yield found
