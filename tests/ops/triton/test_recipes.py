"""Recipes repeat calls of operations, and are not used for other layouts or settings.  No kernel runs here."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime.jit import JITFunction, KernelInterface

from tests.launches import Launches
from tests.ops.cases import REPEATED, case
from warpfold.ops import dispatch
from warpfold.ops.attention import gated_attention
from warpfold.ops.linear import layer_norm
from warpfold.ops.triton import launch, recipe
from warpfold.ops.triton.compile import source
from warpfold.ops.triton.launch import KernelConfig, LaunchTable, TableEntry, forced, recorded, table_used

Launched = list[dict[str, Any]]  # arguments and options
WEIGHT = torch.ones(16)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launched]:
    """Record launches of CPU tensors without running them, without gradients, and with empty tables of recipes."""
    found: Launched = []
    monkeypatch.setattr(KernelInterface, "__getitem__", lambda kernel, grid: lambda **given: found.append(given))
    for table in dispatch.recipes.values():
        table.clear()
    launch.reset()
    with dispatch.interpreting(), torch.no_grad():
        yield found
    layer_norm._recipes.clear()
    launch.reset()


def norm(x: Tensor | None = None) -> Tensor:
    """Call the operation with a tensor of a fixed layout, or with this tensor."""
    return layer_norm(torch.randn(4, 6, 16) if x is None else x, WEIGHT, None)


def test_a_second_call_launches_the_same_with_its_own_tensors(launched: Launched) -> None:
    x = torch.randn(4, 6, 16)
    first, second = norm(), norm(x)
    before, now = launched
    assert len(layer_norm._recipes) == 1
    assert now["x"].data is x
    assert now["y"].data.data_ptr() == second.data_ptr() != first.data_ptr()
    plain = [name for name, value in now.items() if not isinstance(value, tuple | Tensor)]
    assert {name: now[name] for name in plain} == {name: before[name] for name in plain}
    assert now["x"].strides == before["x"].strides
    assert type(now["x"]) is type(before["x"])
    assert second.stride() == first.stride()


def test_a_slice_is_repeated_where_it_lies(launched: Launched) -> None:
    z = torch.randn(3, 4, 6, 16)
    for part in z:
        norm(part)
    assert [each["x"].data.data_ptr() for each in launched] == [part.data_ptr() for part in z]
    assert len(layer_norm._recipes) == 1


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(4, 7, 16), torch.randn(4, 16, 6).mT, torch.randn(4, 6, 16, dtype=torch.bfloat16),
        torch.randn(4, 6, 24)[..., :16],
    ],
    ids=["shape", "strides", "dtype", "padding"],
)  # fmt: skip
def test_another_layout_is_worked_out(launched: Launched, x: Tensor) -> None:
    norm()
    norm(x)
    assert len(layer_norm._recipes) == 2


def test_what_lies_behind_a_tensor_counts() -> None:
    """A bias with padded rows is read past its end if there is memory."""
    padded = torch.randn(7 * 16)
    with_more, without = padded.as_strided((5, 6), (16, 1)), padded[: 4 * 16 + 6].clone().as_strided((5, 6), (16, 1))
    assert recipe.layout([with_more]) != recipe.layout([without])
    assert recipe.layout([with_more]) == recipe.layout([padded[16:].as_strided((5, 6), (16, 1))])


def test_nothing_is_repeated_where_somebody_looks_on(launched: Launched) -> None:
    norm()
    ((key, known),) = layer_norm._recipes.items()
    assert known is not None
    calls: list[object] = []
    layer_norm._recipes[key] = lambda given: calls.append(given) or known(given)
    norm()
    assert len(calls) == 1
    with recorded() as launches:
        norm()
    with Launches() as seen:
        norm()
    with torch.enable_grad():
        norm(torch.randn(4, 6, 16, requires_grad=True))
    with torch.profiler.profile():
        norm()
    assert len(launches) == 1
    assert seen.count > 0
    assert len(calls) == 1


def of_warps(warps: int) -> LaunchTable:
    """Make a table whose launches are identified by their warps."""
    entry = TableEntry("layer_norm", (16, 4), KernelConfig({"BLOCK_M": 16}, warps, 1))
    return LaunchTable(launch.SHIPPED / "toy.json", {}, (entry,))


def with_forced(call: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    with forced({"layer_norm": KernelConfig({"BLOCK_M": 16}, 32, 1)}):
        call()


def with_table(call: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    with table_used(of_warps(32)):
        call()


def with_a_new_table(call: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(launch, "tables_for", lambda device: (of_warps(32),))
        launch.reset()
        call()
    launch.reset()


@pytest.mark.parametrize("change", [with_forced, with_table, with_a_new_table])
def test_another_launch_table_is_heeded_at_once(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, change: Callable[..., None]
) -> None:
    norm()
    norm()
    change(norm, monkeypatch)
    norm()
    usual = launched[0]["num_warps"]
    assert [each["num_warps"] for each in launched] == [usual, usual, 32, usual]


def test_tf32_is_heeded_at_once(launched: Launched) -> None:
    norm()
    dispatch.allow_tf32(True)
    try:
        norm()
    finally:
        dispatch.allow_tf32(False)
    norm()
    assert ["tf32" in each[launch.DOTS] for each in launched] == [False, True, False]


def test_refusals_are_counted_each_time(launched: Launched) -> None:
    before = dispatch.refusals()
    x = torch.randn(4, 2**12 * 16)
    for _ in range(2):
        layer_norm(x, torch.ones(x.shape[-1]), None)
    assert sum(dispatch.refusals(before).values()) == 2


def test_a_recipe_holds_no_memory_and_frees_what_it_is_done_with(launched: Launched) -> None:
    """A gated attention frees everything except the result, and allocates nothing that no kernel uses."""
    c = 32
    # In fp32 the operation is composed of others on a GPU.
    x, bias = torch.randn(6, 8, c).half(), torch.randn(2, 8, 8).half()
    weights = [torch.ones(c), None, torch.randn(4 * c, c), None, torch.randn(c, c), None]
    gated_attention._recipes.clear()
    gated_attention(x, *weights, torch.ones(6, 8), bias, 2)
    (repeat,) = gated_attention._recipes.values()
    known = repeat.__self__  # type: ignore[union-attr]
    assert isinstance(known, recipe.Recipe)
    slots = [slot for _, _, unused in known._steps for slot in unused]
    assert len(slots) == len(set(slots))
    allocated = [made for _, made, _ in known._steps if made is not None]
    assert set(allocated) - set(slots) == {known._result.slot}
    launches = [step[0] for step in known._steps if isinstance(step[0], recipe._Launch)]
    assert launches
    assert not any(isinstance(value, Tensor) for each in launches for value in each.values)
    actions = [getattr(step[0], "specialise", step[0]) for step in known._steps]
    held = [value for action in actions for value in (getattr(action, "__closure__", None) or ())]
    assert not any(isinstance(cell.cell_contents, Tensor) for cell in held)
    gated_attention._recipes.clear()


class Compiled:
    """Stand-in for Triton's CompiledKernel, which the interpreter does not have."""

    function, packed_metadata = 7, (4, 1, 0)

    def __init__(self, kernel: Any, grid: tuple[int, ...], given: dict[str, Any], direct: list["Direct"]) -> None:
        self.kernel, self.grid, self.given, self.direct = kernel, grid, given, direct

    def run(self, x: int, y: int, z: int, stream: int, function: int, metadata: object, *values: Any) -> None:
        assert (function, metadata, stream) == (self.function, self.packed_metadata, 0)
        assert (x, y, z) == (*self.grid, 1, 1)[:3]
        assert values[:3] == (None, None, None)  # launch metadata, hooks
        self.direct.append((self, values[3:]))


Direct = tuple[Compiled, tuple[Any, ...]]


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch, launched: Launched) -> list[Direct]:
    """Record direct launches of compiled code; the others are in `launched`."""
    found: list[Direct] = []

    def start(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Compiled]:
        return lambda **given: launched.append(given) or Compiled(kernel, grid, given, found)

    monkeypatch.setattr(KernelInterface, "__getitem__", start)
    return found


def test_a_repeated_launch_goes_past_triton(launched: Launched, direct: list[Direct]) -> None:
    x = torch.randn(4, 6, 16)
    norm()
    y = norm(x)
    assert len(launched) == len(direct) == 1
    compiled, values = direct[0]
    given = dict(zip(compiled.kernel.arg_names, values, strict=True))
    assert given["x"][0] == x.data_ptr()
    assert given["y"][0] == y.data_ptr()
    assert given["x"][1:] == launched[0]["x"][1:]


@pytest.mark.parametrize("first", [0, 1])
def test_addresses_that_16_does_not_divide_go_through_triton(
    launched: Launched, direct: list[Direct], first: int
) -> None:
    """Triton compiles different code for them, forward and backward."""
    memory = torch.randn(2, 4 * 6 * 16 + 1)[:, first : first + 4 * 6 * 16]
    for part, other in ((0, 1), (1, 0), (0, 1)):
        norm(memory[part].view(4, 6, 16))
        norm(memory[other].view(4, 6, 16))
    aligned = sum(row.data_ptr() % 16 == 0 for row in memory)
    assert aligned == (1 if first == 0 else 0)
    assert len(direct) == (2 if first == 0 else 0)
    assert len(launched) == 6 - len(direct)
    assert all(values[0][0] % 16 == 0 for _, values in direct)


def test_code_of_one_device_does_not_serve_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handle of code belongs to a device, so a layout contains the device of each tensor."""
    monkeypatch.setattr(launch, "state", lambda: 0)
    on_cpu, on_meta = (recipe.layout([torch.ones(2, device=device)]) for device in ("cpu", "meta"))
    assert on_cpu != on_meta


def with_gradient(x: Tensor) -> Tensor:
    """Make a call with a gradient, and its backward pass."""
    with torch.enable_grad():
        out = layer_norm(x.detach().requires_grad_(), WEIGHT.clone().requires_grad_(), None)
        out.sum().backward()
    return out


def test_a_gradient_is_computed_past_the_dispatcher(launched: Launched, direct: list[Direct]) -> None:
    x = torch.randn(4, 6, 16)
    names = [type(with_gradient(x).grad_fn).__name__ for _ in range(3)]
    assert names == ["DirectBackward"] * 3
    assert len(launched) + len(direct) == 9  # 1 forward, 2 backward
    assert len(direct) >= 3


def test_a_gradient_goes_through_the_dispatcher_where_somebody_looks_on(launched: Launched) -> None:
    x = torch.randn(4, 6, 16)
    with_gradient(x)
    with Launches() as seen:
        assert "Generated" in type(with_gradient(x).grad_fn).__name__
    assert seen.count > 0
    out = torch.vmap(lambda row: row * 2)(x)  # a finished transform
    assert type(with_gradient(out).grad_fn).__name__ == "DirectBackward"


@pytest.mark.parametrize("calls", [1, 2])
def test_a_second_derivative_is_an_error(launched: Launched, calls: int) -> None:
    with torch.enable_grad():
        for _ in range(calls):
            x = torch.randn(4, 6, 16, requires_grad=True)
            out = layer_norm(x, WEIGHT.clone().requires_grad_(), None)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="no autograd formula"):
            slope.sum().backward()


def test_recomputed_layers_are_computed_past_the_dispatcher(launched: Launched, direct: list[Direct]) -> None:
    x = torch.randn(4, 6, 16)
    with_gradient(x)
    with torch.enable_grad():
        given = x.clone().requires_grad_()
        out = checkpoint(layer_norm, given, WEIGHT.clone().requires_grad_(), None, use_reentrant=False)
        out.sum().backward()
    assert given.grad is not None
    assert type(out.grad_fn).__name__ == "DirectBackward"


def leaves(signature: Any, value: Any) -> Iterator[tuple[str, Any]]:
    """Pair each argument of the compiled code with its type; tuples must have one form."""
    if isinstance(signature, tuple):
        assert isinstance(value, tuple)
        for kind, part in zip(signature, value, strict=True):
            yield from leaves(kind, part)
    else:
        yield signature, value


FITS: dict[str, Any] = {"*": int, "i": int, "u": int, "f": float, "b": float}


@pytest.mark.parametrize("name", REPEATED)
def test_the_arguments_of_a_direct_launch_are_those_that_its_code_was_compiled_for(
    monkeypatch: pytest.MonkeyPatch, launched: Launched, direct: list[Direct], name: str
) -> None:
    """Forward and backward, compared with the signature for sm_90 and with what Triton was given."""
    monkeypatch.setattr(launch, "state", lambda: 0)
    monkeypatch.setattr(recipe, "ALIGNMENT", 1)  # small CPU buffers have any address
    for table in dispatch.recipes.values():
        table.clear()
    call = case(name, torch.bfloat16)
    with torch.enable_grad():
        for _ in range(2):
            call.answers(call.op.fast)
    with torch.no_grad():
        for _ in range(2):
            call.op(**call.given)
    assert direct
    target, compared = GPUTarget("cuda", 90, 32), 0
    arguments = {t.untyped_storage().data_ptr() for t in call.given.values() if isinstance(t, Tensor)}
    for compiled, values in direct:
        names = compiled.kernel.arg_names
        tiled = launch.Kernel(name, compiled.kernel, ())
        config = KernelConfig({}, compiled.given["num_warps"], compiled.given["num_stages"])
        given = {each: compiled.given[each] for each in names}
        specialised, _ = source(launch.KernelLaunch(tiled, compiled.grid, config, (), given), target)
        signature = tuple(specialised.signature[each] for each in names)
        pairs = list(leaves(signature, values))
        assert all(kind == "constexpr" or isinstance(value, FITS[kind[0]]) for kind, value in pairs)
        before = [value for _, value in leaves(signature, tuple(given.values()))]
        for (kind, value), was in zip(pairs, before, strict=True):
            if isinstance(was, Tensor):
                assert kind[0] == "*"
                assert (value == 0) == (not was.numel())
                if was.untyped_storage().data_ptr() in arguments:
                    assert value == was.data_ptr()
                    compared += 1
            else:
                assert value is was or value == was
    assert compared


def test_the_launcher_of_this_triton_takes_what_a_recipe_gives() -> None:
    """grid, stream, code, metadata, launch metadata and two hooks precede the kernel's arguments."""
    names = list(inspect.signature(CudaLauncher.__call__).parameters)
    assert names[:6] == ["self", "gridX", "gridY", "gridZ", "stream", "function"]
    assert names[6:] in (
        ["args"],  # Triton 3.6
        ["kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook", "args"],
    )
    run = inspect.getsource(JITFunction.run)
    assert "kernel.function, kernel.packed_metadata, launch_metadata" in run
    assert "knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *bound_args.values())" in run


def test_as_many_recipes_are_kept_as_are_wanted(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "MOST", 2)
    for n in (3, 4, 5):
        norm(torch.randn(n, 16))
    assert len(layer_norm._recipes) == 1
