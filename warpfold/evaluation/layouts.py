"""Find the predictions in a folder, whoever wrote them: who did is told by the names of the files."""

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from warpfold.data.formats.input_files import ALIGNMENTS, find, walk
from warpfold.data.formats.predictions import CASP, STRUCTURE, first_of, is_pdb, read_name
from warpfold.errors import UserError
from warpfold.evaluation.truths import target_key
from warpfold.files import read_file

_RANKED = re.compile(r"ranked_(\d+)")
_SAMPLE = re.compile(r"seed-\d+_sample-\d+")  # AlphaFold 3's folders beside the best model


@dataclass(frozen=True)
class PredictedFile:
    """A predicted structure, and what lies beside it.

    target: what it is a prediction of.  names: what its truth may be called, the likeliest first.  rank: by its own
    program, 1 is the best.  order: of files that hold the same prediction, the smallest is read.
    pae: the file that has the matrix.  depth: rows of its alignment, or else `alignments`, the files to count them in.
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
        """Whether its program is known to write pLDDT into the B column."""
        return self.layout not in ("CASP", "plain files")


@dataclass(frozen=True)
class Predictions:
    """What a folder holds.  failures: by target, what its program could not predict, where it says so."""

    folder: Path
    files: Sequence[PredictedFile]
    failures: Mapping[str, str] = field(default_factory=dict)

    @property
    def layouts(self) -> str:
        """Return who wrote them, and how many each."""
        counted = Counter(file.layout for file in self.files)
        only = len(counted) == 1
        return ", ".join(layout if only else f"{layout} ({count})" for layout, count in counted.most_common())


def find_predictions(folder: Path, all_models: bool = False) -> Predictions:
    """Return the predictions in a folder and its subfolders: of each target the best by its program's own ranking.

    all_models: all of them.
    Errors: UserError for a folder that is not there or has none, and where two files are one target's best.
    """
    if not folder.is_dir():
        what = "is a file; `warpfold score` compares two of them" if folder.exists() else "no such folder"
        raise UserError(f"{folder}: {what}; give a folder of predictions")
    if (folder / "summary.json").is_file() and (found := _ours(folder)) is not None:
        files, failures = found
    else:
        files, failures = _others(folder), {}
    if not files and not failures:
        if (folder / "metrics.jsonl").is_file():
            raise UserError(f"{folder}: is a training run; `warpfold validate` folds what it holds out")
        raise UserError(f"{folder}: has no predicted structures; their names end in .cif, .pdb or .ent, or .gz")
    by_target: dict[str, list[PredictedFile]] = {}
    for file in files:
        by_target.setdefault(target_key(file.target), []).append(file)
    kept = []
    for several in by_target.values():
        ranked: dict[int, list[PredictedFile]] = {}
        for file in several:
            ranked.setdefault(file.rank, []).append(file)
        for rank in sorted(ranked)[: None if all_models else 1]:
            best, *others = sorted(ranked[rank], key=lambda file: (file.order, str(file.path)))
            if others and others[0].order == best.order:
                both = " and ".join(os.path.relpath(file.path, folder) for file in (best, others[0]))
                raise UserError(f"{folder}: {both} are both of {best.target}; keep one of them")
            kept.append(best)
    return Predictions(folder, kept, failures)


def _ours(folder: Path) -> tuple[list[PredictedFile], dict[str, str]] | None:
    """Return the predictions and failures in a summary of `warpfold predict`; None if it is another program's."""
    path, folder = folder / "summary.json", folder.absolute()  # a cluster's workers are in another one
    try:
        summary = json.loads(path.read_bytes())
        if not str(summary["format"]).startswith("warpfold-predictions-"):
            return None
        files = []
        for entry in summary["predictions"]:
            if not (own := entry["files"]):  # --keep did not keep it
                continue
            kinds = {"name": str, "msa_depth": int | None, "rank": int | None}
            if wrong := [name for name, kind in kinds.items() if not isinstance(entry.get(name), kind)]:
                raise TypeError(f"{wrong[0]} of a prediction is {entry.get(wrong[0])!r:.40}")
            files.append(
                PredictedFile(
                    target=entry["name"],
                    path=folder / entry["folder"] / own.get("mmcif", own.get("pdb")),
                    layout="WarpFold",
                    names=(entry["name"],),
                    rank=entry.get("rank", 1),
                    model=f"{entry['model']}, seed {entry['seed']}",
                    pae=next((folder / entry["folder"] / own[kind] for kind in ("arrays", "pae") if kind in own), None),
                    depth=entry["msa_depth"],
                )
            )
        return files, {failure["name"]: failure["error"] for failure in summary["failures"]}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: is damaged, or no summary of `warpfold predict` ({error}); predict again") from None


def _others(folder: Path) -> list[PredictedFile]:
    """Return what the names of files say."""
    folders: dict[Path, dict[str, Path]] = {}
    for path in walk(folder.absolute(), ("",)):
        folders.setdefault(path.parent, {})[path.name] = path
    found: list[PredictedFile] = []
    for here, names in folders.items():
        if _SAMPLE.fullmatch(here.name):
            continue
        structures = {match[1]: path for name, path in names.items() if (match := STRUCTURE.fullmatch(name))}
        if any(map(_RANKED.fullmatch, structures)):
            found += _alphafold(here, names)
            continue
        for name, path in names.items():
            if STRUCTURE.fullmatch(name) or CASP.fullmatch(name):
                found.append(_one(path, names))
    groups = dict.fromkeys(one.model for one in found if one.layout == "CASP")
    if len(groups) > 1:
        raise UserError(f"{folder}: has models of {len(groups)} groups of CASP ({', '.join(groups)}); keep one's only")
    return found


def _alphafold(folder: Path, names: Mapping[str, Path]) -> list[PredictedFile]:
    """Return the ranked models of a folder that AlphaFold has written for one target."""
    order: Sequence[str] = ()
    if "ranking_debug.json" in names:
        ranking = _json(names["ranking_debug.json"])
        order = ranking.get("order", ()) if isinstance(ranking, dict) else ()
        if not isinstance(order, list | tuple):
            raise UserError(
                f"{names['ranking_debug.json']}: its order is no list of models. Fetch it again, or remove it."
            )
    there = (folder / "msas").is_dir() and any(walk(folder / "msas", ALIGNMENTS))
    beside = find([folder / "msas"], ALIGNMENTS, "alignments") if there else []
    alignments = tuple(file.path for file in beside if not (file.is_hits or file.serves_pairing))
    found = []
    for name, path in names.items():
        match = STRUCTURE.fullmatch(name)
        if match is None or (ranked := _RANKED.fullmatch(match[1])) is None:
            continue
        place = int(ranked[1])
        model = str(order[place]) if place < len(order) else match[1]
        target = folder.resolve().name
        pae = first_of(names, f"pae_{model}.json")
        known = PredictedFile(target, path, "AlphaFold", (target,), place + 1, model, (is_pdb(path),), pae)
        found.append(replace(known, alignments=alignments))
    return found


def _one(path: Path, names: Mapping[str, Path]) -> PredictedFile:
    """Return what the name of a file says of it; names: of the files beside it.  Relaxed structures go first."""
    named = read_name(path, names)
    order = -named.version, named.is_pass, not named.relaxed, is_pdb(path)
    rows = first_of(names, f"{named.target}.a3m") if named.layout == "ColabFold" else None
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


def _json(path: Path) -> Any:
    try:
        return json.loads(read_file(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is no JSON ({error}); fetch it again, or remove it") from None
