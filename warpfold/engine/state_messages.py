"""Send tensors, and a `state_dict` that holds them, from one rank to all, as bytes and JSON."""

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from warpfold.parallel.exchange import Wire
from warpfold.parallel.messages import to_bytes


def as_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """Join tensors of any dtypes and shapes, of one device, as flat bytes; those of wide numbers first."""
    return torch.cat([x.contiguous().view(-1).view(torch.uint8) for x in _ordered(tensors)])


def from_bytes(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write what `as_bytes` joined into tensors of the same dtypes and shapes."""
    ordered = _ordered(tensors)
    for x, part in zip(ordered, flat.split([x.nbytes for x in ordered])):
        x.copy_(part.view(x.dtype).view(x.shape))


def _ordered(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Sort tensors by the width of their numbers, so that each begins at a multiple of its own."""
    return sorted(tensors, key=lambda x: -x.itemsize)


def broadcast_bytes(tensors: Sequence[Tensor], source: int, wire: Wire) -> None:
    """Replace tensors by those of the rank `source`; every rank has them in the same dtypes and shapes."""
    for x in tensors:
        if x.numel():
            whole = x.contiguous()
            wire.broadcast(whole.view(-1).view(torch.uint8), source).wait()
            if whole.data_ptr() != x.data_ptr():
                x.copy_(whole)


def broadcast_state(state: Any, source: int, wire: Wire, device: torch.device) -> Any:
    """Return on every rank the state_dict of rank `source`: dicts, lists and numbers, with tensors among them."""
    tensors: list[Tensor] = []
    text = to_bytes(_plain(state, tensors)).to(device)
    length = torch.tensor([len(text)], device=device)
    wire.broadcast(length, source).wait()
    if wire.group.rank != source:
        text = text.new_empty(int(length))
    wire.broadcast(text, source).wait()
    if wire.group.rank == source:
        sent = [x.to(device) for x in tensors]
        broadcast_bytes(sent, source, wire)
        return state
    arrived: list[Tensor] = []
    found = _rebuilt(json.loads(bytes(text.tolist())), arrived, device)
    broadcast_bytes(arrived, source, wire)
    return found


def _plain(value: Any, tensors: list[Tensor]) -> Any:
    """Return a value as JSON can hold it: every container with its kind, tensors as dtype and shape."""
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape)]
    if isinstance(value, dict):
        return ["dict", [[_plain(k, tensors), _plain(v, tensors)] for k, v in value.items()]]
    if isinstance(value, tuple):
        return ["tuple", [_plain(v, tensors) for v in value]]
    if isinstance(value, list):
        return ["list", [_plain(v, tensors) for v in value]]
    return ["value", value]


def _rebuilt(found: Any, tensors: list[Tensor], device: torch.device) -> Any:
    """Undo `_plain`; tensors are empty, and collected in their order."""
    kind, value = found[:2]
    if kind == "tensor":
        tensors.append(torch.empty(found[2], dtype=getattr(torch, value), device=device))
        return tensors[-1]
    if kind == "dict":
        return {_rebuilt(k, tensors, device): _rebuilt(v, tensors, device) for k, v in value}
    if kind in ("list", "tuple"):
        return (tuple if kind == "tuple" else list)(_rebuilt(v, tensors, device) for v in value)
    return value
