"""FASTA, A3M, A2M, Stockholm and plain rows: what they mean, what is refused, and that writing and reading agree."""

import gzip
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from warpfold.data.formats.alignment import Alignment, decode, encode, is_nucleic, merge
from warpfold.data.formats.sequences import (
    parse_a3m,
    parse_alignment,
    parse_fasta,
    parse_stockholm,
    read_alignment,
    read_fasta,
    write_a3m,
    write_fasta,
)
from warpfold.errors import UserError
from warpfold.geometry.residue import GAP, RESTYPES, UNKNOWN

A3M = ">query\nMKVLW\n>one\nM-VaaLW\n>two\nxxMKV-Wy\n"


def refusal(call: object, *arguments: object) -> str:
    """The message of the UserError that a call raises: one line."""
    with pytest.raises(UserError) as caught:
        call(*arguments)  # type: ignore[operator]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_letters_mean_what_hhblits_table_says() -> None:
    assert encode(RESTYPES).tolist() == list(range(20))
    assert decode(encode("BZUJOX")) == "DECXXX"
    assert encode("acd").tolist() == encode("ACD").tolist()


@pytest.mark.parametrize("bad", ["M*K", "M-K", "M1K", "M K", "Mé"])
def test_encode_names_the_character_and_its_place(bad: str) -> None:
    message = refusal(encode, bad)
    assert "position 2" in message
    assert repr(bad[1].upper()) in message


@pytest.mark.parametrize(
    ("sequence", "nucleic"),
    [("ACGUACGUAC", True), ("acgtacgtac", True), ("GAGAGAGAGAGA", False), ("ACGT", False), ("ACGTACGTACS", False)],
)
def test_nucleic_acids_are_told_from_proteins(sequence: str, nucleic: bool) -> None:
    assert is_nucleic(sequence) is nucleic


def test_fasta_joins_lines_and_keeps_the_header() -> None:
    assert parse_fasta(">a first\nMK\nvl\n\n>b\n  W Y\n") == [("a first", "MKVL"), ("b", "WY")]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("MKV\n", "'>'"),
        (">a\n>b\nMK\n", "'a' has no sequence"),
        (">a\nMK\n>b\nM*K\n", "record 2, 'b', position 2 has '*'"),
        (">a\nMK\0V\n", "NUL"),
        (">a\nM-K\n", "position 2 has '-'"),
    ],
)
def test_fasta_refuses_what_is_no_sequence(text: str, said: str) -> None:
    assert said in refusal(parse_fasta, text, "x.fasta")
    assert refusal(parse_fasta, text, "x.fasta").startswith("x.fasta: ")


def test_lower_case_counts_as_deletions_before_the_next_column() -> None:
    alignment = parse_a3m(A3M)
    assert [decode(row) for row in alignment.rows] == ["MKVLW", "M-VLW", "MKV-W"]
    assert alignment.deletions.tolist() == [[0] * 5, [0, 0, 0, 2, 0], [2, 0, 0, 0, 0]]
    assert alignment.names == ["query", "one", "two"]
    assert (alignment.rows.dtype, alignment.deletions.dtype) == (np.uint8, np.int32)


def test_rows_of_the_hh_suite_that_are_no_sequences_are_left_out() -> None:
    extra = ">ss_pred PSIPRED\nHHHHHCC\n>ss_conf\n0123456\n>q_consensus\nxxx\n>Consensus\nMKvlw\n"
    assert len(parse_a3m(extra + A3M)) == 3
    assert parse_a3m(extra + A3M).names == ["query", "one", "two"]


def test_dots_pad_insertions_in_a2m_and_are_gaps_elsewhere() -> None:
    a2m = parse_a3m(">q\nMK..V\n>a\nMKacV\n>b\nM-.cV\n")
    assert a2m.deletions.tolist() == [[0, 0, 0], [0, 0, 2], [0, 0, 1]]
    dotted = parse_a3m(">q\nMKV\n>a\nM.V\n")
    assert decode(dotted.rows[1]) == "M-V"


def test_aligned_fasta_is_projected_on_its_first_row() -> None:
    alignment = parse_a3m(">q\nM--KV\n>a\nMACK-\n")
    assert [decode(row) for row in alignment.rows] == ["MKV", "MK-"]
    assert alignment.deletions.tolist() == [[0, 0, 0], [0, 2, 0]]


def test_a2m_whose_query_has_lower_case_is_read_whole_for_that_query() -> None:
    text = ">q\nMkv.LW\n>a\nM.va-W\n"
    assert parse_a3m(text).query == "MLW"
    alignment = parse_a3m(text, query="MKVLW")
    assert [decode(row) for row in alignment.rows] == ["MKVLW", "M-V-W"]
    assert alignment.deletions.tolist() == [[0] * 5, [0, 0, 0, 1, 0]]


def test_a3m_names_the_row_of_another_length() -> None:
    message = refusal(parse_a3m, ">q\nMKV\n>ok\nMKV\n>short\nMK\n", "x.a3m")
    assert message.startswith("x.a3m: row 3, 'short', has 2")


def test_a3m_names_row_character_and_place_of_what_is_no_residue() -> None:
    assert "record 2, 'a', position 2 has '5'" in refusal(parse_a3m, ">q\nMKV\n>a\nM5V\n")


def test_the_first_row_must_be_the_query() -> None:
    assert parse_a3m(A3M, query="MKVLW").query == "MKVLW"
    assert "5 residues, the query has 6" in refusal(parse_a3m, A3M, "x.a3m", "MKVLWW")
    assert "at 1 of 5 residues, first at 2 (K, not A)" in refusal(parse_a3m, A3M, "x.a3m", "MAVLW")
    assert parse_a3m(">q\nMCD\n", query="MUB").query == "MCD"


def test_a_gapped_query_with_insertions_is_refused() -> None:
    assert "query, has gaps" in refusal(parse_a3m, ">q\nM-V\n>a\nMaKV\n")


def test_rna_is_refused() -> None:
    assert "nucleic" in refusal(parse_a3m, ">q\nGGACUUCGGUCC\n")
    assert "nucleic" in refusal(parse_a3m, ">q\nGGACUUCGGUCC\n", "x", "GGACUUCGGUCC")


def test_colabfold_header_of_one_chain_and_of_a_complex() -> None:
    assert len(parse_a3m("#5\t1\n" + A3M)) == 3
    assert "announces 6 columns" in refusal(parse_a3m, "#6\t1\n" + A3M)
    paired = "#3,2\t1,1\n>101\t102\nMKVLW\n>a\nM-V--\n>b\n---aLW\n"
    assert "complex of 2 chains (3, 2 residues)" in refusal(parse_a3m, paired)
    alignment = parse_a3m(paired, query="LW")
    assert (alignment.names, alignment.deletions.tolist()) == (["101\t102", "b"], [[0, 0], [1, 0]])
    assert "none of them the query" in refusal(parse_a3m, paired, "x", "LL")


def test_nul_bytes_separate_entries_of_an_mmseqs_database() -> None:
    assert len(parse_a3m(A3M + "\0")) == 3
    both = A3M + "\0>101\nWWW\n>x\nW-W\n\0"
    assert "holds 2 alignments" in refusal(parse_a3m, both)
    assert parse_a3m(both, query="WWW").names == ["101", "x"]
    assert "none or several" in refusal(parse_a3m, both, "x", "AAA")


STOCKHOLM = """# STOCKHOLM 1.0
#=GF ID family
#=GS hit/1-4 DE a hit
query    MK.VLW
hit/1-4  MKaV--

query    AA
hit/1-4  A-
#=GR hit/1-4 PP 99
#=GC RF  {rf}xx
//
"""


def test_stockholm_joins_blocks_and_counts_insertions() -> None:
    text = STOCKHOLM.replace("#=GC RF  {rf}xx\n", "")
    alignment = parse_stockholm(text)
    assert [decode(row) for row in alignment.rows] == ["MKVLWAA", "MKV--A-"]
    assert alignment.deletions[1].tolist() == [0, 0, 1, 0, 0, 0, 0]
    assert alignment.names == ["query", "hit/1-4 a hit"]  # as in A3M: what pairs rows may be in the description


def test_stockholm_of_a_profile_search_needs_the_query() -> None:
    hits = "# STOCKHOLM 1.0\na MK.V-\nb M-aVW\n#=GC RF xx.xx\n//\n"
    assert "no row of the query" in refusal(parse_stockholm, hits)
    alignment = parse_stockholm(hits, query="MKVW")
    assert [decode(row) for row in alignment.rows] == ["MKVW", "MKV-", "M-VW"]
    assert alignment.deletions[2].tolist() == [0, 0, 1, 0]
    assert "none of its 2 rows" in refusal(parse_stockholm, hits, "x", "MKVWW")


def test_stockholm_finds_the_query_below_the_first_row() -> None:
    text = "# STOCKHOLM 1.0\na MK.V-\nquery M-AVW\n//\n"
    alignment = parse_stockholm(text, query="MAVW")
    assert alignment.names == ["query", "a"]
    assert decode(alignment.rows[1]) == "M-V-"
    assert alignment.deletions[1].tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# STOCKHOLM 1.0\na MKV\n", "cut short"),
        ("# STOCKHOLM 1.0\na MKV\n//\n# STOCKHOLM 1.0\na MKV\n//\n", "several alignments"),
        ("# STOCKHOLM 1.0\na MKV\nb MK\n//\n", "row 2, 'b', has 2 columns"),
        ("# STOCKHOLM 1.0\na MKV x\n//\n", "line 2"),
        ("# STOCKHOLM 1.0\n//\n", "no rows"),
        ("# STOCKHOLM 1.0\na M*V\n//\n", "position 2 has '*'"),
    ],
)
def test_stockholm_refuses_what_it_cannot_trust(text: str, said: str) -> None:
    assert said in refusal(parse_alignment, text)


def test_rows_without_headers() -> None:
    alignment = parse_alignment("MKV\nM-V\nMKL\n")
    assert [decode(row) for row in alignment.rows] == ["MKV", "M-V", "MKL"]
    assert "row 2, 'row 2', has 2 columns" in refusal(parse_alignment, "MKV\nMK\n")
    assert "CLUSTAL" in refusal(parse_alignment, "CLUSTAL W (1.83)\n\na MKV\n")
    assert "not an alignment" in refusal(parse_alignment, "Query 1abc\nMatch_columns 3\n")
    assert "empty" in refusal(parse_alignment, "\n\n")


def test_files_gz_crlf_and_byte_order_marks(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a.a3m", tmp_path / "b.a3m"
    plain.write_bytes(b"\xef\xbb\xbf" + A3M.replace("\n", "\r\n").encode())
    packed.write_bytes(gzip.compress(A3M.encode()))  # told by content, not by name
    for path in (plain, packed):
        assert read_alignment(path).deletions.tolist() == parse_a3m(A3M).deletions.tolist()


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    damaged = {
        "cut.a3m": (gzip.compress(A3M.encode() * 50)[:-20], "cut short or damaged"),
        "latin.a3m": (">q \xe9\nMKV\n".encode("latin-1"), "line 1 is not UTF-8"),
        "empty.a3m": (b"\n", "is empty"),
    }
    for name, (content, said) in damaged.items():
        (tmp_path / name).write_bytes(content)
        message = refusal(read_alignment, tmp_path / name)
        assert said in message
        assert name in message
    assert "no such file" in refusal(read_fasta, tmp_path / "none.fasta")
    assert "is a folder" in refusal(read_fasta, tmp_path)


def test_select_and_merge() -> None:
    alignment = parse_a3m(A3M + ">again\nM-VLW\n")
    assert alignment.select([0, 2]).names == ["query", "two"]
    assert alignment.select(alignment.rows[:, 1] == GAP).names == ["one", "again"]
    both = merge([alignment, parse_a3m(">q2\nMKVLW\n>three\nMKVLL\n")])
    assert both.names == ["query", "one", "two", "again", "three"]
    assert "differs from the query" in refusal(merge, [alignment, parse_a3m(">q\nMKVLL\n")])


def test_one_row_alignment() -> None:
    alignment = Alignment.of_query("MXK")
    assert alignment.rows.tolist() == [[12, UNKNOWN, 11]]
    assert "no residues" in refusal(Alignment.of_query, "")
    assert "nucleic" in refusal(Alignment.of_query, "ACGUACGUACGU")


residues = st.sampled_from(RESTYPES + "X")
headers = st.text(st.characters(blacklist_categories=("Cs", "Cc", "Zl", "Zp")), max_size=20).map(
    lambda name: "n" + name.strip()
)


@given(st.lists(st.tuples(headers, st.text(residues, min_size=1, max_size=200)), min_size=1, max_size=5))
def test_fasta_round_trip(records: list[tuple[str, str]]) -> None:
    records = [(" ".join(name.split()), sequence) for name, sequence in records]
    assert parse_fasta(write_fasta(records)) == records


@given(st.data())
def test_a3m_round_trip(data: st.DataObject) -> None:
    n, rows = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 6))
    query = data.draw(st.lists(st.integers(0, 20), min_size=n, max_size=n))
    others = data.draw(st.lists(st.lists(st.integers(0, 21), min_size=n, max_size=n), min_size=rows, max_size=rows))
    inserted = data.draw(st.lists(st.lists(st.integers(0, 3), min_size=n, max_size=n), min_size=rows, max_size=rows))
    codes = np.array([query, *others], dtype=np.uint8)
    deletions = np.array([[0] * n, *inserted], dtype=np.int32)
    if is_nucleic(decode(codes[0])):
        return
    alignment = Alignment(codes, deletions, [f"row {i}" for i in range(rows + 1)])
    back = parse_a3m(write_a3m(alignment))
    assert np.array_equal(back.rows, codes)
    assert np.array_equal(back.deletions, deletions)
    assert back.names == alignment.names


@example(b"\v", b"")  # blank, though neither a space nor a line end
@given(st.binary(max_size=60), st.sampled_from([b"", b">", b"# STOCKHOLM 1.0\n", b"#3\t1\n>", b"MKV\n", b"\x1f\x8b"]))
def test_no_input_is_a_bug(tail: bytes, head: bytes) -> None:
    for parse in (parse_alignment, parse_fasta):
        said = ""
        try:
            parse(head + tail)
        except UserError as error:
            said = str(error)
        assert "\n" not in said


def test_deep_alignments_are_quick() -> None:
    rng = np.random.default_rng(0)
    letters = np.frombuffer((RESTYPES + "-" * 6 + "a").encode(), dtype=np.uint8)
    rows = []
    for _ in range(16_000):
        row = letters[rng.integers(0, 27, 250)].tobytes().decode()
        rows.append(row + "-" * (250 - sum(c != "a" for c in row)))
    text = write_fasta([("query", "M" * 250), *((f"hit {i}", row) for i, row in enumerate(rows))], width=0).encode()
    start = time.process_time()
    assert parse_a3m(text).rows.shape == (16_001, 250)
    assert time.process_time() - start < 1.0
