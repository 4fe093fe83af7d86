"""Test the pairing of residues at each threshold, the search for mappings, and superpositions, against definitions."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tests.scoring.complexes import disturbed, lossy, named, placed, renamed, ring, turn
from tests.scoring.test_score import protein
from warpfold.data.structure.chain import Chain
from warpfold.errors import UserError
from warpfold.geometry.residue import ATOM_ORDER
from warpfold.scoring import chain_mapping, metrics
from warpfold.scoring.chain_mapping import Assignment, map_chains, named_chains, pair_residues, similar_chains, with_ca
from warpfold.scoring.dockq import Docking, Pair

CA, CB = ATOM_ORDER["CA"], ATOM_ORDER["CB"]
# All amino acids, so that no other register has identical residues.
LETTERS = "ACDEFGHIKLMNPQRSTVWY"


def chain(
    sequence: str, numbers: Iterable[object] = (), unresolved: Sequence[int] = (), without_ca: Sequence[int] = ()
) -> Chain:
    """Build a chain of Ca and Cb. numbers: of the residues, by default 1, 2, ...; None for a residue without number."""
    n = len(sequence)
    mask = np.zeros((n, 37), np.float32)
    mask[:, [CA, CB]] = 1
    mask[list(unresolved)] = 0
    mask[list(without_ca), CA] = 0
    texts = tuple("" if number is None else str(number) for number in numbers or range(1, n + 1))
    assert len(texts) == n
    return Chain("A", sequence, np.zeros((n, 37, 3), np.float32), mask, np.arange(n), texts)


def changed(sequence: str, places: Iterable[int], letter: str = "G") -> str:
    """Replace the letters at some places by a letter, or by H where that letter already is."""
    letters = list(sequence)
    for place in places:
        letters[place] = letter if letters[place] != letter else "H"
    return "".join(letters)


def diagonal(count: int, a: int = 0, b: int = 0) -> list[list[int]]:
    return [[a + k, b + k] for k in range(count)]


SHIFTED = LETTERS[1:] + LETTERS[0]
# name -> two chains, and the residues that are paired
PAIRED: dict[str, tuple[Chain, Chain, list[list[int]]]] = {
    "equal sequences by position": (
        chain(LETTERS, range(5, 25), unresolved=[3]),
        chain(LETTERS, unresolved=[7, 19]),
        [[k, k] for k in range(20) if k not in (3, 7, 19)],
    ),
    "a mutation by number": (chain(LETTERS, range(5, 25)), chain(changed(LETTERS, [4]), range(5, 25)), diagonal(20)),
    "a construct by number": (chain(LETTERS), chain(LETTERS[3:18], range(4, 19)), diagonal(15, 3)),
    "a construct by alignment": (chain(LETTERS[3:18]), chain(LETTERS), diagonal(15, 0, 3)),
    # The numbers pair 19 of 20 residues, which is the limit, although the other register has more identical residues.
    "95 % by number": (
        chain(LETTERS),
        chain(changed(SHIFTED, [4, 7, 9, 13]), [*range(1, 20), 99]),
        diagonal(19),
    ),
    "90 % by number": (
        chain(LETTERS),
        chain(changed(SHIFTED, [4, 7, 9, 13]), [*range(1, 19), 98, 99]),
        diagonal(19, 1),
    ),
    "95 % of the longer chain by number": (
        chain(LETTERS[:19]),
        chain(changed(LETTERS[1:] + "A", [4, 7, 9, 13])),
        diagonal(19),
    ),
    # Another register overrules complete numbers if 18 of 20 residues are identical in it.
    "90 % identity in another register": (chain(LETTERS), chain(changed(SHIFTED, [4])), diagonal(19, 1)),
    "85 % identity in another register": (chain(LETTERS), chain(changed(SHIFTED, [4, 9])), diagonal(20)),
    "equal identity in another register": (chain("GS" * 20), chain("AA" + "GS" * 19), diagonal(40)),
    # Incomplete numbers decide only if they pair as many residues and as many identical residues.
    "numbers of half the chain": (
        chain(LETTERS),
        chain(changed(LETTERS, [4]), [k + 1 if k % 2 else None for k in range(20)]),
        diagonal(20),
    ),
    "numbers of all identical residues": (
        chain(LETTERS),
        chain(changed(LETTERS, [4, 9, 13]), [None if k in (4, 9, 13) else k + 1 for k in range(20)]),
        diagonal(20),
    ),
    "numbers of an unresolved residue": (
        chain(LETTERS, [None, *range(2, 21)], unresolved=[0]),
        chain(changed(LETTERS, [4]), [None, *range(2, 21)], unresolved=[0]),
        diagonal(19, 1, 1),
    ),
    "nothing in common": (chain("A" * 5), chain("W" * 5, range(11, 16)), []),
}


@pytest.mark.parametrize("name", PAIRED)
def test_residues_are_paired_by_position_number_or_alignment(name: str) -> None:
    a, b, expected = PAIRED[name]
    pairs = pair_residues(a, b)
    assert (pairs.tolist(), pairs.dtype, pairs.shape) == (expected, np.int64, (len(expected), 2))


def test_pairs_with_ca_have_it_in_both_chains() -> None:
    a, b = chain(LETTERS[:5], without_ca=[1, 2]), chain(LETTERS[:5], without_ca=[2, 3])
    pairs = np.array([[0, 0], [1, 1], [2, 2], [3, 3], [4, 4], [1, 4], [4, 3]])
    assert with_ca(a, b, pairs).tolist() == [[0, 0], [4, 4]]


TEN = "ACDEFGHIKL"
# name -> predicted chains, reference chains, and the similar pairs or, if there are none, the highest identity
SIMILAR: dict[str, tuple[dict[str, Chain], dict[str, Chain], set[Pair] | str]] = {
    # Chains without common numbers need 30 % identity.
    "6 of 20": ({"P": chain("H" * 14 + "ACDEFG")}, {"R": chain("ACDEFG" + "W" * 14, range(51, 71))}, {("P", "R")}),
    "5 of 20": ({"P": chain("H" * 15 + "ACDEF")}, {"R": chain("ACDEF" + "W" * 15, range(51, 71))}, "25%"),
    "the highest of several": (
        {"P": chain("H" * 15 + "ACDEF"), "Q": chain("Y" * 20)},
        {"R": chain("ACDEF" + "W" * 15, range(51, 71))},
        "25%",
    ),
    "2 of 6 in a longer chain": ({"P": chain("HHHHAC")}, {"R": chain("AC" + "W" * 10)}, {("P", "R")}),
    # Chains with equal numbers need 15 %.
    "3 of 20 numbered": ({"P": chain("AAA" + "W" * 17)}, {"R": chain("AAA" + "Y" * 17)}, {("P", "R")}),
    "2 of 20 numbered": ({"P": chain("AA" + "W" * 18)}, {"R": chain("AA" + "Y" * 18)}, "10%"),
    "3 of 20 with 19 numbers": (
        {"P": chain("AAA" + "W" * 17)},
        {"R": chain("AAA" + "Y" * 17, [*range(1, 20), 99])},
        {("P", "R")},
    ),
    "3 of 20 with 18 numbers": (
        {"P": chain("AAA" + "W" * 17)},
        {"R": chain("AAA" + "Y" * 17, [*range(1, 19), 98, 99])},
        "15%",
    ),
    "numbers of the shorter chain": ({"P": chain("A" * 20)}, {"R": chain("AAAA" + "W" * 36)}, "20%"),
    "numbers of some aligned residues": (
        {"P": chain("AAAA" + "X" * 16)},
        {"R": chain("AAAA" + "WY" * 8, [*range(1, 18), 97, 98, 99])},
        "20%",
    ),
    # Copies have 90 % of the best identity with a reference chain.
    "18 of 20 beside a perfect chain": (
        {"P": chain(LETTERS), "Q": chain(changed(LETTERS, [4, 9])), "S": chain(changed(LETTERS, [4, 9, 13]))},
        {"R": chain(LETTERS)},
        {("P", "R"), ("Q", "R")},
    ),
    "the best of each reference chain": (
        {"P": chain(LETTERS), "Q": chain(changed(LETTERS, range(10)))},
        {"R": chain(LETTERS), "S": chain(changed(LETTERS, range(10)))},
        {("P", "R"), ("Q", "S")},
    ),
    # Identity is that of residues with Ca.
    "residues without Ca": (
        {"P": chain(LETTERS, without_ca=range(5, 20)), "Q": chain(LETTERS, without_ca=range(20))},
        {"R": chain(changed(LETTERS, [0]))},
        {("P", "R")},
    ),
    "a chain of one residue": (
        {"P": chain("A"), "Q": chain(changed(LETTERS, range(12, 20)))},
        {"R": chain(LETTERS)},
        {("P", "R")},
    ),
}


@pytest.mark.parametrize("name", SIMILAR)
def test_chains_are_similar_from_the_thresholds_on(name: str) -> None:
    predicted, reference, expected = SIMILAR[name]
    if isinstance(expected, str):
        with pytest.raises(UserError) as error:
            similar_chains(predicted, reference)
        assert str(error.value) == (
            f"no predicted chain resembles a reference chain (highest sequence identity {expected}). "
            "Name the chains to compare them anyway: --chains P:R"
        )
        return
    similar = similar_chains(predicted, reference)
    assert similar.keys() == expected
    for (p, r), pairs in similar.items():
        np.testing.assert_array_equal(pairs, pair_residues(predicted[p], reference[r]))


def test_named_chains_exist_and_are_named_once() -> None:
    chains = {"A": chain(TEN), "B": chain(TEN[2:], range(3, 11))}
    pairs = named_chains(chains, chains, {"A": "B", "B": "A"})
    assert {key: value.tolist() for key, value in pairs.items()} == {
        ("A", "B"): diagonal(8, 2),
        ("B", "A"): diagonal(8, 0, 2),
    }
    for chosen, message in (
        ({"C": "A"}, "the prediction has no protein chain C; it has A, B"),
        ({"A": "C"}, "the reference has no protein chain C; it has A, B"),
        ({"A": "B", "B": "B"}, "chain B of the reference is named twice. Name each chain once"),
    ):
        with pytest.raises(UserError) as error:
            named_chains(chains, chains, chosen)
        assert str(error.value) == message


def mappings(options: dict[str, str]) -> list[Assignment] | None:
    """List all mappings. options: the similar predicted chains of each reference chain, as letters."""
    found = chain_mapping._all_mappings({r: list(ps) for r, ps in options.items()})
    return None if found is None else list(found)


def test_all_mappings_of_copies_are_listed() -> None:
    assert mappings({"A": "a"}) == [{"A": "a"}]
    assert mappings({"A": "ab", "B": "ab"}) == [{"A": "a", "B": "b"}, {"A": "b", "B": "a"}]
    assert mappings({"A": "abc"}) == [{"A": "a"}, {"A": "b"}, {"A": "c"}]
    assert mappings({"A": "a", "B": "a", "C": "a"}) == [{"A": "a"}, {"B": "a"}, {"C": "a"}]
    assert mappings({"A": "ab", "C": "c", "B": "ab"}) == [
        {"A": "a", "B": "b", "C": "c"},
        {"A": "b", "B": "a", "C": "c"},
    ]
    # The groups share a predicted chain.
    assert mappings({"A": "ab", "B": "bc"}) is None
    assert mappings({"A": "ab", "B": "a"}) is None


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        ([(7, 7)], 5040),
        ([(8, 8)], None),
        ([(2, 71)], 4970),
        ([(71, 2)], 4970),
        ([(2, 72)], None),
        ([(72, 2)], None),
        ([(5, 5), (4, 4), (1, 1)], 2880),
        ([(7, 7), (2, 2)], None),
    ],
)
def test_up_to_5040_mappings_are_listed(sizes: list[tuple[int, int]], count: int | None) -> None:
    options = {
        f"{group}-{r}": [f"{group}-{p}" for p in range(predicted)]
        for group, (reference, predicted) in enumerate(sizes)
        for r in range(reference)
    }
    found = chain_mapping._all_mappings(options)
    assert (None if found is None else len({frozenset(mapped.items()) for mapped in found})) == count
    if count is not None:
        assert count == math.prod(math.perm(max(pair), min(pair)) for pair in sizes)


def test_a_mapping_is_completed_with_the_nearest_free_chains() -> None:
    terms = {("a", "A"): 9.0, ("b", "A"): 8.0, ("a", "B"): 7.0, ("b", "B"): 6.0, ("c", "B"): 5.0, ("c", "C"): 1.0}
    given: Assignment = {}
    assert chain_mapping._complete(given, terms) == {"A": "a", "B": "b", "C": "c"}
    assert given == {}
    assert chain_mapping._complete({"A": "b"}, terms) == {"A": "b", "B": "a", "C": "c"}
    assert chain_mapping._complete({"B": "b"}, terms) == {"B": "b", "A": "a", "C": "c"}
    assert chain_mapping._complete({"D": "a"}, dict(reversed(terms.items()))) == {"D": "a", "A": "b", "B": "c"}


# Upper case: reference chains, lower case: predicted chains. The number of contacts of each interface of the reference,
# the predicted chains in contact, and the DockQ of a pair of reference chains with a pair of predicted chains.
GROWN: dict[str, tuple[dict[str, int], str, dict[str, float], dict[str, str], dict[Pair, float], str]] = {
    # C has more contacts to A than B does, so it gets the chain that suits both.
    "most contacts first": (
        {"AB": 3, "AC": 5},
        "ya ax",
        {"AC-ax": 0.9, "AC-ay": 0.2, "AB-ax": 0.8, "AB-ay": 0.1},
        {"B": "yx", "C": "yx"},
        {},
        "A-a B-y C-x",
    ),
    # After C, the contacts of B to both neighbours exceed those of D.
    "contacts of all neighbours": (
        {"AB": 3, "AC": 7, "CB": 4, "AD": 6},
        "ac ax ay za",
        {"AB-ay": 0.5, "AD-ay": 0.9, "AD-az": 0.1, "AC-ac": 0.9},
        {"B": "xyz", "C": "c", "D": "xyz"},
        {},
        "A-a B-y C-c D-z",
    ),
    # No candidate of B touches a. The superposition assigns B at the end, although z would fit next to y.
    "a chain without candidates": (
        {"AB": 9, "AC": 2, "BC": 4},
        "ay yz",
        {"BC-zy": 0.9},
        {"B": "zx", "C": "y"},
        {("z", "B"): 1.0, ("x", "B"): 2.0},
        "A-a B-x C-y",
    ),
    "a chain that no predicted chain resembles": ({"AB": 9, "AC": 2}, "ay", {}, {"C": "y"}, {}, "A-a C-y"),
    # x and y touch one of two neighbours each; the sum over both decides.
    "the sum of DockQ": (
        {"AB": 9, "AC": 4, "BC": 4},
        "ab ax by",
        {"AB-ab": 0.1, "AC-ax": 0.5, "BC-bx": 0.0, "AC-ay": 0.3, "BC-by": 0.3},
        {"B": "b", "C": "xy"},
        {},
        "A-a B-b C-y",
    ),
    # y touches a, but the neighbour of C is B.
    "candidates touch a neighbour": (
        {"AB": 9, "BC": 4},
        "ax ay xz",
        {"BC-xy": 0.9, "BC-xz": 0.1, "AB-ax": 0.9},
        {"B": "x", "C": "yz"},
        {},
        "A-a B-x C-z",
    ),
    "nothing to grow along": ({"BC": 9}, "bc", {}, {"B": "bc", "C": "bc"}, {("c", "B"): 1.0}, "A-a B-c"),
}


@pytest.mark.parametrize("case", GROWN)
def test_a_mapping_grows_along_the_interfaces(case: str) -> None:
    native, touching, dockq, options, terms, expected = GROWN[case]

    def measure(interface: Pair, chains: Pair) -> SimpleNamespace:
        return SimpleNamespace(dockq=dockq.get(f"{''.join(interface)}-{''.join(chains)}", 0.0))

    docking = SimpleNamespace(
        native={(pair[0], pair[1]): SimpleNamespace(indices=np.zeros((count, 2))) for pair, count in native.items()},
        touching={(pair[0], pair[1]): None for pair in touching.split()},
        measure=measure,
    )
    superposed = [SimpleNamespace(terms=terms)]
    all_options = {"A": ["a"]} | {r: list(ps) for r, ps in options.items()}
    mapped = chain_mapping._grow(cast(Docking, docking), all_options, cast(Any, superposed), ("a", "A"))
    assert mapped == dict(pair.split("-") for pair in expected.split())


def plain_superpositions(
    predicted: Mapping[str, Chain], truth: Mapping[str, Chain], similar: Mapping[Pair, np.ndarray], stride: int
) -> list[tuple[dict[Pair, float], Assignment, float]]:
    """Superpose every pair of chains; returns the best terms of each greedy assignment, best first."""
    points = {}
    for (p, r), pairs in similar.items():
        both = [(i, j) for i, j in pairs.tolist() if predicted[p].mask[i, CA] and truth[r].mask[j, CA]]
        points[p, r] = (
            np.array([predicted[p].positions[i, CA] for i, _ in both], np.float64),
            np.array([truth[r].positions[j, CA] for _, j in both], np.float64),
        )
    best: dict[frozenset[Pair], tuple[dict[Pair, float], Assignment, float]] = {}
    for seed in points:
        rotation, translation = metrics.superpose(*points[seed])
        terms = {}
        for key, (a, b) in points.items():
            d0 = max(0.5, 1.24 * np.cbrt(len(b) - 15) - 1.8)
            errors = [np.linalg.norm(rotation @ x + translation - y) for x, y in zip(a[::stride], b[::stride])]
            terms[key] = stride * sum(1 / (1 + (error / d0) ** 2) for error in errors)
        mapped = {seed[1]: seed[0]}
        for p, r in sorted(terms, key=lambda key: -terms[key]):
            if r not in mapped and p not in mapped.values():
                mapped[r] = p
        fit = sum(terms[p, r] for r, p in mapped.items())
        key_of = frozenset(mapped.items())
        if key_of not in best or fit > best[key_of][2]:
            best[key_of] = (terms, mapped, fit)
    return sorted(best.values(), key=lambda found: -found[2])


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_superpositions_measure_the_proximity_of_all_chains(stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = lossy(ring(4, length=25, radius=10.0))
    predicted = renamed(disturbed(truth, 0.8, 4.0, 0.8), "CADB")
    # The last chain lacks the Ca of some residues.
    mask = predicted["D"].mask.copy()
    mask[20:24, CA] = 0
    predicted["D"] = replace(predicted["D"], mask=mask)
    similar = {(p, r): pair_residues(predicted[p], truth[r]) for p in predicted for r in truth}
    distances = len(similar) * sum(len(with_ca(predicted[p], truth[r], pairs)) for (p, r), pairs in similar.items())
    monkeypatch.setattr(chain_mapping, "MAX_DISTANCES", distances // (stride - 1) if stride > 1 else distances + 1)
    found = chain_mapping._superpose_pairs(predicted, truth, similar)
    expected = plain_superpositions(predicted, truth, similar, stride)
    assert 1 < len(expected) < len(similar)
    assert [one.mapped for one in found] == [mapped for _, mapped, _ in expected]
    for one, (terms, _, fit) in zip(found, expected, strict=True):
        assert one.terms == pytest.approx(terms, rel=1e-9)
        assert one.fit == pytest.approx(fit, rel=1e-9)


def best_sum(docking: Docking, similar: Mapping[Pair, np.ndarray]) -> tuple[float, dict[str, str]]:
    """Find the highest sum of DockQ of all mappings, by brute force, and a mapping that has it."""
    predicted, reference = [*docking.predicted], [*docking.reference]
    count = min(len(predicted), len(reference))
    sums = []
    for ps in itertools.permutations(predicted, count):
        for rs in itertools.combinations(reference, count):
            mapped = dict(zip(rs, ps))
            if all((p, r) in similar for r, p in mapped.items()):
                pairs = [pair for pair in docking.native if {*pair} <= mapped.keys()]
                measured = [docking.measure(pair, (mapped[pair[0]], mapped[pair[1]])).dockq for pair in pairs]
                sums.append((sum(measured), {p: r for r, p in mapped.items()}))
    return max(sums, key=lambda found: found[0])


def curled(copies: int, radius: float, angle: float, axis: Sequence[float]) -> dict[str, Chain]:
    """Build the chains of `ring` such that each is rotated about its contact with the one before.

    angle: in radians. No superposition fits more than a few chains.
    """
    first, half = ring(copies, radius=radius)["A"], np.pi / copies
    contact = radius * np.cos(half) * np.array([np.cos(half), np.sin(half), 0])
    step = turn(angle, axis)
    rotation, shift, chains = np.eye(3), np.zeros(3), []
    for k in range(copies):
        positions = (first.positions @ rotation.T + shift) * first.mask[..., None]
        chains.append(replace(first, id=chr(ord("A") + k), positions=positions.astype(np.float32)))
        rotation, shift = rotation @ step @ turn(2 * half, (0, 0, 1)), rotation @ (contact - step @ contact) + shift
    return named(*chains)


# name -> reference, prediction
SEARCHED: dict[str, tuple[dict[str, Chain], dict[str, Chain]]] = {}
_ring, _curled = ring(6, radius=14.0), renamed(curled(6, 14.0, 1.3, (1, 0, 0)), "DAFCBE")
_lone = placed(_ring["A"], "A", shift=(300, 0, 0))
SEARCHED["a curled ring"] = (_ring, _curled)
SEARCHED["a ring curled otherwise"] = (_ring, renamed(curled(6, 14.0, 1.3, (1, 1, 0)), "FCEBDA"))
# The lone chain touches none, so no mapping can grow from it.
SEARCHED["a curled ring and a lone chain"] = (
    {"A": _lone} | renamed(_ring, "BCDEFG"),
    {"A": _lone} | renamed(curled(6, 14.0, 1.3, (1, 0, 0)), "EBGDCF"),
)
SEARCHED["a chain less in the prediction"] = (_ring, {name: x for name, x in _curled.items() if name != "D"})
SEARCHED["a chain less in the reference"] = ({name: x for name, x in _ring.items() if name != "A"}, _curled)
# Each chain has the other's conformation, so the superposition of single chains is in favour of the wrong mapping.
_one = protein("A", 30, 3)
_other = placed(_one, "B", noise=1.0)
SEARCHED["a dimer of two conformations"] = (
    named(_one, placed(_other, "B", shift=(8, 5, 0))),
    named(placed(_other, "A"), placed(_one, "B", shift=(8, 5, 0))),
)


@pytest.mark.parametrize("exhaustive", [True, False])
@pytest.mark.parametrize("name", SEARCHED)
def test_the_search_finds_the_highest_sum_of_dockq(
    name: str, exhaustive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, predicted = SEARCHED[name]
    if not exhaustive:
        monkeypatch.setattr(chain_mapping, "MAX_EXHAUSTIVE", 0)
        monkeypatch.setattr(chain_mapping, "MAX_CANDIDATES", 1)
    similar = similar_chains(predicted, reference)
    docking = Docking(predicted, reference, similar)
    found = map_chains(docking, similar)
    assert [*found] == [p for p in predicted if p in found]
    highest, _ = best_sum(docking, similar)
    predicted_of = {r: p for p, r in found.items()}
    pairs = [pair for pair in docking.native if {*pair} <= predicted_of.keys()]
    ours = sum(docking.measure(pair, (predicted_of[pair[0]], predicted_of[pair[1]])).dockq for pair in pairs)
    # A grown mapping may miss the best one by little.
    assert ours == pytest.approx(highest, abs=1e-5 if exhaustive else 0.005)
