"""What a structure file holds: chains of atom37 positions on their SEQRES, and the entry's release date.

Readers (`mmcif.py`, `pdb.py`) make these; nothing here needs gemmi.
"""

import re
from dataclasses import dataclass, field
from datetime import date

import numpy as np

from warpfold.data.structure.assemblies import AssemblyTable, PlacedChains
from warpfold.errors import UserError, listed

_WEEK = re.compile(r"\d{4}-?W\d{2}", re.ASCII)  # a week is not a day, but `fromisoformat` would take its Monday
_PLAIN = re.compile(r"(\d{4})-(\d{1,2})-(\d{1,2})", re.ASCII)  # mmCIF's dictionary allows 2017-7-26


@dataclass(frozen=True)
class Chain:
    """One protein chain on its SEQRES: all residues that are in the sample, and the atoms that were seen.

    `sequence` has one letter per residue: modified residues as their parent, X without one.
    `author_numbers` are the authors' residue number and insertion code ("52", "52A"), "" where the file has none.
    """

    id: str  # the author's chain name
    sequence: str
    positions: np.ndarray  # float32 [N, 37, 3], angstrom, 0 where masked
    mask: np.ndarray  # float32 [N, 37], 1 where the atom was seen
    residue_index: np.ndarray  # int64 [N], place in SEQRES from 0
    author_numbers: tuple[str, ...]
    entity: str = ""  # mmCIF's, by which the PDB's files of clusters name chains ("1abc_1")
    b_factors: np.ndarray | None = None  # float32 [N], the B column of each residue's CA, NaN without; None: not read


@dataclass(frozen=True)
class Structure:
    """One entry: its protein chains by author name, and why its other polymers were dropped."""

    id: str
    method: str | None  # upper case, as the dictionary has it
    resolution: float | None  # angstrom
    release_date: date | None
    chains: dict[str, Chain]
    dropped: dict[str, str] = field(default_factory=dict)  # chain name -> reason
    assemblies: AssemblyTable = field(default_factory=AssemblyTable)
    unplaced: tuple[str, ...] = ()  # residues with N, CA and C that are in no chain, as "ALA 12"
    notes: tuple[str, ...] = ()  # how the file was read, where that is not plain, a sentence each

    @property
    def unplaced_note(self) -> str:
        """Return a note on `unplaced` with its count, "" if there are none."""
        if not self.unplaced:
            return ""
        return f"residues with N, CA and C that are in no chain: {len(self.unplaced)} ({listed(self.unplaced, 4)})"

    def check_placed(self, source: str, remedy: str = "correct the file") -> None:
        """Raise a UserError if residues of the file are in no chain."""
        if self.unplaced:
            raise UserError(f"{source}: has {self.unplaced_note}; {remedy}")

    def assembly(self, name: str | None = None) -> PlacedChains:
        """Return the protein chains of a biological assembly, by default the file's first, and where they stand in it.

        A file that says nothing of assemblies has one, "1", of all its chains as they are.
        Errors: as in `AssemblyTable.place`.
        """
        return self.assemblies.place(name or self.assemblies.ids[0], self.chains, self.dropped)


def normal_entry_id(text: str) -> str:
    """Return the one spelling of an entry's id: four letters in lower case where it is a PDB id, also for pdb_00001abc.

    Ids of 12 characters that have no short form, and ids of other archives, stay as they are, PDB's in lower case.
    """
    extended = re.fullmatch(r"pdb_([0-9]{4})([0-9][a-z0-9]{3})", text.lower())
    if extended:
        return extended[2] if extended[1] == "0000" else extended[0]
    return text.lower() if len(text) == 4 else text


def parse_date(text: str | None) -> date | None:
    """Return the day that `text` names, or None if it names none.

    Accepts ISO 8601's spellings, 2017-07-26, 20170726, 2017-W30-3 and 2017W303, and mmCIF's without leading zeros,
    2017-7-26.  Meant for dates in files, which may hold anything.  Dates are compared as `datetime.date`, never as
    text, since one day has several spellings.
    """
    text = (text or "").strip()
    if _WEEK.fullmatch(text):
        return None
    plain = _PLAIN.fullmatch(text)
    try:
        return date(*map(int, plain.groups())) if plain else date.fromisoformat(text)
    except ValueError:
        return None


def given_date(text: str | None, option: str) -> date | None:
    """Return the day that a user gave, None for None.  Errors: UserError, naming `option`, if it is not a date."""
    day = parse_date(text)
    if text is not None and day is None:
        raise UserError(f"{option} {text}: is not a date; write it as YYYY-MM-DD, for example 2018-04-30")
    return day
