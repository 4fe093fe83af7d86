"""The settings of a design (TOML): chains, losses, and the stages from soft to hard sequences."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from warpfold import settings
from warpfold.engine.gradient import Through
from warpfold.errors import UserError
from warpfold.model.soft import FREE
from warpfold.sequence_design.losses import LossShape, LossWeights

PRESETS = tuple(folder / "design" for folder in settings.PRESETS)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A number of steps with the same schedule.

    soft, temperature, hard: the inputs of the model, as for `Predictor.gradient`. Pairs are the first and last value;
        soft changes linearly, temperature with the square of the remaining steps (ColabDesign).
    rate: the root mean square change of a residue's logits in a step is rate * ((1 - soft) + soft * temperature)
        (ColabDesign, colabdesign/af/design.py).
    weights: weights of losses that replace those of [loss].
    """

    steps: int
    soft: tuple[float, float] = (1.0, 1.0)
    temperature: tuple[float, float] = (1.0, 1.0)
    hard: float = 0.0
    rate: float = 0.1
    weights: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.steps < 1 or not self.rate > 0:
            raise ValueError(f"steps = {self.steps}, rate = {self.rate}: steps must be at least 1 and rate above 0")
        if not all(0 <= x <= 1 for x in (*self.soft, self.hard)) or not min(self.temperature) > 0:
            raise ValueError("soft and hard must be between 0 and 1, and temperature above 0")
        if unknown := [name for name in self.weights if name not in LossWeights.__dataclass_fields__]:
            valid_names = ", ".join(LossWeights.__dataclass_fields__)
            raise ValueError(f"weights: {unknown[0]} is not a loss; known: {valid_names}")


@dataclass(frozen=True)
class StepSettings:
    """The settings of one step: the inputs of the model, the change of the logits and the weights of the losses."""

    stage: int
    soft: float
    temperature: float
    hard: float
    rate: float
    weights: LossWeights


@dataclass(frozen=True, kw_only=True)
class DesignSettings:
    """All settings of a design, each a key or a section of the TOML file."""

    # Chain -> its number of free residues, or its letters with "-" for free residues. "A,B" are copies. Empty: the
    # chains of the target, free.
    chains: dict[str, int | str] = field(default_factory=dict)
    # mmCIF or PDB file; its chains are matched with those of the design by name.
    target: str = ""
    # As for `predict`: A=FILE:CHAIN for chain A.
    templates: tuple[str, ...] = ()
    # Recycling iterations before the last one.
    recycles: int = 0
    # The iterations through which the gradient flows: the last one, all, or the mean over them.
    through: Through = "last"
    # Standard deviation of the initial logits.
    spread: float = 0.01
    loss: LossWeights = field(default_factory=LossWeights)
    shape: LossShape = field(default_factory=LossShape)
    stages: tuple[Stage, ...] = ()

    def __post_init__(self) -> None:
        if self.recycles < 0 or self.spread < 0 or not math.isfinite(self.spread):
            raise ValueError(f"recycles = {self.recycles}, spread = {self.spread}: must not be negative")
        for name, value in self.chains.items():
            if not value or (isinstance(value, int) and value < 1):
                raise ValueError(f"chains.{name} = {value!r}: must be a number of residues, or letters")

    @property
    def steps(self) -> int:
        """Return the number of steps of all stages."""
        return sum(stage.steps for stage in self.stages)

    def at(self, step: int) -> StepSettings:
        """Return the settings of a step, counted from 0."""
        in_stage = step
        for number, stage in enumerate(self.stages):
            if in_stage < stage.steps:
                done = (in_stage + 1) / stage.steps
                (soft, end), (hot, cold) = stage.soft, stage.temperature
                soft, temperature = soft + (end - soft) * done, cold + (hot - cold) * (1 - done) ** 2
                rate = stage.rate * ((1 - soft) + soft * temperature)
                return StepSettings(number, soft, temperature, stage.hard, rate, replace(self.loss, **stage.weights))
            in_stage -= stage.steps
        raise ValueError(f"step {step} is after the last stage")


def load_design(name: str | Path | Mapping[str, Any], changes: Iterable[str] = ()) -> DesignSettings:
    """Load the settings of a design.

    name: a TOML file, the name of a preset, or a mapping of values. Paths in a TOML file are relative to the current
        directory.
    changes: KEY=VALUE, overriding these settings.
    Errors: UserError for missing files and invalid settings.
    """
    source = "settings" if isinstance(name, Mapping) else str(name)
    if not isinstance(name, Mapping) and not Path(name).is_file():
        preset_files = {file.stem: file for folder in PRESETS for file in sorted(folder.glob("*.toml"))}
        if str(name) not in preset_files:
            raise UserError(
                f"{name}: no such settings file. Pass a path or a preset ({', '.join(sorted(preset_files))})."
            )
        name = preset_files[str(name)]
    design = settings.build(DesignSettings, settings.load(name, changes), source)
    if not design.stages:
        raise UserError(f"{source}: has no stages. Add [[stages]] with their steps.")
    return design


def fixed_letters(chain: int | str) -> str:
    """Expand a chain of the settings to letters, with FREE for the residues to design."""
    return FREE * chain if isinstance(chain, int) else chain.upper()
