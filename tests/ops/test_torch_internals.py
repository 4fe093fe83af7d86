"""The private interfaces of torch behave as the package requires; a later torch may change or remove them."""

from collections import namedtuple
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ranks import run_ranks
from warpfold.cost.recorder import Recorder
from warpfold.ops import torch_internals
from warpfold.parallel.mesh import TIME_LIMIT, make_mesh, time_limit

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "first second")


def test_fused_attention_returns_the_output_and_its_logsumexp() -> None:
    torch.manual_seed(0)
    q, k, v, bias = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 5, 7)
    out, lse = torch_internals.flash_attention_cpu(q, k, v, 0.0, False, attn_mask=bias)
    logits = q @ k.mT * 8**-0.5 + bias
    torch.testing.assert_close(out, logits.softmax(-1) @ v)
    torch.testing.assert_close(lse, logits.logsumexp(-1))


def test_tensors_in_nested_containers_are_found_and_replaced() -> None:
    value = [torch.ones(2), {"a": (torch.zeros(1), None), "b": Pair(torch.ones(3), 7)}, [[], "text"]]
    tensors = [leaf for leaf in torch_internals.tree_leaves(value) if isinstance(leaf, Tensor)]
    assert [len(t) for t in tensors] == [2, 1, 3]
    sizes = torch_internals.map_tensors(len, value)
    assert sizes == [2, {"a": (1, None), "b": Pair(3, 7)}, [[], "text"]]


def test_compiled_modules_are_known_both_ways() -> None:
    plain, compiled, in_place = nn.Linear(2, 2), torch.compile(nn.Linear(2, 2)), nn.Linear(2, 2)
    in_place.compile()
    assert [torch_internals.is_compiled(module) for module in (plain, compiled, in_place)] == [False, True, True]


def test_hooks_see_the_backward_pass_and_its_end_calls_back() -> None:
    x, calls = torch.ones(2, requires_grad=True), list[str]()

    def hook(_: Tensor) -> None:
        assert torch_internals.in_backward()
        torch_internals.call_after_backward(lambda: calls.append("callback"))

    def last_hook(_: Tensor) -> None:
        calls.append("last hook")

    y = x * 2
    y.register_hook(hook)
    x.register_post_accumulate_grad_hook(last_hook)
    for times in (1, 2):
        y.sum().backward(retain_graph=True)
        assert calls == ["last hook", "callback"] * times
    assert torch_internals.in_backward() is False


def test_numbers_of_nodes_decide_which_runs_first() -> None:
    leaf, order = torch.ones(1, requires_grad=True), list[str]()
    number = torch_internals.next_node_number()
    early, late = leaf * 2, leaf * 3
    assert early.grad_fn is not None
    assert late.grad_fn is not None
    assert (torch_internals.node_number(early.grad_fn), torch_internals.node_number(late.grad_fn)) == (
        number,
        number + 1,
    )
    early.grad_fn.register_prehook(lambda *_: order.append("early"))
    late.grad_fn.register_prehook(lambda *_: order.append("late"))
    (early + late).backward(retain_graph=True)
    torch_internals.set_node_number(early.grad_fn, number + 10)
    (early + late).backward()
    assert order == ["late", "early", "early", "late"]


def test_a_backward_pass_knows_which_nodes_it_will_reach_and_which_one_runs() -> None:
    a, b, counts = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True), list[list[int]]()
    nodes = [[torch.autograd.graph.get_gradient_edge(leaf).node] for leaf in (a, b)]
    y = a * 2

    def hook(_: Tensor) -> None:
        counts.append(torch_internals.taking_part(nodes))
        assert torch_internals.current_node() is y.grad_fn

    assert y.grad_fn is not None
    y.grad_fn.register_prehook(lambda grads: hook(grads[0]))
    y.backward()
    assert counts == [[1, 0]]


def test_modes_and_profilers_are_seen_and_can_be_left() -> None:
    assert not torch_internals.is_observed()
    with torch.profiler.profile():
        assert torch_internals.is_observed()
    with torch.device("meta"), Recorder() as memory:
        assert torch_internals.is_observed()
        assert torch_internals.without_modes(lambda a: float(torch.full((), a, device="cpu") / 4), 3) == 0.75
        torch.ones(2)
    assert [piece.shape for piece in memory.pieces] == [(2,)]


@pytest.mark.parametrize(("name", "composite"), [("linear", True), ("mm", False), ("matmul", True), ("silu", False)])
def test_operations_that_are_made_of_others_are_known(name: str, composite: bool) -> None:
    assert torch_internals.is_composite(getattr(torch.ops.aten, name).default) is composite


def test_the_time_limit_of_a_group_is_set_and_read() -> None:
    def limits() -> list[float]:
        before = time_limit(dist.group.WORLD, CPU)
        return [before, time_limit(make_mesh(data=2, limit=55.0).world.handle, CPU)]

    assert run_ranks(limits, 2, timeout=44) == [[44.0, 55.0]] * 2
    assert time_limit(None, CPU) == TIME_LIMIT


def test_fake_ranks_leave_the_real_ones_as_they_were() -> None:
    def sizes() -> list[int]:
        def world() -> int:
            return dist.get_world_size()

        group, found = dist.new_group([0, 1], timeout=timedelta(seconds=44)), [world()]
        with torch_internals.fake_process_group(3, 512):
            found += [world(), dist.get_rank()]
            gathered = torch.empty(1024)
            torch_internals.all_gather_flat(gathered, torch.ones(2))
        x = torch.ones(1)
        dist.all_reduce(x, group=group)
        return [*found, world(), int(x)]

    assert run_ranks(sizes, 2) == [[2, 512, 3, 2, 2]] * 2
