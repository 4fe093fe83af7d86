"""Compare the order of examples, its weights, costs and held-out entries with loops over their definitions."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from warpfold.data.features.choose import SampleConfig, predicted_assembly_cost, predicted_cost
from warpfold.data.load.examples import ExampleDataset, Maker, PlannedExample, Quarantine, RunOrder, Sample, only
from warpfold.data.load.order import (
    Order,
    Source,
    SourceEntry,
    costs,
    feature_costs,
    joined_clusters,
    paper_weights,
    split_keys,
)
from warpfold.data.load.schedule import Draw, Schedule, State
from warpfold.data.load.workers import Failed
from warpfold.data.store.store import Store, StoreWriter, pack_record
from warpfold.errors import UserError
from warpfold.keyed import keyed_rng

# Length, depth and cluster of each chain.
CHAINS: dict[str, tuple[int, int, str | None]] = {
    "a": (100, 9, "x"), "b": (256, 1000, "x"), "c": (300, 40, "y"), "d": (512, 9, "z"), "e": (800, 20, "z"),
    "f": (400, 30, "y"), "g": (90, 5, "w"), "h": (100, 9, "x"), "i": (600, 7, "v"),
}  # fmt: skip
ASSEMBLIES = {"aab": ["a", "a", "b"], "cf": ["c", "f"], "bd": ["b", "d"], "g": ["g"], "ahb": ["h", "a", "b"],
              "i": ["i", "i"]}  # fmt: skip


def make(
    path: Path, chains: Mapping[str, Any] = CHAINS, assemblies: Mapping[str, Sequence[str]] | None = None
) -> Store:
    record = pack_record({"aatype": np.zeros(1, np.uint8)}, {})
    with StoreWriter(path) as writer:
        for name, (length, depth, cluster) in chains.items():
            meta: dict[str, Any] = {"length": length, "depth": depth, "cluster": cluster}
            writer.add(name, record, meta | ({"chains": None} if assemblies else {}))
        for name, members in (assemblies or {}).items():
            size = sum(CHAINS.get(member, (50,))[0] for member in members)
            writer.add(f"of {name}", record, {"length": size, "depth": 9, "cluster": None, "chains": list(members)})
        writer.finish()
    return Store(path)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make(tmp_path_factory.mktemp("one") / "store")


@pytest.fixture(scope="module")
def complexes(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make(tmp_path_factory.mktemp("two") / "complexes", assemblies=ASSEMBLIES)


def members_of(key: str) -> list[str]:
    """Return the unique chains of an entry, in their order."""
    return list(dict.fromkeys(ASSEMBLIES[key.removeprefix("of ")])) if key.startswith("of ") else [key]


def plain_weights(keys: Sequence[str], chains: Mapping[str, Any] = CHAINS) -> list[float]:
    drawn = {chain for key in keys for chain in members_of(key)}
    sizes = {cluster: sum(chains[chain][2] == cluster for chain in drawn) for _, _, cluster in chains.values()}
    return [
        sum(max(min(chains[chain][0], 512), 256) / 512 / sizes[chains[chain][2]] for chain in members_of(key))
        for key in keys
    ]


MIXED = ["b", "of aab", "a", "of ahb", "of cf", "e", "of i", "of g"]


def test_a_source_has_the_unique_chains_of_its_entries(complexes: Store, store: Store) -> None:
    for keys in (MIXED, ["of bd"], ["a", "c"], None):
        for source in (Source(complexes, keys), Source(complexes, keys, assemblies=True)):
            counts, rows = source.members()
            names = [members_of(key) for key in source.keys]
            assert counts.tolist() == [len(chains) for chains in names]
            assert [complexes.keys[row] for row in rows.tolist()] == [chain for chains in names for chain in chains]
            np.testing.assert_allclose(paper_weights(source), plain_weights(list(source.keys)), rtol=1e-12)
    assert Source(complexes).keys == [*CHAINS]
    assert Source(complexes, assemblies=True).keys == [f"of {name}" for name in ASSEMBLIES]
    # Keys of another store are looked up by name.
    other = Source(store, Source(complexes, ["e", "a"]).keys)
    assert (list(other.keys), other.column("length").values.tolist()) == (["e", "a"], [800, 100])
    assert list(Source(store, store.keys.take(np.array([3, 1]))).keys) == ["d", "b"]
    source = Source(store)
    assert (source.weight, list(source.keys)) == (1.0, [*CHAINS])


def test_chains_without_a_cluster_are_one_cluster(tmp_path: Path) -> None:
    chains = CHAINS | {"a": (100, 9, None), "e": (800, 20, None)}
    keys = ["a", "b", "c", "d", "e"]
    np.testing.assert_allclose(paper_weights(Source(make(tmp_path / "s", chains), keys)), plain_weights(keys, chains))


def test_missing_entries_are_named(store: Store, tmp_path: Path) -> None:
    advice = "Pack the store again, or name other entries."
    with pytest.raises(UserError) as refused:
        Source(store, ["b", "a", "zz", "c"])
    assert str(refused.value) == f"{store.path}: has no entry 'zz'. {advice}"
    broken = make(tmp_path / "broken", assemblies=ASSEMBLIES | {"lost": ["a", "b", "q"], "more": ["d", "e"]})
    for keys in (None, ["of cf", "of lost", "of more"]):
        with pytest.raises(UserError) as refused:
            Source(broken, keys, assemblies=True)
        assert str(refused.value) == f"{broken.path}: has no entry 'q'. {advice}"
    with pytest.raises(UserError) as refused:
        Source(store, [])
    assert str(refused.value) == f"{store.path}: no entries to draw from"
    assert Source(store, weight=0.5).weight == 0.5
    for weight in (0.0, math.inf, math.nan):
        with pytest.raises(UserError, match=re.escape(f"{store.path}: weight {weight}. Pass a positive number.")):
            Source(store, weight=weight)


@pytest.mark.parametrize("weights", ["uniform", "paper"])
def test_entries_are_drawn_as_defined(store: Store, complexes: Store, weights: Any) -> None:
    """Each source has its own epochs or draws, and each number of the mixture belongs to one source."""
    names: list[list[str]] = [[*CHAINS], ["a", "c", "e"], ["of aab", "of cf"]]
    sources = [Source(store), Source(complexes, names[1], weight=2.0), Source(complexes, names[2], weight=0.5)]
    alone, mixed = Order(sources[:1], 3, weights), Order(sources, 3, weights)
    assert (len(alone), len(mixed)) == (9, 14)
    prefixes = [f"{store.path}:", f"{complexes.path}:", f"{complexes.path}:"]
    # The second block of sources, back in the first one, and again in the second
    shares = np.cumsum([1 / 3.5, 2 / 3.5, 0.5 / 3.5])
    blocks = [keyed_rng(3, "mixture", block).random(4096) for block in range(3)]
    drawn = [int((level >= shares[:-1]).sum()) for levels in blocks for level in levels]
    for order, count in ((alone, 1), (mixed, 3)):
        for index in (0, 1, 12, 4095, 4096, 8190, 8192, 9000, 5, 4100, 13, 14, 30):
            source = drawn[index] if count > 1 else 0
            number = sum(other == source for other in drawn[:index]) if count > 1 else index
            prefix: list[str | int] = ["order", *([f"source {source}"] if source else [])]
            for draw in range(3):
                if weights == "paper":
                    total = np.cumsum(plain_weights(names[source]))
                    level = keyed_rng(3, *prefix, index, *([draw] if draw else [])).random() * total[-1]
                    place = next(i for i, end in enumerate(total) if level < end)
                elif draw:
                    rng = keyed_rng(3, *prefix, "replacement", index, draw)
                    place = int(rng.integers(len(names[source])))
                else:
                    epoch, position = divmod(number, len(names[source]))
                    place = int(keyed_rng(3, *prefix, epoch).permutation(len(names[source]))[position])
                key = names[source][place]
                name = key if count == 1 else prefixes[source] + key
                assert order.entry(index, draw) == SourceEntry(source, place, key, name)
            assert order.entry(index) == order.entry(index, 0)
    # Stores of different names are told apart by these.
    two = Order([Source(store), Source(complexes)], 3)
    assert {two.entry(index).name.split(":")[0] for index in range(30)} == {"store", "complexes"}
    assert Order([Source(store)], 3).entry(5) == Order([Source(store)], 3, "uniform").entry(5)


def plain_split(
    keys: Sequence[str], clusters: Sequence[str], held_out: int, seed: int, assemblies: bool
) -> tuple[list[str], list[str]]:
    groups = sorted(set(clusters))
    sizes = [list(clusters).count(group) for group in groups]
    drawn = keyed_rng(seed, "held out").permutation(len(groups)).tolist()
    if assemblies:
        drawn.sort(key=lambda group: max(sizes[group] - held_out, 0))
    held: set[str] = set()
    for group in drawn:
        if sum(clusters.count(name) for name in held) >= held_out:
            break
        held.add(groups[group])
    places = [cluster in held for cluster in clusters]
    return (
        [key for key, is_held in zip(keys, places) if not is_held],
        [key for key, is_held in zip(keys, places) if is_held],
    )


def test_clusters_are_joined_by_assemblies_and_held_out_as_defined(store: Store, complexes: Store) -> None:
    assert joined_clusters(Source(store)) == ["x", "x", "y", "z", "z", "y", "w", "x", "v"]
    # x and z occur in one assembly.
    assembled = ["x", "y", "x", "w", "x", "v"]
    assert joined_clusters(Source(complexes, assemblies=True)) == assembled
    keys = [f"of {name}" for name in ASSEMBLIES]
    for seed in range(20):
        for held_out in range(5):
            clusters = [cluster or "" for _, _, cluster in CHAINS.values()]
            expected = plain_split([*CHAINS], clusters, held_out, seed, False)
            for found in (split_keys(store, held_out, seed), split_keys(complexes, held_out, seed)):
                assert tuple(map(list, found)) == expected
            if held_out < 4:
                found = split_keys(complexes, held_out, seed, assemblies=True)
                assert tuple(map(list, found)) == plain_split(keys, assembled, held_out, seed, True)
        some = complexes.keys.take(np.array([1, 2, 3, 5]))
        found = split_keys(complexes, 1, seed, keys=some)
        assert tuple(map(list, found)) == plain_split(["b", "c", "d", "f"], ["x", "y", "z", "y"], 1, seed, False)
    with pytest.raises(UserError) as refused:
        split_keys(store, 9, 0)
    text = "holding out 9 of 9 leaves no training entries. Hold out fewer."
    assert str(refused.value) == f"{store.path}: {text}"


def test_clusters_are_joined_through_a_chain_of_assemblies(tmp_path: Path) -> None:
    """Each assembly shares a cluster with the next, in any order of their names."""
    chains = {str(i): (100, 9, cluster) for i, cluster in enumerate("gcafdbe")}
    groups = {f"{i}{i + 1}": [str(i), str(i + 1)] for i in (4, 0, 2, 1, 5)}
    source = Source(make(tmp_path / "s", chains, groups), assemblies=True)
    # 0-1-2-3 are g, c, a and f; 4-5-6 are d, b and e.
    expected = {"45": "b", "01": "a", "23": "a", "12": "a", "56": "b"}
    assert joined_clusters(source) == list(expected.values())


def test_costs_are_relative_to_their_means(store: Store, complexes: Store) -> None:
    config = SampleConfig(crop=256, max_msa=16, max_extra=32, chain_rows=50)

    def chain_cost(name: str) -> float:
        length, depth, _ = CHAINS[name]
        return predicted_cost(length, depth, config)

    def assembly_cost(sizes: list[tuple[int, int]]) -> float:
        return predicted_assembly_cost(sizes, config)

    # Chains of equal length, depth and cluster count as copies: a and h.
    expected = {name: chain_cost(name) for name in CHAINS} | {
        "of aab": assembly_cost([(200, 9), (256, 1000)]), "of cf": assembly_cost([(300, 40), (400, 30)]),
        "of bd": assembly_cost([(256, 1000), (512, 9)]), "of g": assembly_cost([(90, 5)]),
        "of ahb": assembly_cost([(200, 9), (256, 1000)]), "of i": assembly_cost([(1200, 7)]),
    }  # fmt: skip
    lengths = {name: CHAINS[name][0] for name in CHAINS}
    lengths |= {f"of {name}": sum(lengths[chain] for chain in chains) for name, chains in ASSEMBLIES.items()}
    for keys in (MIXED, [*CHAINS], None):
        source = Source(complexes, keys, assemblies=True)
        np.testing.assert_allclose(feature_costs(source, config), [expected[key] for key in source.keys], rtol=1e-12)
    names = [[*CHAINS], MIXED]
    order = Order([Source(store), Source(complexes, MIXED)], 1)
    for crop in (256, None):
        config = dataclasses.replace(config, crop=crop)
        features = [feature_costs(source, config) for source in order.sources]
        squares = [[min(lengths[key], crop or 10**6) ** 2 for key in keys] for keys in names]
        means = np.mean(np.concatenate(features)), np.mean(np.concatenate(squares))
        cost = costs(order, config)
        for index in range(40):
            source, place, *_ = order.entry(index)
            total = features[source][place] / means[0] + squares[source][place] / means[1]
            assert cost(index) == pytest.approx(total, rel=1e-12)


# States and schedules


def test_a_state_and_a_schedule_begin_with_nothing_used() -> None:
    assert State() == State(0, ())
    assert list(islice(State(2, (3, 5)).remaining(), 4)) == [2, 4, 6, 7]
    # Examples that have become unused, and used ones that close the gap
    state = State(5, (7, 9)).changed(late=[2, 7], early=[5, 12, 1])
    assert state == State(2, (3, 4, 5, 9, 12))
    assert state.changed(early=[2, 7]) == State(6, (7, 9, 12))
    for number in range(12):
        used = sorted({*range(2), 3, 4, 5, 9, 12, *list(islice(state.remaining(), number))})
        after = state.after(number)
        assert [*range(after.first), *after.early] == used
        assert after.first not in after.early
        assert after.early == tuple(sorted(after.early))
    assert list(Schedule(State(), 3)) == [(Draw(0, 0), False), (Draw(1, 0), False), (Draw(2, 0), False)]
    assert len(Schedule(State(), 3, 5, 2, 3)) == 3
    assert len(Schedule(State(), 3, 5, 0, 3)) == 6


def test_steps_that_all_ranks_have_completed_are_repeated() -> None:
    """The ranks have two, one and one examples of each step. The last rank has completed three steps."""
    replay = [[Draw(i) for i in (7, 0, 1, 12, 2, 9, 5)], [Draw(4), Draw(6, 1), Draw(3)], [Draw(8), Draw(10), Draw(11)]]
    ranks = [Schedule(State(), 5, 4, rank, 3, lambda index: float(index), replay) for rank in range(3)]
    assert [schedule.repeated for schedule in ranks] == [3, 3, 3]
    found = [list(schedule) for schedule in ranks]
    for rank, (draws, share) in enumerate(zip(replay, (2, 1, 1))):
        assert found[rank][: 3 * share] == [(draw, True) for draw in draws[: 3 * share]]
        assert len(found[rank]) == 5 * share
    # 5, 13, 14 and 15 are next. The first rank gets the most expensive one and, as it has two, the cheapest one.
    assert [[draw.number for draw, _ in rank[3 * share :]] for rank, share in zip(found, (2, 1, 1))] == [
        [5, 15, 16, 19], [14, 18], [13, 17],
    ]  # fmt: skip
    used = [{7, 0, 4, 8}, {1, 12, 6, 10}, {2, 9, 3, 11}, {5, 13, 14, 15}, {16, 17, 18, 19}]
    for steps in range(6):
        state = ranks[0].state(steps)
        assert {*range(state.first), *state.early} == set().union(*used[:steps])
    state = ranks[1].state(4, late=[3], early=[17])
    assert {*range(state.first), *state.early} == {*range(16), 17} - {3}
    short = [Schedule(State(), 2, 4, rank, 3, None, replay) for rank in range(3)]
    assert [schedule.repeated for schedule in short] == [2, 2, 2]


# Examples


class Named:
    """An order of 5 entries in which a number's draws follow one another."""

    def __init__(self) -> None:
        self.sources = [type("Source", (), {"keys": [*"abcde"], "store": type("Store", (), {"path": "data"})})]

    def entry(self, number: int, draw: int = 0) -> SourceEntry:
        return self.at(0, (number + 2 * draw) % 5)

    def at(self, source: int, place: int) -> SourceEntry:
        return SourceEntry(source, place, "abcde"[place], f"data:{'abcde'[place]}")


def run_order(schedule: Schedule, quarantine: Quarantine, **more: Any) -> RunOrder:
    return RunOrder(Named(), schedule, quarantine, **more)  # type: ignore[arg-type]


def test_a_run_plans_its_examples_and_replaces_unusable_ones() -> None:
    told: list[tuple[str, int, str]] = []
    quarantine = Quarantine(3, ["data:b"], lambda *about: told.append(about))
    assert "data:b" in quarantine
    assert "data:a" not in quarantine
    used: list[Draw] = []
    schedule = Schedule(State(), 4, 2, replay=[[Draw(1), Draw(0)]])
    order = run_order(schedule, quarantine, passes=lambda step: 1 + step % 3, used=used.append)
    assert (len(order), order.ended, order.begin()) == (8, False, False)
    plan = order.plan()
    planned = [next(plan) for _ in range(7)]
    # Examples that are repeated keep their entries. Number 6 is b, which is replaced by d.
    assert planned == [
        PlannedExample(0, Draw(1), SourceEntry(0, 1, "b", "data:b"), 1, True),
        PlannedExample(1, Draw(0), SourceEntry(0, 0, "a", "data:a"), 1, True),
        PlannedExample(2, Draw(2), SourceEntry(0, 2, "c", "data:c"), 2, False),
        PlannedExample(3, Draw(3), SourceEntry(0, 3, "d", "data:d"), 2, False),
        PlannedExample(4, Draw(4), SourceEntry(0, 4, "e", "data:e"), 3, False),
        PlannedExample(5, Draw(5), SourceEntry(0, 0, "a", "data:a"), 3, False),
        PlannedExample(6, Draw(6, 1), SourceEntry(0, 3, "d", "data:d"), 1, False),
    ]
    # Repeated examples are never exchanged, others only with equally many passes.
    kinds = [example.kind for example in planned]
    assert len(set(kinds)) == 5
    assert kinds[2] == kinds[3] != kinds[4] == kinds[5] != kinds[6]
    assert planned[6].job == (0, [[0, "d", "data:d", 6, 1]])
    assert only([Sample(1, "x", {})]) == Sample(1, "x", {}, source=0, key="")
    made = ExampleDataset(lambda *about: {"about": about})[planned[6].job[1][0]]  # type: ignore[dict-item,return-value]
    assert made == Sample(6, "data:d", {"about": (0, "d", 6, 1)}, 0, "d")  # type: ignore[dict-item]
    # d is replaced by a, whose next draw is c.
    other = order.substitute(planned[3], Failed("damaged"))
    assert other == dataclasses.replace(planned[3], draw=Draw(3, 1), entry=SourceEntry(0, 0, "a", "data:a"))
    assert told == [("data:d", 3, "damaged")]
    other = order.substitute(other, Failed("damaged too"))
    assert other == dataclasses.replace(planned[3], draw=Draw(3, 2), entry=SourceEntry(0, 2, "c", "data:c"))
    assert told[1:] == [("data:a", 3, "damaged too")]
    order.note(other)
    assert used == [Draw(3, 2)]
    # The first of three later examples is handed out late.
    assert order.exchanged() == ([], [])
    for example, late, early in (
        (planned[0], [], []), (planned[1], [], []), (other, [2], [3]), (planned[5], [2], [5]), (planned[2], [4], [5]),
        (planned[4], [], []),
    ):  # fmt: skip
        order.hand_out(example)
        assert order.exchanged() == (late, early)
        if order._count % 2 == 0:
            state = schedule.state(order._count // 2, late, early)
            assert order.state() == order.state([(late, early)]) == order.state([(late, []), ([], early)]) == state
    assert not order.ended
    order.hand_out(planned[6])
    with pytest.raises(AssertionError, match="in the middle of a step"):
        order.state()
    order.hand_out(next(plan))
    assert order.ended
    assert order.state() == State(8)


def test_every_entry_but_one_may_be_unusable() -> None:
    for usable in "abcde":
        quarantine = Quarantine(4, [f"data:{name}" for name in "abcde" if name != usable])
        order = run_order(Schedule(State(), 9), quarantine)
        assert {planned.entry.key for planned in order.plan()} == {usable}
        # Each number is drawn again until it is the usable entry.
        again = [planned.draw.again for planned in run_order(Schedule(State(), 9), quarantine).plan()]
        place = "abcde".index(usable)
        assert again == [next(draw for draw in range(9) if (number + 2 * draw) % 5 == place) for number in range(9)]
    quarantine = Quarantine(5, [f"data:{name}" for name in "abcde"])
    with pytest.raises(UserError, match=r"^data: none of its entries can be used$"):
        next(run_order(Schedule(State(), 9), quarantine).plan())


def test_a_quarantine_counts_every_entry_once() -> None:
    told: list[tuple[str, int, str]] = []
    quarantine = Quarantine(2, ["old"], lambda *about: told.append(about))
    quarantine.add("old", 3, "damaged")
    for number in (4, 5):
        quarantine.add("new", number, "damaged")
    assert told == [("new", 4, "damaged")]
    with pytest.raises(UserError) as refused:
        quarantine.add("more", 6, "too long.")
    assert told[1:] == [("more", 6, "too long.")]
    assert str(refused.value) == (
        "entries that cannot be used: 3, the last one more: too long; more than 2 stop a run (train.quarantine). See "
        "quarantine.jsonl, and repair or pack the data again."
    )
    Quarantine(1).add("new", 0, "damaged")


def test_examples_are_made_for_training_by_default(store: Store) -> None:
    config = SampleConfig()
    assert Maker((store,), config, 3) == Maker(
        (store,), config, 3, train=True, assemblies=False, sizes=0, multiple=1)  # fmt: skip
