"""Put the chains of an entry together: the records of its biological assemblies, which name those of the chains."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from warpfold.data.pack.options import PackOptions
from warpfold.data.pack.report import PackEntry
from warpfold.data.store.store import Packed
from warpfold.data.store.stored_assembly import pack_assembly
from warpfold.data.structure.assemblies import PlacedChains
from warpfold.data.structure.chain import Structure
from warpfold.errors import UserError


def build_assemblies(
    structure: Structure, entries: Sequence[Mapping[str, Any]], file: str, options: PackOptions
) -> Iterator[tuple[PackEntry, Packed | None]]:
    """Yield the outcome of each assembly that the options ask for, and its record if it is kept.

    structure: with the chains that were built, and why others were dropped.  entries: of those chains, as in
    `BuiltChains`.  An assembly is made of the chains that are kept; its entry says which parts are left out, and why.
    """
    if not options.has_assemblies:
        return
    built = {chain: found for chain in structure.chains for found in entries if found["name"] == _key(structure, chain)}
    kept = {chain: found for chain, found in built.items() if found["kept"]}
    dropped = structure.dropped | {chain: found["reason"] for chain, found in built.items() if not found["kept"]}
    names = structure.assemblies.ids
    for name in names if options.all_assemblies else names[:1]:
        entry = PackEntry(
            name=f"{structure.id}-assembly{name}",  # as the PDB names the files of assemblies
            file=file,
            kept=False,
            resolution=structure.resolution,
            release_date=None if structure.release_date is None else structure.release_date.isoformat(),
        )
        record = None
        try:
            placed = structure.assemblies.place(name, kept, dropped)
            chains = [kept[chain] for chain, _ in placed.chains]
            entry.length = sum(found["length"] for found in chains)
            entry.reason = _refusal(len(chains), entry.length, options)
            if not entry.reason:
                record = _fill(entry, placed, chains)
                entry.reason = "; ".join(f"without {part}: {why}" for part, why in placed.left_out.items())
        except UserError as error:
            entry.reason = str(error)
        yield entry, record


def _key(structure: Structure, chain: str) -> str:
    return f"{structure.id}_{chain}"


def _refusal(chains: int, residues: int, options: PackOptions) -> str:
    """Return why an assembly is dropped, or ""."""
    if not chains:
        return "none of its chains is kept"
    if chains > options.max_chains:
        return f"{chains} chains, more than {options.max_chains}"
    if residues > options.max_residues:
        return f"{residues} residues, more than {options.max_residues}"
    return ""


def _fill(entry: PackEntry, placed: PlacedChains, chains: Sequence[Mapping[str, Any]]) -> Packed:
    """Make the record of an assembly, and complete its entry.  chains: the entry of each of its chains."""
    first: dict[str, Mapping[str, Any]] = {}  # of each entity, by its sequence
    for found in chains:
        first.setdefault(found["sequence"], found)
    numbers = {sequence: number for number, sequence in enumerate(first, 1)}
    entry.kept, entry.chains = True, [found["name"] for found in chains]
    entry.depth = sum(found["depth"] for found in first.values())  # its copies share the alignment
    entry.templates = max(found["templates"] for found in first.values())  # those of the chains stand side by side
    return pack_assembly(
        name=entry.name,
        ids=placed.ids,
        keys=entry.chains,
        entities=[numbers[found["sequence"]] for found in chains],
        operators=np.stack([operator for _, operator in placed.chains]),
        release_date=entry.release_date,
        resolution=entry.resolution,
    )
