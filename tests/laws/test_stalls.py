"""Nothing in a training step makes the host wait for the device."""

from collections import Counter

import pytest
import torch

from tests.helpers import tiny_config
from tests.stalls import Stalls
from warpfold.batch import FEATURES, Batch
from warpfold.model.alphafold import AlphaFold
from warpfold.model.losses import LossConfig, total_loss
from warpfold.parallel.plan import Plan, apply
from warpfold.run.optim import OptimConfig, Optimizer

SIZES = {"pass": 2, "res": 9, "seq": 4, "extra": 5, "tmpl": 2}
LOSSES = LossConfig(predicted_aligned_error=0.1, experimentally_resolved=0.01, violation=1.0, scale_by_length=True)


def on_the_device() -> Batch:
    return {
        name: torch.empty([SIZES.get(a, a) for a in f.axes], dtype=getattr(torch, f.dtype), device="meta")
        for name, f in FEATURES.items()
    }


@pytest.mark.parametrize("plan", [Plan(), Plan(chunk=4, precision="bf16"), Plan(recompute=True)], ids=str)
@pytest.mark.parametrize("rule", ["adam", "lamb", "lars"])
def test_a_training_step_does_not_wait(plan: Plan, rule: str) -> None:
    model = AlphaFold(tiny_config()).train().to("meta")
    apply(plan, model)
    optimizer = Optimizer(model, OptimConfig(name=rule, accumulate=2))
    batch = on_the_device()
    for counted in (False, True):  # tables of constants go to the device once
        with Stalls() as stalls:
            for example in range(2):
                model.noise.seed(0, example)
                output = model(batch, recycles=1)
                loss, _ = total_loss(output, batch, LOSSES, residues=model.residues)
                loss.backward()
                optimizer.collect()
            optimizer.step(0)
        assert not counted or Counter(stalls.found) == {}
