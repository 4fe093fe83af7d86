"""Read FASTA, A3M, A2M, Stockholm and plain rows: content, and the same content after writing."""

import gzip
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from warpfold.data.formats.alignment import (
    Alignment,
    decode,
    encode,
    is_nucleic,
    parse_a3m,
    parse_alignment,
    parse_fasta,
    read_alignment,
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
