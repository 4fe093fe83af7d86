"""Find relatives and the nearest identity: compare alignments and segments with definitions in plain Python."""

from collections.abc import Iterator, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from Bio.Align import substitution_matrices

from warpfold.data.similar import relatives
from warpfold.data.similar.pairwise import rost_identity
from warpfold.data.similar.relatives import find_relatives, nearest_identities

LETTERS = "ARNDCQEGHILKMFPSTWYV"
BLOSUM62 = substitution_matrices.load("BLOSUM62")


def score(a: str, b: str) -> int:
    return -1 if "X" in (a, b) else int(BLOSUM62[a, b])


def drawn(rng: np.random.Generator, length: int, letters: str = LETTERS) -> str:
    return "".join(rng.choice([*letters], length))


def relative(rng: np.random.Generator, sequence: str) -> str:
    """Return a sequence with other letters at random positions, and with a segment inserted and another one removed."""
    letters = [letter if rng.random() < 0.7 else drawn(rng, 1, LETTERS + "X") for letter in sequence]
    first, second = sorted(int(n) for n in rng.integers(2, len(letters) - 2, 2))
    letters[second : second + int(rng.integers(0, 4))] = []
    letters[first:first] = drawn(rng, int(rng.integers(0, 5)))
    return "".join(letters)


@cache
def align(query: str, target: str) -> list[bool]:
    """Align locally with gaps of any length, scored one by one; return from the end whether each pair is equal.

    Of alignments with the best score, the first end counts, then pairs, then the shortest gap of the target.
    """
    best = np.zeros((len(query) + 1, len(target) + 1), int)

    def gap(length: int) -> int:
        return 11 + length

    for i in range(1, len(query) + 1):
        for j in range(1, len(target) + 1):
            options = [0, best[i - 1, j - 1] + score(query[i - 1], target[j - 1])]
            options += [best[i - k, j] - gap(k) for k in range(1, i + 1)]
            options += [best[i, j - k] - gap(k) for k in range(1, j + 1)]
            best[i, j] = max(options)
    i, j = max(np.ndindex(best.shape), key=lambda cell: best[cell])
    same = []
    while best[i, j] > 0:
        if best[i, j] == best[i - 1, j - 1] + score(query[i - 1], target[j - 1]):
            same.append(query[i - 1] == target[j - 1] != "X")
            i, j = i - 1, j - 1
        elif up := next((k for k in range(1, i + 1) if best[i, j] == best[i - k, j] - gap(k)), None):
            i -= up
        else:
            j -= next(k for k in range(1, j + 1) if best[i, j] == best[i, j - k] - gap(k))
    return same


def has_segment(query: str, target: str, min_identity: float) -> bool:
    """Look at every segment of the alignment that pairs at least half of the shorter sequence."""
    same = align(query, target)
    spans = [(start, stop) for stop in range(len(same) + 1) for start in range(stop)]
    return any(
        sum(same[start:stop]) >= max(min_identity, rost_identity(stop - start)) * (stop - start)
        for start, stop in spans
        if stop - start >= 0.5 * min(len(query), len(target))
    )


@pytest.mark.parametrize("seed", range(2))
def test_local_alignments_are_those_of_the_definition(seed: int) -> None:
    rng = np.random.default_rng(seed)
    query = drawn(rng, 20)
    targets = [relative(rng, query) for _ in range(6)]
    targets += ["".join("X" if rng.random() < 0.4 else letter for letter in query) for _ in range(4)]
    targets += [query[9:] + relative(rng, query)[:12], drawn(rng, 3), "X" * 4, "W", query[:7] + "X" * 9 + query[7:]]
    found = relatives._align_locally(query, targets)
    assert [same.tolist() for same in found] == [align(query, target) for target in targets]
    assert any(len(same) not in (len(query), len(target)) for same, target in zip(found, targets))


@pytest.mark.parametrize("seed", range(2))
def test_relatives_have_a_segment_as_defined(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    queries = [drawn(rng, length) for length in (20, 14)]
    targets = [relative(rng, query) for query in queries for _ in range(3)]
    targets += [queries[0][6:19], queries[1] + drawn(rng, 6), queries[0][:9] + queries[1][:7], *queries, targets[0]]
    for min_identity in (0.0, 0.8):
        expected = [{n for n, b in enumerate(targets) if a == b or has_segment(a, b, min_identity)} for a in queries]
        assert any(0 < len(numbers) < len(targets) for numbers in expected)
        for batch_cells in (1, 1000, 4_000_000):
            monkeypatch.setattr(relatives, "BATCH_CELLS", batch_cells)
            assert find_relatives(queries, targets, min_identity) == expected


def test_the_default_identity_is_reached_by_30_of_100_pairs() -> None:
    """Identical residues stand at both ends and at equal distances, so no long segment has a higher identity."""
    rng = np.random.default_rng(0)
    query, at = drawn(rng, 100, "DEIVKRFYSTNQ"), np.linspace(0, 99, 30).round().astype(int)
    similar = str.maketrans("DEIVKRFYSTNQ", "EDVIRKYFTSDE")
    target = "".join(letter if i in at else letter.translate(similar) for i, letter in enumerate(query))
    assert find_relatives([query], [target]) == find_relatives([query], [target], 0.3) == [{0}]
    assert find_relatives([query], [target], 0.302) == [set()]


def test_half_of_the_shorter_chain_is_enough() -> None:
    core = "MKTAYIAKQRQISFVKSHFS"
    pairs = [(core + "W" * 20, core + "P" * 25), (core + "W" * 21, core + "P" * 21), (core + "W" * 30, core + "P" * 20)]
    assert [find_relatives([a], [b]) for a, b in pairs] == [[{0}], [set()], [{0}]]


def test_unknown_residues_and_empty_sequences_have_no_relatives(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unreadable chain of a store has an empty sequence."""
    peptide = "MKTAYIAKQRQ"
    assert find_relatives(["X" * 30], ["X" * 31]) == [set()]
    assert find_relatives(["", peptide, ""], [peptide, "", peptide]) == [set(), {0, 2}, set()]
    assert find_relatives([peptide], ["", ""]) == [set()]
    assert find_relatives([], [peptide]) == []
    monkeypatch.setattr(relatives, "MAX_CELLS", 0)
    assert find_relatives(["", peptide * 3], [peptide * 3, ""]) == [set(), {0}]


class Phmmer:
    """Stand in for phmmer: keep the arguments, and report the same hits for every query."""

    def __init__(self, *hits: SimpleNamespace) -> None:
        self.hits, self.calls = hits, list[tuple[Any, ...]]()

    def __call__(
        self, queries: Sequence[str], targets: Sequence[str], threads: int, limits: dict[str, Any]
    ) -> Iterator[SimpleNamespace]:
        self.calls.append(([*queries], [*targets], threads, limits))
        return iter([SimpleNamespace(reported=self.hits)] * len(queries))


def test_of_many_pairs_the_candidates_of_phmmer_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    queries, others = [drawn(rng, 20), drawn(rng, 30)], [drawn(rng, 25), drawn(rng, 35)]
    targets = [others[0], queries[1][:28], others[1], queries[0][:19]]
    phmmer = Phmmer(SimpleNamespace(name="2"), SimpleNamespace(name="1"))
    monkeypatch.setattr(relatives, "_run_phmmer", phmmer)
    monkeypatch.setattr(relatives, "MAX_CELLS", 50 * 107)
    assert find_relatives([*queries, queries[0]], targets) == [{3}, {1}, {3}]
    assert phmmer.calls == []
    monkeypatch.setattr(relatives, "MAX_CELLS", 50 * 107 - 1)
    # By length, number 0 is the relative of the first query, which phmmer misses.
    assert find_relatives([*queries, queries[0]], targets, threads=3) == [set(), {1}, set()]
    assert find_relatives(queries, targets) == [set(), {1}]
    by_length = [targets[n] for n in (3, 0, 1, 2)]
    limits = {"E": 0.01, "domE": 1000.0, "Z": 1.0, "domZ": 1.0, "F1": 0.1, "F2": 0.1, "F3": 0.1}
    assert phmmer.calls == [(queries, by_length, 3, limits), (queries, by_length, 1, limits)]


def hit(*domains: tuple[int, str]) -> SimpleNamespace:
    """Return a hit of phmmer. domains: first residue of the query, from 1, and the row of the target."""
    alignments = [SimpleNamespace(hmm_from=first, target_sequence=row) for first, row in domains]
    return SimpleNamespace(domains=SimpleNamespace(reported=[SimpleNamespace(alignment=one) for one in alignments]))


def test_the_nearest_identity_counts_the_residues_of_all_domains_once(monkeypatch: pytest.MonkeyPatch) -> None:
    query, others = "ACDEFGHIKL", ["W" * 11, "", "Y" * 31, "W" * 11, "V" * 30, "N"]
    hits = [hit((2, "CDwyE-G")), hit((1, "ACW"), (3, "DEF"), (2, "CDE")), hit((8, "AKL"))]
    phmmer = Phmmer(*hits)
    monkeypatch.setattr(relatives, "_run_phmmer", phmmer)
    monkeypatch.setattr(relatives, "MAX_RESIDUES", 30)
    assert nearest_identities([query, "ACDWWWWIKL"], others) == [0.5, 0.3]
    assert nearest_identities([query], [*others, "WACDEFGHIKL"], 2) == [1.0]
    monkeypatch.setattr(phmmer, "hits", ())
    assert nearest_identities([query], others) == [0.0]
    limits = {"E": 0.001, "incE": 0.001}
    unique = ["W" * 11, "V" * 30, "N"]
    assert phmmer.calls[:2] == [
        ([query, "ACDWWWWIKL"], unique, 1, limits),
        ([query], [*unique, "WACDEFGHIKL"], 2, limits),
    ]


def test_long_sequences_are_cut_for_phmmer(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    query = drawn(rng, 60)
    found = relatives._run_phmmer([query], [drawn(rng, 50), query[30:], query], 1, {"E": 1e-3})
    assert [int(one.name) for hits in found for one in hits.reported] == [2, 1]
    monkeypatch.setattr(relatives, "MAX_RESIDUES", 30)
    (hits,) = relatives._run_phmmer([query], [drawn(rng, 50), query[30:], query], 1, {"E": 1e-3})
    assert [int(one.name) for one in hits.reported] == [2]
    assert [domain.alignment.hmm_to for one in hits.reported for domain in one.domains] == [30]
