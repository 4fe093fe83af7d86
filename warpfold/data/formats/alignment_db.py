"""OpenFold's alignment databases: the files of many chains joined into a few, and a JSON index of their offsets.

Two kinds of index (openfold/docs/source/Aux_seq_files.md): one for all shards, as OpenProteinSet's tools make it,
{"3lrm_A": {"db": "alignment_db_0.db", "files": [["uniref90_hits.a3m", start, size], ...]}, ...}, and one per shard,
{"3lrm_A": [["uniref90_hits.a3m", start, size], ...], ...}, where `NAME.index` belongs to `NAME.db` beside it.
An index may only name shards in its own folder or below; they may be symbolic links, which only its owner can make.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path, PurePath

from warpfold.errors import UserError
from warpfold.files import LARGEST, open_regular, pread, read_file

_FARTHEST = 10**30  # bytes; a larger number is damage, and may be too large to be printed or divided
_EXPECTED = 'expected {CHAIN: {"db": FILE, "files": [[NAME, START, SIZE], ...]}, ...}'


@dataclass(frozen=True)
class Slice:
    """A file inside a shard: bytes [start, start + size) of `path`."""

    path: Path
    start: int
    size: int

    def read(self, begin: int = 0, size: int | None = None, limit: int = LARGEST) -> bytes:
        """Read the file, or up to `size` bytes of it from `begin` on.

        Errors: UserError if the shard cannot be read or ends before the file does, or for more than `limit` bytes.
        """
        size = self.size - begin if size is None else min(size, self.size - begin)
        try:
            shard = open_regular(self.path)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read: {error.strerror}; keep it beside its index") from None
        try:
            end, length = self.start + self.size, os.fstat(shard).st_size
            if end > length:
                found = f"has {length} bytes, its index names {end}"
                raise UserError(f"{self.path}: {found}: cut short, or of another index; fetch it again")
            if size > limit:
                raise UserError(
                    f"{self.path}: a member has more than {limit / 1e9:g} GB; leave it out, or allow more (pack "
                    "--max-file-gb)"
                )
            return pread(shard, size, self.start + begin)
        finally:
            os.close(shard)


class AlignmentDB:
    """The chains of an alignment database, and their files.  No file stays open; workers need only their `Slice`s.

    path: the index.
    Errors: UserError if it cannot be read or is not an index.  Entries and shards are checked when they are used.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        try:
            self._entries = json.loads(read_file(path))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: damaged, or no JSON ({error}); fetch or make the index again") from None
        if not isinstance(self._entries, dict):
            raise UserError(f"{path}: is not an index of an alignment database; {_EXPECTED}")

    def chains(self) -> list[str]:
        """Return the names of all chains, sorted."""
        return sorted(self._entries)

    def files(self, chain: str) -> dict[str, Slice]:
        """Return the files of a chain by name, in the order of the index.

        Errors: KeyError; UserError if the chain's entry is malformed.
        """
        entry = self._entries[chain]
        wrong = UserError(f"{self.path}: {chain} is not an entry of an alignment database; {_EXPECTED}")
        try:
            name, files = (entry["db"], entry["files"]) if isinstance(entry, dict) else (f"{self.path.stem}.db", entry)
            shard = self.path.parent / name
            found = {file: Slice(shard, start, size) for file, start, size in files}
            name.encode()  # JSON may hold lone surrogates, which no file name has
        except (KeyError, TypeError, ValueError):
            raise wrong from None
        if not isinstance(name, str) or PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            raise UserError(f"{self.path}: {chain} lies in {name}, outside the index's folder; shards lie beside it")
        places = [at for part in found.values() for at in (part.start, part.size)]
        whole = all(type(at) is int and 0 <= at < _FARTHEST for at in places)
        if "\0" in name or not whole or not all(isinstance(file, str) for file in found):
            raise wrong
        return found
