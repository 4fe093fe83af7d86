"""Read job files of Boltz, AlphaFold 3, its server and Chai: chains, alignments, refused jobs."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from tests.data.example.test_read_complexes import write
from tests.test_cli import run
from warpfold.data.example import job_files
from warpfold.data.example.complex import Complex
from warpfold.data.example.job_files import read_fasta_job, read_jobs
from warpfold.data.example.pairing import pair_rows
from warpfold.data.example.query_files import assemble, read_complexes, read_query_files
from warpfold.data.formats.alignment import decode
from warpfold.errors import UserError
from warpfold.prediction.predictor import load
from warpfold.prediction.queries import lacking_of, read_given

ONE, TWO = "MKTAYIAKQRQISFVKSH", "GSHMLEERLGLIEVQ"
LONG = f"{'T' * 20_000}"


def a3m(sequence: str, *rows: str, header: str = "r") -> str:
    return f">q\n{sequence}\n" + "".join(f">{header}\n{row}\n" for row in rows)


def af3(*proteins: dict[str, Any], **more: Any) -> str:
    listed = [{"protein": {"id": id, "sequence": ONE} | protein} for id, protein in zip("ABCD", proteins)]
    job = {"name": "x", "modelSeeds": [], "sequences": listed, "dialect": "alphafold3", "version": 4}
    return json.dumps(job | more)


def boltz(*lines: str, more: str = "") -> str:
    return "version: 1\nsequences:\n" + "".join(f"  - {line}\n" for line in lines) + more


def of_boltz(id: str, sequence: str, msa: str = "empty") -> str:
    return f"protein: {{id: {id}, sequence: {sequence}, msa: {msa}}}"


def server(*jobs: list[dict[str, Any]], **more: Any) -> str:
    listed = [{"name": f"Job {n}", "modelSeeds": [], "sequences": job} | more for n, job in enumerate(jobs, 1)]
    return json.dumps(listed)


def chain(sequence: str, count: int = 1, **more: Any) -> dict[str, Any]:
    return {"proteinChain": {"sequence": sequence, "count": count} | more}


def pairs_of(query: Complex) -> set[tuple[str, ...]]:
    """Return the paired rows of the chains, without the queries."""
    chains = assemble(query)[0].chains
    rows = pair_rows([chain.pairing for chain in chains])[1:]
    return {
        tuple("" if at < 0 else decode(chain.whole_rows(at[None])[0]) for chain, at in zip(chains, row)) for row in rows
    }


def depths(query: Complex) -> list[int]:
    return [chain.depth for chain in assemble(query)[0].chains]


def altered(sequence: str, letter: str) -> str:
    return sequence[:-1] + letter


# ---- chains and alignments

ID = "protein: {id: A, sequence: " + ONE + "}"
SPLIT = "protein:\n      id: x\n      sequence: >\n        GSHMLEERLG\n        LIEVQ"
DIMER = {"id": ["B", "A"]}, {"id": "Z", "sequence": TWO}
CHAINS = {
    "b.yaml": (boltz(of_boltz("[A, B]", ONE), of_boltz("H", TWO.lower())), "b", "ABH", (ONE, ONE, TWO)),
    "b.yml": (boltz(ID, SPLIT), "b", "Ax", (ONE, TWO)),
    "b.fasta": (f">A|protein|empty\n{ONE}\n>B|PROTEIN\n{TWO}\n>C|protein|\nM\nK", "b", "ABC", (ONE, TWO, "MK")),
    "c.fasta": (f">protein|name=H\n{ONE}\n>protein|L\n{TWO}\n>protein|name=\n{TWO}\n", "c", "HLA", (ONE, TWO, TWO)),
    "c.fa": (f">protein|name=H\n{ONE}\n", "c", "H", (ONE,)),
    "a.json": (af3(*DIMER, name="Hello fold"), "Hello_fold", "BAZ", (ONE, ONE, TWO)),
    "a.txt": (af3({"description": "of version 4"}, name=""), "a", "A", (ONE,)),
    "s.json": (server([chain(ONE, 2), chain(TWO)], dialect="alphafoldserver"), "Job_1", "ABC", (ONE, ONE, TWO)),
    "t.json": (af3({}, version=1, bondedAtomPairs=None, userCCD=None, unknown=[]), "x", "A", (ONE,)),
    "b.in": ("# a note\n---\n" + boltz(of_boltz("A", ONE)), "b", "A", (ONE,)),
}  # fmt: skip


@pytest.mark.parametrize("as_one", [False, True])
@pytest.mark.parametrize("file", CHAINS)
def test_the_proteins_of_a_job_are_the_chains_of_one_complex(tmp_path: Path, file: str, as_one: bool) -> None:
    text, name, ids, sequences = CHAINS[file]
    (query,) = read_complexes(write(tmp_path / file, text), as_one=as_one)
    assert (query.name, "".join(query.ids), query.sequences) == (name, ids, sequences)
    assert query.notes == ()


def test_several_jobs_in_one_file_and_one_that_cannot_be_folded(tmp_path: Path) -> None:
    ligand = {"ligand": {"ligand": "CCD_ATP", "count": 1}}
    text = server([chain(ONE)], [chain(ONE), ligand], [chain(TWO, 2)])
    read = read_given([write(tmp_path / "s.json", text), write(tmp_path / "q.fasta", f">q\n{ONE}\n")], [])
    assert [*read.found] == ["Job_1", "Job_2", "Job_3", "q"]
    assert [query.name for query in read.queries] == ["Job_1", "Job_3", "q"]
    (error,) = read.errors.values()
    assert str(error) == (
        f"{tmp_path}/s.json: Job_2: has a ligand (ATP), which AlphaFold2 cannot fold. Remove it to fold only the "
        "proteins."
    )
    queries = read_query_files(write(tmp_path / "n.json", json.dumps([3, *json.loads(text)[:1]]))).found
    assert [query.error for query in queries] == [
        f"{tmp_path}/n.json: n_1: is not an object with sequences. Correct or remove it.",
        "",
    ]
    same = json.loads(text)[:1] * 2
    named = [job | {"name": name} for job, name in zip([*same, *same], ("β", "α", "", None))]
    queries = read_complexes(write(tmp_path / "n.json", json.dumps(named)))
    assert [query.name for query in queries] == ["_", "__2", "n_3", "n_4"]
    with pytest.raises(UserError, match=r"n\.json: a record is called Job_1 twice. Give each protein a unique name"):
        read_complexes(write(tmp_path / "n.json", json.dumps(same)))


def test_what_is_left_out_without_harm_is_noted(tmp_path: Path) -> None:
    asked = {"modelSeeds": [1, 2], "userCCD": "data_X", "properties": [{"affinity": {"binder": "B"}}]}
    (query,) = read_complexes(write(tmp_path / "a.json", af3({"templates": [{"mmcif": "data_"}]}, **asked)))
    assert query.notes == (
        "modelSeeds are not used: set the number of seeds with --seeds",
        "properties such as affinity are not predicted",
        "components of userCCD are not used",
        "templates in the file are not used: pass their structures with --template",
    )
    (query,) = read_complexes(write(tmp_path / "b.yaml", boltz(ID, more="templates:\n  - cif: x.cif\n")))
    assert query.notes == ("templates in the file are not used: pass their structures with --template",)
    proteins = [chain(ONE, useStructureTemplate=False), chain(ONE, maxTemplateDate="2018-01-20")]
    for protein, noted in zip(proteins, (0, 1)):
        (query,) = read_complexes(write(tmp_path / "s.json", server([protein])))
        assert len(query.notes) == noted
    read = read_given(tmp_path / "b.yaml", [])
    assert "templates in the file" in read.queries[0].notices[0].text


# ---- with which alignments


def test_alignments_that_a_job_names_or_holds_are_used(tmp_path: Path) -> None:
    write(tmp_path / "msa/a.a3m", a3m(ONE, altered(ONE, "A")))
    rows = a3m(ONE, altered(ONE, "A"))
    for name, text in {
        "b.yaml": boltz(of_boltz("[A, B]", ONE, "./msa/a.a3m")),
        "b.fasta": f">A|protein|msa/a.a3m\n{ONE}\n>B|protein|msa/a.a3m\n{ONE}\n",
        "a.json": af3({"id": ["A", "B"], "unpairedMsa": rows, "pairedMsa": ""}),
        "p.json": af3({"id": ["A", "B"], "unpairedMsaPath": str(tmp_path / "msa/a.a3m"), "pairedMsa": ""}),
    }.items():
        (query,) = read_complexes(write(tmp_path / name, text))
        assert (len(query.alignments), depths(query), lacking_of(query, None)) == (1, [2, 2], []), name


@pytest.mark.parametrize(
    ("name", "text", "lacks"),
    [
        ("b.yaml", boltz(of_boltz("A", ONE, "empty")), False),
        ("b.yaml", boltz(of_boltz("A", ONE, '""')), True),
        ("b.yaml", boltz(ID), True),
        ("b.fasta", f">A|protein|empty\n{ONE}\n", False),
        ("b.fasta", f">A|protein\n{ONE}\n", True),
        ("a.json", af3({"unpairedMsa": "", "pairedMsa": ""}), False),
        ("a.json", af3({"unpairedMsa": None, "pairedMsa": None}), True),
        ("a.json", af3({}), True),
    ],
)
def test_what_is_to_be_folded_without_alignment_lacks_none(tmp_path: Path, name: str, text: str, lacks: bool) -> None:
    """The server is asked for alignments that the job lacks, but not for those that it declares `empty`."""
    path = write(tmp_path / name, text)
    asked: list[str] = []

    def fetch(lacking: Any) -> list[Path]:
        asked.extend(sequence for _, without in lacking for sequence in without)
        return []

    read = read_given(path, [], fetch=fetch)
    assert asked == ([ONE] if lacks else [])
    assert [notice.kind for notice in read.queries[0].notices] == ["no_alignment" if lacks else "one_row"]


def test_rows_of_one_key_are_paired_as_boltz_pairs_them(tmp_path: Path) -> None:
    """The order of the rows does not matter, and rows without a partner are not paired."""
    a, b, c, d = (altered(ONE, letter) for letter in "ACDE")
    e, f, g = (altered(TWO, letter) for letter in "ACD")
    write(tmp_path / "a.csv", f"key,sequence\n0,{ONE}\n5,{a}\n7,{b}\n-1,{c}\n,{d}\n")
    write(tmp_path / "b.csv", f"sequence,key\n{TWO},\n{e},7.0\n{f},5.0\n{g},9.0\nxy{f[:1]}{f[1:]},nan\n")
    text = boltz(of_boltz("[A, C]", ONE, "a.csv"), of_boltz("B", TWO, "b.csv"))
    (query,) = read_complexes(write(tmp_path / "b.yaml", text))
    assert pairs_of(query) == {(a, a, f), (b, b, e)}
    kept = {(alignment.query, alignment.stands_alone): len(alignment) for alignment in query.alignments}
    assert kept == {(ONE, True): 3, (ONE, False): 3, (TWO, True): 3, (TWO, False): 3}
    (alone,) = read_complexes(write(tmp_path / "c.yaml", boltz(of_boltz("A", ONE, "a.csv"))))
    assert [(len(one), one.stands_alone) for one in alone.alignments] == [(5, True)]  # all rows, without keys


def test_one_row_pairs_with_several_of_its_letters(tmp_path: Path) -> None:
    row, e, f = altered(ONE, "A"), altered(TWO, "A"), altered(TWO, "C")
    write(tmp_path / "a.csv", f"key,sequence\n,{ONE}\n1,{row}\n2,{row}\n")
    write(tmp_path / "b.csv", f"key,sequence\n,{TWO}\n1,{e}\n2,{f}\n")
    text = boltz(of_boltz("A", ONE, "a.csv"), of_boltz("B", TWO, "b.csv"))
    (query,) = read_complexes(write(tmp_path / "b.yaml", text))
    assert pairs_of(query) == {(row, e), (row, f)}


RAT, PIG = "tr|A0A000|A0A000_RAT", "tr|A0A000|A0A000_PIG"


def test_paired_msas_of_alphafold_3_pair_by_organism_else_by_place(tmp_path: Path) -> None:
    a, b, e, f = altered(ONE, "A"), altered(ONE, "C"), altered(TWO, "A"), altered(TWO, "C")

    def read(first: str, second: str, field: str = "pairedMsa", **more: Any) -> Complex:
        other = "unpairedMsa" if field == "pairedMsa" else "pairedMsa"
        (query,) = read_complexes(
            write(
                tmp_path / "a.json",
                af3({field: first, other: "", **more}, {field: second, other: "", "sequence": TWO, **more}),
            )
        )
        return query

    by_name = read(a3m(ONE, a, header=RAT) + f">{PIG}\n{b}\n", a3m(TWO, e, header=PIG) + f">{RAT}\n{f}\n")
    assert pairs_of(by_name) == {(a, f), (b, e)}
    assert by_name.notes == ()
    by_place = read(a3m(ONE, a, b), a3m(TWO, e, f))
    assert pairs_of(by_place) == {(a, e), (b, f)}
    assert by_place.notes == ("rows of pairedMsa are paired by index, the second with the second and so on",)
    assert not any(alignment.stands_alone for alignment in by_place.alignments)
    unequal = read(a3m(ONE, a, b), a3m(TWO, e))
    assert pairs_of(unequal) == set()
    assert "no rows are paired" in assemble(unequal)[1][0]
    # Rows paired by hand have empty rows between them; rows of a search are in no particular order.
    by_hand = read(a3m(ONE, a, "-" * 18, b), a3m(TWO, e, f, "-" * 15), "unpairedMsa")
    assert pairs_of(by_hand) == {(a, e)}
    assert depths(by_hand) == [3, 3]
    assert "unpairedMsa are paired by index" in by_hand.notes[0]
    searched = read(a3m(ONE, a, b), a3m(TWO, e, f), "unpairedMsa")
    assert pairs_of(searched) == set()
    assert searched.notes == ()


def test_paths_begin_at_the_file_and_then_at_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = boltz(of_boltz("A", ONE, "msa/a.a3m"))
    path = write(tmp_path / "jobs/b.yaml", text)
    write(tmp_path / "msa/a.a3m", a3m(ONE, altered(ONE, "A")))
    assert depths(*read_complexes(path)) == [2]
    monkeypatch.setattr("warpfold.data.example.query_files.STDIN", write(tmp_path / "piped/in", text))
    assert depths(*read_complexes("-")) == [2]
    write(tmp_path / "jobs/msa/a.a3m", a3m(ONE, altered(ONE, "A"), altered(ONE, "C")))
    assert depths(*read_complexes(path)) == [3]
    assert depths(*read_complexes(Path("jobs/b.yaml"))) == [3]


# ---- refused jobs

LIGANDS = "dna: {id: D, sequence: ACGT}", "ligand: {id: [B, C], ccd: ATP}", "ligand: {id: E, smiles: CC}"
CANNOT = [
    ("b.yaml", boltz(ID, *LIGANDS), "b.yaml: has DNA (D), a ligand (B, C: ATP), a ligand (E), which AlphaFold2 cannot"),
    ("b.yaml", boltz(LIGANDS[0]), "has DNA (D), which AlphaFold2 cannot fold. Add a protein: the job has none"),
    ("b.yaml", boltz(ID.replace("}", ", modifications: [{position: 1, ccd: SEP}]}")), "has modified residues (A),"),
    ("b.yaml", boltz(ID.replace("}", ", cyclic: true}")), "has a cyclic chain (A), which"),
    ("b.yaml", boltz(ID, more="constraints:\n  - pocket: {binder: A}\n"), "has constraints, which"),
    ("b.fasta", f">A|protein\n{ONE}\n>C|ccd\nSAH\n>E|smiles\nN[C@@H](C)C(=O)O\n>F|RNA\nACGU\n",
     "has a ligand (C: SAH), a ligand (E), RNA (F), which AlphaFold2 cannot fold. Remove it to fold only the proteins"),
    ("c.fasta", ">protein|name=x\nMK(SEP)AYIAKQRQ\n>ligand|name=l\nCC\n>glycan|name=g\nNAG\n",
     "has modified residues (x), a ligand (l), a glycan (g), which"),
    ("a.json", af3({"modifications": [{"ptmType": "HY3", "ptmPosition": 1}]}), "has modified residues (A), which"),
    ("a.json", af3({}, bondedAtomPairs=[[["A", 1, "CA"], ["G", 1, "CHA"]]]), "has bonds, which"),
    ("a.json", af3({}, sequences=[{"ligand": {"id": "I", "ccdCodes": ["NAG", "FUC"]}}]), "a ligand (I: NAG, FUC), "),
    ("s.json", server([chain(ONE, glycans=[{"residues": "NAG", "position": 8}])]), "has glycans (entry 1), which"),
    ("s.json", server([chain(ONE), {"ion": {"ion": "MG", "count": 2}}]), "has an ion (MG), which"),
    ("s.json", server([chain(ONE), {"rnaSequence": {"sequence": "ACGU", "count": 1}}]), "has RNA, which"),
]  # fmt: skip

BOMB = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi"))
MERGED = "a: &a {x: 1}\nb: &b {<<: [*a, *a]}\n"
WRONG = [
    ("a.json", '{"sequences": [', "a.json: line 1 is not JSON (Expecting value). Correct it"),
    ("a.json", "[" * 100_000, "a.json: is nested too deep"),
    ("a.json", '{"sequences": ' + "[" * 100_000 + "]" * 100_000 + "}", "a.json: is nested too deep"),
    ("a.json", '{"sequences": [], "version": ' + "9" * 9999 + "}", "has a number of thousands of digits"),
    ("a.json", '{"sequences": [{"protein": {}, "protein": {}}]}', "has 'protein' twice in one object"),
    ("a.json", "\udcff".encode(errors="surrogateescape"), "line 1 is not UTF-8 text"),
    ("a.json", "[]", "is an empty list. Pass Boltz's YAML"),
    ("a.json", '{"iptm": 0.8, "ptm": 0.9}', "looks like scores of a prediction. Pass Boltz's YAML, AlphaFold 3's JSON"),
    ("a.json", '{"queries": {"x": {"chains": []}}}', "looks like OpenFold 3's queries. Pass"),
    ("a.json", '{"name": "x"}', "has no sequences, so it is not a job. Pass"),
    ("a.json", "3", "is neither a job nor a list of jobs. Pass"),
    ("b.yaml", "entities:\n  - protein: {}\n", "looks like a design for BoltzGen. Pass"),
    ("b.yaml", "sequences: [\n", "b.yaml: line 2 is not YAML ("),
    ("b.yaml", "a: 1\n--- \nb: 2\n", "is not YAML (but found another document)"),
    ("b.yaml", "sequences: " + "[" * 100_000, "b.yaml: is nested too deep"),
    ("b.yaml", "- " * 100_000, "b.yaml: is nested too deep"),
    ("b.yaml", BOMB + "sequences: *i\n", "has an alias (*) or a tag (!), which are not read"),
    ("b.yaml", MERGED + "sequences: *b\n", "has an alias (*) or a tag (!), which are not read"),
    ("b.yaml", "sequences: !!python/object/apply:os.system [true]\n", "has an alias (*) or a tag (!)"),
    ("b.yaml", boltz(ID) + "# " + "x" * 300_000, "has more than 300,000 characters"),
    ("b.yaml", boltz(ID).replace("1", "2026-13-40"), "its version, '2026-13-40', is unknown"),
    ("b.yaml", boltz(ID) + "\x01", "has a character or a number that is not valid YAML"),
    ("b.yaml", boltz(ID + f"\n    {ID}"), "has 'protein' twice in one entry. Begin each entry with a dash"),
    ("b.yaml", "version: 1\nsequences:\n", "its sequences are not a list, or empty"),
    ("b.yaml", "sequences:\n  protein: {id: A}\n", "its sequences are not a list, or empty"),
    ("b.yaml", boltz(ID).replace("1", "2"), "its version, 2, is unknown. Use version 1"),
    ("a.json", af3({}, version=5), "its version, 5, is unknown. Use"),
    ("a.json", af3({}, version=True), "its version, True, is unknown"),
    ("a.json", af3({}, dialect="alphafold4"), "its dialect, 'alphafold4', is unknown"),
    ("a.json", af3({}, dialect=["x"]), "its dialect, a list, is unknown"),
    ("a.json", af3({}, name=7), "its name, 7, is not text"),
    ("a.json", af3({}, bonds=[1]), "has 'bonds', which is unknown. Correct or remove it"),
    ("a.json", af3({"sequnce": ONE}), "entry 1: has 'sequnce', which is unknown"),
    ("a.json", af3({"sequence": None}), "entry 1: has no sequence"),
    ("b.yaml", boltz("protein: {id: A}"), "entry 1: has no sequence"),
    ("b.yaml", boltz(of_boltz("A", "1234")), "entry 1: has no sequence"),
    ("b.yaml", boltz(of_boltz("A", '" "')), "entry 1: has no sequence"),
    ("b.yaml", boltz(of_boltz("A", "MK1V")), "entry 1: has '1' at position 3, which is not an amino acid"),
    ("b.fasta", ">A|protein\nMK:V\n", "entry 1: has ':' at position 3, which is not an amino acid"),
    ("b.yaml", boltz(of_boltz("A", "ACGTACGTACGT")), "chain A: looks like nucleic acid"),
    ("b.yaml", boltz(of_boltz("1", ONE)), "entry 1: its id, 1, is neither text nor a list of texts. Put it in quotes"),
    ("b.yaml", boltz(of_boltz("[]", ONE)), "entry 1: its id, a list, is neither text"),
    ("a.json", af3({"id": [["A"]]}), "entry 1: its id, a list, is neither text"),
    ("b.yaml", boltz(of_boltz("[A, A]", ONE)), "has two chains called A. Give each chain a unique name"),
    ("b.fasta", f">A|protein\n{ONE}\n>A|protein\n{TWO}\n", "has two chains called A"),
    ("a.json", af3({"id": "a\nb"}), r"'a\nb' cannot be a chain name in mmCIF"),
    ("a.json", af3({"id": ["\ud800", "\ud800"]}), "cannot be a chain name in mmCIF"),
    ("s.json", server([chain(ONE, 0)]), "entry 1: its count, 0, is not an integer from 1 to 1000"),
    ("s.json", server([chain(ONE, 10**9)]), "is not an integer from 1 to 1000"),
    ("b.yaml", boltz("water: {id: A}"), "entry 1: is not a known molecule"),
    ("b.yaml", boltz("protein: MKV"), "entry 1: is not a known molecule"),
    ("b.yaml", boltz("[x]"), "entry 1: is not a known molecule"),
    ("c.fasta", f">protein|name=A\n{ONE}\n>B\n{TWO}\n", ">B: is not like the others"),
    ("b.yaml", boltz(of_boltz("A", ONE, "msa/a.a3m")), "its msa, 'msa/a.a3m', does not exist. Correct the path"),
    ("b.fasta", f">A|protein|./a.a3m\n{ONE}\n", "chain A: its msa, './a.a3m', does not exist"),
    ("a.json", af3({"unpairedMsaPath": "a\0b\ud800" + LONG}), "its unpairedMsaPath, 'a\\x00b\\ud800TTT"),
    ("a.json", af3({"unpairedMsa": a3m(ONE), "unpairedMsaPath": "x"}), "its unpairedMsaPath is not text, or it has"),
    ("a.json", af3({"unpairedMsa": ["x"]}), "its unpairedMsa is not text, or it has"),
    ("a.json", af3({"unpairedMsa": a3m(TWO)}), "chain A: unpairedMsa: its first row has 15 residues, the query has 18"),
    ("a.json", af3({"unpairedMsa": f">q\n{ONE}\n>\ud800\nM\ud800"}), "unpairedMsa: record 2"),
    ("b.yaml", boltz(of_boltz("A", ONE, "two.a3m")), "two.a3m: its first row has 15 residues, the query has 18"),
    ("b.yaml", boltz(of_boltz("A", ONE, "two.csv")), "two.csv: its first row has 15 residues, the query has 18"),
    ("b.yaml", boltz(of_boltz("A", ONE, "id.csv")), "id.csv: has no columns key and sequence"),
    ("b.yaml", boltz(of_boltz("A", ONE, "short.csv")), "short.csv: line 3 has no key or no sequence"),
    ("b.yaml", boltz(of_boltz("A", ONE, "more.csv")), "more.csv: has NUL bytes, so it is not a table"),
]  # fmt: skip
BESIDE = {
    "two.a3m": a3m(TWO),
    "two.csv": f"key,sequence\n0,{TWO}\n",
    "id.csv": f"id,sequence\nx,{ONE}\n",
    "short.csv": f"key,sequence\n0,{ONE}\n0\n",
    "more.csv": f"key,sequence\n0,{ONE}\n1,{ONE}\0>x\n2,{ONE}\n",
}


@pytest.mark.parametrize(("name", "text", "said"), [*CANNOT, *WRONG])
def test_a_job_that_cannot_be_folded_says_why_and_costs_itself(
    tmp_path: Path, name: str, text: str | bytes, said: str
) -> None:
    for file, content in BESIDE.items():
        write(tmp_path / file, content)
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    good = write(tmp_path / "good.fasta", f">good\n{TWO}\n")
    (bad, other) = read_query_files([tmp_path / name, good]).found
    assert other.name == "good"
    assert not bad.sequences
    assert said in bad.error
    assert bad.error.startswith(f"{tmp_path / name}: ")
    assert re.search("[.;] ", bad.error)
    assert bad.error.isprintable()
    assert len(bad.error) < 600


# ---- exact forms and limits


def job(text: str, ending: str = ".json", here: Path = Path("/nowhere"), name: str = "n") -> Complex:
    (query,) = read_jobs(text.encode(), ending, "f", here, name)
    return query


SCALARS = """
text: [1:30, 2026-01-02, NO, yes, on, 1_000, 0b1, 0x, ~x, 1e, .inf, "1", 'null', id, nulls]
numbers: [0, -7, +12, 010, 0o17, 0xfF, 12345678901234567890]
floats: [1.5, -.5, 2., 1e3, +1.25E-2, 0.0]
others: [null, Null, NULL, ~, true, True, TRUE, false, False, FALSE]
"""


def test_only_numbers_true_false_and_null_are_not_text() -> None:
    content = job_files._parse_yaml(SCALARS, "f")
    text = ["1:30", "2026-01-02", "NO", "yes", "on", "1_000", "0b1", "0x", "~x", "1e", ".inf", "1", "null", "id"]
    assert content["text"] == [*text, "nulls"]
    assert repr(content["numbers"]) == "[0, -7, 12, 10, 15, 255, 12345678901234567890]"
    assert repr(content["floats"]) == "[1.5, -0.5, 2.0, 1000.0, 0.0125, 0.0]"
    assert repr(content["others"]) == repr([None] * 4 + [True] * 3 + [False] * 3)
    assert job_files._parse_yaml("a:\nb: a\nc: [a, a, {a: a}, {a: b}]\n", "f") == {
        "a": None, "b": "a", "c": ["a", "a", {"a": "a"}, {"a": "b"}]
    }  # fmt: skip


def test_limits_of_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    assert job_files._parse_yaml("[" * 20 + "]" * 20, "f")
    assert job_files._parse_yaml("9" * 40, "f") == int("9" * 40)
    refusals = {
        "[" * 21 + "]" * 21: "is nested too deeply. Write it as its program describes it.",
        "9" * 41: "has a character or a number that is not valid YAML. Correct it.",
        "a: 1\na: 2\n": "has 'a' twice in one entry. Begin each entry with a dash.",
        "- {a: 1, b: {a: 1}, a: 2}\n": "has 'a' twice in one entry. Begin each entry with a dash.",
        "a: 1\nb: [\n": "line 3 is not YAML (expected the node content, but found '<stream end>'). Correct it.",
    }
    for text, message in refusals.items():
        with pytest.raises(UserError) as error:
            job_files._parse_yaml(text, "f")
        assert str(error.value) == f"f: {message}"
    monkeypatch.setattr(job_files, "MAX_YAML_CHARACTERS", 4)
    assert job_files._parse_yaml("a: 1", "f") == {"a": 1}
    with pytest.raises(UserError) as error:
        job_files._parse_yaml("a: 12", "f")
    assert str(error.value) == "f: has more than 4 characters. Pass alignments as files of their own."


NEW = {"dialect": "alphafold3", "sequences": [{"protein": {"sequence": ONE}}]}
MANY = [{"ligand": {"id": f"{n}" * 70}} for n in range(9)]
SHORT = {"id": "A", "sequence": ONE}


def with_job(**changes: Any) -> str:
    return json.dumps(NEW | changes)


def with_protein(**changes: Any) -> str:
    return with_job(sequences=[{"protein": SHORT | changes}])


@pytest.mark.parametrize("version", [1, 4, None])
def test_versions_that_are_read(version: int | None) -> None:
    assert job(with_job(version=version)).error == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (with_job(version=0), "its version, 0, is unknown. Use versions 1 to 4."),
        (with_job(version=5), "its version, 5, is unknown. Use versions 1 to 4."),
        (with_job(version=2, dialect="alphafoldserver"), "its version, 2, is unknown. Use version 1."),
        (with_job(version=2, dialect=None), "its version, 2, is unknown. Use version 1."),
        (
            with_job(dialect="x" * 80),
            f"its dialect, '{'x' * 60}', is unknown. Pass Boltz's YAML, AlphaFold 3's JSON or its server's, or FASTA.",
        ),
        (with_job(name={"a": 1}), "its name, an object, is not text. Put it in quotes."),
        (with_job(name=10**80), f"its name, 1{'0' * 69}, is not text. Put it in quotes."),
        (
            with_job(sequences=[{}, 1]),
            "entry 1: is not a known molecule, such as `protein: ...`. Correct or remove it.",
        ),
        (
            with_job(sequences=[{"protein": SHORT}, {"protein": SHORT, "dna": {}}]),
            "entry 2: is not a known molecule, such as `protein: ...`. Correct or remove it.",
        ),
        (
            with_protein(id=3),
            "entry 1: its id, 3, is neither text nor a list of texts. Put it in quotes.",
        ),
        (with_protein(count=1001), "entry 1: its count, 1001, is not an integer from 1 to 1000. Correct it."),
        (with_protein(count=True), "entry 1: its count, True, is not an integer from 1 to 1000. Correct it."),
        (with_protein(x=1), "entry 1: has 'x', which is unknown. Correct or remove it."),
        (with_job(x=[0]), "has 'x', which is unknown. Correct or remove it."),
        (
            with_job(sequences=MANY),
            f"has {', '.join('a ligand (' + f'{n}' * 50 for n in range(8))} ..., which AlphaFold2 cannot fold. Add a "
            "protein: the job has none.",
        ),
        (
            with_job(sequences=[{"protein": SHORT}, {"ligand": {"id": [f"L{n}\t" for n in range(9)]}}]),
            "has a ligand (L0?, L1?, L2?, L3?, L4?, L5?, L6?, L7? ...), which AlphaFold2 cannot fold. Remove it to "
            "fold only the proteins.",
        ),
        (
            with_job(sequences=[{"dna": {"id": [f"L{n}" for n in range(8)]}}]),
            "has DNA (L0, L1, L2, L3, L4, L5, L6, L7), which AlphaFold2 cannot fold. Add a protein: the job has none.",
        ),
        (
            with_job(sequences=[{"ion": {"ion": "CCD_MG"}}, {"ligand": {"ccd": [], "ligand": "CCD_A", "ion": "B"}}]),
            "has an ion (MG), a ligand (A), which AlphaFold2 cannot fold. Add a protein: the job has none.",
        ),
        (
            with_job(sequences=[{"protein": {"sequence": ONE, "cyclic": True, "glycans": [1], "modifications": []}}]),
            "has a cyclic chain (entry 1), glycans (entry 1), which AlphaFold2 cannot fold. Remove it to fold only the "
            "proteins.",
        ),
        (
            with_job(bondedAtomPairs=[1], covalent_bonds=[1], constraints=[1]),
            "has constraints, bonds, which AlphaFold2 cannot fold. Remove it to fold only the proteins.",
        ),
        (
            with_protein(unpairedMsaPath="none.a3m"),
            "chain A: its unpairedMsaPath, 'none.a3m', does not exist. Correct the path, relative to the file's folder "
            "or the working directory, or remove it and pass alignments with --msa.",
        ),
        (
            with_protein(pairedMsa=f">q\n{ONE}\n", pairedMsaPath="y"),
            "chain A: its pairedMsaPath is not text, or it has pairedMsa too. Keep one of them.",
        ),
        ('{"a": 1, "b": {"c": 1, "d": 2, "c": 3}}', "has 'c' twice in one object. Write two objects, or remove one."),
        ("{\n3", "line 2 is not JSON (Expecting property name enclosed in double quotes). Correct it."),
        ('{"sequences": 1e999}', "its sequences are not a list, or empty. List the proteins there."),
        ('{"plddt": [], "queries": 1}', "looks like OpenFold 3's queries. Pass Boltz's YAML, AlphaFold 3's JSON or its "
         "server's, or FASTA."),
    ],
)  # fmt: skip
def test_refusals_of_a_job_in_whole(text: str, message: str) -> None:
    refused = job(text)
    assert (refused.name, refused.ids, refused.sequences) == ("n", (), ())
    assert refused.error == f"f: {message}"


def test_unnamed_chains_take_the_free_names() -> None:
    """Copies are listed after each other. The count of a protein with names is not used."""
    proteins = [("B", 5), (None, 3), (["D", "A"], 1), (None, 1), ("x", 1)]
    sequences = [{"protein": {"id": id, "sequence": ONE, "count": count}} for id, count in proteins]
    query = job(with_job(sequences=sequences))
    assert query.ids == ("B", "C", "E", "F", "D", "A", "G", "x")
    assert len(query.sequences) == 8
    assert len(job(with_job(sequences=[{"protein": {"sequence": ONE, "count": 1000}}])).ids) == 1000


def test_settings_without_a_value_need_no_note() -> None:
    values: dict[str, Any] = {"modelSeeds": [], "properties": None, "userCCD": "", "userCCDPath": "", "templates": []}
    assert job(with_job(**values, unknown="", name=None)).notes == ()
    assert job(with_protein(templates=[1])).notes == (
        "templates in the file are not used: pass their structures with --template",
    )
    assert job(with_job(userCCDPath="x")).notes == ("components of userCCD are not used",)
    server_notes = job(json.dumps([{"sequences": [chain(ONE, useStructureTemplate=True)]}])).notes
    assert server_notes == ("templates are not searched for: pass hits with --hits",)


def test_files_that_a_job_refers_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are listed also if the job cannot be folded. Missing files and other values are not."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.a3m", "b.a3m", "t.cif", "u.cif", "jobs/ccd.cif", "w.pdb"):
        write(tmp_path / name, "x")
    protein = {"msa": "a.a3m", "unpairedMsaPath": "../b.a3m", "templates": [{"mmcifPath": "t.cif"}, 3, {"pdb": 5}]}
    text = {
        "sequences": [{"protein": protein}, 7, {"ligand": [], "dna": {"pairedMsaPath": "none"}}],
        "templates": [{"cif": str(tmp_path / "u.cif"), "pdb": "w.pdb"}],
        "userCCDPath": "ccd.cif",
    }
    query = job(json.dumps(text), here=tmp_path / "jobs")
    assert query.error
    names = ["jobs/ccd.cif", "a.a3m", "b.a3m", "u.cif", "w.pdb", "t.cif"]
    assert query.uses == tuple((tmp_path / name).resolve() for name in names)
    assert job('{"sequences": 5, "templates": {"cif": "t.cif"}}').uses == ()


def test_records_of_boltz_and_chai_in_whole(tmp_path: Path) -> None:
    def read(*records: tuple[str, str]) -> Complex:
        return read_fasta_job([header for header, _ in records], [text for _, text in records], "f", tmp_path, "n")

    assert read(("A|protein|a|b.a3m x|y", ONE)).error.startswith("f: chain A: its msa, 'a|b.a3m', does not exist.")
    long = "B" * 70
    assert read(("A|protein", ONE), (long, TWO)).error == (
        f"f: >{'B' * 60}: is not like the others, >CHAIN|protein|MSA or >protein|name=CHAIN. Use one form for all "
        "records"
    )
    assert read(("A|protein|empty", ONE), ("B|CCD", "SAH"), ("C|smiles", "CC")).error == (
        "f: has a ligand (B: SAH), a ligand (C), which AlphaFold2 cannot fold. Remove it to fold only the proteins."
    )
    assert read(("protein|name=H|x", "MK[SEP]A(TPO)")).error == (
        "f: has modified residues (H|x), which AlphaFold2 cannot fold. Remove it to fold only the proteins."
    )
    assert read(("RNA|name=R", "AC(X)GU"), ("ligand|L", "C(C)O")).error == (
        "f: has RNA (R), a ligand (L), which AlphaFold2 cannot fold. Add a protein: the job has none."
    )
    query = read(("Protein|H", ONE), ("PROTEIN|name=", TWO))
    assert (query.name, query.ids, query.sequences, query.error) == ("n", ("H", "A"), (ONE, TWO), "")


# ---- alignments in whole


def alignments_of(query: Complex) -> list[tuple[list[str], bool, list[int] | None]]:
    """Return for each alignment the rows, whether it stands alone, and the keys, numbered by first occurrence."""
    numbers: dict[int, int] = {0: 0}
    return [
        (
            [decode(row) for row in one.rows],
            one.stands_alone,
            None if one.pair_keys is None else [numbers.setdefault(int(key), len(numbers)) for key in one.pair_keys],
        )
        for one in query.alignments
    ]


def two(first: dict[str, str], second: dict[str, str]) -> Complex:
    proteins = [
        {"protein": {"id": "A", "sequence": "MKV"} | first},
        {"protein": {"id": "B", "sequence": "ACD"} | second},
    ]
    return job(with_job(sequences=proteins))


def msa(*rows: str, header: str = "r") -> str:
    return "".join(f">{header}\n{row}\n" for row in rows)


BY_INDEX = "rows of {} are paired by index, the second with the second and so on"


@pytest.mark.parametrize(
    ("first", "second", "expected", "notes"),
    [
        # Rows with a few gaps are pairs. Empty rows are not, and neither is a row next to an empty one.
        (
            {"unpairedMsa": msa("MKV", "M-V", "MKL", "MKI")}, {"unpairedMsa": msa("ACD", "A-D", "---", "-CD")},
            [(["MKV", "MKL"], True, None), (["MKV", "M-V", "MKI"], False, [0, 1, 2]),
             (["ACD", "---"], True, None), (["ACD", "A-D", "-CD"], False, [0, 1, 2])],
            "unpairedMsa",
        ),
        # Without an empty row, or with a pairedMsa of any chain, rows of unpairedMsa are not paired by index.
        (
            {"unpairedMsa": msa("MKV", "M-V")}, {"unpairedMsa": msa("ACD", "A-D")},
            [(["MKV", "M-V"], True, None), (["ACD", "A-D"], True, None)], "",
        ),
        (
            {"unpairedMsa": msa("MKV", "---"), "pairedMsa": msa("MKV")}, {"unpairedMsa": msa("ACD", "A-D")},
            [(["MKV", "---"], True, None), (["MKV"], False, None), (["ACD", "A-D"], True, None)], "",
        ),
        # One organism in one chain is enough for pairing by organisms.
        (
            {"pairedMsa": msa("MKV", "M-V")}, {"pairedMsa": msa("ACD", "A-D") + msa("ACE", header=RAT)},
            [(["MKV", "M-V"], False, None), (["ACD", "A-D", "ACE"], False, None)], "",
        ),
        (
            {"pairedMsa": msa("MKV", "M-V", "MKL")}, {"pairedMsa": msa("ACD", "A-D") + msa("ACE", header=RAT)},
            [(["MKV", "M-V", "MKL"], False, None), (["ACD", "A-D", "ACE"], False, None)], "",
        ),
        (
            {"pairedMsa": msa("MKV", "M-V")}, {"pairedMsa": msa("ACD") + msa("A-D", header=RAT)},
            [(["MKV", "M-V"], False, None), (["ACD", "A-D"], False, None)], "",
        ),
        # Empty rows of two chains are no pair.
        (
            {"unpairedMsa": msa("MKV", "---", "MKL")}, {"unpairedMsa": msa("ACD", "A-D", "---")},
            [(["MKV", "---", "MKL"], True, None), (["ACD", "A-D", "---"], True, None)], "unpairedMsa",
        ),
        # The organism of the first row, the chain itself, is not used.
        (
            {"pairedMsa": msa("MKV", header=RAT) + msa("M-V")}, {"pairedMsa": msa("ACD", "---")},
            [(["MKV", "M-V"], False, None), (["ACD", "---"], False, None)], "pairedMsa",
        ),
        # The alignments have no rows but the chains.
        (
            {"pairedMsa": msa("MKV")}, {"pairedMsa": msa("ACD")},
            [(["MKV"], False, None), (["ACD"], False, None)], "",
        ),
        # Copies of one sequence are one chain.
        (
            {"pairedMsa": msa("MKV", "M-V")}, {"sequence": "MKV", "pairedMsa": msa("MKV", "MKL")},
            [(["MKV", "M-V"], False, None), (["MKV", "MKL"], False, None)], "",
        ),
    ],
)  # fmt: skip
def test_rows_of_alphafold_3_in_whole(
    first: dict[str, str], second: dict[str, str], expected: list[Any], notes: str
) -> None:
    query = two(first, second)
    assert query.error == ""
    assert query.notes == ((BY_INDEX.format(notes),) if notes else ())
    assert alignments_of(query) == expected


@pytest.mark.parametrize("ending", [".csv", ".CSV.gz"])
def test_tables_of_boltz_in_whole(tmp_path: Path, ending: str) -> None:
    """Keys that only one chain has are unpaired, also of both copies of a chain. The first row has no key."""
    tables = {
        "a": "key,sequence\n7,MKV\n5,MKL\n5.0,M-V\n-1,MKI\nNaN,MKW\n8,MKY\n,MKF\n7,MRV\n",
        "b": "key,sequence\n7,ACD\n5,ACE\n9,A-D\n7,ACF\n",
    }
    for name, text in tables.items():
        data = gzip.compress(text.encode()) if ending.endswith("gz") else text.encode()
        (tmp_path / f"{name}{ending}").write_bytes(data)
    text = boltz(of_boltz("[A, C]", "MKV", f"a{ending}"), of_boltz("B", "ACD", f"b{ending}"))
    query = job(text, ".yaml", here=tmp_path)
    assert query.error == ""
    assert alignments_of(query) == [
        (["MKV", "MKI", "MKW", "MKY", "MKF"], True, None),
        (["MKV", "MKL", "M-V", "MRV"], False, [0, 1, 1, 2]),
        (["ACD", "A-D"], True, None),
        (["ACD", "ACE", "ACF"], False, [0, 1, 2]),
    ]


def test_a_bare_protein_has_its_own_row() -> None:
    for entry, lacks in (({"unpairedMsa": ""}, False), ({"msa": "empty"}, False), ({"pairedMsa": ""}, True)):
        query = job(with_protein(**entry))
        assert [len(one) for one in query.alignments] == ([] if lacks else [1])
        assert all(one.stands_alone and one.names == ["f: chain A"] for one in query.alignments)
    both = job(with_protein(unpairedMsa="", pairedMsa=msa(ONE)))
    assert [one.stands_alone for one in both.alignments] == [False]


# ---- folders


def test_other_json_and_yaml_in_a_folder_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path / "in/a.json", af3({}))
    for name, text in {
        "summary.json": '{"predictions": []}', "empty.json": "", "broken.json": "{", "list.json": "[1]",
        "hparams.yaml": "lr: 1\n", "env.yml": "name: x\ndependencies:\n  - python\n", "x.yaml": "",
        "x_ranking_scores.csv": "seed,sample,ranking_score\n1,0,0.9\n", "x_0.csv": f"key,sequence\n0,{TWO}\n",
        "x_model.cif": "data_", "model.cif": "data_", "fold_x_model_0.cif": "data_", "pred.model_idx_0.cif": "data_",
    }.items():  # fmt: skip
        write(tmp_path / "in" / name, text)
    read = read_query_files(tmp_path / "in")
    assert [query.name for query in read.found] == ["x"]
    assert len(read.predicted) == 4
    write(tmp_path / "in/b.yaml", "sequences: [\n")  # read as a job
    assert [query.name for query in read_query_files(tmp_path / "in").found if query.error] == ["b"]
    (tmp_path / "in/a.json").unlink()
    (tmp_path / "in/b.yaml").unlink()
    with pytest.raises(UserError, match="in: has no queries, only predictions, template hits or other files"):
        read_query_files(tmp_path / "in")


def test_files_that_jobs_name_are_no_queries(tmp_path: Path) -> None:
    """This includes files of a job that cannot be folded: its proteins would otherwise be folded one by one."""
    for name, text in BESIDE.items():
        write(tmp_path / "in/msa" / name, text)
    write(tmp_path / "in/msa/one.a3m", a3m(ONE, altered(ONE, "A")))
    write(tmp_path / "in/templates/t.cif", "data_")
    more = "templates:\n  - cif: templates/t.cif\n"
    write(tmp_path / "in/z.yaml", boltz(of_boltz("A", TWO, "msa/two.a3m"), of_boltz("L", ONE, "msa/id.csv"), more=more))
    write(tmp_path / "in/a.fasta", f">A|protein|msa/two.csv\n{TWO}\n")
    listed = [{"protein": {"id": "A", "sequence": ONE, "unpairedMsaPath": "msa/short.csv"}}, {"ligand": {"id": "B"}}]
    write(tmp_path / "in/b.json", af3(sequences=listed))
    write(tmp_path / "in/c.yaml", boltz(of_boltz("A", TWO, "msa/more.csv")))
    queries = read_query_files(tmp_path / "in").found
    assert [(query.name, bool(query.error)) for query in queries] == [
        ("a", False), ("x", True), ("c", True), ("one", False), ("z", True),
    ]  # fmt: skip


def test_alignments_beside_a_job_are_of_the_chains_that_have_none(tmp_path: Path) -> None:
    write(tmp_path / "in/deep.a3m", a3m(ONE, *(altered(ONE, letter) for letter in "ACDE")))
    write(tmp_path / "in/other.a3m", a3m(TWO, altered(TWO, "A")))
    text = boltz(of_boltz("A", ONE, "empty"), f"protein: {{id: B, sequence: {TWO}}}")
    write(tmp_path / "in/b.yaml", text)
    (query,) = read_query_files(tmp_path / "in").found
    assert (query.name, depths(query)) == ("b", [1, 2])


# ---- from the command line and from Python


def test_jobs_are_folded_and_a_bad_one_is_listed(
    tmp_path: Path, tiny_params: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = server([chain(ONE)], [chain(ONE, 2)], [{"dnaSequence": {"sequence": "ACGT", "count": 1}}])
    path, out = write(tmp_path / "s.json", text), tmp_path / "out"
    write(tmp_path / "b.yaml", boltz(of_boltz("X", ONE, "a.csv")))
    write(tmp_path / "a.csv", f"key,sequence\n0,{ONE}\n1,{altered(ONE, 'A')}\n")
    options = "--params", tiny_params, "--out", out, "--device", "cpu", "--recycles", "0"
    code, _, said = run(capsys, "predict", path, tmp_path / "b.yaml", *options)
    assert code == 1
    assert "parameters for single chains, but Job_2 is a complex" in said
    assert f"failed Job_3: {path}: Job_3: has DNA, which AlphaFold2 cannot fold" in said
    summary = json.loads((out / "summary.json").read_text())
    assert {prediction["name"]: prediction["msa_depth"] for prediction in summary["predictions"]} == {
        "Job_1": 1,
        "b": 2,
    }
    results = load(tiny_params, "cpu").fold_many(path, recycles=0)
    assert [(prediction.name, bool(prediction.prediction)) for prediction in results] == [
        ("Job_1", True),
        ("Job_2", False),
        ("Job_3", False),
    ]
    code, _, said = run(capsys, "plan", path, "--params", tiny_params)
    assert (code, "has DNA" in said) == (2, True)


# ---- damage

DAMAGED = {
    "d.yaml": boltz(of_boltz("[A, B]", ONE), "ligand: {id: C, ccd: ATP}").encode(),
    "d.json": af3({"unpairedMsa": a3m("MKV", "MKA")}, {"id": ["B", "C"], "pairedMsa": ""}).encode(),
    "d.fasta": f">A|protein|empty\n{ONE}\n>C|ccd\nSAH\n".encode(),
}


@drawn(
    st.sampled_from(sorted(DAMAGED)),
    st.integers(0, 400),
    st.sampled_from(["", *"\0\n>#:\t,\"-9[]{}&*!|%'\\"]),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_a_damaged_job_is_read_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, name: str, at: int, put: str, cut: bool
) -> None:
    path, text = tmp_path_factory.getbasetemp() / name, DAMAGED[name]
    at %= len(text)
    path.write_bytes(text[:at] + put.encode() + text[at + cut :])
    refused = ""
    try:
        for query in read_complexes(path):
            assemble(query)
    except UserError as error:
        refused = str(error)
    assert not refused or (re.search("[.;] ", refused) and "\n" not in refused)
