"""Collectives between ranks: results, exact transposes in the backward pass, and independence of concurrent calls."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.ranks import run_ranks
from warpfold.parallel.collectives import (
    Pending,
    all_gather,
    all_to_all,
    local_shard,
    sendrecv,
    shard_sizes,
    tied,
)
from warpfold.parallel.mesh import Group, make_mesh
from warpfold.parallel.waits import Event, watched

Case = tuple[str, tuple[int, ...], tuple[int, int]]


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a collective, the shape of the full tensor, and two of its axes from the right.

    Shards may be uneven or empty.
    """
    shape = tuple(draw(st.lists(st.integers(0, 6), min_size=2, max_size=4)))
    first, second = draw(st.permutations(range(-len(shape), 0)))[:2]
    return draw(st.sampled_from(("all_gather", "all_to_all"))), shape, (first, second)


def moved(case: Case, whole: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's shard (a leaf), the result of the collective, and the expected result."""
    kind, shape, (first, second) = case
    x = local_shard(whole, first, group).clone().requires_grad_()
    if kind == "all_gather":
        return x, all_gather(x, first, shape[first], group, "x").wait(), whole
    return x, all_to_all(x, first, second, shape[first], group, "x").wait(), local_shard(whole, second, group)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@given(drawn=st.lists(cases(), min_size=8, max_size=12))
@settings(max_examples=4, deadline=None, derandomize=True)
def test_moves_bring_what_they_should_and_gradients_go_the_transposed_way(ranks: int, drawn: list[Case]) -> None:
    """Check <A x, y> = <x, A^T y>, both summed over the ranks."""

    def on_a_rank() -> list[tuple[float, float]]:
        group = make_mesh(axial=ranks).axial
        products = []
        for number, case in enumerate(drawn):
            x, out, expected = moved(case, random(number, *case[1]), group)
            assert torch.equal(out, expected), case
            y = random(100 * group.rank + number, *out.shape)
            out.backward(y)
            assert x.grad is not None
            products.append((float((out * y).sum()), float((x * x.grad).sum())))
        return products

    for case, *of_ranks in zip(drawn, *run_ranks(on_a_rank, ranks)):
        there, back = (math.fsum(products) for products in zip(*of_ranks))
        assert there == pytest.approx(back, rel=1e-12, abs=1e-12), case


def test_two_ranks_exchange_what_they_have() -> None:
    def exchanged(*shapes: tuple[int, ...]) -> tuple[float, float]:
        group = make_mesh(branch=2).branch
        rank, other = group.rank, 1 - group.rank
        x = random(rank, *shapes[rank]).requires_grad_()
        out = sendrecv(x, shapes[other], group, "x").wait()
        assert torch.equal(out, random(other, *shapes[other]))
        out.backward(y := random(10 + rank, *out.shape))
        assert x.grad is not None
        assert torch.equal(x.grad, random(10 + other, *shapes[rank]))
        return float((out * y).sum()), float((x * x.grad).sum())

    cases = [((3, 2), (4,)), ((0, 2), (3,)), ((2,), (0,))]
    for both in zip(*run_ranks(lambda: [exchanged(*case) for case in cases], 2)):
        there, back = (sum(products) for products in zip(*both))
        assert there == pytest.approx(back, rel=1e-12)


def weighted(whole: Tensor, group: Group) -> Tensor:
    """Compute a loss that is a different function of the full tensor on each rank."""
    return (whole * random(7 + group.rank, *whole.shape)).sin().sum()


def alone(x: Tensor, group: Group) -> Tensor:
    return weighted(all_gather(x, -2, 5, group, "x").wait(), group)


def used_twice(x: Tensor, group: Group) -> Tensor:
    pending = all_gather(x, -2, 5, group, "x")
    assert pending.wait() is pending.wait()
    return (weighted(pending.wait(), group) + weighted(pending.wait(), group)) / 2


def two_in_flight(x: Tensor, group: Group) -> Tensor:
    """Wait in another order than that of the starts, also for the gradients."""
    first, second = all_gather(x, -2, 5, group, "first"), all_gather(2 * x, -2, 5, group, "second")
    there = all_to_all(x, -2, -1, 5, group, "turned")
    assert not any(pending.arrived for pending in (first, second, there))
    columns, doubled, whole = there.wait(), second.wait(), first.wait()
    assert torch.equal(columns, local_shard(whole, -1, group))
    return weighted(doubled - whole, group)


def recomputed(x: Tensor, group: Group) -> Tensor:
    return checkpoint(partial(alone, group=group), x, use_reentrant=False)


def within_another(x: Tensor, group: Group) -> Tensor:
    """Recompute a checkpoint during the backward pass of another one."""
    pending = all_gather(x, -2, 5, group, "outer")
    inner = recomputed(x, group)
    return (inner + weighted(pending.wait(), group)) / 2


def there_and_back(x: Tensor, group: Group) -> Tensor:
    columns = all_to_all(x, -2, -1, 5, group, "there").wait()
    return alone(all_to_all(columns, -1, -2, 4, group, "back").wait(), group)


def test_calls_do_not_meddle() -> None:
    """Two ranks compare the gradient of x, their 2 or 3 of 5 rows, for each function alone and for all together."""
    ways = [used_twice, two_in_flight, recomputed, within_another, there_and_back]

    def on_a_rank() -> list[Tensor]:
        group, found = make_mesh(axial=2).axial, []
        for way in ways:
            x = local_shard(random(0, 5, 4), -2, group).clone().requires_grad_()
            way(x, group).backward()
            assert x.grad is not None
            found.append(x.grad)
        return found

    whole = random(0, 5, 4).requires_grad_()
    for rank in range(2):
        weighted(whole, Group("axial", rank)).backward()
    assert whole.grad is not None
    for rank, grads in enumerate(run_ranks(on_a_rank, 2)):
        for way, grad in zip(ways, grads, strict=True):
            expected = whole.grad.split(shard_sizes(5, 2))[rank]
            torch.testing.assert_close(grad, expected, rtol=1e-13, atol=1e-13, msg=lambda m, way=way: f"{way}: {m}")


def test_in_a_group_of_one_nothing_moves_and_nothing_is_copied() -> None:
    x, events = random(0, 3, 4), []
    with watched(events.append):
        for pending in (all_gather(x, -2, 3, Group("axial"), "x"), all_to_all(x, -2, -1, 3, Group("axial"), "x")):
            assert isinstance(pending, Pending)
            assert pending.arrived
            assert pending.wait() is x
    assert events == []


def test_a_gradient_that_one_rank_does_not_want_takes_part_and_without_any_no_graph_is_kept() -> None:
    def on_a_rank() -> Tensor:
        with torch.no_grad():
            gathered = all_gather(random(0, 3).requires_grad_(), 0, 6, make_mesh(axial=2).axial, "x").wait()
            assert not gathered.requires_grad
        group = make_mesh(branch=2).branch
        x = random(0, 3).requires_grad_()
        theirs, own = tied(sendrecv(x, (3,), group, "x").wait(), x)
        # Rank 1 does not use the received tensor.
        (own if group.rank else theirs).sum().backward()
        assert x.grad is not None
        return x.grad

    first, second = run_ranks(on_a_rank, 2)
    assert torch.equal(first, torch.zeros(3, dtype=torch.float64))
    assert torch.equal(second, torch.full((3,), 2.0, dtype=torch.float64))


def test_starts_and_waits_are_told_with_the_bytes_that_leave() -> None:
    def on_a_rank() -> list[Event]:
        group, events = make_mesh(axial=3).axial, []
        with watched(events.append):
            x = local_shard(random(0, 5, 4), -2, group).clone().requires_grad_()
            pending = all_to_all(x, -2, -1, 5, group, "m")
            alone_ = all_gather(x, -2, 5, group, "bias")
            (pending.wait().sum() + alone_.wait().sum()).backward()
        alone_.wait()  # it has arrived
        return events

    ranks = run_ranks(on_a_rank, 3)
    for events in ranks:
        told = [(e.what, e.name, e.kind, e.backward) for e in events]
        assert told[:4] == [
            ("start", "m", "all_to_all", False),
            ("start", "bias", "all_gather", False),
            ("wait", "m", "all_to_all", False),
            ("wait", "bias", "all_gather", False),
        ]
        assert sorted(told[4:]) == sorted(
            [
                ("start", "bias", "reduce_scatter", True),
                ("start", "m", "all_to_all", True),
                ("wait", "bias", "reduce_scatter", True),
                ("wait", "m", "all_to_all", True),
            ]
        )
        assert [e.number for e in events] == [e.number for e in ranks[0]]
        sent = {(e.name, e.backward): e.bytes for e in events if e.what == "start"}
        # Two other ranks, and the largest shard of 2 x 4 elements.
        assert sent["bias", False] == sent["bias", True] == 8 * 2 * 8
    turned = [
        sum(e.bytes for e in events if e.name == "m" and e.what == "start" and not e.backward) for events in ranks
    ]
    stay = sum(rows * columns for rows, columns in zip(shard_sizes(5, 3), shard_sizes(4, 3)))
    # Elements that have the same owner before and after are not sent.
    assert sum(turned) == 8 * (5 * 4 - stay)


def test_slices_are_as_even_as_can_be() -> None:
    assert shard_sizes(10, 4) == [3, 3, 2, 2]
    assert shard_sizes(2, 4) == [1, 1, 0, 0]
    parts = [local_shard(torch.arange(10), -1, Group("axial", rank, 4)) for rank in range(4)]
    assert torch.equal(torch.cat(parts), torch.arange(10))
