"""Read predictions of several programs: the meaning of their file names, and their PAE matrices."""

import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from warpfold.errors import UserError
from warpfold.files import DAMAGED_ARRAYS, LARGEST, read_file

# File names of structures.
STRUCTURE = re.compile(r"(.+?)\.(cif|mmcif|pdb|ent)(\.gz)?", re.IGNORECASE)
CASP = re.compile(r"(?P<name>[THRDM]\d{4}([svx]\d+)*)TS(?P<group>\d{3})(_(?P<rank>\d)o?)?(-(?P<domain>D\d+))?(-\w+)?")
_AF3_SERVER = re.compile(r"fold_(?P<name>.+)_model_(?P<number>\d)")
_AFDB = re.compile(r"AF-(?P<accession>\w+)-F(?P<part>\d+)-model_v(?P<version>\d+)")
# NAME_unrelaxed_rank_001_MODEL_seed_000. NAME_ is missing if the prediction has its own folder. Before 2022:
# NAME_unrelaxed_model_1.
_COLABFOLD = re.compile(r"((?P<name>.+)_)?(?P<kind>un)?relaxed_(?P<rest>.*((?<=rank_)|(?<=model_))\d+.*)")
_OPENFOLD = re.compile(r"(?P<name>.+)_(?P<model>model_(?P<rank>\d+)\w*)_(?P<kind>un)?relaxed")
_OURS = re.compile(r"(?P<name>.+?)(_rank_(?P<rank>\d+)|_recycle_(?P<recycle>\d+)|_(?P<relaxed>relaxed))?")


@dataclass(frozen=True)
class PredictionName:
    """The information in the file name of a predicted structure.

    target: name of the predicted target. layout: the program. names: possible names of the reference structure, the
    likeliest first. rank: by the program itself, 1 is the best; None if the name has no rank. version: of the database.
    is_pass: a recycling pass before the last. pae: the file with the PAE matrix in the same folder.
    """

    target: str
    layout: str
    names: tuple[str, ...]
    rank: int | None = None
    model: str = ""
    version: int = 0
    relaxed: bool = False
    is_pass: bool = False
    pae: Path | None = None


def parse_prediction_name(path: Path, neighbours: Mapping[str, Path]) -> PredictionName:
    """Parse the file name of a predicted structure. neighbours: the files in its folder, by name."""
    match = STRUCTURE.fullmatch(path.name)
    stem = match[1] if match else path.name

    def first(*names: str) -> Path | None:
        return first_existing(neighbours, *names)

    if match := _AFDB.fullmatch(stem):
        part, accession, version = match["part"], match["accession"], match["version"]
        target = accession if part == "1" else f"{accession}-F{part}"
        pae = first(f"AF-{accession}-F{part}-predicted_aligned_error_v{version}.json")
        names: tuple[str, ...] = (target, f"AF-{accession}-F{part}", stem)
        return PredictionName(target, "AlphaFold DB", names, version=int(version), pae=pae)
    if match := CASP.fullmatch(stem):
        domain = f"{match['name']}-{match['domain']}" if match["domain"] else match["name"]
        names = tuple(dict.fromkeys((domain, match["name"])))
        rank = int(match["rank"]) if match["rank"] else None
        return PredictionName(domain, "CASP", names, rank, f"TS{match['group']}")
    if stem.endswith("_model") and first(f"{stem[:-6]}_summary_confidences.json"):
        return PredictionName(stem[:-6], "AlphaFold 3", (stem[:-6],), pae=first(f"{stem[:-6]}_confidences.json"))
    if match := _AF3_SERVER.fullmatch(stem):
        name, number = match["name"], match["number"]
        pae = first(f"fold_{name}_full_data_{number}.json")
        return PredictionName(name, "AlphaFold Server", (name,), int(number) + 1, stem, pae=pae)
    if match := _OPENFOLD.fullmatch(stem):
        name = match["name"]
        return PredictionName(name, "OpenFold", (name,), int(match["rank"]), match["model"], relaxed=not match["kind"])
    if match := _COLABFOLD.fullmatch(stem):
        prefix = f"{match['name']}_" if match["name"] else ""
        target = match["name"] or path.parent.resolve().name
        pae = first(f"{prefix}scores_{match['rest']}.json", f"{prefix}predicted_aligned_error_v1.json")
        number = re.search(r"rank_(\d+)", match["rest"]) or re.search(r"model_(\d+)", match["rest"])
        rank, relaxed = int(number[1]) if number else None, not match["kind"]
        return PredictionName(target, "ColabFold", (target,), rank, match["rest"], relaxed=relaxed, pae=pae)
    match = _OURS.fullmatch(stem)
    assert match is not None  # any name matches
    pae = first(f"{stem}_pae.json", f"{stem}_scores.json", f"{match['name']}_pae.json")
    return PredictionName(
        match["name"],
        "plain files",
        tuple(dict.fromkeys((match["name"], stem))),
        int(match["rank"]) if match["rank"] else None,
        relaxed=bool(match["relaxed"]),
        is_pass=bool(match["recycle"]),
        pae=pae,
    )


def first_existing(files: Mapping[str, Path], *names: str) -> Path | None:
    """Return the first of the named files that exists, plain or with .gz. files: by name."""
    return next((files[name + end] for name in names for end in ("", ".gz") if name + end in files), None)


def is_pdb(path: Path) -> bool:
    """Return whether a file is PDB by its name. If a prediction has two files, the mmCIF file is read."""
    return path.name.lower().removesuffix(".gz").endswith((".pdb", ".ent"))


def read_pae(path: Path, seen: np.ndarray, limit: int = LARGEST) -> np.ndarray:
    """Read predicted aligned errors [N, N] in angstrom, aligned on the row's residue: our .npz, or JSON.

    Supports the layouts of AlphaFold DB, ColabFold, AlphaFold 2 and 3. seen: bool [N], whether each residue of the
    structure has atoms. A file may contain only these residues; the others are then NaN. limit: bytes, see `read_file`.
    Raises UserError for other layouts, and for a matrix of another number of residues.
    """
    data, residues = read_file(path, limit), len(seen)
    try:
        if data[:2] == b"PK":
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                pae = arrays["pae"].astype(np.float32)
        else:
            values = json.loads(data)
            values = values[0] if isinstance(values, list) else values
            keys = ("predicted_aligned_error", "pae", "distance")
            # A value that overflows becomes infinite and is refused below.
            with np.errstate(over="ignore"):
                pae = np.asarray(next(values[key] for key in keys if key in values), np.float32)
            # AlphaFold DB stored a flat list until 2022.
            pae = pae.reshape(-1, round(pae.size**0.5)) if "distance" in values else pae
    except (*DAMAGED_ARRAYS, KeyError, TypeError, IndexError, StopIteration, OverflowError) as error:
        reason = str(error) or "no matrix in it"
        raise UserError(
            f"{path.name}: no PAE in a supported layout ({reason}). Fetch it again, or remove it."
        ) from None
    if pae.shape not in ((residues, residues), (seen.sum(), seen.sum())) or not np.isfinite(pae).all():
        shape = list(pae.shape)
        raise UserError(
            f"{path.name}: has PAE of shape {shape}, but the structure has {residues} residues. Remove one."
        )
    if len(pae) < residues:
        whole = np.full((residues, residues), np.nan, np.float32)
        whole[np.ix_(seen, seen)] = pae
        return whole
    return pae
