"""Structures in: mmCIF and PDB files -> chains of atom37 positions on their SEQRES (Supp. 1.2.1)."""

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Chain:
    """One protein chain on its SEQRES: what was in the crystal, and of that what was seen.

    `sequence` one letter per residue, modified residues as their parent, X where there is none; `author_numbers`
    the number and insertion code that the authors gave ("52", "52A"), "" where the file has none.
    """

    id: str  # the author's chain name
    sequence: str
    positions: np.ndarray  # float32 [N, 37, 3], angstrom, 0 where masked
    mask: np.ndarray  # float32 [N, 37], 1 where the atom was seen
    residue_index: np.ndarray  # int64 [N], place in SEQRES from 0
    author_numbers: tuple[str, ...]


@dataclass(frozen=True)
class Structure:
    """One entry: its protein chains by author name, and why other chains were dropped."""

    id: str
    method: str | None
    resolution: float | None  # angstrom
    release_date: str | None  # YYYY-MM-DD
    chains: dict[str, Chain]
    dropped: dict[str, str] = field(default_factory=dict)  # chain name -> reason
