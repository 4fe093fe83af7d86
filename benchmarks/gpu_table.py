"""The last lines of gpu_session.sh: what was measured beside the bars, and all of it in one file.

    python benchmarks/gpu_table.py FOLDER --out results.json [--rehearsal]

FOLDER holds what the parts printed (triangles.json, block.json, step.json, norms.json, doctor.json, attention.json),
the rows that they wrote as they came (the same names with .jsonl), and parts.tsv.  Of a part that was stopped the rows
count; one that did not run is "not measured".  Where a block was timed, a launch count of none is an error.
"""

import argparse
import datetime
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PARTS = ("triangles", "block", "step", "norms", "doctor", "attention")
# What the bars are for: a toy has none.
FULL = "Evoformer block, 128 sequences, 256 residues, c_m 256, c_z 128, bf16"
FULL_STEP = "training step, 256 residues, 128 sequences, 1024 extra, 4 templates, 48 blocks, recycles 0, bf16"

# The bars, set from the best figures that others report and from what a GPU allows.  Milliseconds, by part of the GPU's
# name.  Forward: 1.2 times the best open Triton kernel.
FORWARD = {
    "H100": {256: 1.2 * 0.061, 1024: 1.2 * 2.796, 2048: 1.2 * 21.6},
    "H200": {256: 1.2 * 0.061, 1024: 1.2 * 2.796, 2048: 1.2 * 21.6},  # an H100's processor
    "A100": {256: 1.2 * 0.114, 1024: 1.2 * 5.65, 2048: 1.2 * 44.0},
}
BACKWARD = {"A100": {256: 0.41, 384: 1.4, 1024: 26.0}, "H100": {256: 0.21}, "H200": {256: 0.21}}
BLOCK = {"A100": {"forward": 2.5, "backward": 7.0}, "H200": {"forward": 1.2, "backward": 3.5}}
STEP = {"H100": {"step": 500.0}, "H200": {"step": 400.0}, "A100": {"step": 900.0}}
LAUNCHES = {"forward": 25, "backward": 60}
NORM = 0.85  # of the copy bandwidth of the same run


COUNTED_NOTHING = "ERROR: no launch was seen"


@dataclass(frozen=True)
class Line:
    """A figure and its bar."""

    what: str
    measured: float | None
    bar: float | None  # None: there is none for this GPU
    unit: str
    least: bool = False  # the bar is a least, not a most
    limit: float | None = None  # share of what the device allows (tune/roofline.py)
    counts: bool = False  # it is a count, of which none is no figure but a fault

    @property
    def verdict(self) -> str:
        """ "met", "missed", or why neither."""
        if self.counts and not self.measured:
            return COUNTED_NOTHING
        if self.measured is None:
            return "not measured"
        if self.bar is None:
            return "no bar for this GPU"
        met = self.measured >= self.bar if self.least else self.measured <= self.bar
        return "met" if met else "MISSED"


def lines(found: dict[str, Any], gpu: str) -> Iterator[Line]:
    """Yield every figure that has a bar."""
    triangles, norms, block = (found.get(part) or None for part in ("triangles", "norms", "block"))
    for direction, bars in (("forward", FORWARD), ("backward", BACKWARD)):
        for n in (256, 384, 1024, 2048):
            ours = _row(triangles, "attention", direction, f"starting:{n}")
            what = f"triangle attention {direction}, N {n}"
            yield Line(what, ours and ours["ms"], _for(bars, gpu).get(n), "ms", limit=ours and ours["share_of_limit"])
    for direction in ("forward", "backward"):
        ours = _row(norms, "layer_norm", direction, "pair:256")
        copy = norms and next(iter(norms.get("ceilings", {}).values()), {}).get("gb_per_s")
        share = ours["gb_per_s"] / copy if ours and copy else None
        yield Line(f"LayerNorm [256, 256, 128] {direction}, of copy bandwidth", share, NORM, "", least=True)
    for direction, which in (("forward", "training"), ("backward", "backward")):
        ours = _row(block, FULL, which)
        bar = _for(BLOCK, gpu).get(direction)
        yield Line(f"Evoformer block 128 x 256 {direction}", ours and ours["ms"], bar, "ms")
    for direction in ("forward", "backward"):
        ours = _row(block, FULL, direction)
        what, count = f"launches per block, {direction}", ours and ours.get("launches")
        yield Line(what, count or None, LAUNCHES[direction], "", counts=ours is not None)
    ours = _row(found.get("step") or None, FULL_STEP, "step")
    what = "training step 256, 128 + 1024 rows, no recycling"
    yield Line(what, ours and ours["wall_ms"], _for(STEP, gpu).get("step"), "ms")


def _for(bars: dict[str, Any], gpu: str) -> dict[Any, float]:
    return next((values for name, values in bars.items() if name in gpu), {})


def _row(part: dict[str, Any] | None, what: str, direction: str, shape: str | None = None) -> dict[str, Any] | None:
    """Return our row of an operation at a shape, or of a model, in one pass; None where it was not measured."""
    wanted = {"op" if shape else "what": what, "way": "ours", "pass": direction, "shape": shape}
    rows = part["rows"] if part else []
    return next((row for row in rows if all(row.get(key) == value for key, value in wanted.items())), None)


def read(folder: Path) -> dict[str, Any]:
    """Read what each part printed, or else the rows that it wrote before it was stopped; nothing of one without."""
    found: dict[str, Any] = {}
    for part in PARTS:
        path = folder / f"{part}.json"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        try:
            found[part] = json.loads(text)
        except ValueError:  # stopped before it had printed: parts.tsv says how
            if rows := _rows(path.with_suffix(".jsonl")):
                found[part] = {"stopped": True, "rows": rows}
    return found


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file that was written as they came; the last line may be torn."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rehearsal", action="store_true")
    arguments = parser.parse_args()
    found = read(arguments.folder)
    machine = next((part["machine"] for part in found.values() if "machine" in part), {})
    gpu = machine.get("device", "not known")
    label = "REHEARSAL on a CPU, not a GPU result; " if arguments.rehearsal else ""
    table = list(lines(found, gpu))
    log = arguments.folder / "parts.tsv"
    parts = [line.split("\t") for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []
    held = {
        "label": label + "medians; device time; L2 flushed",
        "date": datetime.date.today().isoformat(),
        "machine": machine,
        "parts": [dict(zip(("part", "ended", "seconds"), part)) for part in parts],
        "table": [vars(line) | {"verdict": line.verdict} for line in table],
        **found,
    }
    arguments.out.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")
    print(f"{label}{', '.join(f'{key} {value}' for key, value in machine.items())}")
    print(f"{'what':52} {'measured':>12} {'bar':>9} {'of limit':>9}  verdict")
    for line in table:
        sign = ">=" if line.least else "<="
        bar = "-" if line.bar is None else f"{sign} {line.bar:.3g}"
        limit = "-" if line.limit is None else f"{line.limit:.0%}"
        print(f"{line.what:52} {_figure(line):>12} {bar:>9} {limit:>9}  {line.verdict}")
    doctor = found.get("doctor")
    if doctor:
        print(f"doctor: {len(doctor['ops'])} checked, {doctor['red']} red")
    return int(any(line.verdict == COUNTED_NOTHING for line in table))


def _figure(line: Line) -> str:
    if line.measured is None or not math.isfinite(line.measured):
        return "-"
    return f"{line.measured:.4g} {line.unit}".strip()


if __name__ == "__main__":
    sys.exit(main())
