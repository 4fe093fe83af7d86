"""Score the interfaces of a predicted complex without a truth: ipTM, ipSAE, pDockQ, pDockQ2, LIS, contacts, clashes.

The definitions are those of Dunbrack's ipsae.py (2025), which includes pDockQ (Bryant et al. 2022), pDockQ2 (Zhu et al.
2023) and LIS (Kim et al. 2024). Every chain is treated as a protein. All functions use NumPy and read the aligned
errors in blocks of rows, so they need no second array of all pairs of residues.
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

# Aligned error in angstrom below which ipSAE and LIS count a pair of residues.
IPSAE_CUTOFFS = (10.0, 15.0)
LIS_CUTOFF = 12.0
# Largest distance in angstrom between beta carbons (alpha carbons of glycine) in contact.
PDOCKQ_CONTACT = 8.0
# Residues with heavy atoms nearer than this to another chain belong to the interface, in angstrom.
INTERFACE = 8.0
# Overlap of van der Waals radii in angstrom beyond which two atoms clash (Supp. 1.9.11, eq. 46).
CLASH_OVERLAP = 1.5
# Rows of aligned errors that are read at a time.
BLOCK = 256
CA, CB, SG = (ATOM_ORDER[name] for name in ("CA", "CB", "SG"))
RADIUS = np.array([VDW_RADIUS[name[0]] for name in ATOM_TYPES])

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class PairScore:
    """The scores of two chains, a and b. Scores of aligned errors are None if there are no aligned errors.

    The suffix `_ab` stands for errors of b's residues in a's frames, `_ba` for the reverse. The score without a suffix
    is the maximum of both, for LIS their mean.
    iptm: ipTM of the two chains alone (`chain_pair_iptm`). ipsae, ipsae15: aligned errors below 10 and 15 angstrom.
    ipsae_d0chn: d0 from all residues of both chains. ipsae_d0dom: d0 from the residues that count in any frame.
    pae_interaction: mean aligned error between all residues of the two chains, both directions. interface_pae: the same
    over residue pairs with heavy atoms nearer than 8 angstrom, None if there are none. interface_plddt: mean over the
    residues of these pairs, 0 to 100. contacts: residue pairs with heavy atoms nearer than 5 angstrom. clashes: pairs
    of atoms that overlap by more than 1.5 angstrom.
    """

    chains: tuple[str, str]
    iptm: float | None
    ipsae: float | None
    ipsae_ab: float | None
    ipsae_ba: float | None
    ipsae15: float | None
    ipsae15_ab: float | None
    ipsae15_ba: float | None
    ipsae_d0chn: float | None
    ipsae_d0dom: float | None
    pdockq: float
    pdockq2: float | None
    pdockq2_ab: float | None
    pdockq2_ba: float | None
    lis: float | None
    lis_ab: float | None
    lis_ba: float | None
    pae_interaction: float | None
    interface_pae: float | None
    interface_plddt: float | None
    contacts: int
    clashes: int


def chain_pair_scores(
    pae: Array | None,
    plddt: Array,
    positions: Array,
    mask: Array,
    asym_id: Array,
    ids: Sequence[str],
    pair_iptm: Array | None = None,
) -> list[PairScore]:
    """Score all pairs of chains of a complex with N residues and K chains.

    pae: aligned errors in angstrom, [N frames, N residues]. plddt: [N], 0 to 100. positions: [N, 37, 3]. mask: [N, 37].
    asym_id: [N], ascending, each residue's chain as a 1-based index into ids. ids: [K] chain names. pair_iptm: [K, K].
    """
    starts = np.searchsorted(asym_id, np.arange(1, len(ids) + 2)).tolist()
    spans = [slice(*span) for span in pairwise(starts)]
    pair_scores = []
    for i, j in combinations(range(len(ids)), 2):
        a, b = spans[i], spans[j]
        near, distance, clashes = _contacts(positions, mask, a, b)
        m, n = beta_contacts(positions, mask, a, b)
        mean_plddt = float(np.concatenate([plddt[a][np.unique(m)], plddt[b][np.unique(n)]]).mean()) if len(m) else 0.0
        interface_plddts = [plddt[span][np.unique(near[:, side])] for side, span in enumerate((a, b))]
        scores: dict[str, float | None] = {}
        interface_pae = None
        if pae is not None:
            ab, ba = pae[a, b], pae[b, a]
            for name, cutoff in zip(("ipsae", "ipsae15"), IPSAE_CUTOFFS):
                directions = ipsae(ab, cutoff), ipsae(ba, cutoff)
                scores |= _both_directions(name, *(direction.best for direction in directions))
                if cutoff == IPSAE_CUTOFFS[0]:
                    scores["ipsae_d0chn"] = max(direction.d0chn for direction in directions)
                    scores["ipsae_d0dom"] = max(direction.d0dom for direction in directions)
            scores |= _both_directions("pdockq2", pdockq2(ab[m, n], mean_plddt), pdockq2(ba[n, m], mean_plddt))
            lis_ab, lis_ba = lis(ab), lis(ba)
            scores |= _both_directions("lis", lis_ab, lis_ba) | {"lis": (lis_ab + lis_ba) / 2}
            scores["pae_interaction"] = (_mean(ab) + _mean(ba)) / 2
            if len(near):
                x, y = near.T
                interface_pae = (_mean(ab[x, y]) + _mean(ba[y, x])) / 2
        else:
            directed = [f"{name}{way}" for name in ("ipsae", "ipsae15", "pdockq2", "lis") for way in ("", "_ab", "_ba")]
            scores = dict.fromkeys((*directed, "ipsae_d0chn", "ipsae_d0dom", "pae_interaction"))
        pair_scores.append(
            PairScore(
                chains=(ids[i], ids[j]),
                iptm=None if pair_iptm is None else float(pair_iptm[i, j]),
                pdockq=pdockq(len(m), mean_plddt),
                interface_pae=interface_pae,
                interface_plddt=float(np.concatenate(interface_plddts).mean(dtype=np.float64)) if len(near) else None,
                contacts=int((distance < CONTACT).sum()),
                clashes=clashes,
                **scores,
            )
        )
    return pair_scores


def _both_directions(name: str, ab: float, ba: float) -> dict[str, float | None]:
    return {name: max(ab, ba), f"{name}_ab": ab, f"{name}_ba": ba}


def _mean(errors: Array) -> float:
    return float(errors.mean(dtype=np.float64))


@dataclass(frozen=True)
class Ipsae:
    """ipSAE of the residues of one chain in the N frames of another.

    per_frame: [N]. counted: [N], residues below the cutoff in each frame. residues: residues of both chains that count
    in any frame. best, d0chn, d0dom: the score of the best frame with each definition of d0.
    """

    per_frame: Array
    counted: Array
    residues: int
    best: float
    d0chn: float
    d0dom: float


def ipsae(errors: Array, cutoff: float) -> Ipsae:
    """Compute ipSAE of aligned errors in angstrom, [N frames of one chain, M residues of the other].

    The score of a frame is the mean of 1 / (1 + (e / d0)^2) over the residues with an error e below the cutoff. d0
    depends on the number of these residues, of all residues (d0chn), or of residues that count in any frame (d0dom).
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
        rows_of_block = slice(start, start + BLOCK)
        squares = errors[rows_of_block].astype(np.float64)
        near = squares < cutoff
        squares *= squares
        for score, d0 in zip(scores, distances):
            terms = near / (1 + squares / d0[rows_of_block, None] ** 2)
            score[rows_of_block] = terms.sum(1) / np.maximum(counted[rows_of_block], 1)
    best, d0chn, d0dom = scores.max(1, initial=0.0).tolist()
    return Ipsae(scores[0], counted, residues, best, d0chn, d0dom)


def ipsae_d0(residues: Array) -> Array:
    """Compute the aligned error in angstrom at which a term is 1/2, at least 1 (as in ipsae.py)."""
    return np.maximum(1.0, 1.24 * np.cbrt(residues - 15) - 1.8)


def pdockq(contacts: int, plddt: float) -> float:
    """Compute pDockQ from the number of beta-carbon contacts and the mean pLDDT of residues in contact; 0 if none."""
    if not contacts:
        return 0.0
    return 0.724 / (1 + math.exp(-0.052 * (plddt * math.log10(contacts) - 152.611))) + 0.018


def pdockq2(errors: Array, plddt: float) -> float:
    """Compute pDockQ2 from the aligned errors of beta-carbon contacts and the mean pLDDT of residues in contact."""
    if not len(errors):
        return 0.0
    x = plddt * float(np.mean(1 / (1 + (errors.astype(np.float64) / 10) ** 2)))
    return 1.31 / (1 + math.exp(-0.075 * (x - 84.733))) + 0.005


def lis(errors: Array) -> float:
    """Compute LIS of aligned errors [N, M]: the mean of (12 - e) / 12 over errors e < 12 angstrom; 0 if none."""
    total, count = 0.0, 0
    for start in range(0, len(errors), BLOCK):
        block = errors[start : start + BLOCK]
        near = block[block < LIS_CUTOFF]
        total, count = total + float((LIS_CUTOFF - near.astype(np.float64)).sum()), count + near.size
    return total / LIS_CUTOFF / count if count else 0.0


def _contacts(positions: Array, mask: Array, a: slice, b: slice) -> tuple[Array, Array, int]:
    """Find residue pairs with heavy atoms nearer than `INTERFACE`: indices [K, 2], distances [K], number of clashes.

    Two SG atoms form a disulfide bond and never clash.
    """
    (row_a, atom_a), (row_b, atom_b) = np.nonzero(mask[a]), np.nonzero(mask[b])
    xyz_a, xyz_b = positions[a][row_a, atom_a], positions[b][row_b, atom_b]
    keys, distances, clashes = [np.zeros(0, np.int64)], [np.zeros(0)], 0
    width = b.stop - b.start
    for i, j, distance in metrics.near_pairs(xyz_a, xyz_b, INTERFACE):
        keys.append(row_a[i] * width + row_b[j])
        distances.append(distance)
        disulfide = (atom_a[i] == SG) & (atom_b[j] == SG)
        overlap = RADIUS[atom_a[i]] + RADIUS[atom_b[j]] - distance
        clashes += int(((overlap > CLASH_OVERLAP) & ~disulfide).sum())
    near = nearest_residues(np.concatenate(keys), np.concatenate(distances), width)
    return near.indices, near.distance, clashes


def beta_contacts(positions: Array, mask: Array, a: slice, b: slice) -> tuple[Array, Array]:
    """Find residues of two chains whose beta carbons are at most 8 angstrom apart; returns indices [n], [n]."""
    residues, points = list[Array](), list[Array]()
    for span in (a, b):
        atom = np.where(mask[span][:, CB] > 0, CB, CA)
        observed = np.flatnonzero(mask[span][np.arange(len(atom)), atom] > 0)
        residues.append(observed)
        points.append(positions[span][observed, atom[observed]])
    # near_pairs excludes the limit itself, but here a distance of exactly 8 counts.
    limit = math.nextafter(PDOCKQ_CONTACT, math.inf)
    pairs = [(i, j) for i, j, _ in metrics.near_pairs(points[0], points[1], limit)]
    m, n = (np.concatenate([np.zeros(0, np.int64), *(pair[side] for pair in pairs)]) for side in (0, 1))
    return residues[0][m], residues[1][n]


def rmsd_to_given(
    predicted: Mapping[str, Chain], given: Mapping[str, Chain], target: Collection[str], binder: Collection[str]
) -> dict[str, float | None]:
    """Compute Cα RMSDs of a predicted complex to a given one with the same residues, in angstrom.

    rmsd: the binder after superposition of the target, the usual filter of designs; without a target, the binder after
    its own superposition. binder_rmsd, target_rmsd: each after its own superposition. An RMSD is None if the given
    complex lacks the Cα atoms.
    """
    predicted_target, given_target = _paired_ca(predicted, given, target)
    predicted_binder, given_binder = _paired_ca(predicted, given, binder)
    rmsds: dict[str, float | None] = {
        "rmsd": None,
        "binder_rmsd": metrics.rmsd(predicted_binder, given_binder) if len(given_binder) else None,
        "target_rmsd": metrics.rmsd(predicted_target, given_target) if len(given_target) else None,
    }
    if not target:
        return rmsds | {"rmsd": rmsds["binder_rmsd"]}
    if len(given_target) and len(given_binder):
        rotation, translation = metrics.superpose(predicted_target, given_target)
        error = predicted_binder @ rotation.T + translation - given_binder
        rmsds["rmsd"] = float(np.sqrt(np.mean(np.sum(error**2, -1))))
    return rmsds


def _paired_ca(predicted: Mapping[str, Chain], given: Mapping[str, Chain], ids: Collection[str]) -> tuple[Array, Array]:
    """Collect the Cα of chains `ids` that both complexes have: two arrays [N, 3], float64."""
    pairs: list[tuple[Array, Array]] = [(np.zeros((0, 3)), np.zeros((0, 3)))]
    for id in ids:
        if id in given:
            a, b = predicted[id], given[id]
            both = (a.mask[:, CA] > 0) & (b.mask[:, CA] > 0)
            pairs.append((a.positions[both, CA], b.positions[both, CA]))
    predicted_ca, given_ca = (np.concatenate(side).astype(np.float64) for side in zip(*pairs))
    return predicted_ca, given_ca
