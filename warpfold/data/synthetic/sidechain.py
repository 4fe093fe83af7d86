"""Side chains of sample proteins: rotamers placed by ideal geometry, chosen so that none clash."""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from warpfold.data.synthetic.backbone import (
    BACKBONE_POLAR,
    MIN_DISTANCE,
    MIN_NEIGHBOUR,
    MIN_POLAR,
    Flags,
    Floats,
    distances,
    frames,
)
from warpfold.geometry.residue import (
    ATOM14_GROUP,
    ATOM14_GROUP_POSITIONS,
    ATOM14_MASK,
    ATOM14_NAMES,
    CHI1,
    PSI,
    RESTYPE_ORDER,
    RIGID_GROUP_FRAMES,
)

Integers = NDArray[np.int64]

# chi angles, degrees, of common rotamers: Lovell et al., "The penultimate rotamer library", Proteins 40, 389 (2000).
ROTAMERS: dict[str, tuple[tuple[int, ...], ...]] = {
    "A": ((),),
    "G": ((),),
    "R": ((-67, 180, 180, 180), (-67, 180, 180, 85), (180, 180, 180, 180), (180, 65, 180, 85), (-62, -68, 180, 180)),
    "N": ((-65, -20), (-71, -76), (-177, 30), (-174, -20), (62, 30)),
    "D": ((-70, -15), (-177, 0), (-177, 65), (62, -10)),
    "C": ((-65,), (-177,), (62,)),
    "Q": ((-67, 180, -25), (-65, -65, -40), (-177, 65, -60), (180, 180, 20), (62, 180, 20)),
    "E": ((-67, 180, -10), (-65, -65, -40), (-177, 65, 10), (-177, 180, 0), (62, 180, 20)),
    "H": ((-65, -70), (-65, 80), (-65, 165), (-177, -165), (-177, 80), (62, -75)),
    "I": ((-65, 170), (-57, -60), (-177, 66), (-177, 165), (62, 170)),
    "L": ((-65, 175), (-177, 65), (-85, 65), (-172, 145)),
    "K": ((-67, 180, 180, 180), (-62, -68, 180, 180), (-177, 68, 180, 180), (-177, 180, 180, 180), (62, 180, 180, 180)),
    "M": ((-67, 180, 75), (-67, 180, -75), (-65, -65, -70), (-177, 65, 75), (-177, 180, 75), (62, 180, 75)),
    "F": ((-65, -85), (-65, -30), (-177, 80), (62, 90)),
    "P": ((30, -36), (-27, 38)),
    "S": ((62,), (-65,), (180,)),
    "T": ((62,), (-65,), (-175,)),
    "W": ((-65, 95), (-65, -5), (-65, -90), (-177, 90), (-177, -105), (62, -90), (62, 90)),
    "Y": ((-65, -85), (-65, -30), (-177, 80), (62, 90)),
    "V": ((175,), (-60,), (63,)),
}

# What a residue becomes when no rotamer of it fits.
SMALLER = dict(zip("WFYMLIVRKQEDNHTSCPA", "FLFLVVAKQSSSSSSAAAG"))

SOFT = 0.4  # angstrom beyond the closest approach at which rotamers begin to avoid each other
COMMONER = 0.01  # penalty per position in the table of rotamers, angstrom^2
SWEEPS, ROUNDS = 4, 6

# Bonds from CA to N, CA, C, O, CB of the residue before, its own (CB lies on the way out: -1), and the next.
BONDS_FROM_CA = {-1: (4, 3, 2, 3, 4), 0: (1, 0, 1, 2, -1), 1: (2, 3, 4, 5, 4)}
# The same from N: CD of proline is bonded to it.
BONDS_FROM_N = {-1: (3, 2, 1, 2, 3), 0: (0, 1, 2, 3, 2), 1: (3, 4, 5, 6, 5)}


# Side-chain atoms past CB are columns 5 and on of atom14.  For each residue type: how many bonds they are from CA (as
# the Greek letters count), and which are nitrogen or oxygen.
SIDE = 5
SIDE_DEPTH = [np.array(["ABGDEZH".index(name[1]) for name in names[SIDE:] if name], int) for names in ATOM14_NAMES]
SIDE_POLAR = [np.array([name[0] in "NO" for name in names[SIDE:] if name], bool) for names in ATOM14_NAMES]


@cache
def rotamers(letter: str) -> Floats:
    """Return the atoms of all rotamers in the frame of N, CA, C: [K, 14, 3], angstrom; O as if psi were 0.

    This is Supp. Alg. 24.
    """
    restype = RESTYPE_ORDER[letter]
    default = RIGID_GROUP_FRAMES[restype].astype(np.float64)
    atoms = np.concatenate([ATOM14_GROUP_POSITIONS[restype], np.ones((14, 1))], axis=-1)
    placed = []
    for chis in ROTAMERS[letter]:
        groups = np.stack([np.eye(4)] * 8)
        groups[PSI] = default[PSI]
        for k, chi in enumerate(np.radians(chis)):
            turn = np.eye(4)
            turn[1:3, 1:3] = [[np.cos(chi), -np.sin(chi)], [np.sin(chi), np.cos(chi)]]
            groups[CHI1 + k] = (groups[CHI1 + k - 1] if k else np.eye(4)) @ default[CHI1 + k] @ turn
        placed.append(np.einsum("aij,aj->ai", groups[ATOM14_GROUP[restype]], atoms)[:, :3])
    return np.stack(placed)


def add_side_chains(
    sequence: str, backbone: Floats, fixed: Flags, *, second: int | None = None, symmetric: bool = False
) -> tuple[str, Floats] | None:
    """Choose rotamers that do not clash; a residue without such a rotamer becomes a smaller one.

    sequence: N letters.  backbone: N, CA, C, O, CB [N, 5, 3], angstrom.  fixed: [N], residues that must stay.
    second: where a second chain begins.  symmetric: the backbone is that of two chains [2 N, 5, 3] with C2 symmetry,
    both of this sequence, and their side chains are to be alike.
    Returns the sequence and its atoms [N, 14, 3] (or [2 N, 14, 3]), 0 where masked, or None if some clashes remain.
    """
    letters, copies = list(sequence), 2 if symmetric else 1
    rotation, origin = frames(backbone)
    place = np.arange(len(backbone))
    place[second:] += 0 if second is None else len(place)  # not bonded to the first chain
    for _ in range(ROUNDS):
        choice, clashes = _choose_rotamers(letters * copies, backbone, place, symmetric)
        if not clashes:
            whole = letters * copies
            atoms = np.stack([rotamers(a)[k] @ r.T + o for a, k, r, o in zip(whole, choice, rotation, origin)])
            atoms[:, :4] = backbone[:, :4]
            return "".join(letters), atoms * ATOM14_MASK[[RESTYPE_ORDER[letter] for letter in whole]][..., None]
        for pair in clashes:
            free = [i for i in pair if not fixed[i] and letters[i] in SMALLER]
            if not free:
                return None
            largest = max(free, key=lambda i: ATOM14_MASK[RESTYPE_ORDER[letters[i]]].sum())
            letters[largest] = SMALLER[letters[largest]]
    return None


def _choose_rotamers(
    letters: list[str], backbone: Floats, place: Integers, symmetric: bool
) -> tuple[list[int], list[tuple[int, ...]]]:
    """Return each residue's rotamer, and the groups of one or two residues that clash (one: with the backbone).

    place: [N], numbers along the chain.  symmetric: the second half must choose as the first does; only clashes of the
    first are returned.
    M: the atoms past CB of all rotamers of the chain, one rotamer after another; R: the rotamers.
    """
    rotation, origin = frames(backbone)
    placed, owners, options, depths, polars = [], [], [], [], []
    for i, letter in enumerate(letters):
        depth, polar = SIDE_DEPTH[RESTYPE_ORDER[letter]], SIDE_POLAR[RESTYPE_ORDER[letter]]
        local = np.ascontiguousarray(rotamers(letter)[:, SIDE : SIDE + len(depth)])
        placed.append((local @ rotation[i].T + origin[i]).reshape(-1, 3))
        owners.append(np.full(local.shape[:2], i).ravel())
        options.append(np.repeat(np.arange(len(local)), len(depth)))
        depths.append(np.tile(depth, len(local)))
        polars.append(np.tile(polar, len(local)))
    atoms, owner, option, depth, polar = map(np.concatenate, (placed, owners, options, depths, polars))
    starts = np.flatnonzero(np.diff(owner * 100 + option, prepend=-1))  # the first atom of each rotamer
    residue, option = owner[starts], option[starts]

    proline = np.array([letter == "P" for letter in letters])
    own = np.maximum.reduceat(_overlap_backbone(atoms, owner, polar, depth, proline, backbone, place).max(1), starts)
    limit = np.where(polar[:, None] & polar[None, :], MIN_POLAR, MIN_DISTANCE)
    overlap = np.maximum(limit + SOFT - distances(atoms, atoms), 0.0)
    pair = np.maximum.reduceat(np.maximum.reduceat(overlap, starts, axis=0), starts, axis=1)
    if symmetric:  # what a rotamer of the first chain meets, in both; it may meet its own copy
        half = len(starts) // 2
        across = pair[:half, half:]
        own = np.maximum(own[:half], across.diagonal())
        pair = np.maximum(pair[:half, :half], across)
        residue, option = residue[:half], option[:half]
    pair[residue[:, None] == residue[None, :]] = 0.0

    # Every residue in turn takes the rotamer that fits best with the present rotamers of the others.
    alone, together = own**2 + COMMONER * option, pair**2
    members = [np.flatnonzero(residue == i) for i in np.unique(residue)]
    taken = np.array([m[alone[m].argmin()] for m in members])
    for _ in range(SWEEPS):
        for k, m in enumerate(members):
            taken[k] = m[(alone[m] + together[np.ix_(m, taken)].sum(1)).argmin()]

    choice = np.zeros(len(letters) // (2 if symmetric else 1), int)
    choice[residue[taken]] = option[taken]
    clashes: list[tuple[int, ...]] = [(int(residue[r]),) for r in taken if own[r] > SOFT]
    first, second = np.nonzero(np.triu(pair[np.ix_(taken, taken)] > SOFT))
    clashes += [(int(residue[taken[a]]), int(residue[taken[b]])) for a, b in zip(first, second)]
    return choice.tolist() * (2 if symmetric else 1), clashes


def _overlap_backbone(
    atoms: Floats, owner: Integers, polar: Flags, depth: Integers, proline: Flags, backbone: Floats, place: Integers
) -> Floats:
    """Return by how much side-chain atoms come too close to N, CA, C, O, CB of any residue [M, 5 N], SOFT included."""
    length = len(backbone)
    along = np.abs(place[owner][:, None] - place[None, :])[:, :, None]
    limit = np.where(along <= 1, MIN_NEIGHBOUR, MIN_DISTANCE)
    limit = np.where(polar[:, None, None] & BACKBONE_POLAR, MIN_POLAR, limit)
    far = distances(atoms, backbone.reshape(-1, 3)).reshape(-1, length, 5)
    overlap = np.maximum(limit + SOFT - far, 0.0)
    for offset in (-1, 0, 1):
        near = np.clip(owner + offset, 0, length - 1)
        m = np.flatnonzero(place[near] == place[owner] + offset)
        bonds = depth[m, None] + np.array(BONDS_FROM_CA[offset])
        through_n = 4 - depth[m, None] + np.array(BONDS_FROM_N[offset])
        bonds = np.where(proline[owner[m], None], np.minimum(bonds, through_n), bonds)
        overlap[m, near[m]] *= bonds > 3
    return overlap.reshape(len(atoms), -1)
