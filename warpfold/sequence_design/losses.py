"""Losses of designs: confidence, distances and shape, each with a weight.

"BindCraft" is Pacesa et al. 2025 (settings_advanced/default_4stage_multimer.json and functions/colabdesign_utils.py).
"ColabDesign" is the code that it builds on (github.com/sokrypton/ColabDesign, colabdesign/af/loss.py).
settings/design/hallucination.toml lists the losses that differ from theirs. Lengths are in angstrom.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from warpfold.data.structure.chain import Chain
from warpfold.engine.gradient import ModelOutputs
from warpfold.errors import UserError
from warpfold.geometry.atoms import CA
from warpfold.geometry.labels import structure_labels
from warpfold.geometry.residue import UNKNOWN
from warpfold.geometry.rigid import Rigid
from warpfold.model import confidence
from warpfold.model.heads import distogram_breaks, pae_breaks
from warpfold.model.losses import backbone_fape, distogram_loss
from warpfold.model.soft import LETTERS
from warpfold.ops.dispatch import upcast_half

# Keeps square roots and logarithms differentiable at 0.
TINY = 1e-8
# Losses that need the head of predicted aligned errors, a target structure, or two chains.
PAE_LOSSES = ("pae", "interface_pae", "ptm", "iptm", "ipsae")
TARGET_LOSSES = ("distogram", "fape")
COMPLEX_LOSSES = ("interface_pae", "iptm", "ipsae", "interface_contacts")
# The lower edge of the last bin of aligned errors, angstrom.
MAX_ERROR = 31.0


@dataclass(frozen=True, kw_only=True)
class LossWeights:
    """The weight of each loss: 0 omits the loss, and a negative weight rewards the opposite.

    Losses within chains cover the designed chains. Losses between chains cover pairs with at least one designed chain.
    """

    # 1 - mean pLDDT / 100 of the designed chains.
    plddt: float = 0.0
    # Mean aligned error within designed chains / 31.
    pae: float = 0.0
    # Mean aligned error between chains, in both directions, / 31.
    interface_pae: float = 0.0
    # 1 - pTM.
    ptm: float = 0.0
    # 1 - ipTM.
    iptm: float = 0.0
    # 1 - mean over pairs of chains of ipSAE with soft cutoffs.
    ipsae: float = 0.0
    # -log P(contact) of the most likely contacts of each residue within its chain.
    contacts: float = 0.0
    # -log P(contact) of the most likely contacts of each residue with other chains.
    interface_contacts: float = 0.0
    # Cross-entropy of the target's distances (Supp. 1.9.8).
    distogram: float = 0.0
    # Clamped FAPE of the target's backbone (Algorithm 20).
    fape: float = 0.0
    # elu(Rg - 2.38 n^0.365): BindCraft.
    radius_of_gyration: float = 0.0
    # Mean P(distance of residues i and i + 3 below 6); a positive weight suppresses helices.
    helicity: float = 0.0
    # Root mean square difference between corresponding distances of copies, / 10.
    symmetry: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LossShape:
    """The constants of the losses."""

    # Largest distance of beta carbons in contact, contacts per residue, separation along the chain: BindCraft.
    contact_distance: float = 14.0
    contact_number: int = 2
    contact_separation: int = 9
    # Contacts between chains: BindCraft.
    interface_distance: float = 20.0
    interface_number: int = 2
    # ColabDesign.
    helix_distance: float = 6.0
    # The cutoff of ipSAE (Dunbrack 2025), and the width over which ours is soft.
    error_cutoff: float = 10.0
    error_width: float = 1.0
    # Algorithm 20.
    fape_clamp: float = 10.0

    def __post_init__(self) -> None:
        if min(self.contact_number, self.interface_number, self.contact_separation) < 1:
            raise ValueError("contact_number, interface_number and contact_separation must be at least 1")
        if not self.error_width > 0:
            raise ValueError(f"error_width = {self.error_width}: must be above 0")


@dataclass(frozen=True)
class TargetStructure:
    """The desired structure of a design: labels of all N residues, masked where the target has no residue."""

    labels: Mapping[str, Tensor]

    @classmethod
    def of(cls, lengths: Mapping[str, int], chains: Mapping[str, Chain]) -> "TargetStructure":
        """Build the target of a design from the chains of a structure with the same names.

        lengths: the length of each chain of the design.
        Errors: UserError if a chain has a different length or no name matches.
        """
        if not set(lengths) & set(chains):
            raise UserError(f"target: its chains are {', '.join(chains)}, the design's {', '.join(lengths)}")
        n = sum(lengths.values())
        aatype, positions, mask = np.full(n, UNKNOWN), np.zeros((n, 37, 3), np.float32), np.zeros((n, 37), np.float32)
        start = 0
        for id, length in lengths.items():
            if (chain := chains.get(id)) is not None:
                if len(chain.sequence) != length:
                    raise UserError(f"target: chain {id} has {len(chain.sequence)} residues, the design's {length}")
                rows = slice(start, start + length)
                aatype[rows] = [LETTERS.index(letter) if letter in LETTERS else UNKNOWN for letter in chain.sequence]
                positions[rows], mask[rows] = chain.positions, chain.mask
            start += length
        return cls(
            structure_labels(torch.from_numpy(aatype).long(), torch.from_numpy(positions), torch.from_numpy(mask))
        )


class Losses:
    """A loss for `Predictor.gradient`: the weighted terms by name, for all weights that are not 0.

    `weights` may be replaced between calls; each stage of a design does so.
    """

    def __init__(
        self, weights: LossWeights, shape: LossShape | None = None, target: TargetStructure | None = None
    ) -> None:
        self.weights, self.shape, self.target = weights, shape or LossShape(), target

    def check(self, errors: bool, chains: int = 1, copies: bool = False) -> None:
        """Raise UserError for a weighted loss that these parameters or chains do not support.

        errors: whether the parameters have a head for aligned errors.
        chains: the number of chains.
        copies: whether several chains share a sequence.
        """
        for names, is_supported, reason in (
            (PAE_LOSSES, errors, "these parameters have no head for aligned errors. Use others, or set it to 0."),
            (TARGET_LOSSES, self.target is not None, "there is no target structure. Pass one, or set it to 0."),
            (COMPLEX_LOSSES, chains > 1, "there is only one chain. Design several, or set it to 0."),
            (("symmetry",), copies, 'no chain has copies. Name copies "A,B", or set it to 0.'),
        ):
            for name in names:
                if (weight := getattr(self.weights, name)) and not is_supported:
                    raise UserError(f"loss.{name} = {weight:g}: {reason}")
        if not any(vars(self.weights).values()):
            raise UserError(f"loss: all weights are 0. Set one of {', '.join(vars(self.weights))}.")

    def __call__(self, seen: ModelOutputs) -> dict[str, Tensor]:
        """Compute the weighted terms. Errors: those of `check`."""
        chains, entities = seen.asym_id.unique(), seen.entity_id.unique()
        self.check(seen.pae_logits is not None, len(chains), len(entities) < len(chains))
        weights = {name: weight for name, weight in vars(self.weights).items() if weight}
        terms = _Terms(seen, self.shape, self.target)
        return {name: weight * getattr(terms, name)() for name, weight in weights.items()}


class _Terms:
    """The losses of one forward pass: one method for each field of `LossWeights`."""

    def __init__(self, seen: ModelOutputs, shape: LossShape, target: TargetStructure | None) -> None:
        self.seen, self.shape, self.target = seen, shape, target
        self.same = seen.asym_id[:, None] == seen.asym_id
        designed = seen.designed
        # The pairs of residues that the losses within and between chains cover.
        self.within = self.same & designed[:, None] & designed
        self.between = ~self.same & (designed[:, None] | designed)
        self.ca = seen.positions[:, CA]
        self.chains = [(seen.asym_id == number).nonzero()[:, 0] for number in seen.asym_id.unique()]

    def plddt(self) -> Tensor:
        return 1 - confidence.plddt(self.seen.plddt_logits)[self.seen.designed].mean() / 100

    def pae(self) -> Tensor:
        return self._errors[self.within].mean() / MAX_ERROR

    def interface_pae(self) -> Tensor:
        return self._errors[self.between].mean() / MAX_ERROR

    def ptm(self) -> Tensor:
        return 1 - self._tm(between=False)

    def iptm(self) -> Tensor:
        return 1 - self._tm(between=True)

    def ipsae(self) -> Tensor:
        pairs = [
            torch.maximum(*(soft_ipsae(self._errors[i][:, j], self.shape) for i, j in ((a, b), (b, a))))
            for a, b in combinations(self.chains, 2)
            if bool(self.between[a[0], b[0]])
        ]
        return 1 - torch.stack(pairs).mean()

    def contacts(self) -> Tensor:
        index, s = self.seen.residue_index, self.shape
        far = (index[:, None] - index).abs() >= s.contact_separation
        return self._contacts(self.within & far, s.contact_distance, s.contact_number)

    def interface_contacts(self) -> Tensor:
        return self._contacts(self.between, self.shape.interface_distance, self.shape.interface_number)

    def distogram(self) -> Tensor:
        logits, labels = self.seen.distogram_logits, self._labels
        breaks = distogram_breaks(logits.shape[-1]).to(logits.device)
        return distogram_loss(logits, breaks, labels["pseudo_beta"], labels["pseudo_beta_mask"])

    def fape(self) -> Tensor:
        true = Rigid.from_quaternion7(self._labels["backbone_affine_tensor"])
        return backbone_fape(self.seen.frames, true, self._labels["backbone_affine_mask"], self.shape.fape_clamp)

    def radius_of_gyration(self) -> Tensor:
        losses = []
        for ca in (self.ca[residues] for residues in self.chains if self.seen.designed[residues[0]]):
            radius = ((ca - ca.mean(0)).square().sum(-1).mean() + TINY).sqrt()
            losses.append(F.elu(radius - 2.38 * len(ca) ** 0.365))
        return torch.stack(losses).mean()

    def helicity(self) -> Tensor:
        turn = self.seen.residue_index[:, None] - self.seen.residue_index == 3
        near = self._near(self.shape.helix_distance)[self.within & turn]
        # Chains of three residues have no such pair, and the loss is 0.
        return near.sum() / max(len(near), 1)

    def symmetry(self) -> Tensor:
        """Compare the distances between copies i and i - step (cyclically) with their mean over i, for every step."""
        seen, losses = self.seen, []
        for entity in seen.entity_id.unique():
            chains = [residues for residues in self.chains if bool(seen.entity_id[residues[0]] == entity)]
            copies = self.ca[torch.stack(chains)]
            for step in range(len(copies) if len(copies) > 1 else 0):
                vectors = copies[:, :, None] - copies.roll(step, 0)[:, None]
                distances = (vectors.square().sum(-1) + TINY).sqrt()
                losses.append((distances - distances.mean(0)).square().mean())
        return (torch.stack(losses).mean() + TINY).sqrt() / 10

    @cached_property
    def _error_probabilities(self) -> Tensor:
        assert self.seen.pae_logits is not None
        return upcast_half(self.seen.pae_logits).softmax(-1)

    @cached_property
    def _errors(self) -> Tensor:
        """Expected aligned errors [N, N]."""
        assert self.seen.pae_logits is not None
        return confidence.pae(self.seen.pae_logits, pae_breaks(self.seen.pae_logits.shape[-1]))

    @cached_property
    def _distances(self) -> Tensor:
        """Probabilities of the distances of beta carbons [N, N, bins]."""
        return upcast_half(self.seen.distogram_logits).softmax(-1)

    @cached_property
    def _labels(self) -> dict[str, Tensor]:
        assert self.target is not None
        if len(self.target.labels["pseudo_beta_mask"]) != len(self.ca):
            raise UserError(
                f"target: it has {len(self.target.labels['pseudo_beta_mask'])} residues, the design {len(self.ca)}"
            )
        return {
            name: x.to(self.ca.device, self.ca.dtype) for name, x in self.target.labels.items() if x.is_floating_point()
        }

    def _tm(self, between: bool) -> Tensor:
        probabilities = self._error_probabilities
        breaks = pae_breaks(probabilities.shape[-1]).to(probabilities.device)
        scores = confidence.TMScores(breaks, len(probabilities), self.seen.asym_id)
        return scores.best(scores.frame_scores(probabilities, slice(None), between))

    def _near(self, distance: float) -> Tensor:
        """Compute P(distance of beta carbons below `distance`), [N, N]: the sum of the bins that end below it."""
        breaks = distogram_breaks(self._distances.shape[-1]).to(self.ca.device)
        ends = torch.cat([breaks, breaks.new_full((1,), torch.inf)])
        return (self._distances * (ends <= distance)).sum(-1)

    def _contacts(self, pairs: Tensor, distance: float, number: int) -> Tensor:
        """Compute the mean -log P(contact) of the `number` most likely contacts of each designed residue.

        pairs: [N, N], the admissible contacts. Residues with fewer admissible contacts use all of them, and residues
        without any are left out. The loss is 0 if there are no contacts.
        """
        losses = -(self._near(distance) + TINY).log()
        best = losses.masked_fill(~pairs, torch.inf)[self.seen.designed].topk(min(number, len(losses)), largest=False)
        is_admissible = best.values.isfinite()
        counts = is_admissible.sum(-1)
        by_residue = torch.where(is_admissible, best.values, 0).sum(-1) / counts.clamp(min=1)
        return by_residue.sum() / counts.count_nonzero().clamp(min=1)


def soft_ipsae(errors: Tensor, shape: LossShape) -> Tensor:
    """Compute a differentiable ipSAE (Dunbrack 2025), between 0 and 1.

    errors: aligned errors [I, J] of the residues of one chain in the frames of another, angstrom.

    ipSAE is the maximum over frames of the mean of 1 / (1 + (e / d0)^2) over the residues with an error below a cutoff;
    d0 depends on the number of these residues. Here a sigmoid replaces the cutoff, with ipSAE as the limit of zero
    width.
    """
    counts = torch.sigmoid((shape.error_cutoff - errors) / shape.error_width)
    number = counts.sum(-1, keepdim=True)
    d0 = (1.24 * (number.clamp(min=26) - 15) ** (1 / 3) - 1.8).clamp(min=1)
    return ((counts / (1 + (errors / d0).square())).sum(-1) / (number[:, 0] + TINY)).max()
