"""Clusters of similar chains, by which training weighs them (Supp. 1.2.5): made here, or read from a file.

Two chains are similar when their global alignment (BLOSUM62, gaps 10 + 1 per residue) has identical pairs for at least
0.4 of the shorter chain, and pairs for at least 0.8 of either.  The identity is CD-HIT's (`cd-hit -h`, option -c): over
aligned pairs alone, as in MMseqs2, chance would reach it by gaps.  The coverage is MMseqs2's (--cov-mode 0 -c 0.8, its
default for clusters; the PDB's files take -c 0.9: soedinglab/MMseqs2, issue 452).  Short chains, that reach 0.4 by
chance, must reach Rost's curve, as MMseqs2 asks for an E-value.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from math import exp
from pathlib import Path

import numpy as np

from warpfold.bulk import in_order
from warpfold.data.formats.alignment import LETTERS
from warpfold.data.formats.sequences import read_bytes
from warpfold.errors import UserError
from warpfold.geometry.residue import RESTYPE_3, UNKNOWN

COVERAGE = 0.8  # of either chain, by aligned pairs
TRIED = 20  # alignments per sequence: beyond the 20th candidate of the word search, a similar one is rare
BLOCK = 4096  # sequences compared at a time with the representatives of all blocks before
JOB = 512  # of them, per job of the executor
WORDS = ((0, 1, 2), (0, 1, 3))  # which residues make a word: contiguous, and spaced as in MMseqs2's prefilter
BAND = 8  # diagonals that are counted together; two neighbouring bands may hold a match, so gaps of 8 are borne


def cluster_sequences(sequences: Sequence[str], identity: float = 0.4, executor: Executor | None = None) -> list[int]:
    """For each sequence, the index of its cluster's representative (of equal sequences, the first).

    Greedy, as CD-HIT and MMseqs2's cluster mode 2: from the longest on, a sequence joins a representative that it is
    similar to (identity: the least share of identical aligned pairs, 0 to 1), or becomes one.  Candidates are the
    representatives that share most words on one diagonal.  The clusters depend on the set of sequences alone, not on
    their order or number of copies, nor on the executor.
    """
    first: dict[str, int] = {}
    for index, sequence in enumerate(sequences):
        first.setdefault(sequence, index)
    order = sorted(first, key=lambda sequence: (-len(sequence), sequence))
    representative: dict[str, str] = {}
    founders: list[str] = []  # longest first
    for start in range(0, len(order), BLOCK):
        block = order[start : start + BLOCK]
        near = [founder for founder in founders if len(founder) * COVERAGE <= len(block[0])]
        jobs = [(near, block[at : at + JOB], identity) for at in range(0, len(block), JOB)]
        found = [joined for job in in_order(_join, jobs, executor) for joined in job]
        alone = [sequence for sequence, joined in zip(block, found) if joined is None]
        representative |= {s: joined for s, joined in zip(block, found) if joined is not None}
        representative |= dict(zip(alone, _join_each_other(alone, identity)))
        founders += [sequence for sequence in alone if representative[sequence] == sequence]
    return [first[representative[sequence]] for sequence in sequences]


def read_clusters(path: Path | str, keys: Iterable[str], entities: Mapping[str, str] | None = None) -> dict[str, str]:
    """Key -> the name of its cluster (the first of its line), from a file, gz or not; keys that it lacks are left out.

    One cluster per line of blank-separated names, as the PDB's `clusters-by-entity-40.txt` and OpenFold's
    `all-seqs_clusters-40.txt`; or MMseqs2's TSV, a representative and a member per line.  Upper and lower case are
    one before the last "_": "1ABC_A" is the key "1abc_A".
    entities: the mmCIF entity of each key, "1abc_1", for a file of those; the naming that finds more keys counts.
    Errors: UserError for a file that cannot be read, puts a name into two clusters, or names none of the keys.
    """
    clusters: dict[str, str] = {}
    for number, line in enumerate(read_bytes(path).decode("utf-8", "replace").splitlines(), 1):
        for name in (names := line.split()):
            if clusters.setdefault(_plain(name), names[0]) != names[0]:
                raise UserError(f"{path}: line {number}: {name} is in two clusters; remove it from one")
    keys = list(keys)
    namings = [{key: _plain(key) for key in keys}, {key: _plain(name) for key, name in (entities or {}).items()}]
    found = [{key: clusters[names[key]] for key in keys if names.get(key) in clusters} for names in namings]
    if keys and not any(found):
        raise UserError(
            f"{path}: names none of the {len(keys)} chains; its names are like {next(iter(clusters))}, the chains' "
            f"like {keys[0]}; give a file with names like those, or none: clusters can be made here"
        )
    return max(found, key=len)


def _plain(name: str) -> str:
    """A name as it is looked up."""
    entry, mark, chain = name.rpartition("_")
    return entry.lower() + mark + chain


def similar(longer: str, shorter: str, identity: float = 0.4) -> bool:
    """Whether two sequences belong together, by identity (0 to 1) and coverage of their global alignment."""
    import gemmi

    blosum62 = gemmi.AlignmentScoring("b")  # which knows residues by the names of their components
    blosum62.mismatch = -1  # of the others, here X
    a, b = ([names[code] for code in _codes(s)] for names, s in zip((_NAMES, _OTHER_NAMES), (longer, shorter)))
    result = gemmi.align_string_sequences(a, b, [], blosum62)
    pairs = len(longer) + len(shorter) - len(result.match_string)
    wanted = max(identity, rost_identity(len(shorter))) * len(shorter)
    return pairs >= COVERAGE * len(longer) and result.match_count >= wanted


def rost_identity(length: int) -> float:
    """The share of identical residues over which alignments of this length are of homologues, 0 to 1.

    Source: B. Rost, Twilight zone of protein sequence alignments, Protein Eng. 12 (1999) 85-94, equation 2.
    """
    if length <= 11:
        return 1.0
    return 0.195 if length > 450 else 4.8 * length ** (-0.32 * (1 + exp(-length / 1000)))


def _join(job: tuple[list[str], list[str], float]) -> list[str | None]:
    """Of each of some sequences, the representative that it joins; none is shorter than a sequence."""
    founders, sequences, identity = job
    index = _WordIndex(founders)
    joined: list[str | None] = []
    for sequence in sequences:
        candidates = (founders[i] for i in index.nearest(sequence, len(founders))[:TRIED])
        joined.append(next((other for other in candidates if similar(other, sequence, identity)), None))
    return joined


def _join_each_other(sequences: Sequence[str], identity: float) -> list[str]:
    """The representative of each among these, the longest first."""
    index = _WordIndex(sequences)
    found: list[str] = []
    for number, sequence in enumerate(sequences):
        earlier = (sequences[i] for i in index.nearest(sequence, number) if found[i] == sequences[i])
        candidates = (other for _, other in zip(range(TRIED), earlier))
        found.append(next((other for other in candidates if similar(other, sequence, identity)), sequence))
    return found


class _WordIndex:
    """Where the words of some sequences, the longest first, stand: finds those that share words in line.

    All diagonals of all sequences lie one after another in bands, so that the words which a query shares with a
    sequence on neighbouring diagonals are counted together.  A word that many have (of tags) counts less.
    """

    def __init__(self, sequences: Sequence[str]) -> None:
        self.lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
        self.bands = np.cumsum(np.append(0, 2 * self.lengths // BAND + 2))  # each one's first band, and the end
        zero = self.bands[:-1] * BAND + self.lengths  # each one's main diagonal
        codes = [_codes(sequence) for sequence in sequences]
        self.tables = [self._table([_words(code, offsets) for code in codes], zero) for offsets in WORDS]

    @staticmethod
    def _table(
        words: Sequence[tuple[np.ndarray, np.ndarray]], zero: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Diagonals by word, where each word's begin, and what a word counts."""
        number = np.concatenate([np.empty(0, np.uint16), *(word for word, _ in words)])
        place = np.concatenate([np.empty(0, np.int64), *(at + start for (_, at), start in zip(words, zero))])
        counts = np.bincount(number, minlength=20**3)
        begins = np.append(0, np.cumsum(counts))
        return place[np.argsort(number, kind="stable")], begins, 1 / np.maximum(counts, counts.mean() + 1e-9)

    def nearest(self, sequence: str, count: int) -> np.ndarray:
        """Which of the first `count` sequences share words with this one, no longer than they: the most first.

        Those too long to be covered are left out.
        """
        if not count:
            return np.empty(0, np.int64)
        score = np.zeros(self.bands[count] + 1)
        code = _codes(sequence)
        for (places, begins, weight), offsets in zip(self.tables, WORDS):
            word, at = _words(code, offsets)
            many = begins[word + 1] - begins[word]
            ends = np.cumsum(many)
            hits = np.arange(many.sum()) + np.repeat(begins[word] - ends + many, many)
            bands = (places[hits] - np.repeat(at, many)) // BAND
            inside = bands < self.bands[count]  # the others are of sequences after the first `count`
            score += np.bincount(bands[inside], np.repeat(weight[word], many)[inside], len(score))
        best = np.maximum.reduceat(score[:-1] + score[1:], self.bands[:count])
        best[self.lengths[:count] * COVERAGE > len(sequence)] = 0
        return np.argsort(-best, kind="stable")[: np.count_nonzero(best)]


def _words(code: np.ndarray, offsets: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The words of a sequence, numbers below 20**3, and where they begin; none holds an X."""
    count = max(len(code) - offsets[-1], 0)
    letters = np.stack([code[offset : offset + count] for offset in offsets]).astype(np.uint16)
    place = np.flatnonzero((letters < UNKNOWN).all(0))
    return (np.array([400, 20, 1], np.uint16) @ letters)[place], place


def _codes(sequence: str) -> np.ndarray:
    """uint8 [N], 0 to 19, 20 for whatever is no amino acid."""
    return _LETTER_CODES[np.frombuffer(sequence.encode("ascii", "replace"), dtype=np.uint8)]


_NAMES, _OTHER_NAMES = RESTYPE_3, (*RESTYPE_3[:UNKNOWN], "unknown")  # an X equals nothing, no other X either
_LETTER_CODES = np.full(256, UNKNOWN, dtype=np.uint8)
_LETTER_CODES[[ord(letter) for letter in LETTERS]] = list(LETTERS.values())
