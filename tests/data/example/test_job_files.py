"""Read job files of Boltz, AlphaFold 3, its server and Chai: chains, alignments, refused jobs."""

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
from warpfold.data.example.complex import Complex
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
