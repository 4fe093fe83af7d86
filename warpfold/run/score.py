"""Score a predicted structure against a reference: pair their residues, then measure.

Chains are paired by sequence, and among equal ones by where they stand; residues by alignment or by number.  Names and
numbering of chains need not agree.  Residues that the prediction lacks count against it; a whole chain of the
reference that has no counterpart is left out, and named.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from warpfold.data.structure.chain import Chain, Structure
from warpfold.data.structure.mmcif import read_structure
from warpfold.errors import UserError
from warpfold.geometry.residue import ATOM14_NAMES, ATOM14_SWAP, ATOM_ORDER, RESTYPES
from warpfold.run import metrics

CA = ATOM_ORDER["CA"]
MIN_IDENTITY = 0.3  # of the shorter sequence; below it two chains are different proteins
SAME_PROTEIN = 0.9  # chains this near to the best match are equally good, and position decides


@dataclass(frozen=True, kw_only=True)
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
        return shown + ([("left out", ", ".join(self.left_out))] if self.left_out else [])


def score_files(predicted: str | Path, reference: str | Path, chains: Mapping[str, str] | None = None) -> Score:
    """Score one mmCIF or PDB file against another; `chains` as in `score`.

    Errors: UserError for files that cannot be read or have nothing in common.
    """
    ours, theirs = (read_structure(path, ca_only=True) for path in (predicted, reference))
    try:
        return score(ours, theirs, chains)
    except UserError as error:
        raise UserError(f"{predicted} against {reference}: {error}") from error


def score(predicted: Structure, reference: Structure, chains: Mapping[str, str] | None = None) -> Score:
    """Pair chains and residues, then measure.

    chains: predicted -> reference chain names; default: found by sequence and position.
    Errors: UserError where no chains match, or a named one does not exist.
    """
    found = _named_chains(predicted, reference, chains) if chains else _match_chains(predicted, reference)
    sides = [_paired(predicted.chains[p], reference.chains[r]) for p, r in found.items()]
    positions, known, truth, mask, swap = (np.concatenate(parts) for parts in zip(*(side.arrays for side in sides)))
    both = known[:, CA]
    overlap = metrics.overlap(positions[both, CA], truth[both, CA], length=len(truth))
    lddt = None
    if mask.sum() > mask[:, CA].sum() and known.sum() > both.sum():  # more than Ca on both sides
        renamed = metrics.rename_symmetric(positions, truth, mask, known, swap)
        lddt = metrics.lddt(renamed, truth, mask, known)
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
        left_out=[name for name in reference.chains if name not in found.values()],
    )


@dataclass(frozen=True)
class _Sides:
    """The reference's residues that have Ca, and the predicted ones paired with them.

    arrays: predicted positions [N, 37, 3] and mask, true positions and mask, each atom's symmetric twin [N, 37].
    """

    arrays: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
    equal: int  # residues that are the same amino acid


def _paired(a: Chain, b: Chain) -> _Sides:
    """Pair the atoms of two chains by name; different amino acids share the backbone and some more."""
    i, j = pair_residues(a, b).T
    positions, known = np.zeros_like(b.positions), np.zeros_like(b.mask)
    positions[j], known[j] = a.positions[i], a.mask[i]
    seen = b.mask[:, CA] > 0
    swap = _SWAP37[[RESTYPES.find(letter) for letter in b.sequence]]  # -1, the last row, for X
    arrays = (positions[seen], known[seen] > 0, b.positions[seen], b.mask[seen] > 0, swap[seen])
    return _Sides(arrays, _equal(a, b, i, j))


def _equal(a: Chain, b: Chain, i: np.ndarray, j: np.ndarray) -> int:
    return sum(a.sequence[x] == b.sequence[y] for x, y in zip(i, j))


def pair_residues(a: Chain, b: Chain) -> np.ndarray:
    """Return pairs [K, 2] of residues that have Ca in both chains: by alignment, or by number if that fits as well.

    Numbers decide where an alignment cannot, for example on which side of a gap a repeated residue stands.
    """
    aligned = metrics.align(a.sequence, b.sequence)
    place = {number: j for j, number in enumerate(b.author_numbers) if number}
    numbered = np.array([(i, place[x]) for i, x in enumerate(a.author_numbers) if x in place], np.int64).reshape(-1, 2)
    both = [p[(a.mask[p[:, 0], CA] > 0) & (b.mask[p[:, 1], CA] > 0)] for p in (aligned, numbered)]
    equal = [_equal(a, b, *pairs.T) for pairs in both]
    return both[1] if equal[1] >= equal[0] and len(both[1]) >= len(both[0]) else both[0]


def _named_chains(predicted: Structure, reference: Structure, chains: Mapping[str, str]) -> dict[str, str]:
    for structure, names in ((predicted, chains.keys()), (reference, chains.values())):
        for name in names:
            if name not in structure.chains:
                raise UserError(f"{structure.id} has no protein chain {name}; it has {', '.join(structure.chains)}")
    return dict(chains)


def _match_chains(predicted: Structure, reference: Structure) -> dict[str, str]:
    """Assign predicted to reference chains of the same sequence; where several fit, take what superposes best."""
    pairs, identity = {}, {}
    for p, a in predicted.chains.items():
        for r, b in reference.chains.items():
            pairs[p, r] = pair_residues(a, b)
            shorter = min(np.sum(a.mask[:, CA] > 0), np.sum(b.mask[:, CA] > 0))
            identity[p, r] = _equal(a, b, *pairs[p, r].T) / max(1, int(shorter))
    best = {r: max(identity[p, r] for p in predicted.chains) for r in reference.chains}
    candidates = [k for k, v in identity.items() if v >= MIN_IDENTITY and v >= SAME_PROTEIN * best[k[1]]]
    if not candidates:
        most = max(identity.values(), default=0.0)
        raise UserError(f"no chain of one is like a chain of the other (at best {most:.0%} of the residues are equal)")
    chosen: dict[str, str] = {}
    highest = -1.0
    for seed in candidates:
        assigned, fit = _assign(seed, candidates, pairs, predicted, reference)
        if fit > highest:
            chosen, highest = assigned, fit
    return {p: chosen[p] for p in predicted.chains if p in chosen}


def _assign(
    seed: tuple[str, str],
    candidates: list[tuple[str, str]],
    pairs: Mapping[tuple[str, str], np.ndarray],
    predicted: Structure,
    reference: Structure,
) -> tuple[dict[str, str], float]:
    """Superpose on the `seed` pair, then assign the nearest pairs one by one; also return the sum of their TM terms."""

    def points(key: tuple[str, str]) -> tuple[np.ndarray, np.ndarray]:
        i, j = pairs[key].T
        return predicted.chains[key[0]].positions[i, CA], reference.chains[key[1]].positions[j, CA]

    rotation, translation = metrics.superpose(*points(seed))
    terms = {}
    for key in candidates:
        a, b = points(key)
        distance = np.linalg.norm(a @ rotation.T + translation - b, axis=-1)
        terms[key] = float(np.sum(1 / (1 + (distance / metrics.tm_d0(len(b))) ** 2)))
    assigned: dict[str, str] = {}
    fit = 0.0
    for p, r in sorted(candidates, key=lambda key: (key != seed, -terms[key])):
        if p not in assigned and r not in assigned.values():
            assigned[p] = r
            fit += terms[p, r]
    return assigned, fit


def _swap37() -> np.ndarray:
    """Return int64 [21, 37]: the twin of each atom of a symmetric side chain, itself for others; the last row is X."""
    swap = np.tile(np.arange(len(ATOM_ORDER)), (21, 1))
    for restype, names in enumerate(ATOM14_NAMES):
        for slot, name in enumerate(names):
            if name:
                swap[restype, ATOM_ORDER[name]] = ATOM_ORDER[names[ATOM14_SWAP[restype, slot]]]
    return swap


_SWAP37 = _swap37()
