"""Templates: pair features, their stack, attention over them, and torsion rows for the MSA (Algorithms 16 and 17)."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from warpfold.batch import Batch
from warpfold.geometry.atoms import atom37_to_torsions, distogram_bins
from warpfold.geometry.residue import ATOM_ORDER, UNKNOWN
from warpfold.geometry.rigid import Rigid
from warpfold.model.axial import BlockStack
from warpfold.model.execution import Executable
from warpfold.model.layers import LayerNorm, Linear
from warpfold.model.pair import PairConfig, PairStack
from warpfold.ops.attention import attention

AATYPES = 22  # one-hot of template residue types: 20, X, gap
PSI = 2  # the torsion whose mask says which residues of a template row are valid


def _template_pair() -> PairConfig:
    return PairConfig(c_triangle=64, transition=2, order="attention_first")


@dataclass(frozen=True, kw_only=True)
class TemplateConfig:
    """The settings of template embedding (Supp. 1.7.1)."""

    enabled: bool = True
    c: int = 64  # channels of the template pair representation
    blocks: int = 2  # Algorithm 16
    heads: int = 4  # Algorithm 17
    attention_width: int = 16  # Algorithm 17: c per head
    torsion_rows: bool = True  # append the templates' torsions to the MSA
    unit_vectors: bool = False  # feed unit vectors between backbones; zeros in every published monomer model
    pair: PairConfig = field(default_factory=_template_pair)


class TemplatePairEmbedder(Executable):
    """The 88 pair features of one template, projected (Supp. 1.2.9 table 1, Algorithm 2 line 9)."""

    bins = 39  # of the beta carbon distances, 3.25 to 50.75 angstrom

    def __init__(self, c_t: int, unit_vectors: bool) -> None:
        super().__init__()
        self.unit_vectors = unit_vectors
        self.linear = Linear(self.bins + 2 + 2 * AATYPES + 3, c_t, init="relu")

    def forward(self, template: Batch, dtype: torch.dtype) -> Tensor:
        """Embed one template, [*, r, ...] -> [*, r, r, c_t]; its features are zero where a backbone is missing.

        Returns this rank's shard: the rows of its residues.
        """
        local_shard = self.residues.local_shard
        beta, beta_mask = template["template_pseudo_beta"], template["template_pseudo_beta_mask"]
        aatype = F.one_hot(template["template_aatype"], AATYPES).to(beta.dtype)
        positions, masks = template["template_all_atom_positions"], template["template_all_atom_masks"]
        n, ca, c = (ATOM_ORDER[name] for name in ("N", "CA", "C"))
        has_backbone = masks[..., n] * masks[..., ca] * masks[..., c]
        has_both = (local_shard(has_backbone, -1)[..., :, None] * has_backbone[..., None, :])[..., None]
        if self.unit_vectors:
            backbone = [positions[..., atom, :] for atom in (n, ca, c)]
            frames = Rigid.from_three_points(*(local_shard(x, -2) for x in backbone))
            vector = frames[..., :, None].invert_apply(backbone[1][..., None, :, :])
            vector = vector * torch.rsqrt(1e-6 + vector.square().sum(-1, keepdim=True)) * has_both
        else:
            vector = beta.new_zeros(*has_both.shape[:-1], 3)
        features = torch.cat(
            (
                distogram_bins(beta, 3.25, 50.75, self.bins, local_shard(beta, -2)),
                (local_shard(beta_mask, -1)[..., :, None] * beta_mask[..., None, :])[..., None],
                aatype[..., None, :, :].expand(*has_both.shape[:-1], AATYPES),  # of column j
                local_shard(aatype, -2)[..., :, None, :].expand(*has_both.shape[:-1], AATYPES),  # of row i
                vector,
                has_both,
            ),
            -1,
        )
        return self.linear((features * has_both).to(dtype))


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


class TemplateEmbedder(nn.Module):
    """Algorithm 2, lines 7 to 13: what the templates add to z, and the rows that they add to m."""

    names = tuple(
        f"template_{n}"
        for n in ("aatype", "all_atom_positions", "all_atom_masks", "pseudo_beta", "pseudo_beta_mask", "mask")
    )

    def __init__(self, c_m: int, c_z: int, config: TemplateConfig) -> None:
        super().__init__()
        self.pair = TemplatePairEmbedder(config.c, config.unit_vectors)
        self.stack = TemplatePairStack(config)
        self.norm = LayerNorm(config.c)
        self.pointwise = TemplatePointwiseAttention(c_z, config.c, config.heads, config.attention_width)
        self.rows = TemplateRows(c_m) if config.torsion_rows else None

    def forward(self, z: Tensor, z_mask: Tensor, batch: Batch) -> Tensor:
        """Return the update of z [*, r, r, c_z]; zero where there is no template."""
        mask = batch["template_mask"]
        if mask.shape[-1] == 0:
            return torch.zeros_like(z)
        axes = {"template_aatype": -2, "template_all_atom_positions": -4, "template_all_atom_masks": -3}
        axes |= {"template_pseudo_beta": -3, "template_pseudo_beta_mask": -2}
        embedded = []
        for index in range(mask.shape[-1]):
            template = {name: batch[name].select(axis, index) for name, axis in axes.items()}
            embedded.append(self.norm(self.stack(self.pair(template, z.dtype), z_mask)))
        update = self.pointwise(z, torch.stack(embedded, -4), mask)
        return update * (mask.sum(-1) > 0).to(z.dtype)[..., None, None, None]


class TemplatePairStack(BlockStack):
    """Algorithm 16: the pair stack on one template, attention before multiplication."""

    def __init__(self, config: TemplateConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PairStack(config.c, config.pair) for _ in range(config.blocks))

    def forward(self, t: Tensor, z_mask: Tensor) -> Tensor:
        (t,) = self.execution.stack(self, (t,), (z_mask,))
        return t


class TemplateRows(Executable):
    """Algorithm 2, lines 7 and 8: each template as a row of the MSA, from its torsion angles."""

    def __init__(self, c_m: int) -> None:
        super().__init__()
        self.up = Linear(AATYPES + 14 + 14 + 7, c_m, init="relu")
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
        aatype = batch["template_aatype"]
        known = aatype.clamp(max=UNKNOWN)  # a gap, like X, has no atoms
        torsions = atom37_to_torsions(known, batch["template_all_atom_positions"], batch["template_all_atom_masks"])
        one_hot = F.one_hot(aatype, AATYPES).to(torsions.mask.dtype)
        angles = (torsions.sin_cos.flatten(-2), torsions.alt_sin_cos.flatten(-2))
        return torch.cat((one_hot, *angles, torsions.mask), -1), torsions.mask[..., PSI]
