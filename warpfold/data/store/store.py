"""The packed store: records of named arrays, compressed in blocks, checked, read in place (docs/reference/formats.md).

A store is a folder of shards, an index and a `store.json`.  A shard holds records one after another; the index holds
their places and the sizes that sampling needs, so that opening a store reads no record.  A record begins with a small
header that holds the places of its blobs, so that any array, or any block of its rows, is read without the others.
An array that two records share is stored once.  A checksum covers every byte.  The same records give the same bytes.

A finished store never changes.  Users add data with a second store.
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
from warpfold.data.store.remote import Address, Place, place_of, storage_of
from warpfold.errors import StorageError, UserError
from warpfold.files import LARGEST, DraftFolder, digest_of, write_atomically, writing

FORMAT, VERSION = "warpfold-store", 5
INDEX = "index.wfi"
BLOCK = 1 << 17  # bytes of an array per blob, before compression: as much is read for a single row
SHARD = 1 << 30  # bytes after which the next shard begins
# The files of a writer, and the drafts that a killed writer leaves.
_OWN = re.compile(
    r"lock|store\.json|(pack|sources)\.json|pack\.tsv|shard-\d{5,}\.wfs|index\.wfi|"
    r"\.(store|index|pack|sources)\.\w+\.[0-9a-f]{8}"
)
_THREAD = threading.local()  # what each thread has for itself
LEVEL = 1  # of zstd: higher levels hardly compress residues better


@dataclass(frozen=True)
class Packed:
    """A record as bytes, ready to be written anywhere: workers make it, one process writes it."""

    data: bytes  # header, then blobs
    header: int  # bytes of the header
    crc: int  # of the header
    holder: str = ""  # the key of the record that holds what this one shares


def pack_record(
    arrays: Mapping[str, np.ndarray], notes: Mapping[str, Any], shared: Mapping[str, str] | None = None
) -> Packed:
    """Compress arrays of any shape and plain dtype, and `notes` for JSON, into one record.

    shared: names of further arrays, with the key of the one record that holds them (under the same names).
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
        width = len(data) // max(count, 1)  # bytes of a row
        rows = max(BLOCK // max(width, 1), 1)
        parts = [compress(data[start * width : (start + rows) * width]) for start in range(0, count, rows)]
        blobs += parts
        table.append([name, dtype.str, array.shape, rows, [[len(part), zlib.crc32(part)] for part in parts]])
    (holder,) = set((shared or {}).values()) or {""}
    header = compress(_json({"notes": dict(notes), "arrays": table, "shared": dict(shared or {})}))
    return Packed(b"".join([header, *blobs]), len(header), zlib.crc32(header), holder)


class StoreWriter:
    """A writer into `path.partial/`, renamed to `path` when done, so that `path` is a whole store or does not exist.

    Use as a context manager: an exception removes the written files.  After a kill, the next writer starts over.
    Errors: UserError if `path` exists or is an address, if another process is writing it, or if it cannot be written.
    """

    def __init__(self, path: Place | str, shard_bytes: int = SHARD) -> None:
        place = place_of(path)
        if isinstance(place, Address):
            raise UserError(f"{place}: a store is written to a folder. Give a folder, and copy the finished store.")
        self.path, self.shard_bytes = place, shard_bytes
        self._file: BinaryIO | None = None
        self._rows: dict[str, int] = {}  # of each key
        self._holders: dict[int, str] = {}  # of rows that share arrays
        self._where = {name: arrays_of_numbers.array("Q") for name in WHERE if name != "holder"}
        self._meta: dict[str, list[Any]] = {}
        self._shards: list[tuple[str, int]] = []
        self._draft = DraftFolder(self.path, _OWN.fullmatch)
        self.folder = self._draft.folder
        for left in self.folder.iterdir():  # by a writer that was killed
            if left.name != "lock":
                left.unlink()

    def add(self, key: str, record: Packed, meta: Mapping[str, Any]) -> None:
        """Append a record.  meta: numbers, texts, None, or lists, kept in the index; the same names for every record.

        Errors: ValueError for a key that was added before or other names in `meta`; UserError if it cannot be written.
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
        where = {"shard": len(self._shards), "offset": offset, "size": len(record.data)}
        for name, value in (where | {"header": record.header, "crc": record.crc}).items():
            self._where[name].append(value)
        for name, value in meta.items():
            self._meta.setdefault(name, []).append(value)
        if any(len(column) != len(self._rows) for column in self._meta.values()):
            raise ValueError(f"{key}: other names in its meta than in the records before it")
        if record.holder:
            self._holders[row] = record.holder

    def finish(self, files: Mapping[str, str | Iterable[str]] | None = None) -> None:
        """Write the index, any text `files`, whole or in pieces, and `store.json`; then give the store its name.

        Errors: UserError for a store without records, or if it cannot be written.
        """
        if not self._rows:
            raise UserError(f"{self.path}: nothing to store")
        where = {name: np.array(column, np.int64) for name, column in self._where.items()}
        where["holder"] = np.full(len(self._rows), -1)
        for row, key in self._holders.items():
            where["holder"][row] = self._rows[key]
        with writing(self.path):
            self._end_shard()
            index = encode_index(list(self._rows), where, self._meta, self._shards)
            top: dict[str, Any] = {"format": FORMAT, "version": VERSION, "records": len(self._rows)}
            top |= {"index": {"bytes": len(index), "blake2b": digest_of(index)}, "files": {}}
            write_atomically(self.folder / INDEX, index)
            del index  # of a million entries it has 100 MB, and the report has 300
            for name, text in (files or {}).items():
                data = bytearray()
                for piece in (text,) if isinstance(text, str) else text:
                    data += piece.encode()
                top["files"][name] = zlib.crc32(data)
                write_atomically(self.folder / name, data)
            write_atomically(self.folder / "store.json", json.dumps(top, indent=1) + "\n")
        self._draft.complete()

    def abort(self) -> None:
        """Remove the written files; `path` is never touched."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # closing writes what is buffered, which may not fit on a full disk
                self._file.close()
            self._file = None
        self._draft.remove()

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, *_: object) -> None:
        if self._draft.is_open:
            self.abort()

    def _next_shard(self) -> str:
        return f"shard-{len(self._shards):05d}.wfs"

    def _end_shard(self) -> None:
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._shards.append((self._next_shard(), self._file.tell()))
        self._file.close()
        self._file = None


class Store:
    """A store, open for reading; safe to share between threads and forks, and cheap to pickle (it reopens by path).

    path: its folder, or its address (`place_of`).  checked: another process of this machine has checked the index.
    Errors: UserError for a folder that is not a store, another format, or a truncated or damaged file (which, and
    where), when the store is opened or when the damaged part is read.
    """

    def __init__(self, path: Place | str, checked: bool = False) -> None:
        self.path = place_of(path)
        self.storage = storage_of(self.path)
        with contextlib.ExitStack() as unless_open:
            unless_open.callback(self.close)
            self._checksums, self.index = self._open(checked)
            unless_open.pop_all()
        self.keys = Keys(self.index)  # in the order of writing
        if not self.keys:
            raise UserError(f"{self.path}: an empty store. Pack it again")

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
        """Return the BLAKE2b digest of store.json, 128 bits in hexadecimal; it covers all contents."""
        return digest_of(self.storage.whole("store.json"))

    @property
    def nbytes(self) -> int:
        """Return the bytes of its shards and its index."""
        return sum(size for _, size in self.index.shards) + self.storage.size(INDEX)

    @property
    def columns(self) -> list[str]:
        """Return the names of the columns of `meta`."""
        return list(self.index.columns)

    def column(self, name: str) -> Column:
        """Return one value of `meta` for every record, in the order of `keys`."""
        return self.index.columns[name]

    def file(self, name: str) -> str | None:
        """Return one of the small text files of the store; None if there is none."""
        return self.storage.whole(name).decode() if name in self._checksums else None

    def row(self, key: str) -> int:
        """Return the row of `key`.  Errors: KeyError; UserError if the index lists the key but cannot find it."""
        if (row := self.index.row(key)) < 0:
            if any(key == listed for listed in self.keys):
                raise UserError(f"{self.path / INDEX}: damaged ({key} is not found). Copy or pack the store again")
            raise KeyError(key)
        return row

    def record(self, key: str) -> "Record":
        """Return the record of `key`, reading only its header.  Errors: as of `row`; UserError if it is damaged."""
        row = self.row(key)
        notes, arrays, shared = self._header(row, key)
        if shared:
            holder, at = next(iter(shared.values())), int(self.index.where["holder"][row])
            held = self._header(at, holder)[1] if at >= 0 else {}
            if missing := [name for name in shared if name not in held]:
                raise UserError(f"{self.path}: {key}: {missing[0]} is not in {holder}. Copy or pack the store again")
            arrays |= {name: held[name] for name in shared}
        return Record(self, key, notes, arrays)

    def packed(self, key: str) -> Packed:
        """Read a record whole, as it can be written into another store."""
        row = self.row(key)
        _, arrays, shared = self._header(row, key)
        shard, offset, _, header, crc, _ = (int(self.index.where[name][row]) for name in WHERE)
        places: list[_Place] = [(offset, offset + header, crc, f"{self._shard(shard)}: {key}")]  # there are no gaps
        places += [array.place(number) for array in arrays.values() for number in range(len(array.crcs))]
        return Packed(b"".join(self._read(shard, places)), header, crc, next(iter(shared.values()), ""))

    def verify(self, progress: Callable[[int, int], None] | None = None) -> Iterator[str]:
        """Read everything and yield a line for each damaged part.  progress: called with records done and in all."""
        for name, crc in self._checksums.items():
            try:
                whole = zlib.crc32(self.storage.whole(name)) == crc
            except OSError:
                whole = False
            if not whole:
                yield f"{self.path / name}: damaged or gone; copy or pack the store again"
        for row, key in enumerate(self.keys):
            try:
                for array in self._header(row, key)[1].values():  # shared arrays are checked with their record
                    for number in range(len(array.crcs)):  # one by one: a record may be larger than the memory
                        array.unpack(number, *self._read(array.shard, [array.place(number)]))
            except StorageError:
                raise
            except UserError as error:
                yield str(error)
            if progress is not None:
                progress(row + 1, len(self))

    def _header(self, row: int, key: str) -> tuple[dict[str, Any], dict[str, "StoredArray"], dict[str, str]]:
        """Return notes, own arrays, and the keys of the records that hold the others."""
        shard, offset, _, size, crc, _ = (int(self.index.where[name][row]) for name in WHERE)
        what = f"{self._shard(shard)}: {key}"
        (header,) = self._read(shard, [(offset, offset + size, crc, what)])
        fields = json.loads(_decompress(header, what))
        arrays, offset = {}, offset + size
        for name, dtype, shape, rows, blobs in fields["arrays"]:
            starts = np.cumsum([offset, *(size for size, _ in blobs)]).tolist()
            crcs = [crc for _, crc in blobs]
            arrays[name] = StoredArray(f"{what}, {name}", shard, np.dtype(dtype), tuple(shape), rows, starts, crcs)
            offset = starts[-1]
        return fields["notes"], arrays, fields["shared"]

    def _open(self, checked: bool) -> tuple[dict[str, int], Index]:
        """Return the checksums of the text files, and the index."""
        file = self.path / "store.json"
        try:
            top = json.loads(self.storage.whole("store.json"))
            known, version = top["format"] == FORMAT, int(top["version"])
        except OSError as error:
            raise UserError(
                f"{self.path}: not a store (store.json: {error.strerror}); `warpfold pack` makes one"
            ) from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{file}: damaged, or not a store's. Pack it again") from error
        if not known:
            raise UserError(f"{file}: not a WarpFold store's")
        if version != VERSION:
            cure = "update WarpFold" if version > VERSION else "pack it again"
            raise UserError(f"{self.path}: a store of format {version}, this WarpFold reads {VERSION}; {cure}")
        try:
            size, digest = int(top["index"]["bytes"]), str(top["index"]["blake2b"])
            checksums = {str(name): int(crc) for name, crc in top["files"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{file}: damaged. Copy the store again") from error
        file = self.path / INDEX
        try:
            index = Index(self.storage.view(INDEX, size, digest, checked))
            if not checked:
                index.check()
        except OSError as error:
            raise UserError(f"{file}: cannot be read: {error.strerror}. Copy the store again") from error
        except NotImplementedError as error:
            raise UserError(f"{file}: an index of version {error}, newer than this WarpFold. Update WarpFold") from None
        except (ValueError, KeyError, TypeError, IndexError, RecursionError, struct.error) as error:
            raise UserError(f"{file}: damaged ({error}). Copy the store again") from error
        for shard, expected in () if checked else index.shards:
            try:
                found = self.storage.size(shard)
            except OSError as error:
                path = self.path / shard
                raise UserError(f"{path}: cannot be read: {error.strerror}. Copy the store again") from error
            if found < expected:
                raise UserError(
                    f"{self.path / shard}: {found} bytes, {expected} expected: truncated or not this store's. Copy the "
                    "store again"
                )
        return checksums, index

    def _shard(self, number: int) -> Place:
        return self.path / self.index.shards[number][0]

    def _read(self, shard: int, places: "Sequence[_Place]") -> list[bytes]:
        """Read ranges of a shard, all by one request of the storage."""
        name, ranges = self.index.shards[shard][0], [(begin, end) for begin, end, *_ in places]
        try:
            found = self.storage.read(name, ranges)
            for i, (begin, end, crc, what) in enumerate(places):
                if not _is_whole(found[i], begin, end, crc) and self.storage.forget(name, begin, end):
                    (found[i],) = self.storage.read(name, [(begin, end)])  # a copy of it was damaged
                if not _is_whole(found[i], begin, end, crc):
                    raise UserError(f"{what}: damaged (checksum at byte {begin}). Copy or pack the store again")
        except OSError as error:
            raise UserError(f"{places[0][3]}: cannot be read: {error.strerror}. Copy the store again") from error
        return found


_Place = tuple[int, int, int | None, str]  # begin, end, checksum (None: of these bytes there is none), what is there


@dataclass(frozen=True)
class StoredArray:
    """An array's layout in its shard: blobs of `rows` rows each, blob i at bytes [starts[i], starts[i + 1])."""

    what: str  # file, entry and name, for errors
    shard: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    rows: int
    starts: Sequence[int]
    crcs: Sequence[int]

    def place(self, number: int) -> _Place:
        """Say where a blob lies."""
        return self.starts[number], self.starts[number + 1], self.crcs[number], self.what

    def holding(self, rows: np.ndarray | None) -> list[tuple[int, int, int]]:
        """Name the blobs that hold rows (ascending; None: all): (number, begin, end), of which `rows[begin:end]`."""
        if rows is None:
            return [(number, 0, 0) for number in range(len(self.crcs))]
        first, last = (int(rows[0]) // self.rows, int(rows[-1]) // self.rows) if len(rows) else (0, -1)
        bounds = np.searchsorted(rows, np.arange(first, last + 2) * self.rows).tolist()
        return [(i, begin, end) for i, (begin, end) in enumerate(pairwise(bounds), start=first) if begin < end]

    def unpack(self, number: int, data: bytes) -> np.ndarray:
        """Unpack a blob: whole rows.  Errors: UserError if it is damaged."""
        rows = min(self.rows, self.shape[0] - number * self.rows) if self.shape else 1
        size = rows * math.prod(self.shape[1:]) * self.dtype.itemsize
        return np.frombuffer(_decompress(data, self.what, size), self.dtype)


@dataclass(frozen=True)
class Record:
    """One record: its notes, and its arrays, which are read when needed."""

    store: Store
    key: str
    notes: dict[str, Any]
    arrays: dict[str, StoredArray]
    _fetched: dict[tuple[str, int], bytes] = field(default_factory=dict, repr=False)  # what the last `fetch` has read

    def fetch(self, wanted: Mapping[str, np.ndarray | None]) -> None:
        """Read at once what `read` will be asked for next: rows (ascending; None: all) of arrays, by their names.

        Where an answer takes long, as from an object store, that is one wait for each shard, not one for each array.
        """
        blobs: dict[int, list[tuple[str, int]]] = {}
        for name, rows in wanted.items():
            found = self.arrays[name].holding(rows)
            blobs.setdefault(self.arrays[name].shard, []).extend((name, number) for number, *_ in found)
        self._fetched.clear()
        for shard, keys in blobs.items():
            places = [self.arrays[name].place(number) for name, number in keys]
            self._fetched.update(zip(keys, self.store._read(shard, places)) if places else ())

    def read(self, name: str, rows: np.ndarray | None = None) -> np.ndarray:
        """Return an array, or the given `rows` of it (ascending), reading only the blobs that hold them.

        Errors: KeyError for an array that the record does not have; UserError if a blob is damaged.
        """
        array = self.arrays[name]
        held = array.holding(rows)
        data = {number: self._fetched[name, number] for number, *_ in held if (name, number) in self._fetched}
        if missing := [number for number, *_ in held if number not in data]:
            data |= zip(missing, self.store._read(array.shard, [array.place(number) for number in missing]))
        if rows is None:
            whole = [array.unpack(number, data.pop(number)) for number, *_ in held]
            return np.concatenate([np.empty(0, array.dtype), *whole]).reshape(array.shape)
        parts = [np.empty((0, *array.shape[1:]), array.dtype)]
        for number, begin, end in held:
            blob = array.unpack(number, data.pop(number)).reshape(-1, *array.shape[1:])
            parts.append(blob[rows[begin:end] - number * array.rows])
        return np.concatenate(parts)


def _decompress(data: bytes, what: str, most: int = LARGEST) -> bytes:
    """Unpack a frame whose header says that it holds at most so many bytes, as all of `pack_record`'s do."""
    import zstandard

    if not hasattr(_THREAD, "decompressor"):
        _THREAD.decompressor = zstandard.ZstdDecompressor()  # made anew it takes longer than a small blob
    try:
        if not 0 <= zstandard.frame_content_size(data) <= most:
            raise UserError(f"{what}: damaged (its size is not what it should be). Pack the store again")
        return bytes(_THREAD.decompressor.decompress(data))
    except zstandard.ZstdError as error:
        raise UserError(f"{what}: damaged ({error}). Pack the store again") from error


def _is_whole(data: bytes, begin: int, end: int, crc: int | None) -> bool:
    return len(data) == end - begin and crc in (None, zlib.crc32(data))


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
