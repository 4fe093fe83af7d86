"""Align two sequences: which residues correspond, and whether the sequences belong to one cluster."""

from math import exp

import numpy as np

from warpfold.data.formats.alignment import LETTERS
from warpfold.geometry.residue import RESTYPE_3, RESTYPES, UNKNOWN

MIN_IDENTITY = 0.9  # below it two sequences are different proteins (a template's realignment: Supp. 1.2.3)
COVERAGE = 0.8  # share of either chain that the aligned pairs of similar sequences cover
_NAMES = dict(zip(RESTYPES, RESTYPE_3))  # gemmi's BLOSUM62 knows residues by their three letters
_SIMILAR = {letter: RESTYPE_3[code] for letter, code in LETTERS.items() if code != UNKNOWN}  # B, Z and U too


def column_map(query: str, sequence: str, homologs: bool = False) -> tuple[np.ndarray, float]:
    """Return where each residue of `sequence` stands in `query`, int64 [N], -1 for nowhere, and the identity, 0 to 1.

    If one sequence contains the other, or both have one length and are alike, they are aligned without gaps.  Else
    gemmi aligns them globally: as two versions of one protein, with few but long gaps, or as `homologs`, by BLOSUM62
    (a gap costs 10, and 1 per residue).  The identity is taken over the aligned residues, X left out.
    """
    column = np.full(len(sequence), -1)
    if (start := query.find(sequence)) >= 0:
        column[:] = np.arange(start, start + len(sequence))
    elif (start := sequence.find(query)) >= 0:
        column[start : start + len(query)] = np.arange(len(query))
    elif len(query) == len(sequence) and identity(np.arange(len(query)), query, sequence) >= MIN_IDENTITY:
        column[:] = np.arange(len(query))
    else:
        column = _align(query, sequence, homologs)
    return column, identity(column, query, sequence)


def identity(column: np.ndarray, query: str, sequence: str) -> float:
    """Return the share of equal residues among those that `column` (see `column_map`) aligns, X left out."""
    pairs = [(query[c], s) for c, s in zip(column, sequence) if c >= 0]
    known = [a == b for a, b in pairs if "X" not in (a, b)]
    return sum(known) / len(known) if known else 0.0


def _align(query: str, sequence: str, homologs: bool) -> np.ndarray:
    import gemmi

    scoring = gemmi.AlignmentScoring("b" if homologs else "s")
    if not homologs:
        scoring.match, scoring.mismatch, scoring.gapo, scoring.gape = 2, -3, -6, -1
    one, other = ([_NAMES.get(letter, letter) for letter in letters] for letters in (query, sequence))
    result = gemmi.align_string_sequences(one, other, [], scoring)
    columns = np.cumsum([letter != "-" for letter in result.add_gaps(query, 1)]) - 1
    gapped = zip(result.add_gaps(query, 1), result.add_gaps(sequence, 2), columns)
    return np.array([column if q != "-" else -1 for q, s, column in gapped if s != "-"])


def similar(longer: str, shorter: str, min_identity: float = 0.4) -> bool:
    """Return whether two sequences belong to one cluster, by identity and coverage of their global alignment.

    `clusters.py` says what counts as similar, and why.
    """
    import gemmi

    blosum62 = gemmi.AlignmentScoring("b")
    blosum62.mismatch = -1  # for names that the matrix lacks, here those of X
    # X gets another name in each sequence, so that it equals nothing, not even another X.
    one, other = ([_SIMILAR.get(x, unknown) for x in s] for s, unknown in ((longer, "UNK"), (shorter, "unknown")))
    result = gemmi.align_string_sequences(one, other, [], blosum62)
    pairs = len(longer) + len(shorter) - len(result.match_string)
    wanted = max(min_identity, rost_identity(len(shorter))) * len(shorter)
    return pairs >= COVERAGE * len(longer) and result.match_count >= wanted


def rost_identity(length: int) -> float:
    """Return the identity, 0 to 1, above which alignments of this length are between homologues.

    Source: B. Rost, Twilight zone of protein sequence alignments, Protein Eng. 12 (1999) 85-94, equation 2.
    """
    if length <= 11:
        return 1.0
    return 0.195 if length > 450 else 4.8 * length ** (-0.32 * (1 + exp(-length / 1000)))
