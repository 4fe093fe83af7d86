"""Write a run as one HTML page that needs nothing else: figures, numbers, structures to turn with the mouse.

The page contains its viewer (3Dmol.js, vendored) and allows itself no request, so it opens from a disk, a mail or on
an air-gapped machine.  `report.html` beside this file is its template.
"""

import html
import json
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from warpfold.files import write_atomically
from warpfold.run import figures

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Target:
    """One predicted protein of a report.

    plddt [N] 0..100; pae [N, N] angstrom or None; ca [N, 3] angstrom; mmcif: the structure, pLDDT as its B factors.
    With a known truth, superposed on the prediction: truth_mmcif, truth_ca [M, 3], lddt [N] 0..100 (NaN where unknown).
    """

    name: str
    sequence: str
    plddt: np.ndarray
    ca: np.ndarray
    mmcif: str
    pae: np.ndarray | None = None
    numbers: Sequence[tuple[str, str]] = ()
    warnings: Sequence[str] = ()
    truth_mmcif: str | None = None
    truth_ca: np.ndarray | None = None
    lddt: np.ndarray | None = None


@dataclass(frozen=True)
class Table:
    """Rows of text under a header; the first column is the name, and links to the target of that name."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    """A heading, a paragraph, figures (SVG and caption), a table: any of them may be empty."""

    heading: str
    text: str = ""
    figures: Sequence[tuple[str, str]] = ()
    table: Table | None = None


@dataclass(frozen=True)
class Report:
    """Everything on the page; `facts` are the few numbers at its head, `footer` the lines at its foot."""

    title: str
    lead: str
    facts: Sequence[tuple[str, str]] = ()
    sections: Sequence[Section] = ()
    targets: Sequence[Target] = ()
    footer: Sequence[str] = field(default_factory=tuple)


def write_report(path: Path, report: Report) -> None:
    """Write the page to `path`, whole or not at all."""
    write_atomically(path, render(report))


def render(report: Report) -> str:
    """Return the page as text.  Everything that came from a user (names, sequences, messages) is escaped."""
    frame = string.Template((HERE / "report.html").read_text(encoding="utf-8"))
    anchors = {target.name: f"target-{i}" for i, target in enumerate(report.targets)}
    sections = [_section(section, anchors) for section in report.sections]
    if report.targets:
        sections.append("<section><h2>Structures</h2>\n")
        sections += [_target(i, target) for i, target in enumerate(report.targets)]
        sections.append("</section>")
    structures = [{"prediction": t.mmcif, "truth": t.truth_mmcif} for t in report.targets]
    library = (HERE / "vendor" / "3dmol" / "3Dmol-min.js").read_text(encoding="utf-8") if report.targets else ""
    return frame.substitute(
        title=_text(report.title),
        lead=_text(report.lead),
        facts="".join(f"<div><dt>{_text(label)}</dt><dd>{_text(value)}</dd></div>" for label, value in report.facts),
        sections="\n".join(sections),
        footer="".join(f"<p>{_text(line)}</p>" for line in report.footer),
        viewer_library=library,
        structures=json.dumps(structures).replace("<", "\\u003c"),  # "</script>" in a name must not end the script
        classes=json.dumps([[bound, color] for bound, color, _ in figures.CLASSES]),
    )


def _section(section: Section, anchors: dict[str, str]) -> str:
    parts = [f"<section><h2>{_text(section.heading)}</h2>"]
    if section.text:
        parts.append(f"<p>{_text(section.text)}</p>")
    if section.figures:
        parts.append(f'<div class="figures">{"".join(_figure(svg, caption) for svg, caption in section.figures)}</div>')
    if section.table:
        parts.append(_table(section.table, anchors))
    return "\n".join([*parts, "</section>"])


def _table(table: Table, anchors: dict[str, str]) -> str:
    head = "".join(f'<th scope="col">{_text(name)}</th>' for name in table.header)
    rows = []
    for name, *values in table.rows:
        first = f'<a href="#{anchors[name]}">{_text(name)}</a>' if name in anchors else _text(name)
        rows.append(f"<tr><td>{first}</td>{''.join(f'<td>{_text(value)}</td>' for value in values)}</tr>")
    body = "\n".join(rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _target(index: int, target: Target) -> str:
    truth = target.truth_mmcif is not None
    numbers = "".join(f"<div><dt>{_text(k)}</dt> <dd>{_text(v)}</dd></div>" for k, v in target.numbers)
    warnings = "".join(f'<p class="warning">{_text(w)}</p>' for w in target.warnings)
    trace = figures.draw_trace(target.ca, target.plddt, target.truth_ca)
    drawings = [_figure(figures.draw_plddt(target.plddt, target.lddt), "")]
    if target.pae is not None:
        drawings.append(_figure(figures.draw_pae(target.pae), "Dark: sure of where the one is, seen from the other."))
    key = "".join(
        f'<span><i style="background:{color}"></i>{name}{f", {bound:.0f} and more" if bound else ""}</span>'
        for bound, color, name in figures.CLASSES
    )
    if truth:
        key += '<span><i style="background:#aab2bb"></i>truth</span>'
    switch = '<label><input type="checkbox" name="truth" checked> truth</label>' if truth else ""
    return f"""<article id="target-{index}">
<h3>{_text(target.name)}</h3>
<dl class="numbers">{numbers}</dl>
{warnings}
<div class="target">
<div>
<div class="viewer" data-target="{index}">{trace}</div>
<div class="controls" hidden>{switch}<label><input type="checkbox" name="sidechains"> side chains</label>
<button name="reset" type="button">reset the view</button></div>
<div class="key">{key}</div>
</div>
<div>{"".join(drawings)}</div>
</div>
<p class="sequence">{_text(target.sequence)}</p>
</article>"""


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}{f'<figcaption>{_text(caption)}</figcaption>' if caption else ''}</figure>"


def _text(text: str) -> str:
    return html.escape(text)
