"""Align pairs of sequences: compare maps with the best score, and thresholds at their exact values."""

from itertools import pairwise

import numpy as np
import pytest
from Bio.Align import substitution_matrices

from warpfold.data.similar.pairwise import column_map, identity, residue_codes, rost_identity, similar

LETTERS = "ARNDCQEGHILKMFPSTWYV"
BLOSUM62 = substitution_matrices.load("BLOSUM62")
# Residues, and others with a positive BLOSUM62 score, by which gapless alignments are the best.
CONSERVED = str.maketrans("DEIVKRFYSTNQHLMW", "EDVIRKYFTSDEYMLY")


def drawn(rng: np.random.Generator, length: int, letters: str = LETTERS) -> str:
    return "".join(rng.choice([*letters], length))


def score_pair(a: str, b: str, homologs: bool) -> int:
    if homologs:
        return int(BLOSUM62[a, b])
    return 2 if a == b else -3


def best_score(query: str, sequence: str, homologs: bool) -> float:
    """Compute the best score of a global alignment in which a gap costs an opening and every residue in it."""
    opening, extension = (10, 1) if homologs else (6, 1)
    best = np.full((3, len(query) + 1, len(sequence) + 1), -np.inf)
    best[0, 0, 0] = 0
    for i, j in list(np.ndindex(best.shape[1:]))[1:]:
        if i and j:
            best[0, i, j] = best[:, i - 1, j - 1].max() + score_pair(query[i - 1], sequence[j - 1], homologs)
        if i:
            best[1, i, j] = max(best[:, i - 1, j].max() - opening, best[1, i - 1, j]) - extension
        if j:
            best[2, i, j] = max(best[:, i, j - 1].max() - opening, best[2, i, j - 1]) - extension
    return float(best[:, -1, -1].max())


def map_score(query: str, sequence: str, column: np.ndarray, homologs: bool) -> int:
    """Compute the score of a map. Residues between two pairs form a gap in each sequence."""
    opening, extension = (10, 1) if homologs else (6, 1)
    placed = np.flatnonzero(column >= 0)
    total = sum(score_pair(query[column[i]], sequence[i], homologs) for i in placed)
    ends = [(-1, -1), *((int(column[i]), int(i)) for i in placed), (len(query), len(sequence))]
    for (a, b), (c, d) in pairwise(ends):
        total -= sum(opening + extension * gap for gap in (c - a - 1, d - b - 1) if gap)
    return total


@pytest.mark.parametrize("homologs", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_maps_have_the_best_score(seed: int, homologs: bool) -> None:
    rng = np.random.default_rng(seed)
    query = drawn(rng, 30)
    letters = [letter if rng.random() < 0.8 else drawn(rng, 1) for letter in query]
    for _ in range(2):
        at = int(rng.integers(1, len(letters) - 6))
        letters[at : at + int(rng.integers(0, 6))] = drawn(rng, int(rng.integers(0, 6)))
    sequence = "".join(letters)
    column, same = column_map(query, sequence, homologs)
    assert (len(column), column.dtype) == (len(sequence), np.int64)
    assert (np.diff(column[column >= 0]) > 0).all()
    assert map_score(query, sequence, column, homologs) == best_score(query, sequence, homologs)
    pairs = [(query[c], letter) for c, letter in zip(column, sequence) if c >= 0]
    assert same == pytest.approx(sum(a == b for a, b in pairs) / len(pairs))


TEN = "MKTAYIAKQR"


@pytest.mark.parametrize(
    ("query", "sequence", "column", "same"),
    [
        (TEN, TEN, [*range(10)], 1.0),
        ("GS" + TEN + "W", TEN, [*range(2, 12)], 1.0),
        (TEN, "GS" + TEN + "W", [-1, -1, *range(10), -1], 1.0),
        # Of two equal lengths, 90 % are enough, and X is not counted.
        (TEN, "WKTAYIAKQR", [*range(10)], 0.9),
        (TEN, "XXTAYIAKQR", [*range(10)], 1.0),
        (TEN + "XX", TEN[:8] + "XXWW", [*range(12)], 1.0),
        ("XXXX", "MKTA", [*range(4)], 0.0),
        # The first of several occurrences counts.
        ("MKTMKT", "MKT", [0, 1, 2], 1.0),
        ("MKT", "MKTMKT", [0, 1, 2, -1, -1, -1], 1.0),
    ],
)
def test_sequences_without_gaps(query: str, sequence: str, column: list[int], same: float) -> None:
    found, found_identity = column_map(query, sequence)
    assert (found.tolist(), found_identity) == (column, same)
    assert column_map(query, sequence, homologs=False)[0].tolist() == column


def test_equal_lengths_below_90_percent_are_aligned_with_gaps() -> None:
    """A shifted copy has the same length."""
    found, same = column_map(TEN + "GGSS", "GSGS" + TEN)
    assert found.tolist() == [-1, -1, -1, -1, *range(10)]
    assert same == 1.0
    assert column_map("MKTAYIAKQRW" * 2, "WKTAYIAKQRM" + "MKTAYIAKQRW")[0].tolist() == [*range(22)]


def test_identity_of_a_map() -> None:
    assert identity(np.array([0, 1, 2, -1, 3]), "AXCD", "ACDEX") == 0.5
    assert identity(np.array([3, -1]), "AXCD", "DD") == 1.0
    assert identity(np.array([-1]), "A", "A") == 0.0
    assert identity(np.array([0]), "X", "A") == 0.0


def test_letters_have_codes() -> None:
    assert residue_codes(LETTERS).tolist() == [*range(20)]
    assert residue_codes("BZUJOX*é-").tolist() == [3, 6, 4, 20, 20, 20, 20, 20, 20]
    assert residue_codes("").tolist() == []


def conserved(sequence: str, same: int) -> str:
    """Change all but the first `same` changeable letters to similar ones."""
    changed, kept = [], 0
    for letter in sequence:
        kept += letter != letter.translate(CONSERVED)
        changed.append(letter if kept <= same else letter.translate(CONSERVED))
    return "".join(changed)


def test_similar_from_exactly_the_minimum_identity() -> None:
    sequence = drawn(np.random.default_rng(0), 100, "DEIVKRFYSTNQHLMW")
    forty, half = conserved(sequence, 40), conserved(sequence, 50)
    assert similar(sequence, forty)
    assert similar(sequence, forty, 0.4)
    assert not similar(sequence, forty, 0.401)
    assert similar(sequence, half, 0.5)
    assert not similar(sequence, half, 0.501)
    # The identity is of the shorter chain, and aligned pairs must cover 0.8 of the longer one.
    assert similar(sequence + "G" * 25, forty)
    assert not similar(sequence + "G" * 26, forty)
    assert not similar(sequence, conserved(sequence, 39))


def test_short_chains_must_reach_rosts_curve() -> None:
    sequence = drawn(np.random.default_rng(1), 40, "DEIVKRFYSTNQHLMW")
    # 4.8 * 40 ** -0.6277 is 0.474.
    assert rost_identity(40) == pytest.approx(0.474, abs=5e-4)
    assert similar(sequence, conserved(sequence, 19))
    assert not similar(sequence, conserved(sequence, 18))


@pytest.mark.parametrize(
    ("length", "expected"),
    [(1, 1.0), (11, 1.0), (12, 0.98784), (13, 0.93955), (100, 0.28983), (450, 0.19537), (451, 0.195), (1000, 0.195)],
)
def test_rosts_curve(length: int, expected: float) -> None:
    assert rost_identity(length) == pytest.approx(expected, abs=1e-5)


def test_ambiguous_letters_are_their_residue_and_unknown_ones_are_equal_to_none() -> None:
    """B, Z and U count as D, E and C. X has a score of -1 with every letter."""
    sequence = "DECDECDECDECMKTAYIAKQR"
    assert similar(sequence, "BZUBZUBZUBZU" + sequence[12:], 1.0)
    assert not similar(sequence, "XZUBZUBZUBZU" + sequence[12:], 1.0)
    assert not similar("X" + sequence, "X" + sequence, 1.0)
    # A pair with X costs less than two gaps, so the aligned pairs cover all residues and not only 34 of 43.
    tail = "WCHWMFYWCHWMFYWCH"
    assert similar(tail + "X" * 9 + tail, tail + "M" * 9 + tail, 0.79)
