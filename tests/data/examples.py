"""Make random examples for tests of features."""

import numpy as np

from warpfold.data.example.raw_example import RawExample, Templates, compute_profile, merge
from warpfold.geometry.residue import GAP


def example(length: int = 40, depth: int = 60, seed: int = 0, labels: bool = True) -> RawExample:
    """Return a random example whose alignment has noisy copies of the query with gaps."""
    rng = np.random.default_rng(seed)
    aatype = rng.integers(0, 21, length).astype(np.uint8)
    rows = np.where(rng.random((depth, length)) < 0.4, rng.integers(0, 22, (depth, length)), aatype).astype(np.uint8)
    rows[rng.random(rows.shape) < 0.1] = GAP
    deletions = rng.poisson(0.1, rows.shape).astype(np.uint16)
    msa, deletions = merge(aatype, [(rows, deletions)])
    positions = rng.normal(size=(length, 37, 3)).astype(np.float32) * 10 if labels else None
    mask = rng.integers(0, 2, (length, 37)).astype(np.uint8) if labels else None
    index = np.arange(length, dtype=np.int32)
    return RawExample("x", aatype, index, msa, deletions, compute_profile(msa), positions, mask, 2.0)


def templates(count: int, length: int, seed: int = 0) -> Templates:
    """Return `count` random templates."""
    rng = np.random.default_rng(seed)
    return Templates(
        rng.integers(0, 22, (count, length)).astype(np.uint8),
        rng.normal(size=(count, length, 37, 3)).astype(np.float32),
        rng.integers(0, 2, (count, length, 37)).astype(np.uint8),
        tuple(f"{i}abc_A" for i in range(count)),
        rng.random(count).astype(np.float32),
    )
