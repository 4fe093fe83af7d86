"""The two requirements of an `AxialUpdate` for all layers, and their consequence: execution in slices."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import warpfold.model.alphafold  # noqa: F401  (defines every subclass)
from warpfold.model.axial import COLS, ROWS, AxialUpdate
from warpfold.model.evoformer import (
    AttentionUpdate,
    GatedAttention,
    MSAColumnAttention,
    MSAColumnGlobalAttention,
    MSARowAttention,
    OuterProductMean,
    Transition,
    TriangleAttention,
    TriangleMultiplication,
)
from warpfold.model.layers import NoNorm
from warpfold.model.pair_bias import AttentionPairBias, PairWeightedAveraging
from warpfold.ops.dispatch import always_fast, using
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import Plan
from warpfold.parallel.slices import layer_in_slices, mask_slice, shared_in_slices, split_rows

C_M, C_Z, S, R = 16, 12, 7, 10
# Slices may change the order of sums. There are at most about 150 successive additions (a norm of 16 channels, products
# of 16 and 64 channels, a softmax over 10 keys) of numbers up to 10, and each rounds by 2^-53 of these: 2e-13. Norm and
# softmax may multiply this by a small factor. Gradients are sums over 100 positions.
CLOSE = 1e-12


def of_given_bias():
    """Return an attention with pair bias that expects a normalised input and a given bias."""
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
    """Return a layer with random parameters (none is 0), and x, mask and other for it, in fp64."""
    torch.manual_seed(seed)
    layer = CASES[name]().double().train()
    for p in layer.parameters():
        nn.init.normal_(p, std=0.4)
    layer.noise.seed(3, seed)
    m, m_mask = torch.randn(*batch, S, R, C_M).double(), (torch.rand(*batch, S, R) > 0.2).double()
    z, z_mask = torch.randn(*batch, R, R, C_Z).double(), (torch.rand(*batch, R, R) > 0.2).double()
    if name == "outer product":
        return layer, z, m_mask, m
    if name == "pair-weighted":
        return layer, m, z_mask, z
    return (layer, m, m_mask, z) if name in READS_M else (layer, z, z_mask, None)


def all_subclasses(cls):
    return {cls}.union(*(all_subclasses(c) for c in cls.__subclasses__()))


def in_parts(layer, x, mask, other, factors=None, add=True):
    """Compute a layer in parts by the definition of each operation, as a rank does."""
    read = layer.named(layer.reads, x, other)
    with using("definition"):
        shared = layer.shared(layer.named(layer.shares, x, other), mask) if layer.shares else None
        return layer.update(layer.prepare(read, mask), mask, shared, x if add else None, factors)


def with_gradients(compute, layer, x, other):
    """Compute from copies of x and other, and return the result and all gradients."""
    inputs = [t.clone().requires_grad_() for t in (x, other) if t is not None]
    out = compute(*inputs, *([None] if other is None else []))
    leaves = inputs + list(layer.parameters())
    found = torch.autograd.grad(out.sin().sum(), leaves, allow_unused=True)
    return [out, *(torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found))]


def assert_same(found, expected, close=CLOSE):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=close, atol=close)


def test_every_layer_has_a_case():
    ours = {c for c in all_subclasses(AxialUpdate) if c.__module__.startswith("warpfold.")}
    assert ours - {AxialUpdate, AttentionUpdate} == {type(make()) for make in CASES.values()}


@pytest.mark.parametrize("name", [name for name, make in CASES.items() if make().shares])
def test_shared_is_the_join_of_shared_of_slices(name):
    """Test all axes that allow slices; with gradients, the slices are concatenated, and otherwise written in place."""
    layer, x, mask, other = make(name)
    source = layer.named(layer.shares, x, other)
    expected = layer.shared(source, mask)
    # A bias is computed position by position.
    either = isinstance(layer, AttentionUpdate)
    for axis in (ROWS, COLS) if either else [layer.read_axis]:
        for rows, gradients in ((1, True), (3, False), (64, False)):
            with torch.set_grad_enabled(gradients):
                found = shared_in_slices(layer, source, mask, axis, rows * source.shape[-1] * source[..., 0, 0].numel())
            assert_same(found, expected)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("prepared", [False, True])
def test_update_is_the_join_of_update_of_slices(name, gradients, prepared):
    """Test prepared slices and single operations, with and without x and dropout."""
    layer, x, mask, other = make(name, batch=(2,))
    read = layer.named(layer.reads, x, other)
    factors = layer.dropout_factors(x.shape, x)
    for axis in [layer.axis] if layer.axis is not None else [ROWS, COLS]:
        read_axis = axis if layer.read_axis is None else layer.read_axis
        for add in (True, False):
            expected = in_parts(layer, x, mask, other, factors if add else None, add)
            with torch.set_grad_enabled(gradients), always_fast():
                shared = layer.shared(layer.named(layer.shares, x, other), mask) if layer.shares else None
                parts = []
                for part in split_rows(x.shape[axis], 3):
                    cut = part.start, part.stop - part.start
                    n_mask = mask_slice(layer, layer.reads, mask, read_axis, part)
                    piece = read.narrow(read_axis, *cut)
                    piece = layer.prepare(piece, n_mask) if prepared else piece
                    drawn = factors if factors is None or factors.shape[axis] == 1 else factors.narrow(axis, *cut)
                    onto = (x.narrow(axis, *cut), drawn) if add else (None, None)
                    parts.append(layer.update(piece, n_mask, shared, *onto))
            torch.testing.assert_close(torch.cat(parts, axis), expected, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("name", [name for name, make in CASES.items() if make().pieces_axis is not None])
@pytest.mark.parametrize("size", [1, 3])
def test_update_may_be_cut_where_what_is_shared_is(name, size):
    """Test the axes of x for which `shared` may be split.

    Furthermore, `prepare` of the whole is the concatenation of `prepare` of slices, along the axis that is read.
    """
    layer, x, mask, other = make(name)
    read, axis = layer.named(layer.reads, x, other), layer.read_axis
    prepared, shared = layer.prepare(read, mask), layer.shared(read, mask)
    cuts = zip(read.split(size, axis), mask.split(size, axis + 1))
    assert_same((torch.cat(parts, axis) for parts in zip(*(layer.prepare(*cut) for cut in cuts))), prepared)
    pieces = zip(*(t.split(size, layer.join_axis(axis)) for t in shared), x.split(size, layer.pieces_axis))
    found = [layer.update(prepared, mask, tuple(piece), part, None) for *piece, part in pieces]
    assert_same([torch.cat(found, layer.pieces_axis)], [layer.update(prepared, mask, shared, x, None)])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("rows", "dropped", "batch"), [(1, True, ()), (3, False, (2,)), (64, True, (2,))])
def test_at_once_and_in_slices_it_is_its_parts_in_values_and_every_gradient(name, rows, dropped, batch):
    """Test a single operation, the slices of a plan, and slices with recomputation for a caller."""
    layer, x, mask, other = make(name, batch=batch)
    layer.train(dropped)
    factors = layer.dropout_factors(x.shape, x)
    expected = with_gradients(lambda x, other: in_parts(layer, x, mask, other, factors), layer, x, other)
    with always_fast(), using("strict"):
        for plan in (Plan(kernels="strict"), Plan(chunk=rows, kernels="strict")):
            Execution(plan).bind(layer)
            found = with_gradients(lambda x, other: layer(x, mask, other), layer, x, other)
            assert_same(found, expected, 100 * CLOSE)
    if dropped:
        return
    most = rows * x.numel() // x.shape[layer.axis or ROWS]
    how = {"residual": False, "recompute": True}
    expected = with_gradients(lambda x, other: in_parts(layer, x, mask, other, add=False), layer, x, other)
    for compute in (
        lambda x, other: layer(x, mask, other, residual=False),
        lambda x, other: layer_in_slices(layer, x, mask, other, most, **how),
    ):
        assert_same(with_gradients(compute, layer, x, other), expected, 100 * CLOSE)


@pytest.mark.parametrize("name", CASES)
def test_without_gradients_in_slices_and_in_place_it_is_its_parts(name):
    layer, x, mask, other = make(name)
    expected = in_parts(layer, x, mask, other, layer.dropout_factors(x.shape, x)).detach()
    for plan, fast in (
        (Plan(chunk=3), True),
        (Plan(chunk=3, in_place=True), True),
        (Plan(chunk=1, in_place=True), False),
    ):
        Execution(plan).bind(layer)
        with torch.no_grad(), always_fast() if fast else nullcontext():
            given = x.clone()
            found = layer(given, mask, other)
        assert (found.data_ptr() == given.data_ptr()) == plan.in_place
        assert_same([found], [expected])


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
def test_fully_masked_is_finite_with_finite_gradients(name):
    dtype = (torch.float32, torch.bfloat16)[[*CASES].index(name) % 2]
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
    expected = layer(x, mask, other, residual=False)[rest]
    torch.testing.assert_close(layer(*args, residual=False)[rest], expected, rtol=CLOSE, atol=CLOSE)


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
    torch.testing.assert_close(
        layer(other, mask, residual=False)[keep], layer(x, mask, residual=False)[keep], rtol=CLOSE, atol=CLOSE
    )
