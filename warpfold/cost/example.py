"""Random training examples, blocks and models of any size, for measurements, profiles and records.

The values are random, and times do not depend on them. Sizes, dtypes and the code path are those of training.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from warpfold import settings
from warpfold.batch import FEATURES, Batch, stack
from warpfold.check.sizes import UNCROPPED, DataSizes
from warpfold.data.load.examples import Sample
from warpfold.engine.gradient import ModelOutputs, Through, gradient_by_shares, loss_of_every_output
from warpfold.engine.learn import DeviceResult, Learner
from warpfold.engine.optim import OptimConfig, Optimizer
from warpfold.engine.packed import PackedWeights
from warpfold.engine.trainable import BEHIND_TRUNK, AdapterConfig, FinetuneConfig, trained_parts
from warpfold.errors import UserError
from warpfold.geometry.labels import structure_labels
from warpfold.model import confidence
from warpfold.model.alphafold import AlphaFold, LastPass, ModelConfig, Output
from warpfold.model.evoformer import Evoformer, EvoformerConfig
from warpfold.model.losses import LossConfig, total_loss
from warpfold.model.soft import CLASSES, QueryPlace
from warpfold.ops.noise import Noise
from warpfold.parallel.execution import Execution
from warpfold.parallel.mesh import Mesh
from warpfold.parallel.plan import DTYPES, Plan
from warpfold.parallel.team import Team

# Sections of a settings file.
SECTIONS = ("model", "loss", "data", "optim", "plan", "train", "finetune")
# Phases of a run: the model's code outside of its layers, the heads of a prediction, losses, and the end of a step.
RunPhase = Literal["model", "heads", "losses", "update"]
MODEL: RunPhase = "model"
T = TypeVar("T")
# Angstrom between neighbouring residues.
RESIDUE_STEP = 3.8
# Unused alignment rows of a complex.
UNUSED_ROWS = 2


@dataclass(frozen=True, kw_only=True)
class ExampleSizes:
    """Sizes of an example: residues, alignment rows, rows of the extra MSA, templates."""

    residues: int
    sequences: int
    extra: int
    templates: int

    def __str__(self) -> str:
        """Format as "256 residues, 128 sequences, 1024 extra, 4 templates"."""
        return ", ".join(f"{size} {name}" for name, size in vars(self).items())


def random_example(model: ModelConfig, sizes: ExampleSizes, device: torch.device | str, passes: int = 1) -> Batch:
    """Create a random example with all labels: a monomer, or a complex of two equal chains."""
    axes = example_axes(model, sizes, passes)
    if "row" in axes:
        axes["row"] += UNUSED_ROWS
    draw = torch.Generator().manual_seed(0)
    batch: Batch = {}
    for name, feature in FEATURES.items():
        if name in left_out(model) or not {axis for axis in feature.axes if isinstance(axis, str)} <= set(axes):
            continue
        shape = [axes[axis] if isinstance(axis, str) else axis for axis in feature.axes]
        batch[name] = _drawn(name, shape, getattr(torch, feature.dtype), draw)
    batch["residue_index"] = torch.arange(sizes.residues)
    if model.multimer is not None:
        # Two equal chains
        half = sizes.residues // 2
        second = (torch.arange(sizes.residues) >= half).long()
        batch["asym_id"] = batch["sym_id"] = second + 1
        batch["entity_id"] = torch.ones_like(second)
        batch["residue_index"] -= second * half
        # Cluster centres of the alignment
        rows = torch.arange(sizes.sequences + sizes.extra).expand(passes, -1)
        batch["centre_rows"], batch["extra_rows"] = rows[:, : sizes.sequences], rows[:, sizes.sequences :]
    batch |= structure_labels(batch["aatype"], batch["all_atom_positions"], batch["all_atom_mask"])
    return {name: x.to(device) for name, x in batch.items()}


def example_axes(model: ModelConfig, sizes: ExampleSizes, passes: int) -> dict[str, int]:
    """Return the sizes of the named axes of `FEATURES` in an example."""
    axes = {"res": sizes.residues, "seq": sizes.sequences, "extra": sizes.extra, "pass": passes}
    axes |= {"tmpl": sizes.templates} if model.templates.enabled else {}
    return axes | ({"row": sizes.sequences + sizes.extra} if model.multimer is not None else {})


def left_out(model: ModelConfig) -> set[str]:
    """Return the features that this kind of model (monomer or multimer) does not read."""
    chains = {"asym_id", "entity_id", "sym_id"}
    made_in_the_model = {"msa_feat", "msa_mask", "extra_msa", "extra_has_deletion", "extra_deletion_value"}
    drawn = {"alignment", "alignment_mask", "alignment_deletions", "centre_rows", "extra_rows", "masked_msa"}
    return chains | drawn if model.multimer is None else made_in_the_model | {"extra_msa_mask"}


def _drawn(name: str, shape: list[int], dtype: torch.dtype, draw: torch.Generator) -> Tensor:
    """Draw a feature. Masks are 1, except for the masked alignment positions. Atom positions follow a random walk."""
    if name == "bert_mask":
        return (torch.rand(shape, generator=draw) < 0.15).to(dtype)
    if "mask" in name or "exist" in name or name in ("extra_has_deletion", "resolution", "use_clamped_fape"):
        return torch.ones(shape, dtype=dtype)
    if name in ("all_atom_positions", "template_all_atom_positions"):
        *_, residues, atoms, _ = shape
        walk = torch.randn(*shape[:-2], 1, 3, generator=draw)
        steps = RESIDUE_STEP * walk / walk.norm(dim=-1, keepdim=True)
        return steps.cumsum(-3) + torch.randn(residues, atoms, 3, generator=draw)
    if not dtype.is_floating_point:
        return torch.randint(20, shape, generator=draw).to(dtype)
    return torch.randn(shape, generator=draw).to(dtype)


def shortened(model: ModelConfig, blocks: int | None) -> ModelConfig:
    """Reduce a model to at most `blocks` blocks in each stack. None leaves it unchanged."""
    if blocks is None:
        return model
    return replace(
        model,
        evoformer=replace(model.evoformer, blocks=min(blocks, model.evoformer.blocks)),
        extra_blocks=min(blocks, model.extra_blocks),
        templates=replace(model.templates, blocks=min(blocks, model.templates.blocks)),
    )


@dataclass(frozen=True, kw_only=True)
class BlockSizes:
    """Sizes and settings of an Evoformer block. global_column: it is a block of the extra-MSA stack."""

    sequences: int
    residues: int
    c_m: int
    c_z: int
    config: EvoformerConfig
    global_column: bool = False

    @classmethod
    def of(cls, model: ModelConfig, sizes: ExampleSizes) -> "BlockSizes":
        """Return the sizes of the blocks of a model's main stack."""
        config = replace(model.evoformer, blocks=1)
        return cls(sequences=sizes.sequences, residues=sizes.residues, c_m=model.c_m, c_z=model.c_z, config=config)

    def __str__(self) -> str:
        return f"{self.sequences} sequences, {self.residues} residues, c_m {self.c_m}, c_z {self.c_z}"


class RandomBlock:
    """A block with inputs as in training: m and z require gradients, weights are packed, dropout is seeded."""

    def __init__(self, sizes: BlockSizes, plan: Plan, device: torch.device | str) -> None:
        self.sizes = sizes
        torch.manual_seed(0)
        self.stack = Evoformer(sizes.c_m, sizes.c_z, sizes.config, sizes.global_column).to(device)
        # Without zeros, which could be faster.
        for p in self.stack.parameters():
            torch.nn.init.normal_(p, std=0.02)
        for module in self.stack.modules():
            if isinstance(module, Noise):
                module.seed(0)
        Execution(plan).bind(self.stack)
        s, r, dtype = sizes.sequences, sizes.residues, DTYPES[plan.precision]
        self.packed = PackedWeights(self.stack, dtype, trained=True)
        self.m = torch.randn(s, r, sizes.c_m, device=device).to(dtype).requires_grad_()
        self.z = torch.randn(r, r, sizes.c_z, device=device).to(dtype).requires_grad_()
        self.masks = torch.ones(s, r, device=device), torch.ones(r, r, device=device)
        self.grads = torch.randn_like(self.m), torch.randn_like(self.z)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return m and z after the block."""
        m, z = self.stack(self.m, self.z, *self.masks)
        return m, z

    @cached_property
    def wanted(self) -> list[Tensor]:
        """Tensors whose gradients a training step computes: m, z, joined weights, and parameters outside of these."""
        # The forward pass creates the joined weights.
        with torch.enable_grad():
            self.forward()
        joined = self.packed.leaves()
        places = [(self.packed.places[id(leaf)].storage_offset(), leaf.numel()) for leaf in joined]
        alone = [
            p
            for p in self.stack.parameters()
            if not any(at <= self.packed.places[id(p)].storage_offset() < at + size for at, size in places)
        ]
        return [self.m, self.z, *joined, *alone]


@dataclass(frozen=True, kw_only=True)
class ModelBench:
    """A benchmark: the settings of a model and the sizes of its examples."""

    model: ModelConfig
    loss: LossConfig
    optim: OptimConfig
    plan: Plan
    sizes: ExampleSizes
    recycles: int = 0

    @property
    def block(self) -> BlockSizes:
        """Sizes of a block of the main stack."""
        return BlockSizes.of(self.model, self.sizes)


def data_sizes(values: Mapping[str, Any], source: str) -> DataSizes:
    """Read the sizes of training examples from settings. Raises UserError for unknown sections of the settings.

    The other settings of data are not read, and their modules are not imported, since a machine may have only torch.
    """
    for section in values:
        if section not in SECTIONS:
            raise UserError(f"{source}: {section} is not a section of the settings. Known are {', '.join(SECTIONS)}.")
    data = {key: value for key, value in values.get("data", {}).items() if key in DataSizes.__dataclass_fields__}
    return settings.build(DataSizes, data, source)


def bench_of(values: Mapping[str, Any], source: str, blocks: int | None = None) -> ModelBench:
    """Build the benchmark that settings describe, as `settings.load` returns them. blocks: limit for each stack.

    Raises UserError for wrong settings, and for settings of several processes.
    """
    sizes = data_sizes(values, source)

    def built(cls: type[T], section: str) -> T:
        keys = values.get(section, {})
        if section == "plan":
            # Keys that are left to the planner get the defaults of `Plan` here.
            keys = {} if keys == "auto" else {key: value for key, value in keys.items() if key != "auto"}
        return settings.build(cls, keys, source, f"{section}.")

    plan = replace(built(Plan, "plan"), data=1)
    if plan.axial * plan.branch > 1:
        raise UserError(
            f"{source}: plan.axial and plan.branch need several processes, but this is a single one. Set both to 1."
        )
    return ModelBench(
        model=shortened(built(ModelConfig, "model"), blocks),
        loss=built(LossConfig, "loss"),
        optim=built(OptimConfig, "optim"),
        plan=plan,
        sizes=ExampleSizes(
            residues=sizes.crop or UNCROPPED,
            sequences=sizes.max_msa,
            extra=sizes.max_extra,
            templates=sizes.max_templates,
        ),
    )


class TrainingStep:
    """A complete training step on a single example by the code of training (`Learner`).

    It includes recycling, model, losses, backward pass, clipping, optimizer and averaged weights. The example is
    already on the device. `bind` changes the plan of the step.
    """

    def __init__(self, bench: ModelBench, device: torch.device | str) -> None:
        self.recycles, self.device = bench.recycles, torch.device(device)
        torch.manual_seed(0)
        self.model = Execution(bench.plan).bind(AlphaFold(bench.model).to(device).train())
        self.model.noise.seed(0)
        optim, precision = replace(bench.optim, accumulate=1), bench.plan.precision
        optimizer = Optimizer(self.model, optim, dtype=DTYPES[precision], scaling=precision == "fp16")
        self.learner = Learner(self.model, optimizer, bench.loss, 0, Team())
        self.batch = random_example(bench.model, bench.sizes, device, (bench.recycles + 1) * bench.model.ensemble)
        self.executions: dict[Plan, Execution] = {}
        self.step = 0

    def bind(self, plan: Plan) -> Execution:
        """Use a plan from now on. The execution of an earlier `bind`, with its graphs, is reused."""
        execution = self.executions.setdefault(plan, Execution(plan))
        execution.bind(self.model)
        return execution

    def learn(self) -> DeviceResult:
        """Run the model forward and backward and collect the gradient, with new dropout each time."""
        return self.learner.learn([Sample(self.step, "random", self.batch)], self.recycles)[0]

    def update(self) -> None:
        """Apply the gradient."""
        self.learner.step(self.step)
        self.step += 1

    def __call__(self) -> None:
        self.learn()
        self.update()


@dataclass(frozen=True, kw_only=True)
class Job:
    """One example through a model: everything but plan and devices on which its memory and time depend.

    sizes: of the example as the model's input. recycles: passes before the last, at most, if recycling may stop early.
    loss, optim: for training; None for a prediction. representations: the prediction returns single, pair and msa.
    gradient: passes through which a design computes the gradient by the sequence, without training the model.
    finetune: trained parts of the model.
    """

    model: ModelConfig
    sizes: ExampleSizes
    recycles: int = 3
    loss: LossConfig | None = None
    optim: OptimConfig | None = None
    representations: bool = False
    gradient: Through | None = None
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)

    @property
    def backward_blocks(self) -> int:
        """Number of the main stack's blocks in the backward pass, from the first trained one on."""
        blocks = self.model.evoformer.blocks
        if not self.finetune.freezes:
            return blocks
        names = [name.split(".") for name in trained_parts(self.model, self.finetune).names]
        trunk_parts = [parts for parts in names if parts[0] not in (*BEHIND_TRUNK, "single")]
        if not all(parts[:2] == ["evoformer", "blocks"] for parts in trunk_parts):
            return blocks
        return blocks - min((int(parts[2]) for parts in trunk_parts), default=blocks)

    def keeps_trunk(self, plan: Plan) -> bool:
        """Whether the trunk's outputs are read from a cache instead of computed, after each draw was computed once."""
        if not self.learns or self.finetune.trunk == "computed" or plan.axial * plan.branch * plan.batch > 1:
            return False
        return trained_parts(self.model, self.finetune).why_not_cached() is None

    @property
    def few_block_finetune(self) -> FinetuneConfig:
        """Trained parts of a model of few blocks, which represent the blocks in the backward pass."""
        if not self.finetune.freezes:
            return self.finetune
        trained = trained_parts(self.model, self.finetune)
        parts: tuple[str, ...] = ("all",)
        if not trained.trunk:
            parts = tuple(dict.fromkeys(name.split(".")[0] for name in trained.names))
        elif self.backward_blocks < self.model.evoformer.blocks:
            parts = ("evoformer", "single", "structure", "heads")
        return replace(self.finetune, trainable=parts, adapters=AdapterConfig())

    @property
    def training(self) -> bool:
        """Whether there is a backward pass."""
        return self.learns or self.gradient is not None

    @property
    def learns(self) -> bool:
        """Whether the model is trained, with gradients of its weights and an optimizer."""
        return self.loss is not None


def run_example(
    model: AlphaFold,
    batch: Batch,
    job: Job,
    examples: int = 1,
    mesh: Mesh | None = None,
    enter: Callable[[RunPhase], None] = lambda phase: None,
    reads_trunk: bool = False,
) -> None:
    """Run the forward pass of a job on an example, and the backward pass if it has one.

    examples: of a batch, all equal. enter: called at the beginning of each phase. reads_trunk: see `train_on_example`.
    """
    with torch.set_grad_enabled(job.training):
        if job.loss is not None:
            train_on_example(model, batch, job.recycles, job.loss, examples, enter, reads_trunk)
        elif job.gradient is None:
            predict_example(model, batch, job.recycles, enter)
        else:
            # The gradient by the sequence that a design computes, of a loss of all outputs.
            def loss(outputs: ModelOutputs) -> dict[str, Tensor]:
                enter("losses")
                return loss_of_every_output(outputs)

            like = model.single.weight
            shares = torch.full((len(batch["aatype"]), CLASSES), 1 / CLASSES, dtype=like.dtype, device=like.device)
            place = None
            if model.config.multimer is None:
                place = QueryPlace(shares.new_ones(batch["msa_feat"].shape[0]), False)
            team = Team(mesh=mesh or Mesh())
            gradient_by_shares(model, batch, shares, loss, place, job.recycles, job.gradient, team)


def predict_example(
    model: AlphaFold, batch: Batch, recycles: int, enter: Callable[[RunPhase], None] = lambda phase: None
) -> LastPass:
    """Fold an example and compute its confidences, as a prediction does."""
    folded = model.fold(batch, recycles)
    enter("heads")
    with model.computing():
        confidence.plddt(model.plddt(folded.structure.single))
        if model.pae is not None:
            asym_id = batch["asym_id"] if model.config.multimer is not None else None
            confidence.predicted_errors(model.pae, folded.representations.pair, model.execution, asym_id)
    return folded


def train_on_example(
    model: AlphaFold,
    batch: Batch,
    recycles: int,
    loss: LossConfig,
    examples: int = 1,
    enter: Callable[[RunPhase], None] = lambda phase: None,
    reads_trunk: bool = False,
) -> None:
    """Run the passes, the losses of each example and the backward pass, as training does.

    reads_trunk: the trunk's outputs exist when the last pass begins.
    """
    features = batch if examples == 1 else stack([batch] * examples)
    recycled, done = model.recycle(features, recycles)
    enter(MODEL)
    inputs = model.inputs_of_pass(features, done, recycled)
    if reads_trunk:
        with torch.no_grad():
            inputs |= model.trunk_pass(inputs)
        enter(MODEL)
    output = model.last_pass(inputs)
    enter("losses")
    outputs: list[Output] = [output] if examples == 1 else output.unbind()
    losses = [total_loss(example_output, batch, loss, residues=model.residues)[0] for example_output in outputs]
    torch.stack(losses).sum().backward()
    enter("update")
