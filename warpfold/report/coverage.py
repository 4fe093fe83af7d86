"""Compute the coverage of the alignment that a model sees: the depth at each residue, and an image of the rows.

The rows are taken from the features, so rows that featurisation removed are not counted.
"""

from dataclasses import dataclass

import numpy as np

from warpfold.batch import Batch
from warpfold.data.example.raw_example import Assembly
from warpfold.geometry.residue import GAP

# The largest number of rows in the image.
PICTURED = 192
# Alignment rows that are compared at a time.
BLOCK = 4096


@dataclass(frozen=True)
class Coverage:
    """The coverage of N residues as in ColabFold: rows sorted by their identity with the query, best first.

    The paired rows of a complex come first, followed by the unpaired rows of each sequence. Both groups are sorted.

    depth: int32 [N], the number of rows with a residue at each position, including the query.
    rows: uint8 [R, N], at most 192 equally spaced rows; 0 for a gap, otherwise 1 + the row's identity in percent.
    total: the number of rows from which `rows` was chosen.
    """

    depth: np.ndarray
    rows: np.ndarray
    total: int

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays for NAME.npz (docs/reference/outputs.md)."""
        return {
            "coverage_depth": self.depth,
            "coverage_rows": self.rows,
            "coverage_total": np.array(self.total, np.int32),
        }


def seen_rows(batch: Batch) -> np.ndarray:
    """Collect the alignment rows that a model sees: uint8 [R, N], residue codes 0 to 21, query first.

    For assemblies these are the rows from which every iteration draws. For single chains they are the cluster centres
    and the extra rows of the first iteration; further rows contribute only to the cluster profiles.
    """
    if "alignment" in batch:
        rows, mask = batch["alignment"].numpy(), batch["alignment_mask"].numpy()
        return rows[mask.any(1)].astype(np.uint8)
    parts = [(batch["true_msa"][0], batch["msa_mask"][0]), (batch["extra_msa"][0], batch["extra_msa_mask"][0])]
    centres, extra = (rows.numpy()[mask.numpy().any(1)].astype(np.uint8) for rows, mask in parts)
    # The query replaces an empty extra MSA, so copies of it are dropped.
    return np.concatenate([centres, extra[(extra != centres[0]).any(1)]])


def entities_of(rows: np.ndarray, assembly: Assembly) -> np.ndarray:
    """Compute a mask, bool [R, E], of the entities that each row covers."""
    entity = np.repeat(assembly.entity_id, [chain.length for chain in assembly.chains])
    return np.stack([(rows[:, entity == e] != GAP).any(1) for e in range(1, entity.max() + 1)], 1)


def coverage_of(rows: np.ndarray, assembly: Assembly) -> Coverage:
    """Compute the coverage of an assembly by the rows that a model sees (`seen_rows`).

    The identity of a row is the share of identical residues among all residues of the chains that the row covers.
    """
    is_covered = entities_of(rows, assembly)
    chains = is_covered[:, assembly.entity_id - 1]
    same = np.zeros(len(rows), np.int32)
    depth = np.zeros(rows.shape[1], np.int32)
    for start in range(0, len(rows), BLOCK):
        block = rows[start : start + BLOCK]
        same[start : start + BLOCK] = (block == rows[0]).sum(1)
        depth += (block != GAP).sum(0, dtype=np.int32)
    identity = same / np.maximum(1, chains @ np.array([chain.length for chain in assembly.chains]))
    section = np.where(is_covered.sum(1) > 1, 1, 2 + is_covered.argmax(1))
    section[0] = 0
    order = np.lexsort((-identity, section))
    pictured = order[np.unique(np.linspace(0, len(rows) - 1, min(PICTURED, len(rows))).round().astype(int))]
    percent = 1 + np.rint(100 * identity[pictured]).astype(np.uint8)
    return Coverage(depth, np.where(rows[pictured] != GAP, percent[:, None], 0).astype(np.uint8), len(rows))
