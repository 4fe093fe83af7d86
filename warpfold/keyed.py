"""Draw random numbers as a function of a seed and a name, independent of the order of draws."""

import hashlib

import numpy as np


def keyed_hash(seed: int, *parts: str | int) -> int:
    """Compute a 128-bit hash of (seed, parts), the same in every process."""
    text = repr((int(seed), *(part if isinstance(part, str) else int(part) for part in parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


def keyed_rng(seed: int, *parts: str | int) -> np.random.Generator:
    """Create a Philox generator, which is counter-based, with a hash of (seed, parts) as its key.

    Equal keys give the same numbers in every process, and different keys give independent numbers.
    """
    return np.random.Generator(np.random.Philox(key=keyed_hash(seed, *parts)))
