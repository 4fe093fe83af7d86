"""Read complexes from FASTA, tables, alignments and structures, and make the assembly of each."""

import gzip
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from tests.data.entries import random_chain
from tests.data.structure.test_assemblies import assembly_text
from warpfold.data.example.pairing import pair_rows
from warpfold.data.example.query_files import (
    Complex,
    assemble,
    chain_ids,
    read_complexes,
    search_names,
    sequences_to_search,
)
from warpfold.data.formats.input_files import read_chain_alignments
from warpfold.data.structure.write import write_mmcif, write_pdb
from warpfold.errors import UserError


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


TEXT = ">H1 heavy\nACDE\n>L\nmkv\nmkv\n>H2\nACDE\n"
ALONE = [("H1", ("A",), ("ACDE",)), ("L", ("A",), ("MKVMKV",)), ("H2", ("A",), ("ACDE",))]
COLON = ">one\nACDE:MKV:\nACDE\n>two\nGGG\n"
COLONS = [("one", ("A", "B", "C"), ("ACDE", "MKV", "ACDE")), ("two", ("A",), ("GGG",))]
PDB = ">2HHB_1|Chains A, C|Hemoglobin|Homo sapiens (9606)\nACDE\n>2HHB_2|Chain B[auth K]|Hemoglobin\nMKV\n"
TABLE = [("x", ("A", "B"), ("ACDE", "MKV")), ("y_z", ("A",), ("GGG",))]


@pytest.mark.parametrize(
    ("name", "text", "as_one", "expected"),
    [
        ("pair.fasta", TEXT, False, ALONE),
        ("ab.1.fasta", TEXT, True, [("ab", ("H1", "L", "H2"), ("ACDE", "MKVMKV", "ACDE"))]),
        ("pair.fasta", ">P1\nACDE\n", True, [("P1", ("A",), ("ACDE",))]),
        ("pair.fasta", ">\nACDE\n>\nMKV\n", True, [("pair", ("A", "B"), ("ACDE", "MKV"))]),
        ("pair.fasta", COLON, False, COLONS),
        ("pair.fasta", COLON, True, COLONS),
        ("pair.fasta", PDB, True, [("pair", ("A", "C", "K"), ("ACDE", "ACDE", "MKV"))]),
        ("pair.fasta", PDB.replace("2HHB", "pdb_00002hhb"), True, [("pair", ("A", "C", "K"), ("ACDE", "ACDE", "MKV"))]),
        ("pair.fasta", PDB.partition(">2HHB_2")[0], True, [("pair", ("A", "C"), ("ACDE", "ACDE"))]),
        ("pair.fasta", PDB, False, [("2HHB_1_Chains", ("A",), ("ACDE",)), ("2HHB_2_Chain", ("A",), ("MKV",))]),
        ("q.csv", "id,sequence\nx,ACDE:MKV\n\ny/z,ggg\n", False, TABLE),
        ("q.csv", "\ufeffSequence, ID,note\r\nACDE:MKV,x,\r\nGGG,y/z,n\r\n", False, TABLE),
        ("q.csv", 'id,sequence\n"x","AC DE:\nMKV"\ny/z,GGG', False, TABLE),
        ("q.tsv", "id\tsequence\nx\tACDE:MKV\ny/z\tGGG\n", False, TABLE),
        ("q.csv", 'id, sequence\nx, "ACDE:MKV"\ny/z, GGG', False, TABLE),
        ("q.csv.gz", gzip.compress(b"id,sequence\nx,ACDE:MKV\ny/z,GGG\n", mtime=0), False, TABLE),
    ],
)
def test_records_are_proteins_or_complexes(
    tmp_path: Path, name: str, text: str | bytes, as_one: bool, expected: list[tuple]
) -> None:
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    queries = read_complexes(tmp_path / name, as_one=as_one)
    assert [(query.name, query.ids, query.sequences) for query in queries] == expected
    for query in queries:
        entities = assemble(query)[0].entity_id.tolist()
        assert [query.sequences.index(sequence) for sequence in query.sequences] == [
            entities.index(n) for n in entities
        ]


def test_a_folder_of_files(tmp_path: Path) -> None:
    write(tmp_path / "in/b.fasta", ">A\nACDE\n>B\nMKV\n")
    write(tmp_path / "in/a.csv", "id,sequence\nx,GG:GG\n")
    write(tmp_path / "in/notes.txt", "not a query")
    queries = read_complexes(tmp_path / "in", as_one=True)
    assert [(query.name, query.ids) for query in queries] == [("x", ("A", "B")), ("b", ("A", "B"))]
    write(tmp_path / "in/c.fasta", ">X\nACDE\n")
    with pytest.raises(
        UserError, match=r"c\.fasta: a record is called X in .*a\.csv too. Give each protein a unique name"
    ):
        read_complexes(tmp_path / "in")


def test_an_alignment_of_a_complex_with_copies(tmp_path: Path) -> None:
    text = "#4,3\t2,1\n>q\nACDEMKV\n>r\nACDDMKL\n>s\nACCC---\n"
    (query,) = read_complexes(write(tmp_path / "x.a3m", text))
    assert (query.name, query.ids, query.sequences) == ("x", ("A", "B", "C"), ("ACDE", "ACDE", "MKV"))
    assembly, notes = assemble(query)
    assert notes == []
    assert assembly.sym_id.tolist() == [1, 2, 1]
    assert assembly.chains[0] is assembly.chains[1]
    pairs = pair_rows([chain.pairing for chain in assembly.chains])
    rows = [assembly.chains[k].whole_rows(pairs[:, k]) for k in (0, 2)]
    np.testing.assert_array_equal(rows[0], [[0, 4, 3, 6], [0, 4, 3, 3]])  # ACDE, ACDD
    np.testing.assert_array_equal(rows[1], [[12, 11, 19], [12, 11, 10]])  # MKV, MKL
    (homodimer,) = read_complexes(write(tmp_path / "y.a3m", "#4\t2\n>q\nACDE\n>r\nACDD\n"))
    assert (homodimer.ids, homodimer.sequences) == (("A", "B"), ("ACDE", "ACDE"))
    (twice,) = read_complexes(write(tmp_path / "z.a3m", "#4,4\t1,2\n>q\nACDEACDE\n>r\nACDD----\n"))
    assert (twice.ids, twice.sequences) == (("A", "B", "C"), ("ACDE",) * 3)  # each copy is kept
    (single,) = read_complexes(write(tmp_path / "z.a3m", "#4\t1\n>q\nACDE\n>r\nACDD\n"))
    assert (single.ids, len(single.alignments[0])) == (("A",), 2)


def test_pairs_of_a_complex_keep_together_in_their_order(tmp_path: Path) -> None:
    """Row i is paired with row i, whatever their number of duplicates and their similarity to the query."""
    rng = np.random.default_rng(0)
    left, right = (["".join(rng.choice([*"ACDE"], 4)) for _ in range(700)] for _ in range(2))
    text = "#4,4\t1,1\n>q\nGGGGHHHH\n" + "".join(f">r\n{a}{b}\n" for a, b in zip(left, right))
    assembly, _ = assemble(read_complexes(write(tmp_path / "x.a3m", text))[0])
    pairs = pair_rows([chain.pairing for chain in assembly.chains])
    letters = np.array([*"ARNDCQEGHILKMFPSTWYVX-"])
    found = [
        "".join(letters[np.concatenate([assembly.chains[k].whole_rows(row[k : k + 1])[0] for k in (0, 1)])])
        for row in pairs
    ]
    assert found == list(dict.fromkeys(["GGGGHHHH", *(a + b for a, b in zip(left, right))]))


def alignments(tmp_path: Path, **texts: str) -> list[Path]:
    return [write(tmp_path / f"{name}.a3m", text) for name, text in texts.items()]


QUERY = Complex("x", ("H", "L", "M"), ("ACDEF", "MKVMK", "MKVMK"))


def test_species_pair_the_rows_of_chains(tmp_path: Path) -> None:
    files = alignments(
        tmp_path,
        a=">q\nACDEF\n>tr|A0A000|A0A000_RAT/1-4\nACDEE\n>tr|A0A001|A0A001_PIG\nACDDD\n",
        b=">q\nMKVMK\n>sp|A0A002|X_PIG x\nMKVMM\n",
    )
    assembly, notes = assemble(QUERY, read_chain_alignments(files, QUERY.sequences, "x.fasta"))
    assert notes == []
    assert assembly.ids == ("H", "L", "M")
    assert assembly.entity_id.tolist() == [1, 2, 2]
    np.testing.assert_array_equal(
        pair_rows([chain.pairing for chain in assembly.chains]), [[0, 0, 0], [2, 1, 1]]
    )  # fmt: skip


def test_what_cannot_be_paired_is_said(tmp_path: Path) -> None:
    def notes(**texts: str) -> list[str]:
        return assemble(QUERY, read_chain_alignments(alignments(tmp_path, **texts), QUERY.sequences, "x"))[1]

    a, b = ">q\nACDEF\n>{}\nACDEE\n", ">q\nMKVMK\n>{}\nMKVMM\n"
    assert assemble(QUERY)[1] == ["no alignment for chains H, L, M: folded by the sequence alone"]
    assert notes(a=a.format("r")) == ["no alignment for chains L, M: folded by the sequence alone"]
    assert "the headers of the alignments name no species" in notes(a=a.format("r"), b=b.format("s"))[0]
    rat, pig = "tr|A0A000|A0A000_RAT", "tr|A0A000|A0A000_PIG"
    assert "no species in common" in notes(a=a.format(rat), b=b.format(pig))[0]
    assert notes(a=a.format(rat), b=b.format(rat)) == []
    # A single chain or copies of one chain have no pairs.
    assert assemble(Complex("y", ("A",), ("ACDEF",)))[1] == []
    dimer = Complex("y", ("A", "B"), ("ACDEF", "ACDEF"), notes=("DNA is left out",))
    alignments_of_a = read_chain_alignments(alignments(tmp_path, a=a.format("r")), dimer.sequences, "x")
    assert assemble(dimer, alignments_of_a)[1] == ["DNA is left out"]


def test_names_of_chains() -> None:
    names = chain_ids(62 + 26**2 + 2)
    assert "".join(names[:62]) == "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
    assert names[62:65] == ["AA", "AB", "AC"]
    assert names[-3:] == ["ZZ", "AAA", "AAB"]
    assert len(set(names)) == len(names)
    assert [len(chain_ids(n)) for n in (0, 1, 26, 27, 62, 63)] == [0, 1, 26, 27, 62, 63]
    assembly, (note,) = assemble(Complex("x", tuple(chain_ids(1000)), ("ACDE",) * 1000))
    assert assembly.sym_id.tolist() == list(range(1, 1001))
    assert set(assembly.entity_id.tolist()) == {1}
    assert "1000 chains (A, B, C ...)" in note
    with pytest.raises(UserError, match="nucleic acid"):
        assemble(Complex("x", ("A", "B"), ("MKV", "ACGTACGTACGT")))


def test_names_that_mmcif_cannot_hold_are_changed(tmp_path: Path) -> None:
    text = f">{'x' * 10**6} OX=1\nACDE\n>é\nMKV\n>b\"'c\nMKV\n>sp|P1|X_Y\nMKV\n"
    (query,) = read_complexes(write(tmp_path / "q.fasta", text), as_one=True)
    assert query.ids == ("x" * 100, "_", "b__c", "sp|P1|X_Y")


def test_the_chains_of_a_structure(tmp_path: Path) -> None:
    chains = [random_chain("L", "AGWHK"), random_chain("H", "GGSTA", seed=1)]  # label_asym_id A and B
    text = write_mmcif("1abc", chains)
    (query,) = read_complexes(write(tmp_path / "x.cif", text))
    assert (query.name, query.ids, query.sequences, query.notes) == ("x", ("L", "H"), ("AGWHK", "GGSTA"), ())
    (query,) = read_complexes(write(tmp_path / "y.cif", text + assembly_text([("1", "1,2", "A,B"), ("2", "1", "A")])))
    assert (query.ids, query.sequences) == (("L", "H", "L-2", "H-2"), ("AGWHK", "GGSTA") * 2)
    text = write_mmcif("1abc", [random_chain("L", "AGWHK"), random_chain("L-2", "GGSTA", seed=1)])
    (query,) = read_complexes(write(tmp_path / "y.cif", text + assembly_text([("1", "1,2", "A,B")])))
    assert (query.ids, query.sequences) == (("L", "L-2", "L-3", "L-2-2"), ("AGWHK", "GGSTA") * 2)
    (query,) = read_complexes(write(tmp_path / "z.pdb", write_pdb("1abc", chains)))
    assert (query.ids, query.sequences) == (("L", "H"), ("AGWHK", "GGSTA"))
    with pytest.raises(UserError, match="its first assembly has no protein chain"):
        read_complexes(write(tmp_path / "z.cif", text + assembly_text([("1", "1", "Z")])))


def test_each_sequence_is_searched_for_once(tmp_path: Path) -> None:
    files = [write(tmp_path / "x.csv", "id,sequence\nx,ACD:MKV:ACD\n"), write(tmp_path / "y.fa", ">y\nACD\n")]
    assert sequences_to_search(files) == {"x_A": "ACD", "x_B": "MKV", "y": "ACD"}
    names = search_names("x", {"A": "AC", "B": "CD", "a": "DE", "A|": "EF", "A2": "AC"})
    assert names == {"AC": "x_A", "CD": "x_B", "DE": "x_a_", "EF": "x_A__"}
    with pytest.raises(UserError, match=r"z\.fa: another sequence is called X_a too. Give each"):
        sequences_to_search([*files, write(tmp_path / "z.fa", ">X_a\nACD\n")])
    with pytest.raises(UserError, match=r"z\.fa: a record is called Y in .*y\.fa too. Give each"):
        sequences_to_search([*files, write(tmp_path / "z.fa", ">Y\nACD\n")])


words = st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), max_size=12)


@drawn(st.lists(st.tuples(words, st.text("ACDE:xX \t", max_size=8)), min_size=1, max_size=4), st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_fasta_is_read_or_refused(tmp_path_factory, records: list[tuple[str, str]], as_one: bool) -> None:
    path = tmp_path_factory.getbasetemp() / "any.fasta"
    path.write_bytes("".join(f">{name}\n{text}\n" for name, text in records).encode())
    refused, queries = "", []
    try:
        queries = read_complexes(path, as_one=as_one)
    except UserError as error:
        refused = str(error)
    if refused:
        assert re.search("[.;] ", refused)
        return
    chains = [sequence for query in queries for sequence in query.sequences]
    letters = "".join("".join(text.split()) for _, text in records).upper()
    assert "".join(chains) == letters.replace(":", "")
    assert all(len(set(query.ids)) == len(query.ids) == len(query.sequences) for query in queries)
    assert len({query.name.lower() for query in queries}) == len(queries)


DAMAGED = {
    "x.a3m": b"#4,3\t1,2\n>101\t102\nACDEMKV\n>x1\tx2\nACDyEMKL\n\0>101\nACDE---\n>u\nA-wCE---\n>102\n----MKV\n",
    "x.csv": b'id,sequence\nx,ACDE:MKV\n"y",GGG\n',
    "x.fasta": b">A x\nACDE:MKV\n>B|c\nMKV\n",
}


@drawn(st.sampled_from(sorted(DAMAGED)), st.integers(0, 200), st.sampled_from(["", *'\0\n>#:\t,"-9']), st.booleans())
@settings(max_examples=100, deadline=None)
def test_a_damaged_file_is_read_or_refused_in_one_line(
    tmp_path_factory, name: str, at: int, put: str, cut: bool
) -> None:
    path, text = tmp_path_factory.getbasetemp() / name, DAMAGED[name]
    at %= len(text)
    path.write_bytes(text[:at] + put.encode() + text[at + cut :])
    refused = ""
    try:
        for query in read_complexes(path):
            assemble(query, read_chain_alignments([path], query.sequences, "x") if name == "x.a3m" else None)
    except UserError as error:
        refused = str(error)
    assert not refused or (re.search("[.;] ", refused) and "\n" not in refused)
