"""The MSA features: clusters, masking, profiles, the extra MSA (Supp. 1.2.7, 1.2.9, table 1).

The order is the paper's: cluster centres are drawn and masked, and every other row joins the nearest one, over the
whole chain; the rest is computed for the crop alone, which gives the same numbers.  Counts are integers until the last
step, and are written once, into arrays that hold all passes of a feature, as the model reads them.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil

import numpy as np
import torch
from torch.nn.functional import embedding_bag

from warpfold.batch import Arrays
from warpfold.data.example.raw_example import RawExample
from warpfold.data.features.choose import SampleConfig, with_query
from warpfold.geometry.residue import GAP, MASK
from warpfold.keyed import keyed_rng

MSA_CLASSES = 23  # 20 residue types, X, gap, mask
ROWS = 1024  # rows compared with the centres at a time
PLACES = 3  # counts in one float32, whose 24 bits hold whole numbers without error
BITS = 8  # of each count
MOST = 2**BITS - 1  # columns that are counted at a time
TABLES = 1 << 26  # bytes of the tables of passes that are looked up together
PROFILE = slice(25, 48)  # channels of msa_feat


@dataclass(frozen=True)
class WholeChain:
    """The chosen alignment rows over a whole chain of L residues; N of them are in the crop."""

    msa: np.ndarray  # uint8 [R, L], codes 0-21
    profile: np.ndarray  # float32 [L, 22], frequencies in the whole alignment
    start: int  # where the crop begins


@dataclass(frozen=True)
class MsaSample:
    """The random choices of one pass: S cluster centres, their masking, and E rows of the extra MSA."""

    centres: np.ndarray  # int64 [S], ascending; the query, row 0, is the first
    masked: np.ndarray  # uint8 [S, L], codes 0-22: the centres as the model sees them
    bert_mask: np.ndarray  # bool [S, L]: the positions that it must restore
    extra: np.ndarray  # int64 [E], ascending


@dataclass(frozen=True)
class Deletions:
    """The cells of an alignment, [R, N], that have deletions: K of them."""

    row: np.ndarray  # int64 [K]
    column: np.ndarray  # int64 [K]
    count: np.ndarray  # uint16 [K]

    @classmethod
    def of(cls, deletions: np.ndarray) -> "Deletions":
        """Find them in uint16 [R, N]."""
        row, column = np.divmod(np.flatnonzero(deletions != 0), deletions.shape[1])  # bools: ten times as fast
        return cls(row, column, deletions[row, column])

    def among(self, rows: np.ndarray, depth: int) -> "Deletions":
        """Return those in `rows` (of `depth`), with the rows renumbered from 0."""
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
    chain: WholeChain | None = None,
) -> Arrays:
    """Return the MSA features of an example, with a sample of its own for each of `passes`.

    raw: the chosen rows and residues.  sizes: pad `res`, `seq` and `extra` to at least these (zeros, masked).
    chain: what the crop is cut from, if clusters are made before it; otherwise they are made from `raw` alone.
    Whole numbers and masks are narrower than in the feature table (`batch.to_tensors` widens them on the device):
    masks and codes uint8, the others float32.
    """
    chain = chain or WholeChain(raw.msa, raw.profile, 0)
    length = raw.length
    samples, clusters = _clusters(chain, config, seed, key, passes)
    seq, extra = len(samples[0].centres), max(len(samples[0].extra), 1)
    sizes = sizes or {}
    clustered, unclustered, columns = (
        max(size, sizes.get(axis, 0)) for axis, size in (("seq", seq), ("extra", extra), ("res", length))
    )
    features: Arrays = {"msa_feat": np.zeros((passes, clustered, columns, 49), np.float32)}
    for name in ("msa_mask", "bert_mask", "true_msa"):
        features[name] = np.zeros((passes, clustered, columns), np.uint8)
    for name in ("extra_msa", "extra_msa_mask", "extra_has_deletion"):
        features[name] = np.zeros((passes, unclustered, columns), np.uint8)
    features["extra_deletion_value"] = np.zeros((passes, unclustered, columns), np.float32)
    deletions = Deletions.of(raw.deletions)
    crop = slice(chain.start, chain.start + length)
    for index, (sample, cluster) in enumerate(zip(samples, clusters)):
        cut = replace(sample, masked=sample.masked[:, crop], bert_mask=sample.bert_mask[:, crop])
        _fill({name: array[index] for name, array in features.items()}, raw.msa, deletions, cut, cluster)
    return features


def query_part(
    raw: RawExample, config: SampleConfig, seed: int, key: tuple[str | int, ...], passes: int = 1
) -> tuple[np.ndarray, bool]:
    """Return the query's part in the profile of its own cluster, float32 [passes], and whether it is the extra MSA too.

    The arguments are those of `msa_features`, which makes the features.
    """
    samples, clusters = _clusters(WholeChain(raw.msa, raw.profile, 0), config, seed, key, passes)
    members = ((clusters == 0).sum(1) + 1e-6).astype(np.float32)
    is_extra = all(sample.extra.tolist() == [0] for sample in samples)
    return 1 / members, is_extra


def _clusters(
    chain: WholeChain, config: SampleConfig, seed: int, key: tuple[str | int, ...], passes: int
) -> tuple[list[MsaSample], np.ndarray]:
    """Draw the sample of each pass, and find the cluster of each row, int64 [passes, R]; S, of that many: none."""
    samples = [_draw(chain, config, seed, (*key, index)) for index in range(passes)]
    depth, seq = len(chain.msa), len(samples[0].centres)
    if seq < depth:
        clusters = nearest_cluster(chain.msa, np.stack([sample.masked for sample in samples]))
    else:
        clusters = np.zeros((passes, depth), np.int64)  # every row is a centre
    # A row of gaps agrees with no centre, and would join the query's cluster by default.  Over a whole chain no packed
    # alignment has such a row; in a crop there may be many.
    clusters[:, (chain.msa == GAP).all(1)] = seq
    for sample, cluster in zip(samples, clusters):
        cluster[sample.centres] = np.arange(seq)
    return samples, clusters


def _draw(chain: WholeChain, config: SampleConfig, seed: int, key: tuple[str | int, ...]) -> MsaSample:
    """Draw the sample of one pass: centres, masking, extra rows."""
    depth = len(chain.msa)
    centres = np.arange(depth)
    if depth > config.max_msa:
        centres = with_query(centres, config.max_msa, keyed_rng(seed, *key, "clusters"))
    masked, bert_mask = mask_msa(chain.msa[centres], chain.profile, config, keyed_rng(seed, *key, "mask"))
    other = np.ones(depth, bool)
    other[centres] = False
    extra = np.flatnonzero(other)
    if len(extra) > config.max_extra:
        extra = np.sort(keyed_rng(seed, *key, "extra").choice(extra, config.max_extra, replace=False))
    elif not len(extra) and config.empty_extra == "query":
        extra = np.zeros(1, np.int64)
    return MsaSample(centres, masked, bert_mask, extra)


def _fill(features: Arrays, msa: np.ndarray, deletions: Deletions, sample: MsaSample, cluster: np.ndarray) -> None:
    """Write the features of one pass.

    msa: uint8 [R, N], the rows in the crop; sample: cut to the crop; cluster: int64 [R], S for none.
    """
    depth, length = msa.shape
    count = len(sample.centres)
    features["true_msa"][:count, :length] = msa[sample.centres]
    features["bert_mask"][:count, :length] = sample.bert_mask
    features["msa_mask"][:count, :length] = 1
    rows = msa.copy()
    rows[sample.centres] = sample.masked
    members = (np.bincount(cluster, minlength=count)[:count] + 1e-6).astype(np.float32)  # as official
    feat = features["msa_feat"][:count, :length]
    write_codes(feat, sample.masked, rows, cluster, members)
    own = deletions.among(sample.centres, depth)
    feat[own.row, own.column, 23] = 1
    feat[own.row, own.column, 24] = deletion_value(own.count)
    cell = cluster[deletions.row] * length + deletions.column
    total = np.bincount(cell, deletions.count, minlength=count * length)[: count * length]
    mean = total.reshape(count, length) / members[:, None]  # before each column of each cluster
    row, column = np.nonzero(mean)
    feat[row, column, 48] = deletion_value(mean[row, column])

    count = len(sample.extra)
    features["extra_msa"][:count, :length] = msa[sample.extra]
    features["extra_msa_mask"][:count, :length] = 1
    own = deletions.among(sample.extra, depth)
    features["extra_has_deletion"][own.row, own.column] = 1
    features["extra_deletion_value"][own.row, own.column] = deletion_value(own.count)


def mask_msa(
    msa: np.ndarray, profile: np.ndarray, config: SampleConfig, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Mask as BERT does (Supp. 1.2.7, step 2): return the masked rows, uint8 [S, N], and the masked positions, bool.

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
    """Return the cluster of each row: the centre that agrees in most positions, the first of equals (int64 [P, R]).

    rows: uint8 [R, L], codes 0-21; centres: uint8 [P, S, L], codes 0-22, those of P passes.  Gaps and masked positions
    agree with nothing (Supp. 1.2.7, step 3).

    A table says for each column and code which centres have that code there, and the lines of the table that belong to
    a row are added up: a product with one-hot rows, without the zeros.  It is exact: one float32 holds three counts of
    eight bits each, and columns are taken in spans short enough that no count overflows.  Passes share the codes of the
    rows; as many passes are done together as fit their tables into `TABLES` bytes (a table has 20 MB for 5,000 residues
    and 128 centres, so for a long chain this is one).
    """
    passes, depth, length = centres.shape
    groups = ceil(depth / PLACES)
    together = max(TABLES // (4 * length * MSA_CLASSES * groups), 1)
    width = ceil(length / ceil(length / MOST))
    spans = [slice(start, start + width) for start in range(0, length, width)]
    line = np.arange(width, dtype=np.int32) * MSA_CLASSES
    nearest = np.empty((passes, len(rows)), np.int64)
    for first in range(0, passes, together):
        some = centres[first : first + together]
        tables = [[_agreement_table(each[:, span]) for each in some] for span in spans]
        for start in range(0, len(rows), ROWS):
            block = rows[start : start + ROWS]
            counts = np.zeros((len(some), len(block), PLACES, groups), np.int32)
            for span, of_passes in zip(spans, tables):
                part = block[:, span]
                lines = torch.from_numpy(part + line[: part.shape[1]])
                for table, count in zip(of_passes, counts):
                    sums = embedding_bag(lines, table, mode="sum").int().numpy()
                    for place in range(PLACES):
                        count[:, place] += (sums >> (BITS * place)) & MOST
            best = counts.reshape(len(some), len(block), -1)[..., :depth].argmax(-1)
            nearest[first : first + together, start : start + ROWS] = best
    return nearest


def _agreement_table(centres: np.ndarray) -> torch.Tensor:
    """Tabulate the centres that have a code in a column, gaps excepted: float32 [N * 23, G], G = S / 3 groups.

    Group g has the centres g, G + g and 2 G + g, each counted 256 times as high as the one before.
    """
    depth, length = centres.shape
    groups = ceil(depth / PLACES)
    table = np.zeros((length, MSA_CLASSES, groups), np.float32)
    for place in range(PLACES):
        part = centres[place * groups : (place + 1) * groups]
        table[np.arange(length), part, np.arange(len(part))[:, None]] += 2 ** (BITS * place)
    table[:, GAP] = 0
    return torch.from_numpy(table.reshape(-1, groups))


def write_codes(
    feat: np.ndarray, masked: np.ndarray, rows: np.ndarray, cluster: np.ndarray, members: np.ndarray
) -> None:
    """Write each centre's codes, one-hot, and the frequencies of codes in its cluster to `feat`, float32 [S, N, 49].

    masked: uint8 [S, N], the centres as the model sees them; rows: uint8 [R, N], codes 0-22, the centres (masked) among
    them; cluster: int64 [R], S for none; members: float32 [S], what to divide by.
    """
    count, length = masked.shape
    feat[np.arange(count)[:, None], np.arange(length), masked] = 1
    order = np.argsort(cluster, kind="stable")
    bounds = np.searchsorted(cluster[order], np.arange(count + 1)).tolist()
    rows, column = rows[order], np.arange(0, length * MSA_CLASSES, MSA_CLASSES)
    for one, number, (start, stop) in zip(feat, members, pairwise(bounds)):  # counts of a cluster stay in the cache
        found = np.bincount((rows[start:stop] + column).ravel(), minlength=length * MSA_CLASSES)
        np.divide(
            found.reshape(length, MSA_CLASSES), number, out=one[:, PROFILE], dtype=np.float32, casting="same_kind"
        )


def deletion_value(count: np.ndarray) -> np.ndarray:
    """Return deleted residues, d >= 0, mapped to [0, 1), float32: 2/pi arctan(d / 3) (Supp. table 1)."""
    return np.arctan(count.astype(np.float32) / 3) * np.float32(2 / np.pi)
