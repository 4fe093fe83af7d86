"""Sample the residues, alignment rows and templates of an example from its sizes (Supp. 1.2.6, 1.2.8).

Only the sampled data has to be read. All random numbers are keyed: each draw is a pure function of (seed, key, purpose)
and does not depend on other draws, processes, threads or their order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from warpfold.data.example.raw_example import MAX_TEMPLATES, MIN_CONFIDENCE
from warpfold.keyed import keyed_rng

# Number of neighbouring rows that `thin_runs` keeps or drops together.
RUN_ROWS = 64
# Milliseconds on one core of 2024 (fitted to benchmarks/features.py): per example, and per alignment cell that is read.
COST_EXAMPLE, COST_READ = 2.1, 3e-6
# Per pass: for each cell of the cluster centres, for each cell of the extra MSA, for each cell that is compared with a
# centre, and for each cell that is counted.
COST_CENTRE, COST_EXTRA, COST_COMPARE, COST_COUNT = 7e-5, 4.5e-6, 2.6e-8, 2.3e-6
# Per alignment row that takes part in pairing.
COST_PAIR = 9e-4

# Largest number of residues or rows in the settings. The largest proteins have about 35,000 residues.
MAX_SIZE = 1_000_000


@dataclass(frozen=True)
class SampleConfig:
    """Sampling settings of examples. The defaults are those of AlphaFold2 at inference.

    In training, `crop`, `max_msa` and `max_extra` are 256, 128 and 1024 at first, and 384, 512 and 5120 in fine-tuning
    (Supp. table 4).
    """

    # Residues of a training crop; None uses whole chains (Supp. 1.2.8).
    crop: int | None = None
    # Number of cluster centres, including the query (N_clust).
    max_msa: int = 512
    # Number of rows of the extra MSA (N_extra_seq).
    max_extra: int = 5120
    # Number of templates (Supp. 1.2.3). With 0, for a model without template modules, none are read.
    max_templates: int = 4
    # Columns in which rows are compared with the cluster centres: those of the whole "chain", as in the paper, which
    # clusters before the crop (Supp. 1.2.7, 1.2.8), or of the "crop", which is faster for long chains.
    clustering: Literal["chain", "crop"] = "chain"
    # Largest cost of a training pass (`predicted_cost`); 0 uses every row, as in the paper. An alignment that costs
    # more is thinned to a uniform sample of its rows, but never below `max_msa` + `max_extra` rows.
    max_cost: float = 0.0
    # Unit of thinning by `max_cost`: single "rows", or "runs" of neighbouring rows, which are related.
    thin: Literal["rows", "runs"] = "rows"
    # Each pass through the trunk gets its own MSA sample (Supp. 1.10, 1.11.2).
    resample_msa: bool = True
    # Fraction of masked positions (Supp. 1.2.7, step 2).
    masked_fraction: float = 0.15
    # Fractions of the masked positions that become a random amino acid, become a sample of the alignment's profile, or
    # stay unchanged. The others become the mask token.
    mask_uniform: float = 0.1
    mask_profile: float = 0.1
    mask_same: float = 0.1
    # MSA block deletion (Supp. Algorithm 1): fraction of the rows per block, and number of blocks.
    block_fraction: float = 0.3
    blocks: int = 5
    randomize_num_blocks: bool = False
    # The next four settings apply only to assemblies. Largest number of alignment rows per chain, of which half may be
    # pairs (`MSA_CROP_SIZE` of the official data/pipeline_multimer.py).
    chain_rows: int = 2048
    # Pair rows of different chains by species.
    pairing: bool = True
    # Fraction of training crops that are spatial; the others are contiguous (AlphaFold-Multimer, sec. 7.2).
    spatial_fraction: float = 0.5
    # A spatial crop is centred on a residue with a CA of another chain within this distance in angstrom.
    interface_distance: float = 10.0
    # Fraction of examples for which the backbone FAPE is not clamped (Supp. 1.11.5).
    unclamped_fraction: float = 0.1
    # Replacement for an extra MSA without rows. AlphaFold2 uses a masked row, whose outer product is the bias divided
    # by 0.001. On shallow alignments, the gradient of this bias dominates all others.
    empty_extra: Literal["masked", "query"] = "masked"
    # The next two settings apply only to predictions (`warpfold pack --predicted`). Residues with a lower pLDDT are
    # masked in all structure losses.
    min_confidence: float = MIN_CONFIDENCE
    # Size of the uniform sample of alignment rows from which a training pass draws, for single chains (Supp. 1.3); 0
    # uses all rows.
    predicted_rows: int = 1000
    # Pad residues to `crop` and rows to `max_msa` and `max_extra`, for fixed shapes.
    pad: bool = False

    def __post_init__(self) -> None:
        for name in ("crop", "max_msa", "chain_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} = {value}: must be at least 1")
            if value is not None and value > MAX_SIZE:
                raise ValueError(f"{name} = {value}: must be at most {MAX_SIZE:,}")
        unsigned = "max_extra", "max_templates", "max_cost", "blocks", "interface_distance", "min_confidence"
        for name in (*unsigned, "predicted_rows"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must not be negative")
        for name in ("masked_fraction", "block_fraction", "spatial_fraction", "unclamped_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must lie between 0 and 1")
        kinds = (self.mask_uniform, self.mask_profile, self.mask_same)
        if min(kinds) < 0 or sum(kinds) > 1:
            raise ValueError("mask_uniform, mask_profile and mask_same must not be negative, nor add up to more than 1")


@dataclass(frozen=True)
class Selection:
    """The sampled residues [start, stop), alignment rows and templates of an example.

    rows: ascending, with row 0. templates: ascending. clamped: whether the backbone FAPE is clamped.
    """

    start: int
    stop: int
    rows: np.ndarray  # int64
    templates: np.ndarray  # int64
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
    """Sample residues, rows and templates of an example from its sizes.

    length: number of residues. depth: number of alignment rows, including the query. templates: number of templates.
    predicted: whether the structure is a prediction. In training, the example is cropped, blocks of rows are deleted
    (Algorithm 1), and rows are thinned to `max_cost`. Otherwise all residues and rows are used.
    """
    if not train:
        best = choose_templates(templates, config.max_templates, None)
        return Selection(0, length, np.arange(depth), best, clamped=True)
    clamped = bool(keyed_rng(seed, *key, "clamp").random() >= config.unclamped_fraction)
    size = min(config.crop or length, length)
    start = crop_start(length, size, clamped, keyed_rng(seed, *key, "crop"))
    rows = np.arange(depth)
    if predicted and 0 < config.predicted_rows < depth:
        rows = sample_with_query(rows, config.predicted_rows, keyed_rng(seed, *key, "predicted"))
    rows = rows[delete_blocks(len(rows), config, keyed_rng(seed, *key, "blocks"))]
    budget = row_budget(length, config)
    if budget is not None and len(rows) > budget:
        thin = thin_runs if config.thin == "runs" else sample_with_query
        rows = thin(rows, budget, keyed_rng(seed, *key, "budget"))
    selected_templates = choose_templates(templates, config.max_templates, keyed_rng(seed, *key, "templates"))
    return Selection(start, start + size, rows, selected_templates, clamped)


def choose_templates(count: int, most: int, rng: np.random.Generator | None) -> np.ndarray:
    """Choose among `count` templates, which are sorted best first: int64 [K], ascending, K <= `most`.

    In training (with `rng`), min(uniform[0, n], most) random templates of the best n = 20 are drawn (Supp. 1.2.3), so
    that the model also learns without templates. At inference (`rng` None), the best are chosen.
    """
    if rng is None:
        return np.arange(min(count, most))
    count = min(count, MAX_TEMPLATES)
    size = min(int(rng.integers(0, count + 1)), most)
    return np.sort(rng.choice(count, size, replace=False)).astype(np.int64)


def crop_start(length: int, size: int, clamped: bool, rng: np.random.Generator) -> int:
    """Draw the first residue of a crop of `size` residues (Supp. 1.2.8), with n = length - size.

    If FAPE is clamped, start ~ uniform[0, n]. Otherwise start ~ uniform[0, n - x] with x ~ uniform[0, n], which prefers
    the N terminus.
    """
    spare = length - size
    if not clamped:
        spare -= int(rng.integers(0, spare + 1))
    return int(rng.integers(0, spare + 1))


def delete_blocks(depth: int, config: SampleConfig, rng: np.random.Generator) -> np.ndarray:
    """Apply MSA block deletion (Supp. Algorithm 1); returns the remaining rows, int64, ascending, with the query.

    Blocks are contiguous and may overlap. Rows are in the order of the search, so neighbours are related, and a block
    removes a branch of the family.
    """
    size = int(depth * config.block_fraction)
    count = int(rng.integers(0, config.blocks + 1)) if config.randomize_num_blocks else config.blocks
    is_kept = np.ones(depth, bool)
    for start in rng.integers(0, depth, count):
        is_kept[start : start + size] = False
    is_kept[0] = True
    return np.flatnonzero(is_kept)


def sample_with_query(rows: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw `count` of `rows`, ascending: the first row, and a uniform sample of the others without replacement."""
    return np.concatenate([rows[:1], np.sort(rng.choice(rows[1:], count - 1, replace=False))])


def all_but(rows: np.ndarray, depth: int) -> np.ndarray:
    """Return the indices below `depth` that are not in `rows`: int64, ascending."""
    is_other = np.ones(depth, bool)
    is_other[rows] = False
    return np.flatnonzero(is_other)


def thin_runs(rows: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw at most `count` of `rows`, ascending: the first row, and runs of about `RUN_ROWS` neighbours of the others.

    The other rows form a ring, which is rotated at random and split into runs of equal length (within one row). A
    uniform sample of the runs is kept. Every row is kept with the same probability, and most neighbours stay together.
    """
    ring = np.roll(rows[1:], int(rng.integers(len(rows) - 1)))
    runs = np.array_split(ring, -(-len(ring) // min(RUN_ROWS, max(count - 1, 1))))
    # The first runs are the longest.
    kept_runs = rng.choice(len(runs), (count - 1) // len(runs[0]), replace=False)
    return np.concatenate([rows[:1], np.sort(np.concatenate([ring[:0], *(runs[index] for index in kept_runs)]))])


def row_budget(length: int, config: SampleConfig) -> int | None:
    """Compute the number of rows of a chain of `length` residues that fit into `max_cost`; None without a limit.

    The result is never below `max_msa` + `max_extra`.
    """
    if not config.max_cost:
        return None
    least = config.max_msa + config.max_extra
    cost, one_more = (_predict_cost(length, rows, rows, 1, config) for rows in (least, least + 1))
    return least + max(int((config.max_cost - cost) / (one_more - cost)), 0)


def predicted_cost(length: int, depth: int, config: SampleConfig, passes: int = 1, train: bool = True) -> float:
    """Predict the cost of computing the features of an example from its sizes, in milliseconds on one core of 2024.

    The formula is fitted to measurements (docs/explanation/architecture.md), so the result is the same on every
    machine.
    """
    if not train:
        return _predict_cost(length, depth, depth, passes, replace(config, crop=None))
    kept_rows = expected_rows(depth, config)
    used = min(kept_rows, row_budget(length, config) or kept_rows)
    # Unused rows are read too, because they are in the same blobs.
    return _predict_cost(length, kept_rows, used, passes, config)


def predicted_assembly_cost(entities: Sequence[tuple[int, int]], config: SampleConfig) -> float:
    """Predict the cost of a training example of an assembly, in the unit of `predicted_cost`.

    entities: for each entity, the number of residues of all copies, and the number of alignment rows.
    """
    length = sum(residues for residues, _ in entities)
    crop = min(config.crop or length, length)
    read = sum(crop * residues / length * rows for residues, rows in entities)
    rows = sum(min(rows, config.chain_rows) for _, rows in entities)
    paired = sum(rows for _, rows in entities) if config.pairing and len(entities) > 1 else 0
    centres = min(rows, config.max_msa)
    written = crop * (centres * COST_CENTRE + min(rows - centres, config.max_extra) * COST_EXTRA)
    return COST_EXAMPLE + read * COST_READ + paired * COST_PAIR + crop * rows * COST_COUNT + written


def _predict_cost(length: int, read: float, rows: float, passes: int, config: SampleConfig) -> float:
    """Predict the cost of an example of a chain of `length` residues, of which `read` rows are read and `rows` used."""
    residues = min(config.crop or length, length)
    columns = length if config.clustering == "chain" else residues
    centres = min(rows, config.max_msa)
    extra = min(rows - centres, config.max_extra)
    written = residues * (centres * COST_CENTRE + extra * COST_EXTRA + rows * COST_COUNT)
    compared = columns * rows * centres * COST_COMPARE
    return COST_EXAMPLE + columns * read * COST_READ + passes * (written + compared)


def expected_rows(depth: int, config: SampleConfig) -> float:
    """Compute the expected number of `depth` rows that `delete_blocks` keeps.

    A block deletes row r (from 0) if it starts at one of min(r + 1, size) of the `depth` rows.
    """
    share = int(depth * config.block_fraction) / depth
    counts = range(config.blocks + 1) if config.randomize_num_blocks else (config.blocks,)
    kept_shares = [(1 - share) ** (n + 1) + (1 - (1 - share) ** (n + 1)) / (n + 1) for n in counts]
    return max(depth * sum(kept_shares) / len(kept_shares), 1.0)
