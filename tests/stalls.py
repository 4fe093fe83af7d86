"""Find host synchronisations without a GPU: `Stalls` records every call that would wait for a GPU, with its line.

Tensors on "meta" represent device tensors. Reads of them (`item`, `bool`, `tolist`, `numpy`, a copy to the host) are
recorded and return ones. `Stalls` also records tensors that are created on the device from Python numbers, host
tensors that are copied to the device or used as operands there (such copies block, because the memory is not pinned),
and results whose shape depends on values.
"""

import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OURS = str(Path(__file__).parents[1] / "warpfold")
FROM_NUMBERS: tuple[Callable[..., Any], ...] = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)
DEPEND = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal", "bincount"}


def _place() -> str:
    """Return the line of WarpFold that is running."""
    frames = [f for f in traceback.extract_stack() if f.filename.startswith(OURS)]
    return f"{Path(frames[-1].filename).relative_to(OURS)}:{frames[-1].lineno}" if frames else "autograd"


class Stalls:
    """Context that records calls that would wait.  found: one entry "file:line: problem" for each."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._modes = (_Functions(self.found), _Operations(self.found))

    def __enter__(self) -> "Stalls":
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


class _Functions(TorchFunctionMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # torch's own `tolist` reads memory directly, without an operation.
        if func is Tensor.tolist and args[0].is_meta:
            return args[0].cpu().tolist()
        out = func(*args, **(kwargs or {}))
        if func in FROM_NUMBERS and out.is_meta and not isinstance(args[func is Tensor.new_tensor], Tensor):
            self.found.append(f"{_place()}: {func.__name__} of numbers")
        return out


class _Operations(TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        there = [t for t in given if t.is_meta]
        name = func._opname.removesuffix("_")
        if there and name == "_local_scalar_dense":
            self.found.append(f"{_place()}: a number is read")
            return True if there[0].dtype == torch.bool else 1
        if there and name == "_to_copy" and torch.device(kwargs.get("device") or "meta").type == "cpu":
            self.found.append(f"{_place()}: a tensor is read")
            return torch.ones(there[0].shape, dtype=kwargs.get("dtype") or there[0].dtype)
        if there and _depends(name, args, kwargs):
            self.found.append(f"{_place()}: {name}")
        if there and name == "copy" and not args[0].is_meta and (kwargs.get("non_blocking") or args[2:] == (True,)):
            self.found.append(f"{_place()}: a copy to the host begins")
            return args[0].fill_(1)
        # A kernel takes a scalar of the host as a launch argument, so scalars do not wait.
        if there and any(not t.is_meta and t.dim() for t in given):
            self.found.append(f"{_place()}: {name} with a tensor of the host")
        if name == "_to_copy" and not there and torch.device(kwargs.get("device") or "cpu").type == "meta":
            self.found.append(f"{_place()}: a copy from the host")
        return func(*args, **kwargs)


def _depends(name: str, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation reads the values of its operands."""
    if name in ("index", "index_put", "_unsafe_index"):
        return any(t is not None and t.dtype == torch.bool for t in args[1])
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name == "segment_reduce":
        return not kwargs.get("unsafe")
    return name in DEPEND
