"""Build synthetic complexes of compact chains for tests of scoring."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from tests.scoring.test_score import protein
from warpfold.data.structure.chain import Chain


def turn(angle: float, axis: Sequence[float]) -> np.ndarray:
    """Compute the rotation matrix for an angle in radians about an axis."""
    x, y, z = np.asarray(axis) / np.linalg.norm(axis)
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * cross @ cross


def placed(
    chain: Chain, name: str, rotation: np.ndarray | None = None, shift: Sequence[float] = (0, 0, 0), noise: float = 0.0
) -> Chain:
    """Rotate a chain about its centre, shift it, add noise to its atoms, and rename it."""
    seen = chain.mask[..., None] > 0
    centre = chain.positions[chain.mask > 0].mean(0)
    positions = (chain.positions - centre) @ (np.eye(3) if rotation is None else rotation).T + centre + np.array(shift)
    positions = positions + noise * np.random.default_rng(len(name) + ord(name[0])).normal(size=positions.shape)
    return dataclasses.replace(chain, id=name, positions=np.where(seen, positions, 0).astype(np.float32))


def named(*chains: Chain) -> dict[str, Chain]:
    return {chain.id: chain for chain in chains}


def without(chain: Chain, residues: slice) -> Chain:
    """Mark residues of a chain as unresolved."""
    mask = chain.mask.copy()
    mask[residues] = 0
    return dataclasses.replace(chain, mask=mask, positions=chain.positions * mask[..., None])


def heterodimer() -> dict[str, Chain]:
    return named(protein("A", 40, 3), placed(protein("B", 30, 4), "B", shift=(9, 6, 0)))


def ring(copies: int, length: int = 30, radius: float = 12.0, seed: int = 3) -> dict[str, Chain]:
    """Place copies of one chain around the z axis, so that each touches the next."""
    one = placed(protein("A", length, seed), "A")
    one = placed(one, "A", shift=-one.positions[one.mask > 0].mean(0) + [radius, 0, 0])
    chains = []
    for k in range(copies):
        positions = one.positions @ turn(2 * np.pi * k / copies, (0, 0, 1)).T
        chains.append(dataclasses.replace(one, id=chr(ord("A") + k), positions=positions.astype(np.float32)))
    return named(*chains)


def two_and_two() -> dict[str, Chain]:
    """Build an A2B2 complex in which B is a peptide.  A and C are copies, as are B and D."""
    pair = [protein("A", 40, 3), placed(protein("B", 9, 4), "B", shift=(8, 5, 0))]
    half = turn(np.pi, (0, 0, 1))
    copies = [
        dataclasses.replace(
            x, id=name, positions=((x.positions + [14, 0, 0]) @ half.T * x.mask[..., None]).astype(np.float32)
        )
        for x, name in zip(pair, "CD")
    ]
    first = [placed(x, x.id, shift=(14, 0, 0)) for x in pair]
    return named(*first, *copies)


def renamed(chains: dict[str, Chain], names: str) -> dict[str, Chain]:
    """Rename the chains, and sort them by their new names."""
    pairs = zip(names, chains.values())
    return named(*(dataclasses.replace(chain, id=name) for name, chain in sorted(pairs, key=lambda pair: pair[0])))


def disturbed(chains: dict[str, Chain], angle: float, shift: float, noise: float) -> dict[str, Chain]:
    """Rotate and shift every second chain, and add noise to all chains."""
    found = []
    for k, chain in enumerate(chains.values()):
        found.append(placed(chain, chain.id, turn(angle * (k % 2), (1, 2, k)), (0, shift * (k % 2), 0), noise))
    return named(*found)


def lossy(chains: dict[str, Chain]) -> dict[str, Chain]:
    """Remove some residues of every chain."""
    return named(*(without(chain, slice(3 * k, 3 * k + 5)) for k, chain in enumerate(chains.values())))


_three_of_four = list(disturbed(ring(4, radius=10.0), 0.1, 0.5, 0.2).values())[1:]

# name -> reference, prediction
CASES = {
    "heterodimer": (heterodimer(), disturbed(heterodimer(), 0.3, 1.5, 0.3)),
    "far": (heterodimer(), disturbed(heterodimer(), 1.0, 9.0, 0.5)),
    "lossy": (heterodimer(), lossy(disturbed(heterodimer(), 0.2, 1.0, 0.2))),
    "lossy truth": (lossy(heterodimer()), disturbed(heterodimer(), 0.2, 1.0, 0.2)),
    "trimer": (ring(3, radius=9.0), renamed(disturbed(ring(3, radius=9.0), 0.2, 1.0, 0.3), "BCA")),
    "ring of five": (ring(5, radius=13.0), renamed(disturbed(ring(5, radius=13.0), 0.3, 2.0, 0.3), "CEABD")),
    "two and two": (two_and_two(), renamed(disturbed(two_and_two(), 0.2, 1.0, 0.3), "CBAD")),
    "a chain less": (
        ring(4, radius=10.0),
        renamed(named(*list(disturbed(ring(4, radius=10.0), 0.1, 0.5, 0.2).values())[1:]), "ACB"),
    ),
}
