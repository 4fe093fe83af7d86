"""Read remote stores: the bytes of the local store despite passing failures, and one line for other failures."""

import fcntl
import os
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
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
from warpfold.data.store.remote import Address, BlockCache, Remote, open_storage, parse_place
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


def test_a_store_is_read_through_a_proxy(server: FileServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", server.url)
    same(Store("http://store.invalid/pdb"), Store(folder))
    assert {path.rpartition("/")[0] for path, _ in server.asked} == {"http://store.invalid/pdb"}


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


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ("WARPFOLD_CACHE_GB", "WARPFOLD_CACHE", "XDG_CACHE_HOME", "HOME")
    for values, folder, limit in (
        (("", "", "", "/me"), "/me/.cache/warpfold/objects", 20e9),
        (("3", "", "/xdg", "/me"), "/xdg/warpfold/objects", 3e9),
        (("0.5", "/here", "/xdg", "/me"), "/here", 0.5e9),
        (("9e8", "/here", "", ""), "/here", 9e17),
    ):
        for name, value in zip(names, values):
            monkeypatch.setenv(name, value)
        cache = BlockCache.from_environment()
        assert cache is not None
        assert (str(cache.folder), cache.limit) == (folder, limit)
    for text in ("0", "0.0", "-0"):
        monkeypatch.setenv("WARPFOLD_CACHE_GB", text)
        assert BlockCache.from_environment() is None
    for text in ("-1", "-1e-9", "nan", "inf", "1e9", "x"):
        monkeypatch.setenv("WARPFOLD_CACHE_GB", text)
        with pytest.raises(UserError, match=rf"^WARPFOLD_CACHE_GB={text}: not a number of gigabytes\. Use 0 for no"):
            BlockCache.from_environment()


def test_blocks_of_any_size_are_kept_until_they_are_dropped(tmp_path: Path) -> None:
    blocks = BlockCache(tmp_path / "cache", limit=1e9)
    data = {f"{i:02x}" * 16: bytes(range(i)) for i in range(9)}
    for key, block in data.items():
        assert blocks.get(key) is None
        blocks.put(key, block)
    files = {path.relative_to(blocks.folder).as_posix(): path.read_bytes() for path in blocks.folder.glob("*/*")}
    assert files == {f"{key[:2]}/{key}": x + zlib.crc32(x).to_bytes(4, "little") for key, x in data.items()}
    assert {key: blocks.get(key) for key in data} == data
    assert [blocks.drop("00" * 16), blocks.drop("00" * 16), blocks.get("00" * 16)] == [True, False, None]
    for key, torn in (("01" * 16, b""), ("02" * 16, b"\1\2\3"), ("03" * 16, bytes(7)), ("04" * 16, bytes(5))):
        (blocks.folder / key[:2] / key).write_bytes(torn)
        assert blocks.get(key) is None
        assert not (blocks.folder / key[:2] / key).exists()


def test_the_use_of_a_block_is_recorded_once_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = BlockCache(tmp_path, limit=1e9)
    blocks.put("a" * 32, b"x")
    now = time.time()
    for age, is_renewed in ((30, False), (50, False), (70, True), (1000, True)):
        os.utime(tmp_path / "aa" / ("a" * 32), (now - age, now - age))
        assert blocks.get("a" * 32) == b"x"
        assert ((tmp_path / "aa" / ("a" * 32)).stat().st_mtime > now - 20) is is_renewed


def aged(folder: Path, count: int, limit: float) -> BlockCache:
    """Return a new cache of `count` blocks of 1000 bytes in a folder; block 0 is the oldest."""
    blocks = BlockCache(folder, limit=1e9)
    for i in range(count):
        blocks.put(f"{i:032x}", bytes(996))
        os.utime(folder / "00" / f"{i:032x}", (1000 + i, 1000 + i))
    return BlockCache(folder, limit)


def left(folder: Path) -> list[int]:
    return sorted(int(path.name, 16) for path in folder.glob("[0-9a-f][0-9a-f]/*"))


def test_the_oldest_blocks_are_removed_until_nine_tenths_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = int("f" * 32, 16)
    for name, count, limit, remaining in (
        ("full", 9, 10_000, [*range(9), new]),
        ("over", 10, 10_000, [*range(2, 10), new]),
        ("above", 10, 10_900, [*range(2, 10), new]),
        ("below", 10, 9_950, [*range(3, 10), new]),
        ("by far", 40, 10_000, [*range(32, 40), new]),
    ):
        aged(tmp_path / name, count, limit).put("f" * 32, bytes(996))
        assert left(tmp_path / name) == remaining, name
    # Another process removes the same blocks at the same time.
    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda path, **more: (os.remove(path), unlink(path, **more)))
    aged(tmp_path / "twice", 40, 10_000).put("f" * 32, bytes(996))
    assert left(tmp_path / "twice") == [*range(32, 40), new]


def test_one_process_removes_blocks_and_others_go_on(tmp_path: Path) -> None:
    blocks = aged(tmp_path, 20, 10_000)
    with open(tmp_path / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        blocks.put("f" * 32, bytes(996))
    assert len(left(tmp_path)) == 21


def test_drafts_of_an_hour_ago_are_removed(tmp_path: Path) -> None:
    blocks, now = aged(tmp_path, 1, 1e9), time.time()
    for number, age in enumerate((0, 3000, 4200)):
        draft = tmp_path / "00" / f".{'b' * 32}.{number:08x}"
        draft.touch()
        os.utime(draft, (now - age, now - age))
    foreign = tmp_path / "00" / f"b{'b' * 32}.00000000"
    foreign.touch()
    os.utime(foreign, (0, 0))
    blocks.put("f" * 32, b"")
    assert {path.name[-1] for path in (tmp_path / "00").iterdir() if path.name[0] == "."} == {"0", "1"}
    assert foreign.exists()


def test_the_size_of_the_cache_is_checked_at_first_and_after_each_256th(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[int] = []
    monkeypatch.setattr(BlockCache, "_make_room", lambda _: checks.append(i))
    blocks = BlockCache(tmp_path, limit=256 * 1000)
    for i in range(30):
        blocks.put(f"{i:032x}", bytes(100))
    assert checks == [0, 11, 22]


def test_a_block_that_cannot_be_written_leaves_no_draft_and_no_later_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = BlockCache(tmp_path, limit=1e9)
    blocks.put("a" * 32, b"x")

    def full(_: Path, __: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", full)
        blocks.put("b" * 32, b"y")
    blocks.put("c" * 32, b"z")
    assert [path.name for path in tmp_path.glob("*/*")] == ["a" * 32]
    assert blocks.get("a" * 32) == b"x"
    text = f"{tmp_path}: cannot be written: No space left on device; objects are read without a cache"
    assert [record.message for record in caplog.records] == [text]


# ---- addresses and requests


def test_addresses_are_parsed() -> None:
    address = parse_place("S3://bucket/a:/b")
    assert isinstance(address, Address)
    assert (str(address), str(address / "c"), address.scheme) == ("S3://bucket/a:/b", "S3://bucket/a:/b/c", "s3")
    assert address.resolve() is address
    assert str(parse_place("http:/host/pdb")) == "http://host/pdb"
    for path in ("folder", "/folder:/x", Path("c:")):
        assert parse_place(path) == Path(path)
    folder = open_storage(Path("x"))
    assert isinstance(folder, Folder)


class Service:
    """A file system of fsspec with one object. Raises `errors`, one at each request, before it answers."""

    def __init__(self, data: bytes = b"", **info: Any) -> None:
        self.data, self.info_fields = data, info
        self.errors: list[Exception] = []
        self.asked: list[Any] = []

    def _ask(self, what: Any) -> None:
        self.asked.append(what)
        if self.errors:
            raise self.errors.pop(0)

    def info(self, path: str) -> dict[str, Any]:
        self._ask(path)
        return {"size": len(self.data), **self.info_fields}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        self._ask((path, start, end))
        return b"store.json"[start:end] if path.endswith("store.json") else self.data[start:end]

    def cat_ranges(
        self, paths: Sequence[str], starts: Sequence[int], ends: Sequence[int], on_error: str
    ) -> list[bytes | Exception]:
        assert on_error == "return"
        assert len(paths) == len(starts) == len(ends)
        self.asked.append(list(zip(starts, ends)))
        errors, self.errors = self.errors[: len(starts)], self.errors[len(starts) :]
        answers: list[bytes | Exception] = []
        for i, (start, end) in enumerate(zip(starts, ends)):
            error = errors[i] if i < len(errors) else None
            answers.append(self.data[start : end - 1] if isinstance(error, EOFError) else error or self.data[start:end])
        return answers


class Answered(Exception):
    """An HTTP status, as aiohttp raises it."""

    def __init__(self, status: Any, text: str = "busy\nin two lines") -> None:
        super().__init__(text)
        self.status = status


class BotocoreAnswered(OSError):
    """An HTTP status, as botocore raises it."""

    def __init__(self, **metadata: int) -> None:
        super().__init__("denied")
        self.response = {"ResponseMetadata": metadata}


def caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Service:
    """Stand for the service of every address, in blocks of 10 bytes and two blocks per request; cache in tmp_path."""
    running = Service(bytes(range(47)))
    monkeypatch.setattr("fsspec.filesystem", lambda *_, **__: running)
    monkeypatch.setattr("aiohttp.ClientError", Answered)
    monkeypatch.setattr(remote, "BLOCK", 10)
    monkeypatch.setattr(remote, "MAX_REQUEST", 20)
    monkeypatch.setenv("WARPFOLD_CACHE", str(tmp_path / "cache"))
    return running


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Collect the pauses between attempts."""
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    return pauses


def storage_at(address: str) -> Remote:
    place = parse_place(address)
    assert isinstance(place, Address)
    return Remote(place)


def test_file_systems_are_opened_with_proxies_and_timeouts_and_without_retries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import aiohttp

    pytest.importorskip("botocore", reason="needs pip install '.[remote]'")
    opened: list[tuple[str, dict[str, Any]]] = []
    files = Service()
    monkeypatch.setattr("fsspec.filesystem", lambda scheme, **options: opened.append((scheme, options)) or files)
    common = {"skip_instance_cache": True, "use_listings_cache": False}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30.0, sock_read=60.0)
    config = {"connect_timeout": 30.0, "read_timeout": 60.0, "retries": {"total_max_attempts": 1}}
    for scheme, options in (
        ("http", {"client_kwargs": {"timeout": timeout, "trust_env": True}}),
        ("https", {"client_kwargs": {"timeout": timeout, "trust_env": True}}),
        ("s3", {"config_kwargs": config}),
        ("gs", {}),
    ):
        storage_at(f"{scheme}://bucket/pdb")
        assert opened.pop() == (scheme, common | options)
        assert vars(files).pop("retries") == 1


@pytest.mark.parametrize(
    ("address", "error", "attempts", "text"),
    [
        ("s3://b/pdb", FileNotFoundError("x"), 1, None),
        ("http://b/pdb", FileNotFoundError("x"), 1, None),
        ("http://b/pdb", caused(FileNotFoundError("x"), Answered(404)), 1, None),
        ("https://b/pdb", caused(FileNotFoundError("x"), Answered(410)), 1, None),
        ("s3://b/pdb", caused(FileNotFoundError("x"), Answered(503)), 1, None),
        ("http://b/pdb", caused(FileNotFoundError("x"), Answered(503)), 3, "busy. Check the network"),
        ("https://b/pdb", caused(FileNotFoundError("x"), Answered(403)), 1, "busy. Check the credentials"),
        ("http://b/pdb", Answered(401), 1, "busy. Check the credentials"),
        ("http://b/pdb", Answered(403), 1, "busy. Check the credentials"),
        ("s3://b/pdb", PermissionError(13, "denied"), 1, "[Errno 13] denied. Check the credentials"),
        ("s3://b/pdb", caused(OSError("denied"), BotocoreAnswered(HTTPStatusCode=403)), 1, "denied. Check the cred"),
        ("s3://b/pdb", BotocoreAnswered(HTTPStatusCode=500), 3, "denied. Check the network"),
        ("s3://b/pdb", BotocoreAnswered(), 3, "denied. Check the network"),
        ("http://b/pdb", Answered(399), 3, "busy. Check the network"),
        ("http://b/pdb", Answered(400), 1, "busy. Check the network"),
        ("http://b/pdb", Answered(402), 1, "busy. Check the network"),
        ("http://b/pdb", Answered(408), 3, "busy. Check the network"),
        ("http://b/pdb", Answered(429), 3, "busy. Check the network"),
        ("http://b/pdb", Answered(499), 1, "busy. Check the network"),
        ("http://b/pdb", Answered(500), 3, "busy. Check the network"),
        ("http://b/pdb", Answered(503, ""), 3, "Answered. Check the network"),
        ("http://b/pdb", Answered("?", "\n odd"), 3, "odd. Check the network"),
        ("gs://b/pdb", ValueError("bad"), 3, "bad. Check the network"),
    ],
)
def test_what_may_pass_is_tried_three_times(
    service: Service, pauses: list[float], address: str, error: Exception, attempts: int, text: str | None
) -> None:
    storage = storage_at(address)
    for call in (storage.whole, storage.size):
        service.errors, service.asked = [error] * 9, []
        pauses.clear()
        if text is None:
            with pytest.raises(FileNotFoundError, match=rf"no such object: '{address}/x'"):
                call("x")
        else:
            with pytest.raises(
                StorageError, match=rf"^{address}/x: {text.replace('[', '.').replace(']', '.')}"
            ) as caught:
                call("x")
            assert str(caught.value).endswith(". Check the credentials and their rights.") or str(
                caught.value
            ).endswith(". Check the network, the address and the credentials, or try later.")
        assert (len(service.asked), pauses) == (attempts, [1.0, 5.0][: attempts - 1])
    for failures in range(attempts):
        service.errors = [error] * failures
        assert storage.whole("x") == service.data


@pytest.mark.parametrize("call", ["whole", "size", "read"])
def test_a_forked_process_has_connections_and_blocks_of_its_own(
    service: Service, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setenv("WARPFOLD_CACHE_GB", "0")
    opened: list[str] = []
    monkeypatch.setattr("fsspec.filesystem", lambda scheme, **_: opened.append(scheme) or service)
    storage = storage_at("s3://b/pdb")
    for _ in range(2):
        assert storage.read("x", [(0, 47)]) == [service.data]
    assert (opened, len(service.asked)) == (["s3"], 2)
    monkeypatch.setattr(os, "getpid", lambda: 123_456)
    storage._versions.clear()
    if call == "read":
        assert storage.read("x", [(0, 47)]) == [service.data]
        assert len(service.asked) == 4
    else:
        getattr(storage, call)("x")
    assert opened == ["s3", "s3"]
    storage._versions.clear()
    storage.read("x", [(0, 10)])
    assert opened == ["s3", "s3"]


def test_other_errors_are_not_hidden(service: Service) -> None:
    service.errors = [ZeroDivisionError()]
    with pytest.raises(ZeroDivisionError):
        storage_at("http://b/pdb").whole("x")


def test_the_status_of_an_error() -> None:
    for error, status in (
        (Answered(404), 404),
        (Answered("404"), 0),
        (ValueError(), 0),
        (BotocoreAnswered(HTTPStatusCode=404), 404),
        (BotocoreAnswered(), 0),
    ):
        assert remote._http_status(error) == status
    bare = BotocoreAnswered()
    bare.response = {}
    assert remote._http_status(bare) == 0


def test_neighbouring_blocks_share_a_request_and_a_retry_asks_for_the_missing_ones(
    service: Service, pauses: list[float]
) -> None:
    storage = storage_at("s3://b/pdb")
    assert storage.read("x", [(0, 0), (47, 99), (60, 70)]) == [b"", b"", b""]
    assert service.asked == ["s3://b/pdb/x"]
    service.asked.clear()
    service.errors = [OSError("lost"), EOFError(), ValueError("lost")]
    ranges = [(1, 30), (46, 60), (5, 9), (40, 41)]
    assert storage.read("x", ranges) == [service.data[begin:end] for begin, end in ranges]
    assert service.asked == [[(0, 20), (20, 30), (40, 47)]] * 2
    storage = storage_at("s3://c/pdb")
    assert storage.size("x") == 47
    service.asked.clear()
    service.errors = [OSError("lost"), EOFError()]
    assert storage.read("x", [(0, 47)]) == [service.data]
    assert service.asked == [[(0, 20), (20, 40), (40, 47)], [(0, 20), (20, 40)]]
    storage = storage_at("s3://d/pdb")
    assert storage.size("x") == 47
    service.errors = [EOFError()] * 9
    with pytest.raises(StorageError, match=r"^s3://d/pdb/x: 19 bytes instead of 20\. Check the network"):
        storage.read("x", [(0, 20)])


def test_requests_have_up_to_8_mib_in_blocks_of_a_quarter_mib(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("fsspec.filesystem", lambda *_, **__: service)
    monkeypatch.setenv("WARPFOLD_CACHE_GB", "0")
    service.data = bytes(9 << 20)
    storage = storage_at("s3://b/pdb")
    storage.read("x", [(300_000, 300_001)])
    storage.read("x", [(0, 9 << 20)])
    assert service.asked[1:] == [
        [(1 << 18, 2 << 18)],
        [(0, 1 << 18), (2 << 18, (2 << 18) + (8 << 20)), ((2 << 18) + (8 << 20), 9 << 20)],
    ]


def test_64_blocks_stay_in_memory(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPFOLD_CACHE_GB", "0")
    service.data = bytes(700)
    storage = storage_at("s3://b/pdb")

    def asks(block: int) -> int:
        service.asked.clear()
        assert storage.read("x", [(10 * block, 10 * block + 5)]) == [bytes(5)]
        return len(service.asked)

    assert [asks(block) for block in range(64)] == [2] + [1] * 63
    assert [asks(block) for block in (0, 63, 64, 0, 2, 1, 3)] == [0, 0, 1, 0, 0, 1, 1]
    storage.close()
    assert asks(0) == 1
    storage.cool()
    assert asks(0) == 1


def test_blocks_are_cached_on_disk_for_other_processes(service: Service, tmp_path: Path) -> None:
    whole = [(0, 47)]
    assert storage_at("http://b/pdb").read("x", whole) == [service.data]
    # The first request shows whether the server supports ranges.
    blocks = [(0, 20), (20, 40), (40, 47)]
    assert service.asked == ["http://b/pdb/x", ("http://b/pdb/store.json", 0, 1), blocks]
    files = {path.name: path for path in (tmp_path / "cache").glob("*/*")}
    assert len(files) == 5
    assert {len(name) for name in files} == {32}
    storage = storage_at("http://b/pdb")
    service.asked.clear()
    assert storage.read("x", whole) == [service.data]
    assert service.asked == ["http://b/pdb/x"]
    # A block of another length is fetched again.
    cache = BlockCache(tmp_path / "cache", 1e9)
    for name in files:
        cache.put(name, b"1234567890 and more")
    storage.close()
    assert storage.read("x", whole) == [service.data]
    assert service.asked[1:] == [("http://b/pdb/store.json", 0, 1), blocks]
    storage.cool()
    for path in files.values():
        path.unlink()
    assert storage.read("x", whole) == [service.data]
    assert service.asked[3:] == [blocks]
    assert not list((tmp_path / "cache").glob("*/*"))


def test_objects_and_their_versions_have_blocks_of_their_own(service: Service) -> None:
    fields: list[dict[str, Any]] = [
        {}, {"ETag": "a"}, {"etag": "b", "updated": "z"}, {"LastModified": "c"}, {"Last-Modified": "d"},
        {"updated": "e"}, {"ETag": "", "etag": None, "updated": "f"}, {"size": "47", "ETag": "g", "updated": "h"},
    ]  # fmt: skip
    versions = []
    for number, info in enumerate(fields):
        service.info_fields, service.data = info, bytes([number]) * 47
        storage = storage_at("s3://b/pdb")
        versions.append(storage._size_and_version("x")[1])
        assert (storage.size("x"), storage.read("x", [(3, 9)])) == (47, [bytes([number]) * 6])
    assert versions == ["", "a", "b", "c", "d", "e", "f", "g"]
    service.data = bytes(47)
    assert storage.read("y", [(3, 9)]) == [bytes(6)]
    assert storage_at("s3://c/pdb").read("x", [(3, 9)]) == [bytes(6)]
    service.info_fields = {"size": None}
    with pytest.raises(
        StorageError, match=r"^s3://b/pdb/x: the server does not state its size\. Use another server\.$"
    ):
        storage_at("s3://b/pdb").size("x")


@pytest.mark.parametrize("cached", [True, False])
def test_damaged_blocks_are_forgotten(service: Service, monkeypatch: pytest.MonkeyPatch, cached: bool) -> None:
    monkeypatch.setenv("WARPFOLD_CACHE_GB", str(int(cached)))
    storage = storage_at("s3://b/pdb")
    assert storage.forget("x", 0, 47) is False
    storage.read("x", [(0, 47)])
    service.asked.clear()
    assert storage.forget("x", 10, 20) is True
    assert storage.forget("x", 10, 20) is False
    storage.read("x", [(0, 47)])
    assert service.asked == [[(10, 20)]]
    storage.close()
    # On disk alone.
    assert storage.forget("x", 0, 21) is cached
    assert storage.forget("x", 0, 21) is False
    storage.read("x", [(12, 13)])
    assert storage.forget("x", 0, 47) is True
    service.asked.clear()
    storage.read("x", [(0, 47)])
    assert service.asked == [[(0, 20), (20, 40), (40, 47)]]
