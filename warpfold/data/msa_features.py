"""The MSA features: clusters, masking, profiles, the extra MSA (Supp. 1.2.7, 1.2.9, table 1).

Everything is drawn and computed on the chosen rows and residues of one example, in whole numbers until the last step,
and written once, where the model reads it: one array per feature, with all passes in it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import embedding_bag

from warpfold.batch import Arrays
from warpfold.data.choose import SampleConfig, keyed_rng, with_query
from warpfold.data.features import RawExample
from warpfold.geometry.residue import GAP, MASK

MSA_CLASSES = 23  # 20 residue types, X, gap, mask
ROWS = 1024  # rows compared with the centres at a time
HALF = 2048  # columns: a float16 counts so far without error
PROFILE = slice(25, 48)  # channels of msa_feat
COLUMNS = 32  # columns counted at a time


@dataclass(frozen=True)
class Deletions:
    """The cells of an alignment, [R, N], that have deletions: K of them."""

    row: np.ndarray  # int64 [K]
    column: np.ndarray  # int64 [K]
    count: np.ndarray  # uint16 [K]

    @classmethod
    def of(cls, deletions: np.ndarray) -> "Deletions":
        row, column = np.divmod(np.flatnonzero(deletions != 0), deletions.shape[1])  # of bools: ten times as fast
        return cls(row, column, deletions[row, column])

    def among(self, rows: np.ndarray, depth: int) -> "Deletions":
        """Those in `rows` (of `depth`), which are numbered anew."""
        place = np.full(depth, -1)
        place[rows] = np.arange(len(rows))
        row = place[self.row]
        kept = row >= 0
        return Deletions(row[kept], self.column[kept], self.count[kept])


def msa_features(
    raw: RawExample,
    config: SampleConfig,
    seed: int,
    key: tuple[str | int, ...],
    passes: int = 1,
    sizes: dict[str, int] | None = None,
) -> Arrays:
    """The MSA features of an example, with a draw of its own for each of `passes`.

    raw: the chosen rows and residues.  sizes: at least so many `res`, `seq` and `extra` (the rest is zeros, masked).
    Whole numbers and masks are narrower than in the feature table (`batch.to_tensors` widens them on the device):
    masks and codes uint8, the others float32.
    """
    depth, length = raw.msa.shape
    seq = min(depth, config.max_msa)
    extra = min(depth - seq, config.max_extra)
    sizes = sizes or {}
    shape = [max(size, sizes.get(axis, 0)) for axis, size in (("seq", seq), ("extra", max(extra, 1)), ("res", length))]
    features = _zeros(passes, *shape)
    deletions = Deletions.of(raw.deletions)
    # A row without a residue in this crop says nothing: it would join the query's cluster by default.
    silent = (raw.msa == GAP).all(1)
    for index in range(passes):
        one = {name: array[index] for name, array in features.items()}
        _fill(one, raw, deletions, silent, config, seed, (*key, index))
    return features


def _zeros(passes: int, seq: int, extra: int, length: int) -> Arrays:
    clustered = dict.fromkeys(("msa_mask", "bert_mask", "true_msa"), np.uint8)
    unclustered = dict.fromkeys(("extra_msa", "extra_msa_mask", "extra_has_deletion"), np.uint8)
    return {
        "msa_feat": np.zeros((passes, seq, length, 49), np.float32),
        **{name: np.zeros((passes, seq, length), dtype) for name, dtype in clustered.items()},
        **{name: np.zeros((passes, extra, length), dtype) for name, dtype in unclustered.items()},
        "extra_deletion_value": np.zeros((passes, extra, length), np.float32),
    }


def _fill(
    features: Arrays,
    raw: RawExample,
    deletions: Deletions,
    silent: np.ndarray,
    config: SampleConfig,
    seed: int,
    key: tuple[str | int, ...],
) -> None:
    """Draws one pass and writes its features."""
    depth, length = raw.msa.shape
    centres = np.arange(depth)
    if depth > config.max_msa:
        centres = with_query(centres, config.max_msa, keyed_rng(seed, *key, "clusters"))
    count = len(centres)
    true_msa = raw.msa[centres]
    masked_msa, bert_mask = mask_msa(true_msa, raw.profile, config, keyed_rng(seed, *key, "mask"))
    features["true_msa"][:count, :length] = true_msa
    features["bert_mask"][:count, :length] = bert_mask
    features["msa_mask"][:count, :length] = 1

    rows, cluster = masked_msa, np.arange(depth)
    if count < depth:
        rows = raw.msa.copy()
        rows[centres] = masked_msa
        cluster = nearest_cluster(raw.msa, masked_msa)
        cluster[silent] = count  # none
        cluster[centres] = np.arange(count)
    members = (np.bincount(cluster, minlength=count)[:count] + 1e-6).astype(np.float32)  # as official
    feat = features["msa_feat"][:count, :length]
    write_codes(feat, masked_msa, rows, cluster, members)
    own = deletions.among(centres, depth)
    feat[own.row, own.column, 23] = 1
    feat[own.row, own.column, 24] = deletion_value(own.count)
    mean = deletion_means(deletions, cluster, members, length)
    row, column = np.nonzero(mean)
    feat[row, column, 48] = deletion_value(mean[row, column])

    other = np.ones(depth, bool)
    other[centres] = False
    others = np.flatnonzero(other)
    if len(others) > config.max_extra:
        others = np.sort(keyed_rng(seed, *key, "extra").choice(others, config.max_extra, replace=False))
    elif not len(others) and config.empty_extra == "query":
        others = np.zeros(1, np.int64)
    count = len(others)
    features["extra_msa"][:count, :length] = raw.msa[others]
    features["extra_msa_mask"][:count, :length] = 1
    own = deletions.among(others, depth)
    features["extra_has_deletion"][own.row, own.column] = 1
    features["extra_deletion_value"][own.row, own.column] = deletion_value(own.count)


def mask_msa(
    msa: np.ndarray, profile: np.ndarray, config: SampleConfig, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """BERT masking (Supp. 1.2.7, step 2): what the model sees, uint8 [S, N], and which positions it must restore, bool.

    msa: uint8 [S, N]; profile: [N, 22], the frequencies of residue types, X and gap in each column.
    """
    bert_mask = rng.random(msa.shape, np.float32) < config.masked_fraction
    cell = np.flatnonzero(bert_mask)
    kind, level = rng.random((2, len(cell)))
    uniform = rng.integers(0, 20, len(cell))
    to_uniform, to_profile, to_same = np.cumsum([config.mask_uniform, config.mask_profile, config.mask_same])
    new = np.where(kind < to_uniform, uniform, MASK).astype(np.uint8)
    drawn = np.flatnonzero((kind >= to_uniform) & (kind < to_profile))
    cumulative = np.cumsum(profile, axis=1, dtype=np.float64)[cell[drawn] % msa.shape[1]]
    new[drawn] = (level[drawn, None] * cumulative[:, -1:] >= cumulative[:, :-1]).sum(1)
    masked = msa.copy()
    changed = (kind < to_profile) | (kind >= to_same)
    masked.reshape(-1)[cell[changed]] = new[changed]
    return masked, bert_mask


def nearest_cluster(rows: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """The cluster of each row: the centre that agrees with it in most positions, the first of equals (int64 [E]).

    rows: uint8 [E, N], codes 0-21; centres: uint8 [S, N], codes 0-22.  Gaps and masked positions agree with nothing
    (Supp. 1.2.7, step 3).  For each column and code a table says which centres have it there; a row adds up its N
    lines of the table.  That is the product with one-hot rows without the zeros, and exact: float16 counts to 2,048.
    """
    depth, length = centres.shape
    agrees = np.zeros((length, MSA_CLASSES, depth), np.float16)
    agrees[np.arange(length), centres, np.arange(depth)[:, None]] = 1
    agrees[:, GAP] = 0
    table = torch.from_numpy(agrees.reshape(-1, depth))
    line = np.arange(length, dtype=np.int32) * MSA_CLASSES
    nearest = np.empty(len(rows), np.int64)
    for start in range(0, len(rows), ROWS):
        lines = torch.from_numpy(rows[start : start + ROWS] + line)
        parts = [embedding_bag(part, table, mode="sum").float() for part in lines.split(HALF, dim=1)]
        nearest[start : start + ROWS] = sum(parts[1:], parts[0]).numpy().argmax(axis=1)
    return nearest


def write_codes(
    feat: np.ndarray, masked: np.ndarray, rows: np.ndarray, cluster: np.ndarray, members: np.ndarray
) -> None:
    """The code of each centre, one-hot, and the frequencies of codes in its cluster, into `feat`, float32 [S, N, 49].

    masked: uint8 [S, N], the centres as the model sees them; rows: uint8 [R, N], codes 0-22, the centres (masked) among
    them; cluster: int64 [R], S for none; members: float32 [S], what to divide by.
    """
    count, length = masked.shape
    base = cluster[:, None] * (COLUMNS * MSA_CLASSES) + np.arange(0, COLUMNS * MSA_CLASSES, MSA_CLASSES)
    for start in range(0, length, COLUMNS):  # pieces that stay in the cache
        span = slice(start, min(start + COLUMNS, length))
        width = span.stop - start
        piece = feat[:, span]
        piece[np.arange(count)[:, None], np.arange(width), masked[:, span]] = 1
        found = np.bincount((base[:, :width] + rows[:, span]).ravel(), minlength=(count + 1) * COLUMNS * MSA_CLASSES)
        counts = found.astype(np.float32).reshape(-1, COLUMNS, MSA_CLASSES)[:count, :width]
        np.divide(counts, members[:, None, None], out=piece[..., PROFILE])


def deletion_means(deletions: Deletions, cluster: np.ndarray, members: np.ndarray, length: int) -> np.ndarray:
    """Mean deletions before each column of each cluster: float64 [S, N]; arguments as in `write_codes`."""
    count = len(members)
    cell = cluster[deletions.row] * length + deletions.column
    total = np.bincount(cell, deletions.count, minlength=count * length)[: count * length]
    return total.reshape(count, length) / members[:, None]


def deletion_value(count: np.ndarray) -> np.ndarray:
    """A number of deleted residues, d >= 0, squeezed into [0, 1): 2/pi arctan(d / 3) (Supp. table 1).  float32."""
    return np.arctan(count.astype(np.float32) / 3) * np.float32(2 / np.pi)
