"""Compute the MSA features: clusters, masking, profiles, the extra MSA (Supp. 1.2.7, 1.2.9, table 1).

As in the paper, cluster centres are drawn and masked, and every other row joins the nearest centre, over the whole
chain. The features themselves are computed only for the crop, which gives the same numbers. Counts are integers until
the last step. They are written directly into the arrays that hold all passes of a feature.
"""

from dataclasses import dataclass
from itertools import pairwise
from math import ceil

import numpy as np
import torch
from torch.nn.functional import embedding_bag

from warpfold.batch import Arrays
from warpfold.data.example.raw_example import RawExample
from warpfold.data.features.choose import SampleConfig, all_but, sample_with_query
from warpfold.geometry.residue import GAP, MASK
from warpfold.keyed import keyed_rng

MSA_CLASSES = 23  # 20 residue types, X, gap, mask
BLOCK_ROWS = 1024  # rows compared with the centres at once
# Three counts of eight bits are packed into a float32, whose 24-bit significand holds integers exactly.
PACKED_COUNTS = 3
COUNT_BITS = 8
MAX_COUNT = 2**COUNT_BITS - 1
# Bytes of the agreement tables of passes that are processed together.
TABLE_BYTES = 1 << 26
PROFILE = slice(25, 48)  # channels of msa_feat


@dataclass(frozen=True)
class WholeChain:
    """The sampled alignment rows over a whole chain of L residues.

    msa: codes 0-21. profile: frequencies in the whole alignment. start: first residue of the crop.
    """

    msa: np.ndarray  # uint8 [R, L]
    profile: np.ndarray  # float32 [L, 22]
    start: int


def msa_features(
    raw: RawExample,
    config: SampleConfig,
    seed: int,
    key: tuple[str | int, ...],
    passes: int = 1,
    chain: WholeChain | None = None,
) -> Arrays:
    """Compute the MSA features of an example, with a separate sample for each pass.

    raw: the sampled rows and residues. chain: the whole chain, if rows are clustered before the crop; None clusters the
    rows of `raw`.
    Masks and codes are uint8, the other arrays float32 (`batch.to_tensors` converts them on the device).
    """
    chain = chain or WholeChain(raw.msa, raw.profile, 0)
    depth, length = raw.msa.shape
    centres, masked, bert_mask, extra, clusters = _draw_clusters(chain, config, seed, key, passes)
    crop = slice(chain.start, chain.start + length)
    masked, bert_mask = masked[:, :, crop], bert_mask[:, :, crop]
    features: Arrays = {
        "msa_feat": np.zeros((*masked.shape, 49), np.float32),
        "msa_mask": np.ones(masked.shape, np.uint8),
        "bert_mask": bert_mask.astype(np.uint8),
        "true_msa": raw.msa[centres],
    }
    # An extra MSA without rows gets a masked row.
    shape = passes, max(extra.shape[1], 1), length
    features |= {name: np.zeros(shape, np.uint8) for name in ("extra_msa", "extra_msa_mask", "extra_has_deletion")}
    features["extra_deletion_value"] = np.zeros(shape, np.float32)
    features["extra_msa"][:, : extra.shape[1]] = raw.msa[extra]
    features["extra_msa_mask"][:, : extra.shape[1]] = 1
    # The cells with deletions, in sparse form. `flatnonzero` is ten times as fast on booleans.
    deleted_row, deleted_column = np.divmod(np.flatnonzero(raw.deletions != 0), length)
    deletions = raw.deletions[deleted_row, deleted_column]
    count = centres.shape[1]
    for index, (feat, cluster) in enumerate(zip(features["msa_feat"], clusters)):
        rows = raw.msa.copy()
        rows[centres[index]] = masked[index]
        # The official code adds 1e-6, too.
        members = (np.bincount(cluster, minlength=count)[:count] + 1e-6).astype(np.float32)
        write_codes(feat, masked[index], rows, cluster, members)
        for selected_rows, has_deletion, value in (
            (centres[index], feat[..., 23], feat[..., 24]),
            (extra[index], features["extra_has_deletion"][index], features["extra_deletion_value"][index]),
        ):
            number = np.full(depth, -1)
            number[selected_rows] = np.arange(len(selected_rows))
            is_chosen = number[deleted_row] >= 0
            cells = number[deleted_row[is_chosen]], deleted_column[is_chosen]
            has_deletion[cells], value[cells] = 1, deletion_value(deletions[is_chosen])
        # Mean number of deletions in each column of each cluster.
        cell = cluster[deleted_row] * length + deleted_column
        total = np.bincount(cell, deletions, minlength=count * length)[: count * length]
        mean = total.reshape(count, length) / members[:, None]
        row, column = np.nonzero(mean)
        feat[row, column, 48] = deletion_value(mean[row, column])
    return features


def query_weight(
    raw: RawExample, config: SampleConfig, seed: int, key: tuple[str | int, ...], passes: int = 1
) -> tuple[np.ndarray, bool]:
    """Compute the weight of the query in the profile of its own cluster, float32 [passes].

    Also returns whether the query is the only row of the extra MSA. The arguments are those of `msa_features`.
    """
    *_, extra, clusters = _draw_clusters(WholeChain(raw.msa, raw.profile, 0), config, seed, key, passes)
    members = ((clusters == 0).sum(1) + 1e-6).astype(np.float32)
    return 1 / members, extra.shape[1] == 1 and not extra.any()


def _draw_clusters(
    chain: WholeChain, config: SampleConfig, seed: int, key: tuple[str | int, ...], passes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Draw the cluster centres and the extra rows of P passes, mask the centres, and assign all rows to clusters.

    Returns the centres, int64 [P, S], ascending with row 0, the query; the masked centres, codes 0-22, uint8 [P, S, L];
    their masked positions, which the model must restore, bool [P, S, L]; the extra rows, int64 [P, E], ascending; and
    the clusters of all rows, int64 [P, R], S for none.
    """
    depth, samples = len(chain.msa), []
    for index in range(passes):
        centres = np.arange(depth)
        if depth > config.max_msa:
            centres = sample_with_query(centres, config.max_msa, keyed_rng(seed, *key, index, "clusters"))
        rng = keyed_rng(seed, *key, index, "mask")
        masked, bert_mask = mask_msa(chain.msa[centres], chain.profile, config, rng)
        extra = all_but(centres, depth)
        if len(extra) > config.max_extra:
            rng = keyed_rng(seed, *key, index, "extra")
            extra = np.sort(rng.choice(extra, config.max_extra, replace=False))
        elif not len(extra) and config.empty_extra == "query":
            extra = np.zeros(1, np.int64)
        samples.append((centres, masked, bert_mask, extra))
    all_centres, all_masked, all_bert_masks, all_extra = (np.stack(arrays) for arrays in zip(*samples))
    count = all_centres.shape[1]
    # Without other rows, every row is a centre.
    clusters = nearest_cluster(chain.msa, all_masked) if count < depth else np.zeros((passes, depth), np.int64)
    # A row of gaps agrees with no centre and would join the query's cluster by default. Stored alignments have no such
    # rows over a whole chain, but a crop may have many.
    clusters[:, (chain.msa == GAP).all(1)] = count
    np.put_along_axis(clusters, all_centres, np.arange(count), 1)
    return all_centres, all_masked, all_bert_masks, all_extra, clusters


def mask_msa(
    msa: np.ndarray, profile: np.ndarray, config: SampleConfig, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Apply BERT masking (Supp. 1.2.7, step 2). Returns the masked rows, uint8 [S, N], and the masked positions, bool.

    msa: uint8 [S, N]. profile: [N, 22], frequencies of residue types, X and gap in each column.
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
    """Assign each row to the centre that agrees in most positions, the first of equals: int64 [P, R].

    rows: uint8 [R, L], codes 0-21. centres: uint8 [P, S, L], codes 0-22, for P passes. Gaps and masked positions never
    agree (Supp. 1.2.7, step 3).

    A table lists for each column and code the centres that have this code there. The agreements of a row are the sum of
    its entries in the table, which is a product with one-hot rows without the zeros. The result is exact: a float32
    holds three counts of eight bits, and columns are processed in spans in which no count overflows. Passes share the
    codes of the rows. Passes are processed together if their tables fit into `TABLE_BYTES`. A table has 20 MB for 5,000
    residues and 128 centres, so the passes of a long chain are processed one by one.
    """
    passes, depth, length = centres.shape
    groups = ceil(depth / PACKED_COUNTS)
    passes_per_group = max(TABLE_BYTES // (4 * length * MSA_CLASSES * groups), 1)
    width = ceil(length / ceil(length / MAX_COUNT))
    spans = [slice(start, start + width) for start in range(0, length, width)]
    offsets = np.arange(width, dtype=np.int32) * MSA_CLASSES
    nearest = np.empty((passes, len(rows)), np.int64)
    for first in range(0, passes, passes_per_group):
        group = centres[first : first + passes_per_group]
        tables = [[_tabulate_agreement(pass_centres[:, span]) for pass_centres in group] for span in spans]
        for start in range(0, len(rows), BLOCK_ROWS):
            block = rows[start : start + BLOCK_ROWS]
            counts = np.zeros((len(group), len(block), PACKED_COUNTS, groups), np.int32)
            for span, span_tables in zip(spans, tables):
                codes = block[:, span]
                entries = torch.from_numpy(codes + offsets[: codes.shape[1]])
                for table, count in zip(span_tables, counts):
                    sums = embedding_bag(entries, table, mode="sum").int().numpy()
                    for i in range(PACKED_COUNTS):
                        count[:, i] += (sums >> (COUNT_BITS * i)) & MAX_COUNT
            # The counts that fill up the last group are 0 and come last, so they are never the first of equals.
            best = counts.reshape(len(group), len(block), -1).argmax(-1)
            nearest[first : first + passes_per_group, start : start + BLOCK_ROWS] = best
    return nearest


def _tabulate_agreement(centres: np.ndarray) -> torch.Tensor:
    """Tabulate the centres that have a code in a column, except gaps: float32 [N * 23, G] with G = S / 3 groups.

    Group g packs the counts of centres g, G + g and 2 G + g, multiplied by 1, 256 and 256².
    """
    depth, length = centres.shape
    groups = ceil(depth / PACKED_COUNTS)
    table = np.zeros((length, MSA_CLASSES, groups), np.float32)
    for i in range(PACKED_COUNTS):
        members = centres[i * groups : (i + 1) * groups]
        table[np.arange(length), members, np.arange(len(members))[:, None]] += 2 ** (COUNT_BITS * i)
    table[:, GAP] = 0
    return torch.from_numpy(table.reshape(-1, groups))


def write_codes(
    feat: np.ndarray, masked: np.ndarray, rows: np.ndarray, cluster: np.ndarray, members: np.ndarray
) -> None:
    """Write the one-hot codes of each centre, and the profile of its cluster, to `feat`, float32 [S, N, 49].

    masked: uint8 [S, N], the masked centres. rows: uint8 [R, N], codes 0-22, including the masked centres. cluster:
    int64 [R], S for none. members: float32 [S], the divisor of the counts.
    """
    count, length = masked.shape
    feat[np.arange(count)[:, None], np.arange(length), masked] = 1
    order = np.argsort(cluster, kind="stable")
    bounds = np.searchsorted(cluster[order], np.arange(count + 1)).tolist()
    rows, column = rows[order], np.arange(0, length * MSA_CLASSES, MSA_CLASSES)
    # The counts of a single cluster fit into the CPU's cache.
    for features, divisor, (start, stop) in zip(feat, members, pairwise(bounds)):
        counts = np.bincount((rows[start:stop] + column).ravel(), minlength=length * MSA_CLASSES)
        counts, profile = counts.reshape(length, MSA_CLASSES), features[:, PROFILE]
        np.divide(counts, divisor, out=profile, dtype=np.float32, casting="same_kind")


def deletion_value(count: np.ndarray) -> np.ndarray:
    """Map the number of deleted residues d >= 0 to [0, 1), float32: 2/pi arctan(d / 3) (Supp. table 1)."""
    return np.arctan(count.astype(np.float32) / 3) * np.float32(2 / np.pi)
