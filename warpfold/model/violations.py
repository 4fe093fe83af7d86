"""Violations of what chemistry allows: broken peptide bonds, clashes, distorted residues (Supp. 1.9.11).

Everything is for one example: atoms [N, 14, 3] in angstrom, atom_mask [N, 14] (which atoms the residues have),
aatype [N], residue_index [N].  Tolerances are DeepMind's: 12 standard deviations for bonds, angles and distances
within a residue, an overlap of 1.5 angstrom for atoms that are not bonded.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from warpfold.geometry import residue
from warpfold.geometry.atoms import residue_rows
from warpfold.ops.tensors import upcast_half

N_ATOM, CA_ATOM, C_ATOM, SG_ATOM = 0, 1, 2, 5  # places in atom14; SG is cysteine's
CA_CA = 3.80209737096  # angstrom, of a trans peptide: what the bonds and angles between two Ca give


@dataclass(frozen=True)
class Connections:
    """Peptide bonds: how far length and angles are beyond 12 standard deviations, and where they are."""

    c_n_loss: Tensor  # scalar, mean over the bonds, angstrom
    ca_c_n_loss: Tensor  # scalar, in cosines
    c_n_ca_loss: Tensor  # scalar, in cosines
    per_residue_loss: Tensor  # [N], half of a bond's three losses to either residue
    per_residue_mask: Tensor  # [N] 1 = a bond of this residue is violated

    @property
    def loss(self) -> Tensor:
        return self.c_n_loss + self.ca_c_n_loss + self.c_n_ca_loss


@dataclass(frozen=True)
class AtomViolations:
    """Distances that are too short or too long."""

    per_atom_loss: Tensor  # [N, 14] angstrom, each pair's error counted at both of its atoms
    per_atom_mask: Tensor  # [N, 14] 1 = an atom of a violated pair
    mean_loss: Tensor  # scalar, over the pairs that were looked at


@dataclass(frozen=True)
class Violations:
    """All violations of a structure (Supp. 1.9.11)."""

    connections: Connections
    clashes: AtomViolations
    within: AtomViolations
    per_residue_mask: Tensor  # [N] 1 = a violation of any kind
    atoms: Tensor  # scalar, how many there are

    @property
    def loss(self) -> Tensor:
        """The scalar L_viol of Supp. 1.9.11."""
        per_atom = self.clashes.per_atom_loss + self.within.per_atom_loss
        return self.connections.loss + per_atom.sum() / (1e-6 + self.atoms)


def find_violations(
    atoms: Tensor,
    atom_mask: Tensor,
    aatype: Tensor,
    residue_index: Tensor,
    asym_id: Tensor | None = None,
    tolerance_factor: float = 12.0,
    overlap_tolerance: float = 1.5,
) -> Violations:
    """Return all violations of one structure, differentiable in `atoms`, fp32 at least.

    asym_id [N]: the chain of each residue; one chain when None.
    """
    atoms = upcast_half(atoms)
    atom_mask = atom_mask.to(atoms.dtype)
    connections = connection_violations(atoms, atom_mask, aatype, residue_index, tolerance_factor)
    clashes = clash_violations(atoms, atom_mask, aatype, residue_index, asym_id, overlap_tolerance)
    within = within_residue_violations(atoms, atom_mask, aatype, tolerance_factor, overlap_tolerance)
    return Violations(
        connections,
        clashes,
        within,
        per_residue_mask=torch.stack(
            [connections.per_residue_mask, clashes.per_atom_mask.amax(-1), within.per_atom_mask.amax(-1)]
        ).amax(0),
        atoms=atom_mask.sum(),
    )


def connection_violations(
    atoms: Tensor, atom_mask: Tensor, aatype: Tensor, residue_index: Tensor, tolerance_factor: float = 12.0
) -> Connections:
    """Check peptide bonds between residues that follow one another (Supp. 1.9.11); units as in the class."""
    follows = (residue_index[1:] - residue_index[:-1] == 1).to(atoms.dtype)
    ca, c, n, next_ca = atoms[:-1, CA_ATOM], atoms[:-1, C_ATOM], atoms[1:, N_ATOM], atoms[1:, CA_ATOM]
    has_ca, has_c = atom_mask[:-1, CA_ATOM], atom_mask[:-1, C_ATOM]
    has_n, has_next_ca = atom_mask[1:, N_ATOM], atom_mask[1:, CA_ATOM]

    c_ca, _ = _unit(ca - c)
    c_n, length = _unit(n - c)
    n_ca, _ = _unit(next_ca - n)
    proline = aatype[1:] == residue.RESTYPE_ORDER["P"]
    target, deviation = (
        torch.where(proline, atoms.new_full((), before_proline), atoms.new_full((), usual))
        for usual, before_proline in (residue.C_N_LENGTH, residue.C_N_LENGTH_STD)
    )
    terms = [
        _excess(length, target, deviation, tolerance_factor, has_c * has_n * follows),
        _excess((c_ca * c_n).sum(-1), *residue.CA_C_N_COS, tolerance_factor, has_ca * has_c * has_n * follows),
        _excess(-(c_n * n_ca).sum(-1), *residue.C_N_CA_COS, tolerance_factor, has_c * has_n * has_next_ca * follows),
    ]
    c_n_loss, ca_c_n_loss, c_n_ca_loss = ((mask * loss).sum() / (1e-6 + mask.sum()) for loss, _, mask in terms)
    loss = torch.stack([loss for loss, _, _ in terms]).sum(0)
    violated = torch.stack([violated for _, violated, _ in terms]).amax(0)
    zero = loss.new_zeros(1)
    before, after = torch.cat([zero, loss]), torch.cat([loss, zero])
    per_residue_mask = torch.maximum(torch.cat([zero, violated]), torch.cat([violated, zero]))
    return Connections(c_n_loss, ca_c_n_loss, c_n_ca_loss, 0.5 * (before + after), per_residue_mask)


def clash_violations(
    atoms: Tensor,
    atom_mask: Tensor,
    aatype: Tensor,
    residue_index: Tensor,
    asym_id: Tensor | None = None,
    overlap_tolerance: float = 1.5,
) -> AtomViolations:
    """Find atoms of different residues nearer than the sum of their van der Waals radii allows (Supp. 1.9.11).

    Peptide bonds and SG-SG are exempt.  As in DeepMind's code, residues of the same index are not compared, even in
    different chains, and any two atoms at SG's place in atom14 are exempt.
    """
    n = atoms.shape[0]
    flat, exists = atoms.flatten(0, 1), atom_mask.flatten()
    radius = (residue_rows("ATOM14_VDW_RADIUS", aatype).to(atoms.dtype) * atom_mask).flatten()
    index = residue_index.repeat_interleave(14)
    slot = torch.arange(14, device=atoms.device).repeat(n)

    looked_at = exists[:, None] * exists[None, :] * (index[:, None] < index[None, :])
    bonded = (index[:, None] + 1 == index[None, :]) & (slot[:, None] == C_ATOM) & (slot[None, :] == N_ATOM)
    if asym_id is not None:
        chain = asym_id.repeat_interleave(14)
        bonded = bonded & (chain[:, None] == chain[None, :])
    disulfide = (slot[:, None] == SG_ATOM) & (slot[None, :] == SG_ATOM)
    looked_at = looked_at * ~(bonded | disulfide)

    # Not through matmul: the default would lose the short distances to cancellation.
    distance = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist")
    allowed = radius[:, None] + radius[None, :] - overlap_tolerance
    error = looked_at * (allowed - distance).relu()
    clash = looked_at * (distance < allowed)
    return AtomViolations(
        per_atom_loss=(error.sum(0) + error.sum(1)).view(n, 14),
        per_atom_mask=torch.maximum(clash.amax(0), clash.amax(1)).view(n, 14),
        mean_loss=error.sum() / (1e-6 + looked_at.sum()),
    )


@functools.cache
def _bounds(
    overlap_tolerance: float, tolerance_factor: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """Return `residue.distance_bounds` on a device: copied there once, for a copy waits for the device."""
    bounds = residue.distance_bounds(overlap_tolerance, tolerance_factor)
    return tuple(torch.as_tensor(bound, dtype=dtype, device=device) for bound in bounds)


def within_residue_violations(
    atoms: Tensor,
    atom_mask: Tensor,
    aatype: Tensor,
    tolerance_factor: float = 12.0,
    overlap_tolerance: float = 1.5,
) -> AtomViolations:
    """Find distances within residues outside what bond lengths, angles and radii allow (Supp. 1.9.11)."""
    lower, upper = (bound[aatype] for bound in _bounds(overlap_tolerance, tolerance_factor, atoms.dtype, atoms.device))
    looked_at = (
        atom_mask[:, :, None] * atom_mask[:, None, :] * (1 - torch.eye(14, dtype=atoms.dtype, device=atoms.device))
    )
    distance = _distance(atoms[:, :, None, :] - atoms[:, None, :, :])
    error = looked_at * ((lower - distance).relu() + (distance - upper).relu())
    violated = looked_at * ((distance < lower) | (distance > upper))
    return AtomViolations(
        per_atom_loss=error.sum(1) + error.sum(2),
        per_atom_mask=torch.maximum(violated.amax(1), violated.amax(2)),
        mean_loss=error.sum() / (1e-6 + looked_at.sum()),
    )


def violation_metrics(
    violations: Violations, atoms: Tensor, atom_mask: Tensor, residue_index: Tensor, seq_mask: Tensor
) -> dict[str, Tensor]:
    """Return the share of residues (0 to 1) with each kind of violation, named as in DeepMind's code.

    `violations_extreme_ca_ca_distance` is the share of neighbours whose Ca are 1.5 angstrom too far apart.
    """
    ca, has_ca = upcast_half(atoms)[:, CA_ATOM], atom_mask[:, CA_ATOM]
    pairs = has_ca[:-1] * has_ca[1:] * (residue_index[1:] - residue_index[:-1] == 1)
    too_far = _distance(ca[:-1] - ca[1:], 1e-6) - CA_CA > 1.5
    return {
        "violations_extreme_ca_ca_distance": _mean(too_far, pairs),
        "violations_between_residue_bond": _mean(violations.connections.per_residue_mask, seq_mask),
        "violations_between_residue_clash": _mean(violations.clashes.per_atom_mask.amax(-1), seq_mask),
        "violations_within_residue": _mean(violations.within.per_atom_mask.amax(-1), seq_mask),
        "violations_per_residue": _mean(violations.per_residue_mask, seq_mask),
    }


def _excess(
    value: Tensor, target: Tensor | float, deviation: Tensor | float, factor: float, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss and 0/1 violation of values more than `factor` deviations off the target, and the mask."""
    error = torch.sqrt(1e-6 + (value - target).square())
    return (error - factor * deviation).relu(), mask * (error > factor * deviation), mask


def _distance(difference: Tensor, epsilon: float = 1e-10) -> Tensor:
    """Return the lengths [*] of vectors [*, 3]; the gradient of a zero vector is zero."""
    return torch.sqrt(epsilon + difference.square().sum(-1))


def _unit(vector: Tensor) -> tuple[Tensor, Tensor]:
    """Return vectors [*, 3] divided by their lengths, and the lengths [*]."""
    length = _distance(vector, 1e-6)
    return vector / length[..., None], length


def _mean(value: Tensor, mask: Tensor) -> Tensor:
    return (mask * value).sum() / (1e-10 + mask.sum())
