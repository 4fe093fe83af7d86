"""Draw pLDDT, PAE and alignment coverage of a prediction as PNG and SVG files for publications."""

from collections.abc import Mapping

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from warpfold.report.charts import CLASSES, FORMATS, PAE_TOP, Spans, pooled, tick_labels
from warpfold.report.coverage import Coverage
from warpfold.report.figures import GREY, INK, STYLE, as_file


def draw_figures(
    plddt: np.ndarray, pae: np.ndarray | None, coverage: Coverage | None, chains: Spans
) -> dict[str, bytes]:
    """Draw all figures of a prediction of N residues.

    plddt: [N], 0 to 100; pae: [N, N], angstrom; chains: the residues of each chain of a complex, empty for one chain.
    Returns the content of each file by its suffix, such as "plddt.svg". Missing data have no figure.
    """
    with mpl.rc_context({**STYLE, "axes.spines.top": True, "axes.spines.right": True}):
        figures = {"plddt": _draw_plddt(plddt, chains)}
        if pae is not None:
            figures["pae"] = _draw_pae(pae, chains)
        if coverage is not None:
            figures["coverage"] = _draw_coverage(coverage, chains)
        labels = {"plddt": "pLDDT by residue", "pae": "predicted aligned error", "coverage": "alignment coverage"}
        return {
            f"{name}.{form}": as_file(figure, labels[name], form)
            for name, figure in figures.items()
            for form in FORMATS
        }


def _draw_plddt(plddt: np.ndarray, chains: Spans) -> Figure:
    figure = Figure(figsize=(6.4, 2.8))
    axes = figure.add_axes((0.1, 0.18, 0.88, 0.72))
    upper = 100.0
    for bound, color, label in CLASSES:
        axes.axhspan(max(bound, 0.0), upper, color=color, alpha=0.22, linewidth=0, label=label)
        upper = bound
    axes.plot(np.arange(1, len(plddt) + 1), plddt, color=INK, linewidth=1.1)
    axes.set(ylabel="pLDDT", ylim=(0, 100), xlim=(0.5, len(plddt) + 0.5), yticks=[0, 50, 70, 90, 100])
    _label_residues(axes, chains, len(plddt), "x")
    axes.set_title(f"mean pLDDT {float(np.mean(plddt)):.1f}", fontsize=9.5, loc="left")
    return figure


def _draw_pae(pae: np.ndarray, chains: Spans) -> Figure:
    figure = Figure(figsize=(4.8, 3.8))
    axes, end = figure.add_axes((0.14, 0.15, 0.65, 0.82)), len(pae) + 0.5
    image = axes.imshow(
        pooled(pae), "Greens_r", vmin=0, vmax=PAE_TOP, extent=(0.5, end, end, 0.5), interpolation="nearest"
    )
    _label_residues(axes, chains, len(pae), "x", "scored residue")
    _label_residues(axes, chains, len(pae), "y", "aligned residue")
    figure.colorbar(image, cax=figure.add_axes((0.83, 0.2, 0.035, 0.72)), label="expected position error (Å)")
    return figure


def _draw_coverage(coverage: Coverage, chains: Spans) -> Figure:
    """Draw the rows by identity with the query, and the depth as a line, as ColabFold does."""
    figure = Figure(figsize=(6.4, 3.2))
    axes, residues = figure.add_axes((0.12, 0.15, 0.74, 0.77)), len(coverage.depth)
    identity = np.ma.masked_equal(coverage.rows.astype(float), 0) - 1
    image = axes.imshow(
        identity,
        ListedColormap(mpl.colormaps["rainbow_r"](np.linspace(0, 1, 26))),
        vmin=0,
        vmax=100,
        extent=(0.5, residues + 0.5, 0, coverage.total),
        aspect="auto",
        interpolation="nearest",
    )
    axes.step(np.arange(1, residues + 1), coverage.depth, where="mid", color=INK, linewidth=1)
    axes.set(ylabel="alignment rows", ylim=(0, max(1, coverage.total)))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    _label_residues(axes, chains, residues, "x")
    figure.colorbar(image, cax=figure.add_axes((0.89, 0.15, 0.025, 0.77)), label="identity with the query (%)")
    rows = "1 alignment row" if coverage.total == 1 else f"{coverage.total:,} alignment rows"
    axes.set_title(rows, fontsize=9.5, loc="left")
    return figure


def _label_residues(axes: Axes, chains: Mapping[str, slice], residues: int, axis: str, label: str = "residue") -> None:
    """Label residues by their numbers within the chains, mark chain starts by chain names, and draw the borders."""
    positions, names = zip(*((position + 0.5, name) for position, name in tick_labels(chains, residues, 260.0)))
    (axes.set_xticks if axis == "x" else axes.set_yticks)(positions, names)
    (axes.set_xlabel if axis == "x" else axes.set_ylabel)(label)
    for span in chains.values():
        if span.start:
            (axes.axvline if axis == "x" else axes.axhline)(span.start + 0.5, color=GREY, linewidth=0.8)
