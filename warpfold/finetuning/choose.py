"""Choose the settings of a fine-tuning from the parameters to start from and the number of examples."""

import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from warpfold import settings
from warpfold.errors import UserError
from warpfold.finetuning.split import Split
from warpfold.model.weights.files import data_settings, load_config
from warpfold.training.config import RunConfig, load_settings
from warpfold.training.planning import plan_training

# Epochs over the training set, unless validation stops the run earlier.
EPOCHS = 20
MIN_STEPS, MAX_STEPS = 200, 3_000
# Crop sizes in residues. The largest that fits into the memory is used.
CROPS = 384, 320, 256, 192, 128, 64
# Entries that a validation folds at most.
MAX_VALIDATED = 24
# Random draws of each example whose trunk outputs are cached.
DRAWS = 4
# Modules whose projections get adapters.
ADAPTED = ("extra_stack.*", "evoformer.*")


def first_settings(init: Path) -> settings.Mapped:
    """Load the initial settings: those of the run that produced the parameters, or those of a preset.

    The parameters of a run are next to its settings.toml. Its losses and data settings are kept, and its learning rate
    is halved as in AlphaFold2's second stage (Supp. table 4). Other parameters take losses, data settings and learning
    rate of the preset for their kind of model: `multimer_finetune`, `monomer_ptm` if they have the PAE head, or
    `finetune`. The plan is chosen later, for this machine.
    Raises UserError for unreadable parameters and for a damaged settings.toml.
    """
    path = init.parent / "settings.toml"
    config = load_config(init)
    model = settings.to_dict(config)
    if path.is_file():
        try:
            run = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{path}: is damaged ({error}); restore it, or move the parameters elsewhere") from error
        values: settings.Mapped = {name: run[name] for name in ("loss", "data", "optim") if name in run}
        values["optim"] = {**values["optim"], "learning_rate": values["optim"]["learning_rate"] / 2}
    else:
        multimer = config.multimer is not None
        preset = settings.load("multimer_finetune" if multimer else "monomer_ptm" if config.heads.pae else "finetune")
        values = {name: preset[name] for name in ("loss", "data", "optim")}
        values["plan"] = {name: preset["plan"][name] for name in ("precision",)}
        if multimer and not config.evoformer.pair.fused:
            # Versions 1 and 2 were trained on smaller crops (settings/multimer.toml).
            values["data"] = {**values["data"], "crop": 384}
    values["data"] = {**values["data"], **data_settings(init)}
    if not model["templates"]["enabled"]:
        values["data"]["max_templates"] = 0
    return {**values, "model": model}


def chosen_settings(
    first: settings.Mapped, split: Split, steps: int | None, trainable: Sequence[str], adapters: int
) -> settings.Mapped:
    """Complete the settings `first` for the number of training examples.

    The learning rate scales with the square root of the examples per step, as does the precision of the gradient.
    trainable: names of trained parts; empty trains everything, or only the adapters if there are any. If the trunk is
    frozen, its outputs are cached per example. adapters: their rank, 0 for none.
    """
    optim = first["optim"]
    initial = int(optim.get("accumulate", 1))
    accumulate = min(initial, 16, max(1, len(split.training) // 8))
    count = steps or min(max(math.ceil(EPOCHS * len(split.training) / accumulate), MIN_STEPS), MAX_STEPS)
    rate = float(optim["learning_rate"]) * math.sqrt(accumulate / initial)
    new_settings: settings.Mapped = {
        "optim": {
            "learning_rate": float(f"{rate:.2g}"),
            "accumulate": accumulate,
            "warmup_steps": max(1, count // 20),
            "decay": "linear",
            "decay_after_steps": count // 2,
            "decay_steps": max(1, count - count // 2),
            "decay_factor": 0.05,
            "average_decay": round(min(0.999, max(0.9, 1 - 20 / count)), 4),
        },
        "train": {
            "steps": count,
            "order": "uniform",
            "validation": list(split.validation),
            "test": list(split.test),
            "validation_examples": MAX_VALIDATED,
            "validate_every": max(1, count // 10),
            # `finetune` has already removed related entries from the sources.
            "related_identity": 0.0,
            # Every validation uses all entries, because it selects the parameters.
            "validation_share": 1.0,
            "save_every": max(1, count // 10),
            "patience": 4,
        },
    }
    tuned: dict[str, Any] = {"trainable": list(trainable) or ([] if adapters else ["all"])}
    if adapters:
        tuned["adapters"] = {"on": list(ADAPTED), "rank": adapters}
    elif set(trainable) <= {"structure", "heads"} and trainable:
        tuned |= {"draws": DRAWS, "trunk": "auto"}
    new_settings["finetune"] = tuned
    return settings.merge(first, new_settings)


def planned(
    values: settings.Mapped, changes: Sequence[str], out: Path, device: torch.device, memory: int | None
) -> tuple[RunConfig, str]:
    """Build the configuration of the run with a plan that fits; returns it with a summary for the log.

    The crop size is that of the settings, or the largest smaller one that fits unless `changes` set it.
    Raises UserError if no crop size fits, and for invalid changes.
    """
    is_fixed = any(change.startswith("data.crop=") for change in changes)
    first_error: UserError | None = None
    first_crop = values["data"].get("crop")
    shorter_crops = [crop for crop in CROPS if isinstance(first_crop, int) and crop < first_crop and not is_fixed]
    for crop in (first_crop, *shorter_crops):
        candidate = values if crop is None else settings.merge(values, {"data": {"crop": crop}})
        loaded = load_settings(candidate, changes)
        try:
            config, summary = plan_training(loaded, out, device, memory)
        except UserError as error:
            # This raises if the settings themselves are invalid, which no smaller crop repairs.
            loaded.config()
            first_error = first_error or error
            continue
        shorter = f"crops of {crop} residues, as {first_crop} do not fit; " if first_error else ""
        return config, shorter + summary
    assert first_error is not None
    raise first_error
