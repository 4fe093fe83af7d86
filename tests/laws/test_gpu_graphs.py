"""On a GPU, a step that was captured as a CUDA graph equals the eager step, as does a step with offloading."""

import gc
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.helpers import as_multimer, filled_model, tiny_config
from tests.laws.test_graphs import CASES, LOSSES, WORK, sample
from tests.laws.test_plans import Work
from tests.training.runs import equal_tensors, make_store, rows, tiny_run
from warpfold.data.load.examples import Sample
from warpfold.device import Graphs, Named, Offload, outside_graph
from warpfold.engine.learn import Learner, in_batches
from warpfold.engine.optim import OptimConfig, Optimizer
from warpfold.errors import UserError
from warpfold.ops.attention import attention
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import Plan
from warpfold.parallel.team import Team
from warpfold.settings import to_toml

pytestmark = pytest.mark.gpu
# benchmarks/gpu_parts.py compiles the kernels of these sizes in advance.
SHAPES = (WORK, replace(WORK, residues=13, sequences=4, recycles=3))


def steps(plan: Plan, config: OptimConfig, count: int = 4, work: Work = WORK) -> tuple[list[Tensor], Graphs]:
    """Return the results of some steps, and the final weights."""
    settings = tiny_config(recycles=2)
    model = filled_model(as_multimer(settings) if work.chains else settings).train().cuda()
    execution = Execution(plan)
    execution.bind(model)
    one, said = Learner(model, Optimizer(model, config, batch=plan.batch), LOSSES, 5, Team()), []
    for step in range(count):
        recycles = (2, 0, 1, 2)[step]
        samples = [sample(step * config.accumulate + i, recycles, work) for i in range(config.accumulate)]
        there = [Sample(s.index, s.name, {k: x.cuda() for k, x in s.features.items()}) for s in samples]
        for batch in in_batches(there, plan.batch):
            said += [x for found in one.learn(batch, recycles) for x in (*found.losses.values(), found.norm)]
        said.append(one.step(step))
    return [*said, one.optimizer.weights], execution.graphs


@pytest.mark.parametrize("name", CASES)
def test_a_replayed_step_is_the_step(name: str) -> None:
    plan, config = CASES[name]
    expected, _ = steps(plan, config)
    found, graphs = steps(replace(plan, graph=True), config)
    assert graphs.recorded == 3
    assert not graphs.refused
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_each_replay_assigns_equal_chains_anew() -> None:
    work = Work(chains=(3, 2, 3), sequences=3, extra=2, templates=1, residues=8, recycles=2)
    expected, _ = steps(Plan(), OptimConfig(), work=work)
    found, graphs = steps(Plan(graph=True), OptimConfig(), work=work)
    assert graphs.recorded == 3
    assert not graphs.refused
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_recycles_0_to_3_on_two_shapes_record_each_pass_once() -> None:
    """The first call for a new shape or a new number of passes does not invalidate the earlier graphs."""

    def learned(graph: bool) -> tuple[list[Tensor], list[int], Graphs]:
        plan, rerecorded = Plan(graph=graph), list[int]()
        model = filled_model(tiny_config(recycles=3)).train().cuda()
        execution = Execution(plan)
        execution.bind(model)
        learner, results = Learner(model, Optimizer(model, OptimConfig()), LOSSES, 5, Team()), []
        for step in range(16):
            work, recycles = SHAPES[step % 2], (0, 3, 1, 2)[step // 2 % 4]
            features = {k: x.cuda() for k, x in sample(step, recycles, replace(work, recycles=3)).features.items()}
            (result,) = learner.learn([Sample(step, "", features)], recycles)
            results += [*result.losses.values(), result.norm, learner.step(step)]
            rerecorded.append(execution.graphs.rerecorded)
        return [*results, learner.optimizer.weights], rerecorded, execution.graphs

    expected, _, _ = learned(False)
    found, rerecorded, graphs = learned(True)
    # Two shapes, each with recycling passes and a last pass, and the update
    assert graphs.recorded == 5
    assert not graphs.refused
    assert rerecorded[-1] == rerecorded[7], f"recorded again after each step: {rerecorded}"
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


@pytest.mark.parametrize("plan", [Plan(axial=2), Plan(axial=2, recompute="block", precision="bf16")], ids=str)
def test_two_gpus_that_share_an_example_replay_their_messages(plan: Plan, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    store = make_store(tmp_path / "store")
    for way, graph in (("plain", False), ("graphs", True)):
        config = replace(tiny_run(steps=6, validation=0.0), plan=replace(plan, sizes=1, graph=graph))
        (tmp_path / f"{way}.toml").write_text(to_toml(config))
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "warpfold", "train",
                   f"{tmp_path / way}.toml", "--data", store.path, "--out", tmp_path / way]  # fmt: skip
        subprocess.run([sys.executable, *map(str, command)], check=True, timeout=300)
    one, other = ([row for row in rows(tmp_path / way) if row["kind"] == "step"] for way in ("graphs", "plain"))
    assert one == other
    assert equal_tensors(tmp_path / "graphs/params.safetensors", tmp_path / "plain/params.safetensors")


def test_another_shape_takes_its_memory_from_the_pool_that_is_there() -> None:
    def large(inputs: Mapping[str, Tensor]) -> Named:
        x = inputs["x"]
        for _ in range(4):
            x = (x + 1) * 2
        return {"sum": x.sum()}

    gc.collect()
    # Memory of earlier tests would otherwise be released during this test.
    torch.cuda.empty_cache()
    graphs = Graphs()
    for size, grows in ((2**26, True), (2**26 - 2**20, False), (2**25, False)):
        x = torch.ones(size, device="cuda")
        before = torch.cuda.memory_reserved()
        found = [graphs.call(large, {"x": x})["sum"] for _ in range(3)]
        assert torch.equal(found[0], found[2])
        assert (torch.cuda.memory_reserved() - before > x.nbytes) == grows
        del x
    assert graphs.recorded == 3


def test_a_first_call_with_misaligned_inputs_can_be_recorded() -> None:
    """Triton compiles other code for pointers not divisible by 16, and no code can be loaded during a recording."""

    masks: list[int] = []

    def attended(inputs: Mapping[str, Tensor]) -> Named:
        masks.append(inputs["mask"].data_ptr())
        return {"o": attention(**inputs)}

    rows, n, heads, width = 3, 101, 4, 32
    draw = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(rows, n, heads, width, generator=draw, device="cuda").bfloat16() for _ in range(3))
    mask = torch.ones(4 * rows * n, device="cuda")[rows * n :][: rows * n].view(rows, n)
    assert mask.data_ptr() % 16
    inputs = {"q": q, "k": k, "v": v, "mask": mask, "bias": torch.randn(heads, n, n, device="cuda").bfloat16()}
    graphs = Graphs()
    found = [graphs.call(attended, inputs)["o"] for _ in range(3)]
    assert (graphs.recorded, graphs.replayed) == (1, 2)
    assert len(masks) == 2
    assert masks[0] == masks[1]
    assert masks[0] % 16 == 0
    assert all(torch.equal(o, attended(inputs)["o"]) for o in found)


INVALIDATES = """
import torch
from warpfold.device import Graphs

def reads(inputs):
    return {"x": inputs["x"] * float(inputs["x"].sum())}

graphs = Graphs()
for _ in range(2):
    graphs.call(reads, {"x": torch.ones(2, device="cuda")})
"""


def test_what_invalidates_a_capture_is_reported() -> None:
    """The end of a capture raises a second error, which does not state the reason.

    In a separate process, as CUDA does not recover.
    """
    found = subprocess.run([sys.executable, "-c", INVALIDATES], capture_output=True, text=True, timeout=120)
    assert found.returncode == 1
    (last,) = (line for line in found.stderr.splitlines() if line.startswith("warpfold.errors.UserError"))
    assert "plan.graph: reads cannot be recorded" in last
    assert "not permitted when stream is capturing" in last
    assert "previous error" not in last


def test_a_tensor_that_a_recording_leaves_is_an_error() -> None:
    """Earlier graphs may write to the memory of the tensor, and only a replay of this graph sets its value."""
    tables: list[Tensor] = []
    calls = []

    def tabled_late(inputs: Mapping[str, Tensor]) -> Named:
        calls.append(inputs)
        if len(calls) == 2:
            tables.append(torch.ones(2**20, device="cuda"))
        return {"x": inputs["x"] + 1}

    graphs, x = Graphs(), torch.ones(2, device="cuda")
    graphs.call(tabled_late, {"x": x})
    with pytest.raises(UserError, match=r"tabled_late cannot be recorded .1 tensors .* are still in use"):
        graphs.call(tabled_late, {"x": x})


class Synchronizes:
    """Garbage whose deletion waits for the device, which invalidates a capture."""

    def __init__(self) -> None:
        self.cycle = self

    def __del__(self) -> None:
        torch.cuda.synchronize()


def test_no_garbage_is_collected_while_a_graph_is_captured() -> None:
    def littering(inputs: Mapping[str, Tensor]) -> Named:
        for _ in range(5):
            Synchronizes()
        return {"x": inputs["x"] + 1}

    graphs, before = Graphs(), gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        found = [graphs.call(littering, {"x": torch.full((2,), float(i), device="cuda")})["x"] for i in range(4)]
    finally:
        gc.set_threshold(*before)
    assert gc.isenabled()
    assert (graphs.recorded, graphs.replayed) == (1, 3)
    assert [x.tolist() for x in found] == [[i + 1.0] * 2 for i in range(4)]


def test_graphs_of_many_shapes_keep_no_results_of_their_own() -> None:
    def twice(inputs: Mapping[str, Tensor]) -> Named:
        return {"twice": inputs["x"] * 2}

    gc.collect()
    torch.cuda.empty_cache()
    graphs, sizes = Graphs(), [2**26 - 2**20 * i for i in range(6)]
    for size in sizes:
        x = torch.ones(size, device="cuda")
        found = [float(graphs.call(twice, {"x": x})["twice"].sum()) for _ in range(3)]
        assert found == [2 * size] * 3
        del x
    torch.cuda.empty_cache()
    # Inputs, results, the pool, and reserve
    assert torch.cuda.memory_reserved() < 5 * 4 * sizes[0]


def test_no_replay_writes_over_what_a_first_call_made() -> None:
    """If a first call uses the scratch memory of an earlier graph, that graph must not be replayed."""
    tables: dict[int, Tensor] = {}

    def scratch(inputs: Mapping[str, Tensor]) -> Named:
        x = inputs["x"]
        for _ in range(4):
            x = x * 2 + 1
        return {"last": x[:1].clone()}

    def tabled(inputs: Mapping[str, Tensor]) -> Named:
        size = len(inputs["x"])
        if size not in tables:
            tables[size] = torch.arange(size, device="cuda", dtype=torch.float32)
        return {"sum": inputs["x"] + tables[size]}

    graphs, found = Graphs(), []
    for size in (2**20, 2**20 - 2**10):
        x = torch.ones(size, device="cuda")
        for _ in range(3):
            last = graphs.call(scratch, {"x": x})["last"]
            found.append(graphs.call(tabled, {"x": x})["sum"])
            assert float(last) == 31
    for made in found:
        assert torch.equal(made, 1 + torch.arange(len(made), device="cuda"))
    assert all(torch.equal(table, torch.arange(size, device="cuda")) for size, table in tables.items())
    # The second table was created when both functions had a graph of the first size. Those graphs were deleted.
    assert graphs.rerecorded == 2


def test_what_the_host_does_between_is_done_in_each_replay_and_sees_what_was_computed() -> None:
    """Data ranks start to send buckets in this way during a backward pass."""
    weights = [torch.full((4,), float(i + 1), device="cuda", requires_grad=True) for i in range(3)]
    seen: list[Tensor] = []
    for w in weights:
        w.grad = torch.zeros_like(w)
        w.register_post_accumulate_grad_hook(lambda w: outside_graph(lambda: seen.append(w.grad.clone())))

    def backward(inputs: Mapping[str, Tensor]) -> Named:
        for w in weights:
            assert w.grad is not None
            w.grad.zero_()
        x = inputs["x"]
        for w in weights:
            x = x * w
        x.sum().backward()
        return {"loss": x.detach().sum()}

    graphs = Graphs()
    for turn in range(4):
        seen.clear()
        loss = graphs.call(backward, {"x": torch.full((4,), turn + 1.0, device="cuda")})["loss"]
        assert float(loss) == 4 * 6 * (turn + 1)
        assert [float(g[0]) for g in seen] == [(turn + 1) * 6 / (i + 1) for i in (2, 1, 0)]
    assert (graphs.recorded, graphs.replayed) == (1, 3)


def test_what_was_offloaded_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = steps(Plan(), OptimConfig(), 2)
    monkeypatch.setattr(Offload, "MIN_BYTES", 1)
    found, _ = steps(Plan(offload=True), OptimConfig(), 2)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_offloading_keeps_less_on_the_device() -> None:
    def peak(offload: Offload | None) -> int:
        torch.cuda.reset_peak_memory_stats()
        x = torch.ones(2**22, device="cuda", requires_grad=True)
        with offload.saving() if offload else torch.enable_grad():
            y = x
            for _ in range(16):
                y = y.sin()
        kept = torch.cuda.memory_allocated()
        y.sum().backward()
        assert x.grad is not None
        return kept

    kept = peak(None)
    assert peak(Offload()) < kept / 2
