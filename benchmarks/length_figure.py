"""Draw the figure of benchmarks/length.py: measured and estimated memory and time against length."""

import io
from collections.abc import Mapping
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from warpfold.report.charts import CHAIN_COLORS, GREY, RULE
from warpfold.report.figures import STYLE

TITLES = {
    "blocks": "two blocks, true width: measured, lines: planned",
    "whole": "every part, small width: measured, lines: planned",
}
MARKS = "os^Dv*"
GPUS = (24, 40, 80)  # GB


def picture(report: Mapping[str, Any]) -> str:
    """Draw a report as SVG, with dots for measurements and lines for estimates."""
    with mpl.rc_context(STYLE):
        return _drawn(report)


def _drawn(report: Mapping[str, Any]) -> str:
    plans = list(dict.fromkeys(row["plan"] for row in (*report["results"], *report["planned"])))
    look = {plan: (color, mark) for plan, color, mark in zip(plans, CHAIN_COLORS, MARKS)}
    models = [name for name in TITLES if any(row["model"] == name for row in report["results"])]
    figure = Figure(figsize=(8.6, 2.7 * (len(models) + 1)), layout="constrained")
    grid = figure.subplots(len(models) + 1, 2, squeeze=False)
    for axes, model in zip(grid, models):
        rows = [row for row in report["results"] if row["model"] == model]
        for place, what, unit, label in (
            (axes[0], "bytes", 1e9, "peak memory (GB)"),
            (axes[1], "seconds", 1, "seconds"),
        ):
            for plan, (color, mark) in look.items():
                some = [row for row in rows if row["plan"] == plan and "failed" not in row]
                x = [row["residues"] for row in some]
                seen = [row["peak_bytes" if what == "bytes" else "seconds"] / unit for row in some]
                place.plot(x, seen, mark, color=color, markersize=4.5, label=plan)
                place.plot(x, [row[f"planned_{what}"] / unit for row in some], "-", color=color, linewidth=1.1)
            _axes(place, label, TITLES[model])
    memory, seconds = grid[-1]
    for plan, (color, _) in look.items():
        some = [row for row in report["planned"] if row["plan"] == plan and "failed" not in row]
        x = [row["residues"] for row in some]
        memory.plot(x, [row["peak_bytes"] / 1e9 for row in some], color=color, label=plan)
        seconds.plot(x, [row["seconds"] for row in some], color=color, label=plan)
    for size in GPUS:
        memory.axhline(size, color=GREY, linewidth=0.8, linestyle=":")
        place = {"transform": memory.get_yaxis_transform(), "va": "center"}
        memory.text(1.005, size, f"{size} GB", fontsize=7.5, color=GREY, **place)
    _axes(memory, "peak memory (GB)", "monomer, 512 + 1,024 rows, bf16: the plan's figure")
    _axes(seconds, "seconds of a pass", "the same, modelled for an A100")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False, fontsize=8.5)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def _axes(axes: Axes, label: str, title: str) -> None:
    axes.set(xscale="log", yscale="log", ylabel=label, xlabel="residues")
    axes.set_title(title, fontsize=9, loc="left")
    ticks = [n for n in (128, 256, 512, 1024, 2048, 4096, 10_000) if axes.get_xlim()[0] <= n <= axes.get_xlim()[1]]
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(True, color=RULE, linewidth=0.5)
    axes.set_axisbelow(True)
