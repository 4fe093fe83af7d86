"""The structure module: from the trunk's s and z to frames, torsion angles and atoms (Supp. 1.8).

Everything here computes in fp32 at least, whatever arrives.  Inside, translations are in units of `position_scale`
(10, in AlphaFold-Multimer 20) angstrom; what leaves is in angstrom.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from warpfold.geometry.atoms import atom14_to_atom37, frames_to_atom14, torsions_to_frames
from warpfold.geometry.rigid import Rigid, update_affine
from warpfold.model.execution import Executable
from warpfold.model.layers import DrawsNoise, LayerNorm, Linear
from warpfold.ops.noise import dropout
from warpfold.ops.tensors import upcast_half


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


class StructureModule(nn.Module):
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
        s_initial = self.single_layer_norm(upcast_half(s))
        z = self.pair_layer_norm(upcast_half(z))
        mask = seq_mask.to(s_initial.dtype)
        s = self.initial_projection(s_initial)
        affine = torch.cat([s.new_ones(*s.shape[:-1], 1), s.new_zeros(*s.shape[:-1], 6)], dim=-1)
        affines, angles = [], []
        for layer in range(self.config.layers):
            s, affine, unnormalized = self.fold_iteration(s, s_initial, z, affine, mask, layer)
            affines.append(affine)
            angles.append(unnormalized)
            affine = torch.cat([affine[..., :4].detach(), affine[..., 4:]], dim=-1)
        return self._atoms(s, torch.stack(affines), torch.stack(angles), aatype)

    def _atoms(self, s: Tensor, affines: Tensor, unnormalized: Tensor, aatype: Tensor) -> StructureOutput:
        """Compute lines 11, 14 and 24 for all layers at once: torsions, frames of the rigid groups, atoms."""
        traj = torch.cat([affines[..., :4], affines[..., 4:] * self.config.position_scale], dim=-1)
        frames = Rigid.from_quaternion7(traj)
        angles = normalize_angles(unnormalized)
        every = aatype.expand(len(traj), *aatype.shape)
        sidechain_frames = torsions_to_frames(every, frames, angles)
        atom14 = frames_to_atom14(every, sidechain_frames)
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
        stream = self.stream + 2 * layer  # two streams for every layer
        s = s + self.invariant_point_attention(s, z, Rigid.from_quaternion7(affine), mask)
        s = self.attention_layer_norm(dropout(s, self.rate, self.noise, stream, self.training))
        s = s + self._transition(s)
        s = self.transition_layer_norm(dropout(s, self.rate, self.noise, stream + 1, self.training))
        affine = update_affine(affine, self.affine_update(s))
        return s, affine, self.rigid_sidechain(s, s_initial)

    def _transition(self, s: Tensor) -> Tensor:
        *inner, last = self.transition
        for linear in inner:
            s = linear(s).relu()
        return last(s)


class InvariantPointAttention(Executable):
    """Algorithm 22, InvariantPointAttention: attention by likeness, by pair and by distance in space.

    The result is the same under any rigid motion of all frames together.
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
        k, v = self._heads(self.kv_scalar(s)).split(self.c_hidden, dim=-1)
        kv_points = frames[..., None, None].apply(self._points(self.kv_point_local(s)))
        k_points, v_points = kv_points.split([self.qk_points, self.v_points], dim=-2)
        local_shard = self.residues.local_shard
        at = Rigid(local_shard(frames.rotation, -3), local_shard(frames.translation, -2))[..., None, None]
        a = self._attention(local_shard(s, -2), k, k_points, z, at, mask)

        o = torch.einsum("...hij,...jhc->...ihc", a, v)
        o_points = at.invert_apply(torch.einsum("...hij,...jhpx->...ihpx", a, v_points))
        o_lengths = torch.sqrt(o_points.square().sum(-1) + 1e-8)
        o_pair = torch.einsum("...hij,...ijc->...ihc", a, z)
        parts = [o, *o_points.unbind(-1), o_lengths, o_pair]
        update = self.output_projection(torch.cat([part.flatten(-2) for part in parts], dim=-1))
        return self.residues.all_gather(update, -2, s.shape[-2])

    def _attention(self, s: Tensor, k: Tensor, k_points: Tensor, z: Tensor, at: Rigid, mask: Tensor) -> Tensor:
        """Return the weights [*, H, I, N] of I queries (lines 1 to 7); k [*, N, H, c], k_points [*, N, H, P, 3]."""
        q = self._heads(self.q_scalar(s))
        scalar = torch.einsum("...ihc,...jhc->...hij", q, k) / math.sqrt(self.c_hidden)
        pair = self.attention_2d(z).movedim(-1, -3)
        q_points = at.apply(self._points(self.q_point_local(s)))
        # The squared distances summed over points are those of one vector of all the points.  Not by a product of
        # matrices: |q|^2 + |k|^2 - 2 q k cancels when the protein is large.
        q_flat, k_flat = (x.flatten(-2).transpose(-3, -2) for x in (q_points, k_points))
        distance = torch.cdist(q_flat, k_flat, compute_mode="donot_use_mm_for_euclid_dist")
        gamma = nn.functional.softplus(self.trainable_point_weights.to(s.dtype))[:, None, None]
        points = gamma * distance.square() * (0.5 * math.sqrt(2 / (9 * self.qk_points)))
        # A masked residue may attend to all: its result is never read, and its softmax has something to normalise.
        hidden = self.residues.local_shard(mask, -1)[..., None, :, None] * (1 - mask[..., None, None, :])
        return torch.softmax(math.sqrt(1 / 3) * (scalar + pair - points) - 1e5 * hidden, dim=-1)

    def _heads(self, x: Tensor) -> Tensor:
        """Split [*, N, H c] into heads: [*, N, H, c]."""
        return x.unflatten(-1, (self.heads, -1))

    def _points(self, x: Tensor) -> Tensor:
        """Split [*, N, 3 H P] into the points of each head: [*, N, H, P, 3]."""
        return x.unflatten(-1, (3, self.heads, -1)).movedim(-3, -1)


class AngleResnet(nn.Module):
    """Algorithm 20, lines 11 to 14: torsion angles from the current and the initial activations."""

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
        return self.unnormalized_angles(a.relu()).unflatten(-1, (7, 2))


def normalize_angles(unnormalized: Tensor) -> Tensor:
    """Normalise pairs to length one over the last axis; (0, 0) stays, with a finite gradient."""
    return unnormalized * torch.rsqrt(unnormalized.square().sum(-1, keepdim=True).clamp(min=1e-12))
