"""AlphaFold-Multimer's MSA features, made in the model: every row of the alignment joins the centres it agrees with.

Which rows are centres in a pass, and how they are masked, was drawn with the features (data/features/make.py), so
nothing here is random.  The monomer's features are made before the model, by another rule (data/features/msa.py).

Rows may be soft: shares of the classes in place of a code (`soft_alignment`), as the sequence of a design is.  A
gradient then goes back to them; which row joins which cluster is a constant for it.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from warpfold.batch import NO_ROW, Batch
from warpfold.geometry.residue import GAP

CLASSES = 23  # 20 residue types, X, gap, mask
CELLS = 1 << 24  # numbers in the one-hot rows that are compared at a time


def cluster_features(batch: Batch, dtype: torch.dtype = torch.float32) -> Batch:
    """Return the MSA features of one pass (no `pass` axis): msa_feat, msa_mask and the extra MSA.

    A row's weight in the cluster of a centre is the number of positions that both have, in the centre with which it
    agrees most (gaps and masked positions agree with nothing); equals share it.  A centre itself weighs 1.
    NO_ROW in place of a row's number, as a batch is padded, is a masked row of zeros that no other joins.
    Where a centre's code was masked or drawn anew, that code is seen, though its row be soft.
    Source: `nearest_neighbor_clusters`, `create_msa_feat`, `create_extra_msa_feature` of the official modules_multimer.
    """
    with torch.set_grad_enabled(torch.is_grad_enabled() and "soft_alignment" in batch):
        mask, deletions = batch["alignment_mask"].to(dtype), batch["alignment_deletions"].to(dtype)
        centres, extra, masked = batch["centre_rows"], batch["extra_rows"], batch["masked_msa"]
        own_mask, own_deletions = _rows(mask, centres), _rows(deletions, centres)
        codes = _one_hot(masked).to(dtype)
        if "soft_alignment" in batch:
            as_drawn = (masked == _rows(batch["alignment"], centres))[..., None]
            codes = torch.where(as_drawn, _soft_rows(batch, centres), codes)
        seen = codes * own_mask[..., None]
        total, removed, weight = _sums(batch, mask, deletions.to(codes.dtype), seen, own_mask.to(codes.dtype))
        members = weight[..., None] + 1
        mean = (removed + own_deletions) / members
        profile = (total + seen) / members[..., None]
        channels = [codes, *_deletion_channels(own_deletions), profile, _deletion_value(mean)[..., None]]
        has_deletion, value = _deletion_channels(_rows(deletions, extra))
        soft = {"soft_extra": _soft_rows(batch, extra)} if "soft_alignment" in batch else {}
        return {
            "msa_feat": torch.cat(channels, -1),
            "msa_mask": own_mask,
            "extra_msa": _rows(batch["alignment"], extra).long(),
            "extra_msa_mask": _rows(mask, extra),
            "extra_has_deletion": has_deletion[..., 0],
            "extra_deletion_value": value[..., 0],
            **soft,
        }


def _soft_rows(batch: Batch, index: Tensor) -> Tensor:
    """Return rows `index` [*, K] of the alignment as shares of the classes, [*, K, N, 23]: given, or one-hot codes."""
    soft = batch["soft_alignment"]
    given = torch.take_along_dim(soft, index.clamp(max=soft.shape[-3] - 1)[..., None, None], -3)
    known = _one_hot(_rows(batch["alignment"], index)).to(soft.dtype)
    return torch.where((index < soft.shape[-3])[..., None, None], given, known)


def _sums(
    batch: Batch, mask: Tensor, deletions: Tensor, codes: Tensor, present: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weighted sums over each centre's cluster, without the centre.

    mask, deletions [*, R, N], of all rows; codes [*, S, N, 23]: the centres as shares of the classes, 0 where masked;
    present [*, S, N]: their mask -> codes [*, S, N, 23], deletions [*, S, N], weights [*, S].
    """
    rows, soft, centres = batch["alignment"], batch.get("soft_alignment"), batch["centre_rows"]
    *lead, count, length, classes = codes.shape
    # A centre joins no cluster; row 0, the query, is always one.
    others = torch.ones_like(mask[..., 0]).scatter(-1, centres.clamp(min=0), 0.0)
    compared = codes[..., :GAP].flatten(-2).detach()
    total = codes.new_zeros(*lead, count, length * classes)
    removed, weight = codes.new_zeros(*lead, count, length), codes.new_zeros(*lead, count)
    size = max(CELLS // (length * classes * math.prod(lead)), 1)
    for part in (slice(start, start + size) for start in range(0, rows.shape[-2], size)):
        there = mask[..., part, :].to(codes.dtype)
        one_hot = _one_hot(rows[..., part, :], there).to(codes.dtype)
        if soft is not None and part.start < soft.shape[-3]:
            given = soft[..., part, :, :]
            given = given * there[..., : given.shape[-3], :, None]
            one_hot = torch.cat((given, one_hot[..., given.shape[-3] :, :, :]), -3)
        agreement = one_hot[..., :GAP].flatten(-2).detach() @ compared.mT
        agreement = agreement.masked_fill(centres[..., None, :] == NO_ROW, -math.inf)
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
    """Return rows `index` [*, K] of x [*, R, N], [*, K, N]; zeros for NO_ROW."""
    found = torch.take_along_dim(x, index.clamp(min=0)[..., None], -2)
    return found.masked_fill((index == NO_ROW)[..., None], 0)


def _deletion_channels(count: Tensor) -> tuple[Tensor, Tensor]:
    """Return whether there are deletions, and how many on a scale from 0 to 1: [*] -> twice [*, 1]."""
    return count.clamp(0, 1)[..., None], _deletion_value(count)[..., None]


def _deletion_value(count: Tensor) -> Tensor:
    return torch.atan(count / 3) * (2 / math.pi)
