"""Map predicted chains to reference chains: by sequence, and among copies of one protein by the interfaces.

Copies of one protein may have any names and any order. The best mapping has the highest sum of DockQ over the
interfaces of the reference. If there are few mappings, all of them are measured. Otherwise candidates come from
superpositions of single chains and from growing a mapping along the interfaces. The superposition breaks ties.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from warpfold.data.structure.chain import Chain
from warpfold.errors import UserError
from warpfold.geometry.residue import ATOM_ORDER
from warpfold.scoring import metrics
from warpfold.scoring.dockq import Array, Chains, Docking, Pair

CA = ATOM_ORDER["CA"]
# Fraction of the shorter sequence. Chains with less in common are different proteins.
MIN_IDENTITY = 0.3
# The same for chains whose residue numbers match: a redesigned sequence keeps little of the original. Unrelated
# sequences share 6 %, and 50 residues share 15 % by chance once in 200 times.
MIN_IDENTITY_NUMBERED = 0.15
# Residue numbers decide the pairing if they pair this fraction of the observed residues of both chains.
MIN_NUMBERED = 0.95
# An alignment in another register overrules the numbers if this fraction of the shorter chain is identical.
SHIFTED_IDENTITY = 0.9
# Chains with this fraction of the best identity are copies, so their positions decide.
SAME_PROTEIN = 0.9
# All mappings are measured up to this number, which is that of 7 copies.
MAX_EXHAUSTIVE = 5040
# Beyond it, this many candidates from superpositions are measured.
MAX_CANDIDATES = 32
# Budget of all superpositions together. Larger complexes use every second, third ... residue.
MAX_DISTANCES = 20_000_000

# Reference chain -> predicted chain.
Assignment = dict[str, str]


def pair_residues(a: Chain, b: Chain) -> Array:
    """Pair residues that have atoms in both chains, by position, number or alignment: int64 [K, 2].

    Residues of equal sequences correspond by position. Otherwise numbers decide if they pair 95 % of the observed
    residues of both chains, even if the amino acids differ, because a redesigned sequence keeps its numbers. Only an
    alignment in another register with 90 % identity overrules the numbers, because it indicates the same protein with
    an offset. If the numbers pair fewer residues, they decide only if they pair as many equal residues as the
    alignment does, for example on which side of a gap a repeated residue is.
    """
    observed_a, observed_b = (np.asarray(chain.mask.any(-1)) for chain in (a, b))

    def observed(pairs: Array) -> tuple[Array, int]:
        both = pairs[observed_a[pairs[:, 0]] & observed_b[pairs[:, 1]]]
        return both, count_equal(a, b, both)

    if a.sequence == b.sequence:
        return observed(np.arange(len(a.sequence))[:, None].repeat(2, axis=1))[0]
    index_b = {number: j for j, number in enumerate(b.author_numbers) if number}
    numbered, equal = observed(
        np.array([(i, index_b[x]) for i, x in enumerate(a.author_numbers) if x in index_b], np.int64).reshape(-1, 2)
    )
    shorter, longer = sorted((observed_a.sum(), observed_b.sum()))
    # No alignment pairs more equal residues than the shorter chain has.
    if equal == shorter:
        return numbered
    aligned, aligned_equal = observed(_align(a.sequence, b.sequence))
    if len(numbered) >= MIN_NUMBERED * longer:
        is_shifted = aligned_equal > equal and aligned_equal >= SHIFTED_IDENTITY * shorter
        return aligned if is_shifted else numbered
    return numbered if equal >= aligned_equal and len(numbered) >= len(aligned) else aligned


@lru_cache(maxsize=1024)
def _align(a: str, b: str) -> Array:
    return metrics.align(a, b)


def count_equal(a: Chain, b: Chain, pairs: Array) -> int:
    """Count the paired residues that are the same amino acid."""
    return sum(a.sequence[i] == b.sequence[j] for i, j in pairs.tolist())


def with_ca(a: Chain, b: Chain, pairs: Array) -> Array:
    """Select the pairs of residues that have Ca in both chains."""
    return pairs[(a.mask[pairs[:, 0], CA] > 0) & (b.mask[pairs[:, 1], CA] > 0)]


def similar_chains(predicted: Chains, reference: Chains) -> dict[Pair, Array]:
    """Find all (predicted, reference) chains that may correspond by sequence, with their paired residues [K, 2].

    Raises UserError if there are none.
    """
    pairs, identity, min_identity = {}, {}, {}
    for p, a in predicted.items():
        for r, b in reference.items():
            pairs[p, r] = pair_residues(a, b)
            lengths = [int(np.sum(chain.mask[:, CA] > 0)) for chain in (a, b)]
            identity[p, r] = count_equal(a, b, with_ca(a, b, pairs[p, r])) / max(1, min(lengths))
            have_numbers = all(a.author_numbers[i] == b.author_numbers[j] != "" for i, j in pairs[p, r].tolist())
            is_numbered = have_numbers and len(pairs[p, r]) >= MIN_NUMBERED * max(lengths)
            min_identity[p, r] = MIN_IDENTITY_NUMBERED if is_numbered else MIN_IDENTITY
    best = {r: max(identity[p, r] for p in predicted) for r in reference}
    similar = {k: pairs[k] for k, v in identity.items() if v >= min_identity[k] and v >= SAME_PROTEIN * best[k[1]]}
    if not similar:
        highest = max(identity.values())
        p, r = next(iter(predicted)), next(iter(reference))
        raise UserError(
            f"no predicted chain resembles a reference chain (highest sequence identity {highest:.0%}). "
            f"Name the chains to compare them anyway: --chains {p}:{r}"
        )
    return similar


def named_chains(
    predicted: Chains, reference: Chains, chains: Mapping[str, str], called: Pair = ("the prediction", "the reference")
) -> dict[Pair, Array]:
    """Pair the residues of chains that the user named, predicted -> reference.

    called: names of the two structures for errors.
    Raises UserError if a chain does not exist or is named twice.
    """
    for structure, present, names in zip(called, (predicted, reference), ([*chains], [*chains.values()])):
        for name in names:
            if name not in present:
                raise UserError(f"{structure} has no protein chain {name}; it has {', '.join(present)}")
            if names.count(name) > 1:
                raise UserError(f"chain {name} of {structure} is named twice. Name each chain once")
    return {(p, r): pair_residues(predicted[p], reference[r]) for p, r in chains.items()}


def map_chains(docking: Docking, similar: Mapping[Pair, Array]) -> dict[str, str]:
    """Find the best mapping, predicted -> reference, among chains that are `similar` (see the module's docstring)."""
    superposed = _superpose_pairs(docking.predicted, docking.reference, similar)
    options: dict[str, list[str]] = {r: [p for p, other in similar if other == r] for _, r in similar}
    candidates = _all_mappings(options)
    if candidates is None:
        # Mappings grow from the pairs of the chain with most neighbours, on either side.
        hubs = [
            max(dict.fromkeys(names), key=lambda name: sum(name in pair for pair in touching))
            for names, touching in zip(zip(*similar), (docking.touching, docking.native))
        ]
        starts = [(p, r) for p, r in similar if p == hubs[0] or r == hubs[1]]
        grown = (_grow(docking, options, superposed, start) for start in starts)
        candidates = itertools.chain((s.mapped for s in superposed[:MAX_CANDIDATES]), grown)
    terms = superposed[0].terms
    residues = sum(len(b.sequence) for b in docking.reference.values())

    def quality(mapped: Assignment) -> float:
        pairs = ((pair, (mapped[pair[0]], mapped[pair[1]])) for pair in docking.native if {*pair} <= mapped.keys())
        # The superposition only decides between sums of DockQ that agree to rounding, hence the small weight.
        superposition = sum(terms[p, r] for r, p in mapped.items()) / residues
        return sum(docking.measure(*both).dockq for both in pairs) + 1e-6 * superposition

    best = max(candidates, key=quality)
    reference_of = {p: r for r, p in best.items()}
    return {p: reference_of[p] for p in docking.predicted if p in reference_of}


def _all_mappings(options: Mapping[str, list[str]]) -> Iterable[Assignment] | None:
    """Enumerate the mappings that leave out as few chains as possible; None if there are too many.

    options: the similar predicted chains of each reference chain. Enumeration needs groups of reference chains with
    equal options that no other group shares; otherwise the result is None.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for r, ps in options.items():
        groups.setdefault(tuple(ps), []).append(r)
    if len({p for ps in groups for p in ps}) < sum(map(len, groups.keys())):
        return None
    if math.prod(math.perm(max(len(ps), len(rs)), min(len(ps), len(rs))) for ps, rs in groups.items()) > MAX_EXHAUSTIVE:
        return None
    # Every chain of the smaller side of a group gets a chain of the larger side.
    per_group = (
        [dict(zip(rs, permutation)) for permutation in itertools.permutations(ps, len(rs))]
        if len(rs) <= len(ps)
        else [dict(zip(permutation, ps)) for permutation in itertools.permutations(rs, len(ps))]
        for ps, rs in groups.items()
    )
    return ({r: p for part in parts for r, p in part.items()} for parts in itertools.product(*per_group))


@dataclass(frozen=True)
class _Superposition:
    """The proximity of all similar chains after one predicted chain was superposed on one reference chain."""

    # Sum of the TM-score terms of each pair.
    terms: dict[Pair, float]
    # Greedy assignment of the nearest pairs, and the sum of their terms.
    mapped: Assignment
    fit: float


def _superpose_pairs(predicted: Chains, reference: Chains, similar: Mapping[Pair, Array]) -> list[_Superposition]:
    """Superpose every similar pair and assign the nearest chains; returns the distinct assignments, best fit first."""
    points = {}
    for (p, r), pairs in similar.items():
        i, j = with_ca(predicted[p], reference[r], pairs).T
        points[p, r] = (predicted[p].positions[i, CA].astype(np.float64), reference[r].positions[j, CA])
    stride = 1 + len(points) * sum(len(b) for _, b in points.values()) // MAX_DISTANCES
    mobile, target = (np.concatenate([both[side][::stride] for both in points.values()]) for side in (0, 1))
    counts = [len(b[::stride]) for _, b in points.values()]
    d0 = np.repeat([metrics.tm_d0(len(b)) for _, b in points.values()], counts)
    owner = np.repeat(np.arange(len(points)), counts)
    superpositions: dict[tuple[Pair, ...], _Superposition] = {}
    for seed, both in points.items():
        rotation, translation = metrics.superpose(*both)
        near = 1 / (1 + np.sum((mobile @ rotation.T + translation - target) ** 2, -1) / d0**2)
        terms = dict(zip(points, (stride * np.bincount(owner, near, minlength=len(points))).tolist()))
        mapped = _complete({seed[1]: seed[0]}, terms)
        fit = sum(terms[p, r] for r, p in mapped.items())
        key = tuple(sorted(mapped.items()))
        if key not in superpositions or fit > superpositions[key].fit:
            superpositions[key] = _Superposition(terms, mapped, fit)
    return sorted(superpositions.values(), key=lambda superposition: -superposition.fit)


def _complete(mapped: Assignment, terms: Mapping[Pair, float]) -> Assignment:
    """Complete a mapping greedily with the nearest pairs of unassigned chains."""
    mapped = dict(mapped)
    mapped_chains = set(mapped.values())
    for p, r in sorted(terms, key=lambda key: -terms[key]):
        if r not in mapped and p not in mapped_chains:
            mapped[r] = p
            mapped_chains.add(p)
    return mapped


def _grow(
    docking: Docking, options: Mapping[str, list[str]], superposed: list[_Superposition], start: Pair
) -> Assignment:
    """Grow a mapping along the interfaces, which also works if the predicted complex is bent or broken.

    The next reference chain is the one with most contacts to mapped chains. It is mapped to the predicted chain that
    adds most DockQ, among those that touch a neighbour's counterpart. If no predicted chain does, the reference chain
    is skipped, and the superposition assigns it at the end.
    """
    mapped = {start[1]: start[0]}
    skipped: set[str] = set()
    while True:
        pull = Counter[str]()
        for (a, b), near in docking.native.items():
            for mapped_chain, neighbour in ((a, b), (b, a)):
                if (
                    mapped_chain in mapped
                    and neighbour not in mapped
                    and neighbour not in skipped
                    and neighbour in options
                ):
                    pull[neighbour] += len(near.indices)
        if not pull:
            return _complete(mapped, superposed[0].terms)
        r = max(pull, key=lambda name: pull[name])
        neighbours = [mapped[x] for pair in docking.native if r in pair for x in pair if x in mapped]
        free = [p for p in options[r] if p not in mapped.values()]
        free = [p for p in free if any((p, n) in docking.touching or (n, p) in docking.touching for n in neighbours)]
        if free:
            mapped[r] = max(free, key=lambda p: _gain(docking, mapped, (p, r)))
        else:
            skipped.add(r)


def _gain(docking: Docking, mapped: Assignment, added: Pair) -> float:
    """Compute the increase of the sum of DockQ if a predicted and a reference chain are added to a mapping."""
    extended = {**mapped, added[1]: added[0]}
    interfaces = (pair for pair in docking.native if added[1] in pair and {*pair} <= extended.keys())
    return sum(docking.measure((a, b), (extended[a], extended[b])).dockq for a, b in interfaces)
