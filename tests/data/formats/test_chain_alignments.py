"""Read alignments of several chains: ColabFold's of a complex, parts separated by NUL, folders; match chains."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from warpfold.data.formats.alignment import Alignment, decode, parse_chain_alignments
from warpfold.data.formats.input_files import ChainAlignments, read_chain_alignments
from warpfold.errors import UserError

COMPLEX = """#4,3\t1,2
>101\t102
ACDEMKV
>x1\tx2
ACDyEMKL
>y1\ty2
CCDEyM-V
>101
ACDE---
>u
A-wCE---
>102
----MKV
>v
-----KV
"""


def texts(alignment: Alignment) -> list[str]:
    return [decode(row) for row in alignment.rows]


def refusal(data: str, *args: object) -> str:
    with pytest.raises(UserError) as error:
        parse_chain_alignments(data.encode(), "x.a3m", *args)  # type: ignore[arg-type]
    assert str(error.value).startswith("x.a3m: ")
    assert re.search("[.;] ", str(error.value))
    return str(error.value)


@pytest.mark.parametrize(
    "text",
    [COMPLEX, COMPLEX.replace(">101\nACDE", "\0>101\nACDE"), "\ufeff" + COMPLEX.replace("\n", "\r\n")],
    ids=["plain", "NUL between the parts", "byte order mark and CRLF"],
)
def test_the_alignment_of_a_complex(text: str) -> None:
    a, a_pairs, b, b_pairs = parse_chain_alignments(text.encode(), "x.a3m")
    assert texts(a) == ["ACDE", "ACDE", "A-CE"]
    assert texts(b) == ["MKV", "MKV", "-KV"]
    assert texts(a_pairs) == ["ACDE", "ACDE", "CCDE"]
    assert texts(b_pairs) == ["MKV", "MKL", "M-V"]
    assert (a.stands_alone, b.stands_alone, a_pairs.stands_alone, b_pairs.stands_alone) == (True, True, False, False)
    np.testing.assert_array_equal(a_pairs.deletions, [[0] * 4, [0, 0, 0, 1], [0] * 4])
    np.testing.assert_array_equal(b_pairs.deletions[2], [1, 0, 0])  # inserted between the chains
    np.testing.assert_array_equal(a_pairs.pair_keys, b_pairs.pair_keys)
    assert len(set(a_pairs.pair_keys.tolist())) == 3  # type: ignore[union-attr]
    assert a_pairs.pair_keys[0] == 0  # type: ignore[index]


def test_pairs_of_two_files_are_not_mixed() -> None:
    first = parse_chain_alignments(COMPLEX.encode(), "x.a3m")[1].pair_keys
    other = parse_chain_alignments(COMPLEX.replace("MKL", "MRL").encode(), "x.a3m")[1].pair_keys
    assert not set(first[1:].tolist()) & set(other[1:].tolist())  # type: ignore[index]


def test_a_row_across_some_of_the_chains_is_a_pair_of_these() -> None:
    alignments = parse_chain_alignments(b"#2,2,2\t1,1,1\n>q\nACDEFG\n>r\nA---FG\n>s\n--DE--\n", "x.a3m")
    assert [(texts(alignment), alignment.stands_alone) for alignment in alignments] == [
        (["AC"], True), (["AC", "A-"], False), (["DE", "DE"], True), (["FG"], True), (["FG", "FG"], False)
    ]  # fmt: skip


def test_alignments_with_nul_between_them() -> None:
    text = b">101\nACDE\n>a\nCCDE\n\0>102\nMKV\n>b\nM-V\n\0"
    first, two = parse_chain_alignments(text, "x.a3m")
    assert (texts(first), texts(two)) == (["ACDE", "CCDE"], ["MKV", "M-V"])
    assert first.stands_alone
    assert first.pair_keys is None
    first, two = parse_chain_alignments(text, "pair.a3m", row_by_row=True)
    np.testing.assert_array_equal(first.pair_keys, two.pair_keys)
    assert (first.stands_alone, two.stands_alone) == (False, False)
    assert "have 2, 1 rows" in refusal(text.decode().replace(">b\nM-V\n", ""), None, True)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def kinds(alignments: ChainAlignments, sequence: str) -> list[tuple[str, bool]]:
    return [(alignment.names[1], alignment.stands_alone) for alignment in alignments.of(sequence)]


def test_a_folder_for_each_chain(tmp_path: Path) -> None:
    """AlphaFold-Multimer's layout, template hits included; files are stacked in its order."""
    for chain, query in {"A": "ACDE", "B": "MKVU"}.items():
        for name in ("uniprot_hits", "mgnify_hits", "uniref90_hits", "pdb_hits"):
            rows = f"{chain} {query}\n{name} {query}\n"
            write(tmp_path / f"msas/{chain}/{name}.sto", f"# STOCKHOLM 1.0\n\n{rows}//\n")
    write(tmp_path / "msas/chain_id_map.json", "{}")
    alignments = read_chain_alignments([tmp_path / "msas"], ["MKVU", "ACDE"], "q.fasta")
    expected = [("uniref90_hits", True), ("mgnify_hits", True), ("uniprot_hits", False)]
    assert kinds(alignments, "ACDE") == kinds(alignments, "MKVU") == expected
    assert alignments.of("MKVC") == alignments.of("MKVU")  # in an alignment they are one sequence
    assert (alignments.of("GGGG"), alignments.unused) == ([], [])


def test_files_as_alphafold_writes_them_are_cut_as_it_cuts_them(tmp_path: Path) -> None:
    rows = "".join(f"r{i} ACDE\n" for i in range(600))
    for name in ("mgnify_hits.sto", "mgnify.sto"):
        write(tmp_path / name, f"# STOCKHOLM 1.0\n\nq ACDE\n{rows}//\n")
    write(tmp_path / "mgnify_hits.a3m", ">q\nACDE\n" + "".join(f">{row[:-6]}\nACDE\n" for row in rows.splitlines()))
    alignments = read_chain_alignments([tmp_path], ["ACDE"], "q.fasta")
    assert sorted(map(len, alignments.of("ACDE"))) == [501, 601, 601]
    (note,) = alignments.notes
    assert note.startswith(f"{tmp_path.name}/mgnify_hits.sto: the first 501 of 601 rows are used, as in AlphaFold. ")


def test_alignments_that_belong_to_no_chain(tmp_path: Path) -> None:
    write(tmp_path / "found/a.a3m", ">q\nACDE\n>r\nAC-E\n")
    other = write(tmp_path / "found/b.a3m", ">q\nGGGG\n>r\nGG-G\n")
    alignments = read_chain_alignments([tmp_path / "found"], ["ACDE", "MKV"], "q.fasta")
    assert (kinds(alignments, "ACDE"), alignments.unused) == ([("r", True)], ["found/b.a3m"])  # not named by the user
    with pytest.raises(UserError, match=r"b\.a3m: its first row is not the sequence of any record in q\.fasta. Pass"):
        read_chain_alignments([other], ["ACDE", "MKV"], "q.fasta")
    with pytest.raises(UserError, match=r"differs from the query at 4 of 4 residues"):  # the exact reason
        read_chain_alignments([other], ["ACDE", "ACDE"], "q.fasta")


def test_a_complex_among_the_alignments(tmp_path: Path) -> None:
    path = write(tmp_path / "x.a3m", COMPLEX)
    alignments = read_chain_alignments([path], ["MKV", "ACDE"], "q.fasta")
    assert [len(alignments.of(sequence)) for sequence in ("ACDE", "MKV")] == [2, 2]
    (alone,) = read_chain_alignments([path], ["MKV"], "q.fasta").of("MKV")  # copies of one protein have no pairs
    assert texts(alone) == ["MKV", "MKL", "M-V", "MKV", "-KV"]
    assert alone.stands_alone
    with pytest.raises(UserError, match="none of them the query"):
        read_chain_alignments([path], ["MKW"], "q.fasta")


letters = st.sampled_from("ACDEX")
cells = st.sampled_from(["A", "C", "-", "-", "aC", "xy-"])


@drawn(st.data(), st.lists(st.integers(1, 5), min_size=2, max_size=4), st.integers(0, 6))
@settings(max_examples=60, deadline=None)
def test_no_residue_of_a_complex_is_lost(data: st.DataObject, lengths: list[int], depth: int) -> None:
    query = "".join(data.draw(letters) for _ in range(sum(lengths)))
    rows = ["".join(data.draw(cells) for _ in query) for _ in range(depth)]
    announced = f"#{','.join(map(str, lengths))}\t{','.join('1' * len(lengths))}\n"
    text = announced + f">q\n{query}\n" + "".join(f">r{i}\n{row}\n" for i, row in enumerate(rows))
    alignments = parse_chain_alignments(text.encode(), "x.a3m")
    sequences = [query[sum(lengths[:k]) : sum(lengths[: k + 1])] for k in range(len(lengths))]
    assert "".join(alignment.query for alignment in alignments if alignment.stands_alone) == "".join(sequences)
    residues = sum(letter in "AC" for row in rows for letter in row)
    below = [row for alignment in alignments for row in alignment.rows[1:]]
    assert sum(int((row != 21).sum()) for row in below) == residues
    assert all((row != 21).any() for row in below)
