"""The bench's rows as a picture: milliseconds over size, a panel for each kind of shape and pass."""

import io
import math
from pathlib import Path
from typing import Any

from warpfold.errors import UserError
from warpfold.files import write_atomically

# Okabe and Ito's colours, told apart by the colour-blind and, with the markers, in print without colour.
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
PANEL = (3.6, 2.9)  # inches

Row = dict[str, Any]


def picture(found: dict[str, Any], path: Path) -> None:
    """Draw what `bench_ops.bench` returned; the file's ending says as what (PNG, PDF, SVG).

    Errors: UserError where nothing was measured, or for an ending that matplotlib does not know.
    """
    from matplotlib.figure import Figure

    rows = [row for row in found["rows"] if "ms" in row]
    panels = list(dict.fromkeys((r["op"], r["shape"].partition(":")[0], r["dtype"]) for r in rows))
    if not panels:
        raise UserError("nothing was measured, so there is nothing to draw")
    height = PANEL[1] * len(panels) + 1.3
    figure = Figure(figsize=(2 * PANEL[0], height), layout="constrained")
    ending = path.suffix.lstrip(".").lower()
    if ending not in figure.canvas.get_supported_filetypes():
        raise UserError(f"--plot {path}: what the file is called must end in .png, .pdf or .svg")
    axes = figure.subplots(len(panels), 2, squeeze=False, sharey="row")
    for line, panel in zip(axes, panels):
        for axis, direction in zip(line, ("forward", "backward")):
            _panel(axis, [r for r in rows if _of(r) == (*panel, direction)], *panel, direction)
        line[0].set_ylabel("milliseconds")
    handles = {label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    machine = found["machine"]
    figure.suptitle(f"{machine['device']}, torch {machine['torch']}, {found['date']}", fontsize=9)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=150, format=ending)
    write_atomically(path, drawn.getvalue())


def _of(row: Row) -> tuple[str, str, str, str]:
    return row["op"], row["shape"].partition(":")[0], row["dtype"], row["pass"]


def _panel(axis: Any, rows: list[Row], op: str, kind: str, dtype: str, direction: str) -> None:
    from matplotlib.ticker import LogLocator

    sizes = {_number(r["shape"]): r["shape"].partition(":")[2] for r in rows}
    for way, (colour, marker) in STYLES.items():
        points = sorted((_number(r["shape"]), r["ms"]) for r in rows if r["way"] == way)
        if points:
            top = 3 if way == "ours" else 2
            size = 9 if way == "ours" else 5
            axis.plot(*zip(*points), color=colour, marker=marker, markersize=size, linewidth=1.3, label=way, zorder=top)
    limits = sorted({(_number(r["shape"]), r["limit_ms"]) for r in rows})
    axis.plot(*zip(*limits), color="0.45", linestyle="--", marker="_", linewidth=1, label="limit of the device")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(list(sizes), list(sizes.values()), fontsize=8)
    axis.minorticks_off()
    low, high = axis.get_ylim()
    axis.yaxis.set_major_locator(LogLocator(subs=(1,) if high > 300 * low else (1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.3)
    across = "sequences x residues" if any("x" in s for s in sizes.values()) else "N"
    axis.set_xlabel(across, fontsize=8)
    axis.set_title(f"{op}, {kind}, {dtype}: {direction}", fontsize=9)


def _number(shape: str) -> float:
    """Where a size stands on the axis: N, or sequences times residues."""
    return math.prod(int(part) for part in shape.partition(":")[2].split("x"))
