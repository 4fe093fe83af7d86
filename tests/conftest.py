"""What tests of several rooms share."""

from pathlib import Path

import pytest

from tests.helpers import tiny_model
from warpfold.model.template import TemplateConfig
from warpfold.model.weights import save_params


@pytest.fixture(scope="session")
def tiny_params(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of random parameters of the tiny model: one recycle, a PAE head, no templates."""
    path = tmp_path_factory.mktemp("params") / "tiny.safetensors"
    save_params(path, tiny_model(templates=TemplateConfig(enabled=False)))
    return path
