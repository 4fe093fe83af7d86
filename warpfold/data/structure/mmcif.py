"""Read structures: mmCIF, PDB -> chains of atom37 positions on their SEQRES (Supp. 1.2.1).

gemmi reads the syntax; the meaning is read here.  Atoms are taken from mmCIF columns, of the first model only, so that
an NMR entry of twenty models costs one.  PDB files and files without SEQRES come here through `pdb.py`.
"""

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import gemmi
import numpy as np
from gemmi import cif

from warpfold.data.formats.alignment import document_kind
from warpfold.data.structure import pdb
from warpfold.data.structure.assemblies import AssemblyTable
from warpfold.data.structure.chain import Chain, Structure, normal_entry_id, parse_date
from warpfold.data.structure.separate import FORCE_FIELD_NAMES, Reading, collect_alphas, count_models, is_placeholder
from warpfold.errors import UserError, listed
from warpfold.files import LARGEST, read_file
from warpfold.geometry.residue import ATOM37_MASK, ATOM_ORDER, ATOM_TYPES, RESTYPE_3, RESTYPE_ORDER, RESTYPES, UNKNOWN

ABSENT = (".", "?")  # mmCIF's two marks for a missing value

# Atoms that a residue of each type may have: its own, the C-terminal OXT, and the backbone if the type is unknown.
KNOWN_ATOMS = ATOM37_MASK > 0  # [21, 37]
KNOWN_ATOMS[:, ATOM_ORDER["OXT"]] = True
KNOWN_ATOMS[UNKNOWN, [ATOM_ORDER[name] for name in ("N", "CA", "C", "CB", "O")]] = True

FARTHEST = 1e6  # angstrom; a larger coordinate is damage
MOST_DIGITS = 18  # of a whole number in a file, so that it fits into int64

_NEAREST = {"U": "C", "O": "K"}  # selenocysteine, pyrrolysine: the nearest of the twenty
_LETTERS = dict(zip(RESTYPE_3, RESTYPES))  # "ALA" -> "A", of the twenty

Columns = dict[str, list[str]]


@dataclass(frozen=True)
class Polymer:
    """A protein chain to put atoms on: mmCIF's name and the author's, and the residues at each place of SEQRES."""

    label: str
    author: str
    entity: str
    # [N], several names where the crystal has a mixture, first that of the atoms to take
    monomers: list[tuple[str, ...]]
    letters: str  # [N], of the first of each


def read_structure(path: str | Path, ca_only: bool = False, limit: int = LARGEST) -> Structure:
    """Read the protein chains of an mmCIF or PDB file, gzipped or not; its content tells the format.

    limit: the largest size of the file in bytes. ca_only: also keep chains in which no residue has N, CA and C.

    * Models: copies of an assembly in several models all count; of an ensemble the first model counts. `notes` say
      which (`separate.models_are_copies`).
    * Sequence: `entity_poly_seq`, in PDB files SEQRES, else derived from the coordinates (`pdb.complete_mmcif`). At a
      place with several residues (microheterogeneity) the residue of the largest occupancy counts, the first among
      equals (Supp. 1.2.1). A modified residue is read as its parent (`_one_letter`), MSE with SE as SD.
    * Atoms: the alternative conformation with the highest mean occupancy in its residue counts, the first among
      equals; atoms that it lacks come from another conformation. Hydrogens are skipped. NH1 and NH2 of arginine are
      swapped where NH2 is nearer to CD (Supp. 1.2.1). Atoms at 9999, and several atoms at 0, 0, 0, were not observed.
    * `dropped` names the polymers other than polypeptide(L), and CA-only chains unless `ca_only`. Every other residue
      with N, CA and C is in a chain or in `unplaced`.

    Errors: UserError for a file that is missing, cut short, not a structure, without a usable protein chain, with
    positions that are not numbers, or whose atoms contradict its sequence.
    """
    return parse_structure(read_file(path, limit), str(path), ca_only)


def parse_structure(data: bytes | str, source: str = "<structure>", ca_only: bool = False) -> Structure:
    """Parse text in memory as `read_structure` does; `source` is its name in errors."""
    data = data.encode() if isinstance(data, str) else data
    if what := document_kind(data):
        raise UserError(f"{source}: is {what}, and no structure; give mmCIF or PDB")
    elif b"_atom_site." not in data and re.search(rb"^(ATOM  |HETATM|HEADER    )", data, re.MULTILINE):
        read = pdb.read
    else:
        read = _read_mmcif
    with _damage(source):
        return _structure(read(data, source), source, ca_only)


@contextmanager
def _damage(source: str) -> Iterator[None]:
    """Turn gemmi's errors into a UserError that says so on one line."""
    try:
        yield
    except UnicodeDecodeError:
        raise UserError(f"{source}: is damaged, it has names that are not text; fetch the file again") from None
    except (ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{source}: is cut short, or no valid mmCIF or PDB ({reason}); fetch it again") from error


def read_release_date(path: str | Path, limit: int = LARGEST) -> date | None:
    """Return when the entry in a file was released; None if the file does not say.

    If the date comes before the atoms, as in the PDB's files since 2017, nothing after it is parsed, which is several
    times faster than `read_structure`; otherwise the whole file is.
    Errors: as in `read_structure`, for what is read.
    """
    data = read_file(path, limit)
    head = data[: max(data.rfind(b"loop_", 0, max(data.find(b"\n_atom_site."), 0)), 0)]
    if b"_pdbx_audit_revision_history.revision_date" in head:
        with _damage(str(path)):
            return _release_date(cif.read_string(head)[0])
    return parse_structure(data, str(path)).release_date


def _read_mmcif(data: bytes, source: str) -> Reading:
    """Read the block with the atoms, with SEQRES added if the file has none.

    Errors: UserError for a file that was cut short, and for one with several blocks of atoms.
    """
    if b"_atom_site." not in data:
        what = "has no atoms" if b"data_" in data else "is not a structure file"
        raise UserError(f"{source}: {what}; give an mmCIF or PDB file with coordinates")
    last = data[-1000:].rstrip().rpartition(b"\n")[2]
    if not last.startswith(b"#") and data.count(b"\n#") >= 5:  # written with '#' after each category
        raise UserError(f"{source}: ends in the middle of a category, so it is cut short; fetch the file again")
    blocks = [block for block in cif.read_string(data) if len(block.find_values("_atom_site.Cartn_x"))]
    if not blocks:
        raise UserError(f"{source}: has no atoms (_atom_site.Cartn_x); give a file with coordinates")
    if len(blocks) > 1:
        names = listed([block.name for block in blocks], 4)
        raise UserError(f"{source}: has {len(blocks)} data blocks with atoms ({names}). Write one block to a file.")
    if len(blocks[0].find_values("_entity_poly_seq.mon_id")):
        return Reading(blocks[0], [])
    return pdb.complete_mmcif(blocks[0], source)


def _structure(reading: Reading, source: str, ca_only: bool) -> Structure:
    block, notes = reading.block, reading.notes
    columns, copies = _read_columns(block, source, notes)
    asyms = _asyms(block, columns)
    polymers, names, dropped = _polymers(block, columns, asyms, source)
    starts = np.cumsum([0, *(len(polymer.letters) for polymer in polymers)]).tolist()
    positions, mask, numbers, b_factors = place_atoms(columns, polymers, starts, source, notes)
    backbone = np.min(mask[:, [ATOM_ORDER[name] for name in ("N", "CA", "C")]], axis=1) > 0
    # How the author numbers residues that were not seen.
    spans = {polymer.label: range(*span) for polymer, span in zip(polymers, itertools.pairwise(starts))}
    schemes = dict.fromkeys(range(len(numbers)), "")
    for row in block.find("_pdbx_poly_seq_scheme.", ["asym_id", "seq_id", "pdb_seq_num", "?pdb_ins_code"]):
        if 0 < (place := place_of(row.str(1))) <= len(span := spans.get(row.str(0), range(0))):
            schemes[span[place - 1]] = row.str(2) + (row.str(3) if row.has(3) else "")
    chains: dict[str, Chain] = {}
    for polymer in polymers:
        span = spans[polymer.label]
        rows = slice(span.start, span.stop)
        name = names[polymer.label] = _free_name(polymer.label, polymer.author, {*chains, *dropped})
        if not mask[rows].any():
            dropped[name] = "no residue has coordinates"
        elif not (ca_only or backbone[rows].any()):
            dropped[name] = "no residue has N, CA and C, a CA-only chain"
        else:
            chains[name] = Chain(
                id=name,
                sequence=polymer.letters,
                positions=positions[rows],
                mask=mask[rows],
                residue_index=np.arange(len(polymer.letters), dtype=np.int64),
                author_numbers=tuple(numbers[i] or schemes[i] for i in span),
                entity=polymer.entity,
                b_factors=b_factors[rows],
            )
        if unknown := Counter(
            monomer[0]
            for monomer, letter, whole in zip(polymer.monomers, polymer.letters, backbone[rows])
            if letter == "X" and whole and monomer[0] != "UNK"
        ):
            listing = listed([f"{name} ({count})" for name, count in unknown.items()], 6)
            notes.append(f"chain {names[polymer.label]}: unknown residues are read as X: {listing}")
    if not chains:
        reasons = [f"{name}: {reason}" for name, reason in dropped.items()]
        because = f" ({listed(reasons, 4, '; ')})" if reasons else ""
        raise UserError(f"{source}: has no protein chain that can be used{because}; give a protein, with all its atoms")
    entry = next(iter(_values(block, "_entry.id")), "") or block.name
    if entry in ("", "XXXX", "model"):  # placeholders of programs that know no id
        entry = Path(source).name.split(".")[0]
    unplaced, ligands = _unplaced(reading, columns, polymers, names)
    if ligands:
        notes.append(f"amino acids that are no part of a chain are read as ligands: {listed(ligands, 6)}")
    # The first positive number: of the refinement, of the map (electron microscopy), of the data.
    tags = ("_refine.ls_d_res_high", "_em_3d_reconstruction.resolution", "_reflns.d_resolution_high")
    resolutions = (cif.as_number(value) for value in _values(block, *tags))
    return Structure(
        id=normal_entry_id(entry),
        method="; ".join(_values(block, "_exptl.method")).upper() or None,
        resolution=next((number for number in resolutions if number > 0), None),
        release_date=_release_date(block),
        chains=chains,
        dropped=dropped,
        # Models that are copies are the assembly already.
        assemblies=AssemblyTable() if copies or reading.copies else _assemblies(block, asyms, names, source),
        unplaced=tuple(unplaced),
        notes=tuple(notes),
    )


def _assemblies(
    block: cif.Block, asyms: Mapping[str, tuple[str, str]], names: dict[str, str], source: str
) -> AssemblyTable:
    """Read the table of assemblies, in the order of `pdbx_struct_assembly` if the file has that category."""
    rows = block.find("_pdbx_struct_assembly_gen.", ["assembly_id", "oper_expression", "asym_id_list"])
    generators = [(row.str(0), row.str(1), row.str(2)) for row in rows]
    order = {name: place for place, name in enumerate(_values(block, "_pdbx_struct_assembly.id"))}
    generators.sort(key=lambda row: order.get(row[0], len(order)))
    tags = ["id", *(tag for row in "123" for tag in (*(f"matrix[{row}][{c}]" for c in "123"), f"vector[{row}]"))]
    operators = {row.str(0): tuple(map(row.str, range(1, 13))) for row in block.find("_pdbx_struct_oper_list.", tags)}
    compounds = {row.str(0): row.str(1) for row in block.find("_pdbx_entity_nonpoly.", ["entity_id", "comp_id"])}
    entities = {label: entity for label, (_, entity) in asyms.items()}
    return AssemblyTable(source, tuple(generators), operators, names, entities, compounds)


def _values(block: cif.Block, *tags: str) -> list[str]:
    return [cif.as_string(value) for tag in tags for value in block.find_values(tag) if value not in ABSENT]


def _release_date(block: cif.Block) -> date | None:
    """Return the earliest revision, which is the release; files before 2017 have it in `database_PDB_rev`.

    Values that are no dates are skipped.  `date_original` there is when the entry was deposited, not released.
    """
    for tag in ("_pdbx_audit_revision_history.revision_date", "_database_PDB_rev.date"):
        if dates := [day for text in _values(block, tag) if (day := parse_date(text)) is not None]:
            return min(dates)
    return None


def _polymers(
    block: cif.Block, columns: Columns, asyms: Mapping[str, tuple[str, str]], source: str
) -> tuple[list[Polymer], dict[str, str], dict[str, str]]:
    """Return the protein chains in the order of the file; the name of each other polymer, and its kind by that name."""
    sequences = _sequences(block, source)
    parents: dict[str, str] = {}  # the letter of each modified residue's parent
    for category, tags in (
        ("_pdbx_struct_mod_residue.", ["label_comp_id", "parent_comp_id"]),
        ("_chem_comp.", ["id", "mon_nstd_parent_comp_id"]),
    ):
        for row in block.find(category, tags):
            if letter := _LETTERS.get(row.str(1).upper()):  # several parents ("SER,TYR,GLY") have none
                parents.setdefault(row.str(0), letter)
    rows = block.find("_entity_poly.", ["entity_id", "pdbx_seq_one_letter_code_can"])
    canonical = {row.str(0): "".join(row.str(1).split()).upper() for row in rows}
    mixed = any(len(names) > 1 for monomers in sequences.values() for names in monomers)
    seen = _occupancies(columns) if mixed else {}
    kinds = {row.str(0): row.str(1).lower() for row in block.find("_entity_poly.", ["entity_id", "type"])}
    polymers: list[Polymer] = []
    dropped: dict[str, str] = {}
    names: dict[str, str] = {}
    for label, (author, entity) in asyms.items():
        if entity not in sequences:
            continue  # a ligand, a sugar, water
        monomers = [  # of several names at one place, that of the largest occupancy first
            tuple(sorted(found, key=lambda name: -seen.get((label, str(place), name), 0.0)))
            for place, found in enumerate(sequences[entity], 1)
        ]
        letters = _one_letter(monomers, parents, canonical.get(entity, ""))
        kind = kinds.get(entity)
        if not kind:  # the file does not say: what most residues are
            amino = sum(gemmi.find_tabulated_residue(names[0]).is_amino_acid() for names in monomers)
            kind = "polypeptide(l)" if 2 * amino > len(monomers) else "no polypeptide"
        if kind == "polypeptide(l)":
            polymers.append(Polymer(label, author, entity, monomers, letters))
        else:
            name = names[label] = _free_name(label, author, dropped)
            dropped[name] = kind
    return polymers, names, dropped


def _sequences(block: cif.Block, source: str) -> dict[str, list[tuple[str, ...]]]:
    """Return the residue names at each place of each entity's SEQRES: several where the crystal has a mixture."""
    sequences: dict[str, list[tuple[str, ...]]] = {}
    for row in block.find("_entity_poly_seq.", ["entity_id", "num", "mon_id"]):
        entity, number, monomer = row.str(0), row.str(1), FORCE_FIELD_NAMES.get(row.str(2), row.str(2))
        places = sequences.setdefault(entity, [])
        if number == str(len(places) + 1):
            places.append((monomer,))
        elif places and number == str(len(places)):
            places[-1] = (*places[-1], monomer)
        else:
            raise UserError(
                f"{source}: entity_poly_seq has residue {number} of entity {entity} after {len(places)} others; "
                "fetch the file again"
            )
    return sequences


def _asyms(block: cif.Block, columns: Columns) -> dict[str, tuple[str, str]]:
    """Return the author's chain name and the entity by mmCIF's chain name, in the order of the file.

    Chains without atoms are among them.
    """
    schemes = block.find("_pdbx_poly_seq_scheme.", ["asym_id", "pdb_strand_id"])
    authors = {row.str(0): row.str(1) for row in schemes}
    entities = {row.str(0): row.str(1) for row in block.find("_struct_asym.", ["id", "entity_id"])}
    labels, entity_ids = columns["label_asym_id"], columns["label_entity_id"]
    seen = dict(zip(labels, zip(columns["auth_asym_id"], entity_ids)))
    found = {}
    for label in [*entities, *(label for label in seen if label not in entities)]:
        author, entity = seen.get(label, ("?", "?"))
        known = author if author not in ABSENT else authors.get(label) or label
        found[label] = (known, entities.get(label, entity))
    return found


def _one_letter(monomers: Sequence[tuple[str, ...]], parents: Mapping[str, str], canonical: str) -> str:
    """Return one letter for the first name of each place: by gemmi's table, else its parent's, else X.

    Without a named parent it is that of the canonical sequence, if that has a letter for every place (a chromophore
    has several) and the place has one name.
    """
    letters = []
    for place, names in enumerate(monomers):
        parent = parents.get(names[0], "")
        if not parent and len(names) == 1 and len(canonical) == len(monomers):
            parent = canonical[place]
        info = gemmi.find_tabulated_residue(names[0])
        letter = info.one_letter_code.upper() if info.is_amino_acid() else ""  # of a nucleotide, A is not alanine
        letter = _NEAREST.get(letter, letter)
        known = next((x for x in (letter, parent) if x in RESTYPE_ORDER), "X")
        letters.append("X" if names[0] == "UNK" else known)
    return "".join(letters)


def _free_name(label: str, author: str, taken: Container[str]) -> str:
    """Return the author's name of a chain, followed by mmCIF's own if another chain has it already."""
    return author if author not in taken else f"{author}-{label}"


def _read_columns(block: cif.Block, source: str, notes: list[str]) -> tuple[Columns, bool]:
    """Read the columns that matter, of the models that count; optional columns that the file lacks are full of '?'.

    Returns them and whether the models are copies of an assembly, in which chain A of the second is A-2. Adds a note on
    several models.
    """
    needed = ["label_asym_id", "label_seq_id", "label_comp_id", "label_atom_id", "Cartn_x", "Cartn_y", "Cartn_z"]
    optional = [
        "auth_asym_id",
        "label_entity_id",
        "label_alt_id",
        "occupancy",
        "auth_seq_id",
        "pdbx_PDB_ins_code",
    ]
    tags = [*needed, *optional, "B_iso_or_equiv", "pdbx_PDB_model_num"]
    table = block.find("_atom_site.", [*needed, *("?" + tag for tag in tags[len(needed) :])])
    if not len(table):
        missing = [tag for tag in needed if not block.find_values("_atom_site." + tag)]
        what = f"atom_site has no column {', '.join(missing)}" if missing else "has no atoms"
        raise UserError(f"{source}: {what}; give a file with coordinates")
    rows: Sequence[int] = range(len(table))
    copies, suffixes = False, list[str]()
    if table.has_column(len(tags) - 1):  # the model number, nearly always a range from 0 for the first
        models = list(table.column(len(tags) - 1))
        count = models.count(models[0])
        if count < len(models):
            order = {model: i for i, model in enumerate(dict.fromkeys(models))}
            atoms, at = (list(table.column(tags.index(tag))) for tag in ("label_atom_id", "label_seq_id"))
            chains = list(table.column(tags.index("label_asym_id")))
            xyz = [table.column(tags.index(f"Cartn_{axis}")) for axis in "xyz"]
            alphas = (
                (models[row], (chains[row], (place_of(at[row]), "")), [cif.as_number(axis[row]) for axis in xyz])
                for row, atom in enumerate(atoms)
                if atom == "CA" and at[row] not in ABSENT
            )
            is_nmr = any("NMR" in method.upper() for method in _values(block, "_exptl.method"))
            copies, said = count_models(collect_alphas(order, alphas), is_nmr)
            notes += said
            if copies:
                suffixes = ["" if order[model] == 0 else f"-{order[model] + 1}" for model in models]
            elif models[count - 1] == models[0]:
                rows = range(count)
            else:
                rows = [i for i, model in enumerate(models) if model == models[0]]
    columns = {
        tag: _texts(table.column(i), rows) if table.has_column(i) else ["?"] * len(rows)
        for i, tag in enumerate(tags[:-1])
    }
    if copies:
        for tag in ("label_asym_id", "auth_asym_id"):
            columns[tag] = [
                name + suffix if name not in ABSENT else name for name, suffix in zip(columns[tag], suffixes)
            ]
    if set(columns["label_comp_id"]) & FORCE_FIELD_NAMES.keys():
        columns["label_comp_id"] = [FORCE_FIELD_NAMES.get(name, name) for name in columns["label_comp_id"]]
    return columns, copies


def place_atoms(
    columns: Columns, polymers: Sequence[Polymer], starts: Sequence[int], source: str, notes: list[str]
) -> tuple[np.ndarray, np.ndarray, list[str], np.ndarray]:
    """Put heavy atoms on atom37, one conformation per residue, arginine's NH1 and NH2 told apart by distance.

    starts: of the polymers' residues among all M, and M.  Returns positions float32 [M, 37, 3] in angstrom, 0 where
    masked; the mask float32 [M, 37]; the author's number and insertion code of each residue, "" without atoms; and the
    B column of each residue's CA, float32 [M], NaN without. Adds a note on placeholder coordinates, which are masked.
    Errors: UserError for a residue that the sequence does not have there, and for positions that are not numbers.
    """
    rows, residues, atoms = _rows_of_polymers(columns, polymers, starts, source)
    total = starts[-1]
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
        number = columns["label_seq_id"][row] if authors[row] in ABSENT else authors[row]
        raise UserError(
            f"{source}: atom {atom} of residue {number} of chain {chain} has a position that is not a number or "
            "far too large; correct the file or leave the atom out"
        )
    unseen, at_origin = is_placeholder(xyz), (xyz == 0).all(-1)
    if at_origin.sum() == 1:
        unseen &= ~at_origin  # one atom may be there, such as the first of a built helix
    if unseen.any():
        count = len(np.unique(residues[unseen]))
        notes.append(f"residues with placeholder coordinates (0, 0, 0 or 9999) are read as not observed: {count}")
        rows, residues, atoms, xyz = rows[~unseen], residues[~unseen], atoms[~unseen], xyz[~unseen]
    picked = _one_conformation(columns, rows, residues, atoms)
    positions, mask = np.zeros((total, 37, 3), np.float32), np.zeros((total, 37), np.float32)
    positions[residues[picked], atoms[picked]] = xyz[picked]
    mask[residues[picked], atoms[picked]] = 1.0
    alphas = picked[atoms[picked] == ATOM_ORDER["CA"]]
    b_factors = np.full(total, np.nan, np.float32)
    b_factors[residues[alphas]] = _numbers([columns["B_iso_or_equiv"][row] for row in rows[alphas]])
    # NH1 is the nitrogen that is nearer to CD (Supp. 1.2.1).
    cd, nh1, nh2 = (ATOM_ORDER[name] for name in ("CD", "NH1", "NH2"))
    arginine = np.flatnonzero((types == RESTYPE_ORDER["R"]) & mask[:, [cd, nh1, nh2]].all(1))
    to_cd = np.linalg.norm(positions[arginine][:, [nh1, nh2]] - positions[arginine][:, [cd]], axis=-1)
    swapped = arginine[to_cd[:, 0] > to_cd[:, 1]]
    positions[swapped[:, None], [nh1, nh2]] = positions[swapped[:, None], [nh2, nh1]]
    return positions, mask, numbers, b_factors


def _unplaced(
    reading: Reading, columns: Columns, polymers: Sequence[Polymer], names: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Name the residues with N, CA and C that are in no chain: those that are lost, and free amino acids.

    names: of all polymers, also of those that were dropped, which are reported by name. Free amino acids that the file
    itself declares as ligands are not listed.
    """
    placed = {polymer.label for polymer in polymers}
    atoms, comps, asyms = (columns[f"label_{tag}_id"] for tag in ("atom", "comp", "asym"))
    places, numbers, codes = columns["label_seq_id"], columns["auth_seq_id"], columns["pdbx_PDB_ins_code"]
    # Places outside the sequence are an error already.
    loose, row = list[int](), -1
    for _ in range(atoms.count("CA")):
        row = atoms.index("CA", row + 1)
        if (places[row] in ABSENT or asyms[row] not in placed) and comps[row] != "CA":
            loose.append(row)
    if not loose:
        return [], []
    keys = list(zip(asyms, numbers, codes, comps))
    seen = {(key, atom) for key, atom in zip(keys, atoms) if atom in ("N", "C")}
    kinds = {row.str(0): row.str(1) for row in reading.block.find("_entity.", ["id", "type"])}
    lost: dict[str, None] = {}
    ligands: dict[str, None] = {}
    for row in loose:
        key, asym = keys[row], asyms[row]
        if not {(key, "N"), (key, "C")} <= seen or (asym in names and asym not in placed):
            continue
        called = f"{comps[row]} {numbers[row]}{'' if codes[row] in ABSENT else codes[row]}"
        called += "" if (chain := columns["auth_asym_id"][row]) in ABSENT else f" of chain {chain}"
        is_ligand = kinds.get(columns["label_entity_id"][row], "polymer") != "polymer" and asym not in placed
        # A derived block has one model, so its rows are those of the columns.
        if not is_ligand or (reading.derived and reading.block.find_values("_atom_site.group_PDB")[row] == "ATOM"):
            lost[called] = None
        elif reading.derived:
            ligands[called] = None
    return [*lost], [*ligands]


def _occupancies(columns: Columns) -> dict[tuple[str, str, str], float]:
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
    columns: Columns, polymers: Sequence[Polymer], starts: Sequence[int], source: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the rows whose residue is in its sequence (the first of a mixture), their residues of M and atoms of 37.

    The atom is -1 if it is none of the 37.  Selenium of selenomethionine counts as the sulfur of methionine.
    """
    places = {polymer.label: (polymer.monomers, start) for polymer, start in zip(polymers, starts)}
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
    """Choose one of `rows` for each atom: that of the residue's conformation of highest mean occupancy.

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
