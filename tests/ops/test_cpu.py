"""The fast paths on a CPU against the definitions, and their memory."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.attention_rules import *  # noqa: F403
from tests.ops.cases import CASES, Draw, Settings, case, drawn_settings, made, operations
from tests.ops.rules import *  # noqa: F403
from warpfold.ops.attention import gated_attention
from warpfold.ops.cpu import attention as cpu_attention
from warpfold.ops.cpu import linear, outer, pairs
from warpfold.ops.cpu import transition as cpu_transition
from warpfold.ops.cpu import triangle as cpu_triangle
from warpfold.ops.dispatch import Operands, implementation, modules
from warpfold.ops.outer import outer_product
from warpfold.ops.transition import transition
from warpfold.ops.triangle import triangle_multiplication

SMALL = [
    (cpu_attention, "BLOCK_LOGITS", 2**10),
    (cpu_attention, "FORWARD_POSITIONS", 14),
    (cpu_attention, "BACKWARD_POSITIONS", 14),
]
SMALL += [(cpu_attention, "LOGITS", 98), (linear, "POSITIONS", 64), (cpu_transition, "HIDDEN", 2**10)]
SMALL += [(cpu_triangle, "POSITIONS", 14), (outer, "PRODUCTS", 2000), (pairs, "PAIRS", 2**9), (pairs, "GROUP", 4)]


class Largest(TorchDispatchMode):
    """Records the size of the largest storage that a torch operation returns, except views of `inputs`."""

    elements = 0

    def __init__(self, *inputs: Tensor) -> None:
        super().__init__()
        self._inputs = {t.untyped_storage().data_ptr() for t in inputs}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = function(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in self._inputs:
                self.elements = max(self.elements, t.untyped_storage().nbytes() // t.element_size())
        return out


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """Compute parts of operations in two threads; other tests have one."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use blocks of a few positions, in memory that is initialised to NaN."""
    for module, name, size in SMALL:
        monkeypatch.setattr(module, name, size)
    empty, plain, new = torch.empty, torch.empty_like, Tensor.new_empty

    def poisoned(made: Tensor) -> Tensor:
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poisoned(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda x, **k: poisoned(plain(x, **k)))
    monkeypatch.setattr(Tensor, "new_empty", lambda self, *a, **k: poisoned(new(self, *a, **k)))


def test_every_operation_has_cases() -> None:
    """A registered operation gets its cases from its declaration; those that it does not serve need an entry."""
    registered = {name.removesuffix("_backward") for name in modules}
    assert registered <= set(operations()) == {name for name, _ in CASES.values()}


@pytest.mark.parametrize("name", CASES)
def test_the_fast_path_is_the_definition(name: str) -> None:
    for dtype in (torch.float64, torch.float16):
        call = case(name, dtype)
        assert not call.op.unsupported_reason(*call.args)
        assert not call.mistakes(), dtype


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("small_blocks")
def test_in_small_blocks_too(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert not case(name, dtype).mistakes(), dtype


# Examples of the operations whose blocks depend on most sizes; the others have 10.
EXAMPLES = {"attention": 30, "layer_norm": 40, "norm_linear": 40}


@pytest.mark.parametrize("name", operations())
def test_whatever_the_settings(name: str) -> None:
    @settings(max_examples=EXAMPLES.get(name, 10), deadline=None)
    @given(drawn_settings(operations()[name]), st.sampled_from([1, 40, 200, None]))
    def check(of: Settings, block: int | None) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for module, constant, _ in SMALL if block else ():
                patch.setattr(module, constant, block)
            assert not made(name, torch.float32, **of).mistakes()

    check()


def test_a_query_whose_bias_leaves_it_no_key_attends_to_its_masked_ones() -> None:
    call = made("gated_attention", torch.float64, kind="given", rows=9, with_factors=None)
    mask, bias = call.given["mask"], call.given["bias"]
    with torch.no_grad():
        mask[:] = 1
        mask[:, 4] = 0
        mask[3] = 0
        bias[1, 2] = float("-inf")  # row 1 has masked keys
        bias[0, 1, :3] = float("-inf")
    ours, right = call.answers(gated_attention.fast), call.answers(gated_attention.definition)
    for name, x in right.items():
        assert ours[name].isfinite().all()
        torch.testing.assert_close(ours[name], x, rtol=1e-12, atol=1e-12)  # some 100 additions near 1
    mask[0] = 1
    out = gated_attention.fast(**call.given)
    assert out[0, 2].isnan().all()
    assert out[1:].isfinite().all()


def test_what_is_not_a_number_stays_so() -> None:
    call = made("gated_attention", torch.float64, kind="", rows=3, with_factors=None)
    with torch.no_grad():
        call.given["x"][1, 2, 3] = float("nan")
    out = gated_attention.fast(**call.given)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


def test_swiglu_is_the_formula() -> None:
    """SwiGLU is silu of the first half of `up` times the second half."""
    draw = Draw()
    x, nw, up, down = draw(5, 24), draw(24), draw(96, 24) / 24**0.5, draw(24, 48) / 48**0.5
    n = torch.nn.functional.layer_norm(x, x.shape[-1:], nw)
    gate, value = n @ up[:48].t(), n @ up[48:].t()
    expected = x + (gate / (1 + (-gate).exp()) * value) @ down.t()
    torch.testing.assert_close(transition(x, nw, None, up, None, down, None, activation="swiglu"), expected)


def test_a_bias_that_is_not_divided_is_added_last() -> None:
    values = made("outer_product", torch.float64, bias_divided=False).given
    expected = outer_product.definition(**values | {"bias": None}) + values["bias"]
    for way in (outer_product.definition, outer_product.fast):
        torch.testing.assert_close(way(**values), expected, rtol=1e-12, atol=1e-12)


def test_what_lies_between_never_exists_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits, normalised rows, hidden layers, products of channels and projections exist for one block at a time."""
    rows, n, heads = 24, 32, 2
    monkeypatch.setattr(cpu_attention, "BLOCK_LOGITS", 4 * heads * n * n)
    for masked in (False, True):
        q, mask, bias = torch.randn(1, rows, n, heads, 8), torch.ones(1, rows, n), torch.randn(1, heads, n, n)
        mask[0, 0, 3:] = not masked
        with Largest() as seen:
            out, lse = implementation("attention", q)(q, q, q, mask, bias)
            implementation("attention_backward", q)(torch.ones_like(out), q, q, q, mask, bias, out, lse, True)
        assert 0 < seen.elements <= max(4 * heads * n * n, q.numel())
    monkeypatch.setattr(linear, "POSITIONS", 64)
    x, row, wide = torch.randn(32, 32, 40), torch.randn(40), torch.randn(4, 40)
    with Largest(x) as seen:
        y, mean, scale = implementation("norm_linear", x)(x, row, row, wide, None, 1e-5, False)
    assert y.numel() <= seen.elements < x.numel() / 2
    with Largest(x) as seen:
        implementation("norm_linear_backward", x)(torch.ones_like(y), x, row, row, wide, None, mean, scale)
    assert seen.elements == x.numel(), "its gradient"
    monkeypatch.setattr(cpu_transition, "HIDDEN", 2**11)
    x, up = torch.randn(442, 24), torch.randn(48, 24)
    parameters = x[0], x[1], up, up[:, 0], up.t().contiguous(), x[2], True, 1e-5, "relu"
    with Largest() as seen:
        implementation("transition", x)(x, *parameters)
        implementation("transition_backward", x)(x, x, *parameters)
    assert seen.elements == x.numel()
    monkeypatch.setattr(outer, "PRODUCTS", 2000)
    a, b, weight = torch.randn(2, 9, 13, 5), torch.randn(2, 9, 7, 6), torch.randn(11, 30)
    masks = torch.ones(2, 9, 13), torch.ones(2, 9, 7)
    with Largest() as seen:
        how = *masks, None, 1e-3, 0.0, True
        out, share = implementation("outer_product", a)(a, b, weight, weight[:, 0], *how)
        implementation("outer_product_backward", a)(out, a, b, weight, weight[:, 0], share, True)
    assert seen.elements <= max(out.numel(), 2000) < 2 * 13 * 7 * 30


def test_layers_keep_nothing_where_no_backward_pass_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    n, c = 24, 8
    for module, name in (
        (cpu_attention, "FORWARD_POSITIONS"),
        (cpu_attention, "BACKWARD_POSITIONS"),
        (cpu_triangle, "POSITIONS"),
    ):
        monkeypatch.setattr(module, name, n)
    draw = Draw()
    x, nw, nb, w, ow, w2, mask = (
        draw(n, n, c),
        draw(c),
        draw(c),
        draw(4 * c + 2, c),
        draw(c, c),
        draw(5 * c, c),
        draw(n, n),
    )
    for run in (
        lambda: gated_attention.fast(x, nw, nb, w, None, ow, None, mask, None, 2),
        lambda: triangle_multiplication.fast(x, mask, None, nw, nb, w2, None, nw, nb, ow, None, False, True),
    ):
        with torch.no_grad(), Largest(x) as seen:
            run()
        assert seen.elements <= x.numel(), "q, k, v and the gate together have four times as many"
    t = Operands(x=x, norm_weight=nw, norm_bias=nb, weight=w, gate_bias=None, out_weight=ow, out_bias=None, mask=mask)
    t = t.but(bias=None, heads=2, factors=None, key=None, eps=1e-5, residual=True, kept=True)
    _, *kept = cpu_attention.gated_attention(t)
    t = t.but(grad=x, bias_wanted=False, **dict(zip(("y", "mean", "scale", "attended", "lse", "own"), kept)))
    with Largest(x, *kept) as seen:
        cpu_attention.gated_attention_backward(t)
    assert seen.elements <= x.numel(), "no gradient of the projections exists whole"
