"""Planted flips of bits, one in each run, and how many of them a witness finds.

    python -m benchmarks.reliability witness [--flips 10] [--share 0.25] [--ranks 1 2 4] [--figures F.json]

Each run is some steps of a tiny training on ranks that speak gloo.  In one of them one bit flips, once: which step,
rank, number and bit the seed draws.  What passes, such as a wrong activation, is to be found if its step is witnessed,
and so with the share as probability; what stays on one of several ranks, at the next step that is.  Counted apart: a
flip that was due and changed nothing, to the bit, in the parameters at the end (a later rounding has swallowed it), and
one that ended the run by another check.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reliability.figures import keep
from tests.training.flips import PLACES, Flip, config_for, plant, run
from tests.training.runs import equal_tensors, make_store
from warpfold.data.store.store import Store
from warpfold.keyed import keyed_rng
from warpfold.parallel.plan import Plan
from warpfold.parallel.witness import is_witnessed

STEPS = 4
STAYS = "weight", "resting weight", "moment", "update"
KNOWN = {  # what else ends a run
    "stopped, as not finite": "is not finite",
    "refused by the trial at the start": "compute different bits from the same example",
}


def planted(flip: Flip, ranks: int, seed: int, share: float, store: Store, folder: Path) -> tuple[str, bool]:
    """Run with a flip; return what became of it, and whether it was one that was to be found."""
    stays = ranks > 1 and flip.place in STAYS
    first = flip.step + (flip.place == "resting weight")
    due = any(is_witnessed(seed, step, share) for step in (range(first, STEPS) if stays else [flip.step]))
    config = config_for(Plan(data=ranks), steps=STEPS, seed=seed, witness=share)
    with pytest.MonkeyPatch.context() as patch:
        plant(flip, patch)
        found = run(config, store, folder / "flipped")
    if isinstance(found, tuple):
        finding = found[1]
        if flip.rank not in finding.ranks:
            return "another rank was named", due
        return "found, and its rank named" if finding.decided else "found, undecided between two ranks", due
    if found:
        return next((what for what, says in KNOWN.items() if says in found), found), due
    if due:
        run(config, store, folder / "clean")
        if equal_tensors(*(folder / name / "params.safetensors" for name in ("flipped", "clean"))):
            return "without effect", due
    return "not found", due


def chance(flip: Flip, ranks: int, share: float) -> float:
    """Return with which probability a flip is to be found, before it is known which steps are witnessed."""
    if ranks > 1 and flip.place in STAYS:
        return 1 - (1 - share) ** (STEPS - flip.step - (flip.place == "resting weight"))
    return share


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="reliability witness", description=__doc__.splitlines()[0])
    parser.add_argument("--flips", type=int, default=10, help="in each place, for each number of ranks")
    parser.add_argument("--share", type=float, default=0.25, help="of the steps that are witnessed")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figures", type=Path)
    chosen = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        store = make_store(Path(name) / "store", proteins=8)
        for ranks in chosen.ranks:
            for place in PLACES:
                if ranks == 1 and place in ("message", "resting weight"):
                    continue  # there are none, or nobody to compare with
                what, expected, variance, due = Counter[str](), 0.0, 0.0, 0
                for number in range(chosen.flips):
                    rng = keyed_rng(chosen.seed, place, ranks, number)
                    seed, at, bit = int(rng.integers(2**31)), float(rng.random()), int(rng.integers(32))
                    flip = Flip(place, int(rng.integers(STEPS)), int(rng.integers(ranks)), at, bit)
                    folder = Path(name) / f"{ranks}-{place}-{number}"
                    said, was_due = planted(flip, ranks, seed, chosen.share, store, folder)
                    what[said] += 1
                    due += was_due
                    share = chance(flip, ranks, chosen.share)
                    expected, variance = expected + share, variance + share * (1 - share)
                found = sum(count for said, count in what.items() if said.startswith("found"))
                numbers = {"flips": chosen.flips, "found": found, "expected": round(expected, 2), "due": due}
                rows.append({"ranks": ranks, "place": place, **numbers, "variance": round(variance, 3), "what": what})
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    sums = {key: round(sum(row[key] for row in rows), 2) for key in ("flips", "found", "expected", "due")}
    figures = {
        "share": chosen.share,
        "seed": chosen.seed,
        "steps": STEPS,
        "all": sums | {"deviation": round(sum(row["variance"] for row in rows) ** 0.5, 2)},
        "became": dict(sum((Counter(row["what"]) for row in rows), Counter[str]())),
        "rows": rows,
    }
    keep("witness", __doc__, arguments, figures, chosen.figures)
