"""Test splits of a store: parts share no cluster, a file reproduces the split, and misleading splits are refused."""

from pathlib import Path

import pytest

from warpfold.data.load.order import Source, joined_clusters
from warpfold.data.pack.options import PackOptions
from warpfold.data.pack.pack import pack
from warpfold.data.store.store import Store
from warpfold.data.synthetic.folder import generate
from warpfold.errors import UserError
from warpfold.finetuning.split import MIN_ENTRIES, SHARE, make_split, read_split


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
