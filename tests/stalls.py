"""A device that is not there: within `Stalls`, whatever would make a host wait for a GPU is noted, with its place.

Tensors on "meta" stand for those on the device.  They hold no numbers, so reading one (`item`, `tolist`, `bool`,
`numpy`, a copy to the host) is an error of torch's own; the rest is noted here: tensors made of Python's numbers on the
device and tensors of the host that go there (blocking copies, as their memory is not pinned), also as operands of
others, and shapes that depend on numbers.
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
# Of results whose shape the numbers decide, or that the host looks at.
DEPEND = {
    *("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal"),
    *("repeat_interleave", "bincount", "is_nonzero", "argwhere", "histogram", "segment_reduce", "nonzero_numpy"),
}


def _place() -> str:
    """The line of WarpFold that is running."""
    frames = [f for f in traceback.extract_stack() if f.filename.startswith(OURS)]
    return f"{Path(frames[-1].filename).relative_to(OURS)}:{frames[-1].lineno}" if frames else "autograd"


class Stalls:
    """Within it, calls that would wait are noted: `found`, each "place: what"."""

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
        out = func(*args, **(kwargs or {}))
        if func in FROM_NUMBERS and out.is_meta:
            self.found.append(f"{_place()}: {func.__name__} of numbers")
        return out


class _Operations(TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        name = func._opname.removesuffix("_")
        if any(t.is_meta for t in given):
            by_mask = name in ("index", "index_put", "_unsafe_index") and any(
                t is not None and t.dtype == torch.bool for t in args[1]
            )
            if func._opname in DEPEND or by_mask:
                if not (name == "repeat_interleave" and (kwargs or {}).get("output_size") is not None):
                    self.found.append(f"{_place()}: {name}")
            # Of one number each kernel takes a copy when it is launched.
            if any(not t.is_meta and t.dim() for t in given) or (name == "copy" and not all(t.is_meta for t in given)):
                self.found.append(f"{_place()}: {name} of a tensor of the host")
        out = func(*args, **(kwargs or {}))
        if given and not any(t.is_meta for t in given) and name in ("_to_copy", "to"):
            if any(isinstance(t, Tensor) and t.is_meta for t in tree_leaves(out)):
                self.found.append(f"{_place()}: a copy from the host")
        return out
