"""Parameters in files: WarpFold's safetensors, and DeepMind's params_model_*.npz (read through model/deepmind.py)."""

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from warpfold.errors import UserError
from warpfold.model.alphafold import AlphaFold, ModelConfig
from warpfold.model.deepmind import PREFIX, config_from_deepmind, from_deepmind, refuse
from warpfold.settings import build, to_dict

FORMAT = "warpfold-1"


def save_params(path: Path, model: AlphaFold, data: Mapping[str, Any] | None = None) -> None:
    """Write the parameters and the settings of `model` as safetensors, by atomic rename.

    data: the settings by which its examples were drawn; whoever folds with it should draw alike (`data_settings`).
    """
    settings = {"model": to_dict(model.config), "data": dict(data or {})}
    metadata = {FORMAT: json.dumps(settings)}  # of several keys the order would vary, and with it the bytes
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    partial = path.with_name(f"{path.name}.{uuid4().hex}.partial")
    try:
        partial.write_bytes(save(tensors, metadata))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load_model(path: Path | str) -> AlphaFold:
    """A model from WarpFold's safetensors or from DeepMind's params_model_*.npz (monomer, ptm), loaded strictly.

    Errors: UserError for a file that is neither, and for arrays that are missing, surplus or misshapen, all named.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file; give WarpFold's .safetensors or DeepMind's params_model_*.npz")
    if path.suffix == ".npz":
        return _load_npz(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a safetensors file ({error}); give .safetensors or .npz parameters") from error
    if FORMAT not in metadata:
        raise UserError(f"{path}: safetensors, but not written by WarpFold (no settings of a model inside)")
    model = AlphaFold(build(ModelConfig, json.loads(metadata[FORMAT])["model"], str(path)))
    load_state(model, state, str(path))
    return model


def data_settings(path: Path | str) -> dict[str, Any]:
    """The settings by which the examples of WarpFold's parameters were drawn; none for those of DeepMind."""
    if Path(path).suffix == ".npz":
        return {}
    with safe_open(path, framework="pt") as file:
        return dict(json.loads((file.metadata() or {}).get(FORMAT, "{}")).get("data", {}))


def load_state(model: nn.Module, state: Mapping[str, torch.Tensor], source: str) -> None:
    """`load_state_dict`, strictly: UserError that names every missing, surplus and misshapen tensor."""
    own = model.state_dict()
    misshapen = [
        f"{name} {list(state[name].shape)}, expected {list(own[name].shape)}"
        for name in sorted(own.keys() & state.keys())
        if own[name].shape != state[name].shape
    ]
    refuse(source, sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys()), misshapen)
    model.load_state_dict(dict(state), strict=True)


def _load_npz(path: Path) -> AlphaFold:
    try:
        with np.load(path, allow_pickle=False) as file:
            params = {name: file[name] for name in file.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: not a readable .npz ({error})") from error
    model = AlphaFold(config_from_deepmind(params, str(path)))
    from_deepmind(model, {k.removeprefix(PREFIX): v for k, v in params.items()}, source=str(path))
    return model
