"""Add side chains to sample proteins: rotamers of ideal geometry, chosen to avoid clashes."""

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

# The replacement of a residue if none of its rotamers fits.
SMALLER = dict(zip("WFYMLIVRKQEDNHTSCPA", "FLFLVVAKQSSSSSSAAAG"))

# Rotamers are penalised from this distance in angstrom above the closest approach on.
SOFT = 0.4
# Penalty in angstrom² per index in the table of rotamers, which starts with the most frequent one.
RARITY_PENALTY = 0.01
# Sweeps over all residues, and rounds of replacing residues.
SWEEPS, ROUNDS = 4, 6

# Number of bonds from CA to N, CA, C, O, CB of the previous residue, of its own (CB is part of the side chain: -1), and
# of the next residue.
BONDS_FROM_CA = {-1: (4, 3, 2, 3, 4), 0: (1, 0, 1, 2, -1), 1: (2, 3, 4, 5, 4)}
# The same from N, to which CD of proline is bonded.
BONDS_FROM_N = {-1: (3, 2, 1, 2, 3), 0: (0, 1, 2, 3, 2), 1: (3, 4, 5, 6, 5)}


# Side-chain atoms after CB are the columns from 5 on of atom14. For each residue type: their number of bonds from CA
# (the order of the Greek letters), and whether they are nitrogen or oxygen.
SIDE = 5
SIDE_DEPTH = [np.array(["ABGDEZH".index(name[1]) for name in names[SIDE:] if name], int) for names in ATOM14_NAMES]
SIDE_POLAR = [np.array([name[0] in "NO" for name in names[SIDE:] if name], bool) for names in ATOM14_NAMES]


@cache
def rotamers(letter: str) -> Floats:
    """Compute the atoms of all rotamers in the frame of N, CA, C, with psi 0 (Supp. Alg. 24): [K, 14, 3], angstrom."""
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
    """Choose rotamers without clashes. A residue without such a rotamer is replaced by a smaller one.

    sequence: N letters. backbone: N, CA, C, O, CB [N, 5, 3], angstrom. fixed: [N], residues that must not change.
    second: first residue of a second chain. symmetric: the backbone has two chains [2 N, 5, 3] with C2 symmetry and
    this sequence, and both get the same rotamers.
    Returns the sequence and its atoms [N, 14, 3] (or [2 N, 14, 3]), 0 where masked, or None if clashes remain.
    """
    letters, copies = list(sequence), 2 if symmetric else 1
    rotation, origin = frames(backbone)
    number = np.arange(len(backbone))
    # The offset makes the second chain not bonded to the first one.
    number[second:] += 0 if second is None else len(number)
    for _ in range(ROUNDS):
        choice, clashes = _choose_rotamers(letters * copies, backbone, number, symmetric)
        if not clashes:
            all_letters = letters * copies
            atoms = np.stack([rotamers(a)[k] @ r.T + o for a, k, r, o in zip(all_letters, choice, rotation, origin)])
            atoms[:, :4] = backbone[:, :4]
            return "".join(letters), atoms * ATOM14_MASK[[RESTYPE_ORDER[letter] for letter in all_letters]][..., None]
        for pair in clashes:
            free = [i for i in pair if not fixed[i] and letters[i] in SMALLER]
            if not free:
                return None
            largest = max(free, key=lambda i: ATOM14_MASK[RESTYPE_ORDER[letters[i]]].sum())
            letters[largest] = SMALLER[letters[largest]]
    return None


def _choose_rotamers(
    letters: list[str], backbone: Floats, number: Integers, symmetric: bool
) -> tuple[list[int], list[tuple[int, ...]]]:
    """Choose a rotamer for each residue, and list clashes.

    number: [N], residue numbers; bonded residues have consecutive numbers. symmetric: the second half gets the rotamers
    of the first half, and only clashes of the first half are listed.
    Returns the rotamers, and the clashing residues: a residue with the backbone, or a pair of residues.
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
    # The first atom of each rotamer.
    starts = np.flatnonzero(np.diff(owner * 100 + option, prepend=-1))
    residue, option = owner[starts], option[starts]

    proline = np.array([letter == "P" for letter in letters])
    overlap = _overlap_backbone(atoms, owner, polar, depth, proline, backbone, number)
    single = np.maximum.reduceat(overlap.max(1), starts)
    limit = np.where(polar[:, None] & polar[None, :], MIN_POLAR, MIN_DISTANCE)
    overlap = np.maximum(limit + SOFT - distances(atoms, atoms), 0.0)
    pair = np.maximum.reduceat(np.maximum.reduceat(overlap, starts, axis=0), starts, axis=1)
    if symmetric:
        # Combine the overlaps within the first chain and across the interface, also of a residue with its own copy.
        half = len(starts) // 2
        across = pair[:half, half:]
        single = np.maximum(single[:half], across.diagonal())
        pair = np.maximum(pair[:half, :half], across)
        residue, option = residue[:half], option[:half]
    pair[residue[:, None] == residue[None, :]] = 0.0

    # Coordinate descent: each residue takes the best rotamer for the current rotamers of the others.
    single_cost, pair_cost = single**2 + RARITY_PENALTY * option, pair**2
    members = [np.flatnonzero(residue == i) for i in np.unique(residue)]
    picked = np.array([m[single_cost[m].argmin()] for m in members])
    for _ in range(SWEEPS):
        for k, m in enumerate(members):
            picked[k] = m[(single_cost[m] + pair_cost[np.ix_(m, picked)].sum(1)).argmin()]

    choice = np.zeros(len(letters) // (2 if symmetric else 1), int)
    choice[residue[picked]] = option[picked]
    clashes: list[tuple[int, ...]] = [(int(residue[r]),) for r in picked if single[r] > SOFT]
    first, second = np.nonzero(np.triu(pair[np.ix_(picked, picked)] > SOFT))
    clashes += [(int(residue[picked[a]]), int(residue[picked[b]])) for a, b in zip(first, second)]
    return choice.tolist() * (2 if symmetric else 1), clashes


def _overlap_backbone(
    atoms: Floats, owner: Integers, polar: Flags, depth: Integers, proline: Flags, backbone: Floats, number: Integers
) -> Floats:
    """Compute the overlap (with SOFT) of side-chain atoms with N, CA, C, O, CB of all residues: [M, 5 N], angstrom."""
    length = len(backbone)
    separation = np.abs(number[owner][:, None] - number[None, :])[:, :, None]
    limit = np.where(separation <= 1, MIN_NEIGHBOUR, MIN_DISTANCE)
    limit = np.where(polar[:, None, None] & BACKBONE_POLAR, MIN_POLAR, limit)
    distance = distances(atoms, backbone.reshape(-1, 3)).reshape(-1, length, 5)
    overlap = np.maximum(limit + SOFT - distance, 0.0)
    # Atoms within three bonds may be close.
    for offset in (-1, 0, 1):
        near = np.clip(owner + offset, 0, length - 1)
        m = np.flatnonzero(number[near] == number[owner] + offset)
        bonds = depth[m, None] + np.array(BONDS_FROM_CA[offset])
        through_n = 4 - depth[m, None] + np.array(BONDS_FROM_N[offset])
        bonds = np.where(proline[owner[m], None], np.minimum(bonds, through_n), bonds)
        overlap[m, near[m]] *= bonds > 3
    return overlap.reshape(len(atoms), -1)
