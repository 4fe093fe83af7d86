"""Test the order, the groups and the steps of folding, on made-up items and models."""

import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import warpfold.prediction.predict as module
from tests.helpers import as_multimer, tiny_config, tiny_multimer
from tests.prediction.runs import write_entry
from warpfold import __version__
from warpfold.bulk import JobPart
from warpfold.data.features.choose import SampleConfig
from warpfold.errors import StorageError, UserError
from warpfold.model.template import TemplateConfig
from warpfold.model.weights.files import save_params
from warpfold.parallel.team import ProcessInfo, Team
from warpfold.prediction import folding
from warpfold.prediction.folder import PredictionFolder
from warpfold.prediction.folding import (
    FAILURES,
    Clock,
    FoldItem,
    FoldOutcome,
    cost_of,
    failures_of,
    fold_groups,
    in_groups,
    one_line,
    part_of,
    predicted_cost,
    taken,
)
from warpfold.prediction.notices import Notice
from warpfold.prediction.outputs import Prediction
from warpfold.prediction.params import Params
from warpfold.prediction.predict import ModelInMemory, ProgressOfRun, check_processes, in_jobs
from warpfold.prediction.predictor import Predictor, load
from warpfold.prediction.queries import query_of
from warpfold.prediction.request import FORMAT, FoldOptions, Recycling, Request
from warpfold.scoring.selection import Selection
from warpfold.training.passes import PassPlace

pytestmark = pytest.mark.usefixtures("undrawn")
EMPTY = Prediction("q", "MKV", *(np.zeros(1) for _ in range(3)), None, None, None)
CONFIG = tiny_config(templates=TemplateConfig(enabled=False))


def model_of(name: str = "m", **sample: int) -> Any:
    return SimpleNamespace(name=name, sample=SampleConfig(**{"max_msa": 3, "max_extra": 5} | sample), config=CONFIG)


def item_of(residues: int, rows: int = 1, templates: int = 0, model: Any = None, name: str = "q") -> FoldItem:
    query: Any = SimpleNamespace(name=name, residues=residues, rows=rows, templates=templates)
    return FoldItem(model or model_of(), query, 7)


def priced(cost: float, model: Any = "m", name: str = "q") -> Any:
    return SimpleNamespace(cost=cost, model=model, query=SimpleNamespace(name=name))


# ---- items, costs, groups, parts, jobs


def test_an_item_has_a_key_a_folder_and_a_cost() -> None:
    item = item_of(2, rows=10)
    assert (item.key, item.below) == (("q", "m", 7), "m_seed_7")
    # By hand: 8 + 3,240 + 3 x (8 + 3,072 + 4.02) + 5 x (0.48 + 16).
    assert predicted_cost(2, 3, 5) == pytest.approx(12582.46)
    assert item.cost == pytest.approx(12582.46)
    assert [item_of(2, rows).cost for rows in (2, 5)] == pytest.approx(
        [predicted_cost(2, 2, 0), predicted_cost(2, 3, 2)]
    )
    assert cost_of([(item,), (item, item)]) == pytest.approx(3 * 12582.46)
    assert cost_of([]) == 0


@pytest.mark.parametrize(
    ("shapes", "batch", "device", "sizes"),
    [
        ([(4,)] * 9, None, "cpu", [8, 1]),
        ([(4,)] * 9, None, "cpu:0", [8, 1]),
        ([(4,)] * 3, None, "cuda:0", [1, 1, 1]),
        ([(4,)] * 9, 9, "cuda", [9]),
        ([(4,)] * 3, 1, "cpu", [1, 1, 1]),
        # The largest pass: two of 64 x 64, or of 32 residues x 128 rows.
        ([(64,), (64,)], None, "cpu", [2]),
        ([(64,), (60,)], None, "cpu", [2]),
        ([(65,), (65,)], None, "cpu", [1, 1]),
        ([(65,), (20,)], None, "cpu", [1, 1]),
        ([(32, 128), (32, 1)], None, "cpu", [2]),
        ([(32, 129), (32, 1)], None, "cpu", [1, 1]),
        # At most 140 of the rows are used.
        ([(29, 9999), (29, 1)], None, "cpu", [2]),
        ([(30, 9999), (30, 1)], None, "cpu", [1, 1]),
        # Either all have templates, or none has.
        ([(9, 1, 0), (8, 1, 1)], None, "cpu", [1, 1]),
        ([(9, 1, 2), (8, 1, 1)], None, "cpu", [2]),
        # 50 >= 49, and 288 < 289.
        ([(7,), (5,)], 2, "cpu", [2]),
        ([(17,), (12,)], 2, "cpu", [1, 1]),
        ([(7,), (6,), (5,), (4,)], 4, "cpu", [3, 1]),
        ([], None, "cpu", []),
    ],
    ids=str,
)
def test_the_limits_of_a_group(shapes: list[Any], batch: int | None, device: str, sizes: list[int]) -> None:
    model = model_of(max_msa=100, max_extra=40)
    groups = in_groups([item_of(*shape, model=model) for shape in shapes], batch, device)
    assert [len(group) for group in groups] == sizes


def test_the_order_of_groups_is_by_model_and_then_by_falling_cost() -> None:
    first, second = model_of("first"), model_of("second")
    items = [
        item_of(n, model=model, name=f"{n}{x}") for model in (second, first) for n, x in ((5, "a"), (9, ""), (5, "b"))
    ]
    names = [[item.key[:2] for item in group] for group in in_groups(items, None, "cpu")]
    assert names == [[(name, model) for name in ("9", "5a", "5b")] for model in ("second", "first")]
    early = in_groups(items[:3], None, "cpu", Recycling(long=(8, 1)))
    assert [[item.query.name for item in group] for group in early] == [["9"], ["5a"], ["5b"]]


def test_the_groups_of_parts_and_jobs() -> None:
    a, b, c, d, e = (priced(cost, name=str(cost)) for cost in (3, 5, 3, 2, 2))
    groups: list[Any] = [(a,), (b,), (c,), (d, e)]
    # By falling cost: 5, 4 (the pair), 3, 3 go to the parts 1, 2, 2, 1.
    assert part_of(groups, JobPart(1, 2)) == [(b,), (c,)]
    assert part_of(groups, JobPart(2, 2)) == [(a,), (d, e)]
    assert part_of(groups, JobPart(1, 1)) == groups
    assert part_of(groups, JobPart(5, 5)) == []
    equal: list[Any] = [(priced(3),) for _ in range(4)]
    assert list(in_jobs(equal, 2)) == [equal[:2], equal[2:]]
    assert list(in_jobs(equal, 4)) == [[group] for group in equal]
    assert list(in_jobs(equal, 3)) == [[group] for group in equal]
    assert list(in_jobs([], 3)) == []
    two_models: list[Any] = [(priced(1, "m"),), (priced(1, "n"),), (priced(1, "n"),)]
    assert list(in_jobs(two_models, 1)) == [two_models[:1], two_models[1:]]


def test_groups_are_taken_by_the_numbers_of_the_team() -> None:
    numbers, groups = iter([0, 2, 3, 1]), [("a",), ("b",), ("c",)]

    def take(what: str) -> int:
        assert what == "predictions"
        return next(numbers)

    given: Any = groups
    team: Any = SimpleNamespace(take=take)
    assert list(taken(given, team)) == [("a",), ("c",)]


def test_errors_as_lines_and_which_fail_one_prediction() -> None:
    errors = (UserError("a\n  b"), RuntimeError("x" * 301), MemoryError(), UserError(""))
    assert [one_line(error) for error in errors] == [
        "a b", f"RuntimeError: {'x' * 300}", "MemoryError: MemoryError", "UserError"
    ]  # fmt: skip
    assert failures_of(Team()) == FAILURES == (UserError, RuntimeError, MemoryError, ArithmeticError, ValueError)
    assert failures_of(Team(ProcessInfo(0, 2))) == (UserError,)
    outcome = FoldOutcome(item_of(2))
    with outcome.attempt((ValueError,)):
        raise ValueError("no")
    assert outcome.error == "ValueError: no"
    for error in (StorageError("full"), KeyError("k")):
        with pytest.raises(type(error)), outcome.attempt((UserError, StorageError)):
            raise error
    assert outcome.error == "ValueError: no"


def test_the_seconds_of_processes_are_added() -> None:
    clock = Clock()
    assert clock.summary() == dict.fromkeys(("computing", "waiting_for_features", "waiting_for_files", "waiting"), 0.0)
    clock.add(Clock(1.23456, 0.5, 0.25))
    clock.add(Clock(1.0, 0.25, 0.0))
    assert clock == Clock(2.23456, 0.75, 0.25)
    assert clock.summary() == {
        "computing": 2.235, "waiting_for_features": 0.75, "waiting_for_files": 0.25, "waiting": 0.3092
    }  # fmt: skip


# ---- the steps of folding


class StandIn:
    """A model that records its calls and fails for some queries."""

    def __init__(self, model: str, calls: list[str], fails: str = "") -> None:
        self.model, self.calls, self.fails = f"model {model}", calls, fails

    def _call(self, what: str, *names: str) -> None:
        self.calls.append(f"{what} {','.join(names)}")
        if f"{what} {','.join(names)}" in self.fails.split("; "):
            raise ValueError(what)

    def prepare(self, assembly: str, **more: Any) -> Any:
        assert more == {"seed": 7, "recycles": 2, "ensemble": 3, "initial_guess": "guess", "fixed": ("A",)}
        self._call("prepare", assembly)
        return SimpleNamespace(name=assembly, recycles=2, ensemble=3)

    def compute(self, prepared: Any, options: FoldOptions) -> str:
        assert options.ensemble == 3
        self._call("compute", prepared.name)
        return prepared.name.upper()

    def compute_together(self, several: Sequence[Any], options: FoldOptions) -> list[str]:
        assert options.ensemble == 3
        self._call("compute", *(prepared.name for prepared in several))
        return [prepared.name.upper() for prepared in several]


def fold_stand_ins(
    monkeypatch: pytest.MonkeyPatch, fails: str = "", leader: bool = True, writes: bool = True
) -> tuple[list[str], list[FoldOutcome], list[Any], Clock]:
    """Fold two groups of one model and a group of another by a clock that shows the square numbers."""
    calls, outcomes, follows, ticks = list[str](), list[FoldOutcome](), list[Any](), iter(range(99))
    clock: Any = SimpleNamespace(perf_counter=lambda: float(next(ticks) ** 2))
    monkeypatch.setattr(folding, "time", clock)

    @contextmanager
    def followed(model: Any, passes: int, report: Callable[[Any], None], interval: float) -> Iterator[None]:
        follows.append((model, passes, interval))
        report("place")
        yield

    def load_model(model: Any) -> Any:
        calls.append(f"load {model.name}")
        return StandIn(model.name, calls, fails)

    def write(item: FoldItem, prediction: Any) -> dict[str, Any]:
        if f"write {item.query.name}" in fails.split("; "):
            raise ValueError("write")
        return {"written": prediction}

    monkeypatch.setattr(folding, "followed", followed)
    first, second = model_of("first"), model_of("second")
    groups: Any = [
        tuple(
            FoldItem(model, SimpleNamespace(name=name, assembly=name, guess="guess", fixed=("A",)), 7)  # type: ignore[arg-type]
            for name in names
        )
        for model, names in ((first, "ab"), (first, "c"), (second, "d"))
    ]
    team: Any = SimpleNamespace(is_example_leader=leader, process=SimpleNamespace(ranks=1))
    seconds = fold_groups(
        load_model, FoldOptions(2, 3), team, groups, write if writes else None, outcomes.append,
        lambda group, place: follows.append((len(group), place)),
    )  # fmt: skip
    return calls, outcomes, follows, seconds


def states(outcomes: Sequence[FoldOutcome]) -> list[tuple[str, Any, Any, str]]:
    assert all(outcome.prepared is None for outcome in outcomes)
    return [(one.item.query.name, one.prediction, one.entry, one.error) for one in outcomes]


WHOLE = [(name, name.upper(), {"written": name.upper()}, "") for name in "abcd"]


def test_groups_are_loaded_prepared_computed_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, outcomes, follows, clock = fold_stand_ins(monkeypatch)
    assert states(outcomes) == WHOLE
    assert [call for call in calls if not call.startswith("prepare")] == [
        "load first", "compute a,b", "load first", "compute c", "load second", "compute d"
    ]  # fmt: skip
    assert [call for call in calls if call.startswith("prepare")] == [f"prepare {name}" for name in "abcd"]
    assert calls.index("prepare d") > calls.index("load second")
    assert follows == [
        *(("model first", 9, 0.2), (2, "place")),
        *(("model first", 9, 0.2), (1, "place")),
        *(("model second", 9, 0.2), (1, "place")),
    ]
    # The clock returns squares. The features take 0 to 1, computing takes 4 to 9, the files take 9 to 16, and so on.
    assert clock == Clock(computing=5 + 15 + 25, features=1 + 11 + 21, files=7 + 17 + 27 + 31)


def test_what_fails_in_a_step_leaves_the_others_be(monkeypatch: pytest.MonkeyPatch) -> None:
    _, outcomes, _, _ = fold_stand_ins(monkeypatch, fails="prepare a; write b; compute c")
    assert states(outcomes) == [
        ("a", None, None, "ValueError: prepare"),
        ("b", "B", None, "ValueError: write"),
        ("c", None, None, "ValueError: compute"),
        WHOLE[3],
    ]
    calls, outcomes, _, _ = fold_stand_ins(monkeypatch, fails="compute a,b; compute a")
    assert states(outcomes) == [("a", None, None, "ValueError: compute"), *WHOLE[1:]]
    assert [call for call in calls if call.startswith("compute")] == [
        f"compute {names}" for names in ("a,b", "a", "b", "c", "d")
    ]
    _, outcomes, follows, _ = fold_stand_ins(monkeypatch, fails="prepare c")
    assert [outcome.error for outcome in outcomes] == ["", "", "ValueError: prepare", ""]
    assert len(follows) == 4


def test_ranks_that_share_a_protein_have_no_prediction_and_write_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert states(fold_stand_ins(monkeypatch, leader=False)[1]) == [(name, None, None, "") for name in "abcd"]
    assert states(fold_stand_ins(monkeypatch, writes=False)[1]) == [(name, name.upper(), None, "") for name in "abcd"]


# ---- progress


def test_the_text_of_the_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    now, told = [50.0], list[tuple[float, float, str]]()
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    a, b, c = priced(10, name="12345678"), priced(10, name="123456789"), priced(20, name="c")
    groups: Any = [(a,), (b,), (c, c)]
    bar = ProgressOfRun(lambda *at: told.append(at), 6, groups)  # two were made by an earlier run
    half = PassPlace(1, 2, 3, 4, 0.5)
    bar.follow(groups[0], half)  # no time has passed
    now[0] = 150.0
    bar.follow(groups[0], half)  # 100 s for 5 of 60
    bar.move([a])
    bar.follow(groups[1], half)
    now[0] = 51.0
    bar.follow(groups[2], PassPlace(2, 2, 4, 4, 0.5))  # 1 s for 30 of 60
    now[0] = 50.9
    bar.follow(groups[2], PassPlace(2, 2, 4, 4, 0.5))
    now[0] = 150.0
    bar.follow(groups[2], PassPlace(2, 2, 4, 4, 1.25))  # 100 s for 60 of 60
    now[0] = 288.0
    bar.follow(groups[2], PassPlace(2, 2, 4, 4, 1.2375))  # 238 s for 59.5 of 60
    bar.move([b, c, c])
    place = "pass 1/2, block 3/4"
    assert told == [
        (2, 6, "12345678"),
        (2.5, 6, f"12345678, {place}"),
        (2.5, 6, f"12345678, 18 min left, {place}"),
        (3, 6, "12345678, 8 min left"),
        (3.5, 6, f"1234567…, 5 min left, {place}"),
        (4, 6, "2 toget…, 1 s left, pass 2/2, block 4/4"),
        (4, 6, "2 toget…, pass 2/2, block 4/4"),
        (5.5, 6, "2 toget…, pass 2/2, block 4/4"),
        (5.5, 6, "2 toget…, 2 s left, pass 2/2, block 4/4"),
        (6, 6, "c"),
    ]
    ProgressOfRun(lambda *at: told.append(at), 3, [])
    assert told[-1] == (3, 3, "")


# ---- a run: processes, models, notices, selections


@pytest.mark.parametrize(
    ("settings", "ranks", "error"),
    [
        ({"device": "cuda", "workers": 2}, 1, ""),
        (
            {"device": "cuda", "workers": 3},
            1,
            "--workers 3: more than --device cuda has GPUs (2). Pass 2.",
        ),
        ({"device": "mps", "workers": 2}, 1, "--workers 2: more than --device mps has GPUs (1). Pass 1."),
        ({"device": "cuda:1", "workers": 1}, 1, ""),
        ({"device": "cpu", "workers": 3}, 1, ""),
        ({"workers": 3}, 1, ""),
        ({"device": "cuda", "workers": 3, "cluster": "tcp://host:8786"}, 1, ""),
        ({"query": ["-"]}, 1, ""),
        ({"query": ["-"]}, 2, "-: is a pipe, which several processes cannot share. Pass a regular file."),
        ({"query": ["MKV"], "msa": ["a.a3m"]}, 2, ""),
        (
            {"cluster": "tcp://host:8786"},
            2,
            "--workers and --cluster start processes of their own: use them without torchrun",
        ),
    ],
    ids=str,
)
def test_which_processes_are_refused(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], ranks: int, error: str
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    request = Request(**{"query": ["MKV"], "params": "p", "out": "out"} | settings)
    team = Team(ProcessInfo(0, ranks))
    if not error:
        return check_processes(request, team)
    with pytest.raises(UserError) as caught:
        check_processes(request, team)
    assert str(caught.value) == error


def described(**config: Any) -> Params:
    return Params(
        "tiny", Path("folder/tiny.npz"), "digest", replace(CONFIG, **config), SampleConfig(max_msa=4, max_extra=2)
    )


def test_the_summary_of_a_new_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpfold.prediction.params.licence_of", lambda path, digest: "free")
    monkeypatch.setattr("warpfold.prediction.params.assumed_settings", lambda path: "nothing")
    request, models = (
        Request("q", "p", "out", seed=5, seeds=2, recycles=1),
        [described(), replace(described(), name="two")],
    )
    notice, queries = Notice("no_alignment"), [query_of("MKV", (), "one"), query_of(["MKV", "GSH"], (), "two")]
    queries[0] = replace(queries[0], notices=[notice])
    summary = module._new_summary(queries, models, request, "cpu")
    settings = {"recycles": 1, "ensemble": 1, "max_msa": 4, "max_extra": 2, "precision": request.precision}
    settings |= {"representations": False}
    identities = [["digest", settings], ["digest", settings]]
    run = hashlib.sha256(json.dumps([5, 2, identities]).encode())
    for query in queries:
        for part in query.parts():
            run.update(part)
    versions = summary.pop("versions")
    assert sorted(versions) == ["python", "torch", "warpfold"]
    file = {"file": "tiny.npz", "sha256": "digest", "licence": "free", "assumed": "nothing"}
    expected = {
        "format": FORMAT, "status": "running", "run": run.hexdigest(), "params": file,
        "models": [{"name": name, **file, **settings} for name in ("tiny", "two")],
        "settings": {"seed": 5, "seeds": 2, **settings}, "device": "cpu",
        "input_warnings": {"one": [notice.record()]},
        "predictions": [], "failures": [], "ranking": {}, "refused": {}, "seconds": 0.0,
    }  # fmt: skip
    assert summary == expected
    pairs = module._new_summary(queries[:1], models, replace(request, pairs="all"), "cpu")
    run = hashlib.sha256(json.dumps([5, 2, identities]).encode())
    for part in (*queries[0].parts(), b"all pairs"):
        run.update(part)
    assert (pairs["pairs"], pairs["run"]) == (["one"], run.hexdigest())
    assert module._digest_of(models, request, "x", 1).hexdigest() == hashlib.sha256(
        json.dumps([5, 2, identities, "x", 1]).encode()
    ).hexdigest()  # fmt: skip


@pytest.mark.parametrize(
    ("keep", "chains", "pae", "expected"),
    [
        (None, 1, True, None),
        ("best:3", 1, True, "mean_plddt"),
        ("best:3", 2, True, "ipsae"),
        (
            "best:3",
            2,
            False,
            "--keep best:3: folder/tiny.npz has no head of aligned errors, so no ipsae. Name another.",
        ),
        ("ptm > 0.5", 1, True, None),
        ("iptm > 0.5", 1, True, "--keep iptm > 0.5: single chains have no iptm. Name another score."),
        ("iptm > 0.5", 2, True, None),
        (
            "mean_plddt > 1 and rmsd < 2",
            2,
            True,
            "--keep mean_plddt > 1 and rmsd < 2: rmsd is to a given complex. Fold structures, or pass --initial-guess.",
        ),
        ("rmsd < 3", 2, True, None),
    ],
)
def test_the_score_of_a_selection(keep: str | None, chains: int, pae: bool, expected: str | None) -> None:
    request = Request("q", "p", "out", keep=keep)
    queries, model = [query_of(["MKV"] * chains, (), "q"), query_of("MKV", (), "r")], described()
    model = replace(model, config=replace(model.config, heads=replace(model.config.heads, pae=pae)))
    if keep == "rmsd < 3":  # one of the queries is designed
        structure: Any = object()
        queries[1] = replace(queries[1], structure=structure)
    if expected is not None and expected.startswith("--"):
        with pytest.raises(UserError) as caught:
            module._selection(request, queries, [model])
        assert str(caught.value) == expected
        return
    found = module._selection(request, queries, [model])
    assert (found.score if isinstance(found, Selection) else found) == expected


def test_notices_of_a_run_and_complexes_that_a_model_cannot_fold() -> None:
    single, multimer = described(), replace(described(), config=as_multimer(CONFIG))
    read: Any = SimpleNamespace(hits=["a.hhr"], notices=[])
    notices = module._run_notices(read, [single], Request("q", "p", "out"))
    assert notices == [{"kind": "input", "text": "template hits are not used unless --hits names them: a.hhr"}]
    read.hits = []
    assert module._run_notices(read, [single], Request("q", "p", "out")) == []
    for given in ({"template": ["t.pdb"]}, {"initial_guess": "self", "fixed_chains": "A"}):
        texts = [one["text"] for one in module._run_notices(read, [single], Request("q", "p", "out", **given))]
        assert texts == ["no template is used with tiny.npz, which take none"]
    module._check_complexes(["c"], [multimer])
    module._check_complexes([], [single])
    with pytest.raises(UserError, match=r"folder/tiny\.npz: parameters for single chains, but c is a complex"):
        module._check_complexes(["c"], [multimer, single])


def test_the_arguments_of_the_process_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, meshes, team = list[Any](), list[Any](), SimpleNamespace()
    team.remesh = meshes.append
    monkeypatch.setattr(module, "grid_for", lambda *arguments: calls.append(arguments) or "grid")
    models: Any = [described(), described()]
    for more in ({}, {"chunk": 0, "recycles": 0}, {"chunk": 5, "recycles": 7, "strict": True, "memory": "2GB"}):
        request = Request("q", "p", "out", device="cpu", seeds=3, **more)
        module.choose_process_grid(models, [query_of("MKV", (), "q"), query_of("MK", (), "r")], request, team)  # type: ignore[arg-type]
    fast = {"precision": request.precision, "kernels": "fast"}
    assert [call[2:6] for call in calls] == [
        (CONFIG.recycles, "cpu", fast, None),
        (0, "cpu", fast | {"chunk": None}, None),
        (7, "cpu", fast | {"kernels": "strict", "chunk": 5}, 2_000_000_000),
    ]
    assert [sizes.residues for sizes in calls[0][1]] == [3, 2] * 6
    assert all(call[0] is models[0].config and call[6] is team for call in calls)
    assert meshes == ["grid"] * 3


def test_one_model_is_in_memory_and_loaded_with_the_settings_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def load_model(*arguments: Any, **more: Any) -> Any:
        calls.append((arguments, more))
        assert memory._predictor is None
        return SimpleNamespace()

    monkeypatch.setattr(module, "load", load_model)
    request = Request(
        "q", "p", "out", device="cpu", chunk=3, offload=True, memory="2GB", max_msa=9, max_extra=8, dropout=True,
        chain_gap=200, graphs=False, max_recycles="8:1", strict=True,
    )  # fmt: skip
    memory, model, team = ModelInMemory(request, Team()), described(), Team()
    memory.team = team
    predictor = memory.load(model)
    assert memory.load(described()) is predictor
    assert predictor.recycling == Recycling(long=(8, 1))
    assert calls == [
        (
            (model.path, "cpu", 3, request.precision, model.sample, team, "strict", True, "2GB"),
            {"max_msa": 9, "max_extra": 8, "dropout": True, "chain_gap": 200, "graphs": False},
        )
    ]
    assert memory.load(replace(model, name="other")) is not predictor
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("device", "number", "gpus", "workers", "used", "threads"),
    [
        ("cuda", 3, 2, 4, "cuda:1", []),
        ("cuda", 0, 2, 4, "cuda:0", []),
        ("cuda", 1, 1, 2, "cuda", []),
        ("cuda", None, 2, 0, "cuda", []),
        ("cpu", 1, 0, 3, "cpu", [2]),
        ("cpu", 1, 0, 9, "cpu", [1]),
        ("cpu", 1, 0, 0, "cpu", []),
        (None, 1, 2, 2, "cuda:1", []),
        (None, 1, 0, 2, "cpu", [4]),
    ],
)
def test_a_worker_uses_its_gpu_or_its_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str | None, number: int | None, gpus: int, workers: int,
    used: str, threads: list[int],
) -> None:  # fmt: skip
    asked, devices = list[int](), list[Any]()
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("torch.set_num_threads", asked.append)
    monkeypatch.setattr(module, "cores", lambda: 8)
    monkeypatch.setattr(module, "worker_number", lambda: number)
    monkeypatch.setattr(module, "_worker_memory", None)
    refusals = iter([{"early": 1}, {"slow": 2}] * 2)
    monkeypatch.setattr(module, "refusals", lambda before=None: next(refusals))

    def fold(load_model: Any, options: FoldOptions, team: Team, groups: Any, write: Any, record: Any) -> Clock:
        memory = load_model.__self__
        devices.append((memory, memory.request.device, groups, options.recycles))
        return Clock(1, 2, 3)

    monkeypatch.setattr(module, "fold_groups", fold)
    request = Request("q", "p", "out", device=device, recycles=4)
    job = module.FoldJob(["groups"], tmp_path, "run", False, request, workers, None, None, True)  # type: ignore[list-item]
    assert module.fold_job(job) == (Clock(1, 2, 3), {"slow": 2})
    module.fold_job(job)
    assert [call[1:] for call in devices] == [(used, ["groups"], 4)] * 2
    assert devices[0][0] is devices[1][0]
    assert asked == threads * 2
    assert module._memory_of(replace(request, recycles=5)) is not devices[0][0]


def test_workers_get_sixteen_jobs_each_and_dead_ones_are_left_the_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    items = [replace(item_of(4, name=f"q{i}"), model=described()) for i in range(64)]
    groups: Any = [(item,) for item in items]
    told, seen = list[tuple[float, float, str]](), list[Any]()

    @contextmanager
    def pool(workers: int, cluster: str | None) -> Iterator[Any]:
        seen.append((workers, cluster))
        yield SimpleNamespace(size=2)

    def in_order(function: Any, jobs: list[Any], executor: Any, again: Any) -> Iterator[Any]:
        assert (function, executor.size) == (module.fold_job, 2)
        seen.extend([jobs, again(jobs[:2])])
        return ((Clock(1, 2, 3), {"why": 2, f"job {i // 31}": 1}) for i, _ in enumerate(jobs))

    records = [{"key": [*items[i].key], **({} if i == 2 else {"entry": {}})} for i in (0, 2, 3)]
    monkeypatch.setattr(module, "pool", pool)
    monkeypatch.setattr(module, "in_order", in_order)
    monkeypatch.setattr(module, "read_records", lambda out, run: records)
    monkeypatch.chdir(tmp_path)
    for cluster in (None, "tcp://host:8786"):
        request = Request("q", "p", "out", workers=2, cluster=cluster, msa=["a"])
        folder: Any = SimpleNamespace(out=Path("out"), run="run", is_several=True, items=items, tables=None, keep=3)
        clock, refused = module._fold(ModelInMemory(request, Team()), groups, folder, lambda *at: told.append(at))
        (asked, jobs, left), seen[:] = seen[:3], []
        assert asked == (2, cluster)
        assert [job.groups for job in jobs] == [groups[i : i + 2] for i in range(0, 64, 2)]
        assert [job.groups for job in left] == [[groups[1]], [groups[2]]]
        first = jobs[0]
        assert (first.out, first.run, first.several, first.workers) == (
            tmp_path / "out",
            "run",
            True,
            0 if cluster else 2,
        )
        assert (first.request, first.tables, first.keep) == (request.for_workers(), None, 3)
        assert clock == Clock(32, 64, 96)
        assert refused == {"why": 64, "job 0": 31, "job 1": 1}
        assert [done for done, _, _ in told] == [0, *range(2, 65, 2)]
        told.clear()


def test_ranks_take_groups_wait_and_count_refusals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    item, waits, told = item_of(4), list[str](), list[tuple[float, float, str]]()
    outcome = FoldOutcome(item)

    def fold(*arguments: Any) -> Clock:
        assert list(arguments[3]) == [(item,)]
        arguments[5](outcome)
        return Clock(1, 2, 3)

    refusals = iter([{"early": 1}, {"slow": 2}] * 3)
    monkeypatch.setattr(module, "refusals", lambda before=None: next(refusals))
    monkeypatch.setattr(module, "fold_groups", fold)
    request = Request("q", "p", "out")
    for ranks, leader in ((2, True), (2, False), (1, True)):
        numbers, added = iter([0, 1]), list[Any]()
        team: Any = SimpleNamespace(
            mesh=SimpleNamespace(data=SimpleNamespace(size=ranks)), is_example_leader=leader,
            wait_for_all=waits.append, take=lambda what, numbers=numbers: next(numbers),
        )  # fmt: skip
        recorder = SimpleNamespace(add=added.append, shortlist=None)
        folder: Any = SimpleNamespace(out=tmp_path, items=[item, item], is_several=True, recorder=lambda r=recorder: r)
        found = module._fold(ModelInMemory(request, team), [(item,)], folder, lambda *at: told.append(at))
        assert found == (Clock(1, 2, 3), {"slow": 2})
        assert added == [outcome] * leader
    assert waits == ["the end of the predictions"] * 2
    assert told == [(1, 2, "q"), (2, 2, "q")] * 3


class Broadcasting(Team):
    """A team of one process that records what rank 0 sends."""

    def broadcast(self, value: Any, what: str) -> Any:
        self.sent = [*getattr(self, "sent", []), what]
        return "fp32" if what == "the precision" else super().broadcast(value, what)


@pytest.mark.parametrize(
    ("queries", "tables"),
    [
        (["MKV", "GSH"], None),
        (["MKV", "MKV:GSH"], ["scores.csv"]),
        (["MKV:GSH", "MKV:GSH:AAA"], ["scores.csv", "scores_pairs.csv"]),
    ],
)
def test_what_rank_zero_sends_and_which_tables_a_run_writes(
    tmp_path: Path, tiny_params: Path, queries: list[str], tables: list[str] | None
) -> None:
    team = Broadcasting()
    fasta = tmp_path / "q.fasta"
    fasta.write_text("".join(f">p{i}\n{sequence}\n" for i, sequence in enumerate(queries)))
    request = Request(
        fasta, tiny_params, tmp_path / "out", device="cpu", recycles=0, chain_gap=100, figures=False, precision="bf16"
    )
    summary = module.run(request, team=team)
    assert team.sent == ["the precision", "the beginning of the run", "the end of the run"]
    assert summary["settings"]["precision"] == "fp32"
    assert sorted(summary.get("tables") or []) == sorted(tables or [])
    assert (summary["status"], summary["asked"], summary["msa_server"]) == ("complete", None, None)
    assert summary["warnings"] == []
    log = (tmp_path / "out" / "predict.log").read_text()
    assert f"WarpFold {__version__}, torch" in log.splitlines()[0]
    assert "device cpu, precision fp32, 2 of 2 predictions to make" in log
    assert "complete: 2 predictions, 0 failures" in log


def test_the_summary_and_the_progress_of_a_run_of_designs(tmp_path: Path, tiny_params: Path) -> None:
    """The table takes the last chain of a designed complex for the binder unless chains are fixed."""
    entry = write_entry(tmp_path / "design.cif", {"A": "MKVAW", "B": "GSH"}, "2020-01-01")
    (tmp_path / "q.fasta").write_text(">plain\nMKV\n>bad\nMK1V\n")
    told: list[tuple[float, float, str]] = []
    request = Request(
        [entry, tmp_path / "q.fasta"], tiny_params, tmp_path / "out", device="cpu", recycles=0, chain_gap=100, seed=3,
        seeds=2, representations=tmp_path / "r.store", figures=False, batch=1,
    )  # fmt: skip
    summary = module.run(request, lambda *at: told.append(at))
    assert [one["text"] for one in summary["warnings"]] == [
        "scores.csv takes the last chain for the binder and the other chains for its target; name the target with "
        "--fixed-chains if it is another"
    ]
    assert (summary["store"], summary["tables"][0]) == (str(tmp_path / "r.store"), "scores.csv")
    assert [one["name"] for one in summary["failures"]] == ["bad"]
    error = summary["failures"][0]["error"]
    assert f"failed bad: {error}" in (tmp_path / "out" / "predict.log").read_text()
    keys = sorted((one["name"], one["seed"]) for one in summary["predictions"])
    assert keys == [("design", 3), ("design", 4), ("plain", 3), ("plain", 4)]
    (process,) = summary["processes"]
    assert 0 < process["seconds"] < 60
    assert told[0] == (0, 4, "loading the parameters")
    assert told[-1] == (4, 4, "writing the report")
    assert {done for done, _, _ in told} >= {0, 1, 2, 3, 4}
    assert module.run(replace(request, force=True), lambda *at: told.append(at))["run"] == summary["run"]


def test_what_is_written_of_a_prediction(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(module, "write_prediction", lambda *arguments: calls.append(arguments) or {"entry": 1})
    monkeypatch.setattr(module, "row_of", lambda entry: ("row", entry))
    query = replace(query_of("MKV", (), "q"), notices=[Notice("no_alignment")])
    structure: Any = SimpleNamespace(source="folder/guess.pdb")
    guessed = replace(query, guess=structure, fixed=("A",))
    prediction = replace(EMPTY, details={"seed": 1})
    shortlist: Any = SimpleNamespace(wants=lambda row: row)
    stored = Request("q", "p", "out", representations=tmp_path / "r.store", pair_representation="whole", figures=True)
    for several, chosen, request, item in (
        (True, shortlist, stored, FoldItem(described(), guessed, 7)),
        (False, None, Request("q", "p", "out", figures=False), FoldItem(described(), query, 7)),
    ):
        assert module._writer(tmp_path, several, chosen, request)(item, prediction) == {"entry": 1}
    guess = {"initial_guess": "guess.pdb", "fixed_chains": ["A"]}
    first, second = calls
    assert first[0].details == {"seed": 1, "model": "tiny", **guess}
    assert second[0].details == {"seed": 1, "model": "tiny"}
    assert first[1:6] == (tmp_path, "tiny_seed_7", query.notices, ("A",), structure)
    assert first[6]("entry") == ("row", "entry")
    assert first[7:] == ("whole", True)
    assert second[1:] == (tmp_path, "", query.notices, (), None, None, None, False)


def test_the_precision_of_a_cluster_is_that_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    @contextmanager
    def pool(workers: int, cluster: str | None) -> Iterator[str]:
        asked.append((workers, cluster))
        yield "executor"

    def in_order(function: Any, jobs: Any, executor: str) -> Iterator[str]:
        asked.append((function, jobs, executor))
        yield "bf16"

    monkeypatch.setattr(module, "pool", pool)
    monkeypatch.setattr(module, "in_order", in_order)
    monkeypatch.setattr(module, "resolve_precision", lambda precision, device: (precision, device))
    alone = Request("q", "p", "out", device="cpu", workers=2)
    cluster = replace(alone, cluster="tcp://host:8786", msa=["a"])
    assert module._resolve_precision(alone) == ("auto", "cpu")
    assert module._resolve_precision(replace(cluster, precision="fp32")) == ("fp32", "cpu")
    assert asked == []
    assert module._resolve_precision(cluster) == "bf16"
    assert asked == [(2, "tcp://host:8786"), (module._precision_of_worker, [cluster.for_workers()], "executor")]
    assert module._precision_of_worker(cluster) == ("auto", "cpu")
    for available, device in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr("torch.cuda.is_available", lambda available=available: available)
        assert module._device_of(Request("q", "p", "out")) == device


def test_names_of_the_run_and_gaps_of_multimers_are_refused(tmp_path: Path, tiny_params: Path) -> None:
    multimer = tmp_path / "multimer.safetensors"
    save_params(multimer, tiny_multimer())
    (tmp_path / "q.fasta").write_text(">Records\nMKV\n")

    def read(params: Path, **more: Any) -> Any:
        request = Request(tmp_path / "q.fasta", params, tmp_path / "out", **more)
        return module._read(request, Team(), lambda *at: None)

    with pytest.raises(UserError, match="Records: no protein can have this name"):
        read(tiny_params)
    with pytest.raises(UserError) as caught:
        read(multimer, chain_gap=200)
    text = "multimer.safetensors is AlphaFold-Multimer's, which tells chains apart. Leave it out."
    assert str(caught.value) == f"--chain-gap: {text}"
    (tmp_path / "q.fasta").write_text(">a\nMKV:GSH\n")
    assert read(tiny_params, chain_gap=200)[0].queries[0].is_complex
    for more in ({}, {"pairs": "all"}):
        with pytest.raises(UserError):
            read(tiny_params, **more)


def test_the_queries_choose_among_the_kinds_of_a_folder_of_parameters(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The folder may be next to a file."""
    folder, multimer = tmp_path / "params", tmp_path / "own_multimer.npz"
    folder.mkdir()
    for name in ("params_model_1_ptm", "params_model_1_multimer_v3"):
        (folder / f"{name}.npz").touch()

    def read_params(paths: Sequence[Path]) -> list[Params]:
        configs = [as_multimer(CONFIG) if "multimer" in path.name else CONFIG for path in paths]
        return [replace(described(), path=path, config=config) for path, config in zip(paths, configs)]

    monkeypatch.setattr(module, "read_params", read_params)
    single, several, (ptm, newest) = ">a\nMKV\n>c\nGSH\n", ">a\nMKV\n>b\nMKV:GSH\n", ("ptm", "multimer_v3")
    for fasta, params, more, kinds in (
        (single, [folder], {}, [ptm]),
        (several, [folder], {}, [newest]),
        (several, [folder, multimer], {}, [newest, "own"]),
        (single, [folder], {"pairs": "all"}, [newest]),
        (several, [folder], {"chain_gap": 200}, [ptm]),
    ):
        (tmp_path / "q.fasta").write_text(fasta)
        request = Request(tmp_path / "q.fasta", params, tmp_path / "out", **more)
        read, models, _ = module._read(request, Team(), lambda *at: None)
        assert len(read.queries) == 2
        names = [f"params_model_1_{kind}.npz" if kind != "own" else multimer.name for kind in kinds]
        assert [model.path.name for model in models] == names


@pytest.mark.parametrize(
    ("rank", "ranks", "data", "more", "groups", "grids"),
    [
        (0, 1, 1, {}, [[2]], 0),
        (0, 2, 1, {}, [[1, 1]], 0),
        (0, 2, 2, {}, [[1, 1]], 1),
        (0, 1, 1, {"save_recycles": True}, [[1, 1]], 0),
        (0, 1, 1, {"batch": 1}, [[1, 1]], 0),
        (1, 2, 1, {}, [], 0),
    ],
)
def test_the_steps_of_a_run_before_it_folds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_params: Path, caplog: pytest.LogCaptureFixture,
    rank: int, ranks: int, data: int, more: dict[str, Any], groups: list[Any], grids: int,
) -> None:  # fmt: skip
    calls = {name: list[Any]() for name in ("choose_process_grid", "check_fits", "log_precision", "check_guess")}
    for name, seen in calls.items():
        monkeypatch.setattr(module, name, lambda *arguments, seen=seen: seen.append(arguments))
    folded: list[Any] = []

    def in_groups_of_run(*arguments: Any) -> Any:
        folded.append([len(group) for group in in_groups(*arguments)])
        raise UserError("stop")

    monkeypatch.setattr(module, "in_groups", in_groups_of_run)
    predictor = SimpleNamespace(device="cpu", planner=SimpleNamespace(check="check"))
    monkeypatch.setattr(module, "load", lambda *_, **__: predictor)
    monkeypatch.setattr(PredictionFolder, "groups_of", lambda self, todo: 1 / 0)
    monkeypatch.setattr(module, "LONG", 3)
    caplog.set_level("INFO", "warpfold")
    team: Any = Broadcasting(ProcessInfo(rank, ranks))
    team.mesh = SimpleNamespace(
        data=SimpleNamespace(size=data), axial=SimpleNamespace(size=1), branch=SimpleNamespace(size=1),
        world=SimpleNamespace(size=1), model=SimpleNamespace(rank=0),
    )  # fmt: skip
    (tmp_path / "q.fasta").write_text(">a\nMKV\n>b\nGSH\n")
    request = Request(tmp_path / "q.fasta", tiny_params, tmp_path / "out", device="cpu", recycles=2, **more)
    with pytest.raises((UserError, ZeroDivisionError)):
        module.run(request, team=team)
    assert folded == groups
    assert len(calls["choose_process_grid"]) == grids
    ((queries, model, recycles, check),) = calls["check_fits"]
    assert ([query.name for query in queries], model.name, recycles, check) == (["a", "b"], "tiny", 2, "check")
    assert len(calls["check_guess"]) == 1
    assert calls["log_precision"] == ([] if rank == 0 else [("auto", "fp32", "cpu")])
    assert ("planning for 3 residues" in caplog.messages) == (rank == 0)


def test_the_workers_of_a_cluster_get_absolute_paths(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_params: Path
) -> None:
    seen: list[Any] = []

    def fold(memory: Any, groups: Any, folder: Any, tell: Any) -> Any:
        seen.extend(item.model.path for group in groups for item in group)
        raise UserError("stop")

    monkeypatch.setattr(module, "_fold", fold)
    monkeypatch.chdir(tiny_params.parent)
    (tmp_path / "q.fasta").write_text(">a\nMKV\n")
    for cluster, path in (("tcp://host:8786", tiny_params), (None, Path(tiny_params.name))):
        out = tmp_path / f"out {cluster is None}"
        request = Request(
            tmp_path / "q.fasta", tiny_params.name, out, device="cpu", precision="fp32", workers=2, cluster=cluster
        )
        with pytest.raises(UserError, match="stop"):
            module.run(request)
        assert seen.pop() == path


def test_records_are_one_complex_only_if_every_model_folds_complexes(tmp_path: Path, tiny_params: Path) -> None:
    (tmp_path / "q.fasta").write_text(">a\nMKV\n>b\nGSH\n")
    multimer = tmp_path / "multimer.safetensors"
    save_params(multimer, tiny_multimer())
    for params, names in (([multimer], ["q"]), ([multimer, tiny_params], ["a", "b"]), ([tiny_params], ["a", "b"])):
        read, models, digest = module._read(
            Request(tmp_path / "q.fasta", params, tmp_path / "out"), Team(), lambda *at: None
        )
        assert ([query.name for query in read.queries], len(models), digest) == (names, len(params), None)


def test_planning_is_announced_from_a_thousand_residues(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_params: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def stop(*_: Any, **__: Any) -> Any:
        raise UserError("stop")

    monkeypatch.setattr(module, "load", stop)
    caplog.set_level("INFO", "warpfold")
    for lengths, announced in (((1000, 1001), True), ((999, 1200), False)):
        caplog.clear()
        with pytest.raises(UserError, match="stop"):
            module.run(Request(["M" * n for n in lengths], tiny_params, tmp_path / "out", device="cpu"))
        assert [text for text in caplog.messages if "planning" in text] == ["planning for 1000 residues"] * announced


# ---- defaults


def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {one.name: one.default for one in parameters if one.default is not one.empty}


NO_SERVER = {"msa_server": None, "msa_cache": None}
NO_SOURCES = {"hits": None, "template_structures": None, "max_template_date": None}
PASSES = {"seed": 0, "recycles": None, "ensemble": None}
OUTPUTS = {"distogram": False, "logits": False, "save_recycles": False}
MODEL = {
    "chunk": None, "precision": "auto", "sample": None, "team": None, "kernels": "fast", "offload": None,
    "memory": None, "graphs": True,
}  # fmt: skip
MANY = {"alignments": (), "templates": (), **PASSES, "batch": "auto", **NO_SERVER} | {
    "initial_guess": None, "fixed": None, "progress": None
}  # fmt: skip
DEFAULTS: dict[Callable[..., Any], dict[str, Any]] = {
    Predictor.__init__: {"device": "cpu", **MODEL},
    load: {"device": None, **MODEL, **NO_SERVER, "max_msa": None, "max_extra": None, "recycle_tolerance": None}
    | {"max_recycles": None, "dropout": False, "chain_gap": None},
    Predictor.fold: {"alignment": (), "templates": None, "name": "query", **PASSES, "representations": True, **OUTPUTS}
    | {**NO_SOURCES, **NO_SERVER, "initial_guess": None, "fixed": None},
    Predictor.with_templates: {"templates": None, **NO_SOURCES},
    Predictor.fold_many: {**MANY, "representations": False, **OUTPUTS},
    Predictor.score_designs: MANY,
    Predictor.gradient: {"fixed": None, "alignment": (), "templates": None, "initial_guess": None, "soft": 1.0}
    | {"temperature": 1.0, "hard": 0.0, "recycles": None, "through": "last", "seed": 0, "name": "design"},
    Predictor.fold_example: {**PASSES, "representations": True, **OUTPUTS, "initial_guess": None, "fixed": ()},
    Predictor.prepare: {**PASSES, "initial_guess": None, "fixed": ()},
    Predictor.compute: {"options": FoldOptions()},
    Predictor.compute_together: {"options": FoldOptions()},
    Predictor.plan: {"representations": True},
    in_groups: {"recycling": Recycling(), "recycles": None},
    FoldOptions: {"recycles": None, "ensemble": None, "representations": True, **OUTPUTS},
}


@pytest.mark.parametrize("function", DEFAULTS, ids=lambda function: function.__qualname__)
def test_the_defaults_of_public_functions(function: Callable[..., Any]) -> None:
    assert defaults_of(function) == DEFAULTS[function]
    assert all(type(value) is type(DEFAULTS[function][name]) for name, value in defaults_of(function).items())
