"""The implementations of an operation that the benchmark compares: definition, torch, ours and other packages.

Other packages are imported only if they are installed and selected. Each gets its arguments in its own layout, which is
created before timing starts. The signatures come from public documentation.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from warpfold.bench.timing import Subject
from warpfold.check.cases import BENCHED, OPS, PROFILES
from warpfold.check.op_profile import Argument, OpInputs
from warpfold.memory import free_memory
from warpfold.parallel.execution import cpp_compiler

# Peak bytes per logit of the definition, forward and backward, both in fp32 and in bf16.
PER_LOGIT = 20


@dataclass(frozen=True)
class Way:
    """An implementation in the benchmark.

    unsupported_reason: returns why it cannot compute the inputs, or None. make: binds it to inputs. materialises: it
    has all logits in memory at once.
    """

    name: str
    unsupported_reason: Callable[[OpInputs], str | None]
    make: Callable[[OpInputs], Subject]
    materialises: bool = False


def _call(name: str, function: Callable[..., Tensor], given: OpInputs) -> Subject:
    return Subject(name, lambda: function(*given.args), given.wanted, given.grad)


def _dense(t: Tensor) -> Tensor:
    """Return a dense copy with a separate gradient."""
    return t.detach().contiguous().requires_grad_(t.requires_grad)


def _tensor(x: Argument) -> Tensor:
    assert isinstance(x, Tensor)
    return x


# ---- torch


def _compiled(given: OpInputs) -> Subject:
    # Compile each size separately, without reaching torch's limit of recompilations.
    torch.compiler.reset()
    return _call("compile", torch.compile(OPS[given.case.op].definition, dynamic=False), given)


def compile_unsupported(device: torch.device) -> str | None:
    """Explain why torch.compile cannot be used on a device; None if it can."""
    if device.type == "cpu" and cpp_compiler() is None:
        return "no C++ compiler"
    return None


def _heads_first(given: OpInputs) -> tuple[Tensor, ...]:
    """Return q, k, v in SDPA's layout [*, h, n, d]. In global attention, heads are the queries of a single head."""
    q, k, v = map(_tensor, given.args[:3])
    if given.case.op == "global_attention":
        return q[..., None, :, :], k[..., None, :, :], v[..., None, :, :]
    return q.transpose(-2, -3), k.transpose(-2, -3), v.transpose(-2, -3)


def _sdpa(given: OpInputs, materialised: bool) -> Subject:
    """Bind SDPA with a bias that the rows share, and without a mask, because the benchmark masks nothing.

    materialised: with the sum of bias and mask in a tensor of all rows, as a model with masks needs it.
    """
    mask, bias = _tensor(given.args[3]), _tensor(given.args[4]) if given.case.bias else None

    def forward() -> Tensor:
        """Compute attention. The mask is computed each time, as in a model."""
        q, k, v = _heads_first(given)
        attn_mask = None
        if bias is not None and materialised:
            logits = (1 - mask[..., None, None, :]) * -1e9 + bias
            attn_mask = logits.to(q.dtype).expand(*q.shape[:-1], k.shape[-2]).contiguous()
        elif bias is not None:
            attn_mask = bias.contiguous().expand(*q.shape[:-1], k.shape[-2])
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)
        return out[..., 0, :, :] if given.case.op == "global_attention" else out.transpose(-2, -3)

    return Subject("sdpa-materialised" if materialised else "sdpa", forward, given.wanted, given.grad)


# ---- others


def _attention_unsupported(package: str, given: OpInputs) -> str | None:
    if given.case.op != "attention" or given.case.keys:
        return "not its kind of attention"
    return _package_unsupported(package, given)


def _package_unsupported(package: str, given: OpInputs) -> str | None:
    if given.grad.device.type != "cuda":
        return "for GPUs only"
    return None if importlib.util.find_spec(package) else "not installed"


def _trifast_unsupported(given: OpInputs) -> str | None:
    c = given.case
    if not c.bias or c.rows != c.length:
        return "for triangles only"
    return _attention_unsupported("trifast", given)


def _trifast(given: OpInputs) -> Subject:
    """Bind triangle_attention(q, k, v, bias, mask): q [h, n, n, d], bias [h, n, n], mask [n, n], True if hidden."""
    package: Any = importlib.import_module("trifast")
    q, k, v = (_dense(_tensor(t).movedim(-2, 0)) for t in given.args[:3])
    mask, bias = map(_tensor, given.args[3:5])
    b = _dense(bias[..., 0, :, :, :])
    hidden, grad = mask == 0, given.grad.movedim(-2, 0).contiguous()
    return Subject("trifast", lambda: package.triangle_attention(q, k, v, b, hidden), [q, k, v, b], grad)


def _cuequivariance_unsupported(given: OpInputs) -> str | None:
    if given.case.op == "triangle_multiplication":
        return _package_unsupported("cuequivariance_torch", given)
    return (
        _attention_unsupported("cuequivariance_torch", given) if given.case.bias else "for attention with a bias only"
    )


def _cuequivariance(given: OpInputs) -> Subject:
    """Bind triangle_attention(q, k, v, bias, mask): q [1, r, h, n, d], bias [1, 1, h, n, n], mask [1, r, 1, 1, n]."""
    if given.case.op == "triangle_multiplication":
        return _cuequivariance_product(given)
    package: Any = importlib.import_module("cuequivariance_torch")
    q, k, v = (_dense(_tensor(t).transpose(-2, -3)[None]) for t in given.args[:3])
    mask, bias = map(_tensor, given.args[3:5])
    b, keep_mask = _dense(bias[None]), (mask != 0)[None, :, None, None, :]
    grad = given.grad.transpose(-2, -3)[None].contiguous()
    return Subject("cuequivariance", lambda: package.triangle_attention(q, k, v, b, keep_mask), [q, k, v, b], grad)


def _cuequivariance_product(given: OpInputs) -> Subject:
    """Bind triangle_multiplicative_update, which has no residual and no dropout.

    It takes x [1, n, n, c], and separate weights of a and b and of their gates.
    """
    package: Any = importlib.import_module("cuequivariance_torch")
    x, mask, *parameters = map(_tensor, (*given.args[:2], *given.args[3:11]))
    norm_in, norm_in_bias, weight, bias, norm_out, norm_out_bias, out, out_bias = map(_dense, parameters)
    h = out.shape[1]
    # Our weights are those of a, its gate, b, its gate, and the gate of the product. The incoming product of the
    # package sums a_ki b_kj over k, and ours sums a_kj b_ki, so a and b are swapped.
    outgoing = given.args[12]
    a, b = (0, 2) if outgoing else (2, 0)
    named = {
        f"{name}_{kind}": _dense(torch.cat([joined[part * h : (part + 1) * h] for part in parts]))
        for name, parts in (("p_in", (a, b)), ("g_in", (a + 1, b + 1)))
        for kind, joined in (("weight", weight), ("bias", bias))
    }
    named |= {"g_out_weight": _dense(weight[4 * h :]), "g_out_bias": _dense(bias[4 * h :])}
    named |= {"norm_in_weight": norm_in, "norm_in_bias": norm_in_bias, "p_out_weight": out, "p_out_bias": out_bias}
    named |= {"norm_out_weight": norm_out, "norm_out_bias": norm_out_bias}
    named = {name: t.detach().to(x.dtype).requires_grad_() for name, t in named.items()}
    z, direction = _dense(x.unsqueeze(0)), "outgoing" if outgoing else "incoming"
    grad = given.grad.unsqueeze(0).contiguous()

    def forward() -> Tensor:
        updated: Tensor = package.triangle_multiplicative_update(z, direction, mask=mask.unsqueeze(0), **named)
        return updated

    return Subject("cuequivariance", forward, [z, *named.values()], grad)


def _flash_unsupported(given: OpInputs) -> str | None:
    if given.case.bias:
        return "takes no bias"
    if given.grad.dtype == torch.float32:
        return "for bf16 and fp16 only"
    return _attention_unsupported("flash_attn", given)


def _flash(given: OpInputs) -> Subject:
    """Bind flash_attn_func(q, k, v) with q [r, n, h, d] and without a mask."""
    package: Any = importlib.import_module("flash_attn")
    q, k, v = (_dense(_tensor(t)) for t in given.args[:3])
    return Subject("flash-attn", lambda: package.flash_attn_func(q, k, v), [q, k, v], given.grad.contiguous())


# ---- all of them


DEFINITION = Way(
    "definition", lambda _: None, lambda given: _call("definition", OPS[given.case.op].definition, given), True
)
COMPILED = Way("compile", lambda given: compile_unsupported(given.grad.device), _compiled, True)
OURS = Way(
    "ours",
    lambda given: OPS[given.case.op].unsupported_reason(*given.args),
    lambda given: _call("ours", OPS[given.case.op].fast, given),
)
PEERS = (
    Way("sdpa", lambda _: None, lambda given: _sdpa(given, False), True),
    Way(
        "sdpa-materialised",
        lambda given: None if given.case.bias else "without a bias there is nothing to add the mask to",
        lambda given: _sdpa(given, True),
        True,
    ),
    Way("trifast", _trifast_unsupported, _trifast),
    Way("cuequivariance", _cuequivariance_unsupported, _cuequivariance),
    Way("flash-attn", _flash_unsupported, _flash),
)
WAYS: Mapping[str, tuple[Way, ...]] = {
    op: (DEFINITION, COMPILED, *(way for way in PEERS if way.name in PROFILES[op].peers), OURS) for op in BENCHED
}


def too_large(way: Way, given: OpInputs) -> str | None:
    """Explain why an implementation that has all logits in memory is not run; None if it fits."""
    needs = PER_LOGIT * given.case.logits
    if way.materialises and needs > 0.8 * free_memory(given.grad.device):
        return f"would need {needs / 2**30:.0f} GiB"
    return None
