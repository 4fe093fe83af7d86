"""Every plan gives the results of one device, in fp64, over ranks that really exchange their slices.

For a model with all losses and with dropout, each rank compares the outputs (its slices of them), the loss and its
terms, and the gradients of the inputs and of all parameters. Five steps of training are compared, too.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.helpers import as_multimer, filled_model, random_batch, random_complex, tiny_config
from tests.ranks import run_ranks
from warpfold.batch import Batch
from warpfold.engine.optim import OptimConfig, Optimizer
from warpfold.engine.trainable import AdapterConfig, FinetuneConfig, freeze, merged_state
from warpfold.geometry.labels import structure_labels
from warpfold.model import losses
from warpfold.model.alphafold import AlphaFold, HeadsConfig, Output
from warpfold.model.evoformer import EvoformerConfig, PairConfig
from warpfold.model.layers import AdaptedLinear
from warpfold.model.losses import LossConfig, total_loss
from warpfold.ops.noise import Noise
from warpfold.parallel import collectives, sharded
from warpfold.parallel.collectives import local_shard
from warpfold.parallel.exchange import SyncConfig
from warpfold.parallel.execution import Execution
from warpfold.parallel.mesh import Group, Mesh, make_mesh
from warpfold.parallel.plan import Plan

# Relative error in fp64, for rounding only
LIMIT = 1e-10
# Some gradients are exactly zero (such as that of a bias inside a softmax), except for the rounding of sums of large
# numbers. Errors are therefore relative to at least this fraction of the largest gradient.
FLOOR = 1e-6
LOSSES = LossConfig(violation=1.0, experimentally_resolved=0.01, predicted_aligned_error=0.1)
COMPLEX_LOSSES = replace(LOSSES, center_of_mass=1.0, fape_softening=0.0, average_clashes=True, every_clash=True)
INPUTS = ("msa_feat", "target_feat", "extra_deletion_value", "template_all_atom_positions")
CUT = {"msa": -2, "pair": -3, "msa_first_row": -2, "distogram_logits": -3, "masked_msa_logits": -2, "pae_logits": -3}
Named = dict[str, Tensor]


@dataclass(frozen=True)
class Work:
    """The computation: the order of the model's layers, the size of the example, and the number of passes."""

    outer: str = "middle"
    residues: int = 9
    sequences: int = 5
    extra: int = 6
    templates: int | None = 2  # None: a model without templates
    recycles: int = 0
    ensemble: int = 1
    padded: int = 0  # at the end of the residues, the alignments and the templates
    fused: bool = False  # one projection for both factors of a triangle product
    template_blocks: int = 1
    chains: tuple[int, ...] = ()  # chain lengths of a complex, for a multimer
    tolerance: float | None = None  # of recycling during a fold, in angstrom


@cache
def example(work: Work, index: int) -> Batch:
    """Return random features and labels in fp64; each index gives another example."""
    n, passes = work.residues, (work.recycles + 1) * work.ensemble
    g = torch.Generator().manual_seed(100 + index)
    size = work.sequences, work.extra, work.templates or 0, passes, index
    batch = random_complex(work.chains, sum(size[:2]) + 2, *size) if work.chains else random_batch(n, *size)
    batch["all_atom_positions"] = 4 * torch.randn(n, 37, 3, generator=g) + 1.5 * torch.arange(n)[:, None, None]
    batch["all_atom_mask"] = batch["atom37_atom_exists"] * (torch.rand(n, 37, generator=g) > 0.1)
    batch["resolution"], batch["use_clamped_fape"] = torch.tensor(2.0), torch.tensor(1.0)
    if work.padded:
        for name in ("seq_mask", "all_atom_mask", "atom37_atom_exists", "atom14_atom_exists"):
            batch[name][-work.padded :] = 0
        for name in {"msa_mask", "bert_mask", "extra_msa_mask", "alignment_mask"} & batch.keys():
            batch[name][..., -work.padded :] = batch[name][..., -1:, :] = 0
        batch["template_mask"][-1:] = 0
    # The prediction decides which copy is compared with which truth.
    if work.chains:
        positions, mask = batch.pop("all_atom_positions"), batch.pop("all_atom_mask")
        batch["copy_atom_positions"] = torch.stack([positions, 4 * torch.randn(n, 37, 3, generator=g) - positions])
        batch["copy_atom_mask"] = torch.stack([mask, mask.flip(0)])
    else:
        batch |= structure_labels(batch["aatype"], batch["all_atom_positions"], batch["all_atom_mask"])
    return {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}


def model_for(work: Work) -> AlphaFold:
    """Return the tiny model that `work` describes."""
    pair = PairConfig(c_triangle=7, fused=work.fused)
    base = tiny_config().templates
    config = tiny_config(
        evoformer=EvoformerConfig(blocks=2, heads=4, c_outer=6, outer=work.outer, pair=pair),
        extra_blocks=2 if work.outer == "first" else 1,  # with "first", the last m is unused
        templates=replace(base, enabled=work.templates is not None, blocks=work.template_blocks),
        ensemble=work.ensemble,
        recycle_tolerance=work.tolerance,
        heads=HeadsConfig(plddt_c=8, pae=True),
    )
    return filled_model(as_multimer(config, work.fused) if work.chains else config)


def outputs_of(output: Output) -> Named:
    """Return the tensors of an output by name."""
    named = {f.name: getattr(output, f.name) for f in fields(output) if f.name not in ("structure", "recycles")}
    named["recycles"], s = torch.tensor(float(output.recycles)), output.structure
    named |= {"atoms": s.final_atom37, "angles": s.angles, "traj": s.traj, "structure": s.single}
    return {name: x.detach() for name, x in named.items()}


def backward(model: AlphaFold, work: Work, index: int, leaves: bool = True) -> tuple[Named, Named, Named]:
    """Return the outputs, and this rank's part of the losses and of the inputs' gradients.

    The gradients of the parameters stay in the model.
    leaves: whether the inputs need gradients, which extends the backward pass through the whole trunk.
    """
    model.noise.seed(7, index)
    dtype = next(model.parameters()).dtype
    batch = {name: x.to(dtype) if x.is_floating_point() else x for name, x in example(work, index).items()}
    inputs = {name: batch[name].detach().clone().requires_grad_(leaves) for name in INPUTS if name in batch}
    output = model(batch | inputs, work.recycles)
    weights = replace(LOSSES, center_of_mass=float("asym_id" in batch))
    loss, terms = total_loss(output, batch, weights, residues=model.residues)
    loss.backward()
    return outputs_of(output), {"loss": loss.detach(), **terms}, {k: grad_of(x) for k, x in inputs.items()}


def grad_of(x: Tensor) -> Tensor:
    """Return the gradient, which is 0 for a tensor that is not part of this rank's graph."""
    return torch.zeros_like(x) if x.grad is None else x.grad


@dataclass(frozen=True)
class Answer:
    """The results of one rank; losses and gradients are sums over the ranks that share an example."""

    outputs: Named
    losses: Named
    inputs: Named  # gradients
    parameters: Named  # gradients, the mean over the examples


def answer(work: Work, plan: Plan, mesh: Mesh) -> Answer:
    """Run one example of each data rank forward and backward."""
    model = Execution(plan, mesh).bind(model_for(work)).train()
    outputs, terms, inputs = backward(model, work, mesh.data.rank)
    parameters = {name: grad_of(p) for name, p in model.named_parameters()}
    for x in [*terms.values(), *inputs.values(), *parameters.values()]:
        if mesh.model.size > 1:
            dist.all_reduce(x, group=mesh.model.handle)
    for x in parameters.values():
        if mesh.data.size > 1:
            dist.all_reduce(x.div_(mesh.data.size), group=mesh.data.handle)
    return Answer(outputs, terms, inputs, parameters)


@cache
def on_one_device(work: Work, examples: int) -> list[Answer]:
    """Run the same examples on one device; each answer contains the mean gradient of the parameters."""
    answers = []
    for index in range(examples):
        alone = Mesh(data=replace(Mesh().data, rank=index))
        answers.append(answer(work, Plan(precision="fp64"), alone))
    mean = {k: sum(a.parameters[k] for a in answers) / examples for k in answers[0].parameters}
    return [replace(a, parameters=mean) for a in answers]


def errors(found: Answer, expected: Answer, mesh: Mesh) -> dict[str, float]:
    """Return relative errors; an output that is sharded is compared with this rank's slice of the expected one."""
    worst = {}
    for kind, there in vars(expected).items():
        here = getattr(found, kind)
        assert here.keys() == there.keys()
        largest = max((float(x.norm()) for x in there.values()), default=0.0)
        for name, whole in there.items():
            x = local_shard(whole, CUT[name], mesh.axial) if kind == "outputs" and name in CUT else whole
            assert here[name].shape == x.shape, name
            scale = max(float(whole.norm()), FLOOR * largest)
            worst[f"{kind} {name}"] = float((here[name] - x).norm()) / scale
    return worst


def above(found: list[dict[str, float]], limit: float = LIMIT) -> dict[str, float]:
    """Return the largest errors over all ranks that are not below the limit (which includes NaN)."""
    worst = {name: max((rank[name] for rank in found), key=lambda e: (e != e, e)) for name in found[0]}
    return {name: error for name, error in worst.items() if not error < limit}


def on_ranks(plan: Plan, function: Callable[[Mesh], dict[str, float]]) -> list[dict[str, float]]:
    """Run `function` on every rank of a plan."""
    sizes = plan.data, plan.axial, plan.branch
    return run_ranks(lambda: function(make_mesh(*sizes)), math.prod(sizes), timeout=200)


def compare(work: Work, plan: Plan) -> list[dict[str, float]]:
    """Return the errors of `plan` on each of its ranks."""
    expected = on_one_device(work, plan.data)
    return on_ranks(
        plan, lambda mesh: errors(answer(work, replace(plan, precision="fp64"), mesh), expected[mesh.data.rank], mesh)
    )


def case(work: Work, slow: bool = False, **plan) -> object:
    says = [f"{k}{'' if v is True else v}" for k, v in plan.items()]
    marks = [pytest.mark.slow] if slow else []
    return pytest.param(work, Plan(**plan), id="-".join([NAMES[work], *says]), marks=marks)


AF2 = Work(recycles=1)
FIRST = Work("first", residues=10, templates=None, ensemble=2)
LAST = Work("last", residues=7, templates=1, padded=2, fused=True, template_blocks=2)
# All sizes are smaller than the number of ranks.
FEW = Work(residues=3, sequences=2, extra=1, templates=0, recycles=1)
FEW_FIRST = Work("first", residues=3, sequences=1, extra=2, templates=2, padded=1)
AVERAGED = Work(residues=8, sequences=4, extra=3, ensemble=2, recycles=1, padded=1)
COMPLEX = Work("first", residues=11, sequences=4, extra=3, recycles=1, fused=True, chains=(4, 3, 4))
PADDED = Work("first", residues=5, sequences=3, extra=1, templates=1, ensemble=2, padded=1, chains=(2, 3))
# This fold stops after two passes: the first changes distances by 3.3. A third of the rows alone would change by at
# most 2.4, so that a rank which compares only its own rows would stop too early.
STOPPED = replace(COMPLEX, recycles=3, tolerance=2.8)
NAMES = {AF2: "af2", FIRST: "first", LAST: "last", FEW: "few", FEW_FIRST: "few first", AVERAGED: "averaged"}
NAMES |= {COMPLEX: "complex", PADDED: "padded complex", STOPPED: "stopped complex"}
CASES = [
    case(AF2, axial=2),
    case(AF2, axial=4, triangle="gather", chunk=2),
    case(AF2, data=2, recompute="block", chunk=3),
    case(FIRST, branch=2, chunk=4),
    case(FIRST, axial=3, triangle="gather", recompute="block", chunk=3),
    case(FIRST, data=2, axial=2, recompute="block", keep_blocks=1),
    case(LAST, branch=2, recompute="block"),
    case(LAST, axial=2, branch=2, triangle="gather", recompute="block", chunk=1),
    case(LAST, axial=3, triangle="channels", chunk=2),
    case(FEW, axial=2, triangle="channels", chunk=2),
    case(FEW, axial=4, triangle="channels", recompute="block"),
    case(FEW_FIRST, axial=4, triangle="gather", chunk=1),
    case(FEW_FIRST, axial=2, branch=2, triangle="channels", recompute="block"),
    case(AVERAGED, axial=2, triangle="channels", recompute="block"),
    case(AVERAGED, data=2, axial=2, triangle="gather", chunk=2, recompute="block"),
    case(COMPLEX, axial=2, triangle="gather", recompute="block", chunk=2),
    case(COMPLEX, axial=3, triangle="channels"),
    case(COMPLEX, branch=2, chunk=4),
    case(PADDED, axial=4, triangle="gather"),
    case(PADDED, True, axial=2, branch=2, triangle="channels", chunk=1),
    case(COMPLEX, True, axial=4, chunk=3),
    case(FIRST, True, data=2, axial=2, branch=2, triangle="channels", recompute="block", chunk=3),
    case(LAST, True, data=2, branch=2),
    case(LAST, True, axial=4, branch=2, recompute="block", chunk=1),
    case(FEW, True, data=2, axial=4, recompute="block", chunk=1),
]


@pytest.mark.parametrize(("work", "plan"), CASES)
def test_a_plan_computes_what_one_device_computes(work: Work, plan: Plan) -> None:
    assert above(compare(work, plan)) == {}


@pytest.mark.parametrize(
    ("work", "plan"),
    [
        case(AF2, axial=2, triangle="gather", chunk=4, in_place=True),
        case(AVERAGED, axial=3, triangle="channels", chunk=2, in_place=True),
        case(FIRST, axial=2, branch=2, chunk=3, in_place=True),
        case(LAST, branch=2, chunk=1, in_place=True),
        case(FEW, axial=4, triangle="gather", chunk=2, in_place=True),
        case(COMPLEX, axial=2, chunk=3, in_place=True),
        case(STOPPED, axial=3, chunk=2, in_place=True),
    ],
)
def test_folding_in_place_does_too(work: Work, plan: Plan) -> None:
    @torch.no_grad()
    def folded(plan: Plan, mesh: Mesh) -> Answer:
        model = Execution(replace(plan, precision="fp64"), mesh).bind(model_for(work))
        return Answer(outputs_of(model(example(work, 0), work.recycles)), {}, {}, {})

    expected = folded(Plan(), Mesh())
    assert above(on_ranks(plan, lambda mesh: errors(folded(plan, mesh), expected, mesh))) == {}


# Partial training

PARTS = {
    "adapters": FinetuneConfig(trainable=(), adapters=AdapterConfig(on=("*",), rank=2, scale=0.5)),
    "structure": FinetuneConfig(trainable=("structure",)),
    "last block": FinetuneConfig(trainable=("evoformer.blocks.1", "plddt")),
}


def partly_trained(work: Work, part: str) -> AlphaFold:
    """Return the tiny model with trainable parts; adapters are initialised so that they change their weights."""
    model = model_for(work)
    freeze(model, PARTS[part])
    for module in model.modules():
        if isinstance(module, AdaptedLinear):
            torch.nn.init.normal_(module.adapter_b, std=0.1)
    return model


@cache
def dense_gradients(work: Work, part: str) -> Named:
    """Return the trainable parameters' gradients, computed from those of the merged model's weights on one device."""
    model = partly_trained(work, part).double()
    merged = Execution(Plan(precision="fp64")).bind(model_for(work)).train()
    merged.load_state_dict(merged_state(model))
    backward(merged, work, 0)
    dense = {name: grad_of(p) for name, p in merged.named_parameters()}
    scale, found = PARTS[part].adapters.scale, dict[str, Tensor]()
    for name, p in model.named_parameters():
        layer, _, kind = name.rpartition(".")
        if kind == "adapter_a":
            found[name] = scale * model.get_parameter(f"{layer}.adapter_b").detach().T @ dense[f"{layer}.weight"]
        elif kind == "adapter_b":
            found[name] = scale * dense[f"{layer}.weight"] @ model.get_parameter(f"{layer}.adapter_a").detach().T
        elif p.requires_grad:
            found[name] = dense[name]
    return found


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    ("work", "plan"),
    [
        case(AF2),
        case(AF2, axial=2),
        case(LAST, axial=2, triangle="gather", recompute="block", chunk=2),
        case(COMPLEX, axial=2, triangle="channels"),
    ],
)
def test_what_is_trained_in_part_has_the_gradients_of_the_dense_model(part: str, work: Work, plan: Plan) -> None:
    expected = dense_gradients(work, part)

    def on_a_rank(mesh: Mesh) -> dict[str, float]:
        model = Execution(replace(plan, precision="fp64"), mesh).bind(partly_trained(work, part)).train()
        optimizer = Optimizer(model, OptimConfig(clip_norm=math.inf), mesh)
        model.noise.seed(7, 0)
        backward(model, work, 0, leaves=False)
        found = optimizer.reducer.all_gather(optimizer.reducer.finish(), torch.empty_like(optimizer.gradient))
        here = {name: optimizer.layout.view(found, name) for name in optimizer.layout.places}
        return errors(Answer({}, {}, {}, here), Answer({}, {}, {}, expected), mesh)

    assert above(on_ranks(plan, on_a_rank)) == {}


# Five steps

TRAINED = {
    "middle": (
        Work(residues=5, sequences=3, extra=2, templates=1),
        Work(residues=6, sequences=2, extra=3, templates=0),
    ),
    "first": (Work("first", 5, 3, 2, 0), Work("first", 4, 2, 1, 1, padded=1)),
}
# Examples per step, for any number of data ranks
STEPS, EXAMPLES = 5, 2


def trained(outer: str, plan: Plan, mesh: Mesh, sync: SyncConfig) -> tuple[list[float], Named]:
    """Run five steps of two examples, one with templates and one without; return this rank's norms, and the weights."""
    works = TRAINED[outer]
    model = Execution(replace(plan, precision="fp64"), mesh).bind(model_for(works[0])).train()
    optimizer = Optimizer(model, OptimConfig(warmup_steps=1, accumulate=EXAMPLES), mesh, sync)
    norms = []
    for step in range(STEPS):
        for index in range(mesh.data.rank, EXAMPLES, plan.data):
            backward(model, works[index], EXAMPLES * step + index)
            norms.append(float(optimizer.collect()))
        optimizer.step(step)
    return norms, {name: p.detach().clone() for name, p in model.named_parameters()}


@cache
def trained_on_one_device(outer: str) -> tuple[list[float], Named]:
    return trained(outer, Plan(), Mesh(), SyncConfig())


@pytest.mark.parametrize(
    ("outer", "plan", "sync"),
    [
        ("middle", Plan(axial=2), SyncConfig(bucket=0.01)),
        ("middle", Plan(axial=3, triangle="gather", recompute="block", chunk=2), SyncConfig()),
        ("middle", Plan(data=2, axial=2, triangle="channels"), SyncConfig(shard_state=True)),
        ("first", Plan(branch=2, recompute="block"), SyncConfig(bucket=0.01)),
        ("first", Plan(data=2, branch=2), SyncConfig(bucket=0.01)),
        ("middle", Plan(data=2, recompute="block"), SyncConfig()),
        pytest.param("first", Plan(data=2, axial=2, branch=2), SyncConfig(shard_state=True), marks=pytest.mark.slow),
    ],
)
def test_five_steps_give_the_weights_of_one_device(outer: str, plan: Plan, sync: SyncConfig) -> None:
    norms, weights = trained_on_one_device(outer)

    def on_a_rank(mesh: Mesh) -> dict[str, float]:
        found, here = trained(outer, plan, mesh, sync)
        assert found == pytest.approx(norms[mesh.data.rank :: plan.data], rel=1e-9)
        return errors(Answer({}, {}, {}, here), Answer({}, {}, {}, weights), mesh)

    assert above(on_ranks(plan, on_a_rank)) == {}


@pytest.mark.parametrize("outer", TRAINED)
def test_five_steps_move_the_weights(outer: str) -> None:
    _, weights = trained_on_one_device(outer)
    before = dict(model_for(TRAINED[outer][0]).named_parameters())
    moved = [float((weights[name] - p.detach()).norm() / p.detach().norm()) for name, p in before.items()]
    assert statistics.median(moved) > 1e-3


# Rounding


@pytest.mark.parametrize(
    ("work", "plan"), [case(AF2, axial=3, recompute="block"), case(LAST, axial=2, branch=2, chunk=2)]
)
def test_in_bf16_a_plan_is_as_near_to_the_truth_as_one_device(work: Work, plan: Plan) -> None:
    def rounded(plan: Plan, mesh: Mesh) -> dict[str, float]:
        return errors(answer(work, replace(plan, precision="bf16"), mesh), on_one_device(work, 1)[0], mesh)

    one, found = rounded(Plan(), Mesh()), on_ranks(plan, lambda mesh: rounded(plan, mesh))
    for kind in ("outputs", "losses", "parameters"):
        names = [name for name in one if name.startswith(kind)]
        ours, theirs = (statistics.median(max(errors[n] for errors in of) for n in names) for of in (found, [one]))
        assert ours < 2 * theirs, kind


# The comparison detects errors


def no_sum(buffer: Tensor, sent: Tensor, group: dist.ProcessGroup, async_op: bool) -> None:
    """Take the gradient of a gathered tensor from this rank only, as in FastFold."""
    buffer.copy_(sent.view(group.size(), -1)[group.rank()])


def first_slice(x: Tensor, axis: int, group: Group) -> Tensor:
    return x.narrow(axis, 0, local_shard(x, axis, group).shape[axis])


def exchanged(buffer: Tensor, sent: Tensor, *sizes: object, group: dist.ProcessGroup, async_op: bool) -> None:
    """An all-to-all that returns to each rank its own data."""
    buffer.copy_(sent)


MISTAKES = {
    "a gradient is not summed": (collectives, "reduce_scatter_flat", no_sum),
    "slices stay where they are": (dist, "all_to_all_single", exchanged),
    "dropout of another slice": (sharded, "local_shard", first_slice),
    "a loss counts on every rank": (losses, "_divided", lambda terms, number: terms),
    "noise differs between ranks": (Noise, "at_pass", lambda self, index: self.seed(dist.get_rank(), index)),
    "a mean instead of a sum": (dist, "all_reduce", lambda x, group: all_reduce(x, dist.ReduceOp.AVG, group)),
}
all_reduce = dist.all_reduce


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work, plan = Work(residues=6, sequences=4, extra=2), Plan(axial=2, triangle="gather")
    expected = on_one_device(work, 1)[0]

    def on_a_rank(mesh: Mesh) -> dict[str, float]:
        # Only for this process
        monkeypatch.setattr(*MISTAKES[mistake])
        return errors(answer(work, replace(plan, precision="fp64"), mesh), expected, mesh)

    assert max(above(on_ranks(plan, on_a_rank)).values()) > 1e-3
