"""Saved activations: plans that recompute or offload save fewer, with the same losses and gradients."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tests.helpers import memory_of
from tests.laws.test_plans import LIMIT, Work, example, model_for
from warpfold.device import Offload, OnHost
from warpfold.model.evoformer import Evoformer
from warpfold.model.losses import LossConfig, total_loss
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import Plan, Recompute

WORK = Work(residues=8, sequences=4, extra=5, templates=2, recycles=0)
LOSSES = LossConfig(violation=1.0, experimentally_resolved=0.01, predicted_aligned_error=0.1)


@pytest.fixture
def moving(monkeypatch: pytest.MonkeyPatch) -> list[OnHost]:
    """Copy tensors of the host too, as if they were on a GPU, and return the list of copied tensors."""
    pack, moved = Offload._pack, []

    def noted(self: Offload, x: Tensor) -> Tensor | OnHost:
        found = pack(self, x)
        if isinstance(found, OnHost):
            moved.append(found)
        return found

    monkeypatch.setattr(Offload, "_pack", noted)
    monkeypatch.setattr(Offload, "moves", lambda self, x: x.is_floating_point() and x.dim() > 2)
    return moved


def gradients(plan: Plan) -> list[Tensor]:
    model = Execution(plan).bind(model_for(WORK)).train()
    model.noise.seed(1, 2)
    batch = example(WORK, 0)
    loss, _ = total_loss(model(batch, 0), batch, LOSSES)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


PLANS = [
    {"recompute": "layer"},
    {"recompute": "layer", "chunk": 3},
    {"offload": True},
    {"offload": True, "recompute": "block"},
    {"offload": True, "recompute": "layer"},
    {"recompute": "block", "keep_blocks": 1},
    {"recompute": "layer", "keep_blocks": 1, "chunk": 3},
    # More blocks than the model has
    {"offload": True, "recompute": "block", "keep_blocks": 5},
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_what_is_computed_again_or_fetched_is_what_was_there(plan: dict, moving: list[OnHost]) -> None:
    expected = gradients(Plan(precision="fp64"))
    found = gradients(Plan(precision="fp64", **plan))
    assert bool(moving) == plan.get("offload", False)
    largest = max(float(x.norm()) for x in expected[1:])
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).norm()) <= LIMIT * max(float(other.norm()), 1e-6 * largest)


@contextmanager
def saved() -> Iterator[dict[int, int]]:
    """Yield the size in bytes of each piece of memory that autograd saves."""
    kept: dict[int, int] = {}
    # Keeps the tensors alive, so that no two of them use the same memory
    every = []

    def pack(x: Tensor) -> Tensor:
        every.append(x)
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        yield kept


def kept_bytes(recompute: Recompute | None, keep_blocks: int = 0) -> tuple[int, int]:
    """Return the bytes that a stack saves, and the bytes of m and z together."""
    plan = Plan(recompute=recompute, keep_blocks=keep_blocks, kernels="definition")
    model = Execution(plan).bind(model_for(WORK)).train()
    stack = model.evoformer
    assert isinstance(stack, Evoformer)
    m, z = torch.randn(12, 16, 16, requires_grad=True), torch.randn(16, 16, 12, requires_grad=True)
    with saved() as kept:
        stack(m, z, torch.ones(12, 16), torch.ones(16, 16))
    return sum(kept.values()), m.nbytes + z.nbytes


def test_recomputation_keeps_the_inputs_of_layers_or_of_blocks() -> None:
    (everything, states), (layers, _), (blocks, _) = map(kept_bytes, (None, "layer", "block"))
    # Blocks, of three layers of m and six of z
    count = 2
    masks = (12 * 16 + 16 * 16) * 4
    assert count * states <= blocks <= (count + 1) * states + masks
    # Each layer saves its own state, and two layers save both states.
    assert blocks < layers <= count * 6 * states + masks
    assert layers < everything / 2


@pytest.mark.parametrize("recompute", ["layer", "block"])
def test_the_last_blocks_of_the_main_stack_keep_everything(recompute: Recompute) -> None:
    everything, least = kept_bytes(None)[0], kept_bytes(recompute)[0]
    half, all_of_them = (kept_bytes(recompute, count)[0] for count in (1, 2))
    assert all_of_them == everything
    assert least < half < everything
    # The blocks are equal, except for shared masks.
    assert half - least == pytest.approx(everything - half, rel=0.1)


def test_offloaded_tensors_leave_and_come_back_in_reverse(moving: list[OnHost]) -> None:
    taken: list[OnHost] = []
    take = OnHost.take

    def noted(self: OnHost) -> Tensor:
        taken.append(self)
        return take(self)

    x = torch.randn(2, 3, 4, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch, Offload().saving():
        patch.setattr(OnHost, "take", noted)
        y = (x.exp() * x.sin()).sum()
        y.backward()
    assert taken
    assert {id(kept) for kept in taken} <= {id(kept) for kept in moving}
    torch.testing.assert_close(x.grad, x.exp() * (x.sin() + x.cos()))


def test_on_a_cpu_nothing_leaves() -> None:
    x = torch.randn(2**19, requires_grad=True)
    offload = Offload()
    assert not offload.moves(x.exp())
    with offload.saving():
        x.exp().sum().backward()


def test_blocks_that_keep_everything_do_so_on_ranks_too() -> None:
    sizes = {"res": 16, "seq": 4, "extra": 5, "tmpl": 0}
    # The first run fills caches.
    plans = (Plan(axial=2, recompute="block", keep_blocks=kept) for kept in (0, 0, 2))
    _, none, both = (memory_of(plan, model_for(WORK).config, sizes, LOSSES, recycles=0).peak for plan in plans)
    assert both > none
