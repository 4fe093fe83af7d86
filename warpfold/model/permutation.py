"""Which copy of an entity is whose truth: equal chains have no names, so the prediction decides (Multimer, 2.3).

The truth of a chain may be any copy of its entity in the assembly, one that is not in the crop included.  A prediction
is laid over the truth by one chain, the anchor; then every chain takes a copy that lies where it is.  All pairs of an
anchor and a copy are tried, and the one that brings all chains nearest to their copies decides.

Nothing of this has a gradient.  It is done on the host, where numbers are few: residues are summed once, to moments of
every chain with every copy, and what is tried after that costs the same for chains of any length.  A graph leaves it to
each replay.
"""

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from warpfold.batch import Batch
from warpfold.device import between
from warpfold.geometry.labels import structure_labels
from warpfold.geometry.residue import ATOM_ORDER
from warpfold.ops.torch_internals import without_modes

COPIES = "copy_atom_positions"  # in a batch: which copy is whose truth is still to be decided
CA = ATOM_ORDER["CA"]
RIGID = 3  # resolved residues that an anchor should have: fewer leave it free to turn
EVERY = 1000  # ways to assign chains to copies that are all tried, per anchor; of more, the nearest come first


@torch.no_grad()
def with_truth(batch: Mapping[str, Tensor], atoms: Tensor) -> Batch:
    """Return the batch with the truth that is nearest to a prediction, and all labels that follow from it.

    atoms [N, 37, 3]: the prediction, angstrom.  A batch without `copy_atom_positions` has its truth already, and is
    returned as it is.  No gradient.
    """
    if COPIES not in batch:
        return dict(batch)
    positions, mask = batch[COPIES], batch["copy_atom_mask"]
    rest = {name: x for name, x in batch.items() if name not in (COPIES, "copy_atom_mask")}
    copy = torch.zeros_like(batch["asym_id"])
    if len(positions) > 1:
        known = atoms[:, CA], positions[:, :, CA], mask[:, :, CA], batch["asym_id"], batch["entity_id"]
        between(lambda: copy.copy_(nearest_copies(*known)))
    residues = torch.arange(len(copy), device=copy.device)
    positions, mask = positions[copy, residues], mask[copy, residues]
    labels = structure_labels(batch["aatype"], positions, mask)
    return {**rest, "all_atom_positions": positions, "all_atom_mask": mask, **labels}


def nearest_copies(points: Tensor, copies: Tensor, mask: Tensor, asym_id: Tensor, entity_id: Tensor) -> Tensor:
    """Return for each residue which copy of its entity is its truth: int64 [N], on the device.

    points [N, 3]: predicted Ca, angstrom; copies [C, N, 3], mask [C, N]: the truth of each residue in each copy, and
    whether it was seen; asym_id and entity_id [N]: of chains, of which no entity has more than C.  The chains of an
    entity get different copies.  Copies of which nothing was seen come last.
    """
    asym, entity = asym_id.cpu(), entity_id.cpu()  # the host waits for the device here
    points, copies, mask = (x.detach().cpu().double() for x in (points, copies, mask))
    chains, chain = asym.unique(return_inverse=True)
    member = chain == torch.arange(len(chains))[:, None]
    entities = entity[member.int().argmax(-1)]
    finite = torch.nan_to_num(
        points, posinf=0.0, neginf=0.0
    )  # a prediction that is not finite fails later, and is told
    moments = Moments.of(finite, copies, mask, member.double())
    return _assign(moments, entities)[chain].to(asym_id.device)


@dataclass(frozen=True)
class Moments:
    """What tells how far K chains lie from C copies after any rigid motion: means over the residues that were seen."""

    length: Tensor  # [K] residues of the chain
    seen: Tensor  # [K, C] how many of them were seen in the copy
    point: Tensor  # [K, C, 3] centre of the predicted Ca
    copy: Tensor  # [K, C, 3] centre of the true ones
    covariance: Tensor  # [K, C, 3, 3] of predicted (rows) and true ones
    spread: Tensor  # [K, C] mean square distance of the predicted ones from their centre, plus that of the true ones

    @staticmethod
    def of(points: Tensor, copies: Tensor, mask: Tensor, member: Tensor) -> "Moments":
        """Average over residues: points [N, 3], copies [C, N, 3], mask [C, N], member [K, N]; 0 or 1; all fp64."""
        points = points - points.mean(0)  # near the origin, so that differences of squares keep their digits
        copies = copies - (mask[..., None] * copies).sum((0, 1)) / mask.sum().clamp(min=1)
        p = points.expand_as(copies)
        products = (p[..., :, None] * copies[..., None, :]).flatten(-2)
        squares = (p.square() + copies.square()).sum(-1, keepdim=True)
        of_residues = torch.cat([p, copies, products, squares], -1) * mask[..., None]
        seen = member @ mask.T
        means = torch.einsum("kn,cnf->kcf", member, of_residues) / seen.clamp(min=1)[..., None]
        point, copy, product, square = means.split((3, 3, 9, 1), -1)
        covariance = product.unflatten(-1, (3, 3)) - point[..., :, None] * copy[..., None, :]
        spread = square[..., 0] - point.square().sum(-1) - copy.square().sum(-1)
        return Moments(member.sum(-1), seen, point, copy, covariance, spread)

    def superpose(self, chain: Tensor, copy: Tensor) -> tuple[Tensor, Tensor]:
        """Return the motions that lay chains over copies (indices [A]): rotations [A, 3, 3], translations [A, 3].

        Source: Kabsch 1976.
        """
        u, _, vt = torch.linalg.svd(self.covariance[chain, copy])
        mirrored = torch.linalg.det(u @ vt) < 0
        vt = torch.where(mirrored[:, None, None], vt * vt.new_tensor([1.0, 1.0, -1.0])[:, None], vt)
        rotation = (u @ vt).mT
        return rotation, self.copy[chain, copy] - (rotation @ self.point[chain, copy][..., None])[..., 0]

    def squared_distances(self, rotation: Tensor, translation: Tensor) -> Tensor:
        """Return the mean squared distance [A, K, C] of each moved chain from each copy, square angstrom."""
        moved = torch.einsum("axy,kcy->akcx", rotation, self.point) + translation[:, None, None]
        turned = torch.einsum("ayx,kcxy->akc", rotation, self.covariance)
        return (self.spread - 2 * turned).clamp(min=0) + (moved - self.copy).square().sum(-1)


def _assign(moments: Moments, entities: Tensor) -> Tensor:
    """Return the copy of each chain, int64 [K]: those that are nearest under the best anchor."""
    chain, copy = _anchors(moments, entities)
    taken = torch.zeros(max(len(chain), 1), len(entities), dtype=torch.long)
    if not len(chain):
        return taken[0]
    cost = moments.length[:, None] * moments.squared_distances(*moments.superpose(chain, copy))
    # Worse than all others together: a copy that was not seen is left for last.
    cost = torch.where(moments.seen > 0, cost, 1 + (cost * (moments.seen > 0)).sum())
    total = cost.new_zeros(len(chain))
    for entity in entities.unique():
        rows = (entities == entity).nonzero()[:, 0]
        seen = (moments.seen[rows] > 0).any(0)
        places = (~seen).int().argsort(stable=True)[: max(len(rows), int(seen.sum()))]  # seen ones first
        chosen, sums = _cheapest(cost[:, rows][..., places])
        taken[:, rows] = places[chosen]
        total += sums
    return taken[total.argmin()]


def _anchors(moments: Moments, entities: Tensor) -> tuple[Tensor, Tensor]:
    """Return chains and copies to superpose: every pair of the entity of fewest copies, or of the longest of these.

    Copies that were not seen do not count, and pairs that fix no rotation only where there are no others.
    """
    fixed = moments.seen >= RIGID
    fixed = fixed if fixed.any() else moments.seen > 0

    def rank(entity: Tensor) -> tuple[int, float]:
        seen = moments.seen[entities == entity]
        return int((seen > 0).any(0).sum()), -float(seen.max())

    candidates = entities[fixed.any(-1)].unique()
    if not len(candidates):
        return candidates, candidates
    entity = min(candidates, key=rank)
    chain, copy = (fixed & (entities == entity)[:, None]).nonzero().unbind(-1)
    return chain, copy


def _cheapest(cost: Tensor) -> tuple[Tensor, Tensor]:
    """Return for costs [A, K, C] the copies [A, K] that K chains take, all different, and the sums of their costs [A].

    The cheapest of all ways, if there are at most `EVERY`; otherwise the cheapest pair comes first, then the cheapest
    of the others, and so on.
    """
    anchors, chains, copies = cost.shape
    if math.perm(copies, chains) <= EVERY:
        ways = _ways(copies, chains)
        sums = cost[:, torch.arange(chains), ways].sum(-1)
        best, way = sums.min(-1)
        return ways[way], best
    taken, left = torch.zeros(anchors, chains, dtype=torch.long), cost.clone()
    each = torch.arange(anchors)
    for _ in range(chains):
        chain, copy = (index := left.flatten(1).argmin(-1)) // copies, index % copies
        taken[each, chain] = copy
        left[each, chain], left[each, :, copy] = torch.inf, torch.inf
    return taken, cost.gather(-1, taken[..., None])[..., 0].sum(-1)


@functools.cache
def _ways(copies: int, chains: int) -> Tensor:
    """Return all ways to give each of some chains a copy of its own: int64 [ways, chains]."""
    # What is kept must be numbers, also where tensors have no memory (cost/fake.py).
    return without_modes(lambda: torch.tensor(list(itertools.permutations(range(copies), chains)), device="cpu"))
