"""The page that `warpfold predict` ends with: every protein's figures, and what became of its templates."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from warpfold.geometry.residue import ATOM_ORDER
from warpfold.run.report import Report, Section, Table, Target

DRAWN = 40  # proteins that the report draws; its table lists all


def prediction_report(out: Path, summary: dict[str, Any]) -> Report:
    """The page of a whole run, from its summary and the files that it names."""
    entries, failures = summary["predictions"], summary["failures"]
    rows = [
        [e["name"], f"{e['length']}", f"{e['msa_depth']}", f"{e['mean_plddt']:.1f}",
         "–" if e["ptm"] is None else f"{e['ptm']:.2f}", f"{sum(e['seconds'].values()):.1f}", str(len(e["warnings"]))]
        for e in entries
    ]  # fmt: skip
    header = ["protein", "residues", "alignment rows", "mean pLDDT", "pTM", "seconds", "warnings"]
    alone = len(entries) == 1 and not failures
    sections = [Section("All proteins", table=Table(header, rows))] if entries and not alone else []
    if failures:
        table = Table(["protein", "what went wrong"], [[f["name"], f["error"]] for f in failures])
        sections.append(Section("Failed", table=table))
    if offered := _template_rows(out, entries):
        text = "What became of every one that was offered is in NAME_templates.json, in the protein's folder."
        header = ["protein", "template", "residues", "identity", "note"]
        sections.append(Section("Templates", text, table=Table(header, offered)))
    facts = [] if alone else [("proteins folded", str(len(entries)))]
    if failures:
        facts.append(("failed", str(len(failures))))
    if entries:
        facts.append(("mean pLDDT", f"{np.mean([e['mean_plddt'] for e in entries]):.1f}"))
    if alone and entries[0]["ptm"] is not None:
        facts.append(("pTM", f"{entries[0]['ptm']:.2f}"))
    facts.append(("seconds in all", f"{summary['seconds']:.0f}"))
    versions, params = summary["versions"], summary["params"]
    drawn = f", the first {DRAWN} drawn" if len(entries) > DRAWN else ""
    return Report(
        title=entries[0]["name"] if alone else "Predicted structures",
        lead=f"Folded by WarpFold with {params['file']}{drawn}.",
        facts=facts,
        sections=sections,
        targets=[target_of(out, entry) for entry in entries[:DRAWN]],
        footer=[
            f"WarpFold {versions['warpfold']} · torch {versions['torch']} · {summary['device']} · "
            f"seed {summary['settings']['seed']} · parameters sha256 {params['sha256']}"
        ],
    )


def _template_rows(out: Path, entries: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The templates that were used, and of each protein how many were not; none where none was offered."""
    rows: list[list[str]] = []
    for entry in (entry for entry in entries if "templates" in entry["files"]):
        outcomes = json.loads((out / entry["folder"] / entry["files"]["templates"]).read_text(encoding="utf-8"))
        rows += [
            [entry["name"], one["name"], f"{one['residues']}", f"{one['identity']:.0%}", one["note"]]
            for one in outcomes
            if one["used"]
        ]
        if unused := entry["templates_unused"]:
            rows.append([entry["name"], f"{unused} not used", "", "", ""])
    return rows


def target_of(out: Path, entry: Mapping[str, Any], **truth: Any) -> Target:
    """An entry of the summary as the report draws it, read from its files in `out`.

    `truth`: the fields of `Target` that compare it with a known structure; `numbers` among them come after its own.
    """
    folder, files = out / entry["folder"], entry["files"]
    with np.load(folder / files["arrays"], allow_pickle=False) as arrays:
        ca, plddt = arrays["positions"][:, ATOM_ORDER["CA"]], arrays["plddt"]
        pae = arrays["pae"] if "pae" in arrays.files else None
    numbers = [("residues", str(entry["length"])), ("mean pLDDT", f"{entry['mean_plddt']:.1f}")]
    if entry["ptm"] is not None:
        numbers.append(("pTM", f"{entry['ptm']:.2f}"))
    numbers.append(("alignment rows", str(entry["msa_depth"])))
    if "templates" in files:
        numbers.append(("templates", str(len(entry["templates"]))))
    numbers += truth.pop("numbers", ())
    return Target(
        name=entry["name"],
        sequence=entry["sequence"],
        plddt=plddt,
        ca=ca,
        mmcif=(folder / files["mmcif"]).read_text(encoding="utf-8"),
        pae=pae,
        numbers=numbers,
        warnings=entry["warnings"],
        **truth,
    )
