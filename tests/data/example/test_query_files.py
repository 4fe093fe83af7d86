"""Read queries in every form: text, pipes, several files, folders of other programs."""

import json
from pathlib import Path

import pytest

from tests.data.example.test_read_complexes import write
from warpfold.data.example.query_files import QueryFiles, is_sequence, read_complexes, read_query_files
from warpfold.data.formats.alignment import decode
from warpfold.data.formats.input_files import InputFile
from warpfold.errors import UserError

ONE, TWO = "MKTAYIAKQRQISFVKSH", "GSHMLEERLGLIEVQ"


def named(read: QueryFiles) -> dict[str, tuple[tuple[str, ...], int]]:
    """Return name -> sequences and the number of their alignments."""
    return {query.name: (query.sequences, len(query.alignments)) for query in read.found}


def a3m(sequence: str, *more: str) -> str:
    return f">q\n{sequence}\n" + "".join(f">r{i}\n{row}\n" for i, row in enumerate(more))


def test_a_sequence_itself() -> None:
    (one,) = read_complexes(ONE)
    assert (one.name, one.ids, one.sequences) == ("query", ("A",), (ONE,))
    (both,) = read_complexes(f"{ONE}:{TWO}:{ONE}")
    assert (both.name, both.ids, both.sequences) == ("query", ("A", "B", "C"), (ONE, TWO, ONE))
    assert [query.name for query in read_complexes([ONE, TWO])] == ["query_1", "query_2"]
    (both,) = read_complexes([ONE, TWO], as_one=True)
    assert (both.name, both.ids) == ("query", ("A", "B"))


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
