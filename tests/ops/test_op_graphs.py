"""torch.compile on the branch that CUDA tensors take: one graph, a node for each operation.  No GPU is needed."""

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from tests.ops.cases import GIVEN, differentiable, made, operations
from warpfold.errors import UserError
from warpfold.ops import capabilities, dispatch
from warpfold.ops.linear import gate
from warpfold.ops.noise import DropoutFactors
from warpfold.ops.triangle import triangle_factor, triangle_multiplication


class Properties:
    """The properties of a GPU in torch's form."""

    def __init__(self, major: int) -> None:
        self.major, self.minor, self.name = major, 0, "GPU"


@pytest.fixture(params=[9])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stand in for a GPU of some compute capability, with fake tensors."""
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "_get_device_properties", lambda _: Properties(request.param), raising=False)
    monkeypatch.setattr(dispatch, "TRITON", True)
    monkeypatch.setattr(dispatch, "_refused", Counter())
    monkeypatch.setattr(capabilities, "launch_problem", lambda: "")
    capabilities.capabilities.cache_clear()
    with FakeTensorMode():
        yield
    torch._dynamo.reset()
    capabilities.capabilities.cache_clear()


def cuda(*shape: int) -> Tensor:
    return torch.empty(shape, device="cuda", dtype=torch.bfloat16)


def traced(run: Callable[..., Tensor], *args: Tensor, whole: bool = True, dynamic: bool = False) -> list[Counter[str]]:
    """Count our operations in each graph."""
    graphs: list[Counter[str]] = []

    def note(module: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        names = [str(node.target).removesuffix(".default") for node in module.graph.nodes if node.op == "call_function"]
        graphs.append(Counter(name.removeprefix("warpfold.") for name in names if name.startswith("warpfold.")))
        return module.forward

    torch._dynamo.reset()
    torch.compile(run, fullgraph=whole, backend=note, dynamic=dynamic)(*args)
    return graphs


def on_cuda(x: object) -> object:
    """Return a fake tensor on a GPU with the same strides."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") if isinstance(x, Tensor) else x


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", [name for name, op in operations().items() if differentiable(op) != [""]])
def test_every_operation_is_one_node_of_one_graph(gpu: None, name: str, dynamic: bool) -> None:
    with unset_fake_temporarily():
        call = made(name, torch.bfloat16, with_factors=GIVEN, x_order="turned")
    given = {of: on_cuda(x) for of, x in call.given.items()}
    tensors = {of: x for of, x in given.items() if isinstance(x, Tensor)}

    def run(*args: Tensor) -> Tensor:
        out: Tensor = call.op(**given | dict(zip(tensors, args)))
        return out

    with dispatch.using("strict"):
        graphs = traced(run, *tensors.values(), dynamic=dynamic)
    assert graphs == [Counter({name.removeprefix("global_"): 1})]


def test_dropout_that_is_drawn_on_the_way_is_no_node(gpu: None) -> None:
    def multiplied(x: Tensor, mask: Tensor, row: Tensor, weight: Tensor, out: Tensor, key: Tensor) -> Tensor:
        factors = DropoutFactors(key, 1, 0.25, x.dtype, (1, 3, 16), (48, 16, 1))
        return triangle_multiplication(x, mask, None, row, row, weight, None, row, row, out, row, False, True, factors)

    x, mask, row, weight, out = cuda(3, 3, 16), cuda(3, 3), cuda(16), cuda(80, 16), cuda(16, 16)
    key = torch.zeros(2, dtype=torch.int64, device="cuda")
    assert traced(multiplied, x, mask, row, weight, out, key) == [Counter(triangle_multiplication=1)]


def test_a_refusal_is_its_definition_in_the_graph_and_strict_makes_it_an_error(gpu: None) -> None:
    x, double = cuda(3, 4, 16), cuda(3, 4, 16).double()
    assert traced(gate, x, double) == [Counter()]
    with dispatch.using("strict"):
        with pytest.raises(UserError, match="gate: in fp64 no kernel is exact"):
            traced(gate, x, double, whole=False)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="gate: in fp64 no kernel is exact"):
            traced(gate, x, double)


def test_strict_refuses_triangle_products_that_are_too_wide_for_kernels(gpu: None) -> None:
    """In fp32 the definition is preferred, since torch's products are as fast as a kernel could be."""
    c, h = 320, 128
    x, mask, row, hidden = cuda(4, 4, c), cuda(4, 4), cuda(c), cuda(h)
    operands = x, mask, None, row, row, cuda(4 * h + c, c), None, hidden, hidden, cuda(c, h), row, False, True
    factor = x, mask, row, row, cuda(4 * h + c, c), None, 0, False
    for op, given in ((triangle_multiplication, operands), (triangle_factor, factor)):
        with dispatch.using("strict"), pytest.raises(UserError, match=f"{op.name}: 320 channels, 128 of a factor"):
            op(*given)
        assert op.prefer_definition is not None
        assert not op.prefer_definition(op.arguments(*given))
        assert op.prefer_definition(op.arguments(*(a.float() if isinstance(a, Tensor) else a for a in given)))


def test_a_wrong_shape_is_an_error_that_names_the_operand_in_a_graph_too(gpu: None) -> None:
    wrong = r"gate: g is \[16\], not \[\*, c\] = \[3, 4, 16\], as x is \[3, 4, 16\]"
    with pytest.raises(ValueError, match=wrong):
        traced(gate, cuda(3, 4, 16), cuda(16), whole=False)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=wrong):
        traced(gate, cuda(3, 4, 16), cuda(16))


def test_what_is_compiled_follows_the_choice_of_kernels() -> None:
    """A function is compiled again for another choice, because torch guards the choice."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x + (dispatch.kernels() == "definition"), backend="eager", fullgraph=True)

    def results() -> list[float]:
        found = [compiled(torch.zeros(())).item()]
        for kernels in ("definition", "fast"):
            with dispatch.using(kernels):
                found.append(compiled(torch.zeros(())).item())
        return found

    with ThreadPoolExecutor(1) as fresh:  # a thread without a choice
        assert fresh.submit(results).result() == [0, 1, 0]


@pytest.mark.parametrize("gpu", [7], indirect=True)
def test_a_gpu_without_kernels_is_refused_traced_or_not(gpu: None) -> None:
    x = cuda(3, 4, 16)
    reason = "the GPU has compute capability 7.0, and the kernels need 8.0"
    assert gate.unsupported_reason(x, x) == reason
    assert traced(gate, x, x) == [Counter()]
