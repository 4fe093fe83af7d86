"""Relax the predictions in a folder of `warpfold predict`, or mmCIF and PDB files (docs/howto/score.md).

The results of NAME.cif are NAME_relaxed.cif, NAME_relaxed.pdb and the report NAME_relaxed.json, in the same folder.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import gemmi
import numpy as np
from gemmi import cif

from warpfold.data.structure import pdb
from warpfold.data.structure.chain import Chain
from warpfold.data.structure.mmcif import parse_structure
from warpfold.data.structure.write import Modelling, write_mmcif, write_pdb
from warpfold.errors import UserError
from warpfold.files import read_file, sealed, write_atomically, write_summary
from warpfold.geometry.residue import ATOM_TYPES
from warpfold.prediction.folding import FAILURES, one_line
from warpfold.prediction.pages import prediction_report
from warpfold.progress import Progress, no_progress
from warpfold.relaxation.amber import require_openmm
from warpfold.relaxation.relax import relax_chains
from warpfold.report.report import write_report

FORMAT = "warpfold-relaxed-1"
# Prefix of the format in a prediction folder's summary.
PREDICTIONS = "warpfold-predictions-"

Which = Literal["all", "best"]


@dataclass(frozen=True)
class RelaxTarget:
    """A structure to relax.

    path: its file. stem: name of the file without endings. folder: the output folder of `predict`; None for a single
    file.
    """

    name: str
    path: Path
    stem: str
    folder: Path | None = None

    def result(self, ending: str) -> Path:
        """Return the path of a result."""
        return self.path.with_name(f"{self.stem}_relaxed{ending}")


def relax_paths(
    paths: Sequence[Path],
    device: str = "cpu",
    which: Which = "all",
    force: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Relax structures; returns the reports, {"relaxed": [...], "failures": [...]}.

    Existing results are kept unless their input has changed or `force` is set. Each prediction of a folder gets an
    entry "relaxed" in summary.json, and report.html shows it.
    which: "best" relaxes the first-ranked prediction of each query only.
    Raises UserError, before anything is relaxed, if OpenMM is missing, a path is neither a file nor an output folder,
    or a result would replace another file.
    """
    require_openmm()
    report_progress = progress or no_progress
    targets = [target for path in paths for target in find_targets(path, which)]
    existing: dict[Path, dict[str, Any] | None] = {}
    for target in targets:
        if (result := target.result(".json")) in existing:
            raise UserError(f"{result}: would be written for two of the files; relax one of them")
        existing[result] = check_result(target, force)
    relaxed, failures = [], []
    for number, target in enumerate(targets):
        report_progress(number, len(targets), target.name)
        earlier = existing[target.result(".json")]
        try:
            report = earlier or relax_file(target, device)
        except FAILURES as error:
            failures.append({"name": target.name, "error": one_line(error)})
            continue
        if target.folder:
            _add_to_summary(target, report)
        path = str(target.result(".cif"))
        relaxed.append({"name": target.name, "path": path, "kept": earlier is not None, **report})
    report_progress(len(targets), len(targets), "writing the report")
    for folder in dict.fromkeys(target.folder for target in targets if target.folder):
        summary = _read_summary(folder)
        drawn = [
            folder / name
            for entry in summary["predictions"]
            for name in (
                *(f"{entry['folder']}/{file}" for file in entry["files"].values()),
                *entry.get("ranked", {}).values(),
            )
        ]
        # The report cannot be drawn again if the user removed some of the predictions.
        if all(file.is_file() for file in drawn):
            write_report(folder / "report.html", prediction_report(folder, summary))
    return {"relaxed": relaxed, "failures": failures}


def find_targets(path: Path, which: Which = "all") -> Iterator[RelaxTarget]:
    """Find the structures to relax at a path: a folder's predictions, or a file that is not itself a relaxed result.

    Raises UserError for a folder that `predict` did not write.
    """
    if not path.is_dir():
        stem = path.name.removesuffix(".gz")
        stem = stem.removesuffix(Path(stem).suffix)
        if not (stem.endswith("_relaxed") and path.with_name(stem + ".json").is_file()):
            yield RelaxTarget(stem, path, stem)
        return
    summary = _read_summary(path)
    for entry in summary["predictions"]:
        if (which == "best" and entry.get("rank", 1) > 1) or entry.get("dropped"):
            continue
        file = path / entry["folder"] / entry["files"]["mmcif"]
        yield RelaxTarget(entry["name"], file, file.name.removesuffix(".cif"), path)


def check_result(target: RelaxTarget, force: bool) -> dict[str, Any] | None:
    """Return the report of an earlier relaxation of this structure; None if it must be relaxed.

    Raises UserError if the result of a single file would replace a file that is not an earlier result.
    """
    report: Any = None
    if target.result(".json").is_file():
        try:
            report = json.loads(target.result(".json").read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            report = None
    is_result = isinstance(report, dict) and report.get("format") == FORMAT
    present = [target.result(ending) for ending in (".cif", ".pdb", ".json") if target.result(ending).exists()]
    if present and not is_result and target.folder is None:
        raise UserError(f"{present[0]}: exists already, and is no result of `warpfold relax`; move it away")
    if force or not is_result:
        return None
    is_complete = all(target.result(Path(name).suffix).is_file() for name in report["files"].values())
    if is_complete and report["input"] == hashlib.sha256(read_file(target.path)).hexdigest():
        return report
    if target.folder is None:
        raise UserError(f"{present[0]}: was made of another {target.path.name}; replace it with --force")
    return None


def relax_file(target: RelaxTarget, device: str = "cpu") -> dict[str, Any]:
    """Relax one structure, write the results next to its file, and return the report.

    No PDB file is written for a structure that the PDB format cannot hold.
    Raises UserError for unreadable and unwritable files, and as `relax_chains` does.
    """
    data = read_file(target.path)
    structure = parse_structure(data, str(target.path))
    structure.check_placed(str(target.path))
    chains, relaxation = relax_chains(list(structure.chains.values()), device)
    b_factors = read_b_factors(data, chains)
    openmm = require_openmm().__version__
    predicted = Modelling(refined_by=("OpenMM", openmm)) if b"_ma_qa_metric" in data else None
    texts = {"mmcif": write_mmcif(target.name, chains, b_factors=b_factors, predicted=predicted)}
    notes = [*structure.notes, *(f"chain {name} left out: {reason}" for name, reason in structure.dropped.items())]
    try:
        texts["pdb"] = write_pdb(target.name, chains, b_factors=b_factors)
    except UserError as error:
        # An earlier relaxation may have left a PDB file.
        target.result(".pdb").unlink(missing_ok=True)
        notes.append(str(error))
    files = {kind: target.result({"mmcif": ".cif", "pdb": ".pdb"}[kind]) for kind in texts}
    report = {
        "format": FORMAT,
        "input": hashlib.sha256(data).hexdigest(),
        "files": {kind: file.name for kind, file in files.items()},
        "openmm": openmm,
        **asdict(relaxation),
        "notes": notes,
    }
    for kind, text in texts.items():
        write_atomically(files[kind], text)
    write_atomically(target.result(".json"), json.dumps(report, indent=1) + "\n")
    return report


def read_b_factors(data: bytes, chains: Sequence[Chain]) -> list[np.ndarray]:
    """Read the B factors of each chain from a structure file, [N, 37].

    Atoms that the file lacks get the mean of their residue, or 0 if the residue has no atoms.
    """
    b_factor_of: dict[tuple[str, str, str], float] = {}
    text = data.decode("latin-1")
    is_mmcif = "_atom_site." in text
    for part in (pdb.make_structure(cif.read_string(text)[0]) if is_mmcif else gemmi.read_pdb_string(text))[0]:
        for residue in part:
            for atom in residue:
                b_factor_of.setdefault((part.name, str(residue.seqid), atom.name), atom.b_iso)
    b_factors = []
    for chain in chains:
        numbers = chain.author_numbers
        b = np.array([[b_factor_of.get((chain.id, number, name), np.nan) for name in ATOM_TYPES] for number in numbers])
        has_value = np.isfinite(b)
        mean = np.where(has_value, b, 0).sum(1) / np.maximum(has_value.sum(1), 1)
        b_factors.append(np.where(has_value, b, mean[:, None]))
    return b_factors


def _read_summary(folder: Path) -> dict[str, Any]:
    """Read the summary of an output folder of `predict`. Raises UserError if it is something else."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        summary = None
    if isinstance(summary, dict) and "checksum" in summary and summary != sealed(summary):
        raise UserError(
            f"{folder / 'summary.json'}: was changed or damaged; put a copy back, or `warpfold predict --force`"
        )
    if not isinstance(summary, dict) or not str(summary.get("format")).startswith(PREDICTIONS):
        raise UserError(f"{folder}: is no output of `warpfold predict`; give such a folder, or mmCIF or PDB files")
    return summary


def _add_to_summary(target: RelaxTarget, report: dict[str, Any]) -> None:
    """Add the report to the summary of the prediction's folder if it is missing there."""
    assert target.folder is not None
    summary = _read_summary(target.folder)
    for entry in summary["predictions"]:
        file = target.folder / entry["folder"] / entry["files"].get("mmcif", "")
        if file == target.path and entry.get("relaxed") != report:
            entry["relaxed"] = report
            write_summary(target.folder, summary)
