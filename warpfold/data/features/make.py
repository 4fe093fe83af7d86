"""Make the features of one example: choose what is used, read only that, and compute (Supp. 1.2).

An assembly is cropped, its rows are paired, and its chains are put side by side.  Its alignment has the pairs first,
then the rows of each entity that stand alone, with gaps under the other entities (AlphaFold-Multimer, sec. 2.4).  What
is random is drawn here; the clusters of an assembly are made in the model (model/clusters.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from warpfold.batch import FEATURES, Arrays, Batch, padding
from warpfold.data.example.pairing import pair_rows
from warpfold.data.example.raw_example import Assembly, Example, RawExample, Templates, profile_of
from warpfold.data.features.choose import SampleConfig, choose_templates, delete_blocks, select, with_query
from warpfold.data.features.crop import crop_assembly, move
from warpfold.data.features.msa import WholeChain, mask_msa, msa_features
from warpfold.geometry import atoms
from warpfold.geometry.labels import structure_labels
from warpfold.geometry.residue import ATOM14_MASK, ATOM37_MASK, GAP
from warpfold.keyed import keyed_rng

MOST_DELETIONS = np.iinfo(np.int16).max  # the feature made of them differs from its limit by less than 0.0001 there


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
    of = example.templates_count, example.is_predicted
    chosen = select(example.length, example.depth, config, seed, key, train, *of)
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
        "atom14_atom_exists": ATOM14_MASK[raw.aatype],
        "atom37_atom_exists": ATOM37_MASK[raw.aatype],
        **template_features(raw.templates, length),
        **msa_features(raw, config, seed, key, passes if config.resample_msa else 1, sizes, chain),
    }
    if (truth := raw.atoms(np.arange(length), config.min_confidence)) is not None:
        features |= dict(zip(("all_atom_positions", "all_atom_mask"), truth))
        types, positions, mask = map(torch.from_numpy, (raw.aatype, *truth))
        labels = structure_labels(types.long(), positions.float(), mask.float())
        features |= {name: label.numpy() for name, label in labels.items()}
        features["resolution"] = np.array(raw.resolution or 0.0, np.float32)  # 0: AlphaFold2's value for none (NMR)
        features["use_clamped_fape"] = np.array(chosen.clamped, np.float32)
    return pad_features(features, sizes)


def padded_sizes(config: SampleConfig, length: int, train: bool) -> dict[str, int]:
    """Return the sizes to which axes are padded (`SampleConfig.pad`), {} for none; length: residues of the example."""
    if not config.pad:
        return {}
    return {"res": (config.crop if train else None) or length, "seq": config.max_msa, "extra": config.max_extra}


def padded_shape(
    features: Mapping[str, np.ndarray | torch.Tensor],
    multiple: int,
    config: SampleConfig | None = None,
    count: int = 0,
) -> dict[str, int]:
    """Decide the padded shape of an example, the one that kernels and graphs see: the size of each axis by its name.

    Every prediction, validation and training example is padded to this shape, and masks leave the padding out.

    multiple: residues, rows of the extra alignment, and rows of the clustered alignment together with the rows that the
    templates add to it become a multiple of this number (`Plan.multiple_on`); with 1 they stay.  A monomer with
    templates gets an even number of them, because Triton compiles a kernel again for an axis of 1.
    config, count: limit a training to `count` sizes of each axis; 0: no limit.  The sizes are multiples of a share of
    the largest size: of the crop's residues, of the rows of both alignments, and in a monomer of the templates.  Whole
    chains have no crop, and so no limit.

    An example without templates stays without.  A complex keeps its templates, because the model takes their mean.  The
    rows from which a complex draws its clusters are padded like the others.  Their limit holds for one chain, and more
    chains have more rows.
    """
    sizes = {
        str(axis): size
        for name, x in features.items()
        for axis, size in zip(reversed(FEATURES[name].axes), reversed(x.shape))
    }
    is_complex = "alignment" in features
    if config is not None and count:
        most = {"res": config.crop or 0, "seq": config.max_msa, "extra": config.max_extra}
        most |= {"row": config.chain_rows} if is_complex else {"tmpl": config.max_templates}
        steps = {axis: -(-largest // count) for axis, largest in most.items() if largest and axis in sizes}
        sizes |= {axis: _round_up(sizes[axis], step) for axis, step in steps.items()}
    if multiple > 1:
        if not is_complex and "tmpl" in sizes:
            sizes["tmpl"] = _round_up(sizes["tmpl"], 2)
        templates = sizes.get("tmpl", 0)
        sizes["seq"] = _round_up(sizes["seq"] + templates, multiple) - templates
        sizes |= {axis: _round_up(sizes[axis], multiple) for axis in ("res", "extra", "row") if axis in sizes}
    return {axis: sizes[axis] for axis in ("res", "seq", "extra", "row", "tmpl") if axis in sizes}


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step


def pad_features(features: Arrays, sizes: dict[str, int]) -> Arrays:
    """Return the arrays with the axes named in `sizes` padded (masked) to at least those sizes.

    The arrays may have leading batch axes.
    """
    padded = {}
    for name, array in features.items():
        axes = FEATURES[name].axes
        shape = array.shape[array.ndim - len(axes) :]
        missing = [max(sizes.get(str(axis), 0) - size, 0) for axis, size in zip(axes, shape)]
        widths = [*[(0, 0)] * (array.ndim - len(axes)), *((0, more) for more in missing)]
        padded[name] = np.pad(array, widths, constant_values=padding(name)) if any(missing) else array
    return padded


def pad_batch(batch: Batch, multiple: int) -> Batch:
    """Return features in main memory, of one example or several, padded to their `padded_shape`."""
    if multiple == 1:
        return batch
    padded = pad_features({name: x.numpy() for name, x in batch.items()}, padded_shape(batch, multiple))
    return {name: torch.from_numpy(x) for name, x in padded.items()}


def template_features(templates: Templates | None, length: int) -> Arrays:
    """Return the template features of the feature table (`warpfold.batch.FEATURES`), empty arrays without templates.

    length: residues of the example.  The pseudo beta is CB, or CA of glycine (Supp. 1.2.9, table 1), of the template's
    own residue type; it is masked where that atom was not seen.
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
    codes, xyz, seen = (torch.from_numpy(array) for array in (aatype, positions, mask))
    return {
        "template_aatype": aatype,
        "template_all_atom_positions": positions,
        "template_all_atom_masks": mask,
        "template_pseudo_beta": atoms.pseudo_beta(codes, xyz).numpy(),
        "template_pseudo_beta_mask": atoms.pseudo_beta_mask(codes, seen).numpy(),
        "template_mask": np.ones(len(templates), np.float32),
    }


@dataclass(frozen=True)
class EntityCrop:
    """What is read of one entity: the K residues that are in the crop of any of its copies, and the rows in use."""

    number: int  # entity_id
    residues: np.ndarray  # int64 [K], ascending
    raw: RawExample  # of those residues
    paired: np.ndarray  # int64 [P], the row of `raw` in each pair, -1 for none
    alone: np.ndarray  # int64, the rows of `raw` that stand alone
    columns: np.ndarray  # int64 [n], the places of its copies' residues in the crop of the assembly
    place: np.ndarray  # int64 [n], which of the K residues is there


def assembly_features(
    assembly: Assembly,
    config: SampleConfig,
    seed: int,
    key: tuple[str | int, ...],
    passes: int,
    train: bool,
    crops: Sequence[np.ndarray] | None = None,
) -> Arrays:
    """Return the model's input for an assembly: as `make_features`, whose arguments these are, without padding."""
    if train:
        crops = crop_assembly(assembly, config, keyed_rng(seed, *key, "crop"))
    elif crops is None:
        crops = [np.arange(chain.length) for chain in assembly.chains]
    asym = np.repeat(np.arange(len(crops)), [len(crop) for crop in crops])
    entities = read_entities(assembly, crops, config, seed, key, train)
    joined = join_templates(assembly, entities, crops, config.max_templates)
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
        "target_feat": np.eye(22, dtype=np.float32)[aatype.astype(np.int64) + 1],  # channel 0, chain break: not read
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
    """Choose the rows and templates of the entities that are in the crop (residues of each chain), and read them."""

    def rng(*purpose: str | int) -> np.random.Generator | None:
        return keyed_rng(seed, *key, *purpose) if train else None

    numbers = assembly.entity_id
    starts = np.cumsum([0, *(len(crop) for crop in crops)])
    firsts = [assembly.chains[int(np.argmax(numbers == number))] for number in numbers]  # copies are read as the first
    here = [chain for chain, crop in enumerate(crops) if len(crop)]
    rows = choose_rows([firsts[chain] for chain in here], numbers[here], config, rng("blocks"))
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
    """Choose the alignment rows of chains: for each entity the row in each of P pairs, and the rows that stand alone.

    The first is int64 [P], -1 where a pair has no row of the entity, the queries first; the second int64, ascending.
    A row that is in a pair, or equal to one that is, does not stand alone too, even where that pair is left out: at
    most half of `chain_rows` are pairs, and of each entity as many others are used as make it `chain_rows` (as
    official: `deduplicate_unpaired_sequences` and `crop_chains`).  Copies of one entity alone have no pairs.  Rows that
    serve pairing alone stand alone where their entity is in no pair; officially they would be lost.
    entities: int64 [K], of each chain.  rng: for deleting blocks of rows in training; None: all stay.
    """
    known = [chain.pairing for chain in chains]
    every = np.zeros((0, len(known)), np.int64)
    if len(np.unique(entities)) > 1:
        every = pair_rows(known) if config.pairing else np.zeros((1, len(known)), np.int64)
    pairs = every[: max(config.chain_rows // 2, 1)]
    if rng is not None and len(pairs):
        pairs = pairs[delete_blocks(len(pairs), config, rng)]
    chosen = {}
    for number, chain, pairing, whole, column in zip(entities.tolist(), chains, known, every.T, pairs.T):
        if number in chosen:
            continue  # the rows of a copy are those of the first
        in_pairs = whole[whole >= 0]
        if pairing is None:
            rest = all_but(in_pairs, chain.depth)
        else:
            alone = pairing.unpaired
            if not in_pairs.any():  # of those that serve pairing, which come last, the ones that are not there already
                alone = np.zeros(len(pairing), bool)
                alone[np.unique(pairing.digest, return_index=True)[1]] = True
            rest = np.flatnonzero(alone & ~np.isin(pairing.digest, pairing.digest[in_pairs]))
        if rng is not None and len(rest):
            rest = rest[delete_blocks(len(rest), config, rng)]
        chosen[number] = column, rest[: max(config.chain_rows - int((column >= 0).sum()), 0)]
    return chosen


def join_templates(
    assembly: Assembly, entities: Sequence[EntityCrop], crops: Sequence[np.ndarray], count: int, blank: int = 0
) -> Templates | None:
    """Return `count` templates of an assembly: template t of every chain side by side, masked where a chain has fewer.

    As official, there are always as many, with zeros (`pad_templates` in data/msa_pairing.py); None for a count of 0.
    blank: the residue type there.
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
        if (own := entity.raw.templates) is not None:
            for name in ("aatype", "positions", "mask"):
                getattr(joined, name)[: len(own), entity.columns] = getattr(own, name)[:, entity.place]
    for start, crop, first in zip(starts, crops, assembly.fixed):
        if first is not None:  # those of its entity follow it
            for name in ("aatype", "positions", "mask"):
                chain = getattr(joined, name)[:, start : start + len(crop)]
                chain[1:] = chain[:-1].copy()
                chain[0] = getattr(first, name)[0, crop]
    return joined


def as_one_chain(assembly: Assembly, config: SampleConfig, gap: int) -> RawExample:
    """Return an assembly as one chain, for a model of single chains: `residue_index` jumps by `gap` between chains.

    From 32 on, such a model takes residues to be far apart in the sequence (Algorithm 4).  The alignment is that of the
    assembly: the pairs first, then the rows of each entity with gaps under the others.  Templates of different chains
    stand side by side too, and nothing masks what the fixed ones say of each other (as Bennett et al. 2023).
    """
    crops = [np.arange(chain.length) for chain in assembly.chains]
    entities = read_entities(assembly, crops, config, 0, (), train=False)
    aatype, asym = np.zeros(assembly.length, np.uint8), np.repeat(np.arange(len(crops)), [*map(len, crops)])
    for entity in entities:
        aatype[entity.columns] = entity.raw.aatype[entity.place]
    index = (np.arange(assembly.length) + gap * asym).astype(np.int32)
    msa, deletions, _ = join_alignments(entities, assembly.length)
    shared = max(0 if entity.raw.templates is None else len(entity.raw.templates) for entity in entities)
    most = min(shared + any(one is not None for one in assembly.fixed), config.max_templates)
    templates = join_templates(assembly, entities, crops, most, GAP)
    return RawExample(
        assembly.name, aatype, index, msa, deletions.astype(np.uint16), profile_of(msa), templates=templates
    )


def alignment_features(
    entities: Sequence[EntityCrop],
    length: int,
    config: SampleConfig,
    seed: int,
    key: tuple[str | int, ...],
    passes: int,
) -> Arrays:
    """Return the alignment of `length` residues, and for each pass its centres, their masking and the extra rows.

    Where rows are missing, in the extra MSA or for `SampleConfig.pad`, a masked row is added that stands for them.
    """
    msa, deletions, owner = join_alignments(entities, length)
    profile = profile_of(msa)
    column = np.zeros(length, np.int64)
    for number, entity in enumerate(entities, 1):
        column[entity.columns] = number
    samples = []
    for index in range(passes):
        rng = keyed_rng(seed, *key, index, "clusters")
        # Row 0, the queries side by side, is always a centre, as by `cluster_bias_mask` of the official code.
        centres = with_query(np.arange(len(msa)), min(config.max_msa, len(msa)), rng)
        rest = all_but(centres, len(msa))
        extra = np.sort(rng.choice(rest, min(len(rest), config.max_extra), replace=False))
        masked, bert_mask = mask_msa(msa[centres], profile, config, keyed_rng(seed, *key, index, "mask"))
        # What a row of one entity has under the others is no residue to be restored.
        own = (owner[centres][:, None] == 0) | (owner[centres][:, None] == column)
        samples.append((centres, extra, masked, bert_mask & own, msa[centres]))
    mask = np.ones(msa.shape, np.uint8)
    names = ("centre_rows", "extra_rows", "masked_msa", "bert_mask", "true_msa")
    drawn = {name: np.stack(arrays) for name, arrays in zip(names, zip(*samples))}
    blank = len(msa)
    if config.pad or not drawn["extra_rows"].size:
        msa, deletions, mask = (np.concatenate([x, np.zeros_like(x[:1])]) for x in (msa, deletions, mask))
        if not drawn["extra_rows"].size:
            drawn["extra_rows"] = np.full((passes, 1), blank if config.empty_extra == "masked" else 0)
    if config.pad:
        for name, array in drawn.items():
            missing = (config.max_extra if name == "extra_rows" else config.max_msa) - array.shape[1]
            width = [(0, 0), (0, max(missing, 0)), *[(0, 0)] * (array.ndim - 2)]
            drawn[name] = np.pad(array, width, constant_values=blank if name.endswith("_rows") else 0)
    return {"alignment": msa, "alignment_deletions": deletions, "alignment_mask": mask, **drawn}


def join_alignments(entities: Sequence[EntityCrop], length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Put the alignments of entities side by side: rows uint8 [R, N], deletions int16 [R, N], owners int64 [R].

    The owner of a row that stands alone is the number of its entity here, from 1; 0: a pair.
    """
    paired, alone = len(entities[0].paired), [len(entity.alone) for entity in entities]
    owner = np.repeat(np.arange(len(entities) + 1), [paired, *alone])
    blocks: list[tuple[np.ndarray, np.ndarray]] = []
    column, width = np.empty(length, np.int64), 0  # of each residue in the blocks side by side
    for number, entity in enumerate(entities, 1):
        row = np.full(len(owner), -1)
        row[:paired], row[owner == number] = entity.paired, entity.alone
        msa, deletions = entity.raw.msa[row], np.minimum(entity.raw.deletions[row], MOST_DELETIONS).astype(np.int16)
        msa[row < 0], deletions[row < 0] = GAP, 0
        blocks.append((msa, deletions))
        column[entity.columns] = width + entity.place
        width += len(entity.residues)
    msa, deletions = (np.concatenate(arrays, 1).take(column, 1) for arrays in zip(*blocks))
    return msa, deletions, owner


def all_but(rows: np.ndarray, depth: int) -> np.ndarray:
    """Return the indices below `depth` that are not in `rows`: int64, ascending."""
    left = np.ones(depth, bool)
    left[rows] = False
    return np.flatnonzero(left)


def copy_features(assembly: Assembly, entities: Sequence[EntityCrop], length: int, least: float) -> Arrays:
    """Return the atoms of the crop's residues in every copy of their entity, and the resolution; {} without atoms.

    least: residues of a prediction with a lower confidence are masked.
    """
    chains = {entity.number: np.flatnonzero(assembly.entity_id == entity.number).tolist() for entity in entities}
    copies = max(map(len, chains.values()))
    positions, mask = np.zeros((copies, length, 37, 3), np.float32), np.zeros((copies, length, 37), np.uint8)
    for entity in entities:
        for copy, chain in enumerate(chains[entity.number]):
            atoms = assembly.chains[chain].atoms(entity.residues, least)
            if atoms is None:
                return {}
            moved = move(atoms[0], assembly.operators, chain) * atoms[1][..., None]
            positions[copy, entity.columns], mask[copy, entity.columns] = moved[entity.place], atoms[1][entity.place]
    return {
        "copy_atom_positions": positions,
        "copy_atom_mask": mask,
        "resolution": np.array(entities[0].raw.resolution or 0.0, np.float32),  # 0: AlphaFold2's value for none (NMR)
    }
