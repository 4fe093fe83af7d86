"""Convert PDB files, and mmCIF files without SEQRES, to the complete mmCIF blocks that `mmcif.py` reads.

gemmi finds the polymers. This module adds the position of each residue in its chain's sequence.
"""

import itertools
import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

import gemmi
import numpy as np
from gemmi import cif

from warpfold.data.structure.separate import (
    BOND,
    FORCE_FIELD_NAMES,
    Reading,
    Residue,
    ResidueKey,
    SeparatedChain,
    collect_alphas,
    count_models,
    is_placeholder,
    separate_chains,
)
from warpfold.errors import UserError, listed

# A larger jump of the residue numbers is a change of numbering, not a gap of missing residues.
MAX_GAP = 200


def read(data: bytes, source: str) -> Reading:
    """Read a PDB file as an mmCIF block with SEQRES, method, resolution and release date.

    Reading continues after END. All models are read if they are copies of an assembly, otherwise the first one
    (`separate.models_are_copies`). Chains are separated by `separate.separate_chains`.
    Raises UserError for a truncated file and for a position that is not a number, and gemmi's ValueError or
    RuntimeError for a file that gemmi cannot read.
    """
    last = data.rstrip(b"\n").rpartition(b"\n")[2]
    # The coordinates of an atom end at column 54.
    if last.startswith((b"ATOM  ", b"HETATM")) and len(last.rstrip()) < 54:
        raise UserError(f"{source}: is truncated (it ends in the middle of an atom). Fetch the file again.")
    if re.search(rb"^SEQRES", data, re.MULTILINE) and not re.search(rb"^END", data, re.MULTILINE):
        raise UserError(
            f"{source}: is truncated (it has SEQRES but no END). Fetch it again, or add END if it is complete."
        )
    lines = [line.rstrip() for line in data.decode("latin-1").split("\n")]
    sections = _split_sections(lines)
    if not sections:
        raise UserError(f"{source}: has no atoms. Pass a file with coordinates.")
    method = " ".join(line[10:].strip() for line in lines if line.startswith("EXPDTA"))
    all_count, notes = False, list[str]()
    if len(sections) > 1:
        alphas: list[tuple[int, tuple[str, ResidueKey], tuple[float, float, float]]] = []
        for number, (_, rows) in enumerate(sections):
            for line in (lines[row] for row in rows if lines[row][12:16] == " CA "):
                # `_read_residues` reports unreadable numbers with their atom, if the model counts.
                with suppress(ValueError):
                    # The segment distinguishes chains without names.
                    residue = line[20:22] + line[72:76], _residue_key(line)
                    alphas.append((number, residue, (float(line[30:38]), float(line[38:46]), float(line[46:54]))))
        all_count, notes = count_models(collect_alphas(range(len(sections)), alphas), "NMR" in method.upper())
    counted = sections if all_count else sections[:1]
    copies = all_count and len({model for model, _ in sections}) > 1
    # Sections of a single model are files that were concatenated with END between them.
    if all_count and not copies:
        notes.clear()
    chains = separate_chains(_read_residues(lines, counted, source), segments_are_chains=False)
    notes += _note_renamed(chains, copies)
    # Each chain gets a unique name of one or two letters, as PDB files allow.
    letters = string.ascii_uppercase + string.digits + string.ascii_lowercase
    taken_names = {chain.name for chain in chains if len(chain.name) <= 2}
    free = (name for name in map("".join, itertools.product(letters, repeat=2)) if name not in taken_names)
    short_names = {chain.name: chain.name if len(chain.name) <= 2 else next(free) for chain in chains}
    structure = gemmi.read_pdb_string(_write_unambiguous(lines, counted[0][1][0], chains, short_names, notes))
    full_names = {short: name for name, short in short_names.items()}
    for part in structure[0]:
        part.name = full_names.get(part.name, part.name)
    structure.name = dict(structure.info.items()).get("_entry.id", "")
    block = _to_mmcif(structure, source)
    if structure.resolution > 0:
        # This is the resolution of REMARK 2, for any experimental method.
        block.set_pair("_refine.ls_d_res_high", str(structure.resolution))
    if date := _parse_release_date(data):
        block.set_pair("_pdbx_audit_revision_history.revision_date", date)
    return Reading(block, notes, copies, derived=True)


def _split_sections(lines: Sequence[str]) -> list[tuple[int, list[int]]]:
    """Divide the rows of a PDB file at MODEL, ENDMDL and END, where a model may end.

    Returns the model number (from 0) and the rows of ATOM, HETATM and TER of each section with atoms. END separates
    both models and files joined by `cat`, so sections that END separates have the same model number.
    """
    sections: list[tuple[int, list[int]]] = []
    model, rows, has_atoms = 0, list[int](), False
    for row, line in enumerate(lines):
        record = line[:6].rstrip()
        if record in ("ATOM", "HETATM"):
            rows.append(row)
            has_atoms = True
        elif line[:3] == "TER":
            rows.append(row)
        elif record in ("MODEL", "ENDMDL", "END") and has_atoms:
            sections.append((model, rows))
            rows, has_atoms = [], False
            model += record != "END"
    return [*sections, (model, rows)] if has_atoms else sections


def _residue_key(line: str) -> ResidueKey:
    """Parse residue number and insertion code of an ATOM record. Numbers above 9999 are encoded in hybrid-36."""
    text = line[22:26].strip()
    try:
        number = int(text)
    except ValueError:
        number = 0
        if len(text) == 4 and text[0].isalpha() and text.isalnum() and text.isascii():
            number = int(text, 36) + (756_496 if text[0].islower() else -456_560)
    return number, line[26:27].strip()


def _read_residues(lines: Sequence[str], sections: Iterable[tuple[int, Sequence[int]]], source: str) -> list[Residue]:
    """Collect the residues of some sections in file order. Raises UserError for a position that is not a number."""
    residues: list[Residue] = []
    for model, rows in sections:
        breaks, before = True, ""
        for row in rows:
            line = lines[row]
            if line[:3] == "TER":
                breaks = True
                if residues:
                    residues[-1].ended = True
                continue
            # gemmi would read a field of asterisks or blanks as 0.
            try:
                xyz = float(line[30:38]), float(line[38:46]), float(line[46:54])
            except ValueError:
                raise UserError(
                    f"{source}: atom {line[6:27].strip()} has a position that is not a number. Correct the file or "
                    "remove the atom."
                ) from None
            atom, altloc = line[12:16].strip(), line[16:17] or " "
            # The columns that identify a residue are compared as text, and parsed once per residue.
            columns = line[17:27] + line[72:76]
            if breaks or columns != before or altloc in residues[-1].altlocs.get(atom, ""):
                # Four-letter names of force fields extend into the chain column.
                name = line[17:21].strip()
                name = name if name in FORCE_FIELD_NAMES else line[17:20].strip()
                chain = line[21:22].strip() if len(name) == 4 else line[20:22].strip()
                identity = (model, chain, line[72:76].strip(), _residue_key(line), name)
                residues.append(Residue(*identity, breaks, hetero=True))
                breaks, before = False, columns
            if residues[-1].add_atom(row, atom, altloc, line.startswith("HETATM")):
                residues[-1].atoms[atom] = np.array(xyz)
    return residues


def _note_renamed(chains: Sequence[SeparatedChain], copies: bool) -> list[str]:
    """Build a note on chains that were renamed."""
    renamed = [chain for chain in chains if chain.polymer and chain.name != chain.source]
    if not renamed:
        return []
    names = [
        f"{chain.name} (residues {chain.polymer[0].key[0]} to {chain.polymer[-1].key[0]}"
        + (f" of model {chain.model + 1})" if copies else ")")
        for chain in renamed
    ]
    return [f"chains with blank or repeated names were renamed: {listed(names, 6)}"]


# Header records that refer to chains by name and are not used.
_UNREAD = ("LINK", "SSBOND", "CISPEP", "CONECT", "SITE", "DBREF", "SEQADV", "HELIX", "SHEET", "TURN", "MODEL", "SEQRES")


def _write_unambiguous(
    lines: Sequence[str], first: int, chains: Sequence[SeparatedChain], short: Mapping[str, str], notes: list[str]
) -> str:
    """Write the chains as an unambiguous PDB file for gemmi: one model, unique chain names, contiguous chains.

    first: the row of the first atom, where the header ends. short: the short name of each chain. Adds a note on SEQRES
    records that are left out.
    """
    is_renamed = any(chain.source and chain.name != chain.source for chain in chains)
    text = [
        line
        for line in lines[:first]
        if not line.startswith(_UNREAD) and not (is_renamed and line.startswith("REMARK 350"))
    ]
    for chain, rows in _assign_seqres(lines, chains, notes):
        for line in rows:
            names = [f"{FORCE_FIELD_NAMES.get(name, name):>3}" for name in line[19:70].split()]
            text.append(f"{line[:10]}{short[chain.name]:>2}{line[12:19]}{' '.join(names)}")
    for chain in chains:
        polymer = chain.polymer
        for residue in chain.residues:
            name = FORCE_FIELD_NAMES.get(residue.name, residue.name)
            for row in residue.rows:
                line = lines[row]
                text.append(f"{line[:17]}{name:>3}{short[chain.name]:>2}{line[22:]}")
            if polymer and residue is polymer[-1] and residue.ended:
                text.append("TER")
    # gemmi 0.6 reads SEQRES up to column 70. In a shorter line it would read leftovers of the previous line.
    return "\n".join(line.ljust(80) for line in [*text, "END"])


def _assign_seqres(
    lines: Sequence[str], chains: Sequence[SeparatedChain], notes: list[str]
) -> Iterator[tuple[SeparatedChain, list[str]]]:
    """Yield the SEQRES records of each chain.

    Several chains of one name get records if there are as many sets of records (each numbered from 1) as chains, or if
    the chains are copies in different models. Otherwise the assignment is unknown, and their sequences are derived from
    the coordinates.
    """
    sets: dict[str, list[list[str]]] = {}
    serials: dict[str, int] = {}
    for line in lines:
        if line.startswith("SEQRES"):
            name, number = line[10:12].strip(), line[7:10].strip()
            serial = int(number) if number.isdecimal() else 0
            if name not in sets or serial <= serials[name]:
                sets.setdefault(name, []).append([])
            serials[name] = serial
            sets[name][-1].append(line)
    for name, records in sets.items():
        named = [chain for chain in chains if chain.source == name and chain.polymer]
        if len(records) == len(named):
            yield from zip(named, records)
        elif len(records) == 1 and len({chain.model for chain in named}) == len(named):
            yield from ((chain, records[0]) for chain in named)
        elif named:
            notes.append(f"SEQRES of chain {name or 'without a name'} is left out: {len(named)} chains have this name")


def complete_mmcif(block: cif.Block, source: str) -> Reading:
    """Derive the sequences of an mmCIF block without `entity_poly_seq` from its coordinates.

    The sequence starts with the first observed residue. A gap of at most 200 in the residue numbers (label_seq_id if
    the file has it, else the author's) between two residues that are not bonded is filled with masked X.

    Raises gemmi's ValueError or RuntimeError for a block that gemmi cannot read.
    """
    copies, notes = _separate_mmcif(block)
    completed = _to_mmcif(make_structure(block), source)
    for category in (
        *("_exptl", "_refine", "_em_3d_reconstruction", "_reflns", "_pdbx_audit_revision_history"),
        *("_database_PDB_rev", "_chem_comp", "_pdbx_struct_mod_residue"),
    ):
        if items := block.get_mmcif_category(category + "."):
            completed.set_mmcif_category(category + ".", items)
    return Reading(completed, notes, copies, derived=True)


def _separate_mmcif(block: cif.Block) -> tuple[bool, list[str]]:
    """Give the chains of `_atom_site` unique names, and select the rows of the models that count, in place.

    Returns whether the models are copies of an assembly, and notes.
    """
    loop = block.find_loop("_atom_site.Cartn_x").get_loop()
    if loop is None:
        return False, []
    tags = [tag.partition(".")[2] for tag in loop.tags]
    values = list(loop.values)
    columns = {tag: values[i :: len(tags)] for i, tag in enumerate(tags)}
    count = loop.length()
    absent = ["?"] * count

    def column(*names: str) -> list[str]:
        """Return the first of the named columns that has values, without quotes."""
        for name in names:
            if name in columns and any(value not in (".", "?") for value in columns[name]):
                return [cif.as_string(value) if value[:1] in "'\"" else value for value in columns[name]]
        return absent

    chain, segment = column("auth_asym_id", "label_asym_id"), column("label_asym_id")
    number, code, altloc = column("auth_seq_id", "label_seq_id"), column("pdbx_PDB_ins_code"), column("label_alt_id")
    name, atom = column("label_comp_id", "auth_comp_id"), column("label_atom_id", "auth_atom_id")
    group, model = column("group_PDB"), column("pdbx_PDB_model_num")
    xyz = np.array([[cif.as_number(columns[f"Cartn_{axis}"][row]) for axis in "xyz"] for row in range(count)])

    def text(value: str) -> str:
        return "" if value in (".", "?") else value

    keys = [(int(n) if n.lstrip("-").isdecimal() else 0, text(c)) for n, c in zip(number, code)]
    order = {value: i for i, value in enumerate(dict.fromkeys(model))}
    is_nmr = any("NMR" in value.upper() for value in block.find_values("_exptl.method"))
    alphas = [row for row in range(count) if len(order) > 1 and atom[row] == "CA" and name[row] != "CA"]
    residues_of_alphas = ((model[row], (chain[row] + segment[row], keys[row]), xyz[row]) for row in alphas)
    copies, notes = count_models(collect_alphas(order, residues_of_alphas), is_nmr)
    residues: list[Residue] = []
    for row in range(count):
        if not copies and order[model[row]] != 0:
            continue
        identity = (order[model[row]], text(chain[row]), text(segment[row]), keys[row], name[row])
        location = text(altloc[row]) or " "
        last = residues[-1] if residues else None
        if (
            last is None
            or identity != (last.model, last.chain, last.segment, last.key, last.name)
            or location in last.altlocs.get(atom[row], "")
        ):
            last = Residue(*identity, breaks=False, hetero=True)
            residues.append(last)
        if last.add_atom(row, atom[row], location, group[row] == "HETATM") and not is_placeholder(xyz[row]):
            last.atoms[atom[row]] = xyz[row]
    chains = separate_chains(residues, segments_are_chains=True)
    notes += _note_renamed(chains, copies)
    rows = [row for part in chains for residue in part.residues for row in residue.rows]
    names = [part.name for part in chains for residue in part.residues for _ in residue.rows]
    is_plain = rows == list(range(count)) and names == columns.get("auth_asym_id") and len(order) == 1
    if is_plain and not set(name) & FORCE_FIELD_NAMES.keys():
        return copies, notes
    columns |= {
        tag: [FORCE_FIELD_NAMES.get(value, value) for value in columns[tag]] for tag in tags if "comp_id" in tag
    }
    columns = {tag: [column[row] for row in rows] for tag, column in columns.items()}
    columns["auth_asym_id"] = [cif.quote(name) for name in names]
    if not is_plain:
        # gemmi would name its subchains and entities after these columns, which no longer match the chains.
        for tag in {"label_asym_id", "label_entity_id"} & columns.keys():
            columns[tag] = ["?"] * len(rows)
    if "pdbx_PDB_model_num" in columns:
        columns["pdbx_PDB_model_num"] = ["1"] * len(rows)
    block.init_loop("_atom_site.", list(columns)).set_all_values(list(columns.values()))
    return copies, notes


def make_structure(block: cif.Block) -> gemmi.Structure:
    """Convert an mmCIF block to a gemmi structure.

    gemmi 0.6 finds no atoms if an optional column is missing. The columns are added with the defaults of gemmi 0.7.
    """
    loop = block.find_loop("_atom_site.Cartn_x").get_loop()
    for tag, default in (("occupancy", "1"), ("B_iso_or_equiv", "20"), ("auth_seq_id", "?")):
        if loop is not None and "_atom_site." + tag not in loop.tags:
            loop.add_columns(["_atom_site." + tag], default)
            if tag == "auth_seq_id":
                numbers = block.find_loop("_atom_site.auth_seq_id")
                for row, number in enumerate(block.find_loop("_atom_site.label_seq_id")):
                    numbers[row] = number
    structure = gemmi.make_structure_from_block(block)
    for residue in (residue for model in structure for chain in model for residue in chain):
        if residue.subchain in ("", "?", "."):
            # An empty name lets `setup_entities` choose one.
            residue.subchain = ""
    return structure


def _parse_release_date(data: bytes) -> str | None:
    """Parse the date of the first revision (REVDAT 1); returns YYYY-MM-DD."""
    # A month starts at a multiple of 3. For an unknown month, find() returns -1, and -1 % 3 is 2.
    months = b"JANFEBMARAPRMAYJUNJULAUGSEPOCTNOVDEC"
    revision = re.search(rb"^REVDAT   1   (\d\d)-([A-Z]{3})-(\d\d)", data, re.MULTILINE)
    if revision is None or months.find(revision[2]) % 3 != 0:
        return None
    # The PDB was founded in 1971.
    year = int(revision[3]) + (1900 if int(revision[3]) > 70 else 2000)
    return f"{year}-{months.index(revision[2]) // 3 + 1:02d}-{int(revision[1]):02d}"


def _to_mmcif(structure: gemmi.Structure, source: str) -> cif.Block:
    """Convert a structure of one model to mmCIF, in which every polymer residue has its position in the sequence."""
    if not len(structure) or not structure[0].count_atom_sites():
        raise UserError(f"{source}: has no atoms. Pass a file with coordinates.")
    names = {residue.name for chain in structure[0] for residue in chain}
    if any("'" in name or '"' in name for name in names):
        raise UserError(f"{source}: is damaged: a residue name contains a quote. Fetch the file again.")
    structure.setup_entities()
    for chain in structure[0]:
        polymer = chain.get_polymer()
        residues = list(polymer.first_conformer())
        if not residues:
            continue
        entity = structure.get_entity_of(polymer)
        sequence = [names.split(",")[0] for names in entity.full_sequence] if entity else []
        seq_ids = _number_by_author(residues, sequence) if sequence else None
        if not sequence:
            sequence, seq_ids = _derive_sequence(residues)
            # Each chain gets its own entity, because chains of one protein differ in their observed residues.
            subchain = polymer.subchain_id()
            for other in structure.entities:
                other.subchains = [name for name in other.subchains if name != subchain]
            entity = gemmi.Entity(f"polymer-{subchain}")
            entity.entity_type = gemmi.EntityType.Polymer
            entity.polymer_type = polymer.check_polymer_type()
            entity.subchains = [subchain]
            entity.full_sequence = sequence
            structure.entities.append(entity)
        if seq_ids is not None:
            by_number = {str(residue.seqid): seq_id for residue, seq_id in zip(residues, seq_ids)}
            for residue in polymer:
                residue.label_seq = by_number[str(residue.seqid)]
    # gemmi aligns the chains whose numbers do not fit the sequence.
    structure.assign_label_seq_id()
    _add_mixtures(structure)
    return structure.make_mmcif_block()


def _add_mixtures(structure: gemmi.Structure) -> None:
    """Add alternative residues (microheterogeneity), which SEQRES does not list, to the sequences."""
    for chain in structure[0]:
        polymer = chain.get_polymer()
        entity = structure.get_entity_of(polymer)
        names: dict[int, list[str]] = {}
        for residue in polymer:
            if residue.label_seq is not None:
                names.setdefault(residue.label_seq, []).append(residue.name)
        if entity is None or all(len(set(observed)) == 1 for observed in names.values()):
            continue
        sequence = list(entity.full_sequence)
        for seq_id, observed in names.items():
            expected = sequence[seq_id - 1].split(",") if 0 < seq_id <= len(sequence) else []
            if len(set(observed)) > 1 and set(observed) & set(expected):
                sequence[seq_id - 1] = ",".join(dict.fromkeys([*expected, *observed]))
        entity.full_sequence = sequence


def _number_by_author(residues: Sequence[gemmi.Residue], sequence: Sequence[str]) -> list[int] | None:
    """Return positions from 1 if the author's numbers fit the sequence after a common shift, else None.

    Shift 0 is tried first, then the others in ascending order.
    """
    numbers = [residue.seqid.num or 0 for residue in residues]
    if any(residue.seqid.icode != " " for residue in residues):
        return None
    for shift in (0, *range(1 - numbers[0], len(sequence) - numbers[0] + 1)):
        seq_ids = [number + shift for number in numbers]
        if all(0 < i <= len(sequence) and sequence[i - 1] == r.name for i, r in zip(seq_ids, residues)):
            return seq_ids
    return None


def _derive_sequence(residues: Sequence[gemmi.Residue]) -> tuple[list[str], list[int]]:
    """Derive a sequence from the coordinates, with X in gaps. Returns it and the position from 1 of each residue."""
    labels = [residue.label_seq for residue in residues]
    by_author = None in labels
    numbers = [r.seqid.num or 0 if by_author or label is None else label for r, label in zip(residues, labels)]
    sequence, seq_ids = [residues[0].name], [1]
    for before, residue, jump in zip(residues, residues[1:], np.diff(numbers).tolist()):
        carbon, nitrogen = before.find_atom("C", "*"), residue.find_atom("N", "*")
        bonded = carbon and nitrogen and carbon.pos.dist(nitrogen.pos) < BOND
        if 1 < jump <= MAX_GAP + 1 and not bonded:
            sequence += ["UNK"] * (jump - 1)
        sequence.append(residue.name)
        seq_ids.append(len(sequence))
    return sequence, seq_ids
