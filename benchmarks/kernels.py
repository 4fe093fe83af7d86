"""What the most demanding launch of each kernel takes of each architecture, compiled offline: a table in Markdown.

    python benchmarks/kernels.py [--all]

By the package's tables, for AlphaFold2 and a wider model in bf16 and fp32; no GPU is needed.  --all: every launch that
leads to code of its own; some ten minutes.
"""

import sys
from collections.abc import Iterator

import triton

from tests.ops.triton.budgets import BUDGETS, Figures, breaches, distinct, figures
from tests.ops.triton.model_launches import demanding, launches_of, wider
from warpfold.model.alphafold import ModelConfig
from warpfold.ops.triton.launch import KernelLaunch
from warpfold.parallel.plan import Plan

SIZES = {"res": 256, "seq": 128, "extra": 1024, "tmpl": 4}


def launches(every: bool) -> Iterator[tuple[str, KernelLaunch]]:
    """Yield launches with the precision of the model that makes them."""
    for precision in ("bf16", "fp32"):
        plan = Plan(precision=precision)
        found = [launch for model in (ModelConfig(), wider()) for launch in launches_of(plan, model, SIZES)]
        yield from ((precision, launch) for launch in (distinct(found) if every else demanding(found)))


def cell(found: Figures) -> str:
    """Format registers / kB of shared memory / tensor-core instructions / 128-bit loads of all loads, and spills."""
    spilled = f" / **spills {found.spilled} B**" if found.spilled else ""
    return f"{found.registers} / {found.shared / 1024:.0f} / {found.tensor} / {found.wide} of {found.loads}{spilled}"


def main() -> int:
    print(
        f"Triton {triton.__version__}; registers / shared kB / tensor-core instructions / 128-bit loads of all loads\n"
    )
    print(f"| kernel, key | launch | {' | '.join(BUDGETS)} |")
    print("|---|---|" + "---|" * len(BUDGETS))
    wrong = []
    for precision, launch in launches("--all" in sys.argv[1:]):
        cells = []
        for arch, budget in BUDGETS.items():
            found = figures(launch, budget.target)
            cells.append(cell(found))
            wrong += [f"{launch.kernel.name} {launch.key} on {arch}: {w}" for w in breaches(launch, found, budget)]
        print(f"| {launch.kernel.name} {launch.key} {precision} | {launch.config} | {' | '.join(cells)} |", flush=True)
    print("\n" + ("over the budget:\n" + "\n".join(wrong) if wrong else "all within the budget"))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
