"""A plan: how a model runs, never what it computes.  Two plans of one model differ by rounding alone."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from warpfold.batch import Batch
from warpfold.errors import UserError
from warpfold.model.axial import (
    AxialUpdate,
    BlockStack,
    Branching,
    Schedule,
    after,
    in_turn,
    one_by_one,
)
from warpfold.model.residues import ALL, Resident
from warpfold.ops.dispatch import Kernels, set_kernels
from warpfold.parallel.exchange import SyncConfig
from warpfold.parallel.mesh import TIME_LIMIT, Mesh
from warpfold.parallel.schedules import chunked, in_place, whole
from warpfold.parallel.sharded import Sharding

Precision = Literal["fp32", "bf16", "fp64"]
Run = Callable[..., tuple[Any, ...]]
Triangle = Literal["auto", "gather", "channels"]
# 345 residues on two cores: 8 rows 6.5 s, 64 rows or all 8.5 s, 4 rows 9.5 s; what stays in cache is fast.
CACHED = 2**23  # 32 MiB in fp32
RESIDENT = 2**27  # 512 MiB in fp32; not measured
# Bytes that could have moved while one more call begins.  Of 2^12 to 2^22 this loses least against the better way,
# at most 1.15 times from 64 residues on, over NVLink, InfiniBand and Ethernet (docs/communication.md; modelled).
CALL = 2**18
# Of a layer: what compile takes.
PURE = ("shared", "local", "parts", "update", "add", "left", "right", "opening", "product", "finish")
SHAPES = 64  # of each that may be compiled before torch gives up, which it would only warn of
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one rank runs, and how many there are.

    data: examples that are computed at the same time, each by axial x branch ranks.
    axial: ranks that share an example, each with its slice of m and z (parallel/sharded.py).
    branch: 2: the two halves of a block run at the same time, each on its own ranks; for models whose halves are
    independent (`evoformer.outer` "first" or "last").
    sync: how gradients travel (parallel/exchange.py).
    time_limit: seconds that a rank waits for the others before it says who is missing, and the run ends.
    triangle: whether triangle products gather a factor or are cut by channels; "auto": by what both would cost.
    chunk: rows per slice in the trunk's layers; None: everything at once.
    in_place: write every slice over its part of m or z (inference only; needs a chunk).
    recompute: keep only the blocks' inputs in the forward pass, and compute the rest again in the backward pass.
    precision: of the trunk's activations; parameters, norms, softmax, frames, losses and logits stay in fp32.
    compile: the layers' own functions by torch.compile, whatever the schedule around them; the first step then takes
    minutes, and a CPU needs a C++ compiler.
    kernels: "fast": operations in the fast way there is for the device, or by their definition where that refuses;
    "strict": likewise, but a refusal is an error; "definition": plain torch throughout.  For the whole process.
    threads: of one operation on a CPU, for the whole process; None: torch's choice, all cores.  Operations on a few
    thousand numbers run faster on one (docs/decisions/0007).
    """

    data: int = 1
    axial: int = 1
    branch: int = 1
    triangle: Triangle = "auto"
    sync: SyncConfig = field(default_factory=SyncConfig)
    time_limit: float = TIME_LIMIT
    chunk: int | None = None
    in_place: bool = False
    recompute: bool = False
    precision: Precision = "fp32"
    compile: bool = False
    kernels: Kernels = "fast"
    threads: int | None = None

    def __post_init__(self) -> None:
        if min(self.data, self.axial, self.branch) < 1:
            raise ValueError(f"plan: data {self.data}, axial {self.axial}, branch {self.branch}: each is at least 1")
        if not self.time_limit > 0:
            raise ValueError(f"plan.time_limit is {self.time_limit}: seconds, more than none")
        if self.branch > 2:
            raise ValueError(f"plan.branch is {self.branch}: a block has two halves, so 1 or 2")
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"plan.chunk is {self.chunk}: at least 1 row is needed")
        if self.in_place and self.chunk is None:
            raise ValueError("plan.in_place needs plan.chunk: how many rows to write at a time")
        if self.in_place and self.recompute:
            raise ValueError("plan.in_place is for inference, plan.recompute for training: choose one")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"plan.threads is {self.threads}: at least 1 is needed")

    def by_channels(self, residues: int, ranks: int) -> bool:
        """Whether triangle products of so many residues on so many ranks are cut by channels.

        What moves in a pair of products, in sizes of z, per rank: 2 (p - 1) / p to gather a factor each and
        2 (p - 1) / p^2 to turn z between them, in 4 calls; or 6 (p - 1) / p^2 to turn two factors and a product each,
        in 6.  So channels save 2 (p - 1) (p - 2) / p^2 of z, and must save more than two calls cost (`CALL`).
        """
        if self.triangle != "auto":
            return self.triangle == "channels"
        z = residues**2 * 128 * 2  # bytes, of AlphaFold2's channels in bf16
        return (ranks - 1) * (ranks - 2) / ranks**2 * z > CALL

    def refuses(self, outer: str) -> str | None:
        """Why this plan cannot run a model whose blocks have the outer product there; None if it can."""
        if self.branch > 1 and outer == "middle":
            return (
                "plan.branch = 2 needs blocks with independent halves, but in AlphaFold2's order "
                '(model.evoformer.outer = "middle") the pair half reads what the MSA half wrote; '
                'leave plan.branch at 1, or train a model with outer = "first" (Multimer\'s) or "last"'
            )
        return None


def apply(plan: Plan, model: nn.Module, mesh: Mesh | None = None) -> nn.Module:
    """Put `plan` on a model, or on any module that holds trunk layers; a later plan replaces it.  Returns the model.

    mesh: this rank's groups, of the plan's sizes; needed where axial x branch is more than one rank.
    Errors: UserError for a plan that the model's order of layers does not allow; ValueError without a mesh.  Whatever
    error is raised while a model is being cut, the model is left with the plan of one device.
    """
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    set_kernels(plan.kernels)
    schedule: Schedule = whole
    if plan.chunk is not None:
        schedule = in_place(plan.chunk) if plan.in_place else chunked(plan.chunk)
    _on_one_device(model, schedule, recomputed if plan.recompute else one_by_one)
    _compile(model, plan.compile)
    if plan.axial * plan.branch > 1:
        with ExitStack() as unless_done:  # never half a plan: some stacks cut and others not
            unless_done.callback(_on_one_device, model, whole, one_by_one)
            _spread(plan, model, mesh)
            unless_done.pop_all()
    model.dtype = DTYPES[plan.precision]  # type: ignore[assignment]  # read where a model makes its first m and z
    if plan.precision == "fp64":
        model.double()  # a reference run: parameters too
    return model


def _on_one_device(model: nn.Module, schedule: Schedule, run: Run) -> None:
    for module in model.modules():
        if isinstance(module, AxialUpdate):
            module.schedule = schedule
        if isinstance(module, BlockStack):
            module.run = run
        if isinstance(module, Branching):
            module.branches = in_turn
        if isinstance(module, Resident):
            module.residues = ALL


def _compile(model: nn.Module, wanted: bool) -> None:
    """The functions of the layers that share something, compiled, or as they are; a transition alone gets slower."""
    if wanted:
        from torch._inductor import exc
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            if not torch.cuda.is_available():
                get_cpp_compiler()
        except exc.InvalidCxxCompiler:
            raise UserError("plan.compile on a CPU needs a C++ compiler; install g++, or leave it out") from None
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, SHAPES)
    for module in model.modules():
        if isinstance(module, AxialUpdate):
            for name in PURE:
                module.__dict__.pop(name, None)
                if wanted and module.gathers is not None and hasattr(module, name):
                    module.__dict__[name] = torch.compile(getattr(module, name), dynamic=False)


def _spread(plan: Plan, model: nn.Module, mesh: Mesh | None) -> None:
    if mesh is None or (mesh.axial.size, mesh.branch.size) != (plan.axial, plan.branch):
        raise ValueError(f"a plan of axial {plan.axial} x branch {plan.branch} needs a mesh of these sizes, not {mesh}")
    sharding = Sharding(mesh, plan.chunk, plan.in_place, plan.by_channels)
    for name, module in model.named_modules():
        if isinstance(module, BlockStack):
            run: Run = recomputed if plan.recompute else one_by_one
            sharding.lead(name, module, run)
        if isinstance(module, Resident):
            module.residues = sharding.residues
        if isinstance(module, Branching) and plan.branch > 1 and not module.independent:
            raise UserError(plan.refuses("middle") or "")


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


def recomputed(blocks: Iterable[nn.Module], states: tuple[Any, ...], masks: tuple[Any, ...]) -> tuple[Any, ...]:
    """Blocks whose activations are computed again when their gradient is due.  Noise is keyed, so it repeats."""
    if not torch.is_grad_enabled():
        return one_by_one(blocks, states, masks)
    for block in blocks:
        states = checkpoint(after, block, states, masks, use_reentrant=False, preserve_rng_state=True)
    return states
