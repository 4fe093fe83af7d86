"""Gated self-attention, the core of Algorithms 7, 8, 13 and 14, and the transition of Algorithms 9 and 15."""

from torch import Tensor, nn

from warpfold.model.axial import AxialUpdate, Tensors
from warpfold.model.layers import LayerNorm, Linear
from warpfold.ops.attention import attention


class GatedAttention(nn.Module):
    """Multi-head attention whose output is gated by the sigmoid of a projection of its input.

    Two steps, so that a schedule can do the first while the bias is on its way: `project` n [*, K, c] into q, k, v and
    how far the gate is open, g, each [*, K, h, d]; `attend` within the last-but-one axis of n.
    """

    def __init__(self, c: int, heads: int, width: int | None = None) -> None:
        super().__init__()
        width = c // heads if width is None else width
        self.heads = heads
        self.q = Linear(c, heads * width, bias=False, init="glorot")
        self.k = Linear(c, heads * width, bias=False, init="glorot")
        self.v = Linear(c, heads * width, bias=False, init="glorot")
        self.gate = Linear(c, heads * width, init="gating")
        self.out = Linear(heads * width, c, init="final")

    def project(self, n: Tensor) -> Tensors:
        q, k, v, g = (f(n).unflatten(-1, (self.heads, -1)) for f in (self.q, self.k, self.v, self.gate))
        return q, k, v, g.sigmoid()

    def attend(self, projected: Tensors, mask: Tensor, bias: Tensor | None = None) -> Tensor:
        """mask [*, K], bias [*, h, K, K] -> [*, K, c]."""
        q, k, v, g = projected
        return self.out((attention(q, k, v, mask, bias) * g).flatten(-2))


class Transition(AxialUpdate):
    """Algorithms 9 and 15: a two-layer perceptron at each position alone.  Masked positions are updated too."""

    def __init__(self, c: int, factor: int = 4) -> None:
        super().__init__()
        self.norm = LayerNorm(c)
        self.up = Linear(c, factor * c, init="relu")
        self.down = Linear(factor * c, c, init="final")

    def update(self, local: Tensors, shared: Tensors, mask: Tensor) -> Tensor:
        (n,) = local
        return self.down(self.up(n).relu())
