"""PDB files, and mmCIF files without SEQRES, as the complete mmCIF that `mmcif.py` reads.

gemmi finds the polymers; what is added is the place of each residue in its chain's sequence.
"""

import re
from collections.abc import Sequence

import gemmi
import numpy as np
from gemmi import cif

from warpfold.errors import UserError

BOND = 2.0  # angstrom; C to N of the next residue: nearer is bonded (1.33 in a peptide, more in poor models)
LONGEST_GAP = 200  # residues: a longer jump in the numbers is a change of numbering rather than a missing part


def read(data: bytes, source: str) -> cif.Block:
    """Return the first model of a PDB file as an mmCIF block with SEQRES, method, resolution and release date.

    Errors: UserError for a file that was cut short, or with a position that is not a number; gemmi's own, ValueError
    and RuntimeError, for one that it cannot read.
    """
    last = data.rstrip(b"\n").rpartition(b"\n")[2]
    if last.startswith((b"ATOM  ", b"HETATM")) and len(last.rstrip()) < 54:  # its coordinates end at column 54
        raise UserError(f"{source}: ends in the middle of an atom, so it is cut short; fetch the file again")
    if re.search(rb"^SEQRES", data, re.MULTILINE) and not re.search(rb"^END", data, re.MULTILINE):
        raise UserError(
            f"{source}: has SEQRES but no END, so it is cut short; fetch it again, or add END if it is whole"
        )
    model = data.partition(b"\nENDMDL")[0]
    for line in model.split(b"\n"):
        if line.startswith((b"ATOM  ", b"HETATM")):
            try:  # gemmi would take a field of stars or blanks for 0
                float(line[30:38]), float(line[38:46]), float(line[46:54])
            except ValueError:
                atom = line[6:27].decode("latin-1").strip()
                raise UserError(
                    f"{source}: atom {atom} has a position that is not a number; correct the file or leave the atom out"
                ) from None
    # gemmi 0.6 reads SEQRES to column 70 even where a line is shorter, and would take the rest from the line before.
    structure = gemmi.read_pdb_string(
        "\n".join(line.rstrip().ljust(80) for line in model.decode("latin-1").split("\n"))
    )
    structure.name = dict(structure.info.items()).get("_entry.id", "")
    block = _complete(structure, source)
    if structure.resolution > 0:
        block.set_pair("_refine.ls_d_res_high", str(structure.resolution))  # REMARK 2, whatever the method
    if date := _release_date(data):
        block.set_pair("_pdbx_audit_revision_history.revision_date", date)
    return block


def complete_mmcif(block: cif.Block, source: str) -> cif.Block:
    """Return an mmCIF block without `entity_poly_seq`, with sequences and places added from what the coordinates show.

    The sequence starts with the first residue seen.  Between two residues that are not bonded, and whose numbers
    (label_seq_id if the file has it, else the author's) leave a gap of at most 200, as many X are put, masked.

    Errors: ValueError and RuntimeError, gemmi's, for a block that it cannot read.
    """
    completed = _complete(make_structure(block), source)
    for category in (
        *("_exptl", "_refine", "_em_3d_reconstruction", "_reflns", "_pdbx_audit_revision_history"),
        *("_database_PDB_rev", "_chem_comp", "_pdbx_struct_mod_residue"),
    ):
        if items := block.get_mmcif_category(category + "."):
            completed.set_mmcif_category(category + ".", items)
    return completed


def make_structure(block: cif.Block) -> gemmi.Structure:
    """Make gemmi's structure of an mmCIF block.

    gemmi 0.6 finds no atoms where a column is missing that 0.7 does without, so the block gets what 0.7 takes instead.
    """
    loop = block.find_loop("_atom_site.Cartn_x").get_loop()
    for tag, default in (("occupancy", "1"), ("B_iso_or_equiv", "20"), ("auth_seq_id", "?")):
        if loop is not None and "_atom_site." + tag not in loop.tags:
            loop.add_columns(["_atom_site." + tag], default)
            if tag == "auth_seq_id":
                numbers = block.find_loop("_atom_site.auth_seq_id")
                for row, number in enumerate(block.find_loop("_atom_site.label_seq_id")):
                    numbers[row] = number
    return gemmi.make_structure_from_block(block)


def _release_date(data: bytes) -> str | None:
    """Return the date of the first revision (REVDAT 1) as YYYY-MM-DD."""
    # Months have three letters, so a name stands at a multiple of 3; -1, not found, leaves 2.
    months = b"JANFEBMARAPRMAYJUNJULAUGSEPOCTNOVDEC"
    found = re.search(rb"^REVDAT   1   (\d\d)-([A-Z]{3})-(\d\d)", data, re.MULTILINE)
    if found is None or months.find(found[2]) % 3 != 0:
        return None
    year = int(found[3]) + (1900 if int(found[3]) > 70 else 2000)  # the PDB began in 1971
    return f"{year}-{months.index(found[2]) // 3 + 1:02d}-{int(found[1]):02d}"


def _complete(structure: gemmi.Structure, source: str) -> cif.Block:
    """Return the first model as mmCIF, every polymer residue with its place in the sequence."""
    if not len(structure) or not structure[0].count_atom_sites():
        raise UserError(f"{source}: has no atoms; give a file with coordinates")
    names = {residue.name for chain in structure[0] for residue in chain}
    if any("'" in name or '"' in name for name in names):
        raise UserError(f"{source}: is damaged, a residue's name has a quote in it; fetch the file again")
    while len(structure) > 1:
        del structure[-1]
    taken = {chain.name for chain in structure[0]}
    for chain in structure[0]:  # old programs write chains without a name: they become A, or the next free letter
        if not chain.name.strip():
            chain.name = next(letter for letter in map(chr, range(ord("A"), 0x10000)) if letter not in taken)
            taken.add(chain.name)
    structure.setup_entities()
    for chain in structure[0]:
        polymer = chain.get_polymer()
        residues = list(polymer.first_conformer())
        if not residues:
            continue
        entity = structure.get_entity_of(polymer)
        sequence = [names.split(",")[0] for names in entity.full_sequence] if entity else []
        places = _places_by_number(residues, sequence) if sequence else None
        if not sequence:
            sequence, places = _derive_sequence(residues)
            # An entity of its own: in chains of one protein, different residues are seen.
            subchain = polymer.subchain_id()
            for other in structure.entities:
                other.subchains = [name for name in other.subchains if name != subchain]
            entity = gemmi.Entity(f"polymer-{subchain}")
            entity.entity_type = gemmi.EntityType.Polymer
            entity.polymer_type = polymer.check_polymer_type()
            entity.subchains = [subchain]
            entity.full_sequence = sequence
            structure.entities.append(entity)
        if places is not None:
            by_number = {str(residue.seqid): place for residue, place in zip(residues, places)}
            for residue in polymer:
                residue.label_seq = by_number[str(residue.seqid)]
    structure.assign_label_seq_id()  # by alignment, for chains whose numbers did not tell
    _name_mixtures(structure)
    return structure.make_mmcif_block()


def _name_mixtures(structure: gemmi.Structure) -> None:
    """Add to the sequences the alternative residues of one place (microheterogeneity), which SEQRES does not name."""
    for chain in structure[0]:
        polymer = chain.get_polymer()
        entity = structure.get_entity_of(polymer)
        names: dict[int, list[str]] = {}
        for residue in polymer:
            if residue.label_seq is not None:
                names.setdefault(residue.label_seq, []).append(residue.name)
        if entity is None or all(len(set(found)) == 1 for found in names.values()):
            continue
        sequence = list(entity.full_sequence)
        for place, found in names.items():
            known = sequence[place - 1].split(",") if 0 < place <= len(sequence) else []
            if len(set(found)) > 1 and set(found) & set(known):
                sequence[place - 1] = ",".join(dict.fromkeys([*known, *found]))
        entity.full_sequence = sequence


def _places_by_number(residues: Sequence[gemmi.Residue], sequence: Sequence[str]) -> list[int] | None:
    """Return places from 1 if the author's numbers, all shifted alike, fit the sequence, else None.

    No shift is tried first, then the smallest.
    """
    numbers = [residue.seqid.num or 0 for residue in residues]
    if any(residue.seqid.icode != " " for residue in residues):
        return None
    for shift in (0, *range(1 - min(numbers), len(sequence) - max(numbers) + 1)):
        places = [number + shift for number in numbers]
        if all(0 < p <= len(sequence) and sequence[p - 1] == r.name for p, r in zip(places, residues)):
            return places
    return None


def _derive_sequence(residues: Sequence[gemmi.Residue]) -> tuple[list[str], list[int]]:
    """Derive a sequence from the coordinates, X in its gaps, and the place from 1 of each residue."""
    labels = [residue.label_seq for residue in residues]
    by_author = None in labels
    numbers = [r.seqid.num or 0 if by_author or label is None else label for r, label in zip(residues, labels)]
    sequence, places = [residues[0].name], [1]
    for before, residue, jump in zip(residues, residues[1:], np.diff(numbers).tolist()):
        carbon, nitrogen = before.find_atom("C", "*"), residue.find_atom("N", "*")
        bonded = carbon and nitrogen and carbon.pos.dist(nitrogen.pos) < BOND
        if 1 < jump <= LONGEST_GAP + 1 and not bonded:
            sequence += ["UNK"] * (jump - 1)
        sequence.append(residue.name)
        places.append(len(sequence))
    return sequence, places
