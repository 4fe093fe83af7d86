"""What ranks send each other for the gradients of a step, in closed form, and how long that keeps a step waiting.

A law test compares the closed form with what fake ranks send while an `Optimizer` takes a step.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from warpfold.cost.collectives import Kind, Placement, collective_seconds, place
from warpfold.cost.links import Cluster
from warpfold.cost.traffic import Traffic
from warpfold.engine.packed import packed_order
from warpfold.model.alphafold import AlphaFold, ModelConfig
from warpfold.parallel.buckets import make_layout
from warpfold.parallel.plan import Plan

# Who takes part: all data ranks, those of one node, those of one place on every node; those that share an example.
Over = Literal["data", "node", "nodes", "model"]
# backward: for each backward pass, of each bucket as soon as it has its gradients.  exchange: of each bucket once in a
# step, during the last backward pass where that may be.  pass: after each backward pass.  step: after the last.
Moment = Literal["backward", "exchange", "pass", "step"]
FP32, FP64 = 4, 8  # bytes of a number


@dataclass(frozen=True)
class GradientMove:
    """Collectives of one kind for gradients or weights in one step: of all buckets, or of a few numbers."""

    name: str
    kind: Kind
    over: Over
    moment: Moment
    sent: Traffic


@dataclass(frozen=True, kw_only=True)
class GradientWay:
    """What decides how the gradients of a step travel, beside the plan.

    passes: backward passes of a rank in a step.  clip: as `optim.clip`.  on_node: of the data ranks that add up the
    same numbers, on each node; of hierarchical sums.
    """

    passes: int = 1
    clip: Literal["example", "step"] = "example"
    on_node: int = 1


@dataclass(frozen=True)
class ExchangeTime:
    """Seconds of a step that are spent on gradients: `hidden` behind backward passes, and `visible`, waited for."""

    visible: float
    hidden: float


def data_ranks_on_node(plan: Plan, cluster: Cluster) -> int | None:
    """Return how many ranks that add up the same numbers are on each node; None where hierarchical sums cannot be.

    As `exchange.make_hierarchical` asks: several nodes with several of them each.
    """
    each, more = divmod(cluster.per_node, plan.axial * plan.branch)
    return None if more or not 1 < each < plan.data or plan.data % each else each


def is_early(plan: Plan, way: GradientWay) -> bool:
    """Return whether data ranks exchange buckets during the last backward pass, as `Optimizer` decides."""
    return way.clip == "step" or (way.passes == 1 and plan.sync.strategy != "hierarchical")


def gradient_moves(buckets: Sequence[int], plan: Plan, way: GradientWay) -> list[GradientMove]:
    """Return what a rank sends for the gradients of one step, but for comparisons of weights; the rule is Adam's.

    buckets: how many numbers each has (`bucket_sizes`).  Not in it: what compression saves, and what a scaled loss
    adds.  Errors: ValueError for a strategy that is left to a measurement.
    """
    sync, data, model = plan.sync, plan.data, plan.axial * plan.branch
    if sync.strategy == "auto":
        raise ValueError('plan.sync.strategy = "auto" is measured when a run begins: what it sends is not known before')
    sharded, width = sync.shard_state and data > 1, FP32 // 2 if sync.strategy == "bf16" else FP32
    shards = [size // model for size in buckets]
    early_example = way.clip == "example" and is_early(plan, way)
    found = [
        _cut("sum of an example's gradient", "reduce_scatter", "model", "backward", buckets, model, way.passes),
        _reduced("norm of an example's gradient", "model", "pass", model, FP64, way.passes),
        _exchanged(shards, plan, way, width),
        [GradientMove("clip factors", "all_gather", "data", "step", Traffic(1, (data - 1) * FP32))]
        if early_example
        else _reduced("number of examples", "data", "step", data, FP32),
        [] if sharded else _joined("mean gradient", shards, plan, way, width),
        _reduced("norm of the mean", "model", "step", model, FP64) if way.clip == "step" else [],
        _reduced("norm of the mean's pieces", "data", "step", data, FP64) if way.clip == "step" and sharded else [],
        _joined("weights", shards, plan, way, FP32) if sharded else [],
        [_gathered("weights of the model ranks", "model", [size // model for size in buckets], model)],
    ]
    sizes = {"data": data, "model": model, "node": way.on_node, "nodes": data // way.on_node}
    return [move for moves in found for move in moves if sizes[move.over] > 1]


def _cut(
    name: str, kind: Kind, over: Over, moment: Moment, sizes: Iterable[int], ranks: int, times: int = 1
) -> list[GradientMove]:
    """Return collectives that leave each rank a piece of each bucket, all but which it sends away."""
    parts = [size * FP32 * (ranks - 1) // ranks for size in sizes]
    return [GradientMove(name, kind, over, moment, Traffic(times * len(parts), times * sum(parts)))]


def _gathered(name: str, over: Over, pieces: Iterable[int], ranks: int, width: int = FP32) -> GradientMove:
    """Return all-gathers of a rank's piece of each bucket."""
    parts = [piece * width * (ranks - 1) for piece in pieces]
    return GradientMove(name, "all_gather", over, "step", Traffic(len(parts), sum(parts)))


def _reduced(name: str, over: Over, moment: Moment, ranks: int, width: int, times: int = 1) -> list[GradientMove]:
    """Return an all-reduce of one number."""
    return [GradientMove(name, "all_reduce", over, moment, Traffic(times, times * (2 * width * (ranks - 1) // ranks)))]


def _exchanged(shards: Sequence[int], plan: Plan, way: GradientWay, width: int) -> list[GradientMove]:
    """Return how each data rank comes to have its piece of the sum (`exchange.reduce_scatter`)."""
    name, data = "sum over data ranks", plan.data
    if plan.sync.strategy != "hierarchical":
        return _cut(name, "all_to_all", "data", "exchange", [size * width // FP32 for size in shards], data)
    within, nodes = way.on_node, data // way.on_node
    of_nodes = [size // within for size in shards]
    return [
        *_cut(f"{name} of a node", "all_to_all", "node", "exchange", shards, within),
        *_cut(f"{name} of all nodes", "all_to_all", "nodes", "exchange", of_nodes, nodes),
    ]


def _joined(name: str, shards: Sequence[int], plan: Plan, way: GradientWay, width: int) -> list[GradientMove]:
    """Return how pieces come to be whole on every data rank (`exchange.all_gather`)."""
    data = plan.data
    if plan.sync.strategy != "hierarchical":
        return [_gathered(name, "data", [size // data for size in shards], data, width)]
    within, nodes = way.on_node, data // way.on_node
    return [
        _gathered(f"{name} of all nodes", "nodes", [size // data for size in shards], nodes),
        _gathered(f"{name} of a node", "node", [size // within for size in shards], within),
    ]


# How long they take


def exchange_seconds(moves: Iterable[GradientMove], plan: Plan, way: GradientWay, cluster: Cluster, backward: float,
                     buckets: int) -> ExchangeTime:  # fmt: skip
    """Return how long a step's gradients keep a rank waiting, and what of their way its backward passes hide.

    backward: seconds of one backward pass, in which buckets have their gradients one after another, at equal distances.
    A bucket begins when it is ready and the one before has arrived; sums over data ranks follow those over model ranks.
    """
    took: dict[Moment, float] = {"backward": 0.0, "exchange": 0.0, "pass": 0.0, "step": 0.0}
    for move in moves:
        calls = move.sent.calls
        where = _place(move.over, plan, way, cluster)
        took[move.moment] += calls * collective_seconds(move.kind, move.sent.bytes / calls, where, cluster)
    each = took["backward"] / way.passes
    early = is_early(plan, way)
    last = each + (took["exchange"] if early else 0.0)
    visible = (way.passes - 1) * _left(each, backward, buckets) + _left(last, backward, buckets)
    visible += (0.0 if early else took["exchange"]) + took["pass"] + took["step"]
    return ExchangeTime(visible, max(0.0, sum(took.values()) - visible))


def _left(seconds: float, backward: float, buckets: int) -> float:
    """Return what is left of the way of `buckets` when the backward pass that makes them has ended.

    Either the way keeps up, and the last bucket's is left; or it is late from the first on.
    """
    if not seconds:
        return 0.0
    return max(seconds / buckets, seconds - backward * (1 - 1 / buckets))


def _place(over: Over, plan: Plan, way: GradientWay, cluster: Cluster) -> Placement:
    if over in ("node", "nodes"):
        there = min(cluster.per_node, plan.data * plan.axial * plan.branch)
        ranks, on_node = (way.on_node, way.on_node) if over == "node" else (plan.data // way.on_node, 1)
        return Placement(ranks, on_node, max(1, there // on_node))
    return place(cluster, plan.data, plan.axial, plan.branch, "data" if over == "data" else "model")


# Buckets


@lru_cache(maxsize=256)
def bucket_sizes(model: ModelConfig, mebibytes: float, ranks: int) -> tuple[int, ...]:
    """Return how many numbers each bucket of a model's gradient has, as `PackedWeights` cuts it for so many ranks."""
    tensors, together = _tensors(model)
    layout = make_layout(tensors, mebibytes * 2**20, ranks, together)
    return tuple(bucket.stop - bucket.start for bucket in layout.buckets)


@lru_cache(maxsize=8)
def _tensors(model: ModelConfig) -> tuple[dict[str, Tensor], set[str]]:
    """Return a model's parameters without memory, in the order in which they are packed."""
    with torch.device("meta"):
        made = AlphaFold(model)
    every = dict(made.named_parameters())
    order, together = packed_order(made)
    return {name: every[name].detach() for name in order}, together
