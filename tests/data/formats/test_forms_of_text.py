"""Read sequences and alignments in the forms that other programs and people write."""

from pathlib import Path

import pytest

from warpfold.data.example.hits import parse_hhr
from warpfold.data.example.job_files import read_jobs
from warpfold.data.example.query_files import read_query_files
from warpfold.data.formats.alignment import encode, parse_a3m, parse_chain_alignments, table_rows, upper
from warpfold.errors import UserError

A, B = "MSGMKKLYEYTVTTLDEFLGK", "EKLKEFILNTSKDKIYKLTITNRAD"


def read(tmp_path: Path, name: str, text: str) -> list[tuple[str, tuple[str, ...], str]]:
    """Return the queries of a file: name, sequences, error."""
    path = tmp_path / name
    path.write_text(text)
    return [(query.name, query.sequences, query.error) for query in read_query_files([path]).found]


@pytest.mark.parametrize(
    "header", ["#21,25\t1,1", "#21,25    1,1", "#21, 25\t1, 1", "# 21 , 25  1 ,1 ", "\ufeff#21,25 1,1"]
)
def test_colabfolds_header_may_have_any_blanks(header: str, tmp_path: Path) -> None:
    text = f"{header}\n>101\t102\n{A}{B}\n>hit\n{A[:5]}-{A[6:]}{B}\n"
    assert [block.query for block in parse_chain_alignments(text.encode(), "x.a3m") if block.stands_alone] == [A, B]
    ((_, sequences, _),) = read(tmp_path, "x.a3m", text)
    assert sequences == (A, B)


def test_one_length_with_copies_is_a_homomer(tmp_path: Path) -> None:
    ((_, sequences, _),) = read(tmp_path, "x.a3m", f"#21 2\n>101\n{A}\n")
    assert sequences == (A, A)


@pytest.mark.parametrize("name", ["my_consensus", "consensus", "Consensus of five"])
def test_the_first_row_is_the_query_whatever_it_is_called(name: str) -> None:
    alignment = parse_a3m(f">{name}\n{A}\n>h1\n{A[:5]}W{A[6:]}\n>other_consensus\n{A}\n")
    assert alignment.query == A
    assert len(alignment) == 2
    assert parse_a3m(f">{name}\n{A}\n").query == A


def test_the_consensus_of_the_hh_suite_is_left_out() -> None:
    text = f">ss_pred\n{'C' * 21}\n>q1_consensus\n{A[:5]}W{A[6:]}\n>q1 a protein\n{A}\n"
    assert parse_a3m(text).query == A
    text = f">Consensus\n{A[:5]}W{A[6:]}\n>q1 a protein\n{A}\n"
    assert parse_a3m(text, query=A).query == A


def test_proteinmpnns_records_have_names_and_chains(tmp_path: Path) -> None:
    text = (
        f">bb_17, score=1.2, fixed_chains=['B'], designed_chains=['A']\n{'G' * 21}/{B}\n"
        f">T=0.1, sample=1, score=0.8, seq_recovery=0.4\n{A}/{B}\n>T=0.1, sample=2, score=0.9\n{A[::-1]}/{B}\n"
    )
    assert read(tmp_path, "bb_17.fa", text) == [
        ("bb_17", ("G" * 21, B), ""),
        ("bb_17_1", (A, B), ""),
        ("bb_17_2", (A[::-1], B), ""),
    ]


def test_ligandmpnns_records_have_names(tmp_path: Path) -> None:
    text = f">1BC8, T=0.1, seed=111\n{A}:{B}\n>1BC8, id=1, T=0.1, seed=111\n{B}:{B}\n>1BC8, id=2, T=0.1\n{A}:{A}\n"
    assert [name for name, *_ in read(tmp_path, "x.fa", text)] == ["1BC8", "1BC8_1", "1BC8_2"]


def test_equal_first_words_are_numbered(tmp_path: Path) -> None:
    text = f">protein one\n{A}\n>other\n{A}\n>protein two\n{B}\n"
    assert [(name, s) for name, s, _ in read(tmp_path, "x.fasta", text)] == [
        ("protein_1", (A,)),
        ("other", (A,)),
        ("protein_2", (B,)),
    ]


def test_a_stop_at_the_end_is_left_out_and_one_inside_is_refused(tmp_path: Path) -> None:
    queries = read(tmp_path, "x.faa", f">a\n{A}*\n>b\n{A}*:{B}*\n>c\n{A[:3]}*{A[3:]}\n")
    assert [s for _, s, _ in queries] == [(A,), (A, B), ()]
    assert "'*'" in queries[2][2]
    assert parse_a3m(f">q\n{A}*\n>h\n{A}*\n").query == A


@pytest.mark.parametrize(
    "text",
    [
        f"id;sequence\nd1;{A}\n",
        f"\ufeffsep=;\r\nid;sequence\r\nd1;{A}\r\n",
        f"id\tsequence\nd1\t{A}\n",
        f"name,seq\nd1,{A}\n",
        f"Name;Seq\nd1;{A}\n",
    ],
)
def test_tables_of_spreadsheets(text: str, tmp_path: Path) -> None:
    assert table_rows(text, "x.csv", ("id", "sequence")) == [("d1", A)]
    assert read(tmp_path, "x.csv", text) == [("d1", (A,), "")]


@pytest.mark.parametrize("letter", ["ß", "ﬁ", "ı", "ſ"])
def test_letters_that_grow_in_upper_case_are_refused(letter: str) -> None:
    assert len(upper(f"mkt{letter}")) == 4
    with pytest.raises(UserError, match=r"U\+.* at position 4"):
        encode(f"MKT{letter}")
    text = f"version: 1\nsequences:\n- protein: {{id: A, sequence: MKT{letter}}}\n"
    (job,) = read_jobs(text.encode(), ".yaml", "x", Path(), "x")
    assert "not an amino acid" in job.error


def test_letters_that_look_alike_are_named_by_code_point(tmp_path: Path) -> None:
    ((_, _, error),) = read(tmp_path, "x.fasta", ">a\nMK\u0410LV\n")
    assert "position 3" in error
    assert "U+0410 CYRILLIC CAPITAL LETTER A" in error


@pytest.mark.parametrize("blank", ["\u00a0", "\u200b", "\u200c", "\u200d", "\u2060", "\u00ad", "\ufeff"])
def test_invisible_characters_are_left_out(blank: str, tmp_path: Path) -> None:
    assert read(tmp_path, "x.fasta", f">a\n{A[:3]}{blank}{A[3:]}\n") == [("a", (A,), "")]


EMPTY = """No 2
>2xyz_B a hit of one column
Probab=9.00  E-value=1  Score=5.00  Aligned_cols=1  Identities=0%  Similarity=0.000  Sum_probs=0.0  Template_Neff=1.000


"""
HHR = f"""Query         q
Match_columns 21

 No Hit                             Prob E-value P-value  Score    SS Cols Query HMM  Template HMM
  1 1abc_A a hit                     99.0 1E-10   1E-10   99.0   0.0   21    1-21      1-21 (21)
  2 2xyz_B a hit of one column        9.0 1       1        5.0   0.0    1    5-5       7-7 (9)

No 1
>1abc_A a hit
Probab=99.00  E-value=1e-10  Score=99.00  Aligned_cols=21  Identities=100%  Similarity=1.000  Sum_probs=20.0

Q q                 1 {A}   21 (21)
T 1abc_A            1 {A}   21 (21)

{EMPTY}"""


def test_an_empty_hit_does_not_spoil_the_others() -> None:
    first, second = parse_hhr(HHR)
    assert (first.name, len(first.query_index)) == ("1abc_A", 21)
    assert (second.name, len(second.query_index)) == ("2xyz_B", 0)
    with pytest.raises(UserError, match="announces 2 aligned columns and has 0"):
        parse_hhr(HHR.replace("Aligned_cols=1 ", "Aligned_cols=2 "))
