"""Test training on several ranks: results equal to those of one device, files, signals, and failures."""

import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

from tests.ranks import RankError, run_ranks
from tests.recorder import OperationRecorder
from tests.training.runs import equal_tensors, make_store, rows, steps, tiny_run
from tests.training.test_train import damage
from warpfold import device
from warpfold.cost.example import ExampleSizes, Job
from warpfold.cost.links import Cluster, Link
from warpfold.cost.machine import Machine
from warpfold.cost.planner import choose
from warpfold.cost.rates import of_gpu
from warpfold.data.load.examples import Sample
from warpfold.data.store.store import Store
from warpfold.engine import checkpoint
from warpfold.engine import learn as learning
from warpfold.engine.loop import StepTimer
from warpfold.engine.trainable import AdapterConfig, FinetuneConfig
from warpfold.engine.watch import Watching
from warpfold.model.weights import files as weights
from warpfold.parallel import collectives, exchange, messages, reducer
from warpfold.parallel.compress import CompressionConfig
from warpfold.parallel.exchange import SyncConfig
from warpfold.parallel.mesh import make_mesh
from warpfold.parallel.plan import Plan
from warpfold.parallel.team import ProcessInfo, Team
from warpfold.training import train as module
from warpfold.training.config import RunConfig
from warpfold.training.train import ExampleResult, Summary, gather_results, train

STEPS = 4


def config_for(plan: Plan, outer: str = "middle", accumulate: int = 2, **train: Any) -> RunConfig:
    defaults = {"steps": STEPS, "validation": 0.4, "validate_every": 2, "save_every": 2}
    config = tiny_run(**(defaults | train))
    model = replace(config.model, evoformer=replace(config.model.evoformer, outer=outer))
    return replace(config, model=model, plan=plan, optim=replace(config.optim, accumulate=accumulate))


def team_of(data: int = 1, axial: int = 1, branch: int = 1) -> Team:
    """Return the team of a rank's process."""
    mesh = make_mesh(data, axial, branch)
    return Team(ProcessInfo(mesh.world.rank, data * axial * branch), mesh)


def train_on_ranks(
    config: RunConfig, store: Store, out: Path, watch: Watching | None = None, watching: int = 0, **more: Any
) -> list[Summary]:
    """Train on the ranks of the plan.  `watch` gets the rows on rank `watching`."""
    plan = config.plan

    def on_a_rank() -> Summary:
        # The fork server of an earlier test is not a child of this process.
        forkserver._forkserver._forkserver_pid = None  # type: ignore[attr-defined]
        team = team_of(plan.data, plan.axial, plan.branch)
        return train(config, store, out, team=team, watch=watch if team.process.rank == watching else None, **more)

    return run_ranks(on_a_rank, plan.data * plan.axial * plan.branch)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_store(tmp_path_factory.mktemp("ranks") / "store", proteins=7)


@pytest.fixture(scope="module")
def alone(store: Store, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Train on one device, for each order of layers."""
    found = {}
    for outer in ("middle", "first"):
        found[outer] = tmp_path_factory.mktemp("ranks") / outer
        train(config_for(Plan(), outer), store, found[outer])
    return found


def parted(value: Any) -> tuple[Any, list[float]]:
    """Split a JSON value into its structure and its numbers."""
    if isinstance(value, float):
        return None, [value]
    if not isinstance(value, dict | list):
        return value, []
    rest, numbers = zip(*(parted(item) for item in (value.values() if isinstance(value, dict) else value)))
    return (list(value) if isinstance(value, dict) else [], rest), [number for part in numbers for number in part]


def assert_alike(out: Path, alone: Path, kinds: tuple[str, ...] = ("step", "validation")) -> None:
    """Check that the rows of two runs and their averaged weights differ by rounding alone."""
    (rest, numbers), (rest_alone, numbers_alone) = (
        parted([row for row in rows(folder) if row["kind"] in kinds]) for folder in (out, alone)
    )
    assert rest == rest_alone
    assert numbers == pytest.approx(numbers_alone, rel=2e-4, abs=1e-6)
    here, there = (load_file(folder / "params.safetensors") for folder in (out, alone))
    assert max(float((here[name] - there[name]).abs().max()) for name in there) < 1e-4


PLANS = [
    pytest.param("middle", Plan(data=2), id="data"),
    pytest.param("middle", Plan(axial=2, chunk=3), id="axial"),
    pytest.param("first", Plan(branch=2, recompute="block"), id="branch"),
    pytest.param("first", Plan(data=2, branch=2), id="data-branch"),
    pytest.param("middle", Plan(data=2, axial=2), id="data-axial"),
]


@pytest.mark.parametrize(("outer", "plan"), PLANS)
def test_ranks_train_what_one_device_trains(
    store: Store, alone: dict[str, Path], tmp_path: Path, outer: str, plan: Plan
) -> None:
    out = tmp_path / "run"
    summaries = train_on_ranks(config_for(plan, outer), store, out)
    assert all((s.steps, s.finished, s.signal) == (STEPS, True, 0) for s in summaries)
    assert_alike(out, alone[outer])


def test_unequal_shares_train_what_one_device_trains(store: Store, tmp_path: Path) -> None:
    """Train four examples per step on three ranks in fp64, also after a kill between two checkpoints."""
    one, three = (
        config_for(Plan(data=data, precision="fp64"), accumulate=4, steps=6, save_every=3, validation=0.0)
        for data in (1, 3)
    )
    train(one, store, tmp_path / "one")
    train_on_ranks(three, store, tmp_path / "three")
    (rest, numbers), (rest_alone, numbers_alone) = (parted(rows(tmp_path / name)) for name in ("three", "one"))
    assert rest == rest_alone
    assert numbers == pytest.approx(numbers_alone, rel=1e-10, abs=1e-12)
    here, there = (load_file(next((tmp_path / name).glob("checkpoints/*6/*.safetensors"))) for name in ("three", "one"))
    assert max(float((here[name] - there[name]).abs().max()) for name in there) < 1e-10

    def killed(row: dict[str, Any]) -> None:
        if row["kind"] == "step" and row["step"] == 5:
            os._exit(9)

    with pytest.raises(RankError):
        train_on_ranks(three, store, tmp_path / "again", killed)
    train_on_ranks(three, store, tmp_path / "again")
    assert rows(tmp_path / "again") == rows(tmp_path / "three")
    assert equal_tensors(tmp_path / "again/params.safetensors", tmp_path / "three/params.safetensors")


def test_ranks_that_replay_graphs_train_what_others_train(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test graphs with unequal shares, with a stop and `plan.graph = True` instead of "auto"."""
    monkeypatch.setattr(device, "find_recorder", lambda _: OperationRecorder())
    plain = config_for(Plan(data=2, sizes=1, graph=False), accumulate=3, validation=0.0)
    recorded = replace(plain, plan=replace(plain.plan, graph=True))
    train_on_ranks(plain, store, tmp_path / "plain")
    train_on_ranks(replace(recorded, train=replace(plain.train, steps=3)), store, tmp_path / "run")
    for summary in train_on_ranks(recorded, store, tmp_path / "run"):
        assert summary.finished
        assert not summary.unrecorded
    assert_alike(tmp_path / "run", tmp_path / "plain", kinds=("step",))
    assert equal_tensors(tmp_path / "run/params.safetensors", tmp_path / "plain/params.safetensors")


@pytest.mark.parametrize("method", ["powersgd", "topk", "int8", "1bit"])
def test_every_compression_is_planned_and_trains(store: Store, tmp_path: Path, method: Any) -> None:
    config = config_for(Plan(), steps=2)
    optim = replace(config.optim, compression=CompressionConfig(method=method, start=0))
    sizes = ExampleSizes(residues=8, sequences=3, extra=4, templates=0)
    job = Job(model=config.model, sizes=sizes, recycles=1, loss=config.loss, optim=optim)
    link = Link(1e-5, 1e9)
    cluster = Cluster(ranks=2, per_node=2, within=link, between=link)
    machine = Machine(kind="cuda", free=10**11, devices=2)
    plan = choose(job, machine, {"axial": 1, "data": 2}, {}, cluster, of_gpu("H100")).plan
    assert (plan.data, plan.sync.strategy) == (2, "plain")
    assert all(s.finished for s in train_on_ranks(replace(config, optim=optim, plan=plan), store, tmp_path / "run"))


def test_stopped_and_continued_it_is_the_same_to_the_bit(store: Store, tmp_path: Path) -> None:
    """A signal to any rank lets all ranks finish the current step, or give up the validation they are in; everything
    random, exchanged and sharded continues unchanged.  It arrives when the row of a step is written: after step 2 there
    is a validation, after step 3 there is none, so step 4 is the current one."""
    plan = Plan(data=2, axial=2, sync=SyncConfig(shard_state=True))
    config = config_for(plan, steps=6)
    train_on_ranks(config, store, tmp_path / "unbroken")
    for last, ends in ((2, 2), (3, 4)):

        def stop(row: dict[str, Any], last: int = last) -> None:
            if row["kind"] == "step" and row["step"] == last:
                os.kill(os.getpid(), signal.SIGTERM)

        stopped = train_on_ranks(config, store, tmp_path / "run", watch=stop, watching=3)
        assert [(s.steps, s.finished, s.signal) for s in stopped] == [(ends, False, signal.SIGTERM)] * 4
    train_on_ranks(config, store, tmp_path / "run")
    assert rows(tmp_path / "run") == rows(tmp_path / "unbroken")
    assert equal_tensors(tmp_path / "run/params.safetensors", tmp_path / "unbroken/params.safetensors")


@pytest.mark.parametrize("accumulate", [2, 4])
def test_no_step_waits_for_all_ranks_to_speak(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulate: int
) -> None:
    """No collective of a step blocks, since messages travel while the processes work."""
    blocking: list[str] = []
    seen: list[list[str]] = []

    def counted(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            if not more.get("async_op") and dist.get_world_size(more.get("group")) == 2:
                blocking.append(name)
            return collective(*args, **more)

        return call

    for name in ("all_reduce", "all_gather", "all_to_all_single", "broadcast", "barrier", "send", "recv"):
        monkeypatch.setattr(dist, name, counted(name, getattr(dist, name)))
    for place in (collectives, exchange, messages, reducer):
        monkeypatch.setattr(place, "all_gather_flat", counted("all_gather_single", collectives.all_gather_flat))

    def watch(row: dict[str, Any]) -> None:
        seen.append(list(blocking))
        blocking.clear()

    def on_a_rank() -> list[list[str]]:
        config = config_for(Plan(data=2), accumulate=accumulate, validate_every=0, save_every=99, validation=())
        train(config, store, tmp_path / "run", team=team_of(2), watch=watch)
        return seen

    for rows_of in run_ranks(on_a_rank, 2):
        assert len(rows_of) == STEPS
        assert rows_of[0]  # the start has blocking collectives
        assert rows_of[1:] == [[]] * (STEPS - 1)


def ended(team: Team, own: list[ExampleResult], by: int, to_all: bool = False) -> tuple[list[ExampleResult], int]:
    """Gather the results of all ranks, and the signal that rank `by` received.  The last rank waited longest."""
    timer, ledger = StepTimer(), SimpleNamespace(unshared=0, take_unshared=list)
    timer.waited = float(team.process.rank)
    signals = SimpleNamespace(received=15 * (team.process.rank == by))
    gathered = gather_results(1, own, timer, None, ledger, signals, team, to_all)  # type: ignore[arg-type]
    assert timer.waited == team.process.ranks - 1
    return gathered


def test_long_names_and_many_terms_are_told_whole() -> None:
    """A name beyond the fixed size of the message is sent separately.  NaN and inf arrive unchanged."""

    def on_a_rank(length: int) -> list[tuple[str, float, dict[str, float]]]:
        team = team_of(2)
        rank, terms = team.process.rank, {"fape": 0.1 * team.process.rank, "plddt": math.inf}
        own = [ExampleResult("é" * (length + rank), 7, math.nan, 1 / 3, 0.5, terms, 2 * k + rank) for k in range(2)]
        every, received = ended(team, own, by=1, to_all=True)
        assert received == 15
        assert all(math.isnan(one.loss) and one.norm == 1 / 3 and one.length == 7 for one in every)
        return [(one.key, one.index, one.terms) for one in every]

    for length in (31, 32, 100):
        expected = [("é" * (length + k % 2), k, {"fape": 0.1 * (k % 2), "plddt": math.inf}) for k in range(4)]
        assert run_ranks(on_a_rank, 2, length) == [expected] * 2


@pytest.mark.parametrize("loss", [1.0, math.nan])
def test_results_go_to_the_first_rank_and_to_all_if_one_is_not_finite(loss: float) -> None:
    """All ranks learn of signals and of examples to skip.  Other results reach only the log of rank 0."""

    def on_a_rank() -> tuple[list[str], int]:
        team = team_of(3)
        rank = team.process.rank
        own = [ExampleResult(f"p{rank}", 7, loss if rank == 1 else 1.0, 1 / 3, 0.5, {"fape": 0.1}, rank)]
        every, received = ended(team, own, by=2)
        return [one.key for one in every], received

    found, others = ["p0", "p1", "p2"], [["p1"], ["p2"]]
    expected = [found, *(others if math.isfinite(loss) else [found, found])]
    assert run_ranks(on_a_rank, 3) == [(keys, 15) for keys in expected]


def test_other_ranks_go_on(store: Store, alone: dict[str, Path], tmp_path: Path) -> None:
    """A run that continues on other numbers of data or axial ranks differs by rounding alone."""
    out = tmp_path / "run"
    for last, plan in ((2, Plan(data=2)), (3, Plan(axial=2)), (STEPS, Plan())):
        train_on_ranks(config_for(plan, steps=last, validate_every=0), store, out)
    assert_alike(out, alone["middle"], kinds=("step",))


def poison(patch: pytest.MonkeyPatch, index: int, plan: Plan) -> None:
    """Make the loss of example `index` NaN on the last of the ranks that share it."""
    next_examples, total_loss = module.next_examples, learning.total_loss
    at = [-1]

    def noted(*args: Any) -> Iterator[Sample]:
        for example in next_examples(*args):
            at[0] = example.index
            yield example

    def poisoned(*args: Any, **more: Any) -> Any:
        loss, terms = total_loss(*args, **more)
        last = (dist.get_rank() + 1) % (plan.axial * plan.branch) == 0
        return (loss * math.nan if last and at == [index] else loss), terms

    patch.setattr(module, "next_examples", noted)
    patch.setattr(learning, "total_loss", poisoned)


@pytest.mark.parametrize("plan", [Plan(data=2), Plan(axial=2)], ids=["data", "axial"])
def test_what_is_not_finite_is_saved_once_and_its_rank_says_so(
    store: Store, alone: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: Plan
) -> None:
    name = steps(alone["middle"])[1]["examples"][1]
    poison(monkeypatch, 3, plan)
    folder = tmp_path / "stop/failures/example-00000003"
    with pytest.raises(RankError, match=f"step 1: the loss or gradient of {name} is not finite. {folder}"):
        train_on_ranks(config_for(plan), store, tmp_path / "stop")
    notes = json.loads((folder / "failure.json").read_text())
    assert (notes["key"], notes["plan"]["data"], notes["plan"]["axial"]) == (name, plan.data, plan.axial)
    assert set(load_file(folder / "state.safetensors")) > {"weights.single.weight"}

    train_on_ranks(config_for(plan, on_nonfinite="skip", steps=2, validation=0.4), store, tmp_path / "skip")
    found = steps(tmp_path / "skip")
    assert [row["skipped"] for row in found] == [0, 1]
    assert all(math.isfinite(row["loss"]) for row in found)


def test_an_entry_that_one_rank_cannot_use_is_set_aside_by_all(
    store: Store, alone: dict[str, Path], tmp_path: Path
) -> None:
    used = [name for row in rows(alone["middle"]) if row["kind"] == "step" for name in row["examples"]]
    damaged = damage(store, used[1], tmp_path / "damaged")
    config = config_for(Plan(data=2), quarantine=0.3)
    summaries = train_on_ranks(config, damaged, tmp_path / "run")
    assert [s.quarantined for s in summaries] == [(used[1],)] * 2
    train(config_for(Plan(), quarantine=0.3), damaged, tmp_path / "alone")
    told, told_alone = (
        [(row["kind"], row.get("example")) for row in rows(tmp_path / name) if row["kind"] == "quarantine"]
        for name in ("run", "alone")
    )
    assert told == told_alone == [("quarantine", used[1])]
    assert_alike(tmp_path / "run", tmp_path / "alone", kinds=("step",))
    lines = (tmp_path / "run/quarantine.jsonl").read_text().splitlines()
    assert [json.loads(line)["name"] for line in lines] == [used[1]]
    assert train_on_ranks(config, damaged, tmp_path / "run") == summaries


def test_examples_that_passed_each_other_do_so_again_on_every_rank(store: Store, tmp_path: Path) -> None:
    """With a window the order depends on timing.  Each data rank records it, so that a run can repeat it."""
    config = config_for(Plan(data=2), accumulate=4, workers=2, window=4, steps=5, save_every=3, validate_every=0)

    def stop(row: dict[str, Any]) -> None:
        if row["kind"] == "step" and row["step"] == 4:
            raise RuntimeError("enough")

    with pytest.raises(RankError, match="enough"):
        train_on_ranks(config, store, tmp_path / "run", watch=stop)
    before = steps(tmp_path / "run")
    train_on_ranks(config, store, tmp_path / "run")
    after = steps(tmp_path / "run")
    assert after[:4] == before
    numbers = []
    for rank in range(2):
        lines = (tmp_path / f"run/order-{rank}-of-2.txt").read_text().splitlines()[1:]
        assert [int(line.split()[0]) for line in lines] == list(range(10))
        numbers += [int(line.split()[1]) for line in lines]
    assert sorted(numbers) == list(range(20))  # each exactly once
    follower = replace(config, train=replace(config.train, workers=0, window=0))
    train_on_ranks(follower, store, tmp_path / "follower", replay=tmp_path / "run/order.txt")
    assert steps(tmp_path / "follower") == after


def test_ranks_that_do_not_see_the_same_are_refused(store: Store, tmp_path: Path) -> None:
    def on_a_rank() -> None:
        team, config = team_of(2), config_for(Plan(data=2))
        config = replace(config, data=replace(config.data, crop=8 + team.process.rank))
        train(config, store, tmp_path / "run", team=team)

    with pytest.raises(RankError, match=r"rank 1 and rank 0 differ in settings\. Give all ranks the same"):
        run_ranks(on_a_rank, 2)


def test_those_who_share_an_example_have_the_same_or_nobody_goes_on() -> None:
    def on_a_rank(differ: bool) -> list[str]:
        team = team_of(axial=2)
        names = ["a", f"b{team.process.rank}" if differ else "b"]
        examples = iter(Sample(index, name, {}) for index, name in enumerate(names))
        return [example.name for example in module.next_examples(examples, 2, StepTimer(), team)]  # type: ignore[arg-type]

    assert run_ranks(on_a_rank, 2, False) == [["a", "b"]] * 2
    with pytest.raises(RankError, match=r"example 1: rank 0 has b0, rank 1 has b1, but they share it"):
        run_ranks(on_a_rank, 2, True)


def test_the_first_rank_alone_reads_checkpoints_and_first_weights(
    store: Store, alone: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An audit hook counts every file that a rank opens.  safetensors bypasses it, so its calls are noted."""
    init = alone["middle"] / "params.safetensors"
    opened: list[str] = []

    def noted(name: str, original: Any) -> Any:
        return lambda path, *args, **more: (opened.append(f"{name} {path}"), original(path, *args, **more))[1]

    monkeypatch.setattr(checkpoint, "load_file", noted("load_file", checkpoint.load_file))
    monkeypatch.setattr(weights, "safe_open", noted("safe_open", weights.safe_open))

    def on_a_rank(steps: int) -> list[str]:
        sys.addaudithook(lambda event, args: opened.append(f"open {args[0]}") if event == "open" else None)
        config = config_for(Plan(data=2), steps=steps, validate_every=0, validation=0.0)
        train(config, store, tmp_path / "run", init=init, team=team_of(2))
        return [name for name in opened if "/checkpoints/" in name or str(init) in name]

    first, second = run_ranks(on_a_rank, 2, 2)
    assert any("safe_open" in name for name in first)
    assert second == []
    first, second = run_ranks(on_a_rank, 2, 3)
    assert any("load_file" in name for name in first)
    assert second == []


PARTS = {
    "cached": FinetuneConfig(trainable=("structure", "plddt"), draws=2, trunk="auto"),
    "adapters": FinetuneConfig(trainable=("plddt",), adapters=AdapterConfig(on=("evoformer", "structure"), rank=2)),
}


@pytest.mark.parametrize(
    ("part", "plan"),
    [
        ("cached", Plan(data=2)),
        # The entries are computed by ranks that share an example, and read by one rank.
        ("cached", Plan(axial=2)),
        ("adapters", Plan(data=2, sync=SyncConfig(shard_state=True))),
        ("adapters", Plan(axial=2)),
    ],
)
def test_a_part_is_trained_on_ranks_as_on_one(part: str, plan: Plan, store: Store, tmp_path: Path) -> None:
    train(replace(config_for(Plan()), finetune=PARTS[part]), store, tmp_path / "alone")
    train_on_ranks(replace(config_for(plan), finetune=PARTS[part]), store, tmp_path / "ranks")
    assert_alike(tmp_path / "ranks", tmp_path / "alone")
    assert (tmp_path / "ranks/trunk").exists() == (part == "cached" and plan.axial == 1)
