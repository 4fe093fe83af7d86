"""Find where the chains of a predicted complex meet, and how sure the model is of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from warpfold.prediction.outputs import Prediction
from warpfold.scoring.dockq import CONTACT, residue_pairs

NEAR = 8.0  # angstrom: residues whose heavy atoms are nearer to another chain than this belong to the interface


@dataclass(frozen=True)
class Interface:
    """Two chains in contact: some of their residues have heavy atoms nearer than 5 angstrom to each other."""

    chains: tuple[str, str]
    contacts: int  # pairs of such residues
    plddt: float  # the mean of all residues with a heavy atom nearer than 8 angstrom to the other chain, 0 to 100
    iptm: float | None  # of these two chains alone, 0 to 1; None without the PAE head


def find_interfaces(prediction: Prediction) -> list[Interface]:
    """Return the interfaces of a complex, in the order of its chains; a single chain has none."""
    chains, spans, pairs = prediction.chains(), list(prediction.spans.values()), prediction.chain_pair_iptm
    found = []
    for (i, one), (j, other) in combinations(enumerate(chains), 2):
        near = residue_pairs(one, other, one.mask > 0, other.mask > 0, NEAR)
        if contacts := len(near.within(CONTACT)):
            plddt = [prediction.plddt[spans[k]][np.unique(near.indices[:, side])] for side, k in enumerate((i, j))]
            iptm = None if pairs is None else float(pairs[i, j])
            found.append(Interface((one.id, other.id), contacts, float(np.concatenate(plddt).mean()), iptm))
    return found


def describe(interfaces: Sequence[Interface]) -> list[dict[str, Any]]:
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
