"""The choice between definition and fast path, and the report of refusals."""

import logging
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from warpfold.errors import UserError
from warpfold.model.axial import Executable
from warpfold.ops import dispatch
from warpfold.ops.attention import attention
from warpfold.ops.linear import gate
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import Plan


def odd(given: Any) -> str | None:
    x = given.x
    return "an odd length" if x.shape[0] % 2 else dispatch.EMPTY if x.shape[0] == 0 else None


def minus(given: Any) -> Tensor:
    return -given.x


@dispatch.op(minus, odd)
def plus(x: Tensor) -> Tensor:
    """A definition with a fast path that gives another result."""
    return +x


@pytest.fixture(autouse=True)
def no_refusals_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_refused", type(dispatch._refused)())


EVEN, ODD = torch.ones(2), torch.ones(3)


def test_the_fast_way_is_taken_where_it_does_not_refuse() -> None:
    assert plus(EVEN).tolist() == [-1, -1]
    assert plus(ODD).tolist() == [1, 1, 1]


def test_definitions_alone_where_they_are_asked_for() -> None:
    with dispatch.using("definition"):
        assert plus(EVEN).tolist() == [1, 1]
    assert plus(EVEN).tolist() == [-1, -1]


def test_a_choice_is_the_thread_s_own() -> None:
    """So two models in one process can run differently at the same time.  A new thread starts with the fast path."""
    found: list[list[float]] = []
    with dispatch.using("definition"):
        thread = threading.Thread(target=lambda: found.append(plus(EVEN).tolist()))
        thread.start()
        thread.join()
        assert plus(EVEN).tolist() == [1, 1]
    assert found == [[-1, -1]]


def test_a_choice_ends_with_its_context_whatever_happens() -> None:
    with pytest.raises(RuntimeError), dispatch.using("definition"), dispatch.using("strict"):
        raise RuntimeError
    assert plus(EVEN).tolist() == [-1, -1]


def test_a_whole_graph_enters_the_context() -> None:
    def run(x: Tensor) -> Tensor:
        with dispatch.using("definition"):
            inside = plus(x)
        return torch.stack([inside, plus(x)])

    torch._dynamo.reset()
    assert torch.compile(run, fullgraph=True, backend="eager")(EVEN).tolist() == [[1, 1], [-1, -1]]


def test_a_refusal_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "warpfold"):
        for _ in range(3):
            plus(ODD)
    assert dispatch.refusals() == {"plus: an odd length": 3}
    assert [record.getMessage() for record in caplog.records] == ["plus: an odd length: computed by its definition"]


def test_strict_makes_a_refusal_an_error_and_nothing_else() -> None:
    with dispatch.using("strict"):
        assert plus(EVEN).tolist() == [-1, -1]
        with pytest.raises(UserError, match=r"plus: an odd length\. Omit --strict"):
            plus(ODD)


def test_nothing_to_compute_is_no_refusal() -> None:
    with dispatch.using("strict"):
        assert plus(torch.ones(0)).shape == (0,)
    assert dispatch.refusals() == {}


class Plus(Executable):
    """A module that calls an operation."""

    def forward(self, x: Tensor) -> Tensor:
        return plus(x)


def test_an_execution_says_which_way_and_for_its_own_model_only() -> None:
    module = Execution(Plan(kernels="definition")).bind(Plus())
    assert module(EVEN).tolist() == [1, 1]
    assert plus(EVEN).tolist() == Plus()(EVEN).tolist() == [-1, -1]
    assert Execution().bind(module)(EVEN).tolist() == [-1, -1]


def test_an_operation_reads_as_its_definition() -> None:
    assert attention.__doc__ == attention.definition.__doc__
    assert attention.__name__ == "attention"


def test_tensors_of_several_devices_are_refused() -> None:
    assert gate.unsupported_reason(torch.ones(2), torch.ones(2, device="meta")) == "its tensors are on several devices"


def test_devices_without_a_fast_way_are_refused() -> None:
    meta = torch.ones(2, device="meta")
    assert gate.unsupported_reason(meta, meta) == "there are no fast paths for meta"
