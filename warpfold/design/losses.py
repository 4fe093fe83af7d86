"""What a design is judged by: losses of confidence, distances and shape, each with a weight.

"BindCraft" is Pacesa et al. 2025 (settings_advanced/default_4stage_multimer.json and functions/colabdesign_utils.py),
"ColabDesign" the code that it is built on (github.com/sokrypton/ColabDesign, colabdesign/af/loss.py).  Where a loss is
another function than theirs, settings/design/hallucination.toml says so.  Lengths are in angstrom.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from warpfold.data.structure.chain import Chain
from warpfold.engine.gradient import Seen
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

TINY = 1e-8
OF_ERRORS = ("pae", "interface_pae", "ptm", "iptm", "ipsae")  # need the head of aligned errors
OF_TARGET = ("distogram", "fape")  # need a target structure
OF_CHAINS = ("interface_pae", "iptm", "ipsae", "interface_contacts")  # need two chains
MAX_ERROR = 31.0  # where the last bin of aligned errors begins


@dataclass(frozen=True, kw_only=True)
class LossWeights:
    """The weight of each loss; 0 leaves it out, and one below 0 asks for the opposite.

    Within chains those count that are designed, between chains those of which one is.
    """

    plddt: float = 0.0  # 1 - mean pLDDT / 100 of the designed chains
    pae: float = 0.0  # mean aligned error within designed chains / 31
    interface_pae: float = 0.0  # ... between chains, both ways
    ptm: float = 0.0  # 1 - pTM
    iptm: float = 0.0  # 1 - ipTM
    ipsae: float = 0.0  # 1 - the mean over pairs of chains of ipSAE with soft cutoffs
    contacts: float = 0.0  # -log P(contact) of each residue's likeliest contacts within its chain
    interface_contacts: float = 0.0  # ... with other chains
    distogram: float = 0.0  # cross-entropy of the target's distances (Supp. 1.9.8)
    fape: float = 0.0  # of the target's backbone (Algorithm 20), clamped
    radius_of_gyration: float = 0.0  # elu(Rg - 2.38 n^0.365): BindCraft
    helicity: float = 0.0  # mean P(residues i and i + 3 are nearer than 6): above 0 keeps helices away
    symmetry: float = 0.0  # how far distances of copies differ from those of the next copies, root mean square / 10


@dataclass(frozen=True, kw_only=True)
class LossShape:
    """The constants of the losses."""

    contact_distance: float = 14.0  # between beta carbons: BindCraft
    contact_number: int = 2  # of each residue: BindCraft
    contact_separation: int = 9  # residues along the chain: BindCraft
    interface_distance: float = 20.0  # BindCraft
    interface_number: int = 2  # BindCraft
    helix_distance: float = 6.0  # ColabDesign
    error_cutoff: float = 10.0  # of ipSAE: Dunbrack 2025
    error_width: float = 1.0  # over which the cutoff is soft: ours
    fape_clamp: float = 10.0  # Algorithm 20

    def __post_init__(self) -> None:
        if min(self.contact_number, self.interface_number, self.contact_separation) < 1:
            raise ValueError("contact_number, interface_number and contact_separation must be at least 1")
        if not self.error_width > 0:
            raise ValueError(f"error_width = {self.error_width}: must be above 0")


@dataclass(frozen=True)
class TargetStructure:
    """A structure that a design is to have, of all N residues in their order; masked where there is none."""

    labels: Mapping[str, Tensor]

    @classmethod
    def of(cls, lengths: Mapping[str, int], chains: Mapping[str, Chain]) -> "TargetStructure":
        """Take the chains of a design, with their lengths, from structures by the same names.

        Errors: UserError for a chain of another length, or none in common.
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
                here = slice(start, start + length)
                aatype[here] = [LETTERS.index(letter) if letter in LETTERS else UNKNOWN for letter in chain.sequence]
                positions[here], mask[here] = chain.positions, chain.mask
            start += length
        given = torch.from_numpy(aatype).long(), torch.from_numpy(positions), torch.from_numpy(mask)
        return cls(structure_labels(*given))


class Losses:
    """A loss for `Predictor.gradient`: the terms that have a weight, weighted, by name.

    weights may be replaced between calls, as stages do.
    """

    def __init__(
        self, weights: LossWeights, shape: LossShape | None = None, target: TargetStructure | None = None
    ) -> None:
        self.weights, self.shape, self.target = weights, shape or LossShape(), target

    def check(self, errors: bool, chains: int = 1, copies: bool = False) -> None:
        """Raise UserError for a loss that has a weight, and that such parameters or chains cannot have.

        errors: whether the parameters have a head for aligned errors.  chains: how many there are, and copies: whether
        some are of the same sequence.
        """
        for names, there, why in (
            (OF_ERRORS, errors, "these parameters have no head for aligned errors; give others, or leave it out"),
            (OF_TARGET, self.target is not None, "there is no target structure; give one, or leave it out"),
            (OF_CHAINS, chains > 1, "there is one chain; design several, or leave it out"),
            (("symmetry",), copies, 'no chain has copies; name them "A,B", or leave it out'),
        ):
            for name in names:
                if (weight := getattr(self.weights, name)) and not there:
                    raise UserError(f"loss.{name} = {weight:g}: {why}")
        if not any(vars(self.weights).values()):
            raise UserError(f"loss: none has a weight; give one of {', '.join(vars(self.weights))}")

    def __call__(self, seen: Seen) -> dict[str, Tensor]:
        """Return the weighted terms.  Errors: UserError as of `check`."""
        chains, entities = seen.asym_id.unique(), seen.entity_id.unique()
        self.check(seen.pae_logits is not None, len(chains), len(entities) < len(chains))
        weights = {name: weight for name, weight in vars(self.weights).items() if weight}
        found = _Terms(seen, self.shape, self.target)
        return {name: weight * getattr(found, name)() for name, weight in weights.items()}


class _Terms:
    """The losses of what a pass has found, by the names of `LossWeights`, each computed when it is called."""

    def __init__(self, seen: Seen, shape: LossShape, target: TargetStructure | None) -> None:
        self.seen, self.shape, self.target = seen, shape, target
        self.same = seen.asym_id[:, None] == seen.asym_id
        designed = seen.designed
        self.within = self.same & designed[:, None] & designed  # pairs of residues that count
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
            for place, a in enumerate(self.chains)
            for b in self.chains[:place]
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
        found = []
        for ca in (self.ca[residues] for residues in self.chains if self.seen.designed[residues[0]]):
            radius = ((ca - ca.mean(0)).square().sum(-1).mean() + TINY).sqrt()
            found.append(F.elu(radius - 2.38 * len(ca) ** 0.365))
        return torch.stack(found).mean()

    def helicity(self) -> Tensor:
        turn = self.seen.residue_index[:, None] - self.seen.residue_index == 3
        pairs = self.within & turn
        near = self._near(self.shape.helix_distance)[pairs]
        return near.mean() if len(near) else self.ca.sum() * 0  # chains of three residues have no turn

    def symmetry(self) -> Tensor:
        """Compare the distances of each copy to the one so many places further round with their mean over copies."""
        seen, found = self.seen, []
        for entity in seen.entity_id.unique():
            copies = [residues for residues in self.chains if bool(seen.entity_id[residues[0]] == entity)]
            for step in range(len(copies) if len(copies) > 1 else 0):  # to the copy so many places further round
                blocks = []
                for place, here in enumerate(copies):
                    there = copies[(place + step) % len(copies)]
                    blocks.append(((self.ca[here][:, None] - self.ca[there]).square().sum(-1) + TINY).sqrt())
                distances = torch.stack(blocks)
                found.append((distances - distances.mean(0)).square().mean())
        return (torch.stack(found).mean() + TINY).sqrt() / 10

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
                f"target: it is of {len(self.target.labels['pseudo_beta_mask'])} residues, not {len(self.ca)}"
            )
        return {
            name: x.to(self.ca.device, self.ca.dtype) for name, x in self.target.labels.items() if x.is_floating_point()
        }

    def _tm(self, between: bool) -> Tensor:
        probabilities = self._error_probabilities
        breaks = pae_breaks(probabilities.shape[-1]).to(probabilities.device)
        scores = confidence.TMScores(breaks, len(probabilities), self.seen.asym_id)
        return scores.best(scores.of_frames(probabilities, slice(None), between))

    def _near(self, distance: float) -> Tensor:
        """Return the probability that beta carbons are nearer than a distance, [N, N]: of bins that end below it."""
        breaks = distogram_breaks(self._distances.shape[-1]).to(self.ca.device)
        ends = torch.cat([breaks, breaks.new_full((1,), torch.inf)])
        return (self._distances * (ends <= distance)).sum(-1)

    def _contacts(self, pairs: Tensor, distance: float, number: int) -> Tensor:
        """Return -log P(contact) of the likeliest contacts of each designed residue among pairs [N, N], their mean.

        Of residues that can have fewer, those that they can have.
        """
        losses = -(self._near(distance) + TINY).log()
        rows = pairs.any(-1) & self.seen.designed
        if not bool(rows.any()):
            return losses.sum() * 0
        best = losses.masked_fill(~pairs, torch.inf)[rows].topk(min(number, losses.shape[-1]), largest=False).values
        there = best.isfinite()
        return (torch.where(there, best, 0).sum(-1) / there.sum(-1)).mean()


def soft_ipsae(errors: Tensor, shape: LossShape) -> Tensor:
    """Return ipSAE of aligned errors [I, J], of one chain's residues in the frames of another: 0 to 1.

    Dunbrack 2025: the best frame's mean of 1 / (1 + (e / d0)^2) over the residues whose error is below a cutoff, with a
    d0 that follows from their number.  Here a residue counts by a sigmoid about the cutoff: as its width goes to 0 this
    becomes ipSAE.
    """
    counts = torch.sigmoid((shape.error_cutoff - errors) / shape.error_width)
    number = counts.sum(-1, keepdim=True)
    d0 = (1.24 * (number.clamp(min=26) - 15) ** (1 / 3) - 1.8).clamp(min=1)
    return ((counts / (1 + (errors / d0).square())).sum(-1) / (number[:, 0] + TINY)).max()
