"""Rules for masks, biases and layouts of attention, tested in every module that imports them."""

import torch
from torch import Tensor

from tests.ops.cases import Call, made
from warpfold.ops.attention import attention


def call(
    dtype: torch.dtype = torch.float32, lead: tuple[int, ...] = (2,), keys: int = 37, masked: str = "random"
) -> Call:
    """Make a call of 20 queries and one head with separate tensors."""
    orders = {f"{name}_order": "plain" for name in ("q", "k", "v")}
    return made("attention", dtype, lead=lead, Q=20, K=keys, h=1, masked=masked, **orders)


def fast(of: Call) -> dict[str, Tensor]:
    """Compute the results by the fast path."""
    return of.answers(attention.fast)


def test_a_fully_masked_row_attends_to_all_alike() -> None:
    one = call()
    one.given["mask"][:] = 1
    one.given["mask"][1] = 0
    ours = fast(one)
    assert not one.mistakes(ours)
    v, grad = (t.detach().double() for t in (one.given["v"], one.grad))
    for name, mean in (("out", v[1].mean(0)), ("v", grad[1].sum(0) / 37)):
        # Sums of 37 values or 20 gradients up to 4 in fp32, where each addition rounds by half a unit.
        torch.testing.assert_close(ours[name][1].double(), mean.expand_as(ours[name][1]), rtol=0, atol=37 * 4 * 2**-24)
    assert not ours["q"][1].any()
    assert not ours["k"][1].any()


def test_masked_keys_do_not_exist() -> None:
    one = call(masked="clear")
    one.given["mask"][:, 5:9] = 0
    one.given["mask"][:, 30:] = 0
    first = fast(one)
    with torch.no_grad():
        one.given["k"][:, 5:9], one.given["v"][:, 30:] = 1e4, -1e4
    second = fast(one)
    assert all(torch.equal(first[name], second[name]) for name in ("out", "q", "bias"))
    assert not second["k"][:, 30:].any()
    assert not second["v"][:, 5:9].any()
    assert not second["bias"][..., 30:].any()


def test_a_bias_of_minus_infinity() -> None:
    """At a first tile of keys, at single keys, and at all unmasked keys, where masked keys get uniform weights."""
    for dtype in (torch.float32, torch.float16):
        one = call(dtype, (3,), 70, masked="clear")
        one.given["mask"][1, 40:] = 0
        with torch.no_grad():
            bias = one.given["bias"]
            bias[..., :35] = float("-inf")
            bias[..., 3, 40:] = float("-inf")
            bias[..., 4, :69] = float("-inf")
            bias[..., 5, ::3] = float("-inf")
            bias[..., 6, :40] = float("-inf")  # row 1 has no keys left
        assert not one.mistakes()


def test_a_query_without_any_key_is_not_a_number() -> None:
    one = call(masked="clear")
    one.given["mask"][1, 30:] = 0
    with torch.no_grad():
        # In row 0 the query has no keys; in row 1 it is masked.
        one.given["bias"][..., 2, :] = float("-inf")
    ours, true = fast(one), one.answers(attention.definition)
    for name, x in true.items():
        assert torch.equal(ours[name].isnan(), x.isnan()), name
        # Sums over 37 keys, 20 queries and 16 products of numbers up to 4 in fp32.
        torch.testing.assert_close(ours[name], x, rtol=0, atol=(37 + 20 + 16) * 16 * 2**-24, equal_nan=True)
    assert true["out"][0, 2].isnan().all()
    assert not true["out"][1].isnan().any()


def test_logarithms_are_those_of_the_definition() -> None:
    given = {name: t.detach() for name, t in call().given.items()}
    q, k, bias = (given[name].double() for name in ("q", "k", "bias"))
    _, lse = torch.ops.warpfold.attention(*(given[n][None] for n in ("q", "k", "v", "mask")), given["bias"])
    logits = torch.einsum("rqhd,rkhd->rhqk", q, k) / 4 + bias
    true = logits.masked_fill(given["mask"][:, None, None] == 0, float("-inf")).logsumexp(-1)
    assert true[1].isinf().all()
    true[1] = float("inf")
    # A logit has 16 products, a scale and a bias, their weights 37 additions; half a unit of fp32 for each of these.
    size = float((torch.einsum("rqhd,rkhd->rhqk", q.abs(), k.abs()) / 4 + bias.abs()).max())
    torch.testing.assert_close(lse[0].double(), true, rtol=2**-22, atol=(18 * size + 37) * 2**-24)


def test_masks_of_any_dtype_and_bit_by_bit_the_same_again() -> None:
    one = call()
    first, mask = fast(one), one.given["mask"]
    for dtype in (torch.float32, torch.bool, torch.int64, torch.bfloat16):
        one.given["mask"] = mask.to(dtype)
        assert all(torch.equal(first[name], x) for name, x in fast(one).items()), dtype


def test_large_logits_are_finite() -> None:
    for dtype, size in ((torch.float32, 1000.0), (torch.bfloat16, 50.0)):
        one = call(dtype)
        for name in ("q", "bias"):
            one.given[name] = (one.given[name].detach() * size).requires_grad_()
        assert all(bool(t.isfinite().all()) for t in fast(one).values())
