"""Embedders of features and recycled results: Algorithms 3, 4, 5 and 32, and the extra MSA's embedding.

As in evoformer.py, the docstring of each layer contains its definition, which a test executes. `batch` is the features
by name; `dtype` and `rows` are the result's dtype and rows, in a definition all of them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from warpfold.batch import Batch
from warpfold.geometry.atoms import distance_bins
from warpfold.model.axial import Executable
from warpfold.model.layers import LayerNorm, Linear
from warpfold.ops.tensors import one_hot, take_rows

# Channels of target_feat, msa_feat and the extra MSA (Supp. table 1).
TARGET_CHANNELS, MSA_CHANNELS, EXTRA_CHANNELS = 22, 49, 25
# 20 residue types, X, gap and mask.
EXTRA_CLASSES = 23


@dataclass(frozen=True, kw_only=True)
class MultimerConfig:
    """The settings that only AlphaFold-Multimer has (Evans et al. 2022)."""

    # The relative positions clip the difference between the numbers of two copies of an entity to this.
    max_chain: int = 2


class InputEmbedder(Executable):
    """Algorithm 3, InputEmbedder: compute the first m [*, s, r, c_m] and z [*, r, r, c_z].

        target = target_feat[:, -target_m.in_features :]
        m = target_m(target) + msa_m(msa_feat)
        z = left(target)[:, None] + right(target) + position(batch)
        m, z

    target_feat: [*, r, 22]; msa_feat: [*, s, r, 49]. A multimer omits the first channel of target_feat (the chain
    break), because its relative positions distinguish chains. `msa` and `pair` compute this rank's shards.
    """

    def __init__(self, c_m: int, c_z: int, max_relative: int = 32, multimer: MultimerConfig | None = None) -> None:
        super().__init__()
        channels = TARGET_CHANNELS if multimer is None else TARGET_CHANNELS - 1
        self.target_m = Linear(channels, c_m)
        self.msa_m = Linear(MSA_CHANNELS, c_m)
        self.left = Linear(channels, c_z)
        self.right = Linear(channels, c_z)
        self.position = (
            RelativePosition(c_z, max_relative)
            if multimer is None
            else ChainRelativePosition(c_z, max_relative, multimer.max_chain)
        )

    def msa(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        """Compute this rank's shard of m [*, s, r, c_m]."""
        local_shard = self.residues.local_shard
        target = local_shard(self._target(batch, dtype), -2)
        return self.target_m(target)[..., None, :, :] + self.msa_m(local_shard(batch["msa_feat"].to(dtype), -2))

    def pair(self, batch: Batch, dtype: torch.dtype, rows: slice) -> Tensor:
        """Compute some of this rank's rows of z, [*, rows, r, c_z]."""
        target = self._target(batch, dtype)
        left = self.left(self.residues.local_shard(target, -2)[..., rows, :])
        return left[..., :, None, :] + self.right(target)[..., None, :, :] + self.position(batch, dtype, rows)

    def _target(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        return batch["target_feat"][..., -self.target_m.in_features :].to(dtype)


class RelativePosition(Executable):
    """Algorithms 4 and 5, relpos and one_hot: embed the clipped offset of residues i and j.

        d = (residue_index[:, None] - residue_index).clamp(-max_relative, max_relative)
        linear(one_hot(d + max_relative, 2 * max_relative + 1))

    residue_index: [*, i], int64. Returns some of this rank's rows of z.
    """

    def __init__(self, c_z: int, max_relative: int = 32) -> None:
        super().__init__()
        self.max_relative = max_relative
        self.linear = Linear(2 * max_relative + 1, c_z)

    def forward(self, batch: Batch, dtype: torch.dtype | None = None, rows: slice = slice(None)) -> Tensor:
        """Compute the embedding in a dtype, by default the parameters', from residue_index."""
        index = batch["residue_index"]
        bins = _clipped_difference(self.residues.local_shard(index, -1)[..., rows], index, self.max_relative)
        # Selecting rows of the weight equals the product with a one-hot vector.
        table = self.linear.weight.T + self.linear.bias
        return take_rows(table.to(dtype or table.dtype), bins)


class ChainRelativePosition(Executable):
    """AlphaFold-Multimer's relative positions of residues, chains and entities.

        same_chain, same_entity = (x[:, None] == x for x in (asym_id, entity_id))
        d = (residue_index[:, None] - residue_index).clamp(-max_relative, max_relative) + max_relative
        d = where(same_chain, d, 2 * max_relative + 1)
        copy = (sym_id[:, None] - sym_id).clamp(-max_chain, max_chain) + max_chain
        copy = where(same_entity, copy, 2 * max_chain + 1)
        features = one_hot(d, 2 * max_relative + 2), same_entity[..., None], one_hot(copy, 2 * max_chain + 2)
        linear(cat(features, -1))

    residue_index, asym_id (chain), entity_id and sym_id (copy of the entity): [*, i], int64. Residues of different
    chains, and chains of different entities, have a bin of their own. Returns some of this rank's rows of z. Source:
    `_relative_encoding` of the official code.
    """

    def __init__(self, c_z: int, max_relative: int = 32, max_chain: int = 2) -> None:
        super().__init__()
        self.max_relative, self.max_chain = max_relative, max_chain
        self.linear = Linear((2 * max_relative + 2) + 1 + (2 * max_chain + 2), c_z)

    def forward(self, batch: Batch, dtype: torch.dtype | None = None, rows: slice = slice(None)) -> Tensor:
        """Compute the embedding in a dtype, by default the parameters'."""

        def pairs(name: str) -> tuple[Tensor, Tensor]:
            return self.residues.local_shard(batch[name], -1)[..., rows], batch[name]

        same_chain, same_entity = (i[..., :, None] == j[..., None, :] for i, j in map(pairs, ("asym_id", "entity_id")))
        offset = _clipped_difference(*pairs("residue_index"), self.max_relative)
        copies = _clipped_difference(*pairs("sym_id"), self.max_chain)
        offset = torch.where(same_chain, offset, 2 * self.max_relative + 1)
        copies = torch.where(same_entity, copies, 2 * self.max_chain + 1)
        # The embedding of every pair of bins, [offsets, copies, c_z]. The last bin of copies is that of different
        # entities, so the feature same_entity is 1 in all others.
        sizes = [2 * self.max_relative + 2, 1, 2 * self.max_chain + 2]
        on_offset, on_same_entity, on_copy = self.linear.weight.T.split(sizes)
        on_copy = torch.cat((on_copy[:-1] + on_same_entity, on_copy[-1:]))
        table = on_offset[:, None] + on_copy + self.linear.bias
        return take_rows(table.flatten(0, 1).to(dtype or table.dtype), offset * table.shape[1] + copies)


def _clipped_difference(i: Tensor, j: Tensor, limit: int) -> Tensor:
    """Compute i - j, clipped to -limit .. limit, plus limit: i [*, I], j [*, J] -> int64 [*, I, J]."""
    return ((i[..., :, None] - j[..., None, :]).clamp(-limit, limit) + limit).long()


class RecyclingEmbedder(Executable):
    """Algorithm 32, RecyclingEmbedder: the updates of the first row of m and of z from the previous pass.

        lower = linspace(min_bin, max_bin, bins)
        upper = cat([lower[1:], lower.new_tensor([1e4])])
        d = (beta[:, None] - beta).square().sum(-1, keepdim=True)
        bin = (d > lower**2) & (d < upper**2)
        norm_m(m_first), distance(bin.to(z.dtype)) + norm_z(z)

    m_first: [*, r, c_m], the first row of m; z: [*, r, r, c_z]; beta: [*, r, 3], the (pseudo) beta carbons in angstrom.
    All are zeros before the first pass. The offsets of the norms and the bias apply even then, as in the official code.
    The methods `msa` and `pair` compute the two updates.
    """

    # Angstrom. The last bin is open.
    min_bin, max_bin, bins = 3.25, 20.75, 15

    def __init__(self, c_m: int, c_z: int) -> None:
        super().__init__()
        self.distance = Linear(self.bins, c_z)
        self.norm_m = LayerNorm(c_m)
        self.norm_z = LayerNorm(c_z)

    def msa(self, m_first: Tensor) -> Tensor:
        """Compute the update of the first row of m, [*, r, c_m] (this rank's shard)."""
        update: Tensor = self.norm_m(m_first)
        return update

    def pair(self, z: Tensor, beta: Tensor, rows: slice) -> Tensor:
        """Compute the update of some of this rank's rows of z.

        z: [*, rows, r, c_z], the same rows of the previous pass; beta: [*, r, 3], all residues.
        """
        row_positions = self.residues.local_shard(beta, -2)[..., rows, :]
        bins = distance_bins(beta, self.min_bin, self.max_bin, self.bins, row_positions)
        weight, bias = self.distance.weight.T, self.distance.bias
        # Row 0 is for a distance without a bin.
        table = torch.cat((bias[None], weight + bias)).to(z.dtype)
        return take_rows(table, bins) + self.norm_z(z)


class ExtraMSAEmbedder(Executable):
    """Algorithm 2, line 16: embed the extra MSA's one-hot codes and deletions.

        linear(cat([one_hot(extra_msa, 23), extra_has_deletion[..., None], extra_deletion_value[..., None]], -1))

    All features: [*, extra, r]. Returns this rank's shard of [*, extra, r, c_e]. A feature `soft_extra`, [*, extra, r,
    23], replaces the one-hot codes.
    """

    def __init__(self, c_e: int) -> None:
        super().__init__()
        self.linear = Linear(EXTRA_CHANNELS, c_e)

    def forward(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        msa, *deletions = (
            self.residues.local_shard(batch[name], -1)
            for name in ("extra_msa", "extra_has_deletion", "extra_deletion_value")
        )
        soft = batch.get("soft_extra")
        codes = one_hot(msa, EXTRA_CLASSES, dtype) if soft is None else self.residues.local_shard(soft, -2).to(dtype)
        return self.linear(torch.cat((codes, torch.stack(deletions, -1).to(dtype)), -1))
