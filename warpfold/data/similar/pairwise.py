"""Align two sequences: map their residues, and decide whether they belong to one cluster."""

from math import exp

import numpy as np

from warpfold.data.formats.alignment import LETTERS
from warpfold.geometry.residue import RESTYPE_3, RESTYPES, UNKNOWN

# Sequences with a lower identity are different proteins (as for a realigned template: Supp. 1.2.3).
MIN_IDENTITY = 0.9
# Fraction of both chains that the aligned pairs of similar sequences must cover.
COVERAGE = 0.8
# gemmi's BLOSUM62 uses three-letter names.
_NAMES = dict(zip(RESTYPES, RESTYPE_3))
_SIMILAR = {letter: RESTYPE_3[code] for letter, code in LETTERS.items() if code != UNKNOWN}  # also B, Z and U
_CODES = np.full(256, UNKNOWN, np.uint8)
_CODES[[ord(letter) for letter in LETTERS]] = list(LETTERS.values())


def residue_codes(sequence: str) -> np.ndarray:
    """Encode a sequence as uint8 [N]: 0 to 19, and 20 for other letters."""
    return _CODES[np.frombuffer(sequence.encode("ascii", "replace"), dtype=np.uint8)]


def column_map(query: str, sequence: str, homologs: bool = False) -> tuple[np.ndarray, float]:
    """Align `sequence` to `query`. Returns the index in `query` of each residue, int64 [N], -1 for none, and identity.

    If one sequence contains the other, or if both have one length and are at least 90 % identical, they are aligned
    without gaps. Otherwise gemmi aligns them globally: as two versions of a protein, with few but long gaps, or with
    `homologs` by BLOSUM62 (gap cost 10 + 1 per residue). The identity, 0 to 1, is computed over the aligned residues
    without X.
    """
    column = np.full(len(sequence), -1)
    if (start := query.find(sequence)) >= 0:
        column[:] = np.arange(start, start + len(sequence))
    elif (start := sequence.find(query)) >= 0:
        column[start : start + len(query)] = np.arange(len(query))
    elif len(query) == len(sequence) and identity(np.arange(len(query)), query, sequence) >= MIN_IDENTITY:
        column[:] = np.arange(len(query))
    else:
        import gemmi

        scoring = gemmi.AlignmentScoring("b" if homologs else "s")
        if not homologs:
            scoring.match, scoring.mismatch, scoring.gapo, scoring.gape = 2, -3, -6, -1
        query_names, names = ([_NAMES.get(letter, letter) for letter in letters] for letters in (query, sequence))
        result = gemmi.align_string_sequences(query_names, names, [], scoring)
        gapped_query, gapped = result.add_gaps(query, 1), result.add_gaps(sequence, 2)
        columns = np.cumsum([letter != "-" for letter in gapped_query]) - 1
        column = np.array([c if q != "-" else -1 for q, s, c in zip(gapped_query, gapped, columns) if s != "-"])
    return column, identity(column, query, sequence)


def identity(column: np.ndarray, query: str, sequence: str) -> float:
    """Compute the fraction of equal residues among the aligned residues (`column`: see `column_map`) without X."""
    pairs = [(query[c], s) for c, s in zip(column, sequence) if c >= 0]
    is_equal = [a == b for a, b in pairs if "X" not in (a, b)]
    return sum(is_equal) / len(is_equal) if is_equal else 0.0


def similar(longer: str, shorter: str, min_identity: float = 0.4) -> bool:
    """Return whether two sequences are similar in identity and coverage; `clusters.py` has the definition."""
    import gemmi

    blosum62 = gemmi.AlignmentScoring("b")
    # This score is used for names that the matrix lacks, here those of X.
    blosum62.mismatch = -1
    # X has a different name in each sequence, so that it never equals another X.
    long_names = [_SIMILAR.get(letter, "UNK") for letter in longer]
    short_names = [_SIMILAR.get(letter, "unknown") for letter in shorter]
    result = gemmi.align_string_sequences(long_names, short_names, [], blosum62)
    pairs = len(longer) + len(shorter) - len(result.match_string)
    min_matches = max(min_identity, rost_identity(len(shorter))) * len(shorter)
    return pairs >= COVERAGE * len(longer) and result.match_count >= min_matches


def rost_identity(length: int) -> float:
    """Compute the identity, 0 to 1, above which sequences with an alignment of this length are homologous.

    Source: B. Rost, Twilight zone of protein sequence alignments, Protein Eng. 12 (1999) 85-94, equation 2.
    """
    if length <= 11:
        return 1.0
    return 0.195 if length > 450 else 4.8 * length ** (-0.32 * (1 + exp(-length / 1000)))
