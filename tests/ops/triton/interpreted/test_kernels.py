"""The interpreted Triton kernels against the definitions: results, dropout, launches, sums and refusals."""

import math
from typing import Any

import pytest
import torch

from tests.ops import test_adam as adam
from tests.ops.cases import CASES, Draw, made, norms, poisoned
from tests.ops.test_aligned import right, same_anywhere
from tests.ops.test_shapes import KNOWN, OPERANDS, check, operands
from warpfold.check.checks import answer
from warpfold.ops import dispatch
from warpfold.ops.adam import adam_step
from warpfold.ops.attention import gated_attention
from warpfold.ops.linear import layer_norm
from warpfold.ops.noise import dropout_factors
from warpfold.ops.pairs import aligned_errors
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
    op = CASES[name][0].name
    if op in ("aligned_errors", "overlaps"):
        return ("fp32",)
    if op in BY_TORCH:
        return (HALF[place % 2],)
    return ("fp32", HALF[place % 2]) if op in BOTH else (tuple(DTYPES)[place % 3],)


EACH = [(name, dtype) for place, name in enumerate(CASES) for dtype in chosen(place, name)]
IN_DEFAULT_TILES = [
    ("norm_linear 200 to 130", "bf16"), ("norm_linear 384 to 100", "bf16"), ("gated_linear_residual odd", "bf16"),
    ("triangle_factor a of rows", "fp16"), ("transition 24, turned", "bf16"), ("outer_product odd", "bf16"),
    ("triangle_multiplication incoming, rows that are padded", "fp16"), ("attention several tiles", "bf16"),
    ("attention a bias a batch, 64 wide", "fp32"), ("attention one query", "bf16"), ("attention one key", "fp32"),
    ("aligned_errors side chains", "fp32"),
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


def mistakes(monkeypatch: pytest.MonkeyPatch, name: str, dtype: str) -> list[str]:
    call = made(name, DTYPES[dtype])
    assert call.op.unsupported_reason(**call.given) is None
    with poisoned(monkeypatch):
        found = call.answers(call.op.fast)
    return call.mistakes(found)


@pytest.mark.parametrize(("name", "dtype"), EACH)
def test_is_as_exact_as_the_definition(monkeypatch: pytest.MonkeyPatch, name: str, dtype: str) -> None:
    assert not mistakes(monkeypatch, name, dtype)


@pytest.mark.parametrize(("name", "dtype"), IN_DEFAULT_TILES)
@pytest.mark.usefixtures("default_tiles")
def test_in_the_default_tiles(monkeypatch: pytest.MonkeyPatch, name: str, dtype: str) -> None:
    assert not mistakes(monkeypatch, name, dtype)


@pytest.mark.parametrize(("c", "dtype"), [(64, "fp16"), (128, "bf16"), (256, "fp16"), (384, "bf16"), (512, "fp16")])
def test_triangle_products_and_transitions_of_any_width(monkeypatch: pytest.MonkeyPatch, c: int, dtype: str) -> None:
    """Transitions are one operation or several, and torch computes wide triangle products."""
    of = DTYPES[dtype]
    triangle = made("triangle_multiplication incoming, alone", of, n=3, c=c, h=min(c, 128))
    if c in (64, 512):
        perceptron = made("transition 40, SwiGLU, a batch", of, c=c, n=c, of=((2, 3), (1, 0, 2), 0), residual=False)
    else:
        perceptron = made("transition 16, as a small model's", of, c=c, n=2 * c, of=((2, 3), None, 0))
    if c > 256:
        reason = triangle.op.unsupported_reason(*triangle.given.values())
        assert reason == f"{c} channels, 128 of a factor (kernels are for 256 and 128)"
    for call in (triangle, perceptron) if c <= 256 else (perceptron,):
        assert call.op.unsupported_reason(*call.given.values()) is None
        with poisoned(monkeypatch), recorded(run=True) as launches:
            found = call.answers(call.op.fast)
        assert not call.mistakes(found)
        assert len(launches) >= 3


@pytest.mark.usefixtures("default_tiles")
def test_channels_around_ten_thousand() -> None:
    assert not made("layer_norm 200", torch.float32, mean=1e4).mistakes()


def test_the_mean_is_not_rounded_before_it_is_subtracted() -> None:
    ((x, *_),) = norms(Draw(), 200, ((3, 3), None, 0), mean=1e6)  # fp32 has steps of 1/16
    row = torch.ones(200)
    apart = layer_norm.fast(x.float(), row, 0 * row) - layer_norm.definition(x.float().double(), row.double(), None)
    assert apart.abs().max() < 1e-5


def test_a_point_that_is_right_has_no_gradient_and_far_from_the_origin_nothing_changes() -> None:
    """Neither do points with distances below the minimum that counts."""
    given, grad = right()
    assert not answer(lambda *x: aligned_errors.fast(*x, None, 10.0, 0.0), given, grad)[1].any()
    assert same_anywhere(aligned_errors.fast)


# Dropout

KEY = torch.tensor([0xF0E1D2C3, 0xFFFFFFFF + 5 * 0x85EBCA6B])  # second word of more than 32 bits
# shape, strides and offset of the numbers
DRAWS: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {
    "a slice of columns": ((9, 3, 16), (800, 16, 1), 320),
    "turned": ((13, 1, 16), (16, 208, 1), 0),
    "past 2^32": ((3, 5, 8), (2**33 + 40, 8, 1), 2**40 + 3),
    "axes that cannot be merged": ((2, 3, 2, 3, 2), (1000, 7, 300, 1, 20), 11),
    "one": ((1,), (1,), 2**31 - 1),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_its_definition(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for dtype, stream in zip(DTYPES.values(), (0, 3, 123_000)):
        draw = (KEY, stream, 0.15, *DRAWS[name], dtype)
        assert dropout_factors.unsupported_reason(*draw) is None
        with poisoned(monkeypatch):
            fast = dropout_factors.fast(*draw)
        assert torch.equal(fast, dropout_factors.definition(*draw))


@pytest.mark.parametrize(
    ("name", "dtype", "more"),
    [
        ("gated_linear_residual row attention, drawn", "fp16", {}),
        ("gated_linear_residual many axes", "bf16", {}),
        ("triangle_multiplication outgoing", "fp16", {"dropped": "drawn"}),
        ("triangle_multiplication fused, incoming, in two batches", "fp16", {}),
        ("gated_attention triangle, starting", "fp16", {}),
    ],
)
def test_dropout_that_is_drawn_on_the_way_is_what_is_drawn_ahead(name: str, dtype: str, more: dict[str, Any]) -> None:
    """Factors that are drawn before give the same numbers, forward and backward."""
    call = made(name, DTYPES[dtype], **more)
    drawn = call.answers(call.op.fast)
    call.given["factors"] = call.given["factors"].draw()
    ahead = call.answers(call.op.fast)
    assert all(torch.equal(drawn[n], ahead[n]) for n in ahead)
    assert 0 < (call.given["factors"] == 0).float().mean() < 1


def test_factors_may_be_wider_than_the_rest() -> None:
    call = made("gated_linear_residual starting node", torch.float16)
    narrow = call.answers(call.op.fast)
    call.given["factors"] = call.given["factors"].float()  # 0 and 1.25 are exact
    torch.testing.assert_close(call.answers(call.op.fast)["out"], narrow["out"])


# Whole layers


@pytest.mark.parametrize("name", ["gated_attention triangle, starting", "triangle_multiplication outgoing"])
def test_without_a_gradient_nothing_is_kept(name: str) -> None:
    call = made(name, torch.float16)
    with dispatch.using("strict"):
        kept = call.op(**call.given)
        with torch.no_grad():
            assert torch.equal(call.op(**call.given), kept)


@pytest.mark.parametrize("swapped", [(1, 2), (0, 1)], ids=["rows between batches", "batches turned"])
def test_batch_axes_that_are_not_one_in_memory(monkeypatch: pytest.MonkeyPatch, swapped: tuple[int, int]) -> None:
    """Results in temporary memory are copied back, forward and backward."""
    name = "triangle_multiplication fused, incoming, in two batches"
    call = made(name, torch.float16, lead=(2, 3), n=2, h=8, dropped="")
    x = call.given["x"].detach()
    call.given["x"] = x.transpose(*swapped).contiguous().transpose(*swapped).requires_grad_()
    assert call.op.unsupported_reason(**call.given) is None
    with poisoned(monkeypatch):
        found = call.answers(call.op.fast)
    assert not call.mistakes(found)


def test_gated_attention_launches_nothing_but_its_kernels() -> None:
    """There are three kernels forward, and backward all gradients of the projection are written to one tensor."""
    call = made("gated_attention triangle, starting", torch.float16)
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

    wide = "64, as a template's"
    assert reason("gated_attention update alone", width=12, heads=1).startswith("heads 12 wide")  # type: ignore[union-attr]
    assert reason("gated_attention update alone", c=8).startswith("8 channels")  # type: ignore[union-attr]
    assert reason("outer_product odd", c=65) == "factors of 65 channels (kernels are for 64 at most)"
    assert reason(f"transition {wide}", torch.float16, c=513, activation="swiglu") is None  # composed of others
    turned = made("gated_attention batch, given bias", torch.float32, lead=(2, 2, 2))
    turned.given["x"] = turned.given["x"].transpose(0, 1)
    assert gated_attention.unsupported_reason(**turned.given) == "the batch axes of x are not one"
    double = KEY, 3, 0.15, *DRAWS["one"], torch.float64
    assert dropout_factors.unsupported_reason(*double) == "in fp64 no kernel is exact"


# Adam


@pytest.mark.parametrize(("packed", "factors"), [(None, adam.FACTORS), (torch.bfloat16, (0.0, 0.0, 1e-6, 0.0))])
@pytest.mark.parametrize("steps", [1, 5, 499, 501, 100_000])
def test_adam_is_the_definition(packed: torch.dtype | None, steps: int, factors: tuple[float, ...]) -> None:
    given, of = adam.buffers(2500, packed), adam.numbers(steps=steps)
    assert adam_step.unsupported_reason(*given, *of, *factors) is None
    assert not adam.wrong(adam.taken(adam_step.fast, given, of, factors), given, of, factors)


def test_a_step_that_is_not_used_changes_nothing() -> None:
    given = adam.buffers(50, torch.float16)
    assert given[1] is not None
    given[1][3] = math.nan
    after = adam.taken(adam_step.fast, given, adam.numbers(used=False))
    before = [t for i, t in enumerate(given) if t is not None and i != 1]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    doubles = adam.buffers(10, None, torch.float64)
    reason = adam_step.unsupported_reason(*doubles, *adam.numbers(), *adam.FACTORS)
    assert reason == "in fp64 no kernel is exact"


def test_adam_writes_nothing_behind_the_buffers(default_tiles: None) -> None:
    whole = [torch.full((2000,), 0.5) for _ in range(5)]
    adam_step.fast(*(t[:1500] for t in whole), None, *adam.numbers(), *adam.FACTORS)
    assert all(torch.equal(t[1500:], torch.full((500,), 0.5)) for t in whole)
    assert not torch.equal(whole[0][:1500], whole[0][1500:].repeat(3))


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


@pytest.mark.parametrize(("name", "which", "shape"), [(n, *case) for n, cases in KNOWN.items() for case in cases])
def test_shapes_that_were_taken_for_others(name: str, which: str, shape: tuple[int, ...]) -> None:
    """Correct results have rounding errors of at most 1e-5 in fp32, for a hundred additions of numbers near 1."""
    op, shapes = OPERANDS[name][0], OPERANDS[name][1] | {which: shape}
    in_parts = op.name in (*BY_TORCH, "gated_attention")  # its operations check in fp32
    dtype = torch.float16 if in_parts else torch.float32
    taken = op.unsupported_reason(**operands(name, shapes, dtype)) is None
    if not taken or (which, shape) == ("bias", (2, 1, 2, 5, 1)):  # broadcasts in kernels, too
        check(name, shapes, dtype, 2e-3)
    assert taken <= (which in ("bias", "mask", "v"))  # these broadcast
