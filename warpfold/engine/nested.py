"""Convert nested values to plain JSON and a list of arrays, for messages between processes and for checkpoints.

A value is None, a number, a string, bytes, a tensor, a NumPy array or scalar, or a dict, list or tuple of values.  The
JSON of a simple value is the value.  The JSON of another value is a list of its kind and its contents.
"""

import base64
import importlib
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from warpfold.errors import UserError

Leaf = Tensor | np.ndarray
DICT_TYPES = {"OrderedDict": OrderedDict, "Counter": Counter}
BITS = {1: torch.uint8, 2: torch.int16}  # by bytes, for dtypes that NumPy lacks


class Flattening:
    """Flatten values: `leaves` collects their arrays, each once even if a value has it several times.

    what: a name for errors.
    classes: allow named tuples, dataclasses and mappings of any class, which are rebuilt as such.  This requires that
        both ends run the same program.
    """

    def __init__(self, what: str, classes: bool = False) -> None:
        self.what, self.classes = what, classes
        self.leaves: list[Leaf] = []
        self.places: list[str] = []  # of each leaf, in the first value
        self._seen: dict[tuple[Any, ...], int] = {}

    def tree(self, value: Any, where: str = "") -> Any:
        """Convert a value to JSON.  where: the place of the value, for errors.  Errors: UserError for other types."""
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else ["float", repr(value)]
        if isinstance(value, Tensor):
            return ["tensor", self._tensor(value, where), str(value.dtype).removeprefix("torch.")]
        if isinstance(value, np.ndarray | np.generic):
            kind = "array" if isinstance(value, np.ndarray) else "scalar"
            return [kind, self._array(np.asarray(value), where)]
        if isinstance(value, bytes):
            return ["bytes", self._array(np.frombuffer(value, np.uint8), where)]
        if type(value) in (list, tuple, torch.Size):
            return ["list" if type(value) is list else "tuple", self._each(enumerate(value), where)]
        if type(value) in (dict, *DICT_TYPES.values()):
            pairs = [[self.tree(key, where), self.tree(item, f"{where}[{key!r}]")] for key, item in value.items()]
            return [type(value).__name__, pairs]
        if self.classes and (form := _parts(value)) is not None:
            cls = type(value)
            return ["class", f"{cls.__module__}:{cls.__qualname__}", *self._each(enumerate(form), where)]
        raise self._refused(where, f"is a {type(value).__qualname__}", "Use tensors, arrays, numbers and strings")

    def _each(self, items: Iterable[tuple[Any, Any]], where: str) -> list[Any]:
        return [self.tree(value, f"{where}[{key!r}]") for key, value in items]

    def _refused(self, where: str, wrong: str, remedy: str) -> UserError:
        return UserError(f"{self.what}{where}: {wrong}. {remedy}.")

    def _tensor(self, x: Tensor, where: str) -> int:
        if type(x) not in (Tensor, nn.Parameter, nn.Buffer):
            raise self._refused(where, f"is a {type(x).__name__}", "Use ordinary tensors (full_tensor() of a DTensor)")
        if x.layout != torch.strided or x.is_quantized or x.is_meta:
            raise self._refused(where, f"is a tensor of {x.layout} on {x.device}", "Use ordinary tensors with data")
        x = x.detach()
        key = (x.data_ptr(), x.shape, x.stride(), x.dtype, x.device)
        return self._leaf(x, key if x.numel() else (), where)

    def _array(self, x: np.ndarray, where: str) -> int:
        if x.dtype.hasobject or x.dtype.fields:
            raise self._refused(where, f"is an array of {x.dtype}", "Use arrays of numbers or strings")
        return self._leaf(
            x, (x.__array_interface__["data"][0], x.shape, x.strides, x.dtype.str) if x.size else (), where
        )

    def _leaf(self, x: Leaf, key: tuple[Any, ...], where: str) -> int:
        if key in self._seen:
            return self._seen[key]
        if key:
            self._seen[key] = len(self.leaves)
        self.leaves.append(x)
        self.places.append(where)
        return len(self.leaves) - 1


def _parts(value: Any) -> tuple[str, Any] | None:
    """Return how to call the class of a value for an equal value: "items", "names" or "mapping", and the arguments."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return "items", list(value)
    if is_dataclass(value) and not isinstance(value, type):
        return "names", {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return "mapping", dict(value)
    return None


def unflatten(
    tree: Any, tensor: Callable[[int], Tensor], array: Callable[[int], np.ndarray], classes: bool = False
) -> Any:
    """Rebuild the value from the JSON of `Flattening.tree`.

    tensor, array: return a leaf by its number.
    classes: call the classes that the JSON names.
    Errors: ValueError for other JSON.
    """

    def _value(tree: Any) -> Any:
        if not isinstance(tree, list):
            return tree
        match tree:
            case ["float", str(text)]:
                return float(text)
            case ["tensor", int(number), str(dtype)]:
                return tensor(number).view(getattr(torch, dtype))
            case ["array", int(number)]:
                return array(number)
            case ["scalar", int(number)]:
                return array(number)[()]
            case ["bytes", int(number)]:
                return array(number).tobytes()
            case ["list", list(items)]:
                return [_value(item) for item in items]
            case ["tuple", list(items)]:
                return tuple(_value(item) for item in items)
            case ["dict" | "OrderedDict" | "Counter" as kind, list(pairs)]:
                return DICT_TYPES.get(kind, dict)({_value(key): _value(item) for key, item in pairs})
            case ["class", str(name), way, arguments] if classes:
                module, _, path = name.partition(":")
                # A spawned process runs the user's script as __mp_main__.
                cls: Any = importlib.import_module("__main__" if module == "__mp_main__" else module)
                for attribute in path.split("."):
                    cls = getattr(cls, attribute)
                value = _value(arguments)
                if way == "items":
                    return cls(*value)
                return cls(**value) if way == "names" else cls(value)
        raise ValueError(f"no nested value: {str(tree)[:80]}")

    return _value(tree)


def to_arrays(leaves: Iterable[Leaf]) -> list[np.ndarray]:
    """Convert leaves in host memory to NumPy arrays; dtypes that NumPy lacks become their bits."""
    arrays = []
    for x in leaves:
        if isinstance(x, Tensor):
            lacking = x.dtype == torch.bfloat16 or (x.is_floating_point() and x.itemsize == 1)
            x = (x.view(BITS[x.itemsize]) if lacking else x).resolve_conj().resolve_neg().numpy()
        arrays.append(x)
    return arrays


def portable(value: Any, what: str) -> Any:
    """Convert a value to JSON alone, with its arrays as text, for small values that travel between ranks."""
    flattening = Flattening(what)
    tree = flattening.tree(value)
    arrays = [[x.dtype.str, x.shape, base64.b64encode(x.tobytes()).decode()] for x in to_arrays(flattening.leaves)]
    return [tree, arrays]


def from_portable(value: Any) -> Any:
    """Rebuild the value from the JSON of `portable`."""
    tree, arrays = value
    leaves = [np.frombuffer(base64.b64decode(text), dtype).reshape(shape).copy() for dtype, shape, text in arrays]
    return unflatten(tree, lambda number: torch.from_numpy(leaves[number]), leaves.__getitem__)
