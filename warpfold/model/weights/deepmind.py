"""Convert between our tensors and DeepMind's arrays.

Every tensor of the model corresponds to one of DeepMind's arrays. In the arrays, a Linear's weight is transposed, its
channels are split into heads, and the blocks of a stack are stacked along a leading axis. The tables below map the
names. Only Multimer's structure module has another order and separate arrays of keys and values (`_point_attention`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import nn

from warpfold.errors import UserError, listed
from warpfold.model import embed, evoformer, template
from warpfold.model.alphafold import AlphaFold, HeadsConfig, ModelConfig
from warpfold.model.embed import MultimerConfig
from warpfold.model.layers import LayerNorm, Linear
from warpfold.model.structure import AngleResnet, FoldIteration, InvariantPointAttention, StructureConfig
from warpfold.ops.noise import Noise

PREFIX = "alphafold/alphafold_iteration/"

# DeepMind's scope of each child of a module. A name that begins with // is an array in the scope of the module itself:
# a Linear's weight, and after a comma its bias.
_ATTENTION = {"q": "//query_w", "k": "//key_w", "v": "//value_w", "gate": "//gating_w,//gating_b"}
_ATTENTION |= {"out": "//output_w,//output_b"}
_TEMPLATE_ROWS = {"up": "template_single_embedding", "down": "template_projection"}
SCOPES: dict[type[nn.Module], dict[str, str]] = {
    evoformer.GatedAttention: _ATTENTION,
    evoformer.Transition: {"norm": "input_layer_norm", "up": "transition1", "down": "transition2"},
    evoformer.MSARowAttention: {
        "norm": "query_norm",
        "norm_z": "feat_2d_norm",
        "bias": "//feat_2d_weights",
        "attention": "attention",
    },
    evoformer.MSAColumnAttention: {"norm": "query_norm", "attention": "attention"},
    evoformer.MSAColumnGlobalAttention: {
        "norm": "query_norm",
        **{ours: theirs.replace("//", "attention//") for ours, theirs in _ATTENTION.items()},
    },
    evoformer.OuterProductMean: {
        "norm": "layer_norm_input",
        "a": "left_projection",
        "b": "right_projection",
        "out": "//output_w,//output_b",
    },
    evoformer.MSAStack: {
        "row": "msa_row_attention_with_pair_bias",
        # In the extra MSA stack: msa_column_global_attention.
        "column": "msa_column_attention",
        "transition": "msa_transition",
    },
    evoformer.TriangleMultiplication: {
        "norm": "layer_norm_input",
        "a": "left_projection",
        "b": "right_projection",
        "a_gate": "left_gate",
        "b_gate": "right_gate",
        "norm_out": "center_layer_norm",
        "out": "output_projection",
        "gate": "gating_linear",
    },
    evoformer.TriangleAttention: {"norm": "query_norm", "bias": "//feat_2d_weights", "attention": "attention"},
    evoformer.PairStack: {
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
    embed.ChainRelativePosition: {"linear": "~_relative_encoding/position_activations"},
    embed.RecyclingEmbedder: {
        "distance": "prev_pos_linear",
        "norm_m": "prev_msa_first_row_norm",
        "norm_z": "prev_pair_norm",
    },
    embed.ExtraMSAEmbedder: {"linear": "extra_msa_activations"},
    template.TemplatePairEmbedder: {"linear": "embedding2d"},
    template.TemplatePointwiseAttention: {k: v for k, v in _ATTENTION.items() if k != "gate"},
    template.TemplateRows: _TEMPLATE_ROWS,
    template.ChiTemplateRows: _TEMPLATE_ROWS,
    template.ChainTemplatePairEmbedder: {"norm": "query_embedding_norm", "parts": "template_pair_embedding_{}"},
    template.ChainTemplateEmbedder: {
        "pair": "template_embedding/single_template_embedding",
        "stack": "template_embedding/single_template_embedding/template_embedding_iteration",
        "norm": "template_embedding/single_template_embedding/output_layer_norm",
        "out": "template_embedding/output_linear",
        "rows": "",
    },
    template.TemplateEmbedder: {
        "pair": "template_embedding/single_template_embedding",
        "stack": "template_embedding/single_template_embedding/template_pair_stack/__layer_stack_no_state",
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
class Outputs:
    """The outputs of a Linear that one of DeepMind's arrays contains, and their order.

    axes: our outputs, unflattened. start, stop: the range along the last axis. order: the order of these axes in the
    array, where all but the first are flattened.
    """

    axes: tuple[int, ...]
    start: int = 0
    stop: int | None = None
    order: tuple[int, ...] = (0, 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array's outputs."""
        sizes = [*self.axes[:-1], len(range(self.axes[-1])[self.start : self.stop])]
        first, *other_sizes = (sizes[axis] for axis in self.order)
        return first, int(np.prod(other_sizes))

    def view(self, x: torch.Tensor) -> torch.Tensor:
        """Return a view of x [..., outputs] with the array's axes of outputs."""
        x = x.unflatten(-1, self.axes)[..., self.start : self.stop]
        return x.permute(*range(x.dim() - len(self.axes)), *(axis - len(self.axes) for axis in self.order))


@dataclass(frozen=True)
class Array:
    """The correspondence between one of our tensors, or some of its outputs, and one of DeepMind's arrays.

    ours: the name in the state dict. theirs: scope//name. shape: the array's, without the axis of blocks. block: the
    index along the axis of blocks, None if there is no such axis. outputs: None for all outputs in our order.
    """

    ours: str
    theirs: str
    shape: tuple[int, ...]
    block: int | None = None
    blocks: int = 1
    outputs: Outputs | None = None

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        """The shape of the array with its axis of blocks."""
        return self.shape if self.block is None else (self.blocks, *self.shape)

    def put(self, array: np.ndarray, tensor: torch.Tensor) -> None:
        """Copy DeepMind's array into our tensor."""
        view = self._view(tensor)
        array = array if self.block is None else array[self.block]
        values = torch.from_numpy(np.array(array, array.dtype.newbyteorder("=")))
        view.copy_(values.reshape(view.shape))

    def to_theirs(self, tensor: torch.Tensor) -> np.ndarray:
        """Convert our tensor to DeepMind's array of one block, the inverse of `put`."""
        return self._view(tensor.detach().cpu()).reshape(self.shape).numpy()

    def _view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of our tensor with DeepMind's axes: [c_in..., c_out...] of a weight [c_out, c_in]."""
        x = tensor.T if tensor.dim() == 2 else tensor
        return x.view(self.shape) if self.outputs is None else self.outputs.view(x)


def arrays(module: nn.Module, scope: str = "", name: str = "") -> Iterator[Array]:
    """Yield the correspondence of every tensor of `module` with DeepMind's arrays under `scope`."""
    for child_name, child in module.named_children():
        # It has no weights.
        if isinstance(child, Noise):
            continue
        our_name = f"{name}.{child_name}" if name else child_name
        if isinstance(child, nn.ModuleList) and child_name == "blocks":
            for index, block in enumerate(child):
                for a in arrays(block, scope, f"{our_name}.{index}"):
                    yield replace(a, block=index, blocks=len(child))
            continue
        if isinstance(module, InvariantPointAttention) and child_name in (split := _point_attention(module)):
            assert isinstance(child, Linear)
            for their_name, outputs in split[child_name]:
                inner, shape = _join(scope, their_name), (child.in_features, *outputs.shape)
                yield Array(f"{our_name}.weight", f"{inner}//weights", shape, outputs=outputs)
                if child.bias is not None:
                    yield Array(f"{our_name}.bias", f"{inner}//bias", outputs.shape, outputs=outputs)
            continue
        their_name = _scopes(module)[child_name]
        # Haiku numbers repeated layers: name, name_1, name_2.
        if isinstance(child, nn.ModuleList):
            for index, layer in enumerate(child):
                assert isinstance(layer, Linear)
                numbered = (
                    their_name.format(index) if "{}" in their_name else f"{their_name}_{index}" if index else their_name
                )
                yield from _leaf(module, child_name, layer, scope, numbered, f"{our_name}.{index}")
        elif isinstance(child, Linear | LayerNorm):
            yield from _leaf(module, child_name, child, scope, their_name, our_name)
        else:
            yield from arrays(child, _join(scope, their_name), our_name)
    for key, _ in module.named_parameters(recurse=False):
        yield Array(f"{name}.{key}" if name else key, f"{scope}//{key}", tuple(getattr(module, key).shape))


def _scopes(module: nn.Module) -> dict[str, str]:
    if isinstance(module, evoformer.TriangleMultiplication) and module.fused:
        return FUSED_TRIANGLE
    table = SCOPES.get(type(module), {})
    if isinstance(module, FoldIteration) and _is_multimer(module.invariant_point_attention):
        table = table | {"affine_update": "quat_rigid/rigid"}
    if isinstance(module, evoformer.MSAStack) and isinstance(module.column, evoformer.MSAColumnGlobalAttention):
        return table | {"column": "msa_column_global_attention"}
    # Children that are not in a table have DeepMind's names.
    return {child: child for child, _ in module.named_children()} | table


def _is_multimer(attention: InvariantPointAttention) -> bool:
    return attention.q_scalar.bias is None


def _point_attention(module: InvariantPointAttention) -> dict[str, list[tuple[str, Outputs]]]:
    """Return the scopes and outputs of Multimer's arrays of queries, keys and values, by our names.

    In these arrays heads are outermost, and a head has all x of its points, then all y, then all z.
    """
    if not _is_multimer(module):
        return {}
    h, c, q, v = module.heads, module.c_hidden, module.qk_points, module.v_points
    q_points, k_points, v_points = (f"{x}_point_projection/point_projection" for x in "qkv")
    heads_first = (1, 0, 2)
    return {
        "q_scalar": [("q_scalar_projection", Outputs((h, c)))],
        "kv_scalar": [
            ("k_scalar_projection", Outputs((h, 2 * c), stop=c)),
            ("v_scalar_projection", Outputs((h, 2 * c), start=c)),
        ],
        "q_point_local": [(q_points, Outputs((3, h, q), order=heads_first))],
        "kv_point_local": [
            (k_points, Outputs((3, h, q + v), stop=q, order=heads_first)),
            (v_points, Outputs((3, h, q + v), start=q, order=heads_first)),
        ],
    }


def _join(scope: str, theirs: str) -> str:
    # PREFIX ends in a slash.
    return "/".join(name for name in (scope.rstrip("/"), theirs) if name)


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
    if isinstance(module, evoformer.OuterProductMean) and child == "out":
        return (module.a.out_features, module.b.out_features, c_out), (c_out,)
    # The arrays for scalar inputs have no input axis.
    if isinstance(module, template.ChainTemplatePairEmbedder) and c_in == 1:
        return (c_out,), (c_out,)
    split = isinstance(module, evoformer.GatedAttention | template.TemplatePointwiseAttention)
    if split or (isinstance(module, evoformer.MSAColumnGlobalAttention) and child not in ("k", "v")):
        h = int(module.heads)  # type: ignore[arg-type]
        if child == "out":
            return (h, c_in // h, c_out), (c_out,)
        return (c_in, h, c_out // h), (h, c_out // h)
    return (c_in, c_out), (c_out,)


def from_deepmind(module: nn.Module, params: Mapping[str, np.ndarray], scope: str = "", source: str = "params") -> None:
    """Load DeepMind's arrays, named scope//name, into `module`.

    Raises UserError, and loads nothing, if arrays are missing, unexpected or of the wrong shape.
    """
    check_arrays(module, params, scope, source)
    state = {name: torch.empty_like(x, device="cpu") for name, x in module.state_dict().items()}
    for a in arrays(module, scope):
        a.put(params[a.theirs], state[a.ours])
    module.load_state_dict(state, strict=True)


def check_arrays(module: nn.Module, params: Mapping[str, np.ndarray], scope: str = "", source: str = "params") -> None:
    """Raise UserError if arrays are missing, unexpected or of the wrong shape."""
    expected = list(arrays(module, scope))
    missing = sorted({a.theirs for a in expected} - params.keys())
    surplus = sorted(params.keys() - {a.theirs for a in expected})
    misshapen = sorted(
        {
            f"{a.theirs} {list(params[a.theirs].shape)}, expected {list(a.stacked_shape)} of floating-point numbers"
            for a in expected
            if a.theirs in params and (params[a.theirs].shape != a.stacked_shape or params[a.theirs].dtype.kind != "f")
        }
    )
    refuse(source, missing, surplus, misshapen)


def to_deepmind(module: nn.Module, scope: str = "") -> dict[str, np.ndarray]:
    """Convert all parameters to DeepMind's arrays, fp32, named scope//name: the inverse of `from_deepmind`."""
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
    """Raise UserError with one line that lists some names of each kind, unless all lists are empty."""
    report = [
        f"{len(names)} {kind}: {listed(names)}"
        for kind, names in (("missing", missing), ("surplus", surplus), ("misshapen", misshapen))
        if names
    ]
    if report:
        raise UserError(f"{source}: not the parameters of this model; {'; '.join(report)}")


# The settings of a model, inferred from the shapes of its arrays.

Shapes = Mapping[str, tuple[int, ...]]
_Pair = tuple[int, int, evoformer.PairConfig]
MONOMER_POSITIONS = "evoformer/pair_activiations//weights"  # sic
MULTIMER_POSITIONS = "evoformer/~_relative_encoding/position_activations//weights"
OUTGOING = "triangle_multiplication_outgoing/"
# Present in Multimer's version 3.
FUSED = f"evoformer/evoformer_iteration/{OUTGOING}projection//weights"
ONE_TEMPLATE = "evoformer/template_embedding/single_template_embedding/"


def config_from_deepmind(params: Mapping[str, np.ndarray], source: str = "params") -> ModelConfig:
    """Infer the settings of a model from DeepMind's arrays.

    A multimer is recognised by the array of its relative positions, and its version 3 by fused triangle projections.
    Versions 1 and 2 have the same arrays and settings. They differ only in training: version 1 had no loss on the
    distances of chains' centres.
    Settings that no array shows have the published values: the layers of the structure module, its units, the clipping
    of copies in relative positions, and 3 recycles, or up to 20 with a tolerance of 0.5 A in version 3 of a multimer.
    Raises UserError for arrays of another model, or if arrays that determine a setting are missing.
    """
    p = {name.removeprefix(PREFIX): np.shape(array) for name, array in params.items()}
    block = "evoformer/evoformer_iteration/"
    pae = "predicted_aligned_error_head/logits//weights"
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
        # A multimer has 2 max_relative + 2 bins of offsets, 2 max_chain + 2 of copies, and 1 of the same entity.
        if is_multimer:
            max_relative = (p[MULTIMER_POSITIONS][0] - 2 * MultimerConfig().max_chain - 5) // 2
        else:
            max_relative = (p[MONOMER_POSITIONS][0] - 1) // 2
        early_stop = is_multimer and pair_config.fused
        return ModelConfig(
            c_m=c_m,
            c_z=c_z,
            c_s=p["evoformer/single_activations//weights"][1],
            c_e=p["evoformer/extra_msa_activations//weights"][1],
            max_relative=max_relative,
            recycles=20 if early_stop else 3,
            recycle_tolerance=0.5 if early_stop else None,
            evoformer=trunk,
            extra_blocks=p["evoformer/extra_msa_stack/msa_transition/transition1//weights"][0],
            templates=_templates(p, is_multimer),
            structure=_structure(p),
            heads=HeadsConfig(
                distogram_bins=p["distogram_head/half_logits//weights"][1],
                msa_classes=p["masked_msa_head/logits//weights"][1],
                plddt_c=p["predicted_lddt_head/act_0//weights"][1],
                plddt_bins=p["predicted_lddt_head/logits//weights"][1],
                pae=pae in p,
                pae_bins=p.get(pae, (0, 64))[1],
            ),
            multimer=MultimerConfig() if is_multimer else None,
        )
    except (KeyError, IndexError, ValueError) as error:
        raise UserError(
            f"{source}: not the parameters of AlphaFold2 or AlphaFold-Multimer; no usable array {error}"
        ) from error


def _pair(p: Shapes, block: str, order: Literal["multiplication_first", "attention_first"]) -> _Pair:
    """Infer the number of blocks, the channels and the settings of a pair stack."""
    blocks, c, (h, width) = _attention_shape(p, block + "triangle_attention_starting_node/attention")
    fused = block + OUTGOING + "projection//weights" in p
    config = evoformer.PairConfig(
        heads=h,
        head_width=width,
        c_triangle=p[block + OUTGOING + ("center_norm" if fused else "center_layer_norm") + "//scale"][1],
        transition=p[block + "pair_transition/transition1//weights"][2] // c,
        fused=fused,
        order=order,
    )
    return blocks, c, config


def _attention_shape(p: Shapes, scope: str) -> tuple[int, int, tuple[int, int]]:
    """Infer blocks, channels, and (heads, width of a head) of a stacked attention."""
    blocks, c, h, width = p[f"{scope}//query_w"]
    return blocks, c, (h, width)


def _templates(p: Shapes, is_multimer: bool) -> template.TemplateConfig:
    first = "template_pair_embedding_0//weights" if is_multimer else "embedding2d//weights"
    if ONE_TEMPLATE + first not in p:
        return template.TemplateConfig(enabled=False)
    torsion_rows = "evoformer/template_single_embedding//weights" in p
    if is_multimer:
        blocks, c, config = _pair(p, ONE_TEMPLATE + "template_embedding_iteration/", "multiplication_first")
        return template.TemplateConfig(c=c, blocks=blocks, torsion_rows=torsion_rows, unit_vectors=True, pair=config)
    stack = ONE_TEMPLATE + "template_pair_stack/__layer_stack_no_state/"
    blocks, c, config = _pair(p, stack, "attention_first")
    _, heads, width = p["evoformer/template_embedding/attention//query_w"]
    return template.TemplateConfig(
        c=c, blocks=blocks, heads=heads, attention_width=width, torsion_rows=torsion_rows, pair=config
    )


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
