"""How much memory a plan needs, found by running the model's own code on tensors without memory.

Nothing is computed and nothing is stored: every operation says which shapes it makes, those of ours by running what
computes them (ops/cpu, or the launchers of ops/triton), and what they make is followed from its making to its release.
Of what is alike little is run: one pass, and of a training one before it, few turns of a loop over slices
(`ops.dispatch.uniform_loop`), and of a stack at most three blocks of a kind.  What the second of them keeps for the
backward pass, each of those that are left out keeps, too.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from warpfold.batch import FEATURES, Batch, stack
from warpfold.cost.example import Job, left_out
from warpfold.cost.fake import META, Memory, MemoryPiece, fake_batch, fake_mesh, uncollected
from warpfold.cost.observe import MODEL, MadeAt
from warpfold.engine.gradient import Seen, Through, gradient_by_shares, loss_of_every_output
from warpfold.engine.optim import OptimConfig, Optimizer
from warpfold.engine.packed import PackedWeights
from warpfold.engine.trainable import FinetuneConfig, freeze
from warpfold.model import confidence
from warpfold.model.alphafold import AlphaFold, ModelConfig, Output, Representations
from warpfold.model.axial import AxialUpdate, Block, BlockStack
from warpfold.model.losses import LossConfig, total_loss
from warpfold.model.soft import CLASSES, QueryPlace
from warpfold.model.structure import StructureOutput
from warpfold.ops import dispatch
from warpfold.ops.dispatch import Op
from warpfold.ops.torch_internals import in_backward
from warpfold.ops.triton.launch import unlaunched
from warpfold.parallel.execution import Execution
from warpfold.parallel.mesh import Mesh
from warpfold.parallel.plan import DTYPES, Plan
from warpfold.parallel.team import Team

PARTS = ("prepare", "update")  # of a layer, that work on a slice; the rest makes factors
# Of a model's parts, whose what they make is.
WHOSE = {
    **dict.fromkeys(("distogram", "masked_msa", "plddt", "resolved", "pae"), "heads"),
    "templates": "templates",
    "extra": "extra",
    "structure": "structure",
}


class RunPlace(NamedTuple):
    """Say where a run is: the module or phase at work, whose what it makes is, and its block of a stack, if any."""

    name: str
    owner: str
    block: tuple[str, int] | None = None
    backward: bool = False


@dataclass(frozen=True)
class StateSizes:
    """What tells m and z from others: their channels, and the least numbers that they hold."""

    c_m: int
    c_z: int
    m: int
    z: int

    def owner(self, shape: Sequence[int]) -> str:
        """Return whose a tensor is that the model makes outside of its layers."""
        numbers = torch.Size(shape).numel()
        if shape and shape[-1] == self.c_z and numbers >= self.z:
            return "z"
        return "m" if shape and shape[-1] == self.c_m and numbers >= self.m else "slices"


class Watch:
    """Say where a model is (`place`), for `Memory`; note when (`course`), and when each block was begun (`begun`)."""

    def __init__(self, model: nn.Module, sizes: StateSizes) -> None:
        self.sizes, self.phase = sizes, MODEL
        self.memory: Memory | None = None
        self.begun: dict[tuple[str, int], int] = {}
        self.backward_from: int | None = None
        self._stack: list[RunPlace] = []
        self._block: tuple[str, int] | None = None
        self._made_at = MadeAt[RunPlace]()
        for name, module in model.named_modules():
            if isinstance(module, BlockStack):
                self._watch_stack(name, module)
            elif name and "." not in name:
                self._watch(module, RunPlace(name, WHOSE.get(name, "")))

    def place(self) -> RunPlace:
        """Return where the run is now."""
        if not in_backward():
            return self._now()
        if self.backward_from is None:
            assert self.memory is not None
            self.backward_from = self.memory.moment
        place = self._stack[-1]._replace(backward=True) if self._stack else self._of_node()  # the former: again
        self._note(place)
        return place

    def enter_phase(self, name: str) -> None:
        """Be in a phase outside of the model's parts from now on: its name is whose what it makes is, too."""
        self.phase = name
        self._entered(RunPlace(name, name))

    def owner_of(self, piece: MemoryPiece) -> str:
        """Return whose a piece is: what the backward pass waits for is "kept"."""
        place: RunPlace = piece.place
        since = self.backward_from
        if (
            since is not None
            and not place.backward
            and piece.born < since
            and (piece.died is None or piece.died > since)
        ):
            return "kept"
        return place.owner or self.sizes.owner(piece.shape)

    def _now(self) -> RunPlace:
        if not self._stack:
            return RunPlace(self.phase, "" if self.phase == MODEL else self.phase)
        found = self._stack[-1]
        if self._block is not None and found.name == self._block[0]:  # between the layers of a stack's blocks
            return found._replace(block=self._block)
        return found

    def _of_node(self) -> RunPlace:
        found = self._made_at.of_current()
        if found is None:
            return RunPlace("backward", "gradients", backward=True)
        return RunPlace(f"{found.name} backward", "gradients", found.block, True)

    def _note(self, place: RunPlace) -> None:
        assert self.memory is not None
        course = self.memory.course
        if not course or course[-1][1] != place.name:
            course.append((self.memory.moment, place.name))

    def _entered(self, place: RunPlace) -> None:
        """Note that the run has come to a place, or back to it."""
        self._note(place._replace(name=f"{place.name} again") if in_backward() else place)
        if torch.is_grad_enabled():
            self._made_at.now(place)

    def _push(self, place: RunPlace) -> None:
        self._stack.append(place)
        self._entered(place)

    def _pop(self) -> None:
        self._stack.pop()
        self._entered(self._now())

    def _watch(self, module: nn.Module, place: RunPlace, label: str = "") -> None:
        """Be at a place while a module is called; label: whose its results are."""

        def leave(_module: nn.Module, _args: Any, out: Any) -> None:
            self._pop()
            if label and isinstance(out, Tensor) and self.memory and (piece := self.memory.piece_of(out)) is not None:
                piece.place = piece.place._replace(owner=label)

        module.register_forward_pre_hook(lambda *_: self._push(place))
        module.register_forward_hook(leave)

    def _watch_stack(self, name: str, stack: BlockStack) -> None:
        top = name.split(".")[0]
        self._watch(stack, RunPlace(name, WHOSE.get(top, "factors")))
        self._repeat(stack)
        for index, block in enumerate(stack.blocks):
            assert isinstance(block, Block)
            for step in block.steps:
                if not isinstance(step.layer, AxialUpdate):
                    continue
                of_m = {"extra_stack": "extra"}.get(top, "m")
                label = WHOSE.get(top) or (step.state if step.state != "m" else of_m)
                path = f"{name}.{index}.{type(step.layer).__name__}"
                within = RunPlace(path, WHOSE.get(top, "factors"), (name, index))
                self._watch(step.layer, within, label)
                for part in PARTS:
                    self._wrap(step.layer, part, within._replace(owner=WHOSE.get(top, "slices")))

    def _repeat(self, stack: BlockStack) -> None:
        """Run a stack once for each kind of arguments, where no gradient is wanted: most is called many times."""
        forward = stack.forward

        def run(*args: Any) -> Any:
            assert self.memory is not None
            return forward(*args) if torch.is_grad_enabled() else self.memory.run(stack, forward, args, {})

        stack.forward = run

    def _wrap(self, layer: AxialUpdate, part: str, place: RunPlace) -> None:
        """Be at a place while a part of a layer is called."""
        function: Callable[..., Any] | None = getattr(layer, part, None)
        if function is None:
            return

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._begin(place)
            self._push(place)
            try:
                return function(*args, **kwargs)
            finally:
                self._pop()

        setattr(layer, part, wrapped)

    def _begin(self, place: RunPlace) -> None:
        """Note when a block was begun, forward: the first of its parts."""
        if place.block is not None and place.block != self._block and not in_backward():
            assert self.memory is not None
            self._block = place.block
            self.begun[place.block] = self.memory.moment


Device = Literal["cpu", "cuda", "mps"]
UNIT = {"cpu": 1, "cuda": 512, "mps": 512}  # bytes: torch's allocator gives multiples of these; of "mps" a guess
BLOCKS = 3  # of a stack and of a kind that are run: the first, one that stands for others, the last
MOMENTS = 300  # of a course, at most
# Beside what tensors hold, as a share of them and in bytes: workspaces of torch's libraries, and what lies unused
# between tensors.  Of a GPU not measured.
MARGIN = {"cpu": (0.05, 192 << 20), "cuda": (0.05, 512 << 20), "mps": (0.05, 512 << 20)}
TRUTH = list(FEATURES)[list(FEATURES).index("copy_atom_positions") :]  # features that a prediction does not have


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """What one rank holds on its device at the peak, in bytes, and over the run.

    peak: of all tensors, weights and features included.  weights: parameters, packed copies, gradients, the optimizer's
    state.  at_peak: by owner; the peak is their sum.  course: moments of the run in order, by name of what runs, and
    what each owner holds then.  host: in host memory, where a run on another device keeps something there.
    """

    peak: int
    weights: int
    features: int
    at_peak: dict[str, int] = field(default_factory=dict)
    course: list[tuple[str, dict[str, int]]] = field(default_factory=list)
    host: int = 0
    at_least: bool = False  # it may need more (`planner.lower_bound`)


def with_margin(bytes: int, device: str = "cpu") -> int:
    """Return the bytes that must be free on a device for so many bytes of tensors."""
    share, fixed = MARGIN[kind_of(device)]
    return int(bytes * (1 + share)) + fixed


def kind_of(device: str) -> Device:
    """Return the kind of a device, "cuda:1"."""
    return "cuda" if device.startswith("cuda") else "mps" if device.startswith("mps") else "cpu"


def estimate_memory(job: Job, plan: Plan, device: str = "cpu") -> MemoryEstimate:
    """Estimate the memory of a plan's first rank during a job; others hold no more.

    device: "cpu", "cuda" or "mps".  A plan with `graph` or `compile` counts as without; what these need is not known.
    """
    kernels = "fast" if plan.kernels == "strict" else plan.kernels
    plan = replace(plan, threads=None, compile=False, graph=False, tf32=False, kernels=kernels)
    return _estimate(job, plan, kind_of(device))


def features_of(job: Job, passes: int) -> Batch:
    """Return the features of a job's example, without memory."""
    sizes = job.sizes
    axes = {"res": sizes.residues, "seq": sizes.sequences, "extra": sizes.extra, "pass": passes}
    axes |= {"tmpl": sizes.templates} if job.model.templates.enabled else {}
    axes |= {"row": sizes.sequences + sizes.extra} if job.model.multimer is not None else {}
    absent = left_out(job.model) | (set() if job.learns else set(TRUTH))
    return {name: x for name, x in fake_batch(**axes).items() if name not in absent}


@lru_cache(maxsize=4096)
def _estimate(job: Job, plan: Plan, device: Device) -> MemoryEstimate:
    """Return the estimate; nothing of it depends on what is not an argument."""
    of_weights = Plan(data=plan.data, axial=plan.axial, branch=plan.branch, batch=plan.batch, precision=plan.precision,
                      sync=plan.sync)  # fmt: skip
    weights = _weights(job.model, of_weights, job.optim, job.learns, device, job.finetune)
    everything = device == "cpu" or job.learns  # else each pass moves what it sees
    passes = job.model.ensemble * (job.recycles + 1 if everything else 1)
    features = sum(x.nbytes for x in features_of(job, passes).values()) * plan.batch
    run = _run(job, plan, device)
    always = {"weights": weights.held, "features": features}
    at_peak, course = run.timeline(always)
    if job.gradient == "all":  # one pass was run, and each keeps as much
        for held in (at_peak, *(held for _, held in course)):
            held["kept"] = held.get("kept", 0) * (job.recycles + 1)
    for name, peak in (("loading", weights.loading), ("update", weights.update)):
        moment = {"weights": weights.held, "features": features if name == "update" else 0, name: peak - weights.held}
        course.insert(0 if name == "loading" else len(course), (name, moment))
        at_peak = max(at_peak, moment, key=lambda held: sum(held.values()))
    return MemoryEstimate(
        peak=sum(at_peak.values()),
        weights=weights.held,
        features=features,
        at_peak={name: held for name, held in at_peak.items() if held},
        course=course,
        host=run.memory.host_peak + _z_in_host_memory(job, plan),
    )


def _z_in_host_memory(job: Job, plan: Plan) -> int:
    """Return the bytes of z, where a prediction keeps it there: on "meta" it has none (warpfold/host.py).

    Of an ensemble there are also a copy of what is recycled, and a sum.
    """
    if not (plan.offload and plan.in_place):
        return 0
    return min(job.model.ensemble, 3) * job.sizes.residues**2 * job.model.c_z * DTYPES[plan.precision].itemsize


@dataclass(frozen=True)
class _Weights:
    """Bytes of everything that lies on the device as long as a model does, with what loading and an update need."""

    held: int
    loading: int
    update: int

    def plus(self, other: "_Weights", factor: int) -> "_Weights":
        """Return the sum with a multiple of other weights."""
        return _Weights(*(a + factor * b for a, b in zip(vars(self).values(), vars(other).values())))


@lru_cache(maxsize=64)
def _weights(
    model: ModelConfig, plan: Plan, optim: OptimConfig | None, training: bool, device: Device, finetune: FinetuneConfig
) -> _Weights:
    """Return the bytes of the weights; the blocks of a stack have equally many, unless some alone are trained."""
    if training and finetune.freezes:
        return _weights_of(model, plan, optim, training, device, finetune)
    main, extra = model.evoformer.blocks, model.extra_blocks

    def of(blocks: int, extra_blocks: int) -> _Weights:
        short = replace(model, evoformer=replace(model.evoformer, blocks=blocks), extra_blocks=extra_blocks)
        return _weights_of(short, plan, optim, training, device)

    if main + extra <= BLOCKS:
        return of(main, extra)
    few = of(min(main, 1), min(extra, 1))
    found = few
    for more, blocks in ((main - 1, (2, min(extra, 1))), (extra - 1, (min(main, 1), 2))):
        if more > 0:
            found = found.plus(of(*blocks).plus(few, -1), more)
    return found


def _weights_of(
    model: ModelConfig,
    plan: Plan,
    optim: OptimConfig | None,
    training: bool,
    device: Device,
    finetune: FinetuneConfig | None = None,
) -> _Weights:
    """Make a model and pack its weights, take a step of the optimizer, and return what all of this holds.

    With the dense weights that adapters make, which are there until the backward pass.
    """
    with _on(device), fake_mesh(plan.data, plan.axial, plan.branch) as mesh, Memory(unit=UNIT[device]) as memory:
        made = _model(model, plan)
        if not training:
            packed = PackedWeights(made.eval(), DTYPES[plan.precision])
            return _Weights(memory.now if packed.layout else 0, memory.peak, memory.now)
        trained = freeze(made, finetune or FinetuneConfig())
        optimizer = _optimizer(made, plan, optim or OptimConfig(), mesh)
        dense = [made.get_submodule(name)._parameters["weight"] for name in trained.adapted]
        held, loading = memory.now, memory.restart()
        for _ in range(optimizer.share // plan.batch):
            optimizer.collect()
        optimizer.step(0)
        more = sum(x.nbytes for x in dense if x is not None)
        return _Weights(held + more, loading + more, memory.restart() + more)


def _model(config: ModelConfig, plan: Plan) -> AlphaFold:
    with META:
        made = AlphaFold(config)
    return made.double() if plan.precision == "fp64" else made


def _optimizer(model: AlphaFold, plan: Plan, optim: OptimConfig, mesh: Mesh) -> Optimizer:
    # Of topk the first compressed step sends most, and so needs most memory.
    compression = replace(optim.compression, start=0)
    clip = "step" if plan.batch > 1 else optim.clip
    one = replace(optim, accumulate=plan.data * plan.batch, clip=clip, compression=compression)
    scaling = plan.precision == "fp16"
    return Optimizer(model, one, mesh, plan.sync, 1, DTYPES[plan.precision], scaling, plan.batch)


@dataclass(frozen=True)
class _Run:
    """What there was in a run beside weights and features: all pieces, and where the run was."""

    memory: Memory
    watch: Watch
    stands_for: dict[tuple[str, int], int]  # of a block: how many there are like it

    def timeline(self, always: dict[str, int]) -> tuple[dict[str, int], list[tuple[str, dict[str, int]]]]:
        """Return the bytes by owner at the peak, and at the worst moment of each place in turn."""
        last = self.memory.moment + 1
        changes: dict[str, list[int]] = defaultdict(lambda: [0] * (last + 1))
        for piece in self.memory.pieces:
            if not piece.host:
                held = changes[self.watch.owner_of(piece)]
                held[piece.born] += piece.bytes
                held[last if piece.died is None else piece.died] -= piece.bytes
        for since, until, kept in self._left_out():
            changes["kept"][since] += kept
            changes["kept"][until] -= kept
        owners = {name: list(accumulate(held)) for name, held in changes.items()}
        total = [sum(at) for at in zip(*owners.values())] if owners else [0] * (last + 1)

        def at(moment: int) -> dict[str, int]:
            return always | {name: held[moment] for name, held in owners.items() if held[moment]}

        course = []
        for start, stop, name in self._places(last):
            course.append((name, at(max(range(start, stop), key=total.__getitem__))))
        return at(max(range(last), key=total.__getitem__)), course

    def _left_out(self) -> Iterator[tuple[int, int, int]]:
        """Yield from when until when blocks that are not run keep something, and how many bytes.

        From when the one that stands for them has ended until the first of what it kept is released.
        """
        since = self.watch.backward_from
        for block, count in self.stands_for.items():
            ended = self.watch.begun.get((block[0], block[1] + 1))
            if since is None or ended is None:
                continue
            kept = [
                p for p in self.memory.pieces if p.place.block == block and p.born <= ended and not p.place.backward
            ]
            kept = [p for p in kept if p.died is not None and p.died > since and not p.host]
            if kept:
                yield ended, min(p.died or 0 for p in kept), (count - 1) * sum(p.bytes for p in kept)

    def _places(self, last: int) -> Iterator[tuple[int, int, str]]:
        """Yield the moments during which the run was at each place, few enough to be drawn."""
        begun = [*self.memory.course, (last, "")]
        spans = [(start, stop, name) for (start, name), (stop, _) in pairwise(begun) if stop > start]
        together = -(-len(spans) // MOMENTS) if spans else 1
        for first in range(0, len(spans), together):
            some = spans[first : first + together]
            yield some[0][0], some[-1][1], some[0][2]


def _few_blocks(
    config: ModelConfig, plan: Plan, training: bool
) -> tuple[ModelConfig, Plan, dict[tuple[str, int], int]]:
    """Return a model of few blocks and its plan, and which block stands for how many.

    Blocks that are recomputed and blocks that are kept are two kinds.  Without a backward pass two of a stack do.
    """
    main, extra = config.evoformer.blocks, config.extra_blocks
    if not training:
        short = replace(config, evoformer=replace(config.evoformer, blocks=min(main, 2)), extra_blocks=min(extra, 2))
        return short, plan, {}
    kept = min(plan.keep_blocks, main)
    again, whole = min(main - kept, BLOCKS), min(kept, BLOCKS)
    stands_for = {}
    for stack_, first, run, all_ in (
        ("extra_stack", 0, min(extra, BLOCKS), extra),
        ("evoformer", 0, again, main - kept),
        ("evoformer", again, whole, kept),
    ):
        if all_ > run:
            stands_for[stack_, first + 1] = all_ - BLOCKS + 1
    blocks = replace(config.evoformer, blocks=again + whole)
    short = replace(config, evoformer=blocks, extra_blocks=min(extra, BLOCKS))
    return short, replace(plan, keep_blocks=whole if plan.recompute else 0), stands_for


def _run(job: Job, plan: Plan, device: Device) -> _Run:
    """Run few blocks of the model."""
    deep = replace(job.model, evoformer=replace(job.model.evoformer, blocks=max(1, job.backward_blocks)))
    config, plan, stands_for = _few_blocks(deep if job.training else job.model, plan, job.training)
    config = replace(config, ensemble=min(config.ensemble, 3))
    recycles = min(job.recycles, 1) if job.training and job.gradient != "all" else 0  # those of a fold hold as much
    with _on(device), fake_mesh(plan.data, plan.axial, plan.branch) as mesh, uncollected():
        made = _model(config, plan).train(job.learns)
        Execution(plan, mesh).bind(made)
        if job.learns:
            freeze(made, job.finetune_of_few)
        made.requires_grad_(job.gradient is None)
        packed = PackedWeights(made, DTYPES[plan.precision], trained=job.learns)
        made.noise.seed(0)
        batch = features_of(job, (recycles + 1) * config.ensemble)
        s, n, ranks = job.sizes.sequences, job.sizes.residues, plan.axial
        rows = math.ceil(n / ranks)
        watch = Watch(made, StateSizes(config.c_m, config.c_z, s * rows * config.c_m, n * rows * config.c_z))
        memory = watch.memory = Memory(unit=UNIT[device], place=watch.place, host_apart=device == "cuda")

        def call(original: Callable[..., Any], op: Op[..., Any], args: Any, kwargs: Any) -> Any:
            """Run each operation once for each kind of arguments, where no gradient is wanted."""
            if torch.is_grad_enabled():
                return original(op, *args, **kwargs)
            return memory.run(op, partial(original, op), args, kwargs)

        with memory, dispatch.observed(call), torch.set_grad_enabled(job.training):
            if job.loss is not None:
                train_on_example(made, batch, recycles, job.loss, plan.batch, watch.enter_phase)
            elif job.gradient is not None:
                gradient_of_example(made, batch, recycles, job.gradient, mesh, watch.enter_phase)
            else:
                predict_example(made, batch, recycles, watch.enter_phase)
        del packed
    return _Run(memory, watch, stands_for)


def predict_example(
    model: AlphaFold, batch: Batch, recycles: int, enter: Callable[[str], None] = lambda phase: None
) -> None:
    """Fold, and say how sure the model is, as a prediction does."""
    folded = model.fold(batch, recycles)
    enter("heads")
    judge_example(model, batch, folded.representations, folded.structure)


def gradient_of_example(
    model: AlphaFold,
    batch: Batch,
    recycles: int,
    through: Through,
    mesh: Mesh | None = None,
    enter: Callable[[str], None] = lambda phase: None,
) -> None:
    """Run the passes, a loss of all outputs and the backward pass, as a design does: a gradient by the sequence."""

    def loss(seen: Seen) -> dict[str, Tensor]:
        enter("losses")
        return loss_of_every_output(seen)

    like = model.single.weight
    shares = torch.full((len(batch["aatype"]), CLASSES), 1 / CLASSES, dtype=like.dtype, device=like.device)
    passes = batch["msa_feat"].shape[0] if model.config.multimer is None else 0
    place = QueryPlace(shares.new_ones(passes), False) if passes else None
    gradient_by_shares(model, batch, shares, loss, place, recycles, through, Team(mesh=mesh or Mesh()))


def judge_example(model: AlphaFold, batch: Batch, representations: Representations, structure: StructureOutput) -> None:
    """Compute how sure the model is of what it folded."""
    with model.computing():
        confidence.plddt(model.plddt(structure.single))
        if model.pae is not None:
            asym_id = batch["asym_id"] if model.config.multimer is not None else None
            confidence.predicted_errors(model.pae, representations.pair, model.execution, asym_id)


def train_on_example(
    model: AlphaFold,
    batch: Batch,
    recycles: int,
    loss: LossConfig,
    examples: int = 1,
    enter: Callable[[str], None] = lambda phase: None,
) -> None:
    """Run the passes, the losses of each example and the backward pass, as training does."""
    features = batch if examples == 1 else stack([batch] * examples)
    recycled, done = model.recycle(features, recycles)
    inputs = model.inputs_of_pass(features, done, recycled)
    output = model.last_pass(inputs)
    enter("losses")
    outputs: list[Output] = [output] if examples == 1 else output.unbind()
    losses = [total_loss(one, batch, loss, residues=model.residues)[0] for one in outputs]
    torch.stack(losses).sum().backward()
    enter("update")


@contextmanager
def _on(device: Device) -> Iterator[None]:
    """Run operations as that device does, on tensors without memory."""
    with dispatch.standing_for(device), unlaunched() if device == "cuda" else nullcontext():
        yield
