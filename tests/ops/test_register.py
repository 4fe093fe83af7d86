"""The registered operations under torch's opcheck, compilation and checkpointing, and their layouts."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.ops.cases import CASES, FEW, Call, Draw, case, made, operations, to_meta
from warpfold.ops import dispatch
from warpfold.ops.attention import attention
from warpfold.ops.linear import gate, norm_linear


class Watch(torch.utils._python_dispatch.TorchDispatchMode):
    """Records calls of our operations and their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if function.namespace == "warpfold":
            self.seen.append((function, args))
        return function(*args, **(kwargs or {}))


def watched(call: Call) -> list[tuple[Any, tuple[Any, ...]]]:
    """Return the operations of a forward and a backward pass with their arguments."""
    with Watch() as watch:
        call.answers(call.op.fast)
    assert len(watch.seen) == (1 if call.grad is None else 2), "one operation forward and one backward"
    return [(run, tuple(a.detach() if isinstance(a, Tensor) else a for a in args)) for run, args in watch.seen]


@pytest.mark.parametrize("name", operations())
def test_results_are_as_they_are_declared(name: str) -> None:
    """On meta tensors, the forward and the backward operation return the shapes, strides and dtypes of the results."""
    for of in (of for of in CASES if CASES[of][0] == name):
        for function, args in watched(case(of, torch.float64)):
            runs = function(*args), function(*map(to_meta, args))
            results, declared = (run if isinstance(run, tuple) else (run,) for run in runs)
            for ours, right in zip(results, declared, strict=True):
                if ours is not None:
                    assert (ours.shape, ours.stride(), ours.dtype) == (right.shape, right.stride(), right.dtype), of


@pytest.mark.parametrize("name", FEW)
def test_torch_finds_schema_shapes_and_gradients_in_order(name: str) -> None:
    for function, args in watched(case(name, torch.float64)):
        checked = torch.library.opcheck(function, args)
        assert set(checked.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", [name for name in FEW if name.endswith(" 0")])
def test_a_whole_graph_compiles_and_trains(name: str) -> None:
    torch._dynamo.reset()  # the number of graphs is limited
    call = case(name, torch.float64)
    # Calling `op` would use the definition for small tensors.
    run = torch.compile(call.op.fast, fullgraph=True, backend="aot_eager", dynamic=False)
    assert not call.mistakes(call.answers(run))


def given(*shapes: tuple[int, ...]) -> list[Tensor]:
    draw = Draw()
    return [draw(*shape).requires_grad_() for shape in shapes]


def test_selective_checkpointing_keeps_what_it_is_told_to_keep() -> None:
    call = made("attention", torch.float64)

    def keep(context: object, function: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        kept = function is torch.ops.warpfold.attention.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def run(*given: Tensor) -> Tensor:
        out: Tensor = checkpoint(
            lambda *args: attention.fast(*args).exp().log(),
            *given,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(keep),
        )
        return out

    with Watch() as watch:
        ours = call.answers(run)
    names = [function.__name__ for function, _ in watch.seen]  # type: ignore[attr-defined]
    assert names == ["attention.default", "attention_backward.default"], "kept, so not computed again"
    assert not call.mistakes(ours)


def test_columns_are_read_and_written_through_strides() -> None:
    call = made("attention", torch.float64, q_order="turned")
    out = attention.fast(**call.given)
    assert out.transpose(0, 1).is_contiguous(), "in memory as the columns' tensor is"


def test_projections_of_one_tensor_begin_at_wide_words() -> None:
    x, norm_weight, norm_bias, weight = given((3, 4, 6), (6,), (6,), (12, 6))
    y = norm_linear.fast(x, norm_weight, norm_bias, weight)
    assert y.shape == (3, 4, 12)
    assert y.stride() == (64, 16, 1)


def test_gradients_that_nobody_wants_are_not_made() -> None:
    call = made("attention", torch.float64)
    call.given["bias"] = call.given["bias"].detach()
    with dispatch.using("strict"):
        assert set(call.answers(attention)) == {"out", "q", "k", "v"}


def test_arguments_go_by_name_in_any_order_and_a_wrong_call_is_a_type_error() -> None:
    x, g = given((3, 4), (3, 4))
    assert torch.equal(gate.fast(g=g, x=x), gate.fast(x, g))
    n = norm_linear.fast(x, norm_bias=x[0], weight=g, norm_weight=g[0])
    assert torch.equal(n, norm_linear.fast(x, g[0], x[0], g, None, 1e-5))
    for run in (gate.fast, gate.unsupported_reason, gate.prefer_definition):
        with pytest.raises(TypeError):
            run(x, g, h=g)
    for run in (gate.fast, gate.unsupported_reason):
        with pytest.raises(TypeError):
            run(x)


def test_a_second_derivative_is_an_error() -> None:
    x, g = given((3, 4), (3, 4))
    (dx,) = torch.autograd.grad(gate.fast(x, g).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="gate_backward"):
        torch.autograd.grad(dx.sum(), g)
