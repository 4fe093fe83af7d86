"""Write random parameters with the names, the layout and, at full size, the shapes of published parameters."""

import io
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from tests.helpers import as_multimer, filled_model, tiny_config
from tests.model.test_openfold_files import as_openfold
from tests.model.torch_files import save
from warpfold.model.alphafold import AlphaFold, ModelConfig
from warpfold.model.weights.deepmind import PREFIX, to_deepmind
from warpfold.prediction.published import PUBLISHED
from warpfold.training.config import load_settings


def config_like(name: str, full: bool = False) -> ModelConfig:
    """Build the settings of a published model.  full: use its published sizes instead of tiny ones."""
    number = int(name.split("_")[1]) if name.startswith("model_") else 1
    if full:
        config = load_settings("multimer" if "multimer" in name else "monomer", []).model
    else:
        config = as_multimer(tiny_config(), "v3" in name) if "multimer" in name else tiny_config()
        config = replace(config, recycles=3, structure=replace(config.structure, layers=8))
    if "multimer" in name:
        return config
    templates = replace(config.templates, enabled=number < 3 and "no_templ" not in name)
    return replace(config, templates=templates, heads=replace(config.heads, pae="ptm" in name))


def write_like(name: str, folder: Path, full: bool = False) -> Path:
    """Write a file in the format of the published file of this name: DeepMind's .npz or OpenFold's .pt."""
    config = config_like(name, full)
    seed = sum(name.encode())
    torch.manual_seed(seed)
    model = AlphaFold(config) if full else filled_model(config, seed=seed)
    path = folder / PUBLISHED[name].file
    if path.suffix == ".pt":
        save(path, as_openfold(model))
    else:
        np.savez(path, **to_deepmind(model, PREFIX))  # type: ignore[arg-type]
    return path


def write_archive(path: Path, names: list[str], full: bool = False) -> Path:
    """Write a tar archive like DeepMind's: the parameter files of these names, then LICENSE."""
    with tarfile.open(path, "w") as tar:
        for name in names:
            file = write_like(name, path.parent, full)
            tar.add(file, file.name)
            file.unlink()
        licence = tarfile.TarInfo("LICENSE")
        licence.size = 4
        tar.addfile(licence, io.BytesIO(b"text"))
    return path
