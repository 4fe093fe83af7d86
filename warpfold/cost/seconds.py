"""How long a job takes under a plan, before it runs: counted work times the rates of a device.

The trunk's operations follow from sizes and plan (cost/layer_work.py), what lies outside of it is counted once for a
model (cost/outside.py), and what ranks send from the blocks (cost/traffic.py).  Features, compilation and files are not
in it.  A step of a training on many ranks: cost/step_seconds.py.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

import torch

from warpfold.check.op_profile import Cost
from warpfold.check.sizes import EXTRA, TEMPLATE
from warpfold.cost.collectives import GroupName, collective_seconds, place
from warpfold.cost.job import Job
from warpfold.cost.layer_work import LayerWork, again_of_layers, loss_work, scaled, shard, trunk_work
from warpfold.cost.links import Cluster
from warpfold.cost.outside import HEADS, LOSSES, OUTSIDE, outside_work
from warpfold.cost.rates import TORCH, PassName, Rates
from warpfold.cost.traffic import Move, Phase, TrafficBlock, moves, swaps
from warpfold.model.alphafold import AlphaFold, ModelConfig
from warpfold.parallel.plan import DTYPES, Plan

# Numbers of fp32 that are read or written of each parameter: 4 states, gradient and copy in a step; clipping, for each
# example.
UPDATED, CLIPPED = 10, 4
PAIR_LAYERS = 6  # of a block; with offload each reads z, and writes it
KEPT = {"block": 1, "layer": 8, None: 30}  # sizes of z that a block keeps for the backward pass (docs/plans.md)
RANKS, OFFLOAD, OPTIMIZER = "between ranks", "to host memory and back", "optimizer"
LAUNCHES = "the host's launches"  # that the device waits for


class LayerTime(NamedTuple):
    """The name of a layer, seconds of the device, and seconds in which the host launches that."""

    layer: str
    seconds: float
    launching: float = 0.0


Parts = Iterator[LayerTime]


@dataclass(frozen=True)
class TimeEstimate:
    """Seconds of one prediction, or of one example of a training step; `by_layer`: where they go, most first.

    how: whether the rates were measured on this device or modelled from a data sheet.
    """

    total: float
    by_layer: dict[str, float]
    how: Literal["measured", "modelled"]


def estimate_seconds(job: Job, plan: Plan, rates: Rates, cluster: Cluster | None = None) -> TimeEstimate:
    """Estimate the seconds of a job on the first rank of a plan.

    cluster: where its ranks are; without it, all of them are joined by the link of `rates`.
    Errors: ValueError for rates that do not have the plan's precision.
    """
    found: dict[str, float] = defaultdict(float)
    for parts in (forward_parts(job, plan, rates, cluster), backward_parts(job, plan, rates, cluster)):
        for layer, seconds in by_layer(parts).items():
            found[layer] += seconds
    if job.training:
        found[OPTIMIZER] += optimizer_seconds(job, rates, UPDATED + CLIPPED)
    ordered = dict(sorted(found.items(), key=lambda item: -item[1]))
    return TimeEstimate(sum(ordered.values()), ordered, rates.how)


def by_layer(parts: Parts) -> dict[str, float]:
    """Return the seconds of each layer in one pass; with what the device waits for the host, which launches ahead."""
    found: dict[str, float] = defaultdict(float)
    launching = 0.0
    for part in parts:
        found[part.layer] += part.seconds
        launching += part.launching
    waited = launching - sum(found.values())
    return dict(found) if waited <= 0 else {**found, LAUNCHES: waited}


def forward_parts(job: Job, plan: Plan, rates: Rates, cluster: Cluster | None) -> Parts:
    """Yield the seconds of each part of one example up to its loss; parts of one name belong together."""
    early = early_passes(job) * job.model.ensemble  # through the trunk
    last = job.model.ensemble
    if not job.training:
        yield from _times(early + last, _trunk(job, plan, rates, "forward", cluster))
    else:
        yield from _times(early, _trunk(job, plan, rates, "forward", cluster))
        yield from _times(last, _trunk(job, plan, rates, "training", cluster))
        yield from _losses(job, plan, rates, "training")
    yield from _outside(job, plan, rates, early_passes(job) + 1, backward=False)
    yield from _offloaded(job, plan, rates)


def early_passes(job: Job) -> float:
    """Return how many passes without gradient come before the last; a training draws them anew for each step."""
    return job.recycles / 2 if job.training else job.recycles


def backward_parts(job: Job, plan: Plan, rates: Rates, cluster: Cluster | None) -> Parts:
    """Yield the seconds of each part of an example's backward pass, with what is computed again in it."""
    if not job.training:
        return
    last = job.model.ensemble
    if plan.recompute is not None:  # but of the last blocks
        stack = job.model.evoformer
        stack = replace(stack, blocks=max(stack.blocks - plan.keep_blocks, 0))
        again = replace(job, model=replace(job.model, evoformer=stack))
        if plan.recompute == "layer":  # no ranks share it
            works, dtype = again_of_layers(again.model, again.sizes, plan), DTYPES[plan.precision]
            yield from _times(last, (_part(work, rates, "forward", dtype, plan.batch) for work in works))
        else:
            yield from _times(last, _trunk(again, plan, rates, "forward", cluster))
    yield from _times(last, _trunk(job, plan, rates, "backward", cluster))
    yield from _losses(job, plan, rates, "backward")
    yield from _outside(job, plan, rates, early_passes(job) + 1, backward=True)


def optimizer_seconds(job: Job, rates: Rates, numbers: int, shards: int = 1) -> float:
    """Return what it takes to read or write so many numbers of each parameter of a shard."""
    moved = numbers * parameters(job.model) * torch.float32.itemsize / shards
    return rates.seconds(TORCH, "forward", Cost(0, 0, moved), numbers, torch.float32)


def _times(count: float, parts: Parts) -> Parts:
    if count:
        yield from (LayerTime(layer, count * seconds, count * launching) for layer, seconds, launching in parts)


def _trunk(job: Job, plan: Plan, rates: Rates, which: PassName, cluster: Cluster | None) -> Parts:
    """Yield what one pass of the trunk takes; of two branches, the one that needs longer."""
    dtype, works = DTYPES[plan.precision], trunk_work(job.model, job.sizes, plan, which != "backward")
    parts = [_part(work, rates, which, dtype, plan.batch) for work in works]
    waits = _between_ranks(job, plan, rates, which == "backward", cluster)
    if plan.branch == 1:
        yield from parts
        yield from waits
        return
    halves: dict[str, list[LayerTime]] = {"m": [], "z": [], "": []}
    for part in parts:
        halves[_half(part.layer, job.model)].append(part)
    for half, seconds, _ in waits:
        halves[half].append(LayerTime(RANKS, seconds))
    yield from halves[""]
    yield from max((halves["m"], halves["z"]), key=lambda found: sum(part.seconds for part in found))


def _computing(job: Job, plan: Plan, rates: Rates, which: PassName) -> float:
    return sum(part.seconds for part in _trunk(job, plan, rates, which, None) if part.layer != RANKS)


def _half(layer: str, model: ModelConfig) -> str:
    """Return which branch computes a kind of layer, that of m or of z; "": both, each for itself."""
    name = layer.removeprefix(EXTRA)
    if layer.startswith(TEMPLATE):
        return ""
    if name == "outer product":  # behind both halves it waits for the new m
        return "z" if model.evoformer.outer == "first" else ""
    return "m" if name.startswith(("msa", "global")) else "z"


def _part(work: LayerWork, rates: Rates, which: PassName, dtype: torch.dtype, batch: int = 1) -> LayerTime:
    """Return what an operation takes for one example; those of a batch share its calls."""
    seconds = rates.seconds(work.op, which, scaled(work.cost, batch), work.calls, dtype)
    return LayerTime(work.layer, seconds / batch, rates.launching(work.op, which, work.calls) / batch)


def _losses(job: Job, plan: Plan, rates: Rates, which: PassName) -> Parts:
    assert job.loss is not None
    for work in loss_work(job.model, job.sizes, plan, which == "training", job.loss.violation > 0):
        layer, seconds, launching = _part(work, rates, which, torch.float32)
        yield LayerTime(layer, seconds / plan.axial, launching)


def _outside(job: Job, plan: Plan, rates: Rates, passes: float, backward: bool) -> Parts:
    """Yield what the embedders, the structure module, the heads and the losses take; heads and losses only once."""
    share = shard(job.sizes.residues, plan.axial)
    which: PassName = "backward" if backward else "forward" if job.loss is None else "training"
    for key, work in outside_work(job.model, job.sizes, job.loss).items():
        if key.backward != backward:
            continue
        once = key.part in (*HEADS, LOSSES) or backward
        calls, whole = (
            rates.seconds(OUTSIDE, which, cost, work.calls, torch.float32) for cost in (Cost(0, 0, 0), work.cost)
        )
        together = 1 if key.part == LOSSES else plan.batch  # the loss of each example is computed by itself
        # Ranks share what is of pairs and alignments, which is nearly all, but all of them make the calls.
        times, launching = 1 if once else passes, rates.launching(OUTSIDE, which, work.calls)
        yield LayerTime(key.part, times * (calls / together + (whole - calls) * share), times * launching / together)


@lru_cache(maxsize=64)
def parameters(model: ModelConfig) -> int:
    """Return how many numbers a model learns."""
    with torch.device("meta"):
        return sum(p.numel() for p in AlphaFold(model).parameters())


def _between_ranks(job: Job, plan: Plan, rates: Rates, backward: bool, cluster: Cluster | None) -> Parts:
    """Yield what the ranks of an example wait for each other in one pass of the trunk if nothing hides it: at most so
    long.  Of two branches with the half's name, else `RANKS`.
    """
    phase: Phase = "backward" if backward else "forward"
    for group, half, move, blocks in example_moves(job, plan):
        sent = getattr(move, phase)
        if not sent.calls:
            continue
        if cluster is None:
            seconds = sent.calls * rates.link.latency + sent.bytes / rates.link.bandwidth
        else:
            where = place(cluster, plan.data, plan.axial, plan.branch, group)
            seconds = sent.calls * collective_seconds(move.kind, sent.bytes / sent.calls, where, cluster)
        yield LayerTime(half if plan.branch > 1 else RANKS, blocks * seconds)


def example_moves(job: Job, plan: Plan) -> Iterator[tuple[GroupName, str, Move, int]]:
    """Yield what the ranks of an example send each other in one pass of the trunk.

    Of each move the group, the branch that makes it ("m" or "z"), and the number of blocks that do.
    """
    model, sizes, itemsize = job.model, job.sizes, DTYPES[plan.precision].itemsize
    rows = sizes.sequences + (sizes.templates if model.templates.enabled and model.templates.torsion_rows else 0)
    stacks = [(model.evoformer.blocks, rows, model.c_m), (model.extra_blocks, sizes.extra, model.c_e)]
    by_channels = plan.by_channels(sizes.residues, plan.axial, model.evoformer.pair.c_triangle, model.c_z, itemsize)
    for blocks, sequences, c_m in stacks:
        block = TrafficBlock(sequences=sequences, residues=sizes.residues, c_m=c_m, c_z=model.c_z,
                             evoformer=model.evoformer)  # fmt: skip
        for move in moves(block, plan.axial, by_channels, itemsize):
            yield "axial", "m" if move.name.startswith("m") else "z", move, blocks
        if plan.branch > 1:
            yield from (("branch", half, move, blocks) for half, move in zip("mz", swaps(block, plan.axial, itemsize)))


def _offloaded(job: Job, plan: Plan, rates: Rates) -> Parts:
    """Yield what z, or what a training keeps, takes to host memory and back, less what is computed meanwhile."""
    if not plan.offload:
        return
    model, sizes, itemsize = job.model, job.sizes, DTYPES[plan.precision].itemsize
    z = sizes.residues**2 * shard(sizes.residues, plan.axial) * model.c_z * itemsize
    blocks = model.evoformer.blocks + model.extra_blocks
    if job.training:
        moved = 2 * KEPT[plan.recompute] * blocks * z
        hidden = _computing(job, plan, rates, "backward")
    else:
        passes = (job.recycles + 1) * model.ensemble
        moved = 2 * z * PAIR_LAYERS * blocks * passes
        hidden = passes * _computing(job, plan, rates, "forward")
    yield LayerTime(OFFLOAD, max(0.0, moved / rates.host.bandwidth - hidden))
