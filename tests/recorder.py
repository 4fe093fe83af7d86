"""Record graphs without a GPU: record the operations of a call, and replay them on the same memory.

As in a CUDA graph, values that Python computed during the recording are constants, and so are all shapes. Operations
that a graph cannot contain (the host reads a value, or a shape depends on values) raise an error.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from warpfold.device import Named, cutting, uncollected

READ = {"_local_scalar_dense", "is_nonzero", "equal"}
DEPEND = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount"}
Done = tuple[Any, tuple[Any, ...], Mapping[str, Any], list[Tensor]]


class OperationRecorder:
    """Stand-in for `device.CUDARecorder`.  The recording already executes the call, so the first replay does nothing.

    Messages to other ranks are operations, too. As NCCL requires, the messages of a recording or a replay match only
    messages of a recording or a replay.
    """

    def __init__(self) -> None:
        # Counts of the last recording.
        self.operations = self.cuts = self.messages = 0

    def warm_up(self, function: Callable[[], Named]) -> tuple[Named, bool]:
        return {name: x.clone() for name, x in function().items()}, False

    def record(self, function: Callable[[], Named]) -> tuple[Named, Callable[[], None]]:
        noted: list[Done | Callable[[], object]] = []

        def cut(action: Callable[[], object]) -> None:
            noted.append(action)
            with _disable_current_modes():
                action()

        with _Noting(noted), cutting(cut), _unnoted_waits():
            results = function()
        self.cuts, fresh = sum(map(callable, noted)), True
        self.operations = len(noted) - self.cuts
        self.messages = sum(not callable(one) and one[0].namespace == "c10d" for one in noted)

        def replay() -> None:
            nonlocal fresh
            if not fresh:
                with torch.no_grad():
                    for one in noted:
                        one() if callable(one) else _again(*one)
            fresh = False

        return results, replay


class LeftoverRecorder(OperationRecorder):
    """A recorder that raises an error if a recording leaves tensors behind, as `device.CUDARecorder` does.

    Its replays call the function again.
    """

    def record(self, function: Callable[[], Named]) -> tuple[Named, Callable[[], None]]:
        made: list[StorageWeakRef] = []
        gc.collect()
        with _Making(made), cutting(lambda action: action()), uncollected():
            results = function()
            left = sum(not held.expired() for held in made)
        if left:
            raise RuntimeError(f"{left} tensors that were made in the recording are still in use")
        again = iter([lambda: results])

        def replay() -> None:
            # A larger buffer may have replaced the buffer of the results since the recording.
            for name, x in next(again, function)().items():
                results[name].copy_(x)

        return results, replay


class _Making(TorchDispatchMode):
    """Keeps weak references to the memory that operations allocate."""

    def __init__(self, made: list[StorageWeakRef]) -> None:
        super().__init__()
        self.made = made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        storages = [x.untyped_storage() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.made.extend(StorageWeakRef(each) for each in storages if each._cdata not in given)
        return out


def _again(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], before: list[Tensor]) -> None:
    """Repeat an operation, and copy its results into the memory of the recorded results."""
    out = tree_leaves(function(*args, **kwargs))
    if function.namespace == "c10d":
        Work.unbox(out[-1]).wait()
    found = [x for x in out if isinstance(x, Tensor)]
    for old, new in zip(before, found, strict=True):
        assert old.shape == new.shape
        if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
            old.copy_(new)


@contextmanager
def _unnoted_waits() -> Iterator[None]:
    """Exclude the operations of gloo's waits from the recording, because a replay waits for each message itself.

    Some of these waits copy the received data.
    """
    wait = Work.wait

    def unnoted(work: Work, *limit: Any) -> bool:
        with _disable_current_modes():
            return wait(work, *limit)

    Work.wait = unnoted  # type: ignore[method-assign]
    try:
        yield
    finally:
        Work.wait = wait  # type: ignore[method-assign]


class _Noting(TorchDispatchMode):
    def __init__(self, noted: list[Done | Callable[[], object]]) -> None:
        super().__init__()
        self.noted = noted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        name = func._opname.removesuffix("_")
        if name in READ:
            raise RuntimeError(f"{name}: the host reads a number")
        masks = name in ("index", "index_put") and any(t is not None and t.dtype == torch.bool for t in args[1])
        if name in DEPEND or masks or (name == "repeat_interleave" and (kwargs or {}).get("output_size") is None):
            raise RuntimeError(f"{name}: a shape depends on numbers")
        out = func(*args, **(kwargs or {}))
        self.noted.append((func, args, kwargs or {}, [x for x in tree_leaves(out) if isinstance(x, Tensor)]))
        return out
