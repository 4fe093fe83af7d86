"""Measure one interface: DockQ of two predicted chains against two chains of the reference (Basu & Wallner 2016).

DockQ is the mean of three terms, each from 0 to 1: the share of the reference's contacts that the prediction has
(fnat), and how well the residues near the interface (iRMSD) and the smaller chain (LRMSD) stand.  Definitions as in
version 2 (Mirabello & Wallner 2024), which measures each pair of chains in contact by itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from warpfold.data.structure.chain import Chain
from warpfold.geometry.residue import ATOM_ORDER
from warpfold.scoring import metrics

CONTACT = 5.0  # angstrom between heavy atoms of two residues that touch (CAPRI)
INTERFACE = 10.0  # ... of residues whose backbones the iRMSD superposes
IRMSD_HALF, LRMSD_HALF = 1.5, 8.5  # angstrom at which a term is 1/2
BACKBONE = np.array([ATOM_ORDER[name] for name in ("N", "CA", "C", "O")])

Chains = Mapping[str, Chain]
Pair = tuple[str, str]  # two chains of one structure; or a predicted chain and one of the reference
Array = np.ndarray


@dataclass(frozen=True)
class ResiduePairs:
    """Residues of two chains that are nearer than a limit: indices int64 [K, 2], distances in angstrom [K]."""

    indices: Array
    distance: Array

    def within(self, limit: float) -> Array:
        """Return the indices of those that are nearer than `limit`."""
        return self.indices[self.distance < limit]


def residue_pairs(a: Chain, b: Chain, atoms_a: Array, atoms_b: Array, within: float) -> ResiduePairs:
    """Return which residues of two chains are near: by the least distance between atoms of the masks [N, 37]."""
    residues_a, residues_b = np.nonzero(atoms_a)[0], np.nonzero(atoms_b)[0]
    keys, distances = [np.zeros(0, np.int64)], [np.zeros(0)]
    for i, j, distance in metrics.near_pairs(a.positions[atoms_a], b.positions[atoms_b], within):
        keys.append(residues_a[i] * len(b.sequence) + residues_b[j])
        distances.append(distance)
    return nearest_residues(np.concatenate(keys), np.concatenate(distances), len(b.sequence))


def nearest_residues(keys: Array, distances: Array, width: int) -> ResiduePairs:
    """Return each pair of residues once, with the least distance of its atoms.

    keys [P]: of each pair of atoms the pair of residues, as i * width + j.
    """
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    first = np.flatnonzero(np.diff(keys, prepend=-1))
    least = np.minimum.reduceat(distances[order], first) if len(first) else distances
    return ResiduePairs(np.stack(np.divmod(keys[first], width), -1), least)


def contacts(chains: Chains) -> dict[Pair, ResiduePairs]:
    """Return the residues of each two chains whose heavy atoms are nearer than 10 Å; pairs in the chains' order.

    Two chains without a contact, nearer than 5 Å, are left out.
    """
    names = list(chains)
    found = {}
    for x, a in enumerate(names):
        for b in names[x + 1 :]:
            one, other = chains[a], chains[b]
            near = residue_pairs(one, other, one.mask > 0, other.mask > 0, INTERFACE)
            if len(near.within(CONTACT)):
                found[a, b] = near
    return found


@dataclass(frozen=True, kw_only=True)
class Docked:
    """DockQ of an interface and its parts; an RMSD is infinite where no backbone atoms are paired."""

    dockq: float
    fnat: float  # share of the reference's contacts that the prediction has
    fnonnat: float  # share of the prediction's contacts that the reference has not
    irmsd: float  # angstrom
    lrmsd: float


class Docking:
    """Measures interfaces for any mapping of the chains, and remembers what it has measured.

    pairs: (predicted, reference) chain names -> paired residues [K, 2], for each two chains that may correspond.  As in
    the published program, only residues that are the same amino acid in both count as paired, and contacts of others
    count as missed.
    """

    def __init__(self, predicted: Chains, reference: Chains, pairs: Mapping[Pair, Array]) -> None:
        """Find the contacts of both."""
        self.predicted, self.reference = predicted, reference
        self.native = contacts(reference)
        self.touching = contacts(predicted)
        self._pairs = pairs
        self._places: dict[Pair, Array] = {}
        self._backbones: dict[Pair, tuple[Array, Array, Array]] = {}
        self._superposed: dict[Pair, tuple[Array, Array]] = {}
        self._measured: dict[tuple[Pair, Pair], Docked] = {}

    def receptor(self, interface: Pair) -> str:
        """Return the chain that LRMSD superposes: the one with more residues seen, of equal ones the second."""
        first, second = (np.count_nonzero(self.reference[name].mask.any(-1)) for name in interface)
        return interface[0] if first > second else interface[1]

    def measure(self, interface: Pair, chains: Pair) -> Docked:
        """Compare an interface of the reference with the predicted chains that stand for its two."""
        key = (interface, chains)
        if key not in self._measured:
            self._measured[key] = self._measure(interface, chains)
        return self._measured[key]

    def _measure(self, interface: Pair, chains: Pair) -> Docked:
        one, other = ((p, r) for p, r in zip(chains, interface))
        near = self.native[interface]
        native = near.within(CONTACT)
        place_one, place_other = self._place(one), self._place(other)
        # Contacts as numbers, in the prediction's residues; -1 where one of the two residues has no counterpart.
        width = len(self.predicted[chains[1]].sequence)
        i, j = place_one[native[:, 0]], place_other[native[:, 1]]
        wanted = np.where((i < 0) | (j < 0), -1, i * width + j)
        a, b = chains
        nobody = ResiduePairs(np.zeros((0, 2), np.int64), np.zeros(0))
        theirs = self.touching.get((a, b), nobody).within(CONTACT)
        if (b, a) in self.touching:
            theirs = self.touching[b, a].within(CONTACT)[:, ::-1]
        theirs = theirs[np.isin(theirs[:, 0], place_one) & np.isin(theirs[:, 1], place_other)]
        shared = int(np.isin(wanted, theirs[:, 0] * width + theirs[:, 1]).sum())
        fnat = shared / len(native)
        around = near.indices[(place_one[near.indices[:, 0]] >= 0) & (place_other[near.indices[:, 1]] >= 0)]
        irmsd = self._interface_rmsd(one, other, around)
        lrmsd = self._ligand_rmsd(one, other) if self.receptor(interface) == one[1] else self._ligand_rmsd(other, one)
        near_native = 1 / (1 + (irmsd / IRMSD_HALF) ** 2), 1 / (1 + (lrmsd / LRMSD_HALF) ** 2)
        return Docked(
            dockq=(fnat + sum(near_native)) / 3,  # Basu & Wallner 2016, eq. 1 and 2
            fnat=fnat,
            fnonnat=1 - shared / len(theirs) if len(theirs) else 0.0,
            irmsd=irmsd,
            lrmsd=lrmsd,
        )

    def _place(self, key: Pair) -> Array:
        """Return for each residue of a reference chain the predicted one of the same amino acid, -1 for none."""
        if key not in self._places:
            p, r = key
            sequence = self.predicted[p].sequence
            place = np.full(len(self.reference[r].sequence), -1, np.int64)
            for i, j in self._pairs[key].tolist():
                if sequence[i] == self.reference[r].sequence[j]:
                    place[j] = i
            self._places[key] = place
        return self._places[key]

    def _backbone(self, key: Pair) -> tuple[Array, Array, Array]:
        """Return the paired backbone atoms of two chains: predicted, true [K, 3], and the reference's residues [K]."""
        if key not in self._backbones:
            place = self._place(key)
            j = np.flatnonzero(place >= 0)
            a, b = self.predicted[key[0]], self.reference[key[1]]
            seen = (a.mask[np.ix_(place[j], BACKBONE)] > 0) & (b.mask[np.ix_(j, BACKBONE)] > 0)
            positions = a.positions[np.ix_(place[j], BACKBONE)][seen], b.positions[np.ix_(j, BACKBONE)][seen]
            self._backbones[key] = (*positions, j[np.nonzero(seen)[0]])
        return self._backbones[key]

    def _interface_rmsd(self, one: Pair, other: Pair, around: Array) -> float:
        """Return the RMSD of the backbone of the interface's residues, superposed on itself."""
        mobile, target = [], []
        for key, residues in ((one, around[:, 0]), (other, around[:, 1])):
            predicted, truth, residue = self._backbone(key)
            chosen = np.isin(residue, residues)
            mobile.append(predicted[chosen])
            target.append(truth[chosen])
        found = metrics.rmsd(np.concatenate(mobile), np.concatenate(target))
        return float("inf") if np.isnan(found) else found

    def _ligand_rmsd(self, receptor: Pair, ligand: Pair) -> float:
        """Return the RMSD of the ligand's backbone after superposition on the receptor's."""
        if receptor not in self._superposed:
            self._superposed[receptor] = metrics.superpose(*self._backbone(receptor)[:2])
        rotation, translation = self._superposed[receptor]
        predicted, truth, _ = self._backbone(ligand)
        if not len(truth) or not len(self._backbone(receptor)[0]):
            return float("inf")
        error = predicted.astype(np.float64) @ rotation.T + translation - truth
        return float(np.sqrt(np.mean(np.sum(error**2, -1))))
