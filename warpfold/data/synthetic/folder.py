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
from warpfold.data.structure.chain import Chain
from warpfold.data.structure.write import write_mmcif
from warpfold.data.synthetic.dimers import Dimer, make_dimer
from warpfold.data.synthetic.folds import FOLDS
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
    progress: Progress = no_progress,
) -> list[dict[str, Any]]:
    """Make a folder of sample proteins: OUT/mmcif/NAME.cif, OUT/msas/NAME_A.a3m, OUT/manifest.json, OUT/README.txt.

    dimers: how many of two chains to make as well, every second of them of equal chains.
    Same seed and version, same bytes; protein i is the same however many are asked for, and so is dimer i.  Lengths in
    residues of a chain, depth in rows of the alignment (least, most), all inclusive.  `out` must not exist or be empty;
    it appears when it is complete.  Returns the manifest's entries.  Errors: UserError if `out` is in use, and for
    impossible arguments.
    """
    if os.path.lexists(out) and (out.is_symlink() or not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists already; name a new folder or remove it")
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
        raise UserError(f"{out}: cannot be made: {error.strerror}; name another folder") from error
    try:
        for folder in ("mmcif", "msas"):
            (partial / folder).mkdir()
        lengths = min_length, max_length, depth
        made: Iterator[Protein | Dimer] = chain(
            (make_protein(seed, i, *lengths) for i in range(proteins)),
            (make_dimer(seed, i, *lengths) for i in range(dimers)),
        )
        for one in made:
            entries.append(_write_protein(one, partial) if isinstance(one, Protein) else _write_dimer(one, partial))
            progress(len(entries), proteins + dimers, "making proteins")
        about = {"generator": f"WarpFold {__version__}", "seed": seed, "proteins": entries[:proteins]}
        if dimers:
            about["dimers"] = entries[proteins:]
        (partial / "manifest.json").write_text(json.dumps(about, indent=1) + "\n")
        text = README.format(count=proteins, version=__version__, seed=seed, folds=len(FOLDS), resolution=RESOLUTION)
        (partial / "README.txt").write_text(text + (DIMERS.format(count=dimers) if dimers else ""))
        if out.exists():
            out.rmdir()
        partial.rename(out.absolute())
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return entries


def _write_protein(protein: Protein, out: Path) -> dict[str, Any]:
    """Write one protein's files and return its entry of the manifest."""
    return {
        "name": protein.name,
        **_about(protein),
        "structure": _structure(out, protein.name, [to_chain(protein)]),
        "alignment": _alignment(out, protein, "A"),
    }


def _write_dimer(dimer: Dimer, out: Path) -> dict[str, Any]:
    """Write one dimer's files, an alignment for each sequence, and return its entry of the manifest."""
    centre = np.concatenate([protein.atoms[:, 1] for protein in dimer.chains]).mean(0)
    first, second = dimer.chains
    own = _alignment(out, first, "A")
    alignments = [own, own if dimer.is_homodimer else _alignment(out, second, "B")]
    return {
        "name": dimer.name,
        "kind": "homodimer" if dimer.is_homodimer else "heterodimer",
        "structure": _structure(out, dimer.name, [to_chain(p, name, centre) for p, name in zip(dimer.chains, "AB")]),
        "chains": [
            {"chain": name, **_about(protein), "alignment": alignment}
            for name, protein, alignment in zip("AB", dimer.chains, alignments)
        ],
    }


def _about(protein: Protein) -> dict[str, Any]:
    return {
        "fold": protein.blueprint.fold.name,
        "loops": list(protein.blueprint.loops),
        "sequence": protein.sequence,
        "elements": protein.blueprint.elements,
        "rows": len(protein.alignment),
    }


def _structure(out: Path, name: str, chains: Sequence[Chain]) -> str:
    """Write chains and return the file's name."""
    path = f"mmcif/{name}.cif"
    (out / path).write_text(write_mmcif(name, chains, method="THEORETICAL MODEL", resolution=RESOLUTION))
    return path


def _alignment(out: Path, protein: Protein, chain: str) -> str:
    """Write a chain's alignment and return the file's name."""
    path = f"msas/{protein.name}_{chain}.a3m"
    (out / path).write_text(write_a3m(protein.alignment))
    return path
