"""The fp64 reference of the comparison is in fp64 throughout, also for code that casts to fp32."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from warpfold.adapt.adapter import Adapter, RandomInputs, swap
from warpfold.adapt.verify import StaysDouble, compare
from warpfold.model.axial import Executable
from warpfold.ops.dispatch import always_fast


class InFp32(nn.Module):
    """A layer that casts factors to fp32 and normalises the product, as in several packages."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.float(), x.to(torch.float32)
        return self.norm(a @ b.type(torch.float32).mT) + x.to(dtype=torch.float32).to(x)


def test_casts_to_fp32_leave_fp64_as_it_is() -> None:
    x = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    layer = InFp32().double()
    with StaysDouble():
        found = layer(x)
    assert_close(found, layer.norm(x @ x.mT) + x, rtol=1e-14, atol=1e-14)
    assert x.float().dtype == torch.float32  # casts work outside of the context


def test_other_dtypes_are_cast() -> None:
    with StaysDouble():
        assert torch.ones(2, dtype=torch.bfloat16).float().dtype == torch.float32
        assert torch.ones(2, dtype=torch.float64).to(torch.bfloat16).dtype == torch.bfloat16


class ShiftsLogits(nn.Module):
    """A softmax of x + b, where b shifts all logits equally, so that its gradient is zero except for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.shift).softmax(-1) * self.scale


class SameAgain(Adapter):
    """The same layer, computed in another order."""

    def build(self, module: nn.Module) -> nn.Module:
        return Another(module)

    def forward(self, layer: Any, x: Tensor) -> Tensor:
        return layer(x)

    def example(self, module: nn.Module, n: int, random: RandomInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (random(n, 6),), {}


class Another(Executable):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "of", module)

    def forward(self, x: Tensor) -> Tensor:
        powers = (x + self.of.shift - 1).exp()
        return powers * (self.of.scale / powers.sum(-1, keepdim=True))


def test_rounding_of_a_gradient_that_is_zero_is_no_difference() -> None:
    found = compare(ShiftsLogits(), SameAgain())
    assert found.agrees
    assert found.difference < 1e-4


def test_what_is_small_on_a_cpu_their_own_code_computes() -> None:
    class Least(SameAgain):
        least = 100

        def forward(self, layer: Any, x: Tensor) -> Tensor:
            return x * 0

    module = ShiftsLogits()
    swap(module, Least(), Least().build(module))
    small, large = torch.ones(2, 6), torch.ones(20, 6)
    assert module(small).any()
    assert not module(large).any()
    with always_fast():
        assert not module(small).any()
