"""The structure module: from the trunk's s and z to frames, torsion angles and atoms (Supp. 1.8).

Everything here computes in fp32 at least, whatever arrives.  Inside, translations are in units of `position_scale`
(10, in AlphaFold-Multimer 20) angstrom; what leaves is in angstrom.
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
    """The settings of the structure module.  The defaults are AlphaFold2's (Algorithms 20, 22, 23)."""

    layers: int = 8  # they share their weights
    c: int = 384
    heads: int = 12
    c_hidden: int = 16
    qk_points: int = 4
    v_points: int = 8
    scalar_bias: bool = True  # of the scalar queries, keys and values; AlphaFold-Multimer's have none
    transition_layers: int = 3
    position_scale: float = 10.0  # angstrom; AlphaFold-Multimer: 20
    sidechain_c: int = 128
    sidechain_blocks: int = 2
    dropout: float = 0.1


@dataclass(frozen=True)
class StructureOutput:
    """What the structure module says, after every layer where there is an axis L.  Lengths in angstrom."""

    single: Tensor  # [*, N, c] activations after the last layer
    frames: Rigid  # [L, *, N] backbone
    sidechain_frames: Rigid  # [L, *, N, 8] of the rigid groups
    angles: Tensor  # [L, *, N, 7, 2] (sin, cos)
    unnormalized_angles: Tensor  # [L, *, N, 7, 2]
    atom14: Tensor  # [L, *, N, 14, 3]
    final_atom14: Tensor  # [*, N, 14, 3]
    final_atom37: Tensor  # [*, N, 37, 3]
    traj: Tensor  # [L, *, N, 7] the backbone frames as quaternion w x y z and translation


class StructureModule(Executable):
    """Algorithm 20, StructureModule: `layers` passes of one `FoldIteration`, then atoms."""

    def __init__(self, c_s: int, c_z: int, config: StructureConfig | None = None) -> None:
        super().__init__()
        self.config = c = StructureConfig() if config is None else config
        self.single_layer_norm = LayerNorm(c_s)
        self.initial_projection = Linear(c_s, c.c)
        self.pair_layer_norm = LayerNorm(c_z)
        self.fold_iteration = FoldIteration(c_s, c_z, c)

    def forward(self, s: Tensor, z: Tensor, aatype: Tensor, seq_mask: Tensor) -> StructureOutput:
        """Return the structure of every layer.

        s [*, N, c_s], z [*, N, N, c_z], aatype int64 [*, N] (0-20), seq_mask [*, N].

        All residues start at the origin ("black hole").  The gradient does not pass from one layer to the next through
        rotations (line 20), only through translations and activations.
        """
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
        unnormalized = fold.rigid_sidechain(torch.stack(states), s_initial)  # no layer reads the angles of another
        return self._atoms(s, torch.stack(affines), unnormalized, aatype)

    def _atoms(self, s: Tensor, affines: Tensor, unnormalized: Tensor, aatype: Tensor) -> StructureOutput:
        """Compute lines 11, 14 and 24 for all layers at once: torsions, frames of the rigid groups, atoms."""
        quaternions, translations = affines.split((4, 3), -1)
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
    """Algorithm 20, lines 6 to 14: attention, transition, backbone update and torsion angles of one layer."""

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
        """Run one layer: (s [*, N, c], affine [*, N, 7]) -> the new s and affine, torsion angles [*, N, 7, 2].

        s_initial [*, N, c_s] and z [*, N, N, c_z], normalised; affine: quaternion w x y z and translation in units of
        `position_scale`; mask [*, N]; the angles (sin, cos) are not normalised; `layer` picks the dropout noise.
        """
        s, affine = self.advance(s, self.invariant_point_attention.pairs(z, mask), affine, layer)
        return s, affine, self.rigid_sidechain(s, s_initial)

    def advance(self, s: Tensor, pairs: "Pairs", affine: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Return the new s and affine; `pairs`: what the attention makes of z and the mask, once for all layers."""
        stream = self.stream + 2 * layer  # two streams for every layer
        frames = Rigid.from_quaternion7(affine)
        s = s + self.invariant_point_attention.attend(s, pairs, frames)
        s = self.attention_layer_norm(dropout(s, self.rate, self.noise, stream, self.training))
        s = s + self._transition(s)
        s = self.transition_layer_norm(dropout(s, self.rate, self.noise, stream + 1, self.training))
        weight, bias = joined(s.dtype, self.affine_update)
        assert bias is not None
        update = upcast_half(exact_linear(s, weight.to(s.dtype), bias.to(s.dtype)))  # [*, N, 6]
        return s, update_affine(affine, update, frames.rotation)

    def _transition(self, s: Tensor) -> Tensor:
        *inner, last = self.transition
        for linear in inner:
            s = linear(s).relu()
        return last(s)


class PairRows(NamedTuple):
    """What the invariant point attention of every layer makes alike of some rows of z, and of the mask."""

    z: Tensor  # [*, I, N, c_z], normalised
    bias: Tensor  # [*, H, I, N] of the logits; far below 0 where a query must not see a residue


class Pairs(NamedTuple):
    """What the invariant point attention of every layer makes alike: of z, of the mask, and of its parameters."""

    rows: Callable[[slice], PairRows]  # of some of this rank's rows
    together: bool  # whether all rows are one slice, of which everything is made once for all layers
    weight: Tensor  # [outputs, c] of all projections of s, and
    linear_bias: Tensor  # [outputs], zeros where there is none
    scale: Tensor  # [H, c_hidden + 3 qk_points + 1] of the queries' features
    part: Tensor  # [*, N, 1] a residue's part in the centre of all


class InvariantPointAttention(Executable):
    """Algorithm 22, InvariantPointAttention: attention by likeness, by pair and by distance in space.

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

    The result is the same under any rigid motion of all frames together.

    A sum of squared distances of points is |q|^2 + |k|^2 - 2 q k, of vectors of all their coordinates.  The softmax
    does not see |q|^2, so a query's logits are one product of features, [q, 2 g points, -g] by [k, points, |points|^2].
    Nothing is larger than [N, N, H] or z; in slices of queries nothing is as large, for each layer makes what it needs
    of these rows of z again.  So that the squares stay small beside the distances, and fp32 exact enough, points are
    taken from the centre of all residues: what is lost is some 1e-7 of the squared extent of the protein, which at 100
    angstrom makes 1e-5 in a logit.  With TF32 it would be 0.1: these products, and those that make points and frames,
    stay exact (ops/tensors.py).
    """

    def __init__(
        self, c: int, c_z: int, heads: int, c_hidden: int, qk_points: int, v_points: int, scalar_bias: bool = True
    ) -> None:
        super().__init__()
        self.heads, self.c_hidden, self.qk_points, self.v_points = heads, c_hidden, qk_points, v_points
        self.q_scalar = Linear(c, heads * c_hidden, bias=scalar_bias)
        self.kv_scalar = Linear(c, heads * 2 * c_hidden, bias=scalar_bias)  # in each head keys, then values
        self.q_point_local = Linear(c, 3 * heads * qk_points)  # all x, then y, then z
        self.kv_point_local = Linear(c, 3 * heads * (qk_points + v_points))
        self.trainable_point_weights = nn.Parameter(torch.full((heads,), math.log(math.e - 1)))  # softplus gives 1
        self.attention_2d = Linear(c_z, heads)
        self.output_projection = Linear(heads * (c_hidden + 4 * v_points + c_z), c, init="final")

    def forward(self, s: Tensor, z: Tensor, frames: Rigid, mask: Tensor) -> Tensor:
        """Return the update of s [*, N, c], given z [*, N, N, c_z], frames [*, N] and mask [*, N].

        z: this rank's rows; only their queries are computed.
        """
        return self.attend(s, self.pairs(z, mask), frames)

    @property
    def projections(self) -> tuple[Linear, ...]:
        """The projections of s, in the order in which they are joined: those that always have a bias come first."""
        return self.q_point_local, self.kv_point_local, self.q_scalar, self.kv_scalar

    def pairs(self, z: Tensor, mask: Tensor, normalise: Callable[[Tensor], Tensor] | None = None) -> Pairs:
        """Return the attention's part that all layers share, from z [*, N, N, c_z] (this rank's rows) and mask [*, N].

        normalise: makes of rows of z what the layers read; None: z is normalised already.
        """

        def of_rows(rows: slice) -> PairRows:
            some = self.execution.fetch(z, rows)
            some = some if normalise is None else normalise(some)
            # A masked residue may attend to all: its result is never read, and its softmax has something to normalise.
            here = self.residues.local_shard(mask, -1)[..., rows]
            hidden = here[..., None, :, None] * (1 - mask[..., None, None, :])
            bias = third * upcast_half(self.attention_2d(some)).movedim(-1, -3) - 1e5 * hidden
            return PairRows(some, bias.contiguous())

        third, count = math.sqrt(1 / 3), z.shape[-3]
        # A gradient needs all of it anyway.
        together = torch.is_grad_enabled() or len(self.execution.rows(count)) == 1
        made = [of_rows(slice(0, count))] if together else []
        dtype = z.dtype if normalise is None else self.around_trunk(torch.empty(0, dtype=z.dtype)).dtype
        weight, some = joined(dtype, *self.projections)
        assert some is not None
        linear_bias = nn.functional.pad(some, (0, len(weight) - len(some))) if len(some) < len(weight) else some
        gamma = nn.functional.softplus(upcast_half(self.trainable_point_weights))[:, None]
        of_squares = third * 0.5 * math.sqrt(2 / (9 * self.qk_points)) * gamma
        of_scalars = torch.full_like(gamma, third / math.sqrt(self.c_hidden)).expand(-1, self.c_hidden)
        scale = torch.cat([of_scalars, (2 * of_squares).expand(-1, 3 * self.qk_points), -of_squares], -1)
        part = (mask / mask.sum(-1, keepdim=True).clamp(min=1))[..., None]
        weight, linear_bias = weight.to(dtype), linear_bias.to(dtype)
        return Pairs(lambda rows: made[0] if made else of_rows(rows), together, weight, linear_bias, scale, part)

    def attend(self, s: Tensor, pairs: Pairs, frames: Rigid) -> Tensor:
        """Return the update of s [*, N, c], given frames [*, N] and what all layers have in common."""
        rank, h = self.residues.local_shard, self.heads
        projected = upcast_half(exact_linear(s, pairs.weight, pairs.linear_bias))
        sizes = [3 * h * self.qk_points, 3 * h * (self.qk_points + self.v_points), h * self.c_hidden]
        q_points, kv_points, q, kv = projected.split((*sizes, 2 * h * self.c_hidden), -1)
        k, v = kv.unflatten(-1, (h, -1)).split(self.c_hidden, -1)
        centre = (pairs.part * frames.translation.detach()).sum(-2, keepdim=True)  # no result depends on it
        translation = (frames.translation - centre)[..., None]  # [*, N, 3, 1]
        local = torch.cat([x.unflatten(-1, (3, -1)) for x in (q_points, kv_points)], -1)
        points = multiply(frames.rotation, local) + translation  # [*, N, 3, all points]
        q_points, kv_points = points.split((h * self.qk_points, h * (self.qk_points + self.v_points)), -1)
        q_points, (k_points, v_points) = (
            q_points.unflatten(-1, (h, -1)),
            kv_points.unflatten(-1, (h, -1)).split((self.qk_points, self.v_points), -1),
        )
        squares = k_points.square().sum((-3, -1))[..., None]
        q_features = torch.cat([q.unflatten(-1, (h, -1)), *q_points.unbind(-3), torch.ones_like(squares)], -1)
        k_features = torch.cat([k, *k_points.unbind(-3), squares], -1)  # [*, N, H, features], as q's and v's
        v_features = torch.cat([v, *v_points.unbind(-3)], -1)
        q_features, rotation, translation = rank(q_features, -3), rank(frames.rotation, -3), rank(translation, -3)

        def of_queries(rows: slice) -> Tensor:
            """Return the update of some of this rank's residues."""
            z, bias = pairs.rows(rows)
            a = _softmax(q_features[..., rows, :, :] * pairs.scale, k_features, bias)
            o = exact_matmul(a, v_features.transpose(-3, -2)).transpose(-3, -2)  # [*, I, H, c + 3 P]
            o_pair = a.transpose(-3, -2).to(s.dtype) @ z  # [*, I, H, c_z]
            o, o_points = o.split((self.c_hidden, 3 * self.v_points), -1)
            o_points = o_points.unflatten(-1, (3, -1)).transpose(-3, -2).flatten(-2)  # [*, I, 3, H P]
            o_points = multiply(rotation[..., rows, :, :].mT, o_points - translation[..., rows, :, :])
            o_lengths = torch.sqrt(o_points.square().sum(-2) + 1e-8)
            parts = [o.flatten(-2), o_points.flatten(-2), o_lengths, o_pair.flatten(-2)]
            update: Tensor = self.output_projection(torch.cat([part.to(s.dtype) for part in parts], dim=-1))
            return update

        count = q_features.shape[-3]
        update = of_queries(slice(0, count)) if pairs.together else self.map_rows(of_queries, count, -2)
        return self.residues.all_gather(update, -2, s.shape[-2])


def _softmax(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    """Return the weights [*, H, I, N] of features q [*, I, H, f], k [*, N, H, f] and a bias [*, H, I, N]."""
    q, k = q.transpose(-3, -2), k.transpose(-3, -2).mT
    return torch.softmax(exact_matmul(q, k, bias), -1)


class AngleResnet(nn.Module):
    """Algorithm 20, lines 11 to 14: torsion angles from the current and the initial activations.

        a = input_projection(relu(s)) + input_projection_initial(relu(s_initial))
        for first, second in zip(resblock1, resblock2):
            a = a + second(relu(first(relu(a))))
        unnormalized_angles(relu(a)).unflatten(-1, (7, 2))

    s: [*, N, c]; s_initial: [*, N, c_initial].
    """

    def __init__(self, c: int, c_initial: int, c_hidden: int, blocks: int) -> None:
        super().__init__()
        self.input_projection = Linear(c, c_hidden)
        self.input_projection_initial = Linear(c_initial, c_hidden)
        self.resblock1 = nn.ModuleList(Linear(c_hidden, c_hidden, init="relu") for _ in range(blocks))
        self.resblock2 = nn.ModuleList(Linear(c_hidden, c_hidden, init="final") for _ in range(blocks))
        self.unnormalized_angles = Linear(c_hidden, 14)

    def forward(self, s: Tensor, s_initial: Tensor) -> Tensor:
        """Return (sin, cos) [*, N, 7, 2], not normalised, of s [*, N, c] and s_initial [*, N, c_initial]."""
        a = self.input_projection(s.relu()) + self.input_projection_initial(s_initial.relu())
        for first, second in zip(self.resblock1, self.resblock2):
            a = a + second(first(a.relu()).relu())
        return upcast_half(self.unnormalized_angles(a.relu())).unflatten(-1, (7, 2))


def normalize_angles(unnormalized: Tensor) -> Tensor:
    """Normalise pairs to length one over the last axis; (0, 0) stays, with a finite gradient."""
    return unnormalized * torch.rsqrt(unnormalized.square().sum(-1, keepdim=True).clamp(min=1e-12))
