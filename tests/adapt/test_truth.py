"""The fp64 that both ways are measured by is fp64 throughout, also of code that computes parts of itself in fp32."""

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from warpfold.adapt.verify import StaysDouble


class InFp32(nn.Module):
    """A layer that casts to fp32 what it multiplies, and normalises that, as several models do."""

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
    assert x.float().dtype == torch.float32  # elsewhere they do what they say


def test_other_dtypes_are_cast() -> None:
    with StaysDouble():
        assert torch.ones(2, dtype=torch.bfloat16).float().dtype == torch.float32
        assert torch.ones(2, dtype=torch.float64).to(torch.bfloat16).dtype == torch.bfloat16
