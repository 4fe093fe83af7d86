"""Our tensors and DeepMind's arrays, one to one, both ways.

Every tensor of the model has the numbers of one array of DeepMind's: a Linear's weight is transposed and its
channels are split into heads, and the blocks of a stack stand along a leading axis.  The tables below say which.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from warpfold.errors import UserError
from warpfold.model import attention, embed, evoformer, msa, pair, template
from warpfold.model.alphafold import AlphaFold, HeadsConfig, ModelConfig
from warpfold.model.layers import LayerNorm, Linear
from warpfold.model.structure import AngleResnet, StructureConfig
from warpfold.ops.noise import Noise

PREFIX = "alphafold/alphafold_iteration/"

# Where each child of a module stands in DeepMind's scopes.  A name that begins with // is an array in the scope of the
# module itself: for a Linear its weight, and after a comma its bias.
_ATTENTION = {"q": "//query_w", "k": "//key_w", "v": "//value_w", "gate": "//gating_w,//gating_b"}
_ATTENTION |= {"out": "//output_w,//output_b"}
SCOPES: dict[type[nn.Module], dict[str, str]] = {
    attention.GatedAttention: _ATTENTION,
    attention.Transition: {"norm": "input_layer_norm", "up": "transition1", "down": "transition2"},
    msa.MSARowAttention: {
        "norm": "query_norm",
        "norm_z": "feat_2d_norm",
        "bias": "//feat_2d_weights",
        "attention": "attention",
    },
    msa.MSAColumnAttention: {"norm": "query_norm", "attention": "attention"},
    msa.MSAColumnGlobalAttention: {
        "norm": "query_norm",
        **{ours: theirs.replace("//", "attention//") for ours, theirs in _ATTENTION.items()},
    },
    msa.OuterProductMean: {
        "norm": "layer_norm_input",
        "a": "left_projection",
        "b": "right_projection",
        "out": "//output_w,//output_b",
    },
    msa.MSAStack: {
        "row": "msa_row_attention_with_pair_bias",
        "column": "msa_column_attention",  # msa_column_global_attention in the extra MSA stack
        "transition": "msa_transition",
    },
    pair.TriangleMultiplication: {
        "norm": "layer_norm_input",
        "a": "left_projection",
        "b": "right_projection",
        "a_gate": "left_gate",
        "b_gate": "right_gate",
        "norm_out": "center_layer_norm",
        "out": "output_projection",
        "gate": "gating_linear",
    },
    pair.TriangleAttention: {"norm": "query_norm", "bias": "//feat_2d_weights", "attention": "attention"},
    pair.PairStack: {
        "outgoing": "triangle_multiplication_outgoing",
        "incoming": "triangle_multiplication_incoming",
        "starting": "triangle_attention_starting_node",
        "ending": "triangle_attention_ending_node",
        "transition": "pair_transition",
    },
    evoformer.EvoformerBlock: {"msa": "", "outer": "outer_product_mean", "pair": ""},
    embed.InputEmbedder: {
        "target_m": "preprocess_1d",
        "msa_m": "preprocess_msa",
        "left": "left_single",
        "right": "right_single",
        "position": "",
    },
    embed.RelativePosition: {"linear": "pair_activiations"},  # sic
    embed.RecyclingEmbedder: {
        "distance": "prev_pos_linear",
        "norm_m": "prev_msa_first_row_norm",
        "norm_z": "prev_pair_norm",
    },
    embed.ExtraMSAEmbedder: {"linear": "extra_msa_activations"},
    template.TemplatePairEmbedder: {"linear": "embedding2d"},
    template.TemplatePointwiseAttention: {k: v for k, v in _ATTENTION.items() if k != "gate"},
    template.TemplateRows: {"up": "template_single_embedding", "down": "template_projection"},
    template.TemplateEmbedder: {
        "pair": "template_embedding/single_template_embedding",
        "stack": "template_embedding/single_template_embedding/template_pair_stack",
        "norm": "template_embedding/single_template_embedding/output_layer_norm",
        "pointwise": "template_embedding/attention",
        "rows": "",
    },
    AngleResnet: {"input_projection_initial": "input_projection_1"},
    AlphaFold: {
        "input": "evoformer",
        "recycling": "evoformer",
        "templates": "evoformer",
        "extra": "evoformer",
        "extra_stack": "evoformer/extra_msa_stack",
        "evoformer": "evoformer/evoformer_iteration",
        "single": "evoformer/single_activations",
        "structure": "structure_module",
        "distogram": "distogram_head",
        "masked_msa": "masked_msa_head",
        "plddt": "predicted_lddt_head",
        "resolved": "experimentally_resolved_head",
        "pae": "predicted_aligned_error_head",
    },
}
FUSED_TRIANGLE = {
    "norm": "left_norm_input",
    "ab": "projection",
    "ab_gate": "gate",
    "norm_out": "center_norm",
    "out": "output_projection",
    "gate": "gating_linear",
}


@dataclass(frozen=True)
class Array:
    """The position of one of our tensors among DeepMind's arrays."""

    ours: str  # name in the state dict
    theirs: str  # scope//name
    shape: tuple[int, ...]  # theirs, without the axis of blocks
    block: int | None = None  # which block of a stacked array
    blocks: int = 1

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        return self.shape if self.block is None else (self.blocks, *self.shape)

    def to_ours(self, array: np.ndarray) -> torch.Tensor:
        """Convert DeepMind's array to our tensor: [c_in..., c_out...] -> [c_out, c_in] for weights, flat for others."""
        part = torch.from_numpy(np.array(array if self.block is None else array[self.block]))
        if self.ours.endswith("weight") and len(self.shape) > 1:
            return part.reshape(self._c_in, -1).T.contiguous()
        return part.reshape(-1)

    def to_theirs(self, tensor: torch.Tensor) -> np.ndarray:
        """Invert `to_ours` for one block."""
        return (tensor.detach().cpu().T if tensor.dim() == 2 else tensor.detach().cpu()).reshape(self.shape).numpy()

    @property
    def _c_in(self) -> int:
        # Outputs of an attention and the outer product flatten two axes into one; the others have one axis of inputs.
        joined = 2 if self.theirs.endswith("output_w") else 1
        return int(np.prod(self.shape[:joined]))


def arrays(module: nn.Module, scope: str = "", name: str = "") -> Iterator[Array]:
    """Yield every tensor of `module`, with its array of DeepMind's under `scope`."""
    for child_name, child in module.named_children():
        if isinstance(child, Noise):  # it has no weights
            continue
        ours = f"{name}.{child_name}" if name else child_name
        if isinstance(child, nn.ModuleList) and child_name == "blocks":
            inner = f"{scope}/__layer_stack_no_state" if isinstance(module, template.TemplatePairStack) else scope
            for index, block in enumerate(child):
                for a in arrays(block, inner, f"{ours}.{index}"):
                    yield Array(a.ours, a.theirs, a.shape, index, len(child))
            continue
        theirs = _scopes(module)[child_name]
        if isinstance(child, nn.ModuleList):  # haiku numbers repeated layers: name, name_1, name_2
            for index, layer in enumerate(child):
                assert isinstance(layer, Linear)
                numbered = f"{theirs}_{index}" if index else theirs
                yield from _leaf(module, child_name, layer, scope, numbered, f"{ours}.{index}")
        elif isinstance(child, Linear | LayerNorm):
            yield from _leaf(module, child_name, child, scope, theirs, ours)
        else:
            yield from arrays(child, _join(scope, theirs), ours)
    for key, _ in module.named_parameters(recurse=False):
        yield Array(f"{name}.{key}" if name else key, f"{scope}//{key}", tuple(getattr(module, key).shape))


def _scopes(module: nn.Module) -> dict[str, str]:
    if isinstance(module, pair.TriangleMultiplication) and module.fused:
        return FUSED_TRIANGLE
    table = SCOPES.get(type(module), {})
    if isinstance(module, msa.MSAStack) and isinstance(module.column, msa.MSAColumnGlobalAttention):
        return table | {"column": "msa_column_global_attention"}
    # A module whose parts are named as DeepMind's needs no table.
    return {child: child for child, _ in module.named_children()} | table


def _join(scope: str, theirs: str) -> str:
    return "/".join(part for part in (scope, theirs) if part)


def _leaf(
    module: nn.Module, child: str, leaf: Linear | LayerNorm, scope: str, theirs: str, ours: str
) -> Iterator[Array]:
    if isinstance(leaf, LayerNorm):
        c = (leaf.normalized_shape[0],)
        yield Array(f"{ours}.weight", f"{_join(scope, theirs)}//scale", c)
        yield Array(f"{ours}.bias", f"{_join(scope, theirs)}//offset", c)
        return
    if "//" in theirs:
        weight, _, bias = theirs.partition(",")
        inner, _, weight = weight.rpartition("//")
        weight, bias = (f"{_join(scope, inner)}//{n.rpartition('//')[2]}" for n in (weight, bias))
    else:
        weight, bias = f"{_join(scope, theirs)}//weights", f"{_join(scope, theirs)}//bias"
    weight_shape, bias_shape = _shapes(module, child, leaf)
    yield Array(f"{ours}.weight", weight, weight_shape)
    if leaf.bias is not None:
        yield Array(f"{ours}.bias", bias, bias_shape)


def _shapes(module: nn.Module, child: str, linear: Linear) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return DeepMind's shapes of a Linear's weight and bias."""
    c_in, c_out = linear.in_features, linear.out_features
    if isinstance(module, msa.OuterProductMean) and child == "out":
        return (module.a.out_features, module.b.out_features, c_out), (c_out,)
    split = isinstance(module, attention.GatedAttention | template.TemplatePointwiseAttention)
    if split or (isinstance(module, msa.MSAColumnGlobalAttention) and child not in ("k", "v")):
        h = int(module.heads)  # type: ignore[arg-type]
        if child == "out":
            return (h, c_in // h, c_out), (c_out,)
        return (c_in, h, c_out // h), (h, c_out // h)
    return (c_in, c_out), (c_out,)


def from_deepmind(module: nn.Module, params: Mapping[str, np.ndarray], scope: str = "", source: str = "params") -> None:
    """Load DeepMind's arrays, named scope//name, into `module`, strictly.

    Errors: UserError that names every missing, surplus and misshapen array; nothing is loaded then.
    """
    wanted = list(arrays(module, scope))
    missing = sorted({a.theirs for a in wanted} - params.keys())
    surplus = sorted(params.keys() - {a.theirs for a in wanted})
    misshapen = sorted(
        {
            f"{a.theirs} {list(params[a.theirs].shape)}, expected {list(a.stacked_shape)}"
            for a in wanted
            if a.theirs in params and tuple(params[a.theirs].shape) != a.stacked_shape
        }
    )
    refuse(source, missing, surplus, misshapen)
    state = {a.ours: a.to_ours(params[a.theirs]) for a in wanted}
    module.load_state_dict(state, strict=True)


def to_deepmind(module: nn.Module, scope: str = "") -> dict[str, np.ndarray]:
    """Return every parameter as DeepMind's arrays, the inverse of `from_deepmind`: fp32, named scope//name."""
    tensors = module.state_dict()
    out: dict[str, np.ndarray] = {}
    for a in arrays(module, scope):
        array = a.to_theirs(tensors[a.ours])
        if a.block is None:
            out[a.theirs] = np.ascontiguousarray(array)
        else:
            out.setdefault(a.theirs, np.empty(a.stacked_shape, array.dtype))[a.block] = array
    return out


def refuse(source: str, missing: list[str], surplus: list[str], misshapen: list[str]) -> None:
    """Raise UserError in one line that names everything that does not fit, if there is anything."""
    report = [
        f"{len(names)} {what}: {', '.join(names)}"
        for what, names in (("missing", missing), ("surplus", surplus), ("misshapen", misshapen))
        if names
    ]
    if report:
        raise UserError(f"{source}: not the parameters of this model; {'; '.join(report)}")


def config_from_deepmind(params: Mapping[str, np.ndarray], source: str = "params") -> ModelConfig:
    """Return the settings that DeepMind's arrays imply: channels, blocks, heads, templates, ptm.

    What no array shows keeps the published value (layers of the structure module, recycles, relative positions).
    Errors: UserError for arrays of another model (Multimer), or too few of them to tell.
    """
    p = {name.removeprefix(PREFIX): np.shape(array) for name, array in params.items()}
    if any("~_relative_encoding" in name for name in p):
        raise UserError(f"{source}: Multimer parameters; only the monomer is built: use params_model_1..5(_ptm)")
    block = "evoformer/evoformer_iteration/"
    outgoing = block + "triangle_multiplication_outgoing/"
    one_template = "evoformer/template_embedding/single_template_embedding/"
    try:
        blocks, c_z, c_pair_head = _attention_shape(p, block + "triangle_attention_starting_node/attention")
        fused = outgoing + "projection//weights" in p
        pair_config = pair.PairConfig(
            heads=c_pair_head[0],
            head_width=c_pair_head[1],
            c_triangle=p[outgoing + ("center_norm" if fused else "center_layer_norm") + "//scale"][1],
            transition=p[block + "pair_transition/transition1//weights"][2] // c_z,
            fused=fused,
        )
        _, c_m, row_heads = _attention_shape(p, block + "msa_row_attention_with_pair_bias/attention")
        trunk = evoformer.EvoformerConfig(
            blocks=blocks,
            heads=row_heads[0],
            transition=p[block + "msa_transition/transition1//weights"][2] // c_m,
            c_outer=p[block + "outer_product_mean/left_projection//weights"][2],
            pair=pair_config,
        )
        return ModelConfig(
            c_m=c_m,
            c_z=c_z,
            c_s=p["evoformer/single_activations//weights"][1],
            c_e=p["evoformer/extra_msa_activations//weights"][1],
            max_relative=(p["evoformer/pair_activiations//weights"][0] - 1) // 2,
            evoformer=trunk,
            extra_blocks=p["evoformer/extra_msa_stack/msa_transition/transition1//weights"][0],
            templates=_templates(p, one_template),
            structure=_structure(p),
            heads=_heads(p),
        )
    except (KeyError, IndexError) as error:
        raise UserError(f"{source}: not the parameters of an AlphaFold2 monomer; no usable array {error}") from error


def _attention_shape(p: Mapping[str, tuple[int, ...]], scope: str) -> tuple[int, int, tuple[int, int]]:
    """Return blocks, channels, (heads, width of a head) of a stacked attention."""
    blocks, c, h, width = p[f"{scope}//query_w"]
    return blocks, c, (h, width)


def _templates(p: Mapping[str, tuple[int, ...]], scope: str) -> template.TemplateConfig:
    if scope + "embedding2d//weights" not in p:
        return template.TemplateConfig(enabled=False)
    stack = scope + "template_pair_stack/__layer_stack_no_state/"
    blocks, c, (h, width) = _attention_shape(p, stack + "triangle_attention_ending_node/attention")
    outgoing = stack + "triangle_multiplication_outgoing/"
    fused = outgoing + "projection//weights" in p
    _, pointwise_heads, pointwise_width = p["evoformer/template_embedding/attention//query_w"]
    return template.TemplateConfig(
        c=c,
        blocks=blocks,
        heads=pointwise_heads,
        attention_width=pointwise_width,
        torsion_rows="evoformer/template_single_embedding//weights" in p,
        pair=pair.PairConfig(
            heads=h,
            head_width=width,
            c_triangle=p[outgoing + ("center_norm" if fused else "center_layer_norm") + "//scale"][1],
            transition=p[stack + "pair_transition/transition1//weights"][2] // c,
            fused=fused,
            order="attention_first",
        ),
    )


def _structure(p: Mapping[str, tuple[int, ...]]) -> StructureConfig:
    fold = "structure_module/fold_iteration/"
    ipa, side = fold + "invariant_point_attention/", fold + "rigid_sidechain/"
    (heads,) = p[ipa + "/trainable_point_weights"]
    qk_points = p[ipa + "q_point_local//bias"][0] // (3 * heads)
    return StructureConfig(
        c=p[fold + "affine_update//weights"][0],
        heads=heads,
        c_hidden=p[ipa + "q_scalar//bias"][0] // heads,
        qk_points=qk_points,
        v_points=p[ipa + "kv_point_local//bias"][0] // (3 * heads) - qk_points,
        transition_layers=sum(f"{fold}transition{n}//bias" in p for n in ("", *(f"_{i}" for i in range(1, 9)))),
        sidechain_c=p[side + "input_projection//bias"][0],
        sidechain_blocks=sum(f"{side}resblock1{n}//bias" in p for n in ("", *(f"_{i}" for i in range(1, 9)))),
    )


def _heads(p: Mapping[str, tuple[int, ...]]) -> HeadsConfig:
    pae = "predicted_aligned_error_head/logits//weights"
    return HeadsConfig(
        distogram_bins=p["distogram_head/half_logits//weights"][1],
        msa_classes=p["masked_msa_head/logits//weights"][1],
        plddt_c=p["predicted_lddt_head/act_0//weights"][1],
        plddt_bins=p["predicted_lddt_head/logits//weights"][1],
        pae=pae in p,
        pae_bins=p.get(pae, (0, 64))[1],
    )
