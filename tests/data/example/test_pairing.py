"""Pair alignment rows by species: species in headers, which rows are paired, and how alignments are stacked."""

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from warpfold.data.example.pairing import (
    MAX_SPECIES_ROWS,
    Pairing,
    hash_name,
    make_pairing,
    pair_rows,
    species_keys,
    species_of,
)
from warpfold.data.example.raw_example import from_sequence
from warpfold.data.formats.alignment import Alignment, decode, parse_a3m


@pytest.mark.parametrize(
    ("header", "species"),
    [
        ("tr|A0A146SKV9|A0A146SKV9_FUNHE/1-57", "FUNHE"),
        ("tr|A0A146SKV9|A0A146SKV9_funhe", "FUNHE"),
        ("sp|P69905|HBA_HUMAN Hemoglobin subunit alpha OS=Homo sapiens OX=9606 GN=HBA1", "HUMAN"),
        ("sp|P69905_1|HBA_1_HUMAN/2-142", "HUMAN"),  # isoforms
        ("tr|Q9Y5|Q9Y5_HUMAN", None),  # the accession is too short
        ("tr|A0A0K0ME10|A0A0K0ME10_9STAP_17/3-9", "9STAP"),
        ("UniRef90_A0A8C8W1K4/1-64 [subseq from] Tma7 n=9 Tax=Peromyscus TaxID=10040 RepID=A0A8C8W1K4_PERMB", "PERMB"),
        ("UniRef90_UPI0018B0AC60/1-64 Tma7 n=9 Tax=cellular organisms TaxID=131567 RepID=UPI0018B0AC60", None),
        ("UniRef90_UPI0018B0AC60/1-64 Tma7 n=1 Tax=Mus musculus TaxID=10090 RepID=UPI0018B0AC60", "10090"),
        ("UniRef50_A0A8C8W1K4 Tma7 n=31 Tax=root TaxID=1", None),
        ("cluster of mine n=2 TaxID=230844 RepID=X", None),
        ("A0A0K0ME10 ParR OS=Staphylococcus schleiferi OX=1295", "1295"),
        ("x OX=12a TaxID=7", "7"),
        ("UniRef100_A0A2T9WJQ3_1987490/\t243\t0.294", "1987490"),
        ("UniRef100_UPI00186459A6_118141/", "118141"),
        ("UniRef100_A0A2T9WJQ3_/", None),
        ("UniRef100_A0A2T9WJQ3\t243\t0.294\t1.3E-68", None),
        ("UniRef90_UPI0018B0AC60/1-64", None),
        ("SRR5436853_169765\t58", None),
        ("MGYP000261098133", None),
        ("query", None),
        ("", None),
    ],
)
def test_the_organism_of_a_header(header: str, species: str | None) -> None:
    assert species_of(header) == species
    assert int(species_keys([header])[0]) == (0 if species is None else hash_name(species))


def pairing(species: Sequence[int], identity: Sequence[float] = (), digest: Sequence[int] = ()) -> Pairing:
    """Return the Pairing of the query and rows with these species. All rows differ unless `digest` is passed."""
    count = len(species) + 1
    return Pairing(
        np.array([0, *species], np.uint64),
        np.array([1.0, *(identity or [0.5] * len(species))], np.float32),
        np.array([1, *(digest or range(2, count + 1))], np.uint64),
        np.ones(count, bool),
    )


def test_the_best_rows_of_each_species_stand_side_by_side() -> None:
    a = pairing([7, 7, 9, 8], [0.2, 0.8, 0.5, 0.5])
    b = pairing([8, 7, 7, 7, 3], [0.5, 0.1, 0.9, 0.9, 0.5])
    # Species 8: rows (4, 1). Species 7: rows 2, 1 of a, and the best two of rows 3, 4, 2 of b. 9, 3: in one chain only.
    np.testing.assert_array_equal(pair_rows([a, b]), [[0, 0], [1, 4], [4, 1], [2, 3]])


def test_rows_of_more_chains_come_first_then_the_product_of_the_numbers() -> None:
    a, b, c = pairing([5, 6, 7]), pairing([6, 7, 5]), pairing([9, 7])
    np.testing.assert_array_equal(pair_rows([a, b, c]), [[0, 0, 0], [3, 2, 2], [2, 1, -1], [1, 3, -1]])


def test_a_chain_without_species_gets_gaps() -> None:
    rows = pair_rows([pairing([5]), None, pairing([5])])
    np.testing.assert_array_equal(rows, [[0, 0, 0], [1, -1, 1]])
    np.testing.assert_array_equal(pair_rows([None, None]), [[0, 0]])
    np.testing.assert_array_equal(pair_rows([pairing([5, 5])]), [[0]])
    np.testing.assert_array_equal(pair_rows([pairing([5, 5])] * 2), [[0, 0], [1, 1], [2, 2]])


def test_a_pair_with_the_letters_of_the_chains_is_a_repetition() -> None:
    """The digest of the chains themselves is 1."""
    same, other = pairing([5], digest=[1]), pairing([5], digest=[2])
    np.testing.assert_array_equal(pair_rows([same, same]), [[0, 0]])
    np.testing.assert_array_equal(pair_rows([same, other]), [[0, 0], [1, 1]])


def test_a_species_with_too_many_rows_is_not_paired() -> None:
    most = [5] * 600
    assert len(pair_rows([pairing(most), pairing(most)])) == 601
    assert len(pair_rows([pairing([*most, 5]), pairing([5, 6]), pairing([6])])) == 2


def reference(pairings: Sequence[Pairing]) -> list[tuple[int, ...]]:
    """Pair rows one by one, by the rules of section 2.4 and of the official code."""
    rows_of: list[dict[int, list[int]]] = [{} for _ in pairings]
    for pairing, rows in zip(pairings, rows_of):
        for row, species in enumerate(pairing.species.tolist()):
            rows.setdefault(species, []).append(row)
    pairs = []
    for species in sorted(set().union(*rows_of) - {0}):
        candidates = [rows.get(species, []) for rows in rows_of]
        have = [rows for rows in candidates if rows]
        if len(have) < 2 or max(map(len, have)) > MAX_SPECIES_ROWS:
            continue
        ranked = [sorted(rows, key=lambda row: -pairing.identity[row]) for pairing, rows in zip(pairings, candidates)]
        pairs += [
            tuple(rows[place] if rows else -1 for rows in ranked) for place in range(min(map(len, have)))
        ]  # fmt: skip
    pairs.sort(key=lambda rows: (sum(row < 0 for row in rows), abs(np.prod(rows, dtype=float)), rows))
    unique: dict[tuple[int, ...], tuple[int, ...]] = {}
    for rows in [(0,) * len(pairings), *pairs]:
        letters = tuple(-1 if row < 0 else int(pairing.digest[row]) for row, pairing in zip(rows, pairings))
        unique.setdefault(letters, rows)
    return list(unique.values())


rows_of_a_chain = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from([0.1, 0.5, 0.9]), st.integers(1, 30)), max_size=12
)


@drawn(st.lists(rows_of_a_chain, min_size=1, max_size=4))
@settings(max_examples=100, deadline=None)
def test_pairs_follow_the_rules(chains: list[list[tuple[int, float, int]]]) -> None:
    pairings = [pairing(*map(list, zip(*rows))) if rows else pairing([]) for rows in chains]
    assert [tuple(rows) for rows in pair_rows(pairings).tolist()] == reference(pairings)


def test_five_chains_of_twenty_thousand_rows_are_paired_in_one_pass() -> None:
    rng = np.random.default_rng(0)

    def chain(rows: int) -> Pairing:
        drawn = [rng.integers(1, rows, rows, dtype=np.uint64) for _ in range(2)]
        return Pairing(drawn[0], rng.random(rows, np.float32), drawn[1], np.ones(rows, bool))

    def seconds(rows: int) -> float:
        chains = [chain(rows) for _ in range(5)]
        start = time.thread_time()
        assert len(pair_rows(chains)) > rows // 2
        return time.thread_time() - start

    # With a pass over all rows for each species, 8 times the rows would take 64 times as long.
    assert min(seconds(20_000) for _ in range(3)) < 32 * min(seconds(2_500) for _ in range(5))


def test_row_0_is_of_no_species_and_identity_is_that_of_letters() -> None:
    msa = np.array([[0, 1, 2, 20], [0, 1, 3, 21], [0, 1, 2, 20]], np.uint8)
    made = make_pairing(msa, np.array([5, 5, 6], np.uint64), np.ones(3, bool))
    assert made is not None
    np.testing.assert_array_equal(made.species, [0, 5, 6])
    np.testing.assert_array_equal(made.identity, [1, 0.5, 1])
    assert made.digest[0] == made.digest[2] != made.digest[1]
    assert make_pairing(msa, np.array([5, 0, 0], np.uint64), np.ones(3, bool)) is None


def a3m(*rows: str) -> Alignment:
    """Return an alignment of ACDE. rows: SPECIES:LETTERS, or letters without a species."""
    records = [row.rpartition(":") for row in rows]
    return parse_a3m(
        ">q\nACDE\n" + "".join(f">{'tr|A0A000|A0A000_' + name if name else 'x'}\n{row}\n" for name, _, row in records)
    )


def texts(raw) -> list[str]:
    return [decode(row) for row in raw.msa]


def test_without_pairing_all_alignments_are_alike() -> None:
    parts = [a3m("RAT:ACDD", "AAAA"), replace(a3m("RAT:ACDD", "PIG:CCCC"), stands_alone=False)]
    raw = from_sequence("ACDE", parts)
    assert (texts(raw), raw.pairing) == (["ACDE", "ACDD", "AAAA", "CCCC"], None)


def test_any_alignment_may_pair_if_none_serves_pairing_alone() -> None:
    raw = from_sequence("ACDE", [a3m("RAT:ACDD", "AAAA"), a3m("PIG:ACDD", "PIG:CCCC", "PIG:ACDE")], pairing=True)
    assert texts(raw) == ["ACDE", "ACDD", "AAAA", "CCCC"]  # as without pairing
    assert raw.pairing is not None
    np.testing.assert_array_equal(raw.pairing.species, [0, hash_name("RAT"), 0, hash_name("PIG")])
    assert raw.pairing.unpaired.all()
    plain = from_sequence("ACDE", [a3m("AAAA")], pairing=True)
    assert plain.pairing is None


def test_an_alignment_that_serves_pairing_alone_is_the_only_one_that_pairs() -> None:
    for_pairing = replace(a3m("RAT:ACDD", "PIG:ACDD", "DOG:CCCC", "EEEE", "PIG:----"), stands_alone=False)
    raw = from_sequence("ACDE", [for_pairing, a3m("CAT:ACDD", "AAAA")], pairing=True)
    assert texts(raw) == ["ACDE", "ACDD", "AAAA", "ACDD", "CCCC", "EEEE"]
    assert raw.pairing is not None
    np.testing.assert_array_equal(raw.pairing.species, [0, 0, 0, hash_name("RAT"), hash_name("DOG"), 0])
    np.testing.assert_array_equal(raw.pairing.unpaired, [True, True, True, False, False, False])
    np.testing.assert_array_equal(raw.profile, from_sequence("ACDE", [a3m("ACDD", "AAAA")]).profile)
    inserted = replace(a3m("RAT:ACyDD", "PIG:CxxCCC"), stands_alone=False)
    below = from_sequence("ACDE", [inserted, a3m("wAAAA")], pairing=True)
    np.testing.assert_array_equal(below.deletions, [[0] * 4, [1, 0, 0, 0], [0, 0, 1, 0], [0, 2, 0, 0]])
    # Without any species, its rows are treated like those of other alignments.
    bare = from_sequence("ACDE", [replace(a3m("CCCC", "AAAA"), stands_alone=False), a3m("AAAA")], pairing=True)
    assert (texts(bare), bare.pairing) == (["ACDE", "AAAA", "CCCC"], None)
    # If the chain has no other rows, its rows are used unpaired, too.
    only = from_sequence("ACDE", [for_pairing, a3m("ACDE", "----")], pairing=True)
    assert texts(only) == ["ACDE", "ACDD", "CCCC", "EEEE"]
    assert only.pairing is not None
    assert only.pairing.unpaired.all()


def test_rows_with_keys_of_their_own_stay_even_if_their_letters_are_equal() -> None:
    keys = np.array([0, 5, 6, 6, 7], np.uint64)
    pairs = replace(a3m("CCCC", "CCCC", "CCCC", "----"), pair_keys=keys, stands_alone=False)
    raw = from_sequence("ACDE", [pairs], pairing=True)
    assert texts(raw) == ["ACDE", "CCCC", "CCCC"]
    assert raw.pairing is not None
    np.testing.assert_array_equal(raw.pairing.species, [0, 5, 6])
