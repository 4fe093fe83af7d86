"""Compare DockQ and the scores of a complex with plain implementations on random complexes with missing parts."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from tests.scoring.test_score import part, structure
from warpfold.data.structure.chain import Chain
from warpfold.geometry.residue import ATOM_ORDER
from warpfold.scoring import metrics
from warpfold.scoring.dockq import Docking, ResiduePairs, contacts, nearest_residues, residue_pairs
from warpfold.scoring.score import score
from warpfold.scoring.score_complex import InterfaceScore, interface_lddt

CA, CB = ATOM_ORDER["CA"], ATOM_ORDER["CB"]
ATOMS = [ATOM_ORDER[name] for name in ("N", "CA", "C", "O", "CB", "CG")]
BACKBONE = ATOMS[:4]
LETTERS = "AGSA"


def random_complex(seed: int, lengths: Mapping[str, int], lost: float = 0.2, box: float = 9.0) -> dict[str, Chain]:
    """Build chains of residues at random places in a small cube, so that most of them touch, with missing atoms."""
    rng = np.random.default_rng(seed)
    chains = {}
    for name, length in lengths.items():
        sequence = "".join(rng.choice(list(LETTERS), length))
        mask = np.zeros((length, 37), np.float32)
        mask[:, ATOMS] = rng.random((length, len(ATOMS))) >= lost
        mask[[letter == "G" for letter in sequence], CB] = 0
        positions = rng.uniform(0, box, (length, 1, 3)) + rng.uniform(-1.5, 1.5, (length, 37, 3))
        numbers = tuple(str(k) for k in range(length))
        positions = (positions * mask[..., None]).astype(np.float32)
        chains[name] = Chain(name, sequence, positions, mask, np.arange(length), numbers)
    return chains


def shaken(chains: Mapping[str, Chain], seed: int, by: float, lost: float = 0.2) -> dict[str, Chain]:
    """Move all atoms, and remove some of them."""
    rng = np.random.default_rng(seed)
    moved = {}
    for name, chain in chains.items():
        mask = chain.mask * (rng.random(chain.mask.shape) >= lost)
        positions = (
            chain.positions + rng.normal(0, by, (len(mask), 1, 3)) + rng.normal(0, by / 3, chain.positions.shape)
        )
        positions = (positions * mask[..., None]).astype(np.float32)
        moved[name] = dataclasses.replace(chain, positions=positions, mask=mask.astype(np.float32))
    return moved


def distance(a: Chain, i: int, b: Chain, j: int, atoms: Sequence[int] = range(37)) -> float:
    """Compute the shortest distance between atoms of two residues."""
    found = [
        float(np.linalg.norm(a.positions[i, x].astype(float) - b.positions[j, y]))
        for x in atoms
        for y in atoms
        if a.mask[i, x] and b.mask[j, y]
    ]
    return min(found, default=np.inf)


def beta(chain: Chain, i: int) -> list[int]:
    return [CA if chain.sequence[i] == "G" else CB]


def near(a: Chain, b: Chain, within: float) -> dict[tuple[int, int], float]:
    """Find the residues with atoms nearer than a limit."""
    indices = itertools.product(range(len(a.sequence)), range(len(b.sequence)))
    found = {(i, j): distance(a, i, b, j) for i, j in indices}
    return {pair: value for pair, value in found.items() if value < within}


def plain_dockq(
    predicted: Mapping[str, Chain],
    truth: Mapping[str, Chain],
    pairs: Mapping[tuple[str, str], np.ndarray],
    interface: tuple[str, str],
    chains: tuple[str, str],
) -> dict[str, float]:
    """Compute DockQ and its terms by their definitions."""
    a, b = (predicted[name] for name in chains)
    counterparts: list[dict[int, int]] = []
    for p, r in zip(chains, interface):
        same = [(i, j) for i, j in pairs[p, r].tolist() if predicted[p].sequence[i] == truth[r].sequence[j]]
        counterparts.append({j: i for i, j in same})
    first, second = counterparts
    within = near(truth[interface[0]], truth[interface[1]], 10)
    native = [pair for pair, value in within.items() if value < 5]
    model = {(i, j) for i, j in near(a, b, 5) if i in first.values() and j in second.values()}
    shared = sum(i in first and j in second and (first[i], second[j]) in model for i, j in native)

    def backbone(side: int, residues: set[int] | None) -> tuple[np.ndarray, np.ndarray]:
        ours, theirs = predicted[chains[side]], truth[interface[side]]
        atoms = [
            (ours.positions[i, atom], theirs.positions[j, atom])
            for j, i in sorted(counterparts[side].items())
            for atom in BACKBONE
            if ours.mask[i, atom] and theirs.mask[j, atom] and (residues is None or j in residues)
        ]
        return np.array([x for x, _ in atoms]).reshape(-1, 3), np.array([y for _, y in atoms]).reshape(-1, 3)

    paired = [(i, j) for i, j in within if i in first and j in second]
    sides = [backbone(side, {pair[side] for pair in paired}) for side in (0, 1)]
    ours, theirs = (np.concatenate(arrays) for arrays in zip(*sides))
    irmsd = metrics.rmsd(ours, theirs) if len(ours) else np.inf
    observed = [sum(bool(row.any()) for row in truth[name].mask) for name in interface]
    receptor = 0 if observed[0] > observed[1] else 1
    (mobile, target), (ligand, goal) = backbone(receptor, None), backbone(1 - receptor, None)
    lrmsd = np.inf
    if len(mobile) and len(ligand):
        rotation, translation = metrics.superpose(mobile, target)
        lrmsd = float(np.sqrt(np.mean(np.sum((ligand @ rotation.T + translation - goal) ** 2, 1))))
    fnat = shared / len(native)
    return {
        "dockq": (fnat + 1 / (1 + (irmsd / 1.5) ** 2) + 1 / (1 + (lrmsd / 8.5) ** 2)) / 3,
        "fnat": fnat,
        "fnonnat": 1 - shared / len(model) if model else 0.0,
        "irmsd": irmsd,
        "lrmsd": lrmsd,
    }


def some_pairs(predicted: Mapping[str, Chain], truth: Mapping[str, Chain], seed: int) -> dict[Any, np.ndarray]:
    """Pair most residues of all chains in ascending order, with shifts."""
    rng = np.random.default_rng(seed)
    pairs = {}
    for (p, a), (r, b) in itertools.product(predicted.items(), truth.items()):
        n = min(len(a.sequence), len(b.sequence)) - 1
        i, j = (np.sort(rng.choice(len(x.sequence), n, replace=False)) for x in (a, b))
        pairs[p, r] = np.stack([i, j], -1)
    return pairs


@pytest.mark.parametrize("seed", range(6))
def test_dockq_is_its_definition_whatever_is_missing(seed: int) -> None:
    truth = random_complex(seed, {"A": 5, "B": 7, "C": 6})
    predicted = shaken(truth, seed, 0.8)
    pairs = some_pairs(predicted, truth, seed)
    if seed % 2:
        pairs = {(p, r): np.arange(5)[:, None].repeat(2, axis=1) for p, r in pairs}
    docking = Docking(predicted, truth, pairs)
    for chains, docked in ((truth, docking.native), (predicted, docking.touching)):
        expected = {(a, b): near(chains[a], chains[b], 10) for a, b in itertools.combinations(chains, 2)}
        touching = {pair: found for pair, found in expected.items() if min(found.values(), default=10) < 5}
        ours = {pair: dict(zip(map(tuple, x.indices.tolist()), x.distance.tolist())) for pair, x in docked.items()}
        assert ours.keys() == touching.keys()
        for pair, found in touching.items():
            assert ours[pair] == pytest.approx(found)
    assert len(docking.native) == 3
    for interface in docking.native:
        for ours_of in itertools.permutations(predicted, 2):
            measured = docking.measure(interface, ours_of)
            expected_terms = plain_dockq(predicted, truth, pairs, interface, ours_of)
            assert dataclasses.asdict(measured) == pytest.approx(expected_terms, abs=1e-6)
            assert docking.measure(interface, ours_of) is measured


def test_without_paired_backbones_there_are_no_deviations() -> None:
    truth = random_complex(1, {"A": 6, "B": 5}, lost=0.0)
    for lost in ("A", "B", "AB"):
        predicted = dict(truth)
        for name in lost:
            mask = truth[name].mask.copy()
            mask[:, BACKBONE] = 0
            predicted[name] = dataclasses.replace(truth[name], mask=mask)
        every = {(name, name): np.arange(len(truth[name].sequence))[:, None].repeat(2, axis=1) for name in "AB"}
        found = Docking(predicted, truth, every).measure(("A", "B"), ("A", "B"))
        assert found.lrmsd == np.inf
        assert (found.irmsd == np.inf) == (lost == "AB")
        assert dataclasses.asdict(found) == pytest.approx(
            plain_dockq(predicted, truth, every, ("A", "B"), ("A", "B")), abs=1e-6
        )


def test_residues_at_a_limit_are_not_within_it() -> None:
    pairs = ResiduePairs(np.array([[0, 1], [2, 3], [4, 5]]), np.array([4.999, 5.0, 5.001]))
    assert pairs.within(5.0).tolist() == [[0, 1]]
    a, b = (random_complex(0, {name: 3}, lost=0.0)[name] for name in "AB")
    for chain, y in ((a, 0.0), (b, 5.0)):
        chain.mask[:] = 0
        chain.mask[:, CA] = 1
        chain.positions[:, CA] = [(30 * k, y, 0) for k in range(3)]
    assert contacts({"A": a, "B": b}) == {}
    b.positions[1, CA, 1] = 4.5
    b.positions[2, CA, 1] = 10.0
    (found,) = contacts({"A": a, "B": b}).values()
    assert (found.indices.tolist(), found.distance.tolist()) == ([[0, 0], [1, 1]], [5.0, 4.5])
    assert residue_pairs(a, b, a.mask > 0, b.mask < 0, 9.0).indices.shape == (0, 2)


def test_pairs_of_atoms_are_reduced_to_the_nearest_of_each_pair_of_residues() -> None:
    keys, distances = np.array([7, 0, 7, 3, 0, 7]), np.array([3.0, 2.0, 1.0, 9.0, 4.0, 2.0])
    found = nearest_residues(keys, distances, 3)
    assert (found.indices.tolist(), found.distance.tolist()) == ([[0, 0], [1, 0], [2, 1]], [2.0, 9.0, 1.0])
    empty = nearest_residues(np.zeros(0, np.int64), np.zeros(0), 3)
    assert (empty.indices.shape, empty.distance.shape) == ((0, 2), (0,))


def plain_scores(
    predicted: Mapping[str, Chain],
    truth: Mapping[str, Chain],
    mapping: Mapping[str, str],
    partner: Mapping[str, Mapping[int, int]],
) -> dict[str, float]:
    """Compute the scores of a complex. partner: predicted chain -> predicted residue -> reference residue."""

    def label(name: str, i: int) -> tuple[str, str, int]:
        if name in mapping and i in partner[name]:
            return "both", mapping[name], partner[name][i]
        return "predicted", name, i

    paired = {("both", mapping[name], j) for name in mapping for j in partner[name].values()}
    contact: list[dict[frozenset[tuple[str, str, int]], float]] = []
    betas: list[dict[frozenset[tuple[str, str, int]], float]] = []
    for is_prediction, chains in ((False, truth), (True, predicted)):
        contact.append({})
        betas.append({})
        for a, b in itertools.combinations(chains, 2):
            for i, j in itertools.product(range(len(chains[a].sequence)), range(len(chains[b].sequence))):
                key = frozenset({label(a, i), label(b, j)} if is_prediction else {("both", a, i), ("both", b, j)})
                if (found := distance(chains[a], i, chains[b], j)) < 5:
                    contact[-1][key] = found
                x, y = beta(chains[a], i)[0], beta(chains[b], j)[0]
                if chains[a].mask[i, x] and chains[b].mask[j, y]:
                    found = float(np.linalg.norm(chains[a].positions[i, x].astype(float) - chains[b].positions[j, y]))
                    if found < 12:
                        betas[-1][key] = found

    def weight(x: float) -> float:
        return float(np.exp(-2 * (max(x - 5, 0) / 4.28) ** 2))

    total = whole = common = 0.0
    for key in betas[0].keys() | betas[1].keys():
        found_in = [side[key] for side in betas if key in side]
        value = weight(min(found_in))
        whole += value
        common += value if len(found_in) == 2 or key <= paired else 0.0
        total += value * (1 - abs(found_in[0] - found_in[-1]) / 12) if len(found_in) == 2 else 0.0
    shared = contact[0].keys() & contact[1].keys()
    residues = [frozenset[Any]().union(*side) for side in contact]
    return {
        "qs_global": total / whole,
        "qs_best": total / common,
        "ics": 2 * len(shared) / (len(contact[0]) + len(contact[1])),
        "ips": len(residues[0] & residues[1]) / len(residues[0] | residues[1]),
    }


def plain_interface_lddt(
    predicted: Mapping[str, Chain], truth: Mapping[str, Chain], mapping: Mapping[str, str], partner: Any
) -> dict[tuple[str, str], tuple[float, int]]:
    """Count the preserved pairs and all pairs of atoms between residues with Ca of each two chains."""
    of_truth = {r: p for p, r in mapping.items()}
    residue_of = {p: {j: i for i, j in found.items()} for p, found in partner.items()}
    counts = {}
    for a, b in itertools.combinations(truth, 2):
        kept, pairs = 0.0, 0
        rows = [[*np.argwhere(truth[name].mask > 0)] for name in (a, b)]
        for (i, x), (j, y) in itertools.product(*rows):
            if not all(name not in of_truth or truth[name].mask[k, CA] for name, k in ((a, i), (b, j))):
                continue
            d = np.linalg.norm(truth[a].positions[i, x].astype(float) - truth[b].positions[j, y])
            if d >= 15:
                continue
            pairs += 1
            atoms = []
            for name, k, atom in ((a, i, x), (b, j, y)):
                p = of_truth.get(name)
                if p is not None and k in residue_of[p]:
                    at = residue_of[p][k]
                    if predicted[p].mask[at, CA] and predicted[p].mask[at, atom]:
                        atoms.append(predicted[p].positions[at, atom].astype(float))
            if len(atoms) == 2:
                kept += np.mean([abs(np.linalg.norm(atoms[0] - atoms[1]) - d) < t for t in (0.5, 1, 2, 4)])
        counts[a, b] = (kept, pairs)
    return counts


@pytest.mark.parametrize("seed", range(6))
def test_the_scores_of_a_complex_are_their_definitions_whatever_is_missing(seed: int) -> None:
    """The prediction lacks chain C and the start of B, and has more chains and the end of D."""
    lengths = {"A": 7, "B": 6, "C": 5, "D": 8}
    truth = random_complex(seed, lengths, lost=0.15, box=16.0)
    more = random_complex(seed + 100, {"E": 6, "F": 4}, lost=0.15, box=16.0)
    moved = shaken(truth, seed, 0.7, lost=0.1)
    truth["D"] = part(truth["D"], slice(0, 6))
    # The predicted chains have other names and another order.
    names = {"P": "D", "Q": "B", "S": "A"}
    predicted = {p: dataclasses.replace(moved[r], id=p) for p, r in names.items()}
    predicted["Q"] = part(predicted["Q"], slice(1, None))
    predicted = {"E": more["E"]} | predicted | {"F": more["F"]}
    found = score(structure(*predicted.values()), structure(*truth.values()), names)
    partner = {
        p: {
            i: j
            for i, number in enumerate(predicted[p].author_numbers)
            for j, other in enumerate(truth[r].author_numbers)
            if number == other and predicted[p].mask[i].any() and truth[r].mask[j].any()
        }
        for p, r in names.items()
    }
    assert found.complex is not None
    ours = found.complex
    expected = plain_scores(predicted, truth, names, partner)
    assert {name: getattr(ours, name) for name in expected} == pytest.approx(expected, rel=1e-6)
    counts = plain_interface_lddt(predicted, truth, names, partner)
    kept, pairs = map(sum, zip(*counts.values()))
    assert ours.ilddt == pytest.approx(kept / pairs)
    similar = {(p, r): np.array([*partner[p].items()]) for p, r in names.items()}
    predicted_of = {r: p for p, r in names.items()}
    dockqs = []
    assert [one.chains for one in ours.interfaces] == [*contacts(truth)]
    for one in ours.interfaces:
        a, b = one.chains
        native = [pair for pair, value in near(truth[a], truth[b], 5).items() if value < 5]
        observed = [int(truth[name].mask.any(-1).sum()) for name in (a, b)]
        preserved, of = counts[a, b]
        whole: dict[str, Any] = {
            "chains": (a, b),
            "predicted": None,
            "contacts": len(native),
            "receptor": a if observed[0] > observed[1] else b,
        }
        scores: dict[str, float | None] = {"dockq": 0, "fnat": 0, "fnonnat": None, "irmsd": None, "lrmsd": None}
        if "C" not in (a, b):
            whole["predicted"] = (predicted_of[a], predicted_of[b])
            plain = plain_dockq(predicted, truth, similar, (a, b), whole["predicted"])
            scores = {name: value if np.isfinite(value) else None for name, value in plain.items()}
        dockqs.append((scores["dockq"], "C" in (a, b)))
        values = dataclasses.asdict(one)
        assert {name: values.pop(name) for name in whole} == whole
        assert values == pytest.approx(scores | {"ilddt": preserved / of if of else None}, abs=1e-6)
    assert ours.dockq == pytest.approx(np.mean([value for value, _ in dockqs]))
    assert ours.dockq_present == pytest.approx(np.mean([value for value, missing in dockqs if not missing]))
    assert ours.missing == [one for one in ours.interfaces if "C" in one.chains]
    assert (found.left_out, found.extra) == (["C"], ["E", "F"])


def test_interface_lddt_counts_each_two_chains() -> None:
    rng = np.random.default_rng(0)
    truth = rng.uniform(0, 12, (9, 3, 3))
    predicted = truth + rng.normal(0, 1, truth.shape)
    mask, present = rng.random((2, 9, 3)) < 0.8
    chain = list("AABBBCAAC")
    found = interface_lddt(predicted, truth, mask, present, chain)
    assert [*found] == [("A", "B"), ("A", "C"), ("B", "C")]
    for (a, b), counts in found.items():
        kept = pairs = 0.0
        for (i, x), (j, y) in itertools.product(np.argwhere(mask), repeat=2):
            if (chain[i], chain[j]) == (a, b) and (d := np.linalg.norm(truth[i, x] - truth[j, y])) < 15:
                pairs += 1
                error = abs(np.linalg.norm(predicted[i, x] - predicted[j, y]) - d)
                kept += np.mean([error < t for t in (0.5, 1, 2, 4)]) if present[i, x] and present[j, y] else 0
        assert counts.tolist() == pytest.approx([kept, pairs])


def test_a_contact_at_the_limit_is_none() -> None:
    """Two pairs of residues: the second is at exactly 5 angstrom in the reference, and nearer in the prediction."""
    chains = random_complex(0, {"A": 2, "B": 2}, lost=0.0)
    for chain, ys in ((chains["A"], (0, 0)), (chains["B"], (4, 5))):
        chain.mask[:] = 0
        chain.mask[:, [CA, CB]] = 1
        chain.positions[:, CA] = [(20 * k, y, 0) for k, y in enumerate(ys)]
        chain.positions[:, CB] = chain.positions[:, CA]
    nearer = chains["B"].positions.copy()
    nearer[1, :, 1] = 4.5
    predicted = {**chains, "B": dataclasses.replace(chains["B"], positions=nearer)}
    found = score(structure(*predicted.values()), structure(*chains.values()), {"A": "A", "B": "B"}).complex
    assert found is not None
    assert (found.ics, found.ips) == (pytest.approx(2 / 3), pytest.approx(2 / 4))
    (one,) = found.interfaces
    assert isinstance(one, InterfaceScore)
    assert (one.contacts, one.fnat, one.fnonnat) == (1, 1.0, 0.5)
