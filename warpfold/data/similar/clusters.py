"""Clusters of similar chains, by which training weighs them (Supp. 1.2.5): made here, or read from a file.

Two chains are similar if their global alignment (BLOSUM62, gaps 10 + 1 per residue) has identical pairs for at least
0.4 of the shorter chain, and pairs for at least 0.8 of either.  The identity is CD-HIT's (`cd-hit -h`, option -c):
MMseqs2 takes it over the aligned pairs alone, which random sequences reach if the alignment has enough gaps.  The
coverage is MMseqs2's default for clusters (--cov-mode 0 -c 0.8; the PDB's files take -c 0.9: soedinglab/MMseqs2, issue
452).  Short chains reach 0.4 by chance, so they must also reach Rost's curve, where MMseqs2 asks for an E-value.

Up to `MOST_HERE` different sequences clusters are made here, in a time that grows nearly with their square.  More are
handed to MMseqs2, with the same definitions as far as it has them.  Which of the two it is follows from the sequences
alone, never from what is installed, so that the same sequences have the same clusters on every machine.
"""

import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from itertools import islice
from pathlib import Path

import numpy as np

from warpfold.bulk import in_order, run_program
from warpfold.data.formats.alignment import LETTERS
from warpfold.data.similar.pairwise import COVERAGE, similar
from warpfold.errors import UserError
from warpfold.files import read_file, writing
from warpfold.geometry.residue import UNKNOWN

MOST_HERE = 30_000  # different sequences; some four minutes of one core (docs/reference/formats.md)
# Identity as CD-HIT takes it, over the shorter chain; the longest of a cluster stands for it.  Members that the cascade
# has joined by way of others are compared with their representative again.  The index is not split to fit into memory:
# what is found depends on the pieces.
MMSEQS = (
    *("--seq-id-mode", "1", "-c", str(COVERAGE), "--cov-mode", "0", "--alignment-mode", "3"),
    *("--cluster-mode", "2", "--cluster-reassign", "1", "--split", "1"),
)
TRIED = 20  # candidates aligned per sequence: later candidates of the word search are rarely similar
BLOCK = 4096  # sequences compared at a time with the representatives of all earlier blocks
JOB = 512  # of these, per job of the executor
WORDS = ((0, 1, 2), (0, 1, 3))  # which residues make a word: contiguous, and spaced as in MMseqs2's prefilter
BAND = 8  # diagonals counted together; a match may lie in two neighbouring bands, so gaps of up to 8 are tolerated
_LETTER_CODES = np.full(256, UNKNOWN, dtype=np.uint8)
_LETTER_CODES[[ord(letter) for letter in LETTERS]] = list(LETTERS.values())


def cluster_sequences(
    sequences: Sequence[str],
    min_identity: float = 0.4,
    executor: Executor | None = None,
    threads: int = 1,
    program: str | None = None,
) -> list[int]:
    """Return the index of each sequence's cluster representative (of equal sequences, the first).

    Greedy, as CD-HIT and MMseqs2's cluster mode 2: from the longest on, a sequence joins a representative that it is
    similar to (min_identity: share of identical aligned pairs, 0 to 1), or becomes one.  Candidates are the
    representatives that share most words on one diagonal.  Many sequences are clustered by MMseqs2 (`clustered_by`).
    The clusters depend on the set of sequences alone: not on their order, the number of copies, the executor, or the
    threads (of MMseqs2).  program: what `clustered_by` has returned, where it was asked before.
    Errors: UserError as of `clustered_by`, and if MMseqs2 fails or does not say of each sequence where it belongs.
    """
    first: dict[str, int] = {}
    for index, sequence in enumerate(sequences):
        first.setdefault(sequence, index)
    order = sorted(first, key=lambda sequence: (-len(sequence), sequence))
    if clustered_by(sequences) if program is None else program:
        by_mmseqs = dict(zip(order, _join_by_mmseqs(order, min_identity, threads)))
        return [first[order[by_mmseqs[sequence]]] for sequence in sequences]
    representative: dict[str, str] = {}
    founders: list[str] = []  # longest first
    for start in range(0, len(order), BLOCK):
        block = order[start : start + BLOCK]
        near = [founder for founder in founders if len(founder) * COVERAGE <= len(block[0])]
        jobs = [(near, block[at : at + JOB], min_identity) for at in range(0, len(block), JOB)]
        found = [joined for job in in_order(_join, jobs, executor) for joined in job]
        alone = [sequence for sequence, joined in zip(block, found) if joined is None]
        representative |= {s: joined for s, joined in zip(block, found) if joined is not None}
        representative |= dict(zip(alone, _join_each_other(alone, min_identity)))
        founders += [sequence for sequence in alone if representative[sequence] == sequence]
    return [first[representative[sequence]] for sequence in sequences]


def clustered_by(sequences: Iterable[str]) -> str:
    """Return the program that clusters these sequences, with its version; "" if that is this module.

    Errors: UserError if MMseqs2 is needed and not installed.
    """
    if (count := len(set(sequences))) <= MOST_HERE:
        return ""
    if shutil.which("mmseqs") is None:
        raise UserError(
            f"clusters of {count:,} sequences: more than {MOST_HERE:,} need MMseqs2, and `mmseqs` is not on PATH. "
            "Install it (apt install mmseqs2, or conda install -c bioconda mmseqs2), give a file of --clusters, or "
            "make clusters of equal sequences alone (--cluster-identity 1)"
        )
    return f"MMseqs2 {run_program(['mmseqs', 'version']).strip()}"


def read_clusters(path: Path | str, keys: Iterable[str], entities: Mapping[str, str] | None = None) -> dict[str, str]:
    """Read the name of each key's cluster (the first of its line) from a file, gz or not; unknown keys are left out.

    The file has one cluster per line of blank-separated names, as the PDB's `clusters-by-entity-40.txt` and OpenFold's
    `all-seqs_clusters-40.txt`; or is MMseqs2's TSV, a representative and a member per line.  Case is ignored before
    the last "_": "1ABC_A" is the key "1abc_A".
    entities: the mmCIF entity of each key, "1abc_1", for a file that names entities; the naming that finds more counts.
    Errors: UserError for a file that cannot be read, puts a name into two clusters, or names none of the keys.
    """

    def plain(name: str) -> str:
        entry, mark, chain = name.rpartition("_")
        return entry.lower() + mark + chain

    clusters: dict[str, str] = {}
    for number, line in enumerate(read_file(path).decode("utf-8", "replace").splitlines(), 1):
        for name in (names := line.split()):
            if clusters.setdefault(plain(name), names[0]) != names[0]:
                raise UserError(f"{path}: line {number}: {name} is in two clusters. Remove it from one")
    keys = list(keys)
    namings = [{key: plain(key) for key in keys}, {key: plain(name) for key, name in (entities or {}).items()}]
    found = [{key: clusters[names[key]] for key in keys if names.get(key) in clusters} for names in namings]
    if keys and not any(found):
        one = next(iter(clusters), "none")
        raise UserError(
            f"{path}: names none of the {len(keys)} chains; its names are like {one}, the chains' like {keys[0]}. "
            "Pass a file with names like those, or none: clusters can be made here"
        )
    return max(found, key=len)


def _join_by_mmseqs(sequences: Sequence[str], min_identity: float, threads: int) -> list[int]:
    """Return which of these different sequences represents each, by `mmseqs cluster`; its result follows from the
    order in which they are given, here the longest first.  How many threads it has does not matter."""
    with tempfile.TemporaryDirectory(prefix="warpfold-mmseqs-") as folder:
        fasta, database, clusters, table = (
            str(Path(folder, name)) for name in ("fasta", "database", "clusters", "tsv")
        )
        with writing(Path(folder)), open(fasta, "w", encoding="ascii", errors="replace") as file:
            file.writelines(f">{number}\n{letters}\n" for number, letters in enumerate(sequences))
        try:
            run_program(["mmseqs", "createdb", fasta, database, "--dbtype", "1", "--shuffle", "0", "-v", "1"])
            command = ["mmseqs", "cluster", database, clusters, str(Path(folder, "work")), *MMSEQS]
            run_program([*command, "--min-seq-id", str(min_identity), "--threads", str(threads), "-v", "1"])
            run_program(["mmseqs", "createtsv", database, database, clusters, table, "-v", "1"])
            lines = Path(table).read_text(encoding="utf-8", errors="replace").splitlines()
        except UserError as error:
            free = shutil.disk_usage(folder).free / 1e9
            raise UserError(
                f"{error}. It needs memory, and room in {tempfile.gettempdir()} ({free:.1f} GB are free): set TMPDIR "
                "to a folder with more, and repeat the command"
            ) from None
    joined = [-1] * len(sequences)
    try:
        for line in lines:
            leader, member = map(int, line.split("\t"))
            joined[member] = leader
        whole = len(lines) == len(joined) and all(leader >= 0 and joined[leader] == leader for leader in joined)
    except (ValueError, IndexError):
        whole = False
    if not whole:
        raise UserError(
            "`mmseqs cluster`: its table does not put each sequence into one cluster. Install another version of "
            "MMseqs2 (14 works), or give a file of --clusters"
        )
    return joined


def _join(job: tuple[list[str], list[str], float]) -> list[str | None]:
    """Return the representative that each sequence joins, if any; all representatives are at least as long."""
    founders, sequences, min_identity = job
    index = _WordIndex(founders)
    joined: list[str | None] = []
    for sequence in sequences:
        candidates = (founders[i] for i in index.nearest(sequence, len(founders)))
        joined.append(_first_similar(candidates, sequence, min_identity))
    return joined


def _join_each_other(sequences: Sequence[str], min_identity: float) -> list[str]:
    """Return the representative of each sequence among these, which come longest first."""
    index = _WordIndex(sequences)
    found: list[str] = []
    for number, sequence in enumerate(sequences):
        candidates = (sequences[i] for i in index.nearest(sequence, number) if found[i] == sequences[i])
        found.append(_first_similar(candidates, sequence, min_identity) or sequence)
    return found


def _first_similar(candidates: Iterable[str], sequence: str, min_identity: float) -> str | None:
    return next((other for other in islice(candidates, TRIED) if similar(other, sequence, min_identity)), None)


class _WordIndex:
    """An index of the words of some sequences, longest first, to find those that share words on one diagonal.

    All diagonals of all sequences are numbered one after another and grouped into bands, so that one `bincount` adds
    up the words that a query shares with each sequence on neighbouring diagonals.  Frequent words (tags) count less.
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
        """Return the diagonals sorted by word, where each word's begin, and each word's weight."""
        number = np.concatenate([np.empty(0, np.uint16), *(word for word, _ in words)])
        place = np.concatenate([np.empty(0, np.int64), *(at + start for (_, at), start in zip(words, zero))])
        counts = np.bincount(number, minlength=20**3)
        begins = np.append(0, np.cumsum(counts))
        return place[np.argsort(number, kind="stable")], begins, 1 / np.maximum(counts, counts.mean() + 1e-9)

    def nearest(self, sequence: str, count: int) -> np.ndarray:
        """Return which of the first `count` sequences share words with this one, those that share most first.

        `sequence` is no longer than any of them.  Those too long for it to cover are left out.
        """
        if not count:
            return np.empty(0, np.int64)
        score = np.zeros(self.bands[count] + 1)
        code = _codes(sequence)
        for (places, begins, weight), offsets in zip(self.tables, WORDS):
            word, at = _words(code, offsets)
            many = begins[word + 1] - begins[word]
            ends = np.cumsum(many)
            # The slices [begins, begins + many) of all words as one array of indices, without a loop.
            hits = np.arange(many.sum()) + np.repeat(begins[word] - ends + many, many)
            bands = (places[hits] - np.repeat(at, many)) // BAND
            inside = bands < self.bands[count]  # the others belong to sequences after the first `count`
            score += np.bincount(bands[inside], np.repeat(weight[word], many)[inside], len(score))
        # The best pair of neighbouring bands of each sequence: a match may cross from one band to the next.
        best = np.maximum.reduceat(score[:-1] + score[1:], self.bands[:count])
        best[self.lengths[:count] * COVERAGE > len(sequence)] = 0
        return np.argsort(-best, kind="stable")[: np.count_nonzero(best)]


def _words(code: np.ndarray, offsets: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return the words of a sequence, as numbers below 20**3, and where each begins; words with an X are left out."""
    count = max(len(code) - offsets[-1], 0)
    letters = np.stack([code[offset : offset + count] for offset in offsets]).astype(np.uint16)
    place = np.flatnonzero((letters < UNKNOWN).all(0))
    return (np.array([400, 20, 1], np.uint16) @ letters)[place], place


def _codes(sequence: str) -> np.ndarray:
    """Return uint8 [N], 0 to 19, and 20 for everything else."""
    return _LETTER_CODES[np.frombuffer(sequence.encode("ascii", "replace"), dtype=np.uint8)]
