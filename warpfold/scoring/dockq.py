"""Compute DockQ of one interface: two predicted chains against two reference chains (Basu & Wallner 2016).

DockQ is the mean of three terms between 0 and 1: the fraction of the reference's contacts that the prediction
reproduces (fnat), and the deviations of the residues near the interface (iRMSD) and of the smaller chain (LRMSD).
The definitions are those of version 2 (Mirabello & Wallner 2024), which measures each pair of chains separately.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from warpfold.data.structure.chain import Chain
from warpfold.geometry.residue import ATOM_ORDER
from warpfold.scoring import metrics

# Largest distance in angstrom between heavy atoms of residues in contact (CAPRI), and of interface residues, whose
# backbones the iRMSD superposes.
CONTACT, INTERFACE = 5.0, 10.0
# RMSD in angstrom at which a term is 1/2.
IRMSD_HALF, LRMSD_HALF = 1.5, 8.5
BACKBONE = np.array([ATOM_ORDER[name] for name in ("N", "CA", "C", "O")])

Chains = Mapping[str, Chain]
# Two chains of one structure, or a predicted chain and a reference chain.
Pair = tuple[str, str]
Array = np.ndarray


@dataclass(frozen=True)
class ResiduePairs:
    """Pairs of nearby residues of two chains: indices int64 [K, 2], distances in angstrom [K]."""

    indices: Array
    distance: Array

    def within(self, limit: float) -> Array:
        """Select the pairs that are nearer than `limit`, int64 [k, 2]."""
        return self.indices[self.distance < limit]


def residue_pairs(a: Chain, b: Chain, atoms_a: Array, atoms_b: Array, within: float) -> ResiduePairs:
    """Find residues of two chains with selected atoms nearer than `within`; atoms_a, atoms_b: bool [N, 37]."""
    residues_a, residues_b = np.nonzero(atoms_a)[0], np.nonzero(atoms_b)[0]
    keys, distances = [np.zeros(0, np.int64)], [np.zeros(0)]
    for i, j, distance in metrics.near_pairs(a.positions[atoms_a], b.positions[atoms_b], within):
        keys.append(residues_a[i] * len(b.sequence) + residues_b[j])
        distances.append(distance)
    return nearest_residues(np.concatenate(keys), np.concatenate(distances), len(b.sequence))


def nearest_residues(keys: Array, distances: Array, width: int) -> ResiduePairs:
    """Reduce pairs of atoms to distinct pairs of residues with their shortest distance.

    keys [P]: the residues i, j of each pair of atoms as i * width + j. distances [P].
    """
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    first = np.flatnonzero(np.diff(keys, prepend=-1))
    shortest = np.minimum.reduceat(distances[order], first) if len(first) else distances
    return ResiduePairs(np.stack(np.divmod(keys[first], width), -1), shortest)


def contacts(chains: Chains) -> dict[Pair, ResiduePairs]:
    """Find the residues within 10 Å (heavy atoms) of all pairs of chains that are in contact (5 Å)."""
    near = {}
    for a, b in itertools.combinations(chains, 2):
        pairs = residue_pairs(chains[a], chains[b], chains[a].mask > 0, chains[b].mask > 0, INTERFACE)
        if len(pairs.within(CONTACT)):
            near[a, b] = pairs
    return near


@dataclass(frozen=True, kw_only=True)
class Docked:
    """DockQ of an interface and its terms.

    fnat: fraction of the reference's contacts that the prediction has. fnonnat: fraction of the prediction's contacts
    that the reference does not have. irmsd, lrmsd: angstrom, infinite if no backbone atoms are paired.
    """

    dockq: float
    fnat: float
    fnonnat: float
    irmsd: float
    lrmsd: float


class Docking:
    """Measures interfaces under any mapping of the chains, with a cache of results.

    pairs: (predicted, reference) chain names -> paired residues [K, 2], for all chains that may correspond. As in the
    published program, residues are paired only if they are the same amino acid. Contacts of unpaired residues count as
    missed.
    """

    def __init__(self, predicted: Chains, reference: Chains, pairs: Mapping[Pair, Array]) -> None:
        self.predicted, self.reference = predicted, reference
        self.native = contacts(reference)
        self.touching = contacts(predicted)
        self._pairs = pairs
        self._counterparts: dict[Pair, Array] = {}
        self._backbones: dict[Pair, tuple[Array, Array, Array]] = {}
        self._superposed: dict[Pair, tuple[Array, Array]] = {}
        self._measured: dict[tuple[Pair, Pair], Docked] = {}

    def receptor(self, interface: Pair) -> str:
        """Select the chain that LRMSD superposes: the one with more observed residues, the second on a tie."""
        first, second = (np.count_nonzero(self.reference[name].mask.any(-1)) for name in interface)
        return interface[0] if first > second else interface[1]

    def measure(self, interface: Pair, chains: Pair) -> Docked:
        """Compare an interface of the reference with the predicted chains that are mapped to its chains."""
        key = (interface, chains)
        if key not in self._measured:
            self._measured[key] = self._measure(interface, chains)
        return self._measured[key]

    def _measure(self, interface: Pair, chains: Pair) -> Docked:
        a, b = chains
        first, second = zip(chains, interface)
        near = self.native[interface]
        native = near.within(CONTACT)
        first_counterpart, second_counterpart = self._counterpart(first), self._counterpart(second)
        # Number the reference's contacts by the predicted residues, if both residues have counterparts.
        width = len(self.predicted[b].sequence)
        i, j = first_counterpart[native[:, 0]], second_counterpart[native[:, 1]]
        native_keys = (i * width + j)[(i >= 0) & (j >= 0)]
        if (b, a) in self.touching:
            model = self.touching[b, a].within(CONTACT)[:, ::-1]
        elif (a, b) in self.touching:
            model = self.touching[a, b].within(CONTACT)
        else:
            model = np.zeros((0, 2), np.int64)
        model = model[np.isin(model[:, 0], first_counterpart) & np.isin(model[:, 1], second_counterpart)]
        shared = int(np.isin(native_keys, model[:, 0] * width + model[:, 1]).sum())
        fnat = shared / len(native)
        has_counterparts = (first_counterpart[near.indices[:, 0]] >= 0) & (second_counterpart[near.indices[:, 1]] >= 0)
        irmsd = self._interface_rmsd(first, second, near.indices[has_counterparts])
        receptor, ligand = (first, second) if self.receptor(interface) == first[1] else (second, first)
        lrmsd = self._ligand_rmsd(receptor, ligand)
        scaled = 1 / (1 + (irmsd / IRMSD_HALF) ** 2), 1 / (1 + (lrmsd / LRMSD_HALF) ** 2)
        return Docked(
            dockq=(fnat + sum(scaled)) / 3,  # Basu & Wallner 2016, eq. 1 and 2
            fnat=fnat,
            fnonnat=1 - shared / len(model) if len(model) else 0.0,
            irmsd=irmsd,
            lrmsd=lrmsd,
        )

    def _counterpart(self, key: Pair) -> Array:
        """Map each residue of a reference chain to the predicted one of the same amino acid, -1 for none."""
        if key not in self._counterparts:
            p, r = key
            sequence = self.predicted[p].sequence
            counterpart = np.full(len(self.reference[r].sequence), -1, np.int64)
            for i, j in self._pairs[key].tolist():
                if sequence[i] == self.reference[r].sequence[j]:
                    counterpart[j] = i
            self._counterparts[key] = counterpart
        return self._counterparts[key]

    def _backbone(self, key: Pair) -> tuple[Array, Array, Array]:
        """Collect the paired backbone atoms of two chains: predicted, true [K, 3], and the reference's residues [K]."""
        if key not in self._backbones:
            counterpart = self._counterpart(key)
            j = np.flatnonzero(counterpart >= 0)
            a, b = self.predicted[key[0]], self.reference[key[1]]
            in_a, in_b = np.ix_(counterpart[j], BACKBONE), np.ix_(j, BACKBONE)
            both = (a.mask[in_a] > 0) & (b.mask[in_b] > 0)
            self._backbones[key] = a.positions[in_a][both], b.positions[in_b][both], j[np.nonzero(both)[0]]
        return self._backbones[key]

    def _interface_rmsd(self, first: Pair, second: Pair, near: Array) -> float:
        """Compute the RMSD of the interface's backbone after its own superposition; near: residues [K, 2]."""
        mobile, target = [], []
        for key, residues in ((first, near[:, 0]), (second, near[:, 1])):
            predicted, truth, residue = self._backbone(key)
            is_near = np.isin(residue, residues)
            mobile.append(predicted[is_near])
            target.append(truth[is_near])
        rmsd = metrics.rmsd(np.concatenate(mobile), np.concatenate(target))
        return float("inf") if np.isnan(rmsd) else rmsd

    def _ligand_rmsd(self, receptor: Pair, ligand: Pair) -> float:
        """Compute the RMSD of the ligand's backbone after superposition of the receptor's."""
        if receptor not in self._superposed:
            self._superposed[receptor] = metrics.superpose(*self._backbone(receptor)[:2])
        rotation, translation = self._superposed[receptor]
        predicted, truth, _ = self._backbone(ligand)
        if not len(truth) or not len(self._backbone(receptor)[0]):
            return float("inf")
        error = predicted.astype(np.float64) @ rotation.T + translation - truth
        return float(np.sqrt(np.mean(np.sum(error**2, -1))))
