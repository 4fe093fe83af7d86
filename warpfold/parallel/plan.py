"""A plan: how a model runs, never what it computes.  Two plans of one model differ by rounding alone."""

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
# 345 residues on two cores: 8 rows 6.5 s, 64 rows or all 8.5 s, 4 rows 9.5 s; what stays in cache is fast.
CACHED = 2**23  # 32 MiB in fp32
# Bytes that could have moved while one more call begins.  Of 2^12 to 2^22 this loses least against the better way,
# at most 1.15 times from 64 residues on, over NVLink, InfiniBand and Ethernet (modelled:
# docs/explanation/parallel_training.md).
CALL = 2**18
# Triton compiles a kernel again for numbers that 16 does not divide (docs/explanation/kernels.md, "What is compiled").
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
    """Choose the precision of predictions on a device: for "auto" bf16 on GPUs that multiply bf16, else fp32.

    Any other precision is the user's, and is returned.
    """
    if precision != "auto":
        return precision
    return "bf16" if capabilities(torch.device(device)).has_bf16 else "fp32"


def log_precision(asked: PredictionPrecision, chosen: Precision, device: torch.device | str | None) -> None:
    """Log the precision that was chosen for "auto". device: None for that of a cluster's workers.

    Callers first check their input, since a refusal is one line.
    """
    if asked != "auto":
        return
    kind = "the cluster's workers" if device is None else torch.device(device).type
    name = torch.cuda.get_device_name(device) if kind == "cuda" else kind
    log.info("precision: %s (auto, on %s)", chosen, name)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one rank runs, and how many there are; `parallel.execution.Execution` runs it.

    data: examples that are computed at the same time, each by axial x branch ranks.
    axial: ranks that share an example, each with its shard of m and z (parallel/sharded.py).
    branch: 2: the two halves of a block run at the same time, each on its own ranks; for models whose halves are
    independent (`evoformer.outer` "first" or "last").
    sync: how gradients travel (parallel/exchange.py).
    time_limit: seconds that a rank waits for the others before it says who is missing, and the run ends.
    start_limit: seconds that the processes may take to meet at the start; the error then names the missing ranks.
    triangle: whether triangle products gather a factor or are cut by channels; "auto": by what both would cost.
    chunk: rows of z per slice in the trunk's layers, and as many numbers of m and others; None: everything at once.
    in_place: write every slice over its part of m or z (inference only; needs a chunk).
    recompute: keep only the inputs of each "block", or of each "layer", in the forward pass, and compute the rest again
    in the backward pass; None: keep everything.
    keep_blocks: with `recompute`, so many of the main stack's last blocks keep everything: as many as fit.
    offload: what the trunk keeps for the backward pass lies in host memory until then (of CUDA tensors); with in_place,
    z lies there (of a CPU: in a temporary file), and is fetched and stored slice by slice.
    graph: record the passes and updates of a training as graphs of the device, and replay them; "auto": where
    `why_no_graphs` has nothing against it.
    pad_to: pad residues and alignment rows to a multiple of so many, in training and predictions; None: 16 on a CUDA
    device, so that one set of compiled kernels serves all lengths, and 1 (no padding) on others (`multiple_on`).
    sizes: pad training examples so that each axis has at most so many sizes (`padded_shape`); 0: only as `pad_to` says.
    batch: examples that go through the model together; they are padded to the largest of them.
    precision: of the trunk's activations; parameters, norms, softmax, frames, losses and logits stay in fp32, and so do
    the structure module and the heads, which project in bf16 too in "bf16_all".  "fp16": losses are scaled
    (engine/optim.py).
    tf32: products of fp32 on CUDA devices round their operands to TF32, for the whole process; a CPU has none.
    compile: the layers' own functions by torch.compile, whatever else the plan says; the first step then takes minutes,
    and a CPU needs a C++ compiler.
    kernels: "fast": operations by the device's fast path, or by their definition where that does not support them;
    "strict": likewise, but what is not supported is an error; "definition": plain torch throughout.
    threads: of one operation on a CPU, for the whole process; None: torch's choice, all cores.  Operations on a few
    thousand numbers run faster on one.
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
            raise ValueError(f"plan.time_limit is {self.time_limit}: seconds, and must be positive")
        if not self.start_limit > 0:
            raise ValueError(f"plan.start_limit is {self.start_limit}: seconds, and must be positive")
        if self.branch > 2:
            raise ValueError(f"plan.branch is {self.branch}: a block has two halves, so 1 or 2")
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"plan.chunk is {self.chunk}: at least 1 row is needed")
        if self.in_place and self.chunk is None:
            raise ValueError("plan.in_place needs plan.chunk: how many rows to write at a time")
        if self.recompute not in (None, *get_args(Recompute)):
            raise ValueError(f'plan.recompute is {self.recompute!r}: "block", "layer", or none')
        if self.keep_blocks < 0 or (self.keep_blocks and not self.recompute):
            raise ValueError(
                f"plan.keep_blocks is {self.keep_blocks}: how many blocks keep everything where plan.recompute is set"
            )
        if self.in_place and self.recompute:
            raise ValueError("plan.in_place is for inference, plan.recompute for training: choose one")
        if self.axial * self.branch > 1 and (self.recompute == "layer" or self.offload):
            other = "plan.offload" if self.offload else 'plan.recompute = "layer"'
            raise ValueError(
                f'{other} is for ranks that have an example each; with plan.axial or branch use recompute = "block"'
            )
        if self.sizes < 0 or self.batch < 1:
            raise ValueError(f"plan.sizes is {self.sizes}, plan.batch {self.batch}: at least 0 and 1")
        if self.pad_to is not None and self.pad_to < 1:
            raise ValueError(f"plan.pad_to is {self.pad_to}: at least 1, which pads nothing")
        if self.batch > 1 and self.axial * self.branch > 1:
            raise ValueError("plan.batch is for ranks that have an example each: leave plan.axial and plan.branch at 1")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"plan.threads is {self.threads}: at least 1 is needed")

    def by_channels(self, residues: int, ranks: int, channels: int, c_z: int, itemsize: int) -> bool:
        """Return whether triangle products are cut by their channels, for this length and number of ranks.

        What a pair of products moves per rank: (p - 1) / p of a factor each and (p - 1) / p^2 of z twice, in 4 calls;
        or, cut by channels, (p - 1) / p^2 of two factors and a product each, in 6.  A factor or product has `channels`
        channels, z has c_z, each number `itemsize` bytes.  What is saved must be more than two calls cost (`CALL`).
        In place they always are, as a gathered factor is as large on every rank as on one.
        """
        if self.triangle != "auto":
            return self.triangle == "channels"
        if self.in_place:
            return ranks > 1
        p, position = ranks, residues**2 * itemsize
        gathered = 2 * (p - 1) / p * channels + 2 * (p - 1) / p**2 * c_z
        return (gathered - 6 * (p - 1) / p**2 * channels) * position > 2 * CALL

    def multiple_on(self, device: str) -> int:
        """Return the number to a multiple of which residues and alignment rows are padded on a kind of device."""
        return self.pad_to or (GPU_MULTIPLE if device == "cuda" else 1)

    def why_no_graphs(self, device: str) -> str | None:
        """Say why the passes of a training are not recorded as graphs on a kind of device; None: they are.

        Where ranks share an example the graph of a pass holds its messages; what follows it is sent outside.
        """
        if self.graph is False:
            return "plan.graph is false"
        if device != "cuda":
            return f"a {device} has no graphs"
        if self.offload:
            return "the copies of plan.offload are not recorded"
        if self.graph == "auto" and self.axial * self.branch > 1:
            return "no GPUs have run graphs that hold messages of ranks that share an example (plan.graph = true does)"
        if self.graph == "auto" and not self.sizes:
            return "examples have too many shapes; plan.sizes pads them to few"
        return None

    def unsupported_on(self, device: str) -> str | None:
        """Explain why this plan cannot run on a kind of device, or return None.  Only Apple's GPUs have limits."""
        requested = {
            'plan.precision = "fp64"': self.precision == "fp64",  # Metal has no such numbers
            "plan.graph": self.graph is True,
            "plan.offload": self.offload,  # their memory is the host's
            "plan.compile": self.compile,
            "several ranks": self.data * self.axial * self.branch > 1,  # neither gloo nor NCCL takes its tensors
        }
        return unsupported_on_mps(device, requested)

    def unsupported_when_frozen(self) -> str | None:
        """Explain why this plan cannot train a model with frozen parameters, or return None.

        Each branch rank computes one half of a block, and its backward pass waits for the gradient of the other half.
        A rank whose half needs no gradient never sends it, and the ranks wait for each other until the time limit.
        """
        if self.branch > 1:
            return (
                "plan.branch = 2 computes m and z on different ranks, of which one could have nothing to train. Set "
                'plan.branch = 1, or train everything (finetune.trainable = ["all"], without finetune.adapters)'
            )
        return None

    def unsupported_reason(self, outer: str) -> str | None:
        """Say why this plan cannot run a model whose blocks have the outer product there; None if it can."""
        if self.branch > 1 and outer == "middle":
            return (
                "plan.branch = 2 needs blocks with independent halves, but in AlphaFold2's order "
                '(model.evoformer.outer = "middle") the pair half reads what the MSA half wrote; '
                'leave plan.branch at 1, or train a model with outer = "first" (Multimer\'s) or "last"'
            )
        return None
