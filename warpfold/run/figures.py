"""Draw the figures of a report: each function returns one SVG text, to be put into an HTML page.

Colours are safe for the colour-blind and get lighter in the order of what they mean, so that a grey print is legible.
"""

import io
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

INK, GREY, RULE, BLUE, AMBER = "#1c2733", "#66717d", "#d5dbe1", "#1f6fb4", "#d9820f"

# pLDDT's four classes as AlphaFold DB names them: lower bound, colour, name.
CLASSES = (
    (90.0, "#1750ac", "very high"),
    (70.0, "#5ba5de", "confident"),
    (50.0, "#f0a93b", "low"),
    (0.0, "#f7d9a0", "very low"),
)

# Colours of chains, in turn: Okabe and Ito's, which the colour-blind tell apart (https://jfly.uni-koeln.de/color/);
# first those that are least like the colours of pLDDT.
CHAIN_COLORS = ("#009e73", "#cc79a7", "#0072b2", "#e69f00", "#d55e00", "#56b4e9", "#8a7500", "#5c6770")
NAMED = (
    0.018  # the share of an axis that a chain must have, for each letter of its name and one more, to be named there
)

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
    "lines.linewidth": 1.6,
}


@dataclass(frozen=True)
class Curve:
    """One line of a training figure: `x` and `y` of equal length; `points` draws markers at the measurements."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    points: bool = False


def plddt_color(value: float) -> str:
    """Return the colour of a pLDDT (0 to 100)."""
    return next((color for bound, color, _ in CLASSES if value >= bound), CLASSES[-1][1])


@mpl.rc_context(STYLE)
def draw_curves(curves: Sequence[Curve], y_label: str, y_range: tuple[float, float] | None = None) -> str:
    """Draw quantities over training steps; a curve of many values is drawn faint, with its running mean over it."""
    figure, axes = _canvas(4.7, 2.8)
    for curve, color, dashes in zip(curves, (BLUE, AMBER, GREY, INK), ("-", "--", "-.", ":")):
        x, y = np.asarray(curve.x, float), np.asarray(curve.y, float)
        window = max(1, len(y) // 25)
        if curve.points or window == 1:
            axes.plot(x, y, dashes, color=color, marker="o", markersize=3.5, label=curve.label)
        else:
            axes.plot(x, y, color=color, alpha=0.22, linewidth=0.8)
            mean = np.convolve(y, np.full(window, 1 / window), "valid")
            axes.plot(x[window - 1 :], mean, dashes, color=color, label=f"{curve.label}, mean of {window}")
    axes.set(xlabel="training step", ylabel=y_label)
    if y_range:
        axes.set_ylim(*y_range)
    _legend(axes)
    _grid(axes)
    return _svg(figure, f"{y_label} over training steps")


@mpl.rc_context(STYLE)
def draw_plddt(plddt: np.ndarray, lddt: np.ndarray | None = None, chains: Mapping[str, slice] | None = None) -> str:
    """Draw pLDDT [N] along the chain over its four classes; `lddt` [N], 0 to 100, is the measured value beside it.

    chains: of a complex, where each is; borders are drawn between them, and the line is interrupted there.
    """
    figure, axes = _canvas(5.0, 2.6)
    residues = np.arange(1, len(plddt) + 1)
    upper = 100.0
    for bound, color, name in CLASSES:
        axes.axhspan(bound, upper, color=color, alpha=0.16, linewidth=0)
        axes.text(1.01, (bound + upper) / 200, name, transform=axes.transAxes, va="center", fontsize=8, color=GREY)
        upper = bound
    for chain in (chains or {"": slice(None)}).values():
        axes.plot(residues[chain], plddt[chain], color=INK, label=None if chain.start else "pLDDT", linewidth=1.5)
    if lddt is not None:
        axes.plot(residues, lddt, "--", color=AMBER, label="lDDT-Cα against the truth", linewidth=1.3)
        _legend(axes, above=1.07 if chains else 1.0)
    axes.set(
        xlabel="residue", ylabel="pLDDT" if lddt is None else "0 to 100", ylim=(0, 100), xlim=(1, max(2, len(plddt)))
    )
    if chains:
        axes.set_xlabel("residue, counted through all chains")
        _mark_chains(axes, chains, INK)
    return _svg(figure, f"pLDDT along the chain{'s' if chains else ''}, mean {float(np.mean(plddt)):.1f}")


@mpl.rc_context(STYLE)
def draw_pae(pae: np.ndarray, chains: Mapping[str, slice] | None = None) -> str:
    """Draw the predicted aligned error [N, N] in angstrom; dark is sure.  Rows: aligned on; columns: scored.

    chains: of a complex, where each is; borders are drawn between them.
    """
    figure, axes = _canvas(3.5, 2.9)
    size = len(pae)
    image = axes.imshow(
        pae, cmap="Blues_r", vmin=0, vmax=32, interpolation="nearest", extent=(0.5, size + 0.5, size + 0.5, 0.5)
    )
    axes.set(xlabel="scored residue", ylabel="aligned residue")
    _mark_chains(axes, chains or {}, AMBER, rows=True)
    bar = figure.colorbar(image, ax=axes, shrink=0.9, pad=0.03)
    bar.set_label("expected position error (Å)")
    bar.outline.set_visible(False)
    return _svg(figure, f"predicted aligned error, mean {float(np.mean(pae)):.1f} angstrom")


@mpl.rc_context(STYLE)
def draw_improvement(
    names: Sequence[str], before: Sequence[float], after: Sequence[float], score: str = "lDDT-Cα"
) -> str:
    """Draw a score (0 to 1) of each protein by the untrained and the trained model, as two dots and a line."""
    order = np.argsort(after)
    figure, axes = _canvas(4.7, 0.9 + 0.26 * len(names))
    rows, b, a = np.arange(len(names)), np.asarray(before, float)[order], np.asarray(after, float)[order]
    axes.hlines(rows, b, a, color=RULE, linewidth=3, zorder=1)
    axes.scatter(b, rows, s=36, facecolor="white", edgecolor=GREY, linewidth=1.4, zorder=2, label="untrained")
    axes.scatter(a, rows, s=40, color=BLUE, zorder=3, label="trained")
    axes.set(xlabel=score, xlim=(0, 1), ylim=(-0.7, len(names) - 0.3))
    axes.set_yticks(rows, [names[i] for i in order])
    axes.tick_params(axis="y", length=0)
    _legend(axes)
    _grid(axes, "x")
    return _svg(figure, f"{score} of each held-out example, untrained and trained")


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
    if form == "png":
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=160)
        return buffer.getvalue()
    return _svg(figure, "memory of a device over the run, by what holds it").encode()


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
def draw_trace(
    ca: np.ndarray, plddt: np.ndarray, truth: np.ndarray | None = None, chains: Mapping[str, slice] | None = None
) -> str:
    """Draw the Cα trace [N, 3] in a plane, coloured by pLDDT, over `truth` [M, 3] in grey, for print.

    chains: of a complex, where each is.
    """
    figure, axes = _canvas(3.8, 3.4)
    center = ca.mean(0)
    _, _, turn = np.linalg.svd(ca - center, full_matrices=False) if len(ca) > 2 else (0, 0, np.eye(3))
    if truth is not None:
        _draw_chain(axes, (truth - center) @ turn.T, ["#b4bbc3"] * len(truth), 1.4)
    ends = {chain.stop - 1 for chain in (chains or {}).values()}
    _draw_chain(axes, (ca - center) @ turn.T, [plddt_color(v) for v in plddt], 2.6, ends)
    axes.set_aspect("equal")
    axes.autoscale_view()
    axes.set_axis_off()
    return _svg(figure, "C-alpha trace, coloured by pLDDT")


def _draw_chain(
    axes: Axes, points: np.ndarray, colors: Sequence[str], width: float, ends: Collection[int] = ()
) -> None:
    """Draw a chain, far segments first and paler; segments longer than a peptide bond allows are left out.

    ends: points that are not bonded to the next.
    """
    segments = np.stack([points[:-1], points[1:]], 1)
    depth = segments[:, :, 2].mean(1)
    whole = np.linalg.norm(segments[:, 0] - segments[:, 1], axis=-1) < 5
    order = [i for i in np.argsort(depth) if whole[i] and i not in ends]
    span = max(1e-6, float(np.ptp(depth))) if len(depth) else 1.0
    shade = [0.45 * (1 - (depth[i] - depth.min()) / span) for i in order]
    rgb = [np.asarray(to_rgb(colors[i])) * (1 - s) + s for i, s in zip(order, shade)]
    axes.add_collection(LineCollection(list(segments[order][:, :, :2]), colors=rgb, linewidths=width, capstyle="round"))
    axes.update_datalim(points[:, :2])


def _mark_chains(axes: Axes, chains: Mapping[str, slice], color: str, rows: bool = False) -> None:
    """Draw borders between chains across the x axis (and the y axis, with `rows`), and their names above the plot."""
    left, right = axes.get_xlim()
    width = min(0.8, 8 / max(1, len(chains)))  # the borders of many chains must not cover what they part
    for name, chain in chains.items():
        if chain.start:
            for line in (axes.axvline, axes.axhline)[: 2 if rows else 1]:
                line(chain.start + 0.5, color=color, linewidth=width)
        if chain.stop - chain.start >= NAMED * (len(name) + 1) * (right - left):
            middle = ((chain.start + chain.stop + 1) / 2 - left) / (right - left)
            axes.text(middle, 1.015, name, transform=axes.transAxes, ha="center", fontsize=8.5, parse_math=False)


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _legend(axes: Axes, above: float = 1.0) -> None:
    """Put the key above the plot, where it covers nothing."""
    place = (-0.01, above)
    axes.legend(fontsize=8.5, ncols=3, frameon=False, loc="lower left", bbox_to_anchor=place, borderaxespad=0.2)


def _grid(axes: Axes, axis: str = "both") -> None:
    axes.grid(True, axis=axis, color=RULE, linewidth=0.5)  # type: ignore[arg-type]
    axes.set_axisbelow(True)


def _svg(figure: Figure, label: str) -> str:
    """Return the figure as an <svg> element that a screen reader can name; no XML prologue, no date."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S)
    return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
