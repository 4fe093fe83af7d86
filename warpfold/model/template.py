"""Templates: pair features, their stack, attention over them, and torsion rows for the MSA (Algorithms 16 and 17).

AlphaFold-Multimer embeds its templates in a way of its own: `ChainTemplateEmbedder`.
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

AATYPES = 22  # one-hot of template residue types: 20, X, gap
DISTANCE_BINS = 39  # of the beta carbon distances, 3.25 to 50.75 angstrom
PSI, CHI1 = 2, 3  # the torsion whose mask says which residues of a template row are valid; in a multimer


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
    pair: PairConfig = field(default_factory=partial(PairConfig, c_triangle=64, transition=2, order="attention_first"))


def template_pairs(templates: Batch, residues: Residues, rows: slice, unit_vectors: bool = True) -> tuple[Tensor, ...]:
    """Return the pair features of templates, [*, r, ...] each (Supp. 1.2.9, table 1), none of them masked.

    One-hot distances of beta carbons [*, i, j, 39], whether both are there [*, i, j, 1], residue types of column j
    [*, 1, j, 22] and of row i [*, i, 1, 22], the direction of CA j in the frame of i [*, i, j, 3] (zeros without
    `unit_vectors`), and whether both backbones are there [*, i, j, 1]; i: these of this rank's residues.
    """

    def here(x: Tensor, axis: int) -> Tensor:
        return residues.local_shard(x, axis).narrow(axis, rows.start, rows.stop - rows.start)

    beta, beta_mask = templates["template_pseudo_beta"], templates["template_pseudo_beta_mask"]
    aatype = one_hot(templates["template_aatype"], AATYPES, beta.dtype)
    positions, masks = templates["template_all_atom_positions"], templates["template_all_atom_masks"]
    n, ca, c = (ATOM_ORDER[name] for name in ("N", "CA", "C"))
    has_backbone = masks[..., n] * masks[..., ca] * masks[..., c]
    has_both = (here(has_backbone, -1)[..., :, None] * has_backbone[..., None, :])[..., None]
    if unit_vectors:
        backbone = [positions[..., atom, :] for atom in (n, ca, c)]
        frames = Rigid.from_three_points(*(here(x, -2) for x in backbone))
        vector = frames[..., :, None].invert_apply(backbone[1][..., None, :, :])
        vector = vector * torch.rsqrt(1e-6 + vector.square().sum(-1, keepdim=True))
    else:
        vector = beta.new_zeros(*has_both.shape[:-1], 3)
    return (
        distogram_bins(beta, 3.25, 50.75, DISTANCE_BINS, here(beta, -2)),
        (here(beta_mask, -1)[..., :, None] * beta_mask[..., None, :])[..., None],
        aatype[..., None, :, :],
        here(aatype, -2)[..., :, None, :],
        vector,
        has_both,
    )


class TemplatePairEmbedder(Executable):
    """The 88 pair features of templates, projected (Supp. 1.2.9 table 1, Algorithm 2 line 9)."""

    def __init__(self, c_t: int, unit_vectors: bool) -> None:
        super().__init__()
        self.unit_vectors = unit_vectors
        self.linear = Linear(DISTANCE_BINS + 2 + 2 * AATYPES + 3, c_t, init="relu")

    def forward(self, templates: Batch, dtype: torch.dtype, rows: slice) -> Tensor:
        """Embed templates, [*, r, ...] -> [*, rows, r, c_t]; their features are zero where a backbone is missing.

        rows: of this rank's residues.
        """
        features = template_pairs(templates, self.residues, rows, self.unit_vectors)
        has_both = features[-1]
        joined = torch.cat([x.expand(*has_both.shape[:-1], x.shape[-1]) for x in features], -1)
        return self.linear((joined * has_both).to(dtype))


class TemplatePointwiseAttention(nn.Module):
    """Algorithm 17: each pair (i, j) attends to the templates' features of that pair.  No gate.

        q, k, v = (f(x).unflatten(-1, (heads, -1)) for f, x in ((q, z), (k, t), (v, t)))
        logits = einsum("ijhc,tijhc->ijht", q, k) / sqrt(q.shape[-1])
        a = softmax(logits.masked_fill(template_mask == 0, -1e9), -1)
        out(einsum("ijht,tijhc->ijhc", a, v).flatten(-2))

    z: [*, i, j, c_z]; t: [*, templates, i, j, c_t]; template_mask: [*, templates].
    """

    def __init__(self, c_z: int, c_t: int, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = Linear(c_z, heads * width, bias=False, init="glorot")
        self.k = Linear(c_t, heads * width, bias=False, init="glorot")
        self.v = Linear(c_t, heads * width, bias=False, init="glorot")
        self.out = Linear(heads * width, c_z, init="final")

    def forward(self, z: Tensor, t: Tensor, template_mask: Tensor) -> Tensor:
        """Return the update of z [*, r, r, c_z], given t [*, tmpl, r, r, c_t] and template_mask [*, tmpl]."""
        q = self.q(z)[..., None, :].unflatten(-1, (self.heads, -1))  # one query per pair
        # Projected as they lie: of moved axes, torch would copy the weight for every pair (bf16 on a CPU).
        k, v = (f(t).movedim(-4, -2).unflatten(-1, (self.heads, -1)) for f in (self.k, self.v))
        o = attention(q, k, v, template_mask[..., None, None, :])
        return self.out(o[..., 0, :, :].flatten(-2))

    def logits(self, z: Tensor, t: Tensor) -> Tensor:
        """Return how much z attends to one template, before the softmax: t [*, r, r, c_t] -> [*, r, r, heads]."""
        q, k = (f(x).unflatten(-1, (self.heads, -1)) for f, x in ((self.q, z), (self.k, t)))
        return (q * q.shape[-1] ** -0.5 * k).sum(-1)

    @staticmethod
    def weights(logits: Sequence[Tensor], template_mask: Tensor) -> tuple[Tensor, ...]:
        """Return the weight [*, r, r, heads] of each template, given the logits of all, as `attention` has them."""
        joined = upcast_half(torch.stack(list(logits), -1))
        masked = joined.masked_fill(template_mask[..., None, None, None, :] == 0, -1e9)
        return masked.softmax(-1).to(logits[0].dtype).unbind(-1)

    def of_one(self, weight: Tensor, t: Tensor, first: bool) -> Tensor:
        """Return one template's part of the update; the bias comes with the first."""
        o = (weight[..., None] * self.v(t).unflatten(-1, (self.heads, -1))).flatten(-2)
        matrix, bias = joined(o.dtype, self.out)
        return nn.functional.linear(o, matrix.to(o.dtype), None if bias is None or not first else bias.to(o.dtype))


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
        used = (mask.sum(-1) > 0).to(z.dtype)[..., None, None, None]
        parts = self.execution.parts(mask.shape[-1], z_mask.shape[-1] ** 2)
        if len(parts) > 1 and self.execution.in_place:  # else all are there at the same time
            return self._in_two_rounds(z, z_mask, batch, used)
        embedded = [self._embedded(some_templates(batch, part), z, z_mask) for part in parts]

        def updated(rows: slice, old: Tensor) -> Tensor:
            some = [
                self.norm(t[..., rows, :, :]) for t in embedded
            ]  # one by one: together they have too many positions
            return old + self.pointwise(old, torch.cat(some, -4) if len(some) > 1 else some[0], mask) * used

        return self.map_rows_(z, updated)

    def _embedded(self, some: Batch, z: Tensor, z_mask: Tensor) -> Tensor:
        """Return some templates [*, tmpl, r, r, c_t] after their stack, not normalised."""
        t = self.map_rows(lambda rows: self.pair(some, z.dtype, rows), z.shape[-3], -3)
        return self.stack(t, z_mask[..., None, :, :])

    def _in_two_rounds(self, z: Tensor, z_mask: Tensor, batch: Batch, used: Tensor) -> Tensor:
        """Return z, written over, with what the templates add, no two of which exist at the same time.

        A template's weight depends on all of them.  So the first round keeps of each its logits alone, and the second
        makes each again, but for the last, which is there still.
        """
        count, mask, execution = batch["template_mask"].shape[-1], batch["template_mask"], self.execution
        kept = []  # of each template first the logits, then the weight
        for i in range(count):
            t = None  # before the next is made
            t = self._embedded(some_templates(batch, slice(i, i + 1)), z, z_mask).squeeze(-4)
            kept.append(self._logits(z, t, mask))
        self._to_weights(kept, mask)
        for i in reversed(range(count)):
            if t is None:
                t = self._embedded(some_templates(batch, slice(i, i + 1)), z, z_mask).squeeze(-4)
            for rows in uniform_loop(execution.rows(z.shape[-3])):
                some = self.norm(t[..., rows, :, :])
                new = self.pointwise.of_one(execution.fetch(kept[-1], rows), some, first=i == 0)
                execution.store(z, rows, execution.fetch(z, rows) + new * used)
            t = None
            kept.pop()
        return z

    def _logits(self, z: Tensor, t: Tensor, like: Tensor) -> Tensor:
        """Return the logits of one template [*, r, r, heads]."""
        execution = self.execution
        kept = execution.alloc_rarely_used(like, (*z.shape[:-1], self.pointwise.heads))
        for rows in uniform_loop(execution.rows(z.shape[-3])):
            new = self.pointwise.logits(execution.fetch(z, rows), self.norm(t[..., rows, :, :]))
            execution.store(kept, rows, new)
        return kept

    def _to_weights(self, kept: Sequence[Tensor], mask: Tensor) -> None:
        """Write the weights of all templates over their logits."""
        for rows in uniform_loop(self.execution.rows(kept[0].shape[-3])):
            weights = self.pointwise.weights([self.execution.fetch(x, rows) for x in kept], mask)
            for x, weight in zip(kept, weights):
                self.execution.store(x, rows, weight)


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
        """Project z [*, r, r, c_z] to the term that is added to every template: [*, r, r, c_t]."""
        t: Tensor = self.parts[-1](self.norm(z))
        return t

    def forward(self, templates: Batch, asym_id: Tensor, z: Tensor, rows: slice) -> Tensor:
        """Embed templates, [*, tmpl, r, ...] -> [*, tmpl, rows, r, c_t].

        asym_id [*, r]; z [*, rows, r, c_z]: these of this rank's rows.
        """
        here = self.residues.local_shard(asym_id, -1)[..., rows]
        same_chain = (here[..., :, None] == asym_id[..., None, :])[..., None, :, :, None]
        t = self.of_pairs(z)[..., None, :, :, :]
        distances, beta, columns, types, vector, backbone = template_pairs(templates, self.residues, rows)
        beta, backbone = beta * same_chain, backbone * same_chain
        inputs = (distances * beta, beta, columns, types, *(vector * backbone).split(1, -1), backbone)
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
        count = batch["template_mask"].shape[-1]
        if count == 0:
            return z
        *before, last = self.execution.parts(count, z_mask.shape[-1] ** 2)
        total = None  # of all parts but the last

        def plus(t: Tensor, rows: slice, old: Tensor) -> Tensor:
            """Return the sum with what the mean takes of some more templates t [*, tmpl, r, r, c_t]."""
            return old + self.norm(t[..., rows, :, :]).sum(-4)

        for part in before:
            t = self._embedded(some_templates(batch, part), batch["asym_id"], z, z_mask)
            if total is None:
                total = self.execution.alloc_rarely_used(z_mask, (*z.shape[:-1], t.shape[-1]))
            total = self.map_rows_(total, partial(plus, t))
            del t  # before the next is made
        t = self._embedded(some_templates(batch, last), batch["asym_id"], z, z_mask)

        def updated(rows: slice, old: Tensor) -> Tensor:
            """Return z with what the mean of the templates adds."""
            found = self.norm(t[..., rows, :, :]).sum(-4)
            found = found if total is None else found + self.execution.fetch(total, rows)
            update: Tensor = self.out((found / count).relu())
            return old + update

        return self.map_rows_(z, updated)

    def _embedded(self, some: Batch, asym_id: Tensor, z: Tensor, z_mask: Tensor) -> Tensor:
        """Return some templates [*, tmpl, r, r, c_t] after their stack, not normalised."""
        fetch = self.execution.fetch
        t = self.map_rows(lambda rows: self.pair(some, asym_id, fetch(z, rows), rows), z.shape[-3], -3)
        return self.stack(t, z_mask[..., None, :, :])


class TemplatePairStack(BlockStack):
    """Algorithm 16: the pair stack on each template, attention before multiplication.

        for block in blocks:
            (t,) = block(t, z_mask)
        t

    t: [*, templates, i, j, c_t]; z_mask: [*, i, j].
    """

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
