"""Build backbones of sample proteins from ideal bonds and torsions of helices, strands and turns, and test packing."""

import numpy as np
from numpy.typing import NDArray

from warpfold.data.synthetic.folds import Blueprint

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

# Engh & Huber (2001), International Tables for Crystallography F, 18.3: lengths in angstrom, angles in degrees.
N_CA, CA_C, C_N, C_O = 1.459, 1.525, 1.329, 1.231
C_N_CA, N_CA_C, CA_C_N, CA_C_O = 121.7, 111.0, 117.2, 120.1
# In the frame of Supp. Alg. 21 (origin CA, x towards C, N in the xy plane).
CB = np.array([-0.525, -0.777, -1.209])

# Smallest distances in angstrom of heavy atoms more than three bonds apart: if both are N or O, which may form a
# hydrogen bond; in neighbouring residues (within the backbone: second neighbours), where the torsions decide; others.
MIN_POLAR, MIN_NEIGHBOUR, MIN_DISTANCE = 2.6, 2.75, 3.0
BACKBONE_POLAR = np.array([True, False, False, True, False])  # N, CA, C, O, CB

# Distances in angstrom for `is_compact`. ACROSS means between different helices or sheets ("bodies").
MIN_CA_CA, MIN_CB_CB = 4.0, 3.6
MIN_CA_CA_ACROSS, MIN_CB_CB_ACROSS = 5.0, 4.0
CONTACT = 8.0
# Smallest fraction of a body's residues in contact with another body. A sheet has two faces.
MIN_TOUCHED = {"H": 0.35, "E": 0.22}
# Smallest number of contacts between the first and the last body of a closed fold.
MIN_CLOSED = 3
# The radius of gyration of a folded chain is 2.2 N^0.38: Skolnick et al., J. Mol. Biol. 265, 217 (1997).
MAX_RADIUS, RADIUS_POWER = 1.15 * 2.2, 0.38


def build(torsions: Floats) -> Floats:
    """Place N, CA, C of chains with torsions (phi, psi) [B, N, 2] in degrees and omega 180: [B, N, 3, 3], angstrom."""
    batch, length, _ = torsions.shape
    phi, psi = torsions[..., 0], torsions[..., 1]
    to_n = _bond_transform(psi, CA_C_N, C_N)
    to_ca = _bond_transform(np.full_like(phi, 180.0), C_N_CA, N_CA)
    to_c = _bond_transform(phi, N_CA_C, CA_C)
    # In the frame of an atom, x points along the bond to it, and the previous bond is in the xy plane.
    frame = np.broadcast_to(np.eye(4), (batch, 4, 4))
    atoms = np.empty((batch, length, 3, 3))
    for i in range(length):
        for k, step in enumerate((to_n[:, i - 1], to_ca[:, i], to_c[:, i])):
            # The first N is the origin.
            if i > 0 or k > 0:
                frame = frame @ step
            atoms[:, i, k] = frame[:, :3, 3]
    return atoms


def _bond_transform(torsion: Floats, angle: float, length: float) -> Floats:
    """Compute the transform [..., 4, 4] from an atom's frame to the next one: rotate by torsion and angle, and move."""
    t, a = np.radians(torsion), np.pi - np.radians(angle)
    cos_t, sin_t, cos_a, sin_a = np.cos(t), np.sin(t), np.cos(a), np.sin(a)
    step = np.zeros((*t.shape, 4, 4))
    step[..., 0, 0], step[..., 0, 1] = cos_a, -sin_a
    step[..., 1, 0], step[..., 1, 1], step[..., 1, 2] = cos_t * sin_a, cos_t * cos_a, -sin_t
    step[..., 2, 0], step[..., 2, 1], step[..., 2, 2] = sin_t * sin_a, sin_t * cos_a, cos_t
    step[..., :3, 3] = length * step[..., :3, 0]
    step[..., 3, 3] = 1.0
    return step


def frames(atoms: Floats) -> tuple[Floats, Floats]:
    """Compute the frames of residues from N, CA, C [..., 3, 3] (Supp. Alg. 21): rotations and origins [..., 3]."""
    n, ca, c = atoms[..., 0, :], atoms[..., 1, :], atoms[..., 2, :]
    x = c - ca
    x = x / np.linalg.norm(x, axis=-1, keepdims=True)
    y = n - ca
    y = y - (x * y).sum(-1, keepdims=True) * x
    y = y / np.linalg.norm(y, axis=-1, keepdims=True)
    return np.stack([x, y, np.cross(x, y)], axis=-1), ca


def with_o_and_cb(atoms: Floats, psi: Floats) -> Floats:
    """Add O and CB to N, CA, C [N, 3, 3] with psi [N] in degrees: N, CA, C, O, CB [N, 5, 3]."""
    rotation, ca = frames(atoms)
    # O is trans to the next N.
    t, a = np.radians(psi + 180.0), np.pi - np.radians(CA_C_O)
    y, z = C_O * np.sin(a) * np.cos(t), C_O * np.sin(a) * np.sin(t)
    local = np.stack([np.full_like(t, CA_C + C_O * np.cos(a)), y, z], -1)
    o = ca + (rotation @ local[..., None])[..., 0]
    cb = ca + rotation @ CB
    return np.concatenate([atoms, o[..., None, :], cb[..., None, :]], axis=-2)


def distances(a: Floats, b: Floats) -> Floats:
    """Compute the distances [n, m] between points [n, 3] and [m, 3]."""
    square = (a**2).sum(-1)[:, None] + (b**2).sum(-1)[None, :] - 2.0 * a @ b.T
    return np.sqrt(np.maximum(square, 0.0))


def separations(count: int) -> NDArray[np.int64]:
    """Return the sequence separation of residues: [N, N]."""
    number = np.arange(count)
    return np.abs(number[:, None] - number[None, :])


def across(bodies: NDArray[np.int64]) -> Flags:
    """Mark the pairs of residues in different helices or sheets: [N, N]. bodies: see `Blueprint`."""
    return (bodies[:, None] != bodies[None, :]) & (bodies >= 0)[:, None] & (bodies >= 0)[None, :]


def clashes(backbone: Floats) -> bool:
    """Return whether any N, CA, C, O, CB [N, 5, 3] of residues that are not neighbours are too close."""
    count = len(backbone)
    distance = distances(backbone.reshape(-1, 3), backbone.reshape(-1, 3)).reshape(count, 5, count, 5)
    separation = separations(count)[:, None, :, None]
    limit = np.where(separation == 2, MIN_NEIGHBOUR, MIN_DISTANCE)
    polar = BACKBONE_POLAR[:, None, None] & BACKBONE_POLAR[None, None, :]
    return bool(((distance < np.where(polar, MIN_POLAR, limit)) & (separation >= 2)).any())


def is_compact(blueprint: Blueprint, atoms: Floats) -> bool:
    """Return whether N, CA, C [N, 3, 3] of a blueprint form a compact fold, by the positions of CA and CB.

    Helices and sheets must touch without overlap, and the radius of gyration must be that of a protein.
    """
    rotation, ca = frames(atoms)
    cb = ca + rotation @ CB
    ca_ca, cb_cb = distances(ca, ca), distances(cb, cb)
    separation, bodies = separations(len(ca)), blueprint.bodies
    # Pairs next to a loop are always close.
    is_across = across(bodies) & (separation >= 8)
    if (((ca_ca < MIN_CA_CA) | (cb_cb < MIN_CB_CB)) & (separation >= 3)).any():
        return False
    if (is_across & ((ca_ca < MIN_CA_CA_ACROSS) | (cb_cb < MIN_CB_CB_ACROSS))).any():
        return False
    if np.sqrt(((ca - ca.mean(0)) ** 2).sum(-1).mean()) >= MAX_RADIUS * len(ca) ** RADIUS_POWER:
        return False
    contact = is_across & (cb_cb < CONTACT)
    numbers = np.unique(bodies[bodies >= 0])
    for body in numbers:
        least = MIN_TOUCHED[blueprint.elements[int(np.argmax(bodies == body))]]
        if contact[bodies == body].any(1).mean() <= least:
            return False
    ends = contact[np.ix_(bodies == numbers[0], bodies == numbers[-1])]
    return not blueprint.fold.closed or bool(ends.sum() >= MIN_CLOSED)
