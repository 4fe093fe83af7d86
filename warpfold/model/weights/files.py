"""Read and write parameters: WarpFold's safetensors, DeepMind's params_model_*.npz (deepmind.py), OpenFold's .pt.

The suffix of the file determines the format.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from warpfold.errors import UserError
from warpfold.files import DAMAGED_ARRAYS, check_tensors, sealed_tensors
from warpfold.model.alphafold import AlphaFold, ModelConfig
from warpfold.model.weights import openfold
from warpfold.model.weights.deepmind import (
    FUSED,
    MULTIMER_POSITIONS,
    PREFIX,
    check_arrays,
    config_from_deepmind,
    from_deepmind,
    refuse,
)
from warpfold.settings import build, to_dict

FORMAT = "warpfold-1"
# For errors.
FETCH = "`warpfold params fetch` lists free ones"


@dataclass(frozen=True)
class Family:
    """DeepMind's models with the same arrays, and how they sample their alignment.

    clusters: max_msa. extra: max_extra by the model's number, which no array shows.
    """

    name: str
    clusters: int
    extra: dict[int, int]


# Supp. table 5, and CONFIG_DIFFS and CONFIG_MULTIMER of the official model/config.py. A monomer has 512 clusters. With
# templates it has 4 fewer (`reduce_msa_clusters_by_max_templates`). A ptm model has those of the model that it extends.
WITH_TEMPLATES = Family("AlphaFold2", 508, {1: 5120, 2: 1024})
WITHOUT_TEMPLATES = Family("AlphaFold2", 512, {3: 5120, 4: 5120, 5: 1024})
MULTIMER = Family("AlphaFold-Multimer 1 or 2", 252, dict.fromkeys(range(1, 6), 1152))
MULTIMER_3 = Family("AlphaFold-Multimer 3", 508, {1: 2048, 2: 2048, 3: 2048, 4: 1152, 5: 1152})


def save_params(
    path: Path | str,
    model: AlphaFold,
    data: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the parameters and the settings of `model` as safetensors, by atomic rename.

    data: the settings with which its examples were sampled. `data_settings` reads them, so that predictions sample in
    the same way. tensors: the state to write instead of the model's.
    """
    path, settings = Path(path), {"model": to_dict(model.config), "data": dict(data or {})}
    # One key only: the order of several keys would vary, and with it the bytes of the file.
    metadata = {FORMAT: json.dumps(settings)}
    state = model.state_dict() if tensors is None else tensors
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    partial = path.with_name(f"{path.name}.{uuid4().hex}.partial")
    try:
        with open(partial, "wb") as file:
            file.writelines(sealed_tensors(save(state, metadata)))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load_model(path: Path | str) -> AlphaFold:
    """Load a model from WarpFold's safetensors, DeepMind's params_model_*.npz or OpenFold's .pt.

    Raises UserError if the file has another format, or if arrays are missing, unexpected or of the wrong shape.
    """
    path = Path(path)
    if path.suffix == ".npz" and path.is_file():
        with _opened_npz(path) as file:
            params = {name.removeprefix(PREFIX): file[name] for name in file.files}
        model = AlphaFold(_deepmind_config(params, str(path)))
        from_deepmind(model, params, source=str(path))
        return model
    if path.suffix in openfold.ENDINGS and path.is_file():
        weights = openfold.read_openfold(path)
        model = AlphaFold(_openfold_config(weights, str(path)))
        load_state(model, _by_our_names(model, weights), str(path))
        return model
    model = AlphaFold(load_config(path))
    try:
        check_tensors(path)
    except ValueError as error:
        raise UserError(f"{path}: damaged ({error}); fetch it again, or name another file") from None
    with safe_open(path, framework="pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    load_state(model, state, str(path))
    return model


def without_memory(config: ModelConfig, source: str) -> AlphaFold:
    """Build the model of some settings on the meta device. Raises UserError for settings that do not form a model."""
    try:
        with torch.device("meta"):
            return AlphaFold(config)
    # torch raises TypeError for sizes beyond 64 bits.
    except (RuntimeError, ValueError, ArithmeticError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{source}: settings that make no model ({reason}); correct them, or fetch the file again"
        ) from None


def load_config(path: Path | str) -> ModelConfig:
    """Read the settings of a model from its parameter file, and check that they match the tensors' shapes.

    A model with these settings thus needs no more memory than the file's tensors. Raises UserError as `load_model`.
    """
    path = Path(path)
    if not path.is_file():
        reason = "is a folder; name the file in it" if path.is_dir() else "no such file"
        raise UserError(
            f"{path}: {reason}; give WarpFold's .safetensors, DeepMind's params_model_*.npz or OpenFold's .pt ({FETCH})"
        )
    if path.suffix in openfold.ENDINGS:
        return _openfold_config(openfold.read_openfold(path), str(path))
    if path.suffix == ".npz":
        with _opened_npz(path) as file:
            return _deepmind_config(file, str(path))
    config = build(ModelConfig, _metadata(path)["model"], str(path))
    with safe_open(path, framework="pt") as file:
        tensors = {name: _Stored.of(file.get_slice(name)) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    blocks = (config.evoformer.blocks, config.extra_blocks, config.templates.blocks)
    layers = (config.structure.sidechain_blocks, config.structure.transition_layers)
    # Each block and layer has several tensors. Without this check the model could have too many modules to build.
    if max(*blocks, *layers) > len(tensors):
        raise UserError(
            f"{path}: has {len(tensors)} tensors, and settings of {max(*blocks, *layers)} blocks; fetch it again"
        )
    check_state(without_memory(config, str(path)), tensors, str(path))
    return config


class _Stored(NamedTuple):
    """The shape of a stored tensor, and whether it has floating-point numbers."""

    shape: tuple[int, ...]
    is_real: bool

    @classmethod
    def of(cls, tensor: Any) -> "_Stored":
        """Describe a torch tensor or a slice of safetensors."""
        if isinstance(tensor, Tensor):
            return cls(tuple(tensor.shape), tensor.is_floating_point() and tensor.layout == torch.strided)
        return cls(tuple(tensor.get_shape()), str(tensor.get_dtype()).startswith(("F", "BF")))


def _metadata(path: Path) -> dict[str, Mapping[str, Any]]:
    """Read the model and data settings that WarpFold wrote into a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path}: not a safetensors file ({error}); give .safetensors, .npz or .pt parameters"
        ) from error
    if FORMAT not in metadata:
        raise UserError(f"{path}: safetensors, but not written by WarpFold (no settings of a model inside)")
    try:
        settings = json.loads(metadata[FORMAT])
        return {"model": dict(settings["model"]), "data": dict(settings.get("data", {}))}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{path}: its settings are damaged; fetch it again, or name another file") from None


def _openfold_config(weights: Mapping[str, Tensor], source: str) -> ModelConfig:
    config = openfold.config_from_openfold(weights, source)
    model = without_memory(config, source)
    check_state(model, _by_our_names(model, weights), source)
    return config


def _by_our_names(model: AlphaFold, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename OpenFold's tensors to our names. A tensor that we lack keeps its name."""
    names = {openfold.openfold_name(our_name): our_name for our_name in model.state_dict()}
    return {names.get(name, name): tensor for name, tensor in weights.items()}


def _deepmind_config(params: Mapping[str, np.ndarray], source: str) -> ModelConfig:
    arrays = {name.removeprefix(PREFIX): params[name] for name in params}
    config = config_from_deepmind(arrays, source)
    check_arrays(without_memory(config, source), arrays, source=source)
    return config


def data_settings(path: Path | str) -> dict[str, Any]:
    """Return the settings with which the examples of these parameters were sampled (keys of `SampleConfig`).

    WarpFold's files contain them. DeepMind's follow from the arrays (monomer or Multimer, its version, templates) and
    the file's name (the model's number). OpenFold's are assumed to be AlphaFold2's. `assumed_settings` describes the
    assumptions. Raises UserError for an .npz that cannot be read.
    """
    if Path(path).suffix == ".npz":
        family, number = _deepmind_model(Path(path))
        extra = family.extra[number] if number else max(family.extra.values())
        return {"max_msa": family.clusters, "max_extra": extra}
    if Path(path).suffix in openfold.ENDINGS:
        enabled = load_config(path).templates.enabled
        family = WITH_TEMPLATES if enabled else WITHOUT_TEMPLATES
        return {"max_msa": family.clusters, "max_extra": max(family.extra.values())}
    return dict(_metadata(Path(path))["data"])


def assumed_settings(path: Path | str) -> str | None:
    """Describe the assumptions of `data_settings` in one line, or return None without assumptions.

    Multimer's versions 1 and 2 cannot be distinguished. They sample and compute in the same way.
    """
    if Path(path).suffix in openfold.ENDINGS:
        rows = data_settings(path)["max_extra"]
        return f"{path}: does not tell how its alignments were sampled; {rows} rows of the extra alignment are assumed"
    if Path(path).suffix != ".npz":
        return None
    family, number = _deepmind_model(Path(path))
    rows = max(family.extra.values())
    with_fewer = [n for n in family.extra if family.extra[n] < rows]
    if number or not with_fewer:
        return None
    return (
        f"{path}: the name does not contain the number of the {family.name} model (by its arrays one of "
        f"{', '.join(map(str, family.extra))}): {rows} rows of the extra alignment are assumed, model {with_fewer[0]} "
        f"takes {family.extra[with_fewer[0]]} (max_extra); keep DeepMind's name, params_model_N.npz"
    )


def _deepmind_model(path: Path) -> tuple[Family, int | None]:
    """Return the family of DeepMind's parameters, and the model's number, 1 to 5, if the file's name has it.

    A number that contradicts the arrays is ignored (only the monomers 1 and 2 have templates).
    """
    with _opened_npz(path) as file:
        names = {name.removeprefix(PREFIX) for name in file.files}
    if MULTIMER_POSITIONS in names:
        family = MULTIMER_3 if FUSED in names else MULTIMER
    else:
        family = WITH_TEMPLATES if any("/template_embedding/" in name for name in names) else WITHOUT_TEMPLATES
    match = re.search(r"model_([1-5])(?![0-9])", path.stem)
    number = int(match[1]) if match else None
    return family, number if number in family.extra else None


def load_state(model: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Load a state dict. Raises UserError if tensors are missing, unexpected or of the wrong shape."""
    check_state(model, state, source)
    model.load_state_dict(dict(state), strict=True)


def check_state(model: nn.Module, state: Mapping[str, "_Stored | Tensor"], source: str) -> None:
    """Raise UserError if tensors are missing, unexpected or of the wrong shape."""
    expected = model.state_dict()
    stored = {name: x if isinstance(x, _Stored) else _Stored.of(x) for name, x in state.items()}
    misshapen = [
        f"{name} {list(stored[name].shape)}, expected {list(expected[name].shape)}"
        if stored[name].is_real
        else f"{name}, which has no real numbers"
        for name in sorted(expected.keys() & stored.keys())
        if tuple(expected[name].shape) != stored[name].shape or not stored[name].is_real
    ]
    refuse(source, sorted(expected.keys() - stored.keys()), sorted(stored.keys() - expected.keys()), misshapen)


@contextmanager
def _opened_npz(path: Path) -> Iterator[Any]:
    """Open an .npz, whose arrays are read on access. Raises UserError if it is missing, damaged or another format."""
    try:
        with np.load(path, allow_pickle=False) as file:
            yield file
    except DAMAGED_ARRAYS as error:
        # For other formats NumPy's message suggests unsafe loading, so it is replaced.
        reason = "no archive of arrays" if isinstance(error, ValueError) else error
        raise UserError(f"{path}: not a readable .npz ({reason}); fetch it again, or name another file") from error
