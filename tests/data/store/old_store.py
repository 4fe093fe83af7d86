"""Write stores of formats 2 and 3, which have an index in each shard, as WarpFold did until November 2026."""

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import zstandard

from warpfold.data.store.store import FOOT, HEAD, MAGIC, Packed

Records = Sequence[tuple[str, Packed, Mapping[str, Any]]]


def write_old(path: Path, shards: Sequence[Records], version: int = 2, files: Mapping[str, str] | None = None) -> Path:
    path.mkdir()
    about = []
    for number, records in enumerate(shards):
        index: dict[str, list[Any]] = {}
        data = HEAD.pack(MAGIC, version, 0)
        for key, record, meta in records:
            row = {"key": key, "offset": len(data), "size": len(record.data), "header": record.header}
            row |= {"crc": record.crc} | {f"meta.{name}": value for name, value in meta.items()}
            for name, value in row.items():
                index.setdefault(name, []).append(value)
            data += record.data
        end = zstandard.ZstdCompressor(level=1).compress(json.dumps(index, separators=(",", ":")).encode())
        whole = data + end + FOOT.pack(len(data), len(end), zlib.crc32(end), len(records), MAGIC)
        (path / f"shard-{number:05d}.wfs").write_bytes(whole)
        about.append({"bytes": len(whole), "records": len(records), "crc": zlib.crc32(end)})
    for name, text in (files or {}).items():
        (path / name).write_text(text)
    checksums = {name: zlib.crc32(text.encode()) for name, text in (files or {}).items()}
    top = {"format": "warpfold-store", "version": version, "shards": about, "files": checksums}
    (path / "store.json").write_text(json.dumps(top))
    return path
