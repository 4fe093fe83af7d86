"""Permutation of equal chains: the best assignment is found for all motions, missing residues and crops."""

import itertools
import math
import time
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.model.proteins import random_motion
from warpfold.geometry.rigid import Rigid
from warpfold.model.permutation import nearest_copies, with_truth


@dataclass
class Scene:
    """An assembly with predicted chains that are copies in another frame."""

    points: Tensor  # [N, 3] predicted Ca
    copies: Tensor  # [C, N, 3]
    mask: Tensor  # [C, N]
    asym: Tensor  # [N]
    entity: Tensor  # [N]
    place: Tensor  # [N] copy of each residue

    def found(self) -> list[int]:
        """Compute the copy of each chain."""
        copy = nearest_copies(self.points, self.copies, self.mask, self.asym, self.entity)
        assert all(len(copy[self.asym == chain].unique()) == 1 for chain in self.asym.unique())
        return [int(copy[self.asym == chain][0]) for chain in self.asym.unique()]

    def expected(self) -> list[int]:
        return [int(self.place[self.asym == chain][0]) for chain in self.asym.unique()]


def scene(sizes: dict[int, list[int]], length: int = 12, noise: float = 0.5, seed: int = 0) -> Scene:
    """Build an assembly of chains of `length` residues, predicted with an error of `noise` angstrom on each axis.

    sizes: for each entity, by number, the copy of each of its chains. The largest of these numbers determines how many
    copies the assembly has. Copies without a chain are outside the crop.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    count = 1 + max(max(places) for places in sizes.values())
    copies, mask, asym, entity, place = [], [], [], [], []
    for number, places in sizes.items():
        shape = 8 * draw(length, 3)
        there = 1 + max(places)
        at = torch.stack([Rigid(random_motion(generator).rotation, 30 * draw(3)).apply(shape) for _ in range(count)])
        for copy in places:
            copies.append(at)
            mask.append((torch.arange(count) < there).double()[:, None].expand(-1, length))
            asym.append(torch.full((length,), len(asym) + 1))
            entity.append(torch.full((length,), number))
            place.append(torch.full((length,), copy))
    joined = torch.cat(copies, 1), torch.cat(mask, 1), torch.cat(asym), torch.cat(entity), torch.cat(place)
    points = joined[0][joined[4], torch.arange(len(joined[4]))]
    points = random_motion(generator).apply(points + noise * draw(*points.shape))
    return Scene(points, *joined)


@pytest.mark.parametrize(
    "sizes",
    [
        {1: [0, 1]},
        {1: [1, 0]},
        {1: [2, 0, 1]},
        {1: [3, 1, 0, 2]},
        {1: [1, 0], 2: [1, 0]},
        {1: [0], 2: [2, 0, 1]},
        {1: [2, 0], 2: [1]},  # some copies outside the crop
        {1: [5, 3, 4, 0, 1, 2, 6, 7]},  # too many assignments, so greedy
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", range(3))
def test_chains_get_the_copies_that_they_lie_at(sizes, seed):
    s = scene(sizes, seed=seed)
    assert s.found() == s.expected()


def by_hand(s: Scene, nearest_first: bool = False) -> list[list[int]]:
    """Find the cheapest assignments by trying every superposition of a chain on a copy and every assignment.

    The cost of an assignment is the sum of each chain's mean square distance from its copy times its residues.
    nearest_first: try only the greedy assignment of each superposition, in which the cheapest pair of a chain and a
    copy comes first, then the cheapest of the remaining pairs, and so on.
    """
    chains = [torch.nonzero(s.asym == chain)[:, 0] for chain in s.asym.unique()]
    entity = [int(s.entity[rows[0]]) for rows in chains]
    few = min(set(entity), key=lambda e: (int(s.mask[:, s.entity == e].any(1).sum()), e))
    own = {e: [chain for chain, of in enumerate(entity) if of == e] for e in entity}
    every = [[*itertools.permutations(range(len(s.copies)), len(own[e]))] for e in own]
    costs: dict[tuple[int, ...], float] = {}
    for anchor, rows in enumerate(chains):
        for copy in range(len(s.copies)):
            seen = rows[s.mask[copy, rows] > 0]
            if entity[anchor] != few or len(seen) < 3:
                continue
            moved = superposed(s.points, s.points[seen], s.copies[copy, seen])
            pairs: dict[tuple[int, int], float] = {}
            for chain, at in itertools.product(range(len(chains)), range(len(s.copies))):
                both = chains[chain][s.mask[at, chains[chain]] > 0]
                apart = (moved[both] - s.copies[at, both]).square().sum(-1).mean()
                pairs[chain, at] = float(apart) * len(chains[chain]) if len(both) else 1e12
            ways = [[nearest_of(pairs, own[e])] for e in own] if nearest_first else every
            for way in itertools.product(*ways):
                taken = dict(zip(itertools.chain(*own.values()), itertools.chain(*way)))
                key = tuple(taken[i] for i in range(len(chains)))
                costs[key] = min(sum(pairs[pair] for pair in taken.items()), costs.get(key, math.inf))
    least = min(costs.values())
    return [list(way) for way, cost in costs.items() if cost < least * (1 + 1e-9) + 1e-6]


def nearest_of(pairs: dict[tuple[int, int], float], chains: list[int]) -> tuple[int, ...]:
    """Assign copies to some chains greedily, the cheapest pair first."""
    taken: dict[int, int] = {}
    while len(taken) < len(chains):
        left = [pair for pair in pairs if pair[0] in {*chains} - taken.keys() and pair[1] not in taken.values()]
        chain, copy = min(left, key=pairs.__getitem__)
        taken[chain] = copy
    return tuple(taken[chain] for chain in chains)


def superposed(points: Tensor, mobile: Tensor, target: Tensor) -> Tensor:
    """Move `points` by the superposition of `mobile` on `target` (Kabsch 1976), with explicit coordinates."""
    a, b = mobile - mobile.mean(0), target - target.mean(0)
    u, _, vt = torch.linalg.svd(a.T @ b)
    turn = vt.T @ torch.diag(torch.tensor([1.0, 1.0, torch.linalg.det(vt.T @ u.T)], dtype=a.dtype)) @ u.T
    return (points - mobile.mean(0)) @ turn.T + target.mean(0)


@pytest.mark.parametrize("sizes", [{1: [1, 0]}, {1: [2, 1, 0]}, {1: [0, 3, 2, 1]}, {1: [1, 0], 2: [1, 0]}], ids=str)
@pytest.mark.parametrize("noise", [1.0, 20.0, 100.0], ids=lambda noise: f"noise{noise:g}")
def test_no_way_is_better_than_the_one_found(sizes, noise):
    """This holds even for random predictions with residues missing at random."""
    for seed in range(3):
        s = scene(sizes, length=9, noise=noise, seed=seed)
        s.mask = s.mask * (torch.rand(s.mask.shape, generator=torch.Generator().manual_seed(seed)) > 0.4)
        assert s.found() in by_hand(s)


def test_copies_that_nobody_saw_are_no_ways_to_be_counted(monkeypatch):
    """Three chains and three resolved copies of four have six assignments, which exceed a limit of five."""
    alike = 0
    for seed in range(8):
        s = scene({1: [0, 1, 2], 2: [3]}, noise=30.0, seed=seed)
        best, nearest = by_hand(s), by_hand(s, nearest_first=True)
        monkeypatch.setattr("warpfold.model.permutation.MAX_ASSIGNMENTS", 6)
        assert s.found() in best
        monkeypatch.setattr("warpfold.model.permutation.MAX_ASSIGNMENTS", 5)
        assert s.found() in nearest
        alike += nearest == best
    assert alike < 8


def test_what_was_not_seen_comes_last():
    s = scene({1: [0, 1, 2]})
    s.mask[1] = 0  # an unresolved copy
    assert sorted(s.found()) == [0, 1, 2]
    assert [s.found()[chain] for chain in (0, 2)] == [0, 2]
    two = scene({1: [2, 0]})
    two.mask[1] = 0  # a copy outside the crop is unresolved too
    assert two.found() == [2, 0]


@pytest.mark.parametrize("seen", [0, 1, 2, 3])
def test_few_residues_are_enough_or_do_no_harm(seen):
    s = scene({1: [1, 0], 2: [0]})
    s.mask[:] = 0
    s.mask[:, :seen] = 1
    s.mask[:, 12 : 12 + seen] = 1
    if seen:
        assert sorted(s.found()[:2]) == [0, 1]
    s.mask[:, -12:] = s.entity[-12:] == 2  # the other entity is the anchor
    s.mask[1, -12:] = 0
    if seen:
        assert s.found() == s.expected()


def test_nothing_seen_and_nothing_finite():
    s = scene({1: [1, 0]})
    nothing = Scene(s.points, s.copies, 0 * s.mask, s.asym, s.entity, s.place)
    assert set(nothing.found()) <= {0, 1}  # any copy, since all labels are masked
    for broken in (math.nan, math.inf):
        assert sorted(Scene(s.points * broken, s.copies, s.mask, s.asym, s.entity, s.place).found()) == [0, 1]


def test_parts_of_chains_find_the_copies_too():
    """A crop has different residues of each chain."""
    s = scene({1: [2, 0, 1]}, length=30)
    kept = torch.cat([torch.arange(0, 9), torch.arange(30 + 5, 30 + 25), torch.arange(60 + 20, 60 + 24)])
    crop = Scene(s.points[kept], s.copies[:, kept], s.mask[:, kept], s.asym[kept], s.entity[kept], s.place[kept])
    assert crop.found() == s.expected()


@pytest.mark.parametrize("seed", [3, 5, 6])
def test_the_entity_of_fewest_copies_is_laid_over_them(seed):
    """One chain of three copies is predicted with a wrong shape, the two chains of the other entity exactly."""
    s = scene({1: [2], 2: [1, 0]}, seed=seed)
    chain = s.points[s.asym == 1]
    s.points[s.asym == 1] = chain.mean(0) + 20 * torch.randn(chain.shape, generator=torch.Generator().manual_seed(seed))
    assert s.found()[1:] == s.expected()[1:]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_copies_that_one_of_its_chains_saw_are_copies_of_an_entity(seed):
    """The first entity has two resolved copies by its second chain, so the other entity's chain is the anchor."""
    s = scene({1: [1, 0], 2: [0]}, seed=seed)
    s.mask[:, s.asym == 1] = 0
    chain = s.points[s.asym == 2]
    s.points[s.asym == 2] = chain.mean(0) + 20 * torch.randn(chain.shape, generator=torch.Generator().manual_seed(seed))
    assert s.found()[1:] == s.expected()[1:]


def test_padding_belongs_to_no_chain():
    s = scene({1: [1, 0]})
    padded = nearest_copies(
        torch.cat([s.points, torch.zeros(4, 3)]),
        torch.cat([s.copies, torch.zeros(2, 4, 3)], 1),
        torch.cat([s.mask, torch.zeros(2, 4)], 1),
        torch.cat([s.asym, torch.zeros(4, dtype=torch.long)]),
        torch.cat([s.entity, torch.zeros(4, dtype=torch.long)]),
    )
    assert torch.equal(padded[:-4], s.place)


@pytest.mark.parametrize("seed", [0, 4, 5, 6])
def test_motions_and_numbers_do_not_matter(seed):
    s = scene({1: [3, 1, 0], 2: [1, 0]}, noise=15.0, seed=seed)
    first = s.found()
    generator = torch.Generator().manual_seed(3)
    moved = Scene(
        random_motion(generator).apply(s.points),
        random_motion(generator).apply(s.copies),
        s.mask,
        s.asym,
        s.entity,
        s.place,
    )
    assert moved.found() == first
    far = Scene(s.points, s.copies + 1e10, s.mask, s.asym, s.entity, s.place)  # to 2e-6 angstrom, in fp64
    assert far.found() == first
    order = torch.tensor([2, 0, 3, 1])  # new copy i was order[i]
    renumbered = Scene(s.points, s.copies[order], s.mask[order], s.asym, s.entity, s.place)
    assert [int(order[copy]) for copy in renumbered.found()] == first


def test_an_assembly_of_5000_residues_is_no_trouble():
    """24 copies of one chain and another entity are assigned correctly within seconds on one busy core."""
    places = torch.randperm(24, generator=torch.Generator().manual_seed(0)).tolist()
    s = scene({1: places, 2: [1, 0]}, length=200, noise=2.0)
    assert len(s.asym) > 5000
    start = time.process_time()
    assert s.found() == s.expected()
    assert time.process_time() - start < 10
    anchors = scene({1: places}, length=210, noise=2.0)
    assert anchors.found() == anchors.expected()


def test_a_batch_without_copies_is_left_as_it_is():
    batch = {"all_atom_positions": torch.zeros(3, 37, 3)}
    assert with_truth(batch, torch.ones(3, 37, 3)) == batch


@pytest.mark.gpu
def test_a_gpu_finds_the_same_copies():
    s = scene({1: [2, 0, 1], 2: [1, 0]}, noise=15.0)
    there = (x.cuda() for x in (s.points.float(), s.copies.float(), s.mask.float(), s.asym, s.entity))
    copy = nearest_copies(*there)
    assert copy.is_cuda
    here = nearest_copies(s.points.float(), s.copies.float(), s.mask.float(), s.asym, s.entity)
    assert torch.equal(copy.cpu(), here)
