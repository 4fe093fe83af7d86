"""AlphaFold-Multimer's MSA features, made in the model: every row of the alignment joins the centres it agrees with.

Which rows are centres in a pass, and how they are masked, was drawn with the features (data/features/make.py), so
nothing here is random.  The monomer's features are made before the model, by another rule (data/features/msa.py).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from warpfold.batch import Batch
from warpfold.geometry.residue import GAP

CLASSES = 23  # 20 residue types, X, gap, mask
CELLS = 1 << 24  # numbers in the one-hot rows that are compared at a time


@torch.no_grad()
def cluster_features(batch: Batch) -> Batch:
    """Return the MSA features of one pass (no `pass` axis): msa_feat, msa_mask and the extra MSA.

    A row's weight in the cluster of a centre is the number of positions that both have, in the centre with which it
    agrees most (gaps and masked positions agree with nothing); equals share it.  A centre itself weighs 1.
    Source: `nearest_neighbor_clusters`, `create_msa_feat`, `create_extra_msa_feature` of the official modules_multimer.
    """
    mask, deletions = batch["alignment_mask"].float(), batch["alignment_deletions"].float()
    centres, extra, masked = batch["centre_rows"], batch["extra_rows"], batch["masked_msa"]
    own_mask, own_deletions = _rows(mask, centres), _rows(deletions, centres)
    codes = _one_hot(masked)
    seen = codes * own_mask[..., None]
    total, removed, weight = _sums(batch["alignment"], mask, deletions, centres, seen)
    members = weight[..., None] + 1
    mean = (removed + own_deletions) / members
    profile = (total + seen) / members[..., None]
    channels = [codes, *_deletion_channels(own_deletions), profile, _deletion_value(mean)[..., None]]
    has_deletion, value = _deletion_channels(_rows(deletions, extra))
    return {
        "msa_feat": torch.cat(channels, -1),
        "msa_mask": own_mask,
        "extra_msa": _rows(batch["alignment"], extra).long(),
        "extra_msa_mask": _rows(mask, extra),
        "extra_has_deletion": has_deletion[..., 0],
        "extra_deletion_value": value[..., 0],
    }


def _sums(
    rows: Tensor, mask: Tensor, deletions: Tensor, centres: Tensor, codes: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weighted sums over each centre's cluster, without the centre.

    rows uint8 [*, R, N], mask and deletions float32 [*, R, N], centres int64 [*, S], codes float32 [*, S, N, 23]: the
    centres as one-hot vectors, 0 where masked -> codes [*, S, N, 23], deletions [*, S, N], weights [*, S].
    """
    *batch, count, length, classes = codes.shape
    others = torch.ones_like(mask[..., 0]).scatter(-1, centres, 0.0)  # a centre joins no cluster
    compared = codes[..., :GAP].flatten(-2)
    present = codes.sum(-1)
    total = codes.new_zeros(*batch, count, length * classes)
    removed, weight = codes.new_zeros(*batch, count, length), codes.new_zeros(*batch, count)
    size = max(CELLS // (length * classes), 1)
    for part in (slice(start, start + size) for start in range(0, rows.shape[-2], size)):
        there = mask[..., part, :]
        one_hot = _one_hot(rows[..., part, :], there)
        agreement = one_hot[..., :GAP].flatten(-2) @ compared.mT
        share = torch.softmax(1e3 * agreement, -1) * (there @ present.mT) * others[..., part, None]
        total += share.mT @ one_hot.flatten(-2)
        removed += share.mT @ (there * deletions[..., part, :])
        weight += share.sum(-2)
    return total.unflatten(-1, (length, classes)), removed, weight


def _one_hot(codes: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return codes [*] below 23 as one-hot vectors, float32 [*, 23], zeros where the mask [*] is 0."""
    # Picking rows of a matrix: torch's one_hot makes integers first, of eight bytes each.
    known = codes.int() if mask is None else torch.where(mask > 0, codes.int(), CLASSES)
    return F.embedding(known, torch.eye(CLASSES + 1, CLASSES, dtype=torch.float32, device=codes.device))


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Return rows `index` [*, K] of x [*, R, N]: [*, K, N]."""
    return torch.take_along_dim(x, index[..., None], -2)


def _deletion_channels(count: Tensor) -> tuple[Tensor, Tensor]:
    """Return whether there are deletions, and how many on a scale from 0 to 1: [*] -> twice [*, 1]."""
    return count.clamp(0, 1)[..., None], _deletion_value(count)[..., None]


def _deletion_value(count: Tensor) -> Tensor:
    return torch.atan(count / 3) * (2 / math.pi)
