"""Templates: pair features, their stack, attention over them, and torsion rows for the MSA (Algorithms 16 and 17).

`TemplateEmbedder` and `TemplateRows` are the monomer's, `ChainTemplateEmbedder` and `ChiTemplateRows` are
AlphaFold-Multimer's. As in evoformer.py, the docstring of each layer contains its definition, which a test executes.
`batch` and `templates` are features by name; `dtype` and `rows` are the result's dtype and rows, in a definition all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from warpfold.batch import Batch
from warpfold.geometry.atoms import Torsions, atom37_to_torsions, distogram_bins
from warpfold.geometry.residue import ATOM_ORDER, UNKNOWN
from warpfold.geometry.rigid import Rigid
from warpfold.model.axial import BlockStack, Executable, Residues
from warpfold.model.evoformer import PairConfig, PairStack
from warpfold.model.layers import LayerNorm, Linear, joined
from warpfold.ops.attention import attention
from warpfold.ops.dispatch import uniform_loop, upcast_half
from warpfold.ops.tensors import one_hot

# Residue types of templates: 20, X and gap.
AATYPES = 22
# Bins of the beta carbon distances, from 3.25 to 50.75 angstrom.
DISTANCE_BINS = 39
# Indices of torsions. A residue of a template row is valid if psi is defined, in a multimer if chi1 is.
PSI, CHI1 = 2, 3


@dataclass(frozen=True, kw_only=True)
class TemplateConfig:
    """The settings of template embedding (Supp. 1.7.1).

    A multimer averages its templates without attention, and always feeds unit vectors.
    """

    enabled: bool = True
    # Channels of the template pair representation.
    c: int = 64
    # Blocks of Algorithm 16.
    blocks: int = 2
    # Heads of Algorithm 17, in a monomer.
    heads: int = 4
    # c per head in Algorithm 17, in a monomer.
    attention_width: int = 16
    # Whether to append the templates' torsions to the MSA as rows.
    torsion_rows: bool = True
    # Whether to feed the unit vectors between backbones. Every published monomer model feeds zeros.
    unit_vectors: bool = False
    pair: PairConfig = field(default_factory=partial(PairConfig, c_triangle=64, transition=2, order="attention_first"))


def template_pairs(templates: Batch, residues: Residues, rows: slice, unit_vectors: bool = True) -> tuple[Tensor, ...]:
    """Compute the six pair features of templates (Supp. 1.2.9, table 1), unmasked.

        distogram = distogram_bins(template_pseudo_beta, 3.25, 50.75, 39)
        has_beta = template_pseudo_beta_mask[:, None] * template_pseudo_beta_mask
        aatype = one_hot(template_aatype, 22)
        n, ca, c = (template_all_atom_positions[:, k] for k in (N, CA, C))
        v = Rigid.from_three_points(n, ca, c)[:, None].invert_apply(ca)
        v = v / sqrt(1e-6 + v.square().sum(-1, keepdim=True)) * unit_vectors
        mask = template_all_atom_masks[:, N] * template_all_atom_masks[:, CA] * template_all_atom_masks[:, C]
        has_backbone = mask[:, None] * mask
        distogram, has_beta[..., None], aatype[None], aatype[:, None], v, has_backbone[..., None]

    In this order: one-hot distances of beta carbons [*, i, j, 39], whether both have one [*, i, j, 1], residue types of
    j [*, 1, j, 22] and of i [*, i, 1, 22], the unit vector to CA j in the frame of i [*, i, j, 3], and whether both
    have a backbone [*, i, j, 1]. i runs over `rows` of this rank's residues.
    """

    def local_rows(x: Tensor, axis: int) -> Tensor:
        return residues.local_shard(x, axis).narrow(axis, rows.start, rows.stop - rows.start)

    beta, beta_mask = templates["template_pseudo_beta"], templates["template_pseudo_beta_mask"]
    aatype = one_hot(templates["template_aatype"], AATYPES, beta.dtype)
    positions, masks = templates["template_all_atom_positions"], templates["template_all_atom_masks"]
    n, ca, c = (ATOM_ORDER[name] for name in ("N", "CA", "C"))
    has_backbone = masks[..., n] * masks[..., ca] * masks[..., c]
    has_both = (local_rows(has_backbone, -1)[..., :, None] * has_backbone[..., None, :])[..., None]
    if unit_vectors:
        backbone = [positions[..., atom, :] for atom in (n, ca, c)]
        frames = Rigid.from_three_points(*(local_rows(x, -2) for x in backbone))
        vector = frames[..., :, None].invert_apply(backbone[1][..., None, :, :])
        vector = vector * torch.rsqrt(1e-6 + vector.square().sum(-1, keepdim=True))
    else:
        vector = beta.new_zeros(*has_both.shape[:-1], 3)
    return (
        distogram_bins(beta, 3.25, 50.75, DISTANCE_BINS, local_rows(beta, -2)),
        (local_rows(beta_mask, -1)[..., :, None] * beta_mask[..., None, :])[..., None],
        aatype[..., None, :, :],
        local_rows(aatype, -2)[..., :, None, :],
        vector,
        has_both,
    )


class TemplatePairEmbedder(Executable):
    """Algorithm 2, line 9: project the 88 pair features of templates (Supp. 1.2.9, table 1).

        features = template_pairs(batch, residues, rows, unit_vectors)
        has_backbone = features[-1]
        linear(cat([x.expand(r, r, x.shape[-1]) for x in features], -1) * has_backbone)

    Returns [*, r, r, c_t], for a template or for several along a leading axis.
    """

    def __init__(self, c_t: int, unit_vectors: bool) -> None:
        super().__init__()
        self.unit_vectors = unit_vectors
        self.linear = Linear(DISTANCE_BINS + 2 + 2 * AATYPES + 3, c_t, init="relu")

    def forward(self, templates: Batch, dtype: torch.dtype, rows: slice) -> Tensor:
        """Embed templates, [*, r, ...] -> [*, rows, r, c_t]; rows: some of this rank's residues."""
        features = template_pairs(templates, self.residues, rows, self.unit_vectors)
        has_backbone = features[-1]
        together = torch.cat([x.expand(*has_backbone.shape[:-1], x.shape[-1]) for x in features], -1)
        return self.linear((together * has_backbone).to(dtype))


class TemplatePointwiseAttention(nn.Module):
    """Algorithm 17, TemplatePointwiseAttention: each pair (i, j) attends to the templates' features of this pair.

        q, k, v = (f(x).unflatten(-1, (heads, -1)) for f, x in ((q, z), (k, t), (v, t)))
        logits = einsum("ijhc,tijhc->ijht", q, k) / sqrt(q.shape[-1])
        a = softmax(logits.masked_fill(template_mask == 0, -1e9), -1)
        out(einsum("ijht,tijhc->ijhc", a, v).flatten(-2))

    z: [*, i, j, c_z]; t: [*, templates, i, j, c_t]; template_mask: [*, templates]. Returns the update of z. The output
    has no gate.
    """

    def __init__(self, c_z: int, c_t: int, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = Linear(c_z, heads * width, bias=False, init="glorot")
        self.k = Linear(c_t, heads * width, bias=False, init="glorot")
        self.v = Linear(c_t, heads * width, bias=False, init="glorot")
        self.out = Linear(heads * width, c_z, init="final")

    def forward(self, z: Tensor, t: Tensor, template_mask: Tensor) -> Tensor:
        """Compute the update of z."""
        # One query per pair.
        q = self.q(z)[..., None, :].unflatten(-1, (self.heads, -1))
        # Project before moving the axes: with moved axes torch copies the weight for every pair (bf16 on a CPU).
        k, v = (f(t).movedim(-4, -2).unflatten(-1, (self.heads, -1)) for f in (self.k, self.v))
        o = attention(q, k, v, template_mask[..., None, None, :])
        return self.out(o[..., 0, :, :].flatten(-2))

    def logits(self, z: Tensor, t: Tensor) -> Tensor:
        """Compute the attention logits [*, r, r, heads] of one template t [*, r, r, c_t]."""
        q, k = (f(x).unflatten(-1, (self.heads, -1)) for f, x in ((self.q, z), (self.k, t)))
        return (q * q.shape[-1] ** -0.5 * k).sum(-1)

    @staticmethod
    def weights(logits: Sequence[Tensor], template_mask: Tensor) -> tuple[Tensor, ...]:
        """Compute the attention weights [*, r, r, heads] of each template from the logits of all."""
        stacked = upcast_half(torch.stack(list(logits), -1))
        masked = stacked.masked_fill(template_mask[..., None, None, None, :] == 0, -1e9)
        return masked.softmax(-1).to(logits[0].dtype).unbind(-1)

    def term(self, weight: Tensor, t: Tensor, first: bool) -> Tensor:
        """Compute one template's term of the update. The first term includes the bias."""
        o = (weight[..., None] * self.v(t).unflatten(-1, (self.heads, -1))).flatten(-2)
        matrix, bias = joined(o.dtype, self.out)
        return nn.functional.linear(o, matrix.to(o.dtype), None if bias is None or not first else bias.to(o.dtype))


# The features of templates, and the axis of templates in each, counted from the right.
TEMPLATE_AXES = {"template_aatype": -2, "template_all_atom_positions": -4, "template_all_atom_masks": -3}
TEMPLATE_AXES |= {"template_pseudo_beta": -3, "template_pseudo_beta_mask": -2}


def select_templates(batch: Batch, which: slice) -> Batch:
    """Return the features of some templates."""
    length = which.stop - which.start
    return {name: batch[name].narrow(axis, which.start, length) for name, axis in TEMPLATE_AXES.items()}


class TemplateEmbedder(Executable):
    """Algorithm 2, lines 9 to 13: add the templates to z.

        t = norm(stack(pair(batch, dtype, rows), z_mask))
        z + pointwise(z, t, template_mask) * (template_mask.sum() > 0)

    z: [*, r, r, c_z]; z_mask: [*, r, r]; t: [*, templates, r, r, c_t]. `rows` adds the templates to m (lines 7 and 8).
    """

    def __init__(self, c_m: int, c_z: int, config: TemplateConfig) -> None:
        super().__init__()
        self.pair = TemplatePairEmbedder(config.c, config.unit_vectors)
        self.stack = TemplatePairStack(config)
        self.norm = LayerNorm(config.c)
        self.pointwise = TemplatePointwiseAttention(c_z, config.c, config.heads, config.attention_width)
        self.rows = TemplateRows(c_m) if config.torsion_rows else None

    def forward(self, z: Tensor, z_mask: Tensor, batch: Batch) -> Tensor:
        """Compute the new z. A batch without an entry along the axis of templates leaves z unchanged."""
        mask = batch["template_mask"]
        if mask.shape[-1] == 0:
            return z
        has_templates = (mask.sum(-1) > 0).to(z.dtype)[..., None, None, None]
        groups = self.execution.parts(mask.shape[-1], z_mask.shape[-1] ** 2)
        # In place, only one group of templates exists at a time. Otherwise all exist together.
        if len(groups) > 1 and self.execution.in_place:
            return self._one_by_one(z, z_mask, batch, has_templates)
        embedded = [self._embedded(select_templates(batch, group), z, z_mask) for group in groups]

        def updated(rows: slice, old: Tensor) -> Tensor:
            # Normalised group by group: together they exceed the positions of one launch.
            normalised = [self.norm(t[..., rows, :, :]) for t in embedded]
            t = torch.cat(normalised, -4) if len(normalised) > 1 else normalised[0]
            return old + self.pointwise(old, t, mask) * has_templates

        return self.map_rows_(z, updated)

    def _embedded(self, templates: Batch, z: Tensor, z_mask: Tensor) -> Tensor:
        """Compute the output [*, tmpl, r, r, c_t] of the stack for some templates, not normalised."""
        t = self.map_rows(lambda rows: self.pair(templates, z.dtype, rows), z.shape[-3], -3)
        return self.stack(t, z_mask[..., None, :, :])

    def _one_by_one(self, z: Tensor, z_mask: Tensor, batch: Batch, has_templates: Tensor) -> Tensor:
        """Add the templates to z in place, with the memory of a single template.

        The attention weight of a template depends on all templates. A first loop therefore computes the logits of each
        template, and a second loop computes each template again and adds it. The last template still exists and comes
        first in the second loop.
        """
        count, mask, execution = batch["template_mask"].shape[-1], batch["template_mask"], self.execution
        logits = []
        for i in range(count):
            # Release the previous template before computing the next.
            t = None
            t = self._embedded(select_templates(batch, slice(i, i + 1)), z, z_mask).squeeze(-4)
            logits.append(self._logits(z, t, mask))
        weights = self._softmax_(logits, mask)
        for i in reversed(range(count)):
            if t is None:
                t = self._embedded(select_templates(batch, slice(i, i + 1)), z, z_mask).squeeze(-4)
            for rows in uniform_loop(execution.rows(z.shape[-3])):
                normalised = self.norm(t[..., rows, :, :])
                new = self.pointwise.term(execution.fetch(weights[-1], rows), normalised, first=i == 0)
                execution.store(z, rows, execution.fetch(z, rows) + new * has_templates)
            t = None
            weights.pop()
        return z

    def _logits(self, z: Tensor, t: Tensor, like: Tensor) -> Tensor:
        """Compute the attention logits of one template, [*, r, r, heads]."""
        execution = self.execution
        logits = execution.alloc_rarely_used(like, (*z.shape[:-1], self.pointwise.heads))
        for rows in uniform_loop(execution.rows(z.shape[-3])):
            new = self.pointwise.logits(execution.fetch(z, rows), self.norm(t[..., rows, :, :]))
            execution.store(logits, rows, new)
        return logits

    def _softmax_(self, logits: list[Tensor], mask: Tensor) -> list[Tensor]:
        """Overwrite the logits of all templates with their attention weights."""
        for rows in uniform_loop(self.execution.rows(logits[0].shape[-3])):
            weights = self.pointwise.weights([self.execution.fetch(x, rows) for x in logits], mask)
            for x, weight in zip(logits, weights):
                self.execution.store(x, rows, weight)
        return logits


class ChainTemplatePairEmbedder(Executable):
    """AlphaFold-Multimer's embedding of template pairs: the sum of a projection of each feature and of z.

        d, beta, aatype_j, aatype_i, v, backbone = template_pairs(batch, residues, rows)
        same_chain = (asym_id[:, None] == asym_id)[..., None]
        beta, backbone = beta * same_chain, backbone * same_chain
        features = d * beta, beta, aatype_j, aatype_i, *(v * backbone).split(1, -1), backbone, norm(z)
        sum(f(x) for f, x in zip(parts, features))

    A template describes one chain, so the features of atoms in different chains are masked. The residue types are not
    masked, as in the official code: a template without atoms does not vanish.
    """

    def __init__(self, c_z: int, c_t: int) -> None:
        super().__init__()
        self.norm = LayerNorm(c_z)
        # The channels of the features of `template_pairs`, with the vector as three features, and of z.
        inputs = (DISTANCE_BINS, 1, AATYPES, AATYPES, 1, 1, 1, 1, c_z)
        self.parts = nn.ModuleList(Linear(c, c_t, init="relu") for c in inputs)

    def forward(self, templates: Batch, asym_id: Tensor, z: Tensor, rows: slice) -> Tensor:
        """Embed templates, [*, tmpl, r, ...] -> [*, tmpl, rows, r, c_t].

        asym_id: [*, r]; z: [*, rows, r, c_z], some of this rank's rows.
        """
        asym_id_i = self.residues.local_shard(asym_id, -1)[..., rows]
        same_chain = (asym_id_i[..., :, None] == asym_id[..., None, :])[..., None, :, :, None]
        # All templates share the term of z.
        t: Tensor = self.parts[-1](self.norm(z))[..., None, :, :, :]
        distances, beta, columns, types, vector, backbone = template_pairs(templates, self.residues, rows)
        beta, backbone = beta * same_chain, backbone * same_chain
        inputs = (distances * beta, beta, columns, types, *(vector * backbone).split(1, -1), backbone)
        for part, x in zip(self.parts, inputs):
            t = t + part(x.to(t.dtype))
        return t


class ChainTemplateEmbedder(Executable):
    """AlphaFold-Multimer's template embedding: add the mean over templates to z.

        t = norm(stack(pair(batch, asym_id, z, rows), z_mask))
        z + out(relu(t.mean(0)))

    z: [*, r, r, c_z]; z_mask: [*, r, r]; t: [*, templates, r, r, c_t]; asym_id: [*, r]. Absent templates of chains that
    have fewer than others count in the mean (their atoms are masked), as in the official code. `rows` adds the
    templates to m.
    """

    def __init__(self, c_m: int, c_z: int, config: TemplateConfig) -> None:
        super().__init__()
        self.pair = ChainTemplatePairEmbedder(c_z, config.c)
        self.stack = TemplatePairStack(config)
        self.norm = LayerNorm(config.c)
        self.out = Linear(config.c, c_z, init="relu")
        self.rows = ChiTemplateRows(c_m) if config.torsion_rows else None

    def forward(self, z: Tensor, z_mask: Tensor, batch: Batch) -> Tensor:
        """Compute the new z. A batch without an entry along the axis of templates leaves z unchanged."""
        count = batch["template_mask"].shape[-1]
        if count == 0:
            return z
        *groups, last = self.execution.parts(count, z_mask.shape[-1] ** 2)
        # The sum over all templates before the last group.
        total = None

        def plus(t: Tensor, rows: slice, old: Tensor) -> Tensor:
            return old + self.norm(t[..., rows, :, :]).sum(-4)

        for group in groups:
            t = self._embedded(select_templates(batch, group), batch["asym_id"], z, z_mask)
            if total is None:
                total = self.execution.alloc_rarely_used(z_mask, (*z.shape[:-1], t.shape[-1]))
            total = self.map_rows_(total, partial(plus, t))
            # Release this group before computing the next.
            del t
        t = self._embedded(select_templates(batch, last), batch["asym_id"], z, z_mask)

        def updated(rows: slice, old: Tensor) -> Tensor:
            summed = self.norm(t[..., rows, :, :]).sum(-4)
            summed = summed if total is None else summed + self.execution.fetch(total, rows)
            update: Tensor = self.out((summed / count).relu())
            return old + update

        return self.map_rows_(z, updated)

    def _embedded(self, templates: Batch, asym_id: Tensor, z: Tensor, z_mask: Tensor) -> Tensor:
        """Compute the output [*, tmpl, r, r, c_t] of the stack for some templates, not normalised."""
        fetch = self.execution.fetch
        t = self.map_rows(lambda rows: self.pair(templates, asym_id, fetch(z, rows), rows), z.shape[-3], -3)
        return self.stack(t, z_mask[..., None, :, :])


class TemplatePairStack(BlockStack):
    """Algorithm 16, TemplatePairStack: the pair stack on each template, with attention before multiplication.

        for block in blocks:
            (t,) = block(t, z_mask)
        t

    t: [*, templates, i, j, c_t]; z_mask: [*, i, j].
    """

    def __init__(self, config: TemplateConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PairStack(config.c, config.pair) for _ in range(config.blocks))

    def forward(self, t: Tensor, z_mask: Tensor) -> Tensor:
        """Compute the new t [*, r, r, c_t]. z_mask [*, r, r] is expanded to the leading axes of t."""
        (t,) = self.execution.stack(self, (t,), (z_mask.expand(t.shape[:-1]),))
        return t


class TemplateRows(Executable):
    """Algorithm 2, lines 7 and 8: embed the torsion angles of each template as a row of the MSA.

        aatype, positions, masks = template_aatype, template_all_atom_positions, template_all_atom_masks
        torsions = atom37_to_torsions(aatype.clamp(max=20), positions, masks)
        angles = torsions.sin_cos.flatten(-2), torsions.alt_sin_cos.flatten(-2), torsions.mask
        down(relu(up(cat([one_hot(aatype, 22), *angles], -1)))), torsions.mask[..., PSI]

    Returns the rows [*, templates, r, c_m] (this rank's shard) and their mask [*, templates, r]. A gap (21) has no
    atoms, like X (20). Undefined torsions are zero, where the official code feeds rounding noise.
    """

    channels = AATYPES + 14 + 14 + 7

    def __init__(self, c_m: int) -> None:
        super().__init__()
        self.up = Linear(self.channels, c_m, init="relu")
        self.down = Linear(c_m, c_m, init="relu")

    def forward(self, batch: Batch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Compute the rows and their mask."""
        features, mask = self.features(batch)
        features = self.residues.local_shard(features, -2)
        return self.down(self.up(features.to(dtype)).relu()), mask

    @staticmethod
    def features(batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the 57 features [*, tmpl, r, 57] and the row mask [*, tmpl, r]."""
        types, torsions = _types_and_torsions(batch)
        angles = (torsions.sin_cos.flatten(-2), torsions.alt_sin_cos.flatten(-2))
        return torch.cat((types, *angles, torsions.mask), -1), torsions.mask[..., PSI]


class ChiTemplateRows(TemplateRows):
    """AlphaFold-Multimer's template rows: like `TemplateRows`, but from the side chains' torsions only.

        aatype, positions, masks = template_aatype, template_all_atom_positions, template_all_atom_masks
        torsions = atom37_to_torsions(aatype.clamp(max=20), positions, masks)
        sin, cos = torsions.sin_cos[..., CHI1:, :].unbind(-1)
        features = cat([one_hot(aatype, 22), sin, cos, torsions.mask[..., CHI1:]], -1)
        down(relu(up(features))), torsions.mask[..., CHI1]

    Returns the rows [*, templates, r, c_m] (this rank's shard) and their mask [*, templates, r].
    """

    channels = AATYPES + 4 + 4 + 4

    @staticmethod
    def features(batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the 34 features [*, tmpl, r, 34] (types, sines, cosines, mask) and the row mask [*, tmpl, r]."""
        types, torsions = _types_and_torsions(batch)
        sines, cosines = torsions.sin_cos[..., CHI1:, :].unbind(-1)
        return torch.cat((types, sines, cosines, torsions.mask[..., CHI1:]), -1), torsions.mask[..., CHI1]


def _types_and_torsions(batch: Batch) -> tuple[Tensor, Torsions]:
    """Compute the one-hot residue types [*, tmpl, r, 22] and the torsions [*, tmpl, r] of all templates."""
    aatype, positions, masks = (batch[f"template_{x}"] for x in ("aatype", "all_atom_positions", "all_atom_masks"))
    # A gap, like X, has no atoms.
    torsions = atom37_to_torsions(aatype.clamp(max=UNKNOWN), positions, masks)
    return one_hot(aatype, AATYPES, torsions.mask.dtype), torsions
