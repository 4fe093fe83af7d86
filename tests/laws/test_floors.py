"""Imports only go to lower levels, and heavy packages are imported where they are used."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from laws_source import ROOT, imports, loaded_at_import, room, trees

from tests.journeys import MOST_FILES, circles, rooms

FLOORS = {
    **dict.fromkeys(("errors", "device", "host", "keyed", "memory", "ops", "geometry"), 0),
    **dict.fromkeys(("batch", "bulk", "download", "files", "progress", "settings", "arguments"), 1),
    **dict.fromkeys(("model", "data"), 2),
    "parallel": 3,
    "engine": 4,
    **dict.fromkeys(("check", "scoring"), 5),
    "cost": 6,
    **dict.fromkeys(("bench", "cluster"), 7),
    **dict.fromkeys(("adapt", "report", "training"), 8),
    "prediction": 9,
    **dict.fromkeys(("evaluation", "relaxation", "sequence_design"), 10),
    **dict.fromkeys(("demo_report", "demo_run", "finetuning"), 11),
    "cli": 12,
    # The entry points; `import warpfold` itself imports nothing (see below).
    **dict.fromkeys(("__init__", "__main__"), 13),
}

# The packages of `warpfold.data` through which a protein passes from file to batch. The packages in BESIDE are not part
# of this pipeline.
DATA = ("formats", "structure", "similar", "example", "store", "features", "load")
BESIDE = {"pack", "search", "synthetic"}

# Known exceptions: files that import each other, and packages with too many files
CIRCLES = {}
FULL: dict[str, int] = {}


def _crossings() -> list[tuple[str, str, str]]:
    """Return every import between parts of the package: location, importing part, imported part."""
    return [
        (f"{path}:{line} imports {name}", room(path), name.split(".")[1])
        for path, tree in trees().items()
        for name, line in imports(tree)
        if name.startswith("warpfold.") and name.split(".")[1] in FLOORS and name.split(".")[1] != room(path)
    ]


def _packages(rooms: set[str], packages: set[str]) -> list[str]:
    """Return every import of one of `packages` (or anything below) in one of `rooms`."""
    return [
        f"{path}:{line} imports {name}"
        for path, tree in trees().items()
        for name, line in imports(tree)
        if room(path) in rooms and any(name == package or name.startswith(f"{package}.") for package in packages)
    ]


def test_the_page_of_the_architecture_has_every_level() -> None:
    page = (ROOT / "docs/explanation/architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", page, re.MULTILINE)
    levels = {name.removesuffix(".py"): int(level) for level, names in rows for name in re.findall(r"`([^`]+)`", names)}
    assert levels == {name: level for name, level in FLOORS.items() if not name.startswith("__")}


def test_every_room_has_a_floor() -> None:
    assert {room(path) for path in trees()} <= set(FLOORS)


def test_imports_go_down() -> None:
    assert not [where for where, here, there in _crossings() if FLOORS[here] < FLOORS[there]]


def test_rooms_do_not_import_in_circles() -> None:
    edges = {(here, there) for _, here, there in _crossings()}
    assert not sorted((a, b) for a, b in edges if (b, a) in edges)


def test_files_do_not_import_in_circles() -> None:
    """No circular imports, including those for type checkers and within functions."""
    assert not circles(ROOT)


def test_no_room_is_a_drawer() -> None:
    """Parts above the limit are listed with their number of files: they may shrink, and no other may exceed it."""
    full = {room: count for room, count in rooms(ROOT).items() if count > MOST_FILES}
    assert not {room: count for room, count in full.items() if count > FULL.get(room, 0)}


def test_model_and_data_meet_in_the_feature_table_only() -> None:
    assert not _packages({"model"}, {"warpfold.data"}) + _packages({"data"}, {"warpfold.model"})


def test_data_goes_one_way() -> None:
    for path, tree in trees().items():
        if room(path) != "data" or len(path.parts) < 4:
            continue
        here = path.parts[2]
        assert here in {*DATA, *BESIDE}, f"{path}: name its room in DATA or BESIDE"
        for name, line in imports(tree):
            there = name.split(".")[2] if name.startswith("warpfold.data.") else here
            if there != here:
                assert there in DATA, f"{path}:{line} imports {name}, which stands beside the way"
                assert here in BESIDE or DATA.index(there) < DATA.index(here), f"{path}:{line} imports {name}: upwards"


def test_the_model_knows_no_cluster() -> None:
    assert not _packages({"model", "ops", "geometry", "data"}, {"torch.distributed"})


def test_the_model_knows_no_kernel() -> None:
    kernels = [where for where in _packages({"model", "ops", "geometry"}, {"triton"}) if "/ops/triton/" not in where]
    assert not kernels


def test_parsers_and_compressors_are_not_needed_to_compute() -> None:
    rooms = {"model", "ops", "geometry", "parallel", "batch", "settings"}
    assert not _packages(
        rooms, {"gemmi", "zstandard", "pyhmmer", "matplotlib", "warpfold.training", "warpfold.prediction"}
    )


def test_tables_need_no_torch() -> None:
    assert "torch" not in loaded_at_import(trees()[Path("warpfold/geometry/residue.py")])


# Imported one after another in one process: a package forbidden for one module is then forbidden for those before it.
LOADS = [
    {
        "warpfold": {"torch", "numpy", "gemmi", "matplotlib"},
        "warpfold.model.alphafold": {"gemmi", "zstandard", "matplotlib", "typer"},
        "warpfold.training.config": {"gemmi", "matplotlib", "typer"},
        "warpfold.data.load.examples": {"gemmi", "matplotlib", "typer"},
    },
    {"warpfold.cli": {"torch"}},
]


@pytest.mark.parametrize("absent", LOADS, ids=["python", "command"])
def test_importing_loads_no_more_than_it_uses(absent: dict[str, set[str]]) -> None:
    lines = [f"import {name}; print(*{{m.split('.')[0] for m in sys.modules}})" for name in absent]
    code = "\n".join(["import sys", *lines])
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert loaded.returncode == 0, loaded.stderr
    for (name, never), there in zip(absent.items(), loaded.stdout.splitlines(), strict=True):
        assert not never & set(there.split()), name


ALONE = """
import importlib, pkgutil, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("gemmi", "pyhmmer", "zstandard", "matplotlib", "typer"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
for room in ("ops", "model", "parallel", "engine", "check", "cost", "bench", "cluster"):
    package = importlib.import_module(f"warpfold.{room}")
    for module in pkgutil.walk_packages(package.__path__, f"warpfold.{room}."):
        importlib.import_module(module.name)
"""


def test_training_and_measuring_load_where_there_is_torch_and_little_else() -> None:
    """Every module of these parts can be imported on a machine that has a GPU, but no parsers and no compressors."""
    loaded = subprocess.run([sys.executable, "-c", ALONE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert loaded.returncode == 0, loaded.stderr
