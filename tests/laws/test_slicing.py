"""The two laws of the axial contract, for every layer that there is, and what follows: execution in slices."""

import pytest
import torch
from torch import nn

import warpfold.model.alphafold  # noqa: F401  (defines every subclass)
from warpfold.model.attention import AttentionUpdate, GatedAttention, Transition
from warpfold.model.axial import COLS, ROWS, AxialUpdate, ChannelProduct
from warpfold.model.layers import DeferredLayerNorm, NoNorm
from warpfold.model.msa import MSAColumnAttention, MSAColumnGlobalAttention, MSARowAttention, OuterProductMean
from warpfold.model.pair import TriangleAttention, TriangleMultiplication
from warpfold.model.pair_bias import AttentionPairBias, PairWeightedAveraging
from warpfold.ops import triangle
from warpfold.ops.attention import gated_attention
from warpfold.ops.dispatch import always_fast
from warpfold.ops.transition import transition
from warpfold.ops.triangle import triangle_multiplication
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import Plan
from warpfold.parallel.slices import cut_axes, delta_in_slices, shared_in_slices

C_M, C_Z, S, R = 16, 12, 7, 10
# Slices may add in another order.  From x to an update there are at most some 150 additions one after another (a norm
# of 16 channels, a product of them, a softmax over 10 keys, a product of 64), of numbers up to 10, and each rounds by
# 2^-53 of these: 2e-13, which norm and softmax may make a few times as much.  Gradients sum over 100 positions besides.
CLOSE = 1e-12


def of_given_bias():
    """Attention with pair bias of what was normalised before, with a bias that was made before."""
    layer = AttentionPairBias(C_M, C_Z, heads=C_Z)
    layer.norm, layer.bias, layer.attention = NoNorm(), None, GatedAttention(C_M, C_Z, 3, biased=("v", "out"))
    return layer


def transposed(layer):
    layer.bias_transposed = True
    return layer


CASES = {
    "row": lambda: MSARowAttention(C_M, C_Z, heads=4),
    "column": lambda: MSAColumnAttention(C_M, heads=4),
    "global column": lambda: MSAColumnGlobalAttention(C_M, heads=4),
    "transition of m": lambda: Transition(C_M),
    "transition of z": lambda: Transition(C_Z),
    "transition, swiglu": lambda: Transition(C_Z, activation="swiglu"),
    "outer product": lambda: OuterProductMean(C_M, C_Z, c=5),
    "outgoing": lambda: TriangleMultiplication(C_Z, 6, outgoing=True),
    "incoming": lambda: TriangleMultiplication(C_Z, 6, outgoing=False),
    "outgoing, fused": lambda: TriangleMultiplication(C_Z, 6, outgoing=True, fused=True),
    "incoming, fused": lambda: TriangleMultiplication(C_Z, 6, outgoing=False, fused=True),
    "starting": lambda: TriangleAttention(C_Z, starting=True, heads=3),
    "ending": lambda: TriangleAttention(C_Z, starting=False, heads=3, head_width=5),
    "starting, its bias transposed": lambda: transposed(TriangleAttention(C_Z, starting=True, heads=3)),
    "ending, its bias transposed": lambda: transposed(TriangleAttention(C_Z, starting=False, heads=3)),
    "pair bias": lambda: AttentionPairBias(C_M, C_Z, heads=4),
    "pair bias, given": of_given_bias,
    "pair-weighted": lambda: PairWeightedAveraging(C_M, C_Z, heads=3, head_width=5),
}
READS_M = ("row", "column", "global column", "transition of m", "pair bias", "pair bias, given", "pair-weighted")


def make(name, seed=0, batch=()):
    """A layer with random parameters (none is zero), and x, mask, other for it, in fp64."""
    torch.manual_seed(seed)
    layer = CASES[name]().double().train()
    for p in layer.parameters():
        nn.init.normal_(p, std=0.4)
    layer.noise.seed(3, seed)
    m, m_mask = torch.randn(*batch, S, R, C_M).double(), (torch.rand(*batch, S, R) > 0.2).double()
    z, z_mask = torch.randn(*batch, R, R, C_Z).double(), (torch.rand(*batch, R, R) > 0.2).double()
    if name == "outer product":
        return layer, z, m_mask, m
    if layer.mask_of_other:
        return layer, m, z_mask, z
    return (layer, m, m_mask, z) if name in READS_M else (layer, z, z_mask, None)


def all_subclasses(cls):
    return {cls}.union(*(all_subclasses(c) for c in cls.__subclasses__()))


def test_every_layer_has_a_case():
    ours = {
        c
        for c in all_subclasses(AxialUpdate) - {AxialUpdate, AttentionUpdate, ChannelProduct}
        if c.__module__.startswith("warpfold.")
    }
    assert ours == {type(make()) for make in CASES.values()}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [1, 3, 64])
def test_shared_is_the_join_of_shared_of_slices(name, size):
    layer, x, mask, other = make(name)
    _, expected = layer.local_and_shared(DeferredLayerNorm(layer.operand(x, other), layer.norm), mask, other)
    got = shared_in_slices(layer, layer.operand(x, other), mask, other, size * R * C_Z)
    assert len(got) == len(expected)
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [1, 3])
def test_update_is_the_join_of_update_of_slices(name, size):
    layer, x, mask, other = make(name)
    n = DeferredLayerNorm(layer.operand(x, other), layer.norm)
    _, shared = layer.local_and_shared(n, mask, other)
    expected = layer.update(layer.local(n, mask), shared, mask)
    axes = [layer.axis] if layer.axis is not None else [ROWS, COLS]  # None: anywhere
    for axis in axes:
        reads = axis if layer.operand_axis is None else layer.operand_axis
        cuts = zip(n.x.split(size, reads), mask.split(size, reads + 1))
        local = (
            (layer.local(DeferredLayerNorm(piece, layer.norm), piece_mask), piece_mask) for piece, piece_mask in cuts
        )
        parts = [layer.update(piece, shared, piece_mask) for piece, piece_mask in local]
        torch.testing.assert_close(torch.cat(parts, axis), expected, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_the_update_in_slices_is_the_update(name, batch, rows):
    """Without gradients; and with them, where each slice is computed again."""
    layer, x, mask, other = make(name, batch=batch)
    expected = layer.delta(x, mask, other)
    with torch.no_grad():
        torch.testing.assert_close(delta_in_slices(layer, x, mask, other, rows), expected, rtol=CLOSE, atol=CLOSE)
    wanted = [t.requires_grad_() for t in (x, other) if t is not None] + list(layer.parameters())
    found = [layer.delta(x, mask, other), delta_in_slices(layer, x, mask, other, rows)]
    gradients = [torch.autograd.grad(dx.square().sum(), wanted, allow_unused=True) for dx in found]
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b, rtol=CLOSE, atol=1000 * CLOSE)


@pytest.mark.parametrize("name", [name for name, make in CASES.items() if make().shared_cuts is not None])
@pytest.mark.parametrize("size", [1, 3])
def test_update_may_be_cut_where_what_is_shared_is(name, size):
    """By those axes of x; and `local` of all is the join of that of slices, along the operand's axis."""
    layer, x, mask, other = make(name)
    n = DeferredLayerNorm(layer.operand(x, other), layer.norm)
    local, shared = layer.local_and_shared(n, mask, other)
    cuts = zip(n.x.split(size, layer.operand_axis), mask.split(size, layer.operand_axis + 1))
    parts = [layer.local(DeferredLayerNorm(piece, layer.norm), piece_mask) for piece, piece_mask in cuts]
    for whole, *slices in zip(local, *parts):
        torch.testing.assert_close(torch.cat(slices, layer.operand_axis), whole, rtol=CLOSE, atol=CLOSE)
    pieces = zip(*(t.split(size, layer.join_axis) for t in shared))
    found = torch.cat([layer.update(local, piece, mask) for piece in pieces], layer.shared_cuts)
    torch.testing.assert_close(found, layer.update(local, shared, mask), rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("name", CASES)
def test_local_and_shared_are_both(name):
    layer, x, mask, other = make(name)
    n = DeferredLayerNorm(layer.operand(x, other), layer.norm)
    local, shared = layer.local_and_shared(n, mask, other)
    torch.testing.assert_close(local, tuple(layer.local(n, mask)), rtol=CLOSE, atol=CLOSE)
    of_other = (other, mask) if layer.mask_of_other else (other,)
    expected = layer.shared_of(*of_other) if layer.shared_from_other else layer.shared(n, mask)
    torch.testing.assert_close(shared, tuple(expected), rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dropped", [False, True])
def test_add_is_the_residual_and_the_update(name, dropped):
    layer, x, mask, other = make(name)
    layer.train(dropped)
    local, shared = layer.local_and_shared(DeferredLayerNorm(layer.operand(x, other), layer.norm), mask, other)
    factors = layer.dropout_factors(x.shape, x)
    dx = layer.update(local, shared, mask)
    expected = x + (dx if factors is None else dx * factors)
    torch.testing.assert_close(layer.add(x, local, shared, mask, factors), expected, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dropped", [False, True])
def test_whole_is_add_of_all_of_x_in_values_and_every_gradient(name, dropped):
    layer, x, mask, other = make(name)
    layer.train(dropped)
    results = []
    for whole in (type(layer).whole, AxialUpdate.whole):
        inputs = [t.clone().requires_grad_() for t in (x, other) if t is not None]
        ins = inputs if other is not None else [*inputs, None]
        out = whole(layer, ins[0], mask, ins[1], layer.dropout_factors(x.shape, x))
        leaves = inputs + list(layer.parameters())
        grads = torch.autograd.grad(out.sin().sum(), leaves, allow_unused=True)
        results.append([out, *(torch.zeros_like(l) if g is None else g for l, g in zip(leaves, grads))])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=100 * CLOSE, atol=100 * CLOSE)


WHOLE = ("row", "column", "outgoing", "incoming, fused", "starting", "ending")
WHOLE += ("starting, its bias transposed", "ending, its bias transposed", "pair bias")


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("dropped", [False, True])
def test_whole_is_add_where_it_is_the_registered_operation(name, dropped, monkeypatch):
    asked = []
    for operation in (gated_attention, triangle_multiplication):  # though these are few numbers
        monkeypatch.setattr(operation, "prefer_definition", lambda *_: asked.append(1))
    test_whole_is_add_of_all_of_x_in_values_and_every_gradient(name, dropped)
    assert asked == [1]


@pytest.mark.parametrize("name", CASES)
def test_delta_is_the_update_alone_in_values_and_every_gradient(name):
    """And x with that and the dropout factors on it is the whole."""
    layer, x, mask, other = make(name)
    results, factors = [], layer.dropout_factors(x.shape, x)
    for delta in (type(layer).delta, AxialUpdate.delta):
        inputs = [t.clone().requires_grad_() for t in (x, other) if t is not None]
        with always_fast():
            dx = delta(layer, inputs[0], mask, inputs[1] if other is not None else None)
        leaves = inputs + list(layer.parameters())
        grads = torch.autograd.grad(dx.sin().sum(), leaves, allow_unused=True)
        results.append([dx, *(torch.zeros_like(l) if g is None else g for l, g in zip(leaves, grads))])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=100 * CLOSE, atol=100 * CLOSE)
    dx = results[0][0]
    whole = layer.whole(x, mask, other, factors)
    torch.testing.assert_close(whole, x + (dx if factors is None else dx * factors), rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("gradients", [False, True])
def test_delta_is_the_join_of_delta_of_slices(name, gradients):
    layer, x, mask, other = make(name, batch=(2,))
    operand = layer.operand(x, other)
    _, shared = layer.local_and_shared(DeferredLayerNorm(operand, layer.norm), mask, other)
    axis, operand_axis = cut_axes(layer, ROWS)
    parts = []
    with torch.set_grad_enabled(gradients), always_fast():
        for start in range(0, x.shape[axis], 3):
            length = min(3, x.shape[axis] - start)
            part, read = x.narrow(axis, start, length), operand.narrow(operand_axis, start, length)
            n_mask = mask if layer.mask_of_other else mask.narrow(operand_axis + 1, start, length)
            parts.append(layer.delta_slice(part, DeferredLayerNorm(read, layer.norm), shared, n_mask))
        expected = layer.delta(x, mask, other)
    torch.testing.assert_close(torch.cat(parts, axis), expected, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [1, 4, 64])
def test_chunked_is_whole_in_values_and_every_gradient(name, size):
    layer, x, mask, other = make(name)
    results = []
    for plan in (Plan(), Plan(chunk=size)):
        Execution(plan).bind(layer)
        inputs = [t.clone().requires_grad_() for t in (x, other) if t is not None]
        out = layer(inputs[0], mask, inputs[1] if other is not None else None)
        leaves = inputs + list(layer.parameters())
        grads = torch.autograd.grad(out.sin().sum(), leaves, allow_unused=True)
        results.append([out, *(torch.zeros_like(l) if g is None else g for l, g in zip(leaves, grads))])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=100 * CLOSE, atol=100 * CLOSE)


@pytest.mark.parametrize("name", CASES)
def test_in_place_is_whole_and_writes_over_x(name):
    layer, x, mask, other = make(name)
    expected = layer(x, mask, other)
    Execution(Plan(chunk=3, in_place=True)).bind(layer)
    with torch.no_grad():
        written = x.clone()
        got = layer(written, mask, other)
    assert got.data_ptr() == written.data_ptr()
    torch.testing.assert_close(got, expected.detach(), rtol=CLOSE, atol=CLOSE)


def test_in_place_refuses_gradients():
    layer, x, mask, other = make("outgoing")
    Execution(Plan(chunk=3, in_place=True)).bind(layer)
    with pytest.raises(RuntimeError, match="no_grad"):
        layer(x, mask, other)


@pytest.mark.parametrize("name", CASES)
def test_leading_axes_are_examples(name):
    layer, x, mask, other = make(name, batch=(2,))
    layer.eval()
    got = layer(x, mask, other)
    for i in range(2):
        alone = layer(x[i], mask[i], None if other is None else other[i])
        torch.testing.assert_close(got[i], alone, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fully_masked_is_finite_with_finite_gradients(name, dtype):
    layer, x, mask, other = make(name)
    layer = layer.float()
    x = x.to(dtype).requires_grad_()
    out = layer(x, torch.zeros_like(mask, dtype=torch.float32), None if other is None else other.to(dtype))
    assert out.dtype == dtype
    assert out.isfinite().all()
    out.float().square().sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("name", ["row", "column", "global column", "outer product", "pair bias"])
def test_a_masked_sequence_reaches_no_other(name):
    layer, x, mask, other = make(name)
    layer.eval()
    mask = mask.clone()
    mask[3] = 0
    m = other if name == "outer product" else x
    changed = m.clone()
    changed[3] += 5
    args = (x, mask, changed) if name == "outer product" else (changed, mask, other)
    rest = [i for i in range(x.shape[0]) if i != 3 or name == "outer product"]
    expected = layer.delta(x, mask, other)[rest]
    torch.testing.assert_close(layer.delta(*args)[rest], expected, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("name", ["outgoing", "incoming", "starting", "ending", "ending, its bias transposed"])
def test_a_masked_residue_reaches_no_other_pair(name):
    layer, x, _, _ = make(name)
    layer.eval()
    present = torch.ones(R).double()
    present[4] = 0
    mask = present[:, None] * present
    other = x.clone()
    other[4] += 5
    other[:, 4] += 5
    keep = mask.bool()
    torch.testing.assert_close(layer.delta(other, mask)[keep], layer.delta(x, mask)[keep], rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
def test_a_slice_at_once_is_add_of_the_slice(name, dropped, gradients, monkeypatch):
    monkeypatch.setattr(triangle, "LEAST", 0)  # though these are few numbers
    for operation in (gated_attention, transition):
        monkeypatch.setattr(operation, "prefer_definition", None)
    layer, x, mask, other = make(name, batch=(2,))
    layer.train(dropped)
    factors = layer.dropout_factors(x.shape, x)
    operand = layer.operand(x, other)
    _, shared = layer.local_and_shared(DeferredLayerNorm(operand, layer.norm), mask, other)
    axis, operand_axis = cut_axes(layer, ROWS)
    part, read, n_mask = x.narrow(axis, 2, 3), operand.narrow(operand_axis, 2, 3), mask.narrow(operand_axis + 1, 2, 3)
    if factors is not None and factors.shape[axis] != 1:
        factors = factors.narrow(axis, 2, 3)
    n = DeferredLayerNorm(read, layer.norm)
    with torch.set_grad_enabled(gradients):
        found = layer.add_slice(part, n, shared, n_mask, factors)
        expected = AxialUpdate.add_slice(layer, part, n, shared, n_mask, factors)
    torch.testing.assert_close(found, expected, rtol=CLOSE, atol=CLOSE)
