"""Crop assemblies: sample the residues of each chain (AlphaFold-Multimer, sec. 7.2)."""

from collections.abc import Sequence

import numpy as np

from warpfold.data.example.raw_example import Assembly
from warpfold.data.features.choose import SampleConfig
from warpfold.data.structure.assemblies import apply_operator
from warpfold.keyed import keyed_rng

# Numbers of residues per block, first and largest, for which distances to all others are computed.
FIRST_BLOCK, MAX_BLOCK = 32, 1024


def crop_assembly(assembly: Assembly, config: SampleConfig, rng: np.random.Generator) -> list[np.ndarray]:
    """Draw a crop of at most `config.crop` residues; returns those of each chain, int64, ascending, may be empty.

    The crop is spatial around an interface residue, or contiguous in each chain. It is contiguous if there is no
    interface or no coordinates.
    """
    lengths = [chain.length for chain in assembly.chains]
    if config.crop is None or sum(lengths) <= config.crop:
        return [np.arange(length) for length in lengths]
    is_spatial = len(lengths) > 1 and rng.random() < config.spatial_fraction
    if is_spatial and (ca := read_ca(assembly)) is not None:
        chain = np.repeat(np.arange(len(lengths)), lengths)
        is_kept = spatial_crop(*ca, chain, config.crop, config.interface_distance, rng)
        if is_kept is not None:
            return [np.flatnonzero(part) for part in np.split(is_kept, np.cumsum(lengths)[:-1])]
    return contiguous_crop(lengths, config.crop, rng)


def fixed_crop(assembly: Assembly, size: int, distance: float) -> list[np.ndarray]:
    """Choose a reproducible crop of at most `size` residues; returns those of each chain, int64, ascending.

    A larger assembly is cropped to the residues nearest to an interface residue, which is drawn by the assembly's name.
    Without an interface, its first residues are used. distance: see `spatial_crop`.
    """
    lengths = [chain.length for chain in assembly.chains]
    is_kept = np.arange(sum(lengths)) < size
    if sum(lengths) > size and (ca := read_ca(assembly)) is not None:
        chain = np.repeat(np.arange(len(lengths)), lengths)
        near = spatial_crop(*ca, chain, size, distance, keyed_rng(0, assembly.name, "crop"))
        is_kept = is_kept if near is None else near
    return [np.flatnonzero(part) for part in np.split(is_kept, np.cumsum(lengths)[:-1])]


def read_ca(assembly: Assembly) -> tuple[np.ndarray, np.ndarray] | None:
    """Read the placed CA of all chains: positions [N, 3] and mask [N]; None if a chain has no atoms."""
    by_chain = [chain.ca_positions() for chain in assembly.chains]
    positions, masks = [], []
    for number, ca in enumerate(by_chain):
        if ca is None:
            return None
        positions.append(place_chain(ca[0], assembly.operators, number))
        masks.append(ca[1] > 0)
    return np.concatenate(positions), np.concatenate(masks)


def place_chain(positions: np.ndarray, operators: np.ndarray | None, chain: int) -> np.ndarray:
    """Apply the operator of a chain (`Assembly.operators`) to positions [*, 3]; None leaves them unchanged."""
    if operators is None:
        return positions
    return apply_operator(operators[chain], positions)


def contiguous_crop(lengths: Sequence[int], size: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Draw a contiguous span of each chain, at most `size` residues in total (AlphaFold-Multimer, Algorithm 1).

    The chains are visited in random order. Each contributes a random number of residues, at least as many as the later
    chains could not contribute.
    """
    crops: dict[int, np.ndarray] = {}
    added, remaining = 0, sum(lengths)
    for chain in rng.permutation(len(lengths)).tolist():
        length = lengths[chain]
        remaining -= length
        most = min(size - added, length)
        least = min(length, max(0, size - added - remaining))
        count = int(rng.integers(least, most + 1))
        start = int(rng.integers(0, length - count + 1))
        crops[chain] = np.arange(start, start + count)
        added += count
    return [crops[chain] for chain in range(len(lengths))]


def spatial_crop(
    ca: np.ndarray, seen: np.ndarray, chain: np.ndarray, size: int, distance: float, rng: np.random.Generator
) -> np.ndarray | None:
    """Select the `size` residues nearest to a random interface residue (AlphaFold-Multimer, Algorithm 2).

    ca: [N, 3]. seen: bool [N]; residues without CA are selected last. chain: int64 [N]. distance: CA of two chains that
    are closer than this, in angstrom, belong to an interface. Returns bool [N]; None if there is no interface.
    """
    centre = draw_interface_residue(ca, seen, chain, distance, rng)
    if centre is None:
        return None
    distances = np.where(seen, np.linalg.norm(ca - ca[centre], axis=-1), np.inf)
    is_kept = np.zeros(len(ca), bool)
    is_kept[np.argsort(distances, kind="stable")[:size]] = True
    return is_kept


def draw_interface_residue(
    ca: np.ndarray, seen: np.ndarray, chain: np.ndarray, distance: float, rng: np.random.Generator
) -> int | None:
    """Draw a residue uniformly from those that `near_other_chain` marks; None if there are none.

    The residues are tested in random order until one is marked. In most assemblies, few residues have to be tested.
    """
    order = rng.permutation(np.flatnonzero(seen))
    start, count = 0, FIRST_BLOCK
    while start < len(order):
        block = order[start : start + count]
        is_near = near_other_chain(ca, seen, chain, distance, block)
        if is_near.any():
            return int(block[np.argmax(is_near)])
        start, count = start + count, min(2 * count, MAX_BLOCK)
    return None


def near_other_chain(
    ca: np.ndarray, seen: np.ndarray, chain: np.ndarray, distance: float, residues: np.ndarray
) -> np.ndarray:
    """Mark the residues (indices [K]) that have a CA of another chain within `distance` angstrom: bool [K]."""
    # Comparisons with NaN are false, so residues without CA are never near.
    points = np.where(seen[:, None], ca, np.nan).astype(np.float64)
    centres = points[residues]
    squared = (centres**2).sum(-1)[:, None] + (points**2).sum(-1) - 2 * centres @ points.T
    return ((squared < distance**2) & (chain[residues][:, None] != chain)).any(1)
