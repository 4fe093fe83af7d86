"""What an alignment covers: depth at each residue, and its rows by identity."""

import numpy as np

from warpfold.data.example.assembly import Assembly
from warpfold.data.example.complexes import Complex, assemble
from warpfold.data.example.raw_example import RawExample, from_sequence
from warpfold.data.formats.sequences import parse_a3m
from warpfold.run.coverage import PICTURED, coverage_of

QUERY = "MKTAYIAKQR"


def example(rows: list[str], query: str = QUERY) -> RawExample:
    text = f">q\n{query}\n" + "".join(f">r{i}\n{row}\n" for i, row in enumerate(rows))
    return from_sequence(query, [parse_a3m(text, "test", query)])


def monomer(rows: list[str]) -> Assembly:
    return Assembly("q", ("A",), (example(rows),))


def test_rows_are_sorted_by_identity_and_counted() -> None:
    found = coverage_of(monomer(["MKTAY-----", "MKTAYIAKQA", "-----GGKQR"]))
    assert found.total == 4
    assert found.depth.tolist() == [3] * 5 + [3] * 5
    assert found.rows.max(1).tolist() == [101, 91, 51, 31]  # 1 + percent of the query's residues that a row has
    assert ((found.rows > 0).sum(1)).tolist() == [10, 10, 5, 5]
    assert (found.rows[2] > 0).tolist() == [True] * 5 + [False] * 5


def test_a_query_alone_is_one_row() -> None:
    found = coverage_of(monomer([]))
    assert (found.total, found.depth.tolist(), found.rows.tolist()) == (1, [1] * 10, [[101] * 10])


def test_of_many_rows_some_are_pictured_and_all_are_counted() -> None:
    rng = np.random.default_rng(0)
    rows = ["".join(rng.choice(list("ACDEFGHIKL-"), 10)) for _ in range(900)]
    found = coverage_of(monomer(rows))
    different = len({row for row in [*rows, QUERY]})
    assert found.total == different
    assert found.rows.shape == (PICTURED, 10)
    assert (np.diff(found.rows.max(1).astype(int)) <= 0).all()
    msa = example(rows).msa
    np.testing.assert_array_equal(found.depth, (msa != 21).sum(0))


def test_pairs_of_a_complex_span_its_chains_and_other_rows_their_own() -> None:
    """Copies of a chain have the same rows."""
    other = "GSHMLEERL"
    one = parse_a3m(f">H\n{QUERY}\n>tr|A0A000|A0A000_MOUSE\nMKTAYIAKQA\n>alone\nMKTAY-----\n", "one", QUERY)
    two = parse_a3m(f">L\n{other}\n>tr|B0A000|B0A000_MOUSE\nGSHMLEEAA\n", "two", other)
    found = coverage_of(assemble(Complex("trio", ("H", "L", "x"), (QUERY, other, QUERY), (one, two)))[0])
    assert found.rows.shape == (3, 29)
    assert found.depth.tolist() == [3] * 5 + [2] * 5 + [2] * 9 + [3] * 5 + [2] * 5
    covered = [[(row[part] > 0).any() for part in (slice(0, 10), slice(10, 19), slice(19, 29))] for row in found.rows]
    assert covered == [[True, True, True], [True, True, True], [True, False, True]]
    assert found.rows.max(1).tolist() == [101, 1 + round(100 * (9 + 7 + 9) / 29), 51]
