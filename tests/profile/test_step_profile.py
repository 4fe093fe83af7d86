"""A profile: its times add up, its products are torch's, its backward time is that of the layers that caused it."""

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, record_function
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers import tiny_config
from tests.ops.triton.model_launches import one_block
from tests.test_cli import refused, run
from warpfold.cli.bench import measured
from warpfold.cost.example import ExampleSizes, ModelBench, TrainingStep, shortened
from warpfold.cost.observe import MARK, UNATTRIBUTED, Place, Spans
from warpfold.cost.rates import Ceilings
from warpfold.engine.optim import OptimConfig
from warpfold.model.losses import LossConfig
from warpfold.ops import dispatch
from warpfold.parallel.plan import Plan
from warpfold.profile.step_profile import NOT_PLACED, Tables, counted_work, in_words, kind_of, profile_model, table
from warpfold.profile.trace import AUTOGRAD, NODE, PYTHON, WHOLE, TraceEvent, attribute, read_events
from warpfold.profile.work import WorkKey

CPU = torch.device("cpu")
TOY = ModelBench(
    model=one_block(tiny_config()),
    loss=LossConfig(),
    optim=OptimConfig(),
    plan=Plan(),
    sizes=ExampleSizes(residues=9, sequences=5, extra=6, templates=2),
)
NAP = 0.2  # seconds; what the other layers need is some 0.1 ms
TOP = Ceilings(1e9, 1e9, None, "")


# ---- whose time it is


class Slow(torch.autograd.Function):
    """Takes its time backward."""

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


def profiled(model: nn.Module, step: Any) -> tuple[dict[WorkKey, Any], float]:
    spans = Spans()
    with (
        torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profile,
        spans.watching(model),
        record_function(WHOLE),
    ):
        step(spans)
    reading = attribute(*_read(profile, spans))
    return reading.spent, reading.whole


def _read(profile: Any, spans: Spans) -> Any:
    events, on_device = read_events(profile.events())
    return events, spans, on_device


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_backward_time_is_that_of_the_layer_that_caused_it(again: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(Layer(False), Layer(True), Layer(False))
    x = torch.ones(4, requires_grad=True)

    def step(spans: Spans) -> None:
        out = checkpoint(model, x, use_reentrant=False) if again else model(x)
        out.sum().backward()

    spent, whole = profiled(model, step)
    backward = {key.layer: 0.0 for key in spent}
    for key, one in spent.items():
        backward[key.layer] += one.host if key.backward else 0.0
    assert backward["1"] >= NAP
    assert sum(seconds for layer, seconds in backward.items() if layer != "1") < NAP
    assert sum(one.host for one in spent.values()) == pytest.approx(whole)


def event(
    name: str, own: float, parent: TraceEvent | None = None, node: int = -1, kernels: tuple[float, ...] = ()
) -> TraceEvent:
    return TraceEvent(name, 0.0, own, node, parent, kernels)


def test_kernels_belong_to_what_launched_them_also_on_autograds_thread() -> None:
    """As on a GPU: the host's two threads, and what ran on the device; one kernel was launched by nobody."""
    spans = Spans()
    layer, attention = spans.number(Place("blocks.3.row")), spans.number(Place("blocks.3.row", "attention", (2, 3)))
    spans.made_at.since(7, attention)
    spans.made_at.since(8, None)
    whole = event(WHOLE, 1.0)
    outer = event(f"{MARK}{spans.places[layer]}", 0.5, whole)
    ours = event("warpfold::attention", 0.1, event(f"{MARK}{spans.places[attention]}", 0.2, outer), kernels=(2.0, 1.0))
    plain = event("aten::mul", 0.3, outer, kernels=(4.0,))
    node = event(f"{NODE}Attention", 0.25, None, 7)
    back = event("warpfold::attention_backward", 0.05, node, kernels=(8.0,))
    summed = event("aten::add_", 0.15, event(f"{NODE}AccumulateGrad", 0.0, None, 2**63), kernels=(0.5,))
    before = event("aten::zeros", 9.0, None, kernels=())
    assert ours.parent is not None
    events = [whole, outer, ours.parent, ours, plain, node, back, summed.parent or whole, summed, before]
    on_device = [(0.0, 3.0), (3.0, 7.0), (6.0, 14.0), (20.0, 20.5), (30.0, 33.0)]
    reading = attribute(events, spans, on_device)
    keys = {
        (key.layer, key.op, key.backward): (one.host, one.device, one.launches) for key, one in reading.spent.items()
    }
    assert keys == {
        ("model", PYTHON, False): (1.0, 0, 0),
        ("blocks.3.row", PYTHON, False): (0.5, 0, 0),
        ("blocks.3.row", "attention", False): (pytest.approx(0.3), 3.0, 2),
        ("blocks.3.row", "mul", False): (0.3, 4.0, 1),
        ("blocks.3.row", "attention", True): (pytest.approx(0.3), 8.0, 1),
        (UNATTRIBUTED, AUTOGRAD, True): (0.0, 0, 0),
        (UNATTRIBUTED, "add_", True): (0.15, 0.5, 1),
    }
    assert (reading.busy, reading.unplaced, reading.device_launches) == (14.0 + 0.5 + 3.0, 3.0, 5)
    tables = Tables(reading, {}, TOP, cuda=True)
    totals = tables.totals(plain=35.0)
    assert totals["ms"] == pytest.approx(18.5e3)
    for rows in (tables.layers(), tables.operations()):
        assert sum(row["ms"] for row in rows) == pytest.approx(totals["ms"])
    assert totals["device_waited"] == pytest.approx(0.5)
    assert totals["launches"] == 5
    assert NOT_PLACED in {row["layer"] for row in tables.layers()}


def test_a_profile_that_saw_nothing_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="saw nothing"):
        attribute([event("aten::mul", 1.0)], Spans())


def test_composite_operations_count_once() -> None:
    whole = event(WHOLE, 1.0)
    linear = event("aten::linear", 0.1, whole)
    product = event("aten::addmm", 0.1, linear)
    events = [whole, linear, event("aten::t", 0.1, linear), product, event("aten::as_strided", 0.0, product)]
    spent = attribute(events, Spans()).spent
    assert {key.op: one.launches for key, one in spent.items()} == {
        PYTHON: 0, "linear": 0, "t": 0, "addmm": 1, "as_strided": 0,
    }  # fmt: skip


# ---- what there is to do


def test_products_are_those_that_torch_counts() -> None:
    """All of them, and those of a layer within the layer, forward and backward."""
    work = counted_work(TOY, training=True)
    step = TrainingStep(TOY, CPU)
    step.bind(Plan(kernels="definition"))
    with FlopCounterMode(display=False) as counted:
        step.learn()
    assert sum(one.flops for one in work.values()) == counted.get_total_flops() > 0
    with FlopCounterMode(display=False) as counted:
        step.model(step.batch, 0)
    of_transition = sum(counted.get_flop_counts()["AlphaFold.evoformer.blocks.0.msa.transition"].values())
    ours = {key.backward: one.flops for key, one in work.items() if key.layer == "evoformer.blocks.0.msa.transition"}
    assert ours[False] == of_transition
    assert ours[True] == 2 * ours[False]


def test_bytes_of_an_operation_are_its_arguments_and_results() -> None:
    work = counted_work(TOY, training=True)
    norms = [(key, one) for key, one in work.items() if key.layer == "structure.single_layer_norm"]
    found = {key.backward: (key.op, key.shape, one.bytes, one.calls) for key, one in norms}
    n, c = 9, 20
    assert found[False] == ("layer_norm", (n, c), 4 * (2 * n * c + 2 * c), 1)
    assert found[True] == ("layer_norm", (n, c), 4 * (3 * n * c + 4 * c), 1)


def test_kinds_of_layers() -> None:
    assert kind_of("evoformer.blocks.11.msa.row") == "evoformer.blocks.*.msa.row"
    assert kind_of("templates.stack.blocks.0") == "templates.stack.blocks.*"
    assert kind_of("plddt.act_0") == "plddt.act_0"


# ---- the whole


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The profile of a toy's step."""
    trace = tmp_path_factory.mktemp("profile") / "trace.json.gz"
    found = profile_model(TOY, CPU, trace)
    return found | {"trace": json.loads(gzip.decompress(trace.read_bytes()))}


def test_rows_add_up_to_the_step(found: dict[str, Any]) -> None:
    """Of the profiler's own accounting, and that to what the clock said around it."""
    for rows in ("layers", "operations", "each_layer"):
        assert sum(row["ms"] for row in found[rows]) == pytest.approx(found["ms"])
        assert sum(row["flops"] for row in found[rows]) == found["flops"]
        assert sum(row["launches"] for row in found[rows]) == found["launches"] > 0
    assert found["ms"] == pytest.approx(found["profiled_ms"], rel=0.1)
    row = next(row for row in found["layers"] if row["layer"] == "evoformer.blocks.*.msa.row")
    assert row["ms"] == pytest.approx(row["forward_ms"] + row["backward_ms"])
    assert row["backward_ms"] > 0
    assert {"losses", "optimizer", "structure", UNATTRIBUTED} <= {row["layer"] for row in found["layers"]}
    assert min(found["step_runs_ms"]) > 0


def test_the_trace_has_the_spans(found: dict[str, Any]) -> None:
    names = {event.get("name", "") for event in found["trace"]["traceEvents"]}
    assert WHOLE in names
    assert any(name.startswith(f"{MARK}evoformer.blocks.0.msa.row: ") for name in names)


def test_the_tables_say_it(found: dict[str, Any]) -> None:
    heads, rows = table(found, "layers", 1000)
    assert any(row[0] == "evoformer.blocks.*.msa.row" for row in rows)
    assert {len(row) for row in rows} == {len(heads)}
    few = table(found, "operations", 3)[1]
    assert len(few) == 4
    assert few[3][0] == f"{len(found['operations']) - 3} more"
    on_gpu = {**found, "device_busy_ms": 1.0, "device_waited": 0.4}
    assert "for 40% of a run without the profiler it waited" in in_words(on_gpu)[4]


def test_nothing_is_left_watching() -> None:
    model = Layer(False)
    with Spans().watching(model):
        assert dispatch._around is not None
        with pytest.raises(RuntimeError):
            model(torch.ones(3))
    assert dispatch._around is None
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


# ---- the command


def test_the_command_writes_two_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    size = ["--residues", 8, "--sequences", 3, "--extra", 3, "--blocks", 1]
    command = ["profile", "tiny", "--device", "cpu", "--forward", *size, "--out", tmp_path / "new"]
    code, out, _ = run(capsys, *command)
    assert code == 0
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "profile.json",
        "trace.json.gz",
    ]
    held = json.loads((tmp_path / "new" / "profile.json").read_text())
    assert held["what"].startswith(
        "one forward pass: 8 residues, 3 sequences, 3 extra, 0 templates, recycles 0, 1 block"
    )
    assert not any(row["backward_ms"] for row in held["layers"])
    assert "evoformer.blocks.*" in out
    assert "exists already" in refused(run(capsys, *command))


def test_wrong_settings_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such settings file" in refused(run(capsys, "profile", "monster", "--device", "cpu"))


def test_large_settings_are_measured_small_on_a_cpu_and_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    whole = measured("monomer", [], {}, None, 0)
    small = measured("monomer", [], {"residues": 200, "sequences": None}, None, 0, on_cpu=True)
    assert "at most: 64 residues, 32 sequences" in capsys.readouterr().err
    assert small.sizes == ExampleSizes(residues=200, sequences=32, extra=64, templates=1)
    assert small.model == shortened(whole.model, 2)
    assert measured("monomer", [], {}, 3, 0, on_cpu=True).model.evoformer.blocks == 3
    capsys.readouterr()
    assert measured("tiny", [], {}, None, 0, on_cpu=True) == measured("tiny", [], {}, None, 0)
    assert capsys.readouterr().err == ""
