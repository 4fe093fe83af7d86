"""Write and read stores: arrays and slices are equal, damage is reported, and a store is complete or absent."""

import json
import os
import tempfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from warpfold.data.store import local
from warpfold.data.store.index import WHERE, Index, encode_index
from warpfold.data.store.local import is_local
from warpfold.data.store.store import Packed, Store, StoredArray, StoreWriter, pack_record
from warpfold.errors import StorageError, UserError
from warpfold.files import digest_of

ROOT = Path(__file__).parents[3]


def arrays(i: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(i)
    return {
        "msa": rng.integers(0, 22, (4000 + i, 90)).astype(np.uint8),  # three blobs
        "deletions": np.zeros((5, 90), np.uint16),
        "positions": rng.normal(size=(90, 37, 3)).astype(np.float32),
        "nothing": np.zeros((0, 4), np.int32),
        "scalar": np.array(2.5, np.float64),
    }


def write(path: Path, count: int = 3, **options: int) -> Path:
    with StoreWriter(path, **options) as writer:
        for i in range(count):
            meta = {"length": 90, "resolution": None if i else 1.5}
            writer.add(f"entry_{i}", pack_record(arrays(i), {"name": f"entry_{i}", "of": ["ü", i]}), meta)
        writer.finish({"pack.json": "{}"})
    return path


def flip(path: Path, place: int) -> Store:
    """Change a byte in the first shard of a store, and open it."""
    shard = path / "shard-00000.wfs"
    data = bytearray(shard.read_bytes())
    data[place] ^= 0x10
    shard.write_bytes(data)
    return Store(path)


def sign(path: Path) -> None:
    """Update store.json for a changed index: anyone can compute the checksum."""
    index, top = (path / "index.wfi").read_bytes(), json.loads((path / "store.json").read_text())
    top["index"] = {"bytes": len(index), "blake2b": digest_of(index)}
    (path / "store.json").write_text(json.dumps(top))


def read_everything(path: Path) -> None:
    store = Store(path)
    for key in store.keys:
        record = store.record(key)
        for name in record.arrays:
            record.read(name)


@pytest.mark.parametrize("options", [{}, {"shard_bytes": 500_000}])
def test_what_goes_in_comes_out(tmp_path: Path, options: dict[str, int]) -> None:
    store = Store(write(tmp_path / "s", **options))
    assert store.keys == ["entry_0", "entry_1", "entry_2"]
    assert store.column("resolution") == [1.5, None, None]
    assert ("entry_1" in store, "other" in store) == (True, False)
    for i, key in enumerate(store.keys):
        record = store.record(key)
        assert record.notes == {"name": key, "of": ["ü", i]}
        for name, array in arrays(i).items():
            read = record.read(name)
            np.testing.assert_array_equal(read, array)
            assert (read.dtype, read.shape) == (array.dtype, array.shape)
    assert list(store.verify()) == []
    assert len(list((tmp_path / "s").glob("*.wfs"))) == (2 if options else 1)


@settings(max_examples=30, deadline=None)
@given(
    hnp.arrays(st.sampled_from(["u1", "i2", "f4", "?", ">i4"]), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0))
)
def test_any_array_survives(tmp_path_factory: pytest.TempPathFactory, array: np.ndarray) -> None:
    path = tmp_path_factory.mktemp("any") / "s"
    with StoreWriter(path) as writer:
        writer.add("a", pack_record({"x": array}, {}), {})
        writer.finish()
    np.testing.assert_array_equal(Store(path).record("a").read("x"), array)


def test_rows_are_read_without_the_other_blobs_and_damage_is_found_where_it_lies(tmp_path: Path) -> None:
    store = Store(write(tmp_path / "s", 2))
    record = store.record("entry_0")
    stored, whole = record.arrays["msa"], arrays()["msa"]
    assert len(stored.crcs) == 3
    for rows in (np.array([0, 7, 3999]), np.arange(4000), np.array([], np.int64), np.array([1500])):
        np.testing.assert_array_equal(record.read("msa", rows), whole[rows])
    damaged = flip(tmp_path / "s", stored.starts[1])  # in the second blob
    np.testing.assert_array_equal(damaged.record("entry_0").read("msa", np.arange(100)), whole[:100])
    with pytest.raises(UserError, match=r"shard-00000.wfs: entry_0, msa: damaged"):
        damaged.record("entry_0").read("msa", np.array([2000]))
    (tmp_path / "s/pack.json").write_text("{ }")
    assert [line.rpartition("s/")[2][:28] for line in damaged.verify()] == [
        "pack.json: damaged or missin", "shard-00000.wfs: entry_0, ms",
    ]  # fmt: skip


def test_every_flipped_byte_of_a_shard_is_found(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with StoreWriter(path) as writer:
        writer.add("a", pack_record({"x": np.arange(40)}, {"n": 1}), {"length": 3})
        writer.finish()
    shard = path / "shard-00000.wfs"
    good = shard.read_bytes()
    for place in range(len(good)):
        shard.write_bytes(good[:place] + bytes([good[place] ^ 0x10]) + good[place + 1 :])
        with pytest.raises(UserError, match=r"shard-00000\.wfs.*damaged"):
            read_everything(path)
    shard.write_bytes(good)
    read_everything(path)


def test_notes_that_are_not_json_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        pack_record({"x": np.arange(3)}, {"resolution": float("nan")})


def test_arrays_in_common_are_stored_once(tmp_path: Path) -> None:
    whole = arrays()["msa"]
    with StoreWriter(tmp_path / "s", shard_bytes=200_000) as writer:  # each in a shard of its own
        writer.add("a", pack_record({"msa": whole, "x": np.arange(3)}, {}), {})
        writer.add("b", pack_record({"x": np.arange(4)}, {"n": 1}, shared={"msa": "a"}), {})
        writer.finish()
    store = Store(tmp_path / "s")
    assert (tmp_path / "s/shard-00001.wfs").stat().st_size < 1000
    record = store.record("b")
    assert record.arrays["msa"].shape == whole.shape
    np.testing.assert_array_equal(record.read("msa", np.array([0, 3000])), whole[[0, 3000]])
    np.testing.assert_array_equal(record.read("msa"), whole)
    np.testing.assert_array_equal(record.read("x"), np.arange(4))
    assert list(store.verify()) == []
    damaged = flip(tmp_path / "s", record.arrays["msa"].starts[0] + 5)
    (line,) = damaged.verify()  # once, at its place
    assert "shard-00000.wfs: a, msa: damaged" in line
    with pytest.raises(UserError, match=r"a, msa: damaged"):
        damaged.record("b").read("msa")


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(UserError, match="not a store"):
            Store(path)
    path = write(tmp_path / "s", 1)
    good = (path / "store.json").read_text()
    top = json.loads(good)
    for text, message in [
        ("{", "damaged"),
        ("[]", "damaged"),
        ('{"format": "x", "version": 2, "shards": []}', "not of a WarpFold store"),
        (json.dumps(top | {"version": 6}), r"a store of format 6, this WarpFold reads 5. Update WarpFold"),
        *((json.dumps(top | {"version": old}), rf"format {old}, .*\. Pack it again\.$") for old in range(1, 5)),
        (json.dumps(top | {"index": {}}), r"store\.json: damaged"),
        (json.dumps(top | {"files": [1]}), r"store\.json: damaged"),
        (json.dumps(top | {"index": top["index"] | {"bytes": 1}}), r"index\.wfi: \d+ bytes, 1 expected: cut short"),
    ]:
        (path / "store.json").write_text(text)
        with pytest.raises(UserError, match=message):
            Store(path)
    (path / "store.json").write_text(good)
    index, shard = path / "index.wfi", path / "shard-00000.wfs"
    whole = index.read_bytes()
    for data, message in [
        (whole[:-1], r"index\.wfi: \d+ bytes, \d+ expected: cut short"),
        (whole[:-1] + b"x", r"index\.wfi: damaged \(checksum\)"),
    ]:
        index.write_bytes(data)
        with pytest.raises(UserError, match=message):
            Store(path)
    later = bytearray(whole)
    later[8] += 1  # its format version
    index.write_bytes(later)
    sign(path)
    with pytest.raises(UserError, match=r"index of version 2, too new for this WarpFold. Update"):
        Store(path)
    index.write_bytes(whole)
    (path / "store.json").write_text(good)
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    with pytest.raises(UserError, match=r"shard-00000\.wfs: \d+ bytes, \d+ expected: truncated"):
        Store(path)
    shard.unlink()
    with pytest.raises(UserError, match=r"shard-00000\.wfs: cannot be read: No such file.*. Copy the store again"):
        Store(path)


def hostile_store(path: Path) -> Path:
    """Write a store with every kind of column, and an array that two records share."""
    with StoreWriter(path, shard_bytes=100) as writer:
        for i, key in enumerate(("a", "bé", "c")):
            record = pack_record({"x": np.arange(9 + i)}, {"n": i}, {"y": "a"} if i == 2 else None)
            if i == 0:
                record = pack_record({"x": np.arange(9), "y": np.arange(50)}, {})
            meta = {"length": i, "score": [None, 1.5, 2.0][i], "text": ["é", None, "ab"][i], "chains": None}
            writer.add(key, record, meta | ({"chains": ["a", "bé", "z"]} if i == 2 else {}))
        writer.finish()
    return path


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_an_index_that_was_changed_and_signed_again_is_one_line(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """It is read as a store or refused, and nothing outside the files is read."""
    path = hostile_store(tmp_path_factory.mktemp("hostile") / "s")
    index = bytearray((path / "index.wfi").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(24, len(index) - 1))
        index[place] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]) | st.integers(0, 255))
    (path / "index.wfi").write_bytes(index)
    sign(path)
    refused = None
    try:
        store = Store(path)
        assert [list(store.column(name)) for name in store.columns]
        assert all(store.index.columns[name].members for name in store.columns if store.column(name).kind == "list")
        list(store.verify())
        read_everything(path)
    except UserError as error:
        refused = str(error)
    assert refused is None or (str(path) in refused and "\n" not in refused)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.none() | st.integers(-(2**62), 2**62),
            st.none() | st.floats(allow_nan=False, allow_infinity=False),
            st.none() | st.text(),
            st.none() | st.lists(st.text(), min_size=1),
        ),
        max_size=6,
    ),
    st.randoms(),
)
def test_columns_come_back_as_they_were(rows: list[tuple[object, ...]], random: Random) -> None:
    keys = [f"key {i}, ü\udc80" for i in range(len(rows))]
    meta = {name: [row[i] for row in rows] for i, name in enumerate(("whole", "number", "text", "list"))}
    where = {name: np.arange(len(rows)) for name in WHERE}
    index = Index(encode_index(keys, where, meta, [("shard", 3)]))
    assert (list(index.texts), [index.row(key) for key in keys]) == (keys, list(range(len(rows))))
    assert (index.row("other"), index.row(3)) == (-1, -1)
    chosen = np.array(random.sample(range(len(rows)), len(rows) // 2), np.int64)
    for name, values in meta.items():
        column = index.columns[name]
        assert [*column] == [column[i] for i in range(len(rows))] == values
        assert [*column.take(chosen)] == [values[i] for i in chosen]
    texts = index.columns["text"].texts
    assert texts is not None
    assert [text for _, text in sorted(zip(texts.ranks(), texts))] == sorted(texts, key=str.encode)


@pytest.mark.parametrize("values", [[1, "a"], [float("nan")], [float("inf")], [[]], [[1]], [{}], [True]])
def test_columns_refuse_what_they_cannot_keep(values: list[object]) -> None:
    with pytest.raises(ValueError, match="wrong: a column must have"):
        encode_index(["a", "b"][: len(values)], {name: np.arange(2) for name in WHERE}, {"wrong": values}, [])


def test_on_a_network_file_system_the_index_is_copied_once_per_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "s")
    assert is_local(Path("/proc")) is False  # not on a disk
    monkeypatch.setattr(local, "is_local", lambda path: False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    store = Store(path)
    (copy,) = local.copies_folder().iterdir()
    before = copy.stat().st_ino
    os.utime(copy, (0, 0))
    index = path / "index.wfi"
    data = index.read_bytes()
    index.write_bytes(bytes(len(data)))  # changes by others do not affect processes that have opened it
    np.testing.assert_array_equal(Store(path).record("entry_1").read("msa"), arrays(1)["msa"])
    assert store.keys == ["entry_0", "entry_1", "entry_2"]
    assert copy.stat().st_ino == before
    assert copy.stat().st_mtime > 0  # it is in use
    copy.unlink()
    with pytest.raises(UserError, match=r"index\.wfi: \d+ bytes, damaged or cut short"):
        Store(path)
    index.write_bytes(data)
    for damaged in (bytes(len(data)), data[:-1]):
        copy.write_bytes(damaged)
        assert Store(path).keys == store.keys  # it is made again
        assert copy.read_bytes() == data
    unused = copy.with_name("0.wfi")
    unused.write_bytes(b"")
    os.utime(unused, (0, 0))
    copy.unlink()
    Store(path)
    assert not unused.exists()
    copy.parent.chmod(0o777)
    with pytest.raises(UserError, match="not a private folder of yours"):
        Store(path)


def test_a_thousand_shards_are_read_with_few_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "MAX_OPEN_FILES", 2)
    store = Store(write(tmp_path / "s", 5, shard_bytes=1))
    for _ in range(2):
        for i, key in enumerate(store.keys):
            np.testing.assert_array_equal(store.record(key).read("msa"), arrays(i)["msa"])
    assert len(store.storage._open) == 2


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="nothing to store"), StoreWriter(tmp_path / "s") as writer:
        writer.finish()
    with StoreWriter(tmp_path / "s") as writer:
        writer.add("a", pack_record({}, {}), {"length": 1})
        with pytest.raises(ValueError, match="twice"):
            writer.add("a", pack_record({}, {}), {"length": 1})
        with pytest.raises(ValueError, match="other names"):
            writer.add("b", pack_record({}, {}), {"depth": 1})
        with pytest.raises(ValueError, match="cannot be stored"):
            pack_record({"x": np.array([None])}, {})

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match="cannot be written: No space left"):
            write(tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


def test_a_store_is_not_touched_by_another_writer(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "s") as writer:
        with pytest.raises(UserError, match="another process is writing"):
            StoreWriter(tmp_path / "s")
        writer.add("a", pack_record(arrays(), {}), {})  # the first one continues
        writer.finish()
    for path, message in (
        (tmp_path / "s", "exists already"),
        (Path("."), "exists already"),
        (tmp_path / "s/store.json/below", "cannot be written"),
    ):
        with pytest.raises(UserError, match=message):
            StoreWriter(path)
    read_everything(tmp_path / "s")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["s"]


def test_threads_forks_and_pickles_read_the_same(tmp_path: Path) -> None:
    store = Store(write(tmp_path / "s", 3))
    expected = arrays(1)["msa"]
    with ThreadPoolExecutor(4) as pool:
        reads = list(pool.map(lambda _: store.record("entry_1").read("msa"), range(12)))
    assert all(np.array_equal(read, expected) for read in reads)
    again = ForkingPickler.loads(ForkingPickler.dumps(store))  # as for worker processes
    np.testing.assert_array_equal(again.record("entry_1").read("msa"), expected)
    child = os.fork()
    if child == 0:
        os._exit(0 if np.array_equal(store.record("entry_1").read("msa"), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# ---- records, shards and files


@pytest.mark.parametrize(
    ("shape", "dtype", "rows", "blobs"),
    [
        ((1 << 17,), "u1", 1 << 17, 1),
        (((1 << 17) + 1,), "u1", 1 << 17, 2),
        ((4, 1 << 16), "u1", 2, 2),
        ((5, 3, 1 << 13), "<i2", 2, 3),
        ((3, 200_000), "u1", 1, 3),
        ((1, 200_000), "?", 1, 1),
        ((2, 1 << 15), "<f8", 1, 2),
        ((), "<f8", 1 << 14, 1),
        ((0, 4), "<i4", 1 << 17, 0),
        ((5, 0), "<i4", 1 << 17, 1),
    ],
)
def test_arrays_are_stored_in_blobs_of_rows(
    tmp_path: Path, shape: tuple[int, ...], dtype: str, rows: int, blobs: int
) -> None:
    array = (np.arange(np.prod(shape, dtype=int)) % 251).reshape(shape).astype(dtype)
    with StoreWriter(tmp_path / "s") as writer:
        writer.add("a", pack_record({"x": array, "y": np.arange(3)}, {}), {})
        writer.finish()
    record = Store(tmp_path / "s").record("a")
    stored = record.arrays["x"]
    assert (stored.rows, len(stored.crcs), len(stored.starts)) == (rows, blobs, blobs + 1)
    assert (stored.shape, stored.dtype, stored.starts[-1]) == (shape, np.dtype(dtype), record.arrays["y"].starts[0])
    np.testing.assert_array_equal(record.read("x"), array)
    np.testing.assert_array_equal(record.read("y"), np.arange(3))
    for chosen in ([0, len(array) - 1], [len(array) - 1], []) if array.size and array.ndim else ():
        some = np.unique(np.array(chosen, np.int64))
        read = record.read("x", some)
        np.testing.assert_array_equal(read, array[some])
        assert read.dtype == array.dtype


def test_a_record_is_as_documented() -> None:
    import zstandard

    compress = zstandard.ZstdCompressor(level=1).compress
    text = np.random.default_rng(0).integers(0, 4, (8000, 14)).astype(np.uint8).repeat(2, axis=0)
    big = np.array([1, 2, 3], ">i2")
    rows = (1 << 17) // 14
    blobs = [compress(text[:rows].tobytes()), compress(text[rows:].tobytes()), compress(big.astype("<i2").tobytes())]
    sums = [[len(blob), zlib.crc32(blob)] for blob in blobs]
    table = [["text", "|u1", [16000, 14], rows, sums[:2]], ["big", "<i2", [3], 1 << 16, sums[2:]]]
    for shared, holder in (({}, ""), ({"y": "other", "z": "other"}, "other")):
        content = {"notes": {"n": [1]}, "arrays": table, "shared": shared}
        header = compress(json.dumps(content, separators=(",", ":")).encode())
        expected = Packed(b"".join([header, *blobs]), len(header), zlib.crc32(header), holder)
        assert pack_record({"text": text, "big": big}, {"n": [1]}, shared) == expected
    assert pack_record({}, {}) == pack_record({}, {}, {}) == pack_record({}, {}, None)
    # Other levels give other bytes.
    assert zstandard.ZstdCompressor(level=2).compress(text[:rows].tobytes()) != blobs[0]


def test_blobs_of_rows() -> None:
    array = StoredArray("", 0, np.dtype("u1"), (10, 2), 3, [5, 8, 9, 20, 22], [1, 2, 3, 4])
    assert [array.span(number) for number in (0, 3)] == [(5, 8, 1, ""), (20, 22, 4, "")]
    for rows, expected in (
        (None, [(0, 0, 0), (1, 0, 0), (2, 0, 0), (3, 0, 0)]),
        ([], []),
        ([0, 2, 3, 9], [(0, 0, 2), (1, 2, 3), (3, 3, 4)]),
        ([3, 4, 5], [(1, 0, 3)]),
        ([5, 6], [(1, 0, 1), (2, 1, 2)]),
        ([8, 9], [(2, 0, 1), (3, 1, 2)]),
        (list(range(10)), [(0, 0, 3), (1, 3, 6), (2, 6, 9), (3, 9, 10)]),
    ):
        assert array.blobs_of(None if rows is None else np.array(rows, np.int64)) == expected


def test_a_blob_holds_no_more_than_its_rows() -> None:
    import zstandard

    array = StoredArray("x", 0, np.dtype("u1"), (10, 2), 4, [0, 8, 16, 20], [1, 2, 3])
    for number, size in ((0, 8), (1, 8), (2, 4)):
        assert array.unpack(number, zstandard.compress(bytes(size))).tolist() == [0] * size
        with pytest.raises(UserError, match=r"^x: damaged \(unexpected size\)\. Pack the store again\.$"):
            array.unpack(number, zstandard.compress(bytes(size + 1)))


def test_a_shard_ends_before_the_record_that_would_exceed_it(tmp_path: Path) -> None:
    record = pack_record({"x": np.arange(50)}, {})
    size = len(record.data)
    for limit, counts in ((2 * size, [2, 2, 1]), (2 * size - 1, [1] * 5), (1, [1] * 5), (5 * size, [5])):
        with StoreWriter(tmp_path / str(limit), limit) as writer:
            for i in range(5):
                writer.add(f"k{i}", record, {"i": i})
            writer.finish()
        store = Store(tmp_path / str(limit))
        assert store.index.shards == [(f"shard-{i:05d}.wfs", count * size) for i, count in enumerate(counts)]
        shards = [shard for shard, count in enumerate(counts) for _ in range(count)]
        offsets = [size * i for count in counts for i in range(count)]
        where = {
            "shard": shards, "offset": offsets, "size": [size] * 5, "header": [record.header] * 5,
            "crc": [record.crc] * 5, "holder": [-1] * 5,
        }  # fmt: skip
        assert {name: array.tolist() for name, array in store.index.where.items()} == where
        assert store.nbytes == 5 * size + (store.path / "index.wfi").stat().st_size
        assert store.checksum == digest_of((store.path / "store.json").read_bytes())
        assert (store.columns, list(store.column("i"))) == (["i"], [0, 1, 2, 3, 4])
    with StoreWriter(tmp_path / "default") as writer:
        assert writer.shard_bytes == 1 << 30


def test_all_bytes_are_on_disk_before_a_store_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: dict[int, int] = {}
    monkeypatch.setattr(os, "fsync", lambda file: synced.update({os.fstat(file).st_ino: os.fstat(file).st_size}))
    write(tmp_path / "s", 1)
    for name in ("shard-00000.wfs", "index.wfi", "store.json", "pack.json"):
        status = (tmp_path / "s" / name).stat()
        assert synced[status.st_ino] == status.st_size


def test_the_files_of_a_store(tmp_path: Path) -> None:
    (tmp_path / "s.partial").mkdir()
    for name in ("shard-00007.wfs", "pack.tsv", "index.wfi", ".index.wfi.0123abcd"):
        (tmp_path / "s.partial" / name).write_text("of a killed writer")
    with StoreWriter(tmp_path / "s") as writer:
        for key in ("a", "b"):
            writer.add(key, pack_record({}, {}), {})
        writer.finish({"pack.json": "one", "pack.tsv": iter(["ö", "", "ne"])})
    files = {path.name: path.read_bytes() for path in (tmp_path / "s").iterdir()}
    assert files.keys() == {"store.json", "index.wfi", "shard-00000.wfs", "pack.json", "pack.tsv"}
    index = files["index.wfi"]
    top = {
        "format": "warpfold-store",
        "version": 5,
        "records": 2,
        "index": {"bytes": len(index), "blake2b": digest_of(index)},
        "files": {"pack.json": zlib.crc32(b"one"), "pack.tsv": zlib.crc32("öne".encode())},
    }
    assert files["store.json"].decode() == json.dumps(top, indent=1) + "\n"
    store = Store(tmp_path / "s")
    assert [store.file(name) for name in ("pack.json", "pack.tsv", "sources.json")] == ["one", "öne", None]
    with StoreWriter(tmp_path / "bare") as writer:
        writer.add("a", pack_record({}, {}), {})
        writer.finish()
    assert json.loads((tmp_path / "bare/store.json").read_text())["files"] == {}


def test_a_writer_closes_its_files(tmp_path: Path) -> None:
    for name in ("finished", "aborted"):
        with StoreWriter(tmp_path / name) as writer:
            writer.add("a", pack_record({}, {}), {})
            file = writer._file
            assert file is not None
            if name == "finished":
                writer.finish()
        assert file.closed


def test_the_columns_of_all_records_have_the_same_names(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "s") as writer:
        writer.add("a", pack_record({}, {}), {"x": 1, "y": 2})
        with pytest.raises(ValueError, match="b: its meta has other names"):
            writer.add("b", pack_record({}, {}), {"x": 1})
    with StoreWriter(tmp_path / "s") as writer:
        writer.add("a", pack_record({}, {}), {"x": 1})
        with pytest.raises(ValueError, match="b: its meta has other names"):
            writer.add("b", pack_record({}, {}), {"x": 1, "y": 2})


def test_records_are_copied_without_unpacking_them(tmp_path: Path) -> None:
    path = hostile_store(tmp_path / "s")
    store = Store(path)
    with StoreWriter(tmp_path / "copy", shard_bytes=100) as writer:
        for row, key in enumerate(store.keys):
            writer.add(key, store.packed(key), {name: store.column(name)[row] for name in store.columns})
        writer.finish()
    for file in path.iterdir():
        assert (tmp_path / "copy" / file.name).read_bytes() == file.read_bytes()


def test_a_request_gets_all_blobs_of_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with StoreWriter(tmp_path / "s", shard_bytes=1) as writer:
        writer.add("a", pack_record({"y": np.arange(50)}, {}), {})
        both = {"x": np.arange(40_000), "z": np.arange(3)}
        writer.add("b", pack_record(both, {}, {"y": "a"}), {})
        writer.finish()
    store = Store(tmp_path / "s")
    record, read, asked = store.record("b"), store.storage.read, list[tuple[str, int]]()
    monkeypatch.setattr(
        store.storage, "read", lambda name, ranges: (asked.append((name[6:11], len(ranges))), read(name, ranges))[1]
    )
    none, last = np.array([], np.int64), np.array([39_999])
    record.fetch({"x": None, "z": none, "y": np.array([3, 4])})
    assert asked == [("00001", 3), ("00000", 1)]
    np.testing.assert_array_equal(record.read("x"), both["x"])
    np.testing.assert_array_equal(record.read("x", last), last)
    np.testing.assert_array_equal(record.read("y", np.array([0, 49])), [0, 49])
    assert len(asked) == 2
    np.testing.assert_array_equal(record.read("z"), both["z"])
    assert asked[2:] == [("00001", 1)]
    record.fetch({"z": none, "x": last})
    assert asked[3:] == [("00001", 1)]
    # The blobs of an earlier `fetch` are released, and the missing ones are read together.
    np.testing.assert_array_equal(record.read("x"), both["x"])
    assert asked[4:] == [("00001", 2)]
    record.fetch({"z": none})
    assert len(asked) == 5
    with pytest.raises(KeyError):
        record.read("other")
    assert "_fetched" not in repr(record)


# ---- damage


def test_a_store_without_records_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "s", 1)
    (path / "index.wfi").write_bytes(encode_index([], {name: np.zeros(0) for name in WHERE}, {}, []))
    sign(path)
    with pytest.raises(UserError, match=r"/s: an empty store\. Pack it again\.$"):
        Store(path)


def test_another_process_that_has_checked_a_store_spares_the_checks(tmp_path: Path) -> None:
    path = write(tmp_path / "s")
    store = Store(path)
    index = bytearray((path / "index.wfi").read_bytes())
    index[-1] ^= 1
    (path / "index.wfi").write_bytes(index)
    (path / "shard-00000.wfs").write_bytes(b"")
    assert ForkingPickler.loads(ForkingPickler.dumps(store)).keys == store.keys
    assert Store(path, checked=True).keys == store.keys
    with pytest.raises(UserError, match=r"index\.wfi: damaged \(checksum\)"):
        Store(path)
    (path / "index.wfi").unlink()
    with pytest.raises(UserError, match=r"/index\.wfi: cannot be read: No such file.*\. Copy the store again\.$"):
        Store(path)


def test_a_longer_shard_is_accepted_and_a_missing_one_named_when_read(tmp_path: Path) -> None:
    path = write(tmp_path / "s", 1)
    with (path / "shard-00000.wfs").open("ab") as file:
        file.write(b"more")
    store = Store(path)
    assert list(store.verify()) == []
    (path / "shard-00000.wfs").unlink()
    store.close()
    with pytest.raises(UserError, match=r"shard-00000\.wfs: entry_0: cannot be read: No such file.*\. Copy the store"):
        store.record("entry_0")


def test_a_key_that_the_index_does_not_find_is_damage(tmp_path: Path) -> None:
    path = write(tmp_path / "s")
    with pytest.raises(KeyError, match="other"):
        Store(path).record("other")
    index = Store(path).index
    arrays = bytearray((path / "index.wfi").read_bytes())
    at = arrays.index(index._hashes.tobytes())
    arrays[at : at + 24] = bytes(24)
    (path / "index.wfi").write_bytes(arrays)
    sign(path)
    store = Store(path)
    with pytest.raises(UserError, match=r"index\.wfi: damaged \(entry_2 is not found\)\. Copy or pack the store again"):
        store.record("entry_2")
    with pytest.raises(KeyError, match="other"):
        store.row("other")


@pytest.mark.parametrize("what", ["no holder", "another holder"])
def test_shared_arrays_that_the_holder_lacks_are_damage(tmp_path: Path, what: str) -> None:
    path = hostile_store(tmp_path / "s")
    holders = np.array([-1, -1, 0], "<i4")
    assert Store(path).index.where["holder"].tolist() == holders.tolist()
    data = bytearray((path / "index.wfi").read_bytes())
    at = data.index(holders.tobytes())
    data[at : at + 12] = np.array([-1, -1, -1 if what == "no holder" else 1], "<i4").tobytes()
    (path / "index.wfi").write_bytes(data)
    sign(path)
    with pytest.raises(UserError, match=r"/s: c: y is not in a\. Copy or pack the store again\.$"):
        Store(path).record("c")


def test_a_store_is_verified_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(hostile_store(tmp_path / "s"))
    calls: list[tuple[int, int]] = []
    assert list(store.verify(lambda *call: calls.append(call))) == []
    assert calls == [(1, 3), (2, 3), (3, 3)]
    path = write(tmp_path / "t")
    store = Store(path)
    (path / "pack.json").unlink()
    missing, *others = store.verify(lambda *call: calls.append(call))
    assert (missing, others) == (f"{path}/pack.json: damaged or missing. Copy or pack the store again", [])
    lines = []
    for key, name, number in (("entry_0", "msa", 2), ("entry_2", "positions", 0)):
        flipped = flip(path, store.record(key).arrays[name].starts[number])
        at = store.record(key).arrays[name].starts[number]
        lines.append(
            f"{path}/shard-00000.wfs: {key}, {name}: damaged (checksum at byte {at}). Copy or pack the store again."
        )
    assert list(flipped.verify())[1:] == lines

    def fails(*_: object) -> None:
        raise StorageError("no network")

    monkeypatch.setattr(store.storage, "read", fails)
    with pytest.raises(StorageError, match="no network"):
        list(store.verify())


@pytest.mark.parametrize("what", ["longer", "unknown size", "no frame"])
@pytest.mark.parametrize("array", [np.arange(10), np.array(2.5)], ids=["array", "number"])
def test_a_blob_that_was_made_of_other_bytes_is_damage(tmp_path: Path, what: str, array: np.ndarray) -> None:
    """Its checksum is right. At most the size of its rows is unpacked."""
    import zstandard

    record = pack_record({"x": array}, {})
    header = zstandard.ZstdDecompressor().decompress(record.data[: record.header])
    (_, _, _, _, ((size, crc),)) = json.loads(header)["arrays"][0]
    blob = {
        "longer": zstandard.compress(bytes(array.nbytes + 1)),
        "unknown size": zstandard.ZstdCompressor(write_content_size=False).compress(array.tobytes()),
        "no frame": array.tobytes(),
    }[what]
    text = header.replace(f"[{size},{crc}]".encode(), f"[{len(blob)},{zlib.crc32(blob)}]".encode())
    new = zstandard.compress(text)
    with StoreWriter(tmp_path / "s") as writer:
        writer.add("a", Packed(new + blob, len(new), zlib.crc32(new)), {})
        writer.finish()
    with pytest.raises(UserError, match=r"shard-00000\.wfs: a, x: damaged \(.*\)\. Pack the store again\.$"):
        Store(tmp_path / "s").record("a").read("x")
