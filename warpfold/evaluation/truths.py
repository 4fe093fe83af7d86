"""Find the reference structure of each prediction: files named by target, or by entry and chain."""

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
    """A reference structure: a file, and the author chain ids that count; an empty tuple means all chains."""

    name: str
    path: Path
    chains: tuple[str, ...] = ()

    def parse(self, data: bytes, allow_unplaced: bool = False) -> Structure:
        """Parse the content of the file and select the chains.

        Raises UserError for invalid content, missing chains and, unless `allow_unplaced`, residues outside all chains.
        """
        structure = parse_structure(data, str(self.path), ca_only=True)
        if not allow_unplaced:
            structure.check_placed(str(self.path), REMEDY)
        if not self.chains:
            return structure
        selected = {}
        for chain in self.chains:
            names = [name for name in structure.chains if name == chain]
            names = names or [name for name in structure.chains if name.lower() == chain.lower()]
            if len(names) != 1:
                reason = structure.dropped.get(chain)
                problem = f"chain {chain} cannot be scored: {reason}" if reason else f"no protein chain {chain}"
                raise UserError(f"{self.path}: {problem}. Its author chain ids are {listed([*structure.chains])}")
            selected[names[0]] = structure.chains[names[0]]
        return replace(structure, chains=selected, dropped={})


def target_key(name: str) -> str:
    """Normalize the name of a target: the PDB id in its normal form, the chain unchanged.

    Chains that differ only in case are different chains: every ribosome has an A and an a.
    """
    if _PDB_ID.fullmatch(name):
        return normal_entry_id(name)
    entry, _, chain = name.rpartition("_")
    return f"{normal_entry_id(entry)}_{chain}" if _PDB_ID.fullmatch(entry) else name


class Truths:
    """The reference structures in a folder and its subfolders.

    Names are compared as normalised by `target_key`. A name that differs in case matches if it is the only one.
    Raises UserError for a missing folder and for one without structures.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            problem = "is a file" if folder.exists() else "no such folder"
            raise UserError(
                f"{folder}: {problem}. Pass a folder of structures named by target: NAME.cif or NAME_CHAIN.cif"
            )
        self.folder = folder
        self.by_name: dict[str, Truth] = {}
        for file in find([folder], STRUCTURES, "structures"):
            if match := STRUCTURE.fullmatch(file.path.name):
                # The PDB archive calls its files pdb1abc.ent.
                name = match[1].removeprefix("pdb") if len(match[1]) == 7 else match[1]
                self.by_name.setdefault(target_key(name), Truth(name, file.path))
        self._index()

    def _index(self) -> None:
        # 1abc -> 1abc_A, 1abc_B
        self._of_entry: dict[str, list[Truth]] = {}
        self._in_lower_case: dict[str, list[Truth]] = {}
        for key, truth in self.by_name.items():
            self._in_lower_case.setdefault(key.lower(), []).append(truth)
            self._of_entry.setdefault(truth.name.lower().rpartition("_")[0], []).append(truth)

    def keep(self, suite: Suite) -> None:
        """Restrict the structures to the targets of a suite.

        Raises UserError that names the targets without a file and those whose file differs from the suite's.
        """
        selected, problems = dict[str, Truth](), list[str]()
        for name, entry in suite.targets.items():
            try:
                truth = self.find([name])
                if truth is None:
                    raise UserError(f"no file in {self.folder}. Name it {name}.cif")
                if entry.sha256 not in (None, digest := hashlib.sha256(read_file(truth.path)).hexdigest()):
                    raise UserError(f"{truth.path}: SHA-256 is {digest}, not that of the suite. Fetch that version")
                if entry.released not in (None, released := read_release_date(truth.path)):
                    raise UserError(f"{truth.path}: released on {released}, not on {entry.released} as in the suite")
                selected[target_key(name)] = replace(truth, name=name, chains=entry.chains or truth.chains)
            except UserError as error:
                problems.append(f"{name}: {error}")
        if problems:
            count = f"{len(problems)} of {len(suite.targets)} targets"
            raise UserError(f"{suite.path}: {count} cannot be used: {listed(problems, 3, '; ')}")
        self.by_name = selected
        self._index()

    def find(self, names: Iterable[str]) -> Truth | None:
        """Find the reference structure of a target by its possible names, in order of preference.

        The target NAME matches NAME.cif. Otherwise NAME_CHAIN matches that chain of NAME.cif, and NAME matches
        NAME_CHAIN.cif if there is only one such file.
        """
        for name in names:
            if truth := self._named(name):
                return truth
        for name in names:
            entry, _, chain = name.rpartition("_")
            if chain and (truth := self._named(entry)):
                return replace(truth, name=name, chains=(chain,))
            if len(of_entry := self._of_entry.get(name.lower(), [])) == 1:
                return of_entry[0]
        return None

    def _named(self, name: str) -> Truth | None:
        key = target_key(name)
        if truth := self.by_name.get(key):
            return truth
        candidates = self._in_lower_case.get(key.lower(), [])
        return candidates[0] if len(candidates) == 1 else None

    def without(self, used: Sequence[Truth]) -> list[str]:
        """List the names of the structures that are not among the used ones."""
        paths = {(truth.path, truth.chains) for truth in used} | {(truth.path, ()) for truth in used}
        return [truth.name for truth in self.by_name.values() if (truth.path, truth.chains) not in paths]
