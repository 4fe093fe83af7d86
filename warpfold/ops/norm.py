"""layer_norm, and norm_linear: the projection that follows a norm, without the normalised tensor in between."""

import torch.nn.functional as F
from torch import Tensor

from warpfold.ops.dispatch import op
from warpfold.ops.library import norm as library
from warpfold.ops.precision import island

EPS = 1e-5  # of every layer normalisation in AlphaFold2


@op(library.layer_norm, refuses=library.refuses_layer_norm, small=library.small_layer_norm)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = EPS) -> Tensor:
    """Layer normalisation over the last axis; statistics in fp32 at least, the result in the dtype of x.

    x [*, c], weight, bias [c] -> [*, c], laid out in memory as x is.
    """
    wide = island(x)
    return F.layer_norm(wide, x.shape[-1:], weight.to(wide.dtype), bias.to(wide.dtype), eps).to(x.dtype)


@op(library.norm_linear, refuses=library.refuses_norm_linear, small=library.small_norm_linear)
def norm_linear(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = EPS
) -> Tensor:
    """linear(layer_norm(x)): x [*, c], norm_weight, norm_bias [c], weight [o, c], bias [o] -> [*, o] in the dtype of x.

    Several projections of one tensor are one call, their weights concatenated.  Parameters of any float dtype.
    """
    n = layer_norm.definition(x, norm_weight, norm_bias, eps)
    return F.linear(n, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
