"""A plan: how a model runs, never what it computes.  Two plans of one model differ by rounding alone."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from warpfold.model.axial import AxialUpdate, BlockStack, Schedule, run_block
from warpfold.parallel.schedules import chunked, in_place, whole

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One device's plan.

    chunk: rows per slice in the trunk's layers; None: everything at once.
    in_place: write every slice over its part of m or z (inference only; needs a chunk).
    recompute: keep only the blocks' inputs in the forward pass, and compute the rest again in the backward pass.
    precision: of the trunk's activations; parameters, norms, softmax, frames, losses and logits stay in fp32.
    threads: of one operation on a CPU, for the whole process; None: torch's choice, all cores.  Operations on a few
    thousand numbers run faster on one (docs/decisions/0007).
    """

    chunk: int | None = None
    in_place: bool = False
    recompute: bool = False
    precision: Literal["fp32", "bf16", "fp64"] = "fp32"
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"plan.chunk is {self.chunk}: at least 1 row is needed")
        if self.in_place and self.chunk is None:
            raise ValueError("plan.in_place needs plan.chunk: how many rows to write at a time")
        if self.in_place and self.recompute:
            raise ValueError("plan.in_place is for inference, plan.recompute for training: choose one")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"plan.threads is {self.threads}: at least 1 is needed")


def apply(plan: Plan, model: nn.Module) -> nn.Module:
    """Put `plan` on a model, or on any module that holds trunk layers; a later plan replaces it.  Returns the model."""
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    schedule: Schedule = whole
    if plan.chunk is not None:
        schedule = in_place(plan.chunk) if plan.in_place else chunked(plan.chunk)
    for module in model.modules():
        if isinstance(module, AxialUpdate):
            module.schedule = schedule
        if isinstance(module, BlockStack):
            module.run_block = recomputed if plan.recompute else run_block
    model.dtype = DTYPES[plan.precision]  # type: ignore[assignment]  # read where a model makes its first m and z
    if plan.precision == "fp64":
        model.double()  # a reference run: parameters too
    return model


def recomputed(block: nn.Module, *args: Any) -> Any:
    """A block whose activations are computed again when their gradient is due.  Noise is keyed, so it repeats."""
    if not torch.is_grad_enabled():
        return block(*args)
    return checkpoint(block, *args, use_reentrant=False, preserve_rng_state=True)
