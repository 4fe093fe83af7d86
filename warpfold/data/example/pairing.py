"""Pairing: which alignment rows of different chains belong to one organism (AlphaFold-Multimer, sec. 2.4)."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Pairing:
    """What pairing needs to know about the R rows of a chain's alignment, so that the rows themselves need not be read.

    Row 0, the chain's own, is paired with row 0 of every other chain, whatever its species.
    """

    species: np.ndarray  # uint64 [R], a hash of the organism's name; 0: unknown, such a row is never paired
    identity: np.ndarray  # float32 [R], the share of the chain's residues that the row has too
    digest: np.ndarray  # uint64 [R], a hash of the row's letters: equal rows have equal ones
    unpaired: np.ndarray  # bool [R], the row also stands alone, below the pairs; False: it serves pairing alone
