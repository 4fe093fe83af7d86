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
from warpfold.finetuning import choose
from warpfold.finetuning.choose import chosen_settings, first_settings, planned
from warpfold.finetuning.split import Split
from warpfold.model.alphafold import AlphaFold, HeadsConfig, ModelConfig
from warpfold.model.weights.files import data_settings, save_params
from warpfold.training.config import GivenSettings

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


def test_a_run_keeps_its_settings_with_half_the_learning_rate(tmp_path: Path) -> None:
    """The sampling is that of the parameters, and a model without templates takes none."""
    model, init = model_of("ptm"), tmp_path / "params.safetensors"
    save_params(init, model, data={"max_msa": 7, "max_extra": 9})
    run = {
        "loss": {"violation": 0.25},
        "data": {"crop": 99, "max_msa": 1},
        "optim": {"learning_rate": 4e-4, "accumulate": 3},
        "train": {"steps": 5},
        "plan": {"precision": "fp32"},
    }
    lines = [f"{name} = {settings.toml_value(values)}" for name, values in run.items()]
    (tmp_path / "settings.toml").write_text("\n".join(lines))
    expected = {
        "loss": {"violation": 0.25},
        "data": {"crop": 99, **data_settings(init), "max_templates": 0},
        "optim": {"learning_rate": 2e-4, "accumulate": 3},
        "model": settings.to_dict(model.config),
    }
    assert (expected["data"]["max_msa"], expected["data"]["max_extra"]) == (7, 9)
    assert first_settings(init) == expected
    (tmp_path / "settings.toml").write_text("loss = ")
    with pytest.raises(
        UserError, match=r"settings.toml: is damaged \(.*\); restore it, or move the parameters elsewhere$"
    ):
        first_settings(init)


def test_parameters_with_templates_take_the_plan_and_templates_of_their_preset(tmp_path: Path) -> None:
    init = tmp_path / "params.safetensors"
    save_params(init, filled_model(tiny_config()))
    chosen, preset = first_settings(init), settings.load("monomer_ptm")
    assert chosen["plan"] == {"precision": preset["plan"]["precision"]}
    assert chosen["data"] == {**preset["data"], **data_settings(init)}
    assert chosen["data"].get("max_templates") != 0


def split_of(examples: int) -> Split:
    """Build a split with this number of training examples."""
    return Split(by="cluster", training=tuple(f"t{i}" for i in range(examples)), validation=("v0", "v1"), test=("w0",))


@pytest.mark.parametrize(
    ("steps", "warmup", "constant", "decaying", "average", "every"),
    [
        (1, 1, 0, 1, 0.9, 1),
        (41, 2, 20, 21, 0.9, 4),
        (300, 15, 150, 150, 0.9333, 30),
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


def test_the_defaults_of_a_small_set() -> None:
    """Forty examples in 20 epochs are 800 steps of one example."""
    first = {"optim": {"learning_rate": 1e-3, "clip_norm": 0.1}, "loss": {"violation": 1.0}}
    optim = {
        "learning_rate": 1e-3,
        "accumulate": 1,
        "clip_norm": 0.1,
        "warmup_steps": 40,
        "decay": "linear",
        "decay_after_steps": 400,
        "decay_steps": 400,
        "decay_factor": 0.05,
        "average_decay": 0.975,
    }
    train = {
        "steps": 800,
        "order": "uniform",
        "validation": ["v0", "v1"],
        "test": ["w0"],
        "validation_examples": 24,
        "validate_every": 80,
        "related_identity": 0.0,
        "validation_share": 1.0,
        "save_every": 80,
        "patience": 4,
    }
    expected = {"optim": optim, "loss": {"violation": 1.0}, "train": train, "finetune": {"trainable": ["all"]}}
    assert chosen_settings(first, split_of(40), None, (), 0) == expected


@pytest.mark.parametrize(
    ("trainable", "adapters", "tuned"),
    [
        ((), 0, {"trainable": ["all"]}),
        ((), 8, {"trainable": [], "adapters": {"on": ["extra_stack.*", "evoformer.*"], "rank": 8}}),
        (("heads",), 4, {"trainable": ["heads"], "adapters": {"on": ["extra_stack.*", "evoformer.*"], "rank": 4}}),
        (("heads",), 0, {"trainable": ["heads"], "draws": 4, "trunk": "auto"}),
        (("heads", "structure"), 0, {"trainable": ["heads", "structure"], "draws": 4, "trunk": "auto"}),
        (("heads", "evoformer"), 0, {"trainable": ["heads", "evoformer"]}),
    ],
)
def test_what_is_trained(trainable: tuple[str, ...], adapters: int, tuned: dict[str, Any]) -> None:
    first = {"optim": {"learning_rate": 1e-3, "accumulate": 128}}
    assert chosen_settings(first, split_of(80), 10, trainable, adapters)["finetune"] == tuned


class Planner:
    """Stands for `plan_training`: only crops up to a limit fit."""

    def __init__(self, limit: int) -> None:
        self.limit, self.tried = limit, list[int]()

    def __call__(self, loaded: GivenSettings, *machine: Any) -> tuple[Any, str]:
        crop = loaded.values["data"].get("crop", 256)
        self.tried.append(crop)
        assert machine == (Path("out"), torch.device("cpu"), 9)
        if crop > self.limit:
            raise UserError(f"{crop} residues do not fit")
        return crop, "one device"


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    """Return the settings of a run whose crop is 384."""
    save_params(tmp_path / "params.safetensors", model_of("ptm"))
    return chosen_settings(first_settings(tmp_path / "params.safetensors"), split_of(80), 10, (), 0)


@pytest.mark.parametrize(
    ("first", "limit", "tried"),
    [
        (384, 384, [384]),
        (384, 320, [384, 320]),
        (384, 130, [384, 320, 256, 192, 128]),
        (200, 64, [200, 192, 128, 64]),
        (500, 400, [500, 384]),
        (64, 64, [64]),
    ],
)
def test_the_largest_crop_that_fits_is_used(
    first: int, limit: int, tried: list[int], values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = Planner(limit)
    monkeypatch.setattr(choose, "plan_training", planner)
    values["data"]["crop"] = first
    found = planned(values, [], Path("out"), torch.device("cpu"), 9)
    shorter = f"crops of {tried[-1]} residues, as {first} do not fit; " if len(tried) > 1 else ""
    assert (found, planner.tried) == ((tried[-1], f"{shorter}one device"), tried)
    assert values["data"]["crop"] == first


@pytest.mark.parametrize(
    ("crop", "changes", "tried", "error"),
    [
        (384, [], [384, 320, 256, 192, 128, 64], "384 residues do not fit"),
        (50, [], [50], "50 residues do not fit"),
        (384, ["data.crop=300", "train.steps=5"], [300], "300 residues do not fit"),
        (None, [], [256], "256 residues do not fit"),
        # No smaller crop repairs another setting, so the first attempt is the last.
        (384, ["optim.accumulate=0"], [384], "accumulate must be at least 1"),
    ],
)
def test_no_crop_fits(
    crop: int | None,
    changes: list[str],
    tried: list[int],
    error: str,
    values: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planner = Planner(0)
    monkeypatch.setattr(choose, "plan_training", planner)
    values["data"]["crop"] = crop
    if crop is None:
        del values["data"]["crop"]
    with pytest.raises(UserError, match=error):
        planned(values, changes, Path("out"), torch.device("cpu"), 9)
    assert planner.tried == tried


@pytest.mark.parametrize(("examples", "accumulate"), [(3, 1), (17, 2), (80, 10), (1000, 16)])
def test_the_learning_rate_follows_the_examples_of_a_step(examples: int, accumulate: int) -> None:
    first = {"optim": {"learning_rate": 1e-3, "accumulate": 128}}
    optim = chosen_settings(first, split_of(examples), 10, (), 0)["optim"]
    assert optim["accumulate"] == accumulate
    # The learning rate is rounded to two digits.
    assert optim["learning_rate"] == pytest.approx(1e-3 * (accumulate / 128) ** 0.5, rel=0.05)


@pytest.mark.parametrize(("examples", "steps"), [(10, 200), (10**6, 3000), (800, 1000), (801, 1002)])
def test_the_number_of_steps_follows_the_examples(examples: int, steps: int) -> None:
    first = {"optim": {"learning_rate": 1e-3, "accumulate": 128}}
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
