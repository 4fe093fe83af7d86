"""Test the steps of a predictor: settings, features, plans, shared passes, results and their warnings."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import warpfold.prediction.predictor as module
from tests.helpers import tiny_model, tiny_multimer
from warpfold.arguments import WrongArgument
from warpfold.data.features.choose import SampleConfig
from warpfold.engine.gradient import loss_of_every_output
from warpfold.errors import UserError
from warpfold.model.template import TemplateConfig
from warpfold.model.weights.files import save_params
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import Plan
from warpfold.parallel.team import ProcessInfo, Team
from warpfold.prediction.notices import Notice
from warpfold.prediction.predictor import FoldResult, Predictor, load, with_warnings
from warpfold.prediction.queries import query_of
from warpfold.prediction.request import FoldOptions, Recycling
from warpfold.scoring.score_table import row_of

ONE, TWO = "MKTAYIAK", "GSHMLE"


@pytest.fixture
def predictor() -> Predictor:
    return Predictor(tiny_model(templates=TemplateConfig(enabled=False)), sample=SampleConfig(max_msa=4, max_extra=2))


def assembly_of(sequence: Any, name: str = "q") -> Any:
    return query_of(sequence, (), name).assembly


def test_the_settings_of_a_predictor(predictor: Predictor, caplog: pytest.LogCaptureFixture) -> None:
    assert (predictor._fixed, predictor._memory, predictor._graphs) == (
        {"kernels": "fast", "precision": predictor.precision}, None, True
    )  # fmt: skip
    state = predictor.recycling, predictor.dropout, predictor.chain_gap, predictor.pad_to, predictor.msa_server
    assert state == (Recycling(), False, None, None, None)
    assert Predictor(predictor.model).sample == SampleConfig()
    for chunk, expected in ((0, None), (3, 3)):
        other = Predictor(
            predictor.model, chunk=chunk, precision="fp32", kernels="strict", offload=False, memory="2GB", graphs=False
        )
        fixed = {"kernels": "strict", "precision": "fp32", "chunk": expected, "offload": False}
        assert (other._fixed, other._memory, other._graphs) == (fixed, 2_000_000_000, False)
    params = predictor.as_params
    assert params == module.Params("model", Path(), "", predictor.model.config, predictor.sample)


def test_load_sets_what_it_is_given(tmp_path: Path, tiny_params: Path, caplog: pytest.LogCaptureFixture) -> None:
    predictor = load(
        tiny_params, "cpu", max_msa=7, max_extra=3, recycle_tolerance=0.5, max_recycles=(8, 1), dropout=True,
        chain_gap=200, msa_server="https://host", msa_cache=tmp_path,
    )  # fmt: skip
    assert (predictor.sample.max_msa, predictor.sample.max_extra) == (7, 3)
    assert (predictor.recycling, predictor.dropout, predictor.chain_gap) == (Recycling(0.5, (8, 1)), True, 200)
    assert predictor.msa_server is not None
    assert (predictor.msa_server.url, predictor.msa_server.cache) == ("https://host", tmp_path)
    sample = SampleConfig(max_msa=9, max_extra=8)
    assert load(tiny_params, "cpu", sample=sample).sample == sample
    assert load(tiny_params, "cpu", sample=sample, max_extra=2).sample == replace(sample, max_extra=2)
    wrong: Any = {"max_msa": 3}
    with pytest.raises(WrongArgument, match="a SampleConfig is needed"):
        load(tiny_params, "cpu", sample=wrong)
    save_params(tmp_path / "m.safetensors", tiny_multimer())
    with pytest.raises(UserError, match=r"chain_gap: m\.safetensors is AlphaFold-Multimer's"):
        load(tmp_path / "m.safetensors", "cpu", chain_gap=200)
    assert load(tmp_path / "m.safetensors", "cpu").chain_gap is None


def test_features_are_made_for_all_passes(predictor: Predictor) -> None:
    config = predictor.model.config
    prepared = predictor.prepare(assembly_of(ONE))
    assert (prepared.seed, prepared.recycles, prepared.ensemble, prepared.guess) == (
        0, config.recycles, config.ensemble, None
    )  # fmt: skip
    for recycles, ensemble in ((0, 1), (2, 3)):
        prepared = predictor.prepare(assembly_of(ONE), seed=5, recycles=recycles, ensemble=ensemble)
        assert (prepared.seed, prepared.recycles, prepared.ensemble) == (5, recycles, ensemble)
        assert len(prepared.batch["msa_feat"]) == (recycles + 1) * ensemble
        assert 0 < prepared.seconds < 60
    predictor.recycling = Recycling(long=(len(ONE), 1))
    passes = [predictor.prepare(assembly_of(sequence), recycles=3).recycles for sequence in (ONE, f"{ONE}A")]
    assert passes == [3, 1]
    for recycles, ensemble in ((-1, 1), (0, 0)):
        with pytest.raises(UserError) as caught:
            predictor.prepare(assembly_of(ONE), recycles=recycles, ensemble=ensemble)
        assert str(caught.value) == f"recycles = {recycles}, ensemble = {ensemble}: at least 0 and 1 are needed"
    text = "q: a complex, but these parameters are for single chains"
    query: Any = SimpleNamespace(ids=("A", "B"), name="q")
    for call in (lambda: predictor.prepare(assembly_of([ONE, TWO])), lambda: predictor.check(query)):
        with pytest.raises(UserError, match=text):
            call()
    query.ids = ("A",)
    predictor.check(query)
    predictor.chain_gap = 100
    joined = predictor.prepare(assembly_of([ONE, TWO])).batch["residue_index"].flatten().tolist()
    assert joined[-len(TWO)] - joined[len(ONE) - 1] in (100, 101)
    guess = {"A": (np.full((len(ONE), 37, 3), 2.0), np.ones((len(ONE), 37)))}
    positions = predictor.prepare(assembly_of(ONE), initial_guess=guess).guess
    assert positions is not None
    assert positions.shape == (len(ONE), 37, 3)
    both = guess | {"B": (np.ones((len(TWO), 37, 3)), np.ones((len(TWO), 37)))}
    own = predictor.prepare(assembly_of([ONE, TWO]), initial_guess=both, fixed=("B",)).assembly.fixed
    assert [template is None for template in own] == [True, False]
    assert predictor.prepare(assembly_of([ONE, TWO]), initial_guess=both).assembly.fixed == ()
    padded = module._padded_guess(positions, 10)
    assert (padded.dtype, padded.shape) == (positions.dtype, (10, 37, 3))
    torch.testing.assert_close(padded[: len(ONE)], positions)
    assert not padded[len(ONE) :].any()
    empty = module._padded_guess(None, 3)
    assert (empty.shape, empty.dtype, bool(empty.any())) == ((3, 37, 3), torch.float32, False)


def test_a_tighter_plan_follows_an_error_of_memory(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, fold = list[Any](), predictor._fold
    errors: Iterator[Exception | None] = iter([RuntimeError("out of memory"), MemoryError(), None])

    def failing(prepared: Any, batch: Any, plan: Plan, options: FoldOptions) -> Any:
        steps.append(plan.chunk)
        if (error := next(errors)) is not None:
            raise error
        return fold(prepared, batch, plan, options)

    def after(planned: Any, error: Exception) -> Any:
        return replace(
            planned, plan=replace(planned.plan, chunk=(planned.plan.chunk or 9) - 1), details={"n": len(steps)}
        )

    monkeypatch.setattr(predictor, "_fold", failing)
    monkeypatch.setattr(predictor.planner, "after", after)
    monkeypatch.setattr(module, "release_memory", lambda device: steps.append(str(device)))
    prediction = predictor.compute(predictor.prepare(assembly_of(ONE), recycles=0))
    assert steps[1:] == ["cpu", 8 if steps[0] is None else steps[0] - 1, "cpu", 7 if steps[0] is None else steps[0] - 2]
    assert prediction.details["plan"] == {"n": 3}
    assert prediction.recycled == []
    assert 0 < prediction.details["seconds"]["model"] < 60


@pytest.mark.parametrize(
    ("tolerance", "dropout", "recycles", "ensembles", "saves", "offload", "error"),
    [
        (0.5, False, (1, 1), (1, 1), False, False, ""),
        (0.0, False, (2, 2), (1, 1), False, False, ""),
        (0.5, False, (2, 2), (1, 1), False, False, "recycling may end early"),
        (None, True, (0, 0), (1, 1), False, False, "recycling may end early"),
        (None, False, (0, 0), (1, 1), True, False, "recycling may end early"),
        (None, False, (0, 1), (1, 1), False, False, "need the same recycles"),
        (None, False, (0, 0), (1, 2), False, False, "need the same recycles"),
        (None, False, (0, 0), (1, 1), False, True, "z in host memory"),
    ],
)
def test_which_proteins_share_no_pass(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch, tolerance: float | None, dropout: bool,
    recycles: tuple[int, int], ensembles: tuple[int, int], saves: bool, offload: bool, error: str,
) -> None:  # fmt: skip
    predictor.recycling, predictor.dropout = Recycling(tolerance), dropout
    several = [
        predictor.prepare(assembly_of(sequence, sequence), recycles=passes, ensemble=ensemble)
        for sequence, passes, ensemble in zip((ONE, TWO), recycles, ensembles)
    ]
    if offload:
        monkeypatch.setattr(predictor, "plan", lambda *_: SimpleNamespace(plan=Plan(offload=True)))
    if error:
        with pytest.raises(ValueError, match=error):
            predictor.compute_together(several, FoldOptions(save_recycles=saves))
        return
    ticks = iter([10.0, 14.0])
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    together = predictor.compute_together(several)
    assert [(one.name, one.details["together"], one.details["recycles"]) for one in together] == [
        (name, 2, recycles[0]) for name in (ONE, TWO)
    ]
    assert [one.details["seconds"]["model"] for one in together] == [2, 2]
    assert all(one.details["plan"] for one in together)


@pytest.mark.parametrize("dropout", [False, True])
def test_the_model_is_set_within_a_pass_and_as_before_after_it(dropout: bool) -> None:
    predictor = Predictor(tiny_model())
    predictor.dropout, predictor.recycling, model = dropout, Recycling(0.25), predictor.model
    prepared: Any = SimpleNamespace(seed=3, ensemble=4)
    before, stacks = model.config, [model.templates, model.extra_stack, model.evoformer]
    with pytest.raises(KeyError), predictor._running(Plan(graph=True), prepared):  # noqa: PT012
        assert model.config == replace(before, ensemble=4, recycle_tolerance=0.25)
        assert not torch.is_grad_enabled()
        execution = model.execution
        assert isinstance(execution, Execution)
        assert (execution.plan, execution.graphs.most) == (Plan(graph=not dropout), 16)
        assert [stack is not None and stack.training for stack in stacks] == [dropout] * 3
        assert not model.structure.training
        raise KeyError
    assert model.config == before
    assert not any(part.training for part in model.modules())
    assert torch.is_grad_enabled()
    with predictor._running(Plan(graph=True), prepared):
        assert (model.execution is execution) is not dropout
    with predictor._running(Plan(), prepared):
        assert model.execution is not execution
    assert predictor._details(predictor.prepare(assembly_of(ONE)), 0, 1.0).get("dropout") == (True if dropout else None)


def test_many_are_reported_as_they_finish_and_returned_in_order(predictor: Predictor) -> None:
    told: list[tuple[float, float, str]] = []
    sequences: dict[str, Any] = {"short": TWO, "bad": "MK1V", "long": ONE, "pair": [ONE, TWO]}
    results = predictor.fold_many(sequences, recycles=0, batch=1, progress=lambda *at: told.append(at))
    assert told == [(2, 4, "folding"), (3, 4, "long"), (4, 4, "short")]
    assert [(one.name, one.prediction is None, bool(one.error)) for one in results] == [
        ("short", False, False), ("bad", True, True), ("long", False, False), ("pair", True, True)
    ]  # fmt: skip
    assert FoldResult("x") == FoldResult("x", None, "")
    rows = predictor.score_designs(sequences, seed=4, recycles=0)
    assert [row["error"] for row in rows] == [one.error for one in results]
    alone = predictor.fold(TWO, name="short", seed=4, recycles=0, representations=False)
    entry = {"name": "short", "model": "model", "seed": 4, "length": len(TWO), **alone.confidences()}
    numbers, expected = rows[0], row_of(entry) | {"error": ""}
    assert numbers == {
        key: pytest.approx(value) if isinstance(value, float) else value for key, value in expected.items()
    }
    predictor.chain_gap = 100
    pair = predictor.fold([ONE, TWO], name="pair", recycles=0)
    entry = {"name": "pair", "model": "model", "seed": 0, "length": len(ONE + TWO), **pair.confidences()}
    expected = row_of(entry | {"scores": pair.design_scores((), None)}) | {"error": ""}
    (row,) = predictor.score_designs({"pair": [ONE, TWO]}, recycles=0)
    assert row == {key: pytest.approx(value) if isinstance(value, float) else value for key, value in expected.items()}
    assert rows[1] == row_of({"name": "bad", "model": "model", "seed": 4}) | {"error": results[1].error}


@pytest.mark.parametrize(
    ("alone", "batch"), [("", [2]), ("dropout", [1, 1]), ("save_recycles", [1, 1])], ids=lambda value: str(value)
)
def test_which_of_many_share_a_pass(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch, alone: str, batch: list[int]
) -> None:
    seen: list[list[int]] = []

    def fold(load: Any, options: FoldOptions, team: Any, groups: Any, write: Any, record: Any) -> None:
        assert load(None) is predictor
        assert (write, team, options.recycles) == (None, predictor.team, 1)
        seen.append([len(group) for group in groups])

    monkeypatch.setattr(module, "fold_groups", fold)
    predictor.dropout = alone == "dropout"
    with pytest.raises(KeyError):  # nothing is recorded
        predictor.fold_many([ONE, TWO], recycles=1, save_recycles=alone == "save_recycles", batch=2)
    assert seen == [batch]


def test_warnings_of_the_query_come_before_those_of_the_prediction(
    predictor: Predictor, caplog: pytest.LogCaptureFixture
) -> None:
    query = query_of(TWO, (), "q")
    prediction = replace(predictor.fold(TWO, recycles=0), details={"seed": 1})
    caplog.clear()
    plain = with_warnings(query, prediction)
    assert (plain.details, plain.templates, caplog.messages) == ({"seed": 1}, [], [])
    second = {"kind": "input", "text": "second"}
    warned = with_warnings(
        replace(query, notices=[Notice("no_alignment")]),
        replace(prediction, details={"seed": 1, "warnings": [second]}),
    )
    first = Notice("no_alignment").record()
    assert warned.details == {"seed": 1, "warnings": [first, second]}
    assert caplog.messages == [f"q: {first['text']}", "q: second"]


def test_the_prediction_of_a_gradient(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that runs out of memory is followed by a tighter one, and the second attempt is timed alone."""
    attempts, gradient = list[Any](), module.gradient_by_shares
    logits = np.random.default_rng(0).normal(size=(5, 20))

    def failing(*arguments: Any) -> Any:
        attempts.append(arguments[5:7])
        if len(attempts) == 1:
            raise MemoryError
        return gradient(*arguments)

    monkeypatch.setattr(module, "gradient_by_shares", failing)
    monkeypatch.setattr(predictor.planner, "after", lambda planned, error: replace(planned, details={"n": 2}))
    monkeypatch.setattr(module, "release_memory", lambda device: attempts.append(str(device)))
    found = predictor.gradient(logits, loss_of_every_output, recycles=1)
    assert attempts == [(1, "last"), "cpu", (1, "last")]
    assert found.prediction.name == "design"
    assert found.prediction.details["plan"] == {"n": 2}
    assert 0 < found.prediction.details["seconds"]["model"] < 60
    assert found.prediction.details["recycles"] == 1
    assert found.prediction.logits == {}
    given = {"soft": 1.0, "temperature": 1.0, "hard": 0.0, "through": "last", "seed": 0}
    again = predictor.gradient(logits, loss_of_every_output, recycles=1, **given)
    assert again.loss == found.loss
    assert isinstance(found.grad, np.ndarray)
    by_chain = predictor.gradient({"A": logits}, loss_of_every_output, recycles=1).grad
    assert isinstance(by_chain, dict)
    np.testing.assert_array_equal(by_chain["A"], found.grad)
    with pytest.raises(UserError, match="design: a complex, but these parameters are for single chains"):
        predictor.gradient({"A": logits}, loss_of_every_output, fixed={"B": "MKV"})


def test_what_a_predictor_refuses(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: Any = "params.npz"
    for arguments in ((wrong,), (predictor.model, "cpu", None, "fp7")):
        with pytest.raises(WrongArgument):
            Predictor(*arguments)
    with pytest.raises(WrongArgument):
        predictor.gradient(np.zeros((5, 20)), loss_of_every_output, through=wrong)
    calls: list[Any] = [
        lambda: predictor.fold(TWO, fixed="A"),
        lambda: predictor.fold_many([TWO], fixed="A"),
        lambda: predictor.score_designs([TWO], fixed="A"),
        lambda: predictor.fold_example(assembly_of(TWO), fixed=("A",)),
        lambda: predictor.with_templates(query_of([ONE, TWO], (), "q")),
    ]
    for call in calls:
        with pytest.raises(UserError):
            call()
    assert not Predictor(predictor.model.train()).model.training
    for name in ("unsupported_on", "unsupported_reason"):
        with monkeypatch.context() as patch:
            patch.setattr(Plan, name, lambda *_: "not here")
            with pytest.raises(UserError, match="not here"):
                Predictor(predictor.model)


def test_assumptions_are_logged_by_rank_zero(
    monkeypatch: pytest.MonkeyPatch, tiny_params: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for assumed, sample, team, logged in (
        ("assumed", None, None, True),
        ("assumed", None, Team(), True),
        ("assumed", SampleConfig(), None, False),
        ("", None, None, False),
        ("assumed", None, Team(ProcessInfo(1, 2)), False),
    ):
        monkeypatch.setattr(module, "assumed_settings", lambda path, assumed=assumed: assumed)
        caplog.clear()
        load(tiny_params, "cpu", sample=sample, team=team)
        assert ("assumed" in caplog.messages) == logged
