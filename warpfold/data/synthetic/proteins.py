"""Generate sample proteins with alignments, to try the whole pipeline without a download.

They are physical (ideal bonds, allowed torsions, no clashes, sequences that fit the structure) but not natural. A model
trained on them learns this generator.
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

# Number of blueprints that are built together, and of attempts.
BATCH, MAX_ATTEMPTS = 48, 40
MIN_LENGTH, MAX_LENGTH = 30, 60


@dataclass(frozen=True)
class Protein:
    """A sample protein: atoms [N, 14, 3] in angstrom (0 where masked), and an alignment with itself as row 0."""

    name: str
    blueprint: Blueprint
    sequence: str
    atoms: Floats
    alignment: Alignment


def make_protein(
    seed: int,
    index: int,
    min_length: int = MIN_LENGTH,
    max_length: int = MAX_LENGTH,
    depth: tuple[int, int] = (16, 128),
    folds: Sequence[Fold] = FOLDS,
) -> Protein:
    """Generate protein `index` of the set `seed`, as a pure function of the arguments.

    Blueprints of one fold are drawn and built in batches until one packs and gets side chains without clashes. Lengths
    are in residues, depth in rows of the alignment, all inclusive. Raises UserError if no fold has these lengths.
    """
    rng = np.random.default_rng([seed, index])
    for blueprint, backbone in draw_backbones(rng, min_length, max_length, folds):
        sites = model_sites(blueprint, backbone)
        if (side_chains := add_side_chains(draw_query(sites, rng), backbone, sites.fixed)) is not None:
            sequence, atoms = side_chains
            alignment = evolve(sites, sequence, blueprint, depth, rng)
            return Protein(f"sample{index:05d}", blueprint, sequence, atoms, alignment)
    raise no_fold(min_length, max_length)


def draw_backbones(
    rng: np.random.Generator, min_length: int, max_length: int, folds: Sequence[Fold]
) -> Iterator[tuple[Blueprint, Floats]]:
    """Yield compact folds of these lengths: blueprints, and their N, CA, C, O, CB [N, 5, 3] in angstrom.

    The iterator ends after `MAX_ATTEMPTS` batches.
    """
    weights = np.array([fold.weight for fold in folds])
    fold = None
    for _ in range(MAX_ATTEMPTS):
        fold = fold or folds[rng.choice(len(folds), p=weights / weights.sum())]
        blueprints = [draw_blueprint(fold, rng) for _ in range(BATCH)]
        blueprints = [blueprint for blueprint in blueprints if min_length <= len(blueprint.elements) <= max_length]
        if not blueprints:
            # This fold does not have these lengths.
            fold = None
            continue
        longest = max(len(blueprint.torsions) for blueprint in blueprints)
        torsions = [np.pad(b.torsions, ((0, longest - len(b.torsions)), (0, 0))) for b in blueprints]
        for blueprint, padded in zip(blueprints, build(np.stack(torsions))):
            chain = padded[: len(blueprint.elements)]
            if is_compact(blueprint, chain) and not clashes(backbone := with_o_and_cb(chain, blueprint.torsions[:, 1])):
                yield blueprint, backbone


def no_fold(min_length: int, max_length: int) -> UserError:
    """Return the error for lengths that no fold has."""
    return UserError(f"no fold of {min_length} to {max_length} residues was found. Allow lengths from 30 to 60.")


def to_chain(protein: Protein, name: str = "A", centre: Floats | None = None) -> Chain:
    """Convert a protein to a chain, as `read_structure` does. centre: [3], moved to the origin; default: mean CA."""
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
