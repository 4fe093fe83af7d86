"""Count the collectives of an Evoformer block that are awaited although other work is available, on gloo ranks.

    python -m benchmarks.overlap --out benchmarks/results/NAME.json        (some minutes on two cores)

tests/parallel/tracing.py defines the count, and tests/parallel/test_trace.py bounds it for each plan.
"""

import argparse
import datetime
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tests.parallel.tracing import InReverse, Order, at_once, traced
from tests.ranks import run_ranks
from warpfold.parallel import collectives
from warpfold.parallel.plan import Plan

BLOCKS = 2
CASES: list[tuple[Plan, Order, bool]] = [  # plan, order of the layers, whether every move is awaited where it begins
    *((Plan(axial=2, triangle=t), "middle", blocking) for t in ("gather", "channels") for blocking in (True, False)),
    *((Plan(axial=3, triangle=t), "middle", False) for t in ("gather", "channels")),
    (Plan(axial=3, recompute="block"), "middle", False),
    (Plan(axial=2, triangle="gather", chunk=3), "middle", False),
    (Plan(axial=2, triangle="gather"), "first", False),
    (Plan(axial=2, triangle="gather"), "last", False),
    (Plan(axial=2, triangle="gather", chunk=3), "first", False),
    (Plan(axial=2, branch=2, triangle="gather"), "first", False),
]


@contextmanager
def awaited_at_once() -> Iterator[None]:
    """Wait for every collective immediately, forward and backward, within the context."""
    begin, reserved = collectives._begin, collectives._reserved
    collectives._begin, collectives._reserved = at_once(begin), InReverse()
    try:
        yield
    finally:
        collectives._begin, collectives._reserved = begin, reserved


def measure(plan: Plan, outer: Order, blocking: bool) -> dict[str, object]:
    """Count the collectives of `BLOCKS` blocks on all ranks of a plan, and those awaited while work was available."""

    def on_a_rank() -> list[tuple[str, str, list[str]]]:
        if not blocking:
            return traced(plan, outer, BLOCKS).left_while_waiting()
        with awaited_at_once():
            return traced(plan, outer, BLOCKS).left_while_waiting()

    found = [wait for rank in run_ranks(on_a_rank, plan.axial * plan.branch) for wait in rank]
    passes = {}
    for name in dict.fromkeys(way for way, _, _ in found):
        of_pass = [(move, work) for way, move, work in found if way == name]
        passes[name] = {
            "waits": len(of_pass),
            "with_work_left": sum(bool(work) for _, work in of_pass),
            "work_left": {move: dict(Counter(work)) for move, work in of_pass if work},
        }
    said = {name: value for name, value in vars(plan).items() if value != getattr(Plan(), name)}
    return {"plan": said, "outer": outer, "awaited_where_it_begins": blocking, "passes": passes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the results go, as JSON")
    arguments = parser.parse_args()
    print(f"{'outer':7} {'plan':62} waits with work left / waits")
    results = []
    for case in CASES:
        results.append(result := measure(*case))
        plan = " ".join(f"{k} {v}" for k, v in result["plan"].items()) + ", awaited at once" * case[2]
        counts = (f"{way} {of['with_work_left']}/{of['waits']}" for way, of in result["passes"].items())
        print(f"{result['outer']:7} {plan:62} {', '.join(counts)}", flush=True)
    report = {
        "what": f"waits of {BLOCKS} Evoformer blocks on all ranks; one thread per rank, gloo; counts, no times",
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "results": results,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
