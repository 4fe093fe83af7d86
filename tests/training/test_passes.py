"""Test the progress reports of forward passes, their lack of side effects, and stopping a pass."""

import itertools
from collections.abc import Callable

import pytest
import torch

from tests.helpers import random_batch, tiny_model
from tests.ranks import run_ranks
from warpfold.model.axial import PLAIN
from warpfold.ops import dispatch
from warpfold.parallel.execution import Execution
from warpfold.parallel.mesh import make_mesh
from warpfold.parallel.plan import Plan
from warpfold.training.passes import PassPlace, followed


def ticks() -> Callable[[], float]:
    """Return a clock that advances by a second with each call."""
    count = itertools.count()
    return lambda: float(next(count))


@pytest.mark.parametrize(
    "plan", [None, Plan(chunk=3), Plan(chunk=3, in_place=True)], ids=["plain", "in slices", "in place"]
)
def test_every_block_of_every_pass_is_told_and_nothing_changes(plan: Plan | None) -> None:
    model, seen = tiny_model(), list[PassPlace]()
    if plan is not None:
        Execution(plan).bind(model)
    batch = random_batch(passes=2)
    with torch.no_grad():
        before = model(batch, recycles=1)
        with followed(model, 2, seen.append, clock=ticks()):
            after = model(batch, recycles=1)
    assert torch.equal(before.structure.final_atom37, after.structure.final_atom37)
    assert list(dict.fromkeys((p.number, p.block) for p in seen)) == [(n, b) for n in (1, 2) for b in (1, 2, 3)]
    assert {(p.passes, p.blocks) for p in seen} == {(2, 3)}  # 1 extra and 2 Evoformer blocks
    shares = [p.share for p in seen]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert len(set(shares)) > 40  # layer by layer
    assert str(seen[-1]) == "pass 2/2, block 3/3"
    assert any(p.slices > 1 for p in seen) == (plan is not None)
    if plan is not None:
        within = [p for p in seen if p.slices == 3]  # nine residues
        assert {p.slice for p in within} == {1, 2, 3}
        assert str(within[0]) == "pass 1/2, block 1/3, slice 1/3"
    count = len(seen)
    with torch.no_grad():
        model(batch, recycles=1)
    assert len(seen) == count  # the hooks were removed


def test_what_is_raised_ends_the_pass_and_leaves_nothing_behind() -> None:
    model = tiny_model()
    batch = random_batch(passes=2)
    before = model(batch, recycles=1)

    def stop(place: PassPlace) -> None:
        if place.number == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError), followed(model, 2, stop):
        model(batch, recycles=1)
    assert model.execution is PLAIN
    assert torch.equal(before.structure.final_atom37, model(batch, recycles=1).structure.final_atom37)


def test_where_ranks_share_a_protein_blocks_and_slices_are_told() -> None:
    plan = Plan(axial=2, chunk=3, in_place=True)

    def on_a_rank() -> list[PassPlace]:
        model, seen = tiny_model(), list[PassPlace]()
        Execution(plan, make_mesh(1, 2, 1)).bind(model)
        with torch.no_grad(), followed(model, 2, seen.append, clock=ticks()):
            model(random_batch(passes=2), recycles=1)
        return seen

    for seen in run_ranks(on_a_rank, 2):
        assert list(dict.fromkeys((p.number, p.block) for p in seen)) == [(n, b) for n in (1, 2) for b in (1, 2, 3)]
        shares = [p.share for p in seen]
        assert shares == sorted(shares)
        assert (shares[0], shares[-1]) == (0.0, 1.0)
        assert len(set(shares)) > 20  # also within blocks
        assert any(p.slices > 1 for p in seen)


def test_what_blocks_took_is_what_a_share_is_of() -> None:
    """The main stack is ten times as slow as the extra stack, which the share reflects from the second pass on."""
    model, seen, now = tiny_model(), list[PassPlace](), [0.0]
    for stack, seconds in ((model.extra_stack, 1.0), (model.evoformer, 10.0)):
        for block in stack.blocks:
            for layer in {step.layer for step in block.steps}:
                layer.register_forward_hook(lambda *_, s=seconds: now.__setitem__(0, now[0] + s))
    with torch.no_grad(), followed(model, 2, seen.append, clock=lambda: now[0]):
        model(random_batch(passes=2), recycles=1)
    second = [p.share for p in seen if (p.number, p.block) == (2, 2)]
    assert second[0] == pytest.approx(0.5 + 0.5 * 9 / (9 + 2 * 90))


def test_what_memory_ended_begins_again() -> None:
    model, seen = tiny_model(), list[PassPlace]()
    batch, tries = random_batch(passes=2), iter([True, False])

    def runs_out(*_: object) -> None:
        if next(tries, False):
            raise MemoryError

    model.evoformer.blocks[1].steps[-1].layer.register_forward_pre_hook(runs_out)
    with torch.no_grad(), followed(model, 2, seen.append, clock=ticks()):
        with pytest.raises(MemoryError):
            model(batch, recycles=1)
        failed = len(seen)
        model(batch, recycles=1)
    shares = [p.share for p in seen[failed:]]
    assert shares[0] < 0.02
    assert shares[-1] == 1.0
    assert shares == sorted(shares)


def test_words_come_no_more_often_than_asked() -> None:
    model, seen = tiny_model(), list[PassPlace]()
    with torch.no_grad(), followed(model, 2, seen.append, interval=1e9, clock=ticks()):
        model(random_batch(passes=2), recycles=1)
    assert len(seen) == 1


def test_loops_cost_nothing_while_nobody_watches() -> None:
    turns = [1, 2, 3]
    assert dispatch.uniform_loop(turns) is turns
    assert dispatch.with_progress(turns) is turns
    told: list[dispatch.Loops] = []
    with dispatch.watching(lambda loops: told.append([*loops])):
        for _ in dispatch.uniform_loop(iter(turns)):
            for _ in dispatch.with_progress(iter("ab"), 2):
                # A loop may be left early.
                break
    assert told == [one for i in range(3) for one in ([(i, 3)], [(i, 3), (0, 2)])]
    assert dispatch.uniform_loop(turns) is turns


def test_what_is_raised_in_a_slice_ends_the_pass() -> None:
    """The loop of an operation runs below torch's dispatcher."""
    model = tiny_model()
    Execution(Plan(chunk=3)).bind(model)

    def stop(place: PassPlace) -> None:
        if place.slice == 2:
            raise InterruptedError

    with torch.no_grad(), pytest.raises(InterruptedError), followed(model, 1, stop):
        model(random_batch(), recycles=0)
    assert not dispatch.choice.running
