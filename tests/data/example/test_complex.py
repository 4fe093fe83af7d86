"""Name chains and queries, and join a query with the alignments of others."""

from typing import Any

import pytest

from warpfold.data.example.complex import Complex, distinct_names, first_word
from warpfold.data.formats.alignment import Alignment
from warpfold.errors import UserError


def of(*sequences: str, **more: Any) -> Complex:
    alignments = tuple(Alignment.of_query(sequence) for sequence in more.pop("rows", ()))
    return Complex("x", tuple("ABCD"[: len(sequences)]), sequences, alignments, **more)


def queries_of(query: Complex) -> list[str]:
    return [alignment.query for alignment in query.alignments]


@pytest.mark.parametrize("name", ["A", "a|1", "!", "~", "x" * 100, ".x", "x.", "??"])
def test_chain_names_that_mmcif_can_hold(name: str) -> None:
    assert Complex("q", (name, "B"), ("MK", "MK")).ids == (name, "B")


@pytest.mark.parametrize("name", [".", "?", "", "x" * 101, "a b", "a'", 'a"', "é", "a\n"])
def test_chain_names_that_mmcif_cannot_hold(name: str) -> None:
    with pytest.raises(UserError) as error:
        Complex("q", ("A", name), ("MK", "MK"))
    assert str(error.value) == f"q: {name[:40]!r} cannot be a chain name in mmCIF. Use letters and digits."


def test_each_chain_needs_its_own_name() -> None:
    with pytest.raises(UserError) as error:
        Complex("q", ("A", "B", "C", "B"), ("MK",) * 4)
    assert str(error.value) == "q: has two chains called B. Give each chain a unique name."
    assert Complex("q", ("a", "A"), ("MK", "MK")).error == ""


def test_sequences_that_rows_cannot_tell_apart_are_one() -> None:
    assert of("MUB", "MCD", "ACD").rows == {"MCD", "ACD"}


def test_a_record_takes_alignments_only_for_sequences_without_any() -> None:
    record = of("MKV", "ACD", "MUB", rows=["MKV"], notes=("a", "b"))
    others = [
        of("ACD", rows=["ACD", "MKV"], place=2, notes=("c", "a")),
        of("MCD", rows=["MCD"], place=1, notes=("d",)),
        of("GGG", rows=["GGG"], place=0),
    ]
    joined = record.joined(others)
    # The record's own alignment comes first, then the others by their rank.
    assert queries_of(joined) == ["MKV", "MCD", "ACD"]
    assert joined.notes == ("a", "b", "d", "c")
    assert (joined.name, joined.ids, joined.sequences) == (record.name, record.ids, record.sequences)
    bare = of("WWW", notes=("n",))
    assert bare.joined(others) is bare


def test_an_alignment_is_stacked_among_others_by_rank() -> None:
    query = of("MKV", "MKV", rows=["MKV"], place=1, notes=("own",))
    others = [of("MKV", rows=["MKV"], place=place, notes=(str(place),)) for place in (2, 0, 1)]
    joined = query.joined(others)
    expected = [others[1], query, others[2], others[0]]
    assert [id(alignment) for alignment in joined.alignments] == [id(one.alignments[0]) for one in expected]
    assert joined.notes == ("own", "0", "1", "2")
    assert queries_of(query.joined([])) == ["MKV"]


@pytest.mark.parametrize(
    ("header", "word"),
    [("", ""), ("  ", ""), ("A b c", "A"), (" x|y z", "x|y"), ("a'b c", "a_b"), (".", "target"), ("é", "_")],
)
def test_the_first_word_of_a_header(header: str, word: str) -> None:
    assert first_word(header) == word


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["a", "b", "a"], ["a", "b", "a"]),
        (["a/b", "a/b"], ["a_b", "a_b"]),
        (["a/b", "a:b", "a|b"], ["a_b", "a_b_2", "a_b_3"]),
        (["a/b", "A_B"], ["a_b_2", "A_B"]),
        (["A/b", "a:b", "a_b_2"], ["A_b", "a_b_3", "a_b_2"]),
        (["a:b", "a/b", "a:b"], ["a_b", "a_b_2", "a_b"]),
        ([], []),
    ],
)
def test_file_names_of_different_words_differ_also_without_case(words: list[str], names: list[str]) -> None:
    assert distinct_names(words) == names
