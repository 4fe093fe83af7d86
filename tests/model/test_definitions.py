"""The docstring of a layer is its definition. Its lines are executed and compared with the layer."""

import ast
import inspect
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers import random_batch, random_complex, tiny_config
from warpfold.geometry import atoms
from warpfold.geometry.rigid import Rigid, update_affine
from warpfold.model.alphafold import AlphaFold, Recycled
from warpfold.model.axial import ALL, AxialUpdate, Executable, PlainExecution
from warpfold.model.clusters import cluster_features
from warpfold.model.embed import (
    ChainRelativePosition,
    ExtraMSAEmbedder,
    InputEmbedder,
    MultimerConfig,
    RecyclingEmbedder,
    RelativePosition,
)
from warpfold.model.evoformer import (
    AttentionUpdate,
    Evoformer,
    EvoformerBlock,
    EvoformerConfig,
    MSAColumnAttention,
    MSAColumnGlobalAttention,
    MSARowAttention,
    OuterProductMean,
    PairConfig,
    PairStack,
    Transition,
    TriangleAttention,
    TriangleMultiplication,
)
from warpfold.model.heads import DistogramHead, LogitsHead, PLDDTHead
from warpfold.model.losses import frame_aligned_point_error
from warpfold.model.pair_bias import AttentionPairBias, PairWeightedAveraging
from warpfold.model.structure import (
    AngleResnet,
    FoldIteration,
    InvariantPointAttention,
    StructureConfig,
    StructureModule,
    normalize_angles,
)
from warpfold.model.template import (
    CHI1,
    PSI,
    ChainTemplateEmbedder,
    ChainTemplatePairEmbedder,
    ChiTemplateRows,
    TemplateConfig,
    TemplateEmbedder,
    TemplatePairEmbedder,
    TemplatePairStack,
    TemplatePointwiseAttention,
    TemplateRows,
    template_pairs,
)
from warpfold.ops.dispatch import always_fast

S, R, C_M, C_Z, T, E = 5, 7, 12, 8, 3, 6
# Both sides round in fp64: a few hundred additions of numbers up to 10, and gradients of sums over 49 positions. The
# others have more additions, or squares of distances.
TOLERANCE = 1e-11
TOLERANCES = {"whole model": 1e-9, "structure module": 1e-10, "points": 1e-10}
INDENT = 8 * " "
FUNCTIONS: dict[str, Any] = {
    **{name: getattr(torch, name) for name in ("atan", "cat", "einsum", "linspace", "relu", "sigmoid", "softmax")},
    **{name: getattr(torch, name) for name in ("stack", "where")},
    **{name: getattr(atoms, name) for name in ("N", "CA", "C", "atom37_to_torsions", "distogram_bins")},
    **{name: getattr(atoms, name) for name in ("frames_to_atom14", "pseudo_beta", "torsions_to_frames")},
    "CHI1": CHI1,
    "PSI": PSI,
    "Rigid": Rigid,
    "linspace": partial(torch.linspace, dtype=torch.double),
    "normalize_angles": normalize_angles,
    "one_hot": lambda i, n: F.one_hot(i.long(), n).double(),
    "pi": math.pi,
    "silu": F.silu,
    "softplus": F.softplus,
    "sqrt": lambda x: x**0.5,
    "template_pairs": template_pairs,
    "update_affine": update_affine,
}
PAIR = PairConfig(heads=2, c_triangle=6, transition=2)
FUSED = replace(PAIR, fused=True)
BLOCK = EvoformerConfig(blocks=2, heads=2, transition=2, c_outer=3, pair=PAIR)
TEMPLATES = TemplateConfig(
    c=C_Z,
    blocks=2,
    heads=2,
    attention_width=3,
    torsion_rows=False,
    pair=PairConfig(heads=2, c_triangle=6, order="attention_first"),
)
STRUCTURE = StructureConfig(layers=3, c=C_M, heads=2, c_hidden=3, qk_points=4, v_points=5, sidechain_c=6)
# Each case has the layer or function, and the names of its arguments in their order.
CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "row": (lambda: MSARowAttention(C_M, C_Z, heads=2), "m m_mask z"),
    "column": (lambda: MSAColumnAttention(C_M, heads=2), "m m_mask"),
    "global column": (lambda: MSAColumnGlobalAttention(C_M, heads=2), "m m_mask"),
    "transition": (lambda: Transition(C_Z), "z z_mask"),
    "transition, swiglu": (lambda: Transition(C_Z, activation="swiglu"), "z z_mask"),
    "outer product": (lambda: OuterProductMean(C_M, C_Z, c=3), "z m_mask m"),
    "outgoing": (lambda: TriangleMultiplication(C_Z, 6, outgoing=True), "z z_mask"),
    "incoming": (lambda: TriangleMultiplication(C_Z, 6, outgoing=False), "z z_mask"),
    "outgoing, fused": (lambda: TriangleMultiplication(C_Z, 6, outgoing=True, fused=True), "z z_mask"),
    "incoming, fused": (lambda: TriangleMultiplication(C_Z, 6, outgoing=False, fused=True), "z z_mask"),
    "starting": (lambda: TriangleAttention(C_Z, starting=True, heads=2), "z z_mask"),
    "ending": (lambda: TriangleAttention(C_Z, starting=False, heads=2), "z z_mask"),
    "pair stack": (lambda: PairStack(C_Z, PAIR), "z z_mask"),
    "pair stack, fused": (lambda: PairStack(C_Z, FUSED), "z z_mask"),
    "pair stack, attention first": (lambda: PairStack(C_Z, TEMPLATES.pair), "z z_mask"),
    "block": (lambda: EvoformerBlock(C_M, C_Z, BLOCK), "m z m_mask z_mask"),
    "extra block": (lambda: EvoformerBlock(C_M, C_Z, BLOCK, global_column=True), "m z m_mask z_mask"),
    "stack": (lambda: Evoformer(C_M, C_Z, BLOCK), "m z m_mask z_mask"),
    "extra stack": (lambda: Evoformer(C_M, C_Z, BLOCK, global_column=True), "m z m_mask z_mask"),
    "pair bias": (lambda: AttentionPairBias(C_M, C_Z, heads=2), "m m_mask z"),
    "pair-weighted": (lambda: PairWeightedAveraging(C_M, C_Z, heads=2, head_width=3), "m z_mask z"),
    "inputs": (lambda: InputEmbedder(C_M, C_Z, 3), "batch"),
    "inputs of a multimer": (lambda: InputEmbedder(C_M, C_Z, 3, MultimerConfig()), "complex"),
    "positions": (lambda: RelativePosition(C_Z, max_relative=3), "batch"),
    "positions in a complex": (lambda: ChainRelativePosition(C_Z, max_relative=3, max_chain=1), "complex"),
    "recycling": (lambda: RecyclingEmbedder(C_M, C_Z), "m_first z beta"),
    "extra MSA": (lambda: ExtraMSAEmbedder(C_M), "batch dtype"),
    "clusters": (lambda: cluster_features, "complex dtype"),
    "template features": (lambda: template_pairs, "template residues rows unit_vectors"),
    "template pairs": (lambda: TemplatePairEmbedder(C_Z, unit_vectors=True), "template dtype rows"),
    "template pairs, no vectors": (lambda: TemplatePairEmbedder(C_Z, unit_vectors=False), "template dtype rows"),
    "template pairs of a chain": (lambda: ChainTemplatePairEmbedder(C_Z, 6), "template asym_id z rows"),
    "template stack": (lambda: TemplatePairStack(TEMPLATES), "z z_mask"),
    "pointwise": (lambda: TemplatePointwiseAttention(C_Z, 4, heads=2, width=3), "z t template_mask"),
    "templates": (lambda: TemplateEmbedder(C_M, C_Z, TEMPLATES), "z z_mask batch"),
    "templates of chains": (lambda: ChainTemplateEmbedder(C_M, C_Z, TEMPLATES), "z z_mask complex"),
    "template rows": (lambda: TemplateRows(C_M), "batch dtype"),
    "template rows of chains": (lambda: ChiTemplateRows(C_M), "complex dtype"),
    "points": (lambda: InvariantPointAttention(C_M, C_Z, 2, 3, 4, 5), "s z frames mask"),
    "angles": (lambda: AngleResnet(C_M, C_Z, 6, blocks=2), "s s_initial"),
    "fold iteration": (lambda: FoldIteration(C_Z, C_Z, STRUCTURE), "s s_initial z affine mask"),
    "structure module": (lambda: StructureModule(C_M, C_Z, STRUCTURE), "s z aatype seq_mask"),
    "distogram": (lambda: DistogramHead(C_Z, 5), "z"),
    "logits": (lambda: LogitsHead(C_Z, 5), "z"),
    "pLDDT": (lambda: PLDDTHead(C_M, 6, 5), "s"),
    "frame aligned point error": (
        lambda: frame_aligned_point_error,
        "frames points true_frames true_points frame_mask point_mask clamp clamped scale softening",
    ),
    "whole model": (lambda: AlphaFold(tiny_config()), "batch msa_first_row pair positions"),
}
# Layers that are called otherwise than with these arguments.
CALLS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        ("inputs", "inputs of a multimer"),
        lambda layer, batch: (layer.msa(batch, torch.double), layer.pair(batch, torch.double, slice(0, R))),
    ),
    "recycling": lambda layer, m_first, z, beta: (layer.msa(m_first), layer.pair(z, beta, slice(0, R))),
    # Its axis of templates is a leading axis of the definition.
    "template pairs of a chain": lambda layer, t, *rest: layer({n: x[None] for n, x in t.items()}, *rest)[0],
    "clusters": lambda function, *arguments: tuple(function(*arguments).values()),
    "structure module": lambda layer, *arguments: ((o := layer(*arguments)).single, o.atom14),
    "whole model": lambda model, *arguments: pass_of_whole_model(model, *arguments),
}
DIFFERENTIATED = "m", "z", "t", "s", "s_initial", "m_first", "points", "pair"
# The names that a definition gives to the arguments, where they differ.
MASKS = {"m_mask": "mask", "z_mask": "mask"}
LETTERS = {"pair bias": {"m": "s", "m_mask": "mask"}, "template stack": {"z": "t"}}
LETTERS |= {"logits": {"z": "x"}, "templates": {}, "templates of chains": {}}


def pass_of_whole_model(model: AlphaFold, batch: dict[str, Tensor], *start: Tensor) -> tuple[Tensor, ...]:
    """Run one pass, and return what the next pass would read."""
    batch = batch | {name: batch[name][None] for name in PER_PASS}
    execution = PlainExecution()
    execution.dtype = torch.double
    for module in model.modules():
        if isinstance(module, Executable):
            module.execution = execution
    last = model.fold(batch, recycles=0, start=Recycled(*start))
    return last.representations.msa_first_row, last.representations.pair, last.structure.final_atom37


def definition(layer: Any) -> list[str]:
    """Return the first block of a docstring that is indented by 4 more than the docstring."""
    lines = (layer.__doc__ or "").splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith(INDENT)), len(lines))
    end = next((i for i in range(begin, len(lines)) if not lines[i].startswith(INDENT)), len(lines))
    return [line.removeprefix(INDENT) for line in lines[begin:end]]


def evaluated(layer: Any, given: dict[str, Any]) -> Any:
    """Execute the definition with these inputs, and return the value of its last line."""
    names = dict(FUNCTIONS)
    for of in (layer, getattr(layer, "attention", None)):
        if isinstance(of, nn.Module):
            plain = {name: getattr(type(of), name) for name in dir(type(of)) if not name.startswith("_")}
            names |= {name: value for name, value in plain.items() if isinstance(value, bool | int | float | str)}
            names |= {**vars(of), **dict(of.named_children()), **dict(of.named_parameters(recurse=False))}
    for name in ("batch", "complex", "template"):
        if name in given:
            names |= {"batch": given[name], **given[name]}
    names |= given | {"dtype": torch.double, "residues": ALL, "rows": slice(0, R), "r": R}
    *body, last = ast.parse("\n".join(definition(type(layer) if isinstance(layer, nn.Module) else layer))).body
    assert isinstance(last, ast.Expr)
    exec(compile(ast.Module(body, []), "<definition>", "exec"), names)
    return eval(compile(ast.Expression(last.value), "<definition>", "eval"), names)


PER_PASS = "msa_feat", "msa_mask", "true_msa", "bert_mask", "extra_msa"
PER_PASS += "extra_has_deletion", "extra_deletion_value", "extra_msa_mask"


def inputs() -> dict[str, Any]:
    torch.manual_seed(1)
    drawn: dict[str, Tensor] = {
        "m": torch.randn(S, R, C_M),
        "z": torch.randn(R, R, C_Z),
        "t": torch.randn(T, R, R, 4),
        "s": torch.randn(R, C_M),
        "s_initial": torch.randn(R, C_Z),
        "m_first": torch.randn(R, C_M),
        "beta": 8 * torch.randn(R, 3),
        "affine": torch.randn(R, 7),
        "m_mask": torch.rand(S, R) > 0.3,
        "z_mask": torch.rand(R, R) > 0.3,
        "template_mask": torch.tensor([1, 0, 1]),
        "mask": torch.arange(R) != 4,
        "seq_mask": torch.arange(R) != 4,
        "points": 5 * torch.randn(R, 3),
        "true_points": 5 * torch.randn(R, 3),
        "frame_mask": torch.rand(R) > 0.3,
        "point_mask": torch.rand(R) > 0.3,
        "msa_first_row": torch.randn(R, tiny_config().c_m),
        "pair": torch.randn(R, R, tiny_config().c_z),
        "positions": 8 * torch.randn(R, 37, 3),
    }
    drawn["m_mask"][1], drawn["z_mask"][2], drawn["z_mask"][:, 3] = False, False, False
    values: dict[str, Any] = {name: x.double() for name, x in drawn.items()}
    frames, true_frames = (Rigid.from_quaternion7(torch.randn(R, 7).double()) for _ in range(2))
    values |= {"frames": frames, "true_frames": true_frames, "aatype": torch.arange(R) * 3}
    values |= {"clamp": 6.0, "clamped": 0.9, "scale": 10.0, "softening": 0.01}
    values |= {"dtype": torch.double, "residues": ALL, "rows": slice(0, R), "unit_vectors": True}
    values["batch"] = random_batch(R, S, E, T)
    values["complex"] = random_complex((3, 2, 2), rows=11, sequences=S, extra=4, templates=T)
    values["complex"]["msa_feat"] = values["batch"]["msa_feat"]
    for batch in (values["batch"], values["complex"]):
        for name, x in batch.items():
            batch[name] = x[0] if name in (*PER_PASS, "centre_rows", "extra_rows", "masked_msa") else x
            if x.is_floating_point() or name in ("alignment_mask", "alignment_deletions"):
                batch[name] = batch[name].double()
    values["asym_id"] = values["complex"]["asym_id"]
    values["template"] = {n: x[0] for n, x in values["batch"].items() if n.startswith("template_") and x.dim() > 1}
    return values


def answers(output: Any, leaves: list[Tensor]) -> list[Tensor]:
    """Return the outputs and the gradient of each leaf."""
    outputs = list(output) if isinstance(output, tuple) else [output]
    sums = [x.sin().sum() for x in outputs if x.requires_grad]
    gradients = torch.autograd.grad(torch.stack(sums).sum(), leaves, materialize_grads=True) if sums else ()
    return [*outputs, *gradients]


@pytest.mark.parametrize("fast", [False, True], ids=["by its definition", "by the CPU path"])
@pytest.mark.parametrize("name", CASES)
def test_a_layer_computes_what_its_docstring_says(name: str, fast: bool) -> None:
    make, order = CASES[name]
    layer = make()
    parameters = list(layer.double().eval().parameters()) if isinstance(layer, nn.Module) else []
    for p in parameters:
        nn.init.normal_(p, std=0.4)
    values = inputs()
    given = {each: values[each] for each in order.split()}
    leaves = [given[each].requires_grad_() for each in order.split() if each in DIFFERENTIATED] + parameters
    with always_fast() if fast else nullcontext():
        ours = CALLS[name](layer, *given.values()) if name in CALLS else layer(*given.values())
    letters = LETTERS.get(name, MASKS if order.count("mask") == 1 else {})
    theirs = evaluated(layer, {letters.get(each, each): x for each, x in given.items()})
    tolerance = TOLERANCES.get(name, TOLERANCE)
    for a, b in zip(answers(ours, leaves), answers(theirs, leaves), strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)


def test_every_layer_of_the_model_has_a_definition() -> None:
    def below(cls: type) -> set[type]:
        return {cls}.union(*(below(c) for c in cls.__subclasses__()))

    layers = {c for c in below(Executable) if c.__module__.startswith("warpfold.model.")}
    bases = {c for c in layers if c.__module__ == AxialUpdate.__module__} | {AttentionUpdate}
    cases = {type(x) if isinstance(x := make(), nn.Module) else x for make, _ in CASES.values()}
    assert layers - bases <= cases
    assert all(definition(c) for c in cases)


def test_the_triangle_is_where_a_reader_looks_for_it() -> None:
    assert "ikc,jkc->ijc" in inspect.getsource(TriangleMultiplication)
