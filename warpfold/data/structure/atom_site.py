"""The `atom_site` category of mmCIF: read its columns, and put its atoms on the residues of polymers."""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from gemmi import cif

from warpfold.errors import UserError
from warpfold.geometry.residue import ATOM37_MASK, ATOM_ORDER, ATOM_TYPES, RESTYPE_ORDER, UNKNOWN

ABSENT = (".", "?")  # mmCIF's two marks for a missing value

# Atoms that a residue of each type may have: its own, the C-terminal OXT, and the backbone if the type is unknown.
KNOWN_ATOMS = ATOM37_MASK > 0  # [21, 37]
KNOWN_ATOMS[:, ATOM_ORDER["OXT"]] = True
KNOWN_ATOMS[UNKNOWN, [ATOM_ORDER[name] for name in ("N", "CA", "C", "CB", "O")]] = True

FARTHEST = 1e6  # angstrom; a larger coordinate is damage
MOST_DIGITS = 18  # of a whole number in a file, so that it fits into int64

Columns = dict[str, list[str]]


@dataclass(frozen=True)
class Polymer:
    """A chain to put atoms on: mmCIF's name and the author's, and the residues at each place of the sequence."""

    label: str
    author: str
    # [N], several names where the crystal has a mixture, first that of the atoms to take
    monomers: list[tuple[str, ...]]
    letters: str  # [N], of the first of each
    entity: str = ""


@dataclass(frozen=True)
class Atoms:
    """Atoms of several polymers, one after the other, M residues in all."""

    positions: np.ndarray  # float32 [M, 37, 3], angstrom, 0 where masked
    mask: np.ndarray  # float32 [M, 37]
    numbers: list[str]  # [M], author's number and insertion code, "" without atoms


def read_columns(block: cif.Block, source: str) -> Columns:
    """Return the columns that matter, of the first model's rows; optional ones that the file lacks are full of '?'."""
    needed = ["label_asym_id", "label_seq_id", "label_comp_id", "label_atom_id", "Cartn_x", "Cartn_y", "Cartn_z"]
    optional = ["auth_asym_id", "label_entity_id", "label_alt_id", "occupancy", "auth_seq_id", "pdbx_PDB_ins_code"]
    tags = [*needed, *optional, "pdbx_PDB_model_num"]
    table = block.find("_atom_site.", [*needed, *("?" + tag for tag in tags[len(needed) :])])
    if not len(table):
        missing = [tag for tag in needed if not block.find_values("_atom_site." + tag)]
        what = f"atom_site has no column {', '.join(missing)}" if missing else "has no atoms"
        raise UserError(f"{source}: {what}; give a file with coordinates")
    rows: Sequence[int] = range(len(table))
    if table.has_column(len(tags) - 1):  # the model number: keep those of the first model, nearly always a range from 0
        models = list(table.column(len(tags) - 1))
        count = models.count(models[0])
        if models[count - 1] == models[0] and (count == len(models) or models[count] != models[0]):
            rows = range(count)
        else:
            rows = [i for i, model in enumerate(models) if model == models[0]]
    return {
        tag: _texts(table.column(i), rows) if table.has_column(i) else ["?"] * len(rows)
        for i, tag in enumerate(tags[:-1])
    }


def place_atoms(columns: Columns, polymers: Sequence[Polymer], source: str) -> Atoms:
    """Put heavy atoms on atom37, one conformation per residue, arginine's NH1 and NH2 told apart by distance.

    Errors: UserError for a residue that the sequence does not have there, and for positions that are not numbers.
    """
    starts = np.cumsum([0, *(len(polymer.letters) for polymer in polymers)])
    rows, residues, atoms = _rows_of_polymers(columns, polymers, starts, source)
    total = int(starts[-1])
    numbers = [""] * total
    authors, codes = columns["auth_seq_id"], columns["pdbx_PDB_ins_code"]
    firsts = np.unique(residues, return_index=True)
    for residue, row in zip(firsts[0], rows[firsts[1]]):
        if authors[row] not in ABSENT:
            numbers[residue] = authors[row] + ("" if codes[row] in ABSENT else codes[row])
    letters = "".join(polymer.letters for polymer in polymers)
    types = np.array([RESTYPE_ORDER.get(letter, UNKNOWN) for letter in letters], dtype=np.int64)
    known = (atoms >= 0) & KNOWN_ATOMS[types[residues], atoms]
    rows, residues, atoms = rows[known], residues[known], atoms[known]
    kept = rows.tolist()
    xyz = np.stack([_numbers([columns[f"Cartn_{axis}"][row] for row in kept]) for axis in "xyz"], axis=-1)
    possible = np.abs(xyz) < FARTHEST  # NaN is not
    if not possible.all():
        row = kept[np.flatnonzero(~possible.all(1))[0]]
        atom, chain = columns["label_atom_id"][row], columns["auth_asym_id"][row]
        raise UserError(
            f"{source}: atom {atom} of residue {authors[row]} of chain {chain} has a position that is not a number or "
            "far too large; correct the file or leave the atom out"
        )
    picked = _one_conformation(columns, rows, residues, atoms)
    positions, mask = np.zeros((total, 37, 3), np.float32), np.zeros((total, 37), np.float32)
    positions[residues[picked], atoms[picked]] = xyz[picked]
    mask[residues[picked], atoms[picked]] = 1.0
    _name_arginine_nitrogens(positions, mask, types)
    return Atoms(positions, mask, numbers)


def occupancies(columns: Columns) -> dict[tuple[str, str, str], float]:
    """Return the mean occupancy of each residue's best conformation, by mmCIF's chain name, place and residue name."""
    keys = zip(*(columns[f"label_{tag}_id"] for tag in ("asym", "seq", "comp", "alt")))
    values = np.nan_to_num(_numbers(columns["occupancy"]), nan=1.0).tolist()
    found: defaultdict[tuple[str, str, str, str], list[float]] = defaultdict(list)
    for key, value in zip(keys, values):
        found[key].append(value)
    best: dict[tuple[str, str, str], float] = {}
    for (chain, place, name, _), each in found.items():
        best[chain, place, name] = max(best.get((chain, place, name), 0.0), sum(each) / len(each))
    return best


def place_of(text: str) -> int:
    """Return a place in a sequence, from 1; 0 for anything else, such as a number that does not fit into int64."""
    return int(text) if len(text) <= MOST_DIGITS and text.isdecimal() else 0


def _texts(column: cif.Column, rows: Sequence[int]) -> list[str]:
    """Return the values of some rows without their quotes."""
    values = list(itertools.islice(column, len(rows))) if isinstance(rows, range) else [column[i] for i in rows]
    if any(quote in "".join(values) for quote in "'\""):  # a quote alone is an insertion code that a PDB file had
        return [cif.as_string(value) if value[0] in "'\"" and len(value) > 1 else value for value in values]
    return values


def _numbers(values: list[str]) -> np.ndarray:
    """Return float64: 12.5 for '12.5(3)', NaN for anything that is not a number."""
    try:
        return np.array([float(value) for value in values])
    except ValueError:
        return np.array([cif.as_number(value) for value in values])


def _rows_of_polymers(
    columns: Columns, polymers: Sequence[Polymer], starts: np.ndarray, source: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the rows whose residue is in its sequence (the first of a mixture), their residues of M and atoms of 37.

    The atom is -1 if it is none of the 37.  Selenium of selenomethionine counts as the sulfur of methionine.
    """
    places = {polymer.label: (polymer.monomers, start) for polymer, start in zip(polymers, starts.tolist())}
    keys = list(zip(*(columns[f"label_{tag}_id"] for tag in ("asym", "seq", "comp"))))
    residue_of = dict.fromkeys(keys, -1)  # so that most work is done per residue, not per atom
    for key in residue_of:
        label, place, monomer = key
        if label not in places or place in ABSENT:
            continue
        monomers, start = places[label]
        i = place_of(place) - 1
        if not 0 <= i < len(monomers) or monomer not in monomers[i]:
            place = place if len(place) <= MOST_DIGITS else f"{place[:MOST_DIGITS]}..."
            expected = "/".join(monomers[i]) if 0 <= i < len(monomers) else f"1 to {len(monomers)}"
            raise UserError(
                f"{source}: chain {columns['auth_asym_id'][keys.index(key)]} has an atom of {monomer} at place {place} "
                f"of its sequence, which has {expected}; the file contradicts itself, fetch it again"
            )
        if monomer == monomers[i][0]:
            residue_of[key] = start + i
    names = columns["label_atom_id"]
    if "SE" in names:
        names = ["SD" if name == "SE" and key[2] == "MSE" else name for name, key in zip(names, keys)]
    residues = np.array([residue_of[key] for key in keys], dtype=np.int64)
    atoms = np.array([ATOM_ORDER.get(name, -1) for name in names], dtype=np.int64)
    rows = np.flatnonzero(residues >= 0)
    return rows, residues[rows], atoms[rows]


def _one_conformation(columns: Columns, rows: np.ndarray, residues: np.ndarray, atoms: np.ndarray) -> np.ndarray:
    """Return which of `rows` to keep, one per atom: that of the residue's conformation of highest mean occupancy.

    An atom that this conformation lacks is taken from another one.
    """
    keys = residues * len(ATOM_TYPES) + atoms
    if np.unique(keys).size == keys.size:
        return np.arange(keys.size)
    altlocs = [columns["label_alt_id"][row] for row in rows]
    occupancy = np.nan_to_num(_numbers([columns["occupancy"][row] for row in rows]), nan=1.0)
    order = {altloc: i for i, altloc in enumerate(dict.fromkeys([".", "?", *altlocs]))}  # as they appear
    altloc = np.array([order[a] for a in altlocs])
    group = residues * len(order) + altloc
    size = (int(residues.max()) + 1) * len(order)
    counts = np.bincount(group, minlength=size)
    means = np.bincount(group, occupancy, size) / np.maximum(counts, 1)
    means = np.where(counts > 0, means, -1.0).reshape(-1, len(order))
    best = 2 + means[:, 2:].argmax(1) if len(order) > 2 else np.zeros(len(means), dtype=np.int64)
    preferred = (altloc < 2) | (altloc == best[residues])
    ranked = np.lexsort((-occupancy, ~preferred, keys))  # stable: the first in the file among equals
    first = np.unique(keys[ranked], return_index=True)[1]
    return np.sort(ranked[first])


def _name_arginine_nitrogens(positions: np.ndarray, mask: np.ndarray, types: np.ndarray) -> None:
    """Swap NH1 and NH2, in place, where NH2 is the nearer one to CD (Supp. 1.2.1)."""
    cd, nh1, nh2 = (ATOM_ORDER[name] for name in ("CD", "NH1", "NH2"))
    arginine = np.flatnonzero((types == RESTYPE_ORDER["R"]) & mask[:, [cd, nh1, nh2]].all(1))
    to_cd = np.linalg.norm(positions[arginine][:, [nh1, nh2]] - positions[arginine][:, [cd]], axis=-1)
    swapped = arginine[to_cd[:, 0] > to_cd[:, 1]]
    positions[swapped[:, None], [nh1, nh2]] = positions[swapped[:, None], [nh2, nh1]]
