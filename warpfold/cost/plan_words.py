"""Plans and times in words, for people."""

from warpfold.cost.seconds import TimeEstimate
from warpfold.parallel.plan import Plan
from warpfold.progress import as_time


def describe_plan(plan: Plan, training: bool = False) -> str:
    """Return what a plan does, in words: "slices of 16 rows, in place, on 4 devices"."""
    said = []
    if plan.recompute:
        kept = f", all but the last {plan.keep_blocks}" if plan.keep_blocks else ""
        said.append(f"{plan.recompute}s recomputed{kept}")
    if plan.chunk is not None:
        said.append(f"slices of {plan.chunk} row{'s' * (plan.chunk > 1)}{', in place' if plan.in_place else ''}")
    if plan.offload:
        said.append("z in host memory" if plan.in_place else "what is kept in host memory")
    shared = plan.axial * plan.branch
    said += [f"each protein on {shared} devices"] if shared > 1 else []
    return ", ".join(said) or ("everything kept" if training else "whole")


def duration(seconds: TimeEstimate | None) -> str:
    """Return an estimate in words; "not measured"."""
    return "not measured" if seconds is None else in_words(seconds.total)


def in_words(seconds: float) -> str:
    """Return a time in words: "about 40 s", "about 4 min", "about 2.1 h"."""
    return "less than 1 s" if seconds < 1 else f"about {as_time(seconds)}"
