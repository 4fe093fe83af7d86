"""Write files in the format of torch.save, byte by byte, since the project must not pickle; some are malicious."""

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Called:
    """A call that a file requests from its reader: a function by name, with arguments."""

    module: str
    name: str
    arguments: tuple[Any, ...]


def save(path: Path, value: Any) -> Path:
    """Write containers, texts, numbers and float32 tensors in torch's current format (a zip file)."""
    tensors: list[Tensor] = []
    data = b"\x80\x02" + _written(value, tensors) + b"."
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        file.writestr("archive/data.pkl", data)
        file.writestr("archive/byteorder", b"little")
        for number, tensor in enumerate(tensors):
            file.writestr(f"archive/data/{number}", tensor.numpy().tobytes())
        file.writestr("archive/version", b"3\n")
    return path


def _written(value: Any, tensors: list[Tensor]) -> bytes:
    if isinstance(value, Called):
        named = f"c{value.module}\n{value.name}\n".encode()
        return named + _written(value.arguments, tensors) + b"R"
    if isinstance(value, Tensor):
        tensors.append(value.detach().to(torch.float32).contiguous())
        place = ("storage", _Named("torch", "FloatStorage"), str(len(tensors) - 1), "cpu", value.numel())
        size, stride = tuple(value.shape), tensors[-1].stride()
        arguments = (_Stored(place), 0, size, stride, False, Called("collections", "OrderedDict", ()))
        return _written(Called("torch._utils", "_rebuild_tensor_v2", arguments), tensors)
    if isinstance(value, _Stored):
        return _written(value.place, tensors) + b"Q"
    if isinstance(value, _Named):
        return f"c{value.module}\n{value.name}\n".encode()
    if isinstance(value, dict):
        pairs = (_written(key, tensors) + _written(one, tensors) + b"s" for key, one in value.items())
        return b"}" + b"".join(pairs)
    if isinstance(value, tuple):
        return b"(" + b"".join(_written(one, tensors) for one in value) + b"t"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        return b"J" + value.to_bytes(4, "little", signed=True)
    text = str(value).encode()
    return b"X" + len(text).to_bytes(4, "little") + text


@dataclass(frozen=True)
class _Stored:
    place: tuple[Any, ...]


@dataclass(frozen=True)
class _Named:
    module: str
    name: str
