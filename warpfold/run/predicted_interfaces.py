"""Find where the chains of a predicted complex meet, and how sure the model is of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from warpfold.run.docking import residue_pairs
from warpfold.run.outputs import Prediction

NEAR = 8.0  # angstrom between heavy atoms of two residues that are in contact


@dataclass(frozen=True)
class Interface:
    """Two chains that meet: contacts are pairs of residues, one of each chain, with heavy atoms within 8 angstrom."""

    chains: tuple[str, str]
    contacts: int
    plddt: float  # the mean of all residues that have a contact, 0 to 100
    iptm: float | None  # of these two chains alone, 0 to 1; None without the PAE head


def find_interfaces(prediction: Prediction) -> list[Interface]:
    """Return the interfaces of a complex, in the order of its chains; a single chain has none."""
    found = []
    spans, chains = list(prediction.spans.values()), prediction.chains()
    for (i, one), (j, other) in combinations(enumerate(chains), 2):
        pairs = residue_pairs(one, other, one.mask > 0, other.mask > 0, NEAR).indices
        if not len(pairs):
            continue
        residues = [prediction.plddt[spans[k]][np.unique(pairs[:, side])] for side, k in enumerate((i, j))]
        matrix = prediction.chain_pair_iptm
        iptm = None if matrix is None else float(matrix[i, j])
        found.append(Interface((one.id, other.id), len(pairs), float(np.concatenate(residues).mean()), iptm))
    return found


def describe(interfaces: Sequence[Interface]) -> list[dict[str, object]]:
    """Return the interfaces as summary.json has them."""
    return [
        {
            "chains": list(one.chains),
            "iptm": None if one.iptm is None else round(one.iptm, 4),
            "plddt": round(one.plddt, 2),
            "contacts": one.contacts,
        }
        for one in interfaces
    ]
