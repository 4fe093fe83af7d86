"""Test predictions with a recorded trunk: one graph serves all recycles and proteins of a shape, bit for bit."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers import tiny_model
from tests.recorder import OperationRecorder
from warpfold import device
from warpfold.cost.example import ExampleSizes
from warpfold.cost.machine import Machine
from warpfold.device import Named
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import Plan, Precision
from warpfold.prediction.outputs import Prediction
from warpfold.prediction.predictor import Predictor
from warpfold.prediction.request import Recycling
from warpfold.training import planning
from warpfold.training.planning import GRAPHS_HOLD, FoldPlanner

DESIGNS = ["MKTAYIAKQRQISFVK", "MKTAYIGKQRCISWVK", "GKTAYIAPQRQISFLK", "MKLAYIAKNRQISFVE", "MKTAYIAKQRQDDFVK"]
LONGER = "MKTAYIAKQRQISFVKSHFS"
SIZES = ExampleSizes(residues=64, sequences=1, extra=1, templates=0)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulate graphs on a CPU: record the operations of a pass and replay them."""
    recorder = OperationRecorder()
    monkeypatch.setattr(device, "find_recorder", lambda _: recorder)
    monkeypatch.setattr(Plan, "why_no_graphs", lambda plan, kind: None if plan.graph is True else "not asked for")


def running(predictor: Predictor) -> Execution:
    found = predictor.model.execution
    assert isinstance(found, Execution)
    return found


def same(one: Prediction, other: Prediction) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in ("positions", "plddt", "pae", "msa")
    )


@pytest.mark.parametrize(("recycles", "precision"), [(0, "fp32"), (2, "fp32"), (2, "bf16")])
@pytest.mark.usefixtures("recorded")
def test_one_graph_serves_all_recycles_and_all_proteins_of_a_shape(recycles: int, precision: Precision) -> None:
    model = tiny_model()
    plain = Predictor(model, precision=precision, graphs=False)
    expected = [plain.fold(sequence, recycles=recycles) for sequence in DESIGNS]
    assert "graphs" not in expected[0].details["plan"]
    graphs = Predictor(model, precision=precision)
    found = [graphs.fold(sequence, recycles=recycles) for sequence in DESIGNS]
    assert [same(*pair) for pair in zip(found, expected)] == [True] * len(DESIGNS)
    assert not same(found[0], found[1])
    assert all(one.details["plan"]["graphs"] for one in found)
    of_trunk = running(graphs).graphs
    assert of_trunk.recorded == 1
    # Every pass except the first is a replay.
    assert of_trunk.replayed == len(DESIGNS) * (recycles + 1) - 1
    assert not of_trunk.refused


@pytest.mark.usefixtures("recorded")
def test_recycling_ends_early_with_graphs_as_without() -> None:
    model = tiny_model()
    plain, graphs = Predictor(model, graphs=False), Predictor(model)
    every = plain.fold(DESIGNS[0], recycles=3, save_recycles=True)
    moved = [float(np.abs(a.positions - b.positions).max()) for a, b in pairwise(every.recycled)]
    for predictor in (plain, graphs):
        predictor.recycling = Recycling(tolerance=10 * max(moved))
    expected, found = (predictor.fold(DESIGNS[0], recycles=3) for predictor in (plain, graphs))
    assert same(found, expected)
    assert found.details["recycles"] == expected.details["recycles"] < 3
    assert running(graphs).graphs.replayed == found.details["recycles"]


@pytest.mark.usefixtures("recorded")
def test_graphs_of_several_lengths_stay() -> None:
    predictor, plain = Predictor(tiny_model()), Predictor(tiny_model(), graphs=False)
    for sequence in (DESIGNS[0], LONGER, DESIGNS[1], LONGER):
        assert same(predictor.fold(sequence, recycles=1), plain.fold(sequence, recycles=1))
    assert (running(predictor).graphs.recorded, running(predictor).graphs.replayed) == (2, 6)


@pytest.mark.usefixtures("recorded")
def test_no_more_graphs_are_kept_than_a_device_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpfold.prediction.predictor.MAX_GRAPHS", 1)
    predictor = Predictor(tiny_model())
    for sequence in (DESIGNS[0], LONGER, DESIGNS[1]):
        predictor.fold(sequence, recycles=1)
    assert (running(predictor).graphs.recorded, running(predictor).graphs.replayed) == (1, 3)


@pytest.mark.usefixtures("recorded")
def test_graphs_are_given_up_for_a_protein_that_needs_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = Predictor(tiny_model())
    predictor.fold(DESIGNS[0], recycles=1)
    held = weakref.ref(running(predictor).graphs)
    assert held() is not None
    monkeypatch.setattr(planning, "GRAPHS_HOLD", 10**9)
    expected = Predictor(tiny_model(), graphs=False).fold(LONGER)
    assert same(predictor.fold(LONGER), expected)
    assert running(predictor).graphs.recorded == 0
    gc.collect()
    assert held() is None


@pytest.mark.usefixtures("recorded")
def test_where_memory_runs_out_with_graphs_the_same_plan_is_tried_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    predictor, record = Predictor(tiny_model()), OperationRecorder.record

    def runs_out(recorder: OperationRecorder, function: Callable[[], Named]) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(OperationRecorder, "record", runs_out)
    found = predictor.fold(LONGER, recycles=1)
    monkeypatch.setattr(OperationRecorder, "record", record)
    assert same(found, Predictor(tiny_model(), graphs=False).fold(LONGER, recycles=1))
    assert found.details["plan"]["ran_out"] == ["whole, graphs"]
    assert "next plan: without" in caplog.text
    assert "graphs" not in predictor.fold(LONGER, recycles=1).details["plan"]
    assert predictor.fold(DESIGNS[0], recycles=1).details["plan"]["graphs"]  # a shorter protein


@pytest.mark.usefixtures("recorded")
def test_what_a_prediction_keeps_of_its_passes_is_its_own() -> None:
    predictor = Predictor(tiny_model())
    kept = [predictor.fold(one, recycles=2, save_recycles=True) for one in DESIGNS[:3]]
    passes = [one.positions for one in kept[2].recycled]
    expected = Predictor(tiny_model(), graphs=False).fold(DESIGNS[2], recycles=2, save_recycles=True)
    assert len(passes) == 2
    assert all(np.array_equal(one, other.positions) for one, other in zip(passes, expected.recycled))


@pytest.mark.usefixtures("recorded")
def test_dropout_is_not_recorded() -> None:
    """With dropout, no pass is recorded, because the host decides the random numbers of each pass."""
    predictor = Predictor(tiny_model())
    for sequence in DESIGNS[:2]:
        predictor.fold(sequence)
    predictor.dropout = True
    found = [predictor.fold(DESIGNS[2], seed=seed) for seed in (0, 0, 1)]
    assert running(predictor).graphs.recorded == 0
    assert same(found[0], found[1])
    assert not same(found[0], found[2])


@pytest.mark.parametrize(
    ("why", "asked", "given"),
    [
        ("nothing speaks against it", True, {}),
        ("the user wants none", False, {"graphs": False}),
        ("a CPU has no graphs", False, {"kind": "cpu"}),
        ("graphs would hold too much", False, {"free": 1 / GRAPHS_HOLD}),
        ("it is computed in slices", False, {"chunk": 16}),
        ("it has a gradient", False, {"gradient": "last"}),
    ],
)
def test_which_predictions_are_recorded(
    monkeypatch: pytest.MonkeyPatch, why: str, asked: bool, given: dict[str, Any]
) -> None:
    machine = Machine(kind=given.get("kind", "cuda"), free=10**11, host=10**12)
    monkeypatch.setattr(planning, "this_machine", lambda *_, **__: machine)
    fixed = {"chunk": given["chunk"]} if "chunk" in given else {}
    planner = FoldPlanner(tiny_model().config, "cpu", fixed, graphs=given.get("graphs", True))
    of_gradient = {"gradient": given.get("gradient")}
    first = planner.check(SIZES, 1, **of_gradient)
    if "free" in given:
        assert first.plan.graph is True
        assert first.choice is not None
        needs = planning.needed_bytes(first.choice.memory, machine)
        machine = replace(machine, free=GRAPHS_HOLD * needs - 1)
    assert (planner.check(SIZES, 1, **of_gradient).plan.graph is True) == asked, why
