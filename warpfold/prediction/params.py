"""Files of parameters: their descriptions before loading, for `predict`, and their inspection (`warpfold params`)."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from warpfold.data.features.choose import SampleConfig
from warpfold.errors import UserError, listed
from warpfold.files import check_new, file_name, sha256, write_new
from warpfold.model.alphafold import AlphaFold, ModelConfig
from warpfold.model.weights.deepmind import PREFIX, config_from_deepmind, to_deepmind
from warpfold.model.weights.files import FETCH, assumed_settings, data_settings, load_config, load_model, save_params
from warpfold.prediction.published import licence_of
from warpfold.settings import build, differences, to_dict, to_toml
from warpfold.training.first_weights import HEADS

_OFFICIAL = re.compile(r"params_model_(?P<number>\d+)(_(?P<family>ptm|multimer(_v\d+)?))?")  # DeepMind's


@dataclass(frozen=True)
class Params:
    """A file of parameters: the configuration of its model, and the sampling of its alignments."""

    name: str  # unique in a run; safe in a path
    path: Path
    digest: str  # sha256 of the file
    config: ModelConfig
    sample: SampleConfig

    @property
    def multimer(self) -> bool:
        """Return whether the model folds complexes."""
        return self.config.multimer is not None

    def summary(self) -> dict[str, Any]:
        """Return the file's entry in summary.json."""
        licence = licence_of(self.path, self.digest)
        assumed = assumed_settings(self.path)
        return {"file": self.path.name, "sha256": self.digest, "licence": licence, "assumed": assumed}


ENDINGS = (".npz", ".safetensors")
MULTIMERS = "params_model_*_multimer_v3.npz: `warpfold params fetch multimer`"  # in errors


def params_files(given: Sequence[Path], num_models: int | None = None, complexes: bool = False) -> list[Path]:
    """List files of parameters, at most `num_models`; those of a folder come in the order of their numbers.

    A folder may contain several of DeepMind's families, of which one is used: with `complexes`, the newest version of
    AlphaFold-Multimer; otherwise the models for single chains with PAE, or those without.
    Errors: UserError for a folder without parameters or with an ambiguous mixture, and for fewer than `num_models`.
    """
    chosen_files: list[Path] = []
    for path in given:
        chosen_files += _in_folder(path, complexes) if path.is_dir() else [path]
    if num_models is not None and len(chosen_files) < num_models:
        raise UserError(
            f"--num-models {num_models}: only {len(chosen_files)} matching parameter files in {given[0]}. Use "
            f"--num-models {len(chosen_files)}."
        )
    return chosen_files[:num_models]


def families_in(folder: Path) -> dict[str, list[Path]]:
    """Sort the files of parameters in a folder by DeepMind's family ("", "ptm", "multimer_v3"), or "own".

    Within a family they are in the order of the models' numbers.
    """
    files = [path for path in sorted(folder.iterdir()) if path.suffix in ENDINGS and not path.name.startswith(".")]
    families: dict[str, list[Path]] = {}
    for path in files:
        match = _OFFICIAL.fullmatch(path.stem)
        families.setdefault(match["family"] or "" if match else "own", []).append(path)
    return families


def _in_folder(folder: Path, complexes: bool) -> list[Path]:
    """Choose the files of one family in a folder."""
    families = families_in(folder)
    if not families:
        raise UserError(f"{folder}: has no parameters. Pass a folder of params_model_*.npz or .safetensors ({FETCH}).")
    if len(families) == 1:
        return next(iter(families.values()))
    multimers = sorted(name for name in families if name.startswith("multimer"))
    order = multimers[-1:] if complexes else [name for name in ("ptm", "", "own") if name in families]
    if "own" in families or not order:
        raise UserError(
            f"{folder}: has parameters of several kinds ({', '.join(paths[0].name for paths in families.values())}). "
            "Name the files."
        )
    return families[order[0]]


def read_params(paths: Sequence[Path]) -> list[Params]:
    """Describe files of parameters, in the given order, without loading them.

    The name is the file's without its ending, with the folder's name before it if files share a name.
    Errors: UserError for a file without parameters, a file that is given twice, and files with the same name and folder
    name.
    """
    stems = [file_name(path.stem) for path in paths]
    names = [
        file_name(f"{path.absolute().parent.name}_{stem}") if stems.count(stem) > 1 else stem
        for path, stem in zip(paths, stems)
    ]
    all_params: list[Params] = []
    for path, name in zip(paths, names):
        config = load_config(path)
        digest = sha256(path)
        for other in all_params:
            if other.digest == digest:
                raise UserError(f"{path}: the same parameters as {other.path}. Pass each file once.")
            if other.name.lower() == name.lower():  # some file systems ignore case
                raise UserError(f"{path}: its file and folder are named as {other.path}. Rename one of the files.")
        sample = build(SampleConfig, data_settings(path), str(path))
        all_params.append(Params(name, path, digest, config, sample))
    return all_params


def check_templates(config: ModelConfig, sample: SampleConfig, count: int) -> None:
    """Raise UserError unless a model takes `count` templates."""
    if count and not config.templates.enabled:
        raise UserError(
            "these parameters have no template parts (of AlphaFold2's, model_3 to model_5 have none). "
            "Pass others, or no templates."
        )
    if count > sample.max_templates:
        raise UserError(f"templates given: {count}, the model takes {sample.max_templates}. Leave some out.")


# ---- Inspection

WRITTEN = (".safetensors", ".npz")
RUN_PARAMS = ("params_best.safetensors", "params.safetensors")  # in the folder of a training run


@dataclass(frozen=True, kw_only=True, repr=False)
class ParamsFile:
    """The description of a file of parameters.

    heads: the heads of the model.  sample: the sampling of alignments, as far as it is known.  notes: assumptions, and
    settings that a written file does not contain.  problems: the errors that a check found.
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
    problems: tuple[str, ...] | None = None  # None: not checked
    written: Path | None = None

    def __repr__(self) -> str:
        return f"<ParamsFile {self.path}: {self.format}, {self.model}, {self.parameters:,} parameters>"

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the rows of a table for people: name, value."""
        config = self.config
        yield "file", str(self.path)
        yield "format", self.format
        yield "model", self.model
        yield "parameters", f"{self.parameters:,} in {self.tensors} tensors"
        yield "blocks", f"{config.evoformer.blocks}, before them {config.extra_blocks} of the extra alignment"
        yield "channels", f"m {config.c_m}, z {config.c_z}, s {config.c_s}"
        yield "heads", ", ".join(self.heads)
        yield "recycles", f"{config.recycles}"
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
        """Convert to values for JSON."""
        names = ("format", "model", "parameters", "tensors", "sha256", "sample", "heads", "notes", "problems")
        files = {"path": str(self.path), "written": None if self.written is None else str(self.written)}
        return {**files, **{name: getattr(self, name) for name in names}, "settings": to_dict(self.config)}

    def toml(self) -> str:
        """Return its settings as a file for `warpfold train`, based on the preset monomer or multimer."""
        base = "monomer" if self.config.multimer is None else "multimer"
        return f'base = "{base}"\n\n' + to_toml(_Sections(self.config, self.sample))


@dataclass(frozen=True)
class _Sections:
    model: ModelConfig
    data: dict[str, Any] = field(default_factory=dict)


def inspect_params(source: Path, check: bool = False, target: Path | None = None) -> ParamsFile:
    """Inspect a parameter file, check it, and write it in another format.

    source: WarpFold's .safetensors, DeepMind's .npz, OpenFold's .pt (whose code is not executed), or the folder of a
    run: the parameters of its best validation, or the last ones without validations.  check: check every number.
    target: a new file, .safetensors (WarpFold) or .npz with DeepMind's names, which other programs read.
    Errors: UserError for a file that cannot be read, tensors that do not fit, and an existing `target`.
    """
    if target is not None:
        if target.suffix not in WRITTEN:
            raise UserError(f"{target}: {' or '.join(WRITTEN)} is written. Use one of these endings.")
        check_new(target)
    if (source / "checkpoints").is_dir():
        source = next((path for path in map(source.joinpath, RUN_PARAMS) if path.is_file()), source / RUN_PARAMS[-1])
    model, sample = load_model(source), data_settings(source)
    build(SampleConfig, sample, str(source))
    digest = sha256(source)
    notes = [assumed] if (assumed := assumed_settings(source)) else []
    if target is not None:
        notes += _write(model, sample, target)
    state = model.state_dict()
    problems: list[str] = []  # loading has checked names and shapes
    if nonfinite := [name for name, tensor in state.items() if check and not bool(torch.isfinite(tensor).all())]:
        problems.append(f"not finite: {listed(nonfinite)}")
    if check and all(bool((tensor == 0).all()) for tensor in state.values()):
        problems.append("all parameters are zero")
    kind = "AlphaFold2, single chains"
    if model.config.multimer is not None:
        kind = f"AlphaFold-Multimer {'3' if model.config.evoformer.pair.fused else '1 or 2'}"
    return ParamsFile(
        path=source,
        format={".npz": "DeepMind", ".safetensors": "WarpFold"}.get(source.suffix, "OpenFold"),
        model=kind + (", with templates" if model.config.templates.enabled else ", without templates"),
        parameters=sum(tensor.numel() for tensor in state.values()),
        tensors=len(state),
        sha256=digest,
        config=model.config,
        sample=sample,
        heads=tuple(head for head in HEADS if getattr(model, head) is not None),
        notes=tuple(notes),
        problems=tuple(problems) if check else None,
        written=target,
    )


def _write(model: AlphaFold, sample: dict[str, Any], target: Path) -> list[str]:
    """Write parameters in the format of the ending; return notes on settings that the file does not contain."""
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
