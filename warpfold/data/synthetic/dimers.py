"""Generate sample dimers: two chains that are docked face to face and designed together.

The interface is buried like a core, side chains are packed across it, and residues in contact across it are drawn as
pairs. Thus the rows of the two alignments covary if they are from one organism.
"""

from collections.abc import Sequence

import numpy as np

from warpfold.data.formats.alignment import Alignment
from warpfold.data.synthetic.backbone import BACKBONE_POLAR, CONTACT, MIN_DISTANCE, MIN_POLAR, Floats, distances
from warpfold.data.synthetic.folds import FOLDS, Blueprint
from warpfold.data.synthetic.proteins import MAX_LENGTH, MIN_LENGTH, Protein, draw_backbones, draw_query, no_fold
from warpfold.data.synthetic.sequence import Sites, evolve, model_sites
from warpfold.data.synthetic.sidechain import add_side_chains

# Folds that are flat enough for docking.
HELICAL = [fold for fold in FOLDS if set(fold.parts) == {"H", "HH"}]
# Random stream of the seed, so that dimer i is independent of protein i.
STREAM = 2
# Mean and standard deviation in degrees of the angle between the first helices of the two chains. Helices of bundles
# cross at about 20 degrees (Chothia, Levitt & Richardson, J. Mol. Biol. 145, 215 (1981)). There is a single mode,
# because the small model of the demo does not learn two modes within minutes.
CROSSING, SPREAD = 20.0, 4.0
# Smallest distances in angstrom across the interface, which leave space for side chains.
MIN_CA_CA, MIN_CB_CB = 5.5, 4.5
# Number of attempts to draw chains, and to dock each two of them.
MAX_DRAWS, MAX_DOCKINGS = 10, 4
# Smallest number of CB pairs within CONTACT across the interface.
MIN_CONTACTS = 10
# Fraction of the organisms in each alignment.
SHARED = 0.85


def make_dimer(
    seed: int,
    index: int,
    min_length: int = MIN_LENGTH,
    max_length: int = MAX_LENGTH,
    depth: tuple[int, int] = (16, 128),
) -> tuple[Protein, Protein]:
    """Generate dimer `index` of the set `seed`, as a pure function of the arguments.

    An even index gives a homodimer: one sequence, one alignment, and C2 symmetry. The rows of an alignment name their
    organisms as in UniProt, and some organisms are missing in the other alignment. Lengths are residues per chain,
    depth is rows of an alignment, all inclusive. Raises UserError if no fold has these lengths.
    """
    rng = np.random.default_rng([seed, index, STREAM])
    is_homodimer = index % 2 == 0
    for _ in range(MAX_DRAWS):
        first, second = (draw_backbones(rng, min_length, max_length, HELICAL) for _ in range(2))
        for chain, other in ((chain, chain) for chain in first) if is_homodimer else zip(first, second):
            blueprints, backbones = (chain[0], other[0]), (chain[1], other[1])
            for _ in range(MAX_DOCKINGS):
                docked = dock(blueprints, backbones, rng)
                if docked is None:
                    continue
                if dimer := _design(f"dimer{index:05d}", blueprints, docked, is_homodimer, depth, rng):
                    return dimer
    raise no_fold(min_length, max_length)


def _design(
    name: str,
    blueprints: Sequence[Blueprint],
    backbone: Floats,
    is_homodimer: bool,
    depth: tuple[int, int],
    rng: np.random.Generator,
) -> tuple[Protein, Protein] | None:
    """Design sequences, side chains and alignments of two docked chains; None if side chains clash.

    backbone: N, CA, C, O, CB of both chains [N1 + N2, 5, 3], angstrom.
    """
    a, b = blueprints
    count = len(a.elements)
    joined = Blueprint(
        fold=a.fold,
        elements=a.elements + b.elements,
        letters=a.letters + b.letters,
        bodies=np.concatenate([a.bodies, np.where(b.bodies >= 0, b.bodies + a.bodies.max() + 1, -1)]),
        torsions=np.concatenate([a.torsions, b.torsions]),
        loops=a.loops + b.loops,
    )
    sites = model_sites(joined, backbone, count)
    if is_homodimer:
        sites = tie_sites(sites, count)
    side_chains = add_side_chains(draw_query(sites, rng), backbone, sites.fixed, second=count, symmetric=is_homodimer)
    if side_chains is None:
        return None
    sequence, atoms = side_chains
    alignment = evolve(sites, sequence, a if is_homodimer else joined, depth, rng)
    first = _search_result(alignment, slice(count), "A", rng)
    second = first if is_homodimer else _search_result(alignment, slice(count, None), "B", rng)
    return Protein(name, a, first.query, atoms[:count], first), Protein(name, b, second.query, atoms[count:], second)


def dock(blueprints: Sequence[Blueprint], backbones: Sequence[Floats], rng: np.random.Generator) -> Floats | None:
    """Place two chains face to face in contact: [N1 + N2, 5, 3] in angstrom; None if there are too few contacts.

    backbones: N, CA, C, O, CB of each chain, [N, 5, 3]. Equal chains get C2 symmetry.
    """
    angle = np.radians(CROSSING + SPREAD * rng.normal())
    a, b = (_orient(blueprint, backbone) for blueprint, backbone in zip(blueprints, backbones))
    # A rotation by 180 degrees about x makes b face a. The rotation about z sets the crossing angle.
    rotation = np.array([[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0], [0, 0, 1]])
    b = b * [1, -1, -1] @ rotation.T
    limit = np.where(BACKBONE_POLAR[:, None] & BACKBONE_POLAR, MIN_POLAR, MIN_DISTANCE)
    limit[1, 1], limit[4, 4] = MIN_CA_CA, MIN_CB_CB
    # Move b along z to the lowest height without an atom pair below its limit.
    offsets = a[:, :, None, None] - b  # [N1, 5, N2, 5, 3]
    free = limit[:, None, :] ** 2 - (offsets[..., :2] ** 2).sum(-1)
    height = np.where(free > 0, offsets[..., 2] + np.sqrt(np.maximum(free, 0.0)), -np.inf).max()
    placed = b + [0, 0, height]
    if (distances(a[:, 4], placed[:, 4]) < CONTACT).sum() < MIN_CONTACTS:
        return None
    return np.concatenate([a, placed])


def _orient(blueprint: Blueprint, backbone: Floats) -> Floats:
    """Move a chain's centre to the origin, its first helix along x, and its face, the plane of the helices, to +z."""
    ca, bodies = backbone[:, 1], blueprint.bodies
    first, last = ca[bodies == bodies[bodies >= 0][0]], ca[bodies == bodies.max()]
    x = first[len(first) // 2 :].mean(0) - first[: len(first) // 2].mean(0)
    x = x / np.linalg.norm(x)
    z = np.cross(x, last.mean(0) - first.mean(0))
    z = z / np.linalg.norm(z)
    return (backbone - ca.mean(0)) @ np.stack([x, np.cross(z, x), z], axis=1)


def tie_sites(sites: Sites, count: int) -> Sites:
    """Reduce the sites of two chains to those of one chain of `count` residues, so that both have one sequence.

    A pair across the interface becomes a pair within the chain. A residue in contact with its own copy is in no pair.
    """
    tied: set[int] = set()
    pairs, couplings = [], []
    for (i, j), coupling in zip(sites.pairs, sites.couplings):
        pair = i % count, j % count
        if pair[0] != pair[1] and tied.isdisjoint(pair):
            tied.update(pair)
            pairs.append(pair)
            couplings.append(coupling)
    return Sites(sites.preferences[:count], sites.fixed[:count], pairs, couplings)


def _search_result(alignment: Alignment, columns: slice, chain: str, rng: np.random.Generator) -> Alignment:
    """Simulate a search for a chain: rows of most organisms, named as in UniProt, most similar first."""
    rows, relatives = alignment.rows[:, columns], np.arange(1, len(alignment))
    relatives = relatives[rng.random(len(relatives)) < SHARED]
    identity = (rows[relatives] == rows[0]).mean(1)
    order = relatives[np.argsort(-identity, kind="stable")].tolist()
    names = ["query", *(f"tr|{chain}{row:07d}|{chain}{row:07d}_S{row:04d}" for row in order)]
    return Alignment(rows[[0, *order]], alignment.deletions[:, columns][[0, *order]], names)
