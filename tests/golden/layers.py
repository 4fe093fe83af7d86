"""Reference units: layers of the MSA and pair stacks, blocks, templates, and the structure module."""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.golden.config import (
    Official,
    evoformer_config,
    head_width,
    structure_config,
    template_config,
    template_stack_config,
)
from tests.golden.multimer import (
    matrices,
    msa_processing,
    relative_positions,
    rigid_of,
    template_mean,
    template_rows,
)
from tests.golden.reference import CaseOutputs, Compute, ReferenceCase, Tensors, load
from warpfold.geometry.atoms import frames_to_atom14, torsions_to_frames
from warpfold.geometry.rigid import Rigid
from warpfold.model.axial import AxialUpdate
from warpfold.model.evoformer import (
    EvoformerBlock,
    MSAColumnAttention,
    MSAColumnGlobalAttention,
    MSARowAttention,
    OuterProductMean,
    Transition,
    TriangleAttention,
    TriangleMultiplication,
)
from warpfold.model.structure import FoldIteration, InvariantPointAttention, StructureModule, normalize_angles
from warpfold.model.template import TemplateEmbedder, TemplatePairStack, TemplatePointwiseAttention, TemplateRows

# Trunk

# Creates a layer from the official configuration and the channels of the tensors that it reads.
Make = Callable[..., AxialUpdate]


def _layer(make: Make, name: str, mask: str, source: str | None = None) -> Compute:
    """Return a function that computes the update of the input `name` by a layer that also reads `source`."""

    def compute(case: ReferenceCase, x: Tensors) -> CaseOutputs:
        channels = [x[each].shape[-1] for each in (name, source) if each]
        layer = load(make(case.config, *channels), case)
        out = layer(x[name], x[mask], x[source] if source else None, residual=False)
        valid = {"out/out": x[mask] > 0, f"grad_in/{name}": x[mask] > 0}
        return CaseOutputs({"out": out}, layer, valid=valid)

    return compute


def _transition(config: Official, c: int) -> AxialUpdate:
    return Transition(c, config["num_intermediate_factor"])


def _triangle_multiplication(config: Official, c_z: int) -> AxialUpdate:
    outgoing, fused = config["equation"] == "ikc,jkc->ijc", config["fuse_projection_weights"]
    return TriangleMultiplication(c_z, config["num_intermediate_channel"], outgoing=outgoing, fused=fused)


def _triangle_attention(config: Official, c_z: int) -> AxialUpdate:
    return TriangleAttention(c_z, config["orientation"] == "per_row", config["num_head"], head_width(config))


def _outer_product_mean(case: ReferenceCase, x: Tensors) -> CaseOutputs:
    m, mask = x["msa_act"], x["msa_mask"]
    shape = case.expected["out/out"].shape
    layer = load(OuterProductMean(m.shape[-1], shape[-1], case.config["num_outer_channel"]), case)
    update = layer(torch.zeros(shape), mask, m, residual=False)
    # Pairs of columns that at least one sequence has both of.
    together = torch.einsum("si,sj->ij", mask, mask) > 0
    valid = {"out/out": together, "grad_in/msa_act": mask > 0}
    return CaseOutputs({"out": update}, layer, valid=valid)


def _block(global_column: bool) -> Compute:
    def compute(case: ReferenceCase, x: Tensors) -> CaseOutputs:
        m, z, m_mask, z_mask = (x[name] for name in ("msa", "pair", "msa_mask", "pair_mask"))
        block = load(EvoformerBlock(m.shape[-1], z.shape[-1], evoformer_config(case.config), global_column), case)
        m, z = block(m, z, m_mask, z_mask)
        masks = {"msa": m_mask > 0, "pair": z_mask > 0}
        valid = {f"{group}/{name}": mask for group in ("out", "grad_in") for name, mask in masks.items()}
        return CaseOutputs({"msa": m, "pair": z}, block, valid=valid)

    return compute


def _template_pair_stack(case: ReferenceCase, x: Tensors) -> CaseOutputs:
    t, mask, scope = x["pair_act"], x["pair_mask"], "template_pair_stack/__layer_stack_no_state"
    stack = load(TemplatePairStack(template_stack_config(case.config)), case, scope)
    valid = {"out/out": mask > 0, "grad_in/pair_act": mask > 0}
    return CaseOutputs({"out": stack(t, mask)}, stack, scope, valid=valid)


def _template_pointwise_attention(case: ReferenceCase, x: Tensors) -> CaseOutputs:
    """Compute the bare attention of the reference: q [pairs, 1, c_z], m [pairs, T, c_t], mask [1, 1, 1, T]."""
    q, t, mask = x["q"], x["m"], x["mask"]
    heads, width = case.config["num_head"], case.config["key_dim"] // case.config["num_head"]
    layer = load(TemplatePointwiseAttention(q.shape[-1], t.shape[-1], heads, width), case)
    out = layer(q, t.movedim(-2, 0)[..., None, :], mask.flatten())  # [pairs, 1, c_z] as a pair representation
    return CaseOutputs({"out": out}, layer)


def _template_embedding(case: ReferenceCase, x: Tensors) -> CaseOutputs:
    z, mask = x["query_embedding"], x["mask_2d"]
    config = template_config(case.config | {"embed_torsion_angles": False})
    embedder = load(TemplateEmbedder(1, z.shape[-1], config), case, scope="")
    valid = {"out/out": mask > 0, "grad_in/query_embedding": mask > 0}
    return CaseOutputs({"out": embedder(z, mask, x) - z}, embedder, scope="", valid=valid)


def _template_angle_features(case: ReferenceCase, x: Tensors) -> CaseOutputs:
    features, row_mask = TemplateRows.features(x)
    defined = features[..., -7:].repeat_interleave(2, -1) > 0  # sin and cos of each of the seven torsions
    always = torch.ones_like(features[..., :22]) > 0
    valid = torch.cat((always, defined, defined, always[..., :7]), -1)
    outputs = {"template_features": features, "template_features_masked": features, "msa_row_mask": row_mask}
    return CaseOutputs(outputs, valid={"out/template_features": valid})


# Structure module


def pairs(mask: Tensor) -> Tensor:
    """Return the mask of pairs in which both residues count: [N] -> [N, N]."""
    return (mask[:, None] * mask[None, :]) > 0


def _invariant_point_attention(case: ReferenceCase, x: Tensors) -> CaseOutputs:
    s, z, mask = x["inputs_1d"], x["inputs_2d"], x["mask"][..., 0]
    c = structure_config(case.config)
    attention = InvariantPointAttention(
        s.shape[-1], z.shape[-1], c.heads, c.c_hidden, c.qk_points, c.v_points, c.scalar_bias
    )
    frames = rigid_of(x["rigid"]) if "rigid" in x else Rigid.from_quaternion7(x["affine"])
    out = load(attention, case)(s, z, frames, mask)
    valid = {name: mask > 0 for name in ("out/out", "grad_in/inputs_1d", "grad_in/affine", "grad_in/rigid")}
    valid["grad_in/inputs_2d"] = pairs(mask)
    return CaseOutputs({"out": out}, attention, valid=valid)


def _fold_iteration(case: ReferenceCase, x: Tensors) -> CaseOutputs:
    """Compute one layer. `new_affine`, the input of the next layer, has no gradient through rotations; `affine` has.

    Multimer's cases have frames as matrices instead of quaternions.
    """
    s, z, mask = x["act"], x["static_feat_2d"], x["sequence_mask"][..., 0]
    c = structure_config(case.config)
    layer = load(FoldIteration(x["initial_act"].shape[-1], z.shape[-1], c), case)
    before = rigid_of(x["rigid"]).to_quaternion7() if "rigid" in x else x["affine"]
    s, affine, unnormalized = layer(s, x["initial_act"], z, before, mask)
    new_affine = torch.cat([affine[..., :4].detach(), affine[..., 4:]], -1)
    angles = normalize_angles(unnormalized)
    at = Rigid.from_quaternion7(affine)
    backbone = Rigid(at.rotation, at.translation * c.position_scale)
    frames = torsions_to_frames(x["aatype"], backbone, angles)
    outputs = {
        "act": s,
        "new_act": s,
        "affine": affine,
        "new_affine": new_affine,
        "rigid": matrices(Rigid.from_quaternion7(affine)),
        "new_rigid": matrices(Rigid.from_quaternion7(new_affine)),
        "sc/angles_sin_cos": angles,
        "sc/unnormalized_angles_sin_cos": unnormalized,
        "sc/frames": matrices(frames) if "rigid" in x else frames.to_flat12(),
        "sc/atom_pos": frames_to_atom14(x["aatype"], frames),
    }
    names = [f"out/{name}" for name in outputs]
    names += [f"grad_in/{name}" for name in ("act", "initial_act", "affine", "rigid")]
    return CaseOutputs(
        outputs,
        layer,
        valid=dict.fromkeys(names, mask > 0) | {"grad_in/static_feat_2d": pairs(mask)},
        quaternions=("out/affine", "out/new_affine"),
        rotations=("rigid",),
    )


def _structure_module(case: ReferenceCase, x: Tensors) -> CaseOutputs:
    s, z, mask = x["single"], x["pair"], x["seq_mask"]
    module = load(StructureModule(s.shape[-1], z.shape[-1], structure_config(case.config)), case)
    out = module(s, z, x["aatype"], mask)
    last = {
        "act": out.single,
        "final_atom14_positions": out.final_atom14,
        "final_atom_positions": out.final_atom37,
    }
    every = {
        "traj": out.traj,
        "frames": out.sidechain_frames.to_flat12(),
        "angles": out.angles,
        "unnormalized_angles": out.unnormalized_angles,
    }
    layers = (mask > 0).expand(len(out.traj), *mask.shape)
    valid = {f"out/{name}": mask > 0 for name in last} | {f"out/{name}": layers for name in every}
    valid |= {"grad_in/single": mask > 0, "grad_in/pair": pairs(mask)}
    return CaseOutputs({**last, **every}, module, valid=valid, quaternions=("out/traj",))


UNITS: dict[str, Compute] = {
    "msa_row_attention_with_pair_bias": _layer(
        lambda config, c_m, c_z: MSARowAttention(c_m, c_z, config["num_head"]), "msa_act", "msa_mask", "pair_act"
    ),
    "msa_column_attention": _layer(
        lambda config, c_m: MSAColumnAttention(c_m, config["num_head"]), "msa_act", "msa_mask"
    ),
    "msa_column_global_attention": _layer(
        lambda config, c_m: MSAColumnGlobalAttention(c_m, config["num_head"]), "msa_act", "msa_mask"
    ),
    "msa_transition": _layer(_transition, "msa_act", "msa_mask"),
    "outer_product_mean": _outer_product_mean,
    "pair_transition": _layer(_transition, "pair_act", "pair_mask"),
    "triangle_multiplication_outgoing": _layer(_triangle_multiplication, "pair_act", "pair_mask"),
    "triangle_multiplication_incoming": _layer(_triangle_multiplication, "pair_act", "pair_mask"),
    "triangle_attention_starting_node": _layer(_triangle_attention, "pair_act", "pair_mask"),
    "triangle_attention_ending_node": _layer(_triangle_attention, "pair_act", "pair_mask"),
    "evoformer_iteration": _block(global_column=False),
    "extra_msa_iteration": _block(global_column=True),
    "template_pair_stack": _template_pair_stack,
    "template_pointwise_attention": _template_pointwise_attention,
    "template_embedding": _template_embedding,
    "template_angle_features": _template_angle_features,
    "fold_iteration": _fold_iteration,
    "invariant_point_attention": _invariant_point_attention,
    "structure_module": _structure_module,
    "msa_processing_multimer": msa_processing,
    "relpos_multimer": relative_positions,
    "template_embedding_multimer": template_mean,
    "template_embedding_1d_multimer": template_rows,
}
