"""The docstring of a layer is its definition: its lines are executed, and compared with what the layer computes."""

import ast
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import warpfold.model.alphafold  # noqa: F401  (defines every layer)
from warpfold.geometry.rigid import Rigid
from warpfold.model.axial import AxialUpdate
from warpfold.model.embed import RelativePosition
from warpfold.model.evoformer import (
    AttentionUpdate,
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
from warpfold.model.pair_bias import AttentionPairBias, PairWeightedAveraging
from warpfold.model.structure import AngleResnet, InvariantPointAttention
from warpfold.model.template import TemplateConfig, TemplatePairStack, TemplatePointwiseAttention
from warpfold.ops.dispatch import always_fast

S, R, C_M, C_Z = 5, 7, 12, 8
# Both sides round in fp64: a few hundred additions of numbers up to 10, and gradients of sums over 49 positions.
CLOSE = 1e-11
INDENT = 8 * " "
FUNCTIONS: dict[str, Any] = {
    **{name: getattr(torch, name) for name in ("einsum", "sigmoid", "softmax", "relu", "cat")},
    "silu": F.silu,
    "softplus": F.softplus,
    "sqrt": lambda x: x**0.5,
    "one_hot": lambda i, n: F.one_hot(i, n).double(),
}
PAIR = PairConfig(heads=2, c_triangle=6, transition=2)
BLOCK = EvoformerConfig(heads=2, transition=2, c_outer=3, pair=PAIR)
TEMPLATES = TemplateConfig(c=C_Z, blocks=2, pair=PairConfig(heads=2, c_triangle=6, order="attention_first"))
# Of each case the layer, and the names of its inputs in the order of a call.
CASES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "row": (lambda: MSARowAttention(C_M, C_Z, heads=2), "m m_mask z"),
    "column": (lambda: MSAColumnAttention(C_M, heads=2), "m m_mask"),
    "global column": (lambda: MSAColumnGlobalAttention(C_M, heads=2), "m m_mask"),
    "transition": (lambda: Transition(C_Z), "z z_mask"),
    "transition, swiglu": (lambda: Transition(C_Z, activation="swiglu"), "z z_mask"),
    "outer product": (lambda: OuterProductMean(C_M, C_Z, c=3), "z m_mask m"),
    "outgoing": (lambda: TriangleMultiplication(C_Z, 6, outgoing=True), "z z_mask"),
    "incoming": (lambda: TriangleMultiplication(C_Z, 6, outgoing=False), "z z_mask"),
    "starting": (lambda: TriangleAttention(C_Z, starting=True, heads=2), "z z_mask"),
    "ending": (lambda: TriangleAttention(C_Z, starting=False, heads=2), "z z_mask"),
    "pair stack": (lambda: PairStack(C_Z, PAIR), "z z_mask"),
    "pair stack, attention first": (lambda: PairStack(C_Z, TEMPLATES.pair), "z z_mask"),
    "block": (lambda: EvoformerBlock(C_M, C_Z, BLOCK), "m z m_mask z_mask"),
    "extra block": (lambda: EvoformerBlock(C_M, C_Z, BLOCK, global_column=True), "m z m_mask z_mask"),
    "pair bias": (lambda: AttentionPairBias(C_M, C_Z, heads=2), "m m_mask z"),
    "pair-weighted": (lambda: PairWeightedAveraging(C_M, C_Z, heads=2, head_width=3), "m z_mask z"),
    "template stack": (lambda: TemplatePairStack(TEMPLATES), "z z_mask"),
    "pointwise": (lambda: TemplatePointwiseAttention(C_Z, 4, heads=2, width=3), "z t template_mask"),
    "positions": (lambda: RelativePosition(C_Z, max_relative=3), "residue_index"),
    "points": (lambda: InvariantPointAttention(C_M, C_Z, 2, 3, 4, 5), "s z frames mask"),
    "angles": (lambda: AngleResnet(C_M, C_Z, 6, blocks=2), "s s_initial"),
}
# What a definition calls the inputs, where it has another letter, or one mask alone.
DIFFERENTIATED = "m", "z", "t", "s", "s_initial"
MASKS = {"m_mask": "mask", "z_mask": "mask"}
LETTERS = {"pair bias": {"m": "s", "m_mask": "mask"}, "template stack": {"z": "t"}}


def definition(layer: type) -> list[str]:
    """The first block of a layer's docstring that is indented by 4 more than the docstring."""
    lines = (layer.__doc__ or "").splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith(INDENT)), len(lines))
    end = next((i for i in range(begin, len(lines)) if not lines[i].startswith(INDENT)), len(lines))
    return [line.removeprefix(INDENT) for line in lines[begin:end]]


def evaluated(layer: nn.Module, given: dict[str, Any]) -> Any:
    """What the definition makes of these inputs: the value of its last line."""
    names = dict(FUNCTIONS)
    for of in (layer, getattr(layer, "attention", None)):
        if of is not None:
            plain = {name: getattr(type(of), name) for name in dir(type(of)) if not name.startswith("_")}
            names |= {name: value for name, value in plain.items() if isinstance(value, bool | int | float | str)}
            names |= {**vars(of), **dict(of.named_children()), **dict(of.named_parameters(recurse=False))}
    names |= given
    *body, last = ast.parse("\n".join(definition(type(layer)))).body
    assert isinstance(last, ast.Expr)
    exec(compile(ast.Module(body, []), "<definition>", "exec"), names)
    return eval(compile(ast.Expression(last.value), "<definition>", "eval"), names)


def inputs() -> dict[str, Any]:
    torch.manual_seed(1)
    m, z, t = torch.randn(S, R, C_M), torch.randn(R, R, C_Z), torch.randn(3, R, R, 4)
    s, s_initial = torch.randn(R, C_M), torch.randn(R, C_Z)
    m_mask, z_mask = torch.rand(S, R) > 0.3, torch.rand(R, R) > 0.3
    m_mask[1], z_mask[2], z_mask[:, 3] = False, False, False
    drawn: dict[str, Tensor] = {
        "m": m,
        "z": z,
        "t": t,
        "s": s,
        "s_initial": s_initial,
        "m_mask": m_mask,
        "z_mask": z_mask,
    }
    drawn |= {"template_mask": torch.tensor([1, 0, 1]), "mask": torch.arange(R) != 4}
    frames = Rigid.from_quaternion7(torch.randn(R, 7).double())
    return {name: x.double() for name, x in drawn.items()} | {"frames": frames, "residue_index": torch.arange(R) * 2}


def answers(output: Any, leaves: list[Tensor]) -> list[Tensor]:
    """The outputs, and the gradient of each leaf."""
    outputs = output if isinstance(output, tuple) else (output,)
    found = torch.autograd.grad(torch.stack([x.sin().sum() for x in outputs]).sum(), leaves)
    return [*outputs, *found]


@pytest.mark.parametrize("fast", [False, True], ids=["by its definition", "by the CPU path"])
@pytest.mark.parametrize("name", CASES)
def test_a_layer_computes_what_its_docstring_says(name: str, fast: bool) -> None:
    make, order = CASES[name]
    layer = make().double().eval()
    for p in layer.parameters():
        nn.init.normal_(p, std=0.4)
    given = {each: inputs()[each] for each in order.split()}
    wanted = [given[each].requires_grad_() for each in order.split() if each in DIFFERENTIATED]
    with always_fast() if fast else nullcontext():
        ours = layer(given) if name == "positions" else layer(*given.values())
    letters = LETTERS.get(name, MASKS if order.count("mask") == 1 else {})
    theirs = evaluated(layer, {letters.get(each, each): x for each, x in given.items()})
    leaves = [*wanted, *layer.parameters()]
    for a, b in zip(answers(ours, leaves), answers(theirs, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=CLOSE, atol=CLOSE)


def test_every_layer_of_the_trunk_has_a_definition() -> None:
    def below(cls: type) -> set[type]:
        return {cls}.union(*(below(c) for c in cls.__subclasses__()))

    trunk = {c for c in below(AxialUpdate) if c.__module__.startswith("warpfold.")} - {AxialUpdate, AttentionUpdate}
    cases = {type(make()) for make, _ in CASES.values()}
    assert trunk <= cases
    assert all(definition(c) for c in cases)


def test_the_triangle_is_where_a_reader_looks_for_it() -> None:
    assert "ikc,jkc->ijc" in inspect.getsource(TriangleMultiplication)
