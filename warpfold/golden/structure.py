"""Reference units of the structure module."""

from collections.abc import Callable

import torch
from torch import Tensor

from warpfold.geometry.atoms import frames_to_atom14, torsions_to_frames
from warpfold.geometry.rigid import Rigid
from warpfold.golden.answer import Answer, load, parameter_gradients, tensors
from warpfold.golden.config import structure_config
from warpfold.golden.read import Case
from warpfold.model.structure import FoldIteration, InvariantPointAttention, StructureModule, normalize_angles


def _invariant_point_attention(case: Case) -> Answer:
    x = tensors(case)
    s, z, mask = x["inputs_1d"], x["inputs_2d"], x["mask"][..., 0]
    c = structure_config(case.config)
    attention = InvariantPointAttention(s.shape[-1], z.shape[-1], c.heads, c.c_hidden, c.qk_points, c.v_points)
    out = load(attention, case)(s, z, Rigid.from_quaternion7(x["affine"]), mask)
    valid = {name: mask > 0 for name in ("out/out", "grad_in/inputs_1d", "grad_in/affine")}
    valid["grad_in/inputs_2d"] = pairs(mask)
    return Answer({"out": out}, x, parameter_gradients(attention, case), valid=valid)


def _fold_iteration(case: Case) -> Answer:
    """One layer.  `affine` has its whole gradient, `new_affine`, handed to the next layer, none through rotations."""
    x = tensors(case)
    s, z, mask = x["act"], x["static_feat_2d"], x["sequence_mask"][..., 0]
    c = structure_config(case.config)
    layer = load(FoldIteration(x["initial_act"].shape[-1], z.shape[-1], c), case)
    s, affine, unnormalized = layer(s, x["initial_act"], z, x["affine"], mask)
    angles = normalize_angles(unnormalized)
    backbone = Rigid.from_quaternion7(affine).scale_translation(c.position_scale)
    frames = torsions_to_frames(x["aatype"], backbone, angles)
    outputs = {
        "act": s,
        "new_act": s,
        "affine": affine,
        "new_affine": torch.cat([affine[..., :4].detach(), affine[..., 4:]], -1),
        "sc/angles_sin_cos": angles,
        "sc/unnormalized_angles_sin_cos": unnormalized,
        "sc/frames": frames.to_flat12(),
        "sc/atom_pos": frames_to_atom14(x["aatype"], frames),
    }
    valid = {f"out/{name}": mask > 0 for name in outputs}
    valid |= {f"grad_in/{name}": mask > 0 for name in ("act", "initial_act", "affine")}
    valid["grad_in/static_feat_2d"] = pairs(mask)
    turned = ("out/affine", "out/new_affine")
    return Answer(outputs, x, parameter_gradients(layer, case), valid=valid, quaternions=turned)


def _structure_module(case: Case) -> Answer:
    x = tensors(case)
    s, z, mask = x["single"], x["pair"], x["seq_mask"]
    module = load(StructureModule(s.shape[-1], z.shape[-1], structure_config(case.config)), case)
    out = module(s, z, x["aatype"], mask)
    whole = {
        "act": out.single,
        "final_atom14_positions": out.final_atom14,
        "final_atom_positions": out.final_atom37,
    }
    layers = {
        "traj": out.traj,
        "frames": out.sidechain_frames.to_flat12(),
        "angles": out.angles,
        "unnormalized_angles": out.unnormalized_angles,
    }
    every = (mask > 0).expand(len(out.traj), *mask.shape)
    valid = {f"out/{name}": mask > 0 for name in whole} | {f"out/{name}": every for name in layers}
    valid |= {"grad_in/single": mask > 0, "grad_in/pair": pairs(mask)}
    gradients = parameter_gradients(module, case)
    return Answer({**whole, **layers}, x, gradients, valid=valid, quaternions=("out/traj",))


def pairs(mask: Tensor) -> Tensor:
    """[N] -> [N, N], where both residues count."""
    return (mask[:, None] * mask[None, :]) > 0


STRUCTURE: dict[str, Callable[[Case], Answer]] = {
    "fold_iteration": _fold_iteration,
    "invariant_point_attention": _invariant_point_attention,
    "structure_module": _structure_module,
}
