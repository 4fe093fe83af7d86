"""Run layers of other packages in slices, of the size that the caller chose or that fits into the free memory.

The memory of a layer in slices of some rows is recorded by running a copy of the layer on meta tensors, once for each
shape (cost/recorder.py).
"""

import copy
from contextlib import nullcontext
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from warpfold.adapt.adapter import Adapter
from warpfold.cost.recorder import Recorder
from warpfold.memory import memory_in_use
from warpfold.model.axial import PLAIN, AxialUpdate, PlainExecution
from warpfold.ops.dispatch import Kernels, standing_for
from warpfold.ops.triton.launch import unlaunched
from warpfold.parallel.slices import cut_axes, layer_in_slices, longest_axis

# Bytes. torch's allocator gives multiples of these.
UNIT = {"cpu": 1, "cuda": 512}
# Factor on the memory of tensors, for workspaces of torch's libraries.
ROOM = 1.05


class SlicedExecution(PlainExecution):
    """Compute the update of a layer at once, or in slices of as many rows as the caller chose or as fit.

    limit: bytes of the device that may be in use during a call, including other tensors; None: no limit. With a limit,
    a layer saves only its inputs for the backward pass and is recomputed there.
    twin: the same layer on the meta device (`meta_twin`), required with a limit.
    """

    def __init__(
        self, kernels: Kernels | None = None, limit: int | None = None, twin: AxialUpdate | None = None
    ) -> None:
        self.kernels, self.limit, self.twin = kernels, limit, twin
        self._needs: dict[Any, int] = {}

    def __deepcopy__(self, memo: object) -> "SlicedExecution":
        """Return the same object, so that copies of a layer share it."""
        return self

    def layer(
        self,
        layer: AxialUpdate,
        x: Tensor,
        mask: Tensor,
        other: Tensor | None = None,
        residual: bool = True,
        rows: int | None = None,
    ) -> Tensor:
        """Compute x plus the layer's update, or the update alone. rows: of a slice, if the caller chose one."""
        if self.limit is not None and self.twin is not None:
            rows = self.rows_that_fit(x, mask, other, residual, rows)
            if torch.is_grad_enabled():
                args = (layer, x, mask, other, residual, rows)
                return cast(Tensor, checkpoint(_run, *args, use_reentrant=False, preserve_rng_state=False))
        return _run(layer, x, mask, other, residual, rows)

    # Not compiled, since it reads how much memory is in use now.
    @torch.compiler.disable
    def rows_that_fit(
        self, x: Tensor, mask: Tensor, other: Tensor | None, residual: bool, rows: int | None
    ) -> int | None:
        """Compute how many rows of x to compute together, at most `rows`. None: all."""
        assert self.limit is not None
        assert self.twin is not None
        free = self.limit - memory_in_use(x.device)
        count = x.shape[cut_axes(self.twin, longest_axis(x))[0]]
        while ROOM * self.needed(x, mask, other, residual, rows) > free and (rows is None or rows > 1):
            rows = max(1, min(count, rows or count) // 2)
        return rows

    def needed(self, x: Tensor, mask: Tensor, other: Tensor | None, residual: bool, rows: int | None) -> int:
        """Compute the peak bytes of a call, including the backward pass if gradients are enabled."""
        layouts = (None if t is None else (t.shape, t.stride(), t.dtype) for t in (x, mask, other))
        key = (*layouts, residual, rows, x.device.type, torch.is_grad_enabled())
        if key not in self._needs:
            assert self.twin is not None
            self._needs[key] = _record_peak(self.twin, x, mask, other, residual, rows)
        return self._needs[key]


def meta_twin(adapter: Adapter, module: nn.Module) -> AxialUpdate | None:
    """Build a module's layer on the meta device; None for a layer that cannot be sliced."""
    layer = adapter.build(copy.deepcopy(module).to("meta"))
    return layer if isinstance(layer, AxialUpdate) else None


def _run(layer: AxialUpdate, x: Tensor, mask: Tensor, other: Tensor | None, residual: bool, rows: int | None) -> Tensor:
    """Compute x plus the layer's update, or the update alone, at once or in slices."""
    # The recomputation in the backward pass may run in another thread, so it selects the kernels again.
    with layer.computing():
        if rows is None or x.dim() < 2:
            return PLAIN.layer(layer, x, mask, other, residual)
        free_axis = longest_axis(x)
        axis = cut_axes(layer, free_axis)[0]
        if rows >= x.shape[axis]:
            return PLAIN.layer(layer, x, mask, other, residual)
        elements, recompute = rows * max(1, x.numel() // max(1, x.shape[axis])), torch.is_grad_enabled()
        return layer_in_slices(
            layer, x, mask, other, elements, residual=residual, free_axis=free_axis, recompute=recompute
        )


def _record_peak(
    twin: AxialUpdate, x: Tensor, mask: Tensor, other: Tensor | None, residual: bool, rows: int | None
) -> int:
    """Run a layer on meta tensors like the arguments, and return the peak bytes."""
    kind = cast(Literal["cpu", "cuda"], x.device.type)

    def empty(t: Tensor | None) -> Any:
        if t is None:
            return None
        twin_tensor = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
        return twin_tensor.requires_grad_(t.is_floating_point() and torch.is_grad_enabled())

    x, mask, other = map(empty, (x, mask, other))
    with standing_for(kind), unlaunched() if kind == "cuda" else nullcontext(), Recorder(unit=UNIT[kind]) as memory:
        update = _run(twin, x, mask, other, residual, rows)
        if update.requires_grad:
            inputs = [t for t in (x, other) if t is not None]
            torch.autograd.grad(update, inputs, torch.empty_like(update), allow_unused=True)
    return memory.peak
