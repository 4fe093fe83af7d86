"""Learn from examples: forward passes, losses and backward pass of each batch, and the update at the end of a step.

The work of the device is written as functions of tensors, which the model's execution may record and replay as graphs
(`plan.graph`).  The host decides before each call: the number of passes, the keys of dropout, the learning rate.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

from warpfold.batch import FEATURES, stack
from warpfold.data.load.examples import Sample
from warpfold.engine.optim import Optimizer
from warpfold.engine.trunk import FrozenTrunk
from warpfold.model.alphafold import AlphaFold
from warpfold.model.losses import LossConfig, ca_lddt, total_loss
from warpfold.model.permutation import with_truth
from warpfold.ops.dispatch import widen
from warpfold.parallel.team import Team

T = TypeVar("T")


@dataclass(frozen=True)
class DeviceResult:
    """The result of one example of a step, on the device."""

    example: Sample
    losses: dict[str, Tensor]  # the total loss, named "", and its terms
    norm: Tensor  # of the gradient, before clipping
    lddt_ca: Tensor
    overflowed: Tensor  # bool
    length: Tensor  # residues, without padding

    def numbers(self) -> Tensor:
        """Join all numbers in one tensor: the losses in their order, norm, lDDT-Ca, overflowed, length."""
        return torch.stack(
            [widen(x) for x in (*self.losses.values(), self.norm, self.lddt_ca, self.overflowed, self.length)]
        )


class Learner:
    """Train a model batch by batch and step by step, under the execution that is bound to it."""

    def __init__(
        self,
        model: AlphaFold,
        optimizer: Optimizer,
        loss: LossConfig,
        seed: int,
        team: Team,
        trunk: FrozenTrunk | None = None,
    ) -> None:
        """seed: of the run; dropout is keyed by the seed and the number of the example.

        trunk: computes or reads the outputs of a trunk that is not trained; None: the trunk runs with the model.
        """
        self.model, self.optimizer, self.loss, self.seed, self.team = model, optimizer, loss, seed, team
        self.trunk = trunk

    def learn(self, examples: Sequence[Sample], recycles: int) -> list[DeviceResult]:
        """Add the clipped gradient of a batch to the step's.  Several examples go through the model together."""
        model, optimizer = self.model, self.optimizer
        inputs = self._inputs_of_last_pass(examples, recycles)
        # A graph of a pass that sends gradients is cut where its buckets leave, so it cannot serve a pass that sends
        # none.
        context = ("sends", optimizer.sends)
        if optimizer.sends or optimizer.mesh.model.size > 1:
            # Adding the gradient waits for other ranks, which no graph can hold, so it follows the graph.
            outputs = model.execution.call(model, self._differentiate, inputs, context)
            outputs |= self._add_gradient(outputs)
        else:
            outputs = model.execution.call(model, self._differentiate_and_add, inputs, context)
        optimizer.begin_next_example()
        losses = {name.removeprefix("loss:"): x for name, x in outputs.items() if name.startswith("loss:")}
        return [
            DeviceResult(
                example,
                {name: loss[i] for name, loss in losses.items()},
                outputs["norm"],
                outputs["lddt_ca"][i],
                outputs["overflowed"],
                outputs["length"][i],
            )
            for i, example in enumerate(examples)
        ]

    def step(self, step: int) -> Tensor:
        """Apply the mean over the step's examples to the weights; return the learning rate, 0 if nothing changed."""
        # Several ranks exchange gradients and weights in the update, which graphs do not hold.
        if self.optimizer.mesh.world.size > 1:
            return self.optimizer.step(step)
        call, rate = self.model.execution.call, {"rate": self.optimizer.rate}
        return self.optimizer.step(step, lambda: call(self.model, self._update, rate)["rate"])

    def _inputs_of_last_pass(self, examples: Sequence[Sample], recycles: int) -> Mapping[str, Tensor]:
        """Run the passes without a gradient, and return the inputs of the last one (`AlphaFold.last_pass`)."""
        model = self.model
        keys = [(self.seed, example.index) for example in examples]
        if self.trunk is not None:
            inputs = self.trunk.inputs(examples)
            # The trunk has its dropout keyed by the draw, so the noise is seeded afterwards.
            model.noise.seed(*keys[0]) if len(examples) == 1 else model.noise.seed_batch(keys)
            return inputs | {"key": model.noise.key}
        features = examples[0].features if len(examples) == 1 else stack([example.features for example in examples])
        model.noise.seed(*keys[0]) if len(examples) == 1 else model.noise.seed_batch(keys)
        recycled, done = model.recycle(features, recycles)  # Algorithms 30 and 31
        return model.inputs_of_pass(features, done, recycled)

    def _differentiate_and_add(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the pass with a gradient and the backward pass, and add the gradient to the step's."""
        outputs = self._differentiate(inputs)
        return outputs | self._add_gradient(outputs)

    def _add_gradient(self, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Clip the gradient of a batch, and add it to the step's (Supp. 1.11.3).  outputs: of `_differentiate`."""
        norm = self.optimizer.add_gradient(outputs["loss"])
        # A copy, since the optimizer overwrites its tensor for the next example.
        return {"norm": norm, "overflowed": self.optimizer.overflowed.clone()}

    def _differentiate(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the pass with a gradient (Algorithm 2), the losses (Supp. 1.9), and the backward pass."""
        batch = {name: x for name, x in inputs.items() if name in FEATURES}
        output = self.model.last_pass(inputs)
        is_batched = batch["aatype"].dim() > 1
        outputs, batches = [output], [batch]
        if is_batched:
            outputs, unstacked = output.unbind(), {name: x.unbind() for name, x in batch.items()}
            batches = [{name: x[i] for name, x in unstacked.items()} for i in range(len(outputs))]
        losses, terms, scores = [], [], []
        for example_output, labels in zip(outputs, batches):
            # Equal chains are permuted to match the prediction.
            truth = with_truth(labels, example_output.structure.final_atom37)
            loss, loss_terms = total_loss(example_output, truth, self.loss, residues=self.model.residues)
            losses.append(loss)
            terms.append(loss_terms)
            scores.append(ca_lddt(example_output, truth))
        named = {"": torch.stack(losses)} | {
            name: torch.stack([example_terms[name] for example_terms in terms]) for name in terms[0]
        }
        # Each rank that shares the example has a part of every loss.  The parts travel during the backward pass.
        shares = torch.stack([widen(x.detach()) for x in named.values()])
        arriving = self.team.all_gather_of_example(shares.flatten(), "the losses")
        loss = named[""].sum()
        self.optimizer.scaled(loss).backward()
        first, *other_sums = arriving.wait()
        sums = sum(other_sums, first).view(shares.shape)
        return {
            **{f"loss:{name}": x for name, x in zip(named, sums)},
            "loss": loss.detach(),
            "lddt_ca": torch.stack(scores),
            "length": torch.stack([labels["seq_mask"].sum() for labels in batches]),
        }

    def _update(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Apply the optimizer's rule and the moving average.  inputs: the learning rate, which `update` reads."""
        return {"rate": self.optimizer.update()}


def in_batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of `size` items; the last one may be shorter."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
