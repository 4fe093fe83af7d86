"""Make the features of an assembly: crop it, pair rows, read only what is used, put the chains side by side.

The alignment has the pairs first, then the rows of each entity that stand alone, with gaps under the other entities
(AlphaFold-Multimer, sec. 2.4).  What is random is drawn here; the clusters are made in the model (model/clusters.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from warpfold.batch import Arrays
from warpfold.data.example.pairing import pair_rows
from warpfold.data.example.raw_example import Assembly, Example, RawExample, Templates, profile_of
from warpfold.data.features.choose import SampleConfig, choose_templates, delete_blocks, with_query
from warpfold.data.features.crop import crop_assembly, move
from warpfold.data.features.labels import atom_masks
from warpfold.data.features.msa import mask_msa
from warpfold.data.features.templates import template_features
from warpfold.geometry.residue import GAP
from warpfold.keyed import keyed_rng

MOST_DELETIONS = np.iinfo(np.int16).max  # the feature made of them differs from its limit by less than 0.0001 there


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
    joined = join_templates(entities, len(asym), config.max_templates)
    aatype, residue_index = np.zeros(len(asym), np.uint8), np.zeros(len(asym), np.int32)
    for entity in entities:
        aatype[entity.columns] = entity.raw.aatype[entity.place]
        residue_index[entity.columns] = entity.raw.residue_index[entity.place]
    truth = copy_features(assembly, entities, len(asym))
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
        **atom_masks(aatype),
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


def join_templates(entities: Sequence[EntityCrop], length: int, count: int) -> Templates | None:
    """Return `count` templates of an assembly: template t of every chain side by side, masked where a chain has fewer.

    As official, there are always as many, with zeros (`pad_templates` in data/msa_pairing.py); None for a count of 0.
    """
    if not count:
        return None
    joined = Templates(
        np.zeros((count, length), np.uint8),
        np.zeros((count, length, 37, 3), np.float32),
        np.zeros((count, length, 37), np.uint8),
        ("",) * count,
        np.zeros(count, np.float32),
    )
    for entity in entities:
        if (own := entity.raw.templates) is not None:
            for name in ("aatype", "positions", "mask"):
                getattr(joined, name)[: len(own), entity.columns] = getattr(own, name)[:, entity.place]
    return joined


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
        centres, extra = draw_rows(len(msa), config, keyed_rng(seed, *key, index, "clusters"))
        masked, bert_mask = mask_msa(msa[centres], profile, config, keyed_rng(seed, *key, index, "mask"))
        # What a row of one entity has under the others is no residue to be restored.
        own = (owner[centres][:, None] == 0) | (owner[centres][:, None] == column)
        samples.append((centres, extra, masked, bert_mask & own, msa[centres]))
    mask = np.ones(msa.shape, np.uint8)
    names = ("centre_rows", "extra_rows", "masked_msa", "bert_mask", "true_msa")
    drawn = {name: np.stack(arrays) for name, arrays in zip(names, zip(*samples))}
    if config.pad or not drawn["extra_rows"].size:
        blank = len(msa)
        msa, deletions, mask = (np.concatenate([x, np.zeros_like(x[:1])]) for x in (msa, deletions, mask))
        drawn = fill_rows(drawn, blank if config.empty_extra == "masked" else 0, blank, config)
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


def draw_rows(depth: int, config: SampleConfig, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw the centres among `depth` rows, and the rows of the extra MSA among the others: int64, ascending.

    Row 0, the queries side by side, is always a centre, as by `cluster_bias_mask` of the official code.
    """
    centres = with_query(np.arange(depth), min(config.max_msa, depth), rng)
    rest = all_but(centres, depth)
    return centres, np.sort(rng.choice(rest, min(len(rest), config.max_extra), replace=False))


def all_but(rows: np.ndarray, depth: int) -> np.ndarray:
    """Return the indices below `depth` that are not in `rows`: int64, ascending."""
    left = np.ones(depth, bool)
    left[rows] = False
    return np.flatnonzero(left)


def fill_rows(drawn: Arrays, extra: int, blank: int, config: SampleConfig) -> Arrays:
    """Return what was drawn with a row of the extra MSA where there is none, and padded to the sizes of `config.pad`.

    extra: the row that stands for an empty extra MSA; blank: the masked row, which the padding names.
    """
    if not drawn["extra_rows"].size:
        drawn = {**drawn, "extra_rows": np.full((len(drawn["extra_rows"]), 1), extra)}
    if not config.pad:
        return drawn
    filled = {}
    for name, array in drawn.items():
        missing = (config.max_extra if name == "extra_rows" else config.max_msa) - array.shape[1]
        width = [(0, 0), (0, max(missing, 0)), *[(0, 0)] * (array.ndim - 2)]
        filled[name] = np.pad(array, width, constant_values=blank if name.endswith("_rows") else 0)
    return filled


def copy_features(assembly: Assembly, entities: Sequence[EntityCrop], length: int) -> Arrays:
    """Return the atoms of the crop's residues in every copy of their entity, and the resolution; {} without atoms."""
    chains = {entity.number: np.flatnonzero(assembly.entity_id == entity.number).tolist() for entity in entities}
    copies = max(map(len, chains.values()))
    positions, mask = np.zeros((copies, length, 37, 3), np.float32), np.zeros((copies, length, 37), np.uint8)
    for entity in entities:
        for copy, chain in enumerate(chains[entity.number]):
            atoms = assembly.chains[chain].atoms(entity.residues)
            if atoms is None:
                return {}
            moved = move(atoms[0], assembly.operators, chain) * atoms[1][..., None]
            positions[copy, entity.columns], mask[copy, entity.columns] = moved[entity.place], atoms[1][entity.place]
    return {
        "copy_atom_positions": positions,
        "copy_atom_mask": mask,
        "resolution": np.array(entities[0].raw.resolution or 0.0, np.float32),  # 0: AlphaFold2's value for none (NMR)
    }
