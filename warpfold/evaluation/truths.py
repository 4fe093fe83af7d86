"""Find which structure each prediction is compared with: files named by target, or by entry with a chain of it."""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from warpfold.data.formats.input_files import STRUCTURES, find
from warpfold.data.formats.predictions import STRUCTURE
from warpfold.data.structure.chain import Structure, normal_entry_id
from warpfold.data.structure.mmcif import parse_structure, read_release_date
from warpfold.errors import UserError, listed
from warpfold.evaluation.suite import Suite
from warpfold.files import read_file

REMEDY = "correct the file, or pass --allow-unplaced to score without them"
_PDB_ID = re.compile(r"[0-9][a-z0-9]{3}|pdb_[a-z0-9]{8}", re.IGNORECASE)


@dataclass(frozen=True)
class Truth:
    """A file, and which chains of it count, by their authors' names; (): all of them."""

    name: str
    path: Path
    chains: tuple[str, ...] = ()

    def parse(self, data: bytes, allow_unplaced: bool = False) -> Structure:
        """Return the structure that a prediction is compared with, of what is in the file.

        Errors: UserError for what cannot be read, a chain that is not there, and unless `allow_unplaced` for residues
        that are in no chain.
        """
        structure = parse_structure(data, str(self.path), ca_only=True)
        if not allow_unplaced:
            structure.check_placed(str(self.path), REMEDY)
        if not self.chains:
            return structure
        kept = {}
        for wanted in self.chains:
            names = [name for name in structure.chains if name == wanted]
            names = names or [name for name in structure.chains if name.lower() == wanted.lower()]
            if len(names) != 1:
                why = structure.dropped.get(wanted)
                what = f"chain {wanted} cannot be scored: {why}" if why else f"no protein chain {wanted}"
                raise UserError(f"{self.path}: {what}; by their authors' names it has {listed([*structure.chains])}")
            kept[names[0]] = structure.chains[names[0]]
        return replace(structure, chains=kept, dropped={})


def target_key(name: str) -> str:
    """Normalize the name of a target: the PDB id in its normal form, the chain unchanged.

    Chains that differ only in case are different chains: every ribosome has an A and an a.
    """
    if _PDB_ID.fullmatch(name):
        return normal_entry_id(name)
    entry, _, chain = name.rpartition("_")
    return f"{normal_entry_id(entry)}_{chain}" if _PDB_ID.fullmatch(entry) else name


class Truths:
    """A folder of structures, and its subfolders.

    Names are compared as `target_key` spells them; a name in another case is found if it is the only one.
    Errors: UserError for a folder that is not there or has none.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            what = "is a file" if folder.exists() else "no such folder"
            raise UserError(
                f"{folder}: {what}; give a folder of structures named by target, NAME.cif or NAME_CHAIN.cif"
            )
        self.folder = folder
        self.by_name: dict[str, Truth] = {}
        for file in find([folder], STRUCTURES, "structures"):
            if match := STRUCTURE.fullmatch(file.path.name):
                name = match[1].removeprefix("pdb") if len(match[1]) == 7 else match[1]  # pdb1abc.ent
                self.by_name.setdefault(target_key(name), Truth(name, file.path))
        self._index()

    def _index(self) -> None:
        self._of_entry: dict[str, list[Truth]] = {}  # 1abc -> 1abc_A, 1abc_B
        self._in_lower_case: dict[str, list[Truth]] = {}
        for key, truth in self.by_name.items():
            self._in_lower_case.setdefault(key.lower(), []).append(truth)
            self._of_entry.setdefault(truth.name.lower().rpartition("_")[0], []).append(truth)

    def keep(self, suite: Suite) -> None:
        """Keep the targets of a suite, and nothing else.

        Errors: UserError that names the targets without a file, and those whose file is not the one listed.
        """
        kept, wrong = dict[str, Truth](), list[str]()
        for name, entry in suite.targets.items():
            try:
                truth = self.find([name])
                if truth is None:
                    raise UserError(f"no file of it in {self.folder}; name it {name}.cif")
                if entry.sha256 not in (None, digest := hashlib.sha256(read_file(truth.path)).hexdigest()):
                    raise UserError(f"{truth.path}: has SHA-256 {digest}, not what is listed; fetch the version meant")
                if entry.released not in (None, released := read_release_date(truth.path)):
                    raise UserError(f"{truth.path}: was released on {released}, not on {entry.released} as listed")
                kept[target_key(name)] = replace(truth, name=name, chains=entry.chains or truth.chains)
            except UserError as error:
                wrong.append(f"{name}: {error}")
        if wrong:
            of = f"{len(wrong)} of {len(suite.targets)} targets"
            raise UserError(f"{suite.path}: {of} cannot be used: {listed(wrong, 3, '; ')}")
        self.by_name = kept
        self._index()

    def find(self, names: Iterable[str]) -> Truth | None:
        """Return the truth of a target, by the first of its names that there is.

        NAME is compared with NAME.cif, whose name may differ in case if there is only one; else NAME_CHAIN with that
        chain of NAME.cif; else NAME with NAME_CHAIN.cif, if there is only one.
        """
        for name in names:
            if truth := self._named(name):
                return truth
        for name in names:
            entry, _, chain = name.rpartition("_")
            if chain and (truth := self._named(entry)):
                return replace(truth, name=name, chains=(chain,))
            if len(several := self._of_entry.get(name.lower(), [])) == 1:
                return several[0]
        return None

    def _named(self, name: str) -> Truth | None:
        key = target_key(name)
        if truth := self.by_name.get(key):
            return truth
        others = self._in_lower_case.get(key.lower(), [])
        return others[0] if len(others) == 1 else None

    def without(self, used: Sequence[Truth]) -> list[str]:
        """Return the names of those that are not used."""
        paths = {(truth.path, truth.chains) for truth in used} | {(truth.path, ()) for truth in used}
        return [truth.name for truth in self.by_name.values() if (truth.path, truth.chains) not in paths]
