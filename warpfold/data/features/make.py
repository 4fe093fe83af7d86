"""Make the features of one example: choose what is used, read only that, and compute (Supp. 1.2)."""

from collections.abc import Sequence

import numpy as np

from warpfold.batch import FEATURES, Arrays
from warpfold.data.example.raw_example import Assembly, Example
from warpfold.data.features.assembly import assembly_features
from warpfold.data.features.choose import SampleConfig, select
from warpfold.data.features.labels import add_labels, atom_masks
from warpfold.data.features.msa import WholeChain, msa_features
from warpfold.data.features.templates import template_features


def make_features(
    example: Example | Assembly,
    config: SampleConfig,
    seed: int,
    key: tuple[str | int, ...],
    passes: int = 1,
    train: bool = False,
    crops: Sequence[np.ndarray] | None = None,
) -> Arrays:
    """Return the model's input for one example: arrays of the feature table (`warpfold.batch.FEATURES`), no batch axis.

    example: in memory or in a store; only the chosen part is read (for `clustering = "chain"` the chosen rows over the
    whole chain).  An assembly's features are AlphaFold-Multimer's, a chain's the monomer's.  key: names this draw, e.g.
    (example name, step).  passes: (recycles + 1) x ensemble; with `resample_msa` the MSA features hold that many
    samples, otherwise one.  train: crop, delete blocks, keep within `max_cost`, draw the templates and the clamping of
    FAPE.  crops: the residues of each chain of an assembly that are used outside of training; all by default.
    Whole numbers and masks may be narrower than in the table: `batch.to_tensors` widens them.
    Labels are included if the example has coordinates.  If no row is left for the extra MSA, it is one fully masked
    row, as with AlphaFold2's padding, or the query's (`empty_extra`).
    """
    if isinstance(example, Assembly):
        joined = assembly_features(example, config, seed, key, passes if config.resample_msa else 1, train, crops)
        return pad_features(joined, padded_sizes(config, len(joined["aatype"]), train))
    chosen = select(example.length, example.depth, config, seed, key, train, example.templates_count)
    chain = None
    if config.clustering == "chain" and chosen.stop - chosen.start < example.length:
        chain = WholeChain(example.whole_rows(chosen.rows), example.profile, chosen.start)
    whole = None if chain is None else chain.msa
    raw = example.take(slice(chosen.start, chosen.stop), chosen.rows, chosen.templates, whole)
    length = raw.length
    sizes = padded_sizes(config, length, train)
    features: Arrays = {
        "aatype": raw.aatype,
        "residue_index": raw.residue_index,
        "seq_mask": np.ones(length, np.uint8),
        "target_feat": np.eye(22, dtype=np.float32)[raw.aatype.astype(np.int64) + 1],  # channel 0: chain break
        **atom_masks(raw.aatype),
        **template_features(raw.templates, length),
        **msa_features(raw, config, seed, key, passes if config.resample_msa else 1, sizes, chain),
    }
    if raw.positions is not None and raw.mask is not None:
        features["all_atom_positions"] = raw.positions
        features["all_atom_mask"] = raw.mask
        features["resolution"] = np.array(raw.resolution or 0.0, np.float32)  # 0: AlphaFold2's value for none (NMR)
        features["use_clamped_fape"] = np.array(chosen.clamped, np.float32)
        features = add_labels(features)
    return pad_features(features, sizes)


def padded_sizes(config: SampleConfig, length: int, train: bool) -> dict[str, int]:
    """Return the sizes to which axes are padded (`SampleConfig.pad`), {} for none; length: residues of the example."""
    if not config.pad:
        return {}
    return {"res": (config.crop if train else None) or length, "seq": config.max_msa, "extra": config.max_extra}


def few_sizes(features: Arrays, config: SampleConfig, count: int) -> dict[str, int]:
    """Return the sizes to which a training example is padded so that each axis has at most `count` sizes (not 0).

    They are the multiples of a share of the largest: of the crop's residues, and in a monomer also of the rows of both
    alignments and of the templates.  An example without templates stays so; whole chains (no crop) keep their length.
    A complex keeps its rows, as each is a row of an alignment, and its templates, whose mean the model takes.
    """
    most = {"res": config.crop or 0}
    if "alignment" not in features:
        most |= {"seq": config.max_msa, "extra": config.max_extra, "tmpl": config.max_templates}
    sizes = {str(axis): size for name, x in features.items() for axis, size in zip(FEATURES[name].axes, x.shape)}
    steps = {axis: -(-largest // count) for axis, largest in most.items() if largest}
    return {axis: -(-sizes[axis] // step) * step for axis, step in steps.items() if axis in sizes}


def pad_features(features: Arrays, sizes: dict[str, int]) -> Arrays:
    """Return the arrays with the axes named in `sizes` padded with zeros (masked) to at least those sizes."""
    padded = {}
    for name, array in features.items():
        axes = FEATURES[name].axes
        missing = [max(sizes.get(str(axis), 0) - size, 0) for axis, size in zip(axes, array.shape)]
        padded[name] = np.pad(array, [(0, m) for m in missing]) if any(missing) else array
    return padded
