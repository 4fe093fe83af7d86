"""Random numbers that are a function of a seed and a name, never of the order of draws."""

import hashlib

import numpy as np


def keyed_hash(seed: int, *parts: str | int) -> int:
    """Return a hash of (seed, parts) of 128 bits, the same in every process."""
    text = repr((int(seed), *(part if isinstance(part, str) else int(part) for part in parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


def keyed_rng(seed: int, *parts: str | int) -> np.random.Generator:
    """Return the generator of (seed, parts): a counter-based Philox whose key is a hash of them.

    The same key gives the same numbers in every process; different keys are independent.
    """
    return np.random.Generator(np.random.Philox(key=keyed_hash(seed, *parts)))
