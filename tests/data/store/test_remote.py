"""Read remote stores: the bytes of the local store despite passing failures, and one line for other failures."""

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from tests.data.store.test_store import arrays
from tests.downloads import Fault, FileServer, serving
from tests.test_cli import run
from warpfold.data.store import remote
from warpfold.data.store.local import Folder
from warpfold.data.store.remote import BlockCache, Remote, parse_place
from warpfold.data.store.store import Store, StoreWriter, pack_record
from warpfold.errors import StorageError, UserError

pytest.importorskip("aiohttp", reason="needs pip install '.[remote]'")


def write(path: Path) -> Path:
    with StoreWriter(path, shard_bytes=1 << 18) as writer:
        for i in range(3):
            writer.add(f"entry_{i}", pack_record(arrays(i), {"i": i}), {"length": 90})
        writer.finish({"pack.json": "{}"})
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "pdb")


@pytest.fixture
def server(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """Run a server of the store `pdb`, with a cache and short pauses."""
    monkeypatch.setenv("WARPFOLD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(remote, "PAUSES", (0.01, 0.02))
    monkeypatch.setattr(remote, "READ_TIMEOUT", 0.5)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))  # without the copy of the index from other tests
    with serving({f"pdb/{file.name}": file.read_bytes() for file in folder.iterdir()}) as running:
        yield running


def same(store: Store, other: Store) -> None:
    assert list(store.keys) == list(other.keys)
    for key in store.keys:
        here, there = store.record(key), other.record(key)
        assert here.notes == there.notes
        for name in here.arrays:
            np.testing.assert_array_equal(here.read(name), there.read(name))
        rows = np.arange(3, len(here.read("msa")), 700)
        np.testing.assert_array_equal(here.read("msa", rows), there.read("msa", rows))


def test_a_store_at_an_address_has_the_bytes_of_one_in_a_folder(server: FileServer, folder: Path) -> None:
    there, here = Store(f"{server.url}/pdb"), Store(folder)
    assert str(there.path) == f"{server.url}/pdb"
    assert len(there.index.shards) > 1
    same(there, here)
    assert not list(there.verify())
    for name in ("store.json", "index.wfi", "pack.json", *(name for name, _ in here.index.shards)):
        assert there.storage.whole(name) == here.storage.whole(name)
    same(ForkingPickler.loads(ForkingPickler.dumps(there)), here)
    same(Store(Path(f"{server.url}/pdb")), here)  # a pathlib.Path drops the second slash


def test_a_store_in_a_bucket(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only test with a server of S3's protocol, moto."""
    moto = pytest.importorskip("moto.server", reason="needs moto: pip install 'moto[s3]' flask flask-cors")
    pytest.importorskip("s3fs", "2024", reason="needs pip install '.[remote]'")
    import boto3

    service = moto.ThreadedMotoServer(port=0, verbose=False)
    service.start()
    try:
        address = f"http://127.0.0.1:{service.get_host_and_port()[1]}"
        for name, value in {
            "AWS_ENDPOINT_URL": address, "AWS_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret", "WARPFOLD_CACHE": str(tmp_path / "cache"), "no_proxy": "*",
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(remote, "PAUSES", (0.01, 0.02))
        client = boto3.client("s3", endpoint_url=address, region_name="us-east-1")
        client.create_bucket(Bucket="bucket")
        for file in folder.iterdir():
            client.put_object(Bucket="bucket", Key=f"pdb/{file.name}", Body=file.read_bytes())
        there, here = Store("s3://bucket/pdb"), Store(folder)
        assert str(there.path) == "s3://bucket/pdb"
        same(there, here)
        assert not list(there.verify())
        for name in ("bucket/none", "elsewhere/pdb"):
            with pytest.raises(UserError, match=f"s3://{name}: not a store .*no such object"):
                Store(f"s3://{name}")
    finally:
        service.stop()
    there.storage.cool()
    with pytest.raises(StorageError, match=r"^s3://bucket/pdb/shard-00000.wfs: .*Check the network, the address"):
        there.record("entry_0")


@pytest.mark.parametrize(
    "faults",
    [[(503, {})] * 2, ["drop"] * 2, ["cut 1000"] * 2, ["stall 1000"] * 2, [(429, {}), "cut 0"]],
    ids=["busy", "dropped", "truncated", "slow", "both"],
)
@pytest.mark.parametrize("faulty", ["shard-00000", "store.json", "index.wfi"])
def test_what_fails_for_a_moment_is_tried_again(
    server: FileServer, folder: Path, faults: list[Fault], faulty: str
) -> None:
    server.faults, server.faulty = list(faults), faulty
    same(Store(f"{server.url}/pdb"), Store(folder))
    assert not server.faults


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ((503, {}), r"503, .*\. Check the network, the address and the credentials, or try later"),
        ((403, {}), r"403, .*\. Check the credentials and their rights"),
        ("drop", "Server disconnected"),
    ],
)
def test_what_does_not_pass_is_one_line(server: FileServer, fault: Fault, says: str) -> None:
    store = Store(f"{server.url}/pdb")
    server.faults, server.faulty = [fault] * 100, "shard"
    with pytest.raises(StorageError, match=rf"^{server.url}/pdb/shard-00000.wfs: {says}") as caught:
        store.record("entry_0").read("msa")
    assert str(caught.value).isprintable()
    assert len(server.faults) >= 100 - 2 * 3  # aiohttp repeats requests without an answer
    server.faulty = "store.json"
    with pytest.raises(StorageError, match=rf"^{server.url}/pdb/store.json: {says}"):
        Store(f"{server.url}/pdb")


def test_wrong_addresses_are_one_line(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match=r"^http://127.0.0.1:1/pdb/store.json: .*127.0.0.1:1.*Check the network"):
        Store("http://127.0.0.1:1/pdb")
    with pytest.raises(
        UserError, match=f"{server.url}/none: not a store .*no such object.*Make one with .warpfold pack"
    ):
        Store(f"{server.url}/none")
    with pytest.raises(UserError, match=r"^s3://bucket: no name after the bucket\. Pass s3://bucket/NAME"):
        Store("s3://bucket")
    with pytest.raises(UserError, match=r"^ftp://host/pdb: unknown scheme\. Pass a folder, or an address at s3://"):
        Store("ftp://host/pdb")
    with pytest.raises(UserError, match=rf"{server.url}/new: a store is written to a folder\. Pass a folder"):
        StoreWriter(f"{server.url}/new")

    def missing(*_: object, **__: object) -> None:
        raise ImportError

    monkeypatch.setattr("fsspec.filesystem", missing)
    with pytest.raises(UserError, match=r"the package s3fs is missing\. Install it: pip install '\.\[remote\]'"):
        Store("s3://bucket/pdb")


def test_a_store_without_a_shard_and_a_server_without_ranges(server: FileServer) -> None:
    shard = server.files.pop("pdb/shard-00000.wfs")
    with pytest.raises(UserError, match=r"shard-00000.wfs: cannot be read: no such object. Copy the store again"):
        Store(f"{server.url}/pdb")
    server.files["pdb/shard-00000.wfs"] = shard
    server.ranges = False
    with pytest.raises(StorageError, match=r"/pdb: the server ignores ranges\. Use another server, or copy the store"):
        Store(f"{server.url}/pdb").record("entry_0")


def test_damage_is_fetched_again_and_then_named(server: FileServer, folder: Path) -> None:
    server.faults, server.faulty = ["flip"], "shard-00000"
    store = Store(f"{server.url}/pdb")
    server.faults = ["flip"]
    same(store, Store(folder))
    assert not server.faults
    data = bytearray(server.files["pdb/shard-00000.wfs"])
    data[len(data) // 2] ^= 1
    server.files["pdb/shard-00000.wfs"] = bytes(data)  # so its ETag differs
    (line,) = Store(f"{server.url}/pdb").verify()
    assert line.startswith(f"{server.url}/pdb/shard-00000.wfs: ")
    assert "damaged (checksum" in line


def test_commands_take_the_address_of_a_store(server: FileServer, capsys: pytest.CaptureFixture[str]) -> None:
    code, said, _ = run(capsys, "pack", "--verify", f"{server.url}/pdb")
    assert (code, said.splitlines()[-1]) == (0, f"{server.url}/pdb: 3 entries, none damaged")


# ---- blocks


def test_an_array_of_many_blobs_is_one_batch_of_requests_and_then_none(server: FileServer) -> None:
    store = Store(f"{server.url}/pdb")
    record = store.record("entry_0")
    store.storage.cool()
    server.asked.clear()
    record.read("msa")
    assert len(server.asked) == 1  # for neighbouring blocks
    record = Store(f"{server.url}/pdb").record("entry_0")
    record.read("msa")
    server.asked.clear()
    record.read("msa")
    assert not server.asked


@pytest.mark.parametrize("seed", range(5))
def test_any_ranges_are_those_of_a_folder(
    server: FileServer, folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "BLOCK", 10_000)
    monkeypatch.setattr(remote, "MAX_REQUEST", 20_000)
    name, size = Store(folder).index.shards[0]
    here, there, draw = Folder(folder), Remote(parse_place(f"{server.url}/pdb")), Random(seed)  # type: ignore[arg-type]
    for _ in range(5):
        ranges = [tuple(sorted(draw.choices(range(size + 10), k=2))) for _ in range(draw.randint(0, 4))]
        assert there.read(name, ranges) == here.read(name, ranges)


def test_forks_threads_and_new_processes_read_the_same(server: FileServer, folder: Path) -> None:
    store, wanted = Store(f"{server.url}/pdb"), Store(folder).record("entry_1").read("msa")
    store.storage.cool()
    np.testing.assert_array_equal(store.record("entry_1").read("msa"), wanted)
    store.storage._lock.acquire()  # type: ignore[attr-defined]  # as a thread of the parent may at the fork
    if not (child := os.fork()):
        code = 1
        try:
            code = int(not np.array_equal(store.record("entry_1").read("msa"), wanted))
        finally:
            os._exit(code)
    store.storage._lock.release()  # type: ignore[attr-defined]
    assert os.waitpid(child, 0)[1] == 0
    arrays: list[Any] = []
    threads = [threading.Thread(target=lambda: arrays.append(store.record("entry_1").read("msa"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(arrays) == 4
    assert all(np.array_equal(array, wanted) for array in arrays)


def test_blocks_are_bounded_and_only_blocks_are_removed(tmp_path: Path) -> None:
    blocks = BlockCache(tmp_path, limit=20 * 1000)
    foreign = tmp_path / "ab" / "somebody's file"
    foreign.parent.mkdir()
    foreign.write_text("precious")
    for i in range(100):
        blocks.put(f"{i:032x}", bytes(1000))
        assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 1.1 * 20 * 1000
    assert foreign.read_text() == "precious"
    assert blocks.get(f"{99:032x}") == bytes(1000)
    assert blocks.get(f"{0:032x}") is None


def test_what_is_read_stays_longest(tmp_path: Path) -> None:
    blocks = BlockCache(tmp_path, limit=10 * 1000)
    for i in range(9):
        blocks.put(f"{i:032x}", bytes(1000))
        os.utime(blocks._path(f"{i:032x}"), (1000 + i, 1000 + i))
    assert blocks.get(f"{0:032x}")
    for i in range(9, 14):
        blocks.put(f"{i:032x}", bytes(1000))
    assert blocks.get(f"{0:032x}")
    assert blocks.get(f"{1:032x}") is None


def test_a_torn_block_is_none_and_drafts_of_the_dead_go(tmp_path: Path) -> None:
    blocks = BlockCache(tmp_path, limit=10 * 1000)
    blocks.put("a" * 32, b"whole")
    path = blocks._path("a" * 32)
    path.write_bytes(path.read_bytes()[:-1])
    assert blocks.get("a" * 32) is None
    assert not path.exists()
    draft = path.with_name(f".{'b' * 32}.12345678")
    draft.write_bytes(b"x")
    os.utime(draft, (1, 1))
    BlockCache(tmp_path, limit=10 * 1000).put("c" * 32, b"whole")
    assert not draft.exists()


def test_many_processes_share_the_room(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from warpfold.data.store.remote import BlockCache\n"
        "blocks = BlockCache(Path(sys.argv[1]), 50_000)\n"
        "for i in range(300): blocks.put(f'{int(sys.argv[2]) * 1000 + i:032x}', bytes(1000))\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(i)]) for i in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 1.2 * 50_000


def test_a_full_disk_is_said_once_and_reading_goes_on(
    server: FileServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setenv("WARPFOLD_CACHE", str(tmp_path / "taken"))
    same(Store(f"{server.url}/pdb"), Store(folder))
    assert sum("objects are read without a cache" in record.message for record in caplog.records) == 1


def test_no_cache_is_a_choice(
    server: FileServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARPFOLD_CACHE_GB", "0")
    same(Store(f"{server.url}/pdb"), Store(folder))
    assert not (tmp_path / "cache").exists()
    monkeypatch.setenv("WARPFOLD_CACHE_GB", "many")
    with pytest.raises(UserError, match="WARPFOLD_CACHE_GB=many: not a number of gigabytes"):
        Store(f"{server.url}/pdb")


def test_no_home_folder_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a container, passwd may lack the user, and HOME may be unset."""
    for name in ("HOME", "XDG_CACHE_HOME", "WARPFOLD_CACHE", "WARPFOLD_CACHE_GB"):
        monkeypatch.delenv(name, raising=False)

    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert BlockCache.from_environment() is None
    monkeypatch.setenv("WARPFOLD_CACHE", str(tmp_path))
    assert BlockCache.from_environment() is not None
