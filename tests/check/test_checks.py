"""The check reports errors of fast paths, and reports nothing for a correct path."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import as_multimer, filled_model, random_batch, random_complex, tiny_config
from warpfold.batch import Batch
from warpfold.check.cases import ODD, OPS, inputs
from warpfold.check.checks import Error, check, compare, failures, odd, run, truth
from warpfold.check.op_profile import OpCase
from warpfold.check.sizes import DataSizes, of_settings
from warpfold.model.alphafold import ModelConfig
from warpfold.model.axial import ROWS, AxialUpdate
from warpfold.model.evoformer import AttentionUpdate, TriangleMultiplication
from warpfold.model.layers import NoNorm
from warpfold.ops.dispatch import Op
from warpfold.ops.noise import DropoutFactors, dropout_factors
from warpfold.parallel.collectives import Pending
from warpfold.parallel.mesh import Group
from warpfold.parallel.sharded import ChannelExchange, exhaust

ATTENTION = ODD[0]
CPU = torch.device("cpu")


@pytest.fixture
def spoiled(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[Tensor], Tensor]], None]:
    """Return a function that replaces an operation's fast path by the definition with an error in its result."""

    def spoil(name: str, wrong: Callable[[Tensor], Tensor]) -> None:
        op = OPS[name]
        monkeypatch.setattr(op, "fast", lambda *args: wrong(op.definition(*args)))

    return spoil


class OnlyGradient(torch.autograd.Function):
    """An identity with a wrong gradient."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad * 1.05


def one_element(x: Tensor) -> Tensor:
    wrong = torch.zeros_like(x)
    wrong[-1, -1, -1, -1] = 0.5
    return x + wrong


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x * 1.05,
        lambda x: x.roll(1, 0),
        lambda x: torch.where(torch.arange(x.shape[0])[:, None, None, None] == 2, x.new_full((), torch.nan), x),
        one_element,
        OnlyGradient.apply,
    ],
    ids=["scaled", "rows mixed up", "NaN", "one number", "gradient"],
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_is_wrong_is_red(spoiled: Callable[..., None], wrong: Callable[[Tensor], Tensor], dtype: str) -> None:
    spoiled("attention", wrong)
    verdict = check(ATTENTION, dtype, CPU)
    assert verdict.red
    assert "from fp64" in verdict.says()
    assert dtype in verdict.says()


def test_a_kernel_that_draws_other_noise_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that draws different noise fails the check, even if the definition's draw is just as inaccurate.

    The reference value is computed with the definition's draw.
    """
    fast = dropout_factors._fast
    case = next(case for case in ODD if case.op == "tail" and case.drawn)

    def wrong(given: Any) -> Tensor:
        return fast(given._replace(stream=given.stream + 1))

    assert not check(case, "fp32", CPU).red
    monkeypatch.setattr(dropout_factors, "_fast", wrong)
    monkeypatch.setattr(dropout_factors, "prefer_definition", None)
    monkeypatch.setattr(OPS["tail"], "fast", lambda *args: OPS["tail"].definition(*args[:5], args[5].draw()))
    assert check(case, "fp32", CPU).red


def test_what_does_not_repeat_is_red(spoiled: Callable[..., None]) -> None:
    calls = iter((1.0, 1.0 + 2e-7, 1.0))
    spoiled("gate", lambda x: x * next(calls))
    verdict = check(next(case for case in ODD if case.op == "gate"), "fp32", CPU)
    assert verdict.red
    assert "two runs differ" in verdict.says()


@pytest.mark.parametrize("name", sorted(OPS))
def test_the_definition_passes_its_own_check(spoiled: Callable[..., None], name: str) -> None:
    spoiled(name, lambda x: x)
    assert failures([case for case in ODD if case.op == name], CPU) == []


def test_a_refusal_is_no_error() -> None:
    op = OPS["gate"]
    case = next(case for case in ODD if case.op == "gate")
    given = inputs(case, torch.float32, CPU)
    assert op.unsupported_reason(*given.args) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "unsupported_reason", lambda *_: "not on Fridays")
        verdict = check(case, "fp32", CPU)
    assert (verdict.red, verdict.way, verdict.reason) == (False, "definition", "not on Fridays")


def test_errors_are_relative_and_rounding_is_nobodys_fault() -> None:
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)

    def error(off: float, drawn: float, exact: Tensor = exact, floor: float = 0.0) -> Error:
        # Their maxima are combined.
        draws = [(drawn / 2, drawn / 2), (drawn * 2**0.5, drawn)]
        return compare("output", (exact + off).float(), exact, draws, torch.float32, floor)

    def about(value: float) -> object:
        # Rounding to fp32 changes an offset of 0.05.
        return pytest.approx(value, rel=1e-5)

    found = error(0.05, 0.05)
    assert found.ours == about(0.05 * 2**0.5 / 5)
    assert found.ours_worst == about(0.05 / 4)
    assert found.definition == about(found.ours)
    assert not found.red
    assert error(0.5, 0.05).red
    # The offset is below the roundoff of 4 in fp32.
    assert not error(1e-7, 0.0).red
    assert error(5e-6, 0.0).red
    # A gradient that cancels to 0 is compared with the incoming gradient.
    nothing = torch.zeros(2, dtype=torch.float64)
    assert not error(1e-8, 0.0, nothing, 1.0).red
    assert error(1e-3, 0.0, nothing, 1.0).red
    assert compare("output", exact.float()[:1], exact, [(0, 0)], torch.float32).red
    assert compare("output", exact.half(), exact, [(0, 0)], torch.float32).red


# ---- typical errors of kernels


def attended(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor | None, narrow: torch.dtype | None = None
) -> Tensor:
    """Compute attention like a kernel: in fp32, one key after another, rounded at the end."""
    s = torch.einsum("...qhd,...khd->...hqk", q.float(), k.float()) * q.shape[-1] ** -0.5
    s = s if bias is None else s + bias.float()
    s = s.masked_fill(mask[..., None, None, :] == 0, -1e9)
    p = (s - s.amax(-1, keepdim=True)).exp()
    total, sums = torch.zeros_like(p[..., 0]), torch.zeros_like(p[..., :1] * v[..., :1, 0, 0, None, None])
    for j in range(p.shape[-1]):
        total = total + p[..., j]
        sums = sums + p[..., j, None] * v[..., j, :, None, :].float()
        sums = sums if narrow is None else sums.to(narrow).float()
    return (sums / total[..., None]).transpose(-2, -3).to(q.dtype)


def without_the_last_key(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor | None) -> Tensor:
    return attended(q, k[..., :-1, :, :], v[..., :-1, :, :], mask[..., :-1], None if bias is None else bias[..., :-1])


MISTAKES: dict[str, Callable[..., Tensor]] = {
    "the last key dropped": without_the_last_key,
    "no mask": lambda q, k, v, mask, bias: attended(q, k, v, torch.ones_like(mask), bias),
    "the scale off by 1e-3": lambda q, k, v, mask, bias: attended(q * 1.001, k, v, mask, bias),
    "sums in bf16": lambda q, k, v, mask, bias: attended(q, k, v, mask, bias, torch.bfloat16),
    "values in bf16": lambda q, k, v, mask, bias: attended(q, k, v.bfloat16().to(v.dtype), mask, bias),
}
LONG = OpCase(op="attention", where="triangle", rows=3, length=90, heads=2, width=16, bias=True)
# In bf16, the definition rounds the logits, which changes every weight by about a percent. These errors are smaller.
HIDDEN_IN_BF16 = ("the scale off by 1e-3", "sums in bf16", "values in bf16")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [ATTENTION, LONG], ids=["short", "long"])
def test_mistakes_of_kernels_are_found(case: OpCase, dtype: torch.dtype) -> None:
    given = inputs(case, dtype, CPU, masked=True)
    true = truth(OPS["attention"].definition, given.args, given.grad, given.names)
    assert [str(e) for e in true.errors(run(attended, given)) if e.red] == []
    for name, way in MISTAKES.items():
        if dtype == torch.float32 or name not in HIDDEN_IN_BF16:
            found = [e for e in true.errors(run(way, given)) if e.red]
            assert found, name


def norm_linear_case() -> OpCase:
    return next(case for case in ODD if case.op == "norm_linear")


def test_mistakes_in_other_operations_are_found() -> None:
    given = inputs(norm_linear_case(), torch.float32, CPU)
    definition = OPS["norm_linear"].definition
    true = truth(definition, given.args, given.grad, given.names)
    assert not [e for e in true.errors(run(definition, given)) if e.red]
    for way in (
        lambda x, *rest: definition(x.bfloat16().float(), *rest),
        lambda x, nw, nb, w, b: definition(x, nw, nb, w * (1 + 1e-5), b),
        lambda x, *rest: definition(x, *rest, eps=1e-4),
    ):
        assert [e for e in true.errors(run(way, given)) if e.red]


def test_sums_in_bf16_are_found() -> None:
    given = inputs(replace(norm_linear_case(), channels=256), torch.bfloat16, CPU)
    definition = OPS["norm_linear"].definition
    true = truth(definition, given.args, given.grad, given.names)

    def summed(x: Tensor, nw: Tensor, nb: Tensor, w: Tensor, b: Tensor, narrow: torch.dtype) -> Tensor:
        n = OPS["layer_norm"].definition(x, nw, nb)
        # The bias is added to the first outputs only.
        total = torch.nn.functional.pad(b.bfloat16(), (0, len(w) - len(b))).to(narrow)
        for c in range(n.shape[-1]):
            total = (total + n[..., c, None].float() * w[:, c].bfloat16().float()).to(narrow)
        return total.bfloat16()

    for narrow in (torch.float32, torch.bfloat16):
        found = true.errors([summed(*given.args, narrow), *run(definition, given)[1:]])  # type: ignore[arg-type]
        assert found[0].red == (narrow == torch.bfloat16)


def test_the_bar_is_of_the_arithmetic_and_not_of_the_machine() -> None:
    """The tolerance depends on the arithmetic, and not on the machine.

    The drawn errors exceed those of the machine's own order of summation, and hardly depend on the seed.
    """
    given = inputs(LONG, torch.float32, CPU, masked=True)
    definition = OPS["attention"].definition
    true = truth(definition, given.args, given.grad, given.names)
    own = true.errors(run(definition, given))
    assert all(e.ours < 0.75 * e.definition for e in own)
    few = truth(definition, given.args, given.grad, given.names, draws=1).errors(run(definition, given))
    assert all(0.7 < a.definition / b.definition <= 1 for a, b in zip(few, own))


@pytest.mark.parametrize(("dtype", "times"), [(torch.float32, 2.0), (torch.float64, 3.0)])
def test_a_truth_of_the_same_dtype_is_off_by_a_draw_itself(dtype: torch.dtype, times: float) -> None:
    exact = torch.ones(10**6, dtype=torch.float64)
    error = 64 * torch.finfo(dtype).eps
    draws = [(error * 10**3, 10 * error)]

    def red(factor: float) -> bool:
        return compare("output", (exact + factor * error).to(dtype), exact, draws, dtype).red

    assert not red(0.95 * times)
    assert red(1.05 * times)


def test_odd_sizes_hold_every_operation_and_the_hard_cases() -> None:
    assert {case.op for case in ODD} == set(OPS)
    assert {case.width for case in ODD if case.op == "attention"} == {8, 16, 24, 32, 48, 64}
    assert {case.op for case in odd(["attention"])} == {"attention", "global_attention"}
    hard = [case for case in ODD if case.op == "attention"]
    assert any(case.keys for case in hard)
    assert any(case.batches > 1 and case.bias for case in hard)
    for case in hard:
        mask = inputs(case, torch.float32, CPU, masked=True).args[3]
        assert mask is not None
        # One row has only masked keys.
        assert (mask.sum(-1) == 0).any()
        assert (mask.sum(-1) > 0).any()


@pytest.mark.parametrize("case", ODD, ids=lambda case: f"{case.op} {case.where}")
def test_inputs_are_strided_as_the_model_has_them(case: OpCase) -> None:
    given = inputs(case, torch.bfloat16, CPU)
    first = given.args[0]
    assert first is not None
    if case.transposed and case.op != "global_attention":
        assert first.stride(0) < first.stride(1)
    if case.op in ("attention", "gate"):
        assert not first.is_contiguous() or first.shape[0] == 1
    args = zip(inspect.signature(OPS[case.op].definition).parameters, given.args)
    wanted = [name for name, t in args if isinstance(t, Tensor) and t.requires_grad]
    assert list(given.names) == wanted
    assert all(t.is_leaf for t in given.wanted)
    again = inputs(case, torch.bfloat16, CPU)
    for a, b in zip(given.args, again.args):
        x, y = (t.draw() if isinstance(t, DropoutFactors) else t for t in (a, b))
        assert torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x == y


# ---- the list of cases


# --op and the tables call gated_linear_residual "tail".
NAMES = {op.name: name for name, op in OPS.items()}


def key(op: Op[..., Tensor], args: Sequence[Any]) -> tuple[object, ...]:
    """Return the key of a call: element count and last axis of each tensor, and whether dropout factors are drawn."""
    named = zip(inspect.signature(op.definition).parameters, args)
    name, given = NAMES.get(op.name, op.name), {what: x for what, x in named if not what.endswith("mask")}
    # The number of projections that are combined depends on the plan.
    if name == "norm_linear":
        given = {"x": args[0]}
    # A case has one template, and the model has several.
    elif name == "triangle_multiplication":
        given = {what: x for what, x in given.items() if what not in ("x", "b")}
    sizes = ((what, x.numel(), x.shape[-1]) for what, x in given.items() if isinstance(x, Tensor))
    return name, *sizes, any(isinstance(x, DropoutFactors) for x in args)


MONOMER = tiny_config(recycles=0), random_batch(residues=9, sequences=5, extra=6, templates=2)
MULTIMER = as_multimer(MONOMER[0]), random_complex((4, 5), rows=12, sequences=5, extra=6, templates=2)


def in_parts(update: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Split a layer's update into its parts, as a rank runs them; an attention update runs without its norm."""

    def in_two(layer: AxialUpdate, read: Tensor, mask: Tensor, shared: Any, *onto: Any) -> Tensor:
        shared = layer.shared(read, mask) if shared is None and layer.shares else shared
        # One rank computes the exchange by channels.
        if isinstance(layer, TriangleMultiplication):
            exchange = ChannelExchange(layer, ROWS, read.shape[ROWS], Group("axial"), "")
            exhaust(exchange.product(read, mask, Pending(shared[0]), None, read.shape[ROWS]))
        norm = layer.norm
        layer.norm = NoNorm() if isinstance(layer, AttentionUpdate) else norm
        found = update(layer, layer.prepare(read, mask), mask, shared, *onto)
        layer.norm = norm
        return found

    return in_two


@pytest.mark.parametrize(("config", "batch"), [MONOMER, MULTIMER], ids=["monomer", "multimer"])
def test_the_list_is_what_the_model_calls(config: ModelConfig, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases match the calls of the model.

    Each call in the trunk in training is a case, and each case is called, either by layers that are one operation or by
    their parts, which ranks call. Norms and noise also occur elsewhere.
    """
    model = filled_model(config).train()
    model.noise.seed(0)
    called = set()
    before = Op.__call__

    def noting(self: Op[..., Tensor], *args: Tensor, **more: object) -> Tensor:
        called.add(key(self, args))
        return before(self, *args, **more)

    monkeypatch.setattr(Op, "__call__", noting)
    with torch.no_grad():
        model(batch, 0)
        for layer in {type(m) for m in model.modules() if isinstance(m, AxialUpdate)}:
            monkeypatch.setattr(layer, "update", in_parts(layer.update))
        model(batch, 0)
    listed = {
        key(OPS[case.op], inputs(case, torch.float32, "meta").args)
        for case in of_settings(config, DataSizes(crop=9, max_msa=5, max_extra=6, max_templates=2))
        # These belong to the losses.
        if case.op not in ("aligned_errors", "overlaps")
    }
    assert listed <= called
    elsewhere = ("layer_norm", "dropout_factors")
    assert {one for one in called - listed if one[0] not in elsewhere} == set()
