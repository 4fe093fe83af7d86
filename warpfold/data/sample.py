"""From a raw example to what the model sees: block deletion, crop, MSA clustering, BERT masking (Supp. 1.2.6-1.2.9).

Sample first, then transform: `select` chooses residues and alignment rows from sizes alone, and only what it chose is
read or computed.  All randomness is keyed, one stream per purpose, so an example's features depend on (seed, key) and
on nothing else: not on the process that makes them, nor on how many draws another purpose takes.
"""

import hashlib
from dataclasses import dataclass
from typing import Literal

import numpy as np

from warpfold.batch import FEATURES, Arrays
from warpfold.data.features import RawExample, add_labels, atom_masks
from warpfold.geometry.residue import GAP, MASK

MSA_CLASSES = 23  # 20 residue types, X, gap, mask


@dataclass(frozen=True)
class SampleConfig:
    """How examples are drawn.  The defaults are AlphaFold2's at inference; for training `crop`, `max_msa` and
    `max_extra` are 256, 128 and 1024 at first, 384, 512 and 5120 in fine-tuning (Supp. table 4)."""

    crop: int | None = None  # residues of a training crop; None: whole chains (Supp. 1.2.8)
    max_msa: int = 512  # cluster centres, the query included (N_clust)
    max_extra: int = 5120  # rows of the extra MSA (N_extra_seq)
    max_rows: int = 16384  # row budget: a deeper alignment is sampled down, uniformly, before anything is computed
    resample_msa: bool = True  # each pass through the trunk sees its own sample (Supp. 1.10, 1.11.2)
    masked_fraction: float = 0.15  # Supp. 1.2.7, step 2
    mask_uniform: float = 0.1  # of the masked: a random amino acid
    mask_profile: float = 0.1  # ... one drawn from the alignment's profile
    mask_same: float = 0.1  # ... left as it is; the rest becomes the mask token
    block_fraction: float = 0.3  # Supp. Algorithm 1: rows per deleted block
    blocks: int = 5
    randomize_num_blocks: bool = False
    unclamped_fraction: float = 0.1  # of the examples, whose backbone FAPE is not clamped (Supp. 1.11.5)
    # What stands for an extra MSA that has no row left.  AlphaFold2: one masked row, whose outer product is its bias
    # divided by 0.001; on shallow alignments the gradient of that bias drowns all others (docs/decisions/0007).
    empty_extra: Literal["masked", "query"] = "masked"
    pad: bool = False  # pad residues to `crop` and rows to `max_msa` and `max_extra` (fixed shapes)

    def __post_init__(self) -> None:
        for name in ("crop", "max_msa", "max_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} = {value}: must be at least 1")
        if self.max_extra < 0 or self.blocks < 0:
            raise ValueError("max_extra and blocks must not be negative")
        for name in ("masked_fraction", "block_fraction", "unclamped_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must lie between 0 and 1")
        kinds = (self.mask_uniform, self.mask_profile, self.mask_same)
        if min(kinds) < 0 or sum(kinds) > 1:
            raise ValueError("mask_uniform, mask_profile and mask_same must not be negative, nor exceed 1 together")


@dataclass(frozen=True)
class Selection:
    """What of an example is used: residues [start, stop) and the alignment's `rows` (int64, ascending, row 0 first)."""

    start: int
    stop: int
    rows: np.ndarray
    clamped: bool


def keyed_rng(seed: int, *parts: str | int) -> np.random.Generator:
    """A generator of its own for each (seed, parts): a counter-based Philox, its key a hash of them.

    Same key, same numbers, in every process; different keys are independent.
    """
    text = repr((int(seed), *(part if isinstance(part, str) else int(part) for part in parts)))
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def select(
    length: int, depth: int, config: SampleConfig, seed: int, key: tuple[str | int, ...], train: bool
) -> Selection:
    """Residues and rows of an example, from its sizes alone (so that nothing else need be decompressed).

    length: residues; depth: alignment rows, the query included.  Training deletes blocks of rows (Algorithm 1) and
    crops; both modes keep within `max_rows`, by a uniform sample (never the first rows: they are the most alike).
    """
    rows = np.arange(depth)
    clamped = True
    start, stop = 0, length
    if train:
        rows = delete_blocks(depth, config, keyed_rng(seed, *key, "blocks"))
        clamped = bool(keyed_rng(seed, *key, "clamp").random() >= config.unclamped_fraction)
        size = min(config.crop or length, length)
        start = crop_start(length, size, clamped, keyed_rng(seed, *key, "crop"))
        stop = start + size
    if len(rows) > config.max_rows:
        rows = _with_query(rows, config.max_rows, keyed_rng(seed, *key, "budget"))
    return Selection(start, stop, rows, clamped)


def make_features(
    raw: RawExample,
    config: SampleConfig,
    seed: int,
    key: tuple[str | int, ...],
    passes: int = 1,
    train: bool = False,
) -> Arrays:
    """The model's input for one example: arrays of the feature table (`warpfold.batch.FEATURES`), no batch axis.

    key: names this draw, e.g. (example name, step).  passes: (recycles + 1) x ensemble; with `resample_msa` the MSA
    features hold that many samples, otherwise one.  train: crop, delete blocks, draw the clamping of FAPE.
    Labels are there when the example has coordinates.  An alignment with no row to spare for the extra MSA has one
    fully masked row there, which is what AlphaFold2's padding comes to, or the query's (`empty_extra`).
    """
    chosen = select(len(raw.aatype), len(raw.msa), config, seed, key, train)
    raw = raw.take(chosen.start, chosen.stop, chosen.rows)
    length = len(raw.aatype)
    features: Arrays = {
        "aatype": raw.aatype.astype(np.int64),
        "residue_index": raw.residue_index.astype(np.int64),
        "seq_mask": np.ones(length, np.float32),
        "target_feat": np.eye(22, dtype=np.float32)[raw.aatype.astype(np.int64) + 1],  # channel 0: chain break
        **atom_masks(raw.aatype),
        **no_templates(length),
    }
    if raw.positions is not None and raw.mask is not None:
        features["all_atom_positions"] = raw.positions
        features["all_atom_mask"] = raw.mask.astype(np.float32)
        features["resolution"] = np.array(raw.resolution or 0.0, np.float32)  # AlphaFold2's value for "none": NMR
        features["use_clamped_fape"] = np.array(chosen.clamped, np.float32)
        features = add_labels(features)
    samples = [_msa_features(raw, config, seed, (*key, index)) for index in range(passes if config.resample_msa else 1)]
    features |= {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
    if config.pad:
        sizes = {"res": (config.crop if train else None) or length, "seq": config.max_msa, "extra": config.max_extra}
        features = pad_features(features, sizes)
    return features


def no_templates(length: int) -> Arrays:
    """The template features of an example without templates: arrays of none."""
    sizes = {"tmpl": 0, "res": length}
    return {
        name: np.zeros([sizes[axis] if isinstance(axis, str) else axis for axis in f.axes], f.dtype)
        for name, f in FEATURES.items()
        if name.startswith("template_")
    }


def crop_start(length: int, size: int, clamped: bool, rng: np.random.Generator) -> int:
    """Where a crop of `size` residues starts (0-based): uniform when FAPE is clamped; otherwise biased towards the
    N terminus, x ~ uniform[0, n], start ~ uniform[0, n - x] with n = length - size (Supp. 1.2.8)."""
    spare = length - size
    if not clamped:
        spare -= int(rng.integers(0, spare + 1))
    return int(rng.integers(0, spare + 1))


def delete_blocks(depth: int, config: SampleConfig, rng: np.random.Generator) -> np.ndarray:
    """The rows that MSA block deletion keeps (Supp. Algorithm 1), int64, ascending; the query always stays.

    Blocks are contiguous, and may overlap: rows stand in the order of the search, so near ones are related and a
    block takes a whole branch of the family.
    """
    size = int(depth * config.block_fraction)
    count = int(rng.integers(0, config.blocks + 1)) if config.randomize_num_blocks else config.blocks
    kept = np.ones(depth, bool)
    for start in rng.integers(0, depth, count):
        kept[start : start + size] = False
    kept[0] = True
    return np.flatnonzero(kept)


def _with_query(rows: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` of `rows`, ascending: the first, and a uniform sample of the others without replacement."""
    return np.concatenate([rows[:1], np.sort(rng.choice(rows[1:], count - 1, replace=False))])


def _msa_features(raw: RawExample, config: SampleConfig, seed: int, key: tuple[str | int, ...]) -> Arrays:
    """The MSA features of one pass (without the `pass` axis): Supp. 1.2.7 and table 1."""
    centres = others = np.arange(len(raw.msa))
    if len(centres) > config.max_msa:
        centres = _with_query(centres, config.max_msa, keyed_rng(seed, *key, "clusters"))
    others = np.setdiff1d(others, centres, assume_unique=True)
    true_msa = raw.msa[centres]
    masked_msa, bert_mask = mask_msa(true_msa, raw.profile, config, keyed_rng(seed, *key, "mask"))

    # A row without a residue in this crop says nothing here: it would join the query's cluster by default.
    members = others[(raw.msa[others] != GAP).any(-1)]
    cluster = nearest_cluster(raw.msa[members], masked_msa)
    profile, deletion_mean = cluster_statistics(
        masked_msa, raw.deletions[centres], raw.msa[members], raw.deletions[members], cluster
    )
    msa_feat = np.empty((*masked_msa.shape, 49), np.float32)
    msa_feat[..., :23] = np.eye(MSA_CLASSES, dtype=np.float32)[masked_msa]
    msa_feat[..., 23] = np.minimum(raw.deletions[centres], 1)
    msa_feat[..., 24] = deletion_value(raw.deletions[centres])
    msa_feat[..., 25:48] = profile
    msa_feat[..., 48] = deletion_value(deletion_mean)

    if not len(others) and config.empty_extra == "query":
        others = np.zeros(1, np.int64)
    if len(others) > config.max_extra:
        others = np.sort(keyed_rng(seed, *key, "extra").choice(others, config.max_extra, replace=False))
    extra = np.zeros((max(len(others), 1), len(raw.aatype)), np.float32)
    extra_msa, extra_deletions, extra_mask = extra.astype(np.int64), extra.copy(), extra
    if len(others):
        extra_msa, extra_deletions, extra_mask = raw.msa[others].astype(np.int64), raw.deletions[others], extra + 1
    return {
        "msa_feat": msa_feat,
        "msa_mask": np.ones(masked_msa.shape, np.float32),
        "bert_mask": bert_mask.astype(np.float32),
        "true_msa": true_msa.astype(np.int64),
        "extra_msa": extra_msa,
        "extra_msa_mask": extra_mask,
        "extra_has_deletion": np.minimum(extra_deletions, 1).astype(np.float32),
        "extra_deletion_value": deletion_value(extra_deletions),
    }


def mask_msa(
    msa: np.ndarray, profile: np.ndarray, config: SampleConfig, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """BERT masking (Supp. 1.2.7, step 2): what the model sees, uint8 [S, N], and which positions it must restore, bool.

    msa: uint8 [S, N]; profile: [N, 22], the frequencies of residue types, X and gap in each column.
    """
    bert_mask = rng.random(msa.shape, np.float32) < config.masked_fraction
    column = np.nonzero(bert_mask)[1]
    kind, level = rng.random((2, len(column)))
    uniform = rng.integers(0, 20, len(column))
    cumulative = np.cumsum(profile, axis=1, dtype=np.float64)
    drawn = (level[:, None] * cumulative[column, -1:] >= cumulative[column, :-1]).sum(1)
    bounds = np.cumsum([config.mask_uniform, config.mask_profile, config.mask_same])
    masked = msa.copy()
    masked[bert_mask] = np.select([kind < bound for bound in bounds], [uniform, drawn, msa[bert_mask]], MASK)
    return masked, bert_mask


def nearest_cluster(rows: np.ndarray, centres: np.ndarray, block: int = 1024) -> np.ndarray:
    """The cluster of each row: the centre that agrees with it in most positions, the first of equals (int64 [E]).

    rows: uint8 [E, N], codes 0-21; centres: uint8 [S, N], codes 0-22.  Gaps and masked positions agree with nothing
    (Supp. 1.2.7, step 3).  Counting by table look-up, in whole numbers: `agrees[n, code]` has one byte per centre, so
    a row costs N look-ups of S bytes; some eight times faster than one-hot vectors in a matrix product, and exact.
    """
    codes = np.arange(22, dtype=np.uint8)[:, None]
    agrees = ((centres.T[:, None, :] == codes) & (codes != GAP)).view(np.uint8)  # [N, 22, S]
    columns = np.ascontiguousarray(rows.T)
    nearest = np.empty(len(rows), np.int64)
    for start in range(0, len(rows), block):  # blocks that stay in the cache
        part = columns[:, start : start + block]
        total = np.zeros((part.shape[1], len(centres)), np.uint32)
        for first in range(0, len(columns), 255):  # as many as a byte can count
            count = np.zeros(total.shape, np.uint8)
            for n in range(first, min(first + 255, len(columns))):
                count += agrees[n].take(part[n], axis=0)
            total += count
        nearest[start : start + block] = total.argmax(axis=1)
    return nearest


def cluster_statistics(
    centres: np.ndarray, centre_deletions: np.ndarray, rows: np.ndarray, row_deletions: np.ndarray, cluster: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Profile float32 [S, N, 23] and mean deletions float32 [S, N] of each cluster, its (masked) centre counted in.

    centres: uint8 [S, N]; rows: uint8 [E, N], in the clusters `cluster` [E].  Divided by members + 1e-6, as official.
    """
    depth, length = centres.shape
    cell = np.concatenate([np.arange(depth), cluster])[:, None] * length + np.arange(length)  # [S + E, N]
    codes = np.concatenate([centres, rows])
    counts = np.bincount((cell * MSA_CLASSES + codes).ravel(), minlength=depth * length * MSA_CLASSES)
    deletions = np.concatenate([centre_deletions, row_deletions])
    some = np.nonzero(deletions)  # few have any
    deleted = np.bincount(cell[some], deletions[some], minlength=depth * length)
    members = 1e-6 + 1 + np.bincount(cluster, minlength=depth)
    profile = counts.reshape(depth, length, MSA_CLASSES) / members[:, None, None]
    return profile.astype(np.float32), (deleted.reshape(depth, length) / members[:, None]).astype(np.float32)


def deletion_value(count: np.ndarray) -> np.ndarray:
    """A number of deleted residues, d >= 0, squeezed into [0, 1): 2/pi arctan(d / 3) (Supp. table 1).  float32."""
    return np.arctan(count.astype(np.float32) / 3) * np.float32(2 / np.pi)


def pad_features(features: Arrays, sizes: dict[str, int]) -> Arrays:
    """The arrays with the axes named in `sizes` filled up with zeros (masked) to at least those sizes."""
    padded = {}
    for name, array in features.items():
        axes = FEATURES[name].axes
        missing = [max(sizes.get(str(axis), 0) - size, 0) for axis, size in zip(axes, array.shape)]
        padded[name] = np.pad(array, [(0, m) for m in missing]) if any(missing) else array
    return padded
