"""Compare the chosen plan with the fastest one, for trainings on 2 and 4 ranks over three links.

    sudo python benchmarks/plans.py --out benchmarks/results/plans-NAME.json       (some 20 minutes on two cores)
    sudo python benchmarks/plans.py --minutes 1 --ranks 2 --links slow              (two ranks, one link)

The two nodes are network namespaces (link.py). Where namespaces are not permitted, the script prints the reason and
uses loopback. The ranks measure their links and rates and choose a plan, as at the start of a run. Then all plans train
a small AlphaFold2, alternately, and the fastest plan is compared with the chosen one again. The time of a plan is the
median over its steps of the slowest rank's time. Plans with recomputation are not tried, because memory is not scarce
here.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from link import Shape, refusal, run_ranks

from warpfold.batch import Batch
from warpfold.cluster.links import measure_cluster
from warpfold.cost.example import Job, random_example, train_on_example
from warpfold.cost.machine import this_machine
from warpfold.cost.planner import VARIED_KEYS, NothingFitsError, candidates, choose, describe_plan, ranks_of, variants
from warpfold.cost.replay import step_time
from warpfold.cost.report import choice_in_words
from warpfold.engine.optim import Optimizer
from warpfold.model.alphafold import AlphaFold
from warpfold.parallel.execution import Execution
from warpfold.parallel.mesh import Mesh, make_mesh
from warpfold.parallel.plan import Plan
from warpfold.parallel.team import ProcessInfo, Team
from warpfold.settings import plain
from warpfold.training.config import load_settings
from warpfold.training.planning import training_job

SHAPES = {"fast": Shape(10, 0.1), "slow": Shape(0.1, 0.1), "delayed": Shape(1, 5)}
FIXED: dict[str, Any] = {"recompute": None, "offload": False}
HOPELESS = 3.0  # a plan whose first steps take so many times the best one's is not run again
ROUNDS = 9
FINAL = 3  # plans that run once more against the one that was chosen


@dataclass(frozen=True)
class Setting:
    """A training: the number of examples per step, the clipping of gradients, and the branches."""

    name: str
    each: int
    clip: Literal["example", "step"] = "example"
    outer: Literal["middle", "first"] = "middle"

    def job(self, ranks: int) -> Job:
        """Build the training on this number of ranks, with the sizes of `tiny`."""
        changes = [f"optim.accumulate={self.each * ranks or 1}", f"optim.clip={self.clip}",
                   f"model.evoformer.outer={self.outer}"]  # fmt: skip
        given = load_settings("tiny", changes)
        return training_job(given.config())


SETTINGS = [Setting("one example", 0, outer="first"), Setting("an example each", 1), Setting("two each", 2, "step")]


class Trained:
    """A model that trains under a plan."""

    def __init__(self, job: Job, plan: Plan, mesh: Mesh, batch: Batch, per_node: int) -> None:
        assert job.optim is not None
        torch.manual_seed(0)
        self.job, self.plan, self.batch, self.number = job, plan, batch, 0
        self.model = Execution(plan, mesh).bind(AlphaFold(job.model).train())
        sync = replace(plan.sync, check_every=0)
        self.optimizer = Optimizer(self.model, job.optim, mesh, sync, ranks_per_node=per_node, batch=plan.batch)

    def step(self) -> None:
        """Run a training step, with the same example in each pass."""
        assert self.job.loss is not None
        for example in range(self.optimizer.share // self.plan.batch):
            self.model.noise.seed(example)
            train_on_example(self.model, self.batch, self.job.recycles, self.job.loss, self.plan.batch)
            self.optimizer.collect()
        self.optimizer.step(self.number)
        self.number += 1


def case(setting: Setting, team: Team, seconds: float) -> dict[str, Any]:
    """Choose a plan for a setting, run all plans, and compare the chosen one with the fastest."""
    ranks, job = team.process.ranks, setting.job(team.process.ranks)
    begin = time.perf_counter()
    cluster = measure_cluster(team, "cpu")
    machine = replace(this_machine("cpu"), devices=ranks)
    rough = [plan for plan in candidates(job, machine, FIXED, {}, cluster) if ranks_of(plan) == ranks]
    plans = []
    for plan in rough:
        plans += [plan, *chain(*(variants(key, job, plan, cluster, FIXED, {}) for key in VARIED_KEYS))]
    rates = machine.rates(torch.float32)
    assert rates is not None
    estimated = {plan: step_time(job, plan, rates, cluster) for plan in plans}
    said: dict[str, Any] = {}
    if team.is_rank_zero:
        try:
            choice = choose(job, machine, FIXED, {}, cluster, rates)
        except NothingFitsError as error:
            raise SystemExit(str(error)) from error
        said = {"chosen": plans.index(choice.plan), "said": choice_in_words(choice)}
    said = team.broadcast(said, "the choice")
    chose = time.perf_counter() - begin
    batch = random_example(job.model, job.sizes, "cpu", job.recycles + 1)
    trained = {}
    for plan in plans:
        trained[plan] = Trained(job, plan, team.remesh(plan), batch, cluster.per_node)
    chosen = plans[said["chosen"]]
    steps = {plan: one.step for plan, one in trained.items()}
    measured = run_in_turns(steps, seconds / 2)
    # The least of thirty noisy figures is less than it should be: the best and the chosen one run against each other.
    final = sorted(plans, key=lambda plan: measured[plan])[:FINAL]
    measured |= run_in_turns({plan: steps[plan] for plan in dict.fromkeys([chosen, *final])}, seconds / 2, 2 * ROUNDS)
    best = min({chosen, *final}, key=lambda plan: measured[plan])
    return {
        "setting": setting.name, "ranks": ranks, "cluster": plain(cluster), "seconds_to_choose": round(chose, 2),
        "chosen": describe_plan(chosen, True), "said": said["said"], "best": describe_plan(best, True),
        "chosen_over_best": round(measured[chosen] / measured[best], 3),
        "plans": {
            describe_plan(plan, True): {"seconds": round(took, 5), "estimated": round(estimated[plan].total, 5)}
            for plan, took in sorted(measured.items(), key=lambda item: item[1])
        },
    }  # fmt: skip


def run_in_turns(steps: Mapping[Plan, Callable[[], None]], seconds: float, rounds: int = ROUNDS) -> dict[Plan, float]:
    """Measure the median seconds of each plan's steps, alternately until the time is up, with at least two steps each.

    The time of a step is that of the slowest rank. Plans that are far too slow run only one step.
    rounds: the maximum number of rounds, after a warm-up.
    """
    spent: dict[Plan, list[float]] = {plan: [] for plan in steps}
    end, left = time.perf_counter() + seconds, list(steps)
    for turn in range(rounds + 1):
        for plan in left:
            dist.barrier()
            begin = time.perf_counter()
            steps[plan]()
            took = torch.tensor([time.perf_counter() - begin, float(time.perf_counter() > end)])
            dist.all_reduce(took, dist.ReduceOp.MAX)
            spent[plan] = [float(took[0])] if not turn else [*spent[plan][turn == 1 :], float(took[0])]
            late = bool(took[1])
        best = min(min(times) for times in spent.values())
        left = [plan for plan in left if min(spent[plan]) <= HOPELESS * best]
        if late and turn >= 2:
            break
    return {plan: statistics.median(times) for plan, times in spent.items()}


def cases(ranks: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield the results of each setting, on ranks of two nodes."""
    team = Team(ProcessInfo(dist.get_rank(), ranks, ranks_per_node=ranks // 2), make_mesh(data=ranks))
    for setting in SETTINGS:
        yield case(setting, team, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the results go, as JSON")
    parser.add_argument("--minutes", type=float, default=18.0, help="about how long all of it may take")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], choices=[2, 4])
    parser.add_argument("--links", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    arguments = parser.parse_args()
    why = refusal()
    if why is not None:
        print(f"no emulated nodes: {why}; loopback alone is measured")
    links = {"loopback": None} if why else {name: SHAPES[name] for name in arguments.links}
    torch.set_num_threads(1)
    end, left = time.perf_counter() + 60 * arguments.minutes, len(links) * len(arguments.ranks)
    report: dict[str, Any] = {
        "what": "steps of `tiny` under every plan, and how much longer than the best the one takes that was chosen",
        "date": datetime.date.today().isoformat(),
        "machine": platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0], "torch": torch.__version__,
        "no_nodes_because": why, "cases": {},
    }  # fmt: skip
    for name, shape in links.items():
        for ranks in arguments.ranks:
            seconds = (end - time.perf_counter()) / left
            left -= 1
            if seconds <= 0:
                print(f"{name}, {ranks} ranks: no time is left; give --minutes, or a machine that does nothing else")
                continue
            # Half of it for steps; the other half for measuring, choosing, and making the models.
            for found in run_ranks(cases, ranks, shape, ranks, seconds / len(SETTINGS) / 2):
                title = f"{name} ({shape or 'no nodes'}), {ranks} ranks, {found['setting']}"
                report["cases"][title] = found
                print(f"{title}: {found['chosen']} takes {found['chosen_over_best']} x {found['best']}", flush=True)
                if arguments.out:
                    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    ratios = [found["chosen_over_best"] for found in report["cases"].values()]
    print(f"of {len(ratios)} cases {sum(ratio <= 1.1 for ratio in ratios)} within 1.1; the worst is {max(ratios)}")


if __name__ == "__main__":
    main()
