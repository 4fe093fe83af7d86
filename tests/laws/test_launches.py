"""How many kernels an Evoformer block launches on a GPU, counted without one: it may fall, and must not rise.

The backward pass is a real one, as in training: gradients of weights end where the optimizer wants them.
"""

from collections import Counter

import pytest
import torch

from warpfold.cost.example import BlockSizes, ExampleSizes
from warpfold.cost.launches import LaunchCount, block_launches, counting
from warpfold.model.alphafold import ModelConfig
from warpfold.ops.linear import gate

SIZES = ExampleSizes(residues=256, sequences=128, extra=1, templates=0)
BLOCK = BlockSizes.of(ModelConfig(), SIZES)
# What was counted last; the bars were 25 forward and 60 backward.
MOST = {
    "bf16": {"forward": 25, "training": 25, "backward": 59},
    "fp32": {"forward": 37, "training": 37, "backward": 89},
}


@pytest.mark.parametrize("precision", MOST)
def test_a_block_launches_no_more_than_it_did(precision: str) -> None:
    found = {which: count.total for which, count in block_launches(BLOCK, precision).items()}  # type: ignore[arg-type]
    assert {
        which: (count, MOST[precision][which]) for which, count in found.items() if count > MOST[precision][which]
    } == {}


def test_sizes_do_not_change_the_count_of_a_forward_pass() -> None:
    large = BlockSizes.of(ModelConfig(), ExampleSizes(residues=384, sequences=512, extra=1, templates=0))
    assert block_launches(large)["forward"] == block_launches(BLOCK)["forward"]


def test_what_is_counted() -> None:
    x = torch.ones(4, 6, device="meta", requires_grad=True)
    with counting() as count:
        y = (x + 1).t().detach()[1:]  # the sum alone launches something
        torch.empty_like(y).mul_(2)
        torch.ones(3, device="cpu") * 2
        torch.zeros(3, device="meta")
    assert count.torch == Counter(add=1, mul_=1, zeros=1)
    with counting() as count:
        out = gate.fast(x, x)
        torch.autograd.grad(out.sum(), x)
    assert count.triton == Counter(gate=1, gate_backward=1)
    assert count.torch["sum"] == 1
    lists = [[torch.ones(3, device=device) for _ in range(2)] for device in ("meta", "cpu")]
    with counting() as count:
        torch._foreach_add_(lists[0], lists[0])  # returns nothing
        torch._foreach_add_(lists[1], lists[1])
    assert count.torch == Counter(_foreach_add_=1)


def test_gradients_of_weights_are_added_to_the_buffer_and_none_is_copied() -> None:
    backward = block_launches(BLOCK)["backward"]
    assert backward.torch["_foreach_add_"] == 1
    assert "clone" not in backward.torch


def test_a_count_of_zero_is_an_error() -> None:
    with counting() as count:
        torch.empty(3, device="meta").view(3, 1)
    with pytest.raises(RuntimeError, match="no launch was seen"):
        assert count.total
    with pytest.raises(RuntimeError, match="no launch was seen"):
        str(LaunchCount())
