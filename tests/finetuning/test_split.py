"""Test splits of a store: parts share no cluster, a file reproduces the split, and misleading splits are refused."""

from pathlib import Path
from typing import cast

import pytest

from warpfold.data.load.order import Source, joined_clusters
from warpfold.data.pack.options import PackOptions
from warpfold.data.pack.pack import pack
from warpfold.data.store.store import Store
from warpfold.data.synthetic.folder import generate
from warpfold.errors import UserError
from warpfold.finetuning import split as splitting
from warpfold.finetuning.split import MIN_ENTRIES, SHARE, Split, make_split, read_split, without_relatives


@pytest.fixture(scope="module")
def proteins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("split") / "proteins"
    generate(folder, 40, 3, max_length=34)
    return folder


def packed(proteins: Path, out: Path, clusters: str | None = None, limit: float = 0.4) -> Store:
    """Pack the proteins.  clusters: the content of a cluster file."""
    given = None
    if clusters is not None:
        given = out.with_suffix(".clusters")
        given.write_text(clusters)
    pack([proteins], [], out, PackOptions(cluster_identity=limit), clusters=given)
    return Store(out)


@pytest.fixture(scope="module")
def store(proteins: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    return packed(proteins, tmp_path_factory.mktemp("store") / "store")


@pytest.mark.parametrize("seed", range(8))
def test_no_cluster_is_in_two_parts(store: Store, seed: int) -> None:
    split = make_split(store, seed)
    clusters = dict(zip(store.keys, joined_clusters(Source(store))))
    parts = [{clusters[key] for key in part} for part in split.parts.values()]
    assert len(parts[0] | parts[1] | parts[2]) == sum(map(len, parts))
    assert sorted(key for part in split.parts.values() for key in part) == sorted(store.keys)
    assert all(split.parts.values())
    assert len(split.training) > len(split.validation) + len(split.test)


def test_chains_are_held_out_in_equal_numbers(store: Store) -> None:
    split = make_split(store, 0, by="chain")
    held_out = round(SHARE * len(store.keys))
    assert [len(part) for part in (split.test, split.validation)] == [held_out, held_out]
    assert sorted([*split.training, *split.validation, *split.test]) == sorted(store.keys)


@pytest.mark.parametrize(
    ("entries", "held_out"), [(10, 2), (16, 2), (17, 3), (23, 3), (24, 4), (399, 60), (400, 60), (410, 60), (600, 60)]
)
def test_the_share_that_is_held_out(entries: int, held_out: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifteen percent are tests and as many validations, at least 2 and at most 60 of each."""
    keys = [f"k{number:03d}" for number in range(entries)]
    monkeypatch.setattr(splitting, "entry_keys", lambda store, assemblies: [] if assemblies else keys)
    split = make_split(cast("Store", None), 3, by="chain")
    assert (split.by, len(split.test), len(split.validation)) == ("chain", held_out, held_out)
    for part in split.parts.values():
        assert list(part) == sorted(part)
    assert sorted([*split.training, *split.validation, *split.test]) == keys


def families_of(monkeypatch: pytest.MonkeyPatch, sizes: list[int]) -> list[str]:
    """Let a store have clusters of these sizes.  Returns its keys."""
    clusters = [f"c{number}" for number, size in enumerate(sizes) for _ in range(size)]
    keys = [f"{cluster}k{number:03d}" for number, cluster in enumerate(clusters)]
    monkeypatch.setattr(splitting, "entry_keys", lambda store, assemblies: keys)
    monkeypatch.setattr(splitting, "Source", lambda store, assemblies: assemblies)
    monkeypatch.setattr(splitting, "joined_clusters", lambda source: source)
    monkeypatch.setattr(splitting, "families", lambda *given: clusters if given[:3] == (True, True, 0.35) else None)
    return keys


def split_families(seed: int) -> Split:
    return make_split(cast("Store", None), seed, assemblies=True, min_identity=0.35)


def test_large_clusters_stay_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20 entries 3 are tests, so a cluster of 6 may be held out, and one of 7 may not."""
    keys, held_out = families_of(monkeypatch, [7, 6, *[1] * 7]), set[str]()
    for seed in range(40):
        split = split_families(seed)
        assert split.by == "cluster"
        assert sorted(key for part in split.parts.values() for key in part) == keys
        for part in split.parts.values():
            assert list(part) == sorted(part)
        # A part is full with three entries. The cluster of six is held out if it is drawn for an empty part.
        assert sorted(map(len, (split.test, split.validation))) in ([3, 3], [3, 6])
        held_out |= {key[:2] for key in (*split.test, *split.validation)}
    assert held_out == {f"c{number}" for number in range(1, 9)}


def test_equal_clusters_are_held_out_in_equal_numbers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    families_of(monkeypatch, [1] * 20)
    splits = [split_families(seed) for seed in range(20)]
    assert {(len(split.training), len(split.validation), len(split.test)) for split in splits} == {(14, 3, 3)}
    assert len({split.test for split in splits}) > 10
    families_of(monkeypatch, [3, *[1] * 7])
    split_families(0)
    assert caplog.text == ""


def test_few_clusters_are_a_warning_and_fewer_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    families_of(monkeypatch, [4, *[1] * 6])
    split_families(0)
    assert caplog.messages == [
        "the structures are of 7 clusters of related proteins, too few for a verdict; the largest, of c0k000, has 4 of "
        "the 10 structures; add proteins of other families, or raise --split-identity"
    ]
    for sizes, clusters, largest in (([10], "1 cluster", 10), ([9, 1], "2 clusters", 9), ([5, 5], "2 clusters", 5)):
        families_of(monkeypatch, sizes)
        with pytest.raises(UserError) as raised:
            split_families(0)
        assert str(raised.value) == (
            f"the 10 structures are of {clusters}, too few or too unequal to hold some out without relatives in "
            f"training; the largest, of c0k000, has {largest} of the 10 structures; add proteins of other families, "
            "raise --split-identity, or split by chain and say: --one-family"
        )


def test_a_split_is_written_as_toml(tmp_path: Path) -> None:
    split = Split(by="cluster", training=("a", 'b"'), validation=("c",), test=())
    assert split.parts == {"training": ("a", 'b"'), "validation": ("c",), "test": ()}
    split.write(tmp_path / "split.toml")
    assert (tmp_path / "split.toml").read_text() == (
        "# Which entries are trained on, which choose the best parameters, and which test them.  `warpfold\n"
        '# finetune --split` takes this file.  by = "cluster": no cluster is in two parts.\n'
        'by = "cluster"\n\ntraining = [\n    "a",\n    "b\\"",\n]\n\nvalidation = [\n    "c",\n]\n\ntest = [\n]\n'
    )


def test_chains_are_split_by_default(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_split(store, 0, by="chain").write(tmp_path / "split.toml")
    asked = list[bool]()
    monkeypatch.setattr(splitting, "entry_keys", lambda store, assemblies: asked.append(assemblies) or store.keys)
    read_split(tmp_path / "split.toml", store)
    read_split(tmp_path / "split.toml", store, assemblies=True)
    assert asked == [False, True]


def test_a_split_by_chain_keeps_relatives() -> None:
    split = Split(by="chain", training=("a",), validation=("b",), test=("c",))
    assert without_relatives(split, cast("Store", None), 0.3) is split


def test_the_seed_decides(store: Store) -> None:
    assert make_split(store, 1) == make_split(store, 1) != make_split(store, 2)


def test_a_file_says_the_same_again(store: Store, tmp_path: Path) -> None:
    split = make_split(store, 0, by="chain")
    split.write(tmp_path / "split.toml")
    assert read_split(tmp_path / "split.toml", store) == split


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text.replace('test = [\n    "', 'test = [\n    "x'), "is not among the structures"),
        (lambda text: text.replace("test = [", 'test = [\n    "sample00000_A",'), "sample00000_A is in"),
        (lambda text: text.replace('by = "cluster"', 'by = "luck"'), "neither"),
        (lambda text: text.split("test = [")[0], "is not a split"),
        (lambda text: text.split("test = [")[0] + "test = []\n", "test is empty"),
        (lambda text: text + "valid = 1\n", "no key valid"),
        (lambda text: "}", "is not a split"),
    ],
)
def test_files_that_are_no_split(store: Store, tmp_path: Path, change, says: str) -> None:
    make_split(store, 0).write(tmp_path / "split.toml")
    changed = change((tmp_path / "split.toml").read_text())
    if says == "sample00000_A is in" and changed.count("sample00000_A") < 2:
        changed = changed.replace("training = [", 'training = [\n    "sample00000_A",')
    (tmp_path / "split.toml").write_text(changed)
    with pytest.raises(UserError, match=says):
        read_split(tmp_path / "split.toml", store)


def test_a_cluster_in_two_parts_is_refused(proteins: Path, tmp_path: Path) -> None:
    names = [f"sample{i:05d}_A" for i in range(40)]
    store = packed(proteins, tmp_path / "store", "\n".join(" ".join(names[i : i + 2]) for i in range(0, 40, 2)))
    text = 'by = "{}"\ntraining = ["sample00000_A"]\nvalidation = ["sample00002_A"]\ntest = ["sample00001_A"]\n'
    path = tmp_path / "split.toml"
    path.write_text(text.format("cluster"))
    with pytest.raises(UserError, match="of one cluster"):
        read_split(path, store)
    path.write_text(text.format("chain"))
    assert read_split(path, store).by == "chain"


def test_one_cluster_is_not_split_by_clusters(proteins: Path, tmp_path: Path) -> None:
    names = [f"sample{i:05d}_A" for i in range(40)]
    store = packed(proteins, tmp_path / "store", " ".join(names))
    with pytest.raises(UserError, match=r"of 1 cluster, .*--one-family"):
        make_split(store, 0)
    assert make_split(store, 0, by="chain").by == "chain"
    most = packed(proteins, tmp_path / "most", "\n".join([" ".join(names[:38]), *names[38:]]))
    # With every seed, the large cluster is in the training part.
    for seed in range(8):
        assert len(make_split(most, seed).training) == 38


def test_few_structures_are_refused(proteins: Path, tmp_path: Path) -> None:
    files = sorted((proteins / "mmcif").iterdir())[: MIN_ENTRIES - 1]
    pack(files, [], tmp_path / "store", PackOptions())
    with pytest.raises(UserError, match=f"{MIN_ENTRIES - 1} structures are too few"):
        make_split(Store(tmp_path / "store"), 0)
