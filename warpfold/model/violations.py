"""Violations of what chemistry allows: broken peptide bonds, clashes, distorted residues, chains in one another.

Everything is for one example: atoms [N, 14, 3] in angstrom, atom_mask [N, 14] (which atoms the residues have),
aatype [N], residue_index [N].  Tolerances are DeepMind's: 12 standard deviations for bonds, angles and distances
within a residue, an overlap of 1.5 angstrom for atoms that are not bonded.  Source: Supp. 1.9.11; for chains Evans et
al. 2022, section 2.5.
"""

import functools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from warpfold.geometry import residue
from warpfold.geometry.atoms import residue_rows
from warpfold.ops.dispatch import upcast_half
from warpfold.ops.pairs import C_ATOM, N_ATOM, overlaps

CA_ATOM = 1  # its place in atom14
Code = Literal["monomer", "multimer"]


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
    per_atom_pairs: Tensor  # [N, 14] how many errors that is the sum of
    mean_loss: Tensor  # scalar, over the pairs that were looked at

    @property
    def per_atom_mask(self) -> Tensor:
        """Return [N, 14]: 1 = an atom of a violated pair."""
        return self.per_atom_pairs.clamp(max=1)


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

    @property
    def averaged_loss(self) -> Tensor:
        """The same with each atom's mean error over its violations in place of their sum (Evans et al. 2022, sec. 2.5).

        An untrained network puts all atoms in one place: then the sum, unlike the mean, grows with the protein.
        """
        per_atom = self.clashes.per_atom_loss + self.within.per_atom_loss
        pairs = self.clashes.per_atom_pairs + self.within.per_atom_pairs
        return self.connections.loss + (per_atom / pairs.clamp(min=1)).sum() / (1e-6 + self.atoms)


def find_violations(
    atoms: Tensor,
    atom_mask: Tensor,
    aatype: Tensor,
    residue_index: Tensor,
    asym_id: Tensor | None = None,
    tolerance_factor: float = 12.0,
    overlap_tolerance: float = 1.5,
    every_pair: bool = False,
    bonds: Code = "monomer",
) -> Violations:
    """Return all violations of one structure, differentiable in `atoms`, fp32 at least.

    asym_id [N]: the chain of each residue; one chain when None.  every_pair: as in `clash_violations`.  bonds: as in
    `connection_violations`.
    """
    atoms = upcast_half(atoms)
    atom_mask = atom_mask.to(atoms.dtype)
    connections = connection_violations(atoms, atom_mask, aatype, residue_index, tolerance_factor, asym_id, bonds)
    clashes = clash_violations(atoms, atom_mask, aatype, residue_index, asym_id, overlap_tolerance, every_pair)
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
    atoms: Tensor,
    atom_mask: Tensor,
    aatype: Tensor,
    residue_index: Tensor,
    tolerance_factor: float = 12.0,
    asym_id: Tensor | None = None,
    bonds: Code = "monomer",
) -> Connections:
    """Check peptide bonds between residues that follow one another in a chain (Supp. 1.9.11); units as in the class.

    bonds: as in the monomer's code or in Multimer's, which takes the deviation of the C-N bond's length for that of the
    cosine at C, and does not soften lengths.
    """
    softening = 1e-3 if bonds == "monomer" else 0.0  # angstrom
    # Three bonds of every two residues, and three terms: the length of C-N, the cosines of CA-C-N and of C-N-CA.
    (ca, c), (n, next_ca) = atoms[:-1, CA_ATOM : C_ATOM + 1].unbind(1), atoms[1:, N_ATOM : CA_ATOM + 1].unbind(1)
    direction, length = _unit(torch.stack([ca, n, next_ca]) - torch.stack([c, c, n]), softening)
    cosines = (direction[:2] * direction[1:]).sum(-1)  # the second is of directions that follow: the angle's, negative
    expected = _peptide_bonds(bonds, atoms.dtype, atoms.device)[:, :, (aatype[1:] == residue.RESTYPE_ORDER["P"]).long()]
    has_ca, has_c = atom_mask[:-1, CA_ATOM : C_ATOM + 1].unbind(-1)
    has_n, has_next_ca = atom_mask[1:, N_ATOM : CA_ATOM + 1].unbind(-1)
    there = has_c * has_n * _follows(residue_index, asym_id)
    mask = there * torch.stack([torch.ones_like(there), has_ca, has_next_ca])
    target, deviation = expected
    loss, violated = _excess(torch.cat([length[1:2], cosines]), target, deviation, tolerance_factor, mask)
    c_n_loss, ca_c_n_loss, c_n_ca_loss = ((mask * loss).sum(-1) / (1e-6 + mask.sum(-1))).unbind()
    # Half of a bond to the residue before it, half to the one behind.
    half, bad = nn.functional.pad(0.5 * loss.sum(0), (1, 1)), nn.functional.pad(violated.amax(0), (1, 1))
    return Connections(c_n_loss, ca_c_n_loss, c_n_ca_loss, half[:-1] + half[1:], torch.maximum(bad[:-1], bad[1:]))


@functools.cache
@torch.inference_mode(False)  # what is made in inference may serve training later
def _peptide_bonds(bonds: Code, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return mean and deviation of the three terms of a peptide bond, [2, 3, 2]: before other residues, before proline.

    Copied to the device once, for a copy waits for it.
    """
    length, length_std = residue.C_N_LENGTH, residue.C_N_LENGTH_STD
    (at_c, at_c_std), (at_n, at_n_std) = residue.CA_C_N_COS, residue.C_N_CA_COS
    at_c_std = at_c_std if bonds == "monomer" else length_std[0]
    table = [[length, [at_c] * 2, [-at_n] * 2], [length_std, [at_c_std] * 2, [at_n_std] * 2]]
    return torch.tensor(table, dtype=dtype, device=device)


def clash_violations(
    atoms: Tensor,
    atom_mask: Tensor,
    aatype: Tensor,
    residue_index: Tensor,
    asym_id: Tensor | None = None,
    overlap_tolerance: float = 1.5,
    every_pair: bool = False,
) -> AtomViolations:
    """Find atoms of different residues nearer than the sum of their van der Waals radii allows (Supp. 1.9.11).

    Peptide bonds and SG-SG are exempt.  As in DeepMind's code, any two atoms at SG's place in atom14 are exempt, and
    residues of the same index are not compared even in different chains, unless `every_pair` asks for them too.
    """
    n, exists = atoms.shape[0], atom_mask.flatten()
    radius = (residue_rows("ATOM14_VDW_RADIUS", aatype).to(atoms.dtype) * atom_mask).flatten()
    index = residue_index.repeat_interleave(14)
    slot = torch.arange(14, device=atoms.device).repeat(n)
    order = torch.arange(n, device=atoms.device).repeat_interleave(14) if every_pair else index
    chain = (torch.zeros_like(aatype) if asym_id is None else asym_id).repeat_interleave(14)
    found = overlaps(atoms.flatten(0, 1), radius, exists, index, order, chain, slot, overlap_tolerance)
    error, _, looked_at = found.sum(-1).unbind()  # each pair at both of its atoms
    return AtomViolations(
        per_atom_loss=found[0].view(n, 14), per_atom_pairs=found[1].view(n, 14), mean_loss=error / (2e-6 + looked_at)
    )


@functools.cache
@torch.inference_mode(False)  # as above
def _bounds(
    overlap_tolerance: float, tolerance_factor: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """Return `residue.distance_bounds` on a device: copied there once, for a copy waits for the device."""
    bounds = residue.distance_bounds(overlap_tolerance, tolerance_factor)
    return tuple(torch.as_tensor(bound, dtype=dtype, device=device) for bound in bounds)


def within_residue_violations(
    atoms: Tensor, atom_mask: Tensor, aatype: Tensor, tolerance_factor: float = 12.0, overlap_tolerance: float = 1.5
) -> AtomViolations:
    """Find distances within residues outside what bond lengths, angles and radii allow (Supp. 1.9.11)."""
    lower, upper = (bound[aatype] for bound in _bounds(overlap_tolerance, tolerance_factor, atoms.dtype, atoms.device))
    looked_at = (
        atom_mask[:, :, None] * atom_mask[:, None, :] * (1 - torch.eye(14, dtype=atoms.dtype, device=atoms.device))
    )
    # Of two atoms in one place the gradient is zero.
    distance = torch.sqrt(1e-10 + (atoms[:, :, None, :] - atoms[:, None, :, :]).square().sum(-1))
    error = looked_at * ((lower - distance).relu() + (distance - upper).relu())
    violated = looked_at * ((distance < lower) | (distance > upper))
    return AtomViolations(
        per_atom_loss=error.sum(1) + error.sum(2),
        per_atom_pairs=violated.sum(1) + violated.sum(2),
        mean_loss=error.sum() / (1e-6 + looked_at.sum()),
    )


def center_of_mass_loss(ca: Tensor, true_ca: Tensor, mask: Tensor, asym_id: Tensor) -> Tensor:
    """Return how much nearer than in truth chains lie to one another: 0 up to 4 angstrom (Multimer, equation 1).

    ca, true_ca [N, 3] angstrom, mask [N], asym_id [N].  A mean over the pairs of chains, of squared errors in units of
    20 angstrom; 0 for a single chain.  A chain lies where its resolved Ca are on average.

    The paper pushes different chains apart, so a chain and itself are no pair: K chains have K (K - 1).  DeepMind did
    not publish the code; Uni-Fold and OpenFold divide by K^2, which makes the term of a dimer half as large.
    """
    # Every residue speaks for its chain, and the first of a chain counts: how many there are, the host need not know.
    same = asym_id[:, None] == asym_id
    first = ~same.tril(-1).any(-1)
    member = same * mask.to(upcast_half(ca).dtype)  # [N, N]: seen, of the same chain
    size = member.sum(-1)

    def distances(points: Tensor) -> Tensor:
        centres = (member[..., None] * points).sum(-2) / size.clamp(min=1)[:, None]
        # The small number gives chains in one place, as an untrained network puts them, a gradient of 0.
        return torch.sqrt(1e-10 + (centres[:, None] - centres).square().sum(-1))

    seen = first * (size > 0)
    pairs = (seen[:, None] & seen & ~same).to(size.dtype)
    nearer = (distances(true_ca) - distances(ca) - 4).relu() / 20
    return (pairs * nearer.square()).sum() / pairs.sum().clamp(min=1)


def _follows(residue_index: Tensor, asym_id: Tensor | None) -> Tensor:
    """Return which residues, from the second on, follow the one before in the same chain: bool [N - 1]."""
    follows = residue_index[1:] - residue_index[:-1] == 1
    return follows if asym_id is None else follows & (asym_id[1:] == asym_id[:-1])


def _excess(value: Tensor, target: Tensor, deviation: Tensor, factor: float, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return loss and 0/1 violation of values more than `factor` deviations off the target."""
    error = torch.sqrt(1e-6 + (value - target).square())
    return (error - factor * deviation).relu(), mask * (error > factor * deviation)


def _unit(vector: Tensor, softening: float) -> tuple[Tensor, Tensor]:
    """Return vectors [*, 3] divided by their lengths, and the lengths [*]; the gradient of a zero vector is finite."""
    squares = vector.square().sum(-1)
    length = torch.sqrt(softening**2 + squares if softening else squares.clamp(min=1e-12))
    return vector / length[..., None], length
