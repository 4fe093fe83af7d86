"""Simulate an Apple GPU: within `mac()`, "mps" is a device whose tensors are in host memory.

The simulation raises the errors of torch's MPS backend: for 64-bit floats, for operations without an MPS function in
`native_functions.yaml` (which torch ships), for operands on two devices, for NumPy arrays of MPS tensors, and for
pinned memory. The CPU computes everything else, so values are correct and timings are meaningless. The simulation does
not show the rounding or the bugs of a real device.
"""

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torchgen
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

MPS, CPU = torch.device("mps", 0), torch.device("cpu")
TABLE = "ATen/native/native_functions.yaml"
ANY_DEVICE = {"CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional", "MPS"}
FROM_NUMBERS: tuple[Callable[..., Any], ...] = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)
# Operations that accept operands on two devices.
TAKES_TWO = {"copy_", "_to_copy", "set_"}


@cache
def table() -> Mapping[str, tuple[str, frozenset[str]]]:
    """Parse torch's table of operations.

    Each value holds the operation that the key delegates to, or "", and the backends that implement it.
    """
    found = {}
    text = Path(torchgen.__file__).with_name("packaged").joinpath(TABLE).read_text(encoding="utf-8")
    for entry in re.split(r"(?m)^- func: ", text)[1:]:
        delegate = re.search(r"(?m)^  structured_delegate: (\S+)", entry)
        dispatch = re.search(r"(?m)^  dispatch:\n((?:    .*\n)+)", entry)
        keys = re.findall(r"(?m)^    ([\w, ]+):", dispatch[1]) if dispatch else []
        found[entry.partition("(")[0]] = delegate[1] if delegate else "", frozenset(", ".join(keys).split(", ")) - {""}
    return found


@cache
def is_served(name: str) -> bool:
    """Return whether MPS supports an operation.  name: with its overload.

    Operations that are not in the table are composed of others and count as supported.
    """
    delegate, keys = table().get(name, ("", frozenset()))
    return is_served(delegate) if delegate else not keys or bool(keys & ANY_DEVICE)


class Mac(threading.local):
    """The simulated device: its memory, and where the current torch call of this thread creates tensors."""

    # All instances share this table, because cached constants outlive an instance.
    _memory: ClassVar[dict[int, StorageWeakRef]] = {}

    def __init__(self) -> None:
        self.asked: list[str | None] = [None]  # None: not specified

    def has(self, x: Any) -> bool:
        if not isinstance(x, Tensor) or x.layout != torch.strided:
            return False
        held = self._memory.get(x.untyped_storage()._cdata)
        return held is not None and not held.expired()

    def take(self, x: Any) -> Any:
        """Mark a result as a tensor on the device.  Raises torch's TypeError for a dtype that MPS does not support."""
        if isinstance(x, Tensor):
            if x.dtype in (torch.float64, torch.complex128):
                raise TypeError(
                    f"Cannot convert a MPS Tensor to {x.dtype} dtype as the MPS framework doesn't support it"
                )
            storage = x.untyped_storage()
            self._memory[storage._cdata] = StorageWeakRef(storage)
        return x


class _Operations(TorchDispatchMode):
    """Dispatch mode that intercepts every operation, including those of the backward pass and of C++ code."""

    def __init__(self, mac: Mac) -> None:
        super().__init__()
        self.mac = mac

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs, mac = dict(kwargs or {}), self.mac
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        there = [t for t in given if mac.has(t)]
        asked = mac.asked[-1]
        to = kwargs.get("device")
        if to is not None and torch.device(to).type == "mps":
            lies_there, kwargs["device"] = True, CPU
        elif to is not None and (asked == "cpu" or torch.device(to).type != "cpu"):
            lies_there = False
        else:
            lies_there = bool(there) or (not given and asked == "mps")
        name, op = func._schema.name.removeprefix("aten::"), func._opname
        if kwargs.get("pin_memory") and lies_there:
            raise RuntimeError("pinned memory is not for mps")
        if there or lies_there:
            overload = func._schema.overload_name
            if func.namespace != "aten":
                raise NotImplementedError(f"{func.namespace}::{name} was written for another device")
            if not is_served(f"{name}.{overload}" if overload else name):
                raise NotImplementedError(
                    f"The operator 'aten::{name}' is not currently implemented for the MPS device"
                )
            elsewhere = [t for t in given if not mac.has(t) and t.dim() and t.device.type == "cpu"]
            if there and elsewhere and op not in TAKES_TWO:
                shapes = [(tuple(t.shape), mac.has(t)) for t in given]
                raise RuntimeError(f"{name}: expected all tensors to be on the same device: {shapes}")
        found = func(*args, **kwargs)
        return tree_map(mac.take, found) if lies_there else found


class _Functions(TorchFunctionMode):
    """Function mode that records the requested device of new tensors.

    The dispatcher cannot tell a requested device from the default.
    """

    def __init__(self, mac: Mac) -> None:
        super().__init__()
        self.mac = mac

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs, mac = dict(kwargs or {}), self.mac
        there = any(mac.has(t) for t in tree_leaves((args, kwargs)))
        if func in (Tensor.numpy, Tensor.__array__) and there and not kwargs.get("force"):
            raise TypeError("can't convert mps:0 device type tensor to numpy. Use Tensor.cpu() to copy it first")
        if func is Tensor.cpu or (func is Tensor.numpy and there):
            return _to(mac, args[0], CPU) if func is Tensor.cpu else _to(mac, args[0].detach(), CPU).numpy()
        # torch's own `to` would do nothing, because it considers every tensor to be on the host.
        if func is Tensor.to:
            return _move(mac, *args, **kwargs)
        if func is Tensor.backward:
            return self._backward(*args, **kwargs)
        if func is Tensor.pin_memory and there:
            raise RuntimeError("cannot pin 'torch.mps.FloatTensor' only dense CPU tensors can be pinned")
        to = kwargs.get("device")
        # These functions need a device guard, which a simulated device lacks.
        if func in FROM_NUMBERS:
            new = func is Tensor.new_tensor
            lies_there = torch.device(to).type == "mps" if to is not None else new and there
            kwargs |= {"device": CPU} if lies_there or new else {}
            found = func(*args, **kwargs)
            return _to(mac, found, MPS) if lies_there else found
        mac.asked.append(torch.device(to).type if to is not None else "mps" if there else "cpu")
        try:
            return func(*args, **kwargs)
        finally:
            mac.asked.pop()

    def _backward(self, loss: Tensor, gradient: Tensor | None = None, **kwargs: Any) -> None:
        """Run the backward pass in this mode, because it calls Python code that creates tensors."""
        self.mac.asked.append("mps" if self.mac.has(loss) else "cpu")
        try:
            with self:
                torch.autograd.backward(loss, gradient, **kwargs)
        finally:
            self.mac.asked.pop()


def _to(mac: Mac, x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device or to the host, unless it is already there."""
    if mac.has(x) == (device.type == "mps"):
        return x
    mac.asked.append(device.type)
    try:
        return torch.ops.aten._to_copy.default(x, device=device)
    finally:
        mac.asked.pop()


def _move(mac: Mac, x: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
    """Implement `Tensor.to`, including copies between the host and the device."""
    if args and isinstance(args[0], Tensor):
        device, dtype = args[0].device, args[0].dtype
    else:
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
    if not mac.has(x) and (device is None or device.type != "mps"):
        return x.to(*args, copy=copy, **kwargs)
    x = x.clone() if copy else x
    if dtype is not None and dtype != x.dtype:
        if device is not None and device.type == "cpu":
            x = _to(mac, x, CPU)
        elif dtype in (torch.float64, torch.complex128):
            raise TypeError(f"Cannot convert a MPS Tensor to {dtype} dtype as the MPS framework doesn't support it")
        mac.asked.append("mps" if mac.has(x) else "cpu")
        try:
            x = torch.ops.aten._to_copy.default(x, dtype=dtype)
        finally:
            mac.asked.pop()
    return x if device is None else _to(mac, x, device)


@contextmanager
def mac(free: int = 8 * 2**30) -> Iterator[Mac]:
    """Simulate a Mac within the context.  free: GPU memory in bytes."""
    device, real, alone = Mac(), Tensor.device, threading.Thread.run

    def where(x: Tensor) -> torch.device:
        return MPS if device.has(x) else real.__get__(x)  # type: ignore[attr-defined]

    def run(thread: threading.Thread) -> None:
        with _Functions(device), _Operations(device):
            alone(thread)

    with pytest.MonkeyPatch.context() as patch, _Functions(device), _Operations(device):
        patch.setattr(Tensor, "device", property(where), raising=False)
        patch.setattr(Tensor, "is_mps", property(device.has), raising=False)
        patch.setattr(Tensor, "is_cpu", property(lambda x: where(x).type == "cpu"), raising=False)
        patch.setattr(threading.Thread, "run", run)
        patch.setattr(torch.backends.mps, "is_built", lambda: True)
        patch.setattr(torch.backends.mps, "is_available", lambda: True)
        for name, value in {
            "synchronize": None, "empty_cache": None, "recommended_max_memory": free, "driver_allocated_memory": 2**20,
            "current_allocated_memory": 2**19, "device_count": 1,
        }.items():  # fmt: skip
            patch.setattr(torch.mps, name, lambda value=value: value)
        yield device
