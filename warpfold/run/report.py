"""Write a run as one HTML page that needs nothing else: figures, numbers, structures to turn with the mouse.

The page contains its viewer (3Dmol.js, vendored) and makes no requests, so it opens from a disk, a mail or on
an air-gapped machine.  `report.html` beside this file is its template.
"""

import html
import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from warpfold.files import write_atomically
from warpfold.geometry.residue import ATOM_ORDER
from warpfold.run import figures

HERE = Path(__file__).parent
DRAWN = 40  # predictions that the report of `predict` draws; its table lists all
DRAWN_OF_EACH = 5  # of one protein or complex, the best
LENGTHS = 10  # different ones, from which on time is drawn against length
ENERGIES = ("energy_before", "energy_after")  # of a relaxation
INTERFACE_HEADER = ("interface", "ipTM", "interface pLDDT", "contacts")


@dataclass(frozen=True)
class Target:
    """One predicted protein of a report.

    plddt [N] 0..100; pae [N, N] angstrom or None; ca [N, 3] angstrom; mmcif: the structure, pLDDT as its B factors.
    chains: of a complex, where each is; interfaces: a row of text for each, under INTERFACE_HEADER.
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
    chains: Mapping[str, slice] = field(default_factory=dict)
    interfaces: Sequence[Sequence[str]] = ()


@dataclass(frozen=True)
class ReportTable:
    """Rows of text under a header; the first column is the name, and links to the target of that name."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    """A heading, a paragraph, figures (SVG and caption), a table: any of them may be empty."""

    heading: str
    text: str = ""
    figures: Sequence[tuple[str, str]] = ()
    table: ReportTable | None = None


@dataclass(frozen=True)
class ReportPage:
    """Everything on the page; `facts` are the few numbers at its head, `footer` the lines at its foot."""

    title: str
    lead: str
    facts: Sequence[tuple[str, str]] = ()
    sections: Sequence[Section] = ()
    targets: Sequence[Target] = ()
    footer: Sequence[str] = field(default_factory=tuple)


def write_report(path: Path, report: ReportPage) -> None:
    """Write the page to `path`, whole or not at all."""
    write_atomically(path, render(report))


def render(report: ReportPage) -> str:
    """Return the page as text.  Everything that came from a user (names, sequences, messages) is escaped."""
    frame = string.Template((HERE / "report.html").read_text(encoding="utf-8"))
    anchors = {target.name: f"target-{i}" for i, target in enumerate(report.targets)}
    sections = [_section(section, anchors) for section in report.sections]
    if report.targets:
        sections.append("<section><h2>Structures</h2>\n")
        sections += [_target(i, target) for i, target in enumerate(report.targets)]
        sections.append("</section>")
    structures = [
        {
            "prediction": t.mmcif,
            "truth": t.truth_mmcif,
            "chains": [[c, _chain_color(i)] for i, c in enumerate(t.chains)],
        }
        for t in report.targets
    ]
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


def _table(table: ReportTable, anchors: dict[str, str]) -> str:
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
    trace = figures.draw_trace(target.ca, target.plddt, target.truth_ca, target.chains)
    drawings = [_figure(figures.draw_plddt(target.plddt, target.lddt, target.chains), "")]
    if target.pae is not None:
        drawing = figures.draw_pae(target.pae, target.chains)
        drawings.append(_figure(drawing, "Dark: sure of where the one is, seen from the other."))
    interfaces = _table(ReportTable(INTERFACE_HEADER, target.interfaces), {}) if target.interfaces else ""
    key = "".join(
        f'<span><i style="background:{color}"></i>{name}{f", {bound:.0f} and more" if bound else ""}</span>'
        for bound, color, name in figures.CLASSES
    )
    if truth:
        key += '<span><i style="background:#aab2bb"></i>truth</span>'
    switch = '<label><input type="checkbox" name="truth" checked> truth</label>' if truth else ""
    if target.chains:
        switch += '<label><input type="checkbox" name="chains"> colour by chain</label>'
        key += "".join(
            f'<span class="chain"><i style="background:{_chain_color(i)}"></i>{_text(chain)}</span>'
            for i, chain in enumerate(target.chains)
        )
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
<div>{"".join(drawings)}{interfaces}</div>
</div>
<p class="sequence">{_text(target.sequence)}</p>
</article>"""


def _chain_color(place: int) -> str:
    return figures.CHAIN_COLORS[place % len(figures.CHAIN_COLORS)]


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}{f'<figcaption>{_text(caption)}</figcaption>' if caption else ''}</figure>"


def _text(text: str) -> str:
    return html.escape(text)


# The report of `warpfold predict`


def prediction_report(out: Path, summary: dict[str, Any]) -> ReportPage:
    """Return the report of `warpfold predict`, from its summary and the files that it names."""
    entries, failures = summary["predictions"], summary["failures"]
    best = [entry for entry in entries if entry.get("rank", 1) == 1]
    alone = len(best) == 1 and not failures
    sections = [Section("All proteins", table=_all_proteins(best))] if best and not alone else []
    if len(entries) > len(best):
        sections.append(_ranking(entries, summary["ranking"]))
    if failures:
        whats = [[_label(f), f["error"]] for f in failures]
        sections.append(Section("Failed", table=ReportTable(["protein", "what went wrong"], whats)))
    if offered := _template_rows(out, best):
        text = "NAME_templates.json in the protein's folder has the outcome of every template that was offered."
        header = ["protein", "template", "residues", "identity", "note"]
        sections.append(Section("Templates", text, table=ReportTable(header, offered)))
    if len({entry["length"] for entry in entries}) >= LENGTHS:
        sections.append(_seconds(entries, summary.get("processes", ())))
    facts = [] if alone else [("proteins folded", str(len(best)))]
    if failures:
        facts.append(("failed", str(len(failures))))
    if entries:
        facts.append(("mean pLDDT", f"{np.mean([e['mean_plddt'] for e in best]):.1f}"))
    for key, title in (("iptm", "ipTM"), ("ptm", "pTM")):
        if alone and best[0].get(key) is not None:
            facts.append((title, f"{best[0][key]:.2f}"))
    facts.append(("seconds in all", f"{summary['seconds']:.0f}"))
    shown = [entry for entry in entries if entry.get("rank", 1) <= DRAWN_OF_EACH][:DRAWN]
    names = ", ".join(model["file"] for model in summary["models"])
    drawn = f", the {'first' if len(entries) == len(best) else 'best'} {len(shown)} drawn" if shown != entries else ""
    versions, seeds = summary["versions"], _seeds(summary["settings"])
    digests = ", ".join(model["sha256"] for model in summary["models"])
    return ReportPage(
        title=best[0]["name"] if alone else "Predicted structures",
        lead=f"Folded by WarpFold with {names}{drawn}.",
        facts=facts,
        sections=sections,
        targets=[target_of(out, entry) for entry in shown],
        footer=[
            f"WarpFold {versions['warpfold']} · torch {versions['torch']} · {summary['device']} · "
            f"{seeds} · parameters sha256 {digests}"
        ],
    )


def _all_proteins(entries: Sequence[Mapping[str, Any]]) -> ReportTable:
    """Return a row for each protein or complex, its best prediction."""
    complexes = any("chains" in entry for entry in entries)
    header = ["protein", "residues", "alignment rows", "mean pLDDT", "pTM", "seconds", "warnings"]
    if complexes:
        header[1:1], header[5:5] = ["chains"], ["ipTM"]
    rows = []
    for e in entries:
        row = [_label(e), f"{e['length']}", f"{e['msa_depth']}", f"{e['mean_plddt']:.1f}", _score(e["ptm"]),
               f"{sum(e['seconds'].values()):.1f}", str(len(e["warnings"]))]  # fmt: skip
        if complexes:
            row[1:1], row[5:5] = [str(len(e.get("chains", "A")))], [_score(e.get("iptm"))]
        rows.append(row)
    return ReportTable(header, rows)


def _ranking(entries: Sequence[Mapping[str, Any]], ranking: Mapping[str, Mapping[str, Any]]) -> Section:
    """Return all predictions of each protein, best first."""
    measures = dict.fromkeys(one["by"] for one in ranking.values())
    header = ["prediction", "model", "seed", *measures, "mean pLDDT"]
    complexes = any("iptm" in entry for entry in entries)
    rows = []
    for e in entries:
        by = ranking[e["name"]]["by"]
        values = [f"{e['ranking_confidence']:.{1 if 'pLDDT' in by else 3}f}" if by == one else "" for one in measures]
        row = [_label(e), e["model"], str(e["seed"]), *values, f"{e['mean_plddt']:.1f}"]
        row += [_score(e.get("iptm"))] if complexes else []
        rows.append([*row, _score(e["ptm"])])
    text = f"Best first, by {' or '.join(measures)}."
    return Section("Ranking", text, table=ReportTable([*header, *(["ipTM"] if complexes else []), "pTM"], rows))


def _seconds(entries: Sequence[Mapping[str, Any]], processes: Sequence[Mapping[str, Any]]) -> Section:
    """Return how long predictions took, against their length, and what the devices waited for."""
    seconds = {kind: [entry["seconds"][kind] for entry in entries] for kind in ("model", "features")}
    residues = [entry["length"] for entry in entries]
    each = 1e3 * sum(seconds["model"]) / sum(residues)
    text = f"{sum(residues)} residues, {each:.3g} ms of the model each. "
    text += "Proteins that shared a pass share its seconds alike. " if any("together" in e for e in entries) else ""
    names = {"computing": "computing", "waiting_for_features": "for features", "waiting_for_files": "for files"}
    total = {key: sum(one.get(key, 0.0) for one in processes) for key in names}
    if whole := sum(total.values()):
        waits = ", ".join(f"{total[key]:.1f} s {name}" for key, name in names.items() if key != "computing")
        share = 1 - total["computing"] / whole
        text += f"Of {whole:.0f} s in the last runs' loops the model computed {total['computing']:.0f} s "
        text += f"and waited {share:.1%}: {waits}."
    figure = figures.draw_seconds(residues, {"model": seconds["model"], "features": seconds["features"]})
    return Section("Time", text, [(figure, "Each dot is a prediction; features are made while another one computes.")])


def _relaxed(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what is said of a relaxation: docs/relax.md."""
    before, after = (report[f"violations_{when}"]["residues"] for when in ("before", "after"))
    energies = " → ".join("infinite" if e is None else f"{e:.4g}" for e in map(report.get, ENERGIES))
    return [
        ("relaxed: residues with violations", f"{before} → {after}"),
        ("energy, kcal/mol", energies),
        ("Cα moved, Å", f"{report['ca_rmsd']:.2f}"),
    ]


def _label(entry: Mapping[str, Any]) -> str:
    """Return how the page calls a prediction: by its protein, or by rank, model and seed too if there are several."""
    if "ranked" in entry:
        return f"{entry['name']}, rank {entry['rank']}"
    failed = "error" in entry and "model" in entry
    return f"{entry['name']} ({entry['model']}, seed {entry['seed']})" if failed else entry["name"]


def _score(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _seeds(settings: Mapping[str, Any]) -> str:
    first, last = settings["seed"], settings["seed"] + settings["seeds"] - 1
    return f"seed {first}" if first == last else f"seeds {first} to {last}"


def _template_rows(out: Path, entries: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a row for each template that a protein used, and one for how many it did not use."""
    rows: list[list[str]] = []
    for entry in (entry for entry in entries if "templates" in entry["files"]):
        outcomes = json.loads((out / entry["folder"] / entry["files"]["templates"]).read_text(encoding="utf-8"))
        rows += [
            [_label(entry), _on_chains(one), f"{one['residues']}", f"{one['identity']:.0%}", one["note"]]
            for one in outcomes
            if one["used"]
        ]
        if unused := entry["templates_unused"]:
            rows.append([_label(entry), f"{unused} not used", "", "", ""])
    return rows


def _on_chains(outcome: Mapping[str, Any]) -> str:
    """Return a template's name and, of a complex, the chains that it is on."""
    chains = outcome.get("chains")
    return f"{outcome['name']} on {', '.join(chains)}" if chains else outcome["name"]


def target_of(out: Path, entry: Mapping[str, Any], **truth: Any) -> Target:
    """Return an entry of the summary as the report draws it, read from its files in `out`.

    `truth`: the fields of `Target` that compare it with a known structure; `numbers` among them come after its own.
    """
    folder, files = out / entry["folder"], entry["files"]
    with np.load(folder / files["arrays"], allow_pickle=False) as arrays:
        ca, plddt = arrays["positions"][:, ATOM_ORDER["CA"]], arrays["plddt"]
        pae = arrays["pae"] if "pae" in arrays.files else None
    numbers = [("residues", str(entry["length"])), ("mean pLDDT", f"{entry['mean_plddt']:.1f}")]
    if entry.get("iptm") is not None:
        numbers.append(("ipTM", f"{entry['iptm']:.2f}"))
    if entry["ptm"] is not None:
        numbers.append(("pTM", f"{entry['ptm']:.2f}"))
    numbers.append(("alignment rows", str(entry["msa_depth"])))
    if "paired_rows" in entry:
        numbers.append(("paired rows", str(entry["paired_rows"])))
    if "ranked" in entry:
        numbers += [("model", entry["model"]), ("seed", str(entry["seed"]))]
    if "templates" in files:
        numbers.append(("templates", str(len(entry["templates"]))))
    if "relaxed" in entry:
        numbers += _relaxed(entry["relaxed"])
    numbers += truth.pop("numbers", ())
    return Target(
        name=_label(entry),
        sequence=entry["sequence"],
        plddt=plddt,
        ca=ca,
        mmcif=(folder / files["mmcif"]).read_text(encoding="utf-8"),
        pae=pae,
        numbers=numbers,
        warnings=entry["warnings"],
        chains=_chain_spans(entry),
        interfaces=[
            ["-".join(one["chains"]), _score(one["iptm"]), f"{one['plddt']:.1f}", str(one["contacts"])]
            for one in entry.get("interfaces", ())
        ],
        **truth,
    )


def _chain_spans(entry: Mapping[str, Any]) -> dict[str, slice]:
    """Return where each chain of a complex is; nothing for a single chain."""
    ends = np.cumsum([chain["length"] for chain in entry.get("chains", ())]).tolist()
    return {chain["id"]: slice(end - chain["length"], end) for chain, end in zip(entry.get("chains", ()), ends)}
