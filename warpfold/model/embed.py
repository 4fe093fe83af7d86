"""From features to the first m and z: Algorithms 3, 4, 5 and 32, and the extra MSA's embedding."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from warpfold.batch import Batch
from warpfold.geometry.atoms import distogram_bins
from warpfold.model.layers import LayerNorm, Linear

TARGET_CHANNELS, MSA_CHANNELS, EXTRA_CHANNELS = 22, 49, 25  # of target_feat, msa_feat and the extra MSA (Supp. table 1)
EXTRA_CLASSES = 23  # 20 residue types, X, gap, mask


class InputEmbedder(nn.Module):
    """Algorithm 3: target_feat [*, r, 22] and msa_feat [*, s, r, 49] -> m [*, s, r, c_m], z [*, r, r, c_z]."""

    def __init__(self, c_m: int, c_z: int, max_relative: int = 32) -> None:
        super().__init__()
        self.target_m = Linear(TARGET_CHANNELS, c_m)
        self.msa_m = Linear(MSA_CHANNELS, c_m)
        self.left = Linear(TARGET_CHANNELS, c_z)
        self.right = Linear(TARGET_CHANNELS, c_z)
        self.position = RelativePosition(c_z, max_relative)

    def forward(self, target_feat: Tensor, msa_feat: Tensor, residue_index: Tensor) -> tuple[Tensor, Tensor]:
        m = self.target_m(target_feat)[..., None, :, :] + self.msa_m(msa_feat)
        z = self.left(target_feat)[..., :, None, :] + self.right(target_feat)[..., None, :, :]
        return m, z + self.position(residue_index).to(z.dtype)


class RelativePosition(nn.Module):
    """Algorithms 4 and 5: an embedding of the clipped residue offset i - j.  residue_index [*, r] -> [*, r, r, c_z]."""

    def __init__(self, c_z: int, max_relative: int = 32) -> None:
        super().__init__()
        self.max_relative = max_relative
        self.linear = Linear(2 * max_relative + 1, c_z)

    def forward(self, residue_index: Tensor) -> Tensor:
        offset = residue_index[..., :, None] - residue_index[..., None, :]
        bins = (offset.clamp(-self.max_relative, self.max_relative) + self.max_relative).long()
        # Picking rows of the weight is the product with a one-hot vector, without building it.
        return F.embedding(bins, self.linear.weight.T) + self.linear.bias


class RecyclingEmbedder(nn.Module):
    """Algorithm 32: what the previous pass adds to the first row of m and to z."""

    min_bin, max_bin, bins = 3.25, 20.75, 15  # angstrom, of the distances between (pseudo) beta carbons

    def __init__(self, c_m: int, c_z: int) -> None:
        super().__init__()
        self.distance = Linear(self.bins, c_z)
        self.norm_m = LayerNorm(c_m)
        self.norm_z = LayerNorm(c_z)

    def forward(self, m_first: Tensor, z: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        """m_first [*, r, c_m], z [*, r, r, c_z], beta [*, r, 3] in angstrom of the last pass -> what to add to both.

        All zeros before the first pass; the norms' offsets and the bias apply even then, as in the official code.
        """
        d = distogram_bins(beta, self.min_bin, self.max_bin, self.bins)
        return self.norm_m(m_first), self.distance(d.to(z.dtype)) + self.norm_z(z)


class ExtraMSAEmbedder(nn.Module):
    """Algorithm 2, line 16: the extra MSA as one-hot codes and deletions -> [*, extra, r, c_e]."""

    def __init__(self, c_e: int) -> None:
        super().__init__()
        self.linear = Linear(EXTRA_CHANNELS, c_e)

    def forward(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        codes = F.one_hot(batch["extra_msa"], EXTRA_CLASSES).to(dtype)
        deletions = torch.stack((batch["extra_has_deletion"], batch["extra_deletion_value"]), -1).to(dtype)
        return self.linear(torch.cat((codes, deletions), -1))
