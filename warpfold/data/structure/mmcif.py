"""Read mmCIF and PDB files into chains of atom37 positions on their SEQRES (Supp. 1.2.1).

gemmi parses the syntax, and this module interprets the mmCIF categories. Only the rows of the models that count are
converted, so that an NMR entry with twenty models costs as much as one model. `pdb.py` first converts PDB files and
files without SEQRES to complete mmCIF blocks.
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

ABSENT = (".", "?")  # missing values in mmCIF

# Allowed atoms of each residue type: its own, the C-terminal OXT, and the backbone for the unknown type.
KNOWN_ATOMS = ATOM37_MASK > 0  # [21, 37]
KNOWN_ATOMS[:, ATOM_ORDER["OXT"]] = True
KNOWN_ATOMS[UNKNOWN, [ATOM_ORDER[name] for name in ("N", "CA", "C", "CB", "O")]] = True

# Larger coordinates, in angstrom, mean that the file is damaged.
MAX_COORDINATE = 1e6
# Longest integer that is accepted: it fits into int64.
MAX_DIGITS = 18

# Selenocysteine and pyrrolysine are read as their most similar standard residues.
_NEAREST = {"U": "C", "O": "K"}
_LETTERS = dict(zip(RESTYPE_3, RESTYPES))  # "ALA" -> "A"

Columns = dict[str, list[str]]


@dataclass(frozen=True)
class Polymer:
    """A protein chain before its atoms are read.

    label: label_asym_id. author: the author's chain name. monomers: the residue names at each of the N positions of
    SEQRES. A position with microheterogeneity has several; the first is the one whose atoms are read. letters: the
    one-letter code of each first name, [N].
    """

    label: str
    author: str
    entity: str
    monomers: list[tuple[str, ...]]
    letters: str


def read_structure(path: str | Path, ca_only: bool = False, limit: int = LARGEST) -> Structure:
    """Read the protein chains of an mmCIF or PDB file, gzipped or not. The format is detected from the content.

    limit: the largest size of the file in bytes. ca_only: also keep chains in which no residue has N, CA and C.

    * Models: all models are read if they are copies of an assembly, otherwise the first one. `notes` report the choice
      (`separate.models_are_copies`).
    * Sequence: `entity_poly_seq` or, in PDB files, SEQRES; otherwise derived from the coordinates
      (`pdb.complete_mmcif`). At a position with several residues (microheterogeneity), the residue with the largest
      occupancy is read, the first of equals (Supp. 1.2.1). A modified residue is read as its parent
      (`_to_letters`), and SE of MSE as SD.
    * Atoms: of alternative conformations, the one with the highest mean occupancy in its residue is read, the first of
      equals. Atoms that it lacks come from another conformation. Hydrogens are skipped. NH1 and NH2 of arginine are
      swapped if NH2 is nearer to CD (Supp. 1.2.1). Atoms at 9999, and several atoms at 0, 0, 0, count as not observed.
    * `dropped` lists polymers other than polypeptide(L), and CA-only chains unless `ca_only`. Every other residue with
      N, CA and C is in a chain or in `unplaced`.

    Raises UserError for a file that is missing, truncated, not a structure or without a usable protein chain, for
    positions that are not numbers, and for atoms that contradict the sequence.
    """
    return parse_structure(read_file(path, limit), str(path), ca_only)


def parse_structure(data: bytes | str, source: str = "<structure>", ca_only: bool = False) -> Structure:
    """Parse a structure in memory as `read_structure` does. source: its name in errors."""
    data = data.encode() if isinstance(data, str) else data
    if kind := document_kind(data):
        raise UserError(f"{source}: is {kind}, not a structure. Pass an mmCIF or PDB file.")
    elif b"_atom_site." not in data and re.search(rb"^(ATOM  |HETATM|HEADER    )", data, re.MULTILINE):
        read = pdb.read
    else:
        read = _read_mmcif
    with _gemmi_errors(source):
        return _build_structure(read(data, source), source, ca_only)


@contextmanager
def _gemmi_errors(source: str) -> Iterator[None]:
    """Convert errors of gemmi to a one-line UserError."""
    try:
        yield
    except UnicodeDecodeError:
        raise UserError(f"{source}: is damaged: it has names that are not text. Fetch the file again.") from None
    except (ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{source}: is truncated, or not valid mmCIF or PDB ({reason}). Fetch it again.") from error


def read_release_date(path: str | Path, limit: int = LARGEST) -> date | None:
    """Read the release date of an entry; None if its file has no date.

    If the date precedes the atoms, as in the PDB's files since 2017, only the header is parsed. This is several times
    faster than `read_structure`. Otherwise the whole file is parsed.
    Raises the errors of `read_structure` for the parsed part of the file.
    """
    data = read_file(path, limit)
    head = data[: max(data.rfind(b"loop_", 0, max(data.find(b"\n_atom_site."), 0)), 0)]
    if b"_pdbx_audit_revision_history.revision_date" in head:
        with _gemmi_errors(str(path)):
            return _read_release_date(cif.read_string(head)[0])
    return parse_structure(data, str(path)).release_date


def _read_mmcif(data: bytes, source: str) -> Reading:
    """Read the data block with the atoms, and add SEQRES if the file has none.

    Raises UserError for a truncated file, and for a file with several blocks of atoms.
    """
    if b"_atom_site." not in data:
        problem = "has no atoms" if b"data_" in data else "is not a structure file"
        raise UserError(f"{source}: {problem}. Pass an mmCIF or PDB file with coordinates.")
    last = data[-1000:].rstrip().rpartition(b"\n")[2]
    # Most programs write '#' after each category. If this file does so, it must end with one.
    if not last.startswith(b"#") and data.count(b"\n#") >= 5:
        raise UserError(f"{source}: is truncated (it ends in the middle of a category). Fetch the file again.")
    blocks = [block for block in cif.read_string(data) if len(block.find_values("_atom_site.Cartn_x"))]
    if not blocks:
        raise UserError(f"{source}: has no atoms (_atom_site.Cartn_x). Pass a file with coordinates.")
    if len(blocks) > 1:
        names = listed([block.name for block in blocks], 4)
        raise UserError(f"{source}: has {len(blocks)} data blocks with atoms ({names}). Write one block to a file.")
    if len(blocks[0].find_values("_entity_poly_seq.mon_id")):
        return Reading(blocks[0], [])
    return pdb.complete_mmcif(blocks[0], source)


def _build_structure(reading: Reading, source: str, ca_only: bool) -> Structure:
    """Build the structure of a complete block: its chains, dropped polymers, metadata and notes."""
    block, notes = reading.block, reading.notes
    columns, copies = _read_columns(block, source, notes)
    asyms = _read_asyms(block, columns)
    polymers, names, dropped = _find_polymers(block, columns, asyms, source)
    starts = np.cumsum([0, *(len(polymer.letters) for polymer in polymers)]).tolist()
    positions, mask, numbers, b_factors = place_atoms(columns, polymers, starts, source, notes)
    backbone = np.min(mask[:, [ATOM_ORDER[name] for name in ("N", "CA", "C")]], axis=1) > 0
    # The author's numbers of residues without atoms.
    spans = {polymer.label: range(*span) for polymer, span in zip(polymers, itertools.pairwise(starts))}
    schemes = dict.fromkeys(range(len(numbers)), "")
    for row in block.find("_pdbx_poly_seq_scheme.", ["asym_id", "seq_id", "pdb_seq_num", "?pdb_ins_code"]):
        if 0 < (number := parse_seq_id(row.str(1))) <= len(span := spans.get(row.str(0), range(0))):
            schemes[span[number - 1]] = row.str(2) + (row.str(3) if row.has(3) else "")
    chains: dict[str, Chain] = {}
    for polymer in polymers:
        span = spans[polymer.label]
        rows = slice(span.start, span.stop)
        name = names[polymer.label] = _unique_name(polymer.label, polymer.author, {*chains, *dropped})
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
        raise UserError(f"{source}: has no usable protein chain{because}. Pass a protein with all its atoms.")
    entry = next(iter(_tag_values(block, "_entry.id")), "") or block.name
    # Programs write these placeholders if they have no id.
    if entry in ("", "XXXX", "model"):
        entry = Path(source).name.split(".")[0]
    unplaced, ligands = _list_unplaced(reading, columns, polymers, names)
    if ligands:
        notes.append(f"amino acids outside of chains are read as ligands: {listed(ligands, 6)}")
    # The first positive number counts: resolution of the refinement, of the map (electron microscopy), of the data.
    tags = ("_refine.ls_d_res_high", "_em_3d_reconstruction.resolution", "_reflns.d_resolution_high")
    resolutions = (cif.as_number(value) for value in _tag_values(block, *tags))
    return Structure(
        id=normal_entry_id(entry),
        method="; ".join(_tag_values(block, "_exptl.method")).upper() or None,
        resolution=next((number for number in resolutions if number > 0), None),
        release_date=_read_release_date(block),
        chains=chains,
        dropped=dropped,
        # If the models are copies, they form the assembly already.
        assemblies=AssemblyTable() if copies or reading.copies else _read_assemblies(block, asyms, names, source),
        unplaced=tuple(unplaced),
        notes=tuple(notes),
    )


def _read_assemblies(
    block: cif.Block, asyms: Mapping[str, tuple[str, str]], names: dict[str, str], source: str
) -> AssemblyTable:
    """Read the table of assemblies, sorted as in `pdbx_struct_assembly` if the file has that category."""
    rows = block.find("_pdbx_struct_assembly_gen.", ["assembly_id", "oper_expression", "asym_id_list"])
    generators = [(row.str(0), row.str(1), row.str(2)) for row in rows]
    order = {name: i for i, name in enumerate(_tag_values(block, "_pdbx_struct_assembly.id"))}
    generators.sort(key=lambda row: order.get(row[0], len(order)))
    tags = ["id", *(tag for row in "123" for tag in (*(f"matrix[{row}][{c}]" for c in "123"), f"vector[{row}]"))]
    operators = {row.str(0): tuple(map(row.str, range(1, 13))) for row in block.find("_pdbx_struct_oper_list.", tags)}
    compounds = {row.str(0): row.str(1) for row in block.find("_pdbx_entity_nonpoly.", ["entity_id", "comp_id"])}
    entities = {label: entity for label, (_, entity) in asyms.items()}
    return AssemblyTable(source, tuple(generators), operators, names, entities, compounds)


def _tag_values(block: cif.Block, *tags: str) -> list[str]:
    """Return all values of some tags as text, without missing values."""
    return [cif.as_string(value) for tag in tags for value in block.find_values(tag) if value not in ABSENT]


def _read_release_date(block: cif.Block) -> date | None:
    """Read the release date, the earliest revision. Files before 2017 list revisions in `database_PDB_rev`.

    Values that are not dates are skipped. `date_original` is not used, because it is the date of deposition.
    """
    for tag in ("_pdbx_audit_revision_history.revision_date", "_database_PDB_rev.date"):
        if dates := [day for text in _tag_values(block, tag) if (day := parse_date(text)) is not None]:
            return min(dates)
    return None


def _find_polymers(
    block: cif.Block, columns: Columns, asyms: Mapping[str, tuple[str, str]], source: str
) -> tuple[list[Polymer], dict[str, str], dict[str, str]]:
    """Find the protein chains, in file order.

    Returns them, the names of the other polymers by label_asym_id, and the kinds of the other polymers by name.
    """
    sequences = _read_sequences(block, source)
    # The letter of each modified residue's parent.
    parents: dict[str, str] = {}
    for category, tags in (
        ("_pdbx_struct_mod_residue.", ["label_comp_id", "parent_comp_id"]),
        ("_chem_comp.", ["id", "mon_nstd_parent_comp_id"]),
    ):
        for row in block.find(category, tags):
            # A residue with several parents ("SER,TYR,GLY") gets no letter here.
            if letter := _LETTERS.get(row.str(1).upper()):
                parents.setdefault(row.str(0), letter)
    rows = block.find("_entity_poly.", ["entity_id", "pdbx_seq_one_letter_code_can"])
    canonical = {row.str(0): "".join(row.str(1).split()).upper() for row in rows}
    mixed = any(len(names) > 1 for monomers in sequences.values() for names in monomers)
    occupancy_of = _mean_occupancies(columns) if mixed else {}
    kinds = {row.str(0): row.str(1).lower() for row in block.find("_entity_poly.", ["entity_id", "type"])}
    polymers: list[Polymer] = []
    dropped: dict[str, str] = {}
    names: dict[str, str] = {}
    for label, (author, entity) in asyms.items():
        if entity not in sequences:
            continue  # ligand, sugar or water
        # The name with the largest occupancy comes first.
        monomers = [
            tuple(sorted(names_here, key=lambda name: -occupancy_of.get((label, str(number), name), 0.0)))
            for number, names_here in enumerate(sequences[entity], 1)
        ]
        letters = _to_letters(monomers, parents, canonical.get(entity, ""))
        kind = kinds.get(entity)
        # Without a declared type, the majority of the residues decides.
        if not kind:
            amino = sum(gemmi.find_tabulated_residue(names[0]).is_amino_acid() for names in monomers)
            kind = "polypeptide(l)" if 2 * amino > len(monomers) else "no polypeptide"
        if kind == "polypeptide(l)":
            polymers.append(Polymer(label, author, entity, monomers, letters))
        else:
            name = names[label] = _unique_name(label, author, dropped)
            dropped[name] = kind
    return polymers, names, dropped


def _read_sequences(block: cif.Block, source: str) -> dict[str, list[tuple[str, ...]]]:
    """Read the residue names at each position of each entity's SEQRES; a mixture has several names."""
    sequences: dict[str, list[tuple[str, ...]]] = {}
    for row in block.find("_entity_poly_seq.", ["entity_id", "num", "mon_id"]):
        entity, number, monomer = row.str(0), row.str(1), FORCE_FIELD_NAMES.get(row.str(2), row.str(2))
        monomers = sequences.setdefault(entity, [])
        if number == str(len(monomers) + 1):
            monomers.append((monomer,))
        elif monomers and number == str(len(monomers)):
            monomers[-1] = (*monomers[-1], monomer)
        else:
            raise UserError(
                f"{source}: entity_poly_seq has residue {number} of entity {entity} after {len(monomers)} others. "
                "Fetch the file again."
            )
    return sequences


def _read_asyms(block: cif.Block, columns: Columns) -> dict[str, tuple[str, str]]:
    """Map each label_asym_id to the author's chain name and the entity, in file order, also of chains without atoms."""
    schemes = block.find("_pdbx_poly_seq_scheme.", ["asym_id", "pdb_strand_id"])
    authors = {row.str(0): row.str(1) for row in schemes}
    entities = {row.str(0): row.str(1) for row in block.find("_struct_asym.", ["id", "entity_id"])}
    labels, entity_ids = columns["label_asym_id"], columns["label_entity_id"]
    with_atoms = dict(zip(labels, zip(columns["auth_asym_id"], entity_ids)))
    asyms = {}
    for label in [*entities, *(label for label in with_atoms if label not in entities)]:
        author, entity = with_atoms.get(label, ("?", "?"))
        name = author if author not in ABSENT else authors.get(label) or label
        asyms[label] = (name, entities.get(label, entity))
    return asyms


def _to_letters(monomers: Sequence[tuple[str, ...]], parents: Mapping[str, str], canonical: str) -> str:
    """Convert the first name at each position to one letter: from gemmi's table, else its parent's letter, else X.

    A residue without a declared parent takes its letter from the canonical sequence if that sequence has exactly one
    letter per position (a chromophore has several) and the position has a single name.
    """
    letters = []
    for i, names in enumerate(monomers):
        parent = parents.get(names[0], "")
        if not parent and len(names) == 1 and len(canonical) == len(monomers):
            parent = canonical[i]
        info = gemmi.find_tabulated_residue(names[0])
        # Nucleotides have one-letter codes too, but their A is not alanine.
        letter = info.one_letter_code.upper() if info.is_amino_acid() else ""
        letter = _NEAREST.get(letter, letter)
        standard = next((x for x in (letter, parent) if x in RESTYPE_ORDER), "X")
        letters.append("X" if names[0] == "UNK" else standard)
    return "".join(letters)


def _unique_name(label: str, author: str, taken: Container[str]) -> str:
    """Return the author's chain name, with the label_asym_id appended if the name is taken."""
    return author if author not in taken else f"{author}-{label}"


def _read_columns(block: cif.Block, source: str, notes: list[str]) -> tuple[Columns, bool]:
    """Read the `atom_site` columns for the models that count. Missing optional columns are filled with '?'.

    Returns the columns, and whether the models are copies of an assembly. Chain A of a second copy is named A-2. Adds a
    note if there are several models.
    """
    needed = ["label_asym_id", "label_seq_id", "label_comp_id", "label_atom_id", "Cartn_x", "Cartn_y", "Cartn_z"]
    optional = ["auth_asym_id", "label_entity_id", "label_alt_id", "occupancy", "auth_seq_id", "pdbx_PDB_ins_code"]
    tags = [*needed, *optional, "B_iso_or_equiv", "pdbx_PDB_model_num"]
    table = block.find("_atom_site.", [*needed, *("?" + tag for tag in tags[len(needed) :])])
    if not len(table):
        missing = [tag for tag in needed if not block.find_values("_atom_site." + tag)]
        problem = f"atom_site has no column {', '.join(missing)}" if missing else "has no atoms"
        raise UserError(f"{source}: {problem}. Pass a file with coordinates.")
    rows: Sequence[int] = range(len(table))
    copies, suffixes = False, list[str]()
    # The last column is the model number.
    if table.has_column(len(tags) - 1):
        models = list(table.column(len(tags) - 1))
        count = models.count(models[0])
        if count < len(models):
            order = {model: i for i, model in enumerate(dict.fromkeys(models))}
            atoms, at = (list(table.column(tags.index(tag))) for tag in ("label_atom_id", "label_seq_id"))
            chains = list(table.column(tags.index("label_asym_id")))
            xyz = [table.column(tags.index(f"Cartn_{axis}")) for axis in "xyz"]
            alphas = (
                (models[row], (chains[row], (parse_seq_id(at[row]), "")), [cif.as_number(axis[row]) for axis in xyz])
                for row, atom in enumerate(atoms)
                if atom == "CA" and at[row] not in ABSENT
            )
            is_nmr = any("NMR" in method.upper() for method in _tag_values(block, "_exptl.method"))
            copies, model_notes = count_models(collect_alphas(order, alphas), is_nmr)
            notes += model_notes
            if copies:
                suffixes = ["" if order[model] == 0 else f"-{order[model] + 1}" for model in models]
            elif models[count - 1] == models[0]:
                rows = range(count)
            else:
                rows = [i for i, model in enumerate(models) if model == models[0]]
    columns = {
        tag: _column_texts(table.column(i), rows) if table.has_column(i) else ["?"] * len(rows)
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
    """Place the heavy atoms of all M residues in the atom37 layout, one conformation per residue.

    starts: index of each polymer's first residue, and M at the end. NH1 and NH2 of arginine are assigned by their
    distance to CD. Adds a note on placeholder coordinates, which are masked.
    Returns positions, float32 [M, 37, 3] in angstrom, 0 where masked; the mask, float32 [M, 37]; the author's number
    and insertion code of each residue, "" for a residue without atoms; and the B factor of each residue's CA, float32
    [M], NaN for a residue without CA.
    Raises UserError for a residue that contradicts the sequence, and for positions that are not numbers.
    """
    rows, residues, atoms = _select_polymer_rows(columns, polymers, starts, source)
    total = starts[-1]
    numbers = [""] * total
    authors, codes = columns["auth_seq_id"], columns["pdbx_PDB_ins_code"]
    firsts = np.unique(residues, return_index=True)
    for residue, row in zip(firsts[0], rows[firsts[1]]):
        if authors[row] not in ABSENT:
            numbers[residue] = authors[row] + ("" if codes[row] in ABSENT else codes[row])
    letters = "".join(polymer.letters for polymer in polymers)
    types = np.array([RESTYPE_ORDER.get(letter, UNKNOWN) for letter in letters], dtype=np.int64)
    is_allowed = (atoms >= 0) & KNOWN_ATOMS[types[residues], atoms]
    rows, residues, atoms = rows[is_allowed], residues[is_allowed], atoms[is_allowed]
    row_list = rows.tolist()
    xyz = np.stack([_parse_numbers([columns[f"Cartn_{axis}"][row] for row in row_list]) for axis in "xyz"], axis=-1)
    # The comparison is false for NaN.
    is_valid = np.abs(xyz) < MAX_COORDINATE
    if not is_valid.all():
        row = row_list[np.flatnonzero(~is_valid.all(1))[0]]
        atom, chain = columns["label_atom_id"][row], columns["auth_asym_id"][row]
        number = columns["label_seq_id"][row] if authors[row] in ABSENT else authors[row]
        raise UserError(
            f"{source}: atom {atom} of residue {number} of chain {chain} has a position that is not a number or "
            "far too large. Correct the file or remove the atom."
        )
    unseen, at_origin = is_placeholder(xyz), (xyz == 0).all(-1)
    # A single atom may really be at the origin, such as the first atom of a built helix.
    if at_origin.sum() == 1:
        unseen &= ~at_origin
    if unseen.any():
        count = len(np.unique(residues[unseen]))
        notes.append(f"residues with placeholder coordinates (0, 0, 0 or 9999) are read as not observed: {count}")
        rows, residues, atoms, xyz = rows[~unseen], residues[~unseen], atoms[~unseen], xyz[~unseen]
    picked = _choose_conformations(columns, rows, residues, atoms)
    positions, mask = np.zeros((total, 37, 3), np.float32), np.zeros((total, 37), np.float32)
    positions[residues[picked], atoms[picked]] = xyz[picked]
    mask[residues[picked], atoms[picked]] = 1.0
    alphas = picked[atoms[picked] == ATOM_ORDER["CA"]]
    b_factors = np.full(total, np.nan, np.float32)
    b_factors[residues[alphas]] = _parse_numbers([columns["B_iso_or_equiv"][row] for row in rows[alphas]])
    # NH1 is the nitrogen that is nearer to CD (Supp. 1.2.1).
    cd, nh1, nh2 = (ATOM_ORDER[name] for name in ("CD", "NH1", "NH2"))
    arginine = np.flatnonzero((types == RESTYPE_ORDER["R"]) & mask[:, [cd, nh1, nh2]].all(1))
    to_cd = np.linalg.norm(positions[arginine][:, [nh1, nh2]] - positions[arginine][:, [cd]], axis=-1)
    swapped = arginine[to_cd[:, 0] > to_cd[:, 1]]
    positions[swapped[:, None], [nh1, nh2]] = positions[swapped[:, None], [nh2, nh1]]
    return positions, mask, numbers, b_factors


def _list_unplaced(
    reading: Reading, columns: Columns, polymers: Sequence[Polymer], names: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """List the residues with N, CA and C that are in no chain: the lost residues, and the free amino acids.

    names: chain names of all polymers by label_asym_id, including the dropped ones, whose residues are not listed. Free
    amino acids that the file itself declares as ligands are not listed either.
    """
    placed = {polymer.label for polymer in polymers}
    atoms, comps, asyms = (columns[f"label_{tag}_id"] for tag in ("atom", "comp", "asym"))
    seq_ids, numbers, codes = columns["label_seq_id"], columns["auth_seq_id"], columns["pdbx_PDB_ins_code"]
    # Numbers outside of the sequence have raised an error already.
    loose, row = list[int](), -1
    for _ in range(atoms.count("CA")):
        row = atoms.index("CA", row + 1)
        if (seq_ids[row] in ABSENT or asyms[row] not in placed) and comps[row] != "CA":
            loose.append(row)
    if not loose:
        return [], []
    keys = list(zip(asyms, numbers, codes, comps))
    observed = {(key, atom) for key, atom in zip(keys, atoms) if atom in ("N", "C")}
    kinds = {row.str(0): row.str(1) for row in reading.block.find("_entity.", ["id", "type"])}
    lost: dict[str, None] = {}
    ligands: dict[str, None] = {}
    for row in loose:
        key, asym = keys[row], asyms[row]
        if not {(key, "N"), (key, "C")} <= observed or (asym in names and asym not in placed):
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


def _mean_occupancies(columns: Columns) -> dict[tuple[str, str, str], float]:
    """Compute the mean occupancy of each residue's best conformation, by label_asym_id, label_seq_id and name."""
    keys = zip(*(columns[f"label_{tag}_id"] for tag in ("asym", "seq", "comp", "alt")))
    values = np.nan_to_num(_parse_numbers(columns["occupancy"]), nan=1.0).tolist()
    by_conformation: defaultdict[tuple[str, str, str, str], list[float]] = defaultdict(list)
    for key, value in zip(keys, values):
        by_conformation[key].append(value)
    best: dict[tuple[str, str, str], float] = {}
    for (chain, number, name, _), occupancies in by_conformation.items():
        mean = sum(occupancies) / len(occupancies)
        best[chain, number, name] = max(best.get((chain, number, name), 0.0), mean)
    return best


def parse_seq_id(text: str) -> int:
    """Parse a position in a sequence, counted from 1. Returns 0 for other text and for more than 18 digits."""
    return int(text) if len(text) <= MAX_DIGITS and text.isdecimal() else 0


def _column_texts(column: cif.Column, rows: Sequence[int]) -> list[str]:
    """Return the values of some rows of a column without quotes."""
    values = list(itertools.islice(column, len(rows))) if isinstance(rows, range) else [column[i] for i in rows]
    # A single quote character is kept: it is the insertion code of a converted PDB file.
    if any(quote in "".join(values) for quote in "'\""):
        return [cif.as_string(value) if value[0] in "'\"" and len(value) > 1 else value for value in values]
    return values


def _parse_numbers(values: list[str]) -> np.ndarray:
    """Convert text to float64. '12.5(3)' becomes 12.5; anything that is not a number becomes NaN."""
    try:
        return np.array([float(value) for value in values])
    except ValueError:
        return np.array([cif.as_number(value) for value in values])


def _select_polymer_rows(
    columns: Columns, polymers: Sequence[Polymer], starts: Sequence[int], source: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Select the rows of polymer atoms. Of a mixture, only the first residue is selected.

    Returns the rows, the index of each row's residue among all M, and its atom37 index (-1 if it is not one of the 37).
    Selenium of selenomethionine is read as the sulfur of methionine.
    Raises UserError for a residue that contradicts the sequence.
    """
    polymer_of = {polymer.label: (polymer.monomers, start) for polymer, start in zip(polymers, starts)}
    keys = list(zip(*(columns[f"label_{tag}_id"] for tag in ("asym", "seq", "comp"))))
    # Residues are looked up once each, not once per atom.
    residue_of = dict.fromkeys(keys, -1)
    for key in residue_of:
        label, number, monomer = key
        if label not in polymer_of or number in ABSENT:
            continue
        monomers, start = polymer_of[label]
        i = parse_seq_id(number) - 1
        if not 0 <= i < len(monomers) or monomer not in monomers[i]:
            number = number if len(number) <= MAX_DIGITS else f"{number[:MAX_DIGITS]}..."
            expected = "/".join(monomers[i]) if 0 <= i < len(monomers) else f"1 to {len(monomers)}"
            raise UserError(
                f"{source}: chain {columns['auth_asym_id'][keys.index(key)]} has an atom of {monomer} at position "
                f"{number} of its sequence, which has {expected}. The file contradicts itself: fetch it again."
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


def _choose_conformations(columns: Columns, rows: np.ndarray, residues: np.ndarray, atoms: np.ndarray) -> np.ndarray:
    """Choose one row per atom, from the conformation with the highest mean occupancy in its residue.

    Atoms that this conformation lacks come from another one. Returns sorted indices into `rows`.
    """
    keys = residues * len(ATOM_TYPES) + atoms
    if np.unique(keys).size == keys.size:
        return np.arange(keys.size)
    altlocs = [columns["label_alt_id"][row] for row in rows]
    occupancy = np.nan_to_num(_parse_numbers([columns["occupancy"][row] for row in rows]), nan=1.0)
    # Alternative locations are numbered by first appearance, after the two marks for none.
    order = {altloc: i for i, altloc in enumerate(dict.fromkeys([".", "?", *altlocs]))}
    altloc = np.array([order[a] for a in altlocs])
    group = residues * len(order) + altloc
    size = (int(residues.max()) + 1) * len(order)
    counts = np.bincount(group, minlength=size)
    means = np.bincount(group, occupancy, size) / np.maximum(counts, 1)
    means = np.where(counts > 0, means, -1.0).reshape(-1, len(order))
    best = 2 + means[:, 2:].argmax(1) if len(order) > 2 else np.zeros(len(means), dtype=np.int64)
    preferred = (altloc < 2) | (altloc == best[residues])
    # The sort is stable, so the first of equals in the file wins.
    ranked = np.lexsort((-occupancy, ~preferred, keys))
    first = np.unique(keys[ranked], return_index=True)[1]
    return np.sort(ranked[first])
