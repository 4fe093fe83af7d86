"""Test plan selection: out-of-memory errors lead to a tighter plan, and jobs that cannot fit are refused at once."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.helpers import as_multimer, tiny_config, tiny_model
from tests.ranks import RankError, run_ranks
from tests.training.runs import tiny_run
from warpfold import predict, settings
from warpfold.cli import main
from warpfold.cost import planner
from warpfold.cost.example import ExampleSizes, Job
from warpfold.cost.links import Cluster, Link
from warpfold.cost.machine import Machine
from warpfold.cost.memory import MemoryEstimate
from warpfold.cost.rates import Rates, of_gpu
from warpfold.data.example.raw_example import Assembly, from_sequence
from warpfold.data.features.choose import SampleConfig
from warpfold.errors import UserError
from warpfold.memory import host_memory, is_out_of_memory
from warpfold.model.alphafold import AlphaFold
from warpfold.model.weights.files import save_params
from warpfold.parallel.exchange import SyncConfig
from warpfold.parallel.mesh import make_mesh
from warpfold.parallel.plan import Plan
from warpfold.parallel.team import ProcessInfo, Team
from warpfold.prediction import plan_report
from warpfold.prediction.predictor import Predictor
from warpfold.training import planning
from warpfold.training.config import load_settings
from warpfold.training.planning import sizes_of_batch

LONG, SHORT = "MKTAYIAKQRQISFVKSHFSR", "GSHMLEERLG"
NO_MEMORY = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")


@pytest.fixture(scope="module")
def params(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("planning") / "params.safetensors"
    save_params(path, tiny_model())
    return path


@pytest.fixture
def fasta(tmp_path: Path) -> Path:
    (tmp_path / "q.fasta").write_text(f">long\n{LONG}\n>short\n{SHORT}\n")
    return tmp_path / "q.fasta"


@pytest.fixture
def formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the memory model: n MB for n residues, and with chunks 0.5 MB per residue plus 0.5 MB per chunk row.

    Offloading halves the memory.
    """

    def memory(job: Any, plan: Any, kind: str = "cpu") -> MemoryEstimate:
        n = job.sizes.residues
        peak = n * 10**6 * (1 if plan.chunk is None else 0.5 + 0.5 * plan.chunk / n) * (0.5 if plan.offload else 1)
        return MemoryEstimate(peak=int(peak), weights=0, features=0)

    monkeypatch.setattr(planner, "estimate_memory", memory)
    monkeypatch.setattr(planner, "upper_bound", lambda job, plan: memory(job, plan))
    nothing = MemoryEstimate(peak=0, weights=0, features=0)
    monkeypatch.setattr(planner, "lower_bound", lambda job, plan: nothing)
    monkeypatch.setattr(planner, "with_margin", lambda size, kind: size)
    monkeypatch.setattr(Machine, "rates", lambda *given: None)


class Failing:
    """Wrap `AlphaFold.fold` and raise `error` for plans with chunks of more than `fits` rows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fits: int, error: Exception = NO_MEMORY) -> None:
        self.fold, self.fits, self.error, self.tried = AlphaFold.fold, fits, error, list[int | None]()
        monkeypatch.setattr(AlphaFold, "fold", lambda model, *given: self(model, *given))

    def __call__(self, model: AlphaFold, *given: Any) -> Any:
        chunk = model.execution.plan.chunk  # type: ignore[attr-defined]
        self.tried.append(chunk)
        if (chunk or 1000) > self.fits:
            raise self.error
        return self.fold(model, *given)


@pytest.mark.parametrize("error", [NO_MEMORY, MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
def test_what_runs_out_of_memory_goes_on_with_a_tighter_plan(
    params: Path, formulas: None, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    predictor = Predictor(tiny_model())
    whole = predictor.fold(LONG)
    failing = Failing(monkeypatch, fits=4, error=error)
    prediction = predictor.fold(LONG)
    assert failing.tried == [None, 6, 4]
    assert prediction.details["plan"]["ran_out"] == ["whole", "slices of 6 rows, in place"]
    assert prediction.details["plan"]["chunk"] == 4
    assert abs(prediction.plddt - whole.plddt).max() < 1e-2
    failing.tried.clear()
    assert predictor.fold(LONG).details["plan"]["ran_out"] == []
    assert failing.tried == [4], "it was not remembered"
    failing.fits = 10**6
    assert predictor.fold(SHORT).details["plan"]["chunk"] is None, "a shorter protein has room"


def test_what_fails_at_the_tightest_leaves_the_others_be(
    params: Path, fasta: Path, tmp_path: Path, formulas: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(monkeypatch, fits=0)
    fold = failing.fold
    monkeypatch.setattr(
        AlphaFold,
        "fold",
        lambda model, batch, *rest: (failing if batch["aatype"].shape[-1] > 12 else fold)(model, batch, *rest),
    )
    summary = predict(fasta, params, tmp_path / "out", device="cpu", batch=1)
    assert [entry["name"] for entry in summary["predictions"]] == ["short"]
    (failure,) = summary["failures"]
    assert (failure["name"], "out of memory even with the tightest plan" in failure["error"]) == ("long", True)


def test_a_run_at_its_limit_makes_the_files_of_one_with_room(
    tmp_path: Path, params: Path, fasta: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files differ by rounding only.

    The limits are the smallest memory in which the longest protein fits, without offloading and with z in host memory.
    """
    monkeypatch.setattr(planner, "with_margin", lambda size, kind: size)
    monkeypatch.setattr(Machine, "rates", lambda *given: None)
    predictor = Predictor(tiny_model())
    prepared = predictor.prepare(Assembly("long", ("A",), (from_sequence(LONG, name="long"),)), recycles=1)
    job = Job(model=predictor.model.config, sizes=sizes_of_batch(prepared.batch), recycles=1, representations=True)
    machine = Machine(kind="cpu", free=10**12, loaded=True)
    needs: dict[bool, list[int]] = {False: [], True: []}
    for plan in planner.candidates(job, machine, {}):
        memory = planner.estimate(job, plan, machine, rounded=False)
        needs[plan.offload].append(planner.needed_bytes(memory, machine))
    found = []
    for memory in (None, min(needs[False]), min(needs[True])):
        out = tmp_path / str(memory)
        options = {"recycles": 1, "memory": memory, "batch": 1, "representations": True, "distogram": True}
        summary = predict(fasta, params, out, **options)
        (entry,) = (one for one in summary["predictions"] if one["name"] == "long")
        found.append((entry["plan"], numbers_in(out)))
    room, limit, tightest = (plan for plan, _ in found)
    assert (room["chunk"], room["in_place"]) == (None, False)
    assert (limit["in_place"], limit["offload"]) == (True, False)
    assert tightest["offload"]
    for _, numbers in found[1:]:
        assert numbers.keys() == found[0][1].keys()
        for name, expected in found[0][1].items():
            np.testing.assert_allclose(numbers[name], expected, rtol=2e-3, atol=2e-3, err_msg=name)


def numbers_in(out: Path) -> dict[str, Any]:
    """Read all numbers in the files of predictions."""
    found: dict[str, Any] = {}
    for path in sorted(path for path in out.rglob("*") if path.is_file() and path.parent != out):
        name = str(path.relative_to(out))
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                found |= {f"{name} {key}": arrays[key] for key in arrays.files if arrays[key].dtype.kind in "fiu"}
        elif path.suffix in (".png", ".svg"):
            # Figures show the numbers of the other files.
            continue
        elif path.suffix == ".npy":
            found[name] = np.load(path, allow_pickle=False)
        else:
            found[name] = np.array([float(x) for x in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", path.read_text())])
    return found


def test_other_errors_are_not_tried_again(params: Path, formulas: None, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing(monkeypatch, fits=0, error=RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        Predictor(tiny_model()).fold(LONG)
    assert len(failing.tried) == 1
    assert not is_out_of_memory(RuntimeError("a bug"))


def refused(command: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as end:
        main(command)
    return int(end.value.code or 0), capsys.readouterr().err


def test_what_fits_nowhere_is_refused_before_anything_is_computed(
    params: Path,
    fasta: Path,
    tmp_path: Path,
    formulas: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(AlphaFold, "fold", lambda *given: pytest.fail("it ran"))
    command = ["predict", str(fasta), "--params", str(params), "--out", str(tmp_path / "out"), "--device", "cpu"]
    code, said = refused([*command, "--memory", "2MB"], capsys)
    assert code == 2
    assert said.splitlines()[-1].startswith("error: folding 10 residues")
    assert "what would fit: " in said
    assert "residues" in said.partition("what would fit")[2]
    assert not (tmp_path / "out").exists()


def test_one_protein_of_many_that_is_too_long_is_its_own_failure(
    params: Path, fasta: Path, tmp_path: Path, formulas: None, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["predict", str(fasta), "--params", str(params), "--out", str(out), "--device", "cpu", "--batch", "1"]
    code, said = refused([*command, "--memory", "5MB"], capsys)
    summary = json.loads((out / "summary.json").read_text())
    assert code == 1
    assert [entry["name"] for entry in summary["predictions"]] == ["short"]
    assert "what would fit" in summary["failures"][0]["error"]
    assert "plan for 10 residues: slices of" in said


def test_plan_says_what_a_query_needs(
    params: Path, fasta: Path, tmp_path: Path, formulas: None, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"plan {fasta} --params {params} --memory 6MB --device H100 --devices 2 --json".split()
    with pytest.raises(SystemExit) as end:
        main(command)
    found = json.loads(capsys.readouterr().out)
    assert end.value.code == 1  # one protein does not fit
    assert ["refused" in row for row in found["targets"]] == [True, False]
    assert found["largest"]["name"] == "long"
    assert {"whole", "in slices", "in slices, z in host memory", "in slices, on 2 devices"} == set(
        found["largest"]["longest"]
    )
    assert found["largest"]["longest"]["whole"] < found["largest"]["longest"]["in slices"]
    assert all(one["lacks"] for one in found["largest"]["plans"])


# ---- the report of `plan`


def sizes_of(residues: int, sequences: int, extra: int, templates: int) -> ExampleSizes:
    return ExampleSizes(residues=residues, sequences=sequences, extra=extra, templates=templates)


def a_query(residues: int, rows: int, templates: int = 0, is_complex: bool = False, name: str = "q") -> Any:
    """Make what a plan reads of a query."""
    return SimpleNamespace(residues=residues, rows=rows, templates=templates, is_complex=is_complex, name=name)


def test_the_sizes_of_queries() -> None:
    model = tiny_config()
    bare = replace(model, templates=replace(model.templates, enabled=False))
    sample = SampleConfig(max_msa=8, max_extra=6, max_templates=2)
    for rows, sequences, extra in ((1, 1, 1), (5, 5, 1), (8, 8, 1), (10, 8, 2), (14, 8, 6), (99, 8, 6)):
        found = plan_report.sizes_of_query(a_query(7, rows, 3), model, sample, whole=False)
        assert found == sizes_of(7, sequences, extra, 2)
    assert plan_report.sizes_of_query(a_query(7, 1, 1), model, sample, whole=False).templates == 1
    assert plan_report.sizes_of_query(a_query(7, 1), model, sample, whole=True) == sizes_of(7, 8, 6, 2)
    assert plan_report.full_sizes(7, bare, sample) == sizes_of(7, 8, 6, 0)
    job = plan_report.folding(model, sizes_of(7, 1, 1, 0), None)
    assert (job.model, job.sizes, job.recycles) == (model, sizes_of(7, 1, 1, 0), 1)
    assert plan_report.folding(model, sizes_of(7, 1, 1, 0), 0).recycles == 0
    changed = plan_report.with_sizes(job, residues=9, extra=None, templates=0)
    assert (changed.sizes, changed.recycles, changed.model) == (sizes_of(9, 1, 1, 0), 1, model)


@pytest.mark.parametrize(("msas", "whole"), [([], [False, True, True]), ([Path("m")], [False, False, False])])
def test_queries_without_alignments_are_planned_with_the_deepest(
    monkeypatch: pytest.MonkeyPatch, msas: list[Path], whole: list[bool]
) -> None:
    read: list[Any] = []
    queries = [a_query(7, 5, name="deep"), a_query(7, 1, name="alone"), a_query(7, 5, is_complex=True, name="complex")]
    monkeypatch.setattr(plan_report, "read_queries", lambda *given: read.append(given) or queries)
    sample, model = SampleConfig(max_msa=8, max_extra=6, max_templates=2), tiny_config()
    for one in (model, as_multimer(model)):
        targets = plan_report.targets_of_queries("given", msas, one, sample, 3)  # type: ignore[arg-type]
        assert [target.name for target in targets] == ["deep", "alone", "complex"]
        assert [target.job.sizes == sizes_of(7, 8, 6, 2) for target in targets] == whole
        assert {target.job.recycles for target in targets} == {3}
    assert read == [("given", msas, False), ("given", msas, True)]


def test_the_shortest_query_must_fit() -> None:
    tried: list[Any] = []
    queries = [a_query(30, 1), a_query(9, 5), a_query(20, 1)]
    params: Any = SimpleNamespace(config=replace(tiny_config(), recycles=7), sample=SampleConfig(max_templates=0))
    for recycles in (None, 0):
        plan_report.check_fits(queries, params, recycles, lambda *given: tried.append(given))
    plan_report.check_fits([], params, None, lambda *given: pytest.fail("there is nothing to fit"))
    assert tried == [(sizes_of(9, 5, 1, 0), 7), (sizes_of(9, 5, 1, 0), 0)]


class NoRoomError(planner.NothingFitsError):
    """The error of a job for which no plan fits, with a short message."""

    def __init__(self) -> None:
        UserError.__init__(self, "too large")


@pytest.mark.parametrize("count", [3, 20, 21])
def test_the_largest_target_has_all_its_plans(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Up to twenty targets are estimated exactly. One that does not fit has no plan but a reason."""
    told: list[Any] = []
    machine = Machine(kind="cpu", free=10**9)
    targets = [plan_report.PlanTarget(f"t{i}", Job(model=tiny_config(), sizes=sizes_of(i, 1, 1, 0))) for i in (5, 9, 2)]
    targets += [plan_report.PlanTarget(f"more{i}", targets[0].job) for i in range(count - 3)]

    def report(*given: Any) -> dict[str, Any]:
        assert given[:7] == ("t9", targets[1].job, machine, {"axial": 1}, {"s": 1}, None, None)
        assert given[7] == 2.5
        given[8](1, 2, "measuring")
        plans = [{"chosen": False, "title": "slow"}, {"chosen": True, "title": "fast"}]
        return {"name": "t9", "said": "it fits", "plans": plans}

    def choose(job: Job, *given: Any, estimate_all: bool, tell: Any) -> Any:
        assert given == (machine, {"axial": 1}, {"s": 1}, None)
        assert estimate_all == (count <= 20)
        tell(1, 2, "estimating")
        if job.sizes.residues == 2:
            raise NoRoomError
        return SimpleNamespace(chosen="chosen plan")

    monkeypatch.setattr(plan_report, "job_report", report)
    monkeypatch.setattr(plan_report, "choose", choose)
    monkeypatch.setattr(plan_report, "choice_in_words", lambda choice: f"the {choice.chosen}")
    monkeypatch.setattr(plan_report, "plan_row", lambda chosen, choice, *given: {"title": chosen, "price": given[2]})
    found = plan_report.plan_report(
        targets, machine, {"axial": 1}, {"s": 1}, None, 2.5, lambda done, total, what: told.append((done, total, what))
    )
    assert found.keys() == {"machine", "free", "devices", "how", "targets", "largest"}
    assert (found["free"], found["devices"], found["machine"]) == (10**9, 1, str(machine))
    assert found["largest"]["plans"][0]["title"] == "slow"
    row = {"said": "the chosen plan", "title": "chosen plan", "price": None}
    assert found["targets"][:3] == [
        {"name": "t5", "residues": 5} | row,
        {"name": "t9", "residues": 9, "said": "it fits", "chosen": True, "title": "fast"},
        {"name": "t2", "residues": 2, "refused": "too large"},
    ]
    assert [target["name"] for target in found["targets"][3:]] == [f"more{i}" for i in range(count - 3)]
    assert told[:3] == [
        (0.5, count, "t5, estimating"), (1.5, count, "t9, measuring"), (2.5, count, "t2, estimating"),
    ]  # fmt: skip
    monkeypatch.setattr(plan_report, "job_report", lambda *_: {"refused": "no room", "plans": []})
    (alone,) = plan_report.plan_report(targets[:1], machine, {})["targets"]
    assert alone == {"name": "t5", "residues": 5, "refused": "no room"}


def test_keys_that_exclude_each_other_are_the_users_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(*_: Any, **__: Any) -> None:
        raise ValueError("axial: 3 does not divide 4 devices")

    monkeypatch.setattr(plan_report, "choose", choose)
    monkeypatch.setattr(plan_report, "job_report", lambda *_: {"plans": []})
    targets = [plan_report.PlanTarget("q", Job(model=tiny_config(), sizes=sizes_of(n, 1, 1, 0))) for n in (5, 9)]
    with pytest.raises(UserError, match="axial: 3 does not divide 4 devices"):
        plan_report.plan_report(targets, Machine(kind="cpu", free=10**9), {})


# ---- training


def given_settings(folder: Path, text: str, *changes: str) -> Any:
    (folder / "given.toml").write_text(f'base = "monomer"\n{text}')
    return load_settings(folder / "given.toml", changes)


def test_keys_of_a_preset_are_suggestions_and_those_of_the_user_stay(tmp_path: Path) -> None:
    chosen = planner.CHOSEN_IN_TRAINING
    assert load_settings("monomer").fixed(chosen) == {"precision": "bf16"}
    assert load_settings("monomer").config().plan.recompute == "block"
    assert load_settings("monomer", ["plan.recompute=none"]).fixed(chosen) == {"precision": "bf16", "recompute": None}
    assert given_settings(tmp_path, 'plan = "auto"').fixed(chosen) == {"precision": "bf16"}
    assert given_settings(tmp_path, '[plan]\nrecompute = "layer"').fixed(chosen)["recompute"] == "layer"
    assert not given_settings(tmp_path, "[plan]\nauto = false").auto
    assert given_settings(tmp_path, "", "plan=auto", "plan.axial=2").fixed(chosen)["axial"] == 2


def test_a_run_goes_on_with_the_plan_it_began_with(
    tmp_path: Path, formulas: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings.to_dict(tiny_run(steps=1, validation=0.0))
    del config["plan"]
    lines = settings.to_toml(tiny_run(steps=1, validation=0.0)).partition("[plan]")[0]
    (tmp_path / "tiny.toml").write_text(lines + "\n[train]\nsteps = 1\nvalidation = 0.0\n")
    given, free = load_settings(tmp_path / "tiny.toml"), {"free": 10**12}

    def machine(device: Any, loaded: bool = False, memory: int | None = None) -> Machine:
        return Machine(kind="cpu", free=free["free"])

    monkeypatch.setattr(planning, "this_machine", machine)
    first, said = planning.plan_training(given, tmp_path / "run", "cpu")
    assert (first.plan.recompute, said) == (None, "")  # no message for small runs
    monkeypatch.setattr(
        planner,
        "estimate_memory",
        lambda job, plan, kind: MemoryEstimate(peak=9 if plan.recompute else 10**6, weights=0, features=0),
    )
    monkeypatch.setattr(planner, "upper_bound", lambda job, plan: MemoryEstimate(peak=10**6, weights=0, features=0))
    free["free"] = 100
    tight, _ = planning.plan_training(given, tmp_path / "run", "cpu")
    assert tight.plan.recompute == "layer"
    (tmp_path / "run").mkdir()
    (tmp_path / "run/settings.toml").write_text(settings.to_toml(tight))
    free["free"] = 10**12
    again, said = planning.plan_training(given, tmp_path / "run", "cpu")
    assert (again, said) == (tight, f"layers recomputed, as in {tmp_path / 'run/settings.toml'}")
    other, _ = planning.plan_training(
        load_settings(tmp_path / "tiny.toml", ["plan.recompute=block"]), tmp_path / "run", "cpu"
    )
    assert other.plan.recompute == "block"


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> Rates:
    """Use the rates of an A100 and a constant memory estimate."""
    memory, found = MemoryEstimate(peak=10**6, weights=0, features=0), of_gpu("A100")
    monkeypatch.setattr(Machine, "rates", lambda *given: found)
    monkeypatch.setattr(planner, "estimate_memory", lambda *given: memory)
    return found


def on_ranks(folder: Path, changes: Sequence[str]) -> tuple[Plan, str]:
    """Plan a training run on all ranks, with one rank per node."""
    ranks = dist.get_world_size()
    cluster = Cluster(ranks=ranks, per_node=1, within=Link(1e-5, 1e11), between=Link(1e-4, 1e9))
    lines = settings.to_toml(tiny_run(steps=1, validation=0.0)).partition("[plan]")[0]
    (folder / f"{dist.get_rank()}.toml").write_text(lines + "\n[train]\nsteps = 1\nvalidation = 0.0\n")
    given = load_settings(folder / f"{dist.get_rank()}.toml", changes)
    team = Team(ProcessInfo(dist.get_rank(), ranks), make_mesh(data=ranks))
    config, said = planning.plan_training(given, folder / "run", "cpu", None, team, cluster)
    return config.plan, said


def test_ranks_get_the_plan_that_the_first_chooses(tmp_path: Path, rates: Rates) -> None:
    changes = ["optim.accumulate=4", "plan.sync.check_every=7", "plan.triangle=channels"]
    (plan, said), other = run_ranks(on_ranks, 2, tmp_path, changes)
    assert other == (plan, said)
    assert (plan.data, plan.axial, plan.sync.check_every, plan.triangle) == (2, 1, 7, "channels")
    assert said.startswith("data 2, everything kept")
    assert "2 nodes of 1" in said
    ((plan, said), (other, _)) = run_ranks(on_ranks, 2, tmp_path, ["optim.accumulate=1"])
    assert plan == other
    # Sharing the example between the ranks would take longer.
    assert (plan.data, plan.axial) == (1, 1)
    assert "everything kept, 1 of 2 devices idle" in said
    with pytest.raises(RankError, match="2 ranks cannot divide a step of 1"):
        run_ranks(on_ranks, 2, tmp_path, ["plan.axial=3", "optim.accumulate=1"])


def test_a_run_with_idle_devices_goes_on_with_its_plan(tmp_path: Path, rates: Rates) -> None:
    """The plan is used again with the same number of processes, and chosen again with another number."""
    (tmp_path / "run").mkdir()
    began = replace(tiny_run(steps=1, validation=0.0, idle=1), plan=Plan(recompute="block"))
    (tmp_path / "run/settings.toml").write_text(settings.to_toml(began))
    (plan, said), _ = run_ranks(on_ranks, 2, tmp_path, ["optim.accumulate=2"])
    assert (plan, "as in " in said) == (began.plan, True)
    (plan, said), *_ = run_ranks(on_ranks, 3, tmp_path, ["optim.accumulate=3"])
    assert (plan.data, "as in " in said) == (3, False)


def test_a_run_on_ranks_goes_on_with_its_plan(tmp_path: Path, rates: Rates) -> None:
    """The plan is used again even if the links have changed, but not if the user sets other keys of the plan."""
    (tmp_path / "run").mkdir()
    sync = SyncConfig(bucket=0.5, shard_state=True)
    began = replace(
        tiny_run(steps=1, validation=0.0), plan=Plan(axial=2, recompute="block", triangle="gather", sync=sync)
    )
    (tmp_path / "run/settings.toml").write_text(settings.to_toml(began))
    (plan, said), _ = run_ranks(on_ranks, 2, tmp_path, ["optim.accumulate=2"])
    assert plan == began.plan
    assert said == (
        'axial 2, blocks recomputed, products by "gather", sharded state, buckets of 0.5 MiB, as in '
        f"{tmp_path / 'run/settings.toml'}"
    )
    (plan, _), _ = run_ranks(on_ranks, 2, tmp_path, ["optim.accumulate=2", "plan.sync.check_every=3"])
    assert plan.sync == replace(sync, check_every=3)
    (plan, _), _ = run_ranks(on_ranks, 2, tmp_path, ["optim.accumulate=2", "plan.sync.bucket=2.0"])
    assert (plan.data, plan.sync.bucket) == (2, 2.0)


def test_a_cluster_of_other_ranks_is_refused(tmp_path: Path) -> None:
    cluster = Cluster(ranks=4, per_node=2, within=Link(1e-5, 1e11), between=Link(1e-5, 1e9))
    with pytest.raises(UserError, match="the cluster has 4 ranks, and 1 is training; measure it with as many"):
        planning.plan_training(load_settings("tiny"), tmp_path, "cpu", cluster=cluster)


# ---- free memory


def cgroup(folder: Path, lines: str, files: dict[str, str]) -> int:
    proc, groups = folder / "proc", folder / "groups"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n")
    (proc / "self/cgroup").write_text(lines)
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text)
    return host_memory(proc, groups)


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        ("", {}, 8_192_000_000),
        ("0::/\n", {"memory.max": "max\n", "memory.current": "5\n"}, 8_192_000_000),
        ("0::/a/b\n", {"a/memory.max": "5000", "a/memory.current": "2000",
                       "a/memory.stat": "anon 1\ninactive_file 300\n"}, 3300),
        ("0::/elsewhere\n", {"memory.max": "5000", "memory.current": "2000"}, 3000),
        ("4:memory:/x\n", {"memory/memory.limit_in_bytes": "7000", "memory/memory.usage_in_bytes": "1000",
                           "memory/memory.stat": "total_inactive_file 500\n"}, 6500),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": str(2**63),
                          "memory/memory.usage_in_bytes": "1"}, 8_192_000_000),
    ],
)  # fmt: skip
def test_the_limit_of_a_cgroup_counts(tmp_path: Path, lines: str, files: dict[str, str], expected: int) -> None:
    assert cgroup(tmp_path, lines, files) == expected


def test_what_is_like_the_last_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is chosen again if much less memory is free, or if the plan needs a large share of the free memory."""
    found, free, choose = list[int](), [10**9], planning.choose

    def counted(job: Job, machine: Machine, fixed: Any) -> Any:
        found.append(job.sizes.residues)
        return choose(job, machine, fixed)

    monkeypatch.setattr(planning, "choose", counted)
    monkeypatch.setattr(planning, "this_machine", lambda *_, **__: Machine(kind="cpu", free=free[0], host=10**12))
    predictor = Predictor(tiny_model(), "cpu")

    def plan(sequence: str) -> dict[str, Any]:
        assembly = Assembly("q", ("A",), (from_sequence(sequence, name="q"),))
        return dict(predictor.plan(predictor.prepare(assembly, recycles=0)).details)

    first, again, other = plan(LONG), plan(LONG[::-1]), plan(SHORT)
    assert (first, found) == (again, [21, 10])
    assert other != first
    free[0] = 95 * 10**7
    assert plan(SHORT)["free"] == 95 * 10**7
    assert found == [21, 10]
    free[0] = 10**9 // 2
    plan(SHORT)
    assert found == [21, 10, 10]
    free[0] = first["bytes"] * 3 // 2
    plan(LONG), plan(LONG)
    assert found[3:] == [21, 21]
