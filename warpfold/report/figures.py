"""Draw the figures of a report with matplotlib. Each function returns an SVG for an HTML page or a file.

Colours are safe for colour-blind readers and ordered by lightness, so that a greyscale print is legible.
"""

import html
import io
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import PathPatch
from matplotlib.textpath import TextPath
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from matplotlib.transforms import Affine2D

from warpfold.geometry.residue import RESTYPES
from warpfold.report import charts
from warpfold.report.charts import GREY, INK, RULE, TRUTH
from warpfold.report.report import KEY, Target

BLUE, AMBER = "#1f6fb4", "#d9820f"
# A sequence logo shows at most this many residues, and no letters with a smaller share.
LOGO_RESIDUES, LEAST_SHARE = 120, 0.06
# Acidic, basic, polar and aromatic residues; the others are hydrophobic or small.
LOGO_COLORS = {
    **dict.fromkeys(RESTYPES, INK),
    **dict.fromkeys("DE", "#c0392b"),
    **dict.fromkeys("KRH", BLUE),
    **dict.fromkeys("STNQC", "#3c8d5a"),
    **dict.fromkeys("FWY", AMBER),
}

STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["Helvetica Neue", "Helvetica", "Arial", "DejaVu Sans"],
    "font.size": 9.5,
    # Text stays text: sharp, small and searchable.
    "svg.fonttype": "none",
    # A fixed salt makes the bytes of a figure reproducible.
    "svg.hashsalt": "warpfold",
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "text.color": INK,
    # A $ in a name does not start a formula.
    "text.parse_math": False,
    "lines.linewidth": 1.6,
}


@dataclass(frozen=True)
class Curve:
    """One line of a training figure. `x` and `y` have equal lengths; `points` draws markers at the measurements."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    points: bool = False


@mpl.rc_context(STYLE)
def draw_curves(
    curves: Sequence[Curve], y_label: str, y_range: tuple[float, float] | None = None, x_label: str = "training step"
) -> str:
    """Draw quantities over training steps. Long curves are drawn faintly, with their running mean on top."""
    figure, axes = _canvas(4.7, 2.8)
    # Four colours and three dash patterns distinguish 12 curves.
    for curve, color, dashes in zip(curves, cycle((BLUE, AMBER, GREY, INK)), cycle(("-", "--", "-."))):
        x, y = np.asarray(curve.x, float), np.asarray(curve.y, float)
        window = max(1, len(y) // 25)
        if curve.points or window == 1:
            axes.plot(x, y, dashes, color=color, marker="o", markersize=3.5, label=curve.label)
        else:
            axes.plot(x, y, color=color, alpha=0.22, linewidth=0.8)
            mean = np.convolve(y, np.full(window, 1 / window), "valid")
            axes.plot(x[window - 1 :], mean, dashes, color=color, label=f"{curve.label}, mean of {window}")
    axes.set(xlabel=x_label, ylabel=y_label)
    if y_range:
        axes.set_ylim(*y_range)
    _legend(axes)
    _grid(axes)
    return _svg(figure, f"{y_label} over {x_label}s")


def draw_training(log: Path, other: str) -> tuple[str, str]:
    """Draw lDDT-Cα and the loss over the steps of a run.

    log: the run's metrics.jsonl.
    other: the legend entry of the validation curve.
    Returns the two figures as SVG.
    """
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if row["kind"] == "step" and row["loss"] is not None]
    validations = [row for row in rows if row["kind"] == "validation"]

    def curves(key: str) -> list[Curve]:
        parts = (("training", steps, False), (other, validations, True))
        return [Curve(name, [r["step"] for r in rows], [r[key] for r in rows], points) for name, rows, points in parts]

    return draw_curves(curves("lddt_ca"), "lDDT-Cα", (0, 1)), draw_curves(curves("loss"), "loss")


@mpl.rc_context(STYLE)
def draw_logo(shares: np.ndarray) -> str:
    """Draw a sequence logo: the letters of each position are stacked, and each is as high as its share.

    shares: [N, 20] in the order RESTYPES. The logo shows the first LOGO_RESIDUES positions.
    """
    shown = shares[:LOGO_RESIDUES]
    figure, axes = _canvas(max(3.0, 0.13 * len(shown)), 1.3)
    for position, row in enumerate(shown):
        bottom = 0.0
        for kind in np.argsort(row)[::-1]:
            if (height := float(row[kind])) < LEAST_SHARE:
                break
            letter = TextPath((0, 0), RESTYPES[kind], size=1, prop=FontProperties(weight="bold"))
            box = letter.get_extents()
            transform = Affine2D().translate(-box.x0, -box.y0).scale(0.9 / box.width, height / box.height)
            transform = transform.translate(position + 0.55, bottom)
            color = LOGO_COLORS[RESTYPES[kind]]
            axes.add_patch(PathPatch(transform.transform_path(letter), color=color, linewidth=0))
            bottom += height
    axes.set(xlim=(0.4, len(shown) + 0.6), ylim=(0, 1), ylabel="share")
    return _svg(figure, "sequence logo")


@mpl.rc_context(STYLE)
def draw_improvement(
    names: Sequence[str],
    before: Sequence[float],
    after: Sequence[float],
    score: str = "lDDT-Cα",
    called: tuple[str, str] = ("untrained", "trained"),
) -> str:
    """Draw a score (0 to 1) of each protein for two models, as two dots joined by a line.

    called: the legend entries of the two models.
    """
    order = np.argsort(after)
    figure, axes = _canvas(4.7, 0.9 + 0.26 * len(names))
    rows, b, a = np.arange(len(names)), np.asarray(before, float)[order], np.asarray(after, float)[order]
    axes.hlines(rows, b, a, color=RULE, linewidth=3, zorder=1)
    axes.scatter(b, rows, s=36, facecolor="white", edgecolor=GREY, linewidth=1.4, zorder=2, label=called[0])
    axes.scatter(a, rows, s=40, color=BLUE, zorder=3, label=called[1])
    axes.set(xlabel=score, xlim=(0, 1), ylim=(-0.7, len(names) - 0.3))
    axes.set_yticks(rows, [names[i] for i in order])
    axes.tick_params(axis="y", length=0)
    _legend(axes)
    _grid(axes, "x")
    return _svg(figure, f"{score} of each held-out example, {called[0]} and {called[1]}")


@mpl.rc_context(STYLE)
def draw_calibration(plddt: Sequence[float], lddt: Sequence[float], each: str) -> str:
    """Draw the predicted pLDDT against the measured lDDT-Cα, both 0 to 100.

    each: the noun for one dot, such as "protein".
    """
    figure, axes = _canvas(3.5, 2.9)
    axes.plot([0, 100], [0, 100], ":", color=GREY, linewidth=1)
    axes.text(6, 2, "as expected", rotation=45, rotation_mode="anchor", fontsize=8, color=GREY)
    size, alpha = (34, 0.9) if len(plddt) <= 40 else (9, 0.45)
    axes.scatter(plddt, lddt, s=size, color=BLUE, alpha=alpha, linewidth=0)
    axes.set(xlabel=f"pLDDT of each {each}", ylabel="measured lDDT-Cα", xlim=(0, 100), ylim=(0, 100), aspect="equal")
    axes.set_xticks(range(0, 101, 25))
    axes.set_yticks(range(0, 101, 25))
    _grid(axes)
    return _svg(figure, f"pLDDT against measured lDDT of each {each}")


# Colours of compared sets.
COLORS = (BLUE, AMBER, "#009e73", GREY)


@mpl.rc_context(STYLE)
def draw_reliability(bins: Mapping[str, Sequence[Mapping[str, float]]], expected: str, true: str, top: float) -> str:
    """Draw a reliability diagram: the mean true value over the mean expected value of each bin, and the bin counts.

    bins: name of the set -> bins with "expected", "true" and "count"; values are between 0 and `top`.
    expected, true: the axis labels.
    """
    figure = Figure(figsize=(3.5, 3.7), layout="constrained")
    axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(5, 1))
    axes.plot([0, top], [0, top], ":", color=GREY, linewidth=1)
    for (name, rows), color in zip(bins.items(), cycle(COLORS)):
        x, y, count = ([row[key] for row in rows] for key in ("expected", "true", "count"))
        axes.plot(x, y, "-", color=color, marker="o", markersize=3.5, label=name)
        below.plot(x, np.asarray(count) / max(1, sum(count)), color=color, drawstyle="steps-mid", linewidth=1.2)
    axes.set(ylabel=true, xlim=(0, top), ylim=(0, top))
    below.set(xlabel=expected, ylabel="share", ylim=(0, None))
    below.set_yticks([])
    if len(bins) > 1:
        _legend(axes)
    _grid(axes)
    return _svg(figure, f"{true} against {expected}")


@mpl.rc_context(STYLE)
def draw_shares(values: Mapping[str, Sequence[float]], score: str) -> str:
    """Draw the share of targets that reach each score (0 to 1), one line for each set."""
    figure, axes = _canvas(4.7, 2.9)
    for (name, scores), color, dashes in zip(values.items(), cycle(COLORS), cycle(("-", "--", "-.", ":"))):
        ordered = np.sort(np.asarray(scores, float))
        share = 1 - np.arange(len(ordered) + 1) / len(ordered)
        axes.step([0, *ordered], share, dashes, where="post", color=color, label=name)
    axes.set(xlabel=score, ylabel="share of targets that reach it", xlim=(0, 1), ylim=(0, 1.02))
    if len(values) > 1:
        _legend(axes)
    _grid(axes)
    return _svg(figure, f"share of targets that reach each {score}")


@mpl.rc_context(STYLE)
def draw_against(
    points: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    labels: tuple[str, str],
    *,
    log: bool = False,
    diagonal: bool = False,
) -> str:
    """Draw a score (0 to 1) of each target against another quantity, one colour for each set.

    points: name of the set -> (x, y).
    log: use a logarithmic x axis.
    diagonal: draw the line x = y, for an x that is a score as well.
    """
    figure, axes = _canvas(3.2 if diagonal else 4.7, 2.9)
    if diagonal:
        axes.plot([0, 1], [0, 1], ":", color=GREY, linewidth=1)
    for (name, (x, y)), color, marker in zip(points.items(), cycle(COLORS), cycle("osD^")):
        size, alpha = (26, 0.8) if len(x) <= 60 else (9, 0.5)
        axes.scatter(x, y, s=size, color=color, alpha=alpha, linewidth=0, marker=marker, label=name)
    axes.set(xlabel=labels[0], ylabel=labels[1], ylim=(0, 1.02))
    if diagonal:
        axes.set(xlim=(0, 1.02), aspect="equal")
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    if len(points) > 1:
        _legend(axes)
    _grid(axes)
    return _svg(figure, f"{labels[1]} against {labels[0]}")


# The share of white in the colour of the farthest residues.
PALE = 0.45
# The distance, in angstrom, of a tube's white rim behind the tube. The rim covers tubes that cross farther behind, but
# not the neighbouring segments.
RIM = 2.5
# Catmull-Rom coefficients, one row for each power of t.
CATMULL_ROM = np.array([[0, 2, 0, 0], [-1, 0, 1, 0], [2, -5, 4, -1], [-1, 3, -3, 1]]) / 2


@mpl.rc_context(STYLE)
def draw_prediction(target: Target) -> bytes:
    """Draw a structure coloured by pLDDT, its known structure in grey and its PAE, as a PNG on white."""
    figure = Figure(figsize=(7.4, 3.3), layout="constrained")
    structure_axes = figure.add_subplot(1, 1 if target.pae is None else 2, 1)
    center, turn = target.ca.mean(0), charts.facing(target.ca)
    ends = [span.stop - 1 for span in target.chains.values()]
    tubes = [
        (curve @ turn.T, charts.CLASSES[charts.plddt_class(target.plddt[place])][1], 5.0)
        for place, curve in _tube(target.ca - center, ends)
    ]
    if target.truth_ca is not None:
        tubes += [(curve @ turn.T, TRUTH, 2.5) for _, curve in _tube(target.truth_ca - center, ())]
    depths = [float(curve[:, 2].mean()) for curve, _, _ in tubes]
    farthest, nearest = min(depths, default=0.0), max(depths, default=0.0)
    # Depth, points, colour, width.
    strokes: list[tuple[float, Any, Any, float]] = []
    for depth, (curve, color, width) in zip(depths, tubes):
        white = PALE * (nearest - depth) / max(1e-6, nearest - farthest)
        strokes.append((depth, curve[:, :2], 1 - (1 - np.array(to_rgb(color))) * (1 - white), width))
        strokes.append((depth - RIM, curve[:, :2], "white", width + 2.5))
    strokes.sort(key=lambda stroke: stroke[0])
    _, lines, colors, widths = zip(*strokes) if strokes else ((), (), (), ())
    structure_axes.add_collection(LineCollection(lines, colors=colors, linewidths=widths, capstyle="round"))
    structure_axes.margins(0.04)
    structure_axes.autoscale()
    structure_axes.set_aspect("equal")
    structure_axes.set_axis_off()
    keys = [Line2D([], [], color=color, linewidth=4, label=KEY[i]) for i, (_, color, _) in enumerate(charts.CLASSES)]
    if target.truth_ca is not None:
        keys.append(Line2D([], [], color=TRUTH, linewidth=2, label="truth"))
    figure.legend(handles=keys, loc="outside lower left", ncols=3, frameon=False, fontsize=8, handlelength=1.2)
    if target.pae is not None:
        right, last = figure.add_subplot(1, 2, 2), len(target.pae) + 0.5
        extent = (0.5, last, last, 0.5)
        image = right.imshow(charts.pooled(target.pae), "Greens_r", vmin=0, vmax=charts.PAE_TOP, extent=extent)
        for end in ends[:-1]:
            right.axhline(end + 1.5, color=INK, linewidth=0.8)
            right.axvline(end + 1.5, color=INK, linewidth=0.8)
        right.set(xlabel="scored residue", ylabel="aligned residue")
        figure.colorbar(image, ax=right, shrink=0.85, label="expected position error, Å")
    return as_file(figure, "", "png")


def _tube(ca: np.ndarray, ends: Collection[int]) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (i, curve [10, 3]) for each bonded pair of Cα atoms i and i + 1 of ca [N, 3]."""
    # joined[i]: whether residue i is bonded to residue i - 1.
    joined = [False, *charts.bonded(ca, ends), False]
    powers = np.linspace(0, 1, 10)[:, None] ** np.arange(4)
    for i in np.flatnonzero(joined[1:-1]).tolist():
        before = ca[i - 1] if joined[i] else 2 * ca[i] - ca[i + 1]
        after = ca[i + 2] if joined[i + 2] else 2 * ca[i + 1] - ca[i]
        yield i, powers @ CATMULL_ROM @ np.stack([before, ca[i], ca[i + 1], after])


# Colours of the memory's owners, from the bottom of the figure: persistent memory first, then temporary memory.
# Other owners are grey.
OWNER_COLORS = {
    "weights": "#5c6770",
    "features": "#b4bbc3",
    "z": "#0072b2",
    "m": "#56b4e9",
    "kept": "#1750ac",
    "extra": "#009e73",
    "templates": "#8a7500",
    "factors": "#e69f00",
    "slices": "#f7d9a0",
    "structure": "#cc79a7",
    "heads": "#d55e00",
    "losses": "#9a3324",
}


@mpl.rc_context(STYLE)
def draw_memory(course: Sequence[tuple[str, Mapping[str, int]]], free: int, form: str = "svg") -> bytes:
    """Draw the memory of each owner over a run as a stack plot, with a line for the free memory.

    course: (name of the running module, owner -> bytes) in temporal order.
    free: bytes.
    form: "svg" or "png".
    """
    figure, axes = _canvas(7.4, 3.6)
    used_owners = {name for _, owners in course for name, held_bytes in owners.items() if held_bytes}
    names = [*(name for name in OWNER_COLORS if name in used_owners), *sorted(used_owners - set(OWNER_COLORS))]
    moments = np.arange(len(course) + 1)
    whole = max((sum(owners.values()) for _, owners in course), default=0)
    size, unit = (1e9, "GB") if whole >= 1e8 else (1e6, "MB")
    layers = np.array([[owners.get(name, 0) / size for _, owners in course] for name in names])
    # Each value lasts until the next, so the last one is repeated.
    layers = np.concatenate([layers, layers[:, -1:]], 1)
    colors = [OWNER_COLORS.get(name, GREY) for name in names]
    axes.stackplot(moments, layers, labels=names, colors=colors, step="post", linewidth=0)
    top = float(layers.sum(0).max())
    shown = free / size <= 3 * top
    if shown:
        axes.axhline(free / size, color=INK, linewidth=1, linestyle="--")
        axes.text(moments[-1], free / size, "free ", ha="right", va="bottom", fontsize=8.5)
    axes.set(
        xlim=(0, max(1, len(course))),
        ylim=(0, 1.08 * max(top, free / size if shown else 0)),
        ylabel=f"{unit} of a device",
    )
    # The longest parts of the model are labelled first, where there is room.
    parts = [name.split(".")[0] for name, _ in course]
    starts = [0, *(i for i in range(1, len(parts)) if parts[i] != parts[i - 1])]
    spans = list(zip(starts, [*starts[1:], len(parts)]))
    places: dict[float, str] = {}
    for start, end in sorted(spans, key=lambda span: span[0] - span[1]):
        middle = (start + end) / 2
        if parts[start] != "model" and all(abs(middle - other) > len(parts) / 24 for other in places):
            places[middle] = parts[start].replace("_", " ")
    axes.set_xticks(list(places), list(places.values()))
    axes.tick_params(axis="x", labelrotation=40, labelsize=8)
    for label in axes.get_xticklabels():
        label.set_horizontalalignment("right")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    _grid(axes, "y")
    return as_file(figure, "memory of a device over the run, by owner", form)


@mpl.rc_context(STYLE)
def draw_seconds(residues: Sequence[int], seconds: Mapping[str, Sequence[float]]) -> str:
    """Draw the seconds of each protein against its number of residues, on logarithmic axes, one colour per stage."""
    figure, axes = _canvas(4.7, 3.1)
    for (stage, values), color, marker in zip(seconds.items(), (BLUE, AMBER), "os"):
        # Rounded times may be 0, which a logarithmic axis cannot show.
        at_least = np.maximum(np.asarray(values, float), 1e-3)
        axes.scatter(residues, at_least, s=11, color=color, alpha=0.55, linewidth=0, marker=marker, label=stage)
    axes.set(xlabel="residues", ylabel="seconds", xscale="log", yscale="log")
    axes.xaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    _legend(axes)
    _grid(axes)
    return _svg(figure, "seconds of each protein against its residues")


@mpl.rc_context(STYLE)
def draw_pairs(names: Sequence[str], matrices: Mapping[str, np.ndarray]) -> str:
    """Draw pairwise scores (0 to 1) of K chains, one matrix next to another.

    matrices: title -> [K, K], NaN where unknown.
    """
    size = float(np.clip(0.12 * len(names), 3.0, 9.0))
    figure = Figure(figsize=((size + 1.2) * len(matrices), size + 0.9), layout="constrained")
    label_step = max(1, -(-len(names) // 60))
    for number, (title, values) in enumerate(matrices.items()):
        axes = figure.add_subplot(1, len(matrices), number + 1)
        image = axes.imshow(values, cmap="cividis", vmin=0, vmax=1, interpolation="nearest")
        axes.set_xticks(range(0, len(names), label_step), names[::label_step], rotation=90, fontsize=7)
        axes.set_yticks(range(0, len(names), label_step), names[::label_step], fontsize=7)
        axes.set_title(title, fontsize=9.5)
        figure.colorbar(image, ax=axes, shrink=0.85)
    return _svg(figure, f"scores of each two of {len(names)} chains")


def as_file(figure: Figure, label: str, form: str) -> bytes:
    """Render a figure as the bytes of an SVG or a PNG file."""
    if form == "svg":
        return _svg(figure, label).encode()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160)
    return buffer.getvalue()


# The width of the labels left of a plot, and the height of a legend of two rows that every figure has room for, inches.
BESIDE = 0.6
KEY_HEIGHT = 0.5


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _legend(axes: Axes) -> None:
    """Put the legend above the plot, with as many columns as fit the width.

    A legend that is still too large enlarges the figure, because matplotlib does not lay out a plot without room.
    """
    figure = axes.figure
    assert isinstance(figure, Figure)
    for columns in (3, 2, 1):
        key = axes.legend(
            fontsize=8.5, ncols=columns, frameon=False, loc="lower left", bbox_to_anchor=(-0.01, 1.0), borderaxespad=0.2
        )
        box = key.get_window_extent()
        if box.width / figure.dpi + BESIDE < figure.get_figwidth():
            break
    figure.set_figwidth(max(figure.get_figwidth(), box.width / figure.dpi + BESIDE))
    figure.set_figheight(figure.get_figheight() + max(0, box.height / figure.dpi - KEY_HEIGHT))


def _grid(axes: Axes, axis: str = "both") -> None:
    axes.grid(True, axis=axis, color=RULE, linewidth=0.5)  # type: ignore[arg-type]
    axes.set_axisbelow(True)


def _svg(figure: Figure, label: str) -> str:
    """Render the figure as an <svg> element with a label for screen readers, without an XML prologue or a date."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S)
    return text.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1)
