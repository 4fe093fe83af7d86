"""Gated attention and triangle multiplication on a CPU, row by row, against their definitions."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.ops.cpu_cases import DTYPES, LAYOUTS, Largest, given, mistakes
from tests.ops.wrong_shapes import check, operands
from warpfold.check.checks import answer, wrong
from warpfold.ops.attention import gated_attention
from warpfold.ops.cpu import attention as cpu_attention
from warpfold.ops.cpu import triangle as cpu_triangle
from warpfold.ops.dispatch import Operands
from warpfold.ops.noise import Noise
from warpfold.ops.triangle import triangle_multiplication

N, C, H = 7, 12, 3  # positions in a row, channels, heads


def _parameters(outputs: int, inner: int, biases: bool, seed: int = 0) -> list[Tensor]:
    """The parameters of gated attention, of a size that makes logits about 1."""
    nw, nb, w, gb, ow, ob = given((C,), (C,), (outputs, C), (inner,), (C, inner), (C,), seed=seed)
    made = [1 + nw / 5, nb / 5, w * C**-0.5, *([gb] if biases else []), ow * inner**-0.5, *([ob] if biases else [])]
    return made


def _attention(
    run: Callable[..., Tensor], x: Tensor, *more: Tensor, mask: Tensor, heads: int, biases: bool, given_bias: bool
) -> Tensor:
    """gated_attention of tensors alone: x, the bias if it is given, and the parameters."""
    bias, parameters = (more[0], more[1:]) if given_bias else (None, more)
    nw, nb, w, *rest = parameters
    gb, ow, ob = rest if biases else (None, rest[0], None)
    return run(x, nw, nb, w, gb, ow, ob, mask.to(nw.dtype), bias, heads)


def _attention_mistakes(
    x: Tensor, dtype: torch.dtype, bias: str, *, mask: Tensor, width: int = 4, biases: bool = True, seed: int = 0
) -> list[str]:
    inner, n = H * width, x.shape[-2]
    parameters = _parameters(4 * inner + (H if bias == "own" else 0), inner, biases, seed)
    of_rows = given((*x.shape[:-3], H, n, n), seed=3) if bias == "given" else []
    fixed = partial(_attention, mask=mask, heads=H, biases=biases, given_bias=bias == "given")
    both = SimpleNamespace(
        definition=partial(fixed, gated_attention.definition), fast=partial(fixed, gated_attention.fast)
    )
    return mistakes(both, [x, *of_rows, *parameters], len(parameters), dtype)  # type: ignore[arg-type]


def _mask(*shape: int) -> Tensor:
    mask = (torch.rand(shape, generator=torch.Generator().manual_seed(5)) > 0.3).double()
    mask[..., -1, :] = 0  # a row with nothing to attend to
    mask[..., 0, :] = 1
    return mask


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bias", ["given", "own", "none"])
def test_gated_attention_is_its_definition(dtype: torch.dtype, layout: str, bias: str) -> None:
    x = LAYOUTS[layout](given((2, N, N, C))[0])
    assert not _attention_mistakes(x, dtype, bias, mask=_mask(2, N, N))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", ["given", "own"])
def test_gated_attention_in_blocks_of_any_size_and_without_biases(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bias: str
) -> None:
    x = given((N, N, C))[0]
    for positions, logits in ((1, 1), (3 * N, 2 * N * N)):
        for name, size in (("FORWARD", positions), ("BACKWARD", positions), ("LOGITS", logits)):
            monkeypatch.setattr(cpu_attention, name, size)
        for mask in (_mask(N, N), torch.ones(N, N).double()):
            assert not _attention_mistakes(x, dtype, bias, mask=mask, biases=False)


@pytest.mark.parametrize("width", [24, 48])
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_of_other_widths(dtype: torch.dtype, width: int) -> None:
    assert not _attention_mistakes(given((5, N, C))[0], dtype, "given", mask=_mask(5, N), width=width)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["in order", "turned"])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("dropped", [False, True])
def test_an_attention_update_alone_without_any_bias(dtype: torch.dtype, layout: str, own: bool, dropped: bool) -> None:
    x, factors = LAYOUTS[layout](given((2, N, N, C))[0]), (given((1, N, C), seed=9)[0] > 0).double() / 0.75
    nw, _, w, ow = _parameters(4 * 4 * H + (H if own else 0), 4 * H, False)
    mask, rest = _mask(2, N, N), (H, factors if dropped else None, 1e-5, False)

    def run(op: Callable[..., Tensor], x: Tensor, nw: Tensor, w: Tensor, ow: Tensor) -> Tensor:
        keep = rest[1] if rest[1] is None else rest[1].to(x.dtype)
        return op(x, nw, None, w, None, ow, None, mask.to(nw.dtype), None, rest[0], keep, *rest[2:])

    both = SimpleNamespace(definition=partial(run, gated_attention.definition), fast=partial(run, gated_attention.fast))
    assert not mistakes(both, [x, nw, w, ow], 3, dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["in order", "turned"])
@pytest.mark.parametrize("outgoing", [False, True])
@pytest.mark.parametrize("dropped", [False, True])
def test_a_triangle_update_alone_without_any_bias(
    dtype: torch.dtype, layout: str, outgoing: bool, dropped: bool
) -> None:
    h, x = 10, LAYOUTS[layout](given((2, N, N, C))[0])
    nw, w, onw, ow = given((C,), (4 * h + C, C), (h,), (C, h))
    parameters = [1 + nw / 5, w * C**-0.5, 1 + onw / 5, ow * h**-0.5]
    mask, factors = _mask(2, N, N), (given((1, N, C), seed=9)[0] > 0).double() / 0.75

    def run(op: Callable[..., Tensor], x: Tensor, nw: Tensor, w: Tensor, onw: Tensor, ow: Tensor) -> Tensor:
        keep = factors.to(x.dtype) if dropped else None
        into, out_of = (nw, None, w, None), (onw, None, ow, None)
        return op(x, mask.to(nw.dtype), *into, *out_of, outgoing, False, keep, 1e-5, False)

    both = SimpleNamespace(
        definition=partial(run, triangle_multiplication.definition), fast=partial(run, triangle_multiplication.fast)
    )
    assert not mistakes(both, [x, *parameters], 4, dtype)  # type: ignore[arg-type]


def test_a_query_whose_bias_leaves_it_no_key_attends_to_its_masked_ones() -> None:
    bias = given((H, N, N), seed=3)[0]
    bias[1, 2] = float("-inf")  # in a row with masked keys; without any it is NaN, as in the definition
    bias[0, 1, :3] = float("-inf")
    mask = torch.ones(5, N).double()
    mask[:, 4] = 0
    mask[3] = 0
    leaves = [t.requires_grad_() for t in (*given((5, N, C)), bias, *_parameters(4 * H * 4, H * 4, True))]
    fixed = partial(_attention, mask=mask, heads=H, biases=True, given_bias=True)
    grad = given((5, N, C), seed=1)[0]
    ours = answer(partial(fixed, gated_attention.fast), leaves, grad)
    right = answer(partial(fixed, gated_attention.definition), leaves, grad)
    for a, b in zip(ours, right):
        assert a.isfinite().all()
        # Sums of some 100 numbers about 1 in fp64, in another order.
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    mask[0] = 1
    out = fixed(gated_attention.fast, *leaves, mask=mask)
    assert out[0, 2].isnan().all()
    assert out[1:].isfinite().all()


def test_what_is_not_a_number_stays_so() -> None:
    x = given((5, N, C))[0]
    x[1, 2, 3] = float("nan")
    fixed = partial(_attention, mask=_mask(5, N), heads=H, biases=True, given_bias=False)
    out = fixed(gated_attention.fast, x, *_parameters(4 * H * 4, H * 4, True))
    assert out[1].isnan().all()
    assert out[[0, 2, 3, 4]].isfinite().all()


def _triangle_mistakes(
    x: Tensor, dtype: torch.dtype, outgoing: bool, fused: bool, biases: bool, hidden: int
) -> list[str]:
    nw, nb, w, b, onw, onb, ow, ob = given(
        *((C,), (C,), (4 * hidden + C, C), (4 * hidden + C,), (hidden,), (hidden,), (C, hidden), (C,))
    )
    parameters = [1 + nw / 5, nb / 5, w * C**-0.5, *([b] if biases else [])]
    parameters += [1 + onw / 5, onb / 5, ow * hidden**-0.5, *([ob] if biases else [])]
    mask = _mask(*x.shape[:-1])

    def run(op: Callable[..., Tensor], x: Tensor, *p: Tensor) -> Tensor:
        given_all = p if biases else (*p[:3], None, *p[3:], None)
        return op(x, mask.to(p[0].dtype), *given_all, outgoing, fused)

    both = SimpleNamespace(
        definition=partial(run, triangle_multiplication.definition), fast=partial(run, triangle_multiplication.fast)
    )
    return mistakes(both, [x, *parameters], len(parameters), dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("outgoing", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_triangle_multiplication_is_its_definition(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, layout: str, outgoing: bool, fused: bool
) -> None:
    monkeypatch.setattr(cpu_triangle, "POSITIONS", 2 * N if fused else 1)  # some rows, with a rest; a row each
    x = LAYOUTS[layout](given((2, N, N, C))[0])
    assert not _triangle_mistakes(x, dtype, outgoing, fused, biases=not fused, hidden=10)


@pytest.mark.parametrize("op", ["gated_attention", "triangle_multiplication"])
@pytest.mark.parametrize("drawn", [True, False])
def test_dropout_given_or_drawn_on_the_way(op: str, drawn: bool) -> None:
    noise = Noise()
    noise.seed(7)
    factors = noise.factors((1, N, C), 0.4, 3, torch.empty(0).double())
    factors = factors if drawn else factors.draw()  # type: ignore[union-attr]
    x, mask = given((N, N, C))[0], _mask(N, N)
    if op == "gated_attention":
        parameters = _parameters(4 * H * 4 + H, H * 4, True)
        args = [x, *parameters, mask, None, H, factors]
        operation = gated_attention
    else:
        h = 10
        parameters = given((C,), (C,), (4 * h + C, C), (4 * h + C,), (h,), (h,), (C, h), (C,))
        args = [x, mask, *parameters, True, False, factors]
        operation = triangle_multiplication
    for t in (x, *parameters):
        t.requires_grad_()
    grad = given((N, N, C), seed=1)[0]
    assert not wrong(operation.definition, args, grad, answer(operation.fast, args, grad))  # type: ignore[attr-defined]


def test_leading_axes_are_examples() -> None:
    x = given((2, 3, N, N, C))[0]
    assert not _attention_mistakes(x, torch.float64, "own", mask=_mask(2, 3, N, N))
    assert not _triangle_mistakes(x, torch.float64, True, False, True, 10)


def test_without_a_backward_pass_nothing_is_kept_and_no_projection_exists_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    n, c = 24, 8
    for module, name in ((cpu_attention, "FORWARD"), (cpu_attention, "BACKWARD"), (cpu_triangle, "POSITIONS")):
        monkeypatch.setattr(module, name, n)
    x, nw, nb, w, ow = given((n, n, c), (c,), (c,), (4 * c + 2, c), (c, c))
    mask, w2 = torch.ones(n, n).double(), given((5 * c, c))[0]
    for run in (
        lambda: gated_attention.fast(x, nw, nb, w, None, ow, None, mask, None, 2),
        lambda: triangle_multiplication.fast(x, mask, nw, nb, w2, None, nw, nb, ow, None, True, False),
    ):
        with torch.no_grad(), Largest(x) as seen:
            run()
        assert seen.elements <= x.numel(), "q, k, v and the gate together have four times as many"
    t = Operands(x=x, norm_weight=nw, norm_bias=nb, weight=w, gate_bias=None, out_weight=ow, out_bias=None, mask=mask)
    t = t.but(bias=None, heads=2, factors=None, key=None, eps=1e-5, residual=True, kept=True)
    _, *kept = cpu_attention.gated_attention(t)
    t = t.but(grad=x, bias_wanted=False, **dict(zip(("y", "mean", "scale", "attended", "lse"), kept)))
    with Largest(x, *kept) as seen:
        cpu_attention.gated_attention_backward(t)
    assert seen.elements <= x.numel(), "no gradient of the projections exists whole"


def test_only_what_is_written_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that was not written holds NaN here."""
    empty, new = torch.empty, Tensor.new_empty

    def poisoned(made: Tensor) -> Tensor:
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poisoned(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda x, **k: poisoned(empty(x.shape, dtype=k.get("dtype", x.dtype))))
    monkeypatch.setattr(Tensor, "new_empty", lambda self, *a, **k: poisoned(new(self, *a, **k)))
    x = given((N, N, C))[0].float().requires_grad_()
    nw, nb, w, gb, ow, ob = (t.float().requires_grad_() for t in _parameters(4 * H * 4 + H, H * 4, True))
    out = gated_attention.fast(x, nw, nb, w, gb, ow, ob, _mask(N, N).float(), None, H)
    w2, ow2 = (t.float().requires_grad_() for t in given((5 * C, C), (C, C)))
    out = triangle_multiplication.fast(out, _mask(N, N).float(), nw, nb, w2, None, nw, nb, ow2, None, False, False)
    assert out.isfinite().all()
    out.sum().backward()
    for t in (x, nw, nb, w, gb, ow, ob, w2, ow2):
        assert t.grad is not None
        assert t.grad.isfinite().all()


ATTENTION_SHAPES = dict(
    x=(2, 4, 4, 6), norm_weight=(6,), norm_bias=(6,), weight=(32, 6), gate_bias=(8,), out_weight=(6, 8), out_bias=(6,),
    mask=(2, 4, 4), bias=(2, 2, 4, 4),
)  # fmt: skip
TRIANGLE_SHAPES = dict(
    x=(2, 4, 4, 6), mask=(2, 4, 4), norm_weight=(6,), norm_bias=(6,), weight=(26, 6), bias=(26,), out_norm_weight=(5,),
    out_norm_bias=(5,), out_weight=(6, 5), out_bias=(6,),
)  # fmt: skip


@pytest.mark.parametrize(
    ("operand", "shape"),
    [
        *[("x", (2, 4, 3, 6)), ("weight", (33, 6)), ("weight", (34, 6)), ("weight", (32, 5)), ("gate_bias", (33,))],
        *[("mask", (2, 4, 1)), ("mask", (4, 4)), ("bias", (2, 1, 4, 4)), ("bias", (2, 4, 4)), ("bias", (2, 3, 4, 4))],
        *[("bias", (2, 2, 4, 3)), ("out_weight", (6, 7)), ("out_bias", (1,)), ("norm_weight", (1,))],
    ],
)
def test_gated_attention_of_other_shapes_is_its_definition_or_an_error(operand: str, shape: tuple[int, ...]) -> None:
    op = SimpleNamespace(
        definition=lambda *args: gated_attention.definition(*args, 2),
        fast=lambda *args: gated_attention.fast(*args, 2),
        unsupported_reason=lambda *args: gated_attention.unsupported_reason(*args, 2),
    )
    assert op.unsupported_reason(*operands(list(ATTENTION_SHAPES.values()), torch.float64)) is None
    # As tests/ops/test_shapes.py has it.
    check(op, ATTENTION_SHAPES | {operand: shape}, torch.float64, 1e-11)


@pytest.mark.parametrize(
    ("operand", "shape"),
    [
        *[("x", (2, 4, 3, 6)), ("weight", (25, 6)), ("weight", (26, 5)), ("bias", (27,)), ("bias", (3,))],
        *[("mask", (2, 4, 1)), ("mask", (4, 4)), ("out_norm_weight", (1,)), ("out_weight", (6, 4)), ("out_bias", (1,))],
    ],
)
def test_triangle_multiplication_of_other_shapes_likewise(operand: str, shape: tuple[int, ...]) -> None:
    op = SimpleNamespace(
        definition=lambda *args: triangle_multiplication.definition(*args, True, False),
        fast=lambda *args: triangle_multiplication.fast(*args, True, False),
        unsupported_reason=lambda *args: triangle_multiplication.unsupported_reason(*args, True, False),
    )
    assert op.unsupported_reason(*operands(list(TRIANGLE_SHAPES.values()), torch.float64)) is None
    check(op, TRIANGLE_SHAPES | {operand: shape}, torch.float64, 1e-11)
