"""What slow examples cost a step, what a new epoch costs, and what the loader's processes take.

    python benchmarks/straggler.py --out benchmarks/results/NAME.json        (some three minutes on two cores)

Eight ranks are simulated: the loader and its 64 processes are real, making an example and computing a step are sleeps.
"""

import argparse
import datetime
import json
import os
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any


def measure(store: Path | None) -> dict[str, Any]:
    """Measure everything, and print the figures as they come."""
    from warpfold.bench.data import Simulation, epoch_gap, footprint, straggler
    from warpfold.data.features.choose import SampleConfig
    from warpfold.data.store.store import Store

    found: dict[str, Any] = {}
    if store is not None:  # first of all: the libraries are not loaded yet where processes are forked
        found["footprint"] = footprint(Store(store), SampleConfig(crop=256, max_msa=128, max_extra=1024))
        print("processes:", found["footprint"])
    found["straggler"] = []
    print(f"{'made ahead per worker':24}{'order':24}{'s per step':>12}{'relative':>10}{'slowest':>9}")
    for ahead in (2, 4):
        found["straggler"].append(straggler(replace(Simulation(), ahead=ahead)))
        for name, row in found["straggler"][-1]["results"].items():
            figures = f"{row['seconds_per_step']:12.4f}{row['against_without']:10.3f}{row['slowest_step']:9.3f}"
            print(f"{ahead:<24}{name:24}{figures}", flush=True)
    found["epoch_gap"] = epoch_gap(Simulation())
    print("seconds that an epoch's first step waits:", found["epoch_gap"])
    return found


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the results go, as JSON")
    parser.add_argument("--store", type=Path, help="a store, to measure processes that make real examples")
    arguments = parser.parse_args()
    report = {
        "what": "the loader on 8 simulated ranks; its processes",
        "date": datetime.date.today().isoformat(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        **measure(arguments.store),
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
