"""Write and read stores: records of named arrays, compressed in blocks with checksums (docs/reference/formats.md).

A store is a folder of shards, an index and a `store.json`. A shard is a sequence of records. The index holds their
locations and the sizes that sampling needs, so that opening a store reads no records. A record starts with a small
header with the locations of its blobs, so that any array, or any block of its rows, can be read separately. An array
that two records share is stored once. Checksums cover every byte. Equal records give equal bytes.

A finished store never changes. Users add data with a second store.
"""

import array as arrays_of_numbers
import contextlib
import json
import math
import os
import re
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, BinaryIO

import numpy as np

from warpfold.data.store.index import WHERE, Column, Index, Keys, encode_index
from warpfold.data.store.remote import Address, Place, open_storage, parse_place
from warpfold.errors import StorageError, UserError
from warpfold.files import LARGEST, DraftFolder, digest_of, write_atomically, writing

FORMAT, VERSION = "warpfold-store", 5
INDEX = "index.wfi"
# Uncompressed bytes of an array per blob. A whole blob is read even for a single row.
BLOCK = 1 << 17
# Bytes after which the next shard starts.
SHARD = 1 << 30
# The files of a writer, and the temporary files that a killed writer leaves.
_OWN = re.compile(
    r"lock|store\.json|(pack|sources)\.json|pack\.tsv|shard-\d{5,}\.wfs|index\.wfi|"
    r"\.(store|index|pack|sources)\.\w+\.[0-9a-f]{8}"
)
# Holds a decompressor per thread.
_THREAD = threading.local()
# Compression level of zstd. Higher levels hardly compress residues better.
LEVEL = 1


@dataclass(frozen=True)
class Packed:
    """An encoded record, which workers make and a single process writes.

    data: header and blobs. header: bytes of the header. crc: of the header. holder: the key of the record that holds
    the shared arrays.
    """

    data: bytes
    header: int
    crc: int
    holder: str = ""


def pack_record(
    arrays: Mapping[str, np.ndarray], notes: Mapping[str, Any], shared: Mapping[str, str] | None = None
) -> Packed:
    """Encode arrays of any shape and plain dtype, and JSON-serialisable `notes`, into a record.

    shared: maps the names of further arrays to the key of the record that holds them under the same names.
    """
    import zstandard

    compress = zstandard.ZstdCompressor(level=LEVEL).compress
    table, blobs = [], []
    for name, array in arrays.items():
        dtype = array.dtype.newbyteorder("<")
        if dtype.kind not in "biuf":
            raise ValueError(f"{name}: arrays of {array.dtype} cannot be stored")
        data = memoryview(array.astype(dtype).tobytes())
        count = len(array) if array.ndim else 1
        width = len(data) // max(count, 1)  # bytes per row
        rows = max(BLOCK // max(width, 1), 1)
        compressed = [compress(data[start * width : (start + rows) * width]) for start in range(0, count, rows)]
        blobs += compressed
        table.append([name, dtype.str, array.shape, rows, [[len(blob), zlib.crc32(blob)] for blob in compressed]])
    (holder,) = set((shared or {}).values()) or {""}
    content = {"notes": dict(notes), "arrays": table, "shared": dict(shared or {})}
    header = compress(json.dumps(content, separators=(",", ":"), allow_nan=False).encode())
    return Packed(b"".join([header, *blobs]), len(header), zlib.crc32(header), holder)


class StoreWriter:
    """Write a store into `path.partial/`, which is renamed to `path` when it is complete.

    Use it as a context manager: an exception removes the written files. After a kill, the next writer starts over.
    Raises UserError if `path` exists or is an address, if another process is writing it, and if it cannot be written.
    """

    def __init__(self, path: Place | str, shard_bytes: int = SHARD) -> None:
        place = parse_place(path)
        if isinstance(place, Address):
            raise UserError(f"{place}: a store is written to a folder. Pass a folder, and copy the finished store.")
        self.path, self.shard_bytes = place, shard_bytes
        self._file: BinaryIO | None = None
        # The row of each key, and the holder of each row with shared arrays.
        self._rows: dict[str, int] = {}
        self._holders: dict[int, str] = {}
        self._where = {name: arrays_of_numbers.array("Q") for name in WHERE if name != "holder"}
        self._meta: dict[str, list[Any]] = {}
        self._shards: list[tuple[str, int]] = []
        self._draft = DraftFolder(self.path, _OWN.fullmatch)
        self.folder = self._draft.folder
        # A killed writer may have left files.
        for path in self.folder.iterdir():
            if path.name != "lock":
                path.unlink()

    def add(self, key: str, record: Packed, meta: Mapping[str, Any]) -> None:
        """Append a record. meta: numbers, texts, lists or None for the index, with the same names for every record.

        Raises ValueError for a repeated key or other names in `meta`, and UserError if it cannot be written.
        """
        if key in self._rows:
            raise ValueError(f"{key}: twice in one store")
        with writing(self.path):
            if self._file is not None and self._file.tell() + len(record.data) > self.shard_bytes:
                self._end_shard()
            if self._file is None:
                self._file = open(self.folder / self._next_shard(), "xb")  # noqa: SIM115
            offset = self._file.tell()
            self._file.write(record.data)
        row = self._rows[key] = len(self._rows)
        location = {"shard": len(self._shards), "offset": offset, "size": len(record.data)}
        for name, value in (location | {"header": record.header, "crc": record.crc}).items():
            self._where[name].append(value)
        for name, value in meta.items():
            self._meta.setdefault(name, []).append(value)
        if any(len(column) != len(self._rows) for column in self._meta.values()):
            raise ValueError(f"{key}: its meta has other names than those of earlier records")
        if record.holder:
            self._holders[row] = record.holder

    def finish(self, files: Mapping[str, str | Iterable[str]] | None = None) -> None:
        """Write the index, text `files` (strings or their pieces), and `store.json`, and rename the folder.

        Raises UserError for a store without records, and if it cannot be written.
        """
        if not self._rows:
            raise UserError(f"{self.path}: nothing to store")
        locations = {name: np.array(column, np.int64) for name, column in self._where.items()}
        locations["holder"] = np.full(len(self._rows), -1)
        for row, key in self._holders.items():
            locations["holder"][row] = self._rows[key]
        with writing(self.path):
            self._end_shard()
            index = encode_index(list(self._rows), locations, self._meta, self._shards)
            top: dict[str, Any] = {"format": FORMAT, "version": VERSION, "records": len(self._rows)}
            top |= {"index": {"bytes": len(index), "blake2b": digest_of(index)}, "files": {}}
            write_atomically(self.folder / INDEX, index)
            # The index of a million entries has 100 MB, and the report has 300 MB.
            del index
            for name, text in (files or {}).items():
                data = bytearray()
                for piece in (text,) if isinstance(text, str) else text:
                    data += piece.encode()
                top["files"][name] = zlib.crc32(data)
                write_atomically(self.folder / name, data)
            write_atomically(self.folder / "store.json", json.dumps(top, indent=1) + "\n")
        self._draft.complete()

    def abort(self) -> None:
        """Remove the written files."""
        if self._file is not None:
            # Closing writes the buffer, which fails on a full disk.
            with contextlib.suppress(OSError):
                self._file.close()
        self._draft.remove()

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, *_: object) -> None:
        if self._draft.is_open:
            self.abort()

    def _next_shard(self) -> str:
        return f"shard-{len(self._shards):05d}.wfs"

    def _end_shard(self) -> None:
        """Sync and close the current shard, if any."""
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._shards.append((self._next_shard(), self._file.tell()))
        self._file.close()
        self._file = None


class Store:
    """A store that is open for reading. Safe to share between threads and forks; pickling saves only the path.

    path: folder or address (`parse_place`). checked: another process of this machine has checked the index.
    Raises UserError for a folder that is not a store, another format, and a truncated or damaged file, either when the
    store is opened or when the damaged bytes are read.
    """

    def __init__(self, path: Place | str, checked: bool = False) -> None:
        self.path = parse_place(path)
        self.storage = open_storage(self.path)
        with contextlib.ExitStack() as unless_open:
            unless_open.callback(self.close)
            self._checksums, self.index = self._open(checked)
            unless_open.pop_all()
        self.keys = Keys(self.index)  # in writing order
        if not self.keys:
            raise UserError(f"{self.path}: an empty store. Pack it again.")

    def __repr__(self) -> str:
        return f"<Store {self.path}: {len(self)} entries>"

    def __len__(self) -> int:
        return len(self.keys)

    def __contains__(self, key: object) -> bool:
        return self.index.row(key) >= 0

    def __reduce__(self) -> tuple[type["Store"], tuple[Place, bool]]:
        return Store, (self.path, True)

    def close(self) -> None:
        self.storage.close()

    @property
    def checksum(self) -> str:
        """Return the BLAKE2b digest of store.json (128 bits in hexadecimal), which covers the whole content."""
        return digest_of(self.storage.whole("store.json"))

    @property
    def nbytes(self) -> int:
        """Return the size of the shards and the index in bytes."""
        return sum(size for _, size in self.index.shards) + self.storage.size(INDEX)

    @property
    def columns(self) -> list[str]:
        """Return the names of the columns of `meta`."""
        return list(self.index.columns)

    def column(self, name: str) -> Column:
        """Return a column of `meta`, in the order of `keys`."""
        return self.index.columns[name]

    def file(self, name: str) -> str | None:
        """Return a text file of the store, or None."""
        return self.storage.whole(name).decode() if name in self._checksums else None

    def row(self, key: str) -> int:
        """Return the row of `key`. Raises KeyError, and UserError if the index is damaged."""
        if (row := self.index.row(key)) < 0:
            if any(key == listed for listed in self.keys):
                raise UserError(f"{self.path / INDEX}: damaged ({key} is not found). Copy or pack the store again.")
            raise KeyError(key)
        return row

    def record(self, key: str) -> "Record":
        """Open the record of `key`; reads its header. Raises the errors of `row`, and UserError if it is damaged."""
        row = self.row(key)
        notes, arrays, shared = self._header(row, key)
        if shared:
            holder, holder_row = next(iter(shared.values())), int(self.index.where["holder"][row])
            holder_arrays = self._header(holder_row, holder)[1] if holder_row >= 0 else {}
            if missing := [name for name in shared if name not in holder_arrays]:
                raise UserError(f"{self.path}: {key}: {missing[0]} is not in {holder}. Copy or pack the store again.")
            arrays |= {name: holder_arrays[name] for name in shared}
        return Record(self, key, notes, arrays)

    def packed(self, key: str) -> Packed:
        """Read an encoded record, which can be written into another store."""
        row = self.row(key)
        _, arrays, shared = self._header(row, key)
        shard, offset, _, header, crc, _ = (int(self.index.where[name][row]) for name in WHERE)
        # Header and blobs are contiguous.
        spans: list[_Span] = [(offset, offset + header, crc, f"{self._shard(shard)}: {key}")]
        spans += [array.span(number) for array in arrays.values() for number in range(len(array.crcs))]
        return Packed(b"".join(self._read(shard, spans)), header, crc, next(iter(shared.values()), ""))

    def verify(self, progress: Callable[[int, int], None] | None = None) -> Iterator[str]:
        """Read the whole store and yield an error for each damaged file or record.

        progress: called with the numbers of finished records and of all records.
        """
        for name, crc in self._checksums.items():
            try:
                is_valid = zlib.crc32(self.storage.whole(name)) == crc
            except OSError:
                is_valid = False
            if not is_valid:
                yield f"{self.path / name}: damaged or missing. Copy or pack the store again"
        for row, key in enumerate(self.keys):
            try:
                # Shared arrays are checked with the record that holds them. Blobs are read one by one, because a record
                # may be larger than the memory.
                for array in self._header(row, key)[1].values():
                    for number in range(len(array.crcs)):
                        array.unpack(number, *self._read(array.shard, [array.span(number)]))
            except StorageError:
                raise
            except UserError as error:
                yield str(error)
            if progress is not None:
                progress(row + 1, len(self))

    def _header(self, row: int, key: str) -> tuple[dict[str, Any], dict[str, "StoredArray"], dict[str, str]]:
        """Read the header of a record. Returns its notes, its own arrays, and the holder's key of each shared array."""
        shard, offset, _, size, crc, _ = (int(self.index.where[name][row]) for name in WHERE)
        label = f"{self._shard(shard)}: {key}"
        (header,) = self._read(shard, [(offset, offset + size, crc, label)])
        fields = json.loads(_decompress(header, label))
        arrays, offset = {}, offset + size
        for name, dtype, shape, rows, blobs in fields["arrays"]:
            starts = np.cumsum([offset, *(size for size, _ in blobs)]).tolist()
            crcs = [crc for _, crc in blobs]
            arrays[name] = StoredArray(f"{label}, {name}", shard, np.dtype(dtype), tuple(shape), rows, starts, crcs)
            offset = starts[-1]
        return fields["notes"], arrays, fields["shared"]

    def _open(self, checked: bool) -> tuple[dict[str, int], Index]:
        """Open store.json and the index. Returns the checksums of the text files, and the index."""
        file = self.path / "store.json"
        try:
            top = json.loads(self.storage.whole("store.json"))
            is_store, version = top["format"] == FORMAT, int(top["version"])
        except OSError as error:
            raise UserError(
                f"{self.path}: not a store (store.json: {error.strerror}). Make one with `warpfold pack`."
            ) from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{file}: damaged, or not a store's. Pack it again.") from error
        if not is_store:
            raise UserError(f"{file}: not of a WarpFold store. Pass the folder of a store.")
        if version != VERSION:
            remedy = "Update WarpFold." if version > VERSION else "Pack it again."
            raise UserError(f"{self.path}: a store of format {version}, this WarpFold reads {VERSION}. {remedy}")
        try:
            size, digest = int(top["index"]["bytes"]), str(top["index"]["blake2b"])
            checksums = {str(name): int(crc) for name, crc in top["files"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{file}: damaged. Copy the store again.") from error
        file = self.path / INDEX
        try:
            index = Index(self.storage.view(INDEX, size, digest, checked))
            if not checked:
                index.check()
        except OSError as error:
            raise UserError(f"{file}: cannot be read: {error.strerror}. Copy the store again.") from error
        except NotImplementedError as error:
            raise UserError(f"{file}: an index of version {error}, too new for this WarpFold. Update it.") from None
        except (ValueError, KeyError, TypeError, IndexError, RecursionError, struct.error) as error:
            raise UserError(f"{file}: damaged ({error}). Copy the store again.") from error
        for shard, expected in () if checked else index.shards:
            try:
                size = self.storage.size(shard)
            except OSError as error:
                path = self.path / shard
                raise UserError(f"{path}: cannot be read: {error.strerror}. Copy the store again.") from error
            if size < expected:
                raise UserError(
                    f"{self.path / shard}: {size} bytes, {expected} expected: truncated or not this store's. Copy the "
                    "store again."
                )
        return checksums, index

    def _shard(self, number: int) -> Place:
        return self.path / self.index.shards[number][0]

    def _read(self, shard: int, spans: "Sequence[_Span]") -> list[bytes]:
        """Read and check spans of a shard in a single request to the storage."""
        name, ranges = self.index.shards[shard][0], [(begin, end) for begin, end, *_ in spans]
        try:
            blobs = self.storage.read(name, ranges)
            for i, (begin, end, crc, label) in enumerate(spans):
                if not _is_valid(blobs[i], begin, end, crc) and self.storage.forget(name, begin, end):
                    # A cached copy was damaged.
                    (blobs[i],) = self.storage.read(name, [(begin, end)])
                if not _is_valid(blobs[i], begin, end, crc):
                    raise UserError(f"{label}: damaged (checksum at byte {begin}). Copy or pack the store again.")
        except OSError as error:
            raise UserError(f"{spans[0][3]}: cannot be read: {error.strerror}. Copy the store again.") from error
        return blobs


# Begin, end, checksum, description for errors.
_Span = tuple[int, int, int, str]


@dataclass(frozen=True)
class StoredArray:
    """The layout of an array in its shard: blobs of `rows` rows, with blob i in bytes [starts[i], starts[i + 1]).

    what: description of file, entry and name for errors.
    """

    what: str
    shard: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    rows: int
    starts: Sequence[int]
    crcs: Sequence[int]

    def span(self, number: int) -> _Span:
        """Return the location of a blob."""
        return self.starts[number], self.starts[number + 1], self.crcs[number], self.what

    def blobs_of(self, rows: np.ndarray | None) -> list[tuple[int, int, int]]:
        """List the blobs of `rows` (ascending; None: all) as (number, begin, end), which contain `rows[begin:end]`."""
        if rows is None:
            return [(number, 0, 0) for number in range(len(self.crcs))]
        if not len(rows):
            return []
        first, last = int(rows[0]) // self.rows, int(rows[-1]) // self.rows
        bounds = np.searchsorted(rows, np.arange(first, last + 2) * self.rows).tolist()
        return [(i, begin, end) for i, (begin, end) in enumerate(pairwise(bounds), start=first) if begin < end]

    def unpack(self, number: int, data: bytes) -> np.ndarray:
        """Decompress a blob. Raises UserError if it is damaged."""
        rows = min(self.rows, self.shape[0] - number * self.rows) if self.shape else 1
        size = rows * math.prod(self.shape[1:]) * self.dtype.itemsize
        return np.frombuffer(_decompress(data, self.what, size), self.dtype)


@dataclass(frozen=True)
class Record:
    """A record: its notes, and its arrays, which are read on demand."""

    store: Store
    key: str
    notes: dict[str, Any]
    arrays: dict[str, StoredArray]
    # The blobs of the last `fetch`, by array and number.
    _fetched: dict[tuple[str, int], bytes] = field(default_factory=dict, repr=False)

    def fetch(self, rows_of: Mapping[str, np.ndarray | None]) -> None:
        """Prefetch rows (ascending; None for all) of named arrays, which `read` will be called for next.

        This makes one request per shard instead of one per array, which matters for the latency of object stores.
        """
        blobs: dict[int, list[tuple[str, int]]] = {}
        for name, rows in rows_of.items():
            numbers = self.arrays[name].blobs_of(rows)
            blobs.setdefault(self.arrays[name].shard, []).extend((name, number) for number, *_ in numbers)
        self._fetched.clear()
        for shard, keys in blobs.items():
            spans = [self.arrays[name].span(number) for name, number in keys]
            self._fetched.update(zip(keys, self.store._read(shard, spans)) if spans else ())

    def read(self, name: str, rows: np.ndarray | None = None) -> np.ndarray:
        """Read an array, or its `rows` (ascending). Only the blobs that contain them are read.

        Raises KeyError for an array that the record lacks, and UserError if a blob is damaged.
        """
        array = self.arrays[name]
        blobs = array.blobs_of(rows)
        data = {number: self._fetched[name, number] for number, *_ in blobs if (name, number) in self._fetched}
        if missing := [number for number, *_ in blobs if number not in data]:
            data |= zip(missing, self.store._read(array.shard, [array.span(number) for number in missing]))
        if rows is None:
            values = [array.unpack(number, data.pop(number)) for number, *_ in blobs]
            return np.concatenate([np.empty(0, array.dtype), *values]).reshape(array.shape)
        selected = [np.empty((0, *array.shape[1:]), array.dtype)]
        for number, begin, end in blobs:
            blob = array.unpack(number, data.pop(number)).reshape(-1, *array.shape[1:])
            selected.append(blob[rows[begin:end] - number * array.rows])
        return np.concatenate(selected)


def _decompress(data: bytes, what: str, limit: int = LARGEST) -> bytes:
    """Decompress a frame whose header declares at most `limit` bytes, as `pack_record` writes it."""
    import zstandard

    if not hasattr(_THREAD, "decompressor"):
        # Creating a decompressor takes longer than a small blob.
        _THREAD.decompressor = zstandard.ZstdDecompressor()
    try:
        if not 0 <= zstandard.frame_content_size(data) <= limit:
            raise UserError(f"{what}: damaged (unexpected size). Pack the store again.")
        return bytes(_THREAD.decompressor.decompress(data))
    except zstandard.ZstdError as error:
        raise UserError(f"{what}: damaged ({error}). Pack the store again.") from error


def _is_valid(data: bytes, begin: int, end: int, crc: int) -> bool:
    """Return whether bytes have the expected size and checksum."""
    return len(data) == end - begin and zlib.crc32(data) == crc
