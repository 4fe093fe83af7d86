"""Record one rank of a job under a plan on meta tensors. Memory and time are estimated from the record.

The model's own code runs on fake ranks (cost/fake.py) under a recorder (cost/recorder.py). Only a few blocks of each
stack are run, and each entry has a number of repetitions. The optimizer and the exchange of gradients are recorded
separately, and their collectives are inserted where the backward pass has the gradients. Entries have no times;
`cost/replay.py` computes them.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from warpfold.batch import LABELS, Batch
from warpfold.check.op_profile import Cost
from warpfold.cost.example import MODEL, Job, RunPhase, example_axes, left_out, run_example
from warpfold.cost.fake import fake_batch, fake_mesh
from warpfold.cost.rates import TORCH
from warpfold.cost.recorder import META, Await, Begin, Entry, MemoryPiece, Operation, Recorder
from warpfold.cost.watch import STACKS, StateSizes, Watch
from warpfold.device import uncollected
from warpfold.engine.optim import OptimConfig, Optimizer
from warpfold.engine.packed import PackedWeights, packed_order
from warpfold.engine.trainable import FinetuneConfig, freeze
from warpfold.model.alphafold import AlphaFold, ModelConfig
from warpfold.ops import dispatch
from warpfold.ops.triton.launch import unlaunched
from warpfold.parallel.exchange import Layout, SyncConfig, make_layout
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import DTYPES, Plan

Device = Literal["cpu", "cuda", "mps"]
# Granularity of torch's allocators in bytes. The value for "mps" is a guess.
UNIT = {"cpu": 1, "cuda": 512, "mps": 512}
# Blocks of each stack and kind that are run for training: the first, one that represents those left out, and the last.
BLOCKS = 3
# Blocks that are run without a backward pass. The second starts with the memory that the first has left.
FOLDED_BLOCKS = 2
# Launches of a replay: the graph's own, and copies of inputs and results, one per dtype.
REPLAY_LAUNCHES = 8
EXTRA, MAIN = STACKS


# One example


@dataclass(frozen=True)
class ExampleRecord:
    """The record of one rank that runs an example.

    early: entries of a pass without gradients. last: entries of the last pass; in training, with the losses and the
    backward pass. pieces: allocated memory, without weights and features. course: as in `Recorder`. moments: number of
    allocations and releases. host_peak: bytes in host memory. watch: the owners of the pieces, and the moments at which
    blocks began. stands_for: number of equal blocks that a block represents.
    """

    early: tuple[Entry, ...]
    last: tuple[Entry, ...]
    pieces: list[MemoryPiece]
    course: list[tuple[int, str]]
    moments: int
    host_peak: int
    watch: Watch
    stands_for: dict[tuple[str, int], int]


def record_example(job: Job, plan: Plan, device: Device, branch: int = 0, reads_trunk: bool = False) -> ExampleRecord:
    """Record one example of a job, or one batch.

    branch: 0 computes m, 1 computes z. reads_trunk: the trunk's outputs are read from a cache.
    Settings that do not change the run of a single example are removed, so that many plans share a record.
    """
    kernels = "fast" if plan.kernels == "strict" else plan.kernels
    plan = replace(plan, data=1, sync=SyncConfig(), sizes=0, threads=None, compile=False, graph=False, tf32=False,
                   kernels=kernels)  # fmt: skip
    # All passes without gradients are equal, so at most one is recorded. The last pass of a fold is one of them.
    recycles = min(job.recycles, 1) if job.training and job.gradient != "all" else 0
    return _record_example(
        replace(job, optim=None, representations=False, recycles=recycles), plan, device, branch, reads_trunk
    )


@lru_cache(maxsize=16)
def _record_example(job: Job, plan: Plan, device: Device, branch: int, reads_trunk: bool) -> ExampleRecord:
    config, few, stands_for = _few_blocks(job, plan)
    recorder = Recorder(unit=UNIT[device], host_apart=device == "cuda")
    early: list[Entry] = []
    # Garbage collection would take half of the time, because it visits all recorded tensors.
    with on_device(device, recorder), fake_mesh(1, few.axial, few.branch, branch) as mesh, uncollected():
        model = make_model(config, few.precision).train(job.learns)
        Execution(few, mesh).bind(model)
        if job.learns:
            freeze(model, job.few_block_finetune)
        elif job.training:
            model.requires_grad_(False)
        packed = PackedWeights(model, DTYPES[few.precision], trained=job.learns)
        model.noise.seed(0)
        batch = features_of(job, (job.recycles + 1) * config.ensemble)
        rows, s, n = math.ceil(job.sizes.residues / few.axial), job.sizes.sequences, job.sizes.residues
        watch = Watch(model, StateSizes(config.c_m, config.c_z, s * rows * config.c_m, n * rows * config.c_z), recorder)

        def enter(phase: RunPhase) -> None:
            """Begin a phase, and close the entries of the passes without gradients."""
            watch.enter_phase(phase)
            if phase == MODEL:
                # The last pass of a training step begins.
                early[:] = recorder.taken()
                recorder.phase = "forward"
            elif phase == "heads":
                # Only the last pass of a fold has heads.
                early[:] = recorder.entries

        recorder.phase = "early"
        with recorder, recorder.listening():
            run_example(model, batch, job, few.batch, mesh, enter, reads_trunk)
        last = recorder.taken()
        del packed
    return ExampleRecord(
        early=tuple(_scaled_to_all_blocks([] if reads_trunk else early, job, plan, config, few)),
        last=tuple(_scaled_to_all_blocks(last, job, plan, config, few)),
        pieces=recorder.pieces,
        course=recorder.course,
        moments=recorder.moment,
        host_peak=recorder.host_peak,
        watch=watch,
        stands_for=stands_for,
    )


def _few_blocks(job: Job, plan: Plan) -> tuple[ModelConfig, Plan, dict[tuple[str, int], int]]:
    """Reduce a model to few blocks; returns its settings, its plan, and the number of blocks that a block represents.

    Recomputed blocks and blocks that keep everything are different kinds. Blocks that the backward pass does not reach
    are left out.
    """
    config, main, extra = job.model, job.model.evoformer.blocks, job.model.extra_blocks
    if not job.training:
        blocks = replace(config.evoformer, blocks=min(main, FOLDED_BLOCKS))
        return replace(config, evoformer=blocks, extra_blocks=min(extra, FOLDED_BLOCKS)), plan, {}
    main = min(main, max(1, job.backward_blocks))
    kept_blocks = min(plan.keep_blocks, main)
    recomputed_run, kept_run = min(main - kept_blocks, BLOCKS), min(kept_blocks, BLOCKS)
    stands_for = {}
    for stack, first, run_blocks, all_blocks in (
        (EXTRA, 0, min(extra, BLOCKS), extra),
        (MAIN, 0, recomputed_run, main - kept_blocks),
        (MAIN, recomputed_run, kept_run, kept_blocks),
    ):
        if all_blocks > run_blocks:
            stands_for[stack, first + 1] = all_blocks - BLOCKS + 1
    blocks = replace(config.evoformer, blocks=recomputed_run + kept_run)
    few = replace(config, evoformer=blocks, extra_blocks=min(extra, BLOCKS))
    return few, replace(plan, keep_blocks=kept_run if plan.recompute else 0), stands_for


def _scaled_to_all_blocks(
    entries: Sequence[Entry], job: Job, plan: Plan, config: ModelConfig, few: Plan
) -> Iterator[Entry]:
    """Multiply the repetitions of the entries of few blocks, so that they represent all blocks."""
    main_blocks, run = job.model.evoformer.blocks, config.evoformer.blocks
    recomputed = max(0, job.backward_blocks - plan.keep_blocks)
    main = {"recomputed": (recomputed, run - few.keep_blocks), "backward": (job.backward_blocks, run)}
    for entry in entries:
        if not isinstance(entry, Await) and entry.part:
            all_blocks, run_blocks = job.model.extra_blocks, config.extra_blocks
            if entry.part == MAIN:
                all_blocks, run_blocks = main.get(entry.phase, (main_blocks, run))
            entry = replace(entry, times=entry.times * all_blocks / max(1, run_blocks))
        yield entry


def make_model(config: ModelConfig, precision: str) -> AlphaFold:
    """Create a model of meta tensors."""
    with META:
        model = AlphaFold(config)
    return model.double() if precision == "fp64" else model


def features_of(job: Job, passes: int) -> Batch:
    """Create the features of a job's example as meta tensors."""
    axes = example_axes(job.model, job.sizes, passes)
    absent = left_out(job.model) | (set() if job.learns else set(LABELS))
    return {name: x for name, x in fake_batch(**axes).items() if name not in absent}


@contextmanager
def on_device(device: Device, recorder: Recorder) -> Iterator[None]:
    """Run operations on meta tensors as this device would, and count kernels instead of launching them."""

    def count(_launch: object) -> None:
        recorder.launches += 1

    with dispatch.standing_for(device), unlaunched(count):
        yield


# The optimizer and the exchange of gradients


class SentGradient(NamedTuple):
    """A collective that begins during the backward pass.

    stack: whose gradients it needs. share: fraction of the stack's gradients that exist when it begins.
    """

    stack: str
    share: float
    begin: Begin


@dataclass(frozen=True)
class GradientExchange:
    """The exchange of an example's gradients in the backward pass, and the entries that follow it."""

    backward: list[SentGradient]
    collect: list[Entry]
    update: list[Entry]


@dataclass(frozen=True)
class OptimizerRun:
    """The record of an optimizer.

    held: bytes of the weights and the optimizer's state. loading, update: peaks during its creation and its update.
    exchanges: of one or two examples; the first represents all examples but the last.
    """

    held: int
    loading: int
    update: int
    exchanges: tuple[GradientExchange, ...] = ()


@lru_cache(maxsize=8)
def parameters_of(model: ModelConfig) -> tuple[dict[str, Tensor], set[str]]:
    """Create a model's parameters as meta tensors in the order of packing.

    Returns the parameters by name, and the names of those that stay in the bucket of the previous one. The blocks of a
    stack have equal parameters, so only one block is created.
    """
    one_block_config = replace(model, evoformer=replace(model.evoformer, blocks=min(1, model.evoformer.blocks)),
                               extra_blocks=min(1, model.extra_blocks))  # fmt: skip
    built = make_model(one_block_config, "fp32")
    named, (order, together) = dict(built.named_parameters()), packed_order(built)
    blocks = {MAIN: model.evoformer.blocks, EXTRA: model.extra_blocks}
    parameters, joined = dict[str, Tensor](), set[str]()
    for stack, group in groupby(order, part_of):
        names = list(group)
        for block in range(blocks.get(stack, 1)):
            for name in names:
                renamed = name.replace(f"{stack}.blocks.0.", f"{stack}.blocks.{block}.") if stack else name
                parameters[renamed] = named[name].detach()
                joined |= {renamed} if name in together else set()
    return parameters, joined


def part_of(name: str) -> str:
    """Return the trunk's stack to which a parameter belongs, or ""."""
    top = name.partition(".")[0]
    return top if top in STACKS else ""


@lru_cache(maxsize=256)
def record_optimizer(
    model: ModelConfig, plan: Plan, optim: OptimConfig | None, device: Device, finetune: FinetuneConfig,
    per_node: int | None = None, branch: int = 0,
) -> OptimizerRun:  # fmt: skip
    """Record the packing of a full model's weights and a step of its optimizer. optim: None for a prediction.

    Every parameter gets a gradient in the reverse order of the model, as in a backward pass.
    """
    recorder = Recorder(unit=UNIT[device])
    with on_device(device, recorder), fake_mesh(plan.data, plan.axial, plan.branch, branch) as mesh:
        ranks, dtype = mesh.world.size, DTYPES[plan.precision]
        dtype_of_weights = torch.float64 if plan.precision == "fp64" else torch.float32
        bucket_bytes = math.inf if optim is None else plan.sync.bucket_bytes(plan.data) * 4 / dtype_of_weights.itemsize
        parameters, together = parameters_of(model)
        is_whole = needs_every_parameter(optim, finetune)
        layout = make_layout(parameters, bucket_bytes, ranks, together)
        with recorder:
            module = make_model(model, plan.precision) if is_whole else _Buckets(layout, dtype_of_weights)
            # The model's own parameters, which exist until they are packed, are not padded like the buckets.
            sizes = [x.numel() * dtype_of_weights.itemsize for x in parameters.values()]
            padding_bytes = 0 if is_whole else recorder.now - sum(-(-x // recorder.unit) * recorder.unit for x in sizes)
            if optim is None:
                packed = PackedWeights(module.eval(), dtype)
                return OptimizerRun(recorder.now if packed.layout else 0, recorder.peak - padding_bytes, recorder.now)
            adapted = freeze(module, finetune).adapted if isinstance(module, AlphaFold) else ()
            sync = replace(plan.sync, strategy="plain") if plan.sync.strategy == "auto" else plan.sync
            optimizer = Optimizer(module, optim, mesh, sync, ranks_per_node=per_node, dtype=dtype,
                                  scaling=plan.precision == "fp16", batch=plan.batch,
                                  uses_graphs=plan.graph is True)  # fmt: skip
        # Adapters compute dense weights, which exist until the backward pass.
        dense = [module.get_submodule(name)._parameters["weight"] for name in adapted]
        held_bytes, loading = recorder.now, max(recorder.now, recorder.restart() - padding_bytes)
        # Each parameter's stack, and the fraction of the stack's gradients that exist when its own does.
        arrivals = dict[str, tuple[str, float]]()
        for stack, group in groupby(reversed(list(optimizer.packed.parameters if is_whole else parameters)), part_of):
            members = list(group)
            arrivals |= {name: (stack, (number + 1) / len(members)) for number, name in enumerate(members)}
        if not is_whole:
            # A bucket is complete when its first member has its gradient.
            firsts = [members[0] for members in reversed(layout.members)]
            arrivals = {f"of_forward.{number}": arrivals[name] for number, name in enumerate(firsts)}
        exchanges, batches = [], -(-optimizer.share // plan.batch)
        for number in range(batches):
            begun = _backward(recorder, optimizer, arrivals)
            with recorder, recorder.listening():
                optimizer.collect()
                collect = recorder.taken()
                recorder.phase = "update"
                if number == batches - 1:
                    optimizer.update()
                exchanges.append(GradientExchange(begun, collect, recorder.taken()))
        more = sum(x.nbytes for x in dense if x is not None)
    return OptimizerRun(held_bytes + more, loading + more, recorder.restart() + more, tuple(exchanges))


def needs_every_parameter(optim: OptimConfig | None, finetune: FinetuneConfig) -> bool:
    """Return whether a step depends on the trained layers or on the shapes of all parameters, not only on buckets."""
    return optim is not None and (finetune.freezes or optim.compression.method != "none")


class _Buckets(nn.Module):
    """A module with one parameter per bucket of a model. Packed, it has the same bytes and collectives as the model."""

    def __init__(self, layout: Layout, dtype: torch.dtype) -> None:
        super().__init__()
        sizes = [bucket.stop - bucket.start for bucket in reversed(layout.buckets)]
        self.of_forward = nn.ParameterList(nn.Parameter(torch.empty(n, dtype=dtype, device=META)) for n in sizes)


def _backward(
    recorder: Recorder, optimizer: Optimizer, arrivals: Mapping[str, tuple[str, float]]
) -> list[SentGradient]:
    """Give each parameter its gradient in reverse order; returns the collectives that begin meanwhile."""
    named, begun = optimizer.packed.parameters, list[SentGradient]()
    recorder.phase = "backward"
    # The recorder runs calls at once.
    optimizer.reducer.use_executor(recorder)

    def arrived(name: str) -> None:
        part, share = arrivals[name]
        begun.extend(SentGradient(part, share, replace(x, part=part)) for x in recorder.taken() if isinstance(x, Begin))

    handles = [p.register_post_accumulate_grad_hook(lambda _, name=name: arrived(name)) for name, p in named.items()]
    with recorder.listening():
        sums = [p.sum() for p in named.values()]
        torch.autograd.backward(sums, [torch.empty((), dtype=x.dtype, device=META) for x in sums])
    for handle in handles:
        handle.remove()
    recorder.taken()
    return begun


# A step


@dataclass(frozen=True)
class RecordedStep:
    """The entries of a rank in a step.

    early: a pass without gradients. example: the last pass and the backward pass of any example but the last.
    last: the same for the last example, whose gradients are sent. update: the end of the step.
    examples: number of examples, or batches, of the rank in a step. A fold has early passes and a last one.
    """

    early: Sequence[Entry]
    example: Sequence[Entry]
    last: Sequence[Entry]
    update: Sequence[Entry]
    examples: int = 1

    def step(self, recycles: float) -> list[Entry]:
        """Return the entries of a rank's step with a number of passes without gradients.

        All examples but the last are equal, and so are passes, so that their entries are repeated.
        """
        before = self.examples - 1
        return [
            *_times(self.early, recycles * before),
            *_times(self.example, before),
            *_times(self.early, recycles),
            *self.last,
            *self.update,
        ]


def _times(entries: Sequence[Entry], factor: float) -> Sequence[Entry]:
    if factor in (0, 1):
        return entries if factor else []
    return [entry if isinstance(entry, Await) else replace(entry, times=factor * entry.times) for entry in entries]


def record(
    job: Job, plan: Plan, examples: int = 1, per_node: int | None = None, gpu: bool = True, branch: int = 0
) -> RecordedStep:
    """Record the first rank of a plan, or of one of its branches, in a fold or a step. No rank has more work.

    examples: per data rank and step. per_node: ranks of a node, for hierarchical sums. gpu: count the kernels that a
    GPU would launch; otherwise each operation counts as a whole, as on a CPU. branch: 0 computes m, 1 computes z.
    Raises UserError as `Reducer` does.
    """
    device: Device = "cuda" if gpu else "cpu"
    batches, is_shared = -(-examples // plan.batch), plan.axial * plan.branch > 1
    run = record_example(job, plan, device, branch, job.keeps_trunk(plan))
    early, last = list(run.early), list(run.last)
    if job.optim is None:
        return RecordedStep(early, [], last, [])

    has_graphs = plan.why_no_graphs(device) is None
    optimizer = record_optimizer(
        job.model, exchange_plan(plan, has_graphs), step_share(job, plan, min(batches, 2)), device, job.finetune,
        per_node, branch,
    )  # fmt: skip
    exchanges = optimizer.exchanges
    update, collects = exchanges[-1].update, [exchange.collect for exchange in exchanges]
    if has_graphs:
        early = _replayed(early, job, plan, 2) if early else early
        last = _replayed(last, job, plan, 1)
        collects = [x.collect if is_shared or x.backward else _in_graph(x.collect) for x in exchanges]
        if plan.data == 1 and not is_shared:
            update = _replayed(update, job, plan, 0)
    entries = [[*_insert_gradient_collectives(last, x.backward), *collect] for x, collect in zip(exchanges, collects)]
    return RecordedStep(early, entries[0], entries[-1], update, batches)


def exchange_plan(plan: Plan, has_graphs: bool = False) -> Plan:
    """Reduce a plan to the keys on which the optimizer depends."""
    return Plan(data=plan.data, axial=plan.axial, branch=plan.branch, batch=plan.batch, precision=plan.precision,
                sync=plan.sync, graph=has_graphs)  # fmt: skip


def step_share(job: Job, plan: Plan, batches: int) -> OptimConfig:
    """Return the settings of an optimizer whose data ranks each have a number of batches in a step."""
    optim = job.optim or OptimConfig()
    clip = "step" if plan.batch > 1 else optim.clip
    return replace(optim, accumulate=plan.data * plan.batch * batches, clip=clip)


def _replayed(entries: Sequence[Entry], job: Job, plan: Plan, copies: int) -> list[Entry]:
    """Return the entries of a graph after the launches of its replay. copies: of z, to and from the graph."""
    z = plan.batch * job.sizes.residues**2 * job.model.c_z * DTYPES[plan.precision].itemsize / plan.axial
    phase = next(entry.phase for entry in entries if isinstance(entry, Operation))
    first = Operation(TORCH, "forward", Cost(0, 0, 2 * copies * z), torch.float32, REPLAY_LAUNCHES, phase)
    return [first, *_in_graph(entries)]


def _in_graph(entries: Sequence[Entry]) -> list[Entry]:
    return [entry if isinstance(entry, Await) else replace(entry, replayed=True) for entry in entries]


def _insert_gradient_collectives(entries: list[Entry], begun: Sequence[SentGradient]) -> list[Entry]:
    """Insert the collectives of gradients into a rank's entries of an example, where their gradients exist.

    Gradients of modules outside of the stacks come before those of the stacks (heads) or after them (embedders).
    """
    if not begun:
        return entries
    backward = [i for i, e in enumerate(entries) if not isinstance(e, Await) and e.phase in ("recomputed", "backward")]
    first = backward[0] if backward else 0
    # Consecutive entries of one stack. Waits belong to the run in which they occur.
    runs: list[tuple[str, list[Entry]]] = []
    for entry in entries[first:]:
        part = None if isinstance(entry, Await) else entry.part
        if runs and part in (None, runs[-1][0]):
            runs[-1][1].append(entry)
        else:
            runs.append((part or "", [entry]))
    # The collectives to insert into each run, with their indices.
    inserted: dict[int, list[tuple[int, Begin]]] = defaultdict(list)
    at, before = 0, ""
    for part, share, begin in begun:
        if part != before:
            # The longest later run of this stack is its backward pass.
            later = [i for i in range(at + 1, len(runs)) if runs[i][0] == part]
            at, before = max(later, key=lambda i: len(runs[i][1]), default=at), part
        inserted[at].append((math.ceil(share * len(runs[at][1])), begin))
    result = entries[:first]
    for index, (_, run) in enumerate(runs):
        # A collective begins before the entry at its position.
        placed: list[tuple[float, Entry]] = [*inserted[index], *((at + 0.5, entry) for at, entry in enumerate(run))]
        result += [entry for _, entry in sorted(placed, key=itemgetter(0))]
    return result
