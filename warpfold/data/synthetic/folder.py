"""Write folders of sample proteins and dimers."""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from warpfold import __version__
from warpfold.data.formats.alignment import write_a3m
from warpfold.data.structure.write import write_mmcif
from warpfold.data.synthetic.dimers import make_dimer
from warpfold.data.synthetic.folds import FOLDS, Fold
from warpfold.data.synthetic.proteins import LONGEST, SHORTEST, Protein, make_protein, to_chain
from warpfold.errors import UserError
from warpfold.progress import Progress, no_progress

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

DIMERS = """
{count} dimers, every second one of two equal chains (C2 symmetry).

mmcif/NAME.cif     structure, chains A and B in contact
msas/NAME_A.a3m    alignment of chain A; NAME_B.a3m of chain B if its sequence is another

Their chains are helices, docked face to face in a few ways.  Residues that touch across the interface covary in rows of
one organism, which the rows' names tell as UniProt's do; some organisms are missing in one alignment, and rows are in
the order of their similarity, as a search finds them.  Rows that are paired otherwise tell nothing of the interface.
"""


def generate(
    out: Path,
    proteins: int,
    seed: int = 0,
    *,
    dimers: int = 0,
    min_length: int = SHORTEST,
    max_length: int = LONGEST,
    depth: tuple[int, int] = (16, 128),
    folds: Sequence[Fold] = FOLDS,
    progress: Progress = no_progress,
) -> list[dict[str, Any]]:
    """Make a folder of sample proteins: OUT/mmcif/NAME.cif, OUT/msas/NAME_A.a3m, OUT/manifest.json, OUT/README.txt.

    dimers: how many of two chains to make as well, every second of them of equal chains.
    folds: of the proteins.  Same seed and version, same bytes; protein i is the same however many are asked for, and so
    is dimer i.  Lengths in residues of a chain, depth in rows of the alignment (least, most), all inclusive.  `out` is
    not there, or empty; it appears when it is complete.  Returns the manifest's entries.
    Errors: UserError if `out` is in use, and for impossible arguments.
    """
    if os.path.lexists(out) and (out.is_symlink() or not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists already. Name a new folder or remove it")
    if min(proteins, dimers) < 0 or proteins + dimers < 1:
        raise UserError(f"proteins = {proteins}, dimers = {dimers}: at least one in all")
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
        raise UserError(f"{out}: cannot be made: {error.strerror}. Name another folder") from error
    try:
        for folder in ("mmcif", "msas"):
            (partial / folder).mkdir()
        lengths = min_length, max_length, depth
        samples: Iterator[tuple[Protein, ...]] = chain(
            ((make_protein(seed, i, *lengths, folds),) for i in range(proteins)),
            (make_dimer(seed, i, *lengths) for i in range(dimers)),
        )
        for sample in samples:
            entries.append(_write(sample, partial))
            progress(len(entries), proteins + dimers, "making proteins")
        about = {"generator": f"WarpFold {__version__}", "seed": seed, "proteins": entries[:proteins]}
        if dimers:
            about["dimers"] = entries[proteins:]
        (partial / "manifest.json").write_text(json.dumps(about, indent=1) + "\n")
        text = README.format(count=proteins, version=__version__, seed=seed, folds=len(folds), resolution=RESOLUTION)
        (partial / "README.txt").write_text(text + (DIMERS.format(count=dimers) if dimers else ""))
        if out.exists():
            out.rmdir()
        partial.rename(out.absolute())
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return entries


def _write(chains: tuple[Protein, ...], out: Path) -> dict[str, Any]:
    """Write a protein or a dimer, an alignment for each sequence, and return its entry of the manifest."""
    name = chains[0].name
    centre = np.concatenate([protein.atoms[:, 1] for protein in chains]).mean(0)
    placed = [to_chain(protein, letter, centre) for protein, letter in zip(chains, "AB")]
    structure = f"mmcif/{name}.cif"
    (out / structure).write_text(write_mmcif(name, placed, method="THEORETICAL MODEL", resolution=RESOLUTION))
    files: dict[str, str] = {}  # by sequence
    about: list[dict[str, Any]] = []
    for letter, protein in zip("AB", chains):
        if protein.sequence not in files:
            files[protein.sequence] = f"msas/{name}_{letter}.a3m"
            (out / files[protein.sequence]).write_text(write_a3m(protein.alignment))
        blueprint, rows = protein.blueprint, len(protein.alignment)
        about.append({"fold": blueprint.fold.name, "loops": list(blueprint.loops), "sequence": protein.sequence})
        about[-1] |= {"elements": blueprint.elements, "rows": rows}
    own = [{"alignment": files[protein.sequence]} for protein in chains]
    if len(chains) == 1:
        return {"name": name, **about[0], "structure": structure, **own[0]}
    kind = "homodimer" if len(files) == 1 else "heterodimer"
    each = [{"chain": letter, **one, **file} for letter, one, file in zip("AB", about, own)]
    return {"name": name, "kind": kind, "structure": structure, "chains": each}
