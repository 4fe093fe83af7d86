"""Layers of other models: attention with pair bias and pair-weighted averaging, other biases and divisions."""

import math

import pytest
import torch
from torch import Tensor, nn

from warpfold.model.axial import PLAIN, AxialUpdate, Block, Step, Steps
from warpfold.model.evoformer import (
    GatedAttention,
    MSARowAttention,
    OuterProductMean,
    TriangleAttention,
    TriangleMultiplication,
)
from warpfold.model.layers import LayerNorm, Linear, NoNorm, joined, project
from warpfold.model.pair_bias import AttentionPairBias, PairWeightedAveraging
from warpfold.ops.dispatch import always_fast, using
from warpfold.parallel.plan import Plan
from warpfold.parallel.sharded import unsupported_reason
from warpfold.parallel.slices import layer_in_slices

N, C_S, C_Z = 9, 12, 8
CLOSE = 1e-12  # as in tests/laws/test_slicing.py


def drawn(layer: nn.Module) -> nn.Module:
    """Draw the parameters of a layer in fp64, none of them zero."""
    torch.manual_seed(1)
    layer.double().eval()
    for p in layer.parameters():
        nn.init.normal_(p, std=0.4)
    return layer


def numbers(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mask_of(*shape: int) -> Tensor:
    mask = (numbers(*shape, seed=3) > -0.8).double()
    mask[..., 0] = 1
    return mask


def heads(t: Tensor, count: int) -> Tensor:
    """[*, N, h d] -> [*, h, N, d]."""
    return t.unflatten(-1, (count, -1)).transpose(-2, -3)


def test_attention_with_pair_bias_is_algorithm_24() -> None:
    layer = drawn(AttentionPairBias(C_S, C_Z, heads=3))
    s, z, mask = numbers(2, N, C_S), numbers(2, N, N, C_Z), mask_of(2, N)
    at, a = layer.attention, layer.norm(s)
    q, k, v = (heads(project(a), 3) for project in (at.q, at.k, at.v))
    logits = q @ k.mT / math.sqrt(C_S // 3) + layer.bias(layer.norm_z(z)).movedim(-1, -3)
    weights = logits.masked_fill(mask[:, None, None] == 0, -math.inf).softmax(-1)
    expected = at.out((weights @ v).transpose(-2, -3).flatten(-2) * at.gate(a).sigmoid())
    assert [name for name, p in at.named_parameters() if name.endswith("bias")] == ["q.bias"]
    found = layer(s.unsqueeze(-3), mask.unsqueeze(-2), z, residual=False).squeeze(-3)
    torch.testing.assert_close(found, expected, rtol=CLOSE, atol=CLOSE)


def test_what_was_normalised_and_a_bias_that_was_made_are_taken_as_they_are() -> None:
    layer = drawn(AttentionPairBias(C_S, C_Z, heads=3))
    s, z, mask = numbers(N, C_S), numbers(N, N, C_Z), mask_of(N)
    expected = layer(s[None], mask[None], z, residual=False)
    a, bias = layer.norm(s), layer.bias(layer.norm_z(z))
    layer.norm, layer.bias = NoNorm(), None
    for fast in (False, True):
        with always_fast() if fast else using("definition"):
            found = layer(a[None], mask[None], bias, residual=False)
        torch.testing.assert_close(found, expected, rtol=CLOSE, atol=CLOSE)
    assert not list(NoNorm().parameters())


def test_pair_weighted_averaging_is_algorithm_10() -> None:
    layer = drawn(PairWeightedAveraging(C_S, C_Z, heads=3, head_width=5))
    m, z, mask = numbers(4, N, C_S), numbers(N, N, C_Z), mask_of(N, N)
    mask[2] = 0  # equal weights
    n = layer.norm(m)
    logits = layer.bias(layer.norm_z(z)).movedim(-1, 0).masked_fill(mask == 0, -math.inf)
    weights = logits.softmax(-1).nan_to_num(1 / N)
    averaged = torch.stack([weights @ heads(layer.v(row), 3) for row in n])
    expected = layer.out(averaged.transpose(-2, -3).flatten(-2) * layer.gate(n).sigmoid())
    assert not [name for name, _ in layer.named_parameters() if name.endswith("bias") and "norm" not in name]
    torch.testing.assert_close(layer(m, mask, z, residual=False), expected, rtol=CLOSE, atol=CLOSE)
    whole = layer(m, mask, z)
    torch.testing.assert_close(whole, m + expected, rtol=CLOSE, atol=CLOSE)
    torch.testing.assert_close(layer_in_slices(layer, m, mask, z, N * C_S), whole, rtol=CLOSE, atol=CLOSE)


class OneStep(Block):
    """A block with a single step, pair-weighted averaging."""

    def __init__(self) -> None:
        super().__init__()
        self.average = drawn(PairWeightedAveraging(C_S, C_Z, 3, 5))

    @property
    def steps(self) -> Steps:
        return (Step("m", self.average, "z"),)


def test_a_block_gives_an_averaging_the_mask_of_z() -> None:
    block, m, z, mask = OneStep(), numbers(4, N, C_S), numbers(N, N, C_Z), mask_of(N, N)
    found, _ = PLAIN.block(block, (m, z), (torch.ones(4, N).double(), mask))
    torch.testing.assert_close(found, block.average(m, mask, z), rtol=0, atol=0)
    reason = unsupported_reason(Plan(axial=2), "trunk", block)
    assert reason is not None
    assert "PairWeightedAveraging in trunk (OneStep) is masked by its other state" in reason


@pytest.mark.parametrize("starting", [True, False])
def test_a_bias_that_is_turned_is_that_of_z_turned(starting: bool) -> None:
    layer, z, mask = drawn(TriangleAttention(C_Z, starting, heads=2)), numbers(N, N, C_Z), mask_of(N, N)
    usual = layer(z, mask, residual=False)
    (bias,) = layer.shared(z, mask)
    expected = layer.update(z, mask, (bias.mT,), None, None)
    layer.bias_transposed = True
    torch.testing.assert_close(layer(z, mask, residual=False), expected, rtol=CLOSE, atol=CLOSE)
    assert (usual - expected).abs().max() > 0.01


@pytest.mark.parametrize(
    ("added", "least", "divided"), [(1e-3, 0.0, True), (0.0, 1.0, True), (0.0, 1.0, False), (1e-3, 0.0, False)]
)
def test_outer_products_count_and_divide_as_they_are_told(added: float, least: float, divided: bool) -> None:
    layer = drawn(OuterProductMean(C_S, C_Z, c=3))
    m, mask = numbers(4, N, C_S), mask_of(4, N)
    mask[:, 5] = 0
    layer.count_added, layer.count_least, layer.bias_divided = added, least, divided
    n = layer.norm(m)
    a, b = (project(n) * mask[..., None] for project in (layer.a, layer.b))
    count = (mask.T @ mask + added).clamp(min=least)[..., None]
    products = torch.einsum("sic,sjd->ijcd", a, b).flatten(-2)
    expected = layer.out(products) / count if divided else layer.out(products / count)
    found = layer(torch.zeros(N, N, C_Z).double(), mask, m, residual=False)
    torch.testing.assert_close(found, expected, rtol=CLOSE, atol=CLOSE)


def test_projections_with_and_without_biases_are_joined_in_any_order() -> None:
    linears = [drawn(Linear(C_S, n, bias)) for n, bias in ((3, False), (4, True), (2, True), (5, False))]
    x, norm = numbers(N, C_S), drawn(LayerNorm(C_S))
    weight, bias = joined(torch.float64, *linears)
    assert len(weight) == 14
    assert bias is not None
    assert len(bias) == 9  # what comes later has none
    for of in (norm, NoNorm()):
        for linear, y in zip(linears, project(x, of, *linears)):
            torch.testing.assert_close(y, linear(of(x)), rtol=CLOSE, atol=CLOSE)
    assert joined(torch.float64, linears[0], linears[3])[1] is None


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("outgoing", [False, True])
def test_triangle_layers_need_no_biases(fused: bool, outgoing: bool) -> None:
    """Without biases, also of their norms, the results are those of zero biases, at once and in slices."""
    layers: list[AxialUpdate] = [TriangleMultiplication(C_Z, 6, outgoing, fused=fused)]
    layers.append(TriangleAttention(C_Z, outgoing, heads=2))
    z, mask = numbers(N, N, C_Z), mask_of(N, N)
    for layer in map(drawn, layers):
        for name, p in layer.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(p)
        expected = layer(z, mask)
        for module in layer.modules():
            if isinstance(module, nn.Linear | nn.LayerNorm):
                module.bias = None
        for kernels in ("definition", "fast"):
            with using(kernels), always_fast(), torch.no_grad():  # type: ignore[arg-type]
                for found in (layer(z, mask), layer_in_slices(layer, z, mask, None, 2 * N * C_Z)):
                    torch.testing.assert_close(found, expected, rtol=CLOSE, atol=CLOSE)


def test_a_gated_attention_has_the_biases_that_it_is_told() -> None:
    def biased(**how: object) -> set[str]:
        named = GatedAttention(C_S, 2, **how).named_parameters()  # type: ignore[arg-type]
        return {name.removesuffix(".bias") for name, _ in named if name.endswith("bias")}

    assert biased() == {"gate", "out"}
    assert biased(biased=("q", "v")) == {"q", "v"}


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (MSARowAttention(8, 6, 2, 0.5), (1, 5, 8)),
        (TriangleMultiplication(8, 4, True, 0.5), (1, 5, 8)),
        (TriangleMultiplication(8, 4, False, 0.5), (1, 5, 8)),
        (TriangleAttention(8, True, 2, rate=0.5), (1, 5, 8)),
        (TriangleAttention(8, False, 2, rate=0.5), (4, 1, 8)),
    ],
    ids=["row", "outgoing", "incoming", "starting", "ending"],
)
def test_dropout_is_by_row_but_of_the_ending_node_by_column(layer: AxialUpdate, shape: tuple[int, ...]) -> None:
    """Algorithm 6 says along which axis a dropout draw is shared."""
    factors = layer.train().dropout_factors((4, 5, 8), torch.empty(0))
    assert factors is not None
    assert tuple(factors.shape) == shape
