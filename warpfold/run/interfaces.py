"""Find where the chains of a predicted complex meet, and how sure the model is of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from warpfold.geometry.residue import ATOM_ORDER
from warpfold.run.outputs import Prediction

NEAR = 8.0  # angstrom between heavy atoms of two residues that are in contact
AT_ONCE = 1 << 13  # pairs of residues whose atoms are compared with each other at a time


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
    for (i, (one, first)), (j, (other, second)) in combinations(enumerate(prediction.spans.items()), 2):
        atoms, mask = prediction.positions, prediction.mask
        a, b = contacts(atoms[first], mask[first], atoms[second], mask[second])
        if not len(a):
            continue
        plddt = np.concatenate([prediction.plddt[first][np.unique(a)], prediction.plddt[second][np.unique(b)]])
        pair = prediction.chain_pair_iptm
        found.append(Interface((one, other), len(a), float(plddt.mean()), None if pair is None else float(pair[i, j])))
    return found


def contacts(
    one: np.ndarray, one_mask: np.ndarray, other: np.ndarray, other_mask: np.ndarray, near: float = NEAR
) -> tuple[np.ndarray, np.ndarray]:
    """Return the pairs of residues of two chains that have heavy atoms within `near` angstrom of each other.

    Positions [N, 37, 3] and masks [N, 37] of the one, [M, 37, 3] and [M, 37] of the other -> indices [C] into N and M.
    """
    (a, a_center, a_reach), (b, b_center, b_reach) = _atoms(one, one_mask, 1e6), _atoms(other, other_mask, -1e6)
    pairs = []
    for i in range(len(a)):  # a loop over residues: all distances at once would be N x M
        distance = np.linalg.norm(b_center - a_center[i], axis=-1)
        j = np.flatnonzero(distance <= near + a_reach[i] + b_reach)
        pairs.append(np.stack([np.full(len(j), i), j]))
    candidates = np.concatenate(pairs, 1) if pairs else np.zeros((2, 0), np.int64)
    kept = [np.zeros((2, 0), np.int64)]
    for start in range(0, candidates.shape[1], AT_ONCE):
        i, j = candidates[:, start : start + AT_ONCE]
        squared = ((a[i][:, :, None] - b[j][:, None, :]) ** 2).sum(-1)
        kept.append(np.stack([i, j])[:, squared.min((1, 2)) <= near**2])
    i, j = np.concatenate(kept, 1)
    return i, j


def _atoms(positions: np.ndarray, mask: np.ndarray, far: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return each residue's atoms [N, 14, 3], those that it lacks at `far`, its CA [N, 3], and how far it reaches."""
    order = np.argsort(mask <= 0, axis=1, kind="stable")[:, :14]  # no residue has more than 14 heavy atoms
    there = np.take_along_axis(mask, order, 1) > 0
    atoms = np.take_along_axis(positions, order[..., None], 1).astype(np.float32)
    center = positions[:, ATOM_ORDER["CA"]].astype(np.float32)
    reach = np.where(there, np.linalg.norm(atoms - center[:, None], axis=-1), 0).max(1, initial=0)
    return np.where(there[..., None], atoms, np.float32(far)), center, np.where(there.any(1), reach, -np.inf)


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
