"""Compute the gradient of a loss by a sequence that is being designed (model/soft.py), under the model's plan."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor

from warpfold.arguments import WrongArgument, shown
from warpfold.batch import Batch
from warpfold.geometry.rigid import Rigid
from warpfold.model import confidence
from warpfold.model.alphafold import AlphaFold, LastPass, Output, Recycled, Representations
from warpfold.model.heads import distogram_breaks, pae_breaks
from warpfold.model.soft import QueryPlace, soften
from warpfold.model.structure import StructureOutput
from warpfold.parallel.team import Team

Through = Literal["last", "all", "mean"]
Loss = Callable[["ModelOutputs"], Tensor | Mapping[str, Tensor]]


@dataclass(frozen=True)
class ModelOutputs:
    """Inputs of a design loss: the outputs of a pass, whole on every process, and the sequence.

    Lengths are in angstrom, and logits have fp32 or more.
    asym_id: the chain of each residue, from 1.
    entity_id: equal for copies of a chain.
    designed: True for the residues of chains in which any letter is free.
    """

    output: Output
    shares: Tensor  # [N, 21], 20 amino acids and X
    aatype: Tensor  # int64 [N]
    residue_index: Tensor  # int64 [N]
    asym_id: Tensor  # int64 [N]
    entity_id: Tensor  # int64 [N]
    designed: Tensor  # bool [N]
    distogram_logits: Tensor  # [N, N, bins]
    pae_logits: Tensor | None  # [N, N, bins]; None: the parameters have no such head

    @property
    def plddt_logits(self) -> Tensor:
        """Logits of each residue's lDDT-Ca, [N, bins]."""
        return self.output.plddt_logits

    @property
    def positions(self) -> Tensor:
        """Atoms, [N, 37, 3]."""
        return self.output.structure.final_atom37

    @property
    def frames(self) -> Rigid:
        """The backbone frames of the last layer, [N]."""
        return self.output.structure.frames[-1]


@dataclass(frozen=True)
class SequenceGradient:
    """A loss, its terms, its gradient by the shares, and the outputs of the last pass without a gradient."""

    loss: float
    terms: dict[str, float]
    by_shares: Tensor  # [N, 21]
    folded: LastPass


def gradient_by_shares(
    model: AlphaFold,
    batch: Batch,
    shares: Tensor,
    loss: Loss,
    place: QueryPlace | None = None,
    recycles: int = 0,
    through: Through = "last",
    team: Team | None = None,
    designed: Tensor | None = None,
    guess: Tensor | None = None,
) -> SequenceGradient:
    """Fold an example whose sequence is shares [N, 21], and compute the loss and its gradient by the shares.

    batch, place: see `soften`.
    recycles: the number of passes before the last.
    through: the "last" pass, with constant inputs from the others; "all" passes, which hand on tensors with a gradient;
        or the "mean" of the losses and gradients of all passes, each by itself.  As in training, rotations carry no
        gradient between the layers of the structure module.
    loss: returns a scalar, or terms by name whose sum is the loss.
    designed: see `ModelOutputs`; None for all residues.
    guess: see `AlphaFold.first_recycled`.
    The model runs under its execution, and its parameters are constants.  If processes share the example, all of `team`
    call this and get the same result.
    """
    team = Team() if team is None else team
    leaf, recycled = shares.detach().to(model.device).requires_grad_(), model.first_recycled(batch, guess)
    sums: dict[str, Tensor] = {}
    weight = 1 / (recycles + 1) if through == "mean" else 1.0
    with constant_parameters(model), torch.enable_grad():
        features = soften(batch, leaf, place)
        for index in range(recycles + 1):
            is_last = index == recycles
            if not (is_last or through == "mean"):
                with torch.set_grad_enabled(through == "all"):
                    handed_on = model.recycling_pass(model.inputs_of_pass(features, index, recycled))
                del handed_on["activations"]
                recycled = Recycled(**handed_on)
                continue
            features = soften(batch, leaf, place) if through == "mean" else features
            output = model.last_pass(model.inputs_of_pass(features, index, recycled))
            terms = _checked_terms(loss(_model_outputs(model, output, features, leaf, designed)))
            total = weight * torch.stack([*terms.values()]).sum()
            # Every process computes the whole loss, and the sum over the processes must count it once.
            (total / (model.residues.shards * model.residues.replicas)).backward()
            for name, x in terms.items():
                sums[name] = sums.get(name, 0.0) + weight * x.detach()
            output = _detached(output)
            recycled = Recycled(output.msa_first_row, output.pair, output.structure.final_atom37)
    gradient = cast(Tensor, leaf.grad)
    # Each process has the gradient through its shard of the model.  All of them need the sum.
    first, *other_gradients = team.all_gather_of_example(gradient.flatten(), "the gradient by the sequence").wait()
    representations = Representations(output.msa, output.pair, output.single, output.msa_first_row)
    values = {name: float(x) for name, x in sums.items()}
    return SequenceGradient(
        loss=sum(values.values()),
        terms={name: value for name, value in values.items() if name},
        by_shares=sum(other_gradients, first).view(gradient.shape),
        folded=LastPass(representations, output.structure, recycles),
    )


def _checked_terms(value: Any) -> dict[str, Tensor]:
    """Validate the result of a loss, and return its terms by name; a loss without terms is named ""."""
    terms = dict(value) if isinstance(value, Mapping) else {"": value}
    for name, x in terms.items():
        if not (isinstance(x, Tensor) and x.dim() == 0):
            returned = f"{name} = {shown(x)}" if name else shown(x)
            raise WrongArgument(f"loss: returned {returned}. Return a scalar tensor, or a dict of scalar tensors.")
    if not any(x.requires_grad for x in terms.values()):
        raise WrongArgument("loss: the result has no gradient. Compute it from the argument of the function.")
    return terms


def _model_outputs(
    model: AlphaFold, output: Output, batch: Batch, shares: Tensor, designed: Tensor | None
) -> ModelOutputs:
    """Gather the inputs of a loss: the logits of pairs become whole on every process."""
    residues, n = model.residues, len(shares)
    chains = torch.ones(n, dtype=torch.int64, device=shares.device)
    named = {name: batch.get(name, chains).to(model.device, torch.int64) for name in ("asym_id", "entity_id")}
    named |= {name: batch[name].to(model.device, torch.int64) for name in ("aatype", "residue_index")}
    return ModelOutputs(
        output=output,
        shares=shares,
        designed=(chains > 0) if designed is None else designed.to(model.device),
        distogram_logits=residues.all_gather(output.distogram_logits, -3, n),
        pae_logits=None if output.pae_logits is None else residues.all_gather(output.pae_logits, -3, n),
        **named,
    )


def _detached(x: Any) -> Any:
    """Detach all tensors of a dataclass, so that the autograd graph behind them can be freed."""
    if isinstance(x, Tensor):
        return x.detach()
    if isinstance(x, Output | StructureOutput | Rigid):
        return replace(x, **{f.name: _detached(getattr(x, f.name)) for f in fields(x)})
    return x


@contextmanager
def constant_parameters(model: AlphaFold) -> Iterator[None]:
    """Freeze the model's parameters within the context."""
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in trained:
            p.requires_grad_(True)


def loss_of_every_output(outputs: ModelOutputs) -> dict[str, Tensor]:
    """Compute a loss that reads all logits and positions.  Plans use it to estimate the memory of a design."""
    n = len(outputs.aatype)
    distances = outputs.distogram_logits.softmax(-1)
    breaks = distogram_breaks(outputs.distogram_logits.shape[-1])
    terms = {
        "plddt": 1 - confidence.plddt(outputs.plddt_logits).mean() / 100,
        "contacts": -(confidence.contact_probabilities(distances, breaks) + 1e-8).log().mean(),
        "positions": outputs.positions.square().mean().sqrt() / n,
    }
    if outputs.pae_logits is not None:
        terms["pae"] = confidence.pae(outputs.pae_logits, pae_breaks(outputs.pae_logits.shape[-1])).mean() / 31
    return terms
