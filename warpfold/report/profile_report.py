"""The report of `warpfold profile`: one HTML page of the figures that profile/step_profile.py found."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes

from warpfold.report.figures import AMBER, BLUE, GREY, INK, STYLE, _canvas, _grid, _legend, _svg
from warpfold.report.report import ReportPage, ReportTable, Section

LONGEST = 24  # layers that the figure draws
LINE = 0.07  # of the picture's height, between names
NAMED = 8  # operations that the roofline names, those that take longest
Found = Mapping[str, Any]

SMALLEST = 1e-3  # share of the whole; rows below are summed up in one
SUMMED = (
    "layers", "ms", "forward_ms", "backward_ms", "host_ms", "calls", "launches", "flops", "bytes", "limit_ms",
)  # fmt: skip
LAYER_HEADER = (
    "layer",
    "of them",
    "forward ms",
    "backward ms",
    "ms",
    "of all",
    "GFLOP",
    "MB",
    "launches",
    "of limit",
    "host ms",
)  # fmt: skip; the last on a GPU alone: on a CPU it is the milliseconds again
OP_HEADER = (
    "operation", "pass", "calls", "ms", "of all", "GFLOP", "TFLOP/s", "MB", "GB/s", "launches", "of limit",
)  # fmt: skip
NORM_HEADER = (
    "shape", "operation", "calls", "forward ms", "backward ms", "of all norms", "of the step", "GB/s", "of limit",
)  # fmt: skip


def profile_page(found: Found) -> ReportPage:
    """Return the report of a profile, as `profile_model` returns it."""
    whole, cuda = found["ms"], "device_busy_ms" in found
    rate = found["flops"] / found["step_ms"] / 1e9  # TFLOP/s
    facts = [
        ("ms, without the profiler", _figure(found["step_ms"])),
        ("ms, under the profiler", _figure(found["profiled_ms"])),
        ("GFLOP of products", _figure(found["flops"] / 1e9)),
        ("TFLOP/s", f"{rate:.3g}") if rate >= 1 else ("GFLOP/s", _figure(1e3 * rate)),
        ("launches" if cuda else "operations of torch", f"{found['launches']:,}"),
    ]
    if cuda:
        facts.append(("of the step the GPU waited", f"{found['device_waited']:.0%}"))
    return ReportPage(
        title="Profile of a training step"
        if "step" in found["what"].partition(":")[0]
        else "Profile of a forward pass",
        lead=f"{found['what'].capitalize()}.",
        facts=facts,
        sections=[
            _layers(found, whole, cuda),
            _operations(found, whole),
            _norms(found, whole),
            _host_and_device(found, cuda),
        ],
        footer=[
            f"{found['date']}; " + "; ".join(f"{key} {value}" for key, value in found["machine"].items()),
            f"Rates: {found['ceilings']['tflops']:.3g} TFLOP/s, {found['ceilings']['gb_per_s']:.4g} GB/s; "
            f"{found['ceilings']['how']}.",
            "Products, exponentials and bytes are those of the definitions, counted apart: an operation reads its "
            "arguments and writes its results once, and what is computed again counts once. The optimizer's are not "
            "counted. The limit is the ideal pass: the longer of the time of its bytes and that of its products and "
            "exponentials.",
            *(f"Computed by its definition, {count} times: {what}." for what, count in found["refused"].items()),
        ],
    )


def _layers(found: Found, whole: float, cuda: bool) -> Section:
    rows = found["layers"]
    stacks: dict[str, list[Found]] = {}
    for row in rows:
        stacks.setdefault(row["layer"].partition(".")[0], []).append(row)
    totals = sorted(stacks.items(), key=lambda item: -sum(row["ms"] for row in item[1]))
    sums = ", ".join(f"{name} {sum(row['ms'] for row in of) / whole:.0%}" for name, of in totals[:8])
    text = (
        f"Time of {found['clock']}, each layer without the layers within it; the rows add up to {_figure(whole)} ms. "
        "Layers of equal blocks stand in one row, the numbers of their blocks replaced by *. Backward time is that "
        f"of the layer whose forward pass made the graph. By stack: {sums}."
    )
    caption = f"The {min(LONGEST, len(rows))} kinds of layer that take longest."
    figure = draw_times([row for row in rows if "forward_ms" in row][:LONGEST])
    everything = _sum("all", "layer", rows) | {"limit_ms": found["limit_ms"]}
    table = [_layer_row(row, whole, cuda) for row in [*_long(rows, "layer", whole), everything]]
    header = LAYER_HEADER if cuda else LAYER_HEADER[:-1]
    return Section("Layers", text, [(figure, caption)], ReportTable(header, table))


def _long(rows: Sequence[Found], name: str, whole: float) -> list[Found]:
    """Return the rows that take a share worth a line, and one for all others."""
    kept = [row for row in rows if row["ms"] >= SMALLEST * whole]
    others = [row for row in rows if row["ms"] < SMALLEST * whole]
    return [*kept, _sum(f"{len(others)} more, each below {SMALLEST:.1%}", name, others)] if others else kept


def _sum(what: str, name: str, rows: Sequence[Found]) -> dict[str, Any]:
    """Return one row for several."""
    found: dict[str, Any] = {field: sum(row.get(field, 0) for row in rows) for field in SUMMED}
    found |= {name: what, "pass": "", "ours": False, "tflops": None, "gb_per_s": None}
    return found | {"share_of_limit": found["limit_ms"] / found["ms"] if found["ms"] else None}


def _figure(value: float) -> str:
    """Return a number with four digits, and with all of its whole ones."""
    return f"{value:,.0f}" if value >= 1e3 else f"{value:.4g}"


def _ms(value: float, whole: float) -> str:
    """Return milliseconds with as many decimals as a thousandth of the whole has."""
    return f"{value:.{max(0, 3 - int(math.log10(max(whole, 1e-9))))}f}"


def _layer_row(row: Found, whole: float, cuda: bool) -> list[str]:
    passes = [_ms(row[name], whole) if name in row else "" for name in ("forward_ms", "backward_ms")]
    return [
        *(row["layer"], str(row["layers"]), *passes, _ms(row["ms"], whole), f"{row['ms'] / whole:.1%}"),
        *(_giga(row["flops"]), _mega(row["bytes"]), str(row["launches"]), _share(row)),
        *([_ms(row["host_ms"], whole)] if cuda else []),
    ]


def _operations(found: Found, whole: float) -> Section:
    text = (
        "Ours first read their arguments once and write their results once, at best; of torch's own each reads and "
        "writes what it is given. A row of torch's operations has those that run outside of ours. Rows add up to "
        f"{_figure(whole)} ms."
    )
    table = [
        [
            row["op"] if not row["ours"] else f"{row['op']} (ours)",
            *(row["pass"], str(row["calls"] or ""), _ms(row["ms"], whole), f"{row['ms'] / whole:.1%}"),
            *(_giga(row["flops"]), _number(row["tflops"] if row["flops"] else None)),
            *(_mega(row["bytes"]), _number(row["gb_per_s"] if row["bytes"] else None)),
            *(str(row["launches"]), _share(row)),
        ]
        for row in _long(found["operations"], "op", whole)
    ]
    caption = (
        "Each circle is an operation and a pass, its area the time. The line is what the device can do: by its "
        "bandwidth on the left, by its products on the right. Operations without products are not drawn."
    )
    return Section("Operations", text, [(draw_roofline(found), caption)], ReportTable(OP_HEADER, table))


def _norms(found: Found, whole: float) -> Section:
    text = (
        "Every operation that normalises, by the shape of its operand. `norm_linear` multiplies as well, and that time "
        "is in it; a norm within a transition is in the transition's row above."
    )
    table = [
        [
            f"[{', '.join(map(str, row['shape']))}]",
            *(row["op"], str(row["calls"]), _ms(row["forward_ms"], whole), _ms(row["backward_ms"], whole)),
            *(f"{row['share_of_norms']:.1%}", f"{row['ms'] / whole:.1%}", _number(row["gb_per_s"]), _share(row)),
        ]
        for row in found["norms"]
    ]
    return Section("LayerNorm by shape", text, (), ReportTable(NORM_HEADER, table))


def _host_and_device(found: Found, cuda: bool) -> Section:
    share, slower = found["outside_operations"], found["profiled_ms"] / found["step_ms"]
    said = [
        f"Without the profiler a run took {_figure(found['step_ms'])} ms (median of {len(found['step_runs_ms'])}), "
        f"and under it {_figure(found['profiled_ms'])} ms, {slower:.2f} times as long: what the profiler costs lies "
        "mostly in the time of small operations.",
        f"Of the host's time {share:.0%} was spent outside of operations, in Python and in autograd's graph.",
    ]
    if cuda:
        said.append(
            f"The device was busy for {_figure(found['device_busy_ms'])} ms: for {found['device_waited']:.0%} of a run "
            "without the profiler it waited for the host."
        )
    return Section("Host and device", " ".join(said))


def _giga(flops: float) -> str:
    return "" if not flops else f"{flops / 1e9:.3g}" if flops >= 1e6 else "< 0.001"


def _mega(count: float) -> str:
    return "" if not count else f"{count / 1e6:.3g}" if count < 1e8 else f"{count / 1e6:.0f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value >= 1e-3 else "< 0.001"


def _share(row: Found) -> str:
    return f"{row['share_of_limit']:.0%}" if row["share_of_limit"] and row["limit_ms"] else ""


@mpl.rc_context(STYLE)
def draw_times(rows: Sequence[Found]) -> str:
    """Draw the milliseconds of layers as bars, forward and backward end to end."""
    figure, axes = _canvas(8.6, 0.5 + 0.24 * max(3, len(rows)))
    places = range(len(rows))
    forward, backward = ([row[f"{which}_ms"] for row in rows] for which in ("forward", "backward"))
    axes.barh(places, forward, color=BLUE, height=0.72, label="forward")
    axes.barh(places, backward, left=forward, color=AMBER, height=0.72, label="backward")
    axes.set_yticks(places, [row["layer"] for row in rows], parse_math=False)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.tick_params(axis="y", length=0)
    _legend(axes)
    _grid(axes, "x")
    return _svg(figure, "milliseconds of each kind of layer")


@mpl.rc_context(STYLE)
def draw_roofline(found: Found) -> str:
    """Draw what operations reach over their products per byte, below what the device can do."""
    figure, axes = _canvas(8.0, 4.2)
    rows = [row for row in found["operations"] if row["flops"] and row["bytes"] and row["ms"] and row["tflops"]]
    rate, bandwidth = found["ceilings"]["tflops"], found["ceilings"]["gb_per_s"] / 1e3
    intensity = [row["flops"] / row["bytes"] for row in rows]
    low, high = min([0.5, *intensity]) / 2, max([4 * rate / bandwidth, *intensity]) * 2
    ridge = rate / bandwidth
    axes.plot([low, ridge, high], [low * bandwidth, rate, rate], color=INK, linewidth=1.2)
    largest = max([row["ms"] for row in rows], default=1.0)
    for which, color in (("forward", BLUE), ("backward", AMBER)):
        chosen = [(x, row) for x, row in zip(intensity, rows) if row["pass"] == which]
        sizes = [12 + 600 * row["ms"] / largest for _, row in chosen]
        x, y = [x for x, _ in chosen], [row["tflops"] for _, row in chosen]
        axes.scatter(x, y, s=sizes, color=color, alpha=0.55, linewidth=0, label=which)
    axes.set(xscale="log", yscale="log", xlabel="FLOP of products per byte", ylabel="TFLOP/s")
    _name_largest(axes, sorted(zip(intensity, rows), key=lambda pair: -pair[1]["ms"])[:NAMED])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    axes.text(high, rate * 1.06, f"{rate:.3g} TFLOP/s", ha="right", va="bottom", fontsize=8, color=GREY)
    axes.text(low * 1.6, low * bandwidth * 1.1, f"{1e3 * bandwidth:.4g} GB/s", fontsize=8, color=GREY, va="top")
    key = axes.legend(fontsize=8.5, ncols=2, frameon=False, loc="lower left", bbox_to_anchor=(-0.01, 1.0))
    for handle in key.legend_handles:
        if handle is not None:
            handle.set_sizes([40])  # type: ignore[attr-defined]
    _grid(axes)
    return _svg(figure, "products per second over products per byte")


def _name_largest(axes: Axes, circles: Sequence[tuple[float, Found]]) -> None:
    """Write the names of circles (FLOP per byte, row) in a column on the right, each with a line to its circle."""
    ordered = sorted(circles, key=lambda circle: -circle[1]["tflops"])
    heights = [
        axes.transAxes.inverted().transform(axes.transData.transform((x, row["tflops"])))[1] for x, row in ordered
    ]
    free = 1.0
    for height, (x, row) in zip(heights, ordered):
        # As high as its circle where there is room: below those before it, above room for those that follow.
        following = len(ordered) - 1 - ordered.index((x, row))
        free = max(min(free, height), following * LINE)
        axes.annotate(
            f"{row['op']}, {row['pass']}", (x, row["tflops"]), (1.02, free), textcoords="axes fraction", va="center",
            fontsize=7.5, color=INK, parse_math=False, annotation_clip=False,
            arrowprops={"arrowstyle": "-", "relpos": (0, 0.5), "color": GREY, "linewidth": 0.5},
        )  # fmt: skip
        free -= LINE
