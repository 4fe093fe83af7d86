"""Relax chains in memory: AlphaFold's restrained minimisation, repeated until no bond or contact is violated.

Source: Supp. 1.8.6. `files.relax_paths` relaxes files and the folders of `warpfold predict`.
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
from warpfold.relaxation.amber import OXT, Amber, ModelledResidues

# RELAX_MAX_OUTER_ITERATIONS of AlphaFold 2.3 (20 in version 2.0).
MAX_ROUNDS = 3
N, CA, C = (ATOM_ORDER[name] for name in ("N", "CA", "C"))
# Side-chain torsions of added atoms in degrees: proline's ring, and the most frequent rotamer of the others.
CHI_OF = {"P": (-25.0, 36.0)}
DEFAULT_CHI = (-65.0, 180.0, 180.0, 180.0)


@dataclass(frozen=True)
class Flaws:
    """Residues with structural violations, with DeepMind's tolerances (Supp. 1.9.11); masks [R].

    bonds: length or angle of a peptide bond is more than 12 standard deviations off. clashes: an atom overlaps an atom
    of another residue by more than 1.5 Å. within: a distance within the residue is more than 12 standard deviations
    off.
    """

    bonds: np.ndarray
    clashes: np.ndarray
    within: np.ndarray

    @property
    def any(self) -> np.ndarray:
        return self.bonds | self.clashes | self.within

    def counts(self) -> dict[str, int]:
        """Count the residues with a violation, and those with each kind."""
        kinds = {"residues": self.any, "bonds": self.bonds, "clashes": self.clashes, "within": self.within}
        return {kind: int(mask.sum()) for kind, mask in kinds.items()}


@dataclass(frozen=True)
class Relaxation:
    """Report of a relaxation: energies of the force field in kcal/mol, distances in angstrom.

    energy_before: None if it was not finite. violations_before, violations_after: see `Flaws.counts`. ca_rmsd, ca_max,
    rmsd: displacements of Cα and of all heavy atoms, without superposition. mirrored: D residues, whose chirality a
    minimisation cannot change. built_atoms: added heavy atoms. left_out: residues that were not modelled: X, residues
    without N, CA or C, and single residues between two gaps.
    """

    energy_before: float | None
    energy_after: float
    violations_before: dict[str, int]
    violations_after: dict[str, int]
    rounds: int
    ca_rmsd: float
    ca_max: float
    rmsd: float
    mirrored: int
    disulfides: int
    built_atoms: int
    left_out: int
    platform: str
    seconds: float


def relax_chains(chains: Sequence[Chain], device: str = "cpu") -> tuple[list[Chain], Relaxation]:
    """Minimise the energy of a structure; returns its chains with all heavy atoms, and a report.

    Each round restrains the heavy atoms to their positions at its start, except in residues that had violations after
    an earlier round. The relaxation ends after the first round without violations or after `MAX_ROUNDS`, and returns
    the result of the last round, as AlphaFold does.

    Consecutive residues of the sequence are bonded at any distance. X and residues without N, CA and C are not
    modelled: they keep their atoms, and the chain has a gap there.
    Raises UserError if OpenMM is missing or no two residues are bonded, and FloatingPointError if the energy stays
    infinite.
    """
    start = time.perf_counter()
    original = join_chains(chains)
    residues = with_missing_atoms(original)
    built, moving = residues.mask & ~original.mask, _modelled_atoms(residues)
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
    distances = np.linalg.norm(relaxed.positions - residues.positions, axis=-1)
    ca, heavy = distances[:, CA][residues.segment >= 0], distances[moving & ~built]
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
        left_out=int((original.mask.any(1) & (original.segment < 0)).sum()),
        platform=amber.platform,
        seconds=round(time.perf_counter() - start, 2),
    )


def join_chains(chains: Sequence[Chain]) -> ModelledResidues:
    """Concatenate the residues of all chains and divide them into segments of bonded residues.

    Raises UserError if no two residues are bonded.
    """
    sequence = "".join(chain.sequence for chain in chains)
    mask = np.concatenate([chain.mask for chain in chains]) > 0
    usable = mask[:, [N, CA, C]].all(1) & np.array([letter in RESTYPE_ORDER for letter in sequence])
    index = np.concatenate([chain.residue_index for chain in chains])
    starts = np.cumsum([0] + [len(chain.sequence) for chain in chains])[:-1]
    follows = np.append(False, usable[:-1] & (np.diff(index) == 1))
    follows[starts] = False
    segment = np.where(usable, np.cumsum(~(follows & usable)), -1)
    single = [number for number, size in zip(*np.unique(segment, return_counts=True)) if size == 1]
    segment[np.isin(segment, single)] = -1
    if not (segment >= 0).any():
        raise UserError("no two residues that follow one another have N, CA and C; give a structure of whole residues")
    # OXT belongs to the last residue of a segment. Anywhere else it is a mistake of the file.
    mask[:, OXT] &= segment != np.append(segment[1:], -1)
    positions = np.concatenate([chain.positions for chain in chains]).astype(np.float64)
    return ModelledResidues(sequence, positions, mask, segment)


def split_chains(chains: Sequence[Chain], residues: ModelledResidues) -> list[Chain]:
    """Write positions and masks of `residues` back to the chains that `join_chains` concatenated."""
    ends = np.cumsum([len(chain.sequence) for chain in chains])[:-1]
    positions = np.split(residues.positions.astype(np.float32), ends)
    masks = np.split(residues.mask.astype(np.float32), ends)
    return [dataclasses.replace(chain, positions=p, mask=m) for chain, p, m in zip(chains, positions, masks)]


def with_missing_atoms(residues: ModelledResidues) -> ModelledResidues:
    """Add missing heavy atoms of modelled residues in ideal geometry (Supp. 1.8.4).

    Torsions of existing atoms are kept. Others start as the most frequent rotamer, which the minimisation refines. The
    oxygen is placed opposite to the next residue's N.
    """
    is_modelled = residues.segment[:, None] >= 0
    aatype = _aatype(residues)
    missing = (ATOM37_MASK[aatype] > 0) & ~residues.mask & is_modelled
    if not missing.any():
        return residues
    types = torch.from_numpy(aatype)
    positions = torch.from_numpy(residues.positions)
    mask = torch.from_numpy(residues.mask.astype(np.float64))
    torsions = geometry.atom37_to_torsions(types, positions, mask)
    chi = np.deg2rad([(*CHI_OF.get(letter, ()), *DEFAULT_CHI)[:4] for letter in residues.sequence])
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
    """Find modelled residues with violations. Sulfurs may be as near as in a disulfide bond."""
    aatype = torch.from_numpy(_aatype(residues))
    mask = _modelled_atoms(residues)
    atoms = geometry.atom37_to_atom14(aatype, torch.from_numpy(residues.positions))
    exists = geometry.atom37_to_atom14(aatype, torch.from_numpy(mask.astype(np.float64)))
    bonded = np.diff(residues.segment) == 0
    # Residue indices that differ by 1 mean a peptide bond.
    index = np.cumsum(np.append(0, np.where(bonded, 1, 2)))
    bonds = connection_violations(atoms, exists, aatype, torch.from_numpy(index)).per_residue_mask
    within_residue = within_residue_violations(atoms, exists, aatype).per_atom_mask.amax(-1)
    clashes = np.zeros(len(mask), bool)
    clashes[find_clashes(residues.positions, mask, bonded).ravel()] = True
    return Flaws(bonds.numpy() > 0, clashes, within_residue.numpy() > 0)


def _aatype(residues: ModelledResidues) -> np.ndarray:
    return np.array([RESTYPE_ORDER.get(letter, UNKNOWN) for letter in residues.sequence])


def _modelled_atoms(residues: ModelledResidues) -> np.ndarray:
    """Return a mask [R, 37] of the atoms in the force field."""
    return residues.mask & (residues.segment[:, None] >= 0)
