"""AlphaFold-Multimer's MSA features, computed in the model: each row of the alignment joins the nearest centres.

The centres of a pass and their masking are drawn with the features (data/features/make.py), so nothing here is random.
The monomer's features are computed before the model, by another rule (data/features/msa.py).

Rows may be soft: probabilities of the classes instead of a code (`soft_alignment`), such as the sequence of a design.
The gradient flows back to the probabilities. The assignment to clusters has no gradient.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from warpfold.batch import NO_ROW, Batch
from warpfold.geometry.residue import GAP

# 20 residue types, X, gap and mask.
CLASSES = 23
# Numbers in the one-hot rows that are compared together.
BLOCK_NUMBERS = 1 << 24


def cluster_features(batch: Batch, dtype: torch.dtype = torch.float32) -> Batch:
    """Compute the MSA features of one pass (no `pass` axis): msa_feat, msa_mask and the extra MSA.

        mask, deletions, code = alignment_mask, alignment_deletions, one_hot(masked_msa, 23)
        x, centre = one_hot(alignment, 23) * mask[..., None], code * mask[centre_rows, :, None]
        agreement = einsum("rnc,snc->rs", x[..., :21], centre[..., :21])
        a = softmax(1e3 * agreement, -1) * (mask @ mask[centre_rows].T)
        a = a.index_fill(0, centre_rows, 0)
        weight = 1 + a.sum(0)[:, None]
        profile = (einsum("rs,rnc->snc", a, x) + centre) / weight[..., None]
        mean = (a.T @ (mask * deletions) + deletions[centre_rows]) / weight
        has_deletion, deletion, mean = deletions.clamp(max=1), atan(deletions / 3) * 2 / pi, atan(mean / 3) * 2 / pi
        own = has_deletion[centre_rows][..., None], deletion[centre_rows][..., None]
        extra = alignment[extra_rows], mask[extra_rows], has_deletion[extra_rows], deletion[extra_rows]
        cat([code, *own, profile, mean[..., None]], -1), mask[centre_rows], *extra

    alignment, alignment_mask, alignment_deletions: [*, R, N]; centre_rows: [*, S] and extra_rows: [*, E], row numbers;
    masked_msa: [*, S, N], the centres' codes after masking. Returns msa_feat [*, S, N, 49], msa_mask [*, S, N],
    extra_msa, extra_msa_mask, extra_has_deletion and extra_deletion_value [*, E, N], by name. Gaps and masked positions
    agree with nothing. A row joins the centre with which it agrees most, with the number of common positions as weight;
    equally near centres share it.
    NO_ROW as row number (the padding of a batch) is a masked row of zeros that no other row joins. If a centre's row is
    soft, its code is used only where it was masked or redrawn.
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
        masked_codes = codes * own_mask[..., None]
        total, removed, weight = _sums(batch, mask, deletions.to(codes.dtype), masked_codes, own_mask.to(codes.dtype))
        members = weight[..., None] + 1
        mean = (removed + own_deletions) / members
        profile = (total + masked_codes) / members[..., None]
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
    """Gather rows `index` [*, K] of the alignment as probabilities [*, K, N, 23]: soft rows, or one-hot codes."""
    soft = batch["soft_alignment"]
    soft_rows = torch.take_along_dim(soft, index.clamp(max=soft.shape[-3] - 1)[..., None, None], -3)
    hard_rows = _one_hot(_rows(batch["alignment"], index)).to(soft.dtype)
    return torch.where((index < soft.shape[-3])[..., None, None], soft_rows, hard_rows)


def _sums(
    batch: Batch, mask: Tensor, deletions: Tensor, codes: Tensor, present: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the weighted sums over each centre's cluster, without the centre.

    mask, deletions: [*, R, N], of all rows. codes: [*, S, N, 23], the probabilities of the centres, 0 where masked.
    present: [*, S, N], the centres' mask. Returns codes [*, S, N, 23], deletions [*, S, N] and weights [*, S].
    """
    rows, soft, centres = batch["alignment"], batch.get("soft_alignment"), batch["centre_rows"]
    *lead, count, length, classes = codes.shape
    # A centre joins no cluster. Row 0, the query, is always a centre, so NO_ROW (negative) may be clamped to it.
    non_centres = torch.ones_like(mask[..., 0]).scatter(-1, centres.clamp(min=0), 0.0)
    compared = codes[..., :GAP].flatten(-2).detach()
    total = codes.new_zeros(*lead, count, length * classes)
    removed, weight = codes.new_zeros(*lead, count, length), codes.new_zeros(*lead, count)
    size = max(BLOCK_NUMBERS // (length * classes * math.prod(lead)), 1)
    for block in (slice(start, start + size) for start in range(0, rows.shape[-2], size)):
        block_mask = mask[..., block, :].to(codes.dtype)
        x = _one_hot(rows[..., block, :], block_mask).to(codes.dtype)
        # The first rows of the alignment may be soft.
        if soft is not None and block.start < soft.shape[-3]:
            soft_rows = soft[..., block, :, :]
            soft_rows = soft_rows * block_mask[..., : soft_rows.shape[-3], :, None]
            x = torch.cat((soft_rows, x[..., soft_rows.shape[-3] :, :, :]), -3)
        agreement = x[..., :GAP].flatten(-2).detach() @ compared.mT
        agreement = agreement.masked_fill(centres[..., None, :] == NO_ROW, -math.inf)
        a = torch.softmax(1e3 * agreement, -1) * (block_mask @ present.mT) * non_centres[..., block, None]
        total += a.mT @ x.flatten(-2)
        removed += a.mT @ (block_mask * deletions[..., block, :])
        weight += a.sum(-2)
    return total.unflatten(-1, (length, classes)), removed, weight


def _one_hot(codes: Tensor, mask: Tensor | None = None) -> Tensor:
    """Convert codes [*] below 23 to one-hot vectors, float32 [*, 23], with zeros where the mask [*] is 0."""
    # Rows of an identity matrix. torch's one_hot would allocate int64 vectors first.
    index = codes.int() if mask is None else torch.where(mask > 0, codes.int(), CLASSES)
    return F.embedding(index, torch.eye(CLASSES + 1, CLASSES, dtype=torch.float32, device=codes.device))


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Gather rows `index` [*, K] of x [*, R, N], [*, K, N], with zeros for NO_ROW."""
    rows = torch.take_along_dim(x, index.clamp(min=0)[..., None], -2)
    return rows.masked_fill((index == NO_ROW)[..., None], 0)


def _deletion_channels(count: Tensor) -> tuple[Tensor, Tensor]:
    """Compute whether there are deletions, and their number on a scale from 0 to 1: [*] -> two of [*, 1]."""
    return count.clamp(0, 1)[..., None], _deletion_value(count)[..., None]


def _deletion_value(count: Tensor) -> Tensor:
    return torch.atan(count / 3) * (2 / math.pi)
