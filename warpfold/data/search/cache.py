"""The cache of `warpfold search`: what was found, under a key of all that it depends on."""

import glob
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zstandard

from warpfold.data.search.database import Survey
from warpfold.files import update_file


class Cache:
    """Results and surveys by their keys, in a folder that any number of processes may share.

    An entry is there whole or not at all, and under zstd's checksum: a damaged one counts as missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _place(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.zst"

    def get(self, key: str) -> str | None:
        """What is kept under a key, or None."""
        try:
            return zstandard.ZstdDecompressor().decompress(self._place(key).read_bytes()).decode()
        except (OSError, zstandard.ZstdError):
            return None

    def put(self, key: str, text: str) -> None:
        """Keep it.  Errors: UserError if the disk refuses."""
        update_file(self._place(key), zstandard.ZstdCompressor(level=3, write_checksum=True).compress(text.encode()))

    def survey(self, path: Path, kind: str, make: Callable[[], Survey]) -> Survey:
        """What is known of a database: made once, then remembered by path, size and time of its files.

        path: of the file, or what its files' names begin with.  kind: of database.  Errors: those of `make`.
        """
        files = sorted(path.parent.glob(f"{glob.escape(path.name)}*"))
        states = [(str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        key = digest_of("survey", kind, states)
        if (known := self.get(key)) is not None:
            return Survey(**json.loads(known))
        found = make()
        self.put(key, json.dumps(vars(found)))
        return found


def digest_of(*parts: Any) -> str:
    """32 hexadecimal digits that stand for anything JSON can hold."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()
