"""Predictions whose passes are recorded as graphs: of which sizes, equal to the bit, and given up for other sizes."""

import logging
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.helpers import tiny_model
from tests.recorder import OperationRecorder
from warpfold import device
from warpfold.cost.example import ExampleSizes
from warpfold.cost.machine import Machine
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import Plan
from warpfold.prediction.outputs import Prediction
from warpfold.prediction.predictor import Predictor
from warpfold.training import planning
from warpfold.training.planning import GRAPHS_HOLD, FoldPlanner

DESIGNS = ["MKTAYIAKQRQISFVK", "MKTAYIGKQRCISWVK", "GKTAYIAPQRQISFLK", "MKLAYIAKNRQISFVE", "MKTAYIAKQRQDDFVK"]
LONGER = "MKTAYIAKQRQISFVKSHFS"
SIZES = ExampleSizes(residues=64, sequences=1, extra=1, templates=0)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has graphs: what a pass does is recorded and done again, on a CPU."""
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


@pytest.mark.parametrize("recycles", [0, 2])
@pytest.mark.usefixtures("recorded")
def test_predictions_by_graphs_are_the_predictions(recycles: int, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model()
    plain, graphs = Predictor(model), Predictor(model, graphs=True)
    expected = [plain.fold(sequence, recycles=recycles) for sequence in DESIGNS]
    with caplog.at_level(logging.INFO):
        found = [graphs.fold(sequence, recycles=recycles) for sequence in DESIGNS]
    assert [same(*pair) for pair in zip(found, expected)] == [True] * len(DESIGNS)
    assert not same(found[0], found[1])
    assert "graphs" not in found[0].details["plan"]
    assert found[1].details["plan"]["graphs"]
    assert caplog.text.count("sizes repeat, so passes are recorded as graphs") == 1
    of_passes = running(graphs).graphs
    assert of_passes.recorded == (2 if recycles else 1)  # of a pass before the last, and of the last one's trunk
    assert of_passes.replayed == (len(DESIGNS) - 1) * (recycles + 1) - of_passes.recorded
    assert not of_passes.refused


@pytest.mark.usefixtures("recorded")
def test_graphs_are_given_up_for_other_sizes() -> None:
    predictor = Predictor(tiny_model(), graphs=True)
    for sequence in DESIGNS[:3]:
        predictor.fold(sequence)
    held = weakref.ref(running(predictor).graphs)
    assert held() is not None
    expected = Predictor(tiny_model()).fold(LONGER)
    assert same(predictor.fold(LONGER), expected)
    assert running(predictor).graphs.recorded == 0
    assert held() is None


@pytest.mark.usefixtures("recorded")
def test_what_a_prediction_keeps_of_its_passes_is_its_own() -> None:
    predictor = Predictor(tiny_model(), graphs=True)
    kept = [predictor.fold(one, recycles=2, save_recycles=True) for one in DESIGNS[:3]]
    passes = [one.positions for one in kept[2].recycled]
    expected = Predictor(tiny_model()).fold(DESIGNS[2], recycles=2, save_recycles=True)
    assert len(passes) == 2
    assert all(np.array_equal(one, other.positions) for one, other in zip(passes, expected.recycled))


@pytest.mark.usefixtures("recorded")
def test_dropout_is_not_recorded() -> None:
    """It is drawn where the host decides."""
    predictor = Predictor(tiny_model(), graphs=True)
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
        ("it is the second of its sizes", True, {}),
        ("it is the first of its sizes", False, {"residues": 72}),
        ("it was not asked for", False, {"graphs": False}),
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
    assert first.plan.graph == "auto"
    if "free" in given:
        assert first.choice is not None
        needs = planning.needed_bytes(first.choice.memory, machine)
        machine = replace(machine, free=GRAPHS_HOLD * needs - 1)
        planner.check(SIZES, 1, **of_gradient)
    sizes = replace(SIZES, residues=given.get("residues", SIZES.residues))
    assert (planner.check(sizes, 1, **of_gradient).plan.graph is True) == asked, why
