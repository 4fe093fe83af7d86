"""The residue tables agree with each other and with chemistry."""

import itertools
import math

import numpy as np
import pytest
import torch

from warpfold.geometry import residue
from warpfold.geometry.atoms import frames_to_atom14, torsions_to_frames
from warpfold.geometry.rigid import Rigid

# Sides of the ring of proline, which torsions drawn at random do not close.
PROLINE_RING = {frozenset(pair) for pair in (("N", "CD"), ("N", "CG"), ("CA", "CD"))}


def test_atom_orders_are_inverse() -> None:
    for restype, column in zip(*residue.ATOM14_MASK.nonzero()):
        atom = residue.ATOM14_TO_ATOM37[restype, column]
        assert residue.ATOM37_MASK[restype, atom] == 1
        assert residue.ATOM37_TO_ATOM14[restype, atom] == column
        assert residue.ATOM_TYPES[atom] == residue.ATOM14_NAMES[restype][column]


def test_swapping_names_twice_changes_nothing() -> None:
    twice = np.take_along_axis(residue.ATOM14_SWAP, residue.ATOM14_SWAP, axis=1)
    assert (twice == np.arange(14)).all()
    swapped = {residue.RESTYPE_3[i] for i in np.flatnonzero(residue.ATOM14_AMBIGUOUS.any(1))}
    assert swapped == {"ASP", "GLU", "PHE", "TYR"}
    assert not residue.ATOM14_AMBIGUOUS[:, : residue.AMBIGUOUS_COLUMNS.start].any()
    assert not residue.ATOM14_AMBIGUOUS[:, residue.AMBIGUOUS_COLUMNS.stop :].any()


def test_only_the_chi_before_ambiguous_atoms_is_periodic() -> None:
    for restype, k in zip(*residue.CHI_PI_PERIODIC.nonzero()):
        fourth = residue.ATOM37_TO_ATOM14[restype, residue.CHI_ATOM37[restype, k, 3]]
        assert residue.ATOM14_AMBIGUOUS[restype, fourth] == 1
    assert residue.CHI_PI_PERIODIC.sum() == 4


def test_group_frames_are_rigid_where_the_group_exists() -> None:
    frames = residue.RIGID_GROUP_FRAMES[:20]
    exists = residue.GROUP_MASK[:20].astype(bool)
    rotations = frames[exists][:, :3, :3].astype(np.float64)
    np.testing.assert_allclose(
        rotations @ rotations.swapaxes(1, 2), np.broadcast_to(np.eye(3), rotations.shape), atol=1e-6
    )
    np.testing.assert_allclose(np.linalg.det(rotations), 1, atol=1e-6)
    assert not frames[:, residue.CHI1 :][~exists[:, residue.CHI1 :]].any()


@pytest.mark.parametrize("restype", range(20), ids=residue.RESTYPE_3[:20])
def test_ideal_residues_have_the_measured_bonds_and_angles(restype: int) -> None:
    """Ideal positions and bond statistics are independent tables, so each reveals errors in the other."""
    generator = torch.Generator().manual_seed(restype)
    turns = torch.rand(50, 7, generator=generator) * 2 * math.pi
    aatype = torch.full((50,), restype)
    frames = torsions_to_frames(aatype, Rigid.identity((50,)), torch.stack([turns.sin(), turns.cos()], -1))
    atoms = frames_to_atom14(aatype, frames)
    distance = torch.cdist(atoms, atoms).numpy()
    lower, upper = (bound[restype] for bound in residue.distance_bounds(tolerance_factor=4.0))
    names, bonded = residue.ATOM14_NAMES[restype], 0
    not_closed = PROLINE_RING if residue.RESTYPES[restype] == "P" else set()
    for i, j in itertools.combinations(range(sum(map(bool, names))), 2):
        if upper[i, j] > 10 or frozenset((names[i], names[j])) in not_closed:
            continue
        bonded += 1
        assert lower[i, j] <= distance[:, i, j].min(), (names[i], names[j])
        assert distance[:, i, j].max() <= upper[i, j], (names[i], names[j])
    assert bonded >= 5  # glycine: three bonds, two angles


@pytest.mark.parametrize(
    ("residues", "centre", "ranked", "sign"),
    [
        (set(residue.RESTYPE_3[:20]) - {"GLY"}, "CA", ["N", "C", "CB"], 1),  # L
        ({"ILE"}, "CB", ["CA", "CG1", "CG2"], 1),  # S
        ({"THR"}, "CB", ["OG1", "CA", "CG2"], -1),  # R
        ({"VAL"}, "CB", ["CA", "CG1", "CG2"], -1),  # CG1 is pro-R
        ({"LEU"}, "CG", ["CB", "CD1", "CD2"], -1),  # CD1 is pro-R
    ],
)
def test_ideal_residues_have_the_right_hand(
    residues: set[str], centre: str, ranked: tuple[str, ...], sign: int
) -> None:
    """Distances do not show chirality. Viewed with H away, neighbours in clockwise order (R) have negative volume."""
    aatype = torch.tensor([residue.RESTYPE_3.index(name) for name in sorted(residues)])
    angles = torch.tensor([0.6, 0.8]).expand(len(aatype), 7, 2)
    atoms = frames_to_atom14(aatype, torsions_to_frames(aatype, Rigid.identity((len(aatype),)), angles))
    for restype, xyz in zip(aatype.tolist(), atoms):
        at = dict(zip(residue.ATOM14_NAMES[restype], xyz))
        a, b, c = (at[name] - at[centre] for name in ranked)
        assert sign * torch.dot(a, torch.linalg.cross(b, c)) > 1, residue.RESTYPE_3[restype]


def test_distance_bounds() -> None:
    lower, upper = residue.distance_bounds()
    names = residue.ATOM14_NAMES[residue.RESTYPE_ORDER["S"]]
    serine = lower[residue.RESTYPE_ORDER["S"]], upper[residue.RESTYPE_ORDER["S"]]
    ca, cb, og, n = (names.index(name) for name in ("CA", "CB", "OG", "N"))
    assert (serine[0][ca, cb], serine[1][ca, cb]) == pytest.approx((1.525 - 12 * 0.015, 1.525 + 12 * 0.015))
    assert serine[0][n, og] == pytest.approx(1.55 + 1.52 - 1.5)
    assert serine[1][n, og] == pytest.approx(1e10)
    side = math.sqrt(1.525**2 + 1.418**2 - 2 * 1.525 * 1.418 * math.cos(math.radians(111.2)))
    assert (serine[0][ca, og] + serine[1][ca, og]) / 2 == pytest.approx(side, rel=1e-6)
    assert (lower == lower.swapaxes(1, 2)).all()
    assert (upper == upper.swapaxes(1, 2)).all()
    assert not lower[residue.UNKNOWN].any()
    assert (upper >= lower).all()
