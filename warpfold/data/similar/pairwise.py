"""Two sequences put on each other: where each residue of one stands in the other."""

import numpy as np

from warpfold.geometry.residue import RESTYPE_3, RESTYPES

_NAMES = dict(zip(RESTYPES, RESTYPE_3))  # as gemmi's BLOSUM62 has them
MIN_IDENTITY = 0.9  # below it two sequences are not one protein (a template's realignment: Supp. 1.2.3)


def column_map(query: str, sequence: str, homologs: bool = False) -> tuple[np.ndarray, float]:
    """Where each residue of `sequence` stands in `query`: int64 [N], -1 where nowhere; and the identity, 0 to 1.

    A part or a whole of the other is placed without gaps; so is a variant of the same length; otherwise a global
    alignment (gemmi) decides: of one protein in two versions, with few gaps and long ones, or of `homologs`, by
    BLOSUM62 (gaps 10 + 1 a residue).  Identity is over the residues that are placed, X left out.
    """
    column = np.full(len(sequence), -1)
    if (start := query.find(sequence)) >= 0:
        column[:] = np.arange(start, start + len(sequence))
    elif (start := sequence.find(query)) >= 0:
        column[start : start + len(query)] = np.arange(len(query))
    elif len(query) == len(sequence) and identity(np.arange(len(query)), query, sequence) >= MIN_IDENTITY:
        column[:] = np.arange(len(query))
    else:
        column = _aligned_columns(query, sequence, homologs)
    return column, identity(column, query, sequence)


def identity(column: np.ndarray, query: str, sequence: str) -> float:
    """The share of equal residues among those that `column` (int64 [N], as of `column_map`) places, X left out."""
    pairs = [(query[c], s) for c, s in zip(column, sequence) if c >= 0]
    known = [a == b for a, b in pairs if "X" not in (a, b)]
    return sum(known) / len(known) if known else 0.0


def _aligned_columns(query: str, sequence: str, homologs: bool) -> np.ndarray:
    import gemmi

    scoring = gemmi.AlignmentScoring("b" if homologs else "s")
    if not homologs:
        scoring.match, scoring.mismatch, scoring.gapo, scoring.gape = 2, -3, -6, -1
    one, other = ([_NAMES.get(letter, letter) for letter in letters] for letters in (query, sequence))
    result = gemmi.align_string_sequences(one, other, [], scoring)
    columns = np.cumsum([letter != "-" for letter in result.add_gaps(query, 1)]) - 1
    gapped = zip(result.add_gaps(query, 1), result.add_gaps(sequence, 2), columns)
    return np.array([column if q != "-" else -1 for q, s, column in gapped if s != "-"])
