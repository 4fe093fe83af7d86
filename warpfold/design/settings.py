"""What a design's TOML may contain: chains, losses, and the stages from soft to hard."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from warpfold import settings
from warpfold.design.losses import LossShape, LossWeights
from warpfold.engine.gradient import Through
from warpfold.errors import UserError
from warpfold.model.soft import FREE

PRESETS = tuple(folder / "design" for folder in settings.PRESETS)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Some steps of a design; what goes from one value to another does so over them.

    What enters the model is as of `Predictor.gradient`.  A step is so long that the logits of a residue change by
    `rate` * ((1 - soft) + soft * temperature), as the root of their mean square: ColabDesign, colabdesign/af/design.py.
    """

    steps: int
    soft: tuple[float, float] = (1.0, 1.0)  # linearly
    temperature: tuple[float, float] = (1.0, 1.0)  # with the square of the steps that are left: ColabDesign
    hard: float = 0.0
    rate: float = 0.1  # ColabDesign
    weights: dict[str, float] = field(default_factory=dict)  # of losses, in place of those of [loss]

    def __post_init__(self) -> None:
        if self.steps < 1 or not self.rate > 0:
            raise ValueError(f"steps = {self.steps}, rate = {self.rate}: at least 1, and above 0, are needed")
        if not all(0 <= x <= 1 for x in (*self.soft, self.hard)) or not min(self.temperature) > 0:
            raise ValueError("soft and hard must lie between 0 and 1, and temperature above 0")
        if unknown := [name for name in self.weights if name not in LossWeights.__dataclass_fields__]:
            known = ", ".join(LossWeights.__dataclass_fields__)
            raise ValueError(f"weights: {unknown[0]} is not a loss; known: {known}")


@dataclass(frozen=True)
class StepSettings:
    """What one step does: what enters the model, how far logits move, and by which losses."""

    stage: int
    soft: float
    temperature: float
    hard: float
    rate: float
    weights: LossWeights


@dataclass(frozen=True, kw_only=True)
class DesignSettings:
    """All settings of a design, each a key or a section of the TOML file."""

    # Chain -> how many residues are free, or its letters, "-" where free; "A,B" are copies.  None: the target's, free.
    chains: dict[str, int | str] = field(default_factory=dict)
    target: str = ""  # mmCIF or PDB file, whose chains are those of the design by the same names
    templates: tuple[str, ...] = ()  # as of `predict`: A=FILE:CHAIN for chain A
    recycles: int = 0  # passes before the last
    through: Through = "last"  # the gradient: through the last pass, all, or their mean
    spread: float = 0.01  # standard deviation of the logits at the start: ours
    loss: LossWeights = field(default_factory=LossWeights)
    shape: LossShape = field(default_factory=LossShape)
    stages: tuple[Stage, ...] = ()

    def __post_init__(self) -> None:
        if self.recycles < 0 or self.spread < 0 or not math.isfinite(self.spread):
            raise ValueError(f"recycles = {self.recycles}, spread = {self.spread}: must not be negative")
        for name, given in self.chains.items():
            if not given or (isinstance(given, int) and given < 1):
                raise ValueError(f"chains.{name} = {given!r}: a number of residues, or letters, are needed")

    @property
    def steps(self) -> int:
        """Return how many steps there are in all stages."""
        return sum(stage.steps for stage in self.stages)

    def at(self, step: int) -> StepSettings:
        """Return what a step does, counted from 0."""
        for number, stage in enumerate(self.stages):
            if step < stage.steps:
                done = (step + 1) / stage.steps
                (soft, end), (hot, cold) = stage.soft, stage.temperature
                soft, temperature = soft + (end - soft) * done, cold + (hot - cold) * (1 - done) ** 2
                rate = stage.rate * ((1 - soft) + soft * temperature)
                return StepSettings(number, soft, temperature, stage.hard, rate, replace(self.loss, **stage.weights))
            step -= stage.steps
        raise ValueError(f"step {step} behind the last stage")


def load_design(name: str | Path | Mapping[str, Any], changes: Iterable[str] = ()) -> DesignSettings:
    """Read the settings of a design: a TOML file, a preset's name, or values; `changes`: KEY=VALUE over them.

    Files that are named in a TOML file are found from where the command runs.
    Errors: UserError for what is not there, or not right.
    """
    source = "settings" if isinstance(name, Mapping) else str(name)
    if not isinstance(name, Mapping) and not Path(name).is_file():
        known = {file.stem: file for folder in PRESETS for file in sorted(folder.glob("*.toml"))}
        if str(name) not in known:
            raise UserError(f"{name}: no such settings file; give a path or a preset ({', '.join(sorted(known))})")
        name = known[str(name)]
    found = settings.build(DesignSettings, settings.load(name, changes), source)
    if not found.stages:
        raise UserError(f"{source}: has no stages; give [[stages]] with their steps")
    return found


def fixed_letters(given: int | str) -> str:
    """Return the letters of a chain of the settings, FREE where it is free."""
    return FREE * given if isinstance(given, int) else given.upper()
