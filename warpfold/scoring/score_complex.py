"""Compare complexes: DockQ, interface lDDT, QS-score and contacts of every interface, under one mapping of the chains.

An interface is two chains of the reference with a contact: heavy atoms of two residues nearer than 5 Å.  What the
prediction lacks counts as wrong: an interface whose chains are not both there scores 0.
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
QS_RADIUS = 12.0  # Bertoni et al. 2017: residues whose Cb are nearer than this are in contact
QS_NEAR, QS_WIDTH = 5.0, 4.28  # angstrom; the weight of a contact is 1 up to the first, then falls as a Gaussian


@dataclass(frozen=True, kw_only=True)
class InterfaceScore:
    """An interface of the reference: scores from 0 to 1, RMSDs in angstrom; those are None where nothing is paired."""

    chains: Pair  # of the reference
    predicted: Pair | None  # the chains that stand for them; None where the prediction lacks one: all scores are 0
    contacts: int  # pairs of residues in contact, of the reference
    dockq: float
    fnat: float  # share of the reference's contacts that the prediction has
    fnonnat: float | None  # share of the prediction's contacts that the reference has not
    irmsd: float | None
    lrmsd: float | None
    receptor: str  # the reference's chain that LRMSD superposes: the longer one, of equal ones the later in the file
    ilddt: float | None  # None for one with only Ca


@dataclass(frozen=True, kw_only=True)
class ComplexScore:
    """The interfaces of a prediction against those of a reference; scores from 0 to 1, None where nothing is compared.

    Means are over the interfaces of the reference.  Contacts in ics and ips are of heavy atoms nearer than 5 Å, those
    of the QS-score of Cb nearer than 12 Å, between any two chains.
    """

    dockq: float | None  # mean over all interfaces of the reference
    dockq_present: float | None  # over those whose chains are both predicted: the program's GlobalDockQ
    ilddt: float | None  # lDDT over pairs of atoms of different chains, chains that are missing counted as wrong
    qs_global: float | None  # QS-score: similarity of all contacts of both
    qs_best: float | None  # the same of the residues that both have
    ics: float | None  # interface contact similarity: F1 of the contacts
    ips: float | None  # interface patch similarity: shared residues in contact, of all (Jaccard)
    interfaces: tuple[InterfaceScore, ...]

    @property
    def missing(self) -> list[InterfaceScore]:
        """Return the interfaces that the prediction cannot have, since it lacks one of the chains."""
        return [one for one in self.interfaces if one.predicted is None]

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        """Return the lines of a table for people: what, value."""
        if not self.interfaces:
            return [("interfaces", "none: no two chains of the reference touch")]
        count, missing = len(self.interfaces), self.missing
        lost = f"; the prediction lacks chains of {', '.join('-'.join(one.chains) for one in missing)}"
        present = f"; {_shown(self.dockq_present)} over the {count - len(missing)} whose chains are predicted"
        return [
            ("interfaces", f"{count} in the reference{lost if missing else ''}"),
            ("DockQ", f"{_shown(self.dockq)}{present if 0 < len(missing) < count else ''}"),
            ("interface lDDT", _shown(self.ilddt)),
            ("QS-score", f"{_shown(self.qs_global)} of all contacts, {_shown(self.qs_best)} of common residues"),
            ("contacts", f"ICS {_shown(self.ics)}, IPS {_shown(self.ips)}"),
        ]

    def table(self) -> list[tuple[str, ...]]:
        """Return the interfaces as rows of a table for people, below `HEADS`."""
        return [
            (
                "-".join(one.chains),
                "-".join(one.predicted) if one.predicted else "missing",
                str(one.contacts),
                *(_shown(value) for value in (one.dockq, one.fnat, one.irmsd, one.lrmsd, one.ilddt)),
            )
            for one in self.interfaces
        ]


HEADS = ("interface", "predicted", "contacts", "DockQ", "fnat", "iRMSD", "LRMSD", "ilDDT")


def compare_interfaces(
    docking: Docking, similar: Mapping[Pair, Array], mapping: Mapping[str, str], ilddt: Mapping[Pair, Array]
) -> ComplexScore:
    """Measure all interfaces under a mapping, predicted -> reference.

    similar: (predicted, reference) -> paired residues [K, 2].  ilddt: for each two chains of the reference, how many
    pairs of atoms are preserved, and how many there are [2] (`interface_lddt`); empty where they are not compared.
    """
    stands = {r: p for p, r in mapping.items()}
    found = {(a, b): (stands[a], stands[b]) for a, b in docking.native if a in stands and b in stands}
    interfaces = tuple(_interface(docking, pair, found.get(pair), ilddt) for pair in docking.native)
    present = [one.dockq for one in interfaces if one.predicted]
    numbers = _Residues(docking, similar, mapping)
    qs_global, qs_best = _qs_score(numbers)
    ics, ips = _contact_similarity(numbers, docking)
    return ComplexScore(
        dockq=_mean([one.dockq for one in interfaces]),
        dockq_present=_mean(present),
        ilddt=_ratio(*np.sum(list(ilddt.values()), 0)) if ilddt else None,
        qs_global=qs_global,
        qs_best=qs_best,
        ics=ics,
        ips=ips,
        interfaces=interfaces,
    )


def interface_lddt(
    predicted: Array, truth: Array, mask: Array, predicted_mask: Array, chain: Sequence[str]
) -> dict[Pair, Array]:
    """Count the pairs of atoms of each two chains: preserved (mean over the tolerances), and all [2].

    As in `metrics.lddt`, of atoms [N, A, 3] whose residues belong to `chain` [N]; only pairs between the two chains
    count (OpenStructure's ilDDT: radius 15 Å, tolerances 0.5, 1, 2 and 4 Å).
    """
    names = np.asarray(chain)
    counts = {}
    for a, b in itertools.combinations(dict.fromkeys(chain), 2):
        kept, pairs = metrics.lddt_counts(
            predicted,
            truth,
            mask,
            predicted_mask,
            others=mask & (names == b)[:, None],
            ours=mask & (names == a)[:, None],
        )
        counts[a, b] = np.array([kept.sum(), pairs.sum()])
    return counts


def _interface(docking: Docking, pair: Pair, predicted: Pair | None, ilddt: Mapping[Pair, Array]) -> InterfaceScore:
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
    """Numbers the residues of both structures, so that paired ones have the same number and no others have."""

    def __init__(self, docking: Docking, similar: Mapping[Pair, Array], mapping: Mapping[str, str]) -> None:
        self.docking = docking
        self.true: dict[str, Array] = {}
        start = 0
        for name, chain in docking.reference.items():
            self.true[name] = start + np.arange(len(chain.sequence))
            start += len(chain.sequence)
        self.predicted: dict[str, Array] = {}
        self.paired = np.zeros(start, bool)  # of the reference's
        for name, chain in docking.predicted.items():
            numbers = start + np.arange(len(chain.sequence))
            start += len(chain.sequence)
            if name in mapping:
                i, j = similar[name, mapping[name]].T
                numbers[i] = self.true[mapping[name]][j]
                self.paired[numbers[i]] = True
            self.predicted[name] = numbers

    def common(self, number: Array) -> Array:
        """Return which residues are in both structures."""
        known = len(self.paired)
        return (number < known) & self.paired[np.minimum(number, known - 1)]

    def join(self, pairs: Mapping[Pair, ResiduePairs], numbers: Mapping[str, Array]) -> tuple[Array, Array]:
        """Return contacts of all chains as pairs of numbers [K, 2], the smaller first, and their distances [K]."""
        joined = [np.zeros((0, 2), np.int64)]
        for (a, b), near in pairs.items():
            joined.append(np.stack([numbers[a][near.indices[:, 0]], numbers[b][near.indices[:, 1]]], -1))
        distances = np.concatenate([np.zeros(0), *(near.distance for near in pairs.values())])
        return np.sort(np.concatenate(joined), -1), distances


def _beta_contacts(chains: Chains) -> dict[Pair, ResiduePairs]:
    """Return the residues of each two chains whose Cb (Ca of glycine) are nearer than 12 Å."""
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
    """Return QS-global and QS-best (Bertoni et al. 2017, as in OpenStructure).

    A contact in both structures counts its weight times 1 - |difference of the distances| / 12 Å; one that only one
    of them has counts against them: in QS-global always, in QS-best if the other has both residues.
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
        extra_common += extra[numbers.common(pairs).all(-1)].sum()
    return _ratio(score, weight.sum() + extra_all), _ratio(score, weight.sum() + extra_common)


def _qs_weight(distance: Array) -> Array:
    return np.exp(-2 * (np.maximum(distance - QS_NEAR, 0) / QS_WIDTH) ** 2)


def _contact_similarity(numbers: _Residues, docking: Docking) -> tuple[float | None, float | None]:
    """Return the F1 of contacts, and the Jaccard index of residues in contact (Lafita et al. 2018)."""
    sets = []
    for found, names in ((docking.native, numbers.true), (docking.touching, numbers.predicted)):
        pairs, distance = numbers.join(found, names)
        sets.append(pairs[distance < CONTACT])
    true, ours = sets
    shared = np.isin(_keys(true), _keys(ours)).sum()
    residues = np.intersect1d(true, ours), np.union1d(true, ours)
    return _ratio(2 * shared, len(true) + len(ours)), _ratio(len(residues[0]), len(residues[1]))


def _keys(pairs: Array) -> Array:
    return (pairs[:, 0] << 32) + pairs[:, 1]


def _mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return float(np.mean(values)) if values else None


def _ratio(part: float, whole: float) -> float | None:
    return float(part / whole) if whole else None


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
