"""From features to the first m and z: Algorithms 3, 4, 5 and 32, and the extra MSA's embedding."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from warpfold.batch import Batch
from warpfold.geometry.atoms import distogram_bins
from warpfold.model.execution import Executable
from warpfold.model.layers import LayerNorm, Linear

TARGET_CHANNELS, MSA_CHANNELS, EXTRA_CHANNELS = 22, 49, 25  # of target_feat, msa_feat and the extra MSA (Supp. table 1)
EXTRA_CLASSES = 23  # 20 residue types, X, gap, mask


class InputEmbedder(Executable):
    """Algorithm 3: target_feat [*, r, 22] and msa_feat [*, s, r, 49] -> m [*, s, r, c_m], z [*, r, r, c_z].

    Returns this rank's shards of m and z.
    """

    def __init__(self, c_m: int, c_z: int, max_relative: int = 32) -> None:
        super().__init__()
        self.target_m = Linear(TARGET_CHANNELS, c_m)
        self.msa_m = Linear(MSA_CHANNELS, c_m)
        self.left = Linear(TARGET_CHANNELS, c_z)
        self.right = Linear(TARGET_CHANNELS, c_z)
        self.position = RelativePosition(c_z, max_relative)

    def forward(self, target_feat: Tensor, msa_feat: Tensor, residue_index: Tensor) -> tuple[Tensor, Tensor]:
        local_shard = self.residues.local_shard
        target, index = local_shard(target_feat, -2), local_shard(residue_index, -1)
        m = self.target_m(target)[..., None, :, :] + self.msa_m(local_shard(msa_feat, -2))
        z = self.left(target)[..., :, None, :] + self.right(target_feat)[..., None, :, :]
        return m, z + self.position(index, residue_index).to(z.dtype)


class RelativePosition(nn.Module):
    """Algorithms 4 and 5: an embedding of the clipped offset of residues i [*, I] and j [*, J] -> [*, I, J, c_z]."""

    def __init__(self, c_z: int, max_relative: int = 32) -> None:
        super().__init__()
        self.max_relative = max_relative
        self.linear = Linear(2 * max_relative + 1, c_z)

    def forward(self, i: Tensor, j: Tensor) -> Tensor:
        offset = i[..., :, None] - j[..., None, :]
        bins = (offset.clamp(-self.max_relative, self.max_relative) + self.max_relative).long()
        # Picking rows of the weight is the product with a one-hot vector, without building it.
        return F.embedding(bins, self.linear.weight.T) + self.linear.bias


class RecyclingEmbedder(Executable):
    """Algorithm 32: what the previous pass adds to the first row of m and to z."""

    min_bin, max_bin, bins = 3.25, 20.75, 15  # angstrom, of the distances between (pseudo) beta carbons

    def __init__(self, c_m: int, c_z: int) -> None:
        super().__init__()
        self.distance = Linear(self.bins, c_z)
        self.norm_m = LayerNorm(c_m)
        self.norm_z = LayerNorm(c_z)

    def forward(self, m_first: Tensor, z: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        """Return what to add to the first row of m and to z.

        m_first [*, r, c_m], z [*, r, r, c_z]: this rank's shards of what the last pass computed; beta [*, r, 3] in
        angstrom: whole.  All are zeros before the first pass; the norms' offsets and the bias apply even then, as in
        the official code.
        """
        d = distogram_bins(beta, self.min_bin, self.max_bin, self.bins, self.residues.local_shard(beta, -2))
        return self.norm_m(m_first), self.distance(d.to(z.dtype)) + self.norm_z(z)


class ExtraMSAEmbedder(Executable):
    """Algorithm 2, line 16: the extra MSA as one-hot codes and deletions.

    Returns this rank's shard of [*, extra, r, c_e].
    """

    def __init__(self, c_e: int) -> None:
        super().__init__()
        self.linear = Linear(EXTRA_CHANNELS, c_e)

    def forward(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        msa, *deletions = (
            self.residues.local_shard(batch[name], -1)
            for name in ("extra_msa", "extra_has_deletion", "extra_deletion_value")
        )
        codes = F.one_hot(msa, EXTRA_CLASSES).to(dtype)
        return self.linear(torch.cat((codes, torch.stack(deletions, -1).to(dtype)), -1))
