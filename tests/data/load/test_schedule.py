"""Compute order, state and schedule: no example is lost or repeated, whatever the ranks do."""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from warpfold.data.features.choose import SampleConfig, predicted_assembly_cost
from warpfold.data.load.order import Order, Source, costs, feature_costs, joined_clusters, paper_weights, split_keys
from warpfold.data.load.schedule import Draw, Schedule, State, deal, share_of
from warpfold.data.store.store import Store, StoreWriter, pack_record
from warpfold.errors import UserError


def make(path: Path, names: list[str], lengths: dict[str, int] | None = None) -> Store:
    with StoreWriter(path) as writer:
        for i, name in enumerate(names):
            meta = {"length": (lengths or {}).get(name, 50), "depth": 9, "cluster": str(i // 2)}
            writer.add(name, pack_record({"aatype": np.zeros(1, np.uint8)}, {}), meta)
        writer.finish()
    return Store(path)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make(tmp_path_factory.mktemp("schedule") / "store", [f"e{i}" for i in range(7)], {"e0": 800})


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make(tmp_path_factory.mktemp("schedule") / "other", [f"e{i}" for i in range(5)])


def keys(order: Order, indices: range) -> list[str]:
    return [order.entry(index).key for index in indices]


def test_an_epoch_has_every_entry_once_in_an_order_of_its_own(store: Store) -> None:
    order = Order([Source(store)], seed=3)
    epochs = [keys(order, range(7 * epoch, 7 * epoch + 7)) for epoch in range(4)]
    assert all(sorted(epoch) == sorted(store.keys) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert keys(Order([Source(store)], seed=4), range(7)) != epochs[0]
    assert keys(Order([Source(store)], seed=3), range(9, 12)) == [*epochs[1], *epochs[2]][2:5]


def test_the_papers_weights_favour_long_chains_of_small_clusters(store: Store) -> None:
    order = Order([Source(store)], seed=0, weights="paper")
    drawn = keys(order, range(8000))
    counts = np.array([drawn.count(key) for key in store.keys]) / 8000
    weights = np.array([1 / 2] + [0.5 / 2] * 5 + [0.5])  # e0 has 800 residues, e6 is alone in its cluster
    np.testing.assert_allclose(counts, weights / weights.sum(), atol=0.025)


def test_a_mixture_has_its_weights_and_each_source_its_own_epochs(store: Store, other: Store) -> None:
    order = Order([Source(store, weight=1), Source(other, weight=3)], seed=1)
    entries = [order.entry(index) for index in range(9000)]  # more than a block of the draw of sources
    assert np.mean([entry.source for entry in entries]) == pytest.approx(0.75, abs=0.02)
    for source, size in ((0, 7), (1, 5)):
        places = [entry.place for entry in entries if entry.source == source]
        whole = len(places) // size * size
        assert {tuple(sorted(epoch)) for epoch in np.reshape(places[:whole], (-1, size)).tolist()} == {
            tuple(range(size))
        }
    again = Order([Source(store, weight=0.25), Source(other, weight=0.75)], seed=1)
    assert [again.entry(index) for index in (8999, 3, 5000)] == [entries[index] for index in (8999, 3, 5000)]
    assert {entry.name for entry in entries} == {f"store:e{i}" for i in range(7)} | {f"other:e{i}" for i in range(5)}


def test_another_draw_is_of_the_same_source(store: Store, other: Store) -> None:
    for weights in ("uniform", "paper"):
        order = Order([Source(store), Source(other)], seed=1, weights=weights)
        for index in range(20):
            first, *more = (order.entry(index, draw) for draw in range(12))
            assert {entry.source for entry in more} == {first.source}
            assert len(set(more)) > 2


def test_unknown_keys_no_keys_and_senseless_weights_are_refused(store: Store) -> None:
    with pytest.raises(UserError, match="no entry 'zz'"):
        Source(store, ["zz"])
    with pytest.raises(UserError, match="no entries"):
        Source(store, [])
    for weight in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(UserError, match="positive number"):
            Source(store, weight=weight)


def test_held_out_clusters_are_whole_and_depend_on_the_seed_alone(store: Store) -> None:
    train, held = split_keys(store, 3, seed=1)
    assert sorted([*train, *held]) == sorted(store.keys)
    assert 3 <= len(held) <= 4
    assert {int(key[1:]) // 2 for key in train}.isdisjoint({int(key[1:]) // 2 for key in held})
    assert split_keys(store, 3, seed=1) == (train, held)
    assert len({tuple(split_keys(store, 3, seed)[1]) for seed in range(8)}) > 1
    assert split_keys(store, 0, seed=1) == (store.keys, [])
    with pytest.raises(UserError, match="leaves no training entries"):
        split_keys(store, 7, seed=1)


def used(state: State, below: int) -> set[int]:
    remaining = set(islice(state.remaining(), below))
    return set(range(below)) - remaining


@given(st.integers(0, 9), st.sets(st.integers(0, 30), max_size=9), st.integers(0, 12))
def test_a_state_is_the_set_of_what_was_used(first: int, early: set[int], number: int) -> None:
    state = State(first).changed(early=early)
    assert used(state, 60) == set(range(first)) | early
    assert state.first not in state.early
    remaining = list(islice(state.remaining(), number + 5))
    after = state.after(number)
    assert list(islice(after.remaining(), 5)) == remaining[number:]
    late = sorted(used(after, 60))[::3]
    assert used(after.changed(late=late), 60) == used(after, 60) - set(late)


@given(st.lists(st.sampled_from([0.5, 1.0, 1.5, 7.0]), min_size=12, max_size=12), st.sampled_from([1, 3, 5, 12, 20]))
def test_hands_are_those_of_the_rule(costs: list[float], ranks: int) -> None:
    """As in older runs, each goes to the first rank with the smallest sum that is not full."""
    sizes = [share_of(len(costs), ranks, rank) for rank in range(ranks)]
    hands: list[list[int]] = [[] for _ in range(ranks)]
    for place in sorted(range(len(costs)), key=lambda place: (-costs[place], place)):
        free = [rank for rank in range(ranks) if len(hands[rank]) < sizes[rank]]
        hands[min(free, key=lambda rank: (sum(costs[i] for i in hands[rank]), rank))].append(place)
    assert deal(costs, ranks) == [sorted(hand) for hand in hands]


def test_costs_are_those_of_making_and_of_computing(store: Store) -> None:
    order = Order([Source(store)], seed=3)
    cost = costs(order, SampleConfig(crop=100))
    found = {order.entry(index).name: cost(index) for index in range(7)}
    assert found["e0"] > 1.5 * found["e1"]  # a whole crop
    assert len({found[f"e{i}"] for i in range(1, 7)}) == 1
    assert sum(found.values()) == pytest.approx(14)  # twice the mean of 1


def planned(start: State, steps: int, examples: int, ranks: int) -> list[list[int]]:
    """Return the examples of each rank in each step."""
    schedules = [
        Schedule(start, steps, examples, rank, ranks, cost=lambda index: 1 + index * 7 % 5) for rank in range(ranks)
    ]
    return [[draw.number for draw, _ in schedule] for schedule in schedules]


def test_a_step_has_the_same_examples_on_any_number_of_ranks() -> None:
    alone = planned(State(4, (6, 9)), steps=5, examples=12, ranks=1)[0]
    assert alone[:4] == [4, 5, 7, 8]
    for ranks in (2, 3, 4, 5, 7, 12):
        dealt, shares = planned(State(4, (6, 9)), 5, 12, ranks), [share_of(12, ranks, rank) for rank in range(ranks)]
        assert max(shares) - min(shares) == (12 % ranks > 0)
        for step in range(5):
            each = [rank[step * share : (step + 1) * share] for rank, share in zip(dealt, shares)]
            assert sorted(index for part in each for index in part) == alone[step * 12 : (step + 1) * 12]


def test_what_was_used_is_repeated_in_whole_steps_before_the_rest_is_dealt() -> None:
    log = [Draw(3), Draw(0, 2), Draw(5), Draw(1), Draw(8)]
    schedule = Schedule(State(), steps=4, examples=2, replay=[log])
    assert list(schedule) == [
        *((draw, True) for draw in log[:4]),
        *((Draw(number), False) for number in (2, 4, 6, 7)),
    ]
    assert schedule.state(1) == State(1, (3,))
    assert schedule.state(2) == State(2, (3, 5))
    assert schedule.state(4) == State(8)
    assert schedule.state(3, late=[2], early=[6]) == State(2, (3, 4, 5, 6))


@pytest.fixture(scope="module")
def complexes(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Write a store with chains a to h in clusters of two, and assemblies of them."""
    path = tmp_path_factory.mktemp("schedule") / "complexes"
    groups = {"aab": ["a", "a", "b"], "ce": ["c", "e"], "just d": ["d"], "gh": ["g", "h"]}
    record = pack_record({"aatype": np.zeros(1, np.uint8)}, {})
    with StoreWriter(path) as writer:
        for i, name in enumerate("abcdefgh"):
            length = 512 if name in "gh" else 100
            meta = {"length": length, "depth": 9 + 1000 * (name == "c"), "cluster": str(i // 2), "chains": None}
            writer.add(name, record, meta)
        for name, keys in groups.items():
            writer.add(name, record, {"length": 100 * len(keys), "depth": 18, "cluster": None, "chains": keys})
        writer.finish()
    return Store(path)


def test_a_source_has_chains_or_assemblies(complexes: Store, store: Store) -> None:
    assert Source(complexes).keys == list("abcdefgh")
    assert Source(complexes, assemblies=True).keys == ["aab", "ce", "just d", "gh"]
    assert Source(store, assemblies=True).keys == store.keys  # each is an assembly of one chain
    assert (paper_weights(Source(store, assemblies=True)) == paper_weights(Source(store))).all()


def test_an_assembly_is_drawn_as_often_as_its_chains(complexes: Store) -> None:
    # Chains in no assembly, such as f, do not count: e is alone in its cluster.
    weights = paper_weights(Source(complexes, assemblies=True))
    np.testing.assert_allclose(weights, [2 * 0.5 / 2, 0.5 / 2 + 0.5, 0.5 / 2, 2 * 1 / 2])


def test_clusters_that_meet_in_an_assembly_are_held_out_together(complexes: Store) -> None:
    assert joined_clusters(Source(complexes, assemblies=True)) == ["0", "1", "1", "3"]  # c and d are in one cluster
    for seed in range(8):
        train, held = split_keys(complexes, 1, seed, assemblies=True)
        assert sorted([*train, *held]) == sorted(["aab", "ce", "just d", "gh"])
        assert held in (["aab"], ["gh"])  # not two while one remains


def test_an_assembly_costs_what_its_chains_and_their_rows_cost(complexes: Store) -> None:
    source = Source(complexes, assemblies=True)
    cost = dict(zip(source.keys, feature_costs(source, SampleConfig(crop=100, max_msa=4, max_extra=4))))
    assert cost["ce"] > cost["aab"] == cost["just d"]  # copies are read once
    many = SampleConfig(crop=100, max_msa=4, max_extra=4, pairing=False)
    assert dict(zip(source.keys, feature_costs(source, many)))["ce"] < cost["ce"]
    assert cost["just d"] == predicted_assembly_cost([(100, 9)], SampleConfig(crop=100, max_msa=4, max_extra=4))
