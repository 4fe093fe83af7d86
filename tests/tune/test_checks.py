"""The check finds what is wrong with a fast way, and nothing where nothing is."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.helpers import random_batch, tiny_config, tiny_model
from warpfold.ops.dispatch import Op
from warpfold.tune.cases import ARGUMENTS, OPS, Case, inputs
from warpfold.tune.checks import check, compare, failures, odd
from warpfold.tune.sizes import ODD, DataSizes, of_settings

ATTENTION = ODD[0]
CPU = torch.device("cpu")


@pytest.fixture
def spoiled(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[Tensor], Tensor]], None]:
    """Makes an operation's fast way the definition with something wrong in the result."""

    def spoil(name: str, wrong: Callable[[Tensor], Tensor]) -> None:
        op = OPS[name]  # type: ignore[index]
        monkeypatch.setattr(op, "fast", lambda *args: wrong(op.definition(*args)))

    return spoil


class OnlyGradient(torch.autograd.Function):
    """Right in its value, wrong in its gradient."""

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
    assert op.refuses(*given.args) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "refuses", lambda *_: "not on Fridays")
        verdict = check(case, "fp32", CPU)
    assert (verdict.red, verdict.way, verdict.reason) == (False, "definition", "not on Fridays")


def test_errors_are_relative_and_rounding_is_nobodys_fault() -> None:
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    error = compare("output", exact + 0.05, exact + 0.05, exact, roundoff=1e-3)
    assert error.ours == pytest.approx(0.05 * 2**0.5 / 5)
    assert error.ours_worst == pytest.approx(0.05 / 4)
    assert not error.red
    assert not compare("output", exact + 5e-4, exact, exact, roundoff=1e-3).red
    assert compare("output", exact + 5e-2, exact, exact, roundoff=1e-3).red
    nothing = torch.zeros(2, dtype=torch.float64)  # a gradient that cancels is measured against what came in
    assert not compare("q", nothing + 1e-8, nothing, nothing, roundoff=6e-8, floor=1.0).red
    assert compare("q", nothing + 1e-3, nothing, nothing, roundoff=6e-8, floor=1.0).red


def test_odd_sizes_hold_every_operation_and_the_hard_cases() -> None:
    assert {case.op for case in ODD} == set(OPS)
    assert {case.width for case in ODD if case.op == "attention"} == {8, 16, 32, 64}
    assert {case.op for case in odd(["attention"])} == {"attention", "global_attention"}
    hard = [case for case in ODD if case.op == "attention"]
    assert any(case.keys for case in hard)
    assert any(case.batches > 1 and case.bias for case in hard)
    for case in hard:
        mask = inputs(case, torch.float32, CPU, masked=True).args[3]
        assert mask is not None
        assert (mask.sum(-1) == 0).any()  # a row of masked keys alone
        assert (mask.sum(-1) > 0).any()


@pytest.mark.parametrize("case", ODD, ids=lambda case: f"{case.op} {case.where}")
def test_inputs_are_strided_as_the_model_has_them(case: Case) -> None:
    given = inputs(case, torch.bfloat16, CPU)
    first = given.args[0]
    assert first is not None
    if case.turned and case.op != "global_attention":
        assert first.stride(0) < first.stride(1)
    if case.op in ("attention", "gate"):
        assert not first.is_contiguous() or first.shape[0] == 1
    wanted = [name for name, t in zip(ARGUMENTS[case.op], given.args) if t is not None and t.requires_grad]
    assert list(given.names) == wanted
    assert all(t.is_leaf for t in given.wanted)
    again = inputs(case, torch.bfloat16, CPU)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(given.args, again.args))  # type: ignore[arg-type]


# ---- the list of places


def key_of_call(op: Op[..., Tensor], args: tuple[Tensor | None, ...]) -> tuple[object, ...]:
    x = args[0]
    assert x is not None
    if op.name == "attention":
        q, k, bias = x, args[1], args[4] if len(args) > 4 else None
        assert k is not None
        return op.name, q.shape[:-3].numel(), q.shape[-3], k.shape[-3], *q.shape[-2:], bias is not None
    if op.name == "global_attention":
        k = args[1]
        assert k is not None
        return op.name, k.shape[:-2].numel(), k.shape[-2], *x.shape[-2:]
    if op.name == "outer_product":
        b, weight = args[1], args[2]
        assert b is not None
        assert weight is not None
        return op.name, *x.shape[-3:], b.shape[-2], weight.shape[0]
    places, c = x.shape[:-1].numel(), x.shape[-1]
    if op.name == "norm_linear":
        weight = args[3]
        assert weight is not None
        return op.name, places, c, weight.shape[0]
    if op.name == "transition":
        up = args[3]
        assert up is not None
        return op.name, places, c, up.shape[0]
    if op.name == "tail":
        o = args[1]
        assert o is not None
        return op.name, places, c, o.shape[-1]
    return op.name, places, c


def key_of_case(case: Case) -> tuple[object, ...]:
    if case.op == "attention":
        return case.op, case.rows, case.length, case.attended, case.heads, case.width, case.bias
    if case.op == "global_attention":
        return case.op, case.rows, case.attended, case.heads, case.width
    if case.op == "outer_product":
        return case.op, case.length, case.rows, case.channels, case.attended, case.outputs
    more = (case.outputs,) if case.op in ("norm_linear", "tail", "transition") else ()
    return (case.op, case.rows * case.length, case.channels, *more)


def test_the_list_is_what_the_model_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of an operation in the trunk is a case, and every case is called.  Norms stand elsewhere too."""
    config = replace(tiny_config(), recycles=0)
    model = tiny_model(recycles=0)
    called = set()
    before = Op.__call__

    def noting(self: Op[..., Tensor], *args: Tensor, **more: object) -> Tensor:
        called.add(key_of_call(self, args))
        return before(self, *args, **more)

    monkeypatch.setattr(Op, "__call__", noting)
    with torch.no_grad():
        model(random_batch(residues=9, sequences=5, extra=6, templates=2), 0)
    listed = {
        key_of_case(case) for case in of_settings(config, DataSizes(crop=9, max_msa=5, max_extra=6, max_templates=2))
    }
    assert listed <= called
    assert {key for key in called - listed if key[0] != "layer_norm"} == set()
