"""Compare what may train in a fine-tuning, at equal seconds of training on the same split (docs/howto/fine_tune.md).

    python benchmarks/finetuning.py --params run/params.safetensors --structures mine/ --seconds 120 --out result.json

Each way first takes some steps, to know how many fit into the seconds, and is then fine-tuned from the same parameters
with the same examples in the same order.  What is compared are the test's proteins before and after.
"""

import argparse
import json
import platform
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import torch

import warpfold

PILOT = 24  # steps from which the number of steps is taken
WAYS: dict[str, dict[str, Any]] = {
    "everything": {},
    "structure module": {"trainable": "structure", "set": {"finetune.trunk": "computed"}},
    "structure module, trunk kept": {"trainable": "structure"},
    "heads": {"trainable": "heads"},
    "adapters of rank 8": {"adapters": 8},
    "adapters of rank 8, four times the rate": {"adapters": 8, "rate": 4.0},
}


def seconds_of_steps(run: Path) -> float:
    """Return the median seconds of a step of a run, without its first ones."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rates = sorted(len(row["examples"]) / row["samples_per_second"] for row in rows if row["kind"] == "step")
    return rates[len(rates) // 2]


def tuned(out: Path, given: dict[str, Any], way: dict[str, Any], steps: int, rate: float | None) -> dict[str, Any]:
    """Fine-tune one way, and return its summary."""
    changes = {**given["set"], **way.get("set", {}), "train.patience": 0}
    if rate is not None:
        changes["optim.learning_rate"] = rate * way.get("rate", 1.0)
    more = {name: value for name, value in way.items() if name not in ("set", "rate")}
    return warpfold.finetune(out=out, device="cpu", steps=steps, **{**given, "set": changes}, **more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=Path, required=True)
    parser.add_argument("--structures", type=Path, nargs="+", required=True)
    parser.add_argument("--msas", type=Path, nargs="*", default=[])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--one-family", action="store_true")
    parser.add_argument("--set", nargs="*", default=[])
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    changes = dict(one.split("=", 1) for one in asked.set)
    given: dict[str, Any] = {
        "structures": asked.structures,
        "msas": asked.msas or None,
        "init": asked.params,
        "one_family": asked.one_family,
        "set": {key: json.loads(value) for key, value in changes.items()},
    }
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(asked.ways):
            way, at = WAYS[name], Path(folder) / str(number)
            pilot = tuned(at / "pilot", given, way, PILOT, None)
            rate = pilot["settings"]["optim"]["learning_rate"]
            each = seconds_of_steps(at / "pilot" / "run")
            steps = max(PILOT, round(asked.seconds / each))
            result = tuned(at / "tuned", given, way, steps, rate)
            row = {
                "way": name,
                "steps": result["steps"],
                "best_step": result["params"]["step"],
                "seconds_of_a_step": round(seconds_of_steps(at / "tuned" / "run"), 4),
                "seconds_training": result["seconds"]["training"],
                "compared": result["compared"]["test"],
                "entries": result["entries"],
            }
            found.append(row)
            scores = row["compared"]["lddt_ca"]
            low, high = scores["interval"] or (float("nan"),) * 2  # below eight clusters there is none
            change = f"{scores['difference']:+.3f} [{low:+.3f}, {high:+.3f}]"
            print(
                f"{name:40s} {row['steps']:6d} steps, {1000 * row['seconds_of_a_step']:7.1f} ms each: lDDT-Ca "
                f"{scores['before']:.3f} -> {scores['after']:.3f}, {change}",
                flush=True,
            )
            machine = {"date": str(date.today()), "machine": platform.processor() or platform.machine()}
            versions = {
                "torch": torch.__version__,
                "warpfold": warpfold.__version__,
                "threads": torch.get_num_threads(),
            }
            about = {**machine, **versions, "seconds": asked.seconds, "set": given["set"]}
            asked.out.write_text(json.dumps({"about": about, "ways": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
