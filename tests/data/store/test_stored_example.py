"""Read examples from a store: equal to those in memory, and only chosen rows are read."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.data.examples import example, templates
from warpfold.data.example.raw_example import RawExample
from warpfold.data.features.choose import SampleConfig
from warpfold.data.features.make import make_features
from warpfold.data.store.store import Record, Store, StoreWriter, pack_record
from warpfold.data.store.stored_example import (
    TILE,
    StoredExample,
    example_arrays,
    example_notes,
    to_columns,
    to_tiles,
)
from warpfold.errors import UserError

EXAMPLES = {
    "short": example(20, 12, seed=1),
    "single": example(7, 0, seed=2, labels=False),
    "long": replace(example(300, 700, seed=3), templates=templates(5, 300), sources=("a.a3m", "b.sto")),
    "tile": replace(example(TILE, 30, seed=4), release_date="2001-02-03", resolution=None),
    "tile+1": example(TILE + 1, 30, seed=5),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    path = tmp_path_factory.mktemp("example") / "store"
    with StoreWriter(path) as writer:
        for key, raw in EXAMPLES.items():
            writer.add(key, pack_record(example_arrays(raw), example_notes(raw)), {"length": raw.length})
        writer.add("other", pack_record({"aatype": np.zeros(3, np.uint8)}, {}), {"length": 3})
        writer.finish()
    return Store(path)


def differences(a: RawExample, b: RawExample) -> list[str]:
    """Return the fields in which two examples differ, those of templates included."""
    first, two = ({**vars(x), "templates": None} for x in (a, b))
    for fields, x in ((first, a), (two, b)):
        if x.templates is not None:
            fields |= {f"templates.{name}": value for name, value in vars(x.templates).items()}
    wrong = [name for name in first.keys() ^ two.keys()]
    for name in first.keys() & two.keys():
        x, y = np.asarray(first[name]), np.asarray(two[name])
        if x.dtype != y.dtype or not np.array_equal(x, y):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("key", EXAMPLES)
def test_what_is_read_is_what_was_stored(store: Store, key: str) -> None:
    raw, stored = EXAMPLES[key], StoredExample(store, key)
    assert (stored.length, stored.depth, stored.templates_count) == (raw.length, raw.depth, raw.templates_count)
    assert not differences(StoredExample(store, key).take(slice(None)), raw)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), key=st.sampled_from(list(EXAMPLES)))
def test_a_part_is_the_part_of_the_whole(store: Store, data: st.DataObject, key: str) -> None:
    raw = EXAMPLES[key]
    start = data.draw(st.integers(0, raw.length - 1))
    stop = data.draw(st.integers(start + 1, raw.length))
    rows = np.array(sorted(data.draw(st.sets(st.integers(0, raw.depth - 1), min_size=1))))
    chosen = np.array(sorted(data.draw(st.sets(st.integers(0, 4)))) if raw.templates else [], np.int64)
    stored = StoredExample(store, key)
    assert not differences(stored.take(slice(start, stop), rows, chosen), raw.take(slice(start, stop), rows, chosen))
    residues = np.array(sorted(data.draw(st.sets(st.integers(0, raw.length - 1), min_size=1))))
    part = stored.take(residues, rows, chosen)
    assert not differences(part, raw.take(residues, rows, chosen))
    assert not differences(part, stored.take(residues, rows, chosen, stored.whole_rows(rows)))
    np.testing.assert_array_equal(part.msa, raw.msa[np.ix_(rows, residues)])
    np.testing.assert_array_equal(part.deletions, raw.deletions[np.ix_(rows, residues)])


@pytest.mark.parametrize("clustering", ["chain", "crop"])
def test_features_from_the_store_are_those_from_memory(store: Store, clustering: Literal["chain", "crop"]) -> None:
    config = SampleConfig(crop=64, max_msa=16, max_extra=32, clustering=clustering)
    for key, raw in EXAMPLES.items():
        stored, memory = (make_features(x, config, 0, (key, 5), 2, True) for x in (StoredExample(store, key), raw))
        assert stored.keys() == memory.keys()
        for name, array in memory.items():
            np.testing.assert_array_equal(stored[name], array, err_msg=name)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count the rows read from each stored array."""
    counts: dict[str, int] = {}
    whole = Record.read

    def counted(self: Record, name: str, rows: np.ndarray | None = None) -> np.ndarray:
        array = whole(self, name, rows)
        counts[name] = counts.get(name, 0) + len(array)
        return array

    monkeypatch.setattr(Record, "read", counted)
    return counts


@pytest.mark.parametrize(("clustering", "tiles"), [("chain", 3), ("crop", 1)])
def test_the_rows_of_an_example_are_read_once(
    store: Store, reads: dict[str, int], clustering: Literal["chain", "crop"], tiles: int
) -> None:
    config = SampleConfig(crop=20, max_msa=16, max_extra=32, clustering=clustering, block_fraction=0.0)
    for step in range(20):
        reads.clear()
        features = make_features(StoredExample(store, "long"), config, 0, ("long", step), 3, train=True)
        first, last = features["residue_index"][[0, -1]] // 100  # 300 residues are three tiles of 100
        if first == last:
            break
    assert reads["msa"] == tiles * EXAMPLES["long"].depth
    assert reads["deletion_rows"] < np.count_nonzero(EXAMPLES["long"].deletions) / 5


def test_only_what_is_chosen_is_read(store: Store, reads: dict[str, int]) -> None:
    stored = StoredExample(store, "long")
    assert (stored.length, stored.depth, stored.templates_count) == (300, EXAMPLES["long"].depth, 5)
    assert not reads
    stored.take(slice(50), np.arange(10), np.array([3]))
    assert reads["msa"] == 10  # one tile
    assert reads["positions"] == reads["aatype"] == 50
    assert reads["template_positions"] == 1
    assert reads["deletion_rows"] == np.count_nonzero(EXAMPLES["long"].deletions[:, :50])
    reads.clear()
    stored.take(slice(90, 110), np.arange(10), np.array([], np.int64))
    assert reads["msa"] == 20  # two tiles
    assert "template_positions" not in reads


def test_an_entry_of_something_else_is_refused(store: Store) -> None:
    with pytest.raises(UserError, match=r"other: lacks residue_index, profile, msa.*Pack the store again"):
        StoredExample(store, "other").take(slice(None))
    with pytest.raises(KeyError):
        StoredExample(store, "nothing")


def test_a_damaged_part_is_named_and_the_others_are_read(store: Store, tmp_path: Path) -> None:
    record = store.record("long")
    at = record.arrays["msa"].starts[0]
    copy = tmp_path / "store"
    copy.mkdir()
    for file in store.path.iterdir():
        data = bytearray(file.read_bytes())
        if file.suffix == ".wfs":
            data[at + 5] ^= 1
        (copy / file.name).write_bytes(data)
    damaged = Store(copy)
    with pytest.raises(UserError, match="long, msa: damaged"):
        StoredExample(damaged, "long").take(slice(None))
    last = np.array([EXAMPLES["long"].depth - 1])
    part = StoredExample(damaged, "long").take(slice(290, 300), last)
    assert not differences(part, EXAMPLES["long"].take(slice(290, 300), last))


def test_tiles_and_sparse_columns_hold_what_is_there() -> None:
    msa = np.arange(3 * 130).reshape(3, 130).astype(np.uint8)
    tiles = to_tiles(msa)
    assert tiles.shape == (6, 65)
    np.testing.assert_array_equal(np.concatenate([tiles[:3], tiles[3:]], axis=1), msa)
    columns = to_columns(np.array([[0, 2, 0], [5, 7, 0]], np.uint16))
    np.testing.assert_array_equal(columns["deletion_starts"], [0, 1, 3, 3])
    np.testing.assert_array_equal(columns["deletion_rows"], [1, 0, 1])
    np.testing.assert_array_equal(columns["deletion_counts"], [5, 2, 7])


@pytest.mark.parametrize(
    ("key", "clustering", "most"),
    [("long", "chain", 4), ("long", "crop", 3), ("tile", "chain", 3), ("single", "chain", 3)],
)
def test_an_example_asks_its_storage_a_few_times(
    store: Store, monkeypatch: pytest.MonkeyPatch, key: str, clustering: Literal["chain", "crop"], most: int
) -> None:
    """Each request is a wait, 20 ms for a remote store: header, rows, other arrays, deletions."""
    asked: list[str] = []
    read = store.storage.read
    monkeypatch.setattr(store.storage, "read", lambda name, ranges: (asked.append(name), read(name, ranges))[1])
    config = SampleConfig(crop=200, max_msa=16, max_extra=32, clustering=clustering)
    for step in range(10):
        asked.clear()
        make_features(StoredExample(store, key), config, 0, (key, step), 3, train=True)
        assert 2 <= len(asked) <= most
