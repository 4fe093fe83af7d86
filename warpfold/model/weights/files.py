"""Parameters in files: WarpFold's safetensors, DeepMind's params_model_*.npz (deepmind.py), OpenFold's .pt.

The ending says which it is.
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
FETCH = "`warpfold params fetch` lists free ones"  # in errors


@dataclass(frozen=True)
class Family:
    """Models of DeepMind's whose arrays are alike, and how they sample their alignment."""

    name: str
    clusters: int  # max_msa
    extra: dict[int, int]  # max_extra, by the model's number, which no array shows


# Supp. table 5, and CONFIG_DIFFS and CONFIG_MULTIMER of the official model/config.py.  A monomer has 512 clusters, one
# with templates as many less its 4 (`reduce_msa_clusters_by_max_templates`); a ptm model is like the one it extends.
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

    data: the settings by which its examples were drawn; `data_settings` reads them, so that folding draws alike.
    tensors: a copy of its state to write in place of what it is now.
    """
    path, settings = Path(path), {"model": to_dict(model.config), "data": dict(data or {})}
    metadata = {FORMAT: json.dumps(settings)}  # one key: the order of several would vary, and the file's bytes with it
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
    """Load a model from WarpFold's safetensors, DeepMind's params_model_*.npz or OpenFold's .pt, strictly.

    Errors: UserError for a file that is none of these, and for arrays that are missing, surplus or misshapen, named.
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
    """Return the model of some settings, of which nothing is allocated.  Errors: UserError if they make no model."""
    try:
        with torch.device("meta"):
            return AlphaFold(config)
    except (RuntimeError, ValueError, ArithmeticError, TypeError) as error:  # TypeError: of torch, beyond 64 bits
        why = " ".join(str(error).split())
        raise UserError(
            f"{source}: settings that make no model ({why}); correct them, or fetch the file again"
        ) from None


def load_config(path: Path | str) -> ModelConfig:
    """Return the settings of the model whose parameters a file holds, which fit the shapes of what is in it.

    A model of these settings needs no more memory than the file says it has.  Errors: UserError as in `load_model`.
    """
    path = Path(path)
    if not path.is_file():
        what = "is a folder; name the file in it" if path.is_dir() else "no such file"
        raise UserError(
            f"{path}: {what}; give WarpFold's .safetensors, DeepMind's params_model_*.npz or OpenFold's .pt ({FETCH})"
        )
    if path.suffix in openfold.ENDINGS:
        return _openfold_config(openfold.read_openfold(path), str(path))
    if path.suffix == ".npz":
        with _opened_npz(path) as file:
            return _deepmind_config(file, str(path))
    config = build(ModelConfig, _metadata(path)["model"], str(path))
    with safe_open(path, framework="pt") as file:
        tensors = {name: _Held.of(file.get_slice(name)) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    blocks = (config.evoformer.blocks, config.extra_blocks, config.templates.blocks)
    layers = (config.structure.sidechain_blocks, config.structure.transition_layers)
    if max(*blocks, *layers) > len(tensors):  # each would have several
        raise UserError(
            f"{path}: has {len(tensors)} tensors, and settings of {max(*blocks, *layers)} blocks; fetch it again"
        )
    check_state(without_memory(config, str(path)), tensors, str(path))
    return config


class _Held(NamedTuple):
    """What a file says of a tensor."""

    shape: tuple[int, ...]
    is_real: bool

    @classmethod
    def of(cls, tensor: Any) -> "_Held":
        """Return it of a tensor of torch's, or a slice of safetensors."""
        if isinstance(tensor, Tensor):
            return cls(tuple(tensor.shape), tensor.is_floating_point() and tensor.layout == torch.strided)
        return cls(tuple(tensor.get_shape()), str(tensor.get_dtype()).startswith(("F", "BF")))


def _metadata(path: Path) -> dict[str, Mapping[str, Any]]:
    """Return the model and data settings that WarpFold wrote into a safetensors file."""
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
        found = json.loads(metadata[FORMAT])
        return {"model": dict(found["model"]), "data": dict(found.get("data", {}))}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{path}: its settings are damaged; fetch it again, or name another file") from None


def _openfold_config(weights: Mapping[str, Tensor], source: str) -> ModelConfig:
    config = openfold.config_from_openfold(weights, source)
    model = without_memory(config, source)
    check_state(model, _by_our_names(model, weights), source)
    return config


def _by_our_names(model: AlphaFold, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return OpenFold's tensors by the names of ours; one that we lack keeps its name."""
    names = {openfold.openfold_name(ours): ours for ours in model.state_dict()}
    return {names.get(name, name): tensor for name, tensor in weights.items()}


def _deepmind_config(params: Mapping[str, np.ndarray], source: str) -> ModelConfig:
    arrays = {name.removeprefix(PREFIX): params[name] for name in params}
    config = config_from_deepmind(arrays, source)
    check_arrays(without_memory(config, source), arrays, source=source)
    return config


def data_settings(path: Path | str) -> dict[str, Any]:
    """Return the settings by which the examples of these parameters were drawn (keys of `SampleConfig`).

    WarpFold's are in the file.  DeepMind's follow from the arrays (monomer or Multimer, its version, templates) and the
    file's name (the model's number); OpenFold's are taken to be AlphaFold2's.  `assumed_settings` says what is assumed.
    Errors: UserError for an .npz that cannot be read.
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
    """Return the assumptions of `data_settings` in one line; None if there were none.

    Multimer's versions 1 and 2 cannot be told apart, and need not be: they sample, and compute, alike.
    """
    if Path(path).suffix in openfold.ENDINGS:
        rows = data_settings(path)["max_extra"]
        return f"{path}: does not say how its alignments were sampled: {rows} rows of the extra alignment are assumed"
    if Path(path).suffix != ".npz":
        return None
    family, number = _deepmind_model(Path(path))
    rows = max(family.extra.values())
    least = [n for n in family.extra if family.extra[n] < rows]
    if number or not least:
        return None
    return (
        f"{path}: its name does not say which of {family.name}'s models it is (by its arrays one of "
        f"{', '.join(map(str, family.extra))}): {rows} rows of the extra alignment are assumed, model {least[0]} takes "
        f"{family.extra[least[0]]} (max_extra); keep DeepMind's name, params_model_N.npz"
    )


def _deepmind_model(path: Path) -> tuple[Family, int | None]:
    """Return the family of DeepMind's parameters, and the model's number, 1 to 5, if the name has it.

    A number that the arrays contradict (of monomers only models 1 and 2 have templates) is ignored.
    """
    with _opened_npz(path) as file:
        names = {name.removeprefix(PREFIX) for name in file.files}
    if MULTIMER_POSITIONS in names:
        family = MULTIMER_3 if FUSED in names else MULTIMER
    else:
        family = WITH_TEMPLATES if any("/template_embedding/" in name for name in names) else WITHOUT_TEMPLATES
    found = re.search(r"model_([1-5])(?![0-9])", path.stem)
    number = int(found[1]) if found else None
    return family, number if number in family.extra else None


def load_state(model: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Load a state dict strictly: UserError that names missing, surplus and misshapen tensors."""
    check_state(model, state, source)
    model.load_state_dict(dict(state), strict=True)


def check_state(model: nn.Module, state: Mapping[str, "_Held | Tensor"], source: str) -> None:
    """Raise UserError that names the tensors that are missing, surplus or misshapen."""
    own = model.state_dict()
    held = {name: one if isinstance(one, _Held) else _Held.of(one) for name, one in state.items()}
    misshapen = [
        f"{name} {list(held[name].shape)}, expected {list(own[name].shape)}"
        if held[name].is_real
        else f"{name}, which has no real numbers"
        for name in sorted(own.keys() & held.keys())
        if tuple(own[name].shape) != held[name].shape or not held[name].is_real
    ]
    refuse(source, sorted(own.keys() - held.keys()), sorted(held.keys() - own.keys()), misshapen)


@contextmanager
def _opened_npz(path: Path) -> Iterator[Any]:
    """Open a file of arrays, read as they are asked for; UserError where it is missing, broken or something else."""
    try:
        with np.load(path, allow_pickle=False) as file:
            yield file
    except DAMAGED_ARRAYS as error:
        # Of what is no archive NumPy says how to load it unsafely.
        why = "no archive of arrays" if isinstance(error, ValueError) else error
        raise UserError(f"{path}: not a readable .npz ({why}); fetch it again, or name another file") from error
