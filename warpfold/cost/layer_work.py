"""What the operations of the trunk's layers have to do in one pass, for any sizes and any plan, without running them.

Whole, a layer is one operation; in slices, or shared among ranks, it is composed of others, each called for a slice.
What one call must do stands in the operations' profiles (check/cases.py), and the sizes at which layers call them in
check/sizes.py; a test compares both with what a model was counted to do (cost/work.py).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from warpfold.check.cases import PROFILES
from warpfold.check.op_profile import Cost, LayerKind, LayerSizes, OpProfile
from warpfold.check.sizes import EXTRA, TEMPLATE, DataSizes, layers
from warpfold.cost.example import ExampleSizes
from warpfold.model.alphafold import ModelConfig
from warpfold.parallel.plan import DTYPES, Plan
from warpfold.parallel.slices import slice_numbers

# The operations that a kind of layer calls where all of it is computed at once; other kinds: the same as in slices.
WHOLE: dict[LayerKind, tuple[str, ...]] = {
    "attention": ("gated_attention",),
    "triangle product": ("triangle_multiplication",),
    "triangle output": (),
}
IN_SLICES: dict[LayerKind, tuple[str, ...]] = {
    "attention": ("norm_linear", "gated_attention"),
    "global attention": ("layer_norm", "norm_linear", "global_attention", "tail"),
    "pointwise attention": ("attention",),
    "projection": ("norm_linear",),
    "transition": ("transition",),
    "outer product": ("norm_linear", "outer_product"),
    "triangle product": ("projected_factor", "triangle_slice"),
    "triangle output": (),
    "fape": ("aligned_errors",),
    "clashes": ("overlaps",),
}
PRODUCT, COPY = "product of factors", "copy"  # what parts also do, and is no operation of ours
ON_RANKS = IN_SLICES | {
    "attention": ("norm_linear", "attention", "tail"),
    "triangle product": ("projected_factor", "projected_factor", "norm_linear", PRODUCT),
    "triangle output": ("norm_linear", "gate"),
}
LAST = ("gated_attention", "triangle_multiplication", "transition", "outer_product")  # of layers computed at once
WRITTEN: tuple[LayerKind, ...] = ("attention", "triangle product", "transition", "outer product", "global attention")
LOSSES: tuple[LayerKind, ...] = ("fape", "clashes")
TWICE: tuple[LayerKind, ...] = ("triangle product", "triangle output")  # of a block: outgoing and incoming


@dataclass(frozen=True)
class Copies:
    """What torch does around our operations of a layer or slice, beside them: parts, joins, casts, sums of gradients.

    own, whole: how often the numbers that `_copied` counts are read or written, those of this rank and all of them.
    once, each: calls, and more for each rank.
    """

    own: float
    whole: float
    once: float
    each: float = 0.0

    def calls(self, ranks: int) -> float:
        """Return the calls for one layer or slice."""
        return self.once + self.each * ranks


# Forward and backward; recorded of AlphaFold2's blocks on 1 to 8 ranks (tests/cost/test_one_count.py), those
# of slices timed with four rows.
COPIES = {
    "whole": (Copies(0.3, 0, 1), Copies(0.45, 0, 6)),
    "slices": (Copies(1, 0, 8), Copies(1, 0, 8)),
    "gather": (Copies(2.1, 0.24, 4.2, 0.35), Copies(3.1, 0.6, 10.5, 0.9)),
    "channels": (Copies(2.95, 0.03, 5.2, 0.55), Copies(4.3, 0.12, 11.5, 1.2)),
}


@dataclass(frozen=True)
class LayerWork:
    """All calls of one operation by one kind of layer in one pass."""

    layer: str
    op: str
    cost: Cost
    calls: float


def trunk_work(model: ModelConfig, sizes: ExampleSizes, plan: Plan, forward: bool) -> list[LayerWork]:
    """Return what one pass of the trunk's layers does on one rank, for one example; losses excepted.

    Ranks that share an example do each its part; rows that do not divide go to the first.
    """
    return [work for layer in _layers(model, sizes) if layer.kind not in LOSSES
            for work in _layer(layer, model, sizes, plan, forward)]  # fmt: skip


def again_of_layers(model: ModelConfig, sizes: ExampleSizes, plan: Plan) -> list[LayerWork]:
    """Return what is computed again where layers keep their inputs alone: nothing of an operation that ends a layer."""
    works = trunk_work(model, sizes, plan, forward=True)
    return works if plan.chunk is not None else [work for work in works if work.op not in (*LAST, COPY)]


def loss_work(model: ModelConfig, sizes: ExampleSizes, plan: Plan, forward: bool, clashes: bool) -> list[LayerWork]:
    """Return what the operations of the losses do; clashes: whether the violation loss is computed."""
    wanted = LOSSES if clashes else LOSSES[:1]
    found = []
    for layer in _layers(model, sizes):
        if layer.kind in wanted:
            (op,) = IN_SLICES[layer.kind]
            cost = _cost(PROFILES[op], layer, forward, DTYPES["fp32"].itemsize)
            found.append(LayerWork(layer.name, op, cost, 1))
    return found


def _layers(model: ModelConfig, sizes: ExampleSizes) -> Iterator[LayerSizes]:
    data = DataSizes(crop=sizes.residues, max_msa=sizes.sequences, max_extra=sizes.extra, max_templates=sizes.templates)
    return layers(model, data)


def _layer(
    layer: LayerSizes, model: ModelConfig, sizes: ExampleSizes, plan: Plan, forward: bool
) -> Iterator[LayerWork]:
    """Yield the calls of all layers of this kind: of every block, and of every template."""
    itemsize, sliced, ranks = DTYPES[plan.precision].itemsize, plan.chunk is not None, plan.axial > 1
    times, together = _count(layer, model, sizes)
    if together > 1 and (sliced or layer.kind == "triangle product"):  # each template alone: its profile knows squares
        times, layer = times * together, replace(layer, rows=layer.rows // together, batches=1)
    ops = ON_RANKS[layer.kind] if ranks else IN_SLICES[layer.kind]
    if not (sliced or ranks):
        ops = WHOLE.get(layer.kind, ops)
    slices, share = slices_of(layer, model, sizes, plan), shard(sizes.residues, plan.axial)
    for op in ops:
        for part in _projections(layer, ranks) if (sliced or ranks) and op == "norm_linear" else (layer,):
            if op in IN_PARTS:
                at = layer.rows / slices, layer.length, layer.channels, layer.hidden
                cost = scaled(IN_PARTS[op](*at, itemsize, forward), slices)
            else:
                cost = _cost(PROFILES[op], part, forward, itemsize)
            yield LayerWork(layer.name, op, scaled(cost, times * share), times * slices)
    if layer.kind in WRITTEN:
        copies = _copies(model, sizes, plan)[0 if forward else 1]
        cost = Cost(0, 0, _copied(layer, ranks or not sliced) * itemsize * (copies.own * share + copies.whole))
        yield LayerWork(layer.name, COPY, scaled(cost, times), times * slices * copies.calls(plan.axial))


def _projections(layer: LayerSizes, ranks: bool) -> tuple[LayerSizes, ...]:
    """Return a layer once for each projection that is an operation by itself: what is shared, and on ranks the rest."""
    parts: tuple[int, ...] = (layer.projected,)  # of a product on ranks, the gate's
    if layer.kind == "attention":
        inner = 4 * layer.heads * layer.width
        parts = (inner if ranks else 0, layer.projected - inner)
    elif layer.kind == "outer product":
        parts = layer.hidden, layer.hidden
    elif layer.kind == "triangle product":
        parts = (layer.channels,)
    return tuple(replace(layer, projected=part) for part in parts if part)


def _copies(model: ModelConfig, sizes: ExampleSizes, plan: Plan) -> tuple["Copies", "Copies"]:
    """Return what torch does around our operations of a layer, forward and backward."""
    if plan.axial == 1:
        return COPIES["whole" if plan.chunk is None else "slices"]
    itemsize, pair = DTYPES[plan.precision].itemsize, model.evoformer.pair
    channels = plan.by_channels(sizes.residues, plan.axial, pair.c_triangle, model.c_z, itemsize)
    return COPIES["channels" if channels else "gather"]


def _copied(layer: LayerSizes, ranks: bool) -> int:
    """Return how many numbers slices read and write beside our operations: each slice goes to its place."""
    positions = layer.rows * layer.length
    outer, product = layer.kind == "outer product", layer.kind == "triangle product"
    numbers = layer.length**2 * layer.outputs if outer else positions * layer.channels
    added = 3 * numbers if outer or (product and ranks) else 0  # x, its update and their sum
    joined = 2 * positions * layer.hidden if product else 0  # the factor that is shared
    return 2 * numbers + added + joined


def _factor_cost(rows: float, residues: int, channels: int, hidden: int, itemsize: int, forward: bool) -> Cost:
    """Return what rows of a factor cost: projections of the factor and of its gate."""
    positions, passes = rows * residues, 1 if forward else 3  # backward the first is computed again
    flops = 2 * positions * channels * 2 * hidden
    return Cost(passes * flops, positions * hidden, passes * positions * (channels + hidden) * itemsize)


def _slice_cost(rows: float, residues: int, channels: int, hidden: int, itemsize: int, forward: bool) -> Cost:
    """Return what rows of a triangle product cost, where the other factor is given: every slice reads all of it."""
    positions, passes = rows * residues, 1 if forward else 2
    factor = _factor_cost(rows, residues, channels, hidden, itemsize, forward)
    product = _product_cost(rows, residues, channels, hidden, itemsize, forward)
    flops = passes * 2 * positions * channels * (channels + hidden)  # the gate and the projection of the product
    moved = passes * positions * (2 * channels + hidden) * itemsize
    return Cost(
        factor.flops + product.flops + flops,
        factor.exps + positions * channels,
        factor.bytes + product.bytes + moved,
    )


def _product_cost(rows: float, residues: int, channels: int, hidden: int, itemsize: int, forward: bool) -> Cost:
    """Return what the product of rows of a factor and all of the other costs: it reads the whole factor."""
    passes = 1 if forward else 2
    numbers = (2 * rows * residues + residues**2) * hidden
    return Cost(passes * 2 * rows * residues**2 * hidden, 0, passes * numbers * itemsize)


# Parts of a triangle product for some rows; they are called for each slice, and have no profile.
IN_PARTS = {"projected_factor": _factor_cost, "triangle_slice": _slice_cost, PRODUCT: _product_cost}


def _cost(profile: OpProfile, layer: LayerSizes, forward: bool, itemsize: int) -> Cost:
    case = profile.case(layer)
    assert case is not None, (profile.name, layer)
    return profile.cost(case, forward, itemsize)


def _count(layer: LayerSizes, model: ModelConfig, sizes: ExampleSizes) -> tuple[float, int]:
    """Return how many layers of a size a pass has, and how many templates go through one together."""
    if layer.name.startswith(TEMPLATE):
        if layer.kind == "pointwise attention":
            return 1, 1
        blocks, together = model.templates.blocks * sizes.templates / layer.batches, layer.batches
    elif layer.name.startswith(EXTRA) or layer.kind == "global attention":
        blocks, together = model.extra_blocks, 1
    else:
        blocks, together = model.evoformer.blocks, 1
        if layer.name.startswith(("triangle", "pair")):  # the same in both stacks
            blocks += model.extra_blocks if sizes.extra else 0
    return blocks * (2 if layer.kind in TWICE else 1), together


def slices_of(layer: LayerSizes, model: ModelConfig, sizes: ExampleSizes, plan: Plan) -> int:
    """Return in how many slices a layer runs: each holds no more numbers than `plan.chunk` rows of z."""
    if plan.chunk is None or layer.kind == "pointwise attention":
        return 1
    outer = layer.kind == "outer product"  # is cut along z, and not along the alignment that it reads
    rows, row = (sizes.residues, sizes.residues * model.c_z) if outer else (layer.rows, layer.length * layer.channels)
    most = slice_numbers(plan.chunk, sizes.residues, model.c_z)
    return math.ceil(rows * shard(sizes.residues, plan.axial) / max(1, most // row))


def shard(residues: int, ranks: int) -> float:
    """Return the share of the work of a rank that has the most residues."""
    return math.ceil(residues / ranks) / residues


def scaled(cost: Cost, factor: float) -> Cost:
    """Return so many times a cost."""
    return Cost(cost.flops * factor, cost.exps * factor, cost.bytes * factor)
