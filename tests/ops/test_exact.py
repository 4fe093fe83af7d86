"""Products that TF32 must not reach: what the setting is while they run, forward and backward, and what they are."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from warpfold.model.structure import StructureConfig, StructureModule
from warpfold.ops import dispatch
from warpfold.ops.tensors import exact_linear, exact_matmul

PRODUCTS = {"mm", "bmm", "addmm", "baddbmm"}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    dispatch.allow_tf32(False)


class Products(TorchDispatchMode):
    """Notes every product: the lengths of its operands' axes, and how torch may compute it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[set[int], str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in PRODUCTS:
            lengths = {n for x in args if isinstance(x, Tensor) for n in x.shape[-2:]}
            self.seen.append((lengths, torch.get_float32_matmul_precision()))
        return func(*args, **(kwargs or {}))


def test_tf32_does_not_reach_points_and_frames() -> None:
    c = StructureConfig(layers=2, c=8, heads=2, c_hidden=3, qk_points=2, v_points=3, sidechain_c=7, dropout=0.0)
    module = StructureModule(4, 5, c)
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.3)
    s, z = torch.randn(9, 4, requires_grad=True), torch.randn(9, 9, 5, requires_grad=True)
    dispatch.allow_tf32(True)
    with Products() as products:
        output = module(s, z, torch.zeros(9, dtype=torch.long), torch.ones(9))
        output.final_atom37.sum().backward()
    # Of the logits' features, the values' features, all projections of s, and the update of the frames.
    geometry = {c.c_hidden + 3 * c.qk_points + 1, c.c_hidden + 3 * c.v_points, 60, 6}
    exact = [how for lengths, how in products.seen if lengths & geometry]
    assert len(exact) == 2 * 4 * 3  # of each layer four, and both gradients of each
    assert set(exact) == {"highest"}
    assert "high" in {how for _, how in products.seen}  # activations
    assert torch.get_float32_matmul_precision() == "high"


def test_the_setting_comes_back_whoever_leaves_first() -> None:
    dispatch.allow_tf32(True)
    first, second = dispatch.exact_products(), dispatch.exact_products()
    first.__enter__()
    second.__enter__()
    assert dispatch.fp32_products() == ("ieee",)
    first.__exit__(None, None, None)  # as of two threads
    assert torch.get_float32_matmul_precision() == "highest"
    second.__exit__(None, None, None)
    assert torch.get_float32_matmul_precision() == "high"
    assert "tf32" in dispatch.fp32_products()


def test_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, other, added = (
        torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 3, 4), (5, 4), (5,), (2, 4, 5), (2, 3, 5))
    )
    assert gradcheck(exact_linear, (x, weight, bias))
    assert gradcheck(exact_linear, (x, weight))
    assert gradcheck(exact_matmul, (x, other, added))
    assert gradcheck(exact_matmul, (x, other))
    torch.testing.assert_close(exact_matmul(x, other, added), added + x @ other)
