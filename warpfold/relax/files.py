"""Relax what lies in files: the predictions of a folder of `warpfold predict`, or mmCIF and PDB files (docs/relax.md).

Beside NAME.cif come NAME_relaxed.cif, NAME_relaxed.pdb and NAME_relaxed.json, which says what was done, and of what.
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
from warpfold.files import read_file, sealed, write_atomically
from warpfold.geometry.residue import ATOM_TYPES
from warpfold.prediction.folding import FAILURES, one_line
from warpfold.prediction.outputs import write_summary
from warpfold.prediction.pages import prediction_report
from warpfold.progress import Progress, no_progress
from warpfold.relax.amber import require_openmm
from warpfold.relax.relax import relax_chains
from warpfold.report.report import write_report

FORMAT = "warpfold-relaxed-1"
PREDICTIONS = "warpfold-predictions-"  # how the format of a folder's summary begins

Which = Literal["all", "best"]


@dataclass(frozen=True)
class RelaxTarget:
    """A structure to relax: its file, the name of its result without endings, and the folder with its summary."""

    name: str
    path: Path
    stem: str
    folder: Path | None = None  # of the run of `predict`; None for a file of its own

    def result(self, ending: str) -> Path:
        return self.path.with_name(f"{self.stem}_relaxed{ending}")


def relax_paths(
    paths: Sequence[Path],
    device: str = "cpu",
    which: Which = "all",
    force: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Relax structures one after another; return what was done, {"relaxed": [...], "failures": [...]}.

    A structure that is relaxed already is kept, unless it has changed since or `force` is given.  Each prediction of a
    folder gets an entry "relaxed" in its summary.json, and the folder's report.html shows it.
    which: "best": of several predictions of one query, the one that is ranked first.
    Errors: UserError without OpenMM, for a path that is neither, or where a file that is no earlier result would be
    replaced; then nothing is relaxed.
    """
    require_openmm()
    tell = progress or no_progress
    targets = [target for path in paths for target in find_targets(path, which)]
    kept: dict[Path, dict[str, Any] | None] = {}
    for target in targets:
        if (result := target.result(".json")) in kept:
            raise UserError(f"{result}: would be written for two of the files; relax one of them")
        kept[result] = check_result(target, force)
    relaxed, failures = [], []
    for number, target in enumerate(targets):
        tell(number, len(targets), target.name)
        earlier = kept[target.result(".json")]
        try:
            report = earlier or relax_file(target, device)
        except FAILURES as error:
            failures.append({"name": target.name, "error": one_line(error)})
            continue
        if target.folder:
            _note(target, report)
        path = str(target.result(".cif"))
        relaxed.append({"name": target.name, "path": path, "kept": earlier is not None, **report})
    tell(len(targets), len(targets), "writing the report")
    for folder in dict.fromkeys(target.folder for target in targets if target.folder):
        summary = _summary(folder)
        drawn = [folder / one["folder"] / file for one in summary["predictions"] for file in one["files"].values()]
        if all(file.is_file() for file in drawn):  # with what was relaxed
            write_report(folder / "report.html", prediction_report(folder, summary))
    return {"relaxed": relaxed, "failures": failures}


def find_targets(path: Path, which: Which = "all") -> Iterator[RelaxTarget]:
    """Yield the structures to relax at a path: a folder's predictions, or a file that is no result of relaxing.

    Errors: UserError for a folder that `predict` did not write.
    """
    if not path.is_dir():
        stem = path.name.removesuffix(".gz")
        stem = stem.removesuffix(Path(stem).suffix)
        if not (stem.endswith("_relaxed") and path.with_name(stem + ".json").is_file()):
            yield RelaxTarget(stem, path, stem)
        return
    summary = _summary(path)
    for entry in summary["predictions"]:
        if (which == "best" and entry.get("rank", 1) > 1) or entry.get("dropped"):
            continue
        file = path / entry["folder"] / entry["files"]["mmcif"]
        yield RelaxTarget(entry["name"], file, file.name.removesuffix(".cif"), path)


def check_result(target: RelaxTarget, force: bool) -> dict[str, Any] | None:
    """Return the report of an earlier relaxation of this structure, None if it must be relaxed.

    Errors: UserError if files of such names are no result of this structure, and not beside a prediction.
    """
    report: Any = None
    if target.result(".json").is_file():
        try:
            report = json.loads(target.result(".json").read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            report = None
    known = isinstance(report, dict) and report.get("format") == FORMAT
    taken = [target.result(ending) for ending in (".cif", ".pdb", ".json") if target.result(ending).exists()]
    if taken and not known and target.folder is None:
        raise UserError(f"{taken[0]}: exists already, and is no result of `warpfold relax`; move it away")
    if force or not known:
        return None
    whole = all(target.result(Path(name).suffix).is_file() for name in report["files"].values())
    if whole and report["input"] == hashlib.sha256(read_file(target.path)).hexdigest():
        return report
    if target.folder is None:
        raise UserError(f"{taken[0]}: was made of another {target.path.name}; replace it with --force")
    return None


def relax_file(target: RelaxTarget, device: str = "cpu") -> dict[str, Any]:
    """Relax one structure, write the result beside it, and return the report.

    The PDB file is left out where its format cannot hold the structure.
    Errors: UserError for a file that cannot be read or written, and as in `relax_chains`.
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
        target.result(".pdb").unlink(missing_ok=True)  # an earlier result's
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
    """Return the B factors of a structure file for each of its chains, [N, 37].

    Atoms that the file does not have get the mean of their residue, or 0 without one.
    """
    found: dict[tuple[str, str, str], float] = {}
    text = data.decode("latin-1")
    is_mmcif = "_atom_site." in text
    for part in (pdb.make_structure(cif.read_string(text)[0]) if is_mmcif else gemmi.read_pdb_string(text))[0]:
        for residue in part:
            for atom in residue:
                found.setdefault((part.name, str(residue.seqid), atom.name), atom.b_iso)
    b_factors = []
    for chain in chains:
        rows = [[found.get((chain.id, number, name), np.nan) for name in ATOM_TYPES] for number in chain.author_numbers]
        b = np.array(rows)
        seen = np.isfinite(b)
        mean = np.where(seen, b, 0).sum(1) / np.maximum(seen.sum(1), 1)
        b_factors.append(np.where(seen, b, mean[:, None]))
    return b_factors


def _summary(folder: Path) -> dict[str, Any]:
    """Return the summary of a folder of `predict`.  Errors: UserError if it is something else."""
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


def _note(target: RelaxTarget, report: dict[str, Any]) -> None:
    """Put the report into the summary of the prediction's folder, if it is not there."""
    assert target.folder is not None
    summary = _summary(target.folder)
    for entry in summary["predictions"]:
        file = target.folder / entry["folder"] / entry["files"].get("mmcif", "")
        if file == target.path and entry.get("relaxed") != report:
            entry["relaxed"] = report
            write_summary(target.folder, summary)
