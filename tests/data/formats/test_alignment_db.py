"""Alignment databases: every file of every chain by either kind of index, and what is wrong with one in a line."""

import json
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from warpfold.data.formats.alignment_db import AlignmentDB, Slice
from warpfold.errors import UserError

FILES = {
    "3lrm_A": {"uniref90_hits.a3m": b">q\nMFAF\n>r\nMF-F\n", "pdb70_hits.hhr": b"Query 3lrm_A\n"},
    "6kwc_A": {"uniref90_hits.a3m": b">q\nGSTI\n", "empty.a3m": b""},
    "1abc_A": {"mgnify_hits.sto": b"# STOCKHOLM 1.0\n"},
}


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """Two shards, an index of each and one of both."""
    whole: dict[str, Any] = {}
    for shard, chains in (("db_0", ["3lrm_A", "6kwc_A"]), ("db_1", ["1abc_A"])):
        data, index = b"", {}
        for chain in chains:
            index[chain] = [[name, 0, len(text)] for name, text in FILES[chain].items()]
            for entry, text in zip(index[chain], FILES[chain].values()):
                entry[1] = len(data)
                data += text
            whole[chain] = {"db": f"{shard}.db", "files": index[chain]}
        (tmp_path / f"{shard}.db").write_bytes(data)
        (tmp_path / f"{shard}.index").write_text(json.dumps(index))
    (tmp_path / "super.index").write_text(json.dumps(whole))
    return tmp_path


def contents(database: AlignmentDB) -> dict[str, dict[str, bytes]]:
    return {chain: {name: part.read() for name, part in database.files(chain).items()} for chain in database.chains()}


def test_every_kind_of_index_gives_every_file(database: Path) -> None:
    assert contents(AlignmentDB(database / "super.index")) == FILES
    assert contents(AlignmentDB(database / "db_0.index")) == {name: FILES[name] for name in ("3lrm_A", "6kwc_A")}
    assert contents(AlignmentDB(database / "db_1.index")) == {"1abc_A": FILES["1abc_A"]}


def test_workers_get_slices(database: Path) -> None:
    part = AlignmentDB(database / "super.index").files("3lrm_A")["pdb70_hits.hhr"]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        assert executor.submit(part.read).result() == FILES["3lrm_A"]["pdb70_hits.hhr"]


def test_a_truncated_shard_spares_the_chains_before_the_cut(database: Path) -> None:
    shard = database / "db_0.db"
    shard.write_bytes(shard.read_bytes()[:-3])
    opened = AlignmentDB(database / "super.index")
    assert opened.files("3lrm_A")["uniref90_hits.a3m"].read() == FILES["3lrm_A"]["uniref90_hits.a3m"]
    with pytest.raises(UserError, match=r"db_0.db: has 34 bytes, its index names 37: cut"):
        opened.files("6kwc_A")["uniref90_hits.a3m"].read()


def test_a_shard_that_is_gone(database: Path) -> None:
    (database / "db_1.db").unlink()
    with pytest.raises(UserError, match=r"db_1.db: cannot be read: No such file"):
        AlignmentDB(database / "super.index").files("1abc_A")["mgnify_hits.sto"].read()


def test_a_chain_that_is_not_there(database: Path) -> None:
    with pytest.raises(KeyError):
        AlignmentDB(database / "super.index").files("9xyz_A")


@pytest.mark.parametrize(
    "entry",
    [
        3,
        {"files": []},
        {"db": 5, "files": []},
        [["x.a3m", 0]],
        [["x.a3m", -1, 4]],
        [["x.a3m", "0", 4]],
        [[["x.a3m"], 0, 4]],
        [[5, 0, 4]],
        [["x.a3m", 10**400, 4]],
        {"db": "x\0.db", "files": []},
        {"db": "x\ud800.db", "files": []},
    ],
)
def test_an_entry_that_is_none_spares_the_others(tmp_path: Path, entry: object) -> None:
    path = tmp_path / "db.index"
    path.write_text(json.dumps({"1abc_A": entry, "2def_A": [["x.a3m", 0, 4]]}))
    opened = AlignmentDB(path)
    with pytest.raises(UserError, match=r"db.index: 1abc_A is not an entry of an alignment database; expected \{CHAIN"):
        opened.files("1abc_A")
    assert opened.files("2def_A") == {"x.a3m": Slice(tmp_path / "db.db", 0, 4)}


def test_what_is_no_index(tmp_path: Path) -> None:
    path = tmp_path / "db.index"
    path.write_text("[]")
    with pytest.raises(UserError, match=r"db.index: is not an index of an alignment database; expected \{CHAIN"):
        AlignmentDB(path)


def test_a_damaged_index(database: Path) -> None:
    index = database / "super.index"
    index.write_text(index.read_text()[:-20])
    with pytest.raises(UserError, match=r"super.index: damaged, or no JSON \(.*char"):
        AlignmentDB(index)
    index.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"super.index: damaged, or no JSON"):
        AlignmentDB(index)


def test_offsets_of_a_damaged_index_are_refused_before_memory_is_taken(database: Path) -> None:
    index = database / "db_1.index"
    index.write_text(json.dumps({"1abc_A": [["x.a3m", 2**70, 2**60]]}))
    with pytest.raises(UserError, match=r"db_1.db: has 16 bytes, its index names"):
        AlignmentDB(index).files("1abc_A")["x.a3m"].read()


def test_an_index_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such file"):
        AlignmentDB(tmp_path / "none.index")


@pytest.mark.parametrize("shard", ["/etc/hostname", "../other.db", "below/../../other.db"])
def test_shards_outside_the_folder_are_refused(tmp_path: Path, shard: str) -> None:
    (tmp_path / "other.db").write_text("secret")
    (tmp_path / "db").mkdir()
    path = tmp_path / "db/super.index"
    path.write_text(json.dumps({"1abc_A": {"db": shard, "files": [["x.a3m", 0, 6]]}}))
    with pytest.raises(UserError, match=r"super\.index: 1abc_A lies in .*, outside the index's folder"):
        AlignmentDB(path).files("1abc_A")


def test_a_shard_that_is_a_pipe_is_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "db.db")
    (tmp_path / "db.index").write_text(json.dumps({"1abc_A": [["x.a3m", 0, 0]]}))
    with pytest.raises(UserError, match=r"db\.db: is a pipe, a socket or a device"):
        AlignmentDB(tmp_path / "db.index").files("1abc_A")["x.a3m"].read()


def test_parts_of_a_member(database: Path) -> None:
    whole = FILES["3lrm_A"]["uniref90_hits.a3m"]
    part = AlignmentDB(database / "super.index").files("3lrm_A")["uniref90_hits.a3m"]
    assert (part.read(3, 4), part.read(10, 99)) == (whole[3:7], whole[10:])
    with pytest.raises(UserError, match=r"db_0\.db: a member has more than 1e-08 GB"):
        part.read(limit=10)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"1abc_A": [["x.a3m", 0, ' + "9" * 5000 + "]]}"])
def test_indices_that_json_cannot_hold(tmp_path: Path, text: str) -> None:
    (tmp_path / "db.index").write_text(text)
    with pytest.raises(UserError, match=r"db\.index: damaged, or no JSON"):
        AlignmentDB(tmp_path / "db.index")
