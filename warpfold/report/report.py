"""Write a run as one self-contained HTML page with figures, numbers and interactive structures.

The page includes its viewer (3Dmol.js, vendored) and makes no requests, so it opens from a disk, from an e-mail and on
an air-gapped machine. Its template, style and script are `report.html`, `report.css` and `report.js` in this folder.
Without scripts the page shows static figures.
"""

import base64
import hashlib
import html
import itertools
import json
import re
import string
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from warpfold.files import file_name, write_atomically
from warpfold.report import charts
from warpfold.report.charts import CLASSES, GREY, INK, RULE, ChartLine
from warpfold.report.coverage import Coverage

HERE = Path(__file__).parent
INTERFACE_HEADER = ("interface", "ipTM", "interface pLDDT", "contacts")
KEY = ("Very high (pLDDT > 90)", "High (90 > pLDDT > 70)", "Low (70 > pLDDT > 50)", "Very low (pLDDT < 50)")
# Cells with more letters are treated as sentences and wrapped.
LONG = 40
# The number of warnings shown at the head of a page. Further warnings are collapsed.
WARNED = 8


@dataclass(frozen=True)
class Warned:
    """A warning about the run, or about the named targets.

    about: the names of the targets, each with a detail that completes the sentence; empty for the run.
    """

    said: str
    about: Mapping[str, str] = field(default_factory=dict)

    def heading(self, what: str) -> str:
        """Return the prefix of the warning: up to three names, a count of `what`, or nothing for the run."""
        names = f"{len(self.about)} {what}" if len(self.about) > 3 else ", ".join(self.about)
        return f"{names}: " if names else ""


@dataclass(frozen=True)
class Target:
    """One predicted protein of a report.

    plddt: [N], 0 to 100.
    pae: [N, N], angstrom, or None.
    ca: [N, 3], angstrom.
    mmcif: the structure as mmCIF, with pLDDT as B factors.
    chains: the residues of each chain of a complex.
    interfaces: one row of text per interface, with the columns INTERFACE_HEADER.
    max_pae: the upper limit of pae, angstrom.
    has_pdb: whether the structure fits the PDB format.
    group: the name of the query; targets with the same group, which are superposed, are shown next to each other under
        their notes, and together in the viewer.
    truth_mmcif, truth_ca ([M, 3], angstrom), lddt ([N], 0 to 100, NaN where unknown): the known structure, superposed
        on the prediction, and the score against it.
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
    chains: Mapping[str, slice] = field(default_factory=dict)
    interfaces: Sequence[Sequence[str]] = ()
    coverage: Coverage | None = None
    max_pae: float = 31.75
    has_pdb: bool = True
    group: str = ""
    note: str = ""


@dataclass(frozen=True)
class ReportTable:
    """Rows of text under a header. The first column is the name and links to the target with that name."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    """A heading, a paragraph, figures (SVG and caption) and a table. Each of them may be empty."""

    heading: str
    text: str = ""
    figures: Sequence[tuple[str, str]] = ()
    table: ReportTable | None = None


@dataclass(frozen=True)
class ReportPage:
    """The content of the page.

    facts: the main numbers (label, value), shown at the head.
    footer: lines at the foot.
    warnings: shown above the facts; the names in them are those of targets.
    made_by: the command that wrote the page.
    """

    title: str
    lead: str
    facts: Sequence[tuple[str, str]] = ()
    sections: Sequence[Section] = ()
    targets: Sequence[Target] = ()
    footer: Sequence[str] = field(default_factory=tuple)
    warnings: Sequence[Warned] = ()
    made_by: str = "warpfold"


def write_report(path: Path, report: ReportPage) -> None:
    """Write the page to `path` atomically."""
    write_atomically(path, render(report))


def render(report: ReportPage) -> str:
    """Render the page as text. Names, sequences and messages of the user are escaped."""
    anchors = {target.name: f"target-{i}" for i, target in enumerate(report.targets)}
    sections = [_section(section, anchors) for section in report.sections]
    if report.targets:
        sections.append("<section><h2>Structures</h2>\n")
        numbered = enumerate(report.targets)
        for _, together in itertools.groupby(numbered, lambda one: one[1].group or str(one[0])):
            group = list(together)
            sections += [_side_by_side(group)] if len(group) > 1 else []
            sections += [_target(i, target, len(group) > 1) for i, target in group]
        sections.append("</section>")
    # The page's security policy allows only scripts and styles with the hashes below, so injected text cannot run.
    # Hashes do not cover style attributes, which therefore become classes.
    content, rules = _styles_as_classes("\n".join(sections))
    style = _part("report.css") + rules
    shows = bool(report.targets)
    library, script = (_part("vendor/3dmol/3Dmol-min.js"), "\n" + _part("report.js")) if shows else ("", "\n")
    styles = ["\n" + style, *_STYLE_ELEMENT.findall(content)]
    records = {"classes": CLASSES, "targets": [_record(target) for target in report.targets]}
    return string.Template(_part("report.html")).substitute(
        title=_text(report.title),
        made_by=report.made_by,
        lead=_text(report.lead),
        style=style,
        script_hashes=_hashes([library, script]),
        style_hashes=_hashes(styles),
        warnings=_warnings(report.warnings, anchors),
        facts="".join(f"<div><dt>{_text(label)}</dt><dd>{_text(value)}</dd></div>" for label, value in report.facts),
        sections=content,
        footer="".join(f"<p>{_text(line)}</p>" for line in report.footer),
        viewer_library=library,
        # A "</script>" in a name would end the script.
        structures=json.dumps(records).replace("<", "\\u003c"),
        script=script.removeprefix("\n"),
    )


_STYLE_ELEMENT = re.compile(r"<style[^>]*>(.*?)</style>", re.DOTALL)
_STYLED_TAG = re.compile(r"<[a-zA-Z][^<>]*?\sstyle=\"[^\"]*\"[^<>]*>")


def _styles_as_classes(content: str) -> tuple[str, str]:
    """Replace the style attributes of HTML and SVG by classes, and return the text and the rules of the classes."""
    classes: dict[str, str] = {}

    def replaced(match: re.Match[str]) -> str:
        """Move the style of one tag into a class."""
        tag = match[0]
        attribute = re.search(r"\sstyle=\"([^\"]*)\"", tag)
        assert attribute is not None
        name = classes.setdefault(html.unescape(attribute[1]), f"s{len(classes)}")
        tag = tag.replace(attribute[0], "", 1)
        if re.search(r"\sclass=\"", tag):
            return re.sub(r"(\sclass=\"[^\"]*)", rf"\1 {name}", tag, count=1)
        return re.sub(r"^(<[\w:-]+)", rf'\1 class="{name}"', tag)

    content = _STYLED_TAG.sub(replaced, content)
    # An attribute takes precedence over every rule. Repeating the class raises its specificity to the same effect.
    rules = "".join(f".{name}.{name}.{name}{{{rule}}}\n" for rule, name in classes.items())
    return content, rules


def _hashes(texts: Iterable[str]) -> str:
    """Compute the Content-Security-Policy sources that allow inline elements with these contents."""
    digests = (hashlib.sha256(text.encode()).digest() for text in dict.fromkeys(texts))
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


def _part(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _record(target: Target) -> dict[str, Any]:
    """Collect a target's data for the page's script. Structures are complete, because readers can download them."""
    return {
        "name": target.name,
        "group": target.group,
        "stem": file_name(target.name.replace(", ", "_").replace(" ", "_")),
        "sequence": target.sequence.replace(":", ""),
        "plddt": [round(float(value), 2) for value in target.plddt],
        "chains": [[c, s.start, s.stop, charts.chain_color(i)] for i, (c, s) in enumerate(target.chains.items())],
        "prediction": _packed(target.mmcif),
        "maxPae": round(target.max_pae, 2),
        "truth": _packed(target.truth_mmcif) if target.truth_mmcif is not None else None,
    }


def _packed(text: str) -> str:
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def _section(section: Section, anchors: dict[str, str]) -> str:
    parts = [f"<section><h2>{_text(section.heading)}</h2>"]
    if section.text:
        parts.append(f"<p>{_text(section.text)}</p>")
    if section.figures:
        drawn = ""
        for svg, caption in section.figures:
            # With the variables of `report.css`, a figure follows light and dark themes.
            for color, name in ((INK, "ink"), (GREY, "grey"), (RULE, "rule"), ("#ffffff", "paper")):
                svg = svg.replace(f": {color}", f": var(--{name}, {color})")
            drawn += _figure(svg, caption)
        parts.append(f'<div class="figures">{drawn}</div>')
    if section.table:
        parts.append(_table(section.table, anchors))
    return "\n".join([*parts, "</section>"])


def _table(table: ReportTable, anchors: dict[str, str]) -> str:
    head = "".join(f'<th scope="col">{_text(name)}</th>' for name in table.header)
    rows = []
    for name, *values in table.rows:
        cells = (f"<td{' class=long' if len(value) > LONG else ''}>{_text(value)}</td>" for value in values)
        rows.append(f"<tr><td>{_link(name, anchors)}</td>{''.join(cells)}</tr>")
    body = "\n".join(rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _link(name: str, anchors: Mapping[str, str]) -> str:
    return f'<a href="#{anchors[name]}">{_text(name)}</a>' if name in anchors else _text(name)


def _warnings(warnings: Sequence[Warned], anchors: Mapping[str, str]) -> str:
    """Render the warnings, one line each. Warnings beyond the first WARNED, and long lists of names, are collapsed."""
    items = [f"<li>{_warning(warning, anchors)}</li>" for warning in warnings]
    if len(items) > WARNED:
        collapsed = f"<summary>and {len(items) - WARNED} more</summary><ul>{''.join(items[WARNED:])}</ul>"
        items[WARNED:] = [f"<li><details>{collapsed}</details></li>"]
    return f'<ul class="warnings" aria-label="warnings">{"".join(items)}</ul>' if items else ""


def _warning(warning: Warned, anchors: Mapping[str, str]) -> str:
    names = {name: _link(name, anchors) for name in warning.about}
    if len(names) < 2:
        return "".join(f"{name}: " for name in names.values()) + _text(warning.said)
    details = (
        f"<span>{name}{' ' + _text(detail) if (detail := warning.about[key]) else ''}</span>"
        for key, name in names.items()
    )
    line = _text(warning.heading("proteins") + warning.said)
    return f"<details><summary>{line}</summary><p>{' '.join(details)}</p></details>"


def _side_by_side(group: Sequence[tuple[int, Target]]) -> str:
    """Render several predictions of one protein: their pLDDT in one figure and their PAE in a row."""
    first = group[0][1]
    lines = [ChartLine(t.note or t.name, t.plddt, charts.chain_color(i)) for i, (_, t) in enumerate(group)]
    key = "".join(f'<span><i style="background:{line.color}"></i>{_text(line.label)}</span>' for line in lines)
    small = ""
    for i, target in group:
        picture = charts.draw_small_pae(f"pae-{i}") if target.pae is not None else ""
        numbers = f"pLDDT {float(np.mean(target.plddt)):.1f}"
        small += (
            f'<a href="#target-{i}">{picture}<b>{_text(target.note or target.name)}</b><small>{numbers}</small></a>'
        )
    figure = _figure(charts.draw_plddt(lines, first.chains), "")
    name = _text(first.group)
    return (
        f'<div class="side-by-side"><h3>{name}: {len(group)} predictions</h3>\n'
        f'<div>{figure}<div class="key">{key}</div></div><div class="small">{small}</div></div>'
    )


def _target(index: int, target: Target, is_grouped: bool) -> str:
    numbers = "".join(f"<div><dt>{_text(k)}</dt> <dd>{_text(v)}</dd></div>" for k, v in target.numbers)
    ends = [span.stop - 1 for span in target.chains.values()]
    trace = charts.draw_trace(target.ca, target.plddt, target.truth_ca, ends)
    lines = [ChartLine("pLDDT", target.plddt)]
    lines += [ChartLine("lDDT-Cα", target.lddt, "#d9820f", True)] if target.lddt is not None else []
    caption = "Solid: pLDDT. Dashed: lDDT-Cα against the truth." if target.lddt is not None else ""
    below = _figure(charts.draw_plddt(lines, target.chains), caption)
    if (coverage := target.coverage) is not None:
        drawn = charts.draw_coverage(coverage.depth, coverage.rows, coverage.total, target.chains)
        below += _figure(drawn, "Alignment rows by identity. Line: number of rows with a residue at the position.")
    pae = ""
    if target.pae is not None:
        drawn = charts.draw_pae(target.pae, target.chains, f"pae-{index}")
        pae = _figure(drawn, "Dark green: low expected error in relative position.")
    interfaces = _table(ReportTable(INTERFACE_HEADER, target.interfaces), {}) if target.interfaces else ""
    return f"""<article id="target-{index}" data-target="{index}">
<h3>{_text(target.name)}</h3>
{_warnings([Warned(warning) for warning in target.warnings], {})}
<dl class="numbers">{numbers}</dl>
<div class="target">
<div>
<div class="viewer">{trace}</div>
<p class="readout" role="status"></p>
{_controls(target, is_grouped)}
</div>
<div>{pae}{interfaces}</div>
</div>
<div class="figures">{below}</div>
{_sequence(target)}
</article>"""


def _controls(target: Target, is_grouped: bool) -> str:
    """Render the legend, the switches and the downloads of a structure. The page's script shows those it supports.

    is_grouped: whether the page has other targets of the same group, which the viewer can show too.
    """
    key = "".join(
        f'<span><i style="background:{color}"></i>{_text(KEY[i])}</span>' for i, (_, color, _) in enumerate(CLASSES)
    )
    switch = ""
    if target.truth_mmcif is not None:
        key += f'<span><i style="background:{charts.TRUTH}"></i>truth</span>'
        switch = '<label><input type="checkbox" name="truth" checked> truth</label>'
    if is_grouped:
        switch += '<label><input type="checkbox" name="ranks"> all ranks, superposed</label>'
    if target.chains:
        switch += '<label><input type="checkbox" name="chains"> colour by chain</label>'
        key += "".join(
            f'<span class="chain"><i style="background:{charts.chain_color(i)}"></i>{_text(chain)}</span>'
            for i, chain in enumerate(target.chains)
        )
    exact = target.pae is not None and len(target.pae) <= charts.LARGEST
    offered = {"mmCIF": True, "PDB": target.has_pdb, "PAE": exact, "pLDDT": True, "FASTA": True, "picture": True}
    buttons = "".join(
        f'<button type="button" name="{file}">{file}</button>' for file, is_offered in offered.items() if is_offered
    )
    return f"""<div class="key">{key}</div>
<div class="controls" hidden>{switch}<label><input type="checkbox" name="sidechains"> side chains</label>
<button name="reset" type="button">reset the view</button>
<button name="clear" type="button">clear the selection</button></div>
<div class="downloads" hidden>Download {buttons}</div>"""


def _sequence(target: Target) -> str:
    """Render the sequence in numbered groups of ten residues, each residue in the colour of its pLDDT."""
    letters = target.sequence.replace(":", "")
    lines = []
    for name, span in (target.chains or {"": slice(0, len(letters))}).items():
        tens = []
        for start in range(span.start, span.stop, 10):
            places = range(start, min(start + 10, span.stop))
            residues = "".join(
                f"<i class=p{charts.plddt_class(target.plddt[i])}>{_text(letters[i])}</i>" for i in places
            )
            number = f' data-n="{start - span.start + 10}"' if len(places) == 10 else ""
            tens.append(f"<span{number}>{residues}</span>")
        title = f"<b>{_text(name)}</b>" if name else ""
        lines.append(f"<p>{title}{' '.join(tens)}</p>")
    return f'<div class="sequence" data-kind="sequence">{"".join(lines)}</div>'


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}{f'<figcaption>{_text(caption)}</figcaption>' if caption else ''}</figure>"


def _text(text: str) -> str:
    return html.escape(text)
