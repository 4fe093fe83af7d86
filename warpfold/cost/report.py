"""Describe the choice of a plan for `warpfold plan` and for logs: the plans, their memory, time and cost, and why."""

import math
from collections.abc import Mapping
from typing import Any

from warpfold.cost.example import Job
from warpfold.cost.links import Cluster
from warpfold.cost.machine import Machine
from warpfold.cost.memory import MemoryEstimate
from warpfold.cost.planner import (
    MIN_CHUNK,
    SLICE_COUNTS,
    Candidate,
    Choice,
    NothingFitsError,
    choose,
    describe_grid,
    describe_plan,
    examples_of,
    grid_of,
    max_residues,
    needed_bytes,
    ranks_of,
)
from warpfold.cost.rates import Rates
from warpfold.cost.replay import data_ranks_on_node
from warpfold.errors import UserError
from warpfold.parallel.plan import Plan
from warpfold.progress import Progress, as_time, format_gb, no_progress, within
from warpfold.settings import to_dict

# Plans in a report.
MAX_ROWS = 12


def choice_in_words(choice: Choice) -> str:
    """Describe the chosen plan, its memory and time, and the reasons for it in one line.

    Example: "slices of 16 rows, in place: 3.1 of 18.0 GB, about 4 min".
    """
    chosen, devices = choice.chosen, choice.machine.devices
    line = f"{describe_used(choice, chosen)}: {describe_memory(choice.memory, choice.machine)}"
    if chosen.time is not None:
        line += f", {format_seconds(chosen.time.total)}{' a step' if choice.job.training else ''}"
    if choice.job.keeps_trunk(choice.plan):
        line += ", with the trunk's outputs read from disk"
        if chosen.time is not None and choice.computed is not None:
            line += f", {choice.computed / chosen.time.total:.1f} times as fast as computing them (reading not counted)"
    if not choice.job.training or devices == 1:
        return line
    reasons = (
        [f"{100 * share:.0f} % of what {devices} devices do alone"] if (share := choice.efficiency(chosen)) else []
    )
    reasons += why(choice)
    if choice.idle:
        busy = devices - choice.idle
        same = f"{busy} device{'s' * (busy > 1)} {'do' if busy > 1 else 'does'} the same"
        idle = f"the {choice.idle} idle one{'s' * (choice.idle > 1)}"
        reasons.append(f"{same}, and more examples a step (optim.accumulate) would use {idle}")
    return "; ".join([", ".join([line, *reasons[:1]]), *reasons[1:]])


def describe_used(choice: Choice, candidate: Candidate) -> str:
    """Describe a plan and the number of devices that it leaves idle."""
    devices, plan = choice.machine.devices, candidate.plan
    idle = devices - ranks_of(plan)
    return describe_plan(plan, choice.job.training) + (f", {idle} of {devices} devices idle" if idle > 0 else "")


def why(choice: Choice) -> list[str]:
    """List reasons against other plans: a simpler plan that does not fit, and the time of the next best grid."""
    chosen, grid = choice.chosen, grid_of(choice.plan)
    too_large = [candidate for candidate in choice.considered if candidate.reason]
    reasons = [f"{describe_plan(too_large[0].plan, True)} {too_large[0].reason}"] if too_large else []
    others = [other for other in choice.considered if other.time and not other.reason and grid_of(other.plan) != grid]
    if others and chosen.time:
        least = min(others, key=lambda other: other.time.total if other.time else 0.0)
        assert least.time is not None
        times = least.time.total / chosen.time.total
        reasons.append(f"{describe_grid(least.plan)} would take {times:.2f} times as long")
    elif chosen.time and (slower_grids := [s for s in choice.skipped if ranks_of(s[0]) > ranks_of(chosen.plan)]):
        plan, seconds = min(slower_grids, key=lambda skipped: skipped[1])
        reasons.append(f"{describe_grid(plan)} would take at least {seconds / chosen.time.total:.2f} times as long")
    return reasons


def job_report(
    name: str,
    job: Job,
    machine: Machine,
    fixed: Mapping[str, Any],
    sync: Mapping[str, Any] | None = None,
    cluster: Cluster | None = None,
    rates: Rates | None = None,
    price: float | None = None,
    tell: Progress = no_progress,
) -> dict[str, Any]:
    """Report the plans of a job as a JSON value in seconds and bytes, with the chosen one marked.

    fixed, sync: fixed keys of the plan and of `plan.sync`. price: of one device for an hour. If nothing fits, "refused"
    is a message with suggestions.
    Raises UserError for keys that do not fit the devices.
    """
    report: dict[str, Any] = {"name": name, "sizes": vars(job.sizes), "training": job.learns}
    report |= {"examples": examples_of(job), "longest": {}, "course": [], "at_peak": {}, "left_out": []}
    if cluster is not None:
        report |= {"cluster": to_dict(cluster), "joined": describe_links(cluster)}
    try:
        choice = choose(job, machine, fixed, sync, cluster, rates, machine.devices == 1, tell=within(tell, 0, 2))
    except NothingFitsError as error:
        rows = [plan_row(candidate, None, machine, job, None) for candidate in error.considered[:MAX_ROWS]]
        only_bounds = all(candidate.memory is not None and candidate.memory.at_least for candidate in error.considered)
        # Otherwise the message already says what would fit.
        if not (job.training or only_bounds):
            report["longest"] = longest_of(job, machine, fixed, within(tell, 1, 2))
        return report | {"refused": str(error), "plans": rows}
    except ValueError as error:
        raise UserError(f"{name}: {error}") from error
    plans = list(choice.considered)
    if job.training:
        plans.sort(key=lambda candidate: (bool(candidate.reason), candidate.time.total if candidate.time else math.inf))
    shown = plans[:MAX_ROWS] if choice.chosen in plans[:MAX_ROWS] else [choice.chosen, *plans[: MAX_ROWS - 1]]
    time = choice.chosen.time
    return report | {
        "said": choice_in_words(choice),
        "rates": None if time is None else time.how,
        "seconds_by_part": {} if time is None else {part: round(s, 6) for part, s in time.by_part.items()},
        "plans": [plan_row(candidate, choice, machine, job, price) for candidate in shown],
        "left_out": omitted_plans(choice, len(shown)) if job.training and machine.devices > 1 else [],
        "at_peak": choice.memory.at_peak,
        "course": [[at, dict(owners)] for at, owners in choice.memory.course],
        "longest": {} if job.training else longest_of(job, machine, fixed, within(tell, 1, 2)),
    }


def plan_row(
    candidate: Candidate, choice: Choice | None, machine: Machine, job: Job, price: float | None
) -> dict[str, Any]:
    """Report a plan with its memory, time and cost as a JSON value."""
    hours = None if choice is None or not job.training else choice.hours_per_million(candidate)
    plan, time, memory = candidate.plan, candidate.time, candidate.memory
    speed = None if time is None or not job.training else examples_of(job) / time.total
    return {
        "title": describe_plan(plan, job.training) if choice is None else describe_used(choice, candidate),
        "plan": to_dict(plan),
        "chosen": choice is not None and candidate == choice.chosen,
        "bytes": None if memory is None else needed_bytes(memory, machine),
        "host_bytes": None if memory is None else memory.host,
        "lacks": candidate.reason,
        "seconds": None if time is None else time.total,
        "hidden_seconds": None if time is None else time.hidden,
        "sent_bytes": None if time is None else time.sent,
        "examples_per_second": speed,
        "efficiency": None if choice is None else choice.efficiency(candidate),
        "device_hours_per_million": hours,
        "cost_per_million": None if price is None or hours is None else price * hours,
    }


def omitted_plans(choice: Choice, shown: int) -> list[str]:
    """Explain in one line each why other plans are not shown."""
    job, chosen = choice.job, choice.plan
    lines = [
        f"{describe_plan(candidate.plan, True)}: {candidate.reason}"
        for candidate in choice.considered
        if candidate.reason
    ]
    if (more := len(choice.considered) - shown) > 0:
        lines.append(f"{more} more plans take longer")
    if job.model.evoformer.outer == "middle":
        lines.append('branch 2: in blocks of outer = "middle" the halves are not independent')
    if job.optim is not None and job.optim.clip == "example":
        lines.append('several examples together: optim.clip = "example" needs the norm of each')
    if choice.cluster.nodes > 1 and data_ranks_on_node(chosen, choice.cluster) is None:
        lines.append("hierarchical sums: they need several data ranks on each of several nodes")
    return lines


def longest_of(job: Job, machine: Machine, fixed: Mapping[str, Any], tell: Progress = no_progress) -> dict[str, int]:
    """Find how many residues fit: whole, in slices, with z in host memory, and shared by all devices."""
    chunk = max(MIN_CHUNK, -(-job.sizes.residues // SLICE_COUNTS[-1]))
    ways: dict[str, dict[str, Any]] = {
        "whole": {},
        "in slices": {"chunk": chunk, "in_place": True},
        "in slices, z in host memory": {"chunk": chunk, "in_place": True, "offload": True},
    }
    if machine.devices > 1:
        ways[f"in slices, on {machine.devices} devices"] = {"chunk": chunk, "in_place": True, "axial": machine.devices}
    lengths = {}
    for done, (title, keys) in enumerate(ways.items()):
        if all(fixed.get(key, value) == value for key, value in keys.items()):
            plan = Plan(**{**fixed, **keys, "data": 1})
            lengths[title] = max_residues(job, machine, plan, within(tell, done, len(ways), f"{title}: "))
    return lengths


def describe_memory(memory: MemoryEstimate, machine: Machine) -> str:
    """Format the needed and the free memory: "3.1 of 18.0 GB"."""
    needed = needed_bytes(memory, machine)
    needed_text = f"{needed / 1e9:.1f}" if needed >= 5e7 and machine.free >= 1e8 else format_gb(needed)
    return f"{needed_text} of {format_gb(machine.free)}"


def format_seconds(seconds: float) -> str:
    """Format an estimated time: "about 0.43 s", "about 4 min", "about 2.1 h"."""
    return f"about {f'{seconds:.2g} s' if seconds < 10 else as_time(seconds)}"


def format_sent_bytes(size: float) -> str:
    """Format a number of sent bytes: "12.6 GB", "0.8 MB"."""
    return f"{size / 1e6:.1f} MB" if 0 < size < 1e7 else format_gb(size)


def describe_links(cluster: Cluster) -> str:
    """Describe the nodes and links of a cluster: "4 nodes of 8, 360 GB/s within and 40 GB/s between (given)"."""
    inner, outer = (_format_bandwidth(link.bandwidth) for link in (cluster.within, cluster.between))
    if cluster.nodes == 1:
        return f"one node, {inner} ({cluster.how})"
    last = f", the last of {last_ranks}" if (last_ranks := cluster.ranks % cluster.per_node) else ""
    return f"{cluster.nodes} nodes of {cluster.per_node}{last}, {inner} within and {outer} between ({cluster.how})"


def _format_bandwidth(bandwidth: float) -> str:
    return f"{bandwidth / 1e9:.3g} GB/s" if bandwidth >= 1e9 else f"{bandwidth / 1e6:.3g} MB/s"
