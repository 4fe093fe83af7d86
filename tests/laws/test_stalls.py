"""In a training step, the host waits for the device only once, when it reads the results at the end."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.helpers import as_multimer, tiny_config
from tests.ops.triton.model_launches import one_block
from tests.stalls import Stalls
from tests.training.runs import make_store, rows, tiny_run
from warpfold.cost.fake import fake_batch, fake_mesh
from warpfold.cost.recorder import Recorder
from warpfold.data.load.examples import Sample
from warpfold.device import Snapshot
from warpfold.engine.learn import Learner
from warpfold.engine.optim import OptimConfig, Optimizer
from warpfold.model.alphafold import AlphaFold
from warpfold.model.losses import LossConfig, ca_lddt, total_loss
from warpfold.parallel.compress import CompressionConfig, Method
from warpfold.parallel.exchange import SyncConfig
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import Plan
from warpfold.parallel.team import Team
from warpfold.scoring import metrics
from warpfold.training.train import train

SIZES = {"pass": 1, "res": 9, "seq": 4, "extra": 5, "tmpl": 2}
LOSSES = LossConfig(predicted_aligned_error=0.1, experimentally_resolved=0.01, violation=1.0, scale_by_length=True)
AT_THE_END = {  # of a step, for any number of examples
    # losses, terms, norms and lDDT of the examples, for the log
    "device.py: a copy to the host begins": 1,
}


def by_file(found: list[str]) -> dict[str, int]:
    """Count the findings, without their line numbers."""
    parts = (one.split(":", 2) for one in found)
    return dict(Counter(f"{file}:{what}" for file, _, what in parts))


PLANS = {
    "chunks, bf16, lamb": (Plan(chunk=5, precision="bf16"), OptimConfig(name="lamb")),
    "adam": (Plan(), OptimConfig(clip="step")),
    "recomputed, lars": (Plan(recompute="block"), OptimConfig(name="lars", clip="step")),
}


@pytest.mark.parametrize("name", PLANS)
def test_neither_examples_nor_an_update_wait_for_anything(name: str) -> None:
    plan, config = PLANS[name]
    model = AlphaFold(one_block(tiny_config())).train().to("meta")
    Execution(plan).bind(model)
    optimizer = Optimizer(model, config)
    batch = fake_batch(**SIZES)
    # Constant tables are copied to the device once.
    total_loss(model(batch, recycles=0), batch, LOSSES)
    with Stalls() as example:
        model.noise.seed(0, 1)
        output = model(batch, recycles=1)
        loss, _ = total_loss(output, batch, LOSSES, residues=model.residues)
        loss.backward()
        optimizer.collect(loss)
    with Stalls() as update:
        optimizer.step(0)
    assert example.found == []
    assert update.found == []


def compressed(method: Method, **more: float) -> OptimConfig:
    return OptimConfig(accumulate=8, compression=CompressionConfig(method=method, start=0, **more))  # type: ignore[arg-type]


RANKS = {  # whether passes are recorded as graphs; each rank has two examples, or one if accumulate=4
    "plain": (False, OptimConfig(accumulate=8), SyncConfig()),
    "an example each, sent early": (False, OptimConfig(accumulate=4), SyncConfig()),
    "recorded, sharded state, norms": (True, OptimConfig(accumulate=8, clip="step"), SyncConfig(shard_state=True)),
    "recorded, lamb, bf16 sums": (True, OptimConfig(accumulate=4, name="lamb"), SyncConfig(strategy="bf16")),
    "powersgd": (False, compressed("powersgd", rank=1), SyncConfig()),
    "topk": (False, compressed("topk"), SyncConfig()),
    "int8": (True, compressed("int8"), SyncConfig()),
    "1bit": (False, compressed("1bit"), SyncConfig()),
}


@pytest.mark.parametrize("name", RANKS)
def test_data_ranks_wait_for_nothing_of_each_others(name: str) -> None:
    """Only the device waits for the exchange, and not the host."""
    recorded, config, sync = RANKS[name]
    batch = fake_batch(**SIZES)
    with fake_mesh(data=4) as mesh:
        # The recorder makes the comparison at the start succeed.
        with Recorder():
            model = AlphaFold(one_block(tiny_config())).train().to("meta")
            Execution(Plan(data=4), mesh).bind(model)
            optimizer = Optimizer(model, config, mesh, sync, uses_graphs=recorded, skip_whole_steps=True)
        learner = Learner(model, optimizer, LOSSES, 0, Team(mesh=mesh))
        total_loss(model(batch, recycles=0), batch, LOSSES)
        with Stalls() as stalls:
            for index in range(optimizer.share):
                learner.learn([Sample(index, "", batch)], 1)
            learner.step(0)
    assert stalls.found == []


def test_examples_of_a_complex_wait_for_nothing_once_it_is_known_whose_truth_is_whose() -> None:
    """Test all losses of the fine-tuned multimer.

    `with_truth` does wait; it is called earlier, if a chain has copies.
    """
    model = AlphaFold(one_block(as_multimer(tiny_config()))).train().to("meta")
    batch = fake_batch(**SIZES, row=9)
    losses = replace(LOSSES, center_of_mass=1.0, every_clash=True, average_clashes=True, fape_softening=0.0)
    # Constant tables are copied to the device once.
    total_loss(model(batch, recycles=0), batch, losses)
    with Stalls() as example:
        model.noise.seed(0, 1)
        loss, _ = total_loss(model(batch, recycles=1), batch, losses, residues=model.residues)
        loss.backward()
    assert example.found == []


def test_a_step_of_training_waits_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the stalls of the loop itself, from one row of metrics.jsonl to the next."""
    config = tiny_run(steps=2, validation=0.0, save_every=9)
    # A thread writes checkpoints, which is not possible on "meta".
    monkeypatch.setattr("warpfold.training.train.save", lambda *_: None)
    seen: list[dict[str, int]] = []
    order: list[str] = []
    for where, what in ((Learner, "step"), (Snapshot, "wait")):
        function = getattr(where, what)
        monkeypatch.setattr(where, what, lambda *given, f=function, name=what: order.append(name) or f(*given))
    with Stalls() as stalls:

        def row(_: object) -> None:
            # Features from workers are copied from pinned memory on a separate stream; this run has no workers.
            seen.append(by_file([found for found in stalls.found if not found.startswith("batch.py")]))
            stalls.found.clear()

        train(config, make_store(tmp_path / "store"), tmp_path / "run", device="meta", watch=row)
    assert [row["kind"] for row in rows(tmp_path / "run")] == ["step"] * 2
    # Before the first row, constant tables are copied to the device.
    assert seen[1:] == [AT_THE_END]
    # The host waits only after the complete step was submitted.
    assert order == ["step", "wait"] * 2


def test_what_waits_is_seen() -> None:
    x = torch.ones(3, device="meta")
    with Stalls() as stalls:
        assert float(x[0]) == 1
        x.tolist()
        x.cpu()
        x.numpy(force=True)
        torch.tensor([1.0, 2.0], device="meta")
        x.new_tensor([1.0])
        torch.ones(3).to("meta")
        x[torch.tensor([0, 1])]
        # Numbers of the host do not wait.
        x + torch.ones(3, device="meta") * torch.ones(()) * 2
        x.sum().fill_(3)
    assert len(stalls.found) == 8


def test_lddt_on_the_device_is_the_metric() -> None:
    """With only one known Ca, or without neighbours, the result is NaN, as there is nothing to compare."""
    generator = torch.Generator().manual_seed(0)
    for n, known, scale in ((60, 0.8, 8.0), (5, 1.0, 1000.0), (4, 0.0, 1.0)):
        truth = torch.randn(n, 37, 3, generator=generator) * scale
        predicted = truth + torch.randn(n, 37, 3, generator=generator)
        mask = (torch.rand(n, 37, generator=generator) < known).float()
        batch = {"all_atom_positions": truth, "all_atom_mask": mask}
        output = SimpleNamespace(structure=SimpleNamespace(final_atom37=predicted))
        found = float(ca_lddt(output, batch))  # type: ignore[arg-type]
        right = metrics.lddt(predicted[:, [1]].numpy(), truth[:, [1]].numpy(), mask[:, [1]].numpy())
        assert found == pytest.approx(right, rel=1e-12, nan_ok=True)
        assert (n == 60) is not math.isnan(found)
