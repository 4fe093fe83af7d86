"""Overlap: no wait while other work could run, and no collective that could have started earlier.

On gloo with uneven shards. A collective counts as in flight until it is waited for, so work that needs it cannot run.
The work of the next block counts, too.
"""

import itertools
import sys
from typing import Any

import pytest

from tests.parallel.tracing import InReverse, Order, at_once, traced
from tests.ranks import run_ranks
from warpfold.parallel import collectives, sharded
from warpfold.parallel.plan import Plan, Triangle
from warpfold.parallel.sharded import ShardedTensor

Found = list[tuple[str, str, list[str]]]
CUTS: tuple[Triangle, ...] = ("gather", "channels")
# With independent halves, the next outer product could read m before the pair half is done.
NEXT_OUTER = {"outer: native_layer_norm", "outer: addmm"}
# m, which it takes along any axis, could already be in flight to the following row attention. But a block keeps only
# one shard of its input.
NEXT_ROWS = "all_to_all m to rows"


def trace(plan: Plan, outer: Order, **stack: Any) -> list[tuple[Found, Found]]:
    """Return for every rank the work that could have run during waits, and the work before late starts."""

    def on_a_rank() -> tuple[Found, Found]:
        found = traced(plan, outer, **stack)
        return found.left_while_waiting(), found.done_before_starting()

    return run_ranks(on_a_rank, plan.axial * plan.branch)


def wasted(ranks: list[tuple[Found, Found]], which: int) -> dict[str, set[str]]:
    return {f"{way} {move}": set(work) for rank in ranks for way, move, work in rank[which] if work}


FAST = {("middle", 2, 0, 0), ("middle", 2, 1, 1), ("middle", 3, 0, 1), ("middle", 3, 1, 0), ("first", 2, 1, 1)} | {
    *(("first", 3, 0, 0), ("last", 2, 0, 1), ("last", 3, 1, 0))
}
CASES = [
    pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow)
    for case in itertools.product(("middle", "first", "last"), (2, 3), (0, 1), (0, 1))
]


@pytest.mark.parametrize(("outer", "axial", "by_channels", "recompute"), CASES)
def test_nothing_is_waited_for_while_work_remains(outer: Order, axial: int, by_channels: int, recompute: int) -> None:
    ranks = trace(Plan(axial=axial, triangle=CUTS[by_channels], recompute="block" if recompute else None), outer)
    kinds = [(way, move.split()[0]) for way, move, _ in ranks[0][0]]
    assert {
        ("forward", "all_to_all"),
        ("forward", "all_gather"),
        ("backward", "all_to_all"),
        ("backward", "reduce_scatter"),
    } <= {*kinds}
    left = wasted(ranks, 0)
    if outer != "middle":
        left = {wait: work for wait, work in left.items() if work != NEXT_OUTER or wait.startswith("backward")}
    assert left == {}
    early = {move: work for move, work in wasted(ranks, 1).items() if outer == "middle" or not move.endswith(NEXT_ROWS)}
    assert early == {}


def test_nor_in_the_extra_stack() -> None:
    ranks = trace(Plan(axial=2), "middle", global_column=True)
    assert wasted(ranks, 0) == wasted(ranks, 1) == {}


@pytest.mark.parametrize("triangle", CUTS)
def test_a_branch_waits_for_the_other_alone(triangle: Triangle) -> None:
    ranks = trace(Plan(axial=2, branch=2, triangle=triangle), "first")
    left = wasted(ranks, 0)
    assert {wait.split()[1] for wait in left} <= {"sendrecv"}
    assert all(work == NEXT_OUTER for work in left.values())


def one_after_the_other(*generators: Any) -> tuple[Any, ...]:
    """Run the halves without interleaving."""
    return tuple(result for generator in generators for result in sharded_interleave(generator))


sharded_interleave = sharded._interleave


MISTAKES = {
    "blocking": ("middle", collectives, "_begin", at_once(collectives._begin), "forward"),
    "one half after the other": ("first", sharded, "_interleave", one_after_the_other, "forward"),
    "gradients in the reverse order": ("first", collectives, "_reserved", InReverse(), "backward"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_waiting_would_be_seen(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outer, place, name, wrong, way = MISTAKES[mistake]
    monkeypatch.setattr(place, name, wrong)
    left = {wait: work - NEXT_OUTER for wait, work in wasted(trace(Plan(axial=2), outer), 0).items()}
    assert any(work for wait, work in left.items() if wait.startswith(way))


def test_holding_back_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    start = ShardedTensor.start

    def at_first_use(cut: ShardedTensor, axis: int) -> None:
        if sys._getframe(1).f_code.co_name == "future":
            start(cut, axis)

    monkeypatch.setattr(ShardedTensor, "start", at_first_use)
    assert any(move == "forward all_to_all m to rows" for move in wasted(trace(Plan(axial=2), "middle"), 1))


@pytest.mark.parametrize(
    ("plan", "outer"),
    [
        (Plan(axial=4, recompute="block", chunk=2), "last"),
        (Plan(axial=3, triangle="channels", chunk=5), "first"),
        (Plan(axial=4, branch=2, recompute="block", chunk=1), "last"),
    ],
)
def test_all_ranks_start_the_same_moves_in_the_same_order(plan: Plan, outer: Order) -> None:
    """With any number of slices per rank. On some networks another order is a deadlock."""

    def on_a_rank() -> list[str]:
        return [f"{step.passage} {step.name}" for step in traced(plan, outer).steps if step.what == "start"]

    orders = run_ranks(on_a_rank, plan.axial * plan.branch)
    for branch in range(plan.branch):
        assert orders[branch] == orders[-plan.branch + branch]
        assert len(orders[branch]) > 20
