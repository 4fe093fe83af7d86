"""Templates: pair features, their stack, attention over them, and torsion rows for the MSA (Algorithms 16 and 17).

AlphaFold-Multimer embeds its templates in a way of its own: `ChainTemplateEmbedder`.
"""

import functools
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from warpfold.batch import Batch
from warpfold.geometry.atoms import Torsions, atom37_to_torsions, distogram_bins
from warpfold.geometry.residue import ATOM_ORDER, UNKNOWN
from warpfold.geometry.rigid import Rigid
from warpfold.model.axial import BlockStack
from warpfold.model.execution import Executable, Residues
from warpfold.model.layers import LayerNorm, Linear
from warpfold.model.pair import PairConfig, PairStack
from warpfold.ops.attention import attention
from warpfold.ops.tensors import one_hot

AATYPES = 22  # one-hot of template residue types: 20, X, gap
DISTANCE_BINS = 39  # of the beta carbon distances, 3.25 to 50.75 angstrom
PSI, CHI1 = 2, 3  # the torsion whose mask says which residues of a template row are valid; in a multimer


def _template_pair() -> PairConfig:
    return PairConfig(c_triangle=64, transition=2, order="attention_first")


@dataclass(frozen=True, kw_only=True)
class TemplateConfig:
    """The settings of template embedding (Supp. 1.7.1).

    A multimer takes the mean over its templates, without attention, and always feeds unit vectors.
    """

    enabled: bool = True
    c: int = 64  # channels of the template pair representation
    blocks: int = 2  # Algorithm 16
    heads: int = 4  # Algorithm 17; monomer
    attention_width: int = 16  # Algorithm 17: c per head; monomer
    torsion_rows: bool = True  # append the templates' torsions to the MSA
    unit_vectors: bool = False  # feed unit vectors between backbones; zeros in every published monomer model
    pair: PairConfig = field(default_factory=_template_pair)


def template_pairs(templates: Batch, residues: Residues, unit_vectors: bool = True) -> tuple[Tensor, ...]:
    """Return the pair features of templates, [*, r, ...] each (Supp. 1.2.9, table 1), none of them masked.

    One-hot distances of beta carbons [*, i, j, 39], whether both are there [*, i, j, 1], residue types of column j
    [*, 1, j, 22] and of row i [*, i, 1, 22], the direction of CA j in the frame of i [*, i, j, 3] (zeros without
    `unit_vectors`), and whether both backbones are there [*, i, j, 1]; i: this rank's residues.
    """
    local_shard = residues.local_shard
    beta, beta_mask = templates["template_pseudo_beta"], templates["template_pseudo_beta_mask"]
    aatype = one_hot(templates["template_aatype"], AATYPES, beta.dtype)
    positions, masks = templates["template_all_atom_positions"], templates["template_all_atom_masks"]
    n, ca, c = (ATOM_ORDER[name] for name in ("N", "CA", "C"))
    has_backbone = masks[..., n] * masks[..., ca] * masks[..., c]
    has_both = (local_shard(has_backbone, -1)[..., :, None] * has_backbone[..., None, :])[..., None]
    if unit_vectors:
        backbone = [positions[..., atom, :] for atom in (n, ca, c)]
        frames = Rigid.from_three_points(*(local_shard(x, -2) for x in backbone))
        vector = frames[..., :, None].invert_apply(backbone[1][..., None, :, :])
        vector = vector * torch.rsqrt(1e-6 + vector.square().sum(-1, keepdim=True))
    else:
        vector = beta.new_zeros(*has_both.shape[:-1], 3)
    return (
        distogram_bins(beta, 3.25, 50.75, DISTANCE_BINS, local_shard(beta, -2)),
        (local_shard(beta_mask, -1)[..., :, None] * beta_mask[..., None, :])[..., None],
        aatype[..., None, :, :],
        local_shard(aatype, -2)[..., :, None, :],
        vector,
        has_both,
    )


class TemplatePairEmbedder(Executable):
    """The 88 pair features of templates, projected (Supp. 1.2.9 table 1, Algorithm 2 line 9)."""

    def __init__(self, c_t: int, unit_vectors: bool) -> None:
        super().__init__()
        self.unit_vectors = unit_vectors
        self.linear = Linear(DISTANCE_BINS + 2 + 2 * AATYPES + 3, c_t, init="relu")

    def forward(self, templates: Batch, dtype: torch.dtype) -> Tensor:
        """Embed templates, [*, r, ...] -> [*, r, r, c_t]; their features are zero where a backbone is missing.

        Returns this rank's shard: the rows of its residues.
        """
        features = template_pairs(templates, self.residues, self.unit_vectors)
        has_both = features[-1]
        joined = torch.cat([x.expand(*has_both.shape[:-1], x.shape[-1]) for x in features], -1)
        return self.linear((joined * has_both).to(dtype))


class TemplatePointwiseAttention(nn.Module):
    """Algorithm 17: each pair (i, j) attends to the templates' features of that pair.  No gate."""

    def __init__(self, c_z: int, c_t: int, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = Linear(c_z, heads * width, bias=False, init="glorot")
        self.k = Linear(c_t, heads * width, bias=False, init="glorot")
        self.v = Linear(c_t, heads * width, bias=False, init="glorot")
        self.out = Linear(heads * width, c_z, init="final")

    def forward(self, z: Tensor, t: Tensor, template_mask: Tensor) -> Tensor:
        """Return the update of z [*, r, r, c_z], given t [*, tmpl, r, r, c_t] and template_mask [*, tmpl]."""
        t = t.movedim(-4, -2)
        q = self.q(z)[..., None, :].unflatten(-1, (self.heads, -1))  # one query per pair
        k, v = (f(t).unflatten(-1, (self.heads, -1)) for f in (self.k, self.v))
        o = attention(q, k, v, template_mask[..., None, None, :])
        return self.out(o[..., 0, :, :].flatten(-2))


# The arrays that describe templates, with the axis of templates, counted from the right.
TEMPLATE_AXES = {"template_aatype": -2, "template_all_atom_positions": -4, "template_all_atom_masks": -3}
TEMPLATE_AXES |= {"template_pseudo_beta": -3, "template_pseudo_beta_mask": -2}


def some_templates(batch: Batch, part: slice) -> Batch:
    """Return the arrays of some templates."""
    length = part.stop - part.start
    return {name: batch[name].narrow(axis, part.start, length) for name, axis in TEMPLATE_AXES.items()}


class TemplateEmbedder(Executable):
    """Algorithm 2, lines 7 to 13: what the templates add to z, and the rows that they add to m."""

    def __init__(self, c_m: int, c_z: int, config: TemplateConfig) -> None:
        super().__init__()
        self.pair = TemplatePairEmbedder(config.c, config.unit_vectors)
        self.stack = TemplatePairStack(config)
        self.norm = LayerNorm(config.c)
        self.pointwise = TemplatePointwiseAttention(c_z, config.c, config.heads, config.attention_width)
        self.rows = TemplateRows(c_m) if config.torsion_rows else None

    def forward(self, z: Tensor, z_mask: Tensor, batch: Batch) -> Tensor:
        """Return z [*, r, r, c_z] with what the templates add; z itself where there is none."""
        mask = batch["template_mask"]
        if mask.shape[-1] == 0:
            return z
        parts = (some_templates(batch, part) for part in self.execution.parts(mask.shape[-1], z_mask.shape[-1] ** 2))
        z_mask = z_mask[..., None, :, :]
        embedded = [self.norm(self.stack(self.pair(some, z.dtype), z_mask)) for some in parts]
        update = self.pointwise(z, torch.cat(embedded, -4) if len(embedded) > 1 else embedded[0], mask)
        return z + update * (mask.sum(-1) > 0).to(z.dtype)[..., None, None, None]


class ChainTemplatePairEmbedder(Executable):
    """AlphaFold-Multimer's pair features of templates, and z, each with a projection of its own, summed.

    A template knows one chain: what its atoms say of two chains is masked.  Residue types are not, as in the official
    code, so that a template without atoms is not nothing.
    """

    def __init__(self, c_z: int, c_t: int) -> None:
        super().__init__()
        self.norm = LayerNorm(c_z)
        inputs = (DISTANCE_BINS, 1, AATYPES, AATYPES, 1, 1, 1, 1, c_z)  # of template_pairs, the vector as three; z
        self.parts = nn.ModuleList(Linear(c, c_t, init="relu") for c in inputs)

    def of_pairs(self, z: Tensor) -> Tensor:
        """Return what z [*, r, r, c_z] adds to every template: [*, r, r, c_t]."""
        t: Tensor = self.parts[-1](self.norm(z))
        return t

    def forward(self, templates: Batch, same_chain: Tensor, t: Tensor) -> Tensor:
        """Return t [*, r, r, c_t] with the features of templates, [*, r, ...]; same_chain [*, r, r, 1].

        All pairs are this rank's rows.
        """
        distances, beta, columns, rows, vector, backbone = template_pairs(templates, self.residues)
        beta, backbone = beta * same_chain, backbone * same_chain
        inputs = (distances * beta, beta, columns, rows, *(vector * backbone).split(1, -1), backbone)
        for part, x in zip(self.parts, inputs):
            t = t + part(x.to(t.dtype))
        return t


class ChainTemplateEmbedder(Executable):
    """AlphaFold-Multimer's templates: what their mean adds to z, and the rows that they add to m."""

    def __init__(self, c_m: int, c_z: int, config: TemplateConfig) -> None:
        super().__init__()
        self.pair = ChainTemplatePairEmbedder(c_z, config.c)
        self.stack = TemplatePairStack(config)
        self.norm = LayerNorm(config.c)
        self.out = Linear(config.c, c_z, init="relu")
        self.rows = ChiTemplateRows(c_m) if config.torsion_rows else None

    def forward(self, z: Tensor, z_mask: Tensor, batch: Batch) -> Tensor:
        """Return z [*, r, r, c_z] with what the templates add; z itself where the batch has no templates at all.

        Templates of chains that have fewer count as the others do (their atoms are masked), as in the official code.
        """
        if batch["template_mask"].shape[-1] == 0:
            return z
        asym_id = batch["asym_id"]
        same_chain = (self.residues.local_shard(asym_id, -1)[..., :, None] == asym_id[..., None, :])[..., None]
        of_pairs, count = self.pair.of_pairs(z)[..., None, :, :, :], batch["template_mask"].shape[-1]

        def embedded(part: slice) -> Tensor:
            """Return the sum of the embeddings of some templates."""
            t = self.pair(some_templates(batch, part), same_chain[..., None, :, :, :], of_pairs)
            total: Tensor = self.norm(self.stack(t, z_mask[..., None, :, :])).sum(-4)
            return total

        total = functools.reduce(torch.add, map(embedded, self.execution.parts(count, z_mask.shape[-1] ** 2)))
        update: Tensor = self.out((total / count).relu())
        return z + update


class TemplatePairStack(BlockStack):
    """Algorithm 16: the pair stack on each template, attention before multiplication."""

    def __init__(self, config: TemplateConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PairStack(config.c, config.pair) for _ in range(config.blocks))

    def forward(self, t: Tensor, z_mask: Tensor) -> Tensor:
        """Return t [*, r, r, c_t] after the blocks; z_mask [*, r, r], or without some of the leading axes."""
        (t,) = self.execution.stack(self, (t,), (z_mask.expand(t.shape[:-1]),))
        return t


class TemplateRows(Executable):
    """Algorithm 2, lines 7 and 8: each template as a row of the MSA, from its torsion angles."""

    channels = AATYPES + 14 + 14 + 7

    def __init__(self, c_m: int) -> None:
        super().__init__()
        self.up = Linear(self.channels, c_m, init="relu")
        self.down = Linear(c_m, c_m, init="relu")

    def forward(self, batch: Batch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return rows [*, tmpl, r, c_m] (this rank's shard) and their mask [*, tmpl, r], 1 where psi is defined.

        Torsions that are not defined are zero.  (The official code feeds rounding noise there.)
        """
        features, mask = self.features(batch)
        features = self.residues.local_shard(features, -2)
        return self.down(self.up(features.to(dtype)).relu()), mask

    @staticmethod
    def features(batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the 57 features [*, tmpl, r, 57] and the row mask [*, tmpl, r]."""
        types, torsions = _types_and_torsions(batch)
        angles = (torsions.sin_cos.flatten(-2), torsions.alt_sin_cos.flatten(-2))
        return torch.cat((types, *angles, torsions.mask), -1), torsions.mask[..., PSI]


class ChiTemplateRows(TemplateRows):
    """AlphaFold-Multimer's rows: of the torsions those of the side chain; a row is valid where chi1 is defined."""

    channels = AATYPES + 4 + 4 + 4

    @staticmethod
    def features(batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the 34 features [*, tmpl, r, 34] (types, sines, cosines, mask) and the row mask [*, tmpl, r]."""
        types, torsions = _types_and_torsions(batch)
        sines, cosines = torsions.sin_cos[..., CHI1:, :].unbind(-1)
        return torch.cat((types, sines, cosines, torsions.mask[..., CHI1:]), -1), torsions.mask[..., CHI1]


def _types_and_torsions(batch: Batch) -> tuple[Tensor, Torsions]:
    """Return the residue types of all templates, one-hot [*, tmpl, r, 22], and their torsions [*, tmpl, r]."""
    aatype = batch["template_aatype"]
    known = aatype.clamp(max=UNKNOWN)  # a gap, like X, has no atoms
    torsions = atom37_to_torsions(known, batch["template_all_atom_positions"], batch["template_all_atom_masks"])
    return one_hot(aatype, AATYPES, torsions.mask.dtype), torsions
