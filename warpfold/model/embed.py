"""From features to the first m and z: Algorithms 3, 4, 5 and 32, and the extra MSA's embedding."""

from dataclasses import dataclass

import torch
from torch import Tensor

from warpfold.batch import Batch
from warpfold.geometry.atoms import distance_bins
from warpfold.model.axial import Executable
from warpfold.model.layers import LayerNorm, Linear
from warpfold.ops.tensors import one_hot, take_rows

TARGET_CHANNELS, MSA_CHANNELS, EXTRA_CHANNELS = 22, 49, 25  # of target_feat, msa_feat and the extra MSA (Supp. table 1)
EXTRA_CLASSES = 23  # 20 residue types, X, gap, mask


@dataclass(frozen=True, kw_only=True)
class MultimerConfig:
    """The settings that only AlphaFold-Multimer has (Evans et al. 2022)."""

    max_chain: int = 2  # the numbers of two copies of an entity differ by at most this, where positions are embedded


class InputEmbedder(Executable):
    """Algorithm 3: m [*, s, r, c_m] and z [*, r, r, c_z] of target_feat [*, r, 22] and msa_feat [*, s, r, 49].

    A multimer does not read the first channel of target_feat, the chain break: chains are told apart by the relative
    positions.  m and z are this rank's shards.
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
        """Return m [*, s, r, c_m]."""
        local_shard = self.residues.local_shard
        target = local_shard(self._target(batch, dtype), -2)
        return self.target_m(target)[..., None, :, :] + self.msa_m(local_shard(batch["msa_feat"].to(dtype), -2))

    def pair(self, batch: Batch, dtype: torch.dtype, rows: slice) -> Tensor:
        """Return some of this rank's rows of z, [*, rows, r, c_z]."""
        target = self._target(batch, dtype)
        left = self.left(self.residues.local_shard(target, -2)[..., rows, :])
        return left[..., :, None, :] + self.right(target)[..., None, :, :] + self.position(batch, dtype, rows)

    def _target(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        return batch["target_feat"][..., -self.target_m.in_features :].to(dtype)


class RelativePosition(Executable):
    """Algorithms 4 and 5: the clipped offset of residues i and j, embedded: some of this rank's rows of z.

        d = (residue_index[:, None] - residue_index).clamp(-max_relative, max_relative)
        linear(one_hot(d + max_relative, 2 * max_relative + 1))

    residue_index: [*, i], int64.
    """

    def __init__(self, c_z: int, max_relative: int = 32) -> None:
        super().__init__()
        self.max_relative = max_relative
        self.linear = Linear(2 * max_relative + 1, c_z)

    def forward(self, batch: Batch, dtype: torch.dtype | None = None, rows: slice = slice(None)) -> Tensor:
        """Return the embedding in a dtype, by default the parameters'; of a batch residue_index is read."""
        index = batch["residue_index"]
        bins = _clipped_difference(self.residues.local_shard(index, -1)[..., rows], index, self.max_relative)
        # Picking rows of the weight is the product with a one-hot vector, without building it.
        table = self.linear.weight.T + self.linear.bias
        return take_rows(table.to(dtype or table.dtype), bins)


class ChainRelativePosition(Executable):
    """AlphaFold-Multimer's relative positions: some of this rank's rows of z.

    Three features of a pair of residues (official code, `_relative_encoding`): their clipped offset if they are in one
    chain, else a bin of its own; whether their chains are copies of one entity; the clipped difference of the numbers
    of these copies, or a bin of its own for different entities.
    """

    def __init__(self, c_z: int, max_relative: int = 32, max_chain: int = 2) -> None:
        super().__init__()
        self.max_relative, self.max_chain = max_relative, max_chain
        self.linear = Linear((2 * max_relative + 2) + 1 + (2 * max_chain + 2), c_z)

    def forward(self, batch: Batch, dtype: torch.dtype | None = None, rows: slice = slice(None)) -> Tensor:
        """Return the embedding in a dtype, by default the parameters'.

        Of a batch the numbers of residues, chains, entities and copies are read, int64.
        """

        def pairs(name: str) -> tuple[Tensor, Tensor]:
            return self.residues.local_shard(batch[name], -1)[..., rows], batch[name]

        same_chain, same_entity = (i[..., :, None] == j[..., None, :] for i, j in map(pairs, ("asym_id", "entity_id")))
        offset = _clipped_difference(*pairs("residue_index"), self.max_relative)
        copies = _clipped_difference(*pairs("sym_id"), self.max_chain)
        offset = torch.where(same_chain, offset, 2 * self.max_relative + 1)
        copies = torch.where(same_entity, copies, 2 * self.max_chain + 1)
        table = self._table()
        return take_rows(table.flatten(0, 1).to(dtype or table.dtype), offset * table.shape[1] + copies)

    def _table(self) -> Tensor:
        """Return the embedding of every two bins, [offsets, copies, c_z]; the last bin of copies: another entity."""
        sizes = [2 * self.max_relative + 2, 1, 2 * self.max_chain + 2]
        offsets, same_entity, copies = self.linear.weight.T.split(sizes)
        copies = torch.cat((copies[:-1] + same_entity, copies[-1:]))
        return offsets[:, None] + copies + self.linear.bias


def _clipped_difference(i: Tensor, j: Tensor, limit: int) -> Tensor:
    """Return i - j, clipped to -limit .. limit, from 0: i [*, I], j [*, J] -> int64 [*, I, J]."""
    return ((i[..., :, None] - j[..., None, :]).clamp(-limit, limit) + limit).long()


class RecyclingEmbedder(Executable):
    """Algorithm 32: what the previous pass adds to the first row of m and to z."""

    min_bin, max_bin, bins = 3.25, 20.75, 15  # angstrom, of the distances between (pseudo) beta carbons

    def __init__(self, c_m: int, c_z: int) -> None:
        super().__init__()
        self.distance = Linear(self.bins, c_z)
        self.norm_m = LayerNorm(c_m)
        self.norm_z = LayerNorm(c_z)

    def msa(self, m_first: Tensor) -> Tensor:
        """Return the update of the first row of m, [*, r, c_m], from that of the last pass (this rank's shard).

        It, z and the positions are zeros before the first pass; the norms' offsets and the bias apply even then, as in
        the official code.
        """
        new: Tensor = self.norm_m(m_first)
        return new

    def pair(self, z: Tensor, beta: Tensor, rows: slice) -> Tensor:
        """Return the update of some of this rank's rows of z.

        z [*, rows, r, c_z]: these rows of the last pass; beta [*, r, 3] in angstrom: of all residues.
        """
        here = self.residues.local_shard(beta, -2)[..., rows, :]
        bins = distance_bins(beta, self.min_bin, self.max_bin, self.bins, here)
        weight, bias = self.distance.weight.T, self.distance.bias
        of_bins = torch.cat((bias[None], weight + bias)).to(z.dtype)  # the first is for a distance that has no bin
        return take_rows(of_bins, bins) + self.norm_z(z)


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
        soft = batch.get("soft_extra")
        codes = one_hot(msa, EXTRA_CLASSES, dtype) if soft is None else self.residues.local_shard(soft, -2).to(dtype)
        return self.linear(torch.cat((codes, torch.stack(deletions, -1).to(dtype)), -1))
