"""Our tensors and DeepMind's arrays, one to one, both ways.

Every tensor of the model has the numbers of one array of DeepMind's: a Linear's weight is transposed and its
channels are split into heads, and the blocks of a stack stand along a leading axis.  The tables below say which.
Multimer's structure module alone has them in another order, and keys and values apart: `_point_attention`.
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

# Where each child of a module stands in DeepMind's scopes.  A name that begins with // is an array in the scope of the
# module itself: for a Linear its weight, and after a comma its bias.
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
        "column": "msa_column_attention",  # msa_column_global_attention in the extra MSA stack
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
    """Which outputs of a Linear an array of DeepMind's holds, and in which order."""

    axes: tuple[int, ...]  # ours, as axes
    start: int = 0
    stop: int | None = None  # from start to stop along the last of these axes
    order: tuple[int, ...] = (0, 1)  # theirs: these axes in this order, all but the first flattened

    @property
    def shape(self) -> tuple[int, ...]:
        """The axes of the array's outputs."""
        sizes = [*self.axes[:-1], len(range(self.axes[-1])[self.start : self.stop])]
        first, *others = (sizes[axis] for axis in self.order)
        return first, int(np.prod(others))

    def view(self, x: torch.Tensor) -> torch.Tensor:
        """Return a view of x [..., outputs] as [..., axes in their order]."""
        x = x.unflatten(-1, self.axes)[..., self.start : self.stop]
        return x.permute(*range(x.dim() - len(self.axes)), *(axis - len(self.axes) for axis in self.order))


@dataclass(frozen=True)
class Array:
    """The position of one of our tensors, or of some outputs of it, among DeepMind's arrays."""

    ours: str  # name in the state dict
    theirs: str  # scope//name
    shape: tuple[int, ...]  # theirs, without the axis of blocks
    block: int | None = None  # which block of a stacked array
    blocks: int = 1
    outputs: Outputs | None = None  # None: all, in our order

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        return self.shape if self.block is None else (self.blocks, *self.shape)

    def put(self, array: np.ndarray, tensor: torch.Tensor) -> None:
        """Write DeepMind's array to where its numbers are in our tensor."""
        view = self._view(tensor)
        array = array if self.block is None else array[self.block]
        part = torch.from_numpy(np.array(array, array.dtype.newbyteorder("=")))
        view.copy_(part.reshape(view.shape))

    def to_theirs(self, tensor: torch.Tensor) -> np.ndarray:
        """Return the array, of one block, whose numbers `put` would write to our tensor."""
        return self._view(tensor.detach().cpu()).reshape(self.shape).numpy()

    def _view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of our tensor that has DeepMind's axes: [c_in..., c_out...] of a weight [c_out, c_in]."""
        x = tensor.T if tensor.dim() == 2 else tensor
        return x.view(self.shape) if self.outputs is None else self.outputs.view(x)


def arrays(module: nn.Module, scope: str = "", name: str = "") -> Iterator[Array]:
    """Yield every tensor of `module`, with its array of DeepMind's under `scope`."""
    for child_name, child in module.named_children():
        if isinstance(child, Noise):  # it has no weights
            continue
        ours = f"{name}.{child_name}" if name else child_name
        if isinstance(child, nn.ModuleList) and child_name == "blocks":
            for index, block in enumerate(child):
                for a in arrays(block, scope, f"{ours}.{index}"):
                    yield replace(a, block=index, blocks=len(child))
            continue
        if isinstance(module, InvariantPointAttention) and child_name in (parts := _point_attention(module)):
            assert isinstance(child, Linear)
            for theirs, outputs in parts[child_name]:
                inner, shape = _join(scope, theirs), (child.in_features, *outputs.shape)
                yield Array(f"{ours}.weight", f"{inner}//weights", shape, outputs=outputs)
                if child.bias is not None:
                    yield Array(f"{ours}.bias", f"{inner}//bias", outputs.shape, outputs=outputs)
            continue
        theirs = _scopes(module)[child_name]
        if isinstance(child, nn.ModuleList):  # haiku numbers repeated layers: name, name_1, name_2
            for index, layer in enumerate(child):
                assert isinstance(layer, Linear)
                numbered = theirs.format(index) if "{}" in theirs else f"{theirs}_{index}" if index else theirs
                yield from _leaf(module, child_name, layer, scope, numbered, f"{ours}.{index}")
        elif isinstance(child, Linear | LayerNorm):
            yield from _leaf(module, child_name, child, scope, theirs, ours)
        else:
            yield from arrays(child, _join(scope, theirs), ours)
    for key, _ in module.named_parameters(recurse=False):
        yield Array(f"{name}.{key}" if name else key, f"{scope}//{key}", tuple(getattr(module, key).shape))


def _scopes(module: nn.Module) -> dict[str, str]:
    if isinstance(module, evoformer.TriangleMultiplication) and module.fused:
        return FUSED_TRIANGLE
    table = SCOPES.get(type(module), {})
    if isinstance(module, FoldIteration) and _is_multimers(module.invariant_point_attention):
        table = table | {"affine_update": "quat_rigid/rigid"}
    if isinstance(module, evoformer.MSAStack) and isinstance(module.column, evoformer.MSAColumnGlobalAttention):
        return table | {"column": "msa_column_global_attention"}
    # A module whose parts are named as DeepMind's needs no table.
    return {child: child for child, _ in module.named_children()} | table


def _is_multimers(attention: InvariantPointAttention) -> bool:
    return attention.q_scalar.bias is None


def _point_attention(module: InvariantPointAttention) -> dict[str, list[tuple[str, Outputs]]]:
    """Return the arrays of Multimer's queries, keys and values: under our names their scopes and outputs.

    In DeepMind's arrays heads are outermost, and a head has all x of its points, then all y and all z.
    """
    if not _is_multimers(module):
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
    return "/".join(part for part in (scope.rstrip("/"), theirs) if part)  # PREFIX ends in a slash


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
    if isinstance(module, template.ChainTemplatePairEmbedder) and c_in == 1:  # of a scalar they have no axis
        return (c_out,), (c_out,)
    split = isinstance(module, evoformer.GatedAttention | template.TemplatePointwiseAttention)
    if split or (isinstance(module, evoformer.MSAColumnGlobalAttention) and child not in ("k", "v")):
        h = int(module.heads)  # type: ignore[arg-type]
        if child == "out":
            return (h, c_in // h, c_out), (c_out,)
        return (c_in, h, c_out // h), (h, c_out // h)
    return (c_in, c_out), (c_out,)


def from_deepmind(module: nn.Module, params: Mapping[str, np.ndarray], scope: str = "", source: str = "params") -> None:
    """Load DeepMind's arrays, named scope//name, into `module`, strictly.

    Errors: UserError that names missing, surplus and misshapen arrays; nothing is loaded then.
    """
    check_arrays(module, params, scope, source)
    state = {name: torch.empty_like(x, device="cpu") for name, x in module.state_dict().items()}
    for a in arrays(module, scope):
        a.put(params[a.theirs], state[a.ours])
    module.load_state_dict(state, strict=True)


def check_arrays(module: nn.Module, params: Mapping[str, np.ndarray], scope: str = "", source: str = "params") -> None:
    """Raise UserError that names missing, surplus and misshapen arrays."""
    wanted = list(arrays(module, scope))
    missing = sorted({a.theirs for a in wanted} - params.keys())
    surplus = sorted(params.keys() - {a.theirs for a in wanted})
    misshapen = sorted(
        {
            f"{a.theirs} {list(params[a.theirs].shape)}, expected {list(a.stacked_shape)} of floating-point numbers"
            for a in wanted
            if a.theirs in params and (params[a.theirs].shape != a.stacked_shape or params[a.theirs].dtype.kind != "f")
        }
    )
    refuse(source, missing, surplus, misshapen)


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
    """Raise UserError in one line that names what does not fit, some of each kind, if there is anything."""
    report = [
        f"{len(names)} {what}: {listed(names)}"
        for what, names in (("missing", missing), ("surplus", surplus), ("misshapen", misshapen))
        if names
    ]
    if report:
        raise UserError(f"{source}: not the parameters of this model; {'; '.join(report)}")


# Its settings, read from the shapes of the arrays

Shapes = Mapping[str, tuple[int, ...]]
_Pair = tuple[int, int, evoformer.PairConfig]
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
        if (
            is_multimer
        ):  # offsets, and a bin for other chains; copies, and one; one bin says whether the entity is the same
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
            heads=_heads(p),
            multimer=MultimerConfig() if is_multimer else None,
        )
    except (KeyError, IndexError, ValueError) as error:
        raise UserError(
            f"{source}: not the parameters of AlphaFold2 or AlphaFold-Multimer; no usable array {error}"
        ) from error


def _pair(p: Shapes, block: str, order: Literal["multiplication_first", "attention_first"]) -> _Pair:
    """Return the number of blocks, the channels and the settings of a pair stack."""
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
    """Return blocks, channels, (heads, width of a head) of a stacked attention."""
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
