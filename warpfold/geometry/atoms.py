"""Convert between atoms, torsion angles and frames (Supp. 1.8).

The first argument of most functions is `aatype`, int64 [*, N], 0 to 19 and 20 = unknown (a template's gap, 21, counts
as unknown), with any leading axes `*`. Results have the dtype of the coordinates. Lengths are in angstrom if a table is
involved, else in any unit. Torsions are in the order omega, phi, psi, chi1 to chi4, as (sin, cos).
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from warpfold.geometry import residue
from warpfold.geometry.rigid import Rigid, multiply
from warpfold.ops.tensors import in_blocks

N, CA, C, CB, O = (residue.ATOM_ORDER[name] for name in ("N", "CA", "C", "CB", "O"))
# Square angstrom: the upper edge of the last bin of distances.
FAR = 1e8
GLYCINE = residue.RESTYPE_ORDER["G"]


@dataclass(frozen=True)
class Torsions:
    """Torsion angles of a structure.

    sin_cos: [*, N, 7, 2]. alt_sin_cos: the same under the alternative naming of ambiguous atoms. mask: [*, N, 7], 1 if
    all four atoms exist; elsewhere the angle is (0, 0).
    """

    sin_cos: Tensor
    alt_sin_cos: Tensor
    mask: Tensor


@dataclass(frozen=True)
class RigidGroups:
    """Frames of the rigid groups of a structure: backbone, omega, phi, psi, chi1 to chi4. All fields are [*, N, 8].

    alt_frames: the frames under the alternative naming of ambiguous atoms. mask: 1 if the three atoms that define the
    frame exist. exists: 1 if the residue type has the group. ambiguous: 1 if the two frames differ.
    """

    frames: Rigid
    alt_frames: Rigid
    mask: Tensor
    exists: Tensor
    ambiguous: Tensor


@dataclass(frozen=True)
class RenamedTruth:
    """Labels in the naming of the ambiguous atoms that is closer to a prediction.

    swapped: bool [*, N], whether this is the alternative naming. positions: [*, N, 14, 3]. mask: [*, N, 14].
    """

    swapped: Tensor
    positions: Tensor
    mask: Tensor


@functools.cache
# An inference tensor in the cache could not be used in training.
@torch.inference_mode(False)
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
    """Convert [*, N, 14] or [*, N, 14, c] to 37 atoms, with zeros for atoms that the residue type lacks."""
    mask = residue_rows("ATOM37_MASK", aatype).to(x.dtype)
    return take_atoms(x, residue_rows("ATOM37_TO_ATOM14", aatype)) * _like(mask, x)


def atom37_to_atom14(aatype: Tensor, x: Tensor) -> Tensor:
    """Convert [*, N, 37] or [*, N, 37, c] to 14 atoms, with zeros for atoms that the residue type lacks."""
    mask = residue_rows("ATOM14_MASK", aatype).to(x.dtype)
    return take_atoms(x, residue_rows("ATOM14_TO_ATOM37", aatype)) * _like(mask, x)


def swap_atom14(aatype: Tensor, x: Tensor) -> Tensor:
    """Rename the ambiguous atoms of [*, N, 14] or [*, N, 14, c] (Supp. 1.8.5)."""
    return take_atoms(x, residue_rows("ATOM14_SWAP", aatype))


def _like(mask: Tensor, x: Tensor) -> Tensor:
    return mask.reshape(*mask.shape, *(1,) * (x.dim() - mask.dim()))


def pseudo_beta(aatype: Tensor, positions: Tensor) -> Tensor:
    """Select CB, or CA for glycine: [*, N, 37, 3] -> [*, N, 3] (Supp. 1.2.9, table 1)."""
    return torch.where((aatype == GLYCINE)[..., None], positions[..., CA, :], positions[..., CB, :])


def pseudo_beta_mask(aatype: Tensor, mask: Tensor) -> Tensor:
    """Select the mask of the atoms of `pseudo_beta`: [*, N, 37] -> [*, N]."""
    return torch.where(aatype == GLYCINE, mask[..., CA], mask[..., CB])


def distogram_bins(positions: Tensor, min_bin: float, max_bin: float, bins: int, rows: Tensor | None = None) -> Tensor:
    """Compute one-hot distances: [*, N, 3] -> [*, N, N, bins] (Supp. 1.2.9, Algorithm 32).

    The lower edges of the bins are `bins` evenly spaced distances from `min_bin` to `max_bin`, in the unit of the
    positions. The last bin is open. A distance on an edge or below `min_bin` has no bin.
    rows: [*, R, 3], the positions to measure from; the result is [*, R, N, bins]. None: all.
    """
    rows = positions if rows is None else rows
    squared = (rows[..., :, None, :] - positions[..., None, :, :]).square().sum(-1, keepdim=True)
    lower = torch.linspace(min_bin, max_bin, bins, dtype=positions.dtype, device=positions.device).square()
    upper = torch.cat([lower[1:], lower.new_full((1,), FAR)])
    return ((squared > lower) & (squared < upper)).to(positions.dtype)


def distance_bins(positions: Tensor, min_bin: float, max_bin: float, bins: int, rows: Tensor | None = None) -> Tensor:
    """Compute the number of each distance's bin, int64 [*, R, N]: 1 to `bins`, or 0 for a distance without a bin.

    The bins and the arguments are those of `distogram_bins`.
    """
    rows = positions if rows is None else rows
    squared = (rows[..., :, None, :] - positions[..., None, :, :]).square().sum(-1)
    edges = torch.linspace(min_bin, max_bin, bins, dtype=positions.dtype, device=positions.device).square()
    edges = torch.cat([edges, edges.new_full((1,), FAR)])
    above, from_edge = (torch.bucketize(squared, edges, right=right) for right in (False, True))
    return torch.where((above == from_edge) & (above <= bins), above, 0)


def dihedral(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Compute (sin, cos) of the torsion of four points about b-c: four [*, 3] -> [*, 2]; zero if undefined."""
    local = Rigid.from_axes(c - b, a - c, c).invert_apply(d)
    _, y, z = local.unbind(-1)
    return torch.stack([z, y], dim=-1) * torch.rsqrt(y.square() + z.square() + 1e-8)[..., None]


def atom37_to_torsions(aatype: Tensor, positions: Tensor, mask: Tensor) -> Torsions:
    """Compute the torsions of a structure (Supp. 1.8.4, table 2): positions [*, N, 37, 3], mask [*, N, 37]."""
    # omega and phi need atoms of the previous residue, which the first residue lacks.
    before = torch.nn.functional.pad(positions[..., :-1, :, :], (0, 0, 0, 0, 1, 0))
    before_mask = torch.nn.functional.pad(mask[..., :-1, :], (0, 0, 1, 0))
    chi = residue_rows("CHI_ATOM37", aatype)
    backbone = [
        [before[..., CA, :], before[..., C, :], positions[..., N, :], positions[..., CA, :]],
        [before[..., C, :], positions[..., N, :], positions[..., CA, :], positions[..., C, :]],
        [positions[..., N, :], positions[..., CA, :], positions[..., C, :], positions[..., O, :]],
    ]
    # [*, N, 7, 4, 3]
    points = torch.cat(
        [
            torch.stack([torch.stack(atoms, dim=-2) for atoms in backbone], dim=-3),
            take_atoms(positions, chi.flatten(-2)).unflatten(-2, (4, 4)),
        ],
        dim=-3,
    )
    backbone_mask = [
        before_mask[..., CA] * before_mask[..., C] * mask[..., N] * mask[..., CA],
        before_mask[..., C] * mask[..., N] * mask[..., CA] * mask[..., C],
        mask[..., N] * mask[..., CA] * mask[..., C] * mask[..., O],
    ]
    chi_mask = take_atoms(mask, chi.flatten(-2)).unflatten(-1, (4, 4)).prod(-1)
    chi_mask = chi_mask * residue_rows("CHI_MASK", aatype).to(mask.dtype)
    mask = torch.cat([torch.stack(backbone_mask, dim=-1), chi_mask], dim=-1)

    sin_cos = dihedral(*points.unbind(-2)) * mask[..., None].to(positions.dtype)
    # psi is measured to O instead of to the N of the next residue, which is half a turn away from O.
    sin_cos = torch.cat([sin_cos[..., :2, :], -sin_cos[..., 2:3, :], sin_cos[..., 3:, :]], dim=-2)
    half_turn = 1 - 2 * residue_rows("CHI_PI_PERIODIC", aatype).to(positions.dtype)
    alt_sin_cos = torch.cat([sin_cos[..., :3, :], sin_cos[..., 3:, :] * half_turn[..., None]], dim=-2)
    return Torsions(sin_cos, alt_sin_cos, mask)


def atom37_to_frames(aatype: Tensor, positions: Tensor, mask: Tensor) -> RigidGroups:
    """Compute the frames of the rigid groups (Supp. 1.8.1, 1.8.4): positions [*, N, 37, 3], mask [*, N, 37].

    A frame whose mask is 0 is finite but meaningless.
    """
    atoms = residue_rows("GROUP_ATOM37", aatype)
    # [*, N, 8, 3, 3]
    points = take_atoms(positions, atoms.flatten(-2)).unflatten(-2, (8, 3))
    negative_x, origin, xy = points.unbind(-2)
    frames = Rigid.from_axes(origin - negative_x, xy - origin, origin)
    # The table has C on the negative x axis of the backbone, but the backbone's x axis points to C.
    flips = frames.rotation.new_tensor([[-1, 1, -1]] + 7 * [[1, 1, 1]])
    frames = Rigid(frames.rotation * flips[:, None, :], origin)

    exists = residue_rows("GROUP_MASK", aatype).to(mask.dtype)
    ambiguous = residue_rows("GROUP_AMBIGUOUS", aatype).to(mask.dtype)
    has_atoms = take_atoms(mask, atoms.flatten(-2)).unflatten(-1, (8, 3)).amin(-1)
    half_turn = 1 - 2 * ambiguous.to(positions.dtype)
    about_x = torch.stack([torch.ones_like(half_turn), half_turn, half_turn], dim=-1)
    alt_frames = Rigid(frames.rotation * about_x[..., None, :], origin)
    return RigidGroups(frames, alt_frames, has_atoms * exists, exists, ambiguous)


def torsions_to_frames(aatype: Tensor, backbone: Rigid, angles: Tensor) -> Rigid:
    """Compute the global frames [*, N, 8] of the rigid groups (Algorithm 24, computeAllAtomCoordinates, lines 1 to 10).

    backbone: [*, N], in angstrom. angles: [*, N, 7, 2], unit vectors (sin, cos). Each rotates its group about x
    (Algorithm 25, makeRotX): T_group = T_parent T_literature makeRotX(angle), where T_literature is
    `residue.RIGID_GROUP_FRAMES`. The parent is the previous chi for chi2 to chi4, and else the backbone. A group that
    the residue type lacks gets a zero matrix and the origin of its parent. aatype may have fewer leading axes.
    """
    # Motions are 4x4 matrices here, so that their composition is one product. T_literature makeRotX(angle) is linear in
    # (sin, cos), with coefficients from the tables.
    constant, coefficients = (
        residue_rows(name, aatype).to(angles.dtype) for name in ("GROUP_CONSTANT", "GROUP_SIN_COS")
    )
    backbone_constant, group_constant = constant.split((1, 7), -3)
    # [*, N, 7, 4, 4]
    local = group_constant + (angles[..., None, None] * coefficients).sum(-3)

    # The first chunk ends with chi1.
    first, *chis = local.split((residue.CHI1, 1, 1, 1), -3)
    to_backbone = [backbone_constant.expand(*local.shape[:-3], 1, 4, 4), first]
    for chi in chis:
        to_backbone.append(multiply(to_backbone[-1][..., -1:, :, :], chi))
    return Rigid.from_matrix(multiply(backbone.to_matrix()[..., None, :, :], torch.cat(to_backbone, -3)))


def frames_to_atom14(aatype: Tensor, frames: Rigid) -> Tensor:
    """Place the ideal atoms in their groups' frames: [*, N, 8] -> [*, N, 14, 3], angstrom (Algorithm 24, line 11).

    Atoms that the residue type lacks are zero. aatype may have fewer leading axes than the frames.
    """
    # A sum over all groups, where an atom has zero coefficients for all groups but its own. The gradient of a gather
    # would need atomic additions and not be deterministic.
    # [*, N, 14, 8 groups, x y z 1] and [*, N, 3, 8 groups times 4].
    ideal = residue_rows("ATOM14_IN_GROUPS", aatype).to(frames.translation.dtype)
    matrices = frames.to_matrix().movedim(-2, -3).flatten(-2)
    return (matrices[..., None, :, :] * ideal.flatten(-2)[..., None, :]).sum(-1)


@torch.no_grad()
def rename_ground_truth(
    predicted: Tensor, positions: Tensor, mask: Tensor, alt_positions: Tensor, alt_mask: Tensor, ambiguous: Tensor
) -> RenamedTruth:
    """Choose the naming whose distances are closer to the predicted ones (Algorithm 26).

    This is renameSymmetricGroundTruthAtoms. predicted: [*, N, 14, 3]. positions, alt_positions: [*, N, 14, 3], and
    mask, alt_mask: [*, N, 14], the labels in both namings. ambiguous: [*, N, 14]. The errors of the distances from a
    residue's ambiguous atoms to all unambiguous atoms are summed for both namings. The choice has no gradient.
    """
    columns = residue.AMBIGUOUS_COLUMNS
    reference_mask = (mask * (1 - ambiguous)).flatten(-2)
    ambiguous_mask = (mask * ambiguous)[..., columns]

    def distances(atoms: Tensor, rows: slice) -> Tensor:
        """Compute the distances [*, rows, ambiguous, N * 14] from ambiguous atoms to all atoms."""
        ambiguous_atoms = atoms[..., rows, columns, :].flatten(-3, -2)
        all_distances = torch.cdist(ambiguous_atoms, atoms.flatten(-3, -2), compute_mode="donot_use_mm_for_euclid_dist")
        return all_distances.unflatten(-2, (-1, ambiguous_mask.shape[-1]))

    def errors(rows: slice) -> tuple[Tensor, ...]:
        """Compute the errors [*, rows] of both namings."""
        pairs = ambiguous_mask[..., rows, :, None] * reference_mask[..., None, None, :]
        target = distances(predicted, rows)
        namings = (positions, alt_positions)
        return tuple(((distances(x, rows) - target).abs() * pairs).sum((-2, -1)) for x in namings)

    blocks = in_blocks(errors, ambiguous_mask.shape[-2], ambiguous_mask.shape[-1] * reference_mask.numel())
    error, alt_error = (torch.cat(block_errors, -1) for block_errors in zip(*blocks))
    swapped = alt_error < error
    return RenamedTruth(
        swapped,
        torch.where(swapped[..., None, None], alt_positions, positions),
        torch.where(swapped[..., None], alt_mask, mask),
    )
