"""The attention kernels against the definition: values, gradients, masks, layouts, poison."""

import pytest
import torch

from tests.ops.triton.attention_cases import Case, answers, guarded, inputs, mistakes
from tests.ops.triton.layouts import poisoned
from warpfold.check.checks import answer, wrong
from warpfold.ops import dispatch
from warpfold.ops.attention import attention, global_attention
from warpfold.ops.triton import attention as launchers
from warpfold.ops.triton.launch import configs, forced

ROWS, TILES = ("attention_forward", "attention_dq", "attention_dkdv"), ("attention_dbias", "attention_short")


def tiles(queries: int = 32, keys: int = 32, rows: int = 2):
    """Launch every kernel with such tiles within the context."""
    (of_rows,) = configs("BLOCK_Q BLOCK_K ROWS", (queries, keys, rows, 4, 1))
    (of_bias,) = configs("BLOCK_Q BLOCK_K", (queries, keys, 4, 1))
    chosen = {name + suffix: of_rows for name in ROWS for suffix in ("", "_fp32")}
    return forced(chosen | {name + suffix: of_bias for name in TILES for suffix in ("", "_fp32")})


FP32 = [
    Case(),  # an odd length over several tiles; one row masked throughout, and another program's rows are not whole
    Case(mask="clear"),
    Case(lead=(2, 3), keys=67, queries=67, heads=1, layout="column", bias="none", mask="tail"),
    Case(lead=(11,), keys=20, queries=20, layout="column"),  # rows of the bias's gradient in two slabs, of 6 and 5
    Case(lead=(2, 3), queries=19, keys=33, heads=1, width=64, layout="own", bias="batched", mask="tail"),
    Case(lead=(3,), queries=5, keys=1, width=8, layout="own", mask="clear"),
    Case(lead=(2,), queries=33, keys=40, heads=1, width=8, layout="own"),
    Case(lead=(1, 2), queries=21, keys=48, heads=1, width=32, layout="own", bias="shared", mask="tail"),
    Case(lead=(1,), queries=17, keys=18, heads=1, width=32, layout="own", mask="clear"),
]


SHORT = [
    Case(lead=(2,), heads=1),
    Case(lead=(2,), queries=37, keys=70, heads=2, width=24, layout="own", mask="tail"),
    Case(lead=(1, 2), queries=21, keys=35, heads=1, width=48, layout="own", bias="batched"),
    Case(lead=(2,), queries=33, keys=33, heads=1, width=8, layout="column", bias="none", mask="clear"),
]


@pytest.fixture(params=[False, True], ids=["long", "short"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute gradients in fp32 as those of long rows, as a GPU does, and as those of short ones."""
    monkeypatch.setattr(launchers, "serves_short", lambda *_: request.param)


@pytest.mark.parametrize("case", SHORT, ids=str)
def test_short_rows_are_as_exact(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """With several tiles of keys, and with one."""
    monkeypatch.setattr(launchers, "serves_short", lambda *_: True)
    given = inputs(case, torch.float32)
    several, one = found(given), found(given, (64, 128))
    assert not mistakes(given, several)
    assert not mistakes(given, one)


@pytest.mark.parametrize("width", [24, 48])
def test_widths_between_the_powers_of_two(width: int) -> None:
    given = inputs(Case(lead=(2,), queries=19, keys=33, heads=1, width=width), torch.float32)
    assert not mistakes(given, found(given))


def found(given, size: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    """What the kernels make of it."""
    with poisoned(pytest.MonkeyPatch()), dispatch.using("strict"), tiles(*size):
        return answers(attention, given)


@pytest.mark.parametrize("case", FP32, ids=str)
def test_is_as_exact_as_the_definition(case: Case) -> None:
    given = inputs(case, torch.float32)
    assert not mistakes(given, found(given))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "case", [Case(heads=1), Case(heads=1, layout="column", width=32, bias="none", mask="tail")], ids=str
)
def test_in_half_precision_too(case: Case, dtype: torch.dtype) -> None:
    given = inputs(case, dtype)
    assert not mistakes(given, found(given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [Case(lead=(2, 2), layout="own"), FP32[4], FP32[8]], ids=str)
@pytest.mark.usefixtures("default_tiles")
def test_in_the_default_tiles(case: Case, dtype: torch.dtype) -> None:
    given = inputs(case, dtype)
    with poisoned(pytest.MonkeyPatch()), dispatch.using("strict"):
        assert not mistakes(given, answers(attention, given))


def test_repeats_bit_by_bit() -> None:
    given = inputs(Case(queries=20, heads=1, layout="own"), torch.float32)
    first, second = found(given), found(given)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.usefixtures("both_ways")
def test_a_fully_masked_row_attends_to_all_alike() -> None:
    given = inputs(Case(lead=(2,), queries=20, keys=37, heads=1, layout="own"), torch.float32)
    given.mask[:] = 1
    given.mask[1] = 0
    ours = found(given)
    assert not mistakes(given, ours)
    for name, mean in (("out", given.v[1].double().mean(0)), ("dv", given.grad[1].double().sum(0) / 37)):
        # Of 37 values, or 20 gradients, of at most 4, in fp32: each addition rounds by half a unit.
        torch.testing.assert_close(ours[name][1].double(), mean.expand_as(ours[name][1]), rtol=0, atol=37 * 4 * 2**-24)
    assert not ours["dq"][1].any()
    assert not ours["dk"][1].any()


@pytest.mark.usefixtures("both_ways")
def test_masked_keys_do_not_exist() -> None:
    given = inputs(Case(lead=(2,), queries=20, keys=37, heads=1, layout="own", mask="clear"), torch.float32)
    given.mask[:, 5:9] = 0
    given.mask[:, 30:] = 0
    first = found(given)
    given.k[:, 5:9], given.v[:, 30:] = 1e4, -1e4
    second = found(given)
    assert all(torch.equal(first[name], second[name]) for name in ("out", "dq", "dbias"))
    assert not second["dk"][:, 30:].any()
    assert not second["dv"][:, 5:9].any()
    assert not second["dbias"][..., 30:].any()


def test_logarithms_are_those_of_the_definition() -> None:
    given = inputs(Case(lead=(2,), queries=20, keys=37, layout="own"), torch.float32)
    with tiles():
        _, lse = torch.ops.warpfold.attention(*(t[None] for t in (given.q, given.k, given.v, given.mask)), given.bias)
    q, k, bias = given.q.double(), given.k.double(), given.bias.double()
    logits = torch.einsum("rqhd,rkhd->rhqk", q, k) / 4 + bias
    true = logits.masked_fill(given.mask[:, None, None] == 0, float("-inf")).logsumexp(-1)
    assert true[1].isinf().all()
    true[1] = float("inf")
    # A logit has 16 products, a scale and a bias, their weights 37 additions; half a unit of fp32 for each of these.
    size = float((torch.einsum("rqhd,rkhd->rhqk", q.abs(), k.abs()) / 4 + bias.abs()).max())
    torch.testing.assert_close(lse[0].double(), true, rtol=2**-22, atol=(18 * size + 37) * 2**-24)


def test_masks_of_any_dtype() -> None:
    given = inputs(Case(lead=(2,), queries=20, keys=37, heads=1, layout="own"), torch.float32)
    first, mask = found(given), given.mask
    for dtype in (torch.bool, torch.int64, torch.bfloat16):
        given.mask = mask.to(dtype)
        assert all(torch.equal(first[name], x) for name, x in found(given).items()), dtype


def test_any_strides() -> None:
    given = inputs(Case(lead=(3,), queries=20, keys=24, heads=1, layout="own"), torch.float32)
    plain = found(given)
    given.q = guarded((16, 1, 20, 3), torch.float32).permute(3, 2, 1, 0).copy_(given.q)  # the last axis far apart
    given.mask = given.mask.t().contiguous().t()
    given.grad = given.grad.sum((0, -1), keepdim=True).expand_as(given.grad)  # of stride 0, as a sum's is
    again = found(given)
    assert torch.equal(again["out"], plain["out"])
    assert not mistakes(given, again)


def test_rows_that_share_their_keys() -> None:
    given = inputs(Case(lead=(3,), queries=20, keys=24, heads=1, layout="own"), torch.float32)
    given.k, given.v = given.k[:1].expand(3, -1, -1, -1), given.v[:1].expand(3, -1, -1, -1)
    assert not mistakes(given, found(given))


def test_global_attention() -> None:
    """Eight queries to a column, of one head; keys and values read through the strides of the alignment."""
    torch.manual_seed(0)
    q = torch.randn(3, 8, 8)
    k, v = (guarded((70, 3, 8), torch.float32).copy_(torch.randn(70, 3, 8)).transpose(0, 1) for _ in range(2))
    mask = (torch.rand(3, 70) > 0.3).float()
    mask[1] = 0
    args, grad = [*(t.detach().requires_grad_() for t in (q, k, v)), mask], torch.randn(3, 8, 8)
    with dispatch.using("strict"), tiles(16, 32, 2):
        ours = answer(global_attention, args, grad)
    assert not wrong(global_attention.definition, args, grad, ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_bias_of_minus_infinity(dtype: torch.dtype) -> None:
    """Over a first tile of keys, over keys here and there, and over all that are not masked: those that are masked are
    then attended to alike, as the definition has it."""
    given = inputs(Case(lead=(3,), queries=20, keys=70, heads=1, layout="own", mask="clear"), dtype)
    given.mask[1, 40:] = 0
    given.bias[..., :35] = float("-inf")
    given.bias[..., 3, 40:] = float("-inf")
    given.bias[..., 4, :69] = float("-inf")
    given.bias[..., 5, ::3] = float("-inf")
    given.bias[..., 6, :40] = float("-inf")  # in row 1 nothing is left
    assert not mistakes(given, found(given))


@pytest.mark.usefixtures("both_ways")
def test_a_query_without_any_key_is_not_a_number() -> None:
    given = inputs(Case(lead=(2,), queries=20, keys=37, heads=1, layout="own", mask="clear"), torch.float32)
    given.mask[1, 30:] = 0
    given.bias[..., 2, :] = float("-inf")  # of row 0 no key is left; of row 1 those that are masked
    ours, true = found(given), answers(attention.definition, given)
    for name, x in true.items():
        assert torch.equal(ours[name].isnan(), x.isnan()), name
        # Sums over 37 keys, 20 queries and 16 products of numbers of at most 4, in fp32.
        torch.testing.assert_close(ours[name], x, rtol=0, atol=(37 + 20 + 16) * 16 * 2**-24, equal_nan=True)
    assert true["out"][0, 2].isnan().all()
    assert not true["out"][1].isnan().any()
