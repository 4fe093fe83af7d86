"""The packed store: records of named arrays, compressed in blocks, checked, read with `os.pread` (docs/formats.md).

A store is a folder of shards and a `store.json`.  A shard holds records one after another and ends with its index, so
that opening reads no record, and the sizes that sampling needs are known without decompressing.  A record begins with a
small header that says where its blobs lie, so that any array, or any block of its rows, is read without the rest.
An array that two records share is stored once.  A checksum covers every byte.  The same records give the same bytes.
"""

import contextlib
import json
import math
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from warpfold.errors import UserError
from warpfold.files import LARGEST, lock_folder, open_regular, pread, refuse_foreign, remove_own, sync_path, writing

FORMAT, VERSION = "warpfold-store", 2
ASSEMBLIES = 3  # the version of a store that has assemblies, which a reader of 2 would take for damaged examples
MAGIC = b"WARPFOLD"
HEAD = struct.Struct("<8sII")  # magic, version, 0
FOOT = struct.Struct("<QQII8s")  # index: offset, size, crc32; records; magic
BLOCK = 1 << 17  # bytes of an array per blob, before compression: as much is read for a single row
SHARD = 1 << 30  # bytes after which the next shard begins
_OWN = re.compile(r"lock|store\.json|pack\.json|pack\.tsv|sources\.json|shard-\d{5,}\.wfs")  # what a writer makes
LEVEL = 1  # of zstd: higher levels hardly compress residues better


@dataclass(frozen=True)
class Packed:
    """A record as bytes, ready to be written anywhere: workers make it, one process writes it."""

    data: bytes  # header, then blobs
    header: int  # bytes of the header
    crc: int  # of the header


def pack_record(
    arrays: Mapping[str, np.ndarray], notes: Mapping[str, Any], shared: Mapping[str, str] | None = None
) -> Packed:
    """Compress arrays of any shape and plain dtype, and `notes` for JSON, into one record.

    shared: names of further arrays, each with the key of the record that holds it (under the same name).
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
    header = compress(_json({"notes": dict(notes), "arrays": table, "shared": dict(shared or {})}))
    return Packed(b"".join([header, *blobs]), len(header), zlib.crc32(header))


class StoreWriter:
    """A writer into `path.partial/`, renamed to `path` when done, so that no half-written store is ever found there.

    version: of the format, VERSION or ASSEMBLIES; all else is the same.
    Use as a context manager: an exception removes what was written.  After a kill, the next writer starts over.
    Errors: UserError if `path` exists, another process is writing it, or it cannot be written.
    """

    def __init__(self, path: Path | str, shard_bytes: int = SHARD, version: int = VERSION) -> None:
        self.path, self.version = Path(path), version
        taken = UserError(f"{self.path}: exists already; remove it, or choose another name")
        if self.path.exists():
            raise taken
        self.partial = self.path.with_name(self.path.name + ".partial")
        self.shard_bytes = shard_bytes
        self._shards: list[dict[str, int]] = []
        self._keys: set[str] = set()
        self._file: BinaryIO | None = None
        self._index: dict[str, list[Any]] = {}
        refuse_foreign(self.partial, _OWN.fullmatch)
        self._lock = lock_folder(self.partial, self.path)
        if self.path.exists():  # another process has finished it in the meantime
            self.abort()
            raise taken
        for left in self.partial.iterdir():  # left by a writer that was killed
            if left.name != "lock":
                left.unlink()

    def add(self, key: str, record: Packed, meta: Mapping[str, Any]) -> None:
        """Append a record.  meta: numbers, texts, None, or lists, kept in the index; the same names for every record.

        Errors: ValueError for a key that is there already or other names in `meta`; UserError if it cannot be written.
        """
        if key in self._keys:
            raise ValueError(f"{key}: twice in one store")
        with writing(self.path):
            if self._file is not None and self._file.tell() + len(record.data) > self.shard_bytes:
                self._end_shard()
            if self._file is None:
                self._file = open(self.partial / _shard_name(len(self._shards)), "wb")  # noqa: SIM115
                self._file.write(HEAD.pack(MAGIC, self.version, 0))
                self._index = {}
            entry = {"key": key, "offset": self._file.tell(), "size": len(record.data), "header": record.header}
            for name, value in (entry | {"crc": record.crc} | {f"meta.{k}": v for k, v in meta.items()}).items():
                self._index.setdefault(name, []).append(value)
            if len({len(column) for column in self._index.values()}) > 1:
                raise ValueError(f"{key}: other names in its meta than in the records before it")
            self._file.write(record.data)
        self._keys.add(key)

    def finish(self, files: Mapping[str, str] | None = None) -> None:
        """Write the index, `store.json` and any small text `files` beside it, then rename the store to its name.

        Errors: UserError for a store without records, or if it cannot be written.
        """
        if not self._keys:
            raise UserError(f"{self.path}: nothing to store")
        with writing(self.path):
            self._end_shard()
            checksums = {name: zlib.crc32(text.encode()) for name, text in (files or {}).items()}
            top = {"format": FORMAT, "version": self.version, "shards": self._shards, "files": checksums}
            for name, text in {**(files or {}), "store.json": json.dumps(top, indent=1) + "\n"}.items():
                with open(self.partial / name, "wb") as file:
                    file.write(text.encode())
                    file.flush()
                    os.fsync(file.fileno())
            (self.partial / "lock").unlink()
            sync_path(self.partial)
            self.partial.rename(self.path)
            sync_path(self.path.parent)
        self._lock.close()

    def abort(self) -> None:
        """Remove what was written; `path` is never touched."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # closing writes what is buffered, which may not fit on a full disk
                self._file.close()
            self._file = None
        remove_own(self.partial, _OWN.fullmatch)
        self._lock.close()

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, *_: object) -> None:
        if not self._lock.closed:
            self.abort()

    def _end_shard(self) -> None:
        if self._file is None:
            return
        import zstandard

        index = zstandard.ZstdCompressor(level=LEVEL).compress(_json(self._index))
        offset, records = self._file.tell(), len(self._index["key"])
        crc = zlib.crc32(index)
        self._file.write(index + FOOT.pack(offset, len(index), crc, records, MAGIC))
        self._shards.append({"bytes": self._file.tell(), "records": records, "crc": crc})
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None


@dataclass(frozen=True)
class RecordLocation:
    """The shard that a record lies in, and where."""

    shard: int
    offset: int
    size: int
    header: int
    crc: int


class Store:
    """A store, open for reading; safe to share between threads and forks, and cheap to pickle (it reopens by path).

    Errors: UserError for a folder that is not a store, another format version, or a truncated or damaged file (which,
    and where), when the store is opened or when the damaged part is read.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.version = VERSION
        self.keys: list[str] = []  # in the order of writing
        self._locations: dict[str, RecordLocation] = {}
        self._columns: dict[str, list[Any]] = {}
        self._files: list[int] = []
        self._checksums: dict[str, int] = {}  # of the small files beside the shards
        with contextlib.ExitStack() as unless_open:
            unless_open.callback(self.close)
            for number, shard in enumerate(self._read_top()):
                self._open_shard(number, shard)
            unless_open.pop_all()
        if not self.keys:
            raise UserError(f"{self.path}: an empty store; pack it again")

    def __repr__(self) -> str:
        """Return it in one line."""
        return f"<Store {self.path}: {len(self)} entries>"

    def __len__(self) -> int:
        return len(self.keys)

    def __contains__(self, key: object) -> bool:
        return key in self._locations

    def __reduce__(self) -> tuple[type["Store"], tuple[Path]]:
        return Store, (self.path,)

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop())

    @property
    def columns(self) -> list[str]:
        """Return the names of the columns of `meta`."""
        return list(self._columns)

    def column(self, name: str) -> list[Any]:
        """Return one value of `meta` for every record, in the order of `keys`."""
        return self._columns[name]

    def record(self, key: str) -> "Record":
        """Return the record of `key`, reading only its header.  Errors: KeyError; UserError if it is damaged."""
        notes, arrays, shared = self._header(key)
        held = {holder: self._header(holder)[1] for holder in set(shared.values())}
        return Record(self, key, notes, arrays | {name: held[holder][name] for name, holder in shared.items()})

    def verify(self, progress: Callable[[int, int], None] | None = None) -> Iterator[str]:
        """Read everything and yield a line for each damaged part.  progress: called with records done and in all."""
        for name, crc in self._checksums.items():
            try:
                whole = zlib.crc32((self.path / name).read_bytes()) == crc
            except OSError:
                whole = False
            if not whole:
                yield f"{self.path / name}: damaged or gone; copy or pack the store again"
        for done, key in enumerate(self.keys):
            try:
                for array in self._header(key)[1].values():  # shared arrays are checked with the record that holds them
                    for number in range(len(array.crcs)):
                        self._blob(array, number)
            except UserError as error:
                yield str(error)
            if progress is not None:
                progress(done + 1, len(self.keys))

    def _header(self, key: str) -> tuple[dict[str, Any], dict[str, "StoredArray"], dict[str, str]]:
        """Return notes, own arrays, and the keys of the records that hold the others."""
        at = self._locations[key]
        what = f"{self.path / _shard_name(at.shard)}: {key}"
        header = self._read(at.shard, at.offset, at.header, at.crc, what)
        fields = json.loads(_decompress(header, what))
        arrays, offset = {}, at.offset + at.header
        for name, dtype, shape, rows, blobs in fields["arrays"]:
            starts = np.cumsum([offset, *(size for size, _ in blobs)]).tolist()
            crcs = [crc for _, crc in blobs]
            arrays[name] = StoredArray(f"{what}, {name}", at.shard, np.dtype(dtype), tuple(shape), rows, starts, crcs)
            offset = starts[-1]
        return fields["notes"], arrays, fields["shared"]

    def _read_top(self) -> list[dict[str, int]]:
        file = self.path / "store.json"
        try:
            with os.fdopen(open_regular(file), encoding="utf-8") as opened:
                top = json.load(opened)
            known, version, shards = top["format"] == FORMAT, int(top["version"]), top["shards"]
            self._checksums = dict(top.get("files", {}))
        except OSError as error:
            raise UserError(
                f"{self.path}: not a store (store.json: {error.strerror}); `warpfold pack` makes one"
            ) from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{file}: damaged, or not a store's; pack it again") from error
        if not known:
            raise UserError(f"{file}: not a WarpFold store's")
        if version not in (VERSION, ASSEMBLIES):
            cure = "update WarpFold" if version > VERSION else "pack it again"
            raise UserError(f"{self.path}: format {version}, this WarpFold reads {VERSION} and {ASSEMBLIES}; {cure}")
        self.version = version
        return shards

    def _open_shard(self, number: int, shard: Mapping[str, int]) -> None:
        path = self.path / _shard_name(number)
        try:
            self._files.append(open_regular(path))
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}; copy the store again") from error
        size = os.fstat(self._files[-1]).st_size
        if size != shard.get("bytes"):
            raise UserError(f"{path}: {size} bytes, {shard.get('bytes')} expected: truncated or not this store's")
        damaged = UserError(f"{path}: damaged at its begin or end; copy or pack the store again")
        magic, version, zero = HEAD.unpack(pread(self._files[number], HEAD.size, 0))
        foot = FOOT.unpack(pread(self._files[number], FOOT.size, size - FOOT.size))
        offset, length, crc, records, magic_end = foot
        if magic != MAGIC or magic_end != MAGIC or zero or version != self.version or records != shard.get("records"):
            raise damaged
        if offset + length + FOOT.size != size or crc != shard.get("crc"):
            raise damaged
        what = f"{path}: its index"
        index = json.loads(_decompress(self._read(number, offset, length, crc, what), what))
        for key, *where in zip(*(index[name] for name in ("key", "offset", "size", "header", "crc"))):
            self._locations[key] = RecordLocation(number, *where)
        self.keys += index["key"]
        for name in index:
            if name.startswith("meta."):
                self._columns.setdefault(name.removeprefix("meta."), []).extend(index[name])

    def _blob(self, array: "StoredArray", number: int) -> np.ndarray:
        start, stop = array.starts[number], array.starts[number + 1]
        data = self._read(array.shard, start, stop - start, array.crcs[number], array.what)
        rows = min(array.rows, array.shape[0] - number * array.rows) if array.shape else 1
        size = rows * math.prod(array.shape[1:]) * array.dtype.itemsize
        return np.frombuffer(_decompress(data, array.what, size), array.dtype)

    def _read(self, shard: int, offset: int, size: int, crc: int, what: str) -> bytes:
        data = pread(self._files[shard], size, offset)
        if len(data) != size or zlib.crc32(data) != crc:
            raise UserError(f"{what}: damaged (checksum at byte {offset}); copy or pack the store again")
        return data


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


@dataclass(frozen=True)
class Record:
    """One record: its notes, and its arrays, which are read when needed."""

    store: Store
    key: str
    notes: dict[str, Any]
    arrays: dict[str, StoredArray]

    def read(self, name: str, rows: np.ndarray | None = None) -> np.ndarray:
        """Return an array, or the given `rows` of it (ascending), reading only the blobs that hold them.

        Errors: KeyError for an array that the record does not have; UserError if a blob is damaged.
        """
        array = self.arrays[name]
        shape = array.shape[1:]
        if rows is None:
            blobs = [self.store._blob(array, number) for number in range(len(array.crcs))]
            return np.concatenate([np.empty(0, array.dtype), *blobs]).reshape(array.shape)
        parts = [np.empty((0, *shape), array.dtype)]
        first, last = (int(rows[0]) // array.rows, int(rows[-1]) // array.rows) if len(rows) else (0, -1)
        bounds = np.searchsorted(rows, np.arange(first, last + 2) * array.rows).tolist()
        for number, (begin, end) in enumerate(pairwise(bounds), start=first):
            if begin < end:
                size = min(array.rows, array.shape[0] - number * array.rows)
                blob = self.store._blob(array, number).reshape(size, *shape)
                parts.append(blob[rows[begin:end] - number * array.rows])
        return np.concatenate(parts)


def _decompress(data: bytes, what: str, most: int = LARGEST) -> bytes:
    """Unpack a frame whose header says that it holds at most so many bytes, as all of `pack_record`'s do."""
    import zstandard

    try:
        if not 0 <= zstandard.frame_content_size(data) <= most:
            raise UserError(f"{what}: damaged (its size is not what it should be); pack the store again")
        return zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise UserError(f"{what}: damaged ({error}); pack the store again") from error


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _shard_name(number: int) -> str:
    return f"shard-{number:05d}.wfs"
