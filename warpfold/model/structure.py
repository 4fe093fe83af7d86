"""The structure module: from the trunk's s and z to frames, torsion angles and atoms (Supp. 1.8).

All computation is in fp32 or wider, whatever the dtype of the inputs. Inside the module, translations are in units of
`position_scale` angstrom (10, in AlphaFold-Multimer 20). The outputs are in angstrom. As in evoformer.py, the docstring
of each layer contains its definition, which a test executes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from warpfold.geometry.atoms import atom14_to_atom37, frames_to_atom14, torsions_to_frames
from warpfold.geometry.rigid import Rigid, multiply, update_affine
from warpfold.model.axial import Executable
from warpfold.model.layers import DrawsNoise, LayerNorm, Linear, joined
from warpfold.ops.dispatch import upcast_half
from warpfold.ops.noise import dropout
from warpfold.ops.tensors import exact_linear, exact_matmul


@dataclass(frozen=True, kw_only=True)
class StructureConfig:
    """The settings of the structure module. The defaults are AlphaFold2's (Algorithms 20, 22, 23)."""

    # All layers share their weights.
    layers: int = 8
    c: int = 384
    heads: int = 12
    c_hidden: int = 16
    qk_points: int = 4
    v_points: int = 8
    # Whether the scalar queries, keys and values have a bias. AlphaFold-Multimer's have none.
    scalar_bias: bool = True
    transition_layers: int = 3
    # Unit of the translations inside the module, in angstrom. AlphaFold-Multimer: 20.
    position_scale: float = 10.0
    sidechain_c: int = 128
    sidechain_blocks: int = 2
    dropout: float = 0.1


@dataclass(frozen=True)
class StructureOutput:
    """The output of the structure module. Axis L is the layers. Lengths are in angstrom.

    single: [*, N, c], the activations after the last layer.
    frames: [L, *, N], the backbone frames. traj: [L, *, N, 7], the same as quaternion w x y z and translation.
    sidechain_frames: [L, *, N, 8], the frames of the rigid groups.
    angles: [L, *, N, 7, 2], (sin, cos) of the torsions. unnormalized_angles: the same before normalisation.
    atom14: [L, *, N, 14, 3]. final_atom14, final_atom37: [*, N, 14 or 37, 3], the atoms after the last layer.
    """

    single: Tensor
    frames: Rigid
    sidechain_frames: Rigid
    angles: Tensor
    unnormalized_angles: Tensor
    atom14: Tensor
    final_atom14: Tensor
    final_atom37: Tensor
    traj: Tensor


class StructureModule(Executable):
    """Algorithm 20, StructureModule: apply one `FoldIteration` `config.layers` times, and compute the atoms.

        s_initial, z = single_layer_norm(s), pair_layer_norm(z)
        s, affine = initial_projection(s_initial), cat([s.new_ones(len(s), 1), s.new_zeros(len(s), 6)], -1)
        affines, angles = [], []
        for layer in range(config.layers):
            s, affine, torsions = fold_iteration(s, s_initial, z, affine, seq_mask)
            affines, angles = [*affines, affine], [*angles, torsions]
            affine = cat([affine[:, :4].detach(), affine[:, 4:]], -1)
        frames = Rigid.from_quaternion7(stack(affines))
        frames = Rigid(frames.rotation, config.position_scale * frames.translation)
        frames = torsions_to_frames(aatype, frames, normalize_angles(stack(angles)))
        s, frames_to_atom14(aatype, frames)

    s: [*, N, c_s]; z: [*, N, N, c_z]; aatype: int64 [*, N] (0 to 20); seq_mask: [*, N]. All residues start at the
    origin ("black hole" initialisation). From one layer to the next, the gradient passes through translations and
    activations, but not through rotations (line 20). `StructureOutput` holds these and other quantities.
    """

    def __init__(self, c_s: int, c_z: int, config: StructureConfig | None = None) -> None:
        super().__init__()
        self.config = c = StructureConfig() if config is None else config
        self.single_layer_norm = LayerNorm(c_s)
        self.initial_projection = Linear(c_s, c.c)
        self.pair_layer_norm = LayerNorm(c_z)
        self.fold_iteration = FoldIteration(c_s, c_z, c)

    def forward(self, s: Tensor, z: Tensor, aatype: Tensor, seq_mask: Tensor) -> StructureOutput:
        """Compute the structures of all layers."""
        s_initial = self.single_layer_norm(self.around_trunk(s))
        fold, mask = self.fold_iteration, seq_mask.to(upcast_half(s).dtype)
        pairs = fold.invariant_point_attention.pairs(z, mask, lambda x: self.pair_layer_norm(self.around_trunk(x)))
        s = self.initial_projection(s_initial)
        affine = torch.cat([mask.new_ones(*s.shape[:-1], 1), mask.new_zeros(*s.shape[:-1], 6)], dim=-1)
        states, affines = [], []
        for layer in range(self.config.layers):
            s, affine = fold.advance(s, pairs, affine, layer)
            states.append(s)
            affines.append(affine)
            affine = torch.cat([affine[..., :4].detach(), affine[..., 4:]], dim=-1)
        # Lines 11, 14 and 24, torsions, frames of the rigid groups and atoms, for all layers together: no layer reads
        # those of another.
        unnormalized = fold.rigid_sidechain(torch.stack(states), s_initial)
        quaternions, translations = torch.stack(affines).split((4, 3), -1)
        traj = torch.cat([quaternions, translations * self.config.position_scale], dim=-1)
        frames = Rigid.from_quaternion7(traj)
        angles = normalize_angles(unnormalized)
        sidechain_frames = torsions_to_frames(aatype, frames, angles)
        atom14 = frames_to_atom14(aatype, sidechain_frames)
        return StructureOutput(
            single=s,
            frames=frames,
            sidechain_frames=sidechain_frames,
            angles=angles,
            unnormalized_angles=unnormalized,
            atom14=atom14,
            final_atom14=atom14[-1],
            final_atom37=atom14_to_atom37(aatype, atom14[-1]),
            traj=traj,
        )


class FoldIteration(DrawsNoise):
    """Algorithm 20, lines 6 to 14: attention, transition, backbone update and torsion angles of one layer.

        s = s + invariant_point_attention(s, z, Rigid.from_quaternion7(affine), mask)
        s = attention_layer_norm(s)
        a = s
        for linear in transition[:-1]:
            a = relu(linear(a))
        s = transition_layer_norm(s + transition[-1](a))
        s, update_affine(affine, affine_update(s)), rigid_sidechain(s, s_initial)

    s: [*, N, c]; s_initial: [*, N, c_s] and z: [*, N, N, c_z], normalised; mask: [*, N]. affine: [*, N, 7], quaternion
    w x y z and translation in units of `position_scale`. Returns s, affine and the torsions (sin, cos) [*, N, 7, 2],
    not normalised. In training there is dropout before each of the two norms.
    """

    def __init__(self, c_s: int, c_z: int, config: StructureConfig) -> None:
        super().__init__()
        c = config
        self.rate = c.dropout
        self.invariant_point_attention = InvariantPointAttention(
            c.c, c_z, c.heads, c.c_hidden, c.qk_points, c.v_points, c.scalar_bias
        )
        self.attention_layer_norm = LayerNorm(c.c)
        last = c.transition_layers - 1
        self.transition = nn.ModuleList(
            Linear(c.c, c.c, init="final" if i == last else "relu") for i in range(c.transition_layers)
        )
        self.transition_layer_norm = LayerNorm(c.c)
        self.affine_update = Linear(c.c, 6, init="final")
        self.rigid_sidechain = AngleResnet(c.c, c_s, c.sidechain_c, c.sidechain_blocks)

    def forward(
        self, s: Tensor, s_initial: Tensor, z: Tensor, affine: Tensor, mask: Tensor, layer: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute one layer; `layer` selects the dropout noise."""
        s, affine = self.advance(s, self.invariant_point_attention.pairs(z, mask), affine, layer)
        return s, affine, self.rigid_sidechain(s, s_initial)

    def advance(self, s: Tensor, pairs: "Pairs", affine: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Compute the new s and affine. `pairs` holds the terms of the attention that all layers share."""
        # Two streams of noise for every layer.
        stream = self.stream + 2 * layer
        frames = Rigid.from_quaternion7(affine)
        s = s + self.invariant_point_attention.attend(s, pairs, frames)
        s = self.attention_layer_norm(dropout(s, self.rate, self.noise, stream, self.training))
        *inner, last = self.transition
        a = s
        for linear in inner:
            a = linear(a).relu()
        s = s + last(a)
        s = self.transition_layer_norm(dropout(s, self.rate, self.noise, stream + 1, self.training))
        weight, bias = joined(s.dtype, self.affine_update)
        assert bias is not None
        update = upcast_half(exact_linear(s, weight.to(s.dtype), bias.to(s.dtype)))
        return s, update_affine(affine, update, frames.rotation)


class PairRows(NamedTuple):
    """The terms of the invariant point attention that come from some rows of z and the mask.

    z: [*, I, N, c_z], normalised. bias: [*, H, I, N], added to the logits; large and negative for masked residues.
    """

    z: Tensor
    bias: Tensor


class Pairs(NamedTuple):
    """The terms of the invariant point attention that all layers share, from z, the mask and the parameters.

    rows: computes the terms for some of this rank's rows of z.
    together: whether all rows are one slice, whose terms are computed once for all layers.
    weight: [outputs, c], of all projections of s. linear_bias: [outputs], with zeros for projections without one.
    scale: [H, c_hidden + 3 qk_points + 1], factors of the queries' features.
    centre_weight: [*, N, 1], the weight of each residue in the centre of all.
    """

    rows: Callable[[slice], PairRows]
    together: bool
    weight: Tensor
    linear_bias: Tensor
    scale: Tensor
    centre_weight: Tensor


class InvariantPointAttention(Executable):
    """Algorithm 22, InvariantPointAttention: attention by scalar products, pair bias and distances in space.

        R, t, w = frames.rotation, frames.translation[..., None], softplus(trainable_point_weights)
        q, kv = (f(s).unflatten(-1, (heads, -1)) for f in (q_scalar, kv_scalar))
        k, v = kv.split(c_hidden, -1)
        q_points, kv_points = (R @ f(s).unflatten(-1, (3, -1)) + t for f in (q_point_local, kv_point_local))
        q_points, kv_points = (x.unflatten(-1, (heads, -1)) for x in (q_points, kv_points))
        k_points, v_points = kv_points.split((qk_points, v_points), -1)
        squares = (q_points[:, None] - k_points).square().sum((2, 4))
        logits = einsum("ihc,jhc->ijh", q, k) / sqrt(c_hidden) + attention_2d(z) - w * squares / sqrt(18 * qk_points)
        a = softmax(sqrt(1 / 3) * logits - 1e5 * (mask[:, None] * (1 - mask))[..., None], 1)
        o, o_pair = einsum("ijh,jhc->ihc", a, v), einsum("ijh,ijc->ihc", a, z)
        o_points = R.mT @ (einsum("ijh,jxhp->ixhp", a, v_points).flatten(-2) - t)
        o_lengths = sqrt(o_points.square().sum(1) + 1e-8)
        output_projection(cat([o.flatten(1), o_points.flatten(1), o_lengths, o_pair.flatten(1)], -1))

    s: [*, N, c]; z: [*, N, N, c_z]; frames: [*, N]; mask: [*, N]. Returns the update of s, which is invariant under a
    rigid motion of all frames together.

    Implementation: a sum of squared distances of points is |q|^2 + |k|^2 - 2 q k, with vectors of all coordinates. The
    softmax does not depend on |q|^2, so the logits are one product of features, [q, 2 g points, -g] times [k, points,
    |points|^2]. No tensor is larger than [N, N, H] or z. If the queries are computed in slices, all tensors are
    smaller, because each layer computes its terms of these rows of z again.

    Precision: the squares must not be much larger than the distances. Points are therefore relative to the centre of
    all residues. The rounding error is some 1e-7 of the squared extent of the protein, or 1e-5 in a logit at 100 A.
    With TF32 it would be 0.1, so these products, and those that compute points and frames, are exact (ops/tensors.py).
    """

    def __init__(
        self, c: int, c_z: int, heads: int, c_hidden: int, qk_points: int, v_points: int, scalar_bias: bool = True
    ) -> None:
        super().__init__()
        self.heads, self.c_hidden, self.qk_points, self.v_points = heads, c_hidden, qk_points, v_points
        self.q_scalar = Linear(c, heads * c_hidden, bias=scalar_bias)
        # Each head has first its keys, then its values.
        self.kv_scalar = Linear(c, heads * 2 * c_hidden, bias=scalar_bias)
        # All x, then all y, then all z.
        self.q_point_local = Linear(c, 3 * heads * qk_points)
        self.kv_point_local = Linear(c, 3 * heads * (qk_points + v_points))
        # The softplus of this value is 1.
        self.trainable_point_weights = nn.Parameter(torch.full((heads,), math.log(math.e - 1)))
        self.attention_2d = Linear(c_z, heads)
        self.output_projection = Linear(heads * (c_hidden + 4 * v_points + c_z), c, init="final")

    def forward(self, s: Tensor, z: Tensor, frames: Rigid, mask: Tensor) -> Tensor:
        """Compute the update of s. z has this rank's rows, for whose queries the attention is computed here."""
        return self.attend(s, self.pairs(z, mask), frames)

    @property
    def projections(self) -> tuple[Linear, ...]:
        """The projections of s, in the order of `joined`: those that always have a bias come first."""
        return self.q_point_local, self.kv_point_local, self.q_scalar, self.kv_scalar

    def pairs(self, z: Tensor, mask: Tensor, normalise: Callable[[Tensor], Tensor] | None = None) -> Pairs:
        """Compute the terms that all layers share, from z [*, N, N, c_z] (this rank's rows) and mask [*, N].

        normalise: applied to rows of z before the layers read them. None: z is normalised already.
        """

        def compute_rows(rows: slice) -> PairRows:
            z_rows = self.execution.fetch(z, rows)
            z_rows = z_rows if normalise is None else normalise(z_rows)
            # A masked residue attends to all residues, so that its softmax is finite. Its result is never read.
            mask_rows = self.residues.local_shard(mask, -1)[..., rows]
            hidden = mask_rows[..., None, :, None] * (1 - mask[..., None, None, :])
            bias = third * upcast_half(self.attention_2d(z_rows)).movedim(-1, -3) - 1e5 * hidden
            return PairRows(z_rows, bias.contiguous())

        third, count = math.sqrt(1 / 3), z.shape[-3]
        # A gradient needs the terms of all rows, so there is no memory to save.
        together = torch.is_grad_enabled() or len(self.execution.rows(count)) == 1
        shared_rows = compute_rows(slice(0, count)) if together else None
        dtype = z.dtype if normalise is None else self.around_trunk(torch.empty(0, dtype=z.dtype)).dtype
        weight, bias = joined(dtype, *self.projections)
        assert bias is not None
        linear_bias = nn.functional.pad(bias, (0, len(weight) - len(bias))) if len(bias) < len(weight) else bias
        gamma = nn.functional.softplus(upcast_half(self.trainable_point_weights))[:, None]
        square_scale = third * 0.5 * math.sqrt(2 / (9 * self.qk_points)) * gamma
        scalar_scale = torch.full_like(gamma, third / math.sqrt(self.c_hidden)).expand(-1, self.c_hidden)
        scale = torch.cat([scalar_scale, (2 * square_scale).expand(-1, 3 * self.qk_points), -square_scale], -1)
        return Pairs(
            rows=lambda rows: compute_rows(rows) if shared_rows is None else shared_rows,
            together=together,
            weight=weight.to(dtype),
            linear_bias=linear_bias.to(dtype),
            scale=scale,
            centre_weight=(mask / mask.sum(-1, keepdim=True).clamp(min=1))[..., None],
        )

    def attend(self, s: Tensor, pairs: Pairs, frames: Rigid) -> Tensor:
        """Compute the update of s [*, N, c] from frames [*, N] and the terms that all layers share."""
        rank, h = self.residues.local_shard, self.heads
        projected = upcast_half(exact_linear(s, pairs.weight, pairs.linear_bias))
        sizes = [3 * h * self.qk_points, 3 * h * (self.qk_points + self.v_points), h * self.c_hidden]
        q_points, kv_points, q, kv = projected.split((*sizes, 2 * h * self.c_hidden), -1)
        k, v = kv.unflatten(-1, (h, -1)).split(self.c_hidden, -1)
        # The result does not depend on the centre, so it is detached.
        centre = (pairs.centre_weight * frames.translation.detach()).sum(-2, keepdim=True)
        translation = (frames.translation - centre)[..., None]
        local = torch.cat([x.unflatten(-1, (3, -1)) for x in (q_points, kv_points)], -1)
        # [*, N, 3, all points]
        points = multiply(frames.rotation, local) + translation
        q_points, kv_points = points.split((h * self.qk_points, h * (self.qk_points + self.v_points)), -1)
        q_points, (k_points, v_points) = (
            q_points.unflatten(-1, (h, -1)),
            kv_points.unflatten(-1, (h, -1)).split((self.qk_points, self.v_points), -1),
        )
        squares = k_points.square().sum((-3, -1))[..., None]
        q_features = torch.cat([q.unflatten(-1, (h, -1)), *q_points.unbind(-3), torch.ones_like(squares)], -1)
        # The features of q, k and v are [*, N, H, features].
        k_features = torch.cat([k, *k_points.unbind(-3), squares], -1)
        v_features = torch.cat([v, *v_points.unbind(-3)], -1)
        q_features, rotation, translation = rank(q_features, -3), rank(frames.rotation, -3), rank(translation, -3)

        def update_rows(rows: slice) -> Tensor:
            """Compute the update of some of this rank's residues (I of them; P points per head)."""
            z, bias = pairs.rows(rows)
            # The weights [*, H, I, N].
            q_rows = (q_features[..., rows, :, :] * pairs.scale).transpose(-3, -2)
            a = torch.softmax(exact_matmul(q_rows, k_features.transpose(-3, -2).mT, bias), -1)
            # [*, I, H, c + 3 P], and [*, I, H, c_z].
            o = exact_matmul(a, v_features.transpose(-3, -2)).transpose(-3, -2)
            o_pair = a.transpose(-3, -2).to(s.dtype) @ z
            o, o_points = o.split((self.c_hidden, 3 * self.v_points), -1)
            # [*, I, 3, H P]
            o_points = o_points.unflatten(-1, (3, -1)).transpose(-3, -2).flatten(-2)
            o_points = multiply(rotation[..., rows, :, :].mT, o_points - translation[..., rows, :, :])
            o_lengths = torch.sqrt(o_points.square().sum(-2) + 1e-8)
            outputs = [o.flatten(-2), o_points.flatten(-2), o_lengths, o_pair.flatten(-2)]
            update: Tensor = self.output_projection(torch.cat([x.to(s.dtype) for x in outputs], dim=-1))
            return update

        count = q_features.shape[-3]
        update = update_rows(slice(0, count)) if pairs.together else self.map_rows(update_rows, count, -2)
        return self.residues.all_gather(update, -2, s.shape[-2])


class AngleResnet(nn.Module):
    """Algorithm 20, lines 11 to 14: torsion angles from the current and the initial activations.

        a = input_projection(relu(s)) + input_projection_initial(relu(s_initial))
        for first, second in zip(resblock1, resblock2):
            a = a + second(relu(first(relu(a))))
        unnormalized_angles(relu(a)).unflatten(-1, (7, 2))

    s: [*, N, c]; s_initial: [*, N, c_initial]. Returns (sin, cos) [*, N, 7, 2], not normalised.
    """

    def __init__(self, c: int, c_initial: int, c_hidden: int, blocks: int) -> None:
        super().__init__()
        self.input_projection = Linear(c, c_hidden)
        self.input_projection_initial = Linear(c_initial, c_hidden)
        self.resblock1 = nn.ModuleList(Linear(c_hidden, c_hidden, init="relu") for _ in range(blocks))
        self.resblock2 = nn.ModuleList(Linear(c_hidden, c_hidden, init="final") for _ in range(blocks))
        self.unnormalized_angles = Linear(c_hidden, 14)

    def forward(self, s: Tensor, s_initial: Tensor) -> Tensor:
        """Compute (sin, cos) [*, N, 7, 2], not normalised."""
        a = self.input_projection(s.relu()) + self.input_projection_initial(s_initial.relu())
        for first, second in zip(self.resblock1, self.resblock2):
            a = a + second(first(a.relu()).relu())
        return upcast_half(self.unnormalized_angles(a.relu())).unflatten(-1, (7, 2))


def normalize_angles(unnormalized: Tensor) -> Tensor:
    """Normalise pairs to length one over the last axis; (0, 0) stays (0, 0), with a finite gradient."""
    return unnormalized * torch.rsqrt(unnormalized.square().sum(-1, keepdim=True).clamp(min=1e-12))
