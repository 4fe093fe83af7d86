"""Predicted structures of several programs: what the name of a file says of one, and the matrix of PAE beside it."""

import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from warpfold.errors import UserError
from warpfold.files import DAMAGED_ARRAYS, LARGEST, read_file

STRUCTURE = re.compile(r"(.+?)\.(cif|mmcif|pdb|ent)(\.gz)?", re.IGNORECASE)  # names of files, whatever is in them
CASP = re.compile(r"(?P<name>[THRDM]\d{4}([svx]\d+)*)TS(?P<group>\d{3})(_(?P<rank>\d)o?)?(-(?P<domain>D\d+))?(-\w+)?")
_AF3_SERVER = re.compile(r"fold_(?P<name>.+)_model_(?P<number>\d)")
_AFDB = re.compile(r"AF-(?P<accession>\w+)-F(?P<part>\d+)-model_v(?P<version>\d+)")
# NAME_unrelaxed_rank_001_MODEL_seed_000; without NAME_ in a folder of its own; before 2022 NAME_unrelaxed_model_1.
_COLABFOLD = re.compile(r"((?P<name>.+)_)?(?P<kind>un)?relaxed_(?P<rest>.*((?<=rank_)|(?<=model_))\d+.*)")
_OPENFOLD = re.compile(r"(?P<name>.+)_(?P<model>model_(?P<rank>\d+)\w*)_(?P<kind>un)?relaxed")
_OURS = re.compile(r"(?P<name>.+?)(_rank_(?P<rank>\d+)|_recycle_(?P<recycle>\d+)|_(?P<relaxed>relaxed))?")


@dataclass(frozen=True)
class Named:
    """What the name of a predicted structure's file says.

    target: what it is a prediction of.  names: what its truth may be called, the likeliest first.  rank: by its own
    program, 1 is the best; None where the name does not say.  version: of a database.  is_pass: of a recycling pass
    before the last.  pae: the file beside it that has the matrix.
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


def read_name(path: Path, beside: Mapping[str, Path]) -> Named:
    """Tell what a structure is a prediction of.  beside: the files in its folder, by name."""
    match = STRUCTURE.fullmatch(path.name)
    stem = match[1] if match else path.name

    def first(*wanted: str) -> Path | None:
        return first_of(beside, *wanted)

    if one := _AFDB.fullmatch(stem):
        part, accession, version = one["part"], one["accession"], one["version"]
        target = accession if part == "1" else f"{accession}-F{part}"
        pae = first(f"AF-{accession}-F{part}-predicted_aligned_error_v{version}.json")
        names = (target, f"AF-{accession}-F{part}", stem)
        return Named(target, "AlphaFold DB", names, version=int(version), pae=pae)
    if one := CASP.fullmatch(stem):
        domain = f"{one['name']}-{one['domain']}" if one["domain"] else one["name"]
        called = tuple(dict.fromkeys((domain, one["name"])))
        return Named(domain, "CASP", called, int(one["rank"]) if one["rank"] else None, f"TS{one['group']}")
    if stem.endswith("_model") and first(f"{stem[:-6]}_summary_confidences.json"):
        return Named(stem[:-6], "AlphaFold 3", (stem[:-6],), pae=first(f"{stem[:-6]}_confidences.json"))
    if one := _AF3_SERVER.fullmatch(stem):
        name, number = one["name"], one["number"]
        pae = first(f"fold_{name}_full_data_{number}.json")
        return Named(name, "AlphaFold Server", (name,), int(number) + 1, stem, pae=pae)
    if one := _OPENFOLD.fullmatch(stem):
        name = one["name"]
        return Named(name, "OpenFold", (name,), int(one["rank"]), one["model"], relaxed=not one["kind"])
    if one := _COLABFOLD.fullmatch(stem):
        own = f"{one['name']}_" if one["name"] else ""
        target = one["name"] or path.parent.resolve().name
        pae = first(f"{own}scores_{one['rest']}.json", f"{own}predicted_aligned_error_v1.json")
        ranked = re.search(r"rank_(\d+)", one["rest"]) or re.search(r"model_(\d+)", one["rest"])
        return Named(
            target,
            "ColabFold",
            (target,),
            int(ranked[1]) if ranked else None,
            one["rest"],
            relaxed=not one["kind"],
            pae=pae,
        )
    one = _OURS.fullmatch(stem)
    assert one is not None  # any name matches
    pae = first(f"{stem}_pae.json", f"{stem}_scores.json", f"{one['name']}_pae.json")
    called = tuple(dict.fromkeys((one["name"], stem)))
    rank, relaxed, is_pass = int(one["rank"]) if one["rank"] else None, bool(one["relaxed"]), bool(one["recycle"])
    return Named(one["name"], "plain files", called, rank, relaxed=relaxed, is_pass=is_pass, pae=pae)


def first_of(files: Mapping[str, Path], *wanted: str) -> Path | None:
    """Return the first of some files, by name, that is there, also with .gz."""
    return next((files[name + end] for name in wanted for end in ("", ".gz") if name + end in files), None)


def is_pdb(path: Path) -> bool:
    """Tell whether a file is PDB by its name: of two files of one prediction mmCIF is read."""
    return path.name.lower().removesuffix(".gz").endswith((".pdb", ".ent"))


def read_pae(path: Path, seen: np.ndarray, limit: int = LARGEST) -> np.ndarray:
    """Read predicted aligned errors [N, N], angstrom, rows aligned on: arrays of ours, or the JSON of other programs.

    Known are the layouts of AlphaFold DB, ColabFold, AlphaFold 2 and 3.  seen: bool [N], which residues of the
    structure have atoms; a file may have these alone, and the others are then NaN.  limit: bytes, as of `read_file`.
    Errors: UserError for anything else, and for a matrix of another number of residues.
    """
    data, residues = read_file(path, limit), len(seen)
    try:
        if data[:2] == b"PK":
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                pae = arrays["pae"].astype(np.float32)
        else:
            values = json.loads(data)
            values = values[0] if isinstance(values, list) else values
            known = ("predicted_aligned_error", "pae", "distance")
            with np.errstate(over="ignore"):  # it is infinite then, and refused
                pae = np.asarray(next(values[key] for key in known if key in values), np.float32)
            pae = pae.reshape(-1, round(pae.size**0.5)) if "distance" in values else pae  # AlphaFold DB until 2022
    except (*DAMAGED_ARRAYS, KeyError, TypeError, IndexError, StopIteration, OverflowError) as error:
        why = str(error) or "no matrix in it"
        raise UserError(
            f"{path.name}: no PAE in a layout that is known ({why}); fetch it again, or remove it"
        ) from None
    if pae.shape not in ((residues, residues), (seen.sum(), seen.sum())) or not np.isfinite(pae).all():
        shape = list(pae.shape)
        raise UserError(f"{path.name}: has PAE of shape {shape}, the structure {residues} residues; remove one")
    if len(pae) < residues:
        whole = np.full((residues, residues), np.nan, np.float32)
        whole[np.ix_(seen, seen)] = pae
        return whole
    return pae
