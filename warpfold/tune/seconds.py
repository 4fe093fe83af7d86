"""How long a job takes under a plan, before it runs: counted work times the rates of a device.

The trunk's operations follow from sizes and plan (tune/layer_work.py), what lies outside of it is counted once for a
model (tune/outside.py), and what ranks send from the blocks (tune/traffic.py).  Features, compilation and files are not
in it.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch

from warpfold.model.alphafold import AlphaFold, ModelConfig
from warpfold.parallel.plan import DTYPES, Plan
from warpfold.tune.job import Job
from warpfold.tune.layer_work import LayerWork, loss_work, shard, trunk_work
from warpfold.tune.outside import HEADS, LOSSES, OUTSIDE, outside_work
from warpfold.tune.profile import Cost
from warpfold.tune.rates import TORCH, PassName, Rates
from warpfold.tune.traffic import TrafficBlock, moves, total

UPDATED = 14  # numbers of fp32 that are read or written of each parameter in a step: 4 states, gradient, clipping, copy
PAIR_LAYERS = 6  # of a block; with offload each reads z, and writes it
KEPT = {"block": 1, "layer": 8, None: 30}  # sizes of z that a block keeps for the backward pass (docs/plans.md)
RANKS, OFFLOAD, OPTIMIZER = "between ranks", "to host memory and back", "optimizer"
Parts = Iterator[tuple[str, float]]  # the name of a layer, and seconds


@dataclass(frozen=True)
class TimeEstimate:
    """Seconds of one prediction, or of one example of a training step; `by_layer`: where they go, most first.

    how: whether the rates were measured on this device or modelled from a data sheet.
    """

    total: float
    by_layer: dict[str, float]
    how: Literal["measured", "modelled"]


def estimate_seconds(job: Job, plan: Plan, rates: Rates) -> TimeEstimate:
    """Estimate the seconds of a job on the first rank of a plan.

    Errors: ValueError for rates that do not have the plan's precision.
    """
    found: dict[str, float] = defaultdict(float)
    for layer, seconds in _parts(job, plan, rates):
        found[layer] += seconds
    ordered = dict(sorted(found.items(), key=lambda item: -item[1]))
    return TimeEstimate(sum(ordered.values()), ordered, rates.how)


def _parts(job: Job, plan: Plan, rates: Rates) -> Parts:
    """Yield the seconds of each part; parts of one name belong together."""
    early = job.recycles * job.model.ensemble  # trunk passes without gradient, before the last
    last = job.model.ensemble
    if not job.training:
        yield from _times(early + last, _trunk(job, plan, rates, "forward"))
        yield from _outside(job, plan, rates, job.recycles + 1)
    else:
        yield from _times(early, _trunk(job, plan, rates, "forward"))
        if plan.recompute is not None:  # the first time nothing is kept, but of the last blocks
            stack = job.model.evoformer
            again = replace(stack, blocks=max(stack.blocks - plan.keep_blocks, 0))
            yield from _times(
                last, _trunk(replace(job, model=replace(job.model, evoformer=again)), plan, rates, "forward")
            )
        yield from _times(last, _trunk(job, plan, rates, "training"))
        yield from _times(last, _trunk(job, plan, rates, "backward"))
        yield from _outside(job, plan, rates, job.recycles + 1)
        yield from _losses(job, plan, rates)
        numbers = UPDATED * parameters(job.model) * torch.float32.itemsize
        yield OPTIMIZER, rates.seconds(TORCH, "forward", Cost(0, 0, numbers), UPDATED, torch.float32)
    yield from _between_ranks(job, plan, rates)
    yield from _offloaded(job, plan, rates)


def _times(count: float, parts: Parts) -> Parts:
    if count:
        yield from ((layer, count * seconds) for layer, seconds in parts)


def _trunk(job: Job, plan: Plan, rates: Rates, which: PassName) -> Parts:
    dtype = DTYPES[plan.precision]
    for work in trunk_work(job.model, job.sizes, plan, which != "backward"):
        yield work.layer, _seconds(work, rates, which, dtype)


def _seconds(work: LayerWork, rates: Rates, which: PassName, dtype: torch.dtype) -> float:
    return rates.seconds(work.op, which, work.cost, work.calls, dtype)


def _losses(job: Job, plan: Plan, rates: Rates) -> Parts:
    assert job.loss is not None
    passes: tuple[PassName, ...] = ("training", "backward")
    for which in passes:
        for work in loss_work(job.model, job.sizes, plan, which == "training", job.loss.violation > 0):
            yield work.layer, _seconds(work, rates, which, torch.float32) / plan.axial


def _outside(job: Job, plan: Plan, rates: Rates, passes: int) -> Parts:
    """Yield what the embedders, the structure module, the heads and the losses take; heads and losses only once."""
    share = shard(job.sizes.residues, plan.axial)
    for key, work in outside_work(job.model, job.sizes, job.loss).items():
        once = key.part in (*HEADS, LOSSES) or key.backward
        which: PassName = "backward" if key.backward else "forward" if job.loss is None else "training"
        calls, whole = (
            rates.seconds(OUTSIDE, which, cost, work.calls, torch.float32) for cost in (Cost(0, 0, 0), work.cost)
        )
        # Ranks share what is of pairs and alignments, which is nearly all, but all of them make the calls.
        yield key.part, (calls + (whole - calls) * share) * (1 if once else passes)


@lru_cache(maxsize=64)
def parameters(model: ModelConfig) -> int:
    """Return how many numbers a model learns."""
    with torch.device("meta"):
        return sum(p.numel() for p in AlphaFold(model).parameters())


def _between_ranks(job: Job, plan: Plan, rates: Rates) -> Parts:
    """Yield what the ranks of an example wait for each other if nothing hides it: at most so long."""
    if plan.axial == 1:
        return
    model, sizes, itemsize = job.model, job.sizes, DTYPES[plan.precision].itemsize
    rows = sizes.sequences + (sizes.templates if model.templates.enabled and model.templates.torsion_rows else 0)
    stacks = [(model.evoformer.blocks, rows, model.c_m), (model.extra_blocks, sizes.extra, model.c_e)]
    by_channels = plan.by_channels(sizes.residues, plan.axial, model.evoformer.pair.c_triangle, model.c_z, itemsize)
    for blocks, sequences, c_m in stacks:
        block = TrafficBlock(sequences=sequences, residues=sizes.residues, c_m=c_m, c_z=model.c_z,
                             evoformer=model.evoformer)  # fmt: skip
        found = moves(block, plan.axial, by_channels, itemsize)
        forward, backward = total(found, "forward"), total(found, "backward")
        passes = (job.recycles + 1) * model.ensemble + (1 if job.training and plan.recompute else 0)
        calls = blocks * (passes * forward.calls + backward.calls * job.training)
        sent = blocks * (passes * forward.bytes + backward.bytes * job.training)
        yield RANKS, calls * rates.link.latency + sent / rates.link.bandwidth


def _offloaded(job: Job, plan: Plan, rates: Rates) -> Parts:
    """Yield what z, or what a training keeps, takes to host memory and back, less what is computed meanwhile."""
    if not plan.offload:
        return
    model, sizes, itemsize = job.model, job.sizes, DTYPES[plan.precision].itemsize
    z = sizes.residues**2 * shard(sizes.residues, plan.axial) * model.c_z * itemsize
    blocks = model.evoformer.blocks + model.extra_blocks
    if job.training:
        moved = 2 * KEPT[plan.recompute] * blocks * z
        hidden = sum(seconds for _, seconds in _trunk(job, plan, rates, "backward"))
    else:
        passes = (job.recycles + 1) * model.ensemble
        moved = 2 * z * PAIR_LAYERS * blocks * passes
        hidden = passes * sum(seconds for _, seconds in _trunk(job, plan, rates, "forward"))
    yield OFFLOAD, max(0.0, moved / rates.host.bandwidth - hidden)
