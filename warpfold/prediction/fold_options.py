"""What a prediction is asked for: when recycling ends, how often the model runs, what is kept."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from warpfold import arguments
from warpfold.errors import UserError
from warpfold.ops.dispatch import Kernels
from warpfold.prediction.params import Params


@dataclass(frozen=True)
class Recycling:
    """When recycling ends before all passes are done; it changes what is predicted.

    tolerance: angstrom, as `ModelConfig.recycle_tolerance`; None: the model's own.
    long: a protein of more than so many residues has at most so many passes after the first.
    Errors: UserError for what is not at least 0.
    """

    tolerance: float | None = None
    long: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.tolerance is not None and not 0 <= self.tolerance < math.inf:
            raise UserError(f"--recycle-tolerance {self.tolerance:g}: angstrom, at least 0")
        if self.long is not None and min(self.long) < 0:
            raise UserError(f"--max-recycles {self.long[0]}:{self.long[1]}: two numbers of at least 0")

    @classmethod
    def of(cls, tolerance: float | None, most: str | tuple[int, int] | None) -> "Recycling":
        """Return when recycling ends, with `long` also as LENGTH:RECYCLES.  Errors: UserError for anything else."""
        long = None
        if isinstance(most, str):
            numbers = most.split(":")
            if len(numbers) != 2 or not all(map(str.isdecimal, numbers)):
                raise UserError(f"--max-recycles {most}: is not LENGTH:RECYCLES; write two numbers, such as 1500:3")
            long = int(numbers[0]), int(numbers[1])
        elif most is not None:
            if not arguments.is_list(most) or len(most) != 2:
                raise arguments.WrongArgument(f"max_recycles = {arguments.shown(most)}: two numbers are needed")
            long = arguments.whole("max_recycles[0]", most[0]), arguments.whole("max_recycles[1]", most[1])
        return cls(arguments.number_or_none("recycle_tolerance", tolerance), long)

    @property
    def ends_early(self) -> bool:
        """Return whether the end of one protein's recycling may differ from another's."""
        return self != Recycling()

    def at_most(self, recycles: int, residues: int) -> int:
        """Return how many of so many passes after the first a protein gets."""
        return recycles if self.long is None or residues <= self.long[0] else min(recycles, self.long[1])


@dataclass(frozen=True)
class Kept:
    """What a prediction keeps beside structure and confidence."""

    representations: bool = True
    distogram: bool = False
    logits: bool = False
    save_recycles: bool = False  # the structures of the passes before the last


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """How to fold.  Whatever changes the result is part of the run's identity; device, chunk and kernels are not."""

    seed: int = 0
    seeds: int = 1  # how many, counted on from `seed`: a prediction with each, which are ranked
    together: bool | None = (
        None  # records of a FASTA file are chains of one complex; None: with a multimer's parameters
    )
    recycles: int | None = None  # None: the model's own
    recycling: Recycling = field(default_factory=Recycling)
    ensemble: int | None = None
    dropout: bool = False  # of the trunk, as in training
    max_msa: int | None = None  # rows of the clustered and of the extra alignment; None: as the parameters were trained
    max_extra: int | None = None
    device: str | None = None  # None: the first GPU, or the CPU
    batch: int | None = None  # queries in one pass, at most; None: where it is faster (prediction/folding.py)
    chunk: int | None = None  # rows computed at a time; None: what fits, 0: all
    offload: bool | None = None  # whether z lies in host memory; None: where nothing else fits
    memory: int | None = None  # bytes of the device that may be used at most; None: what is free
    precision: Literal["fp32", "bf16", "bf16_all", "fp16"] = "fp32"
    kernels: Kernels = "fast"  # as Plan.kernels
    representations: bool = False  # keep them in the .npz
    distogram: bool = False  # write contacts and the distogram too
    save_recycles: bool = False  # write the structures of the passes before the last too
    num_models: int | None = None  # of the parameters, at most
    keep: int | None = None  # of each query's ranked predictions, those that keep all files; None: all of them
    force: bool = False

    @property
    def kept(self) -> Kept:
        """Return what a prediction keeps in memory until it is written."""
        return Kept(self.representations, self.distogram, save_recycles=self.save_recycles)

    @property
    def alone(self) -> bool:
        """Return whether no two proteins may share a pass, since what is drawn, kept or when it ends is each's own."""
        return self.recycling.ends_early or self.dropout or self.save_recycles

    def identity_settings(self, model: Params) -> dict[str, Any]:
        """Return what decides a model's results, beside parameters, queries and seeds, as it is in the end."""
        config, sample = model.config, model.sample
        # Named only if given: folders of earlier versions can be continued.
        given = {"recycle_tolerance": self.recycling.tolerance, "max_recycles": self.recycling.long}
        given |= {name: getattr(self, name) or None for name in ("distogram", "dropout", "save_recycles")}
        return {
            "recycles": config.recycles if self.recycles is None else self.recycles,
            "ensemble": config.ensemble if self.ensemble is None else self.ensemble,
            "max_msa": sample.max_msa if self.max_msa is None else self.max_msa,
            "max_extra": sample.max_extra if self.max_extra is None else self.max_extra,
            "precision": self.precision,
            "representations": self.representations,
            **{name: value for name, value in given.items() if value is not None},
        }


def kept_of(representations: bool, distogram: bool, logits: bool, save_recycles: bool) -> Kept:
    """Return what predictions keep.  Errors: UserError for what is not True or False."""
    given = {"representations": representations, "distogram": distogram, "logits": logits}
    given["save_recycles"] = save_recycles
    return Kept(**{name: arguments.flag(name, value) for name, value in given.items()})


def passes_of(seed: int, recycles: int | None, ensemble: int | None) -> dict[str, Any]:
    """Return the numbers that `Predictor.prepare` takes.  Errors: UserError for what is none."""
    return {
        "seed": arguments.whole("seed", seed),
        "recycles": arguments.whole_or_none("recycles", recycles, 0),
        "ensemble": arguments.whole_or_none("ensemble", ensemble, 1),
    }


def batch_of(value: Any) -> int | None:
    """Return how many queries may share a pass; None for "auto".  Errors: UserError for anything else."""
    if value == "auto":
        return None
    if isinstance(value, str):
        if not (value.isdecimal() and len(value) < 6 and int(value) > 0):
            raise arguments.WrongArgument(f"--batch {value}: a number from 1 on, or auto")
        return int(value)
    return arguments.whole("batch", value, 1)
