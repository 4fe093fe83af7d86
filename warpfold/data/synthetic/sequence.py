"""Draw sequences that fit a structure, and evolve them into alignments.

Every site has a preference for each residue type, which depends on its element, its burial and the free space.
Residues in contact are paired, and the two types of a pair are drawn jointly: charges attract, and small residues pair
with large ones. The query and all its relatives are drawn from this distribution, so contacts covary.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from warpfold.data.formats.alignment import Alignment, decode, encode
from warpfold.data.synthetic.backbone import Flags, Floats, across, distances, separations
from warpfold.data.synthetic.folds import Blueprint
from warpfold.geometry.residue import GAP, RESTYPE_ORDER, RESTYPES

# Relative preferences by element and layer (c core, b boundary, s surface), in the spirit of Chou & Fasman,
# Biochemistry 13, 211 (1974), and of the layer design of Koga et al. (2012).
PREFERENCES = {
    "Hc": "L10 A5 I5 M2 F3 V2 W0.5",
    "Hb": "A6 L4 K3 E3 R2 Q2 M1 I1",
    "Hs": "E8 K7 R3 Q3 A2 D1 S0.5",
    "Ec": "V8 I8 F4 Y2 L2 W1 A1",
    "Eb": "T5 V5 Y3 I3 K2 R2 W1",
    "Es": "T8 K4 R3 Y2 S2 Q2 V1 E1",
    "Ls": "S4 G4 N4 D3 T2 K2",
    "Ts": "S4 K4 T2 G2",
}
# Interfaces of two chains have salt bridges or hydrophobic patches, depending on the opposite residue.
INTERFACE = "L8 I5 V4 A4 M3 F2 E4 K4 R2 D2"
# Exposed ends of a helix compensate its dipole, with proline at N1.
HELIX_FIRST, HELIX_LAST = "E8 P4 D4 S2 A1", "K8 R5 N2 Q1 A1"
# Probability of the first choice at a position with required letters.
EXACT = 0.85
# Probability of every type at every site, so that nothing is impossible.
BACKGROUND = 0.002

# Quantiles of burial in helices and strands.
CORE, BOUNDARY = 0.34, 0.56
# Distances in angstrom from CB to the nearest CB of another body.
TIGHT, ROOMY = 5.2, 6.6
SMALL = {"A": 6.0, "G": 0.4, "S": 1.5, "V": 0.7, "L": 0.15, "I": 0.15, "M": 0.1, "F": 0.02, "W": 0.005, "Y": 0.02}
LARGE = {"A": 0.3, "L": 1.5, "F": 2.5, "W": 2.5, "Y": 2.0, "M": 1.5, "V": 0.7}

# Side-chain volumes, angstrom^3 (Zamyatnin, Prog. Biophys. Mol. Biol. 24, 107 (1972)), in the order of RESTYPES.
VOLUMES = np.array([89, 174, 114, 111, 109, 144, 138, 60, 153, 167, 167, 169, 163, 190, 113, 89, 116, 228, 194, 140.0])
CHARGES = np.array([{"K": 1, "R": 1, "D": -1, "E": -1}.get(letter, 0) for letter in RESTYPES])
HYDROPHOBIC = np.array([letter in "AVILMFWYC" for letter in RESTYPES])
# Largest distances in angstrom of the CB of a pair, within a chain and between chains.
PAIR_REACH, INTERFACE_REACH = 7.5, 9.0
CHARGE_GAIN, HYDROPHOBIC_GAIN, VOLUME_SPREAD = 2.0, 1.0, 22.0


@dataclass(frozen=True)
class Sites:
    """The distribution of the sequences of a fold.

    preferences: [N, 20], rows sum to 1. fixed: [N], sites with required types. pairs: sites that evolve jointly, each
    in at most one pair. couplings: joint probabilities [20, 20] of the types of each pair.
    """

    preferences: Floats
    fixed: Flags
    pairs: list[tuple[int, int]]
    couplings: list[Floats]


def model_sites(blueprint: Blueprint, backbone: Floats, second: int | None = None) -> Sites:
    """Compute the distribution of sequences of a fold: the preferences of each site, and the pairs of sites.

    backbone: N, CA, C, O, CB [N, 5, 3], angstrom. second: first residue of a second chain; residues in contact across
    the interface are paired first.
    """
    ca, cb = backbone[:, 1], backbone[:, 4]
    cb_cb = distances(cb, cb)
    # Core, boundary or surface, by rank of the burial among the residues of helices and strands.
    burial, inside = _count_burial(ca, cb), np.flatnonzero(blueprint.bodies >= 0)
    rank = np.ones(len(burial))
    # Rounding makes the copies in a homodimer equal, so that the order does not depend on the last bits.
    rank[inside] = np.argsort(np.argsort(-burial[inside].round(6), kind="stable")) / len(inside)
    layers = ["c" if r < CORE else "b" if r < BOUNDARY else "s" for r in rank]
    is_across = across(blueprint.bodies)
    room = np.where(is_across, cb_cb, np.inf).min(1)
    rows = np.stack([_site_preferences(blueprint, i, layers[i], float(room[i])) for i in range(len(ca))])
    fixed = np.array([letters != "" for letters in blueprint.letters])
    is_strand = np.array([element == "E" for element in blueprint.elements])
    pairs, busy = [], fixed.copy()
    if second is not None:
        chain = np.arange(len(ca)) >= second
        pairs = _pair_off(cb_cb, chain[:, None] != chain, busy, INTERFACE_REACH)
        touching = [i for pair in pairs for i in pair]
        rows[touching], busy[touching] = _parse_preferences(INTERFACE), True
    # Strand residues in contact are in different strands, because those of one strand are too far apart.
    pairs += _pair_off(cb_cb, is_across | (is_strand[:, None] & is_strand), busy, PAIR_REACH)
    couplings = []
    for i, j in pairs:
        joint = rows[i][:, None] * rows[j][None, :] * _weigh_pair(rows[i] @ VOLUMES + rows[j] @ VOLUMES)
        couplings.append(joint / joint.sum())
    return Sites(rows, fixed, pairs, couplings)


def _count_burial(ca: Floats, cb: Floats) -> Floats:
    """Count the CB in the direction of each side chain, within about 10 angstrom and with smooth limits: [N]."""
    direction = cb - ca
    offset = cb[None, :, :] - ca[:, None, :]
    distance = np.linalg.norm(offset, axis=-1) + 1e-9
    cosine = (offset * direction[:, None, :]).sum(-1) / distance / np.linalg.norm(direction, axis=-1)[:, None]
    weight = np.clip((10.5 - distance) / 2.0, 0.0, 1.0) * np.clip((cosine - 0.1) / 0.5, 0.0, 1.0)
    return np.where(separations(len(ca)) > 4, weight, 0.0).sum(1)


def _site_preferences(blueprint: Blueprint, i: int, layer: str, room: float) -> Floats:
    """Compute the preferences of site i [20]."""
    if letters := blueprint.letters[i]:
        row = np.full(20, BACKGROUND)
        for k, letter in enumerate(letters):
            row[RESTYPE_ORDER[letter]] += EXACT if k == 0 else (1.0 - EXACT) / (len(letters) - 1)
        return row / row.sum()
    element = blueprint.elements[i]
    text = PREFERENCES[element + layer]
    if element == "H" and layer == "s":
        if blueprint.elements[max(i - 3, 0)] != "H":
            text = HELIX_FIRST
        elif blueprint.elements[min(i + 3, len(blueprint.elements) - 1)] != "H":
            text = HELIX_LAST
    row = _parse_preferences(text)
    for letter, factor in (SMALL if room < TIGHT else LARGE if room > ROOMY and layer == "c" else {}).items():
        row[RESTYPE_ORDER[letter]] *= factor
    if room < TIGHT:
        row[RESTYPE_ORDER["A"]] += 0.05
    # Proline breaks helices and strands.
    row = row + BACKGROUND * (np.arange(20) != RESTYPE_ORDER["P"])
    return row / row.sum()


def _parse_preferences(text: str) -> Floats:
    """Parse relative preferences such as "L10 A5" to probabilities [20]."""
    row = np.zeros(20)
    for word in text.split():
        row[RESTYPE_ORDER[word[0]]] = float(word[1:])
    return row / row.sum()


def _pair_off(cb_cb: Floats, allowed: Flags, busy: Flags, reach: float) -> list[tuple[int, int]]:
    """Pair residues in contact, nearest first. Each is in at most one pair; busy residues are in none."""
    allowed = allowed & (cb_cb < reach) & ~busy[:, None] & ~busy[None, :]
    first, second = np.nonzero(np.triu(allowed, 5))
    paired: set[int] = set()
    pairs = []
    # Rounding makes the two contacts of a symmetric pair equal, so that the order does not depend on the last bits.
    for k in np.argsort(cb_cb[first, second].round(6), kind="stable"):
        pair = int(first[k]), int(second[k])
        if paired.isdisjoint(pair):
            pairs.append(pair)
            paired.update(pair)
    return pairs


def _weigh_pair(volume: float) -> Floats:
    """Compute the weight of each pair of types in contact [20, 20]. volume: preferred volume of both side chains."""
    charge = -CHARGE_GAIN * CHARGES[:, None] * CHARGES[None, :]
    polarity = HYDROPHOBIC_GAIN * np.where(HYDROPHOBIC[:, None] == HYDROPHOBIC[None, :], 1.0, -1.0)
    fill = -(((VOLUMES[:, None] + VOLUMES[None, :] - volume) / VOLUME_SPREAD) ** 2) / 2.0
    fill = np.where(HYDROPHOBIC[:, None] & HYDROPHOBIC[None, :], fill, 0.0)
    return np.exp(charge + polarity + fill)


def draw(model: Sites, start: NDArray[np.uint8], change: Floats, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Mutate sequences: redraw each site of row r with probability change[r], pairs jointly. start: codes [R, N]."""
    rows = start.copy()
    for i in sorted(set(range(start.shape[1])).difference(*model.pairs)):
        is_redrawn = rng.random(len(rows)) < change
        types = np.searchsorted(np.cumsum(model.preferences[i]), rng.random(len(rows)))
        rows[is_redrawn, i] = np.minimum(types, 19)[is_redrawn]
    for (i, j), joint in zip(model.pairs, model.couplings):
        is_redrawn = rng.random(len(rows)) < change
        joint_codes = np.minimum(np.searchsorted(np.cumsum(joint), rng.random(len(rows))), 399)
        rows[is_redrawn, i], rows[is_redrawn, j] = (joint_codes // 20)[is_redrawn], (joint_codes % 20)[is_redrawn]
    return rows


def draw_query(model: Sites, rng: np.random.Generator) -> str:
    """Draw a sequence from the distribution."""
    blank = np.zeros((1, len(model.fixed)), dtype=np.uint8)
    return decode(draw(model, blank, np.ones(1), rng)[0])


def evolve(
    model: Sites, sequence: str, blueprint: Blueprint, depth: tuple[int, int], rng: np.random.Generator
) -> Alignment:
    """Evolve an alignment of relatives of `sequence`, which is the first row; depth: range of the number of rows.

    Clades diverge from the query by different amounts, and each row diverges from its clade. Some rows lose or gain
    residues in loops and at the ends.
    """
    count = int(rng.integers(depth[0], depth[1], endpoint=True)) - 1
    query = encode(sequence).astype(np.uint8)
    clades = max(2, count // 6)
    ancestors = draw(model, np.tile(query, (clades, 1)), rng.uniform(0.0, 0.9, clades), rng)
    rows = draw(model, ancestors[rng.integers(clades, size=count)], rng.uniform(0.05, 0.5, count), rng)
    deletions = np.zeros(rows.shape, dtype=np.int32)
    loose = np.flatnonzero([element in "LT" for element in blueprint.elements])
    inner = loose[(loose > 0) & (loose < len(query) - 1)]
    for row, inserted in zip(rows, deletions):
        if rng.random() < 0.2:
            row[rng.choice(inner)] = GAP
        if rng.random() < 0.15:
            inserted[rng.choice(inner)] = rng.integers(1, 4)
        # Some rows are fragments.
        if rng.random() < 0.2:
            row[: rng.integers(1, 7)] = GAP
        if rng.random() < 0.2:
            row[-rng.integers(1, 7) :] = GAP
    return Alignment(
        np.concatenate([query[None], rows]),
        np.concatenate([np.zeros((1, len(query)), dtype=np.int32), deletions]),
        ["query", *(f"relative_{k}" for k in range(1, count + 1))],
    )
