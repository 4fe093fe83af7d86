"""Time gradient strategies and axial plans on four ranks of two emulated nodes, over several kinds of links.

    sudo python benchmarks/cluster.py --out benchmarks/results/cluster-NAME.json        (some ten minutes on two cores)

The nodes are network namespaces (link.py). Where namespaces are not permitted, the script prints the reason and uses
loopback only. The ranks share the cores of the machine, so compare only ratios within a link. Measurements of
communication alone compute nothing, or replace computation by a sleep.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from link import Shape, over_the_link, refusal, run_ranks
from torch import Tensor, nn

from benchmarks.traffic import Move, Traffic, TrafficBlock, moves, seconds
from warpfold.cost.links import Link
from warpfold.engine.optim import OptimConfig, Optimizer
from warpfold.model.evoformer import Evoformer
from warpfold.parallel.collectives import all_gather_flat
from warpfold.parallel.compress import CompressionConfig
from warpfold.parallel.exchange import SyncConfig
from warpfold.parallel.execution import Execution
from warpfold.parallel.mesh import Group, Mesh, make_mesh
from warpfold.parallel.plan import Plan

RANKS, RANKS_PER_NODE = 4, 2
SHAPES = [Shape(10, 0.1), Shape(1, 0.1), Shape(10, 5), Shape(1, 5)]
LAYERS, WIDTH = 48, 256  # of the model whose gradients travel: 12.6 MB
BACKWARD = 0.3  # seconds of a backward pass that sleeps
STRATEGIES = {
    **{
        name: (SyncConfig(strategy=name, bucket=1.0), CompressionConfig()) for name in ("plain", "bf16", "hierarchical")
    },
    "plain, sharded state": (SyncConfig(bucket=1.0, shard_state=True), CompressionConfig()),
    **{
        name: (SyncConfig(bucket=1.0), CompressionConfig(method=name, start=0, warmup=0))
        for name in ("powersgd", "topk", "int8", "1bit")
    },
}
BLOCK = TrafficBlock(sequences=32, residues=64)  # that is computed, with true channels
REPLAYED = (64, 256)  # residues of blocks of 128 sequences, whose moves alone are made


class Nap(torch.autograd.Function):
    """An identity whose backward pass sleeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, duration: float) -> Tensor:
        ctx.duration = duration
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.duration)
        return grads[0], None


def gradients(rounds: int) -> dict[str, Any]:
    """Time a step of four data ranks: the exchange alone, and overlapped with a backward pass that sleeps."""
    mesh = make_mesh(data=RANKS)
    works: dict[str, Callable[[], None]] = {}
    for name, (sync, compression) in STRATEGIES.items():
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        config = OptimConfig(accumulate=RANKS, warmup_steps=1, compression=compression)
        optimizer = Optimizer(layers, config, mesh, replace(sync, check_every=0), ranks_per_node=RANKS_PER_NODE)
        naps = {"alone": 0.0, "hidden": BACKWARD / LAYERS}
        if compression.method != "none":
            del naps["hidden"]  # they begin after the backward pass
        for what, nap in naps.items():

            def work(layers: nn.ModuleList = layers, optimizer: Optimizer = optimizer, nap: float = nap) -> None:
                x = torch.randn(8, WIDTH)
                for layer in layers:
                    x = x + layer(Nap.apply(x, nap) if nap else x)
                x.square().mean().backward()
                optimizer.collect()
                optimizer.step(0)

            works[f"{what}: {name}"] = work
    found = timed(works, rounds)
    for what, figures in found.items():
        of = what.split(":")[0]
        figures["against_plain"] = round(figures["seconds"] / found[f"{of}: plain"]["seconds"], 2)
    return found


def axial(rounds: int) -> dict[str, Any]:
    """Time a block, forward and backward, and the communication of larger blocks, on two and four ranks."""
    found: dict[str, Any] = {}
    for ranks in (2, 4):
        group = crossing(ranks)
        if group is None:
            dist.barrier()
            continue
        works: dict[str, Callable[[], None]] = {}
        for triangle in ("gather", "channels"):
            works[f"axial {ranks}, {BLOCK.residues} residues computed: {triangle}"] = computed(group, triangle)
            for residues in REPLAYED:
                block = TrafficBlock(residues=residues)
                works[f"axial {ranks}, {residues} residues moved: {triangle}"] = replayed(
                    moves(block, ranks, triangle == "channels"), group
                )
        measured = timed(works, rounds, group)
        link = probed(group)
        for name, figures in measured.items():
            if name.endswith("channels"):
                gathered = measured[name.replace("channels", "gather")]["seconds"]
                figures["against_gather"] = round(figures["seconds"] / gathered, 2)
        for residues in REPLAYED:
            block = TrafficBlock(residues=residues)
            cut, whole = (seconds(moves(block, ranks, way), link) for way in (True, False))
            figures = measured[f"axial {ranks}, {residues} residues moved: channels"]
            figures["against_gather_modelled"] = round(cut / whole, 2)
            figures["chosen_by_plan"] = Plan().by_channels(residues, ranks, channels=128, c_z=128, itemsize=2)
        found |= {f"axial {ranks}, a call": vars(link), **measured}
        dist.barrier()
    return found


def crossing(ranks: int) -> Group | None:
    """Create a group of ranks, half of them on each node, and return None on other ranks."""
    members = tuple(range(0, RANKS, RANKS // ranks))
    handle = dist.new_group(list(members))
    here = dist.get_rank()
    return Group("axial", members.index(here), ranks, members, handle) if here in members else None


def computed(group: Group, triangle: Any) -> Callable[[], None]:
    """Create a function that runs a block forward and backward on this rank's shards."""
    torch.manual_seed(0)
    plan, block = Plan(axial=group.size, triangle=triangle), BLOCK
    stack = Evoformer(block.c_m, block.c_z, replace(block.evoformer, blocks=1))
    Execution(plan, Mesh(axial=group, model=group)).bind(stack)
    here = block.residues // group.size
    m = torch.randn(block.sequences, here, block.c_m, requires_grad=True)
    z = torch.randn(here, block.residues, block.c_z, requires_grad=True)
    masks = torch.ones(block.sequences, block.residues), torch.ones(here, block.residues)

    def work() -> None:
        out = stack(m, z, *masks)
        torch.autograd.backward(out, [torch.ones_like(x) for x in out])

    return work


def replayed(made: list[Move], group: Group) -> Callable[[], None]:
    """Create a function that repeats the collectives of a block's forward pass with equal sizes."""

    def work() -> None:
        for move in made:
            for _ in range(move.forward.calls):
                size = move.forward.bytes // move.forward.calls // (group.size - 1)
                if move.kind == "all_gather":
                    x = torch.empty(size, dtype=torch.uint8)
                    all_gather_flat(x.new_empty(size * group.size), x, group=group.handle)
                else:
                    x = torch.empty(size * group.size, dtype=torch.uint8)
                    dist.all_to_all_single(torch.empty_like(x), x, group=group.handle)

    return work


def probed(group: Group) -> Link:
    """Measure the latency and bandwidth of this group's all-to-all."""
    sent = [others * (group.size - 1) for others in (1, 2**22)]
    works = {str(n): replayed([Move("probe", "all_to_all", Traffic(1, n))], group) for n in sent}
    small, large = (figures["seconds"] for figures in timed(works, 9, group).values())
    return Link(round(small, 6), round((sent[1] - sent[0]) / (large - small)))


def timed(works: Mapping[str, Callable[[], None]], rounds: int, group: Group | None = None) -> dict[str, Any]:
    """Time each function alternately, after a warm-up: seconds (median, minimum, maximum) and MB over the link.

    The time of a round is that of the slowest rank.
    """
    handle = None if group is None else group.handle
    spent: dict[str, list[float]] = {name: [] for name in works}
    crossed = dict.fromkeys(works, 0)
    for turn in range(rounds + 1):
        for name, work in works.items():
            dist.barrier(handle)
            before, begin = over_the_link(), time.perf_counter()
            work()
            took = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(took, dist.ReduceOp.MAX, handle)
            if turn:
                spent[name].append(float(took))
                crossed[name] += over_the_link() - before
    return {
        name: {
            "seconds": round(statistics.median(times), 5),
            "from_to": [round(min(times), 5), round(max(times), 5)],
            "crossed_mb": round(crossed[name] / rounds / 1e6, 2),
        }
        for name, times in spent.items()
    }


def measurements(rounds: int) -> Iterator[dict[str, Any]]:
    """Yield all measurements of this rank."""
    yield {"gradients": gradients(rounds), "axial": axial(rounds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the results go, as JSON")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    why = refusal()
    if why is not None:
        print(f"no emulated nodes: {why}; loopback alone is measured")
    report: dict[str, Any] = {
        "what": f"{RANKS} ranks, {RANKS_PER_NODE} on each of 2 emulated nodes; gradients of {LAYERS} matrices of "
        f"{WIDTH} x {WIDTH} in fp32; Evoformer blocks of {BLOCK.sequences} sequences in fp32, or moved in bf16 alone",
        "date": datetime.date.today().isoformat(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "rounds": arguments.rounds,
        "no_nodes_because": why,
        "results": {},
    }
    for shape in [None, *([] if why else SHAPES)]:
        name = "loopback" if shape is None else str(shape)
        (found,) = run_ranks(measurements, RANKS, shape, arguments.rounds)
        report["results"][name] = found
        for what, figures in (found["gradients"] | found["axial"]).items():
            print(f"{name:16} {what:48}", *(f"{key} {value}" for key, value in figures.items()), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
