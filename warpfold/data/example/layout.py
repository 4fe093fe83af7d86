"""How an alignment lies in a store, so that a crop and some of its rows are read without the rest.

Residues lie in tiles of columns, one tile below the other: the blobs of a store hold neighbouring rows, so what is
read is the rows around those wanted, of the tiles that the crop touches.  Deletions, of which few cells have any, are
compressed sparse columns: those of a crop are one piece of the list (measured: docs/decisions/0008).
"""

from collections.abc import Callable
from math import ceil

import numpy as np

from warpfold.batch import Arrays
from warpfold.geometry.residue import GAP

TILE = 128  # columns of a tile, at most: a crop of 256 touches three or four, and half of a longer chain stays unread

Reader = Callable[[str, np.ndarray | None], np.ndarray]  # (name, ascending indices of the first axis or None: all)


def to_tiles(msa: np.ndarray) -> np.ndarray:
    """uint8 [R, N] -> [tiles * R, width]: tile t holds columns [t * width, ...); what the last lacks is gaps."""
    depth, length = msa.shape
    width = tile_width(length)
    tiles = np.full((ceil(length / width), depth, width), GAP, np.uint8)
    for number, tile in enumerate(tiles):
        part = msa[:, number * width : (number + 1) * width]
        tile[:, : part.shape[1]] = part
    return tiles.reshape(-1, width)


def read_tiles(read: Reader, depth: int, width: int, start: int, stop: int, rows: np.ndarray | None) -> np.ndarray:
    """Columns [start, stop) and `rows` (ascending; None: all) of an alignment in tiles of `width` columns.

    uint8 [len(rows), stop - start].
    """
    msa = np.empty((depth if rows is None else len(rows), stop - start), np.uint8)
    chosen = np.arange(depth) if rows is None else rows
    for number in range(start // width, ceil(stop / width)):
        left, right = max(start, number * width), min(stop, (number + 1) * width)
        tile = read("msa", number * depth + chosen)
        msa[:, left - start : right - start] = tile[:, left - number * width : right - number * width]
    return msa


def tile_width(length: int) -> int:
    """Columns of a tile in an alignment of `length` >= 1 columns: as few tiles as possible, all alike."""
    return ceil(length / ceil(length / TILE))


def to_columns(deletions: np.ndarray) -> Arrays:
    """uint16 [R, N], mostly 0 -> where the K others are, column by column.

    deletion_starts int64 [N + 1]: those of column n are [starts[n], starts[n + 1]) of deletion_rows, uint32 [K], and of
    deletion_counts, uint16 [K].
    """
    row, column = np.divmod(np.flatnonzero(deletions), deletions.shape[1])
    order = np.argsort(column, kind="stable")
    row, column = row[order], column[order]
    return {
        "deletion_starts": np.searchsorted(column, np.arange(deletions.shape[1] + 1)),
        "deletion_rows": row.astype(np.uint32),
        "deletion_counts": deletions[row, column],
    }


def read_columns(read: Reader, depth: int, start: int, stop: int, rows: np.ndarray | None) -> np.ndarray:
    """Columns [start, stop) and `rows` (None: all) of deletions in sparse columns: uint16 [len(rows), columns]."""
    starts = read("deletion_starts", np.arange(start, stop + 1))
    piece = np.arange(starts[0], starts[-1])
    column = np.repeat(np.arange(stop - start), np.diff(starts))
    row, count = read("deletion_rows", piece).astype(np.int64), read("deletion_counts", piece)
    if rows is None:
        rows = np.arange(depth)
    place = np.full(depth, -1)
    place[rows] = np.arange(len(rows))
    kept = place[row] >= 0
    deletions = np.zeros((len(rows), stop - start), np.uint16)
    deletions[place[row[kept]], column[kept]] = count[kept]
    return deletions
