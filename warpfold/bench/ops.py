"""Time operations on this device and compare them with the device's limits.

The results are rows (dictionaries), which can be written as a table, CSV, JSON or a picture.
"""

import datetime
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from warpfold.bench.peers import WAYS, Way, too_large
from warpfold.bench.timing import Times, measure
from warpfold.check.cases import inputs
from warpfold.check.checks import DTYPES
from warpfold.check.op_profile import OpCase, OpInputs
from warpfold.check.sizes import shapes
from warpfold.cost.machine import describe
from warpfold.cost.rates import Ceilings, Pass, ceilings, cost
from warpfold.errors import UserError
from warpfold.files import as_csv, write_atomically
from warpfold.progress import Progress, no_progress

# Most logits, and most elements of x, of a shape that is timed without being named.
MAX_LOGITS = {"cpu": 2**28, "cuda": 2**36}
MAX_ELEMENTS = {"cpu": 2**24, "cuda": 2**31}
REPEATS = {"cpu": 5, "cuda": 30}
# Seconds for an implementation at a shape, without warm-up.
BUDGET = {"cpu": 20.0, "cuda": 2.0}

Row = dict[str, Any]
# Columns of a row, with the head in a table (None: only in files) and the format.
Columns = Mapping[str, tuple[str | None, str]]
COLUMNS: Columns = {
    "op": ("op", ""), "shape": ("shape", ""), "dtype": ("dtype", ""), "way": ("way", ""), "pass": ("pass", ""),
    "ms": ("ms", ".4g"), "times_definition": ("x definition", ".2f"), "tflops": ("TFLOP/s", ".3g"),
    "gb_per_s": ("GB/s", ".4g"), "limit_ms": ("limit ms", ".3g"), "share_of_limit": ("of limit", ".0%"),
    "peak_mib": ("MiB", ".0f"), "repeats": (None, ""), "note": ("", ""),
}  # fmt: skip


def bench(
    ops: Sequence[str],
    device: torch.device,
    dtypes: Sequence[str],
    wanted: Sequence[str] = (),
    *,
    quick: bool = False,
    repeats: int = 0,
    ways: Sequence[str] = (),
    progress: Progress = no_progress,
    sink: Callable[[Row], None] = lambda row: None,
) -> dict[str, Any]:
    """Time every implementation of the operations, forward and backward.

    wanted: shapes (`sizes.shapes`). ways: names of implementations, all by default. repeats: 0 for the device's
    default.
    sink: receives each row as soon as it is measured.
    Returns the device, its peak throughput for each dtype, the rows, and the shapes that are too large for the device.
    Raises UserError for shapes that the operations do not have.
    """
    kind = "cuda" if device.type == "cuda" else "cpu"
    named = [(op, name, case) for op in ops for name, case in shapes(op, wanted, quick)]
    cases = [(op, name, case) for op, name, case in named if name in wanted or _fits(case, kind)]
    if not cases:
        raise UserError(f"--shapes {', '.join(wanted)}: none is a shape of {', '.join(ops)}")
    tops = {dtype: ceilings(device, DTYPES[dtype]) for dtype in dtypes}
    rows: list[Row] = []
    todo = [(*named_case, dtype) for named_case in cases for dtype in dtypes]
    for done, (op, name, case, dtype) in enumerate(todo):
        progress(done, len(todo), f"{op} {name} {dtype}")
        drawn, selected = inputs(case, DTYPES[dtype], device), [way for way in WAYS[op] if not ways or way.name in ways]
        head = {"op": op, "shape": name, "dtype": dtype}
        for row in _rows(drawn, selected, repeats or REPEATS[kind], BUDGET[kind], tops[dtype]):
            rows.append(head | row)
            sink(rows[-1])
        # Free the inputs before the next shape's are drawn.
        del drawn
    title = "WarpFold operations: ms are medians, interleaved; backward is the backward pass alone"
    left_out = [f"{op} {name}" for op, name, case in named if (op, name, case) not in cases]
    return report_of(title, device, tops, rows) | {"left_out": left_out}


def report_of(what: str, device: torch.device, tops: Mapping[str, Ceilings], rows: list[Row]) -> dict[str, Any]:
    """Assemble a report of rows, the machine and its peak throughput by dtype."""
    return {
        "what": what,
        "date": datetime.date.today().isoformat(),
        "machine": describe(device),
        "ceilings": {
            dtype: {
                "tflops": top.flops / 1e12,
                "gb_per_s": top.bytes / 1e9,
                "gexp_per_s": top.exps and top.exps / 1e9,
                "how": top.how,
            }
            for dtype, top in tops.items()
        },
        "rows": rows,
    }


def _fits(case: OpCase, kind: str) -> bool:
    return case.logits <= MAX_LOGITS[kind] and case.rows * case.length * (case.channels or 1) <= MAX_ELEMENTS[kind]


def _rows(given: OpInputs, ways: Sequence[Way], repeats: int, budget: float, top: Ceilings) -> Iterator[Row]:
    """Time the implementations for these inputs, and yield a row for each implementation and pass."""
    notes = {way.name: way.unsupported_reason(given) or too_large(way, given) for way in ways}
    subjects = [way.make(given) for way in ways if notes[way.name] is None]
    times = measure(subjects, given.grad.device, repeats, budget)
    passes: tuple[tuple[Pass, str], ...] = (("forward", "forward"), ("backward", "both"))
    for way in ways:
        if note := notes[way.name] or times[way.name].failed:
            yield {"way": way.name, "note": note}
            continue
        for direction, run in passes:
            if (seconds := times[way.name].median(direction)) is None:
                continue
            ideal, peak = cost(given.case, direction, given.grad.element_size()), times[way.name].peaks.get(run)
            plain = times.get("definition", Times()).median(direction)
            yield {
                "way": way.name,
                "pass": direction,
                "ms": seconds * 1e3,
                "times_definition": plain / seconds if plain else None,
                "tflops": ideal.flops / seconds / 1e12,
                "gb_per_s": ideal.bytes / seconds / 1e9,
                "limit_ms": top.limit(ideal) * 1e3,
                "share_of_limit": top.limit(ideal) / seconds,
                "peak_mib": None if peak is None else peak / 2**20,
                "repeats": times[way.name].repeats,
                "note": "",
            }


def table(rows: Iterable[Row], columns: Columns = COLUMNS) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Format rows as the heads and lines of a table. The note of a failed run is its reason."""
    shown = {name: form for name, (head, form) in columns.items() if head is not None}
    lines = [
        tuple("" if row.get(name) is None else format(row[name], form) for name, form in shown.items()) for row in rows
    ]
    return tuple(head for head, _ in columns.values() if head is not None), lines


def write_csv(report: dict[str, Any], path: Path, columns: Iterable[str] = COLUMNS) -> None:
    """Write the rows as CSV with additional columns for the machine and the date.

    Raises UserError if the file cannot be written.
    """
    machine = "; ".join(f"{key} {value}" for key, value in report["machine"].items())
    rows = (row | {"date": report["date"], "machine": machine} for row in report["rows"])
    write_atomically(path, as_csv((*columns, "date", "machine"), rows))


# Okabe and Ito's colours, which colour-blind people can distinguish, and markers for prints without colour.
STYLES = {
    "definition": ("#000000", "o"),
    "compile": ("#E69F00", "s"),
    "sdpa": ("#56B4E9", "^"),
    "sdpa-materialised": ("#0072B2", "v"),
    "trifast": ("#009E73", "P"),
    "cuequivariance": ("#CC79A7", "X"),
    "flash-attn": ("#8C6BB1", "D"),
    "ours": ("#D55E00", "*"),
}
# Inches.
PANEL = (3.6, 2.9)


def picture(report: dict[str, Any], path: Path) -> None:
    """Draw milliseconds over size with a panel for each kind of shape and pass, in the format of the file's ending.

    Raises UserError if nothing was measured, or for an ending that matplotlib does not know.
    """
    from matplotlib.figure import Figure

    panels: dict[tuple[str, str, str], dict[str, list[Row]]] = {}
    for row in report["rows"]:
        if "ms" in row:
            panel = panels.setdefault((row["op"], row["shape"].partition(":")[0], row["dtype"]), {})
            panel.setdefault(row["pass"], []).append(row)
    if not panels:
        raise UserError(f"--plot {path}: nothing was measured, so there is nothing to draw")
    figure = Figure(figsize=(2 * PANEL[0], PANEL[1] * len(panels) + 1.3), layout="constrained")
    ending = path.suffix.lstrip(".").lower()
    if ending not in figure.canvas.get_supported_filetypes():
        raise UserError(f"--plot {path}: unknown format. Pass a name that ends in .png, .pdf or .svg.")
    axes = figure.subplots(len(panels), 2, squeeze=False, sharey="row")
    for line, (panel_key, by_pass) in zip(axes, panels.items()):
        for axis, direction in zip(line, ("forward", "backward")):
            _panel(axis, by_pass.get(direction, []), f"{', '.join(panel_key)}: {direction}")
        line[0].set_ylabel("milliseconds")
    handles = {label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    machine = report["machine"]
    figure.suptitle(f"{machine['device']}, torch {machine['torch']}, {report['date']}", fontsize=9)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=150, format=ending)
    write_atomically(path, drawn.getvalue())


def _panel(axis: Any, rows: list[Row], title: str) -> None:
    from matplotlib.ticker import LogLocator

    names = {row["shape"]: row["shape"].partition(":")[2] for row in rows}
    # N, or sequences x residues.
    size = {shape: math.prod(map(int, name.split("x"))) for shape, name in names.items()}
    for way, (colour, marker) in STYLES.items():
        if points := sorted((size[row["shape"]], row["ms"]) for row in rows if row["way"] == way):
            top, large = (3, 9) if way == "ours" else (2, 5)
            axis.plot(
                *zip(*points), color=colour, marker=marker, markersize=large, linewidth=1.3, label=way, zorder=top
            )
    limits = sorted({(size[row["shape"]], row["limit_ms"]) for row in rows})
    axis.plot(*zip(*limits), color="0.45", linestyle="--", marker="_", linewidth=1, label="limit of the device")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(list(size.values()), list(names.values()), fontsize=8)
    axis.minorticks_off()
    low, high = axis.get_ylim()
    axis.yaxis.set_major_locator(LogLocator(subs=(1,) if high > 300 * low else (1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.3)
    axis.set_xlabel("sequences x residues" if any("x" in name for name in names.values()) else "N", fontsize=8)
    axis.set_title(title, fontsize=9)
