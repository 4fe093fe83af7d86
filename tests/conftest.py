"""What tests of several rooms share."""

from pathlib import Path

import pytest
import torch

from warpfold.model.alphafold import AlphaFold, HeadsConfig, ModelConfig
from warpfold.model.evoformer import EvoformerConfig
from warpfold.model.structure import StructureConfig
from warpfold.model.template import TemplateConfig
from warpfold.model.weights import save_params


@pytest.fixture(scope="session")
def tiny_params(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of random parameters of a whole, very small model with a PAE head."""
    config = ModelConfig(
        c_m=16,
        c_z=8,
        c_s=16,
        c_e=8,
        recycles=1,
        evoformer=EvoformerConfig(blocks=1, heads=2),
        extra_blocks=1,
        templates=TemplateConfig(enabled=False),
        structure=StructureConfig(layers=2, c=16, heads=2, sidechain_c=8),
        heads=HeadsConfig(pae=True, plddt_c=8),
    )
    torch.manual_seed(0)
    model = AlphaFold(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # no zero of the initialisation hides a path
    path = tmp_path_factory.mktemp("params") / "tiny.safetensors"
    save_params(path, model)
    return path
