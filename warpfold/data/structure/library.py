"""Look up structures of template hits by PDB id in folders of mmCIF files."""

import itertools
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
    """Raised if a library has no file of an entry."""


class Library:
    """mmCIF files in folders and their subfolders, such as a PDB mirror. Files are read on demand.

    A file is named after its id, short or long, in lower or upper case: `1abc.cif`, `ab/1abc.cif.gz`, `1ABC.cif`,
    `pdb_00001abc.cif`. If several folders have an entry, the first folder is used. The last `keep` structures and all
    release dates are cached in memory, but are not pickled. limit: largest size of an unpacked file in bytes.

    The PDB's list of obsolete entries, `obsolete.dat`, is used if it is in one of the folders or, as in AlphaFold's
    data, in its parent folder.
    """

    def __init__(self, *folders: str | Path, keep: int = 16, limit: int = LARGEST) -> None:
        self.folders, self.keep, self.limit = tuple(map(Path, folders)), keep, limit
        for folder in self.folders:
            if not folder.is_dir():
                raise UserError(f"{folder}: is not a folder. Pass the folder of the templates' mmCIF files.")
        # The files of each folder by id.
        self._listed: dict[Path, dict[str, Path]] = {}
        self._structures: OrderedDict[str, Structure | UserError] = OrderedDict()
        self._dates: dict[str, date | None] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_structures": OrderedDict(), "_dates": {}}

    @cached_property
    def _obsolete(self) -> dict[str, str | None]:
        """The replacement of each obsolete entry; None for an entry that was removed without a replacement."""
        replacement_of: dict[str, str | None] = {}
        for path in (
            parent / "obsolete.dat" for folder in self.folders for parent in (folder, folder.absolute().parent)
        ):
            if path.is_file():
                for line in read_file(path).decode(errors="replace").splitlines():
                    # A line looks like this: OBSLTE    26-SEP-06 2H33     2JM5 2OWI
                    if len(words := line.lower().split()) > 2 and words[0] == "obslte":
                        replacement_of.setdefault(words[2], words[3] if len(words) > 3 else None)
        return replacement_of

    def current(self, pdb_id: str) -> str | None:
        """Return the id of an entry, or of its replacement if the entry is obsolete and has no file.

        Returns None for an entry that was removed from the PDB.
        """
        new = self._obsolete.get(pdb_id, pdb_id)
        return pdb_id if new is not None and self._find_file(pdb_id) else new

    def find(self, pdb_id: str) -> Path:
        """Find the file of an entry (the first by path if there are several) or of its replacement.

        Raises MissingStructure if there is no file.
        """
        pdb_id = normal_entry_id(pdb_id.lower())
        if path := self._find_file(pdb_id):
            return path
        if (new := self._obsolete.get(pdb_id)) and (path := self._find_file(new)):
            return path
        folder_names = ", ".join(map(str, self.folders))
        raise MissingStructure(f"{folder_names}: has no {pdb_id}.cif or {pdb_id}.cif.gz. Add it, or do without.")

    def _find_file(self, pdb_id: str) -> Path | None:
        # Listing a folder may take minutes, so the paths of PDB mirrors are tried first.
        names = (pdb_id, pdb_id.upper(), f"pdb_0000{pdb_id}") if re.fullmatch(r"[a-z0-9]{4}", pdb_id) else ()
        for top in self.folders:
            for folder, name, ending in itertools.product((top, top / pdb_id[1:3]), names, ENDINGS[:2]):
                if (path := folder / f"{name}{ending}").is_file():
                    return path
            if top not in self._listed:
                files = self._listed[top] = {}
                for directory, folders, listed in os.walk(top):
                    folders.sort()
                    for name in sorted(listed):
                        if end := next((ending for ending in ENDINGS if name.lower().endswith(ending)), None):
                            files.setdefault(normal_entry_id(name[: -len(end)].lower()), Path(directory, name))
            if listed_path := self._listed[top].get(pdb_id):
                return listed_path
        return None

    def has(self, pdb_id: str) -> bool:
        """Return whether the library has a file of the entry or of its replacement."""
        try:
            self.find(pdb_id)
        except MissingStructure:
            return False
        return True

    def read(self, pdb_id: str) -> Structure:
        """Read the structure of an entry. Raises UserError if it is missing or unusable."""
        structure = self._structures.pop(pdb_id, None)
        if structure is None:
            try:
                with within_memory(str(path := self.find(pdb_id))):
                    structure = read_structure(path, limit=self.limit)
            except UserError as error:
                structure = error
        # The most recently used entry is last.
        self._structures[pdb_id] = structure
        if len(self._structures) > self.keep:
            self._structures.popitem(last=False)
        if isinstance(structure, UserError):
            raise structure
        return structure

    def release_date(self, pdb_id: str) -> date | None:
        """Read the release date of an entry; None if the file has no date. Raises the errors of `read`."""
        if pdb_id not in self._dates:
            with within_memory(str(path := self.find(pdb_id))):
                self._dates[pdb_id] = read_release_date(path, self.limit)
        return self._dates[pdb_id]
