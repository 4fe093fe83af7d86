"""Structures that predictions start from: initial guesses, and fixed chains, which are templates of themselves.

The protocol is that of Bennett et al. 2023 (improving de novo protein binder design): the first pass is handed the
positions of a designed complex, and the target is its own template.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from warpfold.arguments import PathLike, WrongArgument, shown
from warpfold.data.example.raw_example import Templates
from warpfold.data.formats.alignment import encode
from warpfold.data.formats.input_files import STRUCTURES
from warpfold.data.structure.assemblies import apply_operator
from warpfold.data.structure.chain import Chain, Structure
from warpfold.data.structure.mmcif import parse_structure
from warpfold.errors import UserError, listed
from warpfold.files import digest_of, file_name, read_file
from warpfold.geometry.residue import ATOM_ORDER

CA, CB = ATOM_ORDER["CA"], ATOM_ORDER["CB"]
SELF = "self"  # in place of a path: the structure that the query itself is


@dataclass(frozen=True, eq=False)
class GuessStructure(Mapping[str, Chain]):
    """The chains of a structure by their names, read from its file when they are asked for.

    So ten thousand designs need no memory.  A file that has several assemblies is the first of them, as where it is
    folded itself.
    """

    source: str  # its file, or what it is called in errors
    names: tuple[str, ...]  # [K], of the chains
    sequences: tuple[str, ...]  # [K]
    seen: tuple[np.ndarray, ...]  # [K], bool [N, 2]: whether CA and CB of each residue are there
    digest: str  # of all that it holds
    held: tuple[Chain, ...] | None = None  # [K], where it is of no file

    def __getitem__(self, name: str) -> Chain:
        chains = _chains_of(self.source, self.digest) if self.held is None else self.held
        if name not in self.names:
            raise KeyError(name)
        return replace(chains[self.names.index(name)], id=name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def fitted(self, name: str, sequences: Mapping[str, str]) -> "GuessStructure":
        """Return it with the chains of a query, id -> sequence; where both have one chain, its name does not matter.

        Errors: UserError unless chains and lengths are the same.
        """
        names = tuple(sequences) if len(self) == len(sequences) == 1 else self.names
        own, wanted = dict(zip(names, map(len, self.sequences))), {id: len(one) for id, one in sequences.items()}
        if own != wanted:
            theirs, ours = (
                listed([f"{id} ({length})" for id, length in chains.items()], most=8) for chains in (own, wanted)
            )
            raise UserError(
                f"{self.source}: has other chains (residues) than {name}: {theirs}, not {ours}; give a structure of it"
            )
        return replace(self, names=names)

    def without_beta(self, sequences: Mapping[str, str]) -> list[str]:
        """Return the residues whose CB it lacks, or CA where a query has glycine, as "A 12"; the places from 1."""
        found = []
        for id, seen in zip(self.names, self.seen):
            glycine = np.array([letter == "G" for letter in sequences[id]])
            places = np.flatnonzero(~np.where(glycine, seen[:, 0], seen[:, 1]))
            found += [f"{id} {place + 1}" for place in places]
        return found


GuessLike = PathLike | Mapping[str, Any] | None  # a file; a GuessStructure, or chain -> (positions, mask)


def guess_of_structure(structure: Structure, data: bytes, path: Path | None, source: str) -> GuessStructure:
    """Return a structure that was read from `data` as a guess.  path: of its file; None: it cannot be read again."""
    chains = _placed(structure)
    return _guess(source if path is None else str(path.absolute()), chains, digest_of(data), held=path is None)


def _guess(source: str, chains: Mapping[str, Chain], digest: str, held: bool) -> GuessStructure:
    every = tuple(chains.values())
    seen = tuple(chain.mask[:, [CA, CB]] > 0 for chain in every)
    return GuessStructure(
        source, tuple(chains), tuple(one.sequence for one in every), seen, digest, every if held else None
    )


def _placed(structure: Structure) -> dict[str, Chain]:
    """Return the chains of a structure's first assembly, where they stand in it, by their names there."""
    placed, found = structure.assembly(), {}
    for id, (name, operator) in zip(placed.ids, placed.chains):
        chain = structure.chains[name]
        moved = apply_operator(operator, chain.positions) * chain.mask[..., None]
        found[id] = replace(chain, positions=moved)
    return found


@lru_cache(maxsize=4)
def _chains_of(source: str, digest: str) -> tuple[Chain, ...]:
    """Read the chains of a file again.  Errors: UserError where it is gone, or another one."""
    data = read_file(source)
    if digest_of(data) != digest:
        raise UserError(f"{source}: is another file than when the run began; put the first one back, or start anew")
    return tuple(_placed(parse_structure(data, source)).values())


def read_guess(path: Path) -> GuessStructure:
    """Read a PDB or mmCIF file.  Errors: UserError as of `read_structure`, and for residues that are in no chain."""
    data = read_file(path)
    structure = parse_structure(data, str(path))
    structure.check_placed(str(path))
    return guess_of_structure(structure, data, path, str(path))


def as_guess(given: GuessLike, name: str, sequences: Mapping[str, str]) -> GuessStructure:
    """Return the guess that is meant, of a query with these sequences by chain.

    given: a file; or of each chain positions [N, 37, 3], angstrom, and mask [N, 37].
    Errors: UserError as of `read_guess` and `fitted`, and for arrays of other shapes, or that are not finite.
    """
    if isinstance(given, GuessStructure):
        return given.fitted(name, sequences)
    if not isinstance(given, Mapping):
        return read_guess(Path(given)).fitted(name, sequences)  # type: ignore[arg-type]
    if len(given) == len(sequences) == 1:
        given = dict(zip(sequences, given.values()))
    chains, digest = {}, hashlib.blake2b(digest_size=16)
    for id, arrays in given.items():
        try:
            positions, mask = (np.asarray(one, np.float32) for one in arrays)
        except (TypeError, ValueError):
            raise WrongArgument(f"initial_guess[{id!r}] = {shown(arrays)}: positions and mask are needed") from None
        n = len(mask)
        if positions.shape != (n, 37, 3) or mask.shape != (n, 37):
            raise WrongArgument(
                f"initial_guess[{id!r}]: positions {list(positions.shape)} and mask {list(mask.shape)}; [N, 37, 3] and "
                "[N, 37] are needed"
            )
        seen = (mask > 0).astype(np.float32)
        positions = np.where(seen[..., None] > 0, positions, 0.0).astype(np.float32)
        if not np.isfinite(positions).all():
            raise UserError(f"initial_guess[{id!r}]: has positions that are not finite; mask these atoms")
        digest.update(positions.tobytes() + seen.tobytes())
        numbers = tuple(str(i + 1) for i in range(n))
        sequence = own if len(own := sequences.get(id, "")) == n else "X" * n
        chains[id] = Chain(id, sequence, positions, seen, np.arange(n, dtype=np.int64), numbers)
    return _guess("initial_guess", chains, digest.hexdigest(), held=True).fitted(name, sequences)


def guess_positions(guess: GuessStructure, ids: Sequence[str]) -> np.ndarray:
    """Return the positions of chains, one after another: float32 [N, 37, 3], angstrom, 0 for atoms that are missing."""
    return np.concatenate([guess[id].positions for id in ids])


def own_template(chain: Chain, source: str) -> Templates:
    """Return a chain as its own template."""
    name = f"{Path(source).name.split('.')[0]}_{chain.id}"
    aatype, mask = encode(chain.sequence, name)[None], (chain.mask > 0).astype(np.uint8)[None]
    count = np.array([mask.any(-1).sum()], np.float32)
    return Templates(aatype, chain.positions[None], mask, (name,), count)


class GuessFiles:
    """Finds the file of a query: the one that was given, or in a folder the one that has the query's name."""

    def __init__(self, path: Path) -> None:
        """Look into the folder.  Errors: UserError for one without structures, or with two of one name."""
        self.path = path
        self._named: dict[str, Path] = {}
        for file in sorted(path.iterdir()) if path.is_dir() else ():
            if Path(file.name.removesuffix(".gz")).suffix.lower() in STRUCTURES and file.is_file():
                name = file_name(file.name.split(".")[0])
                if other := self._named.get(name):
                    raise UserError(f"{file}: is a structure of {name}, as {other.name} is; leave one of them out")
                self._named[name] = file
        if path.is_dir() and not self._named:
            raise UserError(f"{path}: has no structures; give a folder of NAME.pdb or NAME.cif")

    def of(self, name: str) -> Path:
        """Return the file of a query.  Errors: UserError where the folder has none."""
        if not self.path.is_dir():
            return self.path
        if name not in self._named:
            raise UserError(f"{self.path}: has no structure of {name}; add {name}.pdb or {name}.cif")
        return self._named[name]
