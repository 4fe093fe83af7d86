"""Stores behind an address: what a folder gives, whatever fails for a moment, and one line for what does not pass."""

import os
import subprocess
import sys
import time
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from random import Random

import numpy as np
import pytest

from tests.data.store.test_store import arrays
from tests.object_server import ObjectServer, objects
from warpfold.data.store import objects as room
from warpfold.data.store.objects import Blocks, Objects
from warpfold.data.store.storage import Folder, ObjectPath
from warpfold.data.store.store import Store, StoreWriter, pack_record
from warpfold.errors import StorageError, UserError

__all__ = ["objects"]  # a fixture


def write(path: Path) -> Path:
    with StoreWriter(path, shard_bytes=1 << 18) as writer:
        for i in range(3):
            writer.add(f"entry_{i}", pack_record(arrays(i), {"i": i}), {"length": 90})
        writer.finish({"pack.json": "{}"})
    return path


@pytest.fixture
def stored(objects: ObjectServer, tmp_path: Path) -> ObjectServer:
    """A bucket with the store `pdb`."""
    objects.upload(write(tmp_path / "uploaded"), "pdb")
    return objects


def same(one: Store, other: Store) -> None:
    assert list(one.keys) == list(other.keys)
    for key in one.keys:
        here, there = one.record(key), other.record(key)
        assert here.notes == there.notes
        for name in here.arrays:
            np.testing.assert_array_equal(here.read(name), there.read(name))
        rows = np.arange(3, len(here.read("msa")), 700)
        np.testing.assert_array_equal(here.read("msa", rows), there.read("msa", rows))


def test_a_store_at_an_address_has_the_bytes_of_one_in_a_folder(stored: ObjectServer, tmp_path: Path) -> None:
    write(tmp_path / "pdb")
    there, here = Store(f"{stored.url}/pdb"), Store(tmp_path / "pdb")
    assert str(there.path) == f"{stored.url}/pdb"
    assert len(there.index.shards) > 1
    same(there, here)
    assert not list(there.verify())
    for name in ("store.json", "index.wfi", "pack.json", *(name for name, _ in here.index.shards)):
        assert there.storage.whole(name) == here.storage.whole(name)
    again = ForkingPickler.loads(ForkingPickler.dumps(there))
    same(again, here)


def test_a_store_is_read_over_http_too(stored: ObjectServer, tmp_path: Path) -> None:
    write(tmp_path / "pdb")
    stored.publish()
    there = Store(f"{stored.address}/{stored.bucket}/pdb")
    assert str(there.path).startswith("http://")
    same(there, Store(tmp_path / "pdb"))


@pytest.mark.parametrize("kind", ["busy", "slow", "torn"])
def test_what_fails_for_a_moment_is_tried_again(stored: ObjectServer, tmp_path: Path, kind: str) -> None:
    write(tmp_path / "pdb")
    for having in ("shard", "store.json"):
        stored.fail(kind, 1, "GET", having)
    same(Store(f"{stored.url}/pdb"), Store(tmp_path / "pdb"))
    assert not any(fault.count for fault in stored.faults)


def test_a_copy_that_came_with_another_byte_is_fetched_again(stored: ObjectServer, tmp_path: Path) -> None:
    write(tmp_path / "pdb")
    stored.fail("flipped", 1, "GET", "shard")
    same(Store(f"{stored.url}/pdb"), Store(tmp_path / "pdb"))
    there, here = Store(f"{stored.url}/pdb"), Store(tmp_path / "pdb")
    there.storage.cool()
    stored.fail("flipped", 1, "GET", "shard-00001")
    assert [there.packed(key) for key in there.keys] == [here.packed(key) for key in here.keys]
    assert not any(fault.count for fault in stored.faults)


def test_damage_at_the_address_is_named(stored: ObjectServer) -> None:
    data = bytearray(Objects(ObjectPath(f"{stored.url}/pdb")).whole("shard-00000.wfs"))
    data[len(data) // 2] ^= 1
    stored.put("pdb/shard-00000.wfs", bytes(data))
    (found,) = Store(f"{stored.url}/pdb").verify()
    assert found.startswith(f"{stored.url}/pdb/shard-00000.wfs: ")
    assert "damaged (checksum" in found


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("denied", "AccessDenied: Access Denied; these credentials may not do this"),
        ("expired", "ExpiredToken: The provided token has expired; the credentials have expired; get new ones"),
        ("skewed", "RequestTimeTooSkewed: .*; set this machine's clock"),
    ],
)
def test_what_will_not_pass_is_said_at_once(stored: ObjectServer, kind: str, said: str) -> None:
    store = Store(f"{stored.url}/pdb")
    stored.fail(kind, 100)
    with pytest.raises(StorageError, match=f"{stored.url}/pdb/shard-00000.wfs: {said}"):
        store.record("entry_0")
    with pytest.raises(StorageError, match=f"{stored.url}/pdb/store.json: {said}"):
        Store(f"{stored.url}/pdb")


def test_what_does_not_pass_is_said_in_the_end(stored: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "AT_ONCE", room.timedelta(seconds=0.5))
    monkeypatch.setattr(room, "PATIENCE", 1.0)
    stored.fail("busy", 1000)
    with pytest.raises(StorageError, match="SlowDown: Please reduce your request rate; the service is overloaded"):
        Store(f"{stored.url}/pdb")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(StorageError, match=r"http://127.0.0.1:1 cannot be reached: .*refused.*; see the network"):
        Store(f"{stored.url}/pdb")


def test_wrong_addresses_are_said(stored: ObjectServer) -> None:
    with pytest.raises(UserError, match="there is no bucket elsewhere; mend the address"):
        Store("s3://elsewhere/pdb")
    with pytest.raises(UserError, match=f"{stored.url}/none: not a store .*no such object.*warpfold pack. makes one"):
        Store(f"{stored.url}/none")
    with pytest.raises(UserError, match="no name after the bucket"):
        Store("s3://bucket")
    with pytest.raises(UserError, match=rf"{stored.url}/new: a store is written to a folder\. Give a folder"):
        StoreWriter(f"{stored.url}/new")


def test_a_store_half_uploaded_is_none(stored: ObjectServer) -> None:
    stored.delete("pdb/shard-00000.wfs")
    with pytest.raises(UserError, match=r"shard-00000.wfs: cannot be read: no such object; copy the store again"):
        Store(f"{stored.url}/pdb")
    stored.delete("pdb/store.json")
    with pytest.raises(UserError, match="not a store"):
        Store(f"{stored.url}/pdb")


# ---- blocks


def test_an_array_of_many_blobs_is_one_batch_of_requests_and_then_none(stored: ObjectServer) -> None:
    store = Store(f"{stored.url}/pdb")
    record = store.record("entry_0")
    store.storage.cool()
    stored.requests.clear()
    record.read("msa")
    assert len(stored.requests) == 1  # of neighbours
    fresh = Store(f"{stored.url}/pdb").record("entry_0")
    stored.requests.clear()
    fresh.read("msa")
    assert not any("bytes=" in one and "shard" in one for one in stored.requests)


@pytest.mark.parametrize("seed", range(5))
def test_any_ranges_are_those_of_a_folder(stored: ObjectServer, tmp_path: Path, seed: int) -> None:
    write(tmp_path / "pdb")
    name, size = Store(tmp_path / "pdb").index.shards[0]
    here, there, draw = Folder(tmp_path / "pdb"), Objects(ObjectPath(f"{stored.url}/pdb")), Random(seed)
    for _ in range(5):
        ranges = [tuple(sorted(draw.choices(range(size + 10), k=2))) for _ in range(draw.randint(0, 4))]
        assert there.read(name, ranges) == here.read(name, ranges)


def test_blocks_are_bounded_and_only_blocks_are_removed(tmp_path: Path) -> None:
    blocks = Blocks(tmp_path, limit=20 * 1000)
    own = tmp_path / "ab" / "somebody's file"
    own.parent.mkdir()
    own.write_text("precious")
    for i in range(100):
        blocks.put(f"{i:032x}", bytes(1000))
        assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 1.1 * 20 * 1000
    assert own.read_text() == "precious"
    assert blocks.get(f"{99:032x}") == bytes(1000)
    assert blocks.get(f"{0:032x}") is None


def test_what_is_read_stays_longest(tmp_path: Path) -> None:
    blocks = Blocks(tmp_path, limit=10 * 1000)
    for i in range(9):
        blocks.put(f"{i:032x}", bytes(1000))
        os.utime(blocks._path(f"{i:032x}"), (1000 + i, 1000 + i))
    assert blocks.get(f"{0:032x}")
    for i in range(9, 14):
        blocks.put(f"{i:032x}", bytes(1000))
    assert blocks.get(f"{0:032x}")
    assert blocks.get(f"{1:032x}") is None


def test_a_torn_block_is_none_and_drafts_of_the_dead_go(tmp_path: Path) -> None:
    blocks = Blocks(tmp_path, limit=10 * 1000)
    blocks.put("a" * 32, b"whole")
    path = blocks._path("a" * 32)
    path.write_bytes(path.read_bytes()[:-1])
    assert blocks.get("a" * 32) is None
    assert not path.exists()
    draft = path.with_name(f".{'b' * 32}.12345678")
    draft.write_bytes(b"x")
    os.utime(draft, (1, 1))
    Blocks(tmp_path, limit=10 * 1000).put("c" * 32, b"whole")
    assert not draft.exists()


def test_many_processes_share_the_room(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from warpfold.data.store.objects import Blocks\n"
        "blocks = Blocks(Path(sys.argv[1]), 50_000)\n"
        "for i in range(300): blocks.put(f'{int(sys.argv[2]) * 1000 + i:032x}', bytes(1000))\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(i)]) for i in range(3)]
    assert [one.wait() for one in running] == [0, 0, 0]
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 1.2 * 50_000


def test_a_kill_while_blocks_are_written_leaves_whole_ones(stored: ObjectServer, tmp_path: Path) -> None:
    code = (
        f"from warpfold.data.store.store import Store\nstore = Store('{stored.url}/pdb')\n"
        "while True:\n for key in store.keys:\n  store.storage._kept.limit = 1e6\n"
        "  [store.record(key).read(name) for name in store.record(key).arrays]\n  store.storage.close()\n"
        "  [one.unlink() for one in store.storage._kept.folder.glob('*/*')]\n"
    )
    running = subprocess.Popen([sys.executable, "-c", code])
    time.sleep(3)
    assert running.poll() is None
    running.kill()
    running.wait()
    write(tmp_path / "pdb")
    same(Store(f"{stored.url}/pdb"), Store(tmp_path / "pdb"))


def test_a_full_disk_is_said_once_and_reading_goes_on(
    stored: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setenv("WARPFOLD_CACHE", str(tmp_path / "taken"))
    write(tmp_path / "pdb")
    same(Store(f"{stored.url}/pdb"), Store(tmp_path / "pdb"))
    assert sum("objects are read without a cache" in one.message for one in caplog.records) == 1


def test_no_cache_is_a_choice(stored: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPFOLD_CACHE_GB", "0")
    write(tmp_path / "pdb")
    same(Store(f"{stored.url}/pdb"), Store(tmp_path / "pdb"))
    assert not (tmp_path / "cache").exists()
    monkeypatch.setenv("WARPFOLD_CACHE_GB", "many")
    with pytest.raises(UserError, match="WARPFOLD_CACHE_GB=many: not a number of gigabytes"):
        Store(f"{stored.url}/pdb")
