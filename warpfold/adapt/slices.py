"""Layers of other people's models in slices: as their caller chose, or so that they fit into the memory that is left.

The memory of a layer in slices of some rows is recorded (cost/recorder.py): a copy of the layer without memory is run
once for each shape.
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

UNIT = {"cpu": 1, "cuda": 512}  # bytes: torch's allocator gives multiples of these
ROOM = 1.05  # of what tensors need, for workspaces of torch's libraries


class SlicedExecution(PlainExecution):
    """Compute the update of a layer at once, or in slices of rows: as many as the caller chose, or as fit.

    limit: bytes of the device that a call may fill, all that is in use there included; None: no limit.  With a limit a
    layer keeps its inputs alone for the backward pass, and is computed again there.
    twin: the same layer without memory (`on_meta`); needed with a limit.
    """

    def __init__(
        self, kernels: Kernels | None = None, limit: int | None = None, twin: AxialUpdate | None = None
    ) -> None:
        self.kernels, self.limit, self.twin = kernels, limit, twin
        self._needs: dict[Any, int] = {}

    def __deepcopy__(self, memo: object) -> "SlicedExecution":
        """Return the same: a copy of a layer runs as the original does."""
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
        """Return x with the layer's update, or the update alone; rows: of a slice, where the caller chose."""
        if self.limit is not None and self.twin is not None:
            rows = self.rows_that_fit(x, mask, other, residual, rows)
            if torch.is_grad_enabled():
                args = (layer, x, mask, other, residual, rows)
                return cast(Tensor, checkpoint(_run, *args, use_reentrant=False, preserve_rng_state=False))
        return _run(layer, x, mask, other, residual, rows)

    @torch.compiler.disable  # it asks how much memory is in use now
    def rows_that_fit(
        self, x: Tensor, mask: Tensor, other: Tensor | None, residual: bool, rows: int | None
    ) -> int | None:
        """Return how many rows of x to compute together, at most as many as given; None: all of them, at once."""
        assert self.limit is not None
        assert self.twin is not None
        left = self.limit - memory_in_use(x.device)
        count = x.shape[cut_axes(self.twin, longest_axis(x))[0]]
        while ROOM * self.needed(x, mask, other, residual, rows) > left and (rows is None or rows > 1):
            rows = max(1, min(count, rows or count) // 2)
        return rows

    def needed(self, x: Tensor, mask: Tensor, other: Tensor | None, residual: bool, rows: int | None) -> int:
        """Return the bytes that a call takes at its peak, backward pass included where gradients are on."""
        like = (None if t is None else (t.shape, t.stride(), t.dtype) for t in (x, mask, other))
        key = (*like, residual, rows, x.device.type, torch.is_grad_enabled())
        if key not in self._needs:
            assert self.twin is not None
            self._needs[key] = _needed(self.twin, x, mask, other, residual, rows)
        return self._needs[key]


def on_meta(adapter: Adapter, module: nn.Module) -> AxialUpdate | None:
    """Return a layer like that of a module, without memory; None for a layer that cannot be cut."""
    layer = adapter.build(copy.deepcopy(module).to("meta"))
    return layer if isinstance(layer, AxialUpdate) else None


def _run(layer: AxialUpdate, x: Tensor, mask: Tensor, other: Tensor | None, residual: bool, rows: int | None) -> Tensor:
    """Return x with the layer's update, or the update alone, at once or in slices."""
    with layer.computing():  # also where it is computed again, perhaps by another thread
        if rows is None or x.dim() < 2:
            return PLAIN.layer(layer, x, mask, other, residual)
        anywhere = longest_axis(x)
        axis = cut_axes(layer, anywhere)[0]
        if rows >= x.shape[axis]:
            return PLAIN.layer(layer, x, mask, other, residual)
        most = rows * max(1, x.numel() // max(1, x.shape[axis]))
        return layer_in_slices(
            layer, x, mask, other, most, residual=residual, anywhere=anywhere, recompute=torch.is_grad_enabled()
        )


def _needed(twin: AxialUpdate, x: Tensor, mask: Tensor, other: Tensor | None, residual: bool, rows: int | None) -> int:
    """Run a layer without memory on tensors without memory, like those given, and return the bytes at the peak."""
    kind = cast(Literal["cpu", "cuda"], x.device.type)

    def empty(t: Tensor | None) -> Any:
        if t is None:
            return None
        made = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
        return made.requires_grad_(t.is_floating_point() and torch.is_grad_enabled())

    x, mask, other = map(empty, (x, mask, other))
    with standing_for(kind), unlaunched() if kind == "cuda" else nullcontext(), Recorder(unit=UNIT[kind]) as memory:
        update = _run(twin, x, mask, other, residual, rows)
        if update.requires_grad:
            wanted = [t for t in (x, other) if t is not None]
            torch.autograd.grad(update, wanted, torch.empty_like(update), allow_unused=True)
    return memory.peak
