"""Biological assemblies: which chains of an entry belong together, and the operators that move them there.

Readers keep the few rows of mmCIF's categories as text (`AssemblyTable`); what they mean is found when it is asked for.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from warpfold.errors import UserError

MOST_OPERATORS = 10_000  # of one row: a virus with its crystal's symmetry has some 1,700
MOST_CHAINS = 100_000  # of one assembly
IDENTITY = np.eye(3, 4)
ROTATION_ERROR = 0.01  # of an operator's rotation times its transpose: files have at least five decimals
FARTHEST = 1e6  # angstrom that an operator may move a chain: the largest crystals' cells have some 1,500
_GROUPS = re.compile(r"(\([^()]*\))+|[^(),]+")  # one term of an expression: groups to multiply, or one item


class PlacedChain(NamedTuple):
    """A chain in an assembly: its name in the entry, and what moves it there, rotation and translation in angstrom."""

    chain: str
    operator: np.ndarray  # float64 [3, 4]


def apply_operator(operator: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return positions [*, 3] moved by an operator [3, 4], rotation and translation: float32, angstrom."""
    return (positions @ operator[:, :3].T + operator[:, 3]).astype(np.float32)


@dataclass(frozen=True)
class PlacedChains:
    """The protein chains of an assembly, and why its other parts are left out.

    left_out: by chain name, or what a ligand is called ("HEM"); water is not mentioned.
    """

    chains: tuple[PlacedChain, ...]
    left_out: dict[str, str]

    @property
    def ids(self) -> tuple[str, ...]:
        """Return different names for the chains, of which some come several times: A, B, A-2, B-2, as the PDB has them.

        Where an entry has a chain A-2 itself, the second A is A-3 or A-2-2, whichever of both comes first.
        """
        names: dict[str, None] = {}
        times: Counter[str] = Counter()
        for chain, _ in self.chains:
            name = chain
            while name in names:
                times[chain] += 1
                name = f"{chain}-{times[chain] + 1}"
            names[name] = None
        return tuple(names)


@dataclass(frozen=True)
class AssemblyTable:
    """What a file says of its assemblies.  Without `generators`, all its chains are one assembly."""

    source: str = "<structure>"
    # `pdbx_struct_assembly_gen`: the assembly, its operators as an expression, mmCIF's chain names with commas.
    generators: tuple[tuple[str, str, str], ...] = ()
    operators: dict[str, tuple[str, ...]] = field(default_factory=dict)  # `pdbx_struct_oper_list`: 12 numbers, by rows
    names: dict[str, str] = field(default_factory=dict)  # of polymers, by mmCIF's chain names
    entities: dict[str, str] = field(default_factory=dict)  # of all mmCIF's chain names
    compounds: dict[str, str] = field(default_factory=dict)  # of entities that are no polymer: "HEM", "HOH"

    @property
    def ids(self) -> list[str]:
        """Return the assemblies' names, in the order of the file: most often "1", "2" ..."""
        return list(dict.fromkeys(row[0] for row in self.generators)) or ["1"]

    def place(self, assembly: str, kept: Mapping[str, object], dropped: Mapping[str, str]) -> PlacedChains:
        """Return the chains of an assembly, those of one operator after those of another, in the order of the file.

        kept: the entry's protein chains by name.  dropped: why others were dropped.
        Errors: UserError for an operator that the file does not have, or that is not a rigid motion, and for too many
        chains; KeyError for an assembly that it does not have.
        """
        if assembly not in self.ids:
            raise KeyError(assembly)
        if not self.generators:
            return PlacedChains(tuple(PlacedChain(name, IDENTITY) for name in kept), dict(dropped))
        placed: dict[tuple[str, bytes], PlacedChain] = {}  # a chain that is named twice in one place is there once
        left_out: dict[str, str] = {}
        for name, expression, labels in self.generators:
            if name != assembly:
                continue
            chains = []
            for label in filter(None, map(str.strip, labels.split(","))):
                chain = self.names.get(label, "")
                if chain in kept:
                    chains.append(chain)
                elif chain:
                    left_out[chain] = dropped.get(chain, "was dropped")
                elif label not in self.entities:
                    left_out[label] = "is not in the file"
                else:
                    compound = self.compounds.get(self.entities[label], "a branched molecule")
                    left_out |= {} if compound in ("HOH", "DOD") else {compound: "not a polymer"}
            if chains:  # the operators of ligands alone are not needed
                for operator in self._expand(expression):
                    key = (operator + 0.0).tobytes()  # -0.0 becomes 0.0
                    placed |= {(chain, key): PlacedChain(chain, operator) for chain in chains}
                    if len(placed) > MOST_CHAINS:
                        raise UserError(
                            f"{self.source}: assembly {name} has more than {MOST_CHAINS} chains; correct the file"
                        )
        return PlacedChains(tuple(placed.values()), left_out)

    def _expand(self, expression: str) -> list[np.ndarray]:
        """Return the operators that an expression names: "1", "1,3", "(1-60)", "(X0)(1-5,7)".

        Of a product the right one is applied first, as the dictionary has it.
        """
        text = "".join(expression.split())
        terms = [found[0] for found in _GROUPS.finditer(text)]
        if not terms or ",".join(terms) != text:
            raise UserError(f"{self.source}: {text[:40]!r} names no operators of an assembly; correct the file")
        found: list[np.ndarray] = []
        for term in terms:
            products = [np.eye(4)]
            for group in term.strip("()").split(")("):
                names = self._items(group)
                if not names:
                    raise UserError(f"{self.source}: {term[:40]!r} names no operators of an assembly; correct the file")
                if len(found) + len(products) * len(names) > MOST_OPERATORS:
                    raise UserError(
                        f"{self.source}: {text[:40]} are more than {MOST_OPERATORS} operators; correct the file"
                    )
                operators = [self._operator(name) for name in names]
                products = [left @ right for left in products for right in operators]
            found += products
        return [operator[:3] for operator in found]

    def _items(self, group: str) -> list[str]:
        """Return the names of operators in "1-5,7", those that are far too many cut short."""
        names: list[str] = []
        for item in group.split(","):
            ends = re.fullmatch(r"(\d{1,9})-(\d{1,9})", item, re.ASCII)
            if ends is None or item in self.operators:
                names.append(item)
            else:
                names += map(str, range(int(ends[1]), int(ends[2]) + 1)[: MOST_OPERATORS + 1])
            if len(names) > MOST_OPERATORS:
                break
        return names

    def _operator(self, name: str) -> np.ndarray:
        """Return an operator as float64 [4, 4]."""
        if name not in self.operators:
            raise UserError(
                f"{self.source}: an assembly needs operator {name[:40]}, which is missing; fetch the file again"
            )
        try:
            rows = np.array(self.operators[name], np.float64).reshape(3, 4)
        except ValueError:
            rows = np.full((3, 4), np.nan)
        if not is_rigid(rows):
            raise UserError(f"{self.source}: operator {name} of an assembly is no rigid motion; fetch the file again")
        return np.concatenate([rows, [[0.0, 0.0, 0.0, 1.0]]])


def is_rigid(operators: np.ndarray) -> bool:
    """Return whether operators [..., 3, 4] are all rotations with translations that a file of atoms could have."""
    rotation = operators[..., :3]
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(rotation @ rotation.swapaxes(-1, -2) - np.eye(3))
        near = (np.abs(operators) < FARTHEST).all() and (error < ROTATION_ERROR).all()
    return bool(near and (np.linalg.det(rotation) > 0).all())
