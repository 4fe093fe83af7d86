"""Run `warpfold search`: output, files that stay, continued runs, proteins that fail."""

import gzip
import json
import os
import re
from pathlib import Path

import pytest

from tests.data.search.families import database, family, headers, queries
from tests.test_cli import run
from warpfold.bulk import JobPart
from warpfold.data.example.pairing import pair_rows
from warpfold.data.example.query_files import assemble, read_complexes, sequences_to_search
from warpfold.data.formats.alignment import parse_fasta, read_alignment, write_fasta
from warpfold.data.formats.input_files import read_chain_alignments
from warpfold.data.search import search as searching
from warpfold.data.search.database import Database
from warpfold.data.search.hmmer import Jackhmmer
from warpfold.data.search.search import SearchOptions, search
from warpfold.errors import UserError
from warpfold.prediction.queries import read_queries as predict_reads

REALDATA = (Path(__file__).parents[3] / "../shared/realdata").resolve()
needs_realdata = pytest.mark.skipif(not REALDATA.is_dir(), reason="../shared/realdata is not here")


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Write a FASTA file of three proteins, and a database with their families."""
    return queries(tmp_path / "queries.fasta", 0, 1, 2), database(tmp_path / "db.fasta", 0, 1, 2)


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that collects the sequences that jackhmmer searches for."""
    asked: list[str] = []
    original = Jackhmmer.search

    def search(self, proteins, *rest):
        asked.extend(query.sequence for query in proteins)
        return original(self, proteins, *rest)

    monkeypatch.setattr(Jackhmmer, "search", search)
    return asked


def tree(folder: Path) -> dict[str, bytes]:
    """Return the files in an output folder by name."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.glob("*/*.*")) if "cache" not in p.parts}


def test_every_protein_gets_its_family(files: tuple[Path, Path], tmp_path: Path) -> None:
    heard: list[tuple[int, int, str]] = []
    tell = lambda *told: heard.append(told)  # noqa: E731
    report = search([files[0]], [Database("db", files[1])], tmp_path / "out", templates=files[1], progress=tell)
    assert report["status"] == "complete"
    assert [protein["name"] for protein in report["proteins"]] == ["p0", "p1", "p2"]
    for number, protein in enumerate(report["proteins"]):
        file = tmp_path / "out" / protein["databases"]["db"]["file"]
        alignment = read_alignment(file, family(number)[0])
        assert file == tmp_path / "out" / f"p{number}" / "db.a3m"
        assert len(alignment) == 1 + protein["databases"]["db"]["hits"] > 20
        assert alignment.names[0] == f"p{number}"
        assert all(name.startswith(f"fam{number}_") for name in alignment.names[1:])
        assert protein["databases"]["templates"]["hits"] >= protein["databases"]["db"]["hits"]
    assert json.loads((tmp_path / "out/search.json").read_text()) == report
    for query in predict_reads(files[0], sorted((tmp_path / "out").glob("*/db.a3m"))):
        assert query.rows > 20
    assert heard[0][2] == "reading db"
    assert heard[-1] == (6, 6, "templates")
    assert [done for done, total, _ in heard if total == 6] == sorted(done for done, total, _ in heard if total == 6)


def test_the_same_protein_is_searched_once(files: tuple[Path, Path], tmp_path: Path, searched: list[str]) -> None:
    """This holds for two names, two files, another run, and a renamed or compressed database."""
    again = tmp_path / "again.fasta"
    again.write_text(write_fasta([("other", family(1)[0].lower()), ("p9", family(0)[0])]))
    cache = SearchOptions(cache=tmp_path / "kept")
    report = search([files[0], again], [Database("db", files[1])], tmp_path / "out", options=cache)
    assert sorted(searched) == sorted(family(i)[0] for i in range(3))
    assert len(report["proteins"]) == 5
    first, other = ((tmp_path / "out" / name / "db.a3m").read_text() for name in ("p1", "other"))
    assert other.split("\n", 1) == [">other", first.split("\n", 1)[1]]

    packed = tmp_path / "renamed.fasta.gz"
    packed.write_bytes(gzip.compress(files[1].read_bytes()))
    report = search([again], [Database("new", packed)], tmp_path / "out2", options=cache)
    assert len(searched) == 3
    assert all(protein["databases"]["new"]["cached"] for protein in report["proteins"])
    assert (tmp_path / "out2/other/new.a3m").read_text() == other


@pytest.mark.parametrize("change", ["settings", "rows", "database"])
def test_what_changes_the_result_is_searched_anew(
    files: tuple[Path, Path], tmp_path: Path, searched: list[str], change: str
) -> None:
    search([files[0]], [Database("db", files[1])], tmp_path / "out")
    if change == "database":
        files[1].write_text(files[1].read_text() + ">more\nMKV\n")
    engine = Jackhmmer(2) if change == "settings" else None
    search([files[0]], [Database("db", files[1], 100 if change == "rows" else 10_000)], tmp_path / "out", engine)
    assert len(searched) == 6


def test_a_damaged_result_is_found_again(files: tuple[Path, Path], tmp_path: Path, searched: list[str]) -> None:
    search([files[0]], [Database("db", files[1])], tmp_path / "out")
    before = tree(tmp_path / "out")
    for entry in (tmp_path / "out/cache").glob("*/*.zst"):
        data = entry.read_bytes()
        entry.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    (tmp_path / "out/p1/db.a3m").unlink()
    search([files[0]], [Database("db", files[1])], tmp_path / "out")
    assert len(searched) == 6
    assert tree(tmp_path / "out") == before


def test_parts_and_processes_make_the_whole(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bases = [Database("db", files[1]), Database("same", files[1], 5)]
    search([files[0]], bases, tmp_path / "whole", templates=files[1])
    processes = SearchOptions(workers=2, threads=1)
    search([files[0]], bases, tmp_path / "processes", templates=files[1], options=processes)
    monkeypatch.setattr(searching, "TEMPLATE_BATCH", 1)
    for number in (1, 2):
        part = SearchOptions(part=JobPart(number, 2))
        search([files[0]], bases, tmp_path / "parts", templates=files[1], options=part)
    assert tree(tmp_path / "processes") == tree(tmp_path / "parts") == tree(tmp_path / "whole")
    reports = [json.loads((tmp_path / f"parts/search-{i}-of-2.json").read_text()) for i in (1, 2)]
    assert sorted(p["name"] for report in reports for p in report["proteins"]) == ["p0", "p1", "p2"]


def test_a_protein_that_cannot_be_searched_for_is_an_entry(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is one whose search fails, which has no templates then. A folder with other files is not touched."""
    bad = tmp_path / "bad.fasta"
    bad.write_text(write_fasta([("unknown", "X" * 30), ("dna", "ACGT" * 9), ("long", "MK" * 50_001)]))
    report = search([bad, files[0]], [Database("db", files[1])], tmp_path / "out")
    assert report["status"] == "failed"
    reasons = {failure["name"]: failure["error"] for failure in report["failures"]}
    assert reasons.keys() == {"unknown", "dna", "long"}
    assert "none of the 20" in reasons["unknown"]
    assert "nucleic" in reasons["dna"]
    assert "100002 residues" in reasons["long"]
    assert len(report["proteins"]) == 3
    monkeypatch.setattr(Jackhmmer, "search", lambda self, batch, *rest: [UserError("no room") for _ in batch])
    report = search([files[0]], [Database("db", files[1])], tmp_path / "none", templates=files[1])
    assert [(f["name"], f["database"]) for f in report["failures"]][:4:3] == [("p0", "db"), ("p0", "templates")]
    assert len(report["failures"]) == 6
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/mine.txt").write_text("mine")
    with pytest.raises(UserError, match="contains other files"):
        search([files[0]], [Database("db", files[1])], tmp_path / "mine")
    assert os.listdir(tmp_path / "mine") == ["mine.txt"]


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_the_command(files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = write(tmp_path / "bad.fasta", f">bad\n{'X' * 20}\n")
    command = ("search", bad, files[0], "--database", f"x={files[1]}", f"y={files[1]}", "--max-hits", "y=5", "9")
    code, out, err = run(capsys, *command, "--out", tmp_path / "out")
    assert code == 1
    assert "p1: 8 in x, 4 in y" in out
    assert err == "failed bad: has none of the 20 amino acids, so there is nothing to search for\n"
    code, out, err = run(capsys, *command, "--out", tmp_path / "out", "--json")
    assert json.loads(out)["proteins"][0]["databases"]["x"]["cached"]


def test_complexes_are_searched_for_chain_by_chain(
    files: tuple[Path, Path], tmp_path: Path, searched: list[str]
) -> None:
    """Copies are searched once. The files suit pairing in `predict`: full headers, and a name that says so."""
    chains = [sequence for _, sequence in parse_fasta(files[0].read_bytes())]
    rows = [record.replace(">", ">tr|A0A000|A0A000_RAT ", 1) for record in re.split(r"(?=>)", files[1].read_text())[1:]]
    named = write(tmp_path / "named.fasta", "".join(rows))
    table = write(tmp_path / "q.csv", f"id,sequence\nx,{chains[0]}:{chains[1]}:{chains[0]}\n")
    report = search([table, files[0]], [Database("uniprot", named)], tmp_path / "out")
    assert [protein["name"] for protein in report["proteins"]] == ["x_A", "x_B", "p0", "p1", "p2"]
    assert sorted(searched) == sorted(chains)
    (query,) = read_complexes(table)
    folders = [tmp_path / "out/x_A", tmp_path / "out/x_B"]
    assembly, notes = assemble(query, read_chain_alignments(folders, query.sequences, "q.csv"))
    assert notes == []
    pairings = [chain.pairing for chain in assembly.chains]
    assert all(pairing is not None for pairing in pairings)
    assert len(pair_rows(pairings)) > 5


def test_names_of_databases_and_proteins(tmp_path: Path) -> None:
    def named(text: str, max_rows: dict[str, int] | None = None) -> tuple[str, int | None]:
        base = Database.parse(text, max_rows)
        return base.name, base.max_rows

    # AlphaFold2's limits depend on the name
    assert named("a/uniref90.fasta.gz") == ("uniref90", 10_000)
    assert named("mgy_clusters_2022_05.fa") == ("mgy_clusters_2022_05", 501)
    assert named("MGnify=x.fa") == ("MGnify", 501)
    assert named("uniprot=x.fa") == ("uniprot", 50_000)
    assert named("bfd=x.fa") == ("bfd", None)  # it has none
    assert named("mgnify=x.fa", {"": 7, "bfd": 9}) == ("mgnify", 7)
    assert named("bfd=x.fa", {"": 7, "bfd": 9}) == ("bfd", 9)
    assert Database.parse(f"x={tmp_path}/some.fa").path == tmp_path / "some.fa"
    assert list(sequences_to_search([write(tmp_path / "q.fa", ">sp|P1|X_HUMAN a b\nMKV\n>../x y\nMKW\n")])) == [
        "sp_P1_X_HUMAN", "_x"
    ]  # fmt: skip


@needs_realdata
def test_real_families_are_recovered(tmp_path: Path) -> None:
    """The database has up to 1,500 rows of each of the UniRef alignments that HMMER made for these targets."""
    union = REALDATA / "fastadb/msa_union_db.fasta.gz"
    targets = {"HBB": 0.99, "PDL1_B": 0.98}
    whole = gzip.decompress(union.read_bytes()).decode()
    fasta = tmp_path / "targets.fasta"
    fasta.write_text(
        write_fasta([(n, parse_fasta((REALDATA / f"msas/{n}/query.fasta").read_bytes())[0][1]) for n in targets])
    )
    seqres = REALDATA / "fastadb/pdb_seqres_of_mmcif.fasta.gz"
    globins = Database("globins", REALDATA / "fastadb/globins45.fa")
    report = search([fasta], [Database("union", union), globins], tmp_path / "out", templates=seqres)
    assert report["status"] == "complete"
    for name, share in targets.items():
        rows = {row.rpartition("/")[0] for row in headers((tmp_path / f"out/{name}/union.a3m").read_text())[1:]}
        assert sum(row.partition("|")[0] == name for row in rows) >= share * whole.count(f">{name}|")
    assert report["proteins"][0]["databases"]["globins"]["hits"] == 45
    assert report["proteins"][1]["databases"]["globins"]["hits"] == 0
    hits = (tmp_path / "out/HBB/templates.sto").read_text()
    assert all(f"{chain}/" in hits for chain in ("2hhb_A", "2hhb_B", "1hho_B"))
