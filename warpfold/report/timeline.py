"""Draw a step's timeline: what computes and what travels, one row for each stream."""

import io
from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.figure import Figure

from warpfold.cost.replay import Span
from warpfold.errors import UserError
from warpfold.report.figures import AMBER, BLUE, GREY, INK, STYLE

ROWS = ("computing", "within a node", "between nodes")
KINDS = {  # of a bar: colour, and how it is called
    "forward": (BLUE, "forward"),
    "recomputed": ("#8ab4d8", "recomputed"),
    "backward": (INK, "backward"),
    "update": (GREY, "update"),
}
GROUPS = {"axial": (AMBER, "slices of an example"), "branch": ("#e8b878", "halves of a block")}
NEXT = 1e-3  # of what is drawn: bars that are nearer are drawn as one
GRADIENTS = ("#7a4a9e", "gradients and weights")


def of_a_block(spans: Sequence[Span], blocks: int, forward: bool) -> list[Span]:
    """Return what happens about the middle block: as long as 1/blocks of that pass takes, from its middle on."""
    passes = ("forward",) if forward else ("recomputed", "backward")
    of_pass = [span for span in spans if span.phase in passes]
    if not of_pass:
        raise UserError("--figure: nothing is on the timeline")
    first, last = min(span.begin for span in of_pass), max(span.end for span in of_pass)
    middle, length = (first + last) / 2, (last - first) / max(1, blocks)
    return [span for span in spans if span.end > middle and span.begin < middle + length]


@mpl.rc_context(STYLE)
def draw_timeline(spans: Sequence[Span], blocks: int, kind: str = "svg") -> bytes:
    """Draw a block forward and backward; kind: "svg" or "png"."""
    figure = Figure(figsize=(7.4, 3.4), layout="constrained")
    for place, (title, forward) in enumerate((("forward", True), ("backward", False))):
        axes = figure.add_subplot(2, 1, place + 1)
        some = of_a_block(spans, blocks, forward)
        rows = [row for row in ROWS if any(span.stream == row for span in spans)]
        start = some[0].begin
        bars: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
        for span in sorted(some, key=lambda span: span.begin):
            of_look = bars.setdefault((span.stream, *_look(span)), [])
            begin, end = 1e3 * (span.begin - start), 1e3 * (span.end - start)
            if of_look and begin - of_look[-1][1] < NEXT * (some[-1].end - start) * 1e3:  # as one: a smaller file
                begin, _ = of_look.pop()
            of_look.append((begin, end))
        named: set[str] = set()
        for (stream, color, name), ends in bars.items():
            widths = [(begin, end - begin) for begin, end in ends]
            label = None if name in named else name
            named.add(name)
            axes.broken_barh(widths, (rows.index(stream) - 0.38, 0.76), color=color, linewidth=0, label=label)
        axes.set_yticks(range(len(rows)), rows)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_title(title, loc="left", fontsize=9.5)
        axes.legend(fontsize=7.5, frameon=False, ncols=len(named), loc="lower right", bbox_to_anchor=(1, 0.98))
    axes.set_xlabel("ms")
    out = io.BytesIO()
    figure.savefig(out, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else None)
    return out.getvalue()


def _look(span: Span) -> tuple[str, str]:
    """Return the colour of a bar, and what it is."""
    if span.stream == "computing":
        return KINDS.get(span.phase, (BLUE, span.phase))
    return GROUPS.get(span.name.split(", ")[-1], GRADIENTS)
