"""Make the features of an assembly: crop, pair, read only what is used, put the chains side by side.

The alignment has the pairs of rows first, then the rows of each entity that stand alone, with gaps under the other
entities (AlphaFold-Multimer, sec. 2.4).  What is random is drawn here; the clusters are made in the model
(model/clusters.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from warpfold.batch import Arrays
from warpfold.data.example.assembly import Assembly, Example
from warpfold.data.example.pairing import Pairing, pair_rows
from warpfold.data.example.raw_example import RawExample, Templates, profile_of
from warpfold.data.features.choose import SampleConfig, choose_templates, delete_blocks, keyed_rng
from warpfold.data.features.crop import crop_assembly, move
from warpfold.data.features.labels import atom_masks
from warpfold.data.features.msa import mask_msa
from warpfold.data.features.templates import template_features
from warpfold.geometry.residue import GAP

APART = 128  # residues between two spans of a chain that are read one by one, not together
MOST_DELETIONS = np.iinfo(np.int16).max  # the deletion feature is within 0.0001 of its limit there


@dataclass(frozen=True)
class Rows:
    """The alignment rows that are used of E entities.

    pairs: int64 [P, E], the row of each entity in each pair, -1 for none; the queries first.  alone: for each entity
    the rows that stand below, int64, ascending.
    """

    pairs: np.ndarray
    alone: list[np.ndarray]


def assembly_features(
    assembly: Assembly, config: SampleConfig, seed: int, key: tuple[str | int, ...], passes: int, train: bool
) -> Arrays:
    """Return the model's input for an assembly, as `make_features` does for one chain (its arguments)."""

    def rng(*purpose: str | int) -> np.random.Generator:
        return keyed_rng(seed, *key, *purpose)

    crops = crop_assembly(assembly, config, rng("crop")) if train else whole(assembly)
    entity = assembly.entity_id - 1
    firsts = [assembly.chains[int(np.flatnonzero(entity == number)[0])] for number in range(entity.max() + 1)]
    rows = choose_rows(firsts, config, rng("blocks") if train else None)
    templates = [choose_templates(c.templates_count, config.max_templates, rng("templates", number) if train else None)
                 for number, c in enumerate(firsts)]  # fmt: skip
    used = [np.unique(np.concatenate([crops[chain] for chain in np.flatnonzero(entity == e)])) for e in range(len(firsts))]
    read = [
        read_residues(chain, residues, used_rows(rows, number), templates[number])
        for number, (chain, residues) in enumerate(zip(firsts, used))
    ]
    # Where each residue of the crop lies: its chain, and its place in what was read of its entity.
    chain = np.repeat(np.arange(len(crops)), [len(crop) for crop in crops])
    place = np.concatenate([np.searchsorted(used[e], crop) for e, crop in zip(entity, crops)])
    aatype = np.concatenate([read[e].aatype[np.searchsorted(used[e], crop)] for e, crop in zip(entity, crops)])
    columns = [np.flatnonzero(entity[chain] == number) for number in range(len(firsts))]
    features: Arrays = {
        "aatype": aatype,
        "residue_index": np.concatenate(
            [read[e].residue_index[np.searchsorted(used[e], crop)] for e, crop in zip(entity, crops)]
        ),
        "seq_mask": np.ones(len(chain), np.uint8),
        "asym_id": chain + 1,
        "entity_id": assembly.entity_id[chain],
        "sym_id": assembly.sym_id[chain],
        "target_feat": np.eye(22, dtype=np.float32)[aatype.astype(np.int64) + 1],
        **atom_masks(aatype),
    }
    return features
