"""How long a step of a training takes on the ranks of a cluster, before it runs.

Each rank has its share of the step's examples: they are computed (cost/seconds.py), their gradients travel
(cost/gradient_traffic.py), in part behind the backward pass, and each rank updates the weights that it owns.
"""

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Literal

from warpfold.cost.collectives import collective_seconds, place
from warpfold.cost.gradient_traffic import (
    GradientWay,
    bucket_sizes,
    data_ranks_on_node,
    exchange_seconds,
    gradient_moves,
)
from warpfold.cost.job import Job
from warpfold.cost.links import Cluster
from warpfold.cost.rates import Rates
from warpfold.cost.seconds import (
    CLIPPED,
    OPTIMIZER,
    UPDATED,
    backward_parts,
    by_layer,
    early_passes,
    example_moves,
    forward_parts,
    optimizer_seconds,
)
from warpfold.data.load.schedule import share_of
from warpfold.parallel.plan import Plan

GRADIENTS = "gradients"
TOLD = 32 + 200  # bytes that a rank tells all others of its step and an example (docs/parallel.md)
CHECKED = 24  # bytes by which those who share an example check that they have the same one


@dataclass(frozen=True)
class ExampleTime:
    """Seconds of one example's two passes on the ranks that share it; `by_part`: where they go."""

    forward: float
    backward: float
    by_part: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Both passes."""
        return self.forward + self.backward


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of a training on the rank that has most to do.

    by_part: where they go, most first; "gradients": of their way what the backward pass does not hide, which hides
    `hidden`.  sent: bytes that a rank sends to others.  how: as of `TimeEstimate`.
    """

    total: float
    by_part: dict[str, float]
    hidden: float
    sent: int
    how: Literal["measured", "modelled"]


def example_seconds(job: Job, plan: Plan, rates: Rates, cluster: Cluster | None) -> ExampleTime:
    """Estimate the seconds of one example of a training; it does not depend on `plan.sync`.

    Errors: as of `estimate_seconds`.
    """
    passes = forward_parts(job, plan, rates, cluster), backward_parts(job, plan, rates, cluster)
    forward, backward = (by_layer(parts) for parts in passes)
    both = {part: forward.get(part, 0.0) + backward.get(part, 0.0) for part in {**forward, **backward}}
    return ExampleTime(sum(forward.values()), sum(backward.values()), both)


def step_seconds(job: Job, plan: Plan, example: ExampleTime, rates: Rates, cluster: Cluster) -> StepTime:
    """Estimate the seconds of one step, given those of one example.

    Errors: ValueError for a job that is no training, or a strategy of sums that is left to a measurement.
    """
    if job.optim is None:
        raise ValueError("a prediction has no steps")
    share = share_of(job.optim.accumulate, plan.data, 0)  # of the ranks that have most
    way = GradientWay(passes=share // plan.batch, clip=job.optim.clip, on_node=data_ranks_on_node(plan, cluster) or 1)
    sharded = plan.sync.shard_state and plan.data > 1
    shards = plan.axial * plan.branch * (plan.data if sharded else 1)
    buckets = bucket_sizes(job.model, plan.sync.bucket_bytes(plan.data) / 2**20, plan.data * plan.axial * plan.branch)
    moves = gradient_moves(buckets, plan, way)
    exchange = exchange_seconds(moves, plan, way, cluster, example.backward * plan.batch, len(buckets))
    found = {part: share * seconds for part, seconds in example.by_part.items()}
    update = optimizer_seconds(job, rates, UPDATED, shards)
    found[OPTIMIZER] = found.get(OPTIMIZER, 0.0) + update + way.passes * optimizer_seconds(job, rates, CLIPPED)
    waited = exchange.visible + _messages(plan, way, cluster, update)
    found |= {GRADIENTS: waited} if waited else {}
    sent = sum(move.sent.bytes for move in moves) + share * _sent_of_example(job, plan)
    ordered = dict(sorted(found.items(), key=lambda item: -item[1]))
    return StepTime(sum(ordered.values()), ordered, exchange.hidden, sent, rates.how)


def _messages(plan: Plan, way: GradientWay, cluster: Cluster, update: float) -> float:
    """Return how long ranks wait for what they tell each other: of each example among those who share it, and of the
    step among all, while the weights are updated.
    """

    def gathered(group: Literal["model", "world"], size: int) -> float:
        where = place(cluster, plan.data, plan.axial, plan.branch, group)
        return collective_seconds("all_gather", size * (where.ranks - 1), where, cluster)

    of_step = gathered("world", TOLD * way.passes * plan.batch)
    return way.passes * gathered("model", CHECKED) + max(0.0, of_step - update)


def _sent_of_example(job: Job, plan: Plan) -> int:
    """Return the bytes that a rank sends to those that share its example; of two branches the one that sends more."""
    early = early_passes(job) * job.model.ensemble
    sent: dict[str, float] = defaultdict(float)
    for _, half, move, blocks in example_moves(job, plan):
        kept = min(plan.keep_blocks, blocks) if plan.recompute else blocks
        forward = blocks * (early + job.model.ensemble) + job.model.ensemble * (blocks - kept)
        sent[half] += forward * move.forward.bytes + blocks * job.model.ensemble * move.backward.bytes
    return int(max(sent.values(), default=0) if plan.branch > 1 else sum(sent.values()))


def alone(plan: Plan) -> Plan:
    """Return the plan of one device with one example at a time, else the same: what others are held against."""
    return replace(plan, data=1, axial=1, branch=1, batch=1)
