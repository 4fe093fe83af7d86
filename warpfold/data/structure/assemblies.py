"""Build biological assemblies: select the chains of an entry and the operators that place them.

Readers store the rows of the mmCIF categories as text (`AssemblyTable`). `AssemblyTable.place` interprets them.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from warpfold.errors import UserError

# Limit per row of the table: a virus with its crystal symmetry has about 1,700 operators.
MAX_OPERATORS = 10_000
MAX_CHAINS = 100_000  # of one assembly
IDENTITY = np.eye(3, 4)
# Tolerance of R Rᵀ - 1 for an operator's rotation R. Files have at least five decimals.
ROTATION_TOLERANCE = 0.01
# Largest translation in angstrom. The largest unit cells measure about 1,500.
MAX_TRANSLATION = 1e6
# One term of an operator expression: parenthesised groups to multiply, or a single item.
_TERM = re.compile(r"(\([^()]*\))+|[^(),]+")


class PlacedChain(NamedTuple):
    """A chain of an assembly: its name in the entry, and the operator [3, 4] (rotation, translation in angstrom)."""

    chain: str
    operator: np.ndarray  # float64 [3, 4]


def apply_operator(operator: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Apply an operator [3, 4] (rotation, translation) to positions [*, 3] in angstrom; returns float32."""
    return (positions @ operator[:, :3].T + operator[:, 3]).astype(np.float32)


@dataclass(frozen=True)
class PlacedChains:
    """The protein chains of an assembly.

    left_out: the reason for each omitted component, by chain name or ligand name ("HEM"). Water is not listed.
    """

    chains: tuple[PlacedChain, ...]
    left_out: dict[str, str]

    @property
    def ids(self) -> tuple[str, ...]:
        """Return a unique name for each chain. Copies are numbered as in the PDB: A, B, A-2, B-2.

        A name that is taken already, such as an entry's own chain A-2, is skipped.
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
    """The assemblies of a file, as text. Without `generators`, all chains form one assembly.

    source: the file's name in errors. generators (`pdbx_struct_assembly_gen`): assembly, operator expression, and
    comma-separated label_asym_ids. operators (`pdbx_struct_oper_list`): the 12 numbers of each operator, row by row.
    names: the chain name of each polymer's label_asym_id. entities: the entity of each label_asym_id. compounds: the
    names of non-polymer entities ("HEM", "HOH").
    """

    source: str = "<structure>"
    generators: tuple[tuple[str, str, str], ...] = ()
    operators: dict[str, tuple[str, ...]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    entities: dict[str, str] = field(default_factory=dict)
    compounds: dict[str, str] = field(default_factory=dict)

    @property
    def ids(self) -> list[str]:
        """Return the names of the assemblies in file order, usually "1", "2" and so on."""
        return list(dict.fromkeys(row[0] for row in self.generators)) or ["1"]

    def place(self, assembly: str, kept: Mapping[str, object], dropped: Mapping[str, str]) -> PlacedChains:
        """List the placed chains of an assembly, grouped by operator, in file order.

        kept: the entry's protein chains by name. dropped: the reason for each dropped chain.
        Raises KeyError for an unknown assembly, and UserError for a missing operator, an operator that is not a rigid
        motion, or too many chains.
        """
        if assembly not in self.ids:
            raise KeyError(assembly)
        if not self.generators:
            return PlacedChains(tuple(PlacedChain(name, IDENTITY) for name in kept), dict(dropped))
        # Keyed by chain and operator, so that a chain listed twice with one operator appears once.
        placed: dict[tuple[str, tuple[float, ...]], PlacedChain] = {}
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
            # Operators that place only ligands are not needed.
            if chains:
                for operator in self._expand_operators(expression):
                    # Unlike their bytes, the numbers -0.0 and 0.0 are equal.
                    key = tuple(operator.ravel().tolist())
                    placed |= {(chain, key): PlacedChain(chain, operator) for chain in chains}
                    if len(placed) > MAX_CHAINS:
                        raise UserError(
                            f"{self.source}: assembly {name} has more than {MAX_CHAINS} chains. Correct the file."
                        )
        return PlacedChains(tuple(placed.values()), left_out)

    def _expand_operators(self, expression: str) -> list[np.ndarray]:
        """Expand an operator expression ("1", "1,3", "(1-60)", "(X0)(1-5,7)") into operators [3, 4].

        In a product the rightmost operator is applied first, as the mmCIF dictionary defines it.
        """
        text = "".join(expression.split())
        terms = [match[0] for match in _TERM.finditer(text)]
        if not terms or ",".join(terms) != text:
            raise UserError(f"{self.source}: {text[:40]!r} names no operators of an assembly. Correct the file.")
        expanded: list[np.ndarray] = []
        for term in terms:
            products = [np.eye(4)]
            for group in term.strip("()").split(")("):
                names = self._list_names(group)
                if not names:
                    raise UserError(f"{self.source}: {term[:40]!r} names no operators of assemblies. Correct the file.")
                if len(expanded) + len(products) * len(names) > MAX_OPERATORS:
                    raise UserError(
                        f"{self.source}: {text[:40]} are more than {MAX_OPERATORS} operators. Correct the file."
                    )
                operators = [self._parse_operator(name) for name in names]
                products = [left @ right for left in products for right in operators]
            expanded += products
        return [operator[:3] for operator in expanded]

    def _list_names(self, group: str) -> list[str]:
        """List the operator names of a group such as "1-5,7". Stops soon after `MAX_OPERATORS` names."""
        names: list[str] = []
        for item in group.split(","):
            ends = re.fullmatch(r"(\d{1,9})-(\d{1,9})", item, re.ASCII)
            if ends is None or item in self.operators:
                names.append(item)
            else:
                names += map(str, range(int(ends[1]), int(ends[2]) + 1)[: MAX_OPERATORS + 1])
            if len(names) > MAX_OPERATORS:
                break
        return names

    def _parse_operator(self, name: str) -> np.ndarray:
        """Parse an operator into a homogeneous matrix, float64 [4, 4]."""
        if name not in self.operators:
            raise UserError(
                f"{self.source}: an assembly needs operator {name[:40]}, which is missing. Fetch the file again."
            )
        try:
            rows = np.array(self.operators[name], np.float64).reshape(3, 4)
        except ValueError:
            rows = np.full((3, 4), np.nan)
        if not is_rigid(rows):
            raise UserError(f"{self.source}: operator {name} of an assembly is no rigid motion. Fetch the file again.")
        return np.concatenate([rows, [[0.0, 0.0, 0.0, 1.0]]])


def is_rigid(operators: np.ndarray) -> bool:
    """Return whether all operators [..., 3, 4] are proper rotations with a translation below `MAX_TRANSLATION`."""
    rotation = operators[..., :3]
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(rotation @ rotation.swapaxes(-1, -2) - np.eye(3))
        is_near = (np.abs(operators) < MAX_TRANSLATION).all() and (error < ROTATION_TOLERANCE).all()
    return bool(is_near and (np.linalg.det(rotation) > 0).all())
