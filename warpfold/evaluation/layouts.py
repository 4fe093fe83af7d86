"""Find the predictions in a folder. The names of the files tell which program wrote them."""

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from warpfold.data.formats.input_files import ALIGNMENTS, find, walk
from warpfold.data.formats.predictions import CASP, STRUCTURE, first_existing, is_pdb, parse_prediction_name
from warpfold.errors import UserError
from warpfold.evaluation.truths import target_key
from warpfold.files import read_file

_RANKED = re.compile(r"ranked_(\d+)")
# AlphaFold 3 writes every sample into such a folder and copies the best one to their parent.
_SAMPLE = re.compile(r"seed-\d+_sample-\d+")


@dataclass(frozen=True)
class PredictedFile:
    """A predicted structure and its related files.

    target: name of the predicted protein. names: possible names of its reference structure, the likeliest first. rank:
    rank by the program that wrote it, 1 is the best. order: of several files with the same prediction, the one with the
    smallest order is read. pae: file with the PAE matrix. depth: rows of the alignment; None to count them in
    `alignments`.
    """

    target: str
    path: Path
    layout: str
    names: tuple[str, ...]
    rank: int = 1
    model: str = ""
    order: tuple[int, ...] = ()
    pae: Path | None = None
    depth: int | None = None
    alignments: tuple[Path, ...] = ()

    @property
    def writes_plddt(self) -> bool:
        """Whether the program is known to write pLDDT to the B column."""
        return self.layout not in ("CASP", "plain files")


@dataclass(frozen=True)
class Predictions:
    """The predictions in a folder. failures: target -> error, if the program reports failed targets."""

    folder: Path
    files: Sequence[PredictedFile]
    failures: Mapping[str, str] = field(default_factory=dict)

    @property
    def layouts(self) -> str:
        """The programs that wrote the predictions, with counts if there are several."""
        counts = Counter(file.layout for file in self.files).most_common()
        return ", ".join(layout if len(counts) == 1 else f"{layout} ({count})" for layout, count in counts)


def find_predictions(folder: Path, all_models: bool = False) -> Predictions:
    """Find the best prediction of each target in a folder and its subfolders, by its program's own ranking.

    all_models: find the predictions of all ranks.
    Raises UserError for a missing folder, a folder without predictions, and two files with equal rank.
    """
    if not folder.is_dir():
        remedy = "Compare two files with `warpfold score`, or pass a folder" if folder.exists() else "Pass a folder"
        raise UserError(f"{folder}: {'is a file' if folder.exists() else 'no such folder'}. {remedy} of predictions")
    if (folder / "summary.json").is_file() and (ours := _read_summary(folder)) is not None:
        files, failures = ours
    else:
        files, failures = _find_by_name(folder), {}
    if not files and not failures:
        if (folder / "metrics.jsonl").is_file():
            raise UserError(f"{folder}: is a training run. Fold its held-out proteins with `warpfold validate`")
        raise UserError(f"{folder}: has no predicted structures (.cif, .pdb or .ent, optionally .gz). Check the path")
    by_target: dict[str, list[PredictedFile]] = {}
    for file in files:
        by_target.setdefault(target_key(file.target), []).append(file)
    selected = []
    for files_of_target in by_target.values():
        by_rank: dict[int, list[PredictedFile]] = {}
        for file in files_of_target:
            by_rank.setdefault(file.rank, []).append(file)
        for rank in sorted(by_rank)[: None if all_models else 1]:
            best, *other_files = sorted(by_rank[rank], key=lambda file: (file.order, str(file.path)))
            if other_files and other_files[0].order == best.order:
                paths = " and ".join(os.path.relpath(file.path, folder) for file in (best, other_files[0]))
                raise UserError(f"{folder}: {paths} are both predictions of {best.target}. Keep one of them")
            selected.append(best)
    return Predictions(folder, selected, failures)


def _read_summary(folder: Path) -> tuple[list[PredictedFile], dict[str, str]] | None:
    """Read predictions and failures from a summary of `warpfold predict`; None if another program wrote it."""
    # Workers of a cluster have another working directory.
    path, folder = folder / "summary.json", folder.absolute()
    try:
        summary = json.loads(path.read_bytes())
        if not str(summary["format"]).startswith("warpfold-predictions-"):
            return None
        files = []
        for entry in summary["predictions"]:
            # `--keep` may have removed the files.
            if not (names := entry["files"]):
                continue
            kinds = {"name": str, "msa_depth": int | None, "rank": int | None}
            if mistyped := [name for name, kind in kinds.items() if not isinstance(entry.get(name), kind)]:
                raise TypeError(f"{mistyped[0]} of a prediction is {entry.get(mistyped[0])!r:.40}")
            files.append(
                PredictedFile(
                    target=entry["name"],
                    path=folder / entry["folder"] / names.get("mmcif", names.get("pdb")),
                    layout="WarpFold",
                    names=(entry["name"],),
                    rank=entry.get("rank", 1),
                    model=f"{entry['model']}, seed {entry['seed']}",
                    pae=next((folder / entry["folder"] / names[k] for k in ("arrays", "pae") if k in names), None),
                    depth=entry["msa_depth"],
                )
            )
        return files, {failure["name"]: failure["error"] for failure in summary["failures"]}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: damaged, or not a summary of `warpfold predict` ({error}). Predict again") from None


def _find_by_name(folder: Path) -> list[PredictedFile]:
    """Find the predictions of other programs by the names of their files."""
    folders: dict[Path, dict[str, Path]] = {}
    for path in walk(folder.absolute(), ("",)):
        folders.setdefault(path.parent, {})[path.name] = path
    files: list[PredictedFile] = []
    for subfolder, names in folders.items():
        if _SAMPLE.fullmatch(subfolder.name):
            continue
        structures = {match[1]: path for name, path in names.items() if (match := STRUCTURE.fullmatch(name))}
        if any(map(_RANKED.fullmatch, structures)):
            files += _find_alphafold(subfolder, names)
            continue
        for name, path in names.items():
            if STRUCTURE.fullmatch(name) or CASP.fullmatch(name):
                files.append(_from_name(path, names))
    groups = dict.fromkeys(file.model for file in files if file.layout == "CASP")
    if len(groups) > 1:
        raise UserError(f"{folder}: has models of {len(groups)} CASP groups ({', '.join(groups)}). Keep those of one")
    return files


def _find_alphafold(folder: Path, names: Mapping[str, Path]) -> list[PredictedFile]:
    """Find the ranked models in a folder that AlphaFold wrote for one target."""
    order: Sequence[str] = ()
    if "ranking_debug.json" in names:
        ranking = _read_json(names["ranking_debug.json"])
        order = ranking.get("order", ()) if isinstance(ranking, dict) else ()
        if not isinstance(order, list | tuple):
            raise UserError(
                f"{names['ranking_debug.json']}: 'order' is not a list of models. Fetch the file again, or remove it"
            )
    has_alignments = (folder / "msas").is_dir() and any(walk(folder / "msas", ALIGNMENTS))
    msas = find([folder / "msas"], ALIGNMENTS, "alignments") if has_alignments else []
    alignments = tuple(file.path for file in msas if not (file.is_hits or file.serves_pairing))
    files = []
    for name, path in names.items():
        match = STRUCTURE.fullmatch(name)
        if match is None or (ranked := _RANKED.fullmatch(match[1])) is None:
            continue
        index = int(ranked[1])
        model = str(order[index]) if index < len(order) else match[1]
        target = folder.resolve().name
        pae = first_existing(names, f"pae_{model}.json")
        file = PredictedFile(target, path, "AlphaFold", (target,), index + 1, model, (is_pdb(path),), pae)
        files.append(replace(file, alignments=alignments))
    return files


def _from_name(path: Path, names: Mapping[str, Path]) -> PredictedFile:
    """Build the description of a prediction from its file's name; names: the files of its folder.

    Relaxed structures are preferred.
    """
    named = parse_prediction_name(path, names)
    order = -named.version, named.is_pass, not named.relaxed, is_pdb(path)
    rows = first_existing(names, f"{named.target}.a3m") if named.layout == "ColabFold" else None
    return PredictedFile(
        named.target,
        path,
        named.layout,
        named.names,
        named.rank or 1,
        named.model,
        order,
        named.pae,
        alignments=() if rows is None else (rows,),
    )


def _read_json(path: Path) -> Any:
    try:
        return json.loads(read_file(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error}). Fetch the file again, or remove it") from None
