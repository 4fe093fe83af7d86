"""A plan: how a model runs, never what it computes.  Two plans of one model differ by rounding alone."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from warpfold.batch import Batch
from warpfold.model.axial import AxialUpdate, BlockStack, Schedule, run_block
from warpfold.parallel.schedules import chunked, in_place, whole

Precision = Literal["fp32", "bf16", "fp64"]
# 345 residues on two cores: 8 rows 6.5 s, 64 rows or all 8.5 s, 4 rows 9.5 s; what stays in cache is fast.
CACHED = 2**23  # 32 MiB in fp32
RESIDENT = 2**27  # 512 MiB in fp32; not measured
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
    precision: Precision = "fp32"
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


def inference_plan(batch: Batch, precision: Precision = "fp32", chunk: int | None = None) -> Plan:
    """How to fold one example without gradients: slices in place, of a size that suits the machine, or no slices.

    chunk: rows of a slice; 0: everything at once; None: as many as keep the largest temporary, an attention's logits
    (8 heads x N x N of each row), within `CACHED` numbers on a CPU and `RESIDENT` on a GPU.
    """
    if chunk is None:
        clusters, residues = batch["msa_feat"].shape[-3:-1]
        budget = RESIDENT if batch["msa_feat"].is_cuda else CACHED
        longest = max(residues, clusters)
        chunk = max(4, budget // (8 * longest**2))
        if chunk >= max(longest, batch["extra_msa"].shape[-2]):
            chunk = 0
    return Plan(chunk=chunk or None, in_place=chunk > 0, precision=precision)


def recomputed(block: nn.Module, *args: Any) -> Any:
    """A block whose activations are computed again when their gradient is due.  Noise is keyed, so it repeats."""
    if not torch.is_grad_enabled():
        return block(*args)
    return checkpoint(block, *args, use_reentrant=False, preserve_rng_state=True)
