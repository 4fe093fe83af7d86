"""`warpfold params`: what a file of parameters is, whether it is whole, and what it is in another format."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from warpfold.arguments import PathLike, flag, path, path_or_none
from warpfold.data.features.choose import SampleConfig
from warpfold.errors import UserError, listed
from warpfold.files import check_new, opened, write_new
from warpfold.model.alphafold import AlphaFold, ModelConfig
from warpfold.model.deepmind import PREFIX, to_deepmind
from warpfold.model.deepmind_config import config_from_deepmind
from warpfold.model.openfold import ENDINGS
from warpfold.model.weights import assumed_settings, data_settings, load_model, save_params
from warpfold.settings import build, differences, to_dict, to_toml
from warpfold.training.first_weights import HEADS

WRITTEN = (".safetensors", ".npz")


@dataclass(frozen=True, kw_only=True, repr=False)
class ParamsFile:
    """What a file of parameters is.

    heads: which there are.  sample: how its examples are drawn, as far as it is known.  notes: what had to be assumed,
    and what a file that was written does not say.  problems: what a check found wrong.
    """

    path: Path
    format: str  # WarpFold, DeepMind or OpenFold
    model: str
    parameters: int
    tensors: int
    sha256: str
    config: ModelConfig
    sample: dict[str, Any]
    heads: tuple[str, ...]
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] | None = None  # None: not looked for
    written: Path | None = None

    def __repr__(self) -> str:
        """Return it in one line."""
        return f"<ParamsFile {self.path}: {self.format}, {self.model}, {self.parameters:,} parameters>"

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the lines of a table for people: what, value."""
        c = self.config
        yield "file", str(self.path)
        yield "format", self.format
        yield "model", self.model
        yield "parameters", f"{self.parameters:,} in {self.tensors} tensors"
        yield "blocks", f"{c.evoformer.blocks}, before them {c.extra_blocks} of the extra alignment"
        yield "channels", f"m {c.c_m}, z {c.c_z}, s {c.c_s}"
        yield "heads", ", ".join(self.heads)
        yield "recycles", f"{c.recycles}"
        yield from ((name, str(self.sample[name])) for name in ("max_msa", "max_extra") if name in self.sample)
        yield "sha256", self.sha256
        yield from (("note", note) for note in self.notes)
        if self.problems is not None:
            yield from (("problem", problem) for problem in self.problems)
            yield (
                "check",
                f"{len(self.problems)} problems" if self.problems else "whole: every tensor there, all finite",
            )
        if self.written:
            yield "written", str(self.written)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        known = ("format", "model", "parameters", "tensors", "sha256", "sample", "heads", "notes", "problems")
        files = {"path": str(self.path), "written": None if self.written is None else str(self.written)}
        return {**files, **{name: getattr(self, name) for name in known}, "settings": to_dict(self.config)}

    def toml(self) -> str:
        """Return its settings as a file that `warpfold train` takes, over those of the preset monomer or multimer."""
        base = "monomer" if self.config.multimer is None else "multimer"
        return f'base = "{base}"\n\n' + to_toml(_Sections(self.config, self.sample))


@dataclass(frozen=True)
class _Sections:
    model: ModelConfig
    data: dict[str, Any] = field(default_factory=dict)


def params(file: PathLike, *, check: bool = False, out: PathLike | None = None) -> ParamsFile:
    """Inspect a parameter file, check it, and write it in another format.

    file: WarpFold's .safetensors, DeepMind's .npz, OpenFold's .pt, of which nothing is executed.  check: look at every
    number.  out: a file that is not there yet: .safetensors (WarpFold), or .npz by DeepMind's names, which others read,
    too.
    Errors: UserError for a file that cannot be read, or whose tensors do not fit, and for an `out` that exists.
    """
    source, target = path("file", file), path_or_none("out", out)
    if target is not None:
        if target.suffix not in WRITTEN:
            raise UserError(f"{target}: {' or '.join(WRITTEN)} is written; give one of these endings")
        check_new(target)
    model, sample = load_model(source), data_settings(source)
    build(SampleConfig, sample, str(source))
    with opened(source, unpack=False) as opened_file:
        digest = hashlib.file_digest(opened_file, "sha256").hexdigest()  # type: ignore[arg-type]  # it has readinto
    notes = [assumed] if (assumed := assumed_settings(source)) else []
    if target is not None:
        notes += _write(model, sample, target)
    state = model.state_dict()
    return ParamsFile(
        path=source,
        format="DeepMind" if source.suffix == ".npz" else "OpenFold" if source.suffix in ENDINGS else "WarpFold",
        model=_kind(model.config),
        parameters=sum(tensor.numel() for tensor in state.values()),
        tensors=len(state),
        sha256=digest,
        config=model.config,
        sample=sample,
        heads=tuple(head for head in HEADS if getattr(model, head) is not None),
        notes=tuple(notes),
        problems=tuple(_problems(model)) if flag("check", check) else None,
        written=target,
    )


def _kind(config: ModelConfig) -> str:
    """Return which kind of model this is."""
    kind = "AlphaFold2, single chains"
    if config.multimer is not None:
        kind = f"AlphaFold-Multimer {'3' if config.evoformer.pair.fused else '1 or 2'}"
    return kind + (", with templates" if config.templates.enabled else ", without templates")


def _problems(model: AlphaFold) -> Iterator[str]:
    """Yield what is wrong with parameters; that they are all there, and of the right shape, loading has seen."""
    bad = [name for name, tensor in model.state_dict().items() if not bool(torch.isfinite(tensor).all())]
    if bad:
        yield f"not finite: {listed(bad)}"
    if all(bool((tensor == 0).all()) for tensor in model.state_dict().values()):
        yield "all parameters are zero"


def _write(model: AlphaFold, sample: dict[str, Any], target: Path) -> list[str]:
    """Write parameters in the format of the ending; return what the file does not say."""
    if target.suffix == ".safetensors":
        write_new(target, lambda draft: save_params(draft, model, sample))
        return []
    arrays = to_deepmind(model, PREFIX)
    write_new(target, lambda draft: np.savez(draft, **arrays))  # type: ignore[arg-type]
    lost = differences(to_dict(model.config), to_dict(config_from_deepmind(arrays, str(target))), "model.")
    head = ("model.evoformer.pair.head_width", "model.templates.pair.head_width")
    if lost := [one for one in lost if not one.startswith((*head, "model.structure.dropout")) and ".rate:" not in one]:
        return [f"{target}: DeepMind's arrays do not say {listed(lost, between='; ')}: a reader takes the latter"]
    return []
