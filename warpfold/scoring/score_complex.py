"""Compare complexes: DockQ, interface lDDT, QS-score and contacts of every interface, under one mapping of the chains.

An interface is a pair of reference chains in contact: two residues with heavy atoms nearer than 5 Å. Missing parts of
the prediction count as wrong, so an interface with a chain that was not predicted scores 0.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from warpfold.geometry.residue import ATOM_ORDER
from warpfold.scoring import metrics
from warpfold.scoring.dockq import CONTACT, Array, Chains, Docking, Pair, ResiduePairs, residue_pairs

CA, CB = ATOM_ORDER["CA"], ATOM_ORDER["CB"]
# Bertoni et al. 2017, in angstrom: residues in contact have Cb nearer than QS_RADIUS. The weight of a contact is 1 up
# to QS_NEAR and then falls as a Gaussian.
QS_RADIUS = 12.0
QS_NEAR, QS_WIDTH = 5.0, 4.28


@dataclass(frozen=True, kw_only=True)
class InterfaceScore:
    """The scores of one interface of the reference, between 0 and 1.

    chains: of the reference. predicted: the chains mapped to them; None if one is missing, and all scores are 0.
    contacts: pairs of residues in contact in the reference. dockq, fnat, fnonnat, irmsd, lrmsd: see `dockq.Docked`;
    RMSDs in angstrom are None if no atoms are paired. receptor: the reference chain that LRMSD superposes, the one with
    more observed residues or, on a tie, the later one in the file. ilddt: interface lDDT, None for Ca-only structures.
    """

    chains: Pair
    predicted: Pair | None
    contacts: int
    dockq: float
    fnat: float
    fnonnat: float | None
    irmsd: float | None
    lrmsd: float | None
    receptor: str
    ilddt: float | None


@dataclass(frozen=True, kw_only=True)
class ComplexScore:
    """The scores of a complex, between 0 and 1; None if there is nothing to compare.

    dockq: mean over all interfaces of the reference. dockq_present: mean over the interfaces whose chains are both
    predicted (GlobalDockQ of the published program). ilddt: lDDT over pairs of atoms of different chains; missing
    chains count as wrong. qs_global: QS-score, the similarity of all contacts. qs_best: QS-score over the residues of
    both structures. ics: interface contact similarity, the F1 score of the contacts. ips: interface patch similarity,
    the Jaccard index of the residues in contact.
    Contacts between any two chains count: heavy atoms nearer than 5 Å for ics and ips, Cb nearer than 12 Å for the
    QS-score.
    """

    dockq: float | None
    dockq_present: float | None
    ilddt: float | None
    qs_global: float | None
    qs_best: float | None
    ics: float | None
    ips: float | None
    interfaces: tuple[InterfaceScore, ...]

    @property
    def missing(self) -> list[InterfaceScore]:
        """The interfaces with a chain that was not predicted."""
        return [interface for interface in self.interfaces if interface.predicted is None]

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain types for JSON."""
        return asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        """Format the scores of the complex as (label, value) rows."""
        if not self.interfaces:
            return [("interfaces", "none: no two chains of the reference touch")]
        count, missing = len(self.interfaces), self.missing
        lost = f"; the prediction lacks chains of {', '.join('-'.join(interface.chains) for interface in missing)}"
        present = f"; {_shown(self.dockq_present)} over the {count - len(missing)} whose chains are predicted"
        return [
            ("interfaces", f"{count} in the reference{lost if missing else ''}"),
            ("DockQ", f"{_shown(self.dockq)}{present if 0 < len(missing) < count else ''}"),
            ("interface lDDT", _shown(self.ilddt)),
            ("QS-score", f"{_shown(self.qs_global)} of all contacts, {_shown(self.qs_best)} of common residues"),
            ("contacts", f"ICS {_shown(self.ics)}, IPS {_shown(self.ips)}"),
        ]

    def table(self) -> list[tuple[str, ...]]:
        """Format the interfaces as rows of a table with the columns `HEADS`."""
        return [
            (
                "-".join(i.chains),
                "-".join(i.predicted) if i.predicted else "missing",
                str(i.contacts),
                *(_shown(value) for value in (i.dockq, i.fnat, i.irmsd, i.lrmsd, i.ilddt)),
            )
            for i in self.interfaces
        ]


HEADS = ("interface", "predicted", "contacts", "DockQ", "fnat", "iRMSD", "LRMSD", "ilDDT")


def compare_interfaces(
    docking: Docking, similar: Mapping[Pair, Array], mapping: Mapping[str, str], ilddt: Mapping[Pair, Array]
) -> ComplexScore:
    """Score all interfaces under a mapping, predicted -> reference.

    similar: (predicted, reference) -> paired residues [K, 2]. ilddt: the counts of `interface_lddt`, or empty to leave
    interface lDDT out.
    """
    predicted_of = {r: p for p, r in mapping.items()}
    interfaces = tuple(
        _score_interface(docking, (a, b), (predicted_of[a], predicted_of[b]), ilddt)
        if a in predicted_of and b in predicted_of
        else _score_interface(docking, (a, b), None, ilddt)
        for a, b in docking.native
    )
    numbers = _Residues(docking, similar, mapping)
    qs_global, qs_best = _qs_score(numbers)
    ics, ips = _contact_similarity(numbers, docking)
    return ComplexScore(
        dockq=_mean(interface.dockq for interface in interfaces),
        dockq_present=_mean(interface.dockq for interface in interfaces if interface.predicted),
        ilddt=_ratio(*sum(ilddt.values(), np.zeros(2))) if ilddt else None,
        qs_global=qs_global,
        qs_best=qs_best,
        ics=ics,
        ips=ips,
        interfaces=interfaces,
    )


def interface_lddt(
    predicted: Array, truth: Array, mask: Array, predicted_mask: Array, chain: Sequence[str]
) -> dict[Pair, Array]:
    """Count preserved pairs of atoms (mean over the tolerances) and all pairs, for each pair of chains: [2].

    Only pairs of atoms of different chains count (OpenStructure's ilDDT: radius 15 Å, tolerances 0.5, 1, 2 and 4 Å).
    chain [N]: the chain of each residue. The other arguments are those of `metrics.lddt`.
    """
    names = np.asarray(chain)
    counts = {}
    for a, b in itertools.combinations(dict.fromkeys(chain), 2):
        preserved, pairs = metrics.lddt_counts(
            predicted,
            truth,
            mask,
            predicted_mask,
            others=(names == b)[:, None],
            ours=(names == a)[:, None],
        )
        counts[a, b] = np.array([preserved.sum(), pairs.sum()])
    return counts


def _score_interface(
    docking: Docking, pair: Pair, predicted: Pair | None, ilddt: Mapping[Pair, Array]
) -> InterfaceScore:
    scores: dict[str, Any] = {"dockq": 0.0, "fnat": 0.0, "fnonnat": None, "irmsd": None, "lrmsd": None}
    if predicted:
        measured = asdict(docking.measure(pair, predicted))
        scores = {name: value if np.isfinite(value) else None for name, value in measured.items()}
    return InterfaceScore(
        chains=pair,
        predicted=predicted,
        contacts=len(docking.native[pair].within(CONTACT)),
        **scores,
        receptor=docking.receptor(pair),
        ilddt=_ratio(*ilddt[pair]) if pair in ilddt else None,
    )


class _Residues:
    """A numbering of the residues of both structures in which exactly the paired residues share a number.

    true, predicted: chain name -> numbers of its residues. paired: whether the residue of each number is in both.
    """

    def __init__(self, docking: Docking, similar: Mapping[Pair, Array], mapping: Mapping[str, str]) -> None:
        self.docking = docking
        self.true: dict[str, Array] = {}
        start = 0
        for name, chain in docking.reference.items():
            self.true[name] = start + np.arange(len(chain.sequence))
            start += len(chain.sequence)
        self.predicted: dict[str, Array] = {}
        self.paired = np.zeros(start + sum(len(chain.sequence) for chain in docking.predicted.values()), bool)
        for name, chain in docking.predicted.items():
            numbers = start + np.arange(len(chain.sequence))
            start += len(chain.sequence)
            if name in mapping:
                i, j = similar[name, mapping[name]].T
                numbers[i] = self.true[mapping[name]][j]
                self.paired[numbers[i]] = True
            self.predicted[name] = numbers

    def join(self, pairs: Mapping[Pair, ResiduePairs], numbers: Mapping[str, Array]) -> tuple[Array, Array]:
        """Collect the contacts of all chains as pairs of numbers [K, 2], the smaller first, and distances [K]."""
        joined = [np.zeros((0, 2), np.int64)]
        for (a, b), near in pairs.items():
            joined.append(np.stack([numbers[a][near.indices[:, 0]], numbers[b][near.indices[:, 1]]], -1))
        distances = np.concatenate([np.zeros(0), *(near.distance for near in pairs.values())])
        return np.sort(np.concatenate(joined), -1), distances


def _beta_contacts(chains: Chains) -> dict[Pair, ResiduePairs]:
    """Find the residues of all pairs of chains whose Cb (Ca of glycine) are nearer than 12 Å."""
    atoms = {}
    for name, chain in chains.items():
        atoms[name] = np.zeros(chain.mask.shape, bool)
        atoms[name][:, CB] = chain.mask[:, CB] > 0
        glycine = np.array([letter == "G" for letter in chain.sequence], bool)
        atoms[name][:, CA] = (chain.mask[:, CA] > 0) & glycine
    return {
        (a, b): residue_pairs(chains[a], chains[b], atoms[a], atoms[b], QS_RADIUS)
        for a, b in itertools.combinations(chains, 2)
    }


def _qs_score(numbers: _Residues) -> tuple[float | None, float | None]:
    """Compute QS-global and QS-best (Bertoni et al. 2017, as in OpenStructure).

    A contact of both structures scores its weight times 1 - |difference of the distances| / 12 Å. The weight of a
    contact of one structure only enters the denominator, in QS-best only if the other structure has both residues.
    """
    docking = numbers.docking
    true, distance = numbers.join(_beta_contacts(docking.reference), numbers.true)
    ours, our_distance = numbers.join(_beta_contacts(docking.predicted), numbers.predicted)
    shared = np.isin(_keys(true), _keys(ours)), np.isin(_keys(ours), _keys(true))
    order = np.argsort(_keys(true)[shared[0]]), np.argsort(_keys(ours)[shared[1]])
    both = np.stack([distance[shared[0]][order[0]], our_distance[shared[1]][order[1]]])
    weight = _qs_weight(both.min(0))
    score = np.sum(weight * (1 - np.abs(both[0] - both[1]) / QS_RADIUS))
    extra_all = extra_common = 0.0
    for pairs, lengths, in_both in ((true, distance, shared[0]), (ours, our_distance, shared[1])):
        extra = _qs_weight(lengths) * ~in_both
        extra_all += extra.sum()
        extra_common += extra[numbers.paired[pairs].all(-1)].sum()
    return _ratio(score, weight.sum() + extra_all), _ratio(score, weight.sum() + extra_common)


def _qs_weight(distance: Array) -> Array:
    return np.exp(-2 * (np.maximum(distance - QS_NEAR, 0) / QS_WIDTH) ** 2)


def _contact_similarity(numbers: _Residues, docking: Docking) -> tuple[float | None, float | None]:
    """Compute the F1 score of the contacts and the Jaccard index of the residues in contact (Lafita et al. 2018)."""
    sets = []
    for near, names in ((docking.native, numbers.true), (docking.touching, numbers.predicted)):
        pairs, distance = numbers.join(near, names)
        sets.append(pairs[distance < CONTACT])
    true, ours = sets
    shared = np.isin(_keys(true), _keys(ours)).sum()
    residues = np.intersect1d(true, ours), np.union1d(true, ours)
    return _ratio(2 * shared, len(true) + len(ours)), _ratio(len(residues[0]), len(residues[1]))


def _keys(pairs: Array) -> Array:
    return (pairs[:, 0] << 32) | pairs[:, 1]


def _mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return float(np.mean(values)) if values else None


def _ratio(part: float, whole: float) -> float | None:
    return float(part / whole) if whole else None


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
