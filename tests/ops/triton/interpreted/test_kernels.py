"""The interpreted Triton kernels against the definitions: results, dropout, launches, sums and refusals."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.ops.cases import CASES, WIDE, Call, case, made, poisoned
from tests.ops.rules import *  # noqa: F403
from tests.ops.test_shapes import SHAPED, changes, check, operands, small
from warpfold.ops import dispatch
from warpfold.ops.attention import gated_attention
from warpfold.ops.linear import layer_norm
from warpfold.ops.triton import linear, outer, positions, triangle
from warpfold.ops.triton import transition as of_transition
from warpfold.ops.triton.launch import recorded

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
HALF = ("fp16", "bf16")
# In fp32 these have other kernels or tiles.  The other operations have the same code for all dtypes.
BOTH = ("transition", "attention")
# In fp32 torch computes these.
BY_TORCH = (
    *("norm_linear", "gated_linear_residual", "outer_product", "outer_product_mean"),
    *("triangle_factor", "triangle_multiplication"),
)
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # padding of rows


def chosen(place: int, name: str) -> tuple[str, ...]:
    """Choose the dtypes of a case such that the cases of each operation cover all dtypes."""
    op = CASES[name][0]
    if op in WIDE:
        return ("fp32",)
    if op in BY_TORCH:
        return (HALF[place % 2],)
    return ("fp32", HALF[place % 2]) if op in BOTH else (tuple(DTYPES)[place % 3],)


EACH = [(name, dtype) for place, name in enumerate(CASES) for dtype in chosen(place, name)]
# Kernels whose tiles are smaller than the operands of these cases by default.
IN_DEFAULT_TILES = [
    ("norm_linear", "bf16", {"c": 200, "o": 130}), ("norm_linear", "bf16", {"c": 384, "o": 100}),
    ("gated_linear_residual", "bf16", {"c": 20, "i": 200}), ("triangle_factor", "fp16", {}),
    ("transition", "bf16", {"c": 24, "n": 56}), ("outer_product", "bf16", {"s": 70, "i": 5, "j": 9, "d": 11, "p": 37}),
    ("triangle_multiplication", "fp16", {"n": 9, "outgoing": False}), ("attention", "bf16", {}),
    ("attention", "fp32", {"lead": (2, 3), "Q": 19, "K": 33, "d": 64, "batched": True}),
    ("attention", "bf16", {"lead": (2, 3), "Q": 1, "h": 4, "K": 4}), ("attention", "fp32", {"Q": 5, "K": 1, "d": 8}),
    ("aligned_errors", "fp32", {}), ("adam_step", "fp32", {"n": 2500}),
]  # fmt: skip


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use few programs, so that each has several blocks of positions, and sums need two rounds."""
    for module, name in ((linear, "TILES"), (linear, "PROGRAMS"), (of_transition, "TILES"), (of_transition, "SPANS")):
        monkeypatch.setattr(module, name, 2)
    for module in (outer, of_transition):
        monkeypatch.setattr(module, "CHUNK_BYTES", 2**14)
    for module, name, n in ((triangle, "PROGRAMS", 2), (positions, "ONCE", 1), (positions, "SPANS", 2)):
        monkeypatch.setattr(module, name, n)


def mistakes(monkeypatch: pytest.MonkeyPatch, call: Call) -> list[str]:
    """List the errors of the kernels, in memory that is initialised to NaN."""
    assert not call.op.unsupported_reason(*call.args)
    # An operation in place makes no tensors.
    with nullcontext() if call.op.name == "adam_step" else poisoned(monkeypatch):
        found = call.answers(call.op.fast)
    return call.mistakes(found)


@pytest.mark.parametrize(("name", "dtype"), EACH)
def test_is_as_exact_as_the_definition(monkeypatch: pytest.MonkeyPatch, name: str, dtype: str) -> None:
    assert not mistakes(monkeypatch, case(name, DTYPES[dtype]))


@pytest.mark.parametrize(("name", "dtype", "sizes"), IN_DEFAULT_TILES)
@pytest.mark.usefixtures("default_tiles")
def test_in_the_default_tiles(monkeypatch: pytest.MonkeyPatch, name: str, dtype: str, sizes: dict[str, Any]) -> None:
    assert not mistakes(monkeypatch, made(name, DTYPES[dtype], **sizes))


@pytest.mark.parametrize(("c", "dtype"), [(64, "fp16"), (128, "bf16"), (256, "fp16"), (384, "bf16"), (512, "fp16")])
def test_triangle_products_and_transitions_of_any_width(monkeypatch: pytest.MonkeyPatch, c: int, dtype: str) -> None:
    """Transitions are one operation or several, and torch computes wide triangle products."""
    of = DTYPES[dtype]
    triangle = made("triangle_multiplication", of, n=3, c=c, h=min(c, 128), outgoing=False, x_order="turned")
    if c in (64, 512):
        turned = {"x_order": "turned", "residual": False}
        perceptron = made("transition", of, lead=(2, 3), c=c, n=c, activation="swiglu", **turned)
    else:
        perceptron = made("transition", of, lead=(2, 3), c=c, n=2 * c, residual=True)
    if c > 256:
        reason = triangle.op.unsupported_reason(*triangle.given.values())
        assert reason == f"{c} channels, 128 of a factor (kernels are for 256 and 128)"
    for call in (triangle, perceptron) if c <= 256 else (perceptron,):
        with recorded(run=True) as launches:
            assert not mistakes(monkeypatch, call)
        assert len(launches) >= 3


@pytest.mark.usefixtures("default_tiles")
def test_channels_around_ten_thousand() -> None:
    assert not made("layer_norm", torch.float32, c=200, mean=1e4).mistakes()


def test_the_mean_is_not_rounded_before_it_is_subtracted() -> None:
    x = made("layer_norm", torch.float64, lead=(3, 3), c=200, mean=1e6).given["x"].detach()  # fp32 has steps of 1/16
    row = torch.ones(200)
    apart = layer_norm.fast(x.float(), row, 0 * row) - layer_norm.definition(x.float().double(), row.double(), None)
    assert apart.abs().max() < 1e-5


# Dropout


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("gated_linear_residual", {"lead": (2, 5, 9), "shared": (-2,)}),
        ("gated_linear_residual", {"lead": (2, 3, 2, 3, 2), "x_order": "mixed", "shared": (1, 3, 4)}),
        ("triangle_multiplication", {"n": 5}),
        ("triangle_multiplication", {"lead": (2, 2), "n": 3, "outgoing": False, "fused": True}),
        ("gated_attention", {}),
    ],
)
def test_dropout_that_is_drawn_on_the_way_is_what_is_drawn_ahead(name: str, more: dict[str, Any]) -> None:
    """Factors that are drawn before give the same numbers, forward and backward."""
    call = made(name, torch.float16, with_factors="drawn", **more)
    drawn = call.answers(call.op.fast)
    call.given["factors"] = call.given["factors"].draw()
    ahead = call.answers(call.op.fast)
    assert all(torch.equal(drawn[n], ahead[n]) for n in ahead)
    assert 0 < (call.given["factors"] == 0).float().mean() < 1


def test_factors_may_be_wider_than_the_rest() -> None:
    call = made("gated_linear_residual", torch.float16, with_factors="given")
    narrow = call.answers(call.op.fast)
    call.given["factors"] = call.given["factors"].float()  # 0 and 1.25 are exact
    torch.testing.assert_close(call.answers(call.op.fast)["out"], narrow["out"])


# Whole layers


@pytest.mark.parametrize("name", ["gated_attention", "triangle_multiplication"])
def test_without_a_gradient_nothing_is_kept(name: str) -> None:
    call = made(name, torch.float16)
    with dispatch.using("strict"):
        kept = call.op(**call.given)
        with torch.no_grad():
            assert torch.equal(call.op(**call.given), kept)


@pytest.mark.parametrize("swapped", [(1, 2), (0, 1)], ids=["rows between batches", "batches turned"])
def test_batch_axes_that_are_not_one_in_memory(monkeypatch: pytest.MonkeyPatch, swapped: tuple[int, int]) -> None:
    """Results in temporary memory are copied back, forward and backward."""
    how = {"outgoing": False, "fused": True, "with_factors": None}
    call = made("triangle_multiplication", torch.float16, lead=(2, 3), n=2, h=8, **how)
    x = call.given["x"].detach()
    call.given["x"] = x.transpose(*swapped).contiguous().transpose(*swapped).requires_grad_()
    assert not mistakes(monkeypatch, call)


def test_gated_attention_launches_nothing_but_its_kernels() -> None:
    """There are three kernels forward, and backward all gradients of the projection are written to one tensor."""
    call = made("gated_attention", torch.float16)
    with recorded(run=True) as launches:
        out = gated_attention.fast(**call.given)
        forward = [launch.kernel.name for launch in launches]
        launches.clear()
        out.sum().backward()
    assert forward == ["norm_linear", "attention_forward", "tail"]
    wrote = {}
    for launch in launches:
        for name in ("dg", "dq", "dk", "dv"):
            t = launch.arguments.get(name)
            if t is not None and hasattr(t, "data"):
                wrote[launch.kernel.name, name] = t.data.untyped_storage().data_ptr()
    assert {name for _, name in wrote} == {"dg", "dq", "dk", "dv"}
    assert len(set(wrote.values())) == 1
    assert {launch.kernel.name for launch in launches} == {
        *("tail_backward", "attention_short", "attention_dbias", "norm_linear_backward", "sum_partials"),
    }


def test_what_the_kernels_do_not_serve_is_refused() -> None:
    def reason(name: str, dtype: torch.dtype = torch.float32, **more: Any) -> str | None:
        call = made(name, dtype, **more)
        return call.op.unsupported_reason(**call.given)

    assert reason("gated_attention", width=12, heads=1).startswith("heads 12 wide")  # type: ignore[union-attr]
    assert reason("gated_attention", c=8).startswith("8 channels")  # type: ignore[union-attr]
    assert reason("outer_product", c=65) == "factors of 65 channels (kernels are for 64 at most)"
    assert reason("transition", torch.float16, c=513, activation="swiglu") is None  # composed of others
    turned = made("gated_attention", torch.float32, kind="given", lead=(2, 2))
    turned.given["x"] = turned.given["x"].transpose(0, 1)
    assert gated_attention.unsupported_reason(**turned.given) == "the batch axes of x are not one"
    draw = made("dropout_factors", torch.float64)
    for call in (draw, made("adam_step", torch.float64)):
        assert call.op.unsupported_reason(*call.args) == "in fp64 no kernel is exact"


# Sums over programs


def test_sums_of_several_partials_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partials differ in number of programs and width; some are summed span by span first."""
    monkeypatch.setattr(positions, "ONCE", 64)
    monkeypatch.setattr(positions, "SPANS", 4)
    drawn = torch.Generator().manual_seed(0)
    partials = [torch.randn(*size, generator=drawn) for size in ((70, 130), (3, 5), (64, 33), (300, 36), (1, 7))]
    sizes = ((100, 30), (5,), (0, 33), (1, 0, 2, 30, 3), (7, 0))
    results = [tuple(torch.full((size,), torch.nan) for size in each) for each in sizes]
    with recorded() as launched:
        positions.sum_partials(*map(positions.Sum, partials, results))
    assert len(launched) == 2
    for launch in launched:
        launch.run()
    for of, parts in zip(partials, results):
        bound = 5 * len(of) ** 1.5 * 2**-24  # additions of numbers up to 5
        torch.testing.assert_close(torch.cat(parts).double(), of.double().sum(0), rtol=0, atol=bound)


# Operands of other shapes


@pytest.mark.parametrize("name", SHAPED)
def test_each_shape_is_right_or_an_error(name: str) -> None:
    """Correct results have rounding errors of at most 1e-5 in fp32, for a hundred additions of numbers near 1."""
    op, shapes, _ = small(name)
    in_parts = op.name in (*BY_TORCH, "gated_attention")  # its operations check in fp32
    dtype = torch.float16 if in_parts else torch.float32
    for which, shape in changes(shapes):
        taken = op.unsupported_reason(**operands(name, shapes | {which: shape}, dtype)) is None
        if not taken or (which, shape) == ("bias", (2, 1, 2, 5, 1)):  # broadcasts in kernels, too
            check(name, shapes | {which: shape}, dtype, 2e-3)
