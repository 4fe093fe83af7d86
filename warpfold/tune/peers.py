"""The ways to compute an operation that the bench compares: the definition, compiled, torch's own, ours, others'.

Others' packages are imported only where they are installed and asked for.  Each gets its arguments in the layout that
it wants, made before the clock starts; their signatures are from their public documentation.
"""

import importlib
import importlib.util
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from warpfold.ops.noise import DropoutFactors
from warpfold.tune.cases import OPS, Inputs
from warpfold.tune.timing import Subject

PER_LOGIT = 20  # bytes that the definition holds at its peak, forward and backward, in fp32 and bf16 alike


@dataclass(frozen=True)
class Way:
    """A column of the bench.  `refuses` says why it does not take a case, or None; `make` binds it to inputs."""

    name: str
    refuses: Callable[[Inputs], str | None]
    make: Callable[[Inputs], Subject]
    materialises: bool = False  # all logits at once


def _same(name: str, function: Callable[..., Tensor], given: Inputs) -> Subject:
    return Subject(name, lambda: function(*given.args), given.wanted, given.grad)


def _laid(t: Tensor) -> Tensor:
    """A dense copy that has a gradient of its own."""
    return t.detach().contiguous().requires_grad_(t.requires_grad)


def _never(_: Inputs) -> None:
    return None


# ---- torch


def _compiled(given: Inputs) -> Subject:
    torch._dynamo.reset()  # each size is compiled for itself, and none counts against torch's limit
    function = torch.compile(OPS[given.case.op].definition, dynamic=False)
    return _same("compile", function, given)


def _refuses_compiled(given: Inputs) -> str | None:
    if given.grad.device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++"))):
        return "no C++ compiler"
    return None


def _heads_first(given: Inputs) -> tuple[Tensor, ...]:
    """q, k, v as SDPA takes them, [*, h, n, d]; of global attention, heads are the queries of one head."""
    q, k, v = (t for t in given.args[:3] if isinstance(t, Tensor))
    if given.case.op == "global_attention":
        return q[..., None, :, :], k[..., None, :, :], v[..., None, :, :]
    return q.transpose(-2, -3), k.transpose(-2, -3), v.transpose(-2, -3)


def _back(given: Inputs, out: Tensor) -> Tensor:
    return out[..., 0, :, :] if given.case.op == "global_attention" else out.transpose(-2, -3)


def _expanded(given: Inputs) -> Subject:
    """With the bias shared by the rows, laid out for it; no mask (the bench masks nothing)."""
    bias = given.args[4] if len(given.args) > 4 else None
    assert not isinstance(bias, DropoutFactors)

    def forward() -> Tensor:
        q, k, v = _heads_first(given)
        wide = None if bias is None else bias.contiguous().expand(*q.shape[:-1], k.shape[-2])
        return _back(given, F.scaled_dot_product_attention(q, k, v, attn_mask=wide))

    return Subject("sdpa", forward, given.wanted, given.grad)


def _materialised(given: Inputs) -> Subject:
    """With bias and mask added to one tensor of all rows, as a model with masks has to."""
    mask, bias = given.args[3], given.args[4]
    assert isinstance(mask, Tensor)
    assert not isinstance(bias, DropoutFactors)

    def forward() -> Tensor:
        q, k, v = _heads_first(given)
        hidden = (1 - mask[..., None, None, :]) * -1e9
        wide = (hidden if bias is None else hidden + bias).to(q.dtype).expand(*q.shape[:-1], k.shape[-2]).contiguous()
        return _back(given, F.scaled_dot_product_attention(q, k, v, attn_mask=wide))

    return Subject("sdpa-materialised", forward, given.wanted, given.grad)


def _refuses_materialised(given: Inputs) -> str | None:
    return None if given.case.bias else "without a bias there is nothing to add the mask to"


# ---- others


def _lacks(package: str, given: Inputs) -> str | None:
    if given.case.op != "attention" or given.case.keys:
        return "not its kind of attention"
    if given.grad.device.type != "cuda":
        return "for GPUs only"
    return None if importlib.util.find_spec(package) else "not installed"


def _refuses_trifast(given: Inputs) -> str | None:
    c = given.case
    if not c.bias or c.rows != c.length:
        return "for triangles only"
    return _lacks("trifast", given)


def _trifast(given: Inputs) -> Subject:
    """triangle_attention(q, k, v, bias, mask): q [h, n, n, d], bias [h, n, n], mask [n, n], True where hidden."""
    package: Any = importlib.import_module("trifast")
    q, k, v = (_laid(t.movedim(-2, 0)) for t in given.args[:3] if isinstance(t, Tensor))
    mask, bias = given.args[3], given.args[4]
    assert isinstance(mask, Tensor)
    assert isinstance(bias, Tensor)
    b = _laid(bias[..., 0, :, :, :])
    hidden, grad = mask == 0, given.grad.movedim(-2, 0).contiguous()
    return Subject("trifast", lambda: package.triangle_attention(q, k, v, b, hidden), [q, k, v, b], grad)


def _refuses_cuequivariance(given: Inputs) -> str | None:
    return _lacks("cuequivariance_torch", given) if given.case.bias else "for attention with a bias only"


def _cuequivariance(given: Inputs) -> Subject:
    """triangle_attention(q, k, v, bias, mask): q [1, r, h, n, d], bias [1, 1, h, n, n], mask [1, r, 1, 1, n]."""
    package: Any = importlib.import_module("cuequivariance_torch")
    q, k, v = (_laid(t.transpose(-2, -3)[None]) for t in given.args[:3] if isinstance(t, Tensor))
    mask, bias = given.args[3], given.args[4]
    assert isinstance(mask, Tensor)
    assert isinstance(bias, Tensor)
    b, kept = _laid(bias[None]), (mask != 0)[None, :, None, None, :]
    grad = given.grad.transpose(-2, -3)[None].contiguous()
    return Subject("cuequivariance", lambda: package.triangle_attention(q, k, v, b, kept), [q, k, v, b], grad)


def _refuses_flash(given: Inputs) -> str | None:
    if given.case.bias:
        return "takes no bias"
    if given.grad.dtype == torch.float32:
        return "for bf16 and fp16 only"
    return _lacks("flash_attn", given)


def _flash(given: Inputs) -> Subject:
    """flash_attn_func(q, k, v): q [r, n, h, d]; it takes no mask."""
    package: Any = importlib.import_module("flash_attn")
    q, k, v = (_laid(t) for t in given.args[:3] if isinstance(t, Tensor))
    return Subject("flash-attn", lambda: package.flash_attn_func(q, k, v), [q, k, v], given.grad.contiguous())


# ---- all of them


def _ours(given: Inputs) -> Subject:
    return _same("ours", OPS[given.case.op].fast, given)


def _refuses_ours(given: Inputs) -> str | None:
    return OPS[given.case.op].unsupported_reason(*given.args)


_EVERY = (
    Way("definition", _never, lambda given: _same("definition", OPS[given.case.op].definition, given), True),
    Way("compile", _refuses_compiled, _compiled, True),
)
_OURS = Way("ours", _refuses_ours, _ours)
_ATTENTION = (
    Way("sdpa", _never, _expanded, True),
    Way("sdpa-materialised", _refuses_materialised, _materialised, True),
    Way("trifast", _refuses_trifast, _trifast),
    Way("cuequivariance", _refuses_cuequivariance, _cuequivariance),
    Way("flash-attn", _refuses_flash, _flash),
)
WAYS: Mapping[str, tuple[Way, ...]] = {
    "attention": (*_EVERY, *_ATTENTION, _OURS),
    **dict.fromkeys(
        ("layer_norm", "norm_linear", "gate", "tail", "transition", "triangle_factor", "outer_product"),
        (*_EVERY, _OURS),
    ),
}


def free_memory(device: torch.device) -> int:
    """Bytes that can still be had there."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo", encoding="ascii") as file:
        lines = dict(line.split(":") for line in file)
    return int(lines["MemAvailable"].split()[0]) * 1024


def too_large(way: Way, given: Inputs) -> str | None:
    """Why a way that holds all logits at once is not tried, or None."""
    needs = PER_LOGIT * given.case.logits
    if way.materialises and needs > 0.8 * free_memory(given.grad.device):
        return f"would need {needs / 2**30:.0f} GiB"
    return None
