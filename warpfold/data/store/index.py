"""Read and write the index of a store: columns in a memory-mapped file (docs/reference/formats.md).

An index of a million entries consists of a few dozen arrays. Opening it creates views of the arrays and no Python
objects per entry. Texts are decoded on access. All processes of a machine share one copy, and nothing is parsed.
"""

import json
import struct
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeVar, overload

import numpy as np

MAGIC, INDEX_VERSION = b"WARPFIDX", 1
# Magic, version, bytes of the table, bytes of the file.
HEAD = struct.Struct("<8sIIQ")
ALIGN = 64  # bytes; alignment of the arrays
NONE = -(2**63)  # None in a column of integers
# The location of each record: shard, first byte in it, size, size and CRC of its header; and the row of the record that
# holds its shared arrays, -1 for none.
WHERE = {"shard": "<u4", "offset": "<u8", "size": "<u8", "header": "<u4", "crc": "<u4", "holder": "<i4"}

Arrays = dict[str, np.ndarray]
V = TypeVar("V")


class _LazySequence(Sequence[V]):
    """A sequence of Python objects that are created on access by `_make`."""

    @abstractmethod
    def _make(self, place: int) -> V: ...

    @overload
    def __getitem__(self, place: int) -> V: ...
    @overload
    def __getitem__(self, place: slice) -> list[V]: ...
    def __getitem__(self, place: int | slice) -> V | list[V]:
        selected = range(len(self))[place]
        return self._make(selected) if isinstance(selected, int) else [self._make(i) for i in selected]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(a == b for a, b in zip(self, other))


class Texts(_LazySequence[str]):
    """Concatenated UTF-8 texts: text i is the bytes [starts[i], starts[i + 1])."""

    def __init__(self, starts: np.ndarray, data: np.ndarray) -> None:
        self.starts, self.data = starts, data

    def __len__(self) -> int:
        return len(self.starts) - 1

    def encoded(self, place: int) -> bytes:
        """Return the bytes of a text."""
        return self.data[int(self.starts[place]) : int(self.starts[place + 1])].tobytes()

    def _make(self, place: int) -> str:
        return self.encoded(place).decode("utf-8", "surrogatepass")

    def check(self) -> None:
        """Raise ValueError (or its subclass UnicodeDecodeError) if the bytes are not concatenated texts."""
        starts = self.starts.astype(np.int64)
        if not len(starts) or starts[0] != 0 or starts[-1] != len(self.data) or (np.diff(starts) < 0).any():
            raise ValueError("texts that are not consecutive")
        self.data.tobytes().decode("utf-8", "surrogatepass")
        # The continuation bytes of UTF-8 are 10xxxxxx. No text starts with one.
        if (self.data[starts[starts < len(self.data)]] & 0xC0 == 0x80).any():
            raise ValueError("texts that start within a character")

    def ranks(self) -> np.ndarray:
        """Compute the rank of each text in sorted order, which is also the order of the bytes."""
        starts = self.starts.astype(np.int64)
        lengths = starts[1:] - starts[:-1]
        width = int(lengths.max(initial=1))
        padded = np.zeros((len(self), width), np.uint8)
        padded[np.repeat(np.arange(len(self)), lengths), _concatenate_ranges(lengths)] = self.data
        ranks = np.empty(len(self), np.int64)
        ranks[np.argsort(padded.view(f"S{width}").ravel(), kind="stable")] = np.arange(len(self))
        return ranks


def _concatenate_ranges(lengths: np.ndarray) -> np.ndarray:
    """Concatenate the ranges 0 .. length - 1 of all lengths."""
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _narrow(values: np.ndarray, dtype: str) -> np.ndarray:
    """Convert integers to a narrower type if it can represent all of them."""
    narrow = values.astype(dtype)
    return narrow if np.array_equal(narrow, values) else values


def _encode_texts(texts: Sequence[str]) -> Arrays:
    """Encode texts as the arrays of `Texts`."""
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    starts = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    return {"starts": _narrow(starts, "<u4"), "texts": np.frombuffer(b"".join(encoded), np.uint8)}


class Column(_LazySequence[Any]):
    """A column of the index as a sequence of one value per record. Any value may be None.

    kind: "int", "float", "text" (stored as codes of the unique texts) or "list" (of texts). places: rows of the index;
    None for all.
    """

    def __init__(self, kind: str, arrays: Arrays, places: np.ndarray | None = None) -> None:
        self.kind, self._arrays, self._places = kind, arrays, places
        self.texts = Texts(arrays["starts"], arrays["texts"]) if kind in ("text", "list") else None

    def __repr__(self) -> str:
        return f"<Column of {len(self)}: {self.kind}>"

    def __len__(self) -> int:
        if self._places is not None:
            return len(self._places)
        return len(self._arrays["begins"]) - 1 if self.kind == "list" else len(self._arrays["values"])

    def _make(self, place: int) -> Any:
        at = place if self._places is None else int(self._places[place])
        if self.texts is not None and self.kind == "list":
            begin, end = self._arrays["begins"][at : at + 2].tolist()
            return [self.texts[code] for code in self._arrays["values"][begin:end].tolist()] or None
        value = self._arrays["values"][at].item()
        if self.texts is not None:
            return None if value < 0 else self.texts[value]
        return None if value != value or value == NONE else value

    def __iter__(self) -> Iterator[Any]:
        if self.kind == "list":
            return (self[i] for i in range(len(self)))
        values = self.values.tolist()
        if self.texts is not None:
            # The code -1, the last element, is None.
            texts: list[str | None] = [*self.texts, None]
            return (texts[code] for code in values)
        return (None if value != value or value == NONE else value for value in values)

    @property
    def values(self) -> np.ndarray:
        """Return a column of numbers as an array, or a column of texts as codes with -1 for None."""
        assert self.kind != "list"
        values = self._arrays["values"]
        return values if self._places is None else values[self._places]

    @property
    def members(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the length of each list, and for all their texts the row with this key, -1 for none."""
        begins, codes = self._arrays["begins"].astype(np.int64), self._arrays["values"]
        counts = np.diff(begins)
        if self._places is not None:
            counts, first = counts[self._places], begins[self._places]
            codes = codes[np.repeat(first, counts) + _concatenate_ranges(counts)]
        return counts, self._arrays["keys"][codes].astype(np.int64)

    def check(self, rows: int) -> None:
        """Raise ValueError unless the column is valid and has `rows` values."""
        values = self._arrays["values"]
        if len(self) != rows:
            raise ValueError("columns of different length")
        if self.texts is not None:
            self.texts.check()
            if (values >= len(self.texts)).any() or (values < (0 if self.kind == "list" else -1)).any():
                raise ValueError("codes without a text")
        if self.kind == "list":
            begins, keys = self._arrays["begins"], self._arrays["keys"]
            if begins[0] != 0 or begins[-1] != len(values) or (np.diff(begins) < 0).any():
                raise ValueError("lists that are not consecutive")
            if len(keys) != len(self._arrays["starts"]) - 1 or (keys < -1).any() or (keys >= rows).any():
                raise ValueError("keys without a row")

    def take(self, places: np.ndarray) -> "Column":
        """Select records by index."""
        return Column(self.kind, self._arrays, places if self._places is None else self._places[places])


def encode_column(name: str, values: Sequence[Any], rows: Mapping[str, int]) -> tuple[str, Arrays]:
    """Encode a column; returns its kind and arrays. rows: the row of each key of the store, for lists of keys.

    Raises ValueError unless all values are finite numbers, texts, or non-empty lists of texts, or None.
    """
    kinds = set(map(type, values)) - {type(None)}
    if kinds == {int}:
        wide = np.array([NONE if value is None else value for value in values], "<i8")
        return "int", {"values": _narrow(wide, "<i4")}
    if kinds and kinds <= {int, float}:
        numbers = np.array([np.nan if value is None else value for value in values], "<f8")
        if np.isfinite(numbers).sum() + sum(value is None for value in values) == len(values):
            return "float", {"values": numbers}
    elif kinds <= {str}:
        texts = [text for text in dict.fromkeys(values) if text is not None]
        codes: dict[str | None, int] = {text: code for code, text in enumerate(texts)} | {None: -1}
        return "text", {"values": np.array([codes[value] for value in values], "<i4"), **_encode_texts(texts)}
    elif kinds == {list} and all(value is None or (value and set(map(type, value)) == {str}) for value in values):
        items: list[str] = [text for value in values if value for text in value]
        texts = list(dict.fromkeys(items))
        code_of = {text: code for code, text in enumerate(texts)}
        begins = np.cumsum([0, *(len(value or ()) for value in values)], dtype="<i8")
        keys = np.array([rows.get(text, -1) for text in texts], "<i4")
        item_codes = np.array([code_of[text] for text in items], "<i4")
        return "list", {"begins": begins, "values": item_codes, "keys": keys, **_encode_texts(texts)}
    raise ValueError(f"{name}: a column must have finite numbers, texts, lists of texts, or None")


def _hash_key(key: bytes) -> int:
    """Hash a key to 64 bits."""
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little")


def encode_index(
    keys: Sequence[str],
    where: Mapping[str, np.ndarray],
    meta: Mapping[str, Sequence[Any]],
    shards: Sequence[tuple[str, int]],
) -> bytes:
    """Encode an index. where: the columns of `WHERE` for the records of `keys`. shards: names and sizes in bytes.

    Equal records give equal bytes.
    """
    arrays = {f"where.{name}": np.asarray(where[name], dtype) for name, dtype in WHERE.items()}
    has_lists = any(isinstance(value, list) for values in meta.values() for value in values)
    rows = {key: row for row, key in enumerate(keys)} if has_lists else {}
    arrays |= {f"key.{name}": array for name, array in _encode_texts(keys).items()}
    hashes = np.fromiter((_hash_key(key.encode("utf-8", "surrogatepass")) for key in keys), "<u8", len(keys))
    order = np.argsort(hashes, kind="stable")
    arrays |= {"hash.values": hashes[order], "hash.rows": order.astype("<u4")}
    kinds = {}
    for name, values in meta.items():
        kinds[name], columns = encode_column(name, values, rows)
        arrays |= {f"meta.{name}.{part}": array for part, array in columns.items()}
    layout, at = [], 0
    for name, array in arrays.items():
        layout.append([name, array.dtype.newbyteorder("<").str, len(array), at])
        at += -(-array.nbytes // ALIGN) * ALIGN
    header = {"records": len(keys), "shards": list(shards), "columns": kinds, "arrays": layout}
    table = json.dumps(header, separators=(",", ":")).encode()
    table += b" " * (-(HEAD.size + len(table)) % ALIGN)
    blocks = [HEAD.pack(MAGIC, INDEX_VERSION, len(table), HEAD.size + len(table) + at), table]
    for array in arrays.values():
        data = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        blocks += [data, bytes(-len(data) % ALIGN)]
    return b"".join(blocks)


class Index:
    """An index as a view of its bytes.

    Raises ValueError for other bytes, and NotImplementedError with the version for a later version.
    """

    def __init__(self, data: bytes | memoryview) -> None:
        if len(data) < HEAD.size:
            raise ValueError("not an index")
        magic, version, size, total = HEAD.unpack(data[: HEAD.size])
        if magic != MAGIC or version < INDEX_VERSION:
            raise ValueError("not an index")
        if version > INDEX_VERSION:
            raise NotImplementedError(str(version))
        if total != len(data):
            raise ValueError(f"{len(data)} bytes, {total} expected")
        header = json.loads(bytes(data[HEAD.size : HEAD.size + size]))
        begin = HEAD.size + size
        arrays = {name: np.frombuffer(data, dtype, count, begin + at) for name, dtype, count, at in header["arrays"]}
        self.shards: list[tuple[str, int]] = [(name, size) for name, size in header["shards"]]
        self.where: Arrays = {name: arrays[f"where.{name}"] for name in WHERE}
        self.texts = Texts(arrays["key.starts"], arrays["key.texts"])
        self._hashes, self._rows = arrays["hash.values"], arrays["hash.rows"]
        self.columns: dict[str, Column] = {}
        for column, kind in header["columns"].items():
            prefix = f"meta.{column}."
            names = [name for name in ("values", "begins", "keys", "starts", "texts") if prefix + name in arrays]
            self.columns[column] = Column(kind, {name: arrays[prefix + name] for name in names})

    def __len__(self) -> int:
        return len(self.texts)

    def check(self) -> None:
        """Raise ValueError for inconsistent numbers, so that later reads stay within the files and arrays."""
        rows, sizes = len(self), np.array([size for _, size in self.shards], np.uint64)
        if any("/" in name or name.startswith(".") for name, _ in self.shards):
            raise ValueError("a shard outside of its folder")
        if any(len(column) != rows for column in (*self.where.values(), self._hashes, self._rows)):
            raise ValueError("columns of different length")
        shard, offset, size, header, _, holder = (self.where[name] for name in WHERE)
        if (shard >= len(sizes)).any() or (self._rows >= rows).any() or (holder < -1).any() or (holder >= rows).any():
            raise ValueError("rows or shards that do not exist")
        if (size > sizes[shard]).any() or (offset > sizes[shard] - size).any() or (header > size).any():
            raise ValueError("records outside of their shards")
        self.texts.check()
        for column in self.columns.values():
            column.check(rows)

    def row(self, key: object) -> int:
        """Return the row of a key, or -1."""
        if not isinstance(key, str):
            return -1
        encoded = key.encode("utf-8", "surrogatepass")
        hashed = np.uint64(_hash_key(encoded))
        at = int(np.searchsorted(self._hashes, hashed))
        while at < len(self._hashes) and self._hashes[at] == hashed:
            row = int(self._rows[at])
            if self.texts.encoded(row) == encoded:
                return row
            at += 1
        return -1


class Keys(_LazySequence[str]):
    """The keys of some records of an index, in any order. rows: of these records; None for all."""

    def __init__(self, whole: Index, rows: np.ndarray | None = None) -> None:
        self.whole = whole
        self._rows = rows

    @property
    def rows(self) -> np.ndarray:
        """Return the row of each key."""
        return np.arange(len(self.whole)) if self._rows is None else self._rows

    def __repr__(self) -> str:
        return f"<{len(self)} keys>"

    def __len__(self) -> int:
        return len(self.whole) if self._rows is None else len(self._rows)

    def _make(self, place: int) -> str:
        return self.whole.texts[place if self._rows is None else int(self._rows[place])]

    def __contains__(self, key: object) -> bool:
        row = self.whole.row(key)
        return row >= 0 and (self._rows is None or bool((self._rows == row).any()))

    def take(self, places: np.ndarray) -> "Keys":
        """Select keys by index."""
        return Keys(self.whole, np.asarray(self.rows[places]))

    def without(self, names: Iterable[str]) -> "Keys":
        """Return the keys without the named ones."""
        rows = [self.whole.row(name) for name in names]
        return self if not rows else self.take(np.flatnonzero(~np.isin(self.rows, rows)))
