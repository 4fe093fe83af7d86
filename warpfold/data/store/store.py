"""The packed store: records of named arrays, compressed in blocks, checked, read where they lie (docs/formats.md).

A store is a folder of shards, an index for each of its versions, and a `store.json`.  A shard holds records one after
another; the index says where, and has the sizes that sampling needs, so that opening reads no record.  A record
begins with a small header that says where its blobs lie, so that any array, or any block of its rows, is read without
the rest.
An array that two records share is stored once.  A checksum covers every byte.  The same records give the same bytes.

A finished store grows by versions: new shards, a new index, and `store.json` in place of the one before.  No shard and
no index is ever changed, so what reads an earlier version goes on.
"""

import array as arrays_of_numbers
import contextlib
import json
import math
import os
import platform
import re
import secrets
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import compress, pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from warpfold.data.store.index import WHERE, Column, Index, Keys, encode_index
from warpfold.data.store.objects import Objects, storage_of
from warpfold.data.store.storage import Folder, ObjectPath, Place, Storage, local_place, place_of
from warpfold.errors import StorageError, UserError, listed
from warpfold.files import (
    LARGEST,
    digest_of,
    lock_folder,
    refuse_foreign,
    remove_own,
    sync_path,
    write_atomically,
    writing,
)

FORMAT, VERSION = "warpfold-store", 4
OLDEST = 2  # the format that is still read: it and 3, of stores with assemblies, have an index in each shard
MAGIC = b"WARPFOLD"  # of a shard of formats 2 and 3
CLAIM = "writing.json"  # the object that says who writes a store at an address
HEAD = struct.Struct("<8sII")  # magic, version, 0
FOOT = struct.Struct("<QQII8s")  # index: offset, size, crc32; records; magic
BLOCK = 1 << 17  # bytes of an array per blob, before compression: as much is read for a single row
SHARD = 1 << 30  # bytes after which the next shard begins
# What a writer makes, and the drafts of it that one leaves which is killed.
_DRAFT = re.compile(r"\.(store|index|pack|sources)[\w.-]*\.[0-9a-f]{8}")
_OWN = re.compile(
    rf"{_DRAFT.pattern}|"
    r"lock|claim|store\.json|(pack|sources)(-\d+)?\.json|pack(-\d+)?\.tsv|shard-\d{5,}\.wfs|index-\d{5,}\.wfi"
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
    """A writer into `path.partial/`, renamed to `path` when done, so that no half-written store is ever found there.

    grow: the finished store `path` gets another version, with its records and those that are added, in place of those
    with the same key.  Then all is written beside what is there, and `store.json` last.
    At an address (`place_of`) each shard is uploaded when it is whole, and `store.json` last; until then it lies in
    `scratch`, a folder of this machine.
    Use as a context manager: an exception removes what was written.  After a kill, the next writer starts over.
    Errors: UserError if `path` exists, or to grow is no store; another process is writing it, or it cannot be written.
    """

    def __init__(
        self, path: Place | str, shard_bytes: int = SHARD, grow: bool = False, scratch: Path | None = None
    ) -> None:
        self.path = place_of(path)
        self.shard_bytes = shard_bytes
        self._remote: Objects | None = None
        self._replaced: Mapping[str, Any] | None = None  # what is said of the store.json in whose place one comes
        self._file: BinaryIO | None = None
        self._rows: dict[str, int] = {}  # of each key
        self._holders: dict[int, str] = {}  # of rows that share arrays
        self._where = {name: arrays_of_numbers.array("Q") for name in WHERE if name != "holder"}
        self._meta: dict[str, list[Any]] = {}
        self._shards: list[tuple[str, int]] = []  # that this writer makes
        self._base: Store | None = None
        self._revised: dict[str, Sequence[Any]] = {}
        taken = UserError(f"{self.path}: exists already; remove it, or choose another name")
        if isinstance(self.path, ObjectPath):
            self._claim(self.path, scratch, taken, grow)
            return
        if grow:
            self._open_base()
            return
        if self.path.exists():
            raise taken
        self.folder = self.path.with_name(self.path.name + ".partial")
        refuse_foreign(self.folder, _OWN.fullmatch)
        self._lock = lock_folder(self.folder, self.path)
        self.storage: Storage = Folder(self.folder)
        if self.path.exists():  # another process has finished it in the meantime
            self.abort()
            raise taken
        for left in self.folder.iterdir():  # left by a writer that was killed
            if left.name != "lock":
                left.unlink()

    def _claim(self, path: ObjectPath, scratch: Path | None, taken: UserError, grow: bool) -> None:
        """Say at the address that this process writes there, unless another does; read the version that is to grow."""
        local = local_place(path, scratch)
        if path.scheme.startswith("http"):
            raise UserError(f"{path}: can be read, not written; give an address of s3://, gs:// or az://")
        self._remote = self.storage = Objects(path)
        self.folder = local.with_name(f"{local.name}.partial")
        refuse_foreign(self.folder, _OWN.fullmatch)
        self._lock = lock_folder(self.folder, path)
        with contextlib.ExitStack() as unless_open:
            unless_open.callback(self._lock.close)
            token = self.folder / "claim"  # by it a process knows a claim of one before it that was killed
            if not token.exists():
                write_atomically(token, secrets.token_hex(8))
            claim = {"token": token.read_text(), "host": platform.node(), "since": f"{datetime.now():%Y-%m-%d %H:%M}"}
            if not self._remote.create(CLAIM, _json(claim)):
                found = json.loads(self._remote.whole(CLAIM))
                if found.get("token") != claim["token"]:
                    raise UserError(
                        f"{path}: {found.get('host')} writes it since {found.get('since')}; if that process is gone, "
                        f"remove {path / CLAIM}"
                    )
            unless_open.callback(self.abort)
            with contextlib.suppress(FileNotFoundError):
                self._replaced = self._remote.head("store.json")
            if self._replaced is not None and not grow:
                raise taken
            if grow:
                self._read_base()
            unless_open.pop_all()

    def _open_base(self) -> None:
        """Lock the store, and read its newest version."""
        Store(self.path)  # or there is nothing to lock
        assert isinstance(self.path, Path)
        self.folder = self.path
        self._lock = lock_folder(self.path, self.path)
        self.storage = Folder(self.folder)
        with contextlib.ExitStack() as unless_open:
            unless_open.callback(self._lock.close)
            self._read_base()
            with writing(self.path):
                for left in filter(_DRAFT.fullmatch, os.listdir(self.path)):
                    (self.path / left).unlink()
            unless_open.pop_all()

    def _read_base(self) -> None:
        self._base = Store(self.path)  # now no other process makes a version
        if self._base.version < VERSION:
            raise UserError(
                f"{self.path}: a store of format {self._base.version} does not grow; make one of format "
                f"{VERSION} of it first: warpfold pack --compact {self.path} --out NEW"
            )

    @property
    def base(self) -> "Store":
        """Return the version that grows."""
        assert self._base is not None
        return self._base

    def add(self, key: str, record: Packed, meta: Mapping[str, Any]) -> None:
        """Append a record.  meta: numbers, texts, None, or lists, kept in the index; the same names for every record.

        Errors: ValueError for a key that was added before or other names in `meta`; UserError if it cannot be written.
        """
        with writing(self.path):
            if self._file is not None and self._file.tell() + len(record.data) > self.shard_bytes:
                self._end_shard()
            if self._file is None:
                shard = self.folder / self._next_shard()
                # One that a killed writer has left may be a second name of a part's file.
                shard.unlink(missing_ok=True)
                self._file = open(shard, "xb")  # noqa: SIM115
            offset = self._file.tell()
            self._file.write(record.data)
        self.locate(key, len(self._shards), offset, len(record.data), record, meta)

    def locate(self, key: str, shard: int, offset: int, size: int, record: Packed, meta: Mapping[str, Any]) -> None:
        """Add a record that lies in a shard of this writer (`adopt`) already; of `record` the data are not looked at.

        Errors: ValueError as of `add`.
        """
        if key in self._rows:
            raise ValueError(f"{key}: twice in one store")
        row = self._rows[key] = len(self._rows)
        shard += len(self._base.index.shards) if self._base is not None else 0
        entry = {"shard": shard, "offset": offset, "size": size, "header": record.header, "crc": record.crc}
        for name, value in entry.items():
            self._where[name].append(value)
        for name, value in meta.items():
            self._meta.setdefault(name, []).append(value)
        if any(len(column) != len(self._rows) for column in self._meta.values()):
            raise ValueError(f"{key}: other names in its meta than in the records before it")
        if record.holder:
            self._holders[row] = record.holder

    def revise(self, name: str, values: Sequence[Any]) -> None:
        """Give the entries of the version that grows other values of a column, in the order of its keys."""
        self._revised[name] = values

    def adopt(self, file: Place) -> int:
        """Make a finished file of records a shard, and return its number for `locate`: a second name of the same bytes.

        It is copied where it cannot have one (`Storage.adopt`).  Nobody may change it later.
        """
        with writing(self.path):
            self._end_shard()
            name = self._next_shard()
            self.storage.adopt(name, file)
            self._shards.append((name, self.storage.size(name)))
        return len(self._shards) - 1

    def finish(self, files: Mapping[str, str | Iterable[str]] | None = None, without: Sequence[str] = ()) -> None:
        """Write the index, any text `files`, whole or in pieces, and `store.json`; a new store then gets its name.

        without: keys of a store that grows which the new version does not have.
        Errors: UserError for a store without records, or if it cannot be written.
        """
        versions: list[dict[str, Any]] = [] if self._base is None else self._base.versions
        keys, where, meta = self._joined(set(without))
        if not keys:
            raise UserError(f"{self.path}: nothing to store")
        with writing(self.path):
            self._end_shard()
            number = len(versions) + 1
            shards = [*(self._base.index.shards if self._base is not None else ()), *self._shards]
            index = encode_index(keys, where, meta, shards)
            name = f"index-{number:05d}.wfi"
            checksums: dict[str, int] = {}
            entry = {"index": name, "bytes": len(index), "blake2b": digest_of(index), "records": len(keys)}
            top = {"format": FORMAT, "version": VERSION, "versions": [*versions, entry | {"files": checksums}]}
            self.storage.write(name, index)
            del index  # of a million entries it has 100 MB, and the report has 300
            for name, text in (files or {}).items():
                data = bytearray()
                for piece in (text,) if isinstance(text, str) else text:
                    data += piece.encode()
                checksums[_of_version(name, number)] = zlib.crc32(data)
                self.storage.write(_of_version(name, number), data)
            whole = (json.dumps(top, indent=1) + "\n").encode()
            if self._remote is not None:
                if not self._remote.create("store.json", whole, self._replaced):
                    raise UserError(f"{self.path}: another process has written it meanwhile; choose another name")
                self._remote.remove(CLAIM)
                remove_own(self.folder, _OWN.fullmatch)
            else:
                sync_path(self.folder)
                self.storage.write("store.json", whole)
                if self._base is None:
                    (self.folder / "lock").unlink()
                sync_path(self.folder)
                if self._base is None:
                    assert isinstance(self.path, Path)
                    self.folder.rename(self.path)
                    sync_path(self.path.parent)
        self._lock.close()

    def _joined(self, without: set[str]) -> tuple[list[str], dict[str, np.ndarray], dict[str, list[Any]]]:
        """Return keys, places and columns of the new version: those of the base, replaced in place, then new ones."""
        own = list(self._rows)
        where = {name: np.array(column, np.int64) for name, column in self._where.items()}
        if self._base is None:
            where["holder"] = np.full(len(own), -1)
            for row, key in self._holders.items():
                where["holder"][row] = self._rows[key]
            return own, where, self._meta
        base = self._base.index
        if self._meta and list(self._meta) != list(base.columns):
            columns = listed(sorted(set(self._meta) ^ set(base.columns)), 3)
            raise UserError(f"{self.path}: has other columns ({columns}); pack with the options of the store")
        before = len(base.where["shard"])  # its rows; those of the new records come after them
        where = {name: np.concatenate([base.where[name].astype(np.int64), where[name]]) for name in where}
        where["holder"] = np.concatenate([base.where["holder"], np.full(len(own), -1)])
        for row, key in self._holders.items():
            where["holder"][before + row] = before + self._rows[key] if key in self._rows else base.row(key)
        keys, places = list(base.texts), list(range(len(base)))
        for key, row in self._rows.items():
            if (at := base.row(key)) >= 0:
                places[at] = before + row
            else:
                keys.append(key)
                places.append(before + row)
        kept = [key not in without for key in keys]
        keys, chosen = list(compress(keys, kept)), np.array(list(compress(places, kept)), np.int64)
        held = where["holder"][chosen]
        hidden = np.setdiff1d(held[held >= 0], chosen)  # replaced or removed, and still needed
        rows = np.concatenate([chosen, hidden])
        new = np.full(before + len(own), -1)
        new[rows] = np.arange(len(rows))
        where = {name: column[rows] for name, column in where.items()}
        where["holder"] = np.where(where["holder"] < 0, -1, new[where["holder"]])
        meta = {}
        for name, column in base.columns.items():
            values = [*self._revised.get(name, column), *[None] * (before - len(base)), *self._meta.get(name, ())]
            meta[name] = [values[row] for row in chosen.tolist()]
        return keys, where, meta

    def abort(self) -> None:
        """Remove what was written; `path`, and what it held before, is never touched."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # closing writes what is buffered, which may not fit on a full disk
                self._file.close()
            self._file = None
        if self._remote is not None:
            with contextlib.suppress(StorageError):  # the next writer overwrites it
                for name, _ in self._shards:
                    self._remote.remove(name)
                self._remote.remove(CLAIM)
        if self._base is None or self._remote is not None:
            remove_own(self.folder, _OWN.fullmatch)
        self._lock.close()  # what a version that is not there left is overwritten by the next one

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, *_: object) -> None:
        if not self._lock.closed:
            self.abort()

    def _next_shard(self) -> str:
        return _shard_name(len(self._shards) + (len(self._base.index.shards) if self._base is not None else 0))

    def _end_shard(self) -> None:
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        name = self._next_shard()
        self._shards.append((name, self._file.tell()))
        self._file.close()
        self._file = None
        if self._remote is not None:
            self._remote.adopt(name, self.folder / name)
            (self.folder / name).unlink()


class Store:
    """A store, open for reading; safe to share between threads and forks, and cheap to pickle (it reopens by path).

    path: its folder, or its address (`place_of`); "FOLDER@3" is its third version.  number: the version where the path
    says none; default: the newest.
    Errors: UserError for a folder that is not a store, a version that it does not have, another format, or a truncated
    or damaged file (which, and where), when the store is opened or when the damaged part is read.
    """

    def __init__(self, path: Place | str, number: int | None = None, checked: bool = False) -> None:
        self.path = place_of(path)
        folder, at, wanted = str(self.path).rpartition("@")
        if at and folder and wanted.isdecimal() and not (isinstance(self.path, Path) and self.path.exists()):
            self.path, number = place_of(folder), int(wanted)
        self.version = VERSION  # of the format
        self.number = 0  # of the store's version; 0 in formats 2 and 3, which have one
        self.storage = storage_of(self.path)
        self.versions: list[dict[str, Any]] = []
        self._checksums: dict[str, int] = {}  # of the small files beside the shards
        top = self._read_top()
        with contextlib.ExitStack() as unless_open:
            unless_open.callback(self.close)
            self.index = self._old_index(top["shards"]) if self.version < VERSION else self._index(number, checked)
            unless_open.pop_all()
        self.keys = Keys(self.index)  # in the order of writing
        if not self.keys:
            raise UserError(f"{self.path}: an empty store; pack it again")

    def __repr__(self) -> str:
        return f"<Store {self.name}: {len(self)} entries>"

    def __len__(self) -> int:
        return len(self.keys)

    def __contains__(self, key: object) -> bool:
        return self.index.row(key) >= 0

    def __reduce__(self) -> tuple[type["Store"], tuple[Place, int, bool]]:
        return Store, (self.path, self.number, True)

    def close(self) -> None:
        self.storage.close()

    @property
    def name(self) -> str:
        """Return its path, with the version if it has several."""
        return f"{self.path}@{self.number}" if len(self.versions) > 1 else str(self.path)

    @property
    def origin(self) -> bytes:
        """Return what tells it from other stores and other versions: it holds checksums of all contents."""
        if self.version < VERSION:
            return self.storage.whole("store.json")
        return _json(self.versioned)

    @property
    def checksum(self) -> str:
        """Return the BLAKE2b digest of store.json, 128 bits in hexadecimal."""
        return digest_of(self.storage.whole("store.json"))

    @property
    def nbytes(self) -> int:
        """Return how many bytes its shards and the indexes of its versions have."""
        return sum(size for _, size in self.index.shards) + sum(int(one["bytes"]) for one in self.versions)

    @property
    def versioned(self) -> dict[str, Any]:
        """Return what store.json says of this version."""
        return self.versions[self.number - 1]

    @property
    def columns(self) -> list[str]:
        """Return the names of the columns of `meta`."""
        return list(self.index.columns)

    def column(self, name: str) -> Column:
        """Return one value of `meta` for every record, in the order of `keys`."""
        return self.index.columns[name]

    def file(self, name: str) -> str | None:
        """Return one of the small text files that this version was written with; None if there is none."""
        name = _of_version(name, self.number)
        return self.storage.whole(name).decode() if name in self._checksums else None

    def record(self, key: str) -> "Record":
        """Return the record of `key`, reading only its header.  Errors: KeyError; UserError if it is damaged."""
        row = self.index.row(key)
        if row < 0:
            raise KeyError(key)
        notes, arrays, shared = self._header(row, key)
        if shared:
            (holder,) = set(shared.values())
            at = int(self.index.where["holder"][row])
            held = self._header(self.index.row(holder) if at < 0 else at, holder)[1]
            arrays |= {name: held[name] for name in shared}
        return Record(self, key, notes, arrays)

    def packed(self, key: str) -> Packed:
        """Return a record as it can be written into another store, with what it shares if its holder is not a key."""
        row = self.index.row(key)
        _, arrays, shared = self._header(row, key)
        shard, offset, _, header, crc, at = (int(self.index.where[name][row]) for name in WHERE)
        if at >= len(self) or any(at >= 0 and self.keys[at] != holder for holder in shared.values()):
            record = self.record(key)
            return pack_record({name: record.read(name) for name in record.arrays}, record.notes)
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
        rows = len(self.index.where["shard"])
        for row in range(rows):
            key = self.keys[row] if row < len(self) else "a record that others share"
            try:
                for array in self._header(row, key)[1].values():  # shared arrays are checked with their record
                    for number in range(len(array.crcs)):  # one by one: a record may be larger than the memory
                        array.unpack(number, *self._read(array.shard, [array.place(number)]))
            except StorageError:
                raise
            except UserError as error:
                yield str(error)
            if progress is not None:
                progress(row + 1, rows)

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

    def _read_top(self) -> dict[str, Any]:
        file = self.path / "store.json"
        try:
            top = json.loads(self.storage.whole("store.json"))
            known, version = top["format"] == FORMAT, int(top["version"])
            if version == VERSION:
                self.versions = list(top["versions"])
            elif version < VERSION:
                self._checksums = dict(top.get("files", {}))
        except OSError as error:
            raise UserError(
                f"{self.path}: not a store (store.json: {error.strerror}); `warpfold pack` makes one"
            ) from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{file}: damaged, or not a store's; pack it again") from error
        if not known:
            raise UserError(f"{file}: not a WarpFold store's")
        if not OLDEST <= version <= VERSION:
            cure = "update WarpFold" if version > VERSION else "pack it again"
            raise UserError(f"{self.path}: format {version}, this WarpFold reads {OLDEST} to {VERSION}; {cure}")
        self.version = version
        return dict(top)

    def _index(self, number: int | None, checked: bool) -> Index:
        """Return the index of a version.  checked: another process has done so; then it and the shards are trusted."""
        self.number = len(self.versions) if number is None else number
        if not 0 < self.number <= len(self.versions):
            raise UserError(
                f"{self.path}: has no version {self.number}; it has 1 to {len(self.versions)}: "
                f"{self.path}@{len(self.versions)}"
            )
        file = self.path / "store.json"
        try:
            entry = self.versions[self.number - 1]
            name, size, digest = entry["index"], int(entry["bytes"]), entry["blake2b"]
            self._checksums = dict(entry["files"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{file}: damaged; copy the store again") from error
        file = self.path / name
        try:
            index = Index(self.storage.view(name, size, digest, checked))
        except OSError as error:
            raise UserError(f"{file}: cannot be read: {error.strerror}; copy the store again") from error
        except NotImplementedError as error:
            raise UserError(f"{file}: an index of version {error}, newer than this WarpFold; update WarpFold") from None
        except (ValueError, KeyError, TypeError, struct.error) as error:
            raise UserError(f"{file}: damaged ({error}); copy the store again") from error
        for shard, expected in () if checked else index.shards:
            try:
                found = self.storage.size(shard)
            except OSError as error:
                path = self.path / shard
                raise UserError(f"{path}: cannot be read: {error.strerror}; copy the store again") from error
            if found < expected:
                raise UserError(
                    f"{self.path / shard}: {found} bytes, {expected} expected: truncated or not this store's; copy the "
                    "store again"
                )
        return index

    def _old_index(self, shards: Sequence[Mapping[str, int]]) -> Index:
        """Return an index of what the shards of formats 2 and 3 have at their ends."""
        keys: list[str] = []
        where: dict[str, list[int]] = {name: [] for name in WHERE}
        meta: dict[str, list[Any]] = {}
        for number, shard in enumerate(shards):
            index = self._old_shard(_shard_name(number), shard)
            keys += index["key"]
            for name in ("offset", "size", "header", "crc"):
                where[name] += index[name]
            where["shard"] += [number] * len(index["key"])
            for name in index:
                if name.startswith("meta."):
                    meta.setdefault(name.removeprefix("meta."), []).extend(index[name])
        where["holder"] = [-1] * len(keys)  # its key is in the header
        columns = {name: np.array(values, np.int64) for name, values in where.items()}
        return Index(encode_index(keys, columns, meta, [(_shard_name(n), s["bytes"]) for n, s in enumerate(shards)]))

    def _old_shard(self, name: str, shard: Mapping[str, int]) -> dict[str, list[Any]]:
        path = self.path / name
        try:
            size = self.storage.size(name)
            head, foot = self.storage.read(name, [(0, HEAD.size), (max(size - FOOT.size, 0), size)])
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}; copy the store again") from error
        if size != shard.get("bytes"):
            raise UserError(f"{path}: {size} bytes, {shard.get('bytes')} expected: truncated or not this store's")
        damaged = UserError(f"{path}: damaged at its begin or end; copy or pack the store again")
        if size < HEAD.size + FOOT.size:
            raise damaged
        magic, version, zero = HEAD.unpack(head)
        offset, length, crc, records, magic_end = FOOT.unpack(foot)
        if magic != MAGIC or magic_end != MAGIC or zero or version != self.version or records != shard.get("records"):
            raise damaged
        if offset + length + FOOT.size != size or crc != shard.get("crc"):
            raise damaged
        what = f"{path}: its index"
        (data,) = self.storage.read(name, [(offset, offset + length)])
        if zlib.crc32(data) != crc:
            raise UserError(f"{what}: damaged (checksum at byte {offset}); copy or pack the store again")
        return dict(json.loads(_decompress(data, what)))

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
                    raise UserError(f"{what}: damaged (checksum at byte {begin}); copy or pack the store again")
        except OSError as error:
            raise UserError(f"{places[0][3]}: cannot be read: {error.strerror}; copy the store again") from error
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
            raise UserError(f"{what}: damaged (its size is not what it should be); pack the store again")
        return bytes(_THREAD.decompressor.decompress(data))
    except zstandard.ZstdError as error:
        raise UserError(f"{what}: damaged ({error}); pack the store again") from error


def _is_whole(data: bytes, begin: int, end: int, crc: int | None) -> bool:
    return len(data) == end - begin and crc in (None, zlib.crc32(data))


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _shard_name(number: int) -> str:
    return f"shard-{number:05d}.wfs"


def _of_version(name: str, number: int) -> str:
    """Return the name of a text file of a version: pack.json, pack-2.json, ..."""
    stem, dot, suffix = name.rpartition(".")
    return f"{stem}-{number}{dot}{suffix}" if number > 1 else name
