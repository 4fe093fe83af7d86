"""`bench data` prints all figures for a store of the user; our bench of simulated ranks runs the real loader."""

import json
from pathlib import Path

import pytest

from benchmarks.straggler import Simulation, epoch_gap, simulate, straggler
from warpfold.bench.data import bench_data, packing, rows, source_files, spread_out
from warpfold.data.pack.pack import pack
from warpfold.data.store.store import Store
from warpfold.data.synthetic.folder import generate
from warpfold.errors import UserError

CASE = Simulation(ranks=2, steps=6, step=0.002, making=0.002, slow_share=0.3, workers=1, ahead=2, window=4, examples=5)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Path]:
    folder = tmp_path_factory.mktemp("bench")
    generate(folder / "proteins", 6, seed=1)
    pack([folder / "proteins"], [folder / "proteins"], folder / "store")
    return Store(folder / "store"), folder


def test_all_is_measured(packed: tuple[Store, Path]) -> None:
    store, folder = packed
    found = bench_data(store, folder, entries=2)
    json.dumps(found, allow_nan=False)
    figures = found["features"]["1 pass"]
    assert figures["store, exact"] > figures["source files, exact"] > 0
    if Path("/proc/self/smaps_rollup").exists():
        assert found["processes"]["workers"] == 2
        assert 0 < found["processes"]["private_mib"] <= found["processes"]["proportional_mib"] < 200
    assert found["size"]["source files MB"] > 0
    assert len(found["pack"]) >= 2
    assert found["feeding"]["needed"] == round(8 / 0.41, 1)
    assert "feed 8 GPUs from 16 cores" in found["feeding"]["verdict"].replace("feeds", "feed")
    assert len(rows(found)) > 25
    assert "verdict" not in {what for _, what, _ in rows(found)}


def test_without_sources_what_needs_them_is_not_measured(packed: tuple[Store, Path]) -> None:
    found = bench_data(packed[0], entries=2)
    assert "pack" not in found
    assert found["features"]["1 pass"]["source files, exact"] is None
    assert "not measured" in {figure for *_, figure in rows(found)}


def test_entries_are_spread_over_depths(packed: tuple[Store, Path]) -> None:
    store, _ = packed
    depth = dict(zip(store.keys, store.column("depth")))
    chosen = [depth[key] for key in spread_out(store, 3)]
    assert chosen == sorted(set(chosen))
    assert max(chosen) == max(depth.values())


def test_sources_of_another_store_are_refused(packed: tuple[Store, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--sources"):
        source_files(packed[0], tmp_path, packed[0].keys[:1])


def test_the_sources_of_a_store_are_found_by_its_report(tmp_path: Path) -> None:
    generate(tmp_path / "proteins", 2, seed=1)
    files = sorted((tmp_path / "proteins").rglob("*.cif"))
    pack(files, [], tmp_path / "store")
    store = Store(tmp_path / "store")
    found = source_files(store, tmp_path / "proteins", store.keys)
    assert [structure for structure, _ in found.values()] == files
    assert len(packing(store, tmp_path / "proteins")) >= 2


def test_simulated_ranks_take_the_time_that_they_compute() -> None:
    seconds = simulate(CASE)
    assert len(seconds) == 6
    assert min(seconds) >= 0.002
    found = straggler(CASE)["results"]
    assert set(found) == {"without slow examples", "window", "in order"}
    assert found["without slow examples"]["against_without"] == 1
    assert epoch_gap(CASE)["anew"] > 0, "processes that begin anew are waited for"
