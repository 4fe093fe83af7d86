"""Make sample proteins with alignments from scratch, to try the whole pipeline without a download.

They are physical (ideal bonds, allowed torsions, packed without clashes, sequences that follow the structure) but not
natural: a model trained on them has learned this generator.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from warpfold import __version__
from warpfold.data.formats.alignment import Alignment, decode
from warpfold.data.formats.sequences import write_a3m
from warpfold.data.structure.chain import Chain
from warpfold.data.structure.write import write_mmcif
from warpfold.data.synthetic.backbone import Floats, build, clashes, is_compact, with_o_and_cb
from warpfold.data.synthetic.folds import FOLDS, Blueprint, draw_blueprint
from warpfold.data.synthetic.sequence import draw, evolve, model_sites
from warpfold.data.synthetic.sidechain import add_side_chains
from warpfold.errors import UserError
from warpfold.geometry.residue import ATOM14_MASK, ATOM14_TO_ATOM37, RESTYPE_ORDER
from warpfold.progress import Progress, no_progress

BATCH, ATTEMPTS = 48, 40  # blueprints built together, and how often before giving up
SHORTEST, LONGEST = 30, 60
RESOLUTION = 1.0  # angstrom; without one, training would skip the confidence losses

README = """{count} sample proteins, made by WarpFold {version} with seed {seed}.

mmcif/NAME.cif     structure, all heavy atoms, one chain A
msas/NAME_A.a3m    alignment, the protein itself first
manifest.json      fold, elements, loop types and sizes of each

They were made from nothing: helices, strands and turns of ideal geometry in {folds} folds, packed without clashes, with
sequences that follow the structure and relatives whose contacts covary.  They serve to try a pipeline or a cluster.
They are not natural proteins, and how well a model does on them says nothing about natural ones.  All come from one
distribution: proteins held out have new sequences, but no new kinds of fold, and their loops are of the same few types;
of 200 proteins, one in four has a twin in fold, loop types and lengths, whose structure is nearly its own.  The
resolution in the files, {resolution} A, is there so that training treats them as good structures; nothing was measured.
"""


@dataclass(frozen=True)
class Protein:
    """A sample protein: atoms [N, 14, 3] in angstrom (0 where masked), and an alignment, its own row first."""

    name: str
    blueprint: Blueprint
    sequence: str
    atoms: Floats
    alignment: Alignment


def make_protein(
    seed: int, index: int, min_length: int = SHORTEST, max_length: int = LONGEST, depth: tuple[int, int] = (16, 128)
) -> Protein:
    """Make protein `index` of the set `seed`; it depends on nothing else.

    Blueprints of one fold are drawn and built, many at once, until one packs and gets side chains without clashes.
    Lengths in residues, depth in rows of the alignment, all inclusive.  Errors: UserError if no fold fits the lengths.
    """
    rng = np.random.default_rng([seed, index])
    weights = np.array([fold.weight for fold in FOLDS])
    fold = None
    for _ in range(ATTEMPTS):
        fold = fold or FOLDS[rng.choice(len(FOLDS), p=weights / weights.sum())]
        blueprints = [draw_blueprint(fold, rng) for _ in range(BATCH)]
        blueprints = [one for one in blueprints if min_length <= len(one.elements) <= max_length]
        if not blueprints:  # this fold does not have these lengths
            fold = None
            continue
        longest = max(len(one.torsions) for one in blueprints)
        torsions = [np.pad(one.torsions, ((0, longest - len(one.torsions)), (0, 0))) for one in blueprints]
        for blueprint, padded in zip(blueprints, build(np.stack(torsions))):
            chain = padded[: len(blueprint.elements)]
            if not is_compact(blueprint, chain) or clashes(backbone := with_o_and_cb(chain, blueprint.torsions[:, 1])):
                continue
            sites = model_sites(blueprint, backbone)
            blank = np.zeros((1, len(chain)), dtype=np.uint8)
            drawn = decode(draw(sites, blank, np.ones(1), rng)[0])
            if (made := add_side_chains(drawn, backbone, sites.fixed)) is not None:
                sequence, atoms = made
                alignment = evolve(sites, sequence, blueprint, depth, rng)
                return Protein(f"sample{index:05d}", blueprint, sequence, atoms, alignment)
    raise UserError(f"no fold of {min_length} to {max_length} residues was found; allow lengths from 30 to 60")


def generate(
    out: Path,
    proteins: int,
    seed: int = 0,
    *,
    min_length: int = SHORTEST,
    max_length: int = LONGEST,
    depth: tuple[int, int] = (16, 128),
    progress: Progress = no_progress,
) -> list[dict[str, Any]]:
    """Make a folder of sample proteins: OUT/mmcif/NAME.cif, OUT/msas/NAME_A.a3m, OUT/manifest.json, OUT/README.txt.

    Same seed and version, same bytes; protein i is the same however many are asked for.  Lengths in residues, depth in
    rows of the alignment (least, most), all inclusive.  `out` must not exist or be empty; it appears when it is
    complete.  Returns the manifest's entries.  Errors: UserError if `out` is in use, and for impossible arguments.
    """
    if os.path.lexists(out) and (out.is_symlink() or not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists already; name a new folder or remove it")
    if proteins < 1:
        raise UserError(f"proteins = {proteins}: at least one")
    if seed < 0:
        raise UserError(f"seed = {seed}: not below 0")
    if min_length > max_length or max_length < SHORTEST or min_length > LONGEST:
        raise UserError(f"lengths {min_length} to {max_length}: within {SHORTEST} to {LONGEST}, the smaller first")
    if not 1 <= depth[0] <= depth[1]:
        raise UserError(f"depth {depth[0]} to {depth[1]}: at least 1, the smaller first")
    partial = out.absolute().with_name(f".{out.name}.{os.getpid()}.partial")
    entries = []
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{out}: cannot be made: {error.strerror}; name another folder") from error
    try:
        for folder in ("mmcif", "msas"):
            (partial / folder).mkdir()
        for index in range(proteins):
            entries.append(_write(make_protein(seed, index, min_length, max_length, depth), partial))
            progress(index + 1, proteins, "making proteins")
        about = {"generator": f"WarpFold {__version__}", "seed": seed, "proteins": entries}
        (partial / "manifest.json").write_text(json.dumps(about, indent=1) + "\n")
        text = README.format(count=proteins, version=__version__, seed=seed, folds=len(FOLDS), resolution=RESOLUTION)
        (partial / "README.txt").write_text(text)
        if out.exists():
            out.rmdir()
        partial.rename(out.absolute())
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return entries


def _write(protein: Protein, out: Path) -> dict[str, Any]:
    """Write one protein's files and return its entry of the manifest."""
    structure, alignment = f"mmcif/{protein.name}.cif", f"msas/{protein.name}_A.a3m"
    text = write_mmcif(protein.name, [to_chain(protein)], method="THEORETICAL MODEL", resolution=RESOLUTION)
    (out / structure).write_text(text)
    (out / alignment).write_text(write_a3m(protein.alignment))
    return {
        "name": protein.name,
        "fold": protein.blueprint.fold.name,
        "loops": list(protein.blueprint.loops),
        "sequence": protein.sequence,
        "elements": protein.blueprint.elements,
        "rows": len(protein.alignment),
        "structure": structure,
        "alignment": alignment,
    }


def to_chain(protein: Protein) -> Chain:
    """Return the protein as `read_structure` would: chain A, centred, float32."""
    types = np.array([RESTYPE_ORDER[letter] for letter in protein.sequence])
    count = len(types)
    residue, slot = np.nonzero(ATOM14_MASK[types])
    positions, mask = np.zeros((count, 37, 3), dtype=np.float32), np.zeros((count, 37), dtype=np.float32)
    column = ATOM14_TO_ATOM37[types[residue], slot]
    positions[residue, column] = protein.atoms[residue, slot] - protein.atoms[:, 1].mean(0)
    mask[residue, column] = 1.0
    numbers = tuple(str(i) for i in range(1, count + 1))
    return Chain("A", protein.sequence, positions, mask, np.arange(count), numbers)
