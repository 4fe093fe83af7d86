"""Offline compilation: all launches of the shipped tables are within the limits of four architectures.

No GPU is needed. By default, the most demanding launch of each kernel is compiled for every architecture. Each tile of
the default table is compiled for one architecture only, and the tiles cycle through the architectures. With --slow,
every launch of the model with different code and every candidate are compiled.
"""

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend

from tests.ops.triton.budgets import BUDGETS, SMALL, Figures, breaches, distinct, figures
from tests.ops.triton.model_launches import FOREIGN, demanding, foreign_launches, launches_of, wider
from tests.ops.triton.toy_kernels import COPY, GIANT_TILES, SMALL_TILES, copy_launch, product_launch
from warpfold.bench.kernels import Workload
from warpfold.bench.kernels import launches_of as of_workload
from warpfold.check.op_profile import OpCase
from warpfold.model.alphafold import ModelConfig
from warpfold.ops.triton.compile import source
from warpfold.ops.triton.launch import (
    DOTS,
    SHIPPED,
    KernelConfig,
    KernelLaunch,
    LaunchTable,
    TableEntry,
    kernels,
    read,
    table_for,
    table_used,
)
from warpfold.parallel.plan import Plan, Precision

# With an empty Triton cache, one test compiles for a minute on a core that other tests may share.
pytestmark = [pytest.mark.timeout(900), pytest.mark.offline]
INITIAL = {"res": 256, "seq": 128, "extra": 1024, "tmpl": 4}
# The shipped table that precedes default.json on each architecture (`launch.family_table`).
FAMILY = {"sm_80": "default", "sm_90": "sm_90", "sm_100": "sm_90", "gfx942": "64KB", **dict.fromkeys(SMALL, "99KB")}
# Launches of the default table that spill and always did.  A smaller tile would change the order of sums.
KNOWN: tuple[str, ...] = (
    "attention_dkdv (8, 1, 8, 1024) BLOCK_Q 16, BLOCK_K 64, ROWS 1, 2 warps, 2 stages on sm_90"
    ": 8 bytes of a thread are spilled",
    "attention_dkdv_fp32 (32, 2, 256, 256) BLOCK_Q 32, BLOCK_K 32, ROWS 1, 4 warps, 2 stages on sm_80"
    ": 8 bytes of a thread are spilled",
    # Heads of width 64 in fp32, with the strides of padded lengths.
    "attention_dkdv_fp32 (64, 2, 256, 256) BLOCK_Q 16, BLOCK_K 32, ROWS 1, 4 warps, 2 stages on sm_80"
    ": 8 bytes of a thread are spilled",
    # For the extra alignment; cuBLAS products around the norm would move twice as many bytes.
    *(
        f"norm_linear_backward (64, 256) BLOCK_M 16, 8 warps, 1 stages on {arch}: {n} bytes of a thread are spilled"
        for arch, n in (("sm_80", 16), ("sm_80", 24), ("sm_80", 32), ("sm_89", 16), ("gfx942", 260))
    ),
    "norm_linear_backward (64, 80) BLOCK_M 16, 8 warps, 1 stages on sm_89: 8 bytes of a thread are spilled",
    # For lengths that are no multiples of 16, which are rare in training.  Some other tiles spill for multiples of 16,
    # it, and those of 32 positions, which fit, read the weights twice as often at every length.
    "triangle_factors_backward (128,) BLOCK_M 64, BLOCK_O 32, 4 warps, 2 stages on sm_90"
    ": 16 bytes of a thread are spilled",
    *(
        "triangle_out_backward (128,) BLOCK_M 64, BLOCK_O 16, 4 warps, 2 stages on sm_80"
        f": {spilled} bytes of a thread are spilled"
        for spilled in (32, 40)
    ),
    *(
        "triangle_factors (128,) BLOCK_M 128, BLOCK_O 32, 8 warps, 2 stages on gfx942"
        f": {spilled} bytes of a thread are spilled"
        for spilled in (28, 124)
    ),
    # For GPUs with 99 KB.
    *(
        f"{launch}: 8 bytes of a thread are spilled"
        for launch in (
            "triangle_out_weight (128,) BLOCK_M 32, BLOCK_O 64, 8 warps, 2 stages on sm_120",
            "adam_step (4296015872,) BLOCK 1024, 4 warps, 1 stages on sm_89",
        )
    ),
    # For layers of third-party models without biases, and for 64 sequences.
    "triangle_factors_backward (128,) BLOCK_M 64, BLOCK_O 32, 4 warps, 2 stages on sm_80"
    ": 56 bytes of a thread are spilled",
)
# With Triton 3.6 only; all except the first for a model that is wider than AlphaFold2.
if triton.__version__.startswith("3.6."):
    KNOWN += (
        *(
            f"triangle_factors_backward (256,) BLOCK_M 32, BLOCK_O 16, 8 warps, 2 stages on {arch}"
            ": 16 bytes of a thread are spilled"
            for arch in ("sm_90", "sm_100")
        ),
        "triangle_factors_weight (256,) BLOCK_M 32, BLOCK_O 16, 8 warps, 2 stages on gfx942"
        ": 40 bytes of a thread are spilled",
    )
# With Triton 3.9 only, where fewer launches fit, because the tables were made with 3.7.
if triton.__version__.startswith("3.9."):
    KNOWN += tuple(
        f"{launch}: {spilled} bytes of a thread are spilled"
        for launch, spilled in {
            "layer_norm (384, 4) BLOCK_M 8, 4 warps, 1 stages on sm_80": 16,
            "attention_dbias (64, 2, 256, 256) BLOCK_Q 64, BLOCK_K 32, 4 warps, 2 stages on sm_80": 8,
            "attention_dq_fp32 (64, 2, 256, 256) BLOCK_Q 16, BLOCK_K 32, ROWS 1, 2 warps, 2 stages on sm_80": 8,
            "aligned_errors_frames (2048, 3584) BLOCK_F 16, BLOCK_P 32, 4 warps, 1 stages on sm_90": 8,
            "transition_fp32 (128, 256, 2) BLOCK_M 16, BLOCK_H 16, BLOCK_K 16, 4 warps, 1 stages on sm_80": 8,
            "triangle_out (256,) BLOCK_M 64, BLOCK_O 16, 8 warps, 2 stages on gfx942": 32,
            "tail (128, 128) BLOCK_M 64, BLOCK_K 64, BLOCK_C 128, 8 warps, 2 stages on sm_120": 8,
        }.items()
    )


# In the headline step.  wgmma needs tiles of 64 rows, but global attention has 8 queries and a bias has 8 heads.
# A loop over a single tile, with few outputs or inputs, has nothing to load ahead.
BESIDE = (
    *(f"attention_{of} (8, 1, 8, 1024): products without wgmma" for of in ("forward", "dq", "dkdv")),
    "norm_linear_backward (128, 8): products without wgmma",
    # Template pointwise attention has a single query.
    *(f"attention_{of} (16, 1, 1, 4): products without wgmma" for of in ("forward", "short")),
    *(f"norm_linear {key}: products whose operands nobody loads ahead" for key in ((128, 8), (64, 64), (256, 64))),
    "tail_backward (64, 64): products whose operands nobody loads ahead",
)


@cache
def launches(table: str, precision: Precision) -> tuple[KernelLaunch, ...]:
    """Record all launches of a step of initial training with a table, for AlphaFold2 and for a wider model."""
    plan = Plan(precision=precision)
    with table_used(read(SHIPPED / f"{table}.json")):
        return tuple(launch for model in (ModelConfig(), wider()) for launch in launches_of(plan, model, INITIAL))


def over_budget(found: Iterable[KernelLaunch], arch: str) -> list[str]:
    """List the limits that launches exceed, except known cases."""
    budget = (BUDGETS | SMALL)[arch]
    wrong = [
        f"{launch.kernel.name} {launch.key} {launch.config} on {arch}: {breach}"
        for launch in found
        for breach in breaches(launch, figures(launch, budget.target), budget)
    ]
    return [line for line in wrong if line not in KNOWN]


def beside_the_fast_path(launch: KernelLaunch, found: Figures, arch: str) -> list[str]:
    """List matrix products without wgmma on sm_90 or without asynchronous loads with stages, except known cases."""
    wrong = []
    if found.dots and arch == "sm_90" and not found.wgmma:
        wrong.append(f"{launch.kernel.name} {launch.key}: products without wgmma")
    if found.dots and launch.config.stages > 1 and not found.copies:
        wrong.append(f"{launch.kernel.name} {launch.key}: products whose operands nobody loads ahead")
    return [line for line in wrong if line not in BESIDE]


def retiled(launch: KernelLaunch, config: KernelConfig) -> KernelLaunch:
    """Return the launch with other tiles for compilation; the grid stays the same."""
    return dataclasses.replace(launch, config=config, arguments={**launch.arguments, **config.sizes})


@cache
def by_kernel() -> dict[str, list[KernelLaunch]]:
    """Return each kernel's launches with different code, sorted by keys."""
    found: dict[str, list[KernelLaunch]] = {}
    for launch in distinct([*launches("default", "bf16"), *launches("default", "fp32")]):
        found.setdefault(launch.kernel.name, []).append(launch)
    return {name: sorted(those, key=lambda launch: math.prod(launch.key)) for name, those in found.items()}


@pytest.mark.parametrize("arch", BUDGETS)
def test_the_most_demanding_launches_are_within_the_budget(arch) -> None:
    wrong = over_budget(demanding(launches(FAMILY[arch], "bf16")), arch)
    assert not wrong


def test_in_fp32_they_are_too() -> None:
    wrong = over_budget(demanding(launches("default", "fp32")), "sm_80")
    assert not wrong


@pytest.mark.parametrize("positions", [133, 4900])  # below 4,096: fp32 weights
@pytest.mark.parametrize("channels", [16, 24, 32, 48, 64])
def test_transitions_narrower_than_the_models_are_within_the_budget(channels: int, positions: int) -> None:
    """On Hopper, ptxas 12.8 omitted descriptors for 32 channels by 64 hidden units."""
    of = OpCase(op="transition", where="rows", rows=7, length=positions // 7, channels=channels, outputs=4 * channels)
    with table_used(read(SHIPPED / "sm_90.json")):
        assert not over_budget(distinct(of_workload(Workload("transition", of, "bf16"))), "sm_90")


def largest_of_each_tile(table: LaunchTable) -> list[TableEntry]:
    """Return the entries of a table that no other entry covers.

    A covering entry has the same kernel and configuration, and a key that is at least as large in every number."""

    def covers(a: TableEntry, b: TableEntry) -> bool:
        same = (a.kernel, a.config) == (b.kernel, b.config)
        return same and a.key != b.key and all(x >= y for x, y in zip(a.key, b.key))

    return [entry for entry in table.entries if not any(covers(other, entry) for other in table.entries)]


def test_every_tile_of_the_default_table_is_within_the_budget() -> None:
    """Compile each tile for one architecture. The tiles of a kernel cycle through the architectures.

    The launch is the most demanding one with this entry, or the launch with the nearest key if the model has none.
    """
    wrong, table = [], read(SHIPPED / "default.json")
    most = [launch for precision in ("bf16", "fp32") for launch in demanding(launches("default", precision))]
    compiled_above = {(launch.kernel.name, launch.config) for launch in most}
    entries = [e for e in largest_of_each_tile(table) if (e.kernel, e.config) not in compiled_above]
    # Each kernel starts with the first architecture, so that a tile's does not depend on other kernels' entries.
    of_kernel: dict[str, Iterator[str]] = defaultdict(lambda: itertools.cycle(BUDGETS))
    for entry in entries:
        arch = next(of_kernel[entry.kernel])
        if any(entry.kernel == own.kernel for own in read(SHIPPED / f"{FAMILY[arch]}.json").entries):
            arch = "sm_80"  # others have another tile
        launched = by_kernel()[entry.kernel]
        own = [launch for launch in launched if table.nearest(entry.kernel, launch.key) == entry]
        nearest = min(launched, key=lambda launch: sum(abs(math.log2(a / b)) for a, b in zip(launch.key, entry.key)))
        (chosen,) = demanding(own or [nearest])
        wrong += over_budget([retiled(chosen, entry.config)], arch)
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("arch", BUDGETS)
def test_planes_whose_rows_are_padded_are_within_the_budget(arch) -> None:
    plan, sizes = Plan(precision="bf16"), INITIAL | {"res": 250}
    with table_used(read(SHIPPED / f"{FAMILY[arch]}.json")):
        found = launches_of(plan, ModelConfig(), sizes)
    padded = [
        launch for launch in found if launch.arguments.get("PADDED") and launch.kernel.name.startswith("triangle")
    ]
    assert padded
    assert not over_budget(demanding(padded), arch)


@pytest.mark.parametrize(("width", "arch"), [(24, "sm_80"), (48, "sm_90")])
def test_heads_of_other_widths_are_within_the_budget(width: int, arch: str) -> None:
    found = distinct(foreign_launches(f"pair bias, {width}", torch.bfloat16), BUDGETS[arch].target)
    attention = [launch for launch in found if launch.kernel.name.startswith("attention")]
    assert [launch.key[0] for launch in attention] == [width] * 3
    assert not over_budget(attention, arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", FOREIGN)
def test_layers_of_other_models_are_within_the_budget(name: str, arch: str) -> None:
    found = foreign_launches(name, torch.bfloat16)
    assert found
    assert not over_budget(distinct(found, BUDGETS[arch].target), arch)


def test_an_entry_covers_those_that_take_less() -> None:
    tile, other = SMALL_TILES, GIANT_TILES
    entries = [TableEntry("k", key, config) for key, config in (((64, 2), tile), ((64, 4), tile), ((8, 8), tile))]
    entries += [TableEntry("k", (8, 2), other), TableEntry("l", (8, 2), tile)]
    assert largest_of_each_tile(LaunchTable(SHIPPED, {}, tuple(entries))) == entries[1:]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", sorted(kernels()))
def test_every_candidate_is_fit(name) -> None:
    """Every candidate can be launched on some architecture for some size of the model."""
    assert not [str(candidate) for candidate in kernels()[name].candidates if not is_fit(name, candidate)]


def is_fit(name: str, candidate: KernelConfig) -> bool:
    """Return whether a candidate is within the budget of some architecture for some launch of the model."""
    launched = [retiled(launch, candidate) for launch in by_kernel()[name]]
    return any(not over_budget([launch], arch) for launch in launched for arch in ("sm_90", "sm_80", "sm_100"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("arch", BUDGETS)
def test_every_launch_is_within_the_budget(arch, precision) -> None:
    wrong = over_budget(distinct(launches(FAMILY[arch], precision), BUDGETS[arch].target), arch)
    assert not wrong


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", ["sm_90", *SMALL])
def test_the_headline_step_is_on_the_fast_path(arch: str) -> None:
    """Registers, spills, shared memory, wgmma and asynchronous loads for 256 residues and 128 + 4 sequences in bf16.

    sm_89 and sm_120 are an RTX 4090 and 5090, for which known spills are listed, too.
    """
    target = (BUDGETS | SMALL)[arch].target
    with table_used(read(SHIPPED / f"{FAMILY[arch]}.json")):
        found = distinct(launches_of(Plan(precision="bf16"), ModelConfig(), INITIAL), target)
    assert {"transition_activation", "triangle_factors_weight", "outer_products"} <= {l.kernel.name for l in found}
    beside = [line for launch in found for line in beside_the_fast_path(launch, figures(launch, target), arch)]
    assert not [*over_budget(found, arch), *beside]


def test_every_kernel_is_compiled() -> None:
    launched = {launch.kernel.name for precision in ("bf16", "fp32") for launch in launches("default", precision)}
    assert launched == set(kernels())


def test_launches_without_a_gpu_are_those_of_the_default() -> None:
    assert table_for(torch.device("meta"))[0].path == SHIPPED / "default.json"


@pytest.mark.parametrize("arch", BUDGETS)
def test_giant_tiles_are_over_the_budget(arch) -> None:
    """The tests above can fail."""
    good, bad = (product_launch(tiles, torch.bfloat16) for tiles in (SMALL_TILES, GIANT_TILES))
    assert not over_budget([good], arch)
    found = "\n".join(over_budget([bad], arch))
    assert "bytes of shared memory, of" in found
    assert ("bytes of a thread are spilled" in found) is (arch in ("sm_80", "sm_90"))  # others store sums elsewhere


@pytest.mark.parametrize("arch", BUDGETS)
def test_instructions_are_counted(arch) -> None:
    """A product uses tensor cores and wide loads; an fp32 copy with one element per thread uses neither."""
    product = figures(product_launch(SMALL_TILES, torch.bfloat16), BUDGETS[arch].target)
    assert product.dots == 1
    assert product.tensor > 0
    assert 0 < product.wide <= product.loads
    copy = figures(copy_launch(COPY, 4, 64), BUDGETS[arch].target)
    assert (copy.dots, copy.tensor, copy.wide) == (0, 0, 0)
    assert 0 < copy.loads <= 2
    assert 0 < copy.registers < 64


def test_products_without_tensor_cores_are_over_the_budget() -> None:
    launch = product_launch(SMALL_TILES, torch.bfloat16)
    found = figures(launch, BUDGETS["sm_90"].target)
    assert not breaches(launch, found, BUDGETS["sm_90"])
    without = dataclasses.replace(found, tensor=0, wide=0)
    assert breaches(launch, without, BUDGETS["sm_90"]) == [
        "matrix products without tensor cores",
        "matrix products of which nothing is loaded in 128 bits at once",
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"spilled": 4}, "4 bytes of a thread are spilled"),
        ({"shared": 163 * 1024 + 1}, "166913 bytes of shared memory, of 166912"),
        ({"registers": 256}, "256 registers in 4 warps, of 255 and 2048"),
        ({"columns": 513}, "513 columns of tensor memory, of 512"),
    ],
)
def test_each_bound_is_kept(change, words) -> None:
    launch = product_launch(SMALL_TILES, torch.bfloat16)
    fits = Figures(registers=255, spilled=0, shared=163 * 1024, tensor=1, wide=1, loads=1, dots=1, columns=512)
    assert not breaches(launch, fits, BUDGETS["sm_80"])
    assert breaches(launch, dataclasses.replace(fits, **change), BUDGETS["sm_80"]) == [words]


def test_many_warps_share_the_registers() -> None:
    launch = product_launch(dataclasses.replace(SMALL_TILES, warps=16), torch.bfloat16)
    figures = Figures(registers=128, spilled=0, shared=0, tensor=1, wide=1, loads=1, dots=1)
    assert not breaches(launch, figures, BUDGETS["sm_90"])
    assert breaches(launch, dataclasses.replace(figures, registers=129), BUDGETS["sm_90"])


def test_arguments_are_specialised_as_triton_does() -> None:
    """1 is a constant, multiples of 16 are marked, and values above 2^31 have 64 bits, as in Triton's JIT."""
    target = GPUTarget("cuda", 90, 32)
    x = torch.empty(64, 64, device="meta")
    launch = copy_launch(COPY, 1, 2**31 + 16)
    shifted = dataclasses.replace(launch, arguments={**launch.arguments, "x": x[:, 1:]})
    specialised, options = source(shifted, target)
    assert specialised.signature == {
        "x": "*fp32",
        "y": "*fp32",
        "rows": "constexpr",
        "channels": "i32",
        "stride": "i64",
        "BLOCK": "constexpr",
    }
    assert specialised.constants == {(2,): 1, (5,): 64}
    divisible = {path for path, attributes in specialised.attrs.items() if ["tt.divisibility", 16] in attributes}
    assert divisible == {(1,), (3,), (4,)}
    assert (options.num_warps, options.num_stages) == (1, 1)
    assert options.enable_fp_fusion
    exact = {"num_warps": 1, "num_stages": 1, "enable_fp_fusion": True, DOTS: ("ieee",)}
    assert options.hash() == make_backend(target).parse_options(exact).hash()


def test_the_same_code_is_compiled_once() -> None:
    found = [
        copy_launch(COPY, rows, stride) for rows, stride in ((4, 64), (5, 64), (5, 80), (5, 65), (1, 64), (1, 2**31))
    ]
    assert distinct(found) == [found[0], found[3], found[4], found[5]]
