"""Test that fine-tuning starts with losses for every trained head, for monomer, pTM and multimer parameters."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import warpfold
from tests.helpers import as_multimer, filled_model, tiny_config
from tests.training.runs import make_store
from warpfold import settings
from warpfold.data.synthetic.folder import generate
from warpfold.errors import UserError
from warpfold.finetuning.choose import EPOCHS, MAX_STEPS, MIN_STEPS, chosen_settings, first_settings
from warpfold.finetuning.split import Split
from warpfold.model.alphafold import AlphaFold, HeadsConfig, ModelConfig
from warpfold.model.weights.files import save_params

SMALL = [
    "data.max_msa=2",
    "data.max_extra=4",
    "data.max_templates=0",
    "data.crop=24",
    "optim.accumulate=1",
    "optim.learning_rate=1e-3",
    # With clipping and averaging, rounding may cancel the update of a small gradient.
    "optim.clip_norm=1e9",
    "optim.average_decay=0.0",
    "plan.precision=fp32",
    "train.workers=0",
]
# With this seed, the first step recycles once, so that the loss reaches the recycling embedder.
SEED = 3
KINDS = {"monomer": False, "ptm": True, "multimer": True}


def model_of(kind: str) -> AlphaFold:
    """Build a tiny model: a monomer without the PAE head, a monomer with it, or a multimer."""
    config: ModelConfig = tiny_config(recycles=1, extra_blocks=2, heads=HeadsConfig(plddt_c=8, pae=KINDS[kind]))
    config = dataclasses.replace(config, templates=dataclasses.replace(config.templates, enabled=False))
    return filled_model(as_multimer(config) if kind == "multimer" else config)


@pytest.fixture(scope="module")
def proteins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first") / "proteins"
    generate(folder, 12, 7, dimers=14, min_length=20, max_length=30)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_take_the_losses_crop_and_rows_of_their_kind(kind: str, tmp_path: Path) -> None:
    save_params(tmp_path / "params.safetensors", model_of(kind))
    chosen = first_settings(tmp_path / "params.safetensors")
    preset = {"monomer": "finetune", "ptm": "monomer_ptm", "multimer": "multimer_finetune"}[kind]
    expected = settings.load(preset)
    assert chosen["loss"] == expected["loss"]
    assert chosen["loss"]["predicted_aligned_error"] == (0.1 if KINDS[kind] else 0.0)
    assert chosen["data"]["crop"] == (640 if kind == "multimer" else 384)
    assert chosen["optim"] == expected["optim"]


def split_of(examples: int) -> Split:
    """Build a split with this number of training examples."""
    return Split(by="cluster", training=tuple(f"t{i}" for i in range(examples)), validation=("v0", "v1"), test=("w0",))


@pytest.mark.parametrize(
    ("steps", "warmup", "constant", "decaying", "average", "every"),
    [
        (1, 1, 0, 1, 0.9, 1),
        (41, 2, 20, 21, 0.9, 4),
        (400, 20, 200, 200, 0.95, 40),
        (100_000, 5000, 50_000, 50_000, 0.999, 10_000),
    ],
)
def test_the_schedule_follows_the_number_of_steps(
    steps: int, warmup: int, constant: int, decaying: int, average: float, every: int
) -> None:
    first = {"optim": {"learning_rate": 1e-3, "accumulate": 128}}
    chosen = chosen_settings(first, split_of(80), steps, (), 0)
    optim, train = chosen["optim"], chosen["train"]
    assert (optim["warmup_steps"], optim["decay_after_steps"], optim["decay_steps"]) == (warmup, constant, decaying)
    assert optim["average_decay"] == average
    assert (train["steps"], train["validate_every"], train["save_every"]) == (steps, every, every)
    assert (train["validation"], train["test"]) == (["v0", "v1"], ["w0"])
    assert (train["validation_examples"], train["validation_share"], train["patience"]) == (24, 1.0, 4)


@pytest.mark.parametrize(("examples", "accumulate"), [(3, 1), (17, 2), (80, 10), (1000, 16)])
def test_the_learning_rate_follows_the_examples_of_a_step(examples: int, accumulate: int) -> None:
    first = {"optim": {"learning_rate": 1e-3, "accumulate": 128}}
    optim = chosen_settings(first, split_of(examples), 10, (), 0)["optim"]
    assert optim["accumulate"] == accumulate
    # The learning rate is rounded to two digits.
    assert optim["learning_rate"] == pytest.approx(1e-3 * (accumulate / 128) ** 0.5, rel=0.05)


@pytest.mark.parametrize(("examples", "steps"), [(10, MIN_STEPS), (10**6, MAX_STEPS), (800, EPOCHS * 800 // 16)])
def test_the_number_of_steps_follows_the_examples(examples: int, steps: int) -> None:
    first = {"optim": {"learning_rate": 1e-3, "accumulate": 128}}
    assert MIN_STEPS <= steps <= MAX_STEPS
    assert chosen_settings(first, split_of(examples), None, (), 0)["train"]["steps"] == steps


def test_multimers_of_versions_1_and_2_keep_their_crop(tmp_path: Path) -> None:
    save_params(tmp_path / "params.safetensors", filled_model(as_multimer(tiny_config(), fused=False)))
    assert first_settings(tmp_path / "params.safetensors")["data"]["crop"] == 384


@pytest.mark.parametrize("kind", KINDS)
def test_one_step_changes_every_parameter_that_the_loss_reaches(kind: str, proteins: Path, tmp_path: Path) -> None:
    """Compare the parameters before and after a fine-tuning run of one step."""
    init = tmp_path / "params.safetensors"
    save_params(init, model_of(kind))
    given: dict[str, Any] = {"structures": proteins / "mmcif", "msas": proteins / "msas", "init": init}
    warpfold.finetune(out=tmp_path / "tuned", device="cpu", trainable="all", steps=1, seed=SEED, set=SMALL, **given)
    before, after = load_file(init), load_file(tmp_path / "tuned/run/params.safetensors")
    assert before.keys() == after.keys()
    unchanged = {name for name, x in before.items() if torch.equal(x, after[name])}
    # These biases add a constant to all logits of a query, which softmax ignores, so their gradient is zero.
    beyond = {name for name in before if name.endswith(("msa.row.norm_z.bias", "attention_2d.bias"))}
    if kind == "multimer":
        # The outer product comes first, so nothing reads the extra alignment after the last block.
        beyond |= {name for name in before if name.startswith("extra_stack.blocks.1.msa.")}
    assert unchanged <= beyond


def test_a_pae_head_without_a_loss_is_refused_before_the_run(tmp_path: Path) -> None:
    """The command is `train finetune --init params_model_1_ptm.npz --set model.heads.pae=true`."""
    model = model_of("ptm")
    save_params(tmp_path / "params.safetensors", model)
    values = settings.merge(settings.load("finetune"), {"model": settings.to_dict(model.config), "plan": {"data": 1}})
    assert values["model"]["heads"]["pae"]
    given: dict[str, Any] = {"init": tmp_path / "params.safetensors", "device": "cpu"}
    store, small = make_store(tmp_path / "store"), [*SMALL, "train.steps=1", "train.validation=0.0"]
    with pytest.raises(UserError, match=r"loss.predicted_aligned_error: is 0.*loss.predicted_aligned_error=0.1"):
        warpfold.train(values, store, tmp_path / "run", set=small, **given)
    assert not (tmp_path / "run").exists()
    cured = [*small, "loss.predicted_aligned_error=0.1"]
    assert warpfold.train(values, store, tmp_path / "run", set=cured, **given).finished
