"""Sample dimers: two chains docked face to face, whose sequences were drawn together.

Both chains are designed as one: the interface is buried as a core is, side chains are packed across it, and residues
in contact across it are drawn as pairs.  So rows of the two alignments covary where they come from one organism.
"""

from collections.abc import Sequence

import numpy as np

from warpfold.data.formats.alignment import Alignment
from warpfold.data.synthetic.backbone import BACKBONE_POLAR, CONTACT, MIN_DISTANCE, MIN_POLAR, Floats, distances
from warpfold.data.synthetic.folds import FOLDS, Blueprint
from warpfold.data.synthetic.proteins import LONGEST, SHORTEST, Protein, draw_backbones, draw_query, no_fold
from warpfold.data.synthetic.sequence import Sites, evolve, model_sites
from warpfold.data.synthetic.sidechain import add_side_chains

HELICAL = [fold for fold in FOLDS if set(fold.parts) == {"H", "HH"}]  # flat enough to dock
STREAM = 2  # of the seed: dimer i has nothing to do with protein i
# The angle from the first helix of one chain to that of the other, in degrees, and its spread.  About 20 degrees is how
# helices of bundles cross (Chothia, Levitt & Richardson, J. Mol. Biol. 145, 215 (1981)).  All dimers meet in this way:
# of two ways, the small model of the demo learned neither in its few minutes.
CROSSING, SPREAD = 20.0, 4.0
MIN_CA_CA, MIN_CB_CB = 5.5, 4.5  # angstrom: closest approach across the interface, which leaves room for side chains
ATTEMPTS, TRIES = 10, 4  # how often chains are drawn, and the same two are docked, before giving up
MIN_CONTACTS = 10  # pairs of CB within CONTACT across the interface
SHARED = 0.85  # of the organisms that one chain is known from, those that the other is known from too


def make_dimer(
    seed: int, index: int, min_length: int = SHORTEST, max_length: int = LONGEST, depth: tuple[int, int] = (16, 128)
) -> tuple[Protein, Protein]:
    """Make dimer `index` of the set `seed`; it depends on nothing else.

    A homodimer if the index is even: its chains have one sequence and one alignment, and C2 symmetry.  The rows of an
    alignment name their organisms as UniProt does; an organism may be missing in the other alignment.
    Lengths of each chain in residues, depth in rows of the alignment, all inclusive.  Errors: UserError if no fold fits
    the lengths.
    """
    rng = np.random.default_rng([seed, index, STREAM])
    same = index % 2 == 0
    for _ in range(ATTEMPTS):
        first, second = (draw_backbones(rng, min_length, max_length, HELICAL) for _ in range(2))
        for chain, other in ((one, one) for one in first) if same else zip(first, second):
            blueprints, backbones = (chain[0], other[0]), (chain[1], other[1])
            for _ in range(TRIES):
                whole = dock(blueprints, backbones, rng)
                if whole is not None and (made := _design(f"dimer{index:05d}", blueprints, whole, same, depth, rng)):
                    return made
    raise no_fold(min_length, max_length)


def _design(
    name: str,
    blueprints: Sequence[Blueprint],
    backbone: Floats,
    same: bool,
    depth: tuple[int, int],
    rng: np.random.Generator,
) -> tuple[Protein, Protein] | None:
    """Return two docked chains with sequences, side chains and alignments; None if side chains clash.

    backbone: N, CA, C, O, CB of both [N1 + N2, 5, 3], angstrom.
    """
    count = len(blueprints[0].elements)
    joined = join(*blueprints)
    sites = model_sites(joined, backbone, count)
    if same:
        sites = tie(sites, count)
    made = add_side_chains(draw_query(sites, rng), backbone, sites.fixed, second=count, symmetric=same)
    if made is None:
        return None
    sequence, atoms = made
    alignment = evolve(sites, sequence, blueprints[0] if same else joined, depth, rng)
    first = _found(alignment, slice(count), "A", rng)
    second = first if same else _found(alignment, slice(count, None), "B", rng)
    return (
        Protein(name, blueprints[0], first.query, atoms[:count], first),
        Protein(name, blueprints[1], second.query, atoms[count:], second),
    )


def dock(blueprints: Sequence[Blueprint], backbones: Sequence[Floats], rng: np.random.Generator) -> Floats | None:
    """Place two chains face to face so that they touch: [N1 + N2, 5, 3] in angstrom; None if they hardly do.

    backbones: N, CA, C, O, CB of each, [N, 5, 3].  Equal chains have C2 symmetry.
    """
    angle = np.radians(CROSSING + SPREAD * rng.normal())
    a, b = (_facing(blueprint, backbone) for blueprint, backbone in zip(blueprints, backbones))
    turn = np.array([[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0], [0, 0, 1]])
    b = b * [1, -1, -1] @ turn.T  # turned by 180 degrees about x it looks down at a, and then about z
    limit = np.where(BACKBONE_POLAR[:, None] & BACKBONE_POLAR, MIN_POLAR, MIN_DISTANCE)
    limit[1, 1], limit[4, 4] = MIN_CA_CA, MIN_CB_CB
    apart = a[:, :, None, None] - b  # [N1, 5, N2, 5, 3]
    free = limit[:, None, :] ** 2 - (apart[..., :2] ** 2).sum(-1)
    height = np.where(free > 0, apart[..., 2] + np.sqrt(np.maximum(free, 0.0)), -np.inf).max()  # where b lies on a
    placed = b + [0, 0, height]
    if (distances(a[:, 4], placed[:, 4]) < CONTACT).sum() < MIN_CONTACTS:
        return None
    return np.concatenate([a, placed])


def _facing(blueprint: Blueprint, backbone: Floats) -> Floats:
    """Return a chain with its centre at the origin, its first helix along x, and its face towards +z.

    The face is in front of the plane of the first helix and the last.
    """
    ca, bodies = backbone[:, 1], blueprint.bodies
    first, last = ca[bodies == bodies[bodies >= 0][0]], ca[bodies == bodies.max()]
    x = first[len(first) // 2 :].mean(0) - first[: len(first) // 2].mean(0)
    x = x / np.linalg.norm(x)
    z = np.cross(x, last.mean(0) - first.mean(0))
    z = z / np.linalg.norm(z)
    return (backbone - ca.mean(0)) @ np.stack([x, np.cross(z, x), z], axis=1)


def join(a: Blueprint, b: Blueprint) -> Blueprint:
    """Return two chains' blueprints as if they were one chain's."""
    bodies = np.where(b.bodies >= 0, b.bodies + a.bodies.max() + 1, -1)
    return Blueprint(
        fold=a.fold,
        elements=a.elements + b.elements,
        letters=a.letters + b.letters,
        bodies=np.concatenate([a.bodies, bodies]),
        torsions=np.concatenate([a.torsions, b.torsions]),
        loops=a.loops + b.loops,
    )


def tie(sites: Sites, count: int) -> Sites:
    """Return the sites of one chain of `count` residues, of the sites of two that must have the same sequence.

    A pair across the interface becomes a pair of the chain; a residue that touches its own copy is in none.
    """
    taken: set[int] = set()
    kept = []
    for (i, j), coupling in zip(sites.pairs, sites.couplings):
        pair = i % count, j % count
        if pair[0] != pair[1] and taken.isdisjoint(pair):
            taken.update(pair)
            kept.append((pair, coupling))
    return Sites(sites.preferences[:count], sites.fixed[:count], [pair for pair, _ in kept], [c for _, c in kept])


def _found(alignment: Alignment, columns: slice, chain: str, rng: np.random.Generator) -> Alignment:
    """Make the result of a search for a chain: rows of most organisms, named as in UniProt, most similar first."""
    rows, relatives = alignment.rows[:, columns], np.arange(1, len(alignment))
    relatives = relatives[rng.random(len(relatives)) < SHARED]
    identity = (rows[relatives] == rows[0]).mean(1)
    order = relatives[np.argsort(-identity, kind="stable")].tolist()
    names = ["query", *(f"tr|{chain}{row:07d}|{chain}{row:07d}_S{row:04d}" for row in order)]
    return Alignment(rows[[0, *order]], alignment.deletions[:, columns][[0, *order]], names)
