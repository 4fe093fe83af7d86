"""The bench of a block and of a training step: implementations (another package as a stub), counts, rows and files."""

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers import tiny_config
from tests.ops.triton.model_launches import one_block
from tests.recorder import OperationRecorder
from tests.test_cli import run
from warpfold import device
from warpfold.bench import model as bench_model
from warpfold.bench.model import COLUMNS, OPENFOLD, PASSES, WAYS, bench_block, bench_step, block_flops, step_counts
from warpfold.bench.ops import table
from warpfold.cost.example import BlockSizes, ExampleSizes, ModelBench, RandomBlock
from warpfold.engine.optim import OptimConfig
from warpfold.model.alphafold import ModelConfig
from warpfold.model.evoformer import Evoformer, EvoformerConfig
from warpfold.model.losses import LossConfig
from warpfold.parallel.plan import Plan

CPU = torch.device("cpu")
SIZES = ExampleSizes(residues=9, sequences=5, extra=6, templates=2)
LOSSES = LossConfig(predicted_aligned_error=0.1, experimentally_resolved=0.01, violation=1.0)


def toy(model: ModelConfig | None = None, plan: Plan | None = None) -> ModelBench:
    config = one_block(model or tiny_config())
    return ModelBench(model=config, loss=LOSSES, optim=OptimConfig(), plan=plan or Plan(), sizes=SIZES)


# ---- the subjects


def test_a_step_that_is_timed_as_a_graph_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The training code records each pass once and replays it later, or the row explains why it does not."""
    monkeypatch.setattr(device, "find_recorder", lambda _: OperationRecorder())
    monkeypatch.setattr(bench_model, "find_recorder", lambda _: OperationRecorder())
    plain, graph = bench_step(replace(toy(), recycles=2), CPU, ways=["ours", "graph"], repeats=2)["rows"]
    assert (plain["replayed"], plain["note"], graph["note"]) == (0, "", "")
    # There are five steps: two warm-up runs, two timed steps, and one for the memory. A step has four calls: two passes
    # without gradients, the last pass and the update. The first call of each of the three kinds is not a replay.
    assert graph["replayed"] == 5 * 4 - 3
    assert "graphs" in graph["plan"]
    assert "graphs" not in plain["plan"]
    monkeypatch.setattr(device, "find_recorder", lambda _: None)
    (graph,) = bench_step(toy(), CPU, ways=["graph"], repeats=1)["rows"]
    assert "graph of differentiate_and_add: a cpu has no graphs" in graph["note"]


def test_the_products_of_a_block_are_counted_as_torch_counts_them() -> None:
    """The products of a block equal those of torch's counter, on "meta" and on a CPU.

    The backward pass has twice the products of the forward pass, which has one more product for the number of pairs in
    the outer product, without a gradient.
    """
    sizes = BlockSizes.of(tiny_config(), SIZES)
    found = block_flops(sizes)
    block = RandomBlock(sizes, Plan(kernels="definition"), CPU)
    wanted = block.wanted
    with FlopCounterMode(display=False) as counted:
        out = block.forward()
    assert found["forward"] == counted.get_total_flops() > 0
    with FlopCounterMode(display=False) as counted:
        torch.autograd.grad(out, wanted, block.grads)
    assert found["backward"] == counted.get_total_flops()
    assert 0.99 * 2 * found["forward"] < found["backward"] <= 2 * found["forward"]


def test_the_products_of_alphafold2s_block() -> None:
    """A block needs 216 GFLOP forward, and 2 x 216 backward, at 128 sequences and 256 residues, as computed by hand."""
    found = block_flops(BlockSizes.of(ModelConfig(), ExampleSizes(residues=256, sequences=128, extra=1, templates=0)))
    assert found["forward"] / 1e9 == pytest.approx(216, rel=0.02)
    assert found["both"] == found["forward"] + found["backward"]


def test_recomputed_products_count_once_and_their_launches_twice() -> None:
    plain, launched = step_counts(toy())
    again, more = step_counts(toy(plan=Plan(recompute="block")))
    assert again == plain > 0
    assert all(more[way] > launched[way] for way in launched)
    assert launched["ours"] < launched["definition"]


# ---- rows


def test_a_row_for_each_way_and_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, object]] = []
    found = bench_block(toy(), CPU, ways=["definition", "openfold", "ours"], repeats=2, sink=seen.append)
    assert seen == found["rows"]
    assert [(row["way"], row.get("pass")) for row in seen] == [
        *[("definition", which) for which in PASSES],
        ("openfold", None),
        *[("ours", which) for which in PASSES],
    ]
    assert seen[4]["note"] == "not installed"
    for row in (row for row in seen if "ms" in row):
        plain = next(r for r in seen if (r["way"], r.get("pass")) == ("definition", row["pass"]))
        assert row["times_definition"] == pytest.approx(plain["ms"] / row["ms"])  # type: ignore[operator]
        assert row["launches"] > 20  # type: ignore[operator]
        # A CPU has no queue.
        assert row["host_ms"] is None
    assert [row["wall_ms"] is None for row in seen[:4]] == [False, True, True, False]
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert len(table(found["rows"], COLUMNS)[1]) == 9


def test_a_way_that_fails_says_why_and_the_others_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(sizes: BlockSizes, precision: object, device: object) -> object:
        subject = WAYS[0].block(sizes, "fp32", CPU)

        def forward() -> Tensor:
            raise RuntimeError("no such kernel")

        return replace(subject, name="openfold", forward=forward)

    ways = [replace(w, make=fails, unsupported_reason=lambda d: None) if w.name == "openfold" else w for w in WAYS]
    monkeypatch.setattr("warpfold.bench.model.WAYS", ways)
    rows = bench_block(toy(), CPU, ways=["openfold", "ours"], repeats=1)["rows"]
    assert rows[0]["note"] == "failed: RuntimeError: no such kernel"
    assert rows[1]["ms"] > 0
    # The definition was not requested.
    assert rows[1]["times_definition"] is None


def test_steps_take_turns_and_compiling_must_be_asked_for() -> None:
    found = bench_step(toy(), CPU, repeats=2)
    assert [row["way"] for row in found["rows"]] == [way.name for way in WAYS if "step" in way.of]
    plain, compiled, ours, graph, *kept = found["rows"]
    assert graph["note"] == "a cpu has no graphs"
    assert all(row["note"].startswith("left out") for row in (compiled, kept[0]))
    assert plain["times_definition"] == 1.0
    assert ours["times_definition"] == pytest.approx(plain["ms"] / ours["ms"])
    assert ours["peak_mib"] > 0
    assert "1 blocks, recycles 0, fp32" in found["what"]


class StandIn(nn.Module):
    """OpenFold's block with its published signature, computed by our layer."""

    def __init__(
        self, c_m: int, c_z: int, c_hidden_msa_att: int, c_hidden_opm: int, no_heads_msa: int, inf: float
    ) -> None:
        super().__init__()
        assert (c_hidden_msa_att * no_heads_msa, inf) == (c_m, 1e9)
        self.inner = Evoformer(c_m, c_z, EvoformerConfig(blocks=1, heads=no_heads_msa, c_outer=c_hidden_opm))

    def forward(self, m: Tensor, z: Tensor, msa_mask: Tensor, pair_mask: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(m, z, msa_mask, pair_mask)


def test_openfolds_block_is_given_what_its_release_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("openfold", "openfold.model", OPENFOLD):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[OPENFOLD].EvoformerBlock = StandIn  # type: ignore[attr-defined]
    way = next(way for way in WAYS if way.name == "openfold")
    for precision in ("fp32", "bf16"):
        subject = way.block(BlockSizes.of(tiny_config(c_m=16), SIZES), precision, CPU)  # type: ignore[arg-type]
        out = subject.forward()
        assert len(torch.autograd.grad(out, subject.wanted, subject.grad, allow_unused=True)) == len(subject.wanted)


# ---- the command


def test_the_command_writes_rows_and_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = {"--rows": tmp_path / "rows.jsonl", "--csv": tmp_path / "block.csv"}
    size = ["--residues", 8, "--sequences", 3, "--extra", 3, "--blocks", 1]
    common = ["bench", "--block", "--settings", "tiny", "--device", "cpu", *size, "--ways", "definition,ours"]
    code, out, _ = run(capsys, *common, "--repeats", 1, *[part for pair in files.items() for part in pair])
    assert code == 0
    assert "3 sequences, 8 residues" in out
    rows = [json.loads(line) for line in files["--rows"].read_text().splitlines()]
    written = list(csv.DictReader(files["--csv"].read_text().splitlines()))
    assert [row["way"] for row in rows] == [row["way"] for row in written] == ["definition"] * 4 + ["ours"] * 4
