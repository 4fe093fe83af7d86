"""The loader: example k is a function of the seed alone; processes that work ahead change nothing."""

from pathlib import Path

import numpy as np
import pytest

from warpfold.batch import Arrays
from warpfold.data.features import from_sequence
from warpfold.data.loader import Loader, read_example, split_keys
from warpfold.data.sample import SampleConfig
from warpfold.data.store import Store, StoreWriter, pack_record
from warpfold.errors import UserError
from warpfold.geometry.residue import RESTYPES

CONFIG = SampleConfig(crop=8, max_msa=2)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    path = tmp_path_factory.mktemp("loader") / "store"
    with StoreWriter(path) as writer:
        for i in range(7):
            raw = from_sequence(RESTYPES[i:] * (40 if i == 0 else 1), name=f"e{i}")
            meta = {"length": len(raw.aatype), "cluster": str(i // 2)}
            writer.add(raw.name, pack_record(raw.to_arrays(), raw.notes()), meta)
        writer.finish()
    return Store(path)


def assert_equal(a: tuple[str, Arrays], b: tuple[str, Arrays]) -> None:
    assert a[0] == b[0]
    assert a[1].keys() == b[1].keys()
    for name in a[1]:
        np.testing.assert_array_equal(a[1][name], b[1][name])


def test_an_epoch_has_every_example_once_in_an_order_of_its_own(store: Store) -> None:
    loader = Loader(store, CONFIG, seed=3)
    epochs = [[loader.key(7 * epoch + i) for i in range(7)] for epoch in range(4)]
    assert all(sorted(epoch) == sorted(store.keys) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert [Loader(store, CONFIG, seed=4).key(i) for i in range(7)] != epochs[0]


def test_any_example_can_be_asked_for_first(store: Store) -> None:
    here, there = Loader(store, CONFIG, seed=3), Loader(store, CONFIG, seed=3)
    run = list(here.stream(range(20)))
    resumed = list(there.stream(range(13, 20)))
    for a, b in zip(run[13:], resumed, strict=True):
        assert_equal(a, b)
    assert_equal(run[4], there.example(4))


def test_an_example_is_drawn_anew_in_every_epoch(store: Store) -> None:
    loader = Loader(store, SampleConfig(crop=8), seed=0, keys=["e0"])
    starts = {int(loader.example(i)[1]["residue_index"][0]) for i in range(6)}
    assert len(starts) > 3


def test_workers_deliver_the_same_in_order(store: Store) -> None:
    loader = Loader(store, CONFIG, seed=3)
    ahead = list(loader.stream([5, 2, 9], passes=lambda index: 1 + index % 2, workers=1))
    for a, b in zip(ahead, loader.stream([5, 2, 9], passes=lambda index: 1 + index % 2), strict=True):
        assert_equal(a, b)
    assert [len(features["msa_feat"]) for _, features in ahead] == [2, 1, 2]


def test_the_papers_weights_favour_long_chains_of_small_clusters(store: Store) -> None:
    loader = Loader(store, CONFIG, seed=0, weights="paper")
    counts = np.array([[loader.key(i) for i in range(8000)].count(key) for key in store.keys]) / 8000
    weights = np.array([1 / 2] + [0.5 / 2] * 5 + [0.5])  # e0 is of 800 residues, e6 alone in its cluster
    np.testing.assert_allclose(counts, weights / weights.sum(), atol=0.025)


def test_held_out_clusters_are_whole_and_depend_on_the_seed_alone(store: Store) -> None:
    train, held = split_keys(store, 3, seed=1)
    assert sorted(train + held) == sorted(store.keys)
    assert 3 <= len(held) <= 4
    assert {int(key[1:]) // 2 for key in train}.isdisjoint({int(key[1:]) // 2 for key in held})
    assert split_keys(store, 3, seed=1) == (train, held)
    assert len({tuple(split_keys(store, 3, seed)[1]) for seed in range(8)}) > 1
    assert split_keys(store, 0, seed=1) == (store.keys, [])
    with pytest.raises(UserError, match="leaves none"):
        split_keys(store, 7, seed=1)


def test_unknown_keys_and_no_keys_are_refused(store: Store) -> None:
    with pytest.raises(UserError, match="no entry 'zz'"):
        Loader(store, CONFIG, 0, keys=["zz"])
    with pytest.raises(UserError, match="no entries"):
        Loader(store, CONFIG, 0, keys=[])


def test_damage_is_named_also_through_a_worker(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "damaged"
    path.mkdir()
    for file in store.path.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    shard = path / "shard-00000.wfs"
    data = bytearray(shard.read_bytes())
    data[store.record("e3").arrays["msa"].starts[0]] ^= 1
    shard.write_bytes(data)
    loader = Loader(Store(path), CONFIG, 0, keys=["e3"])
    with pytest.raises(UserError, match="e3, msa: damaged"):
        read_example(loader.store, "e3")
    with pytest.raises(UserError, match="e3, msa: damaged"):
        list(loader.stream([0], workers=1))
