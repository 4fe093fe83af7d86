"""Layers of plain torch: normalisation, attention, encoder layers and perceptrons.

torch's own are good, so these are swapped only where `only=` names them, or where `verify="speed"` measured that ours
are faster or smaller on the device at hand.  What pays most is attention with a bias that wants a gradient, of which
torch has no fused backward pass: `biased_attention`.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from warpfold.adapt.adapter import Adapter, LinearOf, NormOf, NotServed, RandomInputs, made_of
from warpfold.model.attention import Transition
from warpfold.model.execution import Executable
from warpfold.ops.attention import attention
from warpfold.ops.norm import norm_linear


class LoneNorm(Executable):
    """A layer normalisation."""

    norm: NormOf


class ManyHeads(Executable):
    """Multi-head attention, of which q, k and v are one projection's parts."""

    of: nn.MultiheadAttention

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return [B, Q, c] of projections [B, Q or K, c], mask [B, K] (1: attend) and bias [Q, K] or [B, h, Q, K]."""
        heads = self.of.num_heads
        q, k, v = (t.unflatten(-1, (heads, -1)) for t in (q, k, v))
        mask = q.new_ones(k.shape[:2]) if mask is None else mask
        if bias is not None and bias.dim() == 4:
            q, k, v, mask, bias = q[:, None], k[:, None], v[:, None], mask[:, None], bias[:, None]
        o = attention(q, k, v, mask, bias if bias is None else bias.to(q.dtype)).flatten(-2)
        o = o.squeeze(1) if o.dim() == 4 else o
        return F.linear(o, self.of.out_proj.weight, self.of.out_proj.bias)


class PreNormLayer(Executable):
    """An encoder layer that normalises first."""

    of: nn.TransformerEncoderLayer
    heads: ManyHeads
    norm: NormOf
    transition: Transition


class PlainNorm(Adapter):
    """nn.LayerNorm over the last axis."""

    serves = ("torch.nn.modules.normalization:LayerNorm",)
    signature = "(self, input)"
    operation = "layer_norm"
    plain = True

    def build(self, module: nn.Module) -> Executable:
        if len(module.normalized_shape) != 1:  # type: ignore[arg-type]
            raise NotServed("it normalises several axes together")
        return made_of(LoneNorm, norm=NormOf(module))

    def forward(self, layer: LoneNorm, input: Tensor) -> Tensor:
        on = torch.is_autocast_enabled(input.device.type)  # under which torch normalises in fp32
        with layer.computing():
            return layer.norm(input.float() if on and input.dtype.itemsize < 4 else input)

    def example(self, module: nn.Module, n: int, random: RandomInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        assert isinstance(module, nn.LayerNorm)
        return (random(n, n, *module.normalized_shape),), {}


class PlainAttention(Adapter):
    """nn.MultiheadAttention, where its weights are not asked for."""

    serves = ("torch.nn.modules.activation:MultiheadAttention",)
    signature = (
        "(self, query, key, value, key_padding_mask=None, need_weights=True, attn_mask=None, "
        "average_attn_weights=True, is_causal=False)"
    )
    operation = "attention"
    plain = True

    def build(self, module: nn.Module) -> Executable:
        assert isinstance(module, nn.MultiheadAttention)
        if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
            raise NotServed("its keys and values have widths, a bias or zeros of their own")
        LinearOf(module.out_proj)
        return made_of(ManyHeads, of=module)

    def forward(
        self,
        layer: ManyHeads,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Return the attention, and no weights.  Errors: NotServed where they are asked for, for dropout."""
        of = layer.of
        if need_weights:
            raise NotServed("its weights are asked for (need_weights)")
        if query.dim() != 3:
            raise NotServed("queries without a batch axis")
        mask, bias = _masks(of, query, key_padding_mask, attn_mask, is_causal)
        same = key is query and value is key
        if not of.batch_first:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        weight, shift = of.in_proj_weight, of.in_proj_bias
        with layer.computing():
            if same:
                q, k, v = F.linear(query, weight, shift).chunk(3, -1)
            else:
                shifts = (None, None, None) if shift is None else shift.chunk(3)
                q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weight.chunk(3), shifts))
            o = layer.attend(q, k, v, mask, bias)
        return o if of.batch_first else o.transpose(0, 1), None

    def example(self, module: nn.Module, n: int, random: RandomInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        assert isinstance(module, nn.MultiheadAttention)
        x = random(*((2, n) if module.batch_first else (n, 2)), module.embed_dim)
        return (x, x, x), {"key_padding_mask": random.mask(2, n) == 0, "need_weights": False}


class PlainEncoderLayer(Adapter):
    """nn.TransformerEncoderLayer that normalises first, with ReLU."""

    serves = ("torch.nn.modules.transformer:TransformerEncoderLayer",)
    signature = "(self, src, src_mask=None, src_key_padding_mask=None, is_causal=False)"
    operation = "attention, transition"
    plain = True

    def build(self, module: nn.Module) -> Executable:
        assert isinstance(module, nn.TransformerEncoderLayer)
        if not module.norm_first or module.activation_relu_or_gelu != 1:
            raise NotServed("it normalises last, or its activation is not ReLU")
        heads = PlainAttention().build(module.self_attn)
        up, down = LinearOf(module.linear1), LinearOf(module.linear2)
        transition = made_of(Transition, activation="relu", norm=NormOf(module.norm2), up=up, down=down)
        return made_of(PreNormLayer, of=module, heads=heads, norm=NormOf(module.norm1), transition=transition)

    def forward(
        self,
        layer: PreNormLayer,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Return the new tokens.  Errors: NotServed for dropout, autocast, or tokens without a batch axis."""
        of, norm = layer.of, layer.norm
        _check_dropout(of, [of.dropout.p, of.dropout1.p, of.dropout2.p])
        if src.dim() != 3 or torch.is_autocast_enabled(src.device.type):
            raise NotServed("tokens without a batch axis, or under autocast")
        mask, bias = _masks(of.self_attn, src, src_key_padding_mask, src_mask, is_causal)
        x = src if of.self_attn.batch_first else src.transpose(0, 1)
        into = of.self_attn.in_proj_weight, of.self_attn.in_proj_bias
        with layer.computing():
            q, k, v = norm_linear(x, norm.weight, norm.bias, *into, norm.eps).chunk(3, -1)
            x = x + layer.heads.attend(q, k, v, mask, bias)
            x = layer.transition(x, x[..., 0])
        return x if of.self_attn.batch_first else x.transpose(0, 1)

    def example(self, module: nn.Module, n: int, random: RandomInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        (x, *_), options = PlainAttention().example(module.self_attn, n, random)  # type: ignore[arg-type]
        return (x,), {"src_key_padding_mask": options["key_padding_mask"]}


def _check_dropout(module: nn.Module, rates: Iterable[float]) -> None:
    if module.training and any(rates):
        raise NotServed("dropout in training")


def _masks(
    of: nn.MultiheadAttention, query: Tensor, ignored: Tensor | None, added: Tensor | None, is_causal: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the mask [B, K] (1: attend) and the bias [Q, K] or [B, h, Q, K] of what nn.MultiheadAttention takes.

    Errors: NotServed for what it means otherwise.
    """
    _check_dropout(of, [of.dropout])
    if is_causal and added is None:
        raise NotServed("causal without a mask")
    if added is not None and added.dtype == torch.bool:
        added = query.new_zeros(added.shape).masked_fill(added, float("-inf"))
    if added is not None and added.dim() == 3:
        added = added.unflatten(0, (-1, of.num_heads))
    if ignored is not None and ignored.dtype != torch.bool:  # added too: so does torch's encoder layer give it
        padding = ignored[:, None, None, :]
        ignored, added = None, padding if added is None else padding + added
    return None if ignored is None else (~ignored).to(query.dtype), added


class BiasedAttention(TorchFunctionMode):
    """Within it, F.scaled_dot_product_attention is computed by us where its bias wants a gradient."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return scaled_dot_product_attention(*args, **kwargs)
        return func(*args, **kwargs)


def biased_attention() -> BiasedAttention:
    """Return a context within which attention with a bias that wants a gradient never holds all its logits.

        with warpfold.biased_attention():
            loss = model(batch)
        loss.backward()

    It is F.scaled_dot_product_attention that is replaced, for calls in this thread; calls without such a bias, and
    those that we do not serve (dropout, causal, grouped heads), are torch's own.
    """
    return BiasedAttention()


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return what torch's function of this name returns; computed by us where the bias wants a gradient.

    query [B, h, Q, d], key, value [B, h, K, d], attn_mask [(B or 1,) (h or 1,) Q, K], added to the logits.
    """
    wants = attn_mask is not None and attn_mask.requires_grad and torch.is_grad_enabled()
    if not wants or dropout_p or is_causal or enable_gqa or query.dim() != 4 or attn_mask is None:
        with torch._C.DisableTorchFunction():
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
    if scale is not None:
        query = query * (scale * query.shape[-1] ** 0.5)
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    bias = attn_mask.expand(*attn_mask.shape[:-2], query.shape[-2], key.shape[-2])
    mask = q.new_ones(()).expand(k.shape[:2])
    if bias.dim() == 4 and bias.shape[0] != 1:  # each example has a bias of its own
        q, k, v, mask, bias = q[:, None], k[:, None], v[:, None], mask[:, None], bias[:, None]
    elif bias.dim() == 4:
        bias = bias[0]
    o = attention(q, k, v, mask, bias.to(q.dtype))
    return (o.squeeze(1) if o.dim() == 5 else o).transpose(1, 2)
