"""Convert between atoms, torsion angles and frames (Supp. 1.8).

Functions take `aatype` first, int64 [*, N] with 0-19 and 20 = unknown (a template's gap, 21, counts as unknown), and
accept any leading axes `*`.  Results have the dtype of the coordinates.  Lengths are in angstrom where a table is
involved, else in any unit.  Torsions are in the order omega, phi, psi, chi1 to chi4, as (sin, cos).
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from warpfold.geometry import residue
from warpfold.geometry.rigid import Rigid, multiply
from warpfold.ops.tensors import in_blocks

N, CA, C, CB, O = (residue.ATOM_ORDER[name] for name in ("N", "CA", "C", "CB", "O"))
FAR = 1e8  # square angstrom: where the last bin of distances ends
GLYCINE = residue.RESTYPE_ORDER["G"]


@dataclass(frozen=True)
class Torsions:
    """Torsion angles of a structure."""

    sin_cos: Tensor  # [*, N, 7, 2]
    alt_sin_cos: Tensor  # [*, N, 7, 2], under the alternative naming of ambiguous atoms
    mask: Tensor  # [*, N, 7], 1 where the four atoms are there; elsewhere the angle is (0, 0)


@dataclass(frozen=True)
class RigidGroups:
    """Frames of the rigid groups of a structure: backbone, omega, phi, psi, chi1 to chi4."""

    frames: Rigid  # [*, N, 8]
    alt_frames: Rigid  # [*, N, 8], under the alternative naming of ambiguous atoms
    mask: Tensor  # [*, N, 8], 1 where the three atoms that define the frame are there
    exists: Tensor  # [*, N, 8], 1 where the residue type has the group
    ambiguous: Tensor  # [*, N, 8], 1 where the two frames differ


@dataclass(frozen=True)
class RenamedTruth:
    """Labels in that naming of the ambiguous atoms which is closer to a prediction."""

    swapped: Tensor  # bool [*, N], where the alternative naming is
    positions: Tensor  # [*, N, 14, 3]
    mask: Tensor  # [*, N, 14]


@functools.cache
@torch.inference_mode(False)  # what is made in inference may serve training later
def _table(name: str, device: torch.device) -> Tensor:
    return torch.from_numpy(getattr(residue, name)).to(device)


def residue_rows(name: str, aatype: Tensor) -> Tensor:
    """Look up a table of `residue`, given by name, for every residue: [*, N, ...]."""
    return _table(name, aatype.device)[aatype.clamp(max=residue.UNKNOWN)]


def take_atoms(x: Tensor, index: Tensor) -> Tensor:
    """Gather atoms: x [*, N, A] or [*, N, A, c], index int64 [*, N, K] -> [*, N, K] or [*, N, K, c]."""
    extra = x.dim() - index.dim()
    return torch.take_along_dim(x, index.reshape(*index.shape, *(1,) * extra), dim=index.dim() - 1)


def atom14_to_atom37(aatype: Tensor, x: Tensor) -> Tensor:
    """Convert [*, N, 14] or [*, N, 14, c] to 37 atoms, zero where the residue type has no such atom."""
    mask = residue_rows("ATOM37_MASK", aatype).to(x.dtype)
    return take_atoms(x, residue_rows("ATOM37_TO_ATOM14", aatype)) * _like(mask, x)


def atom37_to_atom14(aatype: Tensor, x: Tensor) -> Tensor:
    """Convert [*, N, 37] or [*, N, 37, c] to 14 atoms, zero where the residue type has no such atom."""
    mask = residue_rows("ATOM14_MASK", aatype).to(x.dtype)
    return take_atoms(x, residue_rows("ATOM14_TO_ATOM37", aatype)) * _like(mask, x)


def swap_atom14(aatype: Tensor, x: Tensor) -> Tensor:
    """Rename the ambiguous atoms of [*, N, 14] or [*, N, 14, c] (Supp. 1.8.5)."""
    return take_atoms(x, residue_rows("ATOM14_SWAP", aatype))


def _like(mask: Tensor, x: Tensor) -> Tensor:
    return mask.reshape(*mask.shape, *(1,) * (x.dim() - mask.dim()))


def pseudo_beta(aatype: Tensor, positions: Tensor) -> Tensor:
    """Return CB, or CA of glycine: [*, N, 37, 3] -> [*, N, 3] (Supp. 1.2.9, table 1)."""
    return torch.where((aatype == GLYCINE)[..., None], positions[..., CA, :], positions[..., CB, :])


def pseudo_beta_mask(aatype: Tensor, mask: Tensor) -> Tensor:
    """Return whether that atom is there: [*, N, 37] -> [*, N]."""
    return torch.where(aatype == GLYCINE, mask[..., CA], mask[..., CB])


def distogram_bins(positions: Tensor, min_bin: float, max_bin: float, bins: int, rows: Tensor | None = None) -> Tensor:
    """Return one-hot distances: [*, N, 3] -> [*, N, N, bins] (Supp. 1.2.9, Algorithm 32).

    rows [*, R, 3]: positions to measure from, if not from all: -> [*, R, N, bins].

    The bins begin at `bins` even steps from `min_bin` to `max_bin`, in the unit of the positions, and the last is open;
    a distance on an edge or below `min_bin` has no bin.
    """
    rows = positions if rows is None else rows
    squared = (rows[..., :, None, :] - positions[..., None, :, :]).square().sum(-1, keepdim=True)
    lower = torch.linspace(min_bin, max_bin, bins, dtype=positions.dtype, device=positions.device).square()
    upper = torch.cat([lower[1:], lower.new_full((1,), FAR)])
    return ((squared > lower) & (squared < upper)).to(positions.dtype)


def distance_bins(positions: Tensor, min_bin: float, max_bin: float, bins: int, rows: Tensor | None = None) -> Tensor:
    """Return the number of each distance's bin, from 1; 0: it has none.  int64 [*, R, N], of the bins that
    `distogram_bins` describes."""
    rows = positions if rows is None else rows
    squared = (rows[..., :, None, :] - positions[..., None, :, :]).square().sum(-1)
    edges = torch.linspace(min_bin, max_bin, bins, dtype=positions.dtype, device=positions.device).square()
    edges = torch.cat([edges, edges.new_full((1,), FAR)])
    above, from_edge = (torch.bucketize(squared, edges, right=right) for right in (False, True))
    return torch.where((above == from_edge) & (above <= bins), above, 0)


def dihedral(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Return (sin, cos) of the torsion of four points about b-c: four [*, 3] -> [*, 2]; zero where not defined."""
    local = Rigid.from_axes(c - b, a - c, c).invert_apply(d)
    _, y, z = local.unbind(-1)
    return torch.stack([z, y], dim=-1) * torch.rsqrt(y.square() + z.square() + 1e-8)[..., None]


def atom37_to_torsions(aatype: Tensor, positions: Tensor, mask: Tensor) -> Torsions:
    """Compute the torsions of a structure (Supp. 1.8.4, table 2): positions [*, N, 37, 3], mask [*, N, 37]."""
    # omega and phi need atoms of the previous residue; the first has none.
    before = torch.nn.functional.pad(positions[..., :-1, :, :], (0, 0, 0, 0, 1, 0))
    before_mask = torch.nn.functional.pad(mask[..., :-1, :], (0, 0, 1, 0))
    chi = residue_rows("CHI_ATOM37", aatype)
    backbone = [
        [before[..., CA, :], before[..., C, :], positions[..., N, :], positions[..., CA, :]],
        [before[..., C, :], positions[..., N, :], positions[..., CA, :], positions[..., C, :]],
        [positions[..., N, :], positions[..., CA, :], positions[..., C, :], positions[..., O, :]],
    ]
    points = torch.cat(
        [
            torch.stack([torch.stack(atoms, dim=-2) for atoms in backbone], dim=-3),
            take_atoms(positions, chi.flatten(-2)).unflatten(-2, (4, 4)),
        ],
        dim=-3,
    )  # [*, N, 7, 4, 3]
    backbone_mask = [
        before_mask[..., CA] * before_mask[..., C] * mask[..., N] * mask[..., CA],
        before_mask[..., C] * mask[..., N] * mask[..., CA] * mask[..., C],
        mask[..., N] * mask[..., CA] * mask[..., C] * mask[..., O],
    ]
    chi_mask = take_atoms(mask, chi.flatten(-2)).unflatten(-1, (4, 4)).prod(-1)
    chi_mask = chi_mask * residue_rows("CHI_MASK", aatype).to(mask.dtype)
    mask = torch.cat([torch.stack(backbone_mask, dim=-1), chi_mask], dim=-1)

    sin_cos = dihedral(*points.unbind(-2)) * mask[..., None].to(positions.dtype)
    # psi is measured to O, which lies opposite to the N of the next residue, half a turn away
    sin_cos = torch.cat([sin_cos[..., :2, :], -sin_cos[..., 2:3, :], sin_cos[..., 3:, :]], dim=-2)
    half_turn = 1 - 2 * residue_rows("CHI_PI_PERIODIC", aatype).to(positions.dtype)
    alt_sin_cos = torch.cat([sin_cos[..., :3, :], sin_cos[..., 3:, :] * half_turn[..., None]], dim=-2)
    return Torsions(sin_cos, alt_sin_cos, mask)


def atom37_to_frames(aatype: Tensor, positions: Tensor, mask: Tensor) -> RigidGroups:
    """Compute the frames of the rigid groups (Supp. 1.8.1, 1.8.4): positions [*, N, 37, 3], mask [*, N, 37].

    A frame whose mask is 0 is finite but meaningless.
    """
    atoms = residue_rows("GROUP_ATOM37", aatype)
    points = take_atoms(positions, atoms.flatten(-2)).unflatten(-2, (8, 3))  # [*, N, 8, 3, 3]
    negative_x, origin, xy = points.unbind(-2)
    frames = Rigid.from_axes(origin - negative_x, xy - origin, origin)
    turned = frames.rotation.new_tensor([[-1, 1, -1]] + 7 * [[1, 1, 1]])  # the backbone's x axis points to C
    frames = Rigid(frames.rotation * turned[:, None, :], origin)

    exists = residue_rows("GROUP_MASK", aatype).to(mask.dtype)
    ambiguous = residue_rows("GROUP_AMBIGUOUS", aatype).to(mask.dtype)
    there = take_atoms(mask, atoms.flatten(-2)).unflatten(-1, (8, 3)).amin(-1)
    half_turn = 1 - 2 * ambiguous.to(positions.dtype)
    about_x = torch.stack([torch.ones_like(half_turn), half_turn, half_turn], dim=-1)
    alt_frames = Rigid(frames.rotation * about_x[..., None, :], origin)
    return RigidGroups(frames, alt_frames, there * exists, exists, ambiguous)


def torsions_to_frames(aatype: Tensor, backbone: Rigid, angles: Tensor) -> Rigid:
    """Compute global frames [*, N, 8] of the rigid groups (Algorithm 24, computeAllAtomCoordinates, lines 1 to 10).

    backbone [*, N] in angstrom; angles [*, N, 7, 2], unit vectors (sin, cos), each of which turns its group about x
    (Algorithm 25, makeRotX).  A group that the residue type does not have gets a zero matrix and the origin of its
    parent.  aatype may lack leading axes of the others.
    """
    # Motions are matrices [4, 4] here, so that composing two is one product.  The groups' are linear in (sin, cos).
    still, turning = (residue_rows(name, aatype).to(angles.dtype) for name in ("GROUP_STILL", "GROUP_TURNING"))
    backbones, rest = still.split((1, 7), -3)
    local = rest + (angles[..., None, None] * turning).sum(-3)  # [*, N, 7, 4, 4]

    # The parent of chi2 to chi4 is the previous chi; that of all other groups is the backbone.
    first, *chis = local.split((residue.CHI1, 1, 1, 1), -3)  # the first of these end with chi1
    to_backbone = [backbones.expand(*local.shape[:-3], 1, 4, 4), first]
    for chi in chis:
        to_backbone.append(multiply(to_backbone[-1][..., -1:, :, :], chi))
    return Rigid.from_matrix(multiply(backbone.to_matrix()[..., None, :, :], torch.cat(to_backbone, -3)))


def frames_to_atom14(aatype: Tensor, frames: Rigid) -> Tensor:
    """Put ideal atoms into their groups' frames [*, N, 8] -> [*, N, 14, 3] angstrom, masked (Algorithm 24, line 11).

    aatype may lack leading axes of the frames.
    """
    # A sum over the groups, of which all but one count zero times, and not a gather, whose gradient would need atomic
    # additions: this repeats bit for bit.
    ideal = residue_rows("ATOM14_IN_GROUPS", aatype).to(frames.translation.dtype)  # [*, N, 14, 8 groups, x y z 1]
    of_groups = frames.to_matrix().movedim(-2, -3).flatten(-2)  # [*, N, 3, 8 times 4]
    return (of_groups[..., None, :, :] * ideal.flatten(-2)[..., None, :]).sum(-1)


@torch.no_grad()
def rename_ground_truth(
    predicted: Tensor, positions: Tensor, mask: Tensor, alt_positions: Tensor, alt_mask: Tensor, ambiguous: Tensor
) -> RenamedTruth:
    """Choose the naming whose distances are closer to the predicted ones (Algorithm 26).

    predicted [*, N, 14, 3]; the labels in both namings, positions [*, N, 14, 3] and masks [*, N, 14]; ambiguous [*, N,
    14].  Distances from ambiguous atoms to unambiguous ones are compared.  No gradient.
    """
    columns = residue.AMBIGUOUS_COLUMNS
    known = (mask * (1 - ambiguous)).flatten(-2)
    asked = (mask * ambiguous)[..., columns]

    def distances(atoms: Tensor, rows: slice) -> Tensor:  # [*, rows, ambiguous, N * 14]
        some = atoms[..., rows, columns, :].flatten(-3, -2)
        found = torch.cdist(some, atoms.flatten(-3, -2), compute_mode="donot_use_mm_for_euclid_dist")
        return found.unflatten(-2, (-1, asked.shape[-1]))

    def errors(rows: slice) -> tuple[Tensor, ...]:  # [*, rows], of both namings
        to_compare, target = asked[..., rows, :, None] * known[..., None, None, :], distances(predicted, rows)
        namings = (positions, alt_positions)
        return tuple(((distances(x, rows) - target).abs() * to_compare).sum((-2, -1)) for x in namings)

    blocks = in_blocks(errors, asked.shape[-2], asked.shape[-1] * known.numel())
    error, alt_error = (torch.cat(parts, -1) for parts in zip(*blocks))
    swapped = alt_error < error
    return RenamedTruth(
        swapped,
        torch.where(swapped[..., None, None], alt_positions, positions),
        torch.where(swapped[..., None], alt_mask, mask),
    )
