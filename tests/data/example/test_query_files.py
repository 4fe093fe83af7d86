"""Read queries in every form: text, pipes, several files, folders of other programs."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.data.entries import assembly_text, random_chain
from tests.data.example.test_read_complexes import write
from tests.data.structure.test_awkward_files import pdb_chain, plain
from warpfold.data.example import query_files
from warpfold.data.example.complex import Complex
from warpfold.data.example.query_files import (
    QueryFiles,
    assemble,
    check_path,
    is_sequence,
    list_chains,
    read_complexes,
    read_query_files,
    search_names,
    sequences_to_search,
)
from warpfold.data.example.raw_example import RawExample
from warpfold.data.formats.alignment import decode, parse_a3m
from warpfold.data.formats.input_files import ChainAlignments, InputFile, read_chain_alignments
from warpfold.data.structure.write import write_mmcif
from warpfold.errors import UserError

ONE, TWO = "MKTAYIAKQRQISFVKSH", "GSHMLEERLGLIEVQ"


def named(read: QueryFiles) -> dict[str, tuple[tuple[str, ...], int]]:
    """Return name -> sequences and the number of their alignments."""
    return {query.name: (query.sequences, len(query.alignments)) for query in read.found}


def a3m(sequence: str, *more: str) -> str:
    return f">q\n{sequence}\n" + "".join(f">r{i}\n{row}\n" for i, row in enumerate(more))


def test_a_sequence_itself() -> None:
    for as_one in (False, True):
        (one,) = read_complexes(ONE, as_one=as_one)
        assert (one.name, one.ids, one.sequences) == ("query", ("A",), (ONE,))
    (both,) = read_complexes(f"{ONE}:{TWO}:{ONE}")
    assert (both.name, both.ids, both.sequences) == ("query", ("A", "B", "C"), (ONE, TWO, ONE))
    assert [query.name for query in read_complexes([ONE, TWO])] == ["query_1", "query_2"]
    (both,) = read_complexes([ONE, TWO], as_one=True)
    assert (both.name, both.ids) == ("query", ("A", "B"))
    assert [query.sequences for query in read_complexes([ONE, ONE])] == [(ONE,), (ONE,)]
    (pair,) = read_complexes([ONE] * 2, as_one=True)
    assert (pair.ids, pair.sequences, pair.source) == (("A", "B"), (ONE, ONE), "the sequences")
    for as_one in (False, True):
        mixed = read_complexes([f"{ONE}:{TWO}", TWO], as_one=as_one)
        assert [(query.name, query.ids) for query in mixed] == [("query_1", ("A", "B")), ("query_2", ("A",))]


def test_what_is_a_sequence_and_what_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_sequence(ONE)
    for text in ("query", "q.fasta", "-", "MKTAY", ONE.lower(), "SEQUENCES", ONE + "1", "A:B", str(tmp_path)):
        assert not is_sequence(text)
    write(tmp_path / ONE, ">here\nMKV\n")
    assert [query.name for query in read_complexes([ONE])] == ["here"]  # a file with this name exists
    assert is_sequence("A" * 10_000)  # longer than a file name can be


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ONE, {"query": ((ONE,), 0)}),
        (f"\n{ONE}:{TWO}\n\n", {"query": ((ONE, TWO), 0)}),
        (f">a\n{ONE}\n>b\n{TWO}\n", {"a": ((ONE,), 0), "b": ((TWO,), 0)}),
        (f"id,sequence\na,{ONE}\n", {"a": ((ONE,), 0)}),
        (a3m(ONE, "-" + ONE[1:]), {"query": ((ONE,), 1)}),
        (f"#18,15\t1,2\n>q\n{ONE}{TWO}\n", {"query": ((ONE, TWO, TWO), 2)}),
        (f"# STOCKHOLM 1.0\nq {ONE}\nr -{ONE[1:]}\n//\n", {"query": ((ONE,), 1)}),
    ],
)
def test_what_is_piped_in_is_known_by_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: dict[str, object]
) -> None:
    monkeypatch.setattr("warpfold.data.example.query_files.STDIN", write(tmp_path / "stdin", text))
    assert named(read_query_files("-")) == expected
    monkeypatch.setattr("warpfold.data.example.query_files.STDIN", Path("/dev/null"))
    with pytest.raises(UserError, match="-: nothing is piped in"):
        read_complexes("-")


def test_several_files_and_alignments_beside_their_records(tmp_path: Path) -> None:
    files = [write(tmp_path / name, text) for name, text in (
        ("q.fasta", f">one\n{ONE}\n"), ("b.a3m", a3m(TWO, TWO)), ("mgnify.a3m", a3m(ONE, ONE)),
        ("c.csv", f"id,sequence\nx,{TWO}:{ONE}\n"),
    )]  # fmt: skip
    read = read_query_files(files)
    assert named(read) == {"one": ((ONE,), 1), "x": ((TWO, ONE), 2)}
    assert named(read_query_files([files[1], files[2]])) == {
        "b": ((TWO,), 1), tmp_path.name.lstrip(".-"): ((ONE,), 1)
    }  # fmt: skip
    with pytest.raises(UserError, match=r"b\.a3m: a record is called b in .*b\.a3m too"):
        read_complexes([files[1], write(tmp_path / "other/b.a3m", a3m(ONE))])


def test_an_alignment_is_named_after_its_protein() -> None:
    names = {
        "1abc_A": "1abc_A/a3m/uniref90_hits.a3m 1abc_A/a3m/bfd_uniclust_hits.a3m 1abc_A/uniclust30.a3m "
        "1abc_A/msas/small_bfd_hits.sto",
        "B": "1abc_A/msas/B/uniprot_hits.sto",
        "x": "x_env/bfd.mgnify30.metaeuk30.smag30.a3m x_env/uniref.a3m.gz x_pairgreedy/pair.a3m dir/x.paired.a3m "
        "dir/x_unpaired.a3m dir/x.a3m",
        "x_A": "x/x_A_mgy_clusters_hits.a3m",
        "1bfd_A": "dir/1bfd_A.a3m",
        "repair": "dir/repair.a3m",
        "pair_of_helices": "dir/pair_of_helices.a3m",
        "T1024": "dir/T1024.2.a3m",
    }
    for protein, paths in names.items():
        for path in paths.split():
            assert InputFile(path, Path(path)).protein == protein, path


def test_folders_as_openproteinset_has_them(tmp_path: Path) -> None:
    for name, sequence in (("1abc_A", ONE), ("2xyz_B", TWO)):
        for file, first in (("mgnify_hits", "M"), ("uniref90_hits", "W"), ("bfd_uniclust_hits", "D")):
            write(tmp_path / f"set/{name}/a3m/{file}.a3m", a3m(sequence, first + sequence[1:]))
        write(tmp_path / f"set/{name}/hhr/pdb70_hits.hhr", "Query x\n")
    read = read_query_files(tmp_path / "set")
    assert named(read) == {"1abc_A": ((ONE,), 3), "2xyz_B": ((TWO,), 3)}
    assert [decode(alignment.rows[1])[0] for alignment in read.found[0].alignments] == [
        "W",
        "D",
        "M",
    ]  # the official order
    assert read.hits == ["set/1abc_A/hhr/pdb70_hits.hhr", "set/2xyz_B/hhr/pdb70_hits.hhr"]


def test_folders_as_colabfold_leaves_them(tmp_path: Path) -> None:
    """NAME.a3m holds all rows of the server's own files; predictions are not queries."""
    both = f"#18,15\t2,1\n>101\t102\n{ONE}{TWO}\n>r\n{ONE}{'-' * 15}\n>p\n{ONE}{TWO}\n"
    write(tmp_path / "out/dimer.a3m", both)
    for name in ("uniref.a3m", "bfd.mgnify30.metaeuk30.smag30.a3m"):
        write(tmp_path / f"out/dimer_env/{name}", f">101\n{ONE}\n>r\n{ONE}\n\0>102\n{TWO}\n\0")
    write(tmp_path / "out/dimer_pairgreedy/pair.a3m", f">101\n{ONE}\n>p\n{ONE}\n\0>102\n{TWO}\n>p\n{TWO}\n\0")
    write(tmp_path / "out/dimer_unrelaxed_rank_001_alphafold2_ptm_model_1_seed_000.pdb", "ATOM\n")
    write(tmp_path / "out/one_all/uniref.a3m", a3m(ONE, ONE))
    write(tmp_path / "out/two.a3m", a3m(TWO, TWO))
    read = read_query_files(tmp_path / "out")
    assert named(read) == {"dimer": ((ONE, ONE, TWO), 4), "one": ((ONE,), 1), "two": ((TWO,), 1)}
    assert len(read.predicted) == 1
    (tmp_path / "out/dimer.a3m").unlink()
    (dimer,) = (query for query in read_complexes(tmp_path / "out") if query.name == "dimer")
    assert (dimer.sequences, [alignment.stands_alone for alignment in dimer.alignments]) == (
        (ONE, TWO),
        [True, True, True, True, False, False],
    )


def test_folders_as_alphafold_multimer_leaves_them(tmp_path: Path) -> None:
    chains = {id: {"description": id, "sequence": s} for id, s in (("A", ONE), ("B", TWO), ("C", ONE))}
    write(tmp_path / "af/target/msas/chain_id_map.json", json.dumps(chains))
    for id, sequence in (("A", ONE), ("B", TWO)):
        for name in ("uniref90_hits", "uniprot_hits"):
            write(tmp_path / f"af/target/msas/{id}/{name}.a3m", a3m(sequence, sequence))
        write(tmp_path / f"af/target/msas/{id}/pdb_hits.sto", "# STOCKHOLM 1.0\n//\n")
    write(tmp_path / "af/target/ranked_0.pdb", "ATOM\n")
    read = read_query_files(tmp_path / "af")
    (query,) = read.found
    assert (query.name, query.ids, query.sequences) == ("target", ("A", "B", "C"), (ONE, TWO, ONE))
    assert [alignment.stands_alone for alignment in query.alignments] == [True, True, False, False]
    assert (len(read.hits), read.predicted) == (2, ["af/target/ranked_0.pdb"])
    write(tmp_path / "af/target/msas/chain_id_map.json", "[]")
    with pytest.raises(UserError, match=r"chain_id_map\.json: is not AlphaFold-Multimer's list of chains"):
        read_complexes(tmp_path / "af")


def test_names_that_files_cannot_have_stay_different(tmp_path: Path) -> None:
    text = f">\u03b21\n{ONE}\n>\u03b11\n{TWO}\n>_1_2\n{ONE}\n>\u03b31\n{TWO}\n"
    queries = read_complexes(write(tmp_path / "a.fasta", text))
    assert [query.name for query in queries] == ["_1", "_1_3", "_1_2", "_1_4"]
    with pytest.raises(UserError, match="a record is called _1 twice"):
        read_complexes(write(tmp_path / "b.csv", f"id,sequence\n\u03b21,{ONE}\n\u03b21,{TWO}\n"))


def test_the_alignment_of_a_complex_is_not_offered_to_others_that_share_a_chain(tmp_path: Path) -> None:
    dimer = write(tmp_path / "dimer.a3m", f"#18,15\t1,1\n>101\t102\n{ONE}{TWO}\n>hit\n-{ONE[1:]}{TWO}\n")
    table = write(tmp_path / "jobs.csv", f"id,sequence\nmono,{ONE}\nother,{TWO}\n")
    assert named(read_query_files([table, dimer])) == {
        "mono": ((ONE,), 0),
        "other": ((TWO,), 0),
        "dimer": ((ONE, TWO), 4),
    }
    same = write(tmp_path / "same.csv", f"id,sequence\ndimer,{ONE}:{TWO}\n")
    assert named(read_query_files([same, dimer])) == {"dimer": ((ONE, TWO), 4)}


def message(call: object, *arguments: object, **more: object) -> str:
    with pytest.raises(UserError) as error:
        call(*arguments, **more)  # type: ignore[operator]
    return str(error.value)


def test_sequences_among_files_are_read_together_in_the_position_of_the_first(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{name}.fasta", f">{name}\n{ONE}\n") for name in "ab"]
    read = read_complexes([files[0], TWO, str(files[1]), ONE])
    assert [(query.name, query.source) for query in read] == [
        ("a", str(files[0])), ("query_1", "the sequences"), ("query_2", "the sequences"), ("b", str(files[1])),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("acdefghiklmnpqrstvwyX:", "acdefghiklmnpqrstvwyX:: no such file. If it is a sequence, write it in capitals."),
        ("mktayiakqr", "mktayiakqr: no such file. If it is a sequence, write it in capitals."),
        (
            "MKTAYIAKQr:X" * 4,
            f"{('MKTAYIAKQr:X' * 4)[:37]}...: no such file. If it is a sequence, write it in capitals.",
        ),
        ("mktayiakqr" * 4, f"{'mktayiakqr' * 4}: no such file. If it is a sequence, write it in capitals."),
        (
            "MKTAYIAKQ",
            "MKTAYIAKQ: no such file. A sequence on the command line needs at least 10 residues: write shorter ones as "
            "FASTA.",
        ),
        (
            "MK1TAYIAKQRQISFV-KSH",
            "MK1TAYIAKQRQISFV-KSH: no such file, and not a sequence: has '-'. Write it as FASTA, or correct it.",
        ),
        ("MK1TAYIAKQRQISFVKSH", None),
        ("mktayiakq", None),
        ("mktayiakqO", None),
        ("q.fasta", None),
        ("/etc", None),
    ],
)
def test_missing_files_that_are_almost_sequences(text: str, said: str | None) -> None:
    assert is_sequence("MKTAYIAKQR")
    assert is_sequence("ACDEFGHIKLMNPQRSTVWYX")
    assert not is_sequence("MKTAYI:AKQ")
    if said is None:
        check_path(text)
    else:
        assert message(check_path, text) == said


def test_a_missing_file_may_be_called_like_a_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "mktayiakqr", "x")
    check_path("mktayiakqr")
    # The file system limits names to 255 bytes.
    check_path("mktayiakqr/" * 100)


def test_standard_input_must_be_piped_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_files, "STDIN", write(tmp_path / "in", "x"))
    check_path("-")
    monkeypatch.setattr(query_files, "STDIN", tmp_path)
    said = "-: nothing is piped in. Write `command | warpfold predict - ...`, or `< file`."
    assert message(check_path, "-") == said
    monkeypatch.setattr(query_files, "is_given_pipe", lambda _: True)
    check_path("-")


def test_queries_and_alignments_may_be_pipes() -> None:
    """A shell makes one for <(command)."""
    paths = []
    for text in (f">x\n{ONE}\n", a3m(ONE, ONE, ONE)):
        reader, writer = os.pipe()
        os.write(writer, text.encode())
        os.close(writer)
        paths.append(Path(f"/dev/fd/{reader}"))
    (query,) = read_complexes(paths[0])
    assert query.sequences == (ONE,)
    assert [len(one) for one in read_chain_alignments([paths[1]], [ONE], "x").of(ONE)] == [3]
    for path in paths:
        os.close(int(path.name))


# ---- examples


def rows(sequence: str, *more: str, header: str = "r") -> ChainAlignments:
    return ChainAlignments(
        {sequence: [parse_a3m(f">q\n{sequence}\n" + "".join(f">{header}\n{row}\n" for row in more))]}, []
    )


RAT, PIG = "tr|A0A000|A0A000_RAT", "tr|A0A000|A0A000_PIG"
ALONE = "folded by the sequence alone"
NAMELESS = (
    "no rows are paired: the headers of the alignments name no species (UniProt's "
    "tr|A0A0K0ME10|A0A0K0ME10_9STAP, UniRef's RepID=A0A0K0ME10_9STAP, or OX=1295)"
)
APART = "no rows are paired: the alignments of different chains have no species in common"


@pytest.mark.parametrize(
    ("sequences", "alignments", "notes"),
    [
        (["ACDE"], None, []),
        (["ACDE"], rows("ACDE"), [f"the alignment of chain A has one row, its own: {ALONE}"]),
        (["ACDE", "MKV", "ACDE"], rows("ACDE"), [
            f"no alignment for chain B: {ALONE}", f"the alignment of chains A, C has one row, its own: {ALONE}"
        ]),
        (["ACDE", "MKV"], None, [f"no alignment for chains A, B: {ALONE}"]),
        (["ACDE", "MKV"], rows("ACDE", "ACDD").joined(rows("MKV", "MKL")), [NAMELESS]),
        (["ACDE", "MKV"], rows("ACDE", "ACDD", header=RAT).joined(rows("MKV", "MKL")), [NAMELESS]),
        (["ACDE", "MKV"], rows("ACDE", "ACDD", header=RAT).joined(rows("MKV", "MKL", header=PIG)), [APART]),
        (["ACDE", "MKV"], rows("ACDE", "ACDD", header=RAT).joined(rows("MKV", "MKL", header=RAT)), []),
        (["ACDE", "MKV", "GG"], rows("ACDE", "ACDD", header=RAT).joined(rows("MKV", "MKL", header=RAT)), [
            f"no alignment for chain C: {ALONE}"
        ]),
        (["ACDE", "ACDE"], rows("ACDE", "ACDD"), []),
    ],
)  # fmt: skip
def test_notes_on_alignments_in_whole(
    sequences: list[str], alignments: ChainAlignments | None, notes: list[str]
) -> None:
    query = Complex("x", tuple("ABC"[: len(sequences)]), tuple(sequences), notes=("first",))
    assembly, found = assemble(query, alignments)
    assert found == ["first", *notes]
    assert (assembly.name, assembly.ids) == ("x", query.ids)
    assert [chain.sequence for chain in assembly.chains] == sequences


def test_examples_are_shared_between_queries_without_alignments_of_their_own() -> None:
    own = parse_a3m(">q\nMKV\n>r\nMKL\n")
    deep = parse_a3m(">q\nACDE\n>r\nACDD\n>s\nACCC\n")
    cache = dict[str, RawExample]()
    first, _ = assemble(Complex("x", ("A", "B"), ("ACDE", "MKV")), rows("ACDE", "ACDD"), cache)
    assert {sequence: example.name for sequence, example in cache.items()} == {"ACDE": "x_A", "MKV": "x_B"}
    second, _ = assemble(Complex("y", ("C", "D"), ("MKV", "GG")), None, cache)
    assert second.chains[0] is first.chains[1]
    assert len(cache) == 3
    third, _ = assemble(Complex("z", ("A", "B"), ("ACDE", "MKV"), (own, deep)), rows("ACDE", "ACDD", "AAAA"), cache)
    # Its own rows are above those of the other files.
    assert [chain.depth for chain in third.chains] == [4, 2]
    assert [decode(row) for row in third.chains[0].msa] == ["ACDE", "ACDD", "ACCC", "AAAA"]  # type: ignore[union-attr]
    assert len(cache) == 3
    assert [chain.depth for chain in first.chains] == [2, 1]


def test_lists_of_chains() -> None:
    assert list_chains(["A"]) == "chain A"
    assert list_chains(list("ABCDEFGH")) == "chains A, B, C, D, E, F, G, H"
    assert list_chains(list("ABCDEFGHI")) == "9 chains (A, B, C ...)"


def test_names_of_searches(tmp_path: Path) -> None:
    assert search_names("x", {"B": "AC"}) == {"AC": "x"}
    assert search_names("x", {"B": "AC", "C": "AC"}) == {"AC": "x_B"}
    assert search_names("x", {"A": "AC", "a": "CD", "a_": "DE"}) == {"AC": "x_A", "CD": "x_a_", "DE": "x_a__"}
    text = f"id,sequence\nx,{ONE}:{TWO}\nx_a,{ONE}\n"
    path = write(tmp_path / "q.csv", text)
    assert message(sequences_to_search, [path]) == (
        f"{path}: another sequence is called x_a too. Give each protein a unique name."
    )


# ---- folders


def test_a_folder_without_queries(tmp_path: Path) -> None:
    write(tmp_path / "in/ranked_0.pdb", "ATOM\n")
    assert message(read_query_files, [str(tmp_path / "in"), tmp_path / "in"]) == (
        f"{tmp_path}/in: has no queries, only predictions, template hits or other files. Pass other files."
    )


@pytest.mark.parametrize(
    ("name", "text", "holds"),
    [
        ("a.csv", "id,sequence\n", True),
        ("a.csv", "\ufeffSequence\n", True),
        ("a.tsv", '"ID"\tx\r\n', True),
        ("a.csv", "key,sequence\n", False),
        ("a.csv", "key,sequence,id\n", True),
        ("a.csv", "seed,score\nid,sequence\n", False),
        ("a.json", '[{"a": 1, "sequences" : []}]', True),
        ("a.json", '{"sequence": []}', False),
        ("a.yaml", "a: 1\nsequences:\n", True),
        ("a.yml", "a:\n  sequences:\n", False),
        ("a.json", " " * 65_523 + '{"sequences":[]}', True),
        ("a.json", " " * 65_524 + '{"sequences":[]}', False),
        ("chain_id_map.json", "{}", True),
        ("a.fasta", "x", True),
        ("a.CSV", "x,y\n", False),
    ],
)
def test_files_of_a_folder_that_hold_queries(tmp_path: Path, name: str, text: str, holds: bool) -> None:
    path = write(tmp_path / name, text)
    assert query_files._holds_queries(InputFile(name, path)) is holds


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("\ufeff \n{", ".json"),
        ("[", ".json"),
        ("# note\n\n---\nversion: 1", ".yaml"),
        ("sequences:\n", ".yaml"),
        ("# STOCKHOLM 1.0\n", ".sto"),
        ("#4,3\t1,1\n", ".sto"),
        (">q\nMKV\n>r\nm-V\n", ".a3m"),
        (">q a-b\nMKV\n", ".fasta"),
        (">q\nMKV\n", ".fasta"),
        ("name,id,SEQUENCE\n", ".csv"),
        ("sep=;\n", ".csv"),
        ("id,x\n", ".fasta"),
        ("sequence,x\n", ".fasta"),
        ("x\nid,sequence\n", ".fasta"),
        ("data_x", ".cif"),
        ("HEADER", ".pdb"),
        ("ATOM  1", ".pdb"),
        ("CRYST1", ".pdb"),
        ("REMARK", ".pdb"),
        ("MKTAY:MK*\n", ".seq"),
        ("MKT AY\n", ".fasta"),
        ("MKT1\n", ".fasta"),
    ],
)
def test_formats_are_detected_by_content(text: str, kind: str) -> None:
    for name in ("x", "x.txt", "x.out.gz"):
        assert query_files._detect_format(InputFile(name, Path(name)), text.encode()) == kind
    for name, ending in (("x.CSV.gz", ".csv"), ("x.faa", ".faa"), ("x.yml", ".yml"), ("x.ent", ".ent")):
        assert query_files._detect_format(InputFile(name, Path(name)), text.encode()) == ending
    assert query_files._detect_format(InputFile("x", Path("x/chain_id_map.json")), b"{}") == "chain_id_map.json"


def test_a_bare_sequence_in_a_file(tmp_path: Path) -> None:
    for name, text in (("x.seq", f"{ONE}\n{TWO}\n"), ("y.seq", f"\n>y\n{ONE}{TWO}\n"), ("z", f"{ONE}{TWO}\n")):
        (query,) = read_complexes(write(tmp_path / name, text))
        assert (query.name, query.sequences) == ("y" if name == "y.seq" else "query", (ONE + TWO,))


def test_alignments_are_given_to_their_records(tmp_path: Path) -> None:
    """An alignment with the name of an invalid record is no query. The one of a complex is for that complex only."""
    dimer = f"#18,15\t1,1\n>101\t102\n{ONE}{TWO}\n>hit\n-{ONE[1:]}{TWO}\n"
    files = [
        write(tmp_path / "q.csv", f"id,sequence\nDimer,{ONE}:{TWO}\nmono,{ONE}\nother,{TWO}:{ONE}:{TWO}\nbad,MK1\n"),
        write(tmp_path / "dimer.a3m", dimer),
        write(tmp_path / "mono.a3m", a3m(ONE, ONE)),
        write(tmp_path / "Bad.a3m", a3m("MKW", "MKW")),
        write(tmp_path / "free.a3m", a3m("MKY", "MKY")),
    ]
    read = read_query_files(files)
    # Complexes of the same sequences take the alignment as well, and all take that of a single sequence.
    assert named(read) == {
        "Dimer": ((ONE, TWO), 5),
        "mono": ((ONE,), 1),
        "other": ((TWO, ONE, TWO), 5),
        "bad": ((), 0),
        "free": (("MKY",), 1),
    }


def test_alignments_of_a_job_are_its_own(tmp_path: Path) -> None:
    protein = {"id": "A", "sequence": ONE, "unpairedMsa": a3m(ONE, ONE), "pairedMsa": ""}
    job = {"name": "job", "dialect": "alphafold3", "version": 1, "sequences": [{"protein": protein}]}
    files = [
        write(tmp_path / "q.fasta", f">record\n{ONE}\n"),
        write(tmp_path / "job.json", json.dumps(job)),
        write(tmp_path / "other.a3m", a3m(TWO, TWO)),
    ]
    assert named(read_query_files(files)) == {"record": ((ONE,), 0), "job": ((ONE,), 1), "other": ((TWO,), 1)}


def test_other_alignments_of_a_name_are_merged_into_the_largest(tmp_path: Path) -> None:
    """A server's answers are included in ColabFold's NAME.a3m, unless there is another file of that name."""
    both = f"#18,15\t1,1\n>101\t102\n{ONE}{TWO}\n>r\n{ONE}{'-' * 15}\n"
    write(tmp_path / "out/x_env/uniref.a3m", a3m(ONE, ONE))
    write(tmp_path / "out/x.a3m", both)
    assert named(read_query_files(tmp_path / "out")) == {"x": ((ONE, TWO), 2)}
    write(tmp_path / "out/x.sto", f"# STOCKHOLM 1.0\nq {TWO}\nr {TWO}\n//\n")
    assert named(read_query_files(tmp_path / "out")) == {"x": ((ONE, TWO), 4)}
    (tmp_path / "out/x.a3m").unlink()
    (tmp_path / "out/x.sto").unlink()
    # Without NAME.a3m, the downloads are the alignments.
    write(tmp_path / "out/x_env/bfd.a3m", a3m(ONE, ONE, ONE))
    assert named(read_query_files(tmp_path / "out")) == {"x": ((ONE,), 2)}
    write(tmp_path / "out/X.a3m", a3m(ONE, ONE))
    assert named(read_query_files(tmp_path / "out")) == {"X": ((ONE,), 1)}


def test_notes_of_files_are_notes_of_the_query(tmp_path: Path) -> None:
    rows = "".join(f"r{i} {ONE}\n" for i in range(501))
    (query,) = read_complexes(write(tmp_path / "x/mgnify_hits.sto", f"# STOCKHOLM 1.0\nq {ONE}\n{rows}//\n"))
    assert len(query.alignments[0]) == 501
    note = "the first 501 of 502 rows are used, as in AlphaFold. Rename the file to use all"
    assert query.notes == (f"{tmp_path}/x/mgnify_hits.sto: {note}",)


# ---- structures


def test_structures_and_what_they_leave_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.v1.pdb"
    path.write_text(f"SEQRES   1 A    4  GLY ALA SER THR\n{pdb_chain(plain('GASTW'), 'A')}TER\nEND\n")
    with pytest.raises(UserError, match=r"x\.v1\.pdb: has residues with N, CA and C that are in no chain: 1"):
        read_complexes(path)
    chains = [random_chain("L", "AGWHK"), random_chain("H", "GGSTA", seed=1)]
    text = write_mmcif("1abc", chains) + assembly_text([("1", "1", "B")])
    (query,) = read_complexes(write(tmp_path / "y.v2.cif", text))
    assert (query.name, query.ids, query.sequences) == ("y", ("H",), ("GGSTA",))
    assert query.structure is not None
    assert (query.structure.names, query.structure.source) == (("H",), str(tmp_path / "y.v2.cif"))
    assert query.structure.held is None
    monkeypatch.setattr(query_files, "STDIN", tmp_path / "y.v2.cif")
    (piped,) = read_complexes("-")
    assert piped.structure is not None
    assert piped.structure.held is not None
    assert piped.name == "query"
    placed = SimpleNamespace(chains=(("H", None),), ids=("H",), left_out={"HEM": "is a ligand", "D": "is DNA"})
    structure = SimpleNamespace(
        check_placed=lambda source: None, assembly=lambda: placed, notes=("a",), chains={"H": chains[1]}
    )
    monkeypatch.setattr(query_files, "parse_structure", lambda data, source: structure)
    monkeypatch.setattr(query_files, "guess_from_structure", lambda *arguments: None)
    (query,) = read_complexes(tmp_path / "y.v2.cif")
    assert query.notes == ("a", "HEM is left out: is a ligand", "D is left out: is DNA")


def test_structures_of_a_folder_are_queries_unless_they_are_predictions(tmp_path: Path) -> None:
    text = write_mmcif("1abc", [random_chain("L", "AGWHK")])
    for name in ("design.cif", "x_rank_2.cif", "y_relaxed.pdb"):
        write(tmp_path / "in" / name, text)
    write(tmp_path / "in/z_relaxed.fasta", f">z\n{ONE}\n")
    read = read_query_files(tmp_path / "in")
    assert [query.name for query in read.found] == ["design", "z"]
    assert read.predicted == ["in/x_rank_2.cif", "in/y_relaxed.pdb"]


def test_alignments_for_pairing_alone_are_a_query(tmp_path: Path) -> None:
    text = f">a\n{ONE}\n>r\n{ONE}\n\0>b\n{TWO}\n>r\n{TWO}\n"
    (query,) = read_complexes(write(tmp_path / "x_pairgreedy/pair.a3m", text))
    assert (query.name, query.sequences) == ("x", (ONE, TWO))
    assert [alignment.stands_alone for alignment in query.alignments] == [False, False]


# ---- tables and FASTA in whole


def queries(path: Path, **more: bool) -> list[tuple[str, tuple[str, ...], tuple[str, ...], str]]:
    read = read_query_files(path, **more)
    return [(query.name, query.ids, query.sequences, query.error) for query in read.found]


def test_tables_with_a_column_for_each_chain(tmp_path: Path) -> None:
    path = write(tmp_path / "q.csv", "id,target,binder\nx,ACDE,mk v\ny,,GGG\nz,AC:DE,GG\nw,AC1,GG\n")
    wrong = f"{path}: record 4, 'w', position 3 has '1', which is not an amino acid. Correct or remove it"
    assert queries(path) == [
        ("x", ("A", "B"), ("ACDE", "MKV"), ""),
        ("y", ("A",), ("GGG",), ""),
        ("z", ("A", "B", "C"), ("AC", "DE", "GG"), ""),
        ("w", (), (), wrong),
    ]
    path = write(tmp_path / "q.csv", "chain_h,note,l,id,Chain 2\nAC,x,DE,q,GG\n,x,DE,r,GG\nA:C,,DE,s,\nA1,,DE,t,\n")
    split = f"{path}: s has : in the column of a chain. Give each chain a column, or write all in `sequence`"
    wrong = f"{path}: record 4, 't', position 2 has '1', which is not an amino acid. Correct or remove it"
    assert queries(path) == [
        ("q", ("H", "L", "2"), ("AC", "DE", "GG"), ""),
        ("r", ("L", "2"), ("DE", "GG"), ""),
        ("s", (), (), split),
        ("t", (), (), wrong),
    ]
    path = write(tmp_path / "q.csv", "id,a,chain_a,b\nx,AC,DE,GG\n")
    assert message(read_complexes, path) == (f"{path}: has two columns of chain A. Keep one column for each chain.")
    path = write(tmp_path / "q.csv", "id,sequence,a\nx,AC:DE,GG\n")
    assert queries(path) == [("x", ("A", "B"), ("AC", "DE"), "")]
    path = write(tmp_path / "q.csv", "id,text\nx,AC\n")
    assert message(read_complexes, path) == (
        f"{path}: has no columns id and sequence, but id, text. Its first line must name them: id,sequence."
    )
    path = write(tmp_path / "q.csv", "id,target,c\nx,AC,DE\n")
    assert queries(path) == [("x", ("A", "B"), ("AC", "DE"), "")]


def test_fasta_records_in_whole(tmp_path: Path) -> None:
    long = "x" * 70
    path = write(tmp_path / "q.fasta", f">a\nAC::DE\n>{long}\n:AC\n>c\nAC:DE:AC\n>d\n1\n")
    without = "has a chain without residues. Write A:B, with a sequence on both sides"
    assert queries(path) == [
        ("a", (), (), f"{path}: >a {without}"),
        (long, (), (), f"{path}: >{long[:60]} {without}"),
        ("c", ("A", "B", "C"), ("AC", "DE", "AC"), ""),
        ("d", (), (), f"{path}: record 4, 'd', position 1 has '1', which is not an amino acid. Correct or remove it"),
    ]
    path = write(tmp_path / "q.fasta", ">a\nAC\n>b\n1\n>c\n2\n")
    wrong = f"{path}: record 2, 'b', position 1 has '1', which is not an amino acid. Correct or remove it"
    assert queries(path, as_one=True) == [("q", (), (), wrong)]
    path = write(tmp_path / "q.fasta", ">a\nA-C\n>b\n-CC\n>c\nACC\n")
    assert message(read_complexes, path) == (
        f"{path}: has gaps in records of one length, so it is an alignment. Rename it to .a3m."
    )
    for text in (">a\nA-C\n>b\nACC\n", ">a\nA-C\n>b\n-CCA\n"):
        assert queries(write(tmp_path / "q.fasta", text))[0][3].endswith(
            "'a', position 2 has '-', which is not an amino acid. Correct or remove it"
        )
    path = write(tmp_path / "q.fasta", ">2HHB_1|Chains A[auth X], E|x\nAC\n>\nDE\n>c x\nGG\n")
    assert queries(path, as_one=True) == [("q", ("X", "E", "B", "c"), ("AC", "AC", "DE", "GG"), "")]
    path = write(tmp_path / "q.fasta", ">x\nAC\n>\nDE:AC\n")
    assert queries(path, as_one=True) == [("x", ("A",), ("AC",), ""), ("query", ("A", "B"), ("DE", "AC"), "")]


@pytest.mark.parametrize(
    ("headers", "names"),
    [
        (["", ","], ["query_1", "query_2"]),
        (["bb, score=1", "T=0.1, sample=1, x", "T=0.1, sample=22"], ["bb", "bb_1", "bb_22"]),
        (["x, T=0.1", "y, id=3, T=0.1", "y, id=3"], ["x", "y_3_1", "y_3_2"]),
        (["a b", "c", "a d", "a"], ["a_1", "c", "a_2", "a_3"]),
    ],
)
def test_names_of_records(headers: list[str], names: list[str], tmp_path: Path) -> None:
    text = "".join(f">{header}\n{ONE}\n" for header in headers)
    assert [query.name for query in read_complexes(write(tmp_path / "q.fasta", text))] == names
