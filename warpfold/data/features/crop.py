"""Crops of assemblies for training: which residues of each chain are used (AlphaFold-Multimer, sec. 7.2)."""

from collections.abc import Sequence

import numpy as np

from warpfold.data.example.assembly import Assembly
from warpfold.data.features.choose import SampleConfig

COMPARED = 1024  # residues whose distances to all others are computed at a time


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
    rotation, translation = operators[chain, :, :3], operators[chain, :, 3]
    return (positions @ rotation.T + translation).astype(np.float32)


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
    interface = np.flatnonzero(near_other_chain(ca, seen, chain, distance))
    if not len(interface):
        return None
    centre = int(rng.choice(interface))
    apart = np.where(seen, np.linalg.norm(ca - ca[centre], axis=-1), np.inf)
    kept = np.zeros(len(ca), bool)
    kept[np.argsort(apart, kind="stable")[:size]] = True
    return kept


def near_other_chain(ca: np.ndarray, seen: np.ndarray, chain: np.ndarray, distance: float) -> np.ndarray:
    """Return which residues have a CA of another chain within `distance` angstrom: bool [N]; arguments as above."""
    near = np.zeros(len(ca), bool)
    there = np.flatnonzero(seen)
    points, chains = ca[there].astype(np.float64), chain[there]
    for start in range(0, len(there), COMPARED):
        part = slice(start, start + COMPARED)
        squared = ((points[part] ** 2).sum(-1)[:, None] + (points**2).sum(-1)) - 2 * points[part] @ points.T
        near[there[part]] = ((squared < distance**2) & (chains[part][:, None] != chains)).any(1)
    return near
