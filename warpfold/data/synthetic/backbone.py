"""Backbones of sample proteins: ideal bonds, torsions of helices, strands and turns, elements packed without clashes.

Lengths and loop types of a fold are drawn, the chains are built from their torsions, many at once, and those whose
elements do not pack are thrown away.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from warpfold.data.synthetic.tables import (
    FIRST,
    HELIX,
    JITTER,
    LAST,
    LOOPS,
    SHEETS,
    TAIL_LETTERS,
    Fold,
)

Floats = NDArray[np.float64]

# Engh & Huber (2001), International Tables for Crystallography F, 18.3: lengths in angstrom, angles in degrees.
N_CA, CA_C, C_N, C_O = 1.459, 1.525, 1.329, 1.231
C_N_CA, N_CA_C, CA_C_N = 121.7, 111.0, 117.2
# In the frame of Supp. Alg. 21 (origin CA, x towards C, N in the xy plane).
CB = np.array([-0.525, -0.777, -1.209])

# Closest approach of heavy atoms more than three bonds apart, angstrom: where both are N or O and a hydrogen bond may
# be; in neighbouring residues (within the backbone: the next but one), where torsions alone decide; and elsewhere.
MIN_POLAR, MIN_NEIGHBOUR, MIN_DISTANCE = 2.6, 2.75, 3.0
BACKBONE_POLAR = np.array([True, False, False, True, False])  # N, CA, C, O, CB

# The screen, angstrom.  "Across" is between helices and sheets.
MIN_CA_CA, MIN_CB_CB = 4.0, 3.6
MIN_CA_CA_ACROSS, MIN_CB_CB_ACROSS = 5.0, 4.0
CONTACT = 8.0
MIN_TOUCHED = {"H": 0.35, "E": 0.22}  # share of a body's residues with a contact across; a sheet has two faces
MIN_CLOSED = 3  # contacts between the first and the last body of a closed fold
MAX_RADIUS = 1.15  # of the expected radius of gyration


@dataclass(frozen=True)
class Plan:
    """What is decided before a chain is built.

    elements: one letter per residue: H helix, E strand, L loop, T tail.  letters: the residue types that a position
    asks for, commonest first, "" where it does not care.  bodies: [N], helices and sheets numbered along the chain, -1
    elsewhere.  torsions: [N, 2] phi and psi, degrees.  loops: names of the types used.
    closed: whether the first and the last body must touch.
    """

    fold: str
    elements: str
    letters: tuple[str, ...]
    bodies: NDArray[np.int64]
    torsions: Floats
    loops: tuple[str, ...]
    closed: bool


def draw_plan(fold: Fold, rng: np.random.Generator) -> Plan:
    """Draws lengths, loop types and the jitter of the torsions."""
    residues: list[tuple[str, tuple[int, int], str, int]] = [("T", FIRST, TAIL_LETTERS[0], -1)]
    loops = []
    for body, part in enumerate(fold.parts):
        if part == "H":
            residues += [("H", HELIX, "", body)] * int(rng.integers(*fold.helix, endpoint=True))
        elif part in LOOPS:
            loop = LOOPS[part][rng.integers(len(LOOPS[part]))]
            residues += [("L", angles, letters, -1) for angles, letters in zip(loop.torsions, loop.letters)]
            loops.append(loop.name)
        else:
            sheet = SHEETS[part][rng.integers(len(SHEETS[part]))]
            cut = int(rng.integers(sheet.trim, endpoint=True))
            strands = list(zip(sheet.elements, sheet.torsions, sheet.letters))
            residues += [(*residue, body) for residue in strands[cut : len(strands) - cut]]
            loops.append(sheet.name)
    residues.append(("T", LAST, TAIL_LETTERS[1], -1))
    elements, torsions, letters, bodies = zip(*residues)
    jitter = np.array([JITTER[kind] for kind in elements])[:, None] * rng.normal(size=(len(elements), 2))
    angles = np.array(torsions, dtype=np.float64) + jitter
    return Plan(fold.name, "".join(elements), letters, np.array(bodies), angles, tuple(loops), fold.closed)


def build(torsions: Floats) -> Floats:
    """Places N, CA, C of chains from (phi, psi) [B, N, 2] in degrees, all omega 180: [B, N, 3, 3], angstrom."""
    batch, length, _ = torsions.shape
    phi, psi = torsions[..., 0], torsions[..., 1]
    to_n = _bond(psi, CA_C_N, C_N)
    to_ca = _bond(np.full_like(phi, 180.0), C_N_CA, N_CA)
    to_c = _bond(phi, N_CA_C, CA_C)
    # the frame of an atom: x along the bond that leads to it, the atom before that in the xy plane
    frame = np.broadcast_to(np.eye(4), (batch, 4, 4))
    atoms = np.empty((batch, length, 3, 3))
    for i in range(length):
        if i > 0:
            frame = frame @ to_n[:, i - 1]
        atoms[:, i, 0] = frame[:, :3, 3]
        frame = frame @ to_ca[:, i]
        atoms[:, i, 1] = frame[:, :3, 3]
        frame = frame @ to_c[:, i]
        atoms[:, i, 2] = frame[:, :3, 3]
    return atoms


def _bond(torsion: Floats, angle: float, length: float) -> Floats:
    """The step from an atom's frame to the next atom's [..., 4, 4]: turn by torsion, bend by angle, walk length."""
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
    """Rotations [..., 3, 3] and origins [..., 3] of residues from N, CA, C [..., 3, 3]: Supp. Alg. 21."""
    n, ca, c = atoms[..., 0, :], atoms[..., 1, :], atoms[..., 2, :]
    x = c - ca
    x = x / np.linalg.norm(x, axis=-1, keepdims=True)
    y = n - ca
    y = y - (x * y).sum(-1, keepdims=True) * x
    y = y / np.linalg.norm(y, axis=-1, keepdims=True)
    return np.stack([x, y, np.cross(x, y)], axis=-1), ca


def with_o_and_cb(atoms: Floats, psi: Floats) -> Floats:
    """N, CA, C, O, CB [..., N, 5, 3] from N, CA, C [..., N, 3, 3] and psi [..., N] in degrees."""
    rotation, ca = frames(atoms)
    t, a = np.radians(psi + 180.0), np.pi - np.radians(120.1)  # O is trans to the next N
    local = np.stack([CA_C + C_O * np.cos(a) + 0 * t, C_O * np.sin(a) * np.cos(t), C_O * np.sin(a) * np.sin(t)], -1)
    o = ca + (rotation @ local[..., None])[..., 0]
    cb = ca + rotation @ CB
    return np.concatenate([atoms, o[..., None, :], cb[..., None, :]], axis=-2)


def distances(a: Floats, b: Floats) -> Floats:
    """Distances [..., n, m] between points [..., n, 3] and [..., m, 3]."""
    square = (a**2).sum(-1)[..., :, None] + (b**2).sum(-1)[..., None, :] - 2.0 * a @ np.swapaxes(b, -1, -2)
    return np.sqrt(np.maximum(square, 0.0))


def clashes(backbone: Floats) -> bool:
    """Whether atoms of N, CA, C, O, CB [N, 5, 3] are too close to those of residues that are not next to theirs."""
    count = len(backbone)
    far = distances(backbone.reshape(-1, 3), backbone.reshape(-1, 3)).reshape(count, 5, count, 5)
    apart = np.abs(np.arange(count)[:, None] - np.arange(count)[None, :])[:, None, :, None]
    limit = np.where(apart == 2, MIN_NEIGHBOUR, MIN_DISTANCE)
    polar = BACKBONE_POLAR[:, None, None] & BACKBONE_POLAR[None, None, :]
    return bool(((far < np.where(polar, MIN_POLAR, limit)) & (apart >= 2)).any())


def expected_radius(length: int) -> float:
    """Radius of gyration of a folded chain, angstrom: 2.2 N^0.38 (Skolnick et al., J. Mol. Biol. 265, 217 (1997))."""
    return 2.2 * length**0.38


def radius_of_gyration(ca: Floats) -> Floats:
    """Root mean square distance of CA [..., N, 3] from their centre: [...], angstrom."""
    return np.sqrt(((ca - ca.mean(-2, keepdims=True)) ** 2).sum(-1).mean(-1))


def packed(plans: Sequence[Plan]) -> tuple[NDArray[np.bool_], Floats]:
    """Which plans fold into a compact chain without clashes [B], and N, CA, C of all [B, longest, 3, 3], angstrom.

    Looks at CA and CB alone.  Bodies must touch (CB within 8 A), not interpenetrate, and the whole must be about as
    wide as a protein of its length.
    """
    longest = max(len(plan.elements) for plan in plans)
    torsions = np.stack([np.pad(p.torsions, ((0, longest - len(p.elements)), (0, 0))) for p in plans])
    bodies = np.stack([np.pad(p.bodies, (0, longest - len(p.elements)), constant_values=-1) for p in plans])
    atoms = build(torsions)
    rotation, ca = frames(atoms)
    cb = ca + rotation @ CB
    ca_ca, cb_cb = distances(ca, ca), distances(cb, cb)
    place = np.arange(longest)
    apart = place[:, None] - place[None, :]
    lengths = np.array([len(plan.elements) for plan in plans])
    inside = (place < lengths[:, None])[:, :, None] & (place < lengths[:, None])[:, None, :]
    across = (bodies[:, :, None] != bodies[:, None, :]) & (bodies[:, :, None] >= 0) & (bodies[:, None, :] >= 0)
    across &= apart >= 8  # not those that a loop holds together
    clash = (inside & (apart >= 3) & ((ca_ca < MIN_CA_CA) | (cb_cb < MIN_CB_CB))).any((1, 2))
    clash |= (across & ((ca_ca < MIN_CA_CA_ACROSS) | (cb_cb < MIN_CB_CB_ACROSS))).any((1, 2))
    contact = across & (cb_cb < CONTACT)
    good = ~clash
    for b, plan in enumerate(plans):
        if good[b]:
            good[b] = radius_of_gyration(ca[b, : lengths[b]]) < MAX_RADIUS * expected_radius(int(lengths[b]))
            touched = contact[b].any(0) | contact[b].any(1)
            for body in np.unique(plan.bodies[plan.bodies >= 0]):
                least = MIN_TOUCHED[plan.elements[int(np.argmax(plan.bodies == body))]]
                good[b] &= touched[bodies[b] == body].mean() > least
            ends = np.ix_(bodies[b] == plan.bodies.max(), bodies[b] == plan.bodies[plan.bodies >= 0].min())
            good[b] &= not plan.closed or contact[b][ends].sum() >= MIN_CLOSED
    return good, atoms
