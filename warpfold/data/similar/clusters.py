"""Cluster similar chains, or read clusters from a file. Training weights chains by cluster size (Supp. 1.2.5).

Two chains are similar if their global alignment (BLOSUM62, gap cost 10 + 1 per residue) has identical pairs for at
least 0.4 of the shorter chain, and aligned pairs for at least 0.8 of both. The identity is defined as in CD-HIT
(`cd-hit -h`, option -c). MMseqs2 by default computes it over the aligned pairs, and random sequences can reach that
value if the alignment has enough gaps. The coverage is MMseqs2's default for clusters (--cov-mode 0 -c 0.8; the PDB's
files use -c 0.9: soedinglab/MMseqs2, issue 452). Short chains reach 0.4 by chance, so they must also reach Rost's
curve, where MMseqs2 uses an E-value.

This module clusters up to `MAX_SEQUENCES` unique sequences itself, in nearly quadratic time. More sequences are
clustered by MMseqs2 with the same definitions as far as possible. The choice depends only on the sequences, not on the
installed programs, so that the same sequences have the same clusters on every machine.
"""

import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from itertools import islice
from pathlib import Path

import numpy as np

from warpfold.bulk import in_order, run_program
from warpfold.data.similar.pairwise import COVERAGE, residue_codes, similar
from warpfold.errors import UserError
from warpfold.files import read_file, writing
from warpfold.geometry.residue import UNKNOWN

# Unique sequences that are clustered without MMseqs2. This takes about four minutes on one core
# (docs/reference/formats.md).
MAX_SEQUENCES = 30_000
# Identity over the shorter chain, as in CD-HIT. The longest member represents a cluster. Members that the cascade has
# assigned indirectly are compared with their representative again. The index is not split to fit into memory, because
# the result would depend on the splits.
MMSEQS = (
    *("--seq-id-mode", "1", "-c", str(COVERAGE), "--cov-mode", "0", "--alignment-mode", "3"),
    *("--cluster-mode", "2", "--cluster-reassign", "1", "--split", "1"),
)
# Candidates that are aligned per sequence. Later candidates of the word search are rarely similar.
MAX_CANDIDATES = 20
# Sequences that are compared at once with the representatives of all earlier blocks.
BLOCK = 4096
# Sequences per job of the executor.
JOB = 512
# Residues of a word: contiguous, and spaced as in MMseqs2's prefilter.
WORDS = ((0, 1, 2), (0, 1, 3))
# Diagonals that are counted together. A match may cross into the neighbouring band, so gaps of up to 8 are tolerated.
BAND = 8


def cluster_sequences(
    sequences: Sequence[str],
    min_identity: float = 0.4,
    executor: Executor | None = None,
    threads: int = 1,
    program: str | None = None,
) -> list[int]:
    """Cluster sequences; returns the index of each sequence's representative (the first of equal sequences).

    The algorithm is greedy, as in CD-HIT and MMseqs2's cluster mode 2: in order of decreasing length, a sequence joins
    a similar representative or becomes one. Candidates are the representatives that share most words on one diagonal.
    Many sequences are clustered by MMseqs2 (see `clustering_program`).
    min_identity: fraction of identical aligned pairs, 0 to 1. threads: of MMseqs2. program: the result of
    `clustering_program`, if the caller has it. The clusters depend only on the set of sequences, not on their order,
    the number of copies, the executor or the threads.
    Raises the errors of `clustering_program`, and UserError if MMseqs2 fails or its table is incomplete.
    """
    first: dict[str, int] = {}
    for index, sequence in enumerate(sequences):
        first.setdefault(sequence, index)
    order = sorted(first, key=lambda sequence: (-len(sequence), sequence))
    if clustering_program(sequences) if program is None else program:
        by_mmseqs = dict(zip(order, _join_by_mmseqs(order, min_identity, threads)))
        return [first[order[by_mmseqs[sequence]]] for sequence in sequences]
    representative: dict[str, str] = {}
    founders: list[str] = []  # longest first
    for start in range(0, len(order), BLOCK):
        block = order[start : start + BLOCK]
        near = [founder for founder in founders if len(founder) * COVERAGE <= len(block[0])]
        jobs = [(near, block[at : at + JOB], min_identity) for at in range(0, len(block), JOB)]
        joined = [founder for job in in_order(_join_founders, jobs, executor) for founder in job]
        unassigned = [sequence for sequence, founder in zip(block, joined) if founder is None]
        representative |= {sequence: founder for sequence, founder in zip(block, joined) if founder is not None}
        # The others join each other, or found clusters.
        words = _WordIndex(unassigned)
        for number, sequence in enumerate(unassigned):
            nearest = (unassigned[i] for i in words.nearest(sequence, number))
            candidates = (other for other in nearest if representative[other] == other)
            representative[sequence] = _first_similar(candidates, sequence, min_identity) or sequence
        founders += [sequence for sequence in unassigned if representative[sequence] == sequence]
    return [first[representative[sequence]] for sequence in sequences]


def clustering_program(sequences: Iterable[str]) -> str:
    """Return name and version of the program that clusters these sequences; "" for this module.

    Raises UserError if MMseqs2 is needed but not installed.
    """
    if (count := len(set(sequences))) <= MAX_SEQUENCES:
        return ""
    if shutil.which("mmseqs") is None:
        raise UserError(
            f"clusters of {count:,} sequences: more than {MAX_SEQUENCES:,} need MMseqs2, and `mmseqs` is not on PATH. "
            "Install it (apt install mmseqs2, or conda install -c bioconda mmseqs2), pass a file with --clusters, or "
            "cluster only equal sequences (--cluster-identity 1)."
        )
    return f"MMseqs2 {run_program(['mmseqs', 'version']).strip()}"


def read_clusters(path: Path | str, keys: Iterable[str], entities: Mapping[str, str] | None = None) -> dict[str, str]:
    """Read the cluster of each key from a file, gzipped or not. A cluster is named by the first name of its line.

    The file has a cluster of blank-separated names per line, like the PDB's `clusters-by-entity-40.txt` and OpenFold's
    `all-seqs_clusters-40.txt`, or is a TSV of MMseqs2 with a representative and a member per line. Case is ignored
    before the last "_", so that "1ABC_A" matches the key "1abc_A". Keys that the file does not list are omitted.
    entities: the mmCIF entity of each key ("1abc_1"), for a file that lists entities. The naming with more matches is
    used.
    Raises UserError for a file that cannot be read, lists a name in two clusters, or lists none of the keys.
    """

    def normalise(name: str) -> str:
        entry, mark, chain = name.rpartition("_")
        return entry.lower() + mark + chain

    clusters: dict[str, str] = {}
    for number, line in enumerate(read_file(path).decode("utf-8", "replace").splitlines(), 1):
        for name in (names := line.split()):
            if clusters.setdefault(normalise(name), names[0]) != names[0]:
                raise UserError(f"{path}: line {number}: {name} is in two clusters. Remove it from one.")
    keys = list(keys)
    by_key = {key: normalise(key) for key in keys}
    by_entity = {key: normalise(name) for key, name in (entities or {}).items()}
    matches = [
        {key: clusters[names[key]] for key in keys if names.get(key) in clusters} for names in (by_key, by_entity)
    ]
    if keys and not any(matches):
        example = next(iter(clusters), "none")
        raise UserError(
            f"{path}: names none of the {len(keys)} chains; its names are like {example}, the chains' like {keys[0]}. "
            "Pass a file with names of chains, or none: pack can compute clusters."
        )
    return max(matches, key=len)


def _join_by_mmseqs(sequences: Sequence[str], min_identity: float, threads: int) -> list[int]:
    """Cluster unique sequences with `mmseqs cluster`; returns the index of each representative.

    The result depends on the order of the sequences, here by decreasing length, but not on the number of threads.
    """
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
                f"{error}. It needs memory, and space in {tempfile.gettempdir()} ({free:.1f} GB are free): set TMPDIR "
                "to a folder with more space, and repeat the command."
            ) from None
    joined = [-1] * len(sequences)
    try:
        for line in lines:
            leader, member = map(int, line.split("\t"))
            joined[member] = leader
        is_complete = len(lines) == len(joined) and all(leader >= 0 and joined[leader] == leader for leader in joined)
    except (ValueError, IndexError):
        is_complete = False
    if not is_complete:
        raise UserError(
            "`mmseqs cluster`: its table does not put each sequence into one cluster. Install another version of "
            "MMseqs2 (14 works), or pass a file with --clusters."
        )
    return joined


def _join_founders(job: tuple[list[str], list[str], float]) -> list[str | None]:
    """Find a representative for each sequence, or None. job: representatives, shorter sequences, minimum identity."""
    founders, sequences, min_identity = job
    index = _WordIndex(founders)
    joined: list[str | None] = []
    for sequence in sequences:
        candidates = (founders[i] for i in index.nearest(sequence, len(founders)))
        joined.append(_first_similar(candidates, sequence, min_identity))
    return joined


def _first_similar(candidates: Iterable[str], sequence: str, min_identity: float) -> str | None:
    """Return the first similar sequence among the first `MAX_CANDIDATES` candidates, or None."""
    return next((other for other in islice(candidates, MAX_CANDIDATES) if similar(other, sequence, min_identity)), None)


class _WordIndex:
    """An index of the words of sequences, which finds sequences that share words on one diagonal.

    The sequences are sorted by decreasing length. The diagonals of all sequences are numbered consecutively and grouped
    into bands, so that one `bincount` counts the words that a query shares with each sequence on neighbouring
    diagonals. Frequent words (such as those of tags) have a lower weight.
    """

    def __init__(self, sequences: Sequence[str]) -> None:
        self.lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
        # The first band of each sequence, and the end.
        self.bands = np.cumsum(np.append(0, 2 * self.lengths // BAND + 2))
        # The main diagonal of each sequence. Its first band stays empty, which separates it from the previous sequence.
        zero = self.bands[:-1] * BAND + BAND + self.lengths
        codes = [residue_codes(sequence) for sequence in sequences]
        # For each word shape: the diagonals sorted by word, the start of each word, and its weight.
        self.tables: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for offsets in WORDS:
            words = [_list_words(code, offsets) for code in codes]
            number = np.concatenate([np.empty(0, np.uint16), *(word for word, _ in words)])
            diagonal = np.concatenate([np.empty(0, np.int64), *(at + start for (_, at), start in zip(words, zero))])
            counts = np.bincount(number, minlength=20**3)
            begins, weight = np.append(0, np.cumsum(counts)), 1 / np.maximum(counts, max(counts.mean(), 1))
            self.tables.append((diagonal[np.argsort(number, kind="stable")], begins, weight))

    def nearest(self, sequence: str, count: int) -> np.ndarray:
        """Find the sequences among the first `count` that share words with `sequence`, those that share most first.

        `sequence` must not be longer than any of them. Sequences that it is too short to cover are omitted.
        """
        if not count:
            return np.empty(0, np.int64)
        score = np.zeros(self.bands[count])
        code = residue_codes(sequence)
        for (diagonals, begins, weight), offsets in zip(self.tables, WORDS):
            word, at = _list_words(code, offsets)
            counts = begins[word + 1] - begins[word]
            ends = np.cumsum(counts)
            # The slices [begins, begins + counts) of all words as one array of indices, without a loop.
            hits = np.arange(counts.sum()) + np.repeat(begins[word] - ends + counts, counts)
            bands = (diagonals[hits] - np.repeat(at, counts)) // BAND
            # The other bands belong to later sequences.
            inside = bands < self.bands[count]
            score += np.bincount(bands[inside], np.repeat(weight[word], counts)[inside], len(score))
        # A match may cross from one band to the next, so the best pair of neighbouring bands counts.
        best = np.maximum.reduceat(score[:-1] + score[1:], self.bands[:count])
        best[self.lengths[:count] * COVERAGE > len(sequence)] = 0
        return np.argsort(-best, kind="stable")[: np.count_nonzero(best)]


def _list_words(code: np.ndarray, offsets: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """List the words of a sequence without X, as numbers below 20**3, and their start positions."""
    count = max(len(code) - offsets[-1], 0)
    letters = np.stack([code[offset : offset + count] for offset in offsets]).astype(np.uint16)
    start = np.flatnonzero((letters < UNKNOWN).all(0))
    return (np.array([400, 20, 1], np.uint16) @ letters)[start], start
