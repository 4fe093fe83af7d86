"""All settings of a run: what a TOML file in settings/ may contain."""

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
    """[train]: how long to train, on what, what to save and validate, and what to do when something goes wrong."""

    steps: int = 78_125  # Supp. table 4: about 10 million samples, 128 per step
    seed: int = 0  # of the first weights, the order of the examples, and everything random
    order: Weights = "paper"  # Supp. 1.2.5; "uniform": each example once per epoch
    validation: float | tuple[str, ...] | str = 0.02  # share of the store or keys, held out; or another store's folder
    test: tuple[str, ...] = ()  # entries of any of the stores that the run never sees, neither trained on nor validated
    # Identity, 0 to 1, from which an entry of any store counts as related to one that tests or validates.  Related
    # entries are not trained on if there are several stores, or a test; 0: they are.
    related_identity: float = 0.3
    validation_examples: int = 64  # at most this many of them, one for each cluster (but all that are named)
    validation_residues: int = 512  # at most so many of each: of an assembly those around an interface
    validate_every: int = 1_000  # steps; 0: at the beginning and the end only
    validation_share: float = 0.1  # of the time, at most; what there is no time for is left out; 1: all is validated
    save_every: int = 500  # steps
    patience: int = 0  # validations in a row without a better one after which the run ends; 0: it never ends early
    keep: int = 2  # how many last checkpoints stay; the best stays too
    idle: int = 0  # processes that a chosen plan leaves over: the run notes it, to go on with its plan on as many
    # With --init: heads that the file lacks begin at random, and those that the settings lack are left out.
    new_heads: bool = False
    # With --init: the optimizer's moments are those of the last checkpoint of the run in whose folder that file is.
    moments: bool = False
    on_nonfinite: Literal["stop", "skip"] = "stop"  # what to do about a loss or gradient that is not finite
    max_skipped: int = 10  # examples of any 1,000 in a row that "skip" may leave out before the run stops
    # Steps between two digests of parameters and optimizer state in the log, for `doctor --replay`; 0: none.
    digest_every: int = 0
    workers: int | None = None  # processes that prepare examples, 0: this one; None: up to 8 per GPU, 0 on a CPU
    ahead: int = 4  # examples per worker that are prepared ahead
    window: int = 0  # positions by which a ready example may come early, or a slow one late; 0: in order
    quarantine: float = 0.01  # share of the data that may turn out unusable before the run stops
    tensorboard: bool = False  # curves in the run's folder, for TensorBoard
    wandb: Literal["off", "offline", "online"] = "off"  # Weights & Biases: in the folder; or as W&B is set up
    report_every: float = 30.0  # seconds between lines of progress, where there is no terminal

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
            raise ValueError("plan.in_place is for inference: training still needs what it overwrites; leave it out")
        if reason := plan.unsupported_reason(self.model.evoformer.outer):
            raise ValueError(reason)
        if self.loss.center_of_mass and self.model.multimer is None:
            raise ValueError(
                "loss.center_of_mass keeps the chains of a complex apart, and this model folds single chains: leave it "
                "out, or train a multimer (model.multimer)"
            )
        if self.finetune.draws and self.train.window:
            raise ValueError(
                "finetune.draws gives each draw its own number of recycles, and train.window exchanges examples of "
                "different steps: leave one of them out"
            )
        if self.finetune.freezes and (reason := plan.unsupported_when_frozen()):
            raise ValueError(reason)
        if plan.data > examples:
            raise ValueError(
                f"plan.data = {plan.data} ranks cannot share the optim.accumulate = {examples} examples of a step: "
                "each of them needs one; lower plan.data, or raise optim.accumulate"
            )
        if plan.batch > 1 and self.model.multimer is not None:
            raise ValueError("plan.batch is for single chains: the complexes of a batch cannot be padded to one size")
        if reason := unsupported_batch(self.optim, plan.data, plan.batch):
            raise ValueError(reason)
        if self.train.window and plan.axial * plan.branch > 1:
            raise ValueError(
                "train.window lets examples come as they are ready, but plan.axial and plan.branch need them in one "
                "order on all ranks that share them; leave one of them out"
            )


def fixed_settings(values: settings.Mapped) -> settings.Mapped:
    """Select the settings that a run keeps.  How it executes, saves and ends may change when it is continued."""
    fixed = {name: values[name] for name in ("model", "loss", "data", "optim")}
    # Stored and computed outputs of the trunk are equal.
    fixed["finetune"] = {name: value for name, value in values["finetune"].items() if name != "trunk"}
    return {**fixed, "train": {name: values["train"][name] for name in FIXED_TRAIN_KEYS}}


@dataclass(frozen=True)
class GivenSettings:
    """The values of settings, and which keys of their plan stay as they are where a planner chooses the others.

    own: keys of the plan that the user gave; of a preset, what the planner chooses is only a suggestion for who runs
    without one.  auto: whether there is anything to choose.
    """

    source: str
    values: settings.Mapped
    own: frozenset[str]
    auto: bool

    def config(self, **plan: Any) -> RunConfig:
        """Return the settings of a run, with some keys of the plan changed.  Errors: as of `settings.build`."""
        values = self.values | {"plan": {**self.values.get("plan", {}), **settings.plain(plan)}}
        return settings.build(RunConfig, values, self.source)

    def fixed(self, chosen: Collection[str]) -> dict[str, Any]:
        """Return the keys of the plan that stay, where the planner chooses among some."""
        plan: settings.Mapped = self.values.get("plan", {})
        keys = [key for key in plan if key in self.own or key not in chosen]
        built = settings.build(Plan, {key: plan[key] for key in keys}, self.source, "plan.")
        return {key: getattr(built, key) for key in keys}

    def fixed_on_ranks(self, chosen: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the keys of the plan that stay, those of `plan.sync` apart, each of which may stay by itself."""
        fixed = self.fixed(chosen)
        sync = fixed.pop("sync", None)
        given = {} if sync is None else self.values["plan"]["sync"]
        return fixed, {key: getattr(sync, key) for key in given}


SettingsLike = str | os.PathLike[str] | Mapping[str, Any] | RunConfig | GivenSettings


def load_settings(name: SettingsLike, changes: Iterable[str] = ()) -> GivenSettings:
    """Read settings in which the plan may be left to the planner: `plan = "auto"`, or keys that are not there.

    name: a preset's, a file, the values of one, or settings that are built already, whose plan stays as it is; settings
    that have been read so stay as they are.  `plan.auto = false`: what is not there has the default of `Plan`.
    Errors: UserError as of `settings.load`, and for what is none of these.
    """
    changes = list(changes)
    if isinstance(name, GivenSettings):
        if changes:
            raise UserError(f"{changes[0]}: these settings have been read; change them when they are")
        return name
    if not isinstance(name, str | os.PathLike | Mapping | RunConfig):
        what = shown(name)
        raise UserError(f"settings = {what}: a preset's name, a TOML file, a mapping or a RunConfig is needed")
    if isinstance(name, os.PathLike):
        name = Path(name)
    if isinstance(name, RunConfig):
        values = settings.load(settings.to_dict(name), changes)
        return GivenSettings("settings", values, frozenset(values["plan"]), auto=False)
    source = "settings" if isinstance(name, Mapping) else str(name)
    presets = {path.resolve() for path in settings.presets().values()}
    merged: settings.Mapped = {}
    own: set[str] = set()
    for path, values in settings.layers(name, changes):
        if values.get("plan") == "auto":
            values = values | {"plan": AUTO}
        merged = settings.merge(merged, values)
        if path is None or path.resolve() not in presets:
            plan = values.get("plan", {})
            own |= set(plan) if isinstance(plan, dict) else set()
    plan = merged.get("plan", {})
    auto = plan.pop("auto", True) if isinstance(plan, dict) else False
    return GivenSettings(source, merged, frozenset(own - {"auto"}), settings.convert(bool, auto, source, "plan.auto"))
