"""What alignment a model sees: how many of its rows have a residue at each place, and a picture of the rows.

It is read from the features, so that rows which were lost on the way to them are not counted.
"""

from dataclasses import dataclass

import numpy as np

from warpfold.batch import Batch
from warpfold.data.example.raw_example import Assembly
from warpfold.geometry.residue import GAP

PICTURED = 192  # rows of the picture, at most
BLOCK = 4096  # alignment rows compared at a time


@dataclass(frozen=True)
class Coverage:
    """The alignment of N residues as ColabFold's users know it: rows by their identity with the query, best first.

    Of a complex: the paired rows, then those of each sequence that stand alone; both sorted.
    """

    depth: np.ndarray  # int32 [N]: rows that have a residue there, the query's own among them
    rows: np.ndarray  # uint8 [R, N], R <= 192 rows at equal steps: 0 a gap; else 1 + the row's identity in percent
    total: int  # rows that `rows` was drawn from

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays for NAME.npz (docs/reference/outputs.md)."""
        return {
            "coverage_depth": self.depth,
            "coverage_rows": self.rows,
            "coverage_total": np.array(self.total, np.int32),
        }


def seen_rows(batch: Batch) -> np.ndarray:
    """Return the alignment rows that a model sees: uint8 [R, N], codes 0-21, the query's own first.

    Of an assembly those from which every pass draws; of a single chain the centres and the extra rows of the first
    pass (where there are more rows, they count in the clusters' profiles).
    """
    if "alignment" in batch:
        rows, mask = batch["alignment"].numpy(), batch["alignment_mask"].numpy()
        return rows[mask.any(1)].astype(np.uint8)
    parts = [(batch["true_msa"][0], batch["msa_mask"][0]), (batch["extra_msa"][0], batch["extra_msa_mask"][0])]
    centres, extra = (rows.numpy()[mask.numpy().any(1)].astype(np.uint8) for rows, mask in parts)
    return np.concatenate([centres, extra[(extra != centres[0]).any(1)]])  # the query may stand for an empty extra MSA


def entities_of(rows: np.ndarray, assembly: Assembly) -> np.ndarray:
    """Return which entities of an assembly each row has residues of: bool [R, E]."""
    entity = np.repeat(assembly.entity_id, [chain.length for chain in assembly.chains])
    return np.stack([(rows[:, entity == e] != GAP).any(1) for e in range(1, entity.max() + 1)], 1)


def coverage_of(rows: np.ndarray, assembly: Assembly) -> Coverage:
    """Compute the coverage of an assembly by the rows that a model sees (`seen_rows`).

    A row's identity is the share of the residues of the chains that it belongs to, where it has the query's residue.
    """
    there = entities_of(rows, assembly)
    chains = there[:, assembly.entity_id - 1]
    same = np.zeros(len(rows), np.int32)
    depth = np.zeros(rows.shape[1], np.int32)
    for start in range(0, len(rows), BLOCK):
        block = rows[start : start + BLOCK]
        same[start : start + BLOCK] = (block == rows[0]).sum(1)
        depth += (block != GAP).sum(0, dtype=np.int32)
    identity = same / np.maximum(1, chains @ np.array([chain.length for chain in assembly.chains]))
    section = np.where(there.sum(1) > 1, 1, 2 + there.argmax(1))
    section[0] = 0
    order = np.lexsort((-identity, section))
    taken = order[np.unique(np.linspace(0, len(rows) - 1, min(PICTURED, len(rows))).round().astype(int))]
    percent = 1 + np.rint(100 * identity[taken]).astype(np.uint8)
    return Coverage(depth, np.where(rows[taken] != GAP, percent[:, None], 0).astype(np.uint8), len(rows))
