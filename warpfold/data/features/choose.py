"""Choose which residues, alignment rows and templates of an example are used, from its sizes (Supp. 1.2.6, 1.2.8).

So only what is chosen has to be read.  Every draw is keyed: a pure function of (seed, key of the draw, purpose), which
depends on no other draw, process, thread or order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from warpfold.data.example.raw_example import CONFIDENT, MOST_STORED
from warpfold.keyed import keyed_rng

RUN = 64  # rows left out or kept together by `thin_runs`
# Milliseconds that one core of 2024 takes (fitted to benchmarks/features.py): per example; per cell of the alignment
# that is read; and in each pass per cell of the clusters, per cell of the extra MSA, per cell of the alignment that is
# compared with one centre, and per cell that is counted.
COST_EXAMPLE, COST_READ = 2.1, 3e-6
COST_CENTRE, COST_EXTRA, COST_COMPARE, COST_COUNT = 7e-5, 4.5e-6, 2.6e-8, 2.3e-6
COST_PAIR = 9e-4  # per row of an alignment among which pairs are looked for (measured likewise)


LARGEST_SIZE = 1_000_000  # residues or rows; the largest proteins have some 35,000 residues


@dataclass(frozen=True)
class SampleConfig:
    """How examples are drawn.  The defaults are AlphaFold2's at inference; for training `crop`, `max_msa` and
    `max_extra` are 256, 128 and 1024 at first, 384, 512 and 5120 in fine-tuning (Supp. table 4)."""

    crop: int | None = None  # residues of a training crop; None: whole chains (Supp. 1.2.8)
    max_msa: int = 512  # cluster centres, the query included (N_clust)
    max_extra: int = 5120  # rows of the extra MSA (N_extra_seq)
    max_templates: int = 4  # 0 for a model without template parts: then none are read (Supp. 1.2.3)
    # Where a row is compared with the cluster centres: over the whole "chain", as in the paper, where clusters are made
    # before the crop (Supp. 1.2.7, 1.2.8), or only in the "crop", which is faster for longer chains.
    clustering: Literal["chain", "crop"] = "chain"
    # 0: every row counts, as in the paper.  Otherwise the most that a training pass may cost (`predicted_cost`): of an
    # alignment that costs more, fewer rows are used, each with the same probability, but never fewer than `max_msa` +
    # `max_extra`.
    max_cost: float = 0.0
    # Which rows `max_cost` leaves out: single "rows", or "runs" of neighbours, which are related.
    thin: Literal["rows", "runs"] = "rows"
    resample_msa: bool = True  # each pass through the trunk sees its own sample (Supp. 1.10, 1.11.2)
    masked_fraction: float = 0.15  # Supp. 1.2.7, step 2
    mask_uniform: float = 0.1  # of the masked: a random amino acid
    mask_profile: float = 0.1  # ... one drawn from the alignment's profile
    mask_same: float = 0.1  # ... left as it is; the rest becomes the mask token
    block_fraction: float = 0.3  # Supp. Algorithm 1: rows per deleted block
    blocks: int = 5
    randomize_num_blocks: bool = False
    # Of assemblies alone: the alignment rows of a chain that are read, at most, of which half may be pairs
    # (`MSA_CROP_SIZE` of the official data/pipeline_multimer.py); whether rows of different chains are paired by
    # species; the share of training crops that are spatial, the others being contiguous (AlphaFold-Multimer, sec. 7.2);
    # and how near the CA of another chain must be, in angstrom, for a spatial crop to be drawn around a residue.
    chain_rows: int = 2048
    pairing: bool = True
    spatial_fraction: float = 0.5
    interface_distance: float = 10.0
    unclamped_fraction: float = 0.1  # of the examples, whose backbone FAPE is not clamped (Supp. 1.11.5)
    # What replaces an extra MSA that has no row left.  AlphaFold2: one masked row, whose outer product is its bias
    # divided by 0.001; on shallow alignments the gradient of that bias drowns all others.
    empty_extra: Literal["masked", "query"] = "masked"
    # Of predictions (`warpfold pack --predicted`): residues of a lower pLDDT are masked in all losses of the structure;
    # and the alignment rows among which a training pass draws, a uniform sample, 0 for all (Supp. 1.3; single chains).
    min_confidence: float = CONFIDENT
    predicted_rows: int = 1000
    pad: bool = False  # pad residues to `crop` and rows to `max_msa` and `max_extra` (fixed shapes)

    def __post_init__(self) -> None:
        for name in ("crop", "max_msa", "chain_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} = {value}: must be at least 1")
            if value is not None and value > LARGEST_SIZE:
                raise ValueError(f"{name} = {value}: must be at most {LARGEST_SIZE:,}")
        unsigned = "max_extra", "max_templates", "max_cost", "blocks", "interface_distance", "min_confidence"
        for name in (*unsigned, "predicted_rows"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must not be negative")
        for name in ("masked_fraction", "block_fraction", "spatial_fraction", "unclamped_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must lie between 0 and 1")
        kinds = (self.mask_uniform, self.mask_profile, self.mask_same)
        if min(kinds) < 0 or sum(kinds) > 1:
            raise ValueError("mask_uniform, mask_profile and mask_same must not be negative, nor exceed 1 together")


@dataclass(frozen=True)
class Selection:
    """The part of an example that is used, and whether its backbone FAPE is clamped."""

    start: int  # residues [start, stop)
    stop: int
    rows: np.ndarray  # of the alignment: int64, ascending, row 0 first
    templates: np.ndarray  # int64, ascending
    clamped: bool


def select(
    length: int,
    depth: int,
    config: SampleConfig,
    seed: int,
    key: tuple[str | int, ...],
    train: bool,
    templates: int = 0,
    predicted: bool = False,
) -> Selection:
    """Choose residues, rows and templates of an example from its sizes alone.

    length: residues; depth: alignment rows, including the query; templates: how many it has; predicted: whether its
    structure is a prediction.  Training crops, deletes blocks of rows (Algorithm 1) and keeps within `max_cost`;
    outside of training every row is used.
    """
    if not train:
        best = choose_templates(templates, config.max_templates, None)
        return Selection(0, length, np.arange(depth), best, clamped=True)
    clamped = bool(keyed_rng(seed, *key, "clamp").random() >= config.unclamped_fraction)
    size = min(config.crop or length, length)
    start = crop_start(length, size, clamped, keyed_rng(seed, *key, "crop"))
    rows = np.arange(depth)
    if predicted and 0 < config.predicted_rows < depth:
        rows = with_query(rows, config.predicted_rows, keyed_rng(seed, *key, "predicted"))
    rows = rows[delete_blocks(len(rows), config, keyed_rng(seed, *key, "blocks"))]
    most = row_budget(length, config)
    if most is not None and len(rows) > most:
        thin = thin_runs if config.thin == "runs" else with_query
        rows = thin(rows, most, keyed_rng(seed, *key, "budget"))
    chosen = choose_templates(templates, config.max_templates, keyed_rng(seed, *key, "templates"))
    return Selection(start, start + size, rows, chosen, clamped)


def choose_templates(count: int, most: int, rng: np.random.Generator | None) -> np.ndarray:
    """Choose among `count` templates, best first: int64 [K], ascending, K <= `most`.

    Training (with `rng`): min(uniform[0, n], most) random ones of the best n = 20 (Supp. 1.2.3), or fewer, so that the
    model learns to do without.  Inference (`rng` None): the best.
    """
    if rng is None:
        return np.arange(min(count, most))
    count = min(count, MOST_STORED)
    size = min(int(rng.integers(0, count + 1)), most)
    return np.sort(rng.choice(count, size, replace=False)).astype(np.int64)


def crop_start(length: int, size: int, clamped: bool, rng: np.random.Generator) -> int:
    """Draw where a crop of `size` residues starts, from 0: uniform if FAPE is clamped, else towards the N terminus.

    The latter is x ~ uniform[0, n], start ~ uniform[0, n - x] with n = length - size (Supp. 1.2.8).
    """
    spare = length - size
    if not clamped:
        spare -= int(rng.integers(0, spare + 1))
    return int(rng.integers(0, spare + 1))


def delete_blocks(depth: int, config: SampleConfig, rng: np.random.Generator) -> np.ndarray:
    """Return the rows that MSA block deletion keeps (Supp. Algorithm 1), int64, ascending; the query always stays.

    Blocks are contiguous and may overlap.  Rows are in the order of the search, so neighbours are related, and a block
    removes a whole branch of the family.
    """
    size = int(depth * config.block_fraction)
    count = int(rng.integers(0, config.blocks + 1)) if config.randomize_num_blocks else config.blocks
    kept = np.ones(depth, bool)
    for start in rng.integers(0, depth, count):
        kept[start : start + size] = False
    kept[0] = True
    return np.flatnonzero(kept)


def with_query(rows: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw `count` of `rows`, ascending: the first, and a uniform sample of the others without replacement."""
    return np.concatenate([rows[:1], np.sort(rng.choice(rows[1:], count - 1, replace=False))])


def thin_runs(rows: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw at most `count` of `rows`, ascending: the first, and runs of about `RUN` neighbours among the others.

    The others form a ring, which is rotated at random and cut into runs of equal length (to within one row); a uniform
    sample of the runs stays.  So every row stays with the same probability, and neighbours mostly stay together.
    """
    ring = np.roll(rows[1:], int(rng.integers(len(rows) - 1)))
    runs = np.array_split(ring, -(-len(ring) // min(RUN, max(count - 1, 1))))
    kept = rng.choice(len(runs), (count - 1) // len(runs[0]), replace=False)  # the first runs are the longest
    return np.concatenate([rows[:1], np.sort(np.concatenate([ring[:0], *(runs[index] for index in kept)]))])


def row_budget(length: int, config: SampleConfig) -> int | None:
    """Return the number of rows of a chain of `length` residues that fit into `max_cost`, None if all do.

    Never fewer than `max_msa` + `max_extra`.
    """
    if not config.max_cost:
        return None
    least = config.max_msa + config.max_extra
    cost, one_more = (_cost(length, rows, rows, 1, config) for rows in (least, least + 1))
    return least + max(int((config.max_cost - cost) / (one_more - cost)), 0)


def predicted_cost(length: int, depth: int, config: SampleConfig, passes: int = 1, train: bool = True) -> float:
    """Return the cost of making one example, from its sizes: roughly milliseconds on one core of 2024.

    It is a formula, fitted to measurements (docs/explanation/architecture.md), and so the same on every machine.
    """
    if not train:
        return _cost(length, depth, depth, passes, replace(config, crop=None))
    kept = expected_rows(depth, config)
    used = min(kept, row_budget(length, config) or kept)
    return _cost(length, kept, used, passes, config)  # rows left out lie in the same blobs as those used


def predicted_assembly_cost(entities: Sequence[tuple[int, int]], config: SampleConfig) -> float:
    """Return the cost of making one training example of an assembly, in the same measure as `predicted_cost`.

    entities: of each, the residues of all its copies, and the rows of its alignment.
    """
    length = sum(residues for residues, _ in entities)
    crop = min(config.crop or length, length)
    read = sum(crop * residues / length * rows for residues, rows in entities)
    rows = sum(min(rows, config.chain_rows) for _, rows in entities)
    paired = sum(rows for _, rows in entities) if config.pairing and len(entities) > 1 else 0
    centres = min(rows, config.max_msa)
    written = crop * (centres * COST_CENTRE + min(rows - centres, config.max_extra) * COST_EXTRA)
    return COST_EXAMPLE + read * COST_READ + paired * COST_PAIR + crop * rows * COST_COUNT + written


def _cost(length: int, read: float, rows: float, passes: int, config: SampleConfig) -> float:
    """Return the cost of an example of a chain of `length` residues, with `read` rows read and `rows` used."""
    residues = min(config.crop or length, length)
    columns = length if config.clustering == "chain" else residues
    centres = min(rows, config.max_msa)
    extra = min(rows - centres, config.max_extra)
    written = residues * (centres * COST_CENTRE + extra * COST_EXTRA + rows * COST_COUNT)
    compared = columns * rows * centres * COST_COMPARE
    return COST_EXAMPLE + columns * read * COST_READ + passes * (written + compared)


def expected_rows(depth: int, config: SampleConfig) -> float:
    """Return the mean number of `depth` rows that `delete_blocks` keeps.

    A block takes row r (from 0) if it starts at one of min(r + 1, size) places out of `depth`.
    """
    share = int(depth * config.block_fraction) / depth
    counts = range(config.blocks + 1) if config.randomize_num_blocks else (config.blocks,)
    kept = [(1 - share) ** (n + 1) + (1 - (1 - share) ** (n + 1)) / (n + 1) for n in counts]
    return max(depth * sum(kept) / len(kept), 1.0)
