"""Steps of 1, 2 and 4 processes over emulated links, beside what the simulation says of them from rates measured here.

    sudo python benchmarks/simulated_here.py --out benchmarks/results/simulated-here-NAME.json     (some 20 minutes)

The nodes are network namespaces (link.py), two processes on each where there are four.  Rates of operations are
measured by all processes at the same time, as a step finds them; links by all-to-alls of two sizes.  The machine must
be quiet, and have a core for each process or the figures are of processes that wait for each other.
"""

import argparse
import datetime
import json
import os
import statistics
import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what forked ranks would else load each for itself
import torch.distributed as dist
from link import Shape, enter, linked, refusal

from warpfold.engine.optim import Optimizer
from warpfold.model.alphafold import AlphaFold
from warpfold.parallel.execution import Execution
from warpfold.parallel.mesh import make_mesh
from warpfold.parallel.plan import DTYPES, Plan
from warpfold.run.config import load_settings
from warpfold.run.planning import training_job
from warpfold.tune.cluster.links import Cluster, Link
from warpfold.tune.example import ExampleSizes, random_example, shortened
from warpfold.tune.job import Job
from warpfold.tune.memory import train_on_example
from warpfold.tune.rates import MEASURED, TORCH, measured
from warpfold.tune.simulate.record import Operation, RecordedStep, record
from warpfold.tune.simulate.replay import Pace, replay

BAR = 0.15  # of a measured step, by which the simulated one may be off
SHAPES = [Shape(10, 0.1), Shape(1, 0.1), Shape(1, 5)]
PLANS = [Plan(), Plan(data=2), Plan(axial=2), Plan(data=4), Plan(data=2, axial=2), Plan(axial=4)]


def the_job(residues: int, blocks: int) -> Job:
    """Return what is trained: a monomer's model of true widths and few blocks, one pass."""
    given = load_settings("monomer")
    job = training_job(given, given.config())
    sizes = ExampleSizes(residues=residues, sequences=residues // 2, extra=residues, templates=1)
    return replace(job, model=shortened(job.model, blocks), sizes=sizes, recycles=0)


def timed_steps(job: Job, plan: Plan, rounds: int) -> float:
    """Return the median seconds of a step, of the slowest rank each time."""
    mesh = make_mesh(plan.data, plan.axial, plan.branch)
    torch.manual_seed(0)
    model = AlphaFold(job.model).train()
    Execution(plan, mesh).bind(model)
    model.noise.seed(0)
    assert job.optim is not None
    assert job.loss is not None
    optim = replace(job.optim, accumulate=plan.data)
    optimizer = Optimizer(model, optim, mesh, replace(plan.sync, check_every=0), dtype=DTYPES[plan.precision])
    batch = random_example(job.model, job.sizes, "cpu")
    spent = []
    for turn in range(rounds + 1):
        together()
        begin = time.perf_counter()
        train_on_example(model, batch, 0, job.loss)
        optimizer.collect()
        optimizer.step(turn)
        took = torch.tensor(time.perf_counter() - begin)
        if dist.is_initialized():
            dist.all_reduce(took, dist.ReduceOp.MAX)
        spent.append(float(took))
    return statistics.median(spent[1:])


def together() -> None:
    """Wait for all ranks."""
    if dist.is_initialized():
        dist.barrier()


def measured_cluster(ranks: int, per_node: int, rounds: int = 9) -> Cluster:
    """Measure what joins two ranks of a node, and two nodes; every rank must call it."""
    links = {}
    for name, other in (("within", 1), ("between", per_node)):
        if other >= ranks or (name == "within" and per_node == 1):
            continue
        pair = dist.new_group([0, other])
        seconds = []
        for size in (1, 2**22):
            taken = []
            for _ in range(rounds):
                if dist.get_rank() in (0, other):
                    x = torch.empty(2 * size, dtype=torch.uint8)
                    begin = time.perf_counter()
                    dist.all_to_all_single(torch.empty_like(x), x, group=pair)
                    taken.append(time.perf_counter() - begin)
            seconds.append(statistics.median(taken) if taken else 0.0)
        small, large = seconds
        links[name] = Link(max(small, 1e-6), 2**22 / max(large - small, 1e-6))
        dist.barrier()
    nothing = Link(1e-6, 1e12)
    within, between = links.get("within", nothing), links.get("between", nothing)
    return Cluster(ranks=ranks, per_node=per_node, within=within, between=between, call=0.0, how="measured")


def simulated(schedule: RecordedStep, plan: Plan, cluster: Cluster) -> dict[str, Any]:
    """Return what the simulation says of a step; all ranks measure the same rates at the same time."""
    dtype = DTYPES[plan.precision]
    rates = measured("cpu", dtype)
    keys = sorted(
        {
            (entry.op if entry.op in MEASURED else TORCH, entry.which if entry.op in MEASURED else "forward", kind)
            for entry in schedule.step(0)
            if isinstance(entry, Operation)
            for kind in [str(entry.dtype)]
        }
    )
    for op, which, kind in keys:
        together()
        _ = rates.ops[op, "forward" if op == TORCH else which, getattr(torch, kind.removeprefix("torch."))]  # type: ignore[index]
    found = replay(schedule.step(0), plan, Pace.of(rates, cluster))
    return {"seconds": found.seconds, "compute": found.compute, "exposed": found.exposed, "sent": found.sent}


def a_rank(
    rank: int, ranks: int, on_nodes: bool, store: str, plan: Plan, job: Job, rounds: int, pipe: Connection
) -> None:
    """Measure and simulate one plan on one rank; the first rank sends the figures."""
    torch.set_num_threads(1)
    per_node = max(1, ranks // 2) if on_nodes else ranks
    if on_nodes:
        enter(rank // per_node)
    cluster = Cluster(ranks=1, per_node=1, within=Link(1e-6, 1e12), between=Link(1e-6, 1e12))
    if ranks > 1:
        dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
        cluster = measured_cluster(ranks, per_node)
    seconds = timed_steps(job, plan, rounds)
    figures = simulated(record(job, plan, 1, per_node, gpu=False), plan, cluster)
    if rank == 0:
        pipe.send({"measured": seconds, "simulated": figures, "within": vars(cluster.within),
                   "between": vars(cluster.between)})  # fmt: skip
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def run(plan: Plan, shape: Shape | None, job: Job, rounds: int) -> dict[str, Any]:
    """Run a plan over a link; None: over loopback."""
    ranks, context = plan.data * plan.axial * plan.branch, get_context("fork")
    with tempfile.TemporaryDirectory() as folder, nullcontext() if shape is None else linked(shape):
        ours, theirs = context.Pipe()
        args = (ranks, shape is not None, f"{folder}/store", plan, job, rounds, theirs)
        processes = [context.Process(target=a_rank, args=(rank, *args), daemon=True) for rank in range(ranks)]
        for process in processes:
            process.start()
        theirs.close()
        found: dict[str, Any] = ours.recv()
        for process in processes:
            process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the results go, as JSON")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--residues", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one plan over one link, to see that it works")
    arguments = parser.parse_args()
    why, job = refusal(), the_job(arguments.residues, arguments.blocks)
    if why is not None:
        print(f"no emulated nodes: {why}; loopback alone is measured")
    report: dict[str, Any] = {
        "what": f"steps of {job.sizes}, {arguments.blocks} blocks, fp32, one thread each; seconds",
        "date": datetime.date.today().isoformat(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "bar": BAR,
        "no_nodes_because": why,
        "rows": [],
    }
    shapes = [None, *([] if why else SHAPES)]
    cases = [(plan, shape) for plan in PLANS for shape in shapes if shape is None or plan.data * plan.axial > 1]
    for plan, shape in cases[2:3] if arguments.quick and not why else cases[:1] if arguments.quick else cases:
        name = f"data {plan.data} x axial {plan.axial}, {'loopback' if shape is None else shape}"
        found = run(plan, shape, job, arguments.rounds)
        off = found["simulated"]["seconds"] / found["measured"] - 1
        report["rows"].append({"name": name, **found, "off": round(off, 3), "within": abs(off) <= BAR})
        print(f"{name:40} {found['measured']:8.3f} {found['simulated']['seconds']:8.3f} {off:+7.1%}", flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
