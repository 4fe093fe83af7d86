"""The last lines of gpu_session.sh: what was measured beside the bars of TARGETS, and all of it in one file.

    python benchmarks/gpu_table.py FOLDER --out results.json [--rehearsal]

FOLDER holds what the parts printed (triangles.json, norms.json, block.json, doctor.json, attention.json) and parts.tsv.
A part that did not run is "not measured".
"""

import argparse
import datetime
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PARTS = ("triangles", "norms", "block", "doctor", "attention")

# TARGETS, "Speed on a GPU": milliseconds, by part of the GPU's name.  Forward: 1.2 times the best open Triton kernel.
FORWARD = {
    "H100": {256: 1.2 * 0.061, 1024: 1.2 * 2.796, 2048: 1.2 * 21.6},
    "H200": {256: 1.2 * 0.061, 1024: 1.2 * 2.796, 2048: 1.2 * 21.6},  # an H100's processor
    "A100": {256: 1.2 * 0.114, 1024: 1.2 * 5.65, 2048: 1.2 * 44.0},
}
BACKWARD = {"A100": {256: 0.41, 384: 1.4, 1024: 26.0}, "H100": {256: 0.21}, "H200": {256: 0.21}}
BLOCK = {"A100": {"forward": 2.5, "backward": 7.0}, "H200": {"forward": 1.2, "backward": 3.5}}
LAUNCHES = {"forward": 25, "backward": 60}
NORM = 0.85  # of the copy bandwidth of the same run


@dataclass(frozen=True)
class Line:
    """A figure and its bar."""

    what: str
    measured: float | None
    bar: float | None  # None: TARGETS has none for this GPU
    unit: str
    least: bool = False  # the bar is a least, not a most
    limit: float | None = None  # share of what the device allows (tune/roofline.py)

    @property
    def verdict(self) -> str:
        """ "met", "missed", or why neither."""
        if self.measured is None:
            return "not measured"
        if self.bar is None:
            return "no bar for this GPU"
        met = self.measured >= self.bar if self.least else self.measured <= self.bar
        return "met" if met else "MISSED"


def lines(found: dict[str, Any], gpu: str) -> Iterator[Line]:
    """Yield every row of TARGETS that the session measures."""
    triangles, norms, block = (found.get(part) or None for part in ("triangles", "norms", "block"))
    for direction, bars in (("forward", FORWARD), ("backward", BACKWARD)):
        for n in (256, 384, 1024, 2048):
            ours = _row(triangles, "attention", f"starting:{n}", direction)
            what = f"triangle attention {direction}, N {n}"
            yield Line(what, ours and ours["ms"], _for(bars, gpu).get(n), "ms", limit=ours and ours["share_of_limit"])
    for direction in ("forward", "backward"):
        ours = _row(norms, "layer_norm", "pair:256", direction)
        copy = norms and next(iter(norms["ceilings"].values()))["gb_per_s"]
        share = ours["gb_per_s"] / copy if ours and copy else None
        yield Line(f"LayerNorm [256, 256, 128] {direction}, of copy bandwidth", share, NORM, "", least=True)
    if block and not block["full_size"]:
        block = None  # a toy: no figure of TARGETS
    for direction, which in (("forward", "training"), ("backward", "backward")):
        ms = block and block["ways"]["fast"][f"{which}_ms"]
        yield Line(f"Evoformer block 128 x 256 {direction}", ms, _for(BLOCK, gpu).get(direction), "ms")
    for direction in ("forward", "backward"):
        launched = block and block.get("launches", {}).get(direction)
        count = launched and launched["kernels"] + launched["copies and fills"]
        # No launch at all: the profiler saw nothing, for a block launches some.
        yield Line(f"launches per block, {direction}", count or None, LAUNCHES[direction], "")


def _for(bars: dict[str, Any], gpu: str) -> dict[Any, float]:
    return next((values for name, values in bars.items() if name in gpu), {})


def _row(part: dict[str, Any] | None, op: str, shape: str, direction: str, way: str = "ours") -> dict[str, Any] | None:
    wanted = {"op": op, "shape": shape, "way": way, "pass": direction}
    rows = part["rows"] if part else []
    return next((row for row in rows if all(row.get(key) == value for key, value in wanted.items())), None)


def read(folder: Path) -> dict[str, Any]:
    """Read what each part printed; parts that did not finish are left out."""
    found = {}
    for part in PARTS:
        path = folder / f"{part}.json"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        try:
            found[part] = json.loads(text)
        except ValueError:
            continue  # stopped before it had printed: parts.tsv says how
    return found


def main() -> None:
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


def _figure(line: Line) -> str:
    if line.measured is None or not math.isfinite(line.measured):
        return "-"
    return f"{line.measured:.4g} {line.unit}".strip()


if __name__ == "__main__":
    main()
