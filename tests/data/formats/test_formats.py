"""Read FASTA, A3M, A2M, Stockholm and plain rows: content, and the same content after writing."""

import gzip
import os
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from warpfold.data.formats import alignment as formats
from warpfold.data.formats.alignment import (
    Alignment,
    announced,
    as_row,
    decode,
    document_kind,
    encode,
    encode_residues,
    is_complex,
    is_nucleic,
    parse_a3m,
    parse_alignment,
    parse_chain_alignments,
    parse_complex_a3m,
    parse_fasta,
    parse_stockholm,
    plain_sequence,
    plain_text,
    read_alignment,
    stockholm_rows,
    table_rows,
    table_titles,
    write_a3m,
    write_fasta,
)
from warpfold.data.structure.mmcif import parse_structure
from warpfold.errors import UserError
from warpfold.geometry.residue import GAP, RESTYPES, UNKNOWN

A3M = ">query\nMKVLW\n>one\nM-VaaLW\n>two\nxxMKV-Wy\n"
HHSUITE = ">ss_pred PSIPRED\nHHHHHCC\n>ss_conf\n0123456\n>q_consensus\nxxx\n>Consensus\nMKvlw\n"
COMPLEX = "#3,2\t1,1\n>101\t102\nMKVLW\n>a\nM-V--\n>b\n---aLW\n"
MMSEQS = A3M + "\0>101\nWWW\n>x\nW-W\n\0"
STO = "# STOCKHOLM 1.0\n"
BLOCKS = f"""{STO}#=GF ID family
#=GS hit/1-4 DE a hit
query    MK.VLW
hit/1-4  MKaV--

query    AA
hit/1-4  A-
#=GR hit/1-4 PP 99
//
"""
HITS = f"{STO}a MK.V-\nb M-aVW\n#=GC RF xx.xx\n//\n"
PLAIN = [{}, {3: 2}, {0: 2}]


def refusal(call: object, *arguments: object) -> str:
    """Return the message, of one line, of the UserError that a call raises."""
    with pytest.raises(UserError) as caught:
        call(*arguments)  # type: ignore[operator]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_letters_mean_what_hhblits_table_says() -> None:
    assert encode(RESTYPES).tolist() == list(range(20))
    assert decode(encode("BZUJOX")) == "DECXXX"
    assert encode("acd").tolist() == encode("ACD").tolist()
    for bad in ("M*K", "M-K", "M1K", "M K"):
        assert f"has {bad[1]!r} at position 2" in refusal(encode, bad)
    assert "has 'é' (U+00E9 LATIN SMALL LETTER E WITH ACUTE) at position 2" in refusal(encode, "Mé")


@pytest.mark.parametrize(
    ("sequence", "nucleic"),
    [("ACGUACGUAC", True), ("acgtacgtac", True), ("GAGAGAGAGAGA", False), ("ACGT", False), ("ACGTACGTACS", False)],
)
def test_nucleic_acids_are_told_from_proteins(sequence: str, nucleic: bool) -> None:
    assert is_nucleic(sequence) is nucleic


def test_fasta_joins_lines_and_keeps_the_header() -> None:
    assert parse_fasta(">a first\nMK\nvl\n\n>b\n  W Y\n") == [("a first", "MKVL"), ("b", "WY")]


@pytest.mark.parametrize(
    ("text", "query", "names", "rows", "deletions"),
    [
        pytest.param(A3M, None, "query one two", "MKVLW M-VLW MKV-W", PLAIN, id="A3M: lower case is inserted"),
        pytest.param(HHSUITE + A3M, None, "query one two", "MKVLW M-VLW MKV-W", PLAIN, id="HH-suite's annotations"),
        pytest.param(A3M + "\0", "MKVLW", "query one two", "MKVLW M-VLW MKV-W", PLAIN, id="an entry of MMseqs2"),
        pytest.param(MMSEQS, "WWW", "101 x", "WWW W-W", [{}, {}], id="one of several entries"),
        pytest.param("#5\t1\n" + A3M, None, "query one two", "MKVLW M-VLW MKV-W", PLAIN, id="ColabFold, one chain"),
        pytest.param(COMPLEX, "LW", "101\t102 b", "LW LW", [{}, {0: 1}], id="one chain of a complex"),
        pytest.param(">q\nMCD\n", "MUB", "q", "MCD", [{}], id="letters that mean the same"),
        pytest.param(">q\nMK..V\n>a\nMKacV\n>b\nM-.cV\n", None, "q a b", "MKV MKV M-V", [{}, {2: 2}, {2: 1}], id="A2M"),
        pytest.param(">q\nMKV\n>a\nM.V\n", None, "q a", "MKV M-V", [{}, {}], id="dots as gaps"),
        pytest.param(">q\nM--KV\n>a\nMACK-\n", None, "q a", "MKV MK-", [{}, {1: 2}], id="aligned FASTA"),
        pytest.param(">q\nMkv.LW\n>a\nM.va-W\n", None, "q a", "MLW M-W", [{1: 2}, {1: 2}], id="A2M of part of a query"),
        pytest.param(
            ">q\nMkv.LW\n>a\nM.va-W\n", "MKVLW", "q a", "MKVLW M-V-W", [{}, {3: 1}], id="the same of all of it"
        ),
        # In Stockholm as in A3M, the name includes the description, which may have the species for pairing.
        pytest.param(BLOCKS, None, "query hit/1-4_a_hit", "MKVLWAA MKV--A-", [{}, {2: 1}], id="Stockholm in blocks"),
        pytest.param(HITS, "MKVW", "query a b", "MKVW MKV- M-VW", [{}, {}, {2: 1}], id="of a profile"),
        pytest.param(
            f"{STO}a MK.V-\nquery M-AVW\n//\n", "MAVW", "query a", "MAVW M-V-", [{}, {1: 1}], id="query below"
        ),
        pytest.param(f"{STO}q MKV\nr M-V\nr MKL\n//\n", None, "q r r", "MKV M-V MKL", [{}, {}, {}], id="listed twice"),
        pytest.param("MKV\nM-V\nMKL\n", None, "row_1 row_2 row_3", "MKV M-V MKL", [{}, {}, {}], id="rows alone"),
    ],
)
def test_alignments_of_every_format(
    text: str, query: str | None, names: str, rows: str, deletions: list[dict[int, int]]
) -> None:
    alignment = parse_alignment(text, query=query)
    assert [name.replace(" ", "_") for name in alignment.names] == names.split(" ")
    assert [decode(row) for row in alignment.rows] == rows.split(" ")
    assert [{i: n for i, n in enumerate(row) if n} for row in alignment.deletions.tolist()] == deletions
    assert (alignment.rows.dtype, alignment.deletions.dtype) == (np.uint8, np.int32)


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
    message = refusal(parse_fasta, text, "x.fasta")
    assert message.startswith("x.fasta: ")
    assert said in message


def test_files_gz_crlf_and_byte_order_marks(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a.a3m", tmp_path / "b.a3m"
    plain.write_bytes(b"\xef\xbb\xbf" + A3M.replace("\n", "\r\n").encode())
    packed.write_bytes(gzip.compress(A3M.encode()))  # recognised by content, not by name
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
    assert "no such file" in refusal(read_alignment, tmp_path / "none.a3m")
    assert "is a folder" in refusal(read_alignment, tmp_path)


def test_an_alignment_may_be_a_pipe() -> None:
    """A shell makes one for <(command)."""
    reader, writer = os.pipe()
    os.write(writer, A3M.encode())
    os.close(writer)
    assert content(read_alignment(f"/dev/fd/{reader}")) == content(parse_a3m(A3M))
    os.close(reader)


def test_rows_are_selected_by_index_or_mask_and_one_row_is_an_alignment() -> None:
    alignment = parse_a3m(A3M + ">again\nM-VLW\n")
    assert alignment.select([0, 2]).names == ["query", "two"]
    assert alignment.select(alignment.rows[:, 1] == GAP).names == ["one", "again"]
    assert Alignment.of_query("MXK").rows.tolist() == [[12, UNKNOWN, 11]]
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


@example(b"\v", b"")  # white space other than spaces and line ends
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


def test_no_pickle_and_no_archive_of_arrays_is_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "arrays.npz", sequences=np.arange(3))
    executed = tmp_path / "executed"
    # io.open(executed, "w"), in each protocol that begins with its number.
    pickles = [b"\x80%ccio\nopen\n(V%b\nVw\ntR." % (protocol, bytes(executed)) for protocol in range(2, 6)]
    for data in ((tmp_path / "arrays.npz").read_bytes(), *pickles):
        kind = "a zip archive" if data.startswith(b"PK") else "a pickle, which may execute anything"
        for parse, remedy in (
            (parse_alignment, "Pass these as plain text"),
            (parse_structure, "Pass an mmCIF or PDB file"),
        ):
            with pytest.raises(UserError, match=f"^features: is {kind}.*{remedy}[.]$"):
                parse(data, "features")
    assert not executed.exists()


# ---- letters and text


def test_tables_of_letters() -> None:
    """HHblits reads B, Z and U as D, E and C. Other letters than the twenty are X in the residues of a protein."""
    assert encode("BZUJOX").tolist() == [3, 6, 4, 20, 20, 20]
    assert encode_residues("ABZUJOXcv", "x").tolist() == [0, *[20] * 6, 4, 19]
    assert (encode_residues("AB", "x").dtype, encode("AB").dtype) == (np.uint8, np.uint8)
    assert as_row("acBZUJOX") == "ACDECXXX"
    assert decode(np.arange(22)) == RESTYPES + "X-"
    assert refusal(encode, "MKV*", "x") == (
        "x: has '*' at position 4, which is not an amino acid. Correct or remove it."
    )
    assert refusal(encode_residues, "1", "x").startswith("x: has '1' at position 1, ")
    assert "(U+0378 without a name)" in refusal(encode, "\u0378")


def test_a_sequence_is_cleaned_up() -> None:
    assert plain_sequence(" mk\u00a0v\n\u200bW\u00ad*\n") == "MKVW"
    assert plain_sequence("MK**") == "MK*"
    assert plain_sequence("MKß") == "MKß"


@pytest.mark.parametrize(
    ("sequence", "nucleic"),
    [("ACGACGACGA", True), ("ACGACGACG", False), ("ACGTUNACGT", True), ("AGAGAGAGAGT", False), ("ACGACGACGAX", False)],
)
def test_ten_letters_with_a_c_and_g_are_nucleic(sequence: str, nucleic: bool) -> None:
    assert is_nucleic(sequence) is nucleic


PICKLE = "a pickle, which may execute anything when it is read"


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"%PDF-1.4", "a PDF document"),
        (b"PK\x03\x04", "a zip archive or an office document"),
        (b"\xd0\xcf\x11\xe0", "an office document"),
        (b"{\\rtf1", "an office document"),
        (b"<!DOCTYPE HTML>", "a web page"),
        (b"<html>", "a web page"),
        *((bytes((0x80, protocol)), PICKLE) for protocol in (2, 3, 4, 5)),
        *((bytes((0x80, protocol)), None) for protocol in (1, 6)),
        (b">q\n%PDF-", None),
    ],
)
def test_documents_are_known_by_their_first_bytes(data: bytes, kind: str | None) -> None:
    assert document_kind(data) == kind
    if kind:
        assert refusal(plain_text, data, "x") == (
            f"x: is {kind}, not sequences or an alignment. Pass these as plain text."
        )


def test_text_has_unix_line_ends_and_no_byte_order_mark() -> None:
    assert plain_text(b"\xef\xbb\xbfa\r\nb\rc\n", "x") == b"a\nb\nc\n"
    assert plain_text("é\r", "x") == "é\n".encode()
    assert refusal(plain_text, b"a\nb\n\xff\n", "x") == ("x: line 3 is not UTF-8 text. Save the file as UTF-8.")


def test_an_alignment_has_rows_deletions_and_names_of_one_number() -> None:
    rows, deletions = np.zeros((2, 3), np.uint8), np.zeros((2, 3), np.int32)
    assert len(Alignment(rows, deletions, ["a", "b"])) == 2
    for wrong in (
        (rows[0], deletions[0], ["a", "b", "c"]),
        (rows, deletions[:1], ["a", "b"]),
        (rows, deletions, ["a"]),
    ):
        with pytest.raises(ValueError, match=r"rows .*, deletions .*, \d names"):
            Alignment(*wrong)
    whole = Alignment(rows, deletions, ["a", "b"], np.array([0, 7], np.uint64), stands_alone=False)
    part = whole.select(slice(1, 2))
    assert (part.names, part.pair_keys, part.stands_alone) == (["b"], np.array([7]), False)
    assert Alignment(rows, deletions, ["a", "b"]).select([1]).pair_keys is None
    assert Alignment(rows, deletions, ["a", "b"]).stands_alone


def test_what_the_first_row_may_be() -> None:
    alignment = parse_a3m(">q\nMKV\n")
    assert alignment.check_query() is alignment
    assert alignment.check_query("mkv") is alignment
    assert refusal(alignment.check_query, "MKVW") == (
        "alignment: its first row has 3 residues, the query has 4. Pass the alignment that was made for this query."
    )
    assert refusal(alignment.check_query, "MAW", "x") == (
        "x: its first row differs from the query at 2 of 3 residues, first at 2 (K, not A). Pass the alignment that "
        "was made for this query."
    )
    empty = Alignment(np.zeros((1, 0), np.uint8), np.zeros((1, 0), np.int32), ["q"])
    assert refusal(empty.check_query) == ("alignment: the query has no residues. Put the query's own sequence first.")
    nucleic = "looks like nucleic acid (only A, C, G, T, U, N). WarpFold folds proteins."
    assert refusal(parse_a3m, ">q\nACGUACGUACGU\n", "x") == f"x: {nucleic}"
    # The row has C for U, so the letters of the query count.
    assert refusal(Alignment.of_query, "ACGUACGUACGU", "x") == f"x: {nucleic}"
    assert Alignment.of_query("ACGWACGTACGT").names == ["query"]
    assert Alignment.of_query("MKV").deletions.tolist() == [[0, 0, 0]]


# ---- tables


@pytest.mark.parametrize(
    ("text", "titles", "rows"),
    [
        ("id,sequence\na,MK\n", ["id", "sequence"], [("a", "MK")]),
        ("\n\nsep=|\nid|x|sequence\na,b|1| M  K \n", ["id", "x", "sequence"], [("a,b", "M K")]),
        ("Name;SEQ\na;MK;more\n;\nb;\n", ["id", "sequence"], [("a", "MK"), ("b", "")]),
        ("name,id,seq,sequence\na,b,c,d\n", ["name", "id", "seq", "sequence"], [("b", "d")]),
        ("id,sequence;x\na,MK\n", ["id", "sequence;x"], None),
        ("id\tsequence,x,\n", ["id\tsequence", "x", ""], None),
        ('id,sequence\n"a, ""b""","M\nK"\n', ["id", "sequence"], [('a, "b"', "M K")]),
        ('id, "sequence"\na, "M,K"\n', ["id", "sequence"], [("a", "M,K")]),
        ("id\n", ["id"], None),
        ("", [], None),
    ],
)
def test_columns_of_tables(text: str, titles: list[str], rows: list[tuple[str, str]] | None) -> None:
    assert table_titles(text, "x") == titles
    if rows is not None:
        assert table_rows(text, "x", ("id", "sequence")) == rows
        assert table_rows(text, "x", ("sequence",)) == [row[1:] for row in rows]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "id,a,b,c,d,e,f,g\nx\n",
            "x: has no columns id and sequence, but id, a, b, c, d, e, and 2 more. Its first line must name them: "
            "id,sequence.",
        ),
        ("id,sequence\n\n , \n", "x: has no records below its first line. Pass id and sequence in each."),
        ("id,x,sequence\na,b,MK\n\nc,MK\n", "x: line 4 has no id or no sequence. Complete it."),
        ('id,sequence\na,"MK\n', "x: line 2: unexpected end of data. Correct the table."),
    ],
)
def test_tables_that_cannot_be_read(text: str, message: str) -> None:
    assert refusal(table_rows, text, "x", ("id", "sequence")) == message


# ---- FASTA


def test_chains_of_a_record_are_separated_only_if_they_may_be() -> None:
    text = ">a x\nMK*/v:W*\n>b\nmk*\n"
    assert parse_fasta(text, chains=True) == [("a x", "MK:V:W"), ("b", "MK")]
    for separator in ":/":
        assert refusal(parse_fasta, f">a\nM{separator}K\n") == (
            f"<fasta>: record 1, 'a', position 2 has '{separator}', which is not an amino acid. Correct or remove it"
        )
    assert refusal(parse_fasta, f">{'n' * 41}\n\n>b\nMK\n", "x") == (
        f"x: record '{'n' * 37}...' has no sequence. Remove it or complete the file"
    )
    assert refusal(parse_fasta, f">b\nMK\n>{'n' * 40}\nMKV1é2\n", "x") == (
        f"x: record 2, '{'n' * 40}', position 4 has '1', which is not an amino acid. Correct or remove it"
    )
    assert "position 3 has 'é' (U+00E9" in refusal(parse_fasta, ">a\nMKé1\n")
    assert refusal(parse_fasta, ">a\nM\0\n", "x") == "x: has NUL bytes, so it is not FASTA text. Export it again."
    assert refusal(parse_fasta, "a\nM\n", "x") == (
        "x: does not start with a '>' header line. Pass FASTA or an alignment."
    )


def test_fasta_is_written_in_lines_of_80_letters() -> None:
    assert write_fasta([("a b", "M" * 161), ("c", "K" * 80), ("d", "")]) == (
        f">a b\n{'M' * 80}\n{'M' * 80}\nM\n>c\n{'K' * 80}\n>d\n"
    )
    assert write_fasta([("a", "MKV"), ("", "M"), ("d", "")], width=2) == ">a\nMK\nV\n>\nM\n>d\n"
    assert write_fasta([("a", "M" * 100), ("d", "")], width=0) == f">a\n{'M' * 100}\n>d\n"
    assert write_fasta([]) == ""


def test_a3m_is_written_with_x_for_insertions() -> None:
    text = ">q\nMKVW\n>a b\nxM-xxVxW\n>c\n----\n"
    assert write_a3m(parse_a3m(text)) == text
    assert write_a3m(parse_a3m(">q\nMKV\n>r\naMKVwww\n")) == ">q\nMKV\n>r\nxMKV\n"


# ---- alignments: limits, blocks and messages


@pytest.mark.parametrize("characters", [1, 7, 11, 1 << 22])
def test_blocks_of_rows_make_no_difference(characters: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_BLOCK_CHARACTERS", characters)
    rows = ["MKV", "aM-Vww", "wwwMaKcV", "---", "a-b-c-", "MKV"]
    alignment = parse_a3m("".join(f">r\n{row}\n" for row in rows))
    assert [decode(row) for row in alignment.rows] == ["MKV", "M-V", "MKV", "---", "---", "MKV"]
    assert alignment.deletions.tolist() == [[0] * 3, [1, 0, 0], [3, 1, 1], [0] * 3, [1, 1, 1], [0] * 3]
    aligned = ["M-K--V", "MA-CWV", "AAAAAA", "------", "-M---V"]
    alignment = parse_a3m("".join(f">r\n{row}\n" for row in aligned))
    assert [decode(row) for row in alignment.rows] == ["MKV", "M-V", "AAA", "---", "--V"]
    assert alignment.deletions.tolist() == [[0] * 3, [0, 1, 2], [0, 1, 2], [0] * 3, [0, 1, 0]]


def test_a_block_has_about_a_number_of_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_BLOCK_CHARACTERS", 7)
    assert formats._row_blocks(5, 3) == [slice(0, 2), slice(2, 4), slice(4, 6)]
    assert formats._row_blocks(2, 8) == [slice(0, 1), slice(1, 2)]
    assert formats._row_blocks(9, 0) == [slice(0, 7), slice(7, 14)]
    assert formats._row_blocks(0, 3) == []


@pytest.mark.parametrize(
    ("text", "query", "message"),
    [
        (" \n\0\n", None, "x: is empty. Pass an alignment with at least the query's row."),
        ("CLUSTAL W\n", None, "x: is a CLUSTAL file. Pass A3M, Stockholm or aligned FASTA."),
        ("MK1\nMKV\n", None, "x: is not an alignment that WarpFold knows. Pass A3M, Stockholm or aligned FASTA."),
        ("MKV\nMK1\n", None, "x: is not an alignment that WarpFold knows. Pass A3M, Stockholm or aligned FASTA."),
        ("MKV MKV\n", None, "x: is not an alignment that WarpFold knows. Pass A3M, Stockholm or aligned FASTA."),
        ("MKV\nMKV\0\n", None, "x: is not an alignment that WarpFold knows. Pass A3M, Stockholm or aligned FASTA."),
        (
            "MKV\nM.-\nM1V\n", None,
            "x: record 3, 'row 3', position 2 has '1', which is not an amino acid. Correct or remove it",
        ),
        (
            "MKV\nM.-\nMK\nM\n", None,
            "x: row 3, 'row 3', has 2 columns, the first row 3. Align all rows to the query.",
        ),
        (
            f">q\nMKV\n>{'n' * 41}\nMaK\n", None,
            f"x: row 2, '{'n' * 37}...', has 2 upper-case letters and gaps, the first row 3. Align all rows to the "
            "query.",
        ),
        (">q\nMKV\n>r\nM1V\n", None, "x: record 2, 'r', position 2 has '1', which is not an amino acid. Correct or "
         "remove it"),
        (">q\nM-V\n>r\nMaKV\n", None, "x: its first row, the query, has gaps. Put the query's own sequence first."),
        (">ss_pred\nCCC\n", None, "x: holds no sequence. Pass an alignment with at least the query's row."),
        (
            "#3\t1\n>q\nMKVW\n", None,
            "x: its first line announces 3 columns, the rows have 4. Make the alignment again.",
        ),
        (
            "#2,2\t1,1\n>q\nMKVW\n", None,
            "x: is the alignment of a complex of 2 chains (2, 2 residues). Pass the alignment of one chain.",
        ),
        (
            "#2,2\t1,1\n>q\nMKVW\n", "MV",
            "x: is the alignment of a complex of 2 chains (2, 2 residues), none of them the query. Pass the "
            "alignment of one chain.",
        ),
        (
            ">q\nMK\n\0>r\nVW\n", None,
            "x: holds 2 alignments with NUL bytes between them (an MMseqs2 database), and it is unknown which is of "
            "the query. Write a file per query.",
        ),
        (
            ">q\nMK\n\0>r\nVW\n", "AA",
            "x: holds 2 alignments with NUL bytes between them (an MMseqs2 database), none or several of them of the "
            "query. Write a file per query.",
        ),
        (
            ">q\nMK\n\0>r\nMK\n\0>s\nA\n", "MK",
            "x: holds 3 alignments with NUL bytes between them (an MMseqs2 database), none or several of them of the "
            "query. Write a file per query.",
        ),
        (STO, None, "x: is truncated (it does not end with '//'). Fetch or make it again."),
        (f"{STO}q MK\n//\n#\n", None, "x: holds several alignments. Write one file for each."),
        (f"{STO}q MK\nr M K\n//\n", None, "x: line 3 is not a name and a row. Make the file again."),
        (f"{STO}//\n", None, "x: holds no rows. Pass an alignment with at least the query's row."),
        (
            f"{STO}q MKV\n#=GC RF xx\n//\n", None,
            "x: #=GC RF has 2 columns, the rows 3. Make the file again.",
        ),
        (
            f"{STO}q MKV\n#=GC RF x.x\n//\n", None,
            "x: has no row of the query: the first row, 'q', does not fill the match columns. Pass the query's "
            "sequence too.",
        ),
        (
            f"{STO}q MKV\nr MK-\n//\n", "MA",
            "x: none of its 2 rows is the query (2 residues), and its match columns are not marked. Pass the alignment "
            "that was made for this query.",
        ),
        (
            f"{STO}q MKV\nr MK-\n#=GC RF xxx\n//\n", "MA",
            "x: none of its 2 rows is the query (2 residues), and its match columns are 3. Pass the alignment that was "
            "made for this query.",
        ),
    ],
)  # fmt: skip
def test_refusals_of_alignments_in_whole(text: str, query: str | None, message: str) -> None:
    assert refusal(parse_alignment, text, "x", query) == message


def content(alignment: Alignment) -> tuple[list[str], list[str], list[list[int]]]:
    return alignment.names, [decode(row) for row in alignment.rows], alignment.deletions.tolist()


@pytest.mark.parametrize(
    ("text", "query", "names", "rows"),
    [
        # The consensus of the HH-suite is left out after predictions, before its NAME, and before the expected query.
        (">ss_pred\nCC\n>q_consensus\nAA\n>q\nMK\n", None, ["q"], ["MK"]),
        (">Q_consensus\nAA\n>q x\nMK\n", None, ["q x"], ["MK"]),
        (">p_consensus\nAA\n>q x\nMK\n", None, ["p_consensus", "q x"], ["AA", "MK"]),
        (">p_consensus\nAA\n>q x\nMK\n", "mk", ["q x"], ["MK"]),
        (">p_consensus\nAA\n>q x\nMK\n", "AA", ["p_consensus", "q x"], ["AA", "MK"]),
        (">q_consensus\nMK\n>q x\nMK\n", "MK", ["q_consensus", "q x"], ["MK", "MK"]),
        (">q_consensus\nMK\n>q x\nMK\n", None, ["q x"], ["MK"]),
        (">q\nMK\n>x_consensus\nAA\n>ss_dssp\nCC\n>r\nM-\n", None, ["q", "r"], ["MK", "M-"]),
        (">sa_conf\nCC\n>q\nMK\n", None, ["q"], ["MK"]),
        (">consensus\nMK\n", None, ["consensus"], ["MK"]),
        (">consensus\nMK\n>\nMA\n", None, ["consensus", ""], ["MK", "MA"]),
        # A2M of which the query has lower-case letters, and the same letters as another query.
        (">q\nmK\n>r\n.A\n", "MK", ["q", "r"], ["MK", "-A"]),
        (">q\nmK\n>r\nA\n", "K", ["q", "r"], ["K", "A"]),
        # Dots are gaps only if the rows differ in length without them.
        (">q\nMK\n>r\nM.\n", None, ["q", "r"], ["MK", "M-"]),
        (">q\nM.K\n>r\nMaK\n", None, ["q", "r"], ["MK", "MK"]),
        ("MK\nM.\n-a\n", None, ["row 1", "row 2", "row 3"], ["MK", "M-", "-A"]),
        ("M-K\nMA-\n", None, ["row 1", "row 2"], ["MK", "M-"]),
        # Entries of an MMseqs2 database; comments before the first row.
        ("\n#a\n#b\n>q\nMK\n\0\n#c\n#d\n>r\nVW\n\0", "VW", ["r"], ["VW"]),
        (">q\nMuK\n\0>r\nMU\n\0", "MC", ["r"], ["MC"]),
        (">q\nMK\n\0\n\0", None, ["q"], ["MK"]),
        ("#3\t2\n#x 1\n>q\nMKV\n>r\nM-V\n", None, ["q", "r"], ["MKV", "M-V"]),
        # Rows that are empty in the chain of the query are left out.
        ("#2,1\t1,1\n>q\nMKV\n>r\n--V\n>s\n-K-\n", "mk", ["q", "s"], ["MK", "-K"]),
    ],
)  # fmt: skip
def test_which_rows_are_read(text: str, query: str | None, names: list[str], rows: list[str]) -> None:
    alignment = parse_alignment(text, "x", query)
    assert content(alignment)[:2] == (names, rows)


@pytest.mark.parametrize(
    ("text", "lengths", "copies", "rest"),
    [
        (b"#120,88\t1,2\n>q", [120, 88], [1, 2], b">q"),
        (b"# 4 , 3 \t 10,9999 \n#x\n#\nMKV", [4, 3], [10, 9999], b"MKV"),
        (b"#999999999 1\n#5\t6\n", [5], [6], b""),
        (b"#,4,,3 1 ,1,\n", [4, 3], [1, 1], b""),
        (b"#a 1\n>q", [], [], b">q"),
        (b">q\n#4\t1", [], [], b">q\n#4\t1"),
    ],
)
def test_lengths_and_copies_of_the_first_lines(text: bytes, lengths: list[int], copies: list[int], rest: bytes) -> None:
    assert announced(text, "x") == (lengths, copies, rest)


@pytest.mark.parametrize(
    "line", ["#1000000000\t1", "#1\t10000", "#0\t1", "#4,3\t1,0", "#4,3\t1", "#4\t1,1", "#0,3\t1,1"]
)
def test_impossible_lengths_and_copies(line: str) -> None:
    assert refusal(announced, f"{line}\n".encode(), "x") == (
        "x: its first line announces impossible lengths or copies. Make the alignment again."
    )
    assert refusal(announced, b"#4 3 " + b"2" * 50 + b"\n", "x") == (
        f"x: its line '#4 3 {'2' * 35}' is not understood. Write the lengths, a tab, and the copies of the chains, "
        "such as #120,88<TAB>1,2, or remove the line."
    )
    assert refusal(announced, b"#4\n", "x").startswith("x: its line '#4' is not understood. Write the lengths, a tab,")


def test_what_is_the_alignment_of_a_complex() -> None:
    for line in (b"#4,3\t1,1", b"\xef\xbb\xbf\n# 4 , 3 \t1,1", b"#4, 1"):
        assert is_complex(line)
    for line in (b"#4\t1", b">q\n#4,3\t1,1", b"#a,3\t1"):
        assert not is_complex(line)


def test_refusals_of_complexes_in_whole() -> None:
    assert refusal(parse_complex_a3m, ">q\nMK\n", "x") == (
        "x: its first line is not #lengths<TAB>copies, such as #120,88<TAB>1,2. Correct it."
    )
    assert refusal(parse_complex_a3m, "#2,1\t1,1\n>q\nM-V\n", "x") == (
        "x: its first row, the chains' own sequences, has gaps. Make the alignment again."
    )
    assert refusal(parse_chain_alignments, b">q\nMK\n>r\nM-\n\0>s\nV\n\0>t\nA\n", "x", None, True) == (
        "x: is named as pairs, but its 3 alignments have 2, 1, 1 rows. Write paired rows in the same order, or rename "
        "the file."
    )
    # Without the header of each entry, the file is one alignment, which has NUL.
    for text in (b">q\nMK\n\0junk\n", b"junk\n\0>q\nMK\n"):
        refusal(parse_chain_alignments, text, "x")
    nucleic = "x: looks like nucleic acid (only A, C, G, T, U, N). WarpFold folds proteins."
    assert refusal(parse_chain_alignments, b"#3,12\t1,1\n>q\nMKVACGTACGTACGT\n", "x") == nucleic


def test_chains_of_a_complex_in_whole() -> None:
    """Of three chains: rows of one chain, of two, of all, and of none."""
    text = "#2,1,2\t1,1,1\n\0>q\nMKVAC\n>r\nM----\n>s\n-KxV--\n>t\nM-VA-\n>u\n-----\n>v\n---AC\n"
    found = [[(*content(part), part.stands_alone) for part in chain] for chain in parse_complex_a3m(text, "x")]
    assert found == [
        [
            (["q", "r"], ["MK", "M-"], [[0, 0], [0, 0]], True),
            (["q", "s", "t"], ["MK", "-K", "M-"], [[0, 0], [0, 0], [0, 0]], False),
        ],
        [
            (["q"], ["V"], [[0]], True),
            (["q", "s", "t"], ["V", "V", "V"], [[0], [1], [0]], False),
        ],
        [
            (["q", "v"], ["AC", "AC"], [[0, 0], [0, 0]], True),
            (["q", "t"], ["AC", "A-"], [[0, 0], [0, 0]], False),
        ],
    ]
    keys = [chain[1].pair_keys for chain in parse_complex_a3m(text, "x")]
    first, second, third = (key.tolist() for key in keys if key is not None)
    assert first == second
    assert (first[0], third[0], third[1]) == (0, 0, first[2])
    assert len({*first, *third}) == 3


def test_rows_with_one_index_are_pairs_only_if_the_name_says_so() -> None:
    text = b"\0\r\n>q\nMK\n>r\nM-\n\0>s\nV\n>t\nV\n\0"
    for part in parse_chain_alignments(text, "x"):
        assert (part.pair_keys, part.stands_alone) == (None, True)
    first, second = parse_chain_alignments(text, "x", row_by_row=True)
    assert first.pair_keys is not None
    np.testing.assert_array_equal(first.pair_keys, second.pair_keys)  # type: ignore[arg-type]
    assert len({0, *first.pair_keys.tolist()}) == 3
    (one,) = parse_chain_alignments(b">q\nMK\n\0", "x", row_by_row=True)
    assert one.pair_keys is None


# ---- Stockholm


def test_rows_of_stockholm_in_whole() -> None:
    """A name that occurs twice in a block belongs to two rows, and its description is listed once."""
    text = (
        f"{STO}#=GF ID x\n#=GS a DE first  note\n#=GS a DE first  note\n#=GS a DE second\n#=GS b AC x y\n#=GS c DE\n"
        "a MK\na M-\nb -K\n#=GR a PP 99\n#=GC RF x.\n\na V\na -\nb W\n#=GC RF x\n#=GC other x\n//\n\n"
    )
    rows, reference = stockholm_rows(text.encode(), "x")
    assert rows == [
        ("a", "first  note second", b"MKV"),
        ("a", "first  note second", b"M--"),
        ("b", "", b"-KW"),
    ]
    assert reference == b"x.x"
    assert stockholm_rows(f"{STO}a MK\n//".encode(), "x") == ([("a", "", b"MK")], b"")


@pytest.mark.parametrize(
    ("rows", "reference", "query", "expected"),
    [
        ("q MK.V\nr MKaV\n", "xx.x", None, (["q", "r"], ["MKV", "MKV"], [[0, 0, 0], [0, 0, 1]])),
        ("q MK.V\nr -KaV\n", "", None, (["q", "r"], ["MKV", "-KV"], [[0, 0, 0], [0, 0, 1]])),
        # The first row with the residues of the query leads, and the others keep their order.
        (
            "a MKV\nb M-V\nc MV-\nd -MV\n", "", "mv",
            (["b", "a", "c", "d"], ["MV", "MV", "M-", "-V"], [[0, 0], [0, 1], [0, 1], [0, 1]]),
        ),
        # Equal numbers of residues are not enough. The match columns are the query's.
        ("a MKV\nb MV~\n", "x.x", "MW", (["query", "a", "b"], ["MW", "MV", "M-"], [[0, 0], [0, 1], [0, 1]])),
        ("a MKV\nb _V~\n", "x.x", "MV", (["query", "a", "b"], ["MV", "MV", "--"], [[0, 0], [0, 1], [0, 1]])),
        ("a MKUV\n", "", "MKCV", (["a"], ["MKCV"], [[0, 0, 0, 0]])),
    ],
)  # fmt: skip
def test_the_query_of_stockholm(rows: str, reference: str, query: str | None, expected: object) -> None:
    marked = f"#=GC RF {reference}\n" if reference else ""
    alignment = parse_stockholm(f"{STO}{rows}{marked}//\n", "x", query)
    assert content(alignment) == expected
    assert (alignment.rows.dtype, alignment.deletions.dtype) == (np.uint8, np.int32)
