"""Make sample proteins with alignments from scratch, to try the whole pipeline without a download.

They are physical (ideal bonds, allowed torsions, packed without clashes, sequences that follow the structure) but not
natural: a model trained on them has learned this generator.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from warpfold.data.formats.alignment import Alignment
from warpfold.data.structure.chain import Chain
from warpfold.data.synthetic.backbone import Floats, build, clashes, is_compact, with_o_and_cb
from warpfold.data.synthetic.folds import FOLDS, Blueprint, Fold, draw_blueprint
from warpfold.data.synthetic.sequence import draw_query, evolve, model_sites
from warpfold.data.synthetic.sidechain import add_side_chains
from warpfold.errors import UserError
from warpfold.geometry.residue import ATOM14_MASK, ATOM14_TO_ATOM37, RESTYPE_ORDER

BATCH, ATTEMPTS = 48, 40  # blueprints built together, and how often before giving up
SHORTEST, LONGEST = 30, 60


@dataclass(frozen=True)
class Protein:
    """A sample protein: atoms [N, 14, 3] in angstrom (0 where masked), and an alignment, its own row first."""

    name: str
    blueprint: Blueprint
    sequence: str
    atoms: Floats
    alignment: Alignment


def make_protein(
    seed: int,
    index: int,
    min_length: int = SHORTEST,
    max_length: int = LONGEST,
    depth: tuple[int, int] = (16, 128),
    folds: Sequence[Fold] = FOLDS,
) -> Protein:
    """Make protein `index` of the set `seed`; it depends on nothing else.

    Blueprints of one fold are drawn and built, many at once, until one packs and gets side chains without clashes.
    Lengths in residues, depth in rows of the alignment, all inclusive.  Errors: UserError if no fold fits the lengths.
    """
    rng = np.random.default_rng([seed, index])
    for blueprint, backbone in draw_backbones(rng, min_length, max_length, folds):
        sites = model_sites(blueprint, backbone)
        if (made := add_side_chains(draw_query(sites, rng), backbone, sites.fixed)) is not None:
            sequence, atoms = made
            alignment = evolve(sites, sequence, blueprint, depth, rng)
            return Protein(f"sample{index:05d}", blueprint, sequence, atoms, alignment)
    raise no_fold(min_length, max_length)


def draw_backbones(
    rng: np.random.Generator, min_length: int, max_length: int, folds: Sequence[Fold] = FOLDS
) -> Iterator[tuple[Blueprint, Floats]]:
    """Yield folds of these lengths that pack: blueprints, and their N, CA, C, O, CB [N, 5, 3] in angstrom.

    They end when many attempts have been made.
    """
    weights = np.array([fold.weight for fold in folds])
    fold = None
    for _ in range(ATTEMPTS):
        fold = fold or folds[rng.choice(len(folds), p=weights / weights.sum())]
        blueprints = [draw_blueprint(fold, rng) for _ in range(BATCH)]
        blueprints = [one for one in blueprints if min_length <= len(one.elements) <= max_length]
        if not blueprints:  # this fold does not have these lengths
            fold = None
            continue
        longest = max(len(one.torsions) for one in blueprints)
        torsions = [np.pad(one.torsions, ((0, longest - len(one.torsions)), (0, 0))) for one in blueprints]
        for blueprint, padded in zip(blueprints, build(np.stack(torsions))):
            chain = padded[: len(blueprint.elements)]
            if is_compact(blueprint, chain) and not clashes(backbone := with_o_and_cb(chain, blueprint.torsions[:, 1])):
                yield blueprint, backbone


def no_fold(min_length: int, max_length: int) -> UserError:
    """Return the error for lengths that no fold has."""
    return UserError(f"no fold of {min_length} to {max_length} residues was found. Allow lengths from 30 to 60")


def to_chain(protein: Protein, name: str = "A", centre: Floats | None = None) -> Chain:
    """Return the protein as `read_structure` would, float32, its `centre` [3] (by default its own) at the origin."""
    types = np.array([RESTYPE_ORDER[letter] for letter in protein.sequence])
    count = len(types)
    residue, slot = np.nonzero(ATOM14_MASK[types])
    positions, mask = np.zeros((count, 37, 3), dtype=np.float32), np.zeros((count, 37), dtype=np.float32)
    column = ATOM14_TO_ATOM37[types[residue], slot]
    positions[residue, column] = protein.atoms[residue, slot] - (
        protein.atoms[:, 1].mean(0) if centre is None else centre
    )
    mask[residue, column] = 1.0
    numbers = tuple(str(i) for i in range(1, count + 1))
    return Chain(name, protein.sequence, positions, mask, np.arange(count), numbers)
