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
from warpfold.data.synthetic.proteins import MAX_LENGTH, MIN_LENGTH, Protein, make_protein, to_chain
from warpfold.errors import UserError
from warpfold.progress import Progress, no_progress

# Angstrom. Without a resolution, training would skip the confidence losses.
RESOLUTION = 1.0

README = """{count} sample proteins, made by WarpFold {version} with seed {seed}.

mmcif/NAME.cif     structure, all heavy atoms, one chain A
msas/NAME_A.a3m    alignment, the protein itself first
manifest.json      fold, elements, loop types and sizes of each

The proteins are generated: helices, strands and turns of ideal geometry in {folds} folds, packed without clashes, with
sequences that fit the structure and relatives with covarying contacts. Use them to try a pipeline or a cluster.
They are not natural proteins, and the accuracy of a model on them says nothing about natural proteins. All are from one
distribution: held-out proteins have new sequences, but the same folds and the same few types of loops. Of 200 proteins,
one in four has a twin of the same fold, loop types and lengths with almost the same structure. The resolution in the
files, {resolution} A, is not measured; it makes training treat them as good structures.
"""

DIMERS = """
{count} dimers, every second one of two equal chains (C2 symmetry).

mmcif/NAME.cif     structure, chains A and B in contact
msas/NAME_A.a3m    alignment of chain A; NAME_B.a3m of chain B if its sequence differs

Their chains are helical and docked face to face at similar angles. Residues in contact across the interface covary in
rows of one organism, which the names of the rows contain as in UniProt. Some organisms are missing in one alignment,
and rows are sorted by similarity, as in the result of a search. Rows that are paired otherwise do not show the
interface.
"""


def generate(
    out: Path,
    proteins: int,
    seed: int = 0,
    *,
    dimers: int = 0,
    min_length: int = MIN_LENGTH,
    max_length: int = MAX_LENGTH,
    depth: tuple[int, int] = (16, 128),
    folds: Sequence[Fold] = FOLDS,
    progress: Progress = no_progress,
) -> list[dict[str, Any]]:
    """Write a folder of sample proteins: OUT/mmcif/NAME.cif, OUT/msas/NAME_A.a3m, OUT/manifest.json, OUT/README.txt.

    dimers: number of additional dimers, every second of them with equal chains. folds: of the proteins. Lengths are
    residues per chain, and depth is the range of alignment rows, all inclusive. Equal seeds and versions give equal
    bytes. Protein i and dimer i do not depend on the numbers of proteins and dimers. `out` must not exist or be empty.
    It appears when it is complete. Returns the entries of the manifest.
    Raises UserError if `out` is in use, and for impossible arguments.
    """
    if os.path.lexists(out) and (out.is_symlink() or not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists already. Pass a new folder or remove it.")
    if min(proteins, dimers) < 0 or proteins + dimers < 1:
        raise UserError(f"proteins = {proteins}, dimers = {dimers}: nothing to generate. Request at least one.")
    if seed < 0:
        raise UserError(f"seed = {seed}: negative. Use 0 or more.")
    if min_length > max_length or max_length < MIN_LENGTH or min_length > MAX_LENGTH:
        raise UserError(
            f"lengths {min_length} to {max_length}: impossible. Pass a range within {MIN_LENGTH} to {MAX_LENGTH}."
        )
    if not 1 <= depth[0] <= depth[1]:
        raise UserError(f"depth {depth[0]} to {depth[1]}: impossible. Pass a range of numbers from 1 on.")
    partial = out.absolute().with_name(f".{out.name}.{os.getpid()}.partial")
    entries = []
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{out}: cannot be created: {error.strerror}. Pass another folder.") from error
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
        manifest = {"generator": f"WarpFold {__version__}", "seed": seed, "proteins": entries[:proteins]}
        if dimers:
            manifest["dimers"] = entries[proteins:]
        (partial / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
        text = README.format(count=proteins, version=__version__, seed=seed, folds=len(folds), resolution=RESOLUTION)
        (partial / "README.txt").write_text(text + (DIMERS.format(count=dimers) if dimers else ""))
        # This replaces an empty folder.
        partial.rename(out.absolute())
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return entries


def _write(chains: tuple[Protein, ...], out: Path) -> dict[str, Any]:
    """Write a protein or a dimer, with an alignment for each sequence. Returns its entry of the manifest."""
    name = chains[0].name
    centre = np.concatenate([protein.atoms[:, 1] for protein in chains]).mean(0)
    placed = [to_chain(protein, letter, centre) for protein, letter in zip(chains, "AB")]
    structure = f"mmcif/{name}.cif"
    (out / structure).write_text(write_mmcif(name, placed, method="THEORETICAL MODEL", resolution=RESOLUTION))
    # Alignment files by sequence.
    files: dict[str, str] = {}
    entries: list[dict[str, Any]] = []
    for letter, protein in zip("AB", chains):
        if protein.sequence not in files:
            files[protein.sequence] = f"msas/{name}_{letter}.a3m"
            (out / files[protein.sequence]).write_text(write_a3m(protein.alignment))
        blueprint, rows = protein.blueprint, len(protein.alignment)
        entry = {"fold": blueprint.fold.name, "loops": list(blueprint.loops), "sequence": protein.sequence}
        entries.append(entry | {"elements": blueprint.elements, "rows": rows})
    alignments = [{"alignment": files[protein.sequence]} for protein in chains]
    if len(chains) == 1:
        return {"name": name, **entries[0], "structure": structure, **alignments[0]}
    kind = "homodimer" if len(files) == 1 else "heterodimer"
    by_chain = [{"chain": letter, **entry, **file} for letter, entry, file in zip("AB", entries, alignments)]
    return {"name": name, "kind": kind, "structure": structure, "chains": by_chain}
