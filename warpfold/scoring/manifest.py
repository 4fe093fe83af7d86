"""Lists of targets that anybody can fold and score: chains of PDB entries, and what others have published of them.

title = "CAMEO, a week"
source = "https://..."                    # where the list comes from

[published]                               # mean lDDT-Ca over these targets, by name of the parameter file
source = "https://..."
note = "with templates until 2021-10-10"  # what a reader should know; it is printed
lddt_ca = {finetuning_ptm_1 = 0.9075}

[targets]                                 # PDB id, _, the chain as its authors name it
7abc_A = {}
7abd_B = {released = 2021-10-20, sha256 = "9f86..."}

A suite, of which any predictions are evaluated (`warpfold evaluate`), is such a list whose targets may have any names.
"""

import hashlib
import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path

from warpfold.arguments import PathLike
from warpfold.data.structure.chain import Chain, Structure
from warpfold.data.structure.library import Library
from warpfold.data.structure.mmcif import parse_structure
from warpfold.errors import UserError, listed
from warpfold.files import read_file, writing
from warpfold.progress import Progress
from warpfold.settings import build, toml_value

LISTS = {file.stem: file for file in Path(__file__).parent.glob("*.toml")}
ENTRY = "https://files.rcsb.org/download/{}.cif.gz"
MOST = 10**9  # bytes of an entry, packed
_NAME = re.compile(r"([0-9][A-Za-z0-9]{3})_([A-Za-z0-9]+)")


@dataclass(frozen=True)
class Target:
    """A chain of the PDB.  released, sha256: what its file must say and be (unpacked); None: whatever it is."""

    pdb_id: str  # lower case
    chain: str  # the author's name
    released: date | None = None
    sha256: str | None = None

    @property
    def name(self) -> str:
        return f"{self.pdb_id}_{self.chain}"


@dataclass(frozen=True)
class Published:
    """What others have measured: mean lDDT-Ca by name of the parameter file, without its ending."""

    source: str = ""
    note: str = ""
    lddt_ca: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """A list of targets."""

    path: Path
    sha256: str
    title: str
    source: str
    published: Published
    targets: list[Target]


@dataclass(frozen=True)
class Truth:
    """What is known of a target: its chain alone, each residue numbered by its place in SEQRES, from 1.

    sha256: of the file, unpacked.
    """

    target: Target
    structure: Structure
    sha256: str
    released: date | None

    @property
    def chain(self) -> Chain:
        return self.structure.chains[self.target.chain]


@dataclass(frozen=True)
class Entry:
    """What the file of a target must say and be, where it is known: release date, SHA-256 (unpacked), chains."""

    released: date | None = None
    sha256: str | None = None
    chains: tuple[str, ...] = ()


@dataclass(frozen=True)
class _File:
    title: str = ""
    source: str = ""
    published: Published = field(default_factory=Published)
    targets: dict[str, Entry] = field(default_factory=dict)


@dataclass(frozen=True)
class Suite:
    """Targets by name, and what the files of their structures must say and be."""

    path: Path
    sha256: str
    title: str
    source: str
    targets: dict[str, Entry]


def read_suite(path: Path) -> Suite:
    """Read a list of targets of any names; a file, or one that comes with WarpFold, by its name.

    Errors: UserError for a file that is none, an empty list, and a name that stands there twice.
    """
    read, digest, path = _read(path)
    named: dict[str, str] = {}
    for name in read.targets:
        if (other := named.setdefault(name.lower(), name)) != name:
            raise UserError(f"{path}: {name} and {other} are one name; keep one")
    return Suite(path, digest, read.title, read.source, read.targets)


def write_suite(title: str, targets: Mapping[str, Entry]) -> str:
    """Return a list of targets as `read_suite` and, where they are chains of the PDB, `read_manifest` read it."""
    lines = [f"title = {toml_value(title)}", 'source = ""', "", "[targets]"]
    for name, entry in targets.items():
        told = {"released": entry.released, "sha256": entry.sha256, "chains": entry.chains}
        lines.append(toml_value({name: {key: value for key, value in told.items() if value}})[1:-1])
    return "\n".join(lines) + "\n"


def read_manifest(path: Path) -> Manifest:
    """Read a list of targets: a file, or one that comes with WarpFold, by its name.

    Errors: UserError for a file that is none, an empty list, a name that is none, and one that stands there twice.
    """
    read, digest, path = _read(path)
    targets: dict[str, Target] = {}
    for name, entry in read.targets.items():
        named = _NAME.fullmatch(name)
        if named is None:
            raise UserError(f"{path}: {name} is no target; write PDB id, _ and the authors' chain name: 7abc_A")
        target = Target(named[1].lower(), named[2], entry.released, entry.sha256)
        if target.name.lower() in targets:  # some file systems do not tell A from a, and predictions are in folders
            raise UserError(f"{path}: {target.name} and {targets[target.name.lower()].name} are one name; keep one")
        targets[target.name.lower()] = target
    return Manifest(path, digest, read.title, read.source, read.published, [*targets.values()])


def _read(path: Path) -> tuple[_File, str, Path]:
    """Return what a list has, its SHA-256, and the path of its file."""
    if not path.exists() and str(path) in LISTS:
        path = LISTS[str(path)]
    data = read_file(path)
    try:
        values = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:  # of TOML, and of what is not UTF-8
        raise UserError(f"{path}: not valid TOML: {error}") from error
    read = build(_File, values, str(path))
    if not read.targets:
        raise UserError(f"{path}: has no targets; name them under [targets], a line each: 7abc_A = {{}}")
    return read, hashlib.sha256(data).hexdigest(), path


def fetch_structures(manifest: Manifest, folder: Path, source: PathLike | None, progress: Progress) -> None:
    """Download the entries that a folder lacks; those that are not there are for `read_truths` to name.

    source: a mirror's address or a folder; None: the PDB.
    Errors: UserError as of `fetch_file`.
    """
    from warpfold.download import DownloadFailed, fetch_file, source_of

    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    library = Library(folder)
    lacking = [one for one in dict.fromkeys(target.pdb_id for target in manifest.targets) if not library.has(one)]
    for done, pdb_id in enumerate(lacking):
        progress(done, len(lacking), f"fetching {pdb_id}")
        with suppress(DownloadFailed):
            fetch_file(source_of(ENTRY.format(pdb_id), source), folder / f"{pdb_id}.cif.gz", None, MOST)


def read_truths(manifest: Manifest, folder: Path, progress: Progress) -> list[Truth]:
    """Read the targets' chains from a folder of mmCIF files named by PDB id (`Library`).

    Errors: UserError that names the targets without a file, chain or atoms, or whose file is not the one listed.
    """
    library, found, wrong = Library(folder), list[Truth](), list[str]()
    for done, target in enumerate(manifest.targets):
        progress(done, len(manifest.targets), f"reading {target.name}")
        try:
            found.append(_read_truth(target, library))
        except UserError as error:
            wrong.append(f"{target.name}: {error}")
    if wrong:
        of = f"{len(wrong)} of {len(manifest.targets)} targets"
        raise UserError(f"{manifest.path}: {of} cannot be used: {listed(wrong, 3, '; ')}")
    return found


def _read_truth(target: Target, library: Library) -> Truth:
    if (now := library.current(target.pdb_id)) not in (target.pdb_id, None):
        raise UserError(f"the PDB has replaced this entry by {now}; list that one, or leave it out")
    path = library.find(target.pdb_id)
    data = read_file(path)
    digest = hashlib.sha256(data).hexdigest()
    if target.sha256 not in (None, digest):
        raise UserError(f"{path}: has SHA-256 {digest}, not what is listed; fetch the version that was meant")
    structure = parse_structure(data, str(path), ca_only=True)
    if structure.id != target.pdb_id:
        raise UserError(f"{path}: is of entry {structure.id}; name files by their entry")
    if target.released not in (None, structure.release_date):
        raise UserError(f"{path}: was released on {structure.release_date}, not on {target.released} as listed")
    if target.chain not in structure.chains:
        why = structure.dropped.get(target.chain)
        what = f"chain {target.chain} cannot be scored: {why}" if why else f"no protein chain {target.chain}"
        raise UserError(f"{path}: {what}; by their authors' names it has {listed([*structure.chains])}")
    chain = structure.chains[target.chain]
    numbers = tuple(str(place) for place in range(1, len(chain.sequence) + 1))
    own = {chain.id: replace(chain, author_numbers=numbers)}
    return Truth(target, replace(structure, chains=own, dropped={}), digest, structure.release_date)
