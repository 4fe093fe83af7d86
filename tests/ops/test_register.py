"""The registered operations: what torch's own checks, compilation and checkpointing make of them, and their layouts."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from warpfold.check.checks import answer, wrong
from warpfold.ops import dispatch
from warpfold.ops.attention import attention, gated_attention, global_attention
from warpfold.ops.dispatch import Op
from warpfold.ops.linear import gate, gated_linear_residual, layer_norm, norm_linear
from warpfold.ops.triangle import triangle_multiplication

Arguments = tuple[Tensor | None, ...]


def given(*shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(len(shapes))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def _mask(*shape: int) -> Tensor:
    mask = (torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.3).double()
    mask.view(-1, shape[-1])[0] = 0  # a row with nothing to attend to
    return mask


def _columns() -> Arguments:
    q, k, v = given((4, 5, 2, 3), (4, 5, 2, 3), (4, 5, 2, 3))
    turned = (t.transpose(0, 1) for t in (q, k, v))
    return *turned, _mask(5, 4)


def _rows() -> Arguments:
    q, k, v, bias = given((2, 3, 5, 2, 4), (2, 3, 6, 2, 4), (2, 3, 6, 2, 4), (2, 1, 2, 5, 6))
    return q, k, v, _mask(2, 3, 6), bias


def _projected() -> Arguments:
    (y,) = given((3, 5, 4, 24))
    q, k, v = (t.unflatten(-1, (2, 4)) for t in y.split(8, -1))
    return q, k, v, _mask(3, 5, 4)


def _pointwise() -> Arguments:
    q, k, v = given((3, 5, 1, 2, 4), (3, 5, 4, 2, 4), (3, 5, 4, 2, 4))
    return q, k, v, _mask(1, 1, 4)


CASES: dict[str, tuple[Op[..., Tensor], Callable[[], Arguments]]] = {
    "attention, rows": (attention, _rows),
    "attention, columns": (attention, _columns),
    "attention, projected": (attention, _projected),
    "attention, pointwise": (attention, _pointwise),
    "global attention": (global_attention, lambda: (*given((3, 2, 4), (3, 5, 4), (3, 5, 4)), _mask(3, 5))),
    "layer_norm": (layer_norm, lambda: (*given((3, 4, 6), (6,), (6,)),)),
    "layer_norm, turned": (layer_norm, lambda: (given((3, 4, 6))[0].transpose(0, 1), *given((6,), (6,)))),
    "norm_linear": (norm_linear, lambda: (*given((3, 4, 6), (6,), (6,), (9, 6), (9,)),)),
    "layer_norm, no bias": (layer_norm, lambda: (*given((3, 4, 6), (6,)), None)),
    "norm_linear, no bias": (norm_linear, lambda: (*given((3, 4, 6), (6,), (6,), (9, 6)),)),
    "norm_linear, no bias of the norm": (
        norm_linear,
        lambda: (*given((3, 4, 6), (6,)), None, *given((9, 6), (4,))),
    ),
    "norm_linear, turned": (
        norm_linear,
        lambda: (given((3, 4, 6))[0].mT.mT.transpose(0, 1), *given((6,), (6,), (9, 6))),
    ),
    "gate": (gate, lambda: (*given((3, 4, 6), (3, 4, 6)),)),
    "gated_linear_residual": (
        gated_linear_residual,
        lambda: (*given((3, 4, 6), (3, 4, 8), (3, 4, 8), (6, 8), (6,)), torch.rand(1, 4, 6).double()),
    ),
    "gated_linear_residual, all kept": (
        gated_linear_residual,
        lambda: (*given((3, 4, 6), (3, 4, 8), (3, 4, 8), (6, 8), (6,)),),
    ),
    "gated_attention": (
        gated_attention,
        lambda: (
            *given((3, 4, 6), (6,), (6,), (32, 6), (8,), (6, 8), (6,)),
            *(torch.ones(3, 4).double(), *given((2, 4, 4)), 2, torch.rand(3, 1, 6).double()),
        ),
    ),
    "gated_attention, a bias with its heads innermost": (
        gated_attention,
        lambda: (
            *given((2, 4, 4, 6), (6,), (6,), (32, 6), (8,), (6, 8), (6,)),
            *(torch.ones(2, 4, 4).double(), given((2, 4, 4, 2))[0].movedim(-1, -3), 2),
        ),
    ),
    "gated_attention, its own bias, turned, no biases": (
        gated_attention,
        lambda: (
            given((4, 4, 6))[0].transpose(0, 1),
            *given((6,), (6,), (34, 6)),
            *(None, *given((6, 8)), None, torch.ones(4, 4).double(), None, 2),
        ),
    ),
    "gated_attention, the update alone, no bias at all, turned": (
        gated_attention,
        lambda: (
            *(given((4, 4, 6))[0].transpose(0, 1), *given((6,)), None, *given((34, 6)), None, *given((6, 8)), None),
            *(torch.ones(4, 4).double(), None, 2, torch.rand(4, 1, 6).double(), 1e-5, False),
        ),
    ),
    "triangle_multiplication": (
        triangle_multiplication,
        lambda: (
            *(given((4, 4, 6))[0], torch.ones(4, 4).double()),
            *given((6,), (6,), (38, 6), (38,), (8,), (8,), (6, 8), (6,)),
            *(True, False, torch.rand(1, 4, 6).double()),
        ),
    ),
    "triangle_multiplication, incoming, fused, turned, no biases": (
        triangle_multiplication,
        lambda: (
            *(given((4, 4, 6))[0].transpose(0, 1), torch.ones(4, 4).double()),
            *(*given((6,), (6,), (38, 6)), None, *given((8,), (8,), (6, 8)), None, False, True),
        ),
    ),
    "triangle_multiplication, the update alone, no bias at all, turned": (
        triangle_multiplication,
        lambda: (
            *(given((4, 4, 6))[0].transpose(0, 1), torch.ones(4, 4).double()),
            *(*given((6,)), None, *given((38, 6)), None, *given((8,)), None, *given((6, 8)), None),
            *(True, False, torch.rand(1, 4, 6).double(), 1e-5, False),
        ),
    ),
}


def towards(op: Op[..., Tensor], arguments: Arguments) -> Tensor:
    """Return a gradient of the operation's output."""
    with torch.no_grad():
        shape = op.definition(*arguments).shape
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", CASES)
def test_the_fast_way_is_the_definition(name: str) -> None:
    op, make = CASES[name]
    arguments = make()
    grad = towards(op, arguments)
    assert not wrong(op.definition, arguments, grad, answer(op.fast, arguments, grad))


@pytest.mark.parametrize("name", CASES)
def test_torch_finds_schema_shapes_and_gradients_in_order(name: str) -> None:
    op, make = CASES[name]
    arguments = make()
    grad = towards(op, arguments)
    seen: list[tuple[str, tuple[object, ...]]] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if function.namespace == "warpfold":
                seen.append((function, args))
            return function(*args, **(kwargs or {}))

    with Watch():
        answer(op.fast, arguments, grad)
    assert len(seen) == 2, "one operation forward and one backward"
    for function, args in seen:
        checked = torch.library.opcheck(function, tuple(a.detach() if isinstance(a, Tensor) else a for a in args))
        assert set(checked.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", CASES)
def test_a_whole_graph_compiles_and_trains(name: str) -> None:
    torch._dynamo.reset()  # of graphs of other cases: so many are allowed
    op, make = CASES[name]
    arguments = make()

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=False)
    def run(*given: Tensor) -> Tensor:
        return op.fast(*given) * 2  # not `op`, which takes the definition where all is small

    grad = towards(op, arguments)
    assert not wrong(lambda *given: op.definition(*given) * 2, arguments, grad, answer(run, arguments, grad))


def test_selective_checkpointing_keeps_what_it_is_told_to_keep() -> None:
    arguments = _rows()
    grad = towards(attention, arguments)
    calls: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if function.namespace == "warpfold":
                calls.append(function.__name__)
            return function(*args, **(kwargs or {}))

    def keep(context: object, function: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        kept = function is torch.ops.warpfold.attention.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def run(*given: Tensor) -> Tensor:
        out: Tensor = checkpoint(
            lambda *args: attention.fast(*args).sin(),
            *given,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(keep),
        )
        return out

    with Watch():
        ours = answer(run, arguments, grad)
    assert calls == ["attention.default", "attention_backward.default"], "kept, so not computed again"
    assert not wrong(lambda *given: attention.definition(*given).sin(), arguments, grad, ours)


def test_columns_are_read_and_written_through_strides() -> None:
    *qkv, mask = _columns()
    out = attention.fast(*qkv, mask)
    assert out.shape == (5, 4, 2, 3)
    assert out.transpose(0, 1).is_contiguous(), "in memory as the columns' tensor is"


def test_projections_of_one_tensor_begin_at_wide_words() -> None:
    x, norm_weight, norm_bias, weight = given((3, 4, 6), (6,), (6,), (12, 6))
    y = norm_linear.fast(x, norm_weight, norm_bias, weight)
    assert y.shape == (3, 4, 12)
    assert y.stride() == (64, 16, 1)


def test_gradients_that_nobody_wants_are_not_made() -> None:
    q, k, v, mask, bias = _rows()
    assert bias is not None
    with dispatch.using("strict"):
        out = attention(q, k, v, mask, bias.detach())
    assert len(torch.autograd.grad(out.sum(), (q, k, v))) == 3


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
