"""Side chains of sample proteins: rotamers placed by ideal geometry, chosen so that none clash."""

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from warpfold.data.synthetic.backbone import (
    BACKBONE_POLAR,
    MIN_DISTANCE,
    MIN_NEIGHBOUR,
    MIN_POLAR,
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

Flags = NDArray[np.bool_]
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
COMMONER = 0.01  # penalty per place in the table of rotamers, angstrom^2
SWEEPS, ROUNDS = 4, 6

# Bonds from CA to N, CA, C, O, CB of the residue before, its own (CB lies on the way out: -1), and the next.
BONDS_FROM_CA = {-1: (4, 3, 2, 3, 4), 0: (1, 0, 1, 2, -1), 1: (2, 3, 4, 5, 4)}
# The same from N: CD of proline is bonded to it.
BONDS_FROM_N = {-1: (3, 2, 1, 2, 3), 0: (0, 1, 2, 3, 2), 1: (3, 4, 5, 6, 5)}


@dataclass(frozen=True)
class Candidates:
    """Side-chain atoms past CB of all rotamers of a chain, one rotamer after another.

    atoms: [M, 3], angstrom.  polar, depth, owner: [M], nitrogen or oxygen, bonds to CA, residue.  starts: [R], the
    first atom of each rotamer.  option: [R], its place in the table.
    """

    atoms: Floats
    polar: Flags
    depth: Integers
    owner: Integers
    starts: Integers
    option: Integers


@cache
def rotamers(letter: str) -> Floats:
    """Atoms of all rotamers in the frame of N, CA, C: [K, 14, 3], angstrom; O as if psi were 0 (Supp. Alg. 24)."""
    restype = RESTYPE_ORDER[letter]
    default = RIGID_GROUP_FRAMES[restype].astype(np.float64)
    placed = []
    for chis in ROTAMERS[letter]:
        groups = np.stack([np.eye(4)] * 8)
        groups[PSI] = default[PSI]
        for k, chi in enumerate(np.radians(chis)):
            turn = np.eye(4)
            turn[1:3, 1:3] = [[np.cos(chi), -np.sin(chi)], [np.sin(chi), np.cos(chi)]]
            groups[CHI1 + k] = (groups[CHI1 + k - 1] if k else np.eye(4)) @ default[CHI1 + k] @ turn
        atoms = np.concatenate([ATOM14_GROUP_POSITIONS[restype], np.ones((14, 1))], axis=-1)
        placed.append(np.einsum("aij,aj->ai", groups[ATOM14_GROUP[restype]], atoms)[:, :3])
    return np.stack(placed)


@cache
def _side_atoms(letter: str) -> tuple[Integers, Integers, Flags]:
    """Atoms past CB: columns of atom14, bonds to CA (as the Greek letters count), which are nitrogen or oxygen."""
    names = ATOM14_NAMES[RESTYPE_ORDER[letter]]
    columns = [a for a in range(5, 14) if names[a]]
    depth = ["ABGDEZH".index(names[a][1]) for a in columns]
    polar = [names[a][0] in "NO" for a in columns]
    return np.array(columns, dtype=np.int64), np.array(depth, dtype=np.int64), np.array(polar, dtype=np.bool_)


def pack(sequence: str, backbone: Floats, fixed: Flags) -> tuple[str, Floats] | None:
    """Chooses rotamers that do not clash; residues for which there are none become smaller ones.

    sequence: N letters.  backbone: N, CA, C, O, CB [N, 5, 3], angstrom.  fixed: [N], residues that must stay.
    Returns the sequence and its atoms [N, 14, 3], 0 where there is none, or None if nothing is free of clashes.
    """
    letters = list(sequence)
    for _ in range(ROUNDS):
        choice, clashes = _choose(letters, backbone)
        if not clashes:
            return "".join(letters), _place(letters, choice, backbone)
        for pair in clashes:
            free = [i for i in pair if not fixed[i] and letters[i] in SMALLER]
            if not free:
                return None
            largest = max(free, key=lambda i: ATOM14_MASK[RESTYPE_ORDER[letters[i]]].sum())
            letters[largest] = SMALLER[letters[largest]]
    return None


def _choose(letters: list[str], backbone: Floats) -> tuple[list[int], list[tuple[int, ...]]]:
    """The rotamer of each residue, and the groups of one or two residues that still clash (one: with the backbone)."""
    found = _candidates(letters, backbone)
    residue, starts = found.owner[found.starts], found.starts
    own = np.maximum.reduceat(_overlap_backbone(letters, found, backbone).max(1), starts)
    limit = np.where(found.polar[:, None] & found.polar[None, :], MIN_POLAR, MIN_DISTANCE)
    overlap = np.maximum(limit + SOFT - distances(found.atoms, found.atoms), 0.0)
    pair = np.maximum.reduceat(np.maximum.reduceat(overlap, starts, axis=0), starts, axis=1)
    pair[residue[:, None] == residue[None, :]] = 0.0
    alone, together = own**2 + COMMONER * found.option, pair**2
    members = [np.flatnonzero(residue == i) for i in np.unique(residue)]
    taken = np.array([m[alone[m].argmin()] for m in members])
    for _ in range(SWEEPS):
        for k, m in enumerate(members):
            taken[k] = m[(alone[m] + together[np.ix_(m, taken)].sum(1)).argmin()]
    choice = [0] * len(letters)
    for r in taken:
        choice[residue[r]] = int(found.option[r])
    clashes: list[tuple[int, ...]] = [(int(residue[r]),) for r in taken if own[r] > SOFT]
    first, second = np.nonzero(np.triu(pair[np.ix_(taken, taken)] > SOFT))
    clashes += [(int(residue[taken[a]]), int(residue[taken[b]])) for a, b in zip(first, second)]
    return choice, clashes


def _candidates(letters: list[str], backbone: Floats) -> Candidates:
    rotation, origin = frames(backbone)
    atoms, polar, depth, owner, first, option = [], [], [], [], [], []
    for i, letter in enumerate(letters):
        columns, bonds, is_polar = _side_atoms(letter)
        if len(columns) == 0:
            continue
        local = rotamers(letter)[:, columns]
        kinds = len(local)
        atoms.append((local @ rotation[i].T + origin[i]).reshape(-1, 3))
        polar.append(np.tile(is_polar, kinds))
        depth.append(np.tile(bonds, kinds))
        owner.append(np.full(kinds * len(columns), i))
        first.append(np.tile(np.arange(len(columns)) == 0, kinds))
        option.append(np.arange(kinds))
    return Candidates(
        atoms=np.concatenate(atoms),
        polar=np.concatenate(polar),
        depth=np.concatenate(depth),
        owner=np.concatenate(owner),
        starts=np.flatnonzero(np.concatenate(first)),
        option=np.concatenate(option),
    )


def _overlap_backbone(letters: list[str], found: Candidates, backbone: Floats) -> Floats:
    """By how much side-chain atoms come too close to N, CA, C, O, CB of any residue [M, 5 N], SOFT included."""
    length = len(letters)
    polar = found.polar[:, None, None] & BACKBONE_POLAR
    apart = np.abs(found.owner[:, None] - np.arange(length)[None, :])[:, :, None]
    limit = np.where(polar, MIN_POLAR, np.where(apart <= 1, MIN_NEIGHBOUR, MIN_DISTANCE))
    far = distances(found.atoms, backbone.reshape(-1, 3)).reshape(-1, length, 5)
    overlap = np.maximum(limit + SOFT - far, 0.0)
    proline = np.array([letter == "P" for letter in letters])[found.owner]
    for offset in (-1, 0, 1):
        near = found.owner + offset
        m = np.flatnonzero((near >= 0) & (near < length))
        bonds = found.depth[m, None] + np.array(BONDS_FROM_CA[offset])
        through_n = 4 - found.depth[m, None] + np.array(BONDS_FROM_N[offset])
        bonds = np.where(proline[m, None], np.minimum(bonds, through_n), bonds)
        overlap[m, near[m]] *= bonds > 3
    return overlap.reshape(len(found.atoms), -1)


def _place(letters: list[str], choice: list[int], backbone: Floats) -> Floats:
    """Atoms of the chosen rotamers [N, 14, 3], 0 where there is none; N, CA, C and O as the backbone has them."""
    rotation, origin = frames(backbone)
    atoms = np.zeros((len(letters), 14, 3))
    for i, letter in enumerate(letters):
        atoms[i] = rotamers(letter)[choice[i]] @ rotation[i].T + origin[i]
        atoms[i, :4] = backbone[i, :4]
        atoms[i] *= ATOM14_MASK[RESTYPE_ORDER[letter]][:, None]
    return atoms
