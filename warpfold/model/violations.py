"""Structural violations: broken peptide bonds, clashes, distorted residues, overlapping chains.

All functions are for one example: atoms [N, 14, 3] in angstrom, atom_mask [N, 14] (1 = the residue has the atom),
aatype [N], residue_index [N]. The tolerances are DeepMind's: 12 standard deviations for bonds, angles and distances
within a residue, and an overlap of 1.5 angstrom for atoms that are not bonded. Sources: Supp. 1.9.11; for chains Evans
et al. 2022, section 2.5.
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

# Index in atom14.
CA_ATOM = 1
Code = Literal["monomer", "multimer"]


@dataclass(frozen=True)
class Connections:
    """Deviations of peptide bonds beyond 12 standard deviations.

    c_n_loss: scalar, of the length, mean over the bonds, angstrom. ca_c_n_loss, c_n_ca_loss: scalars, of the angles'
    cosines. per_residue_loss: [N]; each residue gets half of the three losses of its bonds.
    per_residue_mask: [N], 1 = a bond of this residue is violated.
    """

    c_n_loss: Tensor
    ca_c_n_loss: Tensor
    c_n_ca_loss: Tensor
    per_residue_loss: Tensor
    per_residue_mask: Tensor

    @property
    def loss(self) -> Tensor:
        """The sum of the three losses."""
        return self.c_n_loss + self.ca_c_n_loss + self.c_n_ca_loss


@dataclass(frozen=True)
class AtomViolations:
    """Distances that are too short or too long.

    per_atom_loss: [N, 14], angstrom, the sum of the errors of an atom's pairs; a pair counts at both atoms.
    per_atom_pairs: [N, 14], the number of violated pairs of an atom. mean_loss: scalar, over all pairs examined.
    """

    per_atom_loss: Tensor
    per_atom_pairs: Tensor
    mean_loss: Tensor

    @property
    def per_atom_mask(self) -> Tensor:
        """[N, 14], 1 = an atom of a violated pair."""
        return self.per_atom_pairs.clamp(max=1)


@dataclass(frozen=True)
class Violations:
    """All violations of a structure (Supp. 1.9.11).

    per_residue_mask: [N], 1 = a violation of any kind. atoms: scalar, the number of atoms.
    """

    connections: Connections
    clashes: AtomViolations
    within: AtomViolations
    per_residue_mask: Tensor
    atoms: Tensor

    @property
    def loss(self) -> Tensor:
        """The scalar L_viol of Supp. 1.9.11."""
        per_atom = self.clashes.per_atom_loss + self.within.per_atom_loss
        return self.connections.loss + per_atom.sum() / (1e-6 + self.atoms)

    @property
    def averaged_loss(self) -> Tensor:
        """`loss` with the mean error over an atom's violations instead of the sum (Evans et al. 2022, section 2.5).

        An untrained network puts all atoms in one place. Then the sum grows with the protein, but the mean does not.
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
    """Compute all violations of one structure, differentiable in `atoms`, in fp32 or wider.

    asym_id: [N], the chain of each residue; None: one chain. every_pair: see `clash_violations`. bonds: see
    `connection_violations`.
    """
    atoms = upcast_half(atoms)
    atom_mask = atom_mask.to(atoms.dtype)
    connections = connection_violations(atoms, atom_mask, aatype, residue_index, tolerance_factor, asym_id, bonds)
    clashes = clash_violations(atoms, atom_mask, aatype, residue_index, asym_id, overlap_tolerance, every_pair)
    within_residue = within_residue_violations(atoms, atom_mask, aatype, tolerance_factor, overlap_tolerance)
    return Violations(
        connections,
        clashes,
        within_residue,
        per_residue_mask=torch.stack(
            [connections.per_residue_mask, clashes.per_atom_mask.amax(-1), within_residue.per_atom_mask.amax(-1)]
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
    """Compute the violations of peptide bonds between consecutive residues of a chain (Supp. 1.9.11).

    bonds: "monomer" or "multimer", the official code to follow. Multimer's uses the deviation of the C-N bond's length
    as that of the cosine at C, and does not soften lengths.
    """
    # Angstrom.
    softening = 1e-3 if bonds == "monomer" else 0.0
    # Per two residues three bonds, C-CA, C-N and N-CA, and three terms, the length of C-N and the cosines at C and N.
    (ca, c), (n, next_ca) = atoms[:-1, CA_ATOM : C_ATOM + 1].unbind(1), atoms[1:, N_ATOM : CA_ATOM + 1].unbind(1)
    bond = torch.stack([ca, n, next_ca]) - torch.stack([c, c, n])
    squares = bond.square().sum(-1)
    # Both forms give a bond of length zero a finite gradient.
    length = torch.sqrt(softening**2 + squares if softening else squares.clamp(min=1e-12))
    direction = bond / length[..., None]
    # The directions of the second pair are consecutive, so its product is the negative cosine of the angle.
    cosines = (direction[:2] * direction[1:]).sum(-1)
    before_proline = (aatype[1:] == residue.RESTYPE_ORDER["P"]).long()
    target, deviation = _peptide_bonds(bonds, atoms.dtype, atoms.device)[:, :, before_proline]
    has_ca, has_c = atom_mask[:-1, CA_ATOM : C_ATOM + 1].unbind(-1)
    has_n, has_next_ca = atom_mask[1:, N_ATOM : CA_ATOM + 1].unbind(-1)
    follows = residue_index[1:] - residue_index[:-1] == 1
    if asym_id is not None:
        follows = follows & (asym_id[1:] == asym_id[:-1])
    has_bond = has_c * has_n * follows
    mask = has_bond * torch.stack([torch.ones_like(has_bond), has_ca, has_next_ca])
    error = torch.sqrt(1e-6 + (torch.cat([length[1:2], cosines]) - target).square())
    loss = (error - tolerance_factor * deviation).relu()
    violated = mask * (error > tolerance_factor * deviation)
    c_n_loss, ca_c_n_loss, c_n_ca_loss = ((mask * loss).sum(-1) / (1e-6 + mask.sum(-1))).unbind()
    # Half of a bond's loss counts for the residue before it, and half for the residue after it.
    half, bad = nn.functional.pad(0.5 * loss.sum(0), (1, 1)), nn.functional.pad(violated.amax(0), (1, 1))
    return Connections(c_n_loss, ca_c_n_loss, c_n_ca_loss, half[:-1] + half[1:], torch.maximum(bad[:-1], bad[1:]))


@functools.cache
# An inference tensor in the cache could not be used in training.
@torch.inference_mode(False)
def _peptide_bonds(bonds: Code, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return mean and deviation of the three terms of a peptide bond, [2, 3, 2]: before other residues, before proline.

    The result is cached because a copy to the device waits for it.
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
    """Compute the clashes of atoms of different residues by their van der Waals radii (Supp. 1.9.11).

    Peptide bonds and SG-SG are exempt. As in DeepMind's code, any two atoms at the index of SG in atom14 are exempt,
    and residues with the same index are not compared even in different chains. `every_pair` compares those too.
    """
    n, exists = atoms.shape[0], atom_mask.flatten()
    radius = (residue_rows("ATOM14_VDW_RADIUS", aatype).to(atoms.dtype) * atom_mask).flatten()
    index = residue_index.repeat_interleave(14)
    slot = torch.arange(14, device=atoms.device).repeat(n)
    order = torch.arange(n, device=atoms.device).repeat_interleave(14) if every_pair else index
    chain = (torch.zeros_like(aatype) if asym_id is None else asym_id).repeat_interleave(14)
    per_atom = overlaps(atoms.flatten(0, 1), radius, exists, index, order, chain, slot, overlap_tolerance)
    # Each pair counts at both of its atoms, so the epsilon of 1e-6 is doubled too.
    error, _, examined = per_atom.sum(-1).unbind()
    return AtomViolations(
        per_atom_loss=per_atom[0].view(n, 14),
        per_atom_pairs=per_atom[1].view(n, 14),
        mean_loss=error / (2e-6 + examined),
    )


@functools.cache
@torch.inference_mode(False)
def _bounds(
    overlap_tolerance: float, tolerance_factor: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """Return `residue.distance_bounds` on a device, cached because a copy waits for the device."""
    bounds = residue.distance_bounds(overlap_tolerance, tolerance_factor)
    return tuple(torch.as_tensor(bound, dtype=dtype, device=device) for bound in bounds)


def within_residue_violations(
    atoms: Tensor, atom_mask: Tensor, aatype: Tensor, tolerance_factor: float = 12.0, overlap_tolerance: float = 1.5
) -> AtomViolations:
    """Compute the violations of distances within residues by bond lengths, angles and radii (Supp. 1.9.11)."""
    lower, upper = (bound[aatype] for bound in _bounds(overlap_tolerance, tolerance_factor, atoms.dtype, atoms.device))
    pairs = atom_mask[:, :, None] * atom_mask[:, None, :] * (1 - torch.eye(14, dtype=atoms.dtype, device=atoms.device))
    # The epsilon makes the gradient zero for two atoms at the same position.
    distance = torch.sqrt(1e-10 + (atoms[:, :, None, :] - atoms[:, None, :, :]).square().sum(-1))
    error = pairs * ((lower - distance).relu() + (distance - upper).relu())
    violated = pairs * ((distance < lower) | (distance > upper))
    return AtomViolations(
        per_atom_loss=error.sum(1) + error.sum(2),
        per_atom_pairs=violated.sum(1) + violated.sum(2),
        mean_loss=error.sum() / (1e-6 + pairs.sum()),
    )


def center_of_mass_loss(ca: Tensor, true_ca: Tensor, mask: Tensor, asym_id: Tensor) -> Tensor:
    """Compute the loss on centres of chains that are nearer than in the truth (Multimer, equation 1).

    ca, true_ca: [N, 3], angstrom; mask: [N]; asym_id: [N]. The loss is the mean over pairs of chains of the squared
    error in units of 20 angstrom, where distances may be up to 4 angstrom too short; it is 0 for a single chain. The
    centre of a chain is the mean of its resolved CA.

    The paper pushes different chains apart, so a chain and itself are no pair, and K chains have K (K - 1) pairs.
    DeepMind did not publish the code. Uni-Fold and OpenFold divide by K^2, which halves the term of a dimer.
    """
    # Compute the centre for every residue and count only the first residue of each chain. The number of chains would
    # have to be copied to the host.
    same = asym_id[:, None] == asym_id
    first = ~same.tril(-1).any(-1)
    # [N, N]: resolved residues of the same chain.
    member = same * mask.to(upcast_half(ca).dtype)
    size = member.sum(-1)

    def distances(points: Tensor) -> Tensor:
        centres = (member[..., None] * points).sum(-2) / size.clamp(min=1)[:, None]
        # The epsilon gives chains at the same position, as an untrained network puts them, a gradient of 0.
        return torch.sqrt(1e-10 + (centres[:, None] - centres).square().sum(-1))

    counts = first * (size > 0)
    pairs = (counts[:, None] & counts & ~same).to(size.dtype)
    nearer = (distances(true_ca) - distances(ca) - 4).relu() / 20
    return (pairs * nearer.square()).sum() / pairs.sum().clamp(min=1)
