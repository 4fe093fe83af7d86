"""Read and write indices: as docs/reference/formats.md describes them, and never beyond their arrays and files."""

import json
import struct
from collections.abc import Callable
from hashlib import blake2b
from itertools import accumulate
from typing import Any

import numpy as np
import pytest

from warpfold.data.store import index as index_module
from warpfold.data.store.index import NONE, Index, Keys, Texts, encode_index

KEYS = ["b", "é", "a"]
SHARDS = [("shard-0", 100), ("shard-1", 50)]
# Every value is at its limit.
WHERE = {
    "shard": [0, 0, 1], "offset": [0, 40, 10], "size": [40, 60, 40], "header": [40, 5, 1], "crc": [2**32 - 1, 0, 7],
    "holder": [-1, 2, 0],
}  # fmt: skip
META = {
    "small": [None, -(2**31), 2**31 - 1],
    "large": [2**31, None, 0],
    "float": [None, 1.5, 0.0],
    "mixed": [1, 2.5, None],
    "text": ["é", None, ""],
    "none": [None, None, None],
    "list": [["a", "x", "a"], None, ["b"]],
}
KINDS = {"small": "int", "large": "int", "float": "float", "mixed": "float", "text": "text", "none": "text"}

Arrays = dict[str, np.ndarray]


def encoded(keys: list[str] = KEYS, meta: dict[str, Any] = META) -> bytes:
    where = {name: np.array(values[: len(keys)]) for name, values in WHERE.items()}
    return encode_index(keys, where, meta, SHARDS)


def parts(data: bytes) -> tuple[dict[str, Any], Arrays]:
    """Read an index as the documentation describes it: its table without the arrays, and copies of the arrays."""
    magic, version, size, total = struct.unpack("<8sIIQ", data[:24])
    assert (magic, version, total, (24 + size) % 64) == (b"WARPFIDX", 1, len(data), 0)
    table = json.loads(data[24 : 24 + size])
    arrays = {}
    for name, dtype, length, offset in table.pop("arrays"):
        arrays[name] = np.frombuffer(data, dtype, length, 24 + size + offset).copy()
    return table, arrays


def joined(table: dict[str, Any], arrays: Arrays) -> bytes:
    """Write an index from its parts."""
    blocks = [array.tobytes() + bytes(-array.nbytes % 64) for array in arrays.values()]
    offsets = accumulate(map(len, blocks), initial=0)
    layout = [[name, array.dtype.str, len(array), at] for (name, array), at in zip(arrays.items(), offsets)]
    text = json.dumps(table | {"arrays": layout}, separators=(",", ":")).encode()
    text += b" " * (-(24 + len(text)) % 64)
    size = 24 + len(text) + sum(map(len, blocks))
    return struct.pack("<8sIIQ", b"WARPFIDX", 1, len(text), size) + text + b"".join(blocks)


def test_an_index_is_as_documented() -> None:
    data = encoded()
    table, arrays = parts(data)
    assert joined(table, arrays) == data
    assert table == {"records": 3, "shards": [list(s) for s in SHARDS], "columns": KINDS | {"list": "list"}}
    hashes = [int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little") for key in KEYS]
    order = sorted(range(3), key=lambda row: hashes[row])
    texts = list("béa".encode())
    expected: dict[str, tuple[str, list[Any]]] = {
        "where.shard": ("<u4", WHERE["shard"]),
        "where.offset": ("<u8", WHERE["offset"]),
        "where.size": ("<u8", WHERE["size"]),
        "where.header": ("<u4", WHERE["header"]),
        "where.crc": ("<u4", WHERE["crc"]),
        "where.holder": ("<i4", WHERE["holder"]),
        "key.starts": ("<u4", [0, 1, 3, 4]),
        "key.texts": ("|u1", texts),
        "hash.values": ("<u8", [hashes[row] for row in order]),
        "hash.rows": ("<u4", order),
        "meta.small.values": ("<i8", [-(2**63), -(2**31), 2**31 - 1]),
        "meta.large.values": ("<i8", [2**31, -(2**63), 0]),
        "meta.float.values": ("<f8", [None, 1.5, 0.0]),
        "meta.mixed.values": ("<f8", [1.0, 2.5, None]),
        "meta.text.values": ("<i4", [0, -1, 1]),
        "meta.text.starts": ("<u4", [0, 2, 2]),
        "meta.text.texts": ("|u1", list("é".encode())),
        "meta.none.values": ("<i4", [-1, -1, -1]),
        "meta.none.starts": ("<u4", [0]),
        "meta.none.texts": ("|u1", []),
        "meta.list.begins": ("<i8", [0, 3, 3, 4]),
        "meta.list.values": ("<i4", [0, 1, 0, 2]),
        "meta.list.keys": ("<i4", [2, -1, 0]),
        "meta.list.starts": ("<u4", [0, 1, 2, 3]),
        "meta.list.texts": ("|u1", list(b"axb")),
    }
    plain = {name: (array.dtype.str, [None if x != x else x for x in array.tolist()]) for name, array in arrays.items()}
    assert plain == expected
    assert parts(encoded(meta={"small": [1, 2, 3]}))[1]["meta.small.values"].dtype == "<i4"


def test_an_index_is_read_as_it_was_written() -> None:
    index = Index(encoded())
    index.check()
    assert (len(index), index.shards, list(index.texts)) == (3, SHARDS, KEYS)
    assert {name: array.tolist() for name, array in index.where.items()} == WHERE
    assert [index.row(key) for key in (*KEYS, "c", "", 3)] == [0, 1, 2, -1, -1, -1]
    assert {name: list(column) for name, column in index.columns.items()} == META
    assert {name: column.kind for name, column in index.columns.items()} == KINDS | {"list": "list"}
    assert index.columns["text"].values.tolist() == [0, -1, 1]
    assert index.columns["large"].take(np.array([2, 1])).values.tolist() == [0, NONE]
    column = index.columns["list"]
    assert [x.tolist() for x in column.members] == [[3, 0, 1], [2, -1, 2, 0]]
    some = column.take(np.array([0, 2, 1])).take(np.array([1, 2, 0]))
    assert list(some) == [META["list"][i] for i in (2, 1, 0)]
    assert [x.tolist() for x in some.members] == [[1, 0, 3], [0, 2, -1, 2]]


def test_many_keys_are_found_also_if_their_hashes_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [f"key {i}" for i in range(300)]
    for hash_key in (index_module._hash_key, lambda key: len(key) % 3, lambda key: 2**64 - 1):
        with monkeypatch.context() as patch:
            patch.setattr(index_module, "_hash_key", hash_key)
            where = {name: np.zeros(300) for name in WHERE}
            index = Index(encode_index(keys, where, {}, SHARDS))
            assert [index.row(key) for key in keys] == list(range(300))
            assert [index.row(key) for key in ("", "key", "key 300", "another")] == [-1] * 4


def test_keys_are_a_sequence_of_any_rows() -> None:
    index = Index(encoded())
    keys = Keys(index)
    assert (len(keys), keys[1], keys[-1], keys[1:], keys.rows.tolist()) == (3, "é", "a", ["é", "a"], [0, 1, 2])
    assert keys == KEYS
    for other in (["b", "é"], ["b", "é", "x"], ["x", "é", "a"], [*KEYS, "x"], [], 3, set(KEYS)):
        assert keys != other
    assert [key in keys for key in (*KEYS, "x", 3)] == [True, True, True, False, False]
    some = keys.take(np.array([2, 0]))
    assert (list(some), len(some), some.rows.tolist(), some[1]) == (["a", "b"], 2, [2, 0], "b")
    assert [key in some for key in (*KEYS, "x", 3)] == [True, False, True, False, False]
    assert list(some.take(np.array([1]))) == ["b"]
    assert list(keys.without(["é", "x"])) == ["b", "a"]
    assert list(some.without(["b", "é"])) == ["a"]
    assert keys.without([]) == KEYS
    with pytest.raises(IndexError):
        keys[3]


def test_texts_are_ranked_by_their_bytes() -> None:
    texts = ["b", "", "ab", "é", "a", "abc", "ab"]
    data = encode_index(texts, {name: np.zeros(len(texts)) for name in WHERE}, {}, SHARDS)
    assert Index(data).texts.ranks().tolist() == [5, 0, 2, 6, 1, 4, 3]
    empty = encode_index(["", ""], {name: np.zeros(2) for name in WHERE}, {}, SHARDS)
    assert Index(empty).texts.ranks().tolist() == [0, 1]


@pytest.mark.parametrize(
    "values",
    [
        [1.0, float("nan")], [None, float("nan")], [None, float("-inf")], [["a"], []], [["a"], [1]], [["a"], "a"],
        [["a"], None, ["a", 1]], [1, True], [None, (1,)], [["a"], 1.0],
    ],
)  # fmt: skip
def test_columns_refuse_other_values(values: list[Any]) -> None:
    keys = [f"key {i}" for i in range(len(values))]
    with pytest.raises(ValueError, match=r"^wrong: a column must have finite numbers, texts, lists of texts, or None$"):
        encode_index(keys, {name: np.zeros(len(values)) for name in WHERE}, {"wrong": values}, [])


# ---- other bytes


def test_other_bytes_are_refused() -> None:
    data = encoded()
    for wrong, message in (
        (b"", "not an index"),
        (data[:23], "not an index"),
        (data[:24], f"24 bytes, {len(data)} expected"),
        (data[:-1], f"{len(data) - 1} bytes, {len(data)} expected"),
        (data + b"x", f"{len(data) + 1} bytes, {len(data)} expected"),
        (b"x" + data[1:], "not an index"),
        (data[:8] + bytes(4) + data[12:], "not an index"),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            Index(wrong)
    with pytest.raises(NotImplementedError, match=r"^2$"):
        Index(data[:8] + struct.pack("<I", 2) + data[12:])
    with pytest.raises(ValueError, match="not consecutive"):
        Texts(np.empty(0, np.uint32), np.empty(0, np.uint8)).check()


def put(name: str, place: int, value: int) -> tuple[str, Callable[[np.ndarray], np.ndarray]]:
    """Return the change that replaces a number of an array."""

    def change(array: np.ndarray) -> np.ndarray:
        array[place] = value
        return array

    return name, change


def cut(name: str) -> tuple[str, Callable[[np.ndarray], np.ndarray]]:
    """Return the change that removes the last element of an array."""
    return name, lambda array: array[:-1]


COLUMNS, ROWS, OUTSIDE = "columns of different length", "rows or shards that do not exist", "records outside of their"
TEXTS, LISTS, CODES, NAMES = (
    "texts that are not cons",
    "lists that are not cons",
    "codes without a",
    "keys without a row",
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *((cut(f"where.{name}"), COLUMNS) for name in WHERE),
        (cut("hash.values"), COLUMNS),
        (cut("hash.rows"), COLUMNS),
        *((cut(f"meta.{name}.values"), COLUMNS) for name in KINDS),
        (cut("meta.list.begins"), COLUMNS),
        (put("where.shard", 0, 2), ROWS),
        (put("hash.rows", 1, 3), ROWS),
        (put("where.holder", 0, -2), ROWS),
        (put("where.holder", 0, 3), ROWS),
        (put("where.size", 2, 51), OUTSIDE),
        (put("where.size", 0, 101), OUTSIDE),
        (put("where.offset", 2, 11), OUTSIDE),
        (put("where.offset", 1, 2**63), OUTSIDE),
        (put("where.header", 2, 41), OUTSIDE),
        (put("key.starts", 0, 1), TEXTS),
        (put("key.starts", -1, 3), TEXTS),
        (put("key.starts", -1, 5), TEXTS),
        (put("key.starts", 1, 4), TEXTS),
        (put("key.starts", 1, 2), "texts that start within a character"),
        (put("key.texts", 3, 0xC3), "codec can't decode"),
        (put("meta.text.starts", 0, 1), TEXTS),
        (put("meta.list.starts", 3, 2), TEXTS),
        (put("meta.text.values", 2, 2), CODES),
        (put("meta.text.values", 2, -2), CODES),
        (put("meta.list.values", 1, 3), CODES),
        (put("meta.list.values", 1, -1), CODES),
        (put("meta.list.begins", 0, 1), LISTS),
        (put("meta.list.begins", -1, 3), LISTS),
        (put("meta.list.begins", -1, 5), LISTS),
        (put("meta.list.begins", 1, 4), LISTS),
        (cut("meta.list.keys"), NAMES),
        (put("meta.list.keys", 0, 3), NAMES),
        (put("meta.list.keys", 0, -2), NAMES),
    ],
)
def test_numbers_that_lead_out_of_files_and_arrays_are_refused(
    change: tuple[str, Callable[[np.ndarray], np.ndarray]], message: str
) -> None:
    table, arrays = parts(encoded())
    name, edit = change
    arrays[name] = edit(arrays[name])
    with pytest.raises(ValueError, match=message):
        Index(joined(table, arrays)).check()


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden"])
def test_shards_lie_in_the_folder_of_the_index(name: str) -> None:
    table, arrays = parts(encoded())
    table["shards"][1] = [name, 50]
    with pytest.raises(ValueError, match="a shard outside of its folder"):
        Index(joined(table, arrays)).check()
