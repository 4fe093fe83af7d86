"""A folder of structures, looked up by PDB id, in which template hits are found."""

import os
import re
from collections import OrderedDict
from datetime import date
from pathlib import Path
from typing import Any

from warpfold.data.structure.chain import Structure
from warpfold.data.structure.mmcif import read_release_date, read_structure
from warpfold.errors import UserError
from warpfold.files import LARGEST, within_memory

ENDINGS = (".cif", ".cif.gz", ".mmcif", ".mmcif.gz")


class MissingStructure(UserError):
    """There is no file of an entry in a library."""


class Library:
    """mmCIF files in a folder and its subfolders (a PDB mirror, say), each read when it is needed.

    A file is named by its id, in lower or upper case: `1abc.cif`, `ab/1abc.cif.gz`, `1ABC.cif`.  The last `keep`
    structures and all release dates that were read stay in memory, but are not pickled.
    limit: bytes that a file may have when it is unpacked.
    """

    def __init__(self, folder: str | Path, keep: int = 16, limit: int = LARGEST) -> None:
        self.folder, self.keep, self.limit = Path(folder), keep, limit
        if not self.folder.is_dir():
            raise UserError(f"{folder}: is not a folder; give the folder of the templates' mmCIF files")
        self._paths: dict[str, Path] | None = (
            None  # of all files: listed once an entry is not where PDB mirrors have it
        )
        self._structures: OrderedDict[str, Structure | UserError] = OrderedDict()
        self._dates: dict[str, date | None] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_structures": OrderedDict(), "_dates": {}}

    def find(self, pdb_id: str) -> Path:
        """Return the file of an entry, the first by path if there are several.  Errors: MissingStructure if none."""
        pdb_id = pdb_id.lower()
        if re.fullmatch(r"[a-z0-9]{4}", pdb_id):
            for folder in (self.folder, self.folder / pdb_id[1:3]):
                for name in (pdb_id, pdb_id.upper()):
                    for ending in ENDINGS[:2]:
                        if (path := folder / f"{name}{ending}").is_file():
                            return path
        if self._paths is None:
            self._paths = {}
            for here, folders, names in os.walk(self.folder):
                folders.sort()
                for name in sorted(names):
                    if end := next((ending for ending in ENDINGS if name.lower().endswith(ending)), None):
                        self._paths.setdefault(name[: -len(end)].lower(), Path(here, name))
        if pdb_id not in self._paths:
            raise MissingStructure(f"{self.folder}: has no {pdb_id}.cif or {pdb_id}.cif.gz; add it, or do without")
        return self._paths[pdb_id]

    def has(self, pdb_id: str) -> bool:
        """Return whether there is a file of an entry."""
        try:
            self.find(pdb_id)
        except MissingStructure:
            return False
        return True

    def read(self, pdb_id: str) -> Structure:
        """Return the structure of an entry.  Errors: UserError for one that is not there or cannot be used."""
        found = self._structures.pop(pdb_id, None)
        if found is None:
            try:
                with within_memory(str(path := self.find(pdb_id))):
                    found = read_structure(path, limit=self.limit)
            except UserError as error:
                found = error
        self._structures[pdb_id] = found  # most recently used last
        if len(self._structures) > self.keep:
            self._structures.popitem(last=False)
        if isinstance(found, UserError):
            raise found
        return found

    def release_date(self, pdb_id: str) -> date | None:
        """Return when an entry came out; None if its file does not say.  Errors: as in `read`."""
        if pdb_id not in self._dates:
            with within_memory(str(path := self.find(pdb_id))):
                self._dates[pdb_id] = read_release_date(path, self.limit)
        return self._dates[pdb_id]
