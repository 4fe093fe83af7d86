"""What one call of one of our operations must do, from its arguments: the case of its profile (check/cases.py)."""

import inspect
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from torch import Tensor

from warpfold.check.cases import PROFILES
from warpfold.check.op_profile import Cost, OpCase
from warpfold.cost.layer_work import IN_PARTS, scaled
from warpfold.cost.observe import size
from warpfold.ops.dispatch import Op

Arguments = Mapping[str, Any]  # of a call, by the names that the definition gives them
NAMES = {profile.op: name for name, profile in PROFILES.items()}


def name_of(op: Op[..., Any]) -> str:
    """Return the name under which the rates of a device know an operation."""
    return NAMES.get(op, op.name)


def arguments_of(op: Op[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
    """Return the arguments of a call by name."""
    return _signature(op).bind(*args, **kwargs).arguments


@cache
def _signature(op: Op[..., Any]) -> inspect.Signature:
    return inspect.signature(op.definition)


def call_cost(op: Op[..., Any], given: Arguments, forward: bool) -> Cost:
    """Return what one pass of a call must do; of an operation without a profile, the bytes that it is given."""
    name, first = name_of(op), next(x for x in given.values() if isinstance(x, Tensor))
    itemsize = first.element_size()
    if name in IN_PARTS:
        rows, residues, channels = first.shape[-3], first.shape[-2], first.shape[-1]
        hidden = given["b"].shape[-3] if "b" in given else given["into"][0].shape[0] // 2
        return scaled(IN_PARTS[name](rows, residues, channels, hidden, itemsize, forward), _together(first))
    if name not in CASES:
        return Cost(0, 0, (1 if forward else 2) * sum(size(x) for x in given.values() if isinstance(x, Tensor)))
    cost = PROFILES[name].cost(OpCase(op=name, where="", **CASES[name](given)), forward, itemsize)
    return scaled(cost, _together(first)) if name == "triangle_multiplication" else cost


def _together(x: Tensor) -> int:
    """Return how many pair representations go through an operation at once, which its profile knows one of."""
    return math.prod(x.shape[:-3])


def _positions(x: Tensor) -> dict[str, int]:
    """Return rows and their length, as far as a cost depends on them: each position by itself."""
    return {"rows": x.numel() // max(1, x.shape[-1]), "length": 1, "channels": x.shape[-1]}


def _attention(given: Arguments) -> dict[str, Any]:
    q, k, bias = given["q"], given["k"], given.get("bias")
    *_, queries, heads, width = q.shape
    keys = k.shape[-3]
    batches = 1 if bias is None else max(1, bias.numel() // (heads * queries * keys))
    rows = q.numel() // (queries * heads * width)
    at = {"rows": rows, "length": queries, "keys": keys, "heads": heads, "width": width}
    return at | {"bias": bias is not None, "batches": batches}


def _global_attention(given: Arguments) -> dict[str, Any]:
    q, k = given["q"], given["k"]
    *_, heads, width = q.shape
    return {"rows": q.numel() // (heads * width), "length": 1, "keys": k.shape[-2], "heads": heads, "width": width}


def _gated_attention(given: Arguments) -> dict[str, Any]:
    x, heads = given["x"], given["heads"]
    width = given["out_weight"].shape[1] // heads
    rows, own = x.numel() // (x.shape[-2] * x.shape[-1]), given["weight"].shape[0] > 4 * heads * width
    at = {"rows": rows, "length": x.shape[-2], "channels": x.shape[-1], "heads": heads, "width": width}
    return at | {"bias": own or given["bias"] is not None}


def _triangle_multiplication(given: Arguments) -> dict[str, Any]:
    x = given["x"]
    return {"rows": x.shape[-3], "length": x.shape[-2], "channels": x.shape[-1],
            "outputs": given["out_weight"].shape[1]}  # fmt: skip


def _transition(given: Arguments) -> dict[str, Any]:
    gated = given["up"].shape[0] > given["down"].shape[1]
    return _positions(given["x"]) | {"outputs": given["down"].shape[1], "gated": gated}


def _outer_product(given: Arguments) -> dict[str, Any]:
    a, b = given["a"], given["b"]
    return {"rows": a.shape[-2], "keys": b.shape[-2], "length": a.shape[-3], "channels": a.shape[-1],
            "outputs": given["weight"].shape[0]}  # fmt: skip


def _aligned_errors(given: Arguments) -> dict[str, Any]:
    frames, points = given["frames"], given["points"]
    rows = frames.shape[-3]
    return {"rows": rows, "length": points.shape[-2], "batches": frames.numel() // (rows * 12)}


CASES: dict[str, Callable[[Arguments], dict[str, Any]]] = {
    "attention": _attention,
    "global_attention": _global_attention,
    "gated_attention": _gated_attention,
    "layer_norm": lambda given: _positions(given["x"]),
    "norm_linear": lambda given: _positions(given["x"]) | {"outputs": given["weight"].shape[0]},
    "gate": lambda given: _positions(given["x"]),
    "tail": lambda given: _positions(given["x"]) | {"outputs": given["o"].shape[-1]},
    "transition": _transition,
    "triangle_factor": lambda given: _positions(given["y"]),
    "triangle_multiplication": _triangle_multiplication,
    "outer_product": _outer_product,
    "aligned_errors": _aligned_errors,
    "overlaps": lambda given: {"rows": 1, "length": given["atoms"].shape[-2]},
}
