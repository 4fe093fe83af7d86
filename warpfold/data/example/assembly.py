"""Assemblies: chains that are folded together (AlphaFold-Multimer)."""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from warpfold.data.example.pairing import Pairing
from warpfold.data.example.raw_example import RawExample


class Example(Protocol):
    """One chain, in memory (`RawExample`) or in a store (`StoredExample`)."""

    @property
    def sequence(self) -> str: ...
    @property
    def length(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def templates_count(self) -> int: ...
    @property
    def profile(self) -> np.ndarray: ...
    @property
    def pairing(self) -> Pairing | None: ...
    def whole_rows(self, rows: np.ndarray) -> np.ndarray: ...
    def take(
        self,
        start: int,
        stop: int,
        rows: np.ndarray | None = None,
        templates: np.ndarray | None = None,
        whole: np.ndarray | None = None,
    ) -> RawExample: ...
    def atoms(self, residues: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None: ...
    def take_residues(
        self,
        residues: np.ndarray,
        rows: np.ndarray | None = None,
        templates: np.ndarray | None = None,
        whole: np.ndarray | None = None,
    ) -> RawExample: ...
    def ca_positions(self) -> tuple[np.ndarray, np.ndarray] | None: ...


@dataclass(frozen=True)
class Assembly:
    """Chains that are folded together, in the order of the input, each with its alignment, atoms and templates.

    Chains of one sequence are copies of one entity; they have the same alignment and the same templates.
    """

    name: str
    ids: tuple[str, ...]  # [K], the chains' names in input and output, all different
    chains: tuple[Example, ...]  # [K]
    # What moves the atoms of each chain to their place in the assembly: float64 [K, 3, 4], rotation and translation in
    # angstrom; None: they are there.  A biological assembly may have a chain several times, moved by its symmetry.
    operators: np.ndarray | None = None

    @cached_property
    def entity_id(self) -> np.ndarray:
        """Return each chain's entity, int64 [K], numbered from 1 in the order of their first chains."""
        numbers: dict[str, int] = {}
        return np.array([numbers.setdefault(chain.sequence, len(numbers) + 1) for chain in self.chains])

    @cached_property
    def sym_id(self) -> np.ndarray:
        """Return each chain's number among the copies of its entity, int64 [K], from 1."""
        entity = self.entity_id
        return np.array([int((entity[: place + 1] == entity[place]).sum()) for place in range(len(entity))])

    @property
    def length(self) -> int:
        """Return the number of residues of all chains."""
        return sum(chain.length for chain in self.chains)
