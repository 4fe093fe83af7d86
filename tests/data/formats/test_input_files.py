"""List the files that pack reads: folders of every layout, alignment databases, and queries read from a prefix."""

import gzip
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.data.pack.pack_inputs import ONE, TWO, alignment, chain, structure
from warpfold.data.formats import input_files as sources
from warpfold.data.formats.alignment import read_alignment
from warpfold.data.formats.input_files import ALIGNMENTS, STRUCTURES, InputFile, find, read_query, stacked
from warpfold.data.pack.pack import find_inputs, pack
from warpfold.data.store.store import Store
from warpfold.errors import UserError

REAL = Path(__file__).parents[4] / "shared/realdata"


def test_files_are_found_by_their_endings_and_named_below_what_was_given(tmp_path: Path) -> None:
    for name in ("a/1.cif", "a/b/2.CIF.gz", "a/3.txt", "4.pdb", "a/x.index"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "linked").symlink_to(tmp_path / "a/b")
    (tmp_path / "a/b/loop").symlink_to(tmp_path / "a")
    assert [source.name for source in find([tmp_path / "a"], STRUCTURES, "structures")] == ["a/1.cif", "a/b/2.CIF.gz"]
    assert find([tmp_path / "linked"], STRUCTURES, "structures")[0].name == "linked/2.CIF.gz"
    named = find([tmp_path / "a/3.txt", tmp_path / "a", tmp_path / "a/1.cif"], STRUCTURES, "structures")
    assert [source.name for source in named] == [
        "a/1.cif",
        "a/3.txt",
        "a/b/2.CIF.gz",
    ]  # each once; named files are read
    (tmp_path / "c/a").mkdir(parents=True)
    (tmp_path / "c/a/1.cif").touch()
    both = find([tmp_path / "a", tmp_path / "c/a"], STRUCTURES, "structures")
    assert len({source.name for source in both}) == len(both) == 3
    with pytest.raises(UserError, match="nowhere: no such file"):
        find([tmp_path / "nowhere"], STRUCTURES, "structures")
    with pytest.raises(UserError, match=r"no alignments found\. Pass files that end in"):
        find([tmp_path / "c"], ALIGNMENTS, "alignments")


def test_names_that_a_source_may_be_called_by() -> None:
    def names_of(path: str) -> set[str]:
        return InputFile(path, Path(path)).protein_names

    assert names_of("/x/1ABC_A/a3m/uniref90_hits.a3m") == {"1abc_a", "uniref90_hits"}
    assert names_of("/x/1abc_A/bfd.a3m.gz") == {"1abc_a", "bfd"}
    assert names_of("/x/msas/1abc_A.a3m") == {"msas", "1abc_a"}
    assert InputFile("n", Path("/x/db.index"), chain="1abc_A", member="bfd.a3m").protein_names == {"1abc_a"}


@pytest.mark.parametrize(
    ("names", "hits", "pairing"),
    [
        ("pdb70_hits.hhr hmm_output.sto pdb_hits.sto x.hhr.gz templates.sto 1abc_A_hmmsearch.a3m.gz", True, False),
        ("uniref90_hits.a3m mgnify_hits.sto bfd_uniclust_hits.a3m pdb1abc.a3m repair.a3m A.a3m", False, False),
        ("non_pairing.a3m unpaired.a3m x_un_paired.a3m uniref90_hits.sto", False, False),
        ("uniprot_hits.sto uniprot.a3m.gz UniProt_2024.a3m pairing.a3m pair.a3m 7abc_paired.a3m", False, True),
    ],
)
def test_what_a_file_is_for_is_known_by_its_name(names: str, hits: bool, pairing: bool) -> None:
    for file in (InputFile(name, Path("/x") / name) for name in names.split()):
        assert (file.is_hits, file.serves_pairing) == (hits, pairing), file.name


def _stockholm(rows: list[tuple[str, str]], width: int) -> str:
    blocks = []
    for start in range(0, len(rows[0][1]), width):
        lines = [f"{name:12s} {row[start : start + width]}" for name, row in rows]
        blocks.append("\n".join([*lines, f"#=GC RF      {'x' * len(rows[0][1][start : start + width])}"]))
    return "# STOCKHOLM 1.0\n#=GF ID x\n\n" + "\n\n".join(blocks) + "\n//\n"


@pytest.mark.parametrize(
    "names",
    [
        ("uniref90_hits.a3m", "bfd_uniclust_hits.a3m", "mgnify_hits.a3m", "a_hits.a3m"),  # OpenProteinSet
        ("uniref90_hits.sto", "bfd_uniref_hits.a3m", "mgnify_hits.sto", "uniprot_hits.sto"),  # AlphaFold2
        ("uniref90_hits.sto", "small_bfd_hits.sto", "mgy_clusters_hits.sto"),
        ("UniRef90.a3m.gz", "BFD.a3m.gz", "MGnify.a3m.gz", "1bfd_A.a3m", "2mgy.a3m"),  # no databases
        ("bfd.mgnify30.metaeuk30.smag30.a3m", "uniref30.a3m"),  # ColabFold: one folder, by name
    ],
)
def test_alignments_are_stacked_as_officially_where_their_names_tell(tmp_path: Path, names: tuple[str, ...]) -> None:
    sources = [InputFile(f"msas/1one_A/{name}", tmp_path / name) for name in sorted(names, reverse=True)]
    assert [source.file for source in stacked(sources)] == list(names)


def test_the_query_is_what_reading_the_whole_gives(tmp_path: Path) -> None:
    deep = "".join(f">{i}\n{ONE[:10]}acd{ONE[10:]}\n" for i in range(9000))
    texts = {
        "plain.a3m": f">q\n{ONE}\n{deep}",
        "windows.a3m": f">q\r\n{ONE}\r\n>r\r\n{ONE}\r\n",
        "annotated.a3m": f">ss_pred\n{'H' * 30}\n>ss_conf\n{'9' * 30}\n>q\n{ONE}\n{deep}",
        "wrapped.a3m": f"#comment\n>q\n{ONE[:12]}\n{ONE[12:]}\n{deep}",
        "gapped.afa": f">q\n{ONE[:12]}--{ONE[12:]}\n>r\n{'A' * 32}\n",
        "rows.aln": "\n".join([ONE] * 3000),
        "one.sto": _stockholm([("q/1-30", ONE), ("r", ONE)], 30),
        "interleaved.sto": _stockholm([("q", ONE), *((f"r{i}", TWO) for i in range(20))], 7),
    }
    for name, text in texts.items():
        for ending in ("", ".gz"):
            path = tmp_path / (name + ending)
            path.write_bytes(gzip.compress(text.encode()) if ending else text.encode())
            assert read_query(InputFile(name, path)) == ONE, path


def test_the_rest_of_a_deep_alignment_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "deep.a3m"
    good = f">q\n{ONE}\n" + f">r\n{ONE}\n" * 10_000
    path.write_bytes(good.encode() + b"\xff not text")
    assert read_query(InputFile("deep", path)) == ONE
    with pytest.raises(UserError):
        read_alignment(path)


@pytest.mark.parametrize(
    "content", [b"", b"\n\n", b"\x1f\x8b\x08cut", gzip.compress(b">q\nACD\n", mtime=0)[:-9], b"\xff\xfe>q\n"]
)
def test_what_holds_no_query_is_one_line_with_the_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.a3m").write_bytes(content)
    with pytest.raises(UserError, match=r"^m/x\.a3m: ") as caught:
        read_query(InputFile("m/x.a3m", tmp_path / "x.a3m"))
    assert str(tmp_path) not in str(caught.value)
    with pytest.raises(UserError, match=r"^m/y\.a3m: no such file"):
        read_query(InputFile("m/y.a3m", tmp_path / "y.a3m"))


def test_real_queries() -> None:
    if not REAL.exists():
        pytest.skip("no real data beside the repository")
    for source in find([REAL / "msas"], ALIGNMENTS, "alignments"):
        try:
            query = read_alignment(source.path).query
        except UserError:
            continue
        assert read_query(source) == query, source.name


def _database(folder: Path, members: dict[str, dict[str, bytes]], shard: str = "db_0") -> Path:
    """Write a shard of an alignment database, with its own index."""
    data, whole, indices = b"", folder / "super.index", {}
    for owner, files in members.items():
        listed = indices[owner] = []
        for name, content in files.items():
            listed.append([name, len(data), len(content)])
            data += content
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{shard}.db").write_bytes(data)
    (folder / f"{shard}.one").write_text(json.dumps(indices))
    known = json.loads(whole.read_text()) if whole.exists() else {}
    whole.write_text(
        json.dumps(known | {owner: {"db": f"{shard}.db", "files": files} for owner, files in indices.items()})
    )
    return folder


MEMBERS = {
    "3lrm_A": {"uniref90_hits.a3m": b">q\nMFAF\n>r\nMF-F\n", "pdb70_hits.hhr": b"Query 3lrm_A\n"},
    "6kwc_A": {"uniref90_hits.a3m": b">q\nGSTI\n"},
}
MORE = {"1abc_A": {"mgnify_hits.sto": b"# STOCKHOLM 1.0\n"}}


def contents(index: Path) -> dict[str, dict[str, bytes]]:
    members: dict[str, dict[str, bytes]] = {}
    for source in find([index], (*ALIGNMENTS, ".hhr"), "files"):
        members.setdefault(source.chain, {})[source.member] = source.read_bytes()
    return members


def test_every_kind_of_index_gives_every_file(tmp_path: Path) -> None:
    _database(tmp_path, MEMBERS)
    _database(tmp_path, MORE, "db_1")
    assert contents(tmp_path / "super.index") == MEMBERS | MORE
    for shard, members in (("db_0", MEMBERS), ("db_1", MORE)):
        assert contents((tmp_path / f"{shard}.one").rename(tmp_path / f"{shard}.index")) == members


def test_a_shard_that_cannot_be_read(tmp_path: Path) -> None:
    """Members before the damage are read. It takes no memory, and a pipe does not block."""
    shard = _database(tmp_path, MEMBERS) / "db_0.db"
    first, last = find([tmp_path / "super.index"], ALIGNMENTS, "alignments")
    with pytest.raises(UserError, match=r"a member has more than 1e-08 GB"):
        first.read_bytes(limit=10)
    shard.write_bytes(shard.read_bytes()[:-3])
    assert first.read_bytes() == MEMBERS["3lrm_A"]["uniref90_hits.a3m"]
    with pytest.raises(UserError, match=r"db_0.db: has 34 bytes, but its index refers to 37: it is cut"):
        last.read_bytes()
    with pytest.raises(UserError, match=r"its index refers to"):
        replace(first, start=2**70, size=2**60).read_bytes(2**62)
    shard.unlink()
    with pytest.raises(UserError, match=r"db_0.db: cannot be read: No such file"):
        first.read_bytes()
    os.mkfifo(shard)
    with pytest.raises(UserError, match=r"db_0\.db: is a pipe, a socket or a device"):
        first.read_bytes()


def test_openproteinset_and_databases_give_what_plain_folders_give(tmp_path: Path) -> None:
    structure(tmp_path / "s/1one.cif", chain("A", ONE), chain("B", ONE))
    structure(tmp_path / "s/1two.cif", chain("A", TWO))
    rows = {"1one_A": (ONE, ONE[::-1]), "1two_A": (TWO, TWO[::-1])}
    for owner, (query, other) in rows.items():
        alignment(tmp_path / f"flat/{owner}/bfd.a3m", query, other)
        alignment(tmp_path / f"set/{owner}/a3m/bfd.a3m", query, other)
        (tmp_path / f"set/{owner}/hhr").mkdir()
        (tmp_path / f"set/{owner}/hhr/pdb70_hits.hhr").write_text("Query q\n\n No Hit\n")
        (tmp_path / f"flat/{owner}/hmm_output.sto").write_text("# STOCKHOLM 1.0\n//\n")
    files = {owner: {"bfd.a3m": (tmp_path / f"flat/{owner}/bfd.a3m").read_bytes(), "x.hhr": b"x"} for owner in rows}
    _database(tmp_path / "db", files)
    depths = {}
    for name in ("flat", "set", "db"):
        report = pack([tmp_path / "s"], [tmp_path / name], tmp_path / f"{name}.store")
        assert report.unused == {}
        assert len(report.unused_hits) == 2
        assert all("--hits" in why for why in report.unused_hits.values())
        depths[name] = Store(tmp_path / f"{name}.store").column("depth")
    assert depths == {"flat": [2, 2, 2], "set": [2, 2, 2], "db": [2, 2, 2]}
    inputs = find_inputs([tmp_path / "s"], [tmp_path / "set"], [tmp_path / "set"])
    assert len(inputs.alignments) == len(inputs.hits) == 2
    assert inputs.unrequested == []


def test_a_damaged_database(tmp_path: Path) -> None:
    structure(tmp_path / "s/1one.cif", chain("A", ONE))
    structure(tmp_path / "s/1two.cif", chain("A", TWO))
    text = {name: f">q\n{query}\n".encode() for name, query in (("1one_A", ONE), ("1two_A", TWO))}
    folder = _database(tmp_path / "db", {name: {"bfd.a3m": data} for name, data in text.items()})
    shard = folder / "db_0.db"
    shard.write_bytes(shard.read_bytes()[:-10])
    report = pack([tmp_path / "s"], [folder], tmp_path / "store")
    assert {entry.name: len(entry.alignments) for entry in report.kept} == {"1one_A": 1, "1two_A": 0}
    ((name, reason),) = report.unused.items()
    assert name == "db/super.index:1two_A/bfd.a3m"
    assert "cut short" in reason
    (folder / "super.index").write_text("{")
    with pytest.raises(UserError, match=r"super\.index: damaged"):
        find([folder], ALIGNMENTS, "alignments")


def test_two_indices_of_one_database_name_each_member_once(tmp_path: Path) -> None:
    folder = _database(tmp_path / "db", {"1one_A": {"bfd.a3m": f">q\n{ONE}\n".encode()}})
    (folder / "db_0.index").write_text(json.dumps({"1one_A": [["bfd.a3m", 0, 34]]}))
    assert len(find([folder], ALIGNMENTS, "alignments")) == 1


def test_the_fingerprint_sees_names_sizes_and_times(tmp_path: Path) -> None:
    one = InputFile("a", Path("/a"), 1, 2)
    others = [InputFile("b", Path("/a"), 1, 2), InputFile("a", Path("/a"), 2, 2), InputFile("a", Path("/a"), 1, 3)]
    assert len({sources.digest([source]) for source in (one, *others)}) == 4
    assert sources.digest([one]) == sources.digest([InputFile("a", Path("/elsewhere"), 1, 2)])
