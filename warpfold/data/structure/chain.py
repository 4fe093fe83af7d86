"""Define structures and chains: atom37 positions on the SEQRES sequence, with the metadata of the entry.

The readers (`mmcif.py`, `pdb.py`) build them. This module does not import gemmi.
"""

import re
from dataclasses import dataclass, field
from datetime import date

import numpy as np

from warpfold.data.structure.assemblies import AssemblyTable, PlacedChains
from warpfold.errors import UserError, listed

# A week is not a day, but `fromisoformat` would take its Monday.
_WEEK = re.compile(r"\d{4}-?W\d{2}", re.ASCII)
# The mmCIF dictionary allows dates without leading zeros, such as 2017-7-26.
_PLAIN = re.compile(r"(\d{4})-(\d{1,2})-(\d{1,2})", re.ASCII)


@dataclass(frozen=True)
class Chain:
    """A protein chain with all N residues of its SEQRES and the observed atoms.

    id: the author's chain name. sequence: one letter per residue; a modified residue has its parent's letter, or X if
    it has no parent. positions: angstrom, 0 where masked. mask: 1 for observed atoms. residue_index: index in SEQRES
    from 0. author_numbers: the author's residue number and insertion code ("52", "52A"), "" where the file has none.
    entity: the mmCIF entity, by which the PDB's cluster files name chains ("1abc_1"). b_factors: the B factor of each
    residue's CA, NaN if the CA is missing; None if the reader has no B factors.
    """

    id: str
    sequence: str
    positions: np.ndarray  # float32 [N, 37, 3]
    mask: np.ndarray  # float32 [N, 37]
    residue_index: np.ndarray  # int64 [N]
    author_numbers: tuple[str, ...]
    entity: str = ""
    b_factors: np.ndarray | None = None  # float32 [N]


@dataclass(frozen=True)
class Structure:
    """An entry and its protein chains.

    method: experimental method in upper case, as in the mmCIF dictionary. resolution: angstrom. chains: by author name.
    dropped: the reason for each dropped polymer, by chain name. unplaced: residues with N, CA and C that are in no
    chain, as "ALA 12". notes: sentences for the user about non-obvious decisions of the reader.
    """

    id: str
    method: str | None
    resolution: float | None
    release_date: date | None
    chains: dict[str, Chain]
    dropped: dict[str, str] = field(default_factory=dict)
    assemblies: AssemblyTable = field(default_factory=AssemblyTable)
    unplaced: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def unplaced_note(self) -> str:
        """Return a note that counts the `unplaced` residues, or "" if there are none."""
        if not self.unplaced:
            return ""
        return f"residues with N, CA and C that are in no chain: {len(self.unplaced)} ({listed(self.unplaced, 4)})"

    def check_placed(self, source: str, remedy: str = "correct the file") -> None:
        """Raise a UserError if residues of the file are in no chain."""
        if self.unplaced:
            raise UserError(f"{source}: has {self.unplaced_note}; {remedy}")

    def assembly(self, name: str | None = None) -> PlacedChains:
        """List the placed protein chains of a biological assembly, by default of the first one.

        A file without assemblies has one, "1", which contains all chains unmoved.
        Raises the errors of `AssemblyTable.place`.
        """
        return self.assemblies.place(name or self.assemblies.ids[0], self.chains, self.dropped)


def normal_entry_id(text: str) -> str:
    """Normalise an entry id: PDB ids become four characters in lower case, also those written as pdb_00001abc.

    Extended PDB ids without a short form become lower case. Ids of other archives are returned unchanged.
    """
    extended = re.fullmatch(r"pdb_([0-9]{4})([0-9][a-z0-9]{3})", text.lower())
    if extended:
        return extended[2] if extended[1] == "0000" else extended[0]
    return text.lower() if len(text) == 4 else text


def parse_date(text: str | None) -> date | None:
    """Parse a date from a file; returns None for any other text.

    Accepts the ISO 8601 forms 2017-07-26, 20170726, 2017-W30-3 and 2017W303, and the mmCIF form without leading zeros,
    2017-7-26. Compare dates as `datetime.date`, never as text, because a day has several spellings.
    """
    text = (text or "").strip()
    if _WEEK.fullmatch(text):
        return None
    plain = _PLAIN.fullmatch(text)
    try:
        return date(*map(int, plain.groups())) if plain else date.fromisoformat(text)
    except ValueError:
        return None


def parse_date_option(text: str | None, option: str) -> date | None:
    """Parse a date that the user passed as `option`; None stays None. Raises UserError if it is not a date."""
    day = parse_date(text)
    if text is not None and day is None:
        raise UserError(f"{option} {text}: is not a date. Write it as YYYY-MM-DD, for example 2018-04-30.")
    return day
