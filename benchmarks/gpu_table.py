"""The last lines of a call of gpu_session.sh: what was measured, and beside the bars what has one.

    python benchmarks/gpu_table.py FOLDER [--rehearsal]

FOLDER holds the rows that the parts wrote as they came (*.jsonl), what `doctor --json` printed (machine.out), and
parts.tsv.  Of a part that was stopped the rows count; what a call does not measure has no line.  Where a launch count
is none, that is an error, and the exit code 1.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
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
BLOCK = {"A100": {"training": 2.5, "backward": 7.0}, "H200": {"training": 1.2, "backward": 3.5}}
STEP = {"H100": 500.0, "H200": 400.0, "A100": 900.0}
LAUNCHES = {"forward": 25, "backward": 60}
COUNTED_NOTHING = "ERROR: no launch was seen"


@dataclass(frozen=True)
class Line:
    """A figure: of which part, of what, in whose way and which pass."""

    part: str
    what: str
    ms: float | None
    bar: float | None = None  # None: there is none for this GPU and size
    more: str = ""

    @property
    def verdict(self) -> str:
        """ "met", "MISSED", or nothing."""
        if self.ms is None or self.bar is None:
            return ""
        return "met" if self.ms <= self.bar else "MISSED"


def lines(part: str, row: Row, gpu: str) -> Iterator[Line]:
    """Yield what a row comes to: its time, and its launches where there is a bar for their number."""
    which, way = row.get("pass", ""), row.get("way", "")
    ours = way in ("ours", "graph", "kept", "kept-graph")
    name = row["what"] if "what" in row else f"{row['op']} {row.get('shape') or row.get('where')}, {row['dtype']}"
    note = [row[key] for key in ("plan", "verdict", "note") if row.get(key)]
    figures = {"of limit": "share_of_limit", "x definition": "times_definition", "MiB": "peak_mib", "s": "seconds"}
    note += [f"{row[key]:.3g} {unit}" for unit, key in figures.items() if row.get(key) is not None]
    launches = row.get("launches", 0)
    note += [f"{launches} launches"] if launches else []
    note += [f"{row['replayed']} replayed"] if row.get("replayed") else []
    ms = row.get("wall_ms") if which == "step" else row.get("ms")
    bar = None
    if ours and which == "step" and name == FULL_STEP:
        bar = _of(STEP, gpu)
    elif ours and name == FULL:
        bar = (_of(BLOCK, gpu) or {}).get(which)
    elif ours and row.get("op") == "attention" and str(row.get("shape")).startswith("starting:"):
        bar = (_of({"forward": FORWARD, "backward": BACKWARD}.get(which, {}), gpu) or {}).get(int(row["shape"][9:]))
    yield Line(part, f"{name}, {way} {which}".rstrip(), ms, bar, "; ".join(note))
    if "launches" in row and ours and not launches:
        yield Line(part, f"{name}, {way} {which}", None, None, COUNTED_NOTHING)
    elif way == "ours" and name == FULL and which in LAUNCHES:
        yield Line(part, f"launches per block, {which}", launches, LAUNCHES[which], "a number")


def _of(bars: dict[str, Any], gpu: str) -> Any:
    return next((values for name, values in bars.items() if name in gpu), None)


def read(path: Path) -> list[Row]:
    """Return the rows of a file that was written as they came; the last line may be torn."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def fine(row: Row) -> bool:
    """Return whether the doctor found nothing wrong, nor slow."""
    return str(row["verdict"]).startswith("ok")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rehearsal", action="store_true")
    given = parser.parse_args()
    said = given.folder / "machine.out"
    gpu = "not known"
    if given.rehearsal:
        gpu = "none: REHEARSAL on a CPU, not a GPU result"
    elif said.exists() and (text := said.read_text(encoding="utf-8")):
        gpu = json.loads(text)["machine"]["device"]
    found = []
    for path in sorted(given.folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime):
        rows = read(path)
        checks = [row for row in rows if "verdict" in row]  # of the doctor: those that are fine are a number
        if checks:
            found.append(Line(path.stem, f"{sum(map(fine, checks))} of {len(checks)} checks are fine", None))
        found += [line for row in rows if row not in checks or not fine(row) for line in lines(path.stem, row, gpu)]
    print(f"GPU: {gpu}.  ms: medians, of a step until its result was there, else of the device; then the bar.")
    last = ""
    for line in found:
        if line.part != last:
            print(f"\n{line.part}")
        last = line.part
        ms = "" if line.ms is None else f"{line.ms:.4g}"
        bar = "" if line.bar is None else f"<= {line.bar:.3g} {line.verdict}"
        print(f"{ms:>9} {bar:16} {line.what}{' | ' + line.more if line.more else ''}")
    return int(any(COUNTED_NOTHING in line.more for line in found))


if __name__ == "__main__":
    sys.exit(main())
