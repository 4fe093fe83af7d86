"""Draw the figures of a report: each function returns one SVG text, to be put into an HTML page, or a file.

Colours are safe for the colour-blind and get lighter in the order of what they mean, so that a grey print is legible.
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
LOGO_RESIDUES, LEAST_SHARE = 120, 0.06  # of a logo: letters of a smaller share are not drawn
LOGO_COLORS = {  # acidic, basic, polar, aromatic; the rest is hydrophobic or small
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
    "svg.fonttype": "none",  # text stays text: sharp, small, and found by a search
    "svg.hashsalt": "warpfold",  # the same figure gives the same bytes
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
    "text.parse_math": False,  # a name with $ is no formula
    "lines.linewidth": 1.6,
}


@dataclass(frozen=True)
class Curve:
    """One line of a training figure: `x` and `y` of equal length; `points` draws markers at the measurements."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    points: bool = False


@mpl.rc_context(STYLE)
def draw_curves(
    curves: Sequence[Curve], y_label: str, y_range: tuple[float, float] | None = None, x_label: str = "training step"
) -> str:
    """Draw quantities over training steps; a curve of many values is drawn faint, with its running mean over it."""
    figure, axes = _canvas(4.7, 2.8)
    for curve, color, dashes in zip(curves, cycle((BLUE, AMBER, GREY, INK)), cycle(("-", "--", "-."))):  # 12 looks
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
    """Draw lDDT-Cα and the loss over the steps of a run, from its metrics.jsonl; other: what is validated on."""
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if row["kind"] == "step" and row["loss"] is not None]
    validations = [row for row in rows if row["kind"] == "validation"]

    def curves(key: str) -> list[Curve]:
        parts = (("training", steps, False), (other, validations, True))
        return [Curve(name, [r["step"] for r in some], [r[key] for r in some], points) for name, some, points in parts]

    return draw_curves(curves("lddt_ca"), "lDDT-Cα", (0, 1)), draw_curves(curves("loss"), "loss")


@mpl.rc_context(STYLE)
def draw_logo(shares: np.ndarray) -> str:
    """Draw shares [N, 20] of the amino acids as letters one upon another, each as high as its share.

    Of at most `LOGO_RESIDUES` residues, and those letters that can be seen.
    """
    shown = shares[:LOGO_RESIDUES]
    figure, axes = _canvas(max(3.0, 0.13 * len(shown)), 1.3)
    for place, row in enumerate(shown):
        bottom = 0.0
        for kind in np.argsort(row)[::-1]:
            if (height := float(row[kind])) < LEAST_SHARE:
                break
            letter = TextPath((0, 0), RESTYPES[kind], size=1, prop=FontProperties(weight="bold"))
            box = letter.get_extents()
            turn = Affine2D().translate(-box.x0, -box.y0).scale(0.9 / box.width, height / box.height)
            turn = turn.translate(place + 0.55, bottom)
            axes.add_patch(PathPatch(turn.transform_path(letter), color=LOGO_COLORS[RESTYPES[kind]], linewidth=0))
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
    """Draw a score (0 to 1) of each protein by two models, as two dots and a line; called: what the models are."""
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
    """Draw what the model expects (pLDDT) against the measured lDDT-Cα, both 0 to 100; `each` names what a dot is."""
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


COLORS = (BLUE, AMBER, "#009e73", GREY)  # of sets that are compared, in turn


@mpl.rc_context(STYLE)
def draw_reliability(bins: Mapping[str, Sequence[Mapping[str, float]]], expected: str, true: str, top: float) -> str:
    """Draw mean true values over mean expected ones, bin by bin, and below how many values each bin has.

    bins: by name of what is compared, each with "expected", "true" and "count"; all values from 0 to `top`.
    """
    figure = Figure(figsize=(3.5, 3.7), layout="constrained")
    axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(5, 1))
    axes.plot([0, top], [0, top], ":", color=GREY, linewidth=1)
    for (name, these), color in zip(bins.items(), cycle(COLORS)):
        x, y, count = ([one[key] for one in these] for key in ("expected", "true", "count"))
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
    """Draw which share of the targets scores at least as much (0 to 1), a line for each set."""
    figure, axes = _canvas(4.7, 2.9)
    for (name, own), color, dashes in zip(values.items(), cycle(COLORS), cycle(("-", "--", "-.", ":"))):
        ordered = np.sort(np.asarray(own, float))
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
    """Draw a score (0 to 1) of each target over something else, a colour for each set; log: of what is across.

    diagonal: what is across is a score, too, and equal ones lie on a line.
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


PALE = 0.45  # of white in what is farthest from the reader
RIM = 2.5  # angstrom that a tube's white rim lies behind it: over what passes farther behind, below what joins it
CATMULL_ROM = np.array([[0, 2, 0, 0], [-1, 0, 1, 0], [2, -5, 4, -1], [-1, 3, -3, 1]]) / 2  # by powers of t


@mpl.rc_context(STYLE)
def draw_prediction(target: Target) -> bytes:
    """Draw a structure coloured by pLDDT, over its truth in grey where that is known, and its PAE; a PNG on white."""
    figure = Figure(figsize=(7.4, 3.3), layout="constrained")
    left = figure.add_subplot(1, 1 if target.pae is None else 2, 1)
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
    strokes: list[tuple[float, Any, Any, float]] = []  # depth, points, colour, width
    for depth, (curve, color, width) in zip(depths, tubes):
        white = PALE * (nearest - depth) / max(1e-6, nearest - farthest)
        strokes.append((depth, curve[:, :2], 1 - (1 - np.array(to_rgb(color))) * (1 - white), width))
        strokes.append((depth - RIM, curve[:, :2], "white", width + 2.5))
    strokes.sort(key=lambda stroke: stroke[0])
    _, lines, colors, widths = zip(*strokes) if strokes else ((), (), (), ())
    left.add_collection(LineCollection(lines, colors=colors, linewidths=widths, capstyle="round"))
    left.margins(0.04)
    left.autoscale()
    left.set_aspect("equal")
    left.set_axis_off()
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
    return _as_file(figure, "", "png")


def _tube(ca: np.ndarray, ends: Collection[int]) -> Iterator[tuple[int, np.ndarray]]:
    """Yield for each two bonded Cα [N, 3] the place of the first and the curve [10, 3] between them."""
    joined = [False, *charts.bonded(ca, ends), False]  # each residue to the one before it
    powers = np.linspace(0, 1, 10)[:, None] ** np.arange(4)
    for i in np.flatnonzero(joined[1:-1]).tolist():
        before = ca[i - 1] if joined[i] else 2 * ca[i] - ca[i + 1]
        after = ca[i + 2] if joined[i + 2] else 2 * ca[i + 1] - ca[i]
        yield i, powers @ CATMULL_ROM @ np.stack([before, ca[i], ca[i + 1], after])


# What holds memory, from the bottom of the picture: what stays, then what comes and goes; others are grey.
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
    """Draw how many bytes each owner holds over a run, stacked, below the line of what is free; an SVG or a PNG.

    course: moments in order, by name of what runs, with the bytes of each owner then.
    """
    figure, axes = _canvas(7.4, 3.6)
    there = {name for _, owners in course for name, held in owners.items() if held}
    names = [*(name for name in OWNER_COLORS if name in there), *sorted(there - set(OWNER_COLORS))]
    moments = np.arange(len(course) + 1)
    whole = max((sum(owners.values()) for _, owners in course), default=0)
    size, unit = (1e9, "GB") if whole >= 1e8 else (1e6, "MB")
    layers = np.array([[owners.get(name, 0) / size for _, owners in course] for name in names])
    layers = np.concatenate([layers, layers[:, -1:]], 1)  # each moment lasts until the next
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
    _name_moments(axes, [name for name, _ in course])
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    _grid(axes, "y")
    return _as_file(figure, "memory of a device over the run, by what holds it", form)


def _name_moments(axes: Axes, names: Sequence[str]) -> None:
    """Write below a picture which stack or part of the model runs when: the longest first, where there is room."""
    parts = [name.split(".")[0] for name in names]
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


@mpl.rc_context(STYLE)
def draw_seconds(residues: Sequence[int], seconds: Mapping[str, Sequence[float]]) -> str:
    """Draw the seconds that each protein took against its residues, by what took them, both axes by powers."""
    figure, axes = _canvas(4.7, 3.1)
    for (what, taken), color, marker in zip(seconds.items(), (BLUE, AMBER), "os"):
        at_least = np.maximum(np.asarray(taken, float), 1e-3)  # as they are rounded
        axes.scatter(residues, at_least, s=11, color=color, alpha=0.55, linewidth=0, marker=marker, label=what)
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
    """Draw scores of each two of K chains side by side, 0 to 1: title -> [K, K], NaN where one is not known."""
    size = float(np.clip(0.12 * len(names), 3.0, 9.0))
    figure = Figure(figsize=((size + 1.2) * len(matrices), size + 0.9), layout="constrained")
    every = max(1, -(-len(names) // 60))
    for number, (title, values) in enumerate(matrices.items()):
        axes = figure.add_subplot(1, len(matrices), number + 1)
        image = axes.imshow(values, cmap="cividis", vmin=0, vmax=1, interpolation="nearest")
        axes.set_xticks(range(0, len(names), every), names[::every], rotation=90, fontsize=7)
        axes.set_yticks(range(0, len(names), every), names[::every], fontsize=7)
        axes.set_title(title, fontsize=9.5)
        figure.colorbar(image, ax=axes, shrink=0.85)
    return _svg(figure, f"scores of each two of {len(names)} chains")


def _as_file(figure: Figure, label: str, form: str) -> bytes:
    """Render a figure as the bytes of an SVG or a PNG file."""
    if form == "svg":
        return _svg(figure, label).encode()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160)
    return buffer.getvalue()


BESIDE = 0.6  # inches: what stands left of a plot
KEY_HEIGHT = 0.5  # inches: of a key of two rows, for which figures are high enough


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _legend(axes: Axes) -> None:
    """Put the key above the plot, where it covers nothing, in so many columns that it is no wider than the plot.

    A key that is large all the same makes the figure larger, not the plot smaller: one without room is not laid out.
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
    """Return the figure as an <svg> element that a screen reader can name; no XML prologue, no date."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S)
    return text.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1)
