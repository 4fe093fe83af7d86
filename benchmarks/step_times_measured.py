"""Compare measured training steps of 1, 2 and 4 processes with the step times that `warpfold plan` would estimate.

    sudo python benchmarks/step_times_measured.py --out benchmarks/results/step-times-measured-NAME.json  (20 minutes)

The processes are on emulated nodes, which are network namespaces (link.py); four processes are on two nodes.  All
processes measure the rates of operations at the same time, between the steps, and links are measured as a run measures
them.  The time of a step is that of the slowest rank.  Rates are medians, so the median of the steps is compared; the
shortest step is recorded as well. The machine must be idle and have a core for each process. Otherwise the processes
wait for each other, which the estimates do not include.
"""

import argparse
import datetime
import json
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from link import Shape, refusal, run_ranks

from warpfold.cluster.links import measure_cluster
from warpfold.cost.example import ExampleSizes, Job, random_example, shortened, train_on_example
from warpfold.cost.links import Cluster, one_node
from warpfold.cost.measured_rates import measured
from warpfold.cost.record import record
from warpfold.cost.recorder import Operation
from warpfold.cost.replay import Pace, step_time
from warpfold.device import keep_memory
from warpfold.engine.optim import Optimizer
from warpfold.model.alphafold import AlphaFold
from warpfold.parallel.execution import Execution
from warpfold.parallel.mesh import make_mesh
from warpfold.parallel.plan import DTYPES, Plan
from warpfold.parallel.team import ProcessInfo, Team
from warpfold.settings import plain
from warpfold.training.config import load_settings
from warpfold.training.planning import training_job

BAR = 0.15  # largest relative error of an estimate that counts as met
SHAPES = [Shape(10, 0.1), Shape(1, 0.1), Shape(1, 5)]
PLANS = [Plan(), Plan(data=2), Plan(axial=2), Plan(data=4), Plan(data=2, axial=2), Plan(axial=4)]


def the_job(residues: int, blocks: int) -> Job:
    """Build the training: a monomer of the true width with few blocks and one pass."""
    given = load_settings("monomer")
    job = training_job(given.config())
    sizes = ExampleSizes(residues=residues, sequences=residues // 2, extra=residues, templates=1)
    return replace(job, model=shortened(job.model, blocks), sizes=sizes, recycles=0)


def timed_steps(job: Job, plan: Plan) -> Iterator[float]:
    """Yield the seconds of consecutive steps of the slowest rank. The first step is a warm-up."""
    keep_memory()
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
    for turn in count():
        dist.barrier()
        begin = time.perf_counter()
        train_on_example(model, batch, 0, job.loss)
        optimizer.collect()
        optimizer.step(turn)
        took = torch.tensor(time.perf_counter() - begin)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        yield float(took)


def estimated(job: Job, plan: Plan, cluster: Cluster) -> dict[str, Any]:
    """Estimate the seconds of a step, as `warpfold plan` does, and average the estimates of the ranks.

    All ranks measure the same rates at the same time, so that they share the cores as they do in a step.
    """
    assert job.optim is not None
    of_plan = replace(job, optim=replace(job.optim, accumulate=plan.data))
    rates = measured("cpu", DTYPES[plan.precision])
    pace, asked = Pace.of(rates, cluster), set[tuple[str, str, str]]()
    for entry in record(of_plan, plan, 1, cluster.per_node, gpu=False).step(0):
        if isinstance(entry, Operation) and (key := (entry.op, entry.phase, str(entry.dtype))) not in asked:
            asked.add(key)
            dist.barrier()
            pace.seconds(entry)
    step = step_time(of_plan, plan, rates, cluster)
    waiting = sum(seconds for name, seconds in step.by_part.items() if name.startswith("waiting for"))
    # The replay adds the wait for the last of the ranks, so the mean of their estimates is the right one to compare.
    mean = torch.tensor([step.total, step.total - waiting, waiting]) / dist.get_world_size()
    dist.all_reduce(mean)
    return {**dict(zip(("seconds", "compute", "exposed"), mean.tolist())), "sent": step.sent}


def figures(plan: Plan, job: Job, rounds: int, per_node: int) -> Iterator[dict[str, Any]]:
    """Measure the steps of one plan, and estimate them."""
    ranks = dist.get_world_size()
    team = Team(ProcessInfo(dist.get_rank(), ranks, ranks_per_node=per_node), make_mesh(data=ranks))
    cluster = measure_cluster(team, "cpu") if ranks > 1 else one_node(1)
    steps = timed_steps(job, plan)
    next(steps)
    before = list(islice(steps, rounds))
    estimate = estimated(job, plan, cluster)
    # Other programs slow some steps: half of the steps run before the rates are measured, half after.
    spent = [*before, *islice(steps, rounds)]
    middle, least = statistics.median(spent), min(spent)
    yield {"measured": middle, "least": least, "estimated": estimate, "cluster": plain(cluster)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the results go, as JSON")
    parser.add_argument("--rounds", type=int, default=4, help="steps before the rates, and after")
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
        ranks = plan.data * plan.axial * plan.branch
        per_node = ranks if shape is None else max(1, ranks // 2)
        (found,) = run_ranks(figures, ranks, shape, plan, job, arguments.rounds, per_node)
        off = found["estimated"]["seconds"] / found["measured"] - 1
        report["rows"].append({"name": name, **found, "off": round(off, 3), "within": abs(off) <= BAR})
        took = f"{found['measured']:8.3f} ({found['least']:.3f}) {found['estimated']['seconds']:8.3f}"
        print(f"{name:40} {took} {off:+7.1%}", flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
