"""Relax structures: AlphaFold's restrained minimisation, until no bond is broken and no atoms clash (Supp. 1.8.6).

`relax_chains` works in memory, `relax_paths` on the folders of `warpfold predict` and on structure files.
"""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from warpfold.data.structure.chain import Chain
from warpfold.errors import UserError
from warpfold.geometry import atoms as geometry
from warpfold.geometry.residue import ATOM37_MASK, ATOM_ORDER, RESTYPE_ORDER, UNKNOWN
from warpfold.model.violations import connection_violations, within_residue_violations
from warpfold.prediction.sanity import check_geometry, find_clashes
from warpfold.relax.amber import OXT, Amber, ModelledResidues

MAX_ROUNDS = 3  # RELAX_MAX_OUTER_ITERATIONS of AlphaFold 2.3's run_alphafold.py; in 2.0 it was 20
N, CA, C = (ATOM_ORDER[name] for name in ("N", "CA", "C"))
NEW_CHI = {"P": (-25.0, 36.0)}  # degrees: proline's ring; others begin as the most frequent rotamers do
USUAL_CHI = (-65.0, 180.0, 180.0, 180.0)


@dataclass(frozen=True)
class Flaws:
    """Which of R residues violate what chemistry allows, with DeepMind's tolerances (Supp. 1.9.11); bool [R] each."""

    bonds: np.ndarray  # the length or an angle of a peptide bond is more than 12 standard deviations off
    clashes: np.ndarray  # an atom overlaps one of another residue by more than 1.5 Å
    within: np.ndarray  # a distance within the residue is more than 12 standard deviations off

    @property
    def any(self) -> np.ndarray:
        return self.bonds | self.clashes | self.within

    def counts(self) -> dict[str, int]:
        """Count the residues with a violation, and those with each kind."""
        kinds = {"residues": self.any, "bonds": self.bonds, "clashes": self.clashes, "within": self.within}
        return {kind: int(mask.sum()) for kind, mask in kinds.items()}


@dataclass(frozen=True)
class Relaxation:
    """What a relaxation did; energies in kcal/mol of the force field alone, distances in angstrom."""

    energy_before: float | None  # None: too high to be a number
    energy_after: float
    violations_before: dict[str, int]  # of Flaws.counts
    violations_after: dict[str, int]
    rounds: int
    ca_rmsd: float  # without superposition: springs hold the structure where it was
    ca_max: float
    rmsd: float  # of all heavy atoms
    mirrored: int  # residues with Cβ on the wrong side (D instead of L), which minimisation does not turn back
    disulfides: int
    built_atoms: int  # heavy atoms that the structure lacked
    left_out: int  # residues that took no part: X, without N, CA or C, or alone between two gaps
    platform: str
    seconds: float


def relax_chains(chains: Sequence[Chain], device: str = "cpu") -> tuple[list[Chain], Relaxation]:
    """Minimise the energy of a structure and return its chains, with all heavy atoms, and what was done.

    In a round, springs hold the heavy atoms where the round began.  Residues that violate chemistry after it have no
    springs in the next rounds.  It ends with the first round without violations, or after `MAX_ROUNDS`; the last round
    is kept, as AlphaFold keeps it.

    Residues are bonded if they follow one another in the sequence, however far apart they are; X, and residues without
    N, CA and C, keep their atoms and take no part, and there is a gap where they are.
    Errors: UserError without OpenMM, or if there are no two bonded residues; FloatingPointError if no energy can be
    found.
    """
    start = time.perf_counter()
    given = join_chains(chains)
    residues = with_missing_atoms(given)
    built, moving = residues.mask & ~given.mask, _moving(residues)
    amber = Amber(residues, built, device)
    energy_before, flaws_before = amber.energy(), find_flaws(residues)
    free = np.zeros(len(residues.sequence), bool)
    rounds, flaws, relaxed = 0, flaws_before, residues
    while rounds == 0 or (rounds < MAX_ROUNDS and flaws.any.any()):
        rounds += 1
        amber.minimise(free)
        positions = np.where(moving[..., None], amber.positions(), residues.positions)
        relaxed = dataclasses.replace(residues, positions=positions)
        flaws = find_flaws(relaxed)
        free |= flaws.any
    energy = amber.energy()
    if not np.isfinite(energy):
        raise FloatingPointError("the energy is not finite after the minimisation; the structure is too far from one")
    moved = np.linalg.norm(relaxed.positions - residues.positions, axis=-1)
    ca, heavy = moved[:, CA][residues.segment >= 0], moved[moving & ~built]
    return split_chains(chains, relaxed), Relaxation(
        energy_before=round(energy_before, 1) if np.isfinite(energy_before) else None,
        energy_after=round(energy, 1),
        violations_before=flaws_before.counts(),
        violations_after=flaws.counts(),
        rounds=rounds,
        ca_rmsd=round(float(np.sqrt(np.mean(ca**2))), 3),
        ca_max=round(float(ca.max()), 3),
        rmsd=round(float(np.sqrt(np.mean(heavy**2))), 3),
        mirrored=check_geometry(relaxed.positions, moving).mirrored,
        disulfides=amber.disulfides,
        built_atoms=int(built.sum()),
        left_out=int((given.mask.any(1) & (given.segment < 0)).sum()),
        platform=amber.platform,
        seconds=round(time.perf_counter() - start, 2),
    )


def join_chains(chains: Sequence[Chain]) -> ModelledResidues:
    """Put the residues of all chains in a row, in segments of those that are bonded.

    Errors: UserError if no two residues are bonded.
    """
    sequence = "".join(chain.sequence for chain in chains)
    mask = np.concatenate([chain.mask for chain in chains]) > 0
    usable = mask[:, [N, CA, C]].all(1) & np.array([letter in RESTYPE_ORDER for letter in sequence])
    place = np.concatenate([chain.residue_index for chain in chains])
    starts = np.cumsum([0] + [len(chain.sequence) for chain in chains])[:-1]
    follows = np.append(False, usable[:-1] & (np.diff(place) == 1))
    follows[starts] = False
    segment = np.where(usable, np.cumsum(~(follows & usable)), -1)
    alone = [number for number, size in zip(*np.unique(segment, return_counts=True)) if size == 1]
    segment[np.isin(segment, alone)] = -1
    if not (segment >= 0).any():
        raise UserError("no two residues that follow one another have N, CA and C; give a structure of whole residues")
    mask[:, OXT] &= segment != np.append(segment[1:], -1)  # elsewhere than at an end it is a mistake
    positions = np.concatenate([chain.positions for chain in chains]).astype(np.float64)
    return ModelledResidues(sequence, positions, mask, segment)


def split_chains(chains: Sequence[Chain], residues: ModelledResidues) -> list[Chain]:
    """Return the chains with the positions and atoms of `residues`, of which `join_chains` made a row."""
    ends = np.cumsum([len(chain.sequence) for chain in chains])[:-1]
    positions = np.split(residues.positions.astype(np.float32), ends)
    masks = np.split(residues.mask.astype(np.float32), ends)
    return [dataclasses.replace(chain, positions=p, mask=m) for chain, p, m in zip(chains, positions, masks)]


def with_missing_atoms(residues: ModelledResidues) -> ModelledResidues:
    """Add the heavy atoms that residues of segments lack, in ideal geometry on their backbone (Supp. 1.8.4).

    Torsions that the atoms show are kept; others begin as the most frequent rotamer, and minimisation goes on from
    there.  The oxygen lies opposite to the next residue's N.
    """
    taking_part = residues.segment[:, None] >= 0
    aatype = _aatype(residues)
    missing = (ATOM37_MASK[aatype] > 0) & ~residues.mask & taking_part
    if not missing.any():
        return residues
    types = torch.from_numpy(aatype)
    positions = torch.from_numpy(residues.positions)
    mask = torch.from_numpy(residues.mask.astype(np.float64))
    torsions = geometry.atom37_to_torsions(types, positions, mask)
    chi = np.deg2rad([(*NEW_CHI.get(letter, ()), *USUAL_CHI)[:4] for letter in residues.sequence])
    angles = torsions.sin_cos.clone()
    angles[:, 3:] = torch.where(
        torsions.mask[:, 3:, None] > 0, angles[:, 3:], torch.from_numpy(np.stack([np.sin(chi), np.cos(chi)], -1))
    )
    following = torch.roll(positions[:, N], -1, 0)
    to_next = geometry.dihedral(positions[:, N], positions[:, CA], positions[:, C], following)
    angles[:, 2] = torch.where(torsions.mask[:, 2, None] > 0, angles[:, 2], to_next)
    backbone = geometry.atom37_to_frames(types, positions, mask).frames[..., 0]
    frames = geometry.torsions_to_frames(types, backbone, angles)
    ideal = geometry.atom14_to_atom37(types, geometry.frames_to_atom14(types, frames)).numpy()
    return dataclasses.replace(
        residues, positions=np.where(missing[..., None], ideal, residues.positions), mask=residues.mask | missing
    )


def find_flaws(residues: ModelledResidues) -> Flaws:
    """Find the residues of segments that violate what chemistry allows; sulfurs may be as near as in a disulfide."""
    aatype = torch.from_numpy(_aatype(residues))
    mask = _moving(residues)
    atoms = geometry.atom37_to_atom14(aatype, torch.from_numpy(residues.positions))
    exists = geometry.atom37_to_atom14(aatype, torch.from_numpy(mask.astype(np.float64)))
    bonded = np.diff(residues.segment) == 0
    index = np.cumsum(np.append(0, np.where(bonded, 1, 2)))  # rises by 1 to a bonded residue, elsewhere by more
    bonds = connection_violations(atoms, exists, aatype, torch.from_numpy(index)).per_residue_mask
    within = within_residue_violations(atoms, exists, aatype).per_atom_mask.amax(-1)
    clashes = np.zeros(len(mask), bool)
    clashes[find_clashes(residues.positions, mask, bonded).ravel()] = True
    return Flaws(bonds.numpy() > 0, clashes, within.numpy() > 0)


def _aatype(residues: ModelledResidues) -> np.ndarray:
    return np.array([RESTYPE_ORDER.get(letter, UNKNOWN) for letter in residues.sequence])


def _moving(residues: ModelledResidues) -> np.ndarray:
    """Return which atoms are in the force field: bool [R, 37]."""
    return residues.mask & (residues.segment[:, None] >= 0)
