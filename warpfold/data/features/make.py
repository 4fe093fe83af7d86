"""Compute the features of an example: sample, read only the sampled data, and compute (Supp. 1.2).

An assembly is cropped, its alignment rows are paired, and its chains are concatenated. Its alignment has the pairs
first, then the unpaired rows of each entity, with gaps in the other entities (AlphaFold-Multimer, sec. 2.4). All random
choices are made here. The model itself clusters the alignment of an assembly (model/clusters.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from warpfold.batch import FEATURES, Arrays, Batch, padding
from warpfold.data.example.pairing import pair_rows
from warpfold.data.example.raw_example import Assembly, Example, RawExample, Templates, compute_profile
from warpfold.data.features.choose import (
    SampleConfig,
    all_but,
    choose_templates,
    delete_blocks,
    sample_with_query,
    select,
)
from warpfold.data.features.crop import crop_assembly, place_chain
from warpfold.data.features.msa import WholeChain, mask_msa, msa_features
from warpfold.geometry import atoms
from warpfold.geometry.labels import structure_labels
from warpfold.geometry.residue import ATOM14_MASK, ATOM37_MASK, GAP
from warpfold.keyed import keyed_rng

# The deletion feature of this count differs from the limit for infinity by less than 0.0001.
MAX_DELETIONS = np.iinfo(np.int16).max


def make_features(
    example: Example | Assembly,
    config: SampleConfig,
    seed: int,
    key: tuple[str | int, ...],
    passes: int = 1,
    train: bool = False,
    crops: Sequence[np.ndarray] | None = None,
) -> Arrays:
    """Compute the model's input for an example: arrays of the feature table (`warpfold.batch.FEATURES`), no batch axis.

    example: in memory or in a store; only the sampled data is read (with `clustering = "chain"`, the sampled rows over
    the whole chain). An assembly has the features of AlphaFold-Multimer, a chain those of the monomer model.
    key: identifies the random draw, e.g. (example name, step). passes: (recycles + 1) x ensemble; with `resample_msa`,
    the MSA features hold a sample for each pass, otherwise one. train: crop, delete blocks of rows, limit the cost to
    `max_cost`, and sample the templates and the clamping of FAPE. crops: outside of training, the residues of each
    chain of an assembly, by default all.

    Integers and masks may have narrower types than in the table; `batch.to_tensors` converts them. Labels are included
    if the example has coordinates. An extra MSA without rows becomes a fully masked row, as with AlphaFold2's padding,
    or the query (`empty_extra`).
    """
    if isinstance(example, Assembly):
        joined = assembly_features(example, config, seed, key, passes if config.resample_msa else 1, train, crops)
        return pad_features(joined, padded_sizes(config, len(joined["aatype"]), train))
    templates, is_predicted = example.templates_count, example.is_predicted
    selection = select(example.length, example.depth, config, seed, key, train, templates, is_predicted)
    chain = None
    if config.clustering == "chain" and selection.stop - selection.start < example.length:
        chain = WholeChain(example.whole_rows(selection.rows), example.profile, selection.start)
    whole = None if chain is None else chain.msa
    raw = example.take(slice(selection.start, selection.stop), selection.rows, selection.templates, whole)
    length = raw.length
    features: Arrays = {
        "aatype": raw.aatype,
        "residue_index": raw.residue_index,
        "seq_mask": np.ones(length, np.uint8),
        # Channel 0 is the chain break.
        "target_feat": np.eye(22, dtype=np.float32)[raw.aatype.astype(np.int64) + 1],
        "atom14_atom_exists": ATOM14_MASK[raw.aatype],
        "atom37_atom_exists": ATOM37_MASK[raw.aatype],
        **template_features(raw.templates, length),
        **msa_features(raw, config, seed, key, passes if config.resample_msa else 1, chain),
    }
    if (truth := raw.atoms(np.arange(length), config.min_confidence)) is not None:
        features |= dict(zip(("all_atom_positions", "all_atom_mask"), truth))
        types, positions, mask = map(torch.from_numpy, (raw.aatype, *truth))
        labels = structure_labels(types.long(), positions.float(), mask.float())
        features |= {name: label.numpy() for name, label in labels.items()}
        # AlphaFold2 uses 0 if there is no resolution (NMR).
        features["resolution"] = np.array(raw.resolution or 0.0, np.float32)
        features["use_clamped_fape"] = np.array(selection.clamped, np.float32)
    return pad_features(features, padded_sizes(config, length, train))


def padded_sizes(config: SampleConfig, length: int, train: bool) -> dict[str, int]:
    """Return the sizes to which `SampleConfig.pad` pads each axis, {} if it is off. length: residues of the example."""
    if not config.pad:
        return {}
    return {"res": (config.crop if train else None) or length, "seq": config.max_msa, "extra": config.max_extra}


def padded_shape(
    features: Mapping[str, np.ndarray | torch.Tensor], multiple: int, config: SampleConfig | None = None, count: int = 0
) -> dict[str, int]:
    """Compute the padded shape of an example, which kernels and graphs see: the size of each axis by name.

    Every example of prediction, validation and training is padded to this shape. Masks exclude the padding.

    multiple: round up the residues, the rows of the extra MSA, and the sum of cluster and template rows to a multiple
    of this number (`Plan.multiple_on`); 1 leaves them unchanged. A monomer with templates gets an even number of them,
    because Triton compiles a kernel again for an axis of 1.
    config, count: limit training to `count` sizes of each axis; 0 means no limit. The sizes are multiples of 1 /
    `count` of the largest size: of the crop, of the rows of both alignments, and in a monomer of the templates.
    Residues are not limited without a crop.

    Templates are not added to an example without any, nor to a complex, because the model averages over the templates.
    The rows from which a complex draws its clusters are padded like the others. Their largest size is that of one
    chain, so several chains may exceed it.
    """
    sizes = {
        str(axis): size
        for name, x in features.items()
        for axis, size in zip(reversed(FEATURES[name].axes), reversed(x.shape))
    }
    is_complex = "alignment" in features
    if config is not None and count:
        limits = {"res": config.crop or 0, "seq": config.max_msa, "extra": config.max_extra}
        limits |= {"row": config.chain_rows} if is_complex else {"tmpl": config.max_templates}
        steps = {axis: -(-limit // count) for axis, limit in limits.items() if limit and axis in sizes}
        sizes |= {axis: _round_up(sizes[axis], step) for axis, step in steps.items()}
    if multiple > 1:
        if not is_complex and "tmpl" in sizes:
            sizes["tmpl"] = _round_up(sizes["tmpl"], 2)
        templates = sizes.get("tmpl", 0)
        sizes["seq"] = _round_up(sizes["seq"] + templates, multiple) - templates
        sizes |= {axis: _round_up(sizes[axis], multiple) for axis in ("res", "extra", "row") if axis in sizes}
    return {axis: sizes[axis] for axis in ("res", "seq", "extra", "row", "tmpl") if axis in sizes}


def _round_up(size: int, step: int) -> int:
    """Round up to a multiple of `step`."""
    return -(-size // step) * step


def pad_features(features: Arrays, sizes: dict[str, int]) -> Arrays:
    """Pad the axes named in `sizes` to at least these sizes, with masked values. Leading batch axes are allowed."""
    padded = {}
    for name, array in features.items():
        axes = FEATURES[name].axes
        shape = array.shape[array.ndim - len(axes) :]
        missing = [max(sizes.get(str(axis), 0) - size, 0) for axis, size in zip(axes, shape)]
        widths = [*[(0, 0)] * (array.ndim - len(axes)), *((0, count) for count in missing)]
        padded[name] = np.pad(array, widths, constant_values=padding(name)) if any(missing) else array
    return padded


def pad_batch(batch: Batch, multiple: int) -> Batch:
    """Pad the features of one or several examples in host memory to their `padded_shape`."""
    if multiple == 1:
        return batch
    padded = pad_features({name: x.numpy() for name, x in batch.items()}, padded_shape(batch, multiple))
    return {name: torch.from_numpy(x) for name, x in padded.items()}


def template_features(templates: Templates | None, length: int) -> Arrays:
    """Compute the template features of the feature table (`warpfold.batch.FEATURES`); empty arrays without templates.

    length: residues of the example. The pseudo beta is CB, or CA of glycine (Supp. 1.2.9, table 1), by the template's
    residue type. It is masked if that atom was not observed.
    """
    if templates is None or not len(templates):
        sizes = {"tmpl": 0, "res": length}
        return {
            name: np.zeros([sizes[axis] if isinstance(axis, str) else axis for axis in feature.axes], feature.dtype)
            for name, feature in FEATURES.items()
            if name.startswith("template_")
        }
    if templates.aatype.shape[1] != length:
        raise ValueError(f"templates of {templates.aatype.shape[1]} residues for an example of {length}")
    aatype, positions = templates.aatype.astype(np.int64), templates.positions
    mask = templates.mask.astype(np.float32)
    codes, xyz, atom_mask = (torch.from_numpy(array) for array in (aatype, positions, mask))
    return {
        "template_aatype": aatype,
        "template_all_atom_positions": positions,
        "template_all_atom_masks": mask,
        "template_pseudo_beta": atoms.pseudo_beta(codes, xyz).numpy(),
        "template_pseudo_beta_mask": atoms.pseudo_beta_mask(codes, atom_mask).numpy(),
        "template_mask": np.ones(len(templates), np.float32),
    }


@dataclass(frozen=True)
class EntityCrop:
    """The data of an entity in a crop: the K residues that occur in the crop of any copy, and the selected rows.

    number: entity_id. residues: ascending. raw: the example of these residues. paired: row of `raw` in each of P pairs,
    -1 for none. alone: unpaired rows of `raw`. columns: indices of all copies' residues in the crop of the assembly.
    place: index among the K residues for each of `columns`.
    """

    number: int
    residues: np.ndarray  # int64 [K]
    raw: RawExample
    paired: np.ndarray  # int64 [P]
    alone: np.ndarray  # int64
    columns: np.ndarray  # int64 [n]
    place: np.ndarray  # int64 [n]


def assembly_features(
    assembly: Assembly,
    config: SampleConfig,
    seed: int,
    key: tuple[str | int, ...],
    passes: int,
    train: bool,
    crops: Sequence[np.ndarray] | None = None,
) -> Arrays:
    """Compute the features of an assembly without padding. For the arguments, see `make_features`."""
    if train:
        crops = crop_assembly(assembly, config, keyed_rng(seed, *key, "crop"))
    elif crops is None:
        crops = [np.arange(chain.length) for chain in assembly.chains]
    asym = np.repeat(np.arange(len(crops)), [len(crop) for crop in crops])
    entities = read_entities(assembly, crops, config, seed, key, train)
    joined = concatenate_templates(assembly, entities, crops, config.max_templates)
    aatype, residue_index = np.zeros(len(asym), np.uint8), np.zeros(len(asym), np.int32)
    for entity in entities:
        aatype[entity.columns] = entity.raw.aatype[entity.place]
        residue_index[entity.columns] = entity.raw.residue_index[entity.place]
    truth = copy_features(assembly, entities, len(asym), config.min_confidence)
    if truth:
        clamped = not train or keyed_rng(seed, *key, "clamp").random() >= config.unclamped_fraction
        truth["use_clamped_fape"] = np.array(clamped, np.float32)
    return {
        "aatype": aatype,
        "residue_index": residue_index,
        "seq_mask": np.ones(len(asym), np.uint8),
        "asym_id": asym + 1,
        "entity_id": assembly.entity_id[asym],
        "sym_id": assembly.sym_id[asym],
        # The model does not read channel 0, the chain break.
        "target_feat": np.eye(22, dtype=np.float32)[aatype.astype(np.int64) + 1],
        "atom14_atom_exists": ATOM14_MASK[aatype],
        "atom37_atom_exists": ATOM37_MASK[aatype],
        **template_features(joined, len(asym)),
        "template_mask": np.array([] if joined is None else joined.mask.any((1, 2)), np.float32),
        **alignment_features(entities, len(asym), config, seed, key, passes),
        **truth,
    }


def read_entities(
    assembly: Assembly,
    crops: Sequence[np.ndarray],
    config: SampleConfig,
    seed: int,
    key: tuple[str | int, ...],
    train: bool,
) -> list[EntityCrop]:
    """Sample the rows and templates of all entities in the crop, and read them. crops: the residues of each chain."""

    def rng(*purpose: str | int) -> np.random.Generator | None:
        return keyed_rng(seed, *key, *purpose) if train else None

    numbers = assembly.entity_id
    starts = np.cumsum([0, *(len(crop) for crop in crops)])
    # All copies use the data of the first one.
    firsts = [assembly.chains[int(np.argmax(numbers == number))] for number in numbers]
    cropped = [chain for chain, crop in enumerate(crops) if len(crop)]
    rows = choose_rows([firsts[chain] for chain in cropped], numbers[cropped], config, rng("blocks"))
    entities = []
    for number, (paired, alone) in rows.items():
        copies = np.flatnonzero(numbers == number).tolist()
        example = firsts[copies[0]]
        residues = np.unique(np.concatenate([crops[chain] for chain in copies]))
        used = np.union1d(paired[paired >= 0], alone)
        templates = choose_templates(example.templates_count, config.max_templates, rng("templates", number))
        entities.append(
            EntityCrop(
                number=number,
                residues=residues,
                raw=example.take(residues, used, templates),
                paired=np.where(paired < 0, -1, np.searchsorted(used, paired)),
                alone=np.searchsorted(used, alone),
                columns=np.concatenate([starts[chain] + np.arange(len(crops[chain])) for chain in copies]),
                place=np.concatenate([np.searchsorted(residues, crops[chain]) for chain in copies]),
            )
        )
    return entities


def choose_rows(
    chains: Sequence[Example], entities: np.ndarray, config: SampleConfig, rng: np.random.Generator | None
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Choose the paired and unpaired alignment rows of each entity.

    Returns by entity its row in each of P pairs (int64 [P], -1 if the pair has no row of the entity, the queries first)
    and its unpaired rows (int64, ascending).

    At most half of `chain_rows` are pairs, and each entity is filled up to `chain_rows` with unpaired rows. A row that
    is in a pair, or equals one, is not used unpaired, even if the pair itself is dropped (official code:
    `deduplicate_unpaired_sequences` and `crop_chains`). An assembly of a single entity has no pairs. Rows for pairing
    are used unpaired if their entity is in no pair; the official code would drop them.

    entities: int64 [K], the entity of each chain. rng: for block deletion in training; None deletes no rows.
    """
    pairings = [chain.pairing for chain in chains]
    all_pairs = np.zeros((0, len(pairings)), np.int64)
    if len(np.unique(entities)) > 1:
        all_pairs = pair_rows(pairings) if config.pairing else np.zeros((1, len(pairings)), np.int64)
    pairs = all_pairs[: max(config.chain_rows // 2, 1)]
    if rng is not None and len(pairs):
        pairs = pairs[delete_blocks(len(pairs), config, rng)]
    rows_of_entity = {}
    for number, chain, pairing, paired, column in zip(entities.tolist(), chains, pairings, all_pairs.T, pairs.T):
        # Copies use the rows of the first chain.
        if number in rows_of_entity:
            continue
        in_pairs = paired[paired >= 0]
        if pairing is None:
            alone = all_but(in_pairs, chain.depth)
        else:
            is_unpaired = pairing.unpaired
            if not in_pairs.any():
                # Rows for pairing come last, so the first of equal rows is not one of them if possible.
                is_unpaired = np.zeros(len(pairing), bool)
                is_unpaired[np.unique(pairing.digest, return_index=True)[1]] = True
            alone = np.flatnonzero(is_unpaired & ~np.isin(pairing.digest, pairing.digest[in_pairs]))
        if rng is not None and len(alone):
            alone = alone[delete_blocks(len(alone), config, rng)]
        rows_of_entity[number] = column, alone[: max(config.chain_rows - int((column >= 0).sum()), 0)]
    return rows_of_entity


def concatenate_templates(
    assembly: Assembly, entities: Sequence[EntityCrop], crops: Sequence[np.ndarray], count: int, blank: int = 0
) -> Templates | None:
    """Concatenate template t of every chain, for t below `count`. A chain with fewer templates is masked.

    As in the official code, there are always `count` templates, padded with zeros (`pad_templates` in
    data/msa_pairing.py); None for a count of 0. blank: residue type of the padding.
    """
    if not count:
        return None
    length = sum(map(len, crops))
    joined = Templates(
        np.full((count, length), blank, np.uint8),
        np.zeros((count, length, 37, 3), np.float32),
        np.zeros((count, length, 37), np.uint8),
        ("",) * count,
        np.zeros(count, np.float32),
    )
    starts = np.cumsum([0, *map(len, crops)])
    for entity in entities:
        if (templates := entity.raw.templates) is not None:
            for name in ("aatype", "positions", "mask"):
                getattr(joined, name)[: len(templates), entity.columns] = getattr(templates, name)[:, entity.place]
    for start, crop, first in zip(starts, crops, assembly.fixed):
        # The fixed template of a chain comes first. The templates of its entity move by one.
        if first is not None:
            for name in ("aatype", "positions", "mask"):
                chain = getattr(joined, name)[:, start : start + len(crop)]
                chain[1:] = chain[:-1].copy()
                chain[0] = getattr(first, name)[0, crop]
    return joined


def concatenate_chains(assembly: Assembly, config: SampleConfig, gap: int) -> RawExample:
    """Concatenate the chains of an assembly for a monomer model; `residue_index` jumps by `gap` between chains.

    The relative position encoding of a monomer model saturates at 32 residues (Algorithm 4). The alignment is that of
    the assembly: first the pairs, then the rows of each entity with gaps in the others. Templates of different chains
    are concatenated too, and the distances between fixed templates are not masked (as in Bennett et al. 2023).
    """
    crops = [np.arange(chain.length) for chain in assembly.chains]
    entities = read_entities(assembly, crops, config, 0, (), train=False)
    aatype, asym = np.zeros(assembly.length, np.uint8), np.repeat(np.arange(len(crops)), [*map(len, crops)])
    for entity in entities:
        aatype[entity.columns] = entity.raw.aatype[entity.place]
    index = (np.arange(assembly.length) + gap * asym).astype(np.int32)
    msa, deletions, _ = concatenate_alignments(entities, assembly.length)
    shared = max(0 if entity.raw.templates is None else len(entity.raw.templates) for entity in entities)
    count = min(shared + any(template is not None for template in assembly.fixed), config.max_templates)
    templates = concatenate_templates(assembly, entities, crops, count, GAP)
    return RawExample(
        assembly.name, aatype, index, msa, deletions.astype(np.uint16), compute_profile(msa), templates=templates
    )


def alignment_features(
    entities: Sequence[EntityCrop],
    length: int,
    config: SampleConfig,
    seed: int,
    key: tuple[str | int, ...],
    passes: int,
) -> Arrays:
    """Compute the alignment features of an assembly: the alignment, and for each pass the centres and extra rows.

    An extra MSA without rows refers to a masked row that is appended to the alignment, or to the query (`empty_extra`).
    """
    msa, deletions, owner = concatenate_alignments(entities, length)
    profile = compute_profile(msa)
    column = np.zeros(length, np.int64)
    for number, entity in enumerate(entities, 1):
        column[entity.columns] = number
    samples = []
    for index in range(passes):
        rng = keyed_rng(seed, *key, index, "clusters")
        # Row 0, the concatenated queries, is always a centre, as with `cluster_bias_mask` of the official code.
        centres = sample_with_query(np.arange(len(msa)), min(config.max_msa, len(msa)), rng)
        other_rows = all_but(centres, len(msa))
        extra = np.sort(rng.choice(other_rows, min(len(other_rows), config.max_extra), replace=False))
        masked, bert_mask = mask_msa(msa[centres], profile, config, keyed_rng(seed, *key, index, "mask"))
        # The gaps of an unpaired row in other entities are not a target of the masked-MSA loss.
        is_own = (owner[centres][:, None] == 0) | (owner[centres][:, None] == column)
        samples.append((centres, extra, masked, bert_mask & is_own, msa[centres]))
    mask = np.ones(msa.shape, np.uint8)
    names = ("centre_rows", "extra_rows", "masked_msa", "bert_mask", "true_msa")
    drawn = {name: np.stack(arrays) for name, arrays in zip(names, zip(*samples))}
    if not drawn["extra_rows"].size:
        drawn["extra_rows"] = np.full((passes, 1), len(msa) if config.empty_extra == "masked" else 0)
        msa, deletions, mask = (np.concatenate([x, np.zeros_like(x[:1])]) for x in (msa, deletions, mask))
    return {"alignment": msa, "alignment_deletions": deletions, "alignment_mask": mask, **drawn}


def concatenate_alignments(entities: Sequence[EntityCrop], length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Concatenate the alignments of entities: rows uint8 [R, N], deletions int16 [R, N], owners int64 [R].

    The owner of an unpaired row is the index of its entity in `entities`, from 1. The owner of a pair is 0.
    """
    paired, alone = len(entities[0].paired), [len(entity.alone) for entity in entities]
    owner = np.repeat(np.arange(len(entities) + 1), [paired, *alone])
    blocks: list[tuple[np.ndarray, np.ndarray]] = []
    # Column of each residue in the concatenated blocks.
    column, width = np.empty(length, np.int64), 0
    for number, entity in enumerate(entities, 1):
        row = np.full(len(owner), -1)
        row[:paired], row[owner == number] = entity.paired, entity.alone
        msa, deletions = entity.raw.msa[row], np.minimum(entity.raw.deletions[row], MAX_DELETIONS).astype(np.int16)
        msa[row < 0], deletions[row < 0] = GAP, 0
        blocks.append((msa, deletions))
        column[entity.columns] = width + entity.place
        width += len(entity.residues)
    msa, deletions = (np.concatenate(arrays, 1).take(column, 1) for arrays in zip(*blocks))
    return msa, deletions, owner


def copy_features(assembly: Assembly, entities: Sequence[EntityCrop], length: int, least: float) -> Arrays:
    """Read the atoms of the crop's residues in every copy of their entity, and the resolution; {} without atoms.

    least: residues of a prediction with a lower pLDDT are masked.
    """
    chains = {entity.number: np.flatnonzero(assembly.entity_id == entity.number).tolist() for entity in entities}
    copies = max(map(len, chains.values()))
    positions, mask = np.zeros((copies, length, 37, 3), np.float32), np.zeros((copies, length, 37), np.uint8)
    for entity in entities:
        for copy, chain in enumerate(chains[entity.number]):
            atoms = assembly.chains[chain].atoms(entity.residues, least)
            if atoms is None:
                return {}
            placed = place_chain(atoms[0], assembly.operators, chain) * atoms[1][..., None]
            positions[copy, entity.columns], mask[copy, entity.columns] = placed[entity.place], atoms[1][entity.place]
    return {
        "copy_atom_positions": positions,
        "copy_atom_mask": mask,
        # AlphaFold2 uses 0 if there is no resolution (NMR).
        "resolution": np.array(entities[0].raw.resolution or 0.0, np.float32),
    }
