"""Invariants of timelines: overlap gains at most the time that can be hidden, and the parts add up to the step."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from warpfold.check.op_profile import Cost
from warpfold.cost.links import Cluster, Link
from warpfold.cost.rates import TORCH, PassName, Rate, of_gpu
from warpfold.cost.recorder import Await, Begin, Entry, Operation, Phase
from warpfold.cost.replay import Pace, latest, replay
from warpfold.errors import UserError
from warpfold.parallel.plan import Plan

FREE, SLOW = Link(0.0, 1e30), Link(1e-6, 1e9)
PLAN = Plan(data=2, axial=2)


def pace(link: Link = SLOW, launch: float = 0.0, overlap: bool = True) -> Pace:
    call = 0.0 if link == FREE else 1e-6
    cluster = Cluster(ranks=4, per_node=2, within=link, between=link, call=call)
    return Pace(rates=of_gpu("H100"), cluster=cluster, launch=launch, overlap=overlap)


def operation(seconds: float, launches: int = 1) -> Operation:
    sheet = of_gpu("H100")
    cost = Cost(0, 0, seconds * sheet.reached.bytes * sheet.tops[torch.float32].bytes)
    return Operation(TORCH, "forward", cost, torch.float32, launches, "forward")


@st.composite
def schedules(draw: st.DrawFn) -> list[Entry]:
    """Draw operations and collectives in any order; each collective is awaited later, possibly at the very end."""
    found: list[Entry] = []
    begun: list[int] = []
    for number in range(draw(st.integers(0, 12))):
        kind = draw(st.sampled_from(["compute", "begin", "await"]))
        if kind == "compute":
            found.append(operation(draw(st.floats(0, 1e-3)), draw(st.integers(0, 3))))
        elif kind == "begin":
            group = draw(st.sampled_from(["axial", "data"]))
            after = tuple(begun[:1]) if draw(st.booleans()) else ()
            found.append(Begin(number, "all_gather", group, draw(st.integers(0, 10**6)), "forward", after))
            begun.append(number)
        elif begun:
            found.append(Await(begun.pop(draw(st.integers(0, len(begun) - 1)))))
    return found


@given(schedules())
def test_a_step_is_no_longer_than_all_of_it_and_no_shorter_than_the_longest_part(entries) -> None:
    found = replay(entries, PLAN, pace())
    serial = replay(entries, PLAN, pace(overlap=False))
    # Each group has a link of its own: the axial ranks share a node, and the data ranks are on different nodes.
    of_groups = ([e for e in entries if isinstance(e, Begin) and e.group == group] for group in ("axial", "data"))
    busy = [found.compute, *(replay(begun, PLAN, pace()).collectives for begun in of_groups)]
    assert found.seconds <= serial.seconds + 1e-12 <= found.compute + found.collectives + 2e-12
    assert found.seconds >= max(busy) - 1e-12
    assert found.compute + found.exposed + found.launch == pytest.approx(found.seconds)
    assert min(found.compute, found.exposed, found.launch + 1e-12, found.hidden) >= 0


@given(schedules())
def test_with_infinite_links_and_no_launches_a_step_is_what_is_computed(entries) -> None:
    found = replay(entries, PLAN, pace(FREE))
    assert found.seconds == pytest.approx(found.compute)
    assert found.exposed == pytest.approx(0, abs=1e-12)


@given(schedules())
def test_without_operations_communication_is_left_alone(entries) -> None:
    alone = [e for e in entries if not isinstance(e, Operation)]
    found = replay(alone, PLAN, pace())
    assert found.compute == 0
    assert found.seconds == pytest.approx(found.exposed)
    assert found.seconds <= found.collectives + 1e-12


@given(schedules(), st.floats(0, 1e-4), st.floats(1, 10))
def test_slower_launches_or_links_never_make_a_step_shorter(entries, launch, slower) -> None:
    fast = replay(entries, PLAN, pace(launch=launch)).seconds
    assert fast <= replay(entries, PLAN, pace(launch=launch * slower)).seconds + 1e-12
    assert fast <= replay(entries, PLAN, pace(Link(1e-6 * slower, 1e9 / slower), launch)).seconds + 1e-12


@given(schedules(), st.sampled_from(["within", "between"]), st.floats(1, 10), st.floats(1, 10), st.booleans())
def test_a_link_that_alone_is_slower_never_makes_a_step_shorter(entries, link, later, narrower, overlap) -> None:
    fast = pace(overlap=overlap)
    slow = replace(fast.cluster, **{link: Link(SLOW.latency * later, SLOW.bandwidth / narrower)})
    assert replay(entries, PLAN, fast).seconds <= replay(entries, PLAN, replace(fast, cluster=slow)).seconds + 1e-12


@pytest.mark.parametrize(
    ("phase", "seconds"), [("early", 1.0), ("forward", 2.0), ("recomputed", 2.0), ("backward", 3.0)]
)
def test_by_measured_rates_a_call_of_torch_takes_what_its_pass_makes_of_it(phase: Phase, seconds: float) -> None:
    calls: dict[PassName, float] = {"forward": 1.0, "training": 2.0, "backward": 3.0}
    ops = {(TORCH, which, torch.float32): Rate(call) for which, call in calls.items()}
    sheet = replace(of_gpu("H100"), how="measured", tops={}, ops=ops)
    measured = Pace.of(sheet, pace().cluster)
    assert measured.seconds(Operation(TORCH, "forward", Cost(0, 0, 0), torch.float32, 1, phase)) == seconds
    of_one_cost: list[Entry] = [
        Operation(TORCH, "forward", Cost(0, 0, 0), torch.float32, 1, each) for each in ("early", "backward", "forward")
    ]
    assert replay(of_one_cost, PLAN, measured).seconds == 1 + 3 + 2
    unknown = Operation("dropout_factors", "training", Cost(0, 0, 0), torch.float32, 30, phase)
    # An operation without a rate takes the time of the torch calls inside it.
    assert measured.seconds(unknown) == 30 * seconds


def uneven(spread: float, link: Link = SLOW) -> Pace:
    """Return the pace of a rank whose torch operations take a second for 1e9 bytes, with this relative spread."""
    ops = dict.fromkeys(
        [(TORCH, which, torch.float32) for which in ("forward", "training", "backward")],
        Rate(0.0, byte=1e-9, spread=spread),
    )
    sheet = replace(of_gpu("H100"), how="measured", tops={}, ops=ops)
    return Pace.of(sheet, pace(link).cluster)


@given(schedules(), st.floats(0, 1), st.floats(0, 1))
def test_ranks_that_vary_wait_for_each_other_and_compute_no_more(entries, spread, more) -> None:
    even, found, worse = (replay(entries, PLAN, uneven(each)) for each in (0.0, spread, spread + more))
    assert even.seconds - 1e-12 <= found.seconds <= worse.seconds + 1e-12
    assert found.compute == even.compute
    assert found.compute + found.exposed + found.launch == pytest.approx(found.seconds)


def test_what_is_waited_for_is_the_last_of_the_ranks_since_they_last_met() -> None:
    """A group waits for its last rank, counted from the previous meeting.

    One second of computation varies by 0.1 s. After the ranks have met, the same variation occurs again, not a larger
    one.
    """
    meet = [Begin(1, "all_gather", "axial", 0, "forward"), Await(1)]
    second: Entry = Operation(TORCH, "forward", Cost(0, 0, 1e9), torch.float32, 1, "forward")
    late = 0.1 * latest(2)
    once = replay([second, *meet], PLAN, uneven(0.1, FREE))
    assert once.exposed == pytest.approx(late)
    assert replay([second, *meet, second, *meet], PLAN, uneven(0.1, FREE)).exposed == pytest.approx(2 * late)
    twice = replay([second, second, *meet], PLAN, uneven(0.1, FREE))
    assert twice.exposed == pytest.approx(math.sqrt(2) * late), "what varies by chance evens out"
    alone = replay([second, *meet], Plan(data=4), uneven(0.1, FREE))
    assert alone.exposed == 0, "nobody to wait for"


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 1000])
def test_how_late_the_last_of_some_ranks_is(ranks: int) -> None:
    drawn = np.random.default_rng(0).standard_normal((4000, ranks)).max(1)
    assert latest(ranks) == pytest.approx(drawn.mean(), rel=0.06, abs=4 * drawn.std() / math.sqrt(len(drawn)))


def test_a_slower_link_is_felt_once_it_is_no_longer_hidden() -> None:
    """Between nodes, 1 MB is sent during 5 ms of computation; within a node, 1 MB is sent afterwards."""
    entries: list[Entry] = [
        Begin(1, "all_gather", "data", 10**6, "forward"), operation(5e-3), Await(1),
        Begin(2, "all_gather", "axial", 10**6, "forward"), Await(2),
    ]  # fmt: skip

    def seconds(between: float, within: float = 1e9) -> float:
        cluster = replace(pace().cluster, between=Link(1e-6, between), within=Link(1e-6, within))
        return replay(entries, PLAN, replace(pace(), cluster=cluster)).seconds

    # Two ranks of a node share the link.
    times = [seconds(rate) for rate in (1e9, 0.5e9, 0.25e9, 0.2e9)]
    assert times == pytest.approx([6e-3, 6e-3, 9e-3, 11e-3], rel=0.01)
    assert seconds(1e9, within=0.5e9) == pytest.approx(7e-3, rel=0.01)


def test_the_host_is_waited_for_where_it_launches_more_slowly_than_the_device_computes() -> None:
    entries: list[Entry] = [operation(1e-6) for _ in range(100)]
    found = replay(entries, PLAN, pace(launch=5e-6))
    assert found.seconds == pytest.approx(100 * 5e-6, rel=0.02)
    assert found.launch == pytest.approx(found.seconds - found.compute)
    one = replay([operation(1e-3), *entries], PLAN, pace(launch=5e-6))
    # The host launches these while the first operation runs.
    assert one.launch < 1e-5
    assert one.seconds == pytest.approx(1e-3 + 100e-6, rel=0.02)


def test_what_a_graph_replays_the_host_does_not_launch() -> None:
    entries: list[Entry] = [operation(1e-6, 8), *(replace(operation(1e-6), replayed=True) for _ in range(100))]
    found = replay(entries, PLAN, pace(launch=5e-6))
    assert found.seconds == pytest.approx(8 * 5e-6 + 100 * 1e-6, rel=0.02)
    assert found.kernels == 108


def test_what_is_begun_early_and_awaited_late_is_hidden() -> None:
    entries = [Begin(1, "all_gather", "axial", 10**6, "forward"), operation(5e-3), Await(1), operation(1e-3)]
    found = replay(entries, PLAN, pace())
    assert found.seconds == pytest.approx(6e-3)
    assert found.hidden == pytest.approx(found.collectives) == pytest.approx(1e-3, rel=0.01)
    waited = replay(entries, PLAN, pace(overlap=False))
    assert waited.seconds == pytest.approx(7e-3, rel=0.01)
    assert waited.exposed_by_group == {"axial": pytest.approx(1e-3, rel=0.01)}


def test_an_operation_takes_at_least_what_its_kernels_take() -> None:
    of_sheet = Pace.of(of_gpu("H100"), pace().cluster)
    assert of_sheet.seconds(replace(operation(1e-9), launches=10)) == pytest.approx(10 * of_sheet.kernel, rel=0.01)


def test_what_comes_often_takes_as_long_as_if_it_were_there_as_often() -> None:
    """A repeated entry takes as long as its copies, except for transfers that overlap with the next repetition."""
    turn = [Begin(1, "all_gather", "axial", 10**6, "forward"), operation(5e-4), Await(1), operation(1e-4, 3)]
    often = [replace(entry, times=20) if not isinstance(entry, Await) else entry for entry in turn]
    for launch in (0.0, 1e-3):
        once, many = replay(often, PLAN, pace(launch=launch)), replay(turn * 20, PLAN, pace(launch=launch))
        for name in ("seconds", "compute", "collectives", "sent", "kernels"):
            assert getattr(once, name) == pytest.approx(getattr(many, name), rel=0.05), name


def test_rates_do_not_serve_what_they_do_not_have() -> None:
    sheet = of_gpu("NVIDIA A100-SXM4-80GB")
    with pytest.raises(ValueError, match="A100: its rates are for bfloat16, float16, float32, not for float64"):
        sheet.seconds(TORCH, "forward", Cost(1, 0, 1), 1, torch.float64)
    forward = replace(sheet, how="measured", tops={}, ops={("transition", "forward", torch.float32): Rate(1.0)})
    assert forward.seconds("transition", "forward", Cost(1, 0, 1), 1, torch.float32) == 1.0
    with pytest.raises(ValueError, match=r"A100: no rate of transition, backward, torch.float32"):
        forward.seconds("transition", "backward", Cost(1, 0, 1), 1, torch.float32)
    with pytest.raises(UserError, match=r"TPU v4: no data sheet of this GPU\. Pass one of A100"):
        of_gpu("TPU v4")
