"""Crops of assemblies: which residues of each chain are used (AlphaFold-Multimer, sec. 7.2)."""

from collections.abc import Sequence

import numpy as np

from warpfold.data.example.raw_example import Assembly
from warpfold.data.features.choose import SampleConfig
from warpfold.data.structure.assemblies import apply_operator
from warpfold.keyed import keyed_rng

FIRST_COMPARED, COMPARED = 32, 1024  # residues whose distances to all others are computed at a time


def crop_assembly(assembly: Assembly, config: SampleConfig, rng: np.random.Generator) -> list[np.ndarray]:
    """Draw a crop of at most `config.crop` residues: the residues of each chain, int64, ascending; [] for none.

    Spatial around a residue of an interface, or contiguous in each chain; contiguous where no interface is known.
    """
    lengths = [chain.length for chain in assembly.chains]
    if config.crop is None or sum(lengths) <= config.crop:
        return [np.arange(length) for length in lengths]
    spatial = len(lengths) > 1 and rng.random() < config.spatial_fraction
    if spatial and (ca := ca_of(assembly)) is not None:
        chain = np.repeat(np.arange(len(lengths)), lengths)
        kept = spatial_crop(*ca, chain, config.crop, config.interface_distance, rng)
        if kept is not None:
            return [np.flatnonzero(part) for part in np.split(kept, np.cumsum(lengths)[:-1])]
    return contiguous_crop(lengths, config.crop, rng)


def fixed_crop(assembly: Assembly, size: int, distance: float) -> list[np.ndarray]:
    """Return at most `size` residues of an assembly, the same every time: of each chain, int64, ascending; [] for none.

    All of them; else those nearest to a residue of an interface, drawn by the assembly's name; else the first.
    distance: as in `spatial_crop`.
    """
    lengths = [chain.length for chain in assembly.chains]
    kept = np.arange(sum(lengths)) < size
    if sum(lengths) > size and (ca := ca_of(assembly)) is not None:
        chain = np.repeat(np.arange(len(lengths)), lengths)
        near = spatial_crop(*ca, chain, size, distance, keyed_rng(0, assembly.name, "crop"))
        kept = kept if near is None else near
    return [np.flatnonzero(part) for part in np.split(kept, np.cumsum(lengths)[:-1])]


def ca_of(assembly: Assembly) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the CA of all chains, [N, 3] and seen [N], in their places in the assembly; None if a chain has none."""
    found = [chain.ca_positions() for chain in assembly.chains]
    if any(one is None for one in found):
        return None
    ca = [move(one[0], assembly.operators, number) for number, one in enumerate(found) if one is not None]
    return np.concatenate(ca), np.concatenate([one[1] > 0 for one in found if one is not None])


def move(positions: np.ndarray, operators: np.ndarray | None, chain: int) -> np.ndarray:
    """Return positions [*, 3] of a chain moved to their place in the assembly (`Assembly.operators`)."""
    if operators is None:
        return positions
    return apply_operator(operators[chain], positions)


def contiguous_crop(lengths: Sequence[int], size: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Draw a span of each chain, `size` residues in all (or all there are): Algorithm 1 of AlphaFold-Multimer.

    The chains are taken in random order; each gives a random number of residues, such that those to come can make up
    what is missing.
    """
    crops = [np.arange(0)] * len(lengths)
    added, remaining = 0, sum(lengths)
    for chain in rng.permutation(len(lengths)):
        length = lengths[chain]
        remaining -= length
        most = min(size - added, length)
        least = min(length, max(0, size - added - remaining))
        count = int(rng.integers(least, most + 1))
        start = int(rng.integers(0, length - count + 1))
        crops[chain] = np.arange(start, start + count)
        added += count
    return crops


def spatial_crop(
    ca: np.ndarray, seen: np.ndarray, chain: np.ndarray, size: int, distance: float, rng: np.random.Generator
) -> np.ndarray | None:
    """Draw a residue of an interface and take the `size` residues nearest to it: bool [N], or None without interface.

    ca [N, 3], seen bool [N]; chain int64 [N], of each residue; distance: angstrom between the CA of two chains, below
    which both are of an interface.  Residues that were not seen come last.  Algorithm 2 of AlphaFold-Multimer.
    """
    centre = draw_of_interface(ca, seen, chain, distance, rng)
    if centre is None:
        return None
    apart = np.where(seen, np.linalg.norm(ca - ca[centre], axis=-1), np.inf)
    kept = np.zeros(len(ca), bool)
    kept[np.argsort(apart, kind="stable")[:size]] = True
    return kept


def draw_of_interface(
    ca: np.ndarray, seen: np.ndarray, chain: np.ndarray, distance: float, rng: np.random.Generator
) -> int | None:
    """Draw one of the residues that `near_other_chain` finds, all with the same probability; None without any.

    The first of them in a random order: for most assemblies, few residues have to be compared with all others.
    """
    order = rng.permutation(np.flatnonzero(seen))
    start, count = 0, FIRST_COMPARED
    while start < len(order):
        part = order[start : start + count]
        near = near_other_chain(ca, seen, chain, distance, part)
        if near.any():
            return int(part[np.argmax(near)])
        start, count = start + count, min(2 * count, COMPARED)
    return None


def near_other_chain(
    ca: np.ndarray, seen: np.ndarray, chain: np.ndarray, distance: float, residues: np.ndarray
) -> np.ndarray:
    """Mark those of K residues (indices) that have a CA of another chain within `distance` angstrom: bool [K]."""
    points = np.where(seen[:, None], ca, np.nan).astype(np.float64)  # no distance from NaN is below another
    own = points[residues]
    squared = (own**2).sum(-1)[:, None] + (points**2).sum(-1) - 2 * own @ points.T
    return ((squared < distance**2) & (chain[residues][:, None] != chain)).any(1)
