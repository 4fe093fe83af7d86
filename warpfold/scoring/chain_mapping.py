"""Find which predicted chain stands for which chain of the reference: by sequence, and among copies by the interfaces.

Copies of one protein may have any names and any order.  The mapping is the one with the highest sum of DockQ over the
reference's interfaces: all are tried where they are few; else the most promising, found from superpositions of one
chain on another and by growing along the interfaces.  What DockQ leaves open, the superposition decides.
"""

import itertools
import math
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
MIN_IDENTITY = 0.3  # of the shorter sequence; below it two chains are different proteins
# Of chains whose numbers fit: a redesigned sequence keeps little of the original. Unrelated sequences share 6 %, and
# 50 residues share 15 % by chance once in 200 times.
MIN_IDENTITY_NUMBERED = 0.15
NUMBERED = 0.95  # of the observed residues of both chains: the share that numbers have to pair in order to decide
SHIFTED_IDENTITY = 0.9  # of the shorter chain: an alignment in another register that is this good overrules numbers
SAME_PROTEIN = 0.9  # chains this near to the best match are equally good, and position decides
EXHAUSTIVE = 5040  # mappings are all tried up to this number: 7 copies
PROMISING = 32  # where they are not, so many of those found by superposition are measured
DISTANCES = 20_000_000  # computed in all superpositions together; beyond it only every second, third ... residue counts

Mapped = dict[str, str]  # reference -> predicted


def pair_residues(a: Chain, b: Chain) -> Array:
    """Pair residues that have atoms in both chains, by position, number or alignment: int64 [K, 2].

    Residues of equal sequences correspond by position. Otherwise numbers decide if they pair 95 % of the observed
    residues of both chains, whatever the amino acids: a redesigned sequence keeps its numbers. Only an alignment in
    another register with 90 % identity overrules them: the same protein, numbered with an offset. Where numbers pair
    fewer residues, they decide if they pair as many equal ones as the alignment does, for example on which side of a
    gap a repeated residue stands.
    """
    seen_a, seen_b = (np.asarray(chain.mask.any(-1)) for chain in (a, b))

    def seen(pairs: Array) -> tuple[Array, int]:
        both = pairs[seen_a[pairs[:, 0]] & seen_b[pairs[:, 1]]]
        return both, count_equal(a, b, both)

    if a.sequence == b.sequence:
        return seen(np.arange(len(a.sequence))[:, None].repeat(2, axis=1))[0]
    place = {number: j for j, number in enumerate(b.author_numbers) if number}
    numbered, equal = seen(
        np.array([(i, place[x]) for i, x in enumerate(a.author_numbers) if x in place], np.int64).reshape(-1, 2)
    )
    if equal == min(seen_a.sum(), seen_b.sum()):  # no alignment fits better
        return numbered
    aligned, aligned_equal = seen(_align(a.sequence, b.sequence))
    if len(numbered) >= NUMBERED * max(seen_a.sum(), seen_b.sum()):
        is_shifted = aligned_equal > equal and aligned_equal >= SHIFTED_IDENTITY * min(seen_a.sum(), seen_b.sum())
        return aligned if is_shifted else numbered
    return numbered if equal >= aligned_equal and len(numbered) >= len(aligned) else aligned


@lru_cache(maxsize=1024)
def _align(a: str, b: str) -> Array:
    return metrics.align(a, b)


def count_equal(a: Chain, b: Chain, pairs: Array) -> int:
    """Count the paired residues that are the same amino acid."""
    return sum(a.sequence[i] == b.sequence[j] for i, j in pairs.tolist())


def with_ca(a: Chain, b: Chain, pairs: Array) -> Array:
    """Return the pairs of residues that have Ca in both chains."""
    return pairs[(a.mask[pairs[:, 0], CA] > 0) & (b.mask[pairs[:, 1], CA] > 0)]


def similar_chains(predicted: Chains, reference: Chains) -> dict[Pair, Array]:
    """Return for each predicted and each reference chain that may correspond, by sequence, their paired residues.

    Errors: UserError if there are none.
    """
    pairs, identity, least = {}, {}, {}
    for p, a in predicted.items():
        for r, b in reference.items():
            pairs[p, r] = pair_residues(a, b)
            lengths = [int(np.sum(chain.mask[:, CA] > 0)) for chain in (a, b)]
            identity[p, r] = count_equal(a, b, with_ca(a, b, pairs[p, r])) / max(1, min(lengths))
            have_numbers = all(a.author_numbers[i] == b.author_numbers[j] != "" for i, j in pairs[p, r].tolist())
            is_numbered = have_numbers and len(pairs[p, r]) >= NUMBERED * max(lengths)
            least[p, r] = MIN_IDENTITY_NUMBERED if is_numbered else MIN_IDENTITY
    best = {r: max(identity[p, r] for p in predicted) for r in reference}
    similar = {k: pairs[k] for k, v in identity.items() if v >= least[k] and v >= SAME_PROTEIN * best[k[1]]}
    if not similar:
        most = max(identity.values(), default=0.0)
        p, r = next(iter(predicted)), next(iter(reference))
        raise UserError(
            f"no chain of one is like a chain of the other (at best {most:.0%} of the residues are equal); "
            f"name the chains to compare them all the same, --chains {p}:{r}"
        )
    return similar


def named_chains(
    predicted: Chains, reference: Chains, chains: Mapping[str, str], called: Pair = ("the prediction", "the reference")
) -> dict[Pair, Array]:
    """Return the paired residues of chains that a user named, predicted -> reference.

    called: names of the two structures for errors.
    Errors: UserError if a chain does not exist, or is named twice.
    """
    for structure, found, names in zip(called, (predicted, reference), ([*chains], [*chains.values()])):
        for name in names:
            if name not in found:
                raise UserError(f"{structure} has no protein chain {name}; it has {', '.join(found)}")
            if names.count(name) > 1:
                raise UserError(f"chain {name} of {structure} is named twice; name each chain once")
    return {(p, r): pair_residues(predicted[p], reference[r]) for p, r in chains.items()}


def map_chains(docking: Docking, similar: Mapping[Pair, Array]) -> dict[str, str]:
    """Return the best mapping, predicted -> reference, of chains that are `similar`; see above."""
    superposed = _superposed(docking.predicted, docking.reference, similar)
    options: dict[str, list[str]] = {r: [p for p, other in similar if other == r] for _, r in similar}
    attempts = _every_mapping(options)
    if attempts is None:
        grown = (_grow(docking, options, superposed, start) for start in _starts(docking, similar))
        attempts = itertools.chain((s.mapped for s in superposed[:PROMISING]), grown)
    # Sums of DockQ that agree to rounding are decided by the best superposition.
    terms = superposed[0].terms

    def worth(mapped: Mapped) -> float:
        near = sum(terms[p, r] for r, p in mapped.items()) / sum(len(b.sequence) for b in docking.reference.values())
        pairs = ((pair, (mapped[pair[0]], mapped[pair[1]])) for pair in docking.native if {*pair} <= mapped.keys())
        return sum(docking.measure(*both).dockq for both in pairs) + 1e-6 * near

    best = max(itertools.chain([superposed[0].mapped], attempts), key=worth)
    found = {p: r for r, p in best.items()}
    return {p: found[p] for p in docking.predicted if p in found}


def _every_mapping(options: Mapping[str, list[str]]) -> Iterable[Mapped] | None:
    """Return all mappings that leave out no more chains than they must; None if there are too many, or no simple rule.

    Simple are groups of reference chains that all have the same options.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for r, ps in options.items():
        groups.setdefault(tuple(ps), []).append(r)
    if len({p for ps in groups for p in ps}) < sum(map(len, groups.keys())):
        return None
    if math.prod(math.perm(max(len(ps), len(rs)), min(len(ps), len(rs))) for ps, rs in groups.items()) > EXHAUSTIVE:
        return None
    each = (  # the ways to give each of the fewer names one of the more
        [dict(zip(rs, chosen)) for chosen in itertools.permutations(ps, len(rs))]
        if len(rs) <= len(ps)
        else [dict(zip(chosen, ps)) for chosen in itertools.permutations(rs, len(ps))]
        for ps, rs in groups.items()
    )
    return ({r: p for part in parts for r, p in part.items()} for parts in itertools.product(*each))


@dataclass(frozen=True)
class _Superposed:
    """What a superposition of one predicted chain on one of the reference says of all others."""

    terms: dict[Pair, float]  # each pair's sum of TM-score terms
    mapped: Mapped  # the nearest pairs, one by one
    fit: float  # the sum of their terms


def _superposed(predicted: Chains, reference: Chains, similar: Mapping[Pair, Array]) -> list[_Superposed]:
    """Superpose each similar pair, then assign the nearest ones; return the distinct mappings, best fit first."""
    points = {}
    for (p, r), pairs in similar.items():
        i, j = with_ca(predicted[p], reference[r], pairs).T
        points[p, r] = (predicted[p].positions[i, CA].astype(np.float64), reference[r].positions[j, CA])
    stride = 1 + len(points) * sum(len(b) for _, b in points.values()) // DISTANCES
    mobile, target = (np.concatenate([both[side][::stride] for both in points.values()]) for side in (0, 1))
    counts = [len(b[::stride]) for _, b in points.values()]
    d0 = np.repeat([metrics.tm_d0(len(b)) for _, b in points.values()], counts)
    owner = np.repeat(np.arange(len(points)), counts)
    found: dict[tuple[Pair, ...], _Superposed] = {}
    for seed, both in points.items():
        rotation, translation = metrics.superpose(*both)
        near = 1 / (1 + np.sum((mobile @ rotation.T + translation - target) ** 2, -1) / d0**2)
        terms = dict(zip(points, (stride * np.bincount(owner, near, minlength=len(points))).tolist()))
        mapped = _nearest({seed[1]: seed[0]}, terms)
        fit = sum(terms[p, r] for r, p in mapped.items())
        key = tuple(sorted(mapped.items()))
        if key not in found or fit > found[key].fit:
            found[key] = _Superposed(terms, mapped, fit)
    return sorted(found.values(), key=lambda one: -one.fit)


def _nearest(mapped: Mapped, terms: Mapping[Pair, float]) -> Mapped:
    """Return the mapping completed with the nearest free pairs, one by one."""
    mapped = dict(mapped)
    taken = set(mapped.values())
    for p, r in sorted(terms, key=lambda key: -terms[key]):
        if r not in mapped and p not in taken:
            mapped[r] = p
            taken.add(p)
    return mapped


def _starts(docking: Docking, similar: Mapping[Pair, Array]) -> list[Pair]:
    """Return the pairs to grow from: those of the chain with most neighbours, on either side."""
    hubs = [
        max(dict.fromkeys(names), key=lambda name: sum(name in pair for pair in touching))
        for names, touching in zip(zip(*similar), (docking.touching, docking.native))
    ]
    return [(p, r) for p, r in similar if p == hubs[0] or r == hubs[1]]


def _grow(docking: Docking, options: Mapping[str, list[str]], superposed: list[_Superposed], start: Pair) -> Mapped:
    """Map chain after chain to what continues the interfaces best, where the complex as a whole is bent or broken.

    Next is the reference chain with most contacts to those that are mapped.  Only predicted chains that touch a
    neighbour's counterpart come into question; where none does, the superposition fills in at the end.
    """
    mapped = {start[1]: start[0]}
    passed: set[str] = set()
    while True:
        pull: dict[str, int] = {}
        for (a, b), near in docking.native.items():
            for here, there in ((a, b), (b, a)):
                if here in mapped and there not in mapped and there not in passed and there in options:
                    pull[there] = pull.get(there, 0) + len(near.indices)
        if not pull:
            return _nearest(mapped, superposed[0].terms)
        r = max(pull, key=lambda name: pull[name])
        neighbours = [mapped[x] for pair in docking.native if r in pair for x in pair if x in mapped]
        free = [p for p in options[r] if p not in mapped.values()]
        free = [p for p in free if any((p, n) in docking.touching or (n, p) in docking.touching for n in neighbours)]
        if free:
            # What mapping r to a chain would add to the sum of DockQ.
            gains = {p: 0.0 for p in free}
            for p in free:
                stands = {**mapped, r: p}
                for a, b in docking.native:
                    if r in (a, b) and a in stands and b in stands:
                        gains[p] += docking.measure((a, b), (stands[a], stands[b])).dockq
            mapped[r] = max(free, key=lambda p: gains[p])
        else:
            passed.add(r)
