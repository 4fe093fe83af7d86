"""The report of `warpfold predict` and the archives of its results, from its summary and the files listed there."""

import io
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from warpfold.files import file_name, write_atomically
from warpfold.geometry.residue import ATOM_ORDER
from warpfold.prediction.notices import each_kind_once, of_record
from warpfold.prediction.outputs import CITATIONS, file_names
from warpfold.prediction.queries import pair_names
from warpfold.report import figures
from warpfold.report.charts import FORMATS
from warpfold.report.coverage import Coverage
from warpfold.report.report import ReportPage, ReportTable, Section, Target, Warned, render

DRAWN = 40  # predictions drawn; the table lists all
DRAWN_OF_EACH = 5  # best predictions of one protein or complex
CHAINS = 6  # largest complex whose chains' pTM are shown; summary.json has all
LENGTHS = 10  # distinct lengths from which time is plotted
ARCHIVED = ("mmcif", "pdb", "scores", "relaxed_mmcif", "relaxed_pdb")  # and the figures
EARLIEST = (1980, 1, 1, 0, 0, 0)  # time in an archive
ENERGIES = ("energy_before", "energy_after")  # of a relaxation


def prediction_report(out: Path, summary: dict[str, Any]) -> ReportPage:
    """Build the report of `warpfold predict`, from its summary and the files listed there."""
    entries, failures = summary["predictions"], summary["failures"]
    best = _best(summary)
    labels = {entry["name"]: _label(entry) for entry in best}
    alone = len(best) == 1 and not failures
    sections = [_pairs(summary["pairs"], best)] if "pairs" in summary and best else []
    sections += [Section("All proteins", table=_all_proteins(best))] if best and not alone else []
    if len(entries) > len(best):
        sections.append(_ranking(entries, summary["ranking"]))
    if failures:
        errors = [[_label(failure), failure["error"]] for failure in failures]
        sections.append(Section("Failed", table=ReportTable(["protein", "error"], errors)))
    if template_rows := _template_rows(out, best):
        text = "NAME_templates.json in the protein's folder has the outcome of every template that was offered."
        header = ["protein", "template", "residues", "identity", "note"]
        sections.append(Section("Templates", text, table=ReportTable(header, template_rows)))
    if len({entry["length"] for entry in entries}) >= LENGTHS:
        sections.append(_seconds(entries, summary.get("processes", ())))
    facts = _sizes(best[0]) if alone else [("proteins folded", str(len(best)))]
    if failures:
        facts.append(("failed", str(len(failures))))
    if alone:  # a mean over different proteins has no meaning
        facts.append(("mean pLDDT", f"{best[0]['mean_plddt']:.1f}"))
        scores = ((title, best[0].get(key)) for key, title in (("iptm", "ipTM"), ("ptm", "pTM")))
        facts += [(title, f"{value:.2f}") for title, value in scores if value is not None]
    facts.append(("seconds in all", f"{summary['seconds']:.0f}"))
    drawn_entries = [entry for entry in entries if _rank(entry) <= DRAWN_OF_EACH and entry["files"]][:DRAWN]
    names = ", ".join(model["file"] for model in summary["models"])
    drawn_text = (
        f", the {'first' if len(entries) == len(best) else 'best'} {len(drawn_entries)} drawn"
        if drawn_entries != entries
        else ""
    )
    versions, first = summary["versions"], summary["settings"]["seed"]
    last = first + summary["settings"]["seeds"] - 1
    seeds = f"seed {first}" if first == last else f"seeds {first} to {last}"
    digests = ", ".join(model["sha256"] for model in summary["models"])
    return ReportPage(
        title=best[0]["name"] if alone else "Predicted structures",
        lead=f"Folded by WarpFold with {names}{drawn_text}.",
        facts=facts,
        sections=sections,
        # The warnings of a single protein are shown above the numbers already.
        targets=[
            target_of(out, entry | ({"warnings": []} if alone and entry is best[0] else {})) for entry in drawn_entries
        ],
        warnings=[
            Warned(
                warning.said,
                {} if alone else {labels.get(name, name): detail for name, detail in warning.about.items()},
            )
            for warning in warnings_of(summary)
        ],
        footer=[
            f"WarpFold {versions['warpfold']} · torch {versions['torch']} · {summary['device']} · "
            f"{seeds} · parameters sha256 {digests}"
        ],
    )


def archive_path(out: Path, name: str) -> Path:
    """Return the path of the archive of a query's results."""
    return out / file_name(name) / file_names(name)["archive"]


def write_archives(out: Path, summary: Mapping[str, Any]) -> None:
    """Write the results of each query into an archive: structures, scores, figures, report and references.

    All files have the same time, so that equal results make equal archives.
    """
    for name in dict.fromkeys(entry["name"] for entry in summary["predictions"] if entry["files"]):
        query_results = {
            key: [result for result in summary[key] if result["name"] == name] for key in ("predictions", "failures")
        }
        query_summary = {key: value for key, value in summary.items() if key != "pairs"} | query_results
        query_summary["input_warnings"] = {
            key: notices for key, notices in summary["input_warnings"].items() if key == name
        }
        files = {"report.html": render(prediction_report(out, query_summary)).encode()}
        sources = {CITATIONS: out / CITATIONS}
        for entry in query_results["predictions"]:
            sources |= _archived(out, entry)
        content, stem = io.BytesIO(), file_name(name)
        with zipfile.ZipFile(content, "w") as archive:
            for file in sorted({*files, *sources}):
                info = zipfile.ZipInfo(f"{stem}/{file}", EARLIEST)
                info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
                archive.writestr(info, files[file] if file in files else sources[file].read_bytes())
        write_atomically(archive_path(out, name), content.getvalue())


def _archived(out: Path, entry: Mapping[str, Any]) -> dict[str, Path]:
    """Return the files of a prediction that belong into the archive, by the names that they have there."""
    folder, stem = out / entry["folder"], file_name(entry["name"])
    label = f"{stem}_rank_{entry['rank']}" if "ranked" in entry else stem
    names_by_kind = {kind: name for kind, name in file_names(entry["name"]).items() if (folder / name).is_file()}
    kinds = [kind for kind in names_by_kind if kind in ARCHIVED or kind.endswith(FORMATS)]
    files = {label + names_by_kind[kind].removeprefix(stem): folder / names_by_kind[kind] for kind in kinds}
    # The copies by rank are superposed.
    return files | {Path(copy).name: out / copy for copy in entry.get("ranked", {}).values()}


def _sizes(entry: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the numbers of residues, chains and alignment rows of a prediction, with their names."""
    counts = {"residue": entry["length"], "chain": len(entry.get("chains", "A"))}
    labelled_counts = [(name + "s" * (count != 1), f"{count:,}") for name, count in counts.items()]
    depth, given_depth = entry["msa_depth"], entry.get("msa_given", entry["msa_depth"])
    rows = f"{depth:,}" if depth == given_depth else f"{depth:,} of {given_depth:,}"
    return [*labelled_counts, ("alignment row" if rows == "1" else "alignment rows", rows)]


def headline(entry: Mapping[str, Any]) -> str:
    """Describe the size of a prediction: "345 residues, 2 chains, 632 of 1,024 alignment rows"."""
    return ", ".join(f"{count} {name}" for name, count in _sizes(entry))


def _rank(entry: Mapping[str, Any]) -> int:
    """Return the rank of a prediction among those of its protein; entries without a rank have no competitors."""
    return int(entry.get("rank", 1))


def _best(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the entry of the best prediction of each protein."""
    return [entry for entry in summary["predictions"] if _rank(entry) == 1]


def warnings_of(summary: Mapping[str, Any]) -> list[Warned]:
    """Return the warnings of a summary, each kind once, with the proteins that it concerns.

    Warnings about the run come first, then those about the input (of failed proteins too), and those about each
    protein's best prediction.  The terminal and the report show these warnings.
    """
    records_by_query = [
        *summary["input_warnings"].items(),
        *((entry["name"], entry["warnings"]) for entry in _best(summary)),
    ]
    notices = [(name, of_record(record)) for name, records in records_by_query for record in records]
    return [*(Warned(record["text"]) for record in summary.get("warnings", ())), *each_kind_once(notices)]


def warning_lines(summary: Mapping[str, Any]) -> list[str]:
    """Format `warnings_of` a summary for the terminal and the log."""
    return [f"{warning.heading('queries') or 'warning: '}{warning.said}" for warning in warnings_of(summary)]


def _all_proteins(entries: Sequence[Mapping[str, Any]]) -> ReportTable:
    """Build a table with the best prediction of each protein or complex."""
    complexes = any("chains" in entry for entry in entries)
    header = ["protein", "residues", "alignment rows", "mean pLDDT", "pTM", "seconds", "warnings"]
    if complexes:
        header[1:1], header[5:5] = ["chains"], ["ipTM"]
    rows = []
    for entry in entries:
        row = [_label(entry), f"{entry['length']}", f"{entry['msa_depth']}", f"{entry['mean_plddt']:.1f}",
               _score(entry["ptm"]), f"{sum(entry['seconds'].values()):.1f}", str(len(entry["warnings"]))]  # fmt: skip
        if complexes:
            row[1:1], row[5:5] = [str(len(entry.get("chains", "A")))], [_score(entry.get("iptm"))]
        rows.append(row)
    return ReportTable(header, rows)


def _pairs(names: Sequence[str], entries: Sequence[Mapping[str, Any]]) -> Section:
    """Plot ipTM and ipSAE of the best prediction of each pair of chains."""
    indices = {name: pair for pair, name in pair_names(names).items()}
    matrices = {title: np.full((len(names), len(names)), np.nan) for title in ("ipTM", "ipSAE")}
    for entry in entries:
        i, j = indices[entry["name"]]
        for title, value in (("ipTM", entry["iptm"]), ("ipSAE", entry.get("scores", {}).get("ipsae"))):
            if value is not None:
                matrices[title][i, j] = matrices[title][j, i] = value
    drawn_matrices = {title: values for title, values in matrices.items() if not np.isnan(values).all()}
    text = f"{len(entries)} of {len(indices)} pairs of {len(names)} chains. scores.csv has all numbers."
    figure = (
        [(figures.draw_pairs(names, drawn_matrices), "Blank where a pair was not predicted.")] if drawn_matrices else []
    )
    return Section("All against all", text, figure)


def _ranking(entries: Sequence[Mapping[str, Any]], ranking: Mapping[str, Mapping[str, Any]]) -> Section:
    """Build the table of all predictions of each protein, best first."""
    rank_measures = dict.fromkeys(query_ranking["by"] for query_ranking in ranking.values())
    measures = [measure for measure in rank_measures if "pLDDT" not in measure]  # pLDDT has its own column
    header = ["prediction", "model", "seed", *measures, "mean pLDDT"]
    complexes = any("iptm" in entry for entry in entries)
    rows = []
    for entry in entries:
        basis = ranking[entry["name"]]["by"]
        values = [f"{entry['ranking_confidence']:.3f}" if basis == measure else "" for measure in measures]
        row = [_label(entry), entry["model"], str(entry["seed"]), *values, f"{entry['mean_plddt']:.1f}"]
        row += [_score(entry.get("iptm"))] if complexes else []
        rows.append([*row, _score(entry["ptm"])])
    text = f"Best first, by {' or '.join(rank_measures)}."
    return Section("Ranking", text, table=ReportTable([*header, *(["ipTM"] if complexes else []), "pTM"], rows))


def _seconds(entries: Sequence[Mapping[str, Any]], processes: Sequence[Mapping[str, Any]]) -> Section:
    """Plot the time of predictions against their length, and sum up the waiting times of devices."""
    seconds = {kind: [entry["seconds"][kind] for entry in entries] for kind in ("model", "features")}
    residues = [entry["length"] for entry in entries]
    milliseconds = 1e3 * sum(seconds["model"]) / sum(residues)
    text = f"{sum(residues)} residues, {milliseconds:.3g} ms of the model each. "
    text += (
        "Proteins that shared a pass share its seconds equally. "
        if any("together" in entry for entry in entries)
        else ""
    )
    names = {"computing": "computing", "waiting_for_features": "for features", "waiting_for_files": "for files"}
    seconds_by_kind = {key: sum(process.get(key, 0.0) for process in processes) for key in names}
    if loop_seconds := sum(seconds_by_kind.values()):
        waits = ", ".join(f"{seconds_by_kind[key]:.1f} s {name}" for key, name in names.items() if key != "computing")
        waiting_share = 1 - seconds_by_kind["computing"] / loop_seconds
        text += (
            f"Of {loop_seconds:.0f} s in the last runs' loops the model computed {seconds_by_kind['computing']:.0f} s "
        )
        text += f"and waited {waiting_share:.1%}: {waits}."
    figure = figures.draw_seconds(residues, {"model": seconds["model"], "features": seconds["features"]})
    return Section("Time", text, [(figure, "Each dot is a prediction; features are made while another one computes.")])


def _relaxed(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the numbers of a relaxation (docs/howto/score.md)."""
    before, after = (report[f"violations_{moment}"]["residues"] for moment in ("before", "after"))
    energies = " → ".join("infinite" if energy is None else f"{energy:.4g}" for energy in map(report.get, ENERGIES))
    return [
        ("relaxed: residues with violations", f"{before} → {after}"),
        ("energy, kcal/mol", energies),
        ("Cα moved, Å", f"{report['ca_rmsd']:.2f}"),
    ]


def _label(entry: Mapping[str, Any]) -> str:
    """Return the label of a prediction: its protein's name, with the rank, or the model and seed, if it has several."""
    if "ranked" in entry:
        return f"{entry['name']}, rank {entry['rank']}"
    failed = "error" in entry and "model" in entry
    return f"{entry['name']} ({entry['model']}, seed {entry['seed']})" if failed else entry["name"]


def _score(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _template_rows(out: Path, entries: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Build a row for each template that a protein used, and one with the number of unused templates."""
    rows: list[list[str]] = []
    for entry in (entry for entry in entries if "templates" in entry["files"]):
        outcomes = json.loads((out / entry["folder"] / entry["files"]["templates"]).read_text(encoding="utf-8"))
        for outcome in (outcome for outcome in outcomes if outcome["used"]):
            name = f"{outcome['name']} on {', '.join(outcome['chains'])}" if outcome.get("chains") else outcome["name"]
            rows.append([_label(entry), name, f"{outcome['residues']}", f"{outcome['identity']:.0%}", outcome["note"]])
        if unused := entry["templates_unused"]:
            rows.append([_label(entry), f"{unused} not used", "", "", ""])
    return rows


def target_of(out: Path, entry: Mapping[str, Any], **truth: Any) -> Target:
    """Read an entry of the summary from its files in `out`, in the form that the report draws.

    truth: fields of `Target` that compare it with a known structure; its `numbers` follow the prediction's.
    """
    folder, files = out / entry["folder"], entry["files"]
    with np.load(folder / files["arrays"], allow_pickle=False) as arrays:
        ca, plddt = arrays["positions"][:, ATOM_ORDER["CA"]], arrays["plddt"]
        pae = arrays["pae"] if "pae" in arrays.files else None
        coverage = None
        # Predictions of other ranks have the same alignment.
        if "coverage_rows" in arrays.files and _rank(entry) == 1:
            depth, rows, total = (arrays[f"coverage_{name}"] for name in ("depth", "rows", "total"))
            coverage = Coverage(depth, rows, int(total))
    numbers = [_sizes(entry)[0], ("mean pLDDT", f"{entry['mean_plddt']:.1f}")]
    if entry.get("iptm") is not None:
        numbers.append(("ipTM", f"{entry['iptm']:.2f}"))
    if entry["ptm"] is not None:
        numbers.append(("pTM", f"{entry['ptm']:.2f}"))
    chain_scores = [(chain["id"], chain["ptm"]) for chain in entry.get("chains", ()) if chain.get("ptm") is not None]
    if 0 < len(chain_scores) <= CHAINS:
        numbers.append(("pTM of each chain", ", ".join(f"{chain} {ptm:.2f}" for chain, ptm in chain_scores)))
    numbers.append(_sizes(entry)[-1])
    if "paired_rows" in entry:
        numbers.append(("paired rows", str(entry["paired_rows"])))
    if "ranked" in entry:
        numbers += [("model", entry["model"]), ("seed", str(entry["seed"]))]
    if "templates" in files:
        numbers.append(("templates", str(len(entry["templates"]))))
    if "relaxed" in entry:
        numbers += _relaxed(entry["relaxed"])
    numbers += truth.pop("numbers", ())
    max_pae = 0.0
    if "pae" in files:
        # The upper bound of PAE is at the end of the file, so the rest need not be read.
        with (folder / files["pae"]).open("rb") as file:
            file.seek(-min(100, os.fstat(file.fileno()).st_size), os.SEEK_END)
            max_pae = float(file.read().decode().rpartition(":")[2].rstrip("}]"))
    ends = np.cumsum([chain["length"] for chain in entry.get("chains", ())]).tolist()
    # The copies by rank are superposed.
    structure = out / entry["ranked"]["mmcif"] if "ranked" in entry else folder / files["mmcif"]
    return Target(
        name=_label(entry),
        sequence=entry["sequence"],
        plddt=plddt,
        ca=ca,
        mmcif=structure.read_text(encoding="utf-8"),
        pae=pae,
        max_pae=max_pae,
        has_pdb="pdb" in files,
        numbers=numbers,
        warnings=[record["text"] for record in entry["warnings"]],
        chains={chain["id"]: slice(end - chain["length"], end) for chain, end in zip(entry.get("chains", ()), ends)},
        coverage=coverage,
        group=entry["name"] if "ranked" in entry else "",
        note=f"rank {entry['rank']}: {entry['model']}, seed {entry['seed']}" if "ranked" in entry else "",
        interfaces=[
            [
                "-".join(interface["chains"]),
                _score(interface["iptm"]),
                f"{interface['plddt']:.1f}",
                str(interface["contacts"]),
            ]
            for interface in entry.get("interfaces", ())
        ],
        **truth,
    )
