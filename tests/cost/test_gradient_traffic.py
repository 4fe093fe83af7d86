"""What gradients send: the closed form against what fake ranks send in a step, and laws of what is hidden."""

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.helpers import tiny_config
from warpfold.cost.fake import Memory, fake_ranks
from warpfold.cost.gradient_traffic import (
    ExchangeTime,
    GradientWay,
    bucket_sizes,
    exchange_seconds,
    gradient_moves,
)
from warpfold.cost.links import Cluster, Link
from warpfold.engine.optim import OptimConfig, Optimizer
from warpfold.model.alphafold import AlphaFold
from warpfold.parallel.exchange import SyncConfig
from warpfold.parallel.plan import Plan
from warpfold.parallel.waits import Event, watched

MODEL = tiny_config()
BUCKET = 200 / 2**20  # MiB: several of them
LINK = Link(1e-5, 1e9)


def counted(plan: Plan, way: GradientWay, per_node: int) -> tuple[list[int], Counter[tuple[str, str, str]]]:
    """The buckets, and calls and bytes of each kind and group in one step of the first of fake ranks."""
    events: list[Event] = []
    optim = OptimConfig(accumulate=plan.data * plan.batch * way.passes, clip=way.clip)
    with fake_ranks(plan.data, plan.axial, plan.branch) as mesh, Memory():
        model = nn.ModuleList(nn.Linear(5, 7) for _ in range(6))
        optimizer = Optimizer(model, optim, mesh, plan.sync, per_node, batch=plan.batch)
        with watched(events.append):
            for _ in range(way.passes):
                sum((p.sum() for p in model.parameters()), torch.zeros(())).backward()
                optimizer.collect()
            optimizer.step(0)
    found: Counter[tuple[str, str, str]] = Counter()
    for event in events:
        if event.what == "start":
            group = event.name.removeprefix("gradients or weights over ").removesuffix(" ranks")
            found[group, event.kind, "calls"] += 1
            found[group, event.kind, "bytes"] += event.bytes
    return [b.stop - b.start for b in optimizer.layout.buckets], found


def cases() -> list[tuple[Plan, str, int]]:
    """Grids x strategies x states x ways to clip; hierarchical sums where there are two nodes of data ranks."""
    found = []
    ways = [("example", 1), ("example", 2), ("step", 2)]
    for (data, axial, branch), shard, (clip, passes) in product(
        [(4, 1, 1), (1, 3, 1), (2, 2, 1), (4, 1, 2)], [False, True], ways
    ):
        for strategy in ["plain", "bf16", "hierarchical"] if data == 4 else ["plain"]:
            sync = SyncConfig(strategy=strategy, bucket=BUCKET, shard_state=shard)  # type: ignore[arg-type]
            found.append((Plan(data=data, axial=axial, branch=branch, sync=sync), clip, passes))
    return found


@pytest.mark.parametrize(("plan", "clip", "passes"), cases())
def test_counts_are_what_the_formulas_say(plan: Plan, clip: str, passes: int) -> None:
    way = GradientWay(passes=passes, clip=clip, on_node=2)  # type: ignore[arg-type]
    sizes, found = counted(plan, way, 2 * plan.axial * plan.branch)
    assert len(sizes) > 2
    said: Counter[tuple[str, str, str]] = Counter()
    for move in gradient_moves(sizes, plan, way):
        said[move.over, move.kind, "calls"] += move.sent.calls
        said[move.over, move.kind, "bytes"] += move.sent.bytes
    assert found == said


def test_buckets_are_those_of_the_optimizer() -> None:
    with fake_ranks(3) as mesh, Memory():
        optimizer = Optimizer(AlphaFold(MODEL), OptimConfig(accumulate=3), mesh, SyncConfig(bucket=0.05))
    sizes = tuple(b.stop - b.start for b in optimizer.layout.buckets)
    assert bucket_sizes(MODEL, 0.05, 3) == sizes
    assert len(sizes) > 2


def time(plan: Plan, passes: int = 1, backward: float = 1.0, link: Link = LINK, on_node: int = 2) -> ExchangeTime:
    cluster = Cluster(ranks=4, per_node=on_node, within=Link(1e-6, 1e11), between=link)
    sizes, way = [10**6] * 8, GradientWay(passes=passes, on_node=on_node)
    return exchange_seconds(gradient_moves(sizes, plan, way), plan, way, cluster, backward, len(sizes))


def test_a_longer_backward_pass_hides_more_and_never_all() -> None:
    plan = Plan(data=4)
    found = [time(plan, backward=backward) for backward in (0.0, 0.01, 0.1, 1.0, 10.0)]
    visible = [one.visible for one in found]
    assert visible == sorted(visible, reverse=True)
    assert visible[-1] > 0
    assert visible[0] == pytest.approx(found[-1].visible + found[-1].hidden)  # nothing is lost
    assert found[0].hidden == 0


def test_what_is_not_early_is_not_hidden() -> None:
    """With several examples of their own clip each rank knows its sum only after its last backward pass."""
    assert time(Plan(data=4), passes=2).hidden == 0
    assert time(Plan(data=4), passes=1).hidden > 0
    assert time(Plan(data=4, sync=SyncConfig(strategy="hierarchical"))).hidden == 0


@given(st.floats(1, 100), st.floats(1, 100), st.floats(0, 1), st.sampled_from(["plain", "bf16", "hierarchical"]))
def test_a_slower_link_never_takes_less(latency: float, rate: float, backward: float, strategy: Any) -> None:
    for plan in (Plan(data=4, sync=SyncConfig(strategy=strategy)), Plan(data=2, axial=2), Plan(axial=4)):
        if plan.data < 4 and strategy != "plain":
            continue
        slower = Link(LINK.latency * latency, LINK.bandwidth / rate)
        assert time(plan, backward=backward).visible <= time(plan, backward=backward, link=slower).visible


def test_sums_of_nodes_first_send_less_over_a_slow_link() -> None:
    slow = Link(1e-5, 1e8)
    plain, nodes = (
        time(Plan(data=4, sync=SyncConfig(strategy=name)), backward=0.0, link=slow).visible  # type: ignore[arg-type]
        for name in ("plain", "hierarchical")
    )
    assert nodes < 0.7 * plain
