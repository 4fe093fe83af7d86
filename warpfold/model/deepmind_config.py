"""The settings that DeepMind's arrays imply: channels, blocks, heads, templates, which of the models they are."""

from collections.abc import Mapping
from typing import Literal

import numpy as np

from warpfold.errors import UserError
from warpfold.model import evoformer, pair, template
from warpfold.model.alphafold import HeadsConfig, ModelConfig
from warpfold.model.deepmind import PREFIX
from warpfold.model.embed import MultimerConfig
from warpfold.model.structure import StructureConfig

Shapes = Mapping[str, tuple[int, ...]]
_Pair = tuple[int, int, pair.PairConfig]
MONOMER_POSITIONS = "evoformer/pair_activiations//weights"  # sic
MULTIMER_POSITIONS = "evoformer/~_relative_encoding/position_activations//weights"
OUTGOING = "triangle_multiplication_outgoing/"
FUSED = f"evoformer/evoformer_iteration/{OUTGOING}projection//weights"  # Multimer's version 3
ONE_TEMPLATE = "evoformer/template_embedding/single_template_embedding/"


def config_from_deepmind(params: Mapping[str, np.ndarray], source: str = "params") -> ModelConfig:
    """Return the settings that DeepMind's arrays imply.

    A multimer is known by the array of its relative positions, and its version 3 by fused triangle projections.
    Versions 1 and 2 have the same arrays, and differ in how they were trained alone (version 1 without the loss on the
    distances of chains' centres): they get the same settings.
    What no array shows keeps the published value: layers of the structure module, units, how far copies are told apart,
    and recycles: 3, of a multimer's version 3 at most 20 with a tolerance of 0.5 A.
    Errors: UserError for arrays of another model, or too few of them to tell.
    """
    p = {name.removeprefix(PREFIX): np.shape(array) for name, array in params.items()}
    block = "evoformer/evoformer_iteration/"
    is_multimer = MULTIMER_POSITIONS in p
    try:
        blocks, c_z, pair_config = _pair(p, block, "multiplication_first")
        _, c_m, row_heads = _attention_shape(p, block + "msa_row_attention_with_pair_bias/attention")
        trunk = evoformer.EvoformerConfig(
            blocks=blocks,
            heads=row_heads[0],
            transition=p[block + "msa_transition/transition1//weights"][2] // c_m,
            c_outer=p[block + "outer_product_mean/left_projection//weights"][2],
            outer="first" if is_multimer else "middle",
            pair=pair_config,
        )
        early_stop = is_multimer and pair_config.fused
        return ModelConfig(
            c_m=c_m,
            c_z=c_z,
            c_s=p["evoformer/single_activations//weights"][1],
            c_e=p["evoformer/extra_msa_activations//weights"][1],
            max_relative=_max_relative(p),
            recycles=20 if early_stop else 3,
            recycle_tolerance=0.5 if early_stop else None,
            evoformer=trunk,
            extra_blocks=p["evoformer/extra_msa_stack/msa_transition/transition1//weights"][0],
            templates=_multimer_templates(p) if is_multimer else _templates(p),
            structure=_structure(p),
            heads=_heads(p),
            multimer=MultimerConfig() if is_multimer else None,
        )
    except (KeyError, IndexError, ValueError) as error:
        raise UserError(
            f"{source}: not the parameters of AlphaFold2 or AlphaFold-Multimer; no usable array {error}"
        ) from error


def _max_relative(p: Shapes) -> int:
    if MULTIMER_POSITIONS not in p:
        return (p[MONOMER_POSITIONS][0] - 1) // 2
    chains = 1 + 2 * MultimerConfig().max_chain + 2  # one bin says whether the entity is the same
    return (p[MULTIMER_POSITIONS][0] - chains - 2) // 2


def _pair(p: Shapes, block: str, order: Literal["multiplication_first", "attention_first"]) -> _Pair:
    """Return the number of blocks, the channels and the settings of a pair stack."""
    blocks, c, (h, width) = _attention_shape(p, block + "triangle_attention_starting_node/attention")
    fused = block + OUTGOING + "projection//weights" in p
    config = pair.PairConfig(
        heads=h,
        head_width=width,
        c_triangle=p[block + OUTGOING + ("center_norm" if fused else "center_layer_norm") + "//scale"][1],
        transition=p[block + "pair_transition/transition1//weights"][2] // c,
        fused=fused,
        order=order,
    )
    return blocks, c, config


def _attention_shape(p: Shapes, scope: str) -> tuple[int, int, tuple[int, int]]:
    """Return blocks, channels, (heads, width of a head) of a stacked attention."""
    blocks, c, h, width = p[f"{scope}//query_w"]
    return blocks, c, (h, width)


def _templates(p: Shapes) -> template.TemplateConfig:
    if ONE_TEMPLATE + "embedding2d//weights" not in p:
        return template.TemplateConfig(enabled=False)
    stack = ONE_TEMPLATE + "template_pair_stack/__layer_stack_no_state/"
    blocks, c, config = _pair(p, stack, "attention_first")
    _, heads, width = p["evoformer/template_embedding/attention//query_w"]
    return template.TemplateConfig(
        c=c, blocks=blocks, heads=heads, attention_width=width, torsion_rows=_torsion_rows(p), pair=config
    )


def _multimer_templates(p: Shapes) -> template.TemplateConfig:
    if ONE_TEMPLATE + "template_pair_embedding_0//weights" not in p:
        return template.TemplateConfig(enabled=False)
    blocks, c, config = _pair(p, ONE_TEMPLATE + "template_embedding_iteration/", "multiplication_first")
    return template.TemplateConfig(c=c, blocks=blocks, torsion_rows=_torsion_rows(p), unit_vectors=True, pair=config)


def _torsion_rows(p: Shapes) -> bool:
    return "evoformer/template_single_embedding//weights" in p


def _structure(p: Shapes) -> StructureConfig:
    fold = "structure_module/fold_iteration/"
    ipa, side = fold + "invariant_point_attention/", fold + "rigid_sidechain/"
    (heads,) = p[ipa + "/trainable_point_weights"]
    if ipa + "q_scalar//bias" in p:
        qk_points = p[ipa + "q_point_local//bias"][0] // (3 * heads)
        v_points = p[ipa + "kv_point_local//bias"][0] // (3 * heads) - qk_points
        c, c_hidden = p[ipa + "q_scalar//weights"][0], p[ipa + "q_scalar//bias"][0] // heads
    else:
        qk_points, v_points = (p[ipa + f"{x}_point_projection/point_projection//bias"][1] // 3 for x in "qv")
        c, _, c_hidden = p[ipa + "q_scalar_projection//weights"]
    published = StructureConfig()
    return StructureConfig(
        c=c,
        heads=heads,
        c_hidden=c_hidden,
        qk_points=qk_points,
        v_points=v_points,
        scalar_bias=ipa + "q_scalar//bias" in p,
        position_scale=20.0 if MULTIMER_POSITIONS in p else published.position_scale,
        transition_layers=sum(f"{fold}transition{n}//bias" in p for n in ("", *(f"_{i}" for i in range(1, 9)))),
        sidechain_c=p[side + "input_projection//bias"][0],
        sidechain_blocks=sum(f"{side}resblock1{n}//bias" in p for n in ("", *(f"_{i}" for i in range(1, 9)))),
    )


def _heads(p: Shapes) -> HeadsConfig:
    pae = "predicted_aligned_error_head/logits//weights"
    return HeadsConfig(
        distogram_bins=p["distogram_head/half_logits//weights"][1],
        msa_classes=p["masked_msa_head/logits//weights"][1],
        plddt_c=p["predicted_lddt_head/act_0//weights"][1],
        plddt_bins=p["predicted_lddt_head/logits//weights"][1],
        pae=pae in p,
        pae_bins=p.get(pae, (0, 64))[1],
    )
