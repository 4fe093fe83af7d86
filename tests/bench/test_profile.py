"""A profile: rows add up to the run, backward time is attributed to its layer, and the trace has names."""

import gzip
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity

from tests.helpers import tiny_config
from tests.ops.triton.model_launches import one_block
from tests.test_cli import refused, run
from warpfold.bench.profile import (
    LAYER,
    NODE,
    OPERATION,
    OUTSIDE,
    PARAMETERS,
    in_words,
    kernel_rows,
    named_ranges,
    profile_model,
    table_rows,
    time_rows,
)
from warpfold.cli.bench import measured
from warpfold.cost.example import ExampleSizes, ModelBench, shortened
from warpfold.engine.optim import OptimConfig
from warpfold.model.losses import LossConfig
from warpfold.ops import dispatch
from warpfold.parallel.plan import Plan

CPU = torch.device("cpu")
TOY = ModelBench(
    model=one_block(tiny_config()),
    loss=LossConfig(),
    optim=OptimConfig(),
    plan=Plan(),
    sizes=ExampleSizes(residues=9, sequences=5, extra=6, templates=2),
)
# Seconds; the other layers need about 0.1 ms.
NAP = 0.2


class Slow(torch.autograd.Function):
    """Sleep in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(NAP)
        return grad.clone()


class Layer(nn.Module):
    def __init__(self, slow: bool) -> None:
        super().__init__()
        self.slow, self.weight = slow, nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return Slow.apply(x) if self.slow else x * self.weight


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_backward_time_is_that_of_the_layer_that_caused_it(again: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(Layer(False), Layer(True), Layer(False))
    x = torch.ones(4, requires_grad=True)
    with (
        torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler,
        named_ranges(nn.ModuleDict({"slow": model[1], "quick": model[2], "first": model[0]})),
        record_function(LAYER + OUTSIDE),
    ):
        out = checkpoint(model, x, use_reentrant=False) if again else model(x)
        out.sum().backward()
    backward: dict[str, float] = {}
    for row in time_rows(list(profiler.events()), cuda=False):
        if row["pass"] == "backward":
            backward[row["layer"]] = backward.get(row["layer"], 0.0) + row["ms"]
    assert backward.pop("slow") >= 1e3 * NAP
    assert {"quick", "first"} <= set(backward)
    assert sum(backward.values()) < 1e3 * NAP


def event(name: str, start: int, parent: Any = None, kernels: tuple[float, ...] = (), **more: Any) -> Any:
    """Return an event of the host in the form of torch's profiler, with times in microseconds."""
    fields = {"sequence_nr": -1, "thread": 1, "fwd_thread": None, **more}
    return SimpleNamespace(
        name=name, time_range=SimpleNamespace(start=start, end=start + 1), cpu_parent=parent, is_async=False,
        device_type=torch.autograd.DeviceType.CPU, kernels=[SimpleNamespace(duration=time) for time in kernels],
        self_cpu_time_total=1.0, **fields,
    )  # fmt: skip


def test_kernels_belong_to_what_launched_them_also_on_autograds_thread() -> None:
    layer = event(f"{LAYER}blocks.3.row", 1)
    attention = event(f"{OPERATION}attention", 2, layer)
    ours = event("warpfold::attention", 3, attention, kernels=(2e3, 1e3), sequence_nr=7)
    plain = event("aten::mul", 4, layer, kernels=(4e3,), sequence_nr=8)
    node = event(f"{NODE}Attention", 10, thread=2, fwd_thread=1, sequence_nr=7)
    back = event("warpfold::attention_backward", 11, node, kernels=(8e3,), thread=2)
    summing = event(f"{NODE}AccumulateGrad", 12, thread=2, fwd_thread=0)
    added = event("aten::add_", 13, summing, kernels=(500.0,), thread=2)
    of_profiler = event("aten::zeros", 0)

    def on_device(name: str, milliseconds: float) -> Any:
        return SimpleNamespace(name=name, device_type=torch.autograd.DeviceType.CUDA,
                               time_range=SimpleNamespace(elapsed_us=lambda: 1e3 * milliseconds))  # fmt: skip

    device = [on_device("attention_kernel", 11.0), on_device("mul", 4.0), on_device("mul", 0.5)]
    device += [on_device("nobody's", 3.0), on_device(f"{LAYER}blocks.3.row", 99.0)]
    events = [added, summing, back, node, plain, ours, attention, layer, of_profiler, *device]
    rows = {(row["layer"], row["op"], row["pass"]): row["ms"] for row in time_rows(events, cuda=True)}
    assert rows == {
        ("blocks.*.row", "attention", "forward"): 3.0,
        ("blocks.*.row", "aten::mul", "forward"): 4.0,
        ("blocks.*.row", "attention", "backward"): 8.0,
        (PARAMETERS, "aten::add_", "backward"): 0.5,
        ("not attributed", "kernels", "forward"): pytest.approx(3.0),
    }
    assert [(row["kernel"], row["calls"], row["ms"]) for row in kernel_rows(events)] == [
        ("attention_kernel", 1, 11.0), ("mul", 2, pytest.approx(4.5)), ("nobody's", 1, 3.0)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Profile a step of a toy model."""
    trace = tmp_path_factory.mktemp("profile") / "trace.json.gz"
    return profile_model(TOY, CPU, trace) | {"trace": json.loads(gzip.decompress(trace.read_bytes()))}


def test_rows_add_up_to_the_step(figures: dict[str, Any]) -> None:
    rows = figures["rows"]
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    assert figures["ms"] == sum(row["ms"] for row in rows) == pytest.approx(figures["profiled_ms"], rel=0.1)
    attention = [row for row in rows if row["layer"] == "evoformer.blocks.*.msa.row" and row["op"] == "gated_attention"]
    assert {row["pass"]: row["calls"] for row in attention} == {"forward": 1, "backward": 1}
    assert {OUTSIDE, "optimizer", "structure", PARAMETERS} <= {row["layer"] for row in rows}
    assert figures["run_ms"] > 0
    assert figures["kernels"] == []


def test_the_trace_names_layers_and_operations(figures: dict[str, Any]) -> None:
    names = {event.get("name", "") for event in figures["trace"]["traceEvents"]}
    assert {f"{LAYER}evoformer.blocks.0.msa.row", f"{OPERATION}gated_attention", f"{LAYER}optimizer"} <= names


def test_the_table_sums_the_rows_that_it_leaves_out(figures: dict[str, Any]) -> None:
    rows = table_rows(figures, 3)
    assert len(rows) == 4
    assert rows[3][0] == f"{len(figures['rows']) - 3} more"
    assert sum(float(row[5].rstrip("%")) for row in rows) == pytest.approx(100, abs=0.2)
    on_gpu = {**figures, "run_ms": 10.0, "kernels": [{"kernel": "mul", "calls": 1, "ms": 6.0}]}
    assert "for 40% of a run it waited for the host" in in_words(on_gpu)[2]


def test_no_range_is_left_open() -> None:
    model, unobserved = nn.ModuleDict({"layer": Layer(False)}), dispatch.Op.__call__
    with named_ranges(model):
        assert dispatch.Op.__call__ is not unobserved
        with pytest.raises(RuntimeError):
            model["layer"](torch.ones(3))
    assert dispatch.Op.__call__ is unobserved
    assert not model["layer"]._forward_hooks
    assert not model["layer"]._forward_pre_hooks


# ---- the command


def test_the_command_writes_two_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    size = ["--residues", 8, "--sequences", 3, "--extra", 3, "--blocks", 1]
    command = ["profile", "tiny", "--device", "cpu", "--forward", *size, "--out", tmp_path / "new"]
    code, out, _ = run(capsys, *command)
    assert code == 0
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["profile.json", "trace.json.gz"]
    written = json.loads((tmp_path / "new" / "profile.json").read_text())
    assert written["what"].startswith(
        "one forward pass: 8 residues, 3 sequences, 3 extra, 0 templates, recycles 0, 1 block"
    )
    assert {row["pass"] for row in written["rows"]} == {"forward"}
    assert "evoformer.blocks.*" in out
    assert "exists already" in refused(run(capsys, *command))


def test_large_settings_are_measured_small_on_a_cpu_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    whole = measured("monomer", [], {}, None, 0)
    small = measured("monomer", [], {"residues": 200, "sequences": None}, None, 0, on_cpu=True)
    assert "at most: 64 residues, 32 sequences" in caplog.text
    assert small.sizes == ExampleSizes(residues=200, sequences=32, extra=64, templates=1)
    assert small.model == shortened(whole.model, 2)
    assert measured("monomer", [], {}, 3, 0, on_cpu=True).model.evoformer.blocks == 3
    caplog.clear()
    assert measured("tiny", [], {}, None, 0, on_cpu=True) == measured("tiny", [], {}, None, 0)
    assert caplog.text == ""
