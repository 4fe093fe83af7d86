"""Tests on a GPU: kernels against definitions, at the model's sizes and beyond 2^31 elements; timing and tuning."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ops.cases import CASES, GIVEN, Call, case, made, poisoned
from warpfold.bench.kernels import GpuBench, Workload, choose, head, launches_of, timed, tuning_tasks, write
from warpfold.bench.ops import bench
from warpfold.bench.timing import CudaTimer, Subject, Times, measure
from warpfold.check.cases import ODD, inputs
from warpfold.check.checks import DTYPES as CHECKED
from warpfold.check.checks import check
from warpfold.check.op_profile import OpCase
from warpfold.cost.rates import ceilings
from warpfold.ops import dispatch
from warpfold.ops.attention import attention
from warpfold.ops.linear import gate, gated_linear_residual, layer_norm, norm_linear
from warpfold.ops.outer import outer_product
from warpfold.ops.transition import HALVES, transition
from warpfold.ops.triton import launch as launches
from warpfold.ops.triton.launch import config_for, recorded, table_for

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
PAIRS = (250, 259)
TRUE: dict[str, tuple[str, dict[str, Any]]] = {
    "triangle, starting": ("attention", dict(lead=(256,), Q=256, K=256, h=4, d=32)),
    "triangle, ending": ("attention", dict(lead=(256,), Q=256, K=256, h=4, d=32, q_order="turned", k_order="turned")),
    "MSA rows": ("attention", dict(lead=(128,), Q=256, K=256, h=8, d=32, masked="tail")),
    "MSA columns": ("attention", dict(lead=(256,), Q=128, K=128, h=8, d=32, with_bias=False, q_order="turned")),
    "extra MSA's rows": ("attention", dict(lead=(512,), Q=256, K=256, h=8, d=8)),
    "extra MSA's columns": ("attention", dict(lead=(256,), Q=8, K=1024, h=1, d=8, with_bias=False)),
    "templates of a pair": ("attention", dict(lead=(256, 256), Q=1, K=4, h=4, with_bias=False)),
    "of odd length": ("attention", dict(lead=(251,), Q=251, K=251, h=4, d=32)),
    "many keys": ("attention", dict(lead=(9,), Q=8, K=700, h=1, d=8)),
    "projection": ("norm_linear", dict(o=520, part=0.25, lead=PAIRS)),
    "projection, turned": ("norm_linear", dict(c=256, o=1024, lead=PAIRS, x_order="turned")),
    "norm": ("layer_norm", dict(c=1024, lead=PAIRS)),
    "residual": ("gated_linear_residual", dict(lead=PAIRS, with_factors=GIVEN)),
    "residual, turned": (
        "gated_linear_residual",
        dict(lead=PAIRS, c=256, i=256, with_factors=GIVEN, shared=(1,), x_order="turned", o_order="turned"),
    ),
    "outer product": ("outer_product", dict(s=100, i=100, j=90, c=32, d=32, p=128)),
    "outer product, deep": ("outer_product", dict(s=300, i=100, j=90, c=32, d=32, p=256)),
    **{
        f"transition of {c}, {activation}": ("transition", dict(lead=(130, 131), c=c, n=4 * c, activation=activation))
        for c in (64, 128, 256, 512)
        for activation in HALVES
    },
}


def found(call: Call, kernels: dispatch.Kernels = "strict") -> dict[str, torch.Tensor]:
    """Compute the call's results by the kernels."""
    with poisoned(pytest.MonkeyPatch()), dispatch.using(kernels):
        return call.answers(call.op.fast)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_is_as_exact_as_the_definition(name: str, dtype: str) -> None:
    call = case(name, DTYPES[dtype], "cuda")
    assert not call.mistakes(found(call, "fast"))  # some steps have no kernels


@pytest.mark.parametrize("name", TRUE)
def test_at_the_models_sizes_and_again_the_same_bit_for_bit(name: str) -> None:
    of, sizes = TRUE[name]
    for dtype in (torch.bfloat16, torch.float32):
        call = made(of, dtype, "cuda", **sizes)
        first, again = found(call), found(call)
        assert not call.mistakes(first)
        assert all(torch.equal(first[part], again[part]) for part in first)


@pytest.mark.parametrize("c", [128, 200, 1024])
def test_channels_around_ten_thousand(c: int) -> None:
    assert not made("layer_norm", torch.float32, "cuda", c=c, mean=1e4).mistakes()


# Memory, and sizes beyond 32 bits


def peak(call: Call, gradient: bool = False) -> int:
    """Measure the peak memory of a call in bytes above the memory in use."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.set_grad_enabled(gradient):
        call.answers(call.op.fast) if gradient else call.op.fast(**call.given)
    return torch.cuda.max_memory_allocated() - before


def test_what_lies_between_never_exists() -> None:
    """The hidden layer of a transition, the products of all channels and all logits never exist as a whole."""
    for name, most in (("transition of 256, relu", 1.1 * 130 * 131 * 256), ("outer product", 1.2 * 9000 * 128)):
        of, sizes = TRUE[name]
        call = made(of, torch.bfloat16, "cuda", **sizes)
        others = [t.numel() for t in list(call.given.values())[1:] if isinstance(t, torch.Tensor)]
        whole = sum(others) + (next(iter(call.given.values())).numel() if call.op is outer_product else 0)
        assert call.op in (transition, outer_product)
        assert peak(call) < 2 * (most + whole)

    def of_length(n: int) -> int:
        sizes = dict(lead=(n,), Q=n, K=n, h=4, d=32, masked="clear")
        return peak(made("attention", torch.bfloat16, "cuda", **sizes), gradient=True)

    assert of_length(512) < 4.5 * of_length(256)


@pytest.mark.parametrize("turned", [False, True], ids=["starting", "ending"])
def test_attention_past_two_to_the_31_elements(turned: bool) -> None:
    """Projection, output and gradients are right; a few rows are compared, because rows are independent."""
    n, heads, width = 4112, 4, 32
    c = heads * width
    needed = n * n * 2 * (3 * c + 6 * c)
    if torch.cuda.mem_get_info()[0] < 1.3 * needed:
        pytest.skip(f"{1.3 * needed / 2**30:.0f} GiB of free memory are wanted")
    assert n * n * c > 2**31
    torch.manual_seed(0)
    x = torch.empty(n, n, 3 * c, dtype=torch.bfloat16, device="cuda")
    for part in x:
        part.normal_()
    x = x.transpose(0, 1) if turned else x
    q, k, v = (t.unflatten(-1, (heads, width)).requires_grad_() for t in x.split(c, -1))
    bias = torch.randn(n, n, heads, dtype=torch.bfloat16, device="cuda").movedim(-1, 0)[None].requires_grad_()
    grad = torch.empty(n, n, heads, width, dtype=torch.bfloat16, device="cuda").normal_()
    mask = torch.ones(n, n, device="cuda")
    mask[-1, n // 2 :] = 0

    def of_rows(rows: slice) -> Call:
        given = {name: t[rows].detach().requires_grad_() for name, t in (("q", q), ("k", k), ("v", v))}
        return Call(attention, {**given, "mask": mask[rows], "bias": bias}, grad[rows], {})

    ours = found(of_rows(slice(None)))
    for row in (0, n // 2, n - 1):
        one = of_rows(slice(row, row + 1))
        rest = {name: ours[name][row : row + 1] for name in ("out", "q", "k", "v")}
        assert not one.mistakes({**rest, "bias": found(one)["bias"]})
    total = torch.zeros(bias.shape, dtype=torch.float64, device="cuda")
    for start in range(0, n, 257):
        total += found(of_rows(slice(start, start + 257)))["bias"].double()
    assert float((ours["bias"].double() - total).norm() / total.norm()) < 1e-2


def test_norms_and_gates_past_two_to_the_31_elements() -> None:
    if torch.cuda.get_device_properties(0).total_memory < 40e9:
        pytest.skip("needs 40 GB")
    rows = torch.empty(2**24 + 100, 256, dtype=torch.bfloat16, device="cuda").normal_()
    x, g = rows[:, :128], rows[:, 128:]
    ones, zeros, matrix = torch.ones(128, device="cuda"), torch.zeros(128, device="cuda"), torch.eye(128, device="cuda")
    ends = torch.cat([rows[:100], rows[-100:]]).double()
    gated = ends[:, :128] * ends[:, 128:].sigmoid()
    normed = layer_norm.definition(ends[:, :128], ones.double(), zeros.double())
    with torch.no_grad():
        for got, wanted in (
            (gate.fast(x, g), gated),
            (gated_linear_residual.fast(x, x, g, matrix, ones), ends[:, :128] + gated + 1),
            (layer_norm.fast(x, ones, zeros), normed),
            (norm_linear.fast(x, ones, zeros, matrix[:8]), normed[:, :8]),
        ):
            ours = torch.cat([got[:100], got[-100:]]).double()
            torch.testing.assert_close(ours, wanted, rtol=2**-6, atol=2**-6)


# Checks and timing of bench and doctor


@pytest.mark.parametrize("dtype", CHECKED)
@pytest.mark.parametrize("case", ODD, ids=lambda case: f"{case.op} {case.where}")
def test_odd_sizes(case: OpCase, dtype: str) -> None:
    verdict = check(case, dtype, CUDA)
    assert not verdict.red, verdict.says()


def test_the_clock_is_the_device_s() -> None:
    """A known product takes the expected time, whatever the host does at the same time."""
    n = 4096
    a = torch.randn(n, n, device=CUDA).bfloat16().requires_grad_()
    b = torch.randn(n, n, device=CUDA).bfloat16()
    times = measure([Subject("product", lambda: a @ b, [a], torch.ones_like(b))], CUDA, repeats=10)["product"]
    rate = 2 * n**3 / (times.median("forward") or 1)
    assert 0.3 < rate / ceilings(CUDA, torch.bfloat16).flops < 1.5
    assert times.peaks["forward"] == 2 * n * n
    small = Times()
    clock = CudaTimer(CUDA)
    x = torch.ones(8, device=CUDA, requires_grad=True)
    for _ in range(5):
        clock.once(Subject("small", lambda: x * 2, [x], torch.ones_like(x)), small)
    assert min(small.seconds["forward"]) < 3e-5  # less than a launch takes the host


def test_the_bench_runs() -> None:
    made = bench(["attention", "layer_norm"], CUDA, ["bf16"], ["starting:64", "pair:64"], repeats=3)
    ours = [row for row in made["rows"] if row["way"] == "ours"]
    assert {(row["op"], row["pass"]) for row in ours} == {
        (op, direction) for op in ("attention", "layer_norm") for direction in ("forward", "backward")
    }
    assert all(row["peak_mib"] > 0 for row in ours)
    assert "launches" in made["machine"]


# Tuning

GATE = Workload("gate", OpCase(op="gate", where="toy", rows=64, length=64, channels=64), "bf16")
ATTENTION = Workload(
    "attention", OpCase(op="attention", where="toy", rows=40, length=130, heads=4, width=32, bias=True), "bf16"
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> torch.device:
    """Return the GPU, with a separate home for tables."""
    monkeypatch.setattr(launches, "home", lambda: tmp_path)
    launches.reset()
    return torch.device("cuda:0")


@pytest.mark.parametrize("workload", [GATE, ATTENTION], ids=lambda workload: workload.op)
def test_the_table_that_is_made_is_used(workload: Workload, gpu: torch.device, tmp_path: Path) -> None:
    todo = tuning_tasks([workload], quick=True)
    entries = choose(timed(todo, GpuBench(gpu, repeats=3).time))
    path = write(tmp_path, head(gpu), entries)
    assert table_for(gpu)[0].path == path
    assert {(e.kernel, e.key) for e in entries} == {(task.kernel, task.key) for task in todo}
    assert all(config_for(e.kernel, e.key, gpu) == e.config for e in entries)
    assert {"driver", "torch", "triton"} <= set(head(gpu))


def test_what_would_be_launched_is_what_is_launched(gpu: torch.device) -> None:
    """Launches recorded on meta tensors have the kernels, keys, grids and configurations of launches on the GPU."""
    with recorded(run=True) as launched:
        given = inputs(GATE.case, torch.bfloat16, gpu)
        torch.autograd.grad(gate.fast(*given.args), given.wanted, given.grad)
    ours = [(call.kernel.name, call.key, call.grid, call.config) for call in launched]
    assert ours == [(call.kernel.name, call.key, call.grid, call.config) for call in launches_of(GATE)]


def test_what_is_not_exact_is_not_timed(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "definition", lambda x, g: 1.5 * x * g.sigmoid())
    (task, *_) = tuning_tasks([GATE])
    seconds, out = GpuBench(gpu, repeats=1).time(task)
    assert not seconds
    assert set(out) == set(task.candidates)
    assert all(reason.startswith("not exact: output") for reason in out.values())
