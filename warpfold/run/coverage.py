"""What an alignment covers: how many of its rows have a residue at each place, and a picture of the rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from warpfold.data.example.assembly import Assembly
from warpfold.data.example.pairing import pair_rows
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
        """Return what NAME.npz has of it (docs/outputs.md)."""
        return {
            "coverage_depth": self.depth,
            "coverage_rows": self.rows,
            "coverage_total": np.array(self.total, np.int32),
        }


def coverage_of(assembly: Assembly) -> Coverage:
    """Return what the alignments of an assembly cover.

    A row's identity is the share of the residues of the chains that it belongs to, where it has the query's residue.
    """
    entity = assembly.entity_id - 1
    firsts = [int(np.flatnonzero(entity == e)[0]) for e in range(entity.max() + 1)]  # a chain of each sequence
    alignments = [chain.whole_rows(np.arange(chain.depth)) for chain in (assembly.chains[k] for k in firsts)]
    counted = [_count(alignment) for alignment in alignments]
    lengths = np.array([chain.length for chain in assembly.chains])
    sections = _sections(assembly, [len(alignment) for alignment in alignments])
    ordered, identities = [], []
    for rows in sections:  # [T, K]: the row of each chain, -1 where it has none
        same = sum(np.where(rows[:, k] < 0, 0, counted[e][0][rows[:, k]]) for k, e in enumerate(entity))
        identity = same / np.maximum(1, (rows >= 0) @ lengths)
        order = np.argsort(-identity, kind="stable")
        ordered.append(rows[order])
        identities.append(identity[order])
    rows, identity = np.concatenate(ordered), np.concatenate(identities)
    taken = np.unique(np.linspace(0, len(rows) - 1, min(PICTURED, len(rows))).round().astype(int))
    percent = 1 + np.rint(100 * identity[taken]).astype(np.uint8)
    picture = []
    for k, e in enumerate(entity):
        codes = alignments[e][np.maximum(rows[taken, k], 0)]
        there = (codes != GAP) & (rows[taken, k] >= 0)[:, None]
        picture.append(np.where(there, percent[:, None], 0).astype(np.uint8))
    depth = np.concatenate([counted[e][1] for e in entity])
    return Coverage(depth, np.concatenate(picture, 1), len(rows))


def _count(alignment: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return how many residues of the first row each row has [R], and how many rows have a residue [N]: int32."""
    same = np.zeros(len(alignment), np.int32)
    depth = np.zeros(alignment.shape[1], np.int32)
    for start in range(0, len(alignment), BLOCK):
        block = alignment[start : start + BLOCK]
        same[start : start + BLOCK] = (block == alignment[0]).sum(1)
        depth += (block != GAP).sum(0, dtype=np.int32)
    return same, depth


def _sections(assembly: Assembly, depths: Sequence[int]) -> list[np.ndarray]:
    """Return the rows side by side, int64 [T, K] each: the query's and the pairs, then those of each sequence alone."""
    entity, chains = assembly.entity_id - 1, len(assembly.chains)
    pairs = np.zeros((1, chains), np.int64)
    if len(depths) > 1:
        pairs = pair_rows([chain.pairing for chain in assembly.chains])
    sections = [pairs[:1], pairs[1:]]
    for e, depth in enumerate(depths):
        alone = np.setdiff1d(np.arange(depth), pairs[:, entity == e])
        sections.append(np.where(entity == e, alone[:, None], -1))
    return [rows for rows in sections if len(rows)]
