"""Prepare structures that predictions start from: initial guesses, and fixed chains, which are their own templates.

This is the protocol of Bennett et al. 2023 (improving de novo protein binder design): the first pass starts from the
positions of a designed complex, and the target chain is its own template.
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
SELF = "self"  # instead of a path: the query's own structure


@dataclass(frozen=True, eq=False)
class GuessStructure(Mapping[str, Chain]):
    """The K chains of a structure by name, read from its file on access, so that ten thousand designs fit into memory.

    Of a file with several assemblies, this is the first one, as in a prediction of the file itself.

    source: its file, or its name in errors. names: of the chains. seen: whether CA and CB of each residue exist,
    bool [N, 2] per chain. digest: of the file or the arrays. held: the chains, if there is no file to read them from.
    """

    source: str
    names: tuple[str, ...]  # [K]
    sequences: tuple[str, ...]  # [K]
    seen: tuple[np.ndarray, ...]  # [K]
    digest: str
    held: tuple[Chain, ...] | None  # [K]

    def __getitem__(self, name: str) -> Chain:
        chains = _read_chains(self.source, self.digest) if self.held is None else self.held
        if name not in self.names:
            raise KeyError(name)
        return replace(chains[self.names.index(name)], id=name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def fitted(self, name: str, sequences: Mapping[str, str]) -> "GuessStructure":
        """Match the structure to the chains of a query `name`. sequences: of the query, by chain id.

        If both have a single chain, it takes the query's id. Raises UserError unless chains and lengths are equal.
        """
        names = tuple(sequences) if len(self) == len(sequences) == 1 else self.names
        own_lengths = dict(zip(names, map(len, self.sequences)))
        lengths = {id: len(sequence) for id, sequence in sequences.items()}
        if own_lengths != lengths:
            present, expected = (
                listed([f"{id} ({length})" for id, length in chains.items()], most=8)
                for chains in (own_lengths, lengths)
            )
            raise UserError(
                f"{self.source}: has other chains (residues) than {name}: {present}, not {expected}. Pass a structure "
                "of it."
            )
        return replace(self, names=names)

    def without_beta(self, sequences: Mapping[str, str]) -> list[str]:
        """List the residues without CB (without CA where the query has glycine) as "A 12", counted from 1."""
        residues = []
        for id, is_observed in zip(self.names, self.seen):
            is_glycine = np.array([letter == "G" for letter in sequences[id]])
            missing = np.flatnonzero(~np.where(is_glycine, is_observed[:, 0], is_observed[:, 1]))
            residues += [f"{id} {i + 1}" for i in missing]
        return residues


# A file, a GuessStructure, or (positions, mask) by chain.
GuessLike = PathLike | Mapping[str, Any] | None


def guess_from_structure(structure: Structure, data: bytes, path: Path | None, source: str) -> GuessStructure:
    """Make a guess from a structure that was read from `data`. path: its file, or None if it cannot be read again."""
    chains = _place_chains(structure)
    return _make_guess(source if path is None else str(path.absolute()), chains, digest_of(data), held=path is None)


def _make_guess(source: str, chains: Mapping[str, Chain], digest: str, held: bool) -> GuessStructure:
    """Make a guess from chains. held: keep the chains in memory instead of reading them from `source`."""
    all_chains = tuple(chains.values())
    is_observed = tuple(chain.mask[:, [CA, CB]] > 0 for chain in all_chains)
    sequences = tuple(chain.sequence for chain in all_chains)
    return GuessStructure(source, tuple(chains), sequences, is_observed, digest, all_chains if held else None)


def _place_chains(structure: Structure) -> dict[str, Chain]:
    """Apply the operators of a structure's first assembly; returns its chains by their names in the assembly."""
    placed, chains = structure.assembly(), {}
    for id, (name, operator) in zip(placed.ids, placed.chains):
        chain = structure.chains[name]
        moved_positions = apply_operator(operator, chain.positions) * chain.mask[..., None]
        chains[id] = replace(chain, positions=moved_positions)
    return chains


@lru_cache(maxsize=4)
def _read_chains(source: str, digest: str) -> tuple[Chain, ...]:
    """Read the chains of a file again. Raises UserError if the file is missing or has changed."""
    data = read_file(source)
    if digest_of(data) != digest:
        raise UserError(f"{source}: has changed since the run began. Restore the original file, or start a new run.")
    return tuple(_place_chains(parse_structure(data, source)).values())


def as_guess(guess: GuessLike, name: str, sequences: Mapping[str, str]) -> GuessStructure:
    """Convert a user's initial guess of a query `name`. sequences: of the query, by chain id.

    guess: a file, or positions [N, 37, 3] in angstrom and mask [N, 37] of each chain.
    Raises the errors of `read_structure` and `fitted`, and UserError for residues of a file that are in no chain, for
    arrays of other shapes, and for arrays that are not finite.
    """
    if isinstance(guess, GuessStructure):
        return guess.fitted(name, sequences)
    if not isinstance(guess, Mapping):
        path = Path(guess)  # type: ignore[arg-type]
        data = read_file(path)
        structure = parse_structure(data, str(path))
        structure.check_placed(str(path))
        return guess_from_structure(structure, data, path, str(path)).fitted(name, sequences)
    if len(guess) == len(sequences) == 1:
        guess = dict(zip(sequences, guess.values()))
    chains, digest = {}, hashlib.blake2b(digest_size=16)
    for id, arrays in guess.items():
        try:
            positions, mask = (np.asarray(array, np.float32) for array in arrays)
        except (TypeError, ValueError):
            raise WrongArgument(f"initial_guess[{id!r}] = {shown(arrays)}: positions and mask are needed") from None
        n = len(mask)
        if positions.shape != (n, 37, 3) or mask.shape != (n, 37):
            raise WrongArgument(
                f"initial_guess[{id!r}]: positions {list(positions.shape)} and mask {list(mask.shape)}; [N, 37, 3] and "
                "[N, 37] are needed"
            )
        observed = (mask > 0).astype(np.float32)
        positions = np.where(observed[..., None] > 0, positions, 0.0).astype(np.float32)
        if not np.isfinite(positions).all():
            raise UserError(f"initial_guess[{id!r}]: has positions that are not finite. Mask these atoms.")
        digest.update(positions.tobytes() + observed.tobytes())
        numbers = tuple(str(i + 1) for i in range(n))
        sequence = sequences.get(id, "")
        sequence = sequence if len(sequence) == n else "X" * n
        chains[id] = Chain(id, sequence, positions, observed, np.arange(n, dtype=np.int64), numbers)
    return _make_guess("initial_guess", chains, digest.hexdigest(), held=True).fitted(name, sequences)


def guess_positions(guess: GuessStructure, ids: Sequence[str]) -> np.ndarray:
    """Concatenate the positions of chains: float32 [N, 37, 3] in angstrom, 0 for missing atoms."""
    return np.concatenate([guess[id].positions for id in ids])


def own_template(chain: Chain, source: str) -> Templates:
    """Make a template of a chain for itself."""
    name = f"{Path(source).name.split('.')[0]}_{chain.id}"
    aatype, mask = encode(chain.sequence, name)[None], (chain.mask > 0).astype(np.uint8)[None]
    count = np.array([mask.any(-1).sum()], np.float32)
    return Templates(aatype, chain.positions[None], mask, (name,), count)


class GuessFiles:
    """Find the structure file of a query: the user's file, or the file with the query's name in the user's folder."""

    def __init__(self, path: Path) -> None:
        """List the folder. Raises UserError if it has no structures, or two with one name."""
        self.path = path
        self._named: dict[str, Path] = {}
        for file in sorted(path.iterdir()) if path.is_dir() else ():
            if Path(file.name.removesuffix(".gz")).suffix.lower() in STRUCTURES and file.is_file():
                name = file_name(file.name.split(".")[0])
                if other := self._named.get(name):
                    raise UserError(f"{file}: is a structure of {name}, as {other.name} is. Remove one of them.")
                self._named[name] = file
        if path.is_dir() and not self._named:
            raise UserError(f"{path}: has no structures. Pass a folder of NAME.pdb or NAME.cif.")

    def of(self, name: str) -> Path:
        """Return the file of a query. Raises UserError if the folder has none."""
        if not self.path.is_dir():
            return self.path
        if name not in self._named:
            raise UserError(f"{self.path}: has no structure of {name}. Add {name}.pdb or {name}.cif.")
        return self._named[name]
