"""Plans of trainings on many ranks in words, for people: what they are, what they take, and why they were chosen."""

from warpfold.cost.links import Cluster
from warpfold.cost.machine import in_gb
from warpfold.cost.plan_words import describe_plan
from warpfold.cost.planner import memory_of_free
from warpfold.cost.step_planner import Candidate, StepChoice, examples_of, ranks_of
from warpfold.parallel.exchange import SyncConfig
from warpfold.parallel.plan import Plan
from warpfold.progress import as_time


def describe_grid(plan: Plan) -> str:
    """Return who shares what: "data 4 x axial 2"."""
    sizes = {"data": plan.data, "axial": plan.axial, "branch": plan.branch}
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"


def describe_ranks_plan(plan: Plan) -> str:
    """Return what a plan of a training does, in words: "data 4 x axial 2, blocks recomputed, buckets of 4 MiB"."""
    usual, sync = SyncConfig(), plan.sync
    on_one = Plan(recompute=plan.recompute, keep_blocks=plan.keep_blocks, offload=plan.offload)
    said = [describe_grid(plan), describe_plan(on_one, training=True)]
    said += [f"{plan.batch} examples together"] if plan.batch > 1 else []
    said += [f'products by "{plan.triangle}"'] if plan.triangle != "auto" else []
    said += [f"{sync.strategy} sums"] if sync.strategy != usual.strategy else []
    said += ["sharded state"] if sync.shard_state else []
    said += [f"buckets of {sync.bucket:g} MiB"] if sync.bucket != usual.bucket else []
    return ", ".join(said)


def step_time(seconds: float) -> str:
    """Return the time of a step in words: "0.43 s", "12 s", "12 min"."""
    return f"{seconds:.2g} s" if seconds < 10 else as_time(seconds)


def choice_in_words(choice: StepChoice) -> str:
    """Return the plan that was chosen, what it needs and takes, and why it is this one; one line."""
    chosen = choice.chosen
    assert chosen.memory is not None
    taken = f"{memory_of_free(chosen.memory, choice.machine)}, about {step_time(chosen.time.total)} a step"
    idle = ""
    if choice.idle:
        idle = f" (more examples a step, optim.accumulate, would use the {choice.idle} idle devices)"
    said = [f"{describe_used(choice, chosen)}: {taken}", f"{why(choice)}{idle}"]
    if choice.cluster.ranks > 1:
        share = 100 * choice.efficiency(chosen)
        said[0] += f", {share:.0f} % of what {choice.cluster.ranks} devices do alone"
    return "; ".join(part for part in said if part)


def describe_used(choice: StepChoice, one: Candidate) -> str:
    """Return what a plan does, and how many devices it leaves idle."""
    idle = choice.cluster.ranks - ranks_of(one.plan)
    return describe_ranks_plan(one.plan) + (f", {idle} of {choice.cluster.ranks} devices idle" if idle else "")


def why(choice: StepChoice) -> str:
    """Return why no other plan was chosen: what would be faster and does not fit, and the next best to share out."""
    chosen = choice.chosen
    faster = [one for one in choice.considered if one.reason and one.time.total < chosen.time.total]
    said = [f"{describe_ranks_plan(faster[0].plan)} {faster[0].reason}"] if faster else []
    others = [one for one in choice.considered if not one.reason and _grid(one) != _grid(chosen)]
    if others:
        least = min(others, key=lambda one: one.time.total)
        ratio = least.time.total / chosen.time.total
        said.append(f"{describe_grid(least.plan)} would take {ratio:.2f} times as long")
    elif not faster and choice.cluster.ranks > 1:
        examples = examples_of(choice.job)
        said.append(f"its {choice.cluster.ranks} ranks cannot share {examples} example{'s' * (examples > 1)} otherwise")
    return "; ".join(said)


def _grid(one: Candidate) -> tuple[int, int, int]:
    return one.plan.data, one.plan.axial, one.plan.branch


def sent(size: float) -> str:
    """Return bytes that were sent: "12.6 GB", "0.8 MB"."""
    return f"{size / 1e6:.1f} MB" if 0 < size < 1e7 else in_gb(size)


def joined(cluster: Cluster) -> str:
    """Return how the ranks of a cluster are joined: "4 nodes of 8, 360 GB/s within and 40 GB/s between (given)"."""
    within, between = (_rate(link.bandwidth) for link in (cluster.within, cluster.between))
    if cluster.nodes == 1:
        return f"one node, {within} ({cluster.how})"
    last = f", the last of {rest}" if (rest := cluster.ranks % cluster.per_node) else ""
    return f"{cluster.nodes} nodes of {cluster.per_node}{last}, {within} within and {between} between ({cluster.how})"


def _rate(bandwidth: float) -> str:
    return f"{bandwidth / 1e9:.3g} GB/s" if bandwidth >= 1e9 else f"{bandwidth / 1e6:.3g} MB/s"
