"""A model in the style of other packages, and the adapters for its layers."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from warpfold.adapt.adapter import (
    Adapter,
    ForeignAttention,
    ForeignLinear,
    ForeignNorm,
    NotServed,
    RandomInputs,
    assemble,
)
from warpfold.model.evoformer import Transition, TriangleAttention, TriangleMultiplication


class TheirMlp(nn.Module):
    """A norm and a two-layer perceptron, to which the caller adds the residual."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(c), nn.Linear(c, 4 * c), nn.Linear(4 * c, c)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)).relu())


class TheirAttention(nn.Module):
    """Attention within each row of pairs, biased by the pairs."""

    def __init__(self, c: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(c)
        self.q, self.k, self.v = (nn.Linear(c, c, bias=False) for _ in range(3))
        self.gate, self.out, self.bias = nn.Linear(c, c), nn.Linear(c, c), nn.Linear(c, heads, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None, chunk_size: int | None = None) -> Tensor:
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(-2, -3) for f in (self.q, self.k, self.v))
        logits = q @ k.mT * q.shape[-1] ** -0.5 + self.bias(y).movedim(-1, -3)[..., None, :, :, :]
        if mask is not None:
            logits = logits + ((mask - 1) * 1e9)[..., None, None, :]
        o = (logits.softmax(-1) @ v).transpose(-2, -3).flatten(-2)
        return self.out(o * self.gate(y).sigmoid())


class TheirProduct(nn.Module):
    """The outgoing triangle product."""

    def __init__(self, c: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.norm_out = nn.LayerNorm(c), nn.LayerNorm(hidden)
        self.a, self.a_gate, self.b, self.b_gate = (nn.Linear(c, hidden) for _ in range(4))
        self.gate, self.out = nn.Linear(c, c), nn.Linear(hidden, c)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y, on = self.norm(x), mask[..., None]
        a, b = self.a(y) * self.a_gate(y).sigmoid() * on, self.b(y) * self.b_gate(y).sigmoid() * on
        product = torch.einsum("...ikc,...jkc->...ijc", a, b)
        return self.out(self.norm_out(product)) * self.gate(y).sigmoid()


class TheirBlock(nn.Module):
    def __init__(self, c: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.product, self.attention, self.mlp = TheirProduct(c, hidden), TheirAttention(c, heads), TheirMlp(c)

    def forward(self, z: Tensor, mask: Tensor, chunk_size: int | None = None) -> Tensor:
        z = z + self.product(z, mask)
        z = z + self.attention(z, mask, chunk_size)
        return z + self.mlp(z)


class TheirModel(nn.Module):
    """Blocks on pairs, between an embedding and a head without adapters."""

    def __init__(self, blocks: int = 2, c: int = 16, heads: int = 2, hidden: int = 16) -> None:
        super().__init__()
        self.embed = nn.Linear(3, c)
        self.blocks = nn.ModuleList(TheirBlock(c, heads, hidden) for _ in range(blocks))
        self.head = nn.Linear(c, 5)

    def forward(self, x: Tensor, mask: Tensor, chunk_size: int | None = None) -> Tensor:
        z = self.embed(x)
        for block in self.blocks:
            z = block(z, mask, chunk_size)
        return self.head(z)


class ServesMlp(Adapter):
    serves = (f"{__name__}:TheirMlp",)
    signature = "(self, x)"
    operation = "transition"

    def build(self, module: Any) -> Any:
        up, down = ForeignLinear(module.up), ForeignLinear(module.down)
        return assemble(Transition, activation="relu", norm=ForeignNorm(module.norm), up=up, down=down)

    def forward(self, layer: Any, x: Tensor) -> Tensor:
        return self.update(layer, x, x[..., 0])

    def example(self, module: Any, n: int, random: RandomInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (random(1, n, n, module.up.in_features),), {}


class ServesAttention(Adapter):
    serves = (f"{__name__}:TheirAttention",)
    signature = "(self, x, mask=None, chunk_size=None)"
    operation = "gated_attention"

    def build(self, module: Any) -> Any:
        parts = {name: ForeignLinear(getattr(module, name)) for name in ("q", "k", "v", "gate", "out")}
        attention, norm, bias = (
            ForeignAttention(module.heads, **parts),
            ForeignNorm(module.norm),
            ForeignLinear(module.bias),
        )
        return assemble(TriangleAttention, by_column=False, axis=-3, attention=attention, norm=norm, bias=bias)

    def forward(self, layer: Any, x: Tensor, mask: Tensor | None = None, chunk_size: int | None = None) -> Tensor:
        if mask is None:
            raise NotServed("no mask")
        return self.update(layer, x, mask, rows=chunk_size)

    def example(self, module: Any, n: int, random: RandomInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (random(1, n, n, module.q.in_features), random.mask(1, n, n)), {}


class ServesProduct(Adapter):
    serves = (f"{__name__}:TheirProduct",)
    signature = "(self, x, mask)"
    operation = "triangle_multiplication"

    def build(self, module: Any) -> Any:
        names = ("a", "a_gate", "b", "b_gate", "gate", "out")
        linears = {name: ForeignLinear(getattr(module, name)) for name in names}
        norms = {"norm": ForeignNorm(module.norm), "norm_out": ForeignNorm(module.norm_out)}
        more = {"outgoing": True, "fused": False, "channels": module.a.out_features, "axis": -3}
        return assemble(TriangleMultiplication, **linears, **norms, **more)

    def forward(self, layer: Any, x: Tensor, mask: Tensor) -> Tensor:
        return self.update(layer, x, mask)

    def example(self, module: Any, n: int, random: RandomInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (random(1, n, n, module.a.in_features), random.mask(1, n, n)), {}


KNOWN: Mapping[str, Adapter] = {
    name: kind() for kind in (ServesMlp, ServesAttention, ServesProduct) for name in kind.serves
}


def inputs(n: int = 9, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Draw pairs and their mask for `TheirModel`."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, n, n, 3, generator=generator, dtype=torch.float64).to(dtype)
    mask = (torch.rand(1, n, n, generator=generator) < 0.8).to(dtype)
    mask[..., 0] = 1
    return x, mask
