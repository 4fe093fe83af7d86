"""Score the interfaces of a predicted complex without a truth: ipTM, ipSAE, pDockQ, pDockQ2, LIS, contacts, clashes.

NumPy only.  Definitions are those of Dunbrack's ipsae.py (2025), which has pDockQ (Bryant et al. 2022), pDockQ2 (Zhu et
al. 2023) and LIS (Kim et al. 2024) too; every chain counts as a protein.  Aligned errors are read in blocks of rows: no
second array of all pairs of residues is made.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np

from warpfold.data.structure.chain import Chain
from warpfold.geometry.residue import ATOM_ORDER, ATOM_TYPES, VDW_RADIUS
from warpfold.scoring import metrics
from warpfold.scoring.dockq import CONTACT, nearest_residues

CUTOFFS = (10.0, 15.0)  # angstrom of aligned error, below which ipSAE counts a pair
LIS_CUTOFF = 12.0
PDOCKQ_CONTACT = 8.0  # angstrom between beta carbons (alpha of glycine)
NEAR = 8.0  # angstrom: residues whose heavy atoms are nearer to another chain than this belong to the interface
CLASH_OVERLAP = 1.5  # angstrom that two atoms may overlap before it counts (Supp. 1.9.11, eq. 46)
BLOCK = 256  # rows of aligned errors that are read at a time
CA, CB, SG = (ATOM_ORDER[name] for name in ("CA", "CB", "SG"))
RADIUS = np.array([VDW_RADIUS[name[0]] for name in ATOM_TYPES])

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class PairScore:
    """What is known of two chains, a and b.  A score of aligned errors is None without them.

    Errors of b's residues in a's frames are `_ab`, those of a's in b's `_ba`; without either it is the larger of both,
    and of LIS the mean.
    """

    chains: tuple[str, str]
    iptm: float | None  # of these two alone, as `chain_pair_iptm`
    ipsae: float | None  # errors below 10 angstrom
    ipsae_ab: float | None
    ipsae_ba: float | None
    ipsae15: float | None  # ... below 15
    ipsae15_ab: float | None
    ipsae15_ba: float | None
    ipsae_d0chn: float | None  # with d0 of all residues of both chains, not of those that count
    ipsae_d0dom: float | None  # with d0 of the residues that count in any frame
    pdockq: float
    pdockq2: float | None
    pdockq2_ab: float | None
    pdockq2_ba: float | None
    lis: float | None
    lis_ab: float | None
    lis_ba: float | None
    pae_interaction: float | None  # mean error over all residues of the two, of both directions
    # ... over pairs of residues that have heavy atoms nearer than 8 angstrom; None: no such.
    interface_pae: float | None
    interface_plddt: float | None  # mean over the residues of these pairs, 0 to 100
    contacts: int  # pairs of residues that have heavy atoms nearer than 5 angstrom
    clashes: int  # pairs of atoms that overlap by more than 1.5 angstrom


def chain_pair_scores(
    pae: Array | None,
    plddt: Array,
    positions: Array,
    mask: Array,
    asym_id: Array,
    ids: Sequence[str],
    pair_iptm: Array | None = None,
) -> list[PairScore]:
    """Score each two chains of a complex of N residues, in their order.

    pae [N, N] angstrom, row = frame; plddt [N] 0 to 100; positions [N, 37, 3]; mask [N, 37]; asym_id [N]: each
    residue's place in `ids` [K], from 1, in ascending order; pair_iptm [K, K].
    """
    starts = np.searchsorted(asym_id, np.arange(1, len(ids) + 2)).tolist()
    spans = [slice(*span) for span in pairwise(starts)]
    found = []
    for i, j in combinations(range(len(ids)), 2):
        a, b = spans[i], spans[j]
        near, distance, clashes = _contacts(positions, mask, a, b)
        m, n = beta_contacts(positions, mask, a, b)
        mean_plddt = float(np.concatenate([plddt[a][np.unique(m)], plddt[b][np.unique(n)]]).mean()) if len(m) else 0.0
        chosen = [plddt[span][np.unique(near[:, side])] for side, span in enumerate((a, b))]
        scores: dict[str, float | None] = {}
        interface_pae = None
        if pae is not None:
            ab, ba = pae[a, b], pae[b, a]
            for name, cutoff in zip(("ipsae", "ipsae15"), CUTOFFS):
                ways = ipsae(ab, cutoff), ipsae(ba, cutoff)
                scores |= _both(name, *(one.best for one in ways))
                if cutoff == CUTOFFS[0]:
                    scores["ipsae_d0chn"] = max(one.d0chn for one in ways)
                    scores["ipsae_d0dom"] = max(one.d0dom for one in ways)
            scores |= _both("pdockq2", pdockq2(ab[m, n], mean_plddt), pdockq2(ba[n, m], mean_plddt))
            of_ab, of_ba = lis(ab), lis(ba)
            scores |= _both("lis", of_ab, of_ba) | {"lis": (of_ab + of_ba) / 2}
            scores["pae_interaction"] = (_mean(ab) + _mean(ba)) / 2
            if len(near):
                x, y = near.T
                interface_pae = (_mean(ab[x, y]) + _mean(ba[y, x])) / 2
        else:
            ways_of = [f"{name}{way}" for name in ("ipsae", "ipsae15", "pdockq2", "lis") for way in ("", "_ab", "_ba")]
            scores = dict.fromkeys((*ways_of, "ipsae_d0chn", "ipsae_d0dom", "pae_interaction"))
        found.append(
            PairScore(
                chains=(ids[i], ids[j]),
                iptm=None if pair_iptm is None else float(pair_iptm[i, j]),
                pdockq=pdockq(len(m), mean_plddt),
                interface_pae=interface_pae,
                interface_plddt=float(np.concatenate(chosen).mean(dtype=np.float64)) if len(near) else None,
                contacts=int((distance < CONTACT).sum()),
                clashes=clashes,
                **scores,
            )
        )
    return found


def _both(name: str, ab: float, ba: float) -> dict[str, float | None]:
    return {name: max(ab, ba), f"{name}_ab": ab, f"{name}_ba": ba}


def _mean(errors: Array) -> float:
    return float(errors.mean(dtype=np.float64))


@dataclass(frozen=True)
class Ipsae:
    """What the errors of M residues of one chain say in the N frames of another; each score that of the best frame.

    per_frame [N], with counted [N] residues each; residues: those of both chains that count in any frame.
    """

    per_frame: Array
    counted: Array
    residues: int
    best: float
    d0chn: float
    d0dom: float


def ipsae(errors: Array, cutoff: float) -> Ipsae:
    """Return ipSAE of aligned errors [N, M], angstrom: frames of one chain, residues of the other.

    Of each frame the mean of 1 / (1 + (e / d0)^2) over the residues whose error e is below the cutoff: d0 follows from
    how many these are, from the residues of both chains (d0chn), or from those that count in any frame (d0dom).
    """
    rows, columns = errors.shape
    counted, reached = np.zeros(rows, np.int64), np.zeros(columns, bool)
    for start in range(0, rows, BLOCK):
        near = errors[start : start + BLOCK] < cutoff
        counted[start : start + BLOCK] = near.sum(1)
        reached |= near.any(0)
    residues = int((counted > 0).sum() + reached.sum())
    scores = np.zeros((3, rows))
    distances = ipsae_d0(counted), ipsae_d0(np.full(rows, rows + columns)), ipsae_d0(np.full(rows, residues))
    for start in range(0, rows, BLOCK):
        some = slice(start, start + BLOCK)
        squares = errors[some].astype(np.float64)
        near = squares < cutoff
        squares *= squares
        for score, d0 in zip(scores, distances):
            score[some] = (near / (1 + squares / d0[some, None] ** 2)).sum(1) / np.maximum(counted[some], 1)
    best, d0chn, d0dom = scores.max(1, initial=0.0).tolist()
    return Ipsae(scores[0], counted, residues, best, d0chn, d0dom)


def ipsae_d0(residues: Array) -> Array:
    """Return the error that counts half among so many residues, angstrom: at least 1, as ipsae.py has it."""
    return np.maximum(1.0, 1.24 * np.cbrt(np.maximum(residues, 26) - 15) - 1.8)


def pdockq(contacts: int, plddt: float) -> float:
    """Return pDockQ of so many contacts of beta carbons; plddt: mean over the residues in contact.  0 without any."""
    if not contacts:
        return 0.0
    return 0.724 / (1 + math.exp(-0.052 * (plddt * math.log10(contacts) - 152.611))) + 0.018


def pdockq2(errors: Array, plddt: float) -> float:
    """Return pDockQ2 from the aligned errors of the contacts of beta carbons, and pLDDT as of `pdockq`."""
    if not len(errors):
        return 0.0
    x = plddt * float(np.mean(1 / (1 + (errors.astype(np.float64) / 10) ** 2)))
    return 1.31 / (1 + math.exp(-0.075 * (x - 84.733))) + 0.005


def lis(errors: Array) -> float:
    """Return LIS of aligned errors [N, M]: the mean of (12 - e) / 12 over those below 12 angstrom; 0 without any."""
    total, count = 0.0, 0
    for start in range(0, len(errors), BLOCK):
        some = errors[start : start + BLOCK]
        near = some[some < LIS_CUTOFF]
        total, count = total + float((LIS_CUTOFF - near.astype(np.float64)).sum()), count + near.size
    return total / LIS_CUTOFF / count if count else 0.0


def _contacts(positions: Array, mask: Array, a: slice, b: slice) -> tuple[Array, Array, int]:
    """Return pairs of residues of two chains with heavy atoms nearer than `NEAR` [K, 2], how near, and the clashes.

    Two SG do not clash, as in disulfides.
    """
    (row_a, atom_a), (row_b, atom_b) = np.nonzero(mask[a]), np.nonzero(mask[b])
    xyz_a, xyz_b = positions[a][row_a, atom_a], positions[b][row_b, atom_b]
    keys, distances, clashes = [np.zeros(0, np.int64)], [np.zeros(0)], 0
    width = b.stop - b.start
    for i, j, distance in metrics.near_pairs(xyz_a, xyz_b, NEAR):
        keys.append(row_a[i] * width + row_b[j])
        distances.append(distance)
        disulfide = (atom_a[i] == SG) & (atom_b[j] == SG)
        overlap = RADIUS[atom_a[i]] + RADIUS[atom_b[j]] - distance
        clashes += int(((overlap > CLASH_OVERLAP) & ~disulfide).sum())
    near = nearest_residues(np.concatenate(keys), np.concatenate(distances), width)
    return near.indices, near.distance, clashes


def beta_contacts(positions: Array, mask: Array, a: slice, b: slice) -> tuple[Array, Array]:
    """Return the residues [n], [n] of two chains whose beta carbons are 8 angstrom apart or nearer."""
    places, points = list[Array](), list[Array]()
    for span in (a, b):
        atom = np.where(mask[span][:, CB] > 0, CB, CA)
        place = np.flatnonzero(mask[span][np.arange(len(atom)), atom] > 0)
        places.append(place)
        points.append(positions[span][place, atom[place]])
    within = math.nextafter(PDOCKQ_CONTACT, math.inf)  # 8 itself counts
    pairs = [(i, j) for i, j, _ in metrics.near_pairs(points[0], points[1], within)]
    m, n = (np.concatenate([np.zeros(0, np.int64), *(pair[side] for pair in pairs)]) for side in (0, 1))
    return places[0][m], places[1][n]


def rmsd_to_given(
    predicted: Mapping[str, Chain], given: Mapping[str, Chain], target: Collection[str], binder: Collection[str]
) -> dict[str, float | None]:
    """Compare the Cα of a predicted complex with those of a given one, angstrom; chains have the same residues in both.

    rmsd: of the binder after superposition of the target, as designs are filtered; without a target, of the binder
    superposed itself.  binder_rmsd, target_rmsd: each superposed itself.  None where the given complex has no Cα.
    """
    (of_target, true_target), (of_binder, true_binder) = (
        _paired_ca(predicted, given, some) for some in (target, binder)
    )
    found: dict[str, float | None] = {
        "rmsd": None,
        "binder_rmsd": metrics.rmsd(of_binder, true_binder) if len(true_binder) else None,
        "target_rmsd": metrics.rmsd(of_target, true_target) if len(true_target) else None,
    }
    if not target:
        return found | {"rmsd": found["binder_rmsd"]}
    if len(true_target) and len(true_binder):
        rotation, translation = metrics.superpose(of_target, true_target)
        error = of_binder @ rotation.T + translation - true_binder
        found["rmsd"] = float(np.sqrt(np.mean(np.sum(error**2, -1))))
    return found


def _paired_ca(predicted: Mapping[str, Chain], given: Mapping[str, Chain], ids: Collection[str]) -> tuple[Array, Array]:
    """Return the Cα [N, 3] that both have of some chains, float64."""
    pairs: list[tuple[Array, Array]] = [(np.zeros((0, 3)), np.zeros((0, 3)))]
    for id in ids:
        if id in given:
            one, other = predicted[id], given[id]
            both = (one.mask[:, CA] > 0) & (other.mask[:, CA] > 0)
            pairs.append((one.positions[both, CA], other.positions[both, CA]))
    ours, theirs = (np.concatenate(side).astype(np.float64) for side in zip(*pairs))
    return ours, theirs
