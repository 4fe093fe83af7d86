"""List the files that pack reads: folders of every layout, alignment databases, and queries read from a prefix."""

import gzip
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.data.pack.pack_inputs import ONE, TWO, alignment, chain, structure
from warpfold.data.formats import input_files as sources
from warpfold.data.formats.alignment import Alignment, parse_a3m, read_alignment
from warpfold.data.formats.input_files import (
    ALIGNMENTS,
    STRUCTURES,
    ChainAlignments,
    InputFile,
    find,
    limit_as_alphafold,
    read_chain_alignments,
    read_query,
    stacked,
    stacking_order,
)
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
    digests = {sources.digest([source]) for source in (one, *others)}
    assert [len(digests), *map(len, digests)] == [4, 32, 32, 32, 32]
    assert sources.digest([one]) == sources.digest([InputFile("a", Path("/elsewhere"), 1, 2)])


# ---- names


def at(path: str, **more: object) -> InputFile:
    return InputFile(path, Path(path), **more)  # type: ignore[arg-type]


def test_members_are_named_by_their_chain() -> None:
    member = at("/x/db.index", chain="1ABC_A", member="bfd.a3m", shard=Path("/x/db_0.db"), start=7)
    assert (member.file, member.title, member.protein) == ("bfd.a3m", "bfd.a3m", "1ABC_A")
    assert member.protein_names == {"1abc_a"}
    assert member.identity == (Path("/x/db_0.db"), 7)
    plain = at("/x/A.a3m")
    assert (plain.size, plain.changed, plain.chain, plain.member, plain.start) == (0, 0, "", "", 0)
    assert plain.identity == (Path("/x/A.a3m"), 0)
    assert at("/x/a\udcff.a3m").title == "a\\udcff.a3m"
    assert sorted([at("b"), at("a")]) == [at("a"), at("b")]


@pytest.mark.parametrize(
    ("path", "is_download"),
    [
        ("/out/x_env/uniref.a3m", True),
        ("/out/x_pairgreedy/pair.a3m", True),
        ("/out/x_paircomplete-env-nofilter/pair.a3m", True),
        ("/out/x_env/x.a3m", True),
        ("/out/x_env/x_env.a3m", False),
        ("/out/x/uniref.a3m", False),
    ],
)
def test_answers_of_the_server(path: str, is_download: bool) -> None:
    assert at(path).is_colabfold_download is is_download


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("UniRef90_hits.sto", 0), ("uniref.a3m", 0), ("x_uniref90.a3m", 0), ("bfd_uniref_hits.a3m", 1),
        ("uniref30.a3m", 1), ("uniclust30.a3m", 1), ("mgnify_hits.sto", 2), ("mgy.a3m", 2),
        ("other.a3m", 3), ("xuniref90.a3m", 3),
    ],
)  # fmt: skip
def test_the_stacking_order(name: str, order: int) -> None:
    assert stacking_order(name) == order


def test_files_are_stacked_by_order_and_then_by_name() -> None:
    files = [InputFile(f"{n}", Path(name)) for n, name in enumerate(("x.a3m", "mgy.a3m", "bfd.a3m", "uniref30.a3m"))]
    assert [file.name for file in stacked(files[::-1])] == ["2", "3", "1", "0"]


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("uniref90_hits.sto", 10_000), ("MGnify_hits.sto.gz", 501), ("uniprot_hits.sto", 50_000),
        ("x_mgnify_hits.sto", None), ("mgnify_hits.a3m", None), ("bfd_hits.sto", None),
    ],
)  # fmt: skip
def test_alphafold_cuts_its_own_files(name: str, limit: int | None) -> None:
    for rows in (3, 501, 10_001, 50_001):
        whole = Alignment(np.zeros((rows, 1), np.uint8), np.zeros((rows, 1), np.int32), [""] * rows)
        used, notes = limit_as_alphafold(whole, InputFile("the name", Path(name)))
        kept = rows if limit is None else min(rows, limit)
        assert len(used) == kept
        assert used.stands_alone is (name != "uniprot_hits.sto")
        note = f"the name: the first {limit} of {rows} rows are used, as in AlphaFold. Rename the file to use all"
        assert notes == ([note] if kept < rows else [])
    paired = parse_a3m(">q\nMKV\n")
    for file, alone in (("x.a3m", True), ("pair.a3m", False)):
        assert limit_as_alphafold(paired, at(file))[0].stands_alone is alone
        assert not limit_as_alphafold(replace(paired, stands_alone=False), at(file))[0].stands_alone


# ---- reading a part


DEEP = f">q\n{ONE}\n" + f">r\n{ONE}\n" * 10_000


def test_only_the_first_records_are_read(tmp_path: Path) -> None:
    """The limit is that of the bytes that are read. A file whose query is not among them is read whole."""
    (tmp_path / "x.a3m").write_text(DEEP)
    file = InputFile("m/x.a3m", tmp_path / "x.a3m")
    assert file.read_head(1 << 17) == DEEP[: 1 << 16].encode()
    assert file.read_head(1 << 16) == DEEP[: 1 << 16].encode()
    assert file.read_bytes() == DEEP.encode()
    limit = (1 << 16) - 1
    whole = f"m/x.a3m: has more than {limit / 1e9:g} GB when unpacked. Leave it out, or allow more: pack --max-file-gb."
    for read in (file.read_head, file.read_bytes):
        with pytest.raises(UserError) as error:
            read(limit)
        assert str(error.value) == whole
    short = InputFile("m/y.a3m", tmp_path / "y.a3m")
    (tmp_path / "y.a3m").write_text(f">q\n{ONE}\n")
    assert short.read_head(100) == f">q\n{ONE}\n".encode()


def test_a_long_query_is_read_in_growing_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_HEAD", 64)
    text = f">q\n{ONE * 20}\n" + f">r\n{ONE * 20}\n" * 20
    for ending in ("", ".gz"):
        path = tmp_path / f"x.a3m{ending}"
        path.write_bytes(gzip.compress(text.encode()) if ending else text.encode())
        head = InputFile("x", path).read_head(1 << 20)
        # The eighth record ends after 4840 bytes.
        assert head == text[: 1 << 13].encode()
    folder = _database(tmp_path / "db", {"1one_A": {"bfd.a3m": text.encode(), "x.a3m": b">q\nMK\n"}})
    first, second = find([folder / "super.index"], ALIGNMENTS, "alignments")
    assert first.read_head(1 << 20) == text[: 1 << 13].encode()
    assert (second.read_head(1 << 20), second.read_bytes()) == (b">q\nMK\n", b">q\nMK\n")
    assert read_query(first) == ONE * 20
    monkeypatch.setattr(sources, "_MAX_HEAD", 128)
    assert InputFile("x", tmp_path / "x.a3m").read_head(1 << 20) == text.encode()
    assert first.read_head(1 << 20) == text.encode()


@pytest.mark.parametrize(
    ("head", "end"),
    [
        (">a\nM\n" * 9, 40),
        (">a\nM\n" * 8, None),
        ("\ufeff\n#c\n" + ">a\nM\n" * 9, 42),
        ("MK\n" * 9, 24),
        ("M\n" * 9, 16),
        ("M" + "\n" * 9, 9),
        ("MK\n" * 7, None),
        ("", None),
    ],
)
def test_the_end_of_the_first_records(head: str, end: int | None) -> None:
    assert sources._find_head_end(head.encode()) == end


def test_the_query_of_a_stockholm_file_needs_few_of_its_lines(tmp_path: Path) -> None:
    """Other rows are not checked, but a row that continues in later blocks is read to its end."""
    path = tmp_path / "x.sto"

    def read(text: str) -> str:
        path.write_text(text)
        return read_query(InputFile("x", path))

    assert read(f"# STOCKHOLM 1.0\n#=GF x\n\nq/1 {ONE[:9]}.\nr !\n\nq/1\t{ONE[9:]}-\nr !\nq/12 MK\n//\n") == ONE
    with pytest.raises(UserError, match="does not fill the match columns"):
        read(f"# STOCKHOLM 1.0\nq {ONE}\nr {ONE}\n#=GC RF {'x' * 29}.\n//\n")
    with pytest.raises(UserError, match="is truncated"):
        read(f"# STOCKHOLM 1.0\nq {ONE}\n")
    complex_text = "#3,2,1\t1,1,2\n>q\nMKVACW\n" + ">s\nMKVACW\n" * 9 + ">t\n!\n"
    assert read(complex_text) == "MKV:AC:W"


# ---- finding files


def listed(*paths: Path, suffixes: tuple[str, ...] = (".a3m",)) -> list[str]:
    return [file.name for file in find([*paths], suffixes, "alignments")]


def test_files_have_their_size_and_time(tmp_path: Path) -> None:
    path = tmp_path / "in/x.a3m"
    path.parent.mkdir()
    path.write_text("12345")
    os.utime(path, ns=(1, 987_654_321))
    (file,) = find([path.parent], (".a3m",), "alignments")
    assert file == InputFile("in/x.a3m", path, 5, 987_654_321)
    assert find([path], (".sto",), "alignments") == [file]


def test_files_of_one_name_are_named_by_their_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a/in/x.a3m", "b/in/x.a3m", "b/in/y.a3m"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert listed(tmp_path / "b/in", tmp_path / "a/in") == [
        f"{tmp_path}/a/in/x.a3m", f"{tmp_path}/b/in/x.a3m", "in/y.a3m",
    ]  # fmt: skip
    for folder in ("c", "d"):
        _database(tmp_path / folder / "db", {"1one_A": {"x.a3m": b">q\nM\n"}})
    assert listed(tmp_path / "c/db", tmp_path / "d/db") == [
        f"{tmp_path}/{folder}/db/super.index:1one_A/x.a3m" for folder in "cd"
    ]
    monkeypatch.chdir(tmp_path / "b/in")
    assert listed(Path("..")) == listed(tmp_path / "b") == ["b/in/x.a3m", "b/in/y.a3m"]
    assert listed(Path()) == ["in/x.a3m", "in/y.a3m"]


def test_links_are_followed_and_each_folder_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "other/deep").mkdir(parents=True)
    (tmp_path / "other/deep/x.a3m").touch()
    (tmp_path / "in/b").mkdir(parents=True)
    (tmp_path / "in/b/y.A3M").touch()
    (tmp_path / "in/b/folder.a3m").mkdir()
    (tmp_path / "in/link").symlink_to(tmp_path / "other")
    (tmp_path / "in/link2").symlink_to(tmp_path / "other")
    (tmp_path / "other/deep/back").symlink_to(tmp_path / "in")
    assert listed(tmp_path / "in") == ["in/b/y.A3M", "in/link/deep/x.a3m"]
    assert [path.name for path in sources.walk(tmp_path / "in", (".a3m",))] == ["y.A3M", "x.a3m"]


def test_folders_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in "gcahebfd":
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.a3m").touch()
    assert [path.parent.name for path in sources.walk(tmp_path, (".a3m",))] == [*"abcdefgh"]
    with pytest.raises(UserError) as error:
        list(sources.walk(tmp_path / "none", (".a3m",)))
    assert str(error.value) == (f"{tmp_path}/none: cannot be read (No such file or directory). Check its permissions.")


def test_what_cannot_be_found(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with pytest.raises(UserError) as error:
        find([tmp_path / "in", tmp_path / "in"], (".a3m", ".sto"), "alignments")
    assert str(error.value) == (
        f"{tmp_path}/in, {tmp_path}/in: no alignments found. Pass files that end in .a3m, .sto, or these with .gz."
    )
    with pytest.raises(UserError) as error:
        find([tmp_path / "none"], (".a3m",), "alignments")
    assert str(error.value) == f"{tmp_path}/none: no such file or folder"


def test_databases_are_read_for_alignments_and_hits_only(tmp_path: Path) -> None:
    folder = _database(tmp_path / "db", {"1one_A": {"x.a3m": b"12", "y.HHR": b"345", "z.txt": b"6"}})
    assert listed(folder) == ["db/super.index:1one_A/x.a3m"]
    (hits,) = find([folder], (".hhr",), "hits")
    assert (hits.name, hits.size, hits.start, hits.member) == ("db/super.index:1one_A/y.HHR", 3, 2, "y.HHR")
    assert (hits.path, hits.shard) == (folder / "super.index", folder / "db_0.db")
    (tmp_path / "db/x.cif").touch()
    assert listed(folder, suffixes=STRUCTURES) == ["db/x.cif"]


EXPECTED = 'The expected form is {CHAIN: {"db": FILE, "files": [[NAME, START, SIZE], ...]}, ...}.'


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        ([], f"is not an index of an alignment database. {EXPECTED}"),
        *(
            ({"b": {"db": "x.db", "files": []}, "a": entry}, f"a is not an entry of an alignment database. {EXPECTED}")
            for entry in (
                3,
                {"db": "x.db"},
                {"db": 3, "files": []},
                {"db": "x\0", "files": []},
                {"db": "\ud800", "files": []},
                {"db": "x.db", "files": [["x.a3m", 0]]},
                {"db": "x.db", "files": [["x.a3m", 0, -1]]},
                {"db": "x.db", "files": [["x.a3m", 0, 10**30]]},
                {"db": "x.db", "files": [["x.a3m", 0, 1], ["y.a3m", True, 1]]},
                {"db": "x.db", "files": [["x.a3m", 1.5, 1], ["y.a3m", 0, 1]]},
                {"db": "x.db", "files": [[3, 0, 1]]},
            )
        ),
        *(
            (
                {"a": {"db": name, "files": [["x.a3m", 0, 1]]}},
                f"the shard of a, {name}, is outside of the index's folder. Move it there.",
            )
            for name in ("/x.db", "../x.db", "y/../../x.db")
        ),
    ],
)
def test_an_index_that_is_none(tmp_path: Path, index: object, problem: str) -> None:
    path = tmp_path / "x.index"
    path.write_text(json.dumps(index))
    with pytest.raises(UserError) as error:
        find([path], ALIGNMENTS, "alignments")
    assert str(error.value) == f"{path}: {problem}"
    path.write_text(json.dumps({"a": {"db": "y/x.db", "files": [["x.a3m", 10**30 - 1, 0]]}}))
    (file,) = find([path], ALIGNMENTS, "alignments")
    assert (file.start, file.size, file.shard) == (10**30 - 1, 0, tmp_path / "y/x.db")


def test_a_member_ends_where_its_index_says(tmp_path: Path) -> None:
    folder = _database(tmp_path / "db", {"1one_A": {"x.a3m": b"12345", "y.a3m": b"678"}})
    first, second = find([folder], ALIGNMENTS, "alignments")
    opened = len(os.listdir("/proc/self/fd"))
    assert (first.read_bytes(5), second.read_bytes(3), second._read_member(1, 9)) == (b"12345", b"678", b"78")
    with pytest.raises(UserError) as error:
        first.read_bytes(4)
    assert str(error.value) == (
        f"{folder}/db_0.db: a member has more than 4e-09 GB. Remove it, or raise the limit (pack --max-file-gb)."
    )
    assert len(os.listdir("/proc/self/fd")) == opened
    (folder / "db_0.db").write_bytes(b"1234567")
    assert first.read_bytes() == b"12345"
    with pytest.raises(UserError) as error:
        second.read_bytes()
    assert str(error.value) == (
        f"{folder}/db_0.db: has 7 bytes, but its index refers to 8: it is cut short, or of another index. Fetch it "
        "again."
    )


# ---- alignments of chains


def test_alignments_of_chains_are_combined() -> None:
    rows = {letters: parse_a3m(f">q\n{letters}\n") for letters in ("MKV", "ACD", "GGG")}
    first = ChainAlignments({"MKV": [rows["MKV"]], "ACD": [rows["ACD"]]}, ["a"], ["n"])
    other = parse_a3m(">r\nMKV\n")
    joined = first.joined(ChainAlignments({"MKV": [other], "GGG": [rows["GGG"]]}, ["b"], ["m"]))
    assert {key: [one.names for one in stack] for key, stack in joined.by_sequence.items()} == {
        "MKV": [["q"], ["r"]], "ACD": [["q"]], "GGG": [["q"]]
    }  # fmt: skip
    assert (joined.unused, joined.notes) == (["a", "b"], ["n", "m"])
    assert (joined.of("mkv"), joined.of("WWW"), ChainAlignments({}, []).notes) == ([rows["MKV"], other], [], [])


def test_alignments_are_matched_with_chains_in_whole(tmp_path: Path) -> None:
    """Hits and other alignments in folders are skipped. A named file must belong to a chain if all chains are known."""
    texts = {
        "in/pdb_hits.sto": "junk", "in/other.a3m": ">q\nWWW\n", "in/mgnify_hits.sto": "# STOCKHOLM 1.0\nq MKV\n//\n",
        "in/pair.a3m": ">q\nMKV\n\0>r\nACD\n", "named/pdb_hits.sto": "# STOCKHOLM 1.0\nq ACD\n//\n",
        "w.a3m": ">q\nWWW\n", "uniref90.a3m": ">q\nACD\n>r\nA-D\n",
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    named = [tmp_path / "named/pdb_hits.sto", tmp_path / "uniref90.a3m"]
    found = read_chain_alignments([tmp_path / "in", *named], ["MKV", "ACD"], "q.fasta")
    assert {key: [(one.names, one.stands_alone) for one in stack] for key, stack in found.by_sequence.items()} == {
        "ACD": [(["q", "r"], True), (["r"], False), (["q"], True)],
        "MKV": [(["q"], True), (["q"], False)],
    }
    assert (found.unused, found.notes) == (["in/other.a3m"], [])
    with pytest.raises(UserError) as error:
        read_chain_alignments([tmp_path / "w.a3m"], ["MKV", "ACD"], "q.fasta")
    assert str(error.value) == (
        f"{tmp_path}/w.a3m: its first row is not the sequence of any record in q.fasta. Pass alignments of these."
    )
    for sequences in (["MKV", "ACD"], ["MKV"]):
        unknown = read_chain_alignments([tmp_path / "w.a3m"], sequences, "q.fasta", are_all=False)
        assert (unknown.by_sequence, unknown.unused) == ({}, [f"{tmp_path}/w.a3m"])
    # The only chain is searched for in a file that is named.
    with pytest.raises(UserError, match=r"w\.a3m: its first row differs from the query at 3 of 3 residues"):
        read_chain_alignments([tmp_path / "w.a3m"], ["MKV", "mkv"], "q.fasta")
