"""In fp64, padding does not change results, and a batch gives the results of its separate examples."""

import pytest
import torch
from torch import Tensor

from tests.laws.test_plans import LIMIT, Work, example, model_for
from warpfold.batch import Batch, stack
from warpfold.data.features.choose import SampleConfig
from warpfold.data.features.make import pad_features, padded_shape
from warpfold.data.load.examples import Sample
from warpfold.engine.learn import Learner, in_batches
from warpfold.engine.optim import OptimConfig, Optimizer
from warpfold.errors import UserError
from warpfold.model.alphafold import AlphaFold
from warpfold.model.losses import LossConfig
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import Plan
from warpfold.parallel.team import Team
from warpfold.training.config import RunConfig

LOSSES = LossConfig(violation=1.0, experimentally_resolved=0.01, predicted_aligned_error=0.1, scale_by_length=True)
WORK = Work(residues=7, sequences=3, extra=4, templates=1, recycles=1)
OTHER = Work(residues=9, sequences=4, extra=2, templates=2, recycles=1)
SAMPLES = SampleConfig(crop=11, max_msa=5, max_extra=6, max_templates=3)


def whole(work: Work, index: int) -> Batch:
    """Return an example without masked residues, as the features are made. A masked residue would react to padding."""
    features = example(work, index)
    return features | {"seq_mask": torch.ones_like(features["seq_mask"])}


def padded(batch: Batch, count: int, multiple: int = 1) -> Batch:
    arrays = {name: x.numpy() for name, x in batch.items()}
    found = pad_features(arrays, padded_shape(arrays, multiple, SAMPLES, count))
    return {name: torch.from_numpy(x) for name, x in found.items()}


def trained(model: AlphaFold, batch: int, examples: list[Batch], chunk: int | None = None) -> list[Tensor]:
    """Return the gradient of the sum of the losses, and the results of each example."""
    Execution(Plan(precision="fp64", chunk=chunk)).bind(model).train()
    config = OptimConfig(accumulate=len(examples), clip="step")
    learner = Learner(model, Optimizer(model, config, batch=batch), LOSSES, 1, Team())
    told: list[Tensor] = []
    for some in in_batches([Sample(i, "", features) for i, features in enumerate(examples)], batch):
        found = learner.learn(some, 1)
        told += [torch.stack([*one.losses.values(), one.lddt_ca, one.length.double()]) for one in found]
    return [learner.optimizer.total.clone(), *told]


def assert_agree(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).norm()) <= LIMIT * float(other.norm())


COMPLEX = Work(chains=(3, 2, 3), residues=8, sequences=3, extra=2, templates=1, recycles=1)


@pytest.mark.parametrize(
    ("work", "count", "multiple"),
    [(WORK, 1, 1), (WORK, 4, 1), (COMPLEX, 1, 1), (WORK, 0, 16), (WORK, 2, 16), (COMPLEX, 0, 16)],
    ids=str,
)
def test_padding_changes_nothing(work: Work, count: int, multiple: int) -> None:
    """Padding changes neither losses nor gradients, with dropout."""
    model, features = model_for(work), whole(work, 0)
    more = padded(features, count, multiple)
    assert more["aatype"].shape > features["aatype"].shape
    assert_agree(trained(model, 1, [more]), trained(model, 1, [features]))


@pytest.mark.parametrize("chunk", [None, 3])
def test_a_batch_is_its_examples_one_after_another(chunk: int | None) -> None:
    """The examples have different sizes, and each has the dropout of its own number."""
    model, examples = model_for(WORK), [whole(work, i) for i, work in enumerate((WORK, OTHER, WORK, WORK))]
    assert_agree(trained(model, 2, examples, chunk), trained(model, 1, examples))


@pytest.mark.parametrize("batch", [1, 2])
def test_dropout_is_drawn_anew_for_each_example(batch: int) -> None:
    """Dropout depends on the number of the example in the run, and not on its content."""
    model, same = model_for(WORK), whole(WORK, 0)
    _, one, other = trained(model, batch, [same, same])
    assert not torch.allclose(one, other)
    _, again, _ = trained(model, 1, [same, same])
    assert_agree([one], [again])


def test_a_batch_is_padded_to_its_largest() -> None:
    batch = stack([whole(WORK, 0), whole(OTHER, 1)])
    assert batch["msa_feat"].shape == (2, 2, 4, 9, 49)
    assert batch["extra_msa_mask"].shape == (2, 2, 4, 9)
    assert not batch["seq_mask"][0, 7:].any()
    assert batch["resolution"].shape == (2,)


def test_what_a_batch_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r'optim.clip = "example" needs the norm of each\. Set optim.clip = "step"'):
        RunConfig(plan=Plan(batch=2, sizes=1), optim=OptimConfig(accumulate=2))
    with pytest.raises(UserError, match=r"plan.batch = 3 does not divide the examples of a step"):
        Optimizer(model_for(WORK), OptimConfig(accumulate=4, clip="step"), batch=3)
