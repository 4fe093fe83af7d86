"""The plan: how a model runs. It never changes the results, apart from rounding."""

import logging
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from warpfold.device import unsupported_on_mps
from warpfold.ops.capabilities import capabilities
from warpfold.ops.dispatch import Kernels
from warpfold.parallel.exchange import SyncConfig
from warpfold.parallel.mesh import START_LIMIT, TIME_LIMIT

Precision = Literal["fp32", "bf16", "bf16_all", "fp16", "fp64"]
PredictionPrecision = Precision | Literal["auto"]
Recompute = Literal["block", "layer"]
Triangle = Literal["auto", "gather", "channels"]
Graph = bool | Literal["auto"]
# Elements of a slice that fits in a CPU's cache: 32 MiB in fp32. A prediction of 345 residues on two cores took 6.5 s
# with slices of 8 rows, 8.5 s with 64 or all rows, and 9.5 s with 4 rows.
CACHED = 2**23
# Cost of one collective call, as the number of bytes that could be sent meanwhile. Among 2^12 to 2^22 this value loses
# least against the better of the two ways: at most a factor of 1.15 from 64 residues on, over NVLink, InfiniBand and
# Ethernet (modelled; docs/explanation/parallel_training.md).
CALL = 2**18
# Triton recompiles a kernel for sizes that are not divisible by 16.
GPU_MULTIPLE = 16
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "bf16_all": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
log = logging.getLogger("warpfold.plan")


def resolve_precision(precision: PredictionPrecision, device: torch.device | str) -> Precision:
    """Choose the precision of predictions on a device: for "auto" bf16 on GPUs with bf16 matrix units, else fp32.

    Any other precision is returned unchanged.
    """
    if precision != "auto":
        return precision
    return "bf16" if capabilities(torch.device(device)).has_bf16 else "fp32"


def log_precision(asked: PredictionPrecision, chosen: Precision, device: torch.device | str | None) -> None:
    """Log the precision that was chosen for "auto". device: None for the workers of a cluster.

    Call it after the input was checked, so that an error message is the only line of output.
    """
    if asked != "auto":
        return
    kind = "the cluster's workers" if device is None else torch.device(device).type
    name = torch.cuda.get_device_name(device) if kind == "cuda" else kind
    log.info("precision: %s (auto, on %s)", chosen, name)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Grid of ranks and execution settings of each rank; `parallel.execution.Execution` runs it.

    data: number of examples computed at the same time, each by axial x branch ranks.
    axial: number of ranks that share an example. Each holds its shard of m and z (parallel/sharded.py).
    branch: with 2, the two halves of a block run at the same time on different ranks. Needs a model whose halves are
    independent (`evoformer.outer` "first" or "last").
    sync: how gradients are communicated (parallel/exchange.py).
    time_limit: seconds that a rank waits for other ranks. Then the run ends, and the error names the missing ranks.
    start_limit: seconds until all processes must have met at the start. The error names the missing ranks.
    triangle: "gather" gathers a factor of each triangle product, "channels" shards it by channels, and "auto" chooses
    the cheaper way.
    chunk: rows of z per slice in the layers of the trunk; slices of other tensors have as many elements. None computes
    each layer at once.
    in_place: write every slice over the corresponding part of m or z (inference only; needs `chunk`).
    recompute: save only the inputs of each "block" or "layer" in the forward pass, and recompute the rest in the
    backward pass. None saves everything.
    keep_blocks: with `recompute`, number of last blocks of the main stack that are not recomputed.
    offload: keep the trunk's saved tensors in host memory until the backward pass (CUDA only). With in_place, z is in
    host memory (for a CPU: in a temporary file), and is fetched and stored slice by slice.
    graph: record the passes and updates of training as CUDA graphs, and replay them. "auto" records unless
    `why_no_graphs` gives a reason.
    pad_to: pad residues and alignment rows to a multiple of this number, in training and prediction. None means 16 on a
    CUDA device, so that one set of compiled kernels serves all lengths, and 1 (no padding) on others (`multiple_on`).
    sizes: pad training examples so that each axis has at most this many distinct sizes (`padded_shape`). With 0, only
    `pad_to` pads.
    batch: number of examples that a rank runs through the model together, padded to the largest of them.
    precision: dtype of the trunk's activations. Parameters, norms, softmax, frames, losses and logits stay in fp32. So
    do the structure module and the heads, except for their projections in "bf16_all". With "fp16", losses are scaled
    (engine/optim.py).
    tf32: round the operands of fp32 products to TF32 on CUDA devices, for the whole process. No effect on a CPU.
    compile: run the layers' functions through torch.compile. The first step then takes minutes, and a CPU needs a C++
    compiler.
    kernels: "fast" uses the device's fast path and falls back to the definition where it does not support a call;
    "strict" raises an error instead of falling back; "definition" uses plain torch throughout.
    threads: CPU threads of one operation, for the whole process. None means torch's choice, which is all cores.
    Operations on a few thousand elements run faster on one thread.
    """

    data: int = 1
    axial: int = 1
    branch: int = 1
    triangle: Triangle = "auto"
    sync: SyncConfig = field(default_factory=SyncConfig)
    time_limit: float = TIME_LIMIT
    start_limit: float = START_LIMIT
    chunk: int | None = None
    in_place: bool = False
    recompute: Recompute | None = None
    keep_blocks: int = 0
    offload: bool = False
    graph: Graph = "auto"
    pad_to: int | None = None
    sizes: int = 0
    batch: int = 1
    precision: Precision = "fp32"
    tf32: bool = False
    compile: bool = False
    kernels: Kernels = "fast"
    threads: int | None = None

    def __post_init__(self) -> None:
        if min(self.data, self.axial, self.branch) < 1:
            raise ValueError(f"plan: data {self.data}, axial {self.axial}, branch {self.branch}: each is at least 1")
        if not self.time_limit > 0:
            raise ValueError(f"plan.time_limit is {self.time_limit}: it must be a positive number of seconds")
        if not self.start_limit > 0:
            raise ValueError(f"plan.start_limit is {self.start_limit}: it must be a positive number of seconds")
        if self.branch > 2:
            raise ValueError(f"plan.branch is {self.branch}: a block has two halves, so 1 or 2")
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"plan.chunk is {self.chunk}: at least 1 row is needed")
        if self.in_place and self.chunk is None:
            raise ValueError("plan.in_place needs plan.chunk: the number of rows that are written at a time")
        if self.recompute not in (None, *get_args(Recompute)):
            raise ValueError(f'plan.recompute is {self.recompute!r}: it must be "block", "layer" or none')
        if self.keep_blocks < 0 or (self.keep_blocks and not self.recompute):
            raise ValueError(
                f"plan.keep_blocks is {self.keep_blocks}: it must not be negative, and above 0 it needs plan.recompute"
            )
        if self.in_place and self.recompute:
            raise ValueError("plan.in_place is for inference, plan.recompute for training: choose one")
        if self.axial * self.branch > 1 and (self.recompute == "layer" or self.offload):
            other = "plan.offload" if self.offload else 'plan.recompute = "layer"'
            raise ValueError(
                f'{other} is for ranks that have an example each; with plan.axial or branch use recompute = "block"'
            )
        if self.sizes < 0 or self.batch < 1:
            raise ValueError(f"plan.sizes is {self.sizes}, plan.batch {self.batch}: they must be at least 0 and 1")
        if self.pad_to is not None and self.pad_to < 1:
            raise ValueError(f"plan.pad_to is {self.pad_to}: it must be at least 1, which pads nothing")
        if self.batch > 1 and self.axial * self.branch > 1:
            raise ValueError("plan.batch is for ranks that have an example each: set plan.axial = 1, plan.branch = 1")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"plan.threads is {self.threads}: at least 1 is needed")

    def by_channels(self, residues: int, ranks: int, channels: int, c_z: int, itemsize: int) -> bool:
        """Decide whether triangle products are sharded by channels, for this length and number of ranks p.

        Gathering moves (p - 1) / p of a factor per product and (p - 1) / p^2 of z twice, in 4 calls for a pair of
        products. Sharding by channels moves (p - 1) / p^2 of two factors and of a product each, in 6 calls. Factors and
        products have `channels` channels, z has c_z, and an element has `itemsize` bytes. Sharding by channels must
        save more than two calls cost (`CALL`). In place it is always chosen for several ranks, because a gathered
        factor is as large on every rank as on one device.
        """
        if self.triangle != "auto":
            return self.triangle == "channels"
        if self.in_place:
            return ranks > 1
        p, position = ranks, residues**2 * itemsize
        gathered = 2 * (p - 1) / p * channels + 2 * (p - 1) / p**2 * c_z
        return (gathered - 6 * (p - 1) / p**2 * channels) * position > 2 * CALL

    def multiple_on(self, device: str) -> int:
        """Return the multiple to which residues and alignment rows are padded on a kind of device."""
        return self.pad_to or (GPU_MULTIPLE if device == "cuda" else 1)

    def why_no_graphs(self, device: str) -> str | None:
        """Explain why the passes of training are not recorded as graphs on a kind of device; None if they are.

        If ranks share an example, the graph of a pass contains their collectives. Gradients are sent outside of it.
        """
        if self.graph is False:
            return "plan.graph is false"
        if device != "cuda":
            return f"a {device} has no graphs"
        if self.offload:
            return "the copies of plan.offload are not recorded"
        if self.graph == "auto" and self.axial * self.branch > 1:
            return "graphs with collectives of ranks that share an example need plan.graph = true"
        if self.graph == "auto" and not self.sizes:
            return "examples have too many shapes; plan.sizes pads them to few"
        return None

    def unsupported_on(self, device: str) -> str | None:
        """Explain why this plan cannot run on a kind of device, or return None. Only Apple's GPUs have limits."""
        requested = {
            # Metal has no fp64.
            'plan.precision = "fp64"': self.precision == "fp64",
            "plan.graph": self.graph is True,
            # The memory of Apple's GPUs is the host's.
            "plan.offload": self.offload,
            "plan.compile": self.compile,
            # Neither gloo nor NCCL accepts its tensors.
            "several ranks": self.data * self.axial * self.branch > 1,
        }
        return unsupported_on_mps(device, requested)

    def unsupported_when_frozen(self) -> str | None:
        """Explain why this plan cannot train a model with frozen parameters, or return None.

        Each branch rank computes one half of a block, and its backward pass waits for the gradient of the other half.
        A rank whose half needs no gradient never sends one, so the other rank would wait until the time limit.
        """
        if self.branch > 1:
            return (
                "plan.branch = 2 computes m and z on different ranks, and one of them could have nothing to train. Set "
                'plan.branch = 1, or train everything (finetune.trainable = ["all"], without finetune.adapters)'
            )
        return None

    def unsupported_reason(self, outer: str) -> str | None:
        """Explain why this plan cannot run a model with `evoformer.outer` = outer; None if it can."""
        if self.branch > 1 and outer == "middle":
            return (
                "plan.branch = 2 needs blocks with independent halves, but in AlphaFold2's order "
                '(model.evoformer.outer = "middle") the pair half reads the output of the MSA half. '
                'Set plan.branch = 1, or train a model with outer = "first" (as in Multimer) or "last".'
            )
        return None
