"""Reference units of the trunk: layers of the MSA and pair stacks, blocks, templates."""

from collections.abc import Callable

import torch
from torch import Tensor

from warpfold.golden.answer import Answer, load, parameter_gradients, tensors
from warpfold.golden.config import evoformer_config, head_width, template_config, template_stack_config
from warpfold.golden.read import Case
from warpfold.model.attention import Transition
from warpfold.model.axial import AxialUpdate
from warpfold.model.evoformer import EvoformerBlock
from warpfold.model.msa import MSAColumnAttention, MSAColumnGlobalAttention, MSARowAttention, OuterProductMean
from warpfold.model.pair import TriangleAttention, TriangleMultiplication
from warpfold.model.template import TemplateEmbedder, TemplatePairStack, TemplatePointwiseAttention, TemplateRows

Make = Callable[[Case, dict[str, Tensor]], AxialUpdate]


def _layer(make: Make, x: str, mask: str, source: str | None = None) -> Callable[[Case], Answer]:
    """A layer whose reference is its residual update: inputs named `x`, `mask` and perhaps `source`."""

    def answer(case: Case) -> Answer:
        """This layer's answer."""
        inputs = tensors(case)
        layer = load(make(case, inputs), case)
        out = layer.delta(inputs[x], inputs[mask], inputs[source] if source else None)
        valid = {"out/out": inputs[mask] > 0, f"grad_in/{x}": inputs[mask] > 0}
        return Answer({"out": out}, inputs, parameter_gradients(layer, case), valid=valid)

    return answer


def _row_attention(case: Case, inputs: dict[str, Tensor]) -> AxialUpdate:
    return MSARowAttention(inputs["msa_act"].shape[-1], inputs["pair_act"].shape[-1], case.config["num_head"])


def _column_attention(case: Case, inputs: dict[str, Tensor]) -> AxialUpdate:
    return MSAColumnAttention(inputs["msa_act"].shape[-1], case.config["num_head"])


def _global_column_attention(case: Case, inputs: dict[str, Tensor]) -> AxialUpdate:
    return MSAColumnGlobalAttention(inputs["msa_act"].shape[-1], case.config["num_head"])


def _transition(x: str) -> Make:
    return lambda case, inputs: Transition(inputs[x].shape[-1], case.config["num_intermediate_factor"])


def _triangle_multiplication(case: Case, inputs: dict[str, Tensor]) -> AxialUpdate:
    config = case.config
    return TriangleMultiplication(
        inputs["pair_act"].shape[-1],
        config["num_intermediate_channel"],
        outgoing=config["equation"] == "ikc,jkc->ijc",
        fused=config["fuse_projection_weights"],
    )


def _triangle_attention(case: Case, inputs: dict[str, Tensor]) -> AxialUpdate:
    starting = case.config["orientation"] == "per_row"
    return TriangleAttention(inputs["pair_act"].shape[-1], starting, case.config["num_head"], head_width(case.config))


def _outer_product_mean(case: Case) -> Answer:
    inputs = tensors(case)
    m, mask = inputs["msa_act"], inputs["msa_mask"]
    out = case.expected["out/out"]
    layer = load(OuterProductMean(m.shape[-1], out.shape[-1], case.config["num_outer_channel"]), case)
    update = layer.delta(torch.zeros(out.shape), mask, m)
    together = torch.einsum("si,sj->ij", mask, mask) > 0  # pairs of columns that a sequence has both of
    valid = {"out/out": together, "grad_in/msa_act": mask > 0}
    return Answer({"out": update}, inputs, parameter_gradients(layer, case), valid=valid)


def _block(global_column: bool) -> Callable[[Case], Answer]:
    def answer(case: Case) -> Answer:
        """This layer's answer."""
        inputs = tensors(case)
        m, z, m_mask, z_mask = (inputs[name] for name in ("msa", "pair", "msa_mask", "pair_mask"))
        config = evoformer_config(case.config)
        block = load(EvoformerBlock(m.shape[-1], z.shape[-1], config, global_column), case)
        m, z = block(m, z, m_mask, z_mask)
        valid = {f"{group}/msa": m_mask > 0 for group in ("out", "grad_in")}
        valid |= {f"{group}/pair": z_mask > 0 for group in ("out", "grad_in")}
        return Answer({"msa": m, "pair": z}, inputs, parameter_gradients(block, case), valid=valid)

    return answer


def _template_pair_stack(case: Case) -> Answer:
    inputs = tensors(case)
    t, mask = inputs["pair_act"], inputs["pair_mask"]
    config = template_stack_config(case.config)
    stack = load(TemplatePairStack(config), case)
    valid = {"out/out": mask > 0, "grad_in/pair_act": mask > 0}
    return Answer({"out": stack(t, mask)}, inputs, parameter_gradients(stack, case), valid=valid)


def _template_pointwise_attention(case: Case) -> Answer:
    """The reference is the bare attention: q [pairs, 1, c_z], m [pairs, T, c_t], mask [1, 1, 1, T]."""
    inputs = tensors(case)
    q, t, mask = inputs["q"], inputs["m"], inputs["mask"]
    heads, width = case.config["num_head"], case.config["key_dim"] // case.config["num_head"]
    layer = load(TemplatePointwiseAttention(q.shape[-1], t.shape[-1], heads, width), case)
    out = layer(q, t.movedim(-2, 0)[..., None, :], mask.flatten())  # [pairs, 1, c_z] as a pair representation
    return Answer({"out": out}, inputs, parameter_gradients(layer, case))


def _template_embedding(case: Case) -> Answer:
    inputs = tensors(case)
    z, mask = inputs["query_embedding"], inputs["mask_2d"]
    config = template_config(case.config | {"embed_torsion_angles": False})
    embedder = load(TemplateEmbedder(1, z.shape[-1], config), case, scope="")
    valid = {"out/out": mask > 0, "grad_in/query_embedding": mask > 0}
    out = embedder(z, mask, inputs)
    return Answer({"out": out}, inputs, parameter_gradients(embedder, case, scope=""), valid=valid)


def _template_angle_features(case: Case) -> Answer:
    features, row_mask = TemplateRows.features(tensors(case))
    defined = features[..., -7:].repeat_interleave(2, -1) > 0  # sin and cos of each of the seven torsions
    always = torch.ones_like(features[..., :22]) > 0
    valid = torch.cat((always, defined, defined, always[..., :7]), -1)
    outputs = {"template_features": features, "template_features_masked": features, "msa_row_mask": row_mask}
    return Answer(outputs, valid={"out/template_features": valid})


TRUNK: dict[str, Callable[[Case], Answer]] = {
    "msa_row_attention_with_pair_bias": _layer(_row_attention, "msa_act", "msa_mask", "pair_act"),
    "msa_column_attention": _layer(_column_attention, "msa_act", "msa_mask"),
    "msa_column_global_attention": _layer(_global_column_attention, "msa_act", "msa_mask"),
    "msa_transition": _layer(_transition("msa_act"), "msa_act", "msa_mask"),
    "outer_product_mean": _outer_product_mean,
    "pair_transition": _layer(_transition("pair_act"), "pair_act", "pair_mask"),
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
}
