"""Resolve the permutation of equal chains: assign each predicted chain a copy of its entity as truth (Multimer, 2.3).

The truth of a chain may be any copy of its entity in the assembly, including copies outside the crop. The prediction is
superposed on the truth by one chain, the anchor. Every chain then takes a copy near it. All pairs of an anchor and a
copy are tried, and the pair that brings all chains nearest to their copies is used.

The assignment has no gradient. It runs on the host: one sum over the residues gives moments of every chain with every
copy, and the work after that does not depend on the lengths of the chains. It is not captured in a graph, but computed
anew at each replay.
"""

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from warpfold.batch import Batch
from warpfold.device import outside_graph
from warpfold.geometry.labels import structure_labels
from warpfold.geometry.residue import ATOM_ORDER
from warpfold.ops.torch_internals import without_modes

# The feature whose presence in a batch means that the permutation is not resolved yet.
COPIES = "copy_atom_positions"
CA = ATOM_ORDER["CA"]
# Resolved residues that determine the rotation of an anchor.
MIN_ANCHOR_RESIDUES = 3
# Up to this number of assignments of chains to copies, all are tried for each anchor. Beyond it, the search is greedy.
MAX_ASSIGNMENTS = 1000


@torch.no_grad()
def with_truth(batch: Mapping[str, Tensor], atoms: Tensor) -> Batch:
    """Return the batch with the truth that is nearest to a prediction, and all labels that follow from it.

    atoms: [N, 37, 3], the prediction, angstrom. A batch without `copy_atom_positions` already has its truth, and is
    returned unchanged. The result has no gradient.
    """
    if COPIES not in batch:
        return dict(batch)
    positions, mask = batch[COPIES], batch["copy_atom_mask"]
    other_features = {name: x for name, x in batch.items() if name not in (COPIES, "copy_atom_mask")}
    copy = torch.zeros_like(batch["asym_id"])
    if len(positions) > 1:
        arguments = atoms[:, CA], positions[:, :, CA], mask[:, :, CA], batch["asym_id"], batch["entity_id"]
        # Within a graph, the host computes this at each replay.
        outside_graph(lambda: copy.copy_(nearest_copies(*arguments)))
    residues = torch.arange(len(copy), device=copy.device)
    positions, mask = positions[copy, residues], mask[copy, residues]
    labels = structure_labels(batch["aatype"], positions, mask)
    return {**other_features, "all_atom_positions": positions, "all_atom_mask": mask, **labels}


def nearest_copies(points: Tensor, copies: Tensor, mask: Tensor, asym_id: Tensor, entity_id: Tensor) -> Tensor:
    """Compute for each residue the copy of its entity that is its truth: int64 [N], on the device.

    points: [N, 3], predicted CA, angstrom. copies: [C, N, 3], and mask: [C, N], the truth of each residue in each copy
    and whether it is resolved. asym_id, entity_id: [N]; no entity has more than C chains. The chains of an entity get
    different copies. Copies without resolved residues are assigned last.
    """
    # The host waits for the device here.
    asym, entity = asym_id.cpu(), entity_id.cpu()
    points, copies, mask = (x.detach().cpu().double() for x in (points, copies, mask))
    chains, chain = asym.unique(return_inverse=True)
    member = chain == torch.arange(len(chains))[:, None]
    entities = entity[member.int().argmax(-1)]
    # A prediction that is not finite raises its own error later.
    finite = torch.nan_to_num(points, posinf=0.0, neginf=0.0)
    moments = Moments.of(finite, copies, mask, member.double())
    return _assign(moments, entities)[chain].to(asym_id.device)


@dataclass(frozen=True)
class Moments:
    """Moments of K chains with C copies, which give their distances after any rigid motion.

    length: [K], the residues of the chain. seen: [K, C], the number of these that are resolved in the copy. The others
    are means over the resolved residues: point and copy [K, C, 3], the centres of predicted and true CA; covariance
    [K, C, 3, 3] of predicted (rows) and true CA; spread [K, C], the mean square distance of the predicted CA from their
    centre plus that of the true CA.
    """

    length: Tensor
    seen: Tensor
    point: Tensor
    copy: Tensor
    covariance: Tensor
    spread: Tensor

    @staticmethod
    def of(points: Tensor, copies: Tensor, mask: Tensor, member: Tensor) -> "Moments":
        """Average over residues: points [N, 3], copies [C, N, 3], mask [C, N] and member [K, N] of 0 and 1, in fp64."""
        # Centred, so that differences of squares keep their digits.
        points = points - points.mean(0)
        copies = copies - (mask[..., None] * copies).sum((0, 1)) / mask.sum().clamp(min=1)
        p = points.expand_as(copies)
        products = (p[..., :, None] * copies[..., None, :]).flatten(-2)
        squares = (p.square() + copies.square()).sum(-1, keepdim=True)
        per_residue = torch.cat([p, copies, products, squares], -1) * mask[..., None]
        resolved_counts = member @ mask.T
        means = torch.einsum("kn,cnf->kcf", member, per_residue) / resolved_counts.clamp(min=1)[..., None]
        point, copy, product, square = means.split((3, 3, 9, 1), -1)
        covariance = product.unflatten(-1, (3, 3)) - point[..., :, None] * copy[..., None, :]
        spread = square[..., 0] - point.square().sum(-1) - copy.square().sum(-1)
        return Moments(member.sum(-1), resolved_counts, point, copy, covariance, spread)

    def superpose(self, chain: Tensor, copy: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the motions that superpose chains on copies (indices [A]): rotations [A, 3, 3], translations [A, 3].

        Source: Kabsch 1976.
        """
        u, _, vt = torch.linalg.svd(self.covariance[chain, copy])
        mirrored = torch.linalg.det(u @ vt) < 0
        vt = torch.where(mirrored[:, None, None], vt * vt.new_tensor([1.0, 1.0, -1.0])[:, None], vt)
        rotation = (u @ vt).mT
        return rotation, self.copy[chain, copy] - (rotation @ self.point[chain, copy][..., None])[..., 0]

    def squared_distances(self, rotation: Tensor, translation: Tensor) -> Tensor:
        """Compute the mean squared distance [A, K, C] of each moved chain from each copy, square angstrom."""
        moved_points = torch.einsum("axy,kcy->akcx", rotation, self.point) + translation[:, None, None]
        overlap = torch.einsum("ayx,kcxy->akc", rotation, self.covariance)
        return (self.spread - 2 * overlap).clamp(min=0) + (moved_points - self.copy).square().sum(-1)


def _assign(moments: Moments, entities: Tensor) -> Tensor:
    """Assign each chain a copy, int64 [K]: the nearest ones under the best anchor."""
    chain, copy = _anchors(moments, entities)
    assignment = torch.zeros(max(len(chain), 1), len(entities), dtype=torch.long)
    if not len(chain):
        return assignment[0]
    cost = moments.length[:, None] * moments.squared_distances(*moments.superpose(chain, copy))
    # A copy without resolved residues costs more than all others together, so it is assigned last.
    cost = torch.where(moments.seen > 0, cost, 1 + (cost * (moments.seen > 0)).sum())
    total = cost.new_zeros(len(chain))
    for entity in entities.unique():
        rows = (entities == entity).nonzero()[:, 0]
        # Resolved copies first, and of the others no more than the chains need.
        is_resolved = (moments.seen[rows] > 0).any(0)
        copies = (~is_resolved).int().argsort(stable=True)[: max(len(rows), int(is_resolved.sum()))]
        best_copies, sums = _cheapest(cost[:, rows][..., copies])
        assignment[:, rows] = copies[best_copies]
        total += sums
    return assignment[total.argmin()]


def _anchors(moments: Moments, entities: Tensor) -> tuple[Tensor, Tensor]:
    """Return the chains and copies to superpose: all pairs of the entity with fewest resolved copies.

    Among several such entities, the one with most resolved residues is used. Pairs with too few resolved residues to
    determine a rotation are used only if there are no others.
    """
    fixed = moments.seen >= MIN_ANCHOR_RESIDUES
    fixed = fixed if fixed.any() else moments.seen > 0

    def rank(entity: Tensor) -> tuple[int, float]:
        resolved_counts = moments.seen[entities == entity]
        return int((resolved_counts > 0).any(0).sum()), -float(resolved_counts.max())

    candidates = entities[fixed.any(-1)].unique()
    if not len(candidates):
        return candidates, candidates
    entity = min(candidates, key=rank)
    chain, copy = (fixed & (entities == entity)[:, None]).nonzero().unbind(-1)
    return chain, copy


def _cheapest(cost: Tensor) -> tuple[Tensor, Tensor]:
    """Assign K chains different copies by costs [A, K, C]. Return the copies [A, K] and the sums of their costs [A].

    The assignment is optimal if there are at most `MAX_ASSIGNMENTS`. Otherwise the cheapest pair is assigned first,
    then the cheapest of the remaining pairs, and so on.
    """
    anchors, chains, copies = cost.shape
    if math.perm(copies, chains) <= MAX_ASSIGNMENTS:
        assignments = _assignments(copies, chains)
        sums = cost[:, torch.arange(chains), assignments].sum(-1)
        best, number = sums.min(-1)
        return assignments[number], best
    assignment, remaining = torch.zeros(anchors, chains, dtype=torch.long), cost.clone()
    anchor = torch.arange(anchors)
    for _ in range(chains):
        chain, copy = (index := remaining.flatten(1).argmin(-1)) // copies, index % copies
        assignment[anchor, chain] = copy
        remaining[anchor, chain], remaining[anchor, :, copy] = torch.inf, torch.inf
    return assignment, cost.gather(-1, assignment[..., None])[..., 0].sum(-1)


@functools.cache
def _assignments(copies: int, chains: int) -> Tensor:
    """Return all assignments of different copies to chains: int64 [assignments, chains]."""
    # The cached tensor must have values even when called under a mode whose tensors have none (cost/fake.py).
    return without_modes(lambda: torch.tensor(list(itertools.permutations(range(copies), chains)), device="cpu"))
