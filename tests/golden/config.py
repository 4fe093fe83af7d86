"""Translate the official configuration of a module or model into WarpFold's settings.

Only settings that affect results are translated. Settings that WarpFold fixes, because they are the same in every
published model, must have the fixed value. Other values raise UserError, missing keys KeyError.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from warpfold.batch import Arrays
from warpfold.errors import UserError
from warpfold.model.alphafold import ModelConfig
from warpfold.model.embed import RecyclingEmbedder
from warpfold.model.evoformer import EvoformerConfig, PairConfig
from warpfold.model.losses import LossConfig
from warpfold.model.structure import StructureConfig
from warpfold.model.template import DISTANCE_BINS, TemplateConfig
from warpfold.model.weights.deepmind import config_from_deepmind

Official = dict[str, Any]
POSITION_SCALE = 10.0  # angstrom to the unit of the structure module, in the monomer

# The settings that WarpFold fixes in whole models, by their paths in the official configuration.
FIXED: dict[str, Any] = {
    "embeddings_and_evoformer.recycle_features": True,
    "embeddings_and_evoformer.recycle_pos": True,
    "embeddings_and_evoformer.prev_pos.min_bin": RecyclingEmbedder.min_bin,
    "embeddings_and_evoformer.prev_pos.max_bin": RecyclingEmbedder.max_bin,
    "embeddings_and_evoformer.prev_pos.num_bins": RecyclingEmbedder.bins,
    "heads.distogram.first_break": 2.3125,
    "heads.distogram.last_break": 21.6875,
}
FIXED_MONOMER: dict[str, Any] = {
    "heads.structure_module.fape.clamp_type": "relu",
    "heads.structure_module.fape.loss_unit_distance": 10.0,
    "heads.structure_module.sidechain.length_scale": 10.0,
}
FIXED_MULTIMER: dict[str, Any] = {"embeddings_and_evoformer.use_chain_relative": True}


def require(official: Official, fixed: Mapping[str, Any]) -> None:
    """Raise UserError unless the configuration has these values, by path."""
    for path, value in fixed.items():
        found: Any = official
        for key in path.split("."):
            found = found[key]
        if found != value:
            raise UserError(f"the case's config has {path} = {found!r}, WarpFold only {value!r}")


def pair_config(official: Official, template: bool = False) -> PairConfig:
    """Translate `evoformer` or `template_pair_stack`, whose blocks hold the triangle layers."""
    attention = official["triangle_attention_starting_node"]
    product = official["triangle_multiplication_outgoing"]
    return PairConfig(
        heads=attention["num_head"],
        head_width=head_width(attention),
        c_triangle=product["num_intermediate_channel"],
        transition=official["pair_transition"]["num_intermediate_factor"],
        rate=attention["dropout_rate"],
        fused=product.get("fuse_projection_weights", False),
        order="attention_first" if template else "multiplication_first",
    )


def head_width(attention: Official) -> int | None:
    """Return the channels of a head, or None for the input's channels divided by the heads."""
    return attention["key_dim"] // attention["num_head"] if "key_dim" in attention else None


def evoformer_config(official: Official, blocks: int = 1) -> EvoformerConfig:
    """Translate `evoformer`, which also describes the extra MSA stack."""
    row, column = official["msa_row_attention_with_pair_bias"], official["msa_column_attention"]
    if row["num_head"] != column["num_head"]:
        raise UserError(
            f"{row['num_head']} heads along rows and {column['num_head']} along columns: WarpFold has one number"
        )
    outer = official["outer_product_mean"]
    return EvoformerConfig(
        blocks=blocks,
        heads=row["num_head"],
        transition=official["msa_transition"]["num_intermediate_factor"],
        rate=row["dropout_rate"],
        c_outer=outer["num_outer_channel"],
        outer="first" if outer.get("first") else "middle",
        pair=pair_config(official),
    )


def template_config(official: Official) -> TemplateConfig:
    """Translate `embeddings_and_evoformer.template`, which is Multimer's if it has `num_channels`."""
    attention = official["attention"]
    bins = {"min_bin": 3.25, "max_bin": 50.75, "num_bins": DISTANCE_BINS}
    require(official, {"dgram_features": bins, "attention.gating": False})
    if "num_channels" in official:
        stack = official["template_pair_stack"]
        return TemplateConfig(
            enabled=official["enabled"],
            c=official["num_channels"],
            blocks=stack["num_block"],
            unit_vectors=True,
            pair=pair_config(stack),
        )
    return replace(
        template_stack_config(official["template_pair_stack"]),
        enabled=official["enabled"],
        heads=attention["num_head"],
        attention_width=attention["key_dim"] // attention["num_head"],
        torsion_rows=official["embed_torsion_angles"],
        unit_vectors=official["use_template_unit_vector"],
    )


def template_stack_config(official: Official) -> TemplateConfig:
    """Translate `template_pair_stack`. Settings outside the stack keep their defaults."""
    return TemplateConfig(
        c=official["triangle_attention_ending_node"]["value_dim"],
        blocks=official["num_block"],
        pair=pair_config(official, template=True),
    )


def structure_config(official: Official) -> StructureConfig:
    """Translate `heads.structure_module`."""
    require(official, {"num_scalar_v": official["num_scalar_qk"]})
    return StructureConfig(
        layers=official["num_layer"],
        c=official["num_channel"],
        heads=official["num_head"],
        c_hidden=official["num_scalar_qk"],
        qk_points=official["num_point_qk"],
        v_points=official["num_point_v"],
        scalar_bias="interface_fape" not in official,  # only in Multimer's
        transition_layers=official["num_layer_in_transition"],
        position_scale=official["position_scale"],
        sidechain_c=official["sidechain"]["num_channel"],
        sidechain_blocks=official["sidechain"]["num_residual_block"],
        dropout=official["dropout"],
    )


def model_config(official: Official, params: Arrays) -> ModelConfig:
    """Combine the settings that a model's parameters imply with those of its configuration, without its ensemble."""
    require(official, FIXED | (FIXED_MULTIMER if is_multimer(official) else FIXED_MONOMER))
    tolerance, found = official.get("recycle_early_stop_tolerance", -1), config_from_deepmind(params)
    return replace(
        found,
        recycles=official["num_recycle"],
        recycle_tolerance=None if tolerance < 0 else tolerance,
        structure=replace(found.structure, layers=official["heads"]["structure_module"]["num_layer"]),
    )


def is_multimer(official: Official) -> bool:
    """Whether the configuration of a whole model is Multimer's."""
    return bool(official["global_config"].get("multimer_mode"))


def loss_config(official: Official) -> LossConfig:
    """Translate the losses of a whole monomer from `heads`. A missing head has weight 0."""
    structure, filtered = official["structure_module"], official["experimentally_resolved"]
    return LossConfig(
        structure_module=structure["weight"],
        sidechain_fraction=structure["sidechain"]["weight_frac"],
        chi=structure["chi_weight"],
        angle_norm=structure["angle_norm_weight"],
        violation=structure["structural_violation_loss_weight"],
        distogram=official["distogram"]["weight"],
        masked_msa=official["masked_msa"]["weight"],
        plddt=official["predicted_lddt"]["weight"],
        experimentally_resolved=filtered["weight"],
        predicted_aligned_error=official.get("predicted_aligned_error", {}).get("weight", 0.0),
        fape_clamp=structure["fape"]["clamp_distance"],
        min_resolution=filtered["min_resolution"],
        max_resolution=filtered["max_resolution"],
        violation_tolerance_factor=structure["violation_tolerance_factor"],
        clash_overlap_tolerance=structure["clash_overlap_tolerance"],
    )
