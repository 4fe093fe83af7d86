"""Training with several examples in one pass, padded to few sizes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.training.runs import make_store, rows, tiny_run
from warpfold.data.store.store import Store
from warpfold.engine import learn as learning
from warpfold.engine.optim import OptimConfig
from warpfold.errors import UserError
from warpfold.parallel.plan import Plan
from warpfold.training.config import RunConfig
from warpfold.training.train import train

ALONE = replace(
    tiny_run(steps=2, validation=0.0, save_every=9),
    optim=OptimConfig(accumulate=4, clip="step", warmup_steps=2),
    plan=Plan(kernels="definition"),
)
TOGETHER = replace(ALONE, plan=replace(ALONE.plan, batch=2, sizes=2))
# The crop is 8 residues long and the proteins 10 and more, so lengths are those of the crop.


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_store(tmp_path_factory.mktemp("batches") / "store")


def steps(config: RunConfig, store: Store, out: Path) -> list[dict[str, Any]]:
    train(config, store, out)
    return [row for row in rows(out) if row["kind"] == "step"]


def test_a_run_in_batches_is_the_run(store: Store, tmp_path: Path) -> None:
    alone, together = steps(ALONE, store, tmp_path / "alone"), steps(TOGETHER, store, tmp_path / "together")
    for one, other in zip(alone, together, strict=True):
        for same in ("examples", "lengths", "recycles", "learning_rate", "skipped"):
            assert one[same] == other[same]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert one["lddt_ca"] == pytest.approx(other["lddt_ca"], rel=1e-3)
    assert together[0]["grad_norm"] > alone[0]["grad_norm"]  # of sums of two


def test_lengths_are_those_of_the_proteins_and_not_of_the_padding(store: Store, tmp_path: Path) -> None:
    config = replace(TOGETHER, data=replace(TOGETHER.data, crop=40), plan=replace(TOGETHER.plan, sizes=1))
    (row,) = steps(replace(config, train=replace(config.train, steps=1)), store, tmp_path / "run")
    assert row["lengths"] == [10 + int(name.removeprefix("helix")) for name in row["examples"]]


def test_where_a_batch_is_not_finite_all_of_it_is_named(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = learning.total_loss, []

    def poisoned(*args: Any, **more: Any) -> Any:
        calls.append(None)
        loss, terms = original(*args, **more)
        return (loss * float("nan") if len(calls) == 4 else loss), terms

    monkeypatch.setattr(learning, "total_loss", poisoned)
    with pytest.raises(UserError, match=r"gradient of helix\d and helix\d is not finite") as error:
        train(TOGETHER, store, tmp_path / "run")
    assert f"{tmp_path / 'run/failures'}/example-00000002" in str(error.value)


def test_a_batch_needs_one_clipping_for_the_step(store: Store) -> None:
    with pytest.raises(ValueError, match=r'plan.batch = 2: .* set optim.clip = "step"'):
        replace(TOGETHER, optim=OptimConfig(accumulate=4))
