"""A training step of any model as one call: mixed precision, and on a GPU the passes as one recorded graph."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from warpfold.device import Graphs
from warpfold.engine.flat import Flat
from warpfold.errors import UserError

Loss = Callable[[Any], Tensor]


class OneStep:
    """Call it with a batch: it computes the loss and its gradient, lets the optimizer step, and returns the loss.

    On a CPU, and with Replicas, these are the plain calls.  On a GPU the first batch of each shape runs so, and the
    next one is recorded as a CUDA graph and replayed from then on: the host then launches one thing.  The recorded code
    must read no number on the host (no .item(), no print of a loss), and randomness must be torch's own.

    graphs: what was recorded, and why not.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Flat,
        loss: Loss | None = None,
        *,
        dtype: torch.dtype | None = None,
        graph: bool = True,
    ) -> None:
        """Make the step of a model.

        loss: a function of a batch that returns the loss; None: the model itself.  dtype: torch.bfloat16 computes what
        `torch.autocast` deems safe in it.  graph: record on a GPU.  A batch is a tensor, or tuples, lists and dicts of
        tensors and of plain values.
        Errors: UserError for fp16, which wants a loss scale.
        """
        if dtype not in (None, torch.bfloat16):
            raise UserError(
                f"OneStep: dtype = {dtype}; choose torch.bfloat16 or None, or write the loop with torch.autocast and "
                "torch.amp.GradScaler, which work with Flat"
            )
        self.model, self.optimizer, self.loss, self.dtype, self.graph = model, optimizer, loss or model, dtype, graph
        self.graphs = Graphs()
        self._functions: dict[Hashable, _Passes] = {}

    def __call__(self, batch: Any) -> Tensor:
        """Take a step; return the loss of before it, on the device, without a graph.

        Errors: UserError where the passes cannot be recorded.
        """
        leaves, form = tree_flatten(batch)
        tensors = {str(i): x for i, x in enumerate(leaves) if isinstance(x, Tensor)}
        values = tuple(None if isinstance(x, Tensor) else x for x in leaves)
        memory = tuple(b.weights.data_ptr() for b in self.optimizer.buffers)  # other after parameters were added
        shapes = tuple((x.shape, x.dtype, x.device) for x in tensors.values())
        key = (str(form), values, memory, shapes, self.model.training)
        passes = self._functions.setdefault(key, _Passes(self, values, form))
        reason = None if self.graph else "graph = False"
        if self.optimizer.reducer is not None:
            reason = "ranks exchange gradients during the backward pass"
        self.optimizer.zero_grad()
        passes.called = False
        try:
            loss = self.graphs.call(passes, tensors, key, reason)["loss"]
        except UserError as error:
            raise UserError(f"OneStep: the passes cannot be recorded ({error.__cause__}); pass graph=False") from error
        if not passes.called:
            passes.show_gradients()
        self.optimizer.step()
        return loss


class _Passes:
    """The forward and backward pass for batches of one form, as a function of tensors."""

    def __init__(self, step: OneStep, values: tuple[Any, ...], form: Any) -> None:
        self.step, self.values, self.form = step, values, form
        self.called, self.__name__ = False, "the passes"
        self._present: list[list[bool]] = []

    def __call__(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute the loss, and leave its gradient in the optimizer's buffers."""
        batch = tree_unflatten([tensors.get(str(i), value) for i, value in enumerate(self.values)], self.form)
        device = next(self.step.model.parameters()).device.type
        with torch.autocast(device, self.step.dtype or torch.bfloat16, enabled=self.step.dtype is not None):
            loss = self.step.loss(batch)
        loss.backward()
        if self.step.optimizer.reducer is None:  # which puts them there itself
            self._present = [buffer.gather(everything=True) for buffer in self.step.optimizer.buffers]
        self.called = True
        return {"loss": loss.detach()}

    def show_gradients(self) -> None:
        """Have p.grad be what a replay has written."""
        for buffer, present in zip(self.step.optimizer.buffers, self._present):
            for (name, p), is_present in zip(buffer.parameters.items(), present):
                p.grad = buffer.gradients[name] if is_present else None
