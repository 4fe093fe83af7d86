"""Where 16 bits do not suffice."""

import torch
from torch import Tensor


def island(x: Tensor) -> Tensor:
    """x in fp32 if it is in a 16-bit dtype, else as it is: the dtype of norms, softmax, frames, losses and logits."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def wide(x: Tensor) -> torch.dtype:
    """The dtype that sums over x, its statistics and its logits are in: fp64 of fp64, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
