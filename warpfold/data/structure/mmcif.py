"""Read structures: mmCIF and PDB files -> chains of atom37 positions on their SEQRES (Supp. 1.2.1).

gemmi reads the syntax; the meaning is read here.  Atoms are taken from mmCIF columns, of the first model only, so that
an NMR entry of twenty models costs one.  PDB files and files without SEQRES come here through `pdb.py`.
"""

from collections.abc import Container, Mapping, Sequence
from datetime import date
from pathlib import Path

import gemmi
import numpy as np
from gemmi import cif

from warpfold.data.structure import pdb
from warpfold.data.structure.assemblies import AssemblyTable
from warpfold.data.structure.atom_site import ABSENT, Columns, Polymer, occupancies, place_atoms, place_of, read_columns
from warpfold.data.structure.chain import Chain, Structure, parse_date
from warpfold.errors import UserError
from warpfold.files import LARGEST, read_file
from warpfold.geometry.residue import ATOM_ORDER, RESTYPE_3, RESTYPE_ORDER, RESTYPES

_NEAREST = {"U": "C", "O": "K"}  # selenocysteine, pyrrolysine: the nearest of the twenty
_LETTERS = dict(zip(RESTYPE_3, RESTYPES))  # "ALA" -> "A", of the twenty


def read_structure(path: str | Path, ca_only: bool = False, limit: int = LARGEST) -> Structure:
    """Return the protein chains of an mmCIF or PDB file (told by content), gz or not, of `limit` bytes at most.

    First model only.  SEQRES from `entity_poly_seq` (PDB: SEQRES records; else see `pdb.complete_mmcif`).  Where it
    names several residues (microheterogeneity), the one of the largest occupancy in this chain (Supp. 1.2.1), the first
    among equals; modified residues as their parents (`_one_letter`; MSE with SE as SD).  Of alternative positions the
    conformation of the highest mean occupancy in its residue, the first among equals; atoms that only another
    conformation has are taken from there.  Hydrogens are left out; NH1 and NH2 of arginine are swapped where NH2 is
    nearer to CD (Supp. 1.2.1).  Polymers other than polypeptide(L), and chains in which no residue has N, CA and C
    (CA-only; kept if `ca_only`), are named in `dropped`.

    Errors: UserError for a file that is missing, cut short, not a structure, without a usable protein chain, with
    positions that are not numbers, or whose atoms contradict its sequence.
    """
    return parse_structure(read_file(path, limit), str(path), ca_only)


def parse_structure(data: bytes | str, source: str = "<structure>", ca_only: bool = False) -> Structure:
    """Parse text in memory as `read_structure` does; `source` is its name in errors."""
    data = data.encode() if isinstance(data, str) else data
    try:
        block = pdb.read(data, source) if pdb.is_pdb(data) else _read_mmcif(data, source)
        return _structure(block, source, ca_only)
    except UnicodeDecodeError:
        raise UserError(f"{source}: is damaged, it has names that are not text; fetch the file again") from None
    except RuntimeError as error:  # gemmi's, for a category that is two loops, or a loop and a pair
        reason = " ".join(str(error).split())
        raise UserError(f"{source}: is not valid mmCIF ({reason}); fetch the file again") from None


def read_release_date(path: str | Path, limit: int = LARGEST) -> date | None:
    """Return when the entry in a file was released; None if the file does not say.

    If the date comes before the atoms, as in the PDB's files since 2017, nothing after it is parsed, which is several
    times faster than `read_structure`; otherwise the whole file is.
    Errors: as in `read_structure`, for what is read.
    """
    data = read_file(path, limit)
    head = data[: max(data.rfind(b"loop_", 0, max(data.find(b"\n_atom_site."), 0)), 0)]
    if b"_pdbx_audit_revision_history.revision_date" in head:
        with pdb.gemmi_errors(str(path), "is not valid mmCIF"):
            return _release_date(cif.read_string(head)[0])
    return parse_structure(data, str(path)).release_date


def _read_mmcif(data: bytes, source: str) -> cif.Block:
    """Return the block with the atoms, with SEQRES added if the file has none."""
    if b"_atom_site." not in data:
        what = "has no atoms" if b"data_" in data else "is not a structure file"
        raise UserError(f"{source}: {what}; give an mmCIF or PDB file with coordinates")
    last = data[-1000:].rstrip().rpartition(b"\n")[2]
    if not last.startswith(b"#") and data.count(b"\n#") >= 5:  # written with '#' after each category
        raise UserError(f"{source}: ends in the middle of a category, so it is cut short; fetch the file again")
    with pdb.gemmi_errors(source, "is cut short or not valid mmCIF"):
        blocks = [block for block in cif.read_string(data) if len(block.find_values("_atom_site.Cartn_x"))]
    if not blocks:
        raise UserError(f"{source}: has no atoms (_atom_site.Cartn_x); give a file with coordinates")
    block = blocks[0]
    return block if len(block.find_values("_entity_poly_seq.mon_id")) else pdb.complete_mmcif(block, source)


def _structure(block: cif.Block, source: str, ca_only: bool) -> Structure:
    columns = read_columns(block, source)
    asyms = _asyms(block, columns)
    polymers, dropped, names = _polymers(block, columns, asyms, source)
    if not polymers:
        raise UserError(f"{source}: has no protein chain{_because(dropped)}; give an entry with a protein")
    atoms = place_atoms(columns, polymers, source)
    backbone = np.min(atoms.mask[:, [ATOM_ORDER[name] for name in ("N", "CA", "C")]], axis=1) > 0
    numbers = _scheme_numbers(block, polymers)
    chains: dict[str, Chain] = {}
    start = 0
    for polymer, scheme in zip(polymers, numbers):
        rows = slice(start, start + len(polymer.letters))
        start = rows.stop
        name = names[polymer.label] = _free_name(polymer, [*chains, *dropped])
        if not atoms.mask[rows].any():
            dropped[name] = "no residue has coordinates"
        elif not (ca_only or backbone[rows].any()):
            dropped[name] = "no residue has N, CA and C, a CA-only chain"
        else:
            chains[name] = Chain(
                id=name,
                sequence=polymer.letters,
                positions=atoms.positions[rows],
                mask=atoms.mask[rows],
                residue_index=np.arange(len(polymer.letters), dtype=np.int64),
                author_numbers=tuple(seen or given for seen, given in zip(atoms.numbers[rows], scheme)),
                entity=polymer.entity,
            )
    if not chains:
        raise UserError(
            f"{source}: has no protein chain that can be used{_because(dropped)}; give all-atom coordinates"
        )
    entry = next(iter(_values(block, "_entry.id")), "") or block.name
    if entry in ("", "XXXX", "model"):  # placeholders of programs that know no id
        entry = Path(source).name.split(".")[0]
    # The first positive number: of the refinement, of the map (electron microscopy), of the data.
    tags = ("_refine.ls_d_res_high", "_em_3d_reconstruction.resolution", "_reflns.d_resolution_high")
    resolutions = (cif.as_number(value) for value in _values(block, *tags))
    return Structure(
        id=entry.lower() if len(entry) == 4 else entry,
        method="; ".join(_values(block, "_exptl.method")).upper() or None,
        resolution=next((number for number in resolutions if number > 0), None),
        release_date=_release_date(block),
        chains=chains,
        dropped=dropped,
        assemblies=_assemblies(block, asyms, names, source),
    )


def _assemblies(
    block: cif.Block, asyms: Mapping[str, tuple[str, str]], names: dict[str, str], source: str
) -> AssemblyTable:
    """Return what the file says of its assemblies, in the order of `pdbx_struct_assembly` if it has that category."""
    rows = block.find("_pdbx_struct_assembly_gen.", ["assembly_id", "oper_expression", "asym_id_list"])
    generators = [(row.str(0), row.str(1), row.str(2)) for row in rows]
    order = {name: place for place, name in enumerate(_values(block, "_pdbx_struct_assembly.id"))}
    generators.sort(key=lambda row: order.get(row[0], len(order)))
    tags = ["id", *(tag for row in "123" for tag in (*(f"matrix[{row}][{c}]" for c in "123"), f"vector[{row}]"))]
    operators = {row.str(0): tuple(map(row.str, range(1, 13))) for row in block.find("_pdbx_struct_oper_list.", tags)}
    compounds = {row.str(0): row.str(1) for row in block.find("_pdbx_entity_nonpoly.", ["entity_id", "comp_id"])}
    entities = {label: entity for label, (_, entity) in asyms.items()}
    return AssemblyTable(source, tuple(generators), operators, names, entities, compounds)


def _because(dropped: dict[str, str]) -> str:
    reasons = [f"{name}: {reason}" for name, reason in dropped.items()]
    more = f"; {len(reasons) - 4} more" if len(reasons) > 4 else ""
    return f" ({'; '.join(reasons[:4])}{more})" if reasons else ""


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
    """Return the protein chains in the order of the file; the kind of each other polymer by name; and their names."""
    sequences = _sequences(block, source)
    parents = _named_parents(block)
    rows = block.find("_entity_poly.", ["entity_id", "pdbx_seq_one_letter_code_can"])
    canonical = {row.str(0): "".join(row.str(1).split()).upper() for row in rows}
    mixed = any(len(names) > 1 for monomers in sequences.values() for names in monomers)
    seen = occupancies(columns) if mixed else {}
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
        polymer = Polymer(label, author, monomers, letters, entity)
        kind = kinds.get(entity)
        if not kind:  # the file does not say: what most residues are
            amino = sum(gemmi.find_tabulated_residue(names[0]).is_amino_acid() for names in monomers)
            kind = "polypeptide(l)" if 2 * amino > len(monomers) else "no polypeptide"
        if kind == "polypeptide(l)":
            polymers.append(polymer)
        else:
            name = names[label] = _free_name(polymer, dropped)
            dropped[name] = kind
    return polymers, dropped, names


def _sequences(block: cif.Block, source: str) -> dict[str, list[tuple[str, ...]]]:
    """Return the residue names at each place of each entity's SEQRES: several where the crystal has a mixture."""
    sequences: dict[str, list[tuple[str, ...]]] = {}
    for row in block.find("_entity_poly_seq.", ["entity_id", "num", "mon_id"]):
        entity, number, monomer = row.str(0), row.str(1), row.str(2)
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


def _named_parents(block: cif.Block) -> dict[str, str]:
    """Return the letter of each modified residue's parent, as `pdbx_struct_mod_residue` and `chem_comp` name it."""
    named: dict[str, str] = {}
    for category, tags in (
        ("_pdbx_struct_mod_residue.", ["label_comp_id", "parent_comp_id"]),
        ("_chem_comp.", ["id", "mon_nstd_parent_comp_id"]),
    ):
        for row in block.find(category, tags):
            if letter := _LETTERS.get(row.str(1).upper()):  # several parents ("SER,TYR,GLY") have none
                named.setdefault(row.str(0), letter)
    return named


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


def _free_name(polymer: Polymer, taken: Container[str]) -> str:
    """Return the author's name of a chain, followed by mmCIF's own if another chain has it already."""
    return polymer.author if polymer.author not in taken else f"{polymer.author}-{polymer.label}"


def _scheme_numbers(block: cif.Block, polymers: list[Polymer]) -> list[list[str]]:
    """Return the author's number and insertion code of every residue, seen or not, as `pdbx_poly_seq_scheme` has it."""
    numbers = {polymer.label: [""] * len(polymer.letters) for polymer in polymers}
    for row in block.find("_pdbx_poly_seq_scheme.", ["asym_id", "seq_id", "pdb_seq_num", "?pdb_ins_code"]):
        label, place = row.str(0), row.str(1)
        if label in numbers and 0 < place_of(place) <= len(numbers[label]):
            numbers[label][place_of(place) - 1] = row.str(2) + (row.str(3) if row.has(3) else "")
    return list(numbers.values())
