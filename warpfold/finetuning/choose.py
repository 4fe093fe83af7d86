"""Choose the settings of a fine-tuning from the parameters to start from and the number of examples."""

import math
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from warpfold import settings
from warpfold.errors import UserError
from warpfold.finetuning.split import Split
from warpfold.model.weights.files import data_settings, load_config
from warpfold.training.config import RunConfig, load_settings
from warpfold.training.planning import plan_training

EPOCHS = 20  # over the training set, if validation does not end the run before
STEPS = 200, 3_000  # of a run, at least and at most
CROPS = 384, 320, 256, 192, 128, 64  # of which the longest is taken that fits
VALIDATED = 24  # entries that are folded in a validation, at most
DRAWS = 4  # of each example, where what the trunk makes of it is kept
ADAPTED = ("extra_stack.*", "evoformer.*")  # the projections that get adapters


def first_settings(init: Path) -> settings.Mapped:
    """Return the settings to begin with: those of the run that made the parameters, or a preset's.

    A run's parameters lie beside its settings.toml.  Its losses and data stay, its rate is halved, as AlphaFold2's
    second stage has it (Supp. table 4); its plan is chosen anew.  Other parameters take the losses, data and rate of
    the preset for their kind of model: `multimer_finetune`, `monomer_ptm` if they have the PAE head, or `finetune`.
    Errors: UserError for parameters that cannot be read, and for a settings.toml that is damaged.
    """
    path = init.parent / "settings.toml"
    config = load_config(init)
    model = settings.to_dict(config)
    if path.is_file():
        try:
            run = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{path}: is damaged ({error}); restore it, or move the parameters elsewhere") from error
        found: settings.Mapped = {name: run[name] for name in ("loss", "data", "optim") if name in run}
        found["optim"] = {**found["optim"], "learning_rate": found["optim"]["learning_rate"] / 2}  # Supp. table 4
    else:
        multimer = config.multimer is not None
        preset = settings.load("multimer_finetune" if multimer else "monomer_ptm" if config.heads.pae else "finetune")
        found = {name: preset[name] for name in ("loss", "data", "optim")}
        found["plan"] = {name: preset["plan"][name] for name in ("precision",)}
        if multimer and not config.evoformer.pair.fused:
            # Versions 1 and 2 were trained on smaller crops (settings/multimer.toml).
            found["data"] = {**found["data"], "crop": 384}
    found["data"] = {**found["data"], **data_settings(init)}
    if not model["templates"]["enabled"]:
        found["data"]["max_templates"] = 0
    return {**found, "model": model}


def chosen_settings(
    first: settings.Mapped, split: Split, steps: int | None, trainable: Sequence[str], adapters: int
) -> settings.Mapped:
    """Return `first` with what follows from the number of training examples.

    The rate falls with the square root of the examples of a step: so much less is known of the gradient.  trainable:
    what is trained; none: all, or with adapters nothing else.  Where the trunk is not, what it makes of each example is
    kept.  adapters: their rank, 0 for none.
    """
    optim = first["optim"]
    given = int(optim.get("accumulate", 1))
    accumulate = min(given, 16, max(1, len(split.training) // 8))
    count = steps or min(max(math.ceil(EPOCHS * len(split.training) / accumulate), STEPS[0]), STEPS[1])
    rate = float(optim["learning_rate"]) * math.sqrt(accumulate / given)
    chosen: settings.Mapped = {
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
            "validation_examples": VALIDATED,
            "validate_every": max(1, count // 10),
            "related_identity": 0.0,  # finetune has left related entries out of the sources
            "validation_share": 1.0,  # all of them each time: they choose the parameters
            "save_every": max(1, count // 10),
            "patience": 4,
        },
    }
    tuned: dict[str, Any] = {"trainable": list(trainable) or ([] if adapters else ["all"])}
    if adapters:
        tuned["adapters"] = {"on": list(ADAPTED), "rank": adapters}
    elif set(trainable) <= {"structure", "heads"} and trainable:
        tuned |= {"draws": DRAWS, "trunk": "auto"}
    chosen["finetune"] = tuned
    return settings.merge(first, chosen)


def planned(
    values: settings.Mapped, changes: Sequence[str], out: Path, device: torch.device, memory: int | None
) -> tuple[RunConfig, str]:
    """Return the settings of the run with a plan that fits, and what is to be said of both.

    The crop is the settings', or the longest shorter one that fits, unless `changes` name it.
    Errors: UserError where none fits, and for changes that are no settings.
    """
    named = any(change.startswith("data.crop=") for change in changes)
    failed: UserError | None = None
    for crop in _crops(values["data"].get("crop"), named):
        tried = values if crop is None else settings.merge(values, {"data": {"crop": crop}})
        given = load_settings(tried, changes)
        try:
            config, said = plan_training(given, out, device, memory)
        except UserError as error:
            if named or crop is None:
                raise
            given.config()  # what is wrong with the settings themselves is the user's to mend
            failed = failed or error
            continue
        shorter = f"crops of {crop} residues, as {values['data'].get('crop')} do not fit; " if failed else ""
        return config, shorter + said
    assert failed is not None
    raise failed


def _crops(crop: Any, named: bool) -> Iterator[int | None]:
    yield crop
    if isinstance(crop, int) and not named:
        yield from (shorter for shorter in CROPS if shorter < crop)
