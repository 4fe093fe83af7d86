"""Launch tables: nearest entries, tables for GPUs, and contexts that record or force launches."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ops.triton.toy_kernels import COPY, WIDE, copy_launch
from warpfold.errors import UserError
from warpfold.ops import dispatch
from warpfold.ops.triton import launch as launches
from warpfold.ops.triton.launch import (
    SHIPPED,
    Kernel,
    KernelConfig,
    LaunchTable,
    TableEntry,
    TiledKernel,
    config_for,
    file_of,
    forced,
    kernels,
    read,
    recorded,
    table_for,
    table_used,
)

CPU = torch.device("cpu")
KEYS = st.tuples(st.integers(0, 4096), st.integers(1, 4096))


def table(*keys: tuple[int, ...], kernel: str = "_copy") -> LaunchTable:
    """Make a table whose launches are identified by their numbers of warps."""
    entries = [TableEntry(kernel, key, KernelConfig({"BLOCK": 64}, i + 1, 1)) for i, key in enumerate(keys)]
    return LaunchTable(Path("toy.json"), {}, tuple(entries))


def warps(of: LaunchTable, *key: int) -> int:
    """Look up the number of warps of the configuration for a key."""
    found = of.nearest("_copy", key)
    assert found is not None
    return found.config.warps


def test_the_nearest_entry_is_taken() -> None:
    t = table((32, 256), (32, 2048), (8, 256))
    assert [warps(t, 32, n) for n in (1, 256, 700, 800, 10**6)] == [1, 1, 1, 2, 2]
    assert warps(t, 15, 256) == 3
    assert warps(t, 17, 256) == 1
    assert t.nearest("other", (32, 256)) is None


def test_of_equally_near_ones_the_smaller_key_is_taken_whatever_the_order() -> None:
    assert warps(table((128,), (32,)), 64) == 2
    assert warps(table((32,), (128,)), 64) == 1


@given(entries=st.lists(KEYS, min_size=1, max_size=6, unique=True), key=KEYS, data=st.data())
def test_the_order_of_entries_decides_nothing(entries, key, data) -> None:
    shuffled = data.draw(st.permutations(entries))
    found = [t[warps(table(*t), *key) - 1] for t in (entries, shuffled)]
    assert found[0] == found[1]


@given(entries=st.lists(KEYS, min_size=1, max_size=6, unique=True), at=st.integers(0, 5))
def test_an_entry_is_nearest_to_itself(entries, at) -> None:
    key = entries[at % len(entries)]
    assert entries[warps(table(*entries), *key) - 1] == key


def test_keys_of_another_version_are_refused() -> None:
    with pytest.raises(UserError, match=r"toy\.json: key \(32,\) belongs to another version"):
        table((32,)).nearest("_copy", (32, 64))


def test_sizes_of_another_version_are_refused(monkeypatch) -> None:
    monkeypatch.setitem(launches.KERNELS, "_copy", COPY)
    old = LaunchTable(Path("toy.json"), {}, (TableEntry("_copy", (1,), KernelConfig({"TILE": 64}, 1, 1)),))
    with table_used(old), pytest.raises(UserError, match="sizes TILE, which belong to another version"):
        config_for("_copy", (1,), CPU)


def test_an_entry_for_the_very_key_goes_before_a_near_one(monkeypatch) -> None:
    """A table may be tuned for few sizes, and its tiles may not fit others, which default.json may have."""
    partial, default = table((32, 256)), table((64, 256), (32, 512))
    monkeypatch.setattr(launches, "read", lambda path: default)
    by_default = {e.key: e.config for e in default.entries}
    with table_used(partial):
        assert config_for("_copy", (64, 256), CPU) is by_default[64, 256]
        assert config_for("_copy", (32, 512), CPU) is by_default[32, 512]
        assert config_for("_copy", (32, 256), CPU) is partial.entries[0].config
        assert config_for("_copy", (64, 300), CPU) is by_default[64, 256]  # no exact entry; this is nearer
        assert config_for("_copy", (32, 300), CPU) is partial.entries[0].config
        assert config_for("_copy", (16, 256), CPU) is partial.entries[0].config


def test_a_table_of_another_triton_is_not_used(gpu, monkeypatch, tmp_path) -> None:
    """Another compiler generates other code for the same tiles."""
    monkeypatch.setattr(launches, "home", lambda: tmp_path)
    path = tmp_path / "NVIDIA-Toy-9000.json"
    path.write_text('{"gpu": "NVIDIA Toy 9000", "triton": "2.0.0", "launches": []}')
    found, reason = table_for(gpu)
    assert found.path.name == "default.json"
    assert reason.startswith(
        f"the table made on this machine is of Triton 2.0.0, not {launches.triton_version()}; no ta"
    )


def test_a_table_in_use_and_forced_launches() -> None:
    by_hand = KernelConfig({"BLOCK": 8}, 7, 7)
    with table_used(table((32,), (64,))):
        assert config_for("_copy", (60,), CPU).warps == 2
        with forced({"_copy": by_hand}):
            assert config_for("_copy", (60,), CPU) is by_hand
        assert config_for("_copy", (60,), CPU).warps == 2
    with pytest.raises(LookupError, match="_copy"):
        config_for("_copy", (60,), CPU)


def test_names_of_gpus_are_names_of_files() -> None:
    assert file_of("NVIDIA H100 80GB HBM3") == "NVIDIA-H100-80GB-HBM3.json"
    assert file_of("AMD Instinct MI300X / VF") == "AMD-Instinct-MI300X-VF.json"
    assert file_of("../evil") == "evil.json"


@pytest.fixture
def gpu(monkeypatch, tmp_path) -> torch.device:
    """Stand in for a GPU, with a home without tables."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Toy 9000")
    monkeypatch.setattr(launches, "home", lambda: tmp_path)
    monkeypatch.setattr(launches, "family_table", lambda device: read(SHIPPED / "default.json"))
    return torch.device("cuda:0")


def test_an_unknown_gpu_gets_the_default_and_is_told(gpu) -> None:
    found, why = table_for(gpu)
    assert found.path == SHIPPED / "default.json"
    assert why == "no table for NVIDIA Toy 9000; make one: warpfold tune"


def test_a_known_gpu_gets_its_own_table(gpu, monkeypatch, tmp_path) -> None:
    shipped, home = tmp_path / "shipped", tmp_path / "home"
    for folder in (shipped, home):
        folder.mkdir()
    monkeypatch.setattr(launches, "SHIPPED", shipped)
    monkeypatch.setattr(launches, "home", lambda: home)
    for folder, why in ((shipped, "shipped"), (home, "made on this machine")):
        (folder / "NVIDIA-Toy-9000.json").write_text('{"gpu": "NVIDIA Toy 9000", "launches": []}')
        found, reason = table_for(gpu)
        assert found.path == folder / "NVIDIA-Toy-9000.json"
        assert reason == f"{why} for NVIDIA Toy 9000"


@pytest.mark.parametrize(
    ("major", "kilobytes", "hip", "name"),
    [
        (8, 163, None, "default"), (9, 227, None, "sm_90"), (10, 227, None, "sm_90"), (11, 227, None, "sm_90"),
        (8, 99, None, "99KB"), (12, 99, None, "99KB"), (7, 64, None, "64KB"), (7, 96, None, "64KB"),
        (9, 64, "6.4", "64KB"),
    ],
)  # fmt: skip
def test_a_gpu_without_a_table_gets_that_of_its_family(monkeypatch, major, kilobytes, hip, name) -> None:
    """The families are H100, A100, 4090 and 5090 with 99 KB per program, and AMD GPUs."""
    properties = SimpleNamespace(major=major, shared_memory_per_block_optin=kilobytes * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert launches.family_table(torch.device("cuda:0")).path == SHIPPED / f"{name}.json"


def test_of_three_tables_the_first_that_has_the_nearest_key_decides(monkeypatch) -> None:
    own, family, default = table((32, 256)), table((32, 256), (64, 256)), table((64, 256), (8, 8))
    monkeypatch.setattr(launches, "tables_for", lambda device: (own, family, default))
    launches.reset()
    found = [config_for("_copy", key, CPU) for key in ((32, 256), (64, 300), (8, 8))]
    assert found == [own.entries[0].config, family.entries[1].config, default.entries[1].config]
    launches.reset()


def test_what_is_no_gpu_gets_the_default() -> None:
    """Interpreted and recorded kernels use the tiles of a GPU."""
    for device in (CPU, torch.device("meta")):
        assert table_for(device)[0].path == SHIPPED / "default.json"


def test_a_launch_is_noted_with_its_key_and_its_arguments() -> None:
    launch = copy_launch(COPY, 5, 64)
    assert (launch.kernel, launch.grid, launch.config) == (COPY, (5,), COPY.candidates[0])
    assert {n: v for n, v in launch.arguments.items() if isinstance(v, int)} == {
        "rows": 5,
        "channels": 64,
        "stride": 64,
        "BLOCK": 64,
    }
    x = torch.empty(1, device="meta")
    arguments = {"x": x, "y": x, "rows": 1, "channels": 1, "stride": 1}
    with recorded() as outer, table_used(table((32,))):
        tiled = COPY.tiled((40,), x)
        with recorded() as inner:
            TiledKernel(WIDE, (1,), tiled.config, tiled.device).run((1,), **arguments)
        tiled.run((2,), **arguments)
    assert [(one.kernel.name, one.key) for one in outer] == [("_copy", (40,))]
    assert [one.kernel.name for one in inner] == ["_copy_wide"]


def test_arguments_are_the_kernels_own() -> None:
    tiled, x = TiledKernel(COPY, (), COPY.candidates[0], torch.device("meta")), torch.empty(1, device="meta")
    with recorded():
        with pytest.raises(KeyError, match="stride"):
            tiled.run((1,), x=x, y=x, rows=1, channels=1)
        with pytest.raises(TypeError, match="_copy takes no step"):
            tiled.run((1,), x=x, y=x, rows=1, channels=1, stride=1, step=2)


def test_the_package_says_which_table_without_triton() -> None:
    """`doctor` reports the table even if Triton is not installed."""
    code = (
        "import sys; sys.modules['triton'] = None; import torch; from warpfold.ops.triton.launch import table_for; "
        "print(table_for(torch.device('cpu'))[1])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "cpu is no GPU\n"), done.stderr


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_tables_are_of_this_version(path) -> None:
    """Every entry has an existing kernel with its sizes; keys of a kernel are unique and have the same length.

    The tables contain no version of Triton, because they serve all versions, as `./dev triton` checks.
    """
    found, known = read(path), kernels()
    assert "triton" not in found.head
    for entry in found.entries:
        assert entry.kernel in known, entry
        assert set(entry.config.sizes) == set(known[entry.kernel].candidates[0].sizes), entry
        assert entry.config.warps in (1, 2, 4, 8, 16), entry
        assert 1 <= entry.config.stages <= 8, entry
    pairs = [(e.kernel, e.key) for e in found.entries]
    assert len(set(pairs)) == len(pairs)
    assert len({(name, len(key)) for name, key in pairs}) == len({name for name, _ in pairs})
    if path.stem == "default":
        assert {name for name, _ in pairs} == set(known)


def test_the_default_tiles_are_candidates() -> None:
    """The candidates of a kernel include all tiles that it is launched with."""
    known = kernels()
    assert not [str(e) for e in read(SHIPPED / "default.json").entries if e.config not in known[e.kernel].candidates]


def test_tables_are_read_by_people_too() -> None:
    """A table has one launch per line, so that diffs are readable."""
    for path in SHIPPED.glob("*.json"):
        text = path.read_text(encoding="utf-8")
        entries = json.loads(text)["launches"]
        assert sum('"kernel"' in line for line in text.splitlines()) == len(entries), path


def test_products_of_fp32_follow_the_plan() -> None:
    """The plan decides for all kernels whether fp32 products are exact or use TF32."""
    said = re.compile(r"\b(allow_tf32|input_precision)=")
    own = [path.name for path in SHIPPED.parent.glob("*.py") if said.search(path.read_text())]
    assert not own, "take `, input_precision=...` out: `KernelConfig.options` says it"


@pytest.mark.parametrize("allowed", [False, True])
def test_what_runs_is_told_how_to_multiply_as_what_is_compiled_is(allowed: bool) -> None:
    """Triton's default is TF32, so that a launch without the option would round fp32 to ten bits."""
    told: list[dict[str, object]] = []

    class Function:
        arg_names = ("x", "BLOCK")

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda **given: told.append(given)

    kernel = TiledKernel(Kernel("toy", Function(), ()), (1,), KernelConfig({"BLOCK": 16}, 4, 2), CPU)
    x = torch.ones(1)
    dispatch.allow_tf32(allowed)
    try:
        kernel.run((1,), x=x)
        with recorded(run=True):
            kernel.run((1,), x=x)
        assert told[0] == told[1]
        assert ("tf32" in told[0]["allowed_dot_input_precisions"]) == allowed  # type: ignore[operator]
    finally:
        dispatch.allow_tf32(False)
