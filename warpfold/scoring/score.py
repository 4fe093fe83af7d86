"""Score a predicted structure against a reference: pair their residues, then measure.

Chains are paired by sequence, and among equal ones by the interfaces (`chain_mapping.py`); residues by alignment or by
number.  Names and numbering of chains need not agree.  Residues that the prediction lacks count against it; a whole
chain of the reference that has no counterpart is left out of the scores of the structure as a whole, and named, and
counts against it in those of the interfaces (`score_complex.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from warpfold.data.structure.assemblies import apply_operator
from warpfold.data.structure.chain import Chain, Structure
from warpfold.data.structure.mmcif import read_structure
from warpfold.errors import UserError
from warpfold.geometry.residue import ATOM14_NAMES, ATOM14_SWAP, ATOM_ORDER, RESTYPES
from warpfold.scoring import metrics
from warpfold.scoring.chain_mapping import CA, count_equal, map_chains, named_chains, similar_chains, with_ca
from warpfold.scoring.dockq import Array, Docking
from warpfold.scoring.score_complex import ComplexScore, compare_interfaces, interface_lddt


@dataclass(frozen=True, kw_only=True, repr=False)
class Score:
    """A prediction against a reference; scores from 0 to 1, RMSD in angstrom.

    lddt is None where one of the two has only Ca.
    """

    lddt_ca: float
    lddt: float | None  # all heavy atoms, symmetric side chains named for the best score
    tm: float
    gdt_ts: float
    gdt_ha: float
    rmsd: float  # of paired Ca, after the superposition that is best for it
    residues: int  # of the reference, with Ca
    paired: int  # of these, the residues that the prediction has
    identity: float  # of the paired residues
    chains: dict[str, str]  # predicted -> reference
    left_out: list[str]  # chains of the reference that have no counterpart
    extra: list[str]  # chains of the prediction that have none
    dropped: list[str]  # polymers of either file that are no protein, or have no atoms, with the reason
    notes: list[str]  # how the files were read, where that is not plain
    complex: ComplexScore | None  # None for a reference of one chain, and where one of the two has only Ca

    def __repr__(self) -> str:
        over = f"{self.paired} of {self.residues} residues"
        return f"<Score: lDDT-Ca {self.lddt_ca:.4f}, TM {self.tm:.4f}, RMSD {self.rmsd:.3f} over {over}>"

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON can hold it; NaN becomes null."""
        return {k: None if isinstance(v, float) and np.isnan(v) else v for k, v in asdict(self).items()}

    def rows(self) -> list[tuple[str, str]]:
        """Return the lines of a table for people: what, value."""
        shown = [
            ("lDDT-Ca", f"{self.lddt_ca:.4f}"),
            ("lDDT, all atoms", "- (Ca only)" if self.lddt is None else f"{self.lddt:.4f}"),
            ("TM-score", f"{self.tm:.4f}"),
            ("GDT-TS", f"{self.gdt_ts:.4f}"),
            ("GDT-HA", f"{self.gdt_ha:.4f}"),
            ("RMSD of Ca", f"{self.rmsd:.3f} Å"),
            ("residues paired", f"{self.paired} of {self.residues}, {self.identity:.0%} identical"),
            ("chains", ", ".join(f"{p} → {r}" for p, r in self.chains.items())),
        ]
        for what, names in (("left out", self.left_out), ("not in reference", self.extra), ("dropped", self.dropped)):
            shown += [(what, ", ".join(names))] if names else []
        shown += [("note", note) for note in self.notes]
        if self.complex:
            shown += self.complex.rows()
        elif self.lddt is None and len(self.chains) + len(self.left_out) > 1:
            shown.append(("interfaces", "- (Ca only)"))
        return shown


def score_files(
    predicted: str | Path | Structure,
    reference: str | Path | Structure,
    chains: Mapping[str, str] | None = None,
    assembly: bool = False,
    allow_unplaced: bool = False,
) -> Score:
    """Score one mmCIF or PDB file, or what is in memory, against another; `chains` as in `score`.

    assembly: against the reference's first biological assembly, instead of the chains as they are in its file.
    allow_unplaced: score although residues of a file are in none of its chains; `Score.notes` counts them.
    Errors: UserError for files that cannot be read or have nothing in common, and for unplaced residues.
    """
    ours, theirs = (
        given if isinstance(given, Structure) else read_structure(given, ca_only=True)
        for given in (predicted, reference)
    )
    if not allow_unplaced:
        for structure, given in ((ours, predicted), (theirs, reference)):
            structure.check_placed(
                structure.id if isinstance(given, Structure) else str(given),
                "correct the file, or pass --allow-unplaced to score without them",
            )
    if assembly:
        theirs = assembled(theirs)
    try:
        return score(ours, theirs, chains)
    except UserError as error:
        names = (given.id if isinstance(given, Structure) else given for given in (predicted, reference))
        raise UserError(f"{' against '.join(map(str, names))}: {error}") from error


def assembled(structure: Structure) -> Structure:
    """Return the first biological assembly of an entry: its chains in their places, copies as A-2.

    Errors: UserError for an operator that is missing or moves nothing rigidly.
    """
    placed = structure.assembly()
    chains = {}
    for name, (chain, operator) in zip(placed.ids, placed.chains):
        one = structure.chains[chain]
        moved = apply_operator(operator, one.positions) * one.mask[..., None]
        chains[name] = replace(one, id=name, positions=moved)
    return replace(structure, chains=chains)


def score(predicted: Structure, reference: Structure, chains: Mapping[str, str] | None = None) -> Score:
    """Pair chains and residues, then measure; arguments and errors as of `pair`."""
    return pair(predicted, reference, chains).score()


def pair(predicted: Structure, reference: Structure, chains: Mapping[str, str] | None = None) -> "Paired":
    """Find which chains and residues correspond.

    chains: predicted -> reference chain names. By default they are found by sequence and position. One pair of groups
    of reference chains, {"A": "HL"}, makes one partner of each group (`_partners`).
    Errors: UserError where no chains match, or a named one does not exist.
    """
    ours, theirs = predicted.chains, reference.chains
    if chains and (groups := chain_groups(chains, ours, theirs)):
        kept = replace(reference, chains={name: theirs[name] for group in groups for name in group})
        return _partners(pair(predicted, kept), groups)
    if chains:
        similar = named_chains(ours, theirs, chains, (predicted.id, reference.id))
    else:
        similar = similar_chains(ours, theirs)
    docking = Docking(ours, theirs, similar)
    found = dict(chains) if chains else map_chains(docking, similar)
    sides = {p: _sides(ours[p], theirs[r], similar[p, r]) for p, r in found.items()}
    return Paired(predicted, reference, found, similar, docking, sides)


def chain_groups(
    chains: Mapping[str, str], predicted: Mapping[str, Chain], reference: Mapping[str, Chain]
) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Return the two groups of reference chains that {"A": "HL"} or {"A": "H+L"} names; None if it names a pair.

    Errors: UserError if a chain is in both groups.
    """
    (first, second), *more = chains.items()
    if more or (first in predicted and second in reference):
        return None
    groups = tuple(tuple(text.split("+") if "+" in text else text) for text in (first, second))
    if not all(name in reference for group in groups for name in group):
        return None
    if repeated := [name for name in groups[0] + groups[1] if (groups[0] + groups[1]).count(name) > 1]:
        raise UserError(f"chains {first}:{second}: chain {repeated[0]} is in it twice; name each chain once")
    return groups  # type: ignore[return-value]  # of two


def _partners(paired: "Paired", groups: Sequence[Sequence[str]]) -> "Paired":
    """Join the chains of each group to one partner, so that its interface is measured as one: A against H+L.

    The residues of a group stand one after another, and correspond as they do chain by chain.
    """
    stands = {r: p for p, r in paired.chains.items()}
    ours, theirs, similar, found = dict[str, Chain](), dict[str, Chain](), dict[tuple[str, str], Array](), {}
    for group in groups:
        present = [name for name in group if name in stands]
        name, called = "+".join(group), "+".join(stands[name] for name in present)
        theirs[name] = join_chains(name, [paired.reference.chains[r] for r in group])
        if not present:
            continue
        ours[called] = join_chains(called, [paired.predicted.chains[stands[r]] for r in present])
        starts = dict(zip(group, np.cumsum([0, *(len(paired.reference.chains[r].sequence) for r in group)]).tolist()))
        first, pairs = 0, []
        for r in present:
            pairs.append(paired.similar[stands[r], r] + np.array([first, starts[r]]))
            first += len(paired.predicted.chains[stands[r]].sequence)
        similar[called, name] = np.concatenate(pairs)
        found[called] = name
    predicted, reference = replace(paired.predicted, chains=ours), replace(paired.reference, chains=theirs)
    sides = {p: _sides(ours[p], theirs[r], similar[p, r]) for p, r in found.items()}
    return Paired(predicted, reference, found, similar, Docking(ours, theirs, similar), sides)


def join_chains(name: str, chains: Sequence[Chain]) -> Chain:
    """Make one chain of several, their residues one after another."""
    return Chain(
        id=name,
        sequence="".join(chain.sequence for chain in chains),
        positions=np.concatenate([chain.positions for chain in chains]),
        mask=np.concatenate([chain.mask for chain in chains]),
        residue_index=np.arange(sum(len(chain.sequence) for chain in chains), dtype=np.int64),
        author_numbers=tuple(number for chain in chains for number in chain.author_numbers),
    )


@dataclass(frozen=True)
class Paired:
    """A prediction and a reference whose chains and residues are paired, ready to be measured.

    chains: predicted -> reference.  similar: (predicted, reference) -> paired residues [K, 2] of all chains that may
    correspond.  sides: by predicted chain, what its residues are compared with.
    """

    predicted: Structure
    reference: Structure
    chains: dict[str, str]
    similar: Mapping[tuple[str, str], Array]
    docking: Docking
    sides: "dict[str, Sides]"

    @cached_property
    def arrays(self) -> tuple[Array, Array, Array, Array, Array]:
        """Those of all sides, one after another."""
        positions, known, truth, mask, swap = zip(*(side.arrays for side in self.sides.values()))
        return tuple(map(np.concatenate, (positions, known, truth, mask, swap)))  # type: ignore[return-value]

    def lddt_ca_per_residue(self) -> Array:
        """Return lDDT-Ca of each residue of `arrays` [N]; NaN for one without others near it."""
        positions, known, truth, mask, _ = self.arrays
        return metrics.lddt_per_residue(positions[:, [CA]], truth[:, [CA]], mask[:, [CA]], known[:, [CA]])

    def score(self) -> Score:
        """Measure."""
        found, theirs, sides = self.chains, self.reference.chains, list(self.sides.values())
        positions, known, truth, mask, swap = self.arrays
        both = known[:, CA]
        overlap = metrics.overlap(positions[both, CA], truth[both, CA], length=len(truth))
        lddt, interfaces = None, None
        if mask.sum() > mask[:, CA].sum() and known.sum() > both.sum():  # more than Ca on both sides
            renamed = metrics.rename_symmetric(positions, truth, mask, known, swap)
            lddt = metrics.lddt(renamed, truth, mask, known)
            if len(theirs) > 1:
                ilddt = _interface_lddt(renamed, sides, found, theirs)
                interfaces = compare_interfaces(self.docking, self.similar, found, ilddt)
        return Score(
            lddt_ca=metrics.lddt(positions[:, [CA]], truth[:, [CA]], mask[:, [CA]], known[:, [CA]]),
            lddt=lddt,
            tm=overlap.tm,
            gdt_ts=overlap.gdt_ts,
            gdt_ha=overlap.gdt_ha,
            rmsd=metrics.rmsd(positions[both, CA], truth[both, CA]),
            residues=len(truth),
            paired=int(both.sum()),
            identity=sum(side.equal for side in sides) / max(1, int(both.sum())),
            chains=found,
            left_out=[name for name in theirs if name not in found.values()],
            extra=[name for name in self.predicted.chains if name not in found],
            dropped=[
                f"{structure.id} {name}: {why}"
                for structure in (self.predicted, self.reference)
                for name, why in structure.dropped.items()
            ],
            notes=[
                f"{structure.id}: {note}"
                for structure in (self.predicted, self.reference)
                for note in (*structure.notes, structure.unplaced_note)
                if note
            ],
            complex=interfaces,
        )


def _interface_lddt(
    renamed: Array, sides: Sequence["Sides"], found: Mapping[str, str], reference: Mapping[str, Chain]
) -> dict[tuple[str, str], Array]:
    """Count the pairs of atoms of each two chains of the reference, also of those that the prediction lacks."""
    stands = dict(zip(found.values(), np.split(renamed, np.cumsum([len(side.arrays[0]) for side in sides])[:-1])))
    known = {r: side.arrays for r, side in zip(found.values(), sides)}
    names, parts = [], []
    for name, chain in reference.items():
        if name in known:
            _, seen, truth, mask, _ = known[name]
            parts.append((stands[name], truth, mask, seen))
        else:
            mask = chain.mask > 0
            parts.append((np.zeros_like(chain.positions), chain.positions, mask, np.zeros_like(mask)))
        names += [name] * len(parts[-1][0])
    predicted, truth, mask, seen = (np.concatenate(arrays) for arrays in zip(*parts))
    return interface_lddt(predicted, truth, mask, seen, names)


@dataclass(frozen=True)
class Sides:
    """The reference's residues that have Ca, and the predicted ones paired with them.

    arrays: predicted positions [N, 37, 3] and mask, true positions and mask, each atom's symmetric twin [N, 37].
    ours, theirs: the predicted residue in its chain, -1 for none, and the reference's in its own [N].
    """

    arrays: tuple[Array, Array, Array, Array, Array]
    equal: int  # residues that are the same amino acid
    ours: Array
    theirs: Array


def _sides(a: Chain, b: Chain, pairs: Array) -> Sides:
    """Pair the atoms of two chains by name; different amino acids share the backbone and some more."""
    pairs = with_ca(a, b, pairs)
    i, j = pairs.T
    positions, known = np.zeros_like(b.positions), np.zeros_like(b.mask)
    positions[j], known[j] = a.positions[i], a.mask[i]
    ours = np.full(len(b.mask), -1, np.int64)
    ours[j] = i
    seen = b.mask[:, CA] > 0
    swap = _SWAP37[[RESTYPES.find(letter) for letter in b.sequence]]  # -1, the last row, for X
    arrays = (positions[seen], known[seen] > 0, b.positions[seen], b.mask[seen] > 0, swap[seen])
    return Sides(arrays, count_equal(a, b, pairs), ours[seen], np.flatnonzero(seen))


# int64 [21, 37]: the twin of each atom of a symmetric side chain, itself for others; the last row is X.
_SWAP37 = np.tile(np.arange(len(ATOM_ORDER)), (21, 1))
for _restype, _names in enumerate(ATOM14_NAMES):
    for _slot, _name in enumerate(_names):
        if _name:
            _SWAP37[_restype, ATOM_ORDER[_name]] = ATOM_ORDER[_names[ATOM14_SWAP[_restype, _slot]]]
