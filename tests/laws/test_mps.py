"""Apple GPUs (`--device mps`), with a stub (tests/mac.py): results equal those of the CPU, or the run is refused.

These tests have not run on a Mac.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers import tiny_config, tiny_model, tiny_multimer
from tests.mac import is_served, mac
from tests.test_cli import refused, run
from tests.training.runs import equal_tensors, make_store, rows, tiny_run
from warpfold.bench import doctor
from warpfold.check.sizes import DataSizes, of_settings
from warpfold.cost.example import ExampleSizes, Job, shortened
from warpfold.cost.machine import planned_machine, this_machine
from warpfold.cost.memory import estimate_memory
from warpfold.cost.planner import choose
from warpfold.device import device_of
from warpfold.errors import UserError
from warpfold.memory import free_memory, is_out_of_memory
from warpfold.model.alphafold import HeadsConfig, ModelConfig
from warpfold.model.losses import LossConfig
from warpfold.parallel.plan import Plan
from warpfold.parallel.team import Team
from warpfold.prediction.predict import check_processes
from warpfold.prediction.predictor import Predictor
from warpfold.prediction.request import Request
from warpfold.training.train import train

SEQUENCE = "MKTAYIAKQRQISFVKSHFSRQ"


def test_the_stand_in_refuses_what_the_device_does() -> None:
    with mac():
        x = torch.ones(3, 3, device="mps")
        there = x, x @ x, x[0], x.new_zeros(2), torch.zeros_like(x), x.to(torch.int64), torch.tensor(1.0).to("mps")
        here = x.cpu(), x.to("cpu"), torch.empty_like(x, device="cpu"), torch.ones(3)
        assert [t.device.type for t in (*there, *here)] == ["mps"] * len(there) + ["cpu"] * len(here)
        ends = torch.tensor([0, 3]).to("mps")
        wrong: list[tuple[Callable[[], Any], type[Exception], str]] = [
            (x.double, TypeError, "float64"),
            (lambda: x.to(torch.float64), TypeError, "float64"),
            (lambda: torch.zeros(3, dtype=torch.float64, device="mps"), TypeError, "float64"),
            (lambda: torch.ones(3, dtype=torch.float64).to("mps"), TypeError, "float64"),
            (lambda: x + torch.ones(3), RuntimeError, "same device"),
            (lambda: x.numpy(), TypeError, "numpy"),
            (lambda: torch.segment_reduce(x, "sum", offsets=ends), NotImplementedError, "MPS"),
        ]
        for call, kind, says in wrong:
            with pytest.raises(kind, match=says):
                call()
    assert [is_served(name) for name in ("mm", "add.Tensor", "segment_reduce")] == [True, True, False]
    assert torch.ones(2).device.type == "cpu"


FOLDS: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "all results": (tiny_model, SEQUENCE, {}, {"distogram": True, "logits": True, "save_recycles": True}),
    "in slices, bf16": (tiny_model, SEQUENCE, {"chunk": 5, "precision": "bf16"}, {}),
    "a complex, fp16": (tiny_multimer, [SEQUENCE, SEQUENCE[:12]], {"precision": "fp16"}, {"ensemble": 2}),
}


@pytest.mark.parametrize("name", FOLDS)
def test_a_prediction_is_that_of_the_definitions_on_a_cpu(name: str) -> None:
    make, sequence, options, asked = FOLDS[name]
    model = make()
    want = Predictor(copy.deepcopy(model), "cpu", kernels="definition", **options).fold(sequence, **asked)
    with mac():
        predictor = Predictor(model, "mps", **options)
        found = predictor.fold(sequence, **asked)
        assert {p.device.type for p in model.parameters()} == {"mps"}
    for part in ("positions", "plddt", "pae", "pair", "single"):
        np.testing.assert_allclose(getattr(found, part), getattr(want, part), rtol=1e-5, atol=1e-5)


FULL = LossConfig(experimentally_resolved=0.01, violation=1.0, predicted_aligned_error=0.1)
RUNS: dict[str, tuple[LossConfig, Plan, dict[str, Any]]] = {
    "every loss, slices": (FULL, Plan(chunk=5, recompute="layer"), {}),
    "lamb, bf16": (LossConfig(), Plan(precision="bf16"), {"name": "lamb"}),
    "lars, fp16, together": (LossConfig(), Plan(precision="fp16", batch=2), {"name": "lars", "clip": "step"}),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_training_is_that_of_the_definitions_on_a_cpu_and_continues(name: str, tmp_path: Path) -> None:
    loss, plan, optim = RUNS[name]
    config, store = tiny_run(steps=2, validate_every=2), make_store(tmp_path / "store", proteins=4)
    model = replace(config.model, heads=HeadsConfig(plddt_c=8, pae=loss is FULL))
    config = replace(config, model=model, loss=loss, plan=plan, optim=replace(config.optim, **optim))
    train(replace(config, plan=replace(plan, kernels="definition")), store, tmp_path / "cpu")
    with mac():
        whole = train(config, store, tmp_path / "mps", device="mps")
        for steps in (1, 2) if loss is FULL else ():  # the second one continues from the first one's checkpoint
            part = train(replace(config, train=replace(config.train, steps=steps)), store, tmp_path / "2", device="mps")
            assert steps < 2 or equal_tensors(part.params, whole.params)
    cpu, mps = (rows(tmp_path / run) for run in ("cpu", "mps"))
    assert [row["step"] for row in mps] == [row["step"] for row in cpu]
    for one, other in zip(cpu, mps):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["lddt_ca"] == pytest.approx(one["lddt_ca"], rel=1e-5)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (Plan(precision="fp64", graph=True), 'plan.precision = "fp64" and plan.graph: not supported on mps'),
        (Plan(offload=True), "plan.offload: not supported on mps, an Apple GPU. Leave it out, or pass --device cpu."),
        (Plan(compile=True), "plan.compile"),
        (Plan(data=2), "several ranks"),
    ],
    ids=["fp64", "offload", "compile", "data"],
)
def test_plans_that_cannot_run_there_are_refused_before_anything_runs(plan: Plan, says: str, tmp_path: Path) -> None:
    assert says in str(plan.unsupported_on("mps"))
    assert plan.unsupported_on("cpu") is plan.unsupported_on("cuda") is None
    if plan.data == 1:
        with mac(), pytest.raises(UserError, match="not supported on mps"):
            train(replace(tiny_run(), plan=plan), make_store(tmp_path / "store"), tmp_path / "run", device="mps")
        assert not (tmp_path / "run").exists()


def test_what_else_cannot_be_is_said_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with mac():
        with pytest.raises(UserError, match=r'plan\.precision = "fp64": not supported on mps'):
            Predictor(tiny_model(), "mps", precision="fp64")
        with pytest.raises(UserError, match=r"plan\.offload: not supported on mps"):
            Predictor(tiny_model(), "mps", offload=True)
        with pytest.raises(UserError, match="several processes: not supported on mps"):
            device_of("mps", local_rank=1)
        with pytest.raises(UserError, match=r"train\.digest_every: not supported on mps"):
            train(tiny_run(digest_every=1), [], Path("run"), device="mps")
        with pytest.raises(UserError, match=r"--workers 2: more than --device mps has GPUs \(1\)"):
            check_processes(Request("q.fasta", "p.npz", "out", device="mps", workers=2), Team())
        for words, says in (
            ("bench --op gate --device mps", "timing: not supported on mps"),
            ("profile tiny --device mps", "timing: not supported on mps"),
            ("doctor --cluster --device mps", "--cluster: not supported on mps"),
            ("plan tiny --device mps --devices 2", "--devices 2: not supported on mps"),
        ):
            assert says in refused(run(capsys, *words.split()))
        code, _, err = run(capsys, *["plan", "tiny", "--device", "mps", "--set", "plan.graph=true"])
        assert code == 2
        assert "plan.graph: not supported on mps" in err


def test_plans_count_the_memory_of_definitions_and_know_no_times() -> None:
    sizes = ExampleSizes(residues=256, sequences=64, extra=64, templates=0)
    job = Job(model=shortened(ModelConfig(), 1), sizes=sizes, recycles=0)
    fast, mps = (estimate_memory(job, Plan(), device).peak for device in ("cpu", "mps"))
    plain = estimate_memory(job, Plan(kernels="definition"), "cpu").peak
    assert fast < 0.6 * plain
    assert 0.9 * plain < mps < 1.1 * plain
    with mac(free=2**30):
        assert free_memory("mps") == 2**30 - 2**19
        machine = this_machine("mps")
        assert machine.name == "GPU of an Apple processor"
        assert machine.rates(torch.float32) is None
        choice = choose(replace(job, model=tiny_config()), machine, {})
        assert choice.machine.kind == "mps"
        assert not any(one.plan.offload for one in choice.considered)
    assert planned_machine("mps", 2**30, 1).kind == "mps"
    assert is_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 7.23 GB, other allocations: ..."))


def test_the_doctor_says_that_it_was_never_tried_and_checks_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    some = [case for case in of_settings(tiny_config(), DataSizes()) if case.op in ("transition", "gate")][:2]
    monkeypatch.setattr(doctor, "cases_of", lambda *_: some)
    with mac():
        assert "WarpFold was never run on one" in run(capsys, "doctor")[1]
        code, out, _ = run(capsys, "doctor", "--device", "mps", "--kernels", "--dtype", "fp32")
    assert code == 0
    assert "on mps every operation runs by its definition" in out
    assert "WarpFold was never run on an Apple GPU" in out
    assert "All 2 operations of tiny are computed correctly" in out


def test_what_the_device_computes_wrongly_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in of_settings(tiny_config(), DataSizes()) if case.op == "gate")
    right = Tensor.sigmoid
    with mac() as device:
        (found,) = doctor.examine([case], torch.device("mps"), ["fp32"])
        assert not found.verdict.red
        assert found.verdict.reason == "there are no fast paths for mps"
        assert found.speed is None
        monkeypatch.setattr(Tensor, "sigmoid", lambda x: right(x) * (1.01 if device.has(x) else 1))
        (found,) = doctor.examine([case], torch.device("mps"), ["fp32"])
        assert found.verdict.red
