"""A forward pass that is followed: where it is, the same numbers, and an end when one asks for it."""

import pytest
import torch

from tests.helpers import random_batch, tiny_model
from warpfold.model.execution import PLAIN
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import Plan
from warpfold.run.passes import PassPlace, followed


@pytest.mark.parametrize("plan", [None, Plan(chunk=3)], ids=["plain", "in slices"])
def test_every_block_of_every_pass_is_told_and_nothing_changes(plan: Plan | None) -> None:
    model, seen = tiny_model(), list[PassPlace]()
    if plan is not None:
        Execution(plan).bind(model)
    batch = random_batch(passes=2)
    with torch.no_grad():
        before = model(batch, recycles=1)
        with followed(model, 2, seen.append):
            after = model(batch, recycles=1)
    assert torch.equal(before.structure.final_atom37, after.structure.final_atom37)
    assert list(dict.fromkeys((p.number, p.block) for p in seen)) == [(n, b) for n in (1, 2) for b in (1, 2, 3)]
    assert {(p.passes, p.blocks) for p in seen} == {(2, 3)}  # an extra block and two of the Evoformer
    shares = [p.share for p in seen]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert len(set(shares)) > 40  # layer by layer
    assert str(seen[-1]) == "pass 2/2, block 3/3"
    count = len(seen)
    model(batch, recycles=1)
    assert len(seen) == count  # nobody follows any more


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
