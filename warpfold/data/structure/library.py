"""Folders of structures, looked up by PDB id, in which template hits are found."""

import os
import re
from collections import OrderedDict
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

from warpfold.data.structure.chain import Structure, normal_entry_id
from warpfold.data.structure.mmcif import read_release_date, read_structure
from warpfold.errors import UserError
from warpfold.files import LARGEST, read_file, within_memory

ENDINGS = (".cif", ".cif.gz", ".mmcif", ".mmcif.gz")


class MissingStructure(UserError):
    """An entry has no file in a library."""


class Library:
    """mmCIF files in folders and their subfolders (a PDB mirror, say), each read when it is needed.

    A file is named by its id, in lower or upper case, short or long: `1abc.cif`, `ab/1abc.cif.gz`, `1ABC.cif`,
    `pdb_00001abc.cif`.  Of several folders
    with an entry the first one counts.  The last `keep` structures and all release dates that were read stay in
    memory, but are not pickled.
    limit: bytes that a file may have when it is unpacked.

    The PDB's list of entries that were removed or replaced is read where it is there: `obsolete.dat`, in a folder or,
    as AlphaFold's data have it, beside it.
    """

    def __init__(self, *folders: str | Path, keep: int = 16, limit: int = LARGEST) -> None:
        self.folders, self.keep, self.limit = tuple(map(Path, folders)), keep, limit
        for folder in self.folders:
            if not folder.is_dir():
                raise UserError(f"{folder}: is not a folder; give the folder of the templates' mmCIF files")
        self._listed: dict[Path, dict[str, Path]] = {}  # all files of a folder by id
        self._states: dict[str, str] = {}  # what `digest` saw of entries
        self._structures: OrderedDict[str, Structure | UserError] = OrderedDict()
        self._dates: dict[str, date | None] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_structures": OrderedDict(), "_dates": {}}

    @cached_property
    def _obsolete(self) -> dict[str, str | None]:
        """What replaced each obsolete entry; None: nothing, it was removed."""
        found: dict[str, str | None] = {}
        for path in (place / "obsolete.dat" for folder in self.folders for place in (folder, folder.absolute().parent)):
            if path.is_file():
                for line in read_file(path).decode(errors="replace").splitlines():
                    # OBSLTE    26-SEP-06 2H33     2JM5 2OWI
                    if len(words := line.lower().split()) > 2 and words[0] == "obslte":
                        found.setdefault(words[2], words[3] if len(words) > 3 else None)
        return found

    def current(self, pdb_id: str) -> str | None:
        """Return the entry that stands for an entry: itself, or what replaced it where its own file is missing.

        None for one that was removed from the PDB.
        """
        new = self._obsolete.get(pdb_id, pdb_id)
        return pdb_id if new is not None and self._own(pdb_id) else new

    def find(self, pdb_id: str) -> Path:
        """Return the file of an entry, the first by path if there are several, or that of what replaced it.

        Errors: MissingStructure if there is none.
        """
        pdb_id = normal_entry_id(pdb_id.lower())
        if (path := self._own(pdb_id)) or ((new := self._obsolete.get(pdb_id)) and (path := self._own(new))):
            return path
        where = ", ".join(map(str, self.folders))
        raise MissingStructure(f"{where}: has no {pdb_id}.cif or {pdb_id}.cif.gz; add it, or do without")

    def _own(self, pdb_id: str) -> Path | None:
        return next(filter(None, (self._find_in(folder, pdb_id) for folder in self.folders)), None)

    def _find_in(self, top: Path, pdb_id: str) -> Path | None:
        if re.fullmatch(r"[a-z0-9]{4}", pdb_id):
            for folder in (top, top / pdb_id[1:3]):
                for name in (pdb_id, pdb_id.upper(), f"pdb_0000{pdb_id}"):
                    for ending in ENDINGS[:2]:
                        if (path := folder / f"{name}{ending}").is_file():
                            return path
        if top not in self._listed:  # only once an entry is not where PDB mirrors have it: this may take minutes
            found = self._listed[top] = {}
            for here, folders, names in os.walk(top):
                folders.sort()
                for name in sorted(names):
                    if end := next((ending for ending in ENDINGS if name.lower().endswith(ending)), None):
                        found.setdefault(normal_entry_id(name[: -len(end)].lower()), Path(here, name))
        return self._listed[top].get(pdb_id)

    def has(self, pdb_id: str) -> bool:
        """Return whether there is a file of an entry."""
        try:
            self.find(pdb_id)
        except MissingStructure:
            return False
        return True

    def read(self, pdb_id: str) -> Structure:
        """Return the structure of an entry.  Errors: UserError if it is missing or cannot be used."""
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
        """Return when an entry was released; None if its file does not say.  Errors: as in `read`."""
        if pdb_id not in self._dates:
            with within_memory(str(path := self.find(pdb_id))):
                self._dates[pdb_id] = read_release_date(path, self.limit)
        return self._dates[pdb_id]
