"""The report of a design run: losses, sequence logos, and the structures of the best designs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from warpfold.data.structure.mmcif import read_structure
from warpfold.geometry.atoms import CA
from warpfold.report import figures
from warpfold.report.report import ReportPage, ReportTable, Section, Target
from warpfold.sequence_design.state import StartState, read_rows

# The numbers of designs with structures and with loss curves on the page.
DRAWN = 5
CURVES = 4


def design_page(out: Path, summary: Mapping[str, Any], free: Mapping[str, int]) -> ReportPage:
    """Build the page of a run from its summary (the result of `run_design`) and the files in `out`.

    free: the number of designed residues by key (`Problem.free`).
    """
    designs = summary["designs"]
    best = designs[0]
    rows = {design["name"]: read_rows(out / "starts" / f"{design['name']}.jsonl") for design in designs[:CURVES]}
    state = StartState.read(out / "starts" / f"{best['name']}.safetensors")
    curves = [
        figures.Curve(name, [r["step"] for r in steps], [r["loss"] for r in steps]) for name, steps in rows.items()
    ]
    best_rows = rows[best["name"]]
    terms = []
    for term in best["terms"]:
        weighted = [row for row in best_rows if term in row["terms"]]
        terms.append(figures.Curve(term, [row["step"] for row in weighted], [row["terms"][term] for row in weighted]))
    hard = next((r["step"] for r in best_rows if r["hard"] == 1.0), None)
    drawn = [
        (figures.draw_curves(curves, "loss", x_label="step"), "The loss of the best designs."),
        (figures.draw_curves(terms, "weighted loss", x_label="step"), f"The terms of {best['name']}."),
    ]
    text = "Losses of soft and of hard sequences are not comparable." + (
        "" if hard is None else f" The sequence is hard from step {hard} on."
    )
    header = ["design", "loss", "mean pLDDT", "pTM", "ipTM", "designed"]
    table = []
    for design in designs:
        scores = ["–" if design[key] is None else f"{design[key]:.2f}" for key in ("ptm", "iptm")]
        designed = ", ".join(design["designed"].values())
        table.append([design["name"], f"{design['loss']:.4f}", f"{design['mean_plddt']:.1f}", *scores, designed])
    logos = [
        (figures.draw_logo(shares), f"{best['name']}, step {step}.")
        for step, shares in sorted((state.logos or {} if state else {}).items())
    ]
    return ReportPage(
        title="Designs",
        lead=f"{len(designs)} designs of {', '.join(f'{n} residues ({key})' for key, n in free.items())} by WarpFold.",
        facts=[
            ("designs", str(len(designs))),
            ("lowest loss", f"{best['loss']:.3f}"),
            ("its pLDDT", f"{best['mean_plddt']:.1f}"),
        ],
        sections=[
            Section("All designs", "Sorted by the loss of the hard sequence.", table=ReportTable(header, table)),
            Section("Losses", text, drawn),
            Section("Sequence", "The height of a letter is its share. At most 120 residues are shown.", logos),
        ],
        targets=[_target(out, design) for design in designs[:DRAWN]],
        footer=[
            f"seed {summary['seed']} · parameters {summary['params'] or 'from memory'}",
            "Check designs.fasta with warpfold predict and other parameters: scores by the design's own are too high.",
        ],
    )


def _target(out: Path, one: Mapping[str, Any]) -> Target:
    path = out / "designs" / f"{one['name']}.cif"
    ca = np.concatenate([chain.positions[:, CA] for chain in read_structure(path).chains.values()])
    ends = np.cumsum([len(letters) for letters in one["chains"].values()]).tolist()
    spans = {id: slice(end - len(letters), end) for (id, letters), end in zip(one["chains"].items(), ends)}
    scores = ("pTM", one["ptm"]), ("ipTM", one["iptm"])
    return Target(
        name=one["name"],
        sequence=one["sequence"],
        plddt=np.array(one["plddt"]),
        ca=ca,
        mmcif=path.read_text(encoding="utf-8"),
        numbers=[("loss", f"{one['loss']:.4f}"), ("mean pLDDT", f"{one['mean_plddt']:.1f}"),
                 *((title, f"{score:.2f}") for title, score in scores if score is not None)],
        chains=spans if len(spans) > 1 else {},
    )  # fmt: skip
