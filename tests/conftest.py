"""What tests of several rooms share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers import tiny_model
from warpfold.model.template import TemplateConfig
from warpfold.model.weights import save_params


@pytest.fixture(scope="session")
def tiny_params(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of random parameters of the tiny model: one recycle, a PAE head, no templates."""
    path = tmp_path_factory.mktemp("params") / "tiny.safetensors"
    save_params(path, tiny_model(templates=TemplateConfig(enabled=False)))
    return path


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute with one thread, as other processes of a test do: sums of another number are rounded otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
