"""The number of kernels that an Evoformer block launches on a GPU, counted without a GPU, must not rise.

The backward pass is that of training: gradients of weights end in the optimizer's buffer.
"""

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import KernelInterface

from warpfold.cost.example import BlockSizes, ExampleSizes, RandomBlock
from warpfold.cost.launches import LaunchCount, block_launches, counting
from warpfold.model.alphafold import ModelConfig
from warpfold.ops import dispatch
from warpfold.ops.linear import gate
from warpfold.ops.triton import recipe
from warpfold.parallel.plan import Plan

SIZES = ExampleSizes(residues=256, sequences=128, extra=1, templates=0)
BLOCK = BlockSizes.of(ModelConfig(), SIZES)
# The last counts. A weight gradient by cuBLAS takes two small copies, of the columns of weight and bias in one product.
# The outer product's gradients take 9 launches for each of 4 chunks and 3 more. Its forward pass reorders the weight.
# The backward pass of projections is two products around one kernel, and torch sums the slabs of their bias.
# The MSA transition takes 6 launches for each of 4 chunks and 2 more. In fp32 both transitions do, and chunks have half
# as many positions. In fp32 the outer product, triangle products, projections and gated outputs are their definitions.
MOST = {
    "bf16": {"forward": 26, "training": 26, "backward": 141},
    "fp32": {"forward": 95, "training": 95, "backward": 238},
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
        y = (x + 1).t().detach()[1:]  # only the sum launches
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
    with pytest.raises(RuntimeError, match="no launch was recorded"):
        assert count.total
    with pytest.raises(RuntimeError, match="no launch was recorded"):
        str(LaunchCount())


def test_the_host_works_a_launch_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the Python calls for each launch of a block, including three of Triton's launcher.

    Without CUDA graphs the host's time limits the speed of predictions of short proteins and of training.
    """
    launches = 0

    def scratch() -> None:
        pass

    class Compiled:
        """Stand-in for compiled code, whose launcher makes two calls to allocate scratch memory that no kernel uses."""

        function, packed_metadata = 0, ()

        @staticmethod
        def run(*given: object) -> None:
            nonlocal launches
            launches += 1
            scratch()
            scratch()

    def launched(**given: object) -> Compiled:
        nonlocal launches
        launches += 1
        return Compiled()

    calls = 0

    def called(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code is not launched.__code__

    monkeypatch.setattr(KernelInterface, "__getitem__", lambda kernel, grid: launched)
    monkeypatch.setattr(recipe, "ALIGNMENT", 1)  # small CPU tensors have any address
    sizes = BlockSizes.of(ModelConfig(), ExampleSizes(residues=64, sequences=16, extra=1, templates=0))
    block = RandomBlock(sizes, Plan(precision="bf16"), "cpu")
    block.stack.eval()

    def counted(work: Callable[[], object]) -> float:
        nonlocal launches, calls
        launches = calls = 0
        sys.setprofile(called)
        try:
            work()
        finally:
            sys.setprofile(None)
        return calls / launches

    def differentiated() -> Tensor:
        return torch.stack([x.float().sum() for x in block.forward()]).sum()

    found, loss = {}, list[Tensor]()
    with dispatch.interpreting():
        for how, repeats in (("by recipe", dispatch.repeats), ("worked out", lambda: False)):
            monkeypatch.setattr(dispatch, "repeats", repeats)
            with torch.no_grad():
                block.forward()
                found["alone", how] = counted(block.forward)
            for _ in range(2):  # the first differs
                differentiated().backward()
            found["forward", how] = counted(lambda: loss.append(differentiated()))
            found["backward", how] = counted(loss.pop().backward)
    # Counted: 15.0, 17.8 and 8.2 calls, including three of the launcher. Products of cuBLAS do not count as launches.
    # With a gradient, torch.autograd.Function and its saved tensors add 3 calls per launch, or six per operation.
    assert found["alone", "by recipe"] <= 15
    assert found["forward", "by recipe"] <= 18
    assert found["backward", "by recipe"] <= 9
    for which, least in (("alone", 3), ("forward", 2.5), ("backward", 3)):
        assert found[which, "by recipe"] <= found[which, "worked out"] / least, which
