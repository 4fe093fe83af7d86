"""Draw the curves of training runs as one HTML page that needs nothing else, and reloads itself while they go on."""

import html
import json
import math
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from warpfold.errors import UserError
from warpfold.files import write_atomically, writing
from warpfold.report.curves import Points, RunLog, differing, is_number, left_out, means

TEMPLATE = Path(__file__).parent / "curves.html"
OWN = '<meta name="generator" content="warpfold watch">'  # near the beginning of a page that may be replaced
COLORS = 6  # of runs, in turn; the page has them, for light and for dark
FINE, SMOOTH = 400, 60  # points of a curve, and of the one through their means
WIDE, HIGH, LEFT, RIGHT, TOP, BOTTOM = 640, 240, 58, 12, 12, 24  # of a chart, and its margins

# What is drawn of steps, if it is there: the name in the log, and on the page.
CHARTS = {
    "loss": "loss",
    "lddt_ca": "lDDT-Cα of the crops trained on",
    "grad_norm": "norm of the gradient, before clipping",
    "learning_rate": "learning rate",
    "samples_per_second": "samples per second",
    "waiting": "share of a step spent waiting for data",
}
HELD_OUT = {
    "loss": "loss of held-out examples",
    "lddt_ca": "lDDT-Cα of held-out examples",
    "interface_lddt": "lDDT-Cα between chains, held out",
    "dockq": "DockQ of held-out interfaces",
}


@dataclass(frozen=True)
class PageCurve:
    """A curve of a chart: the number of its run's colour, what it is called, its points; dots at each of few."""

    color: int
    name: str
    points: Points
    dots: bool = False


def check_page(path: Path) -> None:
    """Raise UserError where `path` holds anything but an earlier page."""
    if not path.exists():
        return
    with writing(path):
        begin = path.read_bytes()[:400] if path.is_file() else b""
    if OWN.encode() not in begin:
        raise UserError(f"{path}: exists already, and is no page of `warpfold watch`; name another file")


def write_page(path: Path, runs: Sequence[RunLog], every: float) -> None:
    """Write the page, whole or not at all.  every: seconds until it reloads itself, as long as a run goes on.

    Errors: UserError where something else is there.
    """
    check_page(path)
    write_atomically(path, page(runs, every), sync=False)


def page(runs: Sequence[RunLog], every: float) -> str:
    """Return the page as text.  Everything that came from a user is escaped."""
    drawn = [chart for chart in _charts(runs) if any(curve.points for curve in chart[1])]
    steps = max(run.steps for run in runs)
    goes_on = not all(run.is_finished for run in runs)
    data = [_data(curves, steps) for _, curves in drawn]
    return string.Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=html.escape(", ".join(run.name for run in runs)),
        reload=f'<meta http-equiv="refresh" content="{max(int(every), 1)}">' if goes_on else "",
        rows="".join(_row(i, run) for i, run in enumerate(runs)),
        differs="".join(
            f'<p class="differs">{html.escape(name)} differs from {html.escape(runs[0].name)}: {html.escape(what)}</p>'
            for name, what in differing(runs)
        )
        + "".join(f'<p class="differs">{html.escape(line)}</p>' for line in left_out(runs)),
        charts="".join(_chart(title, curves, steps) for title, curves in drawn),
        curves=json.dumps(data).replace("<", "\\u003c"),
        footer=f"{', '.join(html.escape(str(run.path)) for run in runs)}; drawn {datetime.now():%Y-%m-%d %H:%M:%S}"
        + (f", again every {max(int(every), 1)} s while `warpfold watch` runs" if goes_on else ""),
    )


def _charts(runs: Sequence[RunLog]) -> Iterator[tuple[str, list[PageCurve]]]:
    """Yield the title of each chart and its curves."""
    loss, *others = CHARTS
    yield _of_steps(runs, loss)
    for name, title in HELD_OUT.items():
        yield title, [PageCurve(i, run.name, run.held_out(name), dots=True) for i, run in enumerate(runs)]
    for name in others:
        yield _of_steps(runs, name)
    terms = dict.fromkeys(term for run in runs for row in run.rows[:1] for term in row.get("terms", {}))
    for term in terms:
        yield f"loss term {term}", [PageCurve(i, run.name, run.curve(f"terms/{term}")) for i, run in enumerate(runs)]


def _of_steps(runs: Sequence[RunLog], name: str) -> tuple[str, list[PageCurve]]:
    return CHARTS[name], [PageCurve(i, run.name, run.curve(name)) for i, run in enumerate(runs)]


def _data(curves: Sequence[PageCurve], steps: int) -> dict[str, Any]:
    """Return what the page's script reads of a chart."""
    shown = [{"name": c.name, "points": [(round(x), y) for x, y in means(c.points, FINE, 0.0, steps)]} for c in curves]
    return {"left": LEFT, "right": RIGHT, "width": WIDE, "steps": steps, "curves": shown}


def _chart(title: str, curves: Sequence[PageCurve], steps: int) -> str:
    """Return a figure: axes with a few values, and each curve faint, with its running mean over it."""
    fine = [means(curve.points, FINE, 0.0, steps) for curve in curves]
    low, high = _range([y for points in fine for _, y in points])

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (WIDE - LEFT - RIGHT) * x / max(steps, 1)
        return round(across, 1), round(TOP + (HIGH - TOP - BOTTOM) * (high - y) / (high - low), 1)

    parts = []
    values = ticks(low, high)
    for value, text in zip(values, tick_texts(values)):
        y = place(0, value)[1]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDE - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{text}</text>')
    for step in (step for step in ticks(0.0, steps) if step == round(step)):
        anchor = "start" if not step else "end" if step > 0.95 * steps else "middle"
        parts.append(f'<text x="{place(step, low)[0]}" y="{HIGH - 7}" text-anchor="{anchor}">{step:,.0f}</text>')
    for curve, points in zip(curves, fine):
        color = f"stroke: var(--c{curve.color % COLORS})"
        rough = len(points) > SMOOTH and not curve.dots
        if rough:
            parts.append(_line("raw", color, [place(*point) for point in points]))
        smooth = means(curve.points, SMOOTH, 0.0, steps) if rough else points
        parts.append(_line("line", color, [place(*point) for point in smooth]))
        for x, y in [place(*point) for point in points] if curve.dots or len(points) == 1 else []:
            parts.append(f'<circle cx="{x}" cy="{y}" r="3" style="fill: var(--c{curve.color % COLORS})"/>')
    parts.append(f'<line class="cursor" x1="0" x2="0" y1="{TOP}" y2="{HIGH - BOTTOM}"/>')
    label = html.escape(title)
    drawing = f'<svg viewBox="0 0 {WIDE} {HIGH}" role="img" aria-label="{label} over the steps">{"".join(parts)}</svg>'
    return f"<figure><figcaption><span>{label}</span><output></output></figcaption>{drawing}</figure>"


def _line(kind: str, color: str, points: Sequence[tuple[float, float]]) -> str:
    return f'<polyline class="{kind}" style="{color}" points="{" ".join(f"{x},{y}" for x, y in points)}"/>'


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of an axis that holds the values, never equal."""
    low, high = min(values), max(values)
    if high - low <= 1e-9 * max(abs(high), 1e-9):
        return low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0)
    return low, high


def ticks(low: float, high: float) -> list[float]:
    """Return three to six round values from low to high."""
    rough = (high - low) / 5 or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * (1 - 1e-9))
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def tick_texts(values: Sequence[float]) -> list[str]:
    """Return evenly spaced values with as few digits, three at least, as tell each what it is."""
    step = min((b - a for a, b in pairwise(values)), default=math.inf)
    for digits in range(3, 17):
        texts = [f"{value:.{digits}g}" for value in values]
        if all(abs(float(text) - value) <= 0.01 * step for text, value in zip(texts, values)):
            break
    return texts


def _row(number: int, run: RunLog) -> str:
    """Return the line of the table for a run."""
    last, color, most = run.rows[-1] if run.rows else {}, f"var(--c{number % COLORS})", max(run.steps, 1)
    cells = [
        f'<span class="key" style="background: {color}"></span>{html.escape(run.name)}',
        f'<progress style="accent-color: {color}" max="{most}" value="{run.step}"></progress> {run.step / most:.0%}',
        f"{run.step:,} of {run.steps:,}",
        f"{last['loss']:.3f}" if is_number(last.get("loss")) else "-",
        _held_out(run),
        f"{last['samples_per_second']:.3g}" if last else "-",
        f"{last['waiting_so_far']:.1%}" if last else "-",
        html.escape(run.state()),
    ]
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _held_out(run: RunLog) -> str:
    """Return the last validation; of a part of the examples, of how many."""
    row = run.validations[-1] if run.validations else {}
    if not is_number(row.get("lddt_ca")):
        return "-"
    part = f' <span class="part">({len(row["examples"])} of {row["of"]})</span>' if "of" in row else ""
    return f"{row['lddt_ca']:.3f}{part}"
