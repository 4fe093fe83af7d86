"""All settings of a run, as a TOML file in settings/ gives them."""

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from warpfold import settings
from warpfold.arguments import shown
from warpfold.data.features.choose import SampleConfig
from warpfold.data.load.order import Weights
from warpfold.engine.optim import OptimConfig, unsupported_batch
from warpfold.engine.trainable import FinetuneConfig
from warpfold.errors import UserError
from warpfold.model.alphafold import ModelConfig
from warpfold.model.losses import LossConfig
from warpfold.parallel.plan import Plan

AUTO = {"auto": True}  # the value of `plan = "auto"`
FIXED_TRAIN_KEYS = ("seed", "order", "validation", "test", "related_identity")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """[train]: length of the training, held-out examples, checkpoints, handling of failures, and logs."""

    # Optimizer steps (Supp. table 4: about 10 million samples, 128 per step).
    steps: int = 78_125
    # Seed of the first weights, the order of the examples, and all other random numbers.
    seed: int = 0
    # "paper": weights of Supp. 1.2.5.  "uniform": each example once per epoch.
    order: Weights = "paper"
    # Held-out validation data: a share of the store, keys, or the folder of another store.
    validation: float | tuple[str, ...] | str = 0.02
    # Entries of any store that are neither trained on nor validated.
    test: tuple[str, ...] = ()
    # Identity, 0 to 1, from which an entry counts as related to an entry of the test or the validation.  With several
    # stores or a test, related entries are not trained on.  0: they are.
    related_identity: float = 0.3
    # Maximum number of validation examples, one for each cluster.  Named entries all count.
    validation_examples: int = 64
    # Maximum residues of each validation example; of an assembly those around an interface.
    validation_residues: int = 512
    # Steps between validations.  0: at the beginning and the end only.
    validate_every: int = 1_000
    # Maximum share of the time for validations.  Validations beyond it are left out.  1: no limit.
    validation_share: float = 0.1
    # Steps between checkpoints.
    save_every: int = 500
    # Validations in a row without an improvement after which the run ends.  0: the run never ends early.
    patience: int = 0
    # Number of last checkpoints to retain, in addition to the best.
    keep: int = 2
    # Processes that a chosen plan leaves idle.  The run notes it, to continue with its plan on an equal number.
    idle: int = 0
    # With --init: heads that the file lacks begin at random, and heads that the settings lack are left out.
    new_heads: bool = False
    # With --init: begin with the optimizer's moments in the last checkpoint of the run whose folder has that file.
    moments: bool = False
    # Reaction to a loss or gradient that is not finite: stop the run, or skip the example.
    on_nonfinite: Literal["stop", "skip"] = "stop"
    # Maximum number of skipped examples among any 1,000 in a row, before the run stops.
    max_skipped: int = 10
    # Steps between two digests of parameters and optimizer state in the log, for `doctor --replay`.  0: none.
    digest_every: int = 0
    # Processes that prepare examples.  0: the training process.  None: up to 8 per GPU, 0 on a CPU.
    workers: int | None = None
    # Examples per worker that are prepared in advance.
    ahead: int = 4
    # Positions by which a ready example may come early, or a slow one late.  0: in order.
    window: int = 0
    # Share of the data that may be unusable before the run stops.
    quarantine: float = 0.01
    # Write curves for TensorBoard into the run's folder.
    tensorboard: bool = False
    # Weights & Biases: "offline" writes into the run's folder, "online" follows the setup of W&B.
    wandb: Literal["off", "offline", "online"] = "off"
    # Seconds between two lines of progress, if the output is not a terminal.
    report_every: float = 30.0

    def __post_init__(self) -> None:
        if min(self.steps, self.save_every, self.keep) < 1:
            raise ValueError("steps, save_every and keep must be at least 1")
        if isinstance(self.validation, float) and not 0 <= self.validation < 1:
            raise ValueError("validation, as a share, must be at least 0 and below 1")
        if not 0 <= self.related_identity <= 1:
            raise ValueError("related_identity must lie between 0 and 1; 0 leaves no related entry out")
        if not 0 < self.validation_share <= 1:
            raise ValueError("validation_share must be above 0 and at most 1; validation = 0.0 holds nothing out")
        not_negative = "workers", "window", "max_skipped", "report_every", "idle", "patience", "digest_every"
        if self.ahead < 1 or min(getattr(self, name) or 0 for name in not_negative) < 0:
            raise ValueError(f"ahead must be at least 1; {', '.join(not_negative)} must not be negative")
        if not 0 <= self.quarantine <= 1:
            raise ValueError("quarantine must lie between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of a run, each a section of the TOML file."""

    model: ModelConfig = field(default_factory=ModelConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    data: SampleConfig = field(default_factory=SampleConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    plan: Plan = field(default_factory=Plan)
    train: TrainConfig = field(default_factory=TrainConfig)
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)

    def __post_init__(self) -> None:
        plan, examples = self.plan, self.optim.accumulate
        if plan.in_place:
            raise ValueError("plan.in_place is for inference: it overwrites tensors that training needs. Remove it.")
        if reason := plan.unsupported_reason(self.model.evoformer.outer):
            raise ValueError(reason)
        if self.loss.center_of_mass and self.model.multimer is None:
            raise ValueError(
                "loss.center_of_mass separates the chains of a complex, and this model folds single chains. Remove it, "
                "or train a multimer (model.multimer)."
            )
        if self.finetune.draws and self.train.window:
            raise ValueError(
                "finetune.draws gives each draw its own number of recycles, and train.window exchanges examples of "
                "different steps. Remove one of them."
            )
        if self.finetune.freezes and (reason := plan.unsupported_when_frozen()):
            raise ValueError(reason)
        if plan.data > examples:
            raise ValueError(
                f"plan.data = {plan.data} ranks cannot share the optim.accumulate = {examples} examples of a step: "
                "each of them needs one. Lower plan.data, or raise optim.accumulate."
            )
        if plan.batch > 1 and self.model.multimer is not None:
            raise ValueError("plan.batch is for single chains: the complexes of a batch cannot be padded to one size")
        if reason := unsupported_batch(self.optim, plan.data, plan.batch):
            raise ValueError(reason)
        if self.train.window and plan.axial * plan.branch > 1:
            raise ValueError(
                "train.window yields examples in the order in which they are ready, but plan.axial and plan.branch "
                "need the same order on all ranks that share an example. Remove one of them."
            )


def fixed_settings(values: settings.Mapped) -> settings.Mapped:
    """Select the settings that a run keeps.  How it executes, saves and ends may change when it is continued."""
    fixed = {name: values[name] for name in ("model", "loss", "data", "optim")}
    # Stored and computed outputs of the trunk are equal.
    fixed["finetune"] = {name: value for name, value in values["finetune"].items() if name != "trunk"}
    return {**fixed, "train": {name: values["train"][name] for name in FIXED_TRAIN_KEYS}}


@dataclass(frozen=True)
class GivenSettings:
    """The values of settings, and the keys of their plan that a planner must not change.

    own: keys of the plan that the user gave.  The planner may replace the other keys of a preset's plan.
    auto: whether the planner chooses any keys.
    """

    source: str
    values: settings.Mapped
    own: frozenset[str]
    auto: bool

    def config(self, **plan: Any) -> RunConfig:
        """Build the settings of a run, with some keys of the plan changed.  Errors: see `settings.build`."""
        values = self.values | {"plan": {**self.values.get("plan", {}), **settings.plain(plan)}}
        return settings.build(RunConfig, values, self.source)

    def fixed(self, chosen: Collection[str]) -> dict[str, Any]:
        """Return the keys of the plan that are fixed if the planner chooses the keys in `chosen`."""
        plan: settings.Mapped = self.values.get("plan", {})
        keys = [key for key in plan if key in self.own or key not in chosen]
        built = settings.build(Plan, {key: plan[key] for key in keys}, self.source, "plan.")
        return {key: getattr(built, key) for key in keys}

    def fixed_on_ranks(self, chosen: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the fixed keys of the plan, and separately the fixed keys of `plan.sync`."""
        fixed = self.fixed(chosen)
        sync = fixed.pop("sync", None)
        sync_values = {} if sync is None else self.values["plan"]["sync"]
        return fixed, {key: getattr(sync, key) for key in sync_values}


SettingsLike = str | os.PathLike[str] | Mapping[str, Any] | RunConfig | GivenSettings


def load_settings(name: SettingsLike, changes: Iterable[str] = ()) -> GivenSettings:
    """Load settings in which the plan may be left to the planner, by `plan = "auto"` or by missing keys.

    name: the name of a preset, a file, a mapping of values, a `RunConfig`, whose plan is fixed, or `GivenSettings`,
        which are returned unchanged.
    changes: assignments such as "train.steps=10".  With `plan.auto = false` missing keys have the defaults of `Plan`.
    Errors: UserError of `settings.load`, and for a value of another type.
    """
    changes = list(changes)
    if isinstance(name, GivenSettings):
        if changes:
            raise UserError(f"{changes[0]}: these settings have been read. Pass changes when you load them.")
        return name
    if not isinstance(name, str | os.PathLike | Mapping | RunConfig):
        shown_value = shown(name)
        raise UserError(f"settings = {shown_value}: a preset's name, a TOML file, a mapping or a RunConfig is needed")
    if isinstance(name, os.PathLike):
        name = Path(name)
    if isinstance(name, RunConfig):
        values = settings.load(settings.to_dict(name), changes)
        return GivenSettings("settings", values, frozenset(values["plan"]), auto=False)
    source = "settings" if isinstance(name, Mapping) else str(name)
    presets = {path.resolve() for path in settings.presets().values()}
    merged: settings.Mapped = {}
    plan_keys: set[str] = set()
    for path, values in settings.layers(name, changes):
        if values.get("plan") == "auto":
            values = values | {"plan": AUTO}
        merged = settings.merge(merged, values)
        if path is None or path.resolve() not in presets:
            plan = values.get("plan", {})
            plan_keys |= set(plan) if isinstance(plan, dict) else set()
    plan = merged.get("plan", {})
    auto = plan.pop("auto", True) if isinstance(plan, dict) else False
    return GivenSettings(
        source, merged, frozenset(plan_keys - {"auto"}), settings.convert(bool, auto, source, "plan.auto")
    )
