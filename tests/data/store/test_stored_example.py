"""Read examples from a store: equal to those in memory, and only chosen rows are read."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.data.examples import example, templates
from warpfold.data.example.pairing import Pairing
from warpfold.data.example.raw_example import CA, RawExample
from warpfold.data.features.choose import SampleConfig
from warpfold.data.features.make import make_features
from warpfold.data.store.store import Record, Store, StoreWriter, pack_record
from warpfold.data.store.stored_example import (
    TILE,
    StoredExample,
    entry_keys,
    example_arrays,
    example_notes,
    members,
    open_entry,
    pack_assembly,
    read_assembly,
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
    """Return the fields in which two examples differ, those of templates and pairing included."""
    first, two = ({**vars(x), "templates": None, "pairing": None} for x in (a, b))
    for fields, x in ((first, a), (two, b)):
        if x.templates is not None:
            fields |= {f"templates.{name}": value for name, value in vars(x.templates).items()}
        if x.pairing is not None:
            fields |= {f"pairing.{name}": value for name, value in vars(x.pairing).items()}
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


# ---- all properties


def paired(length: int = 150, depth: int = 20, unpaired: int = 16) -> RawExample:
    """Return a prediction whose last alignment rows are used only for pairing, with templates."""
    raw, rng = example(length, depth, seed=6), np.random.default_rng(6)
    rows = len(raw.msa)
    pairing = Pairing(
        rng.integers(0, 3, rows).astype(np.uint64), rng.random(rows).astype(np.float32),
        rng.integers(1, 2**62, rows).astype(np.uint64), np.arange(rows) < unpaired,
    )  # fmt: skip
    confidence = (np.arange(length) % 4 * 25).astype(np.float16)
    return replace(raw, pairing=pairing, confidence=confidence, templates=templates(2, length), resolution=None)


def stored(path: Path, raw: RawExample, **more: np.ndarray) -> Store:
    with StoreWriter(path) as writer:
        writer.add("a", pack_record(example_arrays(raw) | more, example_notes(raw)), {"length": raw.length})
        writer.finish()
    return Store(path)


@pytest.mark.parametrize("with_ca", [True, False])
def test_a_stored_example_has_all_properties_of_one_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_ca: bool
) -> None:
    """Each property costs one request, after that of the header."""
    raw = paired()
    assert raw.pairing is not None
    assert raw.positions is not None
    # A separate array of the CA is read instead of all atoms.
    ca = {"ca": raw.positions[:, CA] + 1} if with_ca else {}
    store = stored(tmp_path / "s", raw, **ca)
    asked: list[int] = []
    read = store.storage.read
    monkeypatch.setattr(store.storage, "read", lambda name, ranges: (asked.append(len(ranges)), read(name, ranges))[1])
    residues, rows = np.array([0, 3, 60, 149]), np.array([0, 4, 19])

    def requests(call: Callable[[StoredExample], Any]) -> int:
        copy = StoredExample(store, "a")
        assert copy.length == 150
        asked.clear()
        call(copy)
        return len(asked)

    example = StoredExample(store, "a")
    assert (example.sequence, example.length, example.depth) == (raw.sequence, 150, raw.depth)
    assert (example.templates_count, example.is_predicted) == (2, True)
    np.testing.assert_array_equal(example.profile, raw.profile)
    np.testing.assert_array_equal(example.whole_rows(rows), raw.msa[rows])
    assert example.pairing is not None
    for name, array in vars(raw.pairing).items():
        np.testing.assert_array_equal(getattr(example.pairing, name), array)
    for least in (0, 25, 25.01, 75, 100):
        atoms, expected = example.atoms(residues, least), raw.atoms(residues, least)
        assert atoms is not None
        assert expected is not None
        for array, other in zip(atoms, expected):
            np.testing.assert_array_equal(array, other)
    np.testing.assert_array_equal(example.atoms(residues)[1], raw.mask[residues])  # type: ignore[index]
    positions, mask = example.ca_positions()  # type: ignore[misc]
    np.testing.assert_array_equal(positions, raw.positions[:, CA] + with_ca)
    np.testing.assert_array_equal(mask, raw.mask[:, CA])  # type: ignore[index]
    assert not differences(example.take(slice(None)), raw)
    assert not differences(example.take(np.array([], np.int64), rows), raw.take(np.array([], np.int64), rows))
    none = np.array([], np.int64)
    assert not differences(example.take(residues, rows, none), raw.take(residues, rows, none))
    assert requests(lambda example: (example.whole_rows(rows), example.profile)) == 1
    assert requests(lambda example: example.pairing) == 1
    assert requests(lambda example: example.atoms(residues)) == 1
    assert requests(lambda example: example.ca_positions()) == 1
    assert requests(lambda example: example.take(residues, rows)) == 3


def test_rows_that_are_used_only_for_pairing_are_left_out_of_chains(tmp_path: Path) -> None:
    raw = paired()
    store = stored(tmp_path / "s", raw)
    assert store.record("a").notes == {
        "name": "x", "resolution": None, "release_date": None, "sources": [], "templates": ["0abc_A", "1abc_A"],
        "alone": 16,
    }  # fmt: skip
    alone = open_entry(store, "a", assemblies=False)
    assert isinstance(alone, StoredExample)
    assert (alone.depth, alone.pairing) == (16, None)
    expected = replace(raw, msa=raw.msa[:16], deletions=raw.deletions[:16], pairing=None)
    assert not differences(alone.take(slice(None)), expected)
    assembly = open_entry(store, "a", assemblies=True)
    assert not isinstance(assembly, StoredExample)
    assert (assembly.name, assembly.ids, assembly.chains[0].depth) == ("a", ("a",), 16)
    # All rows are used unpaired.
    full = replace(raw, pairing=replace(raw.pairing, unpaired=np.ones(raw.depth, bool)))  # type: ignore[type-var]
    assert "alone" not in example_notes(full)
    assert StoredExample(stored(tmp_path / "t", full), "a", pairing=False).depth == raw.depth
    # Templates that were looked for and not found.
    bare = replace(raw, templates=templates(0, 150), pairing=None, confidence=None, positions=None, mask=None)
    assert {name for name in example_arrays(bare) if name.startswith(("template", "pairing", "pos", "mask"))} == set()
    example = StoredExample(stored(tmp_path / "u", bare), "a")
    assert (example.templates_count, example.is_predicted, example.pairing) == (0, False, None)
    assert example.atoms(np.arange(3)) is example.ca_positions() is None
    assert example.take(slice(3)).templates is None


Edit = Callable[[Any], Any]
MISFITS: list[tuple[str, Edit, str]] = [
    *((name, lambda array: array[:-1], name) for name in ("residue_index", "profile", "positions", "mask")),
    *((name, lambda array: array[:-1], name) for name in ("confidence", "deletion_starts", "deletion_counts", "ca")),
    *((f"pairing_{name}", lambda array: array[:-1], f"pairing_{name}") for name in ("species", "unpaired")),
    *((f"pairing_{name}", lambda array: array.astype(np.int16), f"pairing_{name}") for name in ("digest", "identity")),
    *((f"template_{name}", lambda array: array[:1], f"template_{name}") for name in ("aatype", "sum_probs")),
    ("deletion_rows", lambda array: array[:-1], "deletion_counts"),
    ("profile", lambda array: np.float32(1), "profile"),
    ("pairing_digest", lambda array: None, "pairing_digest"),
    ("template_mask", lambda array: None, "template_mask"),
    ("mask", lambda array: None, "mask"),
    (
        "templates",
        lambda names: names[:1],
        ", ".join(f"template_{x}" for x in ("aatype", "positions", "mask", "sum_p")),
    ),
    ("msa", lambda array: array[:-1], "msa"),
    ("msa", lambda array: array[:, 0], "msa"),
    ("msa", lambda array: array[:, :0], "msa"),
    ("msa", lambda array: array[..., None], "msa"),
    ("aatype", lambda array: array[:0], "msa"),
]


@pytest.mark.parametrize(("what", "edit", "named"), MISFITS)
def test_arrays_that_do_not_fit_are_named(tmp_path: Path, what: str, edit: Edit, named: str) -> None:
    # The alignment has two tiles.
    raw = paired(140, 5, 3)
    assert raw.positions is not None
    raw = replace(raw, deletions=np.ones_like(raw.deletions))
    arrays: dict[str, Any] = {**example_arrays(raw), "ca": raw.positions[:, CA]}
    notes = example_notes(raw)
    held = arrays if what in arrays else notes
    changed = edit(held.pop(what))
    if changed is not None:
        held[what] = np.asarray(changed) if held is arrays else changed
    with StoreWriter(tmp_path / "s") as writer:
        writer.add("a", pack_record(arrays, notes), {})
        writer.finish()
    with pytest.raises(UserError, match=rf"/s: a: {named}.* do not fit\. Pack the store again\.$") as caught:
        StoredExample(Store(tmp_path / "s"), "a").take(slice(None))
    assert str(caught.value).count(",") == named.count(",")


def test_a_number_is_no_array_of_one_residue(tmp_path: Path) -> None:
    store = stored(tmp_path / "s", example(1, 0), profile=np.array(1.0))
    with pytest.raises(UserError, match=r"/s: a: profile do not fit\. Pack the store again\.$"):
        StoredExample(store, "a").take(slice(None))


# ---- assemblies


def test_assemblies_name_their_chains(tmp_path: Path) -> None:
    raw = {"a": example(6, 3, seed=1), "b": example(8, 2, seed=2)}
    identity = np.broadcast_to(np.eye(3, 4), (3, 3, 4))
    moved = identity + np.array([0, 0, 2.0])[:, None] * np.eye(4)[3]
    keys, entities = ["a", "b", "a"], [1, 2, 1]
    with StoreWriter(tmp_path / "s") as writer:
        for key, one in raw.items():
            writer.add(key, pack_record(example_arrays(one), example_notes(one)), {"chains": None})
        for name, operators, more in (("same", identity, ()), ("moved", moved, ("2001-02-03", 2.5))):
            record = pack_assembly(name, ["A", "B", "A-2"], keys, entities, operators, *more)
            writer.add(name, record, {"chains": keys})
        writer.finish()
    store = Store(tmp_path / "s")
    for name, operators, more in (("same", None, (None, None)), ("moved", moved, ("2001-02-03", 2.5))):
        record, assembly = store.record(name), read_assembly(store, name)
        assert record.notes == {
            "name": name, "ids": ["A", "B", "A-2"], "chains": keys, "entities": entities, "release_date": more[0],
            "resolution": more[1],
        }  # fmt: skip
        assert (assembly.name, assembly.ids, assembly.entities) == (name, ("A", "B", "A-2"), (1, 2, 1))
        assert [c.length for c in assembly.chains] == [6, 8, 6]
        assert assembly.chains[0] is assembly.chains[2]
        if operators is None:
            assert assembly.operators is None
            assert not record.arrays
        else:
            np.testing.assert_array_equal(assembly.operators, operators)  # type: ignore[arg-type]
            assert record.arrays["operators"].dtype == np.float64
    counts, rows = members(store)
    assert (counts.tolist(), rows.tolist()) == ([0, 0, 3, 3], [0, 1, 0, 0, 1, 0])
    assert (entry_keys(store, True), entry_keys(store, False)) == (["same", "moved"], ["a", "b"])


def test_a_store_without_assemblies_has_chains_alone(store: Store, tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "s") as writer:
        for key in ("a", "b"):
            writer.add(key, pack_record({}, {}), {"chains": None})
        writer.finish()
    for plain in (store, Store(tmp_path / "s")):
        counts, rows = members(plain)
        assert (counts.tolist(), rows.tolist()) == ([0] * len(plain), [])
        assert entry_keys(plain, True) == entry_keys(plain, False) == plain.keys


def test_assemblies_that_contradict_themselves_are_refused(tmp_path: Path) -> None:
    raw, turn = example(6, 3), np.eye(3, 4)[None]
    with StoreWriter(tmp_path / "s") as writer:
        writer.add("a", pack_record(example_arrays(raw), example_notes(raw)), {})
        for name, ids, keys, entities, operators in (
            ("fine", "A", "a", [1], turn),
            ("missing", "AB", "az", [1, 2], turn.repeat(2, 0)),
            ("ids", "AB", "a", [1], turn),
            ("entities", "A", "a", [1, 2], turn),
            ("none", "", "", [], turn[:0]),
            ("operators", "A", "a", [1], turn.repeat(2, 0) * [[[1]], [[0]]]),
            ("mirrored", "A", "a", [1], -turn),
        ):
            writer.add(name, pack_assembly(name, list(ids), list(keys), entities, operators), {})
        writer.finish()
    store = Store(tmp_path / "s")
    assert read_assembly(store, "fine").ids == ("A",)
    with pytest.raises(UserError, match=r"/s: missing: its chain z is not in the store\. Pack the store again\.$"):
        read_assembly(store, "missing")
    for name in ("ids", "entities", "none", "operators", "mirrored"):
        with pytest.raises(UserError, match=rf"/s: {name}: its chains and operators do not fit\. Pack the store again"):
            read_assembly(store, name)
