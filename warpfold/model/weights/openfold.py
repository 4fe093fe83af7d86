"""Read OpenFold's checkpoints without executing their contents, and map their names to ours.

The tensors are the same in both. The names differ, and in an incoming triangle product OpenFold keeps the supplement's
a and b, which are exchanged in DeepMind's arrays and our layers. The names are those of OpenFold's import of DeepMind's
arrays (openfold/utils/import_weights.py, versions 1 and 2). Only models of single chains are supported.
"""

import re
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from warpfold.errors import UserError, listed
from warpfold.model.alphafold import HeadsConfig, ModelConfig
from warpfold.model.evoformer import EvoformerConfig, PairConfig
from warpfold.model.structure import StructureConfig
from warpfold.model.template import TemplateConfig

ENDINGS = (".pt", ".pth", ".ckpt")
# Replacements that convert the names of version 2, and the prefixes of training, to the names of version 1, without
# modules that only wrap others.
_RENAMED = (
    (r"^(module\.|model\.)+", ""),
    (r"^template_embedder\.", ""),
    (r"\.(core|pair_stack|stack|_msa_att)\.", "."),
    (r"template_angle_embedder", "template_single_embedder"),
    (r"(linear_k?v?q?_points)\.linear\.", r"\1."),
)
# Buffers of old versions that are not weights.
_NO_WEIGHTS = re.compile(r"structure_module\.(default_frames|group_idx|atom_mask|lit_positions)$")
_MULTIMERS = re.compile(r"linear_ab_p|linear_k_points|dgram_linear")
# Heads of the attention over templates (Algorithm 17), which no tensor shows.
_TEMPLATE_HEADS = 4

_TRANSITION = {"norm": "layer_norm", "up": "linear_1", "down": "linear_2"}
_ATTENTION = {"q": "linear_q", "k": "linear_k", "v": "linear_v", "gate": "linear_g", "out": "linear_o"}
_TRIANGLE = {
    "norm": "layer_norm_in",
    "norm_out": "layer_norm_out",
    "out": "linear_z",
    "gate": "linear_g",
    "a": "linear_a_p",
    "b": "linear_b_p",
    "a_gate": "linear_a_g",
    "b_gate": "linear_b_g",
}
_SWAPPED = {"a": "b", "b": "a", "a_gate": "b_gate", "b_gate": "a_gate"}


def _under(ours: str, theirs: str, names: Mapping[str, str]) -> dict[str, str]:
    """Prefix a mapping of names with our module's name and theirs."""
    return {f"{ours}.{name}": f"{theirs}.{other}" for name, other in names.items()}


def _pair_names(ours: str) -> dict[str, str]:
    """Map the names of a pair stack's layers."""
    swapped = {name: _TRIANGLE[_SWAPPED.get(name, name)] for name in _TRIANGLE}
    names = _under(f"{ours}outgoing", "tri_mul_out", _TRIANGLE) | _under(f"{ours}incoming", "tri_mul_in", swapped)
    for side, their_name in (("starting", "tri_att_start"), ("ending", "tri_att_end")):
        names |= _under(ours + side, their_name, {"norm": "layer_norm", "bias": "linear"})
        names |= _under(f"{ours}{side}.attention", f"{their_name}.mha", _ATTENTION)
    return names | _under(f"{ours}transition", "pair_transition", _TRANSITION)


BLOCK = {
    **_under("msa.row", "msa_att_row", {"norm": "layer_norm_m", "norm_z": "layer_norm_z", "bias": "linear_z"}),
    **_under("msa.row.attention", "msa_att_row.mha", _ATTENTION),
    "msa.column.norm": "msa_att_col.layer_norm_m",
    **_under("msa.column.attention", "msa_att_col.mha", _ATTENTION),
    # In the extra MSA stack.
    **_under("msa.column", "msa_att_col.global_attention", _ATTENTION),
    **_under("msa.transition", "msa_transition", _TRANSITION),
    **_under(
        "outer", "outer_product_mean", {"norm": "layer_norm", "a": "linear_1", "b": "linear_2", "out": "linear_out"}
    ),
    **_pair_names("pair."),
}
STACKS = {
    "evoformer": ("evoformer", BLOCK),
    "extra_stack": ("extra_msa_stack", BLOCK),
    "templates.stack": ("template_pair_stack", _pair_names("")),
}
_FOLD, _SIDECHAIN = "structure.fold_iteration", "structure.fold_iteration.rigid_sidechain"
NAMES = {
    **_under("input", "input_embedder", {"target_m": "linear_tf_m", "msa_m": "linear_msa_m"}),
    **_under("input", "input_embedder", {"left": "linear_tf_z_i", "right": "linear_tf_z_j"}),
    "input.position.linear": "input_embedder.linear_relpos",
    **_under(
        "recycling", "recycling_embedder", {"distance": "linear", "norm_m": "layer_norm_m", "norm_z": "layer_norm_z"}
    ),
    "templates.pair.linear": "template_pair_embedder.linear",
    "templates.norm": "template_pair_stack.layer_norm",
    **_under("templates.pointwise", "template_pointwise_att.mha", _ATTENTION),
    **_under("templates.rows", "template_single_embedder", {"up": "linear_1", "down": "linear_2"}),
    "extra.linear": "extra_msa_embedder.linear",
    "single": "evoformer.linear",
    **_under("structure", "structure_module", {"single_layer_norm": "layer_norm_s", "initial_projection": "linear_in"}),
    "structure.pair_layer_norm": "structure_module.layer_norm_z",
    **_under(
        f"{_FOLD}.invariant_point_attention",
        "structure_module.ipa",
        {
            "trainable_point_weights": "head_weights",
            "q_scalar": "linear_q",
            "kv_scalar": "linear_kv",
            "q_point_local": "linear_q_points",
            "kv_point_local": "linear_kv_points",
            "attention_2d": "linear_b",
            "output_projection": "linear_out",
        },
    ),
    f"{_FOLD}.attention_layer_norm": "structure_module.layer_norm_ipa",
    f"{_FOLD}.transition_layer_norm": "structure_module.transition.layer_norm",
    f"{_FOLD}.affine_update": "structure_module.bb_update.linear",
    **{f"{_FOLD}.transition.{i}": f"structure_module.transition.layers.0.linear_{i + 1}" for i in range(3)},
    **_under(
        _SIDECHAIN,
        "structure_module.angle_resnet",
        {
            "input_projection": "linear_in",
            "input_projection_initial": "linear_initial",
            "unnormalized_angles": "linear_out",
        },
    ),
    "distogram.half_logits": "aux_heads.distogram.linear",
    "masked_msa.logits": "aux_heads.masked_msa.linear",
    "resolved.logits": "aux_heads.experimentally_resolved.linear",
    "pae.logits": "aux_heads.tm.linear",
    **_under("plddt", "aux_heads.plddt", {"input_layer_norm": "layer_norm", "act_0": "linear_1", "act_1": "linear_2"}),
    "plddt.logits": "aux_heads.plddt.linear_3",
}


def openfold_name(ours: str) -> str:
    """Return OpenFold's name (version 1) of a tensor of our state dict. Raises KeyError if OpenFold has none."""
    module, _, kind = ours.rpartition(".")
    if ours in NAMES:
        return NAMES[ours]
    if block := re.fullmatch(r"(.+)\.blocks\.(\d+)\.(.+)", module):
        their_name, names = STACKS[block[1]]
        return f"{their_name}.blocks.{block[2]}.{names[block[3]]}.{kind}"
    if layer := re.fullmatch(rf"{re.escape(_SIDECHAIN)}\.resblock([12])\.(\d+)", module):
        return f"structure_module.angle_resnet.layers.{layer[2]}.linear_{layer[1]}.{kind}"
    return f"{NAMES[module]}.{kind}"


def read_openfold(path: Path) -> dict[str, Tensor]:
    """Read the tensors of an OpenFold checkpoint by their names of version 1, preferably the averaged weights.

    Nothing in the file is executed. Raises UserError if the file cannot be read, or contains objects other than tensors
    and plain containers.
    """
    if not zipfile.is_zipfile(path):
        raise UserError(f"{path}: not a checkpoint that torch 1.6 or later wrote; save its state dict again")
    remedy = "save its state dict alone, or give DeepMind's params_model_*.npz"
    damaged = (RuntimeError, ValueError, LookupError, TypeError, AttributeError, EOFError, OSError, ArithmeticError)
    try:
        with zipfile.ZipFile(path) as file:
            # torch does not verify these checksums.
            if damaged_member := file.testzip():
                raise ValueError(f"{damaged_member} does not fit its checksum")
            # torch would read the data before the archive.
            if min((entry.header_offset for entry in file.infolist()), default=0):
                raise ValueError("it begins with something else")
        if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(str(path)):
            details = listed(sorted(unsafe), 3)
            raise UserError(f"{path}: holds more than tensors ({details}), which is not executed; {remedy}")
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (*damaged, zipfile.BadZipFile, zlib.error, torch.serialization.pickle.UnpicklingError) as error:
        details = " ".join(str(error).split())[:120]
        raise UserError(f"{path}: not a checkpoint that can be read ({details}); {remedy}") from error
    return _weights_in(saved, path)


def _weights_in(saved: Any, path: Path) -> dict[str, Tensor]:
    """Find the state dict in a saved object: the averaged weights of a training, its weights, or the object itself."""
    for keys in (("ema", "params"), ("state_dict",), ("model",), ("module",)):
        inner = saved
        for key in keys:
            inner = inner.get(key) if isinstance(inner, Mapping) else None
        if isinstance(inner, Mapping):
            saved = inner
            break
    if not isinstance(saved, Mapping):
        raise UserError(f"{path}: holds no state dict; give OpenFold's, or DeepMind's params_model_*.npz")
    weights = {}
    for name, tensor in saved.items():
        if isinstance(tensor, Tensor) and isinstance(name, str):
            for pattern, new in _RENAMED:
                name = re.sub(pattern, new, name)
            if not _NO_WEIGHTS.match(name):
                weights[name] = tensor
    for name, tensor in weights.items():
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise UserError(f"{path}: {name} is larger than its stored data; fetch the file again")
    if any(map(_MULTIMERS.search, weights)):
        raise UserError(
            f"{path}: OpenFold's parameters of a multimer are not supported; give DeepMind's "
            "params_model_*_multimer_*.npz"
        )
    return weights


def config_from_openfold(weights: Mapping[str, Tensor], source: str = "params") -> ModelConfig:
    """Infer the settings of a model from OpenFold's tensors.

    Settings that no tensor shows have the published values (`config_from_deepmind`). Raises UserError for tensors of
    another model, or if tensors that determine a setting are missing.
    """
    p = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    row, structure = "evoformer.blocks.0.msa_att_row", "structure_module"
    try:
        c_m, c_z = p["input_embedder.linear_tf_m.weight"][0], p["recycling_embedder.layer_norm_z.weight"][0]
        (heads,) = p[f"{structure}.ipa.head_weights"]
        qk_points = p[f"{structure}.ipa.linear_q_points.weight"][0] // (3 * heads)
        pae = "aux_heads.tm.linear.weight"
        return ModelConfig(
            c_m=c_m,
            c_z=c_z,
            c_s=p["evoformer.linear.weight"][0],
            c_e=p["extra_msa_embedder.linear.weight"][0],
            max_relative=(p["input_embedder.linear_relpos.weight"][1] - 1) // 2,
            evoformer=EvoformerConfig(
                blocks=_blocks(p, "evoformer"),
                heads=p[f"{row}.linear_z.weight"][0],
                transition=p["evoformer.blocks.0.msa_transition.linear_1.weight"][0] // c_m,
                c_outer=p["evoformer.blocks.0.outer_product_mean.linear_1.weight"][0],
                pair=_pair(p, "evoformer.blocks.0", c_z),
            ),
            extra_blocks=_blocks(p, "extra_msa_stack"),
            templates=_templates(p),
            structure=StructureConfig(
                c=p[f"{structure}.linear_in.weight"][0],
                heads=heads,
                c_hidden=p[f"{structure}.ipa.linear_q.weight"][0] // heads,
                qk_points=qk_points,
                v_points=p[f"{structure}.ipa.linear_kv_points.weight"][0] // (3 * heads) - qk_points,
                sidechain_c=p[f"{structure}.angle_resnet.linear_in.weight"][0],
                sidechain_blocks=_count(p, rf"{structure}\.angle_resnet\.layers\.(\d+)\."),
            ),
            heads=HeadsConfig(
                distogram_bins=p["aux_heads.distogram.linear.weight"][0],
                msa_classes=p["aux_heads.masked_msa.linear.weight"][0],
                plddt_c=p["aux_heads.plddt.linear_1.weight"][0],
                plddt_bins=p["aux_heads.plddt.linear_3.weight"][0],
                pae=pae in p,
                pae_bins=p.get(pae, (64,))[0],
            ),
        )
    except (KeyError, IndexError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"{source}: not the parameters of OpenFold's AlphaFold2; no usable tensor {error}") from error


def _pair(p: Mapping[str, tuple[int, ...]], block: str, c: int, **more: Any) -> PairConfig:
    heads = p[f"{block}.tri_att_start.linear.weight"][0]
    return PairConfig(
        heads=heads,
        head_width=p[f"{block}.tri_att_start.mha.linear_q.weight"][0] // heads,
        c_triangle=p[f"{block}.tri_mul_out.linear_a_p.weight"][0],
        transition=p[f"{block}.pair_transition.linear_1.weight"][0] // c,
        **more,
    )


def _templates(p: Mapping[str, tuple[int, ...]]) -> TemplateConfig:
    if "template_pair_embedder.linear.weight" not in p:
        return TemplateConfig(enabled=False)
    c = p["template_pair_embedder.linear.weight"][0]
    return TemplateConfig(
        c=c,
        blocks=_blocks(p, "template_pair_stack"),
        heads=_TEMPLATE_HEADS,
        attention_width=p["template_pointwise_att.mha.linear_q.weight"][0] // _TEMPLATE_HEADS,
        torsion_rows="template_single_embedder.linear_1.weight" in p,
        pair=_pair(p, "template_pair_stack.blocks.0", c, order="attention_first"),
    )


def _blocks(p: Mapping[str, Any], stack: str) -> int:
    return _count(p, rf"{stack}\.blocks\.(\d+)\.")


def _count(p: Mapping[str, Any], pattern: str) -> int:
    """Count the different numbers that the pattern's group matches in the names."""
    return len({match[1] for name in p if (match := re.match(pattern, name))})
