"""What is private of torch: all of it is here, and without each of it the numbers are the same, or it is refused."""

import json
import logging
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import random_batch, tiny_config, tiny_model
from tests.parallel.toys import TINY, trained
from tests.ranks import run_ranks
from warpfold.adapt.plain import biased_attention
from warpfold.bench.timing import CudaTimer
from warpfold.check.cases import inputs
from warpfold.check.op_profile import OpCase
from warpfold.cost import fake
from warpfold.cost.example import ExampleSizes, Job
from warpfold.cost.fake import Memory, fake_mesh
from warpfold.cost.memory import estimate_memory
from warpfold.engine.optim import OptimConfig
from warpfold.engine.packed import PackedWeights
from warpfold.errors import UserError
from warpfold.host import HostTensor, fetch, store
from warpfold.model.losses import LossConfig
from warpfold.ops import dispatch, torch_internals
from warpfold.ops.attention import gated_attention
from warpfold.ops.torch_internals import INTERFACES
from warpfold.parallel.collectives import all_gather
from warpfold.parallel.exchange import SyncConfig
from warpfold.parallel.execution import Execution
from warpfold.parallel.mesh import TIME_LIMIT, make_mesh, time_limit
from warpfold.parallel.plan import Plan

Patch = pytest.MonkeyPatch
CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


def test_this_torch_has_all_of_it() -> None:
    """Where this fails, its message is the list of what to look at: without it, something is slower or off."""
    assert torch_internals.missing() == {}


def fused_attention_on_a_cpu(without: Callable[[], None], patch: Patch) -> None:
    case = OpCase(op="gated_attention", where="", rows=3, length=5, channels=8, heads=2, width=4, bias=True)
    args, before = inputs(case, torch.float32, "cpu", masked=True).args, dispatch.refusals()
    without()
    patch.setattr(torch_internals, "flash_attention_cpu", None)
    with dispatch.always_fast():
        assert torch.equal(gated_attention(*args), gated_attention.definition(*args))
        refused = f"gated_attention: {torch_internals.NO_FLASH_ATTENTION}"
        assert dispatch.refusals(before) == {refused: 1}
        with pytest.raises(UserError, match=refused), dispatch.using("strict"):
            gated_attention(*args)


def gradients_wider_than_weights(without: Callable[[], None], patch: Patch) -> None:
    def step() -> tuple[Tensor, Tensor, int]:
        """The loss, the gradient, and how many leaves of packed weights were handed out."""
        model = tiny_model()
        packed = PackedWeights(model, torch.bfloat16, trained=True)
        z = torch.linspace(-1, 1, 5 * 5 * 12).view(5, 5, 12).bfloat16()
        out = model.evoformer.blocks[0].pair.starting(z, torch.ones(5, 5))
        loss = out.float().square().sum()
        loss.backward()
        assert packed.gradient is not None
        return loss.detach(), packed.gradient, len(packed.leaves())

    (loss, gradient, leaves), _ = step(), without()
    slow_loss, slow_gradient, slow_leaves = step()
    assert leaves > 0 == slow_leaves
    assert torch.equal(slow_loss, loss)
    # Those of weights in bf16 are rounded to it: two roundoffs of the largest.
    assert (slow_gradient - gradient).abs().max() <= 2**-7 * gradient.abs().max()


def gradients_added_one_by_one(without: Callable[[], None], patch: Patch) -> None:
    def gradient() -> Tensor:
        model = tiny_model()
        packed = PackedWeights(model, trained=True)
        z = torch.linspace(-1, 1, 5 * 5 * 12).view(5, 5, 12)
        for _ in range(2):
            model.evoformer.blocks[0].pair.starting(z, torch.ones(5, 5)).square().sum().backward()
        assert packed.gradient is not None
        assert packed.gradient.count_nonzero()
        return packed.gradient

    expected, _ = gradient(), without()
    assert torch.equal(gradient(), expected)


def z_in_host_memory(without: Callable[[], None], patch: Patch) -> None:
    without()
    with pytest.raises(
        UserError, match=r"no torch.Tensor._make_wrapper_subclass: .*plan\.offload.*; for that, install"
    ):
        HostTensor((4, 4, 2), torch.float32, CPU, tile=2)


def functions_that_ask_what_lies_in_host_memory(without: Callable[[], None], patch: Patch) -> None:
    """`no_torch_function` is decided on import: the class is given what it would then have."""
    patch.setattr(HostTensor, "__torch_function__", vars(Tensor)["__torch_function__"])
    x, kept = torch.randn(4, 4, 2), HostTensor((4, 4, 2), torch.float32, CPU, tile=2)
    store(kept, slice(0, 4), x)
    assert torch.equal(fetch(kept, slice(1, 3)), x[1:3])
    assert (kept.shape, kept.dtype, kept.device, kept.dim()) == (x.shape, x.dtype, x.device, 3)
    with pytest.raises(RuntimeError, match="z lies in host memory"):
        kept + 1


Pair = namedtuple("Pair", "first second")
NESTED = [torch.ones(2), {"a": (torch.zeros(1), None), "b": Pair(torch.ones(3), 7)}, [[], "text"]]


def operations_divided_by_torch(without: Callable[[], None], patch: Patch) -> None:
    assert not torch_internals.is_observed()
    without()
    assert torch_internals.is_observed()


def leaves_of_containers(without: Callable[[], None], patch: Patch) -> None:
    expected = torch_internals.tree_leaves(NESTED)
    without()
    assert list(map(id, torch_internals.tree_leaves(NESTED))) == list(map(id, expected))


def tensors_of_containers(without: Callable[[], None], patch: Patch) -> None:
    expected = torch_internals.map_tensors(lambda x: x + 1, NESTED)
    without()
    assert repr(torch_internals.map_tensors(lambda x: x + 1, NESTED)) == repr(expected)


def modules_compiled_in_place(without: Callable[[], None], patch: Patch) -> None:
    plain, compiled, in_place = nn.Linear(2, 2), torch.compile(nn.Linear(2, 2)), nn.Linear(2, 2)
    in_place.compile()
    assert [torch_internals.is_compiled(one) for one in (plain, compiled, in_place)] == [False, True, True]
    without()
    assert [torch_internals.is_compiled(one) for one in (plain, compiled, in_place)] == [False, True, False]


def devices_kept_busy(without: Callable[[], None], patch: Patch) -> None:
    without()
    assert torch_internals.device_sleep(10) is False
    clock = CudaTimer.__new__(CudaTimer)
    patch.setattr(clock, "_mark", lambda: None)
    assert clock._calibrated() == 0.0


def gradients_under_way(without: Callable[[], None], patch: Patch) -> None:
    """Of two ranks that share an example, and of two that have one each."""

    def train() -> list[Any]:
        return [trained(*way, OptimConfig(), SyncConfig(bucket=TINY), range(2), None, None) for way in ((1, 2), (2, 1))]

    expected, _ = run_ranks(train, 2), without()
    for ours, theirs in zip(run_ranks(train, 2), expected):
        for (norms, state), (norms_expected, state_expected) in zip(ours, theirs):
            assert norms == pytest.approx(norms_expected, rel=1e-12)
            assert all(torch.allclose(state[name], t, rtol=1e-12, atol=0) for name, t in state_expected.items())


def whether_a_backward_pass_runs(without: Callable[[], None], patch: Patch) -> None:
    without()
    x, seen = torch.ones(2, requires_grad=True), []
    y = x * 2
    y.register_hook(lambda grad: seen.append(torch_internals.in_backward()))
    x.register_post_accumulate_grad_hook(lambda leaf: seen.append(torch_internals.in_backward()))
    y.sum().backward()
    assert seen == [True, True]
    assert torch_internals.in_backward() is False


sizes = iter(range(5, 100))


def estimates(without: Callable[[], None], patch: Patch) -> None:
    """Of a training step, which is asked for anew: estimates are remembered."""
    at = ExampleSizes(residues=next(sizes), sequences=3, extra=3, templates=1)
    job = Job(model=tiny_config(), sizes=at, recycles=1, loss=LossConfig(), optim=OptimConfig())
    fake._kind.cache_clear()
    without()
    with pytest.raises(UserError, match=r"plans are not chosen, nor memory and time estimated .*docs/install\.md"):
        estimate_memory(job, Plan())


def modes_of_operations(without: Callable[[], None], patch: Patch) -> None:
    """The base of modes is decided on import: this is what it would then be."""
    without()
    with pytest.raises(UserError, match=r"TorchDispatchMode: plans are not chosen.*; operations are not checked; for"):
        torch_internals._NoDispatchMode()


def ranks_that_share_an_example(without: Callable[[], None], patch: Patch) -> None:
    without()

    def gather() -> str:
        group = make_mesh(axial=2).axial
        assert len(all_gather(torch.ones(1), 0, 2, group, "x").wait()) == 2  # a prediction
        with pytest.raises(UserError, match=r"ranks do not share an example in training .*docs/install\.md") as refused:
            all_gather(torch.ones(1, requires_grad=True), 0, 2, group, "x").wait().sum().backward()
        return str(refused.value)

    assert len(set(run_ranks(gather, 2))) == 1


def number_of_a_node(without: Callable[[], None], patch: Patch) -> None:
    estimates(without, patch)
    node = (torch.ones(1, requires_grad=True) * 2).grad_fn
    assert node is not None
    with pytest.raises(UserError, match="ranks do not share an example in training"):
        torch_internals.node_number(node)


def what_modes_do_not_see(without: Callable[[], None], patch: Patch) -> None:
    without()
    with torch.device("meta"), Memory() as memory:
        assert torch_internals.without_modes(lambda a: float(torch.full((), a, device="cpu") / 4), 3) == 0.75
        torch.ones(2)
    assert [piece.shape for piece in memory.pieces] == [(2,)]


def functions_of_modes(without: Callable[[], None], patch: Patch) -> None:
    def seen() -> tuple[Any, ...]:
        q, bias = torch.linspace(-1, 1, 24).view(1, 2, 3, 4), torch.linspace(0, 1, 18).view(1, 2, 3, 3)
        with biased_attention(), biased_attention():
            out = nn.functional.scaled_dot_product_attention(q, q, q, bias).tolist()
        with torch.device("meta"), Memory() as memory:
            nn.functional.silu(nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3))).softmax(-1)
        return out, memory.peak, [piece.made_by for piece in memory.pieces]

    expected, _ = seen(), without()
    fake._kind.cache_clear()
    assert seen() == expected


def limits_of_groups(without: Callable[[], None], patch: Patch) -> None:
    def limits() -> list[float]:
        world = make_mesh(data=2, limit=55.0).world
        return [time_limit(world.handle, CPU)]

    assert run_ranks(limits, 2, timeout=44) == [[55.0]] * 2
    without()
    unknown = torch_internals._found["_set_default_timeout"] is not None
    assert run_ranks(limits, 2, timeout=44) == [[TIME_LIMIT if unknown else 44.0]] * 2


def limit_of_a_group(without: Callable[[], None], patch: Patch) -> None:
    without()
    assert run_ranks(lambda: time_limit(make_mesh(data=2, limit=55.0).world.handle, CPU), 2) == [TIME_LIMIT] * 2


def ranks_that_do_not_exist(without: Callable[[], None], patch: Patch) -> None:
    without()
    with pytest.raises(UserError, match="plans of several ranks are not estimated"), fake_mesh(axial=2):
        pass
    with fake_mesh() as mesh:
        assert mesh.world.size == 1


WITHOUT: dict[str, Callable[[Callable[[], None], Patch], None]] = {
    "_scaled_dot_product_flash_attention_for_cpu": fused_attention_on_a_cpu,
    "grad_dtype": gradients_wider_than_weights,
    "_make_wrapper_subclass": z_in_host_memory,
    "_disabled_torch_function_impl": functions_that_ask_what_lies_in_host_memory,
    "tree_leaves": leaves_of_containers,
    "tree_map_only": tensors_of_containers,
    "_compiled_call_impl": modules_compiled_in_place,
    "_sleep": devices_kept_busy,
    "_will_engine_execute_node": gradients_under_way,
    "_current_graph_task_id": whether_a_backward_pass_runs,
    "_current_autograd_node": estimates,
    "queue_callback": gradients_added_one_by_one,
    "_get_sequence_nr": estimates,
    "_sequence_nr": number_of_a_node,
    "_set_sequence_nr": ranks_that_share_an_example,
    "TorchDispatchMode": modes_of_operations,
    "_disable_current_modes": what_modes_do_not_see,
    "_len_torch_dispatch_stack": operations_divided_by_torch,
    "_profiler_enabled": operations_divided_by_torch,
    "_dispatch_has_kernel_for_dispatch_key": estimates,
    "DisableTorchFunction": functions_of_modes,
    "_get_backend": limits_of_groups,
    "_set_default_timeout": limits_of_groups,
    "_timeout": limit_of_a_group,
    "FakeStore": ranks_that_do_not_exist,
    "_world": ranks_that_do_not_exist,
    "_update_default_pg": ranks_that_do_not_exist,
    "_unregister_process_group": ranks_that_do_not_exist,
}


@pytest.mark.parametrize("name", INTERFACES)
def test_without_it_the_numbers_are_the_same_or_it_is_refused(name: str, monkeypatch: Patch) -> None:
    assert list(WITHOUT) == list(INTERFACES)
    WITHOUT[name](lambda: monkeypatch.setitem(torch_internals._found, name, None), monkeypatch)


def test_what_is_missing_is_said_once(monkeypatch: Patch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(torch_internals._found, "tree_leaves", None)
    torch_internals._say.cache_clear()
    with caplog.at_level(logging.WARNING, "warpfold"):
        for _ in range(3):
            torch_internals.tree_leaves([1])
    assert [record.message for record in caplog.records] == [
        f"torch {torch.__version__} has no torch.utils._pytree.tree_leaves: {INTERFACES['tree_leaves'].without}"
    ]


BARE = """
import builtins, importlib, json, pkgutil, sys
from warpfold.ops import torch_internals

names, has = set(torch_internals.INTERFACES), hasattr
for module in [name for name in sys.modules if name.startswith("warpfold")]:
    del sys.modules[module]
builtins.hasattr = lambda x, name: name not in names and has(x, name)
from warpfold.ops import torch_internals
assert {path.rpartition(".")[2] for path in torch_internals.missing()} == names
builtins.hasattr = has
import warpfold
for module in pkgutil.walk_packages(warpfold.__path__, "warpfold."):
    if module.name != "warpfold.__main__":
        importlib.import_module(module.name)
from tests.ops.test_torch_internals import numbers
print(json.dumps(numbers()))
"""


def numbers() -> list[float]:
    """The loss of the whole tiny model, and its gradient's norm."""
    model = Execution(Plan(precision="fp64")).bind(tiny_model())
    with dispatch.always_fast():
        out = model(random_batch(passes=2))
        loss = out.pair.square().mean() + out.msa.square().mean()
        loss.backward()
    norms = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])
    return [loss.item(), norms.norm().item()]


def test_a_torch_without_any_of_it_imports_and_trains() -> None:
    made = subprocess.run([sys.executable, "-c", BARE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout) == pytest.approx(numbers(), rel=1e-10)
